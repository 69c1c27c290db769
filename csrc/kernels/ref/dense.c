/* ref/dense.c: the reference of the dense gemm and activation slots; every other variant is tested against this file.
 * pack_dense.h describes the layouts, kernels.h the order of the roundings. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/epilogue.h"
#include "kernels/pack_dense.h"
#include "kernels/ref/math.h"
#include "kernels/variants.h"

/* Finish one row's 32 sums: apply the epilogue, then store the columns below N. */
static void finish(const mp_wmat *w, const mp_epilogue *ep, int m, int panel, float *sums, float *y, int64_t ldy) {
    const int n0 = panel * MP_PANEL_N;
    const int cols = w->N - n0 < MP_PANEL_N ? w->N - n0 : MP_PANEL_N;
    mp_epilogue_apply(ep, m, m + 1, n0, n0 + cols, sums, cols);
    memcpy(y + m * ldy + n0, sums, sizeof(float) * (size_t)cols);
}

static void gemm_f32(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                     float *y, int64_t ldy) {
    for (int p = panel0; p < panel1; p++) {
        const float *panel = (const float *)(w->data + (size_t)p * w->panel_bytes);
        for (int m = m0; m < m1; m++) {
            const float *a = x->f32 + m * x->ld_f32;
            float sums[MP_PANEL_N] = {0};
            for (int j = 0; j < MP_PANEL_N; j++)
                for (int k = 0; k < w->K; k += MP_K_CHUNK) {
                    const int end = w->K - k < MP_K_CHUNK ? w->K : k + MP_K_CHUNK;
                    float chain = 0.0f;
                    for (int i = k; i < end; i++)
                        chain = fmaf(a[i], panel[i * MP_PANEL_N + j], chain);
                    sums[j] = k == 0 ? chain : sums[j] + chain;
                }
            finish(w, ep, m, p, sums, y, ldy);
        }
    }
}

static void gemm_bf16(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                      float *y, int64_t ldy) {
    const int steps = (w->K + 1) / 2;
    for (int p = panel0; p < panel1; p++) {
        const uint16_t *panel = (const uint16_t *)(w->data + (size_t)p * w->panel_bytes);
        for (int m = m0; m < m1; m++) {
            const uint16_t *a = x->bf16 + m * x->ldq;
            float sums[MP_PANEL_N] = {0};
            for (int j = 0; j < MP_PANEL_N; j++)
                for (int s = 0; s < steps; s++) {
                    const uint16_t *pair = panel + (s * MP_PANEL_N + j) * 2;
                    sums[j] = fmaf(mp_bf16_to_f32(a[2 * s + 1]), mp_bf16_to_f32(pair[1]), sums[j]);
                    sums[j] = fmaf(mp_bf16_to_f32(a[2 * s]), mp_bf16_to_f32(pair[0]), sums[j]);
                }
            finish(w, ep, m, p, sums, y, ldy);
        }
    }
}

static void gemm_i8(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1, const mp_epilogue *ep,
                    float *y, int64_t ldy) {
    const int steps = (w->K + 3) / 4;
    for (int p = panel0; p < panel1; p++) {
        const uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
        const float *scale = (const float *)(panel + (size_t)steps * MP_PANEL_N * 4);
        for (int m = m0; m < m1; m++) {
            const int8_t *a = x->q + m * x->ldq;
            float sums[MP_PANEL_N];
            for (int j = 0; j < MP_PANEL_N; j++) {
                int32_t dot = 0;
                for (int k = 0; k < w->K; k++)
                    dot += a[k] * ((int32_t)panel[(k / 4 * MP_PANEL_N + j) * 4 + k % 4] - 128);
                sums[j] = (float)dot * (scale[j] * x->scale[m]);
            }
            finish(w, ep, m, p, sums, y, ldy);
        }
    }
}

/* Pairs are swapped (x[k + 1], x[k]) and rounded to nearest even. NaN stays NaN. If K is odd, the partner of the last
 * input is zero. */
static void acts_bf16(const float *x, int K, uint16_t *out) {
    for (int k = 0; k < K; k += 2) {
        out[k] = k + 1 < K ? mp_bf16_from_f32(x[k + 1]) : 0;
        out[k + 1] = mp_bf16_from_f32(x[k]);
    }
}

