/* thread.h: one thread of a pool and its job. Only pool.c calls these functions; users of pool.h see mp_job. */
#ifndef MP_REGISTRY_POOL_THREAD_H
#define MP_REGISTRY_POOL_THREAD_H

#include "base/event_count.h"

typedef struct mp_job {
    void (*run)(void *arg);
    void *arg;
} mp_job;

typedef struct mp_pool_thread {
    mp_thread os;
    /* guarded by: the pool's lock */
    struct mp_pool_thread *next;      /* list of all threads of the pool that are not disowned */
    struct mp_pool_thread *next_idle; /* list of the threads without a job */
    mp_job job;                       /* run == NULL: none */
    bool quit;
    bool disowned; /* no thread joins this thread; it calls `gone`, which frees it */

    mp_event_count wake; /* notified under the pool's lock */
    mp_mutex *lock;      /* the pool's */
    /* Called by the thread, holding the lock, after its job has returned. Puts the thread on the idle list. */
    void (*idle)(void *pool, struct mp_pool_thread *self);
    /* Called by a disowned thread as its last act, without the lock. Frees the struct. */
    void (*gone)(void *pool, struct mp_pool_thread *self);
    void *pool;
} mp_pool_thread;

/* Start a thread in the caller's storage, where every field but `os` is filled in. Its first job runs once the
 * thread gets the lock. */
mp_status mp_pool_thread_start(mp_pool_thread *thread, const char *name, mp_error *error);
/* Give an idle thread a job. Must hold the lock. */
void mp_pool_thread_give(mp_pool_thread *thread, mp_job job);
/* Tell an idle thread to end. Must hold the lock. */
void mp_pool_thread_quit(mp_pool_thread *thread);
/* Join and free a thread that was told to quit. */
void mp_pool_thread_destroy(mp_pool_thread *thread);

#endif
