/* arm/neon_dense.c: dense gemm and activations in 128-bit vectors. A tile is half a panel wide: 6 rows times 4 vectors
 * use 24 of the 32 registers as accumulators. Kernels whose step needs more registers use 4 rows. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/arm/dot.h"
#include "kernels/epilogue.h"
#include "kernels/simd/i8_scale.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_KEEP_ORDER

#define D_LANES  4
#define D_HALVES 2
#define v_float  float32x4_t
#define v_load   vld1q_f32
#define v_store  vst1q_f32
#define v_add    vaddq_f32

/* ---- F32 --------------------------------------------------------------------------------------------------------- */
#define D(name)         f32_##name
#define D_W             float32x4_t
#define D_A             float
#define D_ACC           float32x4_t
#define D_CLASS         D_F32
#define D_MAX_ROWS      6
#define D_PANELS(R)     1
static MP_INLINE float32x4_t f32_start(int32_t sum) {
    (void)sum;
    return vdupq_n_f32(0.0f);
}
static MP_INLINE float32x4_t f32_load(const uint8_t *w) { return vld1q_f32((const float *)(const void *)w); }
static MP_INLINE float f32_splat(const uint8_t *a) { return *(const float *)(const void *)a; }
static MP_INLINE float32x4_t f32_dot(float32x4_t acc, float32x4_t w, float a) { return vfmaq_n_f32(acc, w, a); }
static MP_INLINE float32x4_t f32_result(float32x4_t acc, const float *sw, float sa) {
    (void)sw, (void)sa;
    return acc;
}
#include "kernels/simd/dense_gemm.h"

/* ---- BF16 by fp32 FMAs: the same bits as ref --------------------------------------------------------------------- */
typedef struct bf16_pair {
    float32x4_t first, second; /* inputs k and k + 1 as fp32 */
} bf16_pair;
typedef struct bf16_two {
    float32x2_t first, second; /* both lanes hold the same value */
} bf16_two;

#define D(name)         bf16_fma_##name
#define D_W             bf16_pair
#define D_A             bf16_two
#define D_ACC           float32x4_t
#define D_CLASS         D_BF16
#define D_MAX_ROWS      4
#define D_PANELS(R)     1
#define bf16_fma_start  f32_start
#define bf16_fma_result f32_result
static MP_INLINE bf16_pair bf16_fma_load(const uint8_t *w) {
    const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(w));
    return (bf16_pair){vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u))),
                       vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16))};
}
static MP_INLINE bf16_two bf16_fma_splat(const uint8_t *a) {
    const uint32x2_t pair = vld1_dup_u32((const uint32_t *)(const void *)a);
    return (bf16_two){vreinterpret_f32_u32(vand_u32(pair, vdup_n_u32(0xffff0000u))),
                      vreinterpret_f32_u32(vshl_n_u32(pair, 16))};
}
static MP_INLINE float32x4_t bf16_fma_dot(float32x4_t acc, bf16_pair w, bf16_two a) {
    return vfmaq_lane_f32(vfmaq_lane_f32(acc, w.first, a.first, 0), w.second, a.second, 0);
}
#include "kernels/simd/dense_gemm.h"

/* ---- I8 ---------------------------------------------------------------------------------------------------------- */
/* The weights are converted back to signed. All values are within +-127, so the sum of two products fits 16 bits. The
 * accumulators start at 0. */
#define D(name)         i8_##name
#define D_W             int8x16_t
#define D_A             int8x16_t
#define D_ACC           int32x4_t
#define D_CLASS         D_I8
#define D_MAX_ROWS      4
#define D_PANELS(R)     1
static MP_INLINE int32x4_t i8_start(int32_t sum) {
    (void)sum;
    return vdupq_n_s32(0);
}
static MP_INLINE int8x16_t i8_load(const uint8_t *w) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w), vdupq_n_u8(0x80)));
}
static MP_INLINE int8x16_t i8_splat(const uint8_t *a) {
    int32_t word;
    memcpy(&word, a, sizeof word);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
static MP_INLINE int32x4_t i8_dot(int32x4_t acc, int8x16_t w, int8x16_t a) {
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a));
    return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(w, a)));
}
static MP_INLINE float32x4_t i8_result(int32x4_t acc, const float *sw, float sa) {
    return vmulq_f32(vcvtq_f32_s32(acc), vmulq_n_f32(vld1q_f32(sw), sa));
}
#include "kernels/simd/dense_gemm.h"

