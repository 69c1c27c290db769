/* decoder/mamba2.c: Mamba-2 (arXiv:2405.21060; Granite 4 H, Nemotron-H, Falcon-H1). The projection of a row has the
 * parts z | x, B, C | step. A convolution with SiLU mixes x, B and C along the positions. Then, for each head, whose B
 * and C are those of its group:
 *
 *   step = clamp(softplus(step + step_bias)), decay = exp(a * step), where a < 0
 *   S = decay * S + B (step * x)^T, o = S^T C + skip * x
 *   y = norm(o * SiLU(z)), where all components of a group are normed together
 *
 * In some models, SiLU(z) follows the norm, or there is no norm. The state is the last taps - 1 rows of x, B and C
 * before the convolution, and the matrices S [dk, dv]. Threads divide the channels of the convolution, the columns of
 * the matrices, and otherwise the rows. */
#include <math.h>
#include <stdio.h>

#include "models/decoder/recurrent.h"

static mp_status read_norm(const mp_layer_reader *reader, mp_recurrent *own, mp_error *error) {
    const int32_t inner = own->matrix.heads * own->matrix.dv;
    char name[64];
    snprintf(name, sizeof name, "blk.%d.ssm_norm.weight", reader->index);
    if (!mp_weights_has(reader->model->weights, name))
        return MP_OK;
    own->norm = (mp_norm){.n = inner / own->matrix.keys, .eps = reader->model->like.eps, .root = true};
    return mp_builder_vector(reader->builder, &own->norm.weight, name, inner, error);
}

/* Reads the factors on the parts of the projection, if the spec has any. */
static mp_status read_scales(const mp_spec *spec, mp_recurrent *own, mp_error *error) {
    const mp_value *list = mp_spec_find(spec, "mpool.ssm_scales");
    if (!list)
        return MP_OK;
    if (list->type != MP_VALUE_FLOATS || list->count != 5)
        return mp_fail(error, MP_FORMAT, "`mpool.ssm_scales` must be five numbers");
    for (int i = 0; i < 5; i++)
        own->scales[i] = (float)list->as.reals[i];
    return MP_OK;
}

static mp_status mamba2_read(const mp_layer_reader *reader, mp_mixer *mixer, mp_error *error) {
    const mp_decoder *model = reader->model;
    const mp_spec *spec = mp_weights_spec(model->weights);
    mp_recurrent *own = &mixer->recurrent;
    const int32_t heads = own->matrix.heads, inner = heads * own->matrix.dv;
    const mp_reader_part in = {"ssm_in", inner + own->conv.channels + heads}, out = {"ssm_out", model->hidden};
    double low, high, none = 0, any = INFINITY;
    char name[64];
    MP_TRY(mp_spec_float(spec, "mpool.step_low", 0, 1e9, &none, &low, error));
    MP_TRY(mp_spec_float(spec, "mpool.step_high", 0, 1e9, &any, &high, error));
    MP_TRY(mp_spec_bool(spec, "mpool.norm_then_gate", &own->norm_then_gate, &own->norm_then_gate, error));
    MP_TRY(read_scales(spec, own, error));
    own->step_low = (float)low;
    own->step_high = (float)high;
    MP_TRY(mp_reader_linear(reader, &own->in, &in, 1, model->hidden, 1, error));
    MP_TRY(mp_reader_conv(reader, &own->conv, "ssm_conv1d", error));
    MP_TRY(mp_reader_decay(reader, &own->decay, heads, error));
    snprintf(name, sizeof name, "blk.%d.ssm_dt.bias", reader->index);
    MP_TRY(mp_builder_vector(reader->builder, &own->step_bias, name, heads, error));
    snprintf(name, sizeof name, "blk.%d.ssm_d", reader->index);
    MP_TRY(mp_builder_vector(reader->builder, &own->skip, name, heads, error));
    MP_TRY(read_norm(reader, own, error));
    return mp_reader_linear(reader, &mixer->out, &out, 1, inner, model->residual_scale, error);
}

