/* dequantize.h: decode one stored block into integers, scales and minima, for mp_dequantize_row and the packers. */
#ifndef MP_KERNELS_DEQUANTIZE_H
#define MP_KERNELS_DEQUANTIZE_H

#include "kernels/kernels.h"

/* The value of item k:
 *   scale[k / group] * number                       types without minima
 *   scale[k / group] * number + min[k / group]      types with minima
 * Each operation is rounded to fp32, as the `gguf` package computes it. The number is q[k], or table[q[k]] if the type
 * has a table. */
typedef struct mp_stored_block {
    int8_t q[256];
    float scale[16], min[16]; /* one per group of 16 or 32 items */
    /* Q2_K, Q3_K, TQ, and IQ except IQ4_NL: scale = d * factor, min = -(dmin * min_factor). d and dmin are f16 numbers,
     * the factors small multiples of 1/8, so the products are exact. */
    uint16_t d, dmin;
    float factor[16], min_factor[16];
} mp_stored_block;

/* Scale of an MXFP4 block from its E8M0 byte. It is half of the encoded value, because the E2M1 table holds its values
 * doubled. */
static inline float mp_mxfp4_scale(uint8_t exponent) {
    union {
        uint32_t bits;
        float scale;
    } of = {exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23};
    return of.scale;
}

/* Factor of group g (32 items, g = 0 ... 7) of an IQ4_XS block, from -32 to 31. */
int mp_iq4_xs_factor(const uint8_t *src, int g);

/* The 16 values that the 4-bit codes of a type index; NULL for a type without a table. */
const int8_t *mp_stored_table(mp_dtype dtype);
/* Returns the items per scale (16 or 32), or 0 for a type that is not quantised. Sets *mins to true if the type has
 * minima, else to false. */
int mp_stored_block_group(mp_dtype dtype, bool *mins);
/* Decode one block of a quantised dtype. Leaves `min` unwritten for types without minima. */
void mp_stored_block_read(mp_dtype dtype, const uint8_t *src, mp_stored_block *block);

#endif
