/* x86/avx512vnni_rows.c: slot row_maxima_i8 for AVX-512 with VNNI. */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/digits.h"
#include "kernels/math_const.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_TARGET_AVX512_VNNI_BEGIN
#include "kernels/simd/vec_avx512.h"

#define DIGITS_TILE
enum { DIGITS_LANES = 16, DIGITS_ROWS = 8, DIGITS_EXPANDED = 0 }; /* 24 sums in 32 registers */
typedef uint8_t digits_item; /* a component plus 128: vpdpbusd takes one unsigned operand */
typedef __m512 digits_floats;
typedef struct digits_sums {
    __m512i low, middle, high;
} digits_sums, digits_weights;

static MP_INLINE void digits_copy(const int8_t *row, int n, digits_item *to) {
    for (int i = 0; i < n; i += 64) {
        const int left = n - i < 64 ? n - i : 64, padded = (left + 3) & ~3;
        const __m512i x = _mm512_maskz_loadu_epi8(UINT64_MAX >> (64 - left), row + i);
        _mm512_mask_storeu_epi8(to + i, UINT64_MAX >> (64 - padded), _mm512_xor_si512(x, _mm512_set1_epi8(-128)));
    }
}
static MP_INLINE const void *digits_expand(const uint8_t *digits, int steps, void *memory) {
    (void)steps, (void)memory;
    return digits;
}
static MP_INLINE digits_sums digits_start(const int32_t *offsets) {
    return (digits_sums){_mm512_loadu_si512(offsets), _mm512_loadu_si512(offsets + MP_PANEL_N),
                         _mm512_loadu_si512(offsets + 2 * MP_PANEL_N)};
}
static MP_INLINE digits_weights digits_load(const void *weights, int step, int column) {
    const uint8_t *from = (const uint8_t *)weights + step * MP_DIGITS_STEP + column * 4;
    return (digits_weights){_mm512_loadu_si512(from), _mm512_loadu_si512(from + MP_DIGITS_LINE),
                            _mm512_loadu_si512(from + 2 * MP_DIGITS_LINE)};
}
/* Inline assembly, because gcc 12, given the intrinsic, spills accumulators that live across a loop. */
static MP_INLINE __m512i digits_dot(__m512i sum, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
}
static MP_INLINE void digits_step(digits_sums *sums, digits_weights w, const digits_item *four) {
    int32_t word;
    memcpy(&word, four, sizeof word);
    const __m512i x = _mm512_set1_epi32(word);
    sums->low = digits_dot(sums->low, x, w.low);
    sums->middle = digits_dot(sums->middle, x, w.middle);
    sums->high = digits_dot(sums->high, x, w.high);
}
static MP_INLINE digits_floats digits_value(digits_sums s) {
    const __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(s.high, 8), s.middle));
    return _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(s.low));
}
static MP_INLINE void digits_store(float *to, digits_floats x) { _mm512_storeu_ps(to, x); }
static MP_INLINE digits_floats digits_add(const float *from, digits_floats x) {
    return _mm512_add_ps(_mm512_loadu_ps(from), x);
}

#include "kernels/simd/maxima_i8_tmpl.h"
MP_TARGET_END

void mp_avx512vnni_rows(mp_kernel_table *table) { MP_SET(table, row_maxima_i8, maxima_i8, "avx512vnni"); }
#endif
