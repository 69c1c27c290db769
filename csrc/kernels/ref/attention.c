/* attention.c: what the attention kernels mean, one number at a time. */
#include <assert.h>

#include "kernels/attention_scratch.h"
#include "kernels/half.h"
#include "kernels/ref/math.h"
#include "kernels/variants.h"

enum { LANES = 16 };

static float tree_sum(float *lane) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++)
            lane[l] += lane[l + width];
    return lane[0];
}

/* s[t] becomes exp(s[t] - max) for t in [from, to), 0 for the others. Returns the sum; both by lanes, t mod 16. */
static float softmax_visible(float *s, int n, int from, int to, float *max) {
    float sum[LANES] = {0}, top[LANES];
    for (int l = 0; l < LANES; l++)
        top[l] = -INFINITY;
    for (int t = from; t < to; t++)
        top[t % LANES] = mp_ref_max(s[t], top[t % LANES]);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++)
            top[l] = mp_ref_max(top[l + width], top[l]);
    for (int t = 0; t < n; t++) {
        s[t] = t >= from && t < to ? mp_ref_exp(s[t] - top[0]) : 0.0f;
        sum[t % LANES] += s[t];
    }
    *max = top[0];
    return tree_sum(sum);
}

static void ref_attn_full(const mp_attn_full *a, int row0, int row1, void *scratch) {
    assert(0 <= row0 && row0 <= row1 && row1 <= a->T && a->D % 8 == 0);
    float *s = scratch;
    for (int r = row0; r < row1; r++) {
        const float *q = a->q + r * a->ld;
        int from = 0, to = a->causal ? r + 1 : a->T;
        if (a->window > 0) {
            int before = a->causal ? a->window - 1 : a->window / 2;
            from = r - before > 0 ? r - before : 0;
            if (!a->causal && r + before + 1 < to)
                to = r + before + 1;
        }
        for (int t = from; t < to; t++) {
            const float *k = a->k + t * a->ld;
            float f = 0.0f;
            for (int d = 0; d < a->D; d++)
                f = fmaf(q[d], k[d], f);
            s[t] = f * a->scale;
            if (a->bias)
                s[t] += a->bias[(int64_t)r * a->T + t];
        }
        float max, inverse = 1.0f / softmax_visible(s, a->T, from, to, &max);
        for (int d = 0; d < a->D; d++) {
            float f = 0.0f;
            for (int t = from; t < to; t++)
                f = fmaf(s[t], a->v[t * a->ld + d], f);
            a->out[r * a->ld_out + d] = (f + 0.0f) * inverse;
        }
    }
}

static float load_kv(mp_dtype dtype, const void *block, int64_t i) {
    return dtype == MP_F16 ? mp_half_to_float(((const uint16_t *)block)[i]) : ((const float *)block)[i];
}

static void store_kv(mp_dtype dtype, float x, void *block, int64_t i) {
    if (dtype == MP_F16)
        ((uint16_t *)block)[i] = mp_ref_to_f16(x);
    else
        ((float *)block)[i] = x;
}

static void ref_kv_store(mp_dtype dtype, const float *k, const float *v, int k_dim, int v_dim, int slot, void *k_block,
                         void *v_block) {
    assert((dtype == MP_F32 || dtype == MP_F16) && 0 <= slot && slot < MP_KV_BLOCK);
    for (int d = 0; d < k_dim; d++)
        store_kv(dtype, k[d], k_block, (int64_t)d * MP_KV_BLOCK + slot);
    for (int d = 0; d < v_dim; d++)
        store_kv(dtype, v[d], v_block, (int64_t)slot * v_dim + d);
}

static void ref_attn_block(const mp_attn_kv *a, int rows, int block, mp_attn_partial *out) {
    assert(rows * a->group <= MP_ATTN_ROWS && (a->kv_dtype == MP_F32 || a->kv_dtype == MP_F16));
    const void *k = a->k_blocks[block], *v = a->v_blocks[block];
    for (int i = 0; i < rows * a->group; i++) {
        const float *q = a->q + (i / a->group) * a->ldq + (i % a->group) * a->ldq_group;
        const int64_t at = a->pos0 + i / a->group;
        int from = MP_KV_BLOCK, to = 0;
        for (int t = 0; t < MP_KV_BLOCK; t++) {
            int64_t position = (int64_t)block * MP_KV_BLOCK + t;
            if (position <= at && (a->window == 0 || position > at - a->window)) {
                from = t < from ? t : from;
                to = t + 1;
            }
        }
        float s[MP_KV_BLOCK] = {0};
        for (int t = from; t < to; t++) {
            float f = 0.0f;
            for (int d = 0; d < a->k_dim; d++)
                f = fmaf(q[d], load_kv(a->kv_dtype, k, (int64_t)d * MP_KV_BLOCK + t), f);
            s[t] = f * a->scale;
        }
        out->l[i] = softmax_visible(s, MP_KV_BLOCK, from, to, &out->m[i]);
        for (int d = 0; d < a->v_dim; d++) {
            float f = 0.0f;
            for (int t = from; t < to; t++)
                f = fmaf(s[t], load_kv(a->kv_dtype, v, (int64_t)t * a->v_dim + d), f);
            out->o[(int64_t)i * a->v_dim + d] = f + 0.0f;
        }
    }
}

static void ref_attn_merge(int rows, int v_dim, const mp_attn_partial *in, mp_attn_partial *state) {
    for (int i = 0; i < rows; i++) {
        const float *o = in->o + (int64_t)i * v_dim;
        float *sum = state->o + (int64_t)i * v_dim;
        if (in->l[i] == 0.0f)
            continue;
        if (state->l[i] == 0.0f) {
            state->m[i] = in->m[i];
            state->l[i] = in->l[i];
            memcpy(sum, o, sizeof(float) * (size_t)v_dim);
            continue;
        }
        float m = mp_ref_max(in->m[i], state->m[i]);
        float a = mp_ref_exp(state->m[i] - m), b = mp_ref_exp(in->m[i] - m);
        state->m[i] = m;
        state->l[i] = state->l[i] * a + in->l[i] * b;
        for (int d = 0; d < v_dim; d++)
            sum[d] = sum[d] * a + o[d] * b;
    }
}

static void ref_attn_kv(const mp_attn_kv *a, int rows, int block0, int block1, mp_attn_partial *state, void *scratch) {
    mp_attn_kv_layout at = mp_attn_kv_plan(a->k_dim, a->v_dim);
    uint8_t *base = scratch;
    mp_attn_partial part = {(float *)(base + at.m), (float *)(base + at.l), (float *)base};
    for (int block = block0; block < block1; block++) {
        ref_attn_block(a, rows, block, &part);
        ref_attn_merge(rows * a->group, a->v_dim, &part, state);
    }
}

void mp_ref_attention(mp_kernel_table *table) {
    MP_SET(table, attn_full, ref_attn_full, "ref");
    MP_SET(table, kv_store, ref_kv_store, "ref");
    MP_SET(table, attn_block, ref_attn_block, "ref");
    MP_SET(table, attn_merge, ref_attn_merge, "ref");
    MP_SET(table, attn_kv, ref_attn_kv, "ref");
}
