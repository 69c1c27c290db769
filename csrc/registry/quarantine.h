/* quarantine.h: fingerprints of requests in whose steps workers were lost. A request that was in two such steps is
 * refused for some time: it would otherwise take down every worker that serves it.
 *
 * A request that was not alone in the step may be innocent. All such losses together weigh as one and make it a
 * suspect. A suspect takes its steps alone, so that the next loss identifies the culprit; if the suspect succeeds,
 * the suspicion is withdrawn. Losses in which the request was alone count each; a success takes back one of them. A
 * process that was killed from outside weighs like a loss in company. It is not ignored, because a system without
 * memory kills the process that asks for most.
 *
 * Thread-safe. */
#ifndef MP_REGISTRY_QUARANTINE_H
#define MP_REGISTRY_QUARANTINE_H

#include "base/sys.h"

/* Enough rows for all requests of a step. */
enum { MP_QUARANTINE_ROWS = 256, MP_QUARANTINE_FAULTS = 2 };

typedef struct mp_quarantine_row {
    uint64_t fingerprint, last_ns;
    int alone; /* losses */
    bool in_company;
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
/* The request succeeded. */
void mp_quarantine_clear(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
/* True if the table is empty. */
bool mp_quarantine_is_empty(const mp_quarantine *quarantine);
/* See registry/fork.h. */
void mp_quarantine_fork_before(mp_quarantine *quarantine);
void mp_quarantine_fork_parent(mp_quarantine *quarantine);
void mp_quarantine_fork_child(mp_quarantine *quarantine);

#endif
