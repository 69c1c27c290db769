/* image/load.c: loads an image transformer from a spec: hyper-parameters, tensors, packed weights. Tensors and keys are
 * named as in GGUF files of image encoders ("v.blk.0.attn_q.weight", "{arch}.vision.block_count"). */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "models/image/vit.h"
#include "models/nn/scratch.h"

enum { MAX_LAYERS = 1024, MAX_WIDTH = 65536, MAX_PATCH = 256, MAX_GRID = 256, MAX_REGISTERS = 64 };

#define MAX_OPS ((uint64_t)100 * 1000 * 1000 * 1000) /* maximum operations of a part at any measured speed */
enum { FIRST_MEGA_NS = 8000 };

static void vit_destroy(mp_model *base) {
    mp_vit *model = (mp_vit *)base;
    if (!model)
        return;
    mp_weight_store_deinit(&model->store);
    mp_free(model->layers);
    mp_free(model->ones);
    mp_recent_deinit(&model->recent);
    mp_weights_close(model->weights);
    mp_free(model);
}

static bool vit_healthy(const mp_model *base) {
    return mp_weights_sound(((const mp_vit *)base)->weights);
}

static uint64_t vit_bytes(const mp_model *base) {
    const mp_vit *model = (const mp_vit *)base;
    return mp_weight_store_bytes(&model->store) + atomic_load_explicit(&model->recent.charged, memory_order_relaxed);
}

static const mp_model_ops vit_ops = {mp_vit_engine, mp_vit_check, vit_healthy, vit_bytes, vit_destroy};

/* ---- hyper-parameters -------------------------------------------------------------------------------------------- */

/* Read three numbers; a missing key gives `fallback` three times. */
static mp_status read_three(const mp_spec *spec, const char *key, float fallback, bool positive, float *out,
                            mp_error *error) {
    const mp_value *value = mp_spec_find(spec, key);
    for (int c = 0; c < MP_IMAGE_CHANNELS; c++)
        out[c] = fallback;
    if (!value)
        return MP_OK;
    const char *allowed = positive ? "three finite numbers above 0" : "three finite numbers";
    bool ok = true;
    if (value->type != MP_VALUE_FLOATS || value->count != MP_IMAGE_CHANNELS)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key, allowed,
                            value->type == MP_VALUE_FLOATS ? "%llu numbers" : "another type",
                            (unsigned long long)value->count);
    for (int c = 0; ok && c < MP_IMAGE_CHANNELS; c++) {
        out[c] = (float)value->as.reals[c];
        ok = isfinite(out[c]) && (!positive || out[c] > 0);
    }
    if (ok)
        return MP_OK;
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key, allowed, "%g, %g, %g", value->as.reals[0],
                        value->as.reals[1], value->as.reals[2]);
}

/* Round as the image processors of the transformers library do: multiply the byte by the factor in double, then convert
 * to float. */
static mp_status read_pixels(mp_vit *model, const mp_spec *spec, mp_error *error) {
    float mean[MP_IMAGE_CHANNELS], deviation[MP_IMAGE_CHANNELS];
    double factor, plain = 1.0 / 255;
    MP_TRY(mp_spec_float(spec, "mpool.image.rescale_factor", 1e-9, 1e9, &plain, &factor, error));
    MP_TRY(read_three(spec, "mpool.image.mean", 0, false, mean, error));
    MP_TRY(read_three(spec, "mpool.image.std", 1, true, deviation, error));
    for (int c = 0; c < MP_IMAGE_CHANNELS; c++)
        for (int v = 0; v < 256; v++)
            model->pixel[c][v] = ((float)(v * factor) - mean[c]) / deviation[c];
    return MP_OK;
}

