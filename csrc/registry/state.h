/* state.h: the state of a registry, for the files that work on all of its entries: registry_all.c, audit.c,
 * registry_fork.c, keys.c, registry.c. */
#ifndef MP_REGISTRY_STATE_H
#define MP_REGISTRY_STATE_H

#include "registry/entry.h"
#include "registry/upkeep.h"

typedef struct slot { /* one key; owns a reference to each entry */
    mp_entry *current;
    mp_entry *incoming; /* the replacement, which is being loaded while `current` serves; or NULL */
    bool staged; /* `incoming` becomes the current entry by mp_registry_commit, and not as soon as it is loaded */
    bool resume; /* after a fork: the next operation on the key starts the load of `incoming` again */
} slot;

typedef enum closing { OPEN, CLOSING, CLOSED } closing;

struct mp_registry {
    mp_services *services;
    uint64_t grace_ns;
    mp_upkeep upkeep; /* for the maintenance thread only */
    mp_reclaimer reclaimer;
    mp_registry *fork_next;
    _Atomic bool refusing;
    mp_mutex lock;
    mp_cond changed;
    /* guarded by: lock */
    slot *slots; /* ascending by key */
    int slot_count, slot_capacity;
    mp_entry **leaving; /* removed or replaced entries that still drain; owns references */
    int leaving_count, leaving_capacity;
    bool drains; /* after a fork: the next operation announces a sweep, which frees entries in `leaving` */
    int inside; /* operations on entries in progress: see registry.c */
    closing closing;
};

/* --- registry_all.c --- */

/* Returns the functions that free memory of the registry's models. */
mp_reclaimer mp_registry_reclaimer(mp_registry *registry);
/* Called by the maintenance thread, with the registry as `arg`. Returns the time of the next call. */
uint64_t mp_registry_sweep(void *arg, uint64_t now_ns);

/* --- keys.c --- */

/* Must hold the lock. Returns SHUTTING_DOWN if the registry closes. */
mp_status mp_registry_refuse_closed(mp_registry *registry, mp_error *error);
/* Must not hold the lock. Looks an entry up and returns a reference. Increments `inside` until the caller calls
 * mp_registry_leave. `want_incoming`: the replacement, if one is being loaded or staged. */
mp_status mp_registry_enter(mp_registry *registry, const char *key, bool want_incoming, mp_entry **entry,
                            mp_error *error);
/* Must not hold the lock. `entry`: NULL if the operation was on none. */
void mp_registry_leave(mp_registry *registry, mp_entry *entry);
/* Must not hold the lock. See mp_services.event. */
void mp_registry_on_event(mp_registry *registry, mp_entry *entry, mp_entry_event event);

#endif
