/* x86/avx512_rows.c: the row kernels for AVX-512. */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/math_const.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_TARGET_AVX512_BEGIN
#include "kernels/simd/vec_avx512.h"

#include "kernels/simd/rows_tmpl.h"
MP_TARGET_END

void mp_avx512_rows(mp_kernel_table *table, uint32_t features) {
    (void)features; /* the kernels need none beyond MP_CPU_AVX512 */
    rows_fill(table, "avx512");
}
#endif
