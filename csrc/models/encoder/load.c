/* encoder/load.c: loads an encoder from a spec: hyper-parameters, tensors, packed weights. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "models/encoder/encoder.h"

enum { MAX_LAYERS = 1024, MAX_HEADS = 1024, MAX_WIDTH = 65536, MAX_EXPERTS = 1024 };
enum { MAX_CONTEXT = 1 << 20, MAX_VOCAB = 1 << 24 };

static void encoder_destroy(mp_model *base) {
    mp_encoder *model = (mp_encoder *)base;
    if (!model)
        return;
    mp_weight_store_deinit(&model->store);
    mp_free(model->embedding.types);
    mp_free(model->position_bias);
    mp_relative_deinit(&model->relative);
    mp_free(model->relative_tables);
    mp_rope_deinit(&model->rope[0]);
    mp_rope_deinit(&model->rope[1]);
    for (int i = 0; model->layers && i < model->layer_count; i++)
        mp_ffn_deinit(&model->layers[i].base.ffn);
    mp_free(model->layers);
    mp_adapters_deinit(&model->adapters);
    mp_free(model->order);
    mp_free(model->no_row);
    mp_recent_deinit(&model->recent);
    if (model->budget)
        mp_budget_give(model->budget, model->charged);
    mp_weights_close(model->weights);
    mp_free(model);
}

static bool encoder_healthy(const mp_model *base) {
    const mp_encoder *model = (const mp_encoder *)base;
    return !mp_weight_store_corrupted(&model->store) && mp_weights_sound(model->weights);
}

static uint64_t encoder_bytes(const mp_model *base) {
    const mp_encoder *model = (const mp_encoder *)base;
    return model->charged + mp_weight_store_bytes(&model->store) +
           atomic_load_explicit(&model->recent.charged, memory_order_relaxed);
}

static const mp_model_ops encoder_ops = {mp_encoder_engine, mp_encoder_check, encoder_healthy, encoder_bytes,
                                         encoder_destroy};

static mp_status read_heads(mp_encoder *model, const mp_spec *spec, mp_error *error) {
    int64_t heads, kv_heads, key, value, hidden = model->hidden;
    double scale, scale_default;
    bool causal = false;
    MP_TRY(mp_spec_int(spec, "{arch}.attention.head_count", 1, MAX_WIDTH, NULL, &heads, error));
    MP_TRY(mp_spec_int(spec, "{arch}.attention.head_count_kv", 1, heads, &heads, &kv_heads, error));
    int64_t even = hidden % heads ? 0 : hidden / heads;
    MP_TRY(mp_spec_int(spec, "{arch}.attention.key_length", 0, MAX_WIDTH, &even, &key, error));
    MP_TRY(mp_spec_int(spec, "{arch}.attention.value_length", 0, MAX_WIDTH, &key, &value, error));
    if (key == 0 || heads * key > MAX_WIDTH)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "attention.head_count",
                            "a divisor of the width; all heads together have at most 65,536 components",
                            "%lld of width %lld", (long long)heads, (long long)hidden);
    if (heads % kv_heads || value != key)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "attention.head_count_kv",
                            "a divisor of the heads, with values as long as keys", "%lld of %lld heads",
                            (long long)kv_heads, (long long)heads);
    scale_default = 1 / sqrt((double)key);
    MP_TRY(mp_spec_float(spec, "mpool.attention_scale", 1e-6, 1e6, &scale_default, &scale, error));
    MP_TRY(mp_spec_bool(spec, "{arch}.attention.causal", &causal, &model->attention.causal, error));
    model->attention.heads = (int32_t)heads;
    model->attention.kv_heads = (int32_t)kv_heads;
    model->attention.head_dim = (int32_t)key;
    model->attention.scale = (float)scale;
    model->q_width = (int32_t)(heads * key);
    model->kv_width = (int32_t)(kv_heads * key);
    model->qkv_width = model->q_width + 2 * model->kv_width;
    return MP_OK;
}

/* Read the sizes of short convolutions. They see both sides of a row, as far as attention does. */
static mp_status read_taps(mp_encoder *model, const mp_spec *spec, mp_error *error) {
    int64_t taps, none = 0;
    MP_TRY(mp_spec_int(spec, "{arch}.shortconv.l_cache", 0, MP_BUILDER_TAPS, &none, &taps, error));
    if (taps == 0)
        return MP_OK;
    model->taps = (int32_t)taps;
    model->taps_before = model->attention.causal ? model->taps - 1 : model->taps / 2;
    if (model->qkv_width < 3 * model->hidden)
        model->qkv_width = 3 * model->hidden;
    model->no_row = mp_alloc_zeroed((size_t)model->hidden * sizeof *model->no_row, MP_TAG_WEIGHTS);
    return model->no_row ? MP_OK : mp_fail_memory(error, (uint64_t)model->hidden * sizeof *model->no_row, "a row");
}

