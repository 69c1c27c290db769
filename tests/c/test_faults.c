/* Many requests at once, changes of the memory limit and other faults, on a registry with fake models.
 * Row numbers refer to the table in tests/FAULTS.md. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/sys.h"
#include "mp_test.h"
#include "registry/faults.h"
#include "registry/governor.h"
#include "registry/histogram.h"
#include "registry/maintenance.h"
#include "test_registry_fake.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SHARE = 50 }; /* sanitizers are slow: run a fiftieth of the requests */
#else
enum { SHARE = 1 };
#endif

static uint64_t resident_bytes(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long long all = 0, resident = 0;
    if (file) {
        if (fscanf(file, "%llu %llu", &all, &resident) != 2)
            resident = 0;
        fclose(file);
    }
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* --- row 20: 100,000 requests are cancelled --- */

enum { CANCELLERS = 4 };

typedef struct storm {
    mp_registry *registry;
    int calls;
    _Atomic int number, ok, cancelled, other, refused;
} storm;

static void canceller(void *arg) {
    storm *storm = arg;
    mp_test_random random = {(uint64_t)atomic_fetch_add(&storm->number, 1) + 77};
    for (int i = 0; i < storm->calls; i++) {
        uint64_t dice = mp_test_random_u64(&random);
        mp_submit_options options = {.priority = (uint8_t)(dice % 5), .service_class = (uint8_t)(dice >> 8) % 2};
        mp_ticket *ticket;
        mp_error error;
        mp_status status =
            mp_registry_submit(storm->registry, "a", &fake_call_create(1)->base, &options, &ticket, &error);
        MP_CHECK_STATUS(status, MP_OK, &error);
        if ((dice >> 16) % 4 == 0) { /* gives the request time to start, or to end */
            uint64_t progress;
            mp_ticket_wait(ticket, 0, mp_sys_now_ns() + (dice >> 20) % 50000, &progress);
        }
        mp_ticket_cancel(ticket);
        if ((dice >> 40) % 2)
            mp_ticket_cancel(ticket);
        status = fake_wait(ticket, NULL);
        MP_CHECK(((fake_call *)mp_ticket_request(ticket))->finished <= 1);
        atomic_fetch_add(status == MP_OK ? &storm->ok : status == MP_CANCELLED ? &storm->cancelled : &storm->other, 1);
        mp_ticket_release(ticket);
    }
}

MP_TEST_SECONDS(registry_fault_cancellation_storm_frees_every_slot, 120) {
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2, .max_workers = 2});
    mp_error error;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    storm storm = {.registry = registry, .calls = 100000 / CANCELLERS / SHARE};
    mp_thread threads[CANCELLERS];
    for (int i = 0; i < CANCELLERS; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "cancels", canceller, &storm, &error), &error);
    for (int i = 0; i < CANCELLERS; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK_INT(storm.ok + storm.cancelled, CANCELLERS * storm.calls);
    MP_CHECK(storm.cancelled > CANCELLERS * storm.calls / 10);
    fake_until_state(registry, "a", "ready");
    mp_entry_info info;
    fake_info(registry, "a", &info);
    MP_CHECK_INT(info.queued + info.running + info.busy, 0);
    mp_registry_stats stats = fake_stats(registry);
    MP_CHECK_INT(stats.threads_leased, 0);
    MP_CHECK_INT(stats.memory_used, 1000 + 100 * (uint64_t)info.workers);
    MP_CHECK_INT(stats.total_requests, CANCELLERS * storm.calls);
    fake_until_no_calls();
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

/* --- row 21: a million requests into a full queue, then into the queue of a running worker --- */

static void flooder(void *arg) {
    storm *storm = arg;
    mp_error error;
    for (int i = 0; i < storm->calls; i++) {
        mp_submit_options options = {.priority = 2, .fail_fast = true};
        mp_ticket *ticket;
        mp_status status =
            mp_registry_submit(storm->registry, "a", &fake_call_create(1)->base, &options, &ticket, &error);
        if (status == MP_OVERLOADED) {
            MP_CHECK(error.code == status && error.message[0]);
            atomic_fetch_add(&storm->refused, 1);
        } else {
            MP_CHECK_STATUS(status, MP_OK, &error);
            atomic_fetch_add(&storm->ok, 1);
            mp_ticket_release(ticket); /* releasing the last reference cancels the request */
        }
    }
}

MP_TEST_SECONDS(registry_fault_full_queue_storm_leaves_memory_flat, 240) {
    enum { FLOODERS = 4, WAITING = 100 };
    fake fake;
    fake_init(&fake);
    fake.memory = 1;
    mp_registry_config config = {.threads = 1, .max_workers = 1};
    config.queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] = WAITING;
    mp_registry *registry = fake_registry_of(config);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    atomic_store(&fake.hold, true);
    mp_ticket *waiting[WAITING + 1];
    for (int i = 0; i <= WAITING; i++) {
        fake_call *call = fake_call_create(1);
        call->memory = 1;
        waiting[i] = fake_submit(registry, "a", call, NULL);
        if (i == 0)
            fake_until(&fake.admitted, 1);
    }
    uint64_t requests = mp_alloc_bytes(MP_TAG_REQUEST), used = fake_stats(registry).memory_used, rss = 0;
    storm storm = {.registry = registry};
    for (int part = 0; part < 10; part++) {
        mp_thread threads[FLOODERS];
        storm.calls = 1000000 / 10 / FLOODERS / SHARE;
        for (int i = 0; i < FLOODERS; i++)
            MP_CHECK_OK(mp_thread_start(&threads[i], "flood", flooder, &storm, &error), &error);
        for (int i = 0; i < FLOODERS; i++)
            mp_thread_join(&threads[i]);
        MP_CHECK_INT(mp_alloc_bytes(MP_TAG_REQUEST), requests);
        MP_CHECK_INT(fake_stats(registry).memory_used, used);
        if (part == 0)
            rss = resident_bytes();
    }
    MP_CHECK_INT(storm.ok, 0);
    MP_CHECK_INT(storm.refused, FLOODERS * storm.calls * 10);
    if (SHARE == 1) /* sanitizers keep freed memory for a while */
        MP_CHECK(resident_bytes() <= rss + (2u << 20));
    mp_registry_stats stats = fake_stats(registry);
    MP_CHECK_INT(stats.queue_full_rejections, storm.refused);
    MP_CHECK_INT(stats.total_requests, storm.refused + WAITING + 1);
    atomic_store(&fake.hold, false);
    for (int i = 0; i <= WAITING; i++)
        MP_CHECK_INT(fake_finish(waiting[i]), MP_OK); /* accepted requests are served */
    /* The same flood while the worker runs: accepted + refused = submitted. */
    storm.calls = 20000 / SHARE;
    int refused = storm.refused;
    mp_thread threads[FLOODERS];
    for (int i = 0; i < FLOODERS; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "flood", flooder, &storm, &error), &error);
    for (int i = 0; i < FLOODERS; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK_INT(storm.ok + storm.refused - refused, FLOODERS * storm.calls);
    fake_end(registry);
}

