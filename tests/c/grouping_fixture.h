/* grouping_fixture.h: embedding requests, and a check of the numeric contract for any embedding model. */
#ifndef GROUPING_FIXTURE_H
#define GROUPING_FIXTURE_H

#include "base/sanitize.h"
#include "late_threads.h"
#include "model_fixture.h"

/* Run a request until it ends. Sets *code if it fails. */
static inline mp_outcome end_call(tiny_model *tiny, mp_request *call, uint64_t budget_ns, mp_status *code) {
    mp_error error;
    mp_item item = {.request = call}, *items[1] = {&item};
    uint64_t cost;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item.request, &cost, &item.total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &item, &error), &error);
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    do {
        tiny->engine->ops->plan(tiny->engine, items, 1, budget_ns, &plan);
        MP_CHECK_INT(plan.count, 1);
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    } while (outcomes[0] == MP_OUTCOME_MORE);
    tiny->engine->ops->retire(tiny->engine, &item);
    *code = item.error.code;
    return outcomes[0];
}

/* Run a request to its end. Returns MP_OUTCOME_DONE, or MP_OUTCOME_FAILED because of NaN. */
static inline mp_outcome run_call(tiny_model *tiny, mp_request *call, uint64_t budget_ns) {
    mp_status code;
    const mp_outcome outcome = end_call(tiny, call, budget_ns, &code);
    if (outcome != MP_OUTCOME_DONE) {
        MP_CHECK_INT(outcome, MP_OUTCOME_FAILED);
        MP_CHECK_INT(code, MP_NUMERIC);
    }
    return outcome;
}

typedef struct grouped { /* a model, `count` inputs, and functions that run requests with these inputs */
    int count, width;
    mp_compute compute;
    mp_spec *(*make)(const void *arg);
    const void *arg, *inputs;
    mp_outcome (*run)(tiny_model *tiny, const void *inputs, int first, int count, uint64_t budget_ns, float *out);
    void (*loaded)(tiny_model *tiny); /* called after each load; or NULL */
} grouped;

/* Check that each input yields the same bits alone and in a batch, in steps of any size and with any number of threads.
 * A sanitizer build takes one and three threads, and with three every fifth input alone. alone: out, [count, width]. */
static inline void check_groups(const grouped *of, float *alone) {
    const size_t bytes = (size_t)of->count * (size_t)of->width * sizeof(float);
    float *together = malloc(bytes);
    MP_CHECK(together);
    for (int threads = 1; threads <= 4; threads += MP_SANITIZED ? 2 : 1) {
        tiny_model tiny;
        tiny_load(&tiny, of->make(of->arg), of->compute, threads);
        if (of->loaded)
            of->loaded(&tiny);
        for (int i = 0; i < of->count; i += threads > 1 ? MP_TEST_SHARE : 1) {
            float *out = threads > 1 ? together + i * of->width : alone + i * of->width;
            MP_CHECK_INT(of->run(&tiny, of->inputs, i, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
            MP_CHECK(memcmp(alone + i * of->width, out, (size_t)of->width * sizeof *out) == 0);
        }
        for (uint64_t budget_ns = 1; budget_ns < 1000000000; budget_ns *= 1000) {
            memset(together, 0, bytes);
            MP_CHECK_INT(of->run(&tiny, of->inputs, 0, of->count, budget_ns, together), MP_OUTCOME_DONE);
            MP_CHECK(memcmp(alone, together, bytes) == 0);
        }
        tiny_unload(&tiny);
    }
    for (int i = 0; i < of->count * of->width; i++)
        MP_CHECK(isfinite(alone[i]));
    free(together);
}

/* Check that `count` inputs from `first` on, each alone on two threads, have the bits of one thread, whichever thread
 * is late. budget_ns: of each step. */
static inline void check_late_threads(const grouped *of, int first, int count, uint64_t budget_ns) {
    const size_t bytes = (size_t)of->width * sizeof(float);
    float *expected = malloc((size_t)count * bytes), *out = malloc(bytes);
    MP_CHECK(expected && out);
    for (int threads = 1; threads <= 2; threads++) {
        tiny_model tiny;
        tiny_load(&tiny, of->make(of->arg), of->compute, threads);
        if (of->loaded)
            of->loaded(&tiny);
        for (int late = 0; late < threads; late++) {
            late_thread(late);
            for (int i = 0; i < count; i++) {
                float *to = threads == 1 ? expected + i * of->width : out;
                MP_CHECK_INT(of->run(&tiny, of->inputs, first + i, 1, budget_ns, to), MP_OUTCOME_DONE);
                if (memcmp(expected + i * of->width, to, bytes) != 0)
                    MP_FAIL("input %d differs if thread %d of %d is late", first + i, late, threads);
            }
        }
        late_thread(-1);
        tiny_unload(&tiny);
    }
    free(expected);
    free(out);
}

#endif
