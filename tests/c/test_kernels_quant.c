/* Quantised weights: packing and reading back, int8 activations, and every variant of every quantised gemm. */
#include "kernel_test.h"
#include "kernels/dequantize.h"
#include "kernels/pack.h"
#include "kernels/pack_dense.h"

/* ---- weights --------------------------------------------------------------------------------------------------- */

typedef struct stored {
    mp_dtype dtype;
    mp_wkind kind;
    int slot;
    int halves[2]; /* offsets of a block's two f16 numbers; -1 = absent */
} stored;

static const stored types[] = {
    {MP_Q4_0, MP_W_Q4_0, MP_SLOT_gemm_q4_0, {0, -1}},      {MP_Q4_1, MP_W_Q4_1, MP_SLOT_gemm_q4_1, {0, 2}},
    {MP_Q5_0, MP_W_Q5_0, MP_SLOT_gemm_q5_0, {0, -1}},      {MP_Q5_1, MP_W_Q5_1, MP_SLOT_gemm_q5_1, {0, 2}},
    {MP_Q8_0, MP_W_Q8_0, MP_SLOT_gemm_q8_0, {0, -1}},      {MP_Q4_K, MP_W_Q4_K, MP_SLOT_gemm_q4_k, {0, 2}},
    {MP_Q5_K, MP_W_Q5_K, MP_SLOT_gemm_q5_k, {0, 2}},       {MP_Q6_K, MP_W_Q6_K, MP_SLOT_gemm_q6_k, {208, -1}},
    {MP_Q2_K, MP_W_Q2_K, MP_SLOT_gemm_q2_k, {80, 82}},
    {MP_Q3_K, MP_W_Q3_K, MP_SLOT_gemm_q3_k, {108, -1}},
    {MP_MXFP4, MP_W_MXFP4, MP_SLOT_gemm_mxfp4, {-1, -1}},
    {MP_IQ4_NL, MP_W_IQ4_NL, MP_SLOT_gemm_iq4_nl, {0, -1}},
    {MP_IQ4_XS, MP_W_IQ4_XS, MP_SLOT_gemm_iq4_xs, {0, -1}},
    {MP_IQ3_S, MP_W_IQ3, MP_SLOT_gemm_iq3, {0, -1}},
    {MP_IQ3_XXS, MP_W_IQ3, MP_SLOT_gemm_iq3, {0, -1}},
    {MP_IQ2_S, MP_W_IQ2_XS, MP_SLOT_gemm_iq2_xs, {0, -1}},
    {MP_IQ2_XS, MP_W_IQ2_XS, MP_SLOT_gemm_iq2_xs, {0, -1}},
    {MP_IQ2_XXS, MP_W_IQ2_XXS, MP_SLOT_gemm_iq2_xxs, {0, -1}},
    {MP_IQ1_M, MP_W_IQ2_XS, MP_SLOT_gemm_iq2_xs, {-1, -1}},
    {MP_IQ1_S, MP_W_IQ2_XXS, MP_SLOT_gemm_iq2_xxs, {0, -1}},
    {MP_TQ1_0, MP_W_TQ, MP_SLOT_gemm_tq, {52, -1}},
    {MP_TQ2_0, MP_W_TQ, MP_SLOT_gemm_tq, {64, -1}},
    {MP_NVFP4, MP_W_NVFP4, MP_SLOT_gemm_nvfp4, {-1, -1}},
};
enum { TYPES = sizeof types / sizeof *types };

static const char *name_of(const stored *type) { return mp_dtype_get(type->dtype)->name; }
static int unit_of(const stored *type) { return mp_dtype_get(type->dtype)->items; }

enum fill { FILL_RANDOM, FILL_ZEROS, FILL_ONES, FILL_TOP, FILL_ALTERNATE, FILLS };
enum scales { SCALES_COMMON, SCALES_EXTREME, SCALE_KINDS };

