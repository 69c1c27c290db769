/* test_models_encoder_families_sizes.c: sizes, counts and defaults of encoders of all families. */
#include "defaults_fixture.h"
#include "encoder_families_fixture.h"
#include "late_threads.h"
#include "sizes_fixture.h"

/* Scratch, predicted memory, parameters and barriers of every family, as recorded. */
MP_TEST(models_encoder_families_sizes_recorded) {
    enum { T = 40, M = 100, COUNT = 7 };
    static const mp_compute classes[] = {MP_COMPUTE_F32, MP_COMPUTE_BF16, MP_COMPUTE_I8};
    static const uint64_t recorded[sizeof families / sizeof *families][3][COUNT] = {
        {{346112, 1245184, 346624, 240000, 38912, 29, 103872},
         {181248, 1245184, 182784, 188800, 38912, 37, 103872},
         {98816, 1245184, 110080, 253696, 38912, 37, 103872}},
        {{284160, 1245184, 287728, 182400, 38912, 25, 94528},
         {150272, 1245184, 156656, 182400, 38912, 33, 94528},
         {83328, 1245184, 98288, 196096, 38912, 33, 94528}},
        {{345600, 1245184, 346368, 246400, 38912, 29, 103808},
         {180992, 1245184, 182528, 195200, 38912, 37, 103808},
         {98688, 1245184, 109824, 260096, 38912, 37, 103808}},
        {{312320, 1245184, 312576, 214400, 38912, 29, 95360},
         {164352, 1245184, 165120, 163200, 38912, 37, 95360},
         {90368, 1245184, 99584, 228096, 38912, 37, 95360}},
        {{296192, 1245184, 312832, 201600, 38912, 29, 91328},
         {156288, 1245184, 165376, 150400, 38912, 37, 91328},
         {86336, 1245184, 99840, 215296, 38912, 37, 91328}},
        {{297216, 1245184, 313856, 208000, 38912, 33, 91584},
         {156800, 1245184, 166400, 156800, 38912, 41, 91584},
         {86592, 1245184, 100864, 221696, 38912, 41, 91584}},
        {{522496, 1245184, 526080, 316800, 38912, 37, 148032},
         {269440, 1245184, 274944, 214400, 38912, 45, 148032},
         {142912, 1245184, 161024, 343296, 38912, 45, 148032}},
        {{350720, 1245184, 354288, 233600, 38912, 27, 105024},
         {183552, 1245184, 190448, 182400, 38912, 35, 105024},
         {99968, 1245184, 117744, 247296, 38912, 35, 105024}},
        {{353792, 1245184, 357360, 259200, 38912, 29, 105792},
         {185088, 1245184, 193520, 208000, 38912, 37, 105792},
         {100736, 1245184, 120816, 272896, 38912, 37, 105792}},
        {{219136, 1245184, 226816, 299072, 49152, 39, 154112},
         {117760, 1245184, 128512, 375872, 40960, 47, 154112},
         {67072, 1245184, 84992, 340032, 38912, 47, 154112}},
        {{290304, 1245184, 290816, 182400, 38912, 46, 78888},
         {153344, 1245184, 157696, 182400, 38912, 66, 78888},
         {84864, 1245184, 97280, 196096, 38912, 66, 78888}},
        {{300544, 1245184, 301820, 182400, 55808, 25, 106176},
         {166656, 1245184, 170748, 182400, 55808, 33, 106176},
         {99712, 1245184, 112380, 196096, 55808, 33, 106176}},
        {{284160, 1245184, 284672, 188800, 38912, 27, 88384},
         {150272, 1245184, 153600, 188800, 38912, 35, 88384},
         {83328, 1245184, 95232, 202496, 38912, 35, 88384}},
    };
    int wrong = 0;
    for (size_t i = 0; i < 3 * sizeof families / sizeof *families; i++) {
        tiny_model tiny;
        uint64_t got[COUNT];
        char what[64];
        tiny_load(&tiny, make_spec(&families[i / 3]), classes[i % 3], 1);
        const mp_encoder *model = (const mp_encoder *)tiny.model;
        tiny.loader.ops->footprint(tiny.loader.self, &got[0], &got[1]);
        got[2] = tiny.model->ops->bytes(tiny.model);
        got[3] = mp_encoder_group_scratch(model, M, MP_EMBED_POOLED);
        got[4] = mp_encoder_thread_scratch(model, T, M, MP_EMBED_POOLED);
        got[5] = (uint64_t)mp_encoder_barriers(model);
        got[6] = (uint64_t)model->base.facts.parameters;
        snprintf(what, sizeof what, "%s, compute type %d", families[i / 3].arch, (int)classes[i % 3]);
        wrong += !sizes_are(what, got, recorded[i / 3][i % 3], COUNT);
        tiny_unload(&tiny);
    }
    MP_CHECK_INT(wrong, 0);
}

