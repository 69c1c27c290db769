/* worker.c: states, creation, liveness and lease of a worker. load.c, serve.c and leave.c have the code of its thread.
 * See worker.h. */
#include "registry/worker.h"

#include <assert.h>
#include <stdatomic.h>

#include "base/alloc.h"
#include "base/log.h"
#include "registry/entry.h"

/* --- states --- */

#define TO(state) (1u << MP_WORKER_##state)

static const char *const state_names[MP_WORKER_STATES] = {
    [MP_WORKER_SPAWNING] = "spawning",     [MP_WORKER_LOADING] = "loading",   [MP_WORKER_READY] = "ready",
    [MP_WORKER_PROCESSING] = "processing", [MP_WORKER_IDLE] = "idle",         [MP_WORKER_EVICTING] = "evicting",
    [MP_WORKER_DEAD] = "dead",             [MP_WORKER_FAILED] = "failed",
};

static const uint16_t state_legal[MP_WORKER_STATES] = {
    [MP_WORKER_SPAWNING] = TO(LOADING) | TO(FAILED) | TO(DEAD),
    [MP_WORKER_LOADING] = TO(READY) | TO(FAILED) | TO(DEAD),
    [MP_WORKER_READY] = TO(PROCESSING) | TO(EVICTING) | TO(FAILED) | TO(DEAD),
    [MP_WORKER_PROCESSING] = TO(IDLE) | TO(EVICTING) | TO(FAILED) | TO(DEAD),
    [MP_WORKER_IDLE] = TO(PROCESSING) | TO(EVICTING) | TO(FAILED) | TO(DEAD),
    [MP_WORKER_EVICTING] = TO(DEAD),
    [MP_WORKER_DEAD] = 0,
    [MP_WORKER_FAILED] = TO(DEAD),
};

const mp_state_machine mp_worker_state_machine = {"worker", MP_WORKER_STATES, state_names, state_legal};

const char *mp_worker_state_name(mp_worker_state state) { return state_names[state]; }

void mp_worker_set_state(mp_worker *worker, mp_worker_state state) {
    mp_assert_held(&worker->entry->lock);
    mp_entry *entry = worker->entry;
    if (!mp_state_may_enter(&mp_worker_state_machine, entry->services, entry->key, worker->id, (int)worker->state,
                            (int)state))
        return;
    /* a worker enters these two states with each request that finds it idle; the others, once in its life */
    bool often = state == MP_WORKER_PROCESSING || state == MP_WORKER_IDLE;
    mp_log(often ? MP_LOG_DEBUG : MP_LOG_INFO, "Worker %u for %s: %s -> %s", worker->id, entry->key,
           mp_worker_state_name(worker->state), mp_worker_state_name(state));
    worker->state = state;
    if (state == MP_WORKER_READY || state == MP_WORKER_IDLE)
        worker->idle_since_ns = mp_sys_now_ns();
    mp_cond_broadcast(&entry->changed); /* a broadcast without a waiter makes no system call */
}

/* --- heartbeats --- */

void mp_watch_reset(mp_watch *watch, uint64_t now_ns) { *watch = (mp_watch){.checked_ns = now_ns}; }

bool mp_watch_check(mp_watch *watch, uint64_t beat, uint64_t now_ns, uint64_t limit_ns) {
    uint64_t passed = now_ns > watch->checked_ns ? now_ns - watch->checked_ns : 0;
    watch->checked_ns = now_ns;
    if (passed > limit_ns / 2)
        passed = limit_ns / 2;
    watch->total_ns += passed;
    if (beat != watch->beat) {
        watch->beat = beat;
        watch->silent_ns = 0;
        return false;
    }
    watch->silent_ns += passed;
    return watch->silent_ns >= limit_ns;
}

/* --- life --- */

mp_status mp_worker_create(mp_entry *entry, mp_worker **worker_out, mp_error *error) {
    static _Atomic uint32_t number;
    *worker_out = NULL;
    mp_worker *worker = mp_alloc_zeroed(sizeof(*worker), MP_TAG_POOL);
    if (!worker)
        return mp_fail_memory(error, sizeof(*worker), "a worker");
    mp_status status = mp_flows_create(&worker->flows, MP_FLOWS_MAX, MP_QUEUE_KINDS, error);
    if (status != MP_OK) {
        mp_free(worker);
        return status;
    }
    worker->entry = mp_entry_pin(entry);
    worker->home = mp_cpu_allocator_assign_home(entry->services->allocator_pinned);
    worker->id = atomic_fetch_add_explicit(&number, 1, memory_order_relaxed) + 1;
    worker->state = MP_WORKER_SPAWNING;
    mp_watch_reset(&worker->watch, mp_sys_now_ns());
    mp_progress_set(&worker->progress, "starting", 0);
    *worker_out = worker;
    return MP_OK;
}

