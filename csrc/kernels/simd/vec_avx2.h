/* vec_avx2.h: the vector layer over two 256-bit registers: lanes 0 to 7 and 8 to 15. vec_plain.h defines the
 * operations. Include it inside MP_TARGET_AVX2_BEGIN; include the headers named here before the region. In a region
 * with AVX-VNNI, define VEC_VNNI and include vpdpbusd.h inside the region first. */
#ifndef MP_KERNELS_SIMD_VEC_AVX2_H
#define MP_KERNELS_SIMD_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd/target.h"
#include "kernels/simd/vec_each.h"
#include "kernels/simd/vec_x86.h"

/* 16 registers, two per vec: 6 sums leave 4 registers for the operands */
enum { VEC_N = 16, VEC_TILE_ROWS = 6, VEC_ACCUMULATORS = 6 };

typedef struct vec {
    __m256 lo, hi;
} vec;

typedef struct vmask { /* each lane has all bits set, or none */
    __m256 lo, hi;
} vmask;

#define VEC_AVX2_1(name, call)            \
    static MP_INLINE vec name(vec x) {    \
        vec y = {call(x.lo), call(x.hi)}; \
        return y;                         \
    }
#define VEC_AVX2_2(name, call)                        \
    static MP_INLINE vec name(vec a, vec b) {         \
        vec y = {call(a.lo, b.lo), call(a.hi, b.hi)}; \
        return y;                                     \
    }

static MP_INLINE vec vec_set(float x) {
    vec y = {_mm256_set1_ps(x), _mm256_set1_ps(x)};
    return y;
}

static MP_INLINE vec vec_zero(void) { return vec_set(0.0f); }

/* Mask of the lanes 0 ... 7 that are below n. */
static MP_INLINE __m256i vec_avx2_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static MP_INLINE vec vec_load(const float *p) {
    vec y = {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    return y;
}

static MP_INLINE vec vec_load_n(const float *p, int n) {
    vec y = {_mm256_maskload_ps(p, vec_avx2_below(n)), _mm256_maskload_ps(p + 8, vec_avx2_below(n - 8))};
    return y;
}

static MP_INLINE vec vec_load_i8(const int8_t *p) {
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (vec){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)))};
}

static MP_INLINE void vec_store(float *p, vec x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}

static MP_INLINE void vec_store_n(float *p, vec x, int n) {
    _mm256_maskstore_ps(p, vec_avx2_below(n), x.lo);
    _mm256_maskstore_ps(p + 8, vec_avx2_below(n - 8), x.hi);
}

/* The even- or the odd-numbered of 16 floats. shuffle_ps works within halves of 4, so permute4x64 restores the order.
 */
#define VEC_AVX2_PICK(a, b, which) \
    _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, which)), 0xd8))

static MP_INLINE void vec_load_pairs(const float *p, vec *even, vec *odd) {
    __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
    __m256 c = _mm256_loadu_ps(p + 16), d = _mm256_loadu_ps(p + 24);
    even->lo = VEC_AVX2_PICK(a, b, 0x88);
    even->hi = VEC_AVX2_PICK(c, d, 0x88);
    odd->lo = VEC_AVX2_PICK(a, b, 0xdd);
    odd->hi = VEC_AVX2_PICK(c, d, 0xdd);
}

static MP_INLINE void vec_avx2_store_pairs8(float *p, __m256 even, __m256 odd) {
    __m256 a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(a, b, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(a, b, 0x31));
}

static MP_INLINE void vec_store_pairs(float *p, vec even, vec odd) {
    vec_avx2_store_pairs8(p, even.lo, odd.lo);
    vec_avx2_store_pairs8(p + 16, even.hi, odd.hi);
}

VEC_AVX2_2(vec_add, _mm256_add_ps)
VEC_AVX2_2(vec_sub, _mm256_sub_ps)
VEC_AVX2_2(vec_mul, _mm256_mul_ps)
VEC_AVX2_2(vec_div, _mm256_div_ps)
VEC_AVX2_2(vec_max, _mm256_max_ps)
VEC_AVX2_2(vec_min, _mm256_min_ps)

static MP_INLINE vec vec_fma(vec a, vec b, vec c) {
    vec y = {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
    return y;
}

#define VEC_AVX2_ABS(x)     _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)
#define VEC_AVX2_NEG(x)     _mm256_xor_ps(_mm256_set1_ps(-0.0f), x)
#define VEC_AVX2_SIGN(a, b) _mm256_or_ps(VEC_AVX2_ABS(a), _mm256_and_ps(_mm256_set1_ps(-0.0f), b))
#define VEC_AVX2_SCALE(a, b) \
    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(b), 23)))

VEC_AVX2_1(vec_abs, VEC_AVX2_ABS)
VEC_AVX2_1(vec_neg, VEC_AVX2_NEG)
VEC_AVX2_2(vec_copysign, VEC_AVX2_SIGN)
VEC_AVX2_2(vec_scale_exponent, VEC_AVX2_SCALE)

