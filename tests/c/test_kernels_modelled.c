/* test_kernels_modelled.c: the masks "avxvnni model" and "amx model" (modelled.h), and tests of how the AMX kernels use
 * the tile unit.
 *
 * The linker redirects calls of mp_cpu_init, mp_cpu_features and of the functions that fill the table to the functions
 * __wrap_... below (build.py). Calls within one file of csrc are not redirected. */
#include "kernel_test.h"
#include "kernels/digits.h"
#include "modelled.h"
#include "tile_model.h"

static uint32_t modelled; /* bits that mp_cpu_features adds, and whose kernels run on models */

mp_status __real_mp_cpu_init(const char *mask, mp_error *error);
uint32_t __real_mp_cpu_features(void);
mp_status __wrap_mp_cpu_init(const char *mask, mp_error *error);
uint32_t __wrap_mp_cpu_features(void);

/* True if the kernels of AVX-VNNI are not in this build on a model, because the CPU has the instructions (build.py). */
static bool avxvnni_is_absent(void) {
#if defined(__x86_64__)
    mp_kernel_table own = {0};
    modelled_avxvnni_dense(&own);
    return !own.variant[MP_SLOT_gemm_i8];
#else
    return false; /* the core refuses the masks of x86 */
#endif
}

mp_status __wrap_mp_cpu_init(const char *mask, mp_error *error) {
    const bool tiles = mask && strcmp(mask, "amx model") == 0, bytes = mask && strcmp(mask, "avxvnni model") == 0;
    if (bytes && avxvnni_is_absent())
        return mp_fail(error, MP_UNSUPPORTED, "this CPU has AVX-VNNI");
    mp_status status = __real_mp_cpu_init(tiles ? "avx512" : bytes ? "avx2" : mask, error);
    if (status == MP_OK && tiles) /* the machine's own level, of which avx512 is a part */
        status = __real_mp_cpu_init("", error);
    if (status == MP_OK)
        modelled = tiles ? MP_CPU_AMX : bytes ? MP_CPU_AVX_VNNI : 0;
    return status;
}

uint32_t __wrap_mp_cpu_features(void) { return __real_mp_cpu_features() | modelled; }

#if defined(__x86_64__)
typedef void fill_function(mp_kernel_table *table);

/* Fill the table with kernels of the product, or, if `bit` is modelled, with `model`. */
static void fill(mp_kernel_table *table, uint32_t bit, const char *name, fill_function *product, fill_function *model) {
    if (!(modelled & bit)) {
        product(table);
        return;
    }
    mp_kernel_table own = {0};
    model(&own);
    model(table);
    for (int i = 0; i < MP_SLOT_COUNT; i++)
        if (own.variant[i])
            table->variant[i] = name;
}

#define REPLACE(bit, name, set)                           \
    fill_function __real_mp_##set, __wrap_mp_##set;       \
    void __wrap_mp_##set(mp_kernel_table *table) {        \
        fill(table, bit, name, __real_mp_##set, modelled_##set); \
    }
#if defined(MP_TARGET_AVXVNNI_BEGIN)
REPLACE(MP_CPU_AVX_VNNI, "avxvnni model", avxvnni_dense)
REPLACE(MP_CPU_AVX_VNNI, "avxvnni model", avxvnni_quant)
REPLACE(MP_CPU_AVX_VNNI, "avxvnni model", avxvnni_rows)
#endif
#if defined(MP_TARGET_AMX_BEGIN)
REPLACE(MP_CPU_AMX, "amx model", amx_dense)
REPLACE(MP_CPU_AMX, "amx model", amx_quant)
REPLACE(MP_CPU_AMX, "amx model", amx_rows)
REPLACE(MP_CPU_AMX, "amx model", amx_attention)
#endif

/* Use a mask, or skip the test if the machine or the compiler lacks what its model needs. */
static void use_or_skip(const char *mask) {
    if (!kt_use(mask))
        MP_SKIP("this CPU lacks AVX2 or has AVX-VNNI (avxvnni model), or lacks AVX-512 (amx model)");
    for (int i = 0; i < mp_kernels_count(); i++)
        if (strcmp(mp_kernels_variant(i), mask) == 0)
            return;
    MP_SKIP("this compiler does not know the instruction set");
}

/* Each modelled slot runs on its model, and no other. pytest's summary says that a set was tested if its test passes.
 */
