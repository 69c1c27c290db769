/* test_files_scaled.c: weights whose scales are other tensors (files/scaled_weights.h): what the layouts mean, and
 * every refusal with its field, the allowed values and the value found. */
#include <math.h>
#include <string.h>

#include "files/scaled_weights.h"
#include "test_files.h"

enum { N = 64, K = 96, SIZE = 65536, ZEROS = 32768, ORDER = 40960, CODES = 49152 };

typedef struct layout {
    mp_dtype codes;
    int64_t rows, block[2]; /* rows 0: N */
    mp_dtype scales; /* 0: F32 */
    int64_t shape[2]; /* scales; 0: three groups of N */
    const char *zeros; /* NULL: "zeros" */
    bool zeros_are_floats, order_is_floats;
    int nth; /* replaces the nth scale, counted from 1, by `value` */
    float value;
    int order_at, order;
    bool no_block; /* without mpool.scale_block */
} layout;

static void add(mp_spec *spec, const char *name, mp_dtype dtype, int64_t rows, int64_t columns, uint64_t offset) {
    mp_error error;
    mp_tensor_entry entry = {.name = name, .dtype = dtype, .ndim = rows ? 2 : 1, .offset = offset};
    entry.shape[0] = rows ? rows : columns;
    entry.shape[1] = rows ? columns : 0;
    MP_CHECK(mp_dtype_row_bytes(dtype, columns, &entry.nbytes));
    entry.nbytes *= (uint64_t)(rows ? rows : 1);
    MP_CHECK_OK(mp_spec_add_tensor(spec, &entry, &error), &error);
}

/* Reads the matrix that a layout describes. */
static mp_status get(const layout *l, mp_scaled *matrix, mp_error *error) {
    static float data[SIZE / 4];
    char path[400];
    memset(data, 0, sizeof data);
    for (int i = 0; i < ZEROS / 4; i++)
        data[i] = 1;
    if (l->nth)
        data[l->nth - 1] = l->value;
    for (int32_t k = 0; k < K; k++)
        memcpy(&data[ORDER / 4 + k], &(int32_t){k == l->order_at && l->order ? l->order : k % 3}, sizeof(int32_t));
    memcpy(&data[ORDER / 4 - 1], &(int32_t){-1}, sizeof(int32_t)); /* before and behind the order: no group */
    memcpy(&data[ORDER / 4 + K], &(int32_t){1000}, sizeof(int32_t));
    mp_file_map_init();
    mp_test_write_file(test_path(path, sizeof path, "scaled.bin"), data, sizeof data);
    mp_spec *spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(spec, "test", error), error);
    MP_CHECK_OK(mp_spec_add_file(spec, path, error), error);
    mp_value block = {.type = MP_VALUE_INTS, .count = 2, .as.integers = l->block};
    if (!l->no_block)
        MP_CHECK_OK(mp_spec_set(spec, "mpool.scale_block", &block, error), error);
    memset(matrix, 0xa5, sizeof *matrix);
    const int64_t rows = l->rows ? l->rows : N;
    add(spec, "q.weight", l->codes, rows, K, CODES);
    add(spec, "q.scales", l->scales, l->shape[0] ? l->shape[0] : 3, l->shape[0] ? l->shape[1] : rows, 0);
    if (l->codes != MP_F8_E4M3) {
        char name[32];
        snprintf(name, sizeof name, "q.%s", l->zeros ? l->zeros : "zeros");
        add(spec, name, l->zeros_are_floats ? MP_F32 : MP_I32, l->shape[0] ? l->shape[0] : 3, rows / 8, ZEROS);
        add(spec, "q.order", l->order_is_floats ? MP_F32 : MP_I32, 0, K, ORDER);
    }
    mp_weights *weights;
    MP_CHECK_OK(mp_weights_open(spec, &weights, error), error);
    mp_spec_unpin(spec);
    mp_status status = mp_weights_get_matrix(weights, "q.weight", rows, K, matrix, error);
    mp_weights_close(weights);
    return status;
}

#define FP8(...) {.codes = MP_F8_E4M3, __VA_ARGS__}
#define INTEGERS(dtype, ...) {.codes = dtype, __VA_ARGS__}
#define SHAPE(a, b) .shape = {a, b}
#define BLOCK(a, b) .block = {a, b}

