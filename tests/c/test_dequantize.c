/* Dequantising stored types. test_dequantize.py compares every type with the gguf package to the bit. This file tests
 * values that can be computed by hand, and properties that Python cannot test: flush-to-zero, unaligned memory, guard
 * bytes. */
#include "kernel_test.h"
#include "kernels/dequantize.h"
#include "kernels/half.h"

enum { ONE = 0x3c00, TWO = 0x4000, HALF = 0x3800 }; /* f16 */

static void put_half(uint8_t *to, uint16_t half) {
    to[0] = (uint8_t)half;
    to[1] = (uint8_t)(half >> 8);
}

/* The value of an f16 by its definition. */
static double half_value(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const double magnitude = exponent == 0    ? ldexp(fraction, -24)
                             : exponent == 31 ? (fraction ? (double)NAN : (double)INFINITY)
                                              : ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

static void check_halves(void) {
    for (uint32_t half = 0; half < 65536; half++) {
        const float got = mp_half_to_float((uint16_t)half);
        if (!kt_equal(got, (float)half_value((uint16_t)half)))
            MP_FAIL("half %04x became %.9g", half, (double)got);
    }
}

MP_TEST(kernels_half_by_definition) { check_halves(); }

/* Every half converts to a float and back; a NaN becomes the quiet one of its sign. */
MP_TEST(kernels_half_round_trip) {
    for (uint32_t half = 0; half < 65536; half++) {
        const uint32_t wanted = (half & 0x7fff) > 0x7c00 ? (half & 0x8000) | 0x7e00 : half;
        const uint16_t got = mp_half_from_float(mp_half_to_float((uint16_t)half));
        if (got != wanted)
            MP_FAIL("half %04x became %04x, expected %04x", half, got, wanted);
    }
}

/* Every value of a scale of 8 bits: FP8 UE4M3, halved, where 127 is NaN and counts as 0; and powers of two. */
MP_TEST(kernels_dequantize_every_small_scale) {
    uint8_t block[36];
    float out[64];
    memset(block, 0x22, sizeof block); /* code 2 is the value 2, before the scale is halved */
    for (int byte = 0; byte < 256; byte++) {
        const int exponent = byte >> 3 & 15, fraction = byte & 7;
        const float scale = byte == 127 ? 0 : exponent ? ldexpf((float)(8 + fraction), exponent - 11)
                                                       : ldexpf((float)fraction, -10);
        for (int g = 0; g < 4; g++) {
            memset(block, 0, 4);
            block[g] = (uint8_t)byte;
            mp_dequantize_row(MP_NVFP4, block, 64, out);
            for (int k = 0; k < 64; k++)
                if (out[k] != (k / 16 == g ? 2 * scale : 0))
                    MP_FAIL("NVFP4 scale %d of group %d: item %d is %g", byte, g, k, (double)out[k]);
        }
        block[0] = (uint8_t)byte;
        memset(block + 1, 0x22, 3);
        mp_dequantize_row(MP_MXFP4, block, 32, out);
        for (int k = 0; k < 32 && byte < 255; k++)
            if (out[k] != ldexpf(2, byte - 128))
                MP_FAIL("MXFP4 scale %d: item %d is %g", byte, k, (double)out[k]);
    }
}

MP_TEST(kernels_dequantize_small_blocks) {
    uint8_t block[34];
    float out[32];
    /* byte k: k in the low nibble, 15 - k in the high nibble */
    uint8_t nibbles[16];
    for (int k = 0; k < 16; k++)
        nibbles[k] = (uint8_t)(k | (15 - k) << 4);

    put_half(block, TWO);
    memcpy(block + 2, nibbles, 16);
    mp_dequantize_row(MP_Q4_0, block, 32, out);
    for (int k = 0; k < 16; k++)
        MP_CHECK(out[k] == 2.0f * (float)(k - 8) && out[16 + k] == 2.0f * (float)(7 - k));

    put_half(block + 2, HALF);
    memcpy(block + 4, nibbles, 16);
    mp_dequantize_row(MP_Q4_1, block, 32, out);
    for (int k = 0; k < 16; k++)
        MP_CHECK(out[k] == 2.0f * (float)k + 0.5f && out[16 + k] == 2.0f * (float)(15 - k) + 0.5f);

    /* fifth bits of items 0, 5, 16, 31 */
    const uint8_t fifth[4] = {0x21, 0x00, 0x01, 0x80};
    put_half(block, ONE);
    memcpy(block + 2, fifth, 4);
    memcpy(block + 6, nibbles, 16);
    mp_dequantize_row(MP_Q5_0, block, 32, out);
    for (int k = 0; k < 32; k++) {
        const int four = k < 16 ? k : 31 - k, high = k == 0 || k == 5 || k == 16 || k == 31;
        MP_CHECK(out[k] == (float)(four + 16 * high - 16));
    }
    put_half(block + 2, TWO);
    memcpy(block + 4, fifth, 4);
    memcpy(block + 8, nibbles, 16);
    mp_dequantize_row(MP_Q5_1, block, 32, out);
    for (int k = 0; k < 32; k++) {
        const int four = k < 16 ? k : 31 - k, high = k == 0 || k == 5 || k == 16 || k == 31;
        MP_CHECK(out[k] == (float)(four + 16 * high) + 2.0f);
    }

    put_half(block, HALF);
    for (int k = 0; k < 32; k++)
        block[2 + k] = (uint8_t)(k == 31 ? -128 : k * 8 - 120);
    mp_dequantize_row(MP_Q8_0, block, 32, out);
    for (int k = 0; k < 32; k++)
        MP_CHECK(out[k] == (k == 31 ? -64.0f : (float)(k * 8 - 120) * 0.5f));

    put_half(block, ONE);
    memcpy(block + 2, nibbles, 16);
    mp_dequantize_row(MP_IQ4_NL, block, 32, out);
    MP_CHECK(out[0] == -127.0f && out[8] == 1.0f && out[15] == 113.0f && out[16] == 113.0f && out[31] == -127.0f);

    /* the first block of 32 of IQ4_XS, with scale 33 - 32 */
    uint8_t superblock[136] = {0};
    float xs[256];
    put_half(superblock, ONE);
    superblock[2] = 2, superblock[4] = 1;
    memcpy(superblock + 8, nibbles, 16);
    mp_dequantize_row(MP_IQ4_XS, superblock, 256, xs);
    MP_CHECK(xs[0] == -127.0f && xs[8] == 1.0f && xs[15] == 113.0f && xs[16] == 113.0f && xs[31] == -127.0f);
    MP_CHECK(xs[32] == -32 * -127.0f);

    block[0] = 128; /* E8M0: 2^(128 - 127); the E2M1 table holds its values doubled */
    memcpy(block + 1, nibbles, 16);
    mp_dequantize_row(MP_MXFP4, block, 32, out);
    MP_CHECK(out[1] == 1.0f && out[7] == 12.0f && out[9] == -1.0f && out[15] == -12.0f && out[16] == -12.0f);
    block[0] = 0;
    mp_dequantize_row(MP_MXFP4, block, 32, out);
    MP_CHECK(out[1] == 0x1p-128f);
}

/* A row is its blocks in sequence, and nothing outside is written. */
MP_TEST(kernels_dequantize_rows_are_blocks) {
    mp_test_random random = {5};
    for (int dtype = 0; dtype < MP_DTYPE_COUNT; dtype++) {
        bool mins;
        if (mp_stored_block_group((mp_dtype)dtype, &mins) == 0)
            continue;
        const mp_dtype_row *row = mp_dtype_get((mp_dtype)dtype);
        const int blocks = 3, n = blocks * row->items;
        uint8_t *src = kt_alloc((size_t)(blocks * row->bytes));
        float *whole = kt_alloc((size_t)n * sizeof(float)), *each = kt_alloc((size_t)n * sizeof(float));
        for (int i = 0; i < blocks * row->bytes; i++)
            src[i] = (uint8_t)mp_test_random_u64(&random);
        mp_dequantize_row((mp_dtype)dtype, src, n, whole);
        for (int b = 0; b < blocks; b++)
            mp_dequantize_row((mp_dtype)dtype, src + b * row->bytes, row->items, each + b * row->items);
        for (int k = 0; k < n; k++)
            if (!kt_equal(whole[k], each[k]))
                MP_FAIL("%s: item %d is %g in a row, %g in its block", row->name, k, (double)whole[k], (double)each[k]);
        kt_free(src), kt_free(whole), kt_free(each);
    }
}
