/* improve.c: lets the engines of idle workers do optional work, such as packing weights. See `improve` of
 * mp_engine_ops. A worker does it in slices, so that a request that arrives meanwhile waits for at most one. */
#include <stdatomic.h>

#include "base/intervals.h"
#include "registry/entry.h"

uint64_t mp_worker_next_improve_ns(mp_worker *w) {
    mp_assert_held(&w->entry->lock);
    mp_services *services = w->entry->services;
    if (!w->engine->ops->improve || w->improve_ns == MP_FOREVER || w->memory == MP_MEMORY_ASKED)
        return 0;
    const uint64_t now_ns = mp_sys_now_ns();
    if (!w->improve_ns) {
        const bool any = w->engine->ops->improve(w->engine, NULL);
        w->improve_ns = any ? now_ns + MP_IMPROVE_FIRST_NS : MP_FOREVER;
        return any ? w->improve_ns : 0;
    }
    if (now_ns >= w->improve_ns &&
        (w->entry->queue.count > 0 || mp_governor_pressure(services->governor) >= MP_PRESSURE_HIGH ||
         mp_cpu_allocator_busy(services->allocator_pinned)))
        w->improve_ns = now_ns + MP_IMPROVE_AGAIN_NS;
    return w->improve_ns;
}

/* Takes a CPU, if one is free and no request has come. */
static bool improve_begin(mp_worker *w) {
    mp_worker_set_runnable(w, true);
    const bool leased = mp_worker_lease(w, 1);
    const uint64_t now_ns = mp_sys_now_ns();
    if (!leased)
        w->improve_ns = now_ns + MP_IMPROVE_AGAIN_NS;
    mp_mutex_lock(&w->entry->lock);
    if (leased && !w->woken && w->state != MP_WORKER_DEAD) {
        w->in_step = true; /* the sweep watches it like a step: the engine may read a disk */
        atomic_store_explicit(&w->lease.heartbeat, now_ns, memory_order_relaxed);
        mp_watch_reset(&w->watch, now_ns);
        atomic_store_explicit(&w->step_cancelled, 0, memory_order_release);
    }
    const bool begins = w->in_step;
    mp_mutex_unlock(&w->entry->lock);
    if (leased && !begins)
        mp_worker_return_threads(w);
    return begins;
}

bool mp_worker_improve(mp_worker *w) {
    mp_assert_not_held(&w->entry->lock);
    mp_entry *entry = w->entry;
    mp_services *services = entry->services;
    if (improve_begin(w)) {
        mp_maintenance_at(&services->maintenance, services->pool, mp_sys_after(mp_sys_now_ns(),
                                                                               services->stall_timeout_ns / 4));
        if (!w->engine->ops->improve(w->engine, &w->lease))
            w->improve_ns = MP_FOREVER;
        mp_worker_return_threads(w);
    }
    const uint64_t held = mp_worker_bytes(w);
    mp_mutex_lock(&entry->lock);
    const bool dead = w->state == MP_WORKER_DEAD;
    mp_worker_set_bytes(w, held);
    w->in_step = w->moving = false;
    mp_mutex_unlock(&entry->lock);
    if (!dead)
        mp_worker_set_runnable(w, false);
    return !dead;
}