/* Make a tensor [N, K] of random or extreme blocks. Free its data with kt_free. */
static mp_tensor make_weights(const stored *type, int N, int K, enum fill fill, enum scales scales, uint64_t seed) {
    static const uint16_t extremes[] = {0x0001, 0x03ff, 0x0400, 0x7bff, 0xfbff, 0x8001, 0x0000, 0x8000, 0x3c00};
    static const uint8_t fills[FILLS] = {0, 0x00, 0xff, 0x80, 0x0f};
    mp_test_random random = {seed};
    const mp_dtype_row *row = mp_dtype_get(type->dtype);
    const size_t blocks = (size_t)N * (size_t)(K / row->items), bytes = blocks * (size_t)row->bytes;
    uint8_t *data = kt_alloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = fill == FILL_RANDOM ? (uint8_t)mp_test_random_u64(&random) : fills[fill];
    for (size_t b = 0; b < blocks; b++) {
        uint8_t *block = data + b * (size_t)row->bytes;
        for (int h = 0; h < 2; h++) {
            const uint64_t u = mp_test_random_u64(&random);
            /* magnitude between 2^-7 and 2^-3, either sign */
            uint16_t half = (uint16_t)(0x2000 + u % 0x1000 + (u >> 40 & 1) * 0x8000);
            if (scales == SCALES_EXTREME)
                half = extremes[u % (sizeof extremes / sizeof *extremes)];
            if (type->halves[h] >= 0)
                memcpy(block + type->halves[h], &half, 2);
            for (int i = 0; type->dtype == MP_IQ1_M && i < 4; i++) /* one nibble of the scale per word */
                block[49 + 2 * i] = (uint8_t)((block[49 + 2 * i] & 15) | (half >> (4 * i) & 15) << 4);
        }
        for (int g = 0; type->dtype == MP_NVFP4 && scales == SCALES_COMMON && g < 4; g++)
            block[g] = (uint8_t)(8 + mp_test_random_u64(&random) % 32);
        if (type->dtype == MP_MXFP4)
            block[0] = (uint8_t)(scales == SCALES_EXTREME ? mp_test_random_u64(&random)
                                                          : 118 + mp_test_random_u64(&random) % 8);
    }
    return (mp_tensor){.dtype = type->dtype, .ndim = 2, .shape = {N, K}, .data = data, .nbytes = bytes};
}

static void drop_weights(mp_tensor *tensor) { kt_free((void *)(uintptr_t)tensor->data); }

/* Pack with `threads` simulated threads, each packing its own panels, the last thread first. Free data with kt_free. */
static mp_wmat pack_by(const stored *type, const mp_tensor *src, int threads) {
    mp_wmat w;
    mp_wmat_init(&w, type->kind, (int32_t)src->shape[0], (int32_t)src->shape[1]);
    w.data = kt_alloc(mp_wmat_bytes(&w));
    memset(w.data, 0xee, mp_wmat_bytes(&w));
    for (int thread = threads - 1; thread >= 0; thread--)
        mp_wmat_pack(&w, src, w.panels * thread / threads, w.panels * (thread + 1) / threads);
    return w;
}

MP_TEST(kernels_quant_kinds) {
    mp_wkind kind;
    for (int t = 0; t < TYPES; t++) {
        MP_CHECK(mp_wmat_kind_for(types[t].dtype, MP_COMPUTE_AUTO, &kind) && kind == types[t].kind);
        MP_CHECK(mp_wmat_kind_for(types[t].dtype, MP_COMPUTE_F32, &kind) && kind == MP_W_F32);
        MP_CHECK(mp_wmat_kind_for(types[t].dtype, MP_COMPUTE_BF16, &kind) && kind == MP_W_BF16);
        MP_CHECK(!mp_wmat_kind_for(types[t].dtype, MP_COMPUTE_I8, &kind));
        MP_CHECK_INT(mp_wmat_acts(types[t].kind), MP_A_Q8);
    }
    const mp_dtype floats[] = {MP_F32, MP_F16, MP_BF16};
    for (int i = 0; i < 3; i++) {
        const mp_wkind own = floats[i] == MP_BF16 && mp_cpu_has_bf16() ? MP_W_BF16 : MP_W_F32;
        MP_CHECK(mp_wmat_kind_for(floats[i], MP_COMPUTE_AUTO, &kind) && kind == own);
        MP_CHECK(mp_wmat_kind_for(floats[i], MP_COMPUTE_BF16, &kind) && kind == MP_W_BF16);
        MP_CHECK(mp_wmat_kind_for(floats[i], MP_COMPUTE_I8, &kind) && kind == MP_W_I8);
    }
    MP_CHECK(!mp_wmat_kind_for(MP_I32, MP_COMPUTE_AUTO, &kind) && !mp_wmat_kind_for(MP_F64, MP_COMPUTE_F32, &kind));
    MP_CHECK(mp_wmat_acts(MP_W_F32) == MP_A_F32 && mp_wmat_acts(MP_W_BF16) == MP_A_BF16 &&
             mp_wmat_acts(MP_W_I8) == MP_A_I8);
}

