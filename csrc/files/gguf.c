/* gguf.c: the GGUF parser. See gguf.h.
 *
 * Order of the checks: a count or length from the file is first compared with the bytes that are left, then with its
 * limit (MP_GGUF_MAX_*), and only then used or allocated. Each error names the field, the value found and the allowed
 * values. Tensor offsets are relative to the tensor data, whose start is known only after the last tensor
 * record; resolve_offsets makes them absolute and checks the end of the file. */
#include "files/gguf.h"

#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "files/cursor.h"
#include "files/file_map.h"
#include "files/spec_build.h"

enum { /* value types of the GGUF format */
    G_U8, G_I8, G_U16, G_I16, G_U32, G_I32, G_F32, G_BOOL, G_STRING, G_ARRAY, G_U64, G_I64, G_F64, G_TYPES
};
static const uint8_t type_bytes[G_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8}; /* 0: no fixed size */

enum {
    HEADER_BYTES = 24,
    MIN_VALUE_RECORD = 8 + 1 + 4 + 1,          /* key length, key, type, one byte */
    MIN_TENSOR_RECORD = 8 + 1 + 4 + 8 + 4 + 8, /* length of a name, the name, number of sizes, a size, type, offset */
    DEFAULT_ALIGNMENT = 32
};

/* Types of the GGUF format that dtype.def lacks, so that the error can name them. */
static const struct { int32_t id; const char *name; } unsupported_types[] = {
    {9, "Q8_1"}, {15, "Q8_K"}, {41, "Q1_0"},
};

typedef struct reader {
    mp_cursor c;
    mp_spec *spec;
    uint64_t value_count, tensor_count, alignment;
    uint64_t elements;   /* elements of all arrays so far; each uses up to 8 bytes in memory, 1 or more in the file */
    uint64_t data_bytes; /* bytes of all tensors read so far, each padded to `alignment` */
} reader;

/* Fail with an error about the file being read. `at` is the byte offset of the field. */
#define REFUSE_AT(code, at, field, allowed, ...) \
    mp_fail_file(error, code, r->c.file, (int64_t)(at), field, allowed, __VA_ARGS__)
#define REFUSE(at, field, allowed, ...) REFUSE_AT(MP_FORMAT, at, field, allowed, __VA_ARGS__)
#define LL(x) ((unsigned long long)(x))

/* The largest text of allowed_most. */
enum { ALLOWED_BYTES = 128 };

/* Write "at most N UNIT (a limit of mpool)", where N is grouped by thousands. Returns `out`. */
static const char *allowed_most(char out[ALLOWED_BYTES], const char *before, uint64_t most, const char *unit) {
    char digits[24], grouped[32];
    const int count = snprintf(digits, sizeof digits, "%llu", LL(most));
    int at = 0;
    for (int i = 0; i < count; i++) {
        if (i && (count - i) % 3 == 0)
            grouped[at++] = ',';
        grouped[at++] = digits[i];
    }
    grouped[at] = '\0';
    snprintf(out, ALLOWED_BYTES, "%sat most %s%s (a limit of mpool)", before, grouped, unit);
    return out;
}

/* Fail because the value of a field is above a limit of mpool. The rest describes the value. */
#define REFUSE_ABOVE(at, field, before, most, unit, ...) \
    REFUSE_AT(MP_LIMIT, at, field, allowed_most((char[ALLOWED_BYTES]){0}, before, most, unit), __VA_ARGS__)

static mp_status no_memory(mp_error *error, uint64_t bytes) {
    return mp_fail_memory(error, bytes, "the header of a GGUF file");
}

