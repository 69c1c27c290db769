/* test_models_ranges.c: the allowed values of every hyper-parameter of language models, encoders and image networks. */
#include "ranges_fixture.h"
#include "models/generation/states.h"
#include "vit_fixture.h"

static mp_spec *decoder(tiny_kind kind) {
    static const mp_dtype types[] = {MP_F32};
    return tiny_decoder_spec_as(&kind, types, 1, 42, -1);
}

MP_TEST(models_ranges_of_decoders) {
    static const range common[] = {
        {".attention.head_count", "an integer from 1 to 256, or an array of 3"},
        {".attention.head_count_kv", "an integer from 1 to 8, or an array of 3"},
        {".altup.num_inputs", "an integer from 1 to 4"},
        {".attention.key_length", "an integer from 1 to 1024 (a limit of mpool)"},
        {".attention.key_length_swa", "an integer from 1 to 1024 (a limit of mpool)"},
        {".attention.shared_kv_layers", "an integer from 0 to 2"},
        {".embedding_length_per_layer_input", "an integer from 0 to 2097151 (a limit of mpool)"},
        {".attention.layer_norm_rms_epsilon", "a number from 1e-30 to 1"},
        {".attention.sliding_window", "an integer from 0 to 2147483647"},
        {".attention.value_length", "an integer from 1 to 1024 (a limit of mpool)"},
        {".block_count", "an integer from 1 to 1024 (a limit of mpool)"},
        {".context_length", "an integer from 1 to 16777216 (a limit of mpool)"},
        {".embedding_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {".expert_count", "an integer from 0 to 4096"},
        {".feed_forward_length", "an integer from 1 to 1048576, or an array of 3"},
        {".rope.dimension_count", "an integer from 2 to 32"},
        {".rope.freq_base", "a number from 1 to 1e+12"},
        {"mpool.attention_scale", "a number from 1e-09 to 1e+09"},
        {"mpool.attention_softcap", "a number from 0.001 to 1e+09"},
        {"mpool.dense_layers", "an integer from 0 to 1, or an array of 3"},
        {"mpool.embedding_scale", "a number from 1e-09 to 1e+09"},
        {"mpool.latent_epsilon", "a number from 1e-30 to 1"},
        {"mpool.norm_offset", "a number from -1000 to 1000"},
        {"mpool.output_scale", "a number from 1e-09 to 1e+09"},
        {"mpool.output_softcap", "a number from 0.001 to 1e+09"},
        {"mpool.residual_scale", "a number from 1e-09 to 1e+09"},
        {"mpool.rope_attention_factor", "a number from 0.001 to 1000"},
        {"mpool.rope_layers", "an integer from -1 to 0, or an array of 3"},
        {"mpool.rope_local_base", "a number from 1 to 1e+12"},
        {"mpool.rope_long_from", "an integer from 1 to 16777216"},
        {"mpool.rope_sections", "an integer from 0 to 1024, or an array of 3"},
        {"mpool.window_layers", "an integer from 0 to 1, or an array of 3"},
        {"mpool.image_spans", "an integer from 0 to 1, or an array of 3"},
    };
    check_ranges(decoder((tiny_kind){.arch = "llama", .long_from = 12}), RANGES(common));
}

static void make_proportional(tiny_file *file) {
    tiny_string(file->spec, "llama.rope.scaling.type", "proportional");
    tiny_int(file->spec, "mpool.rope_pairs", 3);
}

MP_TEST(models_ranges_of_proportional_rope) {
    static const range pairs[] = {{"mpool.rope_pairs", "an integer from 0 to 16"}};
    check_ranges(decoder((tiny_kind){.arch = "llama", .more = make_proportional}), RANGES(pairs));
}

MP_TEST(models_ranges_of_states) {
    static const int64_t mixers[TINY_LAYERS] = {1, 0, 2};
    static const range sizes[] = {
        {".shortconv.l_cache", "an integer from 2 to 16"},
        {".ssm.conv_kernel", "an integer from 2 to 16"},
        {".ssm.group_count", "an integer from 1 to 4096"},
        {".ssm.inner_size", "an integer from 4 to 4096"},
        {".ssm.state_size", "an integer from 1 to 1024"},
        {".ssm.time_step_rank", "an integer from 1 to 4096"},
        {"mpool.layer_mixers", "an integer from 0 to 3, or an array of 3"},
    };
    static const int64_t mamba[TINY_LAYERS] = {3, 0, 3};
    static const range limits[] = {{".ssm.group_count", "an integer from 1 to 4096"},
                                   {".ssm.time_step_rank", "an integer from 1 to 4096"},
                                   {"mpool.step_low", "a number from 0 to 1e+09"},
                                   {"mpool.step_high", "a number from 0 to 1e+09"}};
    check_ranges(decoder((tiny_kind){.arch = "lfm2", .mixers = mixers}), RANGES(sizes));
    check_ranges(decoder((tiny_kind){.arch = "lfm2", .mixers = mamba}), RANGES(limits));
}

/* Sizes of states that are out of range, that contradict each other or the tensors, or that overflow. */
MP_TEST(models_ranges_of_hostile_states) {
    static const int64_t both[][TINY_LAYERS] = {{1, 0, 2}, {1, 0, 3}}, many[] = {1, 0, 2, 0}, other[] = {1, 0, 99};
    static const struct {
        const char *key;
        int64_t value;
    } cases[] = {
        {"lfm2.shortconv.l_cache", 0}, {"lfm2.shortconv.l_cache", INT32_MAX + 1ll}, {"lfm2.shortconv.l_cache", 4},
        {"lfm2.ssm.conv_kernel", 0},   {"lfm2.ssm.conv_kernel", INT64_MIN},         {"lfm2.ssm.conv_kernel", 16},
        {"lfm2.ssm.state_size", 0},    {"lfm2.ssm.state_size", INT64_MAX},          {"lfm2.ssm.state_size", 1024},
        {"lfm2.ssm.group_count", 3},   {"lfm2.ssm.group_count", 4096},              {"lfm2.ssm.time_step_rank", 6},
        {"lfm2.ssm.inner_size", 85},   {"lfm2.ssm.inner_size", INT64_MAX},          {"lfm2.ssm.inner_size", 4096},
        {"lfm2.ssm.group_count", 0},   {"lfm2.ssm.group_count", -2},                {"lfm2.ssm.time_step_rank", 0},
    };
    mp_spec *base = NULL;
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int kind = 0; kind < 2; kind++) {
        mp_spec_unpin(base);
        base = decoder((tiny_kind){.arch = "lfm2", .mixers = both[kind]});
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            const mp_value value = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = cases[i].value};
            MP_CHECK_STATUS(load_only(spec_with(base, cases[i].key, &value), MP_COMPUTE_AUTO, &error), MP_FORMAT,
                            &error);
        }
    }
    const mp_value longer = {.type = MP_VALUE_INTS, .gguf_type = -1, .count = 4, .as.integers = many};
    const mp_value unknown = {.type = MP_VALUE_INTS, .gguf_type = -1, .count = 3, .as.integers = other};
    const mp_value none = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = 1};
    MP_CHECK_STATUS(load_only(spec_with(base, "mpool.layer_mixers", &longer), MP_COMPUTE_AUTO, &error), MP_FORMAT,
                    &error);
    MP_CHECK_STATUS(load_only(spec_with(base, "mpool.layer_mixers", &unknown), MP_COMPUTE_AUTO, &error), MP_FORMAT,
                    &error);
    MP_CHECK_STATUS(load_only(spec_with(base, "mpool.layer_mixers", &none), MP_COMPUTE_AUTO, &error), MP_UNSUPPORTED,
                    &error);
    mp_spec_unpin(base);
}