/* ---- activations ----------------------------------------------------------------------------------------------- */

typedef struct quantised {
    int8_t *q;
    float *scale;
    int32_t *sum;
} quantised;

static quantised quantise(const kt_set *set, const float *x, int K) {
    quantised a = {kt_alloc((size_t)K), kt_alloc((size_t)K / 32 * 4), kt_alloc((size_t)K / 16 * 4)};
    set->call.acts_q8(x, K, a.q, a.scale, a.sum);
    return a;
}

static void drop_quantised(quantised *a) { kt_free(a->q), kt_free(a->scale), kt_free(a->sum); }

MP_TEST(kernels_acts_q8_definition) {
    mp_test_random random = {12};
    kt_set ref = kt_ref();
    float x[32 * 6];
    kt_random(&random, x, 32 * 6);
    for (int k = 0; k < 32; k++) {
        x[32 + k] = 0.0f;
        x[64 + k] *= 1e-38f; /* 127 / max would overflow */
    }
    x[96 + 5] = INFINITY;
    x[128 + 31] = NAN;
    quantised a = quantise(&ref, x, 32 * 6);
    for (int b = 0; b < 6; b += 5) {
        int sum[2] = {0, 0}, top = 0;
        for (int k = 0; k < 32; k++) {
            const int q = a.q[b * 32 + k];
            MP_CHECK_NEAR((double)q * a.scale[b], x[b * 32 + k], (double)a.scale[b] * 0.50001);
            sum[k / 16] += q;
            top = abs(q) > top ? abs(q) : top;
        }
        MP_CHECK_INT(top, 127);
        MP_CHECK(a.sum[2 * b] == sum[0] && a.sum[2 * b + 1] == sum[1]);
    }
    MP_CHECK(a.scale[1] == 0.0f && a.scale[2] == 0.0f && isnan(a.scale[3]) && isnan(a.scale[4]));
    for (int k = 32; k < 160; k++)
        MP_CHECK_INT(a.q[k], 0);
    drop_quantised(&a);
}

/* ---- gemm ------------------------------------------------------------------------------------------------------ */

static mp_acts make_acts(const float *x, int M, int K) {
    mp_acts acts;
    void *memory = kt_alloc(mp_acts_bytes(MP_A_Q8, M, K));
    mp_acts_init(&acts, MP_A_Q8, M, K, memory);
    mp_acts_fill(&acts, x, K, 0, M);
    return acts;
}

static void drop_acts(mp_acts *acts) { kt_free(acts->q); }

/* Set the even and odd integers of a row and update its sums. */
static void set_row(mp_acts *acts, int m, int even, int odd) {
    for (int k = 0; k < acts->K; k++)
        acts->q[m * acts->ldq + k] = (int8_t)(k & 1 ? odd : even);
    for (int h = 0; h < acts->K / 16; h++) {
        acts->sum[m * (acts->K / 16) + h] = 0;
        for (int k = 0; k < 16; k++)
            acts->sum[m * (acts->K / 16) + h] += acts->q[m * acts->ldq + h * 16 + k];
    }
    for (int b = m * (acts->K / 32); b < (m + 1) * (acts->K / 32); b++)
        acts->low[b] = acts->scale[b] * (float)(acts->sum[2 * b] + acts->sum[2 * b + 1]);
}

