/* serve.c: a worker's work, from ready to leaving. See entry.h, worker.h and models/engine.h.
 *
 * Fairness: items are offered to plan() by priority, then by how much service their flow has had (a tenant's work of
 * one kind, as in the queue; bulk work counts for more than it had), then by how much they have had within it. A flow
 * that comes, and a call that joins its flow, is taken to have had as much as an equal share of every step so far would
 * have given it (virtual time, as in weighted fair queueing). So tenants share the steps however many calls each has, a
 * call with 10,000 texts shares them with calls of one, and nobody starves. */
#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "registry/entry.h"
#include "registry/events.h"

static const uint64_t MS = 1000 * 1000;
static const uint64_t MEMORY_AGAIN_MS = 20;
static const uint64_t LOST_LOOK_NS = 1000ull * 1000 * 1000; /* a worker without work looks after its engine so often */
static const uint64_t CRITICAL_LOOK_NS = 1000 * 1000; /* maintenance looks at memory that is short so soon */
static const uint64_t MASK_LOOK_NS = 50ull * 1000 * 1000; /* who waits for masks looks at deadlines so often */
/* With nobody waiting, a step may be this many times the budget: fewer boundaries, and still soon over when somebody
 * comes. */
enum { ALONE = 4 };
/* Service that bulk work is charged for, in relation to what it had: others get so many times its share. */
enum { BULK_WEIGHT = 4 };

/* --- ending items --- */

/* Off the active list, so that nobody else ends it. Under the lock. */
static void deactivate(mp_worker *w, mp_ticket *ticket) {
    for (int i = 0; i < w->active_count; i++) {
        if (w->active[i] != ticket)
            continue;
        memmove(&w->active[i], &w->active[i + 1], (size_t)(w->active_count - i - 1) * sizeof(ticket));
        w->active_count--;
        ticket->worker = NULL;
        if (w->active_count == 0)
            w->exclusive = false;
        return;
    }
    assert(!"an active ticket is on the list");
}

/* No lock held. error: unused with MP_OK. */
static void end_item(mp_worker *w, mp_ticket *ticket, mp_status status, const mp_error *error) {
    mp_entry *entry = w->entry;
    mp_error own;
    if (status != MP_OK)
        own = *error; /* may be the item's, which retire may clear */
    w->engine->ops->retire(w->engine, &ticket->item);
    w->trimmed = ticket->admitted = false;
    uint64_t held = mp_worker_bytes(w);
    mp_mutex_lock(&entry->lock);
    deactivate(w, ticket);
    w->served++;
    w->held_bytes = held;
    mp_dispatch_memory_free(entry);
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish(entry, ticket, status, &own);
}

static void end_cancelled(mp_worker *w) {
    uint64_t now = mp_sys_now_ns();
    for (int i = w->active_count - 1; i >= 0; i--) {
        mp_ticket *ticket = w->active[i];
        uint64_t deadline = ticket->item.deadline_ns;
        /* The sweep looks too, but it may be late or have no thread. */
        if (deadline && now >= deadline)
            mp_entry_cancel(w->entry, ticket, MP_TIMEOUT);
        if (!atomic_load_explicit(&ticket->cause, memory_order_acquire))
            continue;
        mp_error error;
        mp_status status = mp_ticket_cause(ticket, &error);
        end_item(w, ticket, status, &error);
    }
}

static void end_all(mp_worker *w, const mp_error *error) {
    while (w->active_count)
        end_item(w, w->active[w->active_count - 1], error->code, error);
}

/* Under the lock: off the active list and to the front of the queue. False: it was cancelled, and is the caller's to
 * finish. Others are to be rung. */
static bool requeue(mp_worker *w, mp_ticket *ticket) {
    deactivate(w, ticket);
    if (atomic_load_explicit(&ticket->cause, memory_order_acquire))
        return false;
    mp_queue_push_front(&w->entry->queue, &ticket->node);
    return true;
}

/* The engine was lost outside of a step, at this call or beside it, or while nobody looked. True: this call has been
 * there before, so that it is ended: it must not take one worker after the other with it. */
