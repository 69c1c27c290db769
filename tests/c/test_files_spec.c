/* test_files_spec.c: the model spec: building, look-up, typed reads, tensors and tokens. */
#include <float.h>

#include "spec_fixture.h"
#include "base/alloc.h"
#include "files/spec_build.h"
#include "test_files.h"

static mp_value integer(int64_t x) { return (mp_value){.type = MP_VALUE_INT, .gguf_type = G_U32, .as.integer = x}; }
static mp_value real(double x) { return (mp_value){.type = MP_VALUE_FLOAT, .gguf_type = G_F32, .as.real = x}; }
static mp_value text(const char *x) {
    return (mp_value){.type = MP_VALUE_STRING, .gguf_type = G_STRING, .count = strlen(x), .as.string = x};
}

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

/* The spec copies its arguments: the caller may change or free them afterwards. */
MP_TEST(files_spec_copies_its_input) {
    mp_error error;
    mp_spec *spec = mp_spec_create();
    char key[] = "some.key", name[] = "a.weight", path[] = "/x", architecture[] = "bert", bytes[] = "abc";
    uint64_t offsets[] = {0, 1, 3};
    int64_t integers[] = {1, -2, 3};
    mp_value strings = {.type = MP_VALUE_STRINGS, .count = 2, .as.strings = {bytes, offsets}};
    mp_value array = {.type = MP_VALUE_INTS, .count = 3, .as.integers = integers};
    MP_CHECK_OK(mp_spec_set_architecture(spec, architecture, &error), &error);
    MP_CHECK_OK(mp_spec_add_file(spec, path, &error), &error);
    set(spec, key, strings);
    key[0] = 'S';
    set(spec, key, array);
    char word[] = "word";
    uint8_t bools[] = {1, 0, 1};
    double reals[] = {0.5, 2.5};
    set(spec, "word", text(word));
    set(spec, "bools", (mp_value){.type = MP_VALUE_BOOLS, .count = 3, .as.bools = bools});
    set(spec, "reals", (mp_value){.type = MP_VALUE_FLOATS, .count = 2, .as.reals = reals});
    memset(word, 'x', sizeof word - 1), memset(bools, 0, sizeof bools), memset(reals, 0, sizeof reals);
    mp_tensor_entry tensor = entry(name, MP_F32, 2, 3, 24);
    MP_CHECK_OK(mp_spec_add_tensor(spec, &tensor, &error), &error);
    memset(key, 0, sizeof key), memset(name, 0, sizeof name), memset(path, 0, sizeof path);
    memset(bytes, 0, sizeof bytes), memset(offsets, 0, sizeof offsets), memset(integers, 0, sizeof integers);
    memset(architecture, 0, sizeof architecture);

    MP_CHECK_STR(mp_spec_architecture(spec), "bert");
    MP_CHECK_STR(mp_spec_file(spec, 0), "/x");
    const mp_value *value = mp_spec_find(spec, "some.key");
    MP_CHECK(value && value->count == 2 && value->as.strings.offsets[2] == 3);
    MP_CHECK(memcmp(value->as.strings.bytes, "abc", 3) == 0);
    value = mp_spec_find(spec, "Some.key");
    MP_CHECK(value && value->as.integers[1] == -2 && value->as.integers[2] == 3);
    MP_CHECK_STR(mp_spec_find(spec, "word")->as.string, "word");
    MP_CHECK(mp_spec_find(spec, "bools")->as.bools[2] == 1 && mp_spec_find(spec, "reals")->as.reals[1] == 2.5);
    const mp_tensor_entry *found = mp_spec_find_tensor(spec, "a.weight");
    MP_CHECK(found && found->shape[0] == 2 && found->shape[1] == 3 && found->shape[3] == 1);
    MP_CHECK(!mp_spec_find(spec, "some") && !mp_spec_find_tensor(spec, "") && !mp_spec_find(spec, "some.key.x"));
    mp_spec_unpin(spec);
}

