/* arm/neon_attention.c: the attention kernels for NEON. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/simd/target.h"

MP_KEEP_ORDER
#include "kernels/simd/vec_neon.h"

#include "kernels/simd/attention_i16_tmpl.h"
#include "kernels/simd/attention_tmpl.h"

void mp_neon_attention(mp_kernel_table *table) {
    attention_fill(table, "neon");
    attention_i16_fill(table, "neon");
}
#endif
