/* sim_core.h: declarations shared by the files of the simulator. Tests include sim.h. */
#ifndef TESTS_SIM_CORE_H
#define TESTS_SIM_CORE_H

#include "sim.h"

#ifdef MP_SIM

enum { SIM_FIBRES = 64, SIM_HELD = 40 };

typedef enum sim_state {
    SIM_FREE,
    SIM_READY,
    SIM_ON_MUTEX,
    SIM_ON_COND,
    SIM_ASLEEP,
    SIM_ON_JOIN,
    SIM_PARKED,
    SIM_ENDED
} sim_state;

typedef struct sim_fibre {
    void *sp; /* stack pointer; valid while another fibre runs */
    uint8_t *stack;
    sim_state state;
    const void *object;   /* the object that the fibre waits for */
    uint64_t deadline_ns; /* end of the wait; 0 = none */
    sim_state nudge_state; /* state and object before the last nudge */
    const void *nudge_object;
    bool timed_out, joined, detached;
    bool forking; /* it takes all locks, in the order of base/forked.h */
    void *(*body)(void *arg);
    void *arg;
    mp_seam_site site;
    char name[16];
    const void *held[SIM_HELD]; /* mutexes, in the order in which they were taken */
    int held_count;
} sim_fibre;

typedef struct sim_core {
    sim_fibre fibres[SIM_FIBRES];
    const sim_setup *setup;
    uint64_t ready; /* one bit per fibre; 1 = the fibre can run */
    int current;    /* -1: the scheduler itself, between runs */
    int inlined;    /* > 0: a watcher runs; its calls are not scheduling points */
    bool active, faults;
    int nudged;      /* the fibre that was nudged, or -1 */
    uint64_t nudges; /* one bit per fibre; 1 = nudged since the clock moved */
    uint64_t clock_ns, nearest_ns, nudge_limit_ns, began_ns, late_ns, steps, hash, random;
    int alive, most, late_jumps;
    void *main_sp;
    void (*watch_step)(void *arg), (*watch_quiet)(void *arg);
    void *watch_arg;
} sim_core;
extern sim_core sim;

/* sim.c. sim_point: a scheduling point before an operation. sim_block: the running fibre waits. sim_wake: makes a
 * waiting fibre ready. */
void sim_point(const char *op, const void *object);
void sim_block(sim_state state, const void *object, uint64_t deadline_ns);
void sim_wake(int fibre, bool timed_out);
void sim_find_nearest(void);
/* sim_locks.c */
void sim_lock_init(pthread_mutex_t *mutex);
void sim_lock_deinit(pthread_mutex_t *mutex);
void sim_lock(pthread_mutex_t *mutex);
void sim_unlock(pthread_mutex_t *mutex);
void sim_cond_init(pthread_cond_t *cond);
void sim_cond_deinit(pthread_cond_t *cond);
int sim_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns);
void sim_cond_wake(pthread_cond_t *cond, bool all);
void sim_cond_leave(const void *cond); /* removes a woken waiter; `cond` may be freed before the waiter runs */
/* The waiters of `cond` exist in the parent of a fork only: the child must initialise it anew. */
void sim_cond_forget(const void *cond);
void sim_wake_spuriously(void);
const char *sim_name_of(const void *object, char *text, int size); /* `object`: a mutex or condition variable */
/* sim_memory.c */
void *sim_alloc(size_t bytes, size_t alignment);
void sim_free(void *memory, size_t bytes);
void sim_memory_begin(void);
void sim_memory_end(void); /* fails on leaks and on writes after free */
void sim_locks_begin(void);
void sim_locks_end(void); /* fails on mutexes and condition variables that were not destroyed */
/* sim_trace.c */
void sim_trace_begin(void);
void sim_trace(const char *op, const void *object);
void sim_install_handlers(void);
const char *sim_describe_frames(void *const *by, int n); /* valid until the next call */

#endif

#endif
