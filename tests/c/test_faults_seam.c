/* Faults of the system under a registry in use: memory, threads, mappings, wake-ups, the clock. While a fault is
 * injected, requests complete or fail with typed errors. Afterwards the same registry serves again.
 * tests/FAULTS.md has the table whose rows are named here. */
#include "base/sys.h"

#ifdef MP_SEAM

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "model_fixture.h"
#include "mp_test.h"
#include "test_registry_fake.h"

/* --- injection: calls [from, to) of one kind fail, counted since arm() --- */

static _Atomic int64_t calls_so_far, fail_from = INT64_MAX, fail_to;

static bool fails(void) {
    int64_t call = atomic_fetch_add(&calls_so_far, 1);
    return call >= atomic_load(&fail_from) && call < atomic_load(&fail_to);
}

static void arm(int64_t from, int64_t to) {
    atomic_store(&fail_from, INT64_MAX);
    atomic_store(&calls_so_far, 0);
    atomic_store(&fail_to, to);
    atomic_store(&fail_from, from);
}

static void disarm(void) { atomic_store(&fail_from, INT64_MAX); }

static void *failing_alloc(size_t bytes, size_t alignment) {
    return fails() ? NULL : mp_sys_real.alloc(bytes, alignment);
}

static int failing_thread(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *), void *arg) {
    return fails() ? EAGAIN : mp_sys_real.thread_create(thread, attr, body, arg);
}

static void *failing_mmap(size_t bytes, int fd) {
    if (!fails())
        return mp_sys_real.mmap(bytes, fd);
    errno = ENOMEM;
    return MAP_FAILED;
}

static int failing_madvise(void *data, size_t bytes, int advice) {
    if (!fails())
        return mp_sys_real.madvise(data, bytes, advice);
    errno = EAGAIN;
    return -1;
}

static uint64_t live_bytes(void) {
    uint64_t bytes = 0;
    for (int tag = 0; tag < MP_TAG_COUNT; tag++)
        bytes += mp_alloc_bytes((mp_tag)tag);
    return bytes;
}

/* Submits a request and waits for its status. Also fails if there is no memory for the request itself. */
static mp_status try_call(mp_registry *registry, const char *key, mp_error *error) {
    fake_call *call = fake_call_create(1);
    if (!call)
        return mp_fail_memory(error, sizeof(*call), "a fake call");
    mp_submit_options options = {.priority = 2, .deadline_ns = fake_in_ms(20000)};
    mp_ticket *ticket;
    mp_status status = mp_registry_submit(registry, key, &call->base, &options, &ticket, error);
    if (status != MP_OK)
        return status;
    status = fake_wait(ticket, error);
    mp_ticket_release(ticket);
    return status;
}

/* Loads the model, which ignores the backoff after a failed attempt, and checks that a request completes. */
static void serves_again(mp_registry *registry, const char *key) {
    mp_error error;
    MP_CHECK_OK(mp_registry_load(registry, key, false, fake_in_ms(10000), &error), &error);
    MP_CHECK_OK(try_call(registry, key, &error), &error);
}

/* Row 1: each allocation of a cold start, of requests and of an eviction fails, alone or with all later ones. */
static void memory_is_refused(bool persistent) {
    fake fake;
    fake_init(&fake);
    fake.threads = 2;
    mp_sys_table.alloc = failing_alloc;
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 2, .max_workers = 1, .breaker_threshold = -1});
    mp_error error;
    fake_add(registry, "a", &fake, false);
    serves_again(registry, "a");
    MP_CHECK_OK(mp_registry_evict(registry, "a", 0, &error), &error);
    uint64_t before = live_bytes();
    int refused = 0;
    for (int64_t n = 0;; n++) {
        arm(n, persistent ? INT64_MAX : n + 1);
        for (int i = 0; i < 3; i++) {
            mp_error_clear(&error);
            mp_status status = try_call(registry, "a", &error);
            MP_CHECK(status == MP_OK || (error.code == status && error.message[0]));
            refused += status != MP_OK;
        }
        mp_registry_evict(registry, "a", fake_in_ms(5000), &error);
        bool over = atomic_load(&calls_so_far) <= n;
        disarm();
        serves_again(registry, "a");
        MP_CHECK_OK(mp_registry_evict(registry, "a", fake_in_ms(5000), &error), &error);
        MP_CHECK_INT(fake.models + fake.engines + fake_calls, 0);
        /* Evicted workers are freed soon after their engines. One or two idle threads remain, so this bound is loose;
         * registry_survives_refused_memory is exact. */
        uint64_t end = fake_in_ms(10000);
        while (live_bytes() > before + 65536 && mp_sys_now_ns() < end)
            mp_sys_sleep_ns(1000000);
        MP_CHECK(live_bytes() <= before + 65536);
        if (over)
            break;
        MP_CHECK(n < 1000);
    }
    MP_CHECK(refused > 0);
    fake_end(registry);
}

