/* cores.c: see cores.h. */
#include "base/cores.h"

#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/cpu_set.h"

enum { PATH_BYTES = 512, NUMBER_BYTES = 64, SIBLINGS_MAX = 8, SPREAD_MAX = 10 };

const char *mp_speed_source_name(mp_speed_source source) {
    static const char *const names[] = {"equal",            "cpu_capacity", "highest_perf",
                                        "cpuinfo_max_freq", "kind",         "perflevel"};
    return names[source];
}

/* A core while it is read. `cpu`: its first usable CPU. */
typedef struct found_core {
    int cpu, kind, package;
    int64_t number;
    float speed;
    int16_t group;
} found_core;

typedef struct reading {
    const char *root;
    int count;
    found_core cores[MP_CPUS_MAX];
} reading;

static bool in_range(const char *text, int64_t least, int64_t most, int64_t *value) {
    const char *at = text;
    if (*at < '0' || *at > '9')
        return false;
    for (*value = 0; *at >= '0' && *at <= '9'; at++)
        if ((*value = *value * 10 + (*at - '0')) > most)
            return false;
    return at[strspn(at, " \t\n")] == 0 && *value >= least;
}

/* Read `file` of a CPU's folder. Returns false unless it contains one number from `least` to `most`. */
static bool read_number(const char *root, int cpu, const char *file, int64_t least, int64_t most, int64_t *value) {
    char path[PATH_BYTES], text[NUMBER_BYTES];
    return snprintf(path, sizeof(path), "%s/sys/devices/system/cpu/cpu%d/%s", root, cpu, file) < (int)sizeof(path) &&
           mp_sys_read_text(path, text, sizeof(text)) && in_range(text, least, most, value);
}

/* --- siblings --- */

static bool read_siblings(const char *root, int cpu, mp_cpu_set *siblings) {
    static const char *const names[] = {"core_cpus_list", "thread_siblings_list"}; /* since Linux 5.3; before */
    for (int i = 0; i < 2; i++) {
        char path[PATH_BYTES];
        if (snprintf(path, sizeof(path), "%s/sys/devices/system/cpu/cpu%d/topology/%s", root, cpu, names[i]) <
                (int)sizeof(path) &&
            mp_cpu_set_read(path, siblings) && mp_cpu_set_has(siblings, cpu) &&
            mp_cpu_set_count(siblings) <= SIBLINGS_MAX)
            return true;
    }
    return false;
}

/* Group the CPUs of `usable` into cores. A CPU joins the core of an earlier one if both have the same list. CPUs that
 * are offline are not usable: the affinity of a thread never contains them. */
static void read_cores(reading *r, const mp_cpu_set *usable, mp_cores *cores) {
    for (int cpu = mp_cpu_set_next(usable, 0); cpu >= 0; cpu = mp_cpu_set_next(usable, cpu + 1)) {
        mp_cpu_set own, other;
        if (cores->cpus[cpu].core >= 0)
            continue;
        found_core *core = &r->cores[r->count];
        *core = (found_core){.cpu = cpu};
        cores->cpus[cpu].core = (int16_t)r->count++;
        if (!read_siblings(r->root, cpu, &own))
            continue;
        for (int at = mp_cpu_set_next(&own, cpu + 1); at >= 0; at = mp_cpu_set_next(&own, at + 1))
            if (mp_cpu_set_has(usable, at) && cores->cpus[at].core < 0 && read_siblings(r->root, at, &other) &&
                memcmp(&own, &other, sizeof(own)) == 0)
                cores->cpus[at].core = cores->cpus[cpu].core;
    }
}

static int count_packages(reading *r) {
    mp_cpu_set packages = {0};
    for (int i = 0; i < r->count; i++) {
        int64_t package;
        if (read_number(r->root, r->cores[i].cpu, "topology/physical_package_id", 0, MP_CPUS_MAX - 1, &package))
            mp_cpu_set_add(&packages, (int)package);
    }
    int count = mp_cpu_set_count(&packages);
    return count ? count : 1;
}

/* --- kinds and speeds --- */

/* Factor: speed of a core at the clock of the fast ones. 0.787 is Intel's ratio for the cores of 2021 and 2022, by
 * which HWP converts performance levels to clock rates (HYBRID_SCALING_FACTOR of Linux's intel_pstate: 78741 / 100000);
 * later ones have 0.80 and 0.87. */
