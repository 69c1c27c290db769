/* team.h: parallel regions on leased compute threads.
 *
 * A team owns helper threads, one fewer than its CPU allocator has compute threads (registry/cpu_allocator.h). A worker
 * leases helpers for a step and runs a parallel region: a body that runs on all threads of the lease at once, the
 * worker's own thread being thread 0. Inside the body the threads meet at a barrier (mp_team_barrier), which spins for
 * option MPOOL_SPIN_US and then parks.
 *
 *   worker --lease--> [thread 0 = worker][thread 1 = helper]...  body(thread, arg) runs on each; run returns after all.
 *
 * On a machine with several memory nodes (base/topology.h) a lease may specify the CPUs of its threads. Each thread is
 * then bound to the CPUs of its node while it works for the lease, so that pages which it touches first are placed on
 * that node. With a single node, threads are not bound: all memory is equally near, and the system must be free to move
 * a thread away from a CPU that another process needs.
 *
 * Compute threads never take the GIL, never allocate inside a layer and run with FTZ/DAZ set (set on entry to a region,
 * restored on thread 0 afterwards).
 *
 * Fork: a forked child has none of the helper threads. There the owner of the team drops its pointer without destroying
 * the team (mp_cpu_allocator_fork_child). */
#ifndef MP_BASE_TEAM_H
#define MP_BASE_TEAM_H

#include "base/event_count.h"
#include "base/sys.h"

typedef struct mp_team mp_team;
typedef struct mp_region mp_region; /* one parallel region: its barrier and threads */
typedef struct mp_team_share mp_team_share;

typedef struct mp_team_thread { /* one thread of a parallel region */
    int index, count; /* 0 <= index < count */
    mp_region *region;
    mp_team_share *share; /* the thread's share of a loop (mp_team_next) */
} mp_team_thread;

/* A group of threads of a lease that run on the same set of CPUs. */
typedef struct mp_team_place {
    const mp_cpu_set *cpus; /* must outlive team and lease; NULL: not bound */
    int threads;            /* at least 1 */
} mp_team_place;

/* Compute threads that a worker holds for a step. Plain data in the worker's storage. */
typedef struct mp_lease {
    mp_team *team;
    int threads;                  /* >= 1 */
    const _Atomic int *cancelled; /* not 0 once every item of the step is cancelled; may be NULL */
    /* Say that others wait: not 0 once a request is queued for the worker's model; the number of workers that have
     * work, this one included; the number of threads that wait for CPUs. NULL: unknown. */
    const _Atomic int *wanted, *runnable, *waiting;
    bool cut_short;               /* set by the engine: the step did less than planned */
    _Atomic uint64_t heartbeat;   /* time of the last mp_lease_poll in ns; read by the watchdog */
    int helpers[255];             /* private: indices of the helpers held */
    int near;                     /* number of threads at the first mp_team_place */
    bool barrier_bound;           /* set by the worker: the threads meet at barriers many times per millisecond */
    /* Sums over the regions of this lease that were measured. watched_ns: their duration. lost_ns: time during which
     * the most delayed thread of each region was ready to run but had no CPU (or waited for a page). */
    uint64_t watched_ns, lost_ns;
    bool bound;        /* thread 0 is bound to the CPUs of its place */
    mp_cpu_set before; /* if bound: the CPUs that thread 0 could use before */
} mp_lease;

/* Start a team of 0 to 255 helper threads. SPAWN_FAILED or MEMORY_EXHAUSTED when the system refuses. */
mp_status mp_team_create(int helpers, mp_team **team, mp_error *error);
void mp_team_destroy(mp_team *team); /* joins the helpers; no lease may be held; NULL is legal */
int mp_team_size(const mp_team *team); /* helpers + 1 */

/* Lease up to `want` threads (>= 1), the caller's included: takes helpers that are free now and never waits for one.
 * Sets lease->threads to the number of threads leased. `team` may be NULL: then that number is 1. */
void mp_team_lease(mp_team *team, int want, mp_lease *lease);
/* mp_team_lease with a number of threads for each of `count` places. Thread 0 runs at the first place. Prefers helpers
 * that last worked at the same place. */
void mp_team_lease_at(mp_team *team, const mp_team_place *places, int count, mp_lease *lease);
/* End a lease. Must be called by the thread that took the lease. */
void mp_team_return(mp_lease *lease);

/* Run `body` on all threads of the lease. Returns when `body` has returned on all of them. */
void mp_lease_run(mp_lease *lease, void (*body)(const mp_team_thread *thread, void *arg), void *arg);
/* Call at least every 5 ms from tile loops: updates the heartbeat and returns true when the step must stop.
 * Thread-safe. All threads must agree whether to skip a barrier, so one thread must share the result through memory
 * before one. */
bool mp_lease_poll(mp_lease *lease);
/* Returns true if others wait for the end of the step. Thread-safe. */
bool mp_lease_wanted(const mp_lease *lease);

/* Barrier over the threads of a region, with release and acquire semantics. Does nothing when count is 1. */
void mp_team_barrier(const mp_team_thread *thread);
/* Waits as at a barrier, until `count` differs from `seen` (base/event_count.h). */
void mp_team_wait(const mp_team_thread *thread, mp_event_count *count, uint32_t seen);
/* A region of the calling thread alone, for code that needs a region but no team. */
static inline mp_team_thread mp_team_single(void) { return (mp_team_thread){0, 1, 0, 0}; }
/* Split [0, n) into thread->count contiguous ranges whose inner ends are multiples of `grain`; the range of this thread
 * is [*begin, *end). For loops of which a thread reads its own results again before the next barrier, and for a loop
 * that a pass runs once. All other loops: mp_team_next. */
void mp_team_split(const mp_team_thread *thread, int64_t n, int64_t grain, int64_t *begin, int64_t *end);

/* A loop over units of work that the threads of a region share, as one thread sees it. */
typedef struct mp_team_loop {
    int64_t n;         /* number of units */
    int64_t least;     /* units of the smallest range: work of 10 us or more. 0: each thread takes its own share only */
    const int *starts; /* [count + 1] first unit of each thread's share, ascending to n; NULL: equal shares of [0, n) */
    int64_t begin, end; /* the present range */
    uint32_t number;    /* private: number of the loop in its region */
    int looked;         /* private: shares in which this thread has found no range left */
} mp_team_loop;
static inline mp_team_loop mp_team_shared(int64_t n, int64_t least) { return (mp_team_loop){.n = n, .least = least}; }
/* Returns a loop over rows whose body reads and writes about `floats` floats per row. Each thread takes its own share
 * only if that takes less than about 20 us: to search the shares of others would cost more than it gains. */
mp_team_loop mp_team_rows(const mp_team_thread *thread, int64_t rows, int64_t floats);
/* Move `loop` on to the next range that this thread takes. Returns false when no units are left. Each thread first
 * takes ranges of its own share from the front, so that it reads contiguous memory, and then ranges from the back of
 * the shares of others. Ranges get smaller down to `least`. A thread that is slow or has no CPU therefore holds up at
 * most the range that it is working on. A thread alone takes all units at once.
 *
 * All threads of the region must run the same loops in the same order; no barrier is needed between loops. The speed of
 * the threads decides which thread takes a unit, so no result may depend on it, and after the loop a thread may read
 * other units' results only behind a barrier. */
bool mp_team_next(const mp_team_thread *thread, mp_team_loop *loop);

#endif
