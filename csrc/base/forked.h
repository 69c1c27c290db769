/* forked.h: the one registry of fork handlers.
 *
 * A forked child has one thread, the forking one. A lock that another thread held at the fork stays locked there for
 * ever, and data that another thread was changing stays half changed. So the forking thread takes every lock of the
 * core before the fork, in the order of mp_fork_rank; the parent releases them in reverse order; the child makes new
 * locks and discards its copies of the parent's threads, leases, requests, worker processes, log records and events.
 *
 *   pthread_atfork ── before: rank 0, 1, ... ── fork ─┬─ parent: rank ..., 1, 0
 *                                                     └─ child:  rank 0, 1, ...
 *
 * A new process-wide lock needs a rank here and a call of mp_fork_register before the lock is first taken. An object
 * with a lock that only one process uses (a ticket, a notifier) stores mp_fork_generation instead and ignores its lock
 * in another process. A compute team (base/team.h) is discarded by its owner, the CPU allocator. */
#ifndef MP_BASE_FORKED_H
#define MP_BASE_FORKED_H

#include "base/error.h"

/* Lock order of a fork: a thread may hold locks of lower ranks while it takes one of a higher rank. */
typedef enum mp_fork_rank {
    MP_FORK_PARKING,    /* base/parking.c: no lock; the child makes new locks, before other handlers wake threads */
    MP_FORK_REGISTRIES, /* registry/fork.c: locks of every registry, then the governor's and the CPU allocator's */
    MP_FORK_SPECS,      /* files/spec.c: identities of files */
    MP_FORK_BLAS,       /* kernels/blas.c: state of OpenBLAS; a fork waits while the library is being opened */
    MP_FORK_OBJECTS,    /* this file: the list of mp_forked */
    MP_FORK_EVENTS,     /* registry/events.c: no lock; the child empties the ring */
    MP_FORK_LOG,        /* base/log.c: no lock; the child empties the ring */
    MP_FORK_RANK_COUNT
} mp_fork_rank;

typedef struct mp_fork_handlers { /* each may be NULL */
    void (*before)(void);         /* forking thread: take the locks */
    void (*parent)(void);         /* forking thread of the parent: release the locks */
    void (*child)(void);          /* the child's only thread: make new locks, discard the parent's objects */
} mp_fork_handlers;

/* Install the hooks of the system. Call at start-up, before other threads exist. MEMORY_EXHAUSTED when refused. */
mp_status mp_fork_init(mp_error *error);
/* Return the number of forks between the process that installed the hooks and this process. */
uint32_t mp_fork_generation(void);
/* Register the handlers of a rank for all later forks; waits for a fork in progress, so hold no lock of any rank.
 * `handlers` must stay valid for the life of the process. A second call for the same rank does nothing. Thread-safe.
 * MEMORY_EXHAUSTED when the hooks are refused. */
mp_status mp_fork_register(mp_fork_rank rank, const mp_fork_handlers *handlers, mp_error *error);

/* List entry of an object that a forked child must discard, such as memory charged for a worker process, or descriptors
 * that only the parent uses. */
typedef struct mp_forked { /* embedded in the object */
    struct mp_forked *next, **link;
    void (*forget)(struct mp_forked *self);
} mp_forked;

/* Call `forget` once in each child forked from now on, on its only thread; the object has left the list by then.
 * Thread-safe. MEMORY_EXHAUSTED when the system refuses the hooks. */
mp_status mp_forked_add(mp_forked *self, void (*forget)(mp_forked *self), mp_error *error);
/* Thread-safe. Legal on an object that is zeroed or already removed. */
void mp_forked_remove(mp_forked *self);
/* Block forks while the caller changes data that `forget` reads. Hold for nanoseconds only: other callers of
 * mp_forked_hold spin meanwhile. */
void mp_forked_hold(void);
void mp_forked_release(void);

#endif
