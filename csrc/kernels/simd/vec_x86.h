/* vec_x86.h: the parts of the vector layer that AVX2 and AVX-512 share. Include it inside a target region; see
 * vec_plain.h. */
#ifndef MP_KERNELS_SIMD_VEC_X86_H
#define MP_KERNELS_SIMD_VEC_X86_H

#include <immintrin.h>
#include <stdint.h>

#include "kernels/simd/target.h"

#define VEC_INLINE MP_INLINE
#define VEC_UNROLL MP_UNROLL

/* Sum 8 lanes by the rest of the fixed tree, at distances 4, 2, 1. */
static MP_INLINE float vec_x86_sum8(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static MP_INLINE float vec_x86_top8(__m256 x) {
    __m128 s = _mm_max_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    s = _mm_max_ps(_mm_movehl_ps(s, s), s);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(s), s));
}

static MP_INLINE float vec_x86_top_bits8(__m256 x) {
    const __m256i y = _mm256_castps_si256(x);
    __m128i s = _mm_max_epu32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(s));
}

/* Rows r and r + 4 are loaded into the halves of one register, so that only two rounds of shuffles remain. */
static MP_INLINE void vec_transpose8(const float *src, int64_t src_ld, int rows, float *dst, int64_t dst_ld) {
    const float *row[8];
    MP_UNROLL
    for (int r = 0; r < 8; r++)
        row[r] = src + (r < rows ? r : rows - 1) * src_ld;
    MP_UNROLL
    for (int c = 0; c < 8; c += 4) {
        __m256 a[4], t[4];
        MP_UNROLL
        for (int r = 0; r < 4; r++)
            a[r] =
                _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[r] + c)), _mm_loadu_ps(row[r + 4] + c), 1);
        t[0] = _mm256_unpacklo_ps(a[0], a[1]);
        t[1] = _mm256_unpackhi_ps(a[0], a[1]);
        t[2] = _mm256_unpacklo_ps(a[2], a[3]);
        t[3] = _mm256_unpackhi_ps(a[2], a[3]);
        _mm256_storeu_ps(dst + (c + 0) * dst_ld, _mm256_shuffle_ps(t[0], t[2], 0x44));
        _mm256_storeu_ps(dst + (c + 1) * dst_ld, _mm256_shuffle_ps(t[0], t[2], 0xee));
        _mm256_storeu_ps(dst + (c + 2) * dst_ld, _mm256_shuffle_ps(t[1], t[3], 0x44));
        _mm256_storeu_ps(dst + (c + 3) * dst_ld, _mm256_shuffle_ps(t[1], t[3], 0xee));
    }
}

static MP_INLINE void vec_prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
static MP_INLINE void vec_prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); } /* to L2 */

#endif
