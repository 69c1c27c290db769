/* test_kernels_partition.c: how products are cut into passes, tiles and chunks. No cut changes a bit, so the tests
 * replace functions of the kernel table by functions that note the size of each call. */
#include "kernel_test.h"
#include "kernels/blas.h"
#include "kernels/pack_dense.h"
#include "zero_product.h"

enum { MAX_CALLS = 4096 };
static int calls, sizes[MAX_CALLS]; /* noted calls */
static mp_kernels original;

static void note(int64_t size) {
    if (calls < MAX_CALLS)
        sizes[calls] = (int)size;
    calls++;
}

static void note_activate(mp_act act, int64_t n, float *x) {
    note(n);
    original.activate(act, n, x);
}

/* The table in use, whose functions a test may replace until the next kt_use. */
static mp_kernels *replaceable(void) {
    original = *mp_kernels_get();
    calls = 0;
    return (mp_kernels *)mp_kernels_get();
}

/* Fail unless exactly the given sizes were noted. */
static void check_calls(const int *want, int count, const char *what, const char *variant, int rows) {
    for (int i = 0; i < count && i < calls; i++)
        if (sizes[i] != want[i])
            MP_FAIL("%s of %s, %d rows: call %d has the size %d, not %d", what, variant, rows, i, sizes[i], want[i]);
    if (calls != count)
        MP_FAIL("%s of %s, %d rows: %d calls, not %d", what, variant, rows, calls, count);
}

/* Multiply with an activation function, and note its calls: each has the outputs of one tile. */
static void multiply(const product *p) {
    const mp_epilogue ep = {.act = MP_ACT_RELU};
    replaceable()->activate = note_activate;
    mp_gemm(&p->w, &p->x, 0, p->x.M, 0, p->w.panels, &ep, p->y, p->w.N);
}

/* ---- quantised weights ---- */

/* Heights of tiles of the variants of quant_tmpl.h. A product of at most `few` rows is one tile. */
static const struct { const char *variant; int few, tall; } heights[] = {
    {"avx2", 4, 4}, {"avxvnni", 8, 4}, {"avxvnni model", 8, 4}, {"avx512vnni", 8, 6},
};

/* Passes over the panels have as many rows as fill 393,216 bytes, at least eight tiles, and are cut into tiles of
 * nearly equal height. A tile is multiplied with as many panels as fill 262,144 bytes, at least one, before the next
 * tile. */
static int quant_tiles(int few, int tall, int M, int K, int panels, size_t panel_bytes, int *want) {
    int count = 0, pass = 393216 / K / tall * tall;
    const int fit = (int)(262144 / panel_bytes), group = fit < 1 ? 1 : fit;
    pass = pass < 8 * tall ? 8 * tall : pass;
    for (int begin = 0; begin < M; begin += pass)
        for (int p = 0; p < panels; p += group) {
            int left = M - begin < pass ? M - begin : pass;
            for (int R; left > 0; left -= R) {
                const int tiles = (left + tall - 1) / tall;
                R = M <= few ? left : (left + tiles - 1) / tiles;
                for (int at = p; at < panels && at < p + group; at++)
                    want[count++] = R * MP_PANEL_N;
            }
        }
    return count;
}

