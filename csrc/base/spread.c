/* spread.c: see spread.h. */
#include "base/spread.h"

#include <stdatomic.h>

#include "base/cpu_set.h"
#include "base/forked.h"

/* The thread that computes on each CPU: the generation of its process << 32 | its number; 0: none. A forked child
 * ignores entries of its parent's threads, which never leave. */
static _Atomic uint64_t occupants[MP_CPUS_MAX];

static uint64_t own_entry(void) {
    static _Atomic uint32_t threads;
    static _Thread_local uint32_t number;
    if (number == 0)
        number = atomic_fetch_add_explicit(&threads, 1, memory_order_relaxed) + 1;
    return (uint64_t)mp_fork_generation() << 32 | number;
}

static bool is_free(int cpu, uint64_t own) {
    const uint64_t entry = atomic_load_explicit(&occupants[cpu], memory_order_relaxed);
    return entry == 0 || entry >> 32 != own >> 32;
}

/* Moves the thread to one of its CPUs that is free. Returns the CPU that it is on afterwards. */
static int move(int cpu, uint64_t own) {
    mp_cpu_set allowed, others;
    if (!mp_sys_get_affinity(&allowed))
        return cpu;
    others = allowed;
    for (int i = mp_cpu_set_next(&allowed, 0); i >= 0; i = mp_cpu_set_next(&allowed, i + 1))
        if (i == cpu || !is_free(i, own))
            mp_cpu_set_remove(&others, i);
    if (mp_cpu_set_next(&others, 0) < 0 || !mp_sys_set_affinity(&others))
        return cpu;
    mp_sys_set_affinity(&allowed);
    return mp_sys_cpu();
}

int mp_spread_begin(void) {
    const uint64_t own = own_entry();
    int cpu = mp_sys_cpu();
    if (cpu < 0 || cpu >= MP_CPUS_MAX)
        return -1;
    if (!is_free(cpu, own))
        cpu = move(cpu, own);
    if (cpu < 0 || cpu >= MP_CPUS_MAX || !is_free(cpu, own))
        return -1;
    atomic_store_explicit(&occupants[cpu], own, memory_order_relaxed);
    return cpu;
}

void mp_spread_end(int cpu) {
    uint64_t own = own_entry();
    if (cpu >= 0)
        atomic_compare_exchange_strong_explicit(&occupants[cpu], &own, 0, memory_order_relaxed, memory_order_relaxed);
}
