/* x86/avx512_quant.c: quantised products with AVX-512 and VNNI, and activations to int8.
 *
 * CPUs without VNNI use the AVX2 variant: emulating vpdpbusd at 512 bits would gain little. */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/dequantize.h"
#include "kernels/epilogue.h"
#include "kernels/simd/i8_scale.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_TARGET_AVX512_VNNI_BEGIN

typedef __m512i qi;
typedef __m512i q_part;
typedef __m512 qf;
typedef uint16_t q_words __attribute__((vector_size(64)));

enum { Q_LANES = 16, Q_FLUSH_Q4 = 8, Q_FLUSH_Q5 = 8, Q_FLUSH_Q6 = 4, Q_FLUSH_Q7 = 4, Q_BYTES_OFFSET = 128, Q_WIDE = 0 };
/* One row from memory is 9 to 27 % faster with prefetches to L2 than to L1, whose 16 fill buffers are then free for the
 * loads (measured on a Xeon with AMX). */
enum { Q_NEAR = 2, Q_KEEPS_HEAD = 1 };
/* Zen 4 reads one row without prefetches at 26 to 29 GB/s, with them at 20 to 22. */
#define Q_AHEAD_ONE (mp_cpu_reads_ahead() ? 0 : Q_AHEAD)
#define Q_VECTORS(R) 2
#define Q_ROWS 8
#define Q_TALL 6 /* 12 float and 12 integer sums in 32 registers; with 8 rows, the float sums stay in L1 */

static MP_INLINE qi q_load(const void *from) { return _mm512_loadu_si512(from); }
static MP_INLINE qi q_and(qi a, qi b) { return _mm512_and_si512(a, b); }
static MP_INLINE qi q_or_and(qi a, qi b, qi mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xf8); }
/* Shifts use the compiler's vector types: the intrinsics require a literal, and `n` may be a loop variable that becomes
 * constant only when the loop is unrolled. */
static MP_INLINE qi q_shr(qi x, int n) { return (qi)((q_words)x >> (uint16_t)n); }
static MP_INLINE qi q_shl(qi x, int n) { return (qi)((q_words)x << (uint16_t)n); }
static MP_INLINE qi q_set(int32_t value) { return _mm512_set1_epi32(value); }
static MP_INLINE qi q_spread(const void *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return _mm512_set1_epi32(value);
}
static MP_INLINE qi q_table(const uint8_t *from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)from));
}
static MP_INLINE qi q_lookup(qi table, qi x) { return _mm512_shuffle_epi8(table, x); }
static MP_INLINE qi q_zero(void) { return _mm512_setzero_si512(); }
static MP_INLINE q_part q_part_zero(void) { return q_zero(); }
static MP_INLINE qf q_to_float(qi x) { return _mm512_cvtepi32_ps(x); }
static MP_INLINE qf qf_zero(void) { return _mm512_setzero_ps(); }
static MP_INLINE qf qf_spread(const float *from) { return _mm512_set1_ps(*from); }
static MP_INLINE qf qf_add(qf a, qf b) { return _mm512_add_ps(a, b); }
static MP_INLINE qf qf_mul(qf a, qf b) { return _mm512_mul_ps(a, b); }
static MP_INLINE qf qf_fma(qf a, qf b, qf c) { return _mm512_fmadd_ps(a, b, c); }
static MP_INLINE qf qf_fnma(qf a, qf b, qf c) { return _mm512_fnmadd_ps(a, b, c); }
static MP_INLINE qf qf_load(const float *from) { return _mm512_loadu_ps(from); }
static MP_INLINE void qf_store(float *to, qf x) { _mm512_storeu_ps(to, x); }
static MP_INLINE qf qf_halves(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}
static MP_INLINE qf qf_bf16(const uint8_t *from) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
static MP_INLINE qi q_u8(const uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
}
static MP_INLINE qf qf_i8(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from)));
}
static MP_INLINE void q_dot(qi *part, qi *sum, qi w, qi a) {
    (void)part;
    *sum = _mm512_dpbusd_epi32(*sum, w, a);
}
static MP_INLINE void q_dot_bytes(qi *part, qi *sum, qi w, qi a, qi odd) {
    (void)odd;
    q_dot(part, sum, w, a);
}
static MP_INLINE void q_flush(qi *part, qi *sum) { (void)part, (void)sum; }

#include "kernels/simd/quant_tmpl.h"

enum { S_SHORT = 0 };
static MP_INLINE __m256i s_dot(__m256i w, __m256i a) { return _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, a); }
static MP_INLINE __m256i s_short_dot(__m256i w, __m256i a) { return s_dot(w, a); }

