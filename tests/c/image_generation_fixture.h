/* image_generation_fixture.h: tiny seeded image pipelines, image requests, and hashes of their results. */
#ifndef IMAGE_GENERATION_FIXTURE_H
#define IMAGE_GENERATION_FIXTURE_H

#include "model_fixture.h"
#include "models/diffusion/diffusion.h"

/* ---- the spec of a pipeline -------------------------------------------------------------------------------------- */

enum { HIGH = 6, WIDE = 10, CHANNELS = 4, STEPS = 3, CLIP_TOKENS = 9, T5_TOKENS = 7, VOCAB_SIZE = 40 };

static void put(tiny_file *file, const char *name, int ndim, const int64_t *shape, float size, float offset) {
    mp_error error;
    int64_t items = 1;
    for (int d = 0; d < ndim; d++)
        items *= shape[d];
    file->used = (file->used + 63) & ~(size_t)63;
    size_t bytes = (size_t)items * sizeof(float);
    if (file->used + bytes > file->capacity) {
        file->capacity = 2 * (file->used + bytes);
        file->bytes = realloc(file->bytes, file->capacity);
        MP_CHECK(file->bytes);
    }
    for (int64_t i = 0; i < items; i++) {
        float x = offset + mp_test_random_float(&file->random, -size, size);
        memcpy(file->bytes + file->used + 4 * i, &x, 4);
    }
    mp_tensor_entry entry = {.name = name, .dtype = MP_F32, .ndim = ndim, .offset = file->used, .nbytes = bytes};
    memcpy(entry.shape, shape, (size_t)ndim * sizeof *shape);
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error);
    file->used += bytes;
}

static void matrix(tiny_file *file, const char *part, const char *name, int64_t rows, int64_t columns) {
    char full[96];
    snprintf(full, sizeof full, "%s.%s.weight", part, name);
    put(file, full, 2, (int64_t[]){rows, columns}, 1.5f / sqrtf((float)columns), 0);
    snprintf(full, sizeof full, "%s.%s.bias", part, name);
    if (strncmp(part, "t5", 2) != 0)
        put(file, full, 1, &rows, 0.2f, 0);
}

static void vector(tiny_file *file, const char *part, const char *name, int64_t n, float offset) {
    char full[160];
    snprintf(full, sizeof full, "%s.%s", part, name);
    put(file, full, 1, &n, 0.2f, offset);
}

static void norm(tiny_file *file, const char *part, const char *name, int64_t n) {
    char full[96];
    snprintf(full, sizeof full, "%s.weight", name);
    vector(file, part, full, n, 1);
    snprintf(full, sizeof full, "%s.bias", name);
    vector(file, part, full, n, 0);
}

static void conv(tiny_file *file, const char *part, const char *name, int64_t out, int64_t in, int64_t size) {
    char full[96];
    snprintf(full, sizeof full, "%s.%s.weight", part, name);
    put(file, full, 4, (int64_t[]){out, in, size, size}, 1.5f / sqrtf((float)(in * size * size)), 0);
    snprintf(full, sizeof full, "%s.bias", name);
    vector(file, part, full, out, 0);
}

static void text(tiny_file *file, const char *key, const char *value) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = strlen(value), .as.string = value};
    MP_CHECK_OK(mp_spec_set(file->spec, key, &v, &error), &error);
}

static void fact(tiny_file *file, const char *part, const char *name, int64_t value) {
    char key[64];
    snprintf(key, sizeof key, "%s.%s", part, name);
    tiny_int(file->spec, key, value);
}

static int clip_g_positions = CLIP_TOKENS; /* the context length that the next clip_g gets */

