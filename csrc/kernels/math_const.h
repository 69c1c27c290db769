/* math_const.h: the constants of exp, tanh and GELU, shared by ref/ and simd/, each of which implements the functions.
 *
 * Every polynomial is a weighted minimax fit (Lawson's iteration on 1,000 to 4,000 Chebyshev nodes, in 40-digit
 * arithmetic) whose coefficients are then rounded to fp32. The errors below are measured: test_kernels_rows.c asserts
 * them against double precision. */
#ifndef MP_KERNELS_MATH_CONST_H
#define MP_KERNELS_MATH_CONST_H

/* exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to the nearest integer and
 * leaves n in the low bits of the sum. ln 2 is split so that n * LN2_HI is exact (15 bits times 8 bits). exp(r) = 1 +
 * (r + r^2 * (C2 + C3 r + ... + C6 r^4)); the fit minimises the relative error of the whole (0.05 ulp). The polynomial
 * is evaluated in pairs, (C2 + C3 r) + r^2 ((C4 + C5 r) + r^2 C6), which shortens the dependency chain. Below EXP_LO,
 * where the result would be a denormal, exp returns 0, so that flush-to-zero changes no bit. Above EXP_HI it is +inf.
 * The error is at most 1.03 ulp, over all floats. */
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

/* exp2(y) for the softmax weights of attention over I16 blocks: y <= 0, or NaN. y is clamped to EXP2_LO, whose power is
 * the smallest normal float. n = round(y) as above, and 2^(y - n) = 1 + r (D1 + r (D2 + r (D3 + r D4))), |r| <= 1/2, by
 * FMAs. The relative error is at most 2.8e-6, 5 % of the error of rounding a weight. */
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

/* GELU(x) = x * Phi(x), where Phi(x) = (1 + erf(x / sqrt 2)) / 2 is the normal distribution. It is computed as max(0,
 * x) - t Phi(-t), t = |x|, because 1 + erf cancels for negative x. Phi(-t) is a polynomial of degree 5 in the distance
 * of t from the nearest multiple k of GELU_WIDTH, with separate coefficients for each k below 15. From k = 15 on (t >=
 * 5.8, where t Phi(-t) is below 2e-8) it is 0. The 16 floats of a table row fill one or two registers, so a lookup is
 * one permutation: half the work of a single polynomial and an exponential. The error is at most 1.6 ulp for x >= -1,
 * and 2.1e-8 absolute below. Infinities give NaN. */
#define MP_GELU_END   6.0f
#define MP_GELU_SCALE 2.5f
#define MP_GELU_WIDTH 0.4f
enum { MP_GELU_DEGREE = 5 };
static const _Alignas(64) float mp_gelu_table[MP_GELU_DEGREE + 1][16] = {
    {0.5f, 0.344578266f, 0.211855397f, 0.115069665f, 0.0547992885f, 0.0227501281f, 0.0081975339f, 0.00255512982f,
     0.000687138177f, 0.00015910888f, 3.16713995e-05f, 5.4126026e-06f, 7.93344782e-07f, 9.9647977e-08f,
     1.07182601e-08f, 0.0f},
    {-0.398942262f, -0.368270099f, -0.289691508f, -0.194186062f, -0.110920839f, -0.0539909676f, -0.0223945286f,
     -0.00791544933f, -0.00238408707f, -0.000611901691f, -0.000133830297f, -2.49425448e-05f, -3.96133055e-06f,
     -5.3611268e-07f, -6.18281959e-08f, 0.0f},
    {-5.08553114e-07f, 0.0736515969f, 0.115874059f, 0.116511047f, 0.0887375474f, 0.0539921671f, 0.0268740673f,
     0.0110816862f, 0.00381437619f, 0.00110127672f, 0.000267585914f, 5.48463067e-05f, 9.49952664e-06f,
     1.39218264e-06f, 1.72810346e-07f, 0.0f},
    {0.0665002987f, 0.0515537784f, 0.0173784252f, -0.0142373051f, -0.0288380254f, -0.0269950312f, -0.0177665558f,
     -0.00902389269f, -0.00367160141f, -0.00121971825f, -0.000334547833f, -7.63073185e-05f, -1.45449676e-05f,
     -2.32500247e-06f, -3.12486094e-07f, 0.0f},
    {-8.34681705e-05f, -0.0172681492f, -0.022616569f, -0.0150996223f, -0.00331279146f, 0.0044186851f, 0.00613869121f,
     0.00446590362f, 0.00231244438f, 0.000923959131f, 0.000294927362f, 7.6615157e-05f, 1.63812165e-05f,
     2.90430739e-06f, 4.29209734e-07f, 0.0f},
    {-0.00969924312f, -0.00623323582f, 0.00108142453f, 0.0056697051f, 0.0053219432f, 0.00224545738f, -0.000285698858f,
     -0.00113710447f, -0.000919002749f, -0.000476516318f, -0.000183409604f, -5.52359779e-05f, -1.33585108e-05f,
     -2.63380139e-06f, -4.27474617e-07f, 0.0f},
};

/* GELU's tanh form: 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) equals x * sigmoid(2 u). */
#define MP_GELU_TANH_A 1.59576917f
#define MP_GELU_TANH_B 0.044715f

/* The quick form of GELU, x * sigmoid(QUICK_GELU x). */
#define MP_QUICK_GELU 1.702f

#endif
