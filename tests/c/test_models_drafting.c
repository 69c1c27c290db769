/* Draft models: they change no token, propose the same tokens whatever was rejected before, need no memory that the
 * model needs, and are refused if their vocabulary differs. */
#include "model_fixture.h"
#include "models/decoder/drafting.h"
#include "spec_fixture.h"
#include "speculation_fixture.h"

enum { PROMPT = 60, ANSWER = 40, PASSES = 4 /* draft tokens in a step of mode ALWAYS */ };

static const mp_dtype types[] = {MP_Q8_0};

/* Return an unfrozen copy of a spec in which one number is replaced, or none (key NULL). The caller owns it. */
static mp_spec *with_value(const mp_spec *from, const char *key, double value) {
    mp_error error;
    mp_spec *spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(spec, mp_spec_architecture(from), &error), &error);
    MP_CHECK_OK(mp_spec_add_file(spec, mp_spec_file(from, 0), &error), &error);
    for (int i = 0; i < mp_spec_value_count(from); i++) {
        const char *name;
        mp_value copy = *mp_spec_value_at(from, i, &name);
        if (key && strcmp(name, key) == 0) {
            if (copy.type == MP_VALUE_INT)
                copy.as.integer = (int64_t)value;
            else
                copy.as.real = value;
        }
        MP_CHECK_OK(mp_spec_set(spec, name, &copy, &error), &error);
    }
    for (int i = 0; i < mp_spec_tensor_count(from); i++)
        MP_CHECK_OK(mp_spec_add_tensor(spec, mp_spec_tensor_at(from, i), &error), &error);
    MP_CHECK_OK(mp_spec_set_tokens(spec, mp_spec_tokens(from), &error), &error);
    return spec;
}

/* Load a model with a draft model: the same weights, with one number of the spec replaced. */
static void load_with_draft(tiny_model *tiny, const mp_spec *base, const char *key, double value, int threads) {
    mp_error error;
    mp_spec *spec = with_value(base, NULL, 0), *draft = with_value(base, key, value);
    MP_CHECK_OK(mp_spec_set_draft(spec, draft, &error), &error);
    mp_spec_unpin(draft);
    mp_spec_freeze(spec);
    tiny_load(tiny, spec, MP_COMPUTE_AUTO, threads);
    tiny_speculate(tiny->engine, MP_SPECULATE_ALWAYS, NULL, NULL);
}

static const char BASE[] = "llama.rope.freq_base"; /* another value gives similar logits */
static const double SIMILAR = 9000;

static void make_prompt(int32_t *prompt, int n, uint64_t seed) {
    mp_test_random random = {seed};
    for (int i = 0; i < n; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(&random) % TINY_VOCAB);
}

/* Run requests together until all are done. preempt_at: preempt each of them once, after this many steps; 0: never. */
static void run(tiny_model *tiny, tiny_job *jobs, int n, const mp_text_args *args, int preempt_at) {
    mp_error error;
    for (int i = 0; i < n; i++) {
        int32_t prompt[TINY_CONTEXT];
        mp_text_args mine = args[i];
        make_prompt(prompt, mine.n_prompt, 3 + (uint64_t)i);
        mine.prompt = prompt;
        tiny_job_make(tiny, &jobs[i], &mine, 0);
        tiny_job_admit(tiny, &jobs[i]);
    }
    for (int step = 1, left = n; left > 0; step++) {
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        int index[8] = {0};
        for (int i = 0; i < n; i++)
            if (!jobs[i].done) {
                index[plan.count] = i;
                plan.items[plan.count] = &jobs[i].item;
                plan.amount[plan.count++] = 512;
            }
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
        for (int p = 0; p < plan.count; p++) {
            tiny_job *job = &jobs[index[p]];
            MP_CHECK(outcomes[p] == MP_OUTCOME_MORE || outcomes[p] == MP_OUTCOME_DONE);
            if (outcomes[p] == MP_OUTCOME_DONE) {
                tiny->engine->ops->retire(tiny->engine, &job->item);
                job->done = true;
                left--;
            } else if (step == preempt_at) {
                tiny->engine->ops->preempt(tiny->engine, &job->item);
                MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &job->item, &error), &error);
            }
        }
    }
}

