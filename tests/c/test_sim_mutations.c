/* The simulator is not blind: bugs that are planted in the registry (mp_seam_mutation in csrc) are found, each within
 * so many schedules. A new one is a line in the sources and a row here. */
#include "sim_world.h"

#ifdef MP_SIM

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "mp_test.h"

enum { FEW = 300, SOME = 2000, MANY = 8000 };

typedef struct mutation {
    int number;
    const char *world; /* where it shows */
    int schedules;     /* within so many, from the first seed on */
} mutation;

static const mutation mutations[] = {
    /* tickets: registry/request.c */
    {101, "calls", SOME},
    {102, "calls", SOME},
    {103, "calls", FEW},
    {104, "calls", SOME},
    {105, "calls", MANY},
    {106, "calls", FEW},
    {107, "calls", SOME},
    {108, "calls", FEW},
    {109, "calls", FEW},
    {110, "calls", FEW},
    {111, "streams", MANY},
    {112, "calls", FEW},
    {113, "calls", FEW},
    /* event loops: registry/notifier.c */
    {121, "calls", FEW},
    {122, "calls", SOME},
    {123, "calls", SOME},
    /* bells: registry/pool/bell.c */
    {131, "calls", MANY},
    {132, "calls", FEW},
    {133, "calls", MANY},
    {134, "calls", FEW},
    /* registry/maintenance.c */
    {141, "ticks", SOME},
    {142, "ticks", SOME},
    {143, "ticks", SOME},
    {144, "ticks", FEW},
    {145, "faults", SOME},
    {146, "ticks", FEW},
    /* registry/cores.c */
    {151, "cores", FEW},
    {152, "cores", SOME},
    {153, "cores", FEW},
    {154, "cores", SOME},
    {155, "cores", SOME},
    {156, "faults", MANY},
    {157, "cores", FEW},
};
enum { COUNT = sizeof(mutations) / sizeof(mutations[0]) };

static bool seek(const mutation *m, int *schedules, char *said, int size) {
    const sim_world *world = sim_world_find(m->world);
    MP_CHECK(world != NULL);
    mp_seam_armed = m->number;
    bool found = sim_world_finds(world, 1, m->schedules, schedules, said, size);
    mp_seam_armed = 0;
    return found;
}

MP_TEST_SECONDS(sim_mutations_are_found, 120) {
    char said[2048];
    int missed = 0;
    for (int i = 0; i < COUNT; i++) {
        int schedules;
        bool found = seek(&mutations[i], &schedules, said, sizeof(said));
        char *end = strchr(said, '\n');
        if (end)
            *end = 0;
        if (!strncmp(said, "SIM ", 4) || !found)
            printf("sim: mutation %d %s %d schedules of %s: %s\n", mutations[i].number,
                   found ? "found after" : "NOT found in", schedules, mutations[i].world, found ? said + 4 : "");
        else
            printf("sim: mutation %d found after %d schedules of %s by an assertion: %s\n", mutations[i].number,
                   schedules, mutations[i].world, said);
        missed += !found;
    }
    MP_CHECK_INT(missed, 0);
}

/* Every planted bug of the sources has a row, and stands in one place. */
MP_TEST(sim_mutations_all_have_a_row) {
    char command[1200], line[64];
    snprintf(command, sizeof(command), "grep -rhoE 'mp_seam_mutation\\([0-9]+\\)' '%s/../csrc'", mp_test_root());
    FILE *grep = popen(command, "r");
    MP_CHECK(grep != NULL);
    int places[COUNT] = {0}, found = 0;
    while (fgets(line, sizeof(line), grep)) {
        int number = atoi(strchr(line, '(') + 1), at = 0;
        while (at < COUNT && mutations[at].number != number)
            at++;
        if (at == COUNT)
            MP_FAIL("mutation %d has no row in the test", number);
        places[at]++;
        found++;
    }
    pclose(grep);
    for (int i = 0; i < COUNT; i++)
        if (places[i] != 1)
            MP_FAIL("mutation %d stands in %d places of csrc", mutations[i].number, places[i]);
    MP_CHECK(found >= 20);
}

#endif