/* Read a length and borrow that many bytes. */
static mp_status read_string(reader *r, const char *field, const uint8_t **bytes, uint64_t *length, mp_error *error) {
    uint64_t at = r->c.at;
    MP_TRY(mp_cursor_u64(&r->c, field, length, error));
    if (*length > mp_cursor_left(&r->c))
        return REFUSE(at, field, "a string that ends within the file", "%llu bytes long with %llu left",
                      LL(*length), LL(mp_cursor_left(&r->c)));
    if (*length > MP_GGUF_MAX_STRING)
        return REFUSE_ABOVE(at, field, "", MP_GGUF_MAX_STRING, " bytes", "%llu bytes long", LL(*length));
    return mp_cursor_take(&r->c, *length, field, bytes, error);
}

/* --- header --- */

static mp_status read_header(reader *r, mp_error *error) {
    if (r->c.size < HEADER_BYTES)
        return REFUSE(0, "header", "at least 24 bytes", "%llu bytes", LL(r->c.size));
    const uint8_t *magic;
    uint32_t version;
    MP_TRY(mp_cursor_take(&r->c, 4, "magic", &magic, error));
    if (memcmp(magic, "GGUF", 4) != 0)
        return REFUSE(0, "magic", "GGUF (47 47 55 46); is this another kind of file?", "%02x %02x %02x %02x", magic[0],
                      magic[1], magic[2], magic[3]);
    MP_TRY(mp_cursor_u32(&r->c, "version", &version, error));
    if (version != 2 && version != 3) {
        uint32_t swapped = __builtin_bswap32(version);
        if (swapped == 2 || swapped == 3)
            return REFUSE(4, "version", "2 or 3, little-endian; convert the file", "%u, big-endian", swapped);
        return REFUSE(4, "version", version == 1 ? "2 or 3; convert the model again" : "2 or 3", "%u", version);
    }
    MP_TRY(mp_cursor_u64(&r->c, "tensor_count", &r->tensor_count, error));
    MP_TRY(mp_cursor_u64(&r->c, "kv_count", &r->value_count, error));
    uint64_t left = mp_cursor_left(&r->c);
    if (r->tensor_count > left / MIN_TENSOR_RECORD)
        return REFUSE(8, "tensor_count", "as many as the rest of the file can hold", "%llu, with %llu bytes left",
                      LL(r->tensor_count), LL(left));
    if (r->value_count > (left - r->tensor_count * MIN_TENSOR_RECORD) / MIN_VALUE_RECORD)
        return REFUSE(16, "kv_count", "as many as the rest of the file can hold", "%llu, with %llu bytes left",
                      LL(r->value_count), LL(left));
    if (r->tensor_count > MP_GGUF_MAX_TENSORS)
        return REFUSE_ABOVE(8, "tensor_count", "", MP_GGUF_MAX_TENSORS, "", "%llu", LL(r->tensor_count));
    if (r->value_count > MP_GGUF_MAX_KEYS)
        return REFUSE_ABOVE(16, "kv_count", "", MP_GGUF_MAX_KEYS, "", "%llu", LL(r->value_count));
    return MP_OK;
}

/* --- values --- */

static mp_status read_key(reader *r, const char **key, mp_error *error) {
    uint64_t at = r->c.at, length;
    const uint8_t *bytes;
    MP_TRY(mp_cursor_u64(&r->c, "key length", &length, error));
    if (length == 0 || length > MP_GGUF_MAX_KEY || length > mp_cursor_left(&r->c))
        return REFUSE(at, "key length", "1 to 65535, and at most the bytes left", "%llu, with %llu bytes left",
                      LL(length), LL(mp_cursor_left(&r->c)));
    MP_TRY(mp_cursor_take(&r->c, length, "key", &bytes, error));
    char *copy = mp_spec_memory(r->spec, length + 1);
    if (!copy)
        return no_memory(error, length + 1);
    memcpy(copy, bytes, length);
    copy[length] = 0;
    for (uint64_t i = 0; i < length; i++)
        if (copy[i] < 0x20 || copy[i] > 0x7E)
            return REFUSE(at + 8 + i, "key", "printable ASCII", "byte %02x", (uint8_t)copy[i]);
    if (mp_spec_has_key(r->spec, copy, (uint32_t)length))
        return REFUSE(at, "key", "each key once", "a duplicate: %s", copy);
    *key = copy;
    return MP_OK;
}

