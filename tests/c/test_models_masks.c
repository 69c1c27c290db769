/* Completions with masks: the tokens have the same bits whichever masks are late and whichever items are preempted,
 * each mask allows its token, and a request with late masks delays no other request. */
#include "model_fixture.h"

enum { JOBS = 4, CHOICES = 3, ANSWER = 20, WORDS = (TINY_VOCAB + 31) / 32, PROMPT = 70 };

/* Allow a third of the ids, which depends on position and choice; never allow the end-of-sequence token. */
static bool is_allowed(int choice, uint32_t index, int id) {
    return id % 3 == (int)(index + (uint32_t)choice) % 3 && id != TINY_VOCAB - 1;
}

static void fill_mask(int choice, uint32_t index, uint32_t bits[WORDS]) {
    memset(bits, 0, WORDS * sizeof *bits);
    for (int id = 0; id < TINY_VOCAB; id++)
        bits[id / 32] |= (uint32_t)is_allowed(choice, index, id) << id % 32;
}

/* Make a job; the last one has no masks. */
static void make_job(const tiny_model *tiny, tiny_job *job, int index) {
    mp_test_random random = {70 + (uint64_t)index};
    int32_t prompt[PROMPT];
    uint32_t first[WORDS];
    memset(first, 0xff, sizeof first);
    first[(TINY_VOCAB - 1) / 32] &= ~(1u << (TINY_VOCAB - 1) % 32);
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
    mp_text_args args = {
        .n_prompt = PROMPT,
        .prompt = prompt,
        .n_choices = index == 1 ? CHOICES : 1,
        .mask = index < JOBS - 1 ? first : NULL,
        .mask_bytes = index < JOBS - 1 ? (int64_t)sizeof first : 0,
        .sampling = {.temperature = index == 2 ? 0 : 1.5f, .top_p = index == 1 ? 0.9f : 1, .repetition_penalty = 1,
                     .seed = 5, .max_tokens = ANSWER, .logprobs = 3,
                     .ignore_eos = index == JOBS - 1},
    };
    tiny_job_make(tiny, job, &args, 0);
}

/* Deliver all masks that are due; with `late`, a random third of them. */
static void add_masks(tiny_job *job, mp_test_random *late) {
    mp_error error;
    for (int c = 0; job->call->masks && c < job->call->n_choices; c++) {
        uint32_t index = job->call->choices[c].token_count, bits[WORDS];
        if (index == 0 || job->call->masks[c].ready == index + 1 || (late && mp_test_random_u64(late) % 3))
            continue;
        fill_mask(c, index, bits);
        MP_CHECK_OK(mp_text_request_mask(job->call, c, index, bits, sizeof bits, &error), &error);
    }
}

/* Run all jobs. late: source of random delays of masks and of preemptions, or NULL for neither. Returns the number of
 * plans in which an item waited for its mask. */
static int run(tiny_model *tiny, mp_test_random *late, uint64_t hashes[JOBS]) {
    tiny_job jobs[JOBS];
    mp_error error;
    int waited = 0;
    for (int i = 0; i < JOBS; i++) {
        make_job(tiny, &jobs[i], i);
        MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &jobs[i].item, &error), &error);
    }
    for (int open = JOBS, steps = 0; open > 0; steps++) {
        mp_item *items[JOBS];
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        int n = 0;
        MP_CHECK(steps < 4000);
        for (int i = 0; i < JOBS; i++) {
            if (jobs[i].done)
                continue;
            add_masks(&jobs[i], late);
            if (late && mp_test_random_u64(late) % 11 == 0) {
                tiny->engine->ops->preempt(tiny->engine, &jobs[i].item);
                MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &jobs[i].item, &error), &error);
            }
            items[n++] = &jobs[i].item;
        }
        tiny->engine->ops->plan(tiny->engine, items, n, UINT64_MAX, &plan);
        MP_CHECK(plan.count > 0 || plan.masks);
        MP_CHECK(plan.count > 0 || jobs[JOBS - 1].done); /* an item without masks never waits */
        waited += plan.masks;
        if (plan.count == 0)
            continue;
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
        for (int p = 0; p < plan.count; p++) {
            MP_CHECK(outcomes[p] == MP_OUTCOME_MORE || outcomes[p] == MP_OUTCOME_DONE ||
                     outcomes[p] == MP_OUTCOME_WAIT_MASK);
            if (outcomes[p] != MP_OUTCOME_DONE)
                continue;
            tiny_job *job = (tiny_job *)(void *)((uint8_t *)plan.items[p] - offsetof(tiny_job, item));
            job->done = true;
            open--;
            tiny->engine->ops->retire(tiny->engine, plan.items[p]);
        }
    }
    for (int i = 0; i < JOBS; i++) {
        for (int c = 0; jobs[i].call->masks && c < jobs[i].call->n_choices; c++)
            for (uint32_t t = 1; t < jobs[i].call->choices[c].token_count; t++)
                MP_CHECK(is_allowed(c, t, jobs[i].call->choices[c].tokens[t].id));
        hashes[i] = tiny_job_hash(&jobs[i]);
        mp_request_destroy(&jobs[i].call->base);
    }
    return waited;
}

MP_TEST_SECONDS(models_late_masks_give_the_same_tokens, 120) {
    static const mp_dtype types[] = {MP_Q8_0};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 47), MP_COMPUTE_AUTO, 1);
    uint64_t before = mp_alloc_bytes(MP_TAG_REQUEST), expected[JOBS], got[JOBS];
    MP_CHECK_INT(run(&tiny, NULL, expected), 0);
    for (uint64_t seed = 0; seed < (uint64_t)mp_test_rounds(12); seed++) {
        mp_test_random late = {seed};
        MP_CHECK(run(&tiny, &late, got) > 0);
        for (int i = 0; i < JOBS; i++)
            MP_CHECK(got[i] == expected[i]);
    }
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_REQUEST), before);
    tiny_unload(&tiny);
}

MP_TEST(models_invalid_masks_are_refused) {
    static const mp_dtype types[] = {MP_Q8_0};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 47), MP_COMPUTE_AUTO, 1);
    tiny_job with, without;
    mp_error error;
    uint32_t bits[WORDS + 1] = {0};
    make_job(&tiny, &with, 0);
    make_job(&tiny, &without, JOBS - 1);
    int64_t right = WORDS * (int64_t)sizeof *bits;
    MP_CHECK_INT(mp_text_request_mask(with.call, 0, 1, bits, right + 4, &error), MP_INVALID_ARGUMENT);
    MP_CHECK_INT(mp_text_request_mask(with.call, 1, 1, bits, right, &error), MP_INVALID_ARGUMENT);
    MP_CHECK_INT(mp_text_request_mask(with.call, -1, 1, bits, right, &error), MP_INVALID_ARGUMENT);
    MP_CHECK_HAS(error.message, "choice must be 0 to 0, got -1");
    MP_CHECK_INT(mp_text_request_mask(without.call, 0, 1, bits, right, &error), MP_INVALID_ARGUMENT);
    MP_CHECK_HAS(error.message, "without a mask");
    MP_CHECK_OK(mp_text_request_mask(with.call, 0, 1, bits, right, &error), &error);
    mp_request_destroy(&with.call->base);
    mp_request_destroy(&without.call->base);
    tiny_unload(&tiny);
}
