/* Times of single parts of the registry on a made-up clock (clock_fixture.h): CPU allocator, governor, injected faults,
 * and the clock of requests. */
#include "base/sys.h"

#ifdef MP_SEAM

#include <stdlib.h>

#include "base/cpu.h"
#include "base/options.h"
#include "clock_fixture.h"
#include "registry/chaos.h"

static mp_error error;

/* --- CPUs --- */

static mp_cpu_allocator *open_allocator(int threads) {
    mp_cpu_allocator *allocator;
    MP_CHECK_OK(mp_cpu_allocator_open(threads, false, &allocator, &error), &error);
    return allocator;
}

/* Reports a lease whose threads lost time, and expects the number of threads that later leases should use. */
static void report(mp_cpu_allocator *allocator, int threads, uint64_t watched_ns, uint64_t lost_ns, int expected) {
    mp_lease lease;
    mp_core_lease at;
    MP_CHECK(mp_cpu_allocator_lend(allocator, 0, threads, &lease, &at, NULL, NULL));
    MP_CHECK_INT(lease.threads, threads);
    lease.barrier_bound = true;
    lease.watched_ns = watched_ns;
    lease.lost_ns = lost_ns;
    mp_cpu_allocator_return(allocator, &lease, &at, false);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), expected);
}

/* Shares of lost time are judged after 10 ms, and each limit of the share is exact. */
MP_TEST(registry_clock_lost_time) {
    static const struct {
        int threads, lost_ns, expected; /* `lost_ns`: in 10,000,000 ns */
    } rows[] = {
        {8, 2000000, 8}, {8, 2000001, 7}, /* a fifth of the time */
        {2, 4000000, 2}, {2, 4000001, 1}, /* 0.8 of the share of a thread */
        {8, 6000000, 7}, {8, 6000001, 4}, /* 0.6 of the time */
        {5, 10000000, 2},
    };
    start_clock(1);
    mp_cpu_allocator *allocator = open_allocator(8);
    report(allocator, 8, 9999999, 9999999, 8);
    report(allocator, 8, 1, 0, 4);
    mp_cpu_allocator_close(allocator);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        allocator = open_allocator(rows[i].threads);
        report(allocator, rows[i].threads, 10000000, (uint64_t)rows[i].lost_ns, rows[i].expected);
        mp_cpu_allocator_close(allocator);
    }
    stop_clock();
}

/* `mp_cpu_allocator_barrier_threads` rises at the earliest 100 ms after it fell, and only if the threads lose less than
 * 0.4 of a thread's share. */
MP_TEST(registry_clock_threads_rise) {
    start_clock(1); /* no rise has happened yet, although the clock is younger than 100 ms */
    mp_cpu_allocator *allocator = open_allocator(4);
    report(allocator, 4, 10000000, 10000000, 2);
    clock_ns += 100 * MS - 1;
    report(allocator, 2, 10000000, 0, 2);
    clock_ns++;
    report(allocator, 2, 10000000, 1333334, 2); /* (2 + 1) shares are more than 0.4 */
    report(allocator, 1, 10000000, 0, 2);       /* fewer threads than are allowed tell nothing */
    report(allocator, 2, 10000000, 1333333, 3);
    report(allocator, 3, 10000000, 1000000, 3); /* exactly 0.4 */
    report(allocator, 3, 10000000, 999999, 4);
    report(allocator, 4, 10000000, 0, 4);
    mp_cpu_allocator_close(allocator);
    stop_clock();
}

static uint64_t switches;

static uint64_t read_switches(void) { return switches; }

/* A thread does not spin while it suffers more than 100 involuntary context switches per second. */
MP_TEST(registry_clock_spins_unless_crowded) {
    start_clock(1000 * SECOND);
    switches = 1000;
    mp_sys_table.involuntary_switches = read_switches;
    mp_cpu_allocator *allocator = open_allocator(2);
    mp_spin_rule rule = mp_cpu_allocator_spin_rule(allocator, 77);
    MP_CHECK_INT(rule.spin_ns, 77);
    for (int i = 0; i < 4; i++) {
        static const uint64_t more[] = {0, 10, 11, 0}; /* switches in 100 ms */
        switches += more[i];
        bool may = rule.begin(rule.arg);
        MP_CHECK(may == (i != 2));
        MP_CHECK_INT(mp_cpu_allocator_count(allocator).spinning, may);
        if (may)
            rule.end(rule.arg);
        MP_CHECK_INT(mp_cpu_allocator_count(allocator).spinning, 0);
        clock_ns += 100 * MS;
    }
    mp_cpu_allocator_close(allocator);
    stop_clock();
}

static mp_cpu_allocator *returned_to;
static mp_lease returned;
static mp_core_lease returned_at;

static void return_a_lease(void) { mp_cpu_allocator_return(returned_to, &returned, &returned_at, false); }

