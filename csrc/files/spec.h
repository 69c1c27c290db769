/* spec.h: a model spec, everything that loading needs, in memory: files, one flat typed key-value table in GGUF
 * naming, a tensor table, and the tokens' bytes. Python fills it (or gguf.c does from a file); afterwards it is frozen,
 * shared by reference count, and loads, evictions and reloads need nothing else.
 *
 * Not thread-safe until frozen; then read-only and usable from any thread. */
#ifndef MP_FILES_SPEC_H
#define MP_FILES_SPEC_H

#include "base/sys.h"
#include "tensor/tensor.h"

typedef struct mp_spec mp_spec;

enum { /* what a spec holds at most, whatever the file format was */
    MP_SPEC_MAX_KEY = 65535,         /* bytes of a key */
    MP_SPEC_MAX_NAME = 255,          /* bytes of a tensor's name */
    MP_SPEC_MAX_ARCHITECTURE = 64,   /* bytes */
    MP_SPEC_MAX_TOKENS = 1 << 20,
    MP_SPEC_MAX_TOKEN_BYTES = 65536  /* of one token */
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
    int32_t gguf_type;    /* type (or element type) as GGUF numbers it; -1 when it did not come from GGUF */
    uint64_t count;       /* elements of an array; bytes of a STRING; else 1 */
    union {
        int64_t integer;        /* BOOL, INT */
        double real;            /* FLOAT */
        const char *string;     /* STRING: bytes, zero after the last */
        const uint8_t *bools;   /* BOOLS [count] */
        const int64_t *integers;/* INTS [count] */
        const double *reals;    /* FLOATS [count] */
        struct {
            const char *bytes;        /* STRINGS: all of them behind each other */
            const uint64_t *offsets;  /* [count + 1] */
        } strings;
    } as;
} mp_value;

typedef struct mp_tensor_entry {
    const char *name;
    mp_dtype dtype;
    int32_t ndim;
    int64_t shape[MP_MAX_DIMS]; /* outermost first */
    int32_t file;               /* index into the files */
    uint64_t offset, nbytes;    /* bytes within that file */
} mp_tensor_entry;

typedef struct mp_token_table { /* what a token adds to the text */
    int32_t count;
    const uint8_t *bytes;
    const uint64_t *offsets;    /* [count + 1] */
    const uint8_t *control;     /* [count], 1 = never shown */
    int32_t eog_count;
    const int32_t *eog;         /* ids that end a generation */
} mp_token_table;

mp_spec *mp_spec_create(void);       /* NULL when memory is refused */
mp_spec *mp_spec_pin(mp_spec *spec);
void mp_spec_unpin(mp_spec *spec);   /* NULL is legal; the last one frees */
/* A new, unfrozen spec with all that is in spec. */
mp_status mp_spec_copy(const mp_spec *spec, mp_spec **copy, mp_error *error);

/* Building. Strings and arrays are copied. FORMAT for a duplicate key or tensor name (hashed: linear time), a name
 * longer than its limit, a key that is not printable ASCII, a tensor's name that is not UTF-8, a tensor that is wrong
 * by itself (shape, size). A failed call leaves the spec as it was. */
mp_status mp_spec_set_architecture(mp_spec *spec, const char *name, mp_error *error);
mp_status mp_spec_add_file(mp_spec *spec, const char *path, mp_error *error);
mp_status mp_spec_set(mp_spec *spec, const char *key, const mp_value *value, mp_error *error);
mp_status mp_spec_add_tensor(mp_spec *spec, const mp_tensor_entry *entry, mp_error *error);
mp_status mp_spec_set_tokens(mp_spec *spec, const mp_token_table *tokens, mp_error *error); /* checks offsets and ids */
void mp_spec_freeze(mp_spec *spec);

/* Reading. */
const char *mp_spec_architecture(const mp_spec *spec); /* "" when unset */
int mp_spec_file_count(const mp_spec *spec);
const char *mp_spec_file(const mp_spec *spec, int index);
const char *mp_spec_origin(const mp_spec *spec); /* the first of its files, for messages; "" when it has none */
/* The spec describes one content of its files. The first call for a file remembers the identity it is given; later ones
 * answer whether theirs is the same. Any thread, also once frozen. */
bool mp_spec_same_file(const mp_spec *spec, int index, const mp_file_id *id);
/* Gives it those that the paths have now, of a spec that is complete: what is loaded is what was there then. */
void mp_spec_note_files(const mp_spec *spec);
/* The identity that was given first; false when none was yet. */
bool mp_spec_file_identity(const mp_spec *spec, int index, mp_file_id *id);
int mp_spec_value_count(const mp_spec *spec);
const mp_value *mp_spec_value_at(const mp_spec *spec, int index, const char **key);
const mp_value *mp_spec_find(const mp_spec *spec, const char *key); /* NULL when absent */
int mp_spec_tensor_count(const mp_spec *spec);
const mp_tensor_entry *mp_spec_tensor_at(const mp_spec *spec, int index);
const mp_tensor_entry *mp_spec_find_tensor(const mp_spec *spec, const char *name); /* NULL when absent */
const mp_token_table *mp_spec_tokens(const mp_spec *spec); /* NULL when none */

/* Typed reading with a range, for hyper-parameters. `key` may start with "{arch}." which stands for the architecture's
 * name. A missing key is FORMAT unless has_default; a wrong type or a value outside [low, high] is FORMAT (above `high`
 * where `high` is a cap of ours: LIMIT, use mp_spec_int_capped). Floats must be finite. */
mp_status mp_spec_int(const mp_spec *spec, const char *key, int64_t low, int64_t high, const int64_t *def, int64_t *out,
                      mp_error *error);
mp_status mp_spec_int_capped(const mp_spec *spec, const char *key, int64_t low, int64_t cap, const int64_t *def,
                             int64_t *out, mp_error *error);
/* A scalar, or a per-layer array of `count` integers: fills out[count] either way. */
mp_status mp_spec_ints(const mp_spec *spec, const char *key, int count, int64_t low, int64_t high, const int64_t *def,
                       int64_t *out, mp_error *error);
mp_status mp_spec_float(const mp_spec *spec, const char *key, double low, double high, const double *def, double *out,
                        mp_error *error);
mp_status mp_spec_bool(const mp_spec *spec, const char *key, const bool *def, bool *out, mp_error *error);
/* Borrowed; *out = def when absent and def is not NULL. */
mp_status mp_spec_string(const mp_spec *spec, const char *key, const char *def, const char **out, mp_error *error);

#endif
