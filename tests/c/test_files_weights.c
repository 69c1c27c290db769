/* test_files_weights.c: tensors of mapped files: bounds, views, conversions, files that change. */
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "files/spec_build.h"
#include "files/weights.h"
#include "released_fixture.h"
#include "test_files.h"

static void write_pattern(const char *path, size_t bytes) {
    uint8_t *data = malloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(i * 7 + (i >> 8) + 1);
    mp_test_write_file(path, data, bytes);
    free(data);
}

static uint8_t pattern(uint64_t at) { return (uint8_t)(at * 7 + (at >> 8) + 1); }

typedef struct fixture {
    char a[400], b[400];
    mp_spec *spec;
    mp_error error;
} fixture;

static void add(fixture *f, const char *name, mp_dtype dtype, int64_t rows, int64_t columns, int file,
                uint64_t offset) {
    mp_tensor_entry entry = {.name = name, .dtype = dtype, .ndim = rows ? 2 : 1, .file = file, .offset = offset};
    entry.shape[0] = rows ? rows : columns;
    entry.shape[1] = rows ? columns : 0;
    MP_CHECK(mp_dtype_row_bytes(dtype, columns, &entry.nbytes));
    entry.nbytes *= (uint64_t)(rows ? rows : 1);
    MP_CHECK_OK(mp_spec_add_tensor(f->spec, &entry, &f->error), &f->error);
}

/* Begin a spec over two files of 20,000 and 1,000 bytes. */
static void begin(fixture *f) {
    mp_file_map_init();
    write_pattern(test_path(f->a, sizeof f->a, "a.bin"), 20000);
    write_pattern(test_path(f->b, sizeof f->b, "b.bin"), 1000);
    f->spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(f->spec, "test", &f->error), &f->error);
    MP_CHECK_OK(mp_spec_add_file(f->spec, f->a, &f->error), &f->error);
    MP_CHECK_OK(mp_spec_add_file(f->spec, f->b, &f->error), &f->error);
}

static mp_weights *open_weights(fixture *f) {
    mp_weights *weights;
    MP_CHECK_OK(mp_weights_open(f->spec, &weights, &f->error), &f->error);
    mp_spec_unpin(f->spec); /* the weights hold their own reference */
    return weights;
}

MP_TEST(files_weights_views) {
    fixture f;
    begin(&f);
    add(&f, "matrix", MP_F32, 3, 5, 0, 400);
    add(&f, "vector", MP_F16, 0, 7, 1, 1000 - 14); /* up to the last byte */
    add(&f, "blocks", MP_Q4_0, 2, 64, 0, 6);
    mp_weights *weights = open_weights(&f);
    mp_tensor t;
    MP_CHECK_OK(mp_weights_get(weights, "matrix", 2, (int64_t[]){3, 5}, &t, &f.error), &f.error);
    MP_CHECK(t.dtype == MP_F32 && t.ndim == 2 && t.shape[0] == 3 && t.shape[1] == 5 && t.nbytes == 60);
    MP_CHECK_INT(mp_tensor_items(&t), 15);
    for (int i = 0; i < 60; i++)
        MP_CHECK_INT(t.data[i], pattern(400 + (uint64_t)i));
    MP_CHECK_OK(mp_weights_get(weights, "matrix", 2, (int64_t[]){-1, 5}, &t, &f.error), &f.error);
    MP_CHECK_OK(mp_weights_get(weights, "vector", 1, (int64_t[]){-1}, &t, &f.error), &f.error);
    MP_CHECK(t.shape[0] == 7 && t.data[13] == pattern(999));
    MP_CHECK_OK(mp_weights_get(weights, "blocks", 2, (int64_t[]){2, 64}, &t, &f.error), &f.error);
    MP_CHECK_INT(t.nbytes, 2 * 2 * 18);
    MP_CHECK(mp_weights_has(weights, "vector") && !mp_weights_has(weights, "vecto"));
    MP_CHECK_STR(mp_spec_architecture(mp_weights_spec(weights)), "test");
    mp_weights_close(weights);
    mp_weights_close(NULL);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
}

