/* state.h: the state of a registry, for registry.c, registry_all.c and registry_fork.c only. */
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

#endif
