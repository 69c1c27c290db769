/* governor.c: the memory budget of the process. See governor.h. */
#include "registry/governor.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/cpu.h"
#include "base/intervals.h"
#include "base/log.h"
#include "base/options.h"

static const uint64_t RESERVE_MAX = 2048ull << 20;

typedef struct turn {
    struct turn *next;
} turn;

struct mp_governor {
    mp_budget budget;
    bool process_wide;
    bool fixed;    /* the limit was configured: never raise it */
    uint64_t most; /* upper bound for raising the limit */
    mp_mutex lock;
    mp_cond changed;   /* signals that memory may be free */
    mp_cond no_caller; /* signals that no thread is inside a reclaimer */
    /* guarded by: lock */
    int loads; /* guards that hold bytes */
    struct turn *turns, **turns_end; /* callers that wait for memory, the first to be served first */
    bool stuck; /* the first of them waits for loads or requests to end, not only for idle models to be freed */
    mp_reclaimer *reclaimers;
    bool forking;
};

static mp_shared_slot process_governor;

static void governor_destroy(mp_governor *governor) {
    assert(atomic_load(&governor->budget.reserved) == 0 && governor->loads == 0 && "a guard was not released");
    assert(!governor->reclaimers);
    mp_cond_deinit(&governor->no_caller);
    mp_cond_deinit(&governor->changed);
    mp_mutex_deinit(&governor->lock);
    mp_free(governor);
}

uint64_t mp_governor_limit_of(uint64_t offered, uint64_t *most) {
    *most = offered - (offered / 4 < RESERVE_MAX ? offered / 4 : RESERVE_MAX);
    return *most / 5 * 4;
}

mp_status mp_governor_open(uint64_t limit, mp_governor **governor_out, mp_error *error) {
    *governor_out = NULL;
    if (limit == 0 && (*governor_out = mp_shared_take(&process_governor)))
        return MP_OK;
    mp_governor *governor = mp_alloc_zeroed(sizeof(*governor), MP_TAG_POOL);
    if (!governor)
        return mp_fail_memory(error, sizeof(*governor), "the memory governor");
    governor->process_wide = limit == 0;
    uint64_t configured = limit ? limit : (uint64_t)mp_options_get()->memory_mb << 20;
    uint64_t rule = mp_governor_limit_of(mp_cpu_memory_bytes(), &governor->most);
    governor->fixed = configured != 0;
    atomic_init(&governor->budget.limit, configured ? configured : rule);
    governor->turns_end = &governor->turns;
    mp_mutex_init(&governor->lock);
    mp_cond_init(&governor->changed);
    mp_cond_init(&governor->no_caller);
    *governor_out = governor->process_wide ? mp_shared_offer(&process_governor, governor) : governor;
    if (*governor_out != governor)
        governor_destroy(governor);
    return MP_OK;
}

void mp_governor_close(mp_governor *governor) {
    if (governor && (!governor->process_wide || mp_shared_drop(&process_governor)))
        governor_destroy(governor);
}

mp_budget *mp_governor_budget(mp_governor *governor) { return &governor->budget; }

/* --- guards --- */

/* Must hold the lock. Returns the bytes that are not in use. */
static uint64_t left_of(mp_governor *governor) {
    mp_assert_held(&governor->lock);
    uint64_t limit = atomic_load(&governor->budget.limit), used = atomic_load(&governor->budget.used);
    return used < limit ? limit - used : 0;
}

/* Must hold the lock. Returns the bytes that are neither in use nor reserved. */
static uint64_t free_of(mp_governor *governor) {
    mp_assert_held(&governor->lock);
    uint64_t left = left_of(governor), reserved = atomic_load(&governor->budget.reserved);
    return reserved < left ? left - reserved : 0;
}

/* Must hold the lock. Returns false if the bytes are not free. */
static bool governor_take(mp_governor *governor, uint64_t bytes, mp_guard *guard) {
    mp_assert_held(&governor->lock);
    if (!mp_budget_reserve(&governor->budget, bytes))
        return false;
    governor->loads++;
    *guard = (mp_guard){.governor = governor, .bytes = bytes};
    return true;
}

