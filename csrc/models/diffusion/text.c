/* text.c: the text encoders, CLIP's and T5's, one text at a time. */
#include <math.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "models/diffusion/diffusion.h"

/* ---- loading ----------------------------------------------------------------------------------------------------- */

mp_status mp_clip_build(const mp_diffusion *model, int which, int index, mp_builder *builder, mp_diff_block *block,
                        mp_error *error) {
    const mp_diff_encoder *e = &model->encoder[which];
    const char *stage = mp_diff_stage_name(which);
    char name[MP_BUILDER_NAME];
    if (index == e->layers) {
        mp_clip_end *end = &block->as.clip_end;
        snprintf(name, sizeof name, "%s.final_layer_norm.weight", stage);
        MP_TRY(mp_diff_vector(builder, &end->norm, name, e->hidden, error));
        snprintf(name, sizeof name, "%s.final_layer_norm.bias", stage);
        MP_TRY(mp_diff_vector(builder, &end->norm_bias, name, e->hidden, error));
        if (e->projection == 0)
            return MP_OK;
        snprintf(name, sizeof name, "%s.text_projection", stage);
        return mp_diff_linear(model, builder, &end->projection, name, e->projection, e->hidden, error);
    }
    mp_clip_layer *layer = &block->as.clip;
    const struct {
        const char *name;
        mp_linear *linear;
        int32_t N, K;
    } linears[] = {{"self_attn.q_proj", &layer->qkv, e->hidden, e->hidden},
                   {"self_attn.k_proj", &layer->qkv, e->hidden, e->hidden},
                   {"self_attn.v_proj", &layer->qkv, e->hidden, e->hidden},
                   {"self_attn.out_proj", &layer->out, e->hidden, e->hidden},
                   {"mlp.fc1", &layer->up, e->ffn, e->hidden},
                   {"mlp.fc2", &layer->down, e->hidden, e->ffn}};
    const struct {
        const char *name;
        float **out;
    } vectors[] = {{"layer_norm1.weight", &layer->attention_norm},
                   {"layer_norm1.bias", &layer->attention_norm_bias},
                   {"layer_norm2.weight", &layer->ffn_norm},
                   {"layer_norm2.bias", &layer->ffn_norm_bias}};
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        snprintf(name, sizeof name, "%s.layers.%d.%s", stage, index, linears[i].name);
        MP_TRY(mp_diff_linear(model, builder, linears[i].linear, name, linears[i].N, linears[i].K, error));
    }
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        snprintf(name, sizeof name, "%s.layers.%d.%s", stage, index, vectors[i].name);
        MP_TRY(mp_diff_vector(builder, vectors[i].out, name, e->hidden, error));
    }
    return MP_OK;
}

mp_status mp_t5_build(const mp_diffusion *model, int index, mp_builder *builder, mp_diff_block *block,
                      mp_error *error) {
    const mp_diff_encoder *e = &model->encoder[MP_DIFF_T5];
    char name[MP_BUILDER_NAME];
    if (index == e->layers)
        return mp_diff_vector(builder, &block->as.t5_norm, "t5.final_layer_norm.weight", e->hidden, error);
    mp_t5_layer *layer = &block->as.t5;
    int32_t width = e->heads * e->head_dim;
    const struct {
        const char *name;
        mp_linear *linear;
        int32_t N, K;
    } linears[] = {{"attn.q", &layer->qkv, width, e->hidden},     {"attn.k", &layer->qkv, width, e->hidden},
                   {"attn.v", &layer->qkv, width, e->hidden},     {"attn.o", &layer->out, e->hidden, width},
                   {"ffn.wi_0", &layer->gate_up, e->ffn, e->hidden}, {"ffn.wi_1", &layer->gate_up, e->ffn, e->hidden},
                   {"ffn.wo", &layer->down, e->hidden, e->ffn}};
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        snprintf(name, sizeof name, "t5.block.%d.%s", index, linears[i].name);
        MP_TRY(mp_diff_linear(model, builder, linears[i].linear, name, linears[i].N, linears[i].K, error));
    }
    snprintf(name, sizeof name, "t5.block.%d.attn_norm.weight", index);
    MP_TRY(mp_diff_vector(builder, &layer->attention_norm, name, e->hidden, error));
    snprintf(name, sizeof name, "t5.block.%d.ffn_norm.weight", index);
    return mp_diff_vector(builder, &layer->ffn_norm, name, e->hidden, error);
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

static size_t floats(int64_t rows, int64_t n) { return mp_arena_cost((size_t)(rows * n) * sizeof(float)); }

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

