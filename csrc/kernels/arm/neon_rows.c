/* arm/neon_rows.c: the row kernels for NEON. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <assert.h>
#include <math.h>

#include "kernels/digits.h"
#include "kernels/simd/target.h"

MP_KEEP_ORDER
#include "kernels/simd/vec_neon.h"

#include "kernels/simd/rows_tmpl.h"

/* smlal multiplies int16 exactly: 256 * digit 2 + digit 1, and digit 0. Expanded weights, for each step of 4 inputs and
 * each 4 columns: for each input, the upper digits of the columns, then the lowest digits. */
#define DIGITS_TILE
enum { DIGITS_LANES = 4, DIGITS_ROWS = 4, DIGITS_EXPANDED = 4 * 128 };
typedef int16_t digits_item;
typedef float32x4_t digits_floats;
typedef struct digits_sums {
    int32x4_t high, low;
} digits_sums;
typedef struct digits_weights {
    int16x8_t input[4];
} digits_weights;

static MP_INLINE void digits_copy(const int8_t *row, int n, digits_item *to) {
    for (int i = 0; i < n; i++)
        to[i] = row[i];
    for (; n % 4; n++)
        to[n] = 0;
}
static MP_INLINE const void *digits_expand(const uint8_t *digits, int steps, void *memory) {
    for (int s = 0; s < steps; s++)
        for (int c = 0; c < MP_PANEL_N; c++)
            for (int i = 0; i < 4; i++) {
                const int8_t *from = (const int8_t *)digits + s * MP_DIGITS_STEP + c * 4 + i;
                int16_t *to = (int16_t *)memory + (s * (MP_PANEL_N / 4) + c / 4) * 32 + i * 8 + c % 4;
                to[0] = (int16_t)(from[2 * MP_DIGITS_LINE] * 256 + from[MP_DIGITS_LINE]);
                to[4] = from[0];
            }
    return memory;
}
static MP_INLINE digits_sums digits_start(const int32_t *offsets) {
    (void)offsets; /* components are signed */
    return (digits_sums){vdupq_n_s32(0), vdupq_n_s32(0)};
}
static MP_INLINE digits_weights digits_load(const void *weights, int step, int column) {
    const int16_t *from = (const int16_t *)weights + (step * (MP_PANEL_N / 4) + column / 4) * 32;
    return (digits_weights){{vld1q_s16(from), vld1q_s16(from + 8), vld1q_s16(from + 16), vld1q_s16(from + 24)}};
}
#define DIGITS_INPUT(i)                                                        \
    sums->high = vmlal_lane_s16(sums->high, vget_low_s16(w.input[i]), x, i);   \
    sums->low = vmlal_high_lane_s16(sums->low, w.input[i], x, i)
static MP_INLINE void digits_step(digits_sums *sums, digits_weights w, const digits_item *four) {
    const int16x4_t x = vld1_s16(four);
    DIGITS_INPUT(0);
    DIGITS_INPUT(1);
    DIGITS_INPUT(2);
    DIGITS_INPUT(3);
}
static MP_INLINE digits_floats digits_value(digits_sums s) {
    return vfmaq_f32(vcvtq_f32_s32(s.low), vcvtq_f32_s32(s.high), vdupq_n_f32(256.0f));
}
static MP_INLINE void digits_store(float *to, digits_floats x) { vst1q_f32(to, x); }
static MP_INLINE digits_floats digits_add(const float *from, digits_floats x) { return vaddq_f32(vld1q_f32(from), x); }

#include "kernels/simd/maxima_i8_tmpl.h"

void mp_neon_rows(mp_kernel_table *table) {
    rows_fill(table, "neon");
    MP_SET(table, row_maxima_i8, maxima_i8, "neon");
}
#endif
