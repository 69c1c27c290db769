/* test_models_decoder.c: defaults and refusals of a decoder, and the description that requests receive. */
#include "defaults_fixture.h"
#include "late_threads.h"
#include "sizes_fixture.h"
#include "models/decoder/engine.h"

enum { PAIRS = TINY_HIDDEN / TINY_HEADS / 2 };

static const mp_dtype floats[] = {MP_F32};

static void make_job(const tiny_model *tiny, tiny_job *job) {
    int32_t prompt[40];
    for (int i = 0; i < 40; i++)
        prompt[i] = i * 37 % TINY_VOCAB;
    const mp_text_args args = {
        .n_prompt = 40,
        .prompt = prompt,
        .n_choices = 1,
        .want_prompt_logits = true,
        .capture_values = 3,
        .capture_records = 50,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 6, .logprobs = 2, .ignore_eos = true},
    };
    tiny_job_make(tiny, job, &args, 0);
}

static uint64_t hash_of(tiny_model *tiny) {
    tiny_job job;
    make_job(tiny, &job);
    tiny_job_admit(tiny, &job);
    tiny_job_finish(tiny, &job);
    const uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

/* check() tells the request's caller about the model: worker processes need all these facts to check a result. */
MP_TEST(models_decoder_describes_itself_to_requests) {
    tiny_model tiny;
    tiny_job job;
    tiny_load(&tiny, tiny_decoder_spec(floats, 1, 51), MP_COMPUTE_F32, 1);
    make_job(&tiny, &job);
    MP_CHECK_INT(job.call->vocab, TINY_VOCAB);
    MP_CHECK_INT(job.call->sampled_vocab, TINY_VOCAB);
    MP_CHECK_INT(job.call->hidden, TINY_HIDDEN);
    MP_CHECK_INT(job.call->context, TINY_CONTEXT);
    MP_CHECK_INT(job.call->n_ends, 1);
    MP_CHECK_INT(job.call->ends[0], TINY_VOCAB - 1);
    MP_CHECK_INT(job.call->capture.layers, TINY_LAYERS);
    MP_CHECK_INT(job.call->capture.hidden, TINY_HIDDEN);
    MP_CHECK_INT(job.call->capture.vocab, TINY_VOCAB);
    MP_CHECK_INT(job.item.total, 40 + 6 + 1);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

MP_TEST(models_decoder_layers_have_rotary_tables) {
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&(tiny_kind){.arch = "gemma3", .window = 9, .scaled = true}, floats, 1, 54,
                                          -1),
              MP_COMPUTE_F32, 1);
    const mp_decoder *model = (const mp_decoder *)tiny.model;
    MP_CHECK_INT(model->layers[0].sublayer[0].mixer[0]->attention.rope, 1);
    MP_CHECK_INT(model->layers[1].sublayer[0].mixer[0]->attention.rope, 0);
    MP_CHECK_INT(model->layers[2].sublayer[0].mixer[0]->attention.rope, -1);
    tiny_unload(&tiny);
}

/* Make a file with an output matrix of its own, in which the row of one token is NaN. */
static void add_output(tiny_file *file) {
    tiny_tensor(file, "output.weight", MP_F32, TINY_VOCAB, TINY_HIDDEN, 0.5f, 0);
    ((float *)(void *)(file->bytes + file->used))[-TINY_HIDDEN] = NAN; /* in the last row */
}

/* A single logit that is NaN fails the request, although another token has the largest logit. */
MP_TEST(models_decoder_fails_for_one_nan_logit) {
    static const int32_t prompt[] = {3, 1, 4};
    tiny_model tiny;
    tiny_job job;
    mp_plan plan = {.count = 1, .items = {&job.item}, .amount = {3}};
    mp_outcome outcomes[MP_PLAN_MAX];
    tiny_load(&tiny, tiny_decoder_spec_as(&(tiny_kind){.arch = "llama", .more = add_output}, floats, 1, 56, -1),
              MP_COMPUTE_F32, 1);
    tiny_job_make(&tiny, &job, &(mp_text_args){.n_prompt = 3, .prompt = prompt, .n_choices = 1,
                                               .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 2,
                                                            .logprobs = -1}}, 0);
    tiny_job_admit(&tiny, &job);
    tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_FAILED);
    MP_CHECK_INT(job.item.error.code, MP_NUMERIC);
    MP_CHECK_HAS(job.item.error.message, "NaN or infinity in the logits of token 0");
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* ---- divisors of the rotary angles ------------------------------------------------------------------------------- */

static bool varied; /* another divisor for each pair; otherwise 4 */

static double divisor(int pair) { return varied ? 1 + 0.25 * pair : 4; }