MP_TEST(kernels_modelled_amx_slots) {
    static const int tiles[] = {MP_SLOT_gemm_bf16, MP_SLOT_gemm_bf16_acts, MP_SLOT_gemm_i8, MP_SLOT_attn_full_bf16,
                                MP_SLOT_gemm_q4_0, MP_SLOT_gemm_q4_1, MP_SLOT_gemm_q8_0, MP_SLOT_gemm_q4_k,
                                MP_SLOT_gemm_q6_k, MP_SLOT_gemm_mxfp4, MP_SLOT_gemm_q2_k, MP_SLOT_gemm_q3_k,
                                MP_SLOT_gemm_tq, MP_SLOT_gemm_iq2_xxs, MP_SLOT_gemm_iq2_xs, MP_SLOT_gemm_iq3,
                                MP_SLOT_row_maxima_i8};
    const int count = (int)(sizeof tiles / sizeof *tiles);
    use_or_skip("amx model");
    int seen = 0;
    for (int i = 0; i < mp_kernels_count(); i++)
        seen += strcmp(mp_kernels_variant(i), "amx model") == 0;
    MP_CHECK_INT(seen, count);
    for (int i = 0; i < count; i++)
        MP_CHECK_STR(mp_kernels_variant(tiles[i]), "amx model");
    MP_CHECK(mp_cpu_features() & MP_CPU_AMX);
    MP_CHECK(mp_attn_full_for(MP_COMPUTE_BF16, 200, 64, false) == mp_kernels_get()->attn_full_bf16);
    kt_use("");
    for (int i = 0; i < mp_kernels_count(); i++)
        MP_CHECK(!strstr(mp_kernels_variant(i), "model"));
}

MP_TEST(kernels_modelled_avxvnni_slots) {
    use_or_skip("avxvnni model");
    int seen = 0;
    for (int i = 0; i < mp_kernels_count(); i++)
        seen += strcmp(mp_kernels_variant(i), "avxvnni model") == 0;
    MP_CHECK_INT(seen, 26);
    MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_i8), "avxvnni model");
    MP_CHECK_STR(mp_kernels_variant(MP_SLOT_gemm_q4_k), "avxvnni model");
    MP_CHECK_STR(mp_kernels_variant(MP_SLOT_stored_q4_k), "avxvnni model");
    MP_CHECK_INT(mp_cpu_features(), MP_CPU_AVX2 | MP_CPU_AVX_VNNI);
    kt_use("");
    for (int i = 0; i < mp_kernels_count(); i++)
        MP_CHECK(!strstr(mp_kernels_variant(i), "model"));
}

/* Each digit of each half takes one product for 16 rows by 64 inputs, and every row is prefetched before its tile. */
MP_TEST(kernels_modelled_amx_maxima_operations) {
    enum { N = 100, K = 192, LINES = N * K / 64 };
    use_or_skip("amx model");
    int8_t *rows = kt_alloc((size_t)N * K);
    uint8_t *panel = kt_alloc(mp_digits_bytes(K)), hits[LINES];
    float *vectors = kt_alloc(sizeof(float) * K * MP_PANEL_N), maxima[MP_PANEL_N] = {0};
    mp_digits_pack(vectors, K, panel);
    for (int columns = 16; columns <= 32; columns += 16) {
        memset(hits, 0, sizeof hits);
        tile_model_reset();
        tile_model_watch(rows, LINES, hits);
        MP_CHECK(mp_kernels_get()->row_maxima_i8(panel, columns, K, rows, K, N, NULL, maxima));
        const tile_model_counts counts = tile_model_counted();
        const int jobs = (N + 15) / 16 * columns / 16;
        MP_CHECK_INT(counts.products, jobs * MP_DIGITS * K / 64);
        MP_CHECK_INT(counts.loads, jobs * (MP_DIGITS + 1) * K / 64);
        MP_CHECK_INT(counts.stores, (jobs + 1) * MP_DIGITS);
        MP_CHECK(counts.configurations == 1 && counts.releases == 1 && !tile_model_is_configured());
        for (int i = 0; i < LINES; i++)
            MP_CHECK(hits[i] >= (i >= 16 * K / 64) && hits[i] <= 2);
    }
    kt_use("");
    kt_free(rows);
    kt_free(panel);
    kt_free(vectors);
}

/* Count the operations of one product of random numbers. hits: out, [lines of the packed weights], how often each is
 * prefetched; or NULL. */
