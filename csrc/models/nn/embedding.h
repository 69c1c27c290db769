/* nn/embedding.h: rows of token ids. */
#ifndef MP_MODELS_NN_EMBEDDING_H
#define MP_MODELS_NN_EMBEDDING_H

#include "models/nn/norm.h"

typedef struct mp_embedding {
    mp_tensor tokens;    /* [vocab, n] as stored: rows are converted on use */
    mp_tensor positions; /* [context, n] as stored, or without data */
    float *types;        /* [.., n] token types, or NULL */
    float scale;         /* of tokens' rows */
    int32_t n;
    mp_norm norm;        /* of the sum */
} mp_embedding;

/* x [n]: the row of a token. scratch: n floats. */
void mp_embedding_row(const mp_embedding *embedding, int32_t id, int32_t position, int type, float *scratch, float *x);

#endif