MP_TEST(kernels_partition_of_quantised_products) {
    static const struct { int M, K, panels; } cases[] = {
        {1, 64, 2},    {4, 64, 2},     {5, 64, 2},     {8, 64, 2},     {9, 64, 2},     {13, 64, 2},  {33, 64, 2},
        {97, 4096, 2}, {100, 4096, 3}, {50, 12288, 2}, {49, 12256, 2}, {33, 13000 / 32 * 32, 3},     {200, 2048, 2},
        {13, 2048, 7}, {13, 2048, 5},
    };
    static int want[MAX_CALLS];
    int variants = 0;
    for (kt_set v = {0}; kt_next(&v, MP_SLOT_gemm_q5_0);) /* a slot that AMX has not */
        for (size_t h = 0; h < sizeof heights / sizeof *heights; h++) {
            if (strcmp(v.variant, heights[h].variant) != 0)
                continue;
            variants++;
            for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
                product p = product_of(MP_W_Q5_0, cases[i].M, cases[i].panels * MP_PANEL_N, cases[i].K);
                multiply(&p);
                kt_use(v.mask);
                check_calls(want, quant_tiles(heights[h].few, heights[h].tall, cases[i].M, cases[i].K, cases[i].panels,
                                              p.w.panel_bytes, want), "Q5_0", v.variant, cases[i].M);
                drop(&p);
            }
        }
#if defined(__x86_64__)
    MP_CHECK(variants > 0 || !(mp_cpu_features() & MP_CPU_AVX2));
#endif
}

/* On AMX, passes have nearly equal height: at most 192 rows, as many as fill 393,216 bytes or 49,152 units. They are
 * cut into jobs of 16 rows, of which the last finishes the rest. Fewer than 24 rows use the variant below. */
static int amx_jobs(mp_wkind kind, int M, int K, int panels, int *want) {
    const bool halved = kind == MP_W_Q6_K || kind == MP_W_Q2_K || kind == MP_W_Q3_K || kind == MP_W_IQ2_XS;
    const int units = (K / (halved ? 16 : 32) + 15) / 16 * 16, near = 393216 / K < 64 ? 64 : 393216 / K;
    int count = 0, most = 49152 / units < near ? 49152 / units : near;
    most = (most < 192 ? most : 192) / 16 * 16;
    for (int left = (M + most - 1) / most, r0 = 0, r1; left > 0; left--, r0 = r1) {
        r1 = left == 1 ? M : r0 + ((M - r0 + left - 1) / left + 15) / 16 * 16;
        for (int p = 0; p < panels; p++)
            for (int r = r0; r < r1; r += 16)
                want[count++] = (r1 - r < 16 ? r1 - r : 16) * MP_PANEL_N;
    }
    return count;
}

MP_TEST(kernels_partition_of_quantised_products_on_amx) {
    static const struct { mp_wkind kind; int M, K; } cases[] = {
        {MP_W_Q4_0, 24, 32},    {MP_W_Q4_0, 33, 64},    {MP_W_Q8_0, 192, 64},   {MP_W_Q8_0, 190, 64},
        {MP_W_Q4_1, 97, 4096},  {MP_W_Q4_K, 100, 4096}, {MP_W_MXFP4, 70, 6144}, {MP_W_MXFP4, 65, 8192},
        {MP_W_Q6_K, 100, 8192}, {MP_W_Q6_K, 60, 16384}, {MP_W_Q4_0, 25, 12288}, {MP_W_Q8_0, 50, 32768},
        {MP_W_Q6_K, 26, 24576}, {MP_W_Q4_0, 95, 4096},  {MP_W_Q8_0, 193, 64},   {MP_W_Q2_K, 60, 16384},
        {MP_W_Q3_K, 60, 16384}, {MP_W_TQ, 60, 16384},   {MP_W_IQ2_XXS, 60, 16384}, {MP_W_IQ2_XS, 60, 16384},
        {MP_W_IQ3, 60, 16384},
    };
    static const char *const masks[] = {"amx", "amx model"};
    static int want[MAX_CALLS];
    for (int m = 0; m < 2; m++) {
        if (!kt_use(masks[m]) || strstr(mp_kernels_variant(MP_SLOT_gemm_q4_0), "amx") == NULL)
            continue;
        const char *below = mp_kernels_variant(MP_SLOT_gemm_q5_0);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            product p = product_of(cases[i].kind, cases[i].M, 64, cases[i].K);
            multiply(&p);
            kt_use(masks[m]);
            check_calls(want, amx_jobs(cases[i].kind, cases[i].M, cases[i].K, 2, want), "a quantised product",
                        masks[m], cases[i].M);
            drop(&p);
        }
        for (size_t h = 0; h < sizeof heights / sizeof *heights; h++) {
            if (strcmp(below, heights[h].variant) != 0)
                continue;
            static const int few[][2] = {{23, 64}, {23, 4096}, {40, 65536}}; /* the last: a pass has 16 rows */
            for (int i = 0; i < 3; i++) {
                product p = product_of(MP_W_Q4_0, few[i][0], 32, few[i][1]);
                multiply(&p);
                kt_use(masks[m]);
                check_calls(want, quant_tiles(heights[h].few, heights[h].tall, few[i][0], few[i][1], 1,
                                              p.w.panel_bytes, want), "Q4_0", masks[m], few[i][0]);
                drop(&p);
            }
        }
    }
    kt_use("");
}

