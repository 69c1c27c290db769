/* serve.c: the worker of an entry, from loading to evicting. See entry.h and models/engine.h.
 *
 * Fairness: items are offered to plan() by priority, then lane, then by how much service they have had. One that joins
 * is taken to have had as much as an equal share of every step so far would have given it (virtual time, as in weighted
 * fair queueing), so that a call with 10,000 texts and calls with one share the steps, and neither starves. */
#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/trace.h"
#include "registry/entry.h"

static const uint64_t HEALTH_EVERY_NS = 1000ull * 1000 * 1000;
/* With nobody waiting, a step may be this many times the budget: fewer boundaries, and still soon over when somebody
 * comes. */
enum { ALONE = 4 };

/* What the worker owns, on its stack. */
typedef struct serving {
    mp_entry *entry;
    mp_services *services;
    mp_resident *resident; /* a reference */
    mp_engine *engine;
    mp_lease lease;
    mp_plan plan;
    mp_outcome outcomes[MP_PLAN_MAX];
    mp_item *order[MP_ACTIVE_MAX];   /* active items in order of preference */
    mp_ticket *fresh[MP_ACTIVE_MAX]; /* just taken from the queue, to be admitted */
    int fresh_count;
    uint64_t virtual_ns; /* an equal share of every step so far */
    uint64_t healthy_ns; /* when the model's files were looked at last */
    bool memory_tight;   /* the engine refused an item: admit nobody before somebody has left */
    bool trimmed;        /* and has been trimmed since */
    bool runnable;       /* counted among those that share the lanes */
    bool unhealthy;
} serving;

/* --- loading --- */

static bool load_is_off(void *arg) {
    mp_entry *entry = arg;
    return atomic_load_explicit(&entry->step_cancelled, memory_order_acquire) != 0;
}

/* The sweep does not time a stage that waits for others. */
static void stage_untimed(mp_entry *entry, const char *stage) {
    atomic_store_explicit(&entry->progress.stage, stage, memory_order_release);
    atomic_store_explicit(&entry->progress.beat_ns, 0, memory_order_release);
}

static mp_status load_model(serving *s, mp_loader loader, uint64_t model_bytes, uint64_t engine_bytes,
                            mp_error *error) {
    mp_entry *entry = s->entry;
    mp_services *services = s->services;
    mp_governor *governor = services->governor;
    mp_budget *budget = mp_governor_budget(governor);
    mp_model *model = NULL;
    uint64_t needed = model_bytes + engine_bytes;

    stage_untimed(entry, "waiting for memory");
    MP_TRY(mp_governor_reserve(governor, entry->key, needed, load_is_off, entry, error));
    mp_resident *resident = mp_alloc_zeroed(sizeof(*resident), MP_TAG_POOL);
    if (!resident) {
        mp_governor_unreserve(governor, needed);
        return mp_fail_memory(error, sizeof(*resident), "the record of a model");
    }
    /* A load keeps its lanes to the end. Where others have models, it leaves them half. */
    int lanes = mp_cores_lanes(services->cores);
    if (atomic_load_explicit(&services->resident, memory_order_relaxed) > 1)
        lanes = (lanes + 1) / 2;
    stage_untimed(entry, "waiting for a CPU");
    mp_cores_lease(services->cores, lanes, &s->lease);
    s->lease.cancelled = &entry->step_cancelled;
    mp_progress_set(&entry->progress, "loading", 0);
    mp_status status = loader.ops->load(loader.self, &s->lease, budget, &entry->progress, &model, error);
    mp_cores_return(services->cores, &s->lease);
    mp_governor_unreserve(governor, needed);
    if (status != MP_OK) {
        mp_free(resident);
        return status;
    }
    static _Atomic uint64_t number;
    resident->model = model;
    resident->load = atomic_fetch_add_explicit(&number, 1, memory_order_relaxed) + 1;
    atomic_init(&resident->references, 1);
    s->resident = resident;
    return MP_OK;
}

