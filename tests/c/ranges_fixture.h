/* ranges_fixture.h: the range of every hyper-parameter. A value of a wrong type is refused with an error that names the
 * key and the allowed values, so one load per key shows its bounds. */
#ifndef RANGES_FIXTURE_H
#define RANGES_FIXTURE_H

#include "missing_fixture.h"

typedef struct range {
    const char *key; /* "." in front: behind the name of the architecture */
    const char *allowed;
} range;

/* Copy a spec with another value of `key`, or without it if `changed` is NULL. */
static inline mp_spec *spec_with(const mp_spec *from, const char *key, const mp_value *changed) {
    mp_error error;
    mp_spec *spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(spec, mp_spec_architecture(from), &error), &error);
    MP_CHECK_OK(mp_spec_add_file(spec, mp_spec_file(from, 0), &error), &error);
    for (int i = 0; i < mp_spec_value_count(from); i++) {
        const char *name;
        const mp_value *value = mp_spec_value_at(from, i, &name);
        if (strcmp(name, key) != 0)
            MP_CHECK_OK(mp_spec_set(spec, name, value, &error), &error);
    }
    if (changed)
        MP_CHECK_OK(mp_spec_set(spec, key, changed, &error), &error);
    for (int i = 0; i < mp_spec_tensor_count(from); i++)
        MP_CHECK_OK(mp_spec_add_tensor(spec, mp_spec_tensor_at(from, i), &error), &error);
    if (mp_spec_tokens(from))
        MP_CHECK_OK(mp_spec_set_tokens(spec, mp_spec_tokens(from), &error), &error);
    mp_spec_freeze(spec);
    return spec;
}

/* Copy a spec; `key` becomes an array of two bools. */
static inline mp_spec *spec_with_bools(const mp_spec *from, const char *key) {
    static const uint8_t bools[] = {1, 0};
    const mp_value wrong = {.type = MP_VALUE_BOOLS, .gguf_type = -1, .count = 2, .as.bools = bools};
    return spec_with(from, key, &wrong);
}

/* Check the range of each key of a model. Drops the reference to `base`. */
static inline void check_ranges(mp_spec *base, int count, const range *ranges) {
    mp_error error;
    char key[128];
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(load_only(mp_spec_pin(base), MP_COMPUTE_AUTO, &error), &error);
    for (int i = 0; i < count; i++) {
        const bool own = ranges[i].key[0] == '.';
        snprintf(key, sizeof key, "%s%s", own ? mp_spec_architecture(base) : "", ranges[i].key);
        MP_CHECK_STATUS(load_only(spec_with_bools(base, key), MP_COMPUTE_AUTO, &error), MP_FORMAT, &error);
        MP_CHECK_STR(error.field, key);
        if (strcmp(error.allowed, ranges[i].allowed) != 0)
            MP_FAIL("%s: allowed is \"%s\", expected \"%s\"", key, error.allowed, ranges[i].allowed);
    }
    mp_spec_unpin(base);
}

#define RANGES(list) ((int)(sizeof(list) / sizeof *(list))), list

#endif
