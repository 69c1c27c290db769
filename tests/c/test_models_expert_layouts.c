/* test_models_expert_layouts.c: the layouts in which files store the matrices of experts, and the error of each layout
 * that is refused. */
#include <math.h>

#include "kernels/kernels.h"
#include "models/nn/experts.h"
#include "parts_fixture.h"

enum { COUNT = 2, ROWS = 32, COLUMNS = 64, MAX = 3 };

typedef struct stored_tensor {
    const char *name; /* NULL: none */
    mp_dtype dtype;
    int ndim;
    int64_t shape[4];
} stored_tensor;

typedef struct stored_experts {
    const char *part;
    int32_t rows, columns;
    bool biased;
    stored_tensor tensors[MAX];
    mp_status status;
    const char *message; /* part of it */
} stored_experts;

static void add_tensor(mp_spec *spec, const stored_tensor *from, uint64_t *used) {
    mp_error error;
    mp_tensor_entry entry = {.name = from->name, .dtype = from->dtype, .ndim = from->ndim, .offset = *used};
    memcpy(entry.shape, from->shape, sizeof entry.shape);
    MP_CHECK(mp_dtype_row_bytes(from->dtype, from->shape[from->ndim - 1], &entry.nbytes));
    for (int d = 0; d < from->ndim - 1; d++)
        entry.nbytes *= (uint64_t)from->shape[d];
    MP_CHECK_OK(mp_spec_add_tensor(spec, &entry, &error), &error);
    *used += (entry.nbytes + 63) / 64 * 64;
}

typedef struct opened {
    mp_spec *spec;
    mp_weights *weights;
    mp_weight_store store;
    mp_builder builder;
    mp_expert_matrix matrix;
} opened;

/* Read a matrix of experts from up to MAX tensors, which stand one after another in the file. */
static mp_status open_matrix(opened *o, const char *path, const stored_experts *row, mp_error *error) {
    uint64_t used = 0;
    o->spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_add_file(o->spec, path, error), error);
    for (int t = 0; t < MAX && row->tensors[t].name; t++)
        add_tensor(o->spec, &row->tensors[t], &used);
    MP_CHECK_OK(mp_weights_open(o->spec, &o->weights, error), error);
    mp_builder_init(&o->builder, &o->store, o->weights, MP_COMPUTE_F32);
    return mp_expert_matrix_init(&o->matrix, &o->builder, 0, row->part, COUNT, row->rows, row->columns, row->biased,
                                 error);
}

static void close_matrix(opened *o) {
    mp_expert_matrix_deinit(&o->matrix);
    mp_weight_store_deinit(&o->store);
    mp_weights_close(o->weights);
    mp_spec_unpin(o->spec);
}

static void check_experts(const stored_experts *row, const char *path) {
    mp_error error;
    opened o = {0};
    mp_status status = open_matrix(&o, path, row, &error);
    MP_CHECK_STATUS(status, row->status, &error);
    if (status != MP_OK)
        MP_CHECK_HAS(error.message, row->message);
    close_matrix(&o);
}

#define ALL "blk.0.ffn_down_exps."
#define PAIR "blk.0.ffn_gate_up_exps."
#define ONE "blk.0.ffn_down.0."
#define TWO "blk.0.ffn_down.1."

