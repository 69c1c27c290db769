/* The registry under concurrent operations, at shutdown, over a fork, and when the system refuses resources. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/state.h"
#include "test_registry_fake.h"

/* --- all operations at once, on several threads: each request ends exactly once --- */

enum { STORM_THREADS = 6, STORM_MODELS = 3 };

typedef struct storm {
    mp_registry *registry;
    const char *const *keys;
    int calls;
    uint64_t seed;
    _Atomic int submitted, refused, ended[128];
} storm;

static void storm_caller(void *arg) {
    storm *storm = arg;
    mp_test_random random = {__atomic_add_fetch(&storm->seed, 1, __ATOMIC_RELAXED)};
    mp_ticket *kept[4] = {NULL};
    bool cancelled[4] = {false};
    for (int i = 0; i < storm->calls; i++) {
        uint64_t dice = mp_test_random_u64(&random);
        int at = i % 4;
        if (kept[at]) {
            mp_status status = fake_wait(kept[at], NULL);
            fake_call *call = (fake_call *)mp_ticket_request(kept[at]);
            MP_CHECK(cancelled[at] ? call->finished <= 1 && status != MP_OK : call->finished == (status == MP_OK));
            atomic_fetch_add(&storm->ended[status], 1);
            mp_ticket_release(kept[at]);
            kept[at] = NULL;
        }
        fake_call *call = fake_call_create(1 + (uint32_t)(dice >> 8) % 5);
        call->numeric = (dice >> 16) % 50 == 0;
        call->memory = (int)((dice >> 24) % 3);
        call->memory_a_step = (dice >> 28) % 4 == 0;
        call->bad_argument = (dice >> 32) % 40 == 0;
        mp_submit_options options = {.priority = (uint8_t)((dice >> 40) % 5), .fail_fast = (dice >> 44) % 2};
        if ((dice >> 46) % 8 == 0)
            options.deadline_ns = mp_sys_now_ns() + (dice >> 50) % FAKE_MS(3);
        mp_error error;
        mp_ticket *ticket;
        mp_status status = mp_registry_submit(storm->registry, storm->keys[dice % STORM_MODELS], &call->base, &options,
                                              &ticket, &error);
        atomic_fetch_add(&storm->submitted, 1);
        if (status != MP_OK) {
            MP_CHECK(error.code == status && error.message[0]);
            atomic_fetch_add(&storm->refused, 1);
            continue;
        }
        cancelled[at] = false;
        switch ((dice >> 56) % 6) {
        case 0:
            cancelled[at] = mp_ticket_cancel(ticket);
            kept[at] = ticket;
            break;
        case 1: /* no thread waits for the result */
            mp_ticket_release(ticket);
            break;
        default:
            kept[at] = ticket;
        }
    }
    for (int i = 0; i < 4; i++)
        if (kept[i])
            fake_finish(kept[i]);
}

static void run_storm(storm *storm, void (*meanwhile)(struct storm *)) {
    mp_thread threads[STORM_THREADS];
    mp_error error;
    for (int i = 0; i < STORM_THREADS; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "storm", storm_caller, storm, &error), &error);
    if (meanwhile)
        meanwhile(storm);
    for (int i = 0; i < STORM_THREADS; i++)
        mp_thread_join(&threads[i]);
}

static void evict_and_fail(storm *storm) {
    mp_error error;
    for (int i = 0; i < 30; i++) {
        mp_registry_evict(storm->registry, storm->keys[i % STORM_MODELS], fake_in_ms(1 + i % 3), &error);
        mp_sys_sleep_ns(FAKE_MS(2));
    }
}

static void set_up_storm(fake *fakes, mp_registry *registry, const char *const *keys) {
    for (int i = 0; i < STORM_MODELS; i++) {
        fake_init(&fakes[i]);
        fakes[i].memory = 12;
        fakes[i].step_units = 2;
        fakes[i].threads = 2;
        fakes[i].thread_limit = 2;
        fakes[i].load_ns = FAKE_MS(1);
        fakes[i].load_failures = i;
        fake_add(registry, keys[i], &fakes[i], false);
    }
}

