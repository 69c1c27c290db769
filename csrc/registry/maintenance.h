/* maintenance.h: one thread a registry that looks after what nobody else is awake for: deadlines of calls that wait or
 * run, and loads that make no progress. It starts when the first of them is announced, sleeps until the nearest is
 * due, and then asks for a sweep. */
#ifndef MP_REGISTRY_MAINTENANCE_H
#define MP_REGISTRY_MAINTENANCE_H

#include "registry/pool/pool.h"

typedef struct mp_maintenance {
    /* Looks at everything that is due and returns when to look again (UINT64_MAX: nothing is due). No lock held. */
    uint64_t (*sweep)(void *arg, uint64_t now_ns);
    void *arg;
    _Atomic uint64_t next_ns; /* when it wakes; written under lock, read without */
    mp_mutex lock;
    mp_cond changed;
    bool running, quit, refused; /* guarded by: lock */
} mp_maintenance;

/* Caller's storage, zeroed. */
void mp_maintenance_init(mp_maintenance *maintenance, uint64_t (*sweep)(void *arg, uint64_t now_ns), void *arg);
void mp_maintenance_deinit(mp_maintenance *maintenance); /* stopped */
/* Be awake at that time. Cheap when it is awake earlier anyway. Starts a thread of the pool on first use. No lock
 * held. */
void mp_maintenance_at(mp_maintenance *maintenance, mp_pool *pool, uint64_t when_ns);
/* Returns when the thread's job is over; nothing can be announced any more. */
void mp_maintenance_stop(mp_maintenance *maintenance);

void mp_maintenance_fork_before(mp_maintenance *maintenance);
void mp_maintenance_fork_parent(mp_maintenance *maintenance);
void mp_maintenance_fork_child(mp_maintenance *maintenance);

#endif
