/* epilogue.h: what every gemm kernel does to a finished tile. Implemented in gemm.c. */
#ifndef MP_KERNELS_EPILOGUE_H
#define MP_KERNELS_EPILOGUE_H

#include "kernels/kernels.h"

/* + bias[n]; act; + residual[m, n], in place on the tile of rows [m0, m1) and columns [n0, n1) of the output.
 * tile points at the tile's own first value: element (m, n) is tile[(m - m0) * ld + (n - n0)]. bias and residual are
 * indexed by m and n themselves. ep NULL does nothing.
 *
 * The residual may be the output itself, so a kernel that has an epilogue must not store raw sums into y first: it
 * applies the epilogue to a tile on its stack and copies that to y. */
void mp_epilogue_apply(const mp_epilogue *ep, int m0, int m1, int n0, int n1, float *tile, int64_t ld);

#endif