static void *take(uint8_t **at, size_t bytes) {
    void *piece = *at;
    *at += bytes;
    return piece;
}

/* The width of queries, and of all between a layer's first and last product. */
static int32_t inner_width(const mp_diff_encoder *e) { return e->heads * e->head_dim; }
static int32_t ffn_width(const mp_diff_encoder *e, int which) { return which == MP_DIFF_T5 ? 2 * e->ffn : e->ffn; }

size_t mp_diff_text_scratch(const mp_diffusion *model, int which, const mp_diff_block *block, int index, int32_t T) {
    const mp_diff_encoder *e = &model->encoder[which];
    if (index == e->layers)
        return which == MP_DIFF_T5 ? 0
                                   : floats(1, e->hidden) + mp_diff_linear_scratch(&block->as.clip_end.projection, 1);
    const mp_linear *linears[4] = {&block->as.clip.qkv, &block->as.clip.out, &block->as.clip.up, &block->as.clip.down};
    if (which == MP_DIFF_T5) {
        linears[0] = &block->as.t5.qkv;
        linears[1] = &block->as.t5.out;
        linears[2] = &block->as.t5.gate_up;
        linears[3] = &block->as.t5.down;
    }
    size_t acts = 0;
    for (int i = 0; i < 4; i++)
        acts = most(acts, mp_diff_linear_scratch(linears[i], T));
    return floats(T, most((size_t)e->hidden, (size_t)inner_width(e))) + floats(T, 3 * (int64_t)inner_width(e)) +
           floats(T, ffn_width(e, which)) + mp_arena_cost(acts);
}

size_t mp_diff_text_own(const mp_diffusion *model, int which, int32_t T) {
    const mp_diff_encoder *e = &model->encoder[which];
    return most(mp_diff_attention_scratch(T, e->head_dim, which == MP_DIFF_T5), floats(1, e->hidden));
}

static bool embed(mp_diff_lane *l, const mp_diff_text *text) {
    const mp_diff_encoder *e = text->encoder;
    const mp_kernels *call = mp_kernels_get();
    int64_t from, to;
    mp_lane_split(l->lane, text->T, 1, &from, &to);
    for (int64_t t = from; t < to; t++) {
        float *x = text->x + t * e->hidden;
        mp_dequantize_row(e->tokens.dtype, mp_tensor_row(&e->tokens, text->ids[t]), e->hidden, x);
        if (!e->positions.data)
            continue;
        mp_dequantize_row(e->positions.dtype, mp_tensor_row(&e->positions, t), e->hidden, (float *)l->own);
        call->add((const float *)l->own, e->hidden, x);
    }
    return mp_diff_meet(l);
}

static bool clip_layer(mp_diff_lane *l, const mp_diff_text *text, const mp_clip_layer *layer) {
    const mp_diff_encoder *e = text->encoder;
    const int32_t n = e->hidden, T = text->T;
    uint8_t *at = l->run->shared;
    float *normed = take(&at, floats(T, n)), *qkv = take(&at, floats(T, 3 * (int64_t)n));
    float *inner = take(&at, floats(T, e->ffn));
    void *acts = at;
    const mp_epilogue activate = {.act = e->act}, residual = {.residual = text->x, .ld_residual = n};
    const mp_diff_attention attention = {
        .q = qkv, .k = qkv + n, .v = qkv + 2 * n, .ld = 3 * (int64_t)n, .out = normed, .ld_out = n, .T = T,
        .heads = e->heads, .head_dim = e->head_dim, .scale = 1 / sqrtf((float)e->head_dim), .causal = true};
    return mp_diff_layer_norm(l, text->x, T, n, layer->attention_norm, layer->attention_norm_bias, e->eps, normed) &&
           mp_diff_forward(l, &layer->qkv, normed, n, T, NULL, acts, qkv, 3 * (int64_t)n) &&
           mp_diff_attend(l, &attention) &&
           mp_diff_forward(l, &layer->out, normed, n, T, &residual, acts, text->x, n) &&
           mp_diff_layer_norm(l, text->x, T, n, layer->ffn_norm, layer->ffn_norm_bias, e->eps, normed) &&
           mp_diff_forward(l, &layer->up, normed, n, T, &activate, acts, inner, e->ffn) &&
           mp_diff_forward(l, &layer->down, inner, e->ffn, T, &residual, acts, text->x, n);
}

