/* x86/avx2_rows.c: the row kernels for AVX2 and FMA. */
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

MP_TARGET_AVX2_BEGIN
#include "kernels/simd/vec_avx2.h"

#include "kernels/simd/rows_tmpl.h"

/* vpmaddwd multiplies pairs of int16 exactly: 256 * digit 2 + digit 1, and digit 0. Expanded weights, for each step of
 * 4 inputs and each 8 columns: the upper digits of columns 0 to 3 and 4 to 7, then the lowest digits. A register holds
 * two pairs of each of 4 columns. */
#define DIGITS_TILE
enum { DIGITS_LANES = 8, DIGITS_ROWS = 2, DIGITS_EXPANDED = 4 * 128 };
typedef int16_t digits_item;
typedef __m256 digits_floats;
typedef struct digits_sums {
    __m256i part[4];
} digits_sums, digits_weights;

static MP_INLINE void digits_copy(const int8_t *row, int n, digits_item *to) {
    int i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(void *)(to + i),
                            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(row + i))));
    for (; i < n; i++)
        to[i] = row[i];
    for (; i % 4; i++)
        to[i] = 0;
}
static MP_INLINE __m256i digits_widen(const uint8_t *from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)from));
}
static MP_INLINE const void *digits_expand(const uint8_t *digits, int steps, void *memory) {
    for (int s = 0; s < steps; s++)
        for (int c = 0; c < MP_PANEL_N; c += 4) {
            const uint8_t *from = digits + s * MP_DIGITS_STEP + c * 4;
            const __m256i high = _mm256_slli_epi16(digits_widen(from + 2 * MP_DIGITS_LINE), 8);
            __m256i *to = (__m256i *)memory + s * 16 + c / 8 * 4 + c / 4 % 2;
            _mm256_store_si256(to, _mm256_add_epi16(high, digits_widen(from + MP_DIGITS_LINE)));
            _mm256_store_si256(to + 2, digits_widen(from));
        }
    return memory;
}
static MP_INLINE digits_sums digits_start(const int32_t *offsets) {
    (void)offsets; /* components are signed */
    const __m256i zero = _mm256_setzero_si256();
    return (digits_sums){{zero, zero, zero, zero}};
}
static MP_INLINE digits_weights digits_load(const void *weights, int step, int column) {
    const __m256i *from = (const __m256i *)weights + step * 16 + column / 8 * 4;
    return (digits_weights){{from[0], from[1], from[2], from[3]}};
}
static MP_INLINE void digits_step(digits_sums *sums, digits_weights w, const digits_item *four) {
    long long word;
    memcpy(&word, four, sizeof word);
    const __m256i x = _mm256_set1_epi64x(word);
    VEC_UNROLL
    for (int i = 0; i < 4; i++) {
        sums->part[i] = _mm256_add_epi32(sums->part[i], _mm256_madd_epi16(x, w.part[i]));
        __asm__("" : "+x"(sums->part[i])); /* gcc otherwise adds the products of several steps first and spills them */
    }
}
/* Add the two pairs of each column; the permutation puts the columns in order. */
static MP_INLINE __m256 digits_join(__m256i first, __m256i second) {
    return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(first, second), 0xd8));
}
static MP_INLINE digits_floats digits_value(digits_sums s) {
    return _mm256_fmadd_ps(digits_join(s.part[0], s.part[1]), _mm256_set1_ps(256.0f),
                           digits_join(s.part[2], s.part[3]));
}
static MP_INLINE void digits_store(float *to, digits_floats x) { _mm256_storeu_ps(to, x); }
static MP_INLINE digits_floats digits_add(const float *from, digits_floats x) {
    return _mm256_add_ps(_mm256_loadu_ps(from), x);
}

#include "kernels/simd/maxima_i8_tmpl.h"
MP_TARGET_END

void mp_avx2_rows(mp_kernel_table *table) {
    rows_fill(table, "avx2");
    MP_SET(table, row_maxima_i8, maxima_i8, "avx2");
}
#endif
