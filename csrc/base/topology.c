/* topology.c: see topology.h. */
#include "base/topology.h"

#include <stdio.h> /* snprintf only */
#include <string.h>

#include "base/options.h"

enum { PATH_BYTES = 512, TEXT_BYTES = 8192, NUMBERS_MAX = MP_CPUS_MAX }; /* Linux has at most 1,024 nodes */

int mp_cpu_set_count(const mp_cpu_set *cpus) {
    int count = 0;
    for (int i = 0; i < MP_CPUS_MAX / 64; i++)
        count += __builtin_popcountll(cpus->words[i]);
    return count;
}

void mp_cpu_set_text(const mp_cpu_set *cpus, char *to, size_t size) {
    size_t used = 0;
    to[0] = 0;
    for (int cpu = 0; cpu < MP_CPUS_MAX && used < size; cpu++) {
        if (!mp_cpu_set_has(cpus, cpu))
            continue;
        int last = cpu;
        while (last + 1 < MP_CPUS_MAX && mp_cpu_set_has(cpus, last + 1))
            last++;
        used += (size_t)snprintf(to + used, size - used, last > cpu ? "%s%d-%d" : "%s%d", used ? "," : "", cpu, last);
        cpu = last;
    }
}

/* --- lists as the kernel writes them --- */

static const char *skip_blanks(const char *at) { return at + strspn(at, " \t\n"); }

/* Parse a number below `limit` at *text; move *text past the number and the blanks after it. */
static bool take_number(const char **text, int limit, int *value) {
    const char *at = skip_blanks(*text);
    if (*at < '0' || *at > '9')
        return false;
    for (*value = 0; *at >= '0' && *at <= '9'; at++)
        if ((*value = *value * 10 + (*at - '0')) >= limit)
            return false;
    *text = skip_blanks(at);
    return true;
}

/* Parse a list such as "0-3,8" at *text, move *text past the list and add its numbers to `set`. Returns false for a
 * malformed list and leaves *text at the error. */
static bool take_list(const char **text, int limit, mp_cpu_set *set) {
    for (;; ++*text) {
        int first, last;
        if (!take_number(text, limit, &first))
            return false;
        last = first;
        if (**text == '-') {
            ++*text;
            if (!take_number(text, limit, &last) || last < first)
                return false;
        }
        for (int i = first; i <= last; i++)
            mp_cpu_set_add(set, i);
        if (**text != ',')
            return true;
    }
}

static bool read_list(const char *path, int limit, mp_cpu_set *set) {
    char text[TEXT_BYTES];
    const char *at = text;
    memset(set, 0, sizeof(*set));
    return mp_sys_read_text(path, text, sizeof(text)) && take_list(&at, limit, set) && !*at;
}

/* --- nodes --- */

static mp_cpu_set common(const mp_cpu_set *a, const mp_cpu_set *b) {
    mp_cpu_set both;
    for (int i = 0; i < MP_CPUS_MAX / 64; i++)
        both.words[i] = a->words[i] & b->words[i];
    return both;
}

/* Add a node with those CPUs of `cpus` that are in *left, and remove them from *left. Returns false when there are
 * MP_NODES_MAX nodes already. */
static bool add_node(mp_topology *topology, int number, int memory, const mp_cpu_set *cpus, mp_cpu_set *left) {
    mp_cpu_set own = common(cpus, left);
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
        !read_list(path, NUMBERS_MAX, &numbers))
        return false;
    for (int i = 0; i < NUMBERS_MAX; i++) {
        if (!mp_cpu_set_has(&numbers, i) ||
            snprintf(path, sizeof(path), "%s/sys/devices/system/node/node%d/cpulist", root, i) >= (int)sizeof(path) ||
            !read_list(path, MP_CPUS_MAX, &cpus)) /* a node without CPUs, or just removed */
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
        if (!take_list(&at, MP_CPUS_MAX, &cpus) || (*at && *at != ';'))
            return fail_table(table, at, "not a list of CPUs", error);
        mp_cpu_set twice = common(&cpus, &seen);
        if (mp_cpu_set_count(&twice))
            return fail_table(table, begin, "a CPU of another node", error);
        int memory = -1;
        for (int i = 0; i < MP_CPUS_MAX / 64; i++)
            seen.words[i] |= cpus.words[i];
        for (int i = 0; i < system->node_count; i++) {
            mp_cpu_set both = common(&cpus, &system->nodes[i].cpus);
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

mp_status mp_topology_read_from(const char *root, const char *table, const mp_cpu_set *allowed, mp_topology *topology,
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

mp_status mp_topology_read(mp_topology *topology, mp_error *error) {
    mp_cpu_set allowed;
    if (!mp_sys_get_affinity(&allowed))
        memset(&allowed, 0, sizeof(allowed));
    return mp_topology_read_from("", mp_options_get()->nodes, &allowed, topology, error);
}
