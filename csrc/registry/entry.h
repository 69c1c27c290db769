/* entry.h: a key of the registry and the model behind it: the load state machine, the one bounded queue, the worker.
 *
 *            submit, load                 loaded                   work
 *   cold --------------------> loading -----------> ready <-------------------> busy
 *    ^  ^                         |                   |                          |
 *    |  | evict                   | failed            | evict, remove, shutdown  |
 *    |  |                         v                   v                          v
 *    |  +---------------------- failed <--------- evicting <---------------------+
 *    |                            ^ |   unhealthy     |
 *    |    load; submit after the  +-+-> loading       |
 *    |    backoff                                     |
 *    +------------------------------------------------+
 *
 * One job of the pool (the worker) lives from loading to evicting. It loads without Python, then loops: end what was
 * cancelled, take from the queue, admit, plan, lease lanes, step, hand out outcomes. While it loads or steps it holds
 * no lock. Every ticket that was queued gets its terminal state from the worker, from cancel, from the sweep or from
 * close.
 *
 * NOTE: one worker an entry for now. More of them share `resident`; what a worker owns is in serve.c's `serving`, and
 * `active`, `step_live` and `step_cancelled` move there from the entry. A breaker is asked in submit, before the
 * queue. */
#ifndef MP_REGISTRY_ENTRY_H
#define MP_REGISTRY_ENTRY_H

#include "registry/request.h"
#include "registry/services.h"

typedef enum mp_entry_state {
    MP_ENTRY_COLD,
    MP_ENTRY_LOADING,
    MP_ENTRY_READY,
    MP_ENTRY_BUSY,
    MP_ENTRY_EVICTING,
    MP_ENTRY_FAILED
} mp_entry_state;

/* A loaded model and who uses it; freed with the last reference. */
typedef struct mp_resident {
    mp_model *model;
    _Atomic int references;
    uint64_t load; /* number of the load that made it, >= 1, unlike that of any other load of the process */
} mp_resident;

enum { MP_ACTIVE_MAX = MP_PLAN_MAX };

struct mp_entry {
    /* constant */
    mp_services *services; /* a reference */
    char key[256];
    mp_capability capability;
    _Atomic int references;

    mp_mutex lock;
    mp_cond changed; /* state, or what load, evict, remove and drain wait for */
    mp_cond room;    /* the queue has room again */
    /* guarded by: lock */
    mp_loader loader; /* ops NULL once freed */
    mp_entry_state state;
    bool working; /* a job of the pool serves it, or is being started */
    mp_queue queue;
    mp_bell bell; /* rung for the worker */
    int room_waiters;
    mp_ticket *active[MP_ACTIVE_MAX]; /* admitted or about to be; changed by the worker only */
    int active_count;
    int step_live;                    /* items of the running step that are not cancelled */
    mp_resident *resident;            /* a reference, or NULL */
    bool pinned;                      /* not to be evicted by the registry itself */
    bool evict;                       /* unload once the active ones are done */
    bool remove;                      /* serve what was accepted and never load again; refuse calls */
    bool closed;                      /* refuse calls: the registry shuts down */
    bool quit;                        /* end everything now */
    bool stalled;                     /* the load has made no progress for too long; its waiters were told */
    uint64_t attempts, attempts_over; /* loads started; loads that ended in any way */
    uint64_t loads;                   /* that succeeded */
    uint64_t unloads;                 /* times that the model was given up */
    mp_error failure;                 /* of the last attempt, when state is failed or the load is stalled */
    uint64_t retry_ns, backoff_ns;
    uint64_t idle_since_ns, engine_bytes;
    uint64_t calls;              /* accepted; numbers their order of arrival */
    struct mp_entry *close_next; /* by the thread that closes the registry */

    /* written by the worker's side, read anywhere */
    mp_progress progress;
    _Atomic int step_cancelled; /* raised when every item of the step was cancelled, and to call off a load */
    _Atomic uint64_t errors;
};

