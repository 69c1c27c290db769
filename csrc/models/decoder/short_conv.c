/* decoder/short_conv.c: a gated short convolution (LFM2, arXiv:2511.23404). The projection of a row has three parts b,
 * c and x of the model's width:
 *
 *   y = c * conv(b * x)
 *
 * The state is the last taps - 1 rows of b * x. Threads divide the channels. */
#include "models/decoder/recurrent.h"

static mp_status short_conv_sizes(const mp_spec *spec, mp_mixer *mixer, mp_error *error) {
    int64_t taps, channels;
    MP_TRY(mp_spec_int(spec, "{arch}.shortconv.l_cache", 2, MP_BUILDER_TAPS, NULL, &taps, error));
    MP_TRY(mp_spec_int(spec, "{arch}.embedding_length", 1, MP_RECURRENT_WIDTH, NULL, &channels, error));
    mixer->recurrent.conv.taps = (int32_t)taps;
    mixer->recurrent.conv.channels = (int32_t)channels;
    return MP_OK;
}

static mp_status short_conv_read(const mp_layer_reader *reader, mp_mixer *mixer, mp_error *error) {
    const mp_decoder *model = reader->model;
    const mp_reader_part in = {"shortconv.in_proj", 3 * model->hidden}, out = {"shortconv.out_proj", model->hidden};
    MP_TRY(mp_reader_linear(reader, &mixer->recurrent.in, &in, 1, model->hidden, 1, error));
    MP_TRY(mp_reader_conv(reader, &mixer->recurrent.conv, "shortconv.conv", error));
    return mp_reader_linear(reader, &mixer->out, &out, 1, model->hidden, model->residual_scale, error);
}

static size_t projected_bytes(const mp_mixer *mixer, int M) {
    return (size_t)M * (size_t)mixer->recurrent.in.N * sizeof(float);
}

static size_t convolved_bytes(const mp_mixer *mixer, int M) {
    return (size_t)M * (size_t)mixer->recurrent.conv.channels * sizeof(float);
}

static void short_conv_needs(const mp_decoder *model, const mp_mixer *mixer, int M, int most_blocks,
                             mp_block_needs *needs) {
    (void)model;
    (void)most_blocks;
    mp_needs_linear(needs, &mixer->recurrent.in, M);
    mp_needs_linear(needs, &mixer->out, M);
    mp_needs_scratch(needs, mp_arena_cost(projected_bytes(mixer, M)) + mp_arena_cost(convolved_bytes(mixer, M)),
                     mp_arena_cost(mp_causal_conv_pointers(&mixer->recurrent.conv, M) * sizeof(float *)));
}

static void short_conv_cost(const mp_mixer *mixer, mp_block_cost *cost) {
    mp_cost_linear(cost, &mixer->recurrent.in);
    mp_cost_linear(cost, &mixer->out);
    cost->barriers += 3;
}

static size_t short_conv_state(const mp_mixer *mixer, size_t *log_bytes) {
    return mp_causal_conv_state(&mixer->recurrent.conv, log_bytes);
}

static mp_mixed short_conv_mix(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_mixer *mixer,
                               const float *in, float scale) {
    const mp_recurrent *own = &mixer->recurrent;
    const int64_t width = own->conv.channels, ld = own->in.N;
    uint8_t *shared = pass->shared;
    float *const bcx = mp_scratch_take(&shared, projected_bytes(mixer, pass->block_rows));
    float *const y = mp_scratch_take(&shared, convolved_bytes(mixer, pass->block_rows));
    int64_t c0, c1;
    mp_state_rows part;
    mp_row_linear(&view->context, &own->in, in, width, view->rows, NULL, bcx, ld);
    mp_team_barrier(view->context.thread);
    mp_team_split(view->context.thread, width, 16, &c0, &c1);
    for (int64_t r = 0; r < view->rows; r++)
        for (int64_t c = c0; c < c1; c++)
            bcx[r * ld + 2 * width + c] *= bcx[r * ld + c];
    for (int s = 0; s < pass->rows.n_seq; s++)
        if (mp_state_rows_of(pass, view, s, &part))
            mp_causal_conv_rows(&own->conv, &part, (float *)(void *)(part.seq->state + own->state_at),
                                part.seq->log ? (float *)(void *)(part.seq->log + own->log_at) : NULL, bcx + 2 * width,
                                ld, y, width, c0, c1,
                                (const float **)(void *)view->own);
    for (int64_t r = 0; r < view->rows; r++)
        for (int64_t c = c0; c < c1; c++)
            y[r * width + c] *= bcx[r * ld + width + c] * scale;
    mp_team_barrier(view->context.thread);
    return (mp_mixed){y, width};
}

const mp_mixer_ops mp_mixer_short_conv = {.read = short_conv_read,
                                          .needs = short_conv_needs,
                                          .cost = short_conv_cost,
                                          .mix = short_conv_mix,
                                          .sizes = short_conv_sizes,
                                          .state = short_conv_state};
