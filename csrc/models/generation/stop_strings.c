#include "models/generation/stop_strings.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

void mp_stream_init(mp_stream *stream, mp_choice *choice) { *stream = (mp_stream){.choice = choice}; }

static void stop_put(mp_stream *stream, const uint8_t *bytes, size_t count) {
    assert(stream->bytes + count <= stream->choice->text_capacity);
    memcpy(stream->choice->text + stream->bytes, bytes, count);
    stream->bytes += (uint32_t)count;
}

static void put_replacement(mp_stream *stream) { stop_put(stream, (const uint8_t *)"\xEF\xBF\xBD", 3); }

/* Returns the length of the character that `lead` begins, or 0 if it begins none. */
static int character_bytes(uint8_t lead) {
    if (lead < 0x80)
        return 1;
    if (lead >= 0xC2 && lead <= 0xDF)
        return 2;
    if (lead >= 0xE0 && lead <= 0xEF)
        return 3;
    if (lead >= 0xF0 && lead <= 0xF4)
        return 4;
    return 0;
}

/* Returns true if `next` may be byte `at` of a character that begins with `lead` (Unicode 15, table 3-7). */
static bool stop_continues(uint8_t lead, int at, uint8_t next) {
    uint8_t low = 0x80, high = 0xBF;
    if (at == 1) {
        if (lead == 0xE0)
            low = 0xA0;
        else if (lead == 0xED)
            high = 0x9F;
        else if (lead == 0xF0)
            low = 0x90;
        else if (lead == 0xF4)
            high = 0x8F;
    }
    return next >= low && next <= high;
}

static void append_byte(mp_stream *stream, uint8_t byte) {
    if (stream->pending_bytes > 0) {
        if (stop_continues(stream->pending[0], stream->pending_bytes, byte)) {
            stream->pending[stream->pending_bytes++] = byte;
            if (stream->pending_bytes == character_bytes(stream->pending[0])) {
                stop_put(stream, stream->pending, (size_t)stream->pending_bytes);
                stream->pending_bytes = 0;
            }
            return;
        }
        /* one U+FFFD replaces the longest valid beginning of a character, as in Python's decoder */
        put_replacement(stream);
        stream->pending_bytes = 0;
    }
    int length = character_bytes(byte);
    if (length == 1)
        stop_put(stream, &byte, 1);
    else if (length == 0)
        put_replacement(stream);
    else
        stream->pending[stream->pending_bytes++] = byte;
}

/* Returns the start of the longest suffix of text[from..bytes) that is a proper prefix of a stop string, or `bytes` if
 * there is none. */
static uint32_t held_from(const char *text, uint32_t from, uint32_t bytes, int n_stop, char *const *stop,
                          const int32_t *stop_bytes) {
    uint32_t held = bytes;
    for (int i = 0; i < n_stop; i++) {
        uint32_t most = (uint32_t)stop_bytes[i] - 1;
        uint32_t start = bytes - from > most ? bytes - most : from;
        for (; start < held; start++)
            if (memcmp(text + start, stop[i], bytes - start) == 0) {
                held = start;
                break;
            }
    }
    return held;
}

static bool is_blank(char byte) { return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; }

/* Decide whether the text begins with reasoning. */
static void follow_beginning(mp_stream *stream, const mp_text_request *request) {
    const char *text = stream->choice->text;
    uint32_t start = 0;
    bool may_begin = false;
    while (start < stream->bytes && is_blank(text[start]))
        start++;
    for (int i = 0; i < request->n_reasoning_starts; i++) {
        const uint32_t whole = (uint32_t)request->reasoning_start_bytes[i], left = stream->bytes - start;
        if (memcmp(text + start, request->reasoning_starts[i], left < whole ? left : whole) != 0)
            continue;
        if (left >= whole) {
            stream->phase = MP_STREAM_REASONING;
            return;
        }
        may_begin = true;
    }
    if (!may_begin)
        stream->phase = MP_STREAM_RESPONSE;
}

/* Find the end of the reasoning. */
static void follow_reasoning(mp_stream *stream, const mp_text_request *request) {
    const char *text = stream->choice->text;
    uint32_t found_at = stream->bytes, end = 0, longest = 1;
    for (int i = 0; i < request->n_reasoning_ends; i++) {
        const uint32_t size = (uint32_t)request->reasoning_end_bytes[i];
        longest = size > longest ? size : longest;
        for (uint32_t at = stream->from; at + size <= stream->bytes && at < found_at; at++)
            if (memcmp(text + at, request->reasoning_ends[i], size) == 0) {
                found_at = at;
                end = at + size;
            }
    }
    if (end > 0) {
        stream->phase = MP_STREAM_RESPONSE;
        stream->from = stream->gap = end;
        stream->in_gap = true;
    } else if (stream->bytes - stream->from >= longest) {
        stream->from = stream->bytes - longest + 1;
    }
}

