/* team.c: see team.h.
 *
 * Each helper waits on its own event count, `signal` (base/event_count.h). Leasing the helper, starting a region on it
 * and destroying the team each notify the event count. A leased helper without work spins for at most MPOOL_SPIN_US and
 * then parks; a helper that is not leased parks at once.
 *
 * The barrier is a counter of arrived threads and a generation, which is an event count. The last thread to arrive
 * resets the counter and advances the generation, on which the other threads wait. Many threads arrive in groups, each
 * with a counter of its own, and the last thread of each group arrives for the group. Regions live in the team, not on
 * a stack: a helper that leaves the last barrier late still reads valid memory.
 *
 * A loop of mp_team_next is divided into shares, one for each thread, and these into ranges. One word for each thread
 * counts the ranges that were taken of its share, from the front and from the back, beside the number of the loop. The
 * words are never reset between loops: a word with an older number means that nothing was taken, one with a newer
 * number that all was, because a thread takes of a share for the next loop only after it found no range left there. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/team.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/crowding.h"
#include "base/event_count.h"
#include "base/options.h"

enum {
    ALIGNMENT = 128, /* two cache lines: the prefetcher fetches lines in pairs */
    MAX_HELPERS = 255,
    WAKE_UP_NS = 25 * 1000, /* time to wake a parked thread on an idle machine, measured */
    GROUP = 8,              /* threads of a group at a barrier */
    GROUPS_FROM = 16,       /* a barrier has groups from this number of threads on: fewer wait longer with them */
};

struct mp_team_share {
    _Atomic uint64_t taken; /* number of a loop << 40 | ranges taken from the back << 20 | from the front */
    uint32_t loops;         /* loops of the region that the thread has begun */
};

struct mp_region {
    _Alignas(ALIGNMENT) _Atomic uint32_t arrived;
    _Alignas(ALIGNMENT) mp_event_count generation;
    _Atomic uint64_t advanced_ns; /* last time that the generation was advanced while threads were parked */
    /* written by thread 0 before the region starts, read by all threads inside it */
    _Alignas(ALIGNMENT) void (*body)(const mp_team_thread *thread, void *arg);
    void *arg;
    const mp_lease *lease; /* valid until the last thread has arrived at the region's last barrier */
    int count;
    uint64_t spin_ns;
    bool watched; /* the CPU time of the region's threads is measured */
    uint64_t began_ns;
    _Atomic uint64_t most_lost_ns; /* longest time for which one thread had no CPU in this run */
    _Alignas(ALIGNMENT) mp_team_share share; /* thread 0 has no helper */
};

struct helper {
    _Alignas(ALIGNMENT) mp_event_count signal;    /* notified: leased, region started, team ends */
    _Atomic uint32_t held;                        /* 1 while leased */
    _Alignas(ALIGNMENT) _Atomic uint32_t pending; /* 1 from the region's start until the helper enters it */
    _Atomic(const mp_cpu_set *) cpus; /* CPUs to run on, NULL = any; written by the holder of the lease */
    /* written by the holder of the lease before it sets `pending` */
    mp_region *region;
    int index;     /* its thread index in the region */
    mp_team_share share; /* reset with each region */
    mp_region own; /* the region of a lease whose first helper is this one */
    mp_team *team;
    mp_thread thread;
};

struct mp_team {
    void *block; /* allocation; the team starts at the next multiple of ALIGNMENT inside it */
    int count;
    _Atomic uint32_t quit;
    uint64_t spin_ns;
    _Atomic uint32_t crowded; /* 1 while the system often preempts compute threads (crowding.h) */
    struct helper helpers[];
};

/* --- waiting --- */

static _Thread_local uint64_t parked_ns; /* total time that this thread was parked at barriers */

typedef struct count_watch {
    const mp_event_count *count;
    uint32_t seen;
} count_watch;

static inline bool has_advanced(void *arg) {
    const count_watch *watch = arg;
    return atomic_load_explicit(&watch->count->count, memory_order_acquire) != watch->seen;
}

static inline bool is_set(void *arg) {
    return atomic_load_explicit((_Atomic uint32_t *)arg, memory_order_relaxed) != 0;
}

