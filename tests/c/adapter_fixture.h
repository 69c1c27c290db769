/* adapter_fixture.h: low-rank adapters of tiny models. */
#ifndef ADAPTER_FIXTURE_H
#define ADAPTER_FIXTURE_H

#include "model_fixture.h"

/* Add a matrix of F32, of two dimensions also if it has one row. Returns its offset in the file. */
static inline size_t tiny_matrix(tiny_file *file, const char *name, int64_t rows, int64_t columns, float size) {
    mp_error error;
    const size_t bytes = (size_t)(rows * columns) * sizeof(float), at = (file->used + 63) & ~(size_t)63;
    if (at + bytes > file->capacity) {
        file->capacity = 2 * (at + bytes);
        file->bytes = realloc(file->bytes, file->capacity);
        MP_CHECK(file->bytes);
    }
    for (int64_t i = 0; i < rows * columns; i++)
        tiny_row(&file->random, MP_F32, file->bytes + at + (size_t)i * sizeof(float), 1, size);
    const mp_tensor_entry entry = {.name = name, .dtype = MP_F32, .ndim = 2, .shape = {rows, columns}, .offset = at,
                                   .nbytes = bytes};
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error);
    file->used = at + bytes;
    return at;
}

/* Add the matrices A and B and the scale of the update of `layer` by the adapter `number` (its index plus 1). */
static inline void tiny_low_rank(tiny_file *file, int number, const char *layer, const int64_t a[2],
                                 const int64_t b[2], float size, double scale) {
    char name[128];
    snprintf(name, sizeof name, "adapter.%d.%s.lora_a", number, layer);
    tiny_matrix(file, name, a[0], a[1], size);
    snprintf(name, sizeof name, "adapter.%d.%s.lora_b", number, layer);
    tiny_matrix(file, name, b[0], b[1], size);
    snprintf(name, sizeof name, "adapter.%d.%s.scale", number, layer);
    tiny_float(file->spec, name, scale);
}

/* Add the update of a linear layer [N, K], with random matrices. */
static inline void tiny_update(tiny_file *file, int number, const char *layer, int rank, int N, int K, double scale) {
    tiny_low_rank(file, number, layer, (int64_t[]){rank, K}, (int64_t[]){N, rank}, 0.2f, scale);
}

/* Add the update of an embedding [rows, n], with random matrices. */
static inline void tiny_table_update(tiny_file *file, int number, const char *table, int rank, int rows, int n,
                                     double scale) {
    tiny_low_rank(file, number, table, (int64_t[]){rows, rank}, (int64_t[]){rank, n}, 0.4f, scale);
}

#endif
