/* test_files_messages.c: the whole message and the code of each refusal in files/: file, offset, field, value found
 * and allowed values. Other tests cover which inputs are refused. */
#include <unistd.h>

#include "files/cursor.h"
#include "files/spec_build.h"
#include "files/weights.h"
#include "test_files.h"

static mp_error error;

#define SAYS(call, code_expected, text)                             \
    do {                                                            \
        MP_CHECK_STATUS(call, code_expected, &error);               \
        MP_CHECK_STR(error.message, text);                          \
        MP_CHECK_INT(error.code, code_expected);                    \
    } while (0)

/* --- GGUF --- */

static test_bytes b;

static test_bytes *file_of(uint64_t tensors, uint64_t values) {
    free(b.data);
    b = (test_bytes){0};
    put_header(&b, tensors, values);
    return &b;
}

/* A file with one value, whose bytes follow. */
static test_bytes *value_of(const char *key, uint32_t type) {
    put_key(file_of(0, 1), key, type);
    return &b;
}

static test_bytes *array_of(uint32_t type, uint64_t count) {
    put_u32(value_of("k", G_ARRAY), type);
    put_u64(&b, count);
    return &b;
}

static void zeros(size_t count) {
    while (count--)
        put_u8(&b, 0);
}

static mp_status parsed(void) {
    mp_spec *spec;
    return mp_gguf_parse(b.data, b.size, "f", &spec, &error);
}

