/* serve.c: a worker's loop, from READY until it leaves. See entry.h, worker.h and models/engine.h.
 *
 * One round takes requests from the queue, admits them to the engine, plans a step, leases compute threads, runs the
 * step and delivers its outcomes. The worker owns its active items and its engine, so plan and step run without a
 * lock.
 *
 * Fairness is weighted fair queueing over steps. plan() is offered the active items in this order: by priority, then
 * by the service that their flow has received, then by the service that they have received within the flow. A flow is
 * the work of one tenant in one service class, as in the queue. Bulk work is charged BULK_WEIGHT times the service it
 * received. A new flow, and a new request of a flow, starts at virtual time: it counts as if it had received an equal
 * share of every step so far. So tenants share the steps however many requests each has, one request with 10,000 texts
 * shares them with small ones, and no request starves. */
#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/intervals.h"
#include "registry/entry.h"
#include "registry/events.h"

/* interval at which an idle worker checks whether its engine still exists */
static const uint64_t LOST_POLL_NS = 1000ull * 1000 * 1000;
/* Step budget factor for a request that is alone: longer steps have less overhead, and still end soon after another
 * request arrives. */
enum { ALONE_FACTOR = 4 };
/* Bulk work is charged this multiple of the service it received, so that interactive work gets this multiple of the
 * share of bulk work. */
enum { BULK_WEIGHT = 4 };

/* --- ending items --- */

/* Must hold the lock. Takes the request off the active list. The caller must then change the request's state. */
static void deactivate(mp_worker *w, mp_ticket *ticket) {
    mp_assert_held(&w->entry->lock);
    for (int i = 0; i < w->active_count; i++) {
        if (w->active[i] != ticket)
            continue;
        memmove(&w->active[i], &w->active[i + 1], (size_t)(w->active_count - i - 1) * sizeof(ticket));
        w->active_count--;
        ticket->worker = NULL;
        if (ticket->flow >= 0)
            mp_flows_leave(&w->flows, ticket->flow);
        ticket->flow = -1;
        if (w->active_count == 0)
            w->exclusive = false;
        return;
    }
    assert(!"an active ticket is on the list");
}

/* Must hold the lock. A request has left, or starts again: its memory may be in caches, which can be trimmed. */
static void forget_shortage(mp_worker *w) {
    mp_assert_held(&w->entry->lock);
    if (w->memory >= MP_MEMORY_TRIMMED)
        w->memory = MP_MEMORY_AMPLE;
}

/* Must not hold the lock. `error` is unused with MP_OK. */
static void end_item(mp_worker *w, mp_ticket *ticket, mp_status status, const mp_error *error) {
    mp_assert_not_held(&w->entry->lock);
    mp_entry *entry = w->entry;
    mp_error own;
    if (status != MP_OK)
        own = *error; /* `error` may be item->error, which retire may clear */
    if (status == MP_MEMORY_EXHAUSTED)
        mp_entry_explain_shortage(entry, &own);
    w->fault_failed += w->fault.code != MP_OK && status == w->fault.code;
    w->engine->ops->retire(w->engine, &ticket->item);
    uint64_t held = mp_worker_bytes(w);
    mp_mutex_lock(&entry->lock);
    deactivate(w, ticket);
    w->served++;
    mp_dispatch_end(ticket);
    /* mp_ticket_cancel has returned true: the request must not succeed, although its last step did. A result that is
     * ready at its deadline or at the shutdown is delivered. */
    bool refused = status == MP_OK && atomic_load_explicit(&ticket->cause, memory_order_acquire) == MP_CANCELLED;
    mp_worker_set_bytes(w, held);
    mp_dispatch_memory_free(entry);
    forget_shortage(w);
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish(entry, ticket, refused ? mp_ticket_cause(ticket, &own) : status, &own);
}

static void end_cancelled(mp_worker *w) {
    for (int i = w->active_count - 1; i >= 0; i--) {
        mp_ticket *ticket = w->active[i];
        /* The sweep checks deadlines too, but may run late, or never if its thread could not start. */
        if (mp_ticket_is_late(ticket))
            mp_entry_cancel(w->entry, ticket, MP_TIMEOUT);
        if (!atomic_load_explicit(&ticket->cause, memory_order_acquire))
            continue;
        mp_error error;
        mp_status status = mp_ticket_cause(ticket, &error);
        end_item(w, ticket, status, &error);
    }
}

static void serve_end_all(mp_worker *w, const mp_error *error) {
    while (w->active_count)
        end_item(w, w->active[w->active_count - 1], error->code, error);
}

/* Must hold the lock. Moves an active request to the front of the queue. Returns false if the request was cancelled: it
 * is ENDED now, and the caller must finish it. The caller must wake other workers. */