static uint64_t hash_of_texts(mp_spec *spec) {
    static texts all;
    float out[2 * WIDTH];
    tiny_model tiny;
    make_texts(&all);
    tiny_load(&tiny, spec, MP_COMPUTE_F32, 1);
    MP_CHECK_INT(run(&tiny, &all, 5, 2, UINT64_MAX, out), MP_OUTCOME_DONE);
    tiny_unload(&tiny);
    return tiny_hash_bytes(1, out, sizeof out);
}

MP_TEST(models_encoder_families_defaults) {
    MP_RESULTS_ONLY();
    static const optional_key all[] = {
        {"mpool.attention_scale", "0.25", "0.4"}, /* heads of size 16 */
        {".attention.key_length", "16", NULL},
        {".attention.value_length", "16", NULL},
        {"mpool.embedding_scale", "1.0", "2.0"},
        {"mpool.norm_offset", "0.0", "0.5"},
        {"mpool.normalize", "true", "false"},
        {"mpool.activation", "gelu", "relu"},
        {"mpool.sparse", "", NULL},
        {"mpool.rows_count", "0", NULL},
        {"mpool.dense_count", "0", NULL},
    };
    static const optional_key dense[] = {{".expert_count", "0", NULL}};
    static const optional_key with_rope[] = {
        {".attention.causal", "false", "true"},
        {".rope.freq_base", "10000.0", "300.0"},
        {".rope.dimension_count", "16", "8"},
        {".rope.scaling.type", "none", NULL},
        {".attention.head_count_kv", "4", NULL},
    };
    static const optional_key of_experts[] = {
        EXPERT_KEYS,
        {"mpool.expert_groups_used", "1", NULL},
    };
    static const optional_key of_distances[] = {
        {"mpool.relative_buckets", "0", "8"},
        {"mpool.relative_farthest", "8", "25"},
        {"mpool.relative_keys", "false", "true"},
        {"mpool.relative_queries", "false", "true"},
        {"mpool.relative_shared", "false", "true"},
        {"mpool.relative_normed", "false", "true"},
    };
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        const family *f = &families[i];
        if (!f->embedding && !f->causal)
            check_defaults(make_spec(f), hash_of_texts, KEYS(all));
        if (f->rope && f->kv_heads == 4)
            check_defaults(make_spec(f), hash_of_texts, KEYS(with_rope));
        if (f->experts)
            check_defaults(make_spec(f), hash_of_texts, KEYS(of_experts));
        else
            check_defaults(make_spec(f), hash_of_texts, KEYS(dense));
        if (f->disentangled)
            check_defaults(make_spec(f), hash_of_texts, KEYS(of_distances));
    }
}

/* The polls of a pass over two texts, as recorded: before each layer, and in attention and experts. */
MP_TEST(models_encoder_families_polls_recorded) {
    enum { COUNT = sizeof families / sizeof *families };
    static const uint64_t recorded[COUNT] = {4, 4, 4, 4, 4, 4, 4, 4, 4, 14, 7, 4, 4};
    uint64_t got[COUNT];
    for (int i = 0; i < COUNT; i++) {
        (void)lease_polls();
        (void)hash_of_texts(make_spec(&families[i]));
        got[i] = (uint64_t)lease_polls();
    }
    MP_CHECK(sizes_are("polls", got, recorded, COUNT));
}
