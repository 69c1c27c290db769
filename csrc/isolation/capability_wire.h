/* capability_wire.h: how requests of a capability are sent to a worker process and their results come back. Each
 * capability has a row of functions (mp_request_wire) in wire_<capability>.c; vision has that of text. A
 * capability without a row is UNSUPPORTED in worker processes.
 *
 * The parent trusts no result: it checks each message of results against the request before a caller can see any of
 * them. */
#ifndef MP_ISOLATION_CAPABILITY_WIRE_H
#define MP_ISOLATION_CAPABILITY_WIRE_H

#include "isolation/wire.h"
#include "models/engine.h"

typedef struct mp_request_wire {
    /* Return the size of an item's progress: what this process last sent or received of the item. Each process keeps
     * it while the item is admitted, zeroes it at the start, and passes it to the functions below. */
    size_t (*progress_bytes)(const mp_request *request);

    /* --- in the parent --- */
    /* Returns UNSUPPORTED for a request that a worker process cannot serve. */
    mp_status (*check)(const mp_request *request, mp_error *error);
    /* Send the request and its progress, so that a new process can continue the request. */
    void (*put_request)(mp_wire_out *out, const mp_item *item, void *progress);
    /* Send the input that arrived for the request since the previous call. Called before each plan. NULL: no input
     * arrives after admission. */
    void (*put_more)(mp_wire_out *out, const mp_item *item, void *progress);
    /* True if the item cannot continue until more input arrives. NULL: never. */
    bool (*waits)(const mp_item *item, const void *progress);
    /* Read the results that are new since the previous call, for an item of which `amount` units were planned. Write
     * them where no caller reads before `publish`. Refuse the message if a result is invalid. Returns true if the
     * request made progress in this process. */
    bool (*get_results)(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome, void *progress);
    /* Return the maximum number of consecutive steps in which a correct process makes no progress on a request. */
    uint64_t (*most_idle)(const mp_request *request);
    /* Make the results visible to callers. Called once the whole message was found valid. began_ns and now_ns: begin
     * and end of the step. */
    void (*publish)(mp_item *item, void *progress, uint64_t began_ns, uint64_t now_ns);
    /* Mark an unfinished result as cancelled. Called when an item is retired, finished or not, and when an item ends
     * after a preemption. */
    void (*close)(mp_item *item);

    /* --- in the child --- */
    /* The reverse of put_request, in two parts. get_request reads the request into a new *request. The model then
     * checks the request, which sets up its output buffers, and get_progress reads the progress into these buffers. */
    mp_status (*get_request)(mp_wire_in *in, mp_request **request, mp_error *error);
    mp_status (*get_progress)(mp_wire_in *in, mp_item *item, void *progress, mp_error *error);
    bool (*get_more)(mp_wire_in *in, mp_item *item); /* the reverse of put_more; false: the message is invalid */
    void (*put_results)(mp_wire_out *out, const mp_item *item, void *progress);
} mp_request_wire;

/* NULL if the capability has no row. */
const mp_request_wire *mp_request_wire_of(mp_capability capability);

extern const mp_request_wire mp_wire_text_embedding, mp_wire_text_to_text, mp_wire_image_embedding,
    mp_wire_text_to_image;

#endif