/* Header: 24 bytes. The record of the value "k": at 24 its key, at 33 its type, at 37 its value. */
MP_TEST(files_messages_of_headers_and_values) {
    file_of(0, 0)->size = 23;
    SAYS(parsed(), MP_FORMAT, "f at byte 0: header is 23 bytes, allowed: at least 24 bytes");
    file_of(0, 0)->data[3] = 'X';
    SAYS(parsed(), MP_FORMAT, "f at byte 0: magic is 47 47 55 58, allowed: GGUF (47 47 55 46); is this another kind of "
         "file?");
    file_of(0, 0)->data[4] = 9;
    SAYS(parsed(), MP_FORMAT, "f at byte 4: version is 9, allowed: 2 or 3");
    file_of(0, 0)->data[4] = 1;
    SAYS(parsed(), MP_FORMAT, "f at byte 4: version is 1, allowed: 2 or 3; convert the model again");
    file_of(0, 0)->data[4] = 0, b.data[7] = 2;
    SAYS(parsed(), MP_FORMAT, "f at byte 4: version is 2, big-endian, allowed: 2 or 3, little-endian; convert the "
         "file");
    file_of(2, 0), zeros(65);
    SAYS(parsed(), MP_FORMAT, "f at byte 8: tensor_count is 2, with 65 bytes left, allowed: as many as the rest of the "
         "file can hold");
    file_of(1, 3), zeros(33 + 3 * 14 - 1);
    SAYS(parsed(), MP_FORMAT, "f at byte 16: kv_count is 3, with 74 bytes left, allowed: as many as the rest of the "
         "file can hold");
    file_of(65537, 0), zeros(65537 * 33);
    SAYS(parsed(), MP_LIMIT, "f at byte 8: tensor_count is 65537, allowed: at most 65,536 (a limit of mpool)");
    file_of(0, 65538), zeros(65538 * 14);
    SAYS(parsed(), MP_LIMIT, "f at byte 16: kv_count is 65538, allowed: at most 65,536 (a limit of mpool)");

    put_u64(file_of(0, 1), 0), zeros(10);
    SAYS(parsed(), MP_FORMAT, "f at byte 24: key length is 0, with 10 bytes left, allowed: 1 to 65535, and at most the "
         "bytes left");
    put_u64(file_of(0, 1), 11), zeros(10);
    SAYS(parsed(), MP_FORMAT, "f at byte 24: key length is 11, with 10 bytes left, allowed: 1 to 65535, and at most "
         "the bytes left");
    put_u64(file_of(0, 1), 65536), zeros(65536 + 5);
    SAYS(parsed(), MP_FORMAT, "f at byte 24: key length is 65536, with 65541 bytes left, allowed: 1 to 65535, and at "
         "most the bytes left");
    put_u8(value_of("\tab", G_U8), 0);
    SAYS(parsed(), MP_FORMAT, "f at byte 32: key is byte 09, allowed: printable ASCII");
    put_u8(value_of("ab\x1f", G_U8), 0);
    SAYS(parsed(), MP_FORMAT, "f at byte 34: key is byte 1f, allowed: printable ASCII");
    put_u8(value_of("k\xc3", G_U8), 0);
    SAYS(parsed(), MP_FORMAT, "f at byte 33: key is byte c3, allowed: printable ASCII");
    put_u8(value_of("k", G_U8), 0), b.data[16] = 2, put_key(&b, "k", G_U8), put_u8(&b, 0);
    SAYS(parsed(), MP_FORMAT, "f at byte 38: key is a duplicate: k, allowed: each key once");
    put_u8(value_of("k", 13), 0);
    SAYS(parsed(), MP_FORMAT, "f at byte 33: k is type 13, allowed: a value type from 0 to 12");
    put_u64(value_of("general.alignment", G_U64), 32);
    SAYS(parsed(), MP_FORMAT, "f at byte 49: general.alignment is type 10, allowed: a 32-bit unsigned integer (type "
         "4)");
    put_u32(value_of("general.alignment", G_U32), 48);
    SAYS(parsed(), MP_FORMAT, "f at byte 53: general.alignment is 48, allowed: a power of two");
    put_u32(value_of("general.alignment", G_U32), 131072);
    SAYS(parsed(), MP_LIMIT, "f at byte 53: general.alignment is 131072, allowed: at most 65,536 "
         "(a limit of mpool)");

    put_u64(value_of("k", G_STRING), 3), zeros(2);
    SAYS(parsed(), MP_FORMAT, "f at byte 37: k is 3 bytes long with 2 left, allowed: a string that ends within the "
         "file");
    put_u64(value_of("k", G_STRING), (16 << 20) + 1), zeros((16 << 20) + 1);
    SAYS(parsed(), MP_LIMIT, "f at byte 37: k is 16777217 bytes long, allowed: at most 16,777,216 bytes "
         "(a limit of mpool)");
    put_u64(value_of("k", G_U64), (uint64_t)1 << 63);
    SAYS(parsed(), MP_FORMAT, "f at byte 37: k is 9223372036854775808, allowed: an integer below 2^63");
    put_u8(value_of("k", G_BOOL), 2);
    SAYS(parsed(), MP_FORMAT, "f at byte 37: k is a bool of value 2, allowed: 0 or 1");
    put_u32(value_of("k", G_U64), 0);
    SAYS(parsed(), MP_FORMAT, "f at byte 37: k is 8 bytes with 4 left, allowed: at most the bytes left in the file");

    array_of(G_ARRAY, 1);
    SAYS(parsed(), MP_FORMAT, "f at byte 37: k is an array of arrays, allowed: an array of numbers, bools or strings");
    array_of(13, 1);
    SAYS(parsed(), MP_FORMAT, "f at byte 37: k is an array of type 13, allowed: an element type from 0 to 12");
    array_of(G_I16, 4), zeros(7);
    SAYS(parsed(), MP_FORMAT, "f at byte 41: k is 4 elements of at least 2 bytes with 7 left, allowed: an array that "
         "ends within the file");
    array_of(G_I16, (uint64_t)1 << 63), zeros(7);
    SAYS(parsed(), MP_FORMAT, "f at byte 41: k is 9223372036854775808 elements of at least 2 bytes with 7 left, "
         "allowed: an array that ends within the file");
    array_of(G_STRING, 2), zeros(15);
    SAYS(parsed(), MP_FORMAT, "f at byte 41: k is 2 elements of at least 8 bytes with 15 left, allowed: an array that "
         "ends within the file");
    array_of(G_U8, 5), zeros(5), b.data[16] = 2;
    put_key(&b, "l", G_ARRAY), put_u32(&b, G_U8), put_u64(&b, (1 << 24) - 4), zeros((1 << 24) - 4);
    SAYS(parsed(), MP_LIMIT,
         "f at byte 71: l is 16777212 elements after 5 in other arrays, allowed: at most 16,777,216 elements in all "
         "arrays (a limit of mpool)");
    array_of(G_STRING, 2), put_u64(&b, 0), put_u64(&b, 3), zeros(2);
    SAYS(parsed(), MP_FORMAT, "f at byte 57: k is 3 bytes long with 2 left, allowed: a string that ends within the "
         "file");
    for (uint64_t bad = 0; bad < 3; bad++) { /* each element is checked, and the first bad one is named */
        char text[200];
        array_of(G_U64, 3);
        for (uint64_t i = 0; i < 3; i++)
            put_u64(&b, i < bad ? 1 : UINT64_MAX - i);
        snprintf(text, sizeof text, "f at byte %d: k is %llu, allowed: an integer below 2^63", 49 + 8 * (int)bad,
                 (unsigned long long)(UINT64_MAX - bad));
        SAYS(parsed(), MP_FORMAT, text);
        array_of(G_BOOL, 3);
        for (uint64_t i = 0; i < 3; i++)
            put_u8(&b, i < bad ? 1 : (uint8_t)(2 + i));
        snprintf(text, sizeof text, "f at byte %d: k is a bool of value %d, allowed: 0 or 1", 49 + (int)bad,
                 2 + (int)bad);
        SAYS(parsed(), MP_FORMAT, text);
    }
    free(b.data);
}

