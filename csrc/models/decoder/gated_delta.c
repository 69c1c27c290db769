/* decoder/gated_delta.c: gated delta nets (arXiv:2412.06464; Qwen3-Next, Qwen3.5). The projection of a row has the
 * parts q, k, v | z | beta | alpha. Files of Qwen3-Next join parts, and group them by key head. A convolution with SiLU
 * mixes q, k and v along the positions. Then, for each head:
 *
 *   q, k = q / |q| / sqrt(dk), k / |k|
 *   beta = sigmoid(beta), decay = exp(a * softplus(alpha + step_bias)), where a < 0
 *   S = decay * S + k (beta * (v - decay * S^T k))^T, o = S^T q
 *   y = norm(o) * SiLU(z)
 *
 * The state is the last taps - 1 rows of q, k and v before the convolution, and the matrices S [dk, dv]. Threads divide
 * the channels of the convolution, the columns of the matrices, and otherwise the rows. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "models/decoder/recurrent.h"

static mp_status gated_delta_read(const mp_layer_reader *reader, mp_mixer *mixer, mp_error *error) {
    const mp_decoder *model = reader->model;
    mp_recurrent *own = &mixer->recurrent;
    const int32_t heads = own->matrix.heads, inner = (int32_t)mp_matrix_values(&own->matrix);
    const mp_reader_part parts[] = {{"attn_qkv", own->conv.channels}, {"attn_gate", inner}, {"ssm_beta", heads},
                                    {"ssm_alpha", heads}};
    const mp_reader_part joined[] = {{"ssm_in", own->conv.channels + inner}, {"ssm_ba", 2 * heads}};
    mp_reader_part in[4];
    int count = 0;
    const mp_reader_part out = {"ssm_out", model->hidden};
    char name[64];
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", reader->index, joined[i].name);
        const bool whole = mp_weights_has(model->weights, name);
        in[count++] = whole ? joined[i] : parts[2 * i];
        if (!whole)
            in[count++] = parts[2 * i + 1];
    }
    MP_TRY(mp_reader_linear(reader, &own->in, in, count, model->hidden, 1, error));
    MP_TRY(mp_reader_conv(reader, &own->conv, "ssm_conv1d", error));
    MP_TRY(mp_reader_decay(reader, &own->decay, heads, error));
    snprintf(name, sizeof name, "blk.%d.ssm_dt.bias", reader->index);
    MP_TRY(mp_builder_vector(reader->builder, &own->step_bias, name, heads, error));
    /* this norm multiplies by its weight in every family, whatever norm_offset is */
    snprintf(name, sizeof name, "blk.%d.ssm_norm", reader->index);
    MP_TRY(mp_norm_read(&own->norm, reader->builder, name,
                        (mp_norm){.n = own->matrix.dv, .eps = model->like.eps, .root = true}, MP_NORM_NO_BIAS, 0,
                        error));
    return mp_reader_linear(reader, &mixer->out, &out, 1, inner, model->residual_scale, error);
}

/* Columns of z and of the gates beta, alpha in `projected`. */
static int64_t z_column(const mp_recurrent *own) { return own->conv.channels; }
static int64_t gates_column(const mp_recurrent *own) { return own->in.N - 2 * own->matrix.heads; }

/* The tensors ssm_in and ssm_ba of the file hold joined parts. */
static bool joins_inputs(const mp_recurrent *own) { return own->in.w[0].N != own->conv.channels; }
static bool joins_gates(const mp_recurrent *own) { return own->in.w[own->in.parts - 1].N != own->matrix.heads; }

static void gated_delta_needs(const mp_decoder *model, const mp_mixer *mixer, int M, int most_blocks,
                              mp_block_needs *needs) {
    mp_recurrent_needs(model, mixer, M, most_blocks, needs);
    mp_needs_scratch(needs, 0, mp_arena_cost(2 * (size_t)mixer->recurrent.matrix.dk * sizeof(float)));
    if (joins_inputs(&mixer->recurrent) || joins_gates(&mixer->recurrent))
        mp_needs_scratch(needs, 0, mp_arena_cost((size_t)mixer->recurrent.in.N * sizeof(float)));
}

/* Reorders `count` parts of a row from one key head after another to one part after another. sizes: components of a key
 * head in each part. spare: scratch as long as the row. */
static void separate(float *row, int keys, const int *sizes, int count, float *spare) {
    ptrdiff_t each = 0, at = 0;
    for (int p = 0; p < count; p++)
        each += sizes[p];
    memcpy(spare, row, (size_t)(keys * each) * sizeof *row);
    for (int p = 0; p < count; at += sizes[p++])
        for (int h = 0; h < keys; h++, row += sizes[p])
            memcpy(row, spare + h * each + at, (size_t)sizes[p] * sizeof *row);
}

