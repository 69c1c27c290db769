/* arm/dotprod_quant.c: quantised products by sdot. Both operands of sdot are signed: weights of 4, 5 and 6 bits are
 * used with their offset, because they are below 128, and bytes are converted back to signed. */
#if defined(__aarch64__)
#include <assert.h>

#include "kernels/arm/dot.h"
#include "kernels/simd/quant_neon.h"
#include "kernels/epilogue.h"
#include "kernels/simd/target.h"
#include "kernels/variants.h"

MP_KEEP_ORDER
MP_TARGET_DOTPROD_BEGIN

typedef int q_part; /* unused: sdot accumulates in 32 bits */

enum { Q_FLUSH_Q4 = 8, Q_FLUSH_Q5 = 8, Q_FLUSH_Q6 = 4, Q_FLUSH_Q7 = 4, Q_BYTES_OFFSET = 0, Q_WIDE = 0 };
#define Q_VECTORS(R) ((R) == 1 ? 4 : (R) == 2 ? 2 : 1)
#define Q_ROWS       8
#define Q_TALL       6 /* 12 float and 12 integer accumulators in 32 registers */

static MP_INLINE q_part q_part_zero(void) { return 0; }
static MP_INLINE qi q_spread(const void *from) { /* sdot reads lane 0 only */
    const int32x4_t word = vreinterpretq_s32_s8(arm_word(from));
    return (qi){word, word};
}
static MP_INLINE void q_dot(q_part *part, qi *sum, qi w, qi a) {
    (void)part;
    sum->lo = arm_sdot(sum->lo, Q_BYTES(w.lo), Q_BYTES(a.lo));
    sum->hi = arm_sdot(sum->hi, Q_BYTES(w.hi), Q_BYTES(a.lo));
}
static MP_INLINE void q_dot_bytes(q_part *part, qi *sum, qi w, qi a, qi odd) {
    (void)odd;
    const int32x4_t sign = vdupq_n_s32((int32_t)0x80808080u);
    q_dot(part, sum, (qi){veorq_s32(w.lo, sign), veorq_s32(w.hi, sign)}, a);
}
static MP_INLINE void q_flush(q_part *part, qi *sum) { (void)part, (void)sum; }

#include "kernels/simd/quant_tmpl.h"

#define MM_SMMLA 0
#include "kernels/simd/unpacked_quant.h"

MP_TARGET_END

void mp_dotprod_quant(mp_kernel_table *table) {
    q_set_gemms(table, "dotprod");
    mm_set_gemms(table, "dotprod");
}
#endif
