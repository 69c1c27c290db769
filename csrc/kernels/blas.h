/* blas.h: the interface of blas.c for gemm.c (internal to kernels/; the public part is in kernels.h). */
#ifndef MP_KERNELS_BLAS_H
#define MP_KERNELS_BLAS_H

#include "kernels/kernels.h"

/* y [M, ldy] = (add ? y : 0) + x [M, ldx] times w [N, ldw] transposed, K <= MP_K_CHUNK, by OpenBLAS on this thread.
 * Returns false and does nothing when no library is in use, or when OpenBLAS would choose a kernel whose bits differ
 * from ours (small products). Thread-safe; the first call loads the library. */
bool mp_blas_sgemm(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, bool add, float *y,
                   int64_t ldy);
/* Returns true if mp_blas_sgemm computes products of this size. Thread-safe; may load the library. */
bool mp_blas_takes(int M, int N, int K);
/* Like mp_blas_sgemm without `add`, for any K and with sums in the order of the library, whose bits may depend on M and
 * on the machine. Returns false and does nothing if there is no library. Thread-safe; the first call loads it. */
bool mp_blas_sgemm_fast(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y,
                        int64_t ldy);
/* mp_gemm_f32_plain without OpenBLAS: the reference of the self-test. */
void mp_gemm_f32_own(int M, int N, int K, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y,
                     int64_t ldy);

#endif