/* ---- I8 by sdot -------------------------------------------------------------------------------------------------- */
MP_TARGET_DOTPROD_BEGIN
#define D(name)           i8_dotprod_##name
#define D_W               int8x16_t
#define D_A               int8x16_t
#define D_ACC             int32x4_t
#define D_CLASS           D_I8
#define D_MAX_ROWS        6
#define D_PANELS(R)       1
#define i8_dotprod_start  i8_start
#define i8_dotprod_load   i8_load
#define i8_dotprod_splat  arm_word
#define i8_dotprod_dot    arm_sdot
#define i8_dotprod_result i8_result
#include "kernels/simd/dense_gemm.h"
MP_TARGET_END

/* ---- I8 by usmmla, one row by usdot ------------------------------------------------------------------------------ */
/* The weights are used as they are, + 128, and the accumulators start at -128 times the sum of the row. */
MP_TARGET_I8MM_BEGIN
#define D(name)         i8mm_##name
#define D_W             int8x16_t
#define D_A             int8x16_t
#define D_ACC           int32x4_t
#define D_CLASS         D_I8
#define D_MAX_ROWS      6
#define D_PANELS(R)     1
#define i8mm_splat      arm_word
#define i8mm_dot        arm_usdot
#define i8mm_result     i8_result
static MP_INLINE int32x4_t i8mm_start(int32_t sum) { return vdupq_n_s32(-128 * sum); }
static MP_INLINE int8x16_t i8mm_load(const uint8_t *w) { return vreinterpretq_s8_u8(vld1q_u8(w)); }
#define D_MMLA           arm_usmmla
#define D_ZIP(x, y)      vzip1q_s32(x, y)
#define D_UNZIP(n, x, y) vuzp##n##q_s32(x, y)
#define D_BITS(w)        vreinterpretq_s32_s8(w)
#include "kernels/simd/pair_tile.h"
#define D_BODY(R, P, t) ((R) == 1 ? i8mm_tile(R, P, t) : i8mm_pair_tile(R, t))
#include "kernels/simd/dense_gemm.h"
MP_TARGET_END

/* ---- BF16 by bfmmla, one row by bfdot: the same roundings -------------------------------------------------------- */
/* These instructions replace two or four times as many FMAs. Their bits differ from those of FMAs (arm/dot.h), but are
 * the same on every CPU that has them. */
MP_TARGET_BF16_BEGIN
#define D(name)         bf16_##name
#define D_W             uint16x8_t
#define D_A             int8x16_t
#define D_ACC           float32x4_t
#define D_CLASS         D_BF16
#define D_MAX_ROWS      6
#define D_PANELS(R)     1
#define bf16_start      f32_start
#define bf16_result     f32_result
#define bf16_splat      arm_word
#define bf16_dot        arm_bfdot
static MP_INLINE uint16x8_t bf16_load(const uint8_t *w) { return vreinterpretq_u16_u8(vld1q_u8(w)); }
#define D_MMLA           arm_bfmmla
#define D_ZIP(x, y)      vzip1q_f32(x, y)
#define D_UNZIP(n, x, y) vuzp##n##q_f32(x, y)
#define D_BITS(w)        vreinterpretq_s32_u16(w)
#include "kernels/simd/pair_tile.h"
#define D_BODY(R, P, t) ((R) == 1 ? bf16_tile(R, P, t) : bf16_pair_tile(R, t))
#include "kernels/simd/dense_gemm.h"
MP_TARGET_END

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* Round fp32 to bf16, returned in the upper half of each lane. Uses integer arithmetic, as the other variants do. */
static MP_INLINE uint32x4_t bf16_round(float32x4_t x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x);
    const uint32x4_t even = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(even, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(u, vdupq_n_u32(0x400000)));
}

