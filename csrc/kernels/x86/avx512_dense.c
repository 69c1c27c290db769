/* x86/avx512_dense.c: dense gemm and activations in 512-bit vectors. A panel is two vectors wide. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/epilogue.h"
#include "kernels/simd/i8_scale.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

typedef int32_t any_word __attribute__((may_alias, aligned(1)));

#define D_LANES  16
#define D_HALVES 1
#define v_float  __m512
#define v_load   _mm512_loadu_ps
#define v_store  _mm512_storeu_ps
#define v_add    _mm512_add_ps
/* Zen 4 reads up to four rows' weights 2 to 40 % faster without prefetches, and float32 for eight rows 15 % slower. */
#define D_AHEAD(rows) ((rows) <= 4 && mp_cpu_reads_ahead() ? 0 : DENSE_AHEAD)

/* ---- F32 --------------------------------------------------------------------------------------------------------- */
MP_TARGET_AVX512_BEGIN
#define D(name)         f32_##name
#define D_W             __m512
#define D_A             __m512
#define D_ACC           __m512
#define D_CLASS         D_F32
#define D_MAX_ROWS      12
#define D_PANELS(R)     ((R) <= 3 ? 2 : 1)
static MP_INLINE __m512 f32_start(int32_t sum) {
    (void)sum;
    return _mm512_setzero_ps();
}
static MP_INLINE __m512 f32_load(const uint8_t *w) { return _mm512_load_ps(w); }
static MP_INLINE __m512 f32_splat(const uint8_t *a) { return _mm512_set1_ps(*(const float *)(const void *)a); }
static MP_INLINE __m512 f32_dot(__m512 acc, __m512 w, __m512 a) { return _mm512_fmadd_ps(a, w, acc); }
static MP_INLINE __m512 f32_result(__m512 acc, const float *sw, float sa) {
    (void)sw, (void)sa;
    return acc;
}
#include "kernels/simd/dense_gemm.h"

/* ---- F32 rows as stored ------------------------------------------------------------------------------------------ */

enum { STORED_OUTPUTS = 16, STORED_ROWS = 12 };