MP_TEST_SECONDS(registry_fault_memory_refused_once_serves_on, 60) { memory_is_refused(false); }
MP_TEST_SECONDS(registry_fault_memory_refused_for_a_while_serves_on, 60) { memory_is_refused(true); }

/* Row 3: thread creation fails for the first worker, the second, or all. */
MP_TEST_SECONDS(registry_fault_no_thread_leaves_no_half_worker, 60) {
    mp_sys_table.thread_create = failing_thread;
    for (int64_t k = 0; k < 4; k++)
        for (int persistent = 0; persistent < 2; persistent++) {
            fake fake;
            fake_init(&fake);
            fake.workers = 2;
            mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 2});
            fake_add(registry, "a", &fake, false);
            arm(k, persistent ? INT64_MAX : k + 1);
            mp_error error;
            mp_status status = try_call(registry, "a", &error);
            MP_CHECK(status == MP_OK || (status == MP_SPAWN_FAILED && error.message[0]));
            if (status == MP_SPAWN_FAILED) /* an exhausted address space, too, refuses threads */
                MP_CHECK(strstr(error.hint, "ulimit -u") && strstr(error.hint, "ulimit -v"));
            mp_entry_info info;
            if (status == MP_SPAWN_FAILED) {
                MP_CHECK_INT(k < 2, 1); /* the call needs two threads: worker and maintenance */
                fake_until_state(registry, "a", "failed");
                fake_info(registry, "a", &info);
                MP_CHECK_INT(info.worker_count + info.workers + info.queued + info.running, 0);
                mp_registry_stats stats;
                mp_registry_get_stats(registry, &stats);
                MP_CHECK_INT(stats.memory_used, 0); /* the memory reservation was released too */
                MP_CHECK(stats.spawn_failures > 0);
            } else {
                fake_info(registry, "a", &info);
                for (int i = 0; i < info.worker_count; i++)
                    MP_CHECK(strcmp(info.worker[i].state, "failed") != 0);
            }
            disarm();
            serves_again(registry, "a");
            fake_end(registry);
        }
}

/* Row 3, afterwards: the maintenance thread, which enforces the deadlines of waiting requests, is started again after
 * its creation failed once. */
MP_TEST_SECONDS(registry_fault_no_thread_once_does_not_end_deadlines, 60) {
    mp_sys_table.thread_create = failing_thread;
    for (int64_t k = 0; k < 3; k++) {
        fake fake;
        fake_init(&fake);
        mp_registry *registry = fake_registry(2, 0);
        fake_add(registry, "a", &fake, false);
        arm(k, k + 1);
        mp_error error;
        mp_submit_options options = {.priority = 2, .deadline_ns = fake_in_ms(20000)};
        mp_ticket *ticket;
        if (mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &ticket, &error) == MP_OK)
            fake_finish(ticket);
        disarm();
        serves_again(registry, "a");
        MP_CHECK_OK(mp_registry_evict(registry, "a", fake_in_ms(5000), &error), &error);
        atomic_store(&fake.load_stalls, true);
        options.deadline_ns = fake_in_ms(50);
        MP_CHECK_OK(mp_registry_submit(registry, "a", &fake_call_create(1)->base, &options, &ticket, &error), &error);
        uint64_t progress;
        mp_ticket_wait(ticket, UINT64_MAX, fake_in_ms(3000), &progress);
        bool done = mp_ticket_done(ticket);
        atomic_store(&fake.load_stalls, false);
        MP_CHECK_INT(done, 1);
        MP_CHECK_STATUS(mp_ticket_status(ticket, &error), MP_TIMEOUT, &error);
        mp_ticket_release(ticket);
        fake_end(registry);
    }
}

/* Row 25: thread creation fails for 800 ms. Waiting requests get the error, attempts back off, and then requests are
 * served again. */
