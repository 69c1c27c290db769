/* The numeric contract: tokens, logits and capture records have the same bits for any prefill slices, batch mates,
 * number of threads, preemption, prefix-cache hits and drafts. */
#include "base/sanitize.h"
#include "model_fixture.h"
#include "recorded_fixture.h"
#include "stores_fixture.h"
#include "models/generation/speculation.h"
#include "speculation_fixture.h"

enum { ITEMS = 10, ANSWER = 12, CHOICES = 3 };

static const struct {
    int length, shared; /* in tokens: the prompt; its prefix in common with other prompts */
    uint64_t tenant;
    int n;
    bool logits; /* prompt logits: no row can be skipped */
} rows[ITEMS] = {
    {1, 0, 0, 1, true},       {70, 0, 0, 3, true},      {200, 0, 0, 1, true},     {33, 0, 0, 1, true},
    {200, 192, 0, 1, false},  {200, 192, 0, 2, false},  {190, 100, 0, 1, false},  {192, 192, 0, 1, false},
    {200, 192, 1, 1, false},  {150, 150, 0, 1, true},
};

static void make_job(const tiny_model *tiny, tiny_job *job, int index) {
    mp_test_random everybody = {99}, own = {100 + (uint64_t)index};
    int32_t prompt[256];
    for (int i = 0; i < rows[index].length; i++)
        prompt[i] = (int32_t)(mp_test_random_u64(i < rows[index].shared ? &everybody : &own) % TINY_VOCAB);
    mp_text_args args = {
        .n_prompt = rows[index].length,
        .prompt = prompt,
        .n_choices = rows[index].n,
        .want_prompt_logits = rows[index].logits,
        .capture_values = rows[index].n == 1 ? 5 : 0,
        .capture_records = rows[index].n == 1 ? 1000 : 0,
        .sampling = {.temperature = index % 2 ? 0.9f : 0, .top_k = index == 3 ? 40 : 0, .top_p = index == 1 ? 0.95f : 1,
                     .repetition_penalty = index == 3 ? 1.2f : 1, .seed = 7, .max_tokens = ANSWER, .logprobs = 9,
                     .ignore_eos = true},
    };
    tiny_job_make(tiny, job, &args, rows[index].tenant);
}

/* Known completions, from which propose_known makes drafts that are correct in four of five tokens. */
typedef struct oracle {
    const tiny_job *jobs;
    mp_test_random random;
    int32_t answers[ITEMS][CHOICES][ANSWER];
} oracle;

static int propose_known(void *arg, const mp_item *item, int choice, int32_t *draft, int most) {
    oracle *all = arg;
    const tiny_job *job = (const tiny_job *)((const uint8_t *)item - offsetof(tiny_job, item));
    const int32_t *answer = all->answers[job - all->jobs][choice];
    int at = (int)job->call->choices[choice].token_count;
    int count = 1 + (int)(mp_test_random_u64(&all->random) % (uint64_t)most);
    MP_CHECK(at + count < ANSWER);
    for (int i = 0; i < count; i++)
        draft[i] = mp_test_random_u64(&all->random) % 5 ? answer[at + i]
                                                        : (int32_t)(mp_test_random_u64(&all->random) % TINY_VOCAB);
    return count;
}

/* The reference: run the first `count` items alone, each in one step, without cache and drafts. */
static void run_alone(tiny_model *tiny, int count, uint64_t *hashes, oracle *known) {
    tiny_speculate(tiny->engine, MP_SPECULATE_OFF, NULL, NULL);
    for (int i = 0; i < count; i++) {
        tiny_job job;
        tiny_trim(tiny);
        make_job(tiny, &job, i);
        tiny_job_admit(tiny, &job);
        mp_item *items[1] = {&job.item};
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        do {
            tiny->engine->ops->plan(tiny->engine, items, 1, UINT64_MAX, &plan);
            MP_CHECK_INT(plan.count, 1);
            tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
        } while (outcomes[0] == MP_OUTCOME_MORE);
        MP_CHECK_INT(outcomes[0], MP_OUTCOME_DONE);
        MP_CHECK_INT(job.call->cached_tokens, 0);
        tiny->engine->ops->retire(tiny->engine, &job.item);
        hashes[i] = tiny_job_hash(&job);
        for (int c = 0; known && c < rows[i].n; c++)
            for (int t = 0; t < ANSWER; t++)
                known->answers[i][c][t] = job.call->choices[c].tokens[t].id;
        mp_request_destroy(&job.call->base);
    }
    MP_CHECK_INT(tiny->engine->prefix->hits, 0);
}