/* Counts one arrival. Returns true, with the counter reset, if it is the last one of `count`. */
static inline bool is_last(_Atomic uint32_t *arrived, uint32_t count) {
    uint32_t before = atomic_fetch_add_explicit(arrived, 1, memory_order_acq_rel);
    assert(before < count);
    if (before + 1 < count)
        return false;
    atomic_store_explicit(arrived, 0, memory_order_relaxed);
    return true;
}

/* Returns true if all other threads of the region have arrived. The counter of group g is in the region of the lease's
 * helper g + 1: the lease uses only the region of helper 0. */
static bool arrive_in_group(mp_region *region, const mp_team_thread *thread) {
    const mp_lease *lease = region->lease;
    const int group = thread->index / GROUP, left = thread->count - group * GROUP;
    struct helper *helper = &lease->team->helpers[lease->helpers[group + 1]];
    return is_last(&helper->own.arrived, (uint32_t)(left < GROUP ? left : GROUP)) &&
           is_last(&region->arrived, (uint32_t)(thread->count + GROUP - 1) / GROUP);
}

void mp_team_barrier(const mp_team_thread *thread) {
    if (thread->count == 1)
        return;
    mp_region *region = thread->region;
    /* Read spin_ns and the generation before arriving. The generation cannot advance before this thread arrives. Once
     * all threads have arrived, thread 0 may already write the fields for its next region. */
    uint64_t spin_ns = region->spin_ns;
    uint32_t generation = atomic_load_explicit(&region->generation.count, memory_order_relaxed);
    if (thread->count < GROUPS_FROM ? is_last(&region->arrived, (uint32_t)thread->count)
                                    : arrive_in_group(region, thread)) {
        if (atomic_load_explicit(&region->generation.sleepers, memory_order_relaxed))
            atomic_store_explicit(&region->advanced_ns, mp_sys_now_ns(), memory_order_relaxed);
        mp_event_count_notify(&region->generation);
        return;
    }
    count_watch watch = {&region->generation, generation};
    if (!mp_spin(has_advanced, &watch, spin_ns, NULL, NULL)) {
        uint64_t began_ns = mp_sys_now_ns();
        mp_event_count_park(&region->generation, generation);
        /* from advanced_ns on, this thread waited for a CPU and not for another thread */
        uint64_t until_ns = atomic_load_explicit(&region->advanced_ns, memory_order_relaxed);
        parked_ns += until_ns > began_ns ? until_ns - began_ns : 0;
    }
}

void mp_team_wait(const mp_team_thread *thread, mp_event_count *count, uint32_t seen) {
    count_watch watch = {count, seen};
    if (mp_spin(has_advanced, &watch, thread->region ? thread->region->spin_ns : 0, NULL, NULL))
        return;
    const uint64_t began_ns = mp_sys_now_ns();
    mp_event_count_park(count, seen);
    parked_ns += mp_sys_now_ns() - began_ns;
}

/* --- CPU time lost to other processes --- */

typedef struct watch { /* readings of a thread's clocks at the start of a region */
    uint64_t had_ns, parked_ns, began_ns;
} watch;

static watch begin_watch(void) { return (watch){mp_sys_thread_ns(), parked_ns, mp_sys_now_ns()}; }

/* Returns the time that this thread was ready to run without a CPU since begin_watch; sets *took_ns to the whole time
 * since begin_watch. */
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

/* Measure at most one region per millisecond: each thread reads its CPU time twice per region, and each reading takes 1
 * us. */
static bool should_watch(void) {
    enum { EVERY_NS = 1000 * 1000 };
    static _Thread_local uint64_t watched_ns;
    uint64_t now = mp_sys_now_ns();
    if (now - watched_ns < EVERY_NS)
        return false;
    watched_ns = now;
    return true;
}

/* On a crowded machine, the thread that the others wait for may have no CPU for milliseconds, and threads that spin
 * occupy CPUs that this thread could use. Most waits still end soon. Threads therefore spin for the duration of a
 * wake-up and then park. This costs at most twice as much as the better choice would have: only spinning, or parking
 * at once (Karlin and others, "Empirical studies of competitive spinning", 1991). */
static uint64_t spin_time(const mp_team *team, bool crowded) {
    return crowded && team->spin_ns > WAKE_UP_NS ? WAKE_UP_NS : team->spin_ns;
}

/* --- helpers --- */

