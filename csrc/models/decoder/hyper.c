/* decoder/hyper.c: hyper-parameters of a decoder: sizes, rotary tables, windows, scales. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "models/decoder/mla.h"
#include "models/decoder/load.h"
#include "models/decoder/pass.h"

enum { MAX_WIDTH = 65536, MAX_CONTEXT = 1 << 24, MAX_EXPERTS = 4096 };

void mp_decoder_set_shape(mp_decoder *model, int layer, mp_attention_shape shape) {
    int at = 0;
    shape.padded_dim = mp_kv_width(shape.value_dim);
    const bool apart = shape.gate_dim == 1; /* the gates follow the values, and not each its query */
    shape.query_step = shape.head_dim + (apart ? 0 : shape.gate_dim);
    shape.qkv_width = shape.heads * shape.query_step +
                      shape.kv_heads * (shape.head_dim + (shape.key_values ? 0 : shape.value_dim));
    shape.gates_from = apart ? shape.qkv_width : shape.head_dim;
    shape.gate_step = apart ? 1 : shape.query_step;
    shape.qkv_width += apart ? shape.heads : 0;
    while (at < model->shape_count && memcmp(&model->shapes[at], &shape, sizeof shape) != 0)
        at++;
    if (at == model->shape_count)
        model->shapes[model->shape_count++] = shape;
    model->layer_shapes[layer] = (uint16_t)at;
}

/* Reads the list of layers with the sliding window. */
static mp_status read_windowed(const mp_spec *spec, int layers, int64_t *windowed, mp_error *error) {
    int64_t all = 1;
    return mp_spec_ints(spec, "mpool.window_layers", layers, 0, 1, &all, windowed, error);
}

/* Returns the layer whose keys and values layer `layer` reads: itself, or the last layer that stores keys and values
 * and has a window if this layer has one; -1: there is none. */
static int source_of(const mp_decoder *model, const int64_t *windowed, int layer) {
    int source = layer < model->last_stored ? layer : model->last_stored;
    while (source >= 0 && windowed[source] != windowed[layer])
        source--;
    return source;
}

/* Reads how layers differ from each other in their heads, keys and values. The heads of layers with a window may have
 * another size; values may have a norm. With mpool.key_values, layers without a projection of values have their keys as
 * values. The last layers may read keys and values of earlier layers. */
static mp_status read_kinds(mp_decoder *model, const mp_spec *spec, int64_t key, int64_t *head_dim, int64_t *key_values,
                            mp_error *error) {
    int64_t windowed[MP_DECODER_LAYERS], narrow, shared, none = 0;
    const int layers = model->layer_count;
    bool norms = false, may_lack = false;
    char name[64];
    MP_TRY(mp_spec_int_capped(spec, "{arch}.attention.key_length_swa", 1, MP_HEAD_MAX, &key, &narrow, error));
    MP_TRY(mp_spec_bool(spec, "mpool.key_values", &may_lack, &may_lack, error));
    MP_TRY(mp_spec_int(spec, "{arch}.attention.shared_kv_layers", 0, layers - 1, &none, &shared, error));
    MP_TRY(mp_spec_bool(spec, "mpool.value_norms", &norms, &norms, error));
    if (narrow % 2)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "attention.key_length_swa", "an even number",
                            "%lld", (long long)narrow);
    MP_TRY(read_windowed(spec, layers, windowed, error));
    model->last_stored = layers - 1 - (int32_t)shared;
    for (int i = 0; i < layers; i++) {
        const int source = source_of(model, windowed, i);
        if (source < 0)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "attention.shared_kv_layers",
                                "layers with a window, and without one, only if earlier layers have their keys",
                                "%lld, although layer %d has no such layer before it", (long long)shared, i);
        snprintf(name, sizeof name, "blk.%d.attn_v.weight", source);
        head_dim[i] = windowed[i] ? narrow : key;
        key_values[i] = may_lack && !mp_weights_has(model->weights, name);
    }
    if (!norms)
        return MP_OK;
    model->ones = mp_alloc_array(MP_HEAD_MAX, sizeof *model->ones, MP_TAG_WEIGHTS);
    if (!model->ones)
        return mp_fail_memory(error, MP_HEAD_MAX * sizeof *model->ones, "the norms of values");
    for (int i = 0; i < MP_HEAD_MAX; i++)
        model->ones[i] = 1;
    return MP_OK;
}