MP_TEST(files_spec_pins) {
    uint64_t before = mp_alloc_bytes(MP_TAG_SPEC);
    mp_spec *spec = llama();
    MP_CHECK(mp_spec_pin(spec) == spec);
    mp_spec_unpin(spec);
    MP_CHECK_STR(mp_spec_architecture(spec), "llama");
    mp_spec_unpin(spec);
    mp_spec_unpin(NULL);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), before);
}

#ifdef MP_SEAM
static int random_calls;
static uint64_t count_random(void) { return (uint64_t)++random_calls; }
#endif

/* Names are hashed with a random key per spec: no file can be crafted whose names collide. */
MP_TEST(files_spec_hash_key_is_random) {
#ifdef MP_SEAM
    mp_sys_table.random = count_random;
    mp_spec *spec = mp_spec_create();
    mp_sys_table = mp_sys_real;
    MP_CHECK_INT(random_calls, 2);
    mp_spec_unpin(spec);
#else
    MP_SKIP("needs the seam build");
#endif
}

/* Memory of a spec: small parts share blocks of 32 KiB; a part of 8 KiB or more that does not fit has its own block and
 * leaves the shared one in use. Parts are aligned to 16 bytes. */
MP_TEST(files_spec_memory_blocks) {
    enum { SHARED = 32 * 1024, LARGE = 8 * 1024, SMALL = 512 };
    mp_spec *spec = mp_spec_create();
    uint64_t before = mp_alloc_bytes(MP_TAG_SPEC);
    MP_CHECK(mp_spec_memory(spec, 0) != NULL);
    uint8_t *one = mp_spec_memory(spec, 1), *two = mp_spec_memory(spec, 16), *three = mp_spec_memory(spec, SMALL - 32);
    MP_CHECK(two == one + 16 && three == two + 16 && (uintptr_t)one % 16 == 0);
    const uint64_t head = mp_alloc_bytes(MP_TAG_SPEC) - before - SHARED;
    MP_CHECK(head <= 64);
    for (int i = 1; i < (SHARED - LARGE) / SMALL + 1; i++) /* one part less than LARGE is left */
        memset(mp_spec_memory(spec, SMALL), 1, SMALL);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC) - before, SHARED + head);
    for (int i = 0; i < 2; i++) {
        before = mp_alloc_bytes(MP_TAG_SPEC);
        uint8_t *own = mp_spec_memory(spec, LARGE - 15); /* padded to LARGE */
        memset(own, 2, LARGE - 15);
        MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC) - before, LARGE + head);
    }
    before = mp_alloc_bytes(MP_TAG_SPEC);
    for (int i = 0; i < LARGE / SMALL - 1; i++)
        memset(mp_spec_memory(spec, SMALL), 3, SMALL); /* the rest of the shared block, to its last byte */
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), before);
    MP_CHECK(mp_spec_memory(spec, LARGE - 16) != NULL);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC) - before, SHARED + head);
    mp_spec_unpin(spec);
}

