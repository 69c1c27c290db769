/* gguf.h: read GGUF version 2 and 3 into a spec (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
 *
 * The whole header is checked before any size from it is used; tensor data is never read. To read a split model
 * (name-00001-of-00003.gguf), pass its first file: its siblings must be in the same folder. Returns UNSUPPORTED for a
 * GGUF tensor type that dtype.def lacks. String values may contain any bytes; keys must be ASCII, and tensor names
 * UTF-8 without NUL. */
#ifndef MP_FILES_GGUF_H
#define MP_FILES_GGUF_H

#include "files/spec.h"

enum { /* limits; exceeding one returns LIMIT, but FORMAT for MAX_KEY and MAX_NAME, which GGUF itself sets */
    MP_GGUF_MAX_KEYS = 65536,
    MP_GGUF_MAX_TENSORS = 65536,
    MP_GGUF_MAX_STRING = 16 << 20,
    MP_GGUF_MAX_KEY = 65535,
    MP_GGUF_MAX_NAME = 64,
    MP_GGUF_MAX_ALIGNMENT = 65536,
    MP_GGUF_MAX_SPLITS = 1024,
    MP_GGUF_MAX_ELEMENTS = 1 << 24, /* in all arrays together */
    MP_GGUF_MAX_HEADER = 64 << 20   /* bytes before the tensor data */
};

/* Create a new, unfrozen spec with files, values (all keys, including the tokenizer's), tensors and architecture. The
 * caller owns the spec and frees it with mp_spec_unpin. The architecture stays unset if the file does not name one, as
 * in files written by stable-diffusion.cpp. */
mp_status mp_gguf_read(const char *path, mp_spec **spec, mp_error *error);
/* mp_gguf_read for one file in memory (`size` bytes at `data`), for fuzzing and tests. `name` is its name in errors.
 * Refuses split files. */
mp_status mp_gguf_parse(const uint8_t *data, uint64_t size, const char *name, mp_spec **spec, mp_error *error);

#endif