static mp_status read_axes(mp_vit *model, const mp_spec *spec, mp_error *error) {
    int64_t frames, window, cell, whole = MAX_GRID; /* without windows, only the order of patches depends on `whole` */
    double base, usual = 10000;
    bool yes = true;
    MP_TRY(mp_spec_bool(spec, "mpool.image.rope_neox", &yes, &model->neox, error));
    MP_TRY(mp_spec_int(spec, "mpool.image.frames", 1, 16, NULL, &frames, error));
    MP_TRY(mp_spec_int(spec, "mpool.image.window", 1, MAX_GRID, &whole, &window, error));
    MP_TRY(mp_spec_int(spec, "mpool.vision.merge", 1, 16, NULL, &cell, error));
    MP_TRY(mp_spec_float(spec, "mpool.image.rope_base", 1, 1e12, &usual, &base, error));
    if (model->head_dim % 4)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "vision.attention.head_count",
                            "heads whose size is divisible by 4", "%d, with heads of %d components", model->heads,
                            model->head_dim);
    model->frames = (int32_t)frames;
    model->window = (int32_t)window;
    model->cell = (int32_t)cell;
    model->rope_base = (float)base;
    return MP_OK;
}

/* Read how the positions of columns and lines are stored. */
static mp_status read_sides(mp_vit *model, const mp_spec *spec, mp_error *error) {
    int64_t places;
    bool in_turn = false;
    MP_TRY(mp_spec_int_capped(spec, "mpool.image.places", 1, MP_VIT_MAX_PLACES, NULL, &places, error));
    MP_TRY(mp_spec_bool(spec, "mpool.image.places_in_turn", &in_turn, &in_turn, error));
    model->places = (int32_t)places;
    model->place_step = in_turn ? 2 : 1;
    model->first_line = in_turn ? 1 : (int32_t)places;
    return MP_OK;
}

