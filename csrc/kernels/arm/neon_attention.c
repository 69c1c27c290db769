/* arm/neon_attention.c: the attention kernels for NEON. */
#if defined(__aarch64__)
#include "kernels/simd/vec_neon.h"

#include "kernels/simd/attention_tmpl.h"

void mp_neon_attention(mp_kernel_table *table) { attention_fill(table, "neon"); }
#endif