static float *gemm_all(const mp_wmat *w, const mp_acts *acts, const mp_epilogue *ep, int64_t ldy) {
    float *y = kt_alloc((size_t)(acts->M * ldy) * 4);
    for (int64_t i = 0; i < acts->M * ldy; i++)
        y[i] = 12345.0f;
    mp_gemm(w, acts, 0, acts->M, 0, w->panels, ep, y, ldy);
    for (int m = 0; m < acts->M; m++)
        for (int64_t n = w->N; n < ldy; n++)
            MP_CHECK(y[m * ldy + n] == 12345.0f);
    return y;
}

/* Compare every variant with ref on one product. */
static void compare_gemm(const stored *type, const mp_wmat *w, const mp_acts *acts, const mp_epilogue *ep,
                         const char *what) {
    const int64_t ldy = w->N + 3;
    kt_set ref = kt_ref();
    float *expected = gemm_all(w, acts, ep, ldy);
    (void)ref;
    for (kt_set v = {0}; kt_next(&v, type->slot);) {
        float *got = gemm_all(w, acts, ep, ldy);
        kt_same_matrix(&v, expected, got, acts->M, w->N, ldy, "%s %s M=%d N=%d K=%d", name_of(type), what, acts->M,
                       w->N, w->K);
        kt_free(got);
    }
    kt_free(expected);
}

MP_TEST_SECONDS(kernels_quant_gemm_variants, 120) {
    /* K = 0 stands for one, two or three blocks of the type. A long K exceeds the blocks that a variant prepares at a
     * time. */
    static const int shapes[][3] = {{1, 70, 0},  {2, 1, 0},     {3, 64, 2304}, {4, 33, 0},    {5, 70, 0},  {6, 65, 0},
                                    {7, 64, 0},  {8, 33, 4352}, {9, 70, 0},    {11, 1, 0},    {16, 64, 0}, {23, 33, 0},
                                    {40, 70, 0}, {1, 5, 33024}, {4, 40, 8448}, {100, 33, 512}};
    mp_test_random random = {21};
    for (int t = 0; t < TYPES; t++)
        for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
            const int M = shapes[i][0], N = shapes[i][1];
            const int K = shapes[i][2] ? shapes[i][2] : unit_of(&types[t]) * (i % 3 + 1);
            mp_tensor src = make_weights(&types[t], N, K, FILL_RANDOM, SCALES_COMMON, (uint64_t)(t * 50 + i));
            mp_wmat w = pack_by(&types[t], &src, 1);
            float *x = kt_alloc((size_t)(M * K) * 4);
            kt_random(&random, x, M * K);
            kt_use("");
            mp_acts acts = make_acts(x, M, K);
            compare_gemm(&types[t], &w, &acts, NULL, "random");
            kt_free(x), kt_free(w.data);
            drop_acts(&acts), drop_weights(&src);
        }
}

/* Variants for many rows. Rows do not fill a tile or a pass, K does not fill a group of blocks, and calls cover parts
 * of rows and panels. Also the largest integers, non-finite activations, and every epilogue. */
