/* x86/avx2_rows.c: the row kernels for AVX2 and FMA. */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/math_const.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_TARGET_AVX2_BEGIN
#include "kernels/simd/vec_avx2.h"

#include "kernels/simd/rows_tmpl.h"
MP_TARGET_END

void mp_avx2_rows(mp_kernel_table *table) { rows_fill(table, "avx2"); }
#endif
