/* maintenance.h: one thread per registry that checks what no other thread is awake for: deadlines of queued and active
 * requests, and loads without progress. It starts with the first mp_maintenance_at, sleeps until the earliest announced
 * time, and then runs a sweep.
 *
 * It also keeps the clock of requests, by which deadlines and patience are measured. This clock leaves out the time
 * in which the process did not run: after SIGSTOP, or while the machine was suspended. While a request with a limit
 * exists, the thread ticks every MP_TICK_NS. The clock advances by at most MP_PAUSE_NS beyond a tick. So whichever
 * thread runs first after a pause reads a time at which no request has expired, and at most MP_PAUSE_NS of a pause is
 * charged. */
#ifndef MP_REGISTRY_MAINTENANCE_H
#define MP_REGISTRY_MAINTENANCE_H

#include <stdatomic.h>

#include "base/sys.h"
#include "registry/pool/pool.h"

#define MP_TICK_NS (250ull * 1000 * 1000)
#define MP_PAUSE_NS (2 * MP_TICK_NS)

typedef struct mp_maintenance {
    /* Runs every check that is due. Returns the time at which the next check is due (UINT64_MAX: none). Called without
     * a lock. */
    uint64_t (*sweep)(void *arg, uint64_t now_ns);
    void *arg;
    _Atomic uint64_t next_ns; /* when the next sweep is due; written under lock, read without */
    /* Clock of requests. The thread changes `paused_ns` before `tick_ns`: a reader of the new tick sees both. */
    _Atomic uint64_t tick_ns;   /* time of the last tick; 0 = the thread does not tick */
    _Atomic uint64_t paused_ns; /* all pauses so far */
    _Atomic int timed;          /* requests with a limit */
    mp_mutex lock;
    mp_cond changed;
    /* guarded by: lock */
    bool running, quit, refused;
    int unneeded; /* consecutive ticks without a request with a limit */
} mp_maintenance;

/* Caller's storage, zeroed. */
void mp_maintenance_init(mp_maintenance *maintenance, uint64_t (*sweep)(void *arg, uint64_t now_ns), void *arg);
void mp_maintenance_deinit(mp_maintenance *maintenance); /* after mp_maintenance_stop */
/* Announces a check: the thread wakes at `when_ns` at the latest. Takes no lock if an earlier time is already
 * announced. Starts the thread on first use. Must not hold a lock. */
void mp_maintenance_at(mp_maintenance *maintenance, mp_pool *pool, uint64_t when_ns);
/* Returns the time by the clock of requests, which never exceeds mp_sys_now_ns. */
static inline uint64_t mp_maintenance_clock(const mp_maintenance *maintenance) {
    uint64_t tick = atomic_load_explicit(&maintenance->tick_ns, memory_order_acquire);
    uint64_t paused = atomic_load_explicit(&maintenance->paused_ns, memory_order_relaxed), now = mp_sys_now_ns();
    if (tick && now > tick + MP_PAUSE_NS)
        now = tick + MP_PAUSE_NS;
    return now - paused;
}
/* Call when a request with a limit was accepted, and when it has ended. The first takes the lock of `maintenance`,
 * which is a leaf. */
void mp_maintenance_begin_timed(mp_maintenance *maintenance);
void mp_maintenance_end_timed(mp_maintenance *maintenance);
/* Stops the thread and returns when its job has ended. mp_maintenance_at must not be called afterwards. */
void mp_maintenance_stop(mp_maintenance *maintenance);

void mp_maintenance_fork_before(mp_maintenance *maintenance);
void mp_maintenance_fork_parent(mp_maintenance *maintenance);
void mp_maintenance_fork_child(mp_maintenance *maintenance);

#endif