/* --- row 24: a thousand threads send requests to a cold model --- */

MP_TEST_SECONDS(registry_fault_herd_of_a_thousand_causes_one_load, 120) {
    enum { MANY = SHARE == 1 ? 1000 : 100 };
    fake fake;
    fake_init(&fake);
    fake.workers = 4;
    fake.load_ns = FAKE_MS(200);
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2});
    fake_add(registry, "a", &fake, false);
    herd herd = {.registry = registry, .key = "a"};
    static mp_thread threads[MANY];
    mp_error error;
    for (int i = 0; i < MANY; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "herd", fake_herd_member, &herd, &error), &error);
    for (int i = 0; i < MANY; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK_INT(herd.ok, MANY);
    MP_CHECK_INT(fake.loads, 1);
    MP_CHECK_INT(fake.models, 1);
    MP_CHECK_INT(fake_stats(registry).loads, 1);
    MP_CHECK(fake_stats(registry).workers_spawned <= 2);
    fake_end(registry);
}

/* --- row 25: a load hangs: waiting requests end at their deadlines, and no second load starts --- */

MP_TEST_SECONDS(registry_fault_spawn_hangs_waiters_leave_by_their_deadlines, 60) {
    fake fake;
    fake_init(&fake);
    atomic_store(&fake.load_stalls, true);
    mp_registry *registry = fake_registry(2, 0);
    fake_add(registry, "a", &fake, false);
    mp_error error;
    enum { WAITERS = 4 };
    mp_ticket *tickets[WAITERS];
    for (int i = 0; i < WAITERS; i++) {
        mp_submit_options options = {.priority = 2, .deadline_ns = fake_in_ms(20 + 20 * (uint64_t)i)};
        MP_CHECK_OK(mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &tickets[i], &error),
                    &error);
    }
    for (int i = 0; i < WAITERS; i++) {
        MP_CHECK_STATUS(fake_wait(tickets[i], &error), MP_TIMEOUT, &error);
        MP_CHECK_INT(((fake_call *)mp_ticket_request(tickets[i]))->starts, 0);
        mp_ticket_release(tickets[i]);
    }
    MP_CHECK_STATUS(mp_registry_load(registry, "a", false, fake_in_ms(30), &error), MP_TIMEOUT, &error);
    MP_CHECK_INT(fake.loads, 1);
    atomic_store(&fake.load_stalls, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(10000), &error), &error);
    MP_CHECK_INT(fake.loads, 1);
    fake_end(registry);
}

