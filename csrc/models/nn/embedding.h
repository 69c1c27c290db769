/* nn/embedding.h: look-up of token embeddings. */
#ifndef MP_MODELS_NN_EMBEDDING_H
#define MP_MODELS_NN_EMBEDDING_H

#include "models/nn/norm.h"

typedef struct mp_embedding {
    mp_tensor tokens;    /* [vocab, n] as stored; rows are converted on use */
    mp_tensor positions; /* [context, n] as stored; data NULL: no position table */
    float *types;        /* [types, n] token-type table, or NULL */
    float scale;         /* factor on the token's row */
    int32_t n;
    mp_norm norm;        /* applied to the sum */
} mp_embedding;

/* Writes the embedding of one token to x [n]. scratch: n floats. */
void mp_embedding_row(const mp_embedding *embedding, int32_t id, int32_t position, int type, float *scratch, float *x);

#endif