static void divide_by_list(tiny_file *file) {
    double divisors[PAIRS];
    mp_error error;
    for (int i = 0; i < PAIRS; i++)
        divisors[i] = divisor(i);
    mp_value list = {.type = MP_VALUE_FLOATS, .gguf_type = -1, .count = PAIRS, .as.reals = divisors};
    MP_CHECK_OK(mp_spec_set(file->spec, "mpool.rope_divisors", &list, &error), &error);
}

static void divide_by_tensor(tiny_file *file) {
    tiny_tensor(file, "rope_freqs.weight", MP_F32, 1, PAIRS, 1, 0);
    for (int i = 0; i < PAIRS; i++) {
        const float value = (float)divisor(i);
        memcpy(file->bytes + file->used - (size_t)(PAIRS - i) * sizeof value, &value, sizeof value);
    }
}

static void scale_linearly(tiny_file *file) {
    mp_error error;
    mp_value type = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = 6, .as.string = "linear"};
    MP_CHECK_OK(mp_spec_set(file->spec, "llama.rope.scaling.type", &type, &error), &error);
    tiny_float(file->spec, "llama.rope.scaling.factor", 4);
}

static uint64_t hash_with(void (*more)(tiny_file *file)) {
    tiny_model tiny;
    const tiny_kind kind = {.arch = "llama", .more = more};
    tiny_load(&tiny, tiny_decoder_spec_as(&kind, floats, 1, 53, -1), MP_COMPUTE_F32, 1);
    const uint64_t hash = hash_of(&tiny);
    tiny_unload(&tiny);
    return hash;
}

/* Divisors come from the spec of a model folder or from a tensor of a GGUF file. Equal divisors are linear scaling. */
MP_TEST(models_decoder_divides_rotary_angles) {
    const uint64_t linear = hash_with(scale_linearly);
    MP_CHECK(hash_with(NULL) != linear);
    MP_CHECK(hash_with(divide_by_list) == linear);
    MP_CHECK(hash_with(divide_by_tensor) == linear);
    varied = true;
    const uint64_t by_list = hash_with(divide_by_list);
    MP_CHECK(by_list != linear);
    MP_CHECK(hash_with(divide_by_tensor) == by_list);
}

/* Rotations and kernels take components in pairs. */
MP_TEST(models_decoder_refuses_odd_heads) {
    static const int sizes[][2] = {{15, 15}, {1, 1}, {16, 8}};
    mp_spec *from = tiny_decoder_spec(floats, 1, 56);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        mp_error error;
        mp_spec *spec = spec_copy(from, -1, 0);
        tiny_int(spec, "llama.attention.key_length", sizes[i][0]);
        tiny_int(spec, "llama.attention.value_length", sizes[i][1]);
        mp_spec_freeze(spec);
        MP_CHECK_STATUS(load_only(spec, MP_COMPUTE_F32, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, "attention.key_length");
    }
    mp_spec_unpin(from);
}

/* Text that could begin a stop string is held back. If the request ends early, that text is part of the result. */
MP_TEST(models_decoder_publishes_held_back_text_at_the_end) {
    tiny_model tiny;
    tiny_job job;
    tiny_load(&tiny, tiny_decoder_spec(floats, 1, 57), MP_COMPUTE_F32, 1);
    make_job(&tiny, &job);
    tiny_job_admit(&tiny, &job);
    tiny_job_finish(&tiny, &job);
    const char *text = job.call->choices[0].text;
    const char begun[] = {text[0], (char)(text[1] ^ 1)}; /* only its first character matches */
    mp_text_args args = {.n_prompt = 40, .prompt = job.call->prompt, .n_choices = 1, .n_stop = 1,
                         .stop = (const char *const[]){begun}, .stop_bytes = (const int32_t[]){2},
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 6, .logprobs = -1,
                                      .ignore_eos = true}};
    tiny_job held;
    tiny_job_make(&tiny, &held, &args, 0);
    const mp_choice *choice = &held.call->choices[0];
    tiny_job_admit(&tiny, &held);
    while (!choice->token_count)
        MP_CHECK_INT(tiny_job_step(&tiny, &held, 512), MP_OUTCOME_MORE);
    MP_CHECK_INT(choice->token_count, 1);
    MP_CHECK_INT(choice->text_bytes, 0);
    tiny.engine->ops->retire(tiny.engine, &held.item);
    MP_CHECK_INT(choice->finish, MP_FINISH_CANCELLED);
    MP_CHECK_INT(choice->text_bytes, 1);
    MP_CHECK(choice->text[0] == text[0]);
    mp_request_destroy(&held.call->base);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* A request that starts again after its prompt was done, as after the death of a worker process, keeps its tokens. Its
 * prompt counts as done, whatever its new item says. */
