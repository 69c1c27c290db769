/* dequantize.h: a stored block taken apart into integers, scales and minima. For mp_dequantize_row and the packers. */
#ifndef MP_KERNELS_DEQUANTIZE_H
#define MP_KERNELS_DEQUANTIZE_H

#include "kernels/kernels.h"

/* item k = scale[k / group] * number                       types without minima
 *        = scale[k / group] * number + min[k / group]      types with them
 * each operation rounded to fp32, which is what the `gguf` package computes. The number is q[k] or, where the type has
 * a table, table[q[k]]. */
typedef struct mp_stored_block {
    int8_t q[256];
    float scale[16], min[16]; /* one per group of 16 or 32 items */
} mp_stored_block;

/* Scale of a block of MXFP4, of its E8M0 byte: half of what that says, for the numbers (E2M1) are doubled. */
static inline float mp_mxfp4_scale(uint8_t exponent) {
    union {
        uint32_t bits;
        float scale;
    } of = {exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23};
    return of.scale;
}

/* Scale of 32 items, g = 0 ... 7, of a block of IQ4_XS. */
float mp_iq4_xs_scale(const uint8_t *src, int g);

/* The 16 numbers that a type's 4-bit codes stand for, or NULL. */
const int8_t *mp_stored_table(mp_dtype dtype);
/* Items per scale (16 or 32), and whether the type has minima; 0 for types that are not quantised. */
int mp_stored_block_group(mp_dtype dtype, bool *mins);
/* Take one block of a quantised dtype apart; min stays unwritten for types without. */
void mp_stored_block_read(mp_dtype dtype, const uint8_t *src, mp_stored_block *block);

#endif