/* Run all items together under a seeded schedule: random amounts, absences and preemptions, and an occasionally emptied
 * cache. The source of drafts changes at random: none, the lookup index, or known completions with some errors. */
static void run_mixed(tiny_model *tiny, uint64_t seed, const uint64_t *expected, oracle *known) {
    mp_test_random random = {seed};
    tiny_job jobs[ITEMS];
    known->jobs = jobs;
    known->random = (mp_test_random){seed};
    mp_error error;
    if (seed % 3 == 1)
        tiny_trim(tiny);
    for (int i = 0; i < ITEMS; i++)
        make_job(tiny, &jobs[i], i);
    for (int open = ITEMS; open > 0;) {
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        int which[ITEMS];
        for (int i = 0; i < ITEMS; i++) {
            tiny_job *job = &jobs[i];
            if (job->done || mp_test_random_u64(&random) % 3 == 0)
                continue;
            if (!job->admitted) {
                MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &job->item, &error), &error);
                job->admitted = true;
            } else if (mp_test_random_u64(&random) % 13 == 0) {
                tiny->engine->ops->preempt(tiny->engine, &job->item);
                MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &job->item, &error), &error);
            }
            which[plan.count] = i;
            plan.items[plan.count] = &job->item;
            plan.amount[plan.count++] = 1 + (uint32_t)(mp_test_random_u64(&random) % 97);
        }
        if (mp_test_random_u64(&random) % 23 == 0)
            tiny_trim(tiny);
        if (plan.count == 0)
            continue;
        uint64_t way = mp_test_random_u64(&random) % 4;
        tiny_speculate(tiny->engine, way > 0 ? MP_SPECULATE_ALWAYS : MP_SPECULATE_OFF, way > 1 ? propose_known : NULL,
                             known);
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
        for (int p = 0; p < plan.count; p++)
            if (outcomes[p] == MP_OUTCOME_DONE) {
                jobs[which[p]].done = true;
                tiny->engine->ops->retire(tiny->engine, plan.items[p]);
                open--;
            } else {
                MP_CHECK_INT(outcomes[p], MP_OUTCOME_MORE);
            }
    }
    for (int i = 0; i < ITEMS; i++) {
        if (tiny_job_hash(&jobs[i]) != expected[i])
            MP_FAIL("item %d differs under seed %llu with %d threads", i, (unsigned long long)seed,
                    tiny->lease.threads);
        if (rows[i].tenant == 1) /* the only request of its tenant: it finds only blocks of an earlier run */
            MP_CHECK(seed % 3 != 1 || jobs[i].call->cached_tokens == 0);
        mp_request_destroy(&jobs[i].call->base);
    }
}

static void check_contract_of(const tiny_kind *kind, void (*recompose)(tiny_model *), const mp_dtype *types, int count,
                              mp_compute compute, int most) {
    uint64_t expected[ITEMS], again[ITEMS];
    oracle known = {0};
    for (int threads = 1; threads <= most; threads++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_decoder_spec_as(kind, types, count, 42, -1), compute, threads);
        if (recompose)
            recompose(&tiny);
        if (threads % 2)
            run_alone(&tiny, ITEMS, threads == 1 ? expected : again, &known);
        if (MP_SANITIZED && threads < most) { /* the schedules of more threads use the same memory */
            tiny_unload(&tiny);
            continue;
        }
        for (uint64_t seed = 1; seed <= (uint64_t)mp_test_rounds(2); seed++)
            run_mixed(&tiny, seed + 10 * (uint64_t)threads, expected, &known);
        MP_CHECK(tiny.engine->work.draft_tokens > tiny.engine->work.accepted_draft_tokens);
        MP_CHECK(tiny.engine->work.accepted_draft_tokens > (uint64_t)mp_test_rounds(20));
        MP_CHECK(tiny.engine->prefix->hits > 0 && tiny.engine->prefix->tokens >= 64);
        tiny_trim(&tiny);
        MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0); /* no reference leaked */
        tiny_unload(&tiny);
    }
    MP_CHECK(most < 3 || memcmp(expected, again, sizeof expected) == 0);
}