/* Returns the components of a gate of a layer's heads. gated: true if the query projection has the gates. */
static int32_t gate_dim(const mp_decoder *model, int layer, bool gated, int64_t value_dim) {
    char name[64];
    snprintf(name, sizeof name, "blk.%d.attn_head_gate.weight", layer);
    return gated ? (int32_t)value_dim : mp_weights_has(model->weights, name);
}

/* Reads the sizes and numbers of heads, which may differ between layers. */
static mp_status read_heads(mp_decoder *model, const mp_spec *spec, bool gated, mp_error *error) {
    int64_t heads[MP_DECODER_LAYERS], kv_heads[MP_DECODER_LAYERS], head_dim[MP_DECODER_LAYERS];
    int64_t key_values[MP_DECODER_LAYERS], key, value, absent = 0, hidden = model->hidden, most = 1;
    const int layers = model->layer_count;
    MP_TRY(mp_spec_ints(spec, "{arch}.attention.head_count", layers, 1, hidden, NULL, heads, error));
    for (int i = 0; i < layers; i++)
        most = heads[i] > most ? heads[i] : most;
    MP_TRY(mp_spec_ints(spec, "{arch}.attention.head_count_kv", layers, 1, most, &absent, kv_heads, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.attention.key_length", 1, MP_HEAD_MAX, &absent, &key, error));
    if (key == absent) {
        if (hidden % heads[0] || hidden / heads[0] > MP_HEAD_MAX)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "attention.head_count",
                                "a divisor of the width that leaves a head size of at most 1,024", "%lld of width %lld",
                                (long long)heads[0], (long long)hidden);
        key = hidden / heads[0];
    }
    MP_TRY(mp_spec_int_capped(spec, "{arch}.attention.value_length", 1, MP_HEAD_MAX, &key, &value, error));
    for (int i = 0; i < layers; i++) {
        kv_heads[i] = kv_heads[i] == absent ? heads[i] : kv_heads[i];
        if (heads[i] % kv_heads[i])
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "attention.head_count_kv",
                                "a divisor of the number of heads", "%lld of %lld heads", (long long)kv_heads[i],
                                (long long)heads[i]);
    }
    if (key != value || key % 2)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "attention.key_length",
                            "an even number equal to value_length", "%lld, with a value_length of %lld",
                            (long long)key, (long long)value);
    MP_TRY(read_kinds(model, spec, key, head_dim, key_values, error));
    for (int i = 0; i < layers; i++) {
        if (heads[i] / kv_heads[i] > MP_ATTN_ROWS)
            return mp_fail_file(error, MP_LIMIT, mp_spec_origin(spec), -1, "attention.head_count_kv",
                                "at most 64 heads per KV head", "%lld for %lld heads", (long long)kv_heads[i],
                                (long long)heads[i]);
        mp_decoder_set_shape(model, i, (mp_attention_shape){.heads = (int32_t)heads[i],
                                                            .kv_heads = (int32_t)kv_heads[i],
                                                            .groups = (int32_t)kv_heads[i],
                                                            .head_dim = (int32_t)head_dim[i],
                                                            .value_dim = (int32_t)head_dim[i],
                                                            .gate_dim = gate_dim(model, i, gated, head_dim[i]),
                                                            .key_values = (int32_t)key_values[i],
                                                            .scale = 1 / sqrtf((float)head_dim[i])});
    }
    return MP_OK;
}

/* Reads the scale factors of some families, and the soft caps of scores and logits. */
static mp_status read_scales(mp_decoder *model, const mp_spec *spec, mp_error *error) {
    float attention_scale;
    const struct {
        const char *key;
        float *scale;
        double low, otherwise;
    } scales[] = {
        {"mpool.attention_scale", &attention_scale, 1e-9, 0},
        {"mpool.embedding_scale", &model->embedding_scale, 1e-9, 1},
        {"mpool.residual_scale", &model->residual_scale, 1e-9, 1},
        {"mpool.output_scale", &model->output_scale, 1e-9, 1},
        {"mpool.attention_softcap", &model->attention_softcap, 1e-3, 0},
        {"mpool.output_softcap", &model->output_softcap, 1e-3, 0},
    };
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        double value;
        MP_TRY(mp_spec_float(spec, scales[i].key, scales[i].low, 1e9, &scales[i].otherwise, &value, error));
        *scales[i].scale = (float)value;
    }
    for (int i = 0; i < model->shape_count && attention_scale > 0; i++)
        model->shapes[i].scale = attention_scale;
    return MP_OK;
}

