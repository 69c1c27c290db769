/* worker.h: one of an entry's workers: a job of the pool, and an engine over the entry's shared model.
 *
 *                            +-------------------------------------+
 *                            |                                     v
 *   spawning --> loading --> ready --> processing <---> idle --> evicting --> freed
 *                 |  |        |         |    |                     ^
 *                 |  +--> failed        |    +---------------------+
 *                 |         ^-----------|--- an internal error, an engine that is lost (also without work)
 *                 +------> dead <-------+    no sign of life within the limit
 *
 * A dead worker is set apart: off the entry's list, its calls answered, its lanes taken from it. Its thread may still
 * be in a step or a load; what it holds stays charged until it returns and frees everything.
 *
 * What a worker owns (engine, plan, active items) no other thread touches, so there is no lock around a model. What
 * others must see is guarded by the entry's lock. */
#ifndef MP_REGISTRY_WORKER_H
#define MP_REGISTRY_WORKER_H

#include "registry/cores.h"
#include "registry/governor.h"
#include "registry/request.h"

typedef enum mp_worker_state {
    MP_WORKER_SPAWNING,
    MP_WORKER_LOADING,
    MP_WORKER_READY,
    MP_WORKER_PROCESSING,
    MP_WORKER_IDLE,
    MP_WORKER_EVICTING,
    MP_WORKER_DEAD,
    MP_WORKER_FAILED
} mp_worker_state;
const char *mp_worker_state_name(mp_worker_state state);

/* A loaded model and who uses it; freed with the last reference. */
typedef struct mp_resident {
    mp_model *model;
    _Atomic int references;
    uint64_t load;    /* number of the load that made it, >= 1, unlike that of any other load of the process */
    uint64_t load_ns; /* how long that took */
    uint64_t predicted_bytes; /* of its weights, before it was loaded */
} mp_resident;
mp_resident *mp_resident_pin(mp_resident *resident);
void mp_resident_unpin(mp_resident *resident); /* NULL is legal */

enum { MP_ACTIVE_MAX = MP_PLAN_MAX };

/* Looks for signs of life. Time counts only as far as it passed between two looks, and one look counts for half the
 * limit at most: a clock that jumps kills nobody. */
typedef struct mp_watch {
    uint64_t beat, looked_ns;
    uint64_t silent_ns, total_ns; /* since the last sign of life; since the watch began */
} mp_watch;
void mp_watch_reset(mp_watch *watch, uint64_t now_ns);
/* True: silent for the limit. */
bool mp_watch_look(mp_watch *watch, uint64_t beat, uint64_t now_ns, uint64_t limit_ns);

typedef struct mp_worker {
    mp_entry *entry; /* a reference */
    uint32_t id;     /* unlike that of any other worker of the process */
    int home;        /* its memory node, see cores.h */
    uint32_t number; /* workers of the entry that were listed before it */

    /* guarded by: the entry's lock */
    mp_worker_state state;
    mp_event_count wake;              /* notified under the lock */
    bool rung;                        /* and has not looked since */
    bool waits;                       /* for masks of all that it has; to be rung when anything changes */
    bool leave;                       /* told to go once nothing is active */
    bool concluding;                  /* it is being set apart */
    bool trim;                        /* told to give back what it can do without */
    bool lean;                        /* did so, and has had no work since */
    mp_ticket *active[MP_ACTIVE_MAX]; /* admitted or about to be; changed by the worker only */
    int active_count;
    bool exclusive;   /* the active one must stay alone */
    bool memory_tight; /* the engine refused an item: admit nobody before somebody has left */
    int step_live;     /* items of the running step that are not cancelled */
    bool in_step;
    int lanes;     /* leased, as the ledger counts them; 0 = none, or taken away from a dead one */
    mp_lanes at;   /* where they are; written before `lanes`, and then left alone while it has them */
    bool moving;   /* it may have lanes that `lanes` does not tell: soon over, and not to be set apart before */
    bool runnable; /* counted among those that share the lanes */
    uint64_t idle_since_ns;
    uint64_t served, step_ns; /* calls ended; time in steps: for comparison with its mates */
    uint64_t engine_bytes; /* predicted */
    uint64_t held_bytes;   /* what the engine holds, as of its last step */
    int process; /* id of the one that its engine stands for; 0 = this one */
    mp_watch watch;

    /* written by the worker's side, read anywhere */
    mp_progress progress;      /* of its load */
    _Atomic int step_cancelled; /* raised when every item of the step was cancelled, and to call off a load */

    /* the worker's own */
    mp_guard guard; /* bytes reserved for its engine, until that exists */
    mp_resident *resident; /* a reference */
    mp_engine *engine;
    mp_lease lease;
    mp_plan plan;
    mp_outcome outcomes[MP_PLAN_MAX];
    mp_step_work counted;            /* of the engine, as far as metrics know it */
    mp_item *order[MP_ACTIVE_MAX];   /* active items in order of preference */
    mp_item *offered[MP_ACTIVE_MAX]; /* those of them that the plan is made of */
    mp_ticket *fresh[MP_ACTIVE_MAX]; /* just taken from the queue, to be admitted */
    int fresh_count;
    uint64_t virtual_ns;                /* an equal share, by weight, of every step so far */
    uint64_t flow_ns[MP_QUEUE_FLOWS];   /* service each flow has had, by weight */
    uint64_t clock_ns[MP_QUEUE_FLOWS];  /* an equal share of what each flow has had */
    bool suspects_next;                 /* the last step left a suspect out */
    uint64_t retry_ns;   /* when to ask again for memory that others are giving up; 0 = no need */
    bool trimmed;        /* the engine was trimmed, and nobody has left since */
    mp_error fault;      /* why it stops: code MP_OK = nothing is wrong */
    bool end_noted;      /* calls failed of it, of which somebody took note */
} mp_worker;

/* Engines of dead workers, and of others, are made and used by the worker's thread only. */
mp_status mp_worker_create(mp_entry *entry, mp_worker **worker, mp_error *error);
void mp_worker_destroy(mp_worker *worker);
void mp_worker_run(void *worker); /* the job; frees the worker at its end */

/* By the worker, no lock held: lanes for a step or a load, and back. False: one of its calls was cancelled, or the load
 * called off, while it waited; it has none. */
bool mp_worker_lease(mp_worker *worker, int want);
void mp_worker_return_lanes(mp_worker *worker);
/* It has work, and shares the lanes with others that have. */
void mp_worker_set_runnable(mp_worker *worker, bool runnable);

/* By the worker: what its engine holds. */
uint64_t mp_worker_bytes(const mp_worker *worker);

/* Under the entry's lock. */
void mp_worker_set_state(mp_worker *worker, mp_worker_state state);
static inline bool mp_worker_serves(const mp_worker *worker) {
    return worker->state == MP_WORKER_READY || worker->state == MP_WORKER_PROCESSING ||
           worker->state == MP_WORKER_IDLE;
}
static inline bool mp_worker_idles(const mp_worker *worker) {
    return worker->state == MP_WORKER_READY || worker->state == MP_WORKER_IDLE;
}
void mp_worker_ring(mp_worker *worker);
/* It does not move: off the list, its calls answered with `error`, its lanes given to others. The lock is given up
 * meanwhile. */
void mp_worker_set_apart(mp_worker *worker, const mp_error *error);

#endif
