/* decoder/layers.c: composes the layers of a decoder from blocks, and reads their tensors. */
#include <assert.h>
#include <math.h>
#include <stdio.h>

#include "base/alloc.h"
#include "models/decoder/streams.h"
#include "models/decoder/load.h"

mp_mixer *mp_sublayer_add_mixer(mp_sublayer *sub, const mp_mixer_ops *ops) {
    assert(sub->mixers < MP_SUBLAYER_BLOCKS);
    mp_mixer *mixer = mp_alloc_zeroed(sizeof *mixer, MP_TAG_WEIGHTS);
    if (!mixer)
        return NULL;
    mixer->ops = ops;
    mixer->scale = 1;
    sub->mixer[sub->mixers++] = mixer;
    return mixer;
}

mp_ffn *mp_sublayer_add_ffn(mp_sublayer *sub, const mp_ffn_ops *ops) {
    assert(sub->ffns < MP_SUBLAYER_BLOCKS);
    mp_ffn *ffn = mp_alloc_zeroed(sizeof *ffn, MP_TAG_WEIGHTS);
    if (!ffn)
        return NULL;
    ffn->ops = ops;
    sub->ffn[sub->ffns++] = ffn;
    return ffn;
}

void mp_layer_deinit(mp_decoder_layer *layer) {
    for (int s = 0; s < layer->count; s++) {
        for (int m = 0; m < layer->sublayer[s].mixers; m++)
            mp_free(layer->sublayer[s].mixer[m]);
        for (int f = 0; f < layer->sublayer[s].ffns; f++) {
            mp_ffn_deinit(layer->sublayer[s].ffn[f]);
            mp_free(layer->sublayer[s].ffn[f]);
        }
    }
}

mp_mixer *mp_layer_mixer(mp_decoder_layer *layer, int nth, mp_sublayer **of) {
    for (int s = 0; s < layer->count; s++) {
        mp_sublayer *sub = &layer->sublayer[s];
        if (of)
            *of = sub;
        if (nth < sub->mixers)
            return sub->mixer[nth];
        nth -= sub->mixers;
    }
    return NULL;
}

mp_ffn *mp_layer_ffn(mp_decoder_layer *layer, int nth) {
    for (int s = 0; s < layer->count; s++) {
        if (nth < layer->sublayer[s].ffns)
            return layer->sublayer[s].ffn[nth];
        nth -= layer->sublayer[s].ffns;
    }
    return NULL;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

mp_status mp_reader_linear(const mp_layer_reader *reader, mp_linear *linear, const mp_reader_part *parts, int count,
                           int32_t K, float bias_scale, mp_error *error) {
    mp_decoder *model = reader->model;
    mp_builder builder = *reader->builder;
    bool biased = false;
    char name[64], bias[64];
    builder.bias_scale = bias_scale;
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", reader->index, parts[i].name);
        snprintf(bias, sizeof bias, "blk.%d.%s.bias", reader->index, parts[i].name);
        /* the first part decides whether the layer has biases: never drop one silently */
        if (i == 0)
            biased = mp_weights_has(model->weights, bias);
        else if (!biased && mp_weights_has(model->weights, bias))
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(mp_weights_spec(model->weights)), -1, bias,
                                "biases for all parts of a layer, or for none", "a bias for some parts");
        MP_TRY(mp_builder_linear(&builder, linear, name, biased ? bias : NULL, parts[i].N, K, error));
        MP_TRY(mp_adapters_add(&model->adapters, &builder, linear, name, error));
    }
    return MP_OK;
}

/* OK if the file has no tensor `weight`. */
static mp_status refuse(const mp_layer_reader *reader, const char *weight, mp_error *error) {
    if (!mp_weights_has(reader->model->weights, weight))
        return MP_OK;
    return mp_fail(error, MP_UNSUPPORTED, "tensor %s is not part of this architecture", weight);
}

mp_status mp_reader_refuse(const mp_layer_reader *reader, const char *name, mp_error *error) {
    char weight[64];
    snprintf(weight, sizeof weight, "blk.%d.%s.weight", reader->index, name);
    return refuse(reader, weight, error);
}

