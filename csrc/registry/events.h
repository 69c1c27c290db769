/* events.h: events of workers and requests, for callbacks outside the core.
 *
 * One bounded ring per process, drained by one thread of the binding. Posting never blocks: a full ring drops the event
 * and counts it. Posting takes no lock and is allowed under any; an event kind that is not enabled costs one relaxed
 * load. */
#ifndef MP_REGISTRY_EVENTS_H
#define MP_REGISTRY_EVENTS_H

#include <stdatomic.h>

#include "base/error.h"

typedef enum mp_event_kind {
    MP_EVENT_SPAWN,            /* a worker begins to load */
    MP_EVENT_READY,            /* the worker serves */
    MP_EVENT_EVICT,            /* the worker was stopped without a fault */
    MP_EVENT_FAIL,             /* a worker did not start, failed, or was abandoned; `status` is the reason */
    MP_EVENT_REQUEST_START,    /* first step of a request */
    MP_EVENT_REQUEST_COMPLETE, /* an accepted request succeeded */
    MP_EVENT_REQUEST_FAIL,     /* a request ended in an error or was refused; `status` is the error */
    MP_EVENT_COUNT
} mp_event_kind;
const char *mp_event_name(mp_event_kind kind); /* "spawn", "request_start", ... */

typedef struct mp_event {
    uint64_t time_ns;  /* mp_sys_now_ns */
    uint64_t registry; /* mp_registry_number */
    /* mp_ticket.number, which no other request of the process ever has; 0 = none, or refused before it had a ticket */
    uint64_t request;
    uint32_t worker;   /* id, 0 = none */
    mp_event_kind kind;
    mp_status status;
    char key[256];
    char cause[sizeof((mp_error *)0)->message]; /* why a worker failed, for people; empty for other kinds */
} mp_event;

extern _Atomic uint32_t mp_events_wanted; /* one bit per kind */

/* Enable these kinds (one bit each) and disable the others; none is enabled at start-up. */
void mp_events_want(uint32_t kinds);
void mp_events_record(mp_event_kind kind, uint64_t registry, const char *key, uint32_t worker, uint64_t request,
                      mp_status status, const char *cause);
static inline void mp_events_post(mp_event_kind kind, uint64_t registry, const char *key, uint32_t worker,
                                  uint64_t request, mp_status status) {
    if (atomic_load_explicit(&mp_events_wanted, memory_order_relaxed) >> kind & 1)
        mp_events_record(kind, registry, key, worker, request, status, "");
}
static inline void mp_events_post_fail(uint64_t registry, const char *key, uint32_t worker, const mp_error *error) {
    if (atomic_load_explicit(&mp_events_wanted, memory_order_relaxed) >> MP_EVENT_FAIL & 1)
        mp_events_record(MP_EVENT_FAIL, registry, key, worker, 0, error->code, error->message);
}
/* Take the oldest event off the ring. Returns false when the ring is empty. Must be called by one thread at a time. */
bool mp_events_take(mp_event *event);
/* Returns the number of events dropped by this process and, before a fork, by its parent. */
uint64_t mp_events_dropped(void);
/* Discard all events. Called by registry/fork.c in a forked child: the events belong to the parent. */
void mp_events_fork_child(void);

#endif