/* A model and an engine, or the cause. */
static mp_status load(serving *s, uint64_t *engine_bytes, mp_error *error) {
    mp_entry *entry = s->entry;
    mp_error_clear(error);
    mp_mutex_lock(&entry->lock);
    entry->attempts++;
    entry->stalled = false;
    if (!entry->quit)
        atomic_store_explicit(&entry->step_cancelled, 0, memory_order_release);
    mp_progress_set(&entry->progress, "starting", 0);
    mp_entry_set_state(entry, MP_ENTRY_LOADING);
    s->resident = entry->resident ? mp_resident_pin(entry->resident) : NULL; /* kept over a fork */
    mp_loader loader = entry->loader;
    mp_mutex_unlock(&entry->lock);
    /* somebody is to look whether the load moves: also when it is a second one of the same worker */
    mp_maintenance_at(&s->services->maintenance, s->services->pool, mp_sys_now_ns() + s->services->load_timeout_ns);

    uint64_t model_bytes = 0;
    loader.ops->footprint(loader.self, &model_bytes, engine_bytes);
    mp_status status = s->resident ? MP_OK : load_model(s, loader, model_bytes, *engine_bytes, error);
    if (status == MP_OK) {
        mp_progress_set(&entry->progress, "making an engine", 99);
        mp_model *model = s->resident->model;
        status = model->ops->engine(model, mp_governor_budget(s->services->governor), &s->engine, error);
    }
    if (status != MP_OK) {
        if (error->code != status) /* a loader that said nothing */
            mp_fail(error, status, "%s: %s", entry->key, mp_status_find(status)->text);
        mp_resident_unpin(s->resident);
        s->resident = NULL;
    }
    return status;
}

/* True: ready to serve. False: everybody who waited was told. */
static bool start(serving *s) {
    mp_entry *entry = s->entry;
    mp_error error;
    uint64_t began_ns = mp_sys_now_ns(), engine_bytes = 0;
    mp_cores_enter(s->services->cores);
    mp_status status = load(s, &engine_bytes, &error);
    mp_cores_leave(s->services->cores);
    const char *stage = mp_entry_stage(entry);
    mp_ticket *list = NULL;

    mp_mutex_lock(&entry->lock);
    bool called_off = entry->quit;
    entry->attempts_over++;
    entry->stalled = false;
    entry->engine_bytes = engine_bytes;
    if (status == MP_OK) {
        if (!entry->resident)
            entry->resident = mp_resident_pin(s->resident);
        entry->loads++;
        entry->backoff_ns = 0;
        mp_entry_set_state(entry, MP_ENTRY_READY);
    } else {
        entry->evict = false;
        if (entry->resident) { /* of before a fork, and no engine could be made over it */
            mp_resident_unpin(entry->resident);
            entry->resident = NULL;
        }
        mp_entry_set_failed(entry, &error);
        list = mp_entry_take_queue(entry);
        for (mp_ticket *ticket = list; called_off && ticket; ticket = ticket->next)
            atomic_store_explicit(&ticket->cause, MP_SHUTTING_DOWN, memory_order_release);
    }
    mp_mutex_unlock(&entry->lock);

    if (status == MP_OK) {
        mp_count(s->services, MP_METRIC_loads, 1);
        if (mp_log_enabled(MP_LOG_INFO)) {
            mp_model *model = s->resident->model;
            mp_log(MP_LOG_INFO, "Loaded %s in %.3f s (%.1f MB)", entry->key,
                   (double)(mp_sys_now_ns() - began_ns) * 1e-9, (double)model->ops->bytes(model) / 1e6);
        }
        s->services->event(s->services->registry, entry, MP_ENTRY_LOADED);
        return true;
    }
    mp_count(s->services, MP_METRIC_load_failures, 1);
    if (!called_off)
        mp_log(MP_LOG_ERROR, "Loading %s failed (stage: %s): %s", entry->key, stage, error.message);
    mp_entry_finish_list(entry, list, called_off ? NULL : &error);
    s->services->event(s->services->registry, entry, MP_ENTRY_LOAD_FAILED);
    return false;
}

/* --- ending items --- */

/* Off the active list, so that nobody else ends it. Under the lock. */
static void deactivate(mp_entry *entry, mp_ticket *ticket) {
    for (int i = 0; i < entry->active_count; i++) {
        if (entry->active[i] != ticket)
            continue;
        memmove(&entry->active[i], &entry->active[i + 1], (size_t)(entry->active_count - i - 1) * sizeof(ticket));
        entry->active_count--;
        ticket->active = false;
        return;
    }
    assert(!"an active ticket is on the list");
}

