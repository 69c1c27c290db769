/* quarantine.h: fingerprints of calls in whose steps workers were lost. One that was there twice is refused for a
 * while: it would go on to take down every worker that serves it.
 *
 * Who was there in company may be innocent, however often: that is suspicion and weighs as one loss at most. A suspect
 * takes its steps alone, so that the next loss names the culprit, and its success withdraws the suspicion. What a call
 * was alone with counts each time; a success takes back one of them. A process that was killed from outside says no
 * more against a call than company does: not nothing, for a system without memory kills who asks for most.
 *
 * Any thread may call. */
#ifndef MP_REGISTRY_QUARANTINE_H
#define MP_REGISTRY_QUARANTINE_H

#include "base/sys.h"

/* Rows for everybody in a step. */
enum { MP_QUARANTINE_ROWS = 256, MP_QUARANTINE_FAULTS = 2 };

typedef struct mp_quarantine_row {
    uint64_t fingerprint, last_ns;
    int alone; /* losses */
    bool in_company;
} mp_quarantine_row;

typedef struct mp_quarantine { /* caller's storage, zeroed */
    mp_mutex lock;
    _Atomic int used;                           /* rows; read without the lock */
    mp_quarantine_row rows[MP_QUARANTINE_ROWS]; /* guarded by: lock */
} mp_quarantine;

void mp_quarantine_init(mp_quarantine *quarantine);
void mp_quarantine_deinit(mp_quarantine *quarantine);
/* A worker was lost with this call. Returns what that makes, as mp_quarantine_look. */
int mp_quarantine_add(mp_quarantine *quarantine, uint64_t fingerprint, bool alone, uint64_t now_ns);
/* 0 = nothing is known against it; 1 = a suspect; MP_QUARANTINE_FAULTS = to be refused. */
int mp_quarantine_look(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
/* A call succeeded. */
void mp_quarantine_clear(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
/* Whether there is nothing to compare with. */
bool mp_quarantine_is_empty(const mp_quarantine *quarantine);
/* See registry/fork.h. */
void mp_quarantine_fork_before(mp_quarantine *quarantine);
void mp_quarantine_fork_parent(mp_quarantine *quarantine);
void mp_quarantine_fork_child(mp_quarantine *quarantine);

#endif
