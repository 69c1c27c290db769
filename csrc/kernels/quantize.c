/* quantize.c: see quantize.h. dequantize.c reads the layouts that are written here. */
#include "kernels/quantize.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/half.h"
#include "kernels/pack_dense.h"

enum { BLOCK = 32, SUPER = 256, LANES = 8 };

static void put_half(uint8_t *to, float value) {
    const uint16_t half = mp_half_from_float(value);
    memcpy(to, &half, sizeof half);
}

/* Nearest integer as a float, |x| below 2^22; ties to even. The sum has no bits for a fraction. */
static inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

static inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* Conversion of NaN or a value outside int is undefined in C: such values become `low`. */
static inline int to_int(double x, int low, int high) { return x >= low ? x <= high ? (int)x : high : low; }

/* Nearest integer from low to high; NaN becomes `low`. */
static inline int nearest_within(float x, int low, int high) {
    return to_int(nearest(clamp(x, (float)low, (float)high)), low, high);
}

/* ---- floats ------------------------------------------------------------------------------------------------------ */

static void write_f16(const float *x, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; i++)
        put_half(out + 2 * i, x[i]);
}

static void write_bf16(const float *x, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; i++) {
        const uint16_t word = mp_bf16_from_f32(x[i]);
        memcpy(out + 2 * i, &word, sizeof word);
    }
}

/* ---- blocks of 32 ------------------------------------------------------------------------------------------------ */

/* Codes of up to 5 bits: nibbles of codes i and i + 16 in byte i, and bit 4 of all codes in `fifth`. */
static void put_codes(const uint8_t *codes, uint8_t *nibbles, uint8_t *fifth) {
    uint32_t bits = 0;
    for (int i = 0; i < BLOCK / 2; i++)
        nibbles[i] = (uint8_t)((codes[i] & 15) | (codes[i + BLOCK / 2] & 15) << 4);
    for (int i = 0; i < BLOCK; i++)
        bits |= (uint32_t)(codes[i] >> 4 & 1) << i;
    if (fifth)
        memcpy(fifth, &bits, sizeof bits);
}

/* Q4_0, Q5_0: the value of the greatest magnitude becomes -half, 0 becomes `half`. The `gguf` package computes the
 * codes in double precision. */
