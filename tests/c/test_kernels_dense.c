/* The dense kernels: packing, activations, and every variant of gemm compared with ref. */
#include <float.h>

#include "kernel_edge.h"
#include "kernel_test.h"
#include "kernels/pack_dense.h"

/* ---- a problem: weights of one kind, activations, outputs ------------------------------------------------------- */

typedef struct problem {
    mp_wkind kind;
    int M, N, K;
    float *w, *x; /* [N, K], [M, K] */
    mp_wmat packed;
    mp_acts acts;
    float *packed_memory, *acts_memory; /* end at an inaccessible page: tiles and vectors must not read beyond */
    int64_t packed_floats, acts_floats;
} problem;

static mp_tensor tensor_of(const float *w, int N, int K) {
    return (mp_tensor){.dtype = MP_F32,
                       .ndim = 2,
                       .shape = {N, K},
                       .data = (const uint8_t *)w,
                       .nbytes = sizeof(float) * (uint64_t)N * (uint64_t)K};
}

static problem make(mp_wkind kind, int M, int N, int K) {
    problem p = {.kind = kind, .M = M, .N = N, .K = K};
    p.w = kt_alloc(sizeof(float) * (size_t)N * (size_t)K);
    p.x = kt_alloc(sizeof(float) * (size_t)M * (size_t)K);
    mp_wmat_init(&p.packed, kind, N, K);
    p.packed_floats = (int64_t)((mp_wmat_bytes(&p.packed) + MP_WMAT_SLACK) / sizeof(float));
    p.packed_memory = kt_edge(p.packed_floats);
    p.packed.data = (uint8_t *)p.packed_memory;
    memset(p.packed.data + mp_wmat_bytes(&p.packed), 0xff, MP_WMAT_SLACK); /* NaN: kernels may read it */
    const mp_akind acts = mp_wmat_acts(kind);
    p.acts_floats = (int64_t)(mp_acts_bytes(acts, M, K) / sizeof(float));
    p.acts_memory = kt_edge(p.acts_floats);
    mp_acts_init(&p.acts, acts, M, K, p.acts_memory);
    return p;
}

/* Pack w and quantise x with the reference kernels. Call after w and x are filled. */
static void prepare(problem *p) {
    const mp_tensor src = tensor_of(p->w, p->N, p->K);
    kt_use("ref");
    mp_wmat_pack(&p->packed, &src, 0, p->packed.panels);
    mp_acts_fill(&p->acts, p->x, p->K, 0, p->M);
}

static void release(problem *p) {
    kt_free(p->w);
    kt_free(p->x);
    kt_edge_free(p->packed_memory, p->packed_floats);
    kt_edge_free(p->acts_memory, p->acts_floats);
}

static const mp_wkind dense_kinds[] = {MP_W_F32, MP_W_BF16, MP_W_I8};
static const int dense_slots[] = {MP_SLOT_gemm_f32, MP_SLOT_gemm_bf16, MP_SLOT_gemm_i8};
static const char *const dense_names[] = {"F32", "BF16", "I8"};
enum { DENSE_KINDS = 3 };

/* Fill the stack below the caller with ascending numbers, so that a kernel that reads a variable before it is written
 * crashes or computes something else. */
static __attribute__((noinline)) void fill_stack(void) {
    uint32_t words[1 << 13];
    for (uint32_t i = 0; i < 1 << 13; i++)
        words[i] = i << 8;
    __asm__ volatile("" : : "r"(words) : "memory");
}

/* Call the gemm of a kind through a given table. mp_gemm would use the table that the process has selected. */
static void run(const mp_kernels *call, const problem *p, int m0, int m1, int p0, int p1, const mp_epilogue *ep,
                float *y, int64_t ldy) {
    fill_stack();
    switch (p->kind) {
    case MP_W_F32:
        call->gemm_f32(&p->packed, &p->acts, m0, m1, p0, p1, ep, y, ldy);
        break;
    case MP_W_BF16:
        call->gemm_bf16(&p->packed, &p->acts, m0, m1, p0, p1, ep, y, ldy);
        break;
    default:
        call->gemm_i8(&p->packed, &p->acts, m0, m1, p0, p1, ep, y, ldy);
        break;
    }
}

