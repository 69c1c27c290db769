/* arm/neon_rows.c: the row kernels for NEON. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <assert.h>
#include <math.h>

#include "kernels/simd/target.h"

MP_KEEP_ORDER
#include "kernels/simd/vec_neon.h"

#include "kernels/simd/rows_tmpl.h"

void mp_neon_rows(mp_kernel_table *table) { rows_fill(table, "neon"); }
#endif
