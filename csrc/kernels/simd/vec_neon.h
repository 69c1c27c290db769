/* vec_neon.h: the vector layer over four 128-bit registers: lanes 0 to 3, 4 to 7, 8 to 11, 12 to 15. vec_plain.h
 * defines the operations. NEON is part of every 64-bit ARM CPU, so this needs no target region. */
#ifndef MP_KERNELS_SIMD_VEC_NEON_H
#define MP_KERNELS_SIMD_VEC_NEON_H

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd/target.h"
#include "kernels/simd/vec_each.h"

#define VEC_INLINE MP_INLINE
#define VEC_UNROLL MP_UNROLL

/* 32 registers, four per vec: 6 sums leave 8 registers for the operands */
enum { VEC_N = 16, VEC_TILE_ROWS = 6, VEC_ACCUMULATORS = 6 };

typedef struct vec { /* separate members: the compiler would put an array in memory */
    float32x4_t a, b, c, d;
} vec;

typedef struct vmask { /* each lane has all bits set, or none */
    uint32x4_t a, b, c, d;
} vmask;

#define VEC_NEON_1(name, call) \
    static MP_INLINE vec name(vec x) { return (vec){call(x.a), call(x.b), call(x.c), call(x.d)}; }
#define VEC_NEON_2(type, name, call)                                                   \
    static MP_INLINE type name(vec x, vec y) {                                         \
        return (type){call(x.a, y.a), call(x.b, y.b), call(x.c, y.c), call(x.d, y.d)}; \
    }

/* ---- memory ---- */

static MP_INLINE vec vec_set(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return (vec){v, v, v, v};
}

static MP_INLINE vec vec_zero(void) { return vec_set(0.0f); }

static MP_INLINE vec vec_load(const float *p) {
    return (vec){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}

static MP_INLINE void vec_store(float *p, vec x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}

/* NEON has no masked loads: the last, partial vec of a row is copied through the stack. */
static MP_INLINE vec vec_load_n(const float *p, int n) {
    float part[16] = {0};
    memcpy(part, p, sizeof(float) * (size_t)n);
    return vec_load(part);
}

static MP_INLINE vec vec_load_i8(const int8_t *p) {
    const int8x16_t x = vld1q_s8(p);
    const int16x8_t lo = vmovl_s8(vget_low_s8(x)), hi = vmovl_high_s8(x);
    return (vec){vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_high_s16(lo)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_high_s16(hi))};
}

static MP_INLINE void vec_store_n(float *p, vec x, int n) {
    float part[16];
    vec_store(part, x);
    memcpy(p, part, sizeof(float) * (size_t)n);
}

static MP_INLINE void vec_load_pairs(const float *p, vec *even, vec *odd) {
    const float32x4x2_t a = vld2q_f32(p), b = vld2q_f32(p + 8), c = vld2q_f32(p + 16), d = vld2q_f32(p + 24);
    *even = (vec){a.val[0], b.val[0], c.val[0], d.val[0]};
    *odd = (vec){a.val[1], b.val[1], c.val[1], d.val[1]};
}

static MP_INLINE void vec_neon_store_pairs4(float *p, float32x4_t even, float32x4_t odd) {
    const float32x4x2_t both = {{even, odd}};
    vst2q_f32(p, both);
}

static MP_INLINE void vec_store_pairs(float *p, vec even, vec odd) {
    vec_neon_store_pairs4(p, even.a, odd.a);
    vec_neon_store_pairs4(p + 8, even.b, odd.b);
    vec_neon_store_pairs4(p + 16, even.c, odd.c);
    vec_neon_store_pairs4(p + 24, even.d, odd.d);
}

