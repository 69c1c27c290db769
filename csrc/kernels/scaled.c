/* scaled.c: see scaled.h. */
#include "kernels/scaled.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/half.h"
#include "kernels/quantize.h"

enum { BLOCK = 32, PACKED = 8 /* codes in an int32 */ };

bool mp_dtype_is_scaled(mp_dtype dtype) {
    return dtype == MP_AWQ4 || dtype == MP_GPTQ4 || dtype == MP_GPTQ4_ORDERED || dtype == MP_F8_E4M3;
}

mp_dtype mp_scaled_rows_type(mp_dtype dtype, mp_wkind kind) {
    if (!mp_dtype_is_scaled(dtype))
        return dtype;
    return kind == MP_W_Q4_1 ? MP_Q4_1 : kind == MP_W_Q8_0 ? MP_Q8_0 : MP_F32;
}

float mp_e4m3_to_float(uint8_t bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    float value = exponent ? ldexpf((float)(8 + fraction), exponent - 10) : ldexpf((float)fraction, -9);
    if ((bits & 0x7f) == 0x7f)
        value = NAN;
    return bits & 0x80 ? -value : value;
}

static uint32_t scaled_word(const mp_tensor *tensor, int64_t index) {
    uint32_t bits;
    memcpy(&bits, tensor->data + index * 4, sizeof bits); /* little-endian, at any address */
    return bits;
}

static float scale_at(const mp_tensor *scales, int64_t index) {
    float value;
    mp_dequantize_row(scales->dtype, scales->data + index * mp_dtype_get(scales->dtype)->bytes, 1, &value);
    return value;
}

/* Shift of an output's nibble in a word of AWQ. */
static int awq_shift(int32_t output) {
    static const uint8_t nibble[PACKED] = {0, 4, 1, 5, 2, 6, 3, 7};
    return 4 * nibble[output % PACKED];
}

/* The zero of an output, 0 to 16. */
static int zero_at(const mp_scaled *from, int64_t group, int32_t output) {
    const uint32_t bits = scaled_word(&from->zeros, group * (from->N / PACKED) + output / PACKED);
    const int shift = from->codes.dtype == MP_AWQ4 ? awq_shift(output) : 4 * (output % PACKED);
    return (int)(bits >> shift & 15) + from->zero_offset;
}

/* Reads 32 codes of an output, from input k on, which is a multiple of 32. */
static void read_codes(const mp_scaled *from, int32_t output, int32_t k, uint8_t codes[BLOCK]) {
    if (from->codes.dtype == MP_AWQ4) {
        const int64_t stride = from->N / PACKED, at = k * stride + output / PACKED;
        const int shift = awq_shift(output);
        for (int i = 0; i < BLOCK; i++)
            codes[i] = (uint8_t)(scaled_word(&from->codes, at + i * stride) >> shift & 15);
        return;
    }
    for (int i = 0; i < BLOCK; i += PACKED) {
        const uint32_t bits = scaled_word(&from->codes, (int64_t)(k + i) / PACKED * from->N + output);
        for (int j = 0; j < PACKED; j++)
            codes[i + j] = (uint8_t)(bits >> 4 * j & 15);
    }
}

/* Reads 32 values of an output, from input k on. */
static void read_values(const mp_scaled *from, int32_t output, int32_t k, const float e4m3[256], float values[BLOCK]) {
    uint8_t codes[BLOCK];
    float scale = 0;
    int64_t seen = -1;
    int zero = 0;
    if (from->codes.dtype == MP_F8_E4M3) {
        const uint8_t *at = from->codes.data + (int64_t)output * from->K + k;
        const int64_t row = (int64_t)(output / from->rows) * from->groups;
        for (int i = 0; i < BLOCK; i++) {
            const int64_t group = (k + i) / from->group;
            if (group != seen)
                scale = scale_at(&from->scales, row + group);
            seen = group;
            values[i] = e4m3[at[i]] * scale;
        }
        return;
    }
    read_codes(from, output, k, codes);
    for (int i = 0; i < BLOCK; i++) {
        int64_t group = (k + i) / from->group;
        if (from->codes.dtype == MP_GPTQ4_ORDERED) {
            group = scaled_word(&from->order, k + i);
            group = group < from->groups ? group : 0;
        }
        if (group != seen) {
            scale = scale_at(&from->scales, group * from->N + output);
            zero = zero_at(from, group, output);
        }
        seen = group;
        values[i] = scale * (float)(codes[i] - zero);
    }
}

