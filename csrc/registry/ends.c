/* ends.c: how requests end. See entry.h.
 *
 * A request ends in three steps: it leaves the queue or an active list under the entry's lock (MP_TICKET_ENDED), its
 * bytes go back to the governor, and its terminal status is published. The thread that did the first step does the
 * other two, without the lock. After a worker fault, a request may be retried instead of ended (request.h). */
#include <assert.h>
#include <stdatomic.h>

#include "base/log.h"
#include "base/mix.h"
#include "registry/entry.h"
#include "registry/events.h"

static const uint64_t SHORTAGE_EVERY_NS = 1000ull * 1000 * 1000; /* interval of warnings about short memory */

/* --- bytes --- */

mp_status mp_entry_charge(mp_entry *entry, mp_ticket *ticket, mp_error *error) {
    uint64_t bytes = ticket->item.request->bytes;
    if (bytes <= ticket->charged)
        return MP_OK;
    mp_governor *governor = entry->services->governor;
    mp_budget *budget = mp_governor_budget(governor);
    if (!mp_budget_take_beside(&entry->account, bytes - ticket->charged)) {
        uint64_t limit = atomic_load(&budget->limit);
        uint64_t used = atomic_load(&budget->used) + atomic_load(&budget->reserved);
        uint64_t more = bytes - ticket->charged, left = used < limit ? limit - used : 0;
        /* start to free memory for the next request, but not for a request that exceeds the whole limit */
        if (more > left && bytes <= limit)
            mp_governor_reclaim(governor, more - left, true);
        char sizes[3][MP_SIZE_TEXT];
        return mp_fail(error, MP_MEMORY_EXHAUSTED,
                       "%s: the request needs %s, but %s of %s are free; send smaller requests, or raise the limit "
                       "(memory_bytes, MPOOL_MEMORY_MB)",
                       entry->key, mp_size_text(sizes[0], bytes), mp_size_text(sizes[1], left),
                       mp_size_text(sizes[2], limit));
    }
    atomic_fetch_add_explicit(&entry->charged, bytes - ticket->charged, memory_order_relaxed);
    ticket->charged = bytes;
    return MP_OK;
}

void mp_entry_uncharge(mp_entry *entry, mp_ticket *ticket) {
    mp_budget_give(mp_governor_budget(entry->services->governor), ticket->charged);
    atomic_fetch_sub_explicit(&entry->charged, ticket->charged, memory_order_relaxed);
    ticket->charged = 0;
}

void mp_entry_explain_shortage(mp_entry *entry, mp_error *error) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    mp_governor_name_holders(services->governor, error);
    uint64_t now = mp_sys_now_ns(), before = atomic_load_explicit(&services->shortage_ns, memory_order_relaxed);
    if ((!before || now - before >= SHORTAGE_EVERY_NS) &&
        atomic_compare_exchange_strong(&services->shortage_ns, &before, now))
        mp_log(MP_LOG_WARNING, "No memory for a request of %s: %s", entry->key, error->message);
}

mp_status mp_entry_check(mp_resident *resident, mp_ticket *ticket, mp_error *error) {
    if (ticket->load == resident->load)
        return MP_OK;
    uint32_t total = 0;
    uint64_t cost_ns = 0;
    MP_TRY(resident->model->ops->check(resident->model, ticket->item.request, &cost_ns, &total, error));
    ticket->item.cost_ns = cost_ns;
    ticket->item.total = total;
    ticket->load = resident->load;
    return MP_OK;
}

/* --- faults --- */

/* True for faults of a worker; false for mistakes of a caller and for lack of memory. */
static bool is_fault(mp_status status) {
    return status == MP_NUMERIC || status == MP_INTERNAL || status == MP_INTEGRITY || status == MP_MODEL ||
           status == MP_RECV;
}

/* Combines the request's fingerprint with the entry's number, so that the same text has different values in different
 * entries, also in a later entry with the same key. */
static uint64_t fingerprint_of(const mp_entry *entry, const mp_request *request) {
    return mp_mix(request->fingerprint(request) ^ mp_mix(entry->number));
}

bool mp_entry_note_loss(mp_entry *entry, const mp_ticket *ticket, bool alone) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    const mp_request *request = ticket->item.request;
    if (!request->fingerprint || mp_quarantine_add(&services->quarantine, fingerprint_of(entry, request), alone,
                                                   mp_sys_now_ns()) < MP_QUARANTINE_FAULTS)
        return false;
    mp_log(MP_LOG_WARNING,
           "%s: workers failed repeatedly while they computed one request; equal requests are refused for 10 minutes",
           entry->key);
    return true;
}

