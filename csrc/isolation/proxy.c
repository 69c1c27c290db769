/* proxy.c: the parent's side of a child process (proxy.h).
 *
 * Each call of the step interface sends one message and waits for the reply to it; retire and preempt get no reply.
 * While it waits, the proxy checks every 4 ms (channel.c) that the child is alive and responds. In a step, heartbeats
 * of the child's lease count as a response, and the proxy forwards only these as heartbeats of its worker. The proxy
 * forwards the step's cancellation to the child. Silent time is counted between two checks, at most MP_CHILD_GAP_NS
 * per check, so that a clock jump or a suspended machine kills no child.
 *
 * The proxy kills a child that hangs before the registry would abandon its worker. The worker thread then returns, and
 * the requests of the step can be retried elsewhere. */
#include "isolation/proxy.h"

#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/cpu.h"
#include "base/forked.h"
#include "base/intervals.h"
#include "base/options.h"
#include "base/topology.h"
#include "isolation/capability_wire.h"

/* Time limit for a reply to any message but STEP: the time for these does not depend on the model. */
static const uint64_t SHORT_NS = 5000ull * 1000 * 1000;
/* Time for a cancelled step to end; a correct child ends the step within a layer. */
static const uint64_t CANCEL_GRACE_NS = 1500ull * 1000 * 1000;
static const uint64_t MAX_COST_NS = 3600ull * 1000 * 1000 * 1000;

typedef struct proxy {
    mp_engine base;
    mp_forked forked;
    mp_proxy_args args;
    const mp_request_wire *wire;
    mp_budget *budget;
    uint64_t charged; /* bytes charged to the budget for the child; written only inside mp_forked_hold */
    mp_shm memory;    /* memory of the page */
    mp_channel_page *page;
    mp_channel channel;
    mp_process process;
    bool has_process;
    bool gone;     /* the child was lost: the proxy sends nothing any more */
    mp_error lost; /* why the child was lost; code MP_OK: not lost */
    uint32_t last_id;
    uint64_t plans;
    mp_prefix_counters prefix;
    /* --- state of the current wait --- */
    mp_lease *lease; /* lease of the step, or NULL */
    bool stopped;    /* the step was cancelled */
    uint64_t limit_ns, checked_ns, silent_ns, cancelled_ns, beat;
    const char *activity;
    mp_wire_out out;
    mp_wire_in in;
} proxy;

typedef struct proxy_item { /* mp_item.state of an admitted item */
    uint32_t id;
    uint64_t idle; /* consecutive steps without progress on this item */
    _Alignas(16) uint8_t progress[];
} proxy_item;

/* The statuses that a child may report, by message. Any other status is refused. The parent has checked the request
 * itself; queues, deadlines, breakers and shutdown belong to the registry. */
static const mp_status admit_failures[] = {MP_MEMORY_EXHAUSTED, MP_MODEL, MP_INTERNAL, MP_OK};
static const mp_status step_failures[] = {MP_MEMORY_EXHAUSTED, MP_INTEGRITY, MP_MODEL, MP_IO,
                                          MP_NUMERIC,          MP_INTERNAL,  MP_OK};
static const mp_status start_failures[] = {MP_MEMORY_EXHAUSTED, MP_FORMAT, MP_LIMIT,        MP_UNSUPPORTED, MP_IO,
                                           MP_INTEGRITY,        MP_MODEL,  MP_SPAWN_FAILED, MP_INTERNAL,    MP_OK};

/* --- memory --- */

/* Change the bytes that are charged for the child to `bytes`. Returns false if the budget refuses more. */
static bool charge(proxy *p, uint64_t bytes) {
    bool taken = true;
    mp_forked_hold();
    if (bytes > p->charged)
        taken = mp_budget_take(p->budget, bytes - p->charged);
    else
        mp_budget_give(p->budget, p->charged - bytes);
    if (taken)
        p->charged = bytes;
    mp_forked_release();
    return taken;
}

static uint64_t engine_charged(const proxy *p) { return p->charged - p->args.fixed_bytes; }

/* Answer the child's question for memory, if it has asked one. The answer never lowers what is charged: the child needs
 * no question for that. */
