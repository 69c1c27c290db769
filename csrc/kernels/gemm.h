/* gemm.h: what the gemm kernels of every kind share (internal to kernels/). */
#ifndef MP_KERNELS_GEMM_H
#define MP_KERNELS_GEMM_H

#include "kernels/kernels.h"

/* Finish a tile: out[r][c] = act(tile[r][c] + bias[n + c]) + residual[m + r, n + c], stored to y[m + r, n + c].
 * tile [rows, ld], overwritten; cols <= ld. ep may be NULL or all empty: then the tile is stored as it is.
 * bias, residual and y are the pointers of the whole matrix (row 0, column 0), as in mp_gemm. A kernel that has already
 * added the bias passes a copy of ep whose bias is NULL. Tiles with ld == cols cost one call of `activate`. */
void mp_gemm_store(const mp_epilogue *ep, int m, int n, int rows, int cols, float *tile, int ld, float *y, int64_t ldy);

#endif