/* Reads the factor of queries that grows with their position, in steps ("Llama 4" in transformers). */
static mp_status read_temperature(mp_decoder *model, const mp_spec *spec, mp_error *error) {
    double scale, none = 0;
    int64_t length;
    MP_TRY(mp_spec_float(spec, "{arch}.attention.temperature_scale", 0, 1e3, &none, &scale, error));
    if (scale == 0)
        return MP_OK;
    if (model->latent.rank > 0)
        return mp_fail(error, MP_UNSUPPORTED, "the model has latent attention and attention.temperature_scale, which "
                       "mpool does not support together");
    MP_TRY(mp_spec_int(spec, "{arch}.attention.temperature_length", 1, MAX_CONTEXT, NULL, &length, error));
    model->temperature_scale = (float)scale;
    model->temperature_length = (int32_t)length;
    return MP_OK;
}

static mp_status read_experts(mp_decoder *model, const mp_spec *spec, mp_error *error) {
    int64_t count, used, ffn, shared, latent, from, none = 0;
    double clamp, unclamped = 0;
    MP_TRY(mp_spec_int(spec, "{arch}.expert_count", 0, MAX_EXPERTS, &none, &count, error));
    if (count == 0)
        return MP_OK;
    MP_TRY(mp_spec_int(spec, "{arch}.expert_used_count", 1, count, NULL, &used, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.expert_feed_forward_length", 1, 16 * MAX_WIDTH, NULL, &ffn, error));
    MP_TRY(mp_spec_int(spec, "{arch}.leading_dense_block_count", 0, model->layer_count, &none, &from, error));
    MP_TRY(mp_routing_read(&model->experts.routing, spec, (int32_t)count, (int32_t)used, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.expert_shared_feed_forward_length", 0, 16 * MAX_WIDTH, &none, &shared,
                              error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.moe_latent_size", 0, MAX_WIDTH, &none, &latent, error));
    model->shared_ffn = (int32_t)shared;
    MP_TRY(mp_spec_float(spec, "mpool.expert_clamp", 1e-3, 1e6, &unclamped, &clamp, error));
    model->experts.clamp = (float)clamp;
    model->experts.count = (int32_t)count;
    model->experts.used = (int32_t)used;
    model->experts.ffn = (int32_t)ffn;
    model->experts.from = (int32_t)from;
    model->experts.latent = (int32_t)latent;
    return MP_OK;
}

mp_status mp_decoder_kv_in_bytes(const mp_spec *spec, bool *in_bytes, mp_error *error) {
    const char *name;
    MP_TRY(mp_spec_string(spec, "mpool.kv_dtype", "auto", &name, error));
    *in_bytes = strcmp(name, "int8") == 0;
    if (!*in_bytes && strcmp(name, "auto") != 0)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`mpool.kv_dtype` must be auto or int8, got %.40s", name);
    return MP_OK;
}

mp_status mp_decoder_read_hyper(mp_decoder *model, const mp_spec *spec, uint32_t flags, mp_error *error) {
    int64_t layers, hidden, context;
    double eps, latent_eps;
    bool root = true, no = false;
    MP_TRY(mp_spec_int_capped(spec, "{arch}.block_count", 1, MP_DECODER_LAYERS, NULL, &layers, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.embedding_length", 1, MAX_WIDTH, NULL, &hidden, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.context_length", 1, MAX_CONTEXT, NULL, &context, error));
    MP_TRY(mp_spec_bool(spec, "mpool.root_norms", &root, &root, error));
    MP_TRY(mp_spec_float(spec, root ? "{arch}.attention.layer_norm_rms_epsilon" : "{arch}.attention.layer_norm_epsilon",
                         1e-30, 1, NULL, &eps, error));
    model->layer_count = (int32_t)layers;
    model->hidden = (int32_t)hidden;
    model->last_stored = (int32_t)layers - 1;
    model->context = (int32_t)context;
    model->like = (mp_norm){.eps = (float)eps, .root = root};
    MP_TRY(mp_spec_float(spec, "mpool.latent_epsilon", 1e-30, 1, &eps, &latent_eps, error));
    model->latent_eps = (float)latent_eps;
    model->shapes = mp_alloc_array((size_t)layers, sizeof *model->shapes, MP_TAG_WEIGHTS);
    model->layer_shapes = mp_alloc_array((size_t)layers, sizeof *model->layer_shapes, MP_TAG_WEIGHTS);
    if (!model->shapes || !model->layer_shapes)
        return mp_fail_memory(error, (uint64_t)layers * sizeof *model->shapes, "the sizes of heads");
    if (flags & MP_DECODER_LATENT_ATTENTION)
        MP_TRY(mp_mla_read_sizes(model, spec, error));
    else
        MP_TRY(read_heads(model, spec, (flags & MP_DECODER_GATED_HEADS) != 0, error));
    MP_TRY(mp_spec_bool(spec, "mpool.whole_prompts", &no, &model->whole_prompts, error));
    MP_TRY(read_scales(model, spec, error));
    MP_TRY(read_temperature(model, spec, error));
    MP_TRY(read_experts(model, spec, error));
    return mp_model_activation(spec, "mpool.activation", "silu", &model->act, error);
}

/* Divides the angles of a rotary table by divisors: the list `key` of the spec, or a tensor of a GGUF file. Sets *found
 * to true if there are divisors. */
static mp_status divide(mp_decoder *model, mp_rope *rope, const mp_spec *spec, const char *tensor_name, const char *key,
                        bool *found, mp_error *error) {
    double divisors[MP_HEAD_MAX / 2];
    int64_t shape[1] = {rope->dim / 2};
    const mp_value *list = mp_spec_find(spec, key);
    *found = list || mp_weights_has(model->weights, tensor_name);
    if (!*found)
        return MP_OK;
    if (list) {
        if (list->type != MP_VALUE_FLOATS || list->count != (uint64_t)shape[0])
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key, "one number per rotary pair",
                                list->type == MP_VALUE_FLOATS ? "%llu numbers" : "another type",
                                (unsigned long long)list->count);
        for (int i = 0; i < shape[0]; i++)
            divisors[i] = list->as.reals[i];
        return mp_rope_divide(rope, divisors, spec, key, error);
    }
    mp_tensor tensor;
    MP_TRY(mp_weights_get(model->weights, tensor_name, 1, shape, &tensor, error));
    if (tensor.dtype != MP_F32)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, tensor_name, "F32", "%s",
                            mp_dtype_get(tensor.dtype)->name);
    for (int i = 0; i < shape[0]; i++) {
        float divisor;
        memcpy(&divisor, tensor.data + (size_t)i * sizeof divisor, sizeof divisor);
        divisors[i] = (double)divisor;
    }
    return mp_rope_divide(rope, divisors, spec, tensor_name, error);
}

/* LongRoPE: reads the factors of both tables. Long sequences use the second table, all others the first. */
static mp_status read_long_rope(mp_decoder *model, const mp_spec *spec, mp_error *error) {
    int64_t original, absent = 0;
    double base, attention, default_base = 10000, one = 1;
    bool long_found, short_found;
    MP_TRY(mp_spec_int(spec, "mpool.rope_long_from", 1, MAX_CONTEXT, &absent, &original, error));
    if (original == absent)
        return MP_OK;
    MP_TRY(mp_spec_float(spec, "{arch}.rope.freq_base", 1, 1e12, &default_base, &base, error));
    MP_TRY(mp_spec_float(spec, "mpool.rope_attention_factor", 1e-3, 1e3, &one, &attention, error));
    if (!mp_spec_find(spec, "mpool.rope_long_factors") && !mp_weights_has(model->weights, "rope_factors_long.weight"))
        return MP_OK; /* GGUF files of the family give the original length even if they have no factors */
    MP_TRY(mp_rope_init_plain(&model->rope[1], model->rope[0].dim, model->rope[0].neox, base, error));
    MP_TRY(divide(model, &model->rope[0], spec, "rope_factors_short.weight", "mpool.rope_short_factors", &short_found,
                  error));
    MP_TRY(divide(model, &model->rope[1], spec, "rope_factors_long.weight", "mpool.rope_long_factors", &long_found,
                  error));
    if (!short_found || !long_found)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "rope factors", "long and short factors",
                            "missing");
    model->rope[0].attention_scale = model->rope[1].attention_scale = (float)attention;
    model->long_from = original < model->context ? (int32_t)original : 0;
    return MP_OK;
}

/* Writes for each rotary table the components of a head that it may rotate; 0: no layer has the table. The heads of its
 * layers must be equal. */
static mp_status read_rotated(const mp_decoder *model, const mp_spec *spec, const int64_t *tables, int *rotated,
                              mp_error *error) {
    for (int t = 0; t < MP_ROPES; t++)
        rotated[t] = 0;
    for (int i = model->layer_count - 1; i >= 0; i--)
        if (tables[i] >= 0)
            rotated[tables[i]] = mp_decoder_shape(model, i)->head_dim - mp_decoder_shape(model, i)->rotated_from;
    for (int i = 0; i < model->layer_count; i++) {
        const int dim = mp_decoder_shape(model, i)->head_dim - mp_decoder_shape(model, i)->rotated_from;
        if (tables[i] >= 0 && dim != rotated[tables[i]])
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.rope_layers",
                                "one rotary table for each size of heads", "heads of %d and %d components", dim,
                                rotated[tables[i]]);
    }
    return MP_OK;
}