/* ---- dense weights ---- */

/* Properties of the variants of dense_gemm.h: the tallest tile, the tallest that spans two panels, the columns of a
 * panel that a tile has, and the tiles of a group of rows (0: the rows are not divided into groups). */
static const struct { int slot; mp_wkind kind; const char *variant; int tall, wide, columns, group; } shapes[] = {
    {MP_SLOT_gemm_f32, MP_W_F32, "avx2", 6, 0, 16, 0},        {MP_SLOT_gemm_f32, MP_W_F32, "avx512", 12, 3, 32, 0},
    {MP_SLOT_gemm_bf16, MP_W_BF16, "avx2", 4, 0, 16, 0},      {MP_SLOT_gemm_bf16, MP_W_BF16, "avx512", 12, 4, 32, 0},
    {MP_SLOT_gemm_bf16, MP_W_BF16, "avx512bf16", 12, 6, 32, 0}, {MP_SLOT_gemm_i8, MP_W_I8, "avx2", 6, 0, 16, 4},
    {MP_SLOT_gemm_i8, MP_W_I8, "avxvnni", 6, 0, 16, 0},       {MP_SLOT_gemm_i8, MP_W_I8, "avx512vnni", 12, 0, 32, 0},
};

/* Sets first[i] to the first row of block i, and first[count] to M. Returns the count. */
static int blocks_of(int M, int tall, int group, int *first) {
    const int tiles = (M + tall - 1) / tall, count = group ? (tiles + group - 1) / group : (M + 515) / 516;
    for (int b = 0; b < count; b++)
        first[b] = group ? M * group * b / tiles : M * b / count;
    first[count] = M;
    return count;
}

/* Blocks of at most 516 rows, or of a group of tiles, and their tiles have nearly equal height. */
MP_TEST(kernels_partition_of_dense_products) {
    enum { PANELS = 3 };
    static const int rows[] = {1, 2, 3, 4, 5, 6, 7, 12, 13, 25, 516, 517, 1033};
    static int want[MAX_CALLS];
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (kt_set v = {0}; kt_next(&v, shapes[s].slot);) {
            if (strcmp(v.variant, shapes[s].variant) != 0)
                continue;
            for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
                const int M = rows[i], halves = MP_PANEL_N / shapes[s].columns;
                int count = 0, firsts[MAX_CALLS];
                const int blocks = blocks_of(M, shapes[s].tall, shapes[s].group, firsts);
                product p = product_of(shapes[s].kind, M, MP_PANEL_N * PANELS, 4);
                multiply(&p);
                kt_use(v.mask);
                for (int b = 0; b < blocks; b++) {
                    const int height = firsts[b + 1] - firsts[b];
                    const int tiles = (height + shapes[s].tall - 1) / shapes[s].tall;
                    const int wide = height <= shapes[s].wide ? 2 : 1;
                    for (int panel = 0, P; panel < PANELS; panel += P) {
                        P = PANELS - panel >= wide ? wide : 1;
                        for (int half = 0; half < halves; half++)
                            for (int t = 0; t < tiles; t++)
                                want[count++] = (height * (t + 1) / tiles - height * t / tiles) * P * shapes[s].columns;
                    }
                }
                check_calls(want, count, mp_kernels_slot(shapes[s].slot), v.variant, M);
                drop(&p);
            }
        }
}

