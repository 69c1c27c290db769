/* upkeep.h: what a registry does for all its entries together: memory that is asked back, and the look that maintenance
 * takes at whatever is due. Entries are given as an array, each with a reference of the caller; no lock is held. */
#ifndef MP_REGISTRY_UPKEEP_H
#define MP_REGISTRY_UPKEEP_H

#include "registry/entry.h"

/* Start to give up at least `bytes`: caches and arenas of those without work if they are enough, else whole models, the
 * coldest in relation to what loading them again costs, and caches as well if those are not enough either. As
 * mp_reclaimer of governor.h, whose answer it gives. Any thread. */
uint64_t mp_upkeep_reclaim(mp_entry **entries, int count, uint64_t bytes, bool whole);
/* How much that could be. */
uint64_t mp_upkeep_possible(mp_entry **entries, int count);

typedef struct mp_upkeep { /* the maintenance thread's */
    uint64_t every_ns;           /* between looks at memory */
    uint64_t tick_ns, logged_ns; /* when it looked last, and said so */
    mp_pressure pressure;        /* that it said */
} mp_upkeep;

void mp_upkeep_init(mp_upkeep *upkeep, uint64_t every_ns);
/* Everything that is due. Returns when to look again; UINT64_MAX: nothing is due, as nobody works. */
uint64_t mp_upkeep_sweep(mp_upkeep *upkeep, mp_services *services, mp_entry **entries, int count, uint64_t now_ns);

#endif
