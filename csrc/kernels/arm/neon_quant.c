/* arm/neon_quant.c: quantised products with NEON alone, and activations to int8.
 *
 * Products are accumulated in 16 bits. Activations are within +-127. A product with a 4-, 5-, 6- or 7-bit weight is
 * therefore at most 1,905, 3,937, 8,001 or 16,129, and 8, 8, 4 or 2 such products can be added. With 8-bit weights two
 * products of at most 128 x 127 = 16,256 fit. */
#if defined(__aarch64__)
#include <assert.h>

#include "kernels/simd/quant_neon.h"
#include "kernels/epilogue.h"
#include "kernels/simd/i8_scale.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_KEEP_ORDER

typedef struct q_part { /* each register: 4 products of each of 2 lanes of a qi */
    int16x8_t a, b, c, d;
} q_part;

enum { Q_FLUSH_Q4 = 8, Q_FLUSH_Q5 = 8, Q_FLUSH_Q6 = 4, Q_FLUSH_Q7 = 2, Q_BYTES_OFFSET = 0, Q_WIDE = 0 };
#define Q_VECTORS(R) ((R) == 1 ? 4 : (R) == 2 ? 2 : 1) /* registers: 16 q_part, 8 floats, 8 operands */
#define Q_ROWS       4
#define Q_TALL       4

static MP_INLINE q_part q_part_zero(void) {
    const int16x8_t zero = vdupq_n_s16(0);
    return (q_part){zero, zero, zero, zero};
}
static MP_INLINE qi q_spread(const void *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return q_set(value);
}
static MP_INLINE void q_dot(q_part *part, qi *sum, qi w, qi a) {
    (void)sum;
    part->a = vmlal_s8(part->a, vget_low_s8(Q_BYTES(w.lo)), vget_low_s8(Q_BYTES(a.lo)));
    part->b = vmlal_high_s8(part->b, Q_BYTES(w.lo), Q_BYTES(a.lo));
    part->c = vmlal_s8(part->c, vget_low_s8(Q_BYTES(w.hi)), vget_low_s8(Q_BYTES(a.hi)));
    part->d = vmlal_high_s8(part->d, Q_BYTES(w.hi), Q_BYTES(a.hi));
}
static MP_INLINE void q_flush(q_part *part, qi *sum) {
    sum->lo = vaddq_s32(sum->lo, vpaddq_s32(vpaddlq_s16(part->a), vpaddlq_s16(part->b)));
    sum->hi = vaddq_s32(sum->hi, vpaddq_s32(vpaddlq_s16(part->c), vpaddlq_s16(part->d)));
    *part = q_part_zero();
}
/* Add the dot products of w - 128 and a to the sums of one register. A sum of two products fits 16 bits. */
static MP_INLINE int32x4_t add_bytes(int32x4_t sum, int32x4_t w, int32x4_t a) {
    const int8x16_t value = veorq_s8(Q_BYTES(w), vdupq_n_s8(-128));
    const int16x8_t low = vmull_s8(vget_low_s8(value), vget_low_s8(Q_BYTES(a)));
    return vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(value, Q_BYTES(a))));
}
static MP_INLINE void q_dot_bytes(q_part *part, qi *sum, qi w, qi a, qi odd) {
    (void)odd;
    (void)part;
    sum->lo = add_bytes(sum->lo, w.lo, a.lo);
    sum->hi = add_bytes(sum->hi, w.hi, a.hi);
}

#include "kernels/simd/quant_tmpl.h"

static void acts_q8(const float *x, int K, int8_t *q, float *scale, int32_t *sum16) {
    assert(K % 32 == 0);
    for (int b = 0; b < K / 32; b++, x += 32, q += 32, sum16 += 2) {
        float32x4_t v[8];
        uint32x4_t m[8];
        MP_UNROLL
        for (int i = 0; i < 8; i++) {
            v[i] = vld1q_f32(x + 4 * i);
            /* bits of magnitudes compare as integers; Inf and NaN are greatest */
            m[i] = vreinterpretq_u32_f32(vabsq_f32(v[i]));
        }
        MP_UNROLL
        for (int h = 4; h > 0; h /= 2) {
            MP_UNROLL
            for (int i = 0; i < h; i++)
                m[i] = vmaxq_u32(m[i], m[i + h]);
        }
        const uint32_t max_bits = vmaxvq_u32(m[0]);
        const float inverse = mp_i8_factor(max_bits, &scale[b]);
        int32x4_t i32[8];
        MP_UNROLL
        for (int i = 0; i < 8; i++)
            i32[i] = vdupq_n_s32(0);
        if (inverse != 0.0f) {
            MP_UNROLL
            for (int i = 0; i < 8; i++)
                i32[i] = vcvtnq_s32_f32(vmulq_n_f32(v[i], inverse));
        }
        MP_UNROLL
        for (int h = 0; h < 2; h++) {
            const int16x8_t low = vmovn_high_s32(vmovn_s32(i32[4 * h]), i32[4 * h + 1]);
            const int16x8_t high = vmovn_high_s32(vmovn_s32(i32[4 * h + 2]), i32[4 * h + 3]);
            vst1q_s8(q + 16 * h, vmovn_high_s16(vmovn_s16(low), high));
            sum16[h] = vaddlvq_s16(vaddq_s16(low, high));
        }
    }
}

void mp_neon_quant(mp_kernel_table *table) {
    MP_SET(table, acts_q8, acts_q8, "neon");
    q_set_gemms(table, "neon");
}
#endif
