/* quant_avx2.h: the AVX2 operations of quant_tmpl.h except the dot products, on vectors of 8 lanes. Include it inside a
 * target region with AVX2, FMA and F16C; include the headers named here before the region. quant_tmpl.h defines the
 * operations. */
#ifndef MP_KERNELS_SIMD_QUANT_AVX2_H
#define MP_KERNELS_SIMD_QUANT_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd/target.h"

enum { Q_LANES = 8, Q_NEAR = 3, Q_KEEPS_HEAD = 0 };
#define Q_AHEAD_ONE Q_AHEAD

typedef __m256i qi;
typedef __m256i q_part;
typedef __m256 qf;
typedef uint16_t q_words __attribute__((vector_size(32)));

static MP_INLINE qi q_load(const void *from) { return _mm256_loadu_si256(from); }
static MP_INLINE qi q_and(qi a, qi b) { return _mm256_and_si256(a, b); }
static MP_INLINE qi q_or_and(qi a, qi b, qi mask) { return _mm256_or_si256(a, _mm256_and_si256(b, mask)); }
static MP_INLINE qi q_shr(qi x, int n) { return (qi)((q_words)x >> (uint16_t)n); }
static MP_INLINE qi q_shl(qi x, int n) { return (qi)((q_words)x << (uint16_t)n); }
static MP_INLINE qi q_set(int32_t value) { return _mm256_set1_epi32(value); }
static MP_INLINE qi q_spread(const void *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return _mm256_set1_epi32(value);
}
static MP_INLINE qi q_table(const uint8_t *from) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)from));
}
static MP_INLINE qi q_lookup(qi table, qi x) { return _mm256_shuffle_epi8(table, x); }
static MP_INLINE qi q_zero(void) { return _mm256_setzero_si256(); }
static MP_INLINE q_part q_part_zero(void) { return q_zero(); }
static MP_INLINE qf q_to_float(qi x) { return _mm256_cvtepi32_ps(x); }
static MP_INLINE qf qf_zero(void) { return _mm256_setzero_ps(); }
static MP_INLINE qf qf_spread(const float *from) { return _mm256_set1_ps(*from); }
static MP_INLINE qf qf_add(qf a, qf b) { return _mm256_add_ps(a, b); }
static MP_INLINE qf qf_mul(qf a, qf b) { return _mm256_mul_ps(a, b); }
static MP_INLINE qf qf_fma(qf a, qf b, qf c) { return _mm256_fmadd_ps(a, b, c); }
static MP_INLINE qf qf_fnma(qf a, qf b, qf c) { return _mm256_fnmadd_ps(a, b, c); }
static MP_INLINE qf qf_load(const float *from) { return _mm256_loadu_ps(from); }
static MP_INLINE void qf_store(float *to, qf x) { _mm256_storeu_ps(to, x); }
static MP_INLINE qf qf_halves(const uint8_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}
static MP_INLINE qf qf_bf16(const uint8_t *from) {
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
static MP_INLINE qi q_u8(const uint8_t *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
}
static MP_INLINE qf qf_i8(const uint8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from)));
}

#endif
