/* Weights that are used as they are mapped: the bits are those of packed weights, at every stage of packing, and
 * weights that are never packed take no memory. */
#include "base/options.h"
#include "encoder_fixture.h"
#include "kernel_test.h"
#include "models/decoder/decoder.h"

/* ---- one matrix -------------------------------------------------------------------------------------------------- */

typedef struct scene { /* a matrix, mapped and packed, and the operands of a product */
    mp_tensor tensor;
    mp_wmat w;
    mp_acts x;
    mp_epilogue ep;
    float *weights, *input, *bias, *residual, *expected, *got;
    mp_weight_store store;
    mp_panels *panels;
    uint8_t *scratch, *unused;
    int M, N, ldy;
} scene;

static float *floats(mp_test_random *random, int64_t n) {
    float *made = kt_alloc((size_t)n * sizeof *made);
    kt_random(random, made, n);
    return made;
}

/* The rows begin 4 bytes after a multiple of 64, as in a file. */
static void make_scene(scene *s, int M, int N, int K, bool mapped) {
    mp_test_random random = {(uint64_t)(M * 31 + N * 7 + K)};
    mp_error error;
    *s = (scene){.M = M, .N = N, .ldy = N + 5};
    s->weights = floats(&random, (int64_t)N * K + 1);
    s->input = floats(&random, (int64_t)M * K);
    s->bias = floats(&random, N);
    s->residual = floats(&random, (int64_t)M * s->ldy);
    s->expected = kt_alloc((size_t)(M * s->ldy) * sizeof(float));
    s->got = kt_alloc((size_t)(M * s->ldy) * sizeof(float));
    s->tensor = (mp_tensor){.dtype = MP_F32, .ndim = 2, .shape = {N, K}, .data = (uint8_t *)(s->weights + 1),
                            .nbytes = (uint64_t)N * (uint64_t)K * sizeof(float)};
    mp_wmat_init(&s->w, MP_W_F32, N, K);
    s->w.data = kt_alloc(mp_wmat_bytes(&s->w) + MP_WMAT_SLACK);
    mp_wmat_pack(&s->w, &s->tensor, 0, s->w.panels);
    s->x = (mp_acts){.kind = MP_A_F32, .M = M, .K = K, .f32 = s->input, .ld_f32 = K};
    s->ep = (mp_epilogue){.bias = s->bias, .act = MP_ACT_GELU, .ld_residual = s->ldy};
    s->store.mapped = mapped;
    MP_CHECK_OK(mp_weight_store_pack_on_use(&s->store, NULL, &error), &error);
    MP_CHECK_OK(mp_weight_store_add_linear(&s->store, &s->w, &s->tensor, &s->panels, &error), &error);
    s->scratch = kt_alloc(s->store.panel_scratch);
}

static void drop_scene(scene *s) {
    mp_weight_store_deinit(&s->store);
    kt_free(s->weights), kt_free(s->input), kt_free(s->bias), kt_free(s->residual), kt_free(s->expected);
    kt_free(s->got), kt_free(s->w.data), kt_free(s->scratch);
}

/* Compute outputs of panels [panel0, panel1) into `got`, whose rows are the residual as well. */
static void multiply(scene *s, int panel0, int panel1, int64_t budget_ns) {
    atomic_store(&s->store.linear_time.left_ns, budget_ns);
    memcpy(s->got, s->residual, (size_t)(s->M * s->ldy) * sizeof(float));
    s->ep.residual = s->got;
    mp_panels_gemm(s->panels, &s->w, &s->x, panel0, panel1, &s->ep, s->got, s->ldy, s->scratch);
}

static void check_same(const scene *s, const char *state) {
    for (int m = 0; m < s->M; m++)
        if (memcmp(s->got + m * s->ldy, s->expected + m * s->ldy, (size_t)s->N * sizeof(float)) != 0 ||
            memcmp(s->got + m * s->ldy + s->N, s->residual + m * s->ldy + s->N, 5 * sizeof(float)) != 0)
            MP_FAIL("%s: row %d of M=%d N=%d K=%d differs", state, m, s->M, s->N, s->x.K);
}

static void check_states(int M, int N, int K) {
    for (int mapped = 0; mapped < 2; mapped++) {
        scene s;
        make_scene(&s, M, N, K, mapped);
        memcpy(s.expected, s.residual, (size_t)(M * s.ldy) * sizeof(float));
        s.ep.residual = s.expected;
        mp_gemm(&s.w, &s.x, 0, M, 0, s.w.panels, &s.ep, s.expected, s.ldy);
        s.unused = s.w.data;
        if (mapped)
            s.w.data = NULL; /* must not be read */
        else
            memset(s.w.data, 0xFF, mp_wmat_bytes(&s.w));
        multiply(&s, 0, s.w.panels, 0);
        check_same(&s, "mapped");
        if (!mapped && s.w.panels > 1) {
            multiply(&s, s.w.panels / 2, s.w.panels, INT64_MAX / 2);
            MP_CHECK_INT(atomic_load(&s.panels->left[0]), s.w.panels / 2);
            multiply(&s, 0, s.w.panels, 0);
            check_same(&s, "half packed");
        } else if (mapped) {
            s.store.keep_ns = s.store.keep_row_ns = 1000000000;
            mp_weight_store_begin(&s.store, M);
            MP_CHECK_INT(atomic_load(&s.store.linear_time.left_ns), 0);
        }
        s.w.data = s.unused;
        drop_scene(&s);
    }
}