MP_TEST_SECONDS(registry_fault_spawn_fails_waiters_get_the_error_and_attempts_back_off, 60) {
    mp_sys_table.thread_create = failing_thread;
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(2, 0);
    fake_add(registry, "a", &fake, false);
    serves_again(registry, "a"); /* maintenance runs from here on */
    mp_error error;
    struct fake other;
    fake_init(&other);
    fake_add(registry, "b", &other, false);
    atomic_store(&fake.hold, true);
    mp_ticket *busy = fake_submit(registry, "a", fake_call_create(1), NULL); /* uses the one existing thread */
    fake_until(&fake.in_steps, 1);
    arm(0, INT64_MAX);
    uint64_t end = fake_in_ms(800);
    int failed = 0;
    while (mp_sys_now_ns() < end) {
        mp_status status = try_call(registry, "b", &error);
        MP_CHECK_STATUS(status, MP_SPAWN_FAILED, &error);
        MP_CHECK(error.message[0]);
        failed++;
        mp_sys_sleep_ns(FAKE_MS(1));
    }
    int64_t attempts = atomic_load(&calls_so_far);
    MP_CHECK(failed > 50);
    MP_CHECK(attempts >= 1 && attempts <= 12); /* at 0, 100, 300, 700 ms */
    disarm();
    serves_again(registry, "b");
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_finish(busy), MP_OK); /* other models are unaffected */
    fake_end(registry);
}

/* Row 4: mmap or madvise fails for a real model; afterwards the same file loads. */
static void load_it(mp_registry *registry, mp_status *status, mp_error *error) {
    *status = mp_registry_load(registry, "tiny", false, fake_in_ms(20000), error);
}

MP_TEST_SECONDS(registry_fault_refused_mappings_are_clean_errors_and_refused_advice_has_no_effect, 60) {
    static const mp_dtype types[] = {MP_F32, MP_Q8_0};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    mp_sys_table.mmap = failing_mmap;
    for (int advice = 0; advice < 2; advice++) {
        if (advice) {
            mp_sys_table.mmap = mp_sys_real.mmap;
            mp_sys_table.madvise = failing_madvise;
        }
        int failed = 0, served = 0;
        for (int64_t n = 0;; n++) {
            mp_spec *spec = tiny_decoder_spec(types, 2, 5);
            mp_registry *registry = fake_registry(1, 0);
            mp_loader loader;
            MP_CHECK_OK(mp_model_loader(spec, MP_COMPUTE_AUTO, &loader, &error), &error);
            MP_CHECK_OK(mp_registry_add(registry, "tiny", &loader, MP_ADD_NEW, &error), &error);
            arm(n, INT64_MAX);
            mp_status status;
            load_it(registry, &status, &error);
            bool over = atomic_load(&calls_so_far) <= n;
            disarm();
            if (status == MP_OK) {
                served++;
            } else {
                MP_CHECK(!advice);
                MP_CHECK(status == MP_MEMORY_EXHAUSTED || status == MP_IO);
                MP_CHECK(error.message[0]);
                failed++;
                load_it(registry, &status, &error);
                MP_CHECK_STATUS(status, MP_OK, &error);
            }
            fake_end(registry);
            mp_spec_unpin(spec);
            if (over)
                break;
            MP_CHECK(n < 100);
        }
        MP_CHECK(served > 0);
        MP_CHECK(advice || failed > 0);
    }
}

/* Row 9: every second wait on a condition variable ends spuriously at once. */
static _Atomic uint64_t coin = 88172645463325252ull;
static _Atomic int spurious;

static bool toss(void) {
    uint64_t x = atomic_fetch_add(&coin, 0x9E3779B97F4A7C15ull);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    return (x >> 40) & 1;
}

static int spurious_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns) {
    if (!toss())
        return mp_sys_real.cond_wait(cond, mutex, deadline_ns);
    atomic_fetch_add(&spurious, 1);
    pthread_mutex_unlock(mutex);
    sched_yield();
    pthread_mutex_lock(mutex);
    return 0;
}

static void spurious_park(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    if (toss()) {
        atomic_fetch_add(&spurious, 1);
        sched_yield();
        return;
    }
    mp_sys_real.park(word, expected, timeout_ns);
}

typedef struct crowd {
    mp_registry *registry;
    int calls;
    _Atomic int completed, refused;
} crowd;

static void crowd_member(void *arg) {
    crowd *crowd = arg;
    mp_error error;
    for (int i = 0; i < crowd->calls; i++) {
        fake_call *call = fake_call_create(1 + (uint32_t)i % 3);
        call->memory = 1;
        mp_submit_options options = {.priority = (uint8_t)(i % 5)};
        mp_ticket *ticket;
        mp_status status =
            mp_registry_submit(crowd->registry, i % 2 ? "a" : "b", &call->base, &options, &ticket, &error);
        MP_CHECK_STATUS(status, MP_OK, &error);
        mp_ticket *kept = mp_ticket_pin(ticket);
        MP_CHECK_STATUS(fake_wait(ticket, &error), MP_OK, &error);
        MP_CHECK_INT(call->finished, 1); /* computed exactly once */
        MP_CHECK_INT(call->starts, 1);
        mp_ticket_release(ticket);
        mp_ticket_release(kept);
        atomic_fetch_add(&crowd->completed, 1);
    }
}

