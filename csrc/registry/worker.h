/* worker.h: a worker of an entry: a job of the thread pool with an engine over the entry's shared model.
 *
 * mp_worker.state, guarded by the entry's lock. mp_worker_set_state refuses every transition that is not listed
 * (state_machine.h):
 *
 *                           +-------------------------------------+
 *                           |                                     v
 *   SPAWNING -> LOADING -> READY --> PROCESSING <---> IDLE --> EVICTING
 *                                       |                         ^
 *                                       +-------------------------+
 *
 *   SPAWNING, LOADING, READY, PROCESSING or IDLE -> FAILED    an internal error, a lost engine, or a failed load
 *   any state but DEAD -> DEAD                                no progress within the limit: the worker is abandoned
 *
 * A worker that is EVICTING or FAILED frees itself. A DEAD worker was abandoned: it is off the entry's list, its
 * requests have ended with an error and its compute threads are leased to others. Its thread may still be inside a
 * step, a load or a slice of optional work; its memory stays charged until that thread returns and frees everything.
 *
 * Only the worker's own thread touches what the worker owns (engine, plan, active items), so no lock guards a model.
 * The entry's lock guards what other threads read. */
#ifndef MP_REGISTRY_WORKER_H
#define MP_REGISTRY_WORKER_H

#include "registry/cpu_allocator.h"
#include "registry/governor.h"
#include "registry/request.h"
#include "registry/state_machine.h"

typedef struct mp_resident mp_resident;

typedef enum mp_worker_state {
    MP_WORKER_SPAWNING,
    MP_WORKER_LOADING,
    MP_WORKER_READY,
    MP_WORKER_PROCESSING,
    MP_WORKER_IDLE,
    MP_WORKER_EVICTING,
    MP_WORKER_DEAD,
    MP_WORKER_FAILED,
    MP_WORKER_STATES
} mp_worker_state;
extern const mp_state_machine mp_worker_state_machine;
const char *mp_worker_state_name(mp_worker_state state);

enum {
    MP_ACTIVE_MAX = MP_PLAN_MAX,
    /* Flows whose service a worker records: those of its active requests, and as many that are idle. */
    MP_FLOWS_MAX = 2 * MP_ACTIVE_MAX,
    MP_WORKER_FLOWS = MP_FLOWS_MAX + MP_QUEUE_KINDS * MP_FLOWS_SHARED
};

/* Detects missing progress. Elapsed time counts only between two checks, and one check counts for at most half the
 * limit, so that a clock that jumps abandons no worker. */
typedef struct mp_watch {
    uint64_t beat, checked_ns;
    uint64_t silent_ns, total_ns; /* since the last progress; since the watch began */
} mp_watch;
void mp_watch_reset(mp_watch *watch, uint64_t now_ns);
/* Returns true if `beat` has not changed for `limit_ns`. */
bool mp_watch_check(mp_watch *watch, uint64_t beat, uint64_t now_ns, uint64_t limit_ns);

/* A worker records what it knows of a shortage of memory.
 *
 *   AMPLE -> ASKED             another model needs memory (mp_entry_trim)
 *   AMPLE or ASKED -> TRIMMED  it has freed its caches: it was asked, or its own request found no memory
 *   any -> TIGHT               its request found no memory and must wait for others
 *   TIGHT -> TRIMMED           memory was freed, or retry_ns has come
 *   TRIMMED or TIGHT -> AMPLE  one of its requests has ended, or starts again */
typedef enum mp_worker_memory {
    MP_MEMORY_AMPLE,
    MP_MEMORY_ASKED,   /* told to free caches and arenas, and has not done it yet */
    MP_MEMORY_TRIMMED, /* a further trim would free nothing */
    MP_MEMORY_TIGHT,   /* as TRIMMED, and admits no request until memory is freed */
} mp_worker_memory;

