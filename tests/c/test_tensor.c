/* test_tensor.c: tests of tensor/tensor.h. */
#include "mp_test.h"
#include "tensor/tensor.h"

MP_TEST(tensor_dtype_rows_are_found_by_name_and_id) {
    for (int i = 0; i < MP_DTYPE_COUNT; i++) {
        const mp_dtype_row *row = mp_dtype_get((mp_dtype)i);
        MP_CHECK(row->name[0] && row->items >= 1 && row->bytes >= 1);
        mp_dtype found = MP_DTYPE_COUNT;
        MP_CHECK(mp_dtype_from_name(row->name, &found));
        MP_CHECK_INT(found, i);
        found = MP_DTYPE_COUNT;
        if (row->ggml_id >= 0) {
            MP_CHECK(mp_dtype_from_ggml(row->ggml_id, &found));
            MP_CHECK_INT(found, i);
        }
        for (int k = 0; k < i; k++) {
            const mp_dtype_row *other = mp_dtype_get((mp_dtype)k);
            MP_CHECK(strcmp(other->name, row->name) != 0);
            MP_CHECK(row->ggml_id < 0 || other->ggml_id != row->ggml_id);
        }
    }
    mp_dtype found;
    MP_CHECK(!mp_dtype_from_name("f32", &found) && !mp_dtype_from_name("", &found));
    static const int64_t unknown[] = {-1, 4, 5, 38, 1000, INT64_MIN, INT64_MAX, (int64_t)1 << 32};
    for (int i = 0; i < 8; i++)
        MP_CHECK(!mp_dtype_from_ggml(unknown[i], &found));
}

/* The block sizes of the GGUF format, written independently of dtype.def. */
MP_TEST(tensor_dtype_sizes_are_those_of_gguf) {
    static const struct {
        mp_dtype dtype;
        int id, items, bytes;
    } rows[] = {
        {MP_F32, 0, 1, 4},         {MP_F16, 1, 1, 2},         {MP_BF16, 30, 1, 2},       {MP_Q4_0, 2, 32, 2 + 16},
        {MP_Q4_1, 3, 32, 4 + 16},  {MP_Q5_0, 6, 32, 2 + 4 + 16}, {MP_Q5_1, 7, 32, 4 + 4 + 16},
        {MP_Q8_0, 8, 32, 2 + 32},  {MP_Q2_K, 10, 256, 16 + 64 + 4}, {MP_Q3_K, 11, 256, 32 + 64 + 12 + 2},
        {MP_Q4_K, 12, 256, 4 + 12 + 128}, {MP_Q5_K, 13, 256, 4 + 12 + 32 + 128},
        {MP_Q6_K, 14, 256, 128 + 64 + 16 + 2}, {MP_IQ4_NL, 20, 32, 2 + 16}, {MP_MXFP4, 39, 32, 1 + 16},
        {MP_IQ4_XS, 23, 256, 2 + 2 + 4 + 128}, {MP_IQ3_S, 21, 256, 2 + 64 + 8 + 32 + 4},
        {MP_IQ3_XXS, 18, 256, 2 + 64 + 32}, {MP_IQ2_S, 22, 256, 2 + 32 + 32 + 8 + 8}, {MP_IQ2_XS, 17, 256, 2 + 64 + 8},
        {MP_IQ2_XXS, 16, 256, 2 + 64}, {MP_IQ1_M, 29, 256, 32 + 16 + 8}, {MP_IQ1_S, 19, 256, 2 + 32 + 16},
        {MP_TQ1_0, 34, 256, 48 + 4 + 2}, {MP_TQ2_0, 35, 256, 64 + 2}, {MP_NVFP4, 40, 64, 4 + 32},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const mp_dtype_row *row = mp_dtype_get(rows[i].dtype);
        MP_CHECK_INT(row->ggml_id, rows[i].id);
        MP_CHECK_INT(row->items, rows[i].items);
        MP_CHECK_INT(row->bytes, rows[i].bytes);
    }
}

MP_TEST(tensor_row_bytes_refuses_fractions_and_overflow) {
    uint64_t bytes;
    MP_CHECK(mp_dtype_row_bytes(MP_F32, 10, &bytes));
    MP_CHECK_INT(bytes, 40);
    MP_CHECK(mp_dtype_row_bytes(MP_Q4_0, 64, &bytes));
    MP_CHECK_INT(bytes, 36);
    MP_CHECK(mp_dtype_row_bytes(MP_Q6_K, 0, &bytes));
    MP_CHECK_INT(bytes, 0);
    MP_CHECK(!mp_dtype_row_bytes(MP_Q4_0, 33, &bytes));
    MP_CHECK(!mp_dtype_row_bytes(MP_Q4_K, 128, &bytes));
    MP_CHECK(!mp_dtype_row_bytes(MP_F32, -1, &bytes));
    MP_CHECK(!mp_dtype_row_bytes(MP_F64, INT64_MAX, &bytes));
    MP_CHECK(mp_dtype_row_bytes(MP_I8, INT64_MAX, &bytes));
}
