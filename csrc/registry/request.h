/* request.h: the ticket of a request, from submit to its one terminal status. registry/registry.h has the public part.
 *
 * mp_ticket.state says where the request is. The entry's lock guards this state:
 *
 *   NEW ---> QUEUED <---> TAKEN ---> ADMITTED <---> STEPPING
 *              |  ^         |         |  |             |
 *              |  +---------|---------+  |             |
 *              v            v            v             v
 *              +------------+---- ENDED -+-------------+
 *
 *   NEW       The submitter holds it. A refused request is freed in this state.
 *   QUEUED    It is in the entry's queue (`node`).
 *   TAKEN     It is on the active list of `worker`, and the engine does not know it yet.
 *   ADMITTED  The engine of `worker` has admitted it. Preemption and a retry put it back into the queue.
 *   STEPPING  It is in the running step. If the worker is abandoned, the request ends from here.
 *   ENDED     It is in no queue and on no list. The thread that made this transition, and no other, gives the ticket
 *             its terminal status. ENDED has no way out, so a request ends exactly once.
 *
 * Ownership: the callers together hold one reference. The pool holds the other until the ticket is done and no thread
 * of the pool uses the request any more. The last reference frees ticket and request. The ticket keeps its entry alive,
 * so that cancel always finds the entry's lock. */
#ifndef MP_REGISTRY_REQUEST_H
#define MP_REGISTRY_REQUEST_H

#include <stdatomic.h>

#include "base/event_count.h"
#include "base/forked.h"
#include "registry/faults.h"
#include "registry/notifier.h"
#include "registry/pool/queue.h"
#include "registry/state_machine.h"

typedef struct mp_entry mp_entry;
typedef struct mp_worker mp_worker;

typedef enum mp_ticket_state {
    MP_TICKET_NEW,
    MP_TICKET_QUEUED,
    MP_TICKET_TAKEN,
    MP_TICKET_ADMITTED,
    MP_TICKET_STEPPING,
    MP_TICKET_ENDED,
    MP_TICKET_STATES
} mp_ticket_state;
extern const mp_state_machine mp_ticket_state_machine;

struct mp_ticket {
    mp_item item;        /* the engine's view; item.ticket points back here */
    mp_entry *entry;     /* owns a reference */
    uint64_t number;     /* from 1 on, unique among all requests of the process */
    uint32_t generation; /* fork generation in which the ticket was created */
    _Atomic int references, callers;
    /* used by the thread that holds the ticket (see above) */
    uint64_t load;          /* number of the load whose model checked the request; 0 = unchecked */
    uint64_t charged;       /* bytes charged to the governor's budget */
    uint64_t virtual_ns;    /* service charged to this request within its flow */
    uint64_t had_ns;        /* its shares of the durations of its steps */
    uint64_t due_ns;        /* its deadline, by the clock of requests (maintenance.h); 0 = none */
    uint64_t patience_ns;   /* 0 = no limit */
    bool timed;             /* counted in mp_maintenance.timed */
    bool stretches;         /* patience_ns is the registry's default and may grow until the request is queued */
    mp_policy asked;        /* policy of the caller's options; may be MP_POLICY_DEFAULT */
    mp_policy policy;       /* `asked`, or the policy of `entry`; set by mp_entry_submit */
    mp_ticket_faults faults;
    int flow;               /* slot in mp_worker.flows while admitted; -1: none */
    struct mp_ticket *next; /* links tickets that are about to end */
    /* guarded by: the entry's lock. The thread of `worker` reads `state` without the lock, as the only writer while it
     * has the request. */
    mp_ticket_state state;
    mp_queue_node node;
    mp_worker *worker; /* the worker whose active list has it, or NULL */
    uint64_t starved;  /* mp_entry.ends + 1 when it last let others run first (mp_dispatch_yield); 0 = never */
    uint64_t attempt;  /* number of the first load that it waited for; 0 = none */
    mp_worker *assigned; /* the worker that MP_POLICY_P2C chose, while the request is queued, or NULL */

