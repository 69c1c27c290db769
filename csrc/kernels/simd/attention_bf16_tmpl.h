/* attention_bf16_tmpl.h: bfloat16 attention built from products of matrices, the slot gemm_bf16.
 *
 * Template: include after vec_avx512.h, inside a target region with AVX-512 and BF16. K is treated as a weight matrix
 * whose outputs are keys, V as one whose inputs are keys. Both are packed into scratch as pack_dense.h describes. Rows
 * are processed in blocks of 32 that start at multiples of 32, so that the set of keys that a row is multiplied with
 * (some with weight zero) depends on the row alone. */
#ifndef MP_KERNELS_SIMD_ATTENTION_BF16_TMPL_H
#define MP_KERNELS_SIMD_ATTENTION_BF16_TMPL_H

#include "kernels/attention_scratch.h"

enum { ROWS = MP_ATTN_BF16_ROWS, STEP = MP_PANEL_N * 4 };

/* The keys [from, to) that any of the rows [row, last] sees. */
static void visible(const mp_attn_full *a, int row, int last, int *from, int *to) {
    const int before = a->window == 0 ? a->T : a->causal ? a->window - 1 : a->window / 2;
    *from = row > before ? row - before : 0;
    *to = a->causal ? last + 1 : before < a->T - last - 1 ? last + before + 1 : a->T;
}

/* Pack keys [key0, key1) as bf16 words into panels, eight at a time. key0 is a multiple of 8. */
static void pack_keys(const mp_kernels *call, const mp_attn_full *a, const mp_attn_bf16_layout *plan, int key0,
                      int key1, uint8_t *panels) {
    enum { KEYS = 8, WORDS = 16 };
    _Alignas(64) uint16_t words[KEYS * MP_ATTN_BF16_DEPTH];
    memset(words, 0, sizeof *words * KEYS * (size_t)plan->depth);
    for (int t = key0; t < key1; t += KEYS) {
        const int keys = key1 - t < KEYS ? key1 - t : KEYS;
        uint8_t *to = panels + (size_t)(t / MP_PANEL_N) * plan->k_panel + t % MP_PANEL_N * 4;
        for (int i = 0; i < keys; i++)
            call->acts_bf16(a->k + (t + i) * a->ld, a->D, words + i * plan->depth);
        for (int d = 0; d < plan->depth; d += WORDS) /* a pair of words moves like a float */
            vec_transpose8((const float *)(const void *)(words + d), plan->depth / 2, keys,
                           (float *)(void *)(to + d / 2 * STEP), MP_PANEL_N);
    }
}

/* bf16 in the upper half of each lane, rounded as mp_bf16_from_f32 does. */
static MP_INLINE __m512i upper(__m512 x) {
    const __m512i u = _mm512_castps_si512(x);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
}

/* Pack the values of keys [key0, key1), key0 even, with zeros beyond T. */
static void pack_values(const mp_attn_full *a, const mp_attn_bf16_layout *plan, int key0, int key1, uint8_t *panels) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    for (int t = key0; t < key1; t += 2)
        for (int d = 0; d < a->D; d += 16) {
            const __mmask16 here = (__mmask16)(a->D - d >= 16 ? 0xffff : 0xff);
            const float *x = a->v + t * a->ld + d;
            const __m512 first = t < a->T ? _mm512_maskz_loadu_ps(here, x) : _mm512_setzero_ps();
            const __m512 second = t + 1 < a->T ? _mm512_maskz_loadu_ps(here, x + a->ld) : _mm512_setzero_ps();
            uint8_t *to = panels + (size_t)(d / MP_PANEL_N) * plan->v_panel + t / 2 * STEP + d % MP_PANEL_N * 4;
            const __m512i early = _mm512_and_si512(upper(first), high), late = _mm512_srli_epi32(upper(second), 16);
            _mm512_store_si512(to, _mm512_or_si512(early, late));
        }
}

/* y = x * by; y may be x. */
static void multiply(const float *x, int n, float by, float *y) {
    int i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(by)));
    if (i < n) {
        const __mmask16 left = (__mmask16)((1u << (n - i)) - 1);
        _mm512_mask_storeu_ps(y + i, left, _mm512_mul_ps(_mm512_maskz_loadu_ps(left, x + i), _mm512_set1_ps(by)));
    }
}

/* Write exp(s - max) of n scores (a multiple of 32) as bf16 words in the order of acts_bf16. Returns the sum of the
 * unrounded values. The sum is NaN if s has NaN, +inf or only -inf. Uses exp2 of degree 4 (math_const.h), whose error
 * is below 1 % of the bf16 rounding. Results below 2^-126 are 0. */
