/* parts_fixture.h: a weight file for parts of a network, and the builder that loads them, without a model. */
#ifndef MP_PARTS_FIXTURE_H
#define MP_PARTS_FIXTURE_H

#include "model_fixture.h"
#include "models/nn/builder.h"

typedef struct tiny_parts {
    tiny_file file;
    char path[512];
    mp_weights *weights;
    mp_team *team;
    mp_lease lease;
    mp_budget budget;
    mp_weight_store store;
    mp_builder builder;
} tiny_parts;

/* Begin a file `name` in the test's folder. Then add its tensors to parts->file. */
static inline void tiny_parts_begin(tiny_parts *parts, const char *name, uint64_t seed) {
    mp_error error;
    *parts = (tiny_parts){.budget = {.limit = UINT64_MAX}, .file = {.spec = mp_spec_create(), .random = {seed}}};
    snprintf(parts->path, sizeof parts->path, "%s/%s", mp_test_directory(), name);
    MP_CHECK_OK(mp_spec_add_file(parts->file.spec, parts->path, &error), &error);
}

/* Write the file, open its weights, and begin to build. Then read the parts with parts->builder. */
static inline void tiny_parts_open(tiny_parts *parts, mp_compute compute, int threads) {
    mp_error error;
    mp_spec_freeze(parts->file.spec);
    mp_test_write_file(parts->path, parts->file.bytes, parts->file.used);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(mp_team_create(threads - 1, &parts->team, &error), &error);
    mp_team_lease(parts->team, threads, &parts->lease);
    MP_CHECK_OK(mp_weights_open(parts->file.spec, &parts->weights, &error), &error);
    mp_builder_init(&parts->builder, &parts->store, parts->weights, compute);
}

static inline void tiny_parts_finish(tiny_parts *parts) {
    mp_error error;
    MP_CHECK_OK(mp_builder_finish(&parts->builder, &parts->lease, &parts->budget, NULL, &error), &error);
}

static inline void tiny_parts_close(tiny_parts *parts) {
    mp_weight_store_deinit(&parts->store);
    mp_weights_close(parts->weights);
    mp_team_return(&parts->lease);
    mp_team_destroy(parts->team);
    mp_spec_unpin(parts->file.spec);
    free(parts->file.bytes);
}

#endif