MP_TEST(models_decoder_starts_again_after_the_prompt) {
    static const mp_dtype types[] = {MP_F32};
    enum { PROMPT = 70, ANSWER = 6, DONE = 3 };
    int32_t prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = 9 + i % 50;
    const mp_text_args args = {.n_prompt = PROMPT, .prompt = prompt, .n_choices = 1,
                               .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER,
                                            .ignore_eos = true}};
    tiny_model tiny;
    tiny_job whole, job;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 47), MP_COMPUTE_F32, 1);
    tiny_job_make(&tiny, &whole, &args, 0);
    tiny_job_admit(&tiny, &whole);
    tiny_job_finish(&tiny, &whole);
    tiny_trim(&tiny);
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    while (job.call->choices[0].token_count < DONE)
        MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_MORE);
    tiny.engine->ops->retire(tiny.engine, &job.item);
    for (uint32_t cursor = 0; cursor <= PROMPT; cursor += PROMPT) {
        job.call->choices[0].finish = MP_FINISH_NONE; /* a process that dies does not retire its items */
        job.item.cursor = cursor;
        tiny_job_admit(&tiny, &job);
        MP_CHECK_INT(((const mp_sequence_group *)job.item.state)->prefilled, PROMPT);
        MP_CHECK_INT(job.call->choices[0].token_count, DONE);
        if (cursor < PROMPT)
            tiny.engine->ops->retire(tiny.engine, &job.item);
    }
    tiny_job_finish(&tiny, &job);
    for (int t = 0; t < ANSWER; t++)
        MP_CHECK_INT(job.call->choices[0].tokens[t].id, whole.call->choices[0].tokens[t].id);
    mp_request_destroy(&whole.call->base);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* Fill the stack that a step will use. */
static void fill_stack(int value) {
    volatile uint8_t bytes[1 << 15];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)value;
}

/* Heads of 8 components are padded with zeros in the KV cache, whose integers have one scale for a row: what memory
 * held before has no influence. */
MP_TEST(models_decoder_pads_small_heads) {
    static const mp_dtype types[] = {MP_Q8_0};
    enum { PROMPT = 20, ANSWER = 8 };
    const mp_value heads = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = TINY_HIDDEN / 8},
                   kv_heads = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1,
                               .as.integer = TINY_KV_HEADS * TINY_HIDDEN / TINY_HEADS / 8};
    int32_t prompt[PROMPT];
    uint64_t hash[2];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = 9 + i * 7 % 50;
    const mp_text_args args = {.n_prompt = PROMPT, .prompt = prompt, .n_choices = 1, .want_prompt_logits = true,
                               .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER,
                                            .ignore_eos = true}};
    mp_spec *base = tiny_decoder_spec(types, 1, 47), *some = spec_with(base, "llama.attention.head_count", &heads);
    mp_spec *spec = spec_with(some, "llama.attention.head_count_kv", &kv_heads);
    mp_spec_unpin(base);
    mp_spec_unpin(some);
    tiny_model tiny;
    tiny_load(&tiny, spec, MP_COMPUTE_AUTO, 1);
    const mp_decoder *model = (const mp_decoder *)tiny.model;
    MP_CHECK(model->shapes[0].value_dim == 8 && model->kv_stores[0].v_dim == 16 && model->kv.dtype == MP_I16);
    for (int i = 0; i < 2; i++) {
        tiny_job job;
        tiny_job_make(&tiny, &job, &args, 0);
        tiny_job_admit(&tiny, &job);
        do
            fill_stack(i ? 0x7E : 0);
        while (tiny_job_step(&tiny, &job, 512) == MP_OUTCOME_MORE);
        hash[i] = tiny_job_hash(&job);
        mp_request_destroy(&job.call->base);
        tiny_trim(&tiny);
    }
    MP_CHECK(hash[0] == hash[1]);
    tiny_unload(&tiny);
}

/* ---- optional keys ----------------------------------------------------------------------------------------------- */

static uint64_t hash_of_tokens(mp_spec *spec) {
    enum { PROMPT = 30 };
    int32_t prompt[PROMPT];
    tiny_model tiny;
    tiny_job job;
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = i * 37 % TINY_VOCAB;
    const mp_text_args args = {
        .n_prompt = PROMPT,
        .prompt = prompt,
        .n_choices = 1,
        .want_prompt_logits = true,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 2, .logprobs = 3, .ignore_eos = true},
    };
    tiny_load(&tiny, spec, MP_COMPUTE_F32, 1);
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    tiny_job_finish(&tiny, &job);
    const uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
    return hash;
}

static void add_yarn(tiny_file *file) {
    tiny_string(file->spec, "llama.rope.scaling.type", "yarn");
    tiny_float(file->spec, "llama.rope.scaling.factor", 4);
    tiny_float(file->spec, "llama.rope.scaling.original_context_length", 64);
}