/* Must hold the lock. Raises the limit for the only model of the process, if the machine has the memory. */
static bool raise_limit(mp_governor *governor, const char *key, uint64_t bytes) {
    mp_assert_held(&governor->lock);
    uint64_t limit = atomic_load(&governor->budget.limit), used = atomic_load(&governor->budget.used);
    /* Requests that wait for this model are charged already, so a small use does not count. A larger use means that
     * another model is loaded. */
    bool alone = governor->loads == 0 && used <= limit / MP_SMALL_USE;
    if (governor->fixed || !alone || used > governor->most || bytes > governor->most - used)
        return false;
    atomic_store(&governor->budget.limit, bytes + used);
    mp_log(MP_LOG_WARNING, "Memory limit raised from %.0f to %.0f MB: %s alone needs that much", (double)limit / 1e6,
           (double)(bytes + used) / 1e6, key);
    return true;
}

/* Must hold the lock. Returns how many bytes must become free before a load of `needed` bytes can begin. A load above
 * the limit needs the process for itself, so that raise_limit applies: other models must be evicted. */
static uint64_t lacking_of(mp_governor *governor, uint64_t needed) {
    mp_assert_held(&governor->lock);
    uint64_t limit = atomic_load(&governor->budget.limit), used = atomic_load(&governor->budget.used);
    if (needed <= limit || governor->fixed || needed > governor->most) {
        uint64_t free = free_of(governor); /* bytes may be given back at any time, without the lock */
        return needed > free ? needed - free : 0;
    }
    uint64_t most = governor->most - needed < limit / MP_SMALL_USE ? governor->most - needed : limit / MP_SMALL_USE;
    return used > most ? used - most : 0;
}

typedef enum question { ASK_RECLAIM, ASK_POSSIBLE, ASK_LATER } question;

static uint64_t governor_ask(mp_reclaimer *reclaimer, const mp_shortage *shortage, bool whole, question what) {
    switch (what) {
    case ASK_POSSIBLE:
        return reclaimer->possible(reclaimer->arg, shortage->asker);
    case ASK_LATER:
        return reclaimer->later(reclaimer->arg, shortage->asker);
    default:
        return reclaimer->reclaim(reclaimer->arg, shortage, whole);
    }
}

/* Asks reclaimers until the sum of their results is at least the shortage, and returns the sum. */
static uint64_t ask_all(mp_shortage shortage, bool whole, question what) {
    mp_governor *governor = shortage.governor;
    uint64_t sum = 0, bytes = shortage.bytes;
    mp_mutex_lock(&governor->lock);
    for (mp_reclaimer *at = governor->reclaimers; at && sum < bytes;) {
        at->callers++; /* keeps the reclaimer on the list, so that at->next stays valid */
        mp_mutex_unlock(&governor->lock);
        shortage.bytes = bytes - sum;
        sum += governor_ask(at, &shortage, whole, what);
        mp_mutex_lock(&governor->lock);
        mp_reclaimer *next = at->next;
        if (--at->callers == 0)
            mp_cond_broadcast(&governor->no_caller);
        at = next;
        /* `next` is not removed before the loop increments its `callers`: the lock is held until then. */
    }
    mp_mutex_unlock(&governor->lock);
    return sum;
}

static uint64_t reclaim_from_all(mp_shortage shortage, bool whole) {
    uint64_t coming = ask_all(shortage, whole, ASK_RECLAIM);
    if (whole && coming < shortage.bytes && ask_all(shortage, whole, ASK_POSSIBLE) >= shortage.bytes)
        coming = ask_all(shortage, false, ASK_RECLAIM);
    return coming;
}

/* Must hold the lock; releases it temporarily. Returns true if `needed` bytes may become free without a further call:
 * loads end, evictions end, and models that are in use become idle. */
static bool may_become_free(mp_governor *governor, uint64_t needed) {
    mp_assert_held(&governor->lock);
    if (needed > atomic_load(&governor->budget.limit))
        return false;
    if (governor->loads) /* checked before ask_all, which does not count a load that ends meanwhile */
        return true;
    mp_mutex_unlock(&governor->lock);
    uint64_t later = ask_all((mp_shortage){governor, needed, 0, NULL}, false, ASK_LATER);
    mp_mutex_lock(&governor->lock);
    return governor->loads || later >= needed || left_of(governor) >= needed - later;
}

/* Must hold the lock; releases it temporarily. As may_become_free, for a load above the limit: returns true if the
 * limit may be raised for it once all other models are gone. */
