/* events.c: see events.h. */
#include "registry/events.h"

#include <string.h>

#include "base/mpsc_ring.h"
#include "base/sys.h"

static MP_MPSC_SLOT(mp_event) slots[1024];
static mp_mpsc_ring ring = MP_MPSC_RING(slots);
_Atomic uint32_t mp_events_wanted;

const char *mp_event_name(mp_event_kind kind) {
    static const char *const names[] = {"spawn",         "ready",            "evict",       "fail",
                                        "request_start", "request_complete", "request_fail"};
    _Static_assert(sizeof(names) / sizeof(names[0]) == MP_EVENT_COUNT, "one name per kind");
    return names[kind];
}

void mp_events_want(uint32_t kinds) { atomic_store_explicit(&mp_events_wanted, kinds, memory_order_relaxed); }

void mp_events_record(mp_event_kind kind, uint64_t registry, const char *key, uint32_t worker, uint64_t request,
                      mp_status status, const char *cause) {
    uint64_t position;
    mp_event *event = mp_mpsc_claim(&ring, &position);
    if (!event)
        return;
    *event = (mp_event){.time_ns = mp_sys_now_ns(),
                        .registry = registry,
                        .request = request,
                        .worker = worker,
                        .kind = kind,
                        .status = status};
    strncpy(event->key, key, sizeof(event->key) - 1);
    strncpy(event->cause, cause, sizeof(event->cause) - 1);
    mp_mpsc_publish(&ring, position);
}

bool mp_events_take(mp_event *event) { return mp_mpsc_take(&ring, event); }
uint64_t mp_events_dropped(void) { return mp_mpsc_dropped(&ring); }
void mp_events_fork_child(void) { mp_mpsc_reset(&ring); }
