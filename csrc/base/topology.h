/* topology.h: which CPUs of this process lie on which memory node (NUMA).
 *
 * A node is CPUs with memory of their own, near to them and farther from all others. What is known comes from
 * /sys/devices/system/node, or from the option MPOOL_NODES ("0-7;8-15": the CPUs of each node; "off": one node), less
 * the CPUs that this process may not use. A node of which it may use none is left out. CPUs that no node names are one
 * more. Where nothing is known, or the machine has more nodes than MP_NODES_MAX, all CPUs are one node. */
#ifndef MP_BASE_TOPOLOGY_H
#define MP_BASE_TOPOLOGY_H

#include "base/sys.h"

enum { MP_NODES_MAX = 32 };

typedef struct mp_node {
    int number;      /* the system's, or the place in MPOOL_NODES */
    int memory;      /* the system's number of it, for mp_sys_prefer_node; -1 = unknown */
    int cpu_count;   /* at least 1, unless the system does not tell */
    mp_cpu_set cpus; /* that this process may use */
} mp_node;

typedef struct mp_topology {
    int node_count; /* at least 1 */
    mp_node nodes[MP_NODES_MAX];
} mp_topology;

/* As it is now. INVALID_ARGUMENT: MPOOL_NODES is not as described. */
mp_status mp_topology_read(mp_topology *topology, mp_error *error);
/* Of a machine whose /sys lies below `root`, on which a process may use the CPUs `allowed`; table: as MPOOL_NODES, "" =
 * as the system says. */
mp_status mp_topology_read_from(const char *root, const char *table, const mp_cpu_set *allowed, mp_topology *topology,
                                mp_error *error);
/* Whether MPOOL_NODES is as described. Once, when the module loads. */
mp_status mp_topology_check(const char *table, mp_error *error);

static inline bool mp_cpu_set_has(const mp_cpu_set *cpus, int cpu) { return cpus->words[cpu / 64] >> cpu % 64 & 1; }
static inline void mp_cpu_set_add(mp_cpu_set *cpus, int cpu) { cpus->words[cpu / 64] |= (uint64_t)1 << cpu % 64; }
int mp_cpu_set_count(const mp_cpu_set *cpus);
/* "0-7,16": zero-terminated, cut where `size` ends. */
void mp_cpu_set_text(const mp_cpu_set *cpus, char *to, size_t size);

#endif
