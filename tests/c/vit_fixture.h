/* vit_fixture.h: tiny image transformers, images, and requests with them. */
#ifndef VIT_FIXTURE_H
#define VIT_FIXTURE_H

#include "grouping_fixture.h"
#include "models/dedup.h"
#include "models/image/vit.h"
#include "request_fixture.h"

enum { HIDDEN = 48, LAYERS = 2, PATCH = 7, GRID = 5, WIDTH = 32, IMAGES = 13, MAX_SIDE = 90 };

/* Make the fp32 spec of dinov2 (any image size), dinov2_with_registers or siglip (attention pooling). */
static inline mp_spec *make_spec(const char *arch, bool gated) {
    const bool pool = strcmp(arch, "siglip") == 0, registers = strcmp(arch, "dinov2_with_registers") == 0;
    const int before = pool ? 0 : 1;
    const int ffn = registers ? 88 : 96; /* 96: whole panels, passed between products without a float copy */
    mp_error error;
    char path[512], key[64], name[64];
    snprintf(path, sizeof path, "%s/%s%d.bin", mp_test_directory(), arch, gated);
    tiny_file file = {.spec = mp_spec_create(), .random = {17}};
    mp_spec *spec = file.spec;
    MP_CHECK_OK(mp_spec_set_architecture(spec, arch, &error), &error);
    MP_CHECK_OK(mp_spec_add_file(spec, path, &error), &error);
    const struct {
        const char *key;
        int value;
    } numbers[] = {{"block_count", LAYERS},     {"embedding_length", HIDDEN}, {"feed_forward_length", ffn},
                   {"attention.head_count", 3}, {"patch_size", PATCH},        {"image_size", PATCH * GRID}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(key, sizeof key, "%s.vision.%s", arch, numbers[i].key);
        tiny_int(spec, key, numbers[i].value);
    }
    snprintf(key, sizeof key, "%s.vision.attention.layer_norm_epsilon", arch);
    tiny_float(spec, key, 1e-6);
    mp_value gate = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = gated};
    MP_CHECK_OK(mp_spec_set(spec, "mpool.image.gated", &gate, &error), &error);
    static const char cls[] = "cls";
    static const uint64_t ends[] = {0, 3};
    mp_value pooling = {.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 1};
    pooling.as.strings.bytes = cls;
    pooling.as.strings.offsets = ends;
    MP_CHECK_OK(mp_spec_set(spec, "mpool.pooling", &pooling, &error), &error);
    tiny_int(spec, "mpool.dense_count", 1);
    tiny_tensor(&file, "v.patch_embd.weight", MP_F32, HIDDEN, 3 * PATCH * PATCH, 0.2f, 0);
    tiny_tensor(&file, "v.patch_embd.bias", MP_F32, 1, HIDDEN, 0.2f, 0);
    if (!pool)
        tiny_tensor(&file, "v.class_embd", MP_F32, 1, HIDDEN, 1, 0);
    if (registers) {
        tiny_int(spec, "mpool.image.registers", 3);
        tiny_tensor(&file, "v.register_embd", MP_F32, 3, HIDDEN, 1, 0);
    }
    tiny_tensor(&file, "v.position_embd.weight", MP_F32, before + GRID * GRID, HIDDEN, 1, 0);
    const struct {
        const char *name;
        int rows, columns;
    } matrices[] = {{"attn_q", HIDDEN, HIDDEN},   {"attn_k", HIDDEN, HIDDEN}, {"attn_v", HIDDEN, HIDDEN},
                    {"attn_out", HIDDEN, HIDDEN}, {"ffn_up", ffn, HIDDEN},    {"ffn_down", HIDDEN, ffn},
                    {"ffn_gate", ffn, HIDDEN}};
    for (int l = 0; l < LAYERS + pool; l++) {
        char prefix[32];
        snprintf(prefix, sizeof prefix, l < LAYERS ? "v.blk.%d" : "v.head", l);
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices - !(gated && l < LAYERS); m++) {
            snprintf(name, sizeof name, "%s.%s.weight", prefix, matrices[m].name);
            tiny_tensor(&file, name, MP_F32, matrices[m].rows, matrices[m].columns, 0.2f, 0);
            snprintf(name, sizeof name, "%s.%s.bias", prefix, matrices[m].name);
            tiny_tensor(&file, name, MP_F32, 1, matrices[m].rows, 0.2f, 0);
        }
        static const char *const norms[] = {"ln1", "ln2", "ln"};
        for (int n = l < LAYERS ? 0 : 2; n < (l < LAYERS ? 2 : 3); n++) {
            snprintf(name, sizeof name, "%s.%s.weight", prefix, norms[n]);
            tiny_tensor(&file, name, MP_F32, 1, HIDDEN, 0.3f, 1);
            snprintf(name, sizeof name, "%s.%s.bias", prefix, norms[n]);
            tiny_tensor(&file, name, MP_F32, 1, HIDDEN, 0.3f, 0);
        }
        for (int s = 1; !pool && s <= 2; s++) {
            snprintf(name, sizeof name, "%s.ls%d.weight", prefix, s);
            tiny_tensor(&file, name, MP_F32, 1, HIDDEN, 0.5f, 0.5f);
        }
    }
    if (pool)
        tiny_tensor(&file, "v.head.probe", MP_F32, 1, HIDDEN, 1, 0);
    tiny_tensor(&file, "v.post_ln.weight", MP_F32, 1, HIDDEN, 0.3f, 1);
    tiny_tensor(&file, "v.post_ln.bias", MP_F32, 1, HIDDEN, 0.3f, 0);
    tiny_tensor(&file, "dense.0.weight", MP_F32, WIDTH, HIDDEN, 0.3f, 0);
    mp_spec_freeze(spec);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return spec;
}

