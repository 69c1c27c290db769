/* vision/load.c: loads the image network and the projector of a decoder, from the spec that also describes the decoder.
 * Tensors are named as in GGUF files of image encoders: "v." for the network, "mm." for the projector. */
#include <stdio.h>
#include <string.h>

#include "models/vision/vision.h"

enum { MAX_MERGE = 16, MAX_IMAGE_TOKEN = 1 << 24, MAX_ENCODER_LAYERS = 1024 };
static const float NORM_EPS = 1e-5f; /* no file stores the epsilon of a projector's norm: it is torch's default */

void mp_vision_destroy(mp_vision *vision) {
    mp_free(vision->image_encoder.layers);
    mp_free(vision->image_encoder.ones);
    mp_free(vision);
}

static mp_status read_hyper(mp_vision *vision, const mp_spec *spec, mp_error *error) {
    int64_t merge, token, one = 1;
    double mean_scale, plain = 1;
    bool no = false;
    MP_TRY(mp_spec_int(spec, "mpool.vision.image_token_id", -1, MAX_IMAGE_TOKEN, NULL, &token, error));
    MP_TRY(mp_spec_int(spec, "mpool.vision.merge", 1, MAX_MERGE, &one, &merge, error));
    MP_TRY(mp_spec_bool(spec, "mpool.vision.keep_class", &no, &vision->keep_class, error));
    MP_TRY(mp_spec_bool(spec, "mpool.vision.averaged", &no, &vision->averaged, error));
    MP_TRY(mp_spec_float(spec, "mpool.vision.mean_scale", 1e-9, 1e9, &plain, &mean_scale, error));
    MP_TRY(mp_model_activation(spec, "mpool.vision.activation", "gelu", &vision->act, error));
    vision->mean_scale = (float)mean_scale;
    vision->image_token = (int32_t)token;
    vision->merge = (int32_t)merge;
    return MP_OK;
}

/* Reads one linear layer of a projector. outputs: -1: the file determines the number. */
static mp_status read_linear(const mp_builder *builder, const char *name, int32_t outputs, int32_t inputs,
                             mp_linear *linear, mp_error *error) {
    char weight[64], bias[64];
    mp_tensor tensor;
    const int64_t shape[2] = {outputs, inputs};
    snprintf(weight, sizeof weight, "%s.weight", name);
    snprintf(bias, sizeof bias, "%s.bias", name);
    MP_TRY(mp_weights_get(builder->weights, weight, 2, shape, &tensor, error));
    return mp_builder_linear(builder, linear, weight, mp_weights_has(builder->weights, bias) ? bias : NULL,
                             (int32_t)tensor.shape[0], inputs, error);
}

/* first, second: names of the layers. A projector without `second` has one layer. A merger that was read before them
 * gives `first` its inputs. */
static mp_status read_projector(const mp_vision *vision, const mp_builder *builder, const char *first,
                                const char *second, mp_projector *projector, mp_error *error) {
    const int32_t inputs = projector->merger.parts ? projector->merger.N
                                                   : vision->image_encoder.hidden *
                                                         (vision->averaged ? 1 : vision->merge * vision->merge);
    MP_TRY(read_linear(builder, first, second ? -1 : vision->width, inputs, &projector->first, error));
    if (!second)
        return MP_OK;
    return read_linear(builder, second, vision->width, projector->first.N, &projector->second, error);
}

/* Reads the layers of the image network that have a tap: sets layers[i] for each of them, and *count. */
static mp_status find_taps(const mp_spec *spec, int32_t layers[MP_VISION_MAX_TAPS], int *count, mp_error *error) {
    int64_t all, tapped[MAX_ENCODER_LAYERS], no = 0;
    *count = 0;
    MP_TRY(mp_spec_int_capped(spec, "{arch}.vision.block_count", 0, MAX_ENCODER_LAYERS, NULL, &all, error));
    if (all == 0)
        return MP_OK;
    MP_TRY(mp_spec_ints(spec, "mpool.vision.tap_layers", (int)all, 0, 1, &no, tapped, error));
    for (int32_t i = 0; i < all; i++) {
        if (!tapped[i])
            continue;
        if (*count == MP_VISION_MAX_TAPS)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.vision.tap_layers",
                                "at most 8 layers with a tap", "more");
        layers[(*count)++] = i;
    }
    return MP_OK;
}

