/* dispatch.c: which worker takes which request, and when to start one more worker. See entry.h.
 *
 * Must hold the entry's lock in every function here. */
#include <assert.h>
#include <stdatomic.h>

#include "base/sys.h"
#include "registry/entry.h"

static bool dispatch_has_room(const mp_worker *worker) {
    return mp_worker_serves(worker) && !worker->leave && !worker->exclusive && worker->memory != MP_MEMORY_TIGHT &&
           worker->active_count < MP_ACTIVE_MAX;
}

/* Returns the load that MP_POLICY_P2C compares: the predicted cost of the worker's active requests and of the requests
 * queued for it. */
static uint64_t pending_of(const mp_worker *worker) {
    uint64_t cost = worker->assigned_cost;
    for (int i = 0; i < worker->active_count; i++)
        cost += worker->active[i]->node.cost + 1;
    return cost;
}

void mp_dispatch_assign(mp_ticket *ticket, mp_worker *worker) {
    mp_assert_held(&ticket->entry->lock);
    if (ticket->assigned)
        ticket->assigned->assigned_cost -= ticket->node.cost + 1;
    if (worker)
        worker->assigned_cost += ticket->node.cost + 1;
    ticket->assigned = worker;
}

mp_worker *mp_dispatch_choose(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    mp_worker *live[MP_WORKERS_MAX];
    int n = 0;
    for (int i = 0; i < entry->worker_count; i++)
        if (mp_worker_serves(entry->workers[i]) && !entry->workers[i]->leave)
            live[n++] = entry->workers[i];
    if (n < 2)
        return n ? live[0] : NULL;
    uint64_t random = mp_sys_random();
    int first = (int)(random % (uint64_t)n), second = (int)((random >> 32) % (uint64_t)(n - 1));
    second += second >= first;
    uint64_t at_first = pending_of(live[first]), at_second = pending_of(live[second]);
    if (at_first == at_second) /* such as two idle workers: choose the older, so that the other can leave */
        return live[first < second ? first : second];
    return at_first < at_second ? live[first] : live[second];
}

/* Returns true if the request has yielded, and no request has ended since: no memory can be free yet. */
static bool dispatch_starves(const mp_ticket *ticket) { return ticket->starved == ticket->entry->ends + 1; }

/* Returns true if another request that has begun is queued and does not starve. */
static bool others_may_run(const mp_ticket *ticket) {
    const mp_queue *queue = &ticket->entry->queue;
    for (mp_queue_node *at = mp_queue_first(queue); at; at = mp_queue_next(queue, at)) {
        const mp_ticket *other = mp_ticket_of_node(at);
        if (other != ticket && mp_ticket_begun(other) && !dispatch_starves(other))
            return true;
    }
    return false;
}

/* Returns true if the request must let others run first. */
static bool dispatch_yields(const mp_entry *entry, const mp_ticket *ticket) {
    if (!entry->yielding)
        return false;
    if (dispatch_starves(ticket))
        return mp_entry_running(entry) > 0 || others_may_run(ticket);
    return !ticket->starved && !mp_ticket_begun(ticket);
}

bool mp_dispatch_may_take(const mp_entry *entry, const mp_worker *worker, const mp_ticket *ticket) {
    mp_assert_held(&entry->lock);
    if (!dispatch_has_room(worker) || mp_entry_must_unload(entry) || dispatch_yields(entry, ticket))
        return false;
    switch (ticket->policy) {
    case MP_POLICY_SEQUENTIAL:
        return worker->active_count == 0;
    case MP_POLICY_PACK:
        for (int i = 0; entry->workers[i] != worker; i++)
            if (dispatch_has_room(entry->workers[i]))
                return false;
        return true;
    case MP_POLICY_P2C: /* an idle worker also takes requests that are assigned to a busy one */
        return !ticket->assigned || ticket->assigned == worker ||
               (worker->active_count == 0 &&
                (!mp_worker_idles(ticket->assigned) || !dispatch_has_room(ticket->assigned)));
    default:
        return true;
    }
}

/* Tells the workers in steps that a request waits. */
static void dispatch_announce(mp_entry *entry) {
    for (int i = 0; i < entry->worker_count; i++)
        if (entry->workers[i]->in_step)
            atomic_store_explicit(&entry->workers[i]->step_wanted, 1, memory_order_relaxed);
}