mp_status mp_reader_norm(const mp_layer_reader *reader, mp_norm *norm, const char *name, int32_t n, bool has,
                         mp_error *error) {
    char full[56], weight[64];
    snprintf(full, sizeof full, "blk.%d.%s", reader->index, name);
    snprintf(weight, sizeof weight, "%s.weight", full);
    return has ? mp_norm_read(norm, reader->builder, full, mp_decoder_norm(reader->model, n),
                              mp_decoder_norm_bias(reader->model), reader->norm_offset, error)
               : refuse(reader, weight, error);
}

mp_status mp_reader_vector(const mp_layer_reader *reader, float **vector, const char *name, int32_t n, bool has,
                           mp_error *error) {
    char weight[64];
    snprintf(weight, sizeof weight, "blk.%d.%s.weight", reader->index, name);
    return has ? mp_builder_vector(reader->builder, vector, weight, n, error) : refuse(reader, weight, error);
}

mp_status mp_reader_conv(const mp_layer_reader *reader, mp_causal_conv *conv, const char *name, mp_error *error) {
    char full[64];
    snprintf(full, sizeof full, "blk.%d.%s.weight", reader->index, name);
    MP_TRY(mp_builder_taps(reader->builder, &conv->kernel, full, conv->channels, conv->taps, error));
    snprintf(full, sizeof full, "blk.%d.%s.bias", reader->index, name);
    return mp_weights_has(reader->model->weights, full)
               ? mp_builder_vector(reader->builder, &conv->bias, full, conv->channels, error)
               : MP_OK;
}

mp_status mp_reader_decay(const mp_layer_reader *reader, float **decay, int32_t heads, mp_error *error) {
    char plain[64], logarithm[64];
    snprintf(plain, sizeof plain, "blk.%d.ssm_a", reader->index);
    snprintf(logarithm, sizeof logarithm, "blk.%d.ssm_a_log", reader->index);
    return mp_weights_has(reader->model->weights, logarithm)
               ? mp_builder_vector_exp(reader->builder, decay, logarithm, heads, error)
               : mp_builder_vector(reader->builder, decay, plain, heads, error);
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Reads the gate of the rows of a shared expert, if the file has one. */
static mp_status read_row_gate(const mp_layer_reader *reader, mp_mlp *mlp, mp_error *error) {
    char name[64], bias[64];
    snprintf(name, sizeof name, "blk.%d.ffn_gate_inp_shexp.weight", reader->index);
    snprintf(bias, sizeof bias, "blk.%d.ffn_down_shexp.bias", reader->index);
    if (!mp_weights_has(reader->model->weights, name))
        return MP_OK;
    if (mp_weights_has(reader->model->weights, bias))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s gates an expert whose output has a bias, which mpool does not "
                       "support together", name);
    return mp_builder_vector(reader->builder, &mlp->row_gate, name, reader->model->hidden, error);
}

/* Reads a network that is not a mixture; `shared`: the shared expert of a layer with experts. */
static mp_status read_dense(const mp_layer_reader *reader, mp_sublayer *sub, bool shared, int32_t width,
                            mp_error *error) {
    const mp_decoder *model = reader->model;
    const mp_reader_part up[] = {{shared ? "ffn_gate_shexp" : "ffn_gate", width},
                                 {shared ? "ffn_up_shexp" : "ffn_up", width}};
    const mp_reader_part down = {shared ? "ffn_down_shexp" : "ffn_down", model->hidden};
    const int first = reader->gated ? 0 : 1;
    if (!reader->gated)
        MP_TRY(mp_reader_refuse(reader, up[0].name, error));
    mp_ffn *ffn = mp_sublayer_add_ffn(sub, &mp_ffn_dense);
    if (!ffn)
        return mp_fail_memory(error, sizeof *ffn, "a block of a layer");
    ffn->mlp.gated = reader->gated;
    ffn->mlp.ffn = width;
    ffn->mlp.act = model->act;
    ffn->mlp.gate_scale = reader->gate_scale;
    ffn->mlp.sparse = shared ? 0 : reader->sparse;
    MP_TRY(mp_reader_linear(reader, &ffn->mlp.up, up + first, 2 - first, model->hidden, 1, error));
    MP_TRY(mp_reader_linear(reader, &ffn->mlp.down, &down, 1, width, model->residual_scale, error));
    return shared ? read_row_gate(reader, &ffn->mlp, error) : MP_OK;
}

