/* Products with unpacked fp32 weights: our own kernels, and OpenBLAS if available, compared with the definition. */
#include <dlfcn.h>

#include "base/sys.h"
#include "kernel_test.h"
#include "kernels/blas.h"

static const float GUARD = 123456.75f;

/* Compute one output element by the definition. */
static float chain(const float *x, const float *w, int K) {
    float sum = 0;
    for (int k = 0; k < K; k += MP_K_CHUNK) {
        const int end = K - k < MP_K_CHUNK ? K : k + MP_K_CHUNK;
        float f = 0;
        for (int i = k; i < end; i++)
            f = fmaf(x[i], w[i], f);
        sum = k == 0 ? f : sum + f;
    }
    return sum;
}

static void check_plain(int M, int N, int K, int stride, mp_test_random *random) {
    const int ldx = K + 3, ldw = K + 1, ldy = N + 2;
    float *x = kt_alloc(sizeof(float) * (size_t)M * (size_t)ldx),
          *w = kt_alloc(sizeof(float) * (size_t)N * (size_t)ldw);
    float *y = kt_alloc(sizeof(float) * (size_t)M * (size_t)ldy);
    kt_random(random, x, (int64_t)M * ldx);
    kt_random(random, w, (int64_t)N * ldw);
    for (int64_t i = 0; i < (int64_t)M * ldy; i++)
        y[i] = GUARD;
    mp_gemm_f32_plain(M, N, K, x, ldx, w, ldw, y, ldy);
    if (M <= 40) { /* without OpenBLAS, into memory with other values: the same bits */
        float *own = kt_alloc(sizeof(float) * (size_t)M * (size_t)ldy);
        for (int64_t i = 0; i < (int64_t)M * ldy; i++)
            own[i] = GUARD;
        mp_gemm_f32_own(M, N, K, x, ldx, w, ldw, own, ldy);
        for (int64_t i = 0; i < (int64_t)M * ldy; i++)
            MP_CHECK(kt_equal(own[i], y[i]));
        kt_free(own);
    }
    for (int m = 0; m < M; m++) {
        MP_CHECK(y[m * ldy + N] == GUARD && y[m * ldy + N + 1] == GUARD);
        for (int n = m % stride; n < N; n += stride) {
            const float e = chain(x + (int64_t)m * ldx, w + (int64_t)n * ldw, K);
            if (!kt_equal(e, y[m * ldy + n]))
                MP_FAIL("plain M=%d N=%d K=%d [%d, %d]: got %.9g, expected %.9g", M, N, K, m, n, (double)y[m * ldy + n],
                        (double)e);
        }
    }
    kt_free(x);
    kt_free(w);
    kt_free(y);
}

MP_TEST_SECONDS(kernels_plain_matches_definition, 60) {
    mp_test_random random = {600};
    mp_blas_set_path("none");
    for (int i = 0; i < KT_MASKS; i++) {
        if (!kt_use(kt_masks[i]))
            continue;
        check_plain(1, 1, 1, 1, &random);
        check_plain(5, 33, 385, 1, &random);
        check_plain(40, 65, 800, 3, &random);
        check_plain(13, 7, 29, 1, &random);
    }
    float y[6] = {1, 1, 1, 1, 1, 1};
    mp_gemm_f32_plain(2, 3, 0, y, 1, y, 1, y, 3);
    for (int i = 0; i < 6; i++)
        MP_CHECK(y[i] == 0.0f);
    const char *why;
    MP_CHECK_STR(mp_blas_core(&why), "");
    MP_CHECK_HAS(why, "own kernels");
}

