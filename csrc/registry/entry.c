/* entry.c: see entry.h. The caller's and the registry's side; serve.c is the worker's. */
#include "registry/entry.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"

static const uint64_t MS = 1000 * 1000;
static const uint64_t NEVER = UINT64_MAX;
static const uint64_t ROOM_SLICE_MS = 50;
static const uint64_t BACKOFF_FIRST_MS = 100, BACKOFF_MOST_MS = 10000;

/* --- life --- */

static void free_loader(mp_loader *loader) {
    if (loader->ops)
        loader->ops->destroy(loader->self);
    *loader = (mp_loader){0};
}

mp_status mp_entry_create(mp_services *services, const char *key, const mp_loader *loader, int queue_capacity,
                          mp_entry **entry_out, mp_error *error) {
    *entry_out = NULL;
    mp_loader taken = *loader;
    mp_entry *entry = mp_alloc_zeroed(sizeof(*entry), MP_TAG_POOL);
    if (!entry) {
        free_loader(&taken);
        return mp_fail_memory(error, sizeof(*entry), "an entry of the registry");
    }
    entry->services = mp_services_pin(services);
    strncpy(entry->key, key, sizeof(entry->key) - 1);
    entry->capability = taken.capability;
    entry->loader = taken;
    atomic_init(&entry->references, 1);
    mp_mutex_init(&entry->lock);
    mp_cond_init(&entry->changed);
    mp_cond_init(&entry->room);
    mp_bell_init(&entry->bell);
    mp_queue_init(&entry->queue, queue_capacity);
    *entry_out = entry;
    return MP_OK;
}

mp_entry *mp_entry_pin(mp_entry *entry) {
    atomic_fetch_add_explicit(&entry->references, 1, memory_order_relaxed);
    return entry;
}

void mp_entry_unpin(mp_entry *entry) {
    if (!entry || atomic_fetch_sub_explicit(&entry->references, 1, memory_order_acq_rel) != 1)
        return;
    assert(!entry->working && entry->queue.count == 0 && entry->active_count == 0);
    mp_resident_unpin(entry->resident);
    free_loader(&entry->loader);
    mp_bell_deinit(&entry->bell);
    mp_cond_deinit(&entry->room);
    mp_cond_deinit(&entry->changed);
    mp_mutex_deinit(&entry->lock);
    mp_services_unpin(entry->services);
    mp_free(entry);
}

mp_resident *mp_resident_pin(mp_resident *resident) {
    atomic_fetch_add_explicit(&resident->references, 1, memory_order_relaxed);
    return resident;
}

void mp_resident_unpin(mp_resident *resident) {
    if (!resident || atomic_fetch_sub_explicit(&resident->references, 1, memory_order_acq_rel) != 1)
        return;
    resident->model->ops->destroy(resident->model);
    mp_free(resident);
}

mp_spin_rule mp_entry_spin_rule(mp_entry *entry) {
    return mp_cores_spin_rule(entry->services->cores_seen, entry->services->spin_ns);
}

const char *mp_entry_stage(const mp_entry *entry) {
    const char *stage = atomic_load_explicit(&entry->progress.stage, memory_order_acquire);
    return stage ? stage : "starting";
}

/* --- state; under the lock --- */

void mp_entry_set_state(mp_entry *entry, mp_entry_state state) {
    static const uint8_t legal[] = {
        [MP_ENTRY_COLD] = 1 << MP_ENTRY_LOADING,
        [MP_ENTRY_LOADING] = 1 << MP_ENTRY_READY | 1 << MP_ENTRY_FAILED,
        [MP_ENTRY_READY] = 1 << MP_ENTRY_BUSY | 1 << MP_ENTRY_EVICTING,
        [MP_ENTRY_BUSY] = 1 << MP_ENTRY_READY | 1 << MP_ENTRY_EVICTING,
        [MP_ENTRY_EVICTING] = 1 << MP_ENTRY_COLD | 1 << MP_ENTRY_FAILED,
        [MP_ENTRY_FAILED] = 1 << MP_ENTRY_LOADING | 1 << MP_ENTRY_COLD,
    };
    assert(legal[entry->state] >> state & 1);
    (void)legal;
    if (state == MP_ENTRY_READY)
        entry->idle_since_ns = mp_sys_now_ns();
    entry->state = state;
    mp_cond_broadcast(&entry->changed); /* costs nothing when nobody waits */
}

