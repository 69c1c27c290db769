/* encoder_fixture.h: texts of tiny encoders, and the numeric contract as a check of any of them. */
#ifndef ENCODER_FIXTURE_H
#define ENCODER_FIXTURE_H

#include "model_fixture.h"
#include "models/encoder_dedup.h"

enum { TEXTS = 37, WIDTH = TINY_WIDTH, POSITIONS = TINY_POSITIONS };

typedef struct texts {
    int32_t ids[TEXTS * POSITIONS];
    int64_t offsets[TEXTS + 1];
} texts;

static inline void make_texts(texts *all) {
    mp_test_random random = {3};
    for (int t = 0; t < TEXTS; t++) {
        int length = t == 5 ? POSITIONS : 1 + (int)(mp_test_random_u64(&random) % 40);
        all->offsets[t + 1] = all->offsets[t] + length;
        for (int i = 0; i < length; i++)
            all->ids[all->offsets[t] + i] = 8 + (int32_t)(mp_test_random_u64(&random) % (TINY_VOCAB - 8));
    }
}

/* Texts [first, first + count) as one call, run to its end. */
static inline mp_outcome run(tiny_model *tiny, const texts *all, int first, int count, uint64_t budget_ns, float *out) {
    mp_error error;
    mp_embed_call *call;
    int64_t offsets[TEXTS + 1];
    for (int t = 0; t <= count; t++)
        offsets[t] = all->offsets[first + t] - all->offsets[first];
    MP_CHECK_OK(mp_embed_call_create(count, all->ids + all->offsets[first], offsets, NULL, &call, &error), &error);
    mp_item item = {.call = &call->base}, *items[1] = {&item};
    uint64_t cost;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item.call, &cost, &item.total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &item, &error), &error);
    mp_plan plan;
    mp_outcome outcomes[MP_PLAN_MAX];
    do {
        tiny->engine->ops->plan(tiny->engine, items, 1, budget_ns, &plan);
        MP_CHECK_INT(plan.count, 1);
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    } while (outcomes[0] == MP_OUTCOME_MORE);
    tiny->engine->ops->retire(tiny->engine, &item);
    if (outcomes[0] == MP_OUTCOME_FAILED)
        MP_CHECK_INT(item.error.code, MP_NUMERIC);
    else
        memcpy(out, call->vectors, (size_t)count * WIDTH * sizeof(float));
    mp_call_destroy(&call->base);
    return outcomes[0];
}

/* The same bits alone, among others, in steps of any size and on any number of lanes. */
static inline void check_grouping(mp_spec *(*make)(const void *arg), const void *arg, mp_compute compute) {
    static texts all;
    static float alone[TEXTS * WIDTH], together[TEXTS * WIDTH];
    make_texts(&all);
    for (int lanes = 1; lanes <= 4; lanes++) {
        tiny_model tiny;
        tiny_load(&tiny, make(arg), compute, lanes);
        mp_encoder_engine_dedup(tiny.engine)->capacity = 0; /* every vector is computed, none is a recent result */
        for (int t = 0; t < TEXTS; t++)
            MP_CHECK_INT(run(&tiny, &all, t, 1, UINT64_MAX, together + t * WIDTH), MP_OUTCOME_DONE);
        if (lanes == 1)
            memcpy(alone, together, sizeof alone);
        MP_CHECK(memcmp(alone, together, sizeof alone) == 0);
        for (uint64_t budget_ns = 1; budget_ns < 1000000000; budget_ns *= 1000) {
            memset(together, 0, sizeof together);
            MP_CHECK_INT(run(&tiny, &all, 0, TEXTS, budget_ns, together), MP_OUTCOME_DONE);
            MP_CHECK(memcmp(alone, together, sizeof alone) == 0);
        }
        tiny_unload(&tiny);
    }
    for (int i = 0; i < TEXTS * WIDTH; i++)
        MP_CHECK(isfinite(alone[i]));
}

#endif
