/* blas.h: what gemm.c asks of blas.c (internal to kernels/; the public part is in kernels.h). */
#ifndef MP_KERNELS_BLAS_H
#define MP_KERNELS_BLAS_H

#include "kernels/kernels.h"

/* y [M, ldy] = (add ? y : 0) + x [M, ldx] times w [N, ldw] transposed, K <= MP_K_CHUNK, by OpenBLAS on this thread.
 * false, and nothing done, when the product is too small for bits equal to ours, or no library serves. */
bool mp_blas_sgemm(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, bool add, float *y,
                   int64_t ldy);
/* mp_gemm_f32_plain without OpenBLAS; what its self-test compares with. */
void mp_gemm_f32_own(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y,
                     int64_t ldy);

#endif