static mp_status read_experts(const mp_layer_reader *reader, mp_sublayer *sub, mp_error *error) {
    const mp_decoder *model = reader->model;
    const int32_t latent = model->experts.latent;
    const mp_reader_part down = {"ffn_latent_down", latent}, up = {"ffn_latent_up", model->hidden};
    char bias[64];
    snprintf(bias, sizeof bias, "blk.%d.ffn_gate_inp.bias", reader->index);
    const mp_experts_shape shape = {
        .layer = reader->index,
        .count = model->experts.count,
        .used = model->experts.used,
        .hidden = latent > 0 ? latent : model->hidden,
        .ffn = model->experts.ffn,
        .routed = model->hidden,
        .routing = model->experts.routing,
        .biased = mp_weights_has(model->weights, bias),
        .plain = !reader->gated,
        .act = model->act,
        .clamp = model->experts.clamp,
    };
    mp_ffn *ffn = mp_sublayer_add_ffn(sub, &mp_ffn_experts);
    if (!ffn)
        return mp_fail_memory(error, sizeof *ffn, "a block of a layer");
    MP_TRY(mp_experts_init(&ffn->experts, &shape, reader->builder, error));
    if (latent == 0)
        return mp_reader_refuse(reader, down.name, error);
    MP_TRY(mp_reader_linear(reader, &ffn->mlp.up, &down, 1, model->hidden, 1, error));
    return mp_reader_linear(reader, &ffn->mlp.down, &up, 1, latent, model->residual_scale, error);
}

/* Adds a dense network and experts, each with its own norms, whose outputs are added up before the sublayer's norm. */
static mp_status add_beside(const mp_layer_reader *reader, mp_sublayer *sub, mp_error *error) {
    const mp_decoder *model = reader->model;
    char scale[64];
    MP_TRY(mp_reader_refuse(reader, "ffn_latent_down", error)); /* the norms are of whole rows */
    MP_TRY(read_dense(reader, sub, false, reader->dense_ffn, error));
    MP_TRY(read_experts(reader, sub, error));
    mp_ffn *const dense = sub->ffn[0], *const experts = sub->ffn[1];
    reader->model->adds_up = true;
    MP_TRY(mp_reader_norm(reader, &dense->after, "post_ffw_norm_1", model->hidden, true, error));
    MP_TRY(mp_reader_norm(reader, &experts->norm, "pre_ffw_norm_2", model->hidden, true, error));
    MP_TRY(mp_reader_norm(reader, &experts->after, "post_ffw_norm_2", model->hidden, true, error));
    experts->router_norm = mp_decoder_norm(model, model->hidden);
    experts->router_scale = 1 / sqrtf((float)model->hidden);
    snprintf(scale, sizeof scale, "blk.%d.ffn_gate_inp.scale", reader->index);
    return mp_builder_vector(reader->builder, &experts->router_norm.weight, scale, model->hidden, error);
}

/* Values of the list `mpool.layer_blocks`. */
typedef enum mp_layer_has { MP_LAYER_BOTH, MP_LAYER_MIXER, MP_LAYER_FFN } mp_layer_has;

/* Reads the list of layers that have a dense feed-forward network in a model with experts. */
static mp_status read_dense_layers(const mp_decoder *model, const mp_spec *spec, bool *dense, mp_error *error) {
    int64_t listed[MP_DECODER_LAYERS], none = 0;
    MP_TRY(mp_spec_ints(spec, "mpool.dense_layers", model->layer_count, 0, 1, &none, listed, error));
    for (int i = 0; i < model->layer_count; i++)
        dense[i] = listed[i] != 0 || model->experts.count == 0 || i < model->experts.from;
    return MP_OK;
}

static mp_status read_norms(const mp_layer_reader *reader, mp_sublayer *sub, const char *norm, const char *after,
                            mp_error *error) {
    const int32_t hidden = reader->model->hidden;
    const bool outputs = (reader->flags & MP_DECODER_OUTPUT_NORMS) != 0;
    sub->scale = reader->model->residual_scale;
    MP_TRY(mp_reader_norm(reader, &sub->norm, norm, hidden, !(reader->flags & MP_DECODER_NO_INPUT_NORMS), error));
    MP_TRY(mp_reader_norm(reader, &sub->after, after, hidden, outputs, error));
    const bool beside = sub->ffns > 0 && sub->ffn[sub->ffns - 1]->after.n > 0;
    if (outputs && !beside && (sub->mixers + sub->ffns > 1 || (sub->ffns == 1 && sub->ffn[0]->ops->separate)))
        return mp_fail(error, MP_UNSUPPORTED, "layer %d has experts, or several blocks, and a norm of their output, "
                       "which mpool does not support together", reader->index);
    return MP_OK;
}