MP_TEST_SECONDS(models_mapped_products_have_the_bits_of_packed_ones, 60) {
    static const int Ms[] = {1, 2, 3, 128};
    mp_blas_set_path("none");
    for (int i = 0; i < KT_MASKS; i++) {
        if (!kt_use(kt_masks[i]))
            continue;
        for (int m = 0; m < 4; m++) {
            check_states(Ms[m], 97, MP_K_CHUNK + 29);
            check_states(Ms[m], 64, 40);
        }
        check_states(1, 31, 2 * MP_K_CHUNK + 3);
        check_states(2, 7, 5);
    }
    kt_use("");
}

/* Opens OpenBLAS, or skips the test. */
static void use_blas(void) {
    const char *path = getenv("MPOOL_BLAS"), *why;
    if (!path || !*path || strcmp(path, "none") == 0)
        MP_SKIP("needs OpenBLAS: set MPOOL_BLAS to its path");
    kt_use("");
    mp_blas_set_path(path);
    if (*mp_blas_core(&why) == 0)
        MP_SKIP(why);
}

/* OpenBLAS computes the unpacked panels of many rows: whole tiles, and products that are cut into several tiles. */
MP_TEST_SECONDS(models_mapped_products_by_blas_have_the_bits_of_packed_ones, 60) {
    use_blas();
    static const struct {
        int M, N, K;
    } shapes[] = {{128, 97, MP_K_CHUNK + 29}, {257, 545, MP_K_CHUNK + 1}, {96, 64, 2 * MP_K_CHUNK}};
    for (int i = 0; i < 3; i++) {
        const uint64_t before = mp_blas_work();
        check_states(shapes[i].M, shapes[i].N, shapes[i].K);
        MP_CHECK(mp_blas_work() >= before + 2ull * (uint64_t)shapes[i].M * (uint64_t)shapes[i].N * MP_K_CHUNK);
    }
}

/* ---- models ------------------------------------------------------------------------------------------------------ */