/* Look up the low three bits of k in each half of the table, then select the half by bit 3, shifted to the sign bit. */
static MP_INLINE __m256 vec_avx2_pick8(__m256 low, __m256 high, __m256 at) {
    const __m256i k = _mm256_castps_si256(at);
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, k), _mm256_permutevar8x32_ps(high, k),
                            _mm256_castsi256_ps(_mm256_slli_epi32(k, 28)));
}

static MP_INLINE vec vec_pick(const float *table, vec at) {
    const __m256 low = _mm256_load_ps(table), high = _mm256_load_ps(table + 8);
    return (vec){vec_avx2_pick8(low, high, at.lo), vec_avx2_pick8(low, high, at.hi)};
}

static MP_INLINE vmask vec_less(vec a, vec b) {
    vmask m = {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
    return m;
}

static MP_INLINE vmask vec_less_equal(vec a, vec b) {
    vmask m = {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)};
    return m;
}

static MP_INLINE vmask vec_lanes(int from, int to) {
    __m256i lo = _mm256_andnot_si256(vec_avx2_below(from), vec_avx2_below(to));
    __m256i hi = _mm256_andnot_si256(vec_avx2_below(from - 8), vec_avx2_below(to - 8));
    vmask m = {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
    return m;
}

static MP_INLINE vec vec_select(vmask m, vec a, vec b) {
    vec y = {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
    return y;
}

static MP_INLINE float vec_sum(vec x) { return vec_x86_sum8(_mm256_add_ps(x.lo, x.hi)); }

static MP_INLINE float vec_top(vec x) { return vec_x86_top8(_mm256_max_ps(x.hi, x.lo)); }

/* ---- pairs of 16-bit integers ---- */

typedef struct veci {
    __m256i lo, hi;
} veci;

static MP_INLINE veci veci_zero(void) {
    veci y = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    return y;
}

static MP_INLINE veci veci_load(const int16_t *p) {
    const __m256i *from = (const __m256i *)(const void *)p;
    veci y = {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
    return y;
}

static MP_INLINE veci veci_spread(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    veci y = {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
    return y;
}

static MP_INLINE veci veci_load_8(const int8_t *p) {
    const __m128i *from = (const __m128i *)(const void *)p;
    veci y = {_mm256_cvtepi8_epi16(_mm_loadu_si128(from)), _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
    return y;
}

static MP_INLINE veci veci_twice_8(const int8_t *p) {
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)p);
    veci y = {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, x)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, x))};
    return y;
}

static MP_INLINE veci veci_spread_8(const int8_t *p) {
    int16_t pair;
    memcpy(&pair, p, sizeof pair);
    const __m256i x = _mm256_cvtepi8_epi16(_mm_set1_epi16(pair));
    veci y = {x, x};
    return y;
}

static MP_INLINE veci veci_times_16(veci a, veci b) {
    veci y = {_mm256_mullo_epi16(a.lo, b.lo), _mm256_mullo_epi16(a.hi, b.hi)};
    return y;
}

static MP_INLINE veci veci_dot(veci sum, veci a, veci b) {
#if defined(VEC_VNNI) /* the includer has included vpdpbusd.h */
    sum.lo = vex_dpwssd(sum.lo, a.lo, b.lo);
    sum.hi = vex_dpwssd(sum.hi, a.hi, b.hi);
#elif defined(__clang__)
    sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo));
    sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi));
#else /* gcc 12, given the intrinsics, multiplies far ahead of the additions and spills the sums */
    __m256i lo, hi;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.lo), "=&x"(lo) : "x"(a.lo), "x"(b.lo));
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.hi), "=&x"(hi) : "x"(a.hi), "x"(b.hi));
#endif
    return sum;
}

static MP_INLINE vec veci_to_float(veci x) {
    vec y = {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)};
    return y;
}

static MP_INLINE void vec_store_low16(int16_t *p, vec x) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    const __m256i lo = _mm256_and_si256(_mm256_castps_si256(x.lo), mask);
    const __m256i hi = _mm256_and_si256(_mm256_castps_si256(x.hi), mask);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8));
}

static MP_INLINE void vec_store_low16_strided(int16_t *p, vec x) {
    int16_t part[16];
    vec_store_low16(part, x);
    MP_UNROLL
    for (int l = 0; l < 16; l++)
        p[2 * l] = part[l];
}

#define VEC_AVX2_PAIR16(a, b) \
    _mm256_blend_epi16(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(b), 16), 0xaa)

static MP_INLINE void vec_store_low16_pairs(int16_t *p, vec even, vec odd) {
    _mm256_storeu_si256((__m256i *)(void *)p, VEC_AVX2_PAIR16(even.lo, odd.lo));
    _mm256_storeu_si256((__m256i *)(void *)(p + 16), VEC_AVX2_PAIR16(even.hi, odd.hi));
}

#define VEC_AVX2_MAX_BITS(a, b) _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)))

VEC_AVX2_2(vec_max_bits, VEC_AVX2_MAX_BITS)

static MP_INLINE float vec_top_bits(vec x) { return vec_x86_top_bits8(VEC_AVX2_MAX_BITS(x.lo, x.hi)); }

VEC_EACH_ROW(vec_each_sum, vec_sum)
VEC_EACH_ROW(vec_each_top, vec_top)
VEC_EACH_ROW(vec_each_top_bits, vec_top_bits)

#endif