static void check_contract(const mp_dtype *types, int count, mp_compute compute) {
    check_contract_of(&(tiny_kind){.arch = "llama"}, NULL, types, count, compute, MP_SANITIZED ? 2 : 4);
}

/* Check one kind of model with quantised weights and, unless in a sanitizer build, with float32. */
static void check_kind(const tiny_kind *kind) {
    static const mp_dtype quantised[] = {MP_Q8_0, MP_Q4_0, MP_Q6_K}, floats[] = {MP_F32};
    check_contract_of(kind, NULL, quantised, 3, MP_COMPUTE_AUTO, 2);
    if (!MP_SANITIZED)
        check_contract_of(kind, NULL, floats, 1, MP_COMPUTE_F32, 2);
}

/* Keys and values in bytes: plain heads, windows and sinks, softcaps, and latents (nine groups in a key). */
static void keep_bytes(tiny_file *file) {
    mp_error error;
    mp_value bytes = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = 4, .as.string = "int8"};
    MP_CHECK_OK(mp_spec_set(file->spec, "mpool.kv_dtype", &bytes, &error), &error);
}

static void keep_unknown(tiny_file *file) {
    mp_error error;
    mp_value other = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = 4, .as.string = "int4"};
    MP_CHECK_OK(mp_spec_set(file->spec, "mpool.kv_dtype", &other, &error), &error);
}

MP_TEST(models_bytes_unknown_type) {
    static const mp_dtype floats[] = {MP_F32};
    const tiny_kind plain = {.arch = "llama"}, unknown = {.arch = "llama", .more = keep_unknown};
    mp_error error;
    mp_loader loader;
    mp_model *model = NULL;
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&plain, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    mp_spec *spec = tiny_decoder_spec_as(&unknown, floats, 1, 43, -1);
    MP_CHECK_OK(mp_model_loader(spec, MP_COMPUTE_F32, &loader, &error), &error);
    MP_CHECK_STATUS(loader.ops->load(loader.self, &tiny.lease, &tiny.budget, NULL, &model, &error),
                    MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STR(error.message, "`mpool.kv_dtype` must be auto or int8, got int4");
    loader.ops->destroy(loader.self);
    mp_spec_unpin(spec);
    tiny_unload(&tiny);
}

MP_TEST_SECONDS(models_contract_bytes, 300) {
    check_kind(&(tiny_kind){.arch = "qwen3", .more = keep_bytes});
}

MP_TEST_SECONDS(models_contract_bytes_windows, 300) {
    check_kind(&(tiny_kind){.arch = "gpt_oss", .window = 80, .experts = 5, .biased = true, .more = keep_bytes});
}

MP_TEST_SECONDS(models_contract_bytes_scaled, 300) {
    check_kind(&(tiny_kind){.arch = "gemma3", .window = 80, .scaled = true, .more = keep_bytes});
}

MP_TEST_SECONDS(models_contract_bytes_latents, 300) {
    check_kind(&(tiny_kind){.arch = "deepseek2", .experts = 6, .more = keep_bytes});
}

MP_TEST_SECONDS(models_contract_head_norms, 300) {
    check_kind(&(tiny_kind){.arch = "qwen3"});
}

MP_TEST_SECONDS(models_contract_gated_heads, 300) {
    check_kind(&(tiny_kind){.arch = "qwen35"});
}

MP_TEST_SECONDS(models_contract_bytes_gated_heads, 300) {
    check_kind(&(tiny_kind){.arch = "qwen35", .more = keep_bytes});
}

MP_TEST_SECONDS(models_contract_scaled, 300) {
    check_kind(&(tiny_kind){.arch = "gemma3", .window = 80, .scaled = true});
}

MP_TEST_SECONDS(models_contract_experts, 300) {
    check_kind(&(tiny_kind){.arch = "qwen3moe", .experts = 6});
}

/* Adds a shared expert whose rows have a gate. */
static void share_gated(tiny_file *file) {
    static const struct {
        const char *name;
        int rows, columns;
    } matrices[] = {{"ffn_gate_shexp", TINY_EXPERT, TINY_HIDDEN}, {"ffn_up_shexp", TINY_EXPERT, TINY_HIDDEN},
                    {"ffn_down_shexp", TINY_HIDDEN, TINY_EXPERT}, {"ffn_gate_inp_shexp", 1, TINY_HIDDEN}};
    char name[64];
    tiny_arch_int(file->spec, "qwen2moe", "expert_shared_feed_forward_length", TINY_EXPERT);
    for (int l = 0; l < TINY_LAYERS; l++)
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++) {
            const bool gate = matrices[m].rows == 1;
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, matrices[m].name);
            tiny_tensor(file, name, gate ? MP_F32 : MP_Q8_0, matrices[m].rows, matrices[m].columns, 0.1f, 0);
        }
}

