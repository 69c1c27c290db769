/* spec.c: build specs and look names up; spec_read.c contains the typed readers. See spec.h.
 *
 * All strings and arrays of a spec are stored in memory blocks that it owns and frees with its last reference. */
#include "files/spec.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/alloc.h"
#include "base/forked.h"
#include "base/siphash.h"
#include "base/sys.h"
#include "files/spec_build.h"

/* Names in insertion order, and a hash table from name to index. The hash is keyed with a random number per spec, so
 * that no file can be crafted whose names collide. */
typedef struct name_list {
    struct {
        const char *text;
        uint32_t length, hash;
    } *names;
    uint32_t *table; /* index + 1; 0: empty; open addressing, at most half full */
    uint32_t count, capacity, mask;
} name_list;

typedef struct spec_block { /* memory of the spec; small allocations share a block */
    struct spec_block *next;
    uint64_t used, size;
    _Alignas(16) uint8_t data[];
} spec_block;

enum { BLOCK_BYTES = 32 * 1024, OWN_BLOCK_FROM = 8 * 1024 };
enum { MAX_FILES = 1 << 19 }; /* capacities grow by doubling from 4, so the maximum is such a number */

struct mp_spec {
    _Atomic uint32_t references;
    bool frozen, has_tokens;
    uint64_t hash_key[2];
    spec_block *blocks;
    const char *architecture;
    const char **files;
    int file_count, file_capacity;
    mp_file_id *seen; /* guarded by: identities; [seen_count]; size 0: not known yet */
    int seen_count;   /* guarded by: identities */
    name_list keys, tensor_names;
    mp_value *values;         /* [keys.capacity] */
    mp_tensor_entry *tensors; /* [tensor_names.capacity] */
    mp_token_table tokens;
    mp_spec *draft; /* owns a reference; NULL: none */
};

/* --- names --- */

static uint32_t name_hash(const mp_spec *spec, const char *name, size_t length) {
    return (uint32_t)mp_siphash(spec->hash_key, name, length);
}

static int names_find(const mp_spec *spec, const name_list *list, const char *name, size_t length) {
    if (list->count == 0)
        return -1;
    uint32_t hash = name_hash(spec, name, length);
    for (uint32_t i = hash & list->mask; list->table[i]; i = (i + 1) & list->mask) {
        uint32_t index = list->table[i] - 1;
        if (list->names[index].hash == hash && list->names[index].length == length &&
            memcmp(list->names[index].text, name, length) == 0)
            return (int)index;
    }
    return -1;
}

/* Make space for one more name and its payload of `size` bytes. */
static mp_status names_reserve(name_list *list, void **payload, size_t size, mp_error *error) {
    if (list->count < list->capacity)
        return MP_OK;
    if (list->capacity >= 1u << 28)
        return mp_fail(error, MP_LIMIT, "a model spec must have at most %u names, got %u", 1u << 28,
                       list->count + 1);
    uint32_t capacity = list->capacity ? 2 * list->capacity : 64;
    uint64_t bytes = (uint64_t)capacity * (size > sizeof *list->names ? size : sizeof *list->names);
    uint32_t *table = mp_alloc_array(2 * (size_t)capacity, sizeof *table, MP_TAG_SPEC);
    if (!table)
        return mp_fail_memory(error, 2 * (uint64_t)capacity * sizeof *table, "a model spec's names");
    void *grown = mp_realloc(list->names, capacity * sizeof *list->names, MP_TAG_SPEC);
    if (grown)
        list->names = grown;
    void *grown_payload = grown ? mp_realloc(*payload, capacity * size, MP_TAG_SPEC) : NULL;
    if (!grown_payload) {
        mp_free(table);
        return mp_fail_memory(error, bytes, "a model spec's table");
    }
    *payload = grown_payload;
    uint32_t mask = 2 * capacity - 1;
    for (uint32_t index = 0; index < list->count; index++) {
        uint32_t i = list->names[index].hash & mask;
        while (table[i])
            i = (i + 1) & mask;
        table[i] = index + 1;
    }
    mp_free(list->table);
    list->table = table;
    list->mask = mask;
    list->capacity = capacity;
    return MP_OK;
}

