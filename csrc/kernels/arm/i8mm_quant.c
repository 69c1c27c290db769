/* arm/i8mm_quant.c: products of quantised weights with many rows by smmla. */
#if defined(__aarch64__)
#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/arm/dot.h"
#include "kernels/epilogue.h"
#include "kernels/simd/quant_neon.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_KEEP_ORDER
MP_TARGET_I8MM_BEGIN

enum { Q_BYTES_OFFSET = 0 };
#define MM_SMMLA 1

#include "kernels/simd/quant_kinds.h"

#include "kernels/simd/unpacked_quant.h"

MP_TARGET_END

void mp_i8mm_quant(mp_kernel_table *table) { mm_set_gemms(table, "i8mm"); }
#endif