/* On AMX, the rows of a block are finished in equal parts during the steps of the next block, and those of the last
 * block at the end. */
MP_TEST(kernels_partition_of_epilogues_on_amx) {
    static const struct { int M, steps, count, heights[16]; } cases[] = {
        {1, 3, 1, {1}},
        {32, 3, 1, {32}},
        {33, 3, 4, {11, 11, 10, 1}},
        {63, 3, 4, {11, 11, 10, 31}},
        {64, 4, 5, {8, 8, 8, 8, 32}},
        {96, 3, 7, {11, 11, 10, 11, 11, 10, 32}},
        {97, 3, 10, {11, 11, 10, 11, 11, 10, 11, 11, 10, 1}},
    };
    static const char *const masks[] = {"amx", "amx model"};
    for (int m = 0; m < 2; m++)
        for (int kind = 0; kind < 2; kind++)
            for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
                int want[16];
                if (!kt_use(masks[m]) || strstr(mp_kernels_variant(MP_SLOT_gemm_i8), "amx") == NULL)
                    continue;
                for (int j = 0; j < cases[i].count; j++)
                    want[j] = cases[i].heights[j] * MP_PANEL_N;
                product p = product_of(kind ? MP_W_I8 : MP_W_BF16, cases[i].M, MP_PANEL_N,
                                       (kind ? 64 : 32) * cases[i].steps - 6);
                multiply(&p);
                check_calls(want, cases[i].count, kind ? "I8" : "BF16", masks[m], cases[i].M);
                drop(&p);
            }
    kt_use("");
}

/* More than 512 rows are cut into passes of nearly equal height, whose rows stay in cache while all panels pass. The
 * second pass has one row less than a multiple of 32, which shows where it ends in each panel. */
MP_TEST(kernels_partition_of_passes_on_amx) {
    enum { PANELS = 3, STEPS = 4 };
    static const struct { int M, first; } cases[] = {{511, 511}, {1023, 512}, {991, 512}, {1535, 512}};
    static const char *const masks[] = {"amx", "amx model"};
    static int want[MAX_CALLS];
    for (int m = 0; m < 2; m++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            if (!kt_use(masks[m]) || strstr(mp_kernels_variant(MP_SLOT_gemm_bf16), "amx") == NULL)
                continue;
            int count = 0;
            for (int r0 = 0, r1; r0 < cases[i].M; r0 = r1) {
                r1 = cases[i].M - r0 < cases[i].first ? cases[i].M : r0 + cases[i].first;
                for (int p = 0; p < PANELS; p++)
                    for (int r = r0; r < r1; r += 32) {
                        const int rows = r1 - r < 32 ? r1 - r : 32, each = (rows + STEPS - 1) / STEPS;
                        const bool last = r1 == cases[i].M && p == PANELS - 1 && r + 32 >= r1;
                        for (int left = rows, part; left > 0; left -= part) {
                            part = last || left < each ? left : each;
                            want[count++] = part * MP_PANEL_N;
                        }
                    }
            }
            product p = product_of(MP_W_BF16, cases[i].M, MP_PANEL_N * PANELS, 32 * STEPS);
            multiply(&p);
            check_calls(want, count, "BF16", masks[m], cases[i].M);
            drop(&p);
        }
    kt_use("");
}

/* ---- products that become activations, stored rows and unpacked matrices ---- */

static void note_q8(const float *x, int K, int8_t *q, float *scale, int32_t *sum) {
    note(K);
    original.acts_q8(x, K, q, scale, sum);
}

static void note_bf16(const float *x, int K, uint16_t *out) {
    note(K);
    original.acts_bf16(x, K, out);
}

