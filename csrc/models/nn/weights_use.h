/* nn/weights_use.h: whether the matrices of a model are packed at load, packed on use, or used as they are mapped. */
#ifndef MP_MODELS_NN_WEIGHTS_USE_H
#define MP_MODELS_NN_WEIGHTS_USE_H

#include "files/spec.h"
#include "kernels/kernels.h"
#include "models/model.h"

/* How a model uses its weights; the bits are the same. AUTO: matrices of large models are used as they are mapped, and
 * packed on use. MAPPED: matrices are never packed, and their packed data is neither allocated nor charged. PACKED:
 * all matrices are packed before the first step. */
typedef enum mp_weights_use { MP_WEIGHTS_AUTO, MP_WEIGHTS_MAPPED, MP_WEIGHTS_PACKED } mp_weights_use;
/* Reads `mpool.weights` of the spec: auto (default), mapped, packed. auto becomes MAPPED if the spec sets
 * `mpool.float32_fast`, the matrices of its layers are F32, and the sums of the BLAS library differ from ours
 * (mp_blas_differs). */
mp_status mp_weights_use_read(const mp_spec *spec, mp_weights_use *use, mp_error *error);
/* For estimates: as mp_weights_use_read, but AUTO for a value with which the load will fail. */
mp_weights_use mp_weights_use_or_auto(const mp_spec *spec);

/* Matrices that may stay unpacked. Rows of a matrix that is also a table of rows (mp_stored_row) must not depend on
 * packing, which rounds floats to bf16 and int8. */
typedef enum mp_unpacked {
    MP_UNPACKED_NONE,
    MP_UNPACKED_EXACT,   /* those whose values packing does not round */
    MP_UNPACKED_ENCODER, /* AUTO: matrices of F32 that compute in fp32; MAPPED: all */
} mp_unpacked;
/* Returns true if a matrix of type `dtype`, packed as `kind`, may stay unpacked. */
bool mp_may_stay_unpacked(mp_unpacked unpacked, mp_weights_use use, mp_dtype dtype, mp_wkind kind);
/* Reads `mpool.float32_fast` of the spec; false by default. */
mp_status mp_weights_read_fast(const mp_spec *spec, bool *fast, mp_error *error);
/* Matrices that may stay unpacked do so if together they have at least this many bytes. */
uint64_t mp_weights_threshold(mp_weights_use use);
/* Predicts `facts.weights` of a model after its load in this process, without loading it. may_stay: returns true for
 * the matrices that the family adds with `unpacked`. */
mp_matrices mp_weights_predict(const mp_spec *spec, mp_compute compute, mp_unpacked unpacked,
                               bool (*may_stay)(const mp_spec *spec, const mp_tensor_entry *entry));

#endif
