/* trace.c: see trace.h.
 *
 * The log is a bounded queue of many writers and one reader. Slot i of round r is free for its writer when its turn is
 * r * SLOTS + i, and full for the reader when its turn is one more. A writer claims a position, fills the slot and
 * publishes it; the reader stops at the first slot that is not published yet. */
#include "base/trace.h"

#include <assert.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h> /* vsnprintf only */
#include <string.h>

#include "base/sys.h"

enum { SLOTS = 256 }; /* a power of two */

typedef struct slot {
    _Alignas(64) _Atomic uint64_t turn; /* minus the slot's index, so that a zeroed ring is a valid empty one */
    mp_log_record record;
} slot;

static slot ring[SLOTS];
static _Alignas(128) _Atomic uint64_t write_at;
static _Alignas(128) uint64_t read_at; /* the reader's own */
static _Alignas(128) _Atomic uint64_t dropped;
static _Atomic int lowest = MP_LOG_WARNING;

void mp_log_set_level(int level) { atomic_store_explicit(&lowest, level, memory_order_relaxed); }
bool mp_log_enabled(int level) { return level >= atomic_load_explicit(&lowest, memory_order_relaxed); }
uint64_t mp_log_dropped(void) { return atomic_load_explicit(&dropped, memory_order_relaxed); }

/* Claim the slot of the next position. NULL when the ring is full. */
static slot *claim(uint64_t *position) {
    uint64_t at = atomic_load_explicit(&write_at, memory_order_relaxed);
    for (;;) {
        uint64_t index = at % SLOTS;
        slot *s = &ring[index];
        uint64_t turn = atomic_load_explicit(&s->turn, memory_order_acquire) + index;
        if (turn == at) {
            if (atomic_compare_exchange_weak_explicit(&write_at, &at, at + 1, memory_order_relaxed,
                                                      memory_order_relaxed)) {
                *position = at;
                return s;
            }
        } else if (turn < at) {
            return NULL; /* the reader has not freed it from the round before */
        } else {
            at = atomic_load_explicit(&write_at, memory_order_relaxed);
        }
    }
}

void mp_log(int level, const char *format, ...) {
    if (!mp_log_enabled(level))
        return;
    char message[sizeof(((mp_log_record *)0)->text)]; /* made before a slot is claimed: the reader waits for those */
    va_list args;
    va_start(args, format);
    if (vsnprintf(message, sizeof(message), format, args) < 0)
        message[0] = 0;
    va_end(args);
    mp_text_trim(message);
    uint64_t position;
    slot *s = claim(&position);
    if (!s) {
        atomic_fetch_add_explicit(&dropped, 1, memory_order_relaxed);
        return;
    }
    s->record.time_ns = mp_sys_now_ns();
    s->record.level = level;
    memcpy(s->record.text, message, sizeof(message));
    atomic_store_explicit(&s->turn, position + 1 - position % SLOTS, memory_order_release);
}

int mp_log_drain(void (*take)(const mp_log_record *record, void *arg), void *arg) {
    int taken = 0;
    for (;; taken++) {
        uint64_t index = read_at % SLOTS;
        slot *s = &ring[index];
        if (atomic_load_explicit(&s->turn, memory_order_acquire) + index != read_at + 1)
            return taken;
        mp_log_record copy = s->record;
        atomic_store_explicit(&s->turn, read_at + SLOTS - index, memory_order_release);
        read_at++;
        take(&copy, arg);
    }
}
