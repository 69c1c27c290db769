/* test_files_messages.c: the code and the whole message of each refusal in files/: file, offset, field, value found and
 * allowed values. messages/ holds the texts. Other tests cover which inputs are refused. */
#include "files/cursor.h"
#include "files/spec_build.h"
#include "files/weights.h"
#include "test_files.h"

static mp_error error;

/* Check the status of a call, and its message against the next line of messages/TEST.txt, in which DIR is the folder of
 * the test. MPOOL_RECORD_TEXTS=1 writes that file again. */
static void says(const char *test, mp_status got, mp_status expected) {
    static FILE *file;
    char text[800], wanted[800] = "";
    const bool records = getenv("MPOOL_RECORD_TEXTS") != NULL;
    MP_CHECK_STATUS(got, expected, &error);
    MP_CHECK_INT(error.code, expected);
    const size_t length = strlen(mp_test_directory());
    const bool inside = strncmp(error.message, mp_test_directory(), length) == 0;
    snprintf(text, sizeof text, "%s%s\n", inside ? "DIR" : "", error.message + (inside ? length : 0));
    if (!file) {
        snprintf(wanted, sizeof wanted, "%s/c/messages/%s.txt", mp_test_root(), test + strlen("mp_test_body_"));
        file = fopen(wanted, records ? "w" : "r");
        MP_CHECK(file);
    }
    if (records) {
        fputs(text, file);
        return;
    }
    wanted[0] = 0;
    MP_CHECK_STR(text, fgets(wanted, sizeof wanted, file) ? wanted : "no further line of the file");
}
#define SAYS(call, expected) says(__func__, call, expected)
#define REFUSED(expected, ...) ((void)(__VA_ARGS__), SAYS(parsed(), expected)) /* after the file is written */

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
    REFUSED(MP_FORMAT, file_of(0, 0)->size = 23);
    REFUSED(MP_FORMAT, file_of(0, 0)->data[3] = 'X');
    REFUSED(MP_FORMAT, file_of(0, 0)->data[4] = 9);
    REFUSED(MP_FORMAT, file_of(0, 0)->data[4] = 1);
    REFUSED(MP_FORMAT, file_of(0, 0)->data[4] = 0, b.data[7] = 2);
    REFUSED(MP_FORMAT, file_of(2, 0), zeros(65));
    REFUSED(MP_FORMAT, file_of(1, 3), zeros(33 + 3 * 14 - 1));
    REFUSED(MP_LIMIT, file_of(65537, 0), zeros(65537 * 33));
    REFUSED(MP_LIMIT, file_of(0, 65538), zeros(65538 * 14));

    REFUSED(MP_FORMAT, put_u64(file_of(0, 1), 0), zeros(10));
    REFUSED(MP_FORMAT, put_u64(file_of(0, 1), 11), zeros(10));
    REFUSED(MP_FORMAT, put_u64(file_of(0, 1), 65536), zeros(65536 + 5));
    REFUSED(MP_FORMAT, put_u8(value_of("\tab", G_U8), 0));
    REFUSED(MP_FORMAT, put_u8(value_of("ab\x1f", G_U8), 0));
    REFUSED(MP_FORMAT, put_u8(value_of("k\xc3", G_U8), 0));
    REFUSED(MP_FORMAT, put_u8(value_of("k", G_U8), 0), b.data[16] = 2, put_key(&b, "k", G_U8), put_u8(&b, 0));
    REFUSED(MP_FORMAT, put_u8(value_of("k", 13), 0));
    REFUSED(MP_FORMAT, put_u64(value_of("general.alignment", G_U64), 32));
    REFUSED(MP_FORMAT, put_u32(value_of("general.alignment", G_U32), 48));
    REFUSED(MP_LIMIT, put_u32(value_of("general.alignment", G_U32), 131072));

    REFUSED(MP_FORMAT, put_u64(value_of("k", G_STRING), 3), zeros(2));
    REFUSED(MP_LIMIT, put_u64(value_of("k", G_STRING), (16 << 20) + 1), zeros((16 << 20) + 1));
    REFUSED(MP_FORMAT, put_u64(value_of("k", G_U64), (uint64_t)1 << 63));
    REFUSED(MP_FORMAT, put_u8(value_of("k", G_BOOL), 2));
    REFUSED(MP_FORMAT, put_u32(value_of("k", G_U64), 0));

    REFUSED(MP_FORMAT, array_of(G_ARRAY, 1));
    REFUSED(MP_FORMAT, array_of(13, 1));
    REFUSED(MP_FORMAT, array_of(G_I16, 4), zeros(7));
    REFUSED(MP_FORMAT, array_of(G_I16, (uint64_t)1 << 63), zeros(7));
    REFUSED(MP_FORMAT, array_of(G_STRING, 2), zeros(15));
    array_of(G_U8, 5), zeros(5), b.data[16] = 2;
    put_key(&b, "l", G_ARRAY), put_u32(&b, G_U8), put_u64(&b, (1 << 24) - 4), zeros((1 << 24) - 4);
    SAYS(parsed(), MP_LIMIT);
    REFUSED(MP_FORMAT, array_of(G_STRING, 2), put_u64(&b, 0), put_u64(&b, 3), zeros(2));
    for (uint64_t bad = 0; bad < 3; bad++) { /* each element is checked, and the first bad one is named */
        array_of(G_U64, 3);
        for (uint64_t i = 0; i < 3; i++)
            put_u64(&b, i < bad ? 1 : UINT64_MAX - i);
        SAYS(parsed(), MP_FORMAT);
        array_of(G_BOOL, 3);
        for (uint64_t i = 0; i < 3; i++)
            put_u8(&b, i < bad ? 1 : (uint8_t)(2 + i));
        SAYS(parsed(), MP_FORMAT);
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
    REFUSED(MP_FORMAT, tensor_of("", 1, eight, 0, 0), zeros(64));
    tensor_of("12345678901234567890123456789012345678901234567890123456789012345", 1, eight, 0, 0), zeros(64);
    SAYS(parsed(), MP_FORMAT);
    REFUSED(MP_FORMAT, tensor_of("a\xc3", 1, eight, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("ab", 1, eight, 0, 0)->data[47] = 0, zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 1, eight, 0, 0)->data[8] = 2, put_tensor(&b, "t", 1, eight, 0, 32), zeros(128));
    REFUSED(MP_FORMAT, tensor_of("t", 0, eight, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 5, eight, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", UINT32_MAX, eight, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 2, zero, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 1, over, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 2, half, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 1, eight, 99, 0), zeros(64));
    REFUSED(MP_UNSUPPORTED, tensor_of("t", 1, eight, 15, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 2, odd, 2, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 1, most, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 2, wide, 0, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 1, eight, 0, 16), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 1, eight, 0, 32), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 1, eight, 0, 0)->data[8] = 2, put_tensor(&b, "u", 1, eight, 0, 64), zeros(128));
    REFUSED(MP_FORMAT, tensor_of("t", 1, (uint64_t[]){50}, 0, 0), zeros(64));
    tensor_of("t", 1, (uint64_t[]){(uint64_t)1 << 60}, 0, 0)->data[8] = 2;
    put_tensor(&b, "u", 1, eight, 0, (uint64_t)1 << 62), zeros(64);
    SAYS(parsed(), MP_FORMAT);
    REFUSED(MP_FORMAT, tensor_of("t", 1, (uint64_t[]){135}, 24, 0), zeros(64));
    REFUSED(MP_FORMAT, tensor_of("t", 1, eight, 0, 0), zeros(96 + 31 - 71));
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

static mp_status read_parts(void) {
    char path[400];
    mp_spec *spec;
    return mp_gguf_read(test_path(path, sizeof path, "m-00001-of-00002.gguf"), &spec, &error);
}

MP_TEST(files_messages_of_split_models) {
    static const char first[] = "m-00001-of-00002.gguf", second[] = "m-00002-of-00002.gguf";
    mp_file_map_init();
    write_part(first, 0, 3, 0);
    SAYS(read_parts(), MP_FORMAT);
    write_part(first, 0, 1025, 0);
    SAYS(read_parts(), MP_LIMIT);
    write_part(first, 2, 2, 0);
    SAYS(read_parts(), MP_FORMAT);
    write_part(first, 0, 2, 5);
    write_part(second, 1, 3, 5);
    SAYS(read_parts(), MP_FORMAT);
    write_part(second, 0, 2, 5);
    SAYS(read_parts(), MP_FORMAT);
    write_part(second, 1, 2, 5);
    SAYS(read_parts(), MP_FORMAT);
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
        MP_CHECK_STR(mp_spec_origin(spec), has_file ? "/a" : "model spec");
        SAYS(mp_spec_set_architecture(spec, "", &error), MP_FORMAT);
        SAYS(mp_spec_set_architecture(spec, "a b", &error), MP_FORMAT);
        SAYS(set(spec, "", integer(1)), MP_FORMAT);
        SAYS(set(spec, longer, integer(1)), MP_FORMAT);
        SAYS(set(spec, "a\xff", integer(1)), MP_FORMAT);
        MP_CHECK_OK(set(spec, "a", integer(1)), &error);
        SAYS(set(spec, "a", integer(1)), MP_FORMAT);
        mp_value strings = {.type = MP_VALUE_STRINGS, .count = 2, .as.strings = {"abc", late}};
        SAYS(set(spec, "s", strings), MP_FORMAT);
        strings.as.strings.offsets = falling;
        SAYS(set(spec, "s", strings), MP_FORMAT);
        mp_tensor_entry tensor = {.name = "", .dtype = MP_F32, .ndim = 1, .shape = {1}, .nbytes = 4};
        SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT);
        tensor.name = longer + 65536 - 256;
        SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT);
        tensor.name = "\xff";
        SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT);
        if (has_file) {
            tensor.name = "t";
            MP_CHECK_OK(mp_spec_add_tensor(spec, &tensor, &error), &error);
            SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT);
        }
        mp_spec_unpin(spec);
    }
    mp_spec *spec = spec_of(NULL);
    SAYS(mp_spec_add_file(spec, "", &error), MP_INVALID_ARGUMENT);
    SAYS(set(spec, "k", (mp_value){.type = (mp_value_type)99}), MP_INVALID_ARGUMENT);
    SAYS(mp_spec_set_draft(spec, spec, &error), MP_INVALID_ARGUMENT);
    mp_spec_freeze(spec);
    SAYS(set(spec, "k", integer(1)), MP_INVALID_ARGUMENT);
    mp_spec_unpin(spec);
}

