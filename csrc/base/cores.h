/* cores.h: the cores of this process, the CPUs of each, and how fast each is.
 *
 * A CPU is a hardware thread, numbered by the system; the CPUs of one core (siblings) share its arithmetic units. Cores
 * of one machine may differ: fast and slow cores of laptops, and slower ones still on a low-power island. Cores of
 * about the same speed form a class.
 *
 * Linux: siblings come from /sys/devices/system/cpu/cpuN/topology. Kinds of cores come from /sys/devices/cpu_core,
 * cpu_atom and cpu_lowpower (Intel). Speeds come from the first of these sources that has a plausible number for every
 * core:
 *
 *   machine          sources
 *   with kinds       acpi_cppc/highest_perf, cpufreq/cpuinfo_max_freq times a factor per kind, the factor alone
 *   without kinds    cpu_capacity, cpufreq/cpuinfo_max_freq, acpi_cppc/highest_perf
 *
 * highest_perf of a machine without kinds comes last, because AMD ranks equal cores by it. cpu_capacity and the
 * highest_perf of a machine with kinds count only if they differ between cores: on x86-64, cpu_capacity is 1,024 for
 * all cores of many unequal machines. macOS: counts of cores come from hw.perflevelN; CPUs have no numbers there.
 *
 * Numbers are never trusted alone. A list of siblings counts only if each CPU of it has the same list. A source with
 * one number that is missing, malformed, out of range, or less than a tenth of another one is ignored. Without any
 * source, all cores have the same speed.
 *
 * Speeds are estimates from clock rates, for decisions before anything has been measured. Measured speeds should
 * replace them. */
#ifndef MP_BASE_CORES_H
#define MP_BASE_CORES_H

#include "base/sys.h"

enum {
    MP_CORE_CLASSES_MAX = 8, /* further classes count as the last one */
    /* A class whose fastest core has less than this share of the speed of the fastest core of the process gets no
     * compute thread by default. Slow cores of Intel's and AMD's laptops have 0.58 to 0.67, the two cores on the
     * low-power island of a Core Ultra 155H 0.42: they add little, and work that is cut into equal parts waits for
     * them. */
    MP_CORES_USED_PERCENT = 50,
};

typedef enum mp_speed_source {
    MP_SPEED_EQUAL,     /* no source: all cores count as equal */
    MP_SPEED_CAPACITY,  /* cpu_capacity */
    MP_SPEED_CPPC,      /* acpi_cppc/highest_perf */
    MP_SPEED_FREQUENCY, /* cpufreq/cpuinfo_max_freq */
    MP_SPEED_KIND,      /* the kind of core, without a number */
    MP_SPEED_LEVEL,     /* hw.perflevelN */
} mp_speed_source;
/* Returns "equal", "cpu_capacity", "highest_perf", "cpuinfo_max_freq", "kind" or "perflevel". */
const char *mp_speed_source_name(mp_speed_source source);

typedef struct mp_core_class {
    int core_count;
    mp_cpu_set cpus; /* CPUs of these cores, siblings included; empty where CPUs have no numbers */
    int cpu_count;
    float speed; /* speed of the fastest core of the class; 1.0 = the fastest core of the process */
    bool used;   /* each core gets a compute thread by default */
} mp_core_class;

typedef struct mp_core_cpu {
    int16_t core;  /* number of the core, from 0 on by its first CPU; -1: the process may not use the CPU */
    int16_t group; /* index in mp_cores.classes */
} mp_core_cpu;

typedef struct mp_cores {
    int package_count, core_count; /* core_count 0: the system reports no cores */
    int used_count;                /* cores of classes with `used`; at least 1, unless core_count is 0 */
    mp_speed_source source;
    int class_count; /* 0 if core_count is 0 */
    mp_core_class classes[MP_CORE_CLASSES_MAX]; /* the fastest first */
    mp_core_cpu cpus[MP_CPUS_MAX];              /* index: number of the CPU */
} mp_cores;

/* Read the cores of the CPUs in `allowed`, below the folder `root`: "" except in tests. */
void mp_cores_read(const char *root, const mp_cpu_set *allowed, mp_cores *cores);
/* Read the cores of a system whose CPUs have no numbers. `number`: mp_sys_get_number except in tests. */
void mp_cores_read_levels(bool (*number)(const char *name, int64_t *value), mp_cores *cores);

#endif
