/* isolated_fixture.h: a model with two engines, each in a worker process. */
#ifndef ISOLATED_FIXTURE_H
#define ISOLATED_FIXTURE_H

#include "base/topology.h"
#include "model_fixture.h"
#include "test_isolation.h"

typedef struct isolated {
    mp_spec *spec;
    mp_team *team;
    mp_lease lease;
    mp_budget budget;
    mp_loader loader;
    mp_model *model;
    mp_engine *engine[2];
} isolated;

static inline void isolated_load(isolated *it, mp_spec *spec, mp_compute compute, int threads,
                                 mp_isolation_options options) {
    mp_error error;
    *it = (isolated){.spec = spec};
    it->budget.limit = UINT64_MAX;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(mp_team_create(threads - 1, &it->team, &error), &error);
    static mp_cpu_set cpus; /* simulates a machine with several memory nodes, of which one is used */
    if (mp_sys_get_affinity(&cpus)) {
        mp_team_place place = {.cpus = &cpus, .threads = threads};
        mp_team_lease_at(it->team, &place, 1, &it->lease);
        MP_CHECK(it->lease.bound);
    } else {
        mp_team_lease(it->team, threads, &it->lease);
    }
    MP_CHECK(it->lease.threads == threads);
    MP_CHECK_OK(mp_isolation_loader(spec, compute, &options, &it->loader, &error), &error);
    MP_CHECK_OK(it->loader.ops->load(it->loader.self, &it->lease, &it->budget, NULL, &it->model, &error), &error);
    for (int i = 0; i < 2; i++)
        MP_CHECK_OK(it->model->ops->engine(it->model, &it->budget, &it->engine[i], &error), &error);
}

static inline void isolated_unload(isolated *it) {
    for (int i = 0; i < 2; i++)
        it->engine[i]->ops->destroy(it->engine[i]);
    it->model->ops->destroy(it->model);
    it->loader.ops->destroy(it->loader.self);
    mp_team_return(&it->lease);
    mp_team_destroy(it->team);
    mp_spec_unpin(it->spec);
    MP_CHECK_INT(it->budget.used, 0);
}

#endif
