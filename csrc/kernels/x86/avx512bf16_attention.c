/* x86/avx512bf16_attention.c: bfloat16 attention for AVX-512 with BF16, built from the products of avx512_dense.c. */
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

MP_TARGET_AVX512_BF16_BEGIN
#include "kernels/simd/vec_avx512.h"

#include "kernels/simd/attention_bf16_tmpl.h"
MP_TARGET_END

void mp_avx512bf16_attention(mp_kernel_table *table) {
    MP_SET(table, attn_full_bf16, attn_full_bf16, "avx512bf16");
}
#endif