MP_TEST(files_messages_of_entries) {
    static const mp_tensor_entry rows[] = {
        {.dtype = MP_F32, .ndim = 1, .shape = {1}, .file = 2, .nbytes = 4},
        {.dtype = MP_F32, .ndim = 1, .shape = {1}, .file = -1, .nbytes = 4},
        {.dtype = (mp_dtype)99, .ndim = 1, .shape = {1}, .file = 1, .nbytes = 4},
        {.dtype = MP_F32, .ndim = 5, .shape = {1}, .file = 1, .nbytes = 4},
        {.dtype = MP_F32, .ndim = 2, .shape = {2, -3}, .nbytes = 4},
        {.dtype = MP_Q4_0, .ndim = 2, .shape = {32, 31}, .nbytes = 18},
        {.dtype = MP_F64, .ndim = 2, .shape = {(int64_t)1 << 30, (int64_t)1 << 31}},
        {.dtype = MP_F32, .ndim = 2, .shape = {2, 3}, .nbytes = 23},
        {.dtype = MP_F32, .ndim = 1, .shape = {2}, .offset = INT64_MAX - 6, .nbytes = 8},
        {.dtype = MP_F32, .ndim = 1, .shape = {2}, .offset = UINT64_MAX - 6, .nbytes = 8},
    };
    mp_spec *spec = spec_of("/a");
    MP_CHECK_OK(mp_spec_add_file(spec, "/b", &error), &error);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mp_tensor_entry tensor = rows[i];
        tensor.name = "t";
        SAYS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT);
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
    static const struct { mp_status code; mp_token_table table; } rows[] = {
        {MP_FORMAT, {0, bytes, offsets, control, 0, ids}},
        {MP_FORMAT, {-5, bytes, offsets, control, 0, ids}},
        {MP_LIMIT, {(1 << 20) + 1, bytes, offsets, control, 0, ids}},
        {MP_FORMAT, {3, bytes, late, control, 0, ids}},
        {MP_FORMAT, {3, bytes, falling, control, 0, ids}},
        {MP_LIMIT, {3, bytes, large, control, 0, ids}},
        {MP_FORMAT, {3, bytes, offsets, wrong, 0, ids}},
        {MP_FORMAT, {3, bytes, offsets, control, 4, ids}},
        {MP_FORMAT, {3, bytes, offsets, control, -1, ids}},
        {MP_FORMAT, {3, bytes, offsets, control, 2, above}},
        {MP_FORMAT, {3, bytes, offsets, control, 2, below}},
    };
    mp_spec *spec = spec_of("/a");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        SAYS(mp_spec_set_tokens(spec, &rows[i].table, &error), rows[i].code);
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
    static const mp_value values[] = {
        {.type = MP_VALUE_BOOL},
        {.type = MP_VALUE_INT, .gguf_type = G_I32},
        {.type = MP_VALUE_FLOAT},
        {.type = MP_VALUE_STRING, .count = 1, .as.string = "x"},
        {.type = MP_VALUE_BOOLS, .count = 1, .as.bools = bools},
        {.type = MP_VALUE_INTS, .count = 1, .as.integers = integers},
        {.type = MP_VALUE_FLOATS, .count = 1, .as.reals = reals},
        {.type = MP_VALUE_STRINGS, .count = 1, .as.strings = {"x", offsets}},
    };
    enum { VALUES = 8, MISSING = VALUES, READERS = 6 };
    mp_spec *spec = spec_of("/a");
    for (int v = 0; v < VALUES; v++) {
        char key[] = "k0";
        key[1] = (char)('0' + v);
        MP_CHECK_OK(set(spec, key, values[v]), &error);
    }
    for (int reader = 0; reader < READERS; reader++)
        for (int v = 0; v <= MISSING; v++) {
            char key[] = "k0";
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
            SAYS(status, MP_FORMAT);
        }
    int64_t whole;
    double real;
    const char *string;
    MP_CHECK_OK(set(spec, "ten", integer(10)), &error);
    SAYS(mp_spec_int(spec, "ten", 11, 20, NULL, &whole, &error), MP_FORMAT);
    SAYS(mp_spec_int_capped(spec, "ten", 1, 9, NULL, &whole, &error), MP_LIMIT);
    SAYS(mp_spec_int_capped(spec, "ten", 11, 20, NULL, &whole, &error), MP_FORMAT);
    SAYS(mp_spec_ints(spec, "ten", 2, 0, 9, NULL, &whole, &error), MP_FORMAT);
    const int64_t three[] = {1, 2, 30};
    MP_CHECK_OK(set(spec, "three", (mp_value){.type = MP_VALUE_INTS, .count = 3, .as.integers = three}), &error);
    int64_t all[3];
    SAYS(mp_spec_ints(spec, "three", 3, 0, 9, NULL, all, &error), MP_FORMAT);
    SAYS(mp_spec_ints(spec, "three", 2, 0, 9, NULL, all, &error), MP_FORMAT);
    MP_CHECK_OK(set(spec, "half", (mp_value){.type = MP_VALUE_FLOAT, .as.real = 0.5}), &error);
    SAYS(mp_spec_float(spec, "half", 0.75, 1, NULL, &real, &error), MP_FORMAT);
    MP_CHECK_OK(set(spec, "nul", (mp_value){.type = MP_VALUE_STRING, .count = 3, .as.string = "ab"}), &error);
    SAYS(mp_spec_string(spec, "nul", NULL, &string, &error), MP_FORMAT);
    SAYS(mp_spec_int(spec, "{arch}.k", 0, 1, NULL, &whole, &error), MP_FORMAT);
    SAYS(mp_spec_int(spec, "{archer}.k", 0, 1, NULL, &whole, &error), MP_FORMAT);
    mp_spec_unpin(spec);
    spec = spec_of(NULL);
    SAYS(mp_spec_int(spec, "k", 0, 1, NULL, &whole, &error), MP_FORMAT);
    mp_spec_unpin(spec);
}