#include "kernels/simd/stored_avx2.h"

MP_TARGET_END

MP_TARGET_AVX512_BEGIN
#include "kernels/simd/vec_avx512.h"

/* Bits of the magnitudes of 16 floats. They compare as integers; those of Inf and NaN are greatest. */
static MP_INLINE __m512i magnitudes(const float *x) {
    return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff));
}

static void q8_block(const float *x, int8_t *q, float *scale, int32_t *sum16) {
    const __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
    const int32_t max_bits = _mm512_reduce_max_epi32(_mm512_max_epi32(magnitudes(x), magnitudes(x + 16)));
    const float inverse = mp_i8_factor((uint32_t)max_bits, scale);
    __m512i q0 = _mm512_setzero_si512(), q1 = q0;
    if (inverse != 0.0f) {
        const __m512 by = _mm512_set1_ps(inverse);
        q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, by));
        q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, by));
    }
    sum16[0] = _mm512_reduce_add_epi32(q0);
    sum16[1] = _mm512_reduce_add_epi32(q1);
    _mm_storeu_si128((__m128i *)(void *)q, _mm512_cvtepi32_epi8(q0));
    _mm_storeu_si128((__m128i *)(void *)(q + 16), _mm512_cvtepi32_epi8(q1));
}

static MP_INLINE __m512i q8_rounded(const float *x, float inverse) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse)));
}

/* Quantise two blocks to 64 bytes. Returns the sums of each four consecutive bytes. */
static MP_INLINE __m512i q8_two_blocks(const float *x, const float *inverse, int8_t *q) {
    /* two packs interleave the four vectors in units of four bytes; `order` sorts them */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i first = _mm512_packs_epi32(q8_rounded(x, inverse[0]), q8_rounded(x + 16, inverse[0]));
    const __m512i second = _mm512_packs_epi32(q8_rounded(x + 32, inverse[1]), q8_rounded(x + 48, inverse[1]));
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
    _mm512_storeu_si512(q, bytes);
    return _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_set1_epi8(1), bytes), _mm512_set1_epi16(1));
}

/* Quantise sixteen blocks at a time: each step of a block depends on the one before, but not on other blocks. */
static void acts_q8(const float *x, int K, int8_t *q, float *scale, int32_t *sum16) {
    assert(K % 32 == 0);
    int b = 0;
    for (; b + 16 <= K / 32; b += 16, x += 512, q += 512, sum16 += 32) {
        _Alignas(64) float top[16 * 16], inverse[16];
        for (int i = 0; i < 16; i++)
            _mm512_store_si512(top + 16 * i, _mm512_max_epi32(magnitudes(x + 32 * i), magnitudes(x + 32 * i + 16)));
        const __m512 max = vec_each_top_bits(16, top), most = _mm512_set1_ps(127.0f);
        const __m512 by = _mm512_div_ps(most, max);
        if (_mm512_cmp_ps_mask(max, _mm512_set1_ps(0x1.fffffep127f), _CMP_LE_OQ) != 0xffff ||
            _mm512_cmp_ps_mask(by, _mm512_set1_ps(0x1.fffffep127f), _CMP_LE_OQ) != 0xffff) {
            for (int i = 0; i < 16; i++)
                q8_block(x + 32 * i, q + 32 * i, scale + b + i, sum16 + 2 * i);
            continue;
        }
        _mm512_storeu_ps(scale + b, _mm512_div_ps(max, most));
        _mm512_store_ps(inverse, by);
        for (int i = 0; i < 16; i += 8) { /* 16 sums of eight blocks: transpose four vectors and add */
            __m512i s[4];
            MP_UNROLL
            for (int v = 0; v < 4; v++)
                s[v] = q8_two_blocks(x + 32 * (i + 2 * v), inverse + i + 2 * v, q + 32 * (i + 2 * v));
            const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(s[0], s[1]), _mm512_unpackhi_epi32(s[0], s[1]));
            const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi32(s[2], s[3]), _mm512_unpackhi_epi32(s[2], s[3]));
            const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
            const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_storeu_si512(sum16 + 2 * i, _mm512_permutexvar_epi32(order, all));
        }
    }
    for (; b < K / 32; b++, x += 32, q += 32, sum16 += 2)
        q8_block(x, q, scale + b, sum16);
}

MP_TARGET_END

void mp_avx512_quant(mp_kernel_table *table, uint32_t features) {
    MP_SET(table, acts_q8, acts_q8, "avx512");
    if (features & MP_CPU_AVX512_VNNI) {
        q_set_gemms(table, "avx512vnni");
        s_set_products(table, "avx512vnni");
    }
}
#endif
