/* ends.c: how requests end. See entry.h.
 *
 * A request ends in three steps: it leaves the queue or an active list under the entry's lock (MP_TICKET_ENDED), its
 * bytes go back to the governor, and its terminal status is published. The thread that did the first step does the
 * other two, without the lock. After a worker fault, a request may be tried again instead (faults.h). */
#include <assert.h>
#include <stdatomic.h>

#include "base/log.h"
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
        char size[MP_SIZE_TEXT], shortage[MP_SHORTAGE_TEXT];
        return mp_fail(error, MP_MEMORY_EXHAUSTED,
                       "%s: the request needs %s, but %s; send smaller requests, or raise the limit (memory_bytes, "
                       "MPOOL_MEMORY_MB)",
                       entry->key, mp_size_text(size, bytes), mp_shortage_text(shortage, bytes, left, limit));
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

uint64_t mp_entry_drop_outputs(mp_entry *entry) {
    mp_assert_not_held(&entry->lock);
    uint64_t dropped = 0;
    mp_mutex_lock(&entry->lock);
    for (mp_queue_node *at = mp_queue_first(&entry->queue); at; at = mp_queue_next(&entry->queue, at)) {
        mp_ticket *ticket = mp_ticket_of_node(at);
        mp_request *request = ticket->item.request;
        if (!request->output_bytes || !request->drop_outputs(request, mp_ticket_begun(ticket)))
            continue;
        ticket->load = 0;                      /* mp_entry_check makes the outputs again */
        if (ticket->charged <= request->bytes) /* they were made again, but not charged yet */
            continue;
        dropped += ticket->charged - request->bytes;
        ticket->charged = request->bytes;
    }
    /* with the lock, which a fork waits for: bytes that no request has would stay charged in the child */
    atomic_fetch_sub_explicit(&entry->charged, dropped, memory_order_relaxed);
    mp_budget_give(mp_governor_budget(entry->services->governor), dropped);
    mp_mutex_unlock(&entry->lock);
    return dropped;
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
    if (request->usage && status == MP_OK) {
        request->usage(request, &in, &out);
        mp_count(services, MP_METRIC_units_in, in);
        mp_count(services, MP_METRIC_units_out, out);
    }
    mp_mutex_lock(&entry->lock);
    mp_faults_request_ended(entry, ticket, status);
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

/* Must hold the lock. */
static void leave_queue(mp_entry *entry, mp_ticket *ticket) {
    mp_queue_remove(&entry->queue, &ticket->node);
    mp_dispatch_end(ticket);
    mp_dispatch_assign(ticket, NULL);
}

mp_ticket *mp_entry_take_queue(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    mp_ticket *first = NULL, **end = &first;
    for (mp_queue_node *node; (node = mp_queue_first(&entry->queue));) {
        *end = mp_ticket_of_node(node);
        leave_queue(entry, *end);
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
        leave_queue(entry, ticket);
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

bool mp_entry_cancel(mp_entry *entry, mp_ticket *ticket, mp_status cause) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    bool live = mp_queue_holds(&ticket->node) || ticket->worker;
    bool mine = live && mp_entry_cancel_locked(entry, ticket, cause);
    mp_mutex_unlock(&entry->lock);
    if (!mine)
        return live;
    mp_error error;
    mp_status status = mp_ticket_cause(ticket, &error);
    mp_entry_finish(entry, ticket, status, &error);
    return true;
}

void mp_entry_wake(mp_entry *entry, mp_ticket *ticket) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    if (ticket->worker)
        mp_worker_wake(ticket->worker);
    mp_mutex_unlock(&entry->lock);
}
