/* maintenance.c: the maintenance thread of a registry. See maintenance.h. */
#include "registry/maintenance.h"

#include <stdatomic.h>

#include "base/log.h"

static const uint64_t NEVER = UINT64_MAX;
/* Ticks for which the thread continues after the last request with a limit. To start again, a request must wake the
 * thread, which costs that request 5 us. */
enum { UNNEEDED_TICKS = 8 };

void mp_maintenance_init(mp_maintenance *maintenance, uint64_t (*sweep)(void *arg, uint64_t now_ns), void *arg) {
    maintenance->sweep = sweep;
    maintenance->arg = arg;
    atomic_init(&maintenance->next_ns, NEVER);
    mp_mutex_init(&maintenance->lock);
    mp_cond_init(&maintenance->changed);
}

void mp_maintenance_deinit(mp_maintenance *maintenance) {
    mp_cond_deinit(&maintenance->changed);
    mp_mutex_deinit(&maintenance->lock);
}

/* --- the clock of requests --- */

static uint64_t tick_of(const mp_maintenance *self) {
    uint64_t count = atomic_load_explicit(&self->count, memory_order_seq_cst);
    return atomic_load_explicit(&self->beats[count & 1].tick_ns, memory_order_relaxed);
}

/* Must hold the lock. Publishes a beat. */
static void set_beat(mp_maintenance *self, uint64_t tick_ns, uint64_t more_paused_ns) {
    mp_assert_held(&self->lock);
    uint64_t count = atomic_load_explicit(&self->count, memory_order_relaxed);
    const struct mp_beat *last = &self->beats[count & 1];
    struct mp_beat *next = &self->beats[(count + 1) & 1];
    uint64_t paused = atomic_load_explicit(&last->paused_ns, memory_order_relaxed) + more_paused_ns;
    /* Release: a reader that sees a value of this beat also sees that the one before was published, and reads again. */
    atomic_store_explicit(&next->tick_ns, tick_ns, memory_order_release);
    atomic_store_explicit(&next->paused_ns, paused, memory_order_release);
    atomic_store_explicit(&self->count, count + 1, memory_order_seq_cst);
}

/* Returns how much of the time since the last tick is a pause. */
static uint64_t pause_until(const mp_maintenance *self, uint64_t now) {
    uint64_t last = tick_of(self);
    return last && now > last + MP_PAUSE_NS ? now - last - MP_PAUSE_NS : 0;
}

static bool is_needed(const mp_maintenance *self) {
    return atomic_load_explicit(&self->timed, memory_order_seq_cst) > 0;
}

/* Must hold the lock. Advances the clock of requests. Returns the time of the next tick; NEVER: none is needed. */
static uint64_t maintenance_tick(mp_maintenance *self, uint64_t now) {
    mp_assert_held(&self->lock);
    uint64_t last = tick_of(self);
    if (last && now < last + MP_TICK_NS)
        return last + MP_TICK_NS;
    uint64_t pause = pause_until(self, now);
    if (pause)
        mp_log(MP_LOG_WARNING, "The process did not run for %.1f s; deadlines of requests are extended by this time",
               (double)(now - last) * 1e-9);
    self->unneeded = is_needed(self) ? 0 : self->unneeded + 1;
    bool on = self->unneeded == 0 || (last && self->unneeded < UNNEEDED_TICKS);
    set_beat(self, on ? now : 0, pause);
    if (!on && is_needed(self)) { /* a new request has seen the last tick, and did not restart the clock */
        self->unneeded = 0;
        set_beat(self, now, 0);
        on = true;
    }
    return on ? now + MP_TICK_NS : NEVER;
}

void mp_maintenance_tick(mp_maintenance *maintenance) {
    mp_mutex_lock(&maintenance->lock);
    uint64_t last = tick_of(maintenance), now = mp_sys_now_ns();
    if (last && now > last + MP_OVERDUE_NS) /* no other thread ticked meanwhile */
        maintenance_tick(maintenance, now);
    mp_mutex_unlock(&maintenance->lock);
}

/* --- the thread --- */

