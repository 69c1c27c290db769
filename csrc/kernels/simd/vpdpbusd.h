/* vpdpbusd.h: the 256-bit dot products of AVX-VNNI, for use inside its target region (simd/target.h). */
#ifndef MP_KERNELS_SIMD_VPDPBUSD_H
#define MP_KERNELS_SIMD_VPDPBUSD_H

#include <immintrin.h>

#include "kernels/simd/target.h"

/* sum[i] += w[4 i ...] . a[4 i ...], w unsigned, a signed, exact. Inline assembly, because gcc 12, given the intrinsic,
 * spills accumulators that live across a loop. VEX-encoded, because the EVEX encoding belongs to AVX-512. */
static MP_INLINE __m256i vex_dpbusd(__m256i sum, __m256i w, __m256i a) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(a));
    return sum;
}

/* sum[i] += a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1], for int16 a and b. */
static MP_INLINE __m256i vex_dpwssd(__m256i sum, __m256i a, __m256i b) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

#endif
