/* nn/experts.h: the feed-forward half of a layer as a mixture of experts: a router gives each row a few of many, whose
 * outputs are added up, weighted ("Outrageously Large Neural Networks", arXiv:1701.06538).
 *
 * Experts are computed from their matrices as they are stored, panel by panel by way of a lane's scratch: they take no
 * memory beside the mapped file, and of an expert that no row chose not a byte is read. Rows are grouped by expert, so
 * that each matrix is read once a pass. What a row gets depends on its own choice alone: ties go to the lowest id, and
 * the outputs of its experts are added in the order in which it chose them. */
#ifndef MP_MODELS_NN_EXPERTS_H
#define MP_MODELS_NN_EXPERTS_H

#include "models/nn/expert_matrix.h"
#include "models/nn/routing.h"

typedef struct mp_experts {
    int32_t count, used; /* of them all, a row has so many */
    int32_t hidden, ffn;
    bool plain;          /* without gates: act(up) */
    mp_routing routing;
    float *correction;   /* [count], or NULL */
    mp_act act;
    float clamp;         /* 0, or: gates g are cut off above it and ups u beyond it on both sides, and a gated unit is
                          * (u + 1) g sigmoid(1.702 g), whatever act says */
    mp_linear router;    /* [count, hidden], in fp32 always */
    mp_expert_matrix gate, up, down; /* gate is empty when plain */
} mp_experts;

typedef struct mp_experts_shape {
    int layer;
    int32_t count, used, hidden, ffn;
    mp_routing routing;
    bool biased, plain;
    mp_act act;
    float clamp;
} mp_experts_shape;

/* Reads blk.{layer}.ffn_gate_inp and the experts' matrices (nn/expert_matrix.h); when biased, the biases of all four.
 * The builder's weights must outlive them. */
mp_status mp_experts_init(mp_experts *experts, const mp_experts_shape *shape, mp_builder *builder, mp_error *error);
void mp_experts_deinit(mp_experts *experts);

/* Scratch that the lanes share in a pass of M rows, and that each has for itself. */
size_t mp_experts_scratch(const mp_experts *experts, int M);
size_t mp_experts_thread_scratch(const mp_experts *experts);
/* y [M, hidden] += scale times what the experts make of x [M, hidden], which is complete. All lanes of the region call
 * it with the same arguments but for `own`; ends with a barrier. */
void mp_experts_forward(const mp_experts *experts, const mp_team_thread *thread, const float *x, int M, float scale,
                        void *scratch, void *own, float *y);

#endif
