/* The numeric contract of encoders: a text's vector is the same bits alone, among others, on any number of lanes;
 * and one bad text harms no other. */
#include "model_fixture.h"

enum { TEXTS = 37, WIDTH = 64, LAYERS = 2, FFN = 128, POSITIONS = 96 };

static mp_spec *encoder_spec(bool poison) {
    mp_error error;
    char path[512], name[64];
    snprintf(path, sizeof path, "%s/encoder.bin", mp_test_directory());
    tiny_file file = {.spec = mp_spec_create(), .random = {11}};
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, "bert", &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    tiny_int(file.spec, "bert.block_count", LAYERS);
    tiny_int(file.spec, "bert.embedding_length", WIDTH);
    tiny_int(file.spec, "bert.feed_forward_length", FFN);
    tiny_int(file.spec, "bert.attention.head_count", 4);
    tiny_int(file.spec, "bert.context_length", POSITIONS);
    tiny_float(file.spec, "bert.attention.layer_norm_epsilon", 1e-12);
    tiny_tensor(&file, "token_embd.weight", MP_F32, TINY_VOCAB, WIDTH, 1, 0);
    if (poison) /* the embedding of token 7 */
        memset(file.bytes + file.used - (size_t)(TINY_VOCAB - 7) * WIDTH * 4, 0xFF, 4);
    tiny_tensor(&file, "position_embd.weight", MP_F32, POSITIONS, WIDTH, 0.3f, 0);
    tiny_tensor(&file, "token_types.weight", MP_F32, 2, WIDTH, 0.3f, 0);
    tiny_tensor(&file, "token_embd_norm.weight", MP_F32, 1, WIDTH, 0.3f, 1);
    tiny_tensor(&file, "token_embd_norm.bias", MP_F32, 1, WIDTH, 0.3f, 0);
    for (int l = 0; l < LAYERS; l++) {
        const struct {
            const char *name;
            int rows, columns;
        } matrices[] = {{"attn_q", WIDTH, WIDTH},      {"attn_k", WIDTH, WIDTH},   {"attn_v", WIDTH, WIDTH},
                        {"attn_output", WIDTH, WIDTH}, {"ffn_up", FFN, WIDTH},     {"ffn_down", WIDTH, FFN}};
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, matrices[m].name);
            tiny_tensor(&file, name, MP_F32, matrices[m].rows, matrices[m].columns, 0.2f, 0);
            snprintf(name, sizeof name, "blk.%d.%s.bias", l, matrices[m].name);
            tiny_tensor(&file, name, MP_F32, 1, matrices[m].rows, 0.2f, 0);
        }
        static const char *const norms[] = {"attn_output_norm", "layer_output_norm"};
        for (int n = 0; n < 2; n++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, norms[n]);
            tiny_tensor(&file, name, MP_F32, 1, WIDTH, 0.3f, 1);
            snprintf(name, sizeof name, "blk.%d.%s.bias", l, norms[n]);
            tiny_tensor(&file, name, MP_F32, 1, WIDTH, 0.3f, 0);
        }
    }
    mp_spec_freeze(file.spec);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return file.spec;
}

typedef struct texts {
    int32_t ids[TEXTS * POSITIONS];
    int64_t offsets[TEXTS + 1];
} texts;

static void make_texts(texts *all) {
    mp_test_random random = {3};
    for (int t = 0; t < TEXTS; t++) {
        int length = t == 5 ? POSITIONS : 1 + (int)(mp_test_random_u64(&random) % 40);
        all->offsets[t + 1] = all->offsets[t] + length;
        for (int i = 0; i < length; i++)
            all->ids[all->offsets[t] + i] = 8 + (int32_t)(mp_test_random_u64(&random) % (TINY_VOCAB - 8));
    }
}

