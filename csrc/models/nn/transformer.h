/* nn/transformer.h: one layer of a transformer whose sequences are all there. Text encoders, image transformers and the
 * text encoders of image generation are made of it. A network runs a layer as a whole, or part by part where it stops
 * inside a layer, norms a sum instead of a half's input, or rotates heads. */
#ifndef MP_MODELS_NN_TRANSFORMER_H
#define MP_MODELS_NN_TRANSFORMER_H

#include "models/nn/attention.h"
#include "models/nn/mlp.h"

typedef struct mp_transformer_layer {
    mp_linear qkv, out;               /* queries, keys and values side by side; attention's output projection */
    mp_mlp mlp;
    mp_norm attention_norm, ffn_norm;   /* [hidden] of each half's input; without a weight: as it is */
    mp_norm attention_after, ffn_after; /* [hidden] of what each half adds to the sum */
    float *attention_scale, *ffn_scale; /* [hidden] by component of the same, or NULL */
    mp_norm q_norm, k_norm;             /* of queries and keys */
    int32_t window;                     /* as of mp_attn_full */
} mp_transformer_layer;

typedef struct mp_transformer_rows { /* a range of M rows; everything is shared by the lanes */
    int M;
    int32_t hidden;
    float *x;     /* [M, hidden] the residual sum */
    float *mixed; /* normed rows, [M, hidden]; attention's output, [M, ld_mixed] */
    int64_t ld_mixed; /* mp_transformer_forward: not below hidden */
    float *qkv; /* [M, ld_qkv]; also [M, hidden] the output of a half, where that is normed or scaled */
    int64_t ld_qkv;
    void *inner; /* mp_mlp_scratch */
} mp_transformer_rows;

/* The larger of mp_linear_scratch of all products of the layer. */
size_t mp_transformer_acts(const mp_transformer_layer *layer, int M);

/* The rows that a half takes as its input: normed, in `mixed`, behind a barrier; or x itself, when there is no norm.
 * NULL: the step is over. */
const float *mp_transformer_normed(const mp_row_context *context, const mp_norm *norm,
                                   const mp_transformer_rows *rows);
/* The sum that a half adds to, with the norm or the scale of what it adds. */
mp_residual mp_transformer_residual(const mp_transformer_rows *rows, const mp_norm *after, const float *scale);

/* Layers whose norms stand before their halves, in three parts. Each begins with its input complete and ends WITHOUT a
 * barrier. False: the step is over. The first and the last take any range of rows. */
bool mp_transformer_before(const mp_row_context *context, const mp_transformer_layer *layer,
                           const mp_transformer_rows *rows); /* qkv of x */
void mp_transformer_attend(const mp_row_context *context, const mp_transformer_layer *layer,
                           const mp_attention *attention, const mp_transformer_rows *rows, int each,
                           void *scratch); /* mixed of qkv: all rows of the sequences of the context */
bool mp_transformer_after(const mp_row_context *context, const mp_transformer_layer *layer,
                          const mp_transformer_rows *rows); /* x of mixed */
/* All three over all rows, the first and the last in ranges of `most` rows. `inner` and the context's `acts` are sized
 * for `most`. each, scratch: as of mp_attention_forward. Ends with a barrier. */
bool mp_transformer_forward(const mp_row_context *context, const mp_transformer_layer *layer,
                            const mp_attention *attention, const mp_transformer_rows *rows, int most, int each,
                            void *scratch);

#endif