/* The error names the tensor, its shape and the required shape. */
MP_TEST(files_weights_refuses_shapes) {
    fixture f;
    begin(&f);
    add(&f, "blk.0.attn_q.weight", MP_F32, 3, 5, 1, 400);
    mp_weights *weights = open_weights(&f);
    mp_tensor t;
    static const struct { int ndim; int64_t shape[3]; const char *allowed; } cases[] = {
        {2, {5, 3}, "[5, 3]"}, {2, {3, 4}, "[3, 4]"},    {1, {15}, "[15]"},
        {3, {1, 3, 5}, "[1, 3, 5]"}, {2, {-1, 4}, "[*, 4]"}, {2, {0, 5}, "[0, 5]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        MP_CHECK_STATUS(mp_weights_get(weights, "blk.0.attn_q.weight", cases[i].ndim, cases[i].shape, &t, &f.error),
                        MP_FORMAT, &f.error);
        MP_CHECK_STR(f.error.field, "blk.0.attn_q.weight");
        MP_CHECK_STR(f.error.file, f.b);
        MP_CHECK_INT(f.error.offset, 400);
        MP_CHECK_STR(f.error.got, "of shape [3, 5]");
        MP_CHECK_HAS(f.error.allowed, cases[i].allowed);
    }
    /* a text that just fits, and longer ones; a sanitizer sees a byte written past the text's buffer */
    static const struct { int64_t last; const char *end; } large[] = {
        {123456789012, ", 123456789012]"}, {1234567890123, ", 1234567890123"}, {12345678901234, ", 1234567890123"}};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        const int64_t shape[] = {INT64_MAX, INT64_MAX, INT64_MAX, large[i].last};
        MP_CHECK_STATUS(mp_weights_get(weights, "blk.0.attn_q.weight", 4, shape, &t, &f.error), MP_FORMAT, &f.error);
        MP_CHECK_STR(f.error.allowed + strlen(f.error.allowed) - strlen(large[i].end), large[i].end);
    }
    MP_CHECK_STATUS(mp_weights_get(weights, "blk.1.attn_q.weight", 2, cases[0].shape, &t, &f.error), MP_FORMAT,
                    &f.error);
    MP_CHECK_STR(f.error.got, "missing");
    MP_CHECK_STR(f.error.field, "blk.1.attn_q.weight");
    mp_weights_close(weights);
}

static void expect_refused(fixture *f, const char *part) {
    mp_weights *weights;
    MP_CHECK_STATUS(mp_weights_open(f->spec, &weights, &f->error), MP_FORMAT, &f->error);
    MP_CHECK(weights == NULL);
    MP_CHECK_STR(f->error.field, "t: offset");
    MP_CHECK_HAS(f->error.allowed, part);
    mp_spec_unpin(f->spec);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
}

/* --- biases of layers --- */

/* Open a file with these tensors, separated by spaces, and check the biases of `layers` layers. Returns the name of the
 * missing bias, or "". */
static const char *missing_bias(fixture *f, const char *names, int layers) {
    char copy[500], *rest = copy;
    begin(f);
    snprintf(copy, sizeof copy, "%s", names);
    for (char *name; (name = strtok_r(rest, " ", &rest));)
        add(f, name, MP_F32, 0, 4, 0, 0);
    mp_weights *weights = open_weights(f);
    mp_status status = mp_weights_check_biases(weights, "blk.", layers, &f->error);
    mp_weights_close(weights);
    if (status == MP_OK)
        return "";
    MP_CHECK_STATUS(status, MP_FORMAT, &f->error);
    MP_CHECK_HAS(f->error.message, f->error.field);
    return f->error.field;
}

