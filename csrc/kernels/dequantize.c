/* dequantize.c: stored rows to fp32, bit for bit as the `gguf` package (gguf-py, quants.py) computes them.
 *
 * The layouts are part of the GGUF format. The order of the fp32 roundings is that of gguf-py: (d * sc) * q - dmin * m.
 */
#include "kernels/dequantize.h"

#include <assert.h>
#include <string.h>

#include "kernels/half.h"
#include "kernels/iq_grids.h"

/* ---- blocks of 32 ------------------------------------------------------------------------------------------------ */

/* 16 bytes: item k is the low nibble of byte k, item 16 + k its high nibble. */
static void read_nibbles(const uint8_t *src, int8_t *q) {
    for (int k = 0; k < 16; k++) {
        q[k] = (int8_t)(src[k] & 15);
        q[16 + k] = (int8_t)(src[k] >> 4);
    }
}

static uint32_t load_u32(const uint8_t *from) {
    return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

static int load_u16(const uint8_t *from) { return from[0] | from[1] << 8; }
static uint16_t load_half(const uint8_t *from) { return (uint16_t)load_u16(from); }

/* Bit k of `bits` is bit 4 of item k. */
static void add_fifth_bits(uint32_t bits, int8_t *q) {
    for (int k = 0; k < 32; k++)
        q[k] = (int8_t)(q[k] | (int8_t)((bits >> k & 1) << 4));
}

static void add_offset(int8_t *q, int n, int offset) {
    for (int k = 0; k < n; k++)
        q[k] = (int8_t)(q[k] + offset);
}

static void read_q4_0(const uint8_t *src, mp_stored_block *block) {
    block->scale[0] = mp_half_load(src);
    read_nibbles(src + 2, block->q);
    add_offset(block->q, 32, -8);
}

static void read_q4_1(const uint8_t *src, mp_stored_block *block) {
    block->scale[0] = mp_half_load(src);
    block->min[0] = mp_half_load(src + 2);
    read_nibbles(src + 4, block->q);
}

static void read_q5_0(const uint8_t *src, mp_stored_block *block) {
    block->scale[0] = mp_half_load(src);
    read_nibbles(src + 6, block->q);
    add_fifth_bits(load_u32(src + 2), block->q);
    add_offset(block->q, 32, -16);
}

static void read_q5_1(const uint8_t *src, mp_stored_block *block) {
    block->scale[0] = mp_half_load(src);
    block->min[0] = mp_half_load(src + 2);
    read_nibbles(src + 8, block->q);
    add_fifth_bits(load_u32(src + 4), block->q);
}

static void read_q8_0(const uint8_t *src, mp_stored_block *block) {
    block->scale[0] = mp_half_load(src);
    memcpy(block->q, src + 2, 32);
}

static const int8_t iq4_table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void read_iq4_nl(const uint8_t *src, mp_stored_block *block) {
    block->scale[0] = mp_half_load(src);
    read_nibbles(src + 2, block->q);
}

static const int8_t mxfp4_table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void read_mxfp4(const uint8_t *src, mp_stored_block *block) {
    block->scale[0] = mp_mxfp4_scale(src[0]);
    read_nibbles(src + 1, block->q);
}

/* FP8 UE4M3: 4 exponent bits, 3 mantissa bits. The scale is halved, as for MXFP4. 127 is NaN in this format; it decodes
 * to 0. */
static float ue4m3_scale(uint8_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    if (byte == 127)
        return 0;
    union {
        uint32_t bits;
        float power;
    } of = {(uint32_t)(exponent + 127 - 7 - 1) << 23};
    return exponent == 0 ? (float)mantissa * 0x1p-10f : (1 + (float)mantissa / 8) * of.power;
}

static void read_nvfp4(const uint8_t *src, mp_stored_block *block) {
    for (int g = 0; g < 4; g++) {
        const uint8_t *codes = src + 4 + 8 * g;
        block->scale[g] = ue4m3_scale(src[g]);
        for (int k = 0; k < 8; k++) {
            block->q[16 * g + k] = (int8_t)(codes[k] & 15);
            block->q[16 * g + 8 + k] = (int8_t)(codes[k] >> 4);
        }
    }
}

/* ---- superblocks of 256 ------------------------------------------------------------------------------------------ */

static const int8_t q2_table[16] = {0, 1, 2, 3};

static void read_q2_k(const uint8_t *src, mp_stored_block *block) {
    const uint8_t *scales = src, *qs = src + 16;
    block->d = load_half(src + 80);
    block->dmin = load_half(src + 82);
    for (int g = 0; g < 16; g++) {
        block->factor[g] = (float)(scales[g] & 15);
        block->min_factor[g] = (float)(scales[g] >> 4);
    }
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 4; part++)
            for (int k = 0; k < 32; k++)
                block->q[half * 128 + part * 32 + k] = (int8_t)(qs[half * 32 + k] >> (2 * part) & 3);
}