MP_TEST_SECONDS(models_contract_gated_shared_expert, 300) {
    check_kind(&(tiny_kind){.arch = "qwen2moe", .experts = 6, .more = share_gated});
}

/* Experts see latents of the rows, which are as wide as the rows. */
static void add_latents(tiny_file *file) {
    char name[64];
    tiny_arch_int(file->spec, "qwen3moe", "moe_latent_size", TINY_HIDDEN);
    for (int l = 0; l < TINY_LAYERS; l++)
        for (int i = 0; i < 2; i++) {
            snprintf(name, sizeof name, "blk.%d.ffn_latent_%s.weight", l, i == 0 ? "down" : "up");
            tiny_tensor(file, name, MP_Q8_0, TINY_HIDDEN, TINY_HIDDEN, 0.1f, 0);
        }
}

MP_TEST_SECONDS(models_contract_latent_experts, 300) {
    check_kind(&(tiny_kind){.arch = "qwen3moe", .experts = 6, .more = add_latents});
}

static void scale_queries(tiny_file *file) {
    tiny_arch_float(file->spec, "mistral3", "attention.temperature_scale", 0.5);
    tiny_arch_int(file->spec, "mistral3", "attention.temperature_length", 29);
}

MP_TEST_SECONDS(models_contract_scaled_queries, 300) {
    check_kind(&(tiny_kind){.arch = "mistral3", .more = scale_queries});
}

MP_TEST_SECONDS(models_contract_sinks, 300) {
    check_kind(&(tiny_kind){.arch = "gpt_oss", .window = 80, .experts = 5, .biased = true});
}

MP_TEST_SECONDS(models_contract_latents, 300) {
    check_kind(&(tiny_kind){.arch = "deepseek2", .experts = 6});
}

MP_TEST_SECONDS(models_contract_norms_of_outputs, 300) { check_kind(&(tiny_kind){.arch = "olmo2"}); }

MP_TEST_SECONDS(models_contract_one_norm, 300) {
    check_kind(&(tiny_kind){.arch = "cohere2", .one_norm = true, .layer_norms = true, .window = 80});
}

/* And gates of heads, and a window. */
MP_TEST_SECONDS(models_contract_short_convolutions, 300) {
    static const int64_t mixers[TINY_LAYERS] = {1, 0, 0};
    check_kind(&(tiny_kind){.arch = "lfm3", .mixers = mixers, .window = 80});
}

MP_TEST_SECONDS(models_contract_gated_delta_nets, 300) {
    static const int64_t mixers[TINY_LAYERS] = {2, 0, 2};
    check_kind(&(tiny_kind){.arch = "lfm2", .mixers = mixers});
}