/* A small file may ask for a state of 2 GB: the prediction includes it, and its budget refuses it at no cost. */
MP_TEST(models_ranges_of_large_states) {
    enum { HEADS = 1024, DK = 1024, DV = 512 };
    static const int64_t mixers[TINY_LAYERS] = {0, 0, 2};
    static const struct {
        const char *key;
        int64_t value;
    } sizes[] = {{"lfm2.ssm.time_step_rank", HEADS}, {"lfm2.ssm.state_size", DK}, {"lfm2.ssm.inner_size", HEADS * DV},
                 {"lfm2.ssm.group_count", 1}};
    mp_spec *spec = decoder((tiny_kind){.arch = "lfm2", .mixers = mixers});
    const uint64_t bytes = (uint64_t)HEADS * DK * DV * sizeof(float);
    uint64_t small, model, engine;
    mp_error error;
    mp_decoder_footprint(spec, MP_COMPUTE_F32, &model, &small);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const mp_value value = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = sizes[i].value};
        mp_spec *next = spec_with(spec, sizes[i].key, &value);
        mp_spec_unpin(spec);
        spec = next;
    }
    mp_decoder_footprint(spec, MP_COMPUTE_F32, &model, &engine);
    MP_CHECK(engine >= small + bytes);
    mp_spec_unpin(spec);
    mp_budget budget = {.limit = bytes - 1};
    mp_prefix_counters counters = {0};
    mp_states states;
    mp_state *state = NULL;
    mp_states_init(&states, bytes, 1, &budget, 10, &counters);
    MP_CHECK_STATUS(mp_state_create(&states, NULL, &state, &error), MP_MEMORY_EXHAUSTED, &error);
    MP_CHECK(!state && budget.used == 0);
    mp_states_deinit(&states);
}

