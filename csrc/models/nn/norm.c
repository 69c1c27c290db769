#include "models/nn/norm.h"

#include <stdio.h>

mp_status mp_norm_read(mp_norm *norm, const mp_builder *builder, const char *name, mp_norm like, mp_norm_bias bias,
                       float offset, mp_error *error) {
    char full[MP_BUILDER_NAME];
    *norm = (mp_norm){.n = like.n, .eps = like.eps, .root = like.root};
    snprintf(full, sizeof full, "%s.weight", name);
    MP_TRY(mp_builder_vector_plus(builder, &norm->weight, full, norm->n, offset, error));
    snprintf(full, sizeof full, "%s.bias", name);
    if (bias == MP_NORM_NO_BIAS || (bias == MP_NORM_BIAS_IF_THERE && !mp_weights_has(builder->weights, full)))
        return MP_OK;
    return mp_builder_vector(builder, &norm->bias, full, norm->n, error);
}

void mp_norm_rows(const mp_norm *norm, const mp_team_thread *thread, int64_t M, const float *x, int64_t ldx, float *y,
                  int64_t ldy) {
    mp_team_loop loop = mp_team_rows(thread, M, norm->n);
    while (mp_team_next(thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++)
            mp_norm_row(norm, x + r * ldx, y + r * ldy);
}
