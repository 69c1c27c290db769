/* i8_scale.h: the scale of activations in int8, for the vector kernels (slots acts_i8 and acts_q8). The reference
 * kernels compute it on their own, as a check. */
#ifndef MP_KERNELS_SIMD_I8_SCALE_H
#define MP_KERNELS_SIMD_I8_SCALE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Sets *scale to maximum / 127, and returns the factor 127 / maximum. `bits` are those of the largest magnitude, as an
 * unsigned integer: infinity and NaN are the largest. Returns 0 if every code must be 0: *scale is then NaN if a
 * component is not finite, or 0 if the factor would overflow (maximum below 4e-37). Do not multiply by 0: a component
 * may be NaN. */
static inline float mp_i8_factor(uint32_t bits, float *scale) {
    float max;
    memcpy(&max, &bits, sizeof max);
    const float factor = 127.0f / max;
    const bool finite = bits < 0x7f800000u, fits = finite && factor <= 0x1.fffffep127f;
    *scale = fits ? max / 127.0f : finite ? 0.0f : __builtin_nanf("");
    return fits ? factor : 0.0f;
}

#endif
