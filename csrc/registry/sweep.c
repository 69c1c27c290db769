/* sweep.c: periodic checks of an entry: deadlines, stuck loads and steps, idle workers. See entry.h.
 *
 * The maintenance thread calls mp_entry_sweep. Every check reports when it is due next, and the thread sleeps until the
 * earliest of these times. */
#include <stdatomic.h>

#include "base/log.h"
#include "registry/entry.h"

static const uint64_t NEVER = UINT64_MAX;
static const uint64_t SWEEP_AGAIN_NS = 1000ull * 1000 * 1000;

static void sooner(uint64_t *next, uint64_t due) {
    if (due < *next)
        *next = due;
}

/* Returns true if the request has expired. Otherwise the next sweep runs when it may expire. */
static bool is_expired(const mp_ticket *ticket, uint64_t clock_ns, uint64_t now_ns, uint64_t *next) {
    uint64_t due = mp_ticket_due(ticket);
    if (due > clock_ns && due != MP_FOREVER)
        sooner(next, mp_sys_after(now_ns, due - clock_ns));
    return due <= clock_ns;
}

/* Must hold the lock. Cancels expired requests. Returns the expired requests that were queued; workers end the active
 * ones. */
static mp_ticket *expire(mp_entry *entry, uint64_t now_ns, uint64_t *next) {
    mp_assert_held(&entry->lock);
    mp_ticket *expired = NULL;
    uint64_t clock_ns = mp_maintenance_clock(&entry->services->maintenance, NULL);
    for (mp_queue_node *node = mp_queue_first(&entry->queue), *behind; node; node = behind) {
        behind = mp_queue_next(&entry->queue, node);
        mp_ticket *ticket = mp_ticket_of_node(node);
        if (!is_expired(ticket, clock_ns, now_ns, next))
            continue;
        mp_entry_cancel_locked(entry, ticket, MP_TIMEOUT);
        ticket->next = expired;
        expired = ticket;
    }
    for (int i = 0; i < entry->worker_count; i++)
        for (int j = 0; j < entry->workers[i]->active_count; j++) {
            mp_ticket *ticket = entry->workers[i]->active[j];
            if (is_expired(ticket, clock_ns, now_ns, next))
                mp_entry_cancel_locked(entry, ticket, MP_TIMEOUT);
        }
    return expired;
}

/* Must hold the lock. Progress of a load counts as progress of the requests that wait for it. Only the first load of a
 * request counts, because models that evict each other may be loaded repeatedly. The time in which a load waits for
 * memory or CPUs does not count as progress. */
static void credit_load(mp_entry *entry, uint64_t age_ns) {
    mp_assert_held(&entry->lock);
    uint64_t clock_ns = mp_maintenance_clock(&entry->services->maintenance, NULL);
    uint64_t beat_ns = clock_ns > age_ns ? clock_ns - age_ns : 0;
    for (mp_queue_node *node = mp_queue_first(&entry->queue); node; node = mp_queue_next(&entry->queue, node)) {
        mp_ticket *ticket = mp_ticket_of_node(node);
        if (!ticket->attempt)
            ticket->attempt = entry->attempts;
        if (ticket->attempt == entry->attempts &&
            beat_ns > atomic_load_explicit(&ticket->moved_ns, memory_order_relaxed))
            atomic_store_explicit(&ticket->moved_ns, beat_ns, memory_order_relaxed);
    }
}

/* Must hold the lock. Returns a worker that makes no progress, or NULL. */
static mp_worker *find_stuck(mp_entry *entry, uint64_t now_ns, uint64_t *next, mp_error *error) {
    mp_assert_held(&entry->lock);
    mp_services *services = entry->services;
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        if (worker->state == MP_WORKER_LOADING) {
            uint64_t limit = services->load_timeout_ns;
            uint64_t beat = atomic_load_explicit(&worker->progress.beat_ns, memory_order_acquire);
            const char *stage = atomic_load_explicit(&worker->progress.stage, memory_order_acquire);
            if (beat == 0) { /* the load waits for other threads: do not count this time */
                worker->watch.checked_ns = now_ns;
            } else {
                credit_load(entry, now_ns > beat ? now_ns - beat : 0);
                bool silent = mp_watch_check(&worker->watch, beat, now_ns, limit);
                if (!worker->moving && (silent || worker->watch.total_ns >= services->load_ceiling_ns)) {
                    mp_fail_hint(error, MP_SPAWN_TIMEOUT,
                                 silent ? "Raise `load_timeout` of PoolConfig" : "Raise `load_ceiling` of PoolConfig",
                                 "%s: the load %s %.3g s (stage: %s)", entry->key,
                                 silent ? "made no progress for" : "did not end within",
                                 (double)(silent ? limit : services->load_ceiling_ns) * 1e-9, stage);
                    return worker;
                }
            }
            sooner(next, now_ns + limit / 4);
        } else if (worker->in_step) {
            uint64_t limit = services->stall_timeout_ns;
            uint64_t beat = atomic_load_explicit(&worker->lease.heartbeat, memory_order_relaxed);
            if (mp_watch_check(&worker->watch, beat, now_ns, limit) && !worker->moving) {
                mp_fail(error, MP_RECV, "%s: worker %u made no progress for %.3g s in %s", entry->key, worker->id,
                        (double)limit * 1e-9, worker->active_count > 0 ? "a step" : "optional work");
                return worker;
            }
            sooner(next, now_ns + limit / 4);
        }
    }
    return NULL;
}

