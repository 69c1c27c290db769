/* nn/expert_matrix.h: one matrix of every expert of a layer, where and how its file has it. Nothing is copied when it
 * is read; rows are made what kernels/pack.h takes when an expert is used. */
#ifndef MP_MODELS_NN_EXPERT_MATRIX_H
#define MP_MODELS_NN_EXPERT_MATRIX_H

#include "models/nn/linear.h"

typedef enum mp_expert_layout {
    MP_EXPERT_ROWS,    /* [N, K], as linear layers have it */
    MP_EXPERT_COLUMNS, /* [K, N] of floats: transposed, as transformers saves GPT-OSS's experts */
    MP_EXPERT_CODES,   /* MXFP4 as OpenAI publishes it: 16 bytes a block of 32, two neighbours in each, and the scales
                        * of all blocks in a tensor of their own */
} mp_expert_layout;

typedef struct mp_expert_matrix { /* [N, K] each */
    mp_tensor *tensors;           /* [count] */
    mp_tensor scales;             /* of MP_EXPERT_CODES: [count, step N, K / 32] */
    mp_expert_layout layout;
    int32_t first, step;          /* its row n is row first + step n of those in the tensor: gates and ups in turn */
    mp_tensor biases;             /* [count, step N] of floats, as stored; data NULL: none */
    mp_dtype dtype;               /* of rows as mp_expert_rows gives them */
    mp_wkind kind;
    int32_t count, N, K;
} mp_expert_matrix;

/* Finds the matrix `part` (gate, up or down) of a layer's experts: blk.{layer}.ffn_{part}_exps.weight [count, N, K], or
 * tensors of their own, blk.{layer}.ffn_{part}.{expert}.weight [N, K] or .columns [K, N], or .columns, or .codes with
 * .scales, of ffn_{part}_exps or of ffn_gate_up_exps; when biased, the biases, .bias. The builder's weights must
 * outlive it. */
mp_status mp_expert_matrix_init(mp_expert_matrix *matrix, mp_builder *builder, int layer, const char *part,
                                int32_t count, int32_t N, int32_t K, bool biased, mp_error *error);
void mp_expert_matrix_deinit(mp_expert_matrix *matrix);

/* Bytes of one expert's matrix in the file. */
uint64_t mp_expert_bytes(const mp_expert_matrix *matrix);
/* Bytes that mp_expert_rows may write. */
size_t mp_expert_rows_scratch(const mp_expert_matrix *matrix);
/* Rows [n0, n0 + n), n at most MP_PANEL_N, of an expert's matrix, [n, K] of matrix->dtype: where they stand in the
 * file, or written to `to`. */
mp_tensor mp_expert_rows(const mp_expert_matrix *matrix, int expert, int32_t n0, int32_t n, uint8_t *to);
/* Their biases; there are some. */
void mp_expert_biases(const mp_expert_matrix *matrix, int expert, int32_t n0, int32_t n, float *to);

/* Whether a tensor is a matrix of experts, blk.0.ffn_up_exps.weight, of one of them, blk.0.ffn_up.1.weight, or biases
 * of them all: what stays where it is. */
bool mp_expert_owns(const char *name);

#endif
