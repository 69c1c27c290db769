/* The registry under the simulator: many schedules of each world. README.md says which world covers which fault. */
#include "sim_world.h"

#ifdef MP_SIM

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "mp_test.h"

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* MPOOL_SIM_PERCENT: the share of the schedules to run, for a first look in a minute. Default: 100. */
static int share_of(int count) {
    const char *text = getenv("MPOOL_SIM_PERCENT");
    long percent = text ? strtol(text, NULL, 10) : 100;
    if (percent < 1 || percent > 100)
        MP_FAIL("MPOOL_SIM_PERCENT must be from 1 to 100, got \"%s\"", text);
    return (int)((count * percent + 99) / 100);
}

static void run(const char *name, int count) {
    const sim_world *world = sim_world_find(name);
    MP_CHECK(world != NULL);
    count = share_of(count);
    double begun = seconds();
    uint64_t steps = sim_world_run(world, 1, count);
    double took = seconds() - begun;
    printf("sim: %-8s %6d schedules, %4llu steps each, %6.0f schedules/s of CPU\n", name, count,
           (unsigned long long)(steps / (uint64_t)count), count / took);
}

MP_TEST_SECONDS(sim_world_calls, 60) { run("calls", 12000); }
MP_TEST_SECONDS(sim_world_memory, 60) { run("memory", 8000); }
MP_TEST_SECONDS(sim_world_swaps, 60) { run("swaps", 8000); }
MP_TEST_SECONDS(sim_world_shutdown, 60) { run("shutdown", 10000); }
MP_TEST_SECONDS(sim_world_faults, 60) { run("faults", 8000); }
MP_TEST_SECONDS(sim_world_storm, 60) { run("storm", 10000); }
MP_TEST_SECONDS(sim_world_five_models_loaded_at_once, 60) { run("five", 2000); }
MP_TEST_SECONDS(sim_world_two_workers_of_one_model_loaded_at_once, 60) { run("two", 2000); }
MP_TEST_SECONDS(sim_world_stuck, 60) { run("stuck", 6000); }
MP_TEST_SECONDS(sim_world_streams, 60) { run("streams", 3000); }
MP_TEST_SECONDS(sim_world_cold, 60) { run("cold", 4000); }
MP_TEST_SECONDS(sim_world_evictions, 60) { run("evictions", 4000); }
MP_TEST_SECONDS(sim_world_reclaim, 60) { run("reclaim", 4000); }
MP_TEST_SECONDS(sim_world_deadlines, 60) { run("deadlines", 4000); }
MP_TEST_SECONDS(sim_world_flapping, 60) { run("flapping", 1500); }
MP_TEST_SECONDS(sim_world_crashes, 60) { run("crashes", 4000); }
MP_TEST_SECONDS(sim_world_replaced, 60) { run("replaced", 2000); }
MP_TEST_SECONDS(sim_world_chaos, 60) { run("chaos", 4000); }
MP_TEST_SECONDS(sim_world_ahead, 60) { run("ahead", 150); }
MP_TEST_SECONDS(sim_world_balance, 60) { run("balance", 1000); }
MP_TEST_SECONDS(sim_world_jumps, 60) { run("jumps", 1500); }
MP_TEST_SECONDS(sim_world_cut, 60) { run("cut", 4000); }
MP_TEST_SECONDS(sim_world_masks, 60) { run("masks", 4000); }
MP_TEST_SECONDS(sim_world_lost, 60) { run("lost", 1000); }
MP_TEST_SECONDS(sim_world_thrash, 60) { run("thrash", 1500); }
MP_TEST_SECONDS(sim_world_kills, 60) { run("kills", 1500); }
MP_TEST_SECONDS(sim_world_tenants, 60) { run("tenants", 100); }
MP_TEST_SECONDS(sim_world_tenants_by_the_thousand, 60) { run("crowd", 1); }
MP_TEST_SECONDS(sim_world_pool_alone, 60) { run("pool", 3000); }
MP_TEST_SECONDS(sim_world_cores_alone, 60) { run("cores", 3000); }
MP_TEST_SECONDS(sim_world_governor_alone, 60) { run("governor", 3000); }
MP_TEST_SECONDS(sim_world_maintenance_alone, 60) { run("ticks", 3000); }
MP_TEST_SECONDS(sim_world_forks, 120) { run("forks", 1500); }
MP_TEST_SECONDS(sim_world_cancels, 60) { run("cancels", 4000); }
MP_TEST_SECONDS(sim_world_batches, 60) { run("batches", 300); }
/* A wait that ends although nothing woke it hides a lost wake-up. */
MP_TEST_SECONDS(sim_world_no_wakeup_is_missing, 60) { run("nudges", 3000); }
MP_TEST_SECONDS(sim_world_no_wakeup_is_missing_in_swaps, 60) { run("swap nudges", 3000); }
MP_TEST_SECONDS(sim_world_no_wakeup_is_missing_in_shutdowns, 60) { run("cut nudges", 3000); }
MP_TEST_SECONDS(sim_world_no_wakeup_is_missing_for_guards, 60) { run("guards", 3000); }
MP_TEST_SECONDS(sim_world_no_wakeup_is_missing_for_masks, 60) { run("mask nudges", 1000); }