/* A file with one value, "k" (38 bytes with the header), and one tensor, whose parts the caller chooses. */
static test_bytes *tensor_of(const char *name, uint32_t ndim, const uint64_t *sizes, uint32_t type, uint64_t offset) {
    put_u8(value_of("k", G_U8), 0);
    b.data[8] = 1;
    put_tensor(&b, name, ndim > 5 ? 0 : (int)ndim, sizes, type, offset);
    if (ndim > 5) /* the number alone */
        memcpy(b.data + 38 + 8 + strlen(name), &ndim, 4);
    return &b;
}

/* The record of the tensor "t": at 38 its name, at 47 its dimensions, at 51 its sizes; then 4 bytes of type and 8 bytes
 * of offset. The data of a tensor with one size begin at 96. */
MP_TEST(files_messages_of_tensors) {
    const uint64_t eight[] = {8, 1, 1, 1, 1}, half[] = {(uint64_t)1 << 32, (uint64_t)1 << 31}, zero[] = {8, 0},
                   over[] = {(uint64_t)1 << 63}, odd[] = {33, 2}, most[] = {(uint64_t)1 << 61},
                   wide[] = {(uint64_t)1 << 60, 2};
    tensor_of("", 1, eight, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 38: tensor name is 0 bytes long, allowed: 1 to 64 bytes, and at most the "
         "bytes left");
    tensor_of("12345678901234567890123456789012345678901234567890123456789012345", 1, eight, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 38: tensor name is 65 bytes long, allowed: 1 to 64 bytes, and at most the "
         "bytes left");
    tensor_of("a\xc3", 1, eight, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 38: tensor name is not UTF-8, or contains NUL, allowed: UTF-8 without NUL");
    tensor_of("ab", 1, eight, 0, 0)->data[47] = 0, zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 38: tensor name is not UTF-8, or contains NUL, allowed: UTF-8 without NUL");
    tensor_of("t", 1, eight, 0, 0)->data[8] = 2, put_tensor(&b, "t", 1, eight, 0, 32), zeros(128);
    SAYS(parsed(), MP_FORMAT, "f at byte 71: tensor name is a duplicate: t, allowed: each tensor once");
    tensor_of("t", 0, eight, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 47: t: dimensions is 0, allowed: 1 to 4");
    tensor_of("t", 5, eight, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 47: t: dimensions is 5, allowed: 1 to 4");
    tensor_of("t", UINT32_MAX, eight, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 47: t: dimensions is 4294967295, allowed: 1 to 4");
    tensor_of("t", 2, zero, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 59: t: shape is 0, allowed: sizes from 1 to 2^63 - 1");
    tensor_of("t", 1, over, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 51: t: shape is 9223372036854775808, allowed: sizes from 1 to 2^63 - 1");
    tensor_of("t", 2, half, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 51: t: shape is [2147483648, 4294967296], allowed: sizes whose product is "
         "below 2^63");
    tensor_of("t", 1, eight, 99, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 59: t: type is 99, allowed: a type of the GGUF format");
    tensor_of("t", 1, eight, 15, 0), zeros(64);
    SAYS(parsed(), MP_UNSUPPORTED, "f: the tensor t is stored as Q8_K, which mpool does not support; use another "
         "quantisation of the model, such as Q4_K_M, Q8_0 or F16");
    tensor_of("t", 2, odd, 2, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 51: t: row is 33 elements, allowed: multiples of 32, the block of Q4_0");
    tensor_of("t", 1, most, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 51: t: size is 2305843009213693952 elements of F32, allowed: below 2^63 "
         "bytes");
    tensor_of("t", 2, wide, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 51: t: size is 2305843009213693952 elements of F32, allowed: below 2^63 "
         "bytes");
    tensor_of("t", 1, eight, 0, 16), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 63: t: offset is 16, allowed: multiples of 32");
    tensor_of("t", 1, eight, 0, 32), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 63: t: offset is 32, allowed: 0, the end of the preceding tensor");
    tensor_of("t", 1, eight, 0, 0)->data[8] = 2, put_tensor(&b, "u", 1, eight, 0, 64), zeros(128);
    SAYS(parsed(), MP_FORMAT, "f at byte 96: u: offset is 64, allowed: 32, the end of the preceding tensor");
    tensor_of("t", 1, (uint64_t[]){50}, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 63: t: size is 200 bytes at offset 0 in a file of 135, allowed: an end within "
         "the file");
    tensor_of("t", 1, (uint64_t[]){(uint64_t)1 << 60}, 0, 0)->data[8] = 2;
    put_tensor(&b, "u", 1, eight, 0, (uint64_t)1 << 62), zeros(64);
    SAYS(parsed(), MP_FORMAT, "f at byte 63: t: size is 4611686018427387904 bytes at offset 0 in a file of 168, "
         "allowed: an end within the file");
    tensor_of("t", 1, (uint64_t[]){135}, 24, 0), zeros(64); /* I8, as long as the whole file */
    SAYS(parsed(), MP_FORMAT, "f at byte 71: t: size is 135 bytes at offset 96 in a file of 135, allowed: an end "
         "within the file");
    tensor_of("t", 1, eight, 0, 0), zeros(96 + 31 - 71);
    SAYS(parsed(), MP_FORMAT, "f at byte 71: t: size is 32 bytes at offset 96 in a file of 127, allowed: an end "
         "within the file");
    free(b.data);
}

/* --- split models --- */

static void write_part(const char *name, int64_t number, int64_t count, int64_t tensors) {
    static const char *const keys[] = {"split.no", "split.count", "split.tensors.count"};
    const int64_t values[] = {number, count, tensors};
    char path[400];
    file_of(0, 3);
    for (int i = 0; i < 3; i++) {
        put_key(&b, keys[i], G_U32);
        put_u32(&b, (uint32_t)values[i]);
    }
    mp_test_write_file(test_path(path, sizeof path, name), b.data, b.size);
}

static void refuse_parts(mp_status code, const char *file, const char *text) {
    char path[400], expected[700];
    mp_spec *spec;
    snprintf(expected, sizeof expected, text, test_path(path, sizeof path, file));
    SAYS(mp_gguf_read(test_path(path, sizeof path, "m-00001-of-00002.gguf"), &spec, &error), code, expected);
}

MP_TEST(files_messages_of_split_models) {
    static const char first[] = "m-00001-of-00002.gguf", second[] = "m-00002-of-00002.gguf";
    mp_file_map_init();
    write_part(first, 0, 3, 0);
    refuse_parts(MP_FORMAT, first, "%s: file name is different, allowed: a name that ends in -00001-of-00003.gguf");
    write_part(first, 0, 1025, 0);
    refuse_parts(MP_LIMIT, first, "%s: split.count is 1025, allowed: an integer from 0 to 1024 (a limit of mpool)");
    write_part(first, 2, 2, 0);
    refuse_parts(MP_FORMAT, first, "%s: split.no is 2, allowed: an integer from 0 to 1");
    write_part(first, 0, 2, 5);
    write_part(second, 1, 3, 5);
    refuse_parts(MP_FORMAT, second, "%s: split.count is 3, allowed: the integer 2");
    write_part(second, 0, 2, 5);
    refuse_parts(MP_FORMAT, second, "%s: split.no is 0, allowed: the integer 1");
    write_part(second, 1, 2, 5);
    refuse_parts(MP_FORMAT, first, "%s: split.tensors.count is 5, allowed: 0, the number of tensors in all files");
    free(b.data);
}

/* --- specs --- */

static mp_spec *spec_of(const char *file) {
    mp_spec *spec = mp_spec_create();
    if (file)
        MP_CHECK_OK(mp_spec_add_file(spec, file, &error), &error);
    return spec;
}

static mp_status set(mp_spec *spec, const char *key, mp_value value) { return mp_spec_set(spec, key, &value, &error); }

static mp_value integer(int64_t x) { return (mp_value){.type = MP_VALUE_INT, .as.integer = x}; }

MP_TEST(files_messages_of_specs) {
    static char longer[65537];
    static const uint64_t late[] = {1, 2, 3}, falling[] = {0, 3, 2};
    memset(longer, 'k', sizeof longer - 1);
    for (int has_file = 0; has_file < 2; has_file++) { /* the first file, or "model spec" */
        mp_spec *spec = spec_of(has_file ? "/a" : NULL);
        char text[200];
        MP_CHECK_STR(mp_spec_origin(spec), has_file ? "/a" : "model spec");
#define OF(rest) (snprintf(text, sizeof text, "%s: %s", has_file ? "/a" : "model spec", rest), text)
        SAYS(mp_spec_set_architecture(spec, "", &error), MP_FORMAT,
             OF("general.architecture is empty, allowed: 1 to 64 printable ASCII characters without blanks"));
        SAYS(mp_spec_set_architecture(spec, "a b", &error), MP_FORMAT,
             OF("general.architecture is byte 20 at index 1, allowed: 1 to 64 printable ASCII characters without "
                "blanks"));
        SAYS(set(spec, "", integer(1)), MP_FORMAT, OF("key length is 0, allowed: 1 to 65535 bytes"));
        SAYS(set(spec, longer, integer(1)), MP_FORMAT, OF("key length is 65536, allowed: 1 to 65535 bytes"));
        SAYS(set(spec, "a\xff", integer(1)), MP_FORMAT, OF("key is byte ff at index 1, allowed: printable ASCII"));
        MP_CHECK_OK(set(spec, "a", integer(1)), &error);
        SAYS(set(spec, "a", integer(1)), MP_FORMAT, OF("a is a duplicate, allowed: each key once"));
        mp_value strings = {.type = MP_VALUE_STRINGS, .count = 2, .as.strings = {"abc", late}};
        SAYS(set(spec, "s", strings), MP_FORMAT,
             OF("s is an array of strings with other offsets, allowed: offsets that start at 0 and never decrease"));
        strings.as.strings.offsets = falling;
        SAYS(set(spec, "s", strings), MP_FORMAT,
             OF("s is an array of strings with other offsets, allowed: offsets that start at 0 and never decrease"));
        mp_tensor_entry tensor = {.name = "", .dtype = MP_F32, .ndim = 1, .shape = {1}, .nbytes = 4};
        SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT,
             OF("tensor name is 0 bytes long, allowed: 1 to 255 bytes"));
        tensor.name = longer + 65536 - 256;
        SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT,
             OF("tensor name is 256 bytes long, allowed: 1 to 255 bytes"));
        tensor.name = "\xff";
        SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, OF("tensor name is not UTF-8, allowed: UTF-8"));
        if (has_file) {
            tensor.name = "t";
            MP_CHECK_OK(mp_spec_add_tensor(spec, &tensor, &error), &error);
            SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT,
                 OF("t is a duplicate, allowed: each tensor once"));
        }
        mp_spec_unpin(spec);
    }
    mp_spec *spec = spec_of(NULL);
    SAYS(mp_spec_add_file(spec, "", &error), MP_INVALID_ARGUMENT,
         "a model spec has a file with an empty path; pass the path of a file");
    SAYS(set(spec, "k", (mp_value){.type = (mp_value_type)99}), MP_INVALID_ARGUMENT,
         "the type of the value of k must be an mp_value_type, 0 to 7, got 99");
    SAYS(mp_spec_set_draft(spec, spec, &error), MP_INVALID_ARGUMENT,
         "a model must have at most one draft model, another model without a draft model, got the model itself");
    mp_spec_freeze(spec);
    SAYS(set(spec, "k", integer(1)), MP_INVALID_ARGUMENT,
         "the model spec is frozen and cannot be changed; create a new one");
    mp_spec_unpin(spec);
}

MP_TEST(files_messages_of_entries) {
    static const struct { mp_tensor_entry entry; const char *text; } rows[] = {
        {{.dtype = MP_F32, .ndim = 1, .shape = {1}, .file = 2, .nbytes = 4}, "/a: t: file is 2, allowed: 0 to 1"},
        {{.dtype = MP_F32, .ndim = 1, .shape = {1}, .file = -1, .nbytes = 4}, "/a: t: file is -1, allowed: 0 to 1"},
        {{.dtype = (mp_dtype)99, .ndim = 1, .shape = {1}, .file = 1, .nbytes = 4},
         "/b: t: type is 99, allowed: a type of dtype.def"},
        {{.dtype = MP_F32, .ndim = 5, .shape = {1}, .file = 1, .nbytes = 4}, "/b: t: dimensions is 5, allowed: 1 to 4"},
        {{.dtype = MP_F32, .ndim = 2, .shape = {2, -3}, .nbytes = 4},
         "/a: t: shape is [2, -3], allowed: sizes of at least 1 whose product is below 2^63"},
        {{.dtype = MP_Q4_0, .ndim = 2, .shape = {32, 31}, .nbytes = 18},
         "/a: t: row is 31 elements, allowed: multiples of 32, the block of Q4_0"},
        {{.dtype = MP_F64, .ndim = 2, .shape = {(int64_t)1 << 30, (int64_t)1 << 31}},
         "/a: t: size is 2305843009213693952 elements of F64, allowed: below 2^63 bytes"},
        {{.dtype = MP_F32, .ndim = 2, .shape = {2, 3}, .nbytes = 23},
         "/a: t: size is 23 bytes, allowed: 24 bytes, as type and shape imply"},
        {{.dtype = MP_F32, .ndim = 1, .shape = {2}, .offset = INT64_MAX - 6, .nbytes = 8},
         "/a: t: offset is 9223372036854775801, with 8 bytes after it, allowed: an end below 2^63"},
        {{.dtype = MP_F32, .ndim = 1, .shape = {2}, .offset = UINT64_MAX - 6, .nbytes = 8},
         "/a: t: offset is 18446744073709551609, with 8 bytes after it, allowed: an end below 2^63"},
    };
    mp_spec *spec = spec_of("/a");
    MP_CHECK_OK(mp_spec_add_file(spec, "/b", &error), &error);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mp_tensor_entry tensor = rows[i].entry;
        tensor.name = "t";
        SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, rows[i].text);
    }
    /* an error shows the first 70 bytes of a long name */
    char name[100], field[96];
    memset(name, 'n', 99), name[99] = 0;
    mp_tensor_entry tensor = {.name = name, .dtype = MP_F32, .ndim = 0};
    MP_CHECK_STATUS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, &error);
    snprintf(field, sizeof field, "%.70s: dimensions", name);
    MP_CHECK_STR(error.field, field);
    mp_spec_unpin(spec);
}

MP_TEST(files_messages_of_tokens) {
    static const uint8_t bytes[] = "abcdef", control[] = {0, 1, 0}, wrong[] = {0, 1, 2};
    static const uint64_t offsets[] = {0, 2, 2, 6}, late[] = {4, 4, 4, 6}, falling[] = {0, 3, 2, 6},
                          large[] = {0, 1, 65538, 65538};
    static const int32_t ids[] = {0, 2, 1}, above[] = {0, 3}, below[] = {-1, 0};
    static const struct { mp_status code; mp_token_table table; const char *text; } rows[] = {
        {MP_FORMAT, {0, bytes, offsets, control, 0, ids}, "/a: tokens is 0, allowed: at least 1"},
        {MP_FORMAT, {-5, bytes, offsets, control, 0, ids}, "/a: tokens is -5, allowed: at least 1"},
        {MP_LIMIT, {(1 << 20) + 1, bytes, offsets, control, 0, ids},
         "/a: tokens is 1048577, allowed: at most 1048576 (MP_SPEC_MAX_TOKENS)"},
        {MP_FORMAT, {3, bytes, late, control, 0, ids}, "/a: token offsets is 4, allowed: 0 as the first"},
        {MP_FORMAT, {3, bytes, falling, control, 0, ids},
         "/a: token offsets is 2 after 3, allowed: at least the preceding offset"},
        {MP_LIMIT, {3, bytes, large, control, 0, ids},
         "/a: token length is 65537, of token 1, allowed: at most 65536 bytes (MP_SPEC_MAX_TOKEN_BYTES)"},
        {MP_FORMAT, {3, bytes, offsets, wrong, 0, ids}, "/a: token control flag is 2, of token 2, allowed: 0 or 1"},
        {MP_FORMAT, {3, bytes, offsets, control, 4, ids},
         "/a: end-of-generation ids is 4, allowed: 0 to the number of tokens"},
        {MP_FORMAT, {3, bytes, offsets, control, -1, ids},
         "/a: end-of-generation ids is -1, allowed: 0 to the number of tokens"},
        {MP_FORMAT, {3, bytes, offsets, control, 2, above},
         "/a: end-of-generation id is 3, allowed: an id of the vocabulary"},
        {MP_FORMAT, {3, bytes, offsets, control, 2, below},
         "/a: end-of-generation id is -1, allowed: an id of the vocabulary"},
    };
    mp_spec *spec = spec_of("/a");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        SAYS(mp_spec_set_tokens(spec, &rows[i].table, &error), rows[i].code, rows[i].text);
    /* every id of the vocabulary, the first and the last too, may end a generation */
    const mp_token_table good = {3, bytes, offsets, control, 3, ids};
    MP_CHECK_OK(mp_spec_set_tokens(spec, &good, &error), &error);
    mp_spec_unpin(spec);
}

/* --- typed readers: every reader names every other type --- */

MP_TEST(files_messages_of_typed_readers) {
    static const uint64_t offsets[] = {0, 1};
    static const uint8_t bools[] = {1};
    static const int64_t integers[] = {1};
    static const double reals[] = {1};
    static const struct { mp_value value; const char *name; } values[] = {
        {{.type = MP_VALUE_BOOL}, "a bool"},
        {{.type = MP_VALUE_INT, .gguf_type = G_I32}, "an integer"},
        {{.type = MP_VALUE_FLOAT}, "a float"},
        {{.type = MP_VALUE_STRING, .count = 1, .as.string = "x"}, "a string"},
        {{.type = MP_VALUE_BOOLS, .count = 1, .as.bools = bools}, "an array of bools"},
        {{.type = MP_VALUE_INTS, .count = 1, .as.integers = integers}, "an array of integers"},
        {{.type = MP_VALUE_FLOATS, .count = 1, .as.reals = reals}, "an array of floats"},
        {{.type = MP_VALUE_STRINGS, .count = 1, .as.strings = {"x", offsets}}, "an array of strings"},
    };
    static const char *const allowed[] = {"an integer from 0 to 9", "an integer from 0 to 9 (a limit of mpool)",
                                          "an integer from 0 to 9, or an array of 1", "a number from 0 to 9",
                                          "true or false", "a string"};
    enum { VALUES = 8, MISSING = VALUES, READERS = 6 };
    mp_spec *spec = spec_of("/a");
    for (int v = 0; v < VALUES; v++) {
        char key[] = "k0";
        key[1] = (char)('0' + v);
        MP_CHECK_OK(set(spec, key, values[v].value), &error);
    }
    for (int reader = 0; reader < READERS; reader++)
        for (int v = 0; v <= MISSING; v++) {
            char key[] = "k0", text[200];
            int64_t whole = 0;
            double real = 0;
            bool flag = false;
            const char *string = NULL;
            key[1] = (char)('0' + v);
            const mp_status status = reader == 0   ? mp_spec_int(spec, key, 0, 9, NULL, &whole, &error)
                                     : reader == 1 ? mp_spec_int_capped(spec, key, 0, 9, NULL, &whole, &error)
                                     : reader == 2 ? mp_spec_ints(spec, key, 1, 0, 9, NULL, &whole, &error)
                                     : reader == 3 ? mp_spec_float(spec, key, 0, 9, NULL, &real, &error)
                                     : reader == 4 ? mp_spec_bool(spec, key, NULL, &flag, &error)
                                                   : mp_spec_string(spec, key, NULL, &string, &error);
            static const mp_value_type own[] = {MP_VALUE_INT,   MP_VALUE_INT,  MP_VALUE_INT,
                                                MP_VALUE_FLOAT, MP_VALUE_BOOL, MP_VALUE_STRING};
            if (v == (int)own[reader] || (reader == 2 && v == MP_VALUE_INTS)) {
                MP_CHECK_OK(status, &error);
                continue;
            }
            snprintf(text, sizeof text, "/a: %s is %s, allowed: %s", key, v == MISSING ? "missing" : values[v].name,
                     allowed[reader]);
            SAYS(status, MP_FORMAT, text);
        }
    int64_t whole;
    double real;
    const char *string;
    MP_CHECK_OK(set(spec, "ten", integer(10)), &error);
    SAYS(mp_spec_int(spec, "ten", 11, 20, NULL, &whole, &error), MP_FORMAT,
         "/a: ten is 10, allowed: an integer from 11 to 20");
    SAYS(mp_spec_int_capped(spec, "ten", 1, 9, NULL, &whole, &error), MP_LIMIT,
         "/a: ten is 10, allowed: an integer from 1 to 9 (a limit of mpool)");
    SAYS(mp_spec_int_capped(spec, "ten", 11, 20, NULL, &whole, &error), MP_FORMAT,
         "/a: ten is 10, allowed: an integer from 11 to 20 (a limit of mpool)");
    SAYS(mp_spec_ints(spec, "ten", 2, 0, 9, NULL, &whole, &error), MP_FORMAT,
         "/a: ten is 10, allowed: an integer from 0 to 9");
    const int64_t three[] = {1, 2, 30};
    MP_CHECK_OK(set(spec, "three", (mp_value){.type = MP_VALUE_INTS, .count = 3, .as.integers = three}), &error);
    int64_t all[3];
    SAYS(mp_spec_ints(spec, "three", 3, 0, 9, NULL, all, &error), MP_FORMAT,
         "/a: three is 30 at index 2, allowed: an integer from 0 to 9");
    SAYS(mp_spec_ints(spec, "three", 2, 0, 9, NULL, all, &error), MP_FORMAT,
         "/a: three is an array of 3, allowed: an integer from 0 to 9, or an array of 2");
    MP_CHECK_OK(set(spec, "half", (mp_value){.type = MP_VALUE_FLOAT, .as.real = 0.5}), &error);
    SAYS(mp_spec_float(spec, "half", 0.75, 1, NULL, &real, &error), MP_FORMAT,
         "/a: half is 0.5, allowed: a number from 0.75 to 1");
    MP_CHECK_OK(set(spec, "nul", (mp_value){.type = MP_VALUE_STRING, .count = 3, .as.string = "ab"}), &error);
    SAYS(mp_spec_string(spec, "nul", NULL, &string, &error), MP_FORMAT,
         "/a: nul is NUL at byte 2, allowed: a string without NUL");
    SAYS(mp_spec_int(spec, "{arch}.k", 0, 1, NULL, &whole, &error), MP_FORMAT,
         "/a: general.architecture is missing, allowed: the name of an architecture");
    SAYS(mp_spec_int(spec, "{archer}.k", 0, 1, NULL, &whole, &error), MP_FORMAT, /* no mark: an ordinary key */
         "/a: {archer}.k is missing, allowed: an integer from 0 to 1");
    mp_spec_unpin(spec);
    spec = spec_of(NULL);
    SAYS(mp_spec_int(spec, "k", 0, 1, NULL, &whole, &error), MP_FORMAT,
         "model spec: k is missing, allowed: an integer from 0 to 1");
    mp_spec_unpin(spec);
}

/* --- mapped files --- */

MP_TEST(files_messages_of_weights) {
    char path[400];
    static const uint8_t bytes[100];
    mp_weights *weights;
    mp_tensor view;
    mp_file_map *map;
    mp_file_map_init();
    MP_CHECK_INT(chdir(mp_test_directory()), 0);
    mp_test_write_file(test_path(path, sizeof path, "w"), bytes, sizeof bytes);
    mp_test_write_file(test_path(path, sizeof path, "empty"), bytes, 0);
    SAYS(mp_file_map_open("empty", &map, &error), MP_FORMAT,
         "empty at byte 0: file size is an empty file, allowed: at least 1 byte");
    static const struct { mp_tensor_entry entry; const char *text; } rows[] = {
        {{.name = "t", .dtype = MP_F32, .ndim = 1, .shape = {2}, .offset = 96, .nbytes = 8},
         "w: t: offset is 96, with 8 bytes after it, allowed: an end within the 100 bytes of the file"},
        {{.name = "t", .dtype = MP_F32, .ndim = 1, .shape = {2}, .offset = 6, .nbytes = 8},
         "w: t: offset is 6, allowed: multiples of 4 for F32"},
        {{.name = "t", .dtype = MP_Q4_0, .ndim = 1, .shape = {32}, .offset = 7, .nbytes = 18},
         "w: t: offset is 7, allowed: multiples of 2 for Q4_0"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mp_spec *spec = spec_of("w");
        MP_CHECK_OK(mp_spec_add_tensor(spec, &rows[i].entry, &error), &error);
        SAYS(mp_weights_open(spec, &weights, &error), MP_FORMAT, rows[i].text);
        mp_spec_unpin(spec);
    }
    mp_spec *spec = spec_of("w");
    static const mp_tensor_entry entries[] = {
        {.name = "blk.0.q.weight", .dtype = MP_F32, .ndim = 2, .shape = {2, 3}, .offset = 4, .nbytes = 24},
        {.name = "blk.1.q.weight", .dtype = MP_I32, .ndim = 1, .shape = {2}, .nbytes = 8},
        {.name = "blk.1.q.bias", .dtype = MP_F8_E4M3, .ndim = 1, .shape = {32}, .nbytes = 32}};
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        MP_CHECK_OK(mp_spec_add_tensor(spec, &entries[i], &error), &error);
    MP_CHECK_OK(mp_weights_open(spec, &weights, &error), &error);
    const int64_t shape[] = {-1, 4};
    SAYS(mp_weights_get(weights, "none", 2, shape, &view, &error), MP_FORMAT,
         "w: none is missing, allowed: a tensor of shape [*, 4]");
    SAYS(mp_weights_get(weights, "blk.0.q.weight", 2, shape, &view, &error), MP_FORMAT,
         "w at byte 4: blk.0.q.weight is of shape [2, 3], allowed: a tensor of shape [*, 4]");
    SAYS(mp_weights_get(weights, "blk.1.q.weight", 1, (int64_t[]){2}, &view, &error), MP_UNSUPPORTED,
         "tensor blk.1.q.weight is stored as I32, which is not a weight type");
    SAYS(mp_weights_get(weights, "blk.1.q.bias", 1, (int64_t[]){32}, &view, &error), MP_UNSUPPORTED,
         "tensor blk.1.q.bias is stored as F8_E4M3, which mpool supports only for the weights of linear layers");
    SAYS(mp_weights_check_biases(weights, "blk.", 2, &error), MP_FORMAT,
         "w: blk.0.q.bias is missing, but layer 1 has it, allowed: a bias in all layers, or in none");
    mp_weights_close(weights);
    mp_test_write_file(test_path(path, sizeof path, "w"), bytes, sizeof bytes - 1);
    SAYS(mp_weights_open(spec, &weights, &error), MP_INTEGRITY,
         "w changed after the model was described; load the model again");
    mp_spec_unpin(spec);
    spec = mp_spec_create();
    MP_CHECK_OK(mp_weights_open(spec, &weights, &error), &error);
    SAYS(mp_weights_get(weights, "none", 1, (int64_t[]){7}, &view, &error), MP_FORMAT,
         "model spec: none is missing, allowed: a tensor of shape [7]");
    mp_weights_close(weights);
    mp_spec_unpin(spec);
}

MP_TEST(files_messages_of_the_cursor) {
    static const uint8_t bytes[10];
    mp_cursor c = {.data = bytes, .size = sizeof bytes, .file = "f"};
    const uint8_t *data;
    uint64_t value;
    MP_CHECK_OK(mp_cursor_take(&c, 3, "start", &data, &error), &error);
    SAYS(mp_cursor_u64(&c, "rest", &value, &error), MP_FORMAT,
         "f at byte 3: rest is 8 bytes with 7 left, allowed: at most the bytes left in the file");
}