static void set_options(const char *pack_on_use_mb) {
    mp_error error;
    setenv("MPOOL_PACK_ON_USE_MB", pack_on_use_mb, 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
}

static const char *weights_of(const tiny_model *tiny) {
    mp_model_facts facts;
    mp_model_get_facts(tiny->model, &facts);
    return mp_matrices_name(facts.weights);
}

static mp_weight_store *encoder_store(const tiny_model *tiny) { return &((mp_encoder *)tiny->model)->store; }

static void load_encoder(tiny_model *tiny, const char *weights, mp_compute compute, int threads) {
    tiny_weights = weights;
    tiny_load(tiny, tiny_encoder_spec(false), compute, threads);
    tiny_weights = NULL;
    compute_all(tiny);
}

static void embed_all(tiny_model *tiny, const texts *all, float *out) {
    MP_CHECK_INT(run(tiny, all, 0, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
    MP_CHECK_INT(run(tiny, all, 1, TEXTS - 1, UINT64_MAX, out + WIDTH), MP_OUTCOME_DONE);
}

static void check_encoder(const char *weights, mp_compute compute, uint64_t keep_ns, const float *expected) {
    static texts all;
    static float got[TEXTS * WIDTH];
    make_texts(&all);
    for (int threads = 1; threads <= 3; threads += 2) {
        tiny_model tiny;
        load_encoder(&tiny, weights, compute, threads);
        mp_weight_store *store = encoder_store(&tiny);
        MP_CHECK(mp_weight_store_unpacked(store));
        MP_CHECK(store->mapped == (strcmp(weights, "mapped") == 0));
        store->keep_ns = keep_ns;
        store->keep_row_ns = 0;
        for (int round = 0; round < 2; round++) {
            embed_all(&tiny, &all, got);
            if (memcmp(got, expected, sizeof got) != 0)
                MP_FAIL("weights %s, compute %d, %d threads, keep_ns %llu: vectors differ", weights, (int)compute,
                        threads, (unsigned long long)keep_ns);
        }
        const bool packed = !store->mapped && keep_ns == UINT64_MAX / 4;
        MP_CHECK(!packed || !mp_weight_store_unpacked(store));
        const bool left = mp_weight_store_unpacked(store);
        MP_CHECK_STR(weights_of(&tiny), store->mapped ? "mapped" : left ? "packing" : "packed");
        tiny_unload(&tiny);
    }
}

MP_TEST_SECONDS(models_mapped_encoders_have_the_bits_of_packed_ones, 60) {
    static const mp_compute computes[] = {MP_COMPUTE_F32, MP_COMPUTE_BF16, MP_COMPUTE_I8};
    static float expected[TEXTS * WIDTH];
    static texts all;
    make_texts(&all);
    set_options("0");
    for (int c = 0; c < 3; c++) {
        tiny_model tiny;
        load_encoder(&tiny, "packed", computes[c], 2);
        MP_CHECK(!encoder_store(&tiny)->linears);
        MP_CHECK_STR(weights_of(&tiny), "packed");
        embed_all(&tiny, &all, expected);
        tiny_unload(&tiny);
        check_encoder("mapped", computes[c], UINT64_MAX / 4, expected);
        if (computes[c] == MP_COMPUTE_F32) {
            check_encoder("auto", computes[c], 0, expected);
            check_encoder("auto", computes[c], 15000, expected);
            check_encoder("auto", computes[c], UINT64_MAX / 4, expected);
            continue;
        }
        load_encoder(&tiny, "auto", computes[c], 1); /* packing converts: done at load */
        MP_CHECK(!encoder_store(&tiny)->linears);
        tiny_unload(&tiny);
    }
}

/* Weights that are never packed are neither charged nor predicted, and cost an encoder or decoder only what is not in
 * its matrices. */
static void check_memory(mp_spec *(*make)(void), uint64_t matrices) {
    uint64_t charged[2], predicted[2], engine;
    for (int mapped = 0; mapped < 2; mapped++) {
        tiny_model tiny;
        tiny_weights = mapped ? "mapped" : "packed";
        const uint64_t before = mp_alloc_bytes(MP_TAG_WEIGHTS);
        tiny_load(&tiny, make(), MP_COMPUTE_F32, 1);
        tiny_weights = NULL;
        charged[mapped] = tiny.model->ops->bytes(tiny.model);
        MP_CHECK(mp_alloc_bytes(MP_TAG_WEIGHTS) - before < charged[mapped] + 30000); /* structs */
        MP_CHECK_INT(tiny.budget.used, charged[mapped]);
        mp_model_facts facts;
        mp_model_get_facts(tiny.model, &facts);
        charged[mapped] -= facts.expert_packed_bytes; /* optional copies */
        tiny.loader.ops->footprint(tiny.loader.self, &predicted[mapped], &engine);
        tiny_unload(&tiny);
    }
    MP_CHECK_INT(charged[0] - charged[1], matrices);
    MP_CHECK(predicted[0] - predicted[1] == matrices);
}

static mp_spec *encoder_spec(void) { return tiny_encoder_spec(false); }

static mp_spec *decoder_spec(void) {
    static const mp_dtype types[] = {MP_F32};
    return tiny_decoder_spec(types, 1, 6);
}

static mp_spec *experts_spec(void) {
    static const mp_dtype types[] = {MP_F32};
    return tiny_decoder_spec_as(&(tiny_kind){.arch = "qwen3moe", .experts = 6}, types, 1, 6, -1);
}

/* Returns the packed bytes of the linear layers of a decoder, without routers and experts. */
static uint64_t bytes_of_linears(mp_spec *(*make)(void)) {
    tiny_model tiny;
    tiny_load(&tiny, make(), MP_COMPUTE_F32, 1);
    const mp_decoder *decoder = (const mp_decoder *)tiny.model;
    uint64_t bytes = mp_wmat_bytes(&decoder->head.w[0]);
    for (int l = 0; l < decoder->layer_count; l++) {
        const mp_mixer *mixer = mp_layer_mixer(&decoder->layers[l], 0, NULL);
        const mp_mlp *mlp = &mp_layer_ffn(&decoder->layers[l], 0)->mlp;
        const mp_linear *linears[] = {&mixer->attention.qkv, &mixer->out, &mlp->up, &mlp->down};
        for (int i = 0; i < 4; i++)
            for (int p = 0; p < linears[i]->parts; p++)
                bytes += mp_wmat_bytes(&linears[i]->w[p]);
    }
    tiny_unload(&tiny);
    return bytes;
}

MP_TEST(models_mapped_weights_are_not_charged) {
    set_options("1048576");
    const uint64_t per_layer = 4 * WIDTH * WIDTH + 2 * WIDTH * TINY_ENCODER_FFN;
    check_memory(encoder_spec, TINY_ENCODER_LAYERS * per_layer * sizeof(float));
    check_memory(decoder_spec, bytes_of_linears(decoder_spec));
    check_memory(experts_spec, bytes_of_linears(experts_spec)); /* routers are packed in any case */
}

MP_TEST(models_mapped_weights_refuse_other_values) {
    mp_error error;
    mp_weights_use use;
    tiny_weights = "always";
    mp_spec *spec = tiny_encoder_spec(false);
    tiny_weights = NULL;
    MP_CHECK_INT(mp_weights_use_read(spec, &use, &error), MP_FORMAT);
    MP_CHECK_STR(error.field, "mpool.weights");
    MP_CHECK_STR(error.got, "always");
    MP_CHECK_STR(error.allowed, "auto, mapped, packed");
    mp_spec_unpin(spec);
}