static void check_same(const tiny_job *a, const tiny_job *b, const char *what) {
    for (int c = 0; c < a->call->n_choices; c++) {
        const mp_choice *x = &a->call->choices[c], *y = &b->call->choices[c];
        if (x->token_count != y->token_count || x->text_bytes != y->text_bytes || x->finish != y->finish ||
            x->stop_index != y->stop_index || memcmp(x->text, y->text, x->text_bytes) != 0)
            MP_FAIL("%s: %u tokens, finish %d; without a draft model %u, %d", what, y->token_count, y->finish,
                    x->token_count, x->finish);
        for (uint32_t t = 0; t < x->token_count; t++) {
            MP_CHECK_INT(y->tokens[t].id, x->tokens[t].id);
            MP_CHECK(memcmp(&y->tokens[t].logprob, &x->tokens[t].logprob, sizeof(float)) == 0);
        }
    }
}

static void destroy(tiny_job *jobs, int n) {
    for (int i = 0; i < n; i++)
        mp_request_destroy(&jobs[i].call->base);
}

static const mp_text_args greedy = {.n_prompt = PROMPT,
                                    .n_choices = 1,
                                    .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER,
                                                 .logprobs = 0, .ignore_eos = true}};

MP_TEST_SECONDS(models_drafting_changes_no_token, 60) {
    enum { N = 4 };
    tiny_model tiny;
    mp_spec *base = tiny_decoder_spec(types, 1, 61);
    load_with_draft(&tiny, base, BASE, SIMILAR, 2);
    mp_text_args args[N] = {greedy, greedy, greedy, greedy};
    args[1].sampling = (mp_sampling){.temperature = 0.9f, .top_p = 0.95f, .repetition_penalty = 1.2f, .seed = 4,
                                     .max_tokens = ANSWER, .logprobs = 2, .ignore_eos = true};
    args[1].n_choices = 2;
    args[2].n_prompt = TINY_CONTEXT - 15; /* ends with the context */
    args[3].n_prompt = 3 * MP_KV_BLOCK + 7;
    tiny_job without[N], with[N], again[N];
    tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
    run(&tiny, without, N, args, 0);
    MP_CHECK_INT(tiny.engine->work.draft_tokens, 0);
    char text[ANSWER];
    memcpy(text, without[0].call->choices[0].text, ANSWER); /* one letter per token */
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, NULL, NULL);
    run(&tiny, with, N, args, 0);
    for (int i = 0; i < N; i++)
        check_same(&without[i], &with[i], "together");
    MP_CHECK(tiny.engine->work.accepted_draft_tokens > 20);
    MP_CHECK(tiny.engine->work.draft_tokens > tiny.engine->work.accepted_draft_tokens);
    run(&tiny, again, N, args, 3); /* prompts from the caches of both models, and a preemption */
    for (int i = 0; i < N; i++)
        check_same(&without[i], &again[i], "preempted");
    destroy(without, N);
    destroy(with, N);
    destroy(again, N);
    for (int at = 0; at + 3 <= ANSWER; at += 4) {
        const char *stop[] = {text + at};
        const int32_t stop_bytes[] = {3};
        mp_text_args stops = greedy;
        stops.n_stop = 1;
        stops.stop = stop;
        stops.stop_bytes = stop_bytes;
        tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
        run(&tiny, without, 1, &stops, 0);
        tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, NULL, NULL);
        run(&tiny, with, 1, &stops, 0);
        check_same(without, with, "stop string");
        destroy(without, 1);
        destroy(with, 1);
    }
    tiny_trim(&tiny);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0);
    tiny_unload(&tiny);
    mp_spec_unpin(base);
}

/* A draft model with the weights of the model proposes exactly the tokens of the completion, sampled or not: the passes
 * of both models see the same positions and keys. */