void mp_entry_set_failed(mp_entry *entry, const mp_error *error) {
    entry->failure = *error;
    entry->backoff_ns = entry->backoff_ns ? entry->backoff_ns * 2 : BACKOFF_FIRST_MS * MS;
    if (entry->backoff_ns > BACKOFF_MOST_MS * MS)
        entry->backoff_ns = BACKOFF_MOST_MS * MS;
    entry->retry_ns = mp_sys_now_ns() + entry->backoff_ns;
    mp_entry_set_state(entry, MP_ENTRY_FAILED);
}

void mp_entry_tell_room(mp_entry *entry) {
    if (entry->room_waiters && !mp_queue_full(&entry->queue))
        mp_cond_broadcast(&entry->room);
}

mp_ticket *mp_entry_take_queue(mp_entry *entry) {
    mp_ticket *first = NULL, **end = &first;
    for (mp_queue_node *node; (node = mp_queue_pop(&entry->queue));) {
        *end = mp_ticket_of_node(node);
        end = &(*end)->next;
    }
    *end = NULL;
    mp_entry_tell_room(entry);
    mp_cond_broadcast(&entry->changed);
    return first;
}

/* --- ends --- */

static void uncharge(mp_entry *entry, mp_ticket *ticket) {
    if (ticket->charged)
        mp_budget_give(mp_governor_budget(entry->services->governor), ticket->charged);
    ticket->charged = 0;
}

void mp_entry_finish(mp_entry *entry, mp_ticket *ticket, mp_status status, const mp_error *error) {
    mp_count_end(entry->services, status);
    if (status != MP_OK && status != MP_TIMEOUT && status != MP_CANCELLED)
        atomic_fetch_add_explicit(&entry->errors, 1, memory_order_relaxed);
    uncharge(entry, ticket);
    if (ticket->item.abandon) { /* preempted, and not admitted again */
        ticket->item.abandon(&ticket->item);
        ticket->item.abandon = NULL;
    }
    mp_ticket_finish(ticket, status, error);
}

void mp_entry_finish_list(mp_entry *entry, mp_ticket *list, const mp_error *error) {
    while (list) {
        mp_ticket *next = list->next;
        mp_error own;
        mp_status status = error ? error->code : mp_ticket_cause(list, &own);
        mp_entry_finish(entry, list, status, error ? error : &own);
        list = next;
    }
}

/* --- starting the worker --- */

/* Under the lock. True: the caller calls launch after releasing it. */
static bool begin_work(mp_entry *entry) {
    if (entry->working)
        return false;
    entry->working = true;
    return true;
}

static void launch(mp_entry *entry) {
    mp_services *services = entry->services;
    mp_error error;
    mp_entry_pin(entry); /* the worker's */
    if (mp_pool_run(services->pool, (mp_job){mp_entry_serve, entry}, &error) == MP_OK) {
        mp_maintenance_at(&services->maintenance, services->pool, mp_sys_now_ns() + services->load_timeout_ns);
        return;
    }
    mp_mutex_lock(&entry->lock);
    entry->working = false;
    entry->evict = false; /* there is nothing to evict, and the next load is not to be thrown away */
    entry->attempts++;
    entry->attempts_over++;
    mp_entry_set_state(entry, MP_ENTRY_LOADING);
    mp_entry_set_failed(entry, &error);
    mp_ticket *list = mp_entry_take_queue(entry);
    mp_mutex_unlock(&entry->lock);
    mp_count(services, MP_METRIC_load_failures, 1);
    mp_entry_finish_list(entry, list, &error);
    services->event(services->registry, entry, MP_ENTRY_LOAD_FAILED);
    mp_entry_unpin(entry);
}

/* --- submit --- */

/* Charge what the call holds by now. */
static mp_status charge(mp_entry *entry, mp_ticket *ticket, mp_error *error) {
    uint64_t bytes = ticket->item.call->bytes;
    if (bytes <= ticket->charged)
        return MP_OK;
    mp_budget *budget = mp_governor_budget(entry->services->governor);
    if (!mp_budget_take(budget, bytes - ticket->charged)) {
        uint64_t limit = atomic_load(&budget->limit), used = atomic_load(&budget->used);
        return mp_fail(error, MP_MEMORY_EXHAUSTED, "%s: the call needs %.1f MB, %.1f MB of %.1f MB are free",
                       entry->key, (double)bytes / 1e6, (double)(used < limit ? limit - used : 0) / 1e6,
                       (double)limit / 1e6);
    }
    ticket->charged = bytes;
    return MP_OK;
}

