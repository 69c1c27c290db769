#include "models/nn/transformer.h"

size_t mp_transformer_acts(const mp_transformer_layer *layer, int M) {
    const mp_linear *const linears[] = {&layer->qkv, &layer->out, &layer->mlp.up, &layer->mlp.down};
    size_t most = 0;
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        const size_t need = mp_linear_scratch(linears[i], M);
        most = need > most ? need : most;
    }
    return most;
}

const float *mp_transformer_normed(const mp_row_context *context, const mp_norm *norm,
                                   const mp_transformer_rows *rows) {
    if (!norm->weight)
        return rows->x;
    mp_norm_rows(norm, context->thread, rows->M, rows->x, rows->hidden, rows->mixed, rows->hidden);
    return mp_row_meet(context) ? rows->mixed : NULL;
}

mp_residual mp_transformer_residual(const mp_transformer_rows *rows, const mp_norm *after, const float *scale) {
    return (mp_residual){.x = rows->x, .n = rows->hidden, .after = after, .scale = scale, .scratch = rows->qkv};
}

bool mp_transformer_before(const mp_row_context *context, const mp_transformer_layer *layer,
                           const mp_transformer_rows *rows) {
    const float *in = mp_transformer_normed(context, &layer->attention_norm, rows);
    if (in)
        mp_row_linear(context, &layer->qkv, in, rows->hidden, rows->M, NULL, rows->qkv, rows->ld_qkv);
    return in;
}

void mp_transformer_attend(const mp_row_context *context, const mp_transformer_layer *layer,
                           const mp_attention *attention, const mp_transformer_rows *rows, int each, void *scratch) {
    const int64_t q = (int64_t)attention->heads * attention->head_dim;
    const int64_t kv = (int64_t)attention->kv_heads * attention->head_dim;
    const mp_attention_rows heads = {.q = rows->qkv,
                                     .k = rows->qkv + q,
                                     .v = rows->qkv + q + kv,
                                     .ld = rows->ld_qkv,
                                     .out = rows->mixed,
                                     .ld_out = rows->ld_mixed};
    mp_attention_forward(context, attention, &heads, layer->window, each, scratch);
}

bool mp_transformer_after(const mp_row_context *context, const mp_transformer_layer *layer,
                          const mp_transformer_rows *rows) {
    mp_residual sum = mp_transformer_residual(rows, &layer->attention_after, layer->attention_scale);
    if (!mp_residual_add(context, &layer->out, rows->mixed, rows->ld_mixed, rows->M, NULL, &sum) ||
        !mp_row_meet(context))
        return false;
    sum = mp_transformer_residual(rows, &layer->ffn_after, layer->ffn_scale);
    const float *in = mp_transformer_normed(context, &layer->ffn_norm, rows);
    return in && mp_mlp_forward(context, &layer->mlp, in, rows->hidden, rows->M, rows->inner, &sum);
}

/* Returns at most `most` of the rows, from row0 on. */
static mp_transformer_rows range_of(const mp_transformer_rows *rows, int row0, int most) {
    mp_transformer_rows range = *rows;
    range.M = rows->M - row0 < most ? rows->M - row0 : most;
    range.x += (int64_t)row0 * rows->hidden;
    range.mixed += row0 * rows->ld_mixed;
    range.qkv += row0 * rows->ld_qkv;
    return range;
}

bool mp_transformer_forward(const mp_row_context *context, const mp_transformer_layer *layer,
                            const mp_attention *attention, const mp_transformer_rows *rows, int most, int each,
                            void *scratch) {
    for (int row0 = 0; row0 < rows->M; row0 += most) {
        const mp_transformer_rows range = range_of(rows, row0, most);
        if (!mp_transformer_before(context, layer, &range) || !mp_row_meet(context))
            return false;
    }
    mp_transformer_attend(context, layer, attention, rows, each, scratch);
    if (!mp_row_meet(context))
        return false;
    for (int row0 = 0; row0 < rows->M; row0 += most) {
        const mp_transformer_rows range = range_of(rows, row0, most);
        if (!mp_transformer_after(context, layer, &range) || !mp_row_meet(context))
            return false;
    }
    return true;
}
