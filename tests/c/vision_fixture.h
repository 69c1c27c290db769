/* vision_fixture.h: tiny vision decoders, and requests with images. */
#ifndef VISION_FIXTURE_H
#define VISION_FIXTURE_H

#include "model_fixture.h"

enum { ITEMS = 8, ANSWER = 5, MARK = TINY_VOCAB - 1, SIDE = 16, PATCH = 4, HIDDEN = 24, FFN = 40, ENCODER_LAYERS = 3,
       MAX = 3, ROWS = (SIDE / PATCH) * (SIDE / PATCH), PIXELS = SIDE * SIDE * 3 };

static int tile_rows = ROWS; /* rows per tile */
static bool oblong;          /* tiles are alternately 2 SIDE wide and 2 SIDE high, and each has SIDE * SIDE pixels */
static int earlier;          /* number of tokens by which the images of items 3, 4 and 7 begin earlier */
static bool halves;          /* the first matrix of an axial network is stored as two, as in GGUF files */
static bool has_newline = true; /* turned prompts end images with the newline row */

static inline void set_string(mp_spec *spec, const char *key, const char *text) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = strlen(text), .as.string = text};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

static inline void add_image_encoder(tiny_file *file) {
    char name[64];
    mp_spec *spec = file->spec;
    set_string(spec, "mpool.vision.decoder", "llama");
    set_string(spec, "mpool.vision.image_encoder", "clip");
    tiny_int(spec, "mpool.vision.image_token_id", MARK);
    const struct {
        const char *key;
        int value;
    } numbers[] = {{"block_count", ENCODER_LAYERS},      {"embedding_length", HIDDEN}, {"feed_forward_length", FFN},
                   {"attention.head_count", 3}, {"patch_size", PATCH},        {"image_size", SIDE}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(name, sizeof name, "llava.vision.%s", numbers[i].key);
        tiny_int(spec, name, numbers[i].value);
    }
    tiny_float(spec, "llava.vision.attention.layer_norm_epsilon", 1e-5);
    tiny_tensor(file, "v.patch_embd.weight", MP_F32, HIDDEN, 3 * PATCH * PATCH, 0.2f, 0);
    tiny_tensor(file, "v.class_embd", MP_F32, 1, HIDDEN, 1, 0);
    tiny_tensor(file, "v.position_embd.weight", MP_F32, ROWS + 1, HIDDEN, 1, 0);
    tiny_tensor(file, "v.pre_ln.weight", MP_F32, 1, HIDDEN, 0.3f, 1);
    tiny_tensor(file, "v.pre_ln.bias", MP_F32, 1, HIDDEN, 0.3f, 0);
    const struct {
        const char *name;
        int rows, columns;
    } matrices[] = {{"attn_q", HIDDEN, HIDDEN},   {"attn_k", HIDDEN, HIDDEN}, {"attn_v", HIDDEN, HIDDEN},
                    {"attn_out", HIDDEN, HIDDEN}, {"ffn_up", FFN, HIDDEN},    {"ffn_down", HIDDEN, FFN}};
    for (int l = 0; l < ENCODER_LAYERS; l++) {
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++) {
            snprintf(name, sizeof name, "v.blk.%d.%s.weight", l, matrices[m].name);
            tiny_tensor(file, name, MP_F32, matrices[m].rows, matrices[m].columns, 0.2f, 0);
            snprintf(name, sizeof name, "v.blk.%d.%s.bias", l, matrices[m].name);
            tiny_tensor(file, name, MP_F32, 1, matrices[m].rows, 0.2f, 0);
        }
        for (int n = 1; n <= 2; n++) {
            snprintf(name, sizeof name, "v.blk.%d.ln%d.weight", l, n);
            tiny_tensor(file, name, MP_F32, 1, HIDDEN, 0.3f, 1);
            snprintf(name, sizeof name, "v.blk.%d.ln%d.bias", l, n);
            tiny_tensor(file, name, MP_F32, 1, HIDDEN, 0.3f, 0);
        }
    }
    tiny_tensor(file, "mm.0.weight", MP_F32, TINY_HIDDEN, HIDDEN, 0.3f, 0);
    tiny_tensor(file, "mm.0.bias", MP_F32, 1, TINY_HIDDEN, 0.3f, 0);
    tiny_tensor(file, "mm.2.weight", MP_F32, TINY_HIDDEN, TINY_HIDDEN, 0.2f, 0);
    tiny_tensor(file, "mm.image_newline", MP_F32, 1, TINY_HIDDEN, 0.5f, 0);
}