static const int8_t q3_table[16] = {-4, -3, -2, -1, 0, 1, 2, 3};

static void read_q3_k(const uint8_t *src, mp_stored_block *block) {
    const uint8_t *high = src, *qs = src + 32, *scales = src + 96;
    block->d = load_half(src + 108);
    for (int g = 0; g < 16; g++) {
        int low = scales[g & 7] >> (g < 8 ? 0 : 4) & 15;
        int two = scales[8 + (g & 3)] >> (2 * (g >> 2)) & 3;
        block->factor[g] = (float)((low | two << 4) - 32);
    }
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 4; part++)
            for (int k = 0; k < 32; k++) {
                int low = qs[half * 32 + k] >> (2 * part) & 3;
                int bit = high[k] >> (4 * half + part) & 1;
                block->q[half * 128 + part * 32 + k] = (int8_t)(low | bit << 2);
            }
}

/* Decode d, dmin and the 12 bytes of 6-bit scales and minima, which Q4_K and Q5_K lay out alike. */
static void read_k_scales(const uint8_t *src, mp_stored_block *block) {
    float d = mp_half_load(src), dmin = mp_half_load(src + 2);
    const uint8_t *s = src + 4;
    for (int g = 0; g < 8; g++) {
        int sc = g < 4 ? s[g] & 63 : (s[4 + g] & 15) | (s[g - 4] >> 6) << 4;
        int mn = g < 4 ? s[4 + g] & 63 : s[4 + g] >> 4 | (s[g] >> 6) << 4;
        block->scale[g] = d * (float)sc;
        block->min[g] = -(dmin * (float)mn);
    }
}

/* Each 32 bytes hold two groups of 32 items: the first in the low nibbles, the second in the high nibbles. */
static void read_k_nibbles(const uint8_t *qs, int8_t *q) {
    for (int pair = 0; pair < 4; pair++)
        for (int k = 0; k < 32; k++) {
            q[pair * 64 + k] = (int8_t)(qs[pair * 32 + k] & 15);
            q[pair * 64 + 32 + k] = (int8_t)(qs[pair * 32 + k] >> 4);
        }
}

static void read_q4_k(const uint8_t *src, mp_stored_block *block) {
    read_k_scales(src, block);
    read_k_nibbles(src + 16, block->q);
}

static void read_q5_k(const uint8_t *src, mp_stored_block *block) {
    const uint8_t *high = src + 16;
    read_k_scales(src, block);
    read_k_nibbles(src + 48, block->q);
    for (int g = 0; g < 8; g++)
        for (int k = 0; k < 32; k++)
            block->q[g * 32 + k] = (int8_t)(block->q[g * 32 + k] | (high[k] >> g & 1) << 4);
}

static void read_q6_k(const uint8_t *src, mp_stored_block *block) {
    const uint8_t *low = src, *high = src + 128, *scales = src + 192;
    float d = mp_half_load(src + 208);
    for (int g = 0; g < 16; g++)
        block->scale[g] = d * (float)(int8_t)scales[g];
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 4; part++)
            for (int k = 0; k < 32; k++) {
                int four = low[half * 64 + (part & 1) * 32 + k] >> (part < 2 ? 0 : 4) & 15;
                int two = high[half * 32 + k] >> (2 * part) & 3;
                block->q[half * 128 + part * 32 + k] = (int8_t)((four | two << 4) - 32);
            }
}

int mp_iq4_xs_factor(const uint8_t *src, int g) {
    const int low = src[4 + g / 2] >> (4 * (g & 1)) & 15, high = (src[2] | src[3] << 8) >> (2 * g) & 3;
    return (low | high << 4) - 32;
}

static void read_iq4_xs(const uint8_t *src, mp_stored_block *block) {
    block->d = load_half(src);
    for (int g = 0; g < 8; g++) {
        block->factor[g] = (float)mp_iq4_xs_factor(src, g);
        read_nibbles(src + 8 + 16 * g, block->q + 32 * g);
    }
}

