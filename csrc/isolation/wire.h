/* wire.h: messages as bytes: values are read in the order in which they were written, across the frames of a channel.
 * Numbers have the layout of memory, because both sides are one machine and one build.
 *
 * Errors are sticky: after a failure put and get do nothing, get returns zeros, and mp_wire_end or mp_wire_done reports
 * it. */
#ifndef MP_ISOLATION_WIRE_H
#define MP_ISOLATION_WIRE_H

#include "isolation/channel.h"

typedef struct mp_wire_out {
    mp_channel *channel;
    mp_frame_kind kind;
    size_t used;
    bool failed;
    uint8_t buffer[MP_FRAME_MOST];
} mp_wire_out;

void mp_wire_begin(mp_wire_out *out, mp_channel *channel, mp_frame_kind kind);
void mp_put(mp_wire_out *out, const void *data, size_t bytes);
static inline void mp_put_u8(mp_wire_out *out, uint8_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_u32(mp_wire_out *out, uint32_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_i32(mp_wire_out *out, int32_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_u64(mp_wire_out *out, uint64_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_f32(mp_wire_out *out, float value) { mp_put(out, &value, sizeof value); }
void mp_put_error(mp_wire_out *out, mp_status status, const mp_error *error);
/* Send the rest. Returns false if the channel is broken. */
bool mp_wire_end(mp_wire_out *out);

typedef struct mp_wire_in {
    mp_channel *channel;
    mp_frame_kind kind; /* kind of the message */
    size_t used, at;
    bool last, failed;
    uint8_t buffer[MP_FRAME_MOST];
} mp_wire_in;

/* Wait for a message. Returns false if the channel is broken. */
bool mp_wire_receive(mp_wire_in *in, mp_channel *channel, bool spin);
bool mp_get(mp_wire_in *in, void *data, size_t bytes);
/* Read `count` items into new memory, which the caller frees. After a failure returns NULL and sets *ok to false. */
void *mp_get_array(mp_wire_in *in, int64_t count, size_t size, bool *ok);
/* Read strings of these lengths, each 1 to `most`, into one allocation that the caller frees. Fails as mp_get_array. */
const char *const *mp_get_strings(mp_wire_in *in, const int32_t *lengths, int32_t count, int32_t most,
                                  const char *what, bool *ok);
uint8_t mp_get_u8(mp_wire_in *in);
uint32_t mp_get_u32(mp_wire_in *in);
int32_t mp_get_i32(mp_wire_in *in);
uint64_t mp_get_u64(mp_wire_in *in);
float mp_get_f32(mp_wire_in *in);
/* Read a number from 0 to `most`. Any other breaks the channel with the reason `what`, and returns 0. */
uint32_t mp_get_count(mp_wire_in *in, uint32_t most, const char *what);
bool mp_wire_refuse(mp_wire_in *in, const char *what); /* Break the channel with the reason `what`. Returns false. */
/* Read a status and its error. Refuses any but OK and those in `allowed`, which MP_OK terminates. Makes the texts UTF-8
 * without control characters. */
mp_status mp_get_error(mp_wire_in *in, const mp_status *allowed, mp_error *error);
/* Refuse the message unless all of it was read. */
bool mp_wire_done(mp_wire_in *in);
/* Skip the rest of the message. */
bool mp_wire_skip(mp_wire_in *in);

#endif
