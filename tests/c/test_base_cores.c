/* test_base_cores.c: base/cores.h on faked machines (fake_machines.h), and the default number of compute threads. */
#include "base/cores.h"
#include "base/cpu.h"
#include "base/cpu_set.h"
#include "base/options.h"
#include "base/topology.h"
#include "fake_machines.h"

static mp_error error;

static mp_cpu_set first_cpus(int count) {
    mp_cpu_set set = {0};
    for (int i = 0; i < count; i++)
        mp_cpu_set_add(&set, i);
    return set;
}

/* Writes "source: cores/CPUs at per cent of the fastest, ...; used of all cores". */
static const char *cores_text(const mp_cores *cores) {
    static char text[512];
    size_t used = (size_t)snprintf(text, sizeof(text), "%s", mp_speed_source_name(cores->source));
    int core_count = 0, cpu_count = 0;
    for (int i = 0; i < cores->class_count; i++) {
        const mp_core_class *group = &cores->classes[i];
        used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%d/%d at %.0f%s", i ? ", " : ": ",
                                 group->core_count, group->cpu_count, (double)(group->speed * 100),
                                 group->used ? "" : " unused");
        MP_CHECK(i == 0 ? group->speed == 1 : group->speed <= cores->classes[i - 1].speed);
        core_count += group->core_count;
        for (int cpu = 0; cpu < MP_CPUS_MAX; cpu++) /* each CPU is in the set of its class, and in no other */
            MP_CHECK(mp_cpu_set_has(&group->cpus, cpu) == (cores->cpus[cpu].core >= 0 && cores->cpus[cpu].group == i) ||
                     cores->source == MP_SPEED_LEVEL);
        cpu_count += group->cpu_count;
    }
    MP_CHECK_INT(core_count, cores->core_count);
    MP_CHECK(cpu_count >= core_count);
    snprintf(text + used, sizeof(text) - used, "; %d of %d", cores->used_count, cores->core_count);
    return text;
}

static mp_cores cores;

static const char *read_cores(const char *root, mp_cpu_set allowed) {
    mp_cores_read(root, &allowed, &cores);
    return cores_text(&cores);
}

static const fake_machine *machine(const char *name) {
    for (int i = 0; i < FAKE_MACHINE_COUNT; i++)
        if (strcmp(FAKE_MACHINES[i].name, name) == 0)
            return &FAKE_MACHINES[i];
    MP_CHECK(!"no such machine");
    return NULL;
}

MP_TEST(base_cores_of_ten_machines) {
    for (int i = 0; i < FAKE_MACHINE_COUNT; i++) {
        int count;
        const char *root = fake_make(&FAKE_MACHINES[i], &count);
        MP_CHECK_STR(read_cores(root, first_cpus(count)), FAKE_MACHINES[i].expected);
        MP_CHECK_INT(cores.package_count, 1);
        for (const fake_cores *group = FAKE_MACHINES[i].cores; group->count; group++)
            for (int k = 0; k < group->count; k++) {
                int cpu = group->first + k * group->step;
                MP_CHECK_INT(cores.cpus[cpu].core, cores.cpus[cpu + group->sibling].core);
                MP_CHECK(cpu + group->sibling + 1 >= count || group->sibling == 0 ||
                         cores.cpus[cpu].core != cores.cpus[cpu + group->sibling + 1].core);
            }
        MP_CHECK_INT(cores.cpus[count].core, -1);
        fake_clear(root);
    }
}

/* Each CPU has the class of its core. */
MP_TEST(base_cores_class_of_each_cpu) {
    static mp_topology topology;
    int count;
    const char *root = fake_make(machine("Core Ultra 7 155H"), &count);
    mp_cpu_set allowed = first_cpus(count);
    MP_CHECK_OK(mp_topology_read_from(root, "", &allowed, &topology, &error), &error);
    static const int cpus[][2] = {{0, 0}, {1, 0}, {2, 1}, {9, 1}, {10, 0}, {21, 2}, {22, 0}};
    for (size_t i = 0; i < sizeof(cpus) / sizeof(*cpus); i++) {
        mp_core_cpu at = topology.cores.cpus[cpus[i][0]];
        MP_CHECK_INT(at.core >= 0, cpus[i][0] < 22);
        MP_CHECK_INT(at.group, cpus[i][1]);
    }
    MP_CHECK_INT(topology.nodes[0].core_count, 14);
    fake_clear(root);
}

