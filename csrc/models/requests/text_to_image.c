/* requests/text_to_image.c: image generation requests; text_to_image.def lists their fields. */
#include <stdatomic.h>

#include "models/requests/build.h"

#define MP_SCHEMA "models/requests/text_to_image.def"

static void free_output(mp_image_generation_request *request) {
#include "models/requests/passes/output_free.def"
    mp_request_charge_outputs(&request->base, 0);
}

static void t2i_destroy(mp_request *base) {
    mp_image_generation_request *request = (mp_image_generation_request *)base;
    free_output(request);
#include "models/requests/passes/free.def"
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
#include "models/requests/passes/check.def"
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
                         .fingerprint = t2i_fingerprint,
                         .usage = t2i_usage,
                         .seen = t2i_seen,
                         .bytes = sizeof *to};
#include "models/requests/passes/copy.def"
    if (!ok) {
        t2i_destroy(&to->base);
        return mp_fail_memory(error, (uint64_t)args->n_noise * sizeof(float), "a request");
    }
    *out = to;
    return MP_OK;
}

mp_status mp_image_generation_request_output(mp_image_generation_request *request, mp_error *error) {
    bool ok = true;
    uint64_t bytes = 0;
    /* the last step has no preview: the image itself follows */
    request->n_previews = request->preview_every ? (request->n_steps - 1) / request->preview_every : 0;
#include "models/requests/passes/output_bytes.def"
    if (request->base.output_bytes == bytes)
        return MP_OK;
    free_output(request);
    bytes = 0;
#include "models/requests/passes/output_make.def"
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