/* Load inputs [k, k + 16) of 16 rows: v[i] has input k + i of every row. Only the inputs in `mask` are read. */
static MP_INLINE void load_columns(const float *const *row, int k, __mmask16 mask, __m512 *v) {
    __m512 pair[16], four[16];
    for (int i = 0; i < 16; i += 2) { /* each vector has the inputs of two rows side by side */
        const __m512 even = _mm512_maskz_loadu_ps(mask, row[i] + k), odd = _mm512_maskz_loadu_ps(mask, row[i + 1] + k);
        pair[i] = _mm512_unpacklo_ps(even, odd);
        pair[i + 1] = _mm512_unpackhi_ps(even, odd);
    }
    for (int i = 0; i < 16; i += 4) /* lane l of four[i + c] has input k + 4 l + c of four rows */
        for (int c = 0; c < 2; c++) {
            const __m512d low = _mm512_castps_pd(pair[i + c]), high = _mm512_castps_pd(pair[i + 2 + c]);
            four[i + 2 * c] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            four[i + 2 * c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int c = 0; c < 4; c++) { /* each vector has one input of all rows */
        const __m512 even0 = _mm512_shuffle_f32x4(four[c], four[c + 4], 0x88);
        const __m512 odd0 = _mm512_shuffle_f32x4(four[c], four[c + 4], 0xdd);
        const __m512 even1 = _mm512_shuffle_f32x4(four[c + 8], four[c + 12], 0x88);
        const __m512 odd1 = _mm512_shuffle_f32x4(four[c + 8], four[c + 12], 0xdd);
        v[c] = _mm512_shuffle_f32x4(even0, even1, 0x88);
        v[c + 4] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
        v[c + 8] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
        v[c + 12] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
    }
}

/* Multiply M rows of activations by 16 rows of weights, whose first inputs in the next group are at `next`: they are
 * prefetched into the L2 cache one chunk ahead, because the prefetchers of the CPU do not follow 16 rows. */
static MP_INLINE void stored_rows(const float *const *row, const float *next, int64_t ld, const mp_acts *x, int m0,
                                  int M, __m512 *sum) {
    const float *a[STORED_ROWS];
    for (int m = 0; m < M; m++)
        a[m] = x->f32 + (m0 + m) * x->ld_f32;
    for (int k0 = 0; k0 < x->K; k0 += MP_K_CHUNK) {
        const int k1 = x->K - k0 < MP_K_CHUNK ? x->K : k0 + MP_K_CHUNK;
        const float *ahead = k0 + MP_K_CHUNK < x->K ? row[0] + k0 + MP_K_CHUNK : next;
        __m512 chain[STORED_ROWS], v[16];
        for (int m = 0; m < M; m++)
            chain[m] = _mm512_setzero_ps();
        int k = k0;
        for (; k + 16 <= k1; k += 16, ahead += 16) {
            for (int r = 0; r < STORED_OUTPUTS; r++)
                _mm_prefetch((const char *)(const void *)(ahead + r * ld), _MM_HINT_T1);
            load_columns(row, k, 0xffff, v);
            for (int i = 0; i < 16; i++)
                for (int m = 0; m < M; m++)
                    chain[m] = _mm512_fmadd_ps(_mm512_set1_ps(a[m][k + i]), v[i], chain[m]);
        }
        if (k < k1) {
            load_columns(row, k, (__mmask16)((1u << (k1 - k)) - 1), v);
            for (int i = 0; i < k1 - k; i++)
                for (int m = 0; m < M; m++)
                    chain[m] = _mm512_fmadd_ps(_mm512_set1_ps(a[m][k + i]), v[i], chain[m]);
        }
        for (int m = 0; m < M; m++)
            sum[m] = k0 == 0 ? chain[m] : _mm512_add_ps(sum[m], chain[m]);
    }
}

static void stored_f32_rows(const float *rows, int64_t ld, int n, const mp_acts *x, int m0, int m1, float *y,
                            int64_t ldy) {
    for (int o = 0; o < n; o += STORED_OUTPUTS) {
        const int count = n - o < STORED_OUTPUTS ? n - o : STORED_OUTPUTS;
        const float *row[STORED_OUTPUTS], *next = rows + (o + STORED_OUTPUTS) * ld;
        for (int r = 0; r < STORED_OUTPUTS; r++) /* rows beyond the last repeat it */
            row[r] = rows + (o + (r < count ? r : count - 1)) * ld;
        for (int m = m0, M; m < m1; m += M) {
            __m512 sum[STORED_ROWS];
            M = m1 - m < STORED_ROWS ? m1 - m : STORED_ROWS;
            switch (M) {
#define CASE(rows) case rows: stored_rows(row, next, ld, x, m, rows, sum); break
            CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6);
            CASE(7); CASE(8); CASE(9); CASE(10); CASE(11); CASE(12);
#undef CASE
            }
            for (int i = 0; i < M; i++)
                _mm512_mask_storeu_ps(y + (m - m0 + i) * ldy + o, (__mmask16)((1u << count) - 1), sum[i]);
        }
    }
}

/* ---- BF16 by fp32 FMAs: for CPUs without vdpbf16ps; the same bits as ref ----------------------------------------- */
typedef struct bf16_pair {
    __m512 first, second; /* inputs k and k + 1 as fp32 */
} bf16_pair;

