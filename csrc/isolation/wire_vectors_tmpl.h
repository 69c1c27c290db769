/* wire_vectors_tmpl.h: requests whose results are vectors, in the order of their inputs: see capability_wire.h. Results
 * are the vectors of the inputs that were finished since. Included by a file that defines:
 *
 *   MP_SCHEMA, WIRE_ARGS, WIRE_REQUEST, wire_create   the schema, its types, and the constructor of a request
 *   wire_rows_at(request, n)                          the first row of vectors of input n
 *   WIRE_EARLY, WIRE_OUTCOME                          texts with which a message is refused */
#include <stdatomic.h>

#include "isolation/capability_wire.h"

typedef struct vectors_note { /* in both processes */
    uint32_t cursor;          /* inputs whose vectors have come, or were sent */
} vectors_note;

static size_t vectors_note_bytes(const mp_call *call) {
    (void)call;
    return sizeof(vectors_note);
}

static void vectors_put_call(mp_wire_out *out, const mp_item *item, void *note) {
    const WIRE_REQUEST *request = (const WIRE_REQUEST *)item->call;
    ((vectors_note *)note)->cursor = item->cursor;
#include "isolation/passes/put.def"
}

static mp_status vectors_get_call(mp_wire_in *in, mp_call **out, mp_error *error) {
    WIRE_ARGS arguments = {0}, *args = &arguments;
    WIRE_REQUEST *request = NULL;
    bool ok = true;
#include "isolation/passes/get.def"
    mp_status status = in->failed ? mp_fail(error, MP_RECV, "a request was cut")
                       : !ok      ? mp_fail_memory(error, sizeof *request, "a request")
                                  : wire_create(args, &request, error);
    if (status == MP_OK)
        *out = &request->base;
#include "isolation/passes/get_free.def"
    return status;
}

static mp_status vectors_go_on(mp_wire_in *in, mp_item *item, void *record, mp_error *error) {
    (void)in;
    (void)error;
    ((vectors_note *)record)->cursor = item->cursor;
    return MP_OK;
}

/* Vectors of inputs [from, to). */
static float *vectors_of(const mp_item *item, uint32_t from, uint32_t to, size_t *bytes) {
    const WIRE_REQUEST *request = (const WIRE_REQUEST *)item->call;
    const size_t first = wire_rows_at(request, from), end = wire_rows_at(request, to), width = (size_t)request->width;
    *bytes = (end - first) * width * sizeof(float);
    return request->vectors + first * width;
}

static void vectors_put_results(mp_wire_out *out, const mp_item *item, void *record) {
    vectors_note *sent = record;
    size_t bytes;
    const float *vectors = vectors_of(item, sent->cursor, item->cursor, &bytes);
    mp_put_u32(out, item->cursor);
    mp_put(out, vectors, bytes);
    sent->cursor = item->cursor;
}

static bool vectors_get_results(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome, void *note) {
    vectors_note *seen = note;
    uint32_t cursor = mp_get_u32(in), left = item->total - seen->cursor;
    if (cursor < seen->cursor || cursor - seen->cursor > (amount < left ? amount : left))
        return mp_wire_refuse(in, WIRE_EARLY);
    if (outcome != MP_OUTCOME_FAILED && (outcome == MP_OUTCOME_DONE) != (cursor == item->total))
        return mp_wire_refuse(in, WIRE_OUTCOME);
    size_t bytes;
    float *vectors = vectors_of(item, seen->cursor, cursor, &bytes);
    bool moved = cursor > seen->cursor;
    mp_get(in, vectors, bytes);
    seen->cursor = cursor;
    return moved;
}

static void vectors_publish(mp_item *item, void *note, uint64_t began_ns, uint64_t now_ns) {
    (void)began_ns;
    (void)now_ns;
    item->cursor = ((vectors_note *)note)->cursor;
    mp_call_publish(&((WIRE_REQUEST *)item->call)->done, (int32_t)item->cursor);
}

static void vectors_close(mp_item *item) { (void)item; }

#define WIRE_VECTORS                                                                                        \
    .note_bytes = vectors_note_bytes, .put_call = vectors_put_call, .get_results = vectors_get_results,     \
    .publish = vectors_publish, .close = vectors_close, .get_call = vectors_get_call,                       \
    .record_bytes = vectors_note_bytes, .go_on = vectors_go_on, .put_results = vectors_put_results
