/* digits.h and slot row_maxima_i8: numbers of three digits are as near as digits.h says, every variant has the bits of
 * ref/, and ref/ those of exact integers. */
#include <float.h>
#include <math.h>

#include "kernel_edge.h"
#include "kernel_test.h"
#include "kernels/digits.h"
#include "kernels/pack_dense.h"

enum { MAX_ROWS = 40 };

typedef struct scene { /* int8 rows [n, ld] and a panel of digits */
    int K, n, columns;
    int64_t ld, size, words; /* bytes of the rows; floats of the memory that ends with them */
    float *memory, *scales, *floats; /* the panel's vectors [columns, K] */
    int8_t *rows;
    uint8_t *panel;
} scene;

static void pack(const float *vectors, int columns, int K, uint8_t *panel) {
    float *floats = kt_alloc(sizeof(float) * (size_t)K * MP_PANEL_N);
    mp_pack_dense_f32(vectors, K, columns, K, floats);
    mp_digits_pack(floats, K, panel);
    kt_free(floats);
}

static scene make_scene(mp_test_random *random, int K, int n, int columns) {
    scene s = {.K = K, .n = n, .columns = columns, .ld = K + n % 3};
    s.size = s.ld * (n - 1) + K;
    s.words = (s.size + 3) / 4;
    s.memory = kt_edge(s.words);
    s.rows = (int8_t *)(s.memory + s.words) - s.size;
    s.scales = kt_edge(n);
    s.floats = kt_edge((int64_t)columns * K);
    s.panel = kt_alloc(mp_digits_bytes(K));
    for (int64_t i = 0; i < s.size; i++)
        s.rows[i] = (int8_t)(mp_test_random_u64(random) % 4 ? (int)(mp_test_random_u64(random) & 255) - 128 : -128);
    kt_random(random, s.scales, n);
    kt_random(random, s.floats, (int64_t)columns * K);
    pack(s.floats, columns, K, s.panel);
    return s;
}

static void free_scene(scene *s) {
    kt_edge_free(s->memory, s->words);
    kt_edge_free(s->scales, s->n);
    kt_edge_free(s->floats, (int64_t)s->columns * s->K);
    kt_free(s->panel);
}

static void clear(float *maxima) {
    for (int j = 0; j < MP_PANEL_N; j++)
        maxima[j] = j % 2 ? -INFINITY : 0.5f;
}

/* Run one set on a scene: maxima [MP_PANEL_N], in which -0 counts as +0. */
static bool run(const kt_set *set, const scene *s, bool scaled, float *maxima) {
    clear(maxima);
    const bool finite = set->call.row_maxima_i8(s->panel, s->columns, s->K, s->rows, s->ld, s->n,
                                                scaled ? s->scales : NULL, maxima);
    for (int j = 0; j < s->columns; j++)
        maxima[j] += 0.0f;
    return finite;
}

/* Compare every variant with ref. */
static void compare(const scene *s) {
    float want[2][MP_PANEL_N], got[MP_PANEL_N];
    bool finite[2];
    const kt_set ref = kt_ref();
    for (int scaled = 0; scaled < 2; scaled++)
        finite[scaled] = run(&ref, s, scaled, want[scaled]);
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_row_maxima_i8);)
        for (int scaled = 0; scaled < 2; scaled++) {
            MP_CHECK(run(&v, s, scaled, got) == finite[scaled]);
            if (finite[scaled])
                kt_same(&v, want[scaled], got, s->columns, "row_maxima_i8 K=%d n=%d columns=%d scaled=%d", s->K, s->n,
                        s->columns, scaled);
        }
}

MP_TEST(kernels_digits_match_ref) {
    static const int inputs[] = {1, 3, 16, 63, 64, 65, 128, MP_K_CHUNK, MP_K_CHUNK + 1, 2 * MP_K_CHUNK + 5};
    mp_test_random random = {11};
    for (int i = 0; i < 10; i++)
        for (int n = 1; n <= MAX_ROWS; n += n < 20 ? 1 : 9) {
            scene s = make_scene(&random, inputs[i], n, n % 4 == 0 ? 32 : 1 + (n * 7 + i) % 32);
            compare(&s);
            free_scene(&s);
        }
}

/* The number q of input k of a column. */
static int32_t number_at(const uint8_t *panel, int k, int column) {
    const int8_t *digits = (const int8_t *)panel + mp_digits_byte(k, column);
    return digits[0] + 256 * digits[MP_DIGITS_LINE] + 65536 * digits[2 * MP_DIGITS_LINE];
}

