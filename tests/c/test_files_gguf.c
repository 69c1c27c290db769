/* test_files_gguf.c: values read from valid files, cases that need large files, and faults during reading. Case numbers
 * refer to tests/corpus/gguf/README.md. */
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "spec_fixture.h"
#include "base/alloc.h"
#include "base/sys.h"
#include "files/file_map.h"
#include "test_files.h"

static mp_spec *read_corpus(const char *name) {
    char path[1600];
    mp_error error;
    mp_spec *spec;
    snprintf(path, sizeof path, "%s/corpus/gguf/valid/%s", mp_test_root(), name);
    mp_file_map_init();
    MP_CHECK_OK(mp_gguf_read(path, &spec, &error), &error);
    return spec;
}

static const mp_value *value_of(const mp_spec *spec, const char *key, mp_value_type type, int gguf_type) {
    const mp_value *value = mp_spec_find(spec, key);
    if (!value || value->type != type || value->gguf_type != gguf_type)
        MP_FAIL("%s is %s", key, value ? "of another type" : "missing");
    return value;
}

MP_TEST(files_gguf_values) {
    mp_spec *spec = read_corpus("every_value_type.gguf");
    static const struct { const char *name; int type; int64_t low, high; } integers[] = {
        {"u8", G_U8, 0, 255},          {"i8", G_I8, -128, 127},
        {"u16", G_U16, 0, 65535},      {"i16", G_I16, -32768, 32767},
        {"u32", G_U32, 0, 4294967295}, {"i32", G_I32, INT32_MIN, INT32_MAX},
        {"u64", G_U64, 0, INT64_MAX},  {"i64", G_I64, INT64_MIN, INT64_MAX},
    };
    char key[32];
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        snprintf(key, sizeof key, "one.%s", integers[i].name);
        MP_CHECK_INT(value_of(spec, key, MP_VALUE_INT, integers[i].type)->as.integer, integers[i].high);
        snprintf(key, sizeof key, "many.%s", integers[i].name);
        const mp_value *many = value_of(spec, key, MP_VALUE_INTS, integers[i].type);
        MP_CHECK_INT(many->count, 2);
        MP_CHECK_INT(many->as.integers[0], integers[i].low);
        MP_CHECK_INT(many->as.integers[1], integers[i].high);
        snprintf(key, sizeof key, "none.%s", integers[i].name);
        MP_CHECK_INT(value_of(spec, key, MP_VALUE_INTS, integers[i].type)->count, 0);
    }
    MP_CHECK(value_of(spec, "one.f32", MP_VALUE_FLOAT, G_F32)->as.real == -2.0);
    const mp_value *singles = value_of(spec, "many.f32", MP_VALUE_FLOATS, G_F32);
    const mp_value *reals = value_of(spec, "many.f64", MP_VALUE_FLOATS, G_F64);
    MP_CHECK(singles->count == 2 && singles->as.reals[0] == 0.5 && singles->as.reals[1] == -2.0);
    MP_CHECK(reals->count == 2 && reals->as.reals[0] == 1e300 && reals->as.reals[1] == -0.25);
    MP_CHECK(value_of(spec, "one.f64", MP_VALUE_FLOAT, G_F64)->as.real == -0.25);
    MP_CHECK_INT(value_of(spec, "one.bool", MP_VALUE_BOOL, G_BOOL)->as.integer, 1);
    const mp_value *bools = value_of(spec, "many.bool", MP_VALUE_BOOLS, G_BOOL);
    MP_CHECK(bools->count == 2 && bools->as.bools[0] == 0 && bools->as.bools[1] == 1);
    const mp_value *text = value_of(spec, "one.string", MP_VALUE_STRING, G_STRING);
    MP_CHECK_STR(text->as.string, "h\xc3\xa4l");
    MP_CHECK_INT(text->count, 4);
    const mp_value *texts = value_of(spec, "many.string", MP_VALUE_STRINGS, G_STRING);
    MP_CHECK_INT(texts->count, 2);
    MP_CHECK_INT(texts->as.strings.offsets[0], 0);
    MP_CHECK_INT(texts->as.strings.offsets[1], 0);
    MP_CHECK_INT(texts->as.strings.offsets[2], 4);
    MP_CHECK(memcmp(texts->as.strings.bytes, "h\xc3\xa4l", 4) == 0);
    MP_CHECK_INT(value_of(spec, "none.string", MP_VALUE_STRINGS, G_STRING)->count, 0);
    MP_CHECK_STR(mp_spec_architecture(spec), "test");
    MP_CHECK_INT(mp_spec_value_count(spec), 1 + 3 * 12);
    mp_spec_unpin(spec);
}

