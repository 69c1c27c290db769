/* arm/dotprod_rows.c: slot row_maxima_i8 by sdot. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/arm/dot.h"
#include "kernels/digits.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_KEEP_ORDER
MP_TARGET_DOTPROD_BEGIN
#include "kernels/simd/vec_neon.h"

#define DIGITS_TILE
enum { DIGITS_LANES = 4, DIGITS_ROWS = 8, DIGITS_EXPANDED = 0 }; /* 24 sums in 32 registers */
typedef int8_t digits_item;
typedef float32x4_t digits_floats;
typedef struct digits_sums {
    int32x4_t low, middle, high;
} digits_sums;
typedef struct digits_weights {
    int8x16_t low, middle, high;
} digits_weights;

static MP_INLINE void digits_copy(const int8_t *row, int n, digits_item *to) {
    memcpy(to, row, (size_t)n);
    for (; n % 4; n++)
        to[n] = 0;
}
static MP_INLINE const void *digits_expand(const uint8_t *digits, int steps, void *memory) {
    (void)steps, (void)memory;
    return digits;
}
static MP_INLINE digits_sums digits_start(const int32_t *offsets) {
    (void)offsets; /* components are signed */
    const int32x4_t zero = vdupq_n_s32(0);
    return (digits_sums){zero, zero, zero};
}
static MP_INLINE digits_weights digits_load(const void *weights, int step, int column) {
    const int8_t *from = (const int8_t *)weights + step * MP_DIGITS_STEP + column * 4;
    return (digits_weights){vld1q_s8(from), vld1q_s8(from + MP_DIGITS_LINE), vld1q_s8(from + 2 * MP_DIGITS_LINE)};
}
static MP_INLINE void digits_step(digits_sums *sums, digits_weights w, const digits_item *four) {
    const int8x16_t x = arm_word(four);
    sums->low = arm_sdot(sums->low, w.low, x);
    sums->middle = arm_sdot(sums->middle, w.middle, x);
    sums->high = arm_sdot(sums->high, w.high, x);
}
static MP_INLINE digits_floats digits_value(digits_sums s) {
    const float32x4_t high = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(s.high, 8), s.middle));
    return vfmaq_f32(vcvtq_f32_s32(s.low), high, vdupq_n_f32(256.0f));
}
static MP_INLINE void digits_store(float *to, digits_floats x) { vst1q_f32(to, x); }
static MP_INLINE digits_floats digits_add(const float *from, digits_floats x) { return vaddq_f32(vld1q_f32(from), x); }

#include "kernels/simd/maxima_i8_tmpl.h"
MP_TARGET_END

void mp_dotprod_rows(mp_kernel_table *table) { MP_SET(table, row_maxima_i8, maxima_i8, "dotprod"); }
#endif