MP_TEST(models_expert_layouts) {
    static const stored_experts rows[] = {
        /* all experts in one tensor */
        {"down", ROWS, COLUMNS, false, {{ALL "weight", MP_Q8_0, 3, {2, 32, 64}}}, MP_OK, ""},
        {"gate", ROWS, COLUMNS, false, {{PAIR "columns", MP_F16, 3, {2, 64, 64}}}, MP_OK, ""},
        {"down", ROWS, COLUMNS, false, {{ALL "columns", MP_BF16, 3, {2, 64, 32}}}, MP_OK, ""},
        {"up", ROWS, COLUMNS, false, {{PAIR "columns", MP_Q8_0, 3, {2, 64, 64}}}, MP_UNSUPPORTED,
         "tensor " PAIR "columns has transposed experts, which must be stored as F32, F16 or BF16, got Q8_0"},
        /* a tensor for each expert */
        {"down", ROWS, COLUMNS, false, {{ONE "weight", MP_Q8_0, 2, {32, 64}}, {TWO "weight", MP_Q8_0, 2, {32, 64}}},
         MP_OK, ""},
        {"down", ROWS, COLUMNS, false, {{ONE "columns", MP_F32, 2, {64, 32}}, {TWO "columns", MP_F32, 2, {64, 32}}},
         MP_OK, ""},
        {"down", ROWS, COLUMNS, false, {{ONE "columns", MP_Q8_0, 2, {64, 32}}, {TWO "columns", MP_Q8_0, 2, {64, 32}}},
         MP_UNSUPPORTED, "transposed experts, which must be stored as F32, F16 or BF16, got Q8_0"},
        {"down", ROWS, COLUMNS, false, {{ONE "weight", MP_F16, 2, {32, 64}}, {TWO "weight", MP_BF16, 2, {32, 64}}},
         MP_UNSUPPORTED, "tensor " TWO "weight has another type than the first expert"},
        {"down", ROWS, COLUMNS, false, {{ONE "weight", MP_F16, 2, {32, 64}}}, MP_FORMAT, TWO "weight"},
        {"down", ROWS, COLUMNS, false, {{ONE "weight", MP_I32, 2, {32, 64}}, {TWO "weight", MP_I32, 2, {32, 64}}},
         MP_UNSUPPORTED, "the experts of layer 0 are stored as I32, which the requested compute type does not support"},
        /* FP8 has separate scales */
        {"down", ROWS, COLUMNS, false,
         {{ONE "weight", MP_F8_E4M3, 2, {32, 64}}, {TWO "weight", MP_F8_E4M3, 2, {32, 64}}}, MP_FORMAT, ONE "scales"},
        /* codes and scales */
        {"down", ROWS, COLUMNS, false, {{ALL "codes", MP_I8, 4, {2, 32, 2, 16}}, {ALL "scales", MP_I8, 3, {2, 32, 2}}},
         MP_OK, ""},
        {"gate", ROWS, COLUMNS, false,
         {{PAIR "codes", MP_I8, 4, {2, 64, 2, 16}}, {PAIR "scales", MP_I8, 3, {2, 64, 2}}}, MP_OK, ""},
        {"down", ROWS, COLUMNS, false, {{ALL "codes", MP_F32, 4, {2, 32, 2, 16}}, {ALL "scales", MP_I8, 3, {2, 32, 2}}},
         MP_UNSUPPORTED, "are stored as F32 and I8, must be I8"},
        {"down", ROWS, COLUMNS, false, {{ALL "codes", MP_I8, 4, {2, 32, 2, 16}}, {ALL "scales", MP_F32, 3, {2, 32, 2}}},
         MP_UNSUPPORTED, "are stored as I8 and F32, must be I8"},
        {"down", ROWS, 72, false, {{ALL "codes", MP_I8, 4, {2, 32, 2, 16}}, {ALL "scales", MP_I8, 3, {2, 32, 2}}},
         MP_FORMAT, "experts have 72 inputs, must be a multiple of 32"},
        {"down", ROWS, COLUMNS, false, {{ALL "codes", MP_I8, 4, {2, 32, 2, 16}}}, MP_FORMAT, ALL "scales"},
        /* biases */
        {"down", ROWS, COLUMNS, true, {{ALL "weight", MP_F32, 3, {2, 32, 64}}, {ALL "bias", MP_BF16, 2, {2, 32}}},
         MP_OK, ""},
        {"down", ROWS, COLUMNS, true, {{ALL "weight", MP_F32, 3, {2, 32, 64}}, {ALL "bias", MP_Q8_0, 2, {2, 32}}},
         MP_UNSUPPORTED, "tensor " ALL "bias is stored as Q8_0, expert biases must be F32, F16 or BF16"},
        {"down", ROWS, COLUMNS, true, {{ALL "weight", MP_F32, 3, {2, 32, 64}}, {ALL "bias", MP_F32, 2, {2, 31}}},
         MP_FORMAT, ALL "bias"},
        {"down", ROWS, COLUMNS, true, {{ALL "weight", MP_F32, 3, {2, 32, 64}}}, MP_FORMAT, ALL "bias"},
        {"down", ROWS, COLUMNS, false, {{ALL "weight", MP_F32, 3, {2, 32, 64}}, {ALL "bias", MP_F32, 2, {2, 32}}},
         MP_UNSUPPORTED, "tensor " ALL "bias is not part of this architecture"},
        {"up", ROWS, COLUMNS, true, {{PAIR "columns", MP_F32, 3, {2, 64, 64}}, {PAIR "bias", MP_F32, 2, {2, 64}}},
         MP_OK, ""},
    };
    char path[512];
    mp_error error;
    uint8_t *zeros = calloc(1, 65536);
    MP_CHECK(zeros);
    snprintf(path, sizeof path, "%s/layouts.bin", mp_test_directory());
    mp_test_write_file(path, zeros, 65536);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check_experts(&rows[i], path);
    free(zeros);
}

/* ---- the rows of experts in each layout -------------------------------------------------------------------------- */

/* A 4-bit number with 2 bits of exponent and 1 of mantissa, as OCP's microscaling formats define it. */
static float fp4(int code) {
    static const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}

