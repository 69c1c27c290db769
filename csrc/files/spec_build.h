/* spec_build.h: how the readers on this floor fill a spec without copying twice. Not for other floors, mp_is_utf8
 * apart. */
#ifndef MP_FILES_SPEC_BUILD_H
#define MP_FILES_SPEC_BUILD_H

#include "files/spec.h"

/* Memory that lives as long as the spec, on 16 bytes; NULL when refused. Not zeroed. */
void *mp_spec_memory(mp_spec *spec, uint64_t bytes);
/* mp_spec_set without copies: key (zero-terminated, key_length bytes) and everything in value came from
 * mp_spec_memory, and value obeys the rules of mp_value. FORMAT for a duplicate key. */
mp_status mp_spec_adopt(mp_spec *spec, const char *key, uint32_t key_length, const mp_value *value, mp_error *error);
/* Whether a key or a tensor is there, for names that are not zero-terminated. */
bool mp_spec_has_key(const mp_spec *spec, const char *key, uint32_t length);
bool mp_spec_has_tensor(const mp_spec *spec, const char *name, uint32_t length);
/* The entry for writing, until frozen. */
mp_tensor_entry *mp_spec_tensor_edit(mp_spec *spec, int index);
/* What holds for a tensor by itself: dtype, 1 to MP_MAX_DIMS dimensions of at least 1, no overflow, whole blocks,
 * nbytes that follows from them, an end below 2^63. FORMAT names the tensor and what is wrong. */
mp_status mp_spec_check_tensor(const mp_spec *spec, const mp_tensor_entry *entry, mp_error *error);
/* Strict: no overlong forms, no surrogates, nothing above U+10FFFF. NUL is UTF-8. */
bool mp_is_utf8(const char *bytes, uint64_t length);
/* Elements of a shape; false when one is below 1 or the product leaves int64. */
bool mp_shape_items(int ndim, const int64_t *shape, int64_t *items);
/* "[2, 3]" into a buffer, cut to fit. */
void mp_shape_text(int ndim, const int64_t *shape, char *to, size_t size);

#endif
