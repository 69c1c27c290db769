/* sim_world.h: scenarios over the registry's public functions, generated from a seed, and functions that run many of
 * them.
 *
 * Everything visible from outside is checked at three times:
 *   all threads wait     no request is queued while a worker is idle; no thread waits for an event that has happened
 *   a request ends       its status has a cause among the events
 *   the run ends         every request has one terminal status, the metrics add up, and everything is freed */
#ifndef TESTS_SIM_WORLD_H
#define TESTS_SIM_WORLD_H

#include "sim.h"

typedef struct sim_world {
    const char *name;
    void (*body)(void *arg); /* arg: the world */
    int callers, keys; /* the largest numbers */
    int operations;    /* percentage of actions that are operations; the others are requests */
    int swaps;         /* percentage of operations that add or remove models */
    bool memory;   /* memory of engines and of the process is short */
    bool shutdown; /* the registry is closed while requests run */
    bool faults;   /* loads fail and stall; memory and threads are refused; files change; the clock jumps */
    bool stuck;    /* steps stall; idle workers leave soon */
    bool streams;  /* requests produce many stream chunks, and callers read each */
    bool crowd;    /* one run is long: it has 10,000 tenants, and is not audited */
    bool nudge;    /* every waiting thread is nudged (sim.h) */
    bool at_once;  /* all callers load all keys when they start */
    const struct sim_special *special; /* hooks of this world (sim_special.c, sim_masks.c), or NULL */
} sim_world;

const sim_world *sim_world_find(const char *name); /* NULL: no such world */
/* Returns the setup of one schedule of a world. The seed decides which faults are injected, and how often. */
sim_setup sim_world_setup(const sim_world *world, sim_scheduler scheduler, int depth, uint64_t seed);
/* Runs `count` schedules, starting with `seed`: half of them random, half PCT with 1 to 5 priority changes (sim.h).
 * Returns the total number of steps. */
uint64_t sim_world_run(const sim_world *world, uint64_t seed, int count);
/* Runs schedules seed .. seed + count - 1 of `body`, or all choices if exhaustive, in a child process. Returns true
 * if a schedule failed; `said` receives the child's error output. */
bool sim_world_in_child(const sim_setup *setup, int count, void (*body)(void *arg), void *arg, char *said, int size);
/* As sim_world_in_child, for the schedules of sim_world_run. *schedules receives the number of schedules run. */
bool sim_world_finds(const sim_world *world, uint64_t seed, int count, int *schedules, char *said, int size);

/* Runs the schedules of a world with at most `depth` preemptions, but no more than `most` of them. Returns how many
 * schedules ran. */
int sim_world_exhaust(const sim_world *world, uint64_t seed, int depth, int most);

/* worlds of single parts (sim_parts.c) */
void sim_parts_pool(void *world);
void sim_parts_cores(void *world);
void sim_parts_governor(void *world);
void sim_parts_guards(void *world);
void sim_parts_ticks(void *world);
/* A registry with two threads (sim_tiny.c). The seed modulo sim_tiny_scripts chooses the operations of the threads. */
void sim_tiny(void *world);
extern const int sim_tiny_scripts;

#endif
