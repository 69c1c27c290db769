/* entry.c: the registry's side of an entry: create and free it, start workers, load, evict, remove, shut down, describe
 * it, and reset it in the child of a fork. entry.h describes all of an entry. */
#include "registry/entry.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/intervals.h"
#include "base/log.h"

/* --- life --- */

static void free_loader(mp_loader *loader) {
    if (loader->ops)
        loader->ops->destroy(loader->self);
    *loader = (mp_loader){0};
}

static _Atomic uint64_t created; /* entries of the process */

uint64_t mp_entry_newest(void) { return atomic_load_explicit(&created, memory_order_relaxed); }

mp_status mp_entry_create(mp_services *services, const char *key, const mp_loader *loader, mp_entry **entry_out,
                          mp_error *error) {
    *entry_out = NULL;
    mp_loader taken = *loader;
    mp_entry *entry = mp_alloc_zeroed(sizeof(*entry), MP_TAG_POOL);
    if (!entry) {
        free_loader(&taken);
        return mp_fail_memory(error, sizeof(*entry), "a registry entry");
    }
    mp_status status = mp_queue_create(&entry->queue, services->queue_capacity[taken.capability], error);
    if (status != MP_OK) {
        mp_free(entry);
        free_loader(&taken);
        return status;
    }
    entry->number = atomic_fetch_add_explicit(&created, 1, memory_order_relaxed) + 1;
    entry->services = mp_services_pin(services);
    entry->account = (mp_budget){.limit = UINT64_MAX, .above = mp_governor_budget(services->governor)};
    strncpy(entry->key, key, sizeof(entry->key) - 1);
    entry->capability = taken.capability;
    entry->policy = services->policy[taken.capability];
    if (taken.policy && !services->policy_chosen[taken.capability])
        mp_policy_from_name(taken.policy, &entry->policy);
    entry->keep_alive_ns = services->keep_alive_ns;
    entry->loader = taken;
    entry->revision = taken.revision;
    atomic_init(&entry->references, 1);
    mp_mutex_init(&entry->lock);
    mp_cond_init(&entry->changed);
    mp_cond_init(&entry->room);
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
    assert(!mp_entry_has_workers(entry) && entry->queue.count == 0 && entry->abandoned == 0 && !entry->borrowers);
    mp_resident_unpin(entry->resident);
    free_loader(&entry->loader);
    mp_queue_destroy(&entry->queue);
    mp_cond_deinit(&entry->room);
    mp_cond_deinit(&entry->changed);
    mp_mutex_deinit(&entry->lock);
    mp_services_unpin(entry->services);
    mp_free(entry);
}

mp_spin_rule mp_entry_spin_rule(mp_entry *entry) {
    return mp_cpu_allocator_spin_rule(entry->services->allocator_pinned, entry->services->spin_ns);
}

/* --- workers; under the lock --- */

bool mp_entry_serves(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        if (mp_worker_serves(entry->workers[i]) && !entry->workers[i]->leave)
            return true;
    return false;
}

/* Must hold the lock. True if no worker is about to start and all listed ones are leaving. */
static bool all_leave(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        if (!mp_worker_is_leaving(entry->workers[i]))
            return false;
    return !entry->starting;
}

int mp_entry_running(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    int running = 0;
    for (int i = 0; i < entry->worker_count; i++)
        running += entry->workers[i]->active_count;
    return running;
}

static void list_worker(mp_entry *entry, mp_worker *worker) {
    assert(entry->worker_count < MP_WORKERS_MAX);
    worker->number = entry->listed++;
    entry->workers[entry->worker_count++] = worker;
}

void mp_entry_unlist_worker(mp_entry *entry, mp_worker *worker) {
    mp_assert_held(&entry->lock);
    int at = 0;
    while (entry->workers[at] != worker)
        at++;
    entry->worker_count--;
    memmove(&entry->workers[at], &entry->workers[at + 1], (size_t)(entry->worker_count - at) * sizeof(worker));
}

void mp_entry_wake_workers(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        mp_worker_wake(entry->workers[i]);
}