/* ---- model of vdpbf16ps ------------------------------------------------------------------------------------------
 *
 * Denormal inputs count as zero, and a denormal sum becomes zero. Each of the two products is added with one rounding;
 * it is exact in fp32 unless it is outside the range of fp32. */

static float flush(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0.0f, x) : x; }

static float bf16_step(float acc, uint16_t a, uint16_t b) {
    return flush(fmaf(flush(mp_bf16_to_f32(a)), flush(mp_bf16_to_f32(b)), flush(acc)));
}

static void gemm_bf16_model(const problem *p, float *y, int64_t ldy) {
    for (int m = 0; m < p->M; m++)
        for (int n = 0; n < p->N; n++) {
            float acc = 0;
            for (int k = 0; k < p->K; k++)
                acc = bf16_step(acc, mp_bf16_from_f32(p->x[(int64_t)m * p->K + k]),
                                mp_bf16_from_f32(p->w[(int64_t)n * p->K + k]));
            if (p->K % 2)
                acc = bf16_step(acc, 0, 0);
            y[m * ldy + n] = acc;
        }
}

/* ---- model of bfdot ------------------------------------------------------------------------------------------------
 *
 * The two products of a pair, each exact or flushed to zero, are added, and their sum is added to the accumulator. Each
 * addition rounds to odd. */

static float add_to_odd(float a, float b) {
    const float s = a + b;
    if (!isfinite(a) || !isfinite(b))
        return s;
    if (isinf(s)) /* round to odd: a sum below 2^128 becomes the largest float */
        return fabs((double)a + (double)b) >= 0x1p128 ? s : copysignf(FLT_MAX, s);
    const float part = s - a, error = (a - (s - part)) + (b - part); /* exact */
    if (error == 0)
        return flush(s);
    const float cut = (error < 0) == (s < 0) ? s : nextafterf(s, 0.0f);
    uint32_t bits = kt_bits(cut) | 1;
    float odd;
    memcpy(&odd, &bits, sizeof odd);
    return flush(odd);
}

static float bf16_product(const float *x, const float *w, int k, int K) {
    if (k >= K)
        return 0.0f;
    return flush(flush(mp_bf16_to_f32(mp_bf16_from_f32(x[k]))) * flush(mp_bf16_to_f32(mp_bf16_from_f32(w[k]))));
}

static void gemm_bfdot_model(const problem *p, float *y, int64_t ldy) {
    for (int m = 0; m < p->M; m++)
        for (int n = 0; n < p->N; n++) {
            const float *x = p->x + (int64_t)m * p->K, *w = p->w + (int64_t)n * p->K;
            float acc = 0;
            for (int k = 0; k < p->K; k += 2)
                acc = add_to_odd(acc, add_to_odd(bf16_product(x, w, k, p->K), bf16_product(x, w, k + 1, p->K)));
            y[m * ldy + n] = acc;
        }
}

/* ---- model of an AMX tile product ----------------------------------------------------------------------------------
 *
 * The products of the odd slots of 32 inputs form one chain, those of the even slots another. Each chain rounds as
 * vdpbf16ps does. The sum of both chains is added to the accumulator. */

static void gemm_amx_model(const problem *p, float *y, int64_t ldy) {
    for (int m = 0; m < p->M; m++)
        for (int n = 0; n < p->N; n++) {
            const float *x = p->x + (int64_t)m * p->K, *w = p->w + (int64_t)n * p->K;
            float acc = 0;
            for (int k0 = 0; k0 < p->K; k0 += 32) {
                float sum[2] = {0, 0};
                for (int k = k0; k < k0 + 32; k++) {
                    const uint16_t a = k < p->K ? mp_bf16_from_f32(x[k]) : 0, b = k < p->K ? mp_bf16_from_f32(w[k]) : 0;
                    sum[k % 2] = bf16_step(sum[k % 2], a, b);
                }
                acc = flush(acc + flush(sum[0] + sum[1]));
            }
            y[m * ldy + n] = acc;
        }
}

