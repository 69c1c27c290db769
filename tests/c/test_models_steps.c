/* test_models_steps.c: single steps of a decoder plan and compute the right rows, publish text, end completions, and
 * keep the states of their items. */
#include <stdatomic.h>

#include "base/arena.h"
#include "estimate_fixture.h"
#include "late_threads.h"
#include "missing_fixture.h"
#include "speculation_fixture.h"
#include "models/decoder/engine.h"

enum { PROMPT = 200, ANSWER = 12, WORDS = (TINY_VOCAB + 31) / 32 };

static const mp_dtype types[] = {MP_Q8_0};
static const mp_sampling greedy = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = 0,
                                   .ignore_eos = true};

static void load_tiny(tiny_model *tiny) {
    tiny_load(tiny, tiny_decoder_spec(types, 1, 93), MP_COMPUTE_AUTO, 1);
}

/* Make a job with a random prompt. */
static void make(const tiny_model *tiny, tiny_job *job, uint64_t seed, const mp_text_args *more) {
    int32_t prompt[PROMPT];
    mp_test_random random = {seed};
    mp_text_args args = *more;
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
    args.n_prompt = PROMPT;
    args.prompt = prompt;
    args.n_choices = args.n_choices ? args.n_choices : 1;
    if (args.sampling.max_tokens == 0)
        args.sampling = greedy;
    tiny_job_make(tiny, job, &args, 0);
}

static void run(tiny_model *tiny, tiny_job *job, const mp_text_args *more) {
    make(tiny, job, 5, more);
    tiny_job_admit(tiny, job);
    tiny_job_finish(tiny, job);
}

/* ---- text and ends ----------------------------------------------------------------------------------------------- */