MP_TEST(files_weights_layers_have_the_same_biases) {
    static const struct {
        const char *names;
        int layers;
        const char *missing;
    } rows[] = {
        {"blk.0.q.weight blk.1.q.weight", 2, ""},
        {"blk.0.q.weight blk.0.q.bias blk.1.q.weight blk.1.q.bias", 2, ""},
        {"blk.0.q.weight blk.0.q.bias blk.1.q.weight", 2, "blk.1.q.bias"},
        {"blk.0.q.weight blk.1.q.weight blk.1.q.bias", 2, "blk.0.q.bias"},
        {"blk.0.q.weight blk.0.q.bias blk.1.q.weight blk.1.q.bias blk.2.q.weight", 3, "blk.2.q.bias"},
        {"blk.9.q.weight blk.9.q.bias blk.10.q.weight", 11, "blk.10.q.bias"},
        {"blk.0.q.weight blk.1.q.weight blk.1.q.bias blk.2.q.weight", 3, "blk.0.q.bias"}, /* the first is named */
        /* a layer that is not read, or lacks the weight, needs no bias */
        {"blk.0.q.weight blk.0.q.bias blk.1.q.weight", 1, ""},
        {"blk.0.q.weight blk.1.q.weight blk.1.q.bias", 1, ""},
        {"blk.0.q.weight blk.0.q.bias blk.1.experts.weight", 2, ""},
        {"blk.0.q.weight blk.0.q.bias blk.1.q.weight blk.1.q.bias blk.1.k.weight", 2, ""},
        /* a bias without a weight belongs to the router */
        {"blk.0.up.weight blk.1.ffn_gate_inp.weight blk.1.exp_probs_b.bias", 2, ""},
        {"blk.0.ffn_gate_inp.weight blk.1.ffn_gate_inp.weight blk.1.exp_probs_b.bias", 2, "blk.0.exp_probs_b.bias"},
        {"blk.0.up.bias blk.1.up.weight blk.1.up.bias blk.1.ffn_gate_inp.weight", 2, ""},
        /* names of other tensors */
        {"v.blk.0.q.weight v.blk.0.q.bias v.blk.1.q.weight blk.x.q.bias blk.1q.bias blk..bias blk.bias", 2, ""},
        {"blk.0.q.weight blk.0.q.bias blk.1.q.weights blk.1.q blk.1. blk.1 blk.1.weight blk.1..weight", 2, ""},
        {"blk.0.q.weight blk.0.q.bias blk.01.q.weight blk.00.q.weight blk.-1.q.weight blk.+1.q.weight", 2, ""},
        {"blk.0.q.weight blk.0.q.bias blk.0.qq.weight blk.1.qq.weight blk.1.kq.weight blk.1.r.weight", 2, ""},
        /* the layers that have a part need not follow each other, and the file lists them in any order */
        {"blk.7.q.weight blk.2.q.weight blk.2.q.bias blk.5.k.weight blk.4.q.weight blk.4.q.bias", 8, "blk.7.q.bias"},
        {"blk.4.q.weight blk.4.q.bias blk.7.q.weight blk.7.q.bias blk.2.q.weight blk.3.k.weight", 8, "blk.2.q.bias"},
        {"blk.7.q.weight blk.7.q.bias blk.2.q.weight blk.2.q.bias blk.3.k.weight blk.5.k.weight", 8, ""},
        /* a model may declare any number of layers */
        {"blk.0.q.weight blk.0.q.bias blk.0.k.weight blk.0.k.bias", INT32_MAX, ""},
        {"blk.0.q.weight blk.2147483646.q.weight blk.2147483646.q.bias", INT32_MAX, "blk.0.q.bias"},
        {"blk.0.q.weight blk.0.q.bias blk.2147483646.q.weight", INT32_MAX, "blk.2147483646.q.bias"},
        {"blk.0.q.weight blk.0.q.bias blk.2147483647.q.weight blk.4294967297.q.weight", INT32_MAX, ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fixture f;
        MP_CHECK_STR(missing_bias(&f, rows[i].names, rows[i].layers), rows[i].missing);
    }
}

/* Names of up to 147 bytes are checked. No network that mpool reads has longer ones. */
MP_TEST(files_weights_biases_of_long_names) {
    for (int length = 147; length <= 148; length++) {
        fixture f;
        char part[136] = "", names[500];
        memset(part, 'x', (size_t)length - strlen("blk.0.") - strlen(".weight"));
        snprintf(names, sizeof names, "blk.0.%s.weight blk.0.%s.bias blk.1.%s.weight", part, part, part);
        MP_CHECK_INT(missing_bias(&f, names, 2)[0] != 0, length == 147);
    }
}

/* Biases of many parts and many layers, between which the file has no layer: a check that visits every declared layer
 * for every bias would exceed the test's timeout. */
MP_TEST(files_weights_biases_of_many_declared_layers) {
    enum { PARTS = 2000, APART = 1000000 };
    fixture f;
    char name[64];
    begin(&f);
    for (int i = 0; i < PARTS; i++)
        for (int layer = 0; layer < 2; layer++)
            for (int bias = 0; bias < 2; bias++) {
                snprintf(name, sizeof name, "blk.%d.part%d.%s", layer * APART, i, bias ? "bias" : "weight");
                if (!bias || i < PARTS - 1 || layer)
                    add(&f, name, MP_F32, 0, 4, 0, 0);
            }
    mp_weights *weights = open_weights(&f);
    MP_CHECK_OK(mp_weights_check_biases(weights, "blk.", APART, &f.error), &f.error);
    MP_CHECK_STATUS(mp_weights_check_biases(weights, "blk.", INT32_MAX, &f.error), MP_FORMAT, &f.error);
    MP_CHECK_STR(f.error.field, "blk.0.part1999.bias");
    MP_CHECK_HAS(f.error.message, "layer 1000000 has it");
    mp_weights_close(weights);
}

static mp_status check_biases(void *weights, mp_error *error) {
    return mp_weights_check_biases(weights, "blk.", 2, error);
}

MP_TEST(files_weights_biases_without_memory) {
    fixture f;
    begin(&f);
    add(&f, "blk.0.q.weight", MP_F32, 0, 4, 0, 0);
    add(&f, "blk.0.q.bias", MP_F32, 0, 4, 0, 0);
    mp_weights *weights = open_weights(&f);
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_ALLOC, check_biases, weights), 1);
    mp_weights_close(weights);
}