static mp_status add_mixer(const mp_layer_reader *reader, const mp_mixer_ops *ops, mp_sublayer *sub, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(reader->model->weights);
    double scale = 1;
    if (ops != &mp_mixer_latent)
        MP_TRY(mp_reader_refuse(reader, "attn_kv_a_mqa", error));
    mp_mixer *mixer = mp_sublayer_add_mixer(sub, ops);
    if (!mixer)
        return mp_fail_memory(error, sizeof *mixer, "a block of a layer");
    MP_TRY(mp_spec_float(spec, ops->sizes ? "mpool.recurrent_scale" : "mpool.mixed_scale", 1e-9, 1e9, &scale, &scale,
                         error));
    mixer->scale = (float)scale;
    if (ops->sizes)
        MP_TRY(ops->sizes(spec, mixer, error));
    return mixer->ops->read(reader, mixer, error);
}

/* Adds experts, or a network that is not a mixture, or both: experts and a shared expert, or see add_beside. */
static mp_status add_ffns(const mp_layer_reader *reader, mp_sublayer *sub, bool dense, mp_error *error) {
    const int32_t width = dense ? reader->dense_ffn : reader->model->shared_ffn;
    if (!dense && reader->experts_beside)
        return add_beside(reader, sub, error);
    if (!dense)
        MP_TRY(read_experts(reader, sub, error));
    return width > 0 ? read_dense(reader, sub, !dense, width, error) : MP_OK;
}

/* Values of the list `mpool.layer_mixers`: indices of this table. */
static const mp_mixer_ops *const mixers[] = {NULL, &mp_mixer_short_conv, &mp_mixer_gated_delta, &mp_mixer_mamba2};
enum { MIXERS = sizeof mixers / sizeof *mixers, ATTENTION = 0 };

/* Reads the kinds of mixers. */
static mp_status read_mixers(const mp_spec *spec, int layers, int64_t *mixes, mp_error *error) {
    int64_t attention = ATTENTION;
    bool beside = false;
    MP_TRY(mp_spec_bool(spec, "mpool.attention_beside", &beside, &beside, error));
    MP_TRY(mp_spec_ints(spec, "mpool.layer_mixers", layers, 0, MIXERS - 1, &attention, mixes, error));
    for (int i = 0; i < layers; i++)
        if (beside || mixes[i] == ATTENTION)
            return MP_OK;
    return mp_fail(error, MP_UNSUPPORTED, "no layer has attention, which mpool does not support");
}

uint64_t mp_decoder_state_bytes(const mp_spec *spec) {
    int64_t layers, mixes[MP_DECODER_LAYERS];
    uint64_t bytes = 0;
    size_t log_bytes;
    mp_error error;
    if (mp_spec_int(spec, "{arch}.block_count", 1, MP_DECODER_LAYERS, NULL, &layers, &error) != MP_OK ||
        read_mixers(spec, (int)layers, mixes, &error) != MP_OK)
        return 0;
    for (int i = 0; i < layers; i++) {
        mp_mixer mixer = {.ops = mixers[mixes[i]]};
        if (mixer.ops && mixer.ops->sizes(spec, &mixer, &error) == MP_OK)
            bytes += mixer.ops->state(&mixer, &log_bytes);
    }
    return bytes;
}

/* Adds the network that multiplies the activations of each row by the row's inputs of this layer. */
static mp_status add_inputs(const mp_layer_reader *reader, mp_sublayer *sub, mp_error *error) {
    const mp_decoder *model = reader->model;
    const int32_t width = model->inputs.width;
    const mp_reader_part gate = {"inp_gate", width}, out = {"proj", model->hidden};
    mp_ffn *ffn = mp_sublayer_add_ffn(sub, &mp_ffn_dense);
    if (!ffn)
        return mp_fail_memory(error, sizeof *ffn, "a block of a layer");
    ffn->mlp = (mp_mlp){.ffn = width, .act = model->act, .has_inputs = true, .inputs_from = reader->index * width};
    sub->scale = 1;
    MP_TRY(mp_reader_linear(reader, &ffn->mlp.up, &gate, 1, model->hidden, 1, error));
    MP_TRY(mp_reader_linear(reader, &ffn->mlp.down, &out, 1, width, 1, error));
    return mp_reader_norm(reader, &sub->after, "post_norm", model->hidden, true, error);
}