MP_TEST(files_gguf_token_bytes_may_be_anything) {
    mp_spec *spec = read_corpus("case17_token_bytes.gguf");
    const mp_value *tokens = value_of(spec, "tokenizer.ggml.tokens", MP_VALUE_STRINGS, G_STRING);
    static const uint64_t offsets[] = {0, 2, 5, 7, 7};
    MP_CHECK_INT(tokens->count, 4);
    for (int i = 0; i < 5; i++)
        MP_CHECK_INT(tokens->as.strings.offsets[i], offsets[i]);
    MP_CHECK(memcmp(tokens->as.strings.bytes, "\xff\xfe" "a\0b" "\xc3\xa9", 7) == 0);
    mp_spec_unpin(spec);
}

/* The file stores the innermost size first and offsets within the tensor data. The spec stores the outermost size first
 * and offsets within the file. */
MP_TEST(files_gguf_shapes_and_offsets) {
    mp_spec *spec = read_corpus("dimensions_1_to_4.gguf");
    static const int64_t shapes[4][4] = {{2, 1, 1, 1}, {3, 2, 1, 1}, {5, 3, 2, 1}, {7, 5, 3, 2}};
    MP_CHECK_INT(mp_spec_tensor_count(spec), 4);
    uint64_t next = 0;
    for (int i = 0; i < 4; i++) {
        const mp_tensor_entry *t = mp_spec_tensor_at(spec, i);
        MP_CHECK_INT(t->ndim, i + 1);
        for (int d = 0; d < 4; d++)
            MP_CHECK_INT(t->shape[d], shapes[i][d]);
        if (i)
            MP_CHECK_INT(t->offset, next);
        MP_CHECK_INT(t->offset % 32, 0);
        next = (t->offset + t->nbytes + 31) / 32 * 32;
    }
    /* 24 bytes of header, the architecture, four records of 8+2+4+8n+4+8 bytes, then padding */
    MP_CHECK_INT(mp_spec_tensor_at(spec, 0)->offset, (24 + 44 + 4 * 26 + 8 * 10 + 31) / 32 * 32);
    mp_spec_unpin(spec);
}

MP_TEST(files_gguf_every_dtype) {
    mp_spec *spec = read_corpus("every_dtype.gguf");
    int types = 0;
    for (int d = 0; d < MP_DTYPE_COUNT; d++)
        types += mp_dtype_get((mp_dtype)d)->ggml_id >= 0;
    MP_CHECK_INT(mp_spec_tensor_count(spec), types);
    for (int d = 0; d < MP_DTYPE_COUNT; d++) {
        const mp_dtype_row *row = mp_dtype_get((mp_dtype)d);
        if (row->ggml_id < 0) /* a type of model folders */
            continue;
        char name[32];
        snprintf(name, sizeof name, "t.%s", row->name);
        const mp_tensor_entry *t = mp_spec_find_tensor(spec, name);
        if (!t || t->dtype != (mp_dtype)d)
            MP_FAIL("%s is missing or of another type", name);
        MP_CHECK_INT(t->shape[0], 3);
        MP_CHECK_INT(t->shape[1], row->items > 1 ? 2 * row->items : 6);
        MP_CHECK_INT(t->nbytes, 3 * (row->items > 1 ? 2 : 6) * row->bytes);
    }
    mp_spec_unpin(spec);
}

MP_TEST(files_gguf_split) {
    mp_spec *spec = read_corpus("split/pair-00001-of-00002.gguf");
    MP_CHECK_INT(mp_spec_file_count(spec), 2);
    MP_CHECK_HAS(mp_spec_file(spec, 0), "/valid/split/pair-00001-of-00002.gguf");
    MP_CHECK_HAS(mp_spec_file(spec, 1), "/valid/split/pair-00002-of-00002.gguf");
    MP_CHECK_INT(mp_spec_tensor_count(spec), 3);
    MP_CHECK_INT(mp_spec_find_tensor(spec, "a.weight")->file, 0);
    MP_CHECK_INT(mp_spec_find_tensor(spec, "b.weight")->file, 1);
    MP_CHECK_INT(mp_spec_find_tensor(spec, "c.weight")->file, 1);
    mp_spec_unpin(spec);
    spec = read_corpus("split/no_tensor_first-00001-of-00003.gguf");
    MP_CHECK_INT(mp_spec_file_count(spec), 3);
    MP_CHECK_INT(mp_spec_find_tensor(spec, "b.weight")->file, 2);
    mp_spec_unpin(spec);
}