static void retire(serving *s, mp_ticket *ticket) {
    s->engine->ops->retire(s->engine, &ticket->item);
    ticket->admitted = false;
    s->memory_tight = s->trimmed = false;
}

/* No lock held. error: unused with MP_OK. */
static void end_item(serving *s, mp_ticket *ticket, mp_status status, const mp_error *error) {
    mp_mutex_lock(&s->entry->lock);
    deactivate(s->entry, ticket);
    mp_mutex_unlock(&s->entry->lock);
    retire(s, ticket);
    mp_entry_finish(s->entry, ticket, status, error);
}

static void end_cancelled(serving *s) {
    uint64_t now = mp_sys_now_ns();
    for (int i = s->entry->active_count - 1; i >= 0; i--) {
        mp_ticket *ticket = s->entry->active[i];
        uint64_t deadline = ticket->item.deadline_ns;
        /* The sweep looks too, but it may be late or have no thread. */
        if (deadline && now >= deadline)
            mp_entry_cancel(s->entry, ticket, MP_TIMEOUT);
        if (!atomic_load_explicit(&ticket->cause, memory_order_acquire))
            continue;
        mp_error error;
        mp_status status = mp_ticket_cause(ticket, &error);
        end_item(s, ticket, status, &error);
    }
}

static void end_all(serving *s, const mp_error *error) {
    mp_entry *entry = s->entry;
    while (entry->active_count)
        end_item(s, entry->active[entry->active_count - 1], error->code, error);
    mp_mutex_lock(&entry->lock);
    mp_ticket *list = mp_entry_take_queue(entry);
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, list, error);
}

/* --- taking work --- */

static void set_runnable(serving *s, bool runnable) {
    if (runnable == s->runnable)
        return;
    s->runnable = runnable;
    if (runnable)
        mp_cores_enter(s->services->cores);
    else
        mp_cores_leave(s->services->cores);
}

/* Under the lock. */
static void take_from_queue(serving *s) {
    mp_entry *entry = s->entry;
    s->fresh_count = 0;
    while (!s->memory_tight && !entry->evict && entry->active_count < MP_ACTIVE_MAX) {
        mp_queue_node *node = mp_queue_pop(&entry->queue);
        if (!node)
            break;
        mp_ticket *ticket = mp_ticket_of_node(node);
        ticket->active = true;
        ticket->admitted = false;
        entry->active[entry->active_count++] = ticket;
        s->fresh[s->fresh_count++] = ticket;
    }
    if (s->fresh_count)
        mp_entry_tell_room(entry);
}

/* Wait until something is active. False: the model is to be given up; nothing is active then. */
static bool take_work(serving *s) {
    mp_entry *entry = s->entry;
    for (;;) {
        end_cancelled(s);
        mp_mutex_lock(&entry->lock);
        if (entry->quit && entry->active_count == 0) /* quit has cancelled the active ones and emptied the queue */
            break;
        take_from_queue(s);
        if (entry->active_count) {
            if (entry->state != MP_ENTRY_BUSY)
                mp_entry_set_state(entry, MP_ENTRY_BUSY);
            mp_mutex_unlock(&entry->lock);
            set_runnable(s, true);
            return true;
        }
        if (entry->evict || (entry->remove && entry->queue.count == 0))
            break;
        if (entry->state != MP_ENTRY_READY)
            mp_entry_set_state(entry, MP_ENTRY_READY);
        mp_spin_rule rule = mp_entry_spin_rule(entry);
        set_runnable(s, false);
        mp_bell_wait(&entry->bell, &entry->lock, &rule, 0);
        mp_mutex_unlock(&entry->lock);
    }
    mp_entry_set_state(entry, MP_ENTRY_EVICTING);
    mp_mutex_unlock(&entry->lock);
    set_runnable(s, false);
    return false;
}

