/* test_kernels_prefetch512.c: the lines that products of dense weights prefetch, with the kernels of
 * x86/avx512_dense.c. No prefetch changes a result, so only counts show it. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernel_test.h"
#include "prefetch_watch.h"
#include "zero_product.h"

static bool reads_ahead; /* the CPU needs no prefetches for few rows */

#define __builtin_prefetch(address, ...) note_prefetch(address)
#define mp_cpu_reads_ahead() reads_ahead
#define mp_avx512_dense counted_avx512_dense
void counted_avx512_dense(mp_kernel_table *table, uint32_t features);
#include "kernels/x86/avx512_dense.c"

/* The first tile of rows prefetches each line of a panel that is 8 KiB further. On a CPU that reads ahead itself, it
 * prefetches the lines that it loads if the product has at most four rows. */
MP_TEST(kernels_prefetches_of_dense_products_on_cpus_that_read_ahead) {
    enum { PANELS = 3, K = 96, LINES = K * 2 };
    if (!kt_use("avx512"))
        MP_SKIP("needs AVX-512");
    mp_kernel_table table = {0};
    counted_avx512_dense(&table, mp_cpu_features());
    for (int M = 1; M <= 12; M++)
        for (int own = 0; own < 2; own++) {
            reads_ahead = own;
            product p = product_of(MP_W_F32, M, MP_PANEL_N * PANELS, K);
            const int stride = (int)(p.w.panel_bytes / 64), ahead = own && M <= 4 ? 0 : 8192 / 64;
            static uint8_t want[MAX_LINES];
            memset(want, 0, sizeof want);
            for (int panel = 0; panel < PANELS; panel++)
                for (int line = 0; line < LINES; line++)
                    want[panel * stride + line + ahead]++;
            watch(p.w.data);
            table.call.gemm_f32(&p.w, &p.x, 0, M, 0, PANELS, NULL, p.y, p.w.N);
            for (int line = 0; line < MAX_LINES; line++)
                if (hits[line] != want[line])
                    MP_FAIL("%d rows, %d: line %d is prefetched %d times, not %d", M, own, line, hits[line],
                            want[line]);
            drop(&p);
        }
    reads_ahead = false;
    kt_use("");
}
#endif
