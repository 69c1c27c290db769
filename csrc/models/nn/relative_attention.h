/* nn/relative_attention.h: disentangled attention (DeBERTa: He et al., arXiv:2006.03654, section 3.1).
 *
 * The score of query row r and key row t has two terms besides the product of query and key: query r times a learned
 * key of the distance r - t (content to position), and key t times a learned query of that distance (position to
 * content). Distances share a limited number of rows: near distances have one each, far ones share rows
 * logarithmically or share the last one. The learned keys and queries do not depend on the text, so they are computed
 * once, when the model is loaded. Attention computes, for each head of a text, the products with the rows that the
 * text's distances need, and gathers a bias of at most MP_RELATIVE_BLOCK query rows at a time. */
#ifndef MP_MODELS_NN_RELATIVE_ATTENTION_H
#define MP_MODELS_NN_RELATIVE_ATTENTION_H

#include "models/nn/norm.h"

enum { MP_RELATIVE_BLOCK = 64 };

typedef struct mp_relative { /* the distances of all layers */
    int32_t rows;   /* rows for distances, 2 * span */
    int32_t *index; /* [2 length - 1], owned: row of each distance r - t, from -(length - 1) on; rows ascend */
    int64_t length; /* maximum length of a sequence */
} mp_relative;

typedef struct mp_relative_layer {
    const mp_relative *shape;
    const float *keys;    /* [rows, width] learned keys of distances, or NULL: no such term */
    const float *queries; /* [rows, width] learned queries of distances, or NULL */
    int64_t width;        /* heads * head_dim */
} mp_relative_layer;

/* Fills `relative` for distances with `span` rows in each direction. buckets: 0, or the number of rows per direction,
 * half of which hold one distance each; `farthest` is the distance at which the last one begins. Requires buckets 0, or
 * 2 <= buckets < 2 * (farthest - 1) and span = buckets. Distances beyond the rows share the last one. */
mp_status mp_relative_init(mp_relative *relative, int32_t span, int32_t buckets, int32_t farthest, int64_t length,
                           mp_error *error);
void mp_relative_deinit(mp_relative *relative);

/* Bytes of scratch for sequences of up to T rows. */
size_t mp_relative_scratch(const mp_relative *relative, int T);
/* One head of a sequence of T rows, of which the first `keys` are keys. */
typedef struct mp_relative_head {
    const mp_relative_layer *layer;
    int head, head_dim, T, keys;
    const float *q, *k; /* [T, ld] of this head */
    int64_t ld;
    float scale;
    const float *add;   /* NULL, or a bias by key position minus query position that is added: its element 0 */
    void *scratch;      /* mp_relative_scratch bytes */
} mp_relative_head;

/* Computes the products of the keys with the learned queries. Call before mp_relative_bias. */
void mp_relative_begin(const mp_relative_head *head);
/* Returns the biases [row1 - row0, keys] of rows [row0, row1), row1 - row0 <= MP_RELATIVE_BLOCK: scale times the sum of
 * both terms. The result is in the scratch, until the next call. */
const float *mp_relative_bias(const mp_relative_head *head, int row0, int row1);

#endif
