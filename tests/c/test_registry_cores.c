/* mp_cpu_allocator_barrier_threads: how many compute threads a lease should use if the threads wait for each other at
 * barriers. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/options.h"
#include "mp_test.h"
#include "registry/cpu_allocator.h"

static mp_error error;

/* Leases up to `want` CPUs and returns them with `lost_ms` of `watched_ms` reported as lost. */
static int lend_as(mp_cpu_allocator *allocator, int want, uint64_t watched_ms, uint64_t lost_ms, bool barrier_bound) {
    mp_lease lease;
    mp_core_lease threads;
    int home = mp_cpu_allocator_assign_home(allocator);
    MP_CHECK(mp_cpu_allocator_lease(allocator, home, want, &lease, &threads, NULL, NULL));
    int got = lease.threads;
    lease.barrier_bound = barrier_bound;
    lease.watched_ns = watched_ms * 1000 * 1000;
    lease.lost_ns = lost_ms * 1000 * 1000;
    mp_cpu_allocator_return(allocator, &lease, &threads, false);
    mp_cpu_allocator_release_home(allocator, home);
    return got;
}

static void lend(mp_cpu_allocator *allocator, int want, uint64_t watched_ms, uint64_t lost_ms) {
    MP_CHECK_INT(lend_as(allocator, want, watched_ms, lost_ms, true), want);
}

static mp_cpu_allocator *four(void) {
    mp_cpu_allocator *allocator;
    MP_CHECK_OK(mp_options_init(&error), &error);
    MP_CHECK_OK(mp_cpu_allocator_open(4, &allocator, &error), &error);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 4);
    return allocator;
}

typedef struct spinner {
    mp_cpu_allocator *allocator;
    bool may;
} spinner;

/* On a new thread, which has not measured yet whether the machine is crowded. */
static void try_to_spin(void *arg) {
    spinner *self = arg;
    mp_spin_rule rule = mp_cpu_allocator_spin_rule(self->allocator, 1);
    self->may = rule.begin(rule.arg);
}

/* As many threads may spin as CPUs are not leased. */
MP_TEST(registry_cores_threads_spin_on_free_cpus) {
    spinner self = {four(), false};
    mp_lease lease;
    mp_core_lease threads;
    MP_CHECK(mp_cpu_allocator_lease(self.allocator, 0, 2, &lease, &threads, NULL, NULL));
    for (int i = 0; i < 4; i++) {
        mp_thread thread;
        MP_CHECK_OK(mp_thread_start(&thread, "spin", try_to_spin, &self, &error), &error);
        mp_thread_join(&thread);
        MP_CHECK_INT(self.may, i < 2);
    }
    mp_cpu_allocator_return(self.allocator, &lease, &threads, false);
    mp_cpu_allocator_close(self.allocator);
}

MP_TEST(registry_cores_numbers_of_threads) {
    static const int rows[] = {-1, 1, 256, 257};
    MP_CHECK_OK(mp_options_init(&error), &error);
    for (int i = 0; i < 4; i++) {
        mp_cpu_allocator *allocator;
        mp_status status = mp_cpu_allocator_open(rows[i], &allocator, &error);
        if (i == 0 || i == 3) {
            char expected[128];
            snprintf(expected, sizeof expected, "`threads` must be 0 (all CPUs of this process) to 256, got %d",
                     rows[i]);
            MP_CHECK_STATUS(status, MP_INVALID_ARGUMENT, &error);
            MP_CHECK_STR(error.message, expected);
            MP_CHECK(!allocator);
            continue;
        }
        MP_CHECK_OK(status, &error);
        MP_CHECK_INT(mp_cpu_allocator_threads(allocator), rows[i]);
        mp_cpu_allocator_close(allocator);
    }
}

MP_TEST(registry_cores_barrier_threads_fall_with_lost_time) {
    mp_cpu_allocator *allocator = four();
    lend(allocator, 4, 20, 3); /* 15 % of the time is lost: four threads are still faster than three */
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 4);
    lend_as(allocator, 4, 20, 20, false); /* the threads of this lease do not wait for each other */
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 4);
    lend(allocator, 4, 5, 2); /* too short to be conclusive */
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 4);
    lend(allocator, 1, 50, 50); /* a single thread waits for no other */
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 4);
    lend(allocator, 4, 5, 2);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 3);
    lend(allocator, 4, 20, 6); /* 30 % lost with four threads: the limit is three already */
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 3);
    lend(allocator, 3, 20, 15); /* most of the time is lost: half as many threads */
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 1);
    lend(allocator, 1, 20, 20);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 1);
    mp_cpu_allocator_close(allocator);
}

/* After a change of the number, time that was measured before it does not count. */
MP_TEST(registry_cores_barrier_threads_are_measured_anew_after_a_change) {
    mp_cpu_allocator *allocator = four();
    lend(allocator, 4, 20, 6);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 3);
    lend(allocator, 3, 9, 0); /* nothing lost, but too short to be conclusive */
    lend(allocator, 3, 20, 20);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 1);
    mp_sys_sleep_ns(110u * 1000 * 1000);
    lend(allocator, 1, 5, 0);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 1);
    lend(allocator, 1, 5, 0);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), 2);
    mp_cpu_allocator_close(allocator);
}

static int pretended_cpus; /* 0 = those of this machine */

/* Replaces the function of the C library in the whole test program. */
int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set) {
    long got = pretended_cpus ? 0 : syscall(SYS_sched_getaffinity, pid, bytes, set);
    if (got < 0)
        return -1;
    memset((char *)set + got, 0, bytes - (size_t)got);
    for (int i = 0; i < pretended_cpus; i++)
        CPU_SET_S(i, bytes, set);
    return 0;
}

/* A machine with more CPUs than an allocator may have threads gives it 256 threads. */
MP_TEST(registry_cores_of_machines_with_more_than_256_cpus) {
    static const int cpus[][2] = {{255, 255}, {256, 256}, {257, 256}, {1000, 256}};
    unsetenv("MPOOL_THREADS");
    MP_CHECK_OK(mp_options_init(&error), &error);
    for (size_t i = 0; i < sizeof cpus / sizeof *cpus; i++) {
        mp_cpu_allocator *allocator;
        pretended_cpus = cpus[i][0];
        if (mp_cpu_threads() != cpus[i][0])
            MP_SKIP("a control group limits the CPUs");
        MP_CHECK_OK(mp_cpu_allocator_open(0, &allocator, &error), &error);
        pretended_cpus = 0;
        MP_CHECK_INT(mp_cpu_allocator_threads(allocator), cpus[i][1]);
        mp_cpu_allocator_close(allocator);
    }
}