/* Transpose four rows of four to columns. */
static MP_INLINE void vec_neon_transpose4(const float32x4_t *row, float *dst, int64_t dst_ld) {
    const float32x4_t ac0 = vzip1q_f32(row[0], row[2]), ac1 = vzip2q_f32(row[0], row[2]);
    const float32x4_t bd0 = vzip1q_f32(row[1], row[3]), bd1 = vzip2q_f32(row[1], row[3]);
    vst1q_f32(dst, vzip1q_f32(ac0, bd0));
    vst1q_f32(dst + dst_ld, vzip2q_f32(ac0, bd0));
    vst1q_f32(dst + 2 * dst_ld, vzip1q_f32(ac1, bd1));
    vst1q_f32(dst + 3 * dst_ld, vzip2q_f32(ac1, bd1));
}

static MP_INLINE void vec_transpose8(const float *src, int64_t src_ld, int rows, float *dst, int64_t dst_ld) {
    MP_UNROLL
    for (int r = 0; r < 8; r += 4) {
        float32x4_t left[4], right[4];
        MP_UNROLL
        for (int i = 0; i < 4; i++) {
            const float *row = src + (r + i < rows ? r + i : rows - 1) * src_ld;
            left[i] = vld1q_f32(row);
            right[i] = vld1q_f32(row + 4);
        }
        vec_neon_transpose4(left, dst + r, dst_ld);
        vec_neon_transpose4(right, dst + 4 * dst_ld + r, dst_ld);
    }
}

static MP_INLINE void vec_prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }
static MP_INLINE void vec_prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); } /* to L2 */

/* ---- arithmetic ---- */

/* vec_max must return y if either operand is NaN or both are zeros. Comparing and selecting does so; fmax would return
 * NaN or +0. */
#define VEC_NEON_MAX(x, y)  vbslq_f32(vcgtq_f32(x, y), x, y)
#define VEC_NEON_MIN(x, y)  vbslq_f32(vcltq_f32(x, y), x, y)
#define VEC_NEON_SIGN(x, y) vbslq_f32(vdupq_n_u32(0x80000000u), y, x)
#define VEC_NEON_SCALE(x, y) \
    vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vreinterpretq_s32_f32(y), 23)))

VEC_NEON_2(vec, vec_add, vaddq_f32)
VEC_NEON_2(vec, vec_sub, vsubq_f32)
VEC_NEON_2(vec, vec_mul, vmulq_f32)
VEC_NEON_2(vec, vec_div, vdivq_f32)
VEC_NEON_2(vec, vec_max, VEC_NEON_MAX)
VEC_NEON_2(vec, vec_min, VEC_NEON_MIN)
VEC_NEON_2(vec, vec_copysign, VEC_NEON_SIGN)
VEC_NEON_2(vec, vec_scale_exponent, VEC_NEON_SCALE)
VEC_NEON_1(vec_abs, vabsq_f32)
VEC_NEON_1(vec_neg, vnegq_f32)

static MP_INLINE vec vec_fma(vec x, vec y, vec z) {
    return (vec){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
                 vfmaq_f32(z.d, x.d, y.d)};
}

/* Look up entry k of the table as bytes 4 k ... 4 k + 3. */
static MP_INLINE float32x4_t vec_neon_pick4(uint8x16x4_t table, float32x4_t at) {
    const uint32x4_t k = vandq_u32(vreinterpretq_u32_f32(at), vdupq_n_u32(15));
    const uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100u), k, vdupq_n_u32(0x04040404u));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
}

static MP_INLINE vec vec_pick(const float *table, vec at) {
    const uint8x16x4_t bytes = vld1q_u8_x4((const uint8_t *)table);
    return (vec){vec_neon_pick4(bytes, at.a), vec_neon_pick4(bytes, at.b), vec_neon_pick4(bytes, at.c),
                 vec_neon_pick4(bytes, at.d)};
}

/* ---- masks ---- */

VEC_NEON_2(vmask, vec_less, vcltq_f32)
VEC_NEON_2(vmask, vec_less_equal, vcleq_f32)

