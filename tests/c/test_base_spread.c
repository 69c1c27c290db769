/* test_base_spread.c: compute threads leave a CPU on which another one computes. */
#include "base/spread.h"
#include "base/cpu_set.h"
#include "base/event_count.h"
#include "mp_test.h"

#ifdef MP_SEAM

static struct {
    int cpu, moves;                         /* the CPU of every thread */
    mp_cpu_set allowed, moved_to, left_with; /* arguments of the last two calls that bind */
} scene;

static int scene_cpu(void) { return scene.cpu; }
static bool scene_allowed(mp_cpu_set *cpus) {
    *cpus = scene.allowed;
    return true;
}
/* A thread moves to the first of its CPUs, unless it is on one of them. */
static bool scene_bind(const mp_cpu_set *cpus) {
    scene.moves++;
    scene.moved_to = scene.left_with;
    scene.left_with = *cpus;
    scene.cpu = mp_cpu_set_has(cpus, scene.cpu) ? scene.cpu : mp_cpu_set_next(cpus, 0);
    return true;
}

static void set_scene(int cpu, uint64_t allowed) {
    memset(&scene, 0, sizeof scene);
    scene.cpu = cpu;
    scene.allowed.words[0] = allowed;
    mp_sys_table.cpu = scene_cpu;
    mp_sys_table.get_affinity = scene_allowed;
    mp_sys_table.set_affinity = scene_bind;
}

typedef struct other { /* a second thread, which begins and, if `ends`, ends */
    int cpu;
    bool ends;
} other;

static void other_main(void *arg) {
    other *o = arg;
    o->cpu = mp_spread_begin();
    if (o->ends)
        mp_spread_end(o->cpu);
}

static int begin_on_another_thread(bool ends) {
    other o = {.ends = ends};
    mp_thread thread = {0};
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "mpool-test", other_main, &o, &error), &error);
    mp_thread_join(&thread);
    return o.cpu;
}

MP_TEST(base_spread_moves_a_thread_from_an_occupied_cpu) {
    set_scene(3, 0x2c); /* CPUs 2, 3 and 5 */
    MP_CHECK_INT(mp_spread_begin(), 3);
    MP_CHECK_INT(scene.moves, 0);
    MP_CHECK_INT(begin_on_another_thread(false), 2);
    MP_CHECK_INT(scene.moves, 2);
    MP_CHECK(scene.moved_to.words[0] == 0x24 && scene.left_with.words[0] == 0x2c); /* moved, but not bound */
    scene.cpu = 3;
    MP_CHECK_INT(begin_on_another_thread(true), 5); /* not to CPU 2, which the first one occupies */
    scene.cpu = 3;
    scene.allowed.words[0] = 0xc;
    scene.moves = 0;
    MP_CHECK_INT(begin_on_another_thread(true), -1); /* no CPU is free: it stays */
    MP_CHECK_INT(scene.moves, 0);
    mp_spread_end(3);
    MP_CHECK_INT(begin_on_another_thread(true), 3);
    MP_CHECK_INT(scene.moves, 0);
    scene.cpu = -1; /* the system does not tell */
    MP_CHECK_INT(mp_spread_begin(), -1);
    mp_spread_end(-1);
    mp_sys_table = mp_sys_real;
}

#endif