/* --- mapped files --- */

MP_TEST(files_messages_of_weights) {
    char path[400], empty[400];
    static const uint8_t bytes[100];
    mp_weights *weights;
    mp_tensor view;
    mp_file_map *map;
    mp_file_map_init();
    mp_test_write_file(test_path(path, sizeof path, "w"), bytes, sizeof bytes);
    mp_test_write_file(test_path(empty, sizeof empty, "empty"), bytes, 0);
    SAYS(mp_file_map_open(empty, &map, &error), MP_FORMAT);
    static const mp_tensor_entry rows[] = {
        {.name = "t", .dtype = MP_F32, .ndim = 1, .shape = {2}, .offset = 96, .nbytes = 8},
        {.name = "t", .dtype = MP_F32, .ndim = 1, .shape = {2}, .offset = 6, .nbytes = 8},
        {.name = "t", .dtype = MP_Q4_0, .ndim = 1, .shape = {32}, .offset = 7, .nbytes = 18},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mp_spec *spec = spec_of(path);
        MP_CHECK_OK(mp_spec_add_tensor(spec, &rows[i], &error), &error);
        SAYS(mp_weights_open(spec, &weights, &error), MP_FORMAT);
        mp_spec_unpin(spec);
    }
    mp_spec *spec = spec_of(path);
    static const mp_tensor_entry entries[] = {
        {.name = "blk.0.q.weight", .dtype = MP_F32, .ndim = 2, .shape = {2, 3}, .offset = 4, .nbytes = 24},
        {.name = "blk.1.q.weight", .dtype = MP_I32, .ndim = 1, .shape = {2}, .nbytes = 8},
        {.name = "blk.1.q.bias", .dtype = MP_F8_E4M3, .ndim = 1, .shape = {32}, .nbytes = 32}};
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        MP_CHECK_OK(mp_spec_add_tensor(spec, &entries[i], &error), &error);
    MP_CHECK_OK(mp_weights_open(spec, &weights, &error), &error);
    const int64_t shape[] = {-1, 4};
    SAYS(mp_weights_get(weights, "none", 2, shape, &view, &error), MP_FORMAT);
    SAYS(mp_weights_get(weights, "blk.0.q.weight", 2, shape, &view, &error), MP_FORMAT);
    SAYS(mp_weights_get(weights, "blk.1.q.weight", 1, (int64_t[]){2}, &view, &error), MP_UNSUPPORTED);
    SAYS(mp_weights_get(weights, "blk.1.q.bias", 1, (int64_t[]){32}, &view, &error), MP_UNSUPPORTED);
    SAYS(mp_weights_check_biases(weights, "blk.", 2, &error), MP_FORMAT);
    mp_weights_close(weights);
    mp_test_write_file(path, bytes, sizeof bytes - 1);
    SAYS(mp_weights_open(spec, &weights, &error), MP_INTEGRITY);
    mp_spec_unpin(spec);
    spec = mp_spec_create();
    MP_CHECK_OK(mp_weights_open(spec, &weights, &error), &error);
    SAYS(mp_weights_get(weights, "none", 1, (int64_t[]){7}, &view, &error), MP_FORMAT);
    mp_weights_close(weights);
    mp_spec_unpin(spec);
}

MP_TEST(files_messages_of_the_cursor) {
    static const uint8_t bytes[10];
    mp_cursor c = {.data = bytes, .size = sizeof bytes, .file = "f"};
    const uint8_t *data;
    uint64_t value;
    MP_CHECK_OK(mp_cursor_take(&c, 3, "start", &data, &error), &error);
    SAYS(mp_cursor_u64(&c, "rest", &value, &error), MP_FORMAT);
}
