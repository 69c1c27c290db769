/* spec_codec.h: a model spec as bytes, for a process that loads the same model again.
 *
 * Everything a load reads: architecture, files with the identity they had, values, tensors, tokens. Left out are values
 * of tokenizers ("tokenizer."): no loader reads them, and they are most of a spec. */
#ifndef MP_ISOLATION_SPEC_CODEC_H
#define MP_ISOLATION_SPEC_CODEC_H

#include "base/alloc.h"
#include "files/spec.h"

/* *bytes: to be freed with mp_free. */
mp_status mp_spec_encode(const mp_spec *spec, uint8_t **bytes, size_t *size, mp_error *error);
/* Any bytes are accepted as input, at an address that is a multiple of 8: FORMAT when they are no spec. The new spec
 * has one reference. */
mp_status mp_spec_decode(const uint8_t *bytes, size_t size, mp_spec **spec, mp_error *error);

#endif
