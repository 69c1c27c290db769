/* load.c: the load of a model: the calls that ask and wait for it, and a worker's way from SPAWNING to READY. See
 * entry.h.
 *
 * A cold model gets two workers if the governor grants memory for two, else one. Only further workers (dispatch.c) need
 * a compute thread each: if one of the two fails, the other serves while a backoff delays new workers. The thread of
 * the first worker reserves memory for both, loads the model, creates its own engine and passes the second worker the
 * guard for that worker's engine. If the second worker cannot start, the first serves alone. Workers started later
 * (dispatch.c) get a guard too. */
#include <stdatomic.h>

#include "base/log.h"
#include "registry/chaos.h"
#include "registry/entry.h"
#include "registry/events.h"

/* --- callers --- */

void mp_entry_start(mp_entry *entry) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    entry->load_requested = true;
    bool start = entry->shutdown == MP_SHUTDOWN_OPEN && entry->removal == MP_REMOVAL_NONE && mp_entry_begin(entry);
    mp_mutex_unlock(&entry->lock);
    if (start)
        mp_entry_launch(entry, (mp_guard){0});
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

/* --- the worker's thread --- */

/* The load waits for memory: ends the requests that do not wait for it. Returns true if the load is to be cancelled:
 * the registry shuts down, the model was removed, or the requests for which it was to be loaded have ended. */
static bool is_called_off(void *arg) {
    mp_worker *worker = arg;
    mp_entry *entry = worker->entry;
    mp_error error;
    bool stuck = mp_governor_stuck(entry->services->governor);
    mp_mutex_lock(&entry->lock);
    entry->load_stuck = stuck;
    mp_ticket *refused = stuck ? mp_entry_take_queue(entry, true) : NULL;
    worker->unwanted = !entry->queue.count && (!entry->load_requested || entry->removal != MP_REMOVAL_NONE);
    mp_mutex_unlock(&entry->lock);
    mp_entry_fail_held(entry, MP_NEED_OF_LOAD, &error);
    mp_entry_finish_list(entry, refused, &error);
    return worker->unwanted || atomic_load_explicit(&worker->step_cancelled, memory_order_acquire) != 0;
}

/* Sets a stage in which the load waits for other threads. The sweep does not time such a stage (`beat_ns` 0). */
static void stage_untimed(mp_worker *worker, const char *stage) {
    atomic_store_explicit(&worker->progress.stage, stage, memory_order_release);
    atomic_store_explicit(&worker->progress.beat_ns, 0, memory_order_release);
}

/* Reserves the memory of a load; see mp_governor_reserve. */
static mp_status loading_reserve(mp_worker *worker, uint64_t needed, uint64_t wanted, bool urgent, mp_guard *guard,
                                 mp_error *error) {
    mp_entry *entry = worker->entry;
    stage_untimed(worker, "waiting for memory");
    mp_status status = mp_governor_reserve(entry->services->governor, entry->key, needed, wanted, urgent, is_called_off,
                                           worker, guard, error);
    mp_mutex_lock(&entry->lock);
    entry->load_stuck = false;
    mp_mutex_unlock(&entry->lock);
    return status;
}

static mp_status load_model(mp_worker *worker, mp_loader loader, uint64_t model_bytes, mp_guard *second,
                            mp_error *error) {
    mp_entry *entry = worker->entry;
    mp_services *services = entry->services;
    mp_model *model = NULL;
    mp_guard guard;
    uint64_t one = model_bytes + worker->engine_bytes, two = one + worker->engine_bytes;

    MP_TRY(loading_reserve(worker, one, services->max_workers > 1 ? two : one, false, &guard, error));
    if (guard.bytes == two && services->max_workers > 1)
        *second = mp_guard_split(&guard, worker->engine_bytes);
    mp_guard_lend(&guard, &entry->account);
    mp_resident *resident = mp_alloc_zeroed(sizeof(*resident), MP_TAG_POOL);
    if (!resident) {
        mp_guard_release(&guard);
        return mp_fail_memory(error, sizeof(*resident), "a loaded model");
    }
    /* A load holds its compute threads until it ends. If other workers exist, leave them half of the threads. */
    int threads = mp_cpu_allocator_threads(services->allocator_pinned);
    if (atomic_load_explicit(&services->active_workers, memory_order_relaxed) > 1)
        threads = (threads + 1) / 2;
    stage_untimed(worker, "waiting for a CPU");
    if (!mp_worker_lease(worker, threads)) {
        mp_free(resident);
        mp_guard_release(&guard);
        return mp_fail(error, MP_CANCELLED, "%s: the load was cancelled while it waited for a CPU", entry->key);
    }
    mp_progress_set(&worker->progress, "loading", 0);
    uint64_t began_ns = mp_sys_now_ns();
    mp_status status = loader.ops->load(loader.self, &worker->lease, &entry->account, &worker->progress, &model,
                                         error);
    mp_worker_return_threads(worker);
    mp_mutex_lock(&entry->lock);
    worker->moving = false; /* from here on the load holds no compute threads and is watched */
    mp_mutex_unlock(&entry->lock);
    worker->guard = guard;
    if (status != MP_OK) {
        mp_free(resident);
        return status;
    }
    static _Atomic uint64_t number;
    resident->model = model;
    resident->load = atomic_fetch_add_explicit(&number, 1, memory_order_relaxed) + 1;
    resident->load_ns = mp_sys_now_ns() - began_ns;
    resident->predicted_bytes = model_bytes;
    atomic_init(&resident->references, 1);
    worker->resident = resident;
    return MP_OK;
}