static void add_clip(tiny_file *file, const char *part, int hidden, int projection) {
    const int clip_positions = strcmp(part, "clip_g") == 0 ? clip_g_positions : CLIP_TOKENS;
    char key[64], at[64];
    fact(file, part, "block_count", 2);
    fact(file, part, "embedding_length", hidden);
    fact(file, part, "head_count", hidden / 8);
    fact(file, part, "head_length", 8);
    fact(file, part, "feed_forward_length", 21);
    fact(file, part, "context_length", clip_positions);
    fact(file, part, "projection_length", projection);
    fact(file, part, "end_token", projection == 0 ? -1 : 5);
    snprintf(key, sizeof key, "%s.norm_epsilon", part);
    tiny_float(file->spec, key, 1e-5);
    snprintf(key, sizeof key, "%s.activation", part);
    text(file, key, "quick_gelu");
    snprintf(key, sizeof key, "%s.tokens", part);
    put(file, key, 2, (int64_t[]){VOCAB_SIZE, hidden}, 1, 0);
    snprintf(key, sizeof key, "%s.positions", part);
    put(file, key, 2, (int64_t[]){clip_positions, hidden}, 1, 0);
    for (int i = 0; i < 2; i++) {
        static const char *const names[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                            "self_attn.out_proj"};
        snprintf(at, sizeof at, "%s.layers.%d", part, i);
        for (int m = 0; m < 4; m++)
            matrix(file, at, names[m], hidden, hidden);
        matrix(file, at, "mlp.fc1", 21, hidden);
        matrix(file, at, "mlp.fc2", hidden, 21);
        norm(file, at, "layer_norm1", hidden);
        norm(file, at, "layer_norm2", hidden);
    }
    norm(file, part, "final_layer_norm", hidden);
    if (projection)
        matrix(file, part, "text_projection", projection, hidden);
}

static void add_t5(tiny_file *file, int hidden) {
    static const char *const facts[] = {"block_count", "embedding_length", "head_count", "head_length",
                                        "feed_forward_length", "context_length", "relative_buckets",
                                        "relative_distance"};
    const int values[] = {2, hidden, 3, 8, 19, 16, 8, 12};
    char at[64];
    for (int i = 0; i < 8; i++)
        fact(file, "t5", facts[i], values[i]);
    tiny_float(file->spec, "t5.norm_epsilon", 1e-6);
    text(file, "t5.activation", "gelu_tanh");
    put(file, "t5.tokens", 2, (int64_t[]){VOCAB_SIZE, hidden}, 1, 0);
    put(file, "t5.relative", 2, (int64_t[]){8, 3}, 1, 0);
    for (int i = 0; i < 2; i++) {
        snprintf(at, sizeof at, "t5.block.%d", i);
        matrix(file, at, "attn.q", 24, hidden);
        matrix(file, at, "attn.k", 24, hidden);
        matrix(file, at, "attn.v", 24, hidden);
        matrix(file, at, "attn.o", hidden, 24);
        matrix(file, at, "ffn.wi_0", 19, hidden);
        matrix(file, at, "ffn.wi_1", 19, hidden);
        matrix(file, at, "ffn.wo", hidden, 19);
        vector(file, at, "attn_norm.weight", hidden, 1);
        vector(file, at, "ffn_norm.weight", hidden, 1);
    }
    vector(file, "t5", "final_layer_norm.weight", hidden, 1);
}