/* --- row 27: a model whose workers always die becomes failed, and restarts do not loop --- */

MP_TEST_SECONDS(registry_fault_crash_loop_does_not_spin, 60) {
    fake fake;
    fake_init(&fake);
    fake.workers = 4;
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .breaker_threshold = -1});
    fake_add(registry, "a", &fake, false);
    mp_status status = MP_OK;
    mp_error error;
    uint64_t end = fake_in_ms(20000);
    for (int tries = 0; status != MP_NO_WORKERS; tries++) {
        MP_CHECK(mp_sys_now_ns() < end);
        fake_call *call = fake_call_create(1);
        call->fault = MP_INTERNAL;
        call->faults = 2;
        mp_ticket *ticket = fake_submit(registry, "a", call, &status);
        if (ticket) {
            status = fake_wait(ticket, &error);
            mp_ticket_release(ticket);
        }
    }
    mp_registry_stats before = fake_stats(registry);
    end = fake_in_ms(300);
    int refused = 0;
    while (mp_sys_now_ns() < end || refused < 100) {
        MP_CHECK(!fake_submit(registry, "a", fake_call_create(1), &status));
        MP_CHECK_INT(status, MP_NO_WORKERS);
        refused++;
    }
    mp_registry_stats after = fake_stats(registry);
    MP_CHECK_INT(after.workers_spawned, before.workers_spawned);
    MP_CHECK_INT(after.loads, before.loads);
    MP_CHECK_INT(after.threads_created, before.threads_created);
    fake_end(registry);
}

/* --- row 44: another program kills the worker process again and again --- */

MP_TEST_SECONDS(registry_fault_external_kills_take_no_model_down, 60) {
    enum { KILLS = 10 };
    fake fake;
    mp_entry_info info;
    mp_status status;
    fake_init(&fake);
    fake.external_kill = true;
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .breaker_threshold = 2});
    fake_add(registry, "a", &fake, false);
    for (int i = 0; i < KILLS / 2; i++) { /* each request survives one kill and ends with the next */
        fake_call *call = fake_call_create(1);
        call->fault = MP_RECV;
        call->faults = 2;
        call->fingerprint = 17;
        mp_ticket *ticket = fake_submit(registry, "a", call, &status);
        MP_CHECK(ticket);
        mp_error error;
        MP_CHECK_STATUS(fake_wait(ticket, &error), MP_RECV, &error);
        mp_ticket_release(ticket);
        fake_info(registry, "a", &info);
        MP_CHECK_STR(info.breaker, "closed");
    }
    fake_call *call = fake_call_create(1);
    call->fingerprint = 17; /* the kills put no request into quarantine */
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), MP_OK); /* the backoff has a limit */
    fake_end(registry);
}