static void answer(proxy *p) {
    uint64_t wanted;
    if (mp_channel_asked(&p->channel, &wanted))
        mp_channel_answer(&p->channel, wanted <= p->args.memory_bytes &&
                                           (wanted <= engine_charged(p) || charge(p, p->args.fixed_bytes + wanted)));
}

/* Give back what the child no longer needs. */
static void get_memory(proxy *p) {
    uint64_t needed = mp_get_u64(&p->in);
    mp_state_use states;
    mp_get(&p->in, &states, sizeof states);
    if (!p->in.failed && needed > engine_charged(p))
        mp_wire_refuse(&p->in, "it needs more memory than is charged for it");
    if (!p->in.failed && (states.snapshots > states.snapshot_bytes || states.snapshot_bytes > needed ||
                          states.state_bytes > needed - states.snapshot_bytes))
        mp_wire_refuse(&p->in, "its states take more memory than is charged for them");
    if (p->in.failed)
        return;
    charge(p, p->args.fixed_bytes + needed);
    atomic_store_explicit(&p->prefix.state_bytes, states.state_bytes, memory_order_relaxed);
    atomic_store_explicit(&p->prefix.snapshot_bytes, states.snapshot_bytes, memory_order_relaxed);
    atomic_store_explicit(&p->prefix.snapshots, states.snapshots, memory_order_relaxed);
}

/* --- the end of the child --- */

/* Kill the child and store the reason. */
static void lose(proxy *p, const char *how) {
    mp_fail(&p->lost, MP_RECV, "worker process %d %s %s", p->process.pid, how, p->activity);
    p->channel.broken = true;
    p->gone = true;
    if (p->has_process)
        mp_process_kill(&p->process);
}

/* Kill the child after the channel broke. check_child, or the refusal of a frame, has already stored the reason. */
static void lose_channel(proxy *p) {
    p->gone = true;
    if (p->has_process)
        mp_process_kill(&p->process);
}

static bool is_dead(proxy *p) {
    if (!p->has_process || mp_process_alive(&p->process))
        return false;
    char how[96];
    mp_process_describe_end(&p->process, how, sizeof how);
    p->base.external_kill = mp_process_was_killed(&p->process);
    lose(p, how);
    return true;
}

/* The channel's `poll`: called while the channel waits. Returns false to end the wait. */
static bool check_child(void *arg) {
    proxy *p = arg;
    uint64_t now = mp_sys_now_ns(), passed = now > p->checked_ns ? now - p->checked_ns : 0;
    char how[96];
    passed = passed < MP_CHILD_GAP_NS ? passed : MP_CHILD_GAP_NS;
    p->checked_ns = now;
    if (is_dead(p))
        return false;
    answer(p);
    p->silent_ns += passed;
    if (p->lease) {
        uint64_t beat = atomic_load_explicit(&p->page->lease.heartbeat, memory_order_relaxed);
        bool beats = beat != p->beat;
        p->beat = beat;
        if (beats) {
            p->silent_ns = 0;
            mp_lease_poll(p->lease);
        }
        if (p->lease->cancelled && atomic_load_explicit(p->lease->cancelled, memory_order_relaxed)) {
            p->stopped = true;
            atomic_store_explicit(&p->page->stop, 1, memory_order_release);
            p->cancelled_ns += passed;
        }
    }
    if (p->cancelled_ns >= CANCEL_GRACE_NS) {
        p->base.stalled = true;
        lose(p, "was killed because it ignored a cancellation");
        return false;
    }
    if (p->silent_ns >= p->limit_ns) {
        snprintf(how, sizeof how, "was killed after %.3g s without a heartbeat or response",
                 (double)p->limit_ns * 1e-9);
        p->base.stalled = true;
        lose(p, how);
        return false;
    }
    return true;
}

static uint64_t short_ns(const proxy *p) { return p->args.stall_ns < SHORT_NS ? p->args.stall_ns : SHORT_NS; }

static void begin_wait(proxy *p, const char *activity, mp_lease *lease, uint64_t limit_ns) {
    p->activity = activity;
    p->lease = lease;
    p->limit_ns = limit_ns;
    p->checked_ns = mp_sys_now_ns();
    p->silent_ns = p->cancelled_ns = 0;
    p->stopped = false;
    if (lease)
        p->beat = atomic_load_explicit(&p->page->lease.heartbeat, memory_order_relaxed);
}

