/* nn/expert_reads.h: detects that the same experts are read from the disk repeatedly (thrashing).
 *
 * Experts are computed from the mapped file (nn/experts.h), so they may be larger than memory: the system reads the
 * experts that the router selects and drops others. If the router soon selects dropped experts again, passes wait for
 * the disk.
 *
 * A use of a layer is measured if all experts that it reads were used before: one in three uses, and each use by many
 * rows. It is a miss if a thread waited for the disk (a major page fault) while it read them. If a quarter of
 * MP_EXPERT_WINDOW measured uses are misses, the model thrashes. A scan, which is a use that reads at least half of the
 * layer's experts, is a miss if a quarter of them are not in memory at its start. Two misses of a layer in succession,
 * within a minute, are enough: the second one begins after the first has read all that it needs.
 *
 * While the model thrashes, every use asks for the experts that are not in memory, before it reads them
 * (nn/expert_scan.h). It is a miss if there are such experts. If less than a sixteenth of MP_EXPERT_WINDOW uses are
 * misses, the model no longer thrashes: the system had dropped experts for another program, and has read them again.
 * After uses have asked for more bytes than all experts have, a warning is logged, once per load. */
#ifndef MP_MODELS_NN_EXPERT_READS_H
#define MP_MODELS_NN_EXPERT_READS_H

#include <stdatomic.h>

#include "base/error.h"
#include "tensor/tensor.h"

typedef struct mp_expert_reads { /* one per loaded model; zeroed before the first use */
    const char *name;            /* names the model in the warning; borrowed */
    uint64_t bytes;              /* bytes of all experts in the files */
    bool blind; /* the system does not tell which pages are in memory: thrashing does not end, and is logged at once */
    _Atomic bool warned;         /* the warning was logged */
    _Atomic uint32_t uses, counted, missed; /* counted and missed: since the last decision */
    _Atomic uint64_t again;                 /* bytes of used experts that were asked for since thrashing began */
    _Atomic int32_t thrashing;              /* 0 or 1 */
    _Atomic uint32_t scanned;               /* matrices that scans have read (nn/expert_scan.h) */
} mp_expert_reads;

enum { MP_EXPERT_WINDOW = 32 };

/* Returns true if the use of a layer by `rows` rows that begins now is to be measured. NULL: false. Call it only for
 * uses of experts that were all used before, which are not scans. */
bool mp_expert_reads_sample(mp_expert_reads *reads, int rows);
/* Returns true while the model thrashes. NULL: false. */
static inline bool mp_expert_reads_thrash(const mp_expert_reads *reads) {
    return reads && atomic_load_explicit(&reads->thrashing, memory_order_relaxed);
}
/* Adds a measured use. */
void mp_expert_reads_add(mp_expert_reads *reads, bool missed);
/* Begins a scan of a layer whose experts were all used before. missed_ns: end of the layer's last scan if that was a
 * miss, otherwise 0; the caller sets it to the time at which this scan ends if it is a miss. */
void mp_expert_reads_scan(mp_expert_reads *reads, _Atomic uint64_t *missed_ns, bool missed);
/* Returns true if most of a matrix is in memory, or if the system does not tell. */
bool mp_expert_is_resident(const mp_tensor *matrix);
/* Asks the system to read a matrix from the disk unless it is in memory: all of it at once, where faults would read a
 * few pages at a time. Does not wait for it. Returns true if most of it was not in memory; false if the system does not
 * tell. */
bool mp_expert_ask(const mp_expert_reads *reads, const mp_tensor *matrix);
/* Counts a matrix that a use of a thrashing model asked for. */
void mp_expert_reads_again(mp_expert_reads *reads, const mp_tensor *matrix);

#endif
