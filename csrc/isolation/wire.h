/* wire.h: messages as bytes: values go in one after the other and come out in the same order, across the frames of a
 * channel. Numbers as they stand in memory: both sides are one machine and one build.
 *
 * Failures stick: put and get may be called on, and the end tells. What a reader gets after a failure is zero. */
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
/* Send what is left. False: the channel is broken. */
bool mp_wire_end(mp_wire_out *out);

typedef struct mp_wire_in {
    mp_channel *channel;
    mp_frame_kind kind; /* of the message */
    size_t used, at;
    bool last, failed;
    uint8_t buffer[MP_FRAME_MOST];
} mp_wire_in;

/* Wait for a message. False: the channel is broken. */
bool mp_wire_receive(mp_wire_in *in, mp_channel *channel, bool spin);
bool mp_get(mp_wire_in *in, void *data, size_t bytes);
/* So many items in memory of their own, which the caller frees. NULL after a failure, and *ok is false. */
void *mp_get_array(mp_wire_in *in, int64_t count, size_t size, bool *ok);
/* Strings of these lengths, each 1 to `most`, in one piece of memory that the caller frees. As mp_get_array. */
const char *const *mp_get_strings(mp_wire_in *in, const int32_t *lengths, int32_t count, int32_t most,
                                  const char *what, bool *ok);
uint8_t mp_get_u8(mp_wire_in *in);
uint32_t mp_get_u32(mp_wire_in *in);
int32_t mp_get_i32(mp_wire_in *in);
uint64_t mp_get_u64(mp_wire_in *in);
float mp_get_f32(mp_wire_in *in);
/* A number within bounds; breaks the channel otherwise, as does everything that is not as it must be. */
uint32_t mp_get_count(mp_wire_in *in, uint32_t most, const char *what);
bool mp_wire_refuse(mp_wire_in *in, const char *what); /* false */
/* A status and its error: OK, or one of those that may be said there, which MP_OK ends; anything else is refused. Texts
 * come out as UTF-8 without control characters. */
mp_status mp_get_error(mp_wire_in *in, const mp_status *allowed, mp_error *error);
/* The message is over, and all of it was read; else it is refused. */
bool mp_wire_done(mp_wire_in *in);
/* Read it to its end without looking. */
bool mp_wire_skip(mp_wire_in *in);

#endif
