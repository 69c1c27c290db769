/* bell.c: see bell.h. */
#include "registry/pool/bell.h"

#include <stdatomic.h>

#include "base/cpu.h"

enum { RELAXES_BETWEEN_LOOKS = 16 };

void mp_bell_init(mp_bell *bell) {
    atomic_init(&bell->rings, 0);
    bell->parked = 0;
    mp_cond_init(&bell->cond);
}

void mp_bell_deinit(mp_bell *bell) { mp_cond_deinit(&bell->cond); }

bool mp_bell_ring(mp_bell *bell) {
    atomic_fetch_add_explicit(&bell->rings, 1, memory_order_release);
    return bell->parked > 0;
}

void mp_bell_wake(mp_bell *bell) { mp_cond_broadcast(&bell->cond); }

bool mp_spin_until(bool (*done)(void *arg), void *arg, const mp_spin_rule *rule) {
    if (!rule->spin_ns || !rule->begin(rule->arg))
        return done(arg);
    bool is_done = false;
    uint64_t end = mp_sys_now_ns() + rule->spin_ns;
    do {
        for (int i = 0; i < RELAXES_BETWEEN_LOOKS && !is_done; i++) {
            mp_cpu_relax();
            is_done = done(arg);
        }
    } while (!is_done && mp_sys_now_ns() < end && rule->may_spin(rule->arg));
    rule->end(rule->arg);
    return is_done;
}

typedef struct ring_watch {
    const _Atomic uint32_t *rings;
    uint32_t seen;
} ring_watch;

static bool has_rung(void *arg) {
    const ring_watch *watch = arg;
    return atomic_load_explicit(watch->rings, memory_order_acquire) != watch->seen;
}

void mp_bell_wait(mp_bell *bell, mp_mutex *lock, const mp_spin_rule *rule, uint64_t deadline_ns) {
    ring_watch watch = {&bell->rings, atomic_load_explicit(&bell->rings, memory_order_relaxed)};
    if (rule && rule->spin_ns) {
        mp_mutex_unlock(lock);
        mp_spin_until(has_rung, &watch, rule);
        mp_mutex_lock(lock);
        if (has_rung(&watch))
            return;
    }
    bell->parked++;
    mp_cond_wait(&bell->cond, lock, deadline_ns);
    bell->parked--;
}
