/* The numeric contract of encoders: a text's vector has the same bits whether the text runs alone or in a batch, and
 * with any number of threads; a failing text affects no other text. */
#include <time.h>

#include "counted_fixture.h"
#include "encoder_fixture.h"

static mp_spec *plain(const void *arg) {
    (void)arg;
    return tiny_encoder_spec(false);
}

MP_TEST_SECONDS(models_encoder_contract_float32, 60) { check_grouping(plain, NULL, MP_COMPUTE_F32); }
MP_TEST(models_encoder_late_threads) {
    check_late(plain, NULL, MP_COMPUTE_F32);
    check_late(plain, NULL, MP_COMPUTE_I8);
}
MP_TEST_SECONDS(models_encoder_contract_bfloat16, 60) { check_grouping(plain, NULL, MP_COMPUTE_BF16); }
MP_TEST_SECONDS(models_encoder_contract_int8, 60) { check_grouping(plain, NULL, MP_COMPUTE_I8); }

/* Heads of 32: the longest text has enough keys for attention over 16-bit integers, the others do not. */
MP_TEST_SECONDS(models_encoder_contract_int8_integer_attention, 60) {
    mp_kernels_init();
    MP_CHECK(mp_attn_full_for(MP_COMPUTE_I8, POSITIONS, WIDTH / 2, false) == mp_attn_full_i16);
    MP_CHECK(mp_attn_full_for(MP_COMPUTE_I8, 40, WIDTH / 2, false) == mp_kernels_get()->attn_full);
    tiny_encoder_heads = 2;
    check_grouping(plain, NULL, MP_COMPUTE_I8);
    check_late(plain, NULL, MP_COMPUTE_I8);
}

static const tiny_layer fp8_first[] = {{MP_F8_E4M3, 21}, {MP_F32, 22}};
static const tiny_layer floats_first[] = {{MP_F32, 22}, {MP_F8_E4M3, 21}};

static void first_is_first(tiny_file *file) {
    tiny_ints(file->spec, "mpool.layer_order", (const int64_t[]){0, 1}, TINY_ENCODER_LAYERS);
}

static void second_is_first(tiny_file *file) {
    tiny_ints(file->spec, "mpool.layer_order", (const int64_t[]){1, 0}, TINY_ENCODER_LAYERS);
}

static mp_spec *make_mixed(const void *layers) {
    tiny_layers = layers;
    tiny_weights = "mapped";
    mp_spec *spec = tiny_encoder_spec_with(false, false, layers == fp8_first ? first_is_first : second_is_first);
    tiny_layers = NULL;
    tiny_weights = NULL;
    return spec;
}

/* The MLP of a layer whose weights stay mapped needs more scratch than that of a packed layer, and FP8 weights are
 * always packed. The scratch is enough for the largest, whichever layer comes first: two files with the same layers,
 * numbered the other way round, give the same bits. */
MP_TEST_SECONDS(models_encoder_layers_with_larger_mlps, 60) {
    static texts all;
    static float out[2][TEXTS * WIDTH];
    const tiny_layer *const orders[] = {fp8_first, floats_first};
    size_t bytes[2];
    make_texts(&all);
    for (int i = 0; i < 2; i++) {
        tiny_model tiny;
        tiny_load(&tiny, make_mixed(orders[i]), MP_COMPUTE_BF16, 2);
        const mp_encoder *model = (const mp_encoder *)tiny.model;
        const mp_mlp *packed = &model->layers[i].base.ffn.mlp,
                     *mapped = &model->layers[1 - i].base.ffn.mlp;
        MP_CHECK(mp_mlp_scratch(packed, 64) < mp_mlp_scratch(mapped, 64));
        bytes[i] = mp_encoder_group_scratch(model, 64, MP_EMBED_POOLED);
        MP_CHECK_INT(run(&tiny, &all, 0, TEXTS, UINT64_MAX, out[i]), MP_OUTCOME_DONE);
        tiny_unload(&tiny);
    }
    MP_CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    MP_CHECK_INT(bytes[0], bytes[1]);
}