/* --- row 46: the process is stopped for longer than the limits of its requests --- */

/* Runs in a child. Returns 0 if the running and the queued requests succeed although the process was stopped. */
static int serve_through_a_stop(int started) {
    enum { UNITS = 8 };
    fake fake;
    fake_init(&fake);
    fake.step_ns = FAKE_MS(50);
    fake.step_units = 1;
    fake.plan_items = 1;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1});
    mp_error error;
    fake_add(registry, "a", &fake, false);
    mp_ticket *tickets[4];
    for (int i = 0; i < 4; i++) { /* with a deadline and with patience; two of them run, two are queued */
        mp_submit_options options = {.priority = 2, .policy = MP_POLICY_SEQUENTIAL};
        *(i % 2 ? &options.patience_ns : &options.deadline_ns) = i % 2 ? FAKE_MS(2500) : fake_in_ms(3500);
        if (mp_registry_submit(registry, "a", &fake_call_create(i ? 1 : UNITS)->base, &options, &tickets[i], &error))
            return 10 + i;
    }
    fake_until(&fake.steps, 1);
    char byte = 1;
    if (write(started, &byte, 1) != 1)
        return 20;
    int failed = 0;
    for (int i = 0; i < 4; i++) {
        failed |= (fake_wait(tickets[i], &error) != MP_OK) << i;
        mp_ticket_release(tickets[i]);
    }
    fake_end(registry);
    return failed;
}

/* Whichever thread reads the clock of requests first after a pause: the pause is not in it. */
MP_TEST(registry_fault_clock_of_requests_stops_during_a_pause) {
    mp_maintenance maintenance = {0};
    mp_maintenance_init(&maintenance, NULL, NULL);
    uint64_t now = mp_sys_now_ns(), last = now / 2, clock; /* the clock counts from boot, maybe a minute ago */
    MP_CHECK(mp_maintenance_clock(&maintenance, NULL) >= now); /* without ticks it runs on */
    atomic_store(&maintenance.beats[0].tick_ns, last);
    MP_CHECK_INT(mp_maintenance_clock(&maintenance, NULL), last + MP_PAUSE_NS);
    clock = mp_maintenance_clock(&maintenance, NULL); /* the first read has ticked: the clock continues */
    MP_CHECK(clock >= last + MP_PAUSE_NS && clock < now);
    MP_CHECK_INT(atomic_load(&maintenance.count), 1);
    mp_maintenance_deinit(&maintenance);
}

/* The maintenance thread is held in a sweep. Workers that read the clock of requests keep it running, so the request
 * that they serve ends at its deadline. */
MP_TEST(registry_fault_deadlines_hold_while_a_sweep_is_held) {
    fake fake;
    fake_init(&fake);
    fake.model_bytes = 950ull << 20; /* memory pressure is critical: the sweep measures the model */
    fake.step_ns = FAKE_MS(10);
    fake.step_units = 1;
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .maintenance_every_ns = FAKE_MS(20)});
    mp_error error;
    fake_add(registry, "a", &fake, false);
    mp_ticket *ticket;
    mp_submit_options options = {.deadline_ns = fake_in_ms(1500), .priority = 2, .patience_ns = MP_FOREVER};
    MP_CHECK_OK(mp_registry_submit(registry, "a", &fake_call_create(1000 * 1000)->base, &options, &ticket, &error),
                &error);
    fake_until(&fake.steps, 1);
    atomic_store(&fake.bytes_hold, true);
    fake_until(&fake.in_bytes, 1);
    MP_CHECK(mp_ticket_wait(ticket, UINT64_MAX - 1, fake_in_ms(12000), NULL) && "it ends although the sweep is held");
    MP_CHECK(atomic_load(&fake.in_bytes) >= 1);
    atomic_store(&fake.bytes_hold, false);
    MP_CHECK_INT(fake_wait(ticket, &error), MP_TIMEOUT);
    mp_ticket_release(ticket);
    fake_end(registry);
}

