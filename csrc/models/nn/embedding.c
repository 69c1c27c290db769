#include "models/nn/embedding.h"

/* Add the update of a token's row. Products are rounded before they are added, so the bits are those of every CPU. */
static void add_update(const mp_embedding_update *update, int32_t id, int32_t n, float *scratch, float *x) {
    mp_dequantize_row(update->tokens.dtype, mp_tensor_row(&update->tokens, id), update->rank, scratch);
    for (int32_t r = 0; r < update->rank; r++) {
        const float factor = scratch[r], *row = update->matrix + (int64_t)r * n;
        for (int32_t i = 0; i < n; i++)
            x[i] += factor * row[i];
    }
}

void mp_embedding_row(const mp_embedding *embedding, int32_t id, int32_t position, int type, int adapter,
                      float *scratch, float *x) {
    const mp_kernels *call = mp_kernels_get();
    const int32_t n = embedding->n;
    const mp_embedding_update *update = embedding->updates && adapter ? &embedding->updates[adapter - 1] : NULL;
    mp_dequantize_row(embedding->tokens.dtype, mp_tensor_row(&embedding->tokens, id), n, x);
    if (embedding->scale != 1)
        for (int32_t i = 0; i < n; i++)
            x[i] *= embedding->scale;
    if (update && update->tokens.data)
        add_update(update, id, n, scratch, x);
    if (embedding->types)
        call->add(embedding->types + (int64_t)type * n, n, x);
    if (update && update->types)
        call->add(update->types + (int64_t)type * n, n, x);
    if (embedding->positions.data) {
        mp_dequantize_row(embedding->positions.dtype, mp_tensor_row(&embedding->positions, position), n, scratch);
        call->add(scratch, n, x);
    }
    if (embedding->norm.weight)
        mp_norm_row(&embedding->norm, x, x);
}
