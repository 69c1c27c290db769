/* maintenance.h: one thread per registry that checks what no other thread is awake for: deadlines of queued and active
 * requests, and loads without progress. It starts with the first mp_maintenance_at, sleeps until the earliest announced
 * time, and then runs a sweep. */
#ifndef MP_REGISTRY_MAINTENANCE_H
#define MP_REGISTRY_MAINTENANCE_H

#include "registry/pool/pool.h"

typedef struct mp_maintenance {
    /* Runs every check that is due. Returns the time at which the next check is due (UINT64_MAX: none). Called without
     * a lock. */
    uint64_t (*sweep)(void *arg, uint64_t now_ns);
    void *arg;
    _Atomic uint64_t next_ns; /* when the thread wakes; written under lock, read without */
    mp_mutex lock;
    mp_cond changed;
    bool running, quit, refused; /* guarded by: lock */
} mp_maintenance;

/* Caller's storage, zeroed. */
void mp_maintenance_init(mp_maintenance *maintenance, uint64_t (*sweep)(void *arg, uint64_t now_ns), void *arg);
void mp_maintenance_deinit(mp_maintenance *maintenance); /* after mp_maintenance_stop */
/* Announces a check: the thread wakes at `when_ns` at the latest. Takes no lock if an earlier time is already
 * announced. Starts the thread on first use. Must not hold a lock. */
void mp_maintenance_at(mp_maintenance *maintenance, mp_pool *pool, uint64_t when_ns);
/* Stops the thread and returns when its job has ended. mp_maintenance_at must not be called afterwards. */
void mp_maintenance_stop(mp_maintenance *maintenance);

void mp_maintenance_fork_before(mp_maintenance *maintenance);
void mp_maintenance_fork_parent(mp_maintenance *maintenance);
void mp_maintenance_fork_child(mp_maintenance *maintenance);

#endif
