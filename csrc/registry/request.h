/* request.h: the ticket of a call, from submit to its one terminal state. Public part in registry/registry.h.
 *
 *   submitted -> queued <-> active -> done           who may end it: whoever took it off the queue or off a worker's
 *                  |                   ^             active list, under the entry's lock. So it ends exactly once.
 *                  +-------------------+
 *
 * Memory: the callers together hold one reference, the pool the other until the ticket is done; the last frees ticket
 * and call. The entry is kept until then, so that cancel always finds its lock. */
#ifndef MP_REGISTRY_REQUEST_H
#define MP_REGISTRY_REQUEST_H

#include "base/event_count.h"
#include "registry/fork.h"
#include "registry/notifier.h"
#include "registry/pool/queue.h"

typedef struct mp_entry mp_entry;
typedef struct mp_worker mp_worker;

struct mp_ticket {
    mp_item item;        /* what engines see; item.ticket is this */
    mp_entry *entry;     /* a reference */
    uint32_t generation; /* of forks when it was made */
    _Atomic int references, callers;
    /* by whoever holds it (see above) */
    uint64_t load;          /* number of the load whose model checked the call, 0 = unchecked */
    uint64_t charged;       /* bytes of the governor's budget */
    uint64_t virtual_ns;    /* service it counts as having had, among those of its flow */
    uint64_t had_ns;        /* its shares of the steps it was in */
    uint64_t patience_ns;   /* 0 = for ever */
    bool stretches;         /* it is the registry's, and may grow until the call is queued */
    mp_policy policy;       /* never the default */
    uint32_t probe;         /* of the breaker; 0 = none */
    bool admitted;          /* by the engine */
    bool tried;             /* a worker failed with it: it has no further try, */
    bool spared;            /* unless it was ended from outside, the first time, and the call can go on */
    bool adrift;            /* a worker was lost outside of a step while it had this one */
    bool suspect;           /* of having made workers fail, or the like of it is: it takes its steps alone */
    struct mp_ticket *next; /* lists of those that are about to end */
    /* guarded by: the entry's lock */
    mp_queue_node node;
    mp_worker *worker; /* on whose active list it is, or NULL */
    mp_worker *home;   /* chosen by MP_POLICY_P2C for one that waits, or NULL */
    bool in_step;

    _Atomic int cause; /* why it was cancelled: MP_CANCELLED, MP_TIMEOUT, ...; 0 = it was not; the first counts */
    _Atomic uint64_t submitted_ns, started_ns, finished_ns;
    _Atomic uint64_t moved_ns; /* last step or piece of result; what patience counts from */
    _Atomic uint64_t progress; /* counts up; UINT64_MAX = done, stored after status and error */
    _Atomic uint64_t wake_at;  /* progress for which somebody parks; written under lock, read without */
    mp_status status;          /* valid once done */
    mp_error error;            /* likewise, of another status than MP_OK */
    mp_mutex lock;
    mp_cond changed;
    /* guarded by: lock */
    int waiters;
    uint64_t wait_at; /* progress for which the first of them parks; UINT64_MAX: the end, or nobody parks */
    mp_notice notice; /* of the first notifier, without a notifier if there is none; `also` has one each for others */
};

static inline mp_ticket *mp_ticket_of_node(mp_queue_node *node) {
    return (mp_ticket *)((char *)node - offsetof(mp_ticket, node));
}

/* Takes the call also on failure. Pins the entry; the two references are the caller's and the pool's. */
mp_status mp_ticket_create(mp_entry *entry, mp_call *call, const mp_submit_options *options, mp_ticket **ticket,
                           mp_error *error);
/* One that did not reach this entry's queue tries another's. */
void mp_ticket_move(mp_ticket *ticket, mp_entry *entry);
/* A piece of result is there. By the worker. */
void mp_ticket_publish(mp_ticket *ticket);
/* The terminal state. error: copied; unused with MP_OK. The pool's reference stays. */
void mp_ticket_conclude(mp_ticket *ticket, mp_status status, const mp_error *error);
/* The pool's reference back, from one that is done. */
void mp_ticket_let_go(mp_ticket *ticket);
/* The error that belongs to a cancelled ticket's cause. */
mp_status mp_ticket_cause(const mp_ticket *ticket, mp_error *error);
/* One that never reached a queue: both references. */
void mp_ticket_discard(mp_ticket *ticket);

#endif
