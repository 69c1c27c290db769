/* attention_kv_tmpl.h: code shared by the F32 and I16 attention over a paged cache. Template: include after a vec_*.h.
 */
#ifndef MP_KERNELS_SIMD_ATTENTION_KV_TMPL_H
#define MP_KERNELS_SIMD_ATTENTION_KV_TMPL_H

#include <assert.h>

#include "kernels/kernels.h"
#include "kernels/simd/vmath_tmpl.h"

static void kv_check(const mp_attn_kv *a, int rows) {
    assert(rows > 0 && a->group > 0 && rows * a->group <= MP_ATTN_ROWS);
    assert(a->k_dim % 2 == 0 && a->v_dim % VEC_N == 0);
    (void)a;
    (void)rows;
}

/* Slots [from, to) of a block that row r sees; empty if from >= to. */
static VEC_INLINE void kv_visible(const mp_attn_kv *a, int r, int block, int *from, int *to) {
    const int64_t first = (int64_t)block * MP_KV_BLOCK, own = a->pos0 + r - first; /* position relative to the block */
    const int64_t oldest = a->window ? own - a->window + 1 : 0;
    const int64_t end = a->end && a->end - first <= own ? a->end - first : own + 1;
    *to = end < 0 ? 0 : end < MP_KV_BLOCK ? (int)end : MP_KV_BLOCK;
    *from = oldest < 0 ? 0 : oldest < MP_KV_BLOCK ? (int)oldest : MP_KV_BLOCK;
}

/* Returns true if the next block exists and any of the rows may see it. */
static VEC_INLINE bool kv_continues(const mp_attn_kv *a, int rows, int block) {
    const int64_t next = (int64_t)(block + 1) * MP_KV_BLOCK;
    return next < a->pos0 + rows && (!a->end || next < a->end);
}

/* Actions of a merge for one row of a partial. Stored as floats, so that vector operations decide 16 rows at once. */
enum { ATTN_SKIP, ATTN_TAKE, ATTN_MERGE };

/* Compute the new m and l of a state, the factors a (of the state's o) and b (of the partial's o), and the action per
 * row. a, b and `action` are [n rounded up to 16]. */
static VEC_INLINE void merge_factors(int n, const float *m, const float *l, mp_attn_partial *state, float *a, float *b,
                                     float *action) {
    for (int i = 0; i < n; i += VEC_N) {
        const int left = n - i < VEC_N ? n - i : VEC_N;
        const vec old = vec_load_n(state->m + i, left), new = vec_load_n(m + i, left), top = vec_max(new, old);
        const vec old_l = vec_load_n(state->l + i, left), new_l = vec_load_n(l + i, left);
        const vec by_old = vec_exp(vec_sub(old, top)), by_new = vec_exp(vec_sub(new, top));
        const vec sum = vec_add(vec_mul(old_l, by_old), vec_mul(new_l, by_new));
        const vmask skip = vec_less_equal(new_l, vec_zero()), take = vec_less_equal(old_l, vec_zero());
        vec_store(a + i, by_old);
        vec_store(b + i, by_new);
        vec_store(action + i,
                  vec_select(skip, vec_set(ATTN_SKIP), vec_select(take, vec_set(ATTN_TAKE), vec_set(ATTN_MERGE))));
        vec_store_n(state->m + i, vec_select(skip, old, vec_select(take, new, top)), left);
        vec_store_n(state->l + i, vec_select(skip, old_l, vec_select(take, new_l, sum)), left);
    }
}

#endif
