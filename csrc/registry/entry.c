/* entry.c: an entry's data: create and free it, its states, its model, and questions about its workers. entry.h
 * describes all of an entry. */
#include "registry/entry.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"

/* --- states --- */

#define TO(state) (1u << MP_SHUTDOWN_##state)
static const char *const shutdown_names[MP_SHUTDOWN_STATES] = {
    [MP_SHUTDOWN_OPEN] = "open",
    [MP_SHUTDOWN_CLOSED] = "closed",
    [MP_SHUTDOWN_QUITTING] = "quitting",
};
static const uint16_t shutdown_legal[MP_SHUTDOWN_STATES] = {
    [MP_SHUTDOWN_OPEN] = TO(CLOSED),
    [MP_SHUTDOWN_CLOSED] = TO(QUITTING),
    [MP_SHUTDOWN_QUITTING] = 0,
};
#undef TO
const mp_state_machine mp_shutdown_machine = {"shutdown", MP_SHUTDOWN_STATES, shutdown_names, shutdown_legal};

#define TO(state) (1u << MP_REMOVAL_##state)
static const char *const removal_names[MP_REMOVAL_STATES] = {
    [MP_REMOVAL_NONE] = "none",
    [MP_REMOVAL_DRAINING] = "draining",
    [MP_REMOVAL_GONE] = "gone",
};
static const uint16_t removal_legal[MP_REMOVAL_STATES] = {
    [MP_REMOVAL_NONE] = TO(DRAINING),
    [MP_REMOVAL_DRAINING] = TO(GONE),
    [MP_REMOVAL_GONE] = 0,
};
#undef TO
const mp_state_machine mp_removal_machine = {"removal", MP_REMOVAL_STATES, removal_names, removal_legal};

#define TO(state) (1u << MP_UNLOAD_##state)
static const char *const unload_names[MP_UNLOAD_STATES] = {
    [MP_UNLOAD_NONE] = "none",
    [MP_UNLOAD_REQUESTED] = "requested",
    [MP_UNLOAD_CALLED] = "called",
    [MP_UNLOAD_RUNNING] = "running",
};
static const uint16_t unload_legal[MP_UNLOAD_STATES] = {
    [MP_UNLOAD_NONE] = TO(REQUESTED) | TO(CALLED) | TO(RUNNING),
    [MP_UNLOAD_REQUESTED] = TO(CALLED) | TO(RUNNING) | TO(NONE),
    [MP_UNLOAD_CALLED] = TO(RUNNING) | TO(NONE),
    [MP_UNLOAD_RUNNING] = TO(NONE),
};
#undef TO
const mp_state_machine mp_unload_machine = {"unload", MP_UNLOAD_STATES, unload_names, unload_legal};

static bool entry_may_enter(const mp_entry *entry, const mp_state_machine *machine, int from, int to) {
    return mp_state_may_enter(machine, entry->services, entry->key, 0, from, to);
}

void mp_entry_set_shutdown(mp_entry *entry, mp_entry_shutdown shutdown) {
    mp_assert_held(&entry->lock);
    if (entry_may_enter(entry, &mp_shutdown_machine, (int)entry->shutdown, (int)shutdown))
        entry->shutdown = shutdown;
}

void mp_entry_set_removal(mp_entry *entry, mp_entry_removal removal) {
    mp_assert_held(&entry->lock);
    if (entry_may_enter(entry, &mp_removal_machine, (int)entry->removal, (int)removal))
        entry->removal = removal;
}

void mp_entry_set_unload(mp_entry *entry, mp_entry_unload unload) {
    mp_assert_held(&entry->lock);
    if (entry_may_enter(entry, &mp_unload_machine, (int)entry->unload, (int)unload))
        entry->unload = unload;
}

/* --- life --- */

static void free_loader(mp_loader *loader) {
    if (loader->ops)
        loader->ops->destroy(loader->self);
    *loader = (mp_loader){0};
}

static _Atomic uint64_t created; /* entries of the process */

uint64_t mp_entry_newest(void) { return atomic_load_explicit(&created, memory_order_relaxed); }

