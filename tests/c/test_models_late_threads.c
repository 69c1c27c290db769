/* test_models_late_threads.c: the threads of a decoder's pass wait for each other wherever one needs the results of
 * another. One thread is always late (late_threads.h), and every result has the bits of a single thread. */
#include "base/sanitize.h"
#include "late_threads.h"
#include "model_fixture.h"

enum { JOBS = 3, ANSWER = 3 };

/* Rows that each thread prepares alone; rows that the threads share; and two row blocks, whose last layer computes the
 * last row only. The second job decodes in split mode: several KV blocks, on two threads. */
static const struct {
    int prompt;
    bool logits;
} jobs[JOBS] = {{3, true}, {290, false}, {60, true}};

static void run(tiny_model *tiny, uint64_t *hashes) {
    for (int i = 0; i < JOBS; i++) {
        int32_t prompt[300];
        tiny_job job;
        mp_test_random random = {7 + (uint64_t)i};
        for (int t = 0; t < jobs[i].prompt; t++)
            prompt[t] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
        const mp_text_args args = {
            .n_prompt = jobs[i].prompt,
            .prompt = prompt,
            .n_choices = 1,
            .want_prompt_logits = jobs[i].logits,
            .capture_values = TINY_VOCAB, /* thread 0 reads the logits that each thread wrote */
            .capture_records = 1000,
            .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = 3, .ignore_eos = true},
        };
        tiny_trim(tiny);
        tiny_job_make(tiny, &job, &args, 0);
        tiny_job_admit(tiny, &job);
        tiny_job_finish(tiny, &job);
        hashes[i] = tiny_job_hash(&job);
        mp_request_destroy(&job.call->base);
    }
}

static void check(const tiny_kind *kind, const mp_dtype *types, int count, mp_compute compute) {
    uint64_t expected[JOBS], got[JOBS];
    for (int threads = 1; threads <= 2; threads++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_decoder_spec_as(kind, types, count, 42, -1), compute, threads);
        for (int late = 0; late < threads; late++) {
            late_thread(late);
            run(&tiny, threads == 1 ? expected : got);
            late_thread(-1);
            for (int i = 0; threads > 1 && i < JOBS; i++)
                if (got[i] != expected[i])
                    MP_FAIL("%s, compute type %d: job %d differs if thread %d is late", kind->arch, (int)compute, i,
                            late);
        }
        tiny_unload(&tiny);
    }
}

MP_TEST_SECONDS(models_late_threads_of_decoders, 60) {
    static const mp_dtype quantised[] = {MP_Q8_0, MP_Q4_0, MP_Q6_K}, floats[] = {MP_F32};
    static const int64_t mixers[TINY_LAYERS] = {1, 0, 1}, scans[TINY_LAYERS] = {2, 0, 2},
                         state_spaces[TINY_LAYERS] = {3, 0, 3};
    static const tiny_kind kinds[] = {
        {.arch = "llama"},
        {.arch = "gemma3", .window = 80, .scaled = true},
        {.arch = "qwen3moe", .experts = 6},
        {.arch = "gpt_oss", .window = 80, .experts = 5, .biased = true},
        {.arch = "deepseek2", .experts = 6},
        {.arch = "olmo2"},
        {.arch = "gemma4", .window = 80},
        {.arch = "gemma4", .window = 80, .experts = 6},
        {.arch = "lfm3", .mixers = mixers},
        {.arch = "lfm2", .mixers = scans},
        {.arch = "qwen3next", .mixers = scans},
        {.arch = "lfm2", .mixers = state_spaces},
    };
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        check(&kinds[k], quantised, 3, MP_COMPUTE_AUTO);
        if (!MP_SANITIZED)
            check(&kinds[k], floats, 1, MP_COMPUTE_F32);
    }
}
