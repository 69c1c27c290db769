/* weights_fixture.h: files of seeded random weights that a test generates, and the keys of their specs. Shapes are
 * irregular on purpose: grouped heads, a vocabulary that is not a multiple of a panel, every common storage type. */
#ifndef WEIGHTS_FIXTURE_H
#define WEIGHTS_FIXTURE_H

#include <stdlib.h>

#include "mp_test.h"
#include "models/model.h"

enum { TINY_LAYERS = 3, TINY_HIDDEN = 256, TINY_HEADS = 8, TINY_KV_HEADS = 2, TINY_FFN = 512, TINY_VOCAB = 333,
       TINY_CONTEXT = 512, TINY_EXPERT = 256, TINY_RANK = 256, TINY_PART = 32,
       TINY_PADDING = 2048 /* values between the experts and the last ones, in a tensor that no model reads */ };

typedef struct tiny_file { /* a weight file and its spec under construction */
    uint8_t *bytes;
    size_t used, capacity;
    mp_spec *spec;
    mp_test_random random;
} tiny_file;

/* Fill a valid row of any type: quantised values are random bits, scales are half floats near 0.004. */
static inline void tiny_row(mp_test_random *random, mp_dtype dtype, uint8_t *row, int64_t n, float size) {
    const mp_dtype_row *type = mp_dtype_get(dtype);
    for (int64_t b = 0; b < n / type->items; b++, row += type->bytes) {
        if (dtype == MP_F32) {
            float x = mp_test_random_float(random, -size, size);
            memcpy(row, &x, 4);
            continue;
        }
        for (int i = 0; i < type->bytes; i++)
            row[i] = (uint8_t)mp_test_random_u64(random);
        uint16_t scale = (uint16_t)(0x1C00 + (mp_test_random_u64(random) & 0x1FF)); /* about 0.004 */
        uint16_t low = (uint16_t)(scale | 0x8000);
        switch (dtype) {
        case MP_F8_E4M3: /* below 2, and no NaN; the scales are another tensor */
            for (int i = 0; i < type->bytes; i++)
                row[i] &= 0xBF;
            break;
        case MP_Q4_0: case MP_Q5_0: case MP_Q8_0:
            memcpy(row, &scale, 2);
            break;
        case MP_Q4_1: case MP_Q5_1:
            memcpy(row, &scale, 2);
            memcpy(row + 2, &low, 2);
            break;
        case MP_Q4_K: case MP_Q5_K:
            scale -= 0x1000;
            memcpy(row, &scale, 2);
            memcpy(row + 2, &scale, 2);
            break;
        case MP_Q2_K:
            scale -= 0x1000;
            memcpy(row + 80, &scale, 2);
            memcpy(row + 82, &scale, 2);
            break;
        case MP_IQ4_XS: case MP_IQ2_XS: case MP_IQ3_S:
            scale -= 0x1800;
            memcpy(row, &scale, 2);
            break;
        case MP_Q3_K:
            scale -= 0x1400;
            memcpy(row + 108, &scale, 2);
            break;
        case MP_Q6_K:
            scale -= 0x1400;
            memcpy(row + 208, &scale, 2);
            break;
        default:
            MP_FAIL("no fixture rows of %s", type->name);
        }
    }
}

static inline void tiny_tensor(tiny_file *file, const char *name, mp_dtype dtype, int64_t rows, int64_t columns,
                               float size, float offset) {
    mp_error error;
    uint64_t row_bytes;
    MP_CHECK(mp_dtype_row_bytes(dtype, columns, &row_bytes));
    file->used = (file->used + 63) & ~(size_t)63;
    size_t bytes = (size_t)rows * row_bytes;
    if (file->used + bytes > file->capacity) {
        file->capacity = 2 * (file->used + bytes);
        file->bytes = realloc(file->bytes, file->capacity);
        MP_CHECK(file->bytes);
    }
    for (int64_t r = 0; r < rows; r++)
        tiny_row(&file->random, dtype, file->bytes + file->used + (size_t)r * row_bytes, columns, size);
    for (int64_t i = 0; dtype == MP_F32 && offset != 0 && i < rows * columns; i++) {
        float x;
        memcpy(&x, file->bytes + file->used + 4 * i, 4);
        x += offset;
        memcpy(file->bytes + file->used + 4 * i, &x, 4);
    }
    mp_tensor_entry entry = {.name = name, .dtype = dtype, .ndim = rows > 1 ? 2 : 1, .offset = file->used,
                             .nbytes = bytes};
    entry.shape[0] = rows > 1 ? rows : columns;
    entry.shape[1] = columns;
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error);
    file->used += bytes;
}

static inline void tiny_int(mp_spec *spec, const char *key, int64_t value) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = value};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

static inline void tiny_string(mp_spec *spec, const char *key, const char *value) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = strlen(value), .as.string = value};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

static inline void tiny_flag(mp_spec *spec, const char *key, bool value) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = value};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

static inline void tiny_float(mp_spec *spec, const char *key, double value) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_FLOAT, .gguf_type = -1, .count = 1, .as.real = value};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

/* Set the tokens: token i has the text 'a' + i % 26, and the last token ends a sequence. */
static inline void tiny_tokens(mp_spec *spec) {
    static uint8_t bytes[TINY_VOCAB], control[TINY_VOCAB];
    static uint64_t offsets[TINY_VOCAB + 1];
    for (int i = 0; i < TINY_VOCAB; i++) {
        bytes[i] = (uint8_t)('a' + i % 26);
        offsets[i + 1] = (uint64_t)i + 1;
    }
    control[TINY_VOCAB - 1] = 1;
    int32_t end = TINY_VOCAB - 1;
    mp_token_table table = {TINY_VOCAB, bytes, offsets, control, 1, &end};
    mp_error error;
    MP_CHECK_OK(mp_spec_set_tokens(spec, &table, &error), &error);
}

static inline void tiny_ints(mp_spec *spec, const char *key, const int64_t *values, int count) {
    mp_error error;
    mp_value v = {.type = MP_VALUE_INTS, .gguf_type = -1, .count = (uint64_t)count, .as.integers = values};
    MP_CHECK_OK(mp_spec_set(spec, key, &v, &error), &error);
}

static inline void tiny_arch_int(mp_spec *spec, const char *arch, const char *key, int64_t value) {
    char name[96];
    snprintf(name, sizeof name, "%s.%s", arch, key);
    tiny_int(spec, name, value);
}

static inline void tiny_arch_float(mp_spec *spec, const char *arch, const char *key, double value) {
    char name[96];
    snprintf(name, sizeof name, "%s.%s", arch, key);
    tiny_float(spec, name, value);
}

#endif