static void add_transformer(tiny_file *file, bool flux, int texts, int pooled) {
    enum { H = 32, D = 16, LAYERS = 2, PATCH = 4 * CHANNELS };
    char at[64];
    fact(file, "transformer", "block_count", LAYERS);
    fact(file, "transformer", "single_block_count", flux ? LAYERS : 0);
    fact(file, "transformer", "head_count", H / D);
    fact(file, "transformer", "head_length", D);
    fact(file, "transformer", "channels", CHANNELS);
    fact(file, "transformer", "text_length", texts);
    fact(file, "transformer", "pooled_length", pooled);
    matrix(file, "transformer", "x_embedder", H, PATCH);
    matrix(file, "transformer", "context_embedder", H, texts);
    matrix(file, "transformer", "time.0", H, MP_DIFF_WAVES);
    matrix(file, "transformer", "time.1", H, H);
    matrix(file, "transformer", "pooled.0", H, pooled);
    matrix(file, "transformer", "pooled.1", H, H);
    matrix(file, "transformer", "norm_out.shift", H, H);
    matrix(file, "transformer", "norm_out.scale", H, H);
    matrix(file, "transformer", "proj_out", PATCH, H);
    if (flux) {
        tiny_ints(file->spec, "transformer.axes", (int64_t[]){4, 4, 8}, 3);
    } else {
        fact(file, "transformer", "position_side", 8);
        put(file, "transformer.positions", 2, (int64_t[]){64, H}, 1, 0);
        tiny_ints(file->spec, "transformer.dual_layers", (int64_t[]){0}, 1);
    }
    for (int i = 0; i < LAYERS; i++) {
        static const char *const squares[] = {"attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj",
                                              "attn.add_k_proj", "attn.add_v_proj", "attn.to_out"};
        static const char *const norms[] = {"attn.norm_q.weight", "attn.norm_k.weight", "attn.norm_added_q.weight",
                                            "attn.norm_added_k.weight"};
        const bool last = !flux && i == LAYERS - 1, dual = !flux && i == 0;
        snprintf(at, sizeof at, "transformer.joint.%d", i);
        matrix(file, at, "norm1.linear", (dual ? 9 : 6) * H, H);
        for (int m = 0; m < 7; m++)
            matrix(file, at, squares[m], H, H);
        for (int m = 0; m < 4; m++)
            vector(file, at, norms[m], D, 1);
        matrix(file, at, "ff.up", 4 * H, H);
        matrix(file, at, "ff.down", H, 4 * H);
        if (last) {
            matrix(file, at, "norm1_context.shift", H, H);
            matrix(file, at, "norm1_context.scale", H, H);
        } else {
            matrix(file, at, "norm1_context.linear", 6 * H, H);
            matrix(file, at, "attn.to_add_out", H, H);
            matrix(file, at, "ff_context.up", 4 * H, H);
            matrix(file, at, "ff_context.down", H, 4 * H);
        }
        static const char *const twice[] = {"attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out"};
        for (int m = 0; m < 4 && dual; m++)
            matrix(file, at, twice[m], H, H);
        if (dual) {
            vector(file, at, "attn2.norm_q.weight", D, 1);
            vector(file, at, "attn2.norm_k.weight", D, 1);
        }
    }
    for (int i = 0; i < LAYERS && flux; i++) {
        snprintf(at, sizeof at, "transformer.single.%d", i);
        matrix(file, at, "norm.linear", 3 * H, H);
        matrix(file, at, "attn.to_q", H, H);
        matrix(file, at, "attn.to_k", H, H);
        matrix(file, at, "attn.to_v", H, H);
        matrix(file, at, "proj_mlp", 4 * H, H);
        matrix(file, at, "proj_out", H, 5 * H);
        vector(file, at, "attn.norm_q.weight", D, 1);
        vector(file, at, "attn.norm_k.weight", D, 1);
    }
}

static void residual(tiny_file *file, const char *at, int in, int out) {
    norm(file, at, "norm1", in);
    conv(file, at, "conv1", out, in, 3);
    norm(file, at, "norm2", out);
    conv(file, at, "conv2", out, out, 3);
    if (in != out)
        conv(file, at, "conv_shortcut", out, in, 1);
}

static void add_decoder(tiny_file *file) {
    char at[64];
    tiny_ints(file->spec, "vae.channels", (int64_t[]){8, 16}, 2);
    fact(file, "vae", "layers", 1);
    fact(file, "vae", "groups", 4);
    tiny_float(file->spec, "vae.scaling_factor", 1.3);
    tiny_float(file->spec, "vae.shift_factor", 0.1);
    conv(file, "vae", "conv_in", 16, CHANNELS, 3);
    residual(file, "vae.mid.resnets.0", 16, 16);
    residual(file, "vae.mid.resnets.1", 16, 16);
    norm(file, "vae.mid.attention", "group_norm", 16);
    static const char *const names[] = {"to_q", "to_k", "to_v", "to_out"};
    for (int m = 0; m < 4; m++)
        matrix(file, "vae.mid.attention", names[m], 16, 16);
    for (int i = 0, in = 16; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            const int out = i ? 8 : 16;
            snprintf(at, sizeof at, "vae.up.%d.resnets.%d", i, j);
            residual(file, at, in, out);
            in = out;
        }
    conv(file, "vae.up.0", "conv", 16, 16, 3);
    norm(file, "vae.end", "conv_norm_out", 8);
    conv(file, "vae.end", "conv_out", 3, 8, 3);
}

/* `large_clip`: with the encoder clip_g. */
static mp_spec *pipeline_with(bool flux, bool large_clip) {
    mp_error error;
    char path[512];
    snprintf(path, sizeof path, "%s/pipeline%d.bin", mp_test_directory(), flux);
    tiny_file file = {.spec = mp_spec_create(), .random = {21}};
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, flux ? "flux" : "sd3", &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    add_clip(&file, "clip_l", 16, flux ? 0 : 12);
    if (large_clip)
        add_clip(&file, "clip_g", 24, 20);
    add_t5(&file, 40);
    add_transformer(&file, flux, 40, flux ? 16 : 32);
    add_decoder(&file);
    mp_spec_freeze(file.spec);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return file.spec;
}

