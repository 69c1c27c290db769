/* test_files_spec.c: the model spec: refused names, limits, identities of files, and a draft model. */
#include <float.h>

#include "spec_fixture.h"
#include "base/alloc.h"
#include "files/spec_build.h"
#include "test_files.h"

static mp_value integer(int64_t x) { return (mp_value){.type = MP_VALUE_INT, .gguf_type = G_U32, .as.integer = x}; }
static mp_value real(double x) { return (mp_value){.type = MP_VALUE_FLOAT, .gguf_type = G_F32, .as.real = x}; }

static void set(mp_spec *spec, const char *key, mp_value value) {
    mp_error error;
    MP_CHECK_OK(mp_spec_set(spec, key, &value, &error), &error);
}

static mp_spec *llama(void) {
    mp_error error;
    mp_spec *spec = mp_spec_create();
    MP_CHECK(spec != NULL);
    MP_CHECK_OK(mp_spec_set_architecture(spec, "llama", &error), &error);
    MP_CHECK_OK(mp_spec_add_file(spec, "/models/a.gguf", &error), &error);
    return spec;
}

static mp_tensor_entry entry(const char *name, mp_dtype dtype, int64_t rows, int64_t columns, uint64_t nbytes) {
    return (mp_tensor_entry){.name = name, .dtype = dtype, .ndim = 2, .shape = {rows, columns}, .nbytes = nbytes};
}

/* A spec has at most 2^19 files, and the error says so. */
MP_TEST(files_spec_most_files) {
    enum { MAX = 1 << 19 };
    mp_error error;
    mp_spec *spec = mp_spec_create();
    for (int i = 0; i < MAX; i++)
        MP_CHECK_OK(mp_spec_add_file(spec, "f", &error), &error);
    MP_CHECK_STATUS(mp_spec_add_file(spec, "one more", &error), MP_LIMIT, &error);
    MP_CHECK_HAS(error.message, "at most 524288");
    MP_CHECK_INT(mp_spec_file_count(spec), MAX);
    MP_CHECK_STR(mp_spec_file(spec, MAX - 1), "f");
    mp_spec_unpin(spec);
}

/* Errors get the file and key of the user: exact names with or without the architecture, then beginnings. */
MP_TEST(files_spec_places_errors) {
    static const char texts[] = "/m/config.jsonllama.rope.freq_baserope_theta/m/mmproj.ggufv.", numbers[] = "/m/x.json";
    static const uint64_t first[] = {0, 14, 34, 44}, second[] = {0, 14, 16, 16}, odd[] = {0, 9};
    static const struct {
        const char *field, *file, *shown;
    } cases[] = {{"llama.rope.freq_base", "/m/config.json", "rope_theta"},
                 {"rope.freq_base", "/m/config.json", "rope_theta"},
                 {"v.blk.0.ln1.weight", "/m/mmproj.gguf", "v.blk.0.ln1.weight"},
                 {"blk.0.attn_q.weight", "/models/a.gguf", "blk.0.attn_q.weight"},
                 {"llama.block_count", "/models/a.gguf", "llama.block_count"}};
    mp_spec *spec = llama();
    mp_error error;
    set(spec, "mpool.origins.0",
        (mp_value){.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 3, .as.strings = {texts, first}});
    set(spec, "mpool.origins.1",
        (mp_value){.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 3, .as.strings = {texts + 44, second}});
    set(spec, "mpool.origins.2", /* without a pair */
        (mp_value){.type = MP_VALUE_STRINGS, .gguf_type = -1, .count = 1, .as.strings = {numbers, odd}});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_fail_file(&error, MP_FORMAT, mp_spec_origin(spec), 7, cases[i].field, "a number", "%d", 5);
        snprintf(error.hint, sizeof error.hint, "hint");
        mp_spec_place_error(spec, &error);
        MP_CHECK_STR(error.file, cases[i].file);
        MP_CHECK_STR(error.field, cases[i].shown);
        MP_CHECK_STR(error.got, "5");
        MP_CHECK_STR(error.hint, "hint");
        MP_CHECK_HAS(error.message, cases[i].shown);
        MP_CHECK_HAS(error.message, " is 5, allowed: a number");
        MP_CHECK_INT(error.offset, 7);
    }
    mp_fail_file(&error, MP_FORMAT, "/models/b.gguf", -1, "llama.rope.freq_base", "a number", "5"); /* another file */
    mp_spec_place_error(spec, &error);
    MP_CHECK_STR(error.file, "/models/b.gguf");
    mp_spec *main = mp_spec_create();
    MP_CHECK(main != NULL);
    MP_CHECK_OK(mp_spec_add_file(main, "/models/c.gguf", &error), &error);
    MP_CHECK_OK(mp_spec_set_draft(main, spec, &error), &error);
    mp_fail_file(&error, MP_FORMAT, mp_spec_origin(spec), -1, "llama.rope.freq_base", "a number", "5");
    mp_spec_place_error(main, &error);
    MP_CHECK_STR(error.file, "/m/config.json");
    mp_spec_unpin(main);
    mp_fail(&error, MP_UNSUPPORTED, "no field");
    mp_spec_place_error(spec, &error);
    MP_CHECK_STR(error.message, "no field");
    mp_spec_place_error(spec, NULL);
    mp_spec_unpin(spec);
}