MP_TEST_SECONDS(models_contract_joined_delta_nets, 300) {
    static const int64_t mixers[TINY_LAYERS] = {2, 0, 2};
    check_kind(&(tiny_kind){.arch = "qwen3next", .mixers = mixers});
}

MP_TEST_SECONDS(models_contract_mamba2, 300) {
    static const int64_t mixers[TINY_LAYERS] = {3, 0, 3};
    check_kind(&(tiny_kind){.arch = "lfm2", .mixers = mixers});
}

MP_TEST_SECONDS(models_contract_long_rope, 300) { check_kind(&(tiny_kind){.arch = "phi3", .long_from = 180}); }

static void scale_residuals(tiny_file *file) { tiny_float(file->spec, "mpool.residual_scale", 0.5); }

/* Halve the weights and biases of the last linear layer of every attention and feed-forward block. */
static void halve_outputs(tiny_file *file) {
    for (int t = 0; t < mp_spec_tensor_count(file->spec); t++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(file->spec, t);
        if (!strstr(entry->name, "attn_output") && !strstr(entry->name, "ffn_down"))
            continue;
        MP_CHECK_INT(entry->dtype, MP_F32);
        for (uint8_t *at = file->bytes + entry->offset; at < file->bytes + entry->offset + entry->nbytes; at += 4) {
            float x;
            memcpy(&x, at, sizeof x);
            x *= 0.5f;
            memcpy(at, &x, sizeof x);
        }
    }
}

/* Keys and values in bytes change the logits of a prompt by 0.5 to 4 %, and take a quarter of fp32's memory and scales.
 */
MP_TEST_SECONDS(models_bytes_are_close, 60) {
    enum { PROMPT = 100 };
    static const mp_dtype floats[] = {MP_F32};
    static float logits[2][PROMPT * TINY_VOCAB];
    const tiny_kind kinds[] = {{.arch = "qwen3"},
                               {.arch = "gpt_oss", .window = 9, .experts = 5, .biased = true},
                               {.arch = "deepseek2", .experts = 6}};
    int32_t prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = i * 37 % TINY_VOCAB;
    const mp_text_args args = {.n_prompt = PROMPT, .prompt = prompt, .n_choices = 1, .want_prompt_logits = true,
                               .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        int64_t bytes[2];
        double far = 0, size = 0;
        for (int i = 0; i < 2; i++) {
            tiny_kind kind = kinds[k];
            tiny_model tiny;
            tiny_job job;
            mp_model_facts facts;
            kind.more = i ? keep_bytes : NULL;
            tiny_load(&tiny, tiny_decoder_spec_as(&kind, floats, 1, 42, -1), MP_COMPUTE_F32, 2);
            tiny_job_make(&tiny, &job, &args, 0);
            tiny_job_admit(&tiny, &job);
            tiny_job_finish(&tiny, &job);
            memcpy(logits[i], job.call->prompt_logits, sizeof logits[i]);
            mp_model_get_facts(tiny.model, &facts);
            bytes[i] = facts.kv_token_bytes;
            MP_CHECK_STR(facts.kv_dtype, i ? "int8" : "float32");
            mp_request_destroy(&job.call->base);
            tiny_unload(&tiny);
        }
        for (int i = 0; i < PROMPT * TINY_VOCAB; i++) {
            far += pow((double)logits[0][i] - (double)logits[1][i], 2);
            size += pow((double)logits[0][i], 2);
        }
        MP_CHECK(far > 0 && sqrt(far / size) < 0.05);
        /* 32 floats become 32 bytes, a scale and one multiplier */
        MP_CHECK(bytes[1] * 4 * 32 == bytes[0] * (32 + 4 + 1) || strcmp(kinds[k].arch, "deepseek2") == 0);
    }
}

