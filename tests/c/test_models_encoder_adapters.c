/* Encoders with low-rank adapters: each text has the bits that it has alone, beside texts of other adapters and beside
 * the same text with another adapter; models with merged weights, also of adapters of one matrix; requests for adapters
 * that the model lacks. */
#include <math.h>

#include "adapter_fixture.h"
#include "encoder_fixture.h"
#include "missing_fixture.h"
#include "sizes_fixture.h"

enum { WHOLE = 7, SMALL = 8, EMPTY = 9, ADAPTERS = 3, CALLS = ADAPTERS + 1, SOME = 20 };
static const int64_t ids[ADAPTERS] = {WHOLE, SMALL, EMPTY};
static const int32_t chosen[CALLS] = {0, WHOLE, SMALL, EMPTY};

static const struct {
    const char *name;
    int N, K;
} layers[] = {{"attn_q", TINY_WIDTH, TINY_WIDTH},      {"attn_k", TINY_WIDTH, TINY_WIDTH},
              {"attn_v", TINY_WIDTH, TINY_WIDTH},      {"attn_output", TINY_WIDTH, TINY_WIDTH},
              {"ffn_up", TINY_ENCODER_FFN, TINY_WIDTH}, {"ffn_down", TINY_WIDTH, TINY_ENCODER_FFN}};
enum { LAYERS = sizeof layers / sizeof *layers };

enum { TYPES = 2 };
static const struct {
    const char *name;
    int rows, rank;
    double scale;
} tables[] = {{"token_embd", TINY_VOCAB, 5, 0.5}, {"token_types", TYPES, 3, -0.75}};
enum { TABLES = sizeof tables / sizeof *tables };

/* Adapter WHOLE updates every layer, with ranks 1, 31 and 33, and the embeddings; SMALL keys of one layer and the MLP
 * of another; EMPTY none. */
static void add_adapters(tiny_file *file) {
    static const int ranks[] = {1, 31, 33};
    char layer[64];
    tiny_ints(file->spec, "mpool.adapters", ids, ADAPTERS);
    for (int i = 0; i < TINY_ENCODER_LAYERS * LAYERS; i++) {
        snprintf(layer, sizeof layer, "blk.%d.%s", i / LAYERS, layers[i % LAYERS].name);
        tiny_update(file, 1, layer, ranks[i % 3], layers[i % LAYERS].N, layers[i % LAYERS].K, i % 2 ? 0.5 : -0.25);
    }
    for (int i = 0; i < TABLES; i++)
        tiny_table_update(file, 1, tables[i].name, tables[i].rank, tables[i].rows, TINY_WIDTH, tables[i].scale);
    tiny_update(file, 2, "blk.1.attn_k", 8, TINY_WIDTH, TINY_WIDTH, 1);
    tiny_update(file, 2, "blk.0.ffn_up", 3, TINY_ENCODER_FFN, TINY_WIDTH, 1);
}

/* Pooling that reads one row, so that the last layer computes one query of each text. */
static void only_cls(tiny_file *file) {
    static const uint64_t ends[] = {0, 3};
    mp_value pooling = {.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 1};
    mp_error error;
    pooling.as.strings.bytes = "cls";
    pooling.as.strings.offsets = ends;
    MP_CHECK_OK(mp_spec_set(file->spec, "mpool.pooling", &pooling, &error), &error);
}

static void add_adapters_and_cls(tiny_file *file) {
    only_cls(file);
    add_adapters(file);
}

typedef struct request {
    mp_embedding_request *call;
    mp_item item;
} request;

static void admit(const tiny_model *tiny, const texts *all, int first, int count, int32_t adapter, request *made) {
    mp_error error;
    uint64_t cost;
    int64_t offsets[TEXTS + 1];
    for (int t = 0; t <= count; t++)
        offsets[t] = all->offsets[first + t] - all->offsets[first];
    *made = (request){0};
    MP_CHECK_OK(make_embedding_request(count, all->ids + all->offsets[first], offsets, NULL, &made->call, &error),
                &error);
    made->call->adapter = adapter;
    made->item.request = &made->call->base;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, made->item.request, &cost, &made->item.total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &made->item, &error), &error);
}

