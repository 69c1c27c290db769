/* generation/stop_strings.h: text of one completion as it grows, from token bytes to final text.
 *
 * Text is final when it ends on a whole UTF-8 character and no stop string can still begin in it. Bytes that can never
 * become valid UTF-8 are replaced by U+FFFD. The text ends before the first stop string.
 *
 * Stop strings end the response of a completion, and never its reasoning. A completion begins with reasoning if the
 * prompt began it (`in_reasoning`), or if the text begins with one of `reasoning_starts`, after white space. The first
 * of `reasoning_ends` in the text ends the reasoning; the white space behind it is no response either. A text of
 * `call_starts` in the response begins a tool call, or another part that is not for the user. Such a part ends as
 * reasoning does, and stop strings do not end it either. A text of both `call_starts` and `reasoning_ends` is a whole
 * part. */
#ifndef MP_MODELS_GENERATION_STOP_STRINGS_H
#define MP_MODELS_GENERATION_STOP_STRINGS_H

#include "models/capability.h"

typedef enum mp_stream_phase {
    MP_STREAM_BEGINNING, /* the text may still become reasoning or response */
    MP_STREAM_REASONING, /* reasoning, or a tool call */
    MP_STREAM_RESPONSE
} mp_stream_phase;

typedef struct mp_stream {
    mp_choice *choice;  /* receives the text */
    uint32_t bytes;     /* bytes written, valid UTF-8 */
    uint32_t final;     /* bytes that are final; those beyond are held back */
    mp_stream_phase phase;
    uint32_t from; /* reasoning: first byte where its end may begin; response: first byte behind that end */
    uint32_t gap;  /* response: first byte that is not white space behind the reasoning, or `bytes` so far */
    bool in_gap;   /* the text behind the reasoning is white space so far */
    uint8_t pending[4]; /* incomplete character */
    int pending_bytes;
} mp_stream;

void mp_stream_init(mp_stream *stream, mp_choice *choice);
/* Appends the bytes of a token, without publishing them. Returns the index of a completed stop string of the request,
 * or -1. If the token completes several, returns the one that begins earliest in the text, or, at equal positions, the
 * one listed first. After a match, the text ends before the stop string and is final. */
int mp_stream_append(mp_stream *stream, const mp_text_request *request, const uint8_t *bytes, size_t count);
/* Returns true if the next token continues reasoning or a tool call. */
bool mp_stream_reasons(const mp_stream *stream, const mp_text_request *request);
/* Stores the length of the final text in choice->text_bytes. Call after the token was published. */
void mp_stream_publish(mp_stream *stream);
/* Call after the last token: held-back text becomes final, an incomplete character becomes U+FFFD, and the whole text
 * is published. Returns the index of a stop string in the held-back text, as mp_stream_append, or -1. */
int mp_stream_finish(mp_stream *stream, const mp_text_request *request);

#endif