/* A split model opened by a path without a folder. */
MP_TEST(files_gguf_split_in_the_working_directory) {
    char path[1600];
    mp_error error;
    mp_spec *spec;
    snprintf(path, sizeof path, "%s/corpus/gguf/valid/split", mp_test_root());
    MP_CHECK_INT(chdir(path), 0);
    MP_CHECK_OK(mp_gguf_read("pair-00001-of-00002.gguf", &spec, &error), &error);
    MP_CHECK_STR(mp_spec_file(spec, 1), "pair-00002-of-00002.gguf");
    mp_spec_unpin(spec);
}

MP_TEST(files_gguf_parse_refuses_split) {
    test_bytes b = {0};
    mp_error error;
    mp_spec *spec;
    put_header(&b, 0, 2);
    put_architecture(&b);
    put_key(&b, "split.count", G_U32);
    put_u32(&b, 2);
    MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "split.count");
    MP_CHECK_STR(error.file, "memory");
    free(b.data);
}

/* Each bound of printable ASCII. The error has the offset of the character in the file. */
MP_TEST(files_gguf_characters_of_keys) {
    static const struct { char byte; mp_status status; } cases[] = {
        {0x1f, MP_FORMAT}, {0x20, MP_OK}, {0x7e, MP_OK}, {0x7f, MP_FORMAT}, {(char)0x80, MP_FORMAT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_bytes b = {0};
        mp_error error;
        mp_spec *spec;
        char key[] = "a?b";
        key[1] = cases[i].byte;
        put_header(&b, 0, 2);
        put_architecture(&b);
        const size_t at = b.size + 8 + 1; /* behind the key's length and its first character */
        put_key(&b, key, G_U8);
        put_u8(&b, 1);
        MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), cases[i].status, &error);
        if (cases[i].status == MP_OK) {
            MP_CHECK(mp_spec_find(spec, key) != NULL);
            mp_spec_unpin(spec);
        } else {
            MP_CHECK_STR(error.field, "key");
            MP_CHECK_INT(error.offset, at);
            MP_CHECK(spec == NULL);
        }
        free(b.data);
    }
}

/* The file is long enough for the tensor's data, but not for the header before it. */
MP_TEST(files_gguf_tensor_without_its_last_byte) {
    static const uint64_t sizes[] = {8};
    for (size_t missing = 0; missing < 2; missing++) {
        test_bytes b = {0};
        mp_error error;
        mp_spec *spec;
        put_header(&b, 1, 1);
        put_architecture(&b);
        put_tensor(&b, "t", 1, sizes, 0, 0);
        put_padding(&b, 32);
        const size_t data = b.size;
        for (size_t i = missing; i < 32; i++)
            put_u8(&b, 1);
        MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), missing ? MP_FORMAT : MP_OK, &error);
        if (missing) {
            char got[96];
            snprintf(got, sizeof got, "32 bytes at offset %zu in a file of %zu", data, data + 31);
            MP_CHECK_STR(error.field, "t: size");
            MP_CHECK_STR(error.got, got);
            MP_CHECK(spec == NULL);
        } else {
            MP_CHECK_INT(mp_spec_find_tensor(spec, "t")->offset, data);
            mp_spec_unpin(spec);
        }
        free(b.data);
    }
}

/* --- large files: cases 8, 9, 10, 13, 14, 15 --- */

static mp_status read_bytes(const test_bytes *b, uint64_t size, mp_spec **spec, mp_error *error) {
    char path[400];
    mp_file_map_init();
    mp_test_write_file(test_path(path, sizeof path, "large.gguf"), b->data, b->size);
    if (size > b->size && truncate(path, (off_t)size) != 0) /* the file grows by a hole, which uses no disk space */
        MP_FAIL("cannot make a sparse file");
    mp_error_clear(error);
    mp_status status = mp_gguf_read(path, spec, error);
    if (status != MP_OK)
        check_error(error, path);
    return status;
}