/* The residual scale multiplies biases as well as weights: a scale of 1/2 gives the same bits as halved tensors. */
MP_TEST_SECONDS(models_residual_scale_covers_biases, 60) {
    static const mp_dtype floats[] = {MP_F32};
    void (*const more[])(tiny_file *) = {scale_residuals, halve_outputs};
    uint64_t hashes[2][ITEMS];
    for (int i = 0; i < 2; i++) {
        tiny_model tiny;
        const tiny_kind kind = {.arch = "gpt_oss", .experts = 5, .biased = true, .more = more[i]};
        tiny_load(&tiny, tiny_decoder_spec_as(&kind, floats, 1, 46, -1), MP_COMPUTE_F32, 2);
        run_alone(&tiny, mp_test_rounds(ITEMS), hashes[i], NULL);
        tiny_unload(&tiny);
    }
    MP_CHECK(memcmp(hashes[0], hashes[1], (size_t)mp_test_rounds(ITEMS) * sizeof hashes[0][0]) == 0);
}

/* Windows shorter than a block, longer than one, and longer than two. */
MP_TEST_SECONDS(models_contract_window_short, 300) { check_kind(&(tiny_kind){.arch = "llama", .window = 3}); }
MP_TEST_SECONDS(models_contract_window, 300) { check_kind(&(tiny_kind){.arch = "llama", .window = 70}); }
MP_TEST_SECONDS(models_contract_window_long, 300) { check_kind(&(tiny_kind){.arch = "llama", .window = 131}); }

/* Heads of two sizes, values that are keys, keys of another layer, inputs per layer, or experts beside a network. */
MP_TEST_SECONDS(models_contract_gemma4, 300) { check_kind(&(tiny_kind){.arch = "gemma4", .window = 80}); }
MP_TEST_SECONDS(models_contract_gemma4_experts, 300) {
    check_kind(&(tiny_kind){.arch = "gemma4", .window = 80, .experts = 6});
}
MP_TEST_SECONDS(models_contract_bytes_gemma4, 300) {
    check_kind(&(tiny_kind){.arch = "gemma4", .window = 5, .more = keep_bytes});
}

/* Gemma 3n: three residual sums, of which each layer changes all, and a low-rank network beside each mixer. */
static void add_streams(tiny_file *file) {
    enum { SUMS = 3, RANK = 32, LAYER_PARTS = 8 };
    static const struct {
        const char *name;
        int rows, columns;
        float size, offset;
    } parts[] = {{"altup_router", SUMS, TINY_HIDDEN, 0.5f, 0},
                 {"altup_predict_coef", SUMS * SUMS, SUMS, 0.3f, 0},
                 {"altup_correct_coef", SUMS, SUMS, 0.3f, 0},
                 {"altup_correct_scale", 1, TINY_HIDDEN, 0.3f, 1},
                 {"altup_router_norm", 1, TINY_HIDDEN, 0.3f, 1},
                 {"laurel_l", RANK, TINY_HIDDEN, 0.1f, 0},
                 {"laurel_r", TINY_HIDDEN, RANK, 0.1f, 0},
                 {"laurel_post_norm", 1, TINY_HIDDEN, 0.3f, 1}};
    static const char *const projections[] = {"altup_proj", "altup_unembd_proj"};
    char name[64];
    tiny_arch_int(file->spec, "gemma4", "altup.num_inputs", SUMS);
    for (int i = 0; i < 2 * (SUMS - 1); i++) {
        snprintf(name, sizeof name, "%s.%d.weight", projections[i % 2], i / 2);
        tiny_tensor(file, name, MP_Q8_0, TINY_HIDDEN, TINY_HIDDEN, 0.1f, 0);
    }
    for (int i = 0; i < TINY_LAYERS * LAYER_PARTS; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", i / LAYER_PARTS, parts[i % LAYER_PARTS].name);
        tiny_tensor(file, name, MP_F32, parts[i % LAYER_PARTS].rows, parts[i % LAYER_PARTS].columns,
                    parts[i % LAYER_PARTS].size, parts[i % LAYER_PARTS].offset);
    }
}

MP_TEST_SECONDS(models_contract_streams, 300) {
    check_kind(&(tiny_kind){.arch = "gemma4", .window = 80, .more = add_streams});
}