void mp_worker_destroy(mp_worker *worker) {
    assert(!worker->engine && !worker->resident && !worker->guard.governor && !worker->threads);
    mp_cpu_allocator_release_home(worker->entry->services->allocator_pinned, worker->home);
    mp_entry_unpin(worker->entry);
    mp_flows_destroy(&worker->flows);
    mp_free(worker);
}

void mp_worker_free_engine(mp_worker *worker) {
    mp_assert_not_held(&worker->entry->lock);
    if (worker->engine)
        worker->engine->ops->destroy(worker->engine);
    worker->engine = NULL;
    mp_resident_unpin(worker->resident);
    worker->resident = NULL;
}

void mp_worker_wake(mp_worker *worker) {
    worker->woken = true;
    mp_event_count_notify(&worker->wake); /* the worker may be freed once the lock is released */
}

void mp_entry_wake_workers(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++)
        mp_worker_wake(entry->workers[i]);
}

uint64_t mp_worker_bytes(const mp_worker *worker) {
    const mp_engine *engine = worker->engine;
    return engine->ops->bytes ? engine->ops->bytes(engine) : worker->engine_bytes;
}

void mp_worker_set_bytes(mp_worker *worker, uint64_t held) {
    mp_assert_held(&worker->entry->lock);
    worker->held_bytes = held;
    worker->states = mp_prefix_state_use(worker->engine->prefix);
}

/* --- compute threads --- */

/* Returns true if an active request or the load was cancelled: the worker must plan again. Optional work (improve.c)
 * does not wait for CPUs. */
static bool plan_is_stale(void *arg) {
    mp_worker *worker = arg;
    if (worker->engine && worker->active_count == 0)
        return true;
    for (int i = 0; i < worker->active_count; i++)
        if (atomic_load_explicit(&worker->active[i]->cause, memory_order_acquire))
            return true;
    return !worker->engine && atomic_load_explicit(&worker->step_cancelled, memory_order_acquire) != 0;
}

bool mp_worker_lease(mp_worker *worker, int want) {
    mp_assert_not_held(&worker->entry->lock);
    mp_entry *entry = worker->entry;
    mp_cpu_allocator *allocator = entry->services->allocator_pinned;
    bool lend = worker->engine && worker->engine->process;
    if (!(lend ? mp_cpu_allocator_lend : mp_cpu_allocator_lease)(allocator, worker->home, want, &worker->lease,
                                                                 &worker->cores, plan_is_stale, worker))
        return false;
    worker->lease.cancelled = &worker->step_cancelled;
    worker->lease.wanted = &worker->step_wanted;
    mp_mutex_lock(&entry->lock);
    worker->threads = worker->lease.threads;
    worker->moving = false;
    mp_mutex_unlock(&entry->lock);
    return true;
}

void mp_worker_return_threads(mp_worker *worker) {
    mp_entry *entry = worker->entry;
    mp_mutex_lock(&entry->lock);
    bool forfeited = worker->threads == 0;
    worker->threads = 0;
    worker->moving = !forfeited; /* cleared by leave_step and load_model, after the CPUs are returned */
    mp_mutex_unlock(&entry->lock);
    mp_cpu_allocator_return(entry->services->allocator_pinned, &worker->lease, &worker->cores, forfeited);
}

void mp_worker_set_runnable(mp_worker *worker, bool runnable) {
    mp_entry *entry = worker->entry;
    mp_mutex_lock(&entry->lock);
    /* Under the lock: a thread that abandons this worker now calls mp_cpu_allocator_leave for it. */
    if (worker->state != MP_WORKER_DEAD && worker->runnable != runnable) {
        worker->runnable = runnable;
        (runnable ? mp_cpu_allocator_enter : mp_cpu_allocator_leave)(entry->services->allocator_pinned);
    }
    mp_mutex_unlock(&entry->lock);
}
