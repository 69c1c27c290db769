/* nn/ffn.h: the feed-forward networks of layers: a table of functions for each kind, and the weights of one network. */
#ifndef MP_MODELS_NN_FFN_H
#define MP_MODELS_NN_FFN_H

#include "models/nn/block.h"
#include "models/nn/experts.h"
#include "models/nn/mlp.h"

typedef struct mp_ffn mp_ffn;

typedef struct mp_ffn_ops {
    /* For passes of up to M rows. needs->least_joined is set. */
    void (*needs)(const mp_ffn *ffn, int M, mp_block_needs *needs);
    void (*cost)(const mp_ffn *ffn, mp_block_cost *cost);
    /* sum += scale * ffn(in [M, sum->n]). in must be complete. shared, own: scratch of `needs`; plain and gated
     * networks also take NULL for own. Ends WITHOUT a barrier. Returns false if the step is over. */
    bool (*add)(const mp_row_context *context, const mp_ffn *ffn, const float *in, int M, float scale, void *shared,
                void *own, const mp_residual *sum);
    bool separate; /* `in` must not be the sum, and the sum has neither a norm nor a scale of the output. Experts with
                    * norms of their own allow the norm */
} mp_ffn_ops;

struct mp_ffn {
    const mp_ffn_ops *ops;
    mp_mlp mlp;         /* mp_ffn_dense; its `ffn`, `gated` and `act` are set. mp_ffn_experts with latents: `up`
                         * projects rows to the experts' width, and `down` their sum back */
    mp_experts experts; /* mp_ffn_experts */
    mp_norm norm, router_norm; /* mp_ffn_experts with norms of its own: of the rows for the experts, and for the router.
                                * `in` of `add` is then the rows without a norm. Skipped if they have no weight */
    float router_scale;        /* factor on the rows for the router, after that norm */
    mp_norm after; /* norm of the output, in a sublayer that norms the sum of several outputs */
};

extern const mp_ffn_ops mp_ffn_dense;   /* plain or gated */
/* Mixture of experts. With latents (Nemotron 3 Super), the router sees the rows, and the experts their projections. */
extern const mp_ffn_ops mp_ffn_experts;

/* A low-rank layer beside a mixer (LAuReL, arXiv:2411.07501): sum += in + after(down(up(in))), with `after` of the
 * network, not that of the sum. `in` must not be the scratch of the sum. */
extern const mp_ffn_ops mp_ffn_laurel;

void mp_ffn_deinit(mp_ffn *ffn);

#endif