static bool requeue(mp_worker *w, mp_ticket *ticket) {
    mp_assert_held(&w->entry->lock);
    deactivate(w, ticket);
    if (atomic_load_explicit(&ticket->cause, memory_order_acquire)) {
        mp_dispatch_end(ticket);
        return false;
    }
    mp_ticket_set_state(ticket, MP_TICKET_QUEUED);
    mp_queue_push_front(&w->entry->queue, &ticket->node);
    return true;
}

/* Call when the engine was lost in admit or plan with this request. If the request has no retry left, ends it: one
 * request must not take down one worker after the other. Otherwise the request stays active: the worker returns its
 * active requests to the queue when it leaves. */
static void lost_with(mp_worker *w, mp_ticket *ticket) {
    mp_mutex_lock(&w->entry->lock);
    bool again = mp_faults_between_steps(w->entry, ticket, w->active_count == 1, w->engine->external_kill);
    mp_mutex_unlock(&w->entry->lock);
    if (again)
        return;
    mp_error error = w->fault;
    end_item(w, ticket, error.code, &error);
}

/* Returns the fresh requests from index `from` on, which were not admitted, to the queue. */
static void put_back_fresh(mp_worker *w, int from) {
    mp_entry *entry = w->entry;
    mp_ticket *cancelled = NULL;
    mp_mutex_lock(&entry->lock);
    for (int i = w->fresh_count - 1; i >= from; i--) {
        mp_ticket *ticket = w->fresh[i];
        if (requeue(w, ticket))
            continue;
        ticket->next = cancelled;
        cancelled = ticket;
    }
    mp_dispatch_wake_all(entry);
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, cancelled, NULL);
}

/* Frees the engine memory of an active request and returns the request to the front of the queue. Counts it in the
 * metric preemptions, or in retries if the worker has a fault. */
static void serve_preempt(mp_worker *w, mp_ticket *ticket) {
    mp_entry *entry = w->entry;
    bool retry = w->fault.code != MP_OK;
    mp_count(entry->services, retry ? MP_METRIC_retries : MP_METRIC_preemptions, 1);
    w->fault_retried += retry;
    if (ticket->state == MP_TICKET_ADMITTED)
        w->engine->ops->preempt(w->engine, &ticket->item);
    mp_mutex_lock(&entry->lock);
    entry->reasons.retries[mp_faults_reason(w->fault.code, w->engine)] += retry;
    bool waits = requeue(w, ticket);
    mp_dispatch_wake_all(entry);
    mp_mutex_unlock(&entry->lock);
    if (waits)
        return;
    mp_error error;
    mp_status status = mp_ticket_cause(ticket, &error);
    mp_entry_finish(entry, ticket, status, &error);
}

/* --- taking work --- */

/* Must not hold the lock. Records the fault that ends the worker. Call before a request ends because of it: a caller
 * that sees the error must not find a worker that serves. */
static void set_fault(mp_worker *w, const mp_error *fault) {
    mp_assert_not_held(&w->entry->lock);
    mp_entry *entry = w->entry;
    w->fault = *fault;
    mp_mutex_lock(&entry->lock);
    w->leave = true;
    if (fault->code == MP_INTEGRITY) /* the other workers use the same files */
        mp_entry_request_unload(entry);
    mp_dispatch_wake_all(entry); /* other workers must take the requests for which this worker had room */
    mp_mutex_unlock(&entry->lock);
}

/* Must not hold the lock. If the engine is lost, records the fault that ends the worker. */
static bool is_lost(mp_worker *w) {
    mp_assert_not_held(&w->entry->lock);
    const mp_error *lost = w->engine->lost ? w->engine->lost(w->engine) : NULL;
    if (lost)
        set_fault(w, lost);
    return lost != NULL;
}