MP_TEST_SECONDS(kernels_quant_gemm_many_rows, 120) {
    static const int shapes[][4] = {{24, 70, 1, 32}, {33, 33, 3, 32}, {47, 64, 17, 32}, {200, 40, 2, 32},
                                    {421, 1, 1, 32}, {37, 65, 3, 256}, {64, 32, 9, 256}, {100, 5, 60, 256}};
    mp_test_random random = {28};
    uint32_t asked = 0;
    for (int t = 0; t < TYPES; t++)
        for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
            if (shapes[i][3] < unit_of(&types[t]))
                continue;
            const int M = shapes[i][0], N = shapes[i][1], K = shapes[i][2] * shapes[i][3];
            mp_tensor src = make_weights(&types[t], N, K, FILL_RANDOM, SCALES_COMMON, (uint64_t)(t * 50 + i));
            mp_wmat w = pack_by(&types[t], &src, 1);
            float *x = kt_alloc((size_t)(M * K) * 4), *bias = kt_alloc((size_t)N * 4);
            float *residual = kt_alloc((size_t)(M * N) * 4), *whole = kt_alloc((size_t)(M * N) * 4);
            float *parts = kt_alloc((size_t)(M * N) * 4);
            kt_random(&random, x, M * K), kt_random(&random, bias, N), kt_random(&random, residual, M * N);
            if (i % 2)
                x[M * K / 2] = NAN;
            kt_use("");
            mp_acts acts = make_acts(x, M, K);
            set_row(&acts, 0, 127, 127), set_row(&acts, M - 1, -127, 127);
            compare_gemm(&types[t], &w, &acts, NULL, "many rows");
            for (int act = 0; act < 3; act++) {
                if (!mp_test_take(&asked))
                    continue;
                mp_epilogue ep = {.bias = bias, .act = act == 2 ? MP_ACT_SILU : MP_ACT_NONE,
                                  .residual = act ? residual : NULL, .ld_residual = N};
                compare_gemm(&types[t], &w, &acts, &ep, "many rows with an epilogue");
                kt_ref();
                memcpy(whole, residual, (size_t)(M * N) * 4);
                ep.residual = whole;
                mp_gemm(&w, &acts, 0, M, 0, w.panels, &ep, whole, N);
                for (kt_set v = {0}; kt_next(&v, types[t].slot);) { /* the residual is y; rows and panels in parts */
                    memcpy(parts, residual, (size_t)(M * N) * 4);
                    ep.residual = parts;
                    for (int p = 0; p < w.panels; p++)
                        for (int m = 0, end; m < M; m = end) {
                            end = M - m < 70 ? M : m + 35;
                            mp_gemm(&w, &acts, m, end, p, p + 1, &ep, parts, N);
                        }
                    kt_same_matrix(&v, whole, parts, M, N, N, "%s in place, in parts", name_of(&types[t]));
                }
            }
            kt_free(x), kt_free(bias), kt_free(residual), kt_free(whole), kt_free(parts), kt_free(w.data);
            drop_acts(&acts), drop_weights(&src);
        }
}

/* The outputs of a row depend neither on the other rows of its batch nor on the distribution of panels. */
MP_TEST_SECONDS(kernels_quant_gemm_batch_invariance, 60) {
    mp_test_random random = {23};
    for (int t = 0; t < TYPES; t++) {
        const int M = 13, N = 100, K = 512;
        mp_tensor src = make_weights(&types[t], N, K, FILL_RANDOM, SCALES_COMMON, 6);
        mp_wmat w = pack_by(&types[t], &src, 1);
        float *x = kt_alloc((size_t)(M * K) * 4), *got = kt_alloc((size_t)(M * N) * 4);
        kt_random(&random, x, M * K);
        for (kt_set v = kt_ref();;) {
            mp_acts acts = make_acts(x, M, K);
            float *whole = gemm_all(&w, &acts, NULL, N);
            for (int m = 0; m < M;) { /* varying numbers of rows; panels one by one, the last first */
                const int rows = m + 1 < M - m ? (m + 1) % 5 + 1 : M - m, end = m + rows < M ? m + rows : M;
                for (int p = w.panels - 1; p >= 0; p--)
                    mp_gemm(&w, &acts, m, end, p, p + 1, NULL, got, N);
                m = end;
            }
            kt_same_matrix(&v, whole, got, M, N, N, "%s in parts", name_of(&types[t]));
            kt_free(whole);
            drop_acts(&acts);
            /* row 7, quantised alone */
            mp_acts alone = make_acts(x + 7 * K, 1, K);
            float *one = gemm_all(&w, &alone, NULL, N);
            kt_same(&v, got + 7 * N, one, N, "%s row 7 alone", name_of(&types[t]));
            kt_free(one);
            drop_acts(&alone);
            if (!kt_next(&v, types[t].slot))
                break;
        }
        kt_free(x), kt_free(got), kt_free(w.data);
        drop_weights(&src);
    }
}