/* Requires that the name is absent and that names_reserve succeeded. */
static uint32_t names_add(const mp_spec *spec, name_list *list, const char *name, uint32_t length) {
    uint32_t hash = name_hash(spec, name, length), i = hash & list->mask, index = list->count++;
    while (list->table[i])
        i = (i + 1) & list->mask;
    list->table[i] = index + 1;
    list->names[index].text = name;
    list->names[index].length = length;
    list->names[index].hash = hash;
    return index;
}

static void names_deinit(name_list *list) {
    mp_free(list->names);
    mp_free(list->table);
}

/* --- life and memory --- */

/* One lock for the identities of all specs, held for nanoseconds and across a fork (base/forked.h). */
static mp_mutex identities = MP_MUTEX_STATIC;

static void lock_identities(void) { mp_mutex_lock(&identities); }
static void unlock_identities(void) { mp_mutex_unlock(&identities); }
static void renew_identities(void) { mp_mutex_init(&identities); }

mp_spec *mp_spec_create(void) {
    static const mp_fork_handlers handlers = {lock_identities, unlock_identities, renew_identities};
    mp_error error;
    if (mp_fork_register(MP_FORK_SPECS, &handlers, &error) != MP_OK)
        return NULL;
    mp_spec *spec = mp_alloc_zeroed(sizeof *spec, MP_TAG_SPEC);
    if (!spec)
        return NULL;
    atomic_store(&spec->references, 1);
    mp_siphash_key(spec->hash_key);
    spec->architecture = "";
    return spec;
}

mp_spec *mp_spec_pin(mp_spec *spec) {
    atomic_fetch_add(&spec->references, 1);
    return spec;
}

void mp_spec_unpin(mp_spec *spec) {
    if (!spec || atomic_fetch_sub(&spec->references, 1) != 1)
        return;
    for (spec_block *block = spec->blocks, *next; block; block = next) {
        next = block->next;
        mp_free(block);
    }
    names_deinit(&spec->keys);
    names_deinit(&spec->tensor_names);
    mp_free(spec->values);
    mp_free(spec->tensors);
    mp_free(spec->files);
    mp_free(spec->seen);
    mp_spec_unpin(spec->draft); /* a draft model has no draft model, so this recurses once */
    mp_free(spec);
}

void *mp_spec_memory(mp_spec *spec, uint64_t bytes) {
    if (bytes > INT64_MAX)
        return NULL;
    uint64_t padded = (bytes + 15) & ~(uint64_t)15;
    spec_block *head = spec->blocks;
    if (head && padded <= head->size - head->used) {
        void *memory = head->data + head->used;
        head->used += padded;
        return memory;
    }
    uint64_t size = padded >= OWN_BLOCK_FROM ? padded : BLOCK_BYTES;
    spec_block *block = mp_alloc(sizeof *block + size, MP_TAG_SPEC);
    if (!block)
        return NULL;
    block->used = padded;
    block->size = size;
    if (head && size == padded) { /* a full block goes behind the head, which still has free space */
        block->next = head->next;
        head->next = block;
    } else {
        block->next = head;
        spec->blocks = block;
    }
    return block->data;
}

static mp_status copy_bytes(mp_spec *spec, const void *from, uint64_t bytes, const char *what, const void **to,
                            mp_error *error) {
    uint8_t *copy = bytes < UINT64_MAX ? mp_spec_memory(spec, bytes + 1) : NULL;
    if (!copy)
        return mp_fail_memory(error, bytes, what);
    if (bytes)
        memcpy(copy, from, bytes);
    copy[bytes] = 0;
    *to = copy;
    return MP_OK;
}

static mp_status copy_text(mp_spec *spec, const char *text, const char **to, mp_error *error) {
    const void *copy = NULL;
    MP_TRY(copy_bytes(spec, text, strlen(text), "a name", &copy, error));
    *to = copy;
    return MP_OK;
}