/* Texts [first, first + count) as one call, run to its end. */
static mp_outcome run(tiny_model *tiny, const texts *all, int first, int count, uint64_t budget_ns, float *out) {
    mp_error error;
    mp_embed_call *call;
    int64_t offsets[TEXTS + 1];
    for (int t = 0; t <= count; t++)
        offsets[t] = all->offsets[first + t] - all->offsets[first];
    MP_CHECK_OK(mp_embed_call_create(count, all->ids + all->offsets[first], offsets, NULL, &call, &error), &error);
    mp_item item = {.call = &call->base}, *items[1] = {&item};
    uint64_t cost;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item.call, &cost, &item.total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &item, &error), &error);
    mp_plan plan;
    mp_outcome outcomes[MP_PLAN_MAX];
    do {
        tiny->engine->ops->plan(tiny->engine, items, 1, budget_ns, &plan);
        MP_CHECK_INT(plan.count, 1);
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    } while (outcomes[0] == MP_OUTCOME_MORE);
    tiny->engine->ops->retire(tiny->engine, &item);
    if (outcomes[0] == MP_OUTCOME_FAILED)
        MP_CHECK_INT(item.error.code, MP_NUMERIC);
    else
        memcpy(out, call->vectors, (size_t)count * WIDTH * sizeof(float));
    mp_call_destroy(&call->base);
    return outcomes[0];
}

static void check_grouping(mp_compute compute) {
    static texts all;
    static float alone[TEXTS * WIDTH], together[TEXTS * WIDTH];
    make_texts(&all);
    for (int lanes = 1; lanes <= 4; lanes++) {
        tiny_model tiny;
        tiny_load(&tiny, encoder_spec(false), compute, lanes);
        for (int t = 0; t < TEXTS; t++)
            MP_CHECK_INT(run(&tiny, &all, t, 1, UINT64_MAX, together + t * WIDTH), MP_OUTCOME_DONE);
        if (lanes == 1)
            memcpy(alone, together, sizeof alone);
        MP_CHECK(memcmp(alone, together, sizeof alone) == 0);
        for (uint64_t budget_ns = 1; budget_ns < 1000000000; budget_ns *= 1000) {
            memset(together, 0, sizeof together);
            MP_CHECK_INT(run(&tiny, &all, 0, TEXTS, budget_ns, together), MP_OUTCOME_DONE);
            MP_CHECK(memcmp(alone, together, sizeof alone) == 0);
        }
        tiny_unload(&tiny);
    }
    for (int i = 0; i < TEXTS * WIDTH; i++)
        MP_CHECK(isfinite(alone[i]));
}

MP_TEST_SECONDS(models_encoder_contract_float32, 60) { check_grouping(MP_COMPUTE_F32); }
MP_TEST_SECONDS(models_encoder_contract_bfloat16, 60) { check_grouping(MP_COMPUTE_BF16); }
MP_TEST_SECONDS(models_encoder_contract_int8, 60) { check_grouping(MP_COMPUTE_I8); }

MP_TEST(models_encoder_nan_fails_its_call_only) {
    static texts all;
    static float out[TEXTS * WIDTH];
    make_texts(&all);
    all.ids[all.offsets[3]] = 7;
    tiny_model tiny;
    tiny_load(&tiny, encoder_spec(true), MP_COMPUTE_F32, 2);
    MP_CHECK_INT(run(&tiny, &all, 0, 8, UINT64_MAX, out), MP_OUTCOME_FAILED);
    MP_CHECK_INT(run(&tiny, &all, 4, 8, UINT64_MAX, out), MP_OUTCOME_DONE);
    tiny_unload(&tiny);
}

MP_TEST(models_encoder_refuses_bad_calls) {
    mp_error error;
    tiny_model tiny;
    tiny_load(&tiny, encoder_spec(false), MP_COMPUTE_F32, 1);
    static int32_t ids[POSITIONS + 1];
    const struct {
        int32_t id;
        int64_t length;
        int32_t dimensions, skip;
        mp_status expected;
    } cases[] = {{TINY_VOCAB, 1, 0, 0, MP_INVALID_ARGUMENT},      {-1, 1, 0, 0, MP_INVALID_ARGUMENT},
                 {1, POSITIONS + 1, 0, 0, MP_CONTEXT_OVERFLOW},   {1, 2, WIDTH + 1, 0, MP_INVALID_ARGUMENT},
                 {1, 0, 0, 0, MP_INVALID_ARGUMENT},               {1, 2, 0, 2, MP_INVALID_ARGUMENT},
                 {1, POSITIONS, WIDTH, 1, MP_OK}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t offsets[2] = {0, cases[i].length};
        mp_embed_call *call;
        uint64_t cost;
        uint32_t total;
        ids[0] = cases[i].id;
        MP_CHECK_OK(mp_embed_call_create(1, ids, offsets, &cases[i].skip, &call, &error), &error);
        call->dimensions = cases[i].dimensions;
        MP_CHECK_STATUS(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error), cases[i].expected,
                        &error);
        mp_call_destroy(&call->base);
    }
    tiny_unload(&tiny);
}