static inline mp_spec *pipeline(bool flux) { return pipeline_with(flux, !flux); }

/* ---- requests ---------------------------------------------------------------------------------------------------- */

static inline mp_status make_call(bool flux, int images, mp_request **out, mp_error *error) {
    static int32_t ids[2][MP_T2I_ENCODERS][CLIP_TOKENS];
    static float noise[2 * CHANNELS * HIGH * WIDE];
    const float times[STEPS] = {1000, 700, 300}, sigmas[STEPS + 1] = {1, 0.7f, 0.3f, 0};
    mp_test_random random = {9};
    mp_image_generation_args args = {.width = 2 * WIDE,
                                     .height = 2 * HIGH,
                                     .n_images = images,
                                     .n_steps = STEPS,
                                     .n_texts = flux ? 1 : 2,
                                     .guidance = 3,
                                     .times = times,
                                     .sigmas = sigmas,
                                     .noise = noise,
                                     .n_noise = (int64_t)images * CHANNELS * HIGH * WIDE,
                                     .preview_every = 2,
                                     .keep = true};
    for (int e = 0; e < MP_T2I_ENCODERS; e++)
        args.n_ids[e] = e == MP_DIFF_T5 ? T5_TOKENS : e == MP_DIFF_CLIP_G && flux ? 0 : CLIP_TOKENS;
    for (int t = 0; t < 2; t++)
        for (int e = 0; e < MP_T2I_ENCODERS; e++) {
            args.ids[t][e] = args.n_ids[e] ? ids[t][e] : NULL;
            for (int i = 0; i < CLIP_TOKENS; i++)
                ids[t][e][i] = (int32_t)(mp_test_random_u64(&random) % VOCAB_SIZE);
        }
    for (size_t i = 0; i < sizeof noise / sizeof *noise; i++)
        noise[i] = mp_test_random_float(&random, -2, 2);
    mp_image_generation_request *call = NULL;
    MP_TRY(mp_image_generation_request_create(&args, &call, error));
    *out = &call->base;
    return MP_OK;
}

/* Make a request for one image, and admit it to the engine. */
static inline void admit_call(tiny_model *tiny, bool flux, mp_item *item) {
    mp_error error;
    uint64_t cost;
    MP_CHECK_OK(make_call(flux, 1, &item->request, &error), &error);
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item->request, &cost, &item->total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, item, &error), &error);
}

/* Serve the item's request until it is done. The caller retires it. */
static inline void serve_alone(tiny_model *tiny, mp_item *item) {
    mp_error error;
    mp_item *items[1] = {item};
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    uint64_t cost;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item->request, &cost, &item->total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, item, &error), &error);
    do {
        tiny->engine->ops->plan(tiny->engine, items, 1, UINT64_MAX, &plan);
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    } while (outcomes[0] == MP_OUTCOME_MORE);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_DONE);
}

/* Hash everything that a caller of a finished request sees. */
static inline uint64_t seen_hash(const mp_request *base) {
    const mp_image_generation_request *call = (const mp_image_generation_request *)base;
    const size_t pixels = 4 * HIGH * WIDE * 3, n = (size_t)call->n_images;
    uint64_t hash = tiny_hash_bytes(14695981039346656037u, call->pixels, n * pixels * sizeof(float));
    hash = tiny_hash_bytes(hash, call->latents, n * CHANNELS * HIGH * WIDE * sizeof(float));
    return tiny_hash_bytes(hash, call->previews, n * (size_t)call->n_previews * pixels);
}

/* Hash seen_hash and the state kept for tests: latents of all steps, text embeddings. */
static inline uint64_t hash_of(const mp_request *base) {
    const mp_image_generation_request *call = (const mp_image_generation_request *)base;
    const size_t latents = CHANNELS * HIGH * WIDE, n = (size_t)call->n_images;
    uint64_t hash = seen_hash(base);
    hash = tiny_hash_bytes(hash, call->history, n * STEPS * latents * sizeof(float));
    hash = tiny_hash_bytes(hash, call->pooled, (size_t)call->n_texts * (size_t)call->pooled_width * sizeof(float));
    return tiny_hash_bytes(hash, call->texts,
                           (size_t)call->n_texts * (size_t)call->text_rows * (size_t)call->text_width * sizeof(float));
}

#endif
