/* sim_world.c: the scene of a world of a whole registry, and the checks while all threads wait. See sim_world.h. */
#include "sim_state.h"

#ifdef MP_SIM

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if __has_include("registry/audit.h")
#include "registry/audit.h"
#define HAS_AUDIT 1
#endif

sim_scene w;
static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;
const char *const sim_keys[KEYS] = {"a", "b", "c", "d", "e"};

/* --- checks from outside --- */

static void check_entry_at_rest(void *arg, const mp_entry_info *info) {
    (void)arg;
    bool idle = strcmp(info->state, "ready") == 0, busy = strcmp(info->state, "busy") == 0;
    /* While memory is short, an idle worker may wait for memory, and checks again soon. The death of a worker starts a
     * backoff. */
    bool tight = w.kind->memory || w.tight || w.refused_memory || w.gathers;
    bool improves = fakes.improving > 0; /* an idle worker ends its slice first */
    bool no_worker = strcmp(info->state, "cold") == 0 || strcmp(info->state, "failed") == 0;
    if (info->queued > 0 && ((idle && !tight && !improves) || (no_worker && !w.stalls && !w.crashes && !w.killed)))
        sim_fail("%d requests wait for %s, which is %s, and every thread sleeps", info->queued, info->key, info->state);
    if (w.kind->special == &sim_balance && info->queued > 0 && info->busy < info->workers && !improves)
        sim_fail("%d requests wait for %s, and %d of its %d workers are idle", info->queued, info->key,
                 info->workers - info->busy, info->workers);
    for (int i = 0; i < w.caller_count; i++) {
        const caller *c = &w.callers[i];
        if (!sim_is_blocked(c->fibre))
            continue;
        if (c->submitting && strcmp(c->submitting, info->key) == 0 && info->queued < w.capacity && !w.swapped &&
            !w.kind->memory) /* it may wait for memory too */
            sim_fail("caller %d waits for space in the queue of %s, which is not full", i, info->key);
        if (c->loading && strcmp(c->loading, info->key) == 0 && (idle || busy) && !w.swapped)
            sim_fail("caller %d waits for the load of %s, which is %s", i, info->key, info->state);
    }
}

void sim_visit(void (*visit)(void *arg, const mp_entry_info *info), void *arg) {
    while (mp_registry_visit(w.registry, visit, arg, NULL) != MP_OK)
        ;
}

static void check_at_rest(void *arg) {
    (void)arg;
    for (int i = 0; i < w.caller_count; i++) {
        caller *c = &w.callers[i];
        if (c->expected && sim_is_blocked(c->fibre)) {
            sim_take_notices(c);
            if (mp_ticket_done(c->expected) && !(c->notified >> c->expected_id & 1))
                sim_fail("caller %d was not notified that its request ended", i);
        }
        if (!c->awaited || !sim_is_blocked(c->fibre))
            continue;
        if (mp_ticket_done(c->awaited))
            sim_fail("caller %d waits for a request that has ended", i);
        if (mp_ticket_wait(c->awaited, c->seen, 1, NULL))
            sim_fail("caller %d waits for progress of a request that has already progressed", i);
    }
    if (w.registry)
        sim_visit(check_entry_at_rest, NULL);
    if (w.registry && !w.kind->crowd)
        sim_recount(w.registry);
    if (w.kind->special && w.kind->special->rest)
        w.kind->special->rest();
}

static void audit_step(void *arg) {
    (void)arg;
#ifdef HAS_AUDIT
    mp_error error;
    mp_error_clear(&error);
    if (w.registry && !w.kind->crowd && !w.gathers && w.steps++ % 4 == 0 &&
        mp_registry_audit(w.registry, sim_is_held, &error) != MP_OK)
        sim_fail("%s", error.message);
#endif
}

/* --- closing --- */

static void begin_close(void) {
    if (!w.shutting_down)
        w.jumps_before_close = sim_late_jumps();
    w.shutting_down = true;
}

static void closer_main(void *arg) {
    (void)arg;
    mp_sys_sleep_ns(1 + sim_below(60 * MS));
    begin_close();
    if (percent(30))
        mp_registry_begin_shutdown(w.registry);
    else
        mp_registry_close(w.registry, percent(50) ? 0 : sim_below(50 * MS));
}

/* --- the world --- */

