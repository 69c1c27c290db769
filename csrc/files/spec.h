/* spec.h: a model spec: everything that loading a model needs, in memory. It contains the file paths, one flat typed
 * key-value table in GGUF naming, a tensor table and the bytes of the tokens. Python or gguf.c fills it. The spec is
 * then frozen and shared by reference count; loads, evictions and reloads need nothing else.
 *
 * Not thread-safe until frozen; then read-only and thread-safe. */
#ifndef MP_FILES_SPEC_H
#define MP_FILES_SPEC_H

#include "base/sys.h"
#include "tensor/tensor.h"

typedef struct mp_spec mp_spec;

enum { /* limits of a spec, for every file format */
    MP_SPEC_MAX_KEY = 65535,         /* bytes of a key */
    MP_SPEC_MAX_NAME = 255,          /* bytes of a tensor name */
    MP_SPEC_MAX_ARCHITECTURE = 64,   /* bytes */
    MP_SPEC_MAX_TOKENS = 1 << 20,
    MP_SPEC_MAX_TOKEN_BYTES = 65536  /* bytes of one token */
};

typedef enum mp_value_type {
    MP_VALUE_BOOL,
    MP_VALUE_INT,    /* every integer type of GGUF, as int64; u64 above INT64_MAX is refused */
    MP_VALUE_FLOAT,  /* f32 and f64, as double */
    MP_VALUE_STRING,
    MP_VALUE_BOOLS,
    MP_VALUE_INTS,
    MP_VALUE_FLOATS,
    MP_VALUE_STRINGS
} mp_value_type;

typedef struct mp_value {
    mp_value_type type;
    int32_t gguf_type;    /* type (or element type) as GGUF numbers it; -1: not from GGUF */
    uint64_t count;       /* elements of an array; bytes of a STRING; else 1 */
    union {
        int64_t integer;        /* BOOL, INT */
        double real;            /* FLOAT */
        const char *string;     /* STRING: `count` bytes, then a zero byte */
        const uint8_t *bools;   /* BOOLS [count] */
        const int64_t *integers;/* INTS [count] */
        const double *reals;    /* FLOATS [count] */
        struct {
            const char *bytes;        /* STRINGS: all strings, concatenated */
            const uint64_t *offsets;  /* [count + 1] */
        } strings;
    } as;
} mp_value;

typedef struct mp_tensor_entry {
    const char *name;
    mp_dtype dtype;
    int32_t ndim;
    int64_t shape[MP_MAX_DIMS]; /* outermost first */
    int32_t file;               /* index into the files of the spec */
    uint64_t offset, nbytes;    /* bytes within that file */
} mp_tensor_entry;

typedef struct mp_token_table { /* the bytes that each token adds to the text */
    int32_t count;
    const uint8_t *bytes;
    const uint64_t *offsets;    /* [count + 1] */
    const uint8_t *control;     /* [count], 1: a control token, never part of the text */
    int32_t eog_count;
    const int32_t *eog;         /* ids that end a generation */
} mp_token_table;

mp_spec *mp_spec_create(void);       /* NULL if memory is refused */
mp_spec *mp_spec_pin(mp_spec *spec); /* returns spec */
void mp_spec_unpin(mp_spec *spec);   /* NULL is legal; the last reference frees */

/* Building. Strings and arrays are copied. A failed call leaves the spec unchanged. Each function returns
 * INVALID_ARGUMENT if the spec is frozen. It returns FORMAT for a duplicate key or tensor name, a name longer than its
 * limit, a key that is not printable ASCII, a tensor name that is not UTF-8, or a tensor whose shape and size are
 * inconsistent. Duplicates are found by hashing, in constant time per name. */
mp_status mp_spec_set_architecture(mp_spec *spec, const char *name, mp_error *error);
mp_status mp_spec_add_file(mp_spec *spec, const char *path, mp_error *error);
mp_status mp_spec_set(mp_spec *spec, const char *key, const mp_value *value, mp_error *error);
mp_status mp_spec_add_tensor(mp_spec *spec, const mp_tensor_entry *entry, mp_error *error);
mp_status mp_spec_set_tokens(mp_spec *spec, const mp_token_table *tokens, mp_error *error); /* checks offsets and ids */
/* Adds the spec of a draft model (models/decoder/drafting.h), with a reference, and freezes it. INVALID_ARGUMENT if the
 * spec has a draft model already, or the draft model has one. */
