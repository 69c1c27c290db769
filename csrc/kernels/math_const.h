/* math_const.h: the numbers behind exp, tanh and GELU, shared by ref/ and simd/ (the operations are written twice).
 *
 * Every polynomial is a weighted minimax fit (Lawson's iteration on 1,000 to 4,000 Chebyshev nodes, in 40-digit
 * arithmetic), its coefficients then rounded to fp32. Errors below are measured, not estimated: test_kernels_rows.c
 * asserts them against double precision. */
#ifndef MP_KERNELS_MATH_CONST_H
#define MP_KERNELS_MATH_CONST_H

/* exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to the nearest integer and
 * leaves n in the low bits of the sum. ln 2 is split so that n * LN2_HI is exact (15 bits times 8 bits).
 * exp(r) = 1 + (r + r^2 * (C2 + C3 r + ... + C6 r^4)); the fit minimises the relative error of the whole (0.05 ulp).
 * The polynomial is evaluated in pairs, (C2 + C3 r) + r^2 ((C4 + C5 r) + r^2 C6): fewer steps that wait for one
 * another. Below EXP_LO the result would be less than the smallest normal and is 0, so that flush-to-zero changes no
 * bit; above EXP_HI it is +inf. At most 1.03 ulp, over all floats. */
#define MP_EXP_LO      (-87.3365402f)
#define MP_EXP_HI      88.7228317f
#define MP_LOG2E       1.44269504f
#define MP_ROUND_MAGIC 12582912.0f
#define MP_LN2_HI      0.693145752f
#define MP_LN2_LO      1.42860677e-6f
#define MP_EXP_C2      0.49999994f
#define MP_EXP_C3      0.166665211f
#define MP_EXP_C4      0.041668389f
#define MP_EXP_C5      0.00836874545f
#define MP_EXP_C6      0.00138145394f

/* exp2(y) for the weights of attention in integers: y <= 0, or NaN. y is raised to EXP2_LO, whose power is the smallest
 * normal, n = round(y) as above, and 2^(y - n) = 1 + r (D1 + r (D2 + r (D3 + r D4))), |r| <= 1/2, by FMAs. Off by
 * 2.8e-6 of the result, a twentieth of what rounding a weight costs. */
#define MP_EXP2_LO (-126.0f)
#define MP_EXP2_D1 0.693124175f
#define MP_EXP2_D2 0.240240991f
#define MP_EXP2_D3 0.0559064262f
#define MP_EXP2_D4 0.00958285294f

/* tanh(x) = x + x * s * (T0 + T1 s + ... + T4 s^4), s = x^2, for |x| < TANH_SPLIT (0.07 ulp before rounding); beyond it
 * 1 - 2 / (exp(2 |x|) + 1) with the sign of x. */
#define MP_TANH_SPLIT  0.625f
#define MP_TANH_T0     (-0.333332807f)
#define MP_TANH_T1     0.133314416f
#define MP_TANH_T2     (-0.0537397154f)
#define MP_TANH_T3     0.0206390861f
#define MP_TANH_T4     (-0.00570498686f)

/* GELU(x) = x * Phi(x), Phi the normal distribution, (1 + erf(x / sqrt 2)) / 2. Instead of erf, which loses all digits
 * of 1 + erf for negative x, the tail Phi(-t) = exp(G0 + G1 t + ... + G10 t^10), t = |x|: the fit of
 * log(erfc(t / sqrt 2) / 2) on [0, 6], weighted by erfc. Beyond 6 the polynomial goes on falling; from GELU_END on,
 * where the tail is 0 long since, it is not followed. Evaluated as even(t^2) + t odd(t^2): half the steps that wait for
 * one another. Off by at most 3.1 ulp for x >= -1, and by 5e-8 below. */
#define MP_GELU_END    16.0f
#define MP_GELU_G0     (-0.693147182f)
#define MP_GELU_G1     (-0.797885239f)
#define MP_GELU_G2     (-0.318302631f)
#define MP_GELU_G3     (-0.0363650247f)
#define MP_GELU_G4     0.00483885268f
#define MP_GELU_G5     (-2.01823332e-5f)
#define MP_GELU_G6     (-0.000183553057f)
#define MP_GELU_G7     4.97975016e-5f
#define MP_GELU_G8     (-7.0113956e-6f)
#define MP_GELU_G9     5.36018888e-7f
#define MP_GELU_G10    (-1.75044892e-8f)

/* GELU's tanh form, 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), is x * sigmoid(2 u). */
#define MP_GELU_TANH_A 1.59576917f
#define MP_GELU_TANH_B 0.044715f

/* The quick form of GELU, x * sigmoid(QUICK_GELU x). */
#define MP_QUICK_GELU 1.702f

#endif