/* Output (m, n) by the formulas of kernels.h, from the stored block and not from a panel. */
static float product_of(const mp_tensor *src, const mp_acts *acts, int m, int n) {
    const mp_dtype_row *row = mp_dtype_get(src->dtype);
    const int8_t *table = mp_stored_table(src->dtype), *q = acts->q + m * acts->ldq;
    const int32_t *sum16 = acts->sum + m * (acts->K / 16);
    bool mins;
    const int group = mp_stored_block_group(src->dtype, &mins);
    mp_stored_block block;
    float f = 0;
    for (int k = 0; k < acts->K; k += group) {
        const int at = k % row->items, g = at / group;
        const float sa = acts->scale[m * (acts->K / 32) + k / 32];
        int32_t dot = 0;
        if (at == 0)
            mp_stored_block_read(src->dtype, mp_tensor_row(src, n) + k / row->items * row->bytes, &block);
        for (int i = 0; i < group; i++)
            dot += (table ? table[block.q[at + i]] : block.q[at + i]) * q[k + i];
        f = fmaf((float)dot, block.scale[g] * sa, f);
        if (mins)
            f = fmaf(block.min[g], sa * (float)(sum16[k / 16] + (group == 32 ? sum16[k / 16 + 1] : 0)), f);
    }
    return f;
}

/* Every variant, and ref, give the bits of the formulas on the stored blocks: packing loses nothing, whatever the
 * scales. Rows beyond those of a tile, and outputs beyond those of a panel. */
MP_TEST_SECONDS(kernels_quant_gemm_by_definition, 60) {
    mp_test_random random = {27};
    for (int t = 0; t < TYPES; t++)
        for (int scales = 0; scales < SCALE_KINDS; scales++) {
            const int M = 11, N = 39, K = 512;
            mp_tensor src = make_weights(&types[t], N, K, FILL_RANDOM, (enum scales)scales, (uint64_t)(t + 70));
            mp_wmat w = pack_by(&types[t], &src, 1);
            float *x = kt_alloc((size_t)(M * K) * 4), *expected = kt_alloc((size_t)(M * N) * 4);
            kt_extreme(&random, KT_WIDE, x, M * K);
            kt_use("");
            mp_acts acts = make_acts(x, M, K);
            set_row(&acts, 0, 127, 127), set_row(&acts, 1, 127, -127);
            for (int i = 0; i < M * N; i++)
                expected[i] = product_of(&src, &acts, i / N, i % N);
            kt_set v = kt_ref();
            do {
                float *got = gemm_all(&w, &acts, NULL, N);
                kt_same_matrix(&v, expected, got, M, N, N, "%s by definition", name_of(&types[t]));
                kt_free(got);
            } while (kt_next(&v, types[t].slot));
            kt_free(x), kt_free(expected), kt_free(w.data);
            drop_acts(&acts), drop_weights(&src);
        }
}

/* Compare gemm with products of dequantised weights in float64. With the quantised activations, only rounding differs.
 * With the original activations, the error is at most half a quantisation step of each activation. */
MP_TEST_SECONDS(kernels_quant_gemm_against_float64, 60) {
    mp_test_random random = {24};
    for (int t = 0; t < TYPES; t++) {
        const int M = 5, N = 37, K = 1024;
        mp_tensor src = make_weights(&types[t], N, K, FILL_RANDOM, SCALES_COMMON, 8);
        mp_wmat w = pack_by(&types[t], &src, 1);
        float *x = kt_alloc((size_t)(M * K) * 4), *row = kt_alloc((size_t)K * 4);
        kt_random(&random, x, M * K);
        kt_use("");
        mp_acts acts = make_acts(x, M, K);
        float *y = gemm_all(&w, &acts, NULL, N);
        for (int n = 0; n < N; n++) {
            mp_dequantize_row(src.dtype, mp_tensor_row(&src, n), K, row);
            for (int m = 0; m < M; m++) {
                double quantised = 0, real = 0, size = 0, step = 0;
                for (int k = 0; k < K; k++) {
                    const double sa = acts.scale[m * (K / 32) + k / 32], a = acts.q[m * acts.ldq + k] * sa;
                    quantised += row[k] * a;
                    real += (double)row[k] * x[m * K + k];
                    size += fabs(row[k] * a);
                    step += fabs((double)row[k]) * sa * 0.5;
                }
                /* in 4-bit types d and min largely cancel, so the tolerance follows their sizes: 16 x 2^-24 x 64 */
                MP_CHECK_NEAR(y[m * N + n], quantised, size * 6e-5);
                MP_CHECK_NEAR(y[m * N + n], real, step * 1.0001 + size * 6e-5);
                MP_CHECK(size > 1e-3);
            }
        }
        kt_free(x), kt_free(row), kt_free(y), kt_free(w.data);
        drop_acts(&acts), drop_weights(&src);
    }
}