static void gemm_bf16_acts(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                           const mp_epilogue *ep, uint16_t *y, int64_t ldy) {
    assert(w->N % MP_PANEL_N == 0);
    for (int p = panel0; p < panel1; p++)
        for (int m = m0; m < m1; m++) {
            float row[MP_PANEL_N];
            gemm_bf16(w, x, m, m + 1, p, p + 1, ep, row - p * MP_PANEL_N, 0);
            acts_bf16(row, MP_PANEL_N, y + m * ldy + p * MP_PANEL_N);
        }
}

/* One scale per row: max|x| / 127. q is x * (127 / max|x|), rounded to nearest even. A row whose 127 / max|x| overflows
 * gets scale 0 and q = 0. A row with NaN or Inf gets scale NaN and q = 0. */
static void acts_i8(const float *x, int K, int8_t *q, float *scale, int32_t *sum) {
    float max = 0;
    bool finite = true;
    for (int k = 0; k < K; k++) {
        const float a = fabsf(x[k]);
        finite = finite && isfinite(a);
        max = a > max ? a : max;
    }
    float inverse = max > 0 ? 127.0f / max : 0.0f;
    if (!finite || isinf(inverse))
        inverse = 0.0f;
    *scale = !finite ? NAN : inverse > 0 ? max / 127.0f : 0.0f;
    *sum = 0;
    for (int k = 0; k < K; k++) {
        q[k] = (int8_t)(inverse > 0 ? lrintf(x[k] * inverse) : 0);
        *sum += q[k];
    }
}

static void hadamard(const float *x, int K, int size, float *y) {
    memmove(y, x, sizeof(float) * (size_t)K);
    for (int h = 1; h < size; h *= 2)
        for (int k = 0; k < K; k++)
            if ((k & h) == 0) {
                const float a = y[k], b = y[k + h];
                y[k] = a + b;
                y[k + h] = a - b;
            }
}

static float product_of_row(const float *a, const float *w, int K) {
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += MP_K_CHUNK) {
        const int k1 = K - k0 < MP_K_CHUNK ? K : k0 + MP_K_CHUNK;
        float chain = 0;
        for (int k = k0; k < k1; k++)
            chain = fmaf(a[k], w[k], chain);
        sum = k0 == 0 ? chain : sum + chain;
    }
    return sum;
}

static void stored_f32(const uint8_t *rows, size_t stride, int n, const mp_acts *x, int m, float *y) {
    assert(x->kind == MP_A_F32);
    for (int o = 0; o < n; o++)
        y[o] = product_of_row(x->f32 + m * x->ld_f32, (const float *)(const void *)(rows + (size_t)o * stride), x->K);
}

static void stored_f32_rows(const float *rows, int64_t ld, int n, const mp_acts *x, int m0, int m1, float *y,
                            int64_t ldy) {
    assert(x->kind == MP_A_F32);
    for (int m = m0; m < m1; m++)
        for (int o = 0; o < n; o++)
            y[(m - m0) * ldy + o] = product_of_row(x->f32 + m * x->ld_f32, rows + o * ld, x->K);
}

static void squared_f32(const float *rows, int64_t ld, int n, int K, const float *x, float *y, float *squares) {
    for (int o = 0; o < n; o++, rows += ld) {
        float lane[MP_REF_LANES] = {0};
        for (int k = 0; k < K; k++)
            lane[k % MP_REF_LANES] = fmaf(rows[k], rows[k], lane[k % MP_REF_LANES]);
        squares[o] = mp_ref_tree_sum(lane);
        y[o] = product_of_row(x, rows, K);
    }
}

void mp_ref_dense(mp_kernel_table *table) {
    MP_SET(table, gemm_f32, gemm_f32, "ref");
    MP_SET(table, gemm_bf16, gemm_bf16, "ref");
    MP_SET(table, gemm_bf16_acts, gemm_bf16_acts, "ref");
    MP_SET(table, gemm_i8, gemm_i8, "ref");
    MP_SET(table, acts_bf16, acts_bf16, "ref");
    MP_SET(table, acts_i8, acts_i8, "ref");
    MP_SET(table, hadamard, hadamard, "ref");
    MP_SET(table, stored_f32, stored_f32, "ref");
    MP_SET(table, stored_f32_rows, stored_f32_rows, "ref");
    MP_SET(table, squared_f32, squared_f32, "ref");
}
