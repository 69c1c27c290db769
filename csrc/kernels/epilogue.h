/* epilogue.h: the operations that every gemm kernel applies to a finished tile. Implemented in gemm.c. */
#ifndef MP_KERNELS_EPILOGUE_H
#define MP_KERNELS_EPILOGUE_H

#include "kernels/kernels.h"

/* Apply + bias[n]; act; + residual[m, n], in place, to the tile of rows [m0, m1) and columns [n0, n1) of the output.
 * `tile` points at the first value of the tile: element (m, n) is tile[(m - m0) * ld + (n - n0)]. bias and residual are
 * indexed by m and n themselves. Does nothing if ep is NULL.
 *
 * The residual may be the output itself. A kernel with an epilogue must therefore not store raw sums into y: apply the
 * epilogue to a tile on the stack, then copy the tile to y. */
void mp_epilogue_apply(const mp_epilogue *ep, int m0, int m1, int n0, int n1, float *tile, int64_t ld);

#endif