/* A file whose text is replaced (NULL: removed) on a CPU, or on all CPUs (-1), and the result. */
typedef struct fault {
    int cpu;
    const char *file, *text, *expected;
} fault;

static void replace(const char *root, int cpu, const char *file, const char *text) {
    char path[256];
    snprintf(path, sizeof(path), "%s/sys/devices/system/cpu/cpu%d/%s", root, cpu, file);
    if (text)
        fake_put_cpu(root, cpu, file, text);
    else
        MP_CHECK_INT(unlink(path), 0);
}

/* Makes one machine, and applies and takes back one fault after another. */
static void check_faults(const char *name, const fault *faults, size_t n) {
    int count;
    const char *root = fake_make(machine(name), &count);
    for (size_t i = 0; i < n; i++) {
        static char before[64][64];
        const int first = faults[i].cpu < 0 ? 0 : faults[i].cpu, last = faults[i].cpu < 0 ? count - 1 : first;
        for (int cpu = first; cpu <= last; cpu++) {
            char path[256];
            snprintf(path, sizeof(path), "%s/sys/devices/system/cpu/cpu%d/%s", root, cpu, faults[i].file);
            MP_CHECK(mp_sys_read_text(path, before[cpu], sizeof(before[cpu])));
            replace(root, cpu, faults[i].file, faults[i].text);
        }
        MP_CHECK_STR(read_cores(root, first_cpus(count)), faults[i].expected);
        for (int cpu = first; cpu <= last; cpu++)
            replace(root, cpu, faults[i].file, before[cpu]);
    }
    MP_CHECK_STR(read_cores(root, first_cpus(count)), machine(name)->expected);
    fake_clear(root);
}

#define CHECK_FAULTS(name, faults) check_faults(name, faults, sizeof(faults) / sizeof(*(faults)))

/* One implausible number, and the next source decides for all cores. */
MP_TEST(base_cores_implausible_numbers) {
    static const char *const frequency = "cpuinfo_max_freq: 4/8 at 100, 8/8 at 59; 12 of 12";
    const fault numbers[] = {
        {12, "acpi_cppc/highest_perf", NULL, frequency},
        {12, "acpi_cppc/highest_perf", "0\n", frequency},
        {12, "acpi_cppc/highest_perf", "-33\n", frequency},
        {12, "acpi_cppc/highest_perf", "\n", frequency},
        {12, "acpi_cppc/highest_perf", "33 MHz\n", frequency},
        {12, "acpi_cppc/highest_perf", "99999999999999999999\n", frequency},
        {0, "acpi_cppc/highest_perf", "3300\n", frequency}, /* 100 times another core */
        {12, "acpi_cppc/highest_perf", "5\n", frequency},   /* less than a tenth */
        {-1, "acpi_cppc/highest_perf", "255\n", frequency}, /* equal for unequal kinds: firmware gives no number */
        {1, "acpi_cppc/highest_perf", "0\n", "highest_perf: 4/8 at 100, 8/8 at 59; 12 of 12"}, /* a sibling: not read */
    };
    CHECK_FAULTS("Core i5-1240P", numbers);
    const fault clocks[] = {
        {2, "cpufreq/cpuinfo_max_freq", NULL, "equal: 4/4 at 100; 4 of 4"},
        {2, "cpufreq/cpuinfo_max_freq", "0\n", "equal: 4/4 at 100; 4 of 4"},
        {2, "cpufreq/cpuinfo_max_freq", "-2400000\n", "equal: 4/4 at 100; 4 of 4"},
        {2, "cpufreq/cpuinfo_max_freq", "24000\n", "equal: 4/4 at 100; 4 of 4"}, /* the others have 100 times as much */
        {2, "cpufreq/cpuinfo_max_freq", "240000000\n", "equal: 4/4 at 100; 4 of 4"},
        {2, "cpu_capacity", "512\n", "cpu_capacity: 3/3 at 100, 1/1 at 50; 4 of 4"},
        {2, "cpu_capacity", "500\n", "cpu_capacity: 3/3 at 100, 1/1 at 49 unused; 3 of 4"},
        {2, "cpu_capacity", "0\n", "cpuinfo_max_freq: 4/4 at 100; 4 of 4"},
        {2, "cpu_capacity", "1025\n", "cpuinfo_max_freq: 4/4 at 100; 4 of 4"}, /* the largest capacity is 1,024 */
        {2, "cpu_capacity", "10\n", "cpuinfo_max_freq: 4/4 at 100; 4 of 4"},
        {2, "cpu_capacity", NULL, "cpuinfo_max_freq: 4/4 at 100; 4 of 4"},
        {-1, "topology/physical_package_id", "-1\n", "cpuinfo_max_freq: 4/4 at 100; 4 of 4"},
    };
    CHECK_FAULTS("Raspberry Pi 5", clocks);
}