/* Every step publishes one more token with its letter. */
MP_TEST(models_steps_publish_text) {
    tiny_model tiny;
    tiny_job job;
    load_tiny(&tiny);
    make(&tiny, &job, 5, &(mp_text_args){0});
    tiny_job_admit(&tiny, &job);
    const mp_choice *choice = &job.call->choices[0];
    for (uint32_t t = 1; t <= ANSWER; t++) {
        MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), t < ANSWER ? MP_OUTCOME_MORE : MP_OUTCOME_DONE);
        MP_CHECK_INT(choice->token_count, t);
        MP_CHECK_INT(choice->text_bytes, t);
        MP_CHECK_INT(choice->text[t - 1], 'a' + choice->tokens[t - 1].id % 26);
        MP_CHECK_INT(choice->finish, t < ANSWER ? MP_FINISH_NONE : MP_FINISH_LENGTH);
    }
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* A stop string or stop id ends a completion at its first occurrence; min_tokens bars stop ids, not stop strings. */
MP_TEST_SECONDS(models_steps_end_at_stops, 60) {
    tiny_model tiny;
    tiny_job plain, job;
    load_tiny(&tiny);
    run(&tiny, &plain, &(mp_text_args){0});
    const mp_choice *all = &plain.call->choices[0];
    char text[ANSWER + 1] = "";
    memcpy(text, all->text, ANSWER);
    for (int at = 0; at + 2 <= ANSWER; at += 3) {
        const char *const stop[] = {"@@", text + at};
        static const int32_t stop_bytes[] = {2, 2};
        char pair[3] = {text[at], text[at + 1], 0};
        const int first = (int)(strstr(text, pair) - text);
        run(&tiny, &job, &(mp_text_args){.n_stop = 2, .stop = stop, .stop_bytes = stop_bytes});
        const mp_choice *choice = &job.call->choices[0];
        MP_CHECK_INT(choice->finish, MP_FINISH_STOP);
        MP_CHECK_INT(choice->stop_index, 1);
        MP_CHECK_INT(choice->token_count, first + 2);
        MP_CHECK_INT(choice->text_bytes, first);
        MP_CHECK(memcmp(choice->text, text, (size_t)first) == 0);
        mp_request_destroy(&job.call->base);
    }
    const int32_t stop_ids[] = {TINY_VOCAB - 2, all->tokens[0].id};
    for (int least = 0; least < 4; least += 3) {
        mp_sampling sampling = greedy;
        sampling.min_tokens = least;
        run(&tiny, &job, &(mp_text_args){.n_stop_ids = 2, .stop_ids = stop_ids, .sampling = sampling});
        const mp_choice *choice = &job.call->choices[0];
        MP_CHECK((int)choice->token_count >= least);
        for (uint32_t t = 0; t < choice->token_count; t++)
            MP_CHECK(choice->tokens[t].id != stop_ids[0] && choice->tokens[t].id != stop_ids[1]);
        if (least == 0) {
            MP_CHECK_INT(choice->token_count, 0);
            MP_CHECK_INT(choice->finish, MP_FINISH_STOP);
            MP_CHECK_INT(choice->stop_index, 1);
        }
        mp_request_destroy(&job.call->base);
    }
    mp_request_destroy(&plain.call->base);
    tiny_unload(&tiny);
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* The first prefill gets the rows for which there is time, at least 16; the others share what is left. */
MP_TEST(models_steps_plan_prefills) {
    enum { ROW_NS = 1000 };
    static const struct {
        uint64_t rows; /* for which there is time */
        int count;
        uint32_t amount[3];
    } cases[] = {
        {100 * PROMPT, 3, {PROMPT, PROMPT, 512 - 2 * PROMPT}},
        {PROMPT + 5, 2, {PROMPT, 5}},
        {PROMPT, 1, {PROMPT}},
        {100, 1, {100}},
        {17, 1, {17}},
        {5, 1, {16}},
        {0, 1, {16}},
    };
    tiny_model tiny;
    tiny_job jobs[3];
    mp_item *items[3];
    load_tiny(&tiny);
    mp_decoder *model = (mp_decoder *)tiny.model;
    atomic_store(&model->row_ns, ROW_NS - 1); /* the plan rounds up */
    atomic_store(&model->decode_ns, 0);
    for (int i = 0; i < 3; i++) {
        make(&tiny, &jobs[i], 20 + (uint64_t)i, &(mp_text_args){0});
        tiny_job_admit(&tiny, &jobs[i]);
        items[i] = &jobs[i].item;
    }
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        mp_plan plan = {0};
        uint64_t rows = 0;
        tiny.engine->ops->plan(tiny.engine, items, 3, cases[c].rows * ROW_NS, &plan);
        MP_CHECK_INT(plan.count, cases[c].count);
        for (int i = 0; i < plan.count; i++) {
            MP_CHECK(plan.items[i] == items[i]);
            MP_CHECK_INT(plan.amount[i], cases[c].amount[i]);
            rows += plan.amount[i];
        }
        MP_CHECK_INT(plan.cost_ns, rows * ROW_NS);
    }
    for (int i = 0; i < 3; i++) {
        tiny.engine->ops->retire(tiny.engine, items[i]);
        mp_request_destroy(&jobs[i].call->base);
    }
    tiny_unload(&tiny);
}

/* A step computes nothing for an item that was cancelled after the plan. */
MP_TEST(models_steps_skip_cancelled_items) {
    tiny_model tiny;
    tiny_job jobs[2];
    mp_outcome outcomes[MP_PLAN_MAX];
    mp_plan plan = {.count = 2, .amount = {PROMPT, PROMPT}};
    load_tiny(&tiny);
    for (int i = 0; i < 2; i++) {
        make(&tiny, &jobs[i], 30 + (uint64_t)i, &(mp_text_args){0});
        tiny_job_admit(&tiny, &jobs[i]);
        plan.items[i] = &jobs[i].item;
    }
    atomic_store(&jobs[0].item.cancelled, 1);
    tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    MP_CHECK_INT(tiny.engine->work.rows, PROMPT);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_MORE);
    MP_CHECK_INT(jobs[0].call->choices[0].token_count, 0);
    MP_CHECK_INT(jobs[1].call->choices[0].token_count, 1);
    for (int i = 0; i < 2; i++) {
        tiny.engine->ops->retire(tiny.engine, &jobs[i].item);
        MP_CHECK_INT(jobs[i].call->choices[0].finish, MP_FINISH_CANCELLED);
        mp_request_destroy(&jobs[i].call->base);
    }
    tiny_unload(&tiny);
}

