/* team.c: see team.h.
 *
 * How a helper learns of work: `signal` counts events that concern it (leased, run, quit). It notes the count, looks at
 * what there is to do and, finding nothing, waits for the count to change: spinning while it is leased, for as long as
 * the option allows, then parked on the word. Whoever posts an event counts first and then looks whether the helper is
 * parked; the helper says that it parks and then looks at the count again. Both pairs are sequentially consistent, so
 * one of the two sees the other, and the futex compares once more in the kernel: no wake-up is lost.
 *
 * The barrier is a counter and a generation. The last to arrive resets the counter and advances the generation, on
 * which the others wait in the same way. Regions live in the team, not on a stack: a helper that leaves the last
 * barrier late still reads valid memory. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/team.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/options.h"

enum {
    APART = 128, /* two lines: the prefetcher fetches lines in pairs */
    MAX_HELPERS = 255,
    WAKE_UP_NS = 25 * 1000, /* what it takes to wake a parked thread on a machine at rest */
};

struct mp_region {
    _Alignas(APART) _Atomic uint32_t arrived;
    _Alignas(APART) _Atomic uint32_t generation;
    _Atomic uint32_t sleepers;    /* beside the word that the last to arrive has just written */
    _Atomic uint64_t advanced_ns; /* when somebody last advanced it for sleepers */
    /* written by lane 0 before the region starts, read by all lanes inside it */
    _Alignas(APART) void (*body)(const mp_lane *lane, void *arg);
    void *arg;
    int count;
    uint64_t spin_ns;
    bool watched; /* how much of a CPU its lanes get */
    uint64_t began_ns;
    _Atomic uint64_t most_lost_ns; /* by one lane of this run */
};

struct helper {
    _Alignas(APART) _Atomic uint32_t signal; /* events so far */
    _Atomic uint32_t parked;
    _Atomic uint32_t held;                    /* 1 while a lease has it */
    _Alignas(APART) _Atomic uint32_t pending; /* 1 from lane 0's order until the helper takes it */
    _Atomic(const mp_cpu_set *) cpus; /* where it is to run, NULL = anywhere; written by the holder of the lease */
    /* written by the holder of the lease before it sets pending */
    mp_region *region;
    int lane;
    mp_region own; /* the region of a lease whose first helper this is */
    mp_team *team;
    mp_thread thread;
};

struct mp_team {
    void *block; /* what to free: the team starts at the next multiple of APART inside it */
    int count;
    _Atomic uint32_t quit;
    uint64_t spin_ns;
    _Atomic uint32_t crowded; /* 1 while the system keeps taking the CPU away from us */
    struct helper helpers[];
};

/* --- waiting --- */

/* Spin until *word is no longer `seen`. False when spin_ns passed first, or when *while_set (unless NULL) became 0. */
static bool spin_for_change(_Atomic uint32_t *word, uint32_t seen, uint64_t spin_ns, _Atomic uint32_t *while_set) {
    enum { BETWEEN_CLOCKS = 32 };
    uint64_t start = 0;
    for (;;) {
        for (int i = 0; i < BETWEEN_CLOCKS; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != seen)
                return true;
            if (spin_ns == 0)
                return false;
            mp_cpu_relax();
        }
        if (while_set && !atomic_load_explicit(while_set, memory_order_relaxed))
            return false;
        uint64_t now = mp_sys_now_ns();
        if (!start)
            start = now;
        if (now - start >= spin_ns)
            return false;
    }
}

static _Thread_local uint64_t parked_ns; /* that this thread has waited for other lanes, so far */

/* Wait until *word is no longer `seen`: parked, and counted in *sleepers meanwhile. */
static void park_for_change(_Atomic uint32_t *word, uint32_t seen, _Atomic uint32_t *sleepers) {
    atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
    while (atomic_load_explicit(word, memory_order_seq_cst) == seen)
        mp_park(word, seen, 0);
    atomic_fetch_sub_explicit(sleepers, 1, memory_order_relaxed);
}

static void advance(_Atomic uint32_t *word, _Atomic uint32_t *sleepers) {
    atomic_fetch_add_explicit(word, 1, memory_order_seq_cst);
    if (atomic_load_explicit(sleepers, memory_order_seq_cst))
        mp_unpark_all(word);
}

