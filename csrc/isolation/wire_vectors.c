/* wire_vectors.c: see wire_vectors.h. */
#include "isolation/wire_vectors.h"

size_t mp_vectors_progress_bytes(const mp_request *request) {
    (void)request;
    return sizeof(mp_vectors_progress);
}

mp_status mp_vectors_get_progress(mp_wire_in *in, mp_item *item, void *progress, mp_error *error) {
    (void)in;
    (void)error;
    ((mp_vectors_progress *)progress)->cursor = item->cursor;
    return MP_OK;
}

void mp_vectors_close(mp_item *item) { (void)item; }

bool mp_vectors_get_cursor(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome,
                           const mp_vectors_progress *seen, uint32_t *cursor) {
    const uint32_t left = item->total - seen->cursor;
    *cursor = mp_get_u32(in);
    if (*cursor < seen->cursor || *cursor - seen->cursor > (amount < left ? amount : left))
        return mp_wire_refuse(in, "more inputs are finished than were planned");
    if (outcome != MP_OUTCOME_FAILED && (outcome == MP_OUTCOME_DONE) != (*cursor == item->total))
        return mp_wire_refuse(in, "the outcome of a request does not match its number of finished inputs");
    return true;
}