/* Run requests in one step. */
static void serve(tiny_model *tiny, request *requests, int count) {
    mp_plan plan = {.count = count};
    mp_outcome outcomes[CALLS];
    for (int i = 0; i < count; i++) {
        plan.items[i] = &requests[i].item;
        plan.amount[i] = requests[i].item.total;
    }
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    for (int i = 0; i < count; i++) {
        MP_CHECK_INT(outcomes[i], MP_OUTCOME_DONE);
        tiny->engine->ops->retire(tiny->engine, &requests[i].item);
    }
}

static void run_alone(tiny_model *tiny, const texts *all, int text, int32_t adapter, float *out) {
    request one;
    admit(tiny, all, text, 1, adapter, &one);
    serve(tiny, &one, 1);
    memcpy(out, one.call->vectors, WIDTH * sizeof(float));
    mp_request_destroy(&one.call->base);
}

static void check_bits(mp_compute compute, bool cls) {
    static texts all;
    static float alone[CALLS][SOME * WIDTH], plain[SOME * WIDTH];
    make_texts(&all);
    tiny_model tiny;
    tiny_load(&tiny, tiny_encoder_spec_with(false, false, cls ? only_cls : NULL), compute, 1);
    compute_all(&tiny);
    for (int t = 0; t < SOME; t++)
        run_alone(&tiny, &all, t, 0, plain + t * WIDTH);
    tiny_unload(&tiny);
    for (int threads = 1; threads <= 3; threads++) {
        tiny_load(&tiny, tiny_encoder_spec_with(false, false, cls ? add_adapters_and_cls : add_adapters), compute,
                  threads);
        late_thread_of(threads);
        for (int c = 0; c < CALLS; c++)
            for (int t = 0; t < SOME; t++) {
                float out[WIDTH];
                compute_all(&tiny);
                run_alone(&tiny, &all, t, chosen[c], out);
                if (threads == 1)
                    memcpy(alone[c] + t * WIDTH, out, sizeof out);
                MP_CHECK(memcmp(alone[c] + t * WIDTH, out, sizeof out) == 0);
            }
        late_thread(-1);
        MP_CHECK(memcmp(alone[0], plain, sizeof plain) == 0);
        MP_CHECK(memcmp(alone[3], plain, sizeof plain) == 0);
        for (int t = 0; t < SOME; t++)
            for (int c = 1; c < 3; c++)
                MP_CHECK(memcmp(alone[c] + t * WIDTH, alone[c - 1] + t * WIDTH, WIDTH * sizeof(float)) != 0);
        tiny_unload(&tiny);
        /* the same texts with every adapter in one step, and again while their vectors are kept */
        tiny_load(&tiny, tiny_encoder_spec_with(false, false, cls ? add_adapters_and_cls : add_adapters), compute,
                  threads);
        recent_of(tiny.engine)->keep_ns = UINT64_MAX;
        for (int repeat = 0; repeat < 2; repeat++) {
            request requests[CALLS];
            for (int c = 0; c < CALLS; c++)
                admit(&tiny, &all, 0, SOME, chosen[(c + repeat) % CALLS], &requests[c]);
            serve(&tiny, requests, CALLS);
            for (int c = 0; c < CALLS; c++) {
                for (int t = 0; t < SOME; t++)
                    if (memcmp(requests[c].call->vectors + t * WIDTH, alone[(c + repeat) % CALLS] + t * WIDTH,
                               WIDTH * sizeof(float)) != 0)
                        MP_FAIL("%d threads, repeat %d: text %d of call %d differs", threads, repeat, t, c);
                mp_request_destroy(&requests[c].call->base);
            }
        }
        MP_CHECK(recent_of(tiny.engine)->hits >= CALLS * SOME / 2);
        tiny_unload(&tiny);
    }
}

/* Scratch, predicted memory, parameters and barriers of an encoder with adapters, as recorded. */
MP_TEST(models_encoder_adapters_sizes_recorded) {
    enum { M = 20, COUNT = 6 };
    static const mp_compute classes[] = {MP_COMPUTE_F32, MP_COMPUTE_BF16, MP_COMPUTE_I8};
    static const uint64_t recorded[3][COUNT] = {
        {567168, 1245184, 552704, 41856, 37, 94656},
        {433280, 1245184, 421632, 46976, 45, 94656},
        {366336, 1245184, 363264, 44672, 45, 94656},
    };
    int wrong = 0;
    for (int c = 0; c < 3; c++) {
        tiny_model tiny;
        uint64_t got[COUNT];
        char what[32];
        tiny_load(&tiny, tiny_encoder_spec_with(false, false, add_adapters), classes[c], 1);
        const mp_encoder *model = (const mp_encoder *)tiny.model;
        tiny.loader.ops->footprint(tiny.loader.self, &got[0], &got[1]);
        got[2] = tiny.model->ops->bytes(tiny.model);
        got[3] = mp_encoder_group_scratch(model, M, MP_EMBED_POOLED);
        got[4] = (uint64_t)mp_encoder_barriers(model);
        got[5] = (uint64_t)model->base.facts.parameters;
        snprintf(what, sizeof what, "compute type %d", (int)classes[c]);
        wrong += !sizes_are(what, got, recorded[c], COUNT);
        tiny_unload(&tiny);
    }
    MP_CHECK_INT(wrong, 0);
}