static mp_status read_experts(mp_encoder *model, const mp_spec *spec, mp_error *error) {
    int64_t none = 0, count, used, every;
    MP_TRY(mp_spec_int(spec, "{arch}.expert_count", 0, MAX_EXPERTS, &none, &count, error));
    if (count == 0)
        return MP_OK;
    MP_TRY(mp_spec_int(spec, "{arch}.expert_used_count", 1, count, NULL, &used, error));
    MP_TRY(mp_spec_int(spec, "{arch}.moe_every_n_layers", 2, MAX_LAYERS, NULL, &every, error));
    MP_TRY(mp_routing_read(&model->routing, spec, (int32_t)count, (int32_t)used, error));
    model->experts = (int32_t)count;
    model->experts_used = (int32_t)used;
    model->experts_every = (int32_t)every;
    return MP_OK;
}

/* Read which layers share their weights: `mpool.layer_order` lists, for each layer that a pass computes, the number of
 * the tensors' layer. Without it, each layer has weights of its own. */
static mp_status read_order(mp_encoder *model, const mp_spec *spec, mp_error *error) {
    static const char key[] = "mpool.layer_order";
    const mp_value *list = mp_spec_find(spec, key);
    const int64_t none = 0, most = model->layer_count - 1;
    if (list && (list->type != MP_VALUE_INTS || list->count < 1 || list->count > MAX_LAYERS))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key, "an array of 1 to 1,024 integers",
                            list->type == MP_VALUE_INTS ? "an array of %llu" : "another type",
                            (unsigned long long)list->count);
    model->depth = list ? (int32_t)list->count : model->layer_count;
    int64_t *order = mp_alloc_array((size_t)model->depth, sizeof *order, MP_TAG_MISC);
    model->order = mp_alloc_array((size_t)model->depth, sizeof *model->order, MP_TAG_WEIGHTS);
    mp_status status = order && model->order ? mp_spec_ints(spec, key, model->depth, 0, most, &none, order, error)
                                             : mp_fail_memory(error, (uint64_t)model->depth * sizeof *order,
                                                              "the order of layers");
    for (int i = 0; i < model->depth && status == MP_OK; i++)
        model->order[i] = list ? (int32_t)order[i] : i;
    mp_free(order);
    return status;
}