void mp_lane_sync(const mp_lane *lane) {
    if (lane->count == 1)
        return;
    mp_region *region = lane->region;
    /* Both are read before arriving: nobody can advance the generation until then, and once all have arrived lane 0 may
     * already be writing the fields of its next region. */
    uint64_t spin_ns = region->spin_ns;
    uint32_t generation = atomic_load_explicit(&region->generation, memory_order_relaxed);
    uint32_t before = atomic_fetch_add_explicit(&region->arrived, 1, memory_order_acq_rel);
    assert(before < (uint32_t)lane->count);
    if (before + 1 == (uint32_t)lane->count) {
        atomic_store_explicit(&region->arrived, 0, memory_order_relaxed);
        if (atomic_load_explicit(&region->sleepers, memory_order_relaxed))
            atomic_store_explicit(&region->advanced_ns, mp_sys_now_ns(), memory_order_relaxed);
        advance(&region->generation, &region->sleepers);
        return;
    }
    if (!spin_for_change(&region->generation, generation, spin_ns, NULL)) {
        uint64_t began_ns = mp_sys_now_ns();
        park_for_change(&region->generation, generation, &region->sleepers);
        /* from then on it waited for a CPU and not for a lane */
        uint64_t until_ns = atomic_load_explicit(&region->advanced_ns, memory_order_relaxed);
        parked_ns += until_ns > began_ns ? until_ns - began_ns : 0;
    }
}

/* --- what lanes lose to others --- */

typedef struct watch { /* of one lane of a region */
    uint64_t had_ns, parked_ns, began_ns;
} watch;

static watch begin_watch(void) { return (watch){mp_sys_thread_ns(), parked_ns, mp_sys_now_ns()}; }

/* How long it stood ready without a CPU since; *took_ns: out of so much. */
static uint64_t end_watch(const watch *since, uint64_t *took_ns) {
    uint64_t had_ns = mp_sys_thread_ns() - since->had_ns + parked_ns - since->parked_ns;
    *took_ns = mp_sys_now_ns() - since->began_ns;
    return *took_ns > had_ns ? *took_ns - had_ns : 0;
}

static void note_loss(mp_region *region, uint64_t lost_ns) {
    uint64_t most = atomic_load_explicit(&region->most_lost_ns, memory_order_relaxed);
    while (lost_ns > most && !atomic_compare_exchange_weak_explicit(&region->most_lost_ns, &most, lost_ns,
                                                                    memory_order_relaxed, memory_order_relaxed)) {
    }
}

/* Whether to watch a region that begins now: asking for a thread's time takes a microsecond, twice a lane. */
static bool is_to_be_watched(void) {
    enum { EVERY_NS = 1000 * 1000 };
    static _Thread_local uint64_t watched_ns;
    uint64_t now = mp_sys_now_ns();
    if (now - watched_ns < EVERY_NS)
        return false;
    watched_ns = now;
    return true;
}

/* On a crowded machine whoever is waited for may not run for milliseconds, and spinning delays whoever does. Yet most
 * waits end at once even there: so spin as long as a wake-up costs, which loses at most twice what the best choice
 * would (Karlin and others, "Empirical studies of competitive spinning", 1991). */
static uint64_t spin_time(const mp_team *team, bool crowded) {
    return crowded && team->spin_ns > WAKE_UP_NS ? WAKE_UP_NS : team->spin_ns;
}

/* --- helpers --- */

/* By the helper: bind itself to where it is to run, which is where it last was unless the machine is full. */
static void settle(struct helper *self, const mp_cpu_set **settled) {
    const mp_cpu_set *cpus = atomic_load_explicit(&self->cpus, memory_order_relaxed);
    if (cpus != *settled && cpus)
        mp_sys_set_affinity(cpus); /* refused when the last of them was just taken offline: then it runs anywhere */
    *settled = cpus;
}

static void helper_main(void *arg) {
    struct helper *self = arg;
    mp_team *team = self->team;
    const mp_cpu_set *settled = NULL;
    mp_cpu_flush_denormals();
    for (;;) {
        uint32_t seen = atomic_load_explicit(&self->signal, memory_order_acquire);
        settle(self, &settled);
        if (atomic_load_explicit(&self->pending, memory_order_acquire)) {
            mp_region *region = self->region;
            settle(self, &settled);
            mp_lane lane = {self->lane, region->count, region};
            atomic_store_explicit(&self->pending, 0, memory_order_relaxed);
            if (region->watched) {
                uint64_t took_ns;
                watch watch = begin_watch();
                uint64_t late_ns = watch.began_ns - region->began_ns;
                region->body(&lane, region->arg);
                note_loss(region, end_watch(&watch, &took_ns) + (late_ns > WAKE_UP_NS ? late_ns - WAKE_UP_NS : 0));
            } else {
                region->body(&lane, region->arg);
            }
            mp_lane_sync(&lane);
            continue;
        }
        if (atomic_load_explicit(&team->quit, memory_order_relaxed))
            return;
        uint64_t spin_ns = spin_time(team, atomic_load_explicit(&team->crowded, memory_order_relaxed));
        if (!atomic_load_explicit(&self->held, memory_order_relaxed) ||
            !spin_for_change(&self->signal, seen, spin_ns, &self->held))
            park_for_change(&self->signal, seen, &self->parked);
    }
}

