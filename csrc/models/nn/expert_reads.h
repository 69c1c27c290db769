/* nn/expert_reads.h: detects that the same experts are read from the disk repeatedly (thrashing).
 *
 * Experts are computed from the mapped file (nn/experts.h), so they may be larger than memory: the system reads the
 * experts that the router selects and drops others. If the router soon selects dropped experts again, passes wait for
 * the disk.
 *
 * One in seven uses of a layer is sampled. A sampled use counts if all experts that it reads were used before. It is a
 * miss if a thread waited for the disk (a major page fault) while it read them. If a quarter of 64 counted uses are
 * misses, a warning is logged, once per load. */
#ifndef MP_MODELS_NN_EXPERT_READS_H
#define MP_MODELS_NN_EXPERT_READS_H

#include <stdatomic.h>

#include "base/error.h"

typedef struct mp_expert_reads { /* one per loaded model; zeroed before the first use */
    const char *name;            /* names the model in the warning; borrowed */
    uint64_t bytes;              /* bytes of all experts in the files */
    _Atomic uint32_t uses, counted, missed; /* counted and missed: since the last decision */
    _Atomic int32_t thrashing;              /* 1 after the warning */
} mp_expert_reads;

/* Returns true if the use of a layer that begins now is to be measured. NULL: false. */
bool mp_expert_reads_sample(mp_expert_reads *reads);
/* Returns true after the warning. NULL: false. */
static inline bool mp_expert_reads_thrash(const mp_expert_reads *reads) {
    return reads && atomic_load_explicit(&reads->thrashing, memory_order_relaxed);
}
/* Adds a measured use. */
void mp_expert_reads_add(mp_expert_reads *reads, bool missed);

#endif
