/* Forks while other threads operate on registries: parents and children keep working. test_registry_ends.c has more. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "mp_test.h"
#include "registry/cpu_allocator.h"
#include "registry/governor.h"
#include "registry/state.h"
#include "test_registry_fake.h"

static _Atomic bool over;

static void come_and_go(void *arg) {
    (void)arg;
    mp_error error;
    while (!atomic_load(&over)) {
        mp_governor *governor;
        mp_cpu_allocator *allocator;
        MP_CHECK_OK(mp_governor_open(0, &governor, &error), &error);
        MP_CHECK_OK(mp_cpu_allocator_open(0, false, &allocator, &error), &error);
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
                        mp_cpu_allocator_open(0, false, &allocator, &error) != MP_OK;
            _exit(wrong);
        }
        fake_expect_child(child);
    }
    atomic_store(&over, true);
    for (int i = 0; i < THREADS; i++)
        mp_thread_join(&threads[i]);
    mp_registry_destroy(registry);
}

/* --- one object after the other --- */

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SKIP_IF_SANITIZED() MP_SKIP("the sanitizer's allocator may be locked by another thread in the child forever")
#else
#define SKIP_IF_SANITIZED() (void)0
#endif

static _Atomic int forks_seen, slots_locked;

static void look_at_slots(void) {
    atomic_fetch_add(&forks_seen, 1);
    atomic_fetch_add(&slots_locked, atomic_load(&mp_governor_slot()->busy));
    atomic_fetch_add(&slots_locked, atomic_load(&mp_cpu_allocator_slot()->busy));
}

/* The forking thread holds the locks of the shared objects while the process is copied. */
MP_TEST(forks_hold_the_locks_of_shared_objects) {
    fake fake;
    fake_init(&fake);
    /* The handler registered last runs first before a fork, so this one runs when all locks are taken. */
    MP_CHECK_INT(pthread_atfork(look_at_slots, NULL, NULL), 0);
    mp_registry *registry = fake_registry(1, 0);
    pid_t child = fork();
    if (child == 0)
        _exit(atomic_load(&mp_governor_slot()->busy) + 2 * atomic_load(&mp_cpu_allocator_slot()->busy));
    fake_expect_child(child);
    MP_CHECK_INT(forks_seen, 1);
    MP_CHECK_INT(slots_locked, 2);
    MP_CHECK_INT(mp_governor_slot()->busy, 0);
    MP_CHECK_INT(mp_cpu_allocator_slot()->busy, 0);
    fake_end(registry);
}

static void load_b(void *registry) {
    mp_error error;
    MP_CHECK_OK(mp_registry_load(registry, "b", false, fake_in_ms(10000), &error), &error);
}

/* A load of the parent waits for memory. A load of the child need not wait for that load's turn. */
MP_TEST(forks_while_a_load_waits_for_memory) {
    SKIP_IF_SANITIZED();
    fake fakes[3];
    mp_error error;
    mp_entry_info info;
    mp_thread thread;
    mp_governor *governor;
    mp_registry *registry;
    mp_registry_config config = {.threads = 1, .spin_ns = 1, .max_workers = 1};
    MP_CHECK_OK(mp_governor_open(0, &governor, &error), &error); /* the registry uses it too */
    atomic_store(&mp_governor_budget(governor)->limit, 200000);
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    for (int i = 0; i < 3; i++) {
        fake_init(&fakes[i]);
        fakes[i].model_bytes = i < 2 ? 150000 : 1000;
        fake_add(registry, (const char *[]){"a", "b", "c"}[i], &fakes[i], false);
    }
    atomic_store(&fakes[0].hold, true);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fakes[0].in_steps, 1);
    MP_CHECK_OK(mp_thread_start(&thread, "loads", load_b, registry, &error), &error);
    do
        fake_info(registry, "b", &info);
    while (!info.worker_count || strcmp(info.worker[0].state, "loading") != 0);
    mp_sys_sleep_ns(FAKE_MS(20)); /* it waits for its turn */
    pid_t child = fork();
    if (child == 0) {
        alarm(5);
        mp_guard guard;
        if (!mp_governor_try_reserve(governor, 1, &guard))
            _exit(1);
        /* a turn of the child itself, which ends because the model "a" has no worker here and can be freed */
        mp_guard more;
        mp_budget *budget = mp_governor_budget(governor);
        uint64_t left = atomic_load(&budget->limit) - atomic_load(&budget->used);
        if (mp_governor_reserve(governor, "d", left, left, false, NULL, NULL, &more, &error) != MP_OK)
            _exit(3);
        mp_guard_release(&more);
        mp_guard_release(&guard);
        _exit(mp_registry_load(registry, "c", false, fake_in_ms(2000), &error) == MP_OK ? 0 : 2);
    }
    fake_expect_child(child);
    mp_guard guard;
    MP_CHECK(!mp_governor_try_reserve(governor, 1, &guard)); /* in the parent, the load comes first */
    atomic_store(&fakes[0].hold, false);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    mp_thread_join(&thread);
    fake_end(registry);
    mp_governor_close(governor);
}

