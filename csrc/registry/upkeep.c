/* upkeep.c: memory reclaim over all entries, and the periodic sweep. See upkeep.h. */
#include "registry/upkeep.h"

#include <stdatomic.h>

#include "base/log.h"

static const uint64_t CRITICAL_EVERY_NS = 1000ull * 1000 * 1000; /* interval of evictions while memory is critical */

/* --- memory --- */

/* Ranks models for eviction: idle time in relation to the cost of loading again. */
static double coldness(const mp_eviction *value) {
    return (double)value->idle_ns / ((double)value->load_ns + 1e6);
}

/* Prefers models whose eviction alone frees enough; among equals the coldest. */
static bool goes_before(const mp_eviction *a, const mp_eviction *b, uint64_t bytes) {
    bool a_covers = a->bytes >= bytes, b_covers = b->bytes >= bytes;
    return a_covers != b_covers ? a_covers : coldness(a) > coldness(b);
}

typedef struct survey {
    mp_entry *best; /* the model to evict, or NULL */
    mp_eviction best_value;
    uint64_t coming, possible; /* bytes that evictions are freeing, and could free */
    uint64_t busy, blocked;    /* bytes that could be freed once the active requests have ended; mp_eviction */
    uint64_t caches, only_caches; /* bytes of idle workers; the part whose models must not be evicted */
} survey;

static survey survey_entries(mp_entry **entries, int count, uint64_t bytes, const void *except) {
    survey all = {0};
    for (int i = 0; i < count; i++) {
        if (entries[i] == except)
            continue;
        mp_eviction value;
        mp_entry_value(entries[i], &value);
        all.coming += value.coming;
        all.possible += value.bytes;
        all.busy += value.busy;
        all.blocked += value.blocked;
        all.caches += value.caches + value.trimming;
        all.only_caches += value.bytes ? 0 : value.caches + value.trimming;
        if (!value.bytes || (all.best && !goes_before(&value, &all.best_value, bytes)))
            continue;
        all.best = entries[i];
        all.best_value = value;
    }
    return all;
}

/* Asks idle workers, coldest model first, to free caches and arenas, until the asked workers hold `bytes`. Returns the
 * bytes that they hold. */
static uint64_t upkeep_trim(mp_entry **entries, int count, uint64_t bytes) {
    uint64_t asked = 0;
    for (int pass = 0; pass <= count; pass++) {
        mp_entry *best = NULL;
        mp_eviction best_value = {0};
        uint64_t trimming = 0;
        for (int i = 0; i < count; i++) {
            mp_eviction value;
            mp_entry_value(entries[i], &value);
            trimming += value.trimming;
            if (!value.caches || (best && coldness(&value) <= coldness(&best_value)))
                continue;
            best = entries[i];
            best_value = value;
        }
        if (asked < trimming) /* `asked` is larger if workers have trimmed in the meantime */
            asked = trimming;
        if (!best || asked >= bytes)
            break;
        asked += mp_entry_trim(best);
    }
    return asked;
}

uint64_t mp_upkeep_reclaim(mp_entry **entries, int count, const mp_shortage *shortage, bool whole) {
    uint64_t coming = 0, evicted = 0; /* bytes of the models that this call has evicted */
    /* Other threads may evict too, so each pass surveys all entries again. */
    for (int pass = 0; pass <= count; pass++) {
        survey all = survey_entries(entries, count, shortage->bytes, NULL);
        uint64_t lacking = mp_shortage_left(shortage); /* after the survey */
        coming = all.coming < evicted ? evicted : all.coming; /* some evicted models are freed already */
        /* Other threads may take what becomes free, but one call evicts no more than was lacking when it began. */
        if (all.coming >= lacking || evicted >= shortage->bytes ||
            (whole && all.coming + all.possible + all.only_caches < lacking))
            break;
        uint64_t left = lacking - all.coming, most = shortage->bytes - evicted;
        left = left < most ? left : most;
        /* Trim caches only if that may be enough, or if evicting models is not. Trimming may free less than the workers
         * hold: the caller checks again afterwards. */
        uint64_t trimmed = all.caches >= left || all.possible < left ? upkeep_trim(entries, count, left) : 0;
        if (trimmed)
            return coming + trimmed;
        if (!all.best)
            break;
        if (mp_entry_evict_idle(all.best))
            evicted += all.best_value.bytes;
    }
    return coming;
}

uint64_t mp_upkeep_possible(mp_entry **entries, int count, const void *asker) {
    survey all = survey_entries(entries, count, 0, asker);
    return all.coming + all.possible + all.only_caches;
}

uint64_t mp_upkeep_later(mp_entry **entries, int count, const void *asker) {
    survey all = survey_entries(entries, count, 0, asker);
    return all.coming + all.possible + all.only_caches + all.busy + (asker ? 0 : all.blocked);
}

/* --- maintenance --- */

static int in_use(mp_entry **entries, int count) {
    int used = 0;
    for (int i = 0; i < count; i++)
        used += mp_entry_in_use(entries[i]);
    return used;
}

static void check_memory(mp_upkeep *upkeep, mp_services *services, mp_entry **entries, int count, uint64_t now_ns,
                           mp_pressure pressure) {
    mp_budget *budget = mp_governor_budget(services->governor);
    uint64_t limit = atomic_load(&budget->limit), used = atomic_load(&budget->used);
    if (used && (pressure != upkeep->pressure || now_ns - upkeep->logged_ns >= upkeep->every_ns)) {
        upkeep->pressure = pressure;
        upkeep->logged_ns = now_ns;
        mp_log(pressure >= MP_PRESSURE_HIGH ? MP_LOG_WARNING : MP_LOG_INFO, "Memory: %.0f of %.0f MB in use (%s)",
               (double)used / 1e6, (double)limit / 1e6, mp_pressure_name(pressure));
    }
    if (pressure != MP_PRESSURE_CRITICAL)
        return;
    if (in_use(entries, count) > 1)
        mp_governor_reclaim(services->governor, limit / 10, false);
    else /* a single model stays loaded: no other model needs its memory */
        upkeep_trim(entries, count, limit / 10);
}

void mp_upkeep_init(mp_upkeep *upkeep, uint64_t every_ns) {
    *upkeep = (mp_upkeep){.every_ns = every_ns, .tick_ns = mp_sys_now_ns()};
}

uint64_t mp_upkeep_sweep(mp_upkeep *upkeep, mp_services *services, mp_entry **entries, int count, uint64_t now_ns) {
    uint64_t next = UINT64_MAX;
    for (int i = 0; i < count; i++) {
        uint64_t due = mp_entry_sweep(entries[i], now_ns);
        if (due < next)
            next = due;
    }
    mp_pressure pressure = mp_governor_pressure(services->governor);
    uint64_t every_ns = upkeep->every_ns;
    if (pressure == MP_PRESSURE_CRITICAL && every_ns > CRITICAL_EVERY_NS)
        every_ns = CRITICAL_EVERY_NS;
    if (now_ns - upkeep->tick_ns >= every_ns) {
        upkeep->tick_ns = now_ns;
        check_memory(upkeep, services, entries, count, now_ns, pressure);
        /* the C library keeps blocks that callers freed: texts and tokens take many times the bytes of their request */
        if (every_ns == upkeep->every_ns)
            mp_sys_trim_heap();
    }
    /* If no worker exists, sleep until mp_maintenance_at is called. */
    uint64_t tick_ns = mp_sys_after(upkeep->tick_ns, every_ns);
    if (atomic_load(&services->active_workers) && tick_ns < next)
        next = tick_ns;
    return next;
}