MP_TEST(models_encoder_nan_fails_its_request_only) {
    static texts all;
    static float out[TEXTS * WIDTH];
    make_texts(&all);
    all.ids[all.offsets[3]] = 7;
    tiny_model tiny;
    tiny_load(&tiny, tiny_encoder_spec(true), MP_COMPUTE_F32, 2);
    MP_CHECK_INT(run(&tiny, &all, 0, 8, UINT64_MAX, out), MP_OUTCOME_FAILED);
    MP_CHECK_INT(run(&tiny, &all, 4, 8, UINT64_MAX, out), MP_OUTCOME_DONE);
    tiny_unload(&tiny);
}

MP_TEST(models_encoder_refuses_invalid_requests) {
    mp_error error;
    tiny_model tiny;
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, 1);
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
        mp_embedding_request *call;
        uint64_t cost;
        uint32_t total;
        ids[0] = cases[i].id;
        MP_CHECK_OK(make_embedding_request(1, ids, offsets, &cases[i].skip, &call, &error), &error);
        call->dimensions = cases[i].dimensions;
        MP_CHECK_STATUS(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error), cases[i].expected,
                        &error);
        mp_request_destroy(&call->base);
    }
    tiny_unload(&tiny);
}

/* ---- identical texts --------------------------------------------------------------------------------------------- */

typedef struct request { /* an embedding request and its item */
    mp_embedding_request *call;
    mp_item item;
} request;

/* Make and admit a request. picks: [count] indices into `all`; skip: tokens to leave out of pooling, < 0: none. */
static void make_request(const tiny_model *tiny, const texts *all, const int *picks, int count, int skip,
                         int dimensions, int normalize, int output, request *made) {
    static int32_t ids[200 * POSITIONS], skips[200];
    static int64_t offsets[201];
    mp_error error;
    uint64_t cost;
    MP_CHECK(count <= 200);
    for (int t = 0; t < count; t++) {
        int64_t n = all->offsets[picks[t] + 1] - all->offsets[picks[t]];
        memcpy(ids + offsets[t], all->ids + all->offsets[picks[t]], (size_t)n * sizeof *ids);
        offsets[t + 1] = offsets[t] + n;
        skips[t] = skip;
    }
    *made = (request){0};
    MP_CHECK_OK(make_embedding_request(count, ids, offsets, skip < 0 ? NULL : skips, &made->call, &error), &error);
    made->call->dimensions = dimensions;
    made->call->normalize = (int8_t)normalize;
    made->call->outputs = (uint8_t)output;
    made->item.request = &made->call->base;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, made->item.request, &cost, &made->item.total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &made->item, &error), &error);
}

/* Run all requests in one step and retire them. */
static void serve(tiny_model *tiny, request *requests, int count, mp_outcome *outcomes) {
    mp_plan plan = {.count = count};
    for (int i = 0; i < count; i++) {
        plan.items[i] = &requests[i].item;
        plan.amount[i] = requests[i].item.total;
    }
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    for (int i = 0; i < count; i++)
        tiny->engine->ops->retire(tiny->engine, &requests[i].item);
}

static void drop(request *requests, int count) {
    for (int i = 0; i < count; i++)
        mp_request_destroy(&requests[i].call->base);
}