/* The fork comes after a registry has given up its CPU allocator and before it is closed. The child closes the registry
 * again, and must not give up the other registry's use of the same allocator. */
MP_TEST(forks_at_the_end_of_a_close) {
    fake fakes[2];
    mp_registry *registries[2];
    mp_error error;
    for (int i = 0; i < 2; i++) {
        mp_registry_config config = {.max_workers = 1, .spin_ns = 1};
        fake_init(&fakes[i]);
        MP_CHECK_OK(mp_registry_create(&config, &registries[i], &error), &error);
    }
    MP_CHECK(registries[0]->services->allocator_pinned == registries[1]->services->allocator_pinned);
    mp_registry_close(registries[0], 0);
    registries[0]->closing = CLOSING; /* as mp_registry_close leaves it until its last lines */
    pid_t child = fork();
    if (child == 0) {
        alarm(5);
        mp_cpu_allocator *allocator;
        mp_registry_close(registries[0], 0);
        int wrong = mp_cpu_allocator_open(0, false, &allocator, &error) != MP_OK;
        _exit(wrong || allocator != registries[1]->services->allocator_pinned);
    }
    fake_expect_child(child);
    registries[0]->closing = CLOSED;
    for (int i = 0; i < 2; i++)
        mp_registry_destroy(registries[i]);
}

/* One thread closes a registry and waits for a worker, another one waits for the end of that close. */
MP_TEST(forks_while_two_threads_close_a_registry) {
    SKIP_IF_SANITIZED();
    fake fake;
    mp_thread first, second;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 1, NULL);
    fake_count_waits(&registry->changed); /* only a second close waits on it: no call is inside */
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(10000), &error), &error);
    atomic_store(&fake.destroy_hold, true);
    MP_CHECK_OK(mp_thread_start(&first, "first", fake_close, registry, &error), &error);
    fake_until(&fake.in_destroy, 1);
    MP_CHECK_OK(mp_thread_start(&second, "second", fake_close, registry, &error), &error);
    fake_until_waits(1);
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        atomic_store(&fake.destroy_hold, false);
        mp_registry_destroy(registry); /* destroys what the second thread waits for in the parent */
        _exit(0);
    }
    fake_expect_child(child);
    atomic_store(&fake.destroy_hold, false);
    mp_thread_join(&first);
    mp_thread_join(&second);
    fake_end(registry);
}

typedef struct late_caller {
    mp_registry *registry;
    _Atomic int ended;
    mp_status status;
} late_caller;

/* A replaced model that serves its last requests in the parent has none in the child, whose first operation frees it.
 */
MP_TEST(forks_while_a_replaced_model_drains) {
    SKIP_IF_SANITIZED();
    fake fake, next;
    mp_error error;
    mp_ticket *ticket;
    mp_registry *registry = fake_begin(&fake, 2, &ticket);
    fake_init(&next);
    fake_add(registry, "a", &next, true);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, fake_in_ms(10000), &error), &error);
    MP_CHECK_INT(fake.models, 1);
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        int wrong = mp_registry_evict(registry, "a", fake_in_ms(5000), &error) != MP_OK; /* starts no worker */
        for (uint64_t end = fake_in_ms(5000); mp_sys_now_ns() < end && (fake.models || fake.loaders);)
            mp_sys_sleep_ns(FAKE_MS(1));
        wrong |= (fake.models > 0) << 1 | (fake.loaders > 0) << 2 | (next.models > 0) << 3;
        _exit(wrong | (atomic_load(&registry->services->active_workers) != 0) << 4);
    }
    fake_expect_child(child);
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_end(registry);
}

/* Ids that a notifier lists belong to the parent. */
MP_TEST(forks_with_a_notifier) {
    fake fake;
    mp_error error;
    mp_notifier *notifier;
    uint64_t ids[2];
    mp_registry *registry = fake_begin(&fake, 1, NULL);
    MP_CHECK_OK(mp_notifier_create(&notifier, &error), &error);
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    MP_CHECK_INT(fake_wait(ticket, NULL), MP_OK);
    MP_CHECK(mp_ticket_bind(ticket, notifier, 7));
    pid_t child = fork();
    if (child == 0) { /* a binding in the child has no effect */
        int wrong = mp_notifier_take(notifier, ids, 2) || !mp_ticket_bind(ticket, notifier, 8);
        int fd = mp_notifier_fd(notifier);
        wrong |= (fcntl(fd, F_GETFD) < 0) << 1;
        mp_notifier_destroy(notifier);
        _exit(wrong | (fcntl(fd, F_GETFD) >= 0) << 2);
    }
    fake_expect_child(child);
    MP_CHECK_INT(mp_notifier_take(notifier, ids, 2), 1);
    MP_CHECK_INT(ids[0], 7);
    mp_ticket_release(ticket);
    mp_notifier_destroy(notifier);
    fake_end(registry);
}

