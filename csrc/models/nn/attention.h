/* nn/attention.h: attention of rows that are all there, bidirectional or causal, with a bias by distance or without.
 * Attention over the paged key-value cache is decoder/decoder.c's. */
#ifndef MP_MODELS_NN_ATTENTION_H
#define MP_MODELS_NN_ATTENTION_H

#include "models/nn/norm.h"
#include "models/nn/rope.h"
#include "models/nn/row_context.h"

typedef struct mp_attention { /* the shape that the layers of a network share */
    int32_t heads, kv_heads, head_dim;
    mp_compute compute; /* MP_COMPUTE_AUTO: float32 */
    float scale;        /* of products of queries and keys */
    bool causal;
    const float *bias; /* [heads, 2 bias_length - 1] what a score gets by the key's position less the row's; or NULL */
    int64_t bias_length; /* no sequence is longer */
} mp_attention;

typedef struct mp_attention_rows { /* heads stand side by side; rows are those of the pass */
    const float *q, *k, *v;        /* [M, ld] */
    int64_t ld;
    float *out; /* [M, ld_out] */
    int64_t ld_out;
} mp_attention_rows;

/* Scratch of a lane for sequences of up to T rows. */
size_t mp_attention_scratch(const mp_attention *attention, int T);

/* Rows [row0, row1) of one head of one sequence. window: as of mp_attn_full. */
void mp_attention_head(const mp_attention *attention, const mp_attention_rows *rows, const mp_row_span *span, int head,
                       int window, int row0, int row1, void *scratch);

/* All heads of all sequences of the context; a lane takes a contiguous range of units. A unit is one head of one
 * sequence, or of up to `each` of its rows when each is not 0. The lane polls after each unit. No barrier. */
void mp_attention_forward(const mp_row_context *context, const mp_attention *attention, const mp_attention_rows *rows,
                          int window, int each, void *scratch);

/* Norm `heads` heads of a row one by one (norm without a weight: they stay), then rotate the components of each that
 * the rope covers, from component `from` on (rope NULL: none). angles: [rope->dim] of the row's position. */
static inline void mp_attention_place(const mp_norm *norm, const mp_rope *rope, const float *angles, int from,
                                      int heads, int head_dim, float *x) {
    const mp_kernels *call = mp_kernels_get();
    for (int h = 0; h < heads; h++, x += head_dim) {
        if (norm->weight)
            mp_norm_row(norm, x, x);
        if (rope)
            call->rope(x + from, angles, rope->dim, rope->neox);
    }
}

/* ---- a bias by distance ------------------------------------------------------------------------------------------ */

/* Bucket of a key that stands `ahead` rows behind the query in the text (negative: before it). Half of the buckets are
 * for each direction; the near ones have one distance each, the others share by the logarithm up to `farthest`, from
 * which on all are alike (T5: Raffel et al., arXiv:1910.10683, section 2.1). In fp32, as the models were trained. */
int mp_attention_bucket(int ahead, int buckets, int farthest);
/* bias [heads, 2 length - 1] from a table [buckets, heads] of learned values. */
mp_status mp_attention_bias_learned(const mp_tensor *table, int heads, int64_t length, int farthest, float *bias,
                                    mp_error *error);
/* The same for slopes that fall off with distance (ALiBi: Press et al., arXiv:2108.12409). */
void mp_attention_bias_slopes(int heads, int64_t length, float *bias);

#endif
