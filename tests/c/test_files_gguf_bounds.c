/* test_files_gguf_bounds.c: every place at which a GGUF file may end too early, and counts that the rest of the file
 * can just hold. The expected field and offset of each error come from the layout, not from the reader. */
#include "test_files.h"

#include "base/log.h"

enum { TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8, VALUE_BYTES = 8 + 1 + 4 + 1, HEADER_BYTES = 24 };

typedef struct part { /* the file must have the bytes up to `end`, else the error names `field` at `offset` */
    size_t end, offset;
    char field[32];
} part;

typedef struct layout {
    test_bytes b;
    part parts[80];
    int count;
} layout;

/* The bytes written since the last part, which an error reports at `offset`. */
static void note(layout *l, size_t offset, const char *field) {
    part *p = &l->parts[l->count++];
    MP_CHECK(l->count <= 80);
    p->end = l->b.size;
    p->offset = offset;
    snprintf(p->field, sizeof p->field, "%s", field);
}

static void note_u32(layout *l, uint32_t value, const char *field) {
    put_u32(&l->b, value);
    note(l, l->b.size - 4, field);
}

static void note_u64(layout *l, uint64_t value, const char *field) {
    put_u64(&l->b, value);
    note(l, l->b.size - 8, field);
}

/* A length and its bytes: the error of missing bytes is reported at the length. */
static void note_text(layout *l, const char *text, const char *field) {
    note_u64(l, strlen(text), field);
    put(&l->b, text, strlen(text));
    note(l, l->b.size - strlen(text) - 8, field);
}

static void note_key(layout *l, const char *key, uint32_t type) {
    note_text(l, key, "key length");
    note_u32(l, type, key);
}

static void note_array(layout *l, const char *key, uint32_t type, uint64_t count, size_t bytes) {
    note_key(l, key, G_ARRAY);
    note_u32(l, type, key);
    note_u64(l, count, key);
    const size_t at = l->b.size - 8;
    if (type == G_STRING) /* the lengths of all strings must be in the file */
        note(l, at, key), l->parts[l->count - 1].end += 8 * count;
    for (size_t i = 0; type != G_STRING && i < bytes; i++)
        put_u8(&l->b, 1);
    if (type != G_STRING)
        note(l, at, key);
}

static void note_tensor(layout *l, const char *name, int ndim, const uint64_t *sizes, uint64_t offset) {
    char field[32];
    note_text(l, name, "tensor name");
    snprintf(field, sizeof field, "%s: dimensions", name);
    note_u32(l, (uint32_t)ndim, field);
    snprintf(field, sizeof field, "%s: shape", name);
    for (int i = 0; i < ndim; i++)
        note_u64(l, sizes[i], field);
    snprintf(field, sizeof field, "%s: type", name);
    note_u32(l, 0, field);
    snprintf(field, sizeof field, "%s: offset", name);
    note_u64(l, offset, field);
}

/* A file with values of every kind of length, and two tensors of 32 and 24 bytes. */
static void build(layout *l) {
    static const uint64_t two[] = {2, 4}, one[] = {6};
    enum { TENSORS = 2, VALUES = 7 };
    put_header(&l->b, TENSORS, VALUES);
    note_key(l, "general.architecture", G_STRING);
    note_text(l, "test", "general.architecture");
    static const uint32_t types[] = {G_U8, G_I16, G_F32, G_U64};
    static const int bytes[] = {1, 2, 4, 8};
    for (int i = 0; i < 4; i++) {
        char key[] = "k0";
        key[1] = (char)('0' + i);
        note_key(l, key, types[i]);
        for (int j = 0; j < bytes[i]; j++)
            put_u8(&l->b, 0);
        note(l, l->b.size - (size_t)bytes[i], key);
    }
    note_array(l, "numbers", G_I32, 3, 12);
    note_array(l, "words", G_STRING, 2, 0);
    note_text(l, "ab", "words");
    note_text(l, "c", "words");
    note_tensor(l, "first", 2, two, 0);
    note_tensor(l, "second", 1, one, 32);
}

MP_TEST(files_gguf_ends_at_every_byte) {
    layout l = {0};
    mp_error error;
    mp_spec *spec;
    build(&l);
    const size_t header = l.b.size;
    put_padding(&l.b, 32);
    const size_t data = l.b.size;
    for (int i = 0; i < 32 + 24; i++)
        put_u8(&l.b, 0);
    for (size_t size = 0; size < l.b.size; size++) {
        const size_t left = size < HEADER_BYTES ? 0 : size - HEADER_BYTES;
        part expected = {.offset = header, .field = "second: size"};
        if (size < data + 32)
            expected = (part){.offset = header, .field = "first: size"};
        for (int i = l.count - 1; i >= 0; i--)
            if (size < l.parts[i].end)
                expected = l.parts[i];
        if (left < 2 * TENSOR_BYTES + 7 * VALUE_BYTES)
            expected = (part){.offset = 16, .field = "kv_count"};
        if (left < 2 * TENSOR_BYTES)
            expected = (part){.offset = 8, .field = "tensor_count"};
        if (size < HEADER_BYTES)
            expected = (part){.offset = 0, .field = "header"};
        uint8_t *exact = malloc(size + 1); /* a sanitizer sees a read past the end */
        memcpy(exact, l.b.data, size);
        MP_CHECK_STATUS(mp_gguf_parse(exact, size, "memory", &spec, &error), MP_FORMAT, &error);
        free(exact);
        if (strcmp(error.field, expected.field) != 0 || error.offset != (int64_t)expected.offset)
            MP_FAIL("%zu bytes: the error is about %s at %lld, expected %s at %zu", size, error.field,
                    (long long)error.offset, expected.field, expected.offset);
        MP_CHECK(spec == NULL);
    }
    MP_CHECK_OK(mp_gguf_parse(l.b.data, l.b.size, "memory", &spec, &error), &error);
    MP_CHECK_INT(mp_spec_tensor_at(spec, 1)->offset, data + 32);
    MP_CHECK_INT(mp_spec_value_count(spec), 7);
    mp_spec_unpin(spec);
    free(l.b.data);
}