mp_status mp_entry_check(mp_entry *entry, mp_resident *resident, mp_ticket *ticket, mp_error *error) {
    if (ticket->load == resident->load)
        return MP_OK;
    uint32_t total = 0;
    uint64_t cost_ns = 0;
    MP_TRY(resident->model->ops->check(resident->model, ticket->item.call, &cost_ns, &total, error));
    MP_TRY(charge(entry, ticket, error));
    ticket->item.cost_ns = cost_ns;
    ticket->item.total = total;
    ticket->load = resident->load;
    return MP_OK;
}

/* Under the lock: why the entry takes no calls now, or MP_OK. */
static mp_status refusal(mp_entry *entry, bool *gone, mp_error *error) {
    if (entry->closed)
        return mp_fail(error, MP_SHUTTING_DOWN, "%s: the pool is shutting down", entry->key);
    if (entry->remove) {
        *gone = true;
        return mp_fail(error, MP_UNKNOWN_MODEL, "%s was removed", entry->key);
    }
    bool resting = entry->state == MP_ENTRY_FAILED && mp_sys_now_ns() < entry->retry_ns;
    if (resting || entry->stalled) {
        *error = entry->failure;
        return error->code;
    }
    return MP_OK;
}

/* Under the lock, which is given up meanwhile: wait for room in the queue. */
static mp_status wait_for_room(mp_entry *entry, const mp_submit_options *options, mp_error *error) {
    int waiting = entry->queue.count;
    if (options->fail_fast)
        return mp_fail(error, MP_OVERLOADED, "%s: the queue is full, %d calls wait; try again when some are answered",
                       entry->key, waiting);
    uint64_t now = mp_sys_now_ns(), slice = now + ROOM_SLICE_MS * MS;
    if (options->deadline_ns && now >= options->deadline_ns)
        return mp_fail(error, MP_TIMEOUT, "%s: the queue was full until the deadline, %d calls wait", entry->key,
                       waiting);
    if (options->deadline_ns && options->deadline_ns < slice)
        slice = options->deadline_ns;
    entry->room_waiters++;
    mp_cond_wait(&entry->room, &entry->lock, slice);
    entry->room_waiters--;
    if (!options->give_up || !mp_queue_full(&entry->queue))
        return MP_OK;
    mp_mutex_unlock(&entry->lock);
    bool give_up = options->give_up(options->give_up_arg);
    mp_mutex_lock(&entry->lock);
    return give_up ? mp_fail(error, MP_CANCELLED, "%s: the call was given up while the queue was full", entry->key)
                   : MP_OK;
}

mp_status mp_entry_submit(mp_entry *entry, mp_ticket *ticket, const mp_submit_options *options, bool *gone,
                          mp_error *error) {
    mp_services *services = entry->services;
    bool wake = false, start = false;
    *gone = false;
    mp_status status = charge(entry, ticket, error);
    mp_mutex_lock(&entry->lock);
    while (status == MP_OK && (status = refusal(entry, gone, error)) == MP_OK) {
        if (options->deadline_ns && mp_sys_now_ns() >= options->deadline_ns && !mp_queue_full(&entry->queue)) {
            status = mp_fail(error, MP_TIMEOUT, "%s: the deadline had passed before the call was queued", entry->key);
            break;
        }
        if (entry->resident && entry->resident->load != ticket->load) {
            /* The caller's mistakes are told at once, and its thread does the allocation. */
            mp_resident *resident = mp_resident_pin(entry->resident);
            mp_mutex_unlock(&entry->lock);
            status = mp_entry_check(entry, resident, ticket, error);
            mp_resident_unpin(resident);
            mp_mutex_lock(&entry->lock);
            continue;
        }
        if (mp_queue_push(&entry->queue, &ticket->node, ticket->item.priority) == MP_QUEUE_TAKEN) {
            ticket->item.sequence = ++entry->calls;
            start = begin_work(entry);
            wake = mp_bell_ring(&entry->bell);
            break;
        }
        status = wait_for_room(entry, options, error);
    }
    /* From here on the ticket may be answered at any moment; the caller's reference keeps it. */
    uint64_t deadline_ns = ticket->item.deadline_ns;
    mp_mutex_unlock(&entry->lock);
    if (status != MP_OK) {
        uncharge(entry, ticket);
        ticket->load = 0;
        return status;
    }
    if (wake)
        mp_bell_wake(&entry->bell);
    if (start)
        launch(entry);
    if (deadline_ns)
        mp_maintenance_at(&services->maintenance, services->pool, deadline_ns);
    return MP_OK;
}

