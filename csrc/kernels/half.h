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

/* Load the little-endian half (the byte order of GGUF) at any address. */
static inline float mp_half_load(const uint8_t *from) {
    return mp_half_to_float((uint16_t)(from[0] | from[1] << 8));
}

#endif
