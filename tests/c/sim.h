/* sim.h: the simulator. Threads of the core become fibres of one thread. Mutexes, condition variables, sleep, clock,
 * park, join and allocation go through the seam (base/sys.h), and each of these calls is a point at which a seeded
 * scheduler may run another fibre. The clock is virtual: it moves a little with every reading, and jumps to the
 * nearest deadline when all fibres wait.
 *
 * One run is one schedule, a pure function of its setup. A run fails, and prints all that is needed to repeat it,
 * on: a deadlock, locks taken in both orders, misuse of a lock or condition variable, use of freed memory, a leak, a
 * thread that was not joined, a run without end, a failed assertion, sim_fail().
 *
 * Exists only in the build with MP_SIM (build.py sim). Only one thread of the process may run simulations. */
#ifndef TESTS_SIM_H
#define TESTS_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "sim_mutation.h"

typedef enum sim_scheduler {
    SIM_RANDOM,    /* switches to another fibre with a probability chosen per schedule */
    SIM_PCT,       /* random priorities; at `depth` random points the running fibre drops to the lowest priority */
    SIM_EXHAUSTIVE /* every schedule with at most `depth` preemptions, one per run (sim_next) */
} sim_scheduler;

typedef struct sim_setup {
    const char *world; /* printed in the command that repeats the run */
    uint64_t seed;
    sim_scheduler scheduler;
    int depth;
    int variant; /* variant of the world; printed only */
    /* Probabilities per point, in units of 1 / 65,536. */
    uint32_t spurious;   /* a condition variable wakes for no reason */
    uint32_t late;       /* the clock jumps to the nearest deadline although other fibres could run */
    uint32_t alloc;      /* an allocation is refused */
    uint32_t thread;     /* the creation of a thread is refused */
    bool nudge;          /* see sim_is_nudging */
    bool nudge_polls;    /* also threads that poll by design */
    bool coarse;         /* points only at locks, wake-ups, parks and sim_yield() */
    uint64_t horizon_ns; /* a longer run, in virtual time, counts as hung; 0 = one hour */
    uint64_t step_limit; /* 0 = 2,000,000 */
} sim_setup;

typedef struct sim_result {
    uint64_t steps, hash; /* hash: over all events */
    uint64_t clock_ns;
    int fibres;
} sim_result;

/* Runs body(arg) as the first fibre until all fibres have ended. Returns only on success. On failure the process
 * prints and ends with code 1. */
void sim_run(const sim_setup *setup, void (*body)(void *arg), void *arg, sim_result *result);
/* Exhaustive runs: sim_first starts with the first schedule; sim_next moves to the next one and returns false after the
 * last. */
void sim_first(void);
bool sim_next(void);

/* --- inside a run --- */

_Noreturn void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define SIM_CHECK(condition) ((condition) ? (void)0 : sim_fail("%s:%d: %s is false", __FILE__, __LINE__, #condition))
/* Random numbers for decisions of the world. An exhaustive run does not vary them. */
uint64_t sim_random(void);
uint64_t sim_below(uint64_t n);
bool sim_chance(uint32_t of_65536);
uint64_t sim_now(void);           /* does not move the clock and is not a scheduling point */
void sim_clock_jump(uint64_t ns); /* simulates a suspended or stopped machine */
/* Forks the process. The child has only the calling fibre. Call sim_fork_install before the core registers its own fork
 * handlers. */
int sim_fork(void);
void sim_fork_install(void);
void sim_faults(bool on);         /* injected faults (refusals, late wake-ups) are enabled when a run begins */
int sim_self(void);               /* number of the running fibre; -1 outside all fibres */
bool sim_is_blocked(int fibre);   /* true if the fibre waits for a lock, a wake-up or the clock */
bool sim_is_held(const mp_mutex *mutex);
int sim_waiters(const mp_cond *cond); /* threads that wait for it */
const sim_setup *sim_get_setup(void);
/* A setup with `nudge` wakes each thread that waits for a condition variable or an event count, without a reason, when
 * all threads wait. No wait reaches its deadline until all threads wait again. Each thread must then wait for the same
 * object as before: otherwise the woken thread had something to do and nothing had woken it, which only the end of a
 * timed wait would have shown. Returns true between the wake-up and the check. */
bool sim_is_nudging(void);
int sim_late_jumps(void); /* how often the clock of this run jumped to a deadline although a fibre could run */
uint64_t sim_late_ns(void); /* by how much, in total */
/* Requires that a lock initialised in `file` is taken only while all held locks have ranks below `rank`. Applies to all
 * later runs of the process. */
void sim_lock_rank(const char *file, int rank);
void sim_note(const char *format, ...) __attribute__((format(printf, 1, 2))); /* adds a line to the trace */
/* `step` is called before each step with no fibre running, `quiet` when all fibres wait, before the clock moves.
 * Both may call the core: inside them, calls are not scheduling points, a call that needs a held lock fails the run,
 * and a wait with a deadline returns at once. */
void sim_watch(void (*step)(void *arg), void (*quiet)(void *arg), void *arg);

/* --- schedulers (sim_sched.c), used by sim.c --- */

void sim_sched_begin(const sim_setup *setup);
/* Returns the fibre that runs next. `self`: the running fibre; -1 = the running fibre cannot continue. */
int sim_sched_pick(uint64_t runnable, int self);
int sim_sched_choose(int n); /* makes any other choice of the schedule: 0 to n - 1 */
bool sim_sched_chance(uint32_t of_65536);
void sim_sched_started(int fibre);
/* Prints the decisions of an exhaustive run so far, as text for MPOOL_SIM_CHOICES. */
void sim_sched_describe(char *text, int size);

#endif
