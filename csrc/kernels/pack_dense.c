/* pack_dense.c: packing of the dense kinds. pack_dense.h describes the layouts. */
#include "kernels/pack_dense.h"

#include <assert.h>
#include <math.h>
#include <string.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* Inputs dequantised at a time: a multiple of every block size. CHUNK inputs of 32 outputs fit L1. */
enum { CHUNK = 256 };

typedef float chunk_rows[MP_PANEL_N][CHUNK];

static int steps_of(mp_wkind kind, int32_t K) {
    return kind == MP_W_F32 ? K : kind == MP_W_BF16 ? (K + 31) / 32 * 16 : (K + 3) / 4;
}

size_t mp_pack_dense_panel_bytes(mp_wkind kind, int32_t K) {
    assert(kind == MP_W_F32 || kind == MP_W_BF16 || kind == MP_W_I8);
    const size_t step = MP_PANEL_N * 4;
    return (size_t)steps_of(kind, K) * step + (kind == MP_W_I8 ? 2 * MP_PANEL_N * sizeof(float) : 0);
}

/* Load items [k, k + n) of row `row` of src as floats. */
static void load_row(const mp_tensor *src, int64_t row, int k, int n, float *out) {
    const mp_dtype_row *type = mp_dtype_get(src->dtype);
    const uint8_t *from = mp_tensor_row(src, row) + (size_t)(k / type->items) * (size_t)type->bytes;
    mp_dequantize_row(src->dtype, from, n, out);
}

/* Load items [k, k + n) of row `row`, rotated in blocks of `size`, which must divide n. Dividing by the size is exact
 * (a power of two) and makes this the inverse of the rotation of the activations. Dividing before the rotation prevents
 * overflow. */
static void load_rotated(const mp_tensor *src, int64_t row, int k, int n, int size, float *out) {
    load_row(src, row, k, n, out);
    for (int i = 0; i < n; i++)
        out[i] *= 1.0f / (float)size;
    mp_kernels_get()->hadamard(out, n, size, out);
}

/* Load the k-chunk [cols, n] of src that starts at output n0 and input k. Leaves rows beyond cols unchanged. */
static void load_chunk(const mp_tensor *src, int64_t n0, int cols, int k, int n, chunk_rows rows) {
    for (int j = 0; j < cols; j++)
        load_row(src, n0 + j, k, n, rows[j]);
}

static void put_f32(const chunk_rows rows, int n, float *to) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < MP_PANEL_N; j++)
            to[i * MP_PANEL_N + j] = rows[j][i];
}

static void put_bf16(const chunk_rows rows, int n, uint16_t *to) {
    for (int i = 0; i < n; i += 2)
        for (int j = 0; j < MP_PANEL_N; j++) {
            to[(i / 2 * MP_PANEL_N + j) * 2] = i + 1 < n ? mp_bf16_from_f32(rows[j][i + 1]) : 0;
            to[(i / 2 * MP_PANEL_N + j) * 2 + 1] = mp_bf16_from_f32(rows[j][i]);
        }
}

/* Returns 127 / max, the factor of a row's weights before they are rounded to int8. Returns 0 if max is 0 or so small
 * that 127 / max overflows: such a row contributes zero to any fp32 sum with normal activations. */
static float i8_inverse(float max) {
    const float inverse = 127.0f / max;
    return max > 0 && inverse <= 3.402823466e38f ? inverse : 0.0f;
}

/* Quantise a k-chunk of one row. If `inverse` is 0, every q is 0, even where the row is NaN or Inf. Adding 1.5 * 2^23
 * leaves the value, rounded to nearest even, in the low bits of the sum. Compilers vectorise this addition, but would
 * call lrintf once per value. */
static void quantise_i8(const float *row, float inverse, int n, int8_t *q) {
    memset(q, 0, CHUNK);
    if (inverse == 0.0f)
        return;
    for (int i = 0; i < n; i++) {
        const float sum = row[i] * inverse + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &sum, sizeof bits);
        q[i] = (int8_t)(bits - 0x4b400000);
    }
}