static float softmax_weights(const float *s, int n, uint16_t *p) {
    const __m512 by = _mm512_set1_ps(MP_LOG2E), low = _mm512_set1_ps(MP_EXP2_LO);
    __m512 top = _mm512_set1_ps(-INFINITY), sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int i = 0; i < n; i += 16)
        top = _mm512_max_ps(_mm512_loadu_ps(s + i), top); /* _mm512_max_ps returns the second operand if one is NaN */
    top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int i = 0; i < n; i += 32, p += 32) {
        __m512 e[2];
        for (int half = 0; half < 2; half++) {
            const __m512 y = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(s + i + 16 * half), top), by);
            const __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            const __m512 r = _mm512_sub_ps(y, whole);
            __m512 f = _mm512_fmadd_ps(r, _mm512_set1_ps(MP_EXP2_D4), _mm512_set1_ps(MP_EXP2_D3));
            f = _mm512_fmadd_ps(r, f, _mm512_set1_ps(MP_EXP2_D2));
            f = _mm512_fmadd_ps(r, f, _mm512_set1_ps(MP_EXP2_D1));
            f = _mm512_fmadd_ps(r, f, _mm512_set1_ps(1.0f));
            e[half] = _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(y, low, _CMP_NLT_UQ), f, whole);
            sum[half] = _mm512_add_ps(sum[half], e[half]);
        }
        _mm512_storeu_si512(p, _mm512_rol_epi32((__m512i)_mm512_cvtne2ps_pbh(e[1], e[0]), 16));
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
}

static void attn_full_bf16(const mp_attn_full *a, int row0, int row1, void *scratch) {
    assert(0 <= row0 && row0 <= row1 && row1 <= a->T && a->D > 0 && a->D % 8 == 0 && a->D <= MP_ATTN_BF16_DEPTH);
    if (row0 == row1)
        return;
    const mp_kernels *call = mp_kernels_get();
    const mp_attn_bf16_layout plan = mp_attn_bf16_plan(a->T, a->D);
    uint8_t *at = scratch;
    float *s = (float *)(void *)(at + plan.scores);
    uint16_t *p = (uint16_t *)(void *)(at + plan.p), *q = (uint16_t *)(void *)(at + plan.q);
    mp_wmat keys = {.kind = MP_W_BF16, .panel_bytes = plan.k_panel, .data = at}, values = keys;
    mp_wmat_init(&keys, MP_W_BF16, a->T, a->D);
    const int first = row0 / ROWS * ROWS, end = mp_round_up(row1, ROWS) < a->T ? mp_round_up(row1, ROWS) : a->T;
    int from, to;
    visible(a, first, end - 1, &from, &to);
    from = from / 32 * 32;
    pack_keys(call, a, &plan, from, to, at);
    pack_values(a, &plan, from, mp_round_up(to, 32), at + plan.v);

    for (int block = first; block < row1; block += ROWS) {
        const int r0 = block > row0 ? block : row0, past = block + ROWS < a->T ? block + ROWS : a->T;
        const int rows = (past < row1 ? past : row1) - r0;
        int lo, hi;
        visible(a, block, past - 1, &lo, &hi);
        lo = lo / 32 * 32;
        hi = mp_round_up(hi, 32);
        for (int r = 0; r < rows; r++) {
            float scaled[MP_ATTN_BF16_DEPTH];
            multiply(a->q + (r0 + r) * a->ld, a->D, a->scale, scaled);
            call->acts_bf16(scaled, a->D, q + r * plan.depth);
            memset(q + r * plan.depth + a->D, 0, sizeof *q * (size_t)(plan.depth - a->D));
        }
        const mp_acts queries = {.kind = MP_A_BF16, .M = rows, .K = a->D, .bf16 = q, .ldq = plan.depth};
        call->gemm_bf16(&keys, &queries, 0, rows, lo / MP_PANEL_N, hi / MP_PANEL_N, NULL, s, plan.keys);
        float inverse[ROWS];
        for (int r = 0; r < rows; r++) {
            float *row = s + (int64_t)r * plan.keys;
            visible(a, r0 + r, r0 + r, &from, &to);
            if (a->bias)
                call->add(a->bias + (r0 + r) * a->ld_bias + from, to - from, row + from);
            for (int t = lo; t < from; t++)
                row[t] = -INFINITY;
            for (int t = to; t < hi; t++)
                row[t] = -INFINITY;
            inverse[r] = 1.0f / softmax_weights(row + lo, hi - lo, p + (int64_t)r * plan.p_ld);
        }
        const mp_acts weights = {.kind = MP_A_BF16, .M = rows, .K = hi - lo, .bf16 = p, .ldq = plan.p_ld};
        values = (mp_wmat){.kind = MP_W_BF16,
                           .N = a->D,
                           .K = hi - lo,
                           .panels = plan.depth / MP_PANEL_N,
                           .panel_bytes = plan.v_panel,
                           .data = at + plan.v + (size_t)lo / 2 * STEP};
        float *out = a->out + r0 * a->ld_out;
        call->gemm_bf16(&values, &weights, 0, rows, 0, values.panels, NULL, out, a->ld_out);
        for (int r = 0; r < rows; r++)
            multiply(out + r * a->ld_out, a->D, inverse[r], out + r * a->ld_out);
    }
}

#endif
