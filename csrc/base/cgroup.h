/* cgroup.h: what the control groups of this process (v1 and v2) leave it of the machine. Used by cpu.c. */
#ifndef MP_BASE_CGROUP_H
#define MP_BASE_CGROUP_H

#include "base/error.h"

typedef struct mp_cgroup {
    double cpus;           /* quota in CPUs; 0 = none */
    uint64_t memory_bytes; /* limit; UINT64_MAX = none */
} mp_cgroup;

/* Reads `root`/proc/self/{cgroup,mountinfo} and the limits of the groups found there and of their parents. root is ""
 * except in tests. What cannot be read counts as no limit. */
mp_cgroup mp_cgroup_read(const char *root);

#endif
