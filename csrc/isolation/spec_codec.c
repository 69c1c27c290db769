/* spec_codec.c: see spec_codec.h. Numbers are little-endian. Arrays start at multiples of 8, so that the decoder can
 * read them in place. */
#include "isolation/spec_codec.h"

#include <string.h>

#include "files/cursor.h"

static const uint32_t MAGIC = 0x31505053u; /* "SPP1" */
enum { ALIGN = 8, FIRST_BYTES = 64 * 1024 };
static const char LEFT_OUT[] = "tokenizer.";

/* --- writing --- */

typedef struct writer {
    uint8_t *bytes;
    size_t used, capacity;
    size_t refused; /* bytes of the memory that was refused; 0: none */
} writer;

static void spec_put(writer *w, const void *data, size_t bytes) {
    if (w->refused)
        return;
    if (bytes > w->capacity - w->used) {
        size_t capacity = w->capacity ? w->capacity : FIRST_BYTES;
        while (capacity - w->used < bytes)
            capacity *= 2; /* cannot overflow: limits keep specs far below half the address space */
        uint8_t *grown = mp_realloc(w->bytes, capacity, MP_TAG_SPEC);
        if (!grown) {
            w->refused = capacity;
            return;
        }
        w->bytes = grown;
        w->capacity = capacity;
    }
    if (bytes)
        memcpy(w->bytes + w->used, data, bytes);
    w->used += bytes;
}

static void put_u32(writer *w, uint32_t value) { spec_put(w, &value, sizeof value); }
static void put_u64(writer *w, uint64_t value) { spec_put(w, &value, sizeof value); }

static void put_array(writer *w, const void *data, uint64_t count, size_t size) {
    static const uint8_t zeros[ALIGN];
    spec_put(w, zeros, (size_t)(-w->used & (ALIGN - 1)));
    spec_put(w, data, (size_t)count * size);
}

static void put_text(writer *w, const char *text) {
    put_u64(w, strlen(text));
    spec_put(w, text, strlen(text));
}

static void put_value(writer *w, const char *key, const mp_value *value) {
    put_text(w, key);
    put_u32(w, (uint32_t)value->type);
    put_u32(w, (uint32_t)value->gguf_type);
    put_u64(w, value->count);
    switch (value->type) {
    case MP_VALUE_BOOL:
    case MP_VALUE_INT:
        spec_put(w, &value->as.integer, sizeof value->as.integer);
        break;
    case MP_VALUE_FLOAT:
        spec_put(w, &value->as.real, sizeof value->as.real);
        break;
    case MP_VALUE_STRING:
        put_array(w, value->as.string, value->count, 1);
        break;
    case MP_VALUE_BOOLS:
        put_array(w, value->as.bools, value->count, 1);
        break;
    case MP_VALUE_INTS:
        put_array(w, value->as.integers, value->count, sizeof(int64_t));
        break;
    case MP_VALUE_FLOATS:
        put_array(w, value->as.reals, value->count, sizeof(double));
        break;
    case MP_VALUE_STRINGS:
        put_array(w, value->as.strings.offsets, value->count + 1, sizeof(uint64_t));
        put_array(w, value->as.strings.bytes, value->as.strings.offsets[value->count], 1);
        break;
    }
}

static void put_tokens(writer *w, const mp_token_table *tokens) {
    put_u32(w, tokens != NULL);
    if (!tokens)
        return;
    put_u32(w, (uint32_t)tokens->count);
    put_array(w, tokens->offsets, (uint64_t)tokens->count + 1, sizeof(uint64_t));
    put_array(w, tokens->bytes, tokens->offsets[tokens->count], 1);
    put_array(w, tokens->control, (uint64_t)tokens->count, 1);
    put_u32(w, (uint32_t)tokens->eog_count);
    put_array(w, tokens->eog, (uint64_t)tokens->eog_count, sizeof(int32_t));
}

static bool is_left_out(const char *key) { return strncmp(key, LEFT_OUT, sizeof LEFT_OUT - 1) == 0; }

mp_status mp_spec_encode(const mp_spec *spec, uint8_t **bytes, size_t *size, mp_error *error) {
    writer w = {0};
    *bytes = NULL;
    put_u32(&w, MAGIC);
    put_text(&w, mp_spec_architecture(spec));
    put_u32(&w, (uint32_t)mp_spec_file_count(spec));
    for (int i = 0; i < mp_spec_file_count(spec); i++)
        put_text(&w, mp_spec_file(spec, i));
    for (int i = 0; i < mp_spec_file_count(spec); i++) {
        mp_file_id id = {0};
        mp_spec_file_identity(spec, i, &id); /* an unknown identity has size 0 */
        const uint64_t parts[] = {id.device, id.inode, id.size, id.mtime_ns, id.owner};
        for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
            put_u64(&w, parts[part]);
    }
    uint32_t values = 0;
    for (int i = 0; i < mp_spec_value_count(spec); i++) {
        const char *key;
        mp_spec_value_at(spec, i, &key);
        values += !is_left_out(key);
    }
    put_u32(&w, values);
    for (int i = 0; i < mp_spec_value_count(spec); i++) {
        const char *key;
        const mp_value *value = mp_spec_value_at(spec, i, &key);
        if (!is_left_out(key))
            put_value(&w, key, value);
    }
    put_u32(&w, (uint32_t)mp_spec_tensor_count(spec));
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        put_text(&w, entry->name);
        put_u32(&w, (uint32_t)entry->dtype);
        put_u32(&w, (uint32_t)entry->ndim);
        spec_put(&w, entry->shape, sizeof entry->shape);
        put_u32(&w, (uint32_t)entry->file);
        put_u64(&w, entry->offset);
        put_u64(&w, entry->nbytes);
    }
    put_tokens(&w, mp_spec_tokens(spec));
    if (w.refused) {
        mp_free(w.bytes);
        return mp_fail_memory(error, w.refused, "a serialized model spec");
    }
    *bytes = w.bytes;
    *size = w.used;
    return MP_OK;
}