static void put_keys(test_bytes *b, int count) {
    char key[32];
    for (int i = 0; i < count; i++) {
        snprintf(key, sizeof key, "key.number.%d", i);
        put_key(b, key, G_U8);
        put_u8(b, 1);
    }
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

MP_TEST(files_gguf_case10_keys) {
    mp_error error;
    mp_spec *spec;
    test_bytes b = {0};
    put_header(&b, 0, 65537);
    put_architecture(&b);
    put_keys(&b, 65536);
    MP_CHECK_STATUS(read_bytes(&b, 0, &spec, &error), MP_LIMIT, &error);
    MP_CHECK_STR(error.field, "kv_count");
    b.size = 0;
    put_header(&b, 0, 65536);
    put_architecture(&b);
    put_keys(&b, 65535);
    double begun = cpu_seconds();
    MP_CHECK_OK(read_bytes(&b, 0, &spec, &error), &error);
    /* comparing 65,536 keys in pairs would take 2 * 10^9 string compares */
    MP_CHECK(cpu_seconds() - begun < 2.0);
    MP_CHECK_INT(mp_spec_value_count(spec), 65536);
    MP_CHECK(mp_spec_find(spec, "key.number.65534") && !mp_spec_find(spec, "key.number.65535"));
    mp_spec_unpin(spec);
    /* case 9: the last key is a duplicate */
    b.size -= 1 + 4 + strlen("key.number.65534") + 8;
    put_key(&b, "key.number.0", G_U8);
    put_u8(&b, 1);
    MP_CHECK_STATUS(read_bytes(&b, 0, &spec, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "key");
    MP_CHECK_HAS(error.got, "key.number.0");
    free(b.data);
}

MP_TEST(files_gguf_case10_tensors) {
    mp_error error;
    mp_spec *spec;
    test_bytes b = {0};
    char name[32];
    static const uint64_t one[] = {8};
    for (int count = 65536; count <= 65537; count++) {
        b.size = 0;
        put_header(&b, (uint64_t)count, 1);
        put_architecture(&b);
        for (int i = 0; i < count; i++) {
            snprintf(name, sizeof name, "blk.%d.weight", i);
            put_tensor(&b, name, 1, one, 0, 32 * (uint64_t)i);
        }
        put_padding(&b, 32);
        uint64_t size = b.size + 32 * (uint64_t)count;
        mp_status expected = count == 65536 ? MP_OK : MP_LIMIT;
        MP_CHECK_STATUS(read_bytes(&b, size, &spec, &error), expected, &error);
        if (expected == MP_OK) {
            const mp_tensor_entry *last = mp_spec_find_tensor(spec, "blk.65535.weight");
            MP_CHECK(last && last->offset + 32 == size);
            mp_spec_unpin(spec);
        } else {
            MP_CHECK_STR(error.field, "tensor_count");
        }
    }
    free(b.data);
}

MP_TEST(files_gguf_case08_key_length) {
    static const struct { size_t length; mp_status status; } cases[] = {{65535, MP_OK}, {65536, MP_FORMAT}};
    for (int i = 0; i < 2; i++) {
        mp_error error;
        mp_spec *spec;
        test_bytes b = {0};
        put_header(&b, 0, 2);
        put_architecture(&b);
        put_u64(&b, cases[i].length);
        for (size_t j = 0; j < cases[i].length; j++)
            put_u8(&b, 'k');
        put_u32(&b, G_U8);
        put_u8(&b, 1);
        MP_CHECK_STATUS(read_bytes(&b, 0, &spec, &error), cases[i].status, &error);
        if (cases[i].status == MP_OK)
            mp_spec_unpin(spec);
        else
            MP_CHECK_STR(error.field, "key length");
        free(b.data);
    }
}

/* Check that the reader refuses the file and that its peak memory does not grow with a count in the file. */
static void check_capped(test_bytes *b, uint64_t size, const char *field, uint64_t most) {
    mp_error error;
    mp_spec *spec;
    const mp_status status_got = read_bytes(b, size, &spec, &error);
    if (status_got == MP_MEMORY_EXHAUSTED && strstr(error.message, "cannot be mapped"))
        MP_SKIP("needs address space to map 128 GiB, which an emulator lacks");
    MP_CHECK_STATUS(status_got, MP_LIMIT, &error);
    MP_CHECK_STR(error.field, field);
    MP_CHECK_HAS(error.allowed, "(a limit of mpool)");
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    unsigned long peak_kb = 0;
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "VmHWM: %lu", &peak_kb) == 1)
            break;
    if (status)
        fclose(status);
#ifndef __SANITIZE_ADDRESS__ /* the sanitizer's shadow memory counts too */
    if (peak_kb * 1024 > most)
        MP_FAIL("%lu MB of memory were used to refuse %s", peak_kb / 1024, field);
#else
    (void)most;
#endif
}

