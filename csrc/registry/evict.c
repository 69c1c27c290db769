/* evict.c: frees the memory of a model that stays registered: because a caller evicts it, or because other models need
 * the memory. See entry.h, and upkeep.c, which chooses the model. */
#include <stdatomic.h>

#include "base/log.h"
#include "registry/entry.h"

mp_status mp_entry_evict(mp_entry *entry, uint64_t deadline_ns, mp_error *error) {
    mp_assert_not_held(&entry->lock);
    bool in_time = true;
    mp_status status = MP_OK;
    mp_mutex_lock(&entry->lock);
    entry->pinned = false;
    mp_faults_forget_load(entry);
    uint64_t unloads = entry->unloads;
    bool works = mp_entry_has_workers(entry);
    if (works || entry->resident) {
        if (entry->unload == MP_UNLOAD_NONE || entry->unload == MP_UNLOAD_REQUESTED)
            mp_entry_set_unload(entry, MP_UNLOAD_CALLED);
        mp_entry_wake_workers(entry);
    }
    if (!works && entry->resident) {
        /* No worker is listed: the model waits for its backoff, or was loaded before a fork. Free it in this thread. */
        mp_mutex_unlock(&entry->lock);
        mp_entry_finalize(entry, NULL);
        mp_mutex_lock(&entry->lock);
    }
    while (mp_entry_has_workers(entry) && entry->unloads == unloads && in_time)
        in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
    if (mp_entry_has_workers(entry) && entry->unloads == unloads)
        status = mp_fail_hint(error, MP_TIMEOUT, "Unload it again to wait for it, or raise `timeout`",
                              "%s: the unload did not end before the deadline (active requests: %d); it continues in "
                              "the background", entry->key, mp_entry_running(entry));
    mp_mutex_unlock(&entry->lock);
    return status;
}

/* --- for other models --- */

/* Must hold the lock. True if all workers wait for memory, and none has an active request. They get it, or their
 * requests fail, but they wait for other models in use: if such a model waited for this one, two models could wait for
 * each other. */
static bool is_blocked(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        if (!mp_worker_serves(entry->workers[i]) || entry->workers[i]->memory != MP_MEMORY_TIGHT ||
            entry->workers[i]->active_count > 0)
            return false;
    return entry->worker_count > 0;
}

/* Must hold the lock. True if the registry itself may evict the model. `now`: all its workers are idle. Otherwise: none
 * of them has an active request, so they soon will be idle. */
static bool is_evictable(const mp_entry *entry, bool now) {
    mp_assert_held(&entry->lock);
    if (!entry->resident || entry->queue.count || entry->pinned || entry->held || entry->removal != MP_REMOVAL_NONE ||
        (now && (entry->starting || entry->unload != MP_UNLOAD_NONE)))
        return false;
    for (int i = 0; i < entry->worker_count; i++) {
        const mp_worker *worker = entry->workers[i];
        if (now ? !mp_worker_idles(worker) || worker->woken : worker->active_count > 0)
            return false;
    }
    return true;
}

/* Must hold the lock. */
static bool is_loading(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        if (entry->workers[i]->state == MP_WORKER_LOADING)
            return true;
    return false;
}

/* Must hold the lock. True if the worker holds caches and is idle, or soon will be, because its requests have ended. */
static bool may_trim(const mp_worker *worker) {
    mp_assert_held(&worker->entry->lock);
    return mp_worker_serves(worker) && !worker->active_count && !worker->leave && worker->memory < MP_MEMORY_TRIMMED;
}

/* Must hold the lock. True if the entry drains or closes: its model is freed once its requests have ended. */
static bool is_ending(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    return entry->removal != MP_REMOVAL_NONE || entry->shutdown != MP_SHUTDOWN_OPEN;
}

/* Must hold the lock. True if the model will be freed without a further call, even if it is pinned: an unload was
 * requested, the entry drains, or the last workers are leaving. */
static bool is_going(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool kept = entry->queue.count && entry->faults.health != MP_HEALTH_BROKEN &&
                entry->shutdown != MP_SHUTDOWN_QUITTING;
    if (mp_entry_must_unload(entry))
        return true;
    return !kept && !mp_entry_running(entry) &&
           (is_ending(entry) || (entry->worker_count && mp_entry_all_leave(entry)));
}

