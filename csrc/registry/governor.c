/* governor.c: see governor.h.
 *
 * NOTE: what comes next lives here: pressure levels, eviction of the coldest idle model before a load is refused, and
 * guards that pass a reservation on to a second worker. */
#include "registry/governor.h"

#include <assert.h>
#include <stdatomic.h>

#include "base/cpu.h"
#include "base/options.h"
#include "base/trace.h"
#include "registry/shared.h"

enum { LOOK_NS = 20 * 1000 * 1000 };
static const uint64_t RESERVE_MOST = 2048ull << 20;

struct mp_governor {
    mp_budget budget;
    bool process_wide;
    bool fixed;    /* the limit was asked for: never raised */
    uint64_t most; /* what the limit may be raised to */
    mp_mutex lock;
    mp_cond changed;
    /* guarded by: lock */
    uint64_t reserved;
    int loads; /* reservations that are held */
    bool forking;
};

static mp_shared_slot process_governor;

static void destroy(mp_governor *governor) {
    mp_cond_deinit(&governor->changed);
    mp_mutex_deinit(&governor->lock);
    mp_free(governor);
}

mp_status mp_governor_open(uint64_t limit, mp_governor **governor_out, mp_error *error) {
    *governor_out = NULL;
    if (limit == 0 && (*governor_out = mp_shared_take(&process_governor)))
        return MP_OK;
    mp_governor *governor = mp_alloc_zeroed(sizeof(*governor), MP_TAG_POOL);
    if (!governor)
        return mp_fail_memory(error, sizeof(*governor), "the memory governor");
    governor->process_wide = limit == 0;
    uint64_t asked = limit ? limit : (uint64_t)mp_options_get()->memory_mb << 20;
    uint64_t offered = mp_cpu_memory_bytes(), reserve = offered / 4 < RESERVE_MOST ? offered / 4 : RESERVE_MOST;
    governor->fixed = asked != 0;
    governor->most = offered - reserve;
    atomic_init(&governor->budget.limit, asked ? asked : governor->most / 5 * 4);
    mp_mutex_init(&governor->lock);
    mp_cond_init(&governor->changed);
    *governor_out = governor->process_wide ? mp_shared_offer(&process_governor, governor) : governor;
    if (*governor_out != governor)
        destroy(governor);
    return MP_OK;
}

void mp_governor_close(mp_governor *governor) {
    if (governor && (!governor->process_wide || mp_shared_drop(&process_governor)))
        destroy(governor);
}

mp_budget *mp_governor_budget(mp_governor *governor) { return &governor->budget; }

/* Under the lock: one model alone may have more than the rule gives, if the machine has it. */
static bool raise_limit(mp_governor *governor, const char *key, uint64_t bytes) {
    uint64_t limit = atomic_load(&governor->budget.limit), used = atomic_load(&governor->budget.used);
    /* Calls that wait for this model are charged already; anything more is another model. */
    bool alone = governor->loads == 0 && used <= limit / 8;
    if (governor->fixed || !alone || bytes > governor->most - used)
        return false;
    atomic_store(&governor->budget.limit, bytes + used);
    mp_log(MP_LOG_WARNING, "Memory limit raised from %.0f to %.0f MB: %s alone needs that much", (double)limit / 1e6,
           (double)(bytes + used) / 1e6, key);
    return true;
}

mp_status mp_governor_reserve(mp_governor *governor, const char *key, uint64_t bytes, bool (*give_up)(void *arg),
                              void *arg, mp_error *error) {
    mp_mutex_lock(&governor->lock);
    for (;;) {
        uint64_t limit = atomic_load(&governor->budget.limit), used = atomic_load(&governor->budget.used);
        uint64_t left = used < limit ? limit - used : 0;
        uint64_t beside_loads = governor->reserved < left ? left - governor->reserved : 0;
        if (bytes <= beside_loads || (bytes > left && raise_limit(governor, key, bytes)))
            break;
        if (bytes > left) {
            mp_mutex_unlock(&governor->lock);
            return mp_fail(error, MP_MEMORY_EXHAUSTED, "%s needs %.1f MB, %.1f MB of %.1f MB are free", key,
                           (double)bytes / 1e6, (double)left / 1e6, (double)limit / 1e6);
        }
        /* A load ends whatever happens, so this wait does too. */
        mp_cond_wait(&governor->changed, &governor->lock, mp_sys_now_ns() + LOOK_NS);
        mp_mutex_unlock(&governor->lock);
        if (give_up && give_up(arg))
            return mp_fail(error, MP_CANCELLED, "%s: loading was called off while it waited for memory", key);
        mp_mutex_lock(&governor->lock);
    }
    governor->reserved += bytes;
    governor->loads++;
    mp_mutex_unlock(&governor->lock);
    return MP_OK;
}

void mp_governor_unreserve(mp_governor *governor, uint64_t bytes) {
    mp_mutex_lock(&governor->lock);
    assert(governor->reserved >= bytes && governor->loads > 0);
    governor->reserved -= bytes;
    governor->loads--;
    mp_cond_broadcast(&governor->changed);
    mp_mutex_unlock(&governor->lock);
}

void mp_governor_fork_before(mp_governor *governor) {
    if (governor->forking)
        return;
    mp_mutex_lock(&governor->lock);
    governor->forking = true;
}

void mp_governor_fork_parent(mp_governor *governor) {
    if (!governor->forking)
        return;
    governor->forking = false;
    mp_mutex_unlock(&governor->lock);
}

void mp_governor_fork_child(mp_governor *governor) {
    if (!governor->forking)
        return;
    governor->forking = false;
    mp_mutex_init(&governor->lock);
    mp_cond_init(&governor->changed);
    governor->reserved = 0; /* the loads are the parent's; what they had charged stays charged, as it stays allocated */
    governor->loads = 0;
}
