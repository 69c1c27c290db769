/* maintenance.c: the maintenance thread of a registry. See maintenance.h. */
#include "registry/maintenance.h"

#include <stdatomic.h>

#include "base/trace.h"

static const uint64_t NEVER = UINT64_MAX;
/* The thread goes on ticking for a while: starting again wakes it, which costs the request that needs it 5 us. */
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

/* Must hold the lock. Advances the clock of requests. Returns the time of the next tick; NEVER: none is needed. */
static uint64_t tick(mp_maintenance *self, uint64_t now) {
    uint64_t last = atomic_load_explicit(&self->tick_ns, memory_order_relaxed);
    bool needed = atomic_load_explicit(&self->timed, memory_order_seq_cst) > 0;
    if (last && now > last + MP_PAUSE_NS) {
        atomic_fetch_add_explicit(&self->paused_ns, now - last - MP_PAUSE_NS, memory_order_relaxed);
        mp_log(MP_LOG_WARNING, "The process did not run for %.1f s; deadlines of requests move by this time",
               (double)(now - last) * 1e-9);
    }
    if (last && now < last + MP_TICK_NS)
        return last + MP_TICK_NS;
    self->unneeded = needed ? 0 : self->unneeded + 1;
    bool on = needed || (last && self->unneeded < UNNEEDED_TICKS);
    atomic_store_explicit(&self->tick_ns, on ? now : 0, memory_order_seq_cst);
    return on ? now + MP_TICK_NS : NEVER;
}

static void watch(void *arg) {
    mp_maintenance *self = arg;
    mp_mutex_lock(&self->lock);
    while (!self->quit) {
        uint64_t next = atomic_load_explicit(&self->next_ns, memory_order_relaxed), now = mp_sys_now_ns();
        uint64_t ticks = tick(self, now);
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
    atomic_store_explicit(&self->tick_ns, 0, memory_order_relaxed);
    mp_cond_broadcast(&self->changed);
    mp_mutex_unlock(&self->lock);
}

void mp_maintenance_begin_timed(mp_maintenance *maintenance) {
    /* Both operations are seq_cst: either the thread sees this request, or this thread sees that it stopped ticking. */
    atomic_fetch_add_explicit(&maintenance->timed, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&maintenance->tick_ns, memory_order_seq_cst))
        return;
    mp_mutex_lock(&maintenance->lock);
    if (maintenance->running && !atomic_load_explicit(&maintenance->tick_ns, memory_order_relaxed)) {
        maintenance->unneeded = 0;
        atomic_store_explicit(&maintenance->tick_ns, mp_sys_now_ns(), memory_order_seq_cst);
        mp_cond_broadcast(&maintenance->changed);
    }
    mp_mutex_unlock(&maintenance->lock);
}

void mp_maintenance_end_timed(mp_maintenance *maintenance) {
    atomic_fetch_sub_explicit(&maintenance->timed, 1, memory_order_relaxed);
}

void mp_maintenance_at(mp_maintenance *maintenance, mp_pool *pool, uint64_t when_ns) {
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
    if (mp_pool_run(pool, (mp_job){watch, maintenance}, &error) == MP_OK)
        return;
    /* Without this thread, workers still check the deadlines of active requests between steps. */
    mp_mutex_lock(&maintenance->lock);
    if (!maintenance->refused)
        mp_log(MP_LOG_WARNING,
               "The maintenance thread failed to start, deadlines of queued requests are checked late: %s",
               error.message);
    maintenance->running = false;
    atomic_store_explicit(&maintenance->tick_ns, 0, memory_order_relaxed);
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
    atomic_store_explicit(&maintenance->tick_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&maintenance->timed, 0, memory_order_relaxed); /* the requests belong to the parent */
}
