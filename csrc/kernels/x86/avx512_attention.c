/* x86/avx512_attention.c: the attention kernels for AVX-512. */
#if defined(__x86_64__)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/attention_scratch.h"
#include "kernels/math_const.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_TARGET_AVX512_BEGIN
#include "kernels/simd/vec_avx512.h"

#include "kernels/simd/attention_tmpl.h"
#include "kernels/simd/attention_i16_tmpl.h"
MP_TARGET_END

void mp_avx512_attention(mp_kernel_table *table, uint32_t features) {
    attention_fill(table, "avx512");
    attention_i16_fill(table, "avx512");
    if (features & MP_CPU_AVX512_VNNI)
        mp_avx512vnni_attention(table);
    if (features & MP_CPU_AVX512_BF16)
        mp_avx512bf16_attention(table);
}
#endif