static void put_i8(const chunk_rows rows, const float *inverse, int n, uint8_t *to) {
    _Alignas(64) int8_t q[MP_PANEL_N][CHUNK];
    for (int j = 0; j < MP_PANEL_N; j++)
        quantise_i8(rows[j], inverse[j], n, q[j]);
    for (int i = 0; i < n; i += 4)
        for (int j = 0; j < MP_PANEL_N; j++) {
            uint32_t word;
            memcpy(&word, &q[j][i], sizeof word);
            word ^= 0x80808080u; /* q + 128, byte by byte */
            memcpy(to + (i / 4 * MP_PANEL_N + j) * 4, &word, sizeof word);
        }
}

/* Returns max|w| of a rotated row; Inf when the row is not finite. The bits of magnitudes compare as integers, with NaN
 * above Inf. */
static float largest_of(const mp_tensor *src, int64_t row, int K, float *chunk) {
    int32_t top = 0;
    for (int k = 0; k < K; k += CHUNK) {
        const int n = K - k < CHUNK ? K - k : CHUNK;
        load_rotated(src, row, k, n, mp_hadamard_size(K), chunk);
        for (int i = 0; i < n; i++) {
            int32_t bits;
            memcpy(&bits, &chunk[i], sizeof bits);
            bits &= 0x7fffffff;
            top = bits > top ? bits : top;
        }
    }
    float max;
    memcpy(&max, &top, sizeof max);
    return isfinite(max) ? max : INFINITY;
}

static void pack_i8_panel(const mp_tensor *src, int64_t n0, int cols, int K, uint8_t *panel, chunk_rows rows) {
    float *scale = (float *)(panel + (size_t)steps_of(MP_W_I8, K) * MP_PANEL_N * 4);
    float inverse[MP_PANEL_N] = {0};
    for (int j = 0; j < MP_PANEL_N; j++) {
        const float max = j < cols ? largest_of(src, n0 + j, K, rows[0]) : 0.0f;
        inverse[j] = isinf(max) ? 0.0f : i8_inverse(max);
        scale[j] = isinf(max) ? NAN : inverse[j] > 0 ? max / 127.0f : 0.0f;
    }
    memset(rows, 0, sizeof(chunk_rows));
    for (int k = 0; k < K; k += CHUNK) {
        const int n = K - k < CHUNK ? K - k : CHUNK;
        for (int j = 0; j < cols; j++)
            load_rotated(src, n0 + j, k, n, mp_hadamard_size(K), rows[j]);
        put_i8(rows, inverse, n, panel + (size_t)k * MP_PANEL_N);
    }
    int32_t pairs[MP_PANEL_N] = {0};
    for (int s = 0; s < steps_of(MP_W_I8, K); s++)
        for (int j = 0; j < MP_PANEL_N; j++) {
            const uint8_t *u = panel + (s * MP_PANEL_N + j) * 4;
            pairs[j] += u[0] * u[1] + u[2] * u[3];
        }
    memcpy(scale + MP_PANEL_N, pairs, sizeof pairs);
}

