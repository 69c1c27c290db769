/* i8_scale.h: the scale of activations in int8, for the vector kernels (slots acts_i8 and acts_q8). The reference
 * computes it on its own. */
#ifndef MP_KERNELS_SIMD_I8_SCALE_H
#define MP_KERNELS_SIMD_I8_SCALE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Returns the factor that components are multiplied by before they are rounded, 127 / maximum, and sets *scale to
 * maximum / 127. `bits`: those of the greatest magnitude, where infinity and NaN are greater than any number. Returns 0
 * if all results must be 0: if a component is not finite (*scale NaN), or if the maximum is so small (below 4e-37) that
 * the factor overflows (*scale 0). The caller must not multiply by 0, because a component may be NaN. */
static inline float mp_i8_factor(uint32_t bits, float *scale) {
    float max;
    memcpy(&max, &bits, sizeof max);
    const float factor = 127.0f / max;
    const bool finite = bits < 0x7f800000u, fits = finite && factor <= 0x1.fffffep127f;
    *scale = fits ? max / 127.0f : finite ? 0.0f : __builtin_nanf("");
    return fits ? factor : 0.0f;
}

#endif