MP_TEST(models_ranges_of_experts) {
    static const range experts[] = {
        {".expert_feed_forward_length", "an integer from 1 to 1048576 (a limit of mpool)"},
        {".expert_shared_feed_forward_length", "an integer from 0 to 1048576 (a limit of mpool)"},
        {".expert_used_count", "an integer from 1 to 4"},
        {".leading_dense_block_count", "an integer from 0 to 3"},
        {".moe_latent_size", "an integer from 0 to 65536 (a limit of mpool)"},
        {"mpool.expert_clamp", "a number from 0.001 to 1e+06"},
        {"mpool.expert_epsilon", "a number from 1e-30 to 1"},
        {"mpool.expert_groups", "an integer from 1 to 4"},
        {"mpool.expert_groups_used", "the integer 1"},
        {"mpool.expert_scale", "a number from 1e-06 to 1e+06"},
    };
    check_ranges(decoder((tiny_kind){.arch = "gpt_oss", .experts = 4, .biased = true}), RANGES(experts));
}

MP_TEST(models_ranges_of_latent_attention) {
    static const range latents[] = {
        {".attention.head_count", "an integer from 1 to 1024 (a limit of mpool)"},
        {".attention.key_length_mla", "an integer from 2 to 1024 (a limit of mpool)"},
        {".attention.kv_lora_rank", "an integer from 1 to 4096 (a limit of mpool)"},
        {".attention.q_lora_rank", "an integer from 0 to 16384 (a limit of mpool)"},
        {".attention.value_length_mla", "an integer from 1 to 1024 (a limit of mpool)"},
        {".rope.dimension_count", "an integer from 2 to 63"},
        {"mpool.expert_groups_used", "an integer from 1 to 2"},
    };
    check_ranges(decoder((tiny_kind){.arch = "deepseek2", .experts = 4}), RANGES(latents));
}

static mp_spec *scaled(const char *scaling) {
    static const char *const reals[] = {"original_context_length", "factor", "low_freq_factor", "high_freq_factor"};
    mp_error error;
    mp_spec *base = decoder((tiny_kind){.arch = "llama"}), *spec = spec_copy(base, -1, 0);
    const mp_value type = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = strlen(scaling), .as.string = scaling};
    MP_CHECK_OK(mp_spec_set(spec, "llama.rope.scaling.type", &type, &error), &error);
    for (int i = 0; i < 4; i++) {
        char key[64];
        snprintf(key, sizeof key, "llama.rope.scaling.%s", reals[i]);
        tiny_float(spec, key, i + 1);
    }
    mp_spec_freeze(spec);
    mp_spec_unpin(base);
    return spec;
}

MP_TEST(models_ranges_of_ropes) {
    static const range yarn[] = {
        {".rope.scaling.attn_factor", "a number from 0.001 to 1000"},
        {".rope.scaling.factor", "a number from 1 to 1e+06"},
        {".rope.scaling.original_context_length", "a number from 1 to 1e+09"},
        {".rope.scaling.yarn_beta_fast", "a number from 0.001 to 1e+06"},
        {".rope.scaling.yarn_beta_slow", "a number from 0.001 to 1e+06"},
    };
    static const range llama3[] = {
        {".rope.scaling.high_freq_factor", "a number from 0.001 to 1e+06"},
        {".rope.scaling.low_freq_factor", "a number from 0.001 to 1e+06"},
    };
    static const range ropes[] = {
        {"mpool.rope_layers", "an integer from -1 to 1, or an array of 3"},
    };
    check_ranges(scaled("yarn"), RANGES(yarn));
    check_ranges(scaled("llama3"), RANGES(llama3));
    check_ranges(decoder((tiny_kind){.arch = "gemma3", .window = 9, .scaled = true}), RANGES(ropes));
}

