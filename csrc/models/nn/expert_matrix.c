#include "models/nn/expert_matrix.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "kernels/pack.h"
#include "models/nn/expert_reads.h"

enum { ITEMS = 32, CODE_BYTES = 16, NAME = 64 };

/* ---- loading ----------------------------------------------------------------------------------------------------- */

/* Returns expert i of a tensor that holds all experts, as [rows, columns]. */
static mp_tensor matrix_slice(const mp_tensor *all, int64_t i, int64_t rows, int64_t columns) {
    uint64_t bytes = all->nbytes / (uint64_t)all->shape[0];
    mp_tensor one = {.dtype = all->dtype, .ndim = 2, .data = all->data + (uint64_t)i * bytes, .nbytes = bytes};
    one.shape[0] = rows;
    one.shape[1] = columns;
    return one;
}

static mp_status check_columns(mp_dtype dtype, const char *name, mp_error *error) {
    if (dtype != MP_F32 && dtype != MP_F16 && dtype != MP_BF16)
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s has transposed experts, which must be stored as F32, F16 or "
                       "BF16, got %s", name, mp_dtype_get(dtype)->name);
    return MP_OK;
}

/* Finds the scales of the experts, whose codes are in `tensors`. They are converted to the type that `kind` packs. */
static mp_status find_scales(mp_expert_matrix *matrix, const mp_builder *builder, int layer, const char *part,
                             mp_error *error) {
    char name[NAME];
    mp_wkind kind;
    const mp_dtype stored = matrix->tensors[0].dtype;
    matrix->scaled = mp_alloc_array((size_t)matrix->count, sizeof *matrix->scaled, MP_TAG_WEIGHTS);
    if (!matrix->scaled)
        return mp_fail_memory(error, (uint64_t)matrix->count * sizeof *matrix->scaled, "the list of experts");
    for (int e = 0; e < matrix->count; e++) {
        snprintf(name, sizeof name, "blk.%d.ffn_%s.%d.weight", layer, part, e);
        MP_TRY(mp_weights_get_matrix(builder->weights, name, matrix->N, matrix->K, &matrix->scaled[e], error));
    }
    matrix->layout = MP_EXPERT_SCALED;
    if (mp_wmat_kind_for(stored, builder->compute, &kind))
        matrix->dtype = mp_scaled_rows_type(stored, kind);
    return MP_OK;
}

/* Finds the matrices of all experts in one tensor. Each expert has `joined` parts of N rows, of which this is part
 * `at`. */
static mp_status find_all(mp_expert_matrix *matrix, const mp_weights *weights, const char *name, int joined, int at,
                          mp_error *error) {
    const int64_t sizes[3] = {matrix->count, (int64_t)joined * matrix->N, matrix->K};
    mp_tensor all;
    MP_TRY(mp_weights_get(weights, name, 3, sizes, &all, error));
    for (int e = 0; e < matrix->count; e++) {
        mp_tensor *one = &matrix->tensors[e];
        *one = matrix_slice(&all, e, matrix->N, matrix->K);
        one->nbytes /= (uint64_t)joined;
        one->data += (uint64_t)at * one->nbytes;
    }
    matrix->dtype = all.dtype;
    return MP_OK;
}

static mp_status find_rows(mp_expert_matrix *matrix, const mp_builder *builder, int layer, const char *part,
                           mp_error *error) {
    const mp_weights *weights = builder->weights;
    char name[NAME];
    snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight", layer, part);
    if (mp_weights_has(weights, name))
        return find_all(matrix, weights, name, 1, 0, error);
    snprintf(name, sizeof name, "blk.%d.ffn_gate_up_exps.weight", layer);
    if (strcmp(part, "down") != 0 && mp_weights_has(weights, name))
        return find_all(matrix, weights, name, 2, strcmp(part, "up") == 0, error);
    snprintf(name, sizeof name, "blk.%d.ffn_%s.0.columns", layer, part);
    const bool transposed = mp_weights_has(weights, name);
    int64_t sizes[2] = {transposed ? matrix->K : matrix->N, transposed ? matrix->N : matrix->K};
    for (int e = 0; e < matrix->count; e++) {
        snprintf(name, sizeof name, "blk.%d.ffn_%s.%d.%s", layer, part, e, transposed ? "columns" : "weight");
        MP_TRY(mp_weights_get_any(weights, name, 2, sizes, &matrix->tensors[e], error));
        if (matrix->tensors[e].dtype != matrix->tensors[0].dtype)
            return mp_fail(error, MP_UNSUPPORTED, "tensor %s has another type than the first expert", name);
    }
    matrix->dtype = matrix->tensors[0].dtype;
    matrix->layout = transposed ? MP_EXPERT_COLUMNS : MP_EXPERT_ROWS;
    if (!transposed && mp_dtype_is_scaled(matrix->dtype))
        return find_scales(matrix, builder, layer, part, error);
    return transposed ? check_columns(matrix->dtype, name, error) : MP_OK;
}