static const char *const storm_keys[STORM_MODELS] = {"x", "y", "z"};

MP_TEST_SECONDS(registry_storm_ends_every_request_exactly_once, 60) {
    fake fakes[STORM_MODELS];
    mp_registry *registry = fake_registry(2, 0);
    set_up_storm(fakes, registry, storm_keys);
    storm storm = {.registry = registry, .keys = storm_keys, .calls = 150, .seed = 11};
    run_storm(&storm, evict_and_fail);
    MP_CHECK_INT(storm.submitted, STORM_THREADS * 150);
    MP_CHECK(storm.ended[MP_OK] > 0 && storm.ended[MP_CANCELLED] > 0);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.total_requests, storm.submitted);
    fake_end(registry);
}

static void close_in_the_middle(storm *storm) {
    mp_sys_sleep_ns(FAKE_MS(15));
    mp_registry_close(storm->registry, FAKE_MS(2));
}

MP_TEST_SECONDS(registry_storm_over_shutdown_ends_every_request, 60) {
    for (int round = 0; round < 5; round++) {
        fake fakes[STORM_MODELS];
        mp_registry *registry = fake_registry(2, 0);
        set_up_storm(fakes, registry, storm_keys);
        storm storm = {.registry = registry, .keys = storm_keys, .calls = 100, .seed = 100u * (unsigned)round};
        run_storm(&storm, close_in_the_middle);
        fake_end(registry);
    }
}

static void replace_again_and_again(storm *storm) {
    static fake fakes[20];
    mp_error error;
    for (int i = 0; i < 20; i++) {
        fake_init(&fakes[i]);
        fakes[i].load_failures = i % 4 == 3;
        fake_add(storm->registry, storm->keys[0], &fakes[i], true);
        if (i % 2)
            mp_registry_load(storm->registry, storm->keys[0], false, fake_in_ms(5), &error);
        mp_sys_sleep_ns(FAKE_MS(1));
    }
}

MP_TEST_SECONDS(registry_storm_over_replacements, 60) {
    fake fakes[STORM_MODELS];
    mp_registry *registry = fake_registry(2, 0);
    set_up_storm(fakes, registry, storm_keys);
    storm storm = {.registry = registry, .keys = storm_keys, .calls = 100, .seed = 5};
    run_storm(&storm, replace_again_and_again);
    fake_end(registry);
}

MP_TEST_SECONDS(registry_flood_into_a_full_queue_is_refused_or_served, 60) {
    fake fake;
    fake_init(&fake);
    fake.memory = 1;
    mp_registry *registry = fake_registry(1, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    atomic_store(&fake.hold, true);
    enum { FLOOD = 50000 };
    mp_ticket *accepted[16];
    int taken = 0, refused = 0;
    uint64_t before = 0;
    for (int i = 0; i < FLOOD; i++) {
        fake_call *call = fake_call_create(1);
        call->memory = 1;
        mp_submit_options options = {.fail_fast = true};
        mp_ticket *ticket;
        if (mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error) == MP_OK) {
            MP_CHECK(taken < 16);
            accepted[taken++] = ticket;
        } else {
            refused++;
        }
        if (i == FLOOD / 2)
            before = mp_alloc_bytes(MP_TAG_REQUEST);
    }
    MP_CHECK_INT(taken + refused, FLOOD);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_REQUEST), before); /* refused requests leave no memory allocated */
    atomic_store(&fake.hold, false);
    for (int i = 0; i < taken; i++)
        MP_CHECK_INT(fake_finish(accepted[i]), MP_OK);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.queue_full_rejections, refused);
    fake_end(registry);
}

/* --- shutdown --- */