static mp_status read_hyper(mp_encoder *model, const mp_spec *spec, mp_error *error) {
    int64_t layers, hidden, ffn, context, embedding;
    double eps, embedding_scale, one = 1;
    const char *eps_key = model->flags & MP_ENCODER_RMS_NORM ? "{arch}.attention.layer_norm_rms_epsilon"
                                                          : "{arch}.attention.layer_norm_epsilon";
    MP_TRY(mp_spec_int_capped(spec, "{arch}.block_count", 1, MAX_LAYERS, NULL, &layers, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.embedding_length", 1, MAX_WIDTH, NULL, &hidden, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.feed_forward_length", 1, 16 * MAX_WIDTH, NULL, &ffn, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.context_length", 1, MAX_CONTEXT, NULL, &context, error));
    MP_TRY(mp_spec_float(spec, eps_key, 1e-30, 1, NULL, &eps, error));
    MP_TRY(mp_spec_float(spec, "mpool.embedding_scale", 1e-6, 1e6, &one, &embedding_scale, error));
    MP_TRY(mp_spec_int_capped(spec, "mpool.embedding_size", 1, MAX_WIDTH, &hidden, &embedding, error));
    model->layer_count = (int32_t)layers;
    model->hidden = (int32_t)hidden;
    model->ffn = (int32_t)ffn;
    model->context = (int32_t)context;
    model->eps = (float)eps;
    model->embedding.n = (int32_t)embedding;
    model->embedding.scale = (float)embedding_scale;
    MP_TRY(mp_model_activation(spec, "mpool.activation", "gelu", &model->act, error));
    MP_TRY(read_experts(model, spec, error));
    MP_TRY(read_order(model, spec, error));
    MP_TRY(read_heads(model, spec, error));
    return read_taps(model, spec, error);
}

/* Layers with a window may use another rotary base. */
static mp_status read_ropes(mp_encoder *model, const mp_spec *spec, mp_error *error) {
    if (!(model->flags & MP_ENCODER_ROPE))
        return MP_OK;
    double local;
    MP_TRY(mp_rope_init(&model->rope[0], spec, model->attention.head_dim, true, error));
    if (!mp_spec_find(spec, "mpool.rope_local_base"))
        return MP_OK;
    MP_TRY(mp_spec_float(spec, "mpool.rope_local_base", 1, 1e12, NULL, &local, error));
    return mp_rope_init_plain(&model->rope[1], model->rope[0].dim, model->rope[0].neox, local, error);
}

static mp_status read_windows(mp_encoder *model, const mp_spec *spec, mp_error *error) {
    int64_t none = 0, *windows = mp_alloc_array((size_t)model->layer_count, sizeof *windows, MP_TAG_MISC);
    if (!windows)
        return mp_fail_memory(error, (uint64_t)model->layer_count * sizeof *windows, "the layers' windows");
    mp_status status =
        mp_spec_ints(spec, "mpool.layer_windows", model->layer_count, 0, MAX_CONTEXT, &none, windows, error);
    for (int i = 0; i < model->layer_count && status == MP_OK; i++)
        model->layers[i].base.window = (int32_t)windows[i];
    mp_free(windows);
    return status;
}

/* Read a norm of n values. Unless `needed`, the tensor may be missing. */
static mp_status read_norm(const mp_encoder *model, const mp_builder *builder, mp_norm *norm, const char *name,
                           int32_t n, bool needed, mp_error *error) {
    const mp_norm like = {.n = n, .eps = model->eps, .root = model->flags & MP_ENCODER_RMS_NORM};
    char weight[64];
    double offset = 0; /* Gemma checkpoints store the weight minus 1 */
    snprintf(weight, sizeof weight, "%s.weight", name);
    if (!needed && !mp_weights_has(builder->weights, weight))
        return MP_OK;
    MP_TRY(mp_spec_float(mp_weights_spec(builder->weights), "mpool.norm_offset", -1e3, 1e3, &offset, &offset, error));
    return mp_norm_read(norm, builder, name, like, MP_NORM_BIAS_IF_THERE, (float)offset, error);
}

static mp_status read_embeddings(mp_encoder *model, const mp_builder *builder, mp_budget *budget, mp_error *error) {
    const mp_weights *weights = model->weights;
    mp_embedding *embedding = &model->embedding;
    const int32_t n = embedding->n;
    int64_t any[2] = {-1, n}, positions[2] = {model->context, n}, type_rows = 0;
    MP_TRY(mp_weights_get(weights, "token_embd.weight", 2, any, &embedding->tokens, error));
    if (embedding->tokens.shape[0] > MAX_VOCAB)
        return mp_fail_file(error, MP_LIMIT, mp_spec_origin(mp_weights_spec(weights)), -1, "token_embd.weight",
                            "at most 16,777,216 rows", "%lld", (long long)embedding->tokens.shape[0]);
    model->vocab = (int32_t)embedding->tokens.shape[0];
    model->store.parameters += mp_tensor_items(&embedding->tokens);
    /* a model with disentangled attention need not have a position table */
    if (model->flags & MP_ENCODER_LEARNED_POSITIONS ||
        (model->flags & MP_ENCODER_DISENTANGLED && mp_weights_has(weights, "position_embd.weight"))) {
        MP_TRY(mp_weights_get(weights, "position_embd.weight", 2, positions, &embedding->positions, error));
        model->store.parameters += mp_tensor_items(&embedding->positions);
    }
    /* GGUF files may omit the token-type table if it was folded into the other embeddings */
    if (model->flags & MP_ENCODER_TOKEN_TYPES && mp_weights_has(weights, "token_types.weight")) {
        mp_tensor types;
        MP_TRY(mp_weights_get(weights, "token_types.weight", 2, any, &types, error));
        model->token_types = types.shape[0] > 1 ? 2 : 1;
        size_t bytes = (size_t)model->token_types * (size_t)n * sizeof(float);
        embedding->types = mp_alloc(bytes, MP_TAG_WEIGHTS);
        if (!embedding->types)
            return mp_fail_memory(error, bytes, "the token types");
        for (int32_t t = 0; t < model->token_types; t++)
            mp_dequantize_row(types.dtype, mp_tensor_row(&types, t), n, embedding->types + (int64_t)t * n);
        model->store.parameters += mp_tensor_items(&types);
        type_rows = types.shape[0];
    }
    MP_TRY(mp_adapters_add_embedding(&model->adapters, weights, embedding, type_rows, model->token_types, budget,
                                     &model->charged, error));
    const bool post_norm = model->flags & MP_ENCODER_POST_NORM;
    const bool after = mp_weights_has(weights, "token_embd_proj_norm.weight");
    MP_TRY(read_norm(model, builder, &embedding->norm, "token_embd_norm", n, post_norm && !after, error));
    if (after)
        MP_TRY(read_norm(model, builder, &model->projected_norm, "token_embd_proj_norm", model->hidden, true, error));
    if (mp_spec_find(mp_weights_spec(weights), "mpool.embedding_size"))
        MP_TRY(mp_builder_linear(builder, &model->projection, "token_embd_proj.weight",
                                 mp_weights_has(weights, "token_embd_proj.bias") ? "token_embd_proj.bias" : NULL,
                                 model->hidden, n, error));
    return post_norm ? MP_OK
                     : read_norm(model, builder, &model->output_norm, "output_norm", model->hidden, true, error);
}

/* Read the convolution of a layer, if it `has` one. */
static mp_status read_conv(const mp_encoder *model, const mp_builder *builder, mp_encoder_conv *conv, int index,
                           bool *has, mp_error *error) {
    char kernel[64], bias[64];
    snprintf(kernel, sizeof kernel, "blk.%d.shortconv.conv.weight", index);
    snprintf(bias, sizeof bias, "blk.%d.shortconv.conv.bias", index);
    *has = model->taps > 0 && mp_weights_has(model->weights, kernel);
    if (!*has)
        return MP_OK;
    MP_TRY(mp_builder_taps(builder, &conv->kernel, kernel, model->hidden, model->taps, error));
    return mp_weights_has(model->weights, bias) ? mp_builder_vector(builder, &conv->bias, bias, model->hidden, error)
                                                : MP_OK;
}

static mp_status read_linears(mp_encoder *model, const mp_builder *builder, mp_transformer_layer *layer, int index,
                              bool conv, mp_error *error) {
    mp_mlp *mlp = &layer->ffn.mlp;
    const int32_t hidden = model->hidden, ffn = model->ffn, q = conv ? 0 : model->q_width;
    const int32_t kv = conv ? 0 : model->kv_width;
    const bool gated = model->flags & MP_ENCODER_GATED, dense = layer->ffn.ops == &mp_ffn_dense;
    const struct {
        const char *name;
        mp_linear *linear;
        int32_t N, K;
    } linears[] = {{"shortconv.in_proj", &layer->qkv, conv ? 3 * hidden : 0, hidden},
                   {"shortconv.out_proj", &layer->out, conv ? hidden : 0, hidden},
                   {"attn_q", &layer->qkv, q, hidden},
                   {"attn_k", &layer->qkv, kv, hidden},
                   {"attn_v", &layer->qkv, kv, hidden},
                   {"attn_output", &layer->out, conv ? 0 : hidden, q},
                   {"ffn_gate", &mlp->up, gated && dense ? ffn : 0, hidden},
                   {"ffn_up", &mlp->up, dense ? ffn : 0, hidden},
                   {"ffn_down", &mlp->down, dense ? hidden : 0, ffn}};
    char name[64], bias[64];
    mlp->ffn = ffn;
    mlp->gated = gated;
    mlp->act = model->act;
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        if (linears[i].N == 0)
            continue;
        snprintf(name, sizeof name, "blk.%d.%s.weight", index, linears[i].name);
        snprintf(bias, sizeof bias, "blk.%d.%s.bias", index, linears[i].name);
        const bool biased = model->flags & MP_ENCODER_BIAS || mp_weights_has(model->weights, bias);
        MP_TRY(mp_builder_linear(builder, linears[i].linear, name, biased ? bias : NULL, linears[i].N, linears[i].K,
                                 error));
        /* Disentangled attention computes tables from the query and key weights, which adapters cannot update. */
        if (i > 3 || !(model->flags & MP_ENCODER_DISENTANGLED))
            MP_TRY(mp_adapters_add(&model->adapters, builder, linears[i].linear, name, error));
    }
    return MP_OK;
}

/* Choose the kind of a layer's feed-forward network, and read its experts, if it has any: they have no gates, and one
 * bias for all experts together. */
static mp_status read_ffn(mp_encoder *model, const mp_builder *builder, mp_ffn *ffn, int index, mp_error *error) {
    char bias[64];
    const bool has_experts = model->experts > 0 && index % model->experts_every == 1;
    ffn->ops = has_experts ? &mp_ffn_experts : &mp_ffn_dense;
    if (!has_experts)
        return MP_OK;
    if (model->flags & MP_ENCODER_OUTPUT_NORMS)
        return mp_fail(error, MP_UNSUPPORTED, "layer %d has experts and a norm of their output, which mpool does not "
                       "support together", index);
    snprintf(bias, sizeof bias, "blk.%d.ffn_exps.bias", index);
    const mp_experts_shape shape = {
        .layer = index,
        .count = model->experts,
        .used = model->experts_used,
        .hidden = model->hidden,
        .ffn = model->ffn,
        .routing = model->routing,
        .plain = true,
        .output_bias = mp_weights_has(model->weights, bias),
        .act = model->act,
    };
    return mp_experts_init(&ffn->experts, &shape, builder, error);
}

static mp_status read_layer(mp_encoder *model, const mp_builder *builder, int index, mp_error *error) {
    mp_encoder_layer *whole = &model->layers[index];
    mp_transformer_layer *layer = &whole->base;
    const uint32_t flags = model->flags;
    const bool post_norm = flags & MP_ENCODER_POST_NORM;
    bool conv;
    MP_TRY(read_conv(model, builder, &whole->conv, index, &conv, error));
    const bool heads = flags & MP_ENCODER_HEAD_NORMS && !conv, queries = flags & MP_ENCODER_QUERY_NORMS;
    const bool outputs = flags & MP_ENCODER_OUTPUT_NORMS;
    /* ModernBERT: the norm of the embeddings is the first layer's. */
    const bool has_norm_before = index == 0 && mp_weights_has(model->weights, "token_embd_norm.weight");
    const struct {
        const char *name;
        mp_norm *norm;
        int32_t n;
        bool wanted, needed;
    } norms[] = {{post_norm ? "attn_output_norm" : "attn_norm", &layer->attention_norm, model->hidden, true,
                  post_norm || !has_norm_before},
                 {post_norm ? "layer_output_norm" : "ffn_norm", &layer->ffn_norm, model->hidden, true, true},
                 {"attn_q_norm", &layer->q_norm, model->attention.head_dim, heads, true},
                 {"attn_k_norm", &layer->k_norm, model->attention.head_dim, heads, true},
                 {"attn_q_norm", &layer->q_norm, model->q_width, queries, true},
                 {"attn_k_norm", &layer->k_norm, model->kv_width, queries, true},
                 {"attn_norm_2", &whole->input_norm, model->hidden, flags & MP_ENCODER_INPUT_TWICE, true},
                 {"post_attention_norm", &layer->attention_after, model->hidden, outputs, true},
                 {"post_ffw_norm", &layer->ffn_after, model->hidden, outputs, true}};
    MP_TRY(read_ffn(model, builder, &layer->ffn, index, error));
    MP_TRY(read_linears(model, builder, layer, index, conv, error));
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.%s", index, norms[i].name);
        if (norms[i].wanted)
            MP_TRY(read_norm(model, builder, norms[i].norm, name, norms[i].n, norms[i].needed, error));
    }
    return MP_OK;
}

