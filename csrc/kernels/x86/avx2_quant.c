/* x86/avx2_quant.c: quantised products with AVX2 and FMA, and activations to int8.
 *
 * vpmaddubsw adds two products into 16 bits with saturation, which these operands never reach. Activations are within
 * +-127. A pair of products with 4-, 5-, 6- or 7-bit weights is therefore at most 3,810, 7,874, 16,002 or 32,258, and
 * 8, 4, 2 or 1 such pairs can be added in 16 bits. For Q6_K, 4 can: the sums of 16 inputs minus 32 times their q fit 16
 * bits, and sums before may wrap. Pairs with 8-bit weights exceed them: vpmaddwd multiplies these
 * weights with rows of 16 bits, two instructions for four inputs. Moving the sign of the weight to the activation with
 * vpsignb needs three that share two ports on Zen. */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <string.h>

#include "kernels/dequantize.h"
#include "kernels/epilogue.h"
#include "kernels/simd/i8_scale.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_TARGET_AVX2_BEGIN

#include "kernels/simd/quant_avx2.h"

enum { Q_FLUSH_Q4 = 8, Q_FLUSH_Q5 = 4, Q_FLUSH_Q6 = 2, Q_FLUSH_Q7 = 1, Q_BYTES_OFFSET = 128, Q_WIDE = 1 };
/* 8 integers in 16 registers; the floats stay in L1 and are read once per block. Tiles of one vector by 8 rows unpack
 * least, but load a word of a row for each product */
#define Q_VECTORS(R) ((R) <= 2 ? 4 : (R) <= 4 ? 2 : 1)
#define Q_ROWS 8
#define Q_LIGHT_ROWS 4
#define Q_TALL 8

/* Pin an accumulator in its register. gcc otherwise rearranges the integer additions into trees, keeps every product of
 * a block alive for them and spills them all (half the speed). */
static MP_INLINE void q_keep(qi *x) { __asm__("" : "+x"(*x)); }
static MP_INLINE void q_dot(qi *part, qi *sum, qi w, qi a) {
    (void)sum;
    *part = _mm256_add_epi16(*part, _mm256_maddubs_epi16(w, a));
    q_keep(part);
}
static MP_INLINE void q_flush(qi *part, qi *sum) {
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*part, _mm256_set1_epi16(1)));
    *part = _mm256_setzero_si256();
}
static MP_INLINE void q_dot_bytes(qi *part, qi *sum, qi w, qi a, qi odd) {
    (void)part;
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)), a));
    q_keep(sum);
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd));
    q_keep(sum);
}

/* -32 times the sums of inputs 0, 1, 4, 5, ... and of inputs 2, 3, 6, 7, ..., as two words. */
static MP_INLINE void q_centre(const int8_t *q, int n, int32_t *start) {
    for (int i = 0; i < n; i++, q += 16) {
        const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)q);
        __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), x);
        pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0x4e));
        pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0xb1));
        start[i] = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), _mm_slli_epi16(pairs, 5)));
    }
}
#define Q_CENTRE q_centre

#include "kernels/simd/quant_tmpl.h"

enum { S_SHORT = 1 };
static MP_INLINE __m256i s_short_dot(__m256i w, __m256i a) { return _mm256_maddubs_epi16(w, a); }
static MP_INLINE __m256i s_dot(__m256i w, __m256i a) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1));
}

#include "kernels/simd/stored_avx2.h"

static MP_INLINE __m256i magnitudes(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

static MP_INLINE __m128i max_halves(__m256i x) {
    return _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

/* Sum of 16 int32. */
static MP_INLINE int32_t sum_lanes(__m256i a, __m256i b) {
    const __m256i c = _mm256_add_epi32(a, b);
    __m128i d = _mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
    d = _mm_add_epi32(d, _mm_shuffle_epi32(d, 0x4e));
    d = _mm_add_epi32(d, _mm_shuffle_epi32(d, 0xb1));
    return _mm_cvtsi128_si32(d);
}

static void acts_q8(const float *x, int K, int8_t *q, float *scale, int32_t *sum16) {
    assert(K % 32 == 0);
    for (int b = 0; b < K / 32; b++, x += 32, q += 32, sum16 += 2) {
        __m256 v[4];
        MP_UNROLL
        for (int i = 0; i < 4; i++)
            v[i] = _mm256_loadu_ps(x + 8 * i);
        /* bits of magnitudes compare as integers; Inf and NaN are greatest */
        const __m256i m0 = _mm256_max_epi32(magnitudes(v[0]), magnitudes(v[1]));
        const __m256i m1 = _mm256_max_epi32(magnitudes(v[2]), magnitudes(v[3]));
        __m128i m = max_halves(_mm256_max_epi32(m0, m1));
        m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
        m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
        const int32_t max_bits = _mm_cvtsi128_si32(m);
        const float inverse = mp_i8_factor((uint32_t)max_bits, &scale[b]);
        __m256i i[4];
        MP_UNROLL
        for (int k = 0; k < 4; k++)
            i[k] = _mm256_setzero_si256();
        if (inverse != 0.0f) {
            MP_UNROLL
            for (int k = 0; k < 4; k++)
                i[k] = _mm256_cvtps_epi32(_mm256_mul_ps(v[k], _mm256_set1_ps(inverse)));
        }
        sum16[0] = sum_lanes(i[0], i[1]);
        sum16[1] = sum_lanes(i[2], i[3]);
        /* the two packs interleave 128-bit halves; the permutation puts the dwords back in order */
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
        _mm256_storeu_si256((__m256i *)(void *)q,
                            _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
}

MP_TARGET_END

void mp_avx2_quant(mp_kernel_table *table) {
    MP_SET(table, acts_q8, acts_q8, "avx2");
    q_set_gemms(table, "avx2");
    s_set_products(table, "avx2");
}
#endif