/* Must hold the lock. Waits for work until `until_ns` (0: no limit) or until the worker is woken. May return early. */
static void wait_for_work(mp_worker *w, uint64_t until_ns) {
    mp_assert_held(&w->entry->lock);
    mp_entry *entry = w->entry;
    mp_services *services = entry->services;
    if (w->state == MP_WORKER_PROCESSING)
        mp_worker_set_state(w, MP_WORKER_IDLE);
    if (w->memory == MP_MEMORY_ASKED) { /* stays so until the caches are free: their bytes count as being freed */
        mp_mutex_unlock(&entry->lock);
        w->engine->ops->trim(w->engine);
        uint64_t held = mp_worker_bytes(w);
        mp_mutex_lock(&entry->lock);
        w->memory = MP_MEMORY_TRIMMED;
        mp_worker_set_bytes(w, held);
        mp_mutex_unlock(&entry->lock);
        mp_governor_notify(services->governor);
        mp_mutex_lock(&entry->lock);
        return;
    }
    uint64_t wait_ns = entry->keep_alive_ns;
    mp_spin_rule rule = mp_entry_spin_rule(entry);
    bool critical = mp_governor_pressure(services->governor) == MP_PRESSURE_CRITICAL;
    if (critical && wait_ns > MP_CRITICAL_POLL_NS)
        wait_ns = MP_CRITICAL_POLL_NS;
    uint64_t due = mp_sys_after(w->idle_since_ns, wait_ns);
    if (w->runnable || due < atomic_load_explicit(&services->maintenance.next_ns, memory_order_relaxed)) {
        mp_mutex_unlock(&entry->lock);
        mp_worker_set_runnable(w, false);
        mp_maintenance_at(&services->maintenance, services->pool, due); /* MP_FOREVER: nothing to announce */
        mp_mutex_lock(&entry->lock);
        if (w->woken || w->state == MP_WORKER_DEAD)
            return;
    }
    mp_event_count_wait(&w->wake, &entry->lock, &rule, until_ns);
}

/* Must hold the lock. Returns the time until which an idle worker waits for more requests to form a larger batch; 0 =
 * do not wait. */
static uint64_t gather_until(const mp_worker *w) {
    mp_assert_held(&w->entry->lock);
    uint64_t wait_ns = w->entry->services->batch_wait_ns, now;
    mp_queue_node *first = wait_ns && !w->active_count ? mp_queue_first(&w->entry->queue) : NULL;
    if (!first || (now = mp_sys_now_ns()) >= first->since_ns + wait_ns)
        return 0;
    return first->since_ns + wait_ns;
}

/* Waits until a request is active, or until the engine shall improve itself; then none is active. Returns false if the
 * worker must leave; then no request is active. */
static bool take_work(mp_worker *w) {
    mp_entry *entry = w->entry;
    for (;;) {
        end_cancelled(w);
        is_lost(w);
        mp_mutex_lock(&entry->lock);
        if (w->state == MP_WORKER_DEAD)
            break;
        w->woken = false;
        uint64_t until_ns = gather_until(w);
        if (w->retry_ns && mp_sys_now_ns() >= w->retry_ns) {
            if (w->memory == MP_MEMORY_TIGHT)
                w->memory = MP_MEMORY_TRIMMED;
            w->retry_ns = 0;
        }
        /* On shutdown, mp_entry_quit has cancelled the active requests and emptied the queue. */
        if (w->fault.code != MP_OK) /* other workers must take the requests for which this one was woken */
            mp_dispatch_wake_all(entry);
        bool over = entry->shutdown == MP_SHUTDOWN_QUITTING || w->fault.code != MP_OK;
        if (!over && !until_ns)
            mp_dispatch_take(entry, w);
        if (w->active_count) {
            w->improve_ns = 0;
            if (w->state != MP_WORKER_PROCESSING)
                mp_worker_set_state(w, MP_WORKER_PROCESSING);
            mp_dispatch_wake_all(entry); /* other workers may take requests that are assigned to this one now */
            mp_guard guard = {0};
            bool scale = mp_dispatch_scale(entry, &guard); /* this worker may have been the last idle one */
            mp_mutex_unlock(&entry->lock);
            if (scale)
                mp_entry_launch(entry, guard);
            mp_worker_set_runnable(w, true);
            return true;
        }
        if (over || w->leave || mp_entry_must_unload(entry) ||
            (entry->removal != MP_REMOVAL_NONE && entry->queue.count == 0))
            break;
        if (w->retry_ns && (!until_ns || w->retry_ns < until_ns))
            until_ns = w->retry_ns;
        uint64_t poll_ns = w->engine->lost ? mp_sys_now_ns() + LOST_POLL_NS : 0;
        if (poll_ns && (!until_ns || poll_ns < until_ns))
            until_ns = poll_ns;
        const uint64_t improve_ns = mp_worker_next_improve_ns(w);
        if (improve_ns && mp_sys_now_ns() >= improve_ns) {
            mp_mutex_unlock(&entry->lock);
            return true;
        }
        if (improve_ns && (!until_ns || improve_ns < until_ns))
            until_ns = improve_ns;
        wait_for_work(w, until_ns);
        mp_mutex_unlock(&entry->lock);
    }
    mp_mutex_unlock(&entry->lock);
    return false;
}

/* A request was admitted. Raises the flow, if it was idle, to virtual time, and starts the request at the flow's clock:
 * a flow or request has no claim on steps before it arrived. */
