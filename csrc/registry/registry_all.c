/* registry_all.c: operations on all entries of a registry. Each copies the list under the lock and then works without
 * the lock. See registry.h and state.h. */
#include "base/intervals.h"
#include "registry/registry.h"
#include "registry/state.h"

/* --- a copy of all entries, each with a reference --- */

typedef struct snapshot {
    mp_entry **entries;
    int count;
} snapshot;

/* Must hold the lock. Copies the current entries; with `all`, also replacements being loaded and draining entries.
 * Returns false if memory is refused. */
static bool take_snapshot(mp_registry *registry, bool all, snapshot *copy) {
    mp_assert_held(&registry->lock);
    int most = registry->slot_count * 2 + registry->leaving_count;
    *copy = (snapshot){mp_alloc_array((size_t)most, sizeof(mp_entry *), MP_TAG_POOL), 0};
    if (!copy->entries)
        return false;
    for (int i = 0; i < registry->slot_count; i++) {
        copy->entries[copy->count++] = mp_entry_pin(registry->slots[i].current);
        if (all && registry->slots[i].incoming)
            copy->entries[copy->count++] = mp_entry_pin(registry->slots[i].incoming);
    }
    for (int i = 0; all && i < registry->leaving_count; i++)
        copy->entries[copy->count++] = mp_entry_pin(registry->leaving[i]);
    return true;
}

static void drop_snapshot(snapshot *copy) {
    for (int i = 0; i < copy->count; i++)
        mp_entry_unpin(copy->entries[i]);
    mp_free(copy->entries);
}

/* --- memory; must not hold the lock --- */

static bool take_open_snapshot(mp_registry *registry, snapshot *copy) {
    mp_assert_not_held(&registry->lock);
    mp_mutex_lock(&registry->lock);
    bool taken = registry->closing == OPEN && take_snapshot(registry, true, copy);
    mp_mutex_unlock(&registry->lock);
    return taken;
}

/* Returns the result of `measure` for all entries; 0 if the registry is closing. */
static uint64_t reclaimer_measured(mp_registry *registry, const void *asker,
                                   uint64_t (*measure)(mp_entry **entries, int count, const void *asker)) {
    mp_assert_not_held(&registry->lock);
    snapshot copy;
    if (!take_open_snapshot(registry, &copy))
        return 0;
    uint64_t bytes = measure(copy.entries, copy.count, asker);
    drop_snapshot(&copy);
    return bytes;
}

static uint64_t reclaimer_possible(void *arg, const void *asker) {
    return reclaimer_measured(arg, asker, mp_upkeep_possible);
}

static uint64_t reclaimer_later(void *arg, const void *asker) {
    return reclaimer_measured(arg, asker, mp_upkeep_later);
}

static size_t reclaimer_holders(void *arg, char *text, size_t size) {
    snapshot copy;
    if (!take_open_snapshot(arg, &copy))
        return 0;
    size_t length = mp_upkeep_holders(copy.entries, copy.count, text, size);
    drop_snapshot(&copy);
    return length;
}

static uint64_t reclaimer_reclaim(void *arg, const mp_shortage *shortage, bool whole) {
    snapshot copy;
    if (!take_open_snapshot(arg, &copy))
        return 0;
    uint64_t coming = mp_upkeep_reclaim(copy.entries, copy.count, shortage, whole);
    drop_snapshot(&copy);
    return coming;
}

mp_reclaimer mp_registry_reclaimer(mp_registry *registry) {
    return (mp_reclaimer){
        .reclaim = reclaimer_reclaim, .possible = reclaimer_possible, .later = reclaimer_later,
        .holders = reclaimer_holders, .arg = registry};
}

/* --- upkeep, and the caller's visits; must not hold the lock --- */

uint64_t mp_registry_sweep(void *arg, uint64_t now_ns) {
    mp_registry *registry = arg;
    snapshot copy;
    mp_mutex_lock(&registry->lock);
    bool taken = take_snapshot(registry, true, &copy);
    mp_mutex_unlock(&registry->lock);
    if (!taken)
        return now_ns + MP_BACKOFF_FIRST_NS; /* memory for the copy was refused */
    uint64_t next = mp_upkeep_sweep(&registry->upkeep, registry->services, copy.entries, copy.count, now_ns);
    drop_snapshot(&copy);
    return next;
}

mp_status mp_registry_visit(mp_registry *registry, void (*visit)(void *arg, const mp_entry_info *info), void *arg,
                            mp_error *error) {
    snapshot copy;
    mp_mutex_lock(&registry->lock);
    bool taken = take_snapshot(registry, false, &copy);
    mp_mutex_unlock(&registry->lock);
    if (!taken)
        return mp_fail(error, MP_MEMORY_EXHAUSTED, "the system refused memory for the list of models");
    for (int i = 0; i < copy.count; i++) {
        mp_entry_info info;
        mp_entry *entry = copy.entries[i];
        mp_entry_describe(entry, &info);
        visit(arg, &info);
        if (!info.model)
            continue;
        mp_mutex_lock(&entry->lock);
        mp_entry_return(entry);
        mp_mutex_unlock(&entry->lock);
    }
    drop_snapshot(&copy);
    return MP_OK;
}