static bool may_be_raised(mp_governor *governor, uint64_t needed) {
    mp_assert_held(&governor->lock);
    if (governor->fixed || needed > governor->most || needed <= atomic_load(&governor->budget.limit))
        return false;
    if (governor->loads) /* as above */
        return true;
    uint64_t lacking = lacking_of(governor, needed);
    mp_mutex_unlock(&governor->lock);
    uint64_t later = ask_all((mp_shortage){governor, lacking, 0, NULL}, false, ASK_LATER);
    mp_mutex_lock(&governor->lock);
    return governor->loads || later >= lacking_of(governor, needed);
}

static void begin_turn(mp_governor *governor, turn *self) {
    self->next = NULL;
    *governor->turns_end = self;
    governor->turns_end = &self->next;
}

const char *mp_size_text(char text[MP_SIZE_TEXT], uint64_t bytes) {
    if (bytes > 0 && bytes < 50000)
        snprintf(text, MP_SIZE_TEXT, "%llu B", (unsigned long long)bytes);
    else
        snprintf(text, MP_SIZE_TEXT, "%.1f MB", (double)bytes / 1e6);
    return text;
}

static void end_turn(mp_governor *governor, turn *self) {
    turn **link = &governor->turns;
    while (*link != self)
        link = &(*link)->next;
    *link = self->next;
    if (!self->next)
        governor->turns_end = link;
    mp_cond_broadcast(&governor->changed); /* it may be the next caller's turn */
}

const char *mp_shortage_text(char to[MP_SHORTAGE_TEXT], uint64_t bytes, uint64_t left, uint64_t limit) {
    char sizes[2][MP_SIZE_TEXT];
    mp_size_text(sizes[0], left);
    mp_size_text(sizes[1], limit);
    if (bytes > limit)
        snprintf(to, MP_SHORTAGE_TEXT, "the memory limit is %s", sizes[1]);
    else
        snprintf(to, MP_SHORTAGE_TEXT, "%s of %s are free", sizes[0], sizes[1]);
    return to;
}

/* Must hold the lock; releases it temporarily. The caller's turn has come and less than `needed` is free. Asks other
 * models for memory. Returns MEMORY_EXHAUSTED if waiting is useless. *again: check again at once. *held: idle models do
 * not suffice. */
static mp_status demand(mp_governor *governor, const char *key, uint64_t needed, bool *again, bool *held,
                        mp_error *error) {
    mp_assert_held(&governor->lock);
    uint64_t free = free_of(governor);
    *again = needed > left_of(governor) && raise_limit(governor, key, needed);
    if (*again)
        return MP_OK;
    uint64_t lacking = lacking_of(governor, needed);
    mp_mutex_unlock(&governor->lock);
    uint64_t coming = reclaim_from_all((mp_shortage){governor, lacking, free, NULL}, true);
    mp_mutex_lock(&governor->lock);
    *again = free_of(governor) > free; /* enough memory is free, or more than before */
    *held = coming < lacking;
    if (*again || coming || (governor->loads && needed <= left_of(governor)) || may_become_free(governor, needed) ||
        may_be_raised(governor, needed))
        return MP_OK;
    char size[MP_SIZE_TEXT], shortage[MP_SHORTAGE_TEXT];
    mp_shortage_text(shortage, needed, left_of(governor), atomic_load(&governor->budget.limit));
    return mp_fail(error, MP_MEMORY_EXHAUSTED,
                   "%s needs %s, but %s; use a smaller model, unload others, or raise the limit (memory_bytes, "
                   "MPOOL_MEMORY_MB)",
                   key, mp_size_text(size, needed), shortage);
}

