/* requests/text_to_image.c: image generation requests. */
#include <stdatomic.h>

#include "models/requests/build.h"

static void free_output(mp_image_generation_request *request) {
    float **const floats[] = {&request->latents, &request->pixels, &request->preview_latents,
                              &request->texts,   &request->pooled, &request->history};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        mp_free(*floats[i]);
        *floats[i] = NULL;
    }
    mp_free(request->previews);
    request->previews = NULL;
    mp_request_charge_outputs(&request->base, 0);
}

static bool t2i_drop_outputs(mp_request *base, bool begun) {
    if (!begun)
        free_output((mp_image_generation_request *)base);
    return !begun;
}

static void t2i_destroy(mp_request *base) {
    mp_image_generation_request *request = (mp_image_generation_request *)base;
    free_output(request);
    for (int t = 0; t < MP_T2I_TEXTS; t++)
        for (int e = 0; e < MP_T2I_ENCODERS; e++)
            mp_free(request->ids[t][e]);
    mp_free(request->noise);
    mp_free(request->times);
    mp_free(request->sigmas);
    mp_free(request);
}

static uint64_t t2i_fingerprint(const mp_request *base) {
    const mp_image_generation_request *request = (const mp_image_generation_request *)base;
    const int32_t sizes[] = {request->width, request->height, request->n_steps, request->n_texts};
    uint64_t hash = mp_fingerprint(0, sizes, sizeof sizes);
    for (int t = 0; t < request->n_texts; t++)
        for (int e = 0; e < MP_T2I_ENCODERS; e++)
            hash = mp_fingerprint(hash, request->ids[t][e], (size_t)request->n_ids[e] * sizeof(int32_t));
    return mp_fingerprint(hash, request->noise, (size_t)request->n_noise * sizeof(float));
}

static void t2i_usage(const mp_request *base, uint64_t *in, uint64_t *out) {
    const mp_image_generation_request *request = (const mp_image_generation_request *)base;
    *in = 0;
    for (int e = 0; e < MP_T2I_ENCODERS; e++)
        *in += (uint64_t)request->n_ids[e] * (uint64_t)request->n_texts;
    *out = (uint64_t)atomic_load_explicit(&request->images_done, memory_order_relaxed);
}

static bool t2i_seen(const mp_request *base) {
    const mp_image_generation_request *request = (const mp_image_generation_request *)base;
    return atomic_load_explicit(&request->previews_done, memory_order_relaxed) > 0;
}

static mp_status check_t2i(const mp_image_generation_args *args, mp_error *error) {
    const size_t steps = (size_t)args->n_steps;
    MP_TRY(mp_check_range("`width`", args->width, 1, MP_T2I_MAX_SIDE, error));
    MP_TRY(mp_check_range("`height`", args->height, 1, MP_T2I_MAX_SIDE, error));
    MP_TRY(mp_check_range("the number of steps", args->n_steps, 1, MP_T2I_MAX_STEPS, error));
    MP_TRY(mp_check_range("the number of latents", args->n_noise, 1, INT32_MAX, error));
    MP_TRY(mp_check_range("the number of texts", args->n_texts, 1, MP_T2I_TEXTS, error));
    for (int e = 0; e < MP_T2I_ENCODERS; e++)
        MP_TRY(mp_check_range("the number of tokens", args->n_ids[e], 0, MP_T2I_MAX_TOKENS, error));
    MP_TRY(mp_check_items_float("latents", args->noise, (size_t)args->n_noise, -1e6, 1e6, error));
    MP_TRY(mp_check_items_float("times", args->times, steps, -1e6, 1e6, error));
    MP_TRY(mp_check_items_float("sigmas", args->sigmas, steps + 1, -1e4, 1e4, error));
    MP_TRY(mp_check_range("`n`", args->n_images, 1, MP_T2I_MAX_IMAGES, error));
    MP_TRY(mp_check_number("`guidance_scale`", args->guidance, 0, 1000, error));
    MP_TRY(mp_check_range("`preview_every`", args->preview_every, 0, MP_T2I_MAX_STEPS, error));
    return MP_OK;
}

