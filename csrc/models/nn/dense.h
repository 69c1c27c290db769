/* nn/dense.h: small dense layers of heads, which are computed in fp32 from weights that are not packed: those after
 * pooling, those of single rows, and the transform before a sparse head. */
#ifndef MP_MODELS_NN_DENSE_H
#define MP_MODELS_NN_DENSE_H

#include "models/nn/builder.h"

enum { MP_MAX_DENSE = 8, MP_DENSE_ROWS = 64 };

typedef struct mp_dense {
    int32_t in, out;
    float *weight; /* [out, in], in the model's slab */
    float *bias;   /* [out] in the model's slab, or NULL */
    float *minus;  /* [out, in] or NULL: the product of the input with `minus` is subtracted from that with `weight` */
    mp_act act;
    bool leaky;      /* LeakyReLU of slope 0.01 in place of `act` */
    bool adds_input; /* the input is added after the activation, or its product with `residual` */
    float *residual; /* [out, in] or NULL; not NULL if in != out */
    float *norm, *norm_bias; /* [out] layer norm after the activation, or NULL; norm_bias may be NULL */
    float eps;
} mp_dense;

/* Layers in sequence. A zeroed chain is empty. */
typedef struct mp_dense_chain {
    int count;
    int32_t in, out; /* inputs of the first layer; outputs of the last one, `in` if there is none */
    mp_dense dense[MP_MAX_DENSE];
} mp_dense_chain;

/* Reads `mpool.<name>_count` layers (default 0): tensors <name>.I.weight, .bias, .minus, .residual, .norm.weight and
 * .norm.bias; keys mpool.<name>.I.activation, .adds_input and .norm_epsilon. The builder loads the tensors, so `chain`
 * must not move until it has finished. */
mp_status mp_dense_chain_init(mp_dense_chain *chain, const mp_builder *builder, const char *name, int32_t in,
                              mp_error *error);
/* Computes y [M, ldy] from x [M, ldx]. Call on one thread. The bits of a row do not depend on M. */
void mp_dense_rows(const mp_dense *dense, const float *x, int64_t ldx, int M, float *y, int64_t ldy);
/* Floats of scratch of one thread for mp_dense_chain_rows: 0 if the chain has at most one layer. */
size_t mp_dense_chain_scratch(const mp_dense_chain *chain);
/* Computes y [M, chain->out] from x [M, chain->in], MP_DENSE_ROWS rows at a time. Call on one thread. */
void mp_dense_chain_rows(const mp_dense_chain *chain, const float *x, int M, float *scratch, float *y);
/* Scales x [n] to length 1, as torch.nn.functional.normalize does: divides by max(length, 1e-12). NaN stays NaN. */
void mp_scale_to_length_1(float *x, int64_t n);

#endif
