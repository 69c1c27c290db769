/* request.c: tickets: their states, creation and progress. caller.c has the caller's side. See request.h. */
#include "registry/request.h"

#include <assert.h>
#include <stdatomic.h>

#include "base/alloc.h"
#include "registry/entry.h"

/* --- states --- */

#define TO(state) (1u << MP_TICKET_##state)
static const char *const state_names[MP_TICKET_STATES] = {
    [MP_TICKET_NEW] = "new",           [MP_TICKET_QUEUED] = "queued",     [MP_TICKET_TAKEN] = "taken",
    [MP_TICKET_ADMITTED] = "admitted", [MP_TICKET_STEPPING] = "stepping", [MP_TICKET_ENDED] = "ended",
};
static const uint16_t state_legal[MP_TICKET_STATES] = {
    [MP_TICKET_NEW] = TO(QUEUED),
    [MP_TICKET_QUEUED] = TO(TAKEN) | TO(ENDED),
    [MP_TICKET_TAKEN] = TO(QUEUED) | TO(ADMITTED) | TO(ENDED),
    [MP_TICKET_ADMITTED] = TO(QUEUED) | TO(STEPPING) | TO(ENDED),
    [MP_TICKET_STEPPING] = TO(ADMITTED) | TO(ENDED),
    [MP_TICKET_ENDED] = 0,
};
#undef TO
const mp_state_machine mp_ticket_state_machine = {"request", MP_TICKET_STATES, state_names, state_legal};

void mp_ticket_set_state(mp_ticket *ticket, mp_ticket_state state) {
    mp_assert_held(&ticket->entry->lock);
    if (mp_state_may_enter(&mp_ticket_state_machine, ticket->entry->services, ticket->entry->key, 0,
                           (int)ticket->state, (int)state))
        ticket->state = state;
}

/* --- life --- */

mp_status mp_ticket_create(mp_entry *entry, mp_request *request, const mp_submit_options *options,
                           mp_ticket **ticket_out, mp_error *error) {
    *ticket_out = NULL;
    mp_ticket *ticket = mp_alloc_zeroed(sizeof(*ticket), MP_TAG_REQUEST);
    if (!ticket) {
        mp_request_destroy(request);
        return mp_fail_memory(error, sizeof(*ticket), "a ticket");
    }
    ticket->entry = mp_entry_pin(entry);
    static _Atomic uint64_t number;
    ticket->number = atomic_fetch_add_explicit(&number, 1, memory_order_relaxed) + 1;
    ticket->generation = mp_fork_generation();
    ticket->item.ticket = ticket;
    ticket->item.request = request;
    ticket->item.priority = options->priority;
    ticket->item.service_class = options->service_class;
    ticket->item.tenant = options->tenant;
    ticket->item.deadline_ns = options->deadline_ns;
    ticket->patience_ns = options->patience_ns ? options->patience_ns : entry->services->patience_ns;
    if (ticket->patience_ns == MP_FOREVER)
        ticket->patience_ns = 0;
    ticket->stretches = !options->patience_ns && ticket->patience_ns && entry->services->scale_timeout;
    ticket->hurried = options->fail_fast == MP_FAIL_LOAD;
    ticket->asked = ticket->policy = options->policy;
    uint64_t now, clock = mp_maintenance_clock(&entry->services->maintenance, &now);
    if (options->deadline_ns) /* a deadline that has passed stays in the past */
        ticket->due_ns = options->deadline_ns > now ? clock + (options->deadline_ns - now) : 1;
    mp_queue_node_init(&ticket->node, options->priority, options->service_class, options->tenant, now);
    ticket->flow = -1;
    atomic_init(&ticket->references, 2);
    atomic_init(&ticket->callers, 1);
    atomic_init(&ticket->submitted_ns, now);
    atomic_init(&ticket->moved_ns, clock);
    atomic_init(&ticket->wake_at, MP_TICKET_DONE);
    ticket->wait_at = MP_TICKET_DONE;
    mp_mutex_init(&ticket->lock);
    mp_cond_init(&ticket->changed);
    *ticket_out = ticket;
    return MP_OK;
}

void mp_ticket_move(mp_ticket *ticket, mp_entry *entry) {
    assert(ticket->charged == 0 && ticket->load == 0);
    mp_entry *before = ticket->entry;
    ticket->entry = mp_entry_pin(entry);
    mp_entry_unpin(before);
}

void mp_ticket_unref(mp_ticket *ticket) {
    if (atomic_fetch_sub_explicit(&ticket->references, 1, memory_order_acq_rel) != 1)
        return;
    if (!mp_ticket_is_orphan(ticket)) {
        for (mp_notice *notice = &ticket->notice, *next; notice; notice = next) {
            next = notice->also;
            if (notice->notifier) {
                mp_notifier_withdraw(notice->notifier, notice);
                mp_notifier_unpin(notice->notifier);
            }
            if (notice != &ticket->notice)
                mp_free(notice);
        }
        mp_cond_deinit(&ticket->changed);
        mp_mutex_deinit(&ticket->lock);
    }
    mp_request_destroy(ticket->item.request);
    mp_entry_unpin(ticket->entry);
    mp_free(ticket);
}

