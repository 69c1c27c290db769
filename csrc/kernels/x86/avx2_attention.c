/* x86/avx2_attention.c: the attention kernels for AVX2 and FMA. */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/attention_scratch.h"
#include "kernels/math_const.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_TARGET_AVX2_BEGIN
#include "kernels/simd/vec_avx2.h"

#include "kernels/simd/attention_tmpl.h"
#include "kernels/simd/attention_i16_tmpl.h"
MP_TARGET_END

void mp_avx2_attention(mp_kernel_table *table) {
    attention_fill(table, "avx2");
    attention_i16_fill(table, "avx2");
}
#endif
