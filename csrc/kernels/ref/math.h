/* ref/math.h: exp, tanh, sigmoid, GELU and rounding to half for one number. The vector templates are tested against
 * this file. It performs the operations of simd/vmath_tmpl.h in the same order, but shares no code with them. */
#ifndef MP_KERNELS_REF_MATH_H
#define MP_KERNELS_REF_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/math_const.h"

static inline uint32_t mp_ref_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float mp_ref_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Returns the greater of a and b; b if either is NaN (as x86's MAXPS). */
static inline float mp_ref_max(float a, float b) { return a > b ? a : b; }

enum { MP_REF_LANES = 16 }; /* lanes of the row tree */

/* Returns the sum of the lanes by the fixed tree. Overwrites `lane`. */
static inline float mp_ref_tree_sum(float *lane) {
    for (int width = MP_REF_LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++)
            lane[l] += lane[l + width];
    return lane[0];
}

static inline float mp_ref_exp(float x) {
    if (!(x <= MP_EXP_HI))
        return x + INFINITY; /* +inf, or the input NaN */
    if (x < MP_EXP_LO)
        return 0.0f;
    float t = fmaf(x, MP_LOG2E, MP_ROUND_MAGIC);
    float n = t - MP_ROUND_MAGIC;
    float r = fmaf(n, -MP_LN2_HI, x);
    r = fmaf(n, -MP_LN2_LO, r);
    float s = r * r;
    float high = fmaf(MP_EXP_C6, s, fmaf(MP_EXP_C5, r, MP_EXP_C4));
    float p = fmaf(high, s, fmaf(MP_EXP_C3, r, MP_EXP_C2));
    p = fmaf(p, s, r) + 1.0f;
    return mp_ref_float(mp_ref_bits(p) + (mp_ref_bits(t) << 23)); /* t's low bits hold n */
}

static inline float mp_ref_sigmoid(float x) {
    float e = mp_ref_exp(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

static inline float mp_ref_tanh(float x) {
    float a = fabsf(x);
    if (a < MP_TANH_SPLIT) {
        float s = x * x;
        float p = MP_TANH_T4;
        p = fmaf(p, s, MP_TANH_T3);
        p = fmaf(p, s, MP_TANH_T2);
        p = fmaf(p, s, MP_TANH_T1);
        p = fmaf(p, s, MP_TANH_T0);
        return fmaf(p * s, x, x);
    }
    float y = 1.0f - 2.0f / (mp_ref_exp(a + a) + 1.0f);
    return copysignf(y, x);
}

static inline float mp_ref_gelu(float x) {
    float size = fabsf(x);
    float t = size < MP_GELU_END ? size : MP_GELU_END;
    float at = fmaf(t, MP_GELU_SCALE, MP_ROUND_MAGIC);
    float r = fmaf(at - MP_ROUND_MAGIC, -MP_GELU_WIDTH, t);
    uint32_t k = mp_ref_bits(at) & 15;
    float tail = mp_gelu_table[MP_GELU_DEGREE][k];
    for (int d = MP_GELU_DEGREE - 1; d >= 0; d--)
        tail = fmaf(tail, r, mp_gelu_table[d][k]);
    return fmaf(-size, tail, mp_ref_max(0.0f, x));
}

static inline float mp_ref_gelu_tanh(float x) {
    float u = MP_GELU_TANH_A * fmaf(MP_GELU_TANH_B * x, x * x, x);
    return x * mp_ref_sigmoid(u);
}

static inline float mp_ref_activate(mp_act act, float x) {
    switch (act) {
    case MP_ACT_NONE:
        return x;
    case MP_ACT_GELU:
        return mp_ref_gelu(x);
    case MP_ACT_GELU_TANH:
        return mp_ref_gelu_tanh(x);
    case MP_ACT_RELU:
        return x < 0.0f ? 0.0f : x; /* NaN passes through */
    case MP_ACT_SILU:
        return x * mp_ref_sigmoid(x);
    case MP_ACT_TANH:
        return mp_ref_tanh(x);
    case MP_ACT_SIGMOID:
        return mp_ref_sigmoid(x);
    case MP_ACT_QUICK_GELU:
        return x * mp_ref_sigmoid(MP_QUICK_GELU * x);
    case MP_ACT_RELU2:
        return x < 0.0f ? 0.0f : x * x;
    }
    return x;
}

static inline float mp_ref_softcap(float cap, float x) { return cap * mp_ref_tanh(x / cap); }

#endif