static MP_INLINE vmask vec_lanes(int from, int to) {
    const int32x4_t first = {0, 1, 2, 3}, four = vdupq_n_s32(4);
    const int32x4_t low = vdupq_n_s32(from), high = vdupq_n_s32(to);
    const int32x4_t b = vaddq_s32(first, four), c = vaddq_s32(b, four), d = vaddq_s32(c, four);
#define VEC_NEON_LANES(at) vandq_u32(vcgeq_s32(at, low), vcltq_s32(at, high))
    return (vmask){VEC_NEON_LANES(first), VEC_NEON_LANES(b), VEC_NEON_LANES(c), VEC_NEON_LANES(d)};
#undef VEC_NEON_LANES
}

static MP_INLINE vec vec_select(vmask m, vec x, vec y) {
    return (vec){vbslq_f32(m.a, x.a, y.a), vbslq_f32(m.b, x.b, y.b), vbslq_f32(m.c, x.c, y.c),
                 vbslq_f32(m.d, x.d, y.d)};
}

/* ---- reductions by the fixed tree of kernels.h ---- */

static MP_INLINE float vec_sum(vec x) {
    const float32x4_t s = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}

static MP_INLINE float vec_top(vec x) {
    const float32x4_t s = VEC_NEON_MAX(x.c, x.a), t = VEC_NEON_MAX(x.d, x.b), u = VEC_NEON_MAX(t, s);
    const float32x2_t low = vget_low_f32(u), high = vget_high_f32(u);
    const float32x2_t v = vbsl_f32(vcgt_f32(high, low), high, low);
    return vget_lane_f32(v, 1) > vget_lane_f32(v, 0) ? vget_lane_f32(v, 1) : vget_lane_f32(v, 0);
}

/* ---- pairs of 16-bit integers ---- */

/* Sums of lanes 0-3, 4-7, 8-11 and 12-15. Pairs: their first integers of lanes 0-7, the second ones of lanes 0-7, then
 * the same of lanes 8-15, so that smlal adds to the sums. */
typedef struct veci {
    int32x4_t a, b, c, d;
} veci;

static MP_INLINE veci veci_zero(void) {
    const int32x4_t z = vdupq_n_s32(0);
    return (veci){z, z, z, z};
}

static MP_INLINE veci vec_neon_pairs(int16x8_t first, int16x8_t second, int16x8_t first8, int16x8_t second8) {
    return (veci){vreinterpretq_s32_s16(first), vreinterpretq_s32_s16(second), vreinterpretq_s32_s16(first8),
                  vreinterpretq_s32_s16(second8)};
}

static MP_INLINE veci veci_load(const int16_t *p) {
    const int16x8_t a = vld1q_s16(p), b = vld1q_s16(p + 8), c = vld1q_s16(p + 16), d = vld1q_s16(p + 24);
    return vec_neon_pairs(vuzp1q_s16(a, b), vuzp2q_s16(a, b), vuzp1q_s16(c, d), vuzp2q_s16(c, d));
}

/* For veci_dot only: smlal multiplies by a lane. */
static MP_INLINE veci veci_spread(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    const int32x4_t v = vdupq_n_s32(pair);
    return (veci){v, v, v, v};
}

static MP_INLINE veci veci_load_8(const int8_t *p) {
    const int8x16_t a = vld1q_s8(p), b = vld1q_s8(p + 16), first = vuzp1q_s8(a, b), second = vuzp2q_s8(a, b);
    return vec_neon_pairs(vmovl_s8(vget_low_s8(first)), vmovl_s8(vget_low_s8(second)), vmovl_high_s8(first),
                          vmovl_high_s8(second));
}

static MP_INLINE veci veci_twice_8(const int8_t *p) {
    const int8x16_t x = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
    return vec_neon_pairs(low, low, high, high);
}