static mp_status read_hyper(mp_vit *model, const mp_spec *spec, uint32_t flags, mp_error *error) {
    int64_t layers, hidden, heads, ffn, image, patch, registers, none = 0;
    double eps;
    bool no = false;
    const int64_t least = (flags & MP_VIT_AXIAL) || !(flags & MP_VIT_SIDES); /* Gemma 4 12B has no layers */
    MP_TRY(mp_spec_int_capped(spec, "{arch}.vision.block_count", least, MAX_LAYERS, NULL, &layers, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.vision.embedding_length", 1, MAX_WIDTH, NULL, &hidden, error));
    MP_TRY(mp_spec_int(spec, "{arch}.vision.attention.head_count", 1, hidden, NULL, &heads, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.vision.feed_forward_length", 1, 16 * MAX_WIDTH, NULL, &ffn, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.vision.patch_size", 1, MAX_PATCH, NULL, &patch, error));
    MP_TRY(mp_spec_int(spec, "{arch}.vision.image_size", patch, MAX_GRID * patch, NULL, &image, error));
    MP_TRY(mp_spec_float(spec, "{arch}.vision.attention.layer_norm_epsilon", 1e-30, 1, NULL, &eps, error));
    MP_TRY(mp_spec_int_capped(spec, "mpool.image.registers", 0, MAX_REGISTERS, &none, &registers, error));
    MP_TRY(mp_spec_bool(spec, "mpool.image.gated", &no, &model->gated, error));
    MP_TRY(mp_spec_bool(spec, "mpool.image.channels_last", &no, &model->channels_last, error));
    if (hidden % heads)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "vision.attention.head_count",
                            "a divisor of the width", "%lld of width %lld", (long long)heads, (long long)hidden);
    model->layer_count = (int32_t)layers;
    model->hidden = (int32_t)hidden;
    model->heads = (int32_t)heads;
    model->head_dim = (int32_t)(hidden / heads);
    model->ffn = (int32_t)ffn;
    model->patch = (int32_t)patch;
    model->grid = (int32_t)(image / patch);
    model->registers = (int32_t)registers;
    model->classes = (flags & MP_VIT_CLASS_TOKEN) != 0;
    model->any_size = (flags & MP_VIT_ANY_SIZE) != 0;
    model->smooth = (flags & MP_VIT_SMOOTH_SIZE) != 0;
    model->linear = (flags & MP_VIT_LINEAR_SIZE) != 0;
    model->attention_pool = (flags & MP_VIT_ATTENTION_POOL) != 0;
    model->root_norms = (flags & MP_VIT_ROOT_NORMS) != 0;
    model->axial = (flags & MP_VIT_AXIAL) != 0;
    model->aligned = (flags & MP_VIT_ALIGNED) != 0;
    model->staggered = (flags & MP_VIT_STAGGERED) != 0;
    model->normed_heads = (flags & MP_VIT_NORMED_HEADS) != 0;
    model->frames = 1;
    if (model->axial)
        MP_TRY(read_axes(model, spec, error));
    if (flags & MP_VIT_SIDES)
        MP_TRY(read_sides(model, spec, error));
    model->eps = (float)eps;
    MP_TRY(mp_model_activation(spec, "mpool.image.activation", "gelu", &model->act, error));
    return read_pixels(model, spec, error);
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

typedef struct named_linear {
    const char *name;
    mp_linear *linear;
    int32_t N, K;
} named_linear;

/* Write the full name of a tensor: "v.blk.I." precedes the names of layer I, "v." precedes all others (negative
 * index). */
static void full_name(char *out, size_t size, int index, const char *name, const char *end) {
    if (index < 0)
        snprintf(out, size, "v.%s%s", name, end);
    else
        snprintf(out, size, "v.blk.%d.%s%s", index, name, end);
}

static mp_status add_linears(const mp_builder *builder, int index, const named_linear *linears, size_t count,
                             mp_error *error) {
    char name[64], bias[64];
    for (size_t i = 0; i < count; i++) {
        full_name(name, sizeof name, index, linears[i].name, ".weight");
        full_name(bias, sizeof bias, index, linears[i].name, ".bias");
        bool has_bias = mp_weights_has(builder->weights, bias);
        MP_TRY(mp_builder_linear(builder, linears[i].linear, name, has_bias ? bias : NULL, linears[i].N, linears[i].K,
                                 error));
    }
    return MP_OK;
}

/* norm->n: 0: the width of the network. */
static mp_status add_norm(const mp_vit *model, const mp_builder *builder, int index, const char *name, mp_norm *norm,
                          mp_error *error) {
    const mp_norm like = {.n = norm->n ? norm->n : model->hidden, .eps = model->eps, .root = model->root_norms};
    char full[64];
    full_name(full, sizeof full, index, name, "");
    return mp_norm_read(norm, builder, full, like, model->root_norms ? MP_NORM_NO_BIAS : MP_NORM_BIAS, 0, error);
}

static mp_status add_vector(const mp_vit *model, const mp_builder *builder, int index, const char *name, float **out,
                            mp_error *error) {
    char full[64];
    full_name(full, sizeof full, index, name, "");
    return mp_builder_vector(builder, out, full, model->hidden, error);
}

#define COUNT(list) (sizeof(list) / sizeof *(list))

/* Some files store the first matrix in two halves, one per frame. Join them: channels, frames, lines, columns. */
static mp_status read_halves(mp_vit *model, const mp_builder *builder, mp_error *error) {
    const int32_t area = model->patch * model->patch, inputs = MP_IMAGE_CHANNELS * area;
    const int64_t shape[2] = {model->hidden, inputs}, n = 2 * (int64_t)model->hidden * inputs;
    mp_tensor halves[2];
    MP_TRY(mp_weights_get(builder->weights, "v.patch_embd.weight", 2, shape, &halves[0], error));
    MP_TRY(mp_weights_get(builder->weights, "v.patch_embd.weight.1", 2, shape, &halves[1], error));
    float *both = mp_alloc_array((size_t)n + (size_t)inputs, sizeof *both, MP_TAG_MISC);
    if (!both)
        return mp_fail_memory(error, ((uint64_t)n + (uint64_t)inputs) * sizeof *both,
                              "the first matrix of an image network");
    for (int32_t row = 0; row < 2 * model->hidden; row++) {
        const mp_tensor *half = &halves[row % 2];
        mp_dequantize_row(half->dtype, mp_tensor_row(half, row / 2), inputs, both + n);
        for (int32_t c = 0; c < MP_IMAGE_CHANNELS; c++)
            memcpy(both + ((int64_t)(row / 2) * MP_IMAGE_CHANNELS + c) * 2 * area + (int64_t)(row % 2) * area,
                   both + n + (int64_t)c * area, (size_t)area * sizeof *both);
    }
    model->frames = 2;
    const char *bias = mp_weights_has(builder->weights, "v.patch_embd.bias") ? "v.patch_embd.bias" : NULL;
    return mp_builder_linear_taken(builder, &model->patches, "v.patch_embd.weight", bias, both, model->hidden,
                                   2 * inputs, error);
}

/* Read the norms before and after the first matrix, if the file has them, and allocate the weights of norms without. */
static mp_status read_sides_norms(mp_vit *model, const mp_builder *builder, int32_t inputs, mp_error *error) {
    model->ones = mp_alloc_array((size_t)model->hidden, sizeof *model->ones, MP_TAG_WEIGHTS);
    if (!model->ones)
        return mp_fail_memory(error, (uint64_t)model->hidden * sizeof *model->ones, "the norms of an image network");
    for (int32_t i = 0; i < model->hidden; i++)
        model->ones[i] = 1;
    if (!mp_weights_has(builder->weights, "v.patch_norm.1.weight"))
        return MP_OK;
    model->patch_norm.n = inputs;
    MP_TRY(add_norm(model, builder, -1, "patch_norm.1", &model->patch_norm, error));
    return add_norm(model, builder, -1, "patch_norm.2", &model->embedding_norm, error);
}

static mp_status read_embeddings(mp_vit *model, const mp_builder *builder, uint32_t flags, bool norm, mp_error *error) {
    const int32_t inputs = MP_IMAGE_CHANNELS * model->frames * model->patch * model->patch;
    const named_linear linears[] = {{"patch_embd", &model->patches, model->hidden, inputs}};
    if (model->axial && !model->places && mp_weights_has(builder->weights, "v.patch_embd.weight.1"))
        MP_TRY(read_halves(model, builder, error));
    else
        MP_TRY(add_linears(builder, -1, linears, COUNT(linears), error));
    if (model->classes > 0)
        MP_TRY(add_vector(model, builder, -1, "class_embd", &model->class_token, error));
    if (flags & MP_VIT_INPUT_NORM)
        MP_TRY(add_norm(model, builder, -1, "pre_ln", &model->input_norm, error));
    if (norm)
        MP_TRY(add_norm(model, builder, -1, "post_ln", &model->norm, error));
    if (model->registers)
        MP_TRY(mp_builder_plain(builder, &model->register_tokens, "v.register_embd", model->registers, model->hidden,
                                error));
    if (model->places) {
        MP_TRY(read_sides_norms(model, builder, inputs, error));
        return mp_builder_plain(builder, &model->positions, "v.position_embd.weight", 2 * (int64_t)model->places,
                                model->hidden, error);
    }
    if (model->axial && !model->aligned)
        return MP_OK;
    return mp_builder_plain(builder, &model->positions, "v.position_embd.weight",
                            model->classes + model->grid * model->grid, model->hidden, error);
}

static void describe_mlp(const mp_vit *model, bool gated, mp_mlp *mlp) {
    mlp->ffn = model->ffn;
    mlp->gated = gated;
    mlp->act = model->act;
}

/* Read the bounds of the parts of a layer that have any. */
static mp_status read_bounds(mp_vit_layer *layer, const mp_builder *builder, int index, mp_error *error) {
    static const char *const parts[MP_VIT_PARTS] = {"attn_q",   "attn_k", "attn_v",  "attn_out",
                                                    "ffn_gate", "ffn_up", "ffn_down"};
    static const char *const ends[] = {".input_min", ".input_max", ".output_min", ".output_max"};
    char name[64];
    for (int p = 0; p < MP_VIT_PARTS; p++) {
        mp_vit_bounds *bounds = &layer->bounds[p];
        float **const to[] = {&bounds->input_min, &bounds->input_max, &bounds->output_min, &bounds->output_max};
        for (size_t i = 0; i < COUNT(to); i++) {
            full_name(name, sizeof name, index, parts[p], ends[i]);
            if (!mp_weights_has(builder->weights, name))
                continue;
            layer->bounded = true;
            MP_TRY(mp_builder_vector(builder, to[i], name, 1, error));
        }
    }
    return MP_OK;
}

/* Read the norms of heads and of the outputs of sublayers, and the bounds. */
static mp_status read_normed(const mp_vit *model, mp_vit_layer *layer, const mp_builder *builder, int index,
                             mp_error *error) {
    mp_transformer_layer *base = &layer->base;
    base->q_norm.n = base->k_norm.n = model->head_dim;
    MP_TRY(add_norm(model, builder, index, "attn_q_norm", &base->q_norm, error));
    MP_TRY(add_norm(model, builder, index, "attn_k_norm", &base->k_norm, error));
    MP_TRY(add_norm(model, builder, index, "attn_post_norm", &base->attention_after, error));
    MP_TRY(add_norm(model, builder, index, "ffn_post_norm", &base->ffn_after, error));
    MP_TRY(read_bounds(layer, builder, index, error));
    if (layer->bounded && !model->gated)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(mp_weights_spec(builder->weights)), -1,
                            "mpool.image.gated", "true in a network with bounds", "false");
    return MP_OK;
}

static mp_status read_layer(mp_vit *model, const mp_builder *builder, int index, uint32_t flags, mp_error *error) {
    mp_transformer_layer *layer = &model->layers[index].base;
    const int32_t hidden = model->hidden, ffn = model->ffn;
    const named_linear linears[] = {{"attn_q", &layer->qkv, hidden, hidden},
                                    {"attn_k", &layer->qkv, hidden, hidden},
                                    {"attn_v", &layer->qkv, hidden, hidden},
                                    {"attn_out", &layer->out, hidden, hidden},
                                    {"ffn_down", &layer->ffn.mlp.down, hidden, ffn}};
    const named_linear up[] = {{"ffn_gate", &layer->ffn.mlp.up, ffn, hidden},
                               {"ffn_up", &layer->ffn.mlp.up, ffn, hidden}};
    layer->ffn.ops = &mp_ffn_dense;
    describe_mlp(model, model->gated, &layer->ffn.mlp);
    MP_TRY(add_linears(builder, index, linears, COUNT(linears), error));
    MP_TRY(add_linears(builder, index, model->gated ? up : up + 1, model->gated ? 2 : 1, error));
    MP_TRY(add_norm(model, builder, index, "ln1", &layer->attention_norm, error));
    MP_TRY(add_norm(model, builder, index, "ln2", &layer->ffn_norm, error));
    if (model->normed_heads)
        MP_TRY(read_normed(model, &model->layers[index], builder, index, error));
    if (!(flags & MP_VIT_LAYER_SCALE))
        return MP_OK;
    MP_TRY(add_vector(model, builder, index, "ls1.weight", &layer->attention_scale, error));
    return add_vector(model, builder, index, "ls2.weight", &layer->ffn_scale, error);
}

static mp_status read_pool(mp_vit *model, const mp_builder *builder, mp_error *error) {
    mp_vit_pool *pool = &model->pool;
    const int32_t hidden = model->hidden, ffn = model->ffn;
    const named_linear linears[] = {
        {"head.attn_q", &pool->q, hidden, hidden},   {"head.attn_k", &pool->kv, hidden, hidden},
        {"head.attn_v", &pool->kv, hidden, hidden},  {"head.attn_out", &pool->out, hidden, hidden},
        {"head.ffn_up", &pool->mlp.up, ffn, hidden}, {"head.ffn_down", &pool->mlp.down, hidden, ffn}};
    describe_mlp(model, false, &pool->mlp);
    MP_TRY(add_linears(builder, -1, linears, COUNT(linears), error));
    MP_TRY(add_vector(model, builder, -1, "head.probe", &pool->probe, error));
    return add_norm(model, builder, -1, "head.ln", &pool->norm, error);
}

/* ---- loading ----------------------------------------------------------------------------------------------------- */

mp_status mp_vit_read(mp_vit *model, const mp_builder *builder, const mp_spec *spec, uint32_t flags, bool norm,
                      mp_error *error) {
    model->compute = builder->compute;
    model->grain = MP_VIT_GRAIN;
    model->most_ops = MAX_OPS;
    atomic_init(&model->mega_ns, FIRST_MEGA_NS);
    MP_TRY(read_hyper(model, spec, flags, error));
    MP_TRY(mp_weights_check_biases(builder->weights, "v.blk.", model->layer_count, error));
    MP_TRY(read_embeddings(model, builder, flags, norm, error));
    const size_t count = (size_t)(model->layer_count > 0 ? model->layer_count : 1); /* the first gives scratch sizes */
    model->layers = mp_alloc_array(count, sizeof *model->layers, MP_TAG_WEIGHTS);
    if (!model->layers)
        return mp_fail_memory(error, count * sizeof *model->layers, "the layers");
    model->layers[0].base.ffn.ops = &mp_ffn_dense;
    int64_t windowed[MAX_LAYERS], none = 0;
    MP_TRY(mp_spec_ints(spec, "mpool.image.window_layers", model->layer_count, 0, model->axial, &none, windowed,
                        error));
    for (int i = 0; i < model->layer_count; i++) {
        model->layers[i].windowed = windowed[i] != 0;
        MP_TRY(read_layer(model, builder, i, flags, error));
    }
    return MP_OK;
}

mp_status mp_vit_load(const mp_load_args *args, mp_model **out, mp_error *error) {
    mp_status status;
    mp_builder builder;
    mp_vit *model = mp_alloc_zeroed(sizeof *model, MP_TAG_WEIGHTS);
    if (!model)
        return mp_fail_memory(error, sizeof *model, "a model");
    model->base.base.ops = &vit_ops;
    mp_progress_set(args->progress, "mapping", 0);
    MP_TRY_GOTO(mp_weights_open(args->spec, &model->weights, error));
    MP_TRY_GOTO(mp_recent_init(&model->recent, args->budget, error));
    mp_compute compute = mp_resolve_compute(args->compute);
    mp_builder_init(&builder, &model->store, model->weights, compute);
    builder.shared = args->shared;
    MP_TRY_GOTO(mp_vit_read(model, &builder, args->spec, args->flags, true, error));
    if (model->attention_pool)
        MP_TRY_GOTO(read_pool(model, &builder, error));
    MP_TRY_GOTO(mp_head_init(&model->head, &builder, model->hidden, error));
    if (model->head.modes != 1 || model->head.mode[0] != MP_POOL_CLS) {
        status = mp_fail_file(error, MP_FORMAT, mp_spec_origin(args->spec), -1, "mpool.pooling", "cls",
                              "another pooling");
        goto cleanup;
    }
    MP_TRY_GOTO(mp_builder_finish(&builder, args->lease, args->budget, args->progress, error));
    model->base.speed[0] = &model->mega_ns;
    model->base.facts = (mp_model_facts){
        .compute = mp_compute_name(compute),
        .context_length = mp_vit_rows(model, model->grid, model->grid),
        .hidden_size = model->hidden,
        .layers = model->layer_count,
        .output_size = model->head.width,
        .parameters = model->store.parameters,
        .weight_bytes = (int64_t)model->store.slab_bytes,
    };
    *out = &model->base.base;
    model = NULL;
cleanup:
    vit_destroy((mp_model *)model);
    return status;
}

/* Matrices count in their compute type, all other tensors as float32. Rounds to panels as the builder does, so that the
 * result is exact. */
uint64_t mp_vit_tensor_bytes(const mp_tensor_entry *entry, mp_compute compute) {
    uint64_t items = 1;
    for (int d = 0; d < entry->ndim; d++)
        if (__builtin_mul_overflow(items, (uint64_t)entry->shape[d], &items))
            items = UINT64_MAX / 64;
    mp_wkind kind;
    bool matrix = entry->ndim == 2 && strncmp(entry->name, "dense.", 6) != 0 &&
                  strncmp(entry->name, "v.position_embd", 15) != 0 && strncmp(entry->name, "v.register", 10) != 0;
    if (!matrix || entry->shape[0] > INT32_MAX || entry->shape[1] > INT32_MAX || entry->shape[0] <= 0 ||
        entry->shape[1] <= 0 || !mp_wmat_kind_for(entry->dtype, mp_resolve_compute(compute), &kind))
        return mp_arena_cost(items * sizeof(float));
    mp_wmat w;
    mp_wmat_init(&w, kind, (int32_t)entry->shape[0], (int32_t)entry->shape[1]);
    return mp_arena_cost(mp_wmat_bytes(&w));
}

uint64_t mp_vit_request_bytes(const mp_spec *spec, uint32_t flags, mp_compute compute, int32_t patches) {
    /* FIXED: recent vectors; lists. The scratch of further threads is small in comparison. */
    enum { FIXED = (1 << 20) + (1 << 16), THREADS = 2 };
    mp_vit model = {.compute = mp_resolve_compute(compute), .grain = MP_VIT_GRAIN, .most_ops = MAX_OPS};
    mp_vit_layer layer = {.base.ffn.ops = &mp_ffn_dense};
    mp_error error;
    atomic_init(&model.mega_ns, FIRST_MEGA_NS);
    if (read_hyper(&model, spec, flags, &error) != MP_OK)
        return FIXED; /* the load will fail */
    model.layers = &layer;
    model.patches.K = MP_IMAGE_CHANNELS * model.frames * model.patch * model.patch;
    const int32_t rows = mp_vit_rows(&model, 1, patches ? patches : model.grid * model.grid);
    const int part_rows = mp_vit_part_rows(&model, rows, mp_vit_part_ops(&model));
    const size_t widest = mp_larger((size_t)model.ffn, mp_larger((size_t)model.hidden, (size_t)model.patches.K));
    const size_t acts = model.compute == MP_COMPUTE_F32 ? 0 : mp_acts_bytes(MP_A_BF16, part_rows, (int32_t)widest);
    const uint64_t pixels = (uint64_t)rows * (uint64_t)model.patches.K;
    return FIXED + pixels + mp_vit_state_bytes(&model, rows) + mp_vit_part_bytes(&model, part_rows, 1) +
           mp_arena_cost(acts) +
           THREADS * mp_vit_thread_scratch(&model, rows);
}

void mp_vit_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes) {
    const mp_arch *arch = mp_arch_find(mp_spec_architecture(spec));
    uint64_t bytes = MP_WMAT_SLACK;
    for (int i = 0; i < mp_spec_tensor_count(spec); i++)
        bytes += mp_vit_tensor_bytes(mp_spec_tensor_at(spec, i), compute);
    *model_bytes = bytes;
    *engine_bytes = mp_vit_request_bytes(spec, arch ? arch->flags : 0, compute, 0);
}