/* The greatest and least sums: every product has the same sign, and every digit is extreme. */
MP_TEST(kernels_digits_sums_are_exact) {
    enum { K = 2 * MP_K_CHUNK, N = 17 };
    mp_test_random random = {14};
    static const float tops[] = {0x1.fdfdfcp22f, -0x1.fdfdfcp22f, 0x1.ff7f7ep22f, -0x1.fe7e7ep22f}; /* +-MAX, ... */
    for (int i = 0; i < 4; i++)
        for (int component = -128; component < 128; component += 255) {
            scene s = make_scene(&random, K, N, 32);
            for (int k = 0; k < 32 * K; k++)
                s.floats[k] = tops[i];
            for (int64_t k = 0; k < s.size; k++)
                s.rows[k] = (int8_t)component;
            pack(s.floats, 32, K, s.panel);
            compare(&s);
            float got[MP_PANEL_N];
            const kt_set ref = kt_ref();
            MP_CHECK(run(&ref, &s, false, got));
            const double exact = (double)number_at(s.panel, 0, 0) * component * K * (double)*mp_digits_units(s.panel);
            MP_CHECK(exact < 0.5 ? got[0] == 0.5f : fabs((double)got[0] - exact) <= exact * 0x1p-22);
            free_scene(&s);
        }
}

/* Check the panel of one vector. */
static void check_numbers(const float *x, int K) {
    uint8_t *panel = kt_alloc(mp_digits_bytes(K));
    pack(x, 1, K, panel);
    const double unit = (double)*mp_digits_units(panel);
    int exponent;
    double top = 0;
    MP_CHECK(frexp(unit, &exponent) == 0.5 && unit >= 0x1p-126);
    for (int k = 0; k < K; k++)
        top = fmax(top, fabs((double)x[k]));
    MP_CHECK(unit == 0x1p-126 || rint(top / (unit / 2)) > MP_DIGITS_MAX); /* no smaller unit would do */
    MP_CHECK(unit / 2 <= fmax(1.004 * 0x1p-23 * top, 0x1p-127));
    const int padded = (K + MP_DIGITS_PAD - 1) / MP_DIGITS_PAD * MP_DIGITS_PAD;
    for (int chunk = 0; chunk < padded; chunk += MP_K_CHUNK) {
        int32_t offsets[MP_DIGITS * MP_PANEL_N], sums[MP_DIGITS] = {0};
        memcpy(offsets, panel + mp_digits_chunk(chunk), sizeof offsets);
        for (int k = chunk; k < padded && k < chunk + MP_K_CHUNK; k++) {
            const double value = k < K && fabsf(x[k]) >= FLT_MIN ? (double)x[k] : 0.0;
            const int32_t q = number_at(panel, k, 0);
            MP_CHECK(abs(q) <= MP_DIGITS_MAX && q == (int32_t)rint(value / unit));
            MP_CHECK_INT(number_at(panel, k, 1), 0);
            for (int d = 0; d < MP_DIGITS; d++)
                sums[d] -= 128 * ((const int8_t *)panel)[mp_digits_byte(k, 0) + (size_t)d * MP_DIGITS_LINE];
        }
        for (int d = 0; d < MP_DIGITS; d++)
            MP_CHECK(offsets[d * MP_PANEL_N] == sums[d] && offsets[d * MP_PANEL_N + 1] == 0);
    }
    kt_free(panel);
}

MP_TEST(kernels_digits_hold_vectors) {
    enum { K = MP_K_CHUNK + 70 };
    static const float tops[] = {1.0f, 0x1.fdfdfcp0f, 0x1.fdfdfep0f, 0x1.fffffep0f, FLT_MAX, FLT_MIN, 0x1.fffffep-127f,
                                 0x1p-149f, 0x1p-103f, 0x1.fffffep-104f, 0x1.8p-60f};
    mp_test_random random = {15};
    float x[K];
    for (int kind = 0; kind < KT_EXTREMES; kind++) {
        if (kind == KT_INF || kind == KT_NAN)
            continue;
        for (int n = 1; n <= K; n += n < 4 ? 1 : 75) {
            kt_extreme(&random, kind, x, n);
            check_numbers(x, n);
        }
    }
    for (size_t i = 0; i < sizeof tops / sizeof *tops; i++)
        for (int sign = -1; sign < 2; sign += 2) {
            kt_random(&random, x, K);
            for (int k = 0; k < K; k++)
                x[k] *= tops[i];
            x[K / 2] = (float)sign * tops[i];
            check_numbers(x, K);
            check_numbers(x + K / 2, 1);
        }
}

MP_TEST(kernels_digits_find_what_is_not_finite) {
    enum { K = MP_K_CHUNK + 3 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    mp_test_random random = {16};
    float maxima[MP_PANEL_N];
    for (int n = 1; n <= MAX_ROWS; n += 13) {
        scene s = make_scene(&random, K, n, 32);
        kt_set v = kt_ref();
        do
            for (int r = 0; r < n; r++) {
                const float before = s.scales[r];
                MP_CHECK(run(&v, &s, true, maxima));
                s.scales[r] = bad[(r + n) % 3];
                MP_CHECK(!run(&v, &s, true, maxima));
                s.scales[r] = before;
            }
        while (kt_next(&v, MP_SLOT_row_maxima_i8));
        free_scene(&s);
    }
}