static tile_model_counts counts_of(mp_wkind kind, int M, int N, int K, uint8_t *hits) {
    mp_wmat weights, *packed = &weights;
    mp_test_random random = {5};
    float *w = kt_alloc(sizeof(float) * (size_t)N * (size_t)K), *x = kt_alloc(sizeof(float) * (size_t)M * (size_t)K);
    float *y = kt_alloc(sizeof(float) * (size_t)M * (size_t)N);
    kt_random(&random, w, (int64_t)N * K);
    kt_random(&random, x, (int64_t)M * K);
    const mp_tensor src = {.dtype = MP_F32,
                           .ndim = 2,
                           .shape = {N, K},
                           .data = (const uint8_t *)w,
                           .nbytes = sizeof(float) * (uint64_t)N * (uint64_t)K};
    mp_wmat_init(packed, kind, N, K);
    packed->data = kt_alloc(mp_wmat_bytes(packed) + MP_WMAT_SLACK);
    mp_wmat_pack(packed, &src, 0, packed->panels);
    void *memory = kt_alloc(mp_acts_bytes(mp_wmat_acts(kind), M, K));
    mp_acts acts;
    mp_acts_init(&acts, mp_wmat_acts(kind), M, K, memory);
    mp_acts_fill(&acts, x, K, 0, M);
    tile_model_reset();
    if (hits)
        tile_model_watch(packed->data, mp_wmat_bytes(packed) / 64, hits);
    mp_gemm(packed, &acts, 0, M, 0, packed->panels, NULL, y, N);
    const tile_model_counts counts = tile_model_counted();
    MP_CHECK(!tile_model_is_configured());
    kt_free(w);
    kt_free(x);
    kt_free(y);
    kt_free(packed->data);
    kt_free(memory);
    return counts;
}

/* Each product uses as few tile operations as its shape allows, and releases the tiles once. None of this changes a
 * result, so only counts show it. */
MP_TEST(kernels_modelled_amx_work) {
    static const struct {
        int M, products, streamed, configurations; /* products and streamed tiles of rows, per panel and step */
    } rows[] = {
        {1, 2, 0, 1},   {16, 2, 0, 1},  {17, 4, 0, 1},   {32, 4, 0, 1},    {33, 6, 0, 2},   {48, 6, 0, 2},
        {49, 8, 0, 2},  {63, 8, 0, 2},  {64, 8, 0, 1},   {65, 12, 0, 1},   {95, 12, 0, 1},  {96, 12, 6, 1},
        {97, 16, 8, 1}, {512, 64, 32, 1}, {513, 68, 34, 2},
    };
    use_or_skip("amx model");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int kind = 0; kind < 2; kind++) {
            const int steps = 3, panels = 3, times = steps * panels;
            const tile_model_counts c =
                counts_of(kind ? MP_W_I8 : MP_W_BF16, rows[i].M, 32 * panels - 7, kind ? 180 : 90, NULL);
            const int tiles = rows[i].products / 2; /* tiles of rows */
            MP_CHECK_INT(c.products, rows[i].products * times);
            MP_CHECK_INT(c.streamed, rows[i].streamed * times);
            MP_CHECK_INT(c.configurations, rows[i].configurations);
            MP_CHECK_INT(c.releases, 1);
            MP_CHECK_INT(c.stores, 2 * tiles * panels);
            MP_CHECK_INT(c.zeros, c.stores);
            const int blocks = (rows[i].M + 31) / 32; /* each loads both weight tiles once per step */
            MP_CHECK_INT(c.loads + c.streamed, (tiles + 2 * blocks) * times);
        }
}

/* Fewer than 64 rows are two passes, unless the panels exceed 1.5 MiB and the second pass would read them from L3. */
MP_TEST(kernels_modelled_amx_passes) {
    use_or_skip("amx model");
    enum { K = 1024, PANELS = (3 << 19) / (K * 64) };
    tile_model_counts c = counts_of(MP_W_BF16, 33, 32 * PANELS, K, NULL);
    MP_CHECK_INT(c.configurations, 2);
    MP_CHECK_INT(c.products, PANELS * (K / 32) * (4 + 2));
    c = counts_of(MP_W_BF16, 33, 32 * (PANELS + 1), K, NULL);
    MP_CHECK_INT(c.configurations, 1);
    MP_CHECK_INT(c.products, (PANELS + 1) * (K / 32) * 8);
}

/* With several blocks of rows, the steps of a panel prefetch the next one. */
MP_TEST(kernels_modelled_amx_prefetch) {
    use_or_skip("amx model");
    enum { PANELS = 3, STEPS = 7, LINES = STEPS * 32 };
    static const int Ms[] = {64, 96, 100, 200};
    for (size_t i = 0; i < sizeof Ms / sizeof *Ms; i++) {
        uint8_t hits[PANELS * LINES] = {0};
        const int blocks = (Ms[i] + 31) / 32, each = (LINES + blocks * STEPS - 1) / (blocks * STEPS);
        MP_CHECK_INT(counts_of(MP_W_BF16, Ms[i], 32 * PANELS, 32 * STEPS, hits).prefetched,
                     each * blocks * STEPS * PANELS);
        for (int line = 0; line < PANELS * LINES; line++) /* the last lines of a panel may include the next */
            MP_CHECK(line < LINES ? !hits[line] : hits[line] >= 1 && hits[line] <= 2);
    }
    MP_CHECK_INT(counts_of(MP_W_BF16, 32, 96, 224, NULL).prefetched, 0); /* one block: no time for it */
}

