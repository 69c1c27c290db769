/* shortage.c: how a worker makes memory for a request that found none. See entry.h. serve.c decides in which order. */
#include <stdatomic.h>

#include "base/intervals.h"
#include "registry/entry.h"

bool mp_worker_trim(mp_worker *w) {
    mp_assert_not_held(&w->entry->lock);
    mp_mutex_lock(&w->entry->lock);
    bool trimmed = w->memory == MP_MEMORY_TRIMMED;
    w->memory = MP_MEMORY_TRIMMED;
    mp_mutex_unlock(&w->entry->lock);
    return !trimmed && w->engine->ops->trim(w->engine) > 0;
}

bool mp_worker_reclaim(mp_worker *w) {
    mp_governor *governor = w->entry->services->governor;
    uint64_t limit = atomic_load_explicit(&mp_governor_budget(governor)->limit, memory_order_relaxed);
    return mp_governor_reclaim(governor, limit / 16, false) > 0 || mp_governor_may_gain(governor, w->entry) ||
           mp_budget_gained(&w->entry->account); /* last: what the others have freed by now, they do not hold */
}

void mp_worker_block_admission(mp_worker *w, bool again) {
    mp_assert_held(&w->entry->lock);
    w->memory = MP_MEMORY_TIGHT; /* it was trimmed: two workers that pass a request on ask each other no further time */
    w->retry_ns = again ? mp_sys_now_ns() + MP_POLL_NS : 0;
    mp_dispatch_wake_all(w->entry); /* another may take requests that are assigned to this one */
}

bool mp_worker_drop_outputs(mp_worker *w) {
    if (!mp_entry_drop_outputs(w->entry))
        return false;
    mp_mutex_lock(&w->entry->lock);
    mp_worker_block_admission(w, false);
    mp_mutex_unlock(&w->entry->lock);
    return true;
}

bool mp_worker_yield(mp_worker *w, mp_ticket *ticket) {
    mp_assert_held(&w->entry->lock);
    if (!mp_dispatch_yield(ticket))
        return false;
    w->memory = MP_MEMORY_TRIMMED; /* not TIGHT: the others may be admitted */
    return true;
}
