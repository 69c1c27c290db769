/* thread.h: one thread of a pool and the job it has. Used by pool.c only. */
#ifndef MP_REGISTRY_POOL_THREAD_H
#define MP_REGISTRY_POOL_THREAD_H

#include "registry/pool/bell.h"

typedef struct mp_job {
    void (*run)(void *arg);
    void *arg;
} mp_job;

typedef struct mp_pool_thread {
    mp_thread os;
    /* guarded by: the pool's lock */
    struct mp_pool_thread *next;      /* all threads of the pool that are not disowned */
    struct mp_pool_thread *next_idle; /* those without a job */
    mp_job job;                       /* run == NULL: none */
    bool quit;
    bool disowned; /* nobody waits for it; it frees itself */

    mp_bell bell;
    mp_mutex *lock; /* the pool's */
    /* Called by the thread with the lock held when its job has returned; makes it idle. */
    void (*idle)(void *pool, struct mp_pool_thread *self);
    /* Called by a disowned thread as its last act, no lock held; frees it. */
    void (*gone)(void *pool, struct mp_pool_thread *self);
    void *pool;
} mp_pool_thread;

/* Caller's storage, filled in but for os and bell; its first job starts at once. The lock is not held. */
mp_status mp_pool_thread_start(mp_pool_thread *thread, const char *name, mp_error *error);
/* With the lock held, to an idle thread. True: call mp_bell_wake(&thread->bell) after releasing it. */
bool mp_pool_thread_give(mp_pool_thread *thread, mp_job job);
bool mp_pool_thread_quit(mp_pool_thread *thread);
void mp_pool_thread_destroy(mp_pool_thread *thread); /* joins; it was told to quit */

#endif