/* Reads the rotary table of the layers with a window. rotated: as read_rotated writes it. */
static mp_status read_local_rope(mp_decoder *model, const mp_spec *spec, double base, const int *rotated,
                                 mp_error *error) {
    const mp_rope *full = &model->rope[0];
    int64_t dim, usual = rotated[1] == rotated[0] ? full->dim : rotated[1];
    MP_TRY(mp_spec_int(spec, "{arch}.rope.dimension_count_swa", 2, rotated[1], &usual, &dim, error));
    if (dim % 2)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "rope.dimension_count_swa", "an even number",
                            "%lld", (long long)dim);
    model->rope_dim = dim > full->dim ? (int)dim : full->dim;
    return mp_rope_init_plain(&model->rope[1], (int)dim, full->neox, base, error);
}

static mp_status read_rope(mp_decoder *model, const mp_load_args *args, mp_error *error) {
    mp_rope *rope = &model->rope[0];
    bool found, neox, neox_default = (args->flags & MP_DECODER_ROPE_NEOX) != 0;
    double local, none = 0;
    int64_t tables[MP_DECODER_LAYERS], first = 0;
    int rotated[MP_ROPES];
    MP_TRY(mp_spec_float(args->spec, "mpool.rope_local_base", 1, 1e12, &none, &local, error));
    model->ropes = local > 0 ? 2 : 1;
    MP_TRY(mp_spec_ints(args->spec, "mpool.rope_layers", model->layer_count, -1, model->ropes - 1, &first, tables,
                        error));
    MP_TRY(read_rotated(model, args->spec, tables, rotated, error));
    /* GGUF files hold the query and key rows of some families permuted for adjacent pairs; model folders hold them as
     * trained */
    MP_TRY(mp_spec_bool(args->spec, "mpool.rope_neox", &neox_default, &neox, error));
    if (rotated[0] == 0)
        rotated[0] = mp_decoder_shape(model, 0)->head_dim - mp_decoder_shape(model, 0)->rotated_from;
    MP_TRY(mp_rope_init(rope, args->spec, rotated[0], neox, error));
    model->rope_dim = rope->dim;
    /* GGUF files may hold the model's frequency scaling as divisors */
    MP_TRY(divide(model, rope, args->spec, "rope_freqs.weight", "mpool.rope_divisors", &found, error));
    MP_TRY(read_long_rope(model, args->spec, error));
    if (local > 0 && model->rope[1].inverse)
        return mp_fail(error, MP_UNSUPPORTED, "the model has LongRoPE factors and a RoPE base for windows, which mpool "
                       "does not support together");
    if (rotated[1] > 0)
        MP_TRY(read_local_rope(model, args->spec, local, rotated, error));
    else
        model->ropes = 1;
    mp_mixer *mixer;
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++)
            mixer->attention.rope = (int)tables[i];
    int64_t sections[3], unused = 0;
    bool no = false;
    MP_TRY(mp_spec_ints(args->spec, "mpool.rope_sections", 3, 0, MP_HEAD_MAX, &unused, sections, error));
    MP_TRY(mp_spec_bool(args->spec, "mpool.rope_interleaved", &no, &model->sections.interleaved, error));
    if (sections[0] == 0)
        return MP_OK;
    if (sections[0] + sections[1] + sections[2] != rope->dim / 2 || model->ropes > 1 || model->long_from > 0)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(args->spec), -1, "mpool.rope_sections",
                            "three numbers that add up to the pairs of a head", "%lld, %lld, %lld",
                            (long long)sections[0], (long long)sections[1], (long long)sections[2]);
    for (int i = 0; i < 3; i++)
        model->sections.pairs[i] = (int32_t)sections[i];
    return MP_OK;
}