MP_TEST(base_cores_implausible_siblings) {
    const fault lists[] = {
        {0, "topology/core_cpus_list", NULL, "cpuinfo_max_freq: 8/16 at 100; 8 of 8"}, /* the older file has the same */
        {0, "topology/core_cpus_list", "1,9\n", "cpuinfo_max_freq: 8/16 at 100; 8 of 8"}, /* without the CPU itself */
        {0, "topology/core_cpus_list", "0-15\n", "cpuinfo_max_freq: 8/16 at 100; 8 of 8"}, /* more than 8 siblings */
        {0, "topology/core_cpus_list", "0\n", "cpuinfo_max_freq: 9/16 at 100; 9 of 9"}, /* CPU 8 says 0,8 */
        {8, "topology/core_cpus_list", "0,8-9\n", "cpuinfo_max_freq: 9/16 at 100; 9 of 9"},
        /* CPUs 8 to 15 use the older file */
        {-1, "topology/core_cpus_list", "0-7\n", "cpuinfo_max_freq: 9/16 at 100; 9 of 9"},
    };
    CHECK_FAULTS("Ryzen 7 7840U", lists);
    int count;
    const char *root = fake_make(machine("Ryzen 7 7840U"), &count);
    for (int cpu = 0; cpu < count; cpu++) { /* neither file is plausible: each CPU counts as a core */
        fake_put_cpu(root, cpu, "topology/core_cpus_list", "20\n");
        fake_put_cpu(root, cpu, "topology/thread_siblings_list", "x\n");
    }
    MP_CHECK_STR(read_cores(root, first_cpus(count)), "cpuinfo_max_freq: 16/16 at 100; 16 of 16");
    fake_clear(root);
}

/* Kinds count only if each core has exactly one. */
MP_TEST(base_cores_implausible_kinds) {
    static const char *const lists[] = {"8-14\n", "7-15\n", "x\n", ""};
    int count;
    for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++) {
        const char *root = fake_make(machine("Core i5-1240P"), &count);
        fake_put(root, "sys/devices/cpu_atom/cpus", lists[i]);
        if (i == 1)
            fake_put(root, "sys/devices/cpu_core/cpus", "0-8\n");
        MP_CHECK_STR(read_cores(root, first_cpus(count)), "cpuinfo_max_freq: 4/8 at 100, 8/8 at 75; 12 of 12");
        fake_clear(root);
    }
    const char *root = fake_make(machine("Core i5-1240P"), &count);
    char path[256];
    for (int cpu = 0; cpu < count; cpu++) {
        fake_put_cpu(root, cpu, "acpi_cppc/highest_perf", "0\n");
        snprintf(path, sizeof(path), "%s/sys/devices/system/cpu/cpu%d/cpufreq/cpuinfo_max_freq", root, cpu);
        MP_CHECK_INT(unlink(path), 0);
    }
    MP_CHECK_STR(read_cores(root, first_cpus(count)), "kind: 4/8 at 100, 8/8 at 79; 12 of 12");
    fake_put(root, "sys/devices/cpu_lowpower/cpus", "14-15\n"); /* also in cpu_atom */
    MP_CHECK_STR(read_cores(root, first_cpus(count)), "equal: 12/16 at 100; 12 of 12");
    fake_put(root, "sys/devices/cpu_atom/cpus", "8-13\n");
    MP_CHECK_STR(read_cores(root, first_cpus(count)), "kind: 4/8 at 100, 6/6 at 79, 2/2 at 79; 12 of 12");
    fake_clear(root);
}