MP_TEST_SECONDS(models_encoder_adapters_float32, 60) { check_bits(MP_COMPUTE_F32, false); }
MP_TEST_SECONDS(models_encoder_adapters_bfloat16, 60) { check_bits(MP_COMPUTE_BF16, false); }
MP_TEST_SECONDS(models_encoder_adapters_int8, 60) { check_bits(MP_COMPUTE_I8, false); }
MP_TEST_SECONDS(models_encoder_adapters_cls_float32, 60) { check_bits(MP_COMPUTE_F32, true); }
MP_TEST_SECONDS(models_encoder_adapters_cls_bfloat16, 60) { check_bits(MP_COMPUTE_BF16, true); }
MP_TEST_SECONDS(models_encoder_adapters_cls_int8, 60) { check_bits(MP_COMPUTE_I8, true); }

/* ---- values ------------------------------------------------------------------------------------------------------ */

static float *values_of(const tiny_file *file, const char *name) {
    const mp_tensor_entry *entry = mp_spec_find_tensor(file->spec, name);
    MP_CHECK(entry && entry->dtype == MP_F32);
    return (float *)(void *)(file->bytes + entry->offset);
}

/* Adds `scale` times the update of a layer by the first adapter to the layer's weight. */
static void merge_layer(tiny_file *file, int l, const char *layer, double scale) {
    char name[96];
    snprintf(name, sizeof name, "blk.%d.%s.weight", l, layer);
    float *w = values_of(file, name);
    const int N = (int)mp_spec_find_tensor(file->spec, name)->shape[0];
    const int K = (int)mp_spec_find_tensor(file->spec, name)->shape[1];
    snprintf(name, sizeof name, "adapter.1.blk.%d.%s.lora_a", l, layer);
    const float *a = values_of(file, name);
    const int rank = (int)mp_spec_find_tensor(file->spec, name)->shape[0];
    snprintf(name, sizeof name, "adapter.1.blk.%d.%s.lora_b", l, layer);
    const float *b = values_of(file, name);
    for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++) {
            double sum = 0;
            for (int r = 0; r < rank; r++)
                sum += (double)b[n * rank + r] * (double)a[r * K + k];
            w[n * K + k] = (float)((double)w[n * K + k] + scale * sum);
        }
}

/* Adds the update of an embedding by the first adapter to its table. */
static void merge_table(tiny_file *file, const char *table, int rows, int rank, double scale) {
    char name[96];
    snprintf(name, sizeof name, "%s.weight", table);
    float *w = values_of(file, name);
    snprintf(name, sizeof name, "adapter.1.%s.lora_a", table);
    const float *a = values_of(file, name);
    snprintf(name, sizeof name, "adapter.1.%s.lora_b", table);
    const float *b = values_of(file, name);
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < TINY_WIDTH; i++) {
            double sum = 0;
            for (int r = 0; r < rank; r++)
                sum += (double)a[row * rank + r] * (double)b[r * TINY_WIDTH + i];
            w[row * TINY_WIDTH + i] = (float)((double)w[row * TINY_WIDTH + i] + scale * sum);
        }
}

/* As add_adapters, and adds the update of each layer and embedding by WHOLE to its weight. */
static void merge_adapter(tiny_file *file) {
    add_adapters(file);
    for (int i = 0; i < TABLES; i++)
        merge_table(file, tables[i].name, tables[i].rows, tables[i].rank, tables[i].scale);
    for (int i = 0; i < TINY_ENCODER_LAYERS * LAYERS; i++)
        merge_layer(file, i / LAYERS, layers[i % LAYERS].name, i % 2 ? 0.5 : -0.25);
}

