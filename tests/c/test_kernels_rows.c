/* Row kernels: every variant has the bits of ref/, and ref/ is close to double precision. */
#include <float.h>

#include "kernel_edge.h"
#include "kernel_test.h"
#include "kernels/ref/math.h"

/* the templates for kt_next_or_plain */
#include "kernels/simd/vec_plain.h"

#include "kernels/simd/rows_tmpl.h"

static bool next_variant(kt_set *set, int slot) { return kt_next_or_plain(set, slot, rows_fill); }

static void fill(mp_test_random *random, int kind, float *x, int64_t n) {
    if (kind < KT_EXTREMES)
        kt_extreme(random, (enum kt_extreme)kind, x, n);
    else
        kt_random(random, x, n);
}

static const mp_act acts[] = {MP_ACT_NONE, MP_ACT_GELU, MP_ACT_GELU_TANH, MP_ACT_RELU,
                              MP_ACT_SILU, MP_ACT_TANH, MP_ACT_SIGMOID,   MP_ACT_QUICK_GELU, MP_ACT_RELU2};
enum { ACTS = sizeof acts / sizeof *acts };

/* Compare convolutions of two rows, of x, w and b as rows. */
static void compare_conv(const kt_set *v, const kt_set *ref, mp_test_random *random, const float *x, const float *w,
                         const float *b, int n, const char *what) {
    const float *const rows[] = {x, w, b, x, w, b, x, w};
    float *kernel = kt_edge(7 * n), *want = kt_edge(2 * n), *got = kt_edge(2 * n);
    kt_random(random, kernel, 7 * n);
    for (int taps = 1; taps <= 7; taps++)
        for (int with = 0; with < 2; with++) {
            ref->call.causal_conv(rows, 0, kernel, n, with ? b : NULL, taps, 2, n, want, n);
            v->call.causal_conv(rows, 0, kernel, n, with ? b : NULL, taps, 2, n, got, n);
            kt_same_matrix(v, want, got, 2, n, n, "causal_conv %s n=%d taps=%d bias=%d", what, n, taps, with);
        }
    kt_edge_free(kernel, 7 * n);
    kt_edge_free(want, 2 * n);
    kt_edge_free(got, 2 * n);
}

