/* team.h: parallel regions on leased threads.
 *
 * A team owns helper threads (one fewer than the process may use CPUs). A worker leases some of them for a step and
 * runs a body on all lanes at once: the worker's own thread is lane 0. Inside the body the lanes meet at mp_lane_sync,
 * a barrier that spins for options MPOOL_SPIN_US and then parks. There are never more compute threads than CPUs.
 *
 *   worker --lease--> [lane 0 = worker][lane 1 = helper]...  body(lane, arg) runs on each; run returns when all have.
 *
 * On a machine with several memory nodes (base/topology.h) a lease may say where its lanes are to run: then each is
 * bound to the CPUs of its node while it works for the lease, so that what it touches first lies there and stays near.
 * On one node nothing is bound: all memory is equally near, and the system must be free to move a lane away from a CPU
 * that somebody else needs.
 *
 * Compute threads never take the GIL, never allocate inside a layer and run with FTZ/DAZ set (set on entry to a region,
 * restored on lane 0 afterwards). */
#ifndef MP_BASE_TEAM_H
#define MP_BASE_TEAM_H

#include "base/sys.h"

typedef struct mp_team mp_team;
typedef struct mp_region mp_region; /* one running parallel region: its barrier and participants */

typedef struct mp_lane {
    int index, count;
    mp_region *region;
} mp_lane;

/* Lanes of a lease that share CPUs. */
typedef struct mp_place {
    const mp_cpu_set *cpus; /* outlives team and lease; NULL: not bound */
    int lanes;              /* at least 1 */
} mp_place;

/* Cores that a worker holds for a step. Plain data, the worker's storage. */
typedef struct mp_lease {
    mp_team *team;
    int lanes;                    /* >= 1 */
    const _Atomic int *cancelled; /* raised when every item of the step was cancelled, or NULL */
    _Atomic uint64_t heartbeat;   /* ns of the last poll; the watchdog reads it */
    int helpers[255];             /* team-internal: indices of the helpers held */
    int near;                     /* lanes at the first place */
    bool together; /* its lanes wait for each other often: by whoever knows */
    /* Of the regions that were watched since the lease was made: how long they took, and how much of it the lane that
     * had least of a CPU stood ready and had none, because others had it (or because it waited for a page). */
    uint64_t watched_ns, lost_ns;
    bool bound;                   /* lane 0 is, and where it was before: */
    mp_cpu_set before;
} mp_lease;

mp_status mp_team_create(int helpers, mp_team **team, mp_error *error);
void mp_team_destroy(mp_team *team); /* no lease may be held; joins */
int mp_team_size(const mp_team *team); /* helpers + 1 */

/* Lease up to `want` lanes (>= 1): takes the helpers that are free now, never waits. lease->lanes says how many. */
void mp_team_lease(mp_team *team, int want, mp_lease *lease);
/* Likewise, so many lanes at each place, lane 0 at the first; helpers that worked there last come first. */
void mp_team_lease_at(mp_team *team, const mp_place *places, int count, mp_lease *lease);
/* By the thread that leased. */
void mp_team_return(mp_lease *lease);

/* Run body on all lanes of the lease. */
void mp_lease_run(mp_lease *lease, void (*body)(const mp_lane *lane, void *arg), void *arg);
/* To be called at least every 5 ms of work by tile loops: beats the heart, returns true when the step is to stop. All
 * lanes must agree before they skip a barrier: call it on lane 0 and share the answer through memory + mp_lane_sync. */
bool mp_lease_poll(mp_lease *lease);

/* Barrier over the lanes of a region, release/acquire. Nothing when count is 1. */
void mp_lane_sync(const mp_lane *lane);
/* A region of one lane on the calling thread, for code that wants a lane but no team. */
static inline mp_lane mp_lane_single(void) { return (mp_lane){0, 1, 0}; }
/* Split [0, n) into lane->count contiguous ranges whose inner ends are multiples of `grain`. */
void mp_lane_split(const mp_lane *lane, int64_t n, int64_t grain, int64_t *begin, int64_t *end);

#endif