/* A thread that waits for CPUs asks every 20 ms whether to give up. Without that question it has no deadline. */
MP_TEST(registry_clock_waits_for_cpus) {
    mp_lease lease;
    mp_core_lease at;
    start_clock(1000 * SECOND);
    mp_cpu_allocator *allocator = returned_to = open_allocator(1);
    MP_CHECK(mp_cpu_allocator_lend(allocator, 0, 1, &returned, &returned_at, NULL, NULL));
    asked = 0;
    give_up_call = 3;
    MP_CHECK(!mp_cpu_allocator_lend(allocator, 0, 1, &lease, &at, give_up_at, NULL));
    MP_CHECK_INT(asked, 3);
    EXPECT_WAITS(20 * MS, 20 * MS); /* asks before each wait */
    in_wait = return_a_lease;
    MP_CHECK(mp_cpu_allocator_lend(allocator, 0, 1, &lease, &at, NULL, NULL));
    EXPECT_WAITS(0);
    in_wait = NULL;
    mp_cpu_allocator_return(allocator, &lease, &at, false);
    mp_cpu_allocator_close(allocator);
    stop_clock();
}

/* --- memory --- */

enum { LIMIT = 1000 };

/* --- injected faults --- */

static mp_engine *wrap(scene *scene, mp_chaos_rule rule) {
    scene->services->chaos = rule;
    mp_worker *worker = scene_ready(scene);
    MP_CHECK_OK(mp_chaos_wrap(scene->services, "a", 0, &worker->engine, &error), &error);
    return worker->engine;
}

static void step_once(mp_engine *engine, bool is_cancelled) {
    _Atomic int cancelled = is_cancelled;
    mp_lease lease = {.cancelled = &cancelled, .threads = 1};
    wait_count = 0;
    engine->ops->step(engine, &lease, &(mp_plan){0}, NULL);
}

/* A stall sleeps a sixteenth of the limit at a time, at most 50 ms. It ends after four times the limit or, once the
 * worker is abandoned, when the limit is over. */
MP_TEST(registry_clock_stalls) {
    scene scene;
    open_scene(&scene);
    mp_engine *engine = wrap(&scene, (mp_chaos_rule){.stall = 1});
    scene.services->stall_timeout_ns = 240; /* 15 sleeps of 16 ns */
    step_once(engine, false);
    MP_CHECK_INT(wait_count, 60);
    MP_CHECK_INT(waits[0], 16);
    step_once(engine, true);
    MP_CHECK_INT(wait_count, 16);
    scene.services->stall_timeout_ns = 800 * MS;
    step_once(engine, false);
    MP_CHECK_INT(wait_count, 64);
    MP_CHECK_INT(waits[0], 50 * MS);
    scene.services->stall_timeout_ns = 799 * MS;
    step_once(engine, true);
    MP_CHECK_INT(wait_count, 16);
    MP_CHECK_INT(waits[0], 799 * MS / 16 + 1);
    close_scene(&scene);
}

/* --- the clock of requests --- */

static uint64_t requests_clock(mp_maintenance *self) {
    uint64_t now;
    uint64_t result = mp_maintenance_clock(self, &now);
    MP_CHECK_INT(now, clock_ns);
    return result;
}

/* A reader ticks if the last tick is more than 375 ms old. A gap of more than 500 ms between two ticks is a pause. */
MP_TEST(registry_clock_of_requests) {
    static mp_maintenance self;
    mp_log_set_level(MP_LOG_INFO);
    start_clock(1000 * SECOND);
    mp_maintenance_init(&self, NULL, NULL);
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    mp_maintenance_begin_timed(&self); /* no thread runs that could tick */
    MP_CHECK_INT(self.count, 0);
    mp_maintenance_end_timed(&self);
    self.running = true;
    mp_maintenance_begin_timed(&self);
    MP_CHECK_INT(self.count, 1);
    clock_ns += 375 * MS;
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    MP_CHECK_INT(self.count, 1);
    clock_ns++;
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    MP_CHECK_INT(self.count, 2);
    clock_ns += 500 * MS;
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    MP_CHECK_INT(self.count, 3);
    clock_ns += 500 * MS + 7;
    MP_CHECK_INT(requests_clock(&self), clock_ns - 7);
    MP_CHECK_INT(requests_clock(&self), clock_ns - 7);
    clock_ns += 2000 * MS;
    MP_CHECK_INT(requests_clock(&self), clock_ns - 1500 * MS - 7);
    MP_CHECK_INT(requests_clock(&self), clock_ns - 1500 * MS - 7);
    expect_record("The process did not run for 2.0 s; deadlines of requests are extended by this time");
    MP_CHECK_INT(self.count, 5);
    mp_maintenance_end_timed(&self);
    for (int i = 1; i <= 8; i++) { /* the last of eight ticks without a request with a limit stops the ticks */
        clock_ns += 375 * MS + 1;
        requests_clock(&self);
        MP_CHECK_INT(self.count, 5 + i);
        MP_CHECK_INT(self.beats[self.count & 1].tick_ns, i < 8 ? clock_ns : 0);
    }
    clock_ns += 2000 * MS;
    MP_CHECK_INT(requests_clock(&self), clock_ns - 1500 * MS - 7); /* no pause: nothing ticked */
    MP_CHECK_INT(self.count, 13);
    self.running = false;
    mp_maintenance_deinit(&self);
    stop_clock();
}

#endif