static mp_status check_not_frozen(const mp_spec *spec, mp_error *error) {
    if (spec->frozen)
        return mp_fail(error, MP_INVALID_ARGUMENT, "the model spec is frozen and cannot be changed; create a new one");
    return MP_OK;
}

/* --- building --- */

bool mp_is_utf8(const char *bytes, uint64_t length) {
    const uint8_t *text = (const uint8_t *)bytes;
    for (uint64_t i = 0; i < length;) {
        uint8_t lead = text[i];
        uint64_t more = lead < 0x80                   ? 0
                        : lead >= 0xC2 && lead < 0xE0 ? 1
                        : (lead & 0xF0) == 0xE0       ? 2
                        : lead >= 0xF0 && lead < 0xF5 ? 3
                                                      : 4;
        if (more == 4 || more > length - i - 1)
            return false;
        uint32_t code = more ? lead & (0x3Fu >> more) : lead;
        for (uint64_t j = 1; j <= more; j++) {
            if ((text[i + j] & 0xC0) != 0x80)
                return false;
            code = code << 6 | (text[i + j] & 0x3Fu);
        }
        if ((more == 2 && (code < 0x800 || (code >= 0xD800 && code < 0xE000))) ||
            (more == 3 && (code < 0x10000 || code > 0x10FFFF)))
            return false;
        i += more + 1;
    }
    return true;
}

mp_status mp_spec_set_architecture(mp_spec *spec, const char *name, mp_error *error) {
    MP_TRY(check_not_frozen(spec, error));
    static const char allowed[] = "1 to 64 printable ASCII characters without blanks";
    size_t length = strlen(name), good = 0;
    if (length < 1 || length > MP_SPEC_MAX_ARCHITECTURE)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "general.architecture", allowed,
                            length ? "%zu bytes" : "empty", length);
    while (name[good] > ' ' && name[good] < 0x7f)
        good++;
    if (good < length)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "general.architecture", allowed,
                            "byte %02x at index %zu", (uint8_t)name[good], good);
    return copy_text(spec, name, &spec->architecture, error);
}

mp_status mp_spec_add_file(mp_spec *spec, const char *path, mp_error *error) {
    MP_TRY(check_not_frozen(spec, error));
    if (!path[0])
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "a model spec has a file with an empty path; pass the path of a file");
    if (spec->file_count == spec->file_capacity) {
        if (spec->file_capacity >= MAX_FILES)
            return mp_fail(error, MP_LIMIT, "a model spec must have at most %d files, got %d", MAX_FILES,
                           spec->file_count + 1);
        int capacity = spec->file_capacity ? 2 * spec->file_capacity : 4;
        const char **files = mp_realloc(spec->files, (size_t)capacity * sizeof *files, MP_TAG_SPEC);
        if (!files)
            return mp_fail_memory(error, (uint64_t)capacity * sizeof *files, "a model spec's files");
        spec->files = files;
        spec->file_capacity = capacity;
    }
    MP_TRY(copy_text(spec, path, &spec->files[spec->file_count], error));
    spec->file_count++;
    return MP_OK;
}

static mp_status check_key(const mp_spec *spec, const char *key, uint64_t length, mp_error *error) {
    if (length == 0 || length > MP_SPEC_MAX_KEY)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "key length", "1 to 65535 bytes", "%llu",
                            (unsigned long long)length);
    for (uint64_t i = 0; i < length; i++)
        if (key[i] < 0x20 || key[i] > 0x7E)
            return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "key", "printable ASCII",
                                "byte %02x at index %llu", (uint8_t)key[i], (unsigned long long)i);
    if (names_find(spec, &spec->keys, key, length) >= 0)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key, "each key once", "a duplicate");
    return MP_OK;
}

/* Requires a key that check_key accepts. */
static mp_status adopt(mp_spec *spec, const char *key, uint32_t length, const mp_value *value, mp_error *error) {
    void *values = spec->values;
    mp_status status = names_reserve(&spec->keys, &values, sizeof *spec->values, error);
    spec->values = values;
    MP_TRY(status);
    spec->values[names_add(spec, &spec->keys, key, length)] = *value;
    return MP_OK;
}

