/* test_files_corpus.c: every file of tests/corpus/gguf yields the result in its manifest. Every prefix of a valid file
 * and every modified byte is handled without a memory error. */
#include <sys/stat.h>

#include "base/alloc.h"
#include "files/weights.h"
#include "test_files.h"

typedef struct row {
    char file[512], status[512], field[512];
} row;

static FILE *open_manifest(void) {
    char path[1200];
    snprintf(path, sizeof path, "%s/corpus/gguf/manifest.tsv", mp_test_root());
    FILE *file = fopen(path, "r");
    if (!file)
        MP_FAIL("cannot open %s", path);
    return file;
}

static bool next_row(FILE *manifest, row *r) {
    char line[512];
    if (!fgets(line, sizeof line, manifest))
        return false;
    line[strcspn(line, "\n")] = 0;
    char *status = strchr(line, '\t'), *field = status ? strchr(status + 1, '\t') : NULL;
    if (!field)
        MP_FAIL("bad line in the manifest: %s", line);
    *status = *field = 0;
    snprintf(r->file, sizeof r->file, "%s", line);
    snprintf(r->status, sizeof r->status, "%s", status + 1);
    snprintf(r->field, sizeof r->field, "%s", field + 1);
    return true;
}

static void corpus_path(char *to, size_t size, const row *r) {
    snprintf(to, size, "%s/corpus/gguf/%s", mp_test_root(), r->file);
}

/* Load a file into memory of exactly its size, so that the sanitizer reports a read past the end. */
static uint8_t *load(const char *path, size_t *size) {
    struct stat info;
    FILE *file = fopen(path, "rb");
    if (!file || stat(path, &info) != 0)
        MP_FAIL("cannot open %s", path);
    *size = (size_t)info.st_size;
    uint8_t *data = malloc(*size ? *size : 1);
    if (!data || fread(data, 1, *size, file) != *size)
        MP_FAIL("cannot read %s", path);
    fclose(file);
    return data;
}

MP_TEST(files_corpus_manifest) {
    FILE *manifest = open_manifest();
    row r;
    int rows = 0, refused[64] = {0};
    mp_file_map_init();
    while (next_row(manifest, &r)) {
        char path[2048];
        mp_error error;
        mp_spec *spec = NULL;
        mp_error_clear(&error);
        corpus_path(path, sizeof path, &r);
        uint64_t before = mp_alloc_bytes(MP_TAG_SPEC);
        mp_status status = mp_gguf_read(path, &spec, &error);
        if (strcmp(r.status, "ANY") != 0) {
            if (strcmp(mp_status_find(status)->name, r.status) != 0)
                MP_FAIL("%s gave %s (%s), expected %s", r.file, mp_status_find(status)->name, error.message, r.status);
            if (r.field[0] && strcmp(error.field, r.field) != 0)
                MP_FAIL("%s named the field \"%s\" (%s), expected \"%s\"", r.file, error.field, error.message, r.field);
        }
        if (status == MP_OK) {
            read_all(spec);
            mp_spec_unpin(spec);
        } else {
            check_error(&error, r.file);
            if (spec)
                MP_FAIL("%s was refused but a spec was returned", r.file);
        }
        if (mp_alloc_bytes(MP_TAG_SPEC) != before)
            MP_FAIL("%s leaked memory", r.file);
        int number;
        if (sscanf(r.file, "reject/case%d_", &number) == 1 && number < 64)
            refused[number]++;
        rows++;
    }
    fclose(manifest);
    MP_CHECK(rows >= 149);
    for (int number = 1; number <= 31; number++)
        /* case 10 needs a large file (test_files_gguf.c), and files of case 30 are read */
        if (!refused[number] && number != 10 && number != 30)
            MP_FAIL("the corpus has no file for case %d", number);
}

/* Parse a copy of exactly `size` bytes. */
static mp_status parse_copy(const uint8_t *data, size_t size, const char *what, uint64_t *end) {
    mp_error error;
    mp_spec *spec;
    mp_error_clear(&error);
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy)
        MP_FAIL("the test ran out of memory");
    memcpy(copy, data, size);
    mp_status status = mp_gguf_parse(copy, size, what, &spec, &error);
    free(copy); /* before the spec is read: it must not refer to these bytes */
    if (status != MP_OK) {
        check_error(&error, what);
        return status;
    }
    read_all(spec);
    *end = 0;
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *t = mp_spec_tensor_at(spec, i);
        if (t->offset > size || t->nbytes > size - t->offset)
            MP_FAIL("%s: the tensor %s is outside the %zu bytes of the file", what, t->name, size);
        *end = t->offset + t->nbytes;
    }
    mp_spec_unpin(spec);
    return MP_OK;
}

