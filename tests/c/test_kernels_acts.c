/* test_kernels_acts.c: activations at the boundaries of their formula (kernels.h, mp_acts_fill), for the reference and
 * every variant. The expected values come from the definition, so a mistake in the reference is found, too. */
#include <float.h>

#include "kernel_test.h"

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* One scale for n inputs. Returns the sum of q. */
static int32_t defined(const float *x, int n, int8_t *q, float *scale) {
    float max = 0;
    int32_t sum = 0;
    bool finite = true;
    memset(q, 0, (size_t)n);
    for (int k = 0; k < n; k++) {
        finite = finite && isfinite(x[k]);
        max = fabsf(x[k]) > max ? fabsf(x[k]) : max;
    }
    const double inverse = max > 0 ? 127.0 / (double)max : 0; /* in double: 127 / max may exceed FLT_MAX */
    const bool usable = finite && max > 0 && inverse < (double)FLT_MAX * (1 + 0x1p-25);
    *scale = finite ? usable ? max / 127.0f : 0.0f : NAN;
    for (int k = 0; usable && k < n; k++) {
        q[k] = (int8_t)nearbyintf(x[k] * (127.0f / max));
        sum += q[k];
    }
    return sum;
}

/* Magnitudes at which a case of the formula begins or ends. */
static int magnitudes(float *out) {
    const float overflow = (float)(127.0 / (double)FLT_MAX); /* about where 127 / max overflows */
    const float all[] = {0, from_bits(1), FLT_MIN, nextafterf(FLT_MIN, 0), overflow, nextafterf(overflow, 0),
                         nextafterf(overflow, 1), nextafterf(nextafterf(overflow, 1), 1), 0x1p-100f, 1, 127, 0x1p120f,
                         nextafterf(FLT_MAX, 0), FLT_MAX, INFINITY, from_bits(0x7f800001), from_bits(0x7fffffff)};
    memcpy(out, all, sizeof all);
    return (int)(sizeof all / sizeof *all);
}

enum { MAX_K = 97 };

/* K values of at most |top|, with `top` at index `at`. */
static void fill(mp_test_random *random, float *x, int K, int at, float top) {
    for (int k = 0; k < K; k++)
        x[k] = mp_test_random_float(random, -1.0f, 1.0f) * (isfinite(top) ? fabsf(top) : 1.0f);
    x[at] = top;
}

static void check_i8(const kt_set *set, const float *x, int K, int at) {
    int8_t want[MAX_K], got[MAX_K + 1];
    float scale, got_scale;
    int32_t got_sum;
    const int32_t sum = defined(x, K, want, &scale);
    memset(got, 0x55, sizeof got);
    set->call.acts_i8(x, K, got, &got_scale, &got_sum);
    kt_same_bytes(set, want, got, (size_t)K, "acts_i8 K=%d, %a at %d", K, (double)x[at], at);
    kt_same(set, &scale, &got_scale, 1, "the scale of acts_i8 K=%d, %a at %d", K, (double)x[at], at);
    MP_CHECK_INT(got_sum, sum);
    MP_CHECK_INT(got[K], 0x55);
}

static void check_q8(const kt_set *set, const float *x, int at) {
    int8_t want[96], got[97];
    float scale[3], got_scale[4] = {0, 0, 0, 7};
    int32_t sum[6], got_sum[7] = {0, 0, 0, 0, 0, 0, 7};
    for (int b = 0; b < 3; b++) {
        defined(x + 32 * b, 32, want + 32 * b, &scale[b]);
        for (int half = 0; half < 2; half++) {
            sum[2 * b + half] = 0;
            for (int k = 0; k < 16; k++)
                sum[2 * b + half] += want[32 * b + 16 * half + k];
        }
    }
    memset(got, 0x55, sizeof got);
    set->call.acts_q8(x, 96, got, got_scale, got_sum);
    kt_same_bytes(set, want, got, 96, "acts_q8, %a at %d", (double)x[at], at);
    kt_same(set, scale, got_scale, 3, "the scales of acts_q8, %a at %d", (double)x[at], at);
    kt_same_bytes(set, sum, got_sum, sizeof sum, "the sums of acts_q8, %a at %d", (double)x[at], at);
    MP_CHECK(got[96] == 0x55 && got_scale[3] == 7 && got_sum[6] == 7);
}

/* Every position of the largest value, so that no lane is left out of the maximum, with both signs. */
MP_TEST(kernels_acts_scales_at_their_boundaries) {
    static const int Ks[] = {1, 7, 16, 31, 64, MAX_K};
    float tops[32], x[MAX_K];
    const int count = magnitudes(tops);
    mp_test_random random = {160};
    kt_set set = kt_ref();
    do {
        for (int t = 0; t < count; t++)
            for (int sign = -1; sign <= 1; sign += 2)
                for (size_t i = 0; i < sizeof Ks / sizeof *Ks; i++)
                    for (int at = 0; at < Ks[i]; at++) {
                        fill(&random, x, Ks[i], at, copysignf(tops[t], (float)sign));
                        check_i8(&set, x, Ks[i], at);
                    }
    } while (kt_next(&set, MP_SLOT_acts_i8));
    set = kt_ref();
    do {
        for (int t = 0; t < count; t++)
            for (int sign = -1; sign <= 1; sign += 2)
                for (int at = 0; at < 96; at++) {
                    fill(&random, x, 96, at, copysignf(tops[t], (float)sign));
                    check_q8(&set, x, at);
                }
    } while (kt_next(&set, MP_SLOT_acts_q8));
}

/* Rounding to bf16 at every boundary of the low half, at every position of a row. A NaN stays a NaN of its sign. */
MP_TEST(kernels_acts_bf16_at_its_boundaries) {
    static const uint16_t high[] = {0, 0x007f, 0x0080, 0x3f80, 0x3f81, 0x7f7e, 0x7f7f, 0x7f80, 0x7fbf, 0x7fc0, 0x7fff};
    static const uint16_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    enum { HIGH = sizeof high / sizeof *high, LOW = sizeof low / sizeof *low, ROW = 53 };
    kt_set set = kt_ref();
    do {
        for (int first = 0; first < 2 * HIGH * LOW; first++) {
            float x[ROW];
            uint16_t got[ROW + 2] = {0}, want[ROW + 2] = {0};
            for (int k = 0; k < ROW; k++) {
                const int c = (first + k) % (2 * HIGH * LOW), sign = c & 1;
                const uint32_t bits = (uint32_t)high[c / 2 % HIGH] << 16 | low[c / 2 / HIGH] | (uint32_t)sign << 31;
                x[k] = from_bits(bits);
                want[k ^ 1] = (uint16_t)(isnan(x[k]) ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            }
            want[ROW + 1] = got[ROW + 1] = 0xbeef; /* one word beyond the pair that holds the last input */
            set.call.acts_bf16(x, ROW, got);
            kt_same_bytes(&set, want, got, sizeof want, "acts_bf16 from case %d on", first);
        }
    } while (kt_next(&set, MP_SLOT_acts_bf16));
}
