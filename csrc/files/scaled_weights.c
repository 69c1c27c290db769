/* scaled_weights.c: see scaled_weights.h. */
#include "files/scaled_weights.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "files/spec_build.h"

enum { NAME = 96 };
static const char *const companions[] = {".scales", ".zeros", ".zeros_less_one", ".order"};

bool mp_is_companion(const char *name) {
    const size_t length = strlen(name);
    for (size_t i = 0; i < sizeof companions / sizeof *companions; i++) {
        const size_t end = strlen(companions[i]);
        if (length > end && strcmp(name + length - end, companions[i]) == 0)
            return true;
    }
    return false;
}

/* Writes the name of a companion of "<name>.weight". */
static void companion(const char *name, const char *end, char out[NAME]) {
    const char *weight = strstr(name, ".weight");
    snprintf(out, NAME, "%.*s%s", weight ? (int)(weight - name) : (int)strlen(name), name, end);
}

static mp_status scaled_refuse(const mp_weights *weights, const char *field, const char *allowed, const char *got,
                               mp_error *error) {
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(mp_weights_spec(weights)), -1, field, allowed, "%s", got);
}

static mp_status check_type(const mp_weights *weights, const char *name, const mp_tensor *tensor, bool is_float,
                            mp_error *error) {
    const mp_dtype dtype = tensor->dtype;
    if (is_float ? dtype == MP_F32 || dtype == MP_F16 || dtype == MP_BF16 : dtype == MP_I32)
        return MP_OK;
    return scaled_refuse(weights, name, is_float ? "F32, F16 or BF16" : "I32", mp_dtype_get(dtype)->name, error);
}

static mp_status check_scales(const mp_weights *weights, const char *name, const mp_scaled *matrix, mp_error *error) {
    enum { SLICE = 512 };
    const mp_tensor *scales = &matrix->scales;
    const bool is_integer = matrix->codes.dtype != MP_F8_E4M3;
    const float most = is_integer ? 4094.0f : 18568.0f; /* 16 * 4094 and 448 * 18568 / 127 are finite as f16 */
    const int64_t items = mp_tensor_items(scales), bytes = mp_dtype_get(scales->dtype)->bytes;
    float values[SLICE];
    for (int64_t at = 0; at < items; at += SLICE) {
        const int64_t n = items - at < SLICE ? items - at : SLICE;
        mp_dequantize_row(scales->dtype, scales->data + at * bytes, n, values);
        for (int64_t i = 0; i < n; i++)
            if (!(fabsf(values[i]) <= most) || values[i] == 0) {
                char got[64];
                snprintf(got, sizeof got, "%g at index %lld", (double)values[i], (long long)(at + i));
                return scaled_refuse(weights, name, is_integer ? "finite scales that are not 0, at most 4094"
                                                                : "finite scales that are not 0, at most 18568",
                                     got, error);
            }
    }
    return MP_OK;
}

static mp_status get_order(const mp_weights *weights, const char *name, mp_scaled *matrix, mp_error *error) {
    char order[NAME];
    const int64_t sizes[1] = {matrix->K};
    companion(name, ".order", order);
    MP_TRY(mp_weights_get_any(weights, order, 1, sizes, &matrix->order, error));
    MP_TRY(check_type(weights, order, &matrix->order, false, error));
    for (int64_t k = 0; k < matrix->K; k++) {
        int32_t group;
        memcpy(&group, matrix->order.data + 4 * k, sizeof group);
        if (group < 0 || group >= matrix->groups) {
            char allowed[48], got[48];
            snprintf(allowed, sizeof allowed, "groups 0 to %d", matrix->groups - 1);
            snprintf(got, sizeof got, "%d at index %lld", group, (long long)k);
            return scaled_refuse(weights, order, allowed, got, error);
        }
    }
    return MP_OK;
}

