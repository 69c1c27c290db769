/* event_count.c: see event_count.h. */
#include "base/event_count.h"

bool mp_spin_until(bool (*done)(void *arg), void *arg, const mp_spin_rule *rule) {
    if (!rule->spin_ns || !rule->begin(rule->arg))
        return done(arg);
    bool is_done = mp_spin(done, arg, rule->spin_ns, rule->may_spin, rule->arg);
    rule->end(rule->arg);
    return is_done;
}

void mp_event_count_park(mp_event_count *self, uint32_t seen) {
    atomic_fetch_add_explicit(&self->sleepers, 1, memory_order_seq_cst);
    while (atomic_load_explicit(&self->count, memory_order_seq_cst) == seen)
        mp_park(&self->count, seen, 0);
    atomic_fetch_sub_explicit(&self->sleepers, 1, memory_order_relaxed);
}

void mp_event_count_park_shared(mp_event_count *self, uint32_t seen, uint64_t timeout_ns) {
    atomic_fetch_add_explicit(&self->sleepers, 1, memory_order_seq_cst);
    mp_shm_park(&self->count, seen, timeout_ns);
    atomic_fetch_sub_explicit(&self->sleepers, 1, memory_order_relaxed);
}

typedef struct count_watch {
    const mp_event_count *self;
    uint32_t seen;
} count_watch;

static bool has_advanced(void *arg) {
    const count_watch *watch = arg;
    return atomic_load_explicit(&watch->self->count, memory_order_acquire) != watch->seen;
}

/* Park once, until notified or until the deadline (0 = none). May return spuriously. */
static void park_until(mp_event_count *self, uint32_t seen, uint64_t deadline_ns) {
    uint64_t now_ns = deadline_ns ? mp_sys_now_ns() : 0;
    if (deadline_ns && now_ns >= deadline_ns)
        return;
    atomic_fetch_add_explicit(&self->sleepers, 1, memory_order_seq_cst);
    mp_park(&self->count, seen, deadline_ns ? deadline_ns - now_ns : 0);
    atomic_fetch_sub_explicit(&self->sleepers, 1, memory_order_relaxed);
}

void mp_event_count_wait(mp_event_count *self, mp_mutex *lock, const mp_spin_rule *rule, uint64_t deadline_ns) {
    count_watch watch = {self, atomic_load_explicit(&self->count, memory_order_relaxed)};
    mp_mutex_unlock(lock);
    if (!rule || !rule->spin_ns || !mp_spin_until(has_advanced, &watch, rule))
        park_until(self, watch.seen, deadline_ns);
    mp_mutex_lock(lock);
}