static mp_status create(void) {
    static const uint64_t spins[] = {1, 1, 2000};
    mp_error error;
    sim_fakes_begin(1 + of(3));
    w.capacity = 1 + of(4);
    mp_registry_config config = {.threads = fakes.threads, .spin_ns = spins[of(3)], .step_budget_ns = SIM_BUDGET_NS};
    config.memory_limit = w.kind->memory ? 60000 + 10000 * (uint64_t)of(6) : 1000 * 1000 * 1000;
    config.load_timeout_ns = w.stalls ? 200 * MS : 0;
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++)
        for (int j = 0; j < MP_SERVICE_COUNT; j++)
            config.queue_capacity[i][j] = w.capacity;
    config.max_workers = 1 + of(3);
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++)
        config.policy[i] = (mp_policy)of(MP_POLICY_COUNT);
    w.policy = config.policy[MP_TEXT_EMBEDDING];
    config.shutdown_grace_ns = 1 + sim_below(SECOND);
    w.tight = w.kind->memory;
#ifdef MP_FOREVER
    static const uint64_t lives[] = {0, 1, 20 * 1000 * 1000, 200 * 1000 * 1000, MP_FOREVER};
    config.keep_alive_ns = lives[of(w.kind->stuck ? 4 : 5)];
    config.maintenance_every_ns = w.kind->stuck || percent(20) ? 10 * MS + sim_below(100 * MS) : 0;
    if (w.kind->stuck) {
        w.stall_ns = config.stall_timeout_ns = 100 * MS + sim_below(300 * MS);
        config.breaker_threshold = 1 + of(5);
        config.breaker_window_ns = SECOND;
        config.breaker_backoff_ns = 50 * MS;
    }
#endif
    fakes.no_late = sim_get_setup()->late == 0;
    fakes.on_time = !w.kind->faults && !w.kind->stuck && sim_get_setup()->late == 0;
    if (w.kind->special && w.kind->special->tune)
        w.kind->special->tune(&config);
    return mp_registry_create(&config, &w.registry, &error);
}

static void check_after_close(void) {
    mp_registry_stats stats;
    mp_registry_get_stats(w.registry, &stats);
    uint64_t over = stats.completed + stats.errors + stats.timeouts + stats.cancelled + stats.queue_full_rejections;
    if (stats.total_requests != over)
        sim_fail("%llu requests were submitted, %llu ended", (unsigned long long)stats.total_requests,
                 (unsigned long long)over);
    if ((stats.memory_used && !w.stalls) || stats.threads_leased) /* memory of abandoned workers stays charged */
        sim_fail("after close %llu bytes are charged and %d compute threads leased",
                 (unsigned long long)stats.memory_used, stats.threads_leased);
    /* Without stalls, a worker is abandoned only if the clock jumps past the limit of its load, or past the grace
     * period of the close. */
    if (stats.workers_dead && !w.stalls && !sim_loads_are_late() && sim_late_jumps() == w.jumps_before_close)
        sim_fail("%llu workers were abandoned, and none stood still", (unsigned long long)stats.workers_dead);
    SIM_CHECK(stats.illegal_transitions == 0);
}