/* Bind the calling helper to the CPUs of its lease, unless it is already bound to them. */
static void bind(struct helper *self, const mp_cpu_set **bound) {
    const mp_cpu_set *cpus = atomic_load_explicit(&self->cpus, memory_order_relaxed);
    if (cpus != *bound && cpus)
        mp_sys_set_affinity(cpus); /* fails if all these CPUs are offline: the helper then runs on any CPU */
    *bound = cpus;
}

static void helper_main(void *arg) {
    struct helper *self = arg;
    mp_team *team = self->team;
    const mp_cpu_set *bound = NULL;
    mp_cpu_flush_denormals();
    for (;;) {
        uint32_t seen = mp_event_count_read(&self->signal);
        bind(self, &bound);
        if (atomic_load_explicit(&self->pending, memory_order_acquire)) {
            mp_region *region = self->region;
            bind(self, &bound);
            mp_team_thread thread = {self->index, region->count, region, &self->share};
            atomic_store_explicit(&self->pending, 0, memory_order_relaxed);
            if (region->watched) {
                uint64_t took_ns;
                watch watch = begin_watch();
                uint64_t late_ns = watch.began_ns - region->began_ns;
                region->body(&thread, region->arg);
                note_loss(region, end_watch(&watch, &took_ns) + (late_ns > WAKE_UP_NS ? late_ns - WAKE_UP_NS : 0));
            } else {
                region->body(&thread, region->arg);
            }
            mp_team_barrier(&thread);
            continue;
        }
        if (atomic_load_explicit(&team->quit, memory_order_relaxed))
            return;
        uint64_t spin_ns = spin_time(team, atomic_load_explicit(&team->crowded, memory_order_relaxed));
        if (!atomic_load_explicit(&self->held, memory_order_relaxed) ||
            !mp_spin(has_advanced, &(count_watch){&self->signal, seen}, spin_ns, is_set, &self->held))
            mp_event_count_park(&self->signal, seen);
    }
}

static void stop_helpers(mp_team *team) {
    atomic_store_explicit(&team->quit, 1, memory_order_relaxed);
    for (int i = 0; i < team->count; i++)
        if (team->helpers[i].thread.started)
            mp_event_count_notify(&team->helpers[i].signal);
    for (int i = 0; i < team->count; i++)
        mp_thread_join(&team->helpers[i].thread);
}