/* -1, 0 and 1; TQ2_0 can also encode 2, but no encoder writes it */
static const int8_t ternary_table[16] = {-1, 0, 1, 2};

static void read_tq2_0(const uint8_t *src, mp_stored_block *block) {
    block->d = load_half(src + 64);
    for (int g = 0; g < 8; g++)
        block->factor[g] = 1.0f;
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 4; part++)
            for (int k = 0; k < 32; k++)
                block->q[half * 128 + part * 32 + k] = (int8_t)(src[half * 32 + k] >> (2 * part) & 3);
}

/* A byte divided by 256 is a fraction with up to five base-3 digits: the integer part of three times the fraction is
 * the first digit. Items are ordered by digit: the first digits of all n bytes come before the second ones. */
static void read_digits(const uint8_t *bytes, int n, int digits, int8_t *q) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    for (int digit = 0; digit < digits; digit++)
        for (int k = 0; k < n; k++)
            q[digit * n + k] = (int8_t)((uint8_t)(bytes[k] * powers[digit]) * 3 >> 8);
}

static void read_tq1_0(const uint8_t *src, mp_stored_block *block) {
    block->d = load_half(src + 52);
    for (int g = 0; g < 8; g++)
        block->factor[g] = 1.0f;
    read_digits(src, 32, 5, block->q);
    read_digits(src + 32, 16, 5, block->q + 160);
    read_digits(src + 48, 4, 4, block->q + 240);
}

/* ---- points of grids -------------------------------------------------------------------------------------------
 *
 * 8 (IQ3: 4) neighbouring items are one grid point, which holds 2 (3) bits of table index per item, plus one sign bit
 * per item. The resulting code is that index with bit 2 (3) set if the sign is minus. */