/* Creates the worker's engine, after loading the model if none is loaded. Returns the cause of a failure. *second
 * receives a guard for the engine of a second worker. */
static mp_status loading_run(mp_worker *worker, mp_loader loader, mp_guard *second, mp_error *error) {
    uint64_t model_bytes = 0, engine_bytes = 0;
    loader.ops->footprint(loader.self, &model_bytes, &engine_bytes);
    mp_mutex_lock(&worker->entry->lock);
    worker->engine_bytes = engine_bytes;
    mp_mutex_unlock(&worker->entry->lock);
    bool loading = !worker->resident;
    mp_status status = MP_OK;
    if (loading) {
        status = load_model(worker, loader, model_bytes, second, error);
    } else if (!worker->guard.governor) { /* the first worker of a model that stayed loaded when its workers died */
        status = loading_reserve(worker, engine_bytes, engine_bytes, true, &worker->guard, error);
    }
    if (status == MP_OK && loading && !worker->resident->model->ops->healthy(worker->resident->model))
        status = mp_fail(error, MP_INTEGRITY,
                         "%s: a model file was changed while the model was being loaded; load it again",
                         worker->entry->key);
    if (status == MP_OK) {
        mp_progress_set(&worker->progress, "making an engine", 99);
        mp_model *model = worker->resident->model;
        if (!loading)
            mp_guard_lend(&worker->guard, &worker->entry->account);
        status = model->ops->engine(model, &worker->entry->account, &worker->engine, error);
    }
    if (status == MP_OK)
        status = mp_chaos_wrap(worker->entry->services, worker->entry->key, worker->number, &worker->engine, error);
    mp_guard_give(&worker->guard);
    if (status != MP_OK && error->code != status) /* the loader filled in no error */
        mp_fail(error, status, "%s: %s", worker->entry->key, mp_status_find(status)->text);
    return status;
}

/* Must hold the lock. True if no other worker serves or is about to start. */
static bool is_last(const mp_worker *worker) {
    mp_assert_held(&worker->entry->lock);
    return worker->entry->worker_count == 1 && worker->entry->starting == 0;
}

/* Must hold the lock. The worker, which owns `held` bytes, serves from now on. */
static void become_ready(mp_worker *worker, bool loading, uint64_t held) {
    mp_assert_held(&worker->entry->lock);
    mp_entry *entry = worker->entry;
    if (loading) {
        entry->resident = mp_resident_pin(worker->resident);
        entry->attempts_over++;
        entry->loads++;
    }
    mp_faults_loaded(entry);
    worker->process = worker->engine->process;
    mp_worker_set_bytes(worker, held);
    mp_worker_set_state(worker, MP_WORKER_READY);
    mp_count(entry->services, MP_METRIC_workers_spawned, 1); /* under the lock: a READY worker must be counted */
    mp_count(entry->services, MP_METRIC_loads, loading);
    worker->woken = true; /* the worker is about to check the queue */
}

/* Must hold the lock. The load of the model, or of this worker's engine, failed. Returns the queued requests that must
 * fail with it. */