/* Compute the expected result of a set for p, without an epilogue. y: out, [M, ldy]. */
static void expect(const kt_set *ref, const kt_set *set, const problem *p, float *y, int64_t ldy) {
    if (p->kind == MP_W_BF16 && strcmp(set->variant, "avx512bf16") == 0)
        gemm_bf16_model(p, y, ldy);
    else if (p->kind == MP_W_BF16 && strncmp(set->variant, "amx", 3) == 0)
        gemm_amx_model(p, y, ldy);
    else if (p->kind == MP_W_BF16 && strcmp(set->variant, "bf16") == 0)
        gemm_bfdot_model(p, y, ldy);
    else
        run(&ref->call, p, 0, p->M, 0, p->packed.panels, NULL, y, ldy);
}

/* ---- packing --------------------------------------------------------------------------------------------------- */

MP_TEST(kernels_dense_pack_in_parts_and_from_halves) {
    enum { N = 100, K = 520 };
    mp_test_random random = {2};
    kt_use("ref");
    for (int kind = 0; kind < DENSE_KINDS; kind++) {
        problem p = make(dense_kinds[kind], 1, N, K);
        kt_random(&random, p.w, N * K);
        uint16_t *half = kt_alloc(sizeof(uint16_t) * N * K);
        for (int i = 0; i < N * K; i++) { /* make both sources hold the same numbers */
            half[i] = mp_bf16_from_f32(p.w[i]);
            p.w[i] = mp_bf16_to_f32(half[i]);
        }
        prepare(&p);
        mp_wmat other = p.packed;
        other.data = kt_alloc(mp_wmat_bytes(&other));
        const mp_tensor src = {.dtype = MP_BF16,
                               .ndim = 2,
                               .shape = {N, K},
                               .data = (const uint8_t *)half,
                               .nbytes = sizeof(uint16_t) * N * K};
        mp_wmat_pack(&other, &src, 3, 4);
        mp_wmat_pack(&other, &src, 0, 1);
        mp_wmat_pack(&other, &src, 1, 3);
        const kt_set set = {.mask = "ref", .variant = "pack"};
        kt_same_bytes(&set, p.packed.data, other.data, mp_wmat_bytes(&other), "%s", dense_names[kind]);
        kt_free(other.data);
        kt_free(half);
        release(&p);
    }
}

/* ---- activations ----------------------------------------------------------------------------------------------- */

/* The reference equals the Hadamard matrix, whose sign at (i, j) is the parity of the bits set in both i and j. All
 * variants agree with the reference, also in place, and write nothing outside the output. */
MP_TEST(kernels_dense_hadamard) {
    enum { MAX_K = 420 };
    mp_test_random random = {6};
    const kt_set ref = kt_ref();
    MP_CHECK_INT(mp_hadamard_size(1), 1);
    MP_CHECK_INT(mp_hadamard_size(312), 8);
    MP_CHECK_INT(mp_hadamard_size(32), 32);
    MP_CHECK_INT(mp_hadamard_size(384), 64);
    MP_CHECK_INT(mp_hadamard_size(320), 64);
    MP_CHECK_INT(mp_hadamard_size(4096), 64);
    for (int K = 1; K <= MAX_K; K++)
        for (int size = 1; size <= mp_hadamard_size(K); size *= 2)
            for (int kind = -1; kind < KT_EXTREMES; kind++) {
                const char *name = kind < 0 ? "random" : kt_extreme_names[kind];
                float *x = kt_alloc(sizeof(float) * (size_t)K), *e = kt_alloc(sizeof(float) * (size_t)K);
                if (kind < 0)
                    kt_random(&random, x, K);
                else
                    kt_extreme(&random, (enum kt_extreme)kind, x, K);
                ref.call.hadamard(x, K, size, e);
                for (int k = 0; kind < 0 && k < K; k++) {
                    double sum = 0;
                    for (int j = 0; j < size; j++)
                        sum += __builtin_parity((unsigned)(k % size & j)) ? -x[k / size * size + j]
                                                                          : x[k / size * size + j];
                    MP_CHECK_NEAR(e[k], sum, 1e-4);
                }
                for (kt_set v = {0}; kt_next(&v, MP_SLOT_hadamard);) {
                    float *g = kt_alloc(sizeof(float) * (size_t)(K + 1));
                    g[K] = 1234.5f;
                    v.call.hadamard(x, K, size, g);
                    kt_same(&v, e, g, K, "hadamard K=%d size %d %s", K, size, name);
                    memcpy(g, x, sizeof(float) * (size_t)K);
                    v.call.hadamard(g, K, size, g);
                    kt_same(&v, e, g, K, "hadamard in place K=%d size %d %s", K, size, name);
                    MP_CHECK(g[K] == 1234.5f);
                    kt_free(g);
                }
                kt_free(x);
                kt_free(e);
            }
}