typedef enum axial_form { WINDOWED, DEEP, MERGING } axial_form;

/* Add an axial image encoder, and three-dimensional positions in the decoder. The encoder has windows over 2 by 2
 * merged patches. With DEEP, it has a table of positions and two taps instead, and the sections of positions are
 * interleaved. With MERGING, it has an input norm and a merger, and the decoder has plain positions. */
static inline void add_encoder_of_any_size(tiny_file *file, axial_form form) {
    enum { MERGE = 2, PAIRS = TINY_HIDDEN / TINY_HEADS / 2, GRID = 3, INNER = HIDDEN * MERGE * MERGE };
    char name[64];
    mp_spec *spec = file->spec;
    int64_t sections[3] = {1, 2, PAIRS - 3}, listed[ENCODER_LAYERS] = {1, 0, 1};
    const bool deep = form == DEEP, merging = form == MERGING;
    const char *arch = deep ? "qwen3_vl" : merging ? "pixtral" : "qwen2_5_vl";
    const int frames = merging || halves ? 1 : 2;
    mp_error error;
    mp_value yes = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = 1};
    set_string(spec, "mpool.vision.decoder", "llama");
    tiny_int(spec, "mpool.vision.image_token_id", MARK);
    tiny_int(spec, "mpool.vision.merge", MERGE);
    MP_CHECK_OK(mp_spec_set(spec, "mpool.vision.norm", &yes, &error), &error);
    MP_CHECK_OK(mp_spec_set(spec, deep ? "mpool.rope_interleaved" : "mpool.image.gated", &yes, &error), &error);
    tiny_int(spec, "mpool.image.frames", merging ? 1 : 2);
    if (form == WINDOWED)
        tiny_int(spec, "mpool.image.window", 1);
    if (!merging) {
        tiny_ints(spec, deep ? "mpool.vision.tap_layers" : "mpool.image.window_layers", listed, ENCODER_LAYERS);
        tiny_ints(spec, "mpool.rope_sections", sections, 3);
    }
    const int side = deep ? GRID * PATCH : 4 * SIDE;
    const struct {
        const char *key;
        int value;
    } numbers[] = {{"block_count", ENCODER_LAYERS},      {"embedding_length", HIDDEN}, {"feed_forward_length", FFN},
                   {"attention.head_count", 3}, {"patch_size", PATCH},        {"image_size", side}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(name, sizeof name, "%s.vision.%s", arch, numbers[i].key);
        tiny_int(spec, name, numbers[i].value);
    }
    snprintf(name, sizeof name, "%s.vision.attention.layer_norm_epsilon", arch);
    tiny_float(spec, name, 1e-6);
    tiny_tensor(file, "v.patch_embd.weight", MP_F32, HIDDEN, frames * 3 * PATCH * PATCH, 0.2f, 0);
    if (halves && !merging)
        tiny_tensor(file, "v.patch_embd.weight.1", MP_F32, HIDDEN, 3 * PATCH * PATCH, 0.2f, 0);
    tiny_tensor(file, "v.post_ln.weight", MP_F32, 1, HIDDEN, 0.3f, 1);
    if (deep) {
        tiny_tensor(file, "v.post_ln.bias", MP_F32, 1, HIDDEN, 0.3f, 0);
        tiny_tensor(file, "v.patch_embd.bias", MP_F32, 1, HIDDEN, 0.2f, 0);
        tiny_tensor(file, "v.position_embd.weight", MP_F32, GRID * GRID, HIDDEN, 1, 0);
    }
    const struct {
        const char *name;
        int rows, columns;
    } matrices[] = {{"attn_q", HIDDEN, HIDDEN},   {"attn_k", HIDDEN, HIDDEN}, {"attn_v", HIDDEN, HIDDEN},
                    {"attn_out", HIDDEN, HIDDEN}, {"ffn_gate", FFN, HIDDEN},  {"ffn_up", FFN, HIDDEN},
                    {"ffn_down", HIDDEN, FFN}};
    for (int l = 0; l < ENCODER_LAYERS; l++) {
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++) {
            if (deep && strcmp(matrices[m].name, "ffn_gate") == 0)
                continue;
            snprintf(name, sizeof name, "v.blk.%d.%s.weight", l, matrices[m].name);
            tiny_tensor(file, name, MP_F32, matrices[m].rows, matrices[m].columns, 0.2f, 0);
        }
        for (int n = 1; n <= 2; n++) {
            snprintf(name, sizeof name, "v.blk.%d.ln%d.weight", l, n);
            tiny_tensor(file, name, MP_F32, 1, HIDDEN, 0.3f, 1);
            snprintf(name, sizeof name, "v.blk.%d.ln%d.bias", l, n);
            if (deep)
                tiny_tensor(file, name, MP_F32, 1, HIDDEN, 0.3f, 0);
        }
        if (!deep || !listed[l])
            continue;
        snprintf(name, sizeof name, "v.deepstack.%d.norm.weight", l);
        tiny_tensor(file, name, MP_F32, 1, INNER, 0.3f, 1);
        snprintf(name, sizeof name, "v.deepstack.%d.norm.bias", l);
        tiny_tensor(file, name, MP_F32, 1, INNER, 0.3f, 0);
        snprintf(name, sizeof name, "v.deepstack.%d.fc1.weight", l); /* not as wide as that of the projector */
        tiny_tensor(file, name, MP_F32, 3 * HIDDEN, INNER, 0.2f, 0);
        snprintf(name, sizeof name, "v.deepstack.%d.fc2.weight", l);
        tiny_tensor(file, name, MP_F32, TINY_HIDDEN, 3 * HIDDEN, 0.3f, 0);
    }
    if (merging) {
        tiny_tensor(file, "v.pre_ln.weight", MP_F32, 1, HIDDEN, 0.3f, 1);
        tiny_tensor(file, "mm.patch_merger.weight", MP_F32, HIDDEN, INNER, 0.2f, 0);
    }
    tiny_tensor(file, "mm.0.weight", MP_F32, 2 * HIDDEN, merging ? HIDDEN : INNER, 0.2f, 0);
    tiny_tensor(file, "mm.2.weight", MP_F32, TINY_HIDDEN, 2 * HIDDEN, 0.3f, 0);
    if (!deep)
        tiny_tensor(file, "mm.image_newline", MP_F32, 1, TINY_HIDDEN, 0.5f, 0);
}