MP_TEST(models_decoder_defaults) {
    MP_RESULTS_ONLY();
    static const optional_key all[] = {
        {".rope.freq_base", "10000.0", "500.0"},
        {".rope.scaling.type", "none", NULL},
        {"mpool.embedding_scale", "1.0", "2.0"},
        {"mpool.residual_scale", "1.0", "0.5"},
        {"mpool.output_scale", "1.0", "0.5"},
        {"mpool.attention_scale", NULL, "0.5"},
        {"mpool.attention_softcap", NULL, "0.1"},
        {"mpool.output_softcap", NULL, "2.0"},
        {"mpool.norm_offset", "0.0", "0.25"},
        {"mpool.activation", "silu", "gelu"},
        {"mpool.kv_dtype", "auto", NULL},
        {".leading_dense_block_count", "0", NULL},
        {".expert_shared_feed_forward_length", "0", NULL},
        {".attention.sliding_window", "0", NULL},
    };
    static const optional_key dense[] = {
        {".rope.dimension_count", "32", "16"},
        {".attention.key_length", "32", NULL},
        {".attention.value_length", "32", NULL},
        {".attention.sliding_window", "0", "5"},
        {".expert_count", "0", NULL},
        {"mpool.rope_neox", NULL, "true"},
        {"mpool.kv_dtype", "auto", "int8"},
        {"mpool.latent_epsilon", "0.00001", NULL},
        {"mpool.root_norms", "true", NULL},
        {"mpool.gated_ffn", "true", NULL},
        {"mpool.one_norm", "false", NULL},
    };
    static const optional_key of_experts[] = {
        EXPERT_KEYS,
        {"mpool.expert_clamp", NULL, "0.001"},
    };
    static const optional_key of_latents[] = {
        {"mpool.expert_epsilon", NULL, "0.5"},
        {"mpool.latent_epsilon", "0.00001", "0.5"},
        {"mpool.expert_scale", "1.0", "2.0"},
    };
    static const optional_key of_yarn[] = {
        {".rope.scaling.factor", "1.0", "8.0"},
        {".rope.scaling.yarn_beta_fast", "32.0", "4.0"},
        {".rope.scaling.yarn_beta_slow", "1.0", "0.25"},
        {".rope.scaling.attn_factor", "1.0", "1.5"},
        {"mpool.rope_attention_factor", NULL, "2.0"},
        {"mpool.rope_yarn_truncate", "true", "false"},
    };
    static const optional_key of_long_rope[] = {
        {"mpool.rope_attention_factor", "1.0", "1.5"},
        {".rope.freq_base", "10000.0", "500.0"},
    };
    static const tiny_kind llama = {.arch = "llama"}, yarn = {.arch = "llama", .more = add_yarn},
                           experts = {.arch = "qwen3moe", .experts = 6},
                           latents = {.arch = "deepseek2", .experts = 6},
                           rope = {.arch = "phi3", .long_from = 20};
    check_defaults(tiny_decoder_spec_as(&llama, floats, 1, 42, -1), hash_of_tokens, KEYS(all));
    check_defaults(tiny_decoder_spec_as(&experts, floats, 1, 42, -1), hash_of_tokens, KEYS(all));
    check_defaults(tiny_decoder_spec_as(&llama, floats, 1, 42, -1), hash_of_tokens, KEYS(dense));
    check_defaults(tiny_decoder_spec_as(&experts, floats, 1, 42, -1), hash_of_tokens, KEYS(of_experts));
    check_defaults(tiny_decoder_spec_as(&latents, floats, 1, 42, -1), hash_of_tokens, KEYS(of_latents));
    check_defaults(tiny_decoder_spec_as(&yarn, floats, 1, 42, -1), hash_of_tokens, KEYS(of_yarn));
    check_defaults(tiny_decoder_spec_as(&rope, floats, 1, 42, -1), hash_of_tokens, KEYS(of_long_rope));
}

/* The polls of a prompt and two tokens, as recorded: every few layers, and in the experts. */
MP_TEST(models_decoder_polls_recorded) {
    enum { COUNT = 5 };
    static const tiny_kind kinds[COUNT] = {{.arch = "llama"},
                                           {.arch = "qwen3moe", .experts = 6},
                                           {.arch = "gpt_oss", .window = 9, .experts = 5, .biased = true},
                                           {.arch = "deepseek2", .experts = 6},
                                           {.arch = "phi3", .long_from = 20}};
    static const uint64_t recorded[COUNT] = {2, 62, 53, 56, 2};
    uint64_t got[COUNT];
    for (int i = 0; i < COUNT; i++) {
        mp_spec *spec = tiny_decoder_spec_as(&kinds[i], floats, 1, 42, -1);
        (void)lease_polls();
        (void)hash_of_tokens(spec);
        got[i] = (uint64_t)lease_polls();
    }
    MP_CHECK(sizes_are("polls", got, recorded, COUNT));
}
