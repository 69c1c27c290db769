/* test_kernels_prefetch.c: the lines that products of dense weights prefetch, with the kernels of x86/avx2_dense.c. No
 * prefetch changes a result, so only counts show it. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernel_test.h"
#include "prefetch_watch.h"
#include "zero_product.h"

#define __builtin_prefetch(address, ...) note_prefetch(address)
#define mp_avx2_dense    counted_avx2_dense
#define mp_avxvnni_dense counted_avxvnni_dense
void counted_avx2_dense(mp_kernel_table *table);
void counted_avxvnni_dense(mp_kernel_table *table);
#include "kernels/x86/avx2_dense.c"

/* The first tile of rows of a panel prefetches each line of the panel that is 8 KiB further. The other tiles find the
 * panel in cache; they prefetch the lines that they load. */
MP_TEST(kernels_prefetches_of_dense_products) {
    enum { PANELS = 3, AHEAD = 8192 / 64 };
    static const struct { mp_wkind kind; int tall; } rows[] = {{MP_W_F32, 6}, {MP_W_BF16, 4}, {MP_W_I8, 6}};
    static const int heights[] = {1, 4, 6, 7, 13};
    if (!kt_use("avx2"))
        MP_SKIP("needs AVX2");
    mp_kernel_table table = {0};
    counted_avx2_dense(&table);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 5; j++) {
            const int M = heights[j], tiles = (M + rows[i].tall - 1) / rows[i].tall, K = 96;
            product p = product_of(rows[i].kind, M, MP_PANEL_N * PANELS, K);
            const int step = rows[i].kind == MP_W_F32 ? 1 : rows[i].kind == MP_W_BF16 ? 2 : 4; /* inputs */
            const int lines = K / step * 2, stride = (int)(p.w.panel_bytes / 64);
            static uint8_t want[MAX_LINES];
            memset(want, 0, sizeof want);
            for (int panel = 0; panel < PANELS; panel++)
                for (int line = 0; line < lines; line++) {
                    want[panel * stride + line + AHEAD]++;
                    want[panel * stride + line] = (uint8_t)(want[panel * stride + line] + tiles - 1);
                }
            watch(p.w.data);
            (rows[i].kind == MP_W_F32    ? table.call.gemm_f32
             : rows[i].kind == MP_W_BF16 ? table.call.gemm_bf16
                                         : table.call.gemm_i8)(&p.w, &p.x, 0, M, 0, PANELS, NULL, p.y, p.w.N);
            for (int line = 0; line < MAX_LINES; line++)
                if (hits[line] != want[line])
                    MP_FAIL("kind %d, %d rows: line %d is prefetched %d times, not %d", rows[i].kind, M, line,
                            hits[line], want[line]);
            drop(&p);
        }
    kt_use("");
}
#endif