/* Convert 8 floats to bf16: 4 words, each a pair with its order swapped. */
static MP_INLINE uint16x8_t bf16_words(const float *x) {
    const uint32x4_t a = bf16_round(vld1q_f32(x)), b = bf16_round(vld1q_f32(x + 4));
    return vrev32q_u16(vuzp2q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}

static void acts_bf16(const float *x, int K, uint16_t *out) {
    int k = 0;
    for (; k + 8 <= K; k += 8)
        vst1q_u16(out + k, bf16_words(x + k));
    if (k < K) {
        float tail[8] = {0};
        uint16_t words[8];
        memcpy(tail, x + k, sizeof(float) * (size_t)(K - k));
        vst1q_u16(words, bf16_words(tail));
        memcpy(out + k, words, sizeof(uint32_t) * (size_t)((K - k + 1) / 2));
    }
}

/* Compute the Hadamard stages within four lanes: those of the distances 1 and 2 that are below `size`. A
 * stage multiplies each lane by 1, or by -1 if the lane is the second of its pair, and adds its partner. An FMA by +-1
 * rounds once, as a sum or difference does. */
static MP_INLINE float32x4_t within(float32x4_t x, int size) {
    const float32x4_t by1 = {1, -1, 1, -1}, by2 = {1, 1, -1, -1};
    x = size > 1 ? vfmaq_f32(vrev64q_f32(x), x, by1) : x;
    return size > 2 ? vfmaq_f32(vextq_f32(x, x, 2), x, by2) : x;
}

static void hadamard(const float *x, int K, int size, float *y) {
    int k = 0;
    for (; k + 4 <= K; k += 4)
        vst1q_f32(y + k, within(vld1q_f32(x + k), size));
    if (k < K) { /* size is at most 2 */
        float tail[4] = {0};
        memcpy(tail, x + k, sizeof(float) * (size_t)(K - k));
        vst1q_f32(tail, within(vld1q_f32(tail), size));
        memcpy(y + k, tail, sizeof(float) * (size_t)(K - k));
    }
    for (int h = 4; h < size; h *= 2)
        for (int block = 0; block < K; block += 2 * h)
            for (float *at = y + block; at < y + block + h; at += 4) {
                const float32x4_t a = vld1q_f32(at), b = vld1q_f32(at + h);
                vst1q_f32(at, vaddq_f32(a, b));
                vst1q_f32(at + h, vsubq_f32(a, b));
            }
}

/* Load x[k ...], with zeros beyond K. */
static MP_INLINE float32x4_t load_part(const float *x, int k, int K) {
    float part[4] = {0};
    if (K - k >= 4)
        return vld1q_f32(x + k);
    memcpy(part, x + k, sizeof(float) * (size_t)(K - k));
    return vld1q_f32(part);
}

static void acts_i8(const float *x, int K, int8_t *q, float *scale, int32_t *sum) {
    uint32x4_t top = vdupq_n_u32(0); /* bits of magnitudes compare as integers; NaN and Inf are greatest */
    for (int k = 0; k < K; k += 4)
        top = vmaxq_u32(top, vreinterpretq_u32_f32(vabsq_f32(load_part(x, k, K))));
    const uint32_t bits = vmaxvq_u32(top);
    const float inverse = mp_i8_factor(bits, scale);
    if (inverse == 0.0f) { /* x * 0 would be NaN where x is not finite */
        memset(q, 0, (size_t)K);
        *sum = 0;
        return;
    }
    int32x4_t total = vdupq_n_s32(0);
    for (int k = 0; k < K; k += 4) {
        const int32x4_t i = vcvtnq_s32_f32(vmulq_n_f32(load_part(x, k, K), inverse));
        const int16x4_t words = vmovn_s32(i);
        const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
        const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
        memcpy(q + k, &four, (size_t)(K - k < 4 ? K - k : 4));
        total = vaddq_s32(total, i);
    }
    *sum = vaddvq_s32(total);
}

void mp_neon_dense(mp_kernel_table *table, uint32_t features) {
    MP_SET(table, gemm_f32, f32_gemm, "neon");
    MP_SET(table, gemm_bf16, bf16_fma_gemm, "neon");
    MP_SET(table, gemm_i8, i8_gemm, "neon");
    MP_SET(table, acts_bf16, acts_bf16, "neon");
    MP_SET(table, acts_i8, acts_i8, "neon");
    MP_SET(table, hadamard, hadamard, "neon");
    if (features & MP_CPU_DOTPROD)
        MP_SET(table, gemm_i8, i8_dotprod_gemm, "dotprod");
    if (features & MP_CPU_I8MM)
        MP_SET(table, gemm_i8, i8mm_gemm, "i8mm");
    if (features & MP_CPU_ARM_BF16)
        MP_SET(table, gemm_bf16, bf16_gemm, "bf16");
}
#endif