/* A step stops between layers once no request wants its result, on all threads, also if thread 0, which polls, is late.
 * It publishes nothing, and a later step computes the same rows. */
MP_TEST(models_steps_stop_between_layers) {
    static const _Atomic int raised = 1;
    tiny_job plain = {0};
    for (int threads = 0; threads <= 2; threads++) { /* 0: the reference, which is never stopped */
        tiny_model tiny;
        tiny_job job;
        tiny_load(&tiny, tiny_decoder_spec(types, 1, 93), MP_COMPUTE_AUTO, threads ? threads : 1);
        make(&tiny, &job, 5, &(mp_text_args){0});
        tiny_job_admit(&tiny, &job);
        late_thread_of(threads);
        for (uint32_t t = 0; t < 2 && threads; t++) { /* within the prompt, and after the first token */
            tiny.lease.cancelled = &raised;
            for (int times = 0; times < 2; times++) {
                MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_MORE);
                MP_CHECK_INT(job.call->choices[0].token_count, t);
                MP_CHECK_INT(job.item.cursor, t ? PROMPT + t : 0);
                MP_CHECK_INT(tiny.engine->work.rows, t ? PROMPT : 0);
            }
            tiny.lease.cancelled = NULL;
            MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_MORE);
        }
        tiny_job_finish(&tiny, &job);
        late_thread(-1);
        MP_CHECK(threads == 0 || tiny_job_hash(&plain) == tiny_job_hash(&job));
        if (threads)
            mp_request_destroy(&job.call->base);
        else
            plain = job;
        tiny_unload(&tiny);
    }
    mp_request_destroy(&plain.call->base);
}

