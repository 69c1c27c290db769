/* x86/avxvnni_attention.c: I16 attention with the 256-bit vpdpwssd of AVX-VNNI, which replaces two instructions. */
#include "kernels/simd/target.h"
#if defined(__x86_64__) && defined(MP_TARGET_AVXVNNI_BEGIN)
#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/attention_scratch.h"
#include "kernels/math_const.h"
#include "kernels/variants.h"

MP_TARGET_AVXVNNI_BEGIN
#define VEC_VNNI 1
#include "kernels/simd/vpdpbusd.h"
#include "kernels/simd/vec_avx2.h"

#include "kernels/simd/attention_i16_tmpl.h"
MP_TARGET_END

void mp_avxvnni_attention(mp_kernel_table *table) { attention_i16_fill(table, "avxvnni"); }
#endif
