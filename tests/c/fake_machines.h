/* fake_machines.h: folders that look like the /sys of real machines, made from a table. */
#ifndef MP_TEST_FAKE_MACHINES_H
#define MP_TEST_FAKE_MACHINES_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mp_test.h"

/* Cores with the same facts. 0 or NULL: the machine has no such file. */
typedef struct fake_cores {
    int first, count, step; /* the first CPU of core i is first + i * step */
    int sibling;            /* its second CPU is this much higher; 0: none */
    const char *kind;       /* folder below /sys/devices */
    int capacity, cppc, khz;
} fake_cores;

typedef struct fake_machine {
    const char *name;
    fake_cores cores[6]; /* the last one is empty */
    const char *expected; /* as cores_text of test_base_cores.c writes it */
} fake_machine;

/* Sources (read on 2026-11-30):
 *   siblings     i7-13700H: latencies in github.com/nviennot/core-to-core-latency issue 130; i5-1240P likewise ("0 8"
 *                in sbc-bench.sh of github.com/ThomasKaiser/sbc-bench: fast cores from CPU 0, slow ones from CPU 8).
 *                155H: core-to-core-latency issue 142, whose numbers begin at 1. 7840U: issue 27 of
 *                github.com/mengmeet/PowerControl. HX 370: CPUs 0-3,12-15 are Zen 5, 4-11,16-23 Zen 5c (several
 *                repositories).
 *   clocks       258V, N100, Raspberry Pi 5, X1E001DE: "CPU sysfs topology" in sbc-bench's results
 *                (Khadas-Mind-2-AI-Maker-Kit.md, 4vxM.txt, 1ULtUe.txt, 8SWL.txt). 8840U, the same chip as 7840U: lscpu
 *                in github.com/amkillam/ryzen_smu issue 28. i5-1240P, i7-13700H: ark.intel.com. 155H: ark.intel.com;
 *                two of its fast cores reach 4.8 GHz, the others 4.5 (chipsandcheese.com, "AMD's Strix Point",
 *                2024-08-10). Which two is an assumption. HX 370: 5.16 and 3.30 GHz (same page;
 *                github.com/open-mpi/hwloc issue 690).
 *   cpu_capacity 1,024 for all CPUs of a machine whose two clusters differ by 1.57 (notes of a benchmark on Zen 5 and
 *                5c). Graviton and Raspberry Pi: equal cores have 1,024, the largest value (Documentation/ABI of
 *                Linux).
 *   highest_perf clock divided by 78,741, 80,000 or 86,957 kHz for fast cores (HYBRID_SCALING_FACTOR, _MTL, _LNL in
 *                Linux's intel_pstate.c), by 100,000 kHz for slow ones.
 *   Graviton 3   one thread per core: cpus.go of github.com/intel/PerfSpect; 64 CPUs, as an instance c7g.16xlarge. */