/* Send the message and wait for its reply. Returns false if the child is lost. */
static bool exchange(proxy *p, mp_frame_kind kind, bool spin) {
    bool ok = mp_wire_end(&p->out) && mp_wire_receive(&p->in, &p->channel, spin);
    if (ok && p->in.kind != kind)
        ok = mp_wire_refuse(&p->in, "it replies to another message");
    if (!ok)
        lose_channel(p);
    return ok;
}

/* Check that the reply was valid and was read to its end. Returns false if the child is lost. */
static bool proxy_finish(proxy *p) {
    if (!p->channel.broken && mp_wire_done(&p->in))
        return true;
    lose_channel(p);
    return false;
}

/* --- admit, retire --- */

static void put_item(proxy *p, const mp_item *item, proxy_item *state) {
    mp_put_u32(&p->out, state->id);
    mp_put_u8(&p->out, item->priority);
    mp_put_u64(&p->out, item->tenant);
    mp_put_u32(&p->out, item->cursor);
    mp_put_u32(&p->out, item->total);
    p->wire->put_request(&p->out, item, state->progress);
}

static mp_status proxy_admit(mp_engine *base, mp_item *item, mp_error *error) {
    proxy *p = (proxy *)base;
    size_t bytes = sizeof(proxy_item) + p->wire->progress_bytes(item->request);
    if (p->gone) {
        *error = p->lost;
        return error->code;
    }
    proxy_item *state = mp_alloc_zeroed(bytes, MP_TAG_REQUEST);
    if (!state)
        return mp_fail_memory(error, bytes, "a request of a worker process");
    state->id = ++p->last_id;
    begin_wait(p, "while it admitted a request", NULL, short_ns(p));
    mp_wire_begin(&p->out, &p->channel, MP_FRAME_ADMIT);
    put_item(p, item, state);
    mp_status status = MP_RECV;
    if (exchange(p, MP_FRAME_ADMIT, true)) {
        if (mp_get_u32(&p->in) != state->id)
            mp_wire_refuse(&p->in, "it names another request");
        status = mp_get_error(&p->in, admit_failures, error);
        if (!proxy_finish(p))
            status = MP_RECV;
    }
    if (p->gone) {
        *error = p->lost;
        status = error->code;
    }
    if (status != MP_OK) {
        mp_free(state);
        return status;
    }
    item->state = state;
    item->abandon = NULL;
    return MP_OK;
}

/* Tell the child to drop the item. Does not wait for a reply. */
static void forget(proxy *p, mp_item *item) {
    proxy_item *state = item->state;
    if (!p->gone) {
        begin_wait(p, "while it retired a request", NULL, short_ns(p));
        mp_wire_begin(&p->out, &p->channel, MP_FRAME_RETIRE);
        mp_put_u32(&p->out, state->id);
        if (!mp_wire_end(&p->out))
            lose_channel(p);
    }
    mp_free(state);
    item->state = NULL;
}

static void proxy_abandon(mp_item *item) { mp_request_wire_of(item->request->capability)->close(item); }

/* The request itself has everything that another process needs to continue, so the state in the child is dropped. */
static void proxy_preempt(mp_engine *base, mp_item *item) {
    forget((proxy *)base, item);
    item->abandon = proxy_abandon;
}

static void proxy_retire(mp_engine *base, mp_item *item) {
    if (!item->state && !item->abandon)
        return;
    if (item->state)
        forget((proxy *)base, item);
    proxy_abandon(item);
    item->abandon = NULL;
}

/* --- plan --- */

/* Fills in a placeholder plan after the child was lost, because a plan must have a request. The worker then checks
 * mp_engine.lost and runs no step. */
static void placeholder_plan(mp_item **items, mp_plan *plan) {
    plan->count = 1;
    plan->items[0] = items[0];
    plan->amount[0] = 1;
    plan->threads = 1;
    plan->cost_ns = 0;
}

static bool all_wait(const proxy *p, mp_item **items, int n) {
    bool all = p->wire->waits != NULL;
    for (int i = 0; i < n && all; i++)
        all = p->wire->waits(items[i], ((const proxy_item *)items[i]->state)->progress);
    return all;
}

