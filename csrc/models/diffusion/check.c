/* check.c: checks an image request against a pipeline, estimates its cost and sizes its outputs. */
#include <stdatomic.h>

#include "models/diffusion/diffusion.h"

static const double MAX_NS = 1e18; /* limit of a predicted cost, about 30 years */

static mp_status fail_size(const mp_diffusion *model, const mp_image_generation_request *request, mp_error *error) {
    const int32_t grain = mp_diff_scale(model) * MP_DIFF_PATCH, most = model->position_side * grain;
    int32_t near[2] = {request->width, request->height};
    for (int i = 0; i < 2; i++) {
        near[i] = (near[i] + grain / 2) / grain * grain;
        near[i] = near[i] < grain ? grain : most && near[i] > most ? most : near[i];
    }
    if (most)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`width` and `height` must be multiples of %d up to %d, got %d x %d pixels; the nearest are "
                       "%d x %d",
                       grain, most, request->width, request->height, near[0], near[1]);
    return mp_fail(error, MP_INVALID_ARGUMENT,
                   "`width` and `height` must be multiples of %d, got %d x %d pixels; the nearest are %d x %d",
                   grain, request->width, request->height, near[0], near[1]);
}

static mp_status check_ids(const mp_diffusion *model, const mp_image_generation_request *request, mp_error *error) {
    for (int e = 0; e < MP_DIFF_ENCODERS; e++) {
        const mp_diff_encoder *encoder = &model->encoder[e];
        const bool clip = e != MP_DIFF_T5;
        if (encoder->layers && (request->n_ids[e] < 1 || request->n_ids[e] > encoder->length ||
                                (clip && request->n_ids[e] != encoder->length)))
            return mp_fail(error, MP_INVALID_ARGUMENT, "`ids` must have %s%d tokens for %s, got %d",
                           clip ? "" : "1 to ", encoder->length, mp_diff_stage_name(e), request->n_ids[e]);
        for (int t = 0; encoder->layers && t < request->n_texts; t++) {
            if (!request->ids[t][e])
                return mp_fail(error, MP_INVALID_ARGUMENT,
                               "`ids[%d][%d]` must not be missing: %s takes %d tokens of each text", t, e,
                               mp_diff_stage_name(e), request->n_ids[e]);
            for (int32_t i = 0; i < request->n_ids[e]; i++)
                if (request->ids[t][e][i] < 0 || request->ids[t][e][i] >= encoder->vocab)
                    return mp_fail(error, MP_INVALID_ARGUMENT, "token id %d is outside the vocabulary of %d",
                                   request->ids[t][e][i], encoder->vocab);
        }
    }
    return MP_OK;
}

mp_status mp_diff_check(const mp_model *base, mp_request *request_base, uint64_t *cost_ns, uint32_t *total,
                        mp_error *error) {
    const mp_diffusion *model = (const mp_diffusion *)base;
    mp_image_generation_request *request = (mp_image_generation_request *)request_base;
    const int32_t scale = mp_diff_scale(model), grain = scale * MP_DIFF_PATCH;
    if (request->width % grain || request->height % grain ||
        (model->position_side &&
         (request->width / grain > model->position_side || request->height / grain > model->position_side)))
        return fail_size(model, request, error);
    MP_TRY(check_ids(model, request, error));
    if (request->n_texts > 1 && model->flux)
        return mp_fail(error, MP_INVALID_ARGUMENT, "this model takes no negative prompt: leave it out");
    request->channels = model->channels;
    request->latent_height = request->height / scale;
    request->latent_width = request->width / scale;
    request->text_rows = (model->flux ? 0 : request->n_ids[MP_DIFF_CLIP_L]) + request->n_ids[MP_DIFF_T5];
    request->text_width = model->text_width;
    request->pooled_width = model->pooled_width;
    const int64_t latents = request->n_images * mp_image_generation_latents(request);
    if (request->n_noise != latents)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "there are %lld initial latents, the model takes %lld: "
                       "(%d, %d, %d, %d)",
                       (long long)request->n_noise, (long long)latents, request->n_images, request->channels,
                       request->latent_height, request->latent_width);
    const int64_t rows = (int64_t)request->latent_height * request->latent_width / (MP_DIFF_PATCH * MP_DIFF_PATCH);
    const double gflop =
        mp_diff_gflop(model, request->text_rows, rows) * request->n_texts * request->n_steps * request->n_images;
    const double ns = gflop * (double)atomic_load_explicit(&model->gflop_ns, memory_order_relaxed);
    *cost_ns = ns < MAX_NS ? (uint64_t)ns + 1 : (uint64_t)MAX_NS;
    *total = (uint32_t)(request->n_images * (request->n_steps + 1));
    return mp_image_generation_request_output(request, error);
}