/* ---- gemm ------------------------------------------------------------------------------------------------------ */

static const float GUARD = 123456.75f;

/* Compare a set with the expected result in rows [m0, m1) and panels [p0, p1); guards around these must be intact. */
static void check(const kt_set *set, const problem *p, const float *expected, int64_t lde, int m0, int m1, int p0,
                  int p1, const char *what) {
    const int64_t ldy = p->N + 5;
    const int n0 = p0 * 32, n1 = p1 * 32 < p->N ? p1 * 32 : p->N;
    float *y = kt_alloc(sizeof(float) * (size_t)(p->M * ldy));
    for (int64_t i = 0; i < p->M * ldy; i++)
        y[i] = GUARD;
    run(&set->call, p, m0, m1, p0, p1, NULL, y, ldy);
    for (int m = 0; m < p->M; m++) {
        const bool inside = m0 <= m && m < m1;
        for (int n = 0; n < ldy; n++)
            if ((!inside || n < n0 || n >= n1) && kt_bits(y[m * ldy + n]) != kt_bits(GUARD))
                MP_FAIL("%s: %s M=%d N=%d K=%d rows %d-%d panels %d-%d wrote [%d, %d]", set->variant, what, p->M, p->N,
                        p->K, m0, m1, p0, p1, m, n);
        if (inside && n1 > n0)
            kt_same_matrix(set, expected + m * lde + n0, y + m * ldy + n0, 1, n1 - n0, n1 - n0,
                           "%s M=%d N=%d K=%d row %d of %d-%d, panels %d-%d", what, p->M, p->N, p->K, m, m0, m1, p0,
                           p1);
    }
    kt_free(y);
}

static void check_shape(const kt_set *ref, int kind, int M, int N, int K, int extreme, mp_test_random *random) {
    problem p = make(dense_kinds[kind], M, N, K);
    char what[64];
    snprintf(what, sizeof what, "gemm %s %s", dense_names[kind], extreme < 0 ? "random" : kt_extreme_names[extreme]);
    if (extreme < 0) {
        kt_random(random, p.w, (int64_t)N * K);
        kt_random(random, p.x, (int64_t)M * K);
    } else {
        kt_extreme(random, (enum kt_extreme)extreme, p.w, (int64_t)N * K);
        kt_extreme(random, (enum kt_extreme)extreme, p.x, (int64_t)M * K);
    }
    prepare(&p);
    float *expected = kt_alloc(sizeof(float) * (size_t)M * (size_t)N);
    for (kt_set v = {0}; kt_next(&v, dense_slots[kind]);) {
        expect(ref, &v, &p, expected, N);
        check(&v, &p, expected, N, 0, M, 0, p.packed.panels, what);
        if (M > 2)
            check(&v, &p, expected, N, 1, M - 1, 0, p.packed.panels, what);
        if (p.packed.panels > 1) {
            check(&v, &p, expected, N, 0, M, 1, p.packed.panels, what);
            check(&v, &p, expected, N, M / 2, M, 0, 1, what);
        }
    }
    kt_free(expected);
    release(&p);
}