/* All schedules of tiny cases. */
static void exhaust(const char *name, uint64_t seed, int depth, int most) {
    most = share_of(most);
    double begun = seconds();
    int count = sim_world_exhaust(sim_world_find(name), seed, depth, most);
    printf("sim: %s %llu: %s%d schedules with at most %d preemptions, %.0f schedules/s of CPU\n", name,
           (unsigned long long)seed, count < most ? "all " : "the first ", count, depth, count / (seconds() - begun));
}
MP_TEST_SECONDS(sim_world_pool_in_all_schedules, 60) { exhaust("pool", 0, 1, 30000); }
MP_TEST_SECONDS(sim_world_cores_in_all_schedules, 60) { exhaust("cores", 0, 1, 30000); }
MP_TEST_SECONDS(sim_world_maintenance_in_all_schedules, 60) { exhaust("ticks", 0, 1, 30000); }
/* Random schedules of the tiny cases that need more preemptions. */
MP_TEST_SECONDS(sim_world_tiny_at_random, 60) { run("tiny", 8000); }
MP_TEST_SECONDS(sim_world_tiny_in_all_schedules, 60) {
    for (int i = 0; i < sim_tiny_scripts; i++)
        for (int depth = 0; depth < 3; depth++)
            exhaust("tiny", (uint64_t)i, depth, 8000);
}

/* Worlds of a whole registry. */
static const char *const names[] = {"calls",    "memory",  "swaps",   "shutdown", "faults",    "storm",   "five",
                                    "streams",  "stuck",   "two",     "cold",     "evictions", "reclaim", "deadlines",
                                    "flapping", "crashes", "chaos",   "balance",  "jumps",     "cut",
                                    "ahead",    "masks",   "lost"};
enum { WORLDS = sizeof(names) / sizeof(names[0]) };

/* The same seed gives the same run, independent of earlier runs. */
MP_TEST_SECONDS(sim_world_repeats_itself, 60) {
    enum { SEEDS = 20 };
    int seeds = share_of(SEEDS);
    for (int i = 0; i < WORLDS; i++) {
        const sim_world *world = sim_world_find(names[i]);
        sim_result first[SEEDS], again;
        sim_world_run(world, 5000, 3);
        for (int round = 0; round < 2; round++)
            for (int j = 0; j < seeds; j++) {
                int seed = round ? seeds - 1 - j : j;
                sim_setup setup = sim_world_setup(world, seed & 1 ? SIM_PCT : SIM_RANDOM, 3, (uint64_t)seed);
                sim_run(&setup, world->body, (void *)(uintptr_t)world, round ? &again : &first[seed]);
                if (round && (again.hash != first[seed].hash || again.steps != first[seed].steps))
                    MP_FAIL("%s, seed %d: two runs differ, with %llu and %llu steps", names[i], seed,
                            (unsigned long long)first[seed].steps, (unsigned long long)again.steps);
            }
    }
}

/* Repeats the schedule of MPOOL_SIM=world:variant:scheduler:depth:seed:mutation, as a failure prints it, with its
 * trace. */
MP_TEST_SECONDS(sim_replay, 600) {
    const char *text = getenv("MPOOL_SIM");
    if (!text)
        MP_SKIP("MPOOL_SIM is not set");
    char name[32], scheduler[16];
    int variant, depth, mutation;
    unsigned long long seed;
    if (sscanf(text, "%31[^:]:%d:%15[^:]:%d:%llu:%d", name, &variant, scheduler, &depth, &seed, &mutation) != 6)
        MP_FAIL("MPOOL_SIM is malformed: \"%s\"", text);
    const sim_world *world = sim_world_find(name);
    if (!world)
        MP_FAIL("unknown world %s", name);
    sim_scheduler which = scheduler[0] == 'r' ? SIM_RANDOM : scheduler[0] == 'p' ? SIM_PCT : SIM_EXHAUSTIVE;
    sim_world_run(world, 0, 0);
    sim_armed = mutation;
    sim_setup setup = sim_world_setup(world, which, depth, seed);
    setup.coarse = which == SIM_EXHAUSTIVE;
    if (which == SIM_EXHAUSTIVE)
        sim_first();
    sim_result result;
    sim_run(&setup, world->body, (void *)(uintptr_t)world, &result);
    fprintf(stderr, "sim: no failure in %llu steps of %d threads\n", (unsigned long long)result.steps,
            result.fibres);
}

/* Run by hand: MPOOL_SIM_SECONDS=3600 sets the duration, MPOOL_SIM_SEED the first seed (default: a new one each time),
 * MPOOL_SIM_WORLD a single world. */
MP_TEST_SECONDS(sim_long, 100000) {
    const char *text = getenv("MPOOL_SIM_SECONDS"), *from = getenv("MPOOL_SIM_SEED"), *only = getenv("MPOOL_SIM_WORLD");
    if (!text)
        MP_SKIP("MPOOL_SIM_SECONDS is not set");
    enum { CHUNK = 500 };
    uint64_t seed = from ? strtoull(from, NULL, 10) : mp_sys_random() >> 24, runs = 0;
    double begun = seconds(), limit = atof(text);
    for (int i = 0; seconds() - begun < limit; i++) {
        const char *name = only ? only : names[i % WORLDS];
        MP_CHECK(sim_world_find(name) != NULL);
        sim_world_run(sim_world_find(name), seed, CHUNK);
        seed += CHUNK;
        runs += CHUNK;
    }
    printf("sim: %llu schedules in %.0f s of CPU\n", (unsigned long long)runs, seconds() - begun);
}

#endif