MP_TEST(registry_shutdown_ends_requests_that_it_cuts_off) {
    fake fake, loading;
    fake_init(&fake);
    fake_init(&loading);
    fake.memory = 1;
    loading.load_ns = FAKE_MS(60000);
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    fake_add(registry, "b", &loading, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    atomic_store(&fake.hold, true);
    mp_ticket *tickets[4];
    for (int i = 0; i < 3; i++) {
        fake_call *call = fake_call_create(1);
        call->memory = 1;
        tickets[i] = fake_submit(registry, "a", call, NULL);
    }
    tickets[3] = fake_submit(registry, "b", fake_call_create(1), NULL);
    fake_until(&loading.loads, 1);
    mp_registry_close(registry, FAKE_MS(20)); /* a wait for the load would last longer than the test's timeout */
    for (int i = 0; i < 4; i++) {
        MP_CHECK(mp_ticket_done(tickets[i]));
        MP_CHECK_STATUS(mp_ticket_status(tickets[i], &error), MP_SHUTTING_DOWN, &error);
    }
    fake_destroy(registry); /* tickets may outlive the registry: they hold references to all they use */
    for (int i = 0; i < 4; i++) {
        mp_ticket_cancel(tickets[i]);
        uint64_t progress;
        MP_CHECK(mp_ticket_wait(tickets[i], 0, 0, &progress));
        mp_ticket_release(tickets[i]);
    }
    fake_until_no_calls();
}

MP_TEST(registry_is_closed_by_several_threads_at_once) {
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    mp_thread threads[4];
    for (int i = 0; i < 4; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "close", fake_close, registry, &error), &error);
    for (int i = 0; i < 4; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK(mp_ticket_done(ticket));
    mp_ticket_release(ticket);
    fake_end(registry);
}

MP_TEST(registry_without_a_request_starts_no_thread) {
    uint64_t created, joined;
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(2, 0);
    fake_add(registry, "a", &fake, false);
    fake_end(registry);
    mp_thread_counts(&created, &joined);
    MP_CHECK_INT(created, 0);
    mp_registry_destroy(NULL);
    mp_ticket_release(NULL);
}

/* --- fork --- */

#define CHILD_CHECK(condition)         \
    do {                               \
        if (!(condition))              \
            _exit(__LINE__ % 250 + 1); \
    } while (0)

static void in_child(mp_registry *registry, mp_ticket *running, mp_ticket *queued, fake *fake) {
    mp_error error;
    alarm(5);
    atomic_store(&fake->in_steps, 0); /* the copied count includes the parent's worker, which stays in its step */
    atomic_store(&fake_threads_in_steps, 0);
    atomic_store(&fake->hold, false);
    CHILD_CHECK(mp_ticket_done(running) && mp_ticket_done(queued));
    CHILD_CHECK(mp_ticket_status(running, &error) == MP_CANCELLED);
    CHILD_CHECK(mp_ticket_wait(queued, UINT64_MAX, 0, NULL));
    mp_ticket_cancel(running);
    mp_ticket_release(running);
    mp_ticket_release(queued);
    mp_entry_info info;
    fake_info(registry, "a", &info);
    CHILD_CHECK(info.queued == 0 && info.running == 0 && info.model_bytes == 1000); /* the model is still loaded */
    for (int i = 0; i < 3; i++) {
        mp_status status;
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(2), &status);
        CHILD_CHECK(ticket && fake_finish(ticket) == MP_OK);
        CHILD_CHECK(fake->loads == 1);
    }
    CHILD_CHECK(mp_registry_evict(registry, "a", fake_in_ms(2000), &error) == MP_OK);
    mp_status status;
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(2), &status);
    CHILD_CHECK(ticket && fake_finish(ticket) == MP_OK && fake->loads == 2);
    mp_registry_close(registry, FAKE_MS(1000));
    _exit(0);
}

MP_TEST_SECONDS(registry_serves_in_a_forked_child, 60) {
#if defined(__SANITIZE_THREAD__)
    MP_SKIP("ThreadSanitizer does not follow threads started in a child of a process with threads");
#elif defined(__SANITIZE_ADDRESS__)
    MP_SKIP("the sanitizer's allocator may be locked by another thread in the child forever");
#endif
    fake fake;
    fake_init(&fake);
    fake.memory = 1;
    fake.threads = 2;
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    for (int round = 0; round < 10; round++) {
        atomic_store(&fake.hold, true);
        fake_call *first = fake_call_create(1), *second = fake_call_create(1);
        first->memory = second->memory = 1;
        mp_ticket *running = fake_submit(registry, "a", first, NULL),
                  *queued = fake_submit(registry, "a", second, NULL);
        fake_until(&fake.in_steps, 1); /* a worker inside a step does not hold the allocator's lock */
        mp_sys_sleep_ns(FAKE_MS(1));
        pid_t child = fork();
        if (child == 0)
            in_child(registry, running, queued, &fake);
        atomic_store(&fake.hold, false);
        fake_expect_child(child);
        MP_CHECK_INT(fake_finish(running), MP_OK); /* the parent is unaffected */
        MP_CHECK_INT(fake_finish(queued), MP_OK);
    }
    fake_end(registry);
}

