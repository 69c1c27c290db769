/* generation/stop_strings.h: text of one completion as it grows, from token bytes to final text.
 *
 * Text is final when it ends on a whole UTF-8 character and no stop string can still begin in it. Bytes that can never
 * become valid UTF-8 are replaced by U+FFFD. The text ends before the first stop string. */
#ifndef MP_MODELS_GENERATION_STOP_STRINGS_H
#define MP_MODELS_GENERATION_STOP_STRINGS_H

#include "models/capability.h"

typedef struct mp_stream {
    mp_choice *choice;  /* receives the text */
    uint32_t bytes;     /* bytes written, valid UTF-8 */
    uint32_t final;     /* bytes that are final; those beyond are held back */
    uint8_t pending[4]; /* incomplete character */
    int pending_bytes;
} mp_stream;

void mp_stream_init(mp_stream *stream, mp_choice *choice);
/* Appends the bytes of a token, without publishing them. Returns the index of a completed stop string, or -1. If the
 * token completes several, returns the one that begins earliest in the text, or, at equal positions, the one listed
 * first. After a match, the text ends before the stop string and is final. */
int mp_stream_append(mp_stream *stream, const uint8_t *bytes, size_t count, int n_stop, char *const *stop,
                     const int32_t *stop_bytes);
/* Stores the length of the final text in choice->text_bytes. Call after the token was published. */
void mp_stream_publish(mp_stream *stream);
/* Call after the last token: held-back text becomes final, an incomplete character becomes U+FFFD, and the whole text
 * is published. */
void mp_stream_finish(mp_stream *stream);

#endif
