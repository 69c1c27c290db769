/* wire.c: see wire.h. */
#include "isolation/wire.h"

#include <string.h>

#include "base/alloc.h"
#include "files/spec_build.h"

/* --- out --- */

void mp_wire_begin(mp_wire_out *out, mp_channel *channel, mp_frame_kind kind) {
    out->channel = channel;
    out->kind = kind;
    out->used = 0;
    out->failed = channel->broken;
}

void mp_put(mp_wire_out *out, const void *data, size_t bytes) {
    const uint8_t *from = data;
    while (bytes && !out->failed) {
        if (out->used == MP_FRAME_MAX) { /* send a full frame only when more data follows: it may be the last one */
            out->failed = !mp_channel_send(out->channel, out->kind, false, out->buffer, out->used);
            out->used = 0;
        }
        size_t part = MP_FRAME_MAX - out->used;
        part = part < bytes ? part : bytes;
        memcpy(out->buffer + out->used, from, part);
        out->used += part;
        from += part;
        bytes -= part;
    }
}

void mp_put_optional(mp_wire_out *out, const void *data, size_t bytes) {
    mp_put_u8(out, data != NULL);
    if (data)
        mp_put(out, data, bytes);
}

static void put_text(mp_wire_out *out, const char *text) {
    size_t bytes = strlen(text);
    mp_put_u32(out, (uint32_t)bytes);
    mp_put(out, text, bytes);
}

void mp_put_error(mp_wire_out *out, mp_status status, const mp_error *error) {
    mp_put_u32(out, (uint32_t)status);
    if (status == MP_OK)
        return;
    mp_put(out, &error->offset, sizeof error->offset);
    put_text(out, error->message);
    put_text(out, error->file);
    put_text(out, error->field);
    put_text(out, error->got);
    put_text(out, error->allowed);
    put_text(out, error->hint);
}

bool mp_wire_end(mp_wire_out *out) {
    if (!out->failed)
        out->failed = !mp_channel_send(out->channel, out->kind, true, out->buffer, out->used);
    return !out->failed;
}

/* --- in --- */

static bool next_frame(mp_wire_in *in, bool spin, bool first) {
    mp_frame frame;
    if (!mp_channel_receive(in->channel, spin, &frame, in->buffer))
        return false;
    if (!first && frame.kind != in->kind)
        return mp_channel_break(in->channel, "a message was not finished");
    in->kind = (mp_frame_kind)frame.kind;
    in->used = frame.bytes;
    in->at = 0;
    in->last = frame.last;
    return true;
}

bool mp_wire_receive(mp_wire_in *in, mp_channel *channel, bool spin) {
    in->channel = channel;
    in->failed = !next_frame(in, spin, true);
    return !in->failed;
}

bool mp_wire_refuse(mp_wire_in *in, const char *what) {
    in->failed = true;
    return mp_channel_break(in->channel, what);
}

/* Read as many bytes as there are, and return the number of those that are missing. */
static size_t read_bytes(mp_wire_in *in, uint8_t *to, size_t bytes) {
    while (bytes && !in->failed) {
        if (in->at == in->used) {
            if (in->last)
                mp_wire_refuse(in, "a message is too short");
            else
                in->failed = !next_frame(in, false, false);
            continue;
        }
        size_t part = in->used - in->at;
        part = part < bytes ? part : bytes;
        memcpy(to, in->buffer + in->at, part);
        in->at += part;
        to += part;
        bytes -= part;
    }
    return bytes;
}

bool mp_get(mp_wire_in *in, void *data, size_t bytes) {
    const size_t missing = read_bytes(in, data, bytes);
    if (missing)
        memset((uint8_t *)data + bytes - missing, 0, missing);
    return !in->failed;
}

void *mp_get_array(mp_wire_in *in, int64_t count, size_t size, bool *ok) {
    void *data = in->failed ? NULL : mp_alloc_array((size_t)count + 1, size, MP_TAG_REQUEST);
    *ok = *ok && data;
    if (data) /* it is zeroed; writing zeros again would occupy gigabytes if `count` is corrupted */
        read_bytes(in, data, (size_t)count * size);
    return data;
}

void *mp_get_optional(mp_wire_in *in, int64_t count, size_t size, bool *ok) {
    return mp_get_u8(in) ? mp_get_array(in, count, size, ok) : NULL;
}

