/* nn/embedding.h: look-up of token embeddings. */
#ifndef MP_MODELS_NN_EMBEDDING_H
#define MP_MODELS_NN_EMBEDDING_H

#include "models/nn/norm.h"

/* The update of an embedding by an adapter: A B times a scale is added to the tokens' rows, and `types` to those of the
 * token types. It is computed in fp32, row by row. */
typedef struct mp_embedding_update {
    mp_tensor tokens; /* A [vocab, rank] as stored; data NULL: the rows of tokens have no update */
    float *matrix;    /* [rank, n] B times the scale */
    float *types;     /* [types, n], or NULL */
    int32_t rank;     /* at most n */
} mp_embedding_update;

typedef struct mp_embedding {
    mp_tensor tokens;    /* [vocab, n] as stored; rows are converted on use */
    mp_tensor positions; /* [context, n] as stored; data NULL: no position table */
    float *types;        /* [types, n] token-type table, or NULL */
    float scale;         /* factor on the token's row */
    int32_t n;
    mp_norm norm;        /* applied to the sum */
    const mp_embedding_update *updates; /* [adapters], or NULL */
} mp_embedding;

/* Writes the embedding of one token to x [n]. adapter: number of the adapter (mp_adapters_find), 0: none. scratch: n
 * floats. */
void mp_embedding_row(const mp_embedding *embedding, int32_t id, int32_t position, int type, int adapter,
                      float *scratch, float *x);

#endif