static bool get_plan(proxy *p, mp_item **items, int n, mp_plan *plan) {
    bool taken[MP_PLAN_MAX] = {0};
    uint32_t count = mp_get_count(&p->in, (uint32_t)(n < MP_PLAN_MAX ? n : MP_PLAN_MAX), "a plan is too long");
    if (count < 1 && !p->in.failed && !all_wait(p, items, n))
        return mp_wire_refuse(&p->in, "a plan is empty");
    plan->masks = count < 1;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = mp_get_count(&p->in, (uint32_t)n - 1, "a plan has a request that was not offered");
        uint32_t amount = mp_get_u32(&p->in);
        if (p->in.failed)
            return false;
        if (taken[index] || amount == 0)
            return mp_wire_refuse(&p->in, "a plan has a request twice, or an amount of 0");
        taken[index] = true;
        plan->items[i] = items[index];
        plan->amount[i] = amount;
    }
    plan->count = (int)count;
    plan->threads = (int)mp_get_count(&p->in, 256, "a plan has too many threads");
    plan->cost_ns = mp_get_u64(&p->in);
    plan->barrier_bound = mp_get_u8(&p->in) != 0;
    if (!p->in.failed && (plan->threads < 1 || plan->cost_ns > MAX_COST_NS))
        return mp_wire_refuse(&p->in, "a plan has an impossible cost");
    return !p->in.failed;
}

static void proxy_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    proxy *p = (proxy *)base;
    uint64_t speed[MP_MODEL_SPEEDS] = {0};
    n = n < MP_PLAN_MAX ? n : MP_PLAN_MAX;
    plan->count = 0;
    if (n && !p->gone) {
        if (p->args.kind->get_speed)
            p->args.kind->get_speed(p->args.model, speed);
        begin_wait(p, "while it planned a step", NULL, short_ns(p));
        mp_wire_begin(&p->out, &p->channel, MP_FRAME_PLAN);
        mp_put_u64(&p->out, ++p->plans);
        mp_put(&p->out, speed, sizeof speed);
        mp_put_u64(&p->out, budget_ns);
        mp_put_u32(&p->out, (uint32_t)n);
        for (int i = 0; i < n; i++) {
            proxy_item *state = items[i]->state;
            mp_put_u32(&p->out, state->id);
            if (p->wire->put_more)
                p->wire->put_more(&p->out, items[i], state->progress);
        }
        if (exchange(p, MP_FRAME_PLAN, true))
            get_plan(p, items, n, plan);
        proxy_finish(p);
    }
    if (n && p->gone)
        placeholder_plan(items, plan);
}

/* --- step --- */

static void get_outcome(proxy *p, mp_item *item, uint32_t amount, mp_outcome *outcome, mp_error *error) {
    proxy_item *state = item->state;
    uint8_t value = mp_get_u8(&p->in);
    if (value > MP_OUTCOME_FAILED || (value == MP_OUTCOME_WAIT_MASK && !p->wire->waits)) {
        mp_wire_refuse(&p->in, "an outcome is unknown");
        return;
    }
    *outcome = (mp_outcome)value;
    if (value == MP_OUTCOME_FAILED && mp_get_error(&p->in, step_failures, error) == MP_OK)
        mp_wire_refuse(&p->in, "a request fails without a reason");
    if (p->in.failed)
        return;
    bool moved = p->wire->get_results(&p->in, item, amount, *outcome, state->progress);
    bool goes_on = *outcome == MP_OUTCOME_MORE || *outcome == MP_OUTCOME_WAIT_MASK;
    if (moved || !goes_on || atomic_load_explicit(&item->cancelled, memory_order_relaxed))
        state->idle = 0;
    else if (++state->idle > p->wire->most_idle(item->request))
        mp_wire_refuse(&p->in, "too many steps in a row made no progress on a request");
}

/* Adopt the running means that the child reports. Limit each to the known mean or the thread time of this step
 * (duration times threads), whichever is greater: one row on one thread cannot take longer than the whole step. */
static void set_speed(proxy *p, uint64_t speed[MP_MODEL_SPEEDS], uint64_t took_ns, int threads) {
    uint64_t known[MP_MODEL_SPEEDS] = {0}, most = took_ns * (uint64_t)threads;
    if (!p->args.kind->set_speed)
        return;
    if (p->args.kind->get_speed)
        p->args.kind->get_speed(p->args.model, known);
    for (int i = 0; i < MP_MODEL_SPEEDS; i++) {
        uint64_t bound = (known[i] > most ? known[i] : most) + 1;
        speed[i] = speed[i] < bound ? speed[i] : bound;
    }
    p->args.kind->set_speed(p->args.model, speed);
}

