/* maintenance.h: one thread per registry that checks the deadlines of queued and active requests, and loads without
 * progress, because no other thread may be awake to check them. The thread starts with the first mp_maintenance_at,
 * sleeps until the earliest announced time, and then runs a sweep.
 *
 * The thread also keeps the clock of requests, by which deadlines and patience are measured. This clock leaves out the
 * time in which the process did not run: after SIGSTOP, or while the machine was suspended. While a request with a
 * limit exists, and for a few ticks after it, the thread ticks every MP_TICK_NS. The clock advances by at most
 * MP_PAUSE_NS beyond a tick. A pause therefore costs the waiting requests at most MP_PAUSE_NS, whichever thread runs
 * first after it.
 *
 * A sweep may be held up: by a lock, or while it frees a large model. Then no tick comes although the process runs, so
 * a thread that reads the clock and finds the tick overdue ticks itself. */
#ifndef MP_REGISTRY_MAINTENANCE_H
#define MP_REGISTRY_MAINTENANCE_H

#include <stdatomic.h>

#include "base/sys.h"
#include "registry/pool/pool.h"

#define MP_TICK_NS (250ull * 1000 * 1000)
#define MP_PAUSE_NS (2 * MP_TICK_NS)
#define MP_OVERDUE_NS (MP_TICK_NS + MP_TICK_NS / 2) /* below MP_PAUSE_NS: readers tick before the clock stops */

typedef struct mp_maintenance {
    /* Runs every check that is due. Returns the time at which the next check is due (UINT64_MAX: none). Called without
     * a lock. */
    uint64_t (*sweep)(void *arg, uint64_t now_ns);
    void *arg;
    _Atomic uint64_t next_ns; /* when the next sweep is due; written under lock, read without */
    /* Clock of requests: beats[count & 1] is valid. A tick, by any thread, fills the other beat and then increments
     * `count`. */
    struct mp_beat {
        _Atomic uint64_t tick_ns;   /* time of the last tick; 0 = the thread does not tick */
        _Atomic uint64_t paused_ns; /* all pauses so far */
    } beats[2];
    _Atomic uint64_t count; /* guarded by: lock, for writing */
    _Atomic int timed;          /* number of requests with a limit: a deadline or a patience */
    mp_mutex lock;
    mp_cond changed;
    /* guarded by: lock */
    bool running, quit, refused; /* refused: the thread could not be started, and this was logged */
    int unneeded; /* consecutive ticks without a request with a limit */
} mp_maintenance;

/* Caller's storage, zeroed. */
void mp_maintenance_init(mp_maintenance *maintenance, uint64_t (*sweep)(void *arg, uint64_t now_ns), void *arg);
void mp_maintenance_deinit(mp_maintenance *maintenance); /* after mp_maintenance_stop */
/* Announces a check: the thread wakes at `when_ns` at the latest. Takes no lock if an earlier time is already
 * announced. Starts the thread on first use. Must not hold a lock. */
void mp_maintenance_at(mp_maintenance *maintenance, mp_pool *pool, uint64_t when_ns);
/* Ticks if the tick is overdue. Takes the lock of `maintenance`, which is a leaf. */
void mp_maintenance_tick(mp_maintenance *maintenance);
/* Returns the time by the clock of requests, which never exceeds mp_sys_now_ns. Sets *now_ns (unless NULL) to the time
 * by mp_sys_now_ns at the same moment. A beat is overwritten only after the next one was published, so a beat that is
 * read between two equal values of `count` is whole, and was valid when the time was read. May tick. */
static inline uint64_t mp_maintenance_clock(mp_maintenance *maintenance, uint64_t *now_ns) {
    uint64_t count, tick, paused, now;
    do {
        count = atomic_load_explicit(&maintenance->count, memory_order_seq_cst);
        tick = atomic_load_explicit(&maintenance->beats[count & 1].tick_ns, memory_order_acquire);
        paused = atomic_load_explicit(&maintenance->beats[count & 1].paused_ns, memory_order_acquire);
        now = mp_sys_now_ns();
    } while (atomic_load_explicit(&maintenance->count, memory_order_seq_cst) != count);
    if (now_ns)
        *now_ns = now;
    if (tick && now > tick + MP_OVERDUE_NS)
        mp_maintenance_tick(maintenance);
    return (tick && now > tick + MP_PAUSE_NS ? tick + MP_PAUSE_NS : now) - paused;
}
/* Call _begin_timed when a request with a limit was accepted, and _end_timed when it has ended. _begin_timed takes the
 * lock of `maintenance`, which is a leaf. */
void mp_maintenance_begin_timed(mp_maintenance *maintenance);
void mp_maintenance_end_timed(mp_maintenance *maintenance);
/* Stops the thread and returns when its job has ended. mp_maintenance_at must not be called afterwards. */
void mp_maintenance_stop(mp_maintenance *maintenance);

/* See registry/fork.h. */
void mp_maintenance_fork_before(mp_maintenance *maintenance);
void mp_maintenance_fork_parent(mp_maintenance *maintenance);
void mp_maintenance_fork_child(mp_maintenance *maintenance);

#endif
