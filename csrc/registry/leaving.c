/* leaving.c: the end of a worker, and the end of the model when the last worker leaves. See entry.h.
 *
 * A worker leaves because it was idle for the keep-alive, the model is evicted or removed, the registry shuts down,
 * or it had a fault. An abandoned worker takes another way out: return_abandoned. */
#include <stdatomic.h>

#include "base/log.h"
#include "registry/entry.h"
#include "registry/events.h"

/* The thread of an abandoned worker has returned from its step or load. Frees everything that the worker held, and the
 * worker. */
static void return_abandoned(mp_worker *worker) {
    mp_entry *entry = worker->entry;
    mp_mutex_lock(&entry->lock);
    while (worker->concluding)
        mp_cond_wait(&entry->changed, &entry->lock, 0);
    mp_mutex_unlock(&entry->lock);
    mp_log(MP_LOG_WARNING, "Worker %u for %s returned after it had been abandoned", worker->id, entry->key);
    for (int i = 0; i < worker->active_count; i++) {
        worker->engine->ops->retire(worker->engine, &worker->active[i]->item);
        mp_entry_let_go(entry, worker->active[i]);
    }
    mp_worker_free_engine(worker);
    mp_mutex_lock(&entry->lock);
    entry->abandoned--;
    mp_dispatch_memory_free(entry);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
    mp_worker_destroy(worker);
}

/* Must hold the lock. Records the fault, if any, because of which the worker leaves. Returns the queued requests if no
 * worker will serve them. */
static mp_ticket *note_fault(mp_worker *worker) {
    mp_assert_held(&worker->entry->lock);
    mp_entry *entry = worker->entry;
    if (worker->fault.code == MP_OK)
        return NULL;
    mp_faults_worker_ended(entry, &worker->fault, worker->end_noted, worker->engine->external_kill);
    if (worker->fault.code != MP_INTEGRITY)
        return NULL;
    mp_entry_wake_workers(entry); /* `set_fault` has requested an unload, since the other workers use the same files */
    return mp_entry_take_queue(entry);
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
            list = mp_entry_take_queue(entry);
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

void mp_worker_leave(mp_worker *worker) {
    mp_entry *entry = worker->entry;
    mp_services *services = entry->services;
    mp_ticket *list = NULL;

    mp_mutex_lock(&entry->lock);
    if (worker->state == MP_WORKER_DEAD) {
        mp_mutex_unlock(&entry->lock);
        return_abandoned(worker);
        return;
    }
    bool served = mp_worker_serves(worker), sound = worker->fault.code == MP_OK;
    if (served) {
        mp_worker_set_state(worker, sound ? MP_WORKER_EVICTING : MP_WORKER_FAILED);
        list = note_fault(worker);
    }
    mp_dispatch_forget(entry, worker);
    mp_mutex_unlock(&entry->lock);

    mp_entry_finish_list(entry, list, &worker->fault);
    mp_worker_free_engine(worker);
    mp_governor_notify(services->governor);
    if (served) {
        if (!sound)
            mp_log(MP_LOG_INFO, "Worker %u for %s ended after a fault: %s", worker->id, entry->key,
                   worker->fault.message);
        mp_count(services, MP_METRIC_workers_evicted, 1);
        mp_events_post(sound ? MP_EVENT_EVICT : MP_EVENT_FAIL, services->number, entry->key, worker->id, 0,
                       worker->fault.code);
    }
    mp_entry_finalize(entry, worker);
    mp_worker_destroy(worker);
}
