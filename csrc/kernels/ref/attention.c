/* ref/attention.c: the reference of the attention kernels, one number at a time. */
#include <assert.h>

#include "kernels/attention_scratch.h"
#include "kernels/ref/math.h"
#include "kernels/pack_dense.h"
#include "kernels/variants.h"

enum { LANES = MP_REF_LANES };

/* Replace s[t] by exp(s[t] - max) for t in [from, to), and by 0 for all other t below n. Returns the sum. Sum and max
 * use the lanes t mod 16. */
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
    return mp_ref_tree_sum(sum);
}

/* The keys that a row sees: [from, to). */
static void full_visible(const mp_attn_full *a, int row, int *from, int *to) {
    *from = 0;
    *to = a->causal ? row + 1 : a->T;
    if (a->window > 0) {
        int before = a->causal ? a->window - 1 : a->window / 2;
        *from = row - before > 0 ? row - before : 0;
        if (!a->causal && row + before + 1 < *to)
            *to = row + before + 1;
    }
}

static float rounded(float x, bool bf16) { return bf16 ? mp_bf16_to_f32(mp_bf16_from_f32(x)) : x; }

/* Compute rows [row0, row1) for both attn_full slots. s: scratch of T floats. The scale multiplies the score (fp32), or
 * the query before it is rounded (bf16). */
static void full_rows(const mp_attn_full *a, int row0, int row1, bool bf16, float *s) {
    const float before = bf16 ? a->scale : 1.0f, after = bf16 ? 1.0f : a->scale;
    assert(0 <= row0 && row0 <= row1 && row1 <= a->T && a->D > 0);
    for (int r = row0; r < row1; r++) {
        const float *q = a->q + r * a->ld;
        int from, to;
        full_visible(a, r, &from, &to);
        for (int t = from; t < to; t++) {
            const float *k = a->k + t * a->ld;
            float f = 0.0f;
            for (int d = 0; d < a->D; d++)
                f = fmaf(rounded(q[d] * before, bf16), rounded(k[d], bf16), f);
            s[t] = f * after;
            if (a->bias)
                s[t] += a->bias[r * a->ld_bias + t];
        }
        float max, inverse = 1.0f / softmax_visible(s, a->T, from, to, &max);
        for (int d = 0; d < a->D; d++) {
            float f = 0.0f;
            for (int t = from; t < to; t++)
                f = fmaf(rounded(s[t], bf16), rounded(a->v[t * a->ld + d], bf16), f);
            a->out[r * a->ld_out + d] = (f + 0.0f) * inverse;
        }
    }
}

static void ref_attn_full(const mp_attn_full *a, int row0, int row1, void *scratch) {
    full_rows(a, row0, row1, false, scratch);
}

static void ref_attn_full_bf16(const mp_attn_full *a, int row0, int row1, void *scratch) {
    full_rows(a, row0, row1, true, scratch);
}

static void ref_kv_store(const float *k, const float *v, int k_dim, int v_dim, int slot, void *k_block, void *v_block) {
    assert(0 <= slot && slot < MP_KV_BLOCK);
    for (int d = 0; d < k_dim; d++)
        ((float *)k_block)[(int64_t)d * MP_KV_BLOCK + slot] = k[d];
    for (int d = 0; d < v_dim; d++)
        ((float *)v_block)[(int64_t)slot * v_dim + d] = v[d];
}

/* Slots [from, to) of a block that the row at position `at` sees; empty if from >= to. */
static void visible(const mp_attn_kv *a, int64_t at, int block, int *from, int *to) {
    *from = MP_KV_BLOCK;
    *to = 0;
    for (int t = 0; t < MP_KV_BLOCK; t++) {
        int64_t position = (int64_t)block * MP_KV_BLOCK + t;
        if (position <= at && (a->end == 0 || position < a->end) && (a->window == 0 || position > at - a->window)) {
            *from = t < *from ? t : *from;
            *to = t + 1;
        }
    }
}