void mp_entry_value(mp_entry *entry, mp_eviction *value) {
    *value = (mp_eviction){0};
    mp_mutex_lock(&entry->lock);
    mp_resident *resident = entry->resident ? mp_entry_borrow(entry) : NULL;
    bool soon = is_evictable(entry, false), idle = is_evictable(entry, true);
    bool going = is_going(entry);
    uint64_t bytes = 0, leaving = 0, newest_ns = 0, caches = 0, trimming = 0;
    for (int i = 0; i < entry->worker_count; i++) {
        const mp_worker *worker = entry->workers[i];
        *(mp_worker_is_leaving(worker) ? &leaving : &bytes) += worker->held_bytes;
        if (may_trim(worker))
            *(worker->memory == MP_MEMORY_ASKED ? &trimming : &caches) += worker->held_bytes;
        if (worker->idle_since_ns > newest_ns)
            newest_ns = worker->idle_since_ns;
    }
    bool asks = entry->queue.count || mp_entry_running(entry);
    bool used = !soon && !entry->pinned && !entry->held && asks &&
                (mp_entry_serves(entry) || (entry->faults.health != MP_HEALTH_BROKEN && !is_loading(entry)));
    bool blocked = asks && is_blocked(entry), serves = mp_entry_serves(entry);
    uint64_t charged = atomic_load_explicit(&entry->charged, memory_order_relaxed);
    bool ends = asks && (is_ending(entry) || (!entry->queue.count && mp_entry_all_leave(entry)));
    value->coming = leaving + (entry->unload == MP_UNLOAD_RUNNING ? entry->unload_bytes : 0);
    /* `held_bytes` lacks what engines have taken in the running steps */
    uint64_t taken = entry->abandoned ? 0 : atomic_load_explicit(&entry->account.used, memory_order_relaxed);
    mp_mutex_unlock(&entry->lock);
    uint64_t model = resident ? resident->model->ops->bytes(resident->model) : 0;
    bytes += model;
    taken = bytes > taken ? bytes : taken;
    /* a model that is still loading has no memory to free yet */
    bool comes = resident && (going || (soon && !idle));
    if (comes)
        value->coming += bytes + 1;
    else if (idle)
        value->bytes = bytes + 1;
    else if (resident && (used || ends))
        *(blocked && !ends ? &value->blocked : &value->busy) = taken + charged;
    else if (resident && serves && asks) /* the model stays, its requests end, and then its workers can be trimmed */
        *(blocked ? &value->blocked : &value->busy) = taken - model - caches - trimming + charged;
    if (resident && !comes) {
        value->idle_ns = mp_sys_now_ns() - newest_ns;
        value->load_ns = resident->load_ns;
        value->caches = caches;
        value->trimming = trimming;
    }
    if (!resident)
        return;
    mp_mutex_lock(&entry->lock);
    mp_entry_return(entry);
    mp_mutex_unlock(&entry->lock);
}

bool mp_entry_evict_idle(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    bool idle = is_evictable(entry, true), works = mp_entry_has_workers(entry);
    if (idle && works) {
        mp_entry_request_unload(entry);
        mp_entry_wake_workers(entry);
    }
    mp_mutex_unlock(&entry->lock);
    if (!idle)
        return false;
    mp_log(MP_LOG_INFO, "%s: evicted to make room for other models", entry->key);
    if (!works) /* no worker exists that would free the model when it leaves, for example after a fork */
        mp_entry_finalize(entry, NULL);
    return true;
}

uint64_t mp_entry_trim(mp_entry *entry) {
    uint64_t trimming = 0;
    mp_mutex_lock(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        if (!may_trim(worker) || worker->memory == MP_MEMORY_ASKED)
            continue;
        trimming += worker->held_bytes;
        worker->memory = MP_MEMORY_ASKED;
        mp_worker_wake(worker);
    }
    mp_mutex_unlock(&entry->lock);
    return trimming;
}
