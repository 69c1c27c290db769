/* chaos.c: an engine that wraps another engine and injects faults. See chaos.h. */
#include "registry/chaos.h"

#include <stdatomic.h>

#include "base/alloc.h"
#include "base/mix.h"

static const uint64_t MS = 1000 * 1000;
enum { SLOWER = 4 }; /* a slow step is delayed by this multiple of its duration */
static const uint64_t SLOWER_MIN_NS = 5 * 1000 * 1000;
enum { STALL_MAX = 4 }; /* a stall ends after this multiple of the stall limit, even if the worker was not abandoned */

typedef struct chaos_engine {
    mp_engine base;
    mp_engine_ops ops;
    mp_engine *inner;
    mp_services *services;
    uint64_t stream, steps, admissions;
} chaos_engine;

/* --- random decisions --- */

bool mp_chaos_is_on(const mp_chaos_rule *rule) {
    return rule->fail > 0 || rule->stall > 0 || rule->die > 0 || rule->slow > 0 || rule->memory > 0;
}

uint64_t mp_chaos_stream(const mp_chaos_rule *rule, const char *key, uint32_t worker) {
    uint64_t stream = mp_mix(rule->seed);
    for (; *key; key++)
        stream = mp_mix(stream ^ (unsigned char)*key);
    return mp_mix(stream ^ worker);
}

/* Returns a number in [0, 1). */
static double uniform(uint64_t stream, uint64_t count) {
    return (double)(mp_mix(stream ^ mp_mix(count)) >> 11) * 0x1p-53;
}

mp_chaos mp_chaos_at_step(const mp_chaos_rule *rule, uint64_t stream, uint64_t step) {
    const double chances[] = {rule->fail, rule->stall, rule->die, rule->slow, rule->memory};
    double at = uniform(stream, 2 * step);
    for (int i = 0; i < MP_CHAOS_MEMORY; i++) {
        if (at < chances[i])
            return (mp_chaos)(MP_CHAOS_FAIL + i);
        at -= chances[i];
    }
    return MP_CHAOS_NONE;
}

bool mp_chaos_at_admission(const mp_chaos_rule *rule, uint64_t stream, uint64_t admission) {
    return uniform(stream, 2 * admission + 1) < rule->memory;
}

/* --- the engine --- */

static chaos_engine *chaos_of(mp_engine *engine) { return (chaos_engine *)engine; }

static mp_status chaos_admit(mp_engine *base, mp_item *item, mp_error *error) {
    chaos_engine *self = chaos_of(base);
    mp_services *services = self->services;
    if (!mp_chaos_at_admission(&services->chaos, self->stream, self->admissions++))
        return self->inner->ops->admit(self->inner, item, error);
    mp_count(services, MP_METRIC_chaos_faults, 1);
    return mp_fail(error, MP_MEMORY_EXHAUSTED, "chaos: memory for a request was refused on purpose");
}

static void chaos_plan(mp_engine *base, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    mp_engine *inner = chaos_of(base)->inner;
    inner->ops->plan(inner, items, n, budget_ns, plan);
}

static void chaos_end_all(const mp_plan *plan, mp_outcome *outcomes, mp_status status) {
    for (int i = 0; i < plan->count; i++) {
        outcomes[i] = MP_OUTCOME_FAILED;
        mp_fail(&plan->items[i]->error, status, "chaos: a step failed on purpose");
    }
}

/* Hangs: reports no progress, and ignores cancellation until the stall limit is over, so that the worker has to be
 * abandoned. */
static void chaos_stall(const mp_services *services, const mp_lease *lease) {
    uint64_t limit = services->stall_timeout_ns, began = mp_sys_now_ns(), slice = limit / 16 + 1;
    for (;;) {
        uint64_t passed = mp_sys_now_ns() - began;
        bool unwanted = atomic_load_explicit(lease->cancelled, memory_order_acquire) != 0;
        if (passed >= limit * STALL_MAX || (passed > limit && unwanted))
            return;
        mp_sys_sleep_ns(slice < 50 * MS ? slice : 50 * MS);
    }
}

static void delay(mp_lease *lease, uint64_t ns) {
    for (uint64_t end = mp_sys_now_ns() + ns, now; (now = mp_sys_now_ns()) < end;) {
        if (mp_lease_poll(lease))
            return;
        mp_sys_sleep_ns(end - now < MS ? end - now : MS);
    }
}

