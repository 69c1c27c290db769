/* topology.h: memory nodes (NUMA), the CPUs of each, and the cores (base/cores.h).
 *
 * A node is a set of CPUs with memory that is near to them and farther from all other CPUs. Nodes come from
 * /sys/devices/system/node, or from the option MPOOL_NODES ("0-7;8-15": the CPUs of each node; "off": one node). CPUs
 * that this process may not use are left out, and so are nodes without usable CPUs. CPUs that no node lists form one
 * more node. All CPUs form one node if the system reports no nodes, or if there are more than MP_NODES_MAX. */
#ifndef MP_BASE_TOPOLOGY_H
#define MP_BASE_TOPOLOGY_H

#include "base/cores.h"
#include "base/cpu_set.h"

enum { MP_NODES_MAX = 32 };

typedef struct mp_node {
    int number;      /* the system's number, or the position in MPOOL_NODES */
    int memory;      /* the system's number for mp_sys_prefer_node; -1 = unknown */
    int cpu_count;   /* at least 1, unless the system reports no CPUs */
    int core_count;  /* cores with a CPU in `cpus` whose class is used (mp_core_class.used); 0: none, or not known */
    mp_cpu_set cpus; /* usable CPUs */
} mp_node;

typedef struct mp_topology {
    int node_count; /* at least 1 */
    mp_node nodes[MP_NODES_MAX];
    mp_cores cores;
} mp_topology;

/* Read the current topology. INVALID_ARGUMENT when MPOOL_NODES is malformed. */
mp_status mp_topology_read(mp_topology *topology, mp_error *error);
/* mp_topology_read with explicit inputs: /sys is read below the folder `root`, `allowed` are the CPUs that the process
 * may use, and `table` is the value of MPOOL_NODES ("" = as the system reports). */
mp_status mp_topology_read_from(const char *root, const char *table, const mp_cpu_set *allowed, mp_topology *topology,
                                mp_error *error);
/* Check the syntax of MPOOL_NODES. INVALID_ARGUMENT when it is malformed. Call once, when the module loads. */
mp_status mp_topology_check(const char *table, mp_error *error);

/* The origin of the default number of compute threads. */
typedef enum mp_threads_reason {
    MP_THREADS_ASKED, /* MPOOL_THREADS */
    MP_THREADS_CORES, /* one per core of the classes that are used */
    MP_THREADS_QUOTA, /* the quota of the control group, which is smaller */
    MP_THREADS_CPUS,  /* one per CPU: the system reports no cores */
} mp_threads_reason;
/* Returns "MPOOL_THREADS", "cores", "quota" or "cpus". */
const char *mp_threads_reason_name(mp_threads_reason reason);
/* Returns the default number of compute threads of the process, at least 1. `reason` may be NULL. */
int mp_topology_threads(const mp_topology *topology, mp_threads_reason *reason);

#endif