/* --- cancel, position, sweep --- */

/* Under the lock, for one in the queue or active. True: taken off the queue, the caller finishes it. */
static bool cancel_locked(mp_entry *entry, mp_ticket *ticket, mp_status cause) {
    int none = 0;
    bool first = atomic_compare_exchange_strong_explicit(&ticket->cause, &none, cause, memory_order_acq_rel,
                                                         memory_order_acquire);
    atomic_store_explicit(&ticket->item.cancelled, 1, memory_order_release);
    if (mp_queue_holds(&ticket->node)) {
        mp_queue_remove(&entry->queue, &ticket->node);
        mp_entry_tell_room(entry);
        mp_cond_broadcast(&entry->changed);
        return true;
    }
    if (first && ticket->in_step && --entry->step_live == 0)
        atomic_store_explicit(&entry->step_cancelled, 1, memory_order_release);
    return false;
}

void mp_entry_cancel(mp_entry *entry, mp_ticket *ticket, mp_status cause) {
    mp_mutex_lock(&entry->lock);
    bool mine = (mp_queue_holds(&ticket->node) || ticket->active) && cancel_locked(entry, ticket, cause);
    mp_mutex_unlock(&entry->lock);
    if (!mine)
        return;
    mp_error error;
    mp_status status = mp_ticket_cause(ticket, &error);
    mp_entry_finish(entry, ticket, status, &error);
}

int mp_entry_position(mp_entry *entry, mp_ticket *ticket) {
    mp_mutex_lock(&entry->lock);
    int position = mp_queue_holds(&ticket->node) ? mp_queue_position(&entry->queue, &ticket->node) : -1;
    mp_mutex_unlock(&entry->lock);
    return position;
}

/* Under the lock. Returns when the load is to be looked at again; *stalled_queue: who waited for a load that stalls. */
static uint64_t watch_load(mp_entry *entry, uint64_t now_ns, mp_ticket **stalled_queue) {
    if (entry->state != MP_ENTRY_LOADING || entry->stalled)
        return NEVER;
    uint64_t timeout = entry->services->load_timeout_ns;
    uint64_t beat = atomic_load_explicit(&entry->progress.beat_ns, memory_order_acquire);
    uint64_t due = (beat ? beat : now_ns) + timeout; /* 0: it waits for others, which is no fault of its own */
    if (due > now_ns)
        return due;
    mp_fail(&entry->failure, MP_SPAWN_TIMEOUT, "%s: loading made no progress for %.1f s (stage: %s)", entry->key,
            (double)timeout * 1e-9, mp_entry_stage(entry));
    entry->stalled = true;
    atomic_store_explicit(&entry->step_cancelled, 1, memory_order_release);
    *stalled_queue = mp_entry_take_queue(entry);
    return NEVER;
}

uint64_t mp_entry_sweep(mp_entry *entry, uint64_t now_ns) {
    uint64_t next = NEVER;
    mp_ticket *expired = NULL, *stalled = NULL;
    mp_error failure;
    mp_mutex_lock(&entry->lock);
    for (mp_queue_node *node = mp_queue_first(&entry->queue), *behind; node; node = behind) {
        behind = mp_queue_next(&entry->queue, node);
        mp_ticket *ticket = mp_ticket_of_node(node);
        uint64_t deadline = ticket->item.deadline_ns;
        if (deadline && deadline <= now_ns) {
            cancel_locked(entry, ticket, MP_TIMEOUT);
            ticket->next = expired;
            expired = ticket;
        } else if (deadline && deadline < next) {
            next = deadline;
        }
    }
    for (int i = 0; i < entry->active_count; i++) {
        uint64_t deadline = entry->active[i]->item.deadline_ns;
        if (deadline && deadline <= now_ns)
            cancel_locked(entry, entry->active[i], MP_TIMEOUT);
        else if (deadline && deadline < next)
            next = deadline;
    }
    uint64_t load_due = watch_load(entry, now_ns, &stalled);
    failure = entry->failure;
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, expired, NULL);
    mp_entry_finish_list(entry, stalled, &failure);
    return load_due < next ? load_due : next;
}

/* --- load, evict, remove --- */

void mp_entry_start(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    bool start = !entry->closed && !entry->remove && begin_work(entry);
    mp_mutex_unlock(&entry->lock);
    if (start)
        launch(entry);
}