MP_TEST(files_spec_refuses_names) {
    mp_error error;
    mp_spec *spec = llama();
    mp_value one = integer(1);
    set(spec, "a", one);
    MP_CHECK_STATUS(mp_spec_set(spec, "a", &one, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "a");
    MP_CHECK_STATUS(mp_spec_set(spec, "", &one, &error), MP_FORMAT, &error);
    char *longer = calloc(1, 65537);
    memset(longer, 'k', 65536);
    MP_CHECK_STATUS(mp_spec_set(spec, longer, &one, &error), MP_FORMAT, &error);
    MP_CHECK_HAS(error.allowed, "65535");
    MP_CHECK_OK(mp_spec_set(spec, longer + 1, &one, &error), &error);
    mp_tensor_entry tensor = entry("t", MP_F32, 1, 1, 4);
    MP_CHECK_OK(mp_spec_add_tensor(spec, &tensor, &error), &error);
    MP_CHECK_STATUS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, &error);
    tensor.name = "";
    MP_CHECK_STATUS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, &error);
    tensor.name = longer + 65536 - 256;
    MP_CHECK_STATUS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, &error);
    tensor.name++;
    MP_CHECK_OK(mp_spec_add_tensor(spec, &tensor, &error), &error);
    MP_CHECK_STATUS(mp_spec_set_architecture(spec, "", &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_set_architecture(spec, "a b", &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_set_architecture(spec, " ab", &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_set_architecture(spec, "ab\x7f", &error), MP_FORMAT, &error);
    MP_CHECK_OK(mp_spec_set_architecture(spec, "~", &error), &error);
    MP_CHECK_STR(mp_spec_architecture(spec), "~");
    MP_CHECK_STATUS(mp_spec_set_architecture(spec, "\xc3\xa4", &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_set_architecture(spec, longer + 65536 - 65, &error), MP_FORMAT, &error);
    MP_CHECK_OK(mp_spec_set_architecture(spec, longer + 65536 - 64, &error), &error);
    MP_CHECK_STATUS(mp_spec_add_file(spec, "", &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STATUS(mp_spec_set(spec, "gr\xc3\xb6\xc3\x9f" "e", &one, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "key");
    tensor.name = "\xc3";
    MP_CHECK_STATUS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "tensor name");
    uint64_t falling[] = {0, 3, 2}, late[] = {1, 2, 3};
    mp_value strings = {.type = MP_VALUE_STRINGS, .count = 2, .as.strings = {"abc", falling}};
    MP_CHECK_STATUS(mp_spec_set(spec, "s", &strings, &error), MP_FORMAT, &error);
    strings.as.strings.offsets = late;
    MP_CHECK_STATUS(mp_spec_set(spec, "s", &strings, &error), MP_FORMAT, &error);
    mp_value unknown = {.type = (mp_value_type)99};
    MP_CHECK_STATUS(mp_spec_set(spec, "s", &unknown, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK(!mp_spec_find(spec, "s"));
    /* mp_spec_adopt, which copies nothing, makes the same checks */
    static const struct { const char *key; const char *field; } adopted[] = {
        {"a", "a"}, {"", "key length"}, {"b\n", "key"}, {"\x7f", "key"}};
    for (size_t i = 0; i < sizeof adopted / sizeof *adopted; i++) {
        const uint32_t bytes = (uint32_t)strlen(adopted[i].key);
        MP_CHECK_STATUS(mp_spec_adopt(spec, adopted[i].key, bytes, &one, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, adopted[i].field);
    }
    free(longer);
    mp_spec_unpin(spec);
}

/* A spec has at most one draft model, which has none. The spec holds a reference, and freezes it. */
MP_TEST(files_spec_draft) {
    mp_error error;
    mp_value one = integer(1);
    uint64_t before = mp_alloc_bytes(MP_TAG_SPEC);
    mp_spec *spec = llama(), *draft = llama(), *other = llama();
    MP_CHECK(mp_spec_draft(spec) == NULL);
    MP_CHECK_STATUS(mp_spec_set_draft(spec, spec, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_OK(mp_spec_set_draft(spec, draft, &error), &error);
    MP_CHECK(mp_spec_draft(spec) == draft);
    MP_CHECK_STATUS(mp_spec_set(draft, "a", &one, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STATUS(mp_spec_set_draft(spec, other, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STATUS(mp_spec_set_draft(other, spec, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK(mp_spec_draft(other) == NULL && mp_spec_draft(spec) == draft);
    set(other, "a", one); /* a refused draft model is not frozen */
    mp_spec_freeze(spec);
    mp_spec_unpin(draft);
    MP_CHECK_STR(mp_spec_architecture(mp_spec_draft(spec)), "llama");
    mp_spec_unpin(spec);
    mp_spec_unpin(other);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), before);
}

/* --- typed reading --- */

/* Floats are checked against a range. */
MP_TEST(files_spec_floats) {
    mp_spec *spec = llama();
    mp_error error;
    double out = 0, def = 1e-5;
    static const double bad[] = {NAN, INFINITY, -INFINITY, 0.0, -1e-5};
    char key[16];
    for (int i = 0; i < 5; i++) {
        snprintf(key, sizeof key, "bad%d", i);
        set(spec, key, real(bad[i]));
        MP_CHECK_STATUS(mp_spec_float(spec, key, FLT_MIN, FLT_MAX, &def, &out, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.allowed, "a finite number above 0");
    }
    MP_CHECK_STATUS(mp_spec_float(spec, "bad0", -DBL_MAX, DBL_MAX, &def, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.allowed, "a finite number");
    MP_CHECK_STATUS(mp_spec_float(spec, "bad1", -DBL_MAX, DBL_MAX, &def, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_float(spec, "bad3", FLT_MIN, 1, &def, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.allowed, "a number above 0, up to 1");
    MP_CHECK_STATUS(mp_spec_float(spec, "bad3", 0.5, FLT_MAX, &def, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.allowed, "a finite number of at least 0.5");
    static const struct { double low, high; const char *allowed; } ranges[] = {
        {0, 1, "a number from 0 to 1"},
        {0, FLT_MAX, "a finite number of at least 0"},
        {FLT_MIN, 1, "a number above 0, up to 1"},
        {2 * FLT_MIN, 1, "a number from 2.35099e-38 to 1"},
        {-FLT_MAX, FLT_MAX, "a finite number"},
        {-FLT_MAX / 2, FLT_MAX, "a finite number of at least -1.70141e+38"},
        {-1, FLT_MAX / 2, "a number from -1 to 1.70141e+38"},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        MP_CHECK_STATUS(mp_spec_float(spec, "none", ranges[i].low, ranges[i].high, NULL, &out, &error), MP_FORMAT,
                        &error);
        MP_CHECK_STR(error.allowed, ranges[i].allowed);
    }
    set(spec, "good", real(0.25));
    MP_CHECK_OK(mp_spec_float(spec, "good", FLT_MIN, 1, NULL, &out, &error), &error);
    MP_CHECK(out == 0.25);
    out = 0;
    MP_CHECK_OK(mp_spec_float(spec, "good", 0.25, 0.25, NULL, &out, &error), &error); /* both bounds are allowed */
    MP_CHECK(out == 0.25);
    MP_CHECK_STATUS(mp_spec_float(spec, "good", 0.5, 1, NULL, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.allowed, "a number from 0.5 to 1");
    MP_CHECK_OK(mp_spec_float(spec, "absent", 0.5, 1, &def, &out, &error), &error);
    MP_CHECK(out == 1e-5);
    MP_CHECK_STATUS(mp_spec_float(spec, "absent", 0.5, 1, NULL, &out, &error), MP_FORMAT, &error);
    /* JSON does not distinguish integers from floats; GGUF does */
    mp_value json = integer(10000);
    json.gguf_type = -1;
    set(spec, "json", json);
    set(spec, "gguf", integer(10000));
    MP_CHECK_OK(mp_spec_float(spec, "json", 1, FLT_MAX, NULL, &out, &error), &error);
    MP_CHECK(out == 10000.0);
    MP_CHECK_STATUS(mp_spec_float(spec, "gguf", 1, FLT_MAX, NULL, &out, &error), MP_FORMAT, &error);
    mp_spec_unpin(spec);
}

/* --- tokens --- */

/* One token, of the largest size that a token may have. */
MP_TEST(files_spec_one_token_at_its_cap) {
    static const uint8_t control[] = {0};
    static uint8_t bytes[65536 + 1];
    uint64_t offsets[] = {0, 65536};
    const mp_token_table table = {.count = 1, .bytes = bytes, .offsets = offsets, .control = control};
    mp_spec *spec = llama();
    mp_error error;
    bytes[65535] = 7;
    MP_CHECK_OK(mp_spec_set_tokens(spec, &table, &error), &error);
    const mp_token_table *got = mp_spec_tokens(spec);
    MP_CHECK(got && got->count == 1 && got->offsets[1] == 65536 && got->bytes[65535] == 7);
    mp_spec_unpin(spec);
    spec = llama();
    offsets[1]++;
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &table, &error), MP_LIMIT, &error);
    MP_CHECK_STR(error.got, "65537, of token 0");
    mp_spec_unpin(spec);
}

/* mp_spec_note_files stores the identities of the files that exist, and none for the others. */
MP_TEST(files_spec_notes_files) {
    mp_error error;
    mp_file_id id, now;
    char path[2][512];
    mp_spec *spec = mp_spec_create();
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s/%d.bin", mp_test_directory(), i);
        MP_CHECK_OK(mp_spec_add_file(spec, path[i], &error), &error);
    }
    mp_spec_freeze(spec);
    mp_test_write_file(path[0], "abc", 3);
    MP_CHECK(!mp_spec_file_identity(spec, 0, &id)); /* not noted yet */
    mp_spec_note_files(spec);
    MP_CHECK(mp_spec_file_identity(spec, 0, &id) && mp_sys_identify(path[0], &now));
    MP_CHECK(mp_file_id_same(&id, &now) && id.size == 3);
    MP_CHECK(!mp_spec_file_identity(spec, 1, &id));
    mp_test_write_file(path[1], "defgh", 5); /* the first sight of a file counts */
    mp_spec_note_files(spec);
    MP_CHECK(mp_spec_file_identity(spec, 1, &id) && id.size == 5);
    mp_test_write_file(path[0], "other", 5);
    mp_spec_note_files(spec);
    MP_CHECK(mp_spec_file_identity(spec, 0, &id) && id.size == 3);
    MP_CHECK(mp_sys_identify(path[0], &now) && !mp_spec_same_file(spec, 0, &now));
    mp_spec_unpin(spec);
}

/* Without memory for the identity of a file, the file counts as changed. */
static mp_status note_file(void *arg, mp_error *error) {
    const mp_file_id id = {.size = 3};
    mp_spec *spec = mp_spec_create();
    (void)arg;
    if (!spec)
        return mp_fail_memory(error, 0, "a model spec");
    mp_status status = mp_spec_add_file(spec, "/a", error);
    mp_spec_freeze(spec);
    if (status == MP_OK && !mp_spec_same_file(spec, 0, &id))
        status = mp_fail_memory(error, sizeof id, "the identity of a file");
    mp_spec_unpin(spec);
    return status;
}

MP_TEST(files_spec_identities_survive_refused_memory) { mp_test_alloc_sweep(note_file, NULL); }

/* Any thread may store the identity of a file. The variant tsan reports an access without the lock. */
enum { NOTED = 64 };
typedef struct noting {
    mp_spec *spec;
    uint64_t size;
    int stored;
} noting;