MP_TEST_SECONDS(registry_fault_time_of_a_stopped_process_is_not_charged, 60) {
#if defined(__SANITIZE_THREAD__)
    MP_SKIP("ThreadSanitizer does not follow a fork of a process with threads");
#endif
    int ends[2], how;
    char byte;
    MP_CHECK_INT(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0)
        _exit(serve_through_a_stop(ends[1]));
    MP_CHECK(child > 0 && read(ends[0], &byte, 1) == 1);
    MP_CHECK_INT(kill(child, SIGSTOP), 0);
    mp_sys_sleep_ns(FAKE_MS(4000));
    MP_CHECK_INT(kill(child, SIGCONT), 0);
    MP_CHECK(waitpid(child, &how, 0) == child);
    MP_CHECK_INT(how, 0);
    close(ends[0]);
    close(ends[1]);
}

/* --- row 26: faults and successes in any order --- */

MP_TEST(registry_fault_breaker_flaps_within_its_rule) {
    mp_test_random random = {99};
    int opened = 0, closed = 0, late = 0;
    for (int world = 0; world < 300; world++) {
        mp_breaker breaker = {0};
        mp_breaker_rule rule = {.threshold = 1 + world % 6,
                                .probes = 1 + world % 3,
                                .successes = 1 + world % 4,
                                .window_ns = FAKE_MS(60),
                                .backoff_ns = FAKE_MS(100)};
        uint64_t now = FAKE_MS(1000), open_since = 0;
        uint32_t flying[16];
        int flights = 0;
        for (int i = 0; i < 400; i++) {
            uint64_t dice = mp_test_random_u64(&random);
            now += dice % FAKE_MS(9);
            mp_breaker_state was = breaker.state;
            switch ((dice >> 32) % 3) {
            case 0: {
                uint32_t probe;
                uint64_t left;
                bool in = mp_breaker_ask(&breaker, &rule, now, &probe, &left);
                if (was == MP_BREAKER_CLOSED)
                    MP_CHECK(in && !probe);
                if (was == MP_BREAKER_OPEN && now < open_since + rule.backoff_ns) {
                    MP_CHECK(!in);
                    MP_CHECK_INT(left, open_since + rule.backoff_ns - now); /* the remaining backoff is returned */
                }
                if (was == MP_BREAKER_OPEN && now >= open_since + rule.backoff_ns)
                    MP_CHECK(in && probe); /* the breaker does not stay open forever */
                if (in && probe && flights < 16)
                    flying[flights++] = probe;
                else if (in && probe)
                    mp_breaker_end(&breaker, &rule, probe, false);
                break;
            }
            case 1:
                if (mp_breaker_fault(&breaker, &rule, now)) {
                    MP_CHECK(was != MP_BREAKER_OPEN);
                    MP_CHECK_INT(breaker.state, MP_BREAKER_OPEN);
                    open_since = now;
                    opened++;
                }
                break;
            default:
                if (flights) {
                    uint32_t probe = flying[--flights];
                    bool stale = probe != breaker.epoch || breaker.state != MP_BREAKER_HALF_OPEN;
                    mp_breaker_end(&breaker, &rule, probe, (dice >> 40) % 4 != 0);
                    if (stale)
                        MP_CHECK_INT(breaker.state, was); /* results of probes of earlier openings are ignored */
                    late += stale;
                    closed += was != MP_BREAKER_CLOSED && breaker.state == MP_BREAKER_CLOSED;
                }
            }
            MP_CHECK(breaker.probing >= 0 && breaker.probing <= rule.probes);
            MP_CHECK(was != MP_BREAKER_OPEN || breaker.state != MP_BREAKER_CLOSED); /* never from open to closed */
        }
    }
    MP_CHECK(opened > 300 && closed > 300 && late > 100);
}

