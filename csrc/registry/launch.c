/* launch.c: the workers that an entry has: starts one if requests or callers need it, and frees the model when none is
 * left. See entry.h. */
#include <assert.h>

#include "base/log.h"
#include "registry/entry.h"

/* --- start --- */

static void list_worker(mp_entry *entry, mp_worker *worker) {
    assert(entry->worker_count < MP_WORKERS_MAX);
    worker->number = entry->listed++;
    entry->workers[entry->worker_count++] = worker;
}

bool mp_entry_begin(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (mp_entry_has_workers(entry) || !entry->loader.ops || !mp_faults_may_start(entry, mp_sys_now_ns()))
        return false;
    entry->starting++;
    return true;
}

/* Call when an announced worker cannot be started; `worker`: NULL if it could not be created. */
static void launch_failed(mp_entry *entry, mp_worker *worker, const mp_error *error) {
    mp_services *services = entry->services;
    mp_ticket *list = NULL;
    mp_mutex_lock(&entry->lock);
    if (!worker)
        entry->starting--;
    bool others = entry->worker_count > (worker != NULL) || entry->starting || entry->unload == MP_UNLOAD_RUNNING;
    mp_entry_scale_later(entry);
    mp_count(services, MP_METRIC_spawn_failures, 1); /* under the lock: before callers learn of the failure */
    if (worker) /* the worker stays listed until mp_entry_finalize: let it take no request */
        worker->leave = true;
    if (!others) {
        entry->attempts++;
        entry->attempts_over++;
        mp_faults_load_failed(entry, error);
        list = mp_entry_take_queue(entry, false);
    }
    mp_mutex_unlock(&entry->lock);
    mp_log(MP_LOG_WARNING, "A worker for %s failed to start: %s", entry->key, error->message);
    mp_entry_finish_list(entry, list, error);
    if (!others)
        services->event(services->registry, entry, MP_ENTRY_LOAD_FAILED);
    mp_entry_finalize(entry, worker);
}

void mp_entry_launch(mp_entry *entry, mp_guard guard) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    mp_worker *worker;
    mp_error error;
    mp_entry_pin(entry); /* keeps the entry alive until the worker has its own reference */
    if (mp_worker_create(entry, &worker, &error) != MP_OK) {
        mp_guard_release(&guard);
        launch_failed(entry, NULL, &error);
    } else {
        worker->guard = guard;
        mp_mutex_lock(&entry->lock);
        entry->starting--;
        list_worker(entry, worker);
        mp_mutex_unlock(&entry->lock);
        if (mp_pool_run(services->pool, (mp_job){mp_worker_run, worker}, &error) != MP_OK) {
            launch_failed(entry, worker, &error);
            mp_guard_release(&worker->guard);
            mp_worker_destroy(worker);
        }
    }
    mp_entry_unpin(entry);
}

/* --- end --- */

/* Must hold the lock. Returns the reason for which the loaded model is freed; `leaving`: its last worker, or NULL. */
static mp_reason unload_reason(const mp_entry *entry, const mp_worker *leaving) {
    mp_assert_held(&entry->lock);
    if (entry->unload == MP_UNLOAD_CALLED || entry->removal != MP_REMOVAL_NONE || entry->shutdown != MP_SHUTDOWN_OPEN)
        return MP_REASON_CALL;
    if (entry->faults.health == MP_HEALTH_FAILED && entry->faults.failure.code == MP_INTEGRITY)
        return MP_REASON_FILES;
    if (entry->unload == MP_UNLOAD_REQUESTED)
        return MP_REASON_MEMORY;
    return leaving && leaving->fault.code != MP_OK ? MP_REASON_FAULT : MP_REASON_KEEP_ALIVE;
}

void mp_entry_finalize(mp_entry *entry, mp_worker *leaving) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    mp_ticket *list = NULL;
    bool gone = false;
    mp_mutex_lock(&entry->lock);
    if (leaving) /* unlist and unload in one critical section: no thread may see a loaded model without workers */
        mp_entry_unlist_worker(entry, leaving);
    mp_dispatch_memory_free(entry);
    if (!mp_entry_has_workers(entry)) {
        /* A worker that starts for queued requests reuses the loaded model. */
        bool evict = mp_entry_must_unload(entry), quit = entry->shutdown == MP_SHUTDOWN_QUITTING;
        bool forget = entry->unload == MP_UNLOAD_CALLED; /* no load can fail while the unload is RUNNING */
        bool keep = entry->queue.count && !evict && !quit && entry->faults.health != MP_HEALTH_BROKEN;
        mp_resident *resident = keep ? NULL : entry->resident;
        if (resident) {
            entry->reasons.evictions[unload_reason(entry, leaving)]++;
            entry->resident = NULL;
            entry->load_requested = false;
            mp_entry_set_unload(entry, MP_UNLOAD_RUNNING); /* no load may start before the memory is free */
            entry->unload_bytes = resident->model->ops->bytes(resident->model) + 1;
            while (entry->borrowers)
                mp_cond_wait(&entry->changed, &entry->lock, 0);
            mp_mutex_unlock(&entry->lock);
            mp_resident_unpin(resident);
            mp_governor_notify(services->governor);
            mp_sys_trim_heap(); /* the C library may keep small blocks of the model */
            mp_count(services, MP_METRIC_evictions, 1);
            mp_log(MP_LOG_INFO, "Unloaded %s", entry->key);
            mp_mutex_lock(&entry->lock);
        }
        entry->unloads += resident || evict; /* also if no model was loaded: mp_entry_evict waits for this count */
        if (forget) /* forget a load that failed after mp_entry_evict began */
            mp_faults_forget_load(entry);
        if (entry->unload != MP_UNLOAD_NONE)
            mp_entry_set_unload(entry, MP_UNLOAD_NONE);
        if (entry->faults.health == MP_HEALTH_BROKEN)
            list = mp_entry_take_queue(entry, false);
        gone = entry->removal == MP_REMOVAL_DRAINING && entry->shutdown != MP_SHUTDOWN_QUITTING && !entry->queue.count;
        if (gone)
            mp_entry_set_removal(entry, MP_REMOVAL_GONE);
        mp_loader loader = entry->loader;
        if (gone && !entry->abandoned && loader.ops) { /* otherwise mp_entry_unpin frees the loader */
            entry->loader = (mp_loader){0};
            mp_entry_set_unload(entry, MP_UNLOAD_RUNNING); /* makes mp_entry_wait_gone wait for the loader too */
            entry->unload_bytes = 0;
            mp_mutex_unlock(&entry->lock);
            loader.ops->destroy(loader.self);
            mp_mutex_lock(&entry->lock);
            mp_entry_set_unload(entry, MP_UNLOAD_NONE);
        }
    }
    mp_error failure = entry->faults.failure;
    /* Requests were queued while this worker still existed: start another worker for them. */
    bool wanted = entry->queue.count && entry->shutdown != MP_SHUTDOWN_QUITTING;
    bool again = wanted && mp_entry_begin(entry);
    uint64_t spawn_ns = wanted && !mp_entry_has_workers(entry) ? entry->faults.spawn_ns : 0; /* end of the backoff */
    mp_dispatch_wake_all(entry);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
    if (again)
        mp_entry_launch(entry, (mp_guard){0});
    else if (spawn_ns)
        mp_maintenance_at(&services->maintenance, services->pool, spawn_ns);
    mp_entry_finish_list(entry, list, &failure);
    if (gone)
        services->event(services->registry, entry, MP_ENTRY_GONE);
}
