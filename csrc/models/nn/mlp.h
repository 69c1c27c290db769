/* nn/mlp.h: the residual sum that the sublayers of a layer add to, and the feed-forward sublayer, plain or gated. */
#ifndef MP_MODELS_NN_MLP_H
#define MP_MODELS_NN_MLP_H

#include "models/nn/norm.h"
#include "models/nn/row_context.h"

typedef struct mp_mlp {
    mp_linear up, down; /* up: [ffn] outputs; gated: gate and up side by side, [2 ffn] */
    float *row_gate;    /* [inputs of up] each row's output is multiplied by sigmoid(row_gate . row); NULL: it is not.
                         * Not together with a bias of `down` */
    float sparse;       /* not 0: gates become max(gate - (mean + sparse * deviation), 0) before the activation, with
                         * the mean and the standard deviation of the row's gates */
    float gate_scale;   /* factor on gates before the activation; 0: none */
    int32_t ffn;
    int32_t inputs_from; /* has_inputs: activations are multiplied by the row's inputs [inputs_from, inputs_from + ffn)
                          * of the row context. Not together with gates */
    bool has_inputs, gated;
    mp_act act;
} mp_mlp;

/* The residual sum, and the norm or scale that is applied to a sublayer's output before the output is added. */
typedef struct mp_residual {
    float *x;             /* [M, n] the sum */
    int32_t n;
    const mp_norm *after; /* norm of the output; skipped if NULL or without a weight */
    const float *scale;   /* [n] factor per component of the output, or NULL; not together with `after` */
    const float *total;   /* [1] factor on the sum, or NULL; only together with `after` */
    float *scratch;       /* [M, n] holds the sublayer's output, if the output is normed or scaled */
} mp_residual;

/* Adds a normed output [n] to a row of the sum, and multiplies the row by `total`. */
void mp_residual_row(const mp_residual *residual, const float *out, int64_t row);
/* sum += linear(in [M, ld]). in NULL: uses the activations in `prepared` (mp_linear_into). Ends WITHOUT a barrier.
 * Waits at one more barrier inside if the output is normed or scaled. Returns false if the step is over. */
bool mp_residual_add(const mp_row_context *context, const mp_linear *linear, const float *in, int64_t ld, int M,
                     void *prepared, const mp_residual *residual);

static inline int32_t mp_mlp_width(const mp_mlp *mlp) { return mlp->gated ? 2 * mlp->ffn : mlp->ffn; }
/* Bytes of shared scratch for M rows of activations between the two linear layers: mp_mlp_scratch for mp_mlp_forward in
 * a context without `least_joined`, mp_mlp_most_scratch for all uses. mp_mlp_own_scratch: bytes of a thread. */
size_t mp_mlp_scratch(const mp_mlp *mlp, int M);
size_t mp_mlp_most_scratch(const mp_mlp *mlp, int M);
size_t mp_mlp_own_scratch(const mp_mlp *mlp);
/* sum += scale * down(act(up(in))), or scale * down(act(gate(in)) * up(in)). The factor, and that of `row_gate`, are
 * applied to the inputs of `down`, whose bias the loader has scaled. in [M, ld] must be complete. own:
 * mp_mlp_own_scratch bytes; NULL: the threads always gate the rows together. The bits of rows without an adapter do not
 * depend on whether other rows have one. Ends WITHOUT a barrier. Returns false if the step is over. */
bool mp_mlp_add(const mp_row_context *context, const mp_mlp *mlp, const float *in, int64_t ld, int M, float scale,
                void *inner, void *own, const mp_residual *residual);
static inline bool mp_mlp_forward(const mp_row_context *context, const mp_mlp *mlp, const float *in, int64_t ld, int M,
                                  void *inner, const mp_residual *residual) {
    return mp_mlp_add(context, mlp, in, ld, M, 1, inner, NULL, residual);
}

#endif
