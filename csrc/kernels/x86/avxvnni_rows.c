/* x86/avxvnni_rows.c: slot row_maxima_i8 with the 256-bit vpdpbusd, for CPUs with AVX-VNNI. */
#include "kernels/simd/target.h"
#if defined(__x86_64__) && defined(MP_TARGET_AVXVNNI_BEGIN)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/digits.h"
#include "kernels/math_const.h"
#include "kernels/variants.h"

MP_TARGET_AVXVNNI_BEGIN
#include "kernels/simd/vec_avx2.h"
#include "kernels/simd/vpdpbusd.h"

#define DIGITS_TILE
enum { DIGITS_LANES = 8, DIGITS_ROWS = 4, DIGITS_EXPANDED = 0 }; /* 12 sums in 16 registers */
typedef uint8_t digits_item; /* a component plus 128: vpdpbusd takes one unsigned operand */
typedef __m256 digits_floats;
typedef struct digits_sums {
    __m256i low, middle, high;
} digits_sums, digits_weights;

static MP_INLINE __m256i digits_line(const void *from) { return _mm256_loadu_si256(from); }

static MP_INLINE void digits_copy(const int8_t *row, int n, digits_item *to) {
    int i = 0;
    for (; i + 32 <= n; i += 32)
        _mm256_storeu_si256((__m256i *)(void *)(to + i),
                            _mm256_xor_si256(digits_line(row + i), _mm256_set1_epi8(-128)));
    for (; i < n; i++)
        to[i] = (uint8_t)(row[i] + 128);
    for (; i % 4; i++)
        to[i] = 0;
}
static MP_INLINE const void *digits_expand(const uint8_t *digits, int steps, void *memory) {
    (void)steps, (void)memory;
    return digits;
}
static MP_INLINE digits_sums digits_start(const int32_t *offsets) {
    return (digits_sums){digits_line(offsets), digits_line(offsets + MP_PANEL_N),
                         digits_line(offsets + 2 * MP_PANEL_N)};
}
static MP_INLINE digits_weights digits_load(const void *weights, int step, int column) {
    const uint8_t *from = (const uint8_t *)weights + step * MP_DIGITS_STEP + column * 4;
    return (digits_weights){digits_line(from), digits_line(from + MP_DIGITS_LINE),
                            digits_line(from + 2 * MP_DIGITS_LINE)};
}
static MP_INLINE void digits_step(digits_sums *sums, digits_weights w, const digits_item *four) {
    int32_t word;
    memcpy(&word, four, sizeof word);
    const __m256i x = _mm256_set1_epi32(word);
    sums->low = vex_dpbusd(sums->low, x, w.low);
    sums->middle = vex_dpbusd(sums->middle, x, w.middle);
    sums->high = vex_dpbusd(sums->high, x, w.high);
}
static MP_INLINE digits_floats digits_value(digits_sums s) {
    const __m256 high = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(s.high, 8), s.middle));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(256.0f), _mm256_cvtepi32_ps(s.low));
}
static MP_INLINE void digits_store(float *to, digits_floats x) { _mm256_storeu_ps(to, x); }
static MP_INLINE digits_floats digits_add(const float *from, digits_floats x) {
    return _mm256_add_ps(_mm256_loadu_ps(from), x);
}

#include "kernels/simd/maxima_i8_tmpl.h"
MP_TARGET_END

void mp_avxvnni_rows(mp_kernel_table *table) { MP_SET(table, row_maxima_i8, maxima_i8, "avxvnni"); }
#endif