/* Reads the projectors of the taps. They norm the patches side by side, unlike the projector of the last layer. */
static mp_status read_taps(mp_vision *vision, const mp_builder *builder, int layers, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    const mp_vit *image_encoder = &vision->image_encoder;
    const mp_norm like = {.n = image_encoder->hidden * vision->merge * vision->merge, .eps = image_encoder->eps};
    int32_t at[MP_VISION_MAX_TAPS];
    char norm[64], first[64], second[64];
    MP_TRY(find_taps(spec, at, &vision->taps, error));
    const bool other = vision->newline || vision->averaged;
    if (vision->taps > layers || (vision->taps > 0 && other))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.vision.tap_layers",
                            other ? "no taps in a model with a newline row or with means of patches"
                                  : "at most as many taps as layers of the decoder",
                            "%d taps", vision->taps);
    for (int t = 0; t < vision->taps; t++) {
        mp_projector *projector = &vision->projectors[t];
        projector->layers = at[t] + 1;
        snprintf(norm, sizeof norm, "v.deepstack.%d.norm", (int)at[t]);
        snprintf(first, sizeof first, "v.deepstack.%d.fc1", (int)at[t]);
        snprintf(second, sizeof second, "v.deepstack.%d.fc2", (int)at[t]);
        MP_TRY(mp_norm_read(&projector->norm, builder, norm, like, MP_NORM_BIAS, 0, error));
        MP_TRY(read_projector(vision, builder, first, second, projector, error));
    }
    return MP_OK;
}

/* Reads the projector of means of patches: a norm, and a matrix that files store as [inputs, outputs]. */
static mp_status read_averaged(const mp_vision *vision, const mp_builder *builder, mp_projector *projector,
                               mp_error *error) {
    static const char matrix[] = "mm.input_projection.weight";
    const int32_t inputs = vision->image_encoder.hidden, outputs = vision->width;
    const mp_norm like = {.n = inputs, .eps = vision->image_encoder.eps, .root = true};
    const int64_t shape[2] = {inputs, outputs};
    const double none = 0;
    double offset;
    mp_tensor tensor;
    MP_TRY(mp_spec_float(mp_weights_spec(builder->weights), "mpool.vision.norm_offset", 0, 1, &none, &offset, error));
    MP_TRY(mp_norm_read(&projector->norm, builder, "mm.soft_emb_norm", like, MP_NORM_NO_BIAS, (float)offset, error));
    MP_TRY(mp_weights_get(builder->weights, matrix, 2, shape, &tensor, error));
    const size_t items = (size_t)inputs * (size_t)outputs;
    float *const rows = mp_alloc_array(items + (size_t)outputs, sizeof *rows, MP_TAG_WEIGHTS);
    if (!rows)
        return mp_fail_memory(error, items * sizeof *rows, "the matrix of a projector");
    for (int32_t k = 0; k < inputs; k++) {
        float *const row = rows + items;
        mp_dequantize_row(tensor.dtype, mp_tensor_row(&tensor, k), outputs, row);
        for (int32_t n = 0; n < outputs; n++)
            rows[(int64_t)n * inputs + k] = row[n];
    }
    return mp_builder_linear_taken(builder, &projector->first, matrix, NULL, rows, outputs, inputs, error);
}

/* Reads the projector of Gemma 4: a norm without weights, and a matrix. */
static mp_status read_unweighted(mp_vision *vision, const mp_builder *builder, mp_projector *projector,
                                 mp_error *error) {
    const mp_vit *image_encoder = &vision->image_encoder;
    double eps, usual = (double)image_encoder->eps;
    const mp_spec *spec = mp_weights_spec(builder->weights);
    MP_TRY(mp_spec_float(spec, "mpool.vision.norm_epsilon", 1e-30, 1, &usual, &eps, error));
    projector->norm =
        (mp_norm){.weight = image_encoder->ones, .n = image_encoder->hidden, .eps = (float)eps, .root = true};
    if (mp_weights_has(builder->weights, "v.std_bias")) {
        MP_TRY(mp_builder_vector(builder, &vision->mean_bias, "v.std_bias", image_encoder->hidden, error));
        MP_TRY(mp_builder_vector(builder, &vision->bias_scale, "v.std_scale", image_encoder->hidden, error));
    }
    return read_projector(vision, builder, "mm.0", NULL, projector, error);
}

