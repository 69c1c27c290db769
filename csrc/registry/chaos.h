/* chaos.h: faults on purpose, by seed, so that tests see what callers see when workers fail.
 *
 * An engine around a worker's engine (models/engine.h); nobody else knows of it. Before each step it draws a number and
 * does, with the chances of the rule (registry.h),
 *
 *   fail    nothing: every item of the step fails with MODEL, a worker's fault; it is tried again once
 *   die     the same with INTERNAL: the worker ends and another takes its place
 *   stall   nothing, without a sign of life, until the worker was set apart
 *   slow    the step, and then as if it took five times as long
 *   memory  nothing: the items find no memory in the step
 *
 * or just the step. Before each admission the chance of `memory` is drawn once more.
 *
 * What is drawn is a function of (seed, key, number of the worker among those that its model has had, number of the
 * step or admission among the worker's): the same seed makes the same faults, wherever the same worker comes to the
 * same step. Which calls are in that step is for scheduling to say. */
#ifndef MP_REGISTRY_CHAOS_H
#define MP_REGISTRY_CHAOS_H

#include "registry/services.h"

typedef enum mp_chaos {
    MP_CHAOS_NONE,
    MP_CHAOS_FAIL,
    MP_CHAOS_STALL,
    MP_CHAOS_DIE,
    MP_CHAOS_SLOW,
    MP_CHAOS_MEMORY
} mp_chaos;

/* INVALID_ARGUMENT for chances that are none, or more than 1 together. */
mp_status mp_chaos_check(const mp_chaos_rule *rule, mp_error *error);
/* Some fault has a chance. */
bool mp_chaos_is_on(const mp_chaos_rule *rule);

/* What happens at a step. stream: of the worker. */
uint64_t mp_chaos_stream(const mp_chaos_rule *rule, const char *key, uint32_t worker);
mp_chaos mp_chaos_at_step(const mp_chaos_rule *rule, uint64_t stream, uint64_t step);
/* Memory is refused at an admission. */
bool mp_chaos_at_admission(const mp_chaos_rule *rule, uint64_t stream, uint64_t admission);

/* Put chaos around the engine of a worker; nothing if the services' rule is off. On failure *engine is freed and NULL.
 * The wrapper keeps no reference: the worker that owns it keeps the services. */
mp_status mp_chaos_wrap(mp_services *services, const char *key, uint32_t worker, mp_engine **engine, mp_error *error);

#endif
