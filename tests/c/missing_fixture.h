/* missing_fixture.h: models whose files lack a tensor or a row of it. */
#ifndef MISSING_FIXTURE_H
#define MISSING_FIXTURE_H

#include "model_fixture.h"

/* Copy a spec without tensor number `missing`, or with `fewer` rows less of it. -1: copy all tensors. More tensors may
 * be added to the copy. */
static inline mp_spec *spec_copy(const mp_spec *from, int missing, int fewer) {
    mp_error error;
    mp_spec *spec = mp_spec_create();
    MP_CHECK_OK(mp_spec_set_architecture(spec, mp_spec_architecture(from), &error), &error);
    MP_CHECK_OK(mp_spec_add_file(spec, mp_spec_file(from, 0), &error), &error);
    for (int i = 0; i < mp_spec_value_count(from); i++) {
        const char *key;
        const mp_value *value = mp_spec_value_at(from, i, &key);
        MP_CHECK_OK(mp_spec_set(spec, key, value, &error), &error);
    }
    for (int i = 0; i < mp_spec_tensor_count(from); i++) {
        mp_tensor_entry entry = *mp_spec_tensor_at(from, i);
        if (i == missing && fewer) {
            entry.nbytes -= entry.nbytes / (uint64_t)entry.shape[0] * (uint64_t)fewer;
            entry.shape[0] -= fewer;
        }
        if (i != missing || fewer)
            MP_CHECK_OK(mp_spec_add_tensor(spec, &entry, &error), &error);
    }
    if (mp_spec_tokens(from))
        MP_CHECK_OK(mp_spec_set_tokens(spec, mp_spec_tokens(from), &error), &error);
    return spec;
}

static inline mp_spec *spec_without(const mp_spec *from, int missing, int fewer) {
    mp_spec *spec = spec_copy(from, missing, fewer);
    mp_spec_freeze(spec);
    return spec;
}

/* Load a model and free it. Takes ownership of `spec`. */
static inline mp_status load_only(mp_spec *spec, mp_compute compute, mp_error *error) {
    mp_team *team;
    mp_loader loader = {0};
    mp_model *model = NULL;
    mp_budget budget = {.limit = UINT64_MAX};
    mp_lease lease;
    MP_CHECK_OK(mp_team_create(0, &team, error), error);
    mp_team_lease(team, 1, &lease);
    mp_status status = mp_model_loader(spec, compute, &loader, error);
    if (status == MP_OK)
        status = loader.ops->load(loader.self, &lease, &budget, NULL, &model, error);
    if (model)
        model->ops->destroy(model);
    if (loader.ops)
        loader.ops->destroy(loader.self);
    mp_team_return(&lease);
    mp_team_destroy(team);
    mp_spec_unpin(spec);
    return status;
}

#endif
