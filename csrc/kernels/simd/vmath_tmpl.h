/* vmath_tmpl.h: exp, sigmoid, tanh and the activation functions for 16 numbers. Template: include after a vec_*.h.
 *
 * math_const.h holds the constants, their origin and the errors. ref/math.h performs the same operations on one number
 * at a time. */
#ifndef MP_KERNELS_SIMD_VMATH_TMPL_H
#define MP_KERNELS_SIMD_VMATH_TMPL_H

#include <math.h>

#include "kernels/kernels.h"
#include "kernels/math_const.h"

static VEC_INLINE vec vec_exp(vec x) {
    vec t = vec_fma(x, vec_set(MP_LOG2E), vec_set(MP_ROUND_MAGIC));
    vec n = vec_sub(t, vec_set(MP_ROUND_MAGIC));
    vec r = vec_fma(n, vec_set(-MP_LN2_HI), x);
    r = vec_fma(n, vec_set(-MP_LN2_LO), r);
    vec s = vec_mul(r, r);
    vec high = vec_fma(vec_set(MP_EXP_C6), s, vec_fma(vec_set(MP_EXP_C5), r, vec_set(MP_EXP_C4)));
    vec p = vec_fma(high, s, vec_fma(vec_set(MP_EXP_C3), r, vec_set(MP_EXP_C2)));
    p = vec_add(vec_fma(p, s, r), vec_set(1.0f));
    vec y = vec_scale_exponent(p, t);
    y = vec_select(vec_less(x, vec_set(MP_EXP_LO)), vec_zero(), y);
    /* +inf above the range; NaN passes through */
    return vec_select(vec_less_equal(x, vec_set(MP_EXP_HI)), y, vec_add(x, vec_set(INFINITY)));
}

/* Computed from exp(-|x|), which cannot overflow: for large |x| it becomes 0, never a denormal. */
static VEC_INLINE vec vec_sigmoid(vec x) {
    vec e = vec_exp(vec_neg(vec_abs(x)));
    vec one = vec_set(1.0f);
    return vec_div(vec_select(vec_less_equal(vec_zero(), x), one, e), vec_add(one, e));
}

static VEC_INLINE vec vec_tanh(vec x) {
    vec a = vec_abs(x), s = vec_mul(x, x);
    vec p = vec_set(MP_TANH_T4);
    p = vec_fma(p, s, vec_set(MP_TANH_T3));
    p = vec_fma(p, s, vec_set(MP_TANH_T2));
    p = vec_fma(p, s, vec_set(MP_TANH_T1));
    p = vec_fma(p, s, vec_set(MP_TANH_T0));
    vec small = vec_fma(vec_mul(p, s), x, x);
    vec one = vec_set(1.0f);
    vec large = vec_sub(one, vec_div(vec_set(2.0f), vec_add(vec_exp(vec_add(a, a)), one)));
    return vec_select(vec_less(a, vec_set(MP_TANH_SPLIT)), small, vec_copysign(large, x));
}

static VEC_INLINE vec vec_gelu(vec x) {
    vec size = vec_abs(x), t = vec_min(size, vec_set(MP_GELU_END));
    vec at = vec_fma(t, vec_set(MP_GELU_SCALE), vec_set(MP_ROUND_MAGIC)); /* its low bits hold k */
    vec r = vec_fma(vec_sub(at, vec_set(MP_ROUND_MAGIC)), vec_set(-MP_GELU_WIDTH), t);
    vec tail = vec_pick(mp_gelu_table[MP_GELU_DEGREE], at);
    for (int d = MP_GELU_DEGREE - 1; d >= 0; d--)
        tail = vec_fma(tail, r, vec_pick(mp_gelu_table[d], at));
    return vec_fma(vec_neg(size), tail, vec_max(vec_zero(), x));
}

static VEC_INLINE vec vec_gelu_tanh(vec x) {
    vec cubic = vec_fma(vec_mul(vec_set(MP_GELU_TANH_B), x), vec_mul(x, x), x);
    return vec_mul(x, vec_sigmoid(vec_mul(vec_set(MP_GELU_TANH_A), cubic)));
}

static VEC_INLINE vec vec_softcap(vec cap, vec x) { return vec_mul(cap, vec_tanh(vec_div(x, cap))); }

/* `act` must be a constant, so that the compiler resolves the switch where it inlines this function. */
static VEC_INLINE vec vec_activate(const mp_act act, vec x) {
    switch (act) {
    case MP_ACT_NONE:
        return x;
    case MP_ACT_GELU:
        return vec_gelu(x);
    case MP_ACT_GELU_TANH:
        return vec_gelu_tanh(x);
    case MP_ACT_RELU:
        return vec_select(vec_less(x, vec_zero()), vec_zero(), x);
    case MP_ACT_SILU:
        return vec_mul(x, vec_sigmoid(x));
    case MP_ACT_TANH:
        return vec_tanh(x);
    case MP_ACT_SIGMOID:
        return vec_sigmoid(x);
    case MP_ACT_QUICK_GELU:
        return vec_mul(x, vec_sigmoid(vec_mul(vec_set(MP_QUICK_GELU), x)));
    case MP_ACT_RELU2:
        return vec_select(vec_less(x, vec_zero()), vec_zero(), vec_mul(x, x));
    }
    return x;
}

#endif
