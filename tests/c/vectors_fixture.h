/* vectors_fixture.h: threads for the tests of exact searches. */
#ifndef VECTORS_FIXTURE_H
#define VECTORS_FIXTURE_H

#include <stdlib.h>

#include "base/options.h"
#include "base/team.h"
#include "kernels/kernels.h"
#include "mp_test.h"

static inline mp_team *lease_threads(int threads, mp_lease *lease) {
    mp_error error;
    mp_team *team;
    mp_kernels_init();
    setenv("MPOOL_SPIN_US", "0", 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
    MP_CHECK_OK(mp_team_create(threads - 1, &team, &error), &error);
    mp_team_lease(team, threads, lease);
    MP_CHECK_INT(lease->threads, threads);
    return team;
}

static inline void return_threads(mp_team *team, mp_lease *lease) {
    mp_team_return(lease);
    mp_team_destroy(team);
}

#endif
