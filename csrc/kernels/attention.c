/* attention.c: scratch sizes, selection of the kernel of full attention, full attention by the kernels of the paged
 * cache, and the initial state of running attention. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/attention_scratch.h"
#include "kernels/variants.h"

/* Numbers of keys, and of keys * D, from which attn_full_bf16 and mp_attn_full_i16 are faster than attn_full. */
enum { BF16_MIN_KEYS = 48, I16_MIN_KEYS = 48, I16_MIN_INPUTS = 2816 };

static size_t attention_larger(size_t a, size_t b) { return a > b ? a : b; }

/* True if mp_attn_full_i16 can compute the shape and is faster than attn_full. */
static bool suits_integers(int T, int D) {
    return T >= I16_MIN_KEYS && (int64_t)T * D >= I16_MIN_INPUTS && D <= MP_ATTN_FULL_I16_DEPTH;
}

size_t mp_attn_full_scratch(int T, int D) {
    const size_t floats = attention_larger(mp_attn_full_plan(T, D).bytes, mp_attn_bf16_plan(T, D).bytes);
    return suits_integers(T, D) ? attention_larger(floats, mp_attn_full_i16_plan(T, D).bytes) : floats;
}

mp_attn_full_function mp_attn_full_for(mp_compute compute, int T, int D, bool biased) {
    const mp_kernels *k = mp_kernels_get();
    if (compute == MP_COMPUTE_I8 && !biased && suits_integers(T, D))
        return mp_attn_full_i16;
    const bool wanted = compute == MP_COMPUTE_BF16 && T >= BF16_MIN_KEYS && D <= MP_ATTN_BF16_DEPTH && D % 8 == 0;
    return wanted && !mp_kernels_is_ref(MP_SLOT_attn_full_bf16) ? k->attn_full_bf16 : k->attn_full;
}

/* ---- mp_attn_full_i16 -------------------------------------------------------------------------------------------- */

/* Positions of rows for the kernels of the paged cache, so that row r sees the keys that mp_attn_full describes. */
static mp_attn_kv positions_of(const mp_attn_full *a, int row0) {
    const int half = a->window / 2;
    if (a->causal)
        return (mp_attn_kv){.pos0 = row0, .window = a->window, .end = a->T};
    if (a->window) /* the position of a row is that of its newest key, `half` after the row */
        return (mp_attn_kv){.pos0 = (int64_t)row0 + half, .window = 2 * half + 1, .end = a->T};
    return (mp_attn_kv){.pos0 = a->T - 1, .end = a->T};
}

/* Blocks [*first, *end) of the keys that rows [row0, row1) see. */
static void blocks_of(const mp_attn_full *a, int row0, int row1, int *first, int *end) {
    const mp_attn_kv at = positions_of(a, row0);
    const int64_t oldest = at.window ? at.pos0 - at.window + 1 : 0, newest = at.pos0 + (row1 - row0 - 1);
    *first = oldest > 0 ? (int)(oldest / MP_KV_BLOCK) : 0;
    *end = (int)((newest < a->T ? newest : a->T - 1) / MP_KV_BLOCK) + 1;
}

/* Convert the queries of `rows` rows to integers at q, and return the kernels' arguments without the blocks. */
static mp_attn_kv queries_of(const mp_attn_full *a, int row0, int rows, const mp_attn_full_i16_layout *plan,
                             float *q) {
    const mp_kernels *call = mp_kernels_get();
    mp_attn_kv kv = positions_of(a, row0);
    kv.q = q;
    kv.ldq = plan->k_dim;
    kv.group = 1;
    kv.k_dim = plan->k_dim;
    kv.v_dim = plan->v_dim;
    kv.scale = a->scale;
    kv.near = true;
    for (int r = 0; r < rows; r++, q += plan->k_dim) {
        q[plan->k_dim - 1] = 0.0f; /* an odd D is padded */
        memcpy(q, a->q + (row0 + r) * a->ld, sizeof(float) * (size_t)a->D);
        call->attn_query_i16(q, plan->k_dim);
    }
    return kv;
}

void mp_attn_full_i16(const mp_attn_full *a, int row0, int row1, void *scratch) {
    assert(0 <= row0 && row0 <= row1 && row1 <= a->T && !a->bias);
    assert(a->D > 0 && a->D <= MP_ATTN_FULL_I16_DEPTH);
    if (row0 == row1)
        return;
    const mp_kernels *call = mp_kernels_get();
    const mp_attn_full_i16_layout plan = mp_attn_full_i16_plan(a->T, a->D);
    uint8_t *at = scratch;
    void **k = (void **)(void *)(at + plan.k_list), **v = (void **)(void *)(at + plan.v_list);
    mp_attn_partial state = {
        .m = (float *)(void *)(at + plan.m), .l = (float *)(void *)(at + plan.l), .o = (float *)(void *)(at + plan.o)};
    int block0, block1;
    blocks_of(a, row0, row1, &block0, &block1);
    for (int i = block0; i < block1; i++) {
        const int t = i * MP_KV_BLOCK, keys = a->T - t < MP_KV_BLOCK ? a->T - t : MP_KV_BLOCK;
        k[i] = at + (size_t)i * plan.k_bytes;
        v[i] = at + plan.v + (size_t)i * plan.v_bytes;
        call->kv_fill_i16(a->k + t * a->ld, a->v + t * a->ld, a->ld, a->D, keys, k[i], v[i]);
    }
    for (int row = row0, rows; row < row1; row += rows) {
        rows = row1 - row < MP_ATTN_ROWS ? row1 - row : MP_ATTN_ROWS;
        mp_attn_kv kv = queries_of(a, row, rows, &plan, (float *)(void *)(at + plan.queries));
        kv.k_blocks = k;
        kv.v_blocks = v;
        blocks_of(a, row, row + rows, &block0, &block1);
        mp_attn_begin(rows, plan.v_dim, &state);
        call->attn_kv_i16(&kv, rows, block0, block1, &state, at + plan.kv);
        for (int r = 0; r < rows; r++) {
            const float inverse = 1.0f / state.l[r], *o = state.o + (int64_t)r * plan.v_dim;
            float *out = a->out + (row + r) * a->ld_out;
            for (int d = 0; d < a->D; d++)
                out[d] = o[d] * inverse;
        }
    }
}

/* ---- running attention ------------------------------------------------------------------------------------------- */

size_t mp_attn_kv_scratch(int v_dim) {
    return attention_larger(mp_attn_kv_plan(v_dim).bytes, mp_attn_i16_plan(v_dim).bytes);
}

void mp_attn_begin(int rows, int v_dim, mp_attn_partial *state) {
    assert(rows > 0 && v_dim > 0);
    for (int i = 0; i < rows; i++) {
        state->m[i] = -INFINITY;
        state->l[i] = 0.0f;
    }
    memset(state->o, 0, sizeof(float) * (size_t)rows * (size_t)v_dim);
}