static inline void add_axial(tiny_file *file) { add_encoder_of_any_size(file, WINDOWED); }
static inline void add_deep(tiny_file *file) { add_encoder_of_any_size(file, DEEP); }
static inline void add_joining(tiny_file *file) { add_encoder_of_any_size(file, MERGING); }

/* Add an image encoder as that of Gemma 4: positions of columns and lines, norms of heads and outputs, means of 2 by 2
 * patches. The parts of the second layer have bounds. */
static inline void add_bounded(tiny_file *file) {
    enum { MERGE = 2, PLACES = 9, HEADS = 3 };
    static const char *const ends[] = {"input_min", "input_max", "output_min", "output_max"};
    char name[64];
    mp_spec *spec = file->spec;
    mp_error error;
    mp_value yes = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = 1};
    set_string(spec, "mpool.vision.decoder", "llama");
    tiny_int(spec, "mpool.vision.image_token_id", MARK);
    tiny_int(spec, "mpool.vision.merge", MERGE);
    tiny_float(spec, "mpool.vision.mean_scale", 4.9);
    MP_CHECK_OK(mp_spec_set(spec, "mpool.vision.averaged", &yes, &error), &error);
    MP_CHECK_OK(mp_spec_set(spec, "mpool.image.gated", &yes, &error), &error);
    MP_CHECK_OK(mp_spec_set(spec, "mpool.image.channels_last", &yes, &error), &error);
    tiny_int(spec, "mpool.image.frames", 1);
    tiny_int(spec, "mpool.image.places", PLACES);
    const struct {
        const char *key;
        int value;
    } numbers[] = {{"block_count", ENCODER_LAYERS},  {"embedding_length", HIDDEN}, {"feed_forward_length", FFN},
                   {"attention.head_count", HEADS}, {"patch_size", PATCH},        {"image_size", SIDE}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(name, sizeof name, "gemma4_vision.vision.%s", numbers[i].key);
        tiny_int(spec, name, numbers[i].value);
    }
    tiny_float(spec, "gemma4_vision.vision.attention.layer_norm_epsilon", 1e-6);
    tiny_tensor(file, "v.patch_embd.weight", MP_F32, HIDDEN, 3 * PATCH * PATCH, 0.2f, 0);
    tiny_tensor(file, "v.position_embd.weight", MP_F32, 2 * PLACES, HIDDEN, 1, 0);
    tiny_tensor(file, "v.std_bias", MP_F32, 1, HIDDEN, 0.3f, 0);
    tiny_tensor(file, "v.std_scale", MP_F32, 1, HIDDEN, 0.3f, 1);
    const struct {
        const char *name;
        int rows, columns;
    } matrices[] = {{"attn_q", HIDDEN, HIDDEN},   {"attn_k", HIDDEN, HIDDEN}, {"attn_v", HIDDEN, HIDDEN},
                    {"attn_out", HIDDEN, HIDDEN}, {"ffn_gate", FFN, HIDDEN},  {"ffn_up", FFN, HIDDEN},
                    {"ffn_down", HIDDEN, FFN}};
    static const char *const norms[] = {"ln1", "ln2", "attn_post_norm", "ffn_post_norm"};
    for (int l = 0; l < ENCODER_LAYERS; l++) {
        for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++) {
            snprintf(name, sizeof name, "v.blk.%d.%s.weight", l, matrices[m].name);
            tiny_tensor(file, name, MP_F32, matrices[m].rows, matrices[m].columns, 0.2f, 0);
            for (int e = 0; l == 1 && e < 4; e++) {
                snprintf(name, sizeof name, "v.blk.%d.%s.%s", l, matrices[m].name, ends[e]);
                tiny_tensor(file, name, MP_F32, 1, 1, 0.1f, e % 2 ? 0.7f : -0.7f);
            }
        }
        for (size_t n = 0; n < sizeof norms / sizeof *norms; n++) {
            snprintf(name, sizeof name, "v.blk.%d.%s.weight", l, norms[n]);
            tiny_tensor(file, name, MP_F32, 1, HIDDEN, 0.3f, 1);
        }
        for (int k = 0; k < 2; k++) {
            snprintf(name, sizeof name, "v.blk.%d.attn_%s_norm.weight", l, k ? "k" : "q");
            tiny_tensor(file, name, MP_F32, 1, HIDDEN / HEADS, 0.3f, 1);
        }
    }
    tiny_tensor(file, "mm.0.weight", MP_F32, TINY_HIDDEN, HIDDEN, 0.3f, 0);
}