/* Every variant of the product with rows as stored gives the bits of the definition, for any number of rows. */
MP_TEST(kernels_stored_f32_variants) {
    static const int Ks[] = {1, 7, 8, 40, MP_K_CHUNK, MP_K_CHUNK + 1, 2 * MP_K_CHUNK + 13};
    mp_test_random random = {650};
    for (size_t i = 0; i < sizeof Ks / sizeof *Ks; i++)
        for (int n = 1; n <= 19; n += 3) {
            const int K = Ks[i], M = 2, ldw = K + 3;
            float *w = kt_alloc(sizeof(float) * (size_t)(n * ldw)), *x = kt_alloc(sizeof(float) * (size_t)(M * K));
            float *y = kt_alloc(sizeof(float) * (size_t)n);
            kt_random(&random, w, n * ldw);
            kt_random(&random, x, M * K);
            const mp_acts acts = {.kind = MP_A_F32, .M = M, .K = K, .f32 = x, .ld_f32 = K};
            kt_set set = kt_ref();
            do {
                for (int m = 0; m < M; m++) {
                    set.call.stored_f32((const uint8_t *)w, sizeof(float) * (size_t)ldw, n, &acts, m, y);
                    for (int o = 0; o < n; o++)
                        if (!kt_equal(chain(x + m * K, w + o * ldw, K), y[o]))
                            MP_FAIL("stored_f32 n=%d K=%d: output %d of row %d differs", n, K, o, m);
                }
            } while (kt_next(&set, MP_SLOT_stored_f32));
            kt_free(w), kt_free(x), kt_free(y);
        }
}

/* Every variant of the product of several rows with rows as stored gives the bits of the definition, for any range of
 * rows, and writes nothing else. */
MP_TEST(kernels_stored_f32_rows_variants) {
    static const int Ks[] = {1, 15, 16, 17, 40, MP_K_CHUNK, MP_K_CHUNK + 1, 2 * MP_K_CHUNK + 29};
    enum { M = 30, N = 33, LD = N + 2 };
    mp_test_random random = {652};
    for (size_t i = 0; i < sizeof Ks / sizeof *Ks; i++)
        for (int m1 = 0; m1 <= M; m1++) {
            const int K = Ks[i], ldw = K + 3, ldx = K + 1, n = 1 + (m1 * 7) % N, m0 = m1 > 20 ? m1 - 20 : 0;
            float *w = kt_alloc(sizeof(float) * (size_t)(n * ldw)), *x = kt_alloc(sizeof(float) * (size_t)(M * ldx));
            float y[M * LD];
            kt_random(&random, w, n * ldw);
            kt_random(&random, x, M * ldx);
            kt_extreme(&random, (enum kt_extreme)(m1 % KT_EXTREMES), w + n / 2 * ldw, K);
            const mp_acts acts = {.kind = MP_A_F32, .M = M, .K = K, .f32 = x, .ld_f32 = ldx};
            kt_set set = kt_ref();
            do {
                for (int v = 0; v < M * LD; v++)
                    y[v] = -77.0f;
                set.call.stored_f32_rows(w, ldw, n, &acts, m0, m1, y, LD);
                for (int v = 0; v < M * LD; v++) {
                    const int m = v / LD, o = v % LD;
                    const bool written = m < m1 - m0 && o < n;
                    if (!kt_equal(written ? chain(x + (m0 + m) * ldx, w + o * ldw, K) : -77.0f, y[v]))
                        MP_FAIL("%s: n=%d K=%d rows %d to %d: output %d of row %d", set.mask, n, K, m0, m1, o, m);
                }
            } while (kt_next(&set, MP_SLOT_stored_f32_rows));
            kt_free(w), kt_free(x);
        }
}

/* Checks squared_f32 of every variant against the definition of the product and the reference's dot. */
static void check_squared(int n, int K, const float *w, int ldw, const float *x) {
    float *y = kt_alloc(sizeof(float) * (size_t)n), *squares = kt_alloc(sizeof(float) * (size_t)n);
    kt_set set = kt_ref();
    const kt_set ref = set;
    do {
        set.call.squared_f32(w, ldw, n, K, x, y, squares);
        for (int o = 0; o < n; o++) {
            const float *row = w + o * ldw;
            if (!kt_equal(chain(x, row, K), y[o]) || !kt_equal(ref.call.dot(row, row, K), squares[o]))
                MP_FAIL("squared_f32 with %s, n=%d K=%d: output %d differs", set.mask, n, K, o);
        }
    } while (kt_next(&set, MP_SLOT_squared_f32));
    kt_free(y), kt_free(squares);
}

/* Every variant of the product that also squares its rows gives the bits of the definitions: for any number of rows,
 * and with rows that are not finite beside others. */
