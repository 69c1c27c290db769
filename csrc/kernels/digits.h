/* digits.h: float vectors as fixed-point numbers of three digits, for exact products with int8 (slot row_maxima_i8).
 *
 * A vector x with top = max|x| is stored as integers q and a unit: x is nearly q * unit. The unit is the least power of
 * two with |q| <= MP_DIGITS_MAX and at least 2^-126. q is x / unit rounded once, to nearest even, so the error of a
 * component is at most unit / 2, which is at most 1.004 * 2^-23 * top or 2^-127. Denormal components count as zero, so
 * that the result does not depend on the thread's floating-point mode: their error is below 2^-126. x must be finite.
 *
 * q = 65536 * digit 2 + 256 * digit 1 + digit 0, with digits from -128 to 127. 256 * digit 2 + digit 1 fits int16. The
 * dot product of MP_K_CHUNK such numbers, or digits, with int8 is therefore exact in int32.
 *
 * A panel holds MP_PANEL_N vectors, its columns. Vectors are cut into k-chunks of MP_K_CHUNK inputs, and the last chunk
 * is padded with zeros to a multiple of MP_DIGITS_PAD, the depth of an AMX tile:
 *
 *   float unit[32]
 *   for each chunk:
 *     int32_t offset[3][32]          -128 * (sum of the digits), for each digit: products with a row whose components
 *                                    are stored plus 128 start here, because one operand of vpdpbusd is unsigned
 *     int8_t digits[inputs / 4][3][32][4] */
#ifndef MP_KERNELS_DIGITS_H
#define MP_KERNELS_DIGITS_H

#include "kernels/kernels.h"

enum {
    MP_DIGITS = 3,
    MP_DIGITS_MAX = 127 * 65536 + 127 * 256 + 127,
    MP_DIGITS_PAD = 64,
    MP_DIGITS_LINE = MP_PANEL_N * 4,                /* bytes of one digit of 4 inputs of all columns */
    MP_DIGITS_STEP = MP_DIGITS * MP_DIGITS_LINE,    /* bytes of 4 inputs */
    MP_DIGITS_OFFSETS = MP_DIGITS * MP_PANEL_N * 4, /* bytes of the offsets of a chunk */
    MP_DIGITS_CHUNK = MP_DIGITS_OFFSETS + MP_K_CHUNK / 4 * MP_DIGITS_STEP, /* bytes of a whole chunk */
};

/* Bytes of a panel of K inputs: a multiple of 64. */
size_t mp_digits_bytes(int K);
/* Convert the F32 panel [K][32] (pack_dense.h). */
void mp_digits_pack(const float *panel, int K, uint8_t *out);

static inline const float *mp_digits_units(const uint8_t *panel) { return (const float *)(const void *)panel; }
/* The byte of a panel at which the chunk of input k begins: its offsets, then its digits. */
static inline size_t mp_digits_chunk(int k) {
    return MP_PANEL_N * sizeof(float) + (size_t)(k / MP_K_CHUNK) * MP_DIGITS_CHUNK;
}
/* The byte of digit 0 of input k of a column. Digits 1 and 2 follow at distances of MP_DIGITS_LINE. */
static inline size_t mp_digits_byte(int k, int column) {
    return mp_digits_chunk(k) + MP_DIGITS_OFFSETS + (size_t)(k % MP_K_CHUNK / 4 * MP_DIGITS_STEP + column * 4 + k % 4);
}

#endif
