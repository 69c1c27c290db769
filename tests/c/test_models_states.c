/* States of recurrent mixers: snapshots are kept where later prompts differ, and used without changing a byte; those of
 * least worth leave first. */
#include "model_fixture.h"
#include "models/generation/states.h"

static const int64_t mixers[TINY_LAYERS] = {1, 0, 1};

enum { PROMPT = 460, END = TINY_VOCAB - 1, ANSWER = 6 };

/* Runs a prompt of `count` tokens: the first `shared` are those of every prompt, the others its own. The tokens before
 * 130 and before 200 end messages. Returns the hash of the result, and the cached tokens in *cached. */
static uint64_t run(tiny_model *tiny, int shared, int count, uint64_t own, int *cached) {
    mp_test_random everybody = {5}, mine = {own};
    int32_t prompt[PROMPT];
    tiny_job job;
    for (int i = 0; i < count; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(i < shared ? &everybody : &mine) % END);
    prompt[129] = prompt[199] = END;
    const mp_text_args args = {.n_prompt = count,
                               .prompt = prompt,
                               .n_choices = 1,
                               .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 3,
                                            .max_tokens = ANSWER, .logprobs = 5, .ignore_eos = true}};
    tiny_job_make(tiny, &job, &args, 0);
    tiny_job_admit(tiny, &job);
    tiny_job_finish(tiny, &job);
    *cached = job.call->cached_tokens;
    const uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

/* The first prompt leaves snapshots after 128 tokens (end of the first message), 192 (of the last) and 448 (before its
 * last token). Later prompts begin after the last snapshot of their common part, and their bytes are those without. */
MP_TEST_SECONDS(models_states_of_messages_are_reused, 60) {
    static const mp_dtype types[] = {MP_F32};
    static const struct {
        int shared, count, cached;
    } cases[] = {{460, 460, 448}, {455, 460, 448}, {447, 460, 192}, {200, 300, 192}, {191, 300, 128}, {127, 200, 0}};
    tiny_model tiny;
    int cached;
    tiny_load(&tiny, tiny_decoder_spec_as(&(tiny_kind){.arch = "lfm2", .mixers = mixers}, types, 1, 61, -1),
              MP_COMPUTE_F32, 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t alone, again;
        tiny_trim(&tiny);
        alone = run(&tiny, cases[i].shared, cases[i].count, 70 + i, &cached);
        MP_CHECK_INT(cached, 0);
        tiny_trim(&tiny);
        run(&tiny, PROMPT, PROMPT, 0, &cached);
        again = run(&tiny, cases[i].shared, cases[i].count, 70 + i, &cached);
        if (cached != cases[i].cached)
            MP_FAIL("a prompt with %d common tokens reuses %d, expected %d", cases[i].shared, cached, cases[i].cached);
        MP_CHECK(alone == again);
    }
    tiny_trim(&tiny);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0);
    tiny_unload(&tiny);
}

/* A share of three snapshots: the one that saves fewest tokens leaves first, and use keeps a snapshot. */
MP_TEST(models_states_of_least_worth_leave_first) {
    enum { BYTES = 4096, SHARE = 3 };
    mp_budget budget = {.limit = 10 * SHARE * BYTES + BYTES};
    mp_error error;
    mp_states states;
    mp_state *state;
    uint64_t given = 0;
    mp_prefix_counters counters = {0};
    mp_states_init(&states, BYTES, BYTES, &budget, 10, &counters);
    MP_CHECK_OK(mp_state_create(&states, NULL, &state, &error), &error);
    const uint32_t gaps[] = {256, 2048, 64, 512};
    for (uint32_t id = 0; id < 4; id++) { /* the fourth replaces the third */
        state->memory[0] = (uint8_t)(10 + id);
        mp_snapshot_keep(&states, id, gaps[id], state);
    }
    MP_CHECK(mp_snapshot_exists(&states, 0) && mp_snapshot_exists(&states, 1) && mp_snapshot_exists(&states, 3));
    MP_CHECK(!mp_snapshot_exists(&states, 2) && !mp_snapshot_exists(&states, 4));
    mp_state_use use = mp_prefix_state_use(&counters);
    MP_CHECK(use.state_bytes == BYTES && use.snapshot_bytes == SHARE * BYTES && use.snapshots == SHARE);
    MP_CHECK_OK(mp_state_take_log(&states, state, &error), &error);
    MP_CHECK_INT(mp_prefix_state_use(&counters).state_bytes, 2 * BYTES);
    MP_CHECK_INT(*(const uint8_t *)mp_snapshot_use(&states, 0), 10); /* its worth is now that of a new one: 64 + 256 */
    mp_snapshot_keep(&states, 9, 128, state);                         /* 64 + 128: less than all others */
    MP_CHECK(!mp_snapshot_exists(&states, 9));
    MP_CHECK(mp_snapshot_evict(&states, &given) && !mp_snapshot_exists(&states, 0));
    mp_snapshot_keep(&states, 9, 128, state); /* there is room, and the others have lost 320 of their lead */
    MP_CHECK(mp_snapshot_exists(&states, 9));
    MP_CHECK(mp_snapshot_evict(&states, &given) && !mp_snapshot_exists(&states, 9));
    MP_CHECK(mp_snapshot_evict(&states, &given) && !mp_snapshot_exists(&states, 3));
    MP_CHECK_INT(mp_snapshot_forget(&states, 1), BYTES);
    MP_CHECK(!mp_snapshot_evict(&states, &given));
    MP_CHECK_INT(given, 3 * BYTES);
    use = mp_prefix_state_use(&counters);
    MP_CHECK(use.snapshot_bytes == 0 && use.snapshots == 0);
    mp_state_drop(&states, state);
    MP_CHECK_INT(mp_prefix_state_use(&counters).state_bytes, 0);
    mp_states_deinit(&states);
    MP_CHECK_INT(budget.used, 0);
}