mp_status mp_spec_adopt(mp_spec *spec, const char *key, uint32_t length, const mp_value *value, mp_error *error) {
    MP_TRY(check_not_frozen(spec, error));
    MP_TRY(check_key(spec, key, length, error));
    return adopt(spec, key, length, value, error);
}

static mp_status copy_strings(mp_spec *spec, const char *key, const mp_value *from, mp_value *to, mp_error *error) {
    const uint64_t *offsets = from->as.strings.offsets;
    const void *copy = NULL;
    if (from->count >= UINT64_MAX / sizeof *offsets)
        return mp_fail_memory(error, from->count, key);
    bool good = offsets[0] == 0;
    for (uint64_t i = 0; good && i < from->count; i++)
        good = offsets[i] <= offsets[i + 1];
    if (!good)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, key,
                            "offsets that start at 0 and never decrease", "an array of strings with other offsets");
    MP_TRY(copy_bytes(spec, offsets, (from->count + 1) * sizeof *offsets, key, &copy, error));
    to->as.strings.offsets = copy;
    MP_TRY(copy_bytes(spec, from->as.strings.bytes, offsets[from->count], key, &copy, error));
    to->as.strings.bytes = copy;
    return MP_OK;
}

mp_status mp_spec_set(mp_spec *spec, const char *key, const mp_value *value, mp_error *error) {
    MP_TRY(check_not_frozen(spec, error));
    size_t length = strlen(key);
    MP_TRY(check_key(spec, key, length, error));
    mp_value made = *value;
    const void *copy = NULL;
    uint64_t bytes; /* INTS and FLOATS both have 8 bytes per element */
    switch (value->type) {
    case MP_VALUE_BOOL:
        made.as.integer = value->as.integer != 0;
        /* fall through */
    case MP_VALUE_INT:
    case MP_VALUE_FLOAT:
        made.count = 1;
        break;
    case MP_VALUE_STRING:
        MP_TRY(copy_bytes(spec, value->as.string, value->count, key, &copy, error));
        made.as.string = copy;
        break;
    case MP_VALUE_BOOLS:
        MP_TRY(copy_bytes(spec, value->as.bools, value->count, key, &copy, error));
        made.as.bools = copy;
        break;
    case MP_VALUE_INTS:
    case MP_VALUE_FLOATS:
        if (__builtin_mul_overflow(value->count, (uint64_t)8, &bytes))
            return mp_fail_memory(error, value->count, key);
        MP_TRY(copy_bytes(spec, value->as.integers, bytes, key, &copy, error));
        made.as.integers = copy;
        break;
    case MP_VALUE_STRINGS:
        MP_TRY(copy_strings(spec, key, value, &made, error));
        break;
    default:
        return mp_fail(error, MP_INVALID_ARGUMENT, "the type of the value of %s must be an mp_value_type, 0 to %d, got "
                       "%d", key, MP_VALUE_STRINGS, (int)value->type);
    }
    MP_TRY(copy_bytes(spec, key, length, "a key", &copy, error));
    return adopt(spec, copy, (uint32_t)length, &made, error);
}

bool mp_shape_items(int ndim, const int64_t *shape, int64_t *items) {
    int64_t product = 1;
    for (int i = 0; i < ndim; i++)
        if (shape[i] < 1 || __builtin_mul_overflow(product, shape[i], &product))
            return false;
    *items = product;
    return true;
}

void mp_shape_text(int ndim, const int64_t *shape, char *to, size_t size) {
    size_t at = 0;
    to[0] = 0;
    for (int i = 0; i < ndim && at < size; i++)
        at += (size_t)snprintf(to + at, size - at, "%s%lld", i ? ", " : "[", (long long)shape[i]);
    if (at + 1 < size)
        memcpy(to + at, ndim ? "]" : "", ndim ? 2 : 1);
}