mp_status mp_governor_reserve(mp_governor *governor, const char *key, uint64_t needed, uint64_t wanted, bool urgent,
                              bool (*give_up)(void *arg), void *arg, mp_guard *guard, mp_error *error) {
    assert(needed <= wanted);
    *guard = (mp_guard){0};
    turn self;
    bool queued = false, waited = false;
    mp_status status = MP_OK;
    mp_mutex_lock(&governor->lock);
    for (;;) {
        bool first = urgent || !governor->turns || governor->turns == &self, again = false, held = false;
        if (first && (governor_take(governor, wanted, guard) || governor_take(governor, needed, guard)))
            break;
        if (!queued && !urgent)
            begin_turn(governor, &self);
        queued = !urgent;
        if (first && (status = demand(governor, key, needed, &again, &held, error)) != MP_OK)
            break;
        if (again)
            continue;
        if (first)
            governor->stuck = held && waited; /* models whose last request has just ended are idle by now */
        waited = true;
        mp_cond_wait(&governor->changed, &governor->lock, mp_sys_now_ns() + MP_POLL_NS);
        mp_mutex_unlock(&governor->lock);
        bool over = give_up && give_up(arg);
        mp_mutex_lock(&governor->lock);
        if (over) {
            status = mp_fail(error, MP_CANCELLED, "%s: the load was cancelled while it waited for memory", key);
            break;
        }
    }
    if (queued)
        end_turn(governor, &self);
    governor->stuck = false;
    mp_mutex_unlock(&governor->lock);
    if (status == MP_MEMORY_EXHAUSTED && error)
        mp_governor_name_holders(governor, error);
    return status;
}

bool mp_governor_try_reserve(mp_governor *governor, uint64_t bytes, mp_guard *guard) {
    mp_mutex_lock(&governor->lock);
    *guard = (mp_guard){0};
    bool granted = !governor->turns && governor_take(governor, bytes, guard);
    mp_mutex_unlock(&governor->lock);
    return granted;
}

mp_guard mp_guard_split(mp_guard *guard, uint64_t bytes) {
    mp_governor *governor = guard->governor;
    if (!governor)
        return (mp_guard){0};
    assert(!guard->account);
    mp_guard part = {.governor = governor, .bytes = bytes < guard->bytes ? bytes : guard->bytes};
    mp_mutex_lock(&governor->lock);
    guard->bytes -= part.bytes;
    governor->loads++;
    mp_mutex_unlock(&governor->lock);
    return part;
}

void mp_guard_lend(mp_guard *guard, mp_budget *account) {
    if (!guard->governor)
        return;
    assert(!guard->account && account->above == &guard->governor->budget);
    guard->account = account;
    mp_budget_begin_load(account, guard->bytes);
}

/* Must hold the lock. */
static void give_rest(mp_guard *guard) {
    mp_assert_held(&guard->governor->lock);
    if (guard->account)
        mp_budget_end_load(guard->account);
    else
        mp_budget_unreserve(&guard->governor->budget, guard->bytes);
    guard->account = NULL;
    guard->bytes = 0;
}

void mp_guard_give(mp_guard *guard) {
    mp_governor *governor = guard->governor;
    if (!governor)
        return;
    mp_mutex_lock(&governor->lock);
    give_rest(guard);
    mp_cond_broadcast(&governor->changed);
    mp_mutex_unlock(&governor->lock);
}

void mp_guard_release(mp_guard *guard) {
    mp_governor *governor = guard->governor;
    if (!governor)
        return;
    mp_mutex_lock(&governor->lock);
    assert(governor->loads > 0);
    give_rest(guard);
    governor->loads--;
    mp_cond_broadcast(&governor->changed);
    mp_mutex_unlock(&governor->lock);
    *guard = (mp_guard){0};
}

uint64_t mp_governor_reserved(mp_governor *governor, int *loads) {
    *loads = governor->loads;
    return atomic_load(&governor->budget.reserved);
}

/* --- pressure --- */

mp_pressure mp_governor_pressure(mp_governor *governor) {
    uint64_t limit = atomic_load_explicit(&governor->budget.limit, memory_order_relaxed);
    uint64_t used = atomic_load_explicit(&governor->budget.used, memory_order_relaxed);
    if (used < limit / 100 * 50)
        return MP_PRESSURE_LOW;
    if (used < limit / 100 * 70)
        return MP_PRESSURE_NORMAL;
    return used < limit / 100 * 85 ? MP_PRESSURE_HIGH : MP_PRESSURE_CRITICAL;
}

const char *mp_pressure_name(mp_pressure pressure) {
    static const char *const names[] = {"low", "normal", "high", "critical"};
    return names[pressure];
}

void mp_governor_add_reclaimer(mp_governor *governor, mp_reclaimer *reclaimer) {
    mp_mutex_lock(&governor->lock);
    reclaimer->next = governor->reclaimers;
    governor->reclaimers = reclaimer;
    mp_mutex_unlock(&governor->lock);
}

