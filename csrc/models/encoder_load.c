/* encoder_load.c: an encoder from a spec: hyper-parameters, tensors, packed weights. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/cpu.h"
#include "models/encoder.h"

enum { MAX_LAYERS = 1024, MAX_WIDTH = 65536, MAX_CONTEXT = 1 << 20, MAX_VOCAB = 1 << 24 };

static void encoder_destroy(mp_model *base) {
    mp_encoder *model = (mp_encoder *)base;
    if (!model)
        return;
    mp_free(model->slab);
    mp_free(model->token_type);
    mp_free(model->layers);
    if (model->budget)
        mp_budget_give(model->budget, model->charged);
    mp_weights_close(model->weights);
    mp_free(model);
}

static bool encoder_healthy(const mp_model *base) {
    const mp_encoder *model = (const mp_encoder *)base;
    return !mp_weights_poisoned(model->weights) && mp_weights_unchanged(model->weights);
}

static uint64_t encoder_bytes(const mp_model *base) { return ((const mp_encoder *)base)->charged; }

static const mp_model_ops encoder_ops = {mp_encoder_engine, mp_encoder_check, encoder_healthy, encoder_bytes,
                                         encoder_destroy};

static mp_status read_hyper(mp_encoder *model, const mp_spec *spec, uint32_t flags, mp_error *error) {
    int64_t layers, hidden, heads, ffn, context;
    double eps;
    const char *act;
    MP_TRY(mp_spec_int_capped(spec, "{arch}.block_count", 1, MAX_LAYERS, NULL, &layers, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.embedding_length", 1, MAX_WIDTH, NULL, &hidden, error));
    MP_TRY(mp_spec_int(spec, "{arch}.attention.head_count", 1, hidden, NULL, &heads, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.feed_forward_length", 1, 16 * MAX_WIDTH, NULL, &ffn, error));
    MP_TRY(mp_spec_int_capped(spec, "{arch}.context_length", 1, MAX_CONTEXT, NULL, &context, error));
    MP_TRY(mp_spec_float(spec, "{arch}.attention.layer_norm_epsilon", 1e-30, 1, NULL, &eps, error));
    MP_TRY(mp_spec_string(spec, "mpool.activation", "gelu", &act, error));
    const char *file = mp_spec_file_count(spec) ? mp_spec_file(spec, 0) : "";
    if (hidden % heads || hidden / heads % 8)
        return mp_fail_file(error, MP_FORMAT, file, -1, "attention.head_count",
                            "a divisor of the width that leaves a head size divisible by 8", "%lld of width %lld",
                            (long long)heads, (long long)hidden);
    if (!(flags & MP_ARCH_POST_NORM))
        return mp_fail(error, MP_UNSUPPORTED, "encoders with norms before their layers are not supported yet");
    model->act = MP_ACT_NONE;
    if (strcmp(act, "gelu") == 0)
        model->act = MP_ACT_GELU;
    else if (strcmp(act, "gelu_tanh") == 0)
        model->act = MP_ACT_GELU_TANH;
    else if (strcmp(act, "relu") == 0)
        model->act = MP_ACT_RELU;
    else if (strcmp(act, "silu") == 0)
        model->act = MP_ACT_SILU;
    else
        return mp_fail_file(error, MP_FORMAT, file, -1, "mpool.activation", "gelu, gelu_tanh, relu, silu", "%s", act);
    model->layer_count = (int32_t)layers;
    model->hidden = (int32_t)hidden;
    model->heads = (int32_t)heads;
    model->head_dim = (int32_t)(hidden / heads);
    model->ffn = (int32_t)ffn;
    model->context = (int32_t)context;
    model->eps = (float)eps;
    return MP_OK;
}

static mp_status read_embeddings(mp_encoder *model, mp_builder *builder, uint32_t flags, mp_error *error) {
    const mp_weights *weights = model->weights;
    int64_t any[2] = {-1, model->hidden}, positions[2] = {model->context, model->hidden};
    MP_TRY(mp_weights_get(weights, "token_embd.weight", 2, any, &model->tokens, error));
    if (model->tokens.shape[0] > MAX_VOCAB)
        return mp_fail_file(error, MP_LIMIT, mp_spec_file(mp_weights_spec(weights), 0), -1, "token_embd.weight",
                            "at most 16,777,216 rows", "%lld", (long long)model->tokens.shape[0]);
    model->vocab = (int32_t)model->tokens.shape[0];
    builder->parameters += mp_tensor_items(&model->tokens);
    if (flags & MP_ARCH_LEARNED_POSITIONS) {
        MP_TRY(mp_weights_get(weights, "position_embd.weight", 2, positions, &model->positions, error));
        builder->parameters += mp_tensor_items(&model->positions);
    }
    /* GGUF files may leave the table out when it was folded into the others */
    if (flags & MP_ARCH_TOKEN_TYPES && mp_weights_has(weights, "token_types.weight")) {
        mp_tensor types;
        MP_TRY(mp_weights_get(weights, "token_types.weight", 2, any, &types, error));
        model->token_type = mp_alloc((size_t)model->hidden * sizeof(float), MP_TAG_WEIGHTS);
        if (!model->token_type)
            return mp_fail_memory(error, (uint64_t)model->hidden * sizeof(float), "the token types");
        mp_dequantize_row(types.dtype, types.data, model->hidden, model->token_type);
        builder->parameters += mp_tensor_items(&types);
    }
    MP_TRY(mp_builder_vector(builder, &model->norm, "token_embd_norm.weight", model->hidden, error));
    return mp_builder_vector(builder, &model->norm_bias, "token_embd_norm.bias", model->hidden, error);
}

