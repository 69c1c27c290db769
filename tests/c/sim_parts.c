/* sim_parts.c: worlds of single parts, small enough to run all their schedules: the thread pool, the governor, the CPU
 * allocator, maintenance. */
#include "sim_world.h"

#ifdef MP_SIM

#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "registry/cpu_allocator.h"
#include "registry/governor.h"
#include "registry/maintenance.h"
#include "registry/pool/pool.h"

static const uint64_t MS = 1000 * 1000;
enum { MAX = 4, DUES = 8 };

static mp_error error;
static mp_thread threads[MAX];

static void start(int n, void (*body)(void *arg), void *arg) {
    for (int i = 0; i < n; i++)
        SIM_CHECK(mp_thread_start(&threads[i], "caller", body, arg, &error) == MP_OK);
}

static void join(int n) {
    for (int i = 0; i < n; i++)
        mp_thread_join(&threads[i]);
}

/* --- pool: every accepted job runs once; an idle thread is used again --- */

static struct {
    mp_pool *pool;
    int given, refused;
    _Atomic int ran, running;
} jobs;

static void job(void *arg) {
    (void)arg;
    SIM_CHECK(atomic_fetch_add(&jobs.running, 1) < 2);
    sim_yield();
    atomic_fetch_sub(&jobs.running, 1);
    atomic_fetch_add(&jobs.ran, 1);
}

static void give_jobs(void *arg) {
    (void)arg;
    for (int i = 0; i < 2; i++) {
        mp_error why;
        if (mp_pool_run(jobs.pool, (mp_job){job, NULL}, &why) == MP_OK) {
            jobs.given++;
        } else {
            SIM_CHECK(why.code == MP_SPAWN_FAILED);
            jobs.refused++;
        }
    }
}

void sim_parts_pool(void *world) {
    int callers = ((const sim_world *)world)->callers, total, busy;
    memset(&jobs, 0, sizeof(jobs));
    SIM_CHECK(mp_pool_create("pool", 2, false, &jobs.pool, &error) == MP_OK);
    start(callers, give_jobs, NULL);
    join(callers);
    mp_pool_counts(jobs.pool, &total, &busy);
    SIM_CHECK(total >= 1 && total <= 2 && busy <= total);
    mp_pool_destroy(jobs.pool);
    SIM_CHECK(jobs.given + jobs.refused == 2 * callers && jobs.ran == jobs.given && jobs.given >= 2);
}

/* --- governor: registries open and close while others reclaim memory from them; reservations never exceed the limit */

enum { LIMIT = 1000 };

static struct {
    mp_governor *governor;
    uint64_t taken;
    _Atomic int next;
} memory;

typedef struct mock_registry {
    mp_reclaimer reclaimer;
    bool registered;
} mock_registry;

static uint64_t give_memory(void *arg, const mp_shortage *shortage, bool whole) {
    (void)whole;
    mock_registry *self = arg;
    SIM_CHECK(self->registered);
    sim_yield();
    SIM_CHECK(self->registered && "a reclaimer is not removed while it is in use");
    return sim_below(2) ? mp_shortage_left(shortage) : 0;
}

static uint64_t has_memory(void *arg, const void *asker) {
    (void)asker;
    mock_registry *self = arg;
    SIM_CHECK(self->registered);
    sim_yield();
    SIM_CHECK(self->registered && "a reclaimer is not removed while it is in use");
    return sim_below(2) * LIMIT;
}

static bool gives_up(void *arg) {
    (void)arg;
    return sim_below(4) == 0;
}

static void use_memory(void *arg) {
    (void)arg;
    bool comes_and_goes = atomic_fetch_add(&memory.next, 1) % 2 == 0;
    for (int i = 0; i < 3; i++) {
        mp_error why;
        mp_guard guard;
        uint64_t bytes = 200 + sim_below(700);
        if (comes_and_goes) {
            mock_registry *self = mp_alloc_zeroed(sizeof(*self), MP_TAG_POOL);
            SIM_CHECK(self != NULL);
            *self = (mock_registry){
                {.reclaim = give_memory, .possible = has_memory, .later = has_memory, .arg = self}, true};
            mp_governor_add_reclaimer(memory.governor, &self->reclaimer);
            sim_yield();
            mp_governor_remove_reclaimer(memory.governor, &self->reclaimer);
            self->registered = false;
            mp_free(self);
        } else if (mp_governor_reserve(memory.governor, "a", bytes, LIMIT, sim_below(2), gives_up, NULL, &guard,
                                       &why) == MP_OK) {
            SIM_CHECK(guard.bytes >= bytes);
            memory.taken += guard.bytes;
            SIM_CHECK(memory.taken <= LIMIT);
            mp_sys_sleep_ns(MS);
            memory.taken -= guard.bytes;
            mp_guard_release(&guard);
        }
    }
}