MP_TEST(models_drafting_equal_weights_are_always_accepted) {
    tiny_model tiny;
    mp_spec *base = tiny_decoder_spec(types, 1, 62);
    load_with_draft(&tiny, base, NULL, 0, 2);
    mp_text_args args[2] = {greedy, greedy};
    args[1].sampling.temperature = 1;
    args[1].sampling.seed = 11;
    for (int preempt_at = 0; preempt_at < 4; preempt_at += 3) {
        const mp_step_work before = tiny.engine->work;
        tiny_job jobs[2];
        run(&tiny, jobs, 2, args, preempt_at);
        const uint64_t drafted = tiny.engine->work.draft_tokens - before.draft_tokens;
        MP_CHECK_INT(tiny.engine->work.accepted_draft_tokens - before.accepted_draft_tokens, drafted);
        /* The prompt gives one token, seven steps give five, and the last one four: max_tokens allows three drafts.
         * After a preemption, a step without drafts computes all rows again, and the last step has two. */
        MP_CHECK_INT(drafted, 2 * (7 * PASSES + (preempt_at ? 2 : 3)));
        destroy(jobs, 2);
    }
    tiny_unload(&tiny);
    mp_spec_unpin(base);
}

/* Return in `next` the n tokens that a model generates after `count` tokens. */
static void continue_by(tiny_model *tiny, const int32_t *tokens, int count, int n, int32_t *next) {
    tiny_job job;
    mp_text_args args = greedy;
    args.prompt = tokens;
    args.n_prompt = count;
    args.sampling.max_tokens = n;
    tiny_job_make(tiny, &job, &args, 0);
    tiny_job_admit(tiny, &job);
    tiny_job_finish(tiny, &job);
    for (int i = 0; i < n; i++)
        next[i] = job.call->choices[0].tokens[i].id;
    mp_request_destroy(&job.call->base);
}

/* After rejected draft tokens, the draft model proposes what it proposes for the same tokens without them: its KV cache
 * keeps nothing of them. */
MP_TEST_SECONDS(models_drafting_forgets_rejected_tokens, 60) {
    tiny_model tiny, draft;
    mp_spec *base = tiny_decoder_spec(types, 1, 63);
    load_with_draft(&tiny, base, BASE, SIMILAR, 1);
    tiny_load(&draft, with_value(base, BASE, SIMILAR), MP_COMPUTE_AUTO, 1);
    tiny_speculate(draft.engine, MP_SPECULATE_OFF, NULL, NULL);
    tiny_job job;
    run(&tiny, &job, 1, &greedy, 0);
    int32_t tokens[PROMPT + ANSWER];
    make_prompt(tokens, PROMPT, 3);
    for (int t = 0; t < ANSWER; t++)
        tokens[PROMPT + t] = job.call->choices[0].tokens[t].id;
    uint64_t drafted = 0, accepted = 0;
    for (int t = 1; t < ANSWER;) {
        const int most = ANSWER - 1 - t < PASSES ? ANSWER - 1 - t : PASSES;
        int32_t next[PASSES];
        int right = 0;
        if (most > 0)
            continue_by(&draft, tokens, PROMPT + t, most, next);
        while (right < most && next[right] == tokens[PROMPT + t + right])
            right++;
        drafted += (uint64_t)most;
        accepted += (uint64_t)right;
        t += right + 1;
    }
    MP_CHECK(accepted > 5 && drafted > accepted + 5);
    MP_CHECK_INT(tiny.engine->work.draft_tokens, drafted);
    MP_CHECK_INT(tiny.engine->work.accepted_draft_tokens, accepted);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
    tiny_unload(&draft);
    mp_spec_unpin(base);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* The draft model's bytes are charged with the model's. The draft model's KV cache is freed when memory is short: a
 * completion that fits without a draft model succeeds with one at any limit. */
MP_TEST_SECONDS(models_drafting_is_charged_and_gives_way, 60) {
    tiny_model tiny;
    mp_spec *base = tiny_decoder_spec(types, 1, 64);
    tiny_load(&tiny, with_value(base, NULL, 0), MP_COMPUTE_AUTO, 1);
    const uint64_t alone = tiny.budget.used;
    uint64_t predicted[2], predicted_engine[2];
    tiny.loader.ops->footprint(tiny.loader.self, &predicted[0], &predicted_engine[0]);
    tiny_unload(&tiny);
    load_with_draft(&tiny, base, BASE, SIMILAR, 1);
    tiny.loader.ops->footprint(tiny.loader.self, &predicted[1], &predicted_engine[1]);
    MP_CHECK_INT(tiny.budget.used, 2 * alone);
    MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), 2 * alone);
    MP_CHECK_INT(predicted[1], 2 * predicted[0]);
    mp_model_facts facts;
    mp_model_get_facts(tiny.model, &facts);
    MP_CHECK_INT(facts.draft_bytes, facts.weight_bytes);
    mp_text_args args = greedy;
    args.n_prompt = 2 * MP_KV_BLOCK - 20; /* the completion takes another block */
    tiny_job without, with;
    tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
    run(&tiny, &without, 1, &args, 0);
    tiny_trim(&tiny);
    tiny_job again;
    run(&tiny, &again, 1, &args, 0);
    /* with memory freed at the end of the request, and an index for look-up */
    const uint64_t enough = tiny.budget.used + 8192, block = tiny.engine->ops->bytes(tiny.engine) / 4;
    destroy(&again, 1);
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, NULL, NULL);
    for (uint64_t more = 0; more < 5 * block; more += block / 2) {
        tiny.budget.limit = UINT64_MAX;
        tiny_trim(&tiny);
        ((mp_text_engine *)tiny.engine)->drafter.pause = 0;
        tiny.budget.limit = enough + more;
        run(&tiny, &with, 1, &args, 0);
        check_same(&without, &with, "with little memory");
        destroy(&with, 1);
    }
    MP_CHECK(tiny.engine->work.accepted_draft_tokens > 0);
    destroy(&without, 1);
    tiny.budget.limit = UINT64_MAX;
    tiny_unload(&tiny);
    mp_spec_unpin(base);
}

