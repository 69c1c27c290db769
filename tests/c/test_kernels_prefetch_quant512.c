/* test_kernels_prefetch_quant512.c: the cache level of prefetches in x86/avx512_quant.c. It changes no result, so only
 * the instructions show it. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernel_test.h"
#include "prefetch_watch.h"
#include "zero_product.h"

/* Only the products that the test names are compiled. */
#pragma GCC diagnostic ignored "-Wunused-function"

static int64_t far; /* prefetches to the second-level cache */

static void note_level(const void *address, int locality) {
    far += locality == 2;
    note_prefetch(address);
}

static bool reads_ahead; /* the CPU needs no prefetches for one row */

#define __builtin_prefetch(address, write, locality) note_level(address, locality)
#define mp_cpu_reads_ahead() reads_ahead
#define mp_avx512_quant fill_unused
static void fill_unused(mp_kernel_table *table, uint32_t features);
#include "kernels/x86/avx512_quant.c"

typedef void gemm_function(const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel0, int panel1,
                           const mp_epilogue *ep, float *y, int64_t ldy);

/* Products of one row prefetch each line of a panel once, to the second-level cache: prefetches to the first one would
 * occupy the fill buffers that the loads need. On a CPU that reads ahead itself, the lines are those that are loaded
 * next; two rows prefetch there, too. */
MP_TEST(kernels_prefetches_of_quantised_products_to_l2) {
    enum { PANELS = 2, K = 512 };
    static const struct { mp_wkind kind; gemm_function *gemm; int table; } kinds[] = {
        {MP_W_Q4_0, gemm_q4_0, 0}, {MP_W_Q4_K, gemm_q4_k, 0}, {MP_W_Q2_K, gemm_q2_k, 0}, {MP_W_IQ2_XS, gemm_iq2_xs, 1},
    };
    if (!kt_use("avx512vnni"))
        MP_SKIP("needs AVX-512 with VNNI");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (int form = 0; form < 3; form++) {
            const int M = form == 2 ? 2 : 1;
            reads_ahead = form > 0;
            product p = product_of(kinds[i].kind, M, MP_PANEL_N * PANELS, K);
            const int lines = (int)(p.w.panel_bytes / 64) - kinds[i].table, ahead = form == 1 ? 0 : 8192 / 64;
            watch(p.w.data);
            far = 0;
            kinds[i].gemm(&p.w, &p.x, 0, M, 0, PANELS, NULL, p.y, p.w.N);
            MP_CHECK_INT(prefetched, PANELS * lines);
            MP_CHECK_INT(far, prefetched);
            MP_CHECK_INT(hits[kinds[i].table + ahead], 1);
            MP_CHECK_INT(hits[PANELS * (lines + kinds[i].table) - 1 + ahead], 1);
            drop(&p);
        }
    reads_ahead = false;
    kt_use("");
}
#endif