/* Outputs are rounded 48 rows of a panel at a time to Q8, and 96 to BF16. */
MP_TEST(kernels_partition_of_rounding) {
    static const struct { mp_akind kind; int M, count, heights[4]; } cases[] = {
        {MP_A_Q8, 48, 1, {48}},       {MP_A_Q8, 49, 2, {48, 1}},    {MP_A_Q8, 100, 3, {48, 48, 4}},
        {MP_A_BF16, 96, 1, {96}},     {MP_A_BF16, 97, 2, {96, 1}},  {MP_A_BF16, 200, 3, {96, 96, 8}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int count = 1; count <= 2; count++) {
            enum { PANELS = 2 };
            int want[8];
            kt_use("");
            product p = product_of(MP_W_F32, cases[i].M, MP_PANEL_N * PANELS, 8);
            void *memory = kt_alloc(mp_acts_bytes(cases[i].kind, cases[i].M, MP_PANEL_N * PANELS));
            mp_acts out;
            mp_acts_init(&out, cases[i].kind, cases[i].M, MP_PANEL_N * PANELS, memory);
            const mp_gemm_part parts[2] = {{&p.w, &p.x, NULL}, {&p.w, &p.x, NULL}};
            for (int j = 0; j < cases[i].count * PANELS; j++)
                want[j] = cases[i].heights[j % cases[i].count] * MP_PANEL_N;
            mp_kernels *table = replaceable();
            table->acts_q8 = note_q8;
            table->acts_bf16 = note_bf16;
            mp_gemm_acts(parts, count, MP_ACT_SILU, 0, cases[i].M, 0, PANELS, &out);
            check_calls(want, cases[i].count * PANELS, count == 1 ? "one part" : "two parts", "mp_gemm_acts",
                        cases[i].M);
            kt_free(memory);
            drop(&p);
        }
    kt_use("");
}

static const uint8_t *stored_base;
static void note_stored(const uint8_t *rows, size_t stride, int n, const mp_acts *x, int m, float *y) {
    note(n + 1000 * (int64_t)((size_t)(rows - stored_base) / stride) + 1000000 * m);
    original.stored_f32(rows, stride, n, x, m, y);
}

static void note_stored_rows(const float *rows, int64_t ld, int n, const mp_acts *x, int m0, int m1, float *y,
                             int64_t ldy) {
    MP_CHECK(m0 == 0 && m1 == x->M && ldy == n);
    note(n + 1000 * ((rows - (const float *)(const void *)stored_base) / ld));
    original.stored_f32_rows(rows, ld, n, x, m0, m1, y, ldy);
}

/* Stored rows are multiplied 32 outputs at a time: by each of at most two rows of activations, or by up to 28 of them
 * at once. */
MP_TEST(kernels_partition_of_stored_products) {
    enum { N = 100, K = 16, MAX = 29 };
    static const char *const masks[] = {"avx2", "avx512"};
    static float w[N * K], rows[MAX * K], tile[MP_STORED_TILE], y[MAX * N];
    const mp_tensor tensor = {.dtype = MP_F32, .ndim = 2, .shape = {N, K}, .data = (const uint8_t *)w,
                              .nbytes = sizeof w};
    kt_use("");
    mp_blas_set_path("none");
    if (mp_kernels_is_ref(MP_SLOT_stored_f32))
        MP_SKIP("this CPU has no products of stored rows");
    stored_base = (const uint8_t *)w;
    for (int several = 0; several < 2; several++) {
        const int most = several ? 28 : 2, Ms[] = {1, 2, most, most + 1};
        for (int i = 0; i < 4 && kt_use(masks[several]); i++) {
            mp_acts x;
            int want[8], count = 0;
            mp_acts_init(&x, MP_A_F32, Ms[i], K, NULL);
            mp_acts_fill(&x, rows, K, 0, Ms[i]);
            mp_kernels *table = replaceable();
            table->stored_f32 = note_stored;
            table->stored_f32_rows = note_stored_rows;
            MP_CHECK_INT(mp_gemm_stored(&tensor, &x, 5, 80, false, NULL, tile, y, N), Ms[i] <= most);
            for (int n = 5; n < 80; n += 32)
                for (int m = 0; m < (several ? 1 : Ms[i]) && Ms[i] <= most; m++)
                    want[count++] = (80 - n < 32 ? 80 - n : 32) + 1000 * n + 1000000 * m;
            check_calls(want, count, "stored rows", "mp_gemm_stored", Ms[i]);
        }
    }
    kt_use("");
}

static void note_gemm(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                      const mp_epilogue *ep, float *y, int64_t ldy) {
    MP_CHECK(w->kind == MP_W_F32 && w->panels == 1 && panel0 == 0 && panel1 == 1 && w->K == x->K);
    MP_CHECK(m0 == 0 && m1 == x->M && w->panel_bytes == mp_pack_dense_panel_bytes(MP_W_F32, w->K));
    note(w->N + 100 * w->K + 100000 * (ep != NULL));
    original.gemm_f32(w, x, m0, m1, panel0, panel1, ep, y, ldy);
}

/* Unpacked matrices are packed 32 outputs at a time for each 384 inputs. Only later inputs add to the output. */
MP_TEST(kernels_partition_of_unpacked_products) {
    enum { M = 3, N = 70, K = 2 * MP_K_CHUNK + 10 };
    static float x[M * K], w[N * K], y[M * N];
    int want[9], count = 0;
    kt_use("");
    replaceable()->gemm_f32 = note_gemm;
    mp_gemm_f32_own(M, N, K, x, K, w, K, y, N);
    for (int k = 0; k < K; k += MP_K_CHUNK)
        for (int n = 0; n < N; n += MP_PANEL_N)
            want[count++] = (N - n < MP_PANEL_N ? N - n : MP_PANEL_N) +
                            100 * (K - k < MP_K_CHUNK ? K - k : MP_K_CHUNK) + 100000 * (k > 0);
    check_calls(want, count, "unpacked", "mp_gemm_f32_own", M);
    kt_use("");
}

static void note_inputs(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                        const mp_epilogue *ep, float *y, int64_t ldy) {
    MP_CHECK(w->kind == MP_W_BF16 && x->kind == MP_A_BF16 && w->K == x->K && m0 == 0 && m1 == x->M);
    MP_CHECK(panel0 < panel1 && ep == NULL);
    note(w->K);
    original.gemm_bf16(w, x, m0, m1, panel0, panel1, ep, y, ldy);
}

/* Attention in tiles multiplies the queries of each 32 rows by the keys, then the weights by the values that these rows
 * see, whose number is rounded to a multiple of 32. */
MP_TEST(kernels_partition_of_attention_in_tiles) {
    enum { T = 150, D = 40 };
    static const char *const masks[] = {"avx512bf16", "amx", "amx model"};
    static float rows[T * D], out[T * D];
    static const int want[] = {D, 32, D, 64, D, 64, D, 64, D, 64};
    for (int m = 0; m < 3; m++) {
        if (!kt_use(masks[m]) || strcmp(mp_kernels_variant(MP_SLOT_attn_full_bf16), "ref") == 0)
            continue;
        const mp_attn_full a = {.q = rows, .k = rows, .v = rows, .ld = D, .out = out, .ld_out = D, .T = T, .D = D,
                                .scale = 1.0f, .causal = true, .window = 20};
        void *scratch = kt_alloc(mp_attn_full_scratch(T, D));
        replaceable()->gemm_bf16 = note_inputs;
        mp_kernels_get()->attn_full_bf16(&a, 0, T, scratch);
        check_calls(want, 10, "attention", masks[m], T);
        kt_free(scratch);
    }
    kt_use("");
}
