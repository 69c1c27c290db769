/* events.h: what happens to workers and calls, for callbacks outside of the core.
 *
 * One bounded ring a process, from which one thread of the binding takes. Nobody waits: a full ring drops the event and
 * counts it. Posting takes no lock and may be done under any; an event that nobody wants costs one relaxed load. */
#ifndef MP_REGISTRY_EVENTS_H
#define MP_REGISTRY_EVENTS_H

#include <stdatomic.h>

#include "base/error.h"

typedef enum mp_event_kind {
    MP_EVENT_SPAWN,            /* a worker begins to load */
    MP_EVENT_READY,            /* it serves */
    MP_EVENT_EVICT,            /* it was given up */
    MP_EVENT_FAIL,             /* it could not be started, failed, or was set apart; status says why */
    MP_EVENT_REQUEST_START,    /* the first step of a call */
    MP_EVENT_REQUEST_COMPLETE, /* an accepted call was answered */
    MP_EVENT_REQUEST_FAIL,     /* it ended in an error, or a call was refused; status says which */
    MP_EVENT_COUNT
} mp_event_kind;
const char *mp_event_name(mp_event_kind kind); /* "spawn", "request_start", ... */

typedef struct mp_event {
    uint64_t time_ns;  /* of mp_sys_now_ns */
    uint64_t registry; /* mp_registry_number */
    uint64_t request;  /* the same in start and end of a call, 0 = none, as of one that was refused before it had one */
    uint32_t worker;   /* id, 0 = none */
    mp_event_kind kind;
    mp_status status;
    char key[256];
} mp_event;

extern _Atomic uint32_t mp_events_wanted; /* a bit each kind */

/* Which kinds are recorded from now on; 0 at the start. */
void mp_events_want(uint32_t kinds);
void mp_events_record(mp_event_kind kind, uint64_t registry, const char *key, uint32_t worker, const void *request,
                      mp_status status);
static inline void mp_events_post(mp_event_kind kind, uint64_t registry, const char *key, uint32_t worker,
                                  const void *request, mp_status status) {
    if (atomic_load_explicit(&mp_events_wanted, memory_order_relaxed) >> kind & 1)
        mp_events_record(kind, registry, key, worker, request, status);
}
/* The oldest event; false if there is none. One thread at a time. */
bool mp_events_take(mp_event *event);
/* Events dropped since the process began. */
uint64_t mp_events_dropped(void);
/* In the child of a fork, before it posts: what the parent was about to write never comes. */
void mp_events_fork_child(void);

#endif