/* --- row 35: the memory limit drops suddenly --- */

MP_TEST_SECONDS(registry_fault_memory_step_evicts_idle_models, 60) {
    enum { MODELS = 5, MODEL = 10 * 1000 * 1000 };
    static const char *const keys[MODELS] = {"a", "b", "c", "d", "e"};
    fake fakes[MODELS];
    /* Use the governor of the process, whose limit the test can change as a cgroup would. */
    mp_governor *governor;
    mp_error error;
    MP_CHECK_OK(mp_governor_open(0, &governor, &error), &error);
    mp_budget *budget = mp_governor_budget(governor);
    atomic_store(&budget->limit, 100u * 1000 * 1000);
    mp_registry *registry;
    mp_registry_config config = {.threads = 2,
                                 .spin_ns = 1,
                                 .max_workers = 1,
                                 .maintenance_every_ns = FAKE_MS(10),
                                 .load_timeout_ns = FAKE_MS(200)};
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    for (int i = 0; i < MODELS; i++) {
        fake_init(&fakes[i]);
        fakes[i].model_bytes = MODEL;
        fake_add(registry, keys[i], &fakes[i], false);
        MP_CHECK_INT(fake_finish(fake_submit(registry, keys[i], fake_call_create(1), NULL)), MP_OK);
    }
    MP_CHECK(fake_stats(registry).memory_used > 5 * (uint64_t)MODEL);
    atomic_store(&fakes[0].hold, true); /* the least recently used model is busy */
    mp_ticket *busy = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fakes[0].in_steps, 1);
    uint64_t limit = 25u * 1000 * 1000;
    atomic_store(&budget->limit, limit);
    uint64_t end = fake_in_ms(10000);
    while (fake_stats(registry).memory_used > limit || fake_stats(registry).evictions < 3) { /* counted when freed */
        MP_CHECK(mp_sys_now_ns() < end);
        mp_sys_sleep_ns(FAKE_MS(1));
    }
    MP_CHECK(!mp_ticket_done(busy)); /* a busy model is not evicted */
    MP_CHECK_INT(fakes[0].models, 1);
    /* A model that does not fit together with the loaded ones fails with MEMORY_EXHAUSTED or replaces an idle model. */
    for (int i = 1; i < MODELS; i++) {
        mp_ticket *ticket = fake_submit(registry, keys[i], fake_call_create(1), NULL);
        mp_status status = fake_wait(ticket, &error);
        MP_CHECK(status == MP_OK || status == MP_MEMORY_EXHAUSTED);
        MP_CHECK(fake_stats(registry).memory_used <= limit);
        mp_ticket_release(ticket);
    }
    atomic_store(&fakes[0].hold, false);
    MP_CHECK_INT(fake_finish(busy), MP_OK);
    fake_end(registry);
    mp_governor_close(governor);
}

/* --- row 37: deadlines that pass in the queue and in a batch --- */