/* Make the table of position biases by distance, for families that have one. */
static mp_status make_position_bias(mp_encoder *model, mp_budget *budget, mp_error *error) {
    enum { FARTHEST = 128 };
    mp_attention *shape = &model->attention;
    if (!(model->flags & (MP_ENCODER_RELATIVE_BIAS | MP_ENCODER_ALIBI)))
        return MP_OK;
    const uint64_t bytes = (uint64_t)shape->heads * (2 * (uint64_t)model->context - 1) * sizeof(float);
    const int64_t any[2] = {-1, shape->heads};
    mp_tensor table = {0};
    if (model->flags & MP_ENCODER_RELATIVE_BIAS)
        MP_TRY(mp_weights_get(model->weights, "attn_rel_b.weight", 2, any, &table, error));
    if (shape->heads > MAX_HEADS || (table.data && (table.shape[0] < 4 || table.shape[0] > 4096)))
        return mp_fail_file(error, MP_LIMIT, mp_spec_origin(mp_weights_spec(model->weights)), -1, "attn_rel_b.weight",
                            "4 to 4,096 buckets and at most 1,024 heads", "%lld", (long long)table.shape[0]);
    if (!mp_budget_take(budget, bytes))
        return mp_fail_memory(error, bytes, "the table of distances");
    model->charged += bytes;
    if (!(model->position_bias = mp_alloc(bytes, MP_TAG_WEIGHTS)))
        return mp_fail_memory(error, bytes, "the table of distances");
    shape->bias = model->position_bias;
    shape->bias_length = model->context;
    if (table.data)
        return mp_attention_bias_learned(&table, shape->heads, model->context, FARTHEST, model->position_bias, error);
    mp_attention_bias_slopes(shape->heads, model->context, model->position_bias);
    return MP_OK;
}