/* Reads the sliding window. */
static mp_status read_windows(mp_decoder *model, const mp_spec *spec, const int64_t *windowed, mp_error *error) {
    int64_t window, none = 0;
    MP_TRY(mp_spec_int(spec, "{arch}.attention.sliding_window", 0, INT32_MAX, &none, &window, error));
    mp_mixer *mixer;
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++)
            mixer->attention.window = window < model->context && windowed[i] ? (int)window : 0;
    return MP_OK;
}

/* Reads the list of layers in which the rows of an image see each other. In all layers of a model that embeds, those of
 * the prompt do. */
static mp_status read_spans(mp_decoder *model, const mp_spec *spec, mp_error *error) {
    int64_t none = 0, spans[MP_DECODER_LAYERS];
    MP_TRY(mp_spec_ints(spec, "mpool.image_spans", model->layer_count, 0, 1, &none, spans, error));
    mp_mixer *mixer;
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++) {
            if (model->whole_prompts && mixer->ops->state)
                return mp_fail(error, MP_UNSUPPORTED, "mpool.whole_prompts supports attention only; layer %d has "
                               "another mixer", i);
            mixer->attention.spans = spans[i] != 0 || model->whole_prompts;
            model->image_spans |= spans[i] != 0;
        }
    return MP_OK;
}

