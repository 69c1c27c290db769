/* nn/expert_matrix.h: one matrix of every expert of a layer, in the layout of its file. Loading copies nothing;
 * whenever an expert is used, its rows are converted to the form that kernels/pack.h takes, unless a packed copy of
 * them is kept (nn/weight_store.h). */
#ifndef MP_MODELS_NN_EXPERT_MATRIX_H
#define MP_MODELS_NN_EXPERT_MATRIX_H

#include "files/scaled_weights.h"
#include "models/nn/builder.h"

typedef enum mp_expert_layout {
    MP_EXPERT_ROWS,    /* [N, K], as linear layers store it */
    MP_EXPERT_COLUMNS, /* [K, N] of floats: transposed, as transformers saves the experts of GPT-OSS and Qwen3-VL */
    MP_EXPERT_CODES,   /* MXFP4 as OpenAI publishes it: 16 bytes for each block of 32 values, two neighbouring values in
                        * each byte; the scales of all blocks are a separate tensor */
    MP_EXPERT_SCALED,  /* a type of kernels/scaled.h */
} mp_expert_layout;

typedef struct mp_expert_matrix { /* `count` matrices [N, K] */
    mp_tensor *tensors;           /* [count] */
    mp_scaled *scaled;            /* [count] for MP_EXPERT_SCALED, otherwise NULL */
    mp_tensor scales;             /* for MP_EXPERT_CODES: [count, step N, K / 32] */
    mp_expert_layout layout;
    int32_t first, step; /* row n of the matrix is row (or column) first + step n of the tensor: gate and up rows may
                          * alternate, or the tensor has both halves */
    mp_tensor biases;             /* [count, step N] of floats, as stored; data NULL: no biases */
    mp_dtype dtype;               /* type of the rows that mp_expert_rows returns */
    mp_wkind kind;
    int32_t count, N, K;
    mp_panels *packed; /* NULL: no copies are kept. Owned by the weight store */
} mp_expert_matrix;

/* Finds matrix `part` (gate, up or down) of a layer's experts. The tensors are one of:
 *
 *   blk.{layer}.ffn_{part}_exps.weight [count, N, K]
 *   blk.{layer}.ffn_gate_up_exps.weight [count, 2 N, K]
 *   blk.{layer}.ffn_{part}.{expert}.weight [N, K], or .columns [K, N]: one tensor per expert
 *   .columns, or .codes with .scales, of ffn_{part}_exps or ffn_gate_up_exps, where gates and ups alternate
 *   .halves of ffn_gate_up_exps [count, K, 2 N], where the gates precede the ups
 *
 * If `biased`, finds the biases, .bias, too. The builder's weights must outlive the matrix. */
mp_status mp_expert_matrix_init(mp_expert_matrix *matrix, const mp_builder *builder, int layer, const char *part,
                                int32_t count, int32_t N, int32_t K, bool biased, mp_error *error);
void mp_expert_matrix_deinit(mp_expert_matrix *matrix);

/* Bytes of one expert's matrix in the file. */
uint64_t mp_expert_bytes(const mp_expert_matrix *matrix);
/* Bytes that mp_expert_rows may write to `to`. */
size_t mp_expert_rows_scratch(const mp_expert_matrix *matrix);
/* Returns rows [n0, n0 + n) of an expert's matrix, [n, K] of matrix->dtype; n <= MP_PANEL_N. The result points into the
 * file, or to `to` if the layout had to be converted. */
mp_tensor mp_expert_rows(const mp_expert_matrix *matrix, int expert, int32_t n0, int32_t n, uint8_t *to);
/* Writes the biases of rows [n0, n0 + n) of an expert's matrix to `to` [n]. The matrix must have biases. */
void mp_expert_biases(const mp_expert_matrix *matrix, int expert, int32_t n0, int32_t n, float *to);

/* Returns true for the name of an expert tensor, which stays in the file: the matrix of all experts
 * (blk.0.ffn_up_exps.weight) or of one (blk.0.ffn_up.1.weight), or their biases. */
bool mp_expert_owns(const char *name);

#endif
