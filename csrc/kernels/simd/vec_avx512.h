/* vec_avx512.h: the vector layer over one 512-bit register. vec_plain.h defines the operations. Include it inside
 * MP_TARGET_AVX512_BEGIN; include the headers named here before the region. Define VEC_VNNI if the region has VNNI. */
#ifndef MP_KERNELS_SIMD_VEC_AVX512_H
#define MP_KERNELS_SIMD_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd/target.h"
#include "kernels/simd/vec_x86.h"

/* 32 registers: 24 sums leave room for the operands */
#define VEC_WIDE_TILES 1 /* tiles have up to 8 rows; those of other instruction sets up to 6 */
enum { VEC_N = 16, VEC_TILE_ROWS = 8, VEC_ACCUMULATORS = 24 };

typedef __m512 vec;
typedef __mmask16 vmask;

static MP_INLINE vec vec_set(float x) { return _mm512_set1_ps(x); }
static MP_INLINE vec vec_zero(void) { return _mm512_setzero_ps(); }

/* Mask of the n lowest lanes; n is clamped to [0, 16]. */
static MP_INLINE vmask vec_avx512_first(int n) { return (vmask)((1u << (n < 0 ? 0 : n > 16 ? 16 : n)) - 1u); }

static MP_INLINE vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
static MP_INLINE vec vec_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(vec_avx512_first(n), p); }
static MP_INLINE vec vec_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
static MP_INLINE void vec_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
static MP_INLINE void vec_store_n(float *p, vec x, int n) { _mm512_mask_storeu_ps(p, vec_avx512_first(n), x); }

static MP_INLINE void vec_load_pairs(const float *p, vec *even, vec *odd) {
    const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
    *even = _mm512_permutex2var_ps(a, at, b);
    *odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(at, _mm512_set1_epi32(1)), b);
}

static MP_INLINE void vec_store_pairs(float *p, vec even, vec odd) {
    const __m512i at = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(even, at, odd));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even, _mm512_add_epi32(at, _mm512_set1_epi32(8)), odd));
}

static MP_INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static MP_INLINE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static MP_INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static MP_INLINE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static MP_INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static MP_INLINE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }
static MP_INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static MP_INLINE vec vec_abs(vec x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
static MP_INLINE vec vec_neg(vec x) { return _mm512_xor_ps(_mm512_set1_ps(-0.0f), x); }

static MP_INLINE vec vec_copysign(vec a, vec b) {
    return _mm512_or_ps(vec_abs(a), _mm512_and_ps(_mm512_set1_ps(-0.0f), b));
}

static MP_INLINE vec vec_scale_exponent(vec a, vec b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(b), 23)));
}

static MP_INLINE vec vec_pick(const float *table, vec at) {
    return _mm512_permutexvar_ps(_mm512_castps_si512(at), _mm512_load_ps(table));
}

static MP_INLINE vmask vec_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static MP_INLINE vmask vec_less_equal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }

static MP_INLINE vmask vec_lanes(int from, int to) { return (vmask)(vec_avx512_first(to) & ~vec_avx512_first(from)); }

static MP_INLINE vec vec_select(vmask m, vec a, vec b) { return _mm512_mask_blend_ps(m, b, a); }

static MP_INLINE float vec_sum(vec x) {
    return vec_x86_sum8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}

static MP_INLINE float vec_top(vec x) {
    return vec_x86_top8(_mm256_max_ps(_mm512_extractf32x8_ps(x, 1), _mm512_castps512_ps256(x)));
}

/* ---- pairs of 16-bit integers ---- */

typedef __m512i veci;

static MP_INLINE veci veci_zero(void) { return _mm512_setzero_si512(); }
static MP_INLINE veci veci_load(const int16_t *p) { return _mm512_loadu_si512(p); }

static MP_INLINE veci veci_spread(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

static MP_INLINE veci veci_load_8(const int8_t *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

static MP_INLINE veci veci_twice_8(const int8_t *p) {
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(x, x), _mm_unpacklo_epi8(x, x)));
}

static MP_INLINE veci veci_spread_8(const int8_t *p) {
    int16_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_cvtepi8_epi16(_mm256_set1_epi16(pair));
}

static MP_INLINE veci veci_times_16(veci a, veci b) { return _mm512_mullo_epi16(a, b); }

static MP_INLINE veci veci_dot(veci sum, veci a, veci b) {
#if defined(__clang__) && defined(VEC_VNNI)
    return _mm512_dpwssd_epi32(sum, a, b);
#elif defined(__clang__)
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#elif defined(VEC_VNNI) /* gcc 12, given the intrinsics, spills accumulators that live across a loop */
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    veci product;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(a), "v"(b));
    return sum;
#endif
}

static MP_INLINE vec veci_to_float(veci x) { return _mm512_cvtepi32_ps(x); }

static MP_INLINE void vec_store_low16(int16_t *p, vec x) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_castps_si512(x)));
}

static MP_INLINE void vec_store_low16_strided(int16_t *p, vec x) {
    _mm512_mask_storeu_epi16(p, 0x55555555u, _mm512_castps_si512(x));
}

static MP_INLINE void vec_store_low16_pairs(int16_t *p, vec even, vec odd) {
    const __m512i high = _mm512_slli_epi32(_mm512_castps_si512(odd), 16);
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_castps_si512(even), high));
}

static MP_INLINE vec vec_max_bits(vec a, vec b) {
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

static MP_INLINE float vec_top_bits(vec x) {
    return vec_x86_top_bits8(_mm512_castps512_ps256(vec_max_bits(x, _mm512_shuffle_f32x4(x, x, 0x4e))));
}

/* Rows are combined in pairs, so that one step of the tree serves two rows: lanes at distance 8 of rows r and r + 8,
 * then at distance 4 of rows r and r + 4, and so on. If N is 4, the first row replaces the missing ones. */
#define VEC_AVX512_EACH(name, op)                                                                              \
    static MP_INLINE vec name(const int N, const float *p) {                                                   \
        vec x[16];                                                                                             \
        MP_UNROLL                                                                                              \
        for (int r = 0; r < 16; r++)                                                                           \
            x[r] = vec_load(p + (r < N ? r : 0) * VEC_N);                                                      \
        MP_UNROLL                                                                                              \
        for (int r = 0; r < 8; r++)                                                                            \
            x[r] = op(_mm512_shuffle_f32x4(x[r], x[r + 8], 0xee), _mm512_shuffle_f32x4(x[r], x[r + 8], 0x44)); \
        MP_UNROLL                                                                                              \
        for (int r = 0; r < 4; r++)                                                                            \
            x[r] = op(_mm512_shuffle_f32x4(x[r], x[r + 4], 0xdd), _mm512_shuffle_f32x4(x[r], x[r + 4], 0x88)); \
        MP_UNROLL                                                                                              \
        for (int r = 0; r < 2; r++)                                                                            \
            x[r] = op(_mm512_shuffle_ps(x[r], x[r + 2], 0xee), _mm512_shuffle_ps(x[r], x[r + 2], 0x44));       \
        x[0] = op(_mm512_shuffle_ps(x[0], x[1], 0xdd), _mm512_shuffle_ps(x[0], x[1], 0x88));                   \
        const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);         \
        return _mm512_permutexvar_ps(order, x[0]);                                                             \
    }
VEC_AVX512_EACH(vec_each_sum, vec_add)
VEC_AVX512_EACH(vec_each_top, vec_max)
VEC_AVX512_EACH(vec_each_top_bits, vec_max_bits)

#endif
