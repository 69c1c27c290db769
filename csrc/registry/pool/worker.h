/* worker.h: one thread of a pool and the job it has. Used by pool.c only. */
#ifndef MP_REGISTRY_POOL_WORKER_H
#define MP_REGISTRY_POOL_WORKER_H

#include "registry/pool/bell.h"

typedef struct mp_job {
    void (*run)(void *arg);
    void *arg;
} mp_job;

typedef struct mp_worker {
    mp_thread thread;
    struct mp_worker *next;      /* all workers of the pool; guarded by: the pool's lock */
    struct mp_worker *next_idle; /* guarded by: the pool's lock */
    mp_job job;                  /* run == NULL: none; guarded by: the pool's lock */
    bool quit;                   /* guarded by: the pool's lock */
    mp_bell bell;
    mp_mutex *lock; /* the pool's */
    /* Called by the worker with the lock held when its job has returned; makes it idle. */
    void (*idle)(void *pool, struct mp_worker *self);
    void *pool;
} mp_worker;

/* A worker with its first job, whose thread starts at once. The lock is not held by the caller. */
mp_status mp_worker_create(mp_mutex *lock, mp_job job, const char *name, void (*idle)(void *pool, mp_worker *self),
                           void *pool, mp_worker **worker, mp_error *error);
/* With the lock held, to an idle worker. True: call mp_bell_wake(&worker->bell) after releasing it. */
bool mp_worker_give(mp_worker *worker, mp_job job);
bool mp_worker_quit(mp_worker *worker);
void mp_worker_destroy(mp_worker *worker); /* joins; it was told to quit */

#endif
