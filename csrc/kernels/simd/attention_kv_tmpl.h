/* attention_kv_tmpl.h: what the two forms of attention over a paged cache have in common. Template: after a vec_*.h. */
#ifndef MP_KERNELS_SIMD_ATTENTION_KV_TMPL_H
#define MP_KERNELS_SIMD_ATTENTION_KV_TMPL_H

#include <assert.h>

#include "kernels/kernels.h"
#include "kernels/simd/vmath_tmpl.h"

static void kv_check(const mp_attn_kv *a, int rows) {
    assert(rows > 0 && a->group > 0 && rows * a->group <= MP_ATTN_ROWS);
    assert(a->k_dim % VEC_N == 0 && a->v_dim % VEC_N == 0);
    (void)a;
    (void)rows;
}

/* Slots [from, to) of a block that row r sees; empty when from >= to. */
static VEC_INLINE void kv_visible(const mp_attn_kv *a, int r, int block, int *from, int *to) {
    const int64_t own = a->pos0 + r - (int64_t)block * MP_KV_BLOCK; /* the row's position, counted from the block's */
    const int64_t oldest = a->window ? own - a->window + 1 : 0;
    *to = own < 0 ? 0 : own < MP_KV_BLOCK ? (int)own + 1 : MP_KV_BLOCK;
    *from = oldest < 0 ? 0 : oldest < MP_KV_BLOCK ? (int)oldest : MP_KV_BLOCK;
}

/* What becomes of a row of a partial. */
enum { ATTN_SKIP, ATTN_TAKE, ATTN_MERGE };

/* The new m and l of a state, the factors a and b of its o and of the partial's, and what to do in each row. */
static VEC_INLINE void merge_factors(int n, const float *m, const float *l, mp_attn_partial *state, float *a, float *b,
                                     uint8_t *what) {
    for (int i = 0; i < n; i += VEC_N) {
        const int left = n - i < VEC_N ? n - i : VEC_N;
        const vec old = vec_load_n(state->m + i, left), new = vec_load_n(m + i, left), top = vec_max(new, old);
        vec_store(a + i, vec_exp(vec_sub(old, top)));
        vec_store(b + i, vec_exp(vec_sub(new, top)));
    }
    for (int i = 0; i < n; i++) {
        if (l[i] == 0.0f) {
            what[i] = ATTN_SKIP;
        } else if (state->l[i] == 0.0f) {
            what[i] = ATTN_TAKE;
            state->m[i] = m[i];
            state->l[i] = l[i];
        } else {
            what[i] = ATTN_MERGE;
            state->m[i] = m[i] > state->m[i] ? m[i] : state->m[i];
            state->l[i] = state->l[i] * a[i] + l[i] * b[i];
        }
    }
}

#endif
