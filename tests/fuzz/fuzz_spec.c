/* fuzz_spec.c: any bytes as a series of calls that fill a model spec, then weights over a file in memory. A tensor that
 * both the spec and the weights accept must be within the file, to its last byte. */
#include "require.h"

#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "files/weights.h"

enum { FILES = 2, MAX_BYTES = 70000 };

typedef struct input {
    const uint8_t *data;
    size_t size;
} input;

static volatile uint64_t sink;

static uint8_t next_byte(input *in) {
    if (!in->size)
        return 0;
    in->size--;
    return *in->data++;
}

static uint64_t next_u64(input *in) {
    uint64_t x = 0;
    for (int i = 0; i < 8; i++)
        x |= (uint64_t)next_byte(in) << 8 * i;
    return x;
}

/* Return a small number, one near a power of two, one near the ends of the 64-bit range, or any number. */
static uint64_t next_number(input *in) {
    uint8_t how = next_byte(in);
    uint64_t x = next_byte(in);
    switch (how & 7) {
    case 0: return x & 15;
    case 1: return x;
    case 2: return x * 32;
    case 3: return ((uint64_t)1 << (x & 63)) + (how >> 3) - 8;
    case 4: return (uint64_t)INT64_MAX - (x & 7);
    case 5: return UINT64_MAX - x;
    case 6: return x << 8 | next_byte(in);
    default: return next_u64(in);
    }
}

static const char *next_name(input *in, char *to) {
    size_t length = next_byte(in) & 7;
    for (size_t i = 0; i < length; i++)
        to[i] = (char)next_byte(in);
    to[length] = 0;
    return to;
}

static int open_file(char *path, size_t size) {
    int fd = memfd_create("fuzz", 0);
    snprintf(path, size, "/proc/self/fd/%d", fd);
    return fd;
}

static void add_tensor(input *in, mp_spec *spec) {
    char name[8];
    mp_error error;
    mp_tensor_entry entry;
    memset(&entry, 0, sizeof entry);
    entry.name = next_name(in, name);
    uint8_t how = next_byte(in);
    entry.dtype = (mp_dtype)(how & 1 ? next_byte(in) % MP_DTYPE_COUNT : (int8_t)next_byte(in));
    entry.ndim = how & 2 ? 1 + next_byte(in) % 4 : (int8_t)next_byte(in);
    for (int i = 0; i < MP_MAX_DIMS; i++)
        entry.shape[i] = (int64_t)next_number(in);
    if (how & 4 && (unsigned)entry.dtype < MP_DTYPE_COUNT && entry.ndim >= 1 && entry.ndim <= 4) {
        /* choose whole blocks and the right size, so that the input reaches later checks */
        int64_t *columns = &entry.shape[entry.ndim - 1], items = 1;
        *columns = (int64_t)((uint64_t)*columns % 64 + 1) * mp_dtype_get(entry.dtype)->items;
        for (int i = 0; i < entry.ndim - 1; i++) {
            entry.shape[i] = (int64_t)((uint64_t)entry.shape[i] % 9 + 1);
            items *= entry.shape[i];
        }
        REQUIRE(mp_dtype_row_bytes(entry.dtype, *columns, &entry.nbytes));
        entry.nbytes *= (uint64_t)items;
    } else {
        entry.nbytes = next_number(in);
    }
    entry.file = how & 8 ? next_byte(in) % FILES : (int8_t)next_byte(in);
    entry.offset = next_number(in);
    int before = mp_spec_tensor_count(spec);
    mp_status status = mp_spec_add_tensor(spec, &entry, &error);
    REQUIRE(status == MP_OK || (status == MP_FORMAT && error.code == status && error.field[0] && error.got[0]));
    REQUIRE(mp_spec_tensor_count(spec) == before + (status == MP_OK));
}

static void set_value(input *in, mp_spec *spec) {
    char key[8];
    uint8_t bytes[64];
    int64_t integers[8];
    double reals[8];
    uint64_t offsets[9];
    mp_error error;
    mp_value value;
    memset(&value, 0, sizeof value);
    next_name(in, key);
    value.type = (mp_value_type)(next_byte(in) % 9);
    value.gguf_type = (int8_t)next_byte(in);
    value.count = next_byte(in) & 7;
    for (int i = 0; i < 64; i++)
        bytes[i] = next_byte(in);
    for (int i = 0; i < 8; i++) {
        integers[i] = (int64_t)next_number(in);
        memcpy(&reals[i], &bytes[8 * i], 8);
    }
    offsets[0] = bytes[0] & 1 ? bytes[0] % 9 : 0;
    for (int i = 1; i < 9; i++)
        offsets[i] = bytes[i] % 65; /* within the 64 bytes, as mp_spec_set requires of its caller */
    switch (value.type) {
    case MP_VALUE_BOOL:
    case MP_VALUE_INT: value.as.integer = integers[0]; break;
    case MP_VALUE_FLOAT: value.as.real = reals[0]; break;
    case MP_VALUE_STRING: value.as.string = (const char *)bytes; break;
    case MP_VALUE_BOOLS: value.as.bools = bytes; break;
    case MP_VALUE_INTS: value.as.integers = integers; break;
    case MP_VALUE_FLOATS: value.as.reals = reals; break;
    case MP_VALUE_STRINGS:
        value.as.strings.bytes = (const char *)bytes;
        value.as.strings.offsets = offsets;
        break;
    default: break;
    }
    int before = mp_spec_value_count(spec);
    mp_status status = mp_spec_set(spec, key, &value, &error);
    REQUIRE(status == MP_OK || status == MP_FORMAT || status == MP_INVALID_ARGUMENT);
    REQUIRE(mp_spec_value_count(spec) == before + (status == MP_OK));
    int64_t whole, each[4], def = 0;
    if (mp_spec_int_capped(spec, key, 0, 1000, NULL, &whole, &error) == MP_OK)
        REQUIRE(whole >= 0 && whole <= 1000);
    if (mp_spec_ints(spec, key, 4, 1, 9, &def, each, &error) == MP_OK)
        sink += (uint64_t)each[3];
}

