/* wire_vectors.h: the part common to requests whose results are rows, such as vectors, in the order of their inputs;
 * see capability_wire.h. A message of results has the rows of the inputs finished since the previous message. */
#ifndef MP_ISOLATION_WIRE_VECTORS_H
#define MP_ISOLATION_WIRE_VECTORS_H

#include "isolation/capability_wire.h"

typedef struct mp_vectors_progress {
    uint32_t cursor; /* inputs whose rows were sent or received */
} mp_vectors_progress;

size_t mp_vectors_progress_bytes(const mp_request *request);
mp_status mp_vectors_get_progress(mp_wire_in *in, mp_item *item, void *progress, mp_error *error);
void mp_vectors_close(mp_item *item);
/* Read the number of inputs that are finished after this message. Returns false if it has refused
 * the message. */
bool mp_vectors_get_cursor(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome,
                           const mp_vectors_progress *seen, uint32_t *cursor);

#endif
