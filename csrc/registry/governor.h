/* governor.h: the bytes that models, caches and queues of the process may take together.
 *
 *   offered = what machine and cgroup leave to the process      reserve = min(2,048 MB, offered / 4)
 *   limit   = 80 % of (offered - reserve), unless one is asked for; raised to what the first model needs if that fits
 *             into offered - reserve (and said in the log)
 *   budget.used + reserved <= limit when a load is admitted
 *
 * Process-wide unless a registry asks for a limit of its own. Any thread may call. */
#ifndef MP_REGISTRY_GOVERNOR_H
#define MP_REGISTRY_GOVERNOR_H

#include "base/alloc.h"
#include "base/sys.h"

typedef struct mp_governor mp_governor;

/* limit 0: the process's governor, with MPOOL_MEMORY_MB or the rule above. */
mp_status mp_governor_open(uint64_t limit, mp_governor **governor, mp_error *error);
void mp_governor_close(mp_governor *governor); /* NULL is legal */
/* What loaders and engines charge. Lives as long as the governor. */
mp_budget *mp_governor_budget(mp_governor *governor);

/* Set bytes aside for a load that is about to start. Waits while only other loads' reservations are in the way, until
 * give_up(arg) (asked every 20 ms, no lock held; NULL: never). MEMORY_EXHAUSTED names the model, what is needed and
 * what is free. CANCELLED when given up. Hand the reservation back once the load has charged the budget itself, or
 * failed. */
mp_status mp_governor_reserve(mp_governor *governor, const char *key, uint64_t bytes, bool (*give_up)(void *arg),
                              void *arg, mp_error *error);
void mp_governor_unreserve(mp_governor *governor, uint64_t bytes);

/* See registry/fork.h; a second call of the same kind does nothing. */
void mp_governor_fork_before(mp_governor *governor);
void mp_governor_fork_parent(mp_governor *governor);
void mp_governor_fork_child(mp_governor *governor);

#endif