static const fake_machine FAKE_MACHINES[] = {
    {"Core i5-1240P",
     {{0, 4, 2, 1, "cpu_core", 0, 56, 4400000}, {8, 8, 1, 0, "cpu_atom", 0, 33, 3300000}},
     "highest_perf: 4/8 at 100, 8/8 at 59; 12 of 12"},
    {"Core i7-13700H",
     {{0, 4, 2, 1, "cpu_core", 0, 61, 4800000},
      {8, 2, 2, 1, "cpu_core", 0, 64, 5000000},
      {12, 8, 1, 0, "cpu_atom", 0, 37, 3700000}},
     "highest_perf: 6/12 at 100, 8/8 at 58; 14 of 14"},
    {"Core Ultra 7 155H",
     {{0, 1, 2, 1, "cpu_core", 0, 56, 4500000},
      {2, 8, 1, 0, "cpu_atom", 0, 38, 3800000},
      {10, 2, 2, 1, "cpu_core", 0, 60, 4800000},
      {14, 3, 2, 1, "cpu_core", 0, 56, 4500000},
      {20, 2, 1, 0, "cpu_atom", 0, 25, 2500000}}, /* on the low-power island */
     "highest_perf: 6/12 at 100, 8/8 at 63, 2/2 at 42 unused; 14 of 16"},
    {"Core Ultra 7 258V",
     {{0, 1, 1, 0, "cpu_core", 1024, 54, 4700000},
      {1, 2, 1, 0, "cpu_core", 1024, 55, 4800000},
      {3, 1, 1, 0, "cpu_core", 1024, 54, 4700000},
      {4, 4, 1, 0, "cpu_atom", 1024, 37, 3700000}},
     "highest_perf: 4/4 at 100, 4/4 at 67; 8 of 8"},
    {"Ryzen 7 7840U", {{0, 8, 1, 8, NULL, 0, 0, 5134889}}, "cpuinfo_max_freq: 8/16 at 100; 8 of 8"},
    {"Ryzen AI 9 HX 370",
     {{0, 4, 1, 12, NULL, 1024, 0, 5157895}, {4, 8, 1, 12, NULL, 1024, 0, 3301000}},
     "cpuinfo_max_freq: 4/8 at 100, 8/16 at 64; 12 of 12"},
    {"N100", {{0, 4, 1, 0, NULL, 0, 0, 3400000}}, "cpuinfo_max_freq: 4/4 at 100; 4 of 4"},
    {"Snapdragon X Elite (X1E001DE)",
     {{0, 4, 1, 0, NULL, 0, 0, 3801600}, {4, 8, 1, 0, NULL, 0, 0, 4300800}},
     "cpuinfo_max_freq: 12/12 at 100; 12 of 12"},
    {"Graviton 3", {{0, 64, 1, 0, NULL, 1024, 0, 0}}, "equal: 64/64 at 100; 64 of 64"},
    {"Raspberry Pi 5", {{0, 4, 1, 0, NULL, 1024, 0, 2400000}}, "cpuinfo_max_freq: 4/4 at 100; 4 of 4"},
};
enum { FAKE_MACHINE_COUNT = sizeof(FAKE_MACHINES) / sizeof(FAKE_MACHINES[0]) };

/* Writes a file below `root`, with its folders. */
static inline void fake_put(const char *root, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0777);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    MP_CHECK(file != NULL);
    fputs(text, file);
    fclose(file);
}

/* Writes a file of a CPU's folder. */
static inline void fake_put_cpu(const char *root, int cpu, const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof(path), "sys/devices/system/cpu/cpu%d/%s", cpu, name);
    fake_put(root, path, text);
}

static inline void fake_put_number(const char *root, int cpu, const char *name, int number) {
    char text[32];
    snprintf(text, sizeof(text), "%d\n", number);
    if (number)
        fake_put_cpu(root, cpu, name, text);
}

/* Creates the /sys of a machine. Returns its root, which fake_clear removes, and sets the number of CPUs. */
static inline const char *fake_make(const fake_machine *machine, int *cpus) {
    static char root[64];
    char kinds[2][256] = {"", ""}, text[64];
    snprintf(root, sizeof(root), "/tmp/mpool-cores-XXXXXX");
    MP_CHECK(mkdtemp(root) != NULL);
    *cpus = 0;
    for (const fake_cores *group = machine->cores; group->count; group++)
        for (int i = 0; i < group->count; i++) {
            int pair[2] = {group->first + i * group->step, group->first + i * group->step + group->sibling};
            for (int thread = 0; thread < (group->sibling ? 2 : 1); thread++, ++*cpus) {
                int cpu = pair[thread];
                snprintf(text, sizeof(text), !group->sibling ? "%d\n" : group->sibling == 1 ? "%d-%d\n" : "%d,%d\n",
                         pair[0], pair[1]);
                fake_put_cpu(root, cpu, "topology/core_cpus_list", text);
                fake_put_cpu(root, cpu, "topology/thread_siblings_list", text);
                fake_put_cpu(root, cpu, "topology/physical_package_id", "0\n");
                fake_put_number(root, cpu, "cpu_capacity", group->capacity);
                fake_put_number(root, cpu, "acpi_cppc/highest_perf", group->cppc);
                fake_put_number(root, cpu, "cpufreq/cpuinfo_max_freq", group->khz);
                if (group->kind) {
                    char *list = kinds[strcmp(group->kind, "cpu_atom") == 0];
                    snprintf(list + strlen(list), 256 - strlen(list), *list ? ",%d" : "%d", cpu);
                }
            }
        }
    if (*kinds[0])
        fake_put(root, "sys/devices/cpu_core/cpus", kinds[0]);
    if (*kinds[1])
        fake_put(root, "sys/devices/cpu_atom/cpus", kinds[1]);
    return root;
}

static inline void fake_clear(const char *root) {
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", root);
    MP_CHECK_INT(system(command), 0);
}

#endif