static const struct {
    const char *name;
    float factor;
} KINDS[] = {{"cpu_core", 1}, {"cpu_atom", 0.787f}, {"cpu_lowpower", 0.787f}};
enum { KIND_COUNT = sizeof(KINDS) / sizeof(KINDS[0]) };

/* Read the kind of each core. Returns false, and leaves all kinds 0, if the kinds overlap or miss a core. */
static bool read_kinds(reading *r) {
    mp_cpu_set lists[KIND_COUNT];
    for (int kind = 0; kind < KIND_COUNT; kind++) {
        char path[PATH_BYTES];
        if (snprintf(path, sizeof(path), "%s/sys/devices/%s/cpus", r->root, KINDS[kind].name) >= (int)sizeof(path) ||
            !mp_cpu_set_read(path, &lists[kind]))
            memset(&lists[kind], 0, sizeof(lists[kind]));
    }
    for (int i = 0; i < r->count; i++) {
        int kinds = 0;
        for (int kind = 0; kind < KIND_COUNT; kind++)
            kinds += mp_cpu_set_has(&lists[kind], r->cores[i].cpu);
        if (kinds != 1)
            return false;
    }
    for (int i = 0; i < r->count; i++)
        for (int kind = 0; kind < KIND_COUNT; kind++)
            if (mp_cpu_set_has(&lists[kind], r->cores[i].cpu))
                r->cores[i].kind = kind;
    return true;
}

/* True if speeds differ by more than the clocks of cores of one kind do: the best cores of a package may have 7 % more
 * than the others. */
static bool differ(double smaller, double larger) { return smaller < larger * 7 / 8; }

/* Read a number of each core. Returns false unless all are plausible, and, with `unequal`, not all about the same. */
static bool read_numbers(reading *r, const char *file, int64_t most, bool unequal) {
    int64_t smallest = INT64_MAX, largest = 0;
    for (int i = 0; i < r->count; i++) {
        int64_t *number = &r->cores[i].number;
        if (!read_number(r->root, r->cores[i].cpu, file, 1, most, number))
            return false;
        smallest = *number < smallest ? *number : smallest;
        largest = *number > largest ? *number : largest;
    }
    return largest <= smallest * SPREAD_MAX && (!unequal || differ((double)smallest, (double)largest));
}

static mp_speed_source read_speeds(reading *r, bool kinds) {
    enum { CAPACITY_MAX = 1024, CPPC_MAX = 1 << 20, KHZ_MAX = 20 * 1000 * 1000 };
    static const char *const cppc = "acpi_cppc/highest_perf", *const khz = "cpufreq/cpuinfo_max_freq";
    mp_speed_source source = MP_SPEED_EQUAL;
    float factors[KIND_COUNT] = {1, 1, 1};
    if (kinds && read_numbers(r, cppc, CPPC_MAX, true)) {
        source = MP_SPEED_CPPC;
    } else if (kinds) {
        for (int i = 0; i < KIND_COUNT; i++)
            factors[i] = KINDS[i].factor;
        source = read_numbers(r, khz, KHZ_MAX, false) ? MP_SPEED_FREQUENCY : MP_SPEED_KIND;
    } else if (read_numbers(r, "cpu_capacity", CAPACITY_MAX, true)) {
        source = MP_SPEED_CAPACITY;
    } else if (read_numbers(r, khz, KHZ_MAX, false)) {
        source = MP_SPEED_FREQUENCY;
    } else if (read_numbers(r, cppc, CPPC_MAX, true)) {
        source = MP_SPEED_CPPC;
    }
    float fastest = 0;
    for (int i = 0; i < r->count; i++) {
        found_core *core = &r->cores[i];
        bool known = source != MP_SPEED_EQUAL && source != MP_SPEED_KIND;
        core->speed = (known ? (float)core->number : 1.0f) * factors[core->kind];
        fastest = core->speed > fastest ? core->speed : fastest;
    }
    for (int i = 0; i < r->count; i++)
        r->cores[i].speed /= fastest;
    return source;
}

/* --- classes --- */

