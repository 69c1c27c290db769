/* cursor.h: a bounds-checked little-endian reader over bytes in memory. Input is hostile: every length is checked
 * against the remaining bytes before it is used. A failed read does not move the cursor. */
#ifndef MP_FILES_CURSOR_H
#define MP_FILES_CURSOR_H

#include "base/error.h"

typedef struct mp_cursor {
    const uint8_t *data;
    uint64_t size, at;
    const char *file; /* file name for errors; borrowed */
} mp_cursor;

static inline uint64_t mp_cursor_left(const mp_cursor *c) { return c->size - c->at; }
/* `field` names the value that is read, for the error. */
mp_status mp_cursor_u32(mp_cursor *c, const char *field, uint32_t *value, mp_error *error);
mp_status mp_cursor_u64(mp_cursor *c, const char *field, uint64_t *value, mp_error *error);
/* Borrow `bytes` bytes and advance past them. */
mp_status mp_cursor_take(mp_cursor *c, uint64_t bytes, const char *field, const uint8_t **data, mp_error *error);

#endif