static mp_ticket *become_failed(mp_worker *worker, bool loading, const mp_error *error) {
    mp_assert_held(&worker->entry->lock);
    mp_entry *entry = worker->entry;
    /* mp_entry_remove cancels a load for which no request waits */
    worker->unwanted |= entry->removal != MP_REMOVAL_NONE && !entry->queue.count;
    mp_worker_set_state(worker, MP_WORKER_FAILED);
    mp_count(entry->services, MP_METRIC_load_failures, !worker->unwanted);
    mp_entry_scale_later(entry);
    if (loading)
        entry->attempts_over++;
    if (worker->unwanted || (!loading && !is_last(worker))) /* the load was not wanted, or others serve */
        return NULL;
    bool quit = entry->shutdown == MP_SHUTDOWN_QUITTING;
    if (!quit)
        mp_faults_load_failed(entry, error);
    mp_ticket *list = mp_entry_take_queue(entry, false);
    for (mp_ticket *ticket = list; quit && ticket; ticket = ticket->next)
        atomic_store_explicit(&ticket->cause, MP_SHUTTING_DOWN, memory_order_release);
    return list;
}

static void loading_report(mp_worker *worker, uint64_t began_ns, bool loading) {
    mp_entry *entry = worker->entry;
    mp_services *services = entry->services;
    /* from now on the sweep must check whether the worker is idle */
    mp_maintenance_at(&services->maintenance, services->pool, mp_sys_now_ns());
    mp_events_post(MP_EVENT_READY, services->number, entry->key, worker->id, 0, MP_OK);
    if (!loading)
        return;
    if (mp_log_enabled(MP_LOG_INFO)) {
        mp_model *model = worker->resident->model;
        mp_log(MP_LOG_INFO, "Loaded %s in %.3f s (%.1f MB)", entry->key, (double)(mp_sys_now_ns() - began_ns) * 1e-9,
               (double)model->ops->bytes(model) / 1e6);
    }
    services->event(services->registry, entry, MP_ENTRY_LOADED);
}

bool mp_worker_start(mp_worker *worker) {
    mp_entry *entry = worker->entry;
    mp_services *services = entry->services;
    mp_error error;
    mp_guard second = {0};
    uint64_t began_ns = mp_sys_now_ns();
    mp_error_clear(&error);

    mp_mutex_lock(&entry->lock);
    mp_worker_set_state(worker, MP_WORKER_LOADING);
    mp_events_post(MP_EVENT_SPAWN, services->number, entry->key, worker->id, 0, MP_OK);
    bool loading = !entry->resident;
    worker->moving = loading;
    if (loading)
        entry->attempts++;
    else
        worker->resident = mp_resident_pin(entry->resident);
    if (entry->shutdown == MP_SHUTDOWN_QUITTING || (entry->removal != MP_REMOVAL_NONE && !entry->queue.count))
        atomic_store_explicit(&worker->step_cancelled, 1, memory_order_release);
    mp_loader loader = entry->loader;
    mp_mutex_unlock(&entry->lock);
    mp_maintenance_at(&services->maintenance, services->pool, began_ns + services->load_timeout_ns / 4);

    mp_worker_set_runnable(worker, true);
    mp_status status = loading_run(worker, loader, &second, &error);
    mp_worker_set_runnable(worker, false);
    if (status != MP_OK) /* before callers learn of the failure: another model may need this memory next */
        mp_worker_free_engine(worker);
    const char *stage = atomic_load_explicit(&worker->progress.stage, memory_order_acquire);
    uint64_t held = status == MP_OK ? mp_worker_bytes(worker) : 0;

    mp_mutex_lock(&entry->lock);
    bool dead = worker->state == MP_WORKER_DEAD, off = entry->shutdown == MP_SHUTDOWN_QUITTING;
    mp_ticket *list = NULL;
    if (dead)
        status = MP_SPAWN_TIMEOUT; /* mp_worker_abandon's caller has already ended the waiting requests */
    else if (status != MP_OK)
        list = become_failed(worker, loading, &error);
    else
        become_ready(worker, loading, held);
    bool two = status == MP_OK && second.governor && mp_dispatch_stays(entry);
    entry->starting += two;
    mp_mutex_unlock(&entry->lock);
    mp_guard_release(&worker->guard); /* not earlier: from now on the entry tells that its model is in use */

    if (status == MP_OK)
        loading_report(worker, began_ns, loading);
    if (two)
        mp_entry_launch(entry, second);
    else
        mp_guard_release(&second);
    if (status == MP_OK)
        return true;
    if (dead || worker->unwanted)
        return false;
    mp_events_post_fail(services->number, entry->key, worker->id, &error);
    if (!off)
        mp_log(status == MP_MEMORY_EXHAUSTED ? MP_LOG_WARNING : MP_LOG_ERROR, "Loading %s failed (stage: %s): %s",
               entry->key, stage, error.message);
    mp_entry_finish_list(entry, list, off ? NULL : &error);
    if (loading)
        services->event(services->registry, entry, MP_ENTRY_LOAD_FAILED);
    return false;
}
