/* spec_build.h: how the readers in files/ fill a spec without copying twice. Internal to files/, except mp_is_utf8. */
#ifndef MP_FILES_SPEC_BUILD_H
#define MP_FILES_SPEC_BUILD_H

#include "files/spec.h"

/* Allocate memory that lives as long as the spec, aligned to 16 bytes, not zeroed. NULL if memory is refused. */
void *mp_spec_memory(mp_spec *spec, uint64_t bytes);
/* Set a value like mp_spec_set, but without copying. `key` (zero-terminated, key_length bytes) and everything that
 * `value` points to must come from mp_spec_memory. Returns FORMAT for a duplicate key. */
mp_status mp_spec_adopt(mp_spec *spec, const char *key, uint32_t key_length, const mp_value *value, mp_error *error);
/* True if a key or a tensor exists, for names that are not zero-terminated. */
bool mp_spec_has_key(const mp_spec *spec, const char *key, uint32_t length);
bool mp_spec_has_tensor(const mp_spec *spec, const char *name, uint32_t length);
/* Get a tensor entry for writing. Must not be called on a frozen spec. */
mp_tensor_entry *mp_spec_tensor_edit(mp_spec *spec, int index);
/* Check one tensor entry without reading its file: the index of the file and the dtype exist; there are 1 to
 * MP_MAX_DIMS dimensions of at least 1; no product overflows; rows have whole blocks; `nbytes` matches type and shape;
 * the end is below 2^63. The FORMAT error names the tensor and the fault. */
mp_status mp_spec_check_tensor(const mp_spec *spec, const mp_tensor_entry *entry, mp_error *error);
/* Returns true for valid UTF-8. Refuses overlong forms, surrogates and code points above U+10FFFF. Accepts NUL. */
bool mp_is_utf8(const char *bytes, uint64_t length);
/* Multiply the sizes of a shape. Returns false if a size is below 1 or the product overflows int64. */
bool mp_shape_items(int ndim, const int64_t *shape, int64_t *items);
/* Write "[2, 3]" into a buffer, truncated to fit. */
void mp_shape_text(int ndim, const int64_t *shape, char *to, size_t size);

#endif