static void stop_helpers(mp_team *team) {
    atomic_store_explicit(&team->quit, 1, memory_order_relaxed);
    for (int i = 0; i < team->count; i++)
        if (team->helpers[i].thread.started)
            advance(&team->helpers[i].signal, &team->helpers[i].parked);
    for (int i = 0; i < team->count; i++)
        mp_thread_join(&team->helpers[i].thread);
}

mp_status mp_team_create(int helpers, mp_team **team_out, mp_error *error) {
    *team_out = NULL;
    if (helpers < 0 || helpers > MAX_HELPERS)
        return mp_fail(error, MP_INVALID_ARGUMENT, "a team of %d helpers was asked for, allowed: 0 to %d", helpers,
                       MAX_HELPERS);
    size_t bytes = sizeof(mp_team) + (size_t)helpers * sizeof(struct helper) + APART;
    void *block = mp_alloc_zeroed(bytes, MP_TAG_POOL);
    if (!block)
        return mp_fail_memory(error, bytes, "the team of compute threads");
    mp_team *team = (mp_team *)(((uintptr_t)block + APART - 1) & ~(uintptr_t)(APART - 1));
    team->block = block;
    team->count = helpers;
    team->spin_ns = (uint64_t)mp_options_get()->spin_us * 1000;
    mp_status status = MP_OK;
    for (int i = 0; i < helpers; i++)
        team->helpers[i].team = team;
    for (int i = 0; i < helpers && status == MP_OK; i++)
        status = mp_thread_start(&team->helpers[i].thread, "mpool-compute", helper_main, &team->helpers[i], error);
    if (status != MP_OK) {
        mp_team_destroy(team);
        return status;
    }
    *team_out = team;
    return MP_OK;
}

void mp_team_destroy(mp_team *team) {
    if (!team)
        return;
    for (int i = 0; i < team->count; i++)
        assert(!atomic_load_explicit(&team->helpers[i].held, memory_order_relaxed) && "a lease is still held");
    stop_helpers(team);
    mp_free(team->block);
}

int mp_team_size(const mp_team *team) { return team ? team->count + 1 : 1; }

/* --- leases --- */

/* Take helpers that are free until the lease has `want` lanes; near: only those that worked on these CPUs last. */
static void take_helpers(mp_team *team, const mp_cpu_set *cpus, bool near, int want, mp_lease *lease) {
    for (int i = 0; i < team->count && lease->lanes < want; i++) {
        struct helper *helper = &team->helpers[i];
        uint32_t expected = 0;
        if (atomic_load_explicit(&helper->held, memory_order_relaxed) ||
            (near && atomic_load_explicit(&helper->cpus, memory_order_relaxed) != cpus))
            continue;
        /* acquire: what the previous holder's region wrote to the helper's fields is settled */
        if (!atomic_compare_exchange_strong_explicit(&helper->held, &expected, 1, memory_order_acquire,
                                                     memory_order_relaxed))
            continue;
        atomic_store_explicit(&helper->cpus, cpus, memory_order_relaxed);
        lease->helpers[lease->lanes - 1] = i;
        lease->lanes++;
        advance(&helper->signal, &helper->parked); /* awake and spinning by the time the region starts */
    }
}

void mp_team_lease_at(mp_team *team, const mp_place *places, int count, mp_lease *lease) {
    lease->team = team;
    lease->lanes = lease->near = 1;
    lease->cancelled = NULL;
    lease->bound = false;
    lease->together = false;
    lease->watched_ns = lease->lost_ns = 0;
    atomic_store_explicit(&lease->heartbeat, mp_sys_now_ns(), memory_order_relaxed);
    int want = 0;
    for (int i = 0; team && i < count; i++) {
        want += places[i].lanes;
        if (places[i].cpus)
            take_helpers(team, places[i].cpus, true, want, lease);
        take_helpers(team, places[i].cpus, false, want, lease);
        lease->near = i ? lease->near : lease->lanes;
    }
    if (places[0].cpus)
        lease->bound = mp_sys_get_affinity(&lease->before) && mp_sys_set_affinity(places[0].cpus);
}