MP_TEST(models_encoder_computes_identical_texts_once) {
    static texts all;
    static float alone[TEXTS * WIDTH];
    make_texts(&all);
    tiny_model tiny;
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, 2);
    const mp_dedup_table *dedup = dedup_of(tiny.engine);
    compute_all(&tiny);
    for (int t = 0; t < TEXTS; t++)
        MP_CHECK_INT(run(&tiny, &all, t, 1, UINT64_MAX, alone + t * WIDTH), MP_OUTCOME_DONE);
    MP_CHECK_INT(dedup->shared, 0);

    /* within and between requests: text 9 occurs 41 times; 32 share its first computation and 9 its second */
    int picks[2][50];
    for (int i = 0; i < 50; i++) {
        picks[0][i] = i % 2 ? i / 2 : 9; /* text 9 occurs at all even i and at i == 19 */
        picks[1][i] = i < 14 ? 9 : i % 25;
    }
    int nines = 0, others = 0;
    bool seen[TEXTS] = {false};
    request requests[2];
    for (int r = 0; r < 2; r++) {
        make_request(&tiny, &all, picks[r], 50, -1, 0, -1, MP_EMBED_POOLED, &requests[r]);
        for (int i = 0; i < 50; i++) {
            nines += picks[r][i] == 9;
            others += picks[r][i] != 9 && seen[picks[r][i]];
            seen[picks[r][i]] = true;
        }
    }
    MP_CHECK_INT(nines, 41);
    mp_outcome outcomes[MP_PLAN_MAX];
    serve(&tiny, requests, 2, outcomes);
    MP_CHECK_INT(dedup->shared, nines - 2 + others);
    for (int r = 0; r < 2; r++) {
        MP_CHECK_INT(outcomes[r], MP_OUTCOME_DONE);
        for (int i = 0; i < 50; i++)
            MP_CHECK(memcmp(requests[r].call->vectors + i * WIDTH, alone + picks[r][i] * WIDTH, WIDTH * 4) == 0);
    }
    drop(requests, 2);

        /* requests with different postprocessing share nothing; neither do requests for token vectors */
    request differ[7];
    const int five[2] = {5, 6};
    const uint64_t before = dedup->shared;
    make_request(&tiny, &all, five, 1, -1, 0, 1, MP_EMBED_POOLED, &differ[0]);
    make_request(&tiny, &all, five, 1, 1, 0, 1, MP_EMBED_POOLED, &differ[1]);
    make_request(&tiny, &all, five, 1, -1, 40, 1, MP_EMBED_POOLED, &differ[2]);
    make_request(&tiny, &all, five, 1, -1, 0, 0, MP_EMBED_POOLED, &differ[3]);
    make_request(&tiny, &all, five + 1, 1, -1, 0, 1, MP_EMBED_POOLED, &differ[4]);
    make_request(&tiny, &all, five, 1, -1, 0, 1, MP_EMBED_TOKENS, &differ[5]);
    make_request(&tiny, &all, five, 1, -1, 0, 1, MP_EMBED_TOKENS, &differ[6]);
    serve(&tiny, differ, 7, outcomes);
    for (int i = 0; i < 7; i++)
        MP_CHECK_INT(outcomes[i], MP_OUTCOME_DONE);
    MP_CHECK_INT(dedup->shared, before);
    MP_CHECK(memcmp(differ[0].call->vectors, differ[1].call->vectors, WIDTH * 4) != 0);
    MP_CHECK(memcmp(differ[0].call->vectors, differ[3].call->vectors, WIDTH * 4) != 0);
    drop(differ, 7);
    tiny_unload(&tiny);
}

/* Options that change a vector: texts with equal ids and different options are not identical. */
typedef struct variant {
    int skip, dimensions, normalize;
    int32_t second;
} variant;

static void make_variant(const tiny_model *tiny, const texts *all, const variant *variant, request *made) {
    const int pick = 5;
    make_request(tiny, all, &pick, 1, variant->skip, variant->dimensions, variant->normalize, MP_EMBED_POOLED, made);
    made->call->second = mp_alloc(sizeof(int32_t), MP_TAG_REQUEST); /* freed with the request */
    MP_CHECK(made->call->second);
    made->call->second[0] = variant->second;
}

/* Serve requests in one step. The number of identical texts must not grow, and each vector must be the one that the
 * engine computed without other texts. */
static void check_variants(tiny_model *tiny, request *requests, int count, float (*alone)[WIDTH]) {
    mp_outcome outcomes[MP_PLAN_MAX];
    serve(tiny, requests, count, outcomes);
    for (int i = 0; i < count; i++) {
        MP_CHECK_INT(outcomes[i], MP_OUTCOME_DONE);
        const size_t bytes = (size_t)requests[i].call->sizes.width * sizeof(float);
        MP_CHECK(memcmp(requests[i].call->vectors, alone[i], bytes) == 0);
    }
    drop(requests, count);
}

