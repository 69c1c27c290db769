/* check.c: checks an image request against a pipeline, estimates its cost and sizes its outputs. */
#include <stdatomic.h>

#include "models/diffusion/diffusion.h"

static mp_status fail_size(const mp_diffusion *model, const mp_image_generation_request *call, mp_error *error) {
    const int32_t grain = mp_diff_scale(model) * MP_DIFF_PATCH, most = model->position_side * grain;
    int32_t near[2] = {call->width, call->height};
    for (int i = 0; i < 2; i++) {
        near[i] = (near[i] + grain / 2) / grain * grain;
        near[i] = near[i] < grain ? grain : most && near[i] > most ? most : near[i];
    }
    if (most)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "the image is %d x %d pixels, allowed: multiples of %d up to %d; "
                       "the nearest is %d x %d",
                       call->width, call->height, grain, most, near[0], near[1]);
    return mp_fail(error, MP_INVALID_ARGUMENT,
                   "the image is %d x %d pixels, allowed: multiples of %d; the nearest is %d x %d",
                   call->width, call->height, grain, near[0], near[1]);
}

static mp_status check_ids(const mp_diffusion *model, const mp_image_generation_request *call, mp_error *error) {
    for (int e = 0; e < MP_DIFF_ENCODERS; e++) {
        const mp_diff_encoder *encoder = &model->encoder[e];
        const bool clip = e != MP_DIFF_T5;
        if (encoder->layers && (call->n_ids[e] < 1 || call->n_ids[e] > encoder->length ||
                                (clip && call->n_ids[e] != encoder->length)))
            return mp_fail(error, MP_INVALID_ARGUMENT, "%s takes %s%d tokens, got %d", mp_diff_stage_name(e),
                           clip ? "" : "1 to ", encoder->length, call->n_ids[e]);
        for (int t = 0; encoder->layers && t < call->n_texts; t++)
            for (int32_t i = 0; i < call->n_ids[e]; i++)
                if (call->ids[t][e][i] < 0 || call->ids[t][e][i] >= encoder->vocab)
                    return mp_fail(error, MP_INVALID_ARGUMENT, "token id %d is outside the vocabulary of %d",
                                   call->ids[t][e][i], encoder->vocab);
    }
    return MP_OK;
}

mp_status mp_diff_check(const mp_model *base, mp_request *call_base, uint64_t *cost_ns, uint32_t *total,
                        mp_error *error) {
    const mp_diffusion *model = (const mp_diffusion *)base;
    mp_image_generation_request *call = (mp_image_generation_request *)call_base;
    const int32_t scale = mp_diff_scale(model), grain = scale * MP_DIFF_PATCH;
    if (call->width % grain || call->height % grain ||
        (model->position_side &&
         (call->width / grain > model->position_side || call->height / grain > model->position_side)))
        return fail_size(model, call, error);
    MP_TRY(check_ids(model, call, error));
    if (call->n_texts > 1 && model->flux)
        return mp_fail(error, MP_INVALID_ARGUMENT, "this model takes no negative prompt: leave it out");
    call->channels = model->channels;
    call->high = call->height / scale;
    call->wide = call->width / scale;
    call->text_rows = (model->flux ? 0 : call->n_ids[MP_DIFF_CLIP_L]) + call->n_ids[MP_DIFF_T5];
    call->text_width = model->text_width;
    call->pooled_width = model->pooled_width;
    const int64_t latents = (int64_t)call->n_images * call->channels * call->high * call->wide;
    if (call->n_noise != latents)
        return mp_fail(error, MP_INVALID_ARGUMENT, "there are %lld initial latents, the model takes %lld: "
                       "(%d, %d, %d, %d)",
                       (long long)call->n_noise, (long long)latents, call->n_images, call->channels, call->high,
                       call->wide);
    const int64_t rows = (int64_t)call->high * call->wide / (MP_DIFF_PATCH * MP_DIFF_PATCH);
    const double gflop = mp_diff_gflop(model, call->text_rows, rows) * call->n_texts * call->n_steps * call->n_images;
    *cost_ns = (uint64_t)(gflop * (double)atomic_load_explicit(&model->gflop_ns, memory_order_relaxed)) + 1;
    *total = (uint32_t)(call->n_images * (call->n_steps + 1));
    return mp_image_generation_request_output(call, error);
}