void sim_parts_governor(void *world) {
    int callers = ((const sim_world *)world)->callers;
    memset(&memory, 0, sizeof(memory));
    SIM_CHECK(mp_governor_open(LIMIT, &memory.governor, &error) == MP_OK);
    start(callers, use_memory, NULL);
    join(callers);
    SIM_CHECK(memory.taken == 0);
    mp_governor_close(memory.governor);
}

/* --- guards: reservations wait for other guards alone, so that each wait must end by a wake-up --- */

static bool goes_on(void *arg) {
    (void)arg;
    return false;
}

static void use_guards(void *arg) {
    (void)arg;
    for (int i = 0; i < 3; i++) {
        mp_error why;
        mp_guard guard, part;
        uint64_t needed = 100 + sim_below(900), wanted = sim_below(2) ? needed : LIMIT;
        SIM_CHECK(mp_governor_reserve(memory.governor, "a", needed, wanted, sim_below(4) == 0, goes_on, NULL, &guard,
                                      &why) == MP_OK);
        memory.taken += guard.bytes;
        SIM_CHECK(guard.bytes >= needed && memory.taken <= LIMIT);
        part = mp_guard_split(&guard, sim_below(guard.bytes + 1));
        mp_sys_sleep_ns(MS + sim_below(MS));
        memory.taken -= guard.bytes;
        if (sim_below(2)) { /* a load charges less than it has reserved, ends, and is freed: each makes bytes free */
            uint64_t bytes = guard.bytes / 2;
            mp_budget account = {.limit = UINT64_MAX, .above = mp_governor_budget(memory.governor)};
            mp_guard_lend(&guard, &account);
            SIM_CHECK(mp_budget_take(&account, bytes));
            mp_guard_give(&guard);
            mp_sys_sleep_ns(MS);
            mp_budget_give(&account, bytes);
            mp_governor_notify(memory.governor);
            mp_sys_sleep_ns(MS);
        }
        mp_guard_release(&guard);
        mp_sys_sleep_ns(1 + sim_below(MS));
        memory.taken -= part.bytes;
        mp_guard_release(&part);
    }
}

void sim_parts_guards(void *world) {
    int callers = ((const sim_world *)world)->callers, loads;
    memset(&memory, 0, sizeof(memory));
    SIM_CHECK(mp_governor_open(LIMIT, &memory.governor, &error) == MP_OK);
    start(callers, use_guards, NULL);
    join(callers);
    SIM_CHECK(memory.taken == 0 && mp_governor_reserved(memory.governor, &loads) == 0 && loads == 0);
    mp_governor_close(memory.governor);
}

/* --- cores: never more CPUs leased than there are, and every waiter gets some --- */

static struct {
    mp_cpu_allocator *allocator;
    int threads, in_use;
    struct {
        int fibre;
        bool wants;
    } users[8];
    _Atomic int next;
} cores;

/* Checks that no node leases more CPUs than it has, and that the sums over the nodes are right. */
static void check_nodes(const mp_core_lease *own, int count) {
    int threads[MP_NODES_MAX], leased[MP_NODES_MAX], sum = 0,
                                                     nodes = mp_cpu_allocator_nodes(cores.allocator, threads, leased);
    for (int i = 0; i < nodes; i++) {
        SIM_CHECK(own->on[i] <= leased[i] && leased[i] <= threads[i]);
        sum += leased[i];
        count -= own->on[i];
    }
    SIM_CHECK(sum <= cores.threads && count == 0 && own->on[own->first] > 0);
}

/* Checks, while all threads sleep, that no thread waits for a CPU while one is free. */
static void check_waiters(void *arg) {
    (void)arg;
    for (int i = 0; i < cores.next; i++)
        if (cores.users[i].wants && sim_is_blocked(cores.users[i].fibre) &&
            mp_cpu_allocator_leased(cores.allocator) < cores.threads)
            sim_fail("caller %d waits for compute threads, and %d of %d are free", i,
                     cores.threads - mp_cpu_allocator_leased(cores.allocator), cores.threads);
}