mp_status mp_image_generation_request_create(const mp_image_generation_args *args, mp_image_generation_request **out,
                                             mp_error *error) {
    *out = NULL;
    MP_TRY(check_t2i(args, error));
    mp_image_generation_request *to = mp_alloc_zeroed(sizeof *to, MP_TAG_REQUEST);
    if (!to)
        return mp_fail_memory(error, sizeof *to, "a request");
    bool ok = true;
    uint64_t *bytes = &to->base.bytes;
    to->base = (mp_request){.capability = MP_TEXT_TO_IMAGE,
                         .destroy = t2i_destroy,
                         .drop_outputs = t2i_drop_outputs,
                         .fingerprint = t2i_fingerprint,
                         .usage = t2i_usage,
                         .seen = t2i_seen,
                         .bytes = sizeof *to};
    const size_t steps = (size_t)args->n_steps;
    to->width = args->width;
    to->height = args->height;
    to->n_steps = args->n_steps;
    to->n_noise = args->n_noise;
    to->n_texts = args->n_texts;
    to->n_images = args->n_images;
    to->guidance = args->guidance;
    to->preview_every = args->preview_every;
    to->keep = args->keep;
    for (int e = 0; e < MP_T2I_ENCODERS; e++) {
        to->n_ids[e] = args->n_ids[e];
        for (int32_t t = 0; t < args->n_texts; t++)
            to->ids[t][e] = mp_request_copy(args->ids[t][e], (size_t)args->n_ids[e], sizeof(int32_t), bytes, &ok);
    }
    to->noise = mp_request_copy(args->noise, (size_t)args->n_noise, sizeof *to->noise, bytes, &ok);
    to->times = mp_request_copy(args->times, steps, sizeof *to->times, bytes, &ok);
    to->sigmas = mp_request_copy(args->sigmas, steps + 1, sizeof *to->sigmas, bytes, &ok);
    if (!ok) {
        t2i_destroy(&to->base);
        return mp_fail_memory(error, (uint64_t)args->n_noise * sizeof(float), "a request");
    }
    *out = to;
    return MP_OK;
}

mp_status mp_image_generation_request_output(mp_image_generation_request *request, mp_error *error) {
    /* the last step has no preview: the image itself follows */
    request->n_previews = request->preview_every ? (request->n_steps - 1) / request->preview_every : 0;
    const size_t images = (size_t)request->n_images, texts = (size_t)request->n_texts;
    const bool previews = request->n_previews > 0, keep = request->keep;
    const int64_t latents = mp_image_generation_latents(request), pixels = mp_image_generation_pixels(request);
    const struct {
        float **to;
        size_t rows;
        int64_t width;
    } floats[] = {
        {&request->latents, images, latents},
        {&request->pixels, images, pixels},
        {&request->preview_latents, previews, latents},
        {&request->texts, keep ? texts * (size_t)request->text_rows : 0, request->text_width},
        {&request->pooled, keep ? texts : 0, request->pooled_width},
        {&request->history, keep ? images * (size_t)request->n_steps : 0, latents},
    };
    enum { FLOATS = sizeof floats / sizeof *floats };
    uint64_t bytes = (uint64_t)images * (uint64_t)request->n_previews * (uint64_t)pixels;
    for (int i = 0; i < FLOATS; i++)
        bytes += (uint64_t)floats[i].rows * (uint64_t)floats[i].width * sizeof(float);
    if (request->base.output_bytes == bytes)
        return MP_OK;
    bool ok = true;
    free_output(request);
    bytes = 0;
    for (int i = 0; i < FLOATS; i++)
        *floats[i].to = floats[i].rows ? mp_request_floats(floats[i].rows, floats[i].width, &bytes, &ok) : NULL;
    if (previews)
        request->previews = mp_request_memory(images * (size_t)request->n_previews, (size_t)pixels, &bytes, &ok);
    mp_request_charge_outputs(&request->base, bytes);
    if (ok)
        return MP_OK;
    free_output(request);
    return mp_fail_memory(error, bytes, "the generated images");
}

int32_t mp_image_generation_previews_due(const mp_image_generation_request *request, uint32_t cursor) {
    if (!request->n_previews)
        return 0;
    if (cursor >= mp_image_generation_steps(request))
        return request->n_images * request->n_previews;
    return (int32_t)cursor / request->n_steps * request->n_previews +
           (int32_t)cursor % request->n_steps / request->preview_every;
}
