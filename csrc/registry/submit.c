/* submit.c: how a request enters the queue, and its place there. See entry.h. */
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */

#include "base/intervals.h"
#include "registry/entry.h"

static const char FEWER[] = "Send fewer requests at once, or raise `timeout` or `request_timeout`";
enum { PATIENCE_WAITS = 3 }; /* multiple of the predicted wait, because predictions are imprecise */

/* --- submit --- */

/* Must hold the lock. Returns why the entry accepts no request now, or MP_OK. */
static mp_status refusal(mp_entry *entry, mp_ticket *ticket, bool *gone, mp_error *error) {
    mp_assert_held(&entry->lock);
    if (entry->shutdown != MP_SHUTDOWN_OPEN)
        return mp_fail(error, MP_SHUTTING_DOWN, "%s: the pool is shutting down", entry->key);
    if (entry->removal != MP_REMOVAL_NONE) {
        *gone = true;
        return mp_fail(error, MP_UNKNOWN_MODEL, "%s: the model was removed", entry->key);
    }
    if (ticket->hurried && entry->load_stuck)
        return mp_entry_fail_held(entry, MP_NEED_OF_LOAD, error);
    return mp_faults_refusal(entry, ticket, error);
}

/* Must hold the lock. Applies mp_registry_config.scale_timeout. Deadlines do not change. */
static void stretch_patience(mp_entry *entry, mp_ticket *ticket) {
    mp_assert_held(&entry->lock);
    uint64_t least = entry->services->patience_ns, most = least * MP_PATIENCE_SCALE;
    if (!ticket->stretches || most / MP_PATIENCE_SCALE != least)
        return;
    uint64_t wait_ns = mp_dispatch_wait_ns(entry, entry->queue.cost + ticket->item.cost_ns, entry->pace);
    uint64_t wanted = wait_ns < most / PATIENCE_WAITS ? wait_ns * PATIENCE_WAITS : most;
    if (wanted > ticket->patience_ns)
        ticket->patience_ns = wanted;
}

/* Must hold the lock; releases it while waiting. Waits for room in the queue. */
static mp_status wait_for_room(mp_entry *entry, const mp_ticket *ticket, const mp_submit_options *options,
                               mp_error *error) {
    mp_assert_held(&entry->lock);
    int waiting = entry->queue.count, kind = ticket->node.kind;
    if (options->fail_fast) {
        double eta = (double)mp_dispatch_wait_ns(entry, entry->queue.cost, entry->pace) * 1e-9;
        return mp_fail(error, MP_OVERLOADED, "%s: the queue is full (%d requests); try again in %.1f s", entry->key,
                       waiting, eta > 0.1 ? eta : 0.1);
    }
    uint64_t now, clock = mp_maintenance_clock(&entry->services->maintenance, &now);
    uint64_t due = mp_ticket_due(ticket), slice = now + MP_DEADLINE_POLL_NS;
    if (clock >= due)
        return mp_fail_hint(error, MP_TIMEOUT, FEWER,
                            "%s: the queue was full until the time limit of the request (requests in the queue: %d)",
                            entry->key, waiting);
    if (due - clock < slice - now)
        slice = now + (due - clock);
    entry->room_waiters++;
    mp_cond_wait(&entry->room, &entry->lock, slice);
    entry->room_waiters--;
    if (!options->give_up || !mp_queue_full(&entry->queue, kind))
        return MP_OK;
    mp_mutex_unlock(&entry->lock);
    bool give_up = options->give_up(options->give_up_arg);
    mp_mutex_lock(&entry->lock);
    return give_up ? mp_fail(error, MP_CANCELLED, "%s: the request was cancelled while it waited for room in the queue",
                             entry->key) : MP_OK;
}

