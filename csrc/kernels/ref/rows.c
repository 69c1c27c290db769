/* ref/rows.c: the reference of the row kernels, one number at a time. Slow, but this file defines the results. */
#include <assert.h>

#include "kernels/digits.h"
#include "kernels/ref/math.h"
#include "kernels/variants.h"

enum { LANES = MP_REF_LANES };

static float ref_max(const float *x, int64_t n) {
    float lane[LANES];
    for (int l = 0; l < LANES; l++)
        lane[l] = -INFINITY;
    for (int64_t i = 0; i < n; i++)
        lane[i % LANES] = mp_ref_max(x[i], lane[i % LANES]);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++)
            lane[l] = mp_ref_max(lane[l + width], lane[l]);
    return lane[0];
}

static void ref_rms_norm(const float *x, const float *weight, float eps, int n, float *y) {
    assert(n > 0);
    float lane[LANES] = {0};
    for (int i = 0; i < n; i++)
        lane[i % LANES] = fmaf(x[i], x[i], lane[i % LANES]);
    float scale = 1.0f / sqrtf(mp_ref_tree_sum(lane) / (float)n + eps);
    for (int i = 0; i < n; i++)
        y[i] = x[i] * scale * weight[i];
}

static void ref_layer_norm(const float *x, const float *weight, const float *bias, float eps, int n, float *y) {
    assert(n > 0);
    float lane[LANES] = {0};
    for (int i = 0; i < n; i++)
        lane[i % LANES] += x[i];
    float mean = mp_ref_tree_sum(lane) / (float)n;
    memset(lane, 0, sizeof lane);
    for (int i = 0; i < n; i++) {
        float d = x[i] - mean;
        lane[i % LANES] = fmaf(d, d, lane[i % LANES]);
    }
    float scale = 1.0f / sqrtf(mp_ref_tree_sum(lane) / (float)n + eps);
    for (int i = 0; i < n; i++) {
        float d = (x[i] - mean) * scale;
        y[i] = bias ? fmaf(d, weight[i], bias[i]) : d * weight[i];
    }
}

static void ref_add(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++)
        y[i] += x[i];
}

static void ref_mul_add(const float *a, const float *b, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++)
        y[i] = fmaf(a[i], b[i], y[i]);
}

static void ref_causal_conv(const float *const *x, int64_t at, const float *kernel, int64_t ld, const float *bias,
                            int taps, int rows, int n, float *y, int64_t ldy) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < n; c++) {
            float sum = bias ? bias[c] : 0.0f;
            for (int j = 0; j < taps; j++)
                sum = fmaf(kernel[j * ld + c], x[r + j][at + c], sum);
            y[r * ldy + c] = sum;
        }
}

/* Returns the sum of the products of a column and x, as mp_state_scan defines it. */
static float ref_column_dot(const float *column, const float *x, int n) {
    float sum[4] = {0};
    for (int i = 0; i < n; i++)
        sum[i % 4] = fmaf(column[i * MP_STATE_BLOCK], x[i], sum[i % 4]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static void ref_state_scan(const mp_state_scan *scan, int block0, int block1) {
    const int end = block1 * MP_STATE_BLOCK < scan->dv ? block1 * MP_STATE_BLOCK : scan->dv;
    for (int c = block0 * MP_STATE_BLOCK; c < end; c++) {
        float *const column =
            scan->state + (ptrdiff_t)(c / MP_STATE_BLOCK * scan->dk) * MP_STATE_BLOCK + c % MP_STATE_BLOCK;
        for (int r = 0; r < scan->rows; r++) {
            const float *const k = scan->k + r * scan->ldk;
            const float decay = scan->decay[r * scan->ld_gates];
            float u = scan->v[r * scan->ldv + c];
            if (scan->beta)
                u = scan->beta[r * scan->ld_gates] * (u - decay * ref_column_dot(column, k, scan->dk));
            for (int i = 0; i < scan->dk; i++)
                column[i * MP_STATE_BLOCK] = fmaf(k[i], u, decay * column[i * MP_STATE_BLOCK]);
            if (scan->u)
                scan->u[r * scan->ldu + c] = u;
            if (scan->q)
                scan->o[r * scan->ldo + c] = ref_column_dot(column, scan->q + r * scan->ldq, scan->dk);
        }
    }
}

static void ref_column_sums(const float *x, int64_t ld, int rows, int n, const float *centre, float *out) {
    for (int i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int r = 0; r < rows; r++) {
            float d = centre ? x[r * ld + i] - centre[i] : x[r * ld + i];
            sum = centre ? fmaf(d, d, sum) : sum + d;
        }
        out[i] = sum;
    }
}

static void ref_affine(const float *x, const float *centre, const float *scale, const float *shift, mp_act act, int n,
                       float *y) {
    for (int i = 0; i < n; i++)
        y[i] = mp_ref_activate(act, fmaf(x[i] - centre[i], scale[i], shift[i]));
}

static void ref_gated(mp_act act, const float *gate, const float *up, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++)
        y[i] = mp_ref_activate(act, gate[i]) * up[i];
}

static void ref_activate(mp_act act, int64_t n, float *x) {
    for (int64_t i = 0; i < n; i++)
        x[i] = mp_ref_activate(act, x[i]);
}

static void ref_softcap(float cap, int64_t n, float *x) {
    for (int64_t i = 0; i < n; i++)
        x[i] = mp_ref_softcap(cap, x[i]);
}