static void write_signed(const float *x, int half, uint8_t *out) {
    float most = 0;
    uint8_t codes[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        if (fabsf(x[i]) > fabsf(most))
            most = x[i];
    const float d = most / (float)-half, inverse = d != 0 ? 1 / d : 0;
    for (int i = 0; i < BLOCK; i++)
        codes[i] = (uint8_t)to_int((double)x[i] * (double)inverse + (half + 0.5), 0, 2 * half - 1);
    put_half(out, d);
    put_codes(codes, out + (half == 8 ? 2 : 6), half == 8 ? NULL : out + 2);
}

/* Q4_1, Q5_1: codes from the least value, 0, to the greatest, `last`. */
static void write_offset(const float *x, int last, uint8_t *out) {
    float low = x[0], high = x[0];
    uint8_t codes[BLOCK];
    for (int i = 1; i < BLOCK; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float d = (high - low) / (float)last, inverse = d != 0 ? 1 / d : 0;
    for (int i = 0; i < BLOCK; i++)
        codes[i] = (uint8_t)to_int((x[i] - low) * inverse + 0.5f, 0, last);
    put_half(out, d);
    put_half(out + 2, low);
    put_codes(codes, out + (last == 15 ? 4 : 8), last == 15 ? NULL : out + 4);
}

static void write_q8_0(const float *x, uint8_t *out) {
    float most = 0;
    for (int i = 0; i < BLOCK; i++)
        most = fabsf(x[i]) > most || x[i] != x[i] ? fabsf(x[i]) : most;
    const float d = most / 127, inverse = d != 0 ? 1 / d : 0;
    put_half(out, d);
    for (int i = 0; i < BLOCK; i++) { /* values halfway between two integers are rounded away from zero */
        const float scaled = x[i] * inverse, magnitude = floorf(fabsf(scaled) + 0.5f);
        const int code = to_int(magnitude, 0, 127);
        out[2 + i] = (uint8_t)(int8_t)(scaled < 0 ? -code : code);
    }
}

/* ---- superblocks of 256 ------------------------------------------------------------------------------------------ */

typedef struct sums { float l, ll, xl; } sums;

static float total(const float lanes[LANES]) {
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

/* Weighted sums over the codes l = nearest((x - low) * inverse), limited to [first, last]. */
static sums code_sums(const float *x, const float *weights, int n, float low, float inverse, float first, float last) {
    float l[LANES] = {0}, ll[LANES] = {0}, xl[LANES] = {0};
    for (int i = 0; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const float code = clamp(nearest((x[i + j] - low) * inverse), first, last), w = weights[i + j] * code;
            l[j] += w;
            ll[j] += w * code;
            xl[j] += w * x[i + j];
        }
    return (sums){total(l), total(ll), total(xl)};
}

/* Finds scale and least value of 32 values, so that scale * code + least fits them; code is 0 to `last`, least <= 0.
 * Each trial rounds the values to codes for another range, from the best start so far, then fits a line to (code,
 * value) by weighted least squares. The trial with the least squared error is the result. */
static float fit_line(const float *x, int last, float *least) {
    enum { TRIALS = 21 };
    float weights[BLOCK], squares = 0, w = 0, wx = 0, wxx = 0, low = x[0], high = x[0];
    for (int i = 0; i < BLOCK; i++) {
        squares += x[i] * x[i];
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float base = sqrtf(squares / BLOCK);
    low = low > 0 ? 0 : low;
    *least = low;
    if (!(high > low))
        return 0;
    for (int i = 0; i < BLOCK; i++) { /* count errors of large weights more: they change outputs more */
        weights[i] = base + fabsf(x[i]);
        w += weights[i];
        wx += weights[i] * x[i];
        wxx += weights[i] * x[i] * x[i];
    }
    float best = INFINITY, scale = (high - low) / (float)last;
    for (int t = 0; t < TRIALS; t++) {
        const float range = (float)last + (t == 0 ? 0.0f : (last == 15 ? -1.0f : -0.5f) + 0.1f * (float)(t - 1));
        const sums s = code_sums(x, weights, BLOCK, *least, range / (high - *least), 0, (float)last);
        const float determinant = w * s.ll - s.l * s.l;
        if (!(determinant > 0))
            continue;
        float slope = (w * s.xl - wx * s.l) / determinant, start = (s.ll * wx - s.l * s.xl) / determinant;
        if (start > 0) {
            start = 0;
            slope = s.xl / s.ll;
        }
        const float error = wxx + slope * slope * s.ll + start * start * w + 2 * slope * start * s.l -
                            2 * slope * s.xl - 2 * start * wx;
        if (error < best) {
            best = error;
            scale = slope;
            *least = start;
        }
    }
    return scale;
}

/* Writes the eight scales and minima of 6 bits of Q4_K and Q5_K as 12 bytes. */
static void put_scales(const uint8_t *scales, const uint8_t *mins, uint8_t *to) {
    for (int j = 0; j < 4; j++) {
        to[j] = (uint8_t)(scales[j] | scales[j + 4] >> 4 << 6);
        to[j + 4] = (uint8_t)(mins[j] | mins[j + 4] >> 4 << 6);
        to[j + 8] = (uint8_t)((scales[j + 4] & 15) | (mins[j + 4] & 15) << 4);
    }
}

/* Q4_K (last 15) and Q5_K (last 31): d, dmin, scales, then for Q5_K the fifth bits, then nibbles. */
static void write_offset_super(const float *x, int last, uint8_t *out) {
    enum { PARTS = SUPER / BLOCK, MAX = 63 };
    float scale[PARTS], least[PARTS], most_scale = 0, most_least = 0;
    uint8_t codes[SUPER], scales[PARTS], mins[PARTS], *fifth = out + 16, *nibbles = last == 15 ? fifth : fifth + 32;
    for (int p = 0; p < PARTS; p++) {
        scale[p] = fit_line(x + p * BLOCK, last, &least[p]);
        most_scale = scale[p] > most_scale ? scale[p] : most_scale;
        most_least = -least[p] > most_least ? -least[p] : most_least;
    }
    put_half(out, most_scale / MAX);
    put_half(out + 2, most_least / MAX);
    const float d = mp_half_load(out), dmin = mp_half_load(out + 2);
    for (int p = 0; p < PARTS; p++) {
        scales[p] = (uint8_t)to_int(nearest(most_scale > 0 ? scale[p] / most_scale * MAX : 0), 0, MAX);
        mins[p] = (uint8_t)to_int(nearest(most_least > 0 ? -least[p] / most_least * MAX : 0), 0, MAX);
        const float step = d * (float)scales[p], offset = dmin * (float)mins[p];
        for (int i = 0; i < BLOCK; i++)
            codes[p * BLOCK + i] =
                step > 0 ? (uint8_t)nearest_within((x[p * BLOCK + i] + offset) / step, 0, last) : 0;
    }
    put_scales(scales, mins, out + 4);
    if (last > 15)
        memset(fifth, 0, 32);
    for (int p = 0; p < PARTS; p += 2)
        for (int i = 0; i < BLOCK; i++) {
            const uint8_t one = codes[p * BLOCK + i], two = codes[(p + 1) * BLOCK + i];
            nibbles[p / 2 * BLOCK + i] = (uint8_t)((one & 15) | (two & 15) << 4);
            if (last > 15)
                fifth[i] |= (uint8_t)((one >> 4) << p | (two >> 4) << (p + 1));
        }
}

/* Finds the scale of 16 values for codes -32 to 31 by weighted least squares, with the squares of the values as
 * weights. The scale may be negative: then the value of the greatest magnitude becomes -32. */
static float fit_scale(const float *x) {
    enum { N = 16, TRIALS = 19, HALF = 32 };
    float weights[N], most = 0, best = 0, scale = 0;
    for (int i = 0; i < N; i++) {
        weights[i] = x[i] * x[i];
        most = fabsf(x[i]) > fabsf(most) ? x[i] : most;
    }
    if (!(fabsf(most) > 1e-15f))
        return 0;
    for (int t = 0; t < TRIALS; t++) {
        const float inverse = -((float)HALF + 0.1f * (float)(t - TRIALS / 2)) / most;
        const sums s = code_sums(x, weights, N, 0, inverse, -HALF, HALF - 1);
        if (s.ll > 0 && s.xl * s.xl > best * s.ll) { /* the error is the sum of w x x, minus this quotient */
            best = s.xl * s.xl / s.ll;
            scale = s.xl / s.ll;
        }
    }
    return scale;
}

/* Q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, d. */
static void write_q6_k(const float *x, uint8_t *out) {
    enum { PART = 16, PARTS = SUPER / PART, HALF = 32 };
    float scale[PARTS], most = 0;
    uint8_t codes[SUPER];
    for (int p = 0; p < PARTS; p++) {
        scale[p] = fit_scale(x + p * PART);
        most = fabsf(scale[p]) > fabsf(most) ? scale[p] : most;
    }
    put_half(out + 208, most / -128);
    const float d = mp_half_load(out + 208);
    for (int p = 0; p < PARTS; p++) {
        const int whole = most != 0 ? nearest_within(scale[p] / most * -128, -128, 127) : 0;
        const float step = d * (float)whole;
        out[192 + p] = (uint8_t)(int8_t)whole;
        for (int i = 0; i < PART; i++)
            codes[p * PART + i] =
                (uint8_t)(HALF + (step != 0 ? nearest_within(x[p * PART + i] / step, -HALF, HALF - 1) : 0));
    }
    for (int half = 0; half < 2; half++) {
        const uint8_t *from = codes + half * 128;
        uint8_t *low = out + half * 64, *high = out + 128 + half * 32;
        for (int i = 0; i < 32; i++) {
            low[i] = (uint8_t)((from[i] & 15) | (from[i + 64] & 15) << 4);
            low[i + 32] = (uint8_t)((from[i + 32] & 15) | (from[i + 96] & 15) << 4);
            high[i] = (uint8_t)(from[i] >> 4 | from[i + 32] >> 4 << 2 | from[i + 64] >> 4 << 4 |
                                from[i + 96] >> 4 << 6);
        }
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

bool mp_can_quantize(mp_dtype dtype) {
    switch (dtype) {
    case MP_F32: case MP_F16: case MP_BF16: case MP_Q4_0: case MP_Q4_1: case MP_Q5_0: case MP_Q5_1: case MP_Q8_0:
    case MP_Q4_K: case MP_Q5_K: case MP_Q6_K:
        return true;
    default:
        return false;
    }
}

static void write_block(mp_dtype dtype, const float *x, uint8_t *out) {
    switch (dtype) {
    case MP_Q4_0: write_signed(x, 8, out); break;
    case MP_Q5_0: write_signed(x, 16, out); break;
    case MP_Q4_1: write_offset(x, 15, out); break;
    case MP_Q5_1: write_offset(x, 31, out); break;
    case MP_Q8_0: write_q8_0(x, out); break;
    case MP_Q4_K: write_offset_super(x, 15, out); break;
    case MP_Q5_K: write_offset_super(x, 31, out); break;
    default: write_q6_k(x, out); break;
    }
}

void mp_quantize_row(mp_dtype dtype, const float *x, int64_t n, uint8_t *out) {
    const mp_dtype_row *row = mp_dtype_get(dtype);
    assert(mp_can_quantize(dtype) && n % row->items == 0);
    if (dtype == MP_F32)
        memcpy(out, x, (size_t)n * sizeof *x);
    else if (dtype == MP_F16)
        write_f16(x, n, out);
    else if (dtype == MP_BF16)
        write_bf16(x, n, out);
    else
        for (int64_t k = 0; k < n; k += row->items, out += row->bytes)
            write_block(dtype, x + k, out);
}