static int64_t integer_at(uint32_t type, const uint8_t *p, bool *good) {
    union { uint16_t u16; int16_t i16; uint32_t u32; int32_t i32; uint64_t u64; int64_t i64; } x;
    x.u64 = 0;
    memcpy(&x, p, type_bytes[type]);
    switch (type) {
    case G_U8: return p[0];
    case G_I8: return (int8_t)p[0];
    case G_U16: return x.u16;
    case G_I16: return x.i16;
    case G_U32: return x.u32;
    case G_I32: return x.i32;
    case G_U64:
        if (x.u64 > INT64_MAX)
            *good = false;
        return x.i64;
    default: return x.i64;
    }
}

static double real_at(uint32_t type, const uint8_t *p) {
    float single;
    double real;
    if (type == G_F32) {
        memcpy(&single, p, 4);
        return single;
    }
    memcpy(&real, p, 8);
    return real;
}

static mp_value_type kind_of(uint32_t type) {
    return type == G_BOOL                     ? MP_VALUE_BOOL
           : type == G_STRING                 ? MP_VALUE_STRING
           : type == G_F32 || type == G_F64   ? MP_VALUE_FLOAT
                                              : MP_VALUE_INT;
}

static mp_status refuse_integer(reader *r, uint64_t at, const char *key, int64_t value, mp_error *error) {
    return REFUSE(at, key, "an integer below 2^63", "%llu", LL(value));
}

static mp_status refuse_bool(reader *r, uint64_t at, const char *key, uint8_t value, mp_error *error) {
    return REFUSE(at, key, "0 or 1", "a bool of value %u", value);
}

static mp_status read_scalar(reader *r, const char *key, uint32_t type, mp_value *value, mp_error *error) {
    uint64_t at = r->c.at;
    const uint8_t *bytes;
    bool good = true;
    value->type = kind_of(type);
    value->count = 1;
    if (type == G_STRING) {
        MP_TRY(read_string(r, key, &bytes, &value->count, error));
        char *copy = mp_spec_memory(r->spec, value->count + 1);
        if (!copy)
            return no_memory(error, value->count + 1);
        memcpy(copy, bytes, value->count);
        copy[value->count] = 0;
        value->as.string = copy;
        return MP_OK;
    }
    MP_TRY(mp_cursor_take(&r->c, type_bytes[type], key, &bytes, error));
    if (value->type == MP_VALUE_FLOAT) {
        value->as.real = real_at(type, bytes);
        return MP_OK;
    }
    value->as.integer = type == G_BOOL ? bytes[0] : integer_at(type, bytes, &good);
    if (!good)
        return refuse_integer(r, at, key, value->as.integer, error);
    if (type == G_BOOL && value->as.integer > 1)
        return refuse_bool(r, at, key, (uint8_t)value->as.integer, error);
    return MP_OK;
}

/* Check that the header, as far as it is read, ends within its limit. `at` is the byte offset of what was read last. */
static mp_status check_header_size(reader *r, uint64_t at, const char *key, mp_error *error) {
    if (r->c.at > MP_GGUF_MAX_HEADER)
        return REFUSE_ABOVE(at, key, "a header of ", MP_GGUF_MAX_HEADER, " bytes", "%llu bytes long so far",
                            LL(r->c.at));
    return MP_OK;
}

/* Read strings in two passes: first add up their lengths, then copy them. The first pass stops at the limit of the
 * header: a sparse file can declare strings of many gigabytes. Another process may write to the file in between, so the
 * second pass checks each length against the memory allocated after the first. */
