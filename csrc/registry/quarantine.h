/* quarantine.h: fingerprints of requests in whose steps workers were lost. A request that counts two losses, at least
 * one of them alone in its step, is refused until 10 minutes after the last loss: it would otherwise take down every
 * worker that serves it.
 *
 * A request that was not alone in the step may be innocent. All such losses together count as one and make the request
 * a suspect. A suspect takes its steps alone, so that the next loss identifies the culprit; if the suspect succeeds,
 * the suspicion is withdrawn. Each loss in which the request was alone counts as one; a success cancels one of these. A
 * process that was killed by another program does not count: a system that runs out of memory chooses the process by
 * its size, not by its request.
 *
 * Thread-safe. */
#ifndef MP_REGISTRY_QUARANTINE_H
#define MP_REGISTRY_QUARANTINE_H

#include "base/sys.h"

/* Enough rows for all requests of a step. */
enum { MP_QUARANTINE_ROWS = 256, MP_QUARANTINE_FAULTS = 2 };

typedef struct mp_quarantine_row {
    uint64_t fingerprint, last_ns;
    int alone; /* losses in steps of this request alone */
    bool in_company; /* at least one loss in a step with other requests */
} mp_quarantine_row;

typedef struct mp_quarantine { /* caller's storage, zeroed */
    mp_mutex lock;
    _Atomic int used;                           /* rows in use; read without the lock */
    mp_quarantine_row rows[MP_QUARANTINE_ROWS]; /* guarded by: lock */
} mp_quarantine;

void mp_quarantine_init(mp_quarantine *quarantine);
void mp_quarantine_deinit(mp_quarantine *quarantine);
/* Records a worker that was lost with this request. Returns the verdict, as mp_quarantine_check. */
int mp_quarantine_add(mp_quarantine *quarantine, uint64_t fingerprint, bool alone, uint64_t now_ns);
/* Returns the verdict: 0 = nothing is known; 1 = a suspect; MP_QUARANTINE_FAULTS = refuse it. */
int mp_quarantine_check(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
/* Call when a request with this fingerprint succeeded. */
void mp_quarantine_clear(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
/* True if the table is empty. */
bool mp_quarantine_is_empty(const mp_quarantine *quarantine);
/* See registry/fork.h. */
void mp_quarantine_fork_before(mp_quarantine *quarantine);
void mp_quarantine_fork_parent(mp_quarantine *quarantine);
void mp_quarantine_fork_child(mp_quarantine *quarantine);

#endif
