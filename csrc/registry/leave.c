/* leave.c: the job of a worker's thread, and its end. See entry.h.
 *
 * A worker leaves because it was idle for the keep-alive, the model is evicted or removed, the registry shuts down,
 * or it had a fault. An abandoned worker takes another way out: return_abandoned. */
#include <stdatomic.h>

#include "base/log.h"
#include "registry/entry.h"
#include "registry/events.h"

/* The one record of a worker's death, from whatever cause. */
static void log_death(const mp_worker *worker, const mp_error *cause, int retried, int failed) {
    mp_log(MP_LOG_WARNING, "Worker %u for %s died; requests retried: %d, failed: %d; cause: %s", worker->id,
           worker->entry->key, retried, failed, cause->message);
}

/* --- abandoned workers --- */

void mp_worker_abandon(mp_worker *worker, const mp_error *error) {
    mp_assert_held(&worker->entry->lock);
    mp_entry *entry = worker->entry;
    mp_services *services = entry->services;
    int threads = worker->threads, count = worker->active_count, stepping = 0;
    bool runnable = worker->runnable, in_step[MP_ACTIVE_MAX];
    mp_core_lease cores = threads ? worker->cores : (mp_core_lease){0};
    worker->threads = 0;
    worker->runnable = false;
    mp_worker_set_state(worker, MP_WORKER_DEAD);
    mp_entry_unlist_worker(entry, worker);
    mp_dispatch_forget(entry, worker);
    worker->concluding = true; /* return_abandoned waits until this thread has finished with the tickets */
    entry->abandoned++;
    for (int i = 0; i < count; i++)
        worker->active[i]->worker = NULL;
    for (int i = 0; i < count; i++) {
        in_step[i] = worker->active[i]->state == MP_TICKET_STEPPING;
        stepping += in_step[i];
        mp_dispatch_end(worker->active[i]);
    }
    for (int i = 0; i < count; i++)
        if (in_step[i] && error->code == MP_RECV)
            mp_faults_lost(entry, worker->active[i], stepping == 1);
    atomic_store_explicit(&worker->step_cancelled, 1, memory_order_release);
    entry->reasons.deaths[MP_REASON_STALLED]++;
    mp_count(services, MP_METRIC_workers_dead, 1); /* under the lock: a caller of mp_entry_load may wake after it */
    mp_mutex_unlock(&entry->lock);

    log_death(worker, error, 0, count);
    mp_events_post_fail(services->number, entry->key, worker->id, error);
    if (threads)
        mp_cpu_allocator_write_off(services->allocator_pinned, &cores);
    if (runnable)
        mp_cpu_allocator_leave(services->allocator_pinned);
    mp_pool_disown(services->pool, worker);
    for (int i = 0; i < count; i++)
        mp_entry_conclude(entry, worker->active[i], error->code, error);

    mp_mutex_lock(&entry->lock);
    worker->concluding = false;
    mp_cond_broadcast(&entry->changed);
}

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

/* --- workers that leave --- */

/* Must hold the lock. Records the fault, if any, because of which the worker leaves. Returns the queued requests if no
 * worker will serve them. */
static mp_ticket *note_fault(mp_worker *worker) {
    mp_assert_held(&worker->entry->lock);
    mp_entry *entry = worker->entry;
    if (worker->fault.code == MP_OK)
        return NULL;
    entry->reasons.deaths[mp_faults_reason(worker->fault.code, worker->engine)]++;
    mp_faults_worker_ended(entry, &worker->fault, worker->end_noted, worker->engine->external_kill);
    if (worker->fault.code != MP_INTEGRITY)
        return NULL;
    mp_entry_wake_workers(entry); /* `set_fault` has requested an unload, since the other workers use the same files */
    return mp_entry_take_queue(entry);
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
            log_death(worker, &worker->fault, worker->fault_retried, worker->fault_failed);
        mp_count(services, MP_METRIC_workers_evicted, 1);
        if (sound)
            mp_events_post(MP_EVENT_EVICT, services->number, entry->key, worker->id, 0, MP_OK);
        else
            mp_events_post_fail(services->number, entry->key, worker->id, &worker->fault);
    }
    mp_entry_finalize(entry, worker);
    mp_worker_destroy(worker);
}

void mp_worker_run(void *arg) {
    mp_worker *worker = arg;
    mp_services *services = worker->entry->services;
    mp_alloc_prefer_node(mp_cpu_allocator_node_memory(services->allocator_pinned, worker->home));
    atomic_fetch_add_explicit(&services->active_workers, 1, memory_order_relaxed);
    if (mp_worker_start(worker))
        mp_worker_serve(worker);
    atomic_fetch_sub_explicit(&services->active_workers, 1, memory_order_relaxed);
    mp_worker_leave(worker);
    mp_alloc_prefer_node(-1);
}