static void write_q4_1(const mp_scaled *from, int32_t output, int32_t k, uint8_t *to) {
    uint8_t codes[BLOCK];
    const int64_t group = k / from->group;
    const float scale = scale_at(&from->scales, group * from->N + output);
    const uint16_t halves[2] = {mp_half_from_float(scale),
                                mp_half_from_float(-scale * (float)zero_at(from, group, output))};
    read_codes(from, output, k, codes);
    memcpy(to, halves, sizeof halves);
    for (int i = 0; i < BLOCK / 2; i++)
        to[sizeof halves + i] = (uint8_t)(codes[i] | codes[i + BLOCK / 2] << 4);
}

void mp_scaled_rows(const mp_scaled *from, int32_t n0, int32_t n, mp_dtype type, uint8_t *to) {
    float e4m3[256], values[BLOCK];
    const int bytes = type == MP_F32 ? BLOCK * (int)sizeof(float) : mp_dtype_get(type)->bytes;
    assert(mp_dtype_is_scaled(from->codes.dtype) && n0 >= 0 && n0 + n <= from->N && from->K % BLOCK == 0);
    assert(type != MP_Q4_1 || from->group % BLOCK == 0 || from->groups == 1);
    for (int i = 0; i < 256 && from->codes.dtype == MP_F8_E4M3; i++)
        e4m3[i] = mp_e4m3_to_float((uint8_t)i);
    const int64_t row_bytes = from->K / BLOCK * (int64_t)bytes;
    /* The outer loop runs over blocks, the inner one over rows: the words of a panel's outputs are neighbours in
     * memory. */
    for (int32_t k = 0; k < from->K; k += BLOCK) {
        for (int32_t i = 0; i < n; i++) {
            uint8_t *out = to + i * row_bytes + k / BLOCK * bytes;
            if (type == MP_Q4_1) {
                write_q4_1(from, n0 + i, k, out);
                continue;
            }
            read_values(from, n0 + i, k, e4m3, values);
            if (type == MP_Q8_0)
                mp_quantize_row(MP_Q8_0, values, BLOCK, out);
            else
                memcpy(out, values, sizeof values);
        }
    }
}

size_t mp_scaled_scratch(mp_dtype dtype, mp_wkind kind, int32_t K) {
    uint64_t bytes = 0;
    if (mp_dtype_is_scaled(dtype))
        mp_dtype_row_bytes(mp_scaled_rows_type(dtype, kind), K, &bytes);
    return (size_t)bytes * MP_PANEL_N;
}

void mp_scaled_pack(mp_wmat *w, const mp_scaled *from, int panel0, int panel1, uint8_t *scratch) {
    assert(mp_dtype_is_scaled(from->codes.dtype));
    const mp_dtype type = mp_scaled_rows_type(from->codes.dtype, w->kind);
    for (int p = panel0; p < panel1; p++) {
        const int32_t n0 = p * MP_PANEL_N, left = w->N - n0, n = left < MP_PANEL_N ? left : MP_PANEL_N;
        mp_tensor rows = {.dtype = type, .ndim = 2, .shape = {n, w->K}, .data = scratch};
        mp_dtype_row_bytes(type, w->K, &rows.nbytes);
        rows.nbytes *= (uint64_t)n;
        mp_scaled_rows(from, n0, n, type, scratch);
        mp_wmat one = *w;
        one.N = n;
        one.panels = 1;
        one.data = w->data + (size_t)p * w->panel_bytes;
        mp_wmat_pack(&one, &rows, 0, 1);
    }
}