/* Sort the classes, the fastest first, and choose those that get compute threads. */
static void finish(mp_cores *cores) {
    int16_t position[MP_CORE_CLASSES_MAX];
    mp_core_class sorted[MP_CORE_CLASSES_MAX];
    for (int i = 0; i < cores->class_count; i++) {
        position[i] = 0;
        for (int j = 0; j < cores->class_count; j++) {
            float mine = cores->classes[i].speed, other = cores->classes[j].speed;
            position[i] += other > mine || (other == mine && j < i);
        }
        sorted[position[i]] = cores->classes[i];
    }
    memcpy(cores->classes, sorted, sizeof(sorted[0]) * (size_t)cores->class_count);
    for (int i = 0; i < cores->class_count; i++) {
        mp_core_class *group = &cores->classes[i];
        group->used = group->speed * 100 >= MP_CORES_USED_PERCENT;
        group->cpu_count = group->cpu_count ? group->cpu_count : mp_cpu_set_count(&group->cpus);
        cores->core_count += group->core_count;
        cores->used_count += group->used ? group->core_count : 0;
    }
    for (int cpu = 0; cpu < MP_CPUS_MAX; cpu++)
        if (cores->cpus[cpu].core >= 0)
            cores->cpus[cpu].group = position[cores->cpus[cpu].group];
}

/* Put the cores into classes. Cores of one kind are in one class if no two neighbours in the order of speed differ
 * much. So the ranks that firmware gives to equal cores do not make classes, as long as they fall in small steps. */
static void make_classes(reading *r, mp_cores *cores) {
    bool done[MP_CPUS_MAX] = {false};
    const found_core *before = NULL;
    for (int n = 0; n < r->count; n++) {
        found_core *next = NULL; /* by kind, then the fastest */
        for (int i = 0; i < r->count; i++) {
            found_core *core = &r->cores[i];
            if (done[i])
                continue;
            if (!next || core->kind < next->kind || (core->kind == next->kind && core->speed > next->speed))
                next = core;
        }
        done[next - r->cores] = true;
        bool same = before && before->kind == next->kind && !differ(next->speed, before->speed);
        if (!same && cores->class_count < MP_CORE_CLASSES_MAX)
            cores->classes[cores->class_count++].speed = next->speed;
        next->group = (int16_t)(cores->class_count - 1);
        cores->classes[next->group].core_count++;
        before = next;
    }
    for (int cpu = 0; cpu < MP_CPUS_MAX; cpu++) {
        mp_core_cpu *at = &cores->cpus[cpu];
        if (at->core < 0)
            continue;
        at->group = r->cores[at->core].group;
        mp_cpu_set_add(&cores->classes[at->group].cpus, cpu);
    }
    finish(cores);
}

static void clear(mp_cores *cores) {
    *cores = (mp_cores){.package_count = 1};
    for (int cpu = 0; cpu < MP_CPUS_MAX; cpu++)
        cores->cpus[cpu] = (mp_core_cpu){.core = -1};
}

void mp_cores_read(const char *root, const mp_cpu_set *allowed, mp_cores *cores) {
    reading r = {.root = root};
    clear(cores);
    read_cores(&r, allowed, cores);
    if (!r.count)
        return;
    cores->package_count = count_packages(&r);
    cores->source = read_speeds(&r, read_kinds(&r));
    make_classes(&r, cores);
}

void mp_cores_read_levels(bool (*number)(const char *name, int64_t *value), mp_cores *cores) {
    /* The system reports no speeds. Slower cores of the M1 have 0.65 of the clock of the fast ones (2.06 and 3.2 GHz)
     * and half of the vector units. */
    const float SLOWER = 0.33f;
    enum { CORES_MAX = 1024 };
    int64_t levels, packages;
    clear(cores);
    if (!number("hw.nperflevels", &levels) || levels < 1 || levels > MP_CORE_CLASSES_MAX)
        return;
    for (int i = 0; i < levels; i++) {
        char name[64];
        int64_t core_count, cpu_count;
        snprintf(name, sizeof(name), "hw.perflevel%d.physicalcpu", i);
        if (!number(name, &core_count) || core_count < 1 || core_count > CORES_MAX) {
            clear(cores); /* incomplete: better no classes than a wrong number of cores */
            return;
        }
        snprintf(name, sizeof(name), "hw.perflevel%d.logicalcpu", i);
        if (!number(name, &cpu_count) || cpu_count < core_count || cpu_count > core_count * SIBLINGS_MAX)
            cpu_count = core_count;
        cores->classes[cores->class_count++] = (mp_core_class){
            .core_count = (int)core_count, .cpu_count = (int)cpu_count, .speed = i ? SLOWER : 1};
    }
    cores->source = MP_SPEED_LEVEL;
    if (number("hw.packages", &packages) && packages >= 1 && packages <= CORES_MAX)
        cores->package_count = (int)packages;
    finish(cores);
}