static void check_kind(int kind) {
    mp_test_random random = {100 + (uint64_t)kind};
    const kt_set ref = kt_ref();
    for (int M = 1; M <= 40; M++) /* every tile height and every division of rows into tiles */
        check_shape(&ref, kind, M, M % 3 ? 77 : 160, 37 + M % 5, -1, &random);
    check_shape(&ref, kind, 517, 33, 19, -1, &random); /* more rows than one block */
    check_shape(&ref, kind, 1100, 70, 9, -1, &random);
    if (kind) /* with these K, AMX processes the inputs in chunks */
        check_shape(&ref, kind, 545, 40, kind == 1 ? 520 : 1030, -1, &random);
    if (kind) /* rows that AVX2 widens in short groups, or not at all */
        check_shape(&ref, kind, 9, 33, kind == 1 ? 10912 : 15000, -1, &random);
    const int Ns[] = {1, 15, 16, 17, 31, 32, 33, 64, 127, 129, 300};
    uint32_t asked = 0;
    for (size_t i = 0; i < sizeof Ns / sizeof *Ns; i++)
        for (int M = 1; M <= 14; M += M < 7 ? 1 : 7)
            if (mp_test_take(&asked))
                check_shape(&ref, kind, M, Ns[i], 70, -1, &random);
    const int Ks[] = {1, 2, 3, 4, 5, 7, 8, 63, 383, 384, 385, 388, 767, 768, 769, 1000, 1155};
    for (size_t i = 0; i < sizeof Ks / sizeof *Ks; i++)
        for (int M = 1; M <= 13; M += M < 3 ? 1 : 5)
            check_shape(&ref, kind, M, 40, Ks[i], -1, &random);
}

MP_TEST_SECONDS(kernels_dense_gemm_f32, 60) { check_kind(0); }
MP_TEST_SECONDS(kernels_dense_gemm_bf16, 60) { check_kind(1); }
MP_TEST_SECONDS(kernels_dense_gemm_i8, 60) { check_kind(2); }

/* At the limit of int8, all rotated weights and activations are +-127 and the row has the maximum length: sums are
 * exact. */
MP_TEST_SECONDS(kernels_dense_gemm_i8_is_exact_at_the_limit, 60) {
    enum { K = MP_I8_MAX_INPUTS, N = 33, M = 2 };
    const kt_set ref = kt_ref();
    problem p = make(MP_W_I8, M, N, K);
    for (int64_t i = 0; i < (int64_t)N * K; i++)
        p.w[i] = i % 64 ? 0.0f : i / K % 2 ? -127.0f * 64 : 127.0f * 64;
    for (int64_t i = 0; i < (int64_t)M * K; i++)
        p.x[i] = i % 64 ? 0.0f : i / K % 2 ? -127.0f : 127.0f;
    prepare(&p);
    float y[M * N];
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_gemm_i8);) {
        run(&v.call, &p, 0, M, 0, 2, NULL, y, N);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                MP_CHECK(y[m * N + n] == ((m + n) % 2 ? -1.0f : 1.0f) * 127.0f * 127.0f * K);
    }
    run(&ref.call, &p, 0, M, 0, 2, NULL, y, N);
    MP_CHECK(y[0] == 127.0f * 127.0f * K);
    release(&p);
}