static void enter_flow(mp_worker *w, mp_ticket *ticket) {
    bool fresh;
    int flow = mp_flows_enter(&w->flows, ticket->node.tenant, ticket->node.kind, &fresh);
    bool was_idle = w->flows.slots[flow].users == 1;
    if (fresh || (was_idle && w->flow_ns[flow] < w->virtual_ns))
        w->flow_ns[flow] = w->virtual_ns;
    ticket->flow = flow;
    ticket->virtual_ns = w->clock_ns[flow];
}

/* Charges a step that was offered n items: every planned request is charged its share of the step's time. Virtual time
 * advances by what each offered flow would get of the step, and the clock of a flow by what each of its requests would
 * get of the flow's part, if all had equal shares. */
static void serve_charge(mp_worker *w, int n, uint64_t took_ns) {
    int requests[MP_WORKER_FLOWS] = {0};
    uint64_t weights = 0;
    for (int i = 0; i < n; i++) {
        const mp_ticket *ticket = w->offered[i]->ticket;
        if (requests[ticket->flow]++ == 0)
            weights += ticket->item.service_class == MP_SERVICE_BULK ? 1 : BULK_WEIGHT;
    }
    w->virtual_ns += took_ns * BULK_WEIGHT / weights;
    double amount = 0;
    for (int i = 0; i < w->plan.count; i++)
        amount += w->plan.amount[i];
    for (int i = 0; i < w->plan.count; i++) {
        mp_ticket *ticket = w->plan.items[i]->ticket;
        int flow = ticket->flow;
        double share = amount > 0 ? w->plan.amount[i] / amount : 1.0 / w->plan.count;
        uint64_t had = (uint64_t)((double)took_ns * share);
        w->clock_ns[flow] += had / (uint64_t)(requests[flow] ? requests[flow] : 1);
        w->flow_ns[flow] += had * (ticket->item.service_class == MP_SERVICE_BULK ? BULK_WEIGHT : 1);
        ticket->virtual_ns += had;
        ticket->had_ns += had;
    }
}

/* The engine has admitted the request. Its cost may be new: the model was not loaded when the request was queued. */
static void note_admitted(mp_worker *w, mp_ticket *ticket) {
    mp_mutex_lock(&w->entry->lock);
    mp_ticket_set_state(ticket, MP_TICKET_ADMITTED);
    ticket->node.cost = ticket->item.cost_ns;
    mp_mutex_unlock(&w->entry->lock);
}

/* Charges what the check of the request has added to its bytes, and passes it to the engine. */
static mp_status serve_admit(mp_worker *w, mp_ticket *ticket, mp_error *error) {
    atomic_store(&w->entry->account.beside, 0);
    MP_TRY(mp_entry_charge(w->entry, ticket, error));
    return w->engine->ops->admit(w->engine, &ticket->item, error);
}

/* True if requests of the model are active, without those from fresh[from] on: they hold no memory yet. */
static bool others_are_active(mp_worker *w, int from) {
    mp_mutex_lock(&w->entry->lock);
    bool others = mp_entry_running(w->entry) > w->fresh_count - from;
    mp_mutex_unlock(&w->entry->lock);
    return others;
}

static void admit_fresh(mp_worker *w) {
    mp_entry *entry = w->entry;
    for (int i = 0; i < w->fresh_count; i++) {
        mp_ticket *ticket = w->fresh[i];
        mp_error error;
        mp_error_clear(&error);
        if (mp_ticket_is_late(ticket))
            mp_entry_cancel(entry, ticket, MP_TIMEOUT); /* the request expired in the queue, and the sweep is late */
        if (atomic_load_explicit(&ticket->cause, memory_order_acquire))
            continue; /* end_cancelled ends it */
        mp_status status = mp_faults_screen(entry, ticket, &error);
        if (status == MP_OK)
            status = mp_entry_check(w->resident, ticket, &error);
        if (status != MP_OK) {
            end_item(w, ticket, status, &error);
            continue;
        }
        status = serve_admit(w, ticket, &error);
        if (status == MP_MEMORY_EXHAUSTED && mp_worker_trim(w))
            status = serve_admit(w, ticket, &error);
        if (status == MP_MEMORY_EXHAUSTED && !others_are_active(w, i)) {
            put_back_fresh(w, i + 1); /* their outputs are in the way too */
            w->fresh_count = i + 1;
            if (mp_worker_drop_outputs(w))
                status = serve_admit(w, ticket, &error);
        }
        if (status == MP_OK) {
            note_admitted(w, ticket);
            enter_flow(w, ticket);
            continue;
        }
        if (status != MP_MEMORY_EXHAUSTED && is_lost(w)) { /* another worker may try the request once */
            lost_with(w, ticket);
            put_back_fresh(w, i + 1);
            break;
        }
        if (status != MP_MEMORY_EXHAUSTED) {
            end_item(w, ticket, status, &error);
            continue;
        }
        /* Decide what this worker waits for. If other requests of this model hold memory, wait until one of them has
         * left. Otherwise, if other models can free memory, wait until they have. If this worker holds no memory, this
         * wait gets a time limit: the requests of other workers may end before the call, and two workers may each
         * refuse a request because of the other's. Otherwise, let queued requests run that have begun. */
        bool mine = w->active_count > w->fresh_count - i, waits = others_are_active(w, i) || mp_worker_reclaim(w);
        mp_mutex_lock(&entry->lock);
        bool yields = !waits && mp_worker_yield(w, ticket);
        if (waits)
            mp_worker_block_admission(w, !mine);
        mp_mutex_unlock(&entry->lock);
        if (!waits && !yields) {
            end_item(w, ticket, status, &error);
            continue;
        }
        put_back_fresh(w, i);
        break;
    }
    w->fresh_count = 0;
}

