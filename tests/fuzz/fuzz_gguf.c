/* fuzz_gguf.c: any bytes as a GGUF file. An accepted file must be valid: every value can be read, every tensor is
 * within the file, a copy equals the spec. A refused file must yield an error with field, value and allowed values. */
#include "require.h"
#include "../c/spec_fixture.h"

#include <float.h>

#include "base/alloc.h"
#include "files/gguf.h"

static volatile uint64_t sink;

static void read_value(const mp_spec *spec, const char *key, const mp_value *v) {
    uint64_t sum = 0;
    REQUIRE(mp_spec_find(spec, key) == v);
    switch (v->type) {
    case MP_VALUE_STRING:
        for (uint64_t i = 0; i <= v->count; i++)
            sum += (uint8_t)v->as.string[i];
        REQUIRE(v->as.string[v->count] == 0);
        break;
    case MP_VALUE_BOOLS:
        for (uint64_t i = 0; i < v->count; i++)
            REQUIRE(v->as.bools[i] <= 1);
        break;
    case MP_VALUE_INTS:
        for (uint64_t i = 0; i < v->count; i++)
            sum += (uint64_t)v->as.integers[i];
        break;
    case MP_VALUE_FLOATS:
        for (uint64_t i = 0; i < v->count; i++)
            sum += v->as.reals[i] > 1;
        break;
    case MP_VALUE_STRINGS:
        REQUIRE(v->as.strings.offsets[0] == 0);
        for (uint64_t i = 0; i < v->count; i++) {
            REQUIRE(v->as.strings.offsets[i] <= v->as.strings.offsets[i + 1]);
            for (uint64_t j = v->as.strings.offsets[i]; j < v->as.strings.offsets[i + 1]; j++)
                sum += (uint8_t)v->as.strings.bytes[j];
        }
        break;
    case MP_VALUE_BOOL:
        REQUIRE(v->as.integer == 0 || v->as.integer == 1);
        break;
    default:
        REQUIRE(v->type == MP_VALUE_INT || v->type == MP_VALUE_FLOAT);
    }
    sink += sum;
}

static void read_typed(const mp_spec *spec, const char *key) {
    int64_t whole = 0, many[3], def = 4;
    double real;
    bool flag;
    const char *text;
    mp_error error;
    if (strlen(key) > 200) /* mpool never looks up longer keys */
        return;
    if (mp_spec_int(spec, key, -5, 5, &def, &whole, &error) == MP_OK)
        REQUIRE(whole >= -5 && whole <= 5);
    else
        REQUIRE(error.code == MP_FORMAT && error.message[0] && error.field[0] && error.got[0] && error.allowed[0]);
    if (mp_spec_ints(spec, key, 3, 0, 100, NULL, many, &error) == MP_OK)
        REQUIRE(many[0] >= 0 && many[1] <= 100 && many[2] >= 0);
    if (mp_spec_float(spec, key, FLT_MIN, 8, NULL, &real, &error) == MP_OK)
        REQUIRE(real > 0 && real <= 8);
    if (mp_spec_bool(spec, key, NULL, &flag, &error) == MP_OK)
        sink += flag;
    if (mp_spec_string(spec, key, NULL, &text, &error) == MP_OK)
        sink += strlen(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mp_spec *spec, *copy;
    mp_error error;
    uint64_t before = mp_alloc_bytes(MP_TAG_SPEC);
    mp_error_clear(&error);
    mp_status status = mp_gguf_parse(data, size, "fuzz.gguf", &spec, &error);
    if (status != MP_OK) {
        REQUIRE(status == error.code && error.message[0] && !spec);
        REQUIRE(status == MP_UNSUPPORTED || (error.field[0] && error.got[0] && error.allowed[0]));
        REQUIRE(status == MP_UNSUPPORTED || status == MP_FORMAT || status == MP_LIMIT);
        REQUIRE(mp_alloc_bytes(MP_TAG_SPEC) == before);
        return 0;
    }
    for (int i = 0; i < mp_spec_value_count(spec); i++) {
        const char *key;
        const mp_value *value = mp_spec_value_at(spec, i, &key);
        read_value(spec, key, value);
        read_typed(spec, key);
    }
    read_typed(spec, "{arch}.block_count");
    uint64_t end = 0;
    for (int i = 0; i < mp_spec_tensor_count(spec); i++) {
        const mp_tensor_entry *t = mp_spec_tensor_at(spec, i);
        REQUIRE(mp_spec_find_tensor(spec, t->name) == t);
        REQUIRE(t->file == 0 && t->offset >= end && t->nbytes <= size && t->offset <= size - t->nbytes);
        end = t->offset + t->nbytes;
    }
    REQUIRE(copy_spec(spec, &copy, &error) == MP_OK);
    REQUIRE(mp_spec_value_count(copy) == mp_spec_value_count(spec));
    for (int i = 0; i < mp_spec_value_count(copy); i++) {
        const char *key;
        const mp_value *value = mp_spec_value_at(copy, i, &key);
        read_value(copy, key, value);
    }
    REQUIRE(strcmp(mp_spec_architecture(copy), mp_spec_architecture(spec)) == 0);
    mp_spec_unpin(spec);
    mp_spec_unpin(copy);
    REQUIRE(mp_alloc_bytes(MP_TAG_SPEC) == before);
    return 0;
}
