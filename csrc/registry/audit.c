/* audit.c: the invariants of a registry. See audit.h. */
#include "registry/audit.h"

#include <stdatomic.h>

#include "registry/state.h"

#define MP_AUDIT(condition, ...) \
    do { \
        if (!(condition)) \
            return mp_fail(error, MP_INTERNAL, __VA_ARGS__); \
    } while (0)

static mp_status audit_worker(const mp_entry *entry, const mp_worker *worker, mp_error *error) {
    const char *key = entry->key, *state = mp_worker_state_name(worker->state);
    MP_AUDIT(worker->entry == entry, "%s: worker %u belongs to another entry", key, worker->id);
    MP_AUDIT(worker->state != MP_WORKER_DEAD, "%s: worker %u is dead, but listed", key, worker->id);
    MP_AUDIT(worker->active_count >= 0 && worker->active_count <= MP_ACTIVE_MAX, "%s: worker %u has %d active", key,
             worker->id, worker->active_count);
    MP_AUDIT(worker->active_count == 0 || worker->state == MP_WORKER_PROCESSING,
             "%s: worker %u is %s and has %d active", key, worker->id, state, worker->active_count);
    const bool improves = worker->active_count == 0 && mp_worker_idles(worker); /* mp_worker_improve */
    MP_AUDIT(!worker->in_step || worker->state == MP_WORKER_PROCESSING || improves, "%s: worker %u is %s in a step",
             key, worker->id, state);
    const bool computes = worker->state == MP_WORKER_PROCESSING || worker->state == MP_WORKER_LOADING;
    MP_AUDIT(worker->threads == 0 || (worker->threads > 0 && computes) || (worker->threads == 1 && improves),
             "%s: worker %u is %s and has %d compute threads", key, worker->id, state, worker->threads);
    MP_AUDIT(!worker->awaits_masks || (worker->active_count > 0 && !worker->in_step && worker->threads == 0),
             "%s: worker %u waits for masks with %d active, %d compute threads, %s", key, worker->id,
             worker->active_count, worker->threads, worker->in_step ? "in a step" : "in no step");
    int in_step = 0;
    for (int i = 0; i < worker->active_count; i++) {
        const mp_ticket *ticket = worker->active[i];
        MP_AUDIT(!worker->awaits_masks || worker->woken || !atomic_load(&ticket->cause),
                 "%s: worker %u waits for masks and was not woken for a cancelled request", key, worker->id);
        MP_AUDIT(ticket->worker == worker, "%s: an active request of worker %u names another worker", key, worker->id);
        MP_AUDIT(!mp_queue_holds(&ticket->node), "%s: a request is active and queued", key);
        MP_AUDIT(atomic_load(&ticket->progress) != UINT64_MAX, "%s: a request is active and done", key);
        MP_AUDIT(atomic_load(&ticket->references) >= 1, "%s: an active request has no reference", key);
        MP_AUDIT(ticket->state == MP_TICKET_TAKEN || ticket->state == MP_TICKET_ADMITTED ||
                     (ticket->state == MP_TICKET_STEPPING && worker->in_step),
                 "%s: an active request of worker %u is %s", key, worker->id,
                 mp_ticket_state_machine.states[ticket->state]);
        in_step += ticket->state == MP_TICKET_STEPPING && !atomic_load(&ticket->cause);
    }
    MP_AUDIT(!worker->in_step || worker->step_live == in_step,
             "%s: worker %u has %d live requests in its step and counts %d", key, worker->id, in_step,
             worker->step_live);
    return MP_OK;
}

/* Checks that no idle worker may take the queued request, unless such a worker was woken. */
static mp_status audit_dispatch(const mp_entry *entry, const mp_ticket *ticket, mp_error *error) {
    const mp_worker *idle = NULL;
    for (int i = 0; i < entry->worker_count; i++) {
        const mp_worker *worker = entry->workers[i];
        if (!mp_worker_idles(worker) || !mp_dispatch_may_take(entry, worker, ticket))
            continue;
        if (worker->woken)
            return MP_OK;
        idle = worker;
    }
    MP_AUDIT(!idle, "%s: a request is queued although worker %u is idle", entry->key, idle->id);
    return MP_OK;
}

/* Checks that the state machines of the entry agree with each other and with its other fields. */
static mp_status audit_states(const mp_entry *entry, mp_error *error) {
    const char *key = entry->key;
    const mp_faults *faults = &entry->faults;
    MP_AUDIT(faults->health != MP_HEALTH_SOUND || !faults->retry_ns, "%s: no load failed, but requests are refused",
             key);
    MP_AUDIT(faults->health != MP_HEALTH_FAILED || faults->retry_ns, "%s: a load failed, but no backoff is set", key);
    MP_AUDIT(faults->health == MP_HEALTH_SOUND || faults->failure.code != MP_OK, "%s: a failure has no cause", key);
    MP_AUDIT(entry->unload != MP_UNLOAD_RUNNING || (!entry->resident && entry->worker_count + entry->starting == 0),
             "%s: the model is being freed while %d workers exist", key, entry->worker_count + entry->starting);
    MP_AUDIT(entry->removal != MP_REMOVAL_GONE || (!entry->resident && !entry->queue.count),
             "%s: the entry is gone, but holds a model or %d requests", key, entry->queue.count);
    MP_AUDIT(entry->shutdown != MP_SHUTDOWN_QUITTING || !entry->queue.count, "%s: %d requests wait for a worker after "
             "shutdown", key, entry->queue.count);
    return MP_OK;
}

static bool is_listed(const mp_entry *entry, const mp_worker *worker) {
    for (int i = 0; worker && i < entry->worker_count; i++)
        if (entry->workers[i] == worker)
            return true;
    return !worker;
}