/* --- reading ---
 *
 * The lengths are checked here, because they decide what is read. The functions of spec.h that build a spec check the
 * rest, as for any other source. */

static mp_status spec_refuse(const char *field, const char *allowed, uint64_t got, mp_error *error) {
    return mp_fail_file(error, MP_FORMAT, "spec", -1, field, allowed, "%llu", (unsigned long long)got);
}

/* Read an array of count * size bytes at the next multiple of 8. *data points into the input, also if count is 0. */
static mp_status take_array(mp_cursor *c, uint64_t count, size_t size, const char *field, const void **data,
                            mp_error *error) {
    const uint8_t *at;
    uint64_t bytes;
    MP_TRY(mp_cursor_take(c, -c->at & (ALIGN - 1), field, &at, error));
    if (__builtin_mul_overflow(count, (uint64_t)size, &bytes))
        return spec_refuse(field, "a size below 2^64", count, error);
    MP_TRY(mp_cursor_take(c, bytes, field, &at, error));
    *data = at;
    return MP_OK;
}

/* Read a text into a buffer of `size` bytes and terminate it with a zero. */
static mp_status take_text(mp_cursor *c, const char *field, char *text, size_t size, mp_error *error) {
    uint64_t bytes;
    const uint8_t *data;
    MP_TRY(mp_cursor_u64(c, field, &bytes, error));
    if (bytes >= size)
        return spec_refuse(field, "a shorter text", bytes, error);
    MP_TRY(mp_cursor_take(c, bytes, field, &data, error));
    if (memchr(data, 0, bytes))
        return spec_refuse(field, "a text without NUL", bytes, error);
    memcpy(text, data, bytes);
    text[bytes] = 0;
    return MP_OK;
}

/* Read count + 1 offsets, and the bytes of the strings after them, whose number is the last offset. */
static mp_status take_strings(mp_cursor *c, uint64_t count, const char *field, const uint64_t **offsets,
                              const void **bytes, mp_error *error) {
    const void *data = NULL;
    if (count == UINT64_MAX)
        return spec_refuse(field, "fewer strings", count, error);
    MP_TRY(take_array(c, count + 1, sizeof(uint64_t), field, &data, error));
    *offsets = data;
    return take_array(c, (*offsets)[count], 1, field, bytes, error);
}

static mp_status take_value(mp_cursor *c, mp_spec *spec, char *key, mp_error *error) {
    mp_value value = {0};
    uint32_t type, gguf_type;
    const void *data = NULL;
    MP_TRY(take_text(c, "key", key, MP_SPEC_MAX_KEY + 1, error));
    MP_TRY(mp_cursor_u32(c, "type", &type, error));
    MP_TRY(mp_cursor_u32(c, "type", &gguf_type, error));
    MP_TRY(mp_cursor_u64(c, "count", &value.count, error));
    if (type > MP_VALUE_STRINGS)
        return spec_refuse("type", "0 to 7", type, error);
    value.type = (mp_value_type)type;
    value.gguf_type = (int32_t)gguf_type;
    switch (value.type) {
    case MP_VALUE_BOOL:
    case MP_VALUE_INT:
    case MP_VALUE_FLOAT: {
        uint64_t bits;
        MP_TRY(mp_cursor_u64(c, "value", &bits, error));
        memcpy(&value.as, &bits, sizeof bits);
        break;
    }
    case MP_VALUE_STRING:
        MP_TRY(take_array(c, value.count, 1, "value", &data, error));
        value.as.string = data;
        break;
    case MP_VALUE_BOOLS:
        MP_TRY(take_array(c, value.count, 1, "value", &data, error));
        value.as.bools = data;
        break;
    case MP_VALUE_INTS:
        MP_TRY(take_array(c, value.count, sizeof(int64_t), "value", &data, error));
        value.as.integers = data;
        break;
    case MP_VALUE_FLOATS:
        MP_TRY(take_array(c, value.count, sizeof(double), "value", &data, error));
        value.as.reals = data;
        break;
    case MP_VALUE_STRINGS:
        MP_TRY(take_strings(c, value.count, "value", &value.as.strings.offsets, &data, error));
        value.as.strings.bytes = data;
        break;
    }
    return mp_spec_set(spec, key, &value, error);
}

