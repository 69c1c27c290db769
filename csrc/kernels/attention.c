/* attention.c: scratch sizes, slot selection and the initial state of running attention. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/attention_scratch.h"

enum { BF16_MIN_KEYS = 48 }; /* attn_full_bf16 is faster than attn_full from this many keys on */

size_t mp_attn_full_scratch(int T, int D) {
    const size_t floats = mp_attn_full_plan(T, D).bytes, bf16 = mp_attn_bf16_plan(T, D).bytes;
    return floats > bf16 ? floats : bf16;
}

mp_attn_full_function mp_attn_full_for(mp_compute compute, int T, int D) {
    const bool wanted = compute == MP_COMPUTE_BF16 && T >= BF16_MIN_KEYS && D <= MP_ATTN_BF16_DEPTH && D % 8 == 0;
    const mp_kernels *k = mp_kernels_get();
    return wanted && mp_cpu_features() & MP_CPU_AMX ? k->attn_full_bf16 : k->attn_full;
}

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
