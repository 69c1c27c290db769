/* encoder.c: the forward pass of encoders (BERT: Devlin et al., arXiv:1810.04805). */
#include "models/encoder.h"

#include <math.h>
#include <string.h>

size_t mp_encoder_group_scratch(const mp_encoder *model, int M) {
    size_t rows = (size_t)M, f = sizeof(float);
    size_t acts = 0;
    const mp_encoder_layer *layer = &model->layers[0];
    const mp_linear *linears[] = {&layer->qkv, &layer->out, &layer->up, &layer->down};
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        size_t need = mp_linear_scratch(linears[i], M);
        acts = need > acts ? need : acts;
    }
    return mp_arena_cost(rows * (size_t)model->hidden * f) + mp_arena_cost(rows * 3 * (size_t)model->hidden * f) +
           mp_arena_cost(rows * (size_t)model->hidden * f) + mp_arena_cost(rows * (size_t)model->ffn * f) + acts;
}

size_t mp_encoder_lane_scratch(const mp_encoder *model, int T) {
    size_t attention = mp_attn_full_scratch(T, model->head_dim);
    size_t head = mp_head_scratch(&model->head) * sizeof(float);
    size_t row = (size_t)model->hidden * sizeof(float);
    size_t most = attention > head ? attention : head;
    return mp_arena_cost(most > row ? most : row);
}

static void *take(uint8_t **at, size_t bytes) {
    void *piece = *at;
    *at += mp_arena_cost(bytes);
    return piece;
}

static void embed_row(const mp_encoder *model, int32_t id, int32_t position, float *scratch, float *x) {
    const mp_kernels *call = mp_kernels_get();
    int n = model->hidden;
    mp_dequantize_row(model->tokens.dtype, mp_tensor_row(&model->tokens, id), n, x);
    if (model->token_type)
        call->add(model->token_type, n, x);
    if (model->positions.data) {
        mp_dequantize_row(model->positions.dtype, mp_tensor_row(&model->positions, position), n, scratch);
        call->add(scratch, n, x);
    }
    call->layer_norm(x, model->norm, model->norm_bias, model->eps, n, x);
}

static void norm_rows(const mp_encoder *model, const mp_lane *lane, const float *weight, const float *bias, int M,
                      float *x) {
    const mp_kernels *call = mp_kernels_get();
    int64_t row0, row1;
    mp_lane_split(lane, M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++) {
        float *row = x + r * model->hidden;
        call->layer_norm(row, weight, bias, model->eps, model->hidden, row);
    }
}

/* One unit of work is a text and a head. */
static void attend(const mp_encoder *model, const mp_lane *lane, const mp_encoder_text *texts, int count,
                   const float *qkv, float *out, void *scratch) {
    const mp_kernels *call = mp_kernels_get();
    int64_t begin, end;
    mp_lane_split(lane, (int64_t)count * model->heads, 1, &begin, &end);
    for (int64_t unit = begin; unit < end; unit++) {
        const mp_encoder_text *text = &texts[unit / model->heads];
        int64_t column = unit % model->heads * model->head_dim;
        const float *q = qkv + (int64_t)text->row * 3 * model->hidden + column;
        mp_attn_full attention = {
            .q = q,
            .k = q + model->hidden,
            .v = q + 2 * model->hidden,
            .ld = 3 * model->hidden,
            .out = out + (int64_t)text->row * model->hidden + column,
            .ld_out = model->hidden,
            .T = text->n,
            .D = model->head_dim,
            .scale = 1 / sqrtf((float)model->head_dim),
        };
        call->attn_full(&attention, 0, text->n, scratch);
    }
}

static void finish_text(const mp_encoder *model, mp_encoder_text *text, const float *x, float *scratch) {
    const mp_kernels *call = mp_kernels_get();
    const float *rows = x + (int64_t)text->row * model->hidden;
    int64_t floats = text->dimensions;
    if (text->want_tokens) {
        floats = (int64_t)text->n * model->hidden;
        memcpy(text->out, rows, (size_t)floats * sizeof(float));
    } else {
        mp_head_apply(&model->head, rows, text->n, text->skip, text->dimensions, text->normalize, scratch, text->out);
    }
    text->finite = call->all_finite(text->out, floats);
}

void mp_encoder_forward(const mp_encoder *model, const mp_lane *lane, mp_encoder_text *texts, int count, int M,
                        void *group_scratch, void *lane_scratch) {
    uint8_t *at = group_scratch;
    size_t rows = (size_t)M * sizeof(float);
    float *x = take(&at, rows * (size_t)model->hidden);
    float *qkv = take(&at, rows * 3 * (size_t)model->hidden);
    float *mixed = take(&at, rows * (size_t)model->hidden);
    float *inner = take(&at, rows * (size_t)model->ffn);
    void *acts = at;

    int64_t row0, row1;
    mp_lane_split(lane, M, 1, &row0, &row1);
    for (int t = 0; t < count; t++)
        for (int32_t i = 0; i < texts[t].n; i++) {
            int64_t row = texts[t].row + i;
            if (row >= row0 && row < row1)
                embed_row(model, texts[t].ids[i], i, lane_scratch, x + row * model->hidden);
        }
    mp_lane_sync(lane);

    mp_epilogue plain = {0}, activate = {.act = model->act}, residual = {.residual = x, .ld_residual = model->hidden};
    for (int l = 0; l < model->layer_count; l++) {
        const mp_encoder_layer *layer = &model->layers[l];
        mp_linear_forward(&layer->qkv, lane, x, model->hidden, M, acts, NULL, NULL, &plain, qkv, 3 * model->hidden);
        mp_lane_sync(lane);
        attend(model, lane, texts, count, qkv, mixed, lane_scratch);
        mp_lane_sync(lane);
        mp_linear_forward(&layer->out, lane, mixed, model->hidden, M, acts, NULL, NULL, &residual, x, model->hidden);
        mp_lane_sync(lane);
        norm_rows(model, lane, layer->attention_norm, layer->attention_norm_bias, M, x);
        mp_lane_sync(lane);
        mp_linear_forward(&layer->up, lane, x, model->hidden, M, acts, NULL, NULL, &activate, inner, model->ffn);
        mp_lane_sync(lane);
        mp_linear_forward(&layer->down, lane, inner, model->ffn, M, acts, NULL, NULL, &residual, x, model->hidden);
        mp_lane_sync(lane);
        norm_rows(model, lane, layer->ffn_norm, layer->ffn_norm_bias, M, x);
        mp_lane_sync(lane);
    }

    int64_t text0, text1;
    mp_lane_split(lane, count, 1, &text0, &text1);
    for (int64_t t = text0; t < text1; t++)
        finish_text(model, &texts[t], x, lane_scratch);
    mp_lane_sync(lane);
}
