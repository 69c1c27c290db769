/* spec_fixture.h: an unfrozen copy of a spec, for tests that change one value of it. */
#ifndef SPEC_FIXTURE_H
#define SPEC_FIXTURE_H

#include "base/alloc.h"
#include "files/spec.h"

static inline mp_status fill_copy(mp_spec *copy, const mp_spec *spec, mp_error *error) {
    const char *key, *architecture = mp_spec_architecture(spec);
    if (architecture[0])
        MP_TRY(mp_spec_set_architecture(copy, architecture, error));
    for (int i = 0; i < mp_spec_file_count(spec); i++)
        MP_TRY(mp_spec_add_file(copy, mp_spec_file(spec, i), error));
    for (int i = 0; i < mp_spec_value_count(spec); i++) {
        const mp_value *value = mp_spec_value_at(spec, i, &key);
        MP_TRY(mp_spec_set(copy, key, value, error));
    }
    for (int i = 0; i < mp_spec_tensor_count(spec); i++)
        MP_TRY(mp_spec_add_tensor(copy, mp_spec_tensor_at(spec, i), error));
    return mp_spec_tokens(spec) ? mp_spec_set_tokens(copy, mp_spec_tokens(spec), error) : MP_OK;
}

/* Copy `spec` into a new, unfrozen spec. The caller owns *copy. */
static inline mp_status copy_spec(const mp_spec *spec, mp_spec **copy, mp_error *error) {
    *copy = mp_spec_create();
    if (!*copy)
        return mp_fail_memory(error, 1, "a model spec");
    const mp_status status = fill_copy(*copy, spec, error);
    if (status != MP_OK) {
        mp_spec_unpin(*copy);
        *copy = NULL;
    }
    return status;
}

#endif