/* Attention with different heads, widths and windows, and with shared keys and values. */
MP_TEST_SECONDS(models_contract_stores, 300) {
    static const mp_dtype quantised[] = {MP_Q8_0, MP_Q4_0, MP_Q6_K};
    tiny_weights = "packed"; /* blocks share matrices: none may be packed later */
    check_contract_of(&(tiny_kind){.arch = "llama"}, tiny_mix_stores, quantised, 3, MP_COMPUTE_AUTO, 2);
    tiny_weights = NULL;
}

MP_TEST_SECONDS(models_contract_quantised, 120) {
    static const mp_dtype types[] = {MP_Q8_0, MP_Q4_1, MP_Q4_0, MP_Q5_0, MP_Q4_K, MP_Q6_K, MP_Q5_1, MP_Q5_K};
    check_contract(types, 8, MP_COMPUTE_AUTO);
}

MP_TEST_SECONDS(models_contract_float32, 120) {
    static const mp_dtype types[] = {MP_F32};
    check_contract(types, 1, MP_COMPUTE_F32);
}

MP_TEST_SECONDS(models_contract_bfloat16, 120) {
    static const mp_dtype types[] = {MP_F32};
    check_contract(types, 1, MP_COMPUTE_BF16);
}

/* The logits of a prompt of 33 tokens, and the log probabilities of four greedy tokens with nine alternatives each. */
static bool decoder_is_recorded(const char *what, const tiny_kind *kind, mp_dtype type, mp_compute compute,
                                const double *recorded, double tolerance) {
    enum { PROMPT = 33, GREEDY = 4, TOP = 9 };
    static float values[PROMPT * TINY_VOCAB];
    int32_t prompt[PROMPT];
    tiny_model tiny;
    tiny_job job;
    char name[64];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = i * 37 % TINY_VOCAB;
    const mp_text_args args = {
        .n_prompt = PROMPT,
        .prompt = prompt,
        .n_choices = 1,
        .want_prompt_logits = true,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = GREEDY, .logprobs = TOP, .ignore_eos = true},
    };
    tiny_load(&tiny, tiny_decoder_spec_as(kind, &type, 1, 42, -1), compute, 1);
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    tiny_job_finish(&tiny, &job);
    memcpy(values, job.call->prompt_logits, sizeof values);
    snprintf(name, sizeof name, "%s, logits", what);
    bool same = recorded_is(name, values, PROMPT * TINY_VOCAB, recorded[0], tolerance);
    const mp_choice *choice = &job.call->choices[0];
    for (int t = 0; t < GREEDY; t++)
        for (int i = 0; i < TOP; i++)
            values[t * TOP + i] = choice->top_logprobs[t * TOP + i];
    for (int t = 0; t < GREEDY; t++)
        values[GREEDY * TOP + t] = choice->tokens[t].logprob;
    snprintf(name, sizeof name, "%s, log probabilities", what);
    same = recorded_is(name, values, GREEDY * TOP + GREEDY, recorded[1], tolerance) && same;
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
    return same;
}

MP_TEST(models_contract_recorded) {
    static const struct {
        tiny_kind kind;
        double recorded[2];
    } kinds[] = {
        {{.arch = "llama"}, {-143.7138, 32.3465}},
        {{.arch = "llama", .window = 9}, {-98.67845, 15.6966}},
        {{.arch = "qwen3"}, {150.4037, 26.69991}},
        {{.arch = "gemma3", .window = 9, .scaled = true},
         {-93.18233, 19.35163}},
        {{.arch = "qwen3moe", .experts = 6}, {101.2063, 31.46143}},
        {{.arch = "gpt_oss", .window = 9, .experts = 5, .biased = true}, {-236.4597, 53.92242}},
        {{.arch = "deepseek2", .experts = 6}, {163.4323, 28.08222}},
        {{.arch = "phi3", .long_from = 180}, {-23.23154, 37.33223}},
        {{.arch = "phi3", .long_from = 20}, {25.80075, 34.44707}},
    };
    int wrong = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        wrong += !decoder_is_recorded(kinds[i].kind.arch, &kinds[i].kind, MP_F32, MP_COMPUTE_F32, kinds[i].recorded,
                                      RECORDED_FLOATS);
    MP_CHECK_INT(wrong, 0);
}