/* Compare every row kernel with ref at one length and for one kind of input. */
static void compare_all(const kt_set *v, const kt_set *ref, mp_test_random *random, int n, int kind) {
    const char *what = kind < KT_EXTREMES ? kt_extreme_names[kind] : "ordinary";
    float *x = kt_edge(n), *w = kt_edge(n), *b = kt_edge(n), *want = kt_edge(n), *got = kt_edge(n), s, t;
    const size_t bytes = sizeof(float) * (size_t)n;
    fill(random, kind, x, n);
    fill(random, kind % 3 ? KT_EXTREMES : kind, w, n);
    kt_random(random, b, n);

    ref->call.rms_norm(x, w, 1e-6f, n, want);
    v->call.rms_norm(x, w, 1e-6f, n, got);
    kt_same(v, want, got, n, "rms_norm %s n=%d", what, n);
    memcpy(got, x, bytes);
    v->call.rms_norm(got, w, 1e-6f, n, got);
    kt_same(v, want, got, n, "rms_norm in place %s n=%d", what, n);
    for (int with = 0; with < 2; with++) {
        ref->call.layer_norm(x, w, with ? b : NULL, 1e-12f, n, want);
        v->call.layer_norm(x, w, with ? b : NULL, 1e-12f, n, got);
        kt_same(v, want, got, n, "layer_norm %s n=%d bias=%d", what, n, with);
    }
    memcpy(got, x, bytes);
    v->call.layer_norm(got, w, b, 1e-12f, n, got);
    kt_same(v, want, got, n, "layer_norm in place %s n=%d", what, n);
    memcpy(want, b, bytes);
    memcpy(got, b, bytes);
    ref->call.add(x, n, want);
    v->call.add(x, n, got);
    kt_same(v, want, got, n, "add %s n=%d", what, n);
    memcpy(want, b, bytes);
    memcpy(got, b, bytes);
    ref->call.mul_add(x, w, n, want);
    v->call.mul_add(x, w, n, got);
    kt_same(v, want, got, n, "mul_add %s n=%d", what, n);
    for (int with = 0; with < 2; with++)
        for (int columns = 1; columns <= n; columns += 1 + n / 3) { /* x as a matrix with this many columns */
            ref->call.column_sums(x, columns, n / columns, columns, with ? b : NULL, want);
            v->call.column_sums(x, columns, n / columns, columns, with ? b : NULL, got);
            kt_same(v, want, got, columns, "column_sums %s n=%d columns=%d centre=%d", what, n, columns, with);
        }
    compare_conv(v, ref, random, x, w, b, n, what);
    for (int i = 0; i < ACTS; i++) {
        ref->call.affine(x, b, w, b, acts[i], n, want);
        memcpy(got, x, bytes);
        v->call.affine(got, b, w, b, acts[i], n, got);
        kt_same(v, want, got, n, "affine %d %s n=%d", acts[i], what, n);
        memcpy(want, x, bytes);
        memcpy(got, x, bytes);
        ref->call.activate(acts[i], n, want);
        v->call.activate(acts[i], n, got);
        kt_same(v, want, got, n, "activate %d %s n=%d", acts[i], what, n);
        ref->call.gated(acts[i], x, w, n, want);
        memcpy(got, x, bytes);
        v->call.gated(acts[i], got, w, n, got);
        kt_same(v, want, got, n, "gated %d, y is gate, %s n=%d", acts[i], what, n);
        memcpy(got, w, bytes);
        v->call.gated(acts[i], x, got, n, got);
        kt_same(v, want, got, n, "gated %d, y is up, %s n=%d", acts[i], what, n);
    }
    memcpy(want, x, bytes);
    memcpy(got, x, bytes);
    ref->call.softcap(30.0f, n, want);
    v->call.softcap(30.0f, n, got);
    kt_same(v, want, got, n, "softcap %s n=%d", what, n);
    memcpy(want, x, bytes);
    memcpy(got, x, bytes);
    s = ref->call.softmax(want, n);
    t = v->call.softmax(got, n);
    kt_same(v, &s, &t, 1, "sum of softmax %s n=%d", what, n);
    kt_same(v, want, got, n, "softmax %s n=%d", what, n);
    s = ref->call.max(x, n);
    t = v->call.max(x, n);
    kt_same(v, &s, &t, 1, "max %s n=%d", what, n);
    MP_CHECK_INT(v->call.argmax(x, n), ref->call.argmax(x, n));
    const float max = s;
    s = ref->call.exp_sum(x, n, max, want);
    t = v->call.exp_sum(x, n, max, got);
    kt_same(v, &s, &t, 1, "exp_sum %s n=%d", what, n);
    kt_same(v, want, got, n, "exp_sum's out %s n=%d", what, n);
    t = v->call.exp_sum(x, n, max, NULL);
    kt_same(v, &s, &t, 1, "exp_sum without out %s n=%d", what, n);
    s = ref->call.dot(x, w, n);
    t = v->call.dot(x, w, n);
    kt_same(v, &s, &t, 1, "dot %s n=%d", what, n);
    MP_CHECK_INT(v->call.all_finite(x, n), ref->call.all_finite(x, n));
    if (n % 2 == 0)
        for (int neox = 0; neox < 2; neox++) {
            memcpy(want, x, bytes);
            memcpy(got, x, bytes);
            ref->call.rope(want, b, n, neox);
            v->call.rope(got, b, n, neox);
            kt_same(v, want, got, n, "rope neox=%d %s n=%d", neox, what, n);
        }
    kt_edge_free(x, n);
    kt_edge_free(w, n);
    kt_edge_free(b, n);
    kt_edge_free(want, n);
    kt_edge_free(got, n);
}

MP_TEST_SECONDS(kernels_rows_match_ref, 60) {
    static const int longer[] = {127, 128, 384, 576, 1000, 4097, 9001};
    mp_test_random random = {1};
    kt_set ref = kt_ref();
    int variants = 0;
    uint32_t asked = 0;
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_rms_norm); variants++) {
        for (int n = 1; n <= 100; n++)
            for (int kind = 0; kind <= KT_EXTREMES; kind++)
                if (mp_test_take(&asked))
                    compare_all(&v, &ref, &random, n, kind);
        for (size_t i = 0; i < sizeof longer / sizeof *longer; i++)
            for (int kind = 0; kind <= KT_EXTREMES; kind++)
                if (mp_test_take(&asked))
                    compare_all(&v, &ref, &random, longer[i], kind);
    }
    MP_CHECK(variants >= 1);
}

/* Run one in 4,099 of all floats (a fifth of these under sanitizers), including NaNs and denormals, through every
 * activation and exp. */