/* Takes the loader, also on failure. One reference, the caller's. */
mp_status mp_entry_create(mp_services *services, const char *key, const mp_loader *loader, int queue_capacity,
                          mp_entry **entry, mp_error *error);
mp_entry *mp_entry_pin(mp_entry *entry);
void mp_entry_unpin(mp_entry *entry);
static inline const char *mp_entry_key(const mp_entry *entry) { return entry->key; }
mp_spin_rule mp_entry_spin_rule(mp_entry *entry);

/* --- by callers; no lock held --- */

/* Queue it, loading the model if need be, or refuse. On success the pool has taken its reference. *gone: the entry was
 * removed or replaced meanwhile; look the key up again. */
mp_status mp_entry_submit(mp_entry *entry, mp_ticket *ticket, const mp_submit_options *options, bool *gone,
                          mp_error *error);
mp_status mp_entry_load(mp_entry *entry, bool pin, uint64_t deadline_ns, mp_error *error);
mp_status mp_entry_evict(mp_entry *entry, uint64_t deadline_ns, mp_error *error);
/* Start a load without waiting for it. */
void mp_entry_start(mp_entry *entry);
/* A model is loaded or being loaded, or calls wait for it. */
bool mp_entry_in_use(mp_entry *entry);
/* Refuse calls, serve what was accepted, then free everything and report MP_ENTRY_GONE. Never waits. */
void mp_entry_remove(mp_entry *entry);
mp_status mp_entry_wait_gone(mp_entry *entry, uint64_t deadline_ns, mp_error *error);
void mp_entry_cancel(mp_entry *entry, mp_ticket *ticket, mp_status cause);
int mp_entry_position(mp_entry *entry, mp_ticket *ticket);
/* *pinned: a reference for the caller, or NULL. */
void mp_entry_describe(mp_entry *entry, mp_entry_info *info, mp_resident **pinned);

/* --- by the registry --- */

/* End what is due: expired calls, a load without progress. Returns when the next is. */
uint64_t mp_entry_sweep(mp_entry *entry, uint64_t now_ns);
void mp_entry_close(mp_entry *entry);                       /* refuse calls from now on */
bool mp_entry_drain(mp_entry *entry, uint64_t deadline_ns); /* wait until nothing is queued or runs */
void mp_entry_quit(mp_entry *entry);                        /* end the rest */
void mp_entry_join(mp_entry *entry);                        /* wait for the worker, free loader and model */
void mp_entry_fork_child(mp_entry *entry);

/* --- by serve.c --- */

void mp_entry_serve(void *entry); /* the worker's job; it holds a reference of its own and gives it back */
/* Under the lock; asserts that the step is legal. */
void mp_entry_set_state(mp_entry *entry, mp_entry_state state);
void mp_entry_set_failed(mp_entry *entry, const mp_error *error);
/* Under the lock: take all tickets off the queue into a list linked by next. */
mp_ticket *mp_entry_take_queue(mp_entry *entry);
void mp_entry_tell_room(mp_entry *entry); /* under the lock, after the queue got shorter */
/* No lock held: finish tickets of such a list with one error (NULL: each with its own cause). */
void mp_entry_finish_list(mp_entry *entry, mp_ticket *list, const mp_error *error);
/* No lock held: metrics, bytes back, terminal state of one that is off the queue and off the active list. */
void mp_entry_finish(mp_entry *entry, mp_ticket *ticket, mp_status status, const mp_error *error);
/* No lock held: check a call against the model, unless that was done, and charge its bytes. The ticket's holder
 * calls. */
mp_status mp_entry_check(mp_entry *entry, mp_resident *resident, mp_ticket *ticket, mp_error *error);
const char *mp_entry_stage(const mp_entry *entry);
mp_resident *mp_resident_pin(mp_resident *resident);
void mp_resident_unpin(mp_resident *resident); /* NULL is legal */

#endif