void mp_entry_request_unload(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (entry->unload == MP_UNLOAD_NONE)
        mp_entry_set_unload(entry, MP_UNLOAD_REQUESTED);
}

bool mp_entry_begin(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (mp_entry_has_workers(entry) || !entry->loader.ops || !mp_faults_may_start(entry, mp_sys_now_ns()))
        return false;
    entry->starting++;
    return true;
}

/* Call when an announced worker cannot be started; `worker`: NULL if it could not be created. */
static void launch_failed(mp_entry *entry, mp_worker *worker, const mp_error *error) {
    mp_services *services = entry->services;
    mp_ticket *list = NULL;
    mp_mutex_lock(&entry->lock);
    if (!worker)
        entry->starting--;
    bool others = entry->worker_count > (worker != NULL) || entry->starting || entry->unload == MP_UNLOAD_RUNNING;
    mp_entry_scale_later(entry);
    mp_count(services, MP_METRIC_spawn_failures, 1); /* under the lock: before callers learn of the failure */
    if (worker) /* the worker stays listed until mp_entry_finalize: let it take no request */
        worker->leave = true;
    if (!others) {
        entry->attempts++;
        entry->attempts_over++;
        mp_faults_load_failed(entry, error);
        list = mp_entry_take_queue(entry);
    }
    mp_mutex_unlock(&entry->lock);
    mp_log(MP_LOG_WARNING, "A worker for %s failed to start: %s", entry->key, error->message);
    mp_entry_finish_list(entry, list, error);
    if (!others)
        services->event(services->registry, entry, MP_ENTRY_LOAD_FAILED);
    mp_entry_finalize(entry, worker);
}

void mp_entry_launch(mp_entry *entry, mp_guard guard) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    mp_worker *worker;
    mp_error error;
    mp_entry_pin(entry); /* keeps the entry alive until the worker has its own reference */
    if (mp_worker_create(entry, &worker, &error) != MP_OK) {
        mp_guard_release(&guard);
        launch_failed(entry, NULL, &error);
    } else {
        worker->guard = guard;
        mp_mutex_lock(&entry->lock);
        entry->starting--;
        list_worker(entry, worker);
        mp_mutex_unlock(&entry->lock);
        if (mp_pool_run(services->pool, (mp_job){mp_worker_run, worker}, &error) != MP_OK) {
            launch_failed(entry, worker, &error);
            mp_guard_release(&worker->guard);
            mp_worker_destroy(worker);
        }
    }
    mp_entry_unpin(entry);
}

/* --- load, evict, remove --- */

void mp_entry_start(mp_entry *entry) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    entry->load_requested = true;
    bool start = entry->shutdown == MP_SHUTDOWN_OPEN && entry->removal == MP_REMOVAL_NONE && mp_entry_begin(entry);
    mp_mutex_unlock(&entry->lock);
    if (start)
        mp_entry_launch(entry, (mp_guard){0});
}

void mp_entry_keep_alive(mp_entry *entry, uint64_t keep_alive_ns) {
    mp_assert_not_held(&entry->lock);
    mp_services *services = entry->services;
    mp_mutex_lock(&entry->lock);
    entry->keep_alive_ns = keep_alive_ns;
    mp_mutex_unlock(&entry->lock);
    mp_maintenance_at(&services->maintenance, services->pool, mp_sys_now_ns());
}

void mp_entry_pin_model(mp_entry *entry, bool pinned) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    entry->pinned = pinned;
    mp_mutex_unlock(&entry->lock);
}

bool mp_entry_in_use(mp_entry *entry) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    bool in_use = !all_leave(entry) || entry->queue.count || mp_entry_running(entry);
    mp_mutex_unlock(&entry->lock);
    return in_use;
}

static bool begin_after_failures(mp_entry *entry) {
    if (mp_entry_has_workers(entry))
        return false;
    mp_faults_forget_deaths(entry);
    return mp_entry_begin(entry);
}

/* Must hold the lock. Names the stage of the running load, for error messages. */
static const char *stage_of(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++) {
        const char *stage = atomic_load_explicit(&entry->workers[i]->progress.stage, memory_order_acquire);
        if (entry->workers[i]->state == MP_WORKER_LOADING && stage)
            return stage;
    }
    return "starting";
}