static float ref_exp_sum(const float *x, int64_t n, float max, float *out) {
    float lane[LANES] = {0};
    for (int64_t i = 0; i < n; i++) {
        float e = mp_ref_exp(x[i] - max);
        lane[i % LANES] += e;
        if (out)
            out[i] = e;
    }
    return mp_ref_tree_sum(lane);
}

static float ref_softmax(float *x, int n) {
    assert(n > 0);
    return ref_exp_sum(x, n, ref_max(x, n), x);
}

static int64_t ref_argmax(const float *x, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (x[i] == x[i] && (best < 0 || x[i] > x[best]))
            best = i;
    return best < 0 ? 0 : best;
}

static float ref_dot(const float *a, const float *b, int64_t n) {
    float lane[LANES] = {0};
    for (int64_t i = 0; i < n; i++)
        lane[i % LANES] = fmaf(a[i], b[i], lane[i % LANES]);
    return mp_ref_tree_sum(lane);
}

static bool ref_all_finite(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if ((mp_ref_bits(x[i]) & 0x7f800000u) == 0x7f800000u)
            return false;
    return true;
}

static void ref_rope(float *x, const float *cos_sin, int dim, bool neox) {
    assert(dim % 2 == 0);
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float *pa = neox ? x + i : x + 2 * i, *pb = neox ? x + i + half : x + 2 * i + 1;
        float a = *pa, b = *pb, c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
        *pa = fmaf(a, c, -(b * s));
        *pb = fmaf(a, s, b * c);
    }
}

static void ref_widen_i8(const int8_t *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++)
        y[i] = (float)x[i];
}

/* Raises *maximum to the sum, times its scale if there is one. Returns false if that is not finite. */
static bool raise_maximum(float sum, const float *scale, float *maximum) {
    if (scale)
        sum *= *scale;
    *maximum = sum > *maximum ? sum : *maximum;
    return ref_all_finite(&sum, 1);
}

static bool ref_row_maxima(const float *panel, int columns, int K, const float *rows, int64_t ld, int n,
                           const float *scales, float *maxima) {
    bool finite = true;
    for (int r = 0; r < n; r++)
        for (int j = 0; j < columns; j++) {
            float sum = 0.0f;
            for (int k = 0; k < K; k += MP_K_CHUNK) {
                const int end = K - k < MP_K_CHUNK ? K : k + MP_K_CHUNK;
                float chain = 0.0f;
                for (int i = k; i < end; i++)
                    chain = fmaf(rows[r * ld + i], panel[i * MP_PANEL_N + j], chain);
                sum = k == 0 ? chain : sum + chain;
            }
            finite &= raise_maximum(sum, scales ? scales + r : NULL, maxima + j);
        }
    return finite;
}

static bool ref_row_maxima_i8(const uint8_t *panel, int columns, int K, const int8_t *rows, int64_t ld, int n,
                              const float *scales, float *maxima) {
    bool finite = true;
    for (int r = 0; r < n; r++)
        for (int j = 0; j < columns; j++) {
            float sum = 0.0f;
            for (int k = 0; k < K; k += MP_K_CHUNK) {
                const int end = K - k < MP_K_CHUNK ? K : k + MP_K_CHUNK;
                int32_t high = 0, low = 0;
                for (int i = k; i < end; i++) {
                    const int8_t *digits = (const int8_t *)panel + mp_digits_byte(i, j);
                    high += (digits[2 * MP_DIGITS_LINE] * 256 + digits[MP_DIGITS_LINE]) * rows[r * ld + i];
                    low += digits[0] * rows[r * ld + i];
                }
                const float chunk = fmaf((float)high, 256.0f, (float)low);
                sum = k == 0 ? chunk : sum + chunk;
            }
            sum *= mp_digits_units(panel)[j];
            finite &= raise_maximum(sum, scales ? scales + r : NULL, maxima + j);
        }
    return finite;
}

void mp_ref_rows(mp_kernel_table *table) {
    MP_SET(table, rms_norm, ref_rms_norm, "ref");
    MP_SET(table, layer_norm, ref_layer_norm, "ref");
    MP_SET(table, add, ref_add, "ref");
    MP_SET(table, mul_add, ref_mul_add, "ref");
    MP_SET(table, column_sums, ref_column_sums, "ref");
    MP_SET(table, causal_conv, ref_causal_conv, "ref");
    MP_SET(table, state_scan, ref_state_scan, "ref");
    MP_SET(table, affine, ref_affine, "ref");
    MP_SET(table, gated, ref_gated, "ref");
    MP_SET(table, activate, ref_activate, "ref");
    MP_SET(table, softcap, ref_softcap, "ref");
    MP_SET(table, softmax, ref_softmax, "ref");
    MP_SET(table, max, ref_max, "ref");
    MP_SET(table, argmax, ref_argmax, "ref");
    MP_SET(table, exp_sum, ref_exp_sum, "ref");
    MP_SET(table, dot, ref_dot, "ref");
    MP_SET(table, all_finite, ref_all_finite, "ref");
    MP_SET(table, rope, ref_rope, "ref");
    MP_SET(table, widen_i8, ref_widen_i8, "ref");
    MP_SET(table, row_maxima, ref_row_maxima, "ref");
    MP_SET(table, row_maxima_i8, ref_row_maxima_i8, "ref");
}
