/* test_files_failed_calls.c: the size that an error of refused memory names, and the outputs of failed calls. */
#include <stddef.h>

#include "base/sys.h"
#include "bpe_fixture.h"
#include "files/file_map.h"
#include "files/weights.h"
#include "test_files.h"

#ifdef MP_SEAM
static uint64_t named(const mp_error *error) {
    const char *number = strstr(error->message, "not enough memory: ");
    unsigned long long bytes = 0;
    if (!number || sscanf(number, "not enough memory: %llu bytes", &bytes) != 1)
        MP_FAIL("\"%s\" has no size", error->message);
    return bytes;
}

#endif

#ifdef MP_SEAM
/* Sizes of all allocations of a run, of which one is refused. */
enum { MAX_ALLOCATIONS = 64 };
static uint64_t asked[MAX_ALLOCATIONS];
static int asked_count, refused_at;

static void *refuse_one(size_t bytes, size_t alignment) {
    MP_CHECK(asked_count < MAX_ALLOCATIONS);
    asked[asked_count] = bytes - MP_TEST_HEADER;
    return asked_count++ == refused_at ? NULL : mp_sys_real.alloc(bytes, alignment);
}

static mp_status run_refused(mp_status (*body)(void *, mp_error *), void *arg, int at, mp_error *error) {
    refused_at = at;
    asked_count = 0;
    mp_sys_table.alloc = refuse_one;
    const mp_status status = body(arg, error);
    mp_sys_table = mp_sys_real;
    return status;
}

static mp_spec *vocabulary(void) {
    static const uint64_t tokens[] = {0, 1, 2, 4, 5, 7}, merges[] = {0, 3, 6};
    mp_error error;
    mp_spec *spec = mp_spec_create();
    mp_value token = {.type = MP_VALUE_STRINGS, .count = 5, .as.strings = {"ababcba", tokens}};
    mp_value merge = {.type = MP_VALUE_STRINGS, .count = 2, .as.strings = {"a bb a", merges}};
    MP_CHECK_OK(mp_spec_set(spec, "tokenizer.ggml.tokens", &token, &error), &error);
    MP_CHECK_OK(mp_spec_set(spec, "tokenizer.ggml.merges", &merge, &error), &error);
    return spec;
}

static mp_status add_files(void *arg, mp_error *error) {
    mp_spec *spec = arg;
    mp_status status = MP_OK;
    for (int i = 0; i < 5 && status == MP_OK; i++)
        status = mp_spec_add_file(spec, "/a", error);
    return status;
}

static mp_status add_key(void *arg, mp_error *error) {
    const mp_value value = {.type = MP_VALUE_INT};
    return mp_spec_set(arg, "k", &value, error);
}

static mp_status add_tensor(void *arg, mp_error *error) {
    const mp_tensor_entry tensor = {.name = "t", .dtype = MP_F32, .ndim = 1, .shape = {1}, .nbytes = 4};
    return mp_spec_add_tensor(arg, &tensor, error);
}

static mp_status open_map(void *arg, mp_error *error) {
    mp_file_map *map;
    mp_status status = mp_file_map_open(arg, &map, error);
    mp_file_map_close(map);
    return status;
}

static mp_status open_weights(void *arg, mp_error *error) {
    mp_weights *weights;
    mp_status status = mp_weights_open(arg, &weights, error);
    if (status == MP_OK)
        status = mp_weights_check_biases(weights, "blk.", 1, error);
    mp_weights_close(weights);
    return status;
}
#endif

