/* test_files.h: helpers of the tests of files/: a writer of GGUF bytes without checks, and a reader of everything in a
 * spec. */
#ifndef MP_TEST_FILES_H
#define MP_TEST_FILES_H

#include <stdlib.h>

#include "files/gguf.h"
#include "mp_test.h"

enum { G_U8, G_I8, G_U16, G_I16, G_U32, G_I32, G_F32, G_BOOL, G_STRING, G_ARRAY, G_U64, G_I64, G_F64 };

typedef struct test_bytes {
    uint8_t *data;
    size_t size, capacity;
} test_bytes;

static inline void put(test_bytes *b, const void *data, size_t bytes) {
    if (b->size + bytes > b->capacity) {
        b->capacity = 2 * (b->size + bytes) + 64;
        b->data = realloc(b->data, b->capacity);
        if (!b->data)
            MP_FAIL("the test ran out of memory");
    }
    if (bytes)
        memcpy(b->data + b->size, data, bytes);
    b->size += bytes;
}
static inline void put_u8(test_bytes *b, uint8_t x) { put(b, &x, 1); }
static inline void put_u32(test_bytes *b, uint32_t x) { put(b, &x, 4); }
static inline void put_u64(test_bytes *b, uint64_t x) { put(b, &x, 8); }
static inline void put_string(test_bytes *b, const char *text) {
    put_u64(b, strlen(text));
    put(b, text, strlen(text));
}
static inline void put_header(test_bytes *b, uint64_t tensors, uint64_t values) {
    put(b, "GGUF", 4);
    put_u32(b, 3);
    put_u64(b, tensors);
    put_u64(b, values);
}
static inline void put_key(test_bytes *b, const char *key, uint32_t type) {
    put_string(b, key);
    put_u32(b, type);
}
static inline void put_architecture(test_bytes *b) {
    put_key(b, "general.architecture", G_STRING);
    put_string(b, "test");
}
static inline void put_padding(test_bytes *b, size_t to) {
    while (b->size % to)
        put_u8(b, 0);
}
/* Append a tensor record. sizes: [ndim], innermost first, as in the file. */
static inline void put_tensor(test_bytes *b, const char *name, int ndim, const uint64_t *sizes, uint32_t type,
                              uint64_t offset) {
    put_string(b, name);
    put_u32(b, (uint32_t)ndim);
    for (int i = 0; i < ndim; i++)
        put_u64(b, sizes[i]);
    put_u32(b, type);
    put_u64(b, offset);
}

static inline const char *test_path(char *to, size_t size, const char *name) {
    snprintf(to, size, "%s/%s", mp_test_directory(), name);
    return to;
}

/* Read every byte of a spec, so that a sanitizer reports invalid memory. Returns a checksum. */
static inline uint64_t read_all(const mp_spec *spec) {
    uint64_t sum = strlen(mp_spec_architecture(spec));
    for (int i = 0; i < mp_spec_file_count(spec); i++)
        sum += strlen(mp_spec_file(spec, i));
    for (int i = 0; i < mp_spec_value_count(spec); i++) {
        const char *key;
        const mp_value *v = mp_spec_value_at(spec, i, &key);
        if (mp_spec_find(spec, key) != v)
            MP_FAIL("mp_spec_find does not find the key %s", key);
        for (uint64_t j = 0; j < v->count; j++) {
            if (v->type == MP_VALUE_STRING)
                sum += (uint8_t)v->as.string[j];
            else if (v->type == MP_VALUE_BOOLS)
                sum += v->as.bools[j];
            else if (v->type == MP_VALUE_INTS)
                sum += (uint64_t)v->as.integers[j];
            else if (v->type == MP_VALUE_FLOATS)
                sum += v->as.reals[j] > 0;
            else if (v->type == MP_VALUE_STRINGS)
                for (uint64_t k = v->as.strings.offsets[j]; k < v->as.strings.offsets[j + 1]; k++)
                    sum += (uint8_t)v->as.strings.bytes[k];
            else
                sum += v->type == MP_VALUE_FLOAT ? v->as.real > 0 : (uint64_t)v->as.integer;
        }
        if (v->type == MP_VALUE_STRING && v->as.string[v->count] != 0)
            MP_FAIL("the string %s is not zero-terminated", key);
    }
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *t = mp_spec_tensor_at(spec, i);
        if (mp_spec_find_tensor(spec, t->name) != t)
            MP_FAIL("mp_spec_find_tensor does not find the tensor %s", t->name);
        sum += t->nbytes + t->offset;
    }
    return sum;
}

/* The error of a refused file must contain the field, the value found and the allowed values. */
static inline void check_error(const mp_error *error, const char *what) {
    if (!error->message[0])
        MP_FAIL("%s: the error has no message", what);
    if ((error->code == MP_FORMAT || error->code == MP_LIMIT) &&
        (!error->file[0] || !error->field[0] || !error->got[0] || !error->allowed[0]))
        MP_FAIL("%s: the error \"%s\" lacks file, field, got or allowed", what, error->message);
}

#endif
