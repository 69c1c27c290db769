/* test_files_shape_text.c: shapes in error messages, also where the text does not fit. */
#include "files/spec_build.h"
#include "mp_test.h"

MP_TEST(files_shape_text) {
    static const struct {
        int ndim;
        int64_t shape[4];
        size_t size;
        const char *expected;
    } cases[] = {
        {0, {0}, 16, ""},
        {1, {7}, 16, "[7]"},
        {2, {7, 300}, 16, "[7, 300]"},
        {4, {1, 2, 3, 4}, 16, "[1, 2, 3, 4]"},
        {2, {7, 300}, 9, "[7, 300]"}, /* fits exactly */
        {2, {7, 300}, 8, "[7, 300"},  /* no room for the bracket */
        {2, {7, 300}, 5, "[7, "},
        {2, {7, 300}, 3, "[7"},
        {1, {7}, 1, ""},
        {0, {0}, 1, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[32];
        memset(text, '#', sizeof text);
        mp_shape_text(cases[i].ndim, cases[i].shape, text, cases[i].size);
        MP_CHECK_STR(text, cases[i].expected);
        for (size_t k = cases[i].size; k < sizeof text; k++)
            MP_CHECK_INT(text[k], '#'); /* nothing is written past the buffer */
    }
}
