/* events.c: see events.h. */
#include "registry/events.h"

#include <string.h>

#include "base/sys.h"

enum { SLOTS = 1024 };

/* turn: position + 1 once the event of that position is written, position + SLOTS once it was read. Stored less the
 * slot's index, so that zeroed memory is an empty ring. */
typedef struct slot {
    _Atomic uint64_t turn;
    mp_event event;
} slot;

_Atomic uint32_t mp_events_wanted;
static slot ring[SLOTS];
static _Atomic uint64_t write_at, dropped;
static uint64_t read_at; /* the reader's */

const char *mp_event_name(mp_event_kind kind) {
    static const char *const names[] = {"spawn",         "ready",            "evict",       "fail",
                                        "request_start", "request_complete", "request_fail"};
    _Static_assert(sizeof(names) / sizeof(names[0]) == MP_EVENT_COUNT, "a name each kind");
    return names[kind];
}

void mp_events_want(uint32_t kinds) { atomic_store_explicit(&mp_events_wanted, kinds, memory_order_relaxed); }

/* The next free slot, or NULL when the ring is full. */
static slot *claim(uint64_t *position) {
    uint64_t at = atomic_load_explicit(&write_at, memory_order_relaxed);
    for (;;) {
        slot *s = &ring[at % SLOTS];
        uint64_t turn = atomic_load_explicit(&s->turn, memory_order_acquire) + at % SLOTS;
        if (turn < at)
            return NULL;
        if (turn > at) /* somebody else took it */
            at = atomic_load_explicit(&write_at, memory_order_relaxed);
        else if (atomic_compare_exchange_weak_explicit(&write_at, &at, at + 1, memory_order_relaxed,
                                                       memory_order_relaxed)) {
            *position = at;
            return s;
        }
    }
}

void mp_events_record(mp_event_kind kind, uint64_t registry, const char *key, uint32_t worker, const void *request,
                      mp_status status) {
    uint64_t position;
    slot *s = claim(&position);
    if (!s) {
        atomic_fetch_add_explicit(&dropped, 1, memory_order_relaxed);
        return;
    }
    s->event = (mp_event){.time_ns = mp_sys_now_ns(),
                          .registry = registry,
                          .request = (uint64_t)(uintptr_t)request,
                          .worker = worker,
                          .kind = kind,
                          .status = status};
    strncpy(s->event.key, key, sizeof(s->event.key) - 1);
    atomic_store_explicit(&s->turn, position + 1 - position % SLOTS, memory_order_release);
}

bool mp_events_take(mp_event *event) {
    uint64_t index = read_at % SLOTS;
    slot *s = &ring[index];
    if (atomic_load_explicit(&s->turn, memory_order_acquire) + index != read_at + 1)
        return false;
    *event = s->event;
    atomic_store_explicit(&s->turn, read_at + SLOTS - index, memory_order_release);
    read_at++;
    return true;
}

uint64_t mp_events_dropped(void) { return atomic_load_explicit(&dropped, memory_order_relaxed); }

void mp_events_fork_child(void) {
    for (int i = 0; i < SLOTS; i++)
        atomic_store_explicit(&ring[i].turn, 0, memory_order_relaxed);
    atomic_store_explicit(&write_at, 0, memory_order_relaxed);
    read_at = 0;
}