/* --- steps --- */

static bool comes_before(const mp_worker *w, const mp_item *a, const mp_item *b) {
    if (a->priority != b->priority)
        return a->priority < b->priority;
    const mp_ticket *x = a->ticket, *y = b->ticket;
    uint64_t a_had = w->flow_ns[x->flow], b_had = w->flow_ns[y->flow];
    if (a_had != b_had)
        return a_had < b_had;
    a_had = x->virtual_ns;
    b_had = y->virtual_ns;
    if (a_had != b_had)
        return a_had < b_had;
    return a->sequence < b->sequence;
}

/* Sorts the active items by insertion: their order changes little between steps. Leaves out items that are cancelled or
 * not admitted. */
static int order_items(mp_worker *w) {
    int n = 0;
    for (int i = 0; i < w->active_count; i++) {
        mp_ticket *ticket = w->active[i];
        mp_item *item = &ticket->item;
        if (ticket->state != MP_TICKET_ADMITTED || atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            continue;
        int at = n++;
        for (; at > 0 && comes_before(w, item, w->order[at - 1]); at--)
            w->order[at] = w->order[at - 1];
        w->order[at] = item;
    }
    return n;
}

static bool is_suspect(const mp_item *item) {
    const mp_ticket *ticket = item->ticket;
    return mp_faults_suspected(&ticket->faults);
}

/* Chooses the items to offer to the engine for turn number `turn`: all of them if no suspect is among them. A suspect
 * takes its steps alone, so that a second failure has one cause. A suspect's steps and steps of all other items
 * alternate; if the items of a turn have nothing to do, the next turn follows at once. Returns the number offered; 0 =
 * every turn was tried. */
static int offer(mp_worker *w, int n, int turn) {
    int suspects = 0, offered = 0;
    for (int i = 0; i < n; i++)
        suspects += is_suspect(w->order[i]);
    bool others = suspects < n, first = others && !is_suspect(w->order[0]) && !w->suspects_next;
    int which = turn - first; /* index of the suspect; -1 or `suspects` stands for all other items */
    if (which >= suspects + (others && !first))
        return 0;
    for (int i = 0, seen = 0; i < n; i++) {
        bool suspect = is_suspect(w->order[i]);
        if (suspect ? seen++ == which : which < 0 || which == suspects)
            w->offered[offered++] = w->order[i];
    }
    return offered;
}

/* Plans a step for the first turn whose items have something to do. Returns the number of items offered. Sets *lost if
 * the engine was lost. */
static int plan_step(mp_worker *w, int n, uint64_t budget_ns, int alone_threads, bool *lost) {
    int offered = 0, count;
    w->plan.count = 0;
    *lost = false;
    for (int turn = 0; !w->plan.count && !*lost && (count = offer(w, n, turn)) > 0; turn++) {
        offered = count;
        w->plan.threads = 1;
        w->plan.alone_threads = alone_threads;
        w->plan.masks = w->plan.barrier_bound = false;
        w->plan.cost_ns = 0;
        w->engine->ops->plan(w->engine, w->offered, count, budget_ns, &w->plan);
        assert((w->plan.count > 0 || w->plan.masks) && w->plan.count <= count);
        *lost = is_lost(w);
    }
    if (w->plan.count)
        w->suspects_next = offered < n && !is_suspect(w->offered[0]);
    return offered;
}

/* Must not hold the lock. Returns false if every planned request was cancelled meanwhile. */
static bool enter_step(mp_worker *w, uint64_t now_ns) {
    mp_assert_not_held(&w->entry->lock);
    mp_entry *entry = w->entry;
    int live = 0;
    mp_mutex_lock(&entry->lock);
    for (int i = 0; i < w->plan.count; i++) {
        mp_ticket *ticket = w->plan.items[i]->ticket;
        mp_ticket_set_state(ticket, MP_TICKET_STEPPING);
        live += atomic_load_explicit(&ticket->cause, memory_order_relaxed) == 0;
    }
    w->step_live = live;
    w->in_step = true;
    atomic_store_explicit(&w->lease.heartbeat, now_ns, memory_order_relaxed);
    mp_watch_reset(&w->watch, now_ns);
    atomic_store_explicit(&w->step_cancelled, live == 0, memory_order_release);
    atomic_store_explicit(&w->step_wanted, entry->queue.count > 0, memory_order_relaxed);
    mp_mutex_unlock(&entry->lock);
    return live > 0;
}

/* Updates a running mean. Limits the sample to four times the mean: a single step that was delayed is not
 * representative. */
static void serve_run_mean(double *mean, double sample) {
    if (*mean <= 0)
        *mean = sample;
    *mean += ((sample < 4 * *mean ? sample : 4 * *mean) - *mean) / 16;
}

/* Ends a step that was offered n items. cut_short: it did less than planned, so its pace is unknown. Returns true if
 * the worker was abandoned meanwhile. */
static bool leave_step(mp_worker *w, int n, uint64_t took_ns, bool cut_short) {
    mp_entry *entry = w->entry;
    uint64_t held = mp_worker_bytes(w);
    mp_mutex_lock(&entry->lock);
    bool dead = w->state == MP_WORKER_DEAD;
    mp_worker_set_bytes(w, held);
    w->in_step = w->moving = false;
    w->step_live = 0;
    for (int i = 0; i < w->plan.count && !dead; i++)
        mp_ticket_set_state(w->plan.items[i]->ticket, MP_TICKET_ADMITTED);
    w->step_ns += took_ns;
    if (!dead && w->plan.cost_ns && !cut_short) {
        double pace = (double)took_ns / (double)w->plan.cost_ns;
        serve_run_mean(&entry->pace, pace);
        if (w->plan.count < n)
            serve_run_mean(&entry->full_pace, pace);
    }
    mp_mutex_unlock(&entry->lock);
    return dead;
}

/* Frees memory for a request that found none in a step: first the engine's caches, once, and the outputs of queued
 * requests without results. After that, the youngest request of the lowest priority is preempted and returns to the
 * front of the queue. If only the waiting request is active and no memory is being freed, queued requests that have
 * begun run first, because their results hold memory. If none of them can go on, the waiting request is tried once
 * more, and then fails. */
static void make_memory(mp_worker *w, mp_ticket *waiting) {
    mp_entry *entry = w->entry;
    if (mp_worker_trim(w) || mp_worker_drop_outputs(w))
        return;
    mp_ticket *victim = NULL;
    for (int i = 0; i < w->active_count; i++) {
        mp_ticket *ticket = w->active[i];
        if (ticket->state != MP_TICKET_ADMITTED)
            continue;
        if (!victim || ticket->item.priority > victim->item.priority ||
            (ticket->item.priority == victim->item.priority && ticket->item.sequence > victim->item.sequence))
            victim = ticket;
    }
    bool alone = w->active_count == 1, coming = alone && mp_worker_reclaim(w);
    mp_mutex_lock(&entry->lock);
    bool others = mp_entry_running(entry) > w->active_count, waits = !alone || coming || others;
    bool yields = !waits && mp_worker_yield(w, waiting);
    waits = waits || (!yields && mp_faults_shortage(entry, waiting));
    if (waits)
        mp_worker_block_admission(w, alone || others);
    mp_mutex_unlock(&entry->lock);
    if (waits || yields) {
        serve_preempt(w, victim);
        return;
    }
    mp_error error;
    mp_fail(&error, MP_MEMORY_EXHAUSTED,
            "%s: the request needs more memory than is free, although no other request of the model is active; send a "
            "smaller request, unload other models, or raise the limit (%smemory_bytes, MPOOL_MEMORY_MB)", entry->key,
            w->engine->process ? "process_memory of PoolConfig, " : "");
    end_item(w, waiting, error.code, &error);
}

/* A step failed for this request: retry it or end it. */
static void fail_item(mp_worker *w, mp_ticket *ticket, bool alone, mp_step_fault *step) {
    mp_entry *entry = w->entry;
    mp_error error = ticket->item.error;
    if (error.code == MP_OK)
        mp_fail(&error, MP_MODEL, "%s: the model failed in a step and gave no reason", entry->key);
    w->end_noted |= error.code == MP_INTERNAL || error.code == MP_RECV;
    mp_mutex_lock(&entry->lock);
    bool again = mp_faults_step(entry, ticket, error.code, alone, w->engine->external_kill, step);
    mp_mutex_unlock(&entry->lock);
    if (!again) {
        end_item(w, ticket, error.code, &error);
        return;
    }
    if (ticket->item.request->resumable) {
        w->engine->ops->preempt(w->engine, &ticket->item);
    } else {
        w->engine->ops->retire(w->engine, &ticket->item);
        ticket->item.cursor = 0;
    }
    mp_error_clear(&ticket->item.error);
    mp_count(entry->services, MP_METRIC_retries, 1);
    w->fault_retried += w->fault.code != MP_OK;
    mp_mutex_lock(&entry->lock);
    entry->reasons.retries[mp_faults_reason(error.code, w->engine)]++;
    bool waits = requeue(w, ticket);
    mp_dispatch_wake_all(entry);
    mp_dispatch_memory_free(entry);
    forget_shortage(w);
    mp_mutex_unlock(&entry->lock);
    if (waits)
        return;
    mp_status status = mp_ticket_cause(ticket, &error);
    mp_entry_finish(entry, ticket, status, &error);
}

static void deliver_outcomes(mp_worker *w) {
    uint64_t now_ns = mp_maintenance_clock(&w->entry->services->maintenance, NULL);
    mp_ticket *waiting = NULL;
    bool some_ended = false;
    mp_step_fault fault = {0};
    for (int i = 0; i < w->plan.count; i++) { /* first: an internal error or a lost engine ends the worker */
        mp_error *error = &w->plan.items[i]->error;
        if (w->outcomes[i] == MP_OUTCOME_FAILED && error->code == MP_INTERNAL) {
            set_fault(w, error);
        } else if (w->outcomes[i] == MP_OUTCOME_FAILED && error->code == MP_RECV) {
            is_lost(w);
        } else if (w->outcomes[i] == MP_OUTCOME_FAILED && error->code == MP_MEMORY_EXHAUSTED) {
            w->outcomes[i] = MP_OUTCOME_WAIT_MEMORY; /* a failed step has changed nothing */
            mp_error_clear(error);
        }
    }
    for (int i = 0; i < w->plan.count; i++) {
        mp_ticket *ticket = w->plan.items[i]->ticket;
        if (w->outcomes[i] != MP_OUTCOME_WAIT_MEMORY) /* a request with WAIT_MEMORY made no progress */
            atomic_store_explicit(&ticket->moved_ns, now_ns, memory_order_relaxed);
        switch (w->outcomes[i]) {
        case MP_OUTCOME_DONE:
            some_ended = true;
            end_item(w, ticket, MP_OK, NULL);
            break;
        case MP_OUTCOME_FAILED:
            some_ended = true;
            fail_item(w, ticket, w->plan.count == 1, &fault);
            break;
        case MP_OUTCOME_WAIT_MEMORY:
            waiting = ticket;
            break;
        case MP_OUTCOME_WAIT_MASK: /* the next plan checks for the mask */
        case MP_OUTCOME_MORE:
            mp_ticket_publish(ticket);
            break;
        }
    }
    if (waiting && !some_ended)
        make_memory(w, waiting);
}

static void serve_count_work(mp_worker *w) {
    mp_services *services = w->entry->services;
    const mp_step_work *work = &w->engine->work;
    mp_count(services, MP_METRIC_passes, work->passes - w->counted.passes);
    mp_count(services, MP_METRIC_rows, work->rows - w->counted.rows);
    atomic_fetch_add_explicit(&w->entry->rows, work->rows - w->counted.rows, memory_order_relaxed);
    mp_count(services, MP_METRIC_prefix_tokens, work->prefix_tokens - w->counted.prefix_tokens);
    mp_count(services, MP_METRIC_draft_tokens, work->draft_tokens - w->counted.draft_tokens);
    mp_count(services, MP_METRIC_accepted_draft_tokens, work->accepted_draft_tokens - w->counted.accepted_draft_tokens);
    mp_count(services, MP_METRIC_dedup_hits, work->dedup_hits - w->counted.dedup_hits);
    w->counted = *work;
}

/* Every active request waits for a grammar mask. A new mask, a new request and a cancellation wake the worker;
 * deadlines are polled every MP_DEADLINE_POLL_NS. `woken` was cleared before the plan checked the masks. Requests and
 * cancellations that came between that check and now did not wake this worker, because `awaits_masks` was not set, so
 * check for them here. */
static void wait_for_masks(mp_worker *w) {
    mp_entry *entry = w->entry;
    mp_mutex_lock(&entry->lock);
    bool over = w->woken || w->state == MP_WORKER_DEAD || mp_dispatch_offers(entry, w);
    for (int i = 0; i < w->active_count; i++)
        over = over || atomic_load_explicit(&w->active[i]->cause, memory_order_relaxed) != 0;
    if (!over) {
        w->awaits_masks = true;
        mp_event_count_wait(&w->wake, &entry->lock, NULL, mp_sys_now_ns() + MP_DEADLINE_POLL_NS);
        w->awaits_masks = false;
    }
    mp_mutex_unlock(&entry->lock);
}

/* A model file was changed. The step may have read both versions, so its results are discarded. */
static void end_changed(mp_worker *w) {
    mp_error error;
    mp_fail(&error, MP_INTEGRITY, "%s: a model file was changed or truncated while the model was in use; repeat the "
            "request to load the file again", w->entry->key);
    set_fault(w, &error);
    serve_end_all(w, &error);
}

/* Runs one step. Returns false if the worker was abandoned. */
static bool serve_step(mp_worker *w) {
    mp_entry *entry = w->entry;
    mp_services *services = entry->services;
    int n = order_items(w);
    if (!n)
        return true;
    mp_mutex_lock(&entry->lock);
    bool alone = w->active_count == 1 && entry->queue.count == 0;
    mp_mutex_unlock(&entry->lock);
    uint64_t budget_ns = services->step_budget_ns;
    alone = alone && !mp_cpu_allocator_contended(services->allocator_pinned);
    if (alone)
        budget_ns *= ALONE_FACTOR;
    bool lost;
    n = plan_step(w, n, budget_ns, alone ? mp_cpu_allocator_threads(services->allocator_pinned) : 0, &lost);
    if (lost) { /* no step was running, but an offered request may be the cause */
        for (int i = 0; i < n; i++)
            lost_with(w, w->offered[i]->ticket);
        return true;
    }
    if (w->plan.count == 0) {
        wait_for_masks(w);
        return true;
    }
    int most = w->plan.barrier_bound ? mp_cpu_allocator_barrier_threads(services->allocator_pinned) : w->plan.threads;
    if (!mp_worker_lease(w, w->plan.threads < most ? w->plan.threads : most))
        return true; /* an active request was cancelled: the next round ends it and plans again */
    w->lease.barrier_bound = w->plan.barrier_bound;
    uint64_t began_ns = mp_sys_now_ns();
    bool live = enter_step(w, began_ns);
    if (live) {
        for (int i = 0; i < w->plan.count; i++) {
            mp_ticket *ticket = w->plan.items[i]->ticket;
            if (!atomic_load_explicit(&ticket->started_ns, memory_order_relaxed)) {
                atomic_store_explicit(&ticket->started_ns, began_ns, memory_order_relaxed);
                mp_events_post(MP_EVENT_REQUEST_START, services->number, entry->key, w->id, ticket->number, MP_OK);
            }
            w->outcomes[i] = MP_OUTCOME_MORE;
        }
        mp_maintenance_at(&services->maintenance, services->pool, began_ns + services->stall_timeout_ns / 4);
        atomic_store(&entry->account.beside, 0);
        w->engine->ops->step(w->engine, &w->lease, &w->plan, w->outcomes);
    }
    uint64_t now_ns = mp_sys_now_ns(), took_ns = now_ns - began_ns;
    const bool cut_short = w->lease.cut_short;
    mp_worker_return_threads(w);
    if (leave_step(w, n, live ? took_ns : 0, cut_short))
        return false;
    if (!live)
        return true;
    mp_count(services, MP_METRIC_steps, 1);
    mp_count(services, MP_METRIC_step_items, (uint64_t)w->plan.count);
    mp_count(services, w->plan.count == n ? MP_METRIC_batches_of_all : MP_METRIC_batches_of_budget, 1);
    serve_count_work(w);
    serve_charge(w, n, took_ns);
    if (w->resident->model->ops->healthy(w->resident->model))
        deliver_outcomes(w);
    else
        end_changed(w);
    return true;
}

void mp_worker_serve(mp_worker *w) {
    while (take_work(w)) {
        if (w->active_count == 0) {
            if (!mp_worker_improve(w))
                return;
            continue;
        }
        admit_fresh(w);
        if (w->fault.code == MP_OK && !serve_step(w))
            return;
        is_lost(w);
        if (w->fault.code != MP_OK) { /* other workers continue the requests, with identical results */
            while (w->active_count)
                serve_preempt(w, w->active[w->active_count - 1]);
            break;
        }
    }
    mp_worker_set_runnable(w, false); /* also after a fault: the worker must not keep a share of the CPUs */
}