static MP_INLINE bf16_pair bf16_split(__m512i pairs) {
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
    return (bf16_pair){_mm512_castsi512_ps(_mm512_and_si512(pairs, odd)),
                       _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
}
#define D(name)         bf16_fma_##name
#define D_W             bf16_pair
#define D_A             bf16_pair
#define D_ACC           __m512
#define D_CLASS         D_BF16
#define D_MAX_ROWS      12
#define D_PANELS(R)     ((R) <= 4 ? 2 : 1)
#define bf16_fma_start  f32_start
#define bf16_fma_result f32_result
static MP_INLINE bf16_pair bf16_fma_load(const uint8_t *w) { return bf16_split(_mm512_load_si512(w)); }
static MP_INLINE bf16_pair bf16_fma_splat(const uint8_t *a) {
    return bf16_split(_mm512_set1_epi32(*(const any_word *)a));
}
static MP_INLINE __m512 bf16_fma_dot(__m512 acc, bf16_pair w, bf16_pair a) {
    return _mm512_fmadd_ps(a.second, w.second, _mm512_fmadd_ps(a.first, w.first, acc));
}
#include "kernels/simd/dense_gemm.h"

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* Convert 16 floats to bf16: 8 words, each a pair with its order swapped. Rounds in integer arithmetic, because
 * vcvtneps2bf16 flushes denormals. */
static MP_INLINE __m256i bf16_words(__m512 x) {
    const __m512i u = _mm512_castps_si512(x);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __m512i r = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    /* each 64 bits hold x[2p] low, x[2p + 1] high; the result has the high half of x[2p] above that of x[2p + 1] */
    const __m512i first = _mm512_and_si512(r, _mm512_set1_epi64(0xffff0000));
    return _mm512_cvtepi64_epi32(_mm512_or_si512(first, _mm512_srli_epi64(r, 48)));
}

static void acts_bf16(const float *x, int K, uint16_t *out) {
    int k = 0;
    for (; k + 16 <= K; k += 16)
        _mm256_storeu_si256((__m256i *)(void *)(out + k), bf16_words(_mm512_loadu_ps(x + k)));
    if (k < K) {
        const __m512 tail = _mm512_maskz_loadu_ps((__mmask16)((1u << (K - k)) - 1), x + k);
        const __mmask8 words = (__mmask8)((1u << ((K - k + 1) / 2)) - 1);
        _mm256_mask_storeu_epi32(out + k, words, bf16_words(tail));
    }
}

/* Compute one Hadamard stage within a vector. `swapped` holds each lane's partner; the sign is -1 if the lane is the
 * second of its pair. An FMA by +-1 rounds once, as a sum or difference does. */
static MP_INLINE __m512 stage(__m512 x, __m512 swapped, __mmask16 second) {
    const __m512 sign = _mm512_mask_blend_ps(second, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
    return _mm512_fmadd_ps(x, sign, swapped);
}

/* Compute the Hadamard stages within 16 lanes: those of the distances 1, 2, 4 and 8 that are below `size`. */
static MP_INLINE __m512 within(__m512 x, int size) {
    x = size > 1 ? stage(x, _mm512_permute_ps(x, 0xb1), 0xaaaa) : x;
    x = size > 2 ? stage(x, _mm512_permute_ps(x, 0x4e), 0xcccc) : x;
    x = size > 4 ? stage(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0) : x;
    return size > 8 ? stage(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00) : x;
}

static void hadamard(const float *x, int K, int size, float *y) {
    if (size == 64) {
        for (int k = 0; k < K; k += 64) {
            const __m512 a = within(_mm512_loadu_ps(x + k), 16), b = within(_mm512_loadu_ps(x + k + 16), 16);
            const __m512 c = within(_mm512_loadu_ps(x + k + 32), 16), d = within(_mm512_loadu_ps(x + k + 48), 16);
            const __m512 ab = _mm512_add_ps(a, b), a_b = _mm512_sub_ps(a, b);
            const __m512 cd = _mm512_add_ps(c, d), c_d = _mm512_sub_ps(c, d);
            _mm512_storeu_ps(y + k, _mm512_add_ps(ab, cd));
            _mm512_storeu_ps(y + k + 16, _mm512_add_ps(a_b, c_d));
            _mm512_storeu_ps(y + k + 32, _mm512_sub_ps(ab, cd));
            _mm512_storeu_ps(y + k + 48, _mm512_sub_ps(a_b, c_d));
        }
        return;
    }
    for (int k = 0; k < K; k += 16) {
        const __mmask16 here = (__mmask16)(K - k >= 16 ? 0xffff : (1u << (K - k)) - 1);
        _mm512_mask_storeu_ps(y + k, here, within(_mm512_maskz_loadu_ps(here, x + k), size));
    }
    for (int k = 0; size == 32 && k < K; k += 32) {
        const __m512 a = _mm512_loadu_ps(y + k), b = _mm512_loadu_ps(y + k + 16);
        _mm512_storeu_ps(y + k, _mm512_add_ps(a, b));
        _mm512_storeu_ps(y + k + 16, _mm512_sub_ps(a, b));
    }
}

/* Bits of |x|. They compare as integers; those of NaN and Inf are greatest. */
static MP_INLINE __m512i magnitude(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

static MP_INLINE __m512i rounded(__m512 x, __m512 inverse) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)); }