/* Multiplies the parts of the thread's share of the rows by their factors. Ends with a barrier if there are any. */
static void scale_parts(const mp_decoder_view *view, const mp_recurrent *own, const mp_recurrent_buffers *at) {
    const int64_t keys = mp_matrix_keys(&own->matrix), values = mp_matrix_values(&own->matrix);
    const int64_t widths[] = {values, values, keys, keys, own->matrix.heads};
    if (own->scales[0] == 0)
        return;
    mp_team_loop loop = mp_team_rows(view->context.thread, view->rows, own->in.N);
    while (mp_team_next(view->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *part = at->projected + r * own->in.N;
            for (int p = 0; p < 5; part += widths[p++])
                for (int64_t i = 0; i < widths[p]; i++)
                    part[i] *= own->scales[p];
        }
    mp_team_barrier(view->context.thread);
}

/* Computes step * x and the decays of the thread's share of the rows, in the columns of x and step of `projected`. */
static void prepare(const mp_decoder_view *view, const mp_recurrent *own, const mp_recurrent_buffers *at) {
    const mp_kernels *call = mp_kernels_get();
    const int heads = own->matrix.heads, dv = own->matrix.dv;
    const int64_t channels = own->conv.channels;
    mp_team_loop loop = mp_team_rows(view->context.thread, view->rows, (int64_t)heads * dv);
    while (mp_team_next(view->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            const float *x = at->mixed + r * channels;
            float *v = at->projected + r * own->in.N + heads * dv, *const step = v + channels;
            call->add(own->step_bias, heads, step);
            mp_softplus(step, heads);
            for (int h = 0; h < heads; h++, x += dv, v += dv) {
                step[h] = step[h] < own->step_low ? own->step_low : step[h] > own->step_high ? own->step_high : step[h];
                for (int i = 0; i < dv; i++)
                    v[i] = step[h] * x[i];
                step[h] *= own->decay[h];
            }
            call->exp_sum(step, heads, 0, step);
        }
}

static void norm_groups(const mp_recurrent *own, float *y) {
    mp_norm group = own->norm;
    for (int g = 0; g < own->matrix.keys && group.weight; g++, group.weight += group.n, y += group.n)
        mp_norm_row(&group, y, y);
}

/* Adds skip * x to the thread's share of the rows of o, and gates and norms them. */
static void finish(const mp_decoder_view *view, const mp_recurrent *own, const mp_recurrent_buffers *at, float scale) {
    const mp_kernels *call = mp_kernels_get();
    const int dv = own->matrix.dv;
    const int64_t width = mp_matrix_values(&own->matrix);
    mp_team_loop loop = mp_team_rows(view->context.thread, view->rows, width);
    while (mp_team_next(view->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            const float *const x = at->mixed + r * own->conv.channels, *const z = at->projected + r * own->in.N;
            float *const y = at->o + r * width;
            for (int h = 0; h < own->matrix.heads; h++)
                for (int i = h * dv; i < (h + 1) * dv; i++)
                    y[i] += own->skip[h] * x[i];
            if (own->norm_then_gate)
                norm_groups(own, y);
            call->gated(MP_ACT_SILU, z, y, width, y);
            if (!own->norm_then_gate)
                norm_groups(own, y);
            for (int64_t i = 0; i < width && scale != 1; i++)
                y[i] *= scale;
        }
}

static mp_mixed mamba2_mix(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_mixer *mixer,
                           const float *in, float scale) {
    const mp_recurrent *own = &mixer->recurrent;
    const mp_matrix_heads *matrix = &own->matrix;
    const mp_team_thread *thread = view->context.thread;
    const int64_t channels = own->conv.channels, values = mp_matrix_values(matrix);
    const int64_t keys = mp_matrix_keys(matrix);
    const mp_recurrent_buffers at = mp_recurrent_buffers_of(pass, own);
    const mp_state_scan rows = {.k = at.mixed + values, .q = at.mixed + values + keys, .v = at.projected + values,
                                .decay = at.projected + values + channels, .o = at.o, .ldk = channels,
                                .ldq = channels, .ldv = own->in.N, .ldo = values, .ld_gates = own->in.N};
    mp_row_linear(&view->context, &own->in, in, own->in.K, view->rows, NULL, at.projected, own->in.N);
    mp_team_barrier(thread);
    scale_parts(view, own, &at);
    mp_matrix_convolve(pass, view, own, at.projected + values, at.mixed);
    mp_team_barrier(thread);
    prepare(view, own, &at);
    mp_team_barrier(thread);
    mp_matrix_scan(pass, view, own, &rows);
    finish(view, own, &at, scale);
    mp_team_barrier(thread);
    return (mp_mixed){at.o, values};
}

const mp_mixer_ops mp_mixer_mamba2 = {.read = mamba2_read,
                                      .needs = mp_recurrent_needs,
                                      .cost = mp_matrix_cost,
                                      .mix = mamba2_mix,
                                      .sizes = mp_matrix_mixer_sizes,
                                      .state = mp_recurrent_state};