MP_TEST(files_weights_checks_bounds_again) {
    static const struct { mp_dtype dtype; int64_t columns; int file; uint64_t offset; const char *part; } cases[] = {
        {MP_F32, 5, 1, 984, "1000 bytes"},                  /* 4 bytes too far */
        {MP_I8, 1, 1, 1000, "1000 bytes"},                  /* just past the end */
        {MP_I8, 1001, 1, 0, "1000 bytes"},
        {MP_F32, (int64_t)1 << 60, 0, 0, "20000 bytes"},
        {MP_I8, 1, 0, (uint64_t)INT64_MAX - 1, "20000 bytes"},
        {MP_F32, 1, 0, 2, "multiples of 4 for F32"},
        {MP_F16, 1, 0, 3, "multiples of 2 for F16"},
        {MP_BF16, 1, 0, 1, "multiples of 2 for BF16"},
        {MP_F64, 1, 0, 4, "multiples of 8 for F64"},
        {MP_Q8_0, 32, 0, 1, "multiples of 2 for Q8_0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f;
        begin(&f);
        add(&f, "t", cases[i].dtype, 0, cases[i].columns, cases[i].file, cases[i].offset);
        expect_refused(&f, cases[i].part);
    }
    fixture f;
    begin(&f);
    add(&f, "t", MP_MXFP4, 0, 32, 0, 3); /* blocks of bytes need no alignment */
    mp_weights_close(open_weights(&f));
}

/* Entries that were changed after mp_spec_add_tensor are checked in full. */
MP_TEST(files_weights_checks_entries_again) {
    static const struct { int file; mp_dtype dtype; int ndim; int64_t columns; uint64_t nbytes; const char *field; }
    cases[] = {
        {2, MP_F32, 1, 4, 16, "t: file"},     {-1, MP_F32, 1, 4, 16, "t: file"},
        {0, MP_DTYPE_COUNT, 1, 4, 16, "t: type"}, {0, MP_F32, 0, 4, 16, "t: dimensions"},
        {0, MP_F32, 1, -4, 16, "t: shape"},   {0, MP_Q8_0, 1, 33, 34, "t: row"},
        {0, MP_F32, 1, 4, 15, "t: size"},     {0, MP_F32, 1, 4, 17, "t: size"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f;
        mp_weights *weights;
        begin(&f);
        add(&f, "t", MP_F32, 0, 4, 0, 0);
        mp_tensor_entry *entry = mp_spec_tensor_edit(f.spec, 0);
        entry->file = cases[i].file;
        entry->dtype = cases[i].dtype;
        entry->ndim = cases[i].ndim;
        entry->shape[0] = cases[i].columns;
        entry->nbytes = cases[i].nbytes;
        MP_CHECK_STATUS(mp_weights_open(f.spec, &weights, &f.error), MP_FORMAT, &f.error);
        MP_CHECK_STR(f.error.field, cases[i].field);
        mp_spec_unpin(f.spec);
    }
}

MP_TEST(files_weights_refuses_types_without_a_reader) {
    static const mp_dtype types[] = {MP_I8, MP_I16, MP_I32, MP_I64, MP_F64, MP_AWQ4, MP_GPTQ4, MP_GPTQ4_ORDERED,
                                     MP_F8_E4M3};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        fixture f;
        begin(&f);
        add(&f, "t", types[i], 0, 64, 0, 0);
        mp_weights *weights = open_weights(&f);
        mp_tensor t;
        MP_CHECK_STATUS(mp_weights_get(weights, "t", 1, (int64_t[]){64}, &t, &f.error), MP_UNSUPPORTED, &f.error);
        MP_CHECK_HAS(f.error.message, mp_dtype_get(types[i])->name);
        MP_CHECK_OK(mp_weights_get_any(weights, "t", 1, (int64_t[]){64}, &t, &f.error), &f.error);
        mp_weights_close(weights);
    }
}

MP_TEST(files_weights_freezes) {
    fixture f;
    begin(&f);
    mp_weights *weights;
    mp_tensor_entry late = {.name = "late", .dtype = MP_F32, .ndim = 1, .shape = {1000000}, .nbytes = 4000000};
    MP_CHECK_OK(mp_weights_open(f.spec, &weights, &f.error), &f.error);
    MP_CHECK_STATUS(mp_spec_add_tensor(f.spec, &late, &f.error), MP_INVALID_ARGUMENT, &f.error);
    MP_CHECK(!mp_weights_has(weights, "late"));
    mp_weights_close(weights);
    mp_spec_unpin(f.spec);
}

MP_TEST(files_weights_release_keeps_the_data) {
    fixture f;
    begin(&f);
    add(&f, "t", MP_I8, 0, 12000, 0, 100);
    add(&f, "u", MP_I8, 0, 1000, 1, 0);
    mp_weights *weights = open_weights(&f);
    mp_tensor t, elsewhere = {.data = (const uint8_t *)&f, .nbytes = 10};
    MP_CHECK_OK(mp_weights_get_any(weights, "t", 1, (int64_t[]){12000}, &t, &f.error), &f.error);
    for (int round = 0; round < 2; round++) {
        for (uint64_t i = 0; i < t.nbytes; i++)
            MP_CHECK_INT(t.data[i], pattern(100 + i));
        mp_weights_release(weights, &t);
    }
    mp_weights_release(weights, &elsewhere); /* outside every mapping: no effect */
    MP_CHECK(!mp_weights_poisoned(weights) && mp_weights_unchanged(weights));
    mp_weights_close(weights);
}

/* Release gives back the whole pages of the tensor's range, and no others. */
MP_TEST(files_weights_release_gives_pages_back) {
#ifdef MP_SEAM
    fixture f;
    begin(&f);
    add(&f, "t", MP_I8, 0, 18000, 0, 1000);
    add(&f, "u", MP_I8, 0, 1000, 1, 0);
    mp_weights *weights = open_weights(&f);
    mp_tensor t, u, elsewhere = {.data = (const uint8_t *)&f, .nbytes = sizeof f};
    MP_CHECK_OK(mp_weights_get_any(weights, "t", 1, (int64_t[]){18000}, &t, &f.error), &f.error);
    MP_CHECK_OK(mp_weights_get_any(weights, "u", 1, (int64_t[]){1000}, &u, &f.error), &f.error);
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begins = (uintptr_t)t.data, ends = begins + 18000;
    const uintptr_t from = (begins + page - 1) / page * page, to = ends / page * page;
    mp_sys_table.madvise = record_advice;
    mp_weights_release(weights, &u); /* less than a page */
    mp_weights_release(weights, &elsewhere);
    MP_CHECK_INT(released_ranges, 0);
    mp_weights_release(weights, &t);
    mp_sys_table = mp_sys_real;
    MP_CHECK_INT(released_ranges, from < to);
    MP_CHECK(from >= to || (released_from == from && released_to == to));
    mp_weights_close(weights);
#else
    MP_SKIP("needs the seam build");
#endif
}

MP_TEST(files_weights_file_gone_or_changed) {
    fixture f;
    begin(&f);
    add(&f, "t", MP_I8, 0, 1000, 1, 0);
    mp_weights *weights, *again;
    MP_CHECK_OK(mp_weights_open(f.spec, &weights, &f.error), &f.error);
    MP_CHECK(mp_weights_unchanged(weights) && mp_weights_sound(weights));
    MP_CHECK_INT(unlink(f.b), 0);
    MP_CHECK(mp_weights_unchanged(weights) && mp_weights_sound(weights)); /* the mapping keeps the removed file */
    MP_CHECK_STATUS(mp_weights_open(f.spec, &again, &f.error), MP_IO, &f.error);
    MP_CHECK_HAS(f.error.message, "b.bin");
    MP_CHECK_STR(f.error.field, MP_FIELD_OUTDATED);
    write_pattern(f.b, 1001); /* long enough, but not the file that the spec describes */
    MP_CHECK(mp_weights_unchanged(weights));
    mp_error_clear(&f.error);
    MP_CHECK_STATUS(mp_weights_open(f.spec, &again, &f.error), MP_INTEGRITY, &f.error);
    MP_CHECK_HAS(f.error.message, "b.bin");
    MP_CHECK_STR(f.error.field, MP_FIELD_OUTDATED);
    /* A worker process opens the file that its parent has mapped. */
    mp_weights_set_lender((int)getpid());
    mp_status status = mp_weights_open(f.spec, &again, &f.error);
    mp_weights_set_lender(0);
#ifdef __linux__
    MP_CHECK_OK(status, &f.error);
    MP_CHECK(mp_weights_unchanged(again));
    mp_weights_close(again);
#else
    MP_CHECK_STATUS(status, MP_INTEGRITY, &f.error);
#endif
    mp_test_write_file(f.b, "", 0); /* an empty file cannot be mapped, but the error must name its cause: the change */
    MP_CHECK_STATUS(mp_weights_open(f.spec, &again, &f.error), MP_INTEGRITY, &f.error);
    MP_CHECK(again == NULL);
    mp_weights_close(weights);
    mp_spec_unpin(f.spec);
}

#ifdef MP_SEAM
static int replace_and_open(const char *path, int flags) {
    char other[512];
    if (strstr(path, "b.bin")) {
        snprintf(other, sizeof other, "%s.new", path);
        write_pattern(other, 1000);
        MP_CHECK_INT(rename(other, path), 0);
    }
    return mp_sys_real.open(path, flags);
}
#endif

/* A file that is replaced by an equal one while it is opened is another version. */
MP_TEST(files_weights_file_replaced_while_opened) {
#ifdef MP_SEAM
    fixture f;
    begin(&f);
    add(&f, "t", MP_I8, 0, 1000, 1, 0);
    mp_weights *weights = NULL;
    mp_spec_note_files(f.spec);
    mp_sys_table.open = replace_and_open;
    mp_status status = mp_weights_open(f.spec, &weights, &f.error);
    mp_sys_table = mp_sys_real;
    MP_CHECK_STATUS(status, MP_INTEGRITY, &f.error);
    MP_CHECK_HAS(f.error.message, "b.bin");
    MP_CHECK(weights == NULL);
    mp_spec_unpin(f.spec);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), 0);