/* Find the phase of the text. */
static void stop_follow(mp_stream *stream, const mp_text_request *request) {
    const char *text = stream->choice->text;
    if (stream->phase == MP_STREAM_BEGINNING && request->in_reasoning)
        stream->phase = MP_STREAM_REASONING;
    else if (stream->phase == MP_STREAM_BEGINNING)
        follow_beginning(stream, request);
    if (stream->phase == MP_STREAM_REASONING)
        follow_reasoning(stream, request);
    while (stream->in_gap && stream->gap < stream->bytes)
        if (is_blank(text[stream->gap]))
            stream->gap++;
        else
            stream->in_gap = false;
}

/* Returns the index of the text that begins earliest in text[from..end) and ends behind `gap`, or -1. `found_at`
 * becomes its start. */
static int stop_find(const mp_stream *stream, uint32_t from, uint32_t end, uint32_t gap, int n, char *const *texts,
                     const int32_t *lengths, uint32_t *found_at) {
    int found = -1;
    *found_at = end;
    for (int i = 0; i < n; i++) {
        const uint32_t size = (uint32_t)lengths[i];
        for (uint32_t at = from; at + size <= end && at < *found_at; at++)
            if (at + size > gap && memcmp(stream->choice->text + at, texts[i], size) == 0) {
                found = i;
                *found_at = at;
                break;
            }
    }
    return found;
}

int mp_stream_append(mp_stream *stream, const mp_text_request *request, const uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        append_byte(stream, bytes[i]);
    for (;;) {
        stop_follow(stream, request);
        if (stream->phase != MP_STREAM_RESPONSE) {
            stream->final = stream->phase == MP_STREAM_REASONING ? stream->bytes : 0;
            return -1;
        }
        /* a stop string begins neither in text that is final already, nor in the reasoning, nor in a call */
        const uint32_t decided = stream->final > stream->from ? stream->final : stream->from;
        uint32_t call_at, found_at;
        const int call = stop_find(stream, decided, stream->bytes, 0, request->n_call_starts, request->call_starts,
                                   request->call_start_bytes, &call_at);
        if (call < 0) /* the last bytes may begin a call: stop strings wait for the next token */
            call_at = held_from(stream->choice->text, decided, stream->bytes, request->n_call_starts,
                                request->call_starts, request->call_start_bytes);
        const int found = stop_find(stream, decided, call_at, stream->gap, request->n_stop, request->stop,
                                    request->stop_bytes, &found_at);
        if (found >= 0) {
            stream->bytes = stream->final = found_at;
            stream->pending_bytes = 0;
            return found;
        }
        if (call < 0) {
            stream->final = held_from(stream->choice->text, decided, stream->bytes, request->n_stop, request->stop,
                                      request->stop_bytes);
            stream->final = call_at < stream->final ? call_at : stream->final;
            return -1;
        }
        stream->phase = MP_STREAM_REASONING;
        stream->from = call_at;
        stream->final = call_at + (uint32_t)request->call_start_bytes[call];
    }
}

bool mp_stream_reasons(const mp_stream *stream, const mp_text_request *request) {
    return stream->phase == MP_STREAM_REASONING || (stream->phase == MP_STREAM_BEGINNING && request->in_reasoning);
}

void mp_stream_publish(mp_stream *stream) {
    atomic_store_explicit(&stream->choice->text_bytes, stream->final, memory_order_release);
}

int mp_stream_finish(mp_stream *stream, const mp_text_request *request) {
    int found = -1;
    if (stream->phase == MP_STREAM_RESPONSE || (stream->phase == MP_STREAM_BEGINNING && !request->in_reasoning)) {
        /* no call and no reasoning begins with the text that waited for the next token */
        const uint32_t decided = stream->final > stream->from ? stream->final : stream->from;
        uint32_t end;
        found = stop_find(stream, decided, stream->bytes, stream->gap, request->n_stop, request->stop,
                          request->stop_bytes, &end);
        stream->bytes = end;
    }
    if (found < 0 && stream->pending_bytes > 0)
        put_replacement(stream);
    stream->pending_bytes = 0;
    stream->final = stream->bytes;
    mp_stream_publish(stream);
    return found;
}