/* From the fresh ones, number `from` and on: back to the front of the queue, in their order. */
static void put_back(serving *s, int from) {
    mp_entry *entry = s->entry;
    mp_ticket *cancelled = NULL;
    mp_mutex_lock(&entry->lock);
    for (int i = s->fresh_count - 1; i >= from; i--) {
        mp_ticket *ticket = s->fresh[i];
        deactivate(entry, ticket);
        if (atomic_load_explicit(&ticket->cause, memory_order_acquire)) {
            ticket->next = cancelled;
            cancelled = ticket;
        } else {
            mp_queue_push_front(&entry->queue, &ticket->node, ticket->item.priority);
        }
    }
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, cancelled, NULL);
}

static void admit_fresh(serving *s) {
    mp_entry *entry = s->entry;
    for (int i = 0; i < s->fresh_count; i++) {
        mp_ticket *ticket = s->fresh[i];
        mp_error error;
        mp_error_clear(&error);
        if (atomic_load_explicit(&ticket->cause, memory_order_acquire))
            continue; /* ended at the next look */
        mp_status status = mp_entry_check(entry, s->resident, ticket, &error);
        if (status != MP_OK) {
            end_item(s, ticket, status, &error);
            continue;
        }
        status = s->engine->ops->admit(s->engine, &ticket->item, &error);
        if (status == MP_MEMORY_EXHAUSTED && !s->trimmed) {
            s->trimmed = true;
            if (s->engine->ops->trim(s->engine))
                status = s->engine->ops->admit(s->engine, &ticket->item, &error);
        }
        if (status == MP_OK) {
            ticket->admitted = true;
            if (ticket->virtual_ns < s->virtual_ns)
                ticket->virtual_ns = s->virtual_ns;
            continue;
        }
        /* Others hold what it needs (those not admitted are the fresh ones behind it): wait until one has left. */
        if (status == MP_MEMORY_EXHAUSTED && entry->active_count > s->fresh_count - i) {
            s->memory_tight = true;
            put_back(s, i);
            break;
        }
        end_item(s, ticket, status, &error);
    }
    s->fresh_count = 0;
}

/* --- steps --- */

static bool comes_before(const mp_item *a, const mp_item *b) {
    if (a->priority != b->priority)
        return a->priority < b->priority;
    if (a->lane != b->lane)
        return a->lane < b->lane;
    uint64_t a_had = ((const mp_ticket *)a->ticket)->virtual_ns, b_had = ((const mp_ticket *)b->ticket)->virtual_ns;
    if (a_had != b_had)
        return a_had < b_had;
    return a->sequence < b->sequence;
}

/* Insertion sort: the active list is nearly in order from step to step. Cancelled ones are left out. */
static int order_items(serving *s) {
    int n = 0;
    for (int i = 0; i < s->entry->active_count; i++) {
        mp_ticket *ticket = s->entry->active[i];
        mp_item *item = &ticket->item;
        if (!ticket->admitted || atomic_load_explicit(&item->cancelled, memory_order_relaxed))
            continue;
        int at = n++;
        for (; at > 0 && comes_before(item, s->order[at - 1]); at--)
            s->order[at] = s->order[at - 1];
        s->order[at] = item;
    }
    return n;
}

/* Under the lock. False: all were cancelled in the meantime. */
static bool enter_step(serving *s) {
    mp_entry *entry = s->entry;
    int live = 0;
    for (int i = 0; i < s->plan.count; i++) {
        mp_ticket *ticket = s->plan.items[i]->ticket;
        ticket->in_step = true;
        live += atomic_load_explicit(&ticket->cause, memory_order_relaxed) == 0;
    }
    entry->step_live = live;
    atomic_store_explicit(&entry->step_cancelled, live == 0, memory_order_release);
    return live > 0;
}

static void leave_step(serving *s) {
    mp_mutex_lock(&s->entry->lock);
    for (int i = 0; i < s->plan.count; i++)
        ((mp_ticket *)s->plan.items[i]->ticket)->in_step = false;
    s->entry->step_live = 0;
    mp_mutex_unlock(&s->entry->lock);
}

/* An item found no memory in a step: the youngest of the lowest priority gives its own back and waits at the front of
 * the queue. With nobody else to take from, it is the item's end. */