/* Must hold the lock; releases it temporarily. Abandons a worker that makes no progress. */
static void abandon_stuck(mp_entry *entry, mp_worker *worker, const mp_error *error) {
    mp_assert_held(&entry->lock);
    mp_ticket *list = NULL;
    bool loading = worker->state == MP_WORKER_LOADING && !entry->resident;
    bool last = entry->worker_count == 1 && !entry->starting;
    if (loading) {
        entry->attempts_over++;
        mp_count(entry->services, MP_METRIC_load_failures, 1);
    }
    mp_faults_worker_stuck(entry, worker, loading, error);
    mp_error failure = loading ? *error : entry->faults.failure;
    /* take the queue before another thread can see requests that no worker will serve */
    if (loading || (entry->faults.health == MP_HEALTH_BROKEN && last))
        list = mp_entry_take_queue(entry, false);
    mp_worker_abandon(worker, error);
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, list, &failure);
    if (loading)
        entry->services->event(entry->services->registry, entry, MP_ENTRY_LOAD_FAILED);
    mp_entry_finalize(entry, NULL);
    mp_mutex_lock(&entry->lock);
}

/* Must hold the lock. Tells workers that were idle for the keep-alive time to leave. */
static void retire_idle(mp_entry *entry, uint64_t now_ns, uint64_t *next) {
    mp_assert_held(&entry->lock);
    if (entry->keep_alive_ns == MP_FOREVER)
        return;
    if (entry->queue.count) {
        sooner(next, now_ns + SWEEP_AGAIN_NS);
        return;
    }
    int stay = 0, predicted = mp_dispatch_predicted(entry, now_ns);
    for (int i = 0; i < entry->worker_count; i++)
        stay += mp_worker_serves(entry->workers[i]) && !entry->workers[i]->leave;
    for (;;) { /* find the worker that is idle for longest */
        mp_worker *oldest = NULL;
        for (int i = 0; i < entry->worker_count; i++) {
            mp_worker *worker = entry->workers[i];
            if (mp_worker_idles(worker) && !worker->leave && !worker->woken &&
                (!oldest || worker->idle_since_ns < oldest->idle_since_ns))
                oldest = worker;
        }
        if (!oldest || (entry->pinned && stay == 1))
            return;
        if (stay > 1 && stay <= predicted) { /* the forecast would start another worker at once */
            sooner(next, now_ns + SWEEP_AGAIN_NS);
            return;
        }
        uint64_t due = mp_sys_after(oldest->idle_since_ns, entry->keep_alive_ns);
        if (due > now_ns) {
            sooner(next, due);
            return;
        }
        oldest->leave = true;
        mp_worker_wake(oldest);
        stay--;
    }
}

uint64_t mp_entry_sweep(mp_entry *entry, uint64_t now_ns) {
    uint64_t next = NEVER;
    mp_error error;
    bool start = false;
    mp_mutex_lock(&entry->lock);
    for (mp_worker *stuck; (stuck = find_stuck(entry, now_ns, &next, &error));)
        abandon_stuck(entry, stuck, &error);
    mp_ticket *expired = expire(entry, now_ns, &next);
    retire_idle(entry, now_ns, &next);
    bool quit = entry->shutdown == MP_SHUTDOWN_QUITTING;
    if (entry->queue.count && !quit && !mp_entry_has_workers(entry)) { /* they wait for the end of the backoff */
        if (entry->faults.spawn_ns > now_ns)
            sooner(&next, entry->faults.spawn_ns);
        else
            start = mp_entry_begin(entry);
    }
    /* The requests that waited for the end of the backoff have ended. No worker exists or will start to free the model,
     * so free it here. */
    bool idle = !entry->queue.count && !quit && !mp_entry_has_workers(entry) &&
                ((entry->resident && entry->faults.spawn_ns) || entry->removal == MP_REMOVAL_DRAINING);
    mp_mutex_unlock(&entry->lock);
    if (start)
        mp_entry_launch(entry, (mp_guard){0});
    mp_entry_finish_list(entry, expired, NULL);
    if (idle)
        mp_entry_finalize(entry, NULL);
    return next;
}
