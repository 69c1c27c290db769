/* topology.c: see topology.h. */
#include "base/topology.h"

#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/cpu.h"
#include "base/options.h"

enum { PATH_BYTES = 512, NUMBERS_MAX = MP_CPUS_MAX }; /* Linux has at most 1,024 nodes */

/* --- nodes --- */

/* Add a node with those CPUs of `cpus` that are in *left, and remove them from *left. Returns false when there are
 * MP_NODES_MAX nodes already. */
static bool add_node(mp_topology *topology, int number, int memory, const mp_cpu_set *cpus, mp_cpu_set *left) {
    mp_cpu_set own = mp_cpu_set_common(cpus, left);
    int count = mp_cpu_set_count(&own);
    if (!count)
        return true;
    if (topology->node_count == MP_NODES_MAX)
        return false;
    for (int i = 0; i < MP_CPUS_MAX / 64; i++)
        left->words[i] &= ~own.words[i];
    topology->nodes[topology->node_count++] =
        (mp_node){.number = number, .memory = memory, .cpu_count = count, .cpus = own};
    return true;
}

/* Read the machine's nodes. Returns false when the system reports no nodes, or more than MP_NODES_MAX. */
static bool read_system(const char *root, const mp_cpu_set *allowed, mp_topology *topology) {
    char path[PATH_BYTES];
    mp_cpu_set numbers, cpus, left = *allowed;
    *topology = (mp_topology){0};
    if (snprintf(path, sizeof(path), "%s/sys/devices/system/node/online", root) >= (int)sizeof(path) ||
        !mp_cpu_set_read(path, &numbers))
        return false;
    for (int i = 0; i < NUMBERS_MAX; i++) {
        if (!mp_cpu_set_has(&numbers, i) ||
            snprintf(path, sizeof(path), "%s/sys/devices/system/node/node%d/cpulist", root, i) >= (int)sizeof(path) ||
            !mp_cpu_set_read(path, &cpus)) /* a node without CPUs, or just removed */
            continue;
        if (!add_node(topology, i, i, &cpus, &left))
            return false;
    }
    return topology->node_count > 0 && add_node(topology, topology->nodes[topology->node_count - 1].number + 1, -1,
                                                &left, &left);
}

static mp_status fail_table(const char *table, const char *at, const char *what, mp_error *error) {
    return mp_fail(error, MP_INVALID_ARGUMENT,
                   "the environment variable MPOOL_NODES must be the CPUs of each node, such as 0-7,16-23;8-15,24-31 "
                   "(numbers below %d), or off, got \"%.64s\": %s at byte %d; correct or unset it",
                   MP_CPUS_MAX, table, what, (int)(at - table));
}

/* Parse MPOOL_NODES. Sets *too_many when it results in more than MP_NODES_MAX nodes. */
static mp_status read_table(const char *table, const mp_topology *system, const mp_cpu_set *allowed,
                            mp_topology *topology, bool *too_many, mp_error *error) {
    mp_cpu_set seen = {0}, left = *allowed;
    const char *at = table;
    *topology = (mp_topology){0};
    *too_many = false;
    for (int number = 0;; number++, at++) {
        mp_cpu_set cpus = {0};
        const char *begin = at;
        if (!mp_cpu_set_parse(&at, &cpus) || (*at && *at != ';'))
            return fail_table(table, at, "not a list of CPUs", error);
        mp_cpu_set twice = mp_cpu_set_common(&cpus, &seen);
        if (mp_cpu_set_count(&twice))
            return fail_table(table, begin, "a CPU of another node", error);
        int memory = -1;
        for (int i = 0; i < MP_CPUS_MAX / 64; i++)
            seen.words[i] |= cpus.words[i];
        for (int i = 0; i < system->node_count; i++) {
            mp_cpu_set both = mp_cpu_set_common(&cpus, &system->nodes[i].cpus);
            if (memory < 0 && mp_cpu_set_count(&both))
                memory = system->nodes[i].memory;
        }
        *too_many |= !add_node(topology, number, memory, &cpus, &left);
        if (!*at) {
            *too_many |= !add_node(topology, number + 1, -1, &left, &left);
            return MP_OK;
        }
    }
}

mp_status mp_topology_check(const char *table, mp_error *error) {
    static const mp_topology nothing;
    static const mp_cpu_set none;
    mp_topology topology;
    bool too_many;
    if (!*table || strcmp(table, "off") == 0)
        return MP_OK;
    return read_table(table, &nothing, &none, &topology, &too_many, error);
}

/* Set the number of cores of each node. A core with CPUs in two nodes, which only MPOOL_NODES can cause, counts in the
 * node of its first CPU. */
static void count_cores(mp_topology *topology) {
    bool counted[MP_CPUS_MAX] = {false};
    for (int i = 0; i < topology->node_count; i++) {
        mp_node *node = &topology->nodes[i];
        for (int cpu = mp_cpu_set_next(&node->cpus, 0); cpu >= 0; cpu = mp_cpu_set_next(&node->cpus, cpu + 1)) {
            mp_core_cpu at = topology->cores.cpus[cpu];
            if (at.core < 0 || !topology->cores.classes[at.group].used || counted[at.core])
                continue;
            counted[at.core] = true;
            node->core_count++;
        }
    }
}

static mp_status read_nodes(const char *root, const char *table, const mp_cpu_set *allowed, mp_topology *topology,
                            mp_error *error) {
    mp_topology system;
    bool known = strcmp(table, "off") != 0 && read_system(root, allowed, &system), too_many = false;
    if (!known)
        system = (mp_topology){0};
    *topology = system;
    if (*table && strcmp(table, "off") != 0) {
        MP_TRY(read_table(table, &system, allowed, topology, &too_many, error));
        known = topology->node_count > 0 && !too_many;
    }
    if (!known)
        *topology = (mp_topology){
            .node_count = 1, .nodes = {{.memory = -1, .cpu_count = mp_cpu_set_count(allowed), .cpus = *allowed}}};
    return MP_OK;
}

mp_status mp_topology_read_from(const char *root, const char *table, const mp_cpu_set *allowed, mp_topology *topology,
                                mp_error *error) {
    MP_TRY(read_nodes(root, table, allowed, topology, error));
    mp_cores_read(root, allowed, &topology->cores);
    count_cores(topology);
    return MP_OK;
}

mp_status mp_topology_read(mp_topology *topology, mp_error *error) {
    mp_cpu_set allowed;
    bool numbered = mp_sys_get_affinity(&allowed);
    if (!numbered)
        memset(&allowed, 0, sizeof(allowed));
    MP_TRY(mp_topology_read_from("", mp_options_get()->nodes, &allowed, topology, error));
    if (!numbered)
        mp_cores_read_levels(mp_sys_get_number, &topology->cores);
    return MP_OK;
}

const char *mp_threads_reason_name(mp_threads_reason reason) {
    static const char *const names[] = {"MPOOL_THREADS", "cores", "quota", "cpus"};
    return names[reason];
}

int mp_topology_threads(const mp_topology *topology, mp_threads_reason *reason) {
    const int asked = (int)mp_options_get()->threads, cpus = mp_cpu_threads(), cores = topology->cores.used_count;
    mp_threads_reason why = asked > 0       ? MP_THREADS_ASKED
                            : cores == 0    ? MP_THREADS_CPUS
                            : cores <= cpus ? MP_THREADS_CORES
                                            : MP_THREADS_QUOTA;
    if (reason)
        *reason = why;
    return why == MP_THREADS_ASKED ? asked : why == MP_THREADS_CORES ? cores : cpus;
}