/* The epilogue adds the bias, applies the activation and adds the residual, here y itself. No row of a tile is added
 * twice. */
MP_TEST_SECONDS(kernels_quant_gemm_epilogue, 60) {
    mp_test_random random = {25};
    for (int round = 0; round < 4 * TYPES; round++) {
        const int t = round / 4, M = round % 2 ? 41 : 7, N = 75, K = 512;
        const mp_act act = round % 4 < 2 ? MP_ACT_NONE : MP_ACT_GELU;
        mp_tensor src = make_weights(&types[t], N, K, FILL_RANDOM, SCALES_COMMON, 9);
        mp_wmat w = pack_by(&types[t], &src, 1);
        float *x = kt_alloc((size_t)(M * K) * 4), *bias = kt_alloc((size_t)N * 4);
        float *residual = kt_alloc((size_t)(M * N) * 4), *y = kt_alloc((size_t)(M * N) * 4);
        float *expected = kt_alloc((size_t)(M * N) * 4);
        kt_random(&random, x, M * K), kt_random(&random, bias, N), kt_random(&random, residual, M * N);
        for (kt_set v = kt_ref();;) {
            mp_acts acts = make_acts(x, M, K);
            float *plain = gemm_all(&w, &acts, NULL, N);
            for (int i = 0; i < M * N; i++)
                expected[i] = plain[i] + bias[i % N];
            if (act != MP_ACT_NONE)
                v.call.activate(act, M * N, expected);
            for (int i = 0; i < M * N; i++)
                expected[i] += residual[i];
            memcpy(y, residual, (size_t)(M * N) * 4);
            mp_epilogue ep = {.bias = bias, .act = act, .residual = y, .ld_residual = N};
            mp_gemm(&w, &acts, 0, M, 0, w.panels, &ep, y, N);
            kt_same_matrix(&v, expected, y, M, N, N, "%s with an epilogue, activation %d", name_of(&types[t]),
                           (int)act);
            kt_free(plain);
            drop_acts(&acts);
            if (!kt_next(&v, types[t].slot))
                break;
        }
        kt_free(x), kt_free(bias), kt_free(residual), kt_free(y), kt_free(expected), kt_free(w.data);
        drop_weights(&src);
    }
}

/* ---- rows as stored -------------------------------------------------------------------------------------------- */

/* The product of a slot stored_* of a set. */
static mp_stored_product *stored_slot(const kt_set *set, mp_dtype dtype, int *slot) {
    switch (dtype) {
#define CASE(type, name) case type: *slot = MP_SLOT_##name; return set->call.name
        CASE(MP_Q4_0, stored_q4_0);
        CASE(MP_Q8_0, stored_q8_0);
        CASE(MP_Q4_K, stored_q4_k);
        CASE(MP_Q5_K, stored_q5_k);
        CASE(MP_Q6_K, stored_q6_k);
        CASE(MP_MXFP4, stored_mxfp4);
#undef CASE
    default: return NULL;
    }
}

