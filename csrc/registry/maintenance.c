/* maintenance.c: the maintenance thread of a registry. See maintenance.h. */
#include "registry/maintenance.h"

#include <stdatomic.h>

#include "base/trace.h"

static const uint64_t NEVER = UINT64_MAX;

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

static void watch(void *arg) {
    mp_maintenance *self = arg;
    mp_mutex_lock(&self->lock);
    while (!self->quit) {
        uint64_t next = atomic_load_explicit(&self->next_ns, memory_order_relaxed), now = mp_sys_now_ns();
        if (now < next) {
            mp_cond_wait(&self->changed, &self->lock, next == NEVER ? 0 : next);
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
    mp_cond_broadcast(&self->changed);
    mp_mutex_unlock(&self->lock);
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
    maintenance->refused = true; /* logged once; the next announcement tries again */
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
}
