/* nn/experts.h: the feed-forward sublayer of MoE models. A router assigns `used` experts to each row,
 * and their weighted outputs are added up ("Outrageously Large Neural Networks", arXiv:1701.06538).
 *
 * Expert matrices stay as stored. If an expert has few rows, its stored rows are multiplied as they are
 * (mp_stored_can); otherwise each thread packs one panel at a time and computes with it. Panels that it packs
 * are kept while memory is plentiful (nn/weight_store.h). Experts otherwise take no memory besides the mapped file,
 * and the bytes of an expert without rows are not read. Rows are grouped by expert, so each matrix is read once a pass.
 * The output of a row depends on its own routing alone: ties go to the lowest id, and expert outputs are added in
 * routing order.
 *
 * Experts take part neither in the predicted size of a model nor in what a load charges, so a model may have more bytes
 * of experts than the memory budget: a load is refused only if the other weights do not fit. The system then reads the
 * experts that rows choose from the disk; after the router, the threads ask it for all of them at once.
 * nn/expert_reads.h finds out if the same experts are read repeatedly; uses then ask for them in the order of their use
 * (nn/expert_scan.h). */
#ifndef MP_MODELS_NN_EXPERTS_H
#define MP_MODELS_NN_EXPERTS_H

#include "models/arch.h"
#include "models/nn/expert_matrix.h"
#include "models/nn/expert_reads.h"
#include "models/nn/routing.h"

typedef struct mp_expert_uses { /* changed by the passes through a layer */
    _Atomic uint64_t missed_ns;  /* see mp_expert_reads_scan */
    _Atomic uint8_t seen[];      /* [count] 1: rows have used the expert */
} mp_expert_uses;

typedef struct mp_experts {
    int32_t count, used; /* experts in total; experts per row */
    int32_t hidden, ffn; /* width of the experts' rows, and inside of an expert */
    bool plain;          /* no gates: act(up) */
    mp_routing routing;
    float *correction;   /* [count] routing bias, or NULL */
    float *scale;        /* [count] factors on the weights of a row's experts, or NULL */
    float *bias;         /* [hidden] added once to the outputs of each row, or NULL */
    mp_act act;
    float clamp;         /* 0, or GPT-OSS's clamp: gates g are limited to <= clamp, ups u to +-clamp, and a unit is (u +
                          * 1) g sigmoid(1.702 g); `act` is then ignored */
    mp_linear router;    /* [count, routed], always in fp32 */
    mp_expert_matrix gate, up, down; /* gate is empty if `plain` */
    mp_expert_reads *reads;          /* counters of the model, or NULL: not measured */
    mp_expert_uses *uses;            /* NULL if `reads` is NULL */
} mp_experts;

typedef struct mp_experts_shape {
    int layer;
    int32_t count, used, hidden, ffn;
    int32_t routed; /* inputs of the router; 0: `hidden` */
    mp_routing routing;
    bool biased, plain;
    bool output_bias; /* the layer has blk.{layer}.ffn_exps.bias */
    mp_act act;
    float clamp;
} mp_experts_shape;

/* Lets the experts that are added next keep packed copies, unless the weights stay mapped, or are shared with worker
 * processes, which do not share what they pack. Measures the reads of these experts. */
mp_status mp_experts_keep(const mp_builder *builder, mp_error *error);
/* Reads blk.{layer}.ffn_gate_inp, the factors blk.{layer}.ffn_down_exps.scale if the file has them, and the experts'
 * matrices (nn/expert_matrix.h); if `biased`, the biases of all four.
 * The builder's weights must outlive the experts. */
mp_status mp_experts_init(mp_experts *experts, const mp_experts_shape *shape, const mp_builder *builder,
                          mp_error *error);
void mp_experts_deinit(mp_experts *experts);
/* For weights that are packed at load: packs the experts of a layer that may be kept, while a third of the memory
 * budget stays free. Charges scratch to `budget` meanwhile. If the scratch is refused, or the lease is cancelled,
 * passes pack the rest. Call after mp_builder_finish, and mp_weights_check_poisoned after it. */
void mp_experts_pack(const mp_experts *experts, mp_lease *lease, mp_budget *budget);
/* Packs the pending experts (nn/weight_store.h) of a layer until the time of idle workers is used up, or `until_ns`
 * has passed. own: scratch of mp_experts_thread_scratch bytes. */
void mp_experts_pack_pending(const mp_experts *experts, uint64_t until_ns, mp_lease *lease, uint8_t *own);

/* Scratch for a pass of M rows: shared by all threads, and private to each thread. */
size_t mp_experts_scratch(const mp_experts *experts, int M);
size_t mp_experts_thread_scratch(const mp_experts *experts);
/* y [M, hidden] += bias; y += scale * experts(x [M, hidden]), which the router chooses by `routed` [M, router.K]. x and
 * `routed` must be complete, and must not be y. All threads of the region must call it, with the same arguments except
 * `own`. Reports progress to the lease before each matrix, which the system may have to read from a disk; NULL: reports
 * nothing. Ends WITHOUT a barrier. */
void mp_experts_forward(const mp_experts *experts, const mp_team_thread *thread, const float *routed, const float *x,
                        int M, float scale, void *scratch, void *own, mp_lease *lease, float *y);

#endif
