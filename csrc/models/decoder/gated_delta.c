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

static int64_t values_width(const mp_matrix_heads *matrix) { return (int64_t)matrix->heads * matrix->dv; }
static int64_t keys_width(const mp_matrix_heads *matrix) { return (int64_t)matrix->keys * matrix->dk; }

static mp_status gated_delta_sizes(const mp_spec *spec, mp_mixer *mixer, mp_error *error) {
    mp_recurrent *own = &mixer->recurrent;
    int64_t taps, dk, keys, heads, inner;
    bool tiled = false;
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.conv_kernel", 2, MP_BUILDER_TAPS, NULL, &taps, error));
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.state_size", 1, MP_MATRIX_DIM, NULL, &dk, error));
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.group_count", 1, MP_MATRIX_HEADS, NULL, &keys, error));
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.time_step_rank", 1, MP_MATRIX_HEADS, NULL, &heads, error));
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.inner_size", heads, heads * MP_MATRIX_DIM, NULL, &inner, error));
    MP_TRY(mp_spec_bool(spec, "mpool.tiled_heads", &tiled, &tiled, error));
    if (heads % keys != 0 || inner % heads != 0 || 2 * keys * dk + inner > MP_RECURRENT_WIDTH)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "sizes of the gated delta net",
                            "ssm.time_step_rank a multiple of ssm.group_count, ssm.inner_size one of "
                            "ssm.time_step_rank, and at most 1,048,576 channels",
                            "%lld, %lld and %lld", (long long)heads, (long long)keys, (long long)inner);
    own->matrix = (mp_matrix_heads){(int32_t)heads, (int32_t)keys, (int32_t)dk, (int32_t)(inner / heads), tiled};
    own->conv.channels = (int32_t)(2 * keys * dk + inner);
    own->conv.taps = (int32_t)taps;
    return MP_OK;
}

static size_t gated_delta_state(const mp_mixer *mixer, size_t *log_bytes) {
    size_t conv_log, log;
    const size_t conv = mp_causal_conv_state(&mixer->recurrent.conv, &conv_log);
    const size_t matrix = mp_matrix_state(&mixer->recurrent.matrix, &log);
    *log_bytes = conv_log + log;
    return conv + matrix;
}