MP_TEST(kernels_squared_f32_variants) {
    static const int Ks[] = {1, 7, 15, 16, 17, 40, MP_K_CHUNK, MP_K_CHUNK + 1, 2 * MP_K_CHUNK + 13};
    mp_test_random random = {651};
    for (size_t i = 0; i < sizeof Ks / sizeof *Ks; i++)
        for (int n = 1; n <= 37; n += i % 2 ? 5 : 4) {
            const int K = Ks[i], ldw = K + 3;
            float *w = kt_alloc(sizeof(float) * (size_t)(n * ldw)), *x = kt_alloc(sizeof(float) * (size_t)K);
            kt_random(&random, w, n * ldw);
            kt_random(&random, x, K);
            check_squared(n, K, w, ldw, x);
            kt_extreme(&random, (enum kt_extreme)(n % KT_EXTREMES), w + n / 2 * ldw, K);
            check_squared(n, K, w, ldw, x);
            kt_free(w), kt_free(x);
        }
}

/* A library that is refused is closed. */
MP_TEST(kernels_blas_closes_other_libraries) {
    static const char other[] = "libresolv.so.2"; /* part of glibc, and used by nothing here */
    const char *why;
    void *loaded = dlopen(other, RTLD_NOW | RTLD_NOLOAD);
    if (loaded)
        MP_SKIP("the process uses libresolv");
    kt_use("");
    mp_blas_set_path(other);
    MP_CHECK_STR(mp_blas_core(&why), "");
    if (strstr(why, "could not be opened"))
        MP_SKIP("needs libresolv.so.2");
    MP_CHECK_HAS(why, "has no function cblas_sgemm");
    MP_CHECK(dlopen(other, RTLD_NOW | RTLD_NOLOAD) == NULL);
}

/* The whole reason of a library that was opened: it serves, or its self-test failed. `name` is that of its kernels. */
static void check_reason(const char *core, const char *why, const char *name) {
    char serves[200], refused[200];
    snprintf(serves, sizeof serves, "OpenBLAS (%s) for large unpacked fp32 products: same bits as mpool's kernels",
             name);
    snprintf(refused, sizeof refused,
             "mpool's own kernels: OpenBLAS (%s) serves compute=\"float32-fast\" only: its sums differ from ours in "
             "the last bits", name);
    MP_CHECK_STR(why, core[0] ? serves : refused);
}

/* With OpenBLAS, results have the same bits whether or not it passes the self-test; the environment is unchanged. */
MP_TEST_SECONDS(kernels_blas_gives_the_same_bits, 60) {
    const char *path = getenv("MPOOL_BLAS"), *why;
    mp_test_random random = {800};
    if (!path || !*path || strcmp(path, "none") == 0)
        MP_SKIP("needs OpenBLAS: set MPOOL_BLAS to its path");
    kt_use("");
    setenv("OPENBLAS_CORETYPE", "Prescott", 1);
    unsetenv("OPENBLAS_NUM_THREADS");
    mp_blas_set_path(path);
    const char *core = mp_blas_core(&why);
    fprintf(stderr, "%s: %s\n", core, why);
    if (core[0])
        check_reason(core, why, core);
    MP_CHECK_STR(getenv("OPENBLAS_CORETYPE"), "Prescott");
    MP_CHECK(!getenv("OPENBLAS_NUM_THREADS"));
    if (mp_cpu_features() & MP_CPU_AVX512 && strstr(path, "scipy_openblas"))
        MP_CHECK_STR(core, "SkylakeX"); /* the vendored build must use these kernels; others are slower */
    uint64_t created, joined;
    mp_thread_counts(&created, &joined);
    MP_CHECK_INT(created, 0);
    const int Ms[] = {3, 4, 5, 7, 8, 13, 16, 31, 48, 100, 257};
    for (size_t i = 0; i < sizeof Ms / sizeof *Ms; i++) {
        const int least = 1000000 / (Ms[i] * 384) + 1;
        for (int j = 0; j < 4; j++) {
            const int more = (int)(mp_test_random_u64(&random) % 60);
            check_plain(Ms[i], least + more, 384, 17, &random);
            check_plain(Ms[i], least + more, 1000 + j, 29, &random);
        }
        MP_CHECK_INT(mp_blas_takes(Ms[i], least, 384), core[0] != 0);
        MP_CHECK(!mp_blas_takes(Ms[i], least / 2, 384));
        check_plain(Ms[i], least / 2 + 1, 384, 17, &random); /* too small for OpenBLAS: our own kernel computes this */
        check_plain(Ms[i], least / 20 + 1, 200, 7, &random);
        check_plain(Ms[i], 1000000 / (Ms[i] * 20) + 3, 20, 29, &random);
        check_plain(Ms[i], 1000000 / Ms[i] + 5 > 30000 ? 30000 : 1000000 / Ms[i] + 5, 7, 101, &random);
    }
    check_plain(1, 2700, 384, 7, &random); /* one row or one column: OpenBLAS may use gemv */
    check_plain(2700, 1, 384, 1, &random);
    check_plain(2, 1400, 384, 7, &random);
}

