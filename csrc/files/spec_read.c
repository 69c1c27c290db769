/* spec_read.c: the typed readers declared in spec.h. */
#include <float.h>
#include <math.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "files/spec.h"

typedef struct key_name {
    char text[MP_SPEC_MAX_ARCHITECTURE + 256];
} key_name;

/* Replace a leading "{arch}" by the architecture and look the key up. Sets *value to NULL if the key is absent. */
static mp_status look_up(const mp_spec *spec, const char *key, key_name *name, const mp_value **value,
                         mp_error *error) {
    static const char mark[] = "{arch}";
    const char *head = "", *tail = key;
    if (strncmp(key, mark, sizeof mark - 1) == 0) {
        head = mp_spec_architecture(spec);
        tail = key + sizeof mark - 1;
        if (!head[0])
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "general.architecture",
                                "the name of an architecture", "missing");
    }
    size_t head_bytes = strlen(head), tail_bytes = strlen(tail);
    if (tail_bytes >= sizeof name->text - MP_SPEC_MAX_ARCHITECTURE)
        return mp_fail(error, MP_INTERNAL, "the name of a hyper-parameter is too long: %zu bytes", tail_bytes);
    memcpy(name->text, head, head_bytes);
    memcpy(name->text + head_bytes, tail, tail_bytes + 1);
    *value = mp_spec_find(spec, name->text);
    return MP_OK;
}

static const char *type_name(const mp_value *value) {
    static const char *const names[] = {"a bool",         "an integer",           "a float",
                                        "a string",       "an array of bools",    "an array of integers",
                                        "an array of floats", "an array of strings"};
    return names[value->type];
}

static mp_status spec_missing(const mp_spec *spec, const key_name *name, const char *allowed, mp_error *error) {
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, name->text, allowed, "missing");
}

static mp_status wrong_type(const mp_spec *spec, const key_name *name, const mp_value *value, const char *allowed,
                            mp_error *error) {
    return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, name->text, allowed, "%s", type_name(value));
}

static void int_range(char *to, size_t size, int64_t low, int64_t high) {
    if (high == INT64_MAX)
        snprintf(to, size, "an integer of at least %lld", (long long)low);
    else if (low == high)
        snprintf(to, size, "the integer %lld", (long long)low);
    else
        snprintf(to, size, "an integer from %lld to %lld", (long long)low, (long long)high);
}

static mp_status read_int(const mp_spec *spec, const char *key, int64_t low, int64_t high, mp_status above,
                          const int64_t *def, int64_t *out, mp_error *error) {
    key_name name;
    const mp_value *value = NULL;
    char allowed[96];
    MP_TRY(look_up(spec, key, &name, &value, error));
    int_range(allowed, sizeof allowed, low, high);
    if (above == MP_LIMIT)
        strncat(allowed, " (a limit of mpool)", sizeof allowed - strlen(allowed) - 1);
    if (!value) {
        if (!def)
            return spec_missing(spec, &name, allowed, error);
        *out = *def;
        return MP_OK;
    }
    if (value->type != MP_VALUE_INT)
        return wrong_type(spec, &name, value, allowed, error);
    if (value->as.integer < low || value->as.integer > high) {
        mp_status code = value->as.integer > high ? above : MP_FORMAT;
        return mp_fail_file(error, code, mp_spec_origin(spec), -1, name.text, allowed, "%lld",
                            (long long)value->as.integer);
    }
    *out = value->as.integer;
    return MP_OK;
}

mp_status mp_spec_int(const mp_spec *spec, const char *key, int64_t low, int64_t high, const int64_t *def, int64_t *out,
                      mp_error *error) {
    return read_int(spec, key, low, high, MP_FORMAT, def, out, error);
}

mp_status mp_spec_int_capped(const mp_spec *spec, const char *key, int64_t low, int64_t cap, const int64_t *def,
                             int64_t *out, mp_error *error) {
    return read_int(spec, key, low, cap, MP_LIMIT, def, out, error);
}

mp_status mp_spec_ints(const mp_spec *spec, const char *key, int count, int64_t low, int64_t high, const int64_t *def,
                       int64_t *out, mp_error *error) {
    key_name name;
    const mp_value *value = NULL;
    char range[64], allowed[96];
    MP_TRY(look_up(spec, key, &name, &value, error));
    int_range(range, sizeof range, low, high);
    snprintf(allowed, sizeof allowed, "%s, or an array of %d", range, count);
    if (!value && !def)
        return spec_missing(spec, &name, allowed, error);
    if (value && value->type != MP_VALUE_INT && value->type != MP_VALUE_INTS)
        return wrong_type(spec, &name, value, allowed, error);
    if (value && value->type == MP_VALUE_INTS && value->count != (uint64_t)count)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, name.text, allowed, "an array of %llu",
                            (unsigned long long)value->count);
    for (int i = 0; i < count; i++) {
        int64_t one = !value ? *def : value->type == MP_VALUE_INT ? value->as.integer : value->as.integers[i];
        if (value && (one < low || one > high))
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, name.text, range,
                                value->type == MP_VALUE_INT ? "%lld" : "%lld at index %d", (long long)one, i);
        out[i] = one;
    }
    return MP_OK;
}

