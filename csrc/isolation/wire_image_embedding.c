/* wire_image_embedding.c: see capability_wire.h. Results are the vectors of the images that were finished since. */
#include <stdatomic.h>

#include "isolation/capability_wire.h"

typedef struct image_note { /* in both processes */
    uint32_t cursor;        /* images finished: whose vectors have come, or were sent */
} image_note;

/* How many rows an image has only its model knows, which the parent of a process need not believe. */
static mp_status image_check(const mp_call *base, mp_error *error) {
    if (((const mp_image_call *)base)->output != MP_EMBED_POOLED)
        return mp_fail(error, MP_UNSUPPORTED, "rows of images do not come out of worker processes, vectors do");
    return MP_OK;
}

static size_t image_bytes(const mp_call *call) {
    (void)call;
    return sizeof(image_note);
}

static void image_put_call(mp_wire_out *out, const mp_item *item, void *note) {
    const mp_image_call *call = (const mp_image_call *)item->call;
    ((image_note *)note)->cursor = item->cursor;
    mp_put_i32(out, call->n_images);
    mp_put_i32(out, call->dimensions);
    mp_put_u8(out, (uint8_t)(call->normalize + 1));
    mp_put(out, call->sizes, 2 * (size_t)call->n_images * sizeof *call->sizes);
    mp_put(out, &call->offsets[call->n_images], sizeof *call->offsets);
    mp_put(out, call->pixels, (size_t)call->offsets[call->n_images]);
}

static mp_status image_get_call(mp_wire_in *in, mp_call **out, mp_error *error) {
    int32_t images = (int32_t)mp_get_count(in, MP_IMAGE_MOST, "there are too many images");
    int32_t dimensions = mp_get_i32(in);
    uint8_t normalize = mp_get_u8(in);
    int32_t *sizes = mp_alloc_array(2 * (size_t)images + 1, sizeof *sizes, MP_TAG_REQUEST);
    uint8_t *pixels = NULL;
    int64_t bytes = 0;
    mp_image_call *call = NULL;
    mp_status status = MP_OK;
    if (!sizes) {
        status = mp_fail_memory(error, (uint64_t)images * 2 * sizeof *sizes, "a call");
        goto cleanup;
    }
    mp_get(in, sizes, 2 * (size_t)images * sizeof *sizes);
    mp_get(in, &bytes, sizeof bytes);
    if (!in->failed && bytes > 0 && !(pixels = mp_alloc((size_t)bytes, MP_TAG_REQUEST))) {
        status = mp_fail_memory(error, (uint64_t)bytes, "the pixels of a call");
        goto cleanup;
    }
    if (pixels)
        mp_get(in, pixels, (size_t)bytes);
    if (in->failed || !pixels) {
        status = mp_fail(error, MP_RECV, "a call was cut");
        goto cleanup;
    }
    status = mp_image_call_create(images, sizes, pixels, bytes, &call, error);
    if (status == MP_OK) {
        call->dimensions = dimensions;
        call->normalize = (int8_t)((int)normalize - 1);
        *out = &call->base;
    }
cleanup:
    mp_free(sizes);
    mp_free(pixels);
    return status;
}

static mp_status image_go_on(mp_wire_in *in, mp_item *item, void *record, mp_error *error) {
    (void)in;
    (void)error;
    ((image_note *)record)->cursor = item->cursor;
    return MP_OK;
}

/* Where the vectors of images [from, to) stand. */
static float *vectors_of(const mp_image_call *call, uint32_t from, uint32_t to, size_t *bytes) {
    *bytes = (size_t)(to - from) * (size_t)call->width * sizeof(float);
    return call->vectors + (size_t)from * (size_t)call->width;
}

static void image_put_results(mp_wire_out *out, const mp_item *item, void *record) {
    image_note *sent = record;
    size_t bytes;
    const float *vectors = vectors_of((const mp_image_call *)item->call, sent->cursor, item->cursor, &bytes);
    mp_put_u32(out, item->cursor);
    mp_put(out, vectors, bytes);
    sent->cursor = item->cursor;
}

static bool image_get_results(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome, void *note) {
    image_note *seen = note;
    uint32_t cursor = mp_get_u32(in), left = item->total - seen->cursor;
    if (cursor < seen->cursor || cursor - seen->cursor > (amount < left ? amount : left))
        return mp_wire_refuse(in, "images are finished that were not to be");
    if (outcome != MP_OUTCOME_FAILED && (outcome == MP_OUTCOME_DONE) != (cursor == item->total))
        return mp_wire_refuse(in, "an outcome does not fit the images that are finished");
    size_t bytes;
    float *vectors = vectors_of((const mp_image_call *)item->call, seen->cursor, cursor, &bytes);
    bool moved = cursor > seen->cursor;
    mp_get(in, vectors, bytes);
    seen->cursor = cursor;
    return moved;
}

/* A step computes a part of a large image, at least, which may be begun anew after another one. */
static uint64_t image_most_idle(const mp_call *call) {
    enum { BEGUN = 2 };
    return 1 + BEGUN * ((const mp_image_call *)call)->most_parts;
}

static void image_publish(mp_item *item, void *note, uint64_t began_ns, uint64_t now_ns) {
    (void)began_ns;
    (void)now_ns;
    mp_image_call *call = (mp_image_call *)item->call;
    item->cursor = ((image_note *)note)->cursor;
    mp_call_publish(&call->done, (int32_t)item->cursor);
}

static void image_close(mp_item *item) { (void)item; }

const mp_call_wire mp_wire_image_embedding = {
    .check = image_check,
    .note_bytes = image_bytes,
    .put_call = image_put_call,
    .get_results = image_get_results,
    .most_idle = image_most_idle,
    .publish = image_publish,
    .close = image_close,
    .get_call = image_get_call,
    .record_bytes = image_bytes,
    .go_on = image_go_on,
    .put_results = image_put_results,
};
