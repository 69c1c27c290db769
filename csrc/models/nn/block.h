/* nn/block.h: the facts that every block of a layer states: scratch and cost. A block is a mixer (decoder/mixer.h) or a
 * feed-forward network (nn/ffn.h). */
#ifndef MP_MODELS_NN_BLOCK_H
#define MP_MODELS_NN_BLOCK_H

#include "models/nn/linear.h"
#include "models/nn/scratch.h"

/* Bytes of scratch. Blocks run one after another and keep nothing in it, so each raises the maxima. */
typedef struct mp_block_needs {
    int least_joined; /* in: that of the row contexts */
    size_t acts;     /* shared: prepared activations of all rows */
    size_t own_acts; /* per thread: prepared activations of MP_PRIVATE_ROWS rows */
    size_t shared;   /* shared by the threads */
    size_t own;      /* per thread */
} mp_block_needs;

/* Cost of one pass. Each block adds to the sums. */
typedef struct mp_block_cost {
    int64_t idle;      /* parameters that a row does not use */
    uint64_t mapped;   /* bytes in the files that a row uses, besides those that the builder counts */
    int64_t rounded;   /* matrices that are computed in another type than float32 */
    int barriers;      /* about the number of barriers of a pass */
} mp_block_cost;

static inline void mp_needs_scratch(mp_block_needs *needs, size_t shared, size_t own) {
    needs->shared = mp_larger(needs->shared, shared);
    needs->own = mp_larger(needs->own, own);
}
static inline void mp_needs_linear(mp_block_needs *needs, const mp_linear *linear, int M) {
    needs->acts = mp_larger(needs->acts, mp_linear_scratch(linear, M));
    needs->own_acts = mp_larger(needs->own_acts, mp_linear_scratch(linear, MP_PRIVATE_ROWS));
}
static inline void mp_cost_linear(mp_block_cost *cost, const mp_linear *linear) {
    for (int part = 0; part < linear->parts; part++)
        cost->rounded += linear->w[part].kind != MP_W_F32;
}

#endif