mp_status mp_entry_load(mp_entry *entry, bool pin, uint64_t deadline_ns, bool *gone, bool *over, mp_error *error) {
    mp_assert_not_held(&entry->lock);
    *gone = *over = false;
    uint64_t attempt = 0, loads = 0;
    bool in_time = true;
    mp_status status = MP_OK;
    mp_mutex_lock(&entry->lock);
    if (entry->faults.health == MP_HEALTH_BROKEN) /* other workers of a broken model may still serve */
        mp_faults_forget_deaths(entry);
    bool pinned = entry->pinned;
    entry->pinned |= pin; /* pin now: after the load, a short keep-alive may end before this thread wakes */
    for (;;) {
        entry->load_requested = true; /* in each round: the end of an eviction clears it */
        if (entry->shutdown != MP_SHUTDOWN_OPEN) {
            status = mp_fail(error, MP_SHUTTING_DOWN, "%s: the pool is shutting down", entry->key);
            break;
        }
        if ((mp_entry_serves(entry) && entry->unload == MP_UNLOAD_NONE) || (attempt && entry->loads > loads)) {
            *over = true;
            break;
        }
        if (attempt && entry->attempts_over >= attempt && entry->faults.retry_ns) {
            *over = true;
            status = entry->faults.failure.code;
            if (error)
                *error = entry->faults.failure;
            break;
        }
        if (entry->removal != MP_REMOVAL_NONE) {
            *gone = true;
            status = mp_fail(error, MP_UNKNOWN_MODEL, "%s: the model was removed", entry->key);
            break;
        }
        if (!in_time && attempt > entry->attempts && entry->unload != MP_UNLOAD_NONE) {
            status = mp_fail_hint(error, MP_TIMEOUT, "Load it again",
                                  "%s: the model was being evicted until the deadline, so its load has not begun",
                                  entry->key);
            break;
        }
        if (!in_time) {
            status = mp_fail_hint(error, MP_TIMEOUT, "Load it again to wait for it, or raise `timeout`",
                                  "%s: the load did not end before the deadline (stage: %s); it continues in the "
                                  "background", entry->key, stage_of(entry));
            break;
        }
        if (!attempt) {
            loads = entry->loads;
            /* Wait for the running attempt or, if none is running, for the next one: this call starts it, unless a
             * worker for queued requests starts first. */
            attempt = entry->attempts + (entry->attempts == entry->attempts_over);
        }
        if (begin_after_failures(entry)) {
            mp_mutex_unlock(&entry->lock);
            mp_entry_launch(entry, (mp_guard){0});
            mp_mutex_lock(&entry->lock);
            continue;
        }
        in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
    }
    if (pin)
        entry->pinned = status == MP_OK || (pinned && entry->pinned);
    mp_mutex_unlock(&entry->lock);
    return status;
}

void mp_entry_hold(mp_entry *entry, bool held) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    entry->held = held;
    mp_mutex_unlock(&entry->lock);
}

mp_status mp_entry_evict(mp_entry *entry, uint64_t deadline_ns, mp_error *error) {
    mp_assert_not_held(&entry->lock);
    bool in_time = true;
    mp_status status = MP_OK;
    mp_mutex_lock(&entry->lock);
    entry->pinned = false;
    mp_faults_forget_load(entry);
    uint64_t unloads = entry->unloads;
    bool works = mp_entry_has_workers(entry);
    if (works || entry->resident) {
        if (entry->unload == MP_UNLOAD_NONE || entry->unload == MP_UNLOAD_REQUESTED)
            mp_entry_set_unload(entry, MP_UNLOAD_CALLED);
        mp_entry_wake_workers(entry);
    }
    if (!works && entry->resident) {
        /* No worker is listed: the model waits for its backoff, or was loaded before a fork. Free it in this thread. */
        mp_mutex_unlock(&entry->lock);
        mp_entry_finalize(entry, NULL);
        mp_mutex_lock(&entry->lock);
    }
    while (mp_entry_has_workers(entry) && entry->unloads == unloads && in_time)
        in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
    if (mp_entry_has_workers(entry) && entry->unloads == unloads)
        status = mp_fail_hint(error, MP_TIMEOUT, "Unload it again to wait for it, or raise `timeout`",
                              "%s: the unload did not end before the deadline (active requests: %d); it continues in "
                              "the background", entry->key, mp_entry_running(entry));
    mp_mutex_unlock(&entry->lock);
    return status;
}

