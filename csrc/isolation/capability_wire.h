/* capability_wire.h: how calls of a capability go to a worker process and their results come back: one row of functions
 * a capability, in wire_<capability>.c; that of vision beside the texts'. A capability without a row is UNSUPPORTED
 * there.
 *
 * The parent believes no result: everything is checked against the call before a caller can see any of it. */
#ifndef MP_ISOLATION_CAPABILITY_WIRE_H
#define MP_ISOLATION_CAPABILITY_WIRE_H

#include "isolation/wire.h"
#include "models/engine.h"

typedef struct mp_call_wire {
    bool amount_may_be_0; /* a step may compute what is none of a call's units */

    /* --- in the parent --- */
    /* What a worker process cannot do: UNSUPPORTED. */
    mp_status (*check)(const mp_call *call, mp_error *error);
    /* Bytes of what is kept beside an item while it is admitted: zeroed, then passed to all that follow. */
    size_t (*note_bytes)(const mp_call *call);
    /* The call and how far it is, so that any process can go on with it. */
    void (*put_call)(mp_wire_out *out, const mp_item *item, void *note);
    /* What came for the call since the last time, before a plan. NULL: nothing ever does. */
    void (*put_more)(mp_wire_out *out, const mp_item *item, void *note);
    /* Whether nothing can be done for the item before more comes. NULL: that is never so. */
    bool (*waits)(const mp_item *item, const void *note);
    /* What came since the last time, for an item of which `amount` was planned. Checked, and written where nobody looks
     * yet. Refuses the message otherwise. Whether the call got on since it was given to this process. */
    bool (*get_results)(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome, void *note);
    /* Steps in a row in which an honest process may not get on with a call, as far as can be seen from here. */
    uint64_t (*most_idle)(const mp_call *call);
    /* Let callers see it: the whole message was as it must be. now_ns: of the step's beginning and end. */
    void (*publish)(mp_item *item, void *note, uint64_t began_ns, uint64_t now_ns);
    /* The item leaves, perhaps before its end; also one that was preempted. */
    void (*close)(mp_item *item);

    /* --- in the child --- */
    /* *call: made, with how far it is. Once the model has checked it (output buffers), go_on writes that there. */
    mp_status (*get_call)(mp_wire_in *in, mp_call **call, mp_error *error);
    size_t (*record_bytes)(const mp_call *call); /* like note_bytes */
    mp_status (*go_on)(mp_wire_in *in, mp_item *item, void *record, mp_error *error);
    bool (*get_more)(mp_wire_in *in, mp_item *item); /* as put_more; false: the message was cut */
    void (*put_results)(mp_wire_out *out, const mp_item *item, void *record);
} mp_call_wire;

/* NULL when there is none. */
const mp_call_wire *mp_call_wire_of(mp_capability capability);

extern const mp_call_wire mp_wire_text_embedding, mp_wire_text_to_text, mp_wire_image_embedding, mp_wire_vision,
    mp_wire_text_to_image;

#endif