/* Adds what may follow the usual sublayers: a sublayer with the row's inputs, and a factor on the sums. */
static mp_status read_end(const mp_layer_reader *reader, mp_decoder_layer *layer, mp_error *error) {
    char name[64];
    if (reader->model->inputs.width > 0)
        MP_TRY(add_inputs(reader, &layer->sublayer[layer->count++], error));
    MP_TRY(mp_streams_read_layer(reader, layer, error));
    snprintf(name, sizeof name, "blk.%d.layer_output_scale.weight", reader->index);
    if (!mp_weights_has(reader->model->weights, name))
        return MP_OK;
    const mp_sublayer *last = &layer->sublayer[layer->count - 1];
    if (!last->after.n)
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s scales a layer whose last block has no norm of its output, "
                       "which mpool does not support", name);
    return mp_builder_vector(reader->builder, &layer->sublayer[layer->count - 1].total, name, 1, error);
}

/* Adds the low-rank network beside a mixer, if the file has it. */
static mp_status add_laurel(const mp_layer_reader *reader, mp_sublayer *sub, mp_error *error) {
    mp_decoder *model = reader->model;
    int64_t shape[2] = {-1, model->hidden};
    mp_tensor left;
    char name[64];
    snprintf(name, sizeof name, "blk.%d.laurel_l.weight", reader->index);
    if (!mp_weights_has(model->weights, name))
        return MP_OK;
    MP_TRY(mp_weights_get(model->weights, name, 2, shape, &left, error));
    const mp_reader_part down = {"laurel_l", (int32_t)left.shape[0]}, up = {"laurel_r", model->hidden};
    mp_ffn *ffn = mp_sublayer_add_ffn(sub, &mp_ffn_laurel);
    if (!ffn)
        return mp_fail_memory(error, sizeof *ffn, "a block of a layer");
    ffn->mlp.ffn = down.N;
    model->adds_up = true;
    model->laurel_scale = sqrtf(0.5f);
    sub->total = &model->laurel_scale;
    MP_TRY(mp_reader_linear(reader, &ffn->mlp.up, &down, 1, model->hidden, 1, error));
    MP_TRY(mp_reader_linear(reader, &ffn->mlp.down, &up, 1, down.N, 1, error));
    return mp_reader_norm(reader, &ffn->after, "laurel_post_norm", model->hidden, true, error);
}

/* Composes a layer: a mixer, and a network with a norm of its own, or with that of the mixer. A layer may also have one
 * of them alone. */
static mp_status read_layer(const mp_layer_reader *reader, bool dense, mp_layer_has has, mp_decoder_layer *layer,
                            mp_error *error) {
    const bool one = reader->one_norm || has != MP_LAYER_BOTH;
    mp_sublayer *const first = &layer->sublayer[0], *const second = &layer->sublayer[one ? 0 : 1];
    layer->count = one ? 1 : 2;
    if (has == MP_LAYER_FFN)
        MP_TRY(mp_reader_refuse(reader, "attn_output", error));
    else
        MP_TRY(add_mixer(reader, reader->mixer, first, error));
    if (has != MP_LAYER_FFN && reader->beside && reader->mixer->state)
        MP_TRY(add_mixer(reader, &mp_mixer_attention, first, error));
    if (has == MP_LAYER_MIXER)
        MP_TRY(mp_reader_refuse(reader, "ffn_down", error));
    else
        MP_TRY(add_ffns(reader, second, dense, error));
    if (has != MP_LAYER_FFN)
        MP_TRY(add_laurel(reader, first, error));
    MP_TRY(read_norms(reader, first, "attn_norm", "post_attention_norm", error));
    if (one)
        return mp_reader_refuse(reader, "ffn_norm", error);
    MP_TRY(read_norms(reader, second, "ffn_norm", "post_ffw_norm", error));
    second->scale *= reader->ffn_scale;
    return MP_OK;
}