void mp_pack_dense(mp_wmat *w, const mp_tensor *src, int panel0, int panel1) {
    _Alignas(64) chunk_rows rows;
    const int K = w->K;
    assert(src->ndim >= 1 && src->shape[src->ndim - 1] == K);
    assert(0 <= panel0 && panel0 <= panel1 && panel1 <= w->panels);
    assert(w->panel_bytes == mp_pack_dense_panel_bytes(w->kind, K));
    for (int p = panel0; p < panel1; p++) {
        uint8_t *panel = w->data + (size_t)p * w->panel_bytes;
        const int n0 = p * MP_PANEL_N;
        const int cols = w->N - n0 < MP_PANEL_N ? w->N - n0 : MP_PANEL_N;
        memset(rows, 0, sizeof rows); /* zeros for outputs beyond N */
        if (w->kind == MP_W_F32 && src->dtype == MP_F32) {
            mp_pack_dense_f32((const float *)(const void *)mp_tensor_row(src, n0), K, cols, K, (float *)panel);
            continue;
        }
        if (w->kind == MP_W_I8) {
            pack_i8_panel(src, n0, cols, K, panel, rows);
            continue;
        }
        if (w->kind == MP_W_BF16) { /* zeros for inputs beyond K */
            const size_t used = (size_t)(K / 2) * MP_PANEL_N * 4;
            memset(panel + used, 0, w->panel_bytes - used);
        }
        for (int k = 0; k < K; k += CHUNK) {
            const int n = K - k < CHUNK ? K - k : CHUNK;
            load_chunk(src, n0, cols, k, n, rows);
            if (w->kind == MP_W_F32)
                put_f32(rows, n, (float *)panel + (size_t)k * MP_PANEL_N);
            else
                put_bf16(rows, n, (uint16_t *)panel + (size_t)k * MP_PANEL_N);
        }
    }
}

/* Pack inputs [0, K) of outputs [j, j + 4), K a multiple of 4: transpose blocks of 4 x 4. */
static void pack_four(const float *w, int64_t ldw, int K, float *panel) {
#if defined(__SSE__)
    for (int k = 0; k < K; k += 4) {
        __m128 a = _mm_loadu_ps(w + k), b = _mm_loadu_ps(w + ldw + k);
        __m128 c = _mm_loadu_ps(w + 2 * ldw + k), d = _mm_loadu_ps(w + 3 * ldw + k);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        float *to = panel + (int64_t)k * MP_PANEL_N;
        _mm_storeu_ps(to, a);
        _mm_storeu_ps(to + MP_PANEL_N, b);
        _mm_storeu_ps(to + 2 * MP_PANEL_N, c);
        _mm_storeu_ps(to + 3 * MP_PANEL_N, d);
    }
#else
    for (int k = 0; k < K; k++)
        for (int j = 0; j < 4; j++)
            panel[(int64_t)k * MP_PANEL_N + j] = w[j * ldw + k];
#endif
}

/* Four rows at a time over all inputs: prefetchers do not follow 32 rows at once. */
void mp_pack_dense_f32(const float *w, int64_t ldw, int cols, int K, float *panel) {
    const int fours = cols / 4 * 4, whole = K / 4 * 4;
    for (int j = 0; j < fours; j += 4)
        pack_four(w + j * ldw, ldw, whole, panel + j);
    for (int k = 0; k < K; k++)
        for (int j = k < whole ? fours : 0; j < MP_PANEL_N; j++)
            panel[(int64_t)k * MP_PANEL_N + j] = j < cols ? w[j * ldw + k] : 0.0f;
}

void mp_pack_dense_row(const mp_wmat *w, int32_t n, float *out) {
    const uint8_t *panel = w->data + (size_t)(n / MP_PANEL_N) * w->panel_bytes;
    const int j = n % MP_PANEL_N;
    assert(0 <= n && n < w->N);
    switch (w->kind) {
    case MP_W_F32:
        for (int k = 0; k < w->K; k++)
            out[k] = ((const float *)panel)[k * MP_PANEL_N + j];
        return;
    case MP_W_BF16:
        for (int k = 0; k < w->K; k++)
            out[k] = mp_bf16_to_f32(((const uint16_t *)panel)[(k / 2 * MP_PANEL_N + j) * 2 + 1 - k % 2]);
        return;
    default: {
        const float scale = ((const float *)(panel + (size_t)steps_of(MP_W_I8, w->K) * MP_PANEL_N * 4))[j];
        for (int k = 0; k < w->K; k++)
            out[k] = (float)((int)panel[(k / 4 * MP_PANEL_N + j) * 4 + k % 4] - 128) * scale;
        mp_kernels_get()->hadamard(out, w->K, mp_hadamard_size(w->K), out);
        return;
    }
    }
}
