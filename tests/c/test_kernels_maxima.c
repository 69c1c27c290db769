/* Slots row_maxima and widen_i8: every variant has the bits of ref/, and ref/ those of gemm_f32 and a plain maximum. */
#include <float.h>

#include "kernel_edge.h"
#include "kernel_test.h"
#include "kernels/pack_dense.h"
#include "kernels/ref/math.h"

/* the templates for kt_next_or_plain */
#include "kernels/simd/vec_plain.h"

#include "kernels/simd/rows_tmpl.h"

static bool next_variant(kt_set *set, int slot) { return kt_next_or_plain(set, slot, rows_fill); }

typedef struct shape {
    int K, n, columns;
    bool scaled;
} shape;

/* Compare every variant with ref. Returns the number of variants. */
static int compare(mp_test_random *random, shape s) {
    const int64_t ld = s.K + s.n % 3;
    const int64_t size = ld * (s.n - 1) + s.K;
    float *rows = kt_edge(size), *scales = kt_edge(s.n), *outputs = kt_edge(s.columns * s.K);
    float *panel = kt_alloc(sizeof(float) * (size_t)s.K * MP_PANEL_N), want[MP_PANEL_N], got[MP_PANEL_N];
    int variants = 0;
    kt_random(random, rows, size);
    kt_random(random, scales, s.n);
    kt_random(random, outputs, s.columns * s.K);
    mp_pack_dense_f32(outputs, s.K, s.columns, s.K, panel);
    for (int j = 0; j < MP_PANEL_N; j++)
        want[j] = j % 2 ? -INFINITY : 0.5f;
    MP_CHECK(kt_ref().call.row_maxima(panel, s.columns, s.K, rows, ld, s.n, s.scaled ? scales : NULL, want));
    for (int j = 0; j < s.columns; j++)
        want[j] += 0.0f; /* -0 and +0 count as equal */
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_row_maxima); variants++) {
        for (int j = 0; j < MP_PANEL_N; j++)
            got[j] = j % 2 ? -INFINITY : 0.5f;
        MP_CHECK(v.call.row_maxima(panel, s.columns, s.K, rows, ld, s.n, s.scaled ? scales : NULL, got));
        for (int j = 0; j < s.columns; j++)
            got[j] += 0.0f;
        kt_same(&v, want, got, s.columns, "row_maxima K=%d n=%d columns=%d scaled=%d", s.K, s.n, s.columns, s.scaled);
    }
    kt_free(panel);
    kt_edge_free(rows, size);
    kt_edge_free(scales, s.n);
    kt_edge_free(outputs, s.columns * s.K);
    return variants;
}

MP_TEST(kernels_maxima_match_ref) {
    static const int inputs[] = {1, 3, 16, 31, 128, MP_K_CHUNK, MP_K_CHUNK + 1, 2 * MP_K_CHUNK + 5};
    mp_test_random random = {7};
    for (int i = 0; i < 8; i++)
        for (int n = 1; n <= 26; n++)
            MP_CHECK(compare(&random, (shape){inputs[i], n, n % 4 == 0 ? 32 : 1 + (n * 7 + i) % 32, n % 2}) >= 1);
}

MP_TEST(kernels_maxima_are_those_of_gemm_f32) {
    enum { K = MP_K_CHUNK + 37, ROWS = 19, COLUMNS = 32 };
    mp_test_random random = {8};
    float *rows = kt_alloc(sizeof(float) * ROWS * K), *outputs = kt_alloc(sizeof(float) * COLUMNS * K);
    float *panel = kt_alloc(sizeof(float) * K * MP_PANEL_N), *y = kt_alloc(sizeof(float) * ROWS * COLUMNS);
    float want[COLUMNS], got[COLUMNS];
    kt_random(&random, rows, ROWS * K);
    kt_random(&random, outputs, COLUMNS * K);
    mp_pack_dense_f32(outputs, K, COLUMNS, K, panel);
    kt_set ref = kt_ref();
    mp_wmat w;
    mp_wmat_init(&w, MP_W_F32, COLUMNS, K);
    w.data = (uint8_t *)panel;
    mp_acts acts;
    mp_acts_init(&acts, MP_A_F32, ROWS, K, NULL);
    mp_acts_fill(&acts, rows, K, 0, ROWS);
    ref.call.gemm_f32(&w, &acts, 0, ROWS, 0, 1, NULL, y, COLUMNS);
    for (int j = 0; j < COLUMNS; j++) {
        want[j] = got[j] = -INFINITY;
        for (int r = 0; r < ROWS; r++)
            want[j] = fmaxf(want[j], y[r * COLUMNS + j]);
    }
    MP_CHECK(ref.call.row_maxima(panel, COLUMNS, K, rows, K, ROWS, NULL, got));
    kt_same(&ref, want, got, COLUMNS, "row_maxima of ref");
    kt_free(rows);
    kt_free(outputs);
    kt_free(panel);
    kt_free(y);
}

MP_TEST(kernels_maxima_find_what_is_not_finite) {
    enum { K = 2 * MP_K_CHUNK, MAX = 14 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    float *rows = kt_alloc(sizeof(float) * MAX * K), *panel = kt_alloc(sizeof(float) * K * MP_PANEL_N);
    float scales[MAX], maxima[MP_PANEL_N];
    for (int i = 0; i < MAX * K; i++)
        rows[i] = 1.0f;
    for (int i = 0; i < K * MP_PANEL_N; i++)
        panel[i] = i % MP_PANEL_N == 5 ? -1e-3f : 0.0f; /* the other columns are zero */
    for (int i = 0; i < MAX; i++)
        scales[i] = 1.0f;
    uint32_t asked = 0;
    for (kt_set v = {0}; next_variant(&v, MP_SLOT_row_maxima);)
        for (int n = 1; n <= MAX; n++)
            for (int r = 0; r < n; r++) {
                if (!mp_test_take(&asked))
                    continue;
                const int at = r * K + (r * 131 + n * 57) % K;
                memset(maxima, 0, sizeof maxima);
                MP_CHECK(v.call.row_maxima(panel, 32, K, rows, K, n, scales, maxima));
                rows[at] = bad[(n + r) % 3];
                MP_CHECK(!v.call.row_maxima(panel, 32, K, rows, K, n, NULL, maxima));
                rows[at] = 1.0f;
                scales[r] = bad[(n + r) % 3];
                MP_CHECK(!v.call.row_maxima(panel, 32, K, rows, K, n, scales, maxima));
                scales[r] = 1.0f;
            }
    kt_free(rows);
    kt_free(panel);
}