static mp_status read_layer(mp_encoder *model, mp_builder *builder, int index, bool bias, mp_error *error) {
    mp_encoder_layer *layer = &model->layers[index];
    int32_t hidden = model->hidden, ffn = model->ffn;
    const struct {
        const char *name;
        mp_linear *linear;
        int32_t N, K;
    } linears[] = {{"attn_q", &layer->qkv, hidden, hidden}, {"attn_k", &layer->qkv, hidden, hidden},
                   {"attn_v", &layer->qkv, hidden, hidden}, {"attn_output", &layer->out, hidden, hidden},
                   {"ffn_up", &layer->up, ffn, hidden},     {"ffn_down", &layer->down, hidden, ffn}};
    const struct {
        const char *name;
        float **out;
    } vectors[] = {{"attn_output_norm.weight", &layer->attention_norm},
                   {"attn_output_norm.bias", &layer->attention_norm_bias},
                   {"layer_output_norm.weight", &layer->ffn_norm},
                   {"layer_output_norm.bias", &layer->ffn_norm_bias}};
    char name[64], bias_name[64];
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", index, linears[i].name);
        snprintf(bias_name, sizeof bias_name, "blk.%d.%s.bias", index, linears[i].name);
        MP_TRY(mp_builder_linear(builder, linears[i].linear, name, bias ? bias_name : NULL, linears[i].N, linears[i].K,
                                 error));
    }
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        snprintf(name, sizeof name, "blk.%d.%s", index, vectors[i].name);
        MP_TRY(mp_builder_vector(builder, vectors[i].out, name, hidden, error));
    }
    return MP_OK;
}

/* The fastest class whose vectors stay within a cosine of 0.9999 of fp32: bf16 (0.99996 at worst) where the CPU
 * multiplies it, else fp32. int8 stays within 0.995 only. Weights that are stored quantised are widened first. */
static mp_compute class_of(mp_compute asked) {
    if (asked != MP_COMPUTE_AUTO)
        return asked;
    return mp_cpu_features() & (MP_CPU_AVX512_BF16 | MP_CPU_ARM_BF16) ? MP_COMPUTE_BF16 : MP_COMPUTE_F32;
}

mp_status mp_encoder_load(const mp_load_args *args, mp_model **out, mp_error *error) {
    mp_status status;
    mp_builder builder = {0};
    mp_encoder *model = mp_alloc_zeroed(sizeof *model, MP_TAG_WEIGHTS);
    if (!model)
        return mp_fail_memory(error, sizeof *model, "a model");
    model->base.base.ops = &encoder_ops;
    mp_progress_set(args->progress, "mapping", 0);
    MP_TRY_GOTO(mp_weights_open(args->spec, &model->weights, error));
    MP_TRY_GOTO(read_hyper(model, args->spec, args->flags, error));
    mp_compute compute = class_of(args->compute);
    mp_builder_init(&builder, model->weights, compute);
    builder.shared = args->shared;
    MP_TRY_GOTO(read_embeddings(model, &builder, args->flags, error));
    model->layers = mp_alloc_array((size_t)model->layer_count, sizeof *model->layers, MP_TAG_WEIGHTS);
    if (!model->layers) {
        status = mp_fail_memory(error, (uint64_t)model->layer_count * sizeof *model->layers, "the layers");
        goto cleanup;
    }
    for (int i = 0; i < model->layer_count; i++)
        MP_TRY_GOTO(read_layer(model, &builder, i, (args->flags & MP_ARCH_BIAS) != 0, error));
    MP_TRY_GOTO(mp_head_init(&model->head, &builder, model->hidden, error));
    MP_TRY_GOTO(mp_builder_finish(&builder, args->lease, args->budget, args->progress, error));
    model->slab = builder.slab;
    model->charged = builder.charged;
    model->budget = args->budget;
    builder.slab = NULL;
    atomic_init(&model->token_ns, (uint64_t)builder.parameters / 64 + 100);
    model->base.speed[0] = &model->token_ns;
    static const char *const names[] = {"auto", "float32", "bfloat16", "int8"};
    model->base.facts = (mp_model_facts){
        .compute = names[compute],
        .context_length = model->context,
        .vocab = model->vocab,
        .hidden_size = model->hidden,
        .layers = model->layer_count,
        .output_size = model->head.width,
        .parameters = builder.parameters,
        .weight_bytes = (int64_t)builder.slab_bytes,
    };
    *out = &model->base.base;
    model = NULL;
cleanup:
    mp_builder_deinit(&builder);
    encoder_destroy((mp_model *)model);
    return status;
}

void mp_encoder_footprint(const mp_spec *spec, mp_compute compute, uint64_t *model_bytes, uint64_t *engine_bytes) {
    compute = class_of(compute);
    int64_t per_weight_x4 = compute == MP_COMPUTE_BF16 ? 8 : compute == MP_COMPUTE_I8 ? 4 : 16;
    uint64_t bytes = 0;
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        int64_t items = 1;
        for (int d = 0; d < entry->ndim; d++)
            if (__builtin_mul_overflow(items, entry->shape[d], &items))
                items = INT64_MAX / 64;
        if (strncmp(entry->name, "blk.", 4) == 0)
            bytes += (uint64_t)(items / 4 * per_weight_x4);
        else if (strncmp(entry->name, "dense.", 6) == 0)
            bytes += (uint64_t)items * sizeof(float);
    }
    *model_bytes = bytes;
    *engine_bytes = 16 << 20;
}