MP_TEST(files_gguf_case15_string_over_cap) {
    test_bytes b = {0};
    put_header(&b, 0, 1);
    put_key(&b, "x", G_STRING);
    put_u64(&b, (16 << 20) + 1);
    check_capped(&b, b.size + (16 << 20) + 1, "x", 16 << 20);
    free(b.data);
}

MP_TEST(files_gguf_case13_array_over_cap) {
    test_bytes b = {0};
    put_header(&b, 0, 1);
    put_key(&b, "x", G_ARRAY);
    put_u32(&b, G_U8);
    put_u64(&b, (1 << 24) + 1);
    check_capped(&b, b.size + (1 << 24) + 1, "x", 16 << 20);
    free(b.data);
}

MP_TEST(files_gguf_case14_strings_over_cap) {
    test_bytes b = {0};
    put_header(&b, 0, 1);
    put_key(&b, "x", G_ARRAY);
    put_u32(&b, G_STRING);
    put_u64(&b, (uint64_t)1 << 34);
    check_capped(&b, b.size + ((uint64_t)8 << 34), "x", 16 << 20);
    free(b.data);
}

/* The limit applies to the total size of all arrays. */
MP_TEST(files_gguf_case13_arrays_over_cap) {
    test_bytes b = {0};
    static uint8_t zeros[1 << 20];
    put_header(&b, 0, 2);
    put_key(&b, "x", G_ARRAY);
    put_u32(&b, G_U8);
    put_u64(&b, 1 << 20);
    put(&b, zeros, sizeof zeros);
    put_key(&b, "y", G_ARRAY);
    put_u32(&b, G_U8);
    put_u64(&b, (1 << 24) - (1 << 20) + 1);
    check_capped(&b, b.size + (1 << 24), "y", 32 << 20);
    free(b.data);
}

MP_TEST(files_gguf_case15_header_over_cap) {
    char path[400], key[16];
    mp_error error;
    mp_spec *spec;
    mp_file_map_init();
    FILE *file = fopen(test_path(path, sizeof path, "large.gguf"), "wb");
    MP_CHECK(file != NULL);
    test_bytes b = {0};
    put_header(&b, 0, 5);
    for (int i = 0; i < 5; i++) {
        snprintf(key, sizeof key, "x%d", i);
        put_key(&b, key, G_STRING);
        put_u64(&b, 1 << 24);
        MP_CHECK_INT(fwrite(b.data, 1, b.size, file), b.size);
        MP_CHECK_INT(fseek(file, 1 << 24, SEEK_CUR), 0);
        b.size = 0;
    }
    put_u8(&b, 0);
    MP_CHECK_INT(fwrite(b.data, 1, 1, file), 1);
    fclose(file);
    MP_CHECK_STATUS(mp_gguf_read(path, &spec, &error), MP_LIMIT, &error);
    MP_CHECK_STR(error.field, "x3");
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
    free(b.data);
}

/* Writes and clears `b`, and appends a string of `bytes` zeros that takes no space on the disk. */
static void write_sparse_string(FILE *file, test_bytes *b, long bytes) {
    put_u64(b, (uint64_t)bytes);
    MP_CHECK_INT(fwrite(b->data, 1, b->size, file), b->size);
    MP_CHECK_INT(fseek(file, bytes - 1, SEEK_CUR), 0);
    MP_CHECK_INT(fputc(0, file), 0);
    b->size = 0;
}

/* A header of exactly MP_GGUF_MAX_HEADER bytes is accepted, one byte more is refused. */
MP_TEST(files_gguf_case15_header_at_cap) {
    for (int more = 0; more <= 1; more++) {
        char path[400], key[16];
        mp_error error;
        mp_spec *spec;
        mp_file_map_init();
        FILE *file = fopen(test_path(path, sizeof path, "large.gguf"), "wb");
        MP_CHECK(file != NULL);
        test_bytes b = {0};
        put_header(&b, 0, 5);
        for (int i = 0; i < 5; i++) { /* the last string takes the header to its end */
            snprintf(key, sizeof key, "x%d", i);
            put_key(&b, key, G_STRING);
            const long at = ftell(file) + (long)b.size + 8;
            write_sparse_string(file, &b, i < 4 ? (16 << 20) - 64 : MP_GGUF_MAX_HEADER + more - at);
        }
        MP_CHECK_INT(ftell(file), MP_GGUF_MAX_HEADER + more);
        fclose(file);
        MP_CHECK_STATUS(mp_gguf_read(path, &spec, &error), more ? MP_LIMIT : MP_OK, &error);
        if (more)
            MP_CHECK_STR(error.field, "x4");
        else
            mp_spec_unpin(spec);
        free(b.data);
    }
}

