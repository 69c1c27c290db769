/* gguf.h: GGUF version 2 and 3 into a spec (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
 *
 * The whole header is checked before anything is sized from it; tensor data is never touched. A split file
 * (name-00001-of-00003.gguf) is read with its siblings, which must lie in the same folder; give its first file. A
 * tensor type that the format has and dtype.def has not is UNSUPPORTED. Header strings are bytes: only keys (ASCII) and
 * tensor names (UTF-8, no NUL) are checked. */
#ifndef MP_FILES_GGUF_H
#define MP_FILES_GGUF_H

#include "files/spec.h"

enum { /* caps; beyond them the answer is LIMIT, naming the cap */
    MP_GGUF_MAX_KEYS = 65536,
    MP_GGUF_MAX_TENSORS = 65536,
    MP_GGUF_MAX_STRING = 16 << 20,
    MP_GGUF_MAX_KEY = 65535,
    MP_GGUF_MAX_NAME = 64,
    MP_GGUF_MAX_ALIGNMENT = 65536,
    MP_GGUF_MAX_SPLITS = 1024,
    MP_GGUF_MAX_ELEMENTS = 1 << 24, /* of all arrays together */
    MP_GGUF_MAX_HEADER = 64 << 20   /* bytes before the tensors' data */
};

/* A new, unfrozen spec with files, values (all keys, tokenizer included), tensors and architecture, which stays unset
 * where a file has none: stable-diffusion.cpp writes such files. */
mp_status mp_gguf_read(const char *path, mp_spec **spec, mp_error *error);
/* The same over bytes in memory, for fuzzing and tests: one file of `size` bytes called `name`; split files are
 * refused. */
mp_status mp_gguf_parse(const uint8_t *data, uint64_t size, const char *name, mp_spec **spec, mp_error *error);

#endif