/* Leases up to `want` CPUs and returns them with `watched_ms`, of which `lost_ms` were lost at barriers. Returns the
 * number of compute threads. */
static int compute(mp_cpu_allocator *allocator, int want, uint64_t watched_ms, uint64_t lost_ms) {
    mp_lease lease;
    mp_core_lease at;
    MP_CHECK(mp_cpu_allocator_lease(allocator, 0, want, &lease, &at, NULL, NULL));
    int got = lease.threads;
    lease.barrier_bound = true;
    lease.watched_ns = FAKE_MS(watched_ms);
    lease.lost_ns = FAKE_MS(lost_ms);
    mp_cpu_allocator_return(allocator, &lease, &at, false);
    return got;
}

/* The allocator of a child has all CPUs free and no measurement: leases and workers belong to the parent. */
MP_TEST(forks_with_compute_threads_in_use) {
    SKIP_IF_SANITIZED();
    mp_cpu_allocator *allocator;
    mp_error error;
    mp_lease lease;
    mp_core_lease at;
    MP_CHECK_OK(mp_cpu_allocator_open(4, false, &allocator, &error), &error);
    MP_CHECK_INT(compute(allocator, 4, 20, 6), 4);
    MP_CHECK_INT(compute(allocator, 3, 9, 9), 3); /* too short to be conclusive */
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 3);
    MP_CHECK(mp_cpu_allocator_lease(allocator, 0, 3, &lease, &at, NULL, NULL));
    mp_cpu_allocator_enter(allocator);
    mp_cpu_allocator_enter(allocator);
    mp_cpu_allocator_fork_before(allocator);
    pid_t child = fork();
    if (child == 0) {
        alarm(30); /* its threads compute, on CPUs that other programs may use */
        int threads[MP_NODES_MAX], leased[MP_NODES_MAX], wrong = 0;
        mp_cpu_allocator_fork_child(allocator);
        int nodes = mp_cpu_allocator_nodes(allocator, threads, leased);
        for (int i = 0; i < nodes; i++)
            wrong |= leased[i] != 0;
        wrong |= (mp_cpu_allocator_leased(allocator) != 0) << 1;
        wrong |= (mp_cpu_allocator_barrier_threads(allocator) != 4) << 2;
        wrong |= mp_cpu_allocator_contended(allocator) << 3;
        wrong |= (compute(allocator, 4, 9, 9) != 4) << 4;
        wrong |= (mp_cpu_allocator_barrier_threads(allocator) != 4) << 5; /* the parent's 9 ms do not count */
        _exit(wrong);
    }
    mp_cpu_allocator_fork_parent(allocator);
    fake_expect_child(child);
    MP_CHECK_INT(mp_cpu_allocator_leased(allocator), 3);
    MP_CHECK(mp_cpu_allocator_contended(allocator));
    mp_cpu_allocator_leave(allocator);
    mp_cpu_allocator_leave(allocator);
    mp_cpu_allocator_return(allocator, &lease, &at, false);
    mp_cpu_allocator_close(allocator);
}

/* Once the system has refused threads, an allocator computes on one thread and does not try again. The allocator's copy
 * in a forked child tries again: the child may get what the parent was refused. */
static mp_status compute_after_a_refusal(void *arg, mp_error *error) {
    mp_cpu_allocator *allocator;
    (void)arg;
    MP_TRY(mp_cpu_allocator_open(2, false, &allocator, error));
    int got = compute(allocator, 2, 0, 0);
    MP_CHECK_INT(compute(allocator, 2, 0, 0), got);
    if (got == 1) {
        mp_cpu_allocator_fork_before(allocator);
        pid_t child = fork();
        if (child == 0) {
            alarm(5);
            mp_team *team;
            mp_cpu_allocator_fork_child(allocator);
            bool refused = mp_team_create(1, &team, error) != MP_OK;
            _exit(compute(allocator, 2, 0, 0) != 1 + !refused);
        }
        mp_cpu_allocator_fork_parent(allocator);
        fake_expect_child(child);
    }
    mp_cpu_allocator_close(allocator);
    return MP_OK;
}

MP_TEST(forks_after_threads_were_refused) {
    SKIP_IF_SANITIZED();
    MP_CHECK_INT(mp_test_fault_sweep(MP_FAULT_THREAD, compute_after_a_refusal, NULL), 1);
}
