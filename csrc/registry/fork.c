/* fork.c: see fork.h. */
#include "registry/fork.h"

#include <stdatomic.h>

#include "base/sys.h"
#include "registry/cores.h"
#include "registry/governor.h"

static _Atomic uint32_t generation;
static mp_shared_slot registries; /* its lock guards the list; a forking thread holds it from before to after */
static mp_registry *first;
static _Atomic bool installed;
/* Two threads may install the hooks at once, and then they run twice. */
static _Thread_local int depth;

uint32_t mp_fork_generation(void) { return atomic_load_explicit(&generation, memory_order_relaxed); }

static void before(void) {
    if (depth++)
        return;
    mp_shared_lock(&registries);
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_before(registry);
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_before_shared(registry);
    mp_shared_lock(mp_governor_slot());
    mp_shared_lock(mp_cores_slot());
}

static void unlock_slots(void) {
    mp_shared_unlock(mp_cores_slot());
    mp_shared_unlock(mp_governor_slot());
    mp_shared_unlock(&registries);
}

static void in_parent(void) {
    if (--depth)
        return;
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_parent(registry);
    unlock_slots();
}

static void in_child(void) {
    if (--depth)
        return;
    atomic_fetch_add_explicit(&generation, 1, memory_order_relaxed);
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_child(registry);
    unlock_slots();
}

mp_status mp_fork_install(mp_error *error) {
    if (atomic_load_explicit(&installed, memory_order_acquire))
        return MP_OK;
    MP_TRY(mp_sys_at_fork(before, in_parent, in_child, error));
    atomic_store_explicit(&installed, true, memory_order_release);
    return MP_OK;
}

void mp_fork_join(mp_registry *registry) {
    mp_shared_lock(&registries);
    *mp_registry_fork_next(registry) = first;
    first = registry;
    mp_shared_unlock(&registries);
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
