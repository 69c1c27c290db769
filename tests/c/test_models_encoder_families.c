/* Encoders of all families keep the numeric contract: windows, rotary tables, gates and score biases depend on one text
 * alone. The Python tests compare values with references. */
#include "encoder_families_fixture.h"
#include "late_threads.h"
#include "missing_fixture.h"
#include "ranges_fixture.h"
#include "recorded_fixture.h"

/* Check every family in float32, and every third one in the other compute types: only the matrix products depend on
 * the compute type. */
static void check_families(mp_compute compute) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i += compute == MP_COMPUTE_F32 ? 1 : 3)
        check_grouping(make_spec, &families[i], compute);
}

MP_TEST_SECONDS(models_encoder_families_float32, 100) { check_families(MP_COMPUTE_F32); }
MP_TEST_SECONDS(models_encoder_families_mapped, 100) { /* threads share texts of one group */
    tiny_weights = "mapped";
    check_families(MP_COMPUTE_F32);
    tiny_weights = NULL;
}
MP_TEST_SECONDS(models_encoder_families_bfloat16, 100) { check_families(MP_COMPUTE_BF16); }
MP_TEST_SECONDS(models_encoder_families_int8, 100) { check_families(MP_COMPUTE_I8); }

MP_TEST(models_encoder_families_late_threads) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        check_late(make_spec, &families[i], MP_COMPUTE_F32);
        check_late(make_spec, &families[i], MP_COMPUTE_I8);
    }
}

/* A norm of projected embeddings needs the whole rows, of which each thread computes columns. */
MP_TEST(models_encoder_families_late_threads_norm_projections) {
    int projected = 0;
    norms_projection = true;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (families[i].embedding) {
            check_late(make_spec, &families[i], MP_COMPUTE_F32);
            projected++;
        }
    MP_CHECK(projected > 0);
}

