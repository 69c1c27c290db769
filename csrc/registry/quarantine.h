/* quarantine.h: fingerprints of calls in whose steps workers failed. One that was there twice is refused for a while:
 * it would go on to take down every worker that serves it. Any thread may call. */
#ifndef MP_REGISTRY_QUARANTINE_H
#define MP_REGISTRY_QUARANTINE_H

#include "base/sys.h"

enum { MP_QUARANTINE_ROWS = 64, MP_QUARANTINE_FAULTS = 2 };

typedef struct mp_quarantine { /* caller's storage, zeroed */
    mp_mutex lock;
    _Atomic int used; /* rows that say something; read without the lock */
    struct {          /* guarded by: lock */
        uint64_t fingerprint, last_ns;
        int faults;
    } rows[MP_QUARANTINE_ROWS];
} mp_quarantine;

void mp_quarantine_init(mp_quarantine *quarantine);
void mp_quarantine_deinit(mp_quarantine *quarantine);
/* Another fault with this call. Returns how many there were lately. */
int mp_quarantine_add(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
bool mp_quarantine_holds(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns);
/* Whether there is anything to compare with. */
bool mp_quarantine_is_empty(const mp_quarantine *quarantine);
void mp_quarantine_fork_child(mp_quarantine *quarantine);

#endif