/* Gives a mixer with a state its places in the state and in the log. */
static void place_state(mp_decoder *model, mp_mixer *mixer) {
    size_t log_bytes;
    mixer->recurrent.state_at = model->kv.state_bytes;
    mixer->recurrent.log_at = model->kv.log_bytes;
    model->kv.state_bytes += mixer->ops->state(mixer, &log_bytes);
    model->kv.log_bytes += log_bytes;
}

/* Gives a mixer that only reads the store of an earlier layer. */
static mp_status share_store(mp_decoder *model, const int64_t *windowed, int layer, mp_paged_attention *reader,
                             mp_error *error) {
    const mp_mixer *mixer = mp_layer_mixer(&model->layers[source_of(model, windowed, layer)], 0, NULL);
    if (!mixer || mixer->ops->state || mixer->attention.shape != reader->shape)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(mp_weights_spec(model->weights)), -1,
                            "attention.shared_kv_layers", "layers whose earlier layers have equal heads",
                            "other heads than those of layer %d before it", layer);
    reader->store = mixer->attention.store;
    return MP_OK;
}

/* Gives each mixer keys and values, of its own unless it only reads them, or a state. */
static mp_status make_stores(mp_decoder *model, const int64_t *windowed, mp_error *error) {
    mp_mixer *mixer;
    int count = 0;
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++)
            if (mixer->ops->state)
                place_state(model, mixer);
            else if (mixer->attention.reads_only)
                MP_TRY(share_store(model, windowed, i, &mixer->attention, error));
            else
                mixer->attention.store = count++;
    model->kv_stores = mp_alloc_array((size_t)count, sizeof *model->kv_stores, MP_TAG_WEIGHTS);
    if (!model->kv_stores)
        return mp_fail_memory(error, (uint64_t)count * sizeof *model->kv_stores, "the layout of the KV cache");
    for (int i = 0; i < model->layer_count; i++)
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++) {
            const mp_paged_attention *attention = &mixer->attention;
            if (mixer->ops->state || attention->reads_only)
                continue;
            model->kv_stores[attention->store] = (mp_kv_store){.heads = attention->shape->kv_heads,
                                                            .k_dim = attention->shape->head_dim,
                                                            .v_dim = attention->shape->padded_dim,
                                                            .window = attention->window};
        }
    model->kv.count = count;
    return MP_OK;
}

mp_status mp_decoder_read_layers(mp_decoder *model, const mp_load_args *args, mp_error *error) {
    int64_t windowed[MP_DECODER_LAYERS];
    MP_TRY(read_rope(model, args, error));
    MP_TRY(read_windowed(args->spec, model->layer_count, windowed, error));
    MP_TRY(read_windows(model, args->spec, windowed, error));
    MP_TRY(read_spans(model, args->spec, error));
    return make_stores(model, windowed, error);
}
