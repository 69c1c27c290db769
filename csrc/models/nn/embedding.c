#include "models/nn/embedding.h"

void mp_embedding_row(const mp_embedding *embedding, int32_t id, int32_t position, int type, float *scratch, float *x) {
    const mp_kernels *call = mp_kernels_get();
    const int32_t n = embedding->n;
    mp_dequantize_row(embedding->tokens.dtype, mp_tensor_row(&embedding->tokens, id), n, x);
    if (embedding->scale != 1)
        for (int32_t i = 0; i < n; i++)
            x[i] *= embedding->scale;
    if (embedding->types)
        call->add(embedding->types + (int64_t)type * n, n, x);
    if (embedding->positions.data) {
        mp_dequantize_row(embedding->positions.dtype, mp_tensor_row(&embedding->positions, position), n, scratch);
        call->add(scratch, n, x);
    }
    if (embedding->norm.weight)
        mp_norm_row(&embedding->norm, x, x);
}