/* Callers may leave the count of a scalar unset. A long string is stored once. */
MP_TEST(files_spec_counts_and_sizes) {
    enum { LONG = 100000 };
    mp_spec *spec = llama();
    mp_error error;
    const char *const names[] = {"bool", "int", "float"};
    set(spec, "bool", (mp_value){.type = MP_VALUE_BOOL, .count = 9, .as.integer = 7});
    set(spec, "int", (mp_value){.type = MP_VALUE_INT, .count = 9, .as.integer = 7});
    set(spec, "float", (mp_value){.type = MP_VALUE_FLOAT, .count = 9, .as.real = 7});
    for (int i = 0; i < 3; i++)
        MP_CHECK_INT(mp_spec_find(spec, names[i])->count, 1);
    MP_CHECK_INT(mp_spec_find(spec, "bool")->as.integer, 1);
    char *longer = calloc(1, LONG + 1);
    memset(longer, 'x', LONG);
    uint64_t before = mp_alloc_bytes(MP_TAG_SPEC);
    set(spec, "long", text(longer));
    uint64_t used = mp_alloc_bytes(MP_TAG_SPEC) - before;
    if (used < LONG || used > LONG + 40000) /* the string, and at most one more block of memory for its key */
        MP_FAIL("a string of %d bytes takes %llu", LONG, (unsigned long long)used);
    static const mp_value_type types[] = {MP_VALUE_STRING, MP_VALUE_BOOLS, MP_VALUE_INTS, MP_VALUE_FLOATS};
    for (int i = 0; i < 4; i++) { /* the size and its terminator overflow: refused before a byte is read */
        mp_value huge = {.type = types[i], .count = UINT64_MAX, .as.string = longer};
        MP_CHECK_STATUS(mp_spec_set(spec, "huge", &huge, &error), MP_MEMORY_EXHAUSTED, &error);
    }
    MP_CHECK(!mp_spec_memory(spec, UINT64_MAX) && !mp_spec_memory(spec, (uint64_t)INT64_MAX + 1));
    MP_CHECK(!mp_spec_find(spec, "huge"));
    free(longer);
    mp_spec_unpin(spec);
}

MP_TEST(files_spec_many_files) {
    mp_error error;
    mp_spec *spec = mp_spec_create();
    char path[32];
    for (int i = 0; i < 1000; i++) {
        snprintf(path, sizeof path, "/models/%d", i);
        MP_CHECK_OK(mp_spec_add_file(spec, path, &error), &error);
    }
    MP_CHECK_INT(mp_spec_file_count(spec), 1000);
    for (int i = 0; i < 1000; i++) {
        snprintf(path, sizeof path, "/models/%d", i);
        MP_CHECK_STR(mp_spec_file(spec, i), path);
    }
    mp_spec_unpin(spec);
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

MP_TEST(files_spec_many_names) {
    enum { N = 100000 };
    mp_error error;
    mp_spec *spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_add_file(spec, "x", &error), &error);
    char name[32];
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "n%d", i);
        set(spec, name, integer(i));
        mp_tensor_entry tensor = entry(name, MP_F32, 1, i + 1, 4 * ((uint64_t)i + 1));
        MP_CHECK_OK(mp_spec_add_tensor(spec, &tensor, &error), &error);
    }
    MP_CHECK_INT(mp_spec_value_count(spec), N);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "n%d", i);
        const mp_value *value = mp_spec_find(spec, name);
        const mp_tensor_entry *tensor = mp_spec_find_tensor(spec, name);
        if (!value || value->as.integer != i || !tensor || tensor->shape[1] != i + 1)
            MP_FAIL("%s is not found", name);
        const char *key;
        MP_CHECK(mp_spec_value_at(spec, i, &key) == value && strcmp(key, name) == 0);
        MP_CHECK(mp_spec_tensor_at(spec, i) == tensor);
    }
    MP_CHECK(!mp_spec_find(spec, "n100000") && !mp_spec_find_tensor(spec, "m1"));
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