static MP_INLINE veci veci_spread_8(const int8_t *p) {
    const int16x8_t first = vdupq_n_s16(p[0]), second = vdupq_n_s16(p[1]);
    return vec_neon_pairs(first, second, first, second);
}

#define VEC_NEON_TIMES(x, y) \
    vreinterpretq_s32_s16(vmulq_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)))

static MP_INLINE veci veci_times_16(veci x, veci y) {
    return (veci){VEC_NEON_TIMES(x.a, y.a), VEC_NEON_TIMES(x.b, y.b), VEC_NEON_TIMES(x.c, y.c),
                  VEC_NEON_TIMES(x.d, y.d)};
}

/* Add the products of 8 pairs with one pair. */
static MP_INLINE void vec_neon_dot(int32x4_t *low, int32x4_t *high, int32x4_t first, int32x4_t second, int16x4_t y) {
    *low = vmlal_lane_s16(*low, vget_low_s16(vreinterpretq_s16_s32(first)), y, 0);
    *high = vmlal_high_lane_s16(*high, vreinterpretq_s16_s32(first), y, 0);
    *low = vmlal_lane_s16(*low, vget_low_s16(vreinterpretq_s16_s32(second)), y, 1);
    *high = vmlal_high_lane_s16(*high, vreinterpretq_s16_s32(second), y, 1);
}

static MP_INLINE veci veci_dot(veci sum, veci x, veci y) {
    const int16x4_t pair = vget_low_s16(vreinterpretq_s16_s32(y.a));
    vec_neon_dot(&sum.a, &sum.b, x.a, x.b, pair);
    vec_neon_dot(&sum.c, &sum.d, x.c, x.d, pair);
    return sum;
}

static MP_INLINE vec veci_to_float(veci x) {
    return (vec){vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}

static MP_INLINE void vec_store_low16(int16_t *p, vec x) {
    vst1_s16(p, vmovn_s32(vreinterpretq_s32_f32(x.a)));
    vst1_s16(p + 4, vmovn_s32(vreinterpretq_s32_f32(x.b)));
    vst1_s16(p + 8, vmovn_s32(vreinterpretq_s32_f32(x.c)));
    vst1_s16(p + 12, vmovn_s32(vreinterpretq_s32_f32(x.d)));
}

static MP_INLINE void vec_store_low16_strided(int16_t *p, vec x) {
    int16_t part[16];
    vec_store_low16(part, x);
    MP_UNROLL
    for (int l = 0; l < 16; l++)
        p[2 * l] = part[l];
}

#define VEC_NEON_PAIR16(x, y) \
    vreinterpretq_s16_u32(vsliq_n_u32(vreinterpretq_u32_f32(x), vreinterpretq_u32_f32(y), 16))

static MP_INLINE void vec_store_low16_pairs(int16_t *p, vec even, vec odd) {
    vst1q_s16(p, VEC_NEON_PAIR16(even.a, odd.a));
    vst1q_s16(p + 8, VEC_NEON_PAIR16(even.b, odd.b));
    vst1q_s16(p + 16, VEC_NEON_PAIR16(even.c, odd.c));
    vst1q_s16(p + 24, VEC_NEON_PAIR16(even.d, odd.d));
}

#define VEC_NEON_MAX_BITS(x, y) vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(x), vreinterpretq_u32_f32(y)))

VEC_NEON_2(vec, vec_max_bits, VEC_NEON_MAX_BITS)

static MP_INLINE float vec_top_bits(vec x) {
    const float32x4_t top = VEC_NEON_MAX_BITS(VEC_NEON_MAX_BITS(x.a, x.b), VEC_NEON_MAX_BITS(x.c, x.d));
    const uint32_t bits = vmaxvq_u32(vreinterpretq_u32_f32(top));
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

VEC_EACH_ROW(vec_each_sum, vec_sum)
VEC_EACH_ROW(vec_each_top, vec_top)
VEC_EACH_ROW(vec_each_top_bits, vec_top_bits)

#endif
