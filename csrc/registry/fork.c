/* fork.c: see fork.h. */
#include "registry/fork.h"

#include <stdatomic.h>

#include "base/sys.h"
#include "registry/shared.h"

static _Atomic uint32_t generation;
static mp_shared_slot
    registries; /* its lock guards the list; held by a forking thread from before to parent or child */
static mp_registry *first;
static bool installed;

uint32_t mp_fork_generation(void) { return atomic_load_explicit(&generation, memory_order_relaxed); }

static void before(void) {
    mp_shared_lock(&registries);
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_before(registry);
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_before_shared(registry);
}

static void in_parent(void) {
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_parent(registry);
    mp_shared_unlock(&registries);
}

static void in_child(void) {
    atomic_fetch_add_explicit(&generation, 1, memory_order_relaxed);
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_child(registry);
    mp_shared_unlock(&registries);
}

mp_status mp_fork_join(mp_registry *registry, mp_error *error) {
    mp_shared_lock(&registries);
    mp_status status = installed ? MP_OK : mp_sys_at_fork(before, in_parent, in_child, error);
    if (status == MP_OK) {
        installed = true;
        *mp_registry_fork_next(registry) = first;
        first = registry;
    }
    mp_shared_unlock(&registries);
    return status;
}

void mp_fork_leave(mp_registry *registry) {
    mp_shared_lock(&registries);
    mp_registry **link = &first;
    while (*link && *link != registry)
        link = mp_registry_fork_next(*link);
    if (*link)
        *link = *mp_registry_fork_next(registry);
    mp_shared_unlock(&registries);
}
