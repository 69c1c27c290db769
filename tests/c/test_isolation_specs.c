/* Encoded specs with one wrong field: each is refused, with the field. The nearest right value is accepted. The bytes
 * are written here, because the encoder writes none that are wrong. */
#include <stdlib.h>
#include <string.h>

#include "files/spec_build.h"
#include "isolation/spec_codec.h"
#include "mp_test.h"

enum { TEXT = MP_SPEC_MAX_KEY + 1, ROOM = 2 * TEXT };

/* The parts of a spec with one value, one tensor and two tokens. */
typedef struct parts {
    uint64_t magic, key_bytes, nul_at, type, gguf_type, count, number, name_bytes, dtype, ndim, file, tokens;
    uint64_t first_offset, second_offset, last_offset, flag, ends, tail;
} parts;

static const parts right = {.magic = 0x31505053u,
                            .key_bytes = 5,
                            .nul_at = UINT64_MAX,
                            .type = MP_VALUE_INT,
                            .gguf_type = 11,
                            .count = 1,
                            .number = 1,
                            .name_bytes = 6,
                            .dtype = MP_F32,
                            .ndim = 2,
                            .tokens = 2,
                            .second_offset = 1,
                            .last_offset = 3,
                            .ends = 1};

static uint8_t *to;
static size_t used;

static void put(const void *data, size_t bytes) {
    MP_CHECK(used + bytes <= ROOM);
    memcpy(to + used, data, bytes);
    used += bytes;
}

static void put32(uint64_t value) { put(&(uint32_t){(uint32_t)value}, 4); }
static void put64(uint64_t value) { put(&value, 8); }

static void pad(void) {
    while (used % 8)
        put("", 1);
}

static void put_text(uint64_t bytes, uint64_t nul_at) {
    static char text[TEXT + 1];
    memset(text, 'k', sizeof text);
    if (nul_at < bytes)
        text[nul_at] = 0;
    put64(bytes);
    put(text, bytes);
}

static void write_parts(const parts *p) {
    used = 0;
    put32(p->magic);
    put_text(4, UINT64_MAX); /* architecture */
    put32(1);                /* files */
    put_text(4, UINT64_MAX);
    for (int i = 0; i < 5; i++)
        put64(0); /* no identity */
    put32(1); /* values */
    put_text(p->key_bytes, p->nul_at);
    put32(p->type);
    put32(p->gguf_type);
    put64(p->count);
    if (p->type > MP_VALUE_FLOAT)
        pad();
    put64(p->number);
    if (p->type == MP_VALUE_STRINGS) {
        put64(p->last_offset);
        put("abc", 3);
    }
    put32(1); /* tensors */
    put_text(p->name_bytes, UINT64_MAX);
    put32(p->dtype);
    put32(p->ndim);
    for (int i = 0; i < MP_MAX_DIMS; i++)
        put64(1);
    put32(p->file);
    put64(0);
    put64(4);
    put32(1); /* has tokens */
    put32(p->tokens);
    pad();
    put64(p->first_offset);
    put64(p->second_offset);
    put64(p->last_offset);
    pad();
    put("xyz", 3);
    pad();
    put((const uint8_t[]){(uint8_t)p->flag, 0}, 2);
    put32(p->ends);
    pad();
    put((const int32_t[]){1}, 4);
    put("tail", p->tail);
}

typedef struct wrong {
    size_t part; /* offset in parts */
    uint64_t value;
    const char *field, *allowed;
} wrong;

static void check_wrong(const wrong *row, parts p) {
    mp_error error;
    mp_spec *spec = NULL;
    *(uint64_t *)(void *)((uint8_t *)&p + row->part) = row->value;
    to = malloc(ROOM);
    write_parts(&p);
    uint8_t *exact = malloc(used); /* ASan reports reads past the end */
    memcpy(exact, to, used);
    free(to);
    const mp_status status = mp_spec_decode(exact, used, &spec, &error);
    free(exact);
    if (!row->field) {
        MP_CHECK_OK(status, &error);
        mp_spec_unpin(spec);
        return;
    }
    MP_CHECK(status == MP_FORMAT || status == MP_LIMIT || status == MP_INVALID_ARGUMENT);
    MP_CHECK(!spec);
    MP_CHECK_HAS(error.field, row->field);
    MP_CHECK_HAS(error.allowed, row->allowed);
}

#define PART(name) offsetof(parts, name)

MP_TEST(isolation_specs_are_refused_for_the_right_reason) {
    static const wrong rows[] = {
        {PART(tail), 0, NULL, NULL},
        {PART(tail), 1, "end", "no further bytes"},
        {PART(magic), 0x31505054u, "magic", "the magic of a spec"},
        {PART(key_bytes), MP_SPEC_MAX_KEY, NULL, NULL},
        {PART(key_bytes), MP_SPEC_MAX_KEY + 1, "key", "a shorter text"},
        {PART(key_bytes), 0, "key length", "1 to 65535 bytes"},
        {PART(nul_at), 0, "key", "a text without NUL"},
        {PART(nul_at), 4, "key", "a text without NUL"},
        {PART(type), MP_VALUE_FLOAT, NULL, NULL},
        {PART(type), MP_VALUE_STRINGS + 1, "type", "0 to 7"},
        {PART(name_bytes), MP_SPEC_MAX_NAME, NULL, NULL},
        {PART(name_bytes), MP_SPEC_MAX_NAME + 1, "tensor", "a shorter text"},
        {PART(dtype), MP_DTYPE_COUNT, "type", "a type of dtype.def"},
        {PART(dtype), UINT32_MAX, "type", "a type of dtype.def"},
        {PART(ndim), MP_MAX_DIMS, NULL, NULL},
        {PART(ndim), MP_MAX_DIMS + 1, "dimensions", "1 to 4"},
        {PART(ndim), 1u << 31, "dimensions", "1 to 4"},
        {PART(file), 1, "file", "0 to 0"},
        {PART(file), UINT32_MAX, "file", "0 to 0"},
        {PART(first_offset), 1, "token offsets", "0 as the first"},
        {PART(second_offset), 4, "token offsets", "at least the preceding offset"},
        {PART(flag), 2, "token control flag", "0 or 1"},
        {PART(ends), 0, "end", "no further bytes"}, /* its id is left */
        {PART(ends), 2, "tokens", ""},              /* beyond the end */
        {PART(tokens), 0, "", ""},
        {PART(tokens), UINT32_MAX, "tokens", ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check_wrong(&rows[i], right);
}

/* Arrays: the numbers that decide how much is read. */
MP_TEST(isolation_arrays_of_specs_are_refused_for_the_right_reason) {
    static const wrong strings[] = {
        {PART(number), 0, NULL, NULL},
        {PART(number), 1, "kkkkk", "offsets that start at 0 and never decrease"},
        {PART(last_offset), UINT64_MAX, "value", ""},
        {PART(count), UINT64_MAX, "value", "fewer strings"},
        {PART(count), UINT64_MAX / 8, "value", "a size below 2^64"},
        {PART(count), 1 << 20, "value", ""},
    };
    static const wrong integers[] = {
        {PART(count), 1, NULL, NULL},
        {PART(count), 1ull << 61, "value", "a size below 2^64"}, /* 2^64 bytes */
        {PART(count), 1ull << 60, "value", ""},
    };
    parts p = right;
    p.type = MP_VALUE_STRINGS;
    p.number = 0;
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++)
        check_wrong(&strings[i], p);
    p.type = MP_VALUE_INTS;
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++)
        check_wrong(&integers[i], p);
}