static mp_status read_strings(reader *r, const char *key, mp_value *value, mp_error *error) {
    uint64_t start = r->c.at, length, total = 0;
    const uint8_t *bytes;
    for (uint64_t i = 0; i < value->count; i++) {
        uint64_t at = r->c.at;
        MP_TRY(read_string(r, key, &bytes, &length, error));
        MP_TRY(check_header_size(r, at, key, error));
        total += length;
    }
    uint64_t *offsets = mp_spec_memory(r->spec, (value->count + 1) * sizeof *offsets);
    char *copy = mp_spec_memory(r->spec, total);
    if (!offsets || !copy)
        return no_memory(error, offsets ? total : (value->count + 1) * sizeof *offsets);
    r->c.at = start;
    uint64_t used = 0;
    offsets[0] = 0;
    for (uint64_t i = 0; i < value->count; i++) {
        uint64_t at = r->c.at;
        MP_TRY(read_string(r, key, &bytes, &length, error));
        if (length > total - used)
            return REFUSE(at, key, "a file that does not change while it is read", "changed while it was read");
        memcpy(copy + used, bytes, length);
        used += length;
        offsets[i + 1] = used;
    }
    value->as.strings.bytes = copy;
    value->as.strings.offsets = offsets;
    return MP_OK;
}

static mp_status read_array(reader *r, const char *key, mp_value *value, mp_error *error) {
    uint64_t at = r->c.at, bytes;
    uint32_t type;
    MP_TRY(mp_cursor_u32(&r->c, key, &type, error));
    MP_TRY(mp_cursor_u64(&r->c, key, &value->count, error));
    if (type == G_ARRAY)
        return REFUSE(at, key, "an array of numbers, bools or strings", "an array of arrays");
    if (type >= G_TYPES)
        return REFUSE(at, key, "an element type from 0 to 12", "an array of type %u", type);
    uint64_t each = type == G_STRING ? 8 : type_bytes[type], left = mp_cursor_left(&r->c);
    if (__builtin_mul_overflow(value->count, each, &bytes) || bytes > left)
        return REFUSE(at + 4, key, "an array that ends within the file",
                      "%llu elements of at least %llu bytes with %llu left", LL(value->count), LL(each), LL(left));
    if (value->count > MP_GGUF_MAX_ELEMENTS - r->elements)
        return REFUSE_ABOVE(at + 4, key, "", MP_GGUF_MAX_ELEMENTS, " elements in all arrays",
                            "%llu elements after %llu in other arrays", LL(value->count), LL(r->elements));
    r->elements += value->count;
    value->gguf_type = (int32_t)type;
    value->type = (mp_value_type)(MP_VALUE_BOOLS + (kind_of(type) - MP_VALUE_BOOL));
    if (type == G_STRING)
        return read_strings(r, key, value, error);

    uint64_t start = r->c.at, wide = type == G_BOOL ? 1 : 8;
    const uint8_t *data;
    MP_TRY(mp_cursor_take(&r->c, bytes, key, &data, error));
    void *copy = mp_spec_memory(r->spec, value->count * wide);
    if (!copy)
        return no_memory(error, value->count * wide);
    value->as.bools = copy;
    if (value->type == MP_VALUE_BOOLS) {
        memcpy(copy, data, bytes);
        for (uint64_t i = 0; i < value->count; i++)
            if (((uint8_t *)copy)[i] > 1)
                return refuse_bool(r, start + i, key, ((uint8_t *)copy)[i], error);
    } else if (value->type == MP_VALUE_FLOATS) {
        for (uint64_t i = 0; i < value->count; i++)
            ((double *)copy)[i] = real_at(type, data + i * each);
    } else {
        bool good = true;
        for (uint64_t i = 0; i < value->count; i++) {
            ((int64_t *)copy)[i] = integer_at(type, data + i * each, &good);
            if (!good)
                return refuse_integer(r, start + i * each, key, ((int64_t *)copy)[i], error);
        }
    }
    return MP_OK;
}