/* Must hold the lock. True if all workers wait for memory. They get it, or their requests fail, but they wait for other
 * models in use: if such a model waited for this one, two models could wait for each other. */
static bool is_blocked(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        if (!mp_worker_serves(entry->workers[i]) || entry->workers[i]->memory != MP_MEMORY_TIGHT)
            return false;
    return entry->worker_count > 0;
}

/* Must hold the lock. True if the registry itself may evict the model. `now`: all its workers are idle. Otherwise: none
 * of them has an active request, so they soon will be idle. */
static bool is_evictable(const mp_entry *entry, bool now) {
    mp_assert_held(&entry->lock);
    if (!entry->resident || entry->queue.count || entry->pinned || entry->held || entry->removal != MP_REMOVAL_NONE ||
        (now && (entry->starting || entry->unload != MP_UNLOAD_NONE)))
        return false;
    for (int i = 0; i < entry->worker_count; i++) {
        const mp_worker *worker = entry->workers[i];
        if (now ? !mp_worker_idles(worker) || worker->woken : worker->active_count > 0)
            return false;
    }
    return true;
}

/* Must hold the lock. */
static bool is_loading(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        if (entry->workers[i]->state == MP_WORKER_LOADING)
            return true;
    return false;
}

/* Must hold the lock. True if the worker holds caches and is idle, or soon will be, because its requests have ended. */
static bool may_trim(const mp_worker *worker) {
    mp_assert_held(&worker->entry->lock);
    return mp_worker_serves(worker) && !worker->active_count && !worker->leave && worker->memory < MP_MEMORY_TRIMMED;
}

/* Must hold the lock. True if the entry drains or closes: its model is freed once its requests have ended. */
static bool is_ending(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    return entry->removal != MP_REMOVAL_NONE || entry->shutdown != MP_SHUTDOWN_OPEN;
}

/* Must hold the lock. True if the model will be freed without a further call, even if it is pinned: an unload was
 * requested, the entry drains, or the last workers are leaving. */
static bool is_going(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool kept = entry->queue.count && entry->faults.health != MP_HEALTH_BROKEN &&
                entry->shutdown != MP_SHUTDOWN_QUITTING;
    if (mp_entry_must_unload(entry))
        return true;
    return !kept && !mp_entry_running(entry) && (is_ending(entry) || (entry->worker_count && all_leave(entry)));
}