static void get_measurements(proxy *p, uint64_t began_ns, mp_lease *lease) {
    get_memory(p);
    uint64_t speed[MP_MODEL_SPEEDS], hits = mp_get_u64(&p->in), tokens = mp_get_u64(&p->in);
    uint64_t blocks = mp_get_u64(&p->in), evicted = mp_get_u64(&p->in);
    mp_step_work work, *known = &p->base.work;
    mp_get(&p->in, &work, sizeof work);
    if (work.passes < known->passes || work.rows < known->rows || work.prefix_tokens < known->prefix_tokens ||
        work.dedup_hits < known->dedup_hits || work.draft_tokens < known->draft_tokens ||
        work.accepted_draft_tokens < known->accepted_draft_tokens || work.accepted_draft_tokens > work.draft_tokens)
        mp_wire_refuse(&p->in, "a counter of work decreased");
    mp_get(&p->in, speed, sizeof speed);
    for (int i = 0; i < MP_MODEL_SPEEDS; i++)
        if (speed[i] > MAX_COST_NS)
            mp_wire_refuse(&p->in, "a speed is out of range");
    const uint64_t took_ns = mp_sys_now_ns() - began_ns;
    const uint64_t watched_ns = mp_get_u64(&p->in), lost_ns = mp_get_u64(&p->in);
    if (p->in.failed)
        return;
    const uint64_t watched_bound = watched_ns < took_ns ? watched_ns : took_ns;
    lease->watched_ns += watched_bound;
    lease->lost_ns += lost_ns < watched_bound ? lost_ns : watched_bound;
    *known = work;
    atomic_store_explicit(&p->prefix.hits, hits, memory_order_relaxed);
    atomic_store_explicit(&p->prefix.tokens, tokens, memory_order_relaxed);
    atomic_store_explicit(&p->prefix.blocks, blocks, memory_order_relaxed);
    atomic_store_explicit(&p->prefix.evicted, evicted, memory_order_relaxed);
    set_speed(p, speed, took_ns, lease->threads);
}

/* Fail the requests of the step that the lost process was computing. If the step was cancelled, its requests do not
 * fail: they end as cancelled. */
static void fail_step(proxy *p, const mp_plan *plan, mp_outcome *outcomes) {
    for (int i = 0; i < plan->count; i++) {
        outcomes[i] = p->stopped ? MP_OUTCOME_MORE : MP_OUTCOME_FAILED;
        if (!p->stopped)
            plan->items[i]->error = p->lost;
    }
}

/* On a machine with several memory nodes, send the CPUs for the child's threads: if all threads of the lease are on one
 * node, the CPUs to which this thread is bound, else the CPUs that it could use before it was bound. Send a set in both
 * cases: threads that were bound for an earlier step would otherwise stay bound. */
static void put_place(proxy *p, const mp_lease *lease) {
    mp_cpu_set cpus = lease->before;
    bool bound = lease->bound && (lease->threads > lease->near || mp_sys_get_affinity(&cpus));
    mp_put_u8(&p->out, bound);
    if (bound)
        mp_put(&p->out, &cpus, sizeof cpus);
}

static void proxy_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    proxy *p = (proxy *)base;
    if (p->gone) { /* the child was lost before the step began: no request is affected */
        for (int i = 0; i < plan->count; i++)
            outcomes[i] = MP_OUTCOME_MORE;
        return;
    }
    uint64_t began_ns = mp_sys_now_ns();
    atomic_store_explicit(&p->page->stop, 0, memory_order_relaxed);
    begin_wait(p, "in a step", lease, p->args.stall_ns);
    mp_wire_begin(&p->out, &p->channel, MP_FRAME_STEP);
    mp_put_u64(&p->out, p->plans);
    mp_put_u32(&p->out, (uint32_t)lease->threads);
    put_place(p, lease);
    mp_put_u32(&p->out, (uint32_t)plan->count);
    for (int i = 0; i < plan->count; i++)
        mp_put_u8(&p->out, atomic_load_explicit(&plan->items[i]->cancelled, memory_order_relaxed) != 0);
    /* do not spin: the child computes on these CPUs */
    bool ok = exchange(p, MP_FRAME_STEP, false);
    for (int i = 0; ok && i < plan->count && !p->in.failed; i++)
        get_outcome(p, plan->items[i], plan->amount[i], &outcomes[i], &plan->items[i]->error);
    if (ok) {
        get_measurements(p, began_ns, lease);
        ok = proxy_finish(p);
    }
    p->lease = NULL;
    if (!ok) {
        fail_step(p, plan, outcomes);
        return;
    }
    uint64_t now_ns = mp_sys_now_ns();
    for (int i = 0; i < plan->count; i++)
        p->wire->publish(plan->items[i], ((proxy_item *)plan->items[i]->state)->progress, began_ns, now_ns);
}