MP_TEST(models_contract_recorded_types) {
    static const struct {
        mp_dtype type;
        mp_compute compute;
        double recorded[2];
    } types[] = {
        {MP_F32, MP_COMPUTE_BF16, {-143.2917, 32.62036}},
        {MP_F32, MP_COMPUTE_I8, {-137.8431, 29.88315}},
        {MP_Q8_0, MP_COMPUTE_AUTO, {357.8084, 19.44628}},
        {MP_Q4_0, MP_COMPUTE_AUTO, {47.26178, 33.76325}},
        {MP_Q4_1, MP_COMPUTE_AUTO, {662.4694, 31.29395}},
        {MP_Q5_0, MP_COMPUTE_AUTO, {42.09634, 29.75223}},
        {MP_Q5_1, MP_COMPUTE_AUTO, {1329.522, 25.19552}},
        {MP_Q2_K, MP_COMPUTE_AUTO, {15.7414, 35.62728}},
        {MP_Q3_K, MP_COMPUTE_AUTO, {-5.88872, 36.8394}},
        {MP_Q4_K, MP_COMPUTE_AUTO, {1570.96, 18.57922}},
        {MP_Q5_K, MP_COMPUTE_AUTO, {1602.383, 18.46966}},
        {MP_Q6_K, MP_COMPUTE_AUTO, {-162.2041, 19.16073}},
    };
    const tiny_kind llama = {.arch = "llama"};
    int wrong = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        wrong += !decoder_is_recorded(mp_dtype_get(types[i].type)->name, &llama, types[i].type, types[i].compute,
                                      types[i].recorded, RECORDED_ROUNDED);
    MP_CHECK_INT(wrong, 0);
}

/* Results have the same bits under every instruction set, except in bfloat16, which is not tested here. */
MP_TEST_SECONDS(models_contract_masks, 120) {
    static const mp_dtype types[] = {MP_Q4_0, MP_Q6_K, MP_Q8_0, MP_Q4_K, MP_Q4_1};
    static const char *const masks[] = {"ref",        "avx2", "avxvnni", "avx512",
                                        "avx512vnni", "neon", "dotprod", "i8mm"};
    uint64_t expected[ITEMS], got[ITEMS];
    tiny_model tiny;
    mp_error error;
    tiny_load(&tiny, tiny_decoder_spec(types, 5, 43), MP_COMPUTE_AUTO, 2);
    const int items = mp_test_rounds(ITEMS);
    run_alone(&tiny, items, expected, NULL);
    int compared = 0;
    for (size_t m = 0; m < sizeof masks / sizeof *masks; m++) {
        if (mp_cpu_init(masks[m], &error) != MP_OK)
            continue; /* this machine lacks the instruction set */
        mp_kernels_init();
        run_alone(&tiny, items, got, NULL);
        MP_CHECK(memcmp(expected, got, (size_t)items * sizeof *got) == 0);
        compared++;
    }
    MP_CHECK(compared >= 1);
    tiny_unload(&tiny);
}

/* A preempted request that ends before its next admission leaks nothing. */
MP_TEST(models_preempted_requests_can_be_abandoned) {
    static const mp_dtype types[] = {MP_Q8_0};
    tiny_model tiny;
    mp_error error;
    tiny_load(&tiny, tiny_decoder_spec(types, 1, 47), MP_COMPUTE_AUTO, 1);
    uint64_t before = mp_alloc_bytes(MP_TAG_REQUEST);
    tiny_job job;
    make_job(&tiny, &job, 1);
    MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &job.item, &error), &error);
    mp_plan plan = {.count = 1, .items = {&job.item}, .amount = {80}};
    mp_outcome outcomes[MP_PLAN_MAX];
    tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    tiny.engine->ops->preempt(tiny.engine, &job.item);
    MP_CHECK(job.item.abandon != NULL);
    job.item.abandon(&job.item);
    MP_CHECK_INT(job.call->choices[0].finish, MP_FINISH_CANCELLED);
    mp_request_destroy(&job.call->base);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_REQUEST), before);
    tiny_unload(&tiny);
}