static mp_status read_value(reader *r, mp_error *error) {
    const char *key = NULL;
    uint32_t type;
    mp_value value;
    MP_TRY(read_key(r, &key, error));
    uint64_t at = r->c.at;
    MP_TRY(mp_cursor_u32(&r->c, key, &type, error));
    if (type >= G_TYPES)
        return REFUSE(at, key, "a value type from 0 to 12", "type %u", type);
    if (strcmp(key, "general.alignment") == 0 && type != G_U32)
        return REFUSE(at, key, "a 32-bit unsigned integer (type 4)", "type %u", type);
    value.gguf_type = (int32_t)type;
    MP_TRY(type == G_ARRAY ? read_array(r, key, &value, error) : read_scalar(r, key, type, &value, error));
    MP_TRY(check_header_size(r, at, key, error));
    if (strcmp(key, "general.alignment") == 0) {
        uint64_t alignment = (uint64_t)value.as.integer;
        if (alignment == 0 || (alignment & (alignment - 1)))
            return REFUSE(at + 4, key, "a power of two", "%llu", LL(alignment));
        if (alignment > MP_GGUF_MAX_ALIGNMENT)
            return REFUSE_ABOVE(at + 4, key, "", MP_GGUF_MAX_ALIGNMENT, "", "%llu", LL(alignment));
        r->alignment = alignment;
    }
    return mp_spec_adopt(r->spec, key, (uint32_t)strlen(key), &value, error);
}

/* --- tensors --- */

static mp_status read_name(reader *r, char *name, mp_error *error) {
    uint64_t at = r->c.at, length;
    const uint8_t *bytes;
    MP_TRY(mp_cursor_u64(&r->c, "tensor name", &length, error));
    if (length == 0 || length > MP_GGUF_MAX_NAME || length > mp_cursor_left(&r->c))
        return REFUSE(at, "tensor name", "1 to 64 bytes, and at most the bytes left", "%llu bytes long",
                      LL(length));
    MP_TRY(mp_cursor_take(&r->c, length, "tensor name", &bytes, error));
    memcpy(name, bytes, length);
    name[length] = 0;
    if (memchr(name, 0, length) || !mp_is_utf8(name, length))
        return REFUSE(at, "tensor name", "UTF-8 without NUL", "not UTF-8, or contains NUL");
    if (mp_spec_has_tensor(r->spec, name, (uint32_t)length))
        return REFUSE(at, "tensor name", "each tensor once", "a duplicate: %s", name);
    return MP_OK;
}

static mp_status read_type(reader *r, const char *name, const char *field, mp_dtype *dtype, mp_error *error) {
    uint64_t at = r->c.at;
    uint32_t id;
    MP_TRY(mp_cursor_u32(&r->c, field, &id, error));
    if (mp_dtype_from_ggml(id, dtype))
        return MP_OK;
    for (size_t i = 0; i < sizeof unsupported_types / sizeof *unsupported_types; i++)
        if (unsupported_types[i].id == (int32_t)id)
            return mp_fail(error, MP_UNSUPPORTED,
                           "%s: the tensor %s is stored as %s, which mpool does not support; use another "
                           "quantisation of the model, such as Q4_K_M, Q8_0 or F16",
                           r->c.file, name, unsupported_types[i].name);
    return REFUSE(at, field, "a type of the GGUF format", "%d", (int32_t)id);
}

