/* wire.h: messages of values over a channel. A message may span several frames; values are read in the order in which
 * they were written. Numbers are sent as they lie in memory, because both sides run the same build on the same machine.
 *
 * Errors are sticky: after a failure, mp_put* does nothing, mp_get* returns zeros, and mp_wire_end or mp_wire_done
 * returns false. */
#ifndef MP_ISOLATION_WIRE_H
#define MP_ISOLATION_WIRE_H

#include "isolation/channel.h"

typedef struct mp_wire_out {
    mp_channel *channel;
    mp_frame_kind kind;
    size_t used;
    bool failed;
    uint8_t buffer[MP_FRAME_MAX];
} mp_wire_out;

void mp_wire_begin(mp_wire_out *out, mp_channel *channel, mp_frame_kind kind);
void mp_put(mp_wire_out *out, const void *data, size_t bytes);
static inline void mp_put_u8(mp_wire_out *out, uint8_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_u32(mp_wire_out *out, uint32_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_i32(mp_wire_out *out, int32_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_u64(mp_wire_out *out, uint64_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_i64(mp_wire_out *out, int64_t value) { mp_put(out, &value, sizeof value); }
static inline void mp_put_f32(mp_wire_out *out, float value) { mp_put(out, &value, sizeof value); }
void mp_put_error(mp_wire_out *out, mp_status status, const mp_error *error);
/* Send the rest of the message. Returns false if the channel is broken. */
bool mp_wire_end(mp_wire_out *out);

typedef struct mp_wire_in {
    mp_channel *channel;
    mp_frame_kind kind; /* kind of the message */
    size_t used, at;
    bool last, failed;
    uint8_t buffer[MP_FRAME_MAX];
} mp_wire_in;

/* Wait for a message. Returns false if the channel is broken. */
bool mp_wire_receive(mp_wire_in *in, mp_channel *channel, bool spin);
bool mp_get(mp_wire_in *in, void *data, size_t bytes);
/* Read `count` items of `size` bytes into new memory, which the caller frees. If the message has failed before or
 * memory is exhausted, returns NULL and sets *ok to false; never sets *ok to true. If the message fails during the
 * read, the missing items are zeros. */
void *mp_get_array(mp_wire_in *in, int64_t count, size_t size, bool *ok);
/* Put an array that may be NULL, and read it again as mp_get_array; NULL leaves *ok unchanged. */
void mp_put_optional(mp_wire_out *out, const void *data, size_t bytes);
void *mp_get_optional(mp_wire_in *in, int64_t count, size_t size, bool *ok);
/* Read `count` floats into `to`. Refuses the message with `what` if one of them is NaN or outside the bounds. */
bool mp_get_floats(mp_wire_in *in, float *to, size_t count, float low, float high, const char *what);
/* Read `count` strings with the given lengths, each 1 to `most`, into one allocation that the caller frees. Fails as
 * mp_get_array. */
const char *const *mp_get_strings(mp_wire_in *in, const int32_t *lengths, int32_t count, int32_t most,
                                  const char *what, bool *ok);
uint8_t mp_get_u8(mp_wire_in *in);
uint32_t mp_get_u32(mp_wire_in *in);
int32_t mp_get_i32(mp_wire_in *in);
uint64_t mp_get_u64(mp_wire_in *in);
static inline int64_t mp_get_i64(mp_wire_in *in) { return (int64_t)mp_get_u64(in); }
float mp_get_f32(mp_wire_in *in);
/* Read a number from 0 to `most`. For any other number, breaks the channel with the reason `what` and returns 0. */
uint32_t mp_get_count(mp_wire_in *in, uint32_t most, const char *what);
/* Returns `value`, which was read from the message. Refuses the message and returns 0 if it is not from low to high. */
int64_t mp_wire_within(mp_wire_in *in, int64_t value, int64_t low, int64_t high, const char *what);
bool mp_wire_refuse(mp_wire_in *in, const char *what); /* Break the channel with the reason `what`. Returns false. */
/* Read a status and its error. Refuses a status that is neither MP_OK nor in `allowed`, a list that MP_OK terminates.
 * Replaces invalid UTF-8 and control characters in the texts. */
mp_status mp_get_error(mp_wire_in *in, const mp_status *allowed, mp_error *error);
/* Refuse the message unless all of it was read. Returns true if it was, and nothing failed before. */
bool mp_wire_done(mp_wire_in *in);
/* Skip the rest of the message. Returns false if the channel is broken. */
bool mp_wire_skip(mp_wire_in *in);

#endif
