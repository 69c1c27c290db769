/* gguf.h: read GGUF version 2 and 3 into a spec (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
 *
 * The whole header is checked before any size from it is used; tensor data is never read. To read a split model
 * (name-00001-of-00003.gguf), pass its first file: its siblings must be in the same folder. Returns UNSUPPORTED for a
 * tensor type of the format that dtype.def lacks. Header strings are bytes: only keys (ASCII) and tensor names (UTF-8,
 * no NUL) are checked. */
#ifndef MP_FILES_GGUF_H
#define MP_FILES_GGUF_H

#include "files/spec.h"

enum { /* limits; a file beyond one gives LIMIT, naming the limit */
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

/* Create a new, unfrozen spec with files, values (all keys, including the tokenizer), tensors and architecture. The
 * caller owns it (mp_spec_unpin). The architecture stays unset if the file has none: stable-diffusion.cpp writes such
 * files. */
mp_status mp_gguf_read(const char *path, mp_spec **spec, mp_error *error);
/* The same for one file of `size` bytes in memory called `name`, for fuzzing and tests. Refuses split files. */
mp_status mp_gguf_parse(const uint8_t *data, uint64_t size, const char *name, mp_spec **spec, mp_error *error);

#endif