/* Each error has the bytes of the refused block, or of all blocks that are allocated together. */
MP_TEST(files_refused_memory_has_its_size) {
#ifdef MP_SEAM
    mp_error error;
    char path[400];
    mp_spec *spec = vocabulary();
    /* the vocabulary; its table and its merges; marks; tokens and merges of a part */
    MP_CHECK_OK(run_refused(use_vocabulary, spec, -1, &error), &error);
    MP_CHECK_INT(asked_count, 6);
    const uint64_t blocks[] = {asked[0], 64 * 4 + 2 * 12, 64 * 4 + 2 * 12, 5, 4 * 4 + 8, 4 * 4 + 8};
    MP_CHECK_INT(asked[1] + asked[2], blocks[1]);
    MP_CHECK_INT(asked[4] + asked[5], blocks[4]);
    for (int i = 0; i < 6; i++) {
        MP_CHECK_STATUS(run_refused(use_vocabulary, spec, i, &error), MP_MEMORY_EXHAUSTED, &error);
        MP_CHECK_INT(named(&error), blocks[i]);
    }
    mp_spec_unpin(spec);

    spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_add_file(spec, "/a", &error), &error); /* takes the first block of memory, and room for four */
    for (int i = 0; i < 3; i++)
        MP_CHECK_OK(mp_spec_add_file(spec, "/a", &error), &error);
    MP_CHECK_STATUS(run_refused(add_files, spec, 0, &error), MP_MEMORY_EXHAUSTED, &error);
    MP_CHECK_INT(named(&error), 8 * sizeof(char *));
    MP_CHECK_INT(asked[0], 8 * sizeof(char *));
    /* the table of names, then names and their values: the larger of both is named */
    for (int tensors = 0; tensors < 2; tensors++)
        for (int i = 0; i < 3; i++) {
            MP_CHECK_STATUS(run_refused(tensors ? add_tensor : add_key, spec, i, &error), MP_MEMORY_EXHAUSTED, &error);
            MP_CHECK_INT(asked_count, i + 1);
            MP_CHECK_INT(named(&error), i == 0    ? 2 * 64 * sizeof(uint32_t)
                                        : tensors ? 64 * sizeof(mp_tensor_entry)
                                                  : 64 * sizeof(mp_value));
            if (i != 1)
                MP_CHECK_INT(asked[i], named(&error));
        }
    mp_spec_unpin(spec);

    mp_file_map_init();
    mp_test_write_file(test_path(path, sizeof path, "w"), "12345678", 8);
    for (int i = 0; i < 2; i++) {
        MP_CHECK_STATUS(run_refused(open_map, path, i, &error), MP_MEMORY_EXHAUSTED, &error);
        MP_CHECK_INT(named(&error), asked[i]);
    }
    MP_CHECK_INT(asked[1], strlen(path) + 1);
    spec = mp_spec_create();
    const mp_tensor_entry tensor = {.name = "blk.0.w", .dtype = MP_F32, .ndim = 1, .shape = {2}, .nbytes = 8};
    MP_CHECK_OK(mp_spec_add_file(spec, path, &error), &error);
    MP_CHECK_OK(mp_spec_add_tensor(spec, &tensor, &error), &error);
    MP_CHECK_OK(run_refused(open_weights, spec, -1, &error), &error); /* stores the identity of the file */
    MP_CHECK_OK(run_refused(open_weights, spec, -1, &error), &error);
    const int count = asked_count; /* the weights, a mapping, its path, the parts of layers */
    MP_CHECK_INT(count, 4);
    for (int i = 0; i < count; i++) {
        MP_CHECK_STATUS(run_refused(open_weights, spec, i, &error), MP_MEMORY_EXHAUSTED, &error);
        MP_CHECK_INT(named(&error), asked[i]);
    }
    mp_spec_unpin(spec);
#else
    MP_SKIP("needs the seam build");
#endif
}

/* A failed call sets its output to NULL, whatever it was before. */
MP_TEST(files_failed_calls_clear_their_output) {
    static max_align_t other;
    mp_error error;
    mp_file_map_init();
    mp_spec *spec = (mp_spec *)(void *)&other, *whole = mp_spec_create();
    MP_CHECK_STATUS(mp_gguf_read("/nowhere/model.gguf", &spec, &error), MP_IO, &error);
    MP_CHECK(spec == NULL);
    spec = (mp_spec *)(void *)&other;
    MP_CHECK_STATUS(mp_gguf_parse((const uint8_t *)"GGUF", 4, "memory", &spec, &error), MP_FORMAT, &error);
    MP_CHECK(spec == NULL);
    mp_file_map *map = (mp_file_map *)(void *)&other;
    MP_CHECK_STATUS(mp_file_map_open("/nowhere/model.gguf", &map, &error), MP_IO, &error);
    MP_CHECK(map == NULL);
    mp_weights *weights = (mp_weights *)(void *)&other;
    MP_CHECK_OK(mp_spec_add_file(whole, "/nowhere/model.gguf", &error), &error);
    MP_CHECK_STATUS(mp_weights_open(whole, &weights, &error), MP_IO, &error);
    MP_CHECK(weights == NULL);
    mp_bpe *bpe = (mp_bpe *)(void *)&other; /* without a vocabulary, mp_bpe_create succeeds, and sets NULL */
    MP_CHECK_OK(mp_bpe_create(whole, &bpe, &error), &error);
    MP_CHECK(bpe == NULL);
    mp_spec_unpin(whole);
}