MP_TEST_SECONDS(files_corpus_prefixes, 60) {
    FILE *manifest = open_manifest();
    row r;
    int files = 0;
    while (next_row(manifest, &r)) {
        if (strcmp(r.status, "OK") != 0 || strstr(r.file, "-of-0000"))
            continue;
        char path[2048];
        size_t size;
        uint64_t end, ignored;
        corpus_path(path, sizeof path, &r);
        uint8_t *data = load(path, &size);
        MP_CHECK_INT(parse_copy(data, size, r.file, &end), MP_OK);
        for (size_t cut = 0; cut < size; cut++) {
            mp_status status = parse_copy(data, cut, r.file, &ignored);
            /* only the padding at the end may be missing; without tensors, that is the header's padding */
            bool may = end ? cut >= end : size - cut < 32;
            if (end && may && status != MP_OK)
                MP_FAIL("%s is refused without its last %zu bytes of padding", r.file, size - cut);
            if (!may && status != MP_FORMAT)
                MP_FAIL("the first %zu bytes of %s gave %s", cut, r.file, mp_status_find(status)->name);
        }
        free(data);
        files++;
    }
    fclose(manifest);
    MP_CHECK(files >= 15);
}

MP_TEST_SECONDS(files_corpus_altered_bytes, 120) {
    static const uint8_t masks[] = {0x01, 0x80, 0xff};
    FILE *manifest = open_manifest();
    row r;
    uint64_t accepted = 0, refused = 0, end;
    while (next_row(manifest, &r)) {
        if (strcmp(r.status, "OK") != 0 || strstr(r.file, "-of-0000"))
            continue;
        char path[2048];
        size_t size;
        corpus_path(path, sizeof path, &r);
        uint8_t *data = load(path, &size);
        size_t header = size < 3000 ? size : 3000; /* the rest is tensor data, which the parser does not read */
        for (size_t at = 0; at < header; at++) {
            for (size_t m = 0; m < sizeof masks; m++) {
                data[at] ^= masks[m];
                parse_copy(data, size, r.file, &end) == MP_OK ? accepted++ : refused++;
                data[at] ^= masks[m];
            }
        }
        free(data);
    }
    fclose(manifest);
    MP_CHECK(refused > 1000 && accepted > 1000);
}

/* The tensors of every valid file can be read to the last byte. Files of alignment 1 are refused if they misalign
 * floats. */
MP_TEST(files_corpus_weights) {
    FILE *manifest = open_manifest();
    row r;
    mp_file_map_init();
    while (next_row(manifest, &r)) {
        if (strcmp(r.status, "OK") != 0)
            continue;
        char path[2048];
        mp_error error;
        mp_spec *spec;
        mp_weights *weights;
        corpus_path(path, sizeof path, &r);
        MP_CHECK_OK(mp_gguf_read(path, &spec, &error), &error);
        bool aligned = !strstr(r.file, "alignment_1.gguf");
        mp_status expected = aligned ? MP_OK : MP_FORMAT;
        MP_CHECK_STATUS(mp_weights_open(spec, &weights, &error), expected, &error);
        if (!aligned)
            MP_CHECK_HAS(error.allowed, "multiples of 4");
        for (int i = 0; aligned && i < mp_spec_tensor_count(spec); i++) {
            const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
            mp_tensor tensor;
            MP_CHECK_OK(mp_weights_get_any(weights, entry->name, entry->ndim, entry->shape, &tensor, &error), &error);
            uint64_t sum = 0;
            for (uint64_t j = 0; j < tensor.nbytes; j++)
                sum += tensor.data[j];
            if (tensor.nbytes > 16 && sum == 0) /* the corpus fills tensors with nonzero bytes */
                MP_FAIL("%s: the data of %s is not at its offset", r.file, entry->name);
        }
        if (aligned)
            mp_weights_close(weights);
        mp_spec_unpin(spec);
    }
    fclose(manifest);
}
