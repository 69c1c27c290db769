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
    mp_norm_rows(norm, context->lane, rows->M, rows->x, rows->hidden, rows->mixed, rows->hidden);
    return mp_row_meet(context) ? rows->mixed : NULL;
}

mp_residual mp_transformer_residual(const mp_transformer_rows *rows, const mp_norm *after, const float *scale,
                                    float *scratch, int64_t ld_scratch) {
    return (mp_residual){.x = rows->x,
                         .n = rows->hidden,
                         .after = after,
                         .scale = scale,
                         .scratch = scratch,
                         .ld_scratch = ld_scratch};
}

bool mp_transformer_forward(const mp_row_context *context, const mp_transformer_layer *layer,
                            const mp_attention *attention, const mp_transformer_rows *rows, int each, void *scratch) {
    const int64_t q = (int64_t)attention->heads * attention->head_dim;
    const int64_t kv = (int64_t)attention->kv_heads * attention->head_dim;
    const mp_attention_rows heads = {.q = rows->qkv,
                                     .k = rows->qkv + q,
                                     .v = rows->qkv + q + kv,
                                     .ld = rows->ld_qkv,
                                     .out = rows->mixed,
                                     .ld_out = rows->ld_mixed};
    mp_residual sum = mp_transformer_residual(rows, &layer->attention_after, layer->attention_scale, rows->qkv,
                                              rows->ld_qkv);
    const float *in = mp_transformer_normed(context, &layer->attention_norm, rows);
    if (!in)
        return false;
    mp_row_linear(context, &layer->qkv, in, rows->hidden, rows->M, NULL, rows->qkv, rows->ld_qkv);
    if (!mp_row_meet(context))
        return false;
    mp_attention_forward(context, attention, &heads, layer->window, each, scratch);
    if (!mp_row_meet(context) ||
        !mp_residual_add(context, &layer->out, rows->mixed, rows->ld_mixed, rows->M, NULL, &sum) ||
        !mp_row_meet(context))
        return false;
    sum.after = &layer->ffn_after;
    sum.scale = layer->ffn_scale;
    in = mp_transformer_normed(context, &layer->ffn_norm, rows);
    return in && mp_mlp_forward(context, &layer->mlp, in, rows->hidden, rows->M, rows->inner, &sum) &&
           mp_row_meet(context);
}
