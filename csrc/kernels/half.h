/* half.h: convert half precision to single, one value at a time, without instructions that a CPU may lack.
 *
 * Exact for every input. NaNs become quiet, as in hardware. Unaffected by flush-to-zero, because a subnormal half
 * converts to a normal float. The code has no branches, so that loops over it vectorise. */
#ifndef MP_KERNELS_HALF_H
#define MP_KERNELS_HALF_H

#include <stdint.h>
#include <string.h>

static inline float mp_half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t rest = half & 0x7fffu;
    float subnormal = (float)(int32_t)rest * 0x1p-24f;
    uint32_t subnormal_bits;
    memcpy(&subnormal_bits, &subnormal, sizeof subnormal_bits);
    /* masks instead of ?:, so that the compiler vectorises loops around this function */
    uint32_t is_subnormal = -(uint32_t)(rest < 0x400u), is_special = -(uint32_t)(rest >= 0x7c00u);
    uint32_t is_nan = -(uint32_t)(rest > 0x7c00u), rebias = 112u << 23;
    uint32_t bits = ((rest << 13) + rebias + (is_special & rebias)) | (is_nan & 0x400000u);
    bits = (bits & ~is_subnormal) | (subnormal_bits & is_subnormal);
    bits |= sign;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to nearest even. Values beyond the range become infinite, NaN stays NaN. */
static inline uint16_t mp_half_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (rest >= 0x477ff000u) /* 65520: the midpoint above the greatest half */
        return (uint16_t)(sign | 0x7c00u);
    if (rest < 0x38800000u) { /* below 2^-14: a multiple of 2^-24, which adding 0.5 rounds to */
        float magnitude;
        memcpy(&magnitude, &rest, sizeof magnitude);
        magnitude += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &magnitude, sizeof rounded);
        return (uint16_t)(sign | (rounded - 0x3f000000u));
    }
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13));
}

/* Load the little-endian half (the byte order of GGUF) at any address. */
static inline float mp_half_load(const uint8_t *from) {
    return mp_half_to_float((uint16_t)(from[0] | from[1] << 8));
}

#endif
