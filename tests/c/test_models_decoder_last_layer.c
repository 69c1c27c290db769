/* test_models_decoder_last_layer.c: the last layer of a decoder computes the rows whose logits are wanted, and only
 * stores the keys and values of the others. */
#include "counted_fixture.h"
#include "model_fixture.h"

enum {
    PROMPT = 100,
    HEAD = TINY_HIDDEN / TINY_HEADS,
    TILE = MP_ATTN_ROWS / (TINY_HEADS / TINY_KV_HEADS), /* rows of a prompt whose attention is computed together */
    LAST_TILE = PROMPT % TILE,
    QKV = (TINY_HEADS + 2 * TINY_KV_HEADS) * HEAD * TINY_HIDDEN, /* multiplications of a row */
    REST = TINY_HIDDEN * TINY_HIDDEN + 3 * TINY_FFN * TINY_HIDDEN,
    LOGITS = TINY_VOCAB * TINY_HIDDEN,
    BEFORE = TINY_LAYERS - 1,
};
_Static_assert(LAST_TILE > 1, "the last tile must have more rows than the one that is wanted");

static void make_job(const tiny_model *tiny, tiny_job *job, int seed, bool logits) {
    int32_t prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (i * 11 + seed) % (TINY_VOCAB - 1);
    const mp_text_args args = {.n_prompt = PROMPT,
                               .prompt = prompt,
                               .n_choices = 1,
                               .want_prompt_logits = logits,
                               .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .ignore_eos = true}};
    tiny_job_make(tiny, job, &args, 0);
    tiny_job_admit((tiny_model *)tiny, job);
}

typedef struct work {
    uint64_t products, queries;
} work;

/* Counts the work of `count` prompts, in one pass of all of them or, for one prompt, in slices of `slice` rows. */
static work work_of(int threads, int count, int slice, bool logits) {
    static const mp_dtype type = MP_F32;
    tiny_model tiny;
    tiny_job jobs[2];
    mp_plan plan = {.count = count};
    mp_outcome outcomes[MP_PLAN_MAX];
    tiny_load(&tiny, tiny_decoder_spec(&type, 1, 5), MP_COMPUTE_F32, threads);
    for (int i = 0; i < count; i++) {
        make_job(&tiny, &jobs[i], i, logits);
        plan.items[i] = &jobs[i].item;
        plan.amount[i] = PROMPT;
    }
    count_kernels();
    if (slice < PROMPT) {
        int steps = 1;
        while (tiny_job_step(&tiny, &jobs[0], slice) == MP_OUTCOME_MORE)
            steps++;
        MP_CHECK_INT(steps, (PROMPT + slice - 1) / slice);
    } else {
        tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    }
    const work found = {counted.products, counted.queries};
    mp_kernels_init();
    for (int i = 0; i < count; i++) {
        if (slice == PROMPT) {
            MP_CHECK_INT(outcomes[i], MP_OUTCOME_DONE);
            tiny.engine->ops->retire(tiny.engine, &jobs[i].item);
        }
        mp_request_destroy(&jobs[i].call->base);
    }
    tiny_unload(&tiny);
    return found;
}

/* A prompt whose last logits alone are wanted: its last layer projects all rows to keys and values, attends with the
 * rows of one tile, and computes one row of the rest and of the head. */
static void check_one_row(int threads, int count, int slice) {
    const uint64_t rows = (uint64_t)count * PROMPT, wanted = (uint64_t)count;
    const work found = work_of(threads, count, slice, false);
    MP_CHECK_INT(found.products, rows * (BEFORE + 1) * QKV + (rows * BEFORE + wanted) * REST + wanted * LOGITS);
    if (count == 1 && slice == PROMPT)
        MP_CHECK_INT(found.queries, TINY_HEADS * (rows * BEFORE + LAST_TILE));
    else /* borders of slices and blocks of rows move the tiles */
        MP_CHECK(found.queries <= TINY_HEADS * (rows * BEFORE + wanted * TILE));
}

MP_TEST(models_decoder_last_layer_work) {
    check_one_row(1, 1, PROMPT);
    check_one_row(2, 1, PROMPT);
    check_one_row(1, 2, PROMPT); /* two prompts in a pass */
    check_one_row(2, 1, 30);     /* the slices before the last want no row */
    check_one_row(1, 1, 33);     /* the last slice has one row */
}

/* The count tells the difference: a prompt whose logits are all wanted computes all rows. The head computes the last
 * row twice, among all rows and for the token that is sampled. */
MP_TEST(models_decoder_last_layer_work_for_all_logits) {
    const work found = work_of(1, 1, PROMPT, true);
    MP_CHECK_INT(found.products, PROMPT * ((uint64_t)TINY_LAYERS * (QKV + REST) + LOGITS) + LOGITS);
    MP_CHECK_INT(found.queries, TINY_HEADS * (uint64_t)PROMPT * TINY_LAYERS);
}