static void maintenance_watch(void *arg) {
    mp_maintenance *self = arg;
    mp_mutex_lock(&self->lock);
    while (!self->quit) {
        uint64_t next = atomic_load_explicit(&self->next_ns, memory_order_relaxed), now = mp_sys_now_ns();
        uint64_t ticks = maintenance_tick(self, now);
        if (now < next) {
            uint64_t wake = next < ticks ? next : ticks;
            mp_cond_wait(&self->changed, &self->lock, wake == NEVER ? 0 : wake);
            continue;
        }
        atomic_store_explicit(&self->next_ns, NEVER, memory_order_seq_cst);
        mp_mutex_unlock(&self->lock);
        uint64_t again = self->sweep(self->arg, now);
        mp_mutex_lock(&self->lock);
        if (again < atomic_load_explicit(&self->next_ns, memory_order_relaxed))
            atomic_store_explicit(&self->next_ns, again, memory_order_seq_cst);
    }
    self->running = false;
    set_beat(self, 0, pause_until(self, mp_sys_now_ns()));
    mp_cond_broadcast(&self->changed);
    mp_mutex_unlock(&self->lock);
}

void mp_maintenance_begin_timed(mp_maintenance *maintenance) {
    /* Both operations are seq_cst: either the thread sees this request, or this thread sees that it stopped ticking. */
    atomic_fetch_add_explicit(&maintenance->timed, 1, memory_order_seq_cst);
    if (tick_of(maintenance))
        return;
    mp_mutex_lock(&maintenance->lock);
    if (maintenance->running && !tick_of(maintenance)) {
        maintenance->unneeded = 0;
        set_beat(maintenance, mp_sys_now_ns(), 0);
        mp_cond_broadcast(&maintenance->changed);
    }
    mp_mutex_unlock(&maintenance->lock);
}

void mp_maintenance_end_timed(mp_maintenance *maintenance) {
    atomic_fetch_sub_explicit(&maintenance->timed, 1, memory_order_relaxed);
}

void mp_maintenance_at(mp_maintenance *maintenance, mp_pool *pool, uint64_t when_ns) {
    mp_assert_not_held(&maintenance->lock);
    /* The common case takes no lock. No announcement is lost: the caller has published its request under an entry's
     * lock before this call, and the thread raises next_ns before its sweep checks every entry. */
    if (atomic_load_explicit(&maintenance->next_ns, memory_order_seq_cst) <= when_ns)
        return;
    bool start = false;
    mp_mutex_lock(&maintenance->lock);
    if (when_ns < atomic_load_explicit(&maintenance->next_ns, memory_order_relaxed)) {
        atomic_store_explicit(&maintenance->next_ns, when_ns, memory_order_seq_cst);
        start = !maintenance->running && !maintenance->quit;
        if (start)
            maintenance->running = true;
        else if (maintenance->running)
            mp_cond_broadcast(&maintenance->changed);
    }
    mp_mutex_unlock(&maintenance->lock);
    if (!start)
        return;
    mp_error error;
    if (mp_pool_run(pool, (mp_job){maintenance_watch, maintenance}, &error) == MP_OK)
        return;
    /* Without this thread, workers still check the deadlines of active requests between steps. */
    mp_mutex_lock(&maintenance->lock);
    if (!maintenance->refused)
        mp_log(MP_LOG_WARNING,
               "The maintenance thread failed to start, deadlines of queued requests are checked late: %s",
               error.message);
    maintenance->running = false;
    set_beat(maintenance, 0, 0);
    maintenance->refused = true; /* log the failure once; the next announced deadline tries to start the thread again */
    atomic_store_explicit(&maintenance->next_ns, NEVER, memory_order_seq_cst);
    mp_cond_broadcast(&maintenance->changed);
    mp_mutex_unlock(&maintenance->lock);
}

void mp_maintenance_stop(mp_maintenance *maintenance) {
    mp_mutex_lock(&maintenance->lock);
    maintenance->quit = true;
    mp_cond_broadcast(&maintenance->changed);
    while (maintenance->running)
        mp_cond_wait(&maintenance->changed, &maintenance->lock, 0);
    mp_mutex_unlock(&maintenance->lock);
}

void mp_maintenance_fork_before(mp_maintenance *maintenance) { mp_mutex_lock(&maintenance->lock); }

void mp_maintenance_fork_parent(mp_maintenance *maintenance) { mp_mutex_unlock(&maintenance->lock); }

void mp_maintenance_fork_child(mp_maintenance *maintenance) {
    mp_mutex_init(&maintenance->lock);
    mp_cond_init(&maintenance->changed);
    maintenance->running = maintenance->refused = false;
    atomic_store_explicit(&maintenance->next_ns, NEVER, memory_order_relaxed);
    mp_mutex_lock(&maintenance->lock);
    set_beat(maintenance, 0, 0);
    mp_mutex_unlock(&maintenance->lock);
    atomic_store_explicit(&maintenance->timed, 0, memory_order_relaxed); /* the requests belong to the parent */
}
