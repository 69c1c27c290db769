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

/* --- case 32 and faults --- */

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