void mp_entry_value(mp_entry *entry, mp_eviction *value) {
    *value = (mp_eviction){0};
    mp_mutex_lock(&entry->lock);
    mp_resident *resident = entry->resident ? mp_entry_borrow(entry) : NULL;
    bool soon = is_evictable(entry, false), idle = is_evictable(entry, true);
    bool going = is_going(entry);
    uint64_t bytes = 0, leaving = 0, newest_ns = 0, caches = 0, trimming = 0;
    for (int i = 0; i < entry->worker_count; i++) {
        const mp_worker *worker = entry->workers[i];
        *(mp_worker_is_leaving(worker) ? &leaving : &bytes) += worker->held_bytes;
        if (may_trim(worker))
            *(worker->memory == MP_MEMORY_ASKED ? &trimming : &caches) += worker->held_bytes;
        if (worker->idle_since_ns > newest_ns)
            newest_ns = worker->idle_since_ns;
    }
    bool asks = entry->queue.count || mp_entry_running(entry);
    bool used = !soon && !entry->pinned && !entry->held && asks &&
                (mp_entry_serves(entry) || (entry->faults.health != MP_HEALTH_BROKEN && !is_loading(entry)));
    bool blocked = used && is_blocked(entry), serves = mp_entry_serves(entry) && !is_blocked(entry);
    uint64_t charged = atomic_load_explicit(&entry->charged, memory_order_relaxed);
    bool ends = asks && (is_ending(entry) || (!entry->queue.count && all_leave(entry)));
    value->coming = leaving + (entry->unload == MP_UNLOAD_RUNNING ? entry->unload_bytes : 0);
    /* `held_bytes` lacks what engines have taken in the running steps */
    uint64_t taken = entry->abandoned ? 0 : atomic_load_explicit(&entry->account.used, memory_order_relaxed);
    mp_mutex_unlock(&entry->lock);
    if (resident)
        bytes += resident->model->ops->bytes(resident->model);
    /* a model that is still loading has no memory to free yet */
    bool comes = resident && (going || (soon && !idle));
    if (comes)
        value->coming += bytes + 1;
    else if (idle)
        value->bytes = bytes + 1;
    else if (resident && (used || ends))
        *(blocked && !ends ? &value->blocked : &value->busy) = (bytes > taken ? bytes : taken) + charged;
    else if (resident && serves && asks)
        value->busy = charged; /* the model stays, its requests end */
    if (resident && !comes) {
        value->idle_ns = mp_sys_now_ns() - newest_ns;
        value->load_ns = resident->load_ns;
        value->caches = caches;
        value->trimming = trimming;
    }
    if (!resident)
        return;
    mp_mutex_lock(&entry->lock);
    mp_entry_return(entry);
    mp_mutex_unlock(&entry->lock);
}

bool mp_entry_evict_idle(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    bool idle = is_evictable(entry, true), works = mp_entry_has_workers(entry);
    if (idle && works) {
        mp_entry_request_unload(entry);
        mp_entry_wake_workers(entry);
    }
    mp_mutex_unlock(&entry->lock);
    if (!idle)
        return false;
    mp_log(MP_LOG_INFO, "%s: evicted to make room for other models", entry->key);
    if (!works) /* no worker exists that would free the model when it leaves, for example after a fork */
        mp_entry_finalize(entry, NULL);
    return true;
}

uint64_t mp_entry_trim(mp_entry *entry) {
    uint64_t trimming = 0;
    mp_mutex_lock(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        if (!may_trim(worker) || worker->memory == MP_MEMORY_ASKED)
            continue;
        trimming += worker->held_bytes;
        worker->memory = MP_MEMORY_ASKED;
        mp_worker_wake(worker);
    }
    mp_mutex_unlock(&entry->lock);
    return trimming;
}

void mp_entry_remove(mp_entry *entry) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    if (entry->removal == MP_REMOVAL_NONE) /* already DRAINING if an earlier caller gave up waiting */
        mp_entry_set_removal(entry, MP_REMOVAL_DRAINING);
    bool works = mp_entry_has_workers(entry);
    if (works)
        mp_entry_wake_workers(entry);
    for (int i = 0; i < entry->worker_count && !entry->queue.count; i++)
        if (entry->workers[i]->state == MP_WORKER_SPAWNING || entry->workers[i]->state == MP_WORKER_LOADING)
            atomic_store_explicit(&entry->workers[i]->step_cancelled, 1, memory_order_release);
    mp_cond_broadcast(&entry->room);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
    if (!works)
        mp_entry_finalize(entry, NULL);
}

/* Must hold the lock. True while mp_entry_finalize has not freed everything. */
static bool is_pending(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool quit = entry->shutdown == MP_SHUTDOWN_QUITTING; /* the entry never becomes GONE */
    return mp_entry_has_workers(entry) || (!quit && entry->removal != MP_REMOVAL_GONE);
}

