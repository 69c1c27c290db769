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

static void short_conv_cost(const mp_mixer *mixer, mp_block_cost *cost) {
    mp_cost_linear(cost, &mixer->recurrent.in);
    mp_cost_linear(cost, &mixer->out);
    cost->barriers += 3;
}

static mp_mixed short_conv_mix(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_mixer *mixer,
                               const float *in, float scale) {
    const mp_recurrent *own = &mixer->recurrent;
    const int64_t width = own->conv.channels, ld = own->in.N;
    const mp_recurrent_buffers at = mp_recurrent_buffers_of(pass, own);
    float *const bcx = at.projected, *const y = at.mixed;
    mp_row_linear(&view->context, &own->in, in, width, view->rows, NULL, bcx, ld);
    mp_team_barrier(view->context.thread);
    mp_team_loop loop = mp_recurrent_channels(view, own);
    int64_t c0, c1;
    while (mp_recurrent_next(view, own, &loop, &c0, &c1)) {
        for (int64_t r = 0; r < view->rows; r++)
            for (int64_t c = c0; c < c1; c++)
                bcx[r * ld + 2 * width + c] *= bcx[r * ld + c];
        mp_recurrent_convolve(pass, view, own, bcx + 2 * width, y, c0, c1);
        for (int64_t r = 0; r < view->rows; r++)
            for (int64_t c = c0; c < c1; c++)
                y[r * width + c] *= bcx[r * ld + width + c] * scale;
    }
    mp_team_barrier(view->context.thread);
    return (mp_mixed){y, width};
}

const mp_mixer_ops mp_mixer_short_conv = {.read = short_conv_read,
                                          .needs = mp_recurrent_needs,
                                          .cost = short_conv_cost,
                                          .mix = short_conv_mix,
                                          .sizes = short_conv_sizes,
                                          .state = mp_recurrent_state};
