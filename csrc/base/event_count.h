/* event_count.h: wait for an event by spinning, then parking.
 *
 * An event count is a counter that threads wait on. A waiter reads the count, looks at its own condition and, if there
 * is nothing to do, waits until the count differs from the value it read. A notifier changes the condition and then
 * advances the count. No wake-up is lost: the waiter announces that it parks and then compares the count again (in the
 * kernel), the notifier advances the count and then looks for parked threads, and all four are sequentially consistent.
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

/* A policy about spinning: a thread spins only with permission and gives it back afterwards. */
typedef struct mp_spin_rule {
    bool (*begin)(void *arg);    /* ask for permission */
    bool (*may_spin)(void *arg); /* ask again, about once per microsecond */
    void (*end)(void *arg);      /* give granted permission back */
    void *arg;
    uint64_t spin_ns; /* longest time; 0 = never spin */
} mp_spin_rule;

enum { MP_SPIN_CHECKS = 32 }; /* checks between two reads of the clock */

/* Spin until done(done_arg), for at most spin_ns and while may_spin(may_arg) (NULL: always). Checks at least once.
 * Returns the last result of done. Inlined, so that a barrier pays no calls. */
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

/* Spin until done(arg), as the rule permits. Returns false when time or permission ran out. Hold no lock. */
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
/* Park until the count is not `seen`. */
void mp_event_count_park(mp_event_count *self, uint32_t seen);
/* Wait for the next notify: spin as the rule permits (NULL: not at all), then park. Must hold `lock`, which is released
 * meanwhile, and under which every notifier of this event count calls mp_event_count_notify. May return at the deadline
 * (0 = none), or spuriously. */
void mp_event_count_wait(mp_event_count *self, mp_mutex *lock, const mp_spin_rule *rule, uint64_t deadline_ns);

/* The same for an event count in memory that processes share (base/shared_memory.h). mp_event_count_park_shared waits
 * once, at most timeout_ns, and may return spuriously: the other process may be dead or hostile. */
static inline void mp_event_count_notify_shared(mp_event_count *self) {
    atomic_fetch_add_explicit(&self->count, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&self->sleepers, memory_order_seq_cst))
        mp_shm_wake(&self->count);
}
void mp_event_count_park_shared(mp_event_count *self, uint32_t seen, uint64_t timeout_ns);

#endif