MP_TEST(files_spec_frozen) {
    mp_error error;
    mp_spec *spec = llama();
    mp_value one = integer(1);
    set(spec, "known", one);
    mp_tensor_entry tensor = entry("t", MP_F32, 1, 1, 4);
    mp_spec_freeze(spec);
    mp_spec_freeze(spec);
    MP_CHECK_STATUS(mp_spec_set(spec, "a", &one, &error), MP_INVALID_ARGUMENT, &error);
    /* not FORMAT for a duplicate: a call on a frozen spec, which other threads read, stops before it reads or stores */
    MP_CHECK_STATUS(mp_spec_set(spec, "known", &one, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STATUS(mp_spec_adopt(spec, "a", 1, &one, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK(mp_spec_find(spec, "a") == NULL);
    MP_CHECK_STATUS(mp_spec_add_tensor(spec, &tensor, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STATUS(mp_spec_add_file(spec, "b", &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_STATUS(mp_spec_set_architecture(spec, "b", &error), MP_INVALID_ARGUMENT, &error);
    mp_token_table tokens = {.count = 1, .bytes = (const uint8_t *)"a", .offsets = (uint64_t[]){0, 1},
                             .control = (uint8_t[]){0}};
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &tokens, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK(mp_spec_tokens(spec) == NULL);
    mp_spec *draft = llama(), *copy;
    MP_CHECK_STATUS(mp_spec_set_draft(spec, draft, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK(mp_spec_draft(spec) == NULL);
    set(draft, "a", one); /* not frozen by the refused call */
    mp_spec_unpin(draft);
    MP_CHECK_OK(copy_spec(spec, &copy, &error), &error);
    MP_CHECK_OK(mp_spec_set(copy, "a", &one, &error), &error);
    mp_spec_unpin(copy);
    mp_spec_unpin(spec);
}

/* UTF-8 at the bounds of every length: RFC 3629, section 4. */
MP_TEST(files_spec_utf8) {
    static const struct { const char *bytes; bool good; } cases[] = {
        {"", true}, {"a\x7f", true}, {"\x80", false}, {"\xbf", false}, {"\xc0\x80", false}, {"\xc1\xbf", false},
        {"\xc2\x80", true}, {"\xdf\xbf", true}, {"\xc2", false}, {"\xc2\x7f", false}, {"\xc2\xc0", false},
        {"\xe0\x9f\xbf", false}, {"\xe0\xa0\x80", true}, {"\xed\x9f\xbf", true}, {"\xed\xa0\x80", false},
        {"\xed\xbf\xbf", false}, {"\xee\x80\x80", true}, {"\xef\xbf\xbf", true}, {"\xe1\x80", false},
        {"\xe1\x80\x7f", false}, {"\xe1\x7f\x80", false}, {"\xf0\x8f\xbf\xbf", false},
        {"\xf0\x90\x80\x80", true}, {"\xf4\x8f\xbf\xbf", true}, {"\xf4\x90\x80\x80", false},
        {"\xf5\x80\x80\x80", false}, {"\xff", false}, {"\xf1\x80\x80", false}, {"\xf1\x80\x80\xc0", false},
        {"\x81\x80\x80\x80", false}, {"\xc1\x80\x80\x80", false}, {"\xf9\x80\x80\x80", false}, /* not a lead byte */
        {"a\xe1\x80\x80z", true}, {"\xe1\x80\x80\x80", false}, {"\xf1\x80\x80\x80\xc2", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (mp_is_utf8(cases[i].bytes, strlen(cases[i].bytes)) != cases[i].good)
            MP_FAIL("case %d", (int)i);
    MP_CHECK(mp_is_utf8("a\0b", 3));
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

/* --- the tensor table: every field that Python or gguf.c could set wrong --- */

MP_TEST(files_spec_refuses_tensors) {
    static const struct { const char *part; mp_tensor_entry entry; } cases[] = {
        {"t: file", {.dtype = MP_F32, .ndim = 1, .shape = {1}, .file = 1, .nbytes = 4}},
        {"t: file", {.dtype = MP_F32, .ndim = 1, .shape = {1}, .file = -1, .nbytes = 4}},
        {"t: type", {.dtype = MP_DTYPE_COUNT, .ndim = 1, .shape = {1}, .nbytes = 4}},
        {"t: type", {.dtype = (mp_dtype)-1, .ndim = 1, .shape = {1}, .nbytes = 4}},
        {"t: dimensions", {.dtype = MP_F32, .ndim = 0, .nbytes = 4}},
        {"t: dimensions", {.dtype = MP_F32, .ndim = 5, .shape = {1, 1, 1, 1}, .nbytes = 4}},
        {"t: dimensions", {.dtype = MP_F32, .ndim = -1, .nbytes = 4}},
        {"t: shape", {.dtype = MP_F32, .ndim = 2, .shape = {0, 1}, .nbytes = 0}},
        {"t: shape", {.dtype = MP_F32, .ndim = 2, .shape = {1, -1}, .nbytes = 4}},
        {"t: shape", {.dtype = MP_F32, .ndim = 2, .shape = {-1, -1}, .nbytes = 4}},
        {"t: shape", {.dtype = MP_F32, .ndim = 2, .shape = {INT64_MAX, 2}, .nbytes = 4}},
        {"t: shape", {.dtype = MP_F32, .ndim = 2, .shape = {(int64_t)1 << 32, (int64_t)1 << 32}, .nbytes = 0}},
        {"t: row", {.dtype = MP_Q4_0, .ndim = 2, .shape = {32, 31}, .nbytes = 18}},
        {"t: row", {.dtype = MP_Q4_K, .ndim = 1, .shape = {128}, .nbytes = 72}},
        {"t: size", {.dtype = MP_F64, .ndim = 2, .shape = {(int64_t)1 << 30, (int64_t)1 << 31}, .nbytes = 0}},
        {"t: size", {.dtype = MP_F64, .ndim = 1, .shape = {((int64_t)1 << 61) + 1}, .nbytes = 8}},
        {"t: size", {.dtype = MP_F32, .ndim = 2, .shape = {2, 3}, .nbytes = 23}},
        {"t: size", {.dtype = MP_F32, .ndim = 2, .shape = {2, 3}, .nbytes = 25}},
        {"t: size", {.dtype = MP_Q8_0, .ndim = 2, .shape = {2, 32}, .nbytes = 64}},
        {"t: offset", {.dtype = MP_F32, .ndim = 1, .shape = {1}, .offset = UINT64_MAX - 3, .nbytes = 4}},
        {"t: offset", {.dtype = MP_F32, .ndim = 1, .shape = {1}, .offset = INT64_MAX - 3, .nbytes = 4}},
    };
    mp_spec *spec = llama();
    mp_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_tensor_entry tensor = cases[i].entry;
        tensor.name = "t";
        MP_CHECK_STATUS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, cases[i].part);
        check_error(&error, cases[i].part);
        char shape[96];
        mp_shape_text(tensor.ndim, tensor.shape, shape, sizeof shape);
        if (strcmp(cases[i].part, "t: shape") == 0)
            MP_CHECK_STR(error.got, shape);
    }
    MP_CHECK_INT(mp_spec_tensor_count(spec), 0);
    mp_tensor_entry tensor = cases[0].entry;
    tensor.name = "t";
    MP_CHECK_OK(mp_spec_add_file(spec, "/models/b.gguf", &error), &error);
    tensor.file = 2;
    MP_CHECK_STATUS(mp_spec_add_tensor(spec, &tensor, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.allowed, "0 to 1");
    MP_CHECK_STR(error.got, "2");
    mp_spec_unpin(spec);
}

/* --- typed reading --- */

MP_TEST(files_spec_integers) {
    mp_spec *spec = llama();
    mp_error error;
    int64_t out = -7, def = 5;
    set(spec, "llama.block_count", integer(30));
    set(spec, "llama.attention.head_count", real(9));
    set(spec, "llama.context_length", integer(4294967295));
    MP_CHECK_OK(mp_spec_int(spec, "{arch}.block_count", 1, 30, NULL, &out, &error), &error);
    MP_CHECK_INT(out, 30);
    MP_CHECK_OK(mp_spec_int(spec, "llama.block_count", 30, 1000, &def, &out, &error), &error);
    MP_CHECK_INT(out, 30);
    MP_CHECK_OK(mp_spec_int(spec, "{arch}.absent", 10, 20, &def, &out, &error), &error);
    MP_CHECK_INT(out, 5);
    out = -7;
    MP_CHECK_STATUS(mp_spec_int(spec, "{arch}.absent", 1, 9, NULL, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "llama.absent");
    MP_CHECK_STR(error.file, "/models/a.gguf");
    MP_CHECK_STR(error.got, "missing");
    MP_CHECK_STR(error.allowed, "an integer from 1 to 9");
    MP_CHECK_STATUS(mp_spec_int(spec, "{arch}.attention.head_count", 1, 9, &def, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.got, "a float");
    /* above a cap: MP_LIMIT; below the range: MP_FORMAT */
    MP_CHECK_STATUS(mp_spec_int(spec, "{arch}.block_count", 1, 29, NULL, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.got, "30");
    MP_CHECK_STATUS(mp_spec_int_capped(spec, "{arch}.block_count", 1, 29, NULL, &out, &error), MP_LIMIT, &error);
    MP_CHECK_STR(error.allowed, "an integer from 1 to 29 (a limit of mpool)");
    MP_CHECK_STATUS(mp_spec_int(spec, "{arch}.block_count", 31, INT64_MAX, NULL, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.allowed, "an integer of at least 31");
    MP_CHECK_STATUS(mp_spec_int(spec, "{arch}.block_count", 31, 31, NULL, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.allowed, "the integer 31");
    MP_CHECK_STATUS(mp_spec_int_capped(spec, "{arch}.block_count", 31, 99, NULL, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_int_capped(spec, "{arch}.context_length", 1, 1 << 24, NULL, &out, &error), MP_LIMIT,
                    &error);
    MP_CHECK_STR(error.got, "4294967295");
    MP_CHECK_INT(out, -7);
    mp_spec_unpin(spec);
    spec = mp_spec_create();
    MP_CHECK_STATUS(mp_spec_int(spec, "{arch}.block_count", 1, 29, &def, &out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.field, "general.architecture");
    mp_spec_unpin(spec);
}

/* Names of hyper-parameters have at most 255 bytes, not counting "{arch}". The longest name of an architecture fits in
 * addition. */
MP_TEST(files_spec_long_names_of_hyper_parameters) {
    enum { MAX = 255 };
    mp_error error;
    int64_t out = 0;
    char key[6 + MAX + 2], architecture[MP_SPEC_MAX_ARCHITECTURE + 1], stored[MP_SPEC_MAX_ARCHITECTURE + sizeof key];
    mp_spec *spec = llama();
    memset(architecture, 'a', MP_SPEC_MAX_ARCHITECTURE);
    architecture[MP_SPEC_MAX_ARCHITECTURE] = 0;
    MP_CHECK_OK(mp_spec_set_architecture(spec, architecture, &error), &error);
    for (int length = MAX; length <= MAX + 1; length++) {
        snprintf(key, sizeof key, "{arch}%0*d", length, 7);
        if (length == MAX) {
            snprintf(stored, sizeof stored, "%s%s", architecture, key + 6);
            set(spec, stored, integer(5));
        }
        for (int with = 0; with < 2; with++) { /* with and without the architecture */
            out = 0;
            mp_status status = mp_spec_int(spec, with ? key : key + 6, 0, 9, &(int64_t){3}, &out, &error);
            MP_CHECK_STATUS(status, length == MAX ? MP_OK : MP_INTERNAL, &error);
            MP_CHECK_INT(out, length > MAX ? 0 : with ? 5 : 3);
        }
    }
    MP_CHECK_HAS(error.message, "256 bytes");
    mp_spec_unpin(spec);
}

/* A value per layer may be stored as a scalar or as one integer per layer. */
MP_TEST(files_spec_integers_per_layer) {
    mp_spec *spec = llama();
    mp_error error;
    int64_t out[3] = {0}, def = 2, layers[] = {4, 1, 8};
    mp_value array = {.type = MP_VALUE_INTS, .count = 3, .as.integers = layers};
    mp_value reals = {.type = MP_VALUE_FLOATS, .count = 3, .as.reals = (double[]){1, 2, 3}};
    set(spec, "llama.all", integer(7));
    set(spec, "llama.each", array);
    set(spec, "llama.reals", reals);
    MP_CHECK_OK(mp_spec_ints(spec, "{arch}.all", 3, 1, 8, NULL, out, &error), &error);
    MP_CHECK(out[0] == 7 && out[1] == 7 && out[2] == 7);
    MP_CHECK_OK(mp_spec_ints(spec, "{arch}.each", 3, 1, 8, NULL, out, &error), &error);
    MP_CHECK(out[0] == 4 && out[1] == 1 && out[2] == 8);
    MP_CHECK_OK(mp_spec_ints(spec, "{arch}.absent", 3, 5, 8, &def, out, &error), &error);
    MP_CHECK(out[0] == 2 && out[1] == 2 && out[2] == 2);
    MP_CHECK_STATUS(mp_spec_ints(spec, "{arch}.absent", 3, 1, 8, NULL, out, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_ints(spec, "{arch}.each", 2, 1, 8, NULL, out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.got, "an array of 3");
    MP_CHECK_HAS(error.allowed, "an array of 2");
    MP_CHECK_STATUS(mp_spec_ints(spec, "{arch}.each", 4, 1, 8, NULL, out, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_ints(spec, "{arch}.each", 3, 2, 8, NULL, out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.got, "1 at index 1");
    MP_CHECK_STATUS(mp_spec_ints(spec, "{arch}.each", 3, 1, 7, NULL, out, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_ints(spec, "{arch}.all", 3, 8, 9, NULL, out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.got, "7");
    MP_CHECK_STATUS(mp_spec_ints(spec, "{arch}.reals", 3, 1, 8, NULL, out, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.got, "an array of floats");
    mp_spec_unpin(spec);
}

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

MP_TEST(files_spec_bools_and_strings) {
    mp_spec *spec = llama();
    mp_error error;
    bool flag = false, def = true;
    const char *word = NULL;
    set(spec, "flag", (mp_value){.type = MP_VALUE_BOOL, .as.integer = 1});
    set(spec, "number", integer(1));
    set(spec, "word", text("silu"));
    mp_value nul = {.type = MP_VALUE_STRING, .count = 3, .as.string = "a\0b"};
    set(spec, "nul", nul);
    MP_CHECK_OK(mp_spec_bool(spec, "flag", NULL, &flag, &error), &error);
    MP_CHECK(flag);
    flag = false;
    MP_CHECK_OK(mp_spec_bool(spec, "absent", &def, &flag, &error), &error);
    MP_CHECK(flag);
    MP_CHECK_STATUS(mp_spec_bool(spec, "absent", NULL, &flag, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_bool(spec, "number", &def, &flag, &error), MP_FORMAT, &error);
    MP_CHECK_OK(mp_spec_string(spec, "word", NULL, &word, &error), &error);
    MP_CHECK_STR(word, "silu");
    MP_CHECK_OK(mp_spec_string(spec, "absent", "gelu", &word, &error), &error);
    MP_CHECK_STR(word, "gelu");
    MP_CHECK_STATUS(mp_spec_string(spec, "absent", NULL, &word, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_string(spec, "number", "x", &word, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(mp_spec_string(spec, "nul", "x", &word, &error), MP_FORMAT, &error);
    MP_CHECK_HAS(error.got, "NUL at byte 1");
    mp_spec_unpin(spec);
}

/* --- tokens --- */

MP_TEST(files_spec_tokens) {
    static const uint8_t bytes[] = "abcdef", control[] = {0, 1, 0};
    static const uint64_t offsets[] = {0, 2, 2, 6};
    static const int32_t eog[] = {1, 2};
    const mp_token_table good = {.count = 3, .bytes = bytes, .offsets = offsets, .control = control, .eog_count = 2,
                                 .eog = eog};
    mp_spec *spec = llama();
    mp_error error;
    MP_CHECK(mp_spec_tokens(spec) == NULL);
    mp_token_table bad = good;
    bad.count = 0;
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    bad.count = -1;
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    bad.count = (1 << 20) + 1; /* refused before anything is read */
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_LIMIT, &error);
    MP_CHECK_HAS(error.allowed, "1048576");
    bad = good;
    bad.offsets = (uint64_t[]){0, 3, 2, 6};
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    bad.offsets = (uint64_t[]){1, 2, 2, 6};
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    bad.offsets = (uint64_t[]){0, 2, 2, UINT64_MAX};
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_LIMIT, &error);
    bad.offsets = (uint64_t[]){0, 2, 2, 2 + 65537};
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_LIMIT, &error);
    MP_CHECK_STR(error.field, "token length");
    bad = good;
    bad.eog = (int32_t[]){1, 3};
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    MP_CHECK_STR(error.got, "3");
    bad.eog = (int32_t[]){-1, 2};
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    bad = good;
    bad.eog_count = 4;
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    bad.eog_count = -1;
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    bad = good;
    bad.control = (uint8_t[]){0, 2, 0};
    MP_CHECK_STATUS(mp_spec_set_tokens(spec, &bad, &error), MP_FORMAT, &error);
    MP_CHECK(mp_spec_tokens(spec) == NULL);
    MP_CHECK_OK(mp_spec_set_tokens(spec, &good, &error), &error);
    const mp_token_table *got = mp_spec_tokens(spec);
    MP_CHECK(got && got->count == 3 && got->bytes != bytes && memcmp(got->bytes, bytes, 6) == 0);
    MP_CHECK(memcmp(got->offsets, offsets, sizeof offsets) == 0 && memcmp(got->control, control, 3) == 0);
    MP_CHECK(got->eog_count == 2 && got->eog[0] == 1 && got->eog[1] == 2);
    mp_spec *copy;
    MP_CHECK_OK(copy_spec(spec, &copy, &error), &error);
    mp_spec_unpin(spec);
    MP_CHECK(mp_spec_tokens(copy)->offsets[3] == 6);
    mp_spec_unpin(copy);
}

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

/* A file that is added after others were noted has an identity of its own. */
MP_TEST(files_spec_notes_files_that_are_added_later) {
    enum { COUNT = 40 };
    mp_error error;
    mp_file_id id;
    char path[512];
    mp_spec *spec = mp_spec_create();
    for (int i = 0; i < COUNT; i++) {
        snprintf(path, sizeof path, "%s/later%d.bin", mp_test_directory(), i);
        mp_test_write_file(path, "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGH", (size_t)i + 1);
        MP_CHECK_OK(mp_spec_add_file(spec, path, &error), &error);
        MP_CHECK(!mp_spec_file_identity(spec, i, &id));
        mp_spec_note_files(spec);
        for (int k = 0; k <= i; k++)
            MP_CHECK(mp_spec_file_identity(spec, k, &id) && id.size == (uint64_t)k + 1);
    }
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

static void note_all(void *arg) {
    noting *n = arg;
    for (int i = 0; i < NOTED; i++) {
        mp_file_id id = {.size = n->size}, known;
        n->stored += mp_spec_same_file(n->spec, i, &id);
        MP_CHECK(mp_spec_file_identity(n->spec, i, &known));
    }
}

MP_TEST(files_spec_identities_from_threads) {
    mp_error error;
    mp_thread threads[2] = {0};
    const uint64_t before = mp_alloc_bytes(MP_TAG_SPEC);
    mp_spec *spec = mp_spec_create();
    for (int i = 0; i < NOTED; i++)
        MP_CHECK_OK(mp_spec_add_file(spec, "/a", &error), &error);
    mp_spec_freeze(spec);
    noting each[2] = {{spec, 1, 0}, {spec, 2, 0}};
    for (int i = 0; i < 2; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "noting", note_all, &each[i], &error), &error);
    for (int i = 0; i < 2; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK_INT(each[0].stored + each[1].stored, NOTED); /* the first thread that sees a file decides its identity */
    mp_spec_unpin(spec);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_SPEC), before);
}