mp_status mp_spec_check_tensor(const mp_spec *spec, const mp_tensor_entry *entry, mp_error *error) {
    char field[96], text[96];
    const char *file = entry->file >= 0 && entry->file < spec->file_count ? spec->files[entry->file] : NULL;
#define REFUSE(part, allowed, ...)                                  \
    (snprintf(field, sizeof field, "%.70s: %s", entry->name, part), \
     mp_fail_file(error, MP_FORMAT, file ? file : mp_spec_origin(spec), -1, field, allowed, __VA_ARGS__))

    if (!file) {
        snprintf(text, sizeof text, "0 to %d", spec->file_count - 1);
        return REFUSE("file", text, "%d", (int)entry->file);
    }
    if ((unsigned)entry->dtype >= MP_DTYPE_COUNT)
        return REFUSE("type", "a type of dtype.def", "%d", (int)entry->dtype);
    if (entry->ndim < 1 || entry->ndim > MP_MAX_DIMS)
        return REFUSE("dimensions", "1 to 4", "%d", (int)entry->ndim);
    const mp_dtype_row *row = mp_dtype_get(entry->dtype);
    int64_t items, columns = entry->shape[entry->ndim - 1];
    if (!mp_shape_items(entry->ndim, entry->shape, &items)) {
        mp_shape_text(entry->ndim, entry->shape, text, sizeof text);
        return REFUSE("shape", "sizes of at least 1 whose product is below 2^63", "%s", text);
    }
    uint64_t bytes, end;
    if (columns % row->items) {
        snprintf(text, sizeof text, "multiples of %d, the block of %s", (int)row->items, row->name);
        return REFUSE("row", text, "%lld elements", (long long)columns);
    }
    if (!mp_dtype_row_bytes(entry->dtype, columns, &bytes) ||
        __builtin_mul_overflow(bytes, (uint64_t)(items / columns), &bytes))
        return REFUSE("size", "below 2^63 bytes", "%lld elements of %s", (long long)items, row->name);
    if (bytes != entry->nbytes) {
        snprintf(text, sizeof text, "%llu bytes, as type and shape imply", (unsigned long long)bytes);
        return REFUSE("size", text, "%llu bytes", (unsigned long long)entry->nbytes);
    }
    if (__builtin_add_overflow(entry->offset, bytes, &end) || end > INT64_MAX)
        return REFUSE("offset", "an end below 2^63", "%llu, with %llu bytes after it",
                      (unsigned long long)entry->offset, (unsigned long long)bytes);
#undef REFUSE
    return MP_OK;
}

mp_status mp_spec_add_tensor(mp_spec *spec, const mp_tensor_entry *entry, mp_error *error) {
    MP_TRY(check_not_frozen(spec, error));
    size_t length = strlen(entry->name);
    if (length == 0 || length > MP_SPEC_MAX_NAME)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "tensor name", "1 to 255 bytes",
                            "%zu bytes long", length);
    if (!mp_is_utf8(entry->name, length))
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "tensor name", "UTF-8", "not UTF-8");
    if (names_find(spec, &spec->tensor_names, entry->name, length) >= 0)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, entry->name, "each tensor once", "a duplicate");
    MP_TRY(mp_spec_check_tensor(spec, entry, error));
    void *tensors = spec->tensors;
    mp_status status = names_reserve(&spec->tensor_names, &tensors, sizeof *spec->tensors, error);
    spec->tensors = tensors;
    MP_TRY(status);
    mp_tensor_entry made = *entry;
    MP_TRY(copy_text(spec, entry->name, &made.name, error));
    for (int i = made.ndim; i < MP_MAX_DIMS; i++)
        made.shape[i] = 1;
    spec->tensors[names_add(spec, &spec->tensor_names, made.name, (uint32_t)length)] = made;
    return MP_OK;
}