/* A split model must have the name that its count and number imply, and must be opened by its first file. */
MP_TEST(files_gguf_names_of_splits) {
    static const struct { const char *name; uint32_t number; const char *field, *allowed, *got; } cases[] = {
        {"m-00001-of-00003.gguf", 0, "file name", "a name that ends in -00001-of-00002.gguf", "different"},
        {"-00001-of-00002.gguf", 1, "file name", "a name that ends in -00002-of-00002.gguf", "different"},
        {"m-00002-of-00002.gguf", 1, "split.no", "0; open the first file of the split model instead", "1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static const char *const keys[] = {"split.no", "split.count", "split.tensors.count"};
        const uint32_t values[] = {cases[i].number, 2, 0};
        char path[400];
        test_bytes b = {0};
        mp_error error;
        mp_spec *spec;
        put_header(&b, 0, 4);
        put_architecture(&b);
        for (int k = 0; k < 3; k++) {
            put_key(&b, keys[k], G_U32);
            put_u32(&b, values[k]);
        }
        mp_test_write_file(test_path(path, sizeof path, cases[i].name), b.data, b.size);
        MP_CHECK_STATUS(mp_gguf_read(path, &spec, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, cases[i].field);
        MP_CHECK_STR(error.allowed, cases[i].allowed);
        MP_CHECK_STR(error.got, cases[i].got);
        MP_CHECK_STR(error.file, path);
        free(b.data);
    }
}

/* The first key and the first tensor count too. */
MP_TEST(files_gguf_duplicates_of_the_first) {
    static const uint64_t eight[] = {8};
    for (int tensors = 0; tensors < 2; tensors++) {
        test_bytes b = {0};
        mp_error error;
        mp_spec *spec;
        put_header(&b, tensors ? 2 : 0, tensors ? 1 : 2);
        put_architecture(&b);
        const size_t at = tensors ? b.size + TENSOR_BYTES : b.size;
        if (!tensors)
            put_architecture(&b);
        for (int i = 0; tensors && i < 2; i++)
            put_tensor(&b, "t", 1, eight, 0, 32 * (uint64_t)i);
        put_padding(&b, 32);
        for (int i = 0; i < 64; i++)
            put_u8(&b, 0);
        MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.got, tensors ? "a duplicate: t" : "a duplicate: general.architecture");
        MP_CHECK_INT(error.offset, at);
        free(b.data);
    }
}

static void count_warning(const mp_log_record *record, void *count) {
    if (record->level == MP_LOG_WARNING && strstr(record->text, "unused bytes after its last tensor"))
        ++*(int *)count;
}

/* Bytes after the last tensor: its padding may be there, in whole or in part; others are read over with a warning. */
MP_TEST(files_gguf_may_end_with_padding) {
    for (int tensors = 0; tensors < 2; tensors++) {
        static const uint64_t six[] = {6};
        test_bytes b = {0};
        mp_error error;
        mp_spec *spec;
        put_header(&b, (uint64_t)tensors, 1);
        put_architecture(&b);
        if (tensors)
            put_tensor(&b, "t", 1, six, 0, 0);
        const size_t data = (b.size + 31) / 32 * 32, from = tensors ? data + 24 : b.size;
        const size_t padded = tensors ? data + 32 : data;
        while (b.size < padded + 3)
            put_u8(&b, 0);
        for (size_t size = from; size <= b.size; size++) {
            int warnings = 0;
            MP_CHECK_STATUS(mp_gguf_parse(b.data, size, "memory", &spec, &error), MP_OK, &error);
            mp_log_drain(count_warning, &warnings);
            MP_CHECK_INT(warnings, size > padded);
            mp_spec_unpin(spec);
        }
        free(b.data);
    }
}

/* The error of a size, and of a version, has the number found and what to do. */
MP_TEST(files_gguf_sizes_and_versions) {
    static const struct { uint64_t size; const char *got; } sizes[] = {
        {0, "0"}, {(uint64_t)1 << 63, "9223372036854775808"}, {UINT64_MAX, "18446744073709551615"}};
    static const struct { uint32_t version; const char *allowed, *got; } versions[] = {
        {0, "2 or 3", "0"},
        {1, "2 or 3; convert the model again", "1"},
        {4, "2 or 3", "4"},
        {0x02000000, "2 or 3, little-endian; convert the file", "2, big-endian"},
        {0x03000000, "2 or 3, little-endian; convert the file", "3, big-endian"},
        {0x01000000, "2 or 3", "16777216"},
    };
    mp_error error;
    mp_spec *spec;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int at = 0; at < 2; at++) {
            uint64_t shape[2] = {4, 4};
            test_bytes b = {0};
            shape[at] = sizes[i].size;
            put_header(&b, 1, 1);
            put_architecture(&b);
            put_tensor(&b, "t", 2, shape, 0, 0);
            MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), MP_FORMAT, &error);
            MP_CHECK_STR(error.field, "t: shape");
            MP_CHECK_STR(error.allowed, "sizes from 1 to 2^63 - 1");
            MP_CHECK_STR(error.got, sizes[i].got);
            free(b.data);
        }
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        test_bytes b = {0};
        put_header(&b, 0, 0);
        memcpy(b.data + 4, &versions[i].version, 4);
        MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, "version");
        MP_CHECK_STR(error.allowed, versions[i].allowed);
        MP_CHECK_STR(error.got, versions[i].got);
        free(b.data);
    }
}
