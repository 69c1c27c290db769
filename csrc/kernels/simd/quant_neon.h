/* quant_neon.h: the NEON operations of quant_tmpl.h except the dot products, on vectors of 8 lanes in two registers.
 * quant_tmpl.h defines the operations. */
#ifndef MP_KERNELS_SIMD_QUANT_NEON_H
#define MP_KERNELS_SIMD_QUANT_NEON_H

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd/target.h"

enum { Q_LANES = 8, Q_NEAR = 3, Q_KEEPS_HEAD = 0 };
#define Q_AHEAD_ONE Q_AHEAD

typedef struct qi {
    int32x4_t lo, hi;
} qi;

typedef struct qf {
    float32x4_t lo, hi;
} qf;

#define Q_BYTES(x) vreinterpretq_s8_s32(x)
#define Q_WORDS(x) vreinterpretq_u16_s32(x)

static MP_INLINE qi q_load(const void *from) {
    return (qi){vreinterpretq_s32_u8(vld1q_u8(from)), vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)from + 16))};
}
static MP_INLINE qi q_and(qi a, qi b) { return (qi){vandq_s32(a.lo, b.lo), vandq_s32(a.hi, b.hi)}; }
static MP_INLINE qi q_or_and(qi a, qi b, qi mask) {
    return (qi){vorrq_s32(a.lo, vandq_s32(b.lo, mask.lo)), vorrq_s32(a.hi, vandq_s32(b.hi, mask.hi))};
}
static MP_INLINE qi q_shr(qi x, int n) {
    const int16x8_t by = vdupq_n_s16((int16_t)-n);
    return (qi){vreinterpretq_s32_u16(vshlq_u16(Q_WORDS(x.lo), by)),
                vreinterpretq_s32_u16(vshlq_u16(Q_WORDS(x.hi), by))};
}
static MP_INLINE qi q_shl(qi x, int n) {
    const int16x8_t by = vdupq_n_s16((int16_t)n);
    return (qi){vreinterpretq_s32_u16(vshlq_u16(Q_WORDS(x.lo), by)),
                vreinterpretq_s32_u16(vshlq_u16(Q_WORDS(x.hi), by))};
}
static MP_INLINE qi q_set(int32_t value) {
    const int32x4_t v = vdupq_n_s32(value);
    return (qi){v, v};
}
static MP_INLINE qi q_table(const uint8_t *from) {
    const int32x4_t table = vreinterpretq_s32_u8(vld1q_u8(from));
    return (qi){table, table};
}
static MP_INLINE qi q_lookup(qi table, qi x) {
    return (qi){vreinterpretq_s32_s8(vqtbl1q_s8(Q_BYTES(table.lo), vreinterpretq_u8_s32(x.lo))),
                vreinterpretq_s32_s8(vqtbl1q_s8(Q_BYTES(table.hi), vreinterpretq_u8_s32(x.hi)))};
}
static MP_INLINE qi q_zero(void) { return q_set(0); }
static MP_INLINE qf q_to_float(qi x) { return (qf){vcvtq_f32_s32(x.lo), vcvtq_f32_s32(x.hi)}; }
static MP_INLINE qf qf_zero(void) { return (qf){vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
static MP_INLINE qf qf_spread(const float *from) {
    const float32x4_t v = vld1q_dup_f32(from);
    return (qf){v, v};
}
static MP_INLINE qf qf_add(qf a, qf b) { return (qf){vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
static MP_INLINE qf qf_mul(qf a, qf b) { return (qf){vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
static MP_INLINE qf qf_fma(qf a, qf b, qf c) { return (qf){vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
static MP_INLINE qf qf_fnma(qf a, qf b, qf c) { return (qf){vfmsq_f32(c.lo, a.lo, b.lo), vfmsq_f32(c.hi, a.hi, b.hi)}; }
static MP_INLINE qf qf_load(const float *from) { return (qf){vld1q_f32(from), vld1q_f32(from + 4)}; }
static MP_INLINE void qf_store(float *to, qf x) {
    vst1q_f32(to, x.lo);
    vst1q_f32(to + 4, x.hi);
}
static MP_INLINE qf qf_halves(const uint8_t *from) {
    const uint8x16_t x = vld1q_u8(from);
    return (qf){vcvt_f32_f16(vreinterpret_f16_u8(vget_low_u8(x))), vcvt_f32_f16(vreinterpret_f16_u8(vget_high_u8(x)))};
}
static MP_INLINE qf qf_bf16(const uint8_t *from) {
    const uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(from));
    return (qf){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
                vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))};
}
static MP_INLINE qi q_u8(const uint8_t *from) {
    const uint16x8_t x = vmovl_u8(vld1_u8(from));
    return (qi){vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(x))), vreinterpretq_s32_u32(vmovl_high_u16(x))};
}
static MP_INLINE qf qf_i8(const uint8_t *from) {
    const int16x8_t x = vmovl_s8(vreinterpret_s8_u8(vld1_u8(from)));
    return (qf){vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))};
}

#endif
