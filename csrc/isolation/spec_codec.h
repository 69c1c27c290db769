/* spec_codec.h: serialize a model spec, for a process that loads the same model again.
 *
 * Covers everything that a load reads: architecture, files with their stored identity, values, tensors, tokens. Omits
 * the values of tokenizers ("tokenizer."): no loader reads them, and they are most of a spec. */
#ifndef MP_ISOLATION_SPEC_CODEC_H
#define MP_ISOLATION_SPEC_CODEC_H

#include "base/alloc.h"
#include "files/spec.h"

/* Free *bytes with mp_free. */
mp_status mp_spec_encode(const mp_spec *spec, uint8_t **bytes, size_t *size, mp_error *error);
/* Accepts any bytes, at an address that is a multiple of 8. Returns FORMAT if they are not a valid spec. The caller
 * owns the new spec (one reference). */
mp_status mp_spec_decode(const uint8_t *bytes, size_t size, mp_spec **spec, mp_error *error);

#endif
