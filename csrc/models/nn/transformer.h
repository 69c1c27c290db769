/* nn/transformer.h: one transformer layer over complete sequences, shared by text encoders, image transformers and the
 * text encoders of image generation. A network runs a whole layer, or its parts one by one if it stops inside a layer,
 * norms a sum instead of a sublayer's input, or rotates heads. */
#ifndef MP_MODELS_NN_TRANSFORMER_H
#define MP_MODELS_NN_TRANSFORMER_H

#include "models/nn/attention.h"
#include "models/nn/ffn.h"

typedef struct mp_transformer_layer {
    mp_linear qkv, out;               /* queries, keys and values side by side; the output projection of attention */
    mp_ffn ffn;
    mp_norm attention_norm, ffn_norm;   /* [hidden] norm of each sublayer's input; skipped if it has no weight */
    mp_norm attention_after, ffn_after; /* [hidden] norm of each sublayer's output */
    float *attention_scale, *ffn_scale; /* [hidden] factor per component of each sublayer's output, or NULL */
    mp_norm q_norm, k_norm;             /* applied to queries and to keys */
    int32_t window;                     /* as in mp_attn_full */
} mp_transformer_layer;

typedef struct mp_transformer_rows { /* a range of M rows; the threads share all arrays */
    int M;
    int32_t hidden;
    int64_t row0; /* index of the first row in the pass; read only if the context has wanted rows */
    float *x;     /* [M, hidden] the residual sum */
    float *mixed; /* [M, hidden] normed rows; [M, ld_mixed] output of attention */
    int64_t ld_mixed; /* >= hidden for mp_transformer_forward */
    float *qkv; /* [M, ld_qkv]; also [M, hidden], the output of a sublayer that is normed or scaled */
    int64_t ld_qkv;
    void *inner;  /* shared scratch of `ffn` */
    void *own;    /* scratch of the thread for `ffn`, or NULL if it is plain or gated */
} mp_transformer_rows;

/* Raises the scratch to what the layer needs for M rows, without its attention. */
void mp_transformer_needs(const mp_transformer_layer *layer, int M, mp_block_needs *needs);

/* Returns the input rows of a sublayer: normed in `mixed`, after a barrier, or x itself if there is no norm. Returns
 * NULL if the step is over. */
const float *mp_transformer_normed(const mp_row_context *context, const mp_norm *norm,
                                   const mp_transformer_rows *rows);
/* Returns the residual sum together with the norm or scale of the sublayer's output. */
mp_residual mp_transformer_residual(const mp_transformer_rows *rows, const mp_norm *after, const float *scale);

/* ---- the last layer ---------------------------------------------------------------------------------------------- */
/* Often only few rows of the last layer's result are read, for example the first row of each sequence. For these wanted
 * rows, the layer needs the keys and values of all rows, but everything else of the wanted rows only. With `wanted` in
 * the context, the first part of a layer computes all keys and values and the wanted queries, and the second part
 * computes the wanted rows. mp_transformer_keep then moves the wanted rows together, and the third part takes the rows
 * that it returns. If rows have adapters, the context's `adapters` must then be its `wanted_adapters`. */

/* Moves the wanted rows of x and mixed to the first rows, in order, and returns these. `rows`: all rows of the pass,
 * complete (after a barrier). Ends with a barrier. */
mp_transformer_rows mp_transformer_keep(const mp_row_context *context, const mp_transformer_rows *rows);
/* Moves the wanted rows of another array [M, width] in the same way. No barrier. */
void mp_transformer_keep_also(const mp_row_context *context, const mp_transformer_rows *rows, int64_t width,
                              float *array);

/* ---- layers ------------------------------------------------------------------------------------------------------ */

/* Computes qkv, the queries, keys and values of `in` [M, hidden]: x, or the rows that mp_transformer_normed returned.
 * If the context has wanted rows, overwrites `mixed` and waits at up to four more barriers. Ends WITHOUT a barrier.
 * Returns false if the step is over. */
bool mp_transformer_project(const mp_row_context *context, const mp_transformer_layer *layer, const float *in,
                            const mp_transformer_rows *rows);
/* A pre-norm layer in three parts. Each part needs complete input (after a barrier) and ends WITHOUT a barrier. The
 * first and the last part accept any range of rows, and return false if the step is over. */
bool mp_transformer_before(const mp_row_context *context, const mp_transformer_layer *layer,
                           const mp_transformer_rows *rows); /* computes qkv from x */
void mp_transformer_attend(const mp_row_context *context, const mp_transformer_layer *layer,
                           const mp_attention *attention, const mp_transformer_rows *rows, int each,
                           void *scratch); /* computes mixed from qkv, for all rows of the context's sequences */
bool mp_transformer_after(const mp_row_context *context, const mp_transformer_layer *layer,
                          const mp_transformer_rows *rows); /* updates x from mixed */
/* The two halves of the last part, for layers that do more between them. Each ends WITHOUT a barrier. norm: of the
 * input of the feed-forward network, skipped if it has no weight. */
bool mp_transformer_add_mixed(const mp_row_context *context, const mp_transformer_layer *layer,
                              const mp_transformer_rows *rows);
bool mp_transformer_feed(const mp_row_context *context, const mp_transformer_layer *layer, const mp_norm *norm,
                         const mp_transformer_rows *rows);
/* Runs all three parts over all rows, the first and the last in ranges of at most `most` rows. The context must have no
 * wanted rows. `inner` and the context's `acts` are sized for `most`. each, scratch: as in mp_attention_forward. Ends
 * with a barrier. Returns false if the step is over. */
bool mp_transformer_forward(const mp_row_context *context, const mp_transformer_layer *layer,
                            const mp_attention *attention, const mp_transformer_rows *rows, int most, int each,
                            void *scratch);

#endif
