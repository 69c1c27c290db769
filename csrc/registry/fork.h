/* fork.h: what happens to registries when the process forks.
 *
 * Before a fork every lock of every registry is taken, in the order at the top of registry.c, and what registries share
 * after what is their own; last the slots where that is found (shared.h). So the child finds no structure half changed;
 * the parent releases them; the child makes new locks and forgets threads, leases and calls, which exist in the parent
 * only. Tickets and notifiers have locks that are not taken: they carry the generation they were made in, and one of an
 * earlier one is never locked again. */
#ifndef MP_REGISTRY_FORK_H
#define MP_REGISTRY_FORK_H

#include "registry/registry.h"

/* Forks between the first process that used registries and this one. */
uint32_t mp_fork_generation(void);
/* Before anything that a fork is to find whole. */
mp_status mp_fork_install(mp_error *error);
/* Known to the hooks from join to leave. */
void mp_fork_join(mp_registry *registry);
void mp_fork_leave(mp_registry *registry);

/* By fork.c, to each registry. */
void mp_registry_fork_before(mp_registry *registry);        /* its own locks; of all registries before */
void mp_registry_fork_before_shared(mp_registry *registry); /* those of what it shares with others: these come last */
void mp_registry_fork_parent(mp_registry *registry);
void mp_registry_fork_child(mp_registry *registry);
mp_registry **mp_registry_fork_next(mp_registry *registry); /* link of fork.c's list */

#endif
