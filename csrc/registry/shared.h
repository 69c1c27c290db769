/* shared.h: one object for the whole process, made by the first who asks and freed by the last who lets go.
 *
 * A forking thread holds the lock of each slot (fork.c), so the child finds it whole. The users are registries, and the
 * child has them too; only one that another thread was just making, or letting go of, counts as a user there for ever:
 * then the object stays until the child ends. */
#ifndef MP_REGISTRY_SHARED_H
#define MP_REGISTRY_SHARED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/cpu.h"

typedef struct mp_shared_slot {
    _Atomic int busy; /* a lock that needs no initialising; held only to look at the pointer and the count */
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

/* Become a user of what is there, or NULL. */
static inline void *mp_shared_take(mp_shared_slot *slot) {
    mp_shared_lock(slot);
    void *object = slot->object;
    if (object)
        slot->users++;
    mp_shared_unlock(slot);
    return object;
}
/* Offer an object that was just made. Returns what is in the slot afterwards, as one more user of it: another thread
 * may have been quicker, then the caller frees its own. */
static inline void *mp_shared_offer(mp_shared_slot *slot, void *object) {
    mp_shared_lock(slot);
    if (!slot->object)
        slot->object = object;
    slot->users++;
    object = slot->object;
    mp_shared_unlock(slot);
    return object;
}
/* True: that was the last user and the slot is empty. */
static inline bool mp_shared_drop(mp_shared_slot *slot) {
    mp_shared_lock(slot);
    bool last = --slot->users == 0;
    if (last)
        slot->object = NULL;
    mp_shared_unlock(slot);
    return last;
}

#endif