/* Prompts around images, by item number; `turned` prompts have their image's rows in reverse, then the newline row. */
static const struct {
    int before, n, images[MAX], between, after, choices;
    bool logits, turned;
    uint64_t tenant;
} rows[ITEMS] = {
    {3, 1, {1}, 0, 5, 1, true, false, 0},      {3, 2, {1, 2}, 4, 30, 2, false, false, 0},
    {3, 2, {2, 1}, 4, 30, 1, true, false, 0},  {70, 3, {1, 1, 3}, 0, 9, 1, false, false, 0},
    {70, 3, {1, 1, 4}, 0, 9, 1, false, true, 0}, {0, 1, {5}, 0, 100, 3, false, true, 0},
    {20, 0, {0}, 0, 0, 1, true, false, 0},     {70, 3, {1, 1, 3}, 0, 9, 1, false, false, 1},
};

static inline void make_call(int index, mp_text_request **call, mp_error *error) {
    static uint8_t pixels[MAX * PIXELS], keys[MAX * MP_IMAGE_KEY], run_keys[MAX * MP_IMAGE_KEY];
    int32_t prompt[512], sizes[2 * MAX], runs[3 * MAX], sources[MAX * (ROWS + 2)], at = 0, used = 0;
    mp_test_random text = {77};
    memset(keys, 0, sizeof keys);
    memset(run_keys, 0, sizeof run_keys);
    const int count = tile_rows + (rows[index].turned && has_newline);
    const int before = rows[index].before - (rows[index].before == 70 ? earlier : 0);
    for (int i = 0; i < before; i++)
        prompt[at++] = (int32_t)(mp_test_random_u64(&text) % (TINY_VOCAB - 1));
    for (int i = 0; i < rows[index].n; i++) {
        mp_test_random own = {1000 + (uint64_t)rows[index].images[i]};
        for (int p = 0; p < PIXELS; p++)
            pixels[i * PIXELS + p] = (uint8_t)mp_test_random_u64(&own);
        keys[i * MP_IMAGE_KEY] = run_keys[i * MP_IMAGE_KEY] = (uint8_t)rows[index].images[i];
        run_keys[i * MP_IMAGE_KEY + 1] = rows[index].turned;
        sizes[2 * i] = !oblong ? SIDE : i % 2 ? 2 * SIDE : SIDE / 2;
        sizes[2 * i + 1] = SIDE * SIDE / sizes[2 * i];
        keys[i * MP_IMAGE_KEY + 1] = run_keys[i * MP_IMAGE_KEY + 2] = oblong && i % 2;
        runs[3 * i] = at;
        runs[3 * i + 1] = count;
        runs[3 * i + 2] = 1;
        for (int r = 0; r < count; r++) {
            prompt[at++] = MARK;
            sources[used++] = r < tile_rows ? tile_rows - 1 - r : -1;
        }
        for (int t = 0; t < rows[index].between; t++)
            prompt[at++] = (int32_t)(mp_test_random_u64(&text) % (TINY_VOCAB - 1));
    }
    for (int i = 0; i < rows[index].after; i++)
        prompt[at++] = (int32_t)(mp_test_random_u64(&text) % (TINY_VOCAB - 1));
    mp_text_args args = {
        .n_prompt = at,
        .prompt = prompt,
        .n_choices = rows[index].choices,
        .want_prompt_logits = rows[index].logits,
        .sampling = {.temperature = index % 2 ? 0.9f : 0, .top_p = 1, .repetition_penalty = index == 1 ? 1.2f : 1,
                     .seed = 7, .max_tokens = ANSWER, .logprobs = 3, .ignore_eos = true},
        .vision = true,
        .images = {.n_tiles = rows[index].n, .n_runs = rows[index].n, .sizes = sizes, .pixels = pixels,
                   .n_bytes = rows[index].n * PIXELS, .tile_keys = keys, .run_keys = run_keys, .spans = runs,
                   .sources = sources, .n_sources = rows[index].turned ? used : 0},
    };
    if (mp_text_request_create(&args, call, error) != MP_OK)
        *call = NULL;
}

static const tiny_kind llava_kind = {.arch = "llava", .more = add_image_encoder};

/* The rows of an image see each other: in all layers, two of which have windows smaller than an image; or in the layers
 * with windows only. */
static inline void add_spans(tiny_file *file) {
    add_image_encoder(file);
    tiny_int(file->spec, "mpool.image_spans", 1);
}
static inline void add_windowed_spans(tiny_file *file) {
    static const int64_t spans[TINY_LAYERS] = {1, 0, 1};
    add_image_encoder(file);
    tiny_ints(file->spec, "mpool.image_spans", spans, TINY_LAYERS);
}

static const tiny_kind spans_kind = {.arch = "llava", .window = 9, .more = add_spans};
static const tiny_kind windowed_spans_kind = {.arch = "llava", .window = 9, .more = add_windowed_spans};
static const tiny_kind axial_kind = {.arch = "qwen2_5_vl", .more = add_axial};
static const tiny_kind bounded_kind = {.arch = "gemma4_vision", .more = add_bounded};
static const tiny_kind deep_kind = {.arch = "qwen3_vl", .more = add_deep};
static const tiny_kind merging_kind = {.arch = "pixtral", .more = add_joining};

#endif