static mp_status find_columns(mp_expert_matrix *matrix, const mp_weights *weights, const char *name, int64_t width,
                              mp_error *error) {
    int64_t sizes[3] = {matrix->count, matrix->K, width};
    mp_tensor all;
    MP_TRY(mp_weights_get(weights, name, 3, sizes, &all, error));
    MP_TRY(check_columns(all.dtype, name, error));
    for (int e = 0; e < matrix->count; e++)
        matrix->tensors[e] = matrix_slice(&all, e, matrix->K, width);
    matrix->layout = MP_EXPERT_COLUMNS;
    matrix->dtype = all.dtype;
    return MP_OK;
}

static mp_status find_codes(mp_expert_matrix *matrix, const mp_weights *weights, const char *name, const char *scales,
                            mp_error *error) {
    int64_t rows = (int64_t)matrix->step * matrix->N, blocks = matrix->K / ITEMS;
    int64_t sizes[4] = {matrix->count, rows, blocks, CODE_BYTES};
    mp_tensor all;
    if (matrix->K % ITEMS)
        return mp_fail(error, MP_FORMAT, "tensor %s: experts have %d inputs, must be a multiple of %d", name,
                       matrix->K, ITEMS);
    MP_TRY(mp_weights_get_any(weights, name, 4, sizes, &all, error));
    MP_TRY(mp_weights_get_any(weights, scales, 3, sizes, &matrix->scales, error));
    if (all.dtype != MP_I8 || matrix->scales.dtype != MP_I8)
        return mp_fail(error, MP_UNSUPPORTED, "tensors %s and %s are stored as %s and %s, must be I8", name,
                       scales, mp_dtype_get(all.dtype)->name, mp_dtype_get(matrix->scales.dtype)->name);
    for (int e = 0; e < matrix->count; e++)
        matrix->tensors[e] = matrix_slice(&all, e, rows, blocks * CODE_BYTES);
    matrix->layout = MP_EXPERT_CODES;
    matrix->dtype = MP_MXFP4;
    return MP_OK;
}

/* Finds a matrix in the layouts of model folders. Leaves `layout` at MP_EXPERT_ROWS if the weights have neither of
 * these layouts. */
static mp_status find_in_folder(mp_expert_matrix *matrix, const mp_weights *weights, int layer, const char *part,
                                mp_error *error) {
    char columns[NAME], codes[NAME], scales[NAME], halves[NAME];
    const bool joined = strcmp(part, "down") != 0;
    const char *stem = joined ? "gate_up" : part;
    snprintf(columns, sizeof columns, "blk.%d.ffn_%s_exps.columns", layer, stem);
    snprintf(codes, sizeof codes, "blk.%d.ffn_%s_exps.codes", layer, stem);
    snprintf(scales, sizeof scales, "blk.%d.ffn_%s_exps.scales", layer, stem);
    snprintf(halves, sizeof halves, "blk.%d.ffn_%s_exps.halves", layer, stem);
    if (joined && mp_weights_has(weights, halves)) {
        matrix->first = strcmp(part, "up") == 0 ? matrix->N : 0;
        return find_columns(matrix, weights, halves, 2 * (int64_t)matrix->N, error);
    }
    if (!mp_weights_has(weights, columns) && !mp_weights_has(weights, codes))
        return MP_OK;
    matrix->step = joined ? 2 : 1;
    matrix->first = strcmp(part, "up") == 0;
    if (mp_weights_has(weights, columns))
        return find_columns(matrix, weights, columns, (int64_t)matrix->step * matrix->N, error);
    return find_codes(matrix, weights, codes, scales, error);
}

