/* attention.c: scratch sizes and the beginning of a running attention. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/attention_scratch.h"

size_t mp_attn_full_scratch(int T, int D) { return mp_attn_full_plan(T, D).bytes; }

size_t mp_attn_kv_scratch(int v_dim) {
    const size_t floats = mp_attn_kv_plan(v_dim).bytes, integers = mp_attn_i16_plan(v_dim).bytes;
    return floats > integers ? floats : integers;
}

void mp_attn_begin(int rows, int v_dim, mp_attn_partial *state) {
    assert(rows > 0 && v_dim > 0);
    for (int i = 0; i < rows; i++) {
        state->m[i] = -INFINITY;
        state->l[i] = 0.0f;
    }
    memset(state->o, 0, sizeof(float) * (size_t)rows * (size_t)v_dim);
}