MP_TEST_SECONDS(registry_fault_expired_requests_never_start_and_others_complete, 60) {
    fake fake;
    fake_init(&fake);
    mp_registry_config config = {.threads = 1, .max_workers = 1};
    config.queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] = 100;
    mp_registry *registry = fake_registry_of(config);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    for (int round = 0; round < 10; round++) {
        atomic_store(&fake.hold, true);
        int in_steps = fake.in_steps;
        mp_ticket *first = fake_submit(registry, "a", fake_call_create(1), NULL);
        fake_until(&fake.in_steps, in_steps + 1);
        fake_call *calls[40];
        mp_ticket *tickets[40];
        for (int i = 0; i < 40; i++) {
            calls[i] = fake_call_create(1);
            mp_submit_options options = {.priority = 2, .deadline_ns = i % 2 ? fake_in_ms(5 + (uint64_t)i / 4) : 0};
            mp_status status = mp_registry_submit(registry, "a", &calls[i]->base, &options, &tickets[i], &error);
            if (status != MP_OK) { /* the deadline cannot be met: refused before it is queued */
                MP_CHECK(i % 2 && status == MP_TIMEOUT);
                tickets[i] = NULL;
            }
        }
        mp_sys_sleep_ns(FAKE_MS(4 + (uint64_t)round)); /* some deadlines have passed by now */
        uint64_t released = mp_sys_now_ns();
        atomic_store(&fake.hold, false);
        MP_CHECK_INT(fake_finish(first), MP_OK);
        for (int i = 0; i < 40; i++) {
            if (!tickets[i])
                continue;
            mp_status status = fake_wait(tickets[i], &error);
            uint64_t submitted, started, finished;
            mp_ticket_times(tickets[i], &submitted, &started, &finished);
            if (i % 2 == 0) {
                MP_CHECK_STATUS(status, MP_OK, &error);
                MP_CHECK_INT(calls[i]->finished, 1);
            } else {
                MP_CHECK(status == MP_OK || status == MP_TIMEOUT);
                if (submitted + FAKE_MS(5 + (uint64_t)i / 4) < released)
                    MP_CHECK_INT(calls[i]->starts, 0); /* expired while queued: never admitted */
                MP_CHECK_INT(calls[i]->finished, status == MP_OK);
            }
            mp_ticket_release(tickets[i]);
        }
    }
    fake_end(registry);
}

/* --- rows 5 and 6: one of two workers detects that the model files changed --- */

MP_TEST_SECONDS(registry_fault_changed_files_end_every_worker, 60) {
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2, .max_workers = 2});
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    mp_entry_info info;
    for (uint64_t end = fake_in_ms(10000); fake_info(registry, "a", &info), info.workers < 2;) {
        MP_CHECK(mp_sys_now_ns() < end);
        mp_sys_sleep_ns(FAKE_MS(1));
    }
    atomic_store(&fake.unhealthy, true);
    mp_error error;
    mp_status status = MP_OK;
    for (uint64_t end = fake_in_ms(5000); status == MP_OK && mp_sys_now_ns() < end; mp_sys_sleep_ns(FAKE_MS(20))) {
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
        status = fake_wait(ticket, &error);
        mp_ticket_release(ticket);
    }
    MP_CHECK_STATUS(status, MP_INTEGRITY, &error);
    fake_until_state(registry, "a", "failed");
    fake_until_freed(&fake); /* the other worker, which was idle, ends too */
    atomic_store(&fake.unhealthy, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(5000), &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_end(registry);
}

/* --- row 13: a busy worker is not abandoned --- */

MP_TEST_SECONDS(registry_fault_slow_steps_that_make_progress_are_not_abandoned, 60) {
    fake fake;
    fake_init(&fake);
    fake.step_ns = FAKE_MS(700);
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .stall_timeout_ns = FAKE_MS(250)});
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(fake_stats(registry).workers_dead, 0);
    fake_end(registry);
}

/* --- row 39: policy p2c with requests of different costs --- */

