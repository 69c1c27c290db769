#include "models/nn/mlp.h"

#include <math.h>
#include <string.h>

void mp_residual_row(const mp_residual *residual, const float *out, int64_t row) {
    float *const x = residual->x + row * residual->n;
    mp_kernels_get()->add(out, residual->n, x);
    for (int32_t i = 0; residual->total && i < residual->n; i++)
        x[i] *= *residual->total;
}

bool mp_residual_add(const mp_row_context *context, const mp_linear *linear, const float *in, int64_t ld, int M,
                     void *prepared, const mp_residual *residual) {
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
    mp_row_linear(&own, linear, in, ld, M, &plain, residual->scratch, n);
    if (!mp_row_meet(context))
        return false;
    mp_team_loop loop = mp_team_rows(context->thread, M, n);
    while (mp_team_next(context->thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *out = residual->scratch + r * n;
            if (norm) {
                mp_norm_row(residual->after, out, out);
                mp_residual_row(residual, out, r);
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

size_t mp_mlp_most_scratch(const mp_mlp *mlp, int M) {
    const size_t floats = (size_t)M * (size_t)mp_mlp_width(mlp) * sizeof(float), acts = mp_mlp_scratch(mlp, M);
    return floats > acts ? floats : acts;
}

size_t mp_mlp_own_scratch(const mp_mlp *mlp) { return MP_PRIVATE_ROWS * (size_t)mlp->ffn * sizeof(float); }

/* Returns the factor on the inputs of `down` of a row. */
static float row_factor(const mp_mlp *mlp, const float *in, float scale) {
    const mp_kernels *call = mp_kernels_get();
    if (!mlp->row_gate)
        return scale;
    float gate = call->dot(in, mlp->row_gate, mlp->up.w[0].K);
    call->activate(MP_ACT_SIGMOID, 1, &gate);
    return scale * gate;
}

/* See `sparse` of mp_mlp. Sums in double: a gate at the border may be 0 or not. */
static void cut_gates(float deviations, const float *gates, int64_t n, float *to) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)gates[i];
    const double mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++)
        squares += ((double)gates[i] - mean) * ((double)gates[i] - mean);
    const float from = (float)(mean + (double)deviations * sqrt(squares / (double)n));
    for (int64_t i = 0; i < n; i++)
        to[i] = gates[i] > from ? gates[i] - from : gates[i] <= from ? 0 : gates[i]; /* NaN stays NaN */
}

/* Computes the inputs of `down` of a row. */
static void activate_row(const mp_row_context *context, const mp_mlp *mlp, float factor, int64_t r, const float *row,
                         float *to) {
    const mp_kernels *call = mp_kernels_get();
    const int64_t ffn = mlp->ffn;
    const bool scaled = mlp->gated && mlp->gate_scale != 0 && mlp->gate_scale != 1;
    for (int64_t i = 0; scaled && i < ffn; i++)
        to[i] = row[i] * mlp->gate_scale;
    if (mlp->sparse != 0)
        cut_gates(mlp->sparse, scaled ? to : row, ffn, to);
    if (mlp->gated) {
        call->gated(mlp->act, scaled || mlp->sparse != 0 ? to : row, row + ffn, ffn, to);
    } else {
        if (to != row)
            memcpy(to, row, (size_t)ffn * sizeof *to);
        call->activate(mlp->act, ffn, to);
    }
    for (int64_t i = 0; mlp->has_inputs && i < ffn; i++)
        to[i] *= context->inputs[r][mlp->inputs_from + i];
    for (int64_t i = 0; factor != 1 && i < ffn; i++)
        to[i] *= factor;
}

/* Computes the inputs of `down` of the rows that the thread takes in place, or of all rows in `own`, if it is not NULL.
 * in: the rows that the network reads, *ld apart. Returns the result, and the distance of its rows in *ld. */
static const float *activate_rows(const mp_row_context *context, const mp_mlp *mlp, const float *in, int M,
                                  float scale, float *inner, float *own, int64_t *ld) {
    const int64_t ffn = mlp->ffn, width = mp_mlp_width(mlp);
    const mp_team_thread single = mp_team_single(), *const thread = own ? &single : context->thread;
    float *const out = own ? own : inner;
    const int64_t ld_in = *ld;
    *ld = own ? ffn : width;
    mp_team_loop loop = mp_team_rows(thread, M, width);
    while (mp_team_next(thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++)
            activate_row(context, mlp, row_factor(mlp, in + r * ld_in, scale), r, inner + r * width, out + r * *ld);
    return out;
}

bool mp_mlp_add(const mp_row_context *context, const mp_mlp *mlp, const float *in, int64_t ld, int M, float scale,
                void *inner, void *own, const mp_residual *residual) {
    const int32_t width = mp_mlp_width(mlp);
    const bool adapted = context->adapters && has_updates(mlp); /* updates are added to plain outputs */
    const bool factor = scale != 1 || mlp->row_gate || mlp->has_inputs || mlp->sparse != 0;
    if (!adapted && M >= context->least_joined && !factor && mp_linear_fits(&mlp->up, &mlp->down)) {
        mp_linear_into(&mlp->up, &mlp->down, context->thread, in, ld, M, context->acts, mlp->act, inner);
        return mp_row_meet(context) && mp_residual_add(context, &mlp->down, NULL, 0, M, inner, residual);
    }
    /* the activation follows gates, updates of adapters, and the product that the factor changes */
    const bool later = mlp->gated || (adapted && mlp->up.updates) || factor;
    const mp_epilogue activate = {.act = later ? MP_ACT_NONE : mlp->act};
    mp_row_linear(context, &mlp->up, in, ld, M, &activate, inner, width);
    if (!mp_row_meet(context))
        return false;
    if (!later)
        return mp_residual_add(context, &mlp->down, inner, width, M, NULL, residual);
    float *const own_rows = M <= MP_PRIVATE_ROWS ? own : NULL;
    in = activate_rows(context, mlp, in, M, scale, inner, own_rows, &ld);
    if (!own_rows && !mp_row_meet(context))
        return false;
    return mp_residual_add(context, &mlp->down, in, ld, M, NULL, residual);
}