static void make_memory(serving *s, mp_ticket *waiting) {
    mp_entry *entry = s->entry;
    if (!s->trimmed) {
        s->trimmed = true;
        if (s->engine->ops->trim(s->engine))
            return;
    }
    mp_ticket *victim = NULL;
    for (int i = 0; i < entry->active_count; i++) {
        mp_ticket *ticket = entry->active[i];
        if (!ticket->admitted)
            continue;
        if (!victim || ticket->item.priority > victim->item.priority ||
            (ticket->item.priority == victim->item.priority && ticket->item.sequence > victim->item.sequence))
            victim = ticket;
    }
    if (entry->active_count == 1) {
        mp_error error;
        mp_fail(&error, MP_MEMORY_EXHAUSTED, "%s: the call needs more memory than is left, though it runs alone",
                entry->key);
        end_item(s, waiting, error.code, &error);
        return;
    }
    mp_count(s->services, MP_METRIC_preemptions, 1);
    s->engine->ops->preempt(s->engine, &victim->item);
    victim->admitted = false;
    mp_mutex_lock(&entry->lock);
    bool cancelled = atomic_load_explicit(&victim->cause, memory_order_acquire) != 0;
    deactivate(entry, victim);
    if (!cancelled)
        mp_queue_push_front(&entry->queue, &victim->node, victim->item.priority);
    mp_mutex_unlock(&entry->lock);
    s->memory_tight = true; /* it must not come back before somebody has left */
    if (!cancelled)
        return;
    mp_error error;
    mp_status status = mp_ticket_cause(victim, &error);
    s->engine->ops->retire(s->engine, &victim->item);
    mp_entry_finish(entry, victim, status, &error);
}

static void hand_out(serving *s, uint64_t took_ns) {
    uint64_t amount = 0;
    mp_ticket *waiting = NULL;
    bool somebody_left = false;
    for (int i = 0; i < s->plan.count; i++)
        amount += s->plan.amount[i];
    for (int i = 0; i < s->plan.count; i++) {
        mp_ticket *ticket = s->plan.items[i]->ticket;
        double share = amount ? (double)s->plan.amount[i] / (double)amount : 1.0 / s->plan.count;
        ticket->virtual_ns += (uint64_t)((double)took_ns * share);
        switch (s->outcomes[i]) {
        case MP_OUTCOME_DONE:
            somebody_left = true;
            end_item(s, ticket, MP_OK, NULL);
            break;
        case MP_OUTCOME_FAILED:
            somebody_left = true;
            if (ticket->item.error.code == MP_OK)
                mp_fail(&ticket->item.error, MP_MODEL, "%s: the model failed while computing", s->entry->key);
            end_item(s, ticket, ticket->item.error.code, &ticket->item.error);
            break;
        case MP_OUTCOME_WAIT_MEMORY:
            waiting = ticket;
            break;
        case MP_OUTCOME_WAIT_MASK: /* NOTE: grammar masks come later; until then an engine has no reason to say this */
        case MP_OUTCOME_MORE:
            mp_ticket_publish(ticket);
            break;
        }
    }
    if (waiting && !somebody_left)
        make_memory(s, waiting);
}

static void step(serving *s) {
    mp_entry *entry = s->entry;
    mp_services *services = s->services;
    int n = order_items(s);
    if (!n)
        return;
    mp_mutex_lock(&entry->lock);
    bool alone = entry->active_count == 1 && entry->queue.count == 0;
    mp_mutex_unlock(&entry->lock);
    uint64_t budget_ns = services->step_budget_ns;
    if (alone && !mp_cores_contended(services->cores))
        budget_ns *= ALONE;
    s->plan.count = 0;
    s->plan.lanes = 1;
    s->plan.cost_ns = 0;
    s->engine->ops->plan(s->engine, s->order, n, budget_ns, &s->plan);
    assert(s->plan.count > 0 && s->plan.count <= n);

    mp_cores_lease(services->cores, s->plan.lanes, &s->lease);
    mp_mutex_lock(&entry->lock);
    bool live = enter_step(s);
    mp_mutex_unlock(&entry->lock);
    s->lease.cancelled = &entry->step_cancelled;
    uint64_t began_ns = mp_sys_now_ns();
    if (live) {
        for (int i = 0; i < s->plan.count; i++) {
            mp_ticket *ticket = s->plan.items[i]->ticket;
            if (!atomic_load_explicit(&ticket->started_ns, memory_order_relaxed))
                atomic_store_explicit(&ticket->started_ns, began_ns, memory_order_relaxed);
            s->outcomes[i] = MP_OUTCOME_MORE;
        }
        s->engine->ops->step(s->engine, &s->lease, &s->plan, s->outcomes);
    }
    mp_cores_return(services->cores, &s->lease);
    leave_step(s);
    if (!live)
        return;
    mp_count(services, MP_METRIC_steps, 1);
    mp_count(services, MP_METRIC_step_items, (uint64_t)s->plan.count);
    uint64_t took_ns = mp_sys_now_ns() - began_ns;
    s->virtual_ns += took_ns / (uint64_t)n;
    hand_out(s, took_ns);
}

