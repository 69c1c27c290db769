/* leaving.c: the end of a worker, and what the last one of a model does. See entry.h. */
#include <stdatomic.h>

#include "base/trace.h"
#include "registry/entry.h"
#include "registry/events.h"

/* Engine, model and guard of a worker; no lock held. */
static void free_engine(mp_worker *worker) {
    if (worker->engine)
        worker->engine->ops->destroy(worker->engine);
    worker->engine = NULL;
    mp_guard_release(&worker->guard);
    mp_resident_unpin(worker->resident);
    worker->resident = NULL;
}

/* The thread of a dead worker has come back: what it held is free at last. */
static void come_back(mp_worker *worker) {
    mp_entry *entry = worker->entry;
    mp_mutex_lock(&entry->lock);
    while (worker->concluding)
        mp_cond_wait(&entry->changed, &entry->lock, 0);
    mp_mutex_unlock(&entry->lock);
    mp_log(MP_LOG_WARNING, "Worker %u for %s came back after it had been set apart", worker->id, entry->key);
    for (int i = 0; i < worker->active_count; i++) {
        worker->engine->ops->retire(worker->engine, &worker->active[i]->item);
        mp_entry_let_go(entry, worker->active[i]);
    }
    free_engine(worker);
    mp_mutex_lock(&entry->lock);
    entry->apart--;
    mp_dispatch_memory_free(entry);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
    mp_worker_destroy(worker);
}

/* Under the lock: why it leaves; the queue, if nobody is going to serve it. */
static mp_ticket *note_fault(mp_worker *worker) {
    mp_entry *entry = worker->entry;
    if (worker->fault.code == MP_OK)
        return NULL;
    if (worker->fault.code != MP_INTEGRITY) {
        /* Between steps no call failed of it, which alone the breaker is for. */
        mp_count(entry->services, MP_METRIC_worker_faults, !worker->end_noted);
        mp_entry_note_death(entry, &worker->fault);
        return NULL;
    }
    mp_entry_request_unload(entry); /* the other workers have the same files */
    mp_entry_ring_workers(entry);
    mp_entry_note_fault(entry);
    mp_entry_set_failed(entry, &worker->fault);
    return mp_entry_take_queue(entry);
}

void mp_entry_settle(mp_entry *entry, mp_worker *leaving) {
    mp_services *services = entry->services;
    mp_ticket *list = NULL;
    bool gone = false;
    mp_mutex_lock(&entry->lock);
    if (leaving) /* under the same lock as what follows: nobody sees a model without workers */
        mp_entry_unlist_worker(entry, leaving);
    mp_dispatch_memory_free(entry);
    if (!mp_entry_works(entry)) {
        /* who comes next needs no load */
        bool evict = entry->unload == MP_UNLOAD_REQUESTED, quit = entry->shutdown == MP_SHUTDOWN_QUITTING;
        bool keep = entry->queue.count && !evict && !quit && entry->health != MP_HEALTH_BROKEN;
        mp_resident *resident = keep ? NULL : entry->resident;
        if (resident) {
            entry->resident = NULL;
            mp_entry_set_unload(entry, MP_UNLOAD_RUNNING); /* nobody loads it again before its memory is free */
            entry->unload_bytes = resident->model->ops->bytes(resident->model) + 1;
            mp_mutex_unlock(&entry->lock);
            mp_resident_unpin(resident);
            mp_governor_notify(services->governor);
            mp_count(services, MP_METRIC_evictions, 1);
            mp_log(MP_LOG_INFO, "Unloaded %s", entry->key);
            mp_mutex_lock(&entry->lock);
        }
        entry->unloads += resident || evict; /* who waits for the eviction of a load that failed waits no more */
        if (entry->unload != MP_UNLOAD_NONE)
            mp_entry_set_unload(entry, MP_UNLOAD_NONE);
        if (entry->health == MP_HEALTH_BROKEN)
            list = mp_entry_take_queue(entry);
        gone = entry->removal == MP_REMOVAL_DRAINING && entry->shutdown != MP_SHUTDOWN_QUITTING && !entry->queue.count;
        if (gone)
            mp_entry_set_removal(entry, MP_REMOVAL_GONE);
        mp_loader loader = entry->loader;
        if (gone && !entry->apart && loader.ops) { /* else it goes with the entry */
            entry->loader = (mp_loader){0};
            mp_entry_set_unload(entry, MP_UNLOAD_RUNNING); /* who waits until it is gone waits for this, too */
            entry->unload_bytes = 0;
            mp_mutex_unlock(&entry->lock);
            loader.ops->destroy(loader.self);
            mp_mutex_lock(&entry->lock);
            mp_entry_set_unload(entry, MP_UNLOAD_NONE);
        }
    }
    mp_error failure = entry->failure;
    /* Calls that wait saw a worker and rely on it: then there is another. */
    bool wanted = entry->queue.count && entry->shutdown != MP_SHUTDOWN_QUITTING;
    bool again = wanted && mp_entry_begin(entry);
    uint64_t spawn_ns = wanted && !mp_entry_works(entry) ? entry->spawn_ns : 0; /* after a rest, then */
    mp_dispatch_ring_all(entry);
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
        come_back(worker);
        return;
    }
    bool served = mp_worker_serves(worker), idle = worker->fault.code == MP_OK;
    if (served) {
        mp_worker_set_state(worker, idle ? MP_WORKER_EVICTING : MP_WORKER_FAILED);
        list = note_fault(worker);
    }
    mp_dispatch_forget(entry, worker);
    mp_mutex_unlock(&entry->lock);

    mp_entry_finish_list(entry, list, &worker->fault);
    free_engine(worker);
    mp_governor_notify(services->governor);
    if (served) {
        mp_log(MP_LOG_INFO, "Evicted worker %u (%s)", worker->id, idle ? "idle" : worker->fault.message);
        mp_count(services, MP_METRIC_workers_evicted, 1);
        mp_events_post(idle ? MP_EVENT_EVICT : MP_EVENT_FAIL, services->number, entry->key, worker->id, NULL,
                       worker->fault.code);
    }
    mp_entry_settle(entry, worker);
    mp_worker_destroy(worker);
}