/* Wakes the eligible worker that became idle last: its caches are warm, and workers idle for longer can leave. */
void mp_dispatch_wake(mp_entry *entry, const mp_ticket *ticket) {
    mp_assert_held(&entry->lock);
    mp_worker *chosen = NULL;
    dispatch_announce(entry);
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        if (worker->awaits_masks && !worker->woken)
            mp_worker_wake(worker);
        if (!mp_worker_idles(worker) || !mp_dispatch_may_take(entry, worker, ticket))
            continue;
        if (worker->woken && !worker->in_step)
            return; /* this worker is awake and will see the request */
        /* one that improves its engine (improve.c) sees it later than others do */
        if (!chosen || (chosen->in_step == worker->in_step ? worker->idle_since_ns > chosen->idle_since_ns
                                                           : chosen->in_step))
            chosen = worker;
    }
    if (chosen)
        mp_worker_wake(chosen);
}

void mp_dispatch_wake_all(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (entry->queue.count)
        dispatch_announce(entry);
    for (int i = 0; i < entry->worker_count && entry->queue.count; i++) {
        mp_worker *worker = entry->workers[i];
        if (worker->awaits_masks && !worker->woken)
            mp_worker_wake(worker);
        if (!mp_worker_idles(worker) || worker->woken)
            continue;
        for (mp_queue_node *at = mp_queue_first(&entry->queue); at; at = mp_queue_next(&entry->queue, at))
            if (mp_dispatch_may_take(entry, worker, mp_ticket_of_node(at))) {
                mp_worker_wake(worker);
                break;
            }
    }
}

void mp_dispatch_forget(mp_entry *entry, const mp_worker *worker) {
    mp_assert_held(&entry->lock);
    for (mp_queue_node *at = mp_queue_first(&entry->queue); at; at = mp_queue_next(&entry->queue, at))
        if (mp_ticket_of_node(at)->assigned == worker)
            mp_dispatch_assign(mp_ticket_of_node(at), NULL);
    mp_dispatch_wake_all(entry);
}

/* Lets all workers of the model admit requests again, and wakes them if any had stopped admissions. */
void mp_dispatch_memory_free(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool any = false;
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        if (worker->memory != MP_MEMORY_TIGHT)
            continue;
        any = true;
        worker->memory = MP_MEMORY_TRIMMED;
    }
    if (any)
        mp_dispatch_wake_all(entry);
}

bool mp_dispatch_yield(mp_ticket *ticket) {
    mp_entry *entry = ticket->entry;
    mp_assert_held(&entry->lock);
    if (!others_may_run(ticket))
        return false;
    entry->yielding += !ticket->starved;
    ticket->starved = entry->ends + 1;
    return true;
}

void mp_dispatch_end(mp_ticket *ticket) {
    mp_entry *entry = ticket->entry;
    mp_ticket_set_state(ticket, MP_TICKET_ENDED);
    entry->ends++;
    if (!entry->yielding)
        return;
    entry->yielding -= ticket->starved != 0;
    mp_dispatch_wake_all(entry);
}

/* Returns the next request for this worker, or NULL if there is none: the best request of the queue. If the policy of
 * that request excludes this worker, returns the first one by priority and fair share whose policy allows it. */
static mp_ticket *next_for(const mp_entry *entry, const mp_worker *worker) {
    uint64_t now = mp_sys_now_ns();
    mp_queue_node *node = mp_queue_best(&entry->queue, now);
    if (!node || mp_dispatch_may_take(entry, worker, mp_ticket_of_node(node)))
        return node ? mp_ticket_of_node(node) : NULL;
    /* If a sequential request has waited longer than MP_QUEUE_AGEING_NS, the worker takes nothing else until it is idle
     * and can take that request. */
    if (mp_ticket_of_node(node)->policy == MP_POLICY_SEQUENTIAL && worker->active_count &&
        now > node->since_ns + MP_QUEUE_AGEING_NS)
        return NULL;
    mp_queue_node *best = NULL;
    for (node = mp_queue_first(&entry->queue); node && (!best || node->priority == best->priority);
         node = mp_queue_next(&entry->queue, node))
        if ((!best || mp_queue_precedes(&entry->queue, node, best)) &&
            mp_dispatch_may_take(entry, worker, mp_ticket_of_node(node)))
            best = node;
    return best ? mp_ticket_of_node(best) : NULL;
}

void mp_entry_notify_room(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (entry->room_waiters)
        mp_cond_broadcast(&entry->room);
    if (entry->removal != MP_REMOVAL_NONE && !entry->queue.count)
        mp_entry_wake_workers(entry); /* the workers stayed only for queued requests, and may leave now */
}

bool mp_dispatch_offers(const mp_entry *entry, const mp_worker *worker) {
    mp_assert_held(&entry->lock);
    return dispatch_has_room(worker) && !mp_entry_must_unload(entry) && next_for(entry, worker);
}