static mp_status find_biases(mp_expert_matrix *matrix, const mp_weights *weights, int layer, const char *part,
                             bool biased, mp_error *error) {
    char name[NAME];
    snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.bias", layer, matrix->step > 1 ? "gate_up" : part);
    if (!biased) {
        if (mp_weights_has(weights, name))
            return mp_fail(error, MP_UNSUPPORTED, "tensor %s is not part of this architecture", name);
        return MP_OK;
    }
    int64_t sizes[2] = {matrix->count, (int64_t)matrix->step * matrix->N};
    MP_TRY(mp_weights_get(weights, name, 2, sizes, &matrix->biases, error));
    mp_dtype dtype = matrix->biases.dtype;
    if (dtype != MP_F32 && dtype != MP_F16 && dtype != MP_BF16)
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is stored as %s, expert biases must be F32, F16 or "
                       "BF16", name, mp_dtype_get(dtype)->name);
    return MP_OK;
}

/* IQ1, IQ2, IQ3 and TQ1_0 take 1.2 to 2.1 times their stored size when packed; such experts stay in the file, so that a
 * model never needs much more memory than its file. */
static void keep_copies(mp_expert_matrix *matrix, mp_weight_store *store) {
    mp_wmat w;
    mp_wmat_init(&w, matrix->kind, matrix->N, matrix->K);
    if (mp_wmat_bytes(&w) / 20 <= mp_expert_bytes(matrix) / 17)
        matrix->packed = mp_weight_store_add_experts(store, &w, matrix->tensors, matrix->count);
    if (!matrix->packed)
        store->partial = true;
}

mp_status mp_expert_matrix_init(mp_expert_matrix *matrix, const mp_builder *builder, int layer, const char *part,
                                int32_t count, int32_t N, int32_t K, bool biased, mp_error *error) {
    *matrix = (mp_expert_matrix){.count = count, .N = N, .K = K, .step = 1};
    matrix->tensors = mp_alloc_array((size_t)count, sizeof *matrix->tensors, MP_TAG_WEIGHTS);
    if (!matrix->tensors)
        return mp_fail_memory(error, (uint64_t)count * sizeof *matrix->tensors, "the list of experts");
    MP_TRY(find_in_folder(matrix, builder->weights, layer, part, error));
    if (matrix->layout == MP_EXPERT_ROWS)
        MP_TRY(find_rows(matrix, builder, layer, part, error));
    MP_TRY(find_biases(matrix, builder->weights, layer, part, biased, error));
    if (!mp_wmat_kind_for(matrix->dtype, builder->compute, &matrix->kind))
        return mp_fail(error, MP_UNSUPPORTED,
                       "the experts of layer %d are stored as %s, which the requested compute type does not support",
                       layer, mp_dtype_get(matrix->dtype)->name);
    if (matrix->kind == MP_W_I8 && K > MP_I8_MAX_INPUTS)
        return mp_fail(error, MP_UNSUPPORTED, "the experts have %d inputs, int8 allows at most %d", K,
                       MP_I8_MAX_INPUTS);
    builder->store->parameters += (int64_t)count * N * K;
    builder->store->reads.bytes += (uint64_t)count * mp_expert_bytes(matrix);
    if (builder->store->keeps_experts)
        keep_copies(matrix, builder->store);
    return MP_OK;
}

void mp_expert_matrix_deinit(mp_expert_matrix *matrix) {
    mp_free(matrix->tensors);
    mp_free(matrix->scaled);
    matrix->tensors = NULL;
    matrix->scaled = NULL;
}

