/* requests/image_embedding.c: image embedding requests; image_embedding.def lists their fields. */
#include "models/requests/build.h"

#define MP_SCHEMA "models/requests/image_embedding.def"

static uint64_t image_fingerprint(const mp_request *base) {
    const mp_image_embedding_request *request = (const mp_image_embedding_request *)base;
    uint64_t hash = mp_fingerprint(0, request->sizes, (size_t)request->n_images * 2 * sizeof *request->sizes);
    return mp_fingerprint(hash, request->pixels, (size_t)request->n_bytes);
}

static void image_usage(const mp_request *base, uint64_t *in, uint64_t *out) {
    *in = (uint64_t)((const mp_image_embedding_request *)base)->n_images;
    *out = 0;
}

static void free_output(mp_image_embedding_request *request) {
#include "models/requests/passes/output_free.def"
    mp_request_charge_outputs(&request->base, 0);
}

static void image_destroy(mp_request *base) {
    mp_image_embedding_request *request = (mp_image_embedding_request *)base;
    free_output(request);
#include "models/requests/passes/free.def"
    mp_free(request);
}

static mp_status check_image(const mp_image_embedding_args *args, mp_error *error) {
#include "models/requests/passes/check.def"
    return mp_check_pixels(args->sizes, args->n_images, args->n_bytes, error);
}

mp_status mp_image_embedding_request_create(const mp_image_embedding_args *args, mp_image_embedding_request **out,
                                            mp_error *error) {
    *out = NULL;
    MP_TRY(check_image(args, error));
    mp_image_embedding_request *to = mp_alloc_zeroed(sizeof *to, MP_TAG_REQUEST);
    if (!to)
        return mp_fail_memory(error, sizeof *to, "a request");
    bool ok = true;
    uint64_t *bytes = &to->base.bytes;
    to->base = (mp_request){.capability = MP_IMAGE_EMBEDDING,
                         .destroy = image_destroy,
                         .fingerprint = image_fingerprint,
                         .usage = image_usage,
                         .bytes = sizeof *to,
                         .tolerant = args->tolerant};
#include "models/requests/passes/copy.def"
    to->offsets = mp_request_pixel_offsets(args->sizes, args->n_images, bytes, &ok);
    if (!ok) {
        image_destroy(&to->base);
        return mp_fail_memory(error, (uint64_t)args->n_bytes, "the pixels of a request");
    }
    *out = to;
    return MP_OK;
}

mp_status mp_image_embedding_request_output(mp_image_embedding_request *request, int64_t n_rows, int32_t width,
                                            mp_error *error) {
    if (request->vectors && request->n_rows == n_rows && request->width == width)
        return MP_OK;
    bool ok = true;
    uint64_t bytes = 0;
    free_output(request);
    request->n_rows = n_rows;
    request->width = width;
#include "models/requests/passes/output_make.def"
    mp_request_charge_outputs(&request->base, ok ? bytes : 0);
    return ok ? MP_OK : mp_fail_memory(error, bytes, "the vectors");
}
