/* test_kernels_prefetch_quant.c: the lines that products of quantised weights prefetch, with the kernels of
 * x86/avx2_quant.c. No prefetch changes a result, so only counts show it. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernel_test.h"
#include "prefetch_watch.h"
#include "zero_product.h"

/* Only the products that the tests name are compiled. */
#pragma GCC diagnostic ignored "-Wunused-function"

#define __builtin_prefetch(address, ...) note_prefetch(address)
#define mp_avx2_quant fill_unused
static void fill_unused(mp_kernel_table *table);
#include "kernels/x86/avx2_quant.c"

typedef void gemm_function(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                           const mp_epilogue *ep, float *y, int64_t ldy);

/* The first tile of rows of a panel prefetches the lines of the panel that are 8 KiB further, or 12 KiB for more than
 * two rows: each line once, but for the table of a kind that has one. The panel is in cache for further tiles. */
MP_TEST(kernels_prefetches_of_quantised_products) {
    enum { PANELS = 2, K = 512 };
    static const struct { mp_wkind kind; gemm_function *gemm; bool table, heads; } kinds[] = {
        {MP_W_Q4_0, gemm_q4_0, false, false},    {MP_W_Q5_K, gemm_q5_k, false, true},
        {MP_W_Q8_0, gemm_q8_0, false, false},    {MP_W_Q6_K, gemm_q6_k, false, true},
        {MP_W_IQ2_XS, gemm_iq2_xs, true, true},  {MP_W_IQ4_NL, gemm_iq4_nl, true, false},
        {MP_W_Q2_K, gemm_q2_k, false, true},
    };
    if (!kt_use("avx2"))
        MP_SKIP("needs AVX2");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (int M = 1; M <= 8; M++) {
            /* Tiles of one or two rows prefetch beside their loads, and others the heads of superblocks, also if the
             * panel is in cache. */
            if (M == 5 || M == 6 || (M > 2 && kinds[i].heads))
                continue;
            product p = product_of(kinds[i].kind, M, MP_PANEL_N * PANELS, K);
            const int lines = (int)(p.w.panel_bytes / 64), ahead = (M <= 2 ? 8192 : 12288) / 64;
            static uint8_t want[MAX_LINES];
            memset(want, 0, sizeof want);
            for (int panel = 0; panel < PANELS; panel++)
                for (int line = kinds[i].table; line < lines; line++)
                    want[panel * lines + line + ahead]++;
            watch(p.w.data);
            kinds[i].gemm(&p.w, &p.x, 0, M, 0, PANELS, NULL, p.y, p.w.N);
            for (int line = 0; line < MAX_LINES; line++)
                if (hits[line] != want[line])
                    MP_FAIL("kind %d, %d rows: line %d is prefetched %d times, not %d", kinds[i].kind, M, line,
                            hits[line], want[line]);
            drop(&p);
        }
    kt_use("");
}

/* While eight stored rows are multiplied, the next eight are prefetched: the lines at which blocks begin, but no line
 * twice for blocks that are shorter than a line. */
MP_TEST(kernels_prefetches_of_stored_products) {
    static const struct { mp_stored_product *product; int items, bytes, every; } kinds[] = {
        {stored_q4_0, 32, 18, 2}, {stored_mxfp4, 32, 17, 2}, {stored_q8_0, 32, 34, 1}, {stored_q4_k, 256, 144, 1},
    };
    enum { K = 2048, ROWS = 20, MAX = K / 256 * 144 };
    if (!kt_use("avx2"))
        MP_SKIP("needs AVX2");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const int blocks = K / kinds[i].items, bytes = kinds[i].bytes, every = kinds[i].every;
        const size_t stride = (size_t)(blocks * bytes);
        static uint8_t want[MAX_LINES];
        uint8_t *rows = kt_alloc(stride * ROWS);
        void *memory = kt_alloc(mp_acts_bytes(MP_A_Q8, 1, K));
        float *zeros = kt_alloc(sizeof(float) * K), y[ROWS];
        mp_acts x;
        mp_acts_init(&x, MP_A_Q8, 1, K, memory);
        mp_acts_fill(&x, zeros, K, 0, 1);
        memset(want, 0, sizeof want);
        for (int o = 0; o < ROWS; o += 8)
            for (int r = o; r < o + 8; r++) /* lanes without a row repeat the last one */
                for (int b = 0; b < blocks; b += every)
                    for (int byte = 0; byte < bytes; byte += 64)
                        want[((size_t)((r < ROWS ? r : ROWS - 1) + 8) * stride + (size_t)(b * bytes + byte)) / 64]++;
        watch(rows);
        kinds[i].product(rows, stride, ROWS, &x, 0, y);
        for (int line = 0; line < MAX_LINES; line++)
            if (hits[line] != want[line])
                MP_FAIL("blocks of %d bytes: line %d is prefetched %d times, not %d", bytes, line, hits[line],
                        want[line]);
        MP_CHECK_INT(prefetched, (ROWS + 7) / 8 * 8 * (blocks / every) * ((bytes + 63) / 64));
        kt_free(rows), kt_free(memory), kt_free(zeros);
    }
    kt_use("");
}
#endif