/* Choose the fastest compute type whose vectors of sentences keep a cosine of 0.9999 to fp32: bf16 where the CPU has
 * bf16 products, else fp32. int8 does not reach it; docs/models/formats.md has the measured values. Quantised weights
 * are dequantised first. Pre-norm models never norm the residual stream, so rounding accumulates: seeded networks of 22
 * such layers reached 0.9993. Pre-norm models with more than FEW_LAYERS layers are therefore computed in fp32 if their
 * weights are stored in fp32; the others were trained in 16 bits. */
static mp_compute compute_type_for(mp_compute asked, const mp_spec *spec) {
    enum { FEW_LAYERS = 12 };
    char deepest[64];
    if (asked != MP_COMPUTE_AUTO)
        return asked;
    snprintf(deepest, sizeof deepest, "blk.%d.ffn_norm.weight", FEW_LAYERS); /* exists only in pre-norm layers */
    if (mp_spec_find_tensor(spec, deepest)) {
        const mp_tensor_entry *up = mp_spec_find_tensor(spec, "blk.0.ffn_up.weight");
        if (up && up->dtype == MP_F32)
            return MP_COMPUTE_F32;
    }
    return mp_resolve_compute(asked);
}

mp_status mp_encoder_load(const mp_load_args *args, mp_model **out, mp_error *error) {
    mp_status status;
    mp_builder builder;
    mp_encoder *model = mp_alloc_zeroed(sizeof *model, MP_TAG_WEIGHTS);
    if (!model)
        return mp_fail_memory(error, sizeof *model, "a model");
    mp_encoder *const loaded = model;
    model->base.base.ops = &encoder_ops;
    mp_progress_set(args->progress, "mapping", 0);
    MP_TRY_GOTO(mp_weights_open(args->spec, &model->weights, error));
    model->flags = args->flags;
    model->budget = args->budget;
    MP_TRY_GOTO(mp_recent_init(&model->recent, args->budget, error));
    model->token_types = 1;
    MP_TRY_GOTO(read_hyper(model, args->spec, error));
    MP_TRY_GOTO(mp_adapters_open(&model->adapters, args->spec, error));
    MP_TRY_GOTO(mp_weights_check_biases(model->weights, "blk.", model->layer_count, error));
    MP_TRY_GOTO(read_ropes(model, args->spec, error));
    mp_compute compute = compute_type_for(args->compute, args->spec);
    model->compute = model->attention.compute = compute;
    mp_builder_init(&builder, &model->store, model->weights, compute);
    builder.shared = args->shared;
    MP_TRY_GOTO(mp_builder_read_use(&builder, error));
    if (model->experts > 0)
        MP_TRY_GOTO(mp_experts_keep(&builder, error));
    MP_TRY_GOTO(read_embeddings(model, &builder, args->budget, error));
    model->layers = mp_alloc_array((size_t)model->layer_count, sizeof *model->layers, MP_TAG_WEIGHTS);
    if (!model->layers) {
        status = mp_fail_memory(error, (uint64_t)model->layer_count * sizeof *model->layers, "the layers");
        goto cleanup;
    }
    mp_builder layers = builder;
    layers.unpacked = MP_UNPACKED_ENCODER;
    for (int i = 0; i < model->layer_count; i++)
        MP_TRY_GOTO(read_layer(model, &layers, i, error));
    MP_TRY_GOTO(mp_adapters_check(&model->adapters, args->spec, error));
    MP_TRY_GOTO(read_windows(model, args->spec, error));
    if (model->flags & MP_ENCODER_LATENTS)
        MP_TRY_GOTO(mp_latent_attention_init(&model->latent, &builder, model->hidden,
                                             args->shared && args->shared->data, args->lease, args->budget,
                                             args->progress, error));
    MP_TRY_GOTO(mp_head_init(&model->head, &builder, model->hidden, error));
    MP_TRY_GOTO(mp_spec_bool(args->spec, "mpool.pooled", &(bool){true}, &model->pooled, error));
    MP_TRY_GOTO(mp_row_head_init(&model->row_head, &builder, model->hidden, error));
    MP_TRY_GOTO(mp_sparse_head_init(&model->sparse_head, &builder, model->hidden, model->vocab, error));
    MP_TRY_GOTO(mp_builder_finish(&builder, args->lease, args->budget, args->progress, error));
    for (int i = 0; i < model->layer_count && model->store.keeps_experts && builder.use == MP_WEIGHTS_PACKED; i++)
        if (model->layers[i].base.ffn.ops == &mp_ffn_experts) {
            mp_experts_pack(&model->layers[i].base.ffn.experts, args->lease, args->budget);
            mp_progress_part(args->progress, "packing", (uint64_t)i + 1, (uint64_t)model->layer_count);
        }
    MP_TRY_GOTO(mp_weights_check_poisoned(model->weights, error));
    MP_TRY_GOTO(make_position_bias(model, args->budget, error));
    if (model->flags & MP_ENCODER_DISENTANGLED)
        MP_TRY_GOTO(mp_encoder_read_relative(model, args->lease, args->budget, args->progress, &model->store.parameters,
                                             error));
    /* a pass may use the weights of a layer several times: see `order` */
    const uint64_t each = (uint64_t)model->store.parameters / (uint64_t)model->layer_count;
    atomic_init(&model->token_ns, each * (uint64_t)model->depth / 64 + 100);
    model->base.speed[0] = &model->token_ns;
    model->base.facts = (mp_model_facts){
        .compute = mp_compute_name(compute),
        .context_length = model->context,
        .vocab = model->vocab,
        .hidden_size = model->hidden,
        .layers = model->depth,
        .output_size = model->pooled ? model->head.width : 0,
        .parameters = model->store.parameters,
        .weight_bytes = (int64_t)(model->store.slab_bytes + model->store.mapped_bytes),
    };
    mp_weight_store_facts(&model->store, &model->base);
    *out = &model->base.base;
    model = NULL;
cleanup:
    mp_latent_attention_free_unpacked(&loaded->latent, args->budget);
    encoder_destroy((mp_model *)model);
    return status;
}

