/* iq_grids.h: the grid points of the IQ types, as indices into the value tables of those types (dequantize.c). A point
 * is 8 indices of 2 bits or 4 indices of 3 bits, the first in the lowest bits.
 *
 * The grids are part of the GGUF format. They follow from no formula, and GGUF files do not contain them
 * (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). */
#ifndef MP_KERNELS_IQ_GRIDS_H
#define MP_KERNELS_IQ_GRIDS_H

#include <stdint.h>

extern const uint16_t mp_iq2_xxs_grid[256], mp_iq2_xs_grid[512], mp_iq2_s_grid[1024]; /* 8 indices into {8, 25, 43} */
extern const uint16_t mp_iq3_xxs_grid[256], mp_iq3_s_grid[512];                       /* 4 indices into 8 values */
extern const uint16_t mp_iq1_grid[2048];                                              /* 8 indices into {-1, 0, 1} */

#endif
