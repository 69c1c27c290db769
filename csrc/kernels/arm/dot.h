/* arm/dot.h: the ARM dot products beyond NEON, for use inside the target region of each instruction (simd/target.h).
 *
 * The functions are inline assembly, because compilers reject the intrinsics in a target region if the whole file is
 * not compiled for that target. A word that is multiplied with all lanes is one lane of its register, so it needs no
 * broadcast. */
#ifndef MP_KERNELS_ARM_DOT_H
#define MP_KERNELS_ARM_DOT_H
#if defined(__aarch64__)

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/simd/target.h"

/* Load four bytes at any address into lane 0; the other lanes are zero. vsetq_lane_f32 would take gcc three
 * instructions. */
typedef int32_t arm_any_word __attribute__((may_alias, aligned(1)));
static MP_INLINE int8x16_t arm_word(const void *from) {
    int8x16_t word;
    __asm__("ldr %s0, %1" : "=w"(word) : "m"(*(const arm_any_word *)from));
    return word;
}

/* acc[i] += w[4 i ...] . a[0 ... 3], exact; arm_sdot<n>: by a[4 n ...]. DOTPROD: w and a are signed. */
#define ARM_DOT(name, dot, lane)                                                   \
    static MP_INLINE int32x4_t name(int32x4_t acc, int8x16_t w, int8x16_t a) {     \
        __asm__(dot " %0.4s, %1.16b, %2.4b[" lane "]" : "+w"(acc) : "w"(w), "w"(a)); \
        return acc;                                                                \
    }
ARM_DOT(arm_sdot, "sdot", "0")
ARM_DOT(arm_sdot1, "sdot", "1")
ARM_DOT(arm_sdot2, "sdot", "2")
ARM_DOT(arm_sdot3, "sdot", "3")
ARM_DOT(arm_usdot, "usdot", "0") /* I8MM: w is unsigned */

/* I8MM: two rows of 8 bytes of w times two rows of a, all signed: acc[2 i + j] += w[8 i ...] . a[8 j ...]. */
static MP_INLINE int32x4_t arm_smmla(int32x4_t acc, int32x4_t w, int32x4_t a) {
    __asm__("smmla %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(w), "w"(a));
    return acc;
}
/* The same with unsigned w. */
static MP_INLINE int32x4_t arm_usmmla(int32x4_t acc, int32x4_t w, int32x4_t a) {
    __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(w), "w"(a));
    return acc;
}

/* BF16: acc[i] += (w[2 i] * a[0] + w[2 i + 1] * a[1]). The sum of the two products is rounded to odd (truncated, with
 * the last bit set if it was inexact); its addition to acc is rounded in the same way. Denormals count as zero and FPCR
 * is ignored. The architecture defines this while FPCR.EBF is 0, the default. */
static MP_INLINE float32x4_t arm_bfdot(float32x4_t acc, uint16x8_t w, int8x16_t a) {
    __asm__("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(acc) : "w"(w), "w"(a));
    return acc;
}

/* BF16: two rows of 4 of w times two rows of a. Two bfdot steps, with their roundings, update acc[2 i + j]: one for the
 * first two inputs, then one for the last two. */
static MP_INLINE float32x4_t arm_bfmmla(float32x4_t acc, int32x4_t w, int32x4_t a) {
    __asm__("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(acc) : "w"(w), "w"(a));
    return acc;
}

#endif
#endif