static const int8_t iq2_table[16] = {8, 25, 43, 0, -8, -25, -43};
static const int8_t iq3_xxs_table[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
static const int8_t iq3_s_table[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
/* entries 0 to 2: 8 * (-1, 0, 1) + 1, for a delta of +1/8; entries 4 to 6: 8 * (-1, 0, 1) - 1, for -1/8 */
static const int8_t iq1_table[16] = {-7, 1, 9, 0, -9, -1, 7};

/* Decode n items of `bits` bits each. Bit k of signs: item k is negative. */
static void read_point(unsigned point, int bits, int n, unsigned signs, int8_t *q) {
    for (int k = 0; k < n; k++)
        q[k] = (int8_t)((point >> (bits * k) & ((1u << bits) - 1)) | (signs >> k & 1) << bits);
}

/* Returns eight sign bits: the seven stored ones and an eighth that makes the number of minus signs even. */
static unsigned even_signs(unsigned seven) { return seven | (unsigned)__builtin_parity(seven) << 7; }

static void read_iq2_xxs(const uint8_t *src, mp_stored_block *block) {
    block->d = load_half(src);
    for (int g = 0; g < 8; g++) {
        const uint8_t *points = src + 2 + 8 * g;
        const uint32_t rest = load_u32(points + 4);
        block->factor[g] = (0.5f + (float)(rest >> 28)) * 0.25f;
        for (int i = 0; i < 4; i++)
            read_point(mp_iq2_xxs_grid[points[i]], 2, 8, even_signs(rest >> (7 * i) & 127),
                       block->q + 32 * g + 8 * i);
    }
}

/* Factor of group g (16 items), computed from nibble g of `scales`. */
static float iq2_factor(const uint8_t *scales, int g) {
    return (0.5f + (float)(scales[g / 2] >> (4 * (g & 1)) & 15)) * 0.25f;
}

static void read_iq2_xs(const uint8_t *src, mp_stored_block *block) {
    block->d = load_half(src);
    for (int g = 0; g < 16; g++) {
        block->factor[g] = iq2_factor(src + 66, g);
        for (int i = 0; i < 2; i++) {
            const unsigned both = (unsigned)load_u16(src + 2 + 4 * g + 2 * i);
            read_point(mp_iq2_xs_grid[both & 511], 2, 8, even_signs(both >> 9), block->q + 16 * g + 8 * i);
        }
    }
}

static void read_iq2_s(const uint8_t *src, mp_stored_block *block) {
    const uint8_t *low = src + 2, *signs = src + 34, *high = src + 66;
    block->d = load_half(src);
    for (int g = 0; g < 16; g++)
        block->factor[g] = iq2_factor(src + 74, g);
    for (int i = 0; i < 32; i++)
        read_point(mp_iq2_s_grid[low[i] | (high[i / 4] >> (2 * (i & 3)) & 3) << 8], 2, 8, signs[i], block->q + 8 * i);
}

static void read_iq3_xxs(const uint8_t *src, mp_stored_block *block) {
    block->d = load_half(src);
    for (int g = 0; g < 8; g++) {
        const uint8_t *points = src + 2 + 8 * g;
        const uint32_t rest = load_u32(src + 66 + 4 * g);
        block->factor[g] = (0.5f + (float)(rest >> 28)) * 0.5f;
        for (int i = 0; i < 8; i++)
            read_point(mp_iq3_xxs_grid[points[i]], 3, 4, even_signs(rest >> (7 * (i / 2)) & 127) >> (4 * (i & 1)),
                       block->q + 32 * g + 4 * i);
    }
}

static void read_iq3_s(const uint8_t *src, mp_stored_block *block) {
    const uint8_t *low = src + 2, *high = src + 66, *signs = src + 74, *scales = src + 106;
    block->d = load_half(src);
    for (int g = 0; g < 8; g++)
        block->factor[g] = (float)(1 + 2 * (scales[g / 2] >> (4 * (g & 1)) & 15));
    for (int i = 0; i < 64; i++)
        read_point(mp_iq3_s_grid[low[i] | (high[i / 8] >> (i & 7) & 1) << 8], 3, 4,
                   (unsigned)signs[i / 2] >> (4 * (i & 1)), block->q + 4 * i);
}

static void read_iq1_s(const uint8_t *src, mp_stored_block *block) {
    block->d = load_half(src);
    for (int g = 0; g < 8; g++) {
        const int high = load_u16(src + 34 + 2 * g);
        block->factor[g] = (float)(2 * (high >> 12 & 7) + 1) * 0.125f;
        for (int i = 0; i < 4; i++)
            read_point(mp_iq1_grid[src[2 + 4 * g + i] | (high >> (3 * i) & 7) << 8], 2, 8, high >> 15 ? 255 : 0,
                       block->q + 32 * g + 8 * i);
    }
}

/* Each of four 16-bit words holds four 3-bit scales and, in its top 4 bits, a quarter of the half-precision scale d. */
static void read_iq1_m(const uint8_t *src, mp_stored_block *block) {
    const uint8_t *high = src + 32, *words = src + 48;
    const int half = words[1] >> 4 | (words[3] & 0xf0) | (words[5] & 0xf0) << 4 | (words[7] & 0xf0) << 8;
    block->d = (uint16_t)half;
    for (int g = 0; g < 16; g++)
        block->factor[g] = (float)(2 * (load_u16(words + g / 4 * 2) >> (3 * (g & 3)) & 7) + 1) * 0.125f;
    for (int i = 0; i < 32; i++) {
        const int nibble = high[i / 2] >> (4 * (i & 1)) & 15;
        read_point(mp_iq1_grid[src[i] | (nibble & 7) << 8], 2, 8, nibble & 8 ? 255 : 0, block->q + 8 * i);
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

typedef struct reader {
    void (*read)(const uint8_t *src, mp_stored_block *block);
    int group;
    bool mins;
    const int8_t *table; /* or NULL */
    bool factors;        /* `read` sets d, dmin and the factors, not scale and min */
} reader;

static const reader readers[MP_DTYPE_COUNT] = {
    [MP_Q4_0] = {read_q4_0, 32, false, NULL, false},
    [MP_Q4_1] = {read_q4_1, 32, true, NULL, false},
    [MP_Q5_0] = {read_q5_0, 32, false, NULL, false},
    [MP_Q5_1] = {read_q5_1, 32, true, NULL, false},
    [MP_Q8_0] = {read_q8_0, 32, false, NULL, false},
    [MP_Q2_K] = {read_q2_k, 16, true, q2_table, true},
    [MP_Q3_K] = {read_q3_k, 16, false, q3_table, true},
    [MP_Q4_K] = {read_q4_k, 32, true, NULL, false},
    [MP_Q5_K] = {read_q5_k, 32, true, NULL, false},
    [MP_Q6_K] = {read_q6_k, 16, false, NULL, false},
    [MP_MXFP4] = {read_mxfp4, 32, false, mxfp4_table, false},
    [MP_NVFP4] = {read_nvfp4, 16, false, mxfp4_table, false},
    [MP_TQ1_0] = {read_tq1_0, 32, false, ternary_table, true},
    [MP_TQ2_0] = {read_tq2_0, 32, false, ternary_table, true},
    [MP_IQ4_NL] = {read_iq4_nl, 32, false, iq4_table, false},
    [MP_IQ4_XS] = {read_iq4_xs, 32, false, iq4_table, true},
    [MP_IQ3_S] = {read_iq3_s, 32, false, iq3_s_table, true},
    [MP_IQ3_XXS] = {read_iq3_xxs, 32, false, iq3_xxs_table, true},
    [MP_IQ2_S] = {read_iq2_s, 16, false, iq2_table, true},
    [MP_IQ2_XS] = {read_iq2_xs, 16, false, iq2_table, true},
    [MP_IQ2_XXS] = {read_iq2_xxs, 32, false, iq2_table, true},
    [MP_IQ1_M] = {read_iq1_m, 16, false, iq1_table, true},
    [MP_IQ1_S] = {read_iq1_s, 32, false, iq1_table, true},
};

const int8_t *mp_stored_table(mp_dtype dtype) {
    assert(dtype < MP_DTYPE_COUNT);
    return readers[dtype].table;
}

int mp_stored_block_group(mp_dtype dtype, bool *mins) {
    assert(dtype < MP_DTYPE_COUNT);
    *mins = readers[dtype].mins;
    return readers[dtype].group;
}

void mp_stored_block_read(mp_dtype dtype, const uint8_t *src, mp_stored_block *block) {
    assert(dtype < MP_DTYPE_COUNT && readers[dtype].read);
    const reader *reader = &readers[dtype];
    reader->read(src, block);
    for (int g = 0; reader->factors && g < mp_dtype_get(dtype)->items / reader->group; g++) {
        block->scale[g] = mp_half_to_float(block->d) * block->factor[g];
        if (reader->mins)
            block->min[g] = -(mp_half_to_float(block->dmin) * block->min_factor[g]);
    }
}

static void scale_group(const int8_t *q, float scale, const float *min, int n, float *out) {
    if (min) {
        float m = *min;
        for (int k = 0; k < n; k++)
            out[k] = scale * (float)q[k] + m;
    } else {
        for (int k = 0; k < n; k++)
            out[k] = scale * (float)q[k];
    }
}

/* Convert through an aligned buffer, so that the compiler vectorises the loop: loading a 16-bit model converts all of
 * its weights. */
static void dequantize_f16(const uint8_t *from, int64_t n, float *out) {
    enum { CHUNK = 64 };
    uint16_t halves[CHUNK];
    int64_t k = 0;
    for (; k + CHUNK <= n; k += CHUNK) {
        memcpy(halves, from + 2 * k, sizeof halves);
        for (int i = 0; i < CHUNK; i++)
            out[k + i] = mp_half_to_float(halves[i]);
    }
    for (; k < n; k++)
        out[k] = mp_half_load(from + 2 * k);
}

void mp_dequantize_row(mp_dtype dtype, const void *src, int64_t n, float *out) {
    const uint8_t *from = src;
    if (dtype == MP_F32) {
        memcpy(out, from, (size_t)n * sizeof(float));
        return;
    }
    if (dtype == MP_F16) {
        dequantize_f16(from, n, out);
        return;
    }
    if (dtype == MP_BF16) {
        for (int64_t k = 0; k < n; k++) {
            uint32_t bits = (uint32_t)from[2 * k] << 16 | (uint32_t)from[2 * k + 1] << 24;
            memcpy(out + k, &bits, sizeof bits);
        }
        return;
    }
    const mp_dtype_row *row = mp_dtype_get(dtype);
    const reader *reader = &readers[dtype];
    assert(reader->read && n % row->items == 0);
    mp_stored_block block;
    for (int64_t k = 0; k < n; k += row->items, from += row->bytes) {
        mp_stored_block_read(dtype, from, &block);
        for (int i = 0; reader->table && i < row->items; i++)
            block.q[i] = reader->table[block.q[i]];
        for (int i = 0; i < row->items; i += reader->group)
            scale_group(block.q + i, block.scale[i / reader->group],
                        reader->mins ? &block.min[i / reader->group] : NULL, reader->group, out + k + i);
    }
}