static mp_status gated_delta_read(const mp_layer_reader *reader, mp_mixer *mixer, mp_error *error) {
    const mp_decoder *model = reader->model;
    mp_recurrent *own = &mixer->recurrent;
    const int32_t heads = own->matrix.heads, inner = (int32_t)values_width(&own->matrix);
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

typedef struct buffers { /* scratch of a row block */
    float *projected; /* [rows, in.N] */
    float *mixed;     /* [rows, channels] output of the convolution */
    float *o;         /* [rows, values_width] */
} buffers;

/* Columns of z and of the gates beta, alpha in `projected`. */
static int64_t z_column(const mp_recurrent *own) { return own->conv.channels; }
static int64_t gates_column(const mp_recurrent *own) { return own->in.N - 2 * own->matrix.heads; }

/* The tensors ssm_in and ssm_ba of the file hold joined parts. */
static bool joins_inputs(const mp_recurrent *own) { return own->in.w[0].N != own->conv.channels; }
static bool joins_gates(const mp_recurrent *own) { return own->in.w[own->in.parts - 1].N != own->matrix.heads; }

/* Returns the bytes of the buffers for M rows, and their places from `at` on in *to unless `to` is NULL. */
static size_t lay_out(const mp_recurrent *own, int M, uint8_t *at, buffers *to) {
    const size_t rows = (size_t)M * sizeof(float);
    const size_t projected = rows * (size_t)own->in.N, mixed = rows * (size_t)own->conv.channels;
    const size_t o = rows * (size_t)values_width(&own->matrix);
    if (to) {
        to->projected = mp_scratch_take(&at, projected);
        to->mixed = mp_scratch_take(&at, mixed);
        to->o = mp_scratch_take(&at, o);
    }
    return mp_arena_cost(projected) + mp_arena_cost(mixed) + mp_arena_cost(o);
}

static void gated_delta_needs(const mp_decoder *model, const mp_mixer *mixer, int M, int most_blocks,
                              mp_block_needs *needs) {
    const mp_recurrent *own = &mixer->recurrent;
    (void)model;
    (void)most_blocks;
    mp_needs_linear(needs, &own->in, M);
    mp_needs_linear(needs, &mixer->out, M);
    const size_t shared = lay_out(own, M, NULL, NULL), norms = 2 * (size_t)own->matrix.dk * sizeof(float);
    mp_needs_scratch(needs, shared, mp_arena_cost(mp_causal_conv_pointers(&own->conv, M) * sizeof(float *)));
    mp_needs_scratch(needs, shared, mp_arena_cost(mp_larger(mp_matrix_copy(&own->matrix), norms)));
    if (joins_inputs(own) || joins_gates(own))
        mp_needs_scratch(needs, shared, mp_arena_cost((size_t)own->in.N * sizeof(float)));
}

static void gated_delta_cost(const mp_mixer *mixer, mp_block_cost *cost) {
    mp_cost_linear(cost, &mixer->recurrent.in);
    mp_cost_linear(cost, &mixer->out);
    cost->barriers += 7;
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
static void separate_parts(const mp_decoder_view *view, const mp_recurrent *own, const buffers *at) {
    const mp_matrix_heads *matrix = &own->matrix;
    const int group = matrix->heads / matrix->keys;
    const int inputs[] = {matrix->dk, matrix->dk, group * matrix->dv, group * matrix->dv}, gates[] = {group, group};
    int64_t begin, end;
    if (!joins_inputs(own) && !joins_gates(own))
        return;
    mp_team_split(view->context.thread, view->rows, 1, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        float *const row = at->projected + r * own->in.N, *const spare = (float *)(void *)view->own;
        if (joins_inputs(own))
            separate(row, matrix->keys, inputs, 4, spare);
        if (joins_gates(own))
            separate(row + gates_column(own), matrix->keys, gates, 2, spare);
    }
    mp_team_barrier(view->context.thread);
}

/* Convolves the thread's share of the channels of q, k and v. */
static void convolve(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_recurrent *own,
                     const buffers *at) {
    const int64_t channels = own->conv.channels;
    int64_t c0, c1;
    mp_state_rows part;
    mp_team_split(view->context.thread, channels, 16, &c0, &c1);
    if (c0 >= c1)
        return;
    for (int s = 0; s < pass->rows.n_seq; s++)
        if (mp_state_rows_of(pass, view, s, &part))
            mp_causal_conv_rows(&own->conv, &part, (float *)(void *)(part.seq->state + own->state_at),
                                part.seq->log ? (float *)(void *)(part.seq->log + own->log_at) : NULL, at->projected,
                                own->in.N, at->mixed, channels, c0, c1, (const float **)(void *)view->own);
    for (int64_t r = 0; r < view->rows; r++)
        mp_kernels_get()->activate(MP_ACT_SILU, c1 - c0, at->mixed + r * channels + c0);
}

/* Norms the queries and keys of the thread's share of the rows, and computes beta and decay in their columns of
 * `projected`. */
static void prepare(const mp_decoder_view *view, const mp_recurrent *own, const buffers *at) {
    const float epsilon = 1e-6f; /* added to |q|^2 and |k|^2 */
    const mp_kernels *call = mp_kernels_get();
    const mp_matrix_heads *matrix = &own->matrix;
    const int dk = matrix->dk, heads = matrix->heads;
    /* x / |x| = rms_norm(x) / sqrt(dk) */
    const float eps = epsilon / (float)dk, unit = 1.0f / sqrtf((float)dk);
    float *const q_weight = (float *)(void *)view->own, *const k_weight = q_weight + dk;
    int64_t begin, end;
    for (int i = 0; i < dk; i++) {
        q_weight[i] = 1.0f / (float)dk;
        k_weight[i] = unit;
    }
    mp_team_split(view->context.thread, view->rows, 1, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
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
static void finish(const mp_decoder_view *view, const mp_recurrent *own, const buffers *at, float scale) {
    const mp_kernels *call = mp_kernels_get();
    const int64_t width = values_width(&own->matrix);
    int64_t begin, end;
    mp_team_split(view->context.thread, view->rows, 1, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
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
    const int64_t channels = own->conv.channels, keys = keys_width(matrix), values = values_width(matrix);
    size_t conv_log;
    const size_t conv_state = mp_causal_conv_state(&own->conv, &conv_log);
    buffers at;
    mp_state_rows part;
    lay_out(own, pass->block_rows, pass->shared, &at);
    const mp_state_scan rows = {.q = at.mixed, .k = at.mixed + keys, .v = at.mixed + 2 * keys, .o = at.o,
                                .beta = at.projected + gates_column(own),
                                .decay = at.projected + gates_column(own) + matrix->heads, .ldq = channels,
                                .ldk = channels, .ldv = channels, .ldo = values, .ld_gates = own->in.N};
    mp_row_linear(&view->context, &own->in, in, own->in.K, view->rows, NULL, at.projected, own->in.N);
    mp_team_barrier(thread);
    separate_parts(view, own, &at);
    convolve(pass, view, own, &at);
    mp_team_barrier(thread);
    prepare(view, own, &at);
    mp_team_barrier(thread);
    for (int s = 0; s < pass->rows.n_seq; s++)
        if (mp_state_rows_of(pass, view, s, &part))
            mp_matrix_scan_rows(matrix, thread, &part, (float *)(void *)(part.seq->state + own->state_at + conv_state),
                                part.seq->log ? (float *)(void *)(part.seq->log + own->log_at + conv_log) : NULL, &rows,
                                (float *)(void *)view->own);
    mp_team_barrier(thread);
    for (int s = 0; s < pass->rows.n_seq; s++)
        if (mp_state_rows_of(pass, view, s, &part))
            mp_matrix_log_rows(matrix, thread, &part,
                               part.seq->log ? (float *)(void *)(part.seq->log + own->log_at + conv_log) : NULL, &rows);
    finish(view, own, &at, scale);
    mp_team_barrier(thread);
    return (mp_mixed){at.o, values};
}

const mp_mixer_ops mp_mixer_gated_delta = {.read = gated_delta_read,
                                           .needs = gated_delta_needs,
                                           .cost = gated_delta_cost,
                                           .mix = gated_delta_mix,
                                           .sizes = gated_delta_sizes,
                                           .state = gated_delta_state};