mp_status mp_spec_set_tokens(mp_spec *spec, const mp_token_table *tokens, mp_error *error) {
    MP_TRY(check_not_frozen(spec, error));
    const char *file = mp_spec_origin(spec);
    if (tokens->count < 1)
        return mp_fail_file(error, MP_FORMAT, file, -1, "tokens", "at least 1", "%d", (int)tokens->count);
    if (tokens->count > MP_SPEC_MAX_TOKENS)
        return mp_fail_file(error, MP_LIMIT, file, -1, "tokens", "at most 1048576 (MP_SPEC_MAX_TOKENS)", "%d",
                            (int)tokens->count);
    uint64_t count = (uint64_t)tokens->count;
    if (tokens->offsets[0] != 0)
        return mp_fail_file(error, MP_FORMAT, file, -1, "token offsets", "0 as the first", "%llu",
                            (unsigned long long)tokens->offsets[0]);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t from = tokens->offsets[i], to = tokens->offsets[i + 1];
        if (to < from)
            return mp_fail_file(error, MP_FORMAT, file, -1, "token offsets", "at least the preceding offset",
                                "%llu after %llu", (unsigned long long)to, (unsigned long long)from);
        if (to - from > MP_SPEC_MAX_TOKEN_BYTES)
            return mp_fail_file(error, MP_LIMIT, file, -1, "token length",
                                "at most 65536 bytes (MP_SPEC_MAX_TOKEN_BYTES)", "%llu, of token %llu",
                                (unsigned long long)(to - from), (unsigned long long)i);
        if (tokens->control[i] > 1)
            return mp_fail_file(error, MP_FORMAT, file, -1, "token control flag", "0 or 1", "%d, of token %llu",
                                (int)tokens->control[i], (unsigned long long)i);
    }
    if (tokens->eog_count < 0 || (uint64_t)tokens->eog_count > count)
        return mp_fail_file(error, MP_FORMAT, file, -1, "end-of-generation ids", "0 to the number of tokens", "%d",
                            (int)tokens->eog_count);
    for (int i = 0; i < tokens->eog_count; i++)
        if (tokens->eog[i] < 0 || tokens->eog[i] >= tokens->count)
            return mp_fail_file(error, MP_FORMAT, file, -1, "end-of-generation id", "an id of the vocabulary", "%d",
                                (int)tokens->eog[i]);
    const void *bytes = NULL, *offsets = NULL, *control = NULL, *eog = NULL;
    MP_TRY(copy_bytes(spec, tokens->bytes, tokens->offsets[count], "token bytes", &bytes, error));
    MP_TRY(copy_bytes(spec, tokens->offsets, (count + 1) * sizeof(uint64_t), "token offsets", &offsets, error));
    MP_TRY(copy_bytes(spec, tokens->control, count, "token flags", &control, error));
    MP_TRY(copy_bytes(spec, tokens->eog, (uint64_t)tokens->eog_count * sizeof(int32_t), "token ids", &eog, error));
    spec->tokens = (mp_token_table){.count = tokens->count,
                                    .bytes = bytes,
                                    .offsets = offsets,
                                    .control = control,
                                    .eog_count = tokens->eog_count,
                                    .eog = eog};
    spec->has_tokens = true;
    return MP_OK;
}

mp_status mp_spec_set_draft(mp_spec *spec, mp_spec *draft, mp_error *error) {
    MP_TRY(check_not_frozen(spec, error));
    const char *fault = draft == spec ? "the model itself"
                        : spec->draft ? "a second one"
                                      : "one that has a draft model";
    if (draft == spec || spec->draft || draft->draft)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "a model must have at most one draft model, another model without a draft model, got %s", fault);
    mp_spec_freeze(draft);
    spec->draft = mp_spec_pin(draft);
    return MP_OK;
}

mp_spec *mp_spec_draft(const mp_spec *spec) { return spec->draft; }

void mp_spec_freeze(mp_spec *spec) {
    if (!spec->frozen) /* a second freeze may come from any thread, so it must not write */
        spec->frozen = true;
}

mp_tensor_entry *mp_spec_tensor_edit(mp_spec *spec, int index) {
    assert(!spec->frozen && index >= 0 && index < mp_spec_tensor_count(spec));
    return &spec->tensors[index];
}