static mp_status audit_queue(const mp_entry *entry, mp_error *error) {
    int count = 0, kinds[MP_QUEUE_KINDS] = {0}, yielding = entry->yielding;
    uint64_t assigned = 0;
    bool sequential = false; /* a worker may refuse all other requests while a sequential one is queued */
    for (const mp_queue_node *at = mp_queue_first(&entry->queue); at; at = mp_queue_next(&entry->queue, at)) {
        const mp_ticket *ticket = mp_ticket_of_node((mp_queue_node *)at);
        count++;
        kinds[at->kind]++;
        MP_AUDIT(ticket->state == MP_TICKET_QUEUED, "%s: a request in the queue is %s", entry->key,
                 mp_ticket_state_machine.states[ticket->state]);
        MP_AUDIT(!ticket->worker, "%s: a request is queued and active", entry->key);
        MP_AUDIT(atomic_load(&ticket->progress) != UINT64_MAX, "%s: a request is queued and done", entry->key);
        MP_AUDIT(!atomic_load(&ticket->cause), "%s: a request is queued and cancelled", entry->key);
        MP_AUDIT(ticket->entry == entry, "%s: a request is in the wrong queue", entry->key);
        sequential |= ticket->policy == MP_POLICY_SEQUENTIAL;
        yielding -= ticket->starved != 0;
        assigned += ticket->assigned ? ticket->node.cost + 1 : 0;
        MP_AUDIT(is_listed(entry, ticket->assigned), "%s: a request is queued for a worker that is gone", entry->key);
        MP_TRY(audit_dispatch(entry, ticket, error));
    }
    const mp_worker *waits = NULL;
    bool woken = sequential; /* a woken worker takes the requests, or wakes other workers */
    for (int i = 0; i < entry->worker_count; i++) {
        assigned -= entry->workers[i]->assigned_cost;
        for (int j = 0; j < entry->workers[i]->active_count; j++)
            yielding -= entry->workers[i]->active[j]->starved != 0;
        woken |= entry->workers[i]->woken;
        if (entry->workers[i]->awaits_masks && mp_dispatch_offers(entry, entry->workers[i]))
            waits = entry->workers[i];
    }
    MP_AUDIT(!yielding, "%s: %d requests more have yielded than are queued and active", entry->key, yielding);
    MP_AUDIT(!assigned, "%s: the workers count another cost of assigned requests than the queue has", entry->key);
    MP_AUDIT(woken || !waits, "%s: a request is queued although worker %u may take it and only waits for masks",
             entry->key, waits->id);
    MP_AUDIT(count == entry->queue.count, "%s: %d requests are queued and the queue counts %d", entry->key, count,
             entry->queue.count);
    for (int i = 0; i < MP_QUEUE_KINDS; i++)
        MP_AUDIT(kinds[i] == entry->queue.counts[i], "%s: %d requests of kind %d are queued and the queue counts %d",
                 entry->key, kinds[i], i, entry->queue.counts[i]);
    const bool starts = entry->faults.spawn_ns && entry->faults.health != MP_HEALTH_BROKEN &&
                        entry->shutdown != MP_SHUTDOWN_QUITTING;
    MP_AUDIT(count == 0 || mp_entry_has_workers(entry) || starts,
             "%s: %d requests are queued and no worker will take them", entry->key, count);
    return MP_OK;
}

mp_status mp_entry_audit(mp_entry *entry, int *threads, bool (*is_held)(const mp_mutex *mutex), mp_error *error) {
    if (is_held(&entry->lock))
        return MP_OK;
    MP_AUDIT(entry->worker_count >= 0 && entry->worker_count <= MP_WORKERS_MAX, "%s: %d workers", entry->key,
             entry->worker_count);
    MP_AUDIT(entry->starting >= 0 && entry->abandoned >= 0 && entry->room_waiters >= 0, "%s: a count is negative",
             entry->key);
    MP_TRY(audit_states(entry, error));
    int most = entry->services->max_workers;
    MP_AUDIT(entry->worker_count + entry->starting <= most, "%s: %d workers, the limit is %d", entry->key,
             entry->worker_count + entry->starting, most);
    MP_AUDIT(entry->faults.breaker.probing >= 0 && entry->faults.breaker.probing <= entry->services->breaker.probes,
             "%s: %d probes of the breaker", entry->key, entry->faults.breaker.probing);
    for (int i = 0; i < entry->worker_count; i++) {
        MP_TRY(audit_worker(entry, entry->workers[i], error));
        MP_AUDIT(!mp_worker_serves(entry->workers[i]) || entry->resident, "%s: worker %u serves without a model",
                 entry->key, entry->workers[i]->id);
        *threads += entry->workers[i]->threads;
    }
    return audit_queue(entry, error);
}

mp_status mp_registry_audit(mp_registry *registry, bool (*is_held)(const mp_mutex *mutex), mp_error *error) {
    int threads = 0, used = mp_cpu_allocator_leased(registry->services->allocator_pinned);
    if (is_held(&registry->lock))
        return MP_OK;
    for (int i = 0; i < registry->slot_count; i++) {
        MP_TRY(mp_entry_audit(registry->slots[i].current, &threads, is_held, error));
        if (registry->slots[i].incoming)
            MP_TRY(mp_entry_audit(registry->slots[i].incoming, &threads, is_held, error));
    }
    for (int i = 0; i < registry->leaving_count; i++)
        MP_TRY(mp_entry_audit(registry->leaving[i], &threads, is_held, error));
    if (threads > used || used > mp_cpu_allocator_threads(registry->services->allocator_pinned))
        return mp_fail(error, MP_INTERNAL, "workers hold %d compute threads, the CPU allocator counts %d of %d",
                       threads, used, mp_cpu_allocator_threads(registry->services->allocator_pinned));
    return MP_OK;
}
