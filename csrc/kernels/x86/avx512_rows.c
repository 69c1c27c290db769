/* x86/avx512_rows.c: the row kernels for AVX-512. */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/digits.h"
#include "kernels/math_const.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_TARGET_AVX512_BEGIN
#include "kernels/simd/vec_avx512.h"

#include "kernels/simd/rows_tmpl.h"

/* As in avx2_rows.c: pairs of int16. Expanded weights, for each step of 4 inputs and each 16 columns: the upper digits
 * of columns 0 to 7 and 8 to 15, then the lowest digits. */
#define DIGITS_TILE
enum { DIGITS_LANES = 16, DIGITS_ROWS = 4, DIGITS_EXPANDED = 4 * 128 }; /* 16 sums in 32 registers */
typedef int16_t digits_item;
typedef __m512 digits_floats;
typedef struct digits_sums {
    __m512i part[4];
} digits_sums, digits_weights;

static MP_INLINE void digits_copy(const int8_t *row, int n, digits_item *to) {
    for (int i = 0; i < n; i += 32) {
        const int left = n - i < 32 ? n - i : 32, padded = (left + 3) & ~3;
        const __m512i x = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(UINT32_MAX >> (32 - left), row + i));
        _mm512_mask_storeu_epi16(to + i, UINT32_MAX >> (32 - padded), x);
    }
}
static MP_INLINE __m512i digits_widen(const uint8_t *from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)from));
}
static MP_INLINE const void *digits_expand(const uint8_t *digits, int steps, void *memory) {
    for (int s = 0; s < steps; s++)
        for (int c = 0; c < MP_PANEL_N; c += 8) {
            const uint8_t *from = digits + s * MP_DIGITS_STEP + c * 4;
            uint8_t *to = (uint8_t *)memory + s * DIGITS_EXPANDED + c / 16 * 256 + c / 8 % 2 * 64;
            const __m512i high = _mm512_slli_epi16(digits_widen(from + 2 * MP_DIGITS_LINE), 8);
            _mm512_store_si512(to, _mm512_add_epi16(high, digits_widen(from + MP_DIGITS_LINE)));
            _mm512_store_si512(to + 128, digits_widen(from));
        }
    return memory;
}
static MP_INLINE digits_sums digits_start(const int32_t *offsets) {
    (void)offsets; /* components are signed */
    const __m512i zero = _mm512_setzero_si512();
    return (digits_sums){{zero, zero, zero, zero}};
}
static MP_INLINE digits_weights digits_load(const void *weights, int step, int column) {
    const uint8_t *from = (const uint8_t *)weights + step * DIGITS_EXPANDED + column / 16 * 256;
    return (digits_weights){{_mm512_load_si512(from), _mm512_load_si512(from + 64), _mm512_load_si512(from + 128),
                             _mm512_load_si512(from + 192)}};
}
static MP_INLINE void digits_step(digits_sums *sums, digits_weights w, const digits_item *four) {
    long long word;
    memcpy(&word, four, sizeof word);
    const __m512i x = _mm512_set1_epi64(word);
    VEC_UNROLL
    for (int i = 0; i < 4; i++)
        sums->part[i] = veci_dot(sums->part[i], x, w.part[i]);
}
/* Add the two pairs of each column. */
static MP_INLINE __m512 digits_join(__m512i first, __m512i second) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_permutex2var_epi32(first, even, second),
                                               _mm512_permutex2var_epi32(first, odd, second)));
}
static MP_INLINE digits_floats digits_value(digits_sums s) {
    return _mm512_fmadd_ps(digits_join(s.part[0], s.part[1]), _mm512_set1_ps(256.0f),
                           digits_join(s.part[2], s.part[3]));
}
static MP_INLINE void digits_store(float *to, digits_floats x) { _mm512_storeu_ps(to, x); }
static MP_INLINE digits_floats digits_add(const float *from, digits_floats x) {
    return _mm512_add_ps(_mm512_loadu_ps(from), x);
}

#include "kernels/simd/maxima_i8_tmpl.h"
MP_TARGET_END

void mp_avx512_rows(mp_kernel_table *table, uint32_t features) {
    rows_fill(table, "avx512");
    MP_SET(table, row_maxima_i8, maxima_i8, "avx512");
    if (features & MP_CPU_AVX512_VNNI)
        mp_avx512vnni_rows(table);
}
#endif
