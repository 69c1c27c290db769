/* event_count.h: wait for an event by spinning, then parking.
 *
 * An event count is a counter that threads wait on. A waiter reads the count, checks its own condition and, if there is
 * nothing to do, waits until the count differs from the value it read. A notifier changes the condition and then
 * advances the count. No wake-up is lost: the waiter increments `sleepers` and then compares the count again (in the
 * kernel); the notifier advances the count and then reads `sleepers`. All four steps are sequentially consistent, so
 * the waiter sees the new count or the notifier sees the waiter.
 *
 *   waiter:   seen = read;  if (!condition) wait(seen)        notifier:   condition = true;  notify
 *
 * Waking a parked thread takes 20 to 46 us, so a thread that expects work soon spins first. */
#ifndef MP_BASE_EVENT_COUNT_H
#define MP_BASE_EVENT_COUNT_H

#include <stdatomic.h>

#include "base/cpu.h"
#include "base/shared_memory.h"
#include "base/sys.h"

typedef struct mp_event_count { /* zeroed: ready for use */
    _Atomic uint32_t count;    /* events so far */
    _Atomic uint32_t sleepers; /* threads that are parked or about to park */
} mp_event_count;

/* Spin policy. A thread spins only if `begin` returns true, and must then call `end` after it has spun. */
typedef struct mp_spin_rule {
    bool (*begin)(void *arg);    /* acquire the permission to spin; false: do not spin */
    bool (*may_spin)(void *arg); /* polled about once per microsecond; false: stop */
    void (*end)(void *arg);      /* release the permission */
    void *arg;
    uint64_t spin_ns; /* longest spin; 0 = never spin */
} mp_spin_rule;

enum { MP_SPIN_CHECKS = 32 }; /* calls of `done` between two reads of the clock */

/* Spin until done(done_arg), for at most spin_ns and while may_spin(may_arg) (NULL: always). Calls `done` at least once
 * and returns its last result. Always inlined, together with `done`, so that a barrier spins without function calls. */
static inline __attribute__((always_inline)) bool mp_spin(bool (*done)(void *arg), void *done_arg, uint64_t spin_ns,
                                                          bool (*may_spin)(void *arg), void *may_arg) {
    uint64_t start_ns = 0;
    for (;;) {
        for (int i = 0; i < MP_SPIN_CHECKS; i++) {
            if (done(done_arg))
                return true;
            if (spin_ns == 0)
                return false;
            mp_cpu_relax();
        }
        if (may_spin && !may_spin(may_arg))
            return false;
        uint64_t now_ns = mp_sys_now_ns();
        if (!start_ns)
            start_ns = now_ns;
        if (now_ns - start_ns >= spin_ns)
            return false;
    }
}

/* Spin until done(arg) while `rule` permits spinning. Returns false if the time of the rule ended, or if the rule
 * withdrew its permission. Hold no lock. */
bool mp_spin_until(bool (*done)(void *arg), void *arg, const mp_spin_rule *rule);

static inline uint32_t mp_event_count_read(const mp_event_count *self) {
    return atomic_load_explicit(&self->count, memory_order_seq_cst);
}

/* Advance the count and wake every parked thread. Thread-safe. */
static inline void mp_event_count_notify(mp_event_count *self) {
    atomic_fetch_add_explicit(&self->count, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&self->sleepers, memory_order_seq_cst))
        mp_unpark_all(&self->count);
}
/* Park until the count differs from `seen`. */
void mp_event_count_park(mp_event_count *self, uint32_t seen);
/* Wait for the next notify: spin as `rule` permits (NULL: do not spin), then park. Must hold `lock`, which is released
 * during the wait and locked again before the return. Every notifier of this event count must hold `lock` too. May
 * return spuriously. Returns at the deadline (0 = none), or up to rule->spin_ns after it: a spin does not check it. */
void mp_event_count_wait(mp_event_count *self, mp_mutex *lock, const mp_spin_rule *rule, uint64_t deadline_ns);

/* Notify and park on an event count in memory that processes share (base/shared_memory.h). mp_event_count_park_shared
 * waits once, at most timeout_ns, and may return spuriously: the other process may be dead or hostile. */
static inline void mp_event_count_notify_shared(mp_event_count *self) {
    atomic_fetch_add_explicit(&self->count, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&self->sleepers, memory_order_seq_cst))
        mp_shm_wake(&self->count);
}
void mp_event_count_park_shared(mp_event_count *self, uint32_t seen, uint64_t timeout_ns);

#endif
