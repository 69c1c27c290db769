/* chaos.h: fault injection by seed, so that tests see what callers see when workers fail.
 *
 * mp_chaos_wrap wraps the engine of a worker (models/engine.h); the rest of the registry does not see the wrapper.
 * Before each step the wrapper chooses, with the chances of the rule (registry.h), one of:
 *
 *   fail    the step is skipped; every item fails with MODEL, a worker fault, and is retried once
 *   die     as `fail`, but with INTERNAL: the worker ends and is replaced
 *   stall   the step is skipped and makes no progress until the worker is abandoned
 *   slow    the step takes five times as long, but at least 5 ms longer
 *   memory  the step is skipped; its items get MP_OUTCOME_WAIT_MEMORY
 *
 * or an ordinary step. Before each admission it chooses `memory` once more.
 *
 * A choice is a function of (seed, key, number of the worker among its model's, number of the step or admission of
 * that worker). The same seed makes the same faults wherever the same worker reaches the same step. The scheduler
 * decides which requests are in that step. */
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

/* True if the probability of a fault is above 0. */
bool mp_chaos_is_on(const mp_chaos_rule *rule);

/* mp_chaos_stream returns the random stream of a worker; mp_chaos_at_step chooses from the stream what happens at a
 * step. */
uint64_t mp_chaos_stream(const mp_chaos_rule *rule, const char *key, uint32_t worker);
mp_chaos mp_chaos_at_step(const mp_chaos_rule *rule, uint64_t stream, uint64_t step);
/* True if memory is refused at this admission. */
bool mp_chaos_at_admission(const mp_chaos_rule *rule, uint64_t stream, uint64_t admission);

/* Wraps the engine of a worker, unless the rule of the services is off. On failure frees *engine and sets it to NULL.
 * The wrapper owns no reference to the services: the worker that owns the wrapper keeps them alive. */
mp_status mp_chaos_wrap(mp_services *services, const char *key, uint32_t worker, mp_engine **engine, mp_error *error);

#endif