mp_status mp_entry_screen(mp_entry *entry, mp_ticket *ticket, mp_error *error) {
    mp_assert_not_held(&entry->lock);
    mp_quarantine *quarantine = &entry->services->quarantine;
    const mp_request *request = ticket->item.request;
    int known = 0;
    if (!mp_quarantine_is_empty(quarantine) && request->fingerprint)
        known = mp_quarantine_check(quarantine, fingerprint_of(entry, request), mp_sys_now_ns());
    ticket->quarantined = known > 0;
    if (known < MP_QUARANTINE_FAULTS)
        return MP_OK;
    return mp_fail(error, MP_MODEL,
                   "%s: this request made workers fail %d times and is refused until 10 minutes after the last time; "
                   "change the request, or try again then", entry->key, MP_QUARANTINE_FAULTS);
}

/* Call when a request has completed: failures recorded for its fingerprint had another cause. */
static void clear_of_suspicion(mp_entry *entry, const mp_request *request) {
    mp_quarantine *quarantine = &entry->services->quarantine;
    if (!mp_quarantine_is_empty(quarantine) && request->fingerprint)
        mp_quarantine_clear(quarantine, fingerprint_of(entry, request), mp_sys_now_ns());
}

/* Must hold the lock. */
static void count_in_breaker(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    mp_services *services = entry->services;
    if (mp_breaker_fault(&entry->breaker, &services->breaker, mp_sys_now_ns()))
        mp_log(MP_LOG_WARNING, "%s: the circuit breaker opens for %.0f s after repeated worker faults", entry->key,
               (double)services->breaker.backoff_ns * 1e-9);
}

void mp_entry_note_fault(mp_entry *entry, bool in_breaker) {
    mp_assert_held(&entry->lock);
    mp_count(entry->services, MP_METRIC_worker_faults, 1);
    if (in_breaker)
        count_in_breaker(entry);
}

/* Returns true if the results of a retry can follow the results that the caller may have seen. After a model file
 * changed they cannot: old and new results may come from different files. */
static bool may_follow(const mp_request *request, mp_status status) {
    return (request->resumable && status != MP_INTEGRITY) || !request->seen || !request->seen(request);
}

/* Must hold the lock. Returns true if a request that failed in a step may be tried again, whatever retries it had. */
static bool may_try_again(const mp_entry *entry, const mp_ticket *ticket, mp_status status) {
    mp_assert_held(&entry->lock);
    return entry->shutdown != MP_SHUTDOWN_QUITTING && may_follow(ticket->item.request, status) &&
           !atomic_load_explicit(&ticket->cause, memory_order_relaxed);
}

bool mp_entry_shortage(mp_entry *entry, mp_ticket *ticket, bool coming) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    mp_ticket_retry next = coming ? ticket->retry : mp_ticket_next_retry(ticket->retry, false);
    bool again = (coming || next != ticket->retry) && may_try_again(entry, ticket, MP_MEMORY_EXHAUSTED);
    mp_mutex_unlock(&entry->lock);
    if (again && next != ticket->retry)
        mp_ticket_set_retry(ticket, &ticket->retry, next);
    return again;
}

bool mp_entry_fault(mp_entry *entry, mp_ticket *ticket, mp_status status, bool alone, bool external_kill,
                    mp_step_fault *step) {
    mp_assert_not_held(&entry->lock);
    const mp_request *request = ticket->item.request;
    if (!is_fault(status) || (status == MP_NUMERIC && request->tolerant))
        return false;
    /* With these statuses the worker is lost. (For a worker that stalled, mp_worker_abandon notes the loss.) */
    bool lost = (status == MP_INTERNAL || status == MP_RECV) && !external_kill;
    bool refused = lost && mp_entry_note_loss(entry, ticket, alone);
    mp_mutex_lock(&entry->lock);
    mp_count(entry->services, MP_METRIC_worker_faults, !step->counted);
    step->counted = true;
    if (!external_kill && !ticket->had_fault && !step->in_breaker) {
        step->in_breaker = true;
        count_in_breaker(entry);
    }
    ticket->had_fault |= !external_kill;
    mp_ticket_retry next = mp_ticket_next_retry(ticket->retry, external_kill && request->resumable);
    /* A retry after NaN is useless: by the numeric contract a retry computes the same bits. */
    bool again = status != MP_NUMERIC && next != ticket->retry && !refused && may_try_again(entry, ticket, status);
    mp_mutex_unlock(&entry->lock);
    if (again)
        mp_ticket_set_retry(ticket, &ticket->retry, next);
    return again;
}

/* --- terminal states --- */

