/* quantize.h: rows of fp32 to stored types, the inverse of mp_dequantize_row. */
#ifndef MP_KERNELS_QUANTIZE_H
#define MP_KERNELS_QUANTIZE_H

#include "kernels/kernels.h"

/* True for F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K. */
bool mp_can_quantize(mp_dtype dtype);
/* Converts n values, a multiple of the block size of `dtype`, to blocks at `out`. Floats are rounded to nearest even.
 * Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 have the bytes that the `gguf` package writes. For Q4_K, Q5_K and Q6_K, the scales
 * are searched for a small weighted squared error. The result is the same on every machine. NaN and infinities give
 * blocks of unspecified values: the caller must refuse them before the call (slot all_finite). */
void mp_quantize_row(mp_dtype dtype, const float *x, int64_t n, uint8_t *out);

#endif