mp_status mp_spec_float(const mp_spec *spec, const char *key, double low, double high, const double *def, double *out,
                        mp_error *error) {
    key_name name;
    const mp_value *value = NULL;
    char allowed[96];
    MP_TRY(look_up(spec, key, &name, &value, error));
    bool open_above = high >= FLT_MAX, positive = low > 0 && low <= FLT_MIN;
    if (positive && open_above)
        snprintf(allowed, sizeof allowed, "a finite number above 0");
    else if (positive)
        snprintf(allowed, sizeof allowed, "a number above 0, up to %g", high);
    else if (open_above)
        snprintf(allowed, sizeof allowed, low <= -FLT_MAX ? "a finite number" : "a finite number of at least %g", low);
    else
        snprintf(allowed, sizeof allowed, "a number from %g to %g", low, high);
    if (!value) {
        if (!def)
            return spec_missing(spec, &name, allowed, error);
        *out = *def;
        return MP_OK;
    }
    /* JSON may write 10000.0 as 10000, so accept an integer that does not come from GGUF. GGUF stores the type. */
    bool whole = value->type == MP_VALUE_INT && value->gguf_type == -1;
    if (value->type != MP_VALUE_FLOAT && !whole)
        return wrong_type(spec, &name, value, allowed, error);
    double real = whole ? (double)value->as.integer : value->as.real;
    if (!isfinite(real) || real < low || real > high)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, name.text, allowed, "%g", real);
    *out = real;
    return MP_OK;
}

mp_status mp_spec_bool(const mp_spec *spec, const char *key, const bool *def, bool *out, mp_error *error) {
    key_name name;
    const mp_value *value = NULL;
    MP_TRY(look_up(spec, key, &name, &value, error));
    if (!value) {
        if (!def)
            return spec_missing(spec, &name, "true or false", error);
        *out = *def;
        return MP_OK;
    }
    if (value->type != MP_VALUE_BOOL)
        return wrong_type(spec, &name, value, "true or false", error);
    *out = value->as.integer != 0;
    return MP_OK;
}

mp_status mp_spec_string(const mp_spec *spec, const char *key, const char *def, const char **out, mp_error *error) {
    key_name name;
    const mp_value *value = NULL;
    MP_TRY(look_up(spec, key, &name, &value, error));
    if (!value) {
        if (!def)
            return spec_missing(spec, &name, "a string", error);
        *out = def;
        return MP_OK;
    }
    if (value->type != MP_VALUE_STRING)
        return wrong_type(spec, &name, value, "a string", error);
    const char *zero = value->count ? memchr(value->as.string, 0, value->count) : NULL;
    if (zero)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, name.text, "a string without NUL",
                            "NUL at byte %zu", (size_t)(zero - value->as.string));
    *out = value->as.string;
    return MP_OK;
}

/* Copy a string of an array. Returns false if it is too long. */
static bool copy_string(const mp_value *list, uint64_t index, char *to, size_t size) {
    const uint64_t *offsets = list->as.strings.offsets;
    uint64_t bytes = offsets[index + 1] - offsets[index];
    if (bytes >= size)
        return false;
    memcpy(to, list->as.strings.bytes + offsets[index], bytes);
    to[bytes] = 0;
    return true;
}

/* Return whether an error names a file. Errors cut a long path at its start. */
static bool is_file(const char *shown, const char *path) {
    size_t bytes = strlen(shown), all = strlen(path);
    if (strncmp(shown, "...", 3) == 0 && all >= bytes)
        return strcmp(shown + 3, path + all - (bytes - 3)) == 0;
    return strcmp(shown, path) == 0;
}

/* Return whether a hyper-parameter of the origins is the field of an error, which may lack the architecture. */
static bool is_field(const char *name, const char *field, const char *architecture) {
    size_t bytes = strlen(name), head = strlen(architecture);
    if (bytes && name[bytes - 1] == '.')
        return strncmp(field, name, bytes) == 0;
    return strcmp(field, name) == 0 ||
           (strncmp(name, architecture, head) == 0 && name[head] == '.' && strcmp(field, name + head + 1) == 0);
}

void mp_spec_place_error(const mp_spec *spec, mp_error *error) {
    if (!error || (error->code != MP_FORMAT && error->code != MP_LIMIT) || !error->field[0])
        return;
    if (mp_spec_draft(spec))
        mp_spec_place_error(mp_spec_draft(spec), error);
    if (!is_file(error->file, mp_spec_origin(spec)))
        return;
    for (int i = 0;; i++) {
        char key[32], file[4097], name[sizeof(key_name)], own[sizeof error->field], hint[sizeof error->hint];
        snprintf(key, sizeof key, "mpool.origins.%d", i);
        const mp_value *list = mp_spec_find(spec, key);
        if (!list || list->type != MP_VALUE_STRINGS || !list->count || !copy_string(list, 0, file, sizeof file))
            return;
        for (uint64_t at = 1; at + 1 < list->count; at += 2) {
            if (!copy_string(list, at, name, sizeof name) || !copy_string(list, at + 1, own, sizeof own) ||
                !is_field(name, error->field, mp_spec_architecture(spec)))
                continue;
            memcpy(hint, error->hint, sizeof hint);
            mp_fail_file(error, error->code, file, error->offset, own[0] ? own : error->field, error->allowed, "%s",
                         error->got);
            memcpy(error->hint, hint, sizeof hint);
            return;
        }
    }
}