static void registry_world(void *arg) {
    const sim_world *kind = arg;
    memset(&w, 0, sizeof(w));
    w.kind = kind;
    /* The order of locks in csrc/README.md. */
    sim_lock_rank("registry.c", 1);
    sim_lock_rank("entry.c", 2);
    sim_lock_rank("request.c", 4);
    sim_lock_rank("notifier.c", 5);
    sim_lock_rank("pool.c", 9);
    sim_lock_rank("maintenance.c", 9);
    sim_lock_rank("governor.c", 9);
    sim_lock_rank("cpu_allocator.c", 9);
    w.refused_memory = w.refused_threads = kind->faults;
    w.stalls =
        kind->faults || kind->stuck; /* also if the fibre of a load is not scheduled within the timeout */
    if (create() != MP_OK) {
        SIM_CHECK(kind->faults);
        return;
    }
    sim_watch(audit_step, check_at_rest, NULL);
    record none = {0};
    w.key_count = kind->at_once ? kind->keys : 1 + of(kind->keys);
    for (int i = 0; i < w.key_count; i++) {
        w.removed = w.swapped = kind->faults; /* if mp_registry_add is refused, the key is unknown */
        sim_add(sim_keys[i], false, &none);
    }
    mp_thread threads[CALLERS + 2];
    bool started[CALLERS + 2] = {false};
    mp_error error;
    w.caller_count = kind->at_once ? kind->callers : 1 + of(kind->callers);
    if (kind->special && kind->special->begin)
        kind->special->begin();
    for (int i = 0; i < w.caller_count; i++)
        w.callers[i] = (caller){.number = i, .fibre = sim_self()};
    for (int i = 0; i < w.caller_count; i++)
        started[i] = mp_thread_start(&threads[i], "caller", sim_caller_main, &w.callers[i], &error) == MP_OK;
    if (kind->shutdown)
        for (int i = 0, n = 1 + of(2); i < n; i++)
            started[CALLERS + i] = mp_thread_start(&threads[CALLERS + i], "closer", closer_main, NULL, &error) == MP_OK;
    for (int i = 0; i < CALLERS + 2; i++)
        if (started[i])
            mp_thread_join(&threads[i]);
    if (w.offered)
        mp_ticket_release(w.offered);
    w.offered = NULL;
    sim_faults(false); /* no faults from here on: the end must be clean */
    if (kind->special && kind->special->finish)
        kind->special->finish();
    begin_close();
    uint64_t grace_ns = percent(50) ? 0 : sim_below(SECOND), began_ns = sim_now();
    int late_jumps = sim_late_jumps();
    mp_registry_close(w.registry, grace_ns);
    /* Workers that have not left two seconds after the grace period are abandoned. */
    if (sim_late_jumps() == late_jumps && sim_now() > began_ns + grace_ns + 2 * SECOND + SECOND / 5)
        sim_fail("a close with %.3f s of grace took %.3f s", (double)grace_ns * 1e-9,
                 (double)(sim_now() - began_ns) * 1e-9);
    check_after_close();
    for (int i = 0; i < w.kept_count; i++)
        sim_check_end(&w.kept[i]);
    mp_registry *registry = w.registry;
    w.registry = NULL;
    mp_registry_destroy(registry);
    for (int i = 0; i < w.kept_count; i++) {
        sim_check_end(&w.kept[i]);
        w.kept[i].call->destroyed_is_error = false;
        mp_ticket_release(w.kept[i].ticket);
    }
    sim_fakes_end();
}