MP_TEST_SECONDS(kernels_rows_math_bits, 60) {
    enum { N = 1 << 14 };
    float *x = kt_alloc(sizeof(float) * N), *want = kt_alloc(sizeof(float) * N), *got = kt_alloc(sizeof(float) * N);
    kt_set ref = kt_ref();
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_activate);)
        for (uint64_t u = 0; u < UINT64_C(1) << 32;) {
            int n = 0;
            for (; n < N && u < UINT64_C(1) << 32; n++, u += 4099 * MP_TEST_SHARE)
                x[n] = mp_ref_float((uint32_t)u);
            for (int i = 0; i < ACTS; i++) {
                memcpy(want, x, sizeof(float) * (size_t)n);
                memcpy(got, x, sizeof(float) * (size_t)n);
                ref.call.activate(acts[i], n, want);
                v.call.activate(acts[i], n, got);
                kt_same(&v, want, got, n, "activate %d from %g on", acts[i], (double)x[0]);
            }
            ref.call.exp_sum(x, n, 0.0f, want);
            v.call.exp_sum(x, n, 0.0f, got);
            kt_same(&v, want, got, n, "exp from %g on", (double)x[0]);
        }
    kt_free(x);
    kt_free(want);
    kt_free(got);
}

/* Return the distance of `got` from `truth` in units of the last place of the float nearest to `truth`. */
static double ulps(float got, double truth) {
    int exponent;
    frexp(truth, &exponent);
    return fabs((double)got - truth) / ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

MP_TEST(kernels_rows_activation_accuracy) {
    double tanh_ulp = 0.0, sigmoid_ulp = 0.0, gelu_ulp = 0.0, gelu_left = 0.0, gelu_tanh = 0.0, quick = 0.0;
    for (uint32_t u = 0x30000000u; u < 0x42000000u; u += 257) /* 2^-31 to 32 */
        for (int sign = -1; sign <= 1; sign += 2) {
            const float x = (float)sign * mp_ref_float(u);
            const double d = x;
            tanh_ulp = fmax(tanh_ulp, ulps(mp_ref_tanh(x), tanh(d)));
            sigmoid_ulp = fmax(sigmoid_ulp, ulps(mp_ref_sigmoid(x), 1.0 / (1.0 + exp(-d))));
            const double gelu = 0.5 * d * erfc(-d / sqrt(2.0));
            if (x >= -1.0f)
                gelu_ulp = fmax(gelu_ulp, ulps(mp_ref_gelu(x), gelu));
            else
                gelu_left = fmax(gelu_left, fabs(mp_ref_gelu(x) - gelu));
            const double other = 0.5 * d * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (d + 0.044715 * d * d * d)));
            gelu_tanh = fmax(gelu_tanh, fabs(mp_ref_gelu_tanh(x) - other) / fmax(1.0, fabs(d)));
            const double quick_gelu = d / (1.0 + exp(-1.702 * d));
            quick = fmax(quick, fabs(mp_ref_activate(MP_ACT_QUICK_GELU, x) - quick_gelu) / fmax(1.0, fabs(d)));
        }
    if (!(quick <= 1.5e-7))
        MP_FAIL("quick_gelu is off by %.3g", quick);
    if (!(tanh_ulp <= 1.4 && sigmoid_ulp <= 2.5 && gelu_ulp <= 1.6 && gelu_left <= 2.1e-8 && gelu_tanh <= 1.5e-7))
        MP_FAIL("tanh %.3f ulp, sigmoid %.3f ulp, gelu %.3f ulp from -1 on and %.3g before, its tanh form %.3g",
                tanh_ulp, sigmoid_ulp, gelu_ulp, gelu_left, gelu_tanh);
    MP_CHECK(mp_ref_tanh(INFINITY) == 1.0f && mp_ref_tanh(-INFINITY) == -1.0f && isnan(mp_ref_tanh(NAN)));
    MP_CHECK(mp_ref_sigmoid(INFINITY) == 1.0f && mp_ref_sigmoid(-INFINITY) == 0.0f && isnan(mp_ref_sigmoid(NAN)));
    MP_CHECK(mp_ref_gelu(-40.0f) == 0.0f && mp_ref_gelu(40.0f) == 40.0f && isnan(mp_ref_gelu(NAN)));
    MP_CHECK(mp_ref_gelu_tanh(-40.0f) == 0.0f && mp_ref_gelu_tanh(40.0f) == 40.0f && isnan(mp_ref_gelu_tanh(NAN)));
    MP_CHECK(mp_ref_gelu(3e38f) == 3e38f && mp_ref_gelu_tanh(3e38f) == 3e38f);
}