MP_TEST(models_encoder_adapters_vectors_are_those_of_merged_weights) {
    static texts all;
    static float got[SOME * WIDTH], merged[SOME * WIDTH];
    make_texts(&all);
    for (int i = 0; i < 2; i++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_encoder_spec_with(false, false, i ? merge_adapter : add_adapters), MP_COMPUTE_F32, 2);
        for (int t = 0; t < SOME; t++)
            run_alone(&tiny, &all, t, i ? 0 : WHOLE, (i ? merged : got) + t * WIDTH);
        tiny_unload(&tiny);
    }
    for (int i = 0; i < SOME * WIDTH; i++)
        MP_CHECK_NEAR(got[i], merged[i], 1e-4);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

static const char *stray;

static void add_stray(tiny_file *file) {
    add_adapters(file);
    if (stray)
        tiny_update(file, 1, stray, 3, TINY_WIDTH, TINY_WIDTH, 1);
}

/* A tensor of an adapter that updates no layer of the encoder is refused, and the error names it. */
MP_TEST(models_encoder_adapters_for_no_layer_are_refused) {
    static const char *const names[] = {NULL, "blk.9.attn_q", "blk.0.attn_none", "position_embd"};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        stray = names[i];
        mp_spec *spec = tiny_encoder_spec_with(false, false, add_stray);
        MP_CHECK_STATUS(load_only(spec, MP_COMPUTE_F32, &error), stray ? MP_UNSUPPORTED : MP_OK, &error);
        if (stray)
            MP_CHECK_HAS(error.message, stray);
    }
}

/* An embedding with one update only, so that the result shows it alone. */
static int table_alone;

static void add_table(tiny_file *file) {
    const int i = table_alone;
    tiny_ints(file->spec, "mpool.adapters", ids, 1);
    tiny_table_update(file, 1, tables[i].name, tables[i].rank, tables[i].rows, TINY_WIDTH, tables[i].scale);
}

static void merge_one_table(tiny_file *file) {
    const int i = table_alone;
    add_table(file);
    merge_table(file, tables[i].name, tables[i].rows, tables[i].rank, tables[i].scale);
}

MP_TEST(models_encoder_adapters_of_one_embedding) {
    static texts all;
    static float got[SOME * WIDTH], merged[SOME * WIDTH], plain[SOME * WIDTH];
    make_texts(&all);
    for (table_alone = 0; table_alone < TABLES; table_alone++) {
        for (int i = 0; i < 2; i++) {
            tiny_model tiny;
            tiny_load(&tiny, tiny_encoder_spec_with(false, false, i ? merge_one_table : add_table), MP_COMPUTE_F32, 2);
            for (int t = 0; t < SOME; t++) {
                run_alone(&tiny, &all, t, i ? 0 : WHOLE, (i ? merged : got) + t * WIDTH);
                if (i == 0)
                    run_alone(&tiny, &all, t, 0, plain + t * WIDTH);
            }
            tiny_unload(&tiny);
        }
        double change = 0;
        for (int i = 0; i < SOME * WIDTH; i++) {
            MP_CHECK_NEAR(got[i], merged[i], 1e-4);
            change += fabs((double)got[i] - (double)plain[i]);
        }
        MP_CHECK(change > 1);
    }
}

/* Matrices of an embedding that do not fit: their sizes, and the place of a value that is not finite. */
static struct {
    const char *table;
    int rows, rank, inner, n;
    const char *infinite;
} misfit;

static void add_misfit(tiny_file *file) {
    char name[96];
    tiny_ints(file->spec, "mpool.adapters", ids, 1);
    snprintf(name, sizeof name, "adapter.1.%s.lora_a", misfit.table);
    tiny_matrix(file, name, misfit.rows, misfit.rank, 0.2f);
    snprintf(name, sizeof name, "adapter.1.%s.lora_b", misfit.table);
    tiny_matrix(file, name, misfit.inner, misfit.n, 0.2f);
    snprintf(name, sizeof name, "adapter.1.%s.scale", misfit.table);
    tiny_float(file->spec, name, 1);
    if (misfit.infinite) {
        snprintf(name, sizeof name, "adapter.1.%s.%s", misfit.table, misfit.infinite);
        values_of(file, name)[1] = INFINITY;
    }
}