static void acts_i8(const float *x, int K, int8_t *q, float *scale, int32_t *sum) {
    const __mmask16 tail = (__mmask16)((1u << K % 16) - 1);
    const int whole = K & ~15;
    __m512i top = tail ? magnitude(_mm512_maskz_loadu_ps(tail, x + whole)) : _mm512_setzero_si512(), top1 = top;
    int k = 0;
    for (; k + 32 <= K; k += 32) {
        top = _mm512_max_epi32(top, magnitude(_mm512_loadu_ps(x + k)));
        top1 = _mm512_max_epi32(top1, magnitude(_mm512_loadu_ps(x + k + 16)));
    }
    if (k < whole)
        top = _mm512_max_epi32(top, magnitude(_mm512_loadu_ps(x + k)));
    const int32_t most = _mm512_reduce_max_epi32(_mm512_max_epi32(top, top1));
    const float inverse = mp_i8_factor((uint32_t)most, scale);
    if (inverse == 0.0f) { /* x * 0 would be NaN where x is not finite */
        memset(q, 0, (size_t)K);
        *sum = 0;
        return;
    }
    const __m512 by = _mm512_set1_ps(inverse);
    /* two packs interleave the four vectors in units of four bytes; `order` sorts them */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i total = _mm512_setzero_si512(), total1 = total;
    for (k = 0; k + 64 <= K; k += 64) {
        const __m512i a = rounded(_mm512_loadu_ps(x + k), by), b = rounded(_mm512_loadu_ps(x + k + 16), by);
        const __m512i c = rounded(_mm512_loadu_ps(x + k + 32), by), d = rounded(_mm512_loadu_ps(x + k + 48), by);
        const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
        _mm512_storeu_si512(q + k, _mm512_permutexvar_epi32(order, bytes));
        total = _mm512_add_epi32(total, _mm512_add_epi32(a, b));
        total1 = _mm512_add_epi32(total1, _mm512_add_epi32(c, d));
    }
    for (; k < K; k += 16) {
        const __mmask16 here = k < whole ? 0xffff : tail;
        const __m512i i = rounded(_mm512_maskz_loadu_ps(here, x + k), by);
        _mm512_mask_cvtepi32_storeu_epi8(q + k, here, i);
        total = _mm512_add_epi32(total, i);
    }
    *sum = _mm512_reduce_add_epi32(_mm512_add_epi32(total, total1));
}
MP_TARGET_END

/* ---- I8 ---------------------------------------------------------------------------------------------------------- */
MP_TARGET_AVX512_VNNI_BEGIN
#define D(name)         i8_##name
#define D_W             __m512i
#define D_A             __m512i
#define D_ACC           __m512i
#define D_CLASS         D_I8
#define D_MAX_ROWS      12
#define D_PANELS(R)     1 /* 2 panels: 10 % faster from cache, but half the bandwidth from memory */
static MP_INLINE __m512i i8_start(int32_t sum) { return _mm512_set1_epi32(-128 * sum); }
static MP_INLINE __m512i i8_load(const uint8_t *w) { return _mm512_load_si512(w); }
static MP_INLINE __m512i i8_splat(const uint8_t *a) { return _mm512_set1_epi32(*(const any_word *)a); }
static MP_INLINE __m512i i8_dot(__m512i acc, __m512i w, __m512i a) {
#if defined(__clang__)
    return _mm512_dpbusd_epi32(acc, w, a);
#else /* gcc 12, given the intrinsic, spills accumulators that live across a loop */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
    return acc;
#endif
}
static MP_INLINE __m512 i8_result(__m512i acc, const float *sw, float sa) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(acc), _mm512_mul_ps(_mm512_loadu_ps(sw), _mm512_set1_ps(sa)));
}
#include "kernels/simd/dense_gemm.h"
MP_TARGET_END

/* ---- BF16 -------------------------------------------------------------------------------------------------------- */
MP_TARGET_AVX512_BF16_BEGIN
#define D(name)         bf16_##name
#define D_W             __m512i
#define D_A             __m512i
#define D_ACC           __m512
#define D_CLASS         D_BF16
#define D_MAX_ROWS      12
#define D_PANELS(R)     ((R) <= 6 ? 2 : 1)
static MP_INLINE __m512 bf16_start(int32_t sum) {
    (void)sum;
    return _mm512_setzero_ps();
}
static MP_INLINE __m512i bf16_load(const uint8_t *w) { return _mm512_load_si512(w); }
static MP_INLINE __m512i bf16_splat(const uint8_t *a) { return _mm512_set1_epi32(*(const any_word *)a); }
static MP_INLINE __m512 bf16_dot(__m512 acc, __m512i w, __m512i a) {
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)a);
}
static MP_INLINE __m512 bf16_result(__m512 acc, const float *sw, float sa) {
    (void)sw, (void)sa;
    return acc;
}
#include "kernels/simd/dense_gemm.h"
MP_TARGET_END

void mp_avx512_dense(mp_kernel_table *table, uint32_t features) {
    MP_SET(table, gemm_f32, f32_gemm, "avx512");
    MP_SET(table, gemm_bf16, bf16_fma_gemm, "avx512");
    MP_SET(table, acts_bf16, acts_bf16, "avx512");
    MP_SET(table, acts_i8, acts_i8, "avx512");
    MP_SET(table, hadamard, hadamard, "avx512");
    MP_SET(table, stored_f32_rows, stored_f32_rows, "avx512");
    if (features & MP_CPU_AVX512_VNNI)
        MP_SET(table, gemm_i8, i8_gemm, "avx512vnni");
    if (features & MP_CPU_AVX512_BF16)
        MP_SET(table, gemm_bf16, bf16_gemm, "avx512bf16");
}
#endif
