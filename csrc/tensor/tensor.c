/* tensor.c: see tensor.h. */
#include "tensor/tensor.h"

#include <assert.h>
#include <string.h>

static const mp_dtype_row rows[MP_DTYPE_COUNT] = {
#define MP_DTYPE(NAME, id, items, bytes) [MP_##NAME] = {#NAME, id, items, bytes},
#include "tensor/dtype.def"
#undef MP_DTYPE
};

const mp_dtype_row *mp_dtype_get(mp_dtype dtype) {
    assert((unsigned)dtype < MP_DTYPE_COUNT);
    return &rows[dtype];
}

bool mp_dtype_from_name(const char *name, mp_dtype *dtype) {
    for (int i = 0; i < MP_DTYPE_COUNT; i++) {
        if (strcmp(rows[i].name, name) == 0) {
            *dtype = (mp_dtype)i;
            return true;
        }
    }
    return false;
}

bool mp_dtype_from_ggml(int64_t id, mp_dtype *dtype) {
    if (id < 0) /* -1 marks rows that are not GGUF types */
        return false;
    for (int i = 0; i < MP_DTYPE_COUNT; i++) {
        if (rows[i].ggml_id == id) {
            *dtype = (mp_dtype)i;
            return true;
        }
    }
    return false;
}

bool mp_dtype_row_bytes(mp_dtype dtype, int64_t n, uint64_t *bytes) {
    const mp_dtype_row *row = mp_dtype_get(dtype);
    if (n < 0 || n % row->items != 0)
        return false;
    return !__builtin_mul_overflow((uint64_t)(n / row->items), (uint64_t)row->bytes, bytes);
}

int64_t mp_tensor_items(const mp_tensor *tensor) {
    int64_t items = 1;
    for (int i = 0; i < tensor->ndim; i++)
        items *= tensor->shape[i];
    return items;
}

const uint8_t *mp_tensor_row(const mp_tensor *tensor, int64_t row) {
    uint64_t bytes = 0;
    bool whole = mp_dtype_row_bytes(tensor->dtype, tensor->ndim > 0 ? tensor->shape[tensor->ndim - 1] : 1, &bytes);
    assert(whole && row >= 0 && ((uint64_t)row + 1) * bytes <= tensor->nbytes);
    (void)whole;
    return tensor->data + (uint64_t)row * bytes;
}