mp_status mp_entry_wait_gone(mp_entry *entry, uint64_t deadline_ns, mp_error *error) {
    mp_assert_not_held(&entry->lock);
    bool in_time = true;
    mp_status status = MP_OK;
    mp_mutex_lock(&entry->lock);
    while (is_pending(entry) && in_time) {
        if (mp_entry_has_workers(entry) || entry->queue.count) {
            in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
            continue;
        }
        mp_mutex_unlock(&entry->lock);
        mp_entry_remove(entry); /* the thread that should call this may be slow, or exist in a fork's parent only */
        mp_mutex_lock(&entry->lock);
    }
    if (is_pending(entry))
        status = mp_fail_hint(error, MP_TIMEOUT, "Raise `timeout`",
                              "%s: the removal did not end before the deadline (requests left: %d); it continues in "
                              "the background", entry->key, mp_entry_running(entry) + entry->queue.count);
    mp_mutex_unlock(&entry->lock);
    return status;
}

/* --- shutdown, in this order --- */

void mp_entry_close(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    if (entry->shutdown == MP_SHUTDOWN_OPEN) /* mp_registry_close calls this twice: again for late arrivals */
        mp_entry_set_shutdown(entry, MP_SHUTDOWN_CLOSED);
    mp_cond_broadcast(&entry->room);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
}

bool mp_entry_drain(mp_entry *entry, uint64_t deadline_ns) {
    bool in_time = true;
    mp_mutex_lock(&entry->lock);
    while ((entry->queue.count || mp_entry_running(entry)) && in_time)
        in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
    mp_mutex_unlock(&entry->lock);
    return in_time;
}

void mp_entry_quit(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    if (entry->shutdown != MP_SHUTDOWN_QUITTING)
        mp_entry_set_shutdown(entry, MP_SHUTDOWN_QUITTING);
    mp_ticket *list = mp_entry_take_queue(entry);
    for (mp_ticket *ticket = list; ticket; ticket = ticket->next)
        atomic_store_explicit(&ticket->cause, MP_SHUTTING_DOWN, memory_order_release);
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        for (int j = 0; j < worker->active_count; j++)
            mp_entry_cancel_locked(entry, worker->active[j], MP_SHUTTING_DOWN);
        atomic_store_explicit(&worker->step_cancelled, 1, memory_order_release);
        mp_worker_wake(worker);
    }
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, list, NULL);
}

/* Must hold the lock. Returns a worker that may be abandoned because its thread is inside a step, a load or a slice of
 * optional work, or NULL. */
static mp_worker *find_abandonable(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        if ((worker->in_step || worker->state == MP_WORKER_LOADING) && !worker->moving)
            return worker;
    }
    return NULL;
}

void mp_entry_join(mp_entry *entry, uint64_t deadline_ns) {
    mp_error error;
    mp_mutex_lock(&entry->lock);
    while (mp_entry_has_workers(entry)) {
        mp_worker *caught = mp_sys_now_ns() >= deadline_ns ? find_abandonable(entry) : NULL;
        if (caught) {
            mp_fail(&error, MP_SHUTTING_DOWN, "%s: worker %u did not end before the shutdown deadline", entry->key,
                    caught->id);
            mp_worker_abandon(caught, &error);
        } else { /* workers outside steps and loads leave soon */
            mp_cond_wait(&entry->changed, &entry->lock,
                         mp_sys_now_ns() < deadline_ns ? deadline_ns : mp_sys_now_ns() + 10 * MP_MS);
        }
    }
    mp_loader loader = {0};
    if (!entry->abandoned) { /* otherwise an abandoned thread may still use the loader: mp_entry_unpin frees it */
        loader = entry->loader;
        entry->loader = (mp_loader){0};
    }
    mp_resident *kept = entry->resident;
    entry->resident = NULL;
    while (entry->borrowers)
        mp_cond_wait(&entry->changed, &entry->lock, 0);
    mp_mutex_unlock(&entry->lock);
    mp_resident_unpin(kept);
    free_loader(&loader);
}

/* --- state for display --- */