/* --- reading --- */

const char *mp_spec_architecture(const mp_spec *spec) { return spec->architecture; }
int mp_spec_file_count(const mp_spec *spec) { return spec->file_count; }

const char *mp_spec_origin(const mp_spec *spec) { return spec->file_count ? spec->files[0] : "model spec"; }

/* Must hold the lock of identities. Returns true if `seen` has a place for every file. */
static bool make_room(mp_spec *spec) {
    if (spec->seen_count >= spec->file_count)
        return true;
    mp_file_id *grown = mp_realloc(spec->seen, (size_t)spec->file_count * sizeof *grown, MP_TAG_SPEC);
    if (!grown)
        return false;
    memset(grown + spec->seen_count, 0, (size_t)(spec->file_count - spec->seen_count) * sizeof *grown);
    spec->seen = grown;
    spec->seen_count = spec->file_count;
    return true;
}

bool mp_spec_same_file(const mp_spec *frozen, int index, const mp_file_id *id) {
    mp_spec *spec = (mp_spec *)frozen; /* `seen` is a cache, so a const spec may change it */
    assert(index >= 0 && index < spec->file_count);
    lock_identities();
    bool same = make_room(spec); /* without memory, no identity can be stored: report a change */
    if (same && spec->seen[index].size == 0)
        spec->seen[index] = *id;
    else if (same)
        same = mp_file_id_same(&spec->seen[index], id);
    unlock_identities();
    return same;
}

void mp_spec_note_files(const mp_spec *spec) {
    mp_file_id id;
    for (int i = 0; i < spec->file_count; i++)
        if (mp_sys_identify(spec->files[i], &id))
            mp_spec_same_file(spec, i, &id);
}

bool mp_spec_file_identity(const mp_spec *frozen, int index, mp_file_id *id) {
    mp_spec *spec = (mp_spec *)frozen;
    assert(index >= 0 && index < spec->file_count);
    lock_identities();
    bool known = index < spec->seen_count && spec->seen[index].size != 0;
    if (known)
        *id = spec->seen[index];
    unlock_identities();
    return known;
}

int mp_spec_value_count(const mp_spec *spec) { return (int)spec->keys.count; }
int mp_spec_tensor_count(const mp_spec *spec) { return (int)spec->tensor_names.count; }
const mp_token_table *mp_spec_tokens(const mp_spec *spec) { return spec->has_tokens ? &spec->tokens : NULL; }

const char *mp_spec_file(const mp_spec *spec, int index) {
    assert(index >= 0 && index < spec->file_count);
    return spec->files[index];
}

const mp_value *mp_spec_value_at(const mp_spec *spec, int index, const char **key) {
    assert(index >= 0 && index < mp_spec_value_count(spec));
    if (key)
        *key = spec->keys.names[index].text;
    return &spec->values[index];
}

const mp_tensor_entry *mp_spec_tensor_at(const mp_spec *spec, int index) {
    assert(index >= 0 && index < mp_spec_tensor_count(spec));
    return &spec->tensors[index];
}

static int find_text(const mp_spec *spec, const name_list *list, const char *name) {
    return names_find(spec, list, name, strlen(name));
}

const mp_value *mp_spec_find(const mp_spec *spec, const char *key) {
    int at = find_text(spec, &spec->keys, key);
    return at < 0 ? NULL : &spec->values[at];
}

const mp_tensor_entry *mp_spec_find_tensor(const mp_spec *spec, const char *name) {
    int at = find_text(spec, &spec->tensor_names, name);
    return at < 0 ? NULL : &spec->tensors[at];
}

bool mp_spec_has_key(const mp_spec *spec, const char *key, uint32_t length) {
    return names_find(spec, &spec->keys, key, length) >= 0;
}

bool mp_spec_has_tensor(const mp_spec *spec, const char *name, uint32_t length) {
    return names_find(spec, &spec->tensor_names, name, length) >= 0;
}
