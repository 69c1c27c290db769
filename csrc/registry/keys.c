/* keys.c: which entry a key has: look up, add, replace, remove. See registry.h and state.h. */
#include <assert.h>
#include <string.h>

#include "base/log.h"
#include "registry/state.h"

/* --- lookup --- */

static int registry_find(const mp_registry *registry, const char *key, bool *found) {
    mp_assert_held(&registry->lock);
    int low = 0, high = registry->slot_count;
    *found = false;
    while (low < high) {
        int middle = low + (high - low) / 2;
        int order = strcmp(mp_entry_key(registry->slots[middle].current), key);
        if (order == 0) {
            *found = true;
            return middle;
        }
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns a draining entry of the key, at most as new as entry number `newest`, or NULL. */
static mp_entry *find_leaving(const mp_registry *registry, const char *key, uint64_t newest) {
    mp_assert_held(&registry->lock);
    for (int i = 0; i < registry->leaving_count; i++)
        if (registry->leaving[i]->number <= newest && strcmp(mp_entry_key(registry->leaving[i]), key) == 0)
            return registry->leaving[i];
    return NULL;
}

/* Makes room for one more item in a growing array. `what` names it in the error. */
static mp_status registry_reserve(void **array, int count, int *capacity, size_t item, const char *what,
                                  mp_error *error) {
    if (count < *capacity)
        return MP_OK;
    int larger = *capacity ? *capacity * 2 : 16;
    void *grown = mp_realloc(*array, (size_t)larger * item, MP_TAG_POOL);
    if (!grown)
        return mp_fail_memory(error, (size_t)larger * item, what);
    *array = grown;
    *capacity = larger;
    return MP_OK;
}

static mp_status fail_unknown(const char *key, mp_error *error) {
    return mp_fail(error, MP_UNKNOWN_MODEL, "no model has the key \"%s\"", key);
}

mp_status mp_registry_refuse_closed(mp_registry *registry, mp_error *error) {
    mp_assert_held(&registry->lock);
    if (registry->closing == OPEN && !atomic_load(&registry->refusing))
        return MP_OK;
    return mp_fail(error, MP_SHUTTING_DOWN, "the pool is shutting down");
}

/* Must not hold the lock. Looks an entry up and returns a reference. Increments `inside` until the caller calls
 * registry_leave. */
mp_status mp_registry_enter(mp_registry *registry, const char *key, bool want_incoming, mp_entry **entry,
                                mp_error *error) {
    mp_assert_not_held(&registry->lock);
    mp_entry *resumed = NULL;
    *entry = NULL;
    mp_mutex_lock(&registry->lock);
    bool drains = false;
    mp_status status = mp_registry_refuse_closed(registry, error);
    if (status == MP_OK) {
        bool found;
        int at = registry_find(registry, key, &found);
        if (found) {
            slot *slot = &registry->slots[at];
            drains = registry->drains;
            registry->drains = false;
            *entry = mp_entry_pin(want_incoming && slot->incoming ? slot->incoming : slot->current);
            registry->inside++;
            if (slot->resume)
                resumed = mp_entry_pin(slot->incoming);
            slot->resume = false;
        } else {
            status = fail_unknown(key, error);
        }
    }
    mp_mutex_unlock(&registry->lock);
    if (resumed)
        mp_entry_start(resumed);
    mp_entry_unpin(resumed);
    if (drains)
        mp_maintenance_at(&registry->services->maintenance, registry->services->pool, mp_sys_now_ns());
    return status;
}

/* Must not hold the lock. `entry`: NULL if the operation was on none. */
void mp_registry_leave(mp_registry *registry, mp_entry *entry) {
    mp_assert_not_held(&registry->lock);
    mp_mutex_lock(&registry->lock);
    if (--registry->inside == 0 && registry->closing != OPEN)
        mp_cond_broadcast(&registry->changed);
    mp_mutex_unlock(&registry->lock);
    mp_entry_unpin(entry);
}

/* --- events reported by entries --- */

/* Must hold the lock. Returns the slot that has this entry as its replacement, or NULL. */
static slot *slot_of_incoming(mp_registry *registry, const mp_entry *entry) {
    mp_assert_held(&registry->lock);
    bool found;
    int at = registry_find(registry, mp_entry_key(entry), &found);
    return found && registry->slots[at].incoming == entry ? &registry->slots[at] : NULL;
}

/* Must hold the lock. Moves the reference to the list of draining entries. mp_registry_add reserved the room. */
static void start_leaving(mp_registry *registry, mp_entry *entry) {
    mp_assert_held(&registry->lock);
    assert(registry->leaving_count < registry->leaving_capacity);
    registry->leaving[registry->leaving_count++] = entry;
}

/* Must hold the lock. Takes the entry off the list of draining entries and returns the list's reference, or NULL if the
 * entry is not listed. */
static mp_entry *end_leaving(mp_registry *registry, mp_entry *entry) {
    mp_assert_held(&registry->lock);
    for (int i = 0; i < registry->leaving_count; i++) {
        if (registry->leaving[i] != entry)
            continue;
        registry->leaving[i] = registry->leaving[--registry->leaving_count];
        return entry;
    }
    return NULL;
}

/* Must hold the lock. The slot has no replacement any more. */
static void end_incoming(slot *slot) {
    slot->incoming = NULL;
    if (slot->staged)
        mp_entry_hold(slot->current, false);
    slot->staged = slot->resume = false;
}

void mp_registry_on_event(mp_registry *registry, mp_entry *entry, mp_entry_event event) {
    mp_assert_not_held(&registry->lock);
    mp_entry *old = NULL, *gone = NULL;
    mp_mutex_lock(&registry->lock);
    slot *slot = event == MP_ENTRY_GONE ? NULL : slot_of_incoming(registry, entry);
    if (slot && event == MP_ENTRY_LOADED && slot->staged)
        slot = NULL; /* mp_registry_commit makes it the current entry */
    if (slot) {
        old = event == MP_ENTRY_LOADED ? slot->current : entry;
        if (event == MP_ENTRY_LOADED)
            slot->current = entry;
        end_incoming(slot);
        start_leaving(registry, mp_entry_pin(old));
    }
    if (event == MP_ENTRY_GONE)
        gone = end_leaving(registry, entry);
    mp_mutex_unlock(&registry->lock);
    if (old) {
        mp_log(event == MP_ENTRY_LOADED ? MP_LOG_INFO : MP_LOG_WARNING,
               event == MP_ENTRY_LOADED ? "Replaced %s" : "%s was not replaced", mp_entry_key(entry));
        mp_entry_remove(old);
        mp_entry_unpin(old);
    }
    mp_entry_unpin(gone);
}

/* --- add, replace, remove --- */

static mp_status registry_check_key(const char *key, mp_error *error) {
    size_t length = strlen(key), most = sizeof(((mp_entry *)NULL)->key) - 1;
    if (length >= 1 && length <= most)
        return MP_OK;
    return mp_fail(error, MP_INVALID_ARGUMENT, "`key` must have 1 to %zu bytes, got %zu", most, length);
}

/* Must hold the lock. Moves an entry of a slot to the list of draining entries. After unlocking, the caller must remove
 * *replaced and drop the reference. */
static void registry_replace(mp_registry *registry, mp_entry *entry, mp_entry **replaced) {
    mp_assert_held(&registry->lock);
    *replaced = entry;
    start_leaving(registry, mp_entry_pin(entry));
}

/* Must hold the lock. On success takes over the caller's reference to `entry`. After unlocking, the caller must remove
 * both entries of `replaced` and start *loading, if not NULL. */
static mp_status registry_put(mp_registry *registry, mp_entry *entry, mp_add add, mp_entry *replaced[2],
                              mp_entry **loading, mp_error *error) {
    mp_assert_held(&registry->lock);
    const char *key = mp_entry_key(entry);
    MP_TRY(mp_registry_refuse_closed(registry, error));
    bool found;
    int at = registry_find(registry, key, &found);
    if (found && add == MP_ADD_NEW)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`key` must be new, got \"%s\", which exists already; pass `replace` to load another model "
                       "under it", key);
    /* Reserve room for every entry that may drain later: two per slot. */
    int most = registry->leaving_count + 2 * registry->slot_count + 2;
    while (registry->leaving_capacity < most)
        MP_TRY(registry_reserve((void **)&registry->leaving, registry->leaving_capacity, &registry->leaving_capacity,
                                sizeof(*registry->leaving), "the list of entries", error));
    if (!found) {
        MP_TRY(registry_reserve((void **)&registry->slots, registry->slot_count, &registry->slot_capacity, sizeof(slot),
                                "the list of keys", error));
        memmove(&registry->slots[at + 1], &registry->slots[at], (size_t)(registry->slot_count - at) * sizeof(slot));
        registry->slots[at] = (slot){.current = entry};
        registry->slot_count++;
        return MP_OK;
    }
    slot *slot = &registry->slots[at];
    if (slot->incoming) { /* the latest replacement wins */
        registry_replace(registry, slot->incoming, &replaced[0]);
        end_incoming(slot);
    }
    if (add != MP_ADD_STAGED && !mp_entry_in_use(slot->current)) {
        registry_replace(registry, slot->current, &replaced[1]);
        slot->current = entry;
    } else {
        slot->incoming = entry;
        slot->staged = add == MP_ADD_STAGED;
        if (slot->staged)
            mp_entry_hold(slot->current, true);
        else
            *loading = mp_entry_pin(entry);
    }
    registry->inside += replaced[0] || replaced[1] || *loading;
    return MP_OK;
}

mp_status mp_registry_add(mp_registry *registry, const char *key, const mp_loader *loader, mp_add add,
                          mp_error *error) {
    mp_status status = registry_check_key(key, error);
    if (status != MP_OK) {
        loader->ops->destroy(loader->self);
        return status;
    }
    mp_entry *entry, *replaced[2] = {NULL, NULL}, *loading = NULL;
    MP_TRY(mp_entry_create(registry->services, key, loader, &entry, error));
    mp_mutex_lock(&registry->lock);
    int inside = registry->inside;
    status = registry_put(registry, entry, add, replaced, &loading, error);
    inside = registry->inside - inside;
    mp_mutex_unlock(&registry->lock);
    if (status != MP_OK)
        mp_entry_unpin(entry);
    for (int i = 0; i < 2; i++) {
        if (!replaced[i])
            continue;
        mp_entry_remove(replaced[i]);
        mp_entry_unpin(replaced[i]);
    }
    if (loading)
        mp_entry_start(loading);
    if (inside)
        mp_registry_leave(registry, loading);
    return status;
}

/* Must hold the lock. Returns the slot of a key if an entry with this revision is staged there, or NULL. Sets
 * *committed if it is the current entry. */
static slot *staged_slot(mp_registry *registry, const char *key, uint64_t revision, bool *committed) {
    mp_assert_held(&registry->lock);
    bool found;
    int at = registry_find(registry, key, &found);
    slot *slot = found ? &registry->slots[at] : NULL;
    *committed = slot && slot->current->revision == revision;
    return slot && slot->staged && slot->incoming->revision == revision ? slot : NULL;
}

/* Must not hold the lock. Ends an operation that took `entry` off its slot: finishes its requests and frees it. */
static void remove_taken(mp_registry *registry, mp_entry *entry) {
    mp_assert_not_held(&registry->lock);
    mp_entry_remove(entry);
    mp_registry_leave(registry, entry);
}

mp_status mp_registry_commit(mp_registry *registry, const char *const *keys, int count, uint64_t revision,
                             mp_error *error) {
    mp_entry *old[MP_COMMIT_MAX] = {0};
    bool committed;
    assert(count <= MP_COMMIT_MAX);
    mp_mutex_lock(&registry->lock);
    mp_status status = mp_registry_refuse_closed(registry, error);
    for (int i = 0; i < count && status == MP_OK; i++)
        if (!staged_slot(registry, keys[i], revision, &committed) && !committed)
            status = mp_fail(error, MP_SEND, "%s: the staged model was replaced or removed, or its load failed",
                             keys[i]);
    for (int i = 0; i < count && status == MP_OK; i++) {
        slot *slot = staged_slot(registry, keys[i], revision, &committed);
        if (!slot)
            continue;
        mp_entry *entry = slot->incoming;
        end_incoming(slot);
        old[i] = slot->current;
        slot->current = entry;
        start_leaving(registry, mp_entry_pin(old[i]));
        registry->inside++;
    }
    mp_mutex_unlock(&registry->lock);
    for (int i = 0; i < count; i++) {
        if (!old[i])
            continue;
        mp_log(MP_LOG_INFO, "Replaced %s", keys[i]);
        remove_taken(registry, old[i]);
    }
    return status;
}

bool mp_registry_withdraw(mp_registry *registry, const char *key, uint64_t revision) {
    bool committed;
    mp_mutex_lock(&registry->lock);
    slot *slot = staged_slot(registry, key, revision, &committed);
    mp_entry *entry = slot ? slot->incoming : NULL;
    if (slot) {
        end_incoming(slot);
        start_leaving(registry, mp_entry_pin(entry));
        registry->inside++;
    }
    mp_mutex_unlock(&registry->lock);
    if (entry)
        remove_taken(registry, entry);
    return !committed;
}

/* Waits until an entry on which mp_entry_remove was called is gone. */
static mp_status wait_gone(mp_registry *registry, mp_entry *entry, uint64_t deadline_ns, mp_error *error) {
    mp_status status = mp_entry_wait_gone(entry, deadline_ns, error);
    if (status != MP_OK)
        return status;
    mp_mutex_lock(&registry->lock); /* MP_ENTRY_GONE does the same, but possibly after this call has returned */
    mp_entry *gone = end_leaving(registry, entry);
    mp_mutex_unlock(&registry->lock);
    mp_entry_unpin(gone);
    return MP_OK;
}

/* Waits until all draining entries of the key with numbers up to `newest` are gone: a model that was removed, its
 * replacement if one was loading or staged, and models that these two had replaced. */
static mp_status wait_all_gone(mp_registry *registry, const char *key, uint64_t newest, uint64_t deadline_ns,
                               mp_error *error) {
    mp_status status = MP_OK;
    for (mp_entry *entry; status == MP_OK;) {
        mp_mutex_lock(&registry->lock);
        if ((entry = find_leaving(registry, key, newest)))
            mp_entry_pin(entry);
        mp_mutex_unlock(&registry->lock);
        if (!entry)
            break;
        status = wait_gone(registry, entry, deadline_ns, error);
        mp_entry_unpin(entry);
    }
    return status;
}

mp_status mp_registry_remove(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error) {
    mp_entry *taken[2] = {NULL, NULL}; /* the current entry and its replacement */
    mp_mutex_lock(&registry->lock);
    mp_status status = mp_registry_refuse_closed(registry, error);
    if (status == MP_OK) {
        bool found;
        int at = registry_find(registry, key, &found);
        if (found) {
            taken[0] = registry->slots[at].current;
            taken[1] = registry->slots[at].incoming;
            end_incoming(&registry->slots[at]);
            for (int i = 0; i < 2 && taken[i]; i++)
                start_leaving(registry, mp_entry_pin(taken[i]));
            memmove(&registry->slots[at], &registry->slots[at + 1],
                    (size_t)(registry->slot_count - at - 1) * sizeof(slot));
            registry->slot_count--;
        } else if (!find_leaving(registry, key, UINT64_MAX)) { /* else an earlier caller gave up waiting */
            status = fail_unknown(key, error);
        }
    }
    registry->inside += status == MP_OK;
    uint64_t newest = mp_entry_newest();
    mp_mutex_unlock(&registry->lock);
    if (status != MP_OK)
        return status;
    for (int i = 0; i < 2 && taken[i]; i++) {
        mp_entry_remove(taken[i]);
        mp_entry_unpin(taken[i]);
    }
    status = wait_all_gone(registry, key, newest, deadline_ns, error);
    mp_registry_leave(registry, NULL);
    return status;
}

mp_status mp_registry_wait_removed(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error) {
    mp_mutex_lock(&registry->lock);
    registry->inside++;
    uint64_t newest = mp_entry_newest();
    mp_mutex_unlock(&registry->lock);
    mp_status status = wait_all_gone(registry, key, newest, deadline_ns, error);
    mp_registry_leave(registry, NULL);
    return status;
}