/* --- life --- */

static uint64_t proxy_trim(mp_engine *base) {
    proxy *p = (proxy *)base;
    uint64_t bytes = 0;
    if (p->gone)
        return 0;
    begin_wait(p, "while it released memory", NULL, short_ns(p));
    mp_wire_begin(&p->out, &p->channel, MP_FRAME_TRIM);
    if (!exchange(p, MP_FRAME_TRIM, true))
        return 0;
    bytes = mp_get_u64(&p->in);
    if (!p->in.failed && bytes > p->args.memory_bytes)
        mp_wire_refuse(&p->in, "it released more memory than its budget");
    get_memory(p);
    return proxy_finish(p) ? bytes : 0;
}

static uint64_t proxy_bytes(const mp_engine *base) { return ((const proxy *)base)->charged; }

static const mp_error *proxy_lost(mp_engine *base) {
    proxy *p = (proxy *)base;
    p->activity = "while it had no work";
    return p->gone || is_dead(p) ? &p->lost : NULL;
}

/* Called in a forked process, which has neither the child nor the thread that talks to it. The rest of the struct may
 * be in an intermediate state and is not touched. */
static void forget_proxy(mp_forked *forked) {
    proxy *p = (proxy *)((char *)forked - offsetof(proxy, forked));
    mp_budget_give(p->budget, p->charged);
    mp_process_forget(&p->process);
    mp_shm_forget(&p->memory);
}

static void proxy_destroy(mp_engine *base) {
    proxy *p = (proxy *)base;
    if (p->has_process)
        mp_process_kill(&p->process); /* the child holds no state that must be saved */
    charge(p, 0);
    mp_forked_remove(&p->forked);
    mp_shm_free(&p->memory);
    mp_free(p);
}

static const mp_engine_ops proxy_ops = {
    .admit = proxy_admit,
    .plan = proxy_plan,
    .step = proxy_step,
    .preempt = proxy_preempt,
    .retire = proxy_retire,
    .trim = proxy_trim,
    .destroy = proxy_destroy,
    .bytes = proxy_bytes,
};

static mp_status create_proxy(const mp_proxy_args *args, mp_budget *budget, proxy **out, mp_error *error) {
    const mp_request_wire *wire = mp_request_wire_of(args->capability);
    *out = NULL;
    if (!wire)
        return mp_fail(error, MP_UNSUPPORTED, "%s models do not support process isolation; use isolation=\"thread\"",
                       mp_capability_get(args->capability)->name);
    proxy *p = mp_alloc_zeroed(sizeof *p, MP_TAG_POOL);
    if (!p)
        return mp_fail_memory(error, sizeof *p, "a worker process");
    p->base.ops = &proxy_ops;
    p->base.prefix = &p->prefix;
    p->base.lost = proxy_lost;
    p->args = *args;
    p->budget = budget;
    p->wire = wire;
    p->activity = "";
    p->memory.fd = p->process.handle = -1;
    mp_error_clear(&p->lost);
    *out = p;
    return MP_OK;
}

mp_status mp_proxy_attach(const mp_proxy_args *args, mp_budget *budget, mp_channel_page *page, mp_engine **engine,
                          mp_error *error) {
    proxy *p;
    MP_TRY(create_proxy(args, budget, &p, error));
    p->args.fixed_bytes = 0;
    p->page = page;
    mp_channel_init(&p->channel, page, true, &p->lost, check_child, p);
    *engine = &p->base;
    return MP_OK;
}

