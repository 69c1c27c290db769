/* sim_run.c: runs many schedules. See sim_world.h. */
#include "sim_world.h"

#ifdef MP_SIM

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/options.h"
#include "mp_test.h"

/* Replaces the functions of base/cpu.c through the linker: the machine must not influence a schedule, and reading
 * its properties takes longer than a schedule. */
uint64_t __wrap_mp_cpu_memory_bytes(void);
uint64_t __wrap_mp_cpu_memory_bytes(void) { return 8ull << 30; }

/* Sets everything that a schedule depends on besides its seed to a fixed value. */
static void prepare(void) {
    sim_fork_install();
    mp_log_set_level(1000);
    setenv("MPOOL_SPIN_US", "1", 1);
    setenv("MPOOL_NODES", "0-1;2-3", 1);
    mp_error error;
    if (mp_options_init(&error) != MP_OK)
        sim_fail("%s", error.message);
}

static void run_one(const sim_world *world, uint64_t seed, uint64_t index, sim_result *result) {
    /* Half of the schedules are random; the rest are PCT with 1 to 5 priority changes. */
    sim_scheduler scheduler = index & 1 ? SIM_PCT : SIM_RANDOM;
    sim_setup setup = sim_world_setup(world, scheduler, 1 + (int)(index / 2 % 5), seed + index);
    sim_run(&setup, world->body, (void *)(uintptr_t)world, result);
}

uint64_t sim_world_run(const sim_world *world, uint64_t seed, int count) {
    uint64_t steps = 0;
    prepare();
    for (int i = 0; i < count; i++) {
        sim_result result;
        run_one(world, seed, (uint64_t)i, &result);
        steps += result.steps;
    }
    return steps;
}

int sim_world_exhaust(const sim_world *world, uint64_t seed, int depth, int most) {
    int count = 0;
    sim_setup setup = {.world = world->name, .seed = seed, .scheduler = SIM_EXHAUSTIVE, .depth = depth, .coarse = true};
    prepare();
    sim_first();
    do {
        sim_run(&setup, world->body, (void *)(uintptr_t)world, NULL);
        count++;
    } while (sim_next() && count < most);
    return count;
}

/* --- in a child --- */

static int *shared_count;

static bool in_child(void (*work)(void *arg), void *arg, char *said, int size) {
    int ends[2];
    if (!shared_count)
        shared_count = mmap(NULL, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *shared_count = 0;
    if (shared_count == MAP_FAILED || pipe(ends) != 0)
        MP_FAIL("pipe: %s", strerror(errno));
    fflush(NULL);
    pid_t child = fork();
    if (child < 0)
        MP_FAIL("fork: %s", strerror(errno));
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        setenv("MPOOL_SIM_QUIET", "1", 1);
        work(arg);
        _exit(0);
    }
    close(ends[1]);
    int used = 0;
    char rest[512];
    for (;;) {
        bool full = used + 1 >= size;
        ssize_t got = read(ends[0], full ? rest : said + used, full ? sizeof(rest) : (size_t)(size - 1 - used));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        if (!full)
            used += (int)got;
    }
    said[used] = 0;
    close(ends[0]);
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

typedef struct child_work {
    const sim_setup *setup;
    int count;
    void (*body)(void *arg);
    void *arg;
    const sim_world *world;
    uint64_t seed;
} child_work;

static void run_setups(void *arg) {
    const child_work *work = arg;
    sim_setup setup = *work->setup;
    prepare();
    if (setup.scheduler == SIM_EXHAUSTIVE) {
        sim_first();
        do {
            ++*shared_count;
            sim_run(&setup, work->body, work->arg, NULL);
        } while (sim_next() && *shared_count < work->count);
        return;
    }
    for (int i = 0; i < work->count; i++, setup.seed++) {
        ++*shared_count;
        sim_run(&setup, work->body, work->arg, NULL);
    }
}

bool sim_world_in_child(const sim_setup *setup, int count, void (*body)(void *arg), void *arg, char *said, int size) {
    child_work work = {.setup = setup, .count = count, .body = body, .arg = arg};
    return in_child(run_setups, &work, said, size);
}

static void run_world(void *arg) {
    const child_work *work = arg;
    prepare();
    for (int i = 0; i < work->count; i++) {
        sim_result result;
        ++*shared_count;
        run_one(work->world, work->seed, (uint64_t)i, &result);
    }
}

bool sim_world_finds(const sim_world *world, uint64_t seed, int count, int *schedules, char *said, int size) {
    child_work work = {.world = world, .seed = seed, .count = count};
    bool found = in_child(run_world, &work, said, size);
    *schedules = *shared_count;
    return found;
}

#endif
