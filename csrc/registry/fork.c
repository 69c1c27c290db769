/* fork.c: see fork.h. */
#include "registry/fork.h"

#include <assert.h>
#include <stdatomic.h>

#include "base/forked.h"
#include "registry/cpu_allocator.h"
#include "registry/events.h"
#include "registry/governor.h"

static mp_shared_slot registries; /* its lock guards the list; the forking thread holds it during the fork */
static mp_registry *first;

static void fork_before(void) {
    mp_shared_lock(&registries);
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_before(registry);
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_before_shared(registry);
    mp_shared_lock(mp_governor_slot());
    mp_shared_lock(mp_cpu_allocator_slot());
}

static void unlock_slots(void) {
    mp_shared_unlock(mp_cpu_allocator_slot());
    mp_shared_unlock(mp_governor_slot());
    mp_shared_unlock(&registries);
}

static void fork_in_parent(void) {
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_parent(registry);
    unlock_slots();
}

static void fork_in_child(void) {
    for (mp_registry *registry = first; registry; registry = *mp_registry_fork_next(registry))
        mp_registry_fork_child(registry);
    unlock_slots();
}

mp_status mp_fork_install(mp_error *error) {
    static const mp_fork_handlers handlers = {fork_before, fork_in_parent, fork_in_child};
    static const mp_fork_handlers event_handlers = {.child = mp_events_fork_child};
    MP_TRY(mp_fork_register(MP_FORK_EVENTS, &event_handlers, error));
    return mp_fork_register(MP_FORK_REGISTRIES, &handlers, error);
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
    while (*link != registry) {
        assert(*link); /* the registry is listed */
        link = mp_registry_fork_next(*link);
    }
    *link = *mp_registry_fork_next(registry);
    mp_shared_unlock(&registries);
}