/* Multiply all rows of src by every row of acts, `count` rows at a time, with guard bytes around each part. */
static void multiply_stored(mp_stored_product *product, const mp_tensor *src, const mp_acts *acts, int count,
                            float *y) {
    const int N = (int)src->shape[0];
    const size_t stride = src->nbytes / (uint64_t)N;
    for (int m = 0; m < acts->M; m++)
        for (int n = 0; n < N; n += count) {
            const int rows = N - n < count ? N - n : count;
            float *part = kt_alloc((size_t)rows * 4);
            product(src->data + (size_t)n * stride, stride, rows, acts, m, part);
            memcpy(y + m * N + n, part, (size_t)rows * 4);
            kt_free(part);
        }
}

/* Every variant gives the bits of mp_gemm with packed rows, for any number of rows at a time. */
static void compare_stored(const stored *type, const mp_tensor *src, const mp_acts *acts, const char *what) {
    const int N = (int)src->shape[0], counts[] = {32, 1, 7, 8, 11};
    int slot = 0;
    kt_set set = kt_ref();
    mp_wmat w = pack_by(type, src, 1);
    float *expected = gemm_all(&w, acts, NULL, N), *got = kt_alloc((size_t)(acts->M * N) * 4);
    stored_slot(&set, type->dtype, &slot);
    do {
        for (int i = 0; i < (int)(sizeof counts / sizeof *counts); i++) {
            multiply_stored(stored_slot(&set, type->dtype, &slot), src, acts, counts[i], got);
            kt_same_matrix(&set, expected, got, acts->M, N, N, "stored %s %s, %d rows at a time, K=%d", name_of(type),
                           what, counts[i], w.K);
        }
    } while (kt_next(&set, slot));
    kt_free(expected), kt_free(got), kt_free(w.data);
}

MP_TEST(kernels_stored_variants) {
    mp_test_random random = {26};
    for (int t = 0; t < TYPES; t++) {
        kt_set set = kt_ref();
        int slot = 0;
        if (!stored_slot(&set, types[t].dtype, &slot))
            continue;
        for (int i = 0; i < 4; i++) {
            const int M = 2, N = 45 - i, K = unit_of(&types[t]) * (2 * i + 1);
            mp_tensor src = make_weights(&types[t], N, K, FILL_RANDOM, i % 2 ? SCALES_EXTREME : SCALES_COMMON,
                                         (uint64_t)(t * 10 + i));
            float *x = kt_alloc((size_t)(M * K) * 4);
            kt_random(&random, x, M * K);
            kt_use("");
            mp_acts acts = make_acts(x, M, K);
            compare_stored(&types[t], &src, &acts, "random");
            kt_free(x);
            drop_acts(&acts), drop_weights(&src);
        }
    }
}

/* The largest integers of either sign, all weight patterns and extreme activations. */
MP_TEST(kernels_stored_extremes) {
    const int patterns[5][2] = {{127, 127}, {-127, -127}, {127, -127}, {-127, 127}, {0, 127}};
    mp_test_random random = {27};
    for (int t = 0; t < TYPES; t++) {
        kt_set set = kt_ref();
        int slot = 0;
        if (!stored_slot(&set, types[t].dtype, &slot))
            continue;
        for (int fill = 0; fill < FILLS; fill++)
            for (int e = 0; e < KT_EXTREMES; e++) {
                const int M = 7, N = 9, K = unit_of(&types[t]) * 2;
                mp_tensor src = make_weights(&types[t], N, K, (enum fill)fill,
                                             e % 2 ? SCALES_EXTREME : SCALES_COMMON, 5);
                float *x = kt_alloc((size_t)(M * K) * 4);
                kt_extreme(&random, (enum kt_extreme)e, x, M * K);
                kt_use("");
                mp_acts acts = make_acts(x, M, K);
                for (int m = 0; m < 5; m++)
                    set_row(&acts, m, patterns[m][0], patterns[m][1]);
                const uint32_t control = e % 2 ? mp_cpu_flush_denormals() : 0;
                compare_stored(&types[t], &src, &acts, kt_extreme_names[e]);
                if (e % 2)
                    mp_cpu_restore_float(control);
                kt_free(x);
                drop_acts(&acts), drop_weights(&src);
            }
    }
}