/* A pass of many rows updates the time of a row, and a pass of few rows the time of a pass. */
MP_TEST(models_steps_learn_the_exact_time) {
    tiny_model tiny;
    tiny_job job;
    load_tiny(&tiny);
    mp_decoder *model = (mp_decoder *)tiny.model;
    make(&tiny, &job, 5, &(mp_text_args){0});
    tiny_job_admit(&tiny, &job);
    check_learned(&model->row_ns, 2000, 100000, (3 * 2000 + 1000) / 4 + 1, &(planned_step){&tiny, &job.item, 100, 1});
    check_learned(&model->row_ns, 0, 100000, 1000, &(planned_step){&tiny, &job.item, 100, 1});
    check_learned(&model->decode_ns, 2000, 8000, (3 * 2000 + 8000) / 4 + 1, &(planned_step){&tiny, &job.item, 2, 1});
    check_learned(&model->decode_ns, 0, 8000, 8000, &(planned_step){&tiny, &job.item, 2, 1});
    tiny_job_finish(&tiny, &job);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* ---- states ------------------------------------------------------------------------------------------------------ */

/* The engine counts its items through preemptions. A retired item has no state, so that it may be retired again. */
MP_TEST(models_steps_count_admitted_items) {
    tiny_model tiny;
    tiny_job jobs[2];
    mp_error error;
    load_tiny(&tiny);
    const mp_text_engine *engine = (const mp_text_engine *)tiny.engine;
    const mp_engine_ops *ops = tiny.engine->ops;
    for (int i = 0; i < 2; i++) {
        make(&tiny, &jobs[i], 40 + (uint64_t)i, &(mp_text_args){0});
        ops->retire(tiny.engine, &jobs[i].item); /* never admitted */
        tiny_job_admit(&tiny, &jobs[i]);
        MP_CHECK_INT(engine->admitted, i + 1);
    }
    for (int round = 0; round < 3; round++) {
        ops->preempt(tiny.engine, &jobs[0].item);
        MP_CHECK_INT(engine->admitted, 1);
        if (round == 2)
            break;
        MP_CHECK_OK(ops->admit(tiny.engine, &jobs[0].item, &error), &error);
        MP_CHECK_INT(engine->admitted, 2);
    }
    for (int i = 0; i < 2; i++)
        for (int times = 0; times < 2; times++) {
            ops->retire(tiny.engine, &jobs[i].item);
            MP_CHECK(!jobs[i].item.state && !jobs[i].item.abandon);
            MP_CHECK_INT(engine->admitted, i == 0);
        }
    for (int i = 0; i < 2; i++)
        mp_request_destroy(&jobs[i].call->base);
    tiny_unload(&tiny);
}

/* ---- deferred samples -------------------------------------------------------------------------------------------- */

/* Make a job whose second token waits for its mask. */
static void make_waiting(tiny_model *tiny, tiny_job *job) {
    uint32_t every[WORDS];
    memset(every, 0xFF, sizeof every);
    mp_sampling sampling = greedy;
    sampling.ignore_eos = false;
    make(tiny, job, 50, &(mp_text_args){.mask = every, .mask_bytes = sizeof every, .sampling = sampling});
    tiny_job_admit(tiny, job);
    MP_CHECK_INT(tiny_job_step(tiny, job, 512), MP_OUTCOME_MORE);
    MP_CHECK_INT(tiny_job_step(tiny, job, 512), MP_OUTCOME_WAIT_MASK);
    MP_CHECK_INT(job->call->choices[0].token_count, 1);
}

MP_TEST(models_steps_fail_if_a_late_mask_allows_nothing) {
    static const uint32_t none[WORDS];
    tiny_model tiny;
    tiny_job job;
    mp_error error;
    load_tiny(&tiny);
    make_waiting(&tiny, &job);
    MP_CHECK_OK(mp_text_request_mask(job.call, 0, 1, none, sizeof none, &error), &error);
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_FAILED);
    MP_CHECK_INT(job.item.error.code, MP_NUMERIC);
    MP_CHECK_INT(job.call->choices[0].token_count, 1);
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* An item that has failed samples no token of its other completions, although their masks are set. */
MP_TEST(models_steps_of_a_failed_item_sample_nothing) {
    static const uint32_t none[WORDS];
    uint32_t every[WORDS];
    tiny_model tiny;
    tiny_job job;
    mp_error error;
    memset(every, 0xFF, sizeof every);
    mp_sampling sampling = greedy;
    sampling.ignore_eos = false;
    load_tiny(&tiny);
    make(&tiny, &job, 50,
         &(mp_text_args){.n_choices = 2, .mask = every, .mask_bytes = sizeof every, .sampling = sampling});
    tiny_job_admit(&tiny, &job);
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_MORE);
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_WAIT_MASK);
    for (int c = 0; c < 2; c++) {
        MP_CHECK_INT(job.call->choices[c].token_count, 1);
        MP_CHECK_OK(mp_text_request_mask(job.call, c, 1, c ? every : none, sizeof every, &error), &error);
    }
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_FAILED);
    for (int c = 0; c < 2; c++)
        MP_CHECK_INT(job.call->choices[c].token_count, 1);
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* The scratch of a deferred sample is charged: without memory the item waits, and continues when there is some. */
MP_TEST(models_steps_wait_for_the_scratch_of_a_late_mask) {
    uint32_t only[WORDS] = {0};
    tiny_model tiny;
    tiny_job job;
    mp_error error;
    load_tiny(&tiny);
    make_waiting(&tiny, &job);
    mp_text_engine *engine = (mp_text_engine *)tiny.engine;
    /* candidates and two rows of logits */
    const size_t least = TINY_VOCAB * (sizeof(mp_candidate) + 2 * sizeof(float));
    MP_CHECK(mp_sample_bytes(engine->model) >= least);
    only[2] = 1u << 9;
    MP_CHECK_OK(mp_text_request_mask(job.call, 0, 1, only, sizeof only, &error), &error);
    mp_engine_release(&engine->arena, engine->budget, &engine->charged);
    tiny.budget.limit = tiny.budget.used;
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_WAIT_MEMORY);
    MP_CHECK_INT(job.item.error.code, MP_MEMORY_EXHAUSTED);
    MP_CHECK_INT(job.call->choices[0].token_count, 1);
    tiny.budget.limit = UINT64_MAX;
    tiny_job_step(&tiny, &job, 512);
    MP_CHECK_INT(job.call->choices[0].token_count, 2);
    MP_CHECK_INT(job.call->choices[0].tokens[1].id, 2 * 32 + 9);
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* So is the scratch of a pass, also if there are blocks for its rows. */
MP_TEST(models_steps_wait_for_the_scratch_of_a_pass) {
    tiny_model tiny;
    tiny_job job;
    load_tiny(&tiny);
    make(&tiny, &job, 5, &(mp_text_args){0});
    tiny_job_admit(&tiny, &job);
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 5), MP_OUTCOME_MORE);
    mp_text_engine *engine = (mp_text_engine *)tiny.engine;
    mp_engine_release(&engine->arena, engine->budget, &engine->charged);
    tiny.budget.limit = tiny.budget.used;
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 5), MP_OUTCOME_WAIT_MEMORY);
    MP_CHECK_INT(job.item.error.code, MP_MEMORY_EXHAUSTED);
    MP_CHECK_INT(job.item.cursor, 5);
    tiny.budget.limit = UINT64_MAX;
    tiny_job_finish(&tiny, &job);
    MP_CHECK_INT(job.call->choices[0].token_count, ANSWER);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static double epsilon;

