/* nn/transformer.h: one layer of a transformer whose sequences are all there: text encoders, image transformers and
 * the text encoders of image generation are made of it. A network runs a layer as a whole (mp_transformer_forward), or
 * its two halves one by one, where it stops in the middle of a layer, norms after a sum, or rotates heads between. */
#ifndef MP_MODELS_NN_TRANSFORMER_H
#define MP_MODELS_NN_TRANSFORMER_H

#include "models/nn/attention.h"
#include "models/nn/mlp.h"

typedef struct mp_transformer_layer {
    mp_linear qkv, out;               /* queries, keys and values side by side; attention's output projection */
    mp_mlp mlp;
    mp_norm attention_norm, ffn_norm; /* [hidden] of each half's input; without a weight: as it is */
    mp_norm attention_after, ffn_after;  /* [hidden] of what each half adds to the sum */
    float *attention_scale, *ffn_scale;  /* [hidden] by component of the same, or NULL */
    mp_norm q_norm, k_norm;              /* of queries and keys */
    int32_t window;                      /* as of mp_attn_full */
} mp_transformer_layer;

typedef struct mp_transformer_rows { /* of one range of M rows, all shared by the lanes */
    int M;
    int32_t hidden;
    float *x;     /* [M, hidden] the residual sum */
    float *mixed; /* [M, >= hidden] normed rows; attention's output, [M, ld_mixed] */
    int64_t ld_mixed;
    float *qkv; /* [M, ld_qkv]; also the output of a half, where that is normed or scaled */
    int64_t ld_qkv;
    void *inner; /* mp_mlp_scratch */
} mp_transformer_rows;

/* The larger of mp_linear_scratch of all products of the layer. */
size_t mp_transformer_acts(const mp_transformer_layer *layer, int M);

/* The rows that a half takes as its input: normed, in `mixed`, behind a barrier; or x itself. NULL: the step is over. */
const float *mp_transformer_normed(const mp_row_context *context, const mp_norm *norm,
                                   const mp_transformer_rows *rows);
/* What a half of the layer adds to: the sum, with the layer's norm or scale of that half. `scratch` [M, ld_scratch] is
 * where the output stands until then. */
mp_residual mp_transformer_residual(const mp_transformer_rows *rows, const mp_norm *after, const float *scale,
                                    float *scratch, int64_t ld_scratch);
/* A whole layer whose norms stand before its halves and whose heads are not rotated. each, scratch: as of
 * mp_attention_forward. Begins with x complete and ends with a barrier. False: the step is over. */
bool mp_transformer_forward(const mp_row_context *context, const mp_transformer_layer *layer,
                            const mp_attention *attention, const mp_transformer_rows *rows, int each, void *scratch);

#endif