/* The strings of an array are copied only if they fit into the header: of six of 16 MiB, the fourth is refused. */
MP_TEST(files_gguf_strings_beyond_the_cap_are_not_copied) {
    enum { EACH = 16 << 20, COUNT = 6, BEFORE = 24 + 8 + 1 + 4 + 4 + 8 };
    char path[400];
    mp_error error;
    mp_spec *spec;
    mp_file_map_init();
    FILE *file = fopen(test_path(path, sizeof path, "strings.gguf"), "wb");
    MP_CHECK(file != NULL);
    test_bytes b = {0};
    put_header(&b, 0, 1);
    put_key(&b, "k", G_ARRAY);
    put_u32(&b, G_STRING);
    put_u64(&b, COUNT);
    MP_CHECK_INT(b.size, BEFORE);
    for (int i = 0; i < COUNT; i++)
        write_sparse_string(file, &b, EACH);
    fclose(file);
    MP_CHECK_STATUS(mp_gguf_read(path, &spec, &error), MP_LIMIT, &error);
    MP_CHECK_STR(error.field, "k");
    char got[64];
    snprintf(got, sizeof got, "%d bytes long so far", BEFORE + 4 * (8 + EACH));
    MP_CHECK_STR(error.got, got);
    MP_CHECK_INT(error.offset, BEFORE + 3 * (8 + EACH));
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
    free(b.data);
}