/* Must hold the lock. Refuses a request that will probably miss its deadline. */
static mp_status check_deadline(mp_entry *entry, const mp_ticket *ticket, mp_error *error) {
    mp_assert_held(&entry->lock);
    uint64_t now = mp_maintenance_clock(&entry->services->maintenance, NULL), deadline = ticket->due_ns;
    if (!deadline)
        return MP_OK;
    if (now >= deadline)
        return mp_fail_hint(error, MP_TIMEOUT, "Raise `timeout`",
                            "%s: the deadline had passed before the request was queued", entry->key);
    /* Predictions are imprecise: refuse only if other requests are queued and the predicted wait exceeds four times the
     * time left. */
    uint64_t wait_ns =
        entry->queue.count ? mp_dispatch_wait_ns(entry, entry->queue.cost, entry->full_pace) : 0;
    if (wait_ns / 4 <= deadline - now)
        return MP_OK;
    return mp_fail_hint(error, MP_TIMEOUT, FEWER,
                        "%s: the queue has %d requests, which take about %.1f s, but the deadline is in %.1f s",
                        entry->key, entry->queue.count, (double)wait_ns * 1e-9, (double)(deadline - now) * 1e-9);
}

/* Must not hold the lock. Charges the bytes of the request. While other requests, loads and evictions hold the memory,
 * waits for it, within the limits of the request; OVERLOADED with MP_FIELD_MEMORY if the request has `fail_fast`. */
static mp_status charge_in_time(mp_entry *entry, mp_ticket *ticket, const mp_submit_options *options,
                                mp_error *error) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    uint64_t bytes = ticket->item.request->bytes;
    for (;;) {
        mp_status status = mp_entry_charge(entry, ticket, error);
        if (status != MP_MEMORY_EXHAUSTED || !mp_governor_may_free(services->governor, bytes))
            return status;
        if (options->fail_fast) {
            char size[MP_SIZE_TEXT], need[MP_SIZE_TEXT + 16];
            snprintf(need, sizeof need, "request needs %s", mp_size_text(size, bytes));
            return mp_entry_fail_held(entry, need, error);
        }
        if (mp_maintenance_clock(&services->maintenance, NULL) >= mp_ticket_due(ticket))
            return mp_fail_hint(error, MP_TIMEOUT, FEWER,
                                "%s: no memory was free until the time limit of the request", entry->key);
        if (options->give_up && options->give_up(options->give_up_arg))
            return mp_fail(error, MP_CANCELLED, "%s: the request was cancelled while it waited for memory", entry->key);
        mp_mutex_lock(&entry->lock);
        bool over = entry->shutdown != MP_SHUTDOWN_OPEN || entry->removal != MP_REMOVAL_NONE;
        if (!over)
            mp_cond_wait(&entry->room, &entry->lock, mp_sys_now_ns() + MP_MEMORY_POLL_NS);
        mp_mutex_unlock(&entry->lock);
        if (over)
            return MP_OK; /* `refusal` says why */
    }
}