mp_status mp_entry_create(mp_services *services, const char *key, const mp_loader *loader, mp_entry **entry_out,
                          mp_error *error) {
    *entry_out = NULL;
    mp_loader taken = *loader;
    mp_entry *entry = mp_alloc_zeroed(sizeof(*entry), MP_TAG_POOL);
    if (!entry) {
        free_loader(&taken);
        return mp_fail_memory(error, sizeof(*entry), "a registry entry");
    }
    mp_status status = mp_queue_create(&entry->queue, services->queue_capacity[taken.capability], error);
    if (status != MP_OK) {
        mp_free(entry);
        free_loader(&taken);
        return status;
    }
    entry->number = atomic_fetch_add_explicit(&created, 1, memory_order_relaxed) + 1;
    entry->services = mp_services_pin(services);
    entry->account = (mp_budget){.limit = UINT64_MAX, .above = mp_governor_budget(services->governor)};
    strncpy(entry->key, key, sizeof(entry->key) - 1);
    entry->capability = taken.capability;
    entry->policy = services->policy[taken.capability];
    if (taken.policy && !services->policy_chosen[taken.capability])
        mp_policy_from_name(taken.policy, &entry->policy);
    entry->keep_alive_ns = services->keep_alive_ns;
    entry->loader = taken;
    entry->revision = taken.revision;
    atomic_init(&entry->references, 1);
    mp_mutex_init(&entry->lock);
    mp_cond_init(&entry->changed);
    mp_cond_init(&entry->room);
    *entry_out = entry;
    return MP_OK;
}

mp_entry *mp_entry_pin(mp_entry *entry) {
    atomic_fetch_add_explicit(&entry->references, 1, memory_order_relaxed);
    return entry;
}

void mp_entry_unpin(mp_entry *entry) {
    if (!entry || atomic_fetch_sub_explicit(&entry->references, 1, memory_order_acq_rel) != 1)
        return;
    assert(!mp_entry_has_workers(entry) && entry->queue.count == 0 && entry->abandoned == 0 && !entry->borrowers);
    mp_resident_unpin(entry->resident);
    free_loader(&entry->loader);
    mp_queue_destroy(&entry->queue);
    mp_cond_deinit(&entry->room);
    mp_cond_deinit(&entry->changed);
    mp_mutex_deinit(&entry->lock);
    mp_services_unpin(entry->services);
    mp_free(entry);
}

mp_spin_rule mp_entry_spin_rule(mp_entry *entry) {
    return mp_cpu_allocator_spin_rule(entry->services->allocator_pinned, entry->services->spin_ns);
}

/* --- the loaded model, which workers and callers share --- */

mp_resident *mp_resident_pin(mp_resident *resident) {
    atomic_fetch_add_explicit(&resident->references, 1, memory_order_relaxed);
    return resident;
}

void mp_resident_unpin(mp_resident *resident) {
    if (!resident || atomic_fetch_sub_explicit(&resident->references, 1, memory_order_acq_rel) != 1)
        return;
    resident->model->ops->destroy(resident->model);
    mp_free(resident);
}

mp_resident *mp_entry_borrow(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    entry->borrowers++;
    return entry->resident;
}

void mp_entry_return(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (--entry->borrowers == 0)
        mp_cond_broadcast(&entry->changed);
}

/* --- settings --- */

void mp_entry_keep_alive(mp_entry *entry, uint64_t keep_alive_ns) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    mp_mutex_lock(&entry->lock);
    entry->keep_alive_ns = keep_alive_ns;
    mp_mutex_unlock(&entry->lock);
    mp_maintenance_at(&services->maintenance, services->pool, mp_sys_now_ns());
}

void mp_entry_pin_model(mp_entry *entry, bool pinned) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    entry->pinned = pinned;
    mp_mutex_unlock(&entry->lock);
}

void mp_entry_hold(mp_entry *entry, bool held) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    entry->held = held;
    mp_mutex_unlock(&entry->lock);
}

/* --- its workers; under the lock unless stated otherwise --- */

bool mp_entry_serves(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        if (mp_worker_serves(entry->workers[i]) && !entry->workers[i]->leave)
            return true;
    return false;
}

bool mp_entry_all_leave(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        if (!mp_worker_is_leaving(entry->workers[i]))
            return false;
    return !entry->starting;
}

int mp_entry_running(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    int running = 0;
    for (int i = 0; i < entry->worker_count; i++)
        running += entry->workers[i]->active_count;
    return running;
}

void mp_entry_unlist_worker(mp_entry *entry, mp_worker *worker) {
    mp_assert_held(&entry->lock);
    int at = 0;
    while (entry->workers[at] != worker)
        at++;
    entry->worker_count--;
    memmove(&entry->workers[at], &entry->workers[at + 1], (size_t)(entry->worker_count - at) * sizeof(worker));
}

void mp_entry_request_unload(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (entry->unload == MP_UNLOAD_NONE)
        mp_entry_set_unload(entry, MP_UNLOAD_REQUESTED);
}

bool mp_entry_in_use(mp_entry *entry) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    bool in_use = !mp_entry_all_leave(entry) || entry->queue.count || mp_entry_running(entry);
    mp_mutex_unlock(&entry->lock);
    return in_use;
}