bool mp_entry_in_use(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    bool in_use = (entry->state != MP_ENTRY_COLD && entry->state != MP_ENTRY_FAILED) || entry->queue.count;
    mp_mutex_unlock(&entry->lock);
    return in_use;
}

mp_status mp_entry_load(mp_entry *entry, bool pin, uint64_t deadline_ns, mp_error *error) {
    uint64_t attempt = 0, loads = 0;
    bool in_time = true;
    mp_status status = MP_OK;
    mp_mutex_lock(&entry->lock);
    for (;;) {
        if (entry->closed) {
            status = mp_fail(error, MP_SHUTTING_DOWN, "%s: the pool is shutting down", entry->key);
            break;
        }
        if (entry->state == MP_ENTRY_READY || entry->state == MP_ENTRY_BUSY || (attempt && entry->loads > loads))
            break;
        if (entry->stalled || (attempt && entry->attempts_over >= attempt && entry->state == MP_ENTRY_FAILED)) {
            status = entry->failure.code;
            if (error)
                *error = entry->failure;
            break;
        }
        if (entry->remove) {
            status = mp_fail(error, MP_UNKNOWN_MODEL, "%s was removed", entry->key);
            break;
        }
        if (!in_time) {
            status = mp_fail(error, MP_TIMEOUT, "%s: not loaded in time (stage: %s); loading goes on", entry->key,
                             mp_entry_stage(entry));
            break;
        }
        if (!attempt) {
            bool start = begin_work(entry);
            loads = entry->loads;
            /* Either the attempt that runs, or the one that this call (or, after an eviction, the next) makes. */
            attempt = entry->attempts + (entry->state != MP_ENTRY_LOADING);
            if (start) {
                mp_mutex_unlock(&entry->lock);
                launch(entry);
                mp_mutex_lock(&entry->lock);
                continue;
            }
        } else if (!entry->working && begin_work(entry)) {
            /* It was evicted, or another's attempt was called off. */
            mp_mutex_unlock(&entry->lock);
            launch(entry);
            mp_mutex_lock(&entry->lock);
            continue;
        }
        in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
    }
    if (status == MP_OK && pin)
        entry->pinned = true;
    mp_mutex_unlock(&entry->lock);
    return status;
}

mp_status mp_entry_evict(mp_entry *entry, uint64_t deadline_ns, mp_error *error) {
    bool in_time = true, wake = false;
    mp_status status = MP_OK;
    mp_resident *kept = NULL;
    mp_mutex_lock(&entry->lock);
    entry->pinned = false;
    if (entry->working) {
        uint64_t unloads = entry->unloads;
        entry->evict = true;
        wake = mp_bell_ring(&entry->bell);
        if (wake)
            mp_bell_wake(&entry->bell);
        while (entry->working && entry->unloads == unloads && in_time)
            in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
        if (entry->working && entry->unloads == unloads)
            status = mp_fail(error, MP_TIMEOUT, "%s: still in use by %d calls; unloading goes on", entry->key,
                             entry->active_count);
    } else {
        /* Failed and at rest, or loaded before a fork: nobody works, so it is done here. */
        kept = entry->resident;
        entry->resident = NULL;
        if (entry->state == MP_ENTRY_FAILED)
            mp_entry_set_state(entry, MP_ENTRY_COLD);
    }
    mp_mutex_unlock(&entry->lock);
    mp_resident_unpin(kept);
    return status;
}

void mp_entry_remove(mp_entry *entry) {
    mp_loader loader = {0};
    mp_resident *kept = NULL;
    bool wake = false;
    mp_mutex_lock(&entry->lock);
    entry->remove = true;
    if (entry->working) {
        wake = mp_bell_ring(&entry->bell);
    } else {
        loader = entry->loader;
        entry->loader = (mp_loader){0};
        kept = entry->resident;
        entry->resident = NULL;
    }
    mp_cond_broadcast(&entry->room);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
    if (wake)
        mp_bell_wake(&entry->bell);
    if (!loader.ops)
        return;
    mp_resident_unpin(kept);
    free_loader(&loader);
    entry->services->event(entry->services->registry, entry, MP_ENTRY_GONE);
}

mp_status mp_entry_wait_gone(mp_entry *entry, uint64_t deadline_ns, mp_error *error) {
    bool in_time = true;
    mp_status status = MP_OK;
    mp_mutex_lock(&entry->lock);
    while (entry->working && in_time)
        in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
    if (entry->working)
        status = mp_fail(error, MP_TIMEOUT, "%s: still in use by %d calls; removing goes on", entry->key,
                         entry->active_count + entry->queue.count);
    mp_mutex_unlock(&entry->lock);
    return status;
}

