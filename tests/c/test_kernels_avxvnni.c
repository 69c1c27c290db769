/* test_kernels_avxvnni.c: the kernels of AVX-VNNI, with vpdpbusd and vpdpwssd in plain AVX2 (modelled.h). */
#if defined(__x86_64__)
#include "modelled.h"

#include <immintrin.h>
#include <math.h>

#include "kernels/math_const.h"
#include "kernels/simd/target.h"

#undef MP_TARGET_AVXVNNI_BEGIN
#define MP_TARGET_AVXVNNI_BEGIN MP_TARGET_AVX2_BEGIN

/* instead of kernels/simd/vpdpbusd.h */
#define MP_KERNELS_SIMD_VPDPBUSD_H
MP_TARGET_AVX2_BEGIN
/* sum[i] += w[4 i ...] . a[4 i ...], w unsigned, a signed: products of the even bytes, then of the odd bytes. Not
 * inline: the compiler would take twice as long for this file. */
static __attribute__((noinline)) __m256i vex_dpbusd(__m256i sum, __m256i w, __m256i a) {
    const __m256i low = _mm256_and_si256(w, _mm256_set1_epi16(0xff)), high = _mm256_srli_epi16(w, 8);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd = _mm256_srai_epi16(a, 8);
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(low, even), _mm256_madd_epi16(high, odd)));
}
static __attribute__((noinline)) __m256i vex_dpwssd(__m256i sum, __m256i a, __m256i b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
MP_TARGET_END

#define VEC_VNNI 1 /* for the first file that includes vec_avx2.h */
#define mp_avxvnni_dense modelled_avxvnni_dense
#define mp_avxvnni_quant modelled_avxvnni_quant
#define mp_avxvnni_rows  modelled_avxvnni_rows
#define mp_avxvnni_attention modelled_avxvnni_attention
#define mp_avx2_dense    modelled_unused_avx2_dense
#include "kernels/x86/avx2_dense.c"
#include "kernels/x86/avxvnni_quant.c"
#include "kernels/x86/avxvnni_rows.c"
#include "kernels/x86/avxvnni_attention.c"
#endif
