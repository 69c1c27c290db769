/* iq_grids.h: the points that the blocks of the IQ types name, as indices into the numbers of those types
 * (dequantize.c): 8 indices of 2 bits, or 4 of 3 bits, the first in the lowest bits.
 *
 * They are facts of the GGUF format, which neither follow from a rule nor stand in files
 * (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). */
#ifndef MP_KERNELS_IQ_GRIDS_H
#define MP_KERNELS_IQ_GRIDS_H

#include <stdint.h>

extern const uint16_t mp_iq2_xxs_grid[256], mp_iq2_xs_grid[512], mp_iq2_s_grid[1024]; /* 8 of 8, 25, 43 */
extern const uint16_t mp_iq3_xxs_grid[256], mp_iq3_s_grid[512];                       /* 4 of eight numbers */
extern const uint16_t mp_iq1_grid[2048];                                              /* 8 of -1, 0, 1 */

#endif