static mp_status read_tensor(reader *r, mp_error *error) {
    char name[MP_GGUF_MAX_NAME + 1], field[MP_GGUF_MAX_NAME + 24], text[96];
    mp_tensor_entry entry = {.name = name};
    MP_TRY(read_name(r, name, error));
#define FIELD(part) (snprintf(field, sizeof field, "%s: %s", name, part), field)
    uint64_t at = r->c.at, shape_at, row_bytes, padded;
    uint32_t ndim;
    MP_TRY(mp_cursor_u32(&r->c, FIELD("dimensions"), &ndim, error));
    if (ndim < 1 || ndim > MP_MAX_DIMS)
        return REFUSE(at, field, "1 to 4", "%u", ndim);
    shape_at = r->c.at;
    for (uint32_t i = 0; i < ndim; i++) {
        uint64_t size;
        MP_TRY(mp_cursor_u64(&r->c, FIELD("shape"), &size, error));
        if (size < 1 || size > INT64_MAX)
            return REFUSE(r->c.at - 8, field, "sizes from 1 to 2^63 - 1", "%llu", LL(size));
        entry.shape[ndim - 1 - i] = (int64_t)size; /* the file has the innermost dimension first */
    }
    entry.ndim = (int32_t)ndim;
    int64_t items;
    if (!mp_shape_items(entry.ndim, entry.shape, &items)) {
        mp_shape_text(entry.ndim, entry.shape, text, sizeof text);
        return REFUSE(shape_at, FIELD("shape"), "sizes whose product is below 2^63", "%s", text);
    }
    MP_TRY(read_type(r, name, FIELD("type"), &entry.dtype, error));
    const mp_dtype_row *row = mp_dtype_get(entry.dtype);
    int64_t columns = entry.shape[ndim - 1];
    if (columns % row->items) {
        snprintf(text, sizeof text, "multiples of %d, the block of %s", (int)row->items, row->name);
        return REFUSE(shape_at, FIELD("row"), text, "%lld elements", (long long)columns);
    }
    if (!mp_dtype_row_bytes(entry.dtype, columns, &row_bytes) ||
        __builtin_mul_overflow(row_bytes, (uint64_t)(items / columns), &entry.nbytes) || entry.nbytes > INT64_MAX)
        return REFUSE(shape_at, FIELD("size"), "below 2^63 bytes", "%lld elements of %s", (long long)items, row->name);
    padded = (entry.nbytes + r->alignment - 1) & ~(r->alignment - 1); /* cannot overflow: below 2^63 + 2^16 */

    at = r->c.at;
    MP_TRY(mp_cursor_u64(&r->c, FIELD("offset"), &entry.offset, error));
    if (entry.offset & (r->alignment - 1)) {
        snprintf(text, sizeof text, "multiples of %llu", LL(r->alignment));
        return REFUSE(at, field, text, "%llu", LL(entry.offset));
    }
    if (entry.offset != r->data_bytes) {
        snprintf(text, sizeof text, "%llu, the end of the preceding tensor", LL(r->data_bytes));
        return REFUSE(at, field, text, "%llu", LL(entry.offset));
    }
    /* The sum stays below 2^64: a file has less than 2^63 bytes, all tensors before this one end within it, and the
     * size of a tensor is below 2^63. resolve_offsets checks the end again, once the start of the data is known. */
    if (entry.offset + entry.nbytes > r->c.size)
        return REFUSE(at, FIELD("size"), "an end within the file", "%llu bytes at offset %llu in a file of %llu",
                      LL(entry.nbytes), LL(entry.offset), LL(r->c.size));
    r->data_bytes += padded;
    return mp_spec_add_tensor(r->spec, &entry, error);
#undef FIELD
}

/* Turn offsets within the tensor data into offsets within the file, now that the start of the data is known. The sums
 * stay below 2^64: read_tensor has compared the end of each tensor within the data with the size of the file, and
 * padded_end is used only if the last tensor ends within the file. */
