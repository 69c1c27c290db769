/* encoder_fixture.h: texts for tiny encoders, and a check of the numeric contract for any encoder. */
#ifndef ENCODER_FIXTURE_H
#define ENCODER_FIXTURE_H

#include "grouping_fixture.h"
#include "request_fixture.h"
#include "models/encoder/engine.h"

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

/* Embed texts [first, first + count) as one request. out: [count, WIDTH]. */
static inline mp_outcome run(tiny_model *tiny, const void *inputs, int first, int count, uint64_t budget_ns,
                             float *out) {
    const texts *all = inputs;
    mp_error error;
    mp_embedding_request *call;
    int64_t offsets[TEXTS + 1];
    for (int t = 0; t <= count; t++)
        offsets[t] = all->offsets[first + t] - all->offsets[first];
    MP_CHECK_OK(make_embedding_request(count, all->ids + all->offsets[first], offsets, NULL, &call, &error), &error);
    const mp_outcome outcome = run_call(tiny, &call->base, budget_ns);
    if (outcome == MP_OUTCOME_DONE)
        memcpy(out, call->vectors, (size_t)count * WIDTH * sizeof(float));
    mp_request_destroy(&call->base);
    return outcome;
}

static inline mp_dedup_table *dedup_of(mp_engine *engine) { return &((mp_encoder_engine_state *)engine)->dedup; }
static inline mp_recent *recent_of(mp_engine *engine) { return &((mp_encoder_engine_state *)engine)->model->recent; }

static inline void compute_all(tiny_model *tiny) { /* keep no recent vectors */
    recent_of(tiny->engine)->most_bytes = 0;
}

static inline void check_grouping(mp_spec *(*make)(const void *arg), const void *arg, mp_compute compute) {
    static texts all;
    static float alone[TEXTS * WIDTH];
    make_texts(&all);
    check_groups(&(grouped){TEXTS, WIDTH, compute, make, arg, &all, run, compute_all}, alone);
}

/* Check two texts: one of more rows than a thread prepares alone, and one that is shorter. */
static inline void check_late(mp_spec *(*make)(const void *arg), const void *arg, mp_compute compute) {
    static texts all;
    make_texts(&all);
    check_late_threads(&(grouped){TEXTS, WIDTH, compute, make, arg, &all, run, compute_all}, 5, 2,
                       UINT64_MAX);
}

#endif