void mp_governor_remove_reclaimer(mp_governor *governor, mp_reclaimer *reclaimer) {
    mp_mutex_lock(&governor->lock);
    mp_reclaimer **link = &governor->reclaimers;
    while (*link && *link != reclaimer)
        link = &(*link)->next;
    if (*link) {
        while (reclaimer->callers)
            mp_cond_wait(&governor->no_caller, &governor->lock, 0);
        /* Search again: the list may have changed while this thread waited. */
        for (link = &governor->reclaimers; *link != reclaimer;)
            link = &(*link)->next;
        *link = reclaimer->next;
    }
    mp_mutex_unlock(&governor->lock);
}

uint64_t mp_governor_reclaim(mp_governor *governor, uint64_t bytes, bool whole) {
    return reclaim_from_all((mp_shortage){governor, bytes, UINT64_MAX, NULL}, whole);
}

uint64_t mp_shortage_left(const mp_shortage *shortage) {
    mp_assert_not_held(&shortage->governor->lock);
    mp_mutex_lock(&shortage->governor->lock);
    uint64_t free = free_of(shortage->governor);
    mp_mutex_unlock(&shortage->governor->lock);
    uint64_t more = free > shortage->free ? free - shortage->free : 0;
    return more < shortage->bytes ? shortage->bytes - more : 0;
}

bool mp_governor_may_free(mp_governor *governor, uint64_t bytes) {
    mp_mutex_lock(&governor->lock);
    bool may = may_become_free(governor, bytes);
    mp_mutex_unlock(&governor->lock);
    return may;
}

bool mp_governor_stuck(mp_governor *governor) {
    mp_mutex_lock(&governor->lock);
    bool stuck = governor->stuck;
    mp_mutex_unlock(&governor->lock);
    return stuck;
}

bool mp_governor_may_gain(mp_governor *governor, const void *asker) {
    mp_mutex_lock(&governor->lock);
    bool loads = governor->loads > 0; /* read before ask_all, as in may_become_free */
    mp_mutex_unlock(&governor->lock);
    return loads || ask_all((mp_shortage){governor, 1, 0, asker}, false, ASK_LATER) > 0;
}

void mp_governor_name_holders(mp_governor *governor, mp_error *error) {
    static const char intro[] = ". In memory: ";
    size_t begin = strlen(error->message), size = sizeof(error->message), at = begin + sizeof(intro) - 1;
    mp_mutex_lock(&governor->lock);
    for (mp_reclaimer *reclaimer = governor->reclaimers; reclaimer && at + 2 < size;) {
        reclaimer->callers++; /* keeps the reclaimer while the lock is released, as in ask_all */
        mp_mutex_unlock(&governor->lock);
        bool first = at == begin + sizeof(intro) - 1;
        size_t start = first ? at : at + 2;
        size_t length = 0;
        if (reclaimer->holders)
            length = reclaimer->holders(reclaimer->arg, error->message + start, size - start);
        if (length && !first)
            memcpy(error->message + at, ", ", 2);
        if (length)
            at = start + length;
        mp_mutex_lock(&governor->lock);
        mp_reclaimer *next = reclaimer->next;
        if (--reclaimer->callers == 0)
            mp_cond_broadcast(&governor->no_caller);
        reclaimer = next;
    }
    mp_mutex_unlock(&governor->lock);
    if (at > begin + sizeof(intro) - 1)
        memcpy(error->message + begin, intro, sizeof(intro) - 1);
    error->message[at > begin + sizeof(intro) - 1 ? at : begin] = 0;
}

void mp_governor_notify(mp_governor *governor) {
    mp_mutex_lock(&governor->lock);
    mp_cond_broadcast(&governor->changed);
    mp_mutex_unlock(&governor->lock);
}

/* --- fork --- */

mp_shared_slot *mp_governor_slot(void) { return &process_governor; }

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
    mp_cond_init(&governor->no_caller);
    /* running loads belong to the parent; bytes that they charged stay charged, because the child has the same
     * allocations */
    atomic_store(&governor->budget.reserved, 0);
    governor->loads = 0;
    governor->turns = NULL;
    governor->turns_end = &governor->turns;
    governor->stuck = false;
    for (mp_reclaimer *at = governor->reclaimers; at; at = at->next)
        at->callers = 0;
}