mp_status mp_team_create(int helpers, mp_team **team_out, mp_error *error) {
    *team_out = NULL;
    if (helpers < 0 || helpers > MAX_HELPERS)
        return mp_fail(error, MP_INVALID_ARGUMENT, "`helpers` must be 0 to %d, got %d", MAX_HELPERS,
                       helpers);
    size_t bytes = sizeof(mp_team) + (size_t)helpers * sizeof(struct helper) + ALIGNMENT;
    void *block = mp_alloc_zeroed(bytes, MP_TAG_POOL);
    if (!block)
        return mp_fail_memory(error, bytes, "the team of compute threads");
    mp_team *team = (mp_team *)(((uintptr_t)block + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
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

/* Take free helpers until the lease has `want` threads. same_cpus: take only helpers that last worked on these CPUs. */
static void take_helpers(mp_team *team, const mp_cpu_set *cpus, bool same_cpus, int want, mp_lease *lease) {
    for (int i = 0; i < team->count && lease->threads < want; i++) {
        struct helper *helper = &team->helpers[i];
        uint32_t expected = 0;
        if (atomic_load_explicit(&helper->held, memory_order_relaxed) ||
            (same_cpus && atomic_load_explicit(&helper->cpus, memory_order_relaxed) != cpus))
            continue;
        /* acquire: makes the previous holder's writes to the helper visible */
        if (!atomic_compare_exchange_strong_explicit(&helper->held, &expected, 1, memory_order_acquire,
                                                     memory_order_relaxed))
            continue;
        atomic_store_explicit(&helper->cpus, cpus, memory_order_relaxed);
        lease->helpers[lease->threads - 1] = i;
        lease->threads++;
        mp_event_count_notify(&helper->signal); /* wake the helper early, so that it spins when the region starts */
    }
}

void mp_team_lease_at(mp_team *team, const mp_team_place *places, int count, mp_lease *lease) {
    lease->team = team;
    lease->threads = lease->near = 1;
    lease->cancelled = lease->wanted = lease->runnable = lease->waiting = NULL;
    lease->cut_short = false;
    lease->bound = false;
    lease->barrier_bound = false;
    lease->watched_ns = lease->lost_ns = 0;
    atomic_store_explicit(&lease->heartbeat, mp_sys_now_ns(), memory_order_relaxed);
    int want = 0;
    for (int i = 0; team && i < count; i++) {
        want += places[i].threads;
        if (places[i].cpus)
            take_helpers(team, places[i].cpus, true, want, lease);
        take_helpers(team, places[i].cpus, false, want, lease);
        lease->near = i ? lease->near : lease->threads;
    }
    if (places[0].cpus)
        lease->bound = mp_sys_get_affinity(&lease->before) && mp_sys_set_affinity(places[0].cpus);
}

void mp_team_lease(mp_team *team, int want, mp_lease *lease) {
    mp_team_lease_at(team, &(mp_team_place){.threads = want}, 1, lease);
}

void mp_team_return(mp_lease *lease) {
    if (lease->bound)
        mp_sys_set_affinity(&lease->before);
    lease->bound = false;
    for (int i = 0; i < lease->threads - 1; i++)
        atomic_store_explicit(&lease->team->helpers[lease->helpers[i]].held, 0, memory_order_release);
    lease->threads = 1;
}

bool mp_lease_poll(mp_lease *lease) {
    atomic_store_explicit(&lease->heartbeat, mp_sys_now_ns(), memory_order_relaxed);
    return lease->cancelled && atomic_load_explicit(lease->cancelled, memory_order_relaxed);
}

static bool exceeds(const _Atomic int *count, int most) {
    return count && atomic_load_explicit(count, memory_order_relaxed) > most;
}

bool mp_lease_wanted(const mp_lease *lease) {
    return exceeds(lease->wanted, 0) || exceeds(lease->runnable, 1) || exceeds(lease->waiting, 0);
}

static bool is_crowded(mp_team *team) {
    double rate = mp_crowding_rate();
    if (rate > MP_CROWDED_FROM)
        atomic_store_explicit(&team->crowded, 1, memory_order_relaxed);
    else if (rate >= 0 && rate < MP_CROWDED_UNTIL)
        atomic_store_explicit(&team->crowded, 0, memory_order_relaxed);
    return atomic_load_explicit(&team->crowded, memory_order_relaxed);
}

static void reset_share(mp_team_share *share) {
    atomic_store_explicit(&share->taken, 0, memory_order_relaxed);
    share->loops = 0;
}

void mp_lease_run(mp_lease *lease, void (*body)(const mp_team_thread *thread, void *arg), void *arg) {
    uint32_t control = mp_cpu_flush_denormals();
    bool watched = should_watch();
    watch since;
    uint64_t took_ns;
    if (watched)
        since = begin_watch();
    if (lease->threads == 1) {
        mp_team_thread thread = mp_team_single();
        body(&thread, arg);
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
    region->lease = lease;
    region->count = lease->threads;
    region->spin_ns = spin_time(team, is_crowded(team));
    region->watched = watched;
    region->began_ns = watched ? since.began_ns : 0;
    atomic_store_explicit(&region->most_lost_ns, 0, memory_order_relaxed);
    reset_share(&region->share);
    for (int i = 0; i < lease->threads - 1; i++) /* before any helper starts: it may look at the others' shares */
        reset_share(&team->helpers[lease->helpers[i]].share);
    for (int i = 0; i < lease->threads - 1; i++) {
        struct helper *helper = &team->helpers[lease->helpers[i]];
        helper->region = region;
        helper->index = i + 1;
        atomic_store_explicit(&helper->pending, 1, memory_order_release);
        mp_event_count_notify(&helper->signal);
    }
    mp_team_thread thread = {0, lease->threads, region, &region->share};
    body(&thread, arg);
    mp_team_barrier(&thread);
    if (watched) {
        note_loss(region, end_watch(&since, &took_ns));
        lease->lost_ns += atomic_load_explicit(&region->most_lost_ns, memory_order_relaxed);
        lease->watched_ns += took_ns;
    }
    mp_cpu_restore_float(control);
}

void mp_team_split(const mp_team_thread *thread, int64_t n, int64_t grain, int64_t *begin, int64_t *end) {
    assert(n >= 0 && grain > 0);
    int64_t units = n / grain + (n % grain != 0), share = units / thread->count, extra = units % thread->count;
    int64_t first = share * thread->index + (thread->index < extra ? thread->index : extra);
    int64_t last = first + share + (thread->index < extra);
    *begin = first * grain < n ? first * grain : n;
    *end = last * grain < n ? last * grain : n;
}

/* --- loops that threads share --- */

enum {
    RANGE_BITS = 20,
    MOST_RANGES = (1 << RANGE_BITS) - 1,
    NUMBER_BITS = 64 - 2 * RANGE_BITS,
    REACH = 15 /* a thread takes ranges of this many others: each look at a share costs the time of a cache miss */
};

static int64_t share_start(const mp_team_thread *thread, const mp_team_loop *loop, int index) {
    return loop->starts ? loop->starts[index]
                        : loop->n / thread->count * index + loop->n % thread->count * index / thread->count;
}

static mp_team_share *share_of(const mp_team_thread *thread, int index) {
    mp_region *region = thread->region;
    return index ? &region->lease->team->helpers[region->lease->helpers[index - 1]].share : &region->share;
}

/* Takes a range of the share of thread `index`: from its front if the share is this thread's, else from its back.
 * Returns false if none is left. */
static bool take_range(const mp_team_thread *thread, mp_team_loop *loop, int index) {
    const int64_t start = share_start(thread, loop, index), past = share_start(thread, loop, index + 1);
    int64_t each = loop->least, ranges = (past - start + each - 1) / each, take, first;
    if (ranges == 0)
        return false;
    if (ranges > MOST_RANGES) {
        each = (past - start + MOST_RANGES - 1) / MOST_RANGES;
        ranges = (past - start + each - 1) / each;
    }
    mp_team_share *share = share_of(thread, index);
    uint64_t word = atomic_load_explicit(&share->taken, memory_order_relaxed), next;
    do {
        const uint32_t number = (uint32_t)(word >> 2 * RANGE_BITS);
        const bool older = number != loop->number;
        if (older && ((number - loop->number) & 1u << (NUMBER_BITS - 1)) == 0)
            return false; /* a newer loop has begun */
        const int64_t front = older ? 0 : (int64_t)(word & MOST_RANGES);
        const int64_t back = older ? 0 : (int64_t)(word >> RANGE_BITS & MOST_RANGES), left = ranges - front - back;
        if (left <= 0)
            return false;
        take = left / 8 > 1 ? left / 8 : 1;
        const bool own = index == thread->index;
        first = own ? front : ranges - back - take;
        next = (uint64_t)loop->number << 2 * RANGE_BITS | (uint64_t)(own ? back : back + take) << RANGE_BITS |
               (uint64_t)(own ? front + take : front);
    } while (!atomic_compare_exchange_weak_explicit(&share->taken, &word, next, memory_order_relaxed,
                                                    memory_order_relaxed));
    loop->begin = start + first * each;
    loop->end = loop->begin + take * each < past ? loop->begin + take * each : past;
    return true;
}

mp_team_loop mp_team_rows(const mp_team_thread *thread, int64_t rows, int64_t floats) {
    enum { RANGE_FLOATS = 32768 };
    assert(floats > 0);
    const int64_t least = 1 + RANGE_FLOATS / floats;
    return mp_team_shared(rows, rows > least * thread->count ? least : 0);
}

bool mp_team_next(const mp_team_thread *thread, mp_team_loop *loop) {
    assert(loop->n >= 0 && loop->least >= 0);
    const bool own = thread->count == 1 || loop->least == 0;
    if (loop->number == 0) { /* before the first range */
        loop->number = 1;
        if (own) {
            loop->begin = share_start(thread, loop, thread->index);
            loop->end = share_start(thread, loop, thread->index + 1);
            return loop->begin < loop->end;
        }
        thread->share->loops = thread->share->loops + 1 < 1u << NUMBER_BITS ? thread->share->loops + 1 : 1;
        loop->number = thread->share->loops;
    }
    if (own)
        return false;
    for (; loop->looked < thread->count && loop->looked <= REACH; loop->looked++)
        if (take_range(thread, loop, (thread->index + loop->looked) % thread->count))
            return true;
    return false;
}
