/* caller.c: the caller's side of a ticket: wait, read the result, cancel, release. See registry.h. */
#include <assert.h>
#include <stdatomic.h>

#include "base/alloc.h"
#include "registry/entry.h"

/* Spinning shortens the wait for a short request: waking a parked thread costs 20 to 46 us. */
static const uint64_t CALLER_SPIN_NS = 50 * 1000;

mp_ticket *mp_ticket_pin(mp_ticket *ticket) {
    int before = atomic_fetch_add_explicit(&ticket->callers, 1, memory_order_relaxed);
    assert(before > 0);
    (void)before;
    return ticket;
}

void mp_ticket_release(mp_ticket *ticket) {
    if (!ticket || atomic_fetch_sub_explicit(&ticket->callers, 1, memory_order_acq_rel) != 1)
        return;
    mp_ticket_cancel(ticket);
    mp_ticket_unref(ticket);
}

bool mp_ticket_cancel(mp_ticket *ticket) {
    return !mp_ticket_is_done(ticket) && !mp_ticket_is_orphan(ticket) &&
           mp_entry_cancel(ticket->entry, ticket, MP_CANCELLED);
}

void mp_ticket_wake(mp_ticket *ticket) {
    if (!mp_ticket_is_done(ticket) && !mp_ticket_is_orphan(ticket))
        mp_entry_wake(ticket->entry, ticket);
}

/* --- wait and read --- */

typedef struct progress_watch {
    const mp_ticket *ticket;
    uint64_t seen;
} progress_watch;

static bool has_moved(void *arg) {
    const progress_watch *watch = arg;
    return atomic_load_explicit(&watch->ticket->progress, memory_order_acquire) > watch->seen;
}

static bool ticket_park(mp_ticket *ticket, uint64_t seen, uint64_t deadline_ns) {
    bool in_time = true, moved;
    mp_mutex_lock(&ticket->lock);
    ticket->waiters++;
    for (;;) {
        if (seen + 1 < ticket->wait_at)
            ticket->wait_at = seen + 1;
        if (seen + 1 < atomic_load_explicit(&ticket->wake_at, memory_order_relaxed))
            atomic_store_explicit(&ticket->wake_at, seen + 1, memory_order_seq_cst);
        moved = atomic_load_explicit(&ticket->progress, memory_order_seq_cst) > seen;
        if (moved || !in_time)
            break;
        in_time = mp_cond_wait(&ticket->changed, &ticket->lock, deadline_ns);
    }
    ticket->waiters--;
    mp_mutex_unlock(&ticket->lock);
    return moved;
}

bool mp_ticket_wait(mp_ticket *ticket, uint64_t seen, uint64_t deadline_ns, uint64_t *progress) {
    progress_watch watch = {ticket, seen == MP_TICKET_DONE ? MP_TICKET_DONE - 1 : seen};
    bool moved = has_moved(&watch);
    if (!moved && mp_ticket_is_orphan(ticket)) {
        if (progress)
            *progress = MP_TICKET_DONE;
        return true;
    }
    if (!moved) {
        mp_spin_rule rule = mp_entry_spin_rule(ticket->entry);
        if (rule.spin_ns > CALLER_SPIN_NS)
            rule.spin_ns = CALLER_SPIN_NS;
        moved = mp_spin_until(has_moved, &watch, &rule) || ticket_park(ticket, watch.seen, deadline_ns);
    }
    if (progress)
        *progress = atomic_load_explicit(&ticket->progress, memory_order_acquire);
    return moved;
}

bool mp_ticket_done(mp_ticket *ticket) { return mp_ticket_is_done(ticket) || mp_ticket_is_orphan(ticket); }

mp_status mp_ticket_status(mp_ticket *ticket, mp_error *error) {
    if (!mp_ticket_is_done(ticket)) {
        assert(mp_ticket_is_orphan(ticket) && "mp_ticket_status requires a ticket that is done");
        return mp_fail(error, MP_CANCELLED, "%s: the request belongs to the process from which this one was forked",
                       mp_entry_key(ticket->entry));
    }
    if (ticket->status != MP_OK && error)
        *error = ticket->error;
    return ticket->status;
}

mp_request *mp_ticket_request(mp_ticket *ticket) { return ticket->item.request; }

void mp_ticket_times(mp_ticket *ticket, uint64_t *submitted_ns, uint64_t *started_ns, uint64_t *finished_ns) {
    *submitted_ns = atomic_load_explicit(&ticket->submitted_ns, memory_order_relaxed);
    *started_ns = atomic_load_explicit(&ticket->started_ns, memory_order_relaxed);
    *finished_ns = atomic_load_explicit(&ticket->finished_ns, memory_order_relaxed);
}

int mp_ticket_position(mp_ticket *ticket, uint64_t *eta_ns) {
    uint64_t unseen;
    if (!eta_ns)
        eta_ns = &unseen;
    *eta_ns = 0;
    return mp_ticket_done(ticket) ? -1 : mp_entry_position(ticket->entry, ticket, eta_ns);
}

/* Must hold the ticket's lock. Returns the ticket's notice for the notifier, creating it if necessary, or NULL if
 * memory is refused. */
static mp_notice *notice_for(mp_ticket *ticket, mp_notifier *notifier) {
    mp_assert_held(&ticket->lock);
    mp_notice *notice = &ticket->notice;
    while (notice->notifier && notice->notifier != notifier) {
        if (!notice->also)
            notice->also = mp_alloc_zeroed(sizeof(*notice), MP_TAG_REQUEST);
        notice = notice->also;
        if (!notice)
            return NULL;
    }
    if (!notice->notifier)
        notice->notifier = mp_notifier_pin(notifier);
    else
        mp_notifier_withdraw(notifier, notice); /* unlist: the id may change */
    return notice;
}

bool mp_ticket_bind(mp_ticket *ticket, mp_notifier *notifier, uint64_t id) {
    if (mp_ticket_is_orphan(ticket))
        return true; /* only a worker of the parent could notify */
    mp_mutex_lock(&ticket->lock);
    mp_notice *notice = notice_for(ticket, notifier);
    if (notice) {
        notice->id = id;
        atomic_store_explicit(&ticket->wake_at, 0, memory_order_seq_cst); /* every chunk notifies */
        if (atomic_load_explicit(&ticket->progress, memory_order_seq_cst) > 0)
            mp_notifier_post(notifier, notice);
    }
    mp_mutex_unlock(&ticket->lock);
    return notice;
}