static bool is_layer_matrix(const mp_spec *spec, const mp_tensor_entry *entry) {
    (void)spec;
    return strncmp(entry->name, "blk.", 4) == 0 && !strstr(entry->name, ".ffn_gate_inp.") &&
           !strstr(entry->name, ".attn_pos_") && !strstr(entry->name, ".shortconv.conv.") &&
           !mp_expert_owns(entry->name) && mp_adapter_footprint(entry) == 0;
}

mp_matrices mp_encoder_predict_weights(const mp_spec *spec, mp_compute compute) {
    return mp_weights_predict(spec, compute_type_for(compute, spec), MP_UNPACKED_ENCODER, is_layer_matrix);
}

/* Name of the matrix that the sparse head packs; "" if there is none. */
static const char *sparse_output(const mp_spec *spec) {
    const char *kind;
    mp_error error;
    if (mp_spec_string(spec, "mpool.sparse", "", &kind, &error) != MP_OK || strcmp(kind, "vocabulary") != 0)
        return "";
    return mp_spec_find_tensor(spec, "sparse_output.weight") ? "sparse_output.weight" : "token_embd.weight";
}

void mp_encoder_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes) {
    compute = compute_type_for(compute, spec);
    int64_t per_weight_x4 = compute == MP_COMPUTE_BF16 ? 8 : compute == MP_COMPUTE_I8 ? 4 : 16;
    uint64_t bytes = mp_encoder_relative_bytes(spec);
    const mp_weights_use use = mp_weights_use_or_auto(spec);
    mp_error error;
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        bytes += mp_adapter_footprint(entry);
        int64_t items = 1;
        for (int d = 0; d < entry->ndim; d++)
            if (__builtin_mul_overflow(items, entry->shape[d], &items))
                items = INT64_MAX / 64;
        if (strncmp(entry->name, "latent.to_", 10) == 0)
            continue; /* only the products of these tensors are packed */
        if (mp_expert_owns(entry->name))
            continue; /* experts stay in the file */
        if (strstr(entry->name, ".attn_pos_"))
            continue; /* only their products with the table of distances are kept */
        if (use == MP_WEIGHTS_MAPPED && entry->ndim == 2 && is_layer_matrix(spec, entry))
            continue; /* linear layers are never packed; routers are */
        if (strncmp(entry->name, "blk.", 4) == 0 || strncmp(entry->name, "latent.ffn_", 11) == 0 ||
            strcmp(entry->name, "token_embd_proj.weight") == 0)
            bytes += (uint64_t)(items / 4 * per_weight_x4);
        else if (strncmp(entry->name, "dense.", 6) == 0 || strncmp(entry->name, "rows.", 5) == 0 ||
                 strncmp(entry->name, "sparse.", 7) == 0)
            bytes += (uint64_t)items * sizeof(float);
        else if (use != MP_WEIGHTS_MAPPED && strcmp(entry->name, sparse_output(spec)) == 0)
            bytes += (uint64_t)(items / 4 * per_weight_x4);
    }
    int64_t heads, count, hidden, zero = 0;
    if (mp_spec_int(spec, "mpool.latent_heads", 0, 256, &zero, &heads, &error) == MP_OK &&
        mp_spec_int(spec, "mpool.latent_count", 0, 8192, &zero, &count, &error) == MP_OK &&
        mp_spec_int(spec, "{arch}.embedding_length", 0, MAX_WIDTH, &zero, &hidden, &error) == MP_OK)
        bytes += (uint64_t)(heads * count * hidden / 2 * per_weight_x4); /* two products */
    *model_bytes = bytes + MP_WMAT_SLACK;
    *engine_bytes = mp_first_request_bytes(spec);
}