void mp_entry_conclude(mp_entry *entry, mp_ticket *ticket, mp_status status, const mp_error *error) {
    mp_services *services = entry->services;
    const mp_request *request = ticket->item.request;
    uint64_t in = 0, out = 0, began = atomic_load_explicit(&ticket->submitted_ns, memory_order_relaxed);
    mp_count_end(services, status);
    if (ticket->timed)
        mp_maintenance_end_timed(&services->maintenance);
    if (status != MP_OK && status != MP_TIMEOUT && status != MP_CANCELLED)
        atomic_fetch_add_explicit(&entry->errors, 1, memory_order_relaxed);
    if (status == MP_OK)
        clear_of_suspicion(entry, request);
    if (request->usage && status == MP_OK) {
        request->usage(request, &in, &out);
        mp_count(services, MP_METRIC_units_in, in);
        mp_count(services, MP_METRIC_units_out, out);
    }
    mp_mutex_lock(&entry->lock);
    mp_breaker_end(&entry->breaker, &services->breaker, ticket->probe, status == MP_OK);
    if (status == MP_OK) {
        entry->units_in += in;
        entry->units_out += out;
        mp_histogram_add(&entry->latency, mp_sys_now_ns() - began);
        mp_forecast_serve(&entry->forecast, ticket->had_ns);
    } else {
        entry->last_error = status;
    }
    mp_mutex_unlock(&entry->lock);
    mp_events_post(status == MP_OK ? MP_EVENT_REQUEST_COMPLETE : MP_EVENT_REQUEST_FAIL, services->number, entry->key, 0,
                   ticket->number, status);
    mp_ticket_conclude(ticket, status, error);
}

/* Frees the request's bytes in the budget and the state that an engine left in the item. */
static void free_parts(mp_entry *entry, mp_ticket *ticket) {
    mp_entry_uncharge(entry, ticket);
    if (ticket->item.abandon) /* the request was preempted and not admitted again */
        ticket->item.abandon(&ticket->item);
}

void mp_entry_let_go(mp_entry *entry, mp_ticket *ticket) {
    free_parts(entry, ticket);
    mp_ticket_let_go(ticket);
}

void mp_entry_finish(mp_entry *entry, mp_ticket *ticket, mp_status status, const mp_error *error) {
    mp_assert_not_held(&entry->lock);
    free_parts(entry, ticket); /* free first: a caller that sees the terminal status must find the memory free */
    mp_entry_conclude(entry, ticket, status, error);
    mp_ticket_let_go(ticket);
}

void mp_entry_finish_list(mp_entry *entry, mp_ticket *list, const mp_error *error) {
    mp_assert_not_held(&entry->lock);
    while (list) {
        mp_ticket *next = list->next;
        mp_error own;
        mp_status status = error ? error->code : mp_ticket_cause(list, &own);
        mp_entry_finish(entry, list, status, error ? error : &own);
        list = next;
    }
}

/* --- leaving the queue --- */

void mp_entry_notify_room(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (entry->room_waiters)
        mp_cond_broadcast(&entry->room);
    if (entry->removal != MP_REMOVAL_NONE && !entry->queue.count)
        mp_entry_wake_workers(entry); /* the workers stayed only for queued requests, and may leave now */
}

mp_ticket *mp_entry_take_queue(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    mp_ticket *first = NULL, **end = &first;
    for (mp_queue_node *node; (node = mp_queue_first(&entry->queue));) {
        mp_queue_remove(&entry->queue, node);
        *end = mp_ticket_of_node(node);
        mp_ticket_set_state(*end, MP_TICKET_ENDED);
        mp_dispatch_assign(*end, NULL);
        end = &(*end)->next;
    }
    *end = NULL;
    mp_entry_notify_room(entry);
    mp_cond_broadcast(&entry->changed);
    return first;
}

bool mp_entry_cancel_locked(mp_entry *entry, mp_ticket *ticket, mp_status cause) {
    mp_assert_held(&entry->lock);
    int none = 0;
    bool first = atomic_compare_exchange_strong_explicit(&ticket->cause, &none, cause, memory_order_acq_rel,
                                                         memory_order_acquire);
    if (!first && cause == MP_CANCELLED)
        atomic_store_explicit(&ticket->cause, cause, memory_order_release);
    atomic_store_explicit(&ticket->item.cancelled, 1, memory_order_release);
    if (mp_queue_holds(&ticket->node)) {
        mp_queue_remove(&entry->queue, &ticket->node);
        mp_ticket_set_state(ticket, MP_TICKET_ENDED);
        mp_dispatch_assign(ticket, NULL);
        mp_entry_notify_room(entry);
        mp_cond_broadcast(&entry->changed);
        return true;
    }
    mp_worker *worker = ticket->worker;
    if (first && worker && ticket->state == MP_TICKET_STEPPING && --worker->step_live == 0)
        atomic_store_explicit(&worker->step_cancelled, 1, memory_order_release);
    if (worker && worker->awaits_masks)
        mp_worker_wake(worker);
    return false;
}

void mp_entry_wake(mp_entry *entry, mp_ticket *ticket) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    if (ticket->worker)
        mp_worker_wake(ticket->worker);
    mp_mutex_unlock(&entry->lock);
}