/* Private memory outside the engine: the interpreter and libraries; per thread, a stack and malloc's caches; OpenBLAS's
 * buffer if a library is named. A generous limit costs nothing: RLIMIT_DATA reserves no memory. */
enum { MARGIN_BYTES = 256 << 20, THREAD_BYTES = 1 << 20, BLAS_BYTES = 128 << 20, MIN_THREADS = 8 };

static uint64_t data_limit(const mp_proxy_args *args) {
    const char *blas = mp_options_get()->blas;
    uint64_t threads = (uint64_t)(args->threads > MIN_THREADS ? args->threads : MIN_THREADS);
    uint64_t thread_bytes = mp_process_stack_bytes() + THREAD_BYTES;
    if (blas[0] && strcmp(blas, "none") != 0)
        thread_bytes += BLAS_BYTES;
    return args->memory_bytes + args->fixed_bytes + MARGIN_BYTES + threads * thread_bytes;
}

static mp_status proxy_start(proxy *p, mp_error *error) {
    const mp_proxy_args *args = &p->args;
    MP_TRY(mp_shm_create(&p->memory, sizeof(mp_channel_page), MP_TAG_POOL, "mpool-channel", error));
    mp_shm_keep_from_forks(&p->memory);
    p->page = p->memory.data;
    p->page->setup = (mp_channel_setup){
        .build = mp_channel_build(),
        .parent = mp_process_id(),
        .capability = (uint32_t)args->capability,
        .spin_us = (uint32_t)(mp_options_get()->spin_us < 50 ? mp_options_get()->spin_us : 50),
        .description_bytes = args->description->bytes,
        .weight_bytes = args->weights->data ? args->weights->bytes : 0,
        .memory_bytes = args->memory_bytes,
        .data_limit = data_limit(args),
    };
    mp_channel_init(&p->channel, p->page, true, &p->lost, check_child, p);
    mp_process_command command = {
        .argv = args->argv,
        .envp = args->envp,
        .fds = {p->memory.fd, args->description->fd, args->weights->data ? args->weights->fd : p->memory.fd}};
    MP_TRY(mp_process_start(&p->process, &command, error));
    p->has_process = true;
    p->base.process = p->process.pid;
    int fd = p->memory.fd;
    p->memory.fd = -1;
    mp_sys_close(fd);
    return MP_OK;
}

static const char *explain(int code) {
    switch (code) {
    case MP_CHILD_OPTIONS:
        return ": it cannot use the options or the instruction set of this process";
    case MP_CHILD_MEMORY:
        return ": memory was refused";
    case MP_CHILD_BUILD:
        return ": it runs another build of mpool; restart this process after an upgrade";
    default:
        return "";
    }
}

/* Wait until the child reports that it is ready, or the error that prevented it. */
static mp_status await_ready(proxy *p, mp_error *error) {
    mp_status status = MP_OK;
    begin_wait(p, "before it was ready", NULL, p->args.start_ns);
    bool ok = mp_wire_receive(&p->in, &p->channel, false);
    if (ok && p->in.kind != MP_FRAME_READY)
        ok = mp_wire_refuse(&p->in, "the first message is not READY");
    if (ok) {
        status = mp_get_error(&p->in, start_failures, error);
        ok = mp_wire_done(&p->in);
    }
    if (ok)
        return status;
    bool late = p->silent_ns >= p->limit_ns;
    return mp_fail(error, late ? MP_SPAWN_TIMEOUT : MP_SPAWN_FAILED, "%s (started as %s)%s", p->lost.message,
                   p->args.argv[0], explain(mp_process_code(&p->process)));
}

mp_status mp_proxy_create(const mp_proxy_args *args, mp_budget *budget, mp_engine **engine, mp_error *error) {
    proxy *p;
    MP_TRY(create_proxy(args, budget, &p, error));
    mp_status status = mp_forked_add(&p->forked, forget_proxy, error);
    if (status == MP_OK && !charge(p, args->fixed_bytes))
        status = mp_fail_memory(error, args->fixed_bytes, "a worker process");
    if (status == MP_OK)
        status = proxy_start(p, error);
    if (status == MP_OK)
        status = await_ready(p, error);
    if (status != MP_OK) {
        proxy_destroy(&p->base);
        return status;
    }
    *engine = &p->base;
    return MP_OK;
}
