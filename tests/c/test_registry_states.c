/* Every pair of states of every machine of the registry (state_machine.h): the setter makes each legal transition and
 * refuses each other one.
 *
 * The legal transitions are written down here a second time, independently of the tables, so that a wrong bit in a
 * table is a difference between two descriptions. A build with assertions must stop at an illegal transition, which is
 * tried in a forked child. A release build must keep the state and count the refusal. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mp_test.h"
#include "registry/audit.h"
#include "registry/entry.h"
#include "test_registry_fake.h"

enum { STATES_MAX = 8 };

typedef struct scene { /* one object of each type that has a state, without a registry or threads */
    mp_services services;
    mp_entry entry;
    mp_worker worker;
    mp_ticket ticket;
} scene;

static void scene_init(scene *scene) {
    memset(scene, 0, sizeof(*scene));
    fake_hold_no_locks();
    scene->entry.services = &scene->services;
    strcpy(scene->entry.key, "a");
    mp_mutex_init(&scene->entry.lock);
    mp_cond_init(&scene->entry.changed);
    scene->worker.entry = scene->ticket.entry = &scene->entry;
}

static void scene_deinit(scene *scene) {
    mp_cond_deinit(&scene->entry.changed);
    mp_mutex_deinit(&scene->entry.lock);
}

typedef struct walk {
    const mp_state_machine *machine;
    const char *legal[STATES_MAX]; /* row = from, column = to; x = legal */
    void (*put)(scene *scene, int state); /* stores the state directly */
    int (*get)(const scene *scene);
    void (*set)(scene *scene, int state); /* calls the setter under test */
} walk;

/* Tries one illegal transition. */
static void expect_refusal(const walk *walk, scene *scene, int to) {
#ifdef NDEBUG
    walk->set(scene, to);
    MP_CHECK_INT(scene->services.metrics[MP_METRIC_illegal_transitions], 1);
#else
    fflush(NULL);
    pid_t child = fork();
    MP_CHECK(child >= 0);
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(1);
        walk->set(scene, to);
        _exit(0);
    }
    int status = 0;
    MP_CHECK(waitpid(child, &status, 0) == child);
    MP_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
#endif
}

static void walk_every_pair(const walk *walk) {
    const mp_state_machine *machine = walk->machine;
    MP_CHECK(machine->count >= 2 && machine->count <= STATES_MAX);
    for (int from = 0; from < machine->count; from++) {
        MP_CHECK(walk->legal[from] && strlen(walk->legal[from]) == (size_t)machine->count);
        MP_CHECK(machine->states[from] && machine->states[from][0]);
        MP_CHECK_INT(machine->legal[from] >> machine->count, 0); /* no bit beyond the last state */
        for (int to = 0; to < machine->count; to++) {
            bool legal = walk->legal[from][to] == 'x';
            if (mp_state_is_legal(machine, from, to) != legal)
                MP_FAIL("%s: %s -> %s is %s in the table, must be %s", machine->name, machine->states[from],
                        machine->states[to], legal ? "illegal" : "legal", legal ? "legal" : "illegal");
            scene scene;
            scene_init(&scene);
            walk->put(&scene, from);
            if (legal)
                walk->set(&scene, to);
            else
                expect_refusal(walk, &scene, to);
            MP_CHECK_INT(walk->get(&scene), legal ? to : from);
            MP_CHECK(!legal || scene.services.metrics[MP_METRIC_illegal_transitions] == 0);
            scene_deinit(&scene);
        }
    }
    MP_CHECK(machine->count == STATES_MAX || !walk->legal[machine->count]);
}

/* Defines the functions put, get and set of a walk. */
#define ACCESS(name, field, type, setter)                                                  \
    static void put_##name(scene *scene, int state) { scene->field = (type)state; }        \
    static int get_##name(const scene *scene) { return (int)scene->field; }                \
    static void set_##name(scene *scene, int state) { setter; }

ACCESS(shutdown, entry.shutdown, mp_entry_shutdown, mp_entry_set_shutdown(&scene->entry, (mp_entry_shutdown)state))
ACCESS(removal, entry.removal, mp_entry_removal, mp_entry_set_removal(&scene->entry, (mp_entry_removal)state))
ACCESS(unload, entry.unload, mp_entry_unload, mp_entry_set_unload(&scene->entry, (mp_entry_unload)state))
ACCESS(health, entry.faults.health, mp_entry_health, mp_entry_set_health(&scene->entry, (mp_entry_health)state))
ACCESS(ticket, ticket.state, mp_ticket_state, mp_ticket_set_state(&scene->ticket, (mp_ticket_state)state))
ACCESS(retry, ticket.faults.retry, mp_ticket_retry,
       mp_ticket_set_retry(&scene->ticket, &scene->ticket.faults.retry, (mp_ticket_retry)state))
ACCESS(worker, worker.state, mp_worker_state, mp_worker_set_state(&scene->worker, (mp_worker_state)state))

MP_TEST(registry_states_of_shutdown) {
    walk_every_pair(&(walk){&mp_shutdown_machine,
                            {/* open closed quitting */
                             ".x.", /* open */
                             "..x", /* closed */
                             "..."}, /* quitting */
                            put_shutdown, get_shutdown, set_shutdown});
}

MP_TEST(registry_states_of_removal) {
    walk_every_pair(&(walk){&mp_removal_machine,
                            {/* none draining gone */
                             ".x.", /* none */
                             "..x", /* draining */
                             "..."}, /* gone */
                            put_removal, get_removal, set_removal});
}

MP_TEST(registry_states_of_unload) {
    walk_every_pair(&(walk){&mp_unload_machine,
                            {/* none requested called running */
                             ".xxx", /* none */
                             "x.xx", /* requested */
                             "x..x", /* called */
                             "x..."}, /* running */
                            put_unload, get_unload, set_unload});
}

MP_TEST(registry_states_of_health) {
    walk_every_pair(&(walk){&mp_health_machine,
                            {/* sound failed broken */
                             ".xx", /* sound */
                             "xxx", /* failed */
                             "xx."}, /* broken */
                            put_health, get_health, set_health});
}

MP_TEST(registry_states_of_requests) {
    walk_every_pair(&(walk){&mp_ticket_state_machine,
                            {/* new queued taken admitted stepping ended */
                             ".x....", /* new */
                             "..x..x", /* queued */
                             ".x.x.x", /* taken */
                             ".x..xx", /* admitted */
                             "...x.x", /* stepping */
                             "......"}, /* ended */
                            put_ticket, get_ticket, set_ticket});
}

MP_TEST(registry_states_of_retries) {
    walk_every_pair(&(walk){&mp_ticket_retry_machine,
                            {/* columns: unused, spared, used, exhausted */
                             ".xx.", /* unused */
                             "...x", /* spared */
                             "...x", /* used */
                             "...."}, /* exhausted */
                            put_retry, get_retry, set_retry});
}

MP_TEST(registry_states_of_workers) {
    walk_every_pair(&(walk){&mp_worker_state_machine,
                            {/* spawning loading ready processing idle evicting dead failed */
                             ".x....xx", /* spawning */
                             "..x...xx", /* loading */
                             "...x.xxx", /* ready */
                             "....xxxx", /* processing */
                             "...x.xxx", /* idle */
                             "......x.", /* evicting */
                             "........", /* dead */
                             "......x."}, /* failed */
                            put_worker, get_worker, set_worker});
}
