/* nn/pooling.h: from token vectors to one vector for each text, as configured in the folders of sentence-transformers:
 * one or more poolings side by side, dense layers, normalisation. */
#ifndef MP_MODELS_NN_POOLING_H
#define MP_MODELS_NN_POOLING_H

#include "models/nn/dense.h"
#include "models/nn/row_context.h"

typedef enum mp_pooling_mode {
    MP_POOL_CLS, /* the first token */
    MP_POOL_MAX, /* maximum of each component */
    MP_POOL_MEAN,
    MP_POOL_MEAN_SQRT_LEN, /* sum / sqrt(count) */
    MP_POOL_WEIGHTED_MEAN, /* weights 1, 2, 3, ... by position */
    MP_POOL_LAST_TOKEN,
    MP_POOL_COUNT
} mp_pooling_mode;

enum { MP_MAX_SIZES = 16 };

typedef struct mp_head {
    int modes;
    mp_pooling_mode mode[MP_POOL_COUNT];
    int32_t hidden, pooled, width; /* components of a token; after pooling; after the dense layers */
    mp_dense_chain dense;
    int size_count;
    mp_dense sizes[MP_MAX_SIZES]; /* dense layers for particular sizes: the one with `dimensions` outputs replaces the
                                   * only dense layer */
    bool normalize;
} mp_head;

/* Reads mpool.pooling, mpool.dense_sizes, mpool.normalize, and the chain of layers `dense`. Has the builder load the
 * dense tensors: those of the chain, and dense.size.N for each of dense_sizes. `head` must not move until the builder
 * has finished. */
mp_status mp_head_init(mp_head *head, const mp_builder *builder, int32_t hidden, mp_error *error);
/* mp_head_gives returns true if the head can return vectors of `dimensions` components. mp_head_widest returns the
 * largest number of components that the head can return. */
bool mp_head_gives(const mp_head *head, int dimensions);
int32_t mp_head_widest(const mp_head *head);
/* Returns the rows of a sequence of n tokens that mp_head_apply reads if pooling leaves out `skip` tokens: one row if
 * the only pooling is CLS or that of the last token, otherwise all rows. The other rows need not be computed: for this
 * row alone, with n = 1 and skip = 0, mp_head_apply gives the same vector. */
mp_row_span mp_head_reads(const mp_head *head, int32_t n, int32_t skip);
/* Floats of scratch that mp_head_apply needs. */
size_t mp_head_scratch(const mp_head *head);
/* Pools tokens [n, hidden], n >= 1, into out[dimensions]; mp_head_gives must be true for `dimensions`. Poolings leave
 * out the first `skip` (< n) tokens: CLS is the token after them, as in sentence-transformers 6.2. If `normalize`, the
 * truncated vector is scaled to length 1. Sums run over tokens in ascending order, one fp32 chain for each component.
 */
void mp_head_apply(const mp_head *head, const float *tokens, int n, int skip, int dimensions, bool normalize,
                   float *scratch, float *out);

#endif
