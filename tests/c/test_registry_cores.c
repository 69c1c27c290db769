/* Threads of the CPU allocator: how many may spin, and at most 256. */
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

static mp_cpu_allocator *four(void) {
    mp_cpu_allocator *allocator;
    MP_CHECK_OK(mp_options_init(&error), &error);
    MP_CHECK_OK(mp_cpu_allocator_open(4, false, &allocator, &error), &error);
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
        MP_CHECK_OK(mp_cpu_allocator_open(0, false, &allocator, &error), &error);
        pretended_cpus = 0;
        MP_CHECK_INT(mp_cpu_allocator_threads(allocator), cpus[i][1]);
        mp_cpu_allocator_close(allocator);
    }
}