bool mp_expert_owns(const char *name) {
    if (strstr(name, "_exps."))
        return true;
    const char *part = strstr(name, ".ffn_"), *dot = part ? strchr(part + 1, '.') : NULL;
    return dot && dot[1] >= '0' && dot[1] <= '9';
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static uint64_t row_bytes(const mp_expert_matrix *matrix) {
    const mp_dtype_row *row = mp_dtype_get(matrix->dtype);
    return (uint64_t)(matrix->K / row->items) * (uint64_t)row->bytes;
}

uint64_t mp_expert_bytes(const mp_expert_matrix *matrix) { return (uint64_t)matrix->N * row_bytes(matrix); }

size_t mp_expert_rows_scratch(const mp_expert_matrix *matrix) {
    return matrix->layout == MP_EXPERT_ROWS ? 0 : (size_t)(MP_PANEL_N * row_bytes(matrix));
}

static void join_codes(const mp_expert_matrix *matrix, int expert, int32_t n0, int32_t n, uint8_t *to) {
    const int64_t blocks = matrix->K / ITEMS, rows = (int64_t)matrix->step * matrix->N;
    const uint8_t *all = matrix->tensors[expert].data;
    for (int32_t i = 0; i < n; i++) {
        int64_t row = matrix->first + (int64_t)matrix->step * (n0 + i);
        const uint8_t *scales = mp_tensor_row(&matrix->scales, expert * rows + row);
        mp_mxfp4_join(scales, all + row * blocks * CODE_BYTES, blocks, to + (uint64_t)i * row_bytes(matrix));
    }
}

/* Copies every `step`-th column of a matrix [K, width] of TYPE, n columns from `from` on, to the rows of `to` [n, K].
 * Reads SLICE rows at a time, so that they stay in the cache. */
#define TRANSPOSE(TYPE)                                                   \
    for (int32_t k0 = 0; k0 < K; k0 += SLICE)                             \
        for (int32_t i = 0; i < n; i++)                                   \
            for (int32_t k = k0; k < K && k < k0 + SLICE; k++)            \
                memcpy(to + ((int64_t)i * K + k) * (int64_t)sizeof(TYPE), \
                       from + ((int64_t)k * width + step * i) * (int64_t)sizeof(TYPE), sizeof(TYPE));

static void transpose_columns(const mp_expert_matrix *matrix, int expert, int32_t n0, int32_t n, uint8_t *to) {
    enum { SLICE = 32 };
    const int64_t step = matrix->step, width = matrix->tensors[expert].shape[1];
    const int32_t K = matrix->K, item = mp_dtype_get(matrix->dtype)->bytes;
    const uint8_t *from = matrix->tensors[expert].data + (matrix->first + step * n0) * item;
    if (item == 4) {
        TRANSPOSE(uint32_t)
    } else {
        TRANSPOSE(uint16_t)
    }
}

mp_tensor mp_expert_rows(const mp_expert_matrix *matrix, int expert, int32_t n0, int32_t n, uint8_t *to) {
    mp_tensor rows = {.dtype = matrix->dtype, .ndim = 2, .data = to, .nbytes = (uint64_t)n * row_bytes(matrix)};
    rows.shape[0] = n;
    rows.shape[1] = matrix->K;
    switch (matrix->layout) {
    case MP_EXPERT_ROWS: rows.data = mp_tensor_row(&matrix->tensors[expert], n0); break;
    case MP_EXPERT_COLUMNS: transpose_columns(matrix, expert, n0, n, to); break;
    case MP_EXPERT_CODES: join_codes(matrix, expert, n0, n, to); break;
    case MP_EXPERT_SCALED: mp_scaled_rows(&matrix->scaled[expert], n0, n, matrix->dtype, to); break;
    }
    return rows;
}

void mp_expert_biases(const mp_expert_matrix *matrix, int expert, int32_t n0, int32_t n, float *to) {
    enum { MAX_STEP = 2 };
    const mp_tensor *all = &matrix->biases;
    float stored[MAX_STEP * MP_PANEL_N];
    const uint8_t *at = mp_tensor_row(all, expert) + (int64_t)matrix->step * n0 * mp_dtype_get(all->dtype)->bytes;
    mp_dequantize_row(all->dtype, at, (int64_t)matrix->step * n, stored);
    for (int32_t i = 0; i < n; i++)
        to[i] = stored[matrix->first + matrix->step * i];
}