MP_TEST(files_gguf_alignment_at_its_cap) {
    static const struct { uint32_t alignment; mp_status status; } cases[] = {
        {1, MP_OK}, {65536, MP_OK}, {131072, MP_LIMIT}, {0, MP_FORMAT}, {48, MP_FORMAT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_error error;
        mp_spec *spec;
        test_bytes b = {0};
        static const uint64_t one[] = {8};
        put_header(&b, 1, 2);
        put_architecture(&b);
        put_key(&b, "general.alignment", G_U32);
        put_u32(&b, cases[i].alignment);
        put_tensor(&b, "t", 1, one, 0, 0);
        const size_t unit = cases[i].alignment ? cases[i].alignment : 1, data = (b.size + unit - 1) / unit * unit;
        MP_CHECK_STATUS(read_bytes(&b, data + 32, &spec, &error), cases[i].status, &error);
        if (cases[i].status == MP_OK) {
            MP_CHECK_INT(mp_spec_find_tensor(spec, "t")->offset, data);
            mp_spec_unpin(spec);
        } else {
            MP_CHECK_STR(error.field, "general.alignment");
        }
        free(b.data);
    }
}

/* --- case 32 and faults --- */

MP_TEST(files_gguf_case32_not_a_file) {
    char path[400], link_path[400];
    mp_error error;
    mp_spec *spec;
    test_path(path, sizeof path, "fifo.gguf");
    MP_CHECK_INT(mkfifo(path, 0600), 0);
    MP_CHECK_INT(symlink(path, test_path(link_path, sizeof link_path, "link.gguf")), 0);
    const char *paths[] = {path, link_path, mp_test_directory(), "/dev/null", "/dev/zero"};
    for (int i = 0; i < 5; i++) {
        MP_CHECK_STATUS(mp_gguf_read(paths[i], &spec, &error), MP_FORMAT, &error);
        check_error(&error, paths[i]);
        MP_CHECK_HAS(error.allowed, "regular file");
    }
    MP_CHECK_STATUS(mp_gguf_read("/nowhere/model.gguf", &spec, &error), MP_IO, &error);
}

/* A FIFO in place of a further file of a split model must not block the reader. */
MP_TEST(files_gguf_case32_sibling_is_a_fifo) {
    char path[400];
    mp_error error;
    mp_spec *spec;
    test_bytes b = {0};
    put_header(&b, 0, 4);
    put_architecture(&b);
    static const char *const keys[] = {"split.no", "split.count", "split.tensors.count"};
    static const uint32_t values[] = {0, 2, 0};
    for (int i = 0; i < 3; i++) {
        put_key(&b, keys[i], G_U32);
        put_u32(&b, values[i]);
    }
    mp_test_write_file(test_path(path, sizeof path, "m-00001-of-00002.gguf"), b.data, b.size);
    char fifo[400];
    MP_CHECK_INT(mkfifo(test_path(fifo, sizeof fifo, "m-00002-of-00002.gguf"), 0600), 0);
    MP_CHECK_STATUS(mp_gguf_read(path, &spec, &error), MP_FORMAT, &error);
    MP_CHECK_HAS(error.got, "FIFO");
    free(b.data);
}

static mp_status read_and_drop(void *arg, mp_error *error) {
    mp_spec *spec = NULL;
    mp_status status = mp_gguf_read(arg, &spec, error);
    if (status == MP_OK)
        read_all(spec);
    else if (spec)
        MP_FAIL("a spec was returned together with an error");
    mp_spec_unpin(spec);
    return status;
}

static mp_status copy_and_drop(void *arg, mp_error *error) {
    mp_spec *spec = NULL, *copy = NULL;
    mp_status status = mp_gguf_read(arg, &spec, error);
    if (status == MP_OK)
        status = copy_spec(spec, &copy, error);
    if (status == MP_OK && read_all(copy) != read_all(spec))
        MP_FAIL("a copy differs");
    mp_spec_unpin(copy);
    mp_spec_unpin(spec);
    return status;
}

static char *corpus(const char *name) {
    static char path[1600];
    snprintf(path, sizeof path, "%s/corpus/gguf/valid/%s", mp_test_root(), name);
    mp_file_map_init();
    return path;
}

MP_TEST_SECONDS(files_gguf_allocation_failures, 60) {
    mp_test_alloc_sweep(read_and_drop, corpus("every_value_type.gguf"));
    mp_test_alloc_sweep(read_and_drop, corpus("every_dtype.gguf"));
    mp_test_alloc_sweep(read_and_drop, corpus("split/pair-00001-of-00002.gguf"));
    mp_test_alloc_sweep(copy_and_drop, corpus("every_value_type.gguf"));
    mp_test_alloc_sweep(copy_and_drop, corpus("every_dtype.gguf"));
}

/* Values too large to share a block of memory with others: each allocates its own. */
MP_TEST(files_gguf_allocation_failures_of_large_values) {
    enum { STRINGS = 20000, BYTES = 200000, KEY = 60000 };
    static char key[KEY + 1];
    char path[512];
    test_bytes b = {0};
    uint8_t *zeros = calloc(1, BYTES);
    MP_CHECK(zeros);
    mp_file_map_init();
    snprintf(path, sizeof path, "%s/large.gguf", mp_test_directory());
    put_header(&b, 0, 6);
    put_architecture(&b);
    memset(key, 'k', KEY);
    put_key(&b, key, G_U8);
    put_u8(&b, 7);
    put_key(&b, "string", G_STRING);
    put_u64(&b, BYTES);
    put(&b, zeros, BYTES);
    const uint32_t types[] = {G_BOOL, G_F32};
    for (int i = 0; i < 2; i++) {
        put_key(&b, i ? "floats" : "bools", G_ARRAY);
        put_u32(&b, types[i]);
        put_u64(&b, i ? BYTES / 4 : BYTES);
        put(&b, zeros, BYTES);
    }
    put_key(&b, "strings", G_ARRAY);
    put_u32(&b, G_STRING);
    put_u64(&b, STRINGS);
    for (int i = 0; i < STRINGS; i++)
        put_string(&b, "string");
    put_padding(&b, 32);
    mp_test_write_file(path, b.data, b.size);
    mp_test_alloc_sweep(read_and_drop, path);
    mp_test_alloc_sweep(copy_and_drop, path);
    free(zeros);
    free(b.data);
}

MP_TEST(files_gguf_open_and_map_failures) {
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_OPEN, read_and_drop, corpus("split/pair-00001-of-00002.gguf")), 2);
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_MAP, read_and_drop, corpus("split/pair-00001-of-00002.gguf")), 2);
}

/* Another thread writes to the file during reading, so a length that is read twice may differ. Any status is allowed,
 * but no memory error. */
enum { FIRST_STRING = 60000, EMPTY_STRINGS = 100000 };
static _Atomic bool stop_writing;

static void rewrite(void *arg) {
    int fd = open(arg, O_WRONLY);
    static const uint64_t lengths[] = {9, 50000};
    /* the last string follows the header, the architecture, the key "x", its type, element type, count and the other
     * strings */
    const off_t at = 24 + 44 + 9 + 4 + 4 + 8 + 8 + FIRST_STRING + 8 * (off_t)EMPTY_STRINGS;
    for (uint64_t i = 0; fd >= 0 && !atomic_load(&stop_writing); i++)
        if (pwrite(fd, &lengths[i % 2], 8, at) != 8)
            MP_FAIL("cannot write");
    close(fd);
}