static void chaos_step(mp_engine *base, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    chaos_engine *self = chaos_of(base);
    mp_services *services = self->services;
    mp_chaos chaos = mp_chaos_at_step(&services->chaos, self->stream, self->steps++);
    uint64_t began = mp_sys_now_ns();
    if (chaos != MP_CHAOS_NONE)
        mp_count(services, MP_METRIC_chaos_faults, 1);
    switch (chaos) {
    case MP_CHAOS_FAIL:
        chaos_end_all(plan, outcomes, MP_MODEL);
        return;
    case MP_CHAOS_DIE:
        chaos_end_all(plan, outcomes, MP_INTERNAL);
        return;
    case MP_CHAOS_STALL: /* the outcomes stay MP_OUTCOME_MORE */
        chaos_stall(services, lease);
        return;
    case MP_CHAOS_MEMORY:
        for (int i = 0; i < plan->count; i++)
            outcomes[i] = MP_OUTCOME_WAIT_MEMORY;
        return;
    default:
        self->inner->ops->step(self->inner, lease, plan, outcomes);
        base->work = self->inner->work;
        base->external_kill = self->inner->external_kill;
        base->stalled = self->inner->stalled;
    }
    uint64_t longer = (mp_sys_now_ns() - began) * SLOWER;
    if (chaos == MP_CHAOS_SLOW)
        delay(lease, longer > SLOWER_MIN_NS ? longer : SLOWER_MIN_NS);
}

static void chaos_preempt(mp_engine *base, mp_item *item) {
    mp_engine *inner = chaos_of(base)->inner;
    inner->ops->preempt(inner, item);
}

static void chaos_retire(mp_engine *base, mp_item *item) {
    mp_engine *inner = chaos_of(base)->inner;
    inner->ops->retire(inner, item);
}

static uint64_t chaos_trim(mp_engine *base) {
    mp_engine *inner = chaos_of(base)->inner;
    return inner->ops->trim(inner);
}

static uint64_t chaos_bytes(const mp_engine *base) {
    const mp_engine *inner = ((const chaos_engine *)base)->inner;
    return inner->ops->bytes(inner);
}

static bool chaos_improve(mp_engine *base, mp_lease *lease) {
    mp_engine *inner = chaos_of(base)->inner;
    return inner->ops->improve(inner, lease);
}

static void chaos_destroy(mp_engine *base) {
    mp_engine *inner = chaos_of(base)->inner;
    inner->ops->destroy(inner);
    mp_free(base);
}

static const mp_error *chaos_lost(mp_engine *base) {
    mp_engine *inner = chaos_of(base)->inner;
    const mp_error *lost = inner->lost ? inner->lost(inner) : NULL;
    base->external_kill = inner->external_kill;
    base->stalled = inner->stalled;
    return lost;
}

mp_status mp_chaos_wrap(mp_services *services, const char *key, uint32_t worker, mp_engine **engine, mp_error *error) {
    const mp_engine_ops ops = {
        .admit = chaos_admit,
        .plan = chaos_plan,
        .step = chaos_step,
        .preempt = chaos_preempt,
        .retire = chaos_retire,
        .trim = chaos_trim,
        .destroy = chaos_destroy,
        .bytes = (*engine)->ops->bytes ? chaos_bytes : NULL,
        .improve = (*engine)->ops->improve ? chaos_improve : NULL,
    };
    if (!mp_chaos_is_on(&services->chaos))
        return MP_OK;
    chaos_engine *self = mp_alloc_zeroed(sizeof(*self), MP_TAG_POOL);
    if (!self) {
        (*engine)->ops->destroy(*engine);
        *engine = NULL;
        return mp_fail_memory(error, sizeof(*self), "chaos");
    }
    *self = (chaos_engine){
        .ops = ops,
        .base = {.ops = &self->ops, .prefix = (*engine)->prefix, .lost = chaos_lost, .process = (*engine)->process},
        .inner = *engine,
        .services = services,
        .stream = mp_chaos_stream(&services->chaos, key, worker),
    };
    *engine = &self->base;
    return MP_OK;
}