MP_TEST(files_scaled_layouts) {
    static const struct {
        layout layout;
        int rows, group, groups;
        bool zero_offset;
    } cases[] = {
        {FP8(BLOCK(32, 32), SHAPE(2, 3)), 32, 32, 3, false},
        {FP8(BLOCK(48, 64), SHAPE(2, 2)), 48, 64, 2, false}, /* the last blocks are smaller */
        {FP8(BLOCK(0, 0), SHAPE(1, 1)), N, K, 1, false},
        {FP8(BLOCK(0, 0), SHAPE(N, 1)), 1, K, 1, false},
        {FP8(BLOCK(8, 32), SHAPE(1, 3)), N, 32, 3, false},
        {FP8(BLOCK(8, 1), SHAPE(N, K)), 1, 1, K, false},
        {FP8(BLOCK(0, 0), SHAPE(1, 1), .nth = 1, .value = 18568), N, K, 1, false},
        {FP8(BLOCK(0, 0), SHAPE(1, 1), .nth = 1, .value = -18568), N, K, 1, false},
        {FP8(BLOCK(8, 5), SHAPE(N, 20), .nth = N * 20 + 1, .value = 0), 1, 5, 20, false}, /* behind the last scale */
        {FP8(BLOCK(0, 0), SHAPE(1, 1), .nth = 2, .value = NAN), N, K, 1, false},
        {INTEGERS(MP_AWQ4, BLOCK(0, 32)), 1, 32, 3, false},
        {INTEGERS(MP_AWQ4, BLOCK(0, 32), .nth = 1, .value = 4094), 1, 32, 3, false},
        {INTEGERS(MP_GPTQ4, BLOCK(0, 64), SHAPE(2, N)), 1, 64, 2, false},
        {INTEGERS(MP_GPTQ4, BLOCK(0, 0), SHAPE(1, N), .zeros = "zeros_less_one"), 1, K, 1, true},
        {INTEGERS(MP_GPTQ4, BLOCK(0, 128), SHAPE(1, N)), 1, K, 1, false}, /* larger than the row */
        {INTEGERS(MP_GPTQ4, SHAPE(1, N), .no_block = true), 1, K, 1, false}, /* as a block of 0 */
        {FP8(SHAPE(N, 1), .no_block = true), 1, K, 1, false},
        {INTEGERS(MP_GPTQ4_ORDERED, BLOCK(0, 32), .order_at = K - 1, .order = 2), 1, 32, 3, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_scaled matrix;
        mp_error error;
        MP_CHECK_OK(get(&cases[i].layout, &matrix, &error), &error);
        MP_CHECK_INT(matrix.N, N);
        MP_CHECK_INT(matrix.K, K);
        MP_CHECK_INT(matrix.rows, cases[i].rows);
        MP_CHECK_INT(matrix.group, cases[i].group);
        MP_CHECK_INT(matrix.groups, cases[i].groups);
        MP_CHECK_INT(matrix.zero_offset, cases[i].zero_offset);
    }
}

MP_TEST(files_scaled_refusals) {
    static const char fp8_values[] = "finite scales that are not 0, at most 18568",
                      values[] = "finite scales that are not 0, at most 4094",
                      sizes[] = "groups of a multiple of 32 inputs, and a multiple of 8 outputs",
                      blocks[] = "[1, 1], [64, 1], or one scale for each block of 32 x 16",
                      floats[] = "F32, F16 or BF16";
    static const struct {
        layout layout;
        const char *field, *allowed, *got;
    } cases[] = {
        {FP8(BLOCK(32, 16), SHAPE(3, 6)), "q.scales", blocks, "[3, 6]"},
        {FP8(BLOCK(32, 16), SHAPE(2, 5)), "q.scales", blocks, "[2, 5]"},
        {FP8(BLOCK(32, 16), SHAPE(2, 7)), "q.scales", blocks, "[2, 7]"},
        {FP8(BLOCK(0, 16), SHAPE(2, 6)), "q.scales", "[1, 1], [64, 1], or one scale for each block of 0 x 16",
         "[2, 6]"},
        {FP8(BLOCK(32, 0), SHAPE(2, 6)), "q.scales", "[1, 1], [64, 1], or one scale for each block of 32 x 0",
         "[2, 6]"},
        {FP8(SHAPE(2, 6), .no_block = true), "q.scales", "[1, 1], [64, 1], or one scale for each block of 0 x 0",
         "[2, 6]"},
        {FP8(SHAPE(N, K), .no_block = true), "q.scales", "[1, 1], [64, 1], or one scale for each block of 0 x 0",
         "[64, 96]"},
        {FP8(BLOCK(0, 0), SHAPE(1, 32), .scales = MP_Q8_0), "q.scales", floats, "Q8_0"},
        {FP8(BLOCK(0, 0), SHAPE(1, 1), .nth = 1, .value = 0), "q.scales", fp8_values, "0 at index 0"},
        {FP8(BLOCK(0, 0), SHAPE(N, 1), .nth = 64, .value = INFINITY), "q.scales", fp8_values, "inf at index 63"},
        {FP8(BLOCK(8, 1), SHAPE(N, K), .nth = 513, .value = 18569), "q.scales", fp8_values, "18569 at index 512"},
        {FP8(BLOCK(8, 1), SHAPE(N, K), .nth = N * K, .value = -18569), "q.scales", fp8_values,
         "-18569 at index 6143"},
        {INTEGERS(MP_AWQ4, BLOCK(0, 48)), "q.weight", sizes, "stored in groups of 48 inputs, with 64 outputs"},
        {INTEGERS(MP_GPTQ4, BLOCK(0, 32), .rows = 60), "q.weight", sizes,
         "stored in groups of 32 inputs, with 60 outputs"},
        {INTEGERS(MP_AWQ4, BLOCK(0, 32), SHAPE(2, N)), "q.scales", NULL, "of shape [2, 64]"},
        {INTEGERS(MP_AWQ4, BLOCK(0, 32), .scales = MP_Q8_0), "q.scales", floats, "Q8_0"},
        {INTEGERS(MP_AWQ4, BLOCK(0, 32), .nth = 192, .value = 4095), "q.scales", values, "4095 at index 191"},
        {INTEGERS(MP_GPTQ4, BLOCK(0, 32), .nth = 2, .value = 0), "q.scales", values, "0 at index 1"},
        {INTEGERS(MP_GPTQ4, BLOCK(0, 32), .zeros_are_floats = true), "q.zeros", "I32", "F32"},
        {INTEGERS(MP_GPTQ4, BLOCK(0, 32), .zeros_are_floats = true, .zeros = "zeros_less_one"), "q.zeros_less_one",
         "I32", "F32"},
        {INTEGERS(MP_AWQ4, BLOCK(0, 32), .zeros = "none"), "q.zeros", NULL, "missing"},
        {INTEGERS(MP_GPTQ4_ORDERED, BLOCK(0, 32), .order_is_floats = true), "q.order", "I32", "F32"},
        {INTEGERS(MP_GPTQ4_ORDERED, BLOCK(0, 32), .order_at = 95, .order = 3), "q.order", "groups 0 to 2",
         "3 at index 95"},
        {INTEGERS(MP_GPTQ4_ORDERED, BLOCK(0, 32), .order_at = 0, .order = -1), "q.order", "groups 0 to 2",
         "-1 at index 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_scaled matrix;
        mp_error error;
        MP_CHECK_STATUS(get(&cases[i].layout, &matrix, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, cases[i].field);
        MP_CHECK_STR(error.got, cases[i].got);
        if (cases[i].allowed)
            MP_CHECK_STR(error.allowed, cases[i].allowed);
    }
}

MP_TEST(files_scaled_companions) {
    static const struct { const char *name; bool is; } names[] = {
        {"a.scales", true}, {"blk.0.attn_q.zeros", true}, {"a.zeros_less_one", true}, {"a.order", true},
        {".scales", false}, {".order", false}, {"scales", false}, {"a.scale", false}, {"a.scales.weight", false},
        {"a.weight", false}, {"", false}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (mp_is_companion(names[i].name) != names[i].is)
            MP_FAIL("%s", names[i].name);
}