#else
    MP_SKIP("needs the seam build");
#endif
}

MP_TEST(files_weights_file_shrinks) {
    fixture f;
    begin(&f);
    add(&f, "t", MP_I8, 0, 20000, 0, 0);
    mp_weights *weights = open_weights(&f);
    mp_tensor t;
    MP_CHECK_OK(mp_weights_get_any(weights, "t", 1, (int64_t[]){20000}, &t, &f.error), &f.error);
    MP_CHECK_INT(t.data[19999], pattern(19999));
    MP_CHECK_INT(truncate(f.a, 5000), 0);
    MP_CHECK(!mp_weights_poisoned(weights));
    uint64_t sum = 0;
    for (uint64_t i = 8192; i < t.nbytes; i++)
        sum += t.data[i];
    MP_CHECK_INT(sum, 0);
    MP_CHECK_INT(t.data[4999], pattern(4999));
    MP_CHECK(mp_weights_poisoned(weights) && !mp_weights_unchanged(weights) && !mp_weights_sound(weights));
    MP_CHECK_STATUS(mp_weights_check_poisoned(weights, &f.error), MP_IO, &f.error);
    MP_CHECK_HAS(f.error.message, f.a);
    mp_weights_close(weights);
}

static mp_status open_and_close(void *arg, mp_error *error) {
    fixture *f = arg;
    mp_weights *weights = NULL;
    mp_status status = mp_weights_open(f->spec, &weights, error);
    mp_weights_close(weights);
    return status;
}

MP_TEST(files_weights_faults) {
    fixture f;
    begin(&f);
    add(&f, "t", MP_I8, 0, 1000, 1, 0);
    mp_test_alloc_sweep(open_and_close, &f);
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_OPEN, open_and_close, &f), 2);
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_MAP, open_and_close, &f), 2);
    mp_spec_unpin(f.spec);
}
