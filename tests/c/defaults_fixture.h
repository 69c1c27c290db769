/* defaults_fixture.h: optional hyper-parameters. A model without a key has the bits of the key's default value, and
 * another value gives other bits: the key is read, and its value used. */
#ifndef DEFAULTS_FIXTURE_H
#define DEFAULTS_FIXTURE_H

#include <stdlib.h>

#include "ranges_fixture.h"

/* Values are written as text: true, false, an integer, a number with a point, numbers between commas, or a string. */
typedef struct optional_key {
    const char *key;   /* "." in front: behind the name of the architecture */
    const char *usual; /* the default, or NULL if it cannot be written */
    const char *other; /* a value that changes the result, or NULL: no other value fits the file */
} optional_key;

enum { VALUES_MAX = 8 };

static inline mp_value value_of(const char *text, double *list) {
    mp_value value = {.type = MP_VALUE_STRING, .gguf_type = -1, .count = 1};
    char *end;
    const bool yes = strcmp(text, "true") == 0;
    if (yes || strcmp(text, "false") == 0) {
        value.type = MP_VALUE_BOOL;
        value.as.integer = yes;
    } else if (strchr(text, ',')) {
        value.type = MP_VALUE_FLOATS;
        value.as.reals = list;
        for (value.count = 0; *text && value.count < VALUES_MAX; text = *end ? end + 1 : end)
            list[value.count++] = strtod(text, &end);
    } else if (*text && (value.as.integer = strtoll(text, &end, 10), !*end)) {
        value.type = MP_VALUE_INT;
    } else if (*text && (value.as.real = strtod(text, &end), !*end)) {
        value.type = MP_VALUE_FLOAT;
    } else {
        value.as.string = text;
        value.count = strlen(text);
    }
    return value;
}

/* Check each key. hash: loads a model, runs it and returns a hash of its results; takes ownership of `spec`. Drops the
 * reference to `base`. */
static inline void check_defaults(mp_spec *base, uint64_t (*hash)(mp_spec *spec), int count, const optional_key *keys) {
    char key[128];
    double list[VALUES_MAX];
    for (int i = 0; i < count; i++) {
        snprintf(key, sizeof key, "%s%s", keys[i].key[0] == '.' ? mp_spec_architecture(base) : "", keys[i].key);
        const uint64_t without = hash(spec_with(base, key, NULL));
        const mp_value usual = value_of(keys[i].usual ? keys[i].usual : "", list);
        if (keys[i].usual && hash(spec_with(base, key, &usual)) != without)
            MP_FAIL("%s: without %s, the result is not that of %s", mp_spec_architecture(base), key, keys[i].usual);
        const mp_value other = value_of(keys[i].other ? keys[i].other : "", list);
        if (keys[i].other && hash(spec_with(base, key, &other)) == without)
            MP_FAIL("%s: %s = %s changes nothing", mp_spec_architecture(base), key, keys[i].other);
    }
    mp_spec_unpin(base);
}

/* Keys of experts that decoders and encoders share. */
#define EXPERT_KEYS                                                                       \
    {"mpool.expert_gate", "softmax", "sigmoid"}, {"mpool.expert_normalise", "true", "false"}, \
    {"mpool.expert_scale", "1.0", "2.0"}, {"mpool.expert_corrected", "false", NULL},          \
    {"mpool.expert_groups", "1", NULL}

#define KEYS(list) ((int)(sizeof(list) / sizeof *(list))), list

#endif