MP_TEST_SECONDS(registry_fault_spurious_wakeups_take_no_item_twice, 60) {
    enum { MEMBERS = 6, CALLS = 150 };
    mp_sys_table.cond_wait = spurious_wait;
    mp_sys_table.park = spurious_park;
    struct fake a, b;
    fake_init(&a);
    fake_init(&b);
    a.workers = b.workers = 2;
    a.threads = b.threads = 2;
    a.thread_limit = b.thread_limit = 2;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2, .max_workers = 2});
    fake_add(registry, "a", &a, false);
    fake_add(registry, "b", &b, false);
    crowd crowd = {.registry = registry, .calls = CALLS};
    mp_thread threads[MEMBERS];
    mp_error error;
    for (int i = 0; i < MEMBERS; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "crowd", crowd_member, &crowd, &error), &error);
    for (int i = 0; i < MEMBERS; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK_INT(crowd.completed, MEMBERS * CALLS);
    MP_CHECK(spurious > 100);
    fake_end(registry);
}

/* Row 12: the monotonic clock of this process jumps forward by ten minutes. */
static _Atomic uint64_t ahead_ns;

static uint64_t jumping_now(void) { return mp_sys_real.now_ns() + atomic_load(&ahead_ns); }

static int jumping_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns) {
    uint64_t soon = mp_sys_real.now_ns() + FAKE_MS(2); /* a jump also ends waits that began before it */
    uint64_t ahead = atomic_load(&ahead_ns);
    if (deadline_ns && deadline_ns <= soon + ahead)
        return mp_sys_real.cond_wait(cond, mutex, deadline_ns > ahead ? deadline_ns - ahead : 1);
    mp_sys_real.cond_wait(cond, mutex, soon);
    return 0;
}

/* A jump of the clock looks like a pause of the process, which is not charged to requests. */
MP_TEST_SECONDS(registry_fault_clock_jumps_expire_no_request_and_no_worker, 60) {
    mp_sys_table.now_ns = jumping_now;
    mp_sys_table.cond_wait = jumping_wait;
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2,
                                                                  .max_workers = 2,
                                                                  .stall_timeout_ns = FAKE_MS(30000),
                                                                  .maintenance_every_ns = FAKE_MS(10),
                                                                  .keep_alive_ns = MP_FOREVER});
    fake_add(registry, "a", &fake, false);
    serves_again(registry, "a");
    for (int round = 0; round < 3; round++) {
        atomic_store(&fake.hold, true);
        mp_error error;
        fake_call *timed = fake_call_create(1), *patient = fake_call_create(1);
        mp_submit_options soon = {.priority = 2, .deadline_ns = fake_in_ms(60000), .policy = MP_POLICY_SEQUENTIAL},
                          never = {.priority = 2, .policy = MP_POLICY_SEQUENTIAL};
        mp_ticket *tickets[2];
        MP_CHECK_OK(mp_registry_submit(registry, "a", &timed->base, &soon, &tickets[0], &error), &error);
        MP_CHECK_OK(mp_registry_submit(registry, "a", &patient->base, &never, &tickets[1], &error), &error);
        fake_until(&fake.in_steps, 1);
        atomic_fetch_add(&ahead_ns, FAKE_MS(600000));
        uint64_t began = mp_sys_real.now_ns();
        mp_sys_sleep_ns(FAKE_MS(700)); /* two ticks of the clock of requests */
        MP_CHECK(!mp_ticket_done(tickets[0]) && !mp_ticket_done(tickets[1]));
        atomic_store(&fake.hold, false);
        for (int i = 0; i < 2; i++) {
            while (!mp_ticket_done(tickets[i]) && mp_sys_real.now_ns() - began < FAKE_MS(8000))
                mp_sys_sleep_ns(FAKE_MS(1));
            MP_CHECK_STATUS(mp_ticket_status(tickets[i], &error), MP_OK, &error);
            mp_ticket_release(tickets[i]);
        }
    }
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.workers_dead, 0); /* no worker was abandoned because of the clock */
    MP_CHECK_INT(fake.loads, 1);
    fake_end(registry);
}

#else
typedef int registry_fault_tests_need_the_seam;
#endif
