/* wire_image_embedding.c: see passes/vectors.def. */
#include "models/capability.h"

#define MP_SCHEMA    "models/requests/image_embedding.def"
#define WIRE_ARGS    mp_image_embedding_args
#define WIRE_REQUEST mp_image_embedding_request
#define wire_create  mp_image_embedding_request_create
#define WIRE_EARLY   "images are finished that were not to be"
#define WIRE_OUTCOME "an outcome does not fit the images that are finished"

static inline size_t wire_rows_at(const mp_image_embedding_request *request, uint32_t image) {
    (void)request;
    return image;
}

#include "isolation/passes/vectors.def"

/* Only the model knows how many rows an image has, and the parent of a process must not rely on that. */
static mp_status image_check(const mp_request *base, mp_error *error) {
    if (((const mp_image_embedding_request *)base)->output != MP_EMBED_POOLED)
        return mp_fail(error, MP_UNSUPPORTED, "rows of images do not come out of worker processes, vectors do");
    return MP_OK;
}

/* A step computes at least one part of a large image. An image may be started again after another one. */
static uint64_t image_most_idle(const mp_request *call) {
    enum { STARTS = 2 };
    return 1 + STARTS * ((const mp_image_embedding_request *)call)->most_parts;
}

const mp_request_wire mp_wire_image_embedding = {.check = image_check, .most_idle = image_most_idle, WIRE_VECTORS};