static mp_status read_projectors(mp_vision *vision, const mp_builder *builder, int layers, mp_error *error) {
    const mp_weights *weights = builder->weights;
    if (mp_weights_has(weights, "mm.image_newline"))
        MP_TRY(mp_builder_vector(builder, &vision->newline, "mm.image_newline", vision->width, error));
    MP_TRY(read_taps(vision, builder, layers, error));
    mp_projector *last = &vision->projectors[vision->taps];
    last->layers = vision->image_encoder.layer_count;
    if (vision->image_encoder.places)
        return read_unweighted(vision, builder, last, error);
    if (vision->averaged)
        return read_averaged(vision, builder, last, error);
    const int32_t inputs = vision->image_encoder.hidden * vision->merge * vision->merge;
    const mp_norm like = {.n = inputs, .eps = NORM_EPS};
    if (mp_weights_has(weights, "mm.input_norm.weight"))
        MP_TRY(mp_norm_read(&last->norm, builder, "mm.input_norm", like, MP_NORM_BIAS, 0, error));
    if (mp_weights_has(weights, "mm.patch_merger.weight"))
        MP_TRY(read_linear(builder, "mm.patch_merger", -1, inputs, &last->merger, error));
    return read_projector(vision, builder, "mm.0", mp_weights_has(weights, "mm.2.weight") ? "mm.2" : NULL, last, error);
}

int mp_vision_taps(const mp_vision *vision) { return vision->taps; }

mp_status mp_vision_read(const mp_load_args *args, const mp_builder *builder, int32_t width, int layers,
                         mp_vision **out, mp_error *error) {
    const char *name;
    bool norm, no = false;
    mp_vision *vision = *out = mp_alloc_zeroed(sizeof *vision, MP_TAG_WEIGHTS);
    if (!vision)
        return mp_fail_memory(error, sizeof *vision, "an image network");
    vision->width = width;
    MP_TRY(read_hyper(vision, args->spec, error));
    MP_TRY(mp_spec_string(args->spec, "mpool.vision.image_encoder", mp_spec_architecture(args->spec), &name, error));
    MP_TRY(mp_spec_bool(args->spec, "mpool.vision.norm", &no, &norm, error));
    const mp_arch *arch = mp_arch_find(name);
    if (!arch || (arch->family->load != mp_vit_load && arch->family->load != mp_vision_load))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(args->spec), -1, "mpool.vision.image_encoder",
                            "an image network", "%s", name);
    mp_builder own = *builder;
    own.compute = mp_resolve_compute(args->compute);
    own.unpacked = MP_UNPACKED_NONE;
    MP_TRY(mp_vit_read(&vision->image_encoder, &own, args->spec, arch->flags, norm, error));
    MP_TRY(read_projectors(vision, &own, layers, error));
    if ((!vision->image_encoder.any_size && vision->image_encoder.grid % vision->merge) ||
        (vision->keep_class && vision->merge > 1))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(args->spec), -1, "mpool.vision.merge",
                            "a divisor of the patches per side", "%d of %d", vision->merge, vision->image_encoder.grid);
    return MP_OK;
}

mp_status mp_vision_load(const mp_load_args *args, mp_model **model, mp_error *error) {
    const char *name;
    MP_TRY(mp_spec_string(args->spec, "mpool.vision.decoder", NULL, &name, error));
    const mp_arch *arch = mp_arch_find(name);
    if (!arch || arch->capability != MP_TEXT_TO_TEXT)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(args->spec), -1, "mpool.vision.decoder", "a decoder", "%s",
                            name);
    mp_load_args decoder = *args;
    decoder.flags = arch->flags;
    return mp_decoder_load_with(&decoder, true, model, error);
}

/* Bytes of one row in the decoder's KV cache. */
static uint64_t cache_bytes(const mp_spec *spec, mp_compute compute) {
    uint64_t values = 0;
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        const char *part = strncmp(entry->name, "blk.", 4) == 0 ? strstr(entry->name, ".attn_") : NULL;
        if (part && (strcmp(part, ".attn_k.weight") == 0 || strcmp(part, ".attn_v.weight") == 0))
            values += (uint64_t)entry->shape[0];
    }
    bool in_bytes = false;
    mp_error error;
    if (mp_decoder_kv_in_bytes(spec, &in_bytes, &error) != MP_OK)
        return 0; /* the load will fail */
    return values * (uint64_t)mp_dtype_get(mp_kv_dtype(compute == MP_COMPUTE_F32, in_bytes))->bytes;
}

