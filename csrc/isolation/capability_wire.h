/* capability_wire.h: how requests of a capability are sent to a worker process and their results come back. One row of
 * functions per capability, in wire_<capability>.c; vision wraps the row of text. A capability without a row is
 * UNSUPPORTED in worker processes.
 *
 * The parent trusts no result: it checks everything against the request before a caller can see any of it. */
#ifndef MP_ISOLATION_CAPABILITY_WIRE_H
#define MP_ISOLATION_CAPABILITY_WIRE_H

#include "isolation/wire.h"
#include "models/engine.h"

typedef struct mp_request_wire {
    bool amount_may_be_0; /* a step may compute none of a request's units */

    /* --- in the parent --- */
    /* Returns UNSUPPORTED for a request that a worker process cannot serve. */
    mp_status (*check)(const mp_request *request, mp_error *error);
    /* Bytes of the parent's note on an item while it is admitted. The note is zeroed, then passed to the functions
     * below. */
    size_t (*note_bytes)(const mp_request *request);
    /* Send the request and its progress, so that any process can continue it. */
    void (*put_request)(mp_wire_out *out, const mp_item *item, void *note);
    /* Send the input that arrived for the request since the last time. Called before each plan. NULL: there never is
     * any. */
    void (*put_more)(mp_wire_out *out, const mp_item *item, void *note);
    /* True if the item cannot continue until more input arrives. NULL: never. */
    bool (*waits)(const mp_item *item, const void *note);
    /* Read the results since the last time, for an item of which `amount` units were planned. Check them, and write
     * them where no caller reads yet. Refuse the message if they are invalid. Returns true if the request made progress
     * since it was given to this process. */
    bool (*get_results)(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome, void *note);
    /* Maximum consecutive steps without progress on a request in a correct process, as far as the parent can tell. */
    uint64_t (*most_idle)(const mp_request *request);
    /* Make the results visible to callers. Called after the whole message was valid. began_ns and now_ns: begin and end
     * of the step. */
    void (*publish)(mp_item *item, void *note, uint64_t began_ns, uint64_t now_ns);
    /* The item leaves, possibly before it is finished, or because it was preempted. */
    void (*close)(mp_item *item);

    /* --- in the child --- */
    /* Read a request and its progress into a new *request. The model then checks the request, which sets its output
     * buffers, and go_on writes the progress into them. */
    mp_status (*get_request)(mp_wire_in *in, mp_request **request, mp_error *error);
    size_t (*record_bytes)(const mp_request *request); /* as note_bytes */
    mp_status (*go_on)(mp_wire_in *in, mp_item *item, void *record, mp_error *error);
    bool (*get_more)(mp_wire_in *in, mp_item *item); /* the reverse of put_more; false: the message was truncated */
    void (*put_results)(mp_wire_out *out, const mp_item *item, void *record);
} mp_request_wire;

/* NULL if the capability has no row. */
const mp_request_wire *mp_request_wire_of(mp_capability capability);

extern const mp_request_wire mp_wire_text_embedding, mp_wire_text_to_text, mp_wire_image_embedding, mp_wire_vision,
    mp_wire_text_to_image;

#endif