/* The draft model's KV cache gives way to a new request, and to all rows of a step: not only to those that fit. */
MP_TEST(models_drafting_gives_way_to_requests) {
    enum { ROWS = 2 * MP_KV_BLOCK };
    mp_spec *base = tiny_decoder_spec(types, 1, 66);
    for (int rows = 0; rows < 2; rows++) { /* the memory is short at the admission, or in the step */
        tiny_model tiny;
        tiny_job first, second;
        mp_error error;
        int32_t prompt[ROWS], other[ROWS];
        load_with_draft(&tiny, base, BASE, SIMILAR, 1);
        make_prompt(prompt, ROWS, 3);
        make_prompt(other, ROWS, 4);
        mp_text_args args = greedy;
        args.n_prompt = ROWS;
        args.prompt = prompt;
        tiny_job_make(&tiny, &first, &args, 0);
        tiny_job_admit(&tiny, &first);
        while (tiny.engine->work.draft_tokens == 0)
            MP_CHECK_INT(tiny_job_step(&tiny, &first, 512), MP_OUTCOME_MORE);
        mp_text_engine *engine = (mp_text_engine *)tiny.engine;
        args.prompt = other;
        tiny_job_make(&tiny, &second, &args, 0);
        if (rows)
            tiny_job_admit(&tiny, &second);
        tiny.budget.limit = tiny.budget.used + (rows ? mp_prefix_block_bytes(&engine->cache) : 0);
        if (!rows)
            MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &second.item, &error), &error);
        const uint64_t before = tiny.engine->work.rows;
        if (rows)
            MP_CHECK_INT(tiny_job_step(&tiny, &second, 512), MP_OUTCOME_MORE);
        MP_CHECK_INT(tiny.engine->work.rows - before, rows ? ROWS : 0);
        tiny.budget.limit = UINT64_MAX;
        tiny.engine->ops->retire(tiny.engine, &second.item);
        tiny.engine->ops->retire(tiny.engine, &first.item);
        destroy(&second, 1);
        destroy(&first, 1);
        tiny_unload(&tiny);
    }
    mp_spec_unpin(base);
}