/* Look, at most once a second, whether the files are still what was loaded. */
static bool is_healthy(serving *s) {
    uint64_t now = mp_sys_now_ns();
    if (now - s->healthy_ns < HEALTH_EVERY_NS)
        return true;
    s->healthy_ns = now;
    return s->resident->model->ops->healthy(s->resident->model);
}

static void run(serving *s, mp_error *fault) {
    while (take_work(s)) {
        if (!is_healthy(s)) {
            mp_fail(fault, MP_INTEGRITY, "%s: a file of the model was changed or cut short while it was in use",
                    s->entry->key);
            s->unhealthy = true;
            s->fresh_count = 0;
            end_all(s, fault);
            mp_mutex_lock(&s->entry->lock);
            mp_entry_set_state(s->entry, MP_ENTRY_EVICTING);
            mp_mutex_unlock(&s->entry->lock);
            set_runnable(s, false);
            return;
        }
        admit_fresh(s);
        step(s);
    }
}

/* --- the job --- */

/* Free engine and model. */
static void give_up_model(serving *s, const mp_error *fault) {
    mp_entry *entry = s->entry;
    mp_mutex_lock(&entry->lock);
    mp_resident *resident = entry->resident;
    entry->resident = NULL;
    mp_mutex_unlock(&entry->lock);
    s->engine->ops->destroy(s->engine);
    mp_resident_unpin(s->resident);
    mp_resident_unpin(resident);
    mp_count(s->services, MP_METRIC_evictions, 1);
    mp_log(MP_LOG_INFO, "Unloaded %s", entry->key);
    mp_ticket *list = NULL;
    mp_mutex_lock(&entry->lock);
    entry->evict = false;
    entry->unloads++;
    if (s->unhealthy) {
        mp_entry_set_failed(entry, fault);
        list = mp_entry_take_queue(entry);
    } else {
        mp_entry_set_state(entry, MP_ENTRY_COLD);
    }
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, list, fault);
}

void mp_entry_serve(void *arg) {
    mp_entry *entry = arg;
    mp_services *services = entry->services;
    serving s;
    mp_loader loader = {0};
    bool again;
    atomic_fetch_add_explicit(&services->resident, 1, memory_order_relaxed);
    do {
        mp_error fault;
        memset(&s, 0, sizeof(s));
        s.entry = entry;
        s.services = services;
        s.healthy_ns = mp_sys_now_ns();
        if (start(&s)) {
            run(&s, &fault);
            give_up_model(&s, &fault);
        }
        mp_mutex_lock(&entry->lock);
        /* Calls that wait saw a worker and rely on it: then the model is loaded again. */
        again = entry->queue.count && !entry->quit;
        if (!again) {
            entry->working = false;
            if (entry->remove && !entry->quit) {
                loader = entry->loader;
                entry->loader = (mp_loader){0};
            }
            mp_cond_broadcast(&entry->changed);
        }
        mp_mutex_unlock(&entry->lock);
    } while (again);
    atomic_fetch_sub_explicit(&services->resident, 1, memory_order_relaxed);
    if (loader.ops) {
        loader.ops->destroy(loader.self);
        services->event(services->registry, entry, MP_ENTRY_GONE);
    }
    mp_entry_unpin(entry);
}