/* Separates the joined parts of the thread's share of the rows. Ends with a barrier if there are such parts. */
static void separate_parts(const mp_decoder_view *view, const mp_recurrent *own, const mp_recurrent_buffers *at) {
    const mp_matrix_heads *matrix = &own->matrix;
    const int group = matrix->heads / matrix->keys;
    const int inputs[] = {matrix->dk, matrix->dk, group * matrix->dv, group * matrix->dv}, gates[] = {group, group};
    if (!joins_inputs(own) && !joins_gates(own))
        return;
    mp_team_loop loop = mp_team_rows(view->context.thread, view->rows, own->in.N);
    while (mp_team_next(view->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const row = at->projected + r * own->in.N, *const spare = (float *)(void *)view->own;
            if (joins_inputs(own))
                separate(row, matrix->keys, inputs, 4, spare);
            if (joins_gates(own))
                separate(row + gates_column(own), matrix->keys, gates, 2, spare);
        }
    mp_team_barrier(view->context.thread);
}

/* Norms the queries and keys of the thread's share of the rows, and computes beta and decay in their columns of
 * `projected`. */
static void prepare(const mp_decoder_view *view, const mp_recurrent *own, const mp_recurrent_buffers *at) {
    const float epsilon = 1e-6f; /* added to |q|^2 and |k|^2 */
    const mp_kernels *call = mp_kernels_get();
    const mp_matrix_heads *matrix = &own->matrix;
    const int dk = matrix->dk, heads = matrix->heads;
    /* x / |x| = rms_norm(x) / sqrt(dk) */
    const float eps = epsilon / (float)dk, unit = 1.0f / sqrtf((float)dk);
    float *const q_weight = (float *)(void *)view->own, *const k_weight = q_weight + dk;
    for (int i = 0; i < dk; i++) {
        q_weight[i] = 1.0f / (float)dk;
        k_weight[i] = unit;
    }
    mp_team_loop loop = mp_team_rows(view->context.thread, view->rows, 2 * (int64_t)matrix->keys * dk);
    while (mp_team_next(view->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const row = at->mixed + r * own->conv.channels;
            float *const beta = at->projected + r * own->in.N + gates_column(own), *const decay = beta + heads;
            for (int h = 0; h < 2 * matrix->keys; h++)
                call->rms_norm(row + h * dk, h < matrix->keys ? q_weight : k_weight, eps, dk, row + h * dk);
            call->activate(MP_ACT_SIGMOID, heads, beta);
            call->add(own->step_bias, heads, decay);
            mp_softplus(decay, heads);
            for (int h = 0; h < heads; h++)
                decay[h] *= own->decay[h];
            call->exp_sum(decay, heads, 0, decay);
        }
}

/* Norms and gates the thread's share of the rows of o. */
static void finish(const mp_decoder_view *view, const mp_recurrent *own, const mp_recurrent_buffers *at, float scale) {
    const mp_kernels *call = mp_kernels_get();
    const int64_t width = mp_matrix_values(&own->matrix);
    mp_team_loop loop = mp_team_rows(view->context.thread, view->rows, width);
    while (mp_team_next(view->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const o = at->o + r * width;
            for (int h = 0; h < own->matrix.heads; h++)
                mp_norm_row(&own->norm, o + (ptrdiff_t)h * own->matrix.dv, o + (ptrdiff_t)h * own->matrix.dv);
            call->gated(MP_ACT_SILU, at->projected + r * own->in.N + z_column(own), o, width, o);
            for (int64_t i = 0; i < width && scale != 1; i++)
                o[i] *= scale;
        }
}

static mp_mixed gated_delta_mix(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_mixer *mixer,
                                const float *in, float scale) {
    const mp_recurrent *own = &mixer->recurrent;
    const mp_matrix_heads *matrix = &own->matrix;
    const mp_team_thread *thread = view->context.thread;
    const int64_t channels = own->conv.channels, keys = mp_matrix_keys(matrix), values = mp_matrix_values(matrix);
    const mp_recurrent_buffers at = mp_recurrent_buffers_of(pass, own);
    const mp_state_scan rows = {.q = at.mixed, .k = at.mixed + keys, .v = at.mixed + 2 * keys, .o = at.o,
                                .beta = at.projected + gates_column(own),
                                .decay = at.projected + gates_column(own) + matrix->heads, .ldq = channels,
                                .ldk = channels, .ldv = channels, .ldo = values, .ld_gates = own->in.N};
    mp_row_linear(&view->context, &own->in, in, own->in.K, view->rows, NULL, at.projected, own->in.N);
    mp_team_barrier(thread);
    separate_parts(view, own, &at);
    mp_matrix_convolve(pass, view, own, at.projected, at.mixed);
    mp_team_barrier(thread);
    prepare(view, own, &at);
    mp_team_barrier(thread);
    mp_matrix_scan(pass, view, own, &rows);
    finish(view, own, &at, scale);
    mp_team_barrier(thread);
    return (mp_mixed){at.o, values};
}

const mp_mixer_ops mp_mixer_gated_delta = {.read = gated_delta_read,
                                           .needs = gated_delta_needs,
                                           .cost = mp_matrix_cost,
                                           .mix = gated_delta_mix,
                                           .sizes = mp_matrix_mixer_sizes,
                                           .state = mp_recurrent_state};