/* ---- refused drafts ---------------------------------------------------------------------------------------------- */

static void check_refused(const mp_spec *base, mp_spec *draft, mp_status status, const char *message) {
    mp_error error;
    mp_loader loader;
    mp_model *model;
    mp_budget budget = {.limit = UINT64_MAX};
    mp_lease lease = {.threads = 1};
    mp_spec *spec = with_value(base, NULL, 0);
    MP_CHECK_OK(mp_spec_set_draft(spec, draft, &error), &error);
    MP_CHECK_OK(mp_model_loader(spec, MP_COMPUTE_AUTO, &loader, &error), &error);
    MP_CHECK_STATUS(loader.ops->load(loader.self, &lease, &budget, NULL, &model, &error), status, &error);
    MP_CHECK_HAS(error.message, message);
    MP_CHECK_INT(budget.used, 0);
    loader.ops->destroy(loader.self);
    mp_spec_unpin(spec);
    mp_spec_unpin(draft);
}

static mp_spec *with_tokens(const mp_spec *from, int32_t count, int32_t other) {
    mp_error error;
    mp_spec *spec = mp_spec_create();
    static uint8_t bytes[TINY_VOCAB], control[TINY_VOCAB];
    const mp_token_table *tokens = mp_spec_tokens(from);
    mp_token_table table = *tokens;
    memcpy(bytes, tokens->bytes, TINY_VOCAB);
    memcpy(control, tokens->control, TINY_VOCAB);
    if (other >= 0)
        bytes[other] ^= 1;
    table.count = count;
    table.bytes = bytes;
    table.control = control;
    table.eog_count = 0;
    MP_CHECK_OK(mp_spec_set_architecture(spec, mp_spec_architecture(from), &error), &error);
    MP_CHECK_OK(mp_spec_set_tokens(spec, &table, &error), &error);
    return spec;
}

MP_TEST(models_drafting_refuses_other_vocabularies) {
    mp_spec *base = tiny_decoder_spec(types, 1, 65);
    mp_kernels_init();
    check_refused(base, with_tokens(base, TINY_VOCAB, 7), MP_INVALID_ARGUMENT, "token 7 differs");
    check_refused(base, with_tokens(base, 50, -1), MP_INVALID_ARGUMENT, "it has 50 tokens, the model has 333");
    check_refused(base, tiny_encoder_spec(false), MP_UNSUPPORTED, "`draft` must be a language model for text, got");
    mp_error error;
    mp_spec *spec = with_value(base, NULL, 0), *draft = with_value(base, NULL, 0);
    MP_CHECK_STATUS(mp_spec_set_draft(spec, spec, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_OK(mp_spec_set_draft(spec, draft, &error), &error);
    MP_CHECK_STATUS(mp_spec_set_draft(spec, draft, &error), MP_INVALID_ARGUMENT, &error);
    mp_spec *third = with_value(base, NULL, 0);
    MP_CHECK_STATUS(mp_spec_set_draft(third, spec, &error), MP_INVALID_ARGUMENT, &error);
    mp_spec_unpin(third);
    mp_spec_unpin(draft);
    mp_spec_unpin(spec);
    mp_spec_unpin(base);
}

/* A draft model whose context is shorter than the model's proposes tokens as long as they fit. */
MP_TEST(models_drafting_with_a_shorter_context) {
    tiny_model tiny;
    mp_spec *base = tiny_decoder_spec(types, 1, 66);
    load_with_draft(&tiny, base, "llama.context_length", PROMPT + 20, 1);
    tiny_job without, with;
    tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL);
    run(&tiny, &without, 1, &greedy, 0);
    tiny_speculate(tiny.engine, MP_SPECULATE_ALWAYS, NULL, NULL);
    run(&tiny, &with, 1, &greedy, 0);
    check_same(&without, &with, "beyond the context of the draft model");
    MP_CHECK(tiny.engine->work.accepted_draft_tokens >= 16);
    destroy(&without, 1);
    destroy(&with, 1);
    tiny_unload(&tiny);
    mp_spec_unpin(base);
}
