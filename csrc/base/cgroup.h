/* cgroup.h: CPU and memory limits from the control groups (v1 and v2) of this process. Used by cpu.c. */
#ifndef MP_BASE_CGROUP_H
#define MP_BASE_CGROUP_H

#include "base/error.h"

typedef struct mp_cgroup {
    double cpus;           /* quota in CPUs; 0 = none */
    uint64_t memory_bytes; /* limit; UINT64_MAX = none */
} mp_cgroup;

/* Read `root`/proc/self/{cgroup,mountinfo} and the limits of the groups found there and of their parents. `root` is ""
 * except in tests. A file that cannot be read sets no limit. */
mp_cgroup mp_cgroup_read(const char *root);

#endif