/* Compare the reference, with which all variants are compared, with double precision. */
MP_TEST(kernels_dense_ref_in_double) {
    enum { M = 3, N = 35, K = 500 };
    mp_test_random random = {300};
    const kt_set ref = kt_ref();
    const double tolerance[DENSE_KINDS] = {2e-5, 0.15, 0.35};
    for (int kind = 0; kind < DENSE_KINDS; kind++) {
        problem p = make(dense_kinds[kind], M, N, K);
        kt_random(&random, p.w, N * K);
        kt_random(&random, p.x, M * K);
        prepare(&p);
        float y[M * N], row[K];
        run(&ref.call, &p, 0, M, 0, 2, NULL, y, N);
        for (int n = 0; n < N; n++) {
            mp_wmat_row(&p.packed, n, row);
            for (int m = 0; m < M; m++) {
                double sum = 0;
                for (int k = 0; k < K; k++)
                    sum += (double)p.x[m * K + k] * (double)row[k];
                MP_CHECK_NEAR(y[m * N + n], sum, tolerance[kind]);
            }
        }
        release(&p);
    }
}

/* A row's output in a batch equals its output alone, for every variant and split of the panels. */
MP_TEST(kernels_dense_batch_invariance) {
    enum { M = 97, N = 290, K = 1100 }; /* batches are processed in chunks and groups; a single row is not */
    mp_test_random random = {400};
    for (int kind = 0; kind < DENSE_KINDS; kind++) {
        problem p = make(dense_kinds[kind], M, N, K);
        kt_random(&random, p.w, N * K);
        kt_random(&random, p.x, M * K);
        prepare(&p);
        float *whole = kt_alloc(sizeof(float) * M * N), *alone = kt_alloc(sizeof(float) * N);
        for (kt_set v = {0}; kt_next(&v, dense_slots[kind]);) {
            mp_gemm(&p.packed, &p.acts, 0, M, 0, p.packed.panels, NULL, whole, N);
            mp_acts one;
            void *memory = kt_alloc(mp_acts_bytes(p.acts.kind, 1, K));
            for (int m = 0; m < M; m++) {
                mp_acts_init(&one, p.acts.kind, 1, K, memory);
                mp_acts_fill(&one, p.x + m * K, K, 0, 1);
                const int cut = 1 + m % (p.packed.panels - 1);
                mp_gemm(&p.packed, &one, 0, 1, cut, p.packed.panels, NULL, alone, N);
                mp_gemm(&p.packed, &one, 0, 1, 0, cut, NULL, alone, N);
                kt_same(&v, alone, whole + m * N, N, "%s row %d alone and among %d", dense_names[kind], m, M);
            }
            kt_free(memory);
        }
        kt_free(whole);
        kt_free(alone);
        release(&p);
    }
}

/* The epilogue applies bias, then act, then residual. The residual may be the output. Rows and outputs outside the
 * range are not written. */
MP_TEST(kernels_dense_epilogues) {
    mp_test_random random = {500};
    uint32_t asked = 0;
    const kt_set ref = kt_ref();
    /* the last shape: AMX stores partial sums between chunks of inputs, for groups of panels */
    const int shapes[][3] = {{1, 70, 33}, {4, 128, 50}, {13, 45, 400}, {30, 96, 64}, {97, 135, 520}};
    for (int kind = 0; kind < DENSE_KINDS; kind++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            const int M = shapes[s][0], N = shapes[s][1], K = shapes[s][2];
            const int64_t ldy = N + 3;
            problem p = make(dense_kinds[kind], M, N, K);
            kt_random(&random, p.w, (int64_t)N * K);
            kt_random(&random, p.x, (int64_t)M * K);
            prepare(&p);
            float *bias = kt_alloc(sizeof(float) * (size_t)N);
            float *residual = kt_alloc(sizeof(float) * (size_t)(M * ldy));
            float *product = kt_alloc(sizeof(float) * (size_t)(M * ldy));
            float *expected = kt_alloc(sizeof(float) * (size_t)(M * ldy));
            float *got = kt_alloc(sizeof(float) * (size_t)(M * ldy));
            kt_random(&random, bias, N);
            kt_random(&random, residual, M * ldy);
            for (kt_set v = {0}; kt_next(&v, dense_slots[kind]);) {
                expect(&ref, &v, &p, product, ldy);
                for (int use = 0; use < 16; use++) {
                    if (!mp_test_take(&asked))
                        continue;
                    const bool in_place = use & 8;
                    const mp_epilogue ep = {.bias = use & 1 ? bias : NULL,
                                            .act = use & 2 ? MP_ACT_GELU : MP_ACT_NONE,
                                            .residual = use & 4 ? (in_place ? got : residual) : NULL,
                                            .ld_residual = ldy};
                    memcpy(expected, product, sizeof(float) * (size_t)(M * ldy));
                    for (int m = 0; m < M; m++) {
                        float *e = expected + m * ldy;
                        for (int n = 0; use & 1 && n < N; n++)
                            e[n] += bias[n];
                        if (use & 2)
                            v.call.activate(MP_ACT_GELU, N, e);
                        for (int n = 0; use & 4 && n < N; n++)
                            e[n] += residual[m * ldy + n];
                    }
                    memcpy(got, residual, sizeof(float) * (size_t)(M * ldy));
                    run(&v.call, &p, 0, M, 0, p.packed.panels, &ep, got, ldy);
                    kt_same_matrix(&v, expected, got, M, N, ldy, "%s epilogue %d M=%d N=%d", dense_names[kind], use, M,
                                   N);
                    for (int m = 0; m < M; m++)
                        MP_CHECK(memcmp(got + m * ldy + N, residual + m * ldy + N, sizeof(float) * 3) == 0);
                }
            }
            kt_free(bias);
            kt_free(residual);
            kt_free(product);
            kt_free(expected);
            kt_free(got);
            release(&p);
        }
}