/* CPUs that are offline, or hidden by an affinity or a cpuset. Speeds are relative to the fastest usable core. */
MP_TEST(base_cores_of_some_cpus) {
    int count;
    const char *root = fake_make(machine("Core Ultra 7 155H"), &count);
    mp_cpu_set some = {0};
    MP_CHECK_STR(read_cores(root, some), "equal; 0 of 0");
    for (int cpu = 0; cpu < 22; cpu += 2) /* one sibling of each fast core, four slow cores, one of the island */
        mp_cpu_set_add(&some, cpu);
    MP_CHECK_STR(read_cores(root, some), "highest_perf: 6/6 at 100, 4/4 at 63, 1/1 at 42 unused; 10 of 11");
    MP_CHECK_INT(cores.cpus[1].core, -1);
    some = (mp_cpu_set){0};
    for (int cpu = 20; cpu < 22; cpu++) /* the island alone */
        mp_cpu_set_add(&some, cpu);
    MP_CHECK_STR(read_cores(root, some), "cpuinfo_max_freq: 2/2 at 100; 2 of 2");
    fake_clear(root);
    root = fake_make(machine("Ryzen 7 7840U"), &count);
    for (int cpu = 0; cpu < 8; cpu++) { /* CPUs 8 to 15 are offline: Linux removes their files and lists them nowhere */
        char own[8], command[256];
        snprintf(own, sizeof(own), "%d\n", cpu);
        fake_put_cpu(root, cpu, "topology/core_cpus_list", own);
        snprintf(command, sizeof(command), "rm -r %s/sys/devices/system/cpu/cpu%d", root, cpu + 8);
        MP_CHECK_INT(system(command), 0);
    }
    MP_CHECK_STR(read_cores(root, first_cpus(8)), "cpuinfo_max_freq: 8/8 at 100; 8 of 8");
    MP_CHECK_STR(read_cores(root, first_cpus(9)), "equal: 9/9 at 100; 9 of 9"); /* went offline since the affinity */
    fake_clear(root);
    MP_CHECK_STR(read_cores("/nowhere", first_cpus(6)), "equal: 6/6 at 100; 6 of 6"); /* no sysfs */
}

/* AMD ranks equal cores by highest_perf, in steps of 5 (github.com/open-mpi/hwloc issue 690): no classes. Nine speeds
 * that do differ: the slowest two share a class. */
MP_TEST(base_cores_ranks_and_many_classes) {
    fake_machine ranks = {"ranks", {{0, 15, 1, 0, NULL, 0, 1, 0}}, ""};
    fake_machine many = {"many", {{0, 9, 1, 0, NULL, 1, 0, 0}}, ""};
    int count, capacity = 1024;
    const char *root = fake_make(&ranks, &count);
    for (int cpu = 0; cpu < count; cpu++)
        fake_put_number(root, cpu, "acpi_cppc/highest_perf", 166 + 5 * (cpu * 4 % 15));
    MP_CHECK_STR(read_cores(root, first_cpus(count)), "highest_perf: 15/15 at 100; 15 of 15");
    fake_clear(root);
    root = fake_make(&many, &count);
    for (int cpu = count; cpu-- > 0; capacity = capacity * 8 / 10)
        fake_put_number(root, cpu, "cpu_capacity", capacity);
    MP_CHECK_STR(read_cores(root, first_cpus(count)),
                 "cpu_capacity: 1/1 at 100, 1/1 at 80, 1/1 at 64, 1/1 at 51, 1/1 at 41 unused, 1/1 at 33 unused, "
                 "1/1 at 26 unused, 2/2 at 21 unused; 4 of 9");
    fake_clear(root);
}