static void ref_attn_block(const mp_attn_kv *a, int rows, int block, mp_attn_partial *out) {
    assert(rows * a->group <= MP_ATTN_ROWS);
    const float *k = a->k_blocks[block], *v = a->v_blocks[block];
    for (int i = 0; i < rows * a->group; i++) {
        const float *q = a->q + (i / a->group) * a->ldq + (i % a->group) * a->ldq_group;
        int from, to;
        visible(a, a->pos0 + i / a->group, block, &from, &to);
        float s[MP_KV_BLOCK] = {0};
        for (int t = from; t < to; t++) {
            float f = 0.0f;
            for (int d = 0; d < a->k_dim; d++)
                f = fmaf(q[d], k[(int64_t)d * MP_KV_BLOCK + t], f);
            s[t] = a->softcap > 0.0f ? mp_ref_softcap(a->softcap, f * a->scale) : f * a->scale;
        }
        out->l[i] = softmax_visible(s, MP_KV_BLOCK, from, to, &out->m[i]);
        for (int d = 0; d < a->v_dim; d++) {
            float f = 0.0f;
            for (int t = from; t < to; t++)
                f = fmaf(s[t], v[(int64_t)t * a->v_dim + d], f);
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
    mp_attn_kv_layout at = mp_attn_kv_plan(a->v_dim);
    uint8_t *base = scratch;
    mp_attn_partial part = {(float *)(base + at.m), (float *)(base + at.l), (float *)base};
    for (int block = block0; block < block1; block++) {
        ref_attn_block(a, rows, block, &part);
        ref_attn_merge(rows * a->group, a->v_dim, &part, state);
    }
}

/* ---- keys and values in integers ---- */

/* Set to[i] = x[i] * (most / max|x|), rounded once. Returns the scale. `to` may be x: reads stay ahead of writes. */
static float to_integers(const float *x, int n, int most, int16_t *to) {
    uint32_t top = 0; /* bits of max|x|; those of NaN are greatest */
    for (int i = 0; i < n; i++)
        top = mp_ref_bits(fabsf(x[i])) > top ? mp_ref_bits(fabsf(x[i])) : top;
    const float max = mp_ref_float(top);
    const bool finite = max < INFINITY, nothing = !finite || max < MP_I16_MIN;
    for (int i = 0; i < n; i++) {
        int16_t y = nothing ? 0 : (int16_t)(fmaf(x[i], (float)most / max, MP_ROUND_MAGIC) - MP_ROUND_MAGIC);
        memcpy(to + i, &y, sizeof y);
    }
    return !finite ? NAN : nothing ? 0.0f : max / (float)most;
}

static void ref_attn_query_i16(float *q, int k_dim) {
    int16_t *to = (int16_t *)(void *)q;
    const float scale = to_integers(q, k_dim, MP_I16_KEY, to);
    memcpy(to + k_dim, &scale, sizeof scale);
}

/* width: bytes of an integer, 2 in I16 blocks and 1 in I8 blocks */
static float *scales(void *block, int dim, int width) {
    return (float *)(void *)((int8_t *)block + MP_KV_BLOCK * dim * width);
}

/* The multiplier of component d of a token in an I8 block. */
static int8_t *multiplier_of(void *block, int dim, int d, int slot) {
    return (int8_t *)(scales(block, dim, 1) + MP_KV_BLOCK) + d / MP_I8_GROUP * MP_KV_BLOCK + slot;
}

static int64_t key_index(int d, int slot) { return (d / 2 * MP_KV_BLOCK + slot) * 2 + d % 2; }
static int64_t value_index(int dim, int d, int slot) { return (slot / 2 * dim + d) * 2 + slot % 2; }

/* The integer at `index`, which is component d of a token. */
static int32_t integer_at(void *block, int dim, int width, int64_t index, int d, int slot) {
    return width == 2 ? ((const int16_t *)block)[index]
                      : ((const int8_t *)block)[index] * *multiplier_of(block, dim, d, slot);
}

static void ref_kv_store_i16(const float *k, const float *v, int k_dim, int v_dim, int slot, void *k_block,
                             void *v_block) {
    assert(0 <= slot && slot < MP_KV_BLOCK);
    enum { MAX_DIM = 4096 };
    int16_t part[MAX_DIM];
    assert(k_dim <= MAX_DIM && v_dim <= MAX_DIM);
    scales(k_block, k_dim, 2)[slot] = to_integers(k, k_dim, MP_I16_KEY, part);
    for (int d = 0; d < k_dim; d++)
        ((int16_t *)k_block)[key_index(d, slot)] = part[d];
    scales(v_block, v_dim, 2)[slot] = to_integers(v, v_dim, MP_I16_VALUE, part);
    for (int d = 0; d < v_dim; d++)
        ((int16_t *)v_block)[value_index(v_dim, d, slot)] = part[d];
}

/* Convert a row of n floats to bytes `to` and store its scale and multipliers in slot `slot` of `block`. */
static void to_bytes(const float *x, int n, int most, int slot, void *block, int8_t *to) {
    uint32_t top = 0;
    for (int i = 0; i < n; i++)
        top = mp_ref_bits(fabsf(x[i])) > top ? mp_ref_bits(fabsf(x[i])) : top;
    const float max = mp_ref_float(top), limit = (float)(MP_I8_MAX * most);
    const bool finite = max < INFINITY, nothing = !finite || max < MP_I16_MIN;
    const float factor = nothing ? 0.0f : limit / max;
    scales(block, n, 1)[slot] = !finite ? NAN : nothing ? 0.0f : max / limit;
    for (int d = 0; d < n; d += MP_I8_GROUP) {
        const int end = n - d < MP_I8_GROUP ? n : d + MP_I8_GROUP;
        float greatest = 0.0f;
        for (int i = d; i < end; i++)
            greatest = fabsf(x[i]) > greatest ? fabsf(x[i]) : greatest;
        const int by = mp_i8_multiplier(greatest, factor, most);
        *multiplier_of(block, n, d, slot) = (int8_t)by;
        for (int i = d; i < end; i++)
            to[i] = nothing ? 0 : (int8_t)(fmaf(x[i], factor / (float)by, MP_ROUND_MAGIC) - MP_ROUND_MAGIC);
    }
}

static void ref_kv_store_i8(const float *k, const float *v, int k_dim, int v_dim, int slot, void *k_block,
                            void *v_block) {
    assert(0 <= slot && slot < MP_KV_BLOCK);
    enum { MAX_DIM = 4096 };
    int8_t part[MAX_DIM];
    assert(k_dim <= MAX_DIM && v_dim <= MAX_DIM);
    to_bytes(k, k_dim, MP_I8_KEY, slot, k_block, part);
    for (int d = 0; d < k_dim; d++)
        ((int8_t *)k_block)[key_index(d, slot)] = part[d];
    to_bytes(v, v_dim, MP_I8_VALUE, slot, v_block, part);
    for (int d = 0; d < v_dim; d++)
        ((int8_t *)v_block)[value_index(v_dim, d, slot)] = part[d];
}

static void ref_kv_fill_i16(const float *k, const float *v, int64_t ld, int dim, int n, void *k_block, void *v_block) {
    enum { MAX_DIM = 4096 };
    assert(0 < n && n <= MP_KV_BLOCK && 0 < dim && dim <= MAX_DIM);
    const int k_dim = (dim + 1) / 2 * 2, v_dim = mp_kv_width(dim);
    float key[MAX_DIM] = {0}, value[MAX_DIM] = {0};
    memset(k_block, 0, mp_kv_bytes(MP_I16, k_dim));
    memset(v_block, 0, mp_kv_bytes(MP_I16, v_dim));
    for (int t = 0; t < n; t++) {
        memcpy(key, k + t * ld, sizeof *key * (size_t)dim);
        memcpy(value, v + t * ld, sizeof *value * (size_t)dim);
        ref_kv_store_i16(key, value, k_dim, v_dim, t, k_block, v_block);
    }
}

static float exp2_weight(float y) {
    y = mp_ref_max(MP_EXP2_LO, y);
    const float t = y + MP_ROUND_MAGIC, r = y - (t - MP_ROUND_MAGIC);
    float p = fmaf(MP_EXP2_D4, r, MP_EXP2_D3);
    p = fmaf(p, r, MP_EXP2_D2);
    p = fmaf(p, r, MP_EXP2_D1);
    p = fmaf(p, r, 1.0f);
    return isnan(y) ? y : mp_ref_float(mp_ref_bits(p) + (mp_ref_bits(t) << 23));
}

static void integer_block(const mp_attn_kv *a, int width, int rows, int block, mp_attn_partial *out) {
    assert(rows * a->group <= MP_ATTN_ROWS);
    void *k = a->k_blocks[block], *v = a->v_blocks[block];
    const float *sk = scales(k, a->k_dim, width), *sv = scales(v, a->v_dim, width);
    for (int i = 0; i < rows * a->group; i++) {
        const int16_t *q =
            (const int16_t *)(const void *)(a->q + (i / a->group) * a->ldq + (i % a->group) * a->ldq_group);
        int from, to;
        visible(a, a->pos0 + i / a->group, block, &from, &to);
        float sq, x[MP_KV_BLOCK] = {0}, w[MP_KV_BLOCK] = {0}, top = -INFINITY, sum[LANES] = {0};
        memcpy(&sq, q + a->k_dim, sizeof sq);
        float f = sq * a->scale;
        for (int t = from; t < to; t++) {
            for (int d = 0; d < a->k_dim; d += MP_I16_DEPTH) {
                int32_t dot = 0;
                for (int e = d; e < a->k_dim && e < d + MP_I16_DEPTH; e++)
                    dot += q[e] * integer_at(k, a->k_dim, width, key_index(e, t), e, t);
                x[t] = d == 0 ? (float)dot : x[t] + (float)dot;
            }
            x[t] *= sk[t];
            if (a->softcap > 0.0f)
                x[t] = mp_ref_softcap(a->softcap, x[t] * f);
            top = mp_ref_max(x[t], top);
        }
        if (a->softcap > 0.0f)
            f = 1.0f;
        const float m = top * f + 0.0f, f2 = f * MP_LOG2E + (m - m);
        out->m[i] = from < to ? m : -INFINITY;
        uint32_t most = 0;
        for (int t = from; t < to; t++) {
            const float p = exp2_weight((x[t] - top) * f2);
            sum[t % LANES] += p;
            w[t] = p * sv[t];
            most = mp_ref_bits(w[t]) > most ? mp_ref_bits(w[t]) : most;
        }
        out->l[i] = mp_ref_tree_sum(sum);
        const float high = mp_ref_float(most);
        const bool finite = high < INFINITY, nothing = !finite || high < MP_I16_MIN;
        const float by = !finite ? NAN : nothing ? 0.0f : high / (float)MP_I16_WEIGHT;
        int32_t n[MP_KV_BLOCK] = {0};
        for (int t = from; t < to && !nothing; t++)
            n[t] = (int32_t)(fmaf(w[t], (float)MP_I16_WEIGHT / high, MP_ROUND_MAGIC) - MP_ROUND_MAGIC);
        for (int d = 0; d < a->v_dim; d++) {
            int32_t dot = 0;
            for (int t = from; t < to; t++)
                dot += n[t] * integer_at(v, a->v_dim, width, value_index(a->v_dim, d, t), d, t);
            out->o[(int64_t)i * a->v_dim + d] = (float)dot * by;
        }
    }
}

static void integer_kv(const mp_attn_kv *a, int width, int rows, int block0, int block1, mp_attn_partial *state,
                       void *scratch) {
    mp_attn_kv_layout at = mp_attn_kv_plan(a->v_dim);
    uint8_t *base = scratch;
    mp_attn_partial part = {(float *)(base + at.m), (float *)(base + at.l), (float *)base};
    for (int block = block0; block < block1; block++) {
        integer_block(a, width, rows, block, &part);
        ref_attn_merge(rows * a->group, a->v_dim, &part, state);
    }
}

static void ref_attn_block_i16(const mp_attn_kv *a, int rows, int block, mp_attn_partial *out) {
    integer_block(a, 2, rows, block, out);
}

static void ref_attn_block_i8(const mp_attn_kv *a, int rows, int block, mp_attn_partial *out) {
    integer_block(a, 1, rows, block, out);
}

static void ref_attn_kv_i16(const mp_attn_kv *a, int rows, int block0, int block1, mp_attn_partial *state,
                            void *scratch) {
    integer_kv(a, 2, rows, block0, block1, state, scratch);
}

static void ref_attn_kv_i8(const mp_attn_kv *a, int rows, int block0, int block1, mp_attn_partial *state,
                           void *scratch) {
    integer_kv(a, 1, rows, block0, block1, state, scratch);
}

void mp_ref_attention(mp_kernel_table *table) {
    MP_SET(table, attn_full, ref_attn_full, "ref");
    MP_SET(table, attn_full_bf16, ref_attn_full_bf16, "ref");
    MP_SET(table, kv_store, ref_kv_store, "ref");
    MP_SET(table, attn_block, ref_attn_block, "ref");
    MP_SET(table, attn_merge, ref_attn_merge, "ref");
    MP_SET(table, attn_kv, ref_attn_kv, "ref");
    MP_SET(table, kv_store_i16, ref_kv_store_i16, "ref");
    MP_SET(table, attn_query_i16, ref_attn_query_i16, "ref");
    MP_SET(table, attn_block_i16, ref_attn_block_i16, "ref");
    MP_SET(table, attn_kv_i16, ref_attn_kv_i16, "ref");
    MP_SET(table, kv_fill_i16, ref_kv_fill_i16, "ref");
    MP_SET(table, kv_store_i8, ref_kv_store_i8, "ref");
    MP_SET(table, attn_block_i8, ref_attn_block_i8, "ref");
    MP_SET(table, attn_kv_i8, ref_attn_kv_i8, "ref");
}