mp_status mp_spec_set_draft(mp_spec *spec, mp_spec *draft, mp_error *error);
void mp_spec_freeze(mp_spec *spec);

/* Reading. Returned pointers are borrowed from the spec. */
const char *mp_spec_architecture(const mp_spec *spec); /* "" when unset */
int mp_spec_file_count(const mp_spec *spec);
const char *mp_spec_file(const mp_spec *spec, int index);
/* The first file, or "model spec" if there is none: the origin of a value, for errors. */
const char *mp_spec_origin(const mp_spec *spec);
/* A spec describes one version of its files. The first call for a file stores `id` as its identity and returns true.
 * Later calls return whether `id` equals the stored identity. Thread-safe, also once frozen. */
bool mp_spec_same_file(const mp_spec *spec, int index, const mp_file_id *id);
/* Store the current identity of every file. Call after the last mp_spec_add_file. Loading then refuses a file that has
 * changed since this call. */
void mp_spec_note_files(const mp_spec *spec);
/* Get the stored identity of a file. Returns false if no identity is stored. */
bool mp_spec_file_identity(const mp_spec *spec, int index, mp_file_id *id);
int mp_spec_value_count(const mp_spec *spec);
const mp_value *mp_spec_value_at(const mp_spec *spec, int index, const char **key);
const mp_value *mp_spec_find(const mp_spec *spec, const char *key); /* NULL if absent */
int mp_spec_tensor_count(const mp_spec *spec);
const mp_tensor_entry *mp_spec_tensor_at(const mp_spec *spec, int index);
const mp_tensor_entry *mp_spec_find_tensor(const mp_spec *spec, const char *name); /* NULL if absent */
const mp_token_table *mp_spec_tokens(const mp_spec *spec); /* NULL if none */
mp_spec *mp_spec_draft(const mp_spec *spec);               /* NULL if none */

/* Typed reading of hyper-parameters, with a range. `key` may start with "{arch}.", which is replaced by the name of the
 * architecture. If the key is absent, sets *out to *def, or returns FORMAT if `def` is NULL. FORMAT for a wrong type or
 * a value outside [low, high]. Use mp_spec_int_capped if the upper bound is a limit of mpool and not of the format:
 * values above `cap` return LIMIT. Floats must be finite. */
mp_status mp_spec_int(const mp_spec *spec, const char *key, int64_t low, int64_t high, const int64_t *def, int64_t *out,
                      mp_error *error);
mp_status mp_spec_int_capped(const mp_spec *spec, const char *key, int64_t low, int64_t cap, const int64_t *def,
                             int64_t *out, mp_error *error);
/* Read a scalar, or a per-layer array of `count` integers. Fills out[count] in both cases. */
mp_status mp_spec_ints(const mp_spec *spec, const char *key, int count, int64_t low, int64_t high, const int64_t *def,
                       int64_t *out, mp_error *error);
mp_status mp_spec_float(const mp_spec *spec, const char *key, double low, double high, const double *def, double *out,
                        mp_error *error);
mp_status mp_spec_bool(const mp_spec *spec, const char *key, const bool *def, bool *out, mp_error *error);
/* *out is borrowed. If the key is absent, sets *out to `def`, or returns FORMAT if `def` is NULL. */
mp_status mp_spec_string(const mp_spec *spec, const char *key, const char *def, const char **out, mp_error *error);

/* Name the file and the key as the user has them, in an error about a hyper-parameter of the spec: the config.json of a
 * folder has other keys than GGUF, and a projector file is another file than the first. The arrays `mpool.origins.0`,
 * `mpool.origins.1`, ... have a file each, then pairs of a hyper-parameter and its key in that file. A hyper-parameter
 * that ends in a dot stands for every field that begins with it. An empty key keeps the field. The first pair that fits
 * counts. Does the same for the draft model. Errors that name another file than the first are not about a value. */
void mp_spec_place_error(const mp_spec *spec, mp_error *error);

#endif