void mp_ticket_discard(mp_ticket *ticket) {
    assert(ticket->state == MP_TICKET_NEW && !mp_queue_holds(&ticket->node) && ticket->charged == 0);
    atomic_store_explicit(&ticket->references, 1, memory_order_relaxed);
    mp_ticket_unref(ticket);
}

uint64_t mp_ticket_due(const mp_ticket *ticket) {
    uint64_t due = ticket->due_ns ? ticket->due_ns : MP_FOREVER;
    if (!ticket->patience_ns)
        return due;
    uint64_t moved = atomic_load_explicit(&ticket->moved_ns, memory_order_relaxed);
    uint64_t end = mp_sys_after(moved, ticket->patience_ns);
    return end < due ? end : due;
}

bool mp_ticket_is_late(const mp_ticket *ticket) {
    return ticket->due_ns && mp_maintenance_clock(&ticket->entry->services->maintenance, NULL) >= ticket->due_ns;
}

mp_status mp_ticket_cause(const mp_ticket *ticket, mp_error *error) {
    const char *key = mp_entry_key(ticket->entry);
    switch (atomic_load_explicit(&ticket->cause, memory_order_acquire)) {
    case MP_TIMEOUT: {
        uint64_t submitted = atomic_load_explicit(&ticket->submitted_ns, memory_order_relaxed);
        uint64_t deadline = ticket->item.deadline_ns, allowed = deadline > submitted ? deadline - submitted : 0;
        bool started = atomic_load_explicit(&ticket->started_ns, memory_order_relaxed) != 0;
        const char *where = started ? "the request was running" : "the request was still queued";
        if (!mp_ticket_is_late(ticket))
            return mp_fail_hint(error, MP_TIMEOUT, "Raise `request_timeout` of PoolConfig",
                                "%s: no result and no progress for %.3f s (%s)", key,
                                (double)ticket->patience_ns * 1e-9, where);
        return mp_fail_hint(error, MP_TIMEOUT, "Raise `timeout`",
                            "%s: no result within the timeout, which ended %.3f s after the submission (%s)", key,
                            (double)allowed * 1e-9, where);
    }
    case MP_SHUTTING_DOWN:
        return mp_fail(error, MP_SHUTTING_DOWN, "%s: the pool shut down before the request completed", key);
    default:
        return mp_fail(error, MP_CANCELLED, "%s: the request was cancelled", key);
    }
}

/* --- the worker's side --- */

/* Must hold the ticket's lock. Wakes the waiters if progress has reached the lowest progress that any waits for
 * (`wait_at`); each then sets `wait_at` again. Without this check, a notifier, for which every chunk comes here, would
 * make each chunk wake the waiters too. */
static void notify_waiters(mp_ticket *ticket) {
    mp_assert_held(&ticket->lock);
    mp_notice *notice = ticket->notice.notifier ? &ticket->notice : NULL;
    if (ticket->waiters && atomic_load_explicit(&ticket->progress, memory_order_relaxed) >= ticket->wait_at) {
        ticket->wait_at = MP_TICKET_DONE;
        mp_cond_broadcast(&ticket->changed);
    }
    atomic_store_explicit(&ticket->wake_at, notice ? 0 : ticket->wait_at, memory_order_relaxed);
    for (; notice; notice = notice->also)
        mp_notifier_post(notice->notifier, notice);
}

void mp_ticket_publish(mp_ticket *ticket) {
    /* Both operations are seq_cst: either a parking waiter sees this count, or this thread sees its `wake_at`. */
    uint64_t count = atomic_fetch_add_explicit(&ticket->progress, 1, memory_order_seq_cst) + 1;
    if (count < atomic_load_explicit(&ticket->wake_at, memory_order_seq_cst))
        return;
    mp_mutex_lock(&ticket->lock);
    notify_waiters(ticket);
    mp_mutex_unlock(&ticket->lock);
}

void mp_ticket_conclude(mp_ticket *ticket, mp_status status, const mp_error *error) {
    assert(ticket->state == MP_TICKET_ENDED && !mp_ticket_is_done(ticket) && "a ticket has one terminal status");
    ticket->status = status;
    if (status != MP_OK)
        ticket->error = *error;
    atomic_store_explicit(&ticket->finished_ns, mp_sys_now_ns(), memory_order_relaxed);
    mp_mutex_lock(&ticket->lock);
    atomic_store_explicit(&ticket->progress, MP_TICKET_DONE, memory_order_seq_cst);
    notify_waiters(ticket);
    mp_mutex_unlock(&ticket->lock);
}

void mp_ticket_let_go(mp_ticket *ticket) {
    assert(mp_ticket_is_done(ticket) && ticket->charged == 0);
    mp_ticket_unref(ticket);
}
