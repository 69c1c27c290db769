/* upkeep.h: operations of a registry over all its entries: memory reclaim and the periodic sweep. Entries are passed
 * as an array, each with a reference of the caller. Must not hold a lock. */
#ifndef MP_REGISTRY_UPKEEP_H
#define MP_REGISTRY_UPKEEP_H

#include "registry/entry.h"

/* Starts to free at least the lacking bytes: idle caches and arenas if they suffice, else whole models, else both. The
 * first models to go are those that suffice alone, and among equals those with the longest idle time per load time.
 * Returns the same as mp_reclaimer.reclaim (governor.h). Thread-safe. */
uint64_t mp_upkeep_reclaim(mp_entry **entries, int count, const mp_shortage *shortage, bool whole);
/* mp_upkeep_possible returns how many bytes mp_upkeep_reclaim could free. mp_upkeep_later includes those that it could
 * free once the requests of models in use have ended. Both leave out the entry `asker` (NULL: a load or a new request
 * asks). For an asker, mp_upkeep_later leaves out models whose requests all wait for memory: they may wait for it. */
uint64_t mp_upkeep_possible(mp_entry **entries, int count, const void *asker);
uint64_t mp_upkeep_later(mp_entry **entries, int count, const void *asker);

/* Writes the models that hold memory, the largest first, each with its bytes and with what keeps it in memory. Returns
 * the length of the text, which ends after the last model that fits. */
size_t mp_upkeep_holders(mp_entry **entries, int count, char *text, size_t size);

typedef struct mp_upkeep { /* for the maintenance thread only */
    uint64_t every_ns;           /* interval between memory checks */
    uint64_t tick_ns, logged_ns; /* last check; last log record */
    mp_pressure pressure;        /* as last logged */
} mp_upkeep;

void mp_upkeep_init(mp_upkeep *upkeep, uint64_t every_ns);
/* Runs every check that is due. Returns the time at which the next check is due; UINT64_MAX: never, because no worker
 * exists. */
uint64_t mp_upkeep_sweep(mp_upkeep *upkeep, mp_services *services, mp_entry **entries, int count, uint64_t now_ns);

#endif
