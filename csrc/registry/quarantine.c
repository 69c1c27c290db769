/* quarantine.c: see quarantine.h. */
#include "registry/quarantine.h"

#include <stdatomic.h>

static const uint64_t FORGET_NS = 600ull * 1000 * 1000 * 1000;

void mp_quarantine_init(mp_quarantine *quarantine) { mp_mutex_init(&quarantine->lock); }

void mp_quarantine_deinit(mp_quarantine *quarantine) { mp_mutex_deinit(&quarantine->lock); }

/* Under the lock: the row of a call; -1 = none. */
static int find(const mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    int used = atomic_load_explicit(&quarantine->used, memory_order_relaxed);
    for (int i = 0; i < used; i++)
        if (quarantine->rows[i].fingerprint == fingerprint &&
            now_ns < mp_sys_after(quarantine->rows[i].last_ns, FORGET_NS))
            return i;
    return -1;
}

int mp_quarantine_add(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    mp_mutex_lock(&quarantine->lock);
    int at = find(quarantine, fingerprint, now_ns);
    int used = atomic_load_explicit(&quarantine->used, memory_order_relaxed);
    if (at < 0) {
        if (used < MP_QUARANTINE_ROWS) {
            at = used;
            atomic_store_explicit(&quarantine->used, used + 1, memory_order_release);
        } else { /* the one that has been quiet for longest */
            at = 0;
            for (int i = 1; i < used; i++)
                if (quarantine->rows[i].last_ns < quarantine->rows[at].last_ns)
                    at = i;
        }
        quarantine->rows[at].fingerprint = fingerprint;
        quarantine->rows[at].faults = 0;
    }
    quarantine->rows[at].last_ns = now_ns;
    int faults = ++quarantine->rows[at].faults;
    mp_mutex_unlock(&quarantine->lock);
    return faults;
}

bool mp_quarantine_holds(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    mp_mutex_lock(&quarantine->lock);
    int at = find(quarantine, fingerprint, now_ns);
    bool holds = at >= 0 && quarantine->rows[at].faults >= MP_QUARANTINE_FAULTS;
    mp_mutex_unlock(&quarantine->lock);
    return holds;
}

bool mp_quarantine_is_empty(const mp_quarantine *quarantine) {
    return atomic_load_explicit(&quarantine->used, memory_order_acquire) == 0;
}

void mp_quarantine_fork_child(mp_quarantine *quarantine) { mp_mutex_init(&quarantine->lock); }