static void set_tokens(input *in, mp_spec *spec) {
    uint8_t bytes[64], control[8];
    uint64_t offsets[9];
    int32_t eog[4];
    mp_error error;
    for (int i = 0; i < 64; i++)
        bytes[i] = next_byte(in);
    for (int i = 0; i < 8; i++)
        control[i] = next_byte(in) & 1;
    offsets[0] = 0;
    for (int i = 1; i < 9; i++)
        offsets[i] = next_byte(in) % 65;
    for (int i = 0; i < 4; i++)
        eog[i] = (int8_t)next_byte(in);
    mp_token_table tokens = {.count = (next_byte(in) % 10) - 1, .bytes = bytes, .offsets = offsets,
                             .control = control, .eog_count = (next_byte(in) % 6) - 1, .eog = eog};
    if (tokens.count > 8 || tokens.eog_count > 4)
        return;
    if (mp_spec_set_tokens(spec, &tokens, &error) == MP_OK) {
        const mp_token_table *got = mp_spec_tokens(spec);
        for (int i = 0; i < got->eog_count; i++)
            REQUIRE(got->eog[i] >= 0 && got->eog[i] < got->count);
        for (uint64_t i = 0; i < got->offsets[got->count]; i++)
            sink += got->bytes[i];
    }
}

static void use_weights(mp_spec *spec) {
    mp_weights *weights;
    mp_error error;
    mp_status status = mp_weights_open(spec, &weights, &error);
    if (status != MP_OK) {
        REQUIRE(status == MP_FORMAT && error.message[0] && !weights);
        return;
    }
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *entry = mp_spec_tensor_at(spec, i);
        int64_t any[MP_MAX_DIMS + 1] = {-1, -1, -1, -1, -1};
        mp_tensor t;
        REQUIRE(mp_weights_get_any(weights, entry->name, entry->ndim, entry->shape, &t, &error) == MP_OK);
        REQUIRE(mp_weights_get_any(weights, entry->name, entry->ndim, any, &t, &error) == MP_OK);
        REQUIRE(mp_weights_get_any(weights, entry->name, entry->ndim + 1, any, &t, &error) == MP_FORMAT);
        REQUIRE(t.nbytes <= MAX_BYTES);
        /* The page after the end of the file is not mapped: a read past the end faults or poisons the mapping. */
        for (uint64_t j = 0; j < t.nbytes; j++)
            sink += t.data[j];
        REQUIRE(mp_tensor_row(&t, 0) == t.data);
        mp_weights_release(weights, &t);
    }
    REQUIRE(!mp_weights_poisoned(weights) && mp_weights_unchanged(weights));
    mp_weights_close(weights);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int fds[FILES];
    static char paths[FILES][64];
    mp_error error;
    input in = {data, size};
    if (!paths[0][0]) {
        mp_file_map_init();
        for (int i = 0; i < FILES; i++)
            fds[i] = open_file(paths[i], sizeof paths[i]);
    }
    uint64_t before = mp_alloc_bytes(MP_TAG_SPEC);
    mp_spec *spec = mp_spec_create();
    REQUIRE(spec);
    for (int i = 0; i < FILES; i++) {
        REQUIRE(ftruncate(fds[i], (off_t)(next_byte(&in) << 8 | next_byte(&in)) + 1) == 0);
        REQUIRE(mp_spec_add_file(spec, paths[i], &error) == MP_OK);
    }
    while (in.size) {
        switch (next_byte(&in) & 7) {
        case 0: set_value(&in, spec); break;
        case 1: set_tokens(&in, spec); break;
        default: add_tensor(&in, spec); break;
        }
    }
    use_weights(spec);
    mp_spec_unpin(spec);
    REQUIRE(mp_alloc_bytes(MP_TAG_SPEC) == before);
    return 0;
}