typedef struct test_images {
    int32_t sizes[2 * IMAGES];
    int64_t offsets[IMAGES + 1];
    uint8_t pixels[IMAGES * 3 * MAX_SIDE * MAX_SIDE];
} test_images;

static inline void make_images(test_images *all, bool any_size) {
    mp_test_random random = {5};
    for (int i = 0; i < IMAGES; i++) {
        for (int side = 0; side < 2; side++)
            all->sizes[2 * i + side] =
                any_size && i % 4 ? PATCH + (int)(mp_test_random_u64(&random) % (MAX_SIDE - PATCH)) : PATCH * GRID;
        int64_t bytes = 3 * (int64_t)all->sizes[2 * i] * all->sizes[2 * i + 1];
        for (int64_t b = 0; b < bytes; b++)
            all->pixels[all->offsets[i] + b] = (uint8_t)mp_test_random_u64(&random);
        all->offsets[i + 1] = all->offsets[i] + bytes;
    }
}

static inline mp_image_embedding_request *make_call(const test_images *all, int first, int count) {
    mp_error error;
    mp_image_embedding_request *call;
    MP_CHECK_OK(make_image_embedding_request(count, all->sizes + 2 * first, all->pixels + all->offsets[first],
                                     all->offsets[first + count] - all->offsets[first], &call, &error),
                &error);
    return call;
}

static inline mp_recent *recent_of(const tiny_model *tiny) { return &((mp_vit *)tiny->model)->recent; }
/* Keep no recent vectors: the engine computes every image that it has computed before. */
static inline void compute_all(tiny_model *tiny) { recent_of(tiny)->most_bytes = 0; }

/* Run images [first, first + count) as one request. */
static inline mp_outcome run(tiny_model *tiny, const void *all, int first, int count, uint64_t budget_ns, float *out) {
    mp_image_embedding_request *call = make_call(all, first, count);
    const mp_outcome outcome = run_call(tiny, &call->base, budget_ns);
    MP_CHECK_INT(call->width, WIDTH);
    if (outcome == MP_OUTCOME_DONE) {
        memcpy(out, call->vectors, (size_t)count * WIDTH * sizeof(float));
        MP_CHECK_INT(call->done, count);
    }
    mp_request_destroy(&call->base);
    return outcome;
}

static inline void check_item(tiny_model *tiny, mp_item *item, mp_image_embedding_request *call) {
    mp_error error;
    uint64_t cost;
    *item = (mp_item){.request = &call->base};
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item->request, &cost, &item->total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, item, &error), &error);
}

typedef struct family {
    const char *arch;
    bool gated;
} family;

static inline mp_spec *make_family(const void *arg) {
    const family *of = arg;
    return make_spec(of->arch, of->gated);
}

/* Divide layers into parts of about 5 rows. */
static inline void cut(tiny_model *tiny) {
    compute_all(tiny);
    mp_vit *model = (mp_vit *)tiny->model;
    model->grain = 5;
    model->most_ops = 1000000;
}

#endif