static void add_latents(tiny_file *file) {
    tiny_tensor(file, "blk.0.attn_kv_a_mqa.weight", MP_F32, 32, TINY_HIDDEN, 1, 0);
}

static void set_epsilon(tiny_file *file) { tiny_float(file->spec, "mpool.latent_epsilon", epsilon); }

static void add_input_biases(tiny_file *file) {
    for (int l = 0; l < TINY_LAYERS; l++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.attn_q_a.bias", l);
        tiny_tensor(file, name, MP_F32, 1, TINY_RANK, 1, 0);
    }
}

MP_TEST(models_steps_refuse_biases_of_latents) {
    mp_error error;
    const tiny_kind kind = {.arch = "deepseek2", .experts = 6, .more = add_input_biases};
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_STATUS(load_only(tiny_decoder_spec_as(&kind, types, 1, 98, -1), MP_COMPUTE_AUTO, &error), MP_UNSUPPORTED,
                    &error);
    MP_CHECK_STR(error.message, "tensor blk.0.attn_q_a.bias is not part of this architecture");
}

/* A file of another architecture is refused, not run without part of its tensors. */
MP_TEST(models_steps_refuse_files_of_other_architectures) {
    mp_error error;
    tiny_kind kind = {.arch = "llama", .more = add_latents};
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_STATUS(load_only(tiny_decoder_spec_as(&kind, types, 1, 95, -1), MP_COMPUTE_AUTO, &error), MP_UNSUPPORTED,
                    &error);
    MP_CHECK_HAS(error.message, "blk.0.attn_kv_a_mqa.weight");
    kind.more = set_epsilon;
    epsilon = 1e-30;
    MP_CHECK_OK(load_only(tiny_decoder_spec_as(&kind, types, 1, 96, -1), MP_COMPUTE_AUTO, &error), &error);
    epsilon = 0.99e-30;
    MP_CHECK_STATUS(load_only(tiny_decoder_spec_as(&kind, types, 1, 97, -1), MP_COMPUTE_AUTO, &error), MP_FORMAT,
                    &error);
}