MP_TEST(kernels_rows_argmax) {
    enum { N = 10000 };
    float *x = kt_alloc(sizeof(float) * N);
    mp_test_random random = {3};
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_argmax);) {
        for (int round = 0; round < 200; round++) {
            const int n = 1 + (int)(mp_test_random_u64(&random) % N);
            const int at = (int)(mp_test_random_u64(&random) % (uint64_t)n);
            kt_random(&random, x, n);
            x[at] = 2.0f;
            x[at + (int)(mp_test_random_u64(&random) % (uint64_t)(n - at))] = 2.0f; /* a tie: the lower index wins */
            if (at > 0)
                x[mp_test_random_u64(&random) % (uint64_t)at] = NAN;
            MP_CHECK_INT(v.call.argmax(x, n), at);
        }
        for (int i = 0; i < N; i++)
            x[i] = NAN;
        MP_CHECK_INT(v.call.argmax(x, N), 0);
        MP_CHECK_INT(v.call.argmax(x, 0), 0);
        x[7000] = -INFINITY;
        MP_CHECK_INT(v.call.argmax(x, N), 7000);
        MP_CHECK(v.call.max(x, N) == -INFINITY);
        x[8000] = -3.0f;
        MP_CHECK_INT(v.call.argmax(x, N), 8000);
        MP_CHECK(v.call.max(x, N) == -3.0f);
        x[9000] = INFINITY;
        MP_CHECK_INT(v.call.argmax(x, N), 9000);
        for (int i = 0; i < N; i++)
            x[i] = i % 2 ? 0.0f : -0.0f;
        MP_CHECK_INT(v.call.argmax(x, N), 0);
    }
    kt_free(x);
}

/* Compare ref itself with double precision: norms and rope. */
MP_TEST(kernels_rows_ref_in_double) {
    mp_test_random random = {5};
    kt_set ref = kt_ref();
    float x[400], w[400], b[400], y[400];
    for (int n = 2; n <= 400; n += 1 + n / 9) {
        double square = 0.0, mean = 0.0, variance = 0.0;
        for (int i = 0; i < n; i++) {
            x[i] = mp_test_random_float(&random, -3.0f, 5.0f);
            w[i] = mp_test_random_float(&random, 0.5f, 2.0f);
            b[i] = mp_test_random_float(&random, -1.0f, 1.0f);
            square += (double)x[i] * x[i] / n;
            mean += (double)x[i] / n;
        }
        for (int i = 0; i < n; i++)
            variance += (x[i] - mean) * (x[i] - mean) / n;
        ref.call.rms_norm(x, w, 1e-3f, n, y);
        for (int i = 0; i < n; i++)
            MP_CHECK_NEAR(y[i], x[i] / sqrt(square + 1e-3) * w[i], 4e-6);
        ref.call.layer_norm(x, w, b, 1e-3f, n, y);
        for (int i = 0; i < n; i++)
            MP_CHECK_NEAR(y[i], (x[i] - mean) / sqrt(variance + 1e-3) * w[i] + b[i], 8e-6);
        double dot = 0.0, sum = 0.0;
        for (int i = 0; i < n; i++) {
            dot += (double)x[i] * w[i];
            sum += exp((double)x[i] - 5.0);
        }
        MP_CHECK_NEAR(ref.call.dot(x, w, n), dot, 1e-4);
        MP_CHECK_NEAR(ref.call.exp_sum(x, n, 5.0f, NULL), sum, 1e-4);
        const int half = n / 2;
        for (int neox = 0; neox < 2; neox++) {
            float angles[400];
            for (int i = 0; i < half; i++) {
                angles[2 * i] = cosf((float)i);
                angles[2 * i + 1] = sinf((float)i);
            }
            memcpy(y, x, sizeof x);
            ref.call.rope(y, angles, 2 * half, neox);
            for (int i = 0; i < half; i++) {
                const int p = neox ? i : 2 * i, q = neox ? i + half : 2 * i + 1;
                MP_CHECK_NEAR(y[p], x[p] * cos(i) - x[q] * sin(i), 1e-5);
                MP_CHECK_NEAR(y[q], x[p] * sin(i) + x[q] * cos(i), 1e-5);
            }
        }
    }
}
