/* bell.h: how a worker waits for work. It spins for a while, because waking a parked thread costs 20 to 46 us, then
 * parks. The state it waits for is guarded by the owner's lock, which wait and ring are called with. */
#ifndef MP_REGISTRY_POOL_BELL_H
#define MP_REGISTRY_POOL_BELL_H

#include "base/sys.h"

typedef struct mp_bell {
    _Atomic uint32_t rings; /* written under the owner's lock, watched without it */
    int parked;             /* guarded by: the owner's lock */
    mp_cond cond;
} mp_bell;

/* Who says whether a thread may burn CPU while it waits. begin asks for it, may_spin is asked again every few hundred
 * nanoseconds, end gives it back (after a begin that was granted). */
typedef struct mp_spin_rule {
    bool (*begin)(void *arg);
    bool (*may_spin)(void *arg);
    void (*end)(void *arg);
    void *arg;
    uint64_t spin_ns; /* for how long at most; 0 = never */
} mp_spin_rule;

void mp_bell_init(mp_bell *bell);
void mp_bell_deinit(mp_bell *bell);
/* Under the lock. True: call mp_bell_wake after the lock has been released (a thread woken earlier would only run into
 * the lock). */
bool mp_bell_ring(mp_bell *bell);
void mp_bell_wake(mp_bell *bell);
/* Under the lock, which is given up meanwhile. Returns after a ring, at the deadline (0 = none), or for no reason. */
void mp_bell_wait(mp_bell *bell, mp_mutex *lock, const mp_spin_rule *rule, uint64_t deadline_ns);
/* Spin until done(arg). False when time or permission ran out. The caller holds no lock. */
bool mp_spin_until(bool (*done)(void *arg), void *arg, const mp_spin_rule *rule);

#endif