MP_TEST(models_ranges_of_encoders) {
    static const range all[] = {
        {".attention.head_count", "an integer from 1 to 65536"},
        {".attention.head_count_kv", "an integer from 1 to 4"},
        {".attention.key_length", "an integer from 0 to 65536"},
        {".attention.layer_norm_epsilon", "a number from 1e-30 to 1"},
        {".attention.value_length", "an integer from 0 to 65536"},
        {".block_count", "an integer from 1 to 1024 (a limit of mpool)"},
        {".context_length", "an integer from 1 to 1048576 (a limit of mpool)"},
        {".embedding_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {".expert_count", "an integer from 0 to 1024"},
        {".feed_forward_length", "an integer from 1 to 1048576 (a limit of mpool)"},
        {"mpool.attention_scale", "a number from 1e-06 to 1e+06"},
        {"mpool.dense_count", "an integer from 0 to 8"},
        {"mpool.embedding_scale", "a number from 1e-06 to 1e+06"},
        {"mpool.layer_windows", "an integer from 0 to 1048576, or an array of 2"},
        {"mpool.norm_offset", "a number from -1000 to 1000"},
        {"mpool.pooling", "a list of 1 to 6 names"},
    };
    check_ranges(tiny_encoder_spec_of(false, true), RANGES(all));
}

MP_TEST(models_ranges_of_image_networks) {
    static const range images[] = {
        {".vision.attention.head_count", "an integer from 1 to 48"},
        {".vision.attention.layer_norm_epsilon", "a number from 1e-30 to 1"},
        {".vision.block_count", "an integer from 1 to 1024 (a limit of mpool)"},
        {".vision.embedding_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {".vision.feed_forward_length", "an integer from 1 to 1048576 (a limit of mpool)"},
        {".vision.image_size", "an integer from 7 to 1792"},
        {".vision.patch_size", "an integer from 1 to 256 (a limit of mpool)"},
        {"mpool.dense_count", "an integer from 0 to 8"},
        {"mpool.image.mean", "three finite numbers"},
        {"mpool.image.registers", "an integer from 0 to 64 (a limit of mpool)"},
        {"mpool.image.rescale_factor", "a number from 1e-09 to 1e+09"},
        {"mpool.image.std", "three finite numbers above 0"},
        {"mpool.image.window_layers", "the integer 0, or an array of 2"},
        {"mpool.pooling", "a list of 1 to 6 names"},
    };
    check_ranges(make_spec("dinov2_with_registers", true), RANGES(images));
}

/* An image network has one pooling, by the class token; it may come from learned attention. */
MP_TEST(models_ranges_of_image_poolings) {
    static const struct { const char *names; uint64_t count, ends[3]; bool good; } cases[] = {
        {"cls", 1, {0, 3}, true}, {"mean", 1, {0, 4}, false}, {"clsmean", 2, {0, 3, 7}, false},
        {"meancls", 2, {0, 4, 7}, false}};
    const mp_value none = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int pool = 0; pool < 2; pool++) {
        mp_spec *dense = make_spec(pool ? "siglip" : "dinov2", false);
        mp_spec *base = spec_with(dense, "mpool.dense_count", &none); /* a dense layer has the inputs of one pooling */
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            const mp_value names = {.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = cases[i].count,
                                    .as.strings = {cases[i].names, cases[i].ends}};
            mp_status status = load_only(spec_with(base, "mpool.pooling", &names), MP_COMPUTE_AUTO, &error);
            MP_CHECK_STATUS(status, cases[i].good ? MP_OK : MP_FORMAT, &error);
            if (!cases[i].good)
                MP_CHECK_STR(error.field, "mpool.pooling");
            if (!cases[i].good)
                MP_CHECK_STR(error.allowed, "cls");
        }
        mp_spec_unpin(base);
        mp_spec_unpin(dense);
    }
}

/* A pooling has one of six names; an error lists them. */
MP_TEST(models_ranges_of_poolings) {
    static const char *const names[] = {"cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken",
                                        "median", "means", "cl", ""};
    enum { KNOWN = 6 };
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    mp_spec *base = tiny_encoder_spec(false);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const uint64_t ends[] = {0, strlen(names[i])};
        const mp_value value = {.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 1, .as.strings = {names[i], ends}};
        mp_status status = load_only(spec_with(base, "mpool.pooling", &value), MP_COMPUTE_AUTO, &error);
        MP_CHECK_STATUS(status, i < KNOWN ? MP_OK : MP_FORMAT, &error);
        if (i < KNOWN)
            continue;
        MP_CHECK_STR(error.field, "mpool.pooling");
        MP_CHECK_STR(error.allowed, "cls, max, mean, mean_sqrt_len, weightedmean, lasttoken");
    }
    mp_spec_unpin(base);
}
