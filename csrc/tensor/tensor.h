/* tensor.h: storage types, and views of tensors in memory. A view never owns its data.
 *
 * Shapes are row-major, outermost dimension first: the weight of a linear layer is [out_features, in_features]. */
#ifndef MP_TENSOR_TENSOR_H
#define MP_TENSOR_TENSOR_H

#include "base/error.h"

typedef enum mp_dtype {
#define MP_DTYPE(NAME, id, items, bytes) MP_##NAME,
#include "tensor/dtype.def"
#undef MP_DTYPE
    MP_DTYPE_COUNT
} mp_dtype;

typedef struct mp_dtype_row {
    const char *name;
    int32_t ggml_id, items, bytes; /* items per block, bytes per block */
} mp_dtype_row;

const mp_dtype_row *mp_dtype_get(mp_dtype dtype); /* asserts a valid dtype */
/* Find a type by its name, or by its number in GGUF. Return false, and leave *dtype unchanged, if there is none. */
bool mp_dtype_from_name(const char *name, mp_dtype *dtype);
bool mp_dtype_from_ggml(int64_t id, mp_dtype *dtype);
/* Compute the bytes of one row of n items. Returns false if n is not a multiple of the block size or the result
 * overflows. */
bool mp_dtype_row_bytes(mp_dtype dtype, int64_t n, uint64_t *bytes);

enum { MP_MAX_DIMS = 4 };

typedef struct mp_tensor {
    mp_dtype dtype;
    int32_t ndim;
    int64_t shape[MP_MAX_DIMS]; /* outermost first; rows are contiguous */
    const uint8_t *data;        /* borrowed: valid while its file is mapped */
    uint64_t nbytes;
} mp_tensor;

/* Number of elements. Cannot overflow: shapes are checked when a tensor is built. */
int64_t mp_tensor_items(const mp_tensor *tensor);
/* Address of a row of the last dimension. `row` is a flat index over all outer dimensions. Asserts that the row is
 * inside the data. */
const uint8_t *mp_tensor_row(const mp_tensor *tensor, int64_t row);

#endif
