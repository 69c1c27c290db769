/* nn/attention.h: attention over rows that are all present, bidirectional or causal, with or without a bias by
 * distance. Attention over the paged KV cache is in decoder/attention.c. */
#ifndef MP_MODELS_NN_ATTENTION_H
#define MP_MODELS_NN_ATTENTION_H

#include "models/nn/norm.h"
#include "models/nn/relative_attention.h"
#include "models/nn/rope.h"
#include "models/nn/row_context.h"

typedef struct mp_attention { /* the shape shared by all layers of a network */
    int32_t heads, kv_heads, head_dim;
    mp_compute compute; /* MP_COMPUTE_AUTO means float32 */
    float scale;        /* factor on products of queries and keys */
    bool causal;
    const float *bias; /* [heads, 2 bias_length - 1] bias of a score, by key position minus query position; or NULL */
    int64_t bias_length; /* maximum length of a sequence */
    const mp_relative_layer *relative; /* disentangled attention, without windows and causal mask; or NULL */
} mp_attention;

typedef struct mp_attention_rows { /* the heads of a row are contiguous; rows are those of the whole pass */
    const float *q, *k, *v;        /* [M, ld] */
    int64_t ld;
    float *out; /* [M, ld_out] */
    int64_t ld_out;
} mp_attention_rows;

/* Returns the kernel for sequences of `keys` keys. */
mp_attn_full_function mp_attention_function(const mp_attention *attention, int keys);

/* Scratch of one thread for sequences of up to T rows. */
size_t mp_attention_scratch(const mp_attention *attention, int T);

/* Computes rows [row0, row1) of one head of one sequence. window: as in mp_attn_full. A sequence with fewer keys than
 * rows must not be causal, and a window must reach from its first row to its last. */
void mp_attention_head(const mp_attention *attention, const mp_attention_rows *rows, const mp_row_span *span, int head,
                       int window, int row0, int row1, void *scratch);

/* Computes the wanted rows of all heads of all sequences of the context; each thread takes a contiguous range of units.
 * A unit is one head of one sequence; if `each` is not 0, at most `each` rows of that head. Each thread polls before
 * every unit, and returns if `poll` returns true. No barrier. */
void mp_attention_forward(const mp_row_context *context, const mp_attention *attention, const mp_attention_rows *rows,
                          int window, int each, void *scratch);

/* Norms each of the `heads` heads of a row, unless norm->weight is NULL. Then rotates rope->dim components of each
 * head, from component `from` on, unless rope is NULL. angles: [rope->dim] of the row's position. */
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

/* ---- bias by distance -------------------------------------------------------------------------------------------- */

/* Returns the bucket of a key that is `ahead` rows after the query (negative: before it). Each direction has half
 * of the buckets. Near buckets hold one distance each; the others divide the distances up to `farthest`
 * logarithmically, and all greater distances share the last one (T5: Raffel et al., arXiv:1910.10683, section 2.1).
 * Computed in fp32, as in the training of the models. */
int mp_attention_bucket(int ahead, int buckets, int farthest);
/* Fills bias [heads, 2 length - 1] from a table [buckets, heads] of learned values. */
mp_status mp_attention_bias_learned(const mp_tensor *table, int heads, int64_t length, int farthest, float *bias,
                                    mp_error *error);
/* Fills bias [heads, 2 length - 1] for ALiBi, with one slope for each head (Press et al., arXiv:2108.12409). */
void mp_attention_bias_slopes(int heads, int64_t length, float *bias);

#endif