/* Codes of gate and up alternate row by row. A byte has two neighbouring inputs, the first in its low bits. */
MP_TEST(models_expert_layouts_join_codes_and_scales) {
    enum { BLOCKS = COLUMNS / 32, ALL_ROWS = 2 * ROWS, CODES = COUNT * ALL_ROWS * COLUMNS / 2,
           SCALES = COUNT * ALL_ROWS * BLOCKS };
    static uint8_t bytes[CODES + SCALES];
    static const char *const parts[] = {"gate", "up"};
    mp_test_random random = {31};
    char path[512];
    mp_error error;
    for (int i = 0; i < CODES; i++)
        bytes[i] = (uint8_t)mp_test_random_u64(&random);
    for (int i = 0; i < SCALES; i++)
        bytes[CODES + i] = (uint8_t)(120 + mp_test_random_u64(&random) % 16);
    snprintf(path, sizeof path, "%s/codes.bin", mp_test_directory());
    mp_test_write_file(path, bytes, sizeof bytes);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int p = 0; p < 2; p++) {
        const stored_experts stored = {
            .part = parts[p],
            .rows = ROWS,
            .columns = COLUMNS,
            .tensors = {{PAIR "codes", MP_I8, 4, {COUNT, ALL_ROWS, BLOCKS, 16}},
                        {PAIR "scales", MP_I8, 3, {COUNT, ALL_ROWS, BLOCKS}}},
        };
        opened o = {0};
        _Static_assert(CODES % 64 == 0, "the scales follow the codes without a gap");
        MP_CHECK_OK(open_matrix(&o, path, &stored, &error), &error);
        for (int e = 0; e < COUNT; e++)
            for (int n0 = 0; n0 < ROWS; n0 += 5) {
                const int n = ROWS - n0 < 5 ? ROWS - n0 : 5;
                static uint8_t scratch[MP_PANEL_N * 4 * COLUMNS];
                MP_CHECK(mp_expert_rows_scratch(&o.matrix) <= sizeof scratch);
                const mp_tensor rows = mp_expert_rows(&o.matrix, e, n0, n, scratch);
                MP_CHECK(rows.shape[0] == n && rows.shape[1] == COLUMNS);
                for (int r = 0; r < n; r++) {
                    float got[COLUMNS];
                    const int row = (e * ALL_ROWS + 2 * (n0 + r) + p);
                    mp_dequantize_row(rows.dtype, mp_tensor_row(&rows, r), COLUMNS, got);
                    for (int k = 0; k < COLUMNS; k++) {
                        const int code = bytes[row * COLUMNS / 2 + k / 2] >> (k % 2 ? 4 : 0) & 15;
                        const float scale = ldexpf(1, bytes[CODES + row * BLOCKS + k / 32] - 127);
                        MP_CHECK(got[k] == fp4(code) * scale);
                    }
                }
            }
        close_matrix(&o);
    }
}

/* A transposed matrix of each type; those of gate and up alternate column by column. */
MP_TEST(models_expert_layouts_transpose_columns) {
    enum { BYTES = COUNT * COLUMNS * 2 * ROWS * 4 };
    static uint8_t bytes[BYTES];
    static const mp_dtype types[] = {MP_F32, MP_F16, MP_BF16};
    static const struct {
        const char *part, *name;
        int step, first;
    } parts[] = {{"gate", PAIR "columns", 2, 0}, {"up", PAIR "columns", 2, 1}, {"down", ALL "columns", 1, 0}};
    mp_test_random random = {32};
    char path[512];
    mp_error error;
    for (int i = 0; i < BYTES; i++)
        bytes[i] = (uint8_t)mp_test_random_u64(&random);
    snprintf(path, sizeof path, "%s/columns.bin", mp_test_directory());
    mp_test_write_file(path, bytes, sizeof bytes);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int i = 0; i < 9; i++) {
        const mp_dtype type = types[i % 3];
        const size_t item = mp_dtype_get(type)->bytes;
        const int step = parts[i / 3].step, width = step * ROWS;
        const stored_experts stored = {
            .part = parts[i / 3].part,
            .rows = ROWS,
            .columns = COLUMNS,
            .tensors = {{parts[i / 3].name, type, 3, {COUNT, COLUMNS, width}}},
        };
        opened o = {0};
        MP_CHECK_OK(open_matrix(&o, path, &stored, &error), &error);
        MP_CHECK_INT(mp_expert_bytes(&o.matrix), ROWS * COLUMNS * item);
        for (int e = 0; e < COUNT; e++) {
            enum { FROM = 3, SOME = 7 };
            uint8_t scratch[MP_PANEL_N * COLUMNS * 4];
            MP_CHECK_INT(mp_expert_rows_scratch(&o.matrix), MP_PANEL_N * COLUMNS * item);
            const mp_tensor rows = mp_expert_rows(&o.matrix, e, FROM, SOME, scratch);
            MP_CHECK(rows.dtype == type && rows.nbytes == SOME * COLUMNS * item);
            for (int r = 0; r < SOME; r++)
                for (int k = 0; k < COLUMNS; k++) {
                    const size_t column = (size_t)(parts[i / 3].first + step * (FROM + r));
                    MP_CHECK(memcmp(mp_tensor_row(&rows, r) + (size_t)k * item,
                                    bytes + ((size_t)(e * COLUMNS + k) * (size_t)width + column) * item, item) == 0);
                }
        }
        close_matrix(&o);
    }
}
