/* wire_image_embedding.c: image embedding requests between processes; see passes/vectors.def. */
#include "models/capability.h"

#define MP_SCHEMA    "models/requests/image_embedding.def"
#define WIRE_ARGS    mp_image_embedding_args
#define WIRE_REQUEST mp_image_embedding_request
#define wire_create  mp_image_embedding_request_create
#define WIRE_RESULTS vectors
#define WIRE_EARLY   "more images are finished than were planned"
#define WIRE_OUTCOME "the outcome of a request does not match its number of finished images"

static inline size_t wire_rows_at(const mp_image_embedding_request *request, uint32_t image) {
    (void)request;
    return image;
}

#include "isolation/passes/vectors.def"

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

const mp_request_wire mp_wire_image_embedding = {.check = image_check, .most_idle = image_most_idle, WIRE_VECTORS};