void mp_dispatch_take(mp_entry *entry, mp_worker *worker) {
    mp_assert_held(&entry->lock);
    worker->fresh_count = 0;
    while (dispatch_has_room(worker) && !mp_entry_must_unload(entry)) {
        mp_ticket *ticket = next_for(entry, worker);
        if (!ticket)
            break;
        mp_queue_take(&entry->queue, &ticket->node);
        mp_dispatch_assign(ticket, NULL);
        ticket->worker = worker;
        mp_ticket_set_state(ticket, MP_TICKET_TAKEN);
        worker->active[worker->active_count++] = ticket;
        worker->fresh[worker->fresh_count++] = ticket;
        worker->exclusive = ticket->policy == MP_POLICY_SEQUENTIAL;
    }
    if (!worker->fresh_count)
        return;
    mp_entry_notify_room(entry);
}

static bool is_busy(const mp_worker *worker, mp_policy policy) {
    if (!mp_worker_serves(worker))
        return worker->state == MP_WORKER_EVICTING || worker->state == MP_WORKER_FAILED;
    return policy == MP_POLICY_PACK ? !dispatch_has_room(worker) : worker->state == MP_WORKER_PROCESSING;
}

static int most_workers(const mp_entry *entry) {
    int most = entry->services->max_workers, threads = mp_cpu_allocator_threads(entry->services->allocator_pinned);
    return most < threads ? most : threads;
}

bool mp_dispatch_stays(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    return entry->resident && entry->unload == MP_UNLOAD_NONE && entry->removal == MP_REMOVAL_NONE &&
           entry->shutdown != MP_SHUTDOWN_QUITTING;
}

/* True if one more worker is allowed. */
static bool may_grow(const mp_entry *entry) {
    if (!mp_dispatch_stays(entry) || entry->starting || entry->yielding || entry->worker_count >= most_workers(entry))
        return false;
    for (int i = 0; i < entry->worker_count; i++)
        if (entry->workers[i]->memory == MP_MEMORY_TIGHT)
            return false;
    return true;
}

/* Announces a worker if its memory is available and the backoff has ended. */
static bool announce(mp_entry *entry, mp_guard *guard) {
    uint64_t now = mp_sys_now_ns();
    uint64_t bytes = entry->worker_count ? entry->workers[entry->worker_count - 1]->engine_bytes : 0;
    if (now < entry->scale_ns || !mp_faults_may_start(entry, now))
        return false;
    if (!mp_governor_try_reserve(entry->services->governor, bytes, guard)) {
        mp_entry_scale_later(entry);
        return false;
    }
    entry->starting++;
    return true;
}

bool mp_dispatch_scale(mp_entry *entry, mp_guard *guard) {
    mp_assert_held(&entry->lock);
    if (!entry->queue.count || !may_grow(entry))
        return false;
    mp_policy policy = mp_ticket_of_node(mp_queue_first(&entry->queue))->policy;
    for (int i = 0; i < entry->worker_count; i++)
        if (!is_busy(entry->workers[i], policy))
            return false;
    return announce(entry, guard);
}

int mp_dispatch_predicted(const mp_entry *entry, uint64_t now_ns) {
    mp_assert_held(&entry->lock);
    /* With MP_POLICY_PACK one worker serves every request. A second worker would read the weights again, for fewer
     * requests per pass. */
    if (!entry->services->predictive_scaling || entry->policy == MP_POLICY_PACK)
        return 0;
    return mp_forecast_workers(&entry->forecast, now_ns, most_workers(entry));
}

bool mp_dispatch_predict(mp_entry *entry, mp_guard *guard) {
    mp_assert_held(&entry->lock);
    if (!entry->services->predictive_scaling || !may_grow(entry) || !mp_entry_serves(entry) ||
        entry->worker_count >= mp_dispatch_predicted(entry, mp_sys_now_ns()))
        return false;
    for (int i = 0; i < entry->worker_count; i++) /* start predicted workers one after the other */
        if (entry->workers[i]->state == MP_WORKER_SPAWNING || entry->workers[i]->state == MP_WORKER_LOADING)
            return false;
    return announce(entry, guard);
}

uint64_t mp_dispatch_wait_ns(const mp_entry *entry, uint64_t cost_ahead, double pace) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        for (int j = 0; j < entry->workers[i]->active_count; j++)
            cost_ahead += entry->workers[i]->active[j]->node.cost / 2; /* on average half is done already */
    return (uint64_t)((double)cost_ahead * pace);
}