mp_status mp_entry_submit(mp_entry *entry, mp_ticket *ticket, const mp_submit_options *options, bool *gone,
                          mp_error *error) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    bool start = false, uncharged = false;
    mp_guard guard = {0};
    *gone = false;
    mp_status status = mp_faults_screen(entry, ticket, error);
    mp_mutex_lock(&entry->lock);
    ticket->policy = ticket->asked == MP_POLICY_DEFAULT ? entry->policy : ticket->asked;
    while (status == MP_OK && (status = refusal(entry, ticket, gone, error)) == MP_OK) {
        const bool unchecked = entry->resident && entry->resident->load != ticket->load;
        if (unchecked || ticket->charged < ticket->item.request->bytes) {
            /* Check in the caller's thread: submit then reports invalid arguments at once, and the caller's thread
             * allocates the buffers. The check comes first, because it adds to the bytes: more than can become free are
             * refused at once. A probe would keep the others waiting; refusal() gives another one. */
            mp_faults_drop_probe(entry, ticket);
            mp_resident *resident = unchecked ? mp_entry_borrow(entry) : NULL;
            mp_mutex_unlock(&entry->lock);
            if (resident) {
                status = mp_entry_check(resident, ticket, error);
                mp_mutex_lock(&entry->lock);
                mp_entry_return(entry);
                mp_mutex_unlock(&entry->lock);
            }
            if (status == MP_OK)
                status = charge_in_time(entry, ticket, options, error);
            uncharged = status == MP_MEMORY_EXHAUSTED;
            mp_mutex_lock(&entry->lock);
            continue;
        }
        if (!mp_queue_full(&entry->queue, ticket->node.kind) &&
            (status = check_deadline(entry, ticket, error)) != MP_OK)
            break;
        ticket->node.cost = ticket->item.cost_ns;
        stretch_patience(entry, ticket);
        if (mp_queue_push(&entry->queue, &ticket->node) == MP_QUEUE_TAKEN) {
            mp_ticket_set_state(ticket, MP_TICKET_QUEUED);
            ticket->item.sequence = ++entry->accepted;
            ticket->timed = mp_ticket_due(ticket) != MP_FOREVER;
            if (ticket->timed)
                mp_maintenance_begin_timed(&services->maintenance);
            if (services->predictive_scaling)
                mp_forecast_arrive(&entry->forecast, mp_sys_now_ns());
            if (ticket->policy == MP_POLICY_P2C)
                mp_dispatch_assign(ticket, mp_dispatch_choose(entry));
            if (options->keep_alive_ns)
                entry->keep_alive_ns = options->keep_alive_ns;
            mp_dispatch_wake(entry, ticket);
            start = mp_entry_begin(entry) || mp_dispatch_scale(entry, &guard) || mp_dispatch_predict(entry, &guard);
            break;
        }
        status = wait_for_room(entry, ticket, options, error);
    }
    if (status != MP_OK)
        mp_faults_drop_probe(entry, ticket);
    /* From here on the ticket may end at any moment. The caller's reference keeps the ticket allocated. */
    uint64_t due = mp_ticket_due(ticket), clock = mp_maintenance_clock(&services->maintenance, NULL);
    uint64_t spawn_ns = entry->faults.spawn_ns; /* if no worker may start before this time, the sweep must run then */
    bool waits = !mp_entry_has_workers(entry);
    mp_mutex_unlock(&entry->lock);
    if (status != MP_OK) {
        mp_entry_uncharge(entry, ticket);
        ticket->load = 0;
        if (uncharged) /* the message of a failed load names the holders already */
            mp_entry_explain_shortage(entry, error);
        return status;
    }
    if (start)
        mp_entry_launch(entry, guard);
    if (due != MP_FOREVER)
        mp_maintenance_at(&services->maintenance, services->pool,
                          mp_sys_after(mp_sys_now_ns(), due > clock ? due - clock : 0));
    if (waits)
        mp_maintenance_at(&services->maintenance, services->pool, spawn_ns);
    return MP_OK;
}

/* --- position --- */

int mp_entry_position(mp_entry *entry, mp_ticket *ticket, uint64_t *eta_ns) {
    mp_assert_not_held(&entry->lock);
    int position = -1;
    uint64_t cost = 0;
    mp_mutex_lock(&entry->lock);
    if (mp_queue_holds(&ticket->node)) {
        position = mp_queue_position(&entry->queue, &ticket->node, &cost);
        *eta_ns = mp_dispatch_wait_ns(entry, cost + ticket->node.cost, entry->pace);
    } else if (ticket->worker && entry->pace > 0) { /* predict the remaining time */
        uint64_t started = atomic_load_explicit(&ticket->started_ns, memory_order_relaxed), now = mp_sys_now_ns();
        uint64_t whole = (uint64_t)((double)ticket->node.cost * entry->pace);
        uint64_t had = started && now > started ? now - started : 0;
        *eta_ns = whole > had ? whole - had : 1;
    }
    mp_mutex_unlock(&entry->lock);
    return position;
}
