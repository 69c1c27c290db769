/* shared.h: one object for the whole process, created by its first user and freed by its last.
 *
 * A forking thread holds the lock of each slot (fork.c), so the child finds it consistent. The users are registries,
 * and the child has the same registries. An exception is a registry that another thread was creating or destroying at
 * the fork: it stays counted in the child, which then never frees the object. */
#ifndef MP_REGISTRY_SHARED_H
#define MP_REGISTRY_SHARED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/cpu.h"

typedef struct mp_shared_slot {
    /* a spin lock that needs no initialisation; held only to read or change the pointer and the count */
    _Atomic int busy;
    void *object;     /* guarded by: busy */
    int users;        /* guarded by: busy */
} mp_shared_slot;

static inline void mp_shared_lock(mp_shared_slot *slot) {
    while (atomic_exchange_explicit(&slot->busy, 1, memory_order_acquire))
        mp_cpu_relax();
}
static inline void mp_shared_unlock(mp_shared_slot *slot) {
    atomic_store_explicit(&slot->busy, 0, memory_order_release);
}

/* Returns the object and counts one more user, or returns NULL if there is none. */
static inline void *mp_shared_take(mp_shared_slot *slot) {
    mp_shared_lock(slot);
    void *object = slot->object;
    if (object)
        slot->users++;
    mp_shared_unlock(slot);
    return object;
}
/* Offers a new object. Returns the object that is in the slot afterwards and counts one more user of it. If another
 * thread was faster, the result is not `object`, and the caller must free `object`. */
static inline void *mp_shared_offer(mp_shared_slot *slot, void *object) {
    mp_shared_lock(slot);
    if (!slot->object)
        slot->object = object;
    slot->users++;
    object = slot->object;
    mp_shared_unlock(slot);
    return object;
}
/* Returns true if that was the last user; the slot is empty then. */
static inline bool mp_shared_drop(mp_shared_slot *slot) {
    mp_shared_lock(slot);
    bool last = --slot->users == 0;
    if (last)
        slot->object = NULL;
    mp_shared_unlock(slot);
    return last;
}

#endif