/* AWQ and GPTQ: `group` inputs share a scale; 0: all inputs. */
static mp_status get_integers(const mp_weights *weights, const char *name, int64_t group, mp_scaled *matrix,
                              mp_error *error) {
    char scales[NAME], zeros[NAME], less[NAME];
    companion(name, ".scales", scales);
    companion(name, ".zeros", zeros);
    companion(name, ".zeros_less_one", less);
    group = group > 0 && group < matrix->K ? group : matrix->K;
    if (group % 32 || matrix->N % 8) {
        char got[96];
        snprintf(got, sizeof got, "stored in groups of %lld inputs, with %d outputs", (long long)group, matrix->N);
        return scaled_refuse(weights, name, "groups of a multiple of 32 inputs, and a multiple of 8 outputs", got,
                             error);
    }
    matrix->rows = 1;
    matrix->group = (int32_t)group;
    matrix->groups = (int32_t)((matrix->K + group - 1) / group);
    const int64_t sizes[2] = {matrix->groups, matrix->N}, packed[2] = {matrix->groups, matrix->N / 8};
    MP_TRY(mp_weights_get(weights, scales, 2, sizes, &matrix->scales, error));
    MP_TRY(check_type(weights, scales, &matrix->scales, true, error));
    MP_TRY(check_scales(weights, scales, matrix, error));
    matrix->zero_offset = mp_weights_has(weights, less);
    const char *found = matrix->zero_offset ? less : zeros;
    MP_TRY(mp_weights_get_any(weights, found, 2, packed, &matrix->zeros, error));
    MP_TRY(check_type(weights, found, &matrix->zeros, false, error));
    return matrix->codes.dtype == MP_GPTQ4_ORDERED ? get_order(weights, name, matrix, error) : MP_OK;
}

/* FP8: a scale per block, per output (scales [N, 1]) or per matrix ([1, 1]). */
static mp_status get_fp8(const mp_weights *weights, const char *name, const int64_t block[2], mp_scaled *matrix,
                         mp_error *error) {
    char scales[NAME], allowed[96];
    const int64_t any[2] = {-1, -1};
    companion(name, ".scales", scales);
    MP_TRY(mp_weights_get(weights, scales, 2, any, &matrix->scales, error));
    MP_TRY(check_type(weights, scales, &matrix->scales, true, error));
    const int64_t rows = matrix->scales.shape[0], groups = matrix->scales.shape[1];
    const int64_t high = rows == 1 ? matrix->N : rows == matrix->N ? 1 : block[0];
    const int64_t wide = groups == 1 ? matrix->K : block[1];
    if (high < 1 || wide < 1 || rows != (matrix->N + high - 1) / high || groups != (matrix->K + wide - 1) / wide) {
        char got[48];
        snprintf(allowed, sizeof allowed, "[1, 1], [%d, 1], or one scale for each block of %lld x %lld", matrix->N,
                 (long long)block[0], (long long)block[1]);
        snprintf(got, sizeof got, "[%lld, %lld]", (long long)rows, (long long)groups);
        return scaled_refuse(weights, scales, allowed, got, error);
    }
    matrix->rows = (int32_t)high;
    matrix->group = (int32_t)wide;
    matrix->groups = (int32_t)groups;
    return check_scales(weights, scales, matrix, error);
}

mp_status mp_weights_get_matrix(const mp_weights *weights, const char *name, int64_t N, int64_t K, mp_scaled *matrix,
                                mp_error *error) {
    const int64_t sizes[2] = {N, K}, none = 0;
    int64_t block[2];
    *matrix = (mp_scaled){0};
    MP_TRY(mp_weights_get_any(weights, name, 2, sizes, &matrix->codes, error));
    if (!mp_dtype_is_scaled(matrix->codes.dtype))
        return MP_OK;
    if (matrix->codes.shape[0] > INT32_MAX || matrix->codes.shape[1] > INT32_MAX) {
        char got[64];
        mp_shape_text(2, matrix->codes.shape, got, sizeof got);
        return scaled_refuse(weights, name, "fewer than 2^31 rows and columns", got, error);
    }
    matrix->N = (int32_t)matrix->codes.shape[0];
    matrix->K = (int32_t)matrix->codes.shape[1];
    MP_TRY(mp_spec_ints(mp_weights_spec(weights), "mpool.scale_block", 2, 0, INT32_MAX, &none, block, error));
    return matrix->codes.dtype == MP_F8_E4M3 ? get_fp8(weights, name, block, matrix, error)
                                             : get_integers(weights, name, block[1], matrix, error);
}