/* ---- dispatch -------------------------------------------------------------------------------------------------- */

MP_TEST(kernels_dense_dispatch) {
    kt_use("ref");
    MP_CHECK_INT(mp_kernels_count(), MP_SLOT_COUNT);
    for (int i = 0; i < mp_kernels_count(); i++)
        MP_CHECK_STR(mp_kernels_variant(i), "ref");
    MP_CHECK_STR(mp_kernels_slot(MP_SLOT_gemm_f32), "gemm_f32");
    MP_CHECK_STR(mp_kernels_slot(MP_SLOT_attn_merge), "attn_merge");
#if defined(__x86_64__)
    if (kt_use("avx2"))
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_f32), "avx2");
    if (kt_use("avxvnni")) {
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_bf16), "avx2");
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_i8), "avxvnni");
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_q4_k), "avxvnni");
    }
    if (kt_use("avx512")) {
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_bf16), "avx512");
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_i8), "avx2"); /* AVX-512 without VNNI has no int8 variant */
    }
    if (kt_use("avx512bf16"))
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_bf16), "avx512bf16");
    if (kt_use("amx")) {
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_bf16), "amx");
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_i8), "amx");
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_q4_k), "amx");
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_q5_k), "avx512vnni");
    }
#elif defined(__aarch64__)
    MP_CHECK(kt_use("neon"));
    for (int i = 0; i < mp_kernels_count(); i++) {
        const bool only_x86 = i == MP_SLOT_attn_full_bf16 || i == MP_SLOT_gemm_bf16_acts || i == MP_SLOT_squared_f32 ||
                              strncmp(mp_kernels_slot(i), "stored_", 7) == 0;
        MP_CHECK_STR(mp_kernels_variant(i), only_x86 ? "ref" : "neon");
    }
    MP_CHECK(!mp_stored_can(MP_Q4_K, MP_A_Q8, 1)); /* packing is faster than the slot's function of ref/ */
    if (kt_use("dotprod")) {
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_i8), "dotprod");
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_q4_k), "dotprod");
        /* this variant has the bits of ref; bf16 does not, and must be requested */
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_bf16), "neon");
    }
    if (kt_use("i8mm")) {
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_i8), "i8mm");
        for (int i = MP_SLOT_gemm_q4_0; i <= MP_SLOT_gemm_nvfp4; i++)
            MP_CHECK_STR(mp_kernels_variant(i), "i8mm");
    }
    if (kt_use("bf16"))
        MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_bf16), "bf16");
#endif
}