/* Multiply rows of FP32 that are not packed, in several tiles of rows and of outputs. The library computes all of them.
 * tolerance: of sums of K products; 0: the bits of our kernels. */
static void check_stored_products(bool fast, float tolerance) {
    enum { K = 520 };
    mp_test_random random = {850};
    static const int shapes[][4] = {{96, 700, 0, 700}, {300, 1100, 0, 1100}, {257, 1030, 3, 1027}, {513, 97, 0, 97}};
    float *tile = kt_alloc(sizeof(float) * MP_STORED_TILE);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const int M = shapes[s][0], N = shapes[s][1], n0 = shapes[s][2], n1 = shapes[s][3];
        float *x = kt_alloc(sizeof(float) * (size_t)M * K), *w = kt_alloc(sizeof(float) * (size_t)N * K);
        float *y = kt_alloc(sizeof(float) * (size_t)M * (size_t)N);
        kt_random(&random, x, (int64_t)M * K);
        kt_random(&random, w, (int64_t)N * K);
        for (int64_t i = 0; i < (int64_t)M * N; i++)
            y[i] = GUARD;
        const mp_tensor tensor = {.dtype = MP_F32, .ndim = 2, .shape = {N, K}, .data = (const uint8_t *)w,
                                  .nbytes = sizeof(float) * (uint64_t)N * K};
        mp_acts acts;
        mp_acts_init(&acts, MP_A_F32, M, K, NULL);
        mp_acts_fill(&acts, x, K, 0, M);
        const uint64_t before = mp_blas_work();
        MP_CHECK(mp_gemm_stored(&tensor, &acts, n0, n1, fast, NULL, tile, y, N));
        MP_CHECK_INT(mp_blas_work() - before, (int64_t)M * (n1 - n0) * K);
        for (int m = 0; m < M; m += 3)
            for (int n = 0; n < N; n++) {
                const float e = n < n0 || n >= n1 ? GUARD : chain(x + (int64_t)m * K, w + (int64_t)n * K, K);
                const float got = y[(int64_t)m * N + n];
                if (!kt_equal(e, got) && !(e != GUARD && fabsf(e - got) <= tolerance))
                    MP_FAIL("M=%d N=%d [%d, %d]: got %.9g, expected %.9g", M, N, m, n, (double)got, (double)e);
            }
        kt_free(x), kt_free(w), kt_free(y);
    }
    kt_free(tile);
}

MP_TEST_SECONDS(kernels_blas_gives_stored_products, 60) {
    const char *path = getenv("MPOOL_BLAS");
    kt_use("");
    mp_blas_set_path(path ? path : "none");
    if (!mp_blas_takes(300, 300, 300))
        MP_SKIP("needs an OpenBLAS with the bits of our kernels: set MPOOL_BLAS to its path");
    check_stored_products(false, 0);
    check_stored_products(true, 0); /* nothing is faster than the same bits */
}

static void plain_in_thread(void *arg) {
    mp_test_random random = {*(const uint64_t *)arg};
    for (int i = 0; i < 3; i++)
        check_plain(40 + i, 71, 384, 13, &random);
}

/* Four threads use OpenBLAS for the first time at once: the library is loaded once, and every result is right. */
MP_TEST_SECONDS(kernels_blas_from_many_threads, 60) {
    enum { THREADS = 4 };
    const char *path = getenv("MPOOL_BLAS");
    mp_thread threads[THREADS];
    uint64_t seeds[THREADS];
    mp_error error;
    kt_use("");
    mp_blas_set_path(path ? path : "none");
    for (int i = 0; i < THREADS; i++) {
        seeds[i] = 1000 + (uint64_t)i;
        MP_CHECK_OK(mp_thread_start(&threads[i], "plain", plain_in_thread, &seeds[i], &error), &error);
    }
    for (int i = 0; i < THREADS; i++)
        mp_thread_join(&threads[i]);
}
