/* nn/mlp.h: the residual sum that the halves of a layer add to, and the feed-forward half, plain or gated. */
#ifndef MP_MODELS_NN_MLP_H
#define MP_MODELS_NN_MLP_H

#include "models/nn/norm.h"
#include "models/nn/row_context.h"

typedef struct mp_mlp {
    mp_linear up, down; /* up: [ffn] outputs; gated: gate and up side by side, [2 ffn] */
    int32_t ffn;
    bool gated;
    mp_act act;
} mp_mlp;

/* The sum that a half of a layer adds its output to: normed or scaled first, or as it is. */
typedef struct mp_residual {
    float *x;             /* [M, n] the sum */
    int32_t n;
    const mp_norm *after; /* the output is normed first; NULL, or without a weight: it is not */
    const float *scale;   /* [n] the output is scaled by component first, or NULL; not beside a norm */
    float *scratch;       /* [M, n] for the output, where it is normed or scaled */
} mp_residual;

/* sum += linear(in [M, ld]). in NULL: of the activations in `prepared` (mp_linear_into). Ends WITHOUT a barrier; there
 * is one inside where the output is normed or scaled. */
bool mp_residual_add(const mp_row_context *context, const mp_linear *linear, const float *in, int64_t ld, int M,
                     void *prepared, const mp_residual *residual);

static inline int32_t mp_mlp_width(const mp_mlp *mlp) { return mlp->gated ? 2 * mlp->ffn : mlp->ffn; }
/* Shared scratch between the two products, for M rows. */
size_t mp_mlp_scratch(const mp_mlp *mlp, int M);
/* sum += down(act(up(in))), or down(act(gate(in)) * up(in)). in [M, ld] is complete; inner: mp_mlp_scratch. Ends
 * WITHOUT a barrier. */
bool mp_mlp_forward(const mp_row_context *context, const mp_mlp *mlp, const float *in, int64_t ld, int M, void *inner,
                    const mp_residual *residual);

#endif