/* Call after all files were added: the spec allocates identities for the number of files that it has. */
static mp_status take_identity(mp_cursor *c, mp_spec *spec, int index, mp_error *error) {
    mp_file_id id;
    uint64_t *parts[] = {&id.device, &id.inode, &id.size, &id.mtime_ns, &id.owner};
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
        MP_TRY(mp_cursor_u64(c, "identity", parts[part], error));
    if (!mp_spec_same_file(spec, index, &id))
        return mp_fail_memory(error, sizeof id, "the identity of a file");
    return MP_OK;
}

static mp_status take_tensor(mp_cursor *c, mp_spec *spec, mp_error *error) {
    mp_tensor_entry entry = {0};
    char name[MP_SPEC_MAX_NAME + 1];
    uint32_t dtype, ndim, file;
    const uint8_t *shape;
    MP_TRY(take_text(c, "tensor", name, sizeof name, error));
    MP_TRY(mp_cursor_u32(c, "dtype", &dtype, error));
    MP_TRY(mp_cursor_u32(c, "ndim", &ndim, error));
    MP_TRY(mp_cursor_take(c, sizeof entry.shape, "shape", &shape, error));
    MP_TRY(mp_cursor_u32(c, "file", &file, error));
    MP_TRY(mp_cursor_u64(c, "offset", &entry.offset, error));
    MP_TRY(mp_cursor_u64(c, "nbytes", &entry.nbytes, error));
    entry.name = name;
    entry.dtype = (mp_dtype)dtype;
    entry.ndim = (int32_t)ndim;
    entry.file = (int32_t)file;
    memcpy(entry.shape, shape, sizeof entry.shape);
    return mp_spec_add_tensor(spec, &entry, error);
}

static mp_status take_tokens(mp_cursor *c, mp_spec *spec, mp_error *error) {
    mp_token_table table = {0};
    uint32_t has, count, eog;
    const void *data;
    MP_TRY(mp_cursor_u32(c, "tokens", &has, error));
    if (!has)
        return MP_OK;
    MP_TRY(mp_cursor_u32(c, "tokens", &count, error));
    MP_TRY(take_strings(c, count, "tokens", &table.offsets, &data, error));
    table.bytes = data;
    MP_TRY(take_array(c, count, 1, "tokens", &data, error));
    table.control = data;
    MP_TRY(mp_cursor_u32(c, "tokens", &eog, error));
    MP_TRY(take_array(c, eog, sizeof(int32_t), "tokens", &data, error));
    table.eog = data;
    table.count = (int32_t)count;
    table.eog_count = (int32_t)eog;
    return mp_spec_set_tokens(spec, &table, error);
}

static mp_status take_all(mp_cursor *c, mp_spec *spec, char *text, mp_error *error) {
    uint32_t number;
    MP_TRY(mp_cursor_u32(c, "magic", &number, error));
    if (number != MAGIC)
        return spec_refuse("magic", "the magic of a spec", number, error);
    MP_TRY(take_text(c, "architecture", text, MP_SPEC_MAX_ARCHITECTURE + 1, error));
    MP_TRY(mp_spec_set_architecture(spec, text, error));
    MP_TRY(mp_cursor_u32(c, "files", &number, error));
    for (uint32_t i = 0; i < number; i++) {
        MP_TRY(take_text(c, "file", text, MP_SPEC_MAX_KEY + 1, error));
        MP_TRY(mp_spec_add_file(spec, text, error));
    }
    for (uint32_t i = 0; i < number; i++)
        MP_TRY(take_identity(c, spec, (int)i, error));
    MP_TRY(mp_cursor_u32(c, "values", &number, error));
    for (uint32_t i = 0; i < number; i++)
        MP_TRY(take_value(c, spec, text, error));
    MP_TRY(mp_cursor_u32(c, "tensors", &number, error));
    for (uint32_t i = 0; i < number; i++)
        MP_TRY(take_tensor(c, spec, error));
    MP_TRY(take_tokens(c, spec, error));
    if (mp_cursor_left(c))
        return spec_refuse("end", "no further bytes", mp_cursor_left(c), error);
    return MP_OK;
}

mp_status mp_spec_decode(const uint8_t *bytes, size_t size, mp_spec **out, mp_error *error) {
    mp_cursor c = {.data = bytes, .size = size, .file = "spec"};
    *out = NULL;
    mp_spec *spec = mp_spec_create();
    char *text = mp_alloc(MP_SPEC_MAX_KEY + 1, MP_TAG_MISC);
    mp_status status =
        spec && text ? take_all(&c, spec, text, error) : mp_fail_memory(error, MP_SPEC_MAX_KEY + 1, "a model spec");
    mp_free(text);
    if (status != MP_OK) {
        mp_spec_unpin(spec);
        return status;
    }
    *out = spec;
    return MP_OK;
}