/* Two texts, of 12 and of 40 tokens. */
static bool family_is_recorded(const family *f, mp_compute compute, double recorded, double tolerance) {
    enum { SHORT = 12, ALL = 52 };
    static float out[2 * WIDTH];
    int32_t ids[ALL];
    const int64_t offsets[] = {0, SHORT, ALL};
    mp_error error;
    mp_embedding_request *call;
    tiny_model tiny;
    for (int i = 0; i < ALL; i++)
        ids[i] = 8 + i * 31 % (TINY_VOCAB - 8);
    tiny_load(&tiny, make_spec(f), compute, 1);
    MP_CHECK_OK(make_embedding_request(2, ids, offsets, NULL, &call, &error), &error);
    MP_CHECK_INT(run_call(&tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
    memcpy(out, call->vectors, sizeof out);
    mp_request_destroy(&call->base);
    tiny_unload(&tiny);
    return recorded_is(f->arch, out, 2 * WIDTH, recorded, tolerance);
}

MP_TEST(models_encoder_families_recorded) {
    static const double recorded[][3] = { /* float32, bfloat16, int8 */
        {0.4774873, 0.4742619, 0.4825809},
        {-0.3243606, -0.3252762, -0.3353865},
        {1.417189, 1.416627, 1.414886},
        {1.029027, 1.028011, 1.065542},
        {1.611854, 1.60947, 1.60511},
        {-0.0928518, -0.0952575, -0.05303285},
        {1.783899, 1.784721, 1.795573},
        {1.258503, 1.256821, 1.266492},
        {1.361535, 1.361841, 1.360846},
        {0.3825825, 0.3846809, 0.3917011},
        {-0.1814521, -0.1804165, -0.1788641},
        {-0.1146556, -0.1131504, -0.1048817},
        {-0.4229194, -0.4238195, -0.4182019},
    };
    int wrong = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        wrong += !family_is_recorded(&families[i], MP_COMPUTE_F32, recorded[i][0], RECORDED_FLOATS);
        wrong += !family_is_recorded(&families[i], MP_COMPUTE_BF16, recorded[i][1], RECORDED_ROUNDED);
        wrong += !family_is_recorded(&families[i], MP_COMPUTE_I8, recorded[i][2], RECORDED_ROUNDED);
    }
    MP_CHECK_INT(wrong, 0);
}

/* ---- the last layer ---------------------------------------------------------------------------------------------- */

static void pool_first(tiny_model *tiny) {
    ((mp_encoder *)tiny->model)->head.mode[0] = MP_POOL_CLS;
    compute_all(tiny);
}

static void pool_last(tiny_model *tiny) {
    ((mp_encoder *)tiny->model)->head.mode[0] = MP_POOL_LAST_TOKEN;
    compute_all(tiny);
}

/* Pool the vectors of all tokens of texts [0, count): the last layer computes all rows. out: [count, WIDTH]. */
static void pool_tokens(tiny_model *tiny, const texts *all, int count, float *out) {
    const mp_encoder *model = (const mp_encoder *)tiny->model;
    mp_embedding_request *call;
    mp_error error;
    float *scratch = mp_alloc(mp_head_scratch(&model->head) * sizeof *scratch, MP_TAG_SCRATCH);
    MP_CHECK_OK(make_embedding_request(count, all->ids, all->offsets, NULL, &call, &error), &error);
    call->outputs = MP_EMBED_TOKENS;
    MP_CHECK_INT(run_call(tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
    for (int t = 0; t < count; t++)
        mp_head_apply(&model->head, call->states + all->offsets[t] * WIDTH,
                      (int)(all->offsets[t + 1] - all->offsets[t]), 0, WIDTH, model->head.normalize, scratch,
                      out + t * WIDTH);
    mp_request_destroy(&call->base);
    mp_free(scratch);
}

/* A vector of the first or the last token has the bits of that row of a pass that computes all rows of the last layer:
 * alone, in a batch and on several threads. */
static void check_last_layer(const family *f, mp_compute compute, void (*pool)(tiny_model *tiny)) {
    enum { SOME = 12, ALONE = 3 }; /* text 5 is the longest */
    static texts all;
    static float expected[SOME * WIDTH], out[SOME * WIDTH];
    make_texts(&all);
    for (int threads = 1; threads <= 3; threads += 2) {
        tiny_model tiny;
        tiny_load(&tiny, make_spec(f), compute, threads);
        pool(&tiny);
        if (threads == 1)
            pool_tokens(&tiny, &all, SOME, expected);
        MP_CHECK_INT(run(&tiny, &all, 0, SOME, UINT64_MAX, out), MP_OUTCOME_DONE);
        if (memcmp(out, expected, sizeof out) != 0)
            MP_FAIL("%s in a batch on %d threads: other bits", f->arch, threads);
        for (int t = 5; t < 5 + ALONE; t++) {
            MP_CHECK_INT(run(&tiny, &all, t, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
            if (memcmp(out, expected + t * WIDTH, WIDTH * sizeof *out) != 0)
                MP_FAIL("%s: text %d alone on %d threads: other bits", f->arch, t, threads);
        }
        tiny_unload(&tiny);
    }
}

MP_TEST(models_encoder_families_last_layer) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        check_last_layer(&families[i], MP_COMPUTE_F32, i % 2 ? pool_first : pool_last);
    check_last_layer(&families[0], MP_COMPUTE_BF16, pool_first);
    check_last_layer(&families[1], MP_COMPUTE_I8, pool_last);
    check_last_layer(&families[2], MP_COMPUTE_BF16, pool_last);
    check_last_layer(&families[4], MP_COMPUTE_I8, pool_first);
}

/* ---- options of families ----------------------------------------------------------------------------------------- */

/* Embed one text. */
static void embed_one(const family *f, float *out) {
    static texts all;
    tiny_model tiny;
    make_texts(&all);
    tiny_load(&tiny, make_spec(f), MP_COMPUTE_F32, 1);
    MP_CHECK_INT(run(&tiny, &all, 2, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
    tiny_unload(&tiny);
}

/* Packed experts are kept and charged. Every step reads experts: after the file was changed in place, steps fail. */
MP_TEST(models_encoder_families_read_experts) {
    static texts all;
    float before[WIDTH], out[WIDTH];
    tiny_model tiny;
    size_t i = 0;
    while (!families[i].experts)
        i++;
    make_texts(&all);
    tiny_load(&tiny, make_spec(&families[i]), MP_COMPUTE_F32, 1);
    const mp_weight_store *store = &((const mp_encoder *)tiny.model)->store;
    const uint64_t bytes = tiny.model->ops->bytes(tiny.model);
    MP_CHECK_INT(run(&tiny, &all, 2, 1, UINT64_MAX, before), MP_OUTCOME_DONE);
    const uint64_t kept = atomic_load(&store->copied);
    MP_CHECK(kept > 0);
    MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), bytes + kept + recent_of(tiny.engine)->charged);
    MP_CHECK(tiny_trim(&tiny) >= kept && atomic_load(&store->copied) == 0);
    MP_CHECK_INT(run(&tiny, &all, 2, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
    MP_CHECK(memcmp(before, out, sizeof out) == 0);
    FILE *file = fopen(mp_spec_file(tiny.spec, 0), "r+b");
    MP_CHECK(file && fwrite("changed", 1, 7, file) == 7 && fclose(file) == 0);
    const int64_t offsets[] = {0, 2};
    mp_error error;
    mp_embedding_request *call;
    MP_CHECK_OK(make_embedding_request(1, (const int32_t[]){9, 10}, offsets, NULL, &call, &error), &error);
    mp_status code;
    MP_CHECK_INT(end_call(&tiny, &call->base, UINT64_MAX, &code), MP_OUTCOME_FAILED);
    MP_CHECK_INT(code, MP_INTEGRITY);
    mp_request_destroy(&call->base);
    tiny_unload(&tiny);
}

/* A file that does not say so has no causal mask. */
MP_TEST(models_encoder_families_are_not_causal_by_default) {
    float expected[WIDTH], causal[WIDTH], out[WIDTH];
    family f = families[0];
    embed_one(&f, expected);
    f.causal = true;
    embed_one(&f, causal);
    MP_CHECK(memcmp(expected, causal, sizeof expected) != 0);
    f.causal_unset = true;
    embed_one(&f, out);
    MP_CHECK(memcmp(expected, out, sizeof out) == 0);
}

static const family *latent_family(void) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (families[i].latents)
            return &families[i];
    MP_FAIL("no family with latents");
    return NULL;
}

/* The norms of latent attention use the file's epsilon, and so do the latents, which are normed at loading. Quantised
 * matrices of latents are refused. */
MP_TEST(models_encoder_families_read_latents) {
    float small[WIDTH], large[WIDTH];
    mp_error error;
    tiny_model tiny;
    family f = *latent_family();
    embed_one(&f, small);
    f.latent_epsilon = 0.5f;
    embed_one(&f, large);
    MP_CHECK(memcmp(small, large, sizeof small) != 0);
    tiny_load(&tiny, make_spec(&f), MP_COMPUTE_F32, 1);
    const mp_latent_attention *latent = &((const mp_encoder *)tiny.model)->latent;
    MP_CHECK(latent->eps == 0.5f && latent->norm.eps == 0.5f && latent->ffn_norm.eps == 0.5f);
    tiny_unload(&tiny);
    f.quantised_latents = true;
    MP_CHECK_STATUS(load_only(make_spec(&f), MP_COMPUTE_F32, &error), MP_UNSUPPORTED, &error);
    MP_CHECK_HAS(error.message, "Q8_0");
}

/* True for a bias that another layer has too. */
static bool is_shared_bias(const mp_spec *spec, const char *name) {
    const char *part = strncmp(name, "blk.", 4) == 0 ? strchr(name + 4, '.') : NULL;
    int same = 0;
    for (int t = 0; part && t < mp_spec_tensor_count(spec); t++) {
        const char *other = mp_spec_tensor_at(spec, t)->name, *end = strlen(other) > 4 ? strchr(other + 4, '.') : NULL;
        same += end && strcmp(end, part) == 0;
    }
    return same > 1;
}

/* A file without one of its matrices or norms is refused by the tensor's name. So is a file whose layers do
 * not have the same biases. (A bias of all layers, or outside layers, may be missing.) */
MP_TEST(models_encoder_families_miss_no_tensor) {
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        mp_spec *whole = make_spec(&families[i]);
        for (int t = 0; t < mp_spec_tensor_count(whole); t++) {
            const char *name = mp_spec_tensor_at(whole, t)->name;
            if (strstr(name, "bias") && !is_shared_bias(whole, name))
                continue;
            MP_CHECK_STATUS(load_only(spec_without(whole, t, 0), MP_COMPUTE_F32, &error), MP_FORMAT, &error);
            /* without its norm of the embeddings, ModernBERT lacks one in the first layer; one expert has two names */
            if (!strstr(name, "token_embd_norm") && !strstr(name, ".columns"))
                MP_CHECK_STR(error.field, name);
        }
        mp_spec_unpin(whole);
    }
}

/* The loader frees everything that it allocates outside the slab, also after a failed allocation. */
static mp_status sweep_make(mp_request **call, mp_error *error) {
    static const int32_t ids[] = {9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20};
    static const int64_t offsets[] = {0, 12};
    return make_embedding_request(1, ids, offsets, NULL, (mp_embedding_request **)(void *)call, error);
}

static void sweep_compare(const mp_request *first, const mp_request *second) {
    MP_CHECK(memcmp(((const mp_embedding_request *)first)->vectors, ((const mp_embedding_request *)second)->vectors,
                    WIDTH * sizeof(float)) == 0);
}

MP_TEST_SECONDS(models_encoder_families_allocation_sweep, 200) {
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        tiny_life life = {.spec = make_spec(&families[i]), .compute = MP_COMPUTE_F32,
                          .make = sweep_make, .compare = sweep_compare};
        mp_test_alloc_sweep(tiny_live, &life);
        mp_spec_unpin(life.spec);
    }
}

static const family *shared_family(void) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (families[i].depth)
            return &families[i];
    MP_FAIL("no family whose layers share weights");
    return NULL;
}

/* Load a model whose layers are computed in the given order. */
static mp_status load_order(const int64_t *order, int count, mp_error *error) {
    family f = *shared_family();
    f.depth = 0;
    mp_spec *plain = make_spec(&f), *spec = spec_copy(plain, -1, 0);
    mp_value list = {.type = MP_VALUE_INTS, .gguf_type = -1, .count = (uint64_t)count, .as.integers = order};
    MP_CHECK_OK(mp_spec_set(spec, "mpool.layer_order", &list, error), error);
    mp_spec_freeze(spec);
    mp_spec_unpin(plain);
    return load_only(spec, MP_COMPUTE_F32, error);
}

/* An order names only layers that exist, and has at most as many as a model may have. */
MP_TEST(models_encoder_families_check_the_order_of_layers) {
    static int64_t many[1025];
    const int64_t beyond[] = {0, TINY_ENCODER_LAYERS}, before[] = {-1};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(load_order(many, 1024, &error), &error);
    MP_CHECK_STATUS(load_order(many, 1025, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "mpool.layer_order");
    MP_CHECK_STATUS(load_order(many, 0, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(load_order(beyond, 2, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "mpool.layer_order");
    MP_CHECK_STATUS(load_order(before, 1, &error), MP_FORMAT, &error);
}

MP_TEST(models_ranges_of_encoder_families) {
    static const struct { const char *arch; range range; } rows[] = {
        {"nomic_bert", {".rope.dimension_count", "an integer from 2 to 16"}},
        {"nomic_bert", {".rope.freq_base", "a number from 1 to 1e+12"}},
        {"nomic_bert", {"mpool.rope_local_base", "a number from 1 to 1e+12"}},
        {"llama_embedding", {".attention.layer_norm_rms_epsilon", "a number from 1e-30 to 1"}},
        {"nv_embed", {"mpool.latent_count", "an integer from 1 to 8192"}},
        {"nv_embed", {"mpool.latent_epsilon", "a number from 1e-30 to 1"}},
        {"nv_embed", {"mpool.latent_feed_forward", "an integer from 1 to 1048576"}},
        {"nv_embed", {"mpool.latent_head_size", "an integer from 1 to 65536"}},
        {"nv_embed", {"mpool.latent_heads", "an integer from 1 to 256"}},
        {"nomic_bert_moe", {".expert_used_count", "an integer from 1 to 5"}},
        {"nomic_bert_moe", {".moe_every_n_layers", "an integer from 2 to 1024"}},
        {"nomic_bert_moe", {"mpool.expert_groups", "an integer from 1 to 5"}},
        {"nomic_bert_moe", {"mpool.expert_groups_used", "the integer 1"}},
        {"nomic_bert_moe", {"mpool.expert_scale", "a number from 1e-06 to 1e+06"}},
        {"bert", {"mpool.embedding_size", "an integer from 1 to 65536 (a limit of mpool)"}},
        {"deberta_v2", {"mpool.relative_span", "an integer from 1 to 65536"}},
        {"deberta_v2", {"mpool.relative_buckets", "an integer from 0 to 65536"}},
        {"deberta_v2", {"mpool.relative_farthest", "an integer from 1 to 1048576"}},
        {"deberta_v2", {"mpool.relative_keys", "true or false"}},
        {"deberta_v2", {"mpool.relative_shared", "true or false"}},
        {"deberta_v2", {"mpool.relative_normed", "true or false"}},
        {"bert", {"mpool.layer_order", "an array of 1 to 1,024 integers"}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const family *f = families;
        while (strcmp(f->arch, rows[i].arch) != 0)
            f++;
        check_ranges(make_spec(f), 1, &rows[i].range);
    }
}

/* A table of position biases has an entry per head for each distance between two of the positions. */
MP_TEST(models_encoder_families_charge_their_position_biases) {
    int tables = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        tiny_model tiny;
        tiny_load(&tiny, make_spec(&families[i]), MP_COMPUTE_F32, 1);
        const mp_encoder *model = (const mp_encoder *)tiny.model;
        if (model->position_bias) {
            const int64_t table = (int64_t)model->attention.heads * (2 * TINY_POSITIONS - 1) * (int64_t)sizeof(float);
            MP_CHECK_INT((int64_t)tiny.model->ops->bytes(tiny.model) - model->base.facts.weight_bytes,
                         MP_WMAT_SLACK + table);
            tables++;
        }
        tiny_unload(&tiny);
    }
    MP_CHECK(tables > 1);
}
