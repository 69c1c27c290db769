/* acts.c: convert activations to the format that a kind of weights requires. */
#include <assert.h>
#include <string.h>

#include "kernels/kernels.h"

/* Memory of one mp_acts. Each part starts at a multiple of 64 bytes:
 *
 *   BF16:  bf16 [M, ldq]     pairs swapped: x[k + 1], x[k] (pack_dense.h); zeros up to a multiple of 32
 *   Q8:    q [M, ldq] | scale [M, K / 32] | sum [M, K / 16] | low [M, K / 32]
 *   I8:    q [M, ldq] | scale [M]         | sum [M] */
typedef struct acts_layout {
    int64_t ldq;
    size_t scale, sum, low, bytes; /* offsets of scale, sum and low, and the total */
} acts_layout;

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

static acts_layout layout_of(mp_akind kind, int32_t M, int32_t K) {
    acts_layout l = {0};
    const size_t m = (size_t)M, k = (size_t)K;
    if (kind == MP_A_F32)
        return l;
    const size_t item = kind == MP_A_BF16 ? sizeof(uint16_t) : sizeof(int8_t);
    size_t row = align64(kind == MP_A_BF16 ? k * item : align64(k));
    /* Rows at a distance of a multiple of 2 KiB map to few sets of an L1 with ways of 4 KiB, so the rows of a tile
     * would evict one another. */
    if (row % 2048 == 0)
        row += 64;
    l.ldq = (int64_t)(row / item);
    l.scale = align64(m * row);
    l.sum = l.scale;
    l.bytes = l.scale;
    if (kind == MP_A_Q8) {
        l.sum = l.scale + align64(m * (k / 32) * sizeof(float));
        l.low = l.sum + align64(m * (k / 16) * sizeof(int32_t));
        l.bytes = l.low + align64(m * (k / 32) * sizeof(float));
    } else if (kind == MP_A_I8) {
        l.sum = l.scale + align64(m * sizeof(float));
        l.bytes = l.sum + align64(m * sizeof(int32_t));
    }
    return l;
}

size_t mp_acts_bytes(mp_akind kind, int32_t M, int32_t K) {
    assert(M >= 0 && K >= 0);
    return layout_of(kind, M, K).bytes;
}

void mp_acts_init(mp_acts *x, mp_akind kind, int32_t M, int32_t K, void *memory) {
    assert(M >= 0 && K >= 0);
    assert(kind != MP_A_Q8 || K % 32 == 0);
    assert(kind != MP_A_I8 || K <= MP_I8_MAX_INPUTS);
    assert(((uintptr_t)memory & 63) == 0);
    const acts_layout l = layout_of(kind, M, K);
    uint8_t *base = memory;
    *x = (mp_acts){.kind = kind, .M = M, .K = K, .ldq = l.ldq};
    if (kind == MP_A_F32)
        return;
    assert(base || l.bytes == 0);
    if (kind == MP_A_BF16) {
        x->bf16 = (uint16_t *)base;
        return;
    }
    x->q = (int8_t *)base;
    x->scale = (float *)(base + l.scale);
    x->sum = (int32_t *)(base + l.sum);
    if (kind == MP_A_Q8)
        x->low = (float *)(base + l.low);
}

/* Rotate and quantise one row at a time. */
static void fill_i8(mp_acts *x, const float *in, int64_t ld, int row0, int row1) {
    _Alignas(64) float rotated[MP_I8_MAX_INPUTS];
    const mp_kernels *k = mp_kernels_get();
    const int K = x->K;
    for (int m = row0; m < row1; m++) {
        int8_t *q = x->q + m * x->ldq;
        k->hadamard(in + m * ld, K, mp_hadamard_size(K), rotated);
        k->acts_i8(rotated, K, q, x->scale + m, x->sum + m);
        memset(q + K, 0, align64((size_t)K) - (size_t)K);
    }
}

static void fill_bf16(const mp_kernels *k, const float *in, int K, uint16_t *out) {
    const size_t written = (size_t)(K + 1) / 2 * 2, all = align64((size_t)K * sizeof *out) / sizeof *out;
    k->acts_bf16(in, K, out);
    memset(out + written, 0, (all - written) * sizeof *out);
}

/* Quantise the first n inputs of row m. */
static void fill_q8(const mp_acts *x, const float *in, int n, int m) {
    const int64_t block = (int64_t)m * (x->K / 32);
    const int32_t *sum = x->sum + 2 * block;
    const float *scale = x->scale + block;
    float *low = x->low + block;
    mp_kernels_get()->acts_q8(in, n, x->q + m * x->ldq, x->scale + block, x->sum + 2 * block);
    for (int b = 0; b < n / 32; b++)
        low[b] = scale[b] * (float)(sum[2 * b] + sum[2 * b + 1]);
}

void mp_acts_fill(mp_acts *x, const float *in, int64_t ld, int row0, int row1) {
    const mp_kernels *k = mp_kernels_get();
    const int K = x->K;
    assert(0 <= row0 && row0 <= row1 && row1 <= x->M && ld >= K);
    switch (x->kind) {
    case MP_A_F32:
        x->f32 = in;
        x->ld_f32 = ld;
        return;
    case MP_A_BF16:
        for (int m = row0; m < row1; m++)
            fill_bf16(k, in + m * ld, K, x->bf16 + m * x->ldq);
        return;
    case MP_A_Q8:
        for (int m = row0; m < row1; m++) {
            fill_q8(x, in + m * ld, K, m);
            memset(x->q + m * x->ldq + K, 0, align64((size_t)K) - (size_t)K);
        }
        return;
    case MP_A_I8:
        fill_i8(x, in, ld, row0, row1);
        return;
    }
}

void mp_acts_fill_first(mp_acts *x, const float *in, int64_t ld, int n, int row0, int row1) {
    const mp_kernels *k = mp_kernels_get();
    assert(0 <= row0 && row0 <= row1 && row1 <= x->M && ld >= n && n < x->K && n % 32 == 0);
    assert(x->kind == MP_A_BF16 || x->kind == MP_A_Q8);
    for (int m = row0; m < row1; m++)
        if (x->kind == MP_A_BF16)
            k->acts_bf16(in + m * ld, n, x->bf16 + m * x->ldq);
        else
            fill_q8(x, in + m * ld, n, m);
}
