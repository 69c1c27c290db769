/* sim_world.h: scenarios over the registry's public functions, drawn from a seed, and how tests run many of them.
 *
 * Everything that can be seen is checked: while all wait (no call waits beside an idle worker, nobody waits for what is
 * there), at each answer (its status has a cause in what happened), and at the end (every call has one terminal state,
 * the metrics add up, nothing is left). */
#ifndef TESTS_SIM_WORLD_H
#define TESTS_SIM_WORLD_H

#include "sim.h"

typedef struct sim_world {
    const char *name;
    void (*body)(void *arg); /* arg: the world */
    /* callers and keys, at most; what callers do besides calling, of 100 */
    int callers, keys, operations, swaps;
    bool memory;   /* engines and budget are tight */
    bool shutdown; /* closed while work goes on */
    bool faults;   /* loads fail, stall; memory and threads are refused; files change; the clock jumps */
    bool stuck;    /* steps stand still; workers without work are given up soon */
    bool streams;  /* calls give many pieces, and callers look at each */
    bool at_once;  /* every key is loaded by every caller, at the same time */
    const struct sim_special *special; /* what it does besides (sim_special.c); or NULL */
} sim_world;

const sim_world *sim_world_find(const char *name); /* NULL: there is none */
/* The setup of one schedule of a world: what fails and how often is drawn from the seed. */
sim_setup sim_world_setup(const sim_world *world, sim_scheduler scheduler, int depth, uint64_t seed);
/* Run `count` schedules from seed on, half of them PCT of growing depth; returns steps in all. */
uint64_t sim_world_run(const sim_world *world, uint64_t seed, int count);
/* In a child of this process: schedules seed .. seed + count - 1 of body, or of all choices when exhaustive. True: one
 * failed, and `said` receives what it printed. world: its body, and its setups; NULL: setup and body are given. */
bool sim_world_in_child(const sim_setup *setup, int count, void (*body)(void *arg), void *arg, char *said, int size);
/* The same over the schedules of sim_world_run; *schedules: how many it took. */
bool sim_world_finds(const sim_world *world, uint64_t seed, int count, int *schedules, char *said, int size);

/* Every schedule of a world with at most `depth` preemptions, but no more than `most`; returns how many there were. */
int sim_world_exhaust(const sim_world *world, uint64_t seed, int depth, int most);

/* worlds of single parts (sim_parts.c) */
void sim_parts_pool(void *world);
void sim_parts_cores(void *world);
void sim_parts_governor(void *world);
void sim_parts_ticks(void *world);
/* a registry with two threads (sim_tiny.c); the seed, below sim_tiny_scripts, says what they do */
void sim_tiny(void *world);
extern const int sim_tiny_scripts;

#endif