static bool lose_with(mp_worker *w, mp_ticket *ticket) {
    if (!ticket->adrift) {
        ticket->adrift = true;
        return false;
    }
    mp_error error = w->fault;
    mp_entry_note_kill(w->entry, ticket, w->active_count == 1 && !w->engine->outside);
    end_item(w, ticket, error.code, &error);
    return true;
}

/* The fresh ones from number `from` on, which were not admitted, wait again. */
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
    mp_dispatch_ring_all(entry);
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, cancelled, NULL);
}

/* An active item gives its memory back and waits at the front of the queue. counted: as what. */
static void preempt(mp_worker *w, mp_ticket *ticket, mp_metric counted) {
    mp_entry *entry = w->entry;
    mp_count(entry->services, counted, 1);
    if (ticket->admitted)
        w->engine->ops->preempt(w->engine, &ticket->item);
    ticket->admitted = false;
    mp_mutex_lock(&entry->lock);
    bool waits = requeue(w, ticket);
    mp_dispatch_ring_all(entry);
    mp_mutex_unlock(&entry->lock);
    if (waits)
        return;
    mp_error error;
    mp_status status = mp_ticket_cause(ticket, &error);
    w->engine->ops->retire(w->engine, &ticket->item);
    mp_entry_finish(entry, ticket, status, &error);
}

/* --- taking work --- */

/* No lock held: the engine is at its end, and so is the worker. */
static bool is_lost(mp_worker *w) {
    const mp_error *lost = w->engine->lost ? w->engine->lost(w->engine) : NULL;
    if (lost)
        w->fault = *lost;
    return lost != NULL;
}

/* Under the lock: wait for work, at least until the worker is rung. */
static void rest(mp_worker *w, uint64_t until_ns) {
    mp_entry *entry = w->entry;
    mp_services *services = entry->services;
    if (w->state == MP_WORKER_PROCESSING)
        mp_worker_set_state(w, MP_WORKER_IDLE);
    if (w->trim) {
        w->trim = false;
        w->lean = true;
        mp_mutex_unlock(&entry->lock);
        w->engine->ops->trim(w->engine);
        uint64_t held = mp_worker_bytes(w);
        mp_governor_notify(services->governor);
        mp_mutex_lock(&entry->lock);
        w->held_bytes = held;
        return;
    }
    uint64_t due = mp_sys_after(w->idle_since_ns, entry->keep_alive_ns);
    mp_spin_rule rule = mp_entry_spin_rule(entry);
    bool critical = mp_governor_pressure(services->governor) == MP_PRESSURE_CRITICAL;
    if (critical && due > w->idle_since_ns + CRITICAL_LOOK_NS)
        due = w->idle_since_ns + CRITICAL_LOOK_NS;
    if (w->runnable || due < atomic_load_explicit(&services->maintenance.next_ns, memory_order_relaxed)) {
        mp_mutex_unlock(&entry->lock);
        mp_worker_set_runnable(w, false);
        if (due != MP_FOREVER)
            mp_maintenance_at(&services->maintenance, services->pool, due);
        mp_mutex_lock(&entry->lock);
        if (w->rung || w->state == MP_WORKER_DEAD)
            return;
    }
    mp_event_count_wait(&w->wake, &entry->lock, &rule, until_ns);
}

/* Under the lock: until when a worker without work lets calls gather, 0 = no longer. */
static uint64_t gathers_until(const mp_worker *w) {
    uint64_t wait_ns = w->entry->services->batch_wait_ns, now;
    mp_queue_node *first = wait_ns && !w->active_count ? mp_queue_first(&w->entry->queue) : NULL;
    if (!first || (now = mp_sys_now_ns()) >= first->since_ns + wait_ns)
        return 0;
    return first->since_ns + wait_ns;
}

