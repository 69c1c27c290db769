/* x86/avx512vnni_attention.c: I16 attention for AVX-512 with VNNI, whose vpdpwssd replaces two instructions. */
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

MP_TARGET_AVX512_VNNI_BEGIN
#define VEC_VNNI 1
#include "kernels/simd/vec_avx512.h"

#include "kernels/simd/attention_i16_tmpl.h"
MP_TARGET_END

void mp_avx512vnni_attention(mp_kernel_table *table) { attention_i16_fill(table, "avx512vnni"); }
#endif
