#include "models/nn/mlp.h"

bool mp_residual_add(const mp_row_context *context, const mp_linear *linear, const float *in, int64_t ld, int M,
                     void *prepared, const mp_residual *residual) {
    const mp_kernels *call = mp_kernels_get();
    const int32_t n = residual->n;
    const bool norm = residual->after && residual->after->weight;
    float *const x = residual->x;
    mp_row_context own = *context;
    if (!in)
        own.acts = prepared;
    if (!norm && !residual->scale) {
        const mp_epilogue sum = {.residual = x, .ld_residual = n};
        mp_row_linear(&own, linear, in, ld, M, &sum, x, n);
        return true;
    }
    const mp_epilogue plain = {0};
    int64_t row0, row1;
    mp_row_linear(&own, linear, in, ld, M, &plain, residual->scratch, n);
    if (!mp_row_meet(context))
        return false;
    mp_team_split(context->thread, M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++) {
        float *out = residual->scratch + r * n;
        if (norm) {
            mp_norm_row(residual->after, out, out);
            call->add(out, n, x + r * n);
            continue;
        }
        for (int32_t i = 0; i < n; i++) /* the product is rounded before it is added: see csrc/README.md */
            x[r * n + i] += out[i] * residual->scale[i];
    }
    return true;
}

static bool has_updates(const mp_mlp *mlp) { return mlp->up.updates || mlp->down.updates; }

size_t mp_mlp_scratch(const mp_mlp *mlp, int M) {
    const size_t floats = (size_t)M * (size_t)mp_mlp_width(mlp) * sizeof(float);
    const size_t acts = mp_linear_fits(&mlp->up, &mlp->down) ? mp_linear_scratch(&mlp->down, M) : floats;
    return has_updates(mlp) && floats > acts ? floats : acts;
}

static void activate_rows(const mp_row_context *context, const mp_mlp *mlp, int M, float *inner) {
    int64_t row0, row1;
    mp_team_split(context->thread, M, 1, &row0, &row1);
    mp_kernels_get()->activate(mlp->act, (row1 - row0) * mlp->ffn, inner + row0 * mlp->ffn);
}

static void gate_rows(const mp_row_context *context, const mp_mlp *mlp, int M, float *inner) {
    const mp_kernels *call = mp_kernels_get();
    int64_t row0, row1;
    mp_team_split(context->thread, M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++) {
        float *gate = inner + r * 2 * mlp->ffn;
        call->gated(mlp->act, gate, gate + mlp->ffn, mlp->ffn, gate);
    }
}

bool mp_mlp_forward(const mp_row_context *context, const mp_mlp *mlp, const float *in, int64_t ld, int M, void *inner,
                    const mp_residual *residual) {
    const int32_t width = mp_mlp_width(mlp);
    const bool adapted = context->adapters && has_updates(mlp); /* updates are added to plain outputs */
    if (!adapted && mp_linear_fits(&mlp->up, &mlp->down)) {
        mp_linear_into(&mlp->up, &mlp->down, context->thread, in, ld, M, context->acts, mlp->act, inner);
        return mp_row_meet(context) && mp_residual_add(context, &mlp->down, NULL, 0, M, inner, residual);
    }
    const bool later = adapted && mlp->up.updates && !mlp->gated; /* the activation follows the update */
    const mp_epilogue activate = {.act = mlp->gated || later ? MP_ACT_NONE : mlp->act};
    mp_row_linear(context, &mlp->up, in, ld, M, &activate, inner, width);
    if (!mp_row_meet(context))
        return false;
    if (mlp->gated || later) {
        (mlp->gated ? gate_rows : activate_rows)(context, mlp, M, inner);
        if (!mp_row_meet(context))
            return false;
    }
    return mp_residual_add(context, &mlp->down, inner, width, M, NULL, residual);
}