/* Wait until something is active. False: the worker is to leave; nothing is active then. */
static bool take_work(mp_worker *w) {
    mp_entry *entry = w->entry;
    for (;;) {
        end_cancelled(w);
        is_lost(w);
        mp_mutex_lock(&entry->lock);
        if (w->state == MP_WORKER_DEAD)
            break;
        w->rung = false;
        uint64_t until_ns = gathers_until(w);
        if (w->retry_ns && mp_sys_now_ns() >= w->retry_ns) {
            w->memory_tight = false;
            w->retry_ns = 0;
        }
        /* quit has cancelled the active ones and emptied the queue */
        if (w->fault.code != MP_OK) { /* what it was rung for is anybody else's */
            w->leave = true;
            mp_dispatch_ring_all(entry);
        }
        bool over = entry->quit || w->fault.code != MP_OK;
        if (!over && !until_ns)
            mp_dispatch_take(entry, w);
        if (w->active_count) {
            if (w->state != MP_WORKER_PROCESSING)
                mp_worker_set_state(w, MP_WORKER_PROCESSING);
            mp_dispatch_ring_all(entry); /* its own that it could not take are anybody's now */
            mp_guard guard = {0};
            bool scale = mp_dispatch_scale(entry, &guard); /* all may be busy now, and something still wait */
            mp_mutex_unlock(&entry->lock);
            if (scale)
                mp_entry_launch(entry, guard);
            mp_worker_set_runnable(w, true);
            return true;
        }
        if (over || w->leave || entry->evict || (entry->remove && entry->queue.count == 0))
            break;
        if (w->retry_ns && (!until_ns || w->retry_ns < until_ns))
            until_ns = w->retry_ns;
        uint64_t look_ns = w->engine->lost ? mp_sys_now_ns() + LOST_LOOK_NS : 0;
        if (look_ns && (!until_ns || look_ns < until_ns))
            until_ns = look_ns;
        rest(w, until_ns);
        mp_mutex_unlock(&entry->lock);
    }
    mp_mutex_unlock(&entry->lock);
    mp_worker_set_runnable(w, false);
    return false;
}

/* One was admitted: neither its flow nor it has a claim on time that it did not use. */
static void join(mp_worker *w, mp_ticket *ticket) {
    int flow = ticket->node.flow;
    bool away = true;
    for (int i = 0; i < w->active_count; i++)
        away = away && (w->active[i] == ticket || !w->active[i]->admitted || w->active[i]->node.flow != flow);
    if (away && w->flow_ns[flow] < w->virtual_ns)
        w->flow_ns[flow] = w->virtual_ns;
    ticket->virtual_ns = w->clock_ns[flow];
}

/* After a step that was offered n items: what an equal share of it was, by weight, for each flow, and within each; and
 * what everybody has had. */
static void charge(mp_worker *w, int n, uint64_t took_ns) {
    int calls[MP_QUEUE_FLOWS] = {0};
    uint64_t weights = 0;
    for (int i = 0; i < n; i++) {
        const mp_ticket *ticket = w->offered[i]->ticket;
        if (calls[ticket->node.flow]++ == 0)
            weights += ticket->item.lane == MP_LANE_BULK ? 1 : BULK_WEIGHT;
    }
    w->virtual_ns += took_ns * BULK_WEIGHT / weights;
    double amount = 0;
    for (int i = 0; i < w->plan.count; i++)
        amount += w->plan.amount[i];
    for (int i = 0; i < w->plan.count; i++) {
        mp_ticket *ticket = w->plan.items[i]->ticket;
        int flow = ticket->node.flow;
        double share = amount > 0 ? w->plan.amount[i] / amount : 1.0 / w->plan.count;
        uint64_t had = (uint64_t)((double)took_ns * share);
        w->clock_ns[flow] += had / (uint64_t)(calls[flow] ? calls[flow] : 1);
        w->flow_ns[flow] += had * (ticket->item.lane == MP_LANE_BULK ? BULK_WEIGHT : 1);
        ticket->virtual_ns += had;
        ticket->had_ns += had;
    }
}

/* Of a call that was queued before anybody knew what it costs. */
static void note_cost(mp_worker *w, mp_ticket *ticket) {
    if (ticket->node.cost == ticket->item.cost_ns)
        return;
    mp_mutex_lock(&w->entry->lock);
    ticket->node.cost = ticket->item.cost_ns;
    mp_mutex_unlock(&w->entry->lock);
}

/* Memory was refused: other models may hold some without need. True: it is on its way. */
static bool ask_others(mp_worker *w) {
    mp_governor *governor = w->entry->services->governor;
    uint64_t limit = atomic_load_explicit(&mp_governor_budget(governor)->limit, memory_order_relaxed);
    return mp_governor_reclaim(governor, limit / 16, false) > 0;
}