mp_status mp_decoder_compose(mp_decoder *model, const mp_builder *builder, const mp_load_args *args, float norm_offset,
                             mp_error *error) {
    enum { WIDEST = 1 << 20 }; /* feed-forward network */
    const bool latent = (args->flags & MP_DECODER_LATENT_ATTENTION) != 0;
    const mp_mixer_ops *const attention = latent ? &mp_mixer_latent : &mp_mixer_attention;
    bool dense[MP_DECODER_LAYERS], gated = true, one_norm = false, beside = false, experts_beside = false;
    double gate_scale = 1, ffn_scale = 1;
    int64_t has[MP_DECODER_LAYERS], mixes[MP_DECODER_LAYERS], ffn[MP_DECODER_LAYERS], both = MP_LAYER_BOTH;
    MP_TRY(read_dense_layers(model, args->spec, dense, error));
    MP_TRY(mp_spec_bool(args->spec, "mpool.gated_ffn", &gated, &gated, error));
    MP_TRY(mp_spec_bool(args->spec, "mpool.one_norm", &one_norm, &one_norm, error));
    MP_TRY(mp_spec_bool(args->spec, "mpool.attention_beside", &beside, &beside, error));
    MP_TRY(mp_spec_bool(args->spec, "mpool.experts_beside", &experts_beside, &experts_beside, error));
    MP_TRY(mp_spec_float(args->spec, "mpool.gate_scale", 1e-9, 1e9, &gate_scale, &gate_scale, error));
    MP_TRY(mp_spec_float(args->spec, "mpool.ffn_scale", 1e-9, 1e9, &ffn_scale, &ffn_scale, error));
    MP_TRY(mp_spec_ints(args->spec, "mpool.layer_blocks", model->layer_count, MP_LAYER_BOTH, MP_LAYER_FFN, &both, has,
                        error));
    MP_TRY(mp_spec_ints(args->spec, "{arch}.feed_forward_length", model->layer_count, 1, WIDEST, NULL, ffn, error));
    MP_TRY(read_mixers(args->spec, model->layer_count, mixes, error));
    const mp_value *sparse = mp_spec_find(args->spec, "mpool.sparse_gates");
    if (sparse && (sparse->type != MP_VALUE_FLOATS || sparse->count != (uint64_t)model->layer_count))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(args->spec), -1, "mpool.sparse_gates",
                            "one number per layer", "another value");
    model->last_mixed = -1;
    for (int i = 0; i < model->layer_count; i++) { /* reads the scales of quantised folders from the disk */
        const mp_mixer_ops *const mixer = mixes[i] == ATTENTION ? attention : mixers[mixes[i]];
        const mp_layer_reader reader = {.model = model,
                                        .builder = builder,
                                        .index = i,
                                        .flags = args->flags,
                                        .norm_offset = norm_offset,
                                        .gated = gated,
                                        .one_norm = one_norm,
                                        .beside = beside,
                                        .experts_beside = experts_beside,
                                        .dense_ffn = (int32_t)ffn[i],
                                        .gate_scale = (float)gate_scale,
                                        .ffn_scale = (float)ffn_scale,
                                        .sparse = sparse ? (float)sparse->as.reals[i] : 0,
                                        .mixer = mixer};
        MP_TRY(read_layer(&reader, dense[i], (mp_layer_has)has[i], &model->layers[i], error));
        MP_TRY(read_end(&reader, &model->layers[i], error));
        if (mp_layer_mixer(&model->layers[i], 0, NULL))
            model->last_mixed = i;
        mp_progress_part(args->progress, "mapping", (uint64_t)i + 1, (uint64_t)model->layer_count);
    }
    return MP_OK;
}

mp_block_cost mp_decoder_cost(const mp_decoder *model) {
    mp_block_cost cost = {0};
    const mp_mixer *mixer;
    const mp_ffn *ffn;
    if (model->inputs.width > 0) {
        cost.idle = model->inputs.plain ? 0 : mp_tensor_items(&model->inputs.table);
        mp_cost_linear(&cost, &model->inputs.project);
    }
    for (int i = 0; i < model->layer_count; i++) {
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[i], m, NULL)); m++)
            mixer->ops->cost(mixer, &cost);
        for (int f = 0; (ffn = mp_layer_ffn(&model->layers[i], f)); f++)
            ffn->ops->cost(ffn, &cost);
    }
    return cost;
}
