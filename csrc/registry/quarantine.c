/* quarantine.c: a small table of fingerprints. See quarantine.h. */
#include "registry/quarantine.h"

#include <stdatomic.h>

static const uint64_t FORGET_NS = 600ull * 1000 * 1000 * 1000;

void mp_quarantine_init(mp_quarantine *quarantine) { mp_mutex_init(&quarantine->lock); }

void mp_quarantine_deinit(mp_quarantine *quarantine) { mp_mutex_deinit(&quarantine->lock); }

/* --- rows; must hold the lock --- */

static int quarantine_count(const mp_quarantine *quarantine) {
    mp_assert_held(&quarantine->lock);
    return atomic_load_explicit(&quarantine->used, memory_order_relaxed);
}

static void set_count(mp_quarantine *quarantine, int used) {
    mp_assert_held(&quarantine->lock);
    atomic_store_explicit(&quarantine->used, used, memory_order_release);
}

/* Returns the verdict on the row's request: see mp_quarantine_check. */
static int verdict(const mp_quarantine_row *row) {
    int losses = row->alone + row->in_company;
    if (!row->alone || losses < MP_QUARANTINE_FAULTS)
        return losses > 0;
    return MP_QUARANTINE_FAULTS;
}

static void remove_row(mp_quarantine *quarantine, mp_quarantine_row *row) {
    mp_assert_held(&quarantine->lock);
    int last = quarantine_count(quarantine) - 1;
    *row = quarantine->rows[last];
    set_count(quarantine, last);
}

/* Returns the row of a request, or NULL. Clears rows that have expired. */
static mp_quarantine_row *quarantine_find(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    mp_assert_held(&quarantine->lock);
    mp_quarantine_row *found = NULL;
    for (int i = quarantine_count(quarantine) - 1; i >= 0; i--)
        if (now_ns >= mp_sys_after(quarantine->rows[i].last_ns, FORGET_NS))
            remove_row(quarantine, &quarantine->rows[i]);
    for (int i = 0; i < quarantine_count(quarantine) && !found; i++)
        if (quarantine->rows[i].fingerprint == fingerprint)
            found = &quarantine->rows[i];
    return found;
}

/* Returns a row for a request that has none. In a full table, replaces the row with the lowest `alone`, among equals
 * the row whose last loss is oldest. Returns NULL if `alone` of every row is greater than that of the new row. */
static mp_quarantine_row *make_row(mp_quarantine *quarantine, bool alone) {
    mp_assert_held(&quarantine->lock);
    int used = quarantine_count(quarantine);
    if (used < MP_QUARANTINE_ROWS) {
        set_count(quarantine, used + 1);
        return &quarantine->rows[used];
    }
    mp_quarantine_row *least = &quarantine->rows[0];
    for (int i = 1; i < used; i++) {
        mp_quarantine_row *row = &quarantine->rows[i];
        if (row->alone < least->alone || (row->alone == least->alone && row->last_ns < least->last_ns))
            least = row;
    }
    return least->alone > alone ? NULL : least;
}

/* --- interface --- */

int mp_quarantine_add(mp_quarantine *quarantine, uint64_t fingerprint, bool alone, uint64_t now_ns) {
    int known = 1;
    mp_mutex_lock(&quarantine->lock);
    mp_quarantine_row *row = quarantine_find(quarantine, fingerprint, now_ns);
    if (!row && (row = make_row(quarantine, alone)))
        *row = (mp_quarantine_row){.fingerprint = fingerprint};
    if (row) {
        row->last_ns = now_ns;
        row->in_company |= !alone;
        row->alone += alone;
        known = verdict(row);
    }
    mp_mutex_unlock(&quarantine->lock);
    return known;
}

int mp_quarantine_check(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    mp_mutex_lock(&quarantine->lock);
    const mp_quarantine_row *row = quarantine_find(quarantine, fingerprint, now_ns);
    int known = row ? verdict(row) : 0;
    mp_mutex_unlock(&quarantine->lock);
    return known;
}

void mp_quarantine_clear(mp_quarantine *quarantine, uint64_t fingerprint, uint64_t now_ns) {
    mp_mutex_lock(&quarantine->lock);
    mp_quarantine_row *row = quarantine_find(quarantine, fingerprint, now_ns);
    if (row) {
        row->in_company = false;
        row->alone -= row->alone > 0;
        if (!row->alone)
            remove_row(quarantine, row);
    }
    mp_mutex_unlock(&quarantine->lock);
}

bool mp_quarantine_is_empty(const mp_quarantine *quarantine) {
    return atomic_load_explicit(&quarantine->used, memory_order_acquire) == 0;
}

void mp_quarantine_fork_before(mp_quarantine *quarantine) { mp_mutex_lock(&quarantine->lock); }

void mp_quarantine_fork_parent(mp_quarantine *quarantine) { mp_mutex_unlock(&quarantine->lock); }

void mp_quarantine_fork_child(mp_quarantine *quarantine) { mp_mutex_init(&quarantine->lock); }
