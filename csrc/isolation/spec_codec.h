/* spec_codec.h: serialize a model spec, for a process that loads the same model again.
 *
 * Covers what a load reads: architecture, files with their stored identity, values, tensors, tokens. Omits the draft
 * model, because worker processes do not support one, and the values of tokenizers (keys "tokenizer.*"): no loader
 * reads these, and they make up most of a spec. */
#ifndef MP_ISOLATION_SPEC_CODEC_H
#define MP_ISOLATION_SPEC_CODEC_H

#include "base/alloc.h"
#include "files/spec.h"

/* The caller frees *bytes with mp_free. */
mp_status mp_spec_encode(const mp_spec *spec, uint8_t **bytes, size_t *size, mp_error *error);
/* `bytes` may have any content, but must be aligned to 8. Returns FORMAT if the content is not a valid spec. The caller
 * owns the new spec (one reference). */
mp_status mp_spec_decode(const uint8_t *bytes, size_t size, mp_spec **spec, mp_error *error);

#endif
