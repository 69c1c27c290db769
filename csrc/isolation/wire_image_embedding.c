/* wire_image_embedding.c: image embedding requests between processes; see wire_vectors.h. */
#include <float.h>

#include "isolation/wire_vectors.h"

static void image_put_request(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_image_embedding_request *request = (const mp_image_embedding_request *)item->request;
    ((mp_vectors_progress *)progress)->cursor = item->cursor;
    mp_put_i32(out, request->n_images);
    mp_put_i64(out, request->n_bytes);
    mp_put(out, request->pixels, (size_t)request->n_bytes);
    mp_put(out, request->sizes, 2 * (size_t)request->n_images * sizeof *request->sizes);
    mp_put_i32(out, request->dimensions);
    mp_put_u8(out, (uint8_t)request->normalize);
    mp_put_u8(out, request->output);
}

static mp_status image_get_request(mp_wire_in *in, mp_request **out, mp_error *error) {
    mp_image_embedding_args args = {0};
    mp_image_embedding_request *request = NULL;
    bool ok = true;
    args.n_images =
        (int32_t)mp_wire_within(in, mp_get_i32(in), 1, MP_IMAGE_MAX, "the number of images is out of bounds");
    args.n_bytes =
        mp_wire_within(in, mp_get_i64(in), 1, INT64_MAX / 16, "the number of bytes of pixels is out of bounds");
    args.pixels = mp_get_array(in, args.n_bytes, 1, &ok);
    args.sizes = mp_get_array(in, 2 * (int64_t)args.n_images, sizeof *args.sizes, &ok);
    args.dimensions = mp_get_i32(in);
    args.normalize = (int8_t)mp_get_u8(in);
    args.output = mp_get_u8(in);
    mp_status status = in->failed ? mp_fail(error, MP_RECV, "a request was truncated")
                       : !ok      ? mp_fail_memory(error, sizeof *request, "a request")
                                  : mp_image_embedding_request_create(&args, &request, error);
    if (status == MP_OK)
        *out = &request->base;
    mp_free((void *)args.pixels);
    mp_free((void *)args.sizes);
    return status;
}

static void image_put_results(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_image_embedding_request *request = (const mp_image_embedding_request *)item->request;
    mp_vectors_progress *sent = progress;
    const size_t width = (size_t)request->width, images = item->cursor - sent->cursor;
    mp_put_u32(out, item->cursor);
    mp_put(out, request->vectors + sent->cursor * width, images * width * sizeof(float));
    sent->cursor = item->cursor;
}

static bool image_get_results(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome,
                              void *progress) {
    const mp_image_embedding_request *request = (const mp_image_embedding_request *)item->request;
    mp_vectors_progress *seen = progress;
    const size_t width = (size_t)request->width, from = seen->cursor;
    uint32_t cursor;
    if (!mp_vectors_get_cursor(in, item, amount, outcome, seen, &cursor) ||
        !mp_get_floats(in, request->vectors + from * width, (cursor - from) * width, -FLT_MAX, FLT_MAX,
                       "a vector is not finite"))
        return false;
    seen->cursor = cursor;
    return cursor > from;
}

static void image_publish(mp_item *item, void *progress, uint64_t began_ns, uint64_t now_ns) {
    (void)began_ns;
    (void)now_ns;
    item->cursor = ((mp_vectors_progress *)progress)->cursor;
    mp_request_publish(&((mp_image_embedding_request *)item->request)->done, (int32_t)item->cursor);
}

/* Only the model knows the number of rows of an image, and the parent must not trust the number that a child
 * reports. */
static mp_status image_check(const mp_request *base, mp_error *error) {
    if (((const mp_image_embedding_request *)base)->output != MP_IMAGE_POOLED)
        return mp_fail(error, MP_UNSUPPORTED,
                       "rows of images are not supported in worker processes; use isolation=\"thread\"");
    return MP_OK;
}

/* A step computes at least one part of a large image. An image may restart once, after another image was computed. */
static uint64_t image_most_idle(const mp_request *request) {
    enum { STARTS = 2 };
    return 1 + STARTS * ((const mp_image_embedding_request *)request)->most_parts;
}

const mp_request_wire mp_wire_image_embedding = {
    .check = image_check,
    .progress_bytes = mp_vectors_progress_bytes,
    .put_request = image_put_request,
    .get_results = image_get_results,
    .most_idle = image_most_idle,
    .publish = image_publish,
    .close = mp_vectors_close,
    .get_request = image_get_request,
    .get_progress = mp_vectors_get_progress,
    .put_results = image_put_results,
};