/* With more than 16 steps of inputs, partial sums are stored between chunks. Each block loads the weight tiles of a
 * chunk, and all but those of the first chunk of the first panel are prefetched once. A chunk serves four panels, or
 * eight if there are more than two chunks, before the next chunk begins at the first of them. */
MP_TEST(kernels_modelled_amx_chunks) {
    use_or_skip("amx model");
    enum { PANELS = 9, BLOCKS = 4, MAX = 40 };
    static const struct {
        int steps, chunks;
    } rows[] = {{16, 1}, {17, 2}, {18, 2}, {32, 2}, {33, 3}, {MAX, 3}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint8_t hits[PANELS * MAX * 32] = {0};
        const int steps = rows[i].steps, chunks = rows[i].chunks, first = (steps + chunks - 1) / chunks * 32;
        const tile_model_counts c = counts_of(MP_W_BF16, 32 * BLOCKS, 32 * PANELS, 32 * steps, hits);
        MP_CHECK_INT(c.products, 4 * BLOCKS * PANELS * steps);
        MP_CHECK_INT(c.streamed, 2 * BLOCKS * PANELS * steps);
        MP_CHECK_INT(c.stores, 4 * BLOCKS * PANELS * chunks);
        MP_CHECK_INT(c.zeros, 4 * BLOCKS * PANELS);
        MP_CHECK_INT(c.loads, 2 * BLOCKS * PANELS * steps + 4 * BLOCKS * PANELS * (chunks - 1));
        const int groups = chunks > 2 ? 1 : 2; /* those of several panels: 8 + 1, or 4 + 4 + 1 */
        MP_CHECK_INT(c.rewinds, PANELS * chunks * (BLOCKS - 1) + (chunks - 1) * groups);
        for (int line = 0; line < PANELS * steps * 32; line++)
            if (steps % chunks == 0 && hits[line] != (line >= first)) /* else the last chunk is shorter */
                MP_FAIL("%d steps: line %d is prefetched %d times", steps, line, hits[line]);
    }
}

/* Quantised weights are unpacked four units at a time. Unpacking a block prefetches the lines of the block that is two
 * such jobs further, each line once. */
MP_TEST(kernels_modelled_amx_quant_prefetch) {
    enum { M = 24, PANELS = 2, BLOCKS = 32, MAX = PANELS * BLOCKS * 17 };
    static const struct { mp_wkind kind; int lines; } rows[] = {
        {MP_W_Q4_0, 9}, {MP_W_Q4_1, 10}, {MP_W_Q8_0, 17}, {MP_W_Q4_K, 9}, {MP_W_Q6_K, 13}, {MP_W_MXFP4, 9},
        {MP_W_Q2_K, 5}, {MP_W_Q3_K, 7}, {MP_W_TQ, 4}, {MP_W_IQ2_XXS, 6}, {MP_W_IQ2_XS, 6}, {MP_W_IQ3, 8},
    };
    use_or_skip("amx model");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int lines = rows[i].lines;
        uint8_t hits[MAX] = {0};
        mp_wmat w;
        mp_acts x;
        mp_wmat_init(&w, rows[i].kind, MP_PANEL_N * PANELS, 32 * BLOCKS);
        w.data = kt_alloc(mp_wmat_bytes(&w) + MP_WMAT_SLACK);
        void *memory = kt_alloc(mp_acts_bytes(MP_A_Q8, M, w.K));
        float *zeros = kt_alloc(sizeof(float) * (size_t)(M * w.K)), *y = kt_alloc(sizeof(float) * (size_t)(M * w.N));
        mp_acts_init(&x, MP_A_Q8, M, w.K, memory);
        mp_acts_fill(&x, zeros, w.K, 0, M);
        tile_model_reset();
        tile_model_watch(w.data, MAX, hits);
        mp_gemm(&w, &x, 0, M, 0, PANELS, NULL, y, w.N);
        MP_CHECK_INT(tile_model_counted().prefetched, PANELS * BLOCKS * lines);
        const bool plain = w.panel_bytes == (size_t)(BLOCKS * lines * 64); /* blocks alone, without heads or a table */
        MP_CHECK_INT(plain, rows[i].kind == MP_W_Q4_0 || rows[i].kind == MP_W_Q4_1 || rows[i].kind == MP_W_Q8_0);
        for (int line = 0; plain && line < PANELS * BLOCKS * lines; line++)
            if (hits[line] != (line >= 8 * lines))
                MP_FAIL("kind %d: line %d is prefetched %d times", rows[i].kind, line, hits[line]);
        kt_free(w.data), kt_free(memory), kt_free(zeros), kt_free(y);
    }
}
#endif
