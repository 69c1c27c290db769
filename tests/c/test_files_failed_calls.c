/* test_files_failed_calls.c: the size that an error of refused memory names, and the outputs of failed calls. */
#include <stddef.h>

#include "base/sys.h"
#include "files/bpe.h"
#include "files/file_map.h"
#include "files/weights.h"
#include "test_files.h"

#ifdef MP_SEAM
static void *refuse_large(size_t bytes, size_t alignment) {
    return bytes > 50000 ? NULL : mp_sys_real.alloc(bytes, alignment);
}
#endif

/* The error has the number of bytes that were asked for: of a key or a string with its terminator, or of the elements
 * of an array in memory, where integers and floats have 8 bytes. */
MP_TEST(files_gguf_refused_memory_has_its_size) {
#ifdef MP_SEAM
    enum { MOST = 200000 };
    static const struct { size_t key; uint32_t type, each, bytes; uint64_t count; const char *part; } cases[] = {
        {1, G_STRING, 0, 1, 200000, "needs 200001 bytes"},
        {60000, G_STRING, 0, 1, 1, "needs 60001 bytes"},
        {1, G_ARRAY, G_BOOL, 1, 60001, "needs 60001 bytes"},
        {1, G_ARRAY, G_U8, 1, 7000, "needs 56000 bytes"},
        {1, G_ARRAY, G_F32, 4, 7001, "needs 56008 bytes"},
        {1, G_ARRAY, G_F64, 8, 7002, "needs 56016 bytes"},
        {1, G_ARRAY, G_STRING, 8, 7003, "needs 56032 bytes"}, /* offsets, one more than strings */
    };
    uint8_t *zeros = calloc(1, MOST);
    MP_CHECK(zeros);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_bytes b = {0};
        mp_error error;
        mp_spec *spec;
        put_header(&b, 0, 1);
        put_u64(&b, cases[i].key);
        for (size_t j = 0; j < cases[i].key; j++)
            put_u8(&b, 'k');
        put_u32(&b, cases[i].type);
        if (cases[i].type == G_ARRAY)
            put_u32(&b, cases[i].each);
        put_u64(&b, cases[i].count);
        put(&b, zeros, cases[i].count * cases[i].bytes);
        mp_sys_table.alloc = refuse_large;
        MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), MP_MEMORY_EXHAUSTED, &error);
        mp_sys_table = mp_sys_real;
        MP_CHECK_HAS(error.message, cases[i].part);
        free(b.data);
    }
    /* the bytes of all strings of an array */
    test_bytes b = {0};
    mp_error error;
    mp_spec *spec;
    put_header(&b, 0, 1);
    put_key(&b, "k", G_ARRAY);
    put_u32(&b, G_STRING);
    put_u64(&b, 3);
    for (uint64_t i = 0; i < 3; i++) {
        put_u64(&b, 20000 + i);
        put(&b, zeros, 20000 + i);
    }
    mp_sys_table.alloc = refuse_large;
    MP_CHECK_STATUS(mp_gguf_parse(b.data, b.size, "memory", &spec, &error), MP_MEMORY_EXHAUSTED, &error);
    mp_sys_table = mp_sys_real;
    MP_CHECK_HAS(error.message, "needs 60003 bytes");
    free(b.data);
    free(zeros);
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
