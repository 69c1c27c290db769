/* nn/norm.h: RMS norms and layer norms of rows. */
#ifndef MP_MODELS_NN_NORM_H
#define MP_MODELS_NN_NORM_H

#include "models/nn/builder.h"

typedef struct mp_norm {
    float *weight, *bias; /* [n]; weight NULL: the network has no such norm; bias NULL: no bias */
    int32_t n;
    float eps;
    bool root; /* RMS norm; otherwise layer norm */
} mp_norm;

typedef enum mp_norm_bias { MP_NORM_NO_BIAS, MP_NORM_BIAS, MP_NORM_BIAS_IF_THERE } mp_norm_bias;

/* Has the builder load tensor `name`.weight, with `offset` added to each value, and `name`.bias. `like` gives n, eps
 * and root. `norm` must not move until the builder has finished. */
mp_status mp_norm_read(mp_norm *norm, const mp_builder *builder, const char *name, mp_norm like, mp_norm_bias bias,
                       float offset, mp_error *error);

/* y [n] = norm of x [n]; y may be x. */
static inline void mp_norm_row(const mp_norm *norm, const float *x, float *y) {
    const mp_kernels *call = mp_kernels_get();
    if (norm->root)
        call->rms_norm(x, norm->weight, norm->eps, norm->n, y);
    else
        call->layer_norm(x, norm->weight, norm->bias, norm->eps, norm->n, y);
}

/* Norms the thread's share of M rows: y [M, ldy] = norm(x [M, ldx]); y may be x. No barrier. */
void mp_norm_rows(const mp_norm *norm, const mp_team_thread *thread, int64_t M, const float *x, int64_t ldx, float *y,
                  int64_t ldy);

#endif
