/* Forks while other threads operate on registries: parents and children keep working. test_registry_ends.c has more. */
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mp_test.h"
#include "registry/cpu_allocator.h"
#include "registry/governor.h"
#include "test_registry_fake.h"

static void expect_child(pid_t child) {
    int how = 0;
    MP_CHECK(child > 0 && waitpid(child, &how, 0) == child);
    MP_CHECK_INT(how, 0);
}

static void close_it(void *registry) { mp_registry_close(registry, FAKE_MS(1000)); }

/* Requests all memory, so that every registry is asked to free some. */
static void request_all_memory(void *registry) {
    mp_status status;
    fake_call *call = fake_call_create(1);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    call->base.bytes = stats.memory_limit;
    mp_ticket *ticket = fake_submit(registry, "a", call, &status);
    if (ticket)
        fake_finish(ticket);
}

/* One thread closes a registry and waits for another thread to finish reclaiming memory from that registry. The child
 * has neither thread. */
MP_TEST(forks_while_a_registry_closes) {
#if defined(__SANITIZE_THREAD__)
    MP_SKIP("ThreadSanitizer does not follow threads started in a child of a process with threads");
#endif
    fake fakes[2];
    mp_registry *registries[2];
    mp_thread asks, closes;
    mp_error error;
    for (int i = 0; i < 2; i++) { /* both registries share a governor */
        mp_registry_config config = {.max_workers = 1, .spin_ns = 1};
        fake_init(&fakes[i]);
        MP_CHECK_OK(mp_registry_create(&config, &registries[i], &error), &error);
        fake_add(registries[i], "a", &fakes[i], false);
        MP_CHECK_INT(fake_finish(fake_submit(registries[i], "a", fake_call_create(1), NULL)), MP_OK);
    }
    atomic_store(&fakes[0].bytes_hold, true);
    MP_CHECK_OK(mp_thread_start(&asks, "asks", request_all_memory, registries[1], &error), &error);
    fake_until(&fakes[0].in_bytes, 1);
    MP_CHECK_OK(mp_thread_start(&closes, "closes", close_it, registries[0], &error), &error);
    mp_sys_sleep_ns(FAKE_MS(20));
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        atomic_store(&fakes[0].bytes_hold, false);
        mp_status status;
        int wrong = fake_submit(registries[0], "a", fake_call_create(1), &status) || status != MP_SHUTTING_DOWN;
        mp_registry_maintain(registries[0]);
        mp_registry_destroy(registries[0]);
        wrong |= (fakes[0].models != 0 || fakes[0].loaders != 0) << 1;
        request_all_memory(registries[1]); /* reclaims nothing from the destroyed registry */
        mp_ticket *ticket = fake_submit(registries[1], "a", fake_call_create(1), &status);
        wrong |= (!ticket || fake_finish(ticket) != MP_OK) << 2;
        mp_registry_destroy(registries[1]);
        _exit(wrong);
    }
    expect_child(child);
    atomic_store(&fakes[0].bytes_hold, false);
    mp_thread_join(&asks);
    mp_thread_join(&closes);
    for (int i = 0; i < 2; i++)
        mp_registry_destroy(registries[i]);
    fake_until_no_calls();
}

static _Atomic bool over;

static void come_and_go(void *arg) {
    (void)arg;
    mp_error error;
    while (!atomic_load(&over)) {
        mp_governor *governor;
        mp_cpu_allocator *allocator;
        MP_CHECK_OK(mp_governor_open(0, &governor, &error), &error);
        MP_CHECK_OK(mp_cpu_allocator_open(0, &allocator, &error), &error);
        mp_cpu_allocator_close(allocator);
        mp_governor_close(governor);
    }
}

/* The child can use all objects that registries share, even if a parent thread was looking one up during the fork. */
MP_TEST(forks_while_other_threads_look_up_shared_objects) {
#if defined(__SANITIZE_THREAD__)
    MP_SKIP("ThreadSanitizer does not follow threads started in a child of a process with threads");
#endif
    enum { THREADS = 2, FORKS = 60 };
    fake fake;
    mp_registry_config config = {.max_workers = 1, .spin_ns = 1};
    mp_registry *registry;
    mp_thread threads[THREADS];
    mp_error error;
    fake_init(&fake);
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    for (int i = 0; i < THREADS; i++)
        MP_CHECK_OK(mp_thread_start(&threads[i], "looks up", come_and_go, NULL, &error), &error);
    for (int i = 0; i < FORKS; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(5);
            mp_governor *governor;
            mp_cpu_allocator *allocator;
            int wrong = mp_governor_open(0, &governor, &error) != MP_OK ||
                        mp_cpu_allocator_open(0, &allocator, &error) != MP_OK;
            _exit(wrong);
        }
        expect_child(child);
    }
    atomic_store(&over, true);
    for (int i = 0; i < THREADS; i++)
        mp_thread_join(&threads[i]);
    mp_registry_destroy(registry);
}
