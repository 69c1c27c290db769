/* The simulator finds each planted bug of mutations.py within a given number of schedules. build.py plants them in
 * copies of the sources and writes the table included here. */
#include "sim_world.h"

#ifdef MP_SIM

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "mp_test.h"

typedef struct mutation {
    int number;
    const char *world; /* the world that shows it */
    int schedules;     /* found within this number of schedules from the first seed on */
    const char *file, *what;
} mutation;

static const mutation mutations[] = {
#define MP_MUTATION(number, world, schedules, file, what) {number, world, schedules, file, what},
#include "mutations.def"
#undef MP_MUTATION
};
enum { COUNT = sizeof(mutations) / sizeof(mutations[0]) };

static bool seek(const mutation *m, int *schedules, char *said, int size) {
    const sim_world *world = sim_world_find(m->world);
    said[0] = 0;
    *schedules = 0;
    if (!world)
        return false;
    sim_armed = m->number;
    bool found = sim_world_finds(world, 1, m->schedules, schedules, said, size);
    sim_armed = 0;
    for (char *c = said; *c; c++) /* the report may quote freed memory */
        if ((*c < ' ' || *c > '~') && *c != '\n')
            *c = '?';
    return found;
}

MP_TEST_SECONDS(sim_mutations_are_found, 300) {
    char said[2048];
    int missed = 0;
    if (getenv("MPOOL_SIM_PERCENT"))
        MP_SKIP("each planted bug needs its number of schedules; MPOOL_SIM_PERCENT is set");
    for (int i = 0; i < COUNT; i++) {
        int schedules;
        bool found = seek(&mutations[i], &schedules, said, sizeof(said));
        char *end = strchr(said, '\n');
        if (end)
            *end = 0;
        if (!strncmp(said, "SIM ", 4) || !found)
            printf("sim: mutation %d %s %d schedules of %s: %s\n", mutations[i].number,
                   found ? "found after" : "NOT found in", schedules, mutations[i].world,
                   found ? said + 4 : mutations[i].what);
        else
            printf("sim: mutation %d found after %d schedules of %s by an assertion: %s\n", mutations[i].number,
                   schedules, mutations[i].world, said);
        missed += !found;
    }
    MP_CHECK_INT(missed, 0);
}

#endif
