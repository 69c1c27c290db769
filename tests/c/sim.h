/* sim.h: the simulator. Threads of the core become fibres of one thread; mutexes, condition variables, sleep, clock,
 * park, join and allocation go through the seam (base/sys.h), and each of these calls is a point at which a seeded
 * scheduler may let another fibre run. The clock is virtual: it moves a little with every look at it, and jumps to the
 * nearest deadline when all fibres wait.
 *
 * One run is one schedule, a pure function of its setup. What ends it as a failure, with all that is needed to repeat
 * it: a deadlock, locks taken in both orders, a lock or condition variable used wrongly, memory used after it was freed
 * or not freed, a thread that nobody joined, a run without end, a failed assertion, sim_fail().
 *
 * Only in the build with MP_SIM (build.py sim). One thread of the process may run simulations. */
#ifndef TESTS_SIM_H
#define TESTS_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/sys.h"

typedef enum sim_scheduler {
    SIM_RANDOM,    /* another fibre with a probability that is drawn for the schedule */
    SIM_PCT,       /* fibres have random priorities; at `depth` random points the running one gets the lowest */
    SIM_EXHAUSTIVE /* every schedule with at most `depth` preemptions, one a run (sim_next) */
} sim_scheduler;

typedef struct sim_setup {
    const char *world; /* for the line that tells how to repeat it */
    uint64_t seed;
    sim_scheduler scheduler;
    int depth;
    int variant; /* of the world; shown only */
    /* how often, of 65,536 */
    uint32_t spurious;   /* a condition variable wakes for no reason, a point */
    uint32_t late;       /* the clock jumps to the nearest deadline although others could run, a point */
    uint32_t alloc;      /* an allocation is refused */
    uint32_t thread;     /* a thread is refused */
    bool coarse;         /* points only at locks, wake-ups, parks and mp_seam_point() */
    uint64_t horizon_ns; /* a run that is not over by then hangs; 0 = an hour */
    uint64_t step_limit; /* 0 = 2,000,000 */
} sim_setup;

typedef struct sim_result {
    uint64_t steps, hash; /* hash: of everything that happened */
    uint64_t clock_ns;
    int fibres;
} sim_result;

/* Run body(arg) as the first fibre until all fibres have ended. Returns only if nothing was wrong: else the process
 * ends with code 1, after printing. */
void sim_run(const sim_setup *setup, void (*body)(void *arg), void *arg, sim_result *result);
/* Exhaustive: move on to the next schedule. False: that was the last. sim_first: forget those before. */
void sim_first(void);
bool sim_next(void);

/* --- inside a run --- */

_Noreturn void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define SIM_CHECK(condition) ((condition) ? (void)0 : sim_fail("%s:%d: %s is false", __FILE__, __LINE__, #condition))
/* Decisions of the world: not part of what an exhaustive run varies. */
uint64_t sim_random(void);
uint64_t sim_below(uint64_t n);
bool sim_chance(uint32_t of_65536);
uint64_t sim_now(void);           /* without moving the clock, and no point */
void sim_clock_jump(uint64_t ns); /* the clock was elsewhere: suspended, stopped */
void sim_faults(bool on);         /* refusals and lateness are on at the start */
int sim_self(void);               /* number of the running fibre; -1 outside of one */
bool sim_is_blocked(int fibre);   /* it waits: for a lock, a wake-up or the clock */
bool sim_is_held(const mp_mutex *mutex);
const sim_setup *sim_get_setup(void);
int sim_late_jumps(void); /* how often this run jumped to a deadline although a thread could run */
/* Locks made in this file are taken only while those held have lower ranks. Of the process. */
void sim_lock_rank(const char *file, int rank);
void sim_note(const char *format, ...) __attribute__((format(printf, 1, 2))); /* a line of the trace */
/* Called before each step with no fibre running, and when all wait, before the clock moves on. Both may use the core's
 * functions: these are no points then, find every lock they need free, and a wait with a deadline is over at once. */
void sim_watch(void (*step)(void *arg), void (*quiet)(void *arg), void *arg);

/* --- schedulers (sim_sched.c), used by sim.c --- */

void sim_sched_begin(const sim_setup *setup);
/* Which of the fibres of the set runs next. self: the one that runs now, -1 when it cannot go on. */
int sim_sched_pick(uint64_t runnable, int self);
int sim_sched_choose(int n); /* some other choice of the schedule: 0..n-1 */
bool sim_sched_chance(uint32_t of_65536);
void sim_sched_started(int fibre);
/* The decisions so far of an exhaustive run, as text for MPOOL_SIM_CHOICES. */
void sim_sched_describe(char *text, int size);

#endif
