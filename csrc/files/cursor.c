/* cursor.c: see cursor.h. */
#include "files/cursor.h"

#include <string.h>

static mp_status too_short(const mp_cursor *c, const char *field, uint64_t need, mp_error *error) {
    return mp_fail_file(error, MP_FORMAT, c->file, (int64_t)c->at, field, "at most the bytes left in the file",
                        "%llu bytes with %llu left", (unsigned long long)need,
                        (unsigned long long)mp_cursor_left(c));
}

mp_status mp_cursor_take(mp_cursor *c, uint64_t bytes, const char *field, const uint8_t **data, mp_error *error) {
    if (bytes > mp_cursor_left(c))
        return too_short(c, field, bytes, error);
    *data = c->data + c->at;
    c->at += bytes;
    return MP_OK;
}

#define READ(suffix, type)                                                                           \
    mp_status mp_cursor_##suffix(mp_cursor *c, const char *field, type *value, mp_error *error) {    \
        const uint8_t *data = NULL;                                                                  \
        MP_TRY(mp_cursor_take(c, sizeof(type), field, &data, error));                                \
        memcpy(value, data, sizeof(type));                                                           \
        return MP_OK;                                                                                \
    }

/* GGUF is little-endian, and so is every host that the build accepts: a value is read by copying its bytes. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian and read without byte swapping");

READ(u32, uint32_t)
READ(u64, uint64_t)
