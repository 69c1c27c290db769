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

#ifdef MP_SEAM
/* The whole pages of a tensor are released in the file that holds it, whichever of the files that is. */
MP_TEST(files_weights_release_the_file_of_the_tensor) {
    static const char *names[] = {"first", "second"};
    fixture f;
    begin(&f);
    write_pattern(f.b, 20000);
    for (int i = 0; i < 2; i++)
        add(&f, names[i], MP_F32, 0, 4000, i, 1000);
    mp_weights *weights = open_weights(&f);
    mp_sys_table.madvise = record_advice;
    for (int i = 0; i < 2; i++) {
        mp_tensor t;
        MP_CHECK_OK(mp_weights_get(weights, names[i], 1, (int64_t[]){-1}, &t, &f.error), &f.error);
        released_ranges = 0;
        mp_weights_release(weights, &t);
        const uintptr_t from = (uintptr_t)t.data, to = from + t.nbytes, page = (uintptr_t)getpagesize();
        MP_CHECK(released_ranges == 1 && released_from - from < page && to - released_to < page);
        MP_CHECK_INT(t.data[8000], pattern(9000)); /* read from the file again */
    }
    mp_sys_table.madvise = mp_sys_real.madvise;
    mp_weights_close(weights);
}
#endif

/* The system tells which pages are in memory only to the owner of all files, and to root. */
MP_TEST(files_weights_of_another_user) {
    enum { OTHER = 65534 };
    fixture f;
    if (geteuid() != 0)
        MP_SKIP("only root can be another user");
    begin(&f);
    for (int owned = 0; owned < 3; owned++) { /* number of files that the other user owns */
        if (owned > 0)
            MP_CHECK_INT(chown(owned == 1 ? f.a : f.b, OTHER, (gid_t)-1), 0);
        mp_weights *weights;
        MP_CHECK_OK(mp_weights_open(f.spec, &weights, &f.error), &f.error);
        MP_CHECK(mp_weights_owned(weights));
        MP_CHECK_INT(seteuid(OTHER), 0);
        MP_CHECK_INT(mp_weights_owned(weights), owned == 2);
        MP_CHECK_INT(seteuid(0), 0);
        mp_weights_close(weights);
    }
    mp_spec_unpin(f.spec);
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
        {"blk.0.q.weight blk.0.q.bias blk.1.q.weight blk.1.q.bias", 2, ""},
        {"blk.0.q.weight blk.0.q.bias blk.1.q.weight", 2, "blk.1.q.bias"},
        {"blk.0.q.weight blk.1.q.weight blk.1.q.bias", 2, "blk.0.q.bias"},
        {"blk.9.q.weight blk.9.q.bias blk.10.q.weight blk.10.q.bias blk.11.q.weight", 12, "blk.11.q.bias"},
        /* a layer that is not read, or lacks the weight, needs no bias */
        {"blk.0.q.weight blk.1.q.weight blk.1.q.bias", 1, ""},
        {"blk.0.q.weight blk.0.q.bias blk.1.experts.weight", 2, ""},
        /* a bias without a weight belongs to the router */
        {"blk.0.ffn_gate_inp.weight blk.1.ffn_gate_inp.weight blk.1.exp_probs_b.bias", 2, "blk.0.exp_probs_b.bias"},
        /* unless it belongs to no feed-forward network */
        {"blk.0.ffn_gate_inp.weight blk.1.ffn_gate_inp.weight blk.1.ssm_dt.bias", 2, ""},
        /* these are no layers of the model */
        {"blk.0.q.weight blk.0.q.bias blk.01.q.weight blk.x.q.weight v.blk.1.q.weight blk.1q.weight", 2, ""},
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