bool mp_get_floats(mp_wire_in *in, float *to, size_t count, float low, float high, const char *what) {
    if (count == 0)
        return !in->failed;
    if (!mp_get(in, to, count * sizeof *to))
        return false;
    for (size_t i = 0; i < count; i++)
        if (!(low <= to[i] && to[i] <= high)) /* refuses NaN */
            return mp_wire_refuse(in, what);
    return true;
}

const char *const *mp_get_strings(mp_wire_in *in, const int32_t *lengths, int32_t count, int32_t most,
                                  const char *what, bool *ok) {
    int64_t bytes = 0;
    for (int32_t i = 0; !in->failed && lengths && i < count; i++) {
        if (lengths[i] < 1 || lengths[i] > most)
            mp_wire_refuse(in, what);
        else
            bytes += lengths[i];
    }
    const size_t pointers = ((size_t)count + 1) * sizeof(char *);
    const char **strings = in->failed || !lengths ? NULL : mp_alloc_zeroed(pointers + (size_t)bytes, MP_TAG_REQUEST);
    *ok = *ok && strings;
    if (!strings)
        return NULL;
    char *text = (char *)strings + pointers;
    mp_get(in, text, (size_t)bytes);
    for (int32_t i = 0; i < count; i++) {
        strings[i] = text;
        text += lengths[i];
    }
    return strings;
}

uint8_t mp_get_u8(mp_wire_in *in) {
    uint8_t value;
    mp_get(in, &value, sizeof value);
    return value;
}
uint32_t mp_get_u32(mp_wire_in *in) {
    uint32_t value;
    mp_get(in, &value, sizeof value);
    return value;
}
int32_t mp_get_i32(mp_wire_in *in) {
    int32_t value;
    mp_get(in, &value, sizeof value);
    return value;
}
uint64_t mp_get_u64(mp_wire_in *in) {
    uint64_t value;
    mp_get(in, &value, sizeof value);
    return value;
}
float mp_get_f32(mp_wire_in *in) {
    float value;
    mp_get(in, &value, sizeof value);
    return value;
}

uint32_t mp_get_count(mp_wire_in *in, uint32_t most, const char *what) {
    uint32_t value = mp_get_u32(in);
    if (value > most) {
        mp_wire_refuse(in, what);
        return 0;
    }
    return value;
}

int64_t mp_wire_within(mp_wire_in *in, int64_t value, int64_t low, int64_t high, const char *what) {
    if (in->failed || (value >= low && value <= high))
        return value;
    mp_wire_refuse(in, what);
    return 0;
}

static void get_text(mp_wire_in *in, char *text, size_t size) {
    uint32_t bytes = mp_get_count(in, (uint32_t)size - 1, "a text is too long");
    mp_get(in, text, bytes);
    text[bytes] = 0;
    bool utf8 = mp_is_utf8(text, bytes);
    for (uint32_t i = 0; i < bytes; i++) {
        uint8_t byte = (uint8_t)text[i];
        if (byte < 0x20 || byte == 0x7F || (!utf8 && byte >= 0x80))
            text[i] = '?';
    }
}

mp_status mp_get_error(mp_wire_in *in, const mp_status *allowed, mp_error *error) {
    mp_error_clear(error);
    uint32_t code = mp_get_u32(in);
    if (code == MP_OK)
        return in->failed ? MP_RECV : MP_OK;
    error->code = (mp_status)code;
    mp_get(in, &error->offset, sizeof error->offset);
    get_text(in, error->message, sizeof error->message);
    get_text(in, error->file, sizeof error->file);
    get_text(in, error->field, sizeof error->field);
    get_text(in, error->got, sizeof error->got);
    get_text(in, error->allowed, sizeof error->allowed);
    get_text(in, error->hint, sizeof error->hint);
    while (*allowed != MP_OK && *allowed != error->code)
        allowed++;
    if (*allowed == MP_OK)
        mp_wire_refuse(in, "it reports a status that is not allowed here");
    if (in->failed)
        error->code = MP_RECV;
    return error->code;
}

bool mp_wire_done(mp_wire_in *in) {
    if (!in->failed && (!in->last || in->at != in->used))
        mp_wire_refuse(in, "a message is too long");
    return !in->failed;
}

bool mp_wire_skip(mp_wire_in *in) {
    while (!in->failed && !in->last)
        in->failed = !next_frame(in, false, false);
    in->at = in->used;
    return !in->failed;
}
