/* x86/avxvnni_quant.c: quantised products with the 256-bit vpdpbusd, for CPUs with AVX-VNNI. */
#include "kernels/simd/target.h"
#if defined(__x86_64__) && defined(MP_TARGET_AVXVNNI_BEGIN)
#include <assert.h>
#include <immintrin.h>
#include <string.h>

#include "kernels/dequantize.h"
#include "kernels/epilogue.h"
#include "kernels/variants.h"

MP_TARGET_AVXVNNI_BEGIN

#include "kernels/simd/quant_avx2.h"
#include "kernels/simd/vpdpbusd.h"

enum { Q_FLUSH_Q4 = 8, Q_FLUSH_Q5 = 8, Q_FLUSH_Q6 = 4, Q_FLUSH_Q7 = 4, Q_BYTES_OFFSET = 128, Q_WIDE = 0 };
#define Q_VECTORS(R) ((R) <= 2 ? 4 : (R) <= 6 ? 2 : 1) /* as in avx2_quant.c */
#define Q_ROWS 8
#define Q_TALL 4

static MP_INLINE void q_dot(q_part *part, qi *sum, qi w, qi a) {
    (void)part;
    *sum = vex_dpbusd(*sum, w, a);
}
static MP_INLINE void q_dot_bytes(q_part *part, qi *sum, qi w, qi a, qi odd) {
    (void)odd;
    q_dot(part, sum, w, a);
}
static MP_INLINE void q_flush(q_part *part, qi *sum) { (void)part, (void)sum; }

#include "kernels/simd/quant_tmpl.h"

enum { S_SHORT = 0 };
static MP_INLINE __m256i s_dot(__m256i w, __m256i a) { return vex_dpbusd(_mm256_setzero_si256(), w, a); }
static MP_INLINE __m256i s_short_dot(__m256i w, __m256i a) { return s_dot(w, a); }

#include "kernels/simd/stored_avx2.h"

MP_TARGET_END

void mp_avxvnni_quant(mp_kernel_table *table) {
    q_set_gemms(table, "avxvnni");
    s_set_products(table, "avxvnni");
}
#endif
