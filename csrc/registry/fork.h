/* fork.h: registries across a fork of the process. base/forked.h describes the protocol and the order of all locks.
 *
 * Before a fork the forking thread takes every lock of every registry, in the order stated in registry.c. It then takes
 * the locks of the objects that registries share, and last those of the slots that point to them (shared.h). The child
 * therefore finds no structure half changed. The parent releases the locks. The child makes new locks and forgets
 * threads, leases and requests, which exist in the parent only. Locks of tickets and notifiers are not taken: each
 * carries the fork generation it was made in, and a lock of an earlier generation is never taken again. */
#ifndef MP_REGISTRY_FORK_H
#define MP_REGISTRY_FORK_H

#include "registry/registry.h"

/* Register the handlers of registries and of events. Call before creating anything that these handlers lock.
 * Thread-safe. MEMORY_EXHAUSTED when the system refuses the hooks. */
mp_status mp_fork_install(mp_error *error);
/* Include the registry in forks from mp_fork_join to mp_fork_leave, which must be called once each. Thread-safe. */
void mp_fork_join(mp_registry *registry);
void mp_fork_leave(mp_registry *registry);

/* Called by fork.c for each registry. */
void mp_registry_fork_before(mp_registry *registry);        /* takes its own locks; called for all registries first */
void mp_registry_fork_before_shared(mp_registry *registry); /* takes locks of shared objects; called last */
void mp_registry_fork_parent(mp_registry *registry);
void mp_registry_fork_child(mp_registry *registry);
mp_registry **mp_registry_fork_next(mp_registry *registry); /* link of fork.c's list */

#endif
