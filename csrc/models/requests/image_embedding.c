/* requests/image_embedding.c: image embedding requests. */
#include "models/requests/build.h"

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
    mp_free(request->vectors);
    request->vectors = NULL;
    mp_request_charge_outputs(&request->base, 0);
}

static bool image_drop_outputs(mp_request *base, bool begun) {
    if (!begun)
        free_output((mp_image_embedding_request *)base);
    return !begun;
}

static void image_destroy(mp_request *base) {
    mp_image_embedding_request *request = (mp_image_embedding_request *)base;
    free_output(request);
    mp_free(request->pixels);
    mp_free(request->sizes);
    mp_free(request->offsets);
    mp_free(request);
}

static mp_status check_image(const mp_image_embedding_args *args, mp_error *error) {
    const size_t n_sizes = 2 * (size_t)args->n_images;
    MP_TRY(mp_check_range("the number of images", args->n_images, 1, MP_IMAGE_MAX, error));
    MP_TRY(mp_check_range("the number of bytes of pixels", args->n_bytes, 1, INT64_MAX / 16, error));
    MP_TRY(mp_check_items_uint8_t("pixels", args->pixels, (size_t)args->n_bytes, 0, UINT8_MAX, error));
    MP_TRY(mp_check_items_int32_t("sizes", args->sizes, n_sizes, 1, MP_IMAGE_MAX_SIDE, error));
    MP_TRY(mp_check_range("`dimensions`", args->dimensions, 0, INT32_MAX, error));
    MP_TRY(mp_check_range("`normalize`", args->normalize, -1, 1, error));
    MP_TRY(mp_check_range("`output`", args->output, MP_IMAGE_POOLED, MP_IMAGE_TOKENS, error));
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
                         .drop_outputs = image_drop_outputs,
                         .fingerprint = image_fingerprint,
                         .usage = image_usage,
                         .bytes = sizeof *to,
                         .tolerant = args->tolerant};
    to->n_images = args->n_images;
    to->n_bytes = args->n_bytes;
    to->dimensions = args->dimensions;
    to->normalize = (int8_t)args->normalize;
    to->output = (uint8_t)args->output;
    to->pixels = mp_request_copy(args->pixels, (size_t)args->n_bytes, 1, bytes, &ok);
    to->sizes = mp_request_copy(args->sizes, 2 * (size_t)args->n_images, sizeof *to->sizes, bytes, &ok);
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
    request->vectors = mp_request_floats((size_t)mp_image_embedding_request_rows(request), width, &bytes, &ok);
    mp_request_charge_outputs(&request->base, ok ? bytes : 0);
    return ok ? MP_OK : mp_fail_memory(error, bytes, "the vectors");
}