static void lease_threads(void *arg) {
    (void)arg;
    mp_lease lease;
    mp_core_lease threads;
    int self = atomic_fetch_add(&cores.next, 1);
    cores.users[self].fibre = sim_self();
    int home = mp_cpu_allocator_assign_home(cores.allocator);
    mp_cpu_allocator_enter(cores.allocator);
    for (int i = 0; i < 2; i++) {
        cores.users[self].wants = true;
        mp_cpu_allocator_lease(cores.allocator, home, i + 1, &lease, &threads, NULL, NULL);
        cores.users[self].wants = false;
        cores.in_use += lease.threads;
        SIM_CHECK(lease.threads >= 1 && cores.in_use <= cores.threads);
        check_nodes(&threads, lease.threads);
        if (sim_below(2))
            mp_sys_sleep_ns(MS);
        else
            sim_yield();
        cores.in_use -= lease.threads;
        mp_cpu_allocator_return(cores.allocator, &lease, &threads, false);
    }
    mp_cpu_allocator_leave(cores.allocator);
    mp_cpu_allocator_release_home(cores.allocator, home);
}

void sim_parts_cores(void *world) {
    int callers = ((const sim_world *)world)->callers;
    memset(&cores, 0, sizeof(cores));
    cores.threads = 2 + (int)sim_below(3);
    SIM_CHECK(mp_cpu_allocator_open(cores.threads, false, &cores.allocator, &error) == MP_OK);
    sim_watch(NULL, check_waiters, NULL);
    start(callers, lease_threads, NULL);
    join(callers);
    SIM_CHECK(mp_cpu_allocator_leased(cores.allocator) == 0 && !mp_cpu_allocator_contended(cores.allocator));
    mp_cpu_allocator_close(cores.allocator);
}

/* --- maintenance: every announcement leads to a sweep when it is due, or soon after --- */

static struct {
    mp_maintenance maintenance;
    mp_pool *pool;
    mp_mutex lock;
    uint64_t due[DUES]; /* guarded by: lock; 0 = unused, or swept */
    int seen;
    _Atomic int next;
} ticks;

static uint64_t sweep(void *arg, uint64_t now_ns) {
    (void)arg;
    uint64_t next = UINT64_MAX;
    mp_mutex_lock(&ticks.lock);
    for (int i = 0; i < DUES; i++) {
        if (ticks.due[i] && ticks.due[i] <= now_ns) {
            SIM_CHECK(now_ns < ticks.due[i] + MS / 10 && "the sweep runs in time");
            ticks.due[i] = 0;
            ticks.seen++;
        } else if (ticks.due[i] && ticks.due[i] < next) {
            next = ticks.due[i];
        }
    }
    mp_mutex_unlock(&ticks.lock);
    return next;
}

static void announce(void *arg) {
    (void)arg;
    for (int round = 0; round < 2; round++) {
        /* Use whole milliseconds, so that announcements and sweeps coincide. */
        uint64_t now = sim_now(), start = now - now % MS + MS * (1 + sim_below(3));
        mp_sys_sleep_ns(start - now);
        int at = atomic_fetch_add(&ticks.next, 1);
        uint64_t due = start + MS * sim_below(4);
        mp_mutex_lock(&ticks.lock);
        ticks.due[at] = due;
        mp_mutex_unlock(&ticks.lock);
        mp_maintenance_at(&ticks.maintenance, ticks.pool, due);
    }
}

void sim_parts_ticks(void *world) {
    int callers = ((const sim_world *)world)->callers;
    memset(&ticks, 0, sizeof(ticks));
    mp_mutex_init(&ticks.lock);
    SIM_CHECK(mp_pool_create("pool", 2, false, &ticks.pool, &error) == MP_OK);
    mp_maintenance_init(&ticks.maintenance, sweep, NULL);
    start(callers, announce, NULL);
    join(callers);
    mp_sys_sleep_ns(20 * MS);
    SIM_CHECK(ticks.seen == 2 * callers && "a sweep handles every announcement");
    mp_maintenance_stop(&ticks.maintenance);
    mp_maintenance_deinit(&ticks.maintenance);
    mp_pool_destroy(ticks.pool);
    mp_mutex_deinit(&ticks.lock);
}

#endif