MP_TEST(models_encoder_adapters_misfits_of_embeddings_are_refused) {
    static const struct {
        const char *table;
        int rows, rank, inner, n;
        const char *infinite;
        mp_status status;
    } cases[] = {
        {"token_embd", TINY_VOCAB, TINY_WIDTH, TINY_WIDTH, TINY_WIDTH, NULL, MP_OK},
        {"token_embd", TINY_VOCAB, TINY_WIDTH + 1, TINY_WIDTH + 1, TINY_WIDTH, NULL, MP_LIMIT},
        {"token_embd", TINY_VOCAB - 1, 4, 4, TINY_WIDTH, NULL, MP_FORMAT},
        {"token_embd", TINY_VOCAB + 1, 4, 4, TINY_WIDTH, NULL, MP_FORMAT},
        {"token_embd", TINY_VOCAB, 4, 5, TINY_WIDTH, NULL, MP_FORMAT},
        {"token_embd", TINY_VOCAB, 4, 4, TINY_WIDTH - 1, NULL, MP_FORMAT},
        {"token_embd", TINY_VOCAB, 4, 4, TINY_WIDTH, "lora_a", MP_FORMAT},
        {"token_embd", TINY_VOCAB, 4, 4, TINY_WIDTH, "lora_b", MP_FORMAT},
        {"token_types", TYPES, 4, 4, TINY_WIDTH, NULL, MP_OK},
        {"token_types", TYPES + 1, 4, 4, TINY_WIDTH, NULL, MP_FORMAT},
        {"token_types", TYPES - 1, 4, 4, TINY_WIDTH, NULL, MP_FORMAT},
        {"token_types", TYPES, 4, 4, TINY_WIDTH, "lora_b", MP_FORMAT},
    };
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        misfit.table = cases[i].table;
        misfit.rows = cases[i].rows;
        misfit.rank = cases[i].rank;
        misfit.inner = cases[i].inner;
        misfit.n = cases[i].n;
        misfit.infinite = cases[i].infinite;
        mp_spec *spec = tiny_encoder_spec_with(false, false, add_misfit);
        MP_CHECK_STATUS(load_only(spec, MP_COMPUTE_F32, &error), cases[i].status, &error);
        if (cases[i].status != MP_OK)
            MP_CHECK_HAS(error.message, "lora_");
    }
}

/* With each allocation failing in turn, a request with an adapter either fails or returns the same vectors, and nothing
 * leaks. */
static mp_status make_adapted(mp_request **call, mp_error *error) {
    const int32_t tokens[6] = {9, 10, 11, 20, 21, 22};
    const int64_t offsets[3] = {0, 3, 6};
    mp_embedding_request *made;
    MP_TRY(make_embedding_request(2, tokens, offsets, NULL, &made, error));
    made->adapter = WHOLE;
    *call = &made->base;
    return MP_OK;
}

static void compare_adapted(const mp_request *first, const mp_request *second) {
    const float *a = ((const mp_embedding_request *)first)->vectors,
                *b = ((const mp_embedding_request *)second)->vectors;
    MP_CHECK(memcmp(a, b, 2 * WIDTH * sizeof(float)) == 0);
}

MP_TEST_SECONDS(models_encoder_adapters_allocation_sweep, 120) {
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    tiny_life life = {.spec = tiny_encoder_spec_with(false, false, add_adapters), .compute = MP_COMPUTE_F32,
                      .make = make_adapted, .compare = compare_adapted};
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
}

MP_TEST(models_encoder_adapters_unknown_ids_are_refused) {
    static texts all;
    static const int32_t unknown[] = {1, 2, 6, 10, INT32_MAX};
    make_texts(&all);
    for (int i = 0; i < 2; i++) {
        tiny_model tiny;
        mp_error error;
        uint64_t cost;
        request one;
        tiny_load(&tiny, i ? tiny_encoder_spec_with(false, false, add_adapters) : tiny_encoder_spec(false),
                  MP_COMPUTE_F32, 1);
        admit(&tiny, &all, 0, 1, 0, &one);
        for (size_t k = 0; k < sizeof unknown / sizeof *unknown; k++) {
            one.call->adapter = unknown[k];
            MP_CHECK_STATUS(tiny.model->ops->check(tiny.model, &one.call->base, &cost, &one.item.total, &error),
                            MP_INVALID_ARGUMENT, &error);
            /* a request that was checked before the model was loaded again */
            MP_CHECK_STATUS(tiny.engine->ops->admit(tiny.engine, &one.item, &error), MP_INVALID_ARGUMENT, &error);
        }
        tiny.engine->ops->retire(tiny.engine, &one.item);
        mp_request_destroy(&one.call->base);
        tiny_unload(&tiny);
    }
}