MP_TEST_SECONDS(files_gguf_modified_while_read, 60) {
    char path[400];
    mp_error error;
    mp_thread thread;
    test_bytes b = {0};
    mp_file_map_init();
    put_header(&b, 0, 2);
    put_architecture(&b);
    put_key(&b, "x", G_ARRAY);
    put_u32(&b, G_STRING);
    put_u64(&b, EMPTY_STRINGS + 2);
    put_u64(&b, FIRST_STRING); /* longer than the last string becomes: what is left counts, not the total */
    for (int i = 0; i < FIRST_STRING; i++)
        put_u8(&b, 7);
    for (int i = 0; i < EMPTY_STRINGS; i++)
        put_u64(&b, 0);
    put_u64(&b, 9);
    for (int i = 0; i < 50000; i++)
        put_u8(&b, 7);
    mp_test_write_file(test_path(path, sizeof path, "shared.gguf"), b.data, b.size);
    MP_CHECK_OK(mp_thread_start(&thread, "writer", rewrite, path, &error), &error);
    int changed = 0, read = 0;
    uint64_t begun = mp_sys_now_ns();
    while (mp_sys_now_ns() - begun < 10000000000 && changed < 3) {
        mp_spec *spec;
        mp_status status = mp_gguf_read(path, &spec, &error);
        if (status == MP_OK) {
            read_all(spec);
            mp_spec_unpin(spec);
        } else if (status != MP_FORMAT) {
            MP_FAIL("%s", error.message);
        } else if (strstr(error.got, "changed while it was read")) {
            changed++;
        }
        read++;
    }
    atomic_store(&stop_writing, true);
    mp_thread_join(&thread);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
    if (!changed)
        MP_FAIL("in %d reads no length changed between its two uses: the test did not reach the fault", read);
    free(b.data);
}

#ifdef MP_SEAM
static char cut_path[400];

static void *map_and_cut(size_t bytes, int fd) {
    void *data = mp_sys_real.mmap(bytes, fd);
    MP_CHECK_INT(truncate(cut_path, 5000), 0);
    return data;
}
#endif

/* A file truncated during reading must yield MP_IO: neither a spec nor an error about its content. */
MP_TEST(files_gguf_truncated_while_read) {
#ifdef MP_SEAM
    mp_error error;
    mp_spec *spec;
    test_bytes b = {0};
    mp_file_map_init();
    for (int zeros_parse = 0; zeros_parse < 2; zeros_parse++) {
        b.size = 0;
        put_header(&b, 0, 2);
        put_architecture(&b);
        if (zeros_parse) {
            put_key(&b, "x", G_ARRAY);
            put_u32(&b, G_U8);
            put_u64(&b, 20000);
            for (int i = 0; i < 20000; i++)
                put_u8(&b, 1);
        } else {
            put_key(&b, "x", G_ARRAY);
            put_u32(&b, G_STRING);
            put_u64(&b, 1000);
            for (int i = 0; i < 1000; i++)
                put_string(&b, "a string");
        }
        if (!zeros_parse) /* add a second key: zero bytes do not form a valid key */
            b.data[16] = 3, put_key(&b, "y", G_U8), put_u8(&b, 1);
        mp_test_write_file(test_path(cut_path, sizeof cut_path, "cut.gguf"), b.data, b.size);
        mp_sys_table.mmap = map_and_cut;
        MP_CHECK_STATUS(mp_gguf_read(cut_path, &spec, &error), MP_IO, &error);
        MP_CHECK_HAS(error.message, "was truncated while it was read");
        MP_CHECK(spec == NULL);
        mp_sys_table = mp_sys_real;
        MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
    }
    free(b.data);
#else
    MP_SKIP("needs the seam build");
#endif
}

/* Types of tensors that other programs write and mpool does not read are named. */
MP_TEST(files_gguf_unsupported_types_are_named) {
    static const struct { uint32_t type; const char *name; } cases[] = {{9, "Q8_1"}, {15, "Q8_K"}, {41, "Q1_0"}};
    static const uint64_t sizes[] = {256};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_bytes b = {0};
        mp_error error;
        mp_spec *spec;
        put_header(&b, 1, 1);
        put_architecture(&b);
        put_tensor(&b, "a.weight", 1, sizes, cases[i].type, 0);
        put_padding(&b, 32);
        for (int j = 0; j < 2048; j++)
            put_u8(&b, 0);
        char wanted[64];
        snprintf(wanted, sizeof wanted, "the tensor a.weight is stored as %s,", cases[i].name);
        MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), MP_UNSUPPORTED, &error);
        MP_CHECK_HAS(error.message, wanted);
        free(b.data);
    }
}
