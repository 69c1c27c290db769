/* estimate_fixture.h: checks of the running estimates of speed that engines keep. */
#ifndef ESTIMATE_FIXTURE_H
#define ESTIMATE_FIXTURE_H

#include <stdatomic.h>

#include "base/sys.h"
#include "model_fixture.h"

/* An estimate far above any measured time: after an update, only the share of the old value counts. */
#define OLD_ESTIMATE ((uint64_t)1 << 58)

/* Check that an estimate of OLD_ESTIMATE was updated `times` times, each of which kept `share` of it. */
static inline void check_share(const _Atomic uint64_t *estimate, double share, int times) {
    const double expected = (double)OLD_ESTIMATE * pow(share, times);
    MP_CHECK_NEAR((double)atomic_load(estimate) / expected, 1, 0.001);
}

#ifdef MP_SEAM
static inline uint64_t frozen_clock(void) { return 1000000000; }
#endif

/* Run one request with a clock that stands still: the measured time is 0, and an estimate of 1 stays 1. */
static inline void check_least(_Atomic uint64_t *estimate, void (*run)(void *arg), void *arg) {
#ifdef MP_SEAM
    atomic_store(estimate, 1);
    mp_sys_table.now_ns = frozen_clock;
    run(arg);
    mp_sys_table = mp_sys_real;
    MP_CHECK_INT(atomic_load(estimate), 1);
#else
    (void)estimate, (void)run, (void)arg;
#endif
}

typedef struct planned_step { /* a step of one item */
    tiny_model *tiny;
    mp_item *item;
    uint32_t amount;
    int earlier; /* readings of the clock before the one from which the time is measured */
} planned_step;

#ifdef MP_SEAM
static int clock_left;
static uint64_t step_ns;
static inline uint64_t clock_of_a_step(void) { return 1000000000 + (clock_left-- < 0 ? step_ns : 0); }
#endif

/* Run a step that takes `ns` by a clock that advances once. The estimate `old` becomes `expected`. */
static inline void check_learned(_Atomic uint64_t *estimate, uint64_t old, uint64_t ns, uint64_t expected,
                                 const planned_step *step) {
    mp_plan plan = {.count = 1, .items = {step->item}, .amount = {step->amount}, .threads = 1};
    mp_outcome outcome;
    atomic_store(estimate, old);
#ifdef MP_SEAM
    clock_left = step->earlier;
    step_ns = ns;
    mp_sys_table.now_ns = clock_of_a_step;
#endif
    step->tiny->engine->ops->step(step->tiny->engine, &step->tiny->lease, &plan, &outcome);
#ifdef MP_SEAM
    mp_sys_table = mp_sys_real;
    MP_CHECK_INT(atomic_load(estimate), expected);
#else
    (void)ns, (void)expected;
#endif
    MP_CHECK(outcome == MP_OUTCOME_MORE || outcome == MP_OUTCOME_DONE);
}

#endif