static const sim_world worlds[] = {
    {.name = "calls", .body = registry_world, .callers = 4, .keys = 2, .operations = 15},
    {.name = "memory", .body = registry_world, .callers = 4, .keys = 3, .operations = 25, .memory = true},
    {.name = "swaps", .body = registry_world, .callers = 4, .keys = 2, .operations = 55, .swaps = 60},
    {.name = "shutdown",
     .body = registry_world,
     .callers = 4,
     .keys = 3,
     .operations = 35,
     .swaps = 30,
     .shutdown = true},
    {.name = "faults", .body = registry_world, .callers = 4, .keys = 2, .operations = 35, .swaps = 20, .faults = true},
    {.name = "storm",
     .body = registry_world,
     .callers = 5,
     .keys = 3,
     .operations = 45,
     .swaps = 30,
     .memory = true,
     .shutdown = true,
     .faults = true},
    {.name = "five", .body = registry_world, .callers = 5, .keys = 5, .operations = 10, .at_once = true},
    {.name = "streams", .body = registry_world, .callers = 3, .keys = 1, .streams = true, .at_once = true},
    {.name = "stuck", .body = registry_world, .callers = 4, .keys = 2, .operations = 25, .swaps = 20, .stuck = true},
    {.name = "two", .body = registry_world, .callers = 5, .keys = 1, .operations = 10, .at_once = true},
    {.name = "cold", .body = registry_world, .callers = 5, .keys = 2, .special = &sim_cold},
    {.name = "evictions", .body = registry_world, .callers = 4, .keys = 3, .operations = 40, .special = &sim_evictions},
    {.name = "reclaim", .body = registry_world, .callers = 3, .keys = 5, .memory = true, .special = &sim_reclaim},
    {.name = "deadlines", .body = registry_world, .callers = 5, .keys = 2, .special = &sim_deadlines},
    {.name = "flapping", .body = registry_world, .callers = 5, .keys = 1, .special = &sim_flapping},
    {.name = "crashes", .body = registry_world, .callers = 4, .keys = 2, .special = &sim_crashes},
    {.name = "replaced", .body = registry_world, .callers = 1, .keys = 1, .special = &sim_replaced},
    {.name = "chaos", .body = registry_world, .callers = 4, .keys = 2, .operations = 30, .special = &sim_chaos},
    {.name = "ahead", .body = registry_world, .callers = 1, .keys = 1, .special = &sim_ahead},
    {.name = "balance", .body = registry_world, .callers = 1, .keys = 1, .special = &sim_balance},
    {.name = "jumps", .body = registry_world, .callers = 4, .keys = 2, .operations = 10, .special = &sim_jumps},
    {.name = "cut", .body = registry_world, .callers = 4, .keys = 2, .shutdown = true, .special = &sim_cut},
    {.name = "masks", .body = registry_world, .callers = 4, .keys = 2, .operations = 10, .special = &sim_masks},
    {.name = "lost", .body = registry_world, .callers = 4, .keys = 2, .operations = 10, .special = &sim_lost},
    {.name = "thrash",
     .body = registry_world,
     .callers = 5,
     .keys = 3,
     .operations = 30,
     .memory = true,
     .special = &sim_thrash},
    {.name = "kills", .body = registry_world, .callers = 4, .keys = 2, .operations = 5, .special = &sim_kills},
    {.name = "tenants", .body = registry_world, .callers = 1, .keys = 1, .special = &sim_tenants},
    {.name = "crowd", .body = registry_world, .callers = 1, .keys = 1, .crowd = true, .special = &sim_tenants},
    {.name = "nudges", .body = registry_world, .callers = 4, .keys = 2, .operations = 15, .nudge = true},
    {.name = "swap nudges",
     .body = registry_world,
     .callers = 4,
     .keys = 2,
     .operations = 55,
     .swaps = 60,
     .nudge = true},
    {.name = "cut nudges",
     .body = registry_world,
     .callers = 4,
     .keys = 3,
     .operations = 35,
     .swaps = 30,
     .shutdown = true,
     .nudge = true},
    {.name = "mask nudges",
     .body = registry_world,
     .callers = 4,
     .keys = 2,
     .operations = 10,
     .special = &sim_masks,
     .nudge = true},
    {.name = "forks",
     .body = registry_world,
     .callers = 4,
     .keys = 2,
     .operations = 25,
     .swaps = 50,
     .special = &sim_forks},
    {.name = "cancels", .body = registry_world, .callers = 4, .keys = 2, .operations = 10, .special = &sim_cancels},
    {.name = "batches", .body = registry_world, .callers = 1, .keys = 1, .special = &sim_batches},
    {.name = "tiny", .body = sim_tiny},
    {.name = "pool", .body = sim_parts_pool, .callers = 3},
    {.name = "cores", .body = sim_parts_cores, .callers = 4},
    {.name = "governor", .body = sim_parts_governor, .callers = 4},
    {.name = "guards", .body = sim_parts_guards, .callers = 4, .nudge = true},
    {.name = "ticks", .body = sim_parts_ticks, .callers = 3},
};

const sim_world *sim_world_find(const char *name) {
    for (size_t i = 0; i < sizeof(worlds) / sizeof(worlds[0]); i++)
        if (strcmp(worlds[i].name, name) == 0)
            return &worlds[i];
    return NULL;
}

sim_setup sim_world_setup(const sim_world *world, sim_scheduler scheduler, int depth, uint64_t seed) {
    uint64_t dice = (seed + 1) * 0x9E3779B97F4A7C15u;
    dice ^= dice >> 29;
    sim_setup setup = {.world = world->name, .seed = seed, .scheduler = scheduler, .depth = depth};
    static const uint32_t rates[] = {0, 0, 60, 600};
    setup.spurious = rates[dice & 3];
    setup.late = rates[dice >> 2 & 3] / 2;
    if (!world->callers || !world->keys || world->special == &sim_jumps ||
        world->special == &sim_tenants) /* their checks rely on the clock */
        setup.late = 0;
    setup.nudge = world->nudge;
    setup.nudge_polls = world->nudge && !world->keys; /* a part alone has nothing that changes without a wake-up */
    if (world->nudge)
        setup.spurious = setup.late = 0;
    if (world->crowd)
        setup.step_limit = 100 * 1000 * 1000;
    if (world->faults) {
        static const uint32_t refusals[] = {0, 100, 1000, 6000};
        setup.alloc = refusals[dice >> 4 & 3];
        setup.thread = refusals[dice >> 6 & 3] * 4;
    }
    return setup;
}

#endif