/* --- shutdown, in this order --- */

void mp_entry_close(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    entry->closed = true;
    mp_queue_close(&entry->queue);
    mp_cond_broadcast(&entry->room);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
}

bool mp_entry_drain(mp_entry *entry, uint64_t deadline_ns) {
    bool in_time = true;
    mp_mutex_lock(&entry->lock);
    while ((entry->queue.count || entry->active_count) && in_time)
        in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
    mp_mutex_unlock(&entry->lock);
    return in_time;
}

void mp_entry_quit(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    entry->quit = true;
    mp_ticket *list = mp_entry_take_queue(entry);
    for (mp_ticket *ticket = list; ticket; ticket = ticket->next)
        atomic_store_explicit(&ticket->cause, MP_SHUTTING_DOWN, memory_order_release);
    for (int i = 0; i < entry->active_count; i++)
        cancel_locked(entry, entry->active[i], MP_SHUTTING_DOWN);
    atomic_store_explicit(&entry->step_cancelled, 1, memory_order_release);
    bool wake = mp_bell_ring(&entry->bell);
    mp_mutex_unlock(&entry->lock);
    if (wake)
        mp_bell_wake(&entry->bell);
    mp_entry_finish_list(entry, list, NULL);
}

void mp_entry_join(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    /* NOTE: a load or a step that never polls its lease is waited for here; setting such a worker apart is next. */
    while (entry->working)
        mp_cond_wait(&entry->changed, &entry->lock, 0);
    mp_loader loader = entry->loader;
    entry->loader = (mp_loader){0};
    mp_resident *kept = entry->resident;
    entry->resident = NULL;
    mp_mutex_unlock(&entry->lock);
    mp_resident_unpin(kept);
    free_loader(&loader);
}

/* --- what the registry shows --- */

void mp_entry_describe(mp_entry *entry, mp_entry_info *info, mp_resident **pinned) {
    static const char *const names[] = {
        [MP_ENTRY_COLD] = "cold", [MP_ENTRY_LOADING] = "loading",   [MP_ENTRY_READY] = "ready",
        [MP_ENTRY_BUSY] = "busy", [MP_ENTRY_EVICTING] = "evicting", [MP_ENTRY_FAILED] = "failed",
    };
    *info = (mp_entry_info){.capability = entry->capability};
    memcpy(info->key, entry->key, sizeof(info->key));
    mp_mutex_lock(&entry->lock);
    bool serving = entry->state == MP_ENTRY_READY || entry->state == MP_ENTRY_BUSY || entry->state == MP_ENTRY_EVICTING;
    info->state = names[entry->state];
    info->workers = serving;
    info->queued = entry->queue.count;
    info->running = entry->active_count;
    info->pinned = entry->pinned;
    info->engine_bytes = serving ? entry->engine_bytes : 0;
    info->calls = entry->calls;
    info->idle_ns = entry->state == MP_ENTRY_READY ? mp_sys_now_ns() - entry->idle_since_ns : 0;
    *pinned = entry->resident ? mp_resident_pin(entry->resident) : NULL;
    mp_mutex_unlock(&entry->lock);
    info->errors = atomic_load_explicit(&entry->errors, memory_order_relaxed);
    info->model = *pinned ? (*pinned)->model : NULL;
    info->model_bytes = *pinned ? (*pinned)->model->ops->bytes((*pinned)->model) : 0;
}

/* --- fork --- */

void mp_entry_fork_child(mp_entry *entry) {
    mp_budget *budget = mp_governor_budget(entry->services->governor);
    mp_mutex_init(&entry->lock);
    mp_cond_init(&entry->changed);
    mp_cond_init(&entry->room);
    mp_bell_init(&entry->bell);
    for (mp_queue_node *node; (node = mp_queue_pop(&entry->queue));)
        mp_budget_give(budget, mp_ticket_of_node(node)->charged);
    for (int i = 0; i < entry->active_count; i++)
        mp_budget_give(budget, entry->active[i]->charged);
    entry->active_count = entry->room_waiters = entry->step_live = 0;
    /* The parent's engine may have been in the middle of a step: its memory is left alone, a new one is made over the
     * same model. A load in progress is the parent's. */
    entry->working = entry->evict = entry->stalled = false;
    entry->attempts_over = entry->attempts;
    if (entry->state != MP_ENTRY_FAILED)
        entry->state = MP_ENTRY_COLD;
}
