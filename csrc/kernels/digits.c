/* digits.c: see digits.h. */
#include "kernels/digits.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

size_t mp_digits_bytes(int K) {
    assert(K > 0);
    const size_t chunks = ((size_t)K + MP_K_CHUNK - 1) / MP_K_CHUNK;
    const size_t inputs = ((size_t)K + MP_DIGITS_PAD - 1) / MP_DIGITS_PAD * MP_DIGITS_PAD;
    return MP_PANEL_N * sizeof(float) + chunks * MP_DIGITS_OFFSETS + inputs / 4 * MP_DIGITS_STEP;
}

/* The value x / unit, rounded. Adding 1.5 * 2^52 leaves the integer in the low bits of a double, rounded to nearest
 * even; lrintf is a function call without SSE4.1. */
static inline int32_t rounded(float x, double inverse) {
    const double sum = (double)x * inverse + 0x1.8p52;
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return (int32_t)bits;
}

static inline float without_denormals(float x) { return fabsf(x) < FLT_MIN ? 0.0f : x; }

static float unit_of(float top) {
    if (top == 0.0f)
        return FLT_MIN;
    int exponent;
    frexpf(top, &exponent); /* top < 2^exponent */
    exponent = exponent - 23 < -126 ? -126 : exponent - 23;
    if (rounded(top, ldexp(1.0, -exponent)) > MP_DIGITS_MAX)
        exponent++;
    return ldexpf(1.0f, exponent);
}

void mp_digits_pack(const float *panel, int K, uint8_t *out) {
    float top[MP_PANEL_N] = {0}, unit[MP_PANEL_N];
    double inverse[MP_PANEL_N];
    for (int k = 0; k < K; k++)
        for (int j = 0; j < MP_PANEL_N; j++) {
            const float x = fabsf(panel[k * MP_PANEL_N + j]);
            top[j] = x > top[j] ? x : top[j];
        }
    for (int j = 0; j < MP_PANEL_N; j++) {
        unit[j] = unit_of(without_denormals(top[j]));
        inverse[j] = 1.0 / (double)unit[j];
    }
    memset(out, 0, mp_digits_bytes(K));
    memcpy(out, unit, sizeof unit);
    for (int k = 0; k < K; k += MP_K_CHUNK) {
        int32_t offset[MP_DIGITS][MP_PANEL_N] = {{0}};
        for (int i = k; i < K && i < k + MP_K_CHUNK; i++) {
            int8_t *to = (int8_t *)out + mp_digits_byte(i, 0);
            for (int j = 0; j < MP_PANEL_N; j++) {
                const int32_t q = rounded(without_denormals(panel[(int64_t)i * MP_PANEL_N + j]), inverse[j]);
                const int8_t low = (int8_t)q, middle = (int8_t)((q - low) / 256);
                const int8_t high = (int8_t)(((q - low) / 256 - middle) / 256);
                to[j * 4] = low;
                to[j * 4 + MP_DIGITS_LINE] = middle;
                to[j * 4 + 2 * MP_DIGITS_LINE] = high;
                offset[0][j] -= 128 * low;
                offset[1][j] -= 128 * middle;
                offset[2][j] -= 128 * high;
            }
        }
        memcpy(out + mp_digits_chunk(k), offset, sizeof offset);
    }
}