MP_TEST_SECONDS(registry_fault_p2c_load_stays_even, 60) {
    enum { WORKERS = 4, CALLS = 400 };
    fake fake;
    fake_init(&fake);
    fake.workers = WORKERS;
    fake.step_ns = FAKE_MS(1);
    fake.plan_items = 1;
    mp_registry_config config = {.threads = WORKERS, .max_workers = WORKERS};
    config.queue_capacity[MP_TEXT_EMBEDDING][MP_SERVICE_INTERACTIVE] = CALLS;
    mp_registry *registry = fake_registry_of(config);
    fake_add(registry, "a", &fake, false);
    mp_test_random random = {4};
    mp_error error;
    static mp_ticket *tickets[CALLS];
    mp_entry_info info = {0};
    uint64_t before[MP_WORKERS_MAX] = {0};
    atomic_store(&fake.hold, true); /* no step ends until all four workers run */
    mp_submit_options alone = {.priority = 2, .policy = MP_POLICY_SEQUENTIAL};
    int ready = 0;
    for (uint64_t end = fake_in_ms(10000); info.workers < WORKERS; fake_info(registry, "a", &info)) {
        MP_CHECK(mp_sys_now_ns() < end);
        if (ready < CALLS)
            MP_CHECK_OK(mp_registry_submit(registry, "a", &fake_call_create(1)->base, &alone, &tickets[ready++],
                                           &error), &error);
        mp_sys_sleep_ns(FAKE_MS(20)); /* each request starts one more worker */
    }
    atomic_store(&fake.hold, false);
    for (int i = 0; i < ready; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    fake_info(registry, "a", &info);
    for (int i = 0; i < info.worker_count; i++)
        before[i] = info.worker[i].served;
    for (int i = 0; i < CALLS; i++) {
        mp_submit_options options = {.priority = 2, .policy = MP_POLICY_P2C};
        fake_call *call = fake_call_create(1 + (uint32_t)(mp_test_random_u64(&random) % 8));
        MP_CHECK_OK(mp_registry_submit(registry, "a", &call->base, &options, &tickets[i], &error), &error);
    }
    for (int i = 0; i < CALLS; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    fake_info(registry, "a", &info);
    MP_CHECK_INT(info.worker_count, WORKERS);
    uint64_t most = 0, all = 0;
    for (int i = 0; i < info.worker_count; i++) {
        uint64_t served = info.worker[i].served - before[i];
        all += served;
        most = served > most ? served : most;
    }
    MP_CHECK_INT(all, CALLS);
    MP_CHECK((double)most * info.worker_count / (double)all < 2.0);
    fake_end(registry);
}

/* --- row 40: two independent registries; TSan detects shared state --- */

typedef struct twin {
    int threads;
    uint64_t memory;
    _Atomic int completed;
} twin;

static void run_twin(void *arg) {
    twin *twin = arg;
    for (int round = 0; round < 10; round++) {
        fake fake;
        fake_init(&fake);
        fake.workers = 2;
        fake.threads = twin->threads;
        mp_registry_config config = {.threads = twin->threads,
                                     .memory_limit = twin->memory,
                                     .spin_ns = 1,
                                     .max_workers = 2,
                                     .maintenance_every_ns = FAKE_MS(10)};
        mp_registry *registry;
        mp_error error;
        MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
        fake_add(registry, "a", &fake, false);
        for (int i = 0; i < 20; i++) {
            mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(2), NULL);
            if (i % 5 == 4)
                mp_ticket_cancel(ticket);
            mp_status status = fake_finish(ticket);
            MP_CHECK(status == MP_OK || status == MP_CANCELLED);
            atomic_fetch_add(&twin->completed, 1);
        }
        mp_registry_stats stats = fake_stats(registry);
        MP_CHECK_INT(stats.memory_limit, twin->memory); /* its own limit, not that of the other registry */
        MP_CHECK_INT(stats.threads, twin->threads);
        mp_registry_close(registry, FAKE_MS(5000));
        mp_registry_destroy(registry);
        MP_CHECK_INT(fake.models + fake.engines + fake.loaders, 0);
    }
}

MP_TEST_SECONDS(registry_fault_two_registries_leave_process_settings_alone, 60) {
    twin twins[2] = {{.threads = 1, .memory = 50 * 1000 * 1000}, {.threads = 2, .memory = 90 * 1000 * 1000}};
    mp_thread threads[2];
    mp_error error;
    for (int i = 0; i < 2; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "twin", run_twin, &twins[i], &error), &error);
    for (int i = 0; i < 2; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK_INT(twins[0].completed + twins[1].completed, 400);
}