static mp_status resolve_offsets(reader *r, mp_error *error) {
    const uint64_t end = r->c.at, start = (end + r->alignment - 1) & ~(r->alignment - 1);
    const uint64_t padded_end = start + r->data_bytes;
    int count = mp_spec_tensor_count(r->spec);
    for (int i = 0; i < count; i++) {
        mp_tensor_entry *entry = mp_spec_tensor_edit(r->spec, i);
        entry->offset += start;
        if (entry->offset + entry->nbytes > r->c.size) {
            char field[MP_GGUF_MAX_NAME + 24];
            snprintf(field, sizeof field, "%s: size", entry->name);
            return REFUSE(end, field, "an end within the file", "%llu bytes at offset %llu in a file of %llu",
                          LL(entry->nbytes), LL(entry->offset), LL(r->c.size));
        }
    }
    /* Padding after the header of a file without tensors, and after the last tensor, is optional. Bytes after it are
     * unused: llama.cpp reads such files. */
    if (r->c.size > padded_end)
        mp_log(MP_LOG_WARNING, "%s has %llu unused bytes after its last tensor, from byte %llu on", r->c.file,
               LL(r->c.size - padded_end), LL(padded_end));
    return MP_OK;
}

/* --- files --- */

/* Parse one file into a spec, whose only file it is. */
static mp_status parse(const uint8_t *data, uint64_t size, const char *name, mp_spec *spec, mp_error *error) {
    reader state = {.c = {.data = data, .size = size, .file = name}, .spec = spec, .alignment = DEFAULT_ALIGNMENT};
    reader *r = &state;
    MP_TRY(read_header(r, error));
    for (uint64_t i = 0; i < r->value_count; i++)
        MP_TRY(read_value(r, error));
    for (uint64_t i = 0; i < r->tensor_count; i++)
        MP_TRY(read_tensor(r, error));
    return resolve_offsets(r, error);
}

static mp_status set_architecture(mp_spec *spec, mp_error *error) {
    const char *architecture;
    if (!mp_spec_find(spec, "general.architecture"))
        return MP_OK;
    MP_TRY(mp_spec_string(spec, "general.architecture", NULL, &architecture, error));
    return mp_spec_set_architecture(spec, architecture, error);
}

static mp_status parse_new(const uint8_t *data, uint64_t size, const char *name, mp_spec **spec, mp_error *error) {
    mp_status status = MP_OK;
    mp_spec *created = mp_spec_create();
    if (!created)
        return mp_fail_memory(error, 1024, "a model spec");
    MP_TRY_GOTO(mp_spec_add_file(created, name, error));
    MP_TRY_GOTO(parse(data, size, name, created, error));
    *spec = created;
    created = NULL;
cleanup:
    mp_spec_unpin(created);
    return status;
}

/* Map one file and parse it into a new spec. The caller frees *spec, which may be set also if this fails. */
static mp_status read_file(const char *path, mp_spec **spec, mp_error *error) {
    mp_file_map *map;
    MP_TRY(mp_file_map_open(path, &map, error));
    mp_status status = parse_new(mp_file_map_data(map), mp_file_map_size(map), path, spec, error);
    if (mp_file_map_poisoned(map)) /* the parser read zeros in place of truncated pages, so no result is valid */
        status = mp_fail(error, MP_IO, "%s: the file was truncated while it was read; replace it with a complete copy",
                         path);
    if (status == MP_OK)
        mp_spec_same_file(*spec, 0, mp_file_map_id(map)); /* stores the identity of the file that was read */
    mp_file_map_close(map);
    return status;
}

/* Length of the name suffix of a split file. Five digits are enough, because `count` is at most MP_GGUF_MAX_SPLITS. */
enum { SPLIT_TAIL = sizeof "-00001-of-00003.gguf" - 1 };

static void split_tail(char tail[32], int64_t index, int64_t count) {
    snprintf(tail, 32, "-%05d-of-%05d.gguf", (int)index + 1, (int)count);
}