MP_TEST(models_encoder_options_make_texts_differ) {
    static const variant variants[] = {{-1, 0, 1, 3}, {1, 0, 1, 3},  {2, 0, 1, 3},  {-1, 40, 1, 3},
                                       {-1, 41, 1, 3}, {-1, 0, 0, 3}, {-1, 40, 0, 3}, {-1, 0, 1, 2}};
    enum { COUNT = sizeof variants / sizeof *variants };
    static texts all;
    static float alone[COUNT][WIDTH];
    make_texts(&all);
    tiny_model tiny;
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, 1);
    mp_recent *recent = recent_of(tiny.engine);
    request requests[COUNT], again;
    recent->most_bytes = 0; /* keep nothing */
    for (int i = 0; i < COUNT; i++) {
        mp_outcome outcome;
        make_variant(&tiny, &all, &variants[i], &again);
        serve(&tiny, &again, 1, &outcome);
        MP_CHECK_INT(outcome, MP_OUTCOME_DONE);
        memcpy(alone[i], again.call->vectors, (size_t)again.call->sizes.width * sizeof(float));
        drop(&again, 1);
        for (int j = 0; j < i && i < COUNT - 1; j++) /* without token types, `second` changes no bit */
            MP_CHECK(variants[i].dimensions != variants[j].dimensions ||
                     memcmp(alone[i], alone[j], 40 * sizeof(float)) != 0);
    }

    for (int i = 0; i < COUNT; i++)
        make_variant(&tiny, &all, &variants[i], &requests[i]);
    check_variants(&tiny, requests, COUNT, alone);
    MP_CHECK_INT(dedup_of(tiny.engine)->shared, 0);

    /* one request after the other: each variant is computed once; the second round takes recent results */
    recent->most_bytes = MP_DEDUP_BYTES;
    recent->keep_ns = UINT64_MAX;
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < COUNT; i++) {
            make_variant(&tiny, &all, &variants[i], &again);
            check_variants(&tiny, &again, 1, &alone[i]);
            MP_CHECK_INT(recent->hits, round ? i + 1 : 0);
        }
    tiny_unload(&tiny);
}

/* Run texts [first, first + count), one request and one step each; check the vectors against `alone`, if given. */
static void compute_each(tiny_model *tiny, const texts *all, int first, int count, const float *alone) {
    float out[WIDTH];
    for (int t = first; t < first + count; t++) {
        MP_CHECK_INT(run(tiny, all, t, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
        if (alone)
            MP_CHECK(memcmp(out, alone + t * WIDTH, sizeof out) == 0);
    }
}

MP_TEST(models_encoder_remembers_recent_results) {
    static texts all;
    static float alone[TEXTS * WIDTH];
    make_texts(&all);
    tiny_model tiny;
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_I8, 1);
    mp_recent *recent = recent_of(tiny.engine);
    MP_CHECK_INT(recent->keep_ns, 100000000);
    recent->keep_ns = UINT64_MAX;
    const uint64_t bare = tiny.budget.used;
    MP_CHECK_INT(run(&tiny, &all, 0, TEXTS, UINT64_MAX, alone), MP_OUTCOME_DONE);
    MP_CHECK_INT(recent->hits, 0);
    MP_CHECK(recent->charged > MP_DEDUP_BYTES && recent->charged < 2 * MP_DEDUP_BYTES && recent->count == TEXTS);
    MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), ((mp_encoder *)tiny.model)->store.charged + recent->charged);
    compute_each(&tiny, &all, 0, TEXTS, alone);
    MP_CHECK_INT(recent->hits, TEXTS);

    /* a result older than `keep_ns` is computed again */
    recent->keep_ns = 1000000;
    const struct timespec pause = {.tv_nsec = 2000000};
    nanosleep(&pause, NULL);
    compute_each(&tiny, &all, 3, 1, alone);
    MP_CHECK_INT(recent->hits, TEXTS);

    /* trim frees the memory and drops all results */
    recent->keep_ns = UINT64_MAX;
    MP_CHECK(tiny_trim(&tiny) > 0);
    MP_CHECK(tiny.budget.used == bare && recent->charged == 0);
    compute_each(&tiny, &all, 3, 1, alone);
    MP_CHECK_INT(recent->hits, TEXTS);
    compute_each(&tiny, &all, 3, 1, alone);
    MP_CHECK_INT(recent->hits, TEXTS + 1);

    /* without memory the table stays empty, and no request fails */
    mp_recent_trim(recent);
    tiny.budget.limit = tiny.budget.used;
    compute_each(&tiny, &all, 30, 1, alone);
    compute_each(&tiny, &all, 30, 1, alone);
    MP_CHECK(recent->hits == TEXTS + 1 && !recent->store);
    tiny_unload(&tiny);
}

