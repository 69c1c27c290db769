/* image/bounded.c: layers of image networks whose linear parts clamp their inputs and outputs. Each part may have other
 * bounds, so parts that share their input in other layers (queries, keys and values; gate and up) each read a copy. */
#include "models/image/vit.h"

#include <math.h>

/* y [n] = x [n] within the bounds; y may be x. NaN stays NaN. */
static void clamp(const float *low, const float *high, int64_t n, const float *x, float *y) {
    const float least = low ? *low : -INFINITY, most = high ? *high : INFINITY;
    for (int64_t i = 0; i < n; i++) {
        const float raised = x[i] < least ? least : x[i];
        y[i] = raised > most ? most : raised;
    }
}

static void clamp_output(const mp_vit_bounds *bounds, int64_t n, float *x) {
    clamp(bounds->output_min, bounds->output_max, n, x, x);
}

/* Computes part `part` of a layer from a clamped copy of `in` [M, hidden]. Ends WITHOUT a barrier. */
static void run_part(const mp_row_context *context, const mp_linear *linear, int part, const mp_vit_bounds *bounds,
                     const mp_transformer_rows *rows, const float *in, float *copy, float *out, int64_t ld) {
    const mp_linear one = mp_linear_view(linear, part, 1);
    const int64_t hidden = rows->hidden;
    mp_team_loop loop = mp_team_rows(context->thread, rows->M, hidden);
    while (mp_team_next(context->thread, &loop))
        clamp(bounds->input_min, bounds->input_max, (loop.end - loop.begin) * hidden, in + loop.begin * hidden,
              copy + loop.begin * hidden);
    mp_team_barrier(context->thread);
    mp_row_linear(context, &one, copy, hidden, rows->M, NULL, out, ld);
}

void mp_vit_bounded_before(const mp_row_context *context, const mp_vit_layer *layer, const mp_transformer_rows *rows) {
    const float *in = mp_transformer_normed(context, &layer->base.attention_norm, rows);
    for (int p = MP_VIT_Q; p <= MP_VIT_V; p++) {
        run_part(context, &layer->base.qkv, p - MP_VIT_Q, &layer->bounds[p], rows, in, rows->inner, rows->qkv,
                 rows->ld_qkv);
        mp_team_barrier(context->thread); /* the next part overwrites the copy */
    }
    mp_team_loop loop = mp_team_rows(context->thread, rows->M, 3 * (int64_t)rows->hidden);
    while (mp_team_next(context->thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++)
            for (int p = MP_VIT_Q; p <= MP_VIT_V; p++)
                clamp_output(&layer->bounds[p], rows->hidden,
                             rows->qkv + r * rows->ld_qkv + (p - MP_VIT_Q) * rows->hidden);
}

/* Clamps, norms and adds the outputs of a sublayer, `out` [M, hidden], in the rows that the thread takes. next: norms
 * the sums into `mixed`; NULL: does not. */
static void add_rows(const mp_row_context *context, const mp_vit_bounds *bounds, const mp_norm *after,
                     const mp_norm *next, const mp_transformer_rows *rows, float *out) {
    const int64_t hidden = rows->hidden;
    mp_team_loop loop = mp_team_rows(context->thread, rows->M, hidden);
    while (mp_team_next(context->thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const row = out + r * hidden;
            clamp_output(bounds, hidden, row);
            mp_norm_row(after, row, row);
            mp_kernels_get()->add(row, hidden, rows->x + r * hidden);
            if (next)
                mp_norm_row(next, rows->x + r * hidden, rows->mixed + r * hidden);
        }
}

void mp_vit_bounded_after(const mp_row_context *context, const mp_vit_layer *layer, const mp_transformer_rows *rows) {
    const mp_transformer_layer *base = &layer->base;
    const mp_vit_bounds *bounds = layer->bounds;
    const mp_mlp *mlp = &base->ffn.mlp;
    const int64_t ffn = mlp->ffn, width = 2 * ffn;
    float *const out = rows->qkv, *const inner = rows->inner; /* attention no longer reads the queries of any row */
    run_part(context, &base->out, 0, &bounds[MP_VIT_OUT], rows, rows->mixed, rows->mixed, out, rows->hidden);
    mp_team_barrier(context->thread);
    add_rows(context, &bounds[MP_VIT_OUT], &base->attention_after, &base->ffn_norm, rows, out);
    mp_team_barrier(context->thread);
    for (int p = MP_VIT_GATE; p <= MP_VIT_UP; p++) {
        run_part(context, &mlp->up, p - MP_VIT_GATE, &bounds[p], rows, rows->mixed, out, inner, width);
        mp_team_barrier(context->thread);
    }
    mp_team_loop loop = mp_team_rows(context->thread, rows->M, width);
    while (mp_team_next(context->thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const row = inner + r * width;
            clamp_output(&bounds[MP_VIT_GATE], ffn, row);
            clamp_output(&bounds[MP_VIT_UP], ffn, row + ffn);
            mp_kernels_get()->gated(mlp->act, row, row + ffn, ffn, row);
            clamp(bounds[MP_VIT_DOWN].input_min, bounds[MP_VIT_DOWN].input_max, ffn, row, row);
        }
    mp_team_barrier(context->thread);
    mp_row_linear(context, &mlp->down, inner, width, rows->M, NULL, out, rows->hidden);
    mp_team_barrier(context->thread);
    add_rows(context, &bounds[MP_VIT_DOWN], &base->ffn_after, NULL, rows, out);
}
