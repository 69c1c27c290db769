/* tensor.h: storage types and views of memory. A tensor never owns.
 *
 * Shapes are row-major, outermost first: a linear layer's weight is [out_features, in_features]. */
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
bool mp_dtype_from_name(const char *name, mp_dtype *dtype);
bool mp_dtype_from_ggml(int64_t id, mp_dtype *dtype);
/* Bytes of one row of n items; false when n is not a multiple of the block or the product overflows. */
bool mp_dtype_row_bytes(mp_dtype dtype, int64_t n, uint64_t *bytes);

enum { MP_MAX_DIMS = 4 };

typedef struct mp_tensor {
    mp_dtype dtype;
    int32_t ndim;
    int64_t shape[MP_MAX_DIMS]; /* outermost first; rows are contiguous */
    const uint8_t *data;        /* borrowed: lives as long as the mapping */
    uint64_t nbytes;
} mp_tensor;

/* Elements; shapes were checked against overflow when the tensor was made. */
int64_t mp_tensor_items(const mp_tensor *tensor);
/* A row of the last dimension, rows counted over all outer dimensions. */
const uint8_t *mp_tensor_row(const mp_tensor *tensor, int64_t row);

#endif