void mp_team_lease(mp_team *team, int want, mp_lease *lease) {
    mp_team_lease_at(team, &(mp_place){.lanes = want}, 1, lease);
}

void mp_team_return(mp_lease *lease) {
    if (lease->bound)
        mp_sys_set_affinity(&lease->before);
    lease->bound = false;
    for (int i = 0; i < lease->lanes - 1; i++)
        atomic_store_explicit(&lease->team->helpers[lease->helpers[i]].held, 0, memory_order_release);
    lease->lanes = 1;
}

bool mp_lease_poll(mp_lease *lease) {
    atomic_store_explicit(&lease->heartbeat, mp_sys_now_ns(), memory_order_relaxed);
    return lease->cancelled && atomic_load_explicit(lease->cancelled, memory_order_relaxed);
}

/* Look, at most every 10 ms and thread, how often the system took the CPU away from this thread. */
static bool is_crowded(mp_team *team) {
#if defined(RUSAGE_THREAD)
    static _Thread_local uint64_t looked_ns;
    static _Thread_local long switches;
    enum { EVERY_NS = 10 * 1000 * 1000, PER_SECOND_ON = 100, PER_SECOND_OFF = 25 };
    uint64_t now = mp_sys_now_ns(), passed = now - looked_ns;
    if (passed >= EVERY_NS) {
        struct rusage usage;
        if (getrusage(RUSAGE_THREAD, &usage) == 0) {
            double rate = (double)(usage.ru_nivcsw - switches) / ((double)passed * 1e-9);
            bool first = looked_ns == 0;
            looked_ns = now;
            switches = usage.ru_nivcsw;
            if (!first && rate > PER_SECOND_ON)
                atomic_store_explicit(&team->crowded, 1, memory_order_relaxed);
            else if (!first && rate < PER_SECOND_OFF)
                atomic_store_explicit(&team->crowded, 0, memory_order_relaxed);
        }
    }
#endif
    return atomic_load_explicit(&team->crowded, memory_order_relaxed);
}

void mp_lease_run(mp_lease *lease, void (*body)(const mp_lane *lane, void *arg), void *arg) {
    uint32_t control = mp_cpu_flush_denormals();
    bool watched = is_to_be_watched();
    watch since;
    uint64_t took_ns;
    if (watched)
        since = begin_watch();
    if (lease->lanes == 1) {
        mp_lane lane = mp_lane_single();
        body(&lane, arg);
        if (watched) {
            lease->lost_ns += end_watch(&since, &took_ns);
            lease->watched_ns += took_ns;
        }
        mp_cpu_restore_float(control);
        return;
    }
    mp_team *team = lease->team;
    mp_region *region = &team->helpers[lease->helpers[0]].own;
    region->body = body;
    region->arg = arg;
    region->count = lease->lanes;
    region->spin_ns = spin_time(team, is_crowded(team));
    region->watched = watched;
    region->began_ns = watched ? since.began_ns : 0;
    atomic_store_explicit(&region->most_lost_ns, 0, memory_order_relaxed);
    for (int i = 0; i < lease->lanes - 1; i++) {
        struct helper *helper = &team->helpers[lease->helpers[i]];
        helper->region = region;
        helper->lane = i + 1;
        atomic_store_explicit(&helper->pending, 1, memory_order_release);
        advance(&helper->signal, &helper->parked);
    }
    mp_lane lane = {0, lease->lanes, region};
    body(&lane, arg);
    mp_lane_sync(&lane);
    if (watched) {
        note_loss(region, end_watch(&since, &took_ns));
        lease->lost_ns += atomic_load_explicit(&region->most_lost_ns, memory_order_relaxed);
        lease->watched_ns += took_ns;
    }
    mp_cpu_restore_float(control);
}

void mp_lane_split(const mp_lane *lane, int64_t n, int64_t grain, int64_t *begin, int64_t *end) {
    assert(n >= 0 && grain > 0);
    int64_t units = n / grain + (n % grain != 0), share = units / lane->count, extra = units % lane->count;
    int64_t first = share * lane->index + (lane->index < extra ? lane->index : extra);
    int64_t last = first + share + (lane->index < extra);
    *begin = first * grain < n ? first * grain : n;
    *end = last * grain < n ? last * grain : n;
}
