/* governor.h: the bytes that models, caches and queues of the process may take together.
 *
 *   offered = what machine and cgroup leave to the process      reserve = min(2,048 MB, offered / 4)
 *   limit   = 80 % of (offered - reserve), unless one is asked for; raised to what the first model needs if that fits
 *             into offered - reserve (and said in the log)
 *   budget.used + reserved <= limit when a load is admitted
 *
 * What a load is going to take is reserved first, in two phases: reserve -> the load charges the budget itself ->
 * release. Who needs more than is free asks the reclaimers (the registries) to give up what is idle.
 *
 * Process-wide unless a registry asks for a limit of its own. Any thread may call. */
#ifndef MP_REGISTRY_GOVERNOR_H
#define MP_REGISTRY_GOVERNOR_H

#include "base/alloc.h"
#include "base/sys.h"
#include "registry/shared.h"

typedef struct mp_governor mp_governor;

/* limit 0: the process's governor, with MPOOL_MEMORY_MB or the rule above. */
mp_status mp_governor_open(uint64_t limit, mp_governor **governor, mp_error *error);
void mp_governor_close(mp_governor *governor); /* NULL is legal */
/* What loaders and engines charge. Lives as long as the governor. */
mp_budget *mp_governor_budget(mp_governor *governor);

/* --- guards --- */

/* Bytes that are set aside; zeroed = none. Plain data of one holder: passed on by mp_guard_split, released once. */
typedef struct mp_guard {
    mp_governor *governor;
    uint64_t bytes;
} mp_guard;

/* Set `wanted` bytes aside if that many are free, else `needed`, which is no more. Waits while other loads'
 * reservations are in the way or reclaimers give memory back, until give_up(arg) (asked every 20 ms, no lock held;
 * NULL: never). MEMORY_EXHAUSTED names the model, what is needed and what is free. CANCELLED when given up. Release
 * the guard once the load has charged the budget itself, or failed. */
mp_status mp_governor_reserve(mp_governor *governor, const char *key, uint64_t needed, uint64_t wanted,
                              bool (*give_up)(void *arg), void *arg, mp_guard *guard, mp_error *error);
/* Only what is free now. */
bool mp_governor_try_reserve(mp_governor *governor, uint64_t bytes, mp_guard *guard);
/* A guard over `bytes` of these, or over all if there are fewer. */
mp_guard mp_guard_split(mp_guard *guard, uint64_t bytes);
void mp_guard_release(mp_guard *guard); /* legal on one that holds nothing */

/* --- pressure --- */

typedef enum mp_pressure { MP_PRESSURE_LOW, MP_PRESSURE_NORMAL, MP_PRESSURE_HIGH, MP_PRESSURE_CRITICAL } mp_pressure;
/* Of used to limit: below 50 %, 70 %, 85 %, and above. */
mp_pressure mp_governor_pressure(mp_governor *governor);
const char *mp_pressure_name(mp_pressure pressure);

/* Who can give memory back. Registered while it may be asked. */
typedef struct mp_reclaimer {
    /* Start to give up at least `bytes` of what is idle, the cheapest first; never blocks. whole: nothing, unless it is
     * enough. Returns how many bytes are on their way, those of earlier calls included: 0 = there is nothing to give
     * up. No lock of the governor is held. */
    uint64_t (*reclaim)(void *arg, uint64_t bytes, bool whole);
    /* How many bytes it could give up, those on their way included. Likewise. */
    uint64_t (*possible)(void *arg);
    void *arg;
    struct mp_reclaimer *next; /* guarded by: the governor's lock */
    int asked;                 /* threads inside reclaim; guarded by: the governor's lock */
} mp_reclaimer;
void mp_governor_add_reclaimer(mp_governor *governor, mp_reclaimer *reclaimer);
/* Returns when nobody asks it any more. Legal on one that was not added. */
void mp_governor_remove_reclaimer(mp_governor *governor, mp_reclaimer *reclaimer);
/* Ask the reclaimers, one after the other, until so many bytes are on their way; returns how many are. whole: one alone
 * gives them all, if it can, else they do together. */
uint64_t mp_governor_reclaim(mp_governor *governor, uint64_t bytes, bool whole);
/* Memory was given back: those who wait for it look again. */
void mp_governor_notify(mp_governor *governor);

/* Where the process's is found. */
mp_shared_slot *mp_governor_slot(void);
/* See registry/fork.h; a second call of the same kind does nothing. */
void mp_governor_fork_before(mp_governor *governor);
void mp_governor_fork_parent(mp_governor *governor);
void mp_governor_fork_child(mp_governor *governor);

#endif