typedef struct mp_worker {
    mp_entry *entry; /* owns a reference */
    uint32_t id;     /* unique among all workers of the process */
    int home;        /* index of its memory node, see cpu_allocator.h */
    uint32_t number; /* number of workers of the entry that were listed before this one */

    /* guarded by: the entry's lock */
    mp_worker_state state;
    mp_event_count wake;              /* notified under the lock */
    bool woken;                       /* woken, and has not checked the queue since */
    bool awaits_masks;                /* all its requests wait for grammar masks: any change must wake it */
    bool leave;                       /* told to leave once no request is active; or it had a fault */
    bool concluding;                  /* another thread is abandoning this worker */
    mp_worker_memory memory;
    mp_ticket *active[MP_ACTIVE_MAX]; /* admitted or to be admitted; only the worker changes the list */
    int active_count;
    uint64_t assigned_cost; /* sum of cost + 1 of the queued requests that are assigned to it (mp_dispatch_assign) */
    bool exclusive;   /* the active request has MP_POLICY_SEQUENTIAL: no other request may join it */
    int step_live;     /* items of the running step that are not cancelled */
    bool in_step; /* its thread is inside a step, or a slice of optional work (improve.c): the sweep watches both */
    int threads;      /* compute threads leased; 0 = none, or written off when the worker was abandoned */
    mp_core_lease cores; /* the leased CPUs; written before `threads` and constant while it is not 0 */
    bool moving;   /* it is taking or returning a lease, so `threads` may be too low: do not abandon it now */
    bool runnable; /* counted among the workers that share the CPUs */
    uint64_t idle_since_ns;
    uint64_t served, step_ns; /* requests that ended; time in steps, to compare workers */
    uint64_t engine_bytes; /* predicted size of its engine */
    uint64_t held_bytes;   /* measured size of its engine; updated after each step, request and trim */
    mp_state_use states;   /* likewise */
    int process; /* id of the process in which its engine computes; 0 = this process */
    mp_watch watch;

    /* written by the worker or its engine, readable by any thread */
    mp_progress progress;      /* progress of its load */
    _Atomic int step_wanted; /* set when a request of the entry is queued */
    _Atomic int step_cancelled; /* set when every item of the step is cancelled, and to cancel a load */

    /* used by the worker's thread only */
    mp_guard guard; /* memory reserved for its engine until the engine exists */
    mp_resident *resident; /* owns a reference */
    mp_engine *engine;
    mp_lease lease;
    mp_plan plan;
    mp_outcome outcomes[MP_PLAN_MAX];
    mp_step_work counted;            /* `engine->work` when the metrics were last updated */
    mp_item *order[MP_ACTIVE_MAX];   /* active items, best first */
    mp_item *offered[MP_ACTIVE_MAX]; /* the items of `order` that are offered to plan() */
    mp_ticket *fresh[MP_ACTIVE_MAX]; /* taken from the queue in this round, not admitted yet */
    int fresh_count;
    uint64_t virtual_ns;                /* weighted service of a flow that gets an equal share of every step */
    mp_flows flows;                     /* groups: service classes; keys: tenants; one user per admitted request */
    uint64_t flow_ns[MP_WORKER_FLOWS];  /* by slot: weighted service of the flow */
    uint64_t clock_ns[MP_WORKER_FLOWS]; /* by slot: service of a request that gets an equal share of its flow */
    bool suspects_next;                 /* the last step left a suspect out */
    uint64_t retry_ns;   /* when to admit again after memory was refused; 0 = not before a request leaves */
    uint64_t improve_ns; /* time of the next optional work; 0 = not planned; MP_FOREVER = not before a request */
    mp_error fault;      /* why the worker stops; code MP_OK: no fault */
    bool unwanted;       /* no request needs its load any more */
    bool end_noted;      /* the fault made requests fail, so it is counted already */
    int fault_retried;   /* requests that are tried again because of the fault */
    int fault_failed;    /* requests that ended because of it */
} mp_worker;

/* The new worker has no engine: only the worker's own thread creates and uses it. */
mp_status mp_worker_create(mp_entry *entry, mp_worker **worker, mp_error *error);
void mp_worker_destroy(mp_worker *worker); /* requires that the engine, the guard and the lease were given back */
/* For the worker's thread; must not hold the lock. Frees the worker's engine and its reference to the model. */
void mp_worker_free_engine(mp_worker *worker);

/* For the worker's thread; must not hold a lock. Leases CPUs for a step or a load, and returns them. Returns false,
 * with nothing leased, if an active request or the load was cancelled meanwhile. Without an active request, does not
 * wait for CPUs. */
bool mp_worker_lease(mp_worker *worker, int want);
void mp_worker_return_threads(mp_worker *worker);
/* Records whether the worker has work: only workers with work count when the CPUs are shared. */
void mp_worker_set_runnable(mp_worker *worker, bool runnable);

/* For the worker's thread; must hold the lock. Returns the time at which the idle worker must call mp_worker_improve
 * (improve.c); 0 = not before the next request. Postpones that time while requests are queued, workers compute or
 * memory is short. */
uint64_t mp_worker_next_improve_ns(mp_worker *worker);
/* For the worker's thread; must not hold the lock. Lets the engine do a slice of optional work. Returns false if the
 * worker was abandoned meanwhile. */
bool mp_worker_improve(mp_worker *worker);

/* For the worker's thread. Returns the bytes that the engine holds. */
uint64_t mp_worker_bytes(const mp_worker *worker);
/* Likewise; must hold the lock. Records `held`, the result of mp_worker_bytes, and the memory of states. */
void mp_worker_set_bytes(mp_worker *worker, uint64_t held);

/* Must hold the entry's lock. */
void mp_worker_set_state(mp_worker *worker, mp_worker_state state);
static inline bool mp_worker_serves(const mp_worker *worker) {
    return worker->state == MP_WORKER_READY || worker->state == MP_WORKER_PROCESSING ||
           worker->state == MP_WORKER_IDLE;
}
/* True if the worker takes no further request: it had a fault, was told to leave, or frees itself. */
static inline bool mp_worker_is_leaving(const mp_worker *worker) {
    return worker->leave || worker->state == MP_WORKER_EVICTING || worker->state == MP_WORKER_FAILED;
}
static inline bool mp_worker_idles(const mp_worker *worker) {
    return worker->state == MP_WORKER_READY || worker->state == MP_WORKER_IDLE;
}
void mp_worker_wake(mp_worker *worker);

#endif
