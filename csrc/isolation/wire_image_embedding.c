/* wire_image_embedding.c: see passes/vectors.def. */
#include "models/capability.h"

#define MP_SCHEMA    "models/requests/image_embedding.def"
#define WIRE_ARGS    mp_image_args
#define WIRE_REQUEST mp_image_call
#define wire_create  mp_image_call_create
#define WIRE_EARLY   "images are finished that were not to be"
#define WIRE_OUTCOME "an outcome does not fit the images that are finished"

static inline size_t wire_rows_at(const mp_image_call *request, uint32_t image) {
    (void)request;
    return image;
}

#include "isolation/passes/vectors.def"

/* Only the model knows how many rows an image has, and the parent of a process must not rely on that. */
static mp_status image_check(const mp_call *base, mp_error *error) {
    if (((const mp_image_call *)base)->output != MP_EMBED_POOLED)
        return mp_fail(error, MP_UNSUPPORTED, "rows of images do not come out of worker processes, vectors do");
    return MP_OK;
}

/* A step computes at least one part of a large image. An image may be started again after another one. */
static uint64_t image_most_idle(const mp_call *call) {
    enum { STARTS = 2 };
    return 1 + STARTS * ((const mp_image_call *)call)->most_parts;
}

const mp_call_wire mp_wire_image_embedding = {.check = image_check, .most_idle = image_most_idle, WIRE_VECTORS};