/* Must hold the lock. Returns the value for mp_entry_info.state. */
static const char *state_of(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool serves = false, busy = false, loading = entry->starting > 0;
    bool leaving = false;
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker_state state = entry->workers[i]->state;
        /* count requests: `state` changes only some time after the last request ended */
        busy |= entry->workers[i]->active_count > 0;
        serves |= mp_worker_serves(entry->workers[i]) && !entry->workers[i]->leave;
        loading |= state == MP_WORKER_SPAWNING || state == MP_WORKER_LOADING;
        leaving |= state == MP_WORKER_EVICTING || (entry->resident && mp_worker_is_leaving(entry->workers[i]));
    }
    if (serves && mp_entry_must_unload(entry))
        return "evicting"; /* a caller of mp_entry_load waits for the next load */
    if (serves)
        return busy ? "busy" : "ready";
    if (loading)
        return "loading";
    if (entry->unload == MP_UNLOAD_RUNNING)
        return "evicting";
    if (entry->faults.health != MP_HEALTH_SOUND) /* also while the worker whose load failed is leaving */
        return "failed";
    return leaving ? "evicting" : "cold";
}

mp_resident *mp_entry_borrow(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    entry->borrowers++;
    return entry->resident;
}

void mp_entry_return(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    if (--entry->borrowers == 0)
        mp_cond_broadcast(&entry->changed);
}

void mp_entry_describe(mp_entry *entry, mp_entry_info *info) {
    mp_assert_not_held(&entry->lock);
    *info = (mp_entry_info){.capability = entry->capability, .policy = entry->policy};
    memcpy(info->key, entry->key, sizeof(info->key));
    mp_mutex_lock(&entry->lock);
    uint64_t now = mp_sys_now_ns(), newest_ns = 0;
    info->state = state_of(entry);
    info->breaker = mp_faults_breaker_name(entry);
    info->dead = entry->abandoned;
    info->queued = entry->queue.count;
    memcpy(info->waiting, entry->queue.counts, sizeof(info->waiting));
    memcpy(info->capacity, entry->queue.capacity, sizeof(info->capacity));
    for (int kind = 0; kind < MP_SERVICE_COUNT; kind++)
        info->full_ns[kind] = mp_queue_full_ns(&entry->queue, kind, now);
    info->running = mp_entry_running(entry);
    info->pinned = entry->pinned;
    info->accepted = entry->accepted;
    info->keep_alive_ns = entry->keep_alive_ns;
    info->latency = entry->latency;
    info->units_in = entry->units_in;
    info->units_out = entry->units_out;
    info->rows = atomic_load_explicit(&entry->rows, memory_order_relaxed);
    info->last_error = entry->last_error;
    for (int i = 0; i < entry->worker_count; i++) {
        const mp_worker *worker = entry->workers[i];
        bool serves = mp_worker_serves(worker) || worker->state == MP_WORKER_EVICTING;
        info->worker[info->worker_count++] = (mp_worker_info){
            .id = worker->id,
            .node = mp_cpu_allocator_node_number(entry->services->allocator_pinned, worker->home),
            .state = mp_worker_state_name(worker->state),
            .running = worker->active_count,
            .served = worker->served,
            .busy_ns = worker->step_ns,
            .idle_ns = mp_worker_idles(worker) ? now - worker->idle_since_ns : 0,
            .engine_bytes = serves ? worker->held_bytes : 0,
            .predicted_bytes = worker->engine_bytes,
            .process = serves ? worker->process : 0,
        };
        info->workers += serves;
        info->busy += worker->active_count > 0;
        info->engine_bytes += serves ? worker->held_bytes : 0;
        if (worker->idle_since_ns > newest_ns)
            newest_ns = worker->idle_since_ns;
    }
    if (entry->services->predictive_scaling)
        info->arrivals = mp_forecast_rate(&entry->forecast, now);
    info->predicted = mp_dispatch_predicted(entry, now);
    info->idle_ns = info->workers && !info->busy ? now - newest_ns : 0;
    mp_resident *resident = entry->resident ? mp_entry_borrow(entry) : NULL;
    mp_mutex_unlock(&entry->lock);
    info->errors = atomic_load_explicit(&entry->errors, memory_order_relaxed);
    info->model = resident ? resident->model : NULL;
    info->model_bytes = resident ? resident->model->ops->bytes(resident->model) : 0;
    info->predicted_bytes = resident ? resident->predicted_bytes : 0;
    info->load_ns = resident ? resident->load_ns : 0;
}
