/* generation/stop_strings.h: text of one answer as it grows: tokens' bytes in, decided text out.
 *
 * Text is decided when it ends on a whole UTF-8 character and no stop string can still begin in it. Bytes that can
 * never become valid UTF-8 are replaced by U+FFFD, as every decoder of text would. A stop string ends the text before
 * it. */
#ifndef MP_MODELS_GENERATION_STOP_STRINGS_H
#define MP_MODELS_GENERATION_STOP_STRINGS_H

#include "models/capability.h"

typedef struct mp_stream {
    mp_choice *choice;  /* text goes here */
    uint32_t bytes;     /* written, valid UTF-8; beyond choice->text_bytes they are held back */
    uint8_t pending[4]; /* the beginning of a character */
    int pending_bytes;
} mp_stream;

void mp_stream_init(mp_stream *stream, mp_choice *choice);
/* Append a token's bytes. Returns the index of the stop string that is now complete (the earliest in the text; the
 * first listed when several begin there), or -1; then the text is cut before it and decided. */
int mp_stream_append(mp_stream *stream, const uint8_t *bytes, size_t count, int n_stop, char *const *stop,
                     const int32_t *stop_bytes);
/* No more tokens: what is held back is decided, an unfinished character becomes U+FFFD. */
void mp_stream_finish(mp_stream *stream);

#endif