static int32_t pooled_row(const mp_diff_text *text) {
    int32_t best = 0;
    for (int32_t t = 0; t < text->T; t++) {
        if (text->encoder->end < 0 ? text->ids[t] > text->ids[best] : text->ids[t] == text->encoder->end)
            best = t;
        if (text->encoder->end >= 0 && text->ids[t] == text->encoder->end)
            break;
    }
    return best;
}

static bool clip_end(mp_diff_lane *l, const mp_diff_text *text, const mp_clip_end *end) {
    const mp_diff_encoder *e = text->encoder;
    uint8_t *at = l->run->shared;
    float *normed = take(&at, floats(1, e->hidden));
    float *to = e->projection ? normed : text->pooled;
    if (l->lane->index == 0)
        mp_kernels_get()->layer_norm(text->x + (int64_t)pooled_row(text) * e->hidden, end->norm, end->norm_bias, e->eps,
                                     e->hidden, to);
    if (!mp_diff_meet(l))
        return false;
    return !e->projection ||
           mp_diff_forward(l, &end->projection, normed, e->hidden, 1, NULL, at, text->pooled, e->projection);
}

static bool rms_norm(mp_diff_lane *l, const float *x, int64_t M, const mp_diff_encoder *e, const float *weight,
                     float *y) {
    int64_t from, to;
    mp_lane_split(l->lane, M, 1, &from, &to);
    for (int64_t r = from; r < to; r++)
        mp_kernels_get()->rms_norm(x + r * e->hidden, weight, e->eps, e->hidden, y + r * e->hidden);
    return mp_diff_meet(l);
}

static bool t5_gate(mp_diff_lane *l, const mp_diff_encoder *e, int64_t T, float *inner) {
    int64_t from, to;
    mp_lane_split(l->lane, T, 1, &from, &to);
    for (int64_t r = from; r < to; r++) {
        float *row = inner + r * 2 * e->ffn;
        mp_kernels_get()->gated(e->act, row, row + e->ffn, e->ffn, row);
    }
    return mp_diff_meet(l);
}

static bool t5_layer(mp_diff_lane *l, const mp_diff_text *text, const mp_t5_layer *layer) {
    const mp_diff_encoder *e = text->encoder;
    const int32_t n = e->hidden, T = text->T, w = inner_width(e);
    uint8_t *at = l->run->shared;
    float *normed = take(&at, floats(T, n > w ? n : w)), *qkv = take(&at, floats(T, 3 * (int64_t)w));
    float *inner = take(&at, floats(T, 2 * (int64_t)e->ffn));
    void *acts = at;
    const mp_epilogue residual = {.residual = text->x, .ld_residual = n};
    const mp_diff_attention attention = {
        .q = qkv, .k = qkv + w, .v = qkv + 2 * w, .ld = 3 * (int64_t)w, .out = normed, .ld_out = w, .T = T,
        .heads = e->heads, .head_dim = e->head_dim, .scale = 1, .relative = e->relative, .buckets = e->buckets,
        .reach = e->reach};
    return rms_norm(l, text->x, T, e, layer->attention_norm, normed) &&
           mp_diff_forward(l, &layer->qkv, normed, n, T, NULL, acts, qkv, 3 * (int64_t)w) &&
           mp_diff_attend(l, &attention) &&
           mp_diff_forward(l, &layer->out, normed, w, T, &residual, acts, text->x, n) &&
           rms_norm(l, text->x, T, e, layer->ffn_norm, normed) &&
           mp_diff_forward(l, &layer->gate_up, normed, n, T, NULL, acts, inner, 2 * (int64_t)e->ffn) &&
           t5_gate(l, e, T, inner) &&
           mp_diff_forward(l, &layer->down, inner, 2 * (int64_t)e->ffn, T, &residual, acts, text->x, n);
}

bool mp_diff_text_forward(mp_diff_lane *l, const mp_diffusion *model, const mp_diff_text *text,
                          const mp_diff_block *block, int index) {
    (void)model;
    const mp_diff_encoder *e = text->encoder;
    if (index == 0 && !embed(l, text))
        return false;
    if (text->which == MP_DIFF_T5)
        return index < e->layers ? t5_layer(l, text, &block->as.t5)
                                 : rms_norm(l, text->x, text->T, e, block->as.t5_norm, text->x);
    if (index == e->layers)
        return clip_end(l, text, &block->as.clip_end);
    if (index == e->layers - 1 && l->lane->index == 0)
        memcpy(text->before, text->x, (size_t)text->T * (size_t)e->hidden * sizeof(float));
    if (index == e->layers - 1) /* the layer changes it */
        mp_lane_sync(l->lane);
    return clip_layer(l, text, &block->as.clip);
}