/* Serve one text of a tenant with an engine of the model. Returns true if no row was computed for it. */
static bool is_reused(tiny_model *tiny, mp_engine *engine, const texts *all, int text, uint64_t tenant,
                      const float *expected) {
    request made;
    mp_outcome outcome;
    mp_engine *const own = tiny->engine;
    const uint64_t before = engine->work.dedup_hits;
    make_request(tiny, all, &text, 1, -1, 0, -1, MP_EMBED_POOLED, &made);
    made.item.tenant = tenant;
    tiny->engine = engine;
    serve(tiny, &made, 1, &outcome);
    tiny->engine = own;
    MP_CHECK_INT(outcome, MP_OUTCOME_DONE);
    MP_CHECK(memcmp(made.call->vectors, expected, WIDTH * sizeof(float)) == 0);
    drop(&made, 1);
    return engine->work.dedup_hits > before;
}

/* A text that another tenant has sent takes the work of a new one: after it, and in the same step. */
MP_TEST(models_encoder_tenants_share_no_vectors) {
    static const uint64_t tenants[] = {0, 1, 1ull << 32, (1ull << 32) + 1}; /* all 64 bits count */
    enum { TENANTS = sizeof tenants / sizeof *tenants };
    static texts all;
    float alone[WIDTH];
    make_texts(&all);
    tiny_model tiny;
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, 1);
    compute_all(&tiny);
    MP_CHECK_INT(run(&tiny, &all, 5, 1, UINT64_MAX, alone), MP_OUTCOME_DONE);
    recent_of(tiny.engine)->most_bytes = MP_DEDUP_BYTES;
    recent_of(tiny.engine)->keep_ns = UINT64_MAX;
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < TENANTS; i++)
            MP_CHECK_INT(is_reused(&tiny, tiny.engine, &all, 5, tenants[i], alone), round);
    tiny_trim(&tiny);
    request requests[2 * TENANTS];
    mp_outcome outcomes[MP_PLAN_MAX];
    const int text = 5;
    for (int i = 0; i < 2 * TENANTS; i++) {
        make_request(&tiny, &all, &text, 1, -1, 0, -1, MP_EMBED_POOLED, &requests[i]);
        requests[i].item.tenant = tenants[i % TENANTS];
    }
    const uint64_t shared = dedup_of(tiny.engine)->shared;
    serve(&tiny, requests, 2 * TENANTS, outcomes);
    MP_CHECK_INT(dedup_of(tiny.engine)->shared - shared, TENANTS);
    drop(requests, 2 * TENANTS);
    tiny_unload(&tiny);
}

/* ---- the last layer ---------------------------------------------------------------------------------------------- */

/* Pooled and token vectors in one group: the last layer computes one row of a text or all rows, and both have the bits
 * of requests of their own. */
MP_TEST(models_encoder_last_layer_beside_tokens) {
    enum { FIRST = 3, SECOND = 4 };
    static texts all;
    static float pooled[FIRST * WIDTH], tokens[SECOND * POSITIONS * WIDTH];
    static const int first[FIRST] = {7, 8, 9}, second[SECOND] = {10, 11, 12, 13};
    make_texts(&all);
    const size_t bytes = (size_t)(all.offsets[14] - all.offsets[10]) * WIDTH * sizeof(float);
    for (int threads = 1; threads <= 2; threads++) {
        tiny_model tiny;
        request requests[2];
        mp_outcome outcomes[MP_PLAN_MAX];
        tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, threads);
        ((mp_encoder *)tiny.model)->head.mode[0] = MP_POOL_CLS;
        compute_all(&tiny);
        for (int round = 0; round < 4; round++) { /* each request alone, then both in either order */
            request *pool = &requests[round == 3], *token = &requests[round == 2];
            if (round != 1)
                make_request(&tiny, &all, first, FIRST, -1, 0, -1, MP_EMBED_POOLED, pool);
            if (round != 0)
                make_request(&tiny, &all, second, SECOND, -1, 0, -1, MP_EMBED_TOKENS, token);
            serve(&tiny, requests, round < 2 ? 1 : 2, outcomes);
            MP_CHECK(outcomes[0] == MP_OUTCOME_DONE && (round < 2 || outcomes[1] == MP_OUTCOME_DONE));
            if (round == 0)
                memcpy(pooled, pool->call->vectors, sizeof pooled);
            if (round == 1)
                memcpy(tokens, token->call->states, bytes);
            MP_CHECK(round == 1 || memcmp(pool->call->vectors, pooled, sizeof pooled) == 0);
            MP_CHECK(round == 0 || memcmp(token->call->states, tokens, bytes) == 0);
            drop(requests, round < 2 ? 1 : 2);
        }
        tiny_unload(&tiny);
    }
}