static _Atomic int stop_forking;

static void keep_calling(void *arg) {
    while (!atomic_load(&stop_forking)) {
        mp_status status;
        mp_ticket *ticket = fake_submit(arg, "a", fake_call_create(1), &status);
        if (ticket)
            fake_finish(ticket);
    }
}

MP_TEST_SECONDS(registry_forks_during_requests, 60) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    MP_SKIP("the sanitizer's allocator may be locked by another thread in the child forever");
#endif
    fake fake;
    fake_init(&fake);
    mp_registry *registry = fake_registry(2, 0);
    mp_error error;
    fake_add(registry, "a", &fake, false);
    mp_thread threads[2];
    for (int i = 0; i < 2; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "calls", keep_calling, registry, &error), &error);
    for (int round = 0; round < 100; round++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(5);
            atomic_store(&fake.in_steps, 0);
            atomic_store(&fake_threads_in_steps, 0);
            mp_status status;
            mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), &status);
            CHILD_CHECK(ticket && fake_finish(ticket) == MP_OK);
            mp_registry_close(registry, FAKE_MS(1000));
            _exit(0);
        }
        fake_expect_child(child);
    }
    atomic_store(&stop_forking, 1);
    for (int i = 0; i < 2; i++)
        mp_thread_join(&threads[i]);
    fake_end(registry);
}

/* --- when the system refuses --- */

static mp_status one_of_everything(void *arg, mp_error *error) {
    (void)arg;
    static fake fake;
    fake_init(&fake);
    fake.threads = 2;
    mp_registry_config config = {.threads = 2, .memory_limit = 1000 * 1000, .spin_ns = 1, .max_workers = 1,
                                 .chaos = {.slow = 1e-9}}; /* wraps engines, and makes practically no step slow */
    mp_registry *registry;
    MP_TRY(mp_registry_create(&config, &registry, error));
    mp_loader loader = fake_loader(&fake);
    mp_status status = mp_registry_add(registry, "a", &loader, MP_ADD_NEW, error);
    mp_notifier *notifier = NULL;
    if (status == MP_OK)
        status = mp_notifier_create(&notifier, error);
    fake_call *call = status == MP_OK ? fake_call_create(2) : NULL;
    if (status == MP_OK && !call)
        status = mp_fail_memory(error, sizeof(*call), "a fake call");
    if (status == MP_OK) {
        mp_submit_options options = {.deadline_ns = fake_in_ms(60000)};
        mp_ticket *ticket;
        status = mp_registry_submit(registry, "a", &call->base, &options, &ticket, error);
        if (status == MP_OK) {
            mp_ticket_bind(ticket, notifier, 1);
            status = fake_wait(ticket, error);
            mp_ticket_release(ticket);
        }
    }
    if (status == MP_OK) {
        loader = fake_loader(&fake);
        status = mp_registry_add(registry, "a", &loader, MP_ADD_REPLACE, error);
    }
    if (status == MP_OK)
        status = mp_registry_load(registry, "a", false, 0, error);
    if (status == MP_OK)
        status = mp_registry_remove(registry, "a", 0, error);
    mp_notifier_destroy(notifier);
    fake_destroy(registry);
    return status;
}

MP_TEST_SECONDS(registry_survives_refused_memory, 120) { mp_test_alloc_sweep(one_of_everything, NULL); }

MP_TEST_SECONDS(registry_survives_refused_threads, 60) {
    MP_CHECK(mp_test_fault_sweep(MP_FAULT_THREAD, one_of_everything, NULL) >= 3);
}