    _Atomic int cause; /* cause of cancellation: MP_CANCELLED if the caller cancelled it, else the first of MP_TIMEOUT,
                          MP_SHUTTING_DOWN; 0 = not cancelled */
    _Atomic uint64_t submitted_ns, started_ns, finished_ns;
    _Atomic uint64_t moved_ns; /* last step or stream chunk, by the clock of requests: patience counts from here */
    _Atomic uint64_t progress; /* rises with every stream chunk; UINT64_MAX = done, stored after status and error */
    _Atomic uint64_t wake_at;  /* progress that a parked thread waits for; written under lock, read without */
    mp_status status;          /* valid once done */
    mp_error error;            /* valid once done, unless status is MP_OK */
    mp_mutex lock;
    mp_cond changed;
    /* guarded by: lock */
    int waiters;
    uint64_t wait_at; /* progress that the first parked thread waits for; UINT64_MAX: the end, or no thread is parked */
    mp_notice notice; /* for the first notifier (NULL if there is none); `also` links one notice per further notifier */
};

#define MP_TICKET_DONE UINT64_MAX /* mp_ticket.progress of a ticket that has its terminal status */

static inline bool mp_ticket_is_done(const mp_ticket *ticket) {
    return atomic_load_explicit(&ticket->progress, memory_order_acquire) == MP_TICKET_DONE;
}
/* True in a forked child for a ticket of the parent. If the ticket was not done at the fork, it will never be: its
 * worker does not exist in the child. Never take its lock: a thread of the parent may have held it at the fork. */
static inline bool mp_ticket_is_orphan(const mp_ticket *ticket) {
    return ticket->generation != mp_fork_generation();
}

/* True if a step has computed part of the request. */
static inline bool mp_ticket_begun(const mp_ticket *ticket) {
    return atomic_load_explicit(&ticket->started_ns, memory_order_relaxed) != 0;
}

static inline mp_ticket *mp_ticket_of_node(mp_queue_node *node) {
    return (mp_ticket *)((char *)node - offsetof(mp_ticket, node));
}

/* Must hold the entry's lock. Refuses an illegal transition (state_machine.h). */
void mp_ticket_set_state(mp_ticket *ticket, mp_ticket_state state);

/* Takes ownership of `request`, also on failure. The ticket owns a reference to the entry. It has two references: the
 * caller's and the pool's. */
mp_status mp_ticket_create(mp_entry *entry, mp_request *request, const mp_submit_options *options, mp_ticket **ticket,
                           mp_error *error);
/* Moves a ticket that was never queued in its entry to `entry`. */
void mp_ticket_move(mp_ticket *ticket, mp_entry *entry);
/* For the worker: a stream chunk is available. */
void mp_ticket_publish(mp_ticket *ticket);
/* Returns when the request expires, by the clock of requests: its deadline or the end of its patience. MP_FOREVER: it
 * has no limit. */
uint64_t mp_ticket_due(const mp_ticket *ticket);
/* True if the deadline has passed, by the clock of requests. */
bool mp_ticket_is_late(const mp_ticket *ticket);
/* Publishes the terminal status. Copies `error`, which is unused with MP_OK. The pool's reference stays. */
void mp_ticket_conclude(mp_ticket *ticket, mp_status status, const mp_error *error);
/* Drops the pool's reference of a ticket that is done. */
void mp_ticket_let_go(mp_ticket *ticket);
/* Fills in the error for the cause of a cancelled ticket and returns its code. */
mp_status mp_ticket_cause(const mp_ticket *ticket, mp_error *error);
/* Drops one reference; the last one frees ticket and request. */
void mp_ticket_unref(mp_ticket *ticket);
/* Drops both references of a ticket that never reached a queue. */
void mp_ticket_discard(mp_ticket *ticket);

#endif