/* Bytes that an engine needs for one image, the largest one by the model's settings if sizes vary: the scratch of the
 * network, the resulting rows, and the space of these rows in the KV cache. */
static uint64_t image_bytes(const mp_spec *spec, mp_compute compute) {
    const char *name;
    int64_t side, patch, merge, width, most, one = 1, limit = MP_VISION_MAX_PATCHES;
    int32_t tapped[MP_VISION_MAX_TAPS];
    int taps;
    mp_error error;
    if (mp_spec_string(spec, "mpool.vision.image_encoder", mp_spec_architecture(spec), &name, &error) != MP_OK ||
        mp_spec_int(spec, "{arch}.vision.image_size", 1, MP_IMAGE_MAX_SIDE, NULL, &side, &error) != MP_OK ||
        mp_spec_int(spec, "{arch}.vision.patch_size", 1, side, NULL, &patch, &error) != MP_OK ||
        mp_spec_int(spec, "{arch}.embedding_length", 1, INT32_MAX, NULL, &width, &error) != MP_OK ||
        mp_spec_int(spec, "mpool.vision.merge", 1, MAX_MERGE, &one, &merge, &error) != MP_OK ||
        mp_spec_int(spec, "mpool.vision.patches", 1, MP_VISION_MAX_PATCHES, &limit, &most, &error) != MP_OK ||
        find_taps(spec, tapped, &taps, &error) != MP_OK)
        return 0; /* the load will fail */
    const mp_arch *arch = mp_arch_find(name);
    const uint32_t flags = arch ? arch->flags : 0;
    const int64_t patches = flags & MP_VIT_ANY_SIZE ? most : side / patch * (side / patch);
    const uint64_t rows = (uint64_t)(patches / (merge * merge) + 1);
    return mp_vit_request_bytes(spec, flags, compute, (int32_t)patches) +
           rows * ((uint64_t)width * (uint64_t)(1 + taps) * sizeof(float) + cache_bytes(spec, compute));
}

mp_matrices mp_vision_predict_weights(const mp_spec *spec, mp_compute compute) {
    return mp_decoder_predict_weights(spec, compute);
}