/* Under the lock: what is put back must not return before somebody has left; or for a while only, if `again`: there may
 * be nobody who leaves. */
static void close_door(mp_worker *w, bool again) {
    w->memory_tight = true;
    w->lean = true; /* it was trimmed; else workers that hand a call to and fro ask each other for ever */
    w->retry_ns = again ? mp_sys_now_ns() + MEMORY_AGAIN_MS * MS : 0;
    mp_dispatch_ring_all(w->entry); /* what waited for this one may go to the next */
}

static void admit_fresh(mp_worker *w) {
    mp_entry *entry = w->entry;
    for (int i = 0; i < w->fresh_count; i++) {
        mp_ticket *ticket = w->fresh[i];
        mp_error error;
        mp_error_clear(&error);
        if (ticket->item.deadline_ns && mp_sys_now_ns() >= ticket->item.deadline_ns)
            mp_entry_cancel(entry, ticket, MP_TIMEOUT); /* it waited until now, and the sweep is late */
        if (atomic_load_explicit(&ticket->cause, memory_order_acquire))
            continue; /* ended at the next look */
        mp_status status = mp_entry_screen(entry, ticket, &error);
        if (status == MP_OK)
            status = mp_entry_check(entry, w->resident, ticket, &error);
        if (status != MP_OK) {
            end_item(w, ticket, status, &error);
            continue;
        }
        status = w->engine->ops->admit(w->engine, &ticket->item, &error);
        if (status == MP_MEMORY_EXHAUSTED && !w->trimmed) {
            w->trimmed = true;
            if (w->engine->ops->trim(w->engine))
                status = w->engine->ops->admit(w->engine, &ticket->item, &error);
        }
        if (status == MP_OK) {
            ticket->admitted = true;
            join(w, ticket);
            note_cost(w, ticket);
            continue;
        }
        if (status != MP_MEMORY_EXHAUSTED && is_lost(w)) { /* somebody else takes it, once */
            bool ended = lose_with(w, ticket);
            mp_count(entry->services, MP_METRIC_retries, !ended);
            put_back_fresh(w, ended ? i + 1 : i);
            break;
        }
        if (status != MP_MEMORY_EXHAUSTED) {
            end_item(w, ticket, status, &error);
            continue;
        }
        /* Others hold what it needs (those not admitted are the fresh ones behind it): wait until one has left. Or
         * other models hold it without need: wait until they have given it up. Other workers' may end before the door
         * is closed, or have been refused just now too, each for the other's sake. */
        mp_mutex_lock(&entry->lock);
        bool mine = w->active_count > w->fresh_count - i;
        bool others = mp_entry_running(entry) > w->fresh_count - i;
        mp_mutex_unlock(&entry->lock);
        bool coming = !others && ask_others(w);
        if (!others && !coming) {
            end_item(w, ticket, status, &error);
            continue;
        }
        mp_mutex_lock(&entry->lock);
        close_door(w, !mine);
        mp_mutex_unlock(&entry->lock);
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
    uint64_t a_had = w->flow_ns[x->node.flow], b_had = w->flow_ns[y->node.flow];
    if (a_had != b_had)
        return a_had < b_had;
    a_had = x->virtual_ns;
    b_had = y->virtual_ns;
    if (a_had != b_had)
        return a_had < b_had;
    return a->sequence < b->sequence;
}

/* Insertion sort: the active list is nearly in order from step to step. Cancelled ones are left out. */
static int order_items(mp_worker *w) {
    int n = 0;
    for (int i = 0; i < w->active_count; i++) {
        mp_ticket *ticket = w->active[i];
        mp_item *item = &ticket->item;
        if (!ticket->admitted || atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            continue;
        int at = n++;
        for (; at > 0 && comes_before(w, item, w->order[at - 1]); at--)
            w->order[at] = w->order[at - 1];
        w->order[at] = item;
    }
    return n;
}

static bool is_suspect(const mp_item *item) { return ((const mp_ticket *)item->ticket)->suspect; }

/* Who of the ordered is offered to the engine: all, unless there are suspects. A suspect takes its steps alone: should
 * it fail again, nobody else was there. Those left out are next, and their turn comes at once if those before them have
 * nothing to do. Returns how many; 0 = all had their turn. */
static int offer(mp_worker *w, int n, int turn) {
    int suspects = 0, offered = 0;
    for (int i = 0; i < n; i++)
        suspects += is_suspect(w->order[i]);
    bool others = suspects < n, first = others && !is_suspect(w->order[0]) && !w->suspects_next;
    int which = turn - first; /* of the suspects, -1 and as many as there are: of the others */
    if (which >= suspects + (others && !first))
        return 0;
    for (int i = 0, seen = 0; i < n; i++) {
        bool suspect = is_suspect(w->order[i]);
        if (suspect ? seen++ == which : which < 0 || which == suspects)
            w->offered[offered++] = w->order[i];
    }
    return offered;
}

/* A plan for the first of them that have something to do. Returns how many were offered; lost: its engine was. */
static int plan_step(mp_worker *w, int n, uint64_t budget_ns, bool *lost) {
    int offered = 0, count;
    w->plan.count = 0;
    *lost = false;
    for (int turn = 0; !w->plan.count && !*lost && (count = offer(w, n, turn)) > 0; turn++) {
        offered = count;
        w->plan.lanes = 1;
        w->plan.masks = w->plan.together = false;
        w->plan.cost_ns = 0;
        w->engine->ops->plan(w->engine, w->offered, count, budget_ns, &w->plan);
        assert((w->plan.count > 0 || w->plan.masks) && w->plan.count <= count);
        *lost = is_lost(w);
    }
    if (w->plan.count)
        w->suspects_next = offered < n && !is_suspect(w->offered[0]);
    return offered;
}

/* No lock held. False: all were cancelled in the meantime. */
static bool enter_step(mp_worker *w, uint64_t now_ns) {
    mp_entry *entry = w->entry;
    int live = 0;
    mp_mutex_lock(&entry->lock);
    for (int i = 0; i < w->plan.count; i++) {
        mp_ticket *ticket = w->plan.items[i]->ticket;
        ticket->in_step = true;
        live += atomic_load_explicit(&ticket->cause, memory_order_relaxed) == 0;
    }
    w->step_live = live;
    w->in_step = true;
    atomic_store_explicit(&w->lease.heartbeat, now_ns, memory_order_relaxed);
    mp_watch_reset(&w->watch, now_ns);
    atomic_store_explicit(&w->step_cancelled, live == 0, memory_order_release);
    mp_mutex_unlock(&entry->lock);
    return live > 0;
}

/* One step that was held up is not the rule. */
static void run_mean(double *mean, double sample) {
    if (*mean <= 0)
        *mean = sample;
    *mean += ((sample < 4 * *mean ? sample : 4 * *mean) - *mean) / 16;
}

/* After a step that was offered n items. True: the worker was set apart meanwhile. */
static bool leave_step(mp_worker *w, int n, uint64_t took_ns) {
    mp_entry *entry = w->entry;
    uint64_t held = mp_worker_bytes(w);
    mp_mutex_lock(&entry->lock);
    bool dead = w->state == MP_WORKER_DEAD;
    w->held_bytes = held;
    w->in_step = w->moving = false;
    w->step_live = 0;
    for (int i = 0; i < w->plan.count && !dead; i++)
        ((mp_ticket *)w->plan.items[i]->ticket)->in_step = false;
    w->step_ns += took_ns;
    if (!dead && w->plan.cost_ns) {
        double pace = (double)took_ns / (double)w->plan.cost_ns;
        run_mean(&entry->pace, pace);
        if (w->plan.count < n)
            run_mean(&entry->full_pace, pace);
    }
    mp_mutex_unlock(&entry->lock);
    return dead;
}

/* An item found no memory in a step: the youngest of the lowest priority gives its own back and waits at the front of
 * the queue. With nobody else to take from, it is the item's end. */
static void make_memory(mp_worker *w, mp_ticket *waiting) {
    mp_entry *entry = w->entry;
    if (!w->trimmed) {
        w->trimmed = true;
        if (w->engine->ops->trim(w->engine))
            return;
    }
    mp_ticket *victim = NULL;
    for (int i = 0; i < w->active_count; i++) {
        mp_ticket *ticket = w->active[i];
        if (!ticket->admitted)
            continue;
        if (!victim || ticket->item.priority > victim->item.priority ||
            (ticket->item.priority == victim->item.priority && ticket->item.sequence > victim->item.sequence))
            victim = ticket;
    }
    bool alone = w->active_count == 1, coming = alone && ask_others(w);
    mp_mutex_lock(&entry->lock);
    bool others = mp_entry_running(entry) > w->active_count, waits = !alone || coming || others;
    if (waits)
        close_door(w, alone || others);
    mp_mutex_unlock(&entry->lock);
    if (waits) {
        preempt(w, victim, MP_METRIC_preemptions);
        return;
    }
    mp_error error;
    mp_fail(&error, MP_MEMORY_EXHAUSTED, "%s: the call needs more memory than is left, though it runs alone",
            entry->key);
    end_item(w, waiting, error.code, &error);
}

/* A step failed for this item. It may have a second try; an internal error is the end of the worker. */
static void fail_item(mp_worker *w, mp_ticket *ticket, bool alone, bool *noted) {
    mp_entry *entry = w->entry;
    mp_error error = ticket->item.error;
    if (error.code == MP_OK)
        mp_fail(&error, MP_MODEL, "%s: the model failed while computing", entry->key);
    if (error.code == MP_INTERNAL)
        w->fault = error;
    w->end_noted |= error.code == MP_INTERNAL || error.code == MP_RECV;
    if (!mp_entry_fault(entry, ticket, error.code, alone, w->engine->outside, noted)) {
        end_item(w, ticket, error.code, &error);
        return;
    }
    if (ticket->item.call->goes_on) {
        w->engine->ops->preempt(w->engine, &ticket->item);
    } else {
        w->engine->ops->retire(w->engine, &ticket->item);
        ticket->item.cursor = 0;
    }
    w->trimmed = ticket->admitted = false;
    mp_error_clear(&ticket->item.error);
    mp_count(entry->services, MP_METRIC_retries, 1);
    mp_mutex_lock(&entry->lock);
    bool waits = requeue(w, ticket);
    mp_dispatch_ring_all(entry);
    mp_dispatch_memory_free(entry);
    mp_mutex_unlock(&entry->lock);
    if (waits)
        return;
    mp_status status = mp_ticket_cause(ticket, &error);
    mp_entry_finish(entry, ticket, status, &error);
}

static void hand_out(mp_worker *w, uint64_t now_ns) {
    mp_ticket *waiting = NULL;
    bool somebody_left = false, noted = false;
    for (int i = 0; i < w->plan.count; i++) {
        mp_ticket *ticket = w->plan.items[i]->ticket;
        if (w->outcomes[i] != MP_OUTCOME_WAIT_MEMORY) /* nothing was done for it */
            atomic_store_explicit(&ticket->moved_ns, now_ns, memory_order_relaxed);
        switch (w->outcomes[i]) {
        case MP_OUTCOME_DONE:
            somebody_left = true;
            end_item(w, ticket, MP_OK, NULL);
            break;
        case MP_OUTCOME_FAILED:
            somebody_left = true;
            fail_item(w, ticket, w->plan.count == 1, &noted);
            break;
        case MP_OUTCOME_WAIT_MEMORY:
            waiting = ticket;
            break;
        case MP_OUTCOME_WAIT_MASK: /* the next plan looks whether it is there */
        case MP_OUTCOME_MORE:
            mp_ticket_publish(ticket);
            break;
        }
    }
    if (waiting && !somebody_left)
        make_memory(w, waiting);
}

static void count_work(mp_worker *w) {
    mp_services *services = w->entry->services;
    const mp_step_work *work = &w->engine->work;
    mp_count(services, MP_METRIC_passes, work->passes - w->counted.passes);
    mp_count(services, MP_METRIC_rows, work->rows - w->counted.rows);
    mp_count(services, MP_METRIC_prefix_tokens, work->found - w->counted.found);
    mp_count(services, MP_METRIC_guessed_tokens, work->guessed - w->counted.guessed);
    mp_count(services, MP_METRIC_right_guesses, work->right - w->counted.right);
    w->counted = *work;
}

/* Everybody waits for a mask. Whoever brings one, a call that comes or one that is cancelled rings; deadlines are
 * looked at now and then. `rung` was cleared before the plan looked; of a call that came since, or was cancelled,
 * nobody told a worker that did not wait yet. */
static void wait_for_masks(mp_worker *w) {
    mp_entry *entry = w->entry;
    mp_mutex_lock(&entry->lock);
    bool over = w->rung || w->state == MP_WORKER_DEAD || mp_dispatch_offers(entry, w);
    for (int i = 0; i < w->active_count; i++)
        over = over || atomic_load_explicit(&w->active[i]->cause, memory_order_relaxed) != 0;
    if (!over) {
        w->waits = true;
        mp_event_count_wait(&w->wake, &entry->lock, NULL, mp_sys_now_ns() + MASK_LOOK_NS);
        w->waits = false;
    }
    mp_mutex_unlock(&entry->lock);
}

/* A file is another than what was loaded: what the step made may be of both, and nobody sees it. */
static void end_changed(mp_worker *w) {
    mp_fail(&w->fault, MP_INTEGRITY, "%s: a file of the model was changed or cut short while it was in use",
            w->entry->key);
    end_all(w, &w->fault);
}

/* False: the worker was set apart. */
static bool step(mp_worker *w) {
    mp_entry *entry = w->entry;
    mp_services *services = entry->services;
    int n = order_items(w);
    if (!n)
        return true;
    mp_mutex_lock(&entry->lock);
    bool alone = w->active_count == 1 && entry->queue.count == 0;
    mp_mutex_unlock(&entry->lock);
    uint64_t budget_ns = services->step_budget_ns;
    if (alone && !mp_cores_contended(services->cores_seen))
        budget_ns *= ALONE;
    bool lost;
    n = plan_step(w, n, budget_ns, &lost);
    if (lost) { /* before the step: nobody was in it, but one of them may be the cause */
        for (int i = 0; i < n; i++)
            lose_with(w, w->offered[i]->ticket);
        return true;
    }
    if (w->plan.count == 0) {
        wait_for_masks(w);
        return true;
    }
    int most = w->plan.together ? mp_cores_together(services->cores_seen) : w->plan.lanes;
    if (!mp_worker_lease(w, w->plan.lanes < most ? w->plan.lanes : most))
        return true; /* who is cancelled is ended first */
    w->lease.together = w->plan.together;
    uint64_t began_ns = mp_sys_now_ns();
    bool live = enter_step(w, began_ns);
    if (live) {
        for (int i = 0; i < w->plan.count; i++) {
            mp_ticket *ticket = w->plan.items[i]->ticket;
            if (!atomic_load_explicit(&ticket->started_ns, memory_order_relaxed)) {
                atomic_store_explicit(&ticket->started_ns, began_ns, memory_order_relaxed);
                mp_events_post(MP_EVENT_REQUEST_START, entry->services->number, entry->key, w->id, ticket, MP_OK);
            }
            w->outcomes[i] = MP_OUTCOME_MORE;
        }
        mp_maintenance_at(&services->maintenance, services->pool, began_ns + services->stall_timeout_ns / 4);
        w->engine->ops->step(w->engine, &w->lease, &w->plan, w->outcomes);
    }
    uint64_t now_ns = mp_sys_now_ns(), took_ns = now_ns - began_ns;
    mp_worker_return_lanes(w);
    if (leave_step(w, n, live ? took_ns : 0))
        return false;
    if (!live)
        return true;
    mp_count(services, MP_METRIC_steps, 1);
    mp_count(services, MP_METRIC_step_items, (uint64_t)w->plan.count);
    mp_count(services, w->plan.count == n ? MP_METRIC_batches_of_all : MP_METRIC_batches_of_budget, 1);
    count_work(w);
    charge(w, n, took_ns);
    if (w->resident->model->ops->healthy(w->resident->model))
        hand_out(w, now_ns);
    else
        end_changed(w);
    return true;
}

void mp_worker_serve(mp_worker *w) {
    while (take_work(w)) {
        admit_fresh(w);
        if (w->fault.code == MP_OK && !step(w))
            return;
        is_lost(w);
        if (w->fault.code != MP_OK) { /* others go on elsewhere, with the same bytes */
            while (w->active_count)
                preempt(w, w->active[w->active_count - 1], MP_METRIC_retries);
            return;
        }
    }
}