/* Compare the kernels' work for texts [0, count) with that of a last layer which computes one row per text, or all
 * rows. scores: a dense layer follows the pooling, as in a cross-encoder. */
static void check_work(mp_pooling_mode mode, int threads, int count, bool one_row, bool scores) {
    static texts all;
    static float out[TEXTS * WIDTH];
    enum { KEYS = 2 * WIDTH * WIDTH, REST = 2 * WIDTH * WIDTH + 2 * WIDTH * TINY_ENCODER_FFN,
           BEFORE = TINY_ENCODER_LAYERS - 1 };
    uint64_t squares = 0, rows;
    tiny_model tiny;
    make_texts(&all);
    tiny_load(&tiny, tiny_encoder_spec_of(false, scores), MP_COMPUTE_F32, threads);
    ((mp_encoder *)tiny.model)->head.mode[0] = mode;
    for (int t = 0; t < count; t++) {
        rows = (uint64_t)(all.offsets[t + 1] - all.offsets[t]);
        squares += rows * rows;
    }
    rows = (uint64_t)all.offsets[count];
    const uint64_t last = one_row ? (uint64_t)count : rows, seen = one_row ? rows : squares;
    const uint64_t dense = scores ? (uint64_t)count * WIDTH * WIDTH : 0;
    count_kernels();
    MP_CHECK_INT(run(&tiny, &all, 0, count, UINT64_MAX, out), MP_OUTCOME_DONE);
    mp_kernels_init();
    MP_CHECK_INT(counted.products, rows * (BEFORE + 1) * KEYS + (rows * BEFORE + last) * REST + dense);
    MP_CHECK_INT(counted.attention, 2 * WIDTH * (squares * BEFORE + seen));
    MP_CHECK_INT(counted.norms, rows * (1 + 2 * BEFORE) + 2 * last); /* with that of the embeddings */
    tiny_unload(&tiny);
}

/* The last layer computes one row of a text if only this row is pooled. */
MP_TEST(models_encoder_last_layer_work) {
    check_work(MP_POOL_CLS, 1, 9, true, false);
    check_work(MP_POOL_LAST_TOKEN, 1, 9, true, false);
    check_work(MP_POOL_CLS, 2, 9, true, false);
    check_work(MP_POOL_LAST_TOKEN, 2, 1, true, false); /* the threads share the text */
    check_work(MP_POOL_MEAN, 1, 9, false, false);
    check_work(MP_POOL_MAX, 2, 9, false, false);
}

/* The last layer of a cross-encoder computes the row that its classifier reads. */
MP_TEST(models_encoder_last_layer_work_of_scores) {
    check_work(MP_POOL_CLS, 1, 9, true, true);
    check_work(MP_POOL_CLS, 2, 9, true, true);
    check_work(MP_POOL_MEAN, 1, 9, false, true);
}

/* With each allocation failing in turn, a request either fails or returns the same vectors, and nothing leaks. */
static mp_status make_call(mp_request **call, mp_error *error) {
    const int32_t ids[12] = {9, 10, 11, 9, 10, 11, 9, 10, 11, 20, 21, 22};
    const int64_t offsets[5] = {0, 3, 6, 9, 12};
    mp_embedding_request *made;
    MP_TRY(make_embedding_request(4, ids, offsets, NULL, &made, error));
    *call = &made->base;
    return MP_OK;
}

static void compare_calls(const mp_request *first, const mp_request *second) {
    const float *a = ((const mp_embedding_request *)first)->vectors,
                *b = ((const mp_embedding_request *)second)->vectors;
    MP_CHECK(memcmp(a, b, 4 * WIDTH * sizeof(float)) == 0);
    MP_CHECK(memcmp(a, a + 2 * WIDTH, WIDTH * sizeof(float)) == 0);
}

MP_TEST_SECONDS(models_encoder_allocation_sweep, 120) {
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    tiny_life life = {.spec = tiny_encoder_spec(false), .compute = MP_COMPUTE_I8,
                      .make = make_call, .compare = compare_calls};
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
    life.spec = tiny_encoder_spec_of(false, true);
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
}