void mp_vision_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes) {
    mp_decoder_footprint(spec, compute, model_bytes, engine_bytes);
    *engine_bytes += image_bytes(spec, compute);
    for (int i = 0; i < mp_spec_tensor_count(spec); i++)
        if (mp_decoder_images_own(mp_spec_tensor_at(spec, i)->name))
            *model_bytes += mp_vit_tensor_bytes(mp_spec_tensor_at(spec, i), compute);
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

int32_t mp_vision_rows(const mp_vision *vision, int32_t height, int32_t width) {
    const mp_vit *image_encoder = &vision->image_encoder;
    const int32_t side = image_encoder->grid * image_encoder->patch, unit = image_encoder->patch * vision->merge;
    if (!image_encoder->any_size && (height != side || width != side))
        return 0;
    if (height < unit || width < unit || height % unit || width % unit)
        return 0;
    return height / unit * (width / unit) + vision->keep_class;
}

static mp_status check_tiles(const mp_vision *vision, const mp_text_images *images, mp_error *error) {
    const mp_vit *image_encoder = &vision->image_encoder;
    for (int32_t t = 0; t < images->n_tiles; t++) {
        int32_t height = images->sizes[2 * t], width = images->sizes[2 * t + 1];
        if (mp_vision_rows(vision, height, width) == 0)
            return mp_fail(error, MP_INVALID_ARGUMENT, "tile %d is %d x %d pixels, the model takes %s of %d", t, width,
                           height, image_encoder->any_size ? "multiples" : "squares",
                           (image_encoder->any_size ? vision->merge : image_encoder->grid) * image_encoder->patch);
        if ((int64_t)(height / image_encoder->patch) * (width / image_encoder->patch) > MP_VISION_MAX_PATCHES)
            return mp_fail(error, MP_LIMIT, "tile %d must have at most %d patches, got %lld", t,
                           (int)MP_VISION_MAX_PATCHES,
                           (long long)(height / image_encoder->patch) * (width / image_encoder->patch));
        const int32_t places = image_encoder->places, longer = height > width ? height : width;
        if (places && longer / image_encoder->patch > places)
            return mp_fail(error, MP_LIMIT, "tile %d must have at most %d patches per side, got %d", t, places,
                           longer / image_encoder->patch);
    }
    return MP_OK;
}

static mp_status check_run(const mp_vision *vision, const mp_text_images *images, int32_t index, mp_error *error) {
    const mp_image_run *run = &images->runs[index];
    int64_t rows = 0;
    for (int32_t t = run->tile; t < run->tile + run->tiles; t++)
        rows += mp_vision_rows(vision, images->sizes[2 * t], images->sizes[2 * t + 1]);
    /* runs of the same tiles are neighbours: frames, of which only the first has rows, belong to one run */
    const bool shared = (index > 0 && run[-1].tile == run->tile) ||
                        (index + 1 < images->n_runs && run[1].tile == run->tile);
    if (!images->sources && run->rows != rows && (shared || !mp_vision_frames(vision, images, run)))
        return mp_fail(error, MP_INVALID_ARGUMENT, "run %d has %d placeholders for %lld rows of its image", index,
                       run->rows, (long long)rows);
    for (int32_t i = 0; images->sources && i < run->rows; i++) {
        int32_t source = images->sources[run->source + i];
        if (source >= rows || source < -1 || (source < 0 && !vision->newline))
            return mp_fail(error, MP_INVALID_ARGUMENT, "run %d refers to row %d, but its image has %lld rows", index,
                           source, (long long)rows);
    }
    return MP_OK;
}

/* Checks a run that continues the video of the run before it: it follows at once, with tiles of its own of the same
 * size, and not earlier in time. */
static mp_status check_time(const mp_text_images *images, int32_t index, mp_error *error) {
    const mp_image_run *run = &images->runs[index];
    if (run->time < 0)
        return MP_OK;
    const int32_t *sizes = images->sizes + 2 * (ptrdiff_t)run->tile;
    const bool continues = index > 0 && run->start == run[-1].start + run[-1].rows && run->tile != run[-1].tile &&
                           run->rows == run[-1].rows && run->time >= run[-1].time && !images->sources;
    const int32_t *before = continues ? images->sizes + 2 * (ptrdiff_t)run[-1].tile : NULL;
    if (!before || sizes[0] != before[0] || sizes[1] != before[1])
        return mp_fail(error, MP_INVALID_ARGUMENT, "run %d does not continue the video of the run before it", index);
    return MP_OK;
}

static uint64_t most_parts(const mp_vision *vision, const mp_text_images *images) {
    const mp_vit *image_encoder = &vision->image_encoder;
    uint64_t parts = 0;
    for (int32_t t = 0; t < images->n_tiles; t++) {
        const int32_t height = images->sizes[2 * t], width = images->sizes[2 * t + 1];
        parts += mp_vit_image_parts(image_encoder, height / image_encoder->patch, width / image_encoder->patch) +
                 (uint64_t)(1 + vision->taps) *
                     (uint64_t)(mp_vision_rows(vision, height, width) / image_encoder->grain + 1);
    }
    return parts;
}

mp_status mp_vision_check(const mp_vision *vision, mp_text_request *request, mp_error *error) {
    mp_text_images *images = &request->images;
    MP_TRY(check_tiles(vision, images, error));
    images->most_parts = most_parts(vision, images);
    const bool known = vision->image_token >= 0;
    int64_t placeholders = 0, rows = 0;
    for (int32_t i = 0; i < request->n_prompt; i++)
        placeholders += request->prompt[i] == vision->image_token;
    for (int32_t r = 0; r < images->n_runs; r++) {
        const mp_image_run *run = &images->runs[r];
        MP_TRY(check_run(vision, images, r, error));
        MP_TRY(check_time(images, r, error));
        for (int32_t i = run->start; i < run->start + run->rows; i++)
            rows += !known || request->prompt[i] == vision->image_token;
    }
    const int64_t of_runs = mp_text_images_rows(images);
    if ((known && placeholders != rows) || rows != of_runs)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "the prompt has %lld image placeholders, but its images have %lld rows",
                       (long long)placeholders, (long long)of_runs);
    return MP_OK;
}