/* --- macOS --- */

typedef struct level_number { const char *name; int64_t value; } level_number;
static const level_number *level_numbers;

static bool level(const char *name, int64_t *value) {
    for (const level_number *at = level_numbers; at->name; at++)
        if (strcmp(at->name, name) == 0) {
            *value = at->value;
            return true;
        }
    return false;
}

MP_TEST(base_cores_of_levels) {
#define LEVELS "hw.nperflevels"
#define CORES(i) "hw.perflevel" #i ".physicalcpu"
#define CPUS(i) "hw.perflevel" #i ".logicalcpu"
    static const struct { level_number numbers[8]; const char *expected; } rows[] = {
        {{{LEVELS, 2}, {CORES(0), 4}, {CPUS(0), 4}, {CORES(1), 4}, {CPUS(1), 4}, {"hw.packages", 1}}, /* M1 */
         "perflevel: 4/4 at 100, 4/4 at 33 unused; 4 of 8"},
        {{{LEVELS, 1}, {CORES(0), 6}, {CPUS(0), 12}}, "perflevel: 6/12 at 100; 6 of 6"}, /* Intel */
        {{{LEVELS, 2}, {CORES(0), 4}, {CORES(1), 0}}, "equal; 0 of 0"},
        {{{LEVELS, 2}, {CORES(0), 4}}, "equal; 0 of 0"},
        {{{LEVELS, 2}, {CORES(0), -4}, {CORES(1), 4}}, "equal; 0 of 0"},
        {{{LEVELS, 1}, {CORES(0), 4}, {CPUS(0), 3}}, "perflevel: 4/4 at 100; 4 of 4"}, /* fewer CPUs than cores */
        {{{LEVELS, 1}, {CORES(0), 4}, {CPUS(0), 400}}, "perflevel: 4/4 at 100; 4 of 4"},
        {{{LEVELS, 0}, {CORES(0), 4}}, "equal; 0 of 0"},
        {{{LEVELS, 9}, {CORES(0), 4}}, "equal; 0 of 0"},
        {{{NULL, 0}}, "equal; 0 of 0"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        level_numbers = rows[i].numbers;
        mp_cores_read_levels(level, &cores);
        MP_CHECK_STR(cores_text(&cores), rows[i].expected);
    }
}

/* --- the default number of compute threads --- */

static void check_threads(const mp_topology *topology, int expected, const char *reason) {
    mp_threads_reason why;
    MP_CHECK_INT(mp_topology_threads(topology, &why), expected);
    MP_CHECK_STR(mp_threads_reason_name(why), reason);
    MP_CHECK_INT(mp_topology_threads(topology, NULL), expected);
}

MP_TEST(base_topology_default_threads) {
    static mp_topology topology;
    unsetenv("MPOOL_THREADS");
    MP_CHECK_OK(mp_options_init(&error), &error);
    const int cpus = mp_cpu_threads();
    check_threads(&topology, cpus, "cpus");
    topology.cores.used_count = 1;
    check_threads(&topology, 1, "cores");
    topology.cores.used_count = cpus;
    check_threads(&topology, cpus, "cores");
    topology.cores.used_count = cpus + 1; /* more cores than the quota allows */
    check_threads(&topology, cpus, "quota");
    setenv("MPOOL_THREADS", "77", 1);
    MP_CHECK_OK(mp_options_init(&error), &error);
    check_threads(&topology, 77, "MPOOL_THREADS");
    unsetenv("MPOOL_THREADS");
    MP_CHECK_OK(mp_options_init(&error), &error);
}