/* Read file `index` of `count` from `path` and add its tensors to the spec of the first file. */
static mp_status read_sibling(mp_spec *spec, const char *path, int64_t index, int64_t count, mp_error *error) {
    mp_status status = MP_OK;
    mp_spec *other = NULL;
    int64_t number;
    MP_TRY_GOTO(read_file(path, &other, error));
    MP_TRY_GOTO(mp_spec_int(other, "split.count", count, count, NULL, &number, error));
    MP_TRY_GOTO(mp_spec_int(other, "split.no", index, index, NULL, &number, error));
    MP_TRY_GOTO(mp_spec_add_file(spec, path, error));
    mp_file_id id;
    if (mp_spec_file_identity(other, 0, &id))
        mp_spec_same_file(spec, (int)index, &id);
    for (int i = 0; i < mp_spec_tensor_count(other); i++) {
        mp_tensor_entry entry = *mp_spec_tensor_at(other, i);
        entry.file = (int32_t)index;
        MP_TRY_GOTO(mp_spec_add_tensor(spec, &entry, error));
    }
cleanup:
    mp_spec_unpin(other);
    return status;
}

static mp_status read_splits(mp_spec *spec, const char *path, mp_error *error) {
    static const int64_t whole = 0;
    int64_t count, number, tensors;
    size_t length = strlen(path);
    MP_TRY(mp_spec_int_capped(spec, "split.count", 0, MP_GGUF_MAX_SPLITS, &whole, &count, error));
    if (count <= 1) /* merging tools leave 0 in merged files */
        return MP_OK;
    MP_TRY(mp_spec_int(spec, "split.no", 0, count - 1, NULL, &number, error));
    MP_TRY(mp_spec_int(spec, "split.tensors.count", 0, INT32_MAX, NULL, &tensors, error));
    char *name = mp_strdup(path, MP_TAG_SPEC);
    if (!name)
        return mp_fail_memory(error, length + 1, "a file's path");
    mp_status status = MP_OK;
    char allowed[64], tail[32];
    split_tail(tail, number, count);
    if (length <= SPLIT_TAIL || memcmp(name + length - SPLIT_TAIL, tail, SPLIT_TAIL) != 0) {
        snprintf(allowed, sizeof allowed, "a name that ends in %s", tail);
        status = mp_fail_file(error, MP_FORMAT, path, -1, "file name", allowed, "different");
    } else if (number != 0) {
        status = mp_fail_file(error, MP_FORMAT, path, -1, "split.no",
                              "0; open the first file of the split model instead", "%lld", (long long)number);
    }
    for (int64_t i = 1; status == MP_OK && i < count; i++) {
        split_tail(tail, i, count);
        memcpy(name + length - SPLIT_TAIL, tail, SPLIT_TAIL);
        status = read_sibling(spec, name, i, count, error);
    }
    mp_free(name);
    if (status == MP_OK && mp_spec_tensor_count(spec) != tensors) {
        snprintf(allowed, sizeof allowed, "%d, the number of tensors in all files", mp_spec_tensor_count(spec));
        status = mp_fail_file(error, MP_FORMAT, path, -1, "split.tensors.count", allowed, "%lld", (long long)tensors);
    }
    return status;
}

mp_status mp_gguf_read(const char *path, mp_spec **out, mp_error *error) {
    mp_status status = MP_OK;
    mp_spec *spec = NULL;
    *out = NULL;
    MP_TRY_GOTO(read_file(path, &spec, error));
    MP_TRY_GOTO(set_architecture(spec, error));
    MP_TRY_GOTO(read_splits(spec, path, error));
    *out = spec;
    spec = NULL;
cleanup:
    mp_spec_unpin(spec);
    return status;
}

mp_status mp_gguf_parse(const uint8_t *data, uint64_t size, const char *name, mp_spec **out, mp_error *error) {
    static const int64_t whole = 0;
    mp_status status = MP_OK;
    mp_spec *spec = NULL;
    int64_t count;
    *out = NULL;
    MP_TRY_GOTO(parse_new(data, size, name, &spec, error));
    MP_TRY_GOTO(set_architecture(spec, error));
    MP_TRY_GOTO(mp_spec_int(spec, "split.count", 0, 1, &whole, &count, error));
    *out = spec;
    spec = NULL;
cleanup:
    mp_spec_unpin(spec);
    return status;
}
