/* entry.h: a key of the registry and what is behind it: the model, its workers, the one bounded queue, the breaker.
 *
 *   submit.c    callers: submit, cancel, position
 *   entry.c     callers and registry: load, evict, remove, close
 *   dispatch.c  which worker takes which call; when there is to be one worker more (ahead of need: forecast.h)
 *   loading.c   cold start: a worker's way from spawning to ready
 *   serve.c     a worker's work: take, admit, plan, lease lanes, step, hand out
 *   leaving.c   its end, and the model's
 *   ends.c      how calls end: faults, retries, the breaker, metrics
 *   entry_state.c  the entry's state machines
 *   sweep.c     what is due: deadlines, loads and steps that do not move, workers without work
 *
 * A worker (worker.h) is a job of the pool. The first one loads the model, without Python; all share it. The last one
 * to leave gives it up. While a worker loads or steps it holds no lock. Every ticket that was queued gets its terminal
 * state from the worker that has it, from cancel, from the sweep or from close. */
#ifndef MP_REGISTRY_ENTRY_H
#define MP_REGISTRY_ENTRY_H

#include "registry/breaker.h"
#include "registry/forecast.h"
#include "registry/histogram.h"
#include "registry/request.h"
#include "registry/services.h"
#include "registry/worker.h"

/* The state of an entry is four independent machines. All are guarded by the entry's lock. mp_entry_set_shutdown,
 * _removal, _unload and _health change them and refuse every arrow that is not drawn (state_machine.h).
 *
 * shutdown: the registry closes.
 *
 *   OPEN ----> CLOSED ----> QUITTING
 *
 *   CLOSED    New requests are refused with SHUTTING_DOWN. Accepted requests are served.
 *   QUITTING  Every queued and active request is cancelled. Workers leave. No worker starts.
 */
typedef enum mp_entry_shutdown {
    MP_SHUTDOWN_OPEN,
    MP_SHUTDOWN_CLOSED,
    MP_SHUTDOWN_QUITTING,
    MP_SHUTDOWN_STATES
} mp_entry_shutdown;
extern const mp_state_machine mp_shutdown_machine;

/* removal: the key was removed, or another model replaced this one.
 *
 *   NONE ----> DRAINING ----> GONE
 *
 *   DRAINING  New requests are refused. Accepted requests are served, then model and loader are freed.
 *   GONE      Everything is freed and MP_ENTRY_GONE is reported, once.
 *
 * Shutdown and removal are independent: the registry may close while an entry drains, and a caller that was inside
 * before the registry closed may remove an entry afterwards. An entry that quits while it drains never becomes GONE. */
typedef enum mp_entry_removal {
    MP_REMOVAL_NONE,
    MP_REMOVAL_DRAINING,
    MP_REMOVAL_GONE,
    MP_REMOVAL_STATES
} mp_entry_removal;
extern const mp_state_machine mp_removal_machine;

/* unload: the model's memory is to be freed, or is being freed.
 *
 *     +--------------------------------+
 *     |                                v
 *   NONE <----> REQUESTED ---------> RUNNING
 *     ^                                |
 *     +--------------------------------+
 *
 *   REQUESTED  Workers finish their active requests and leave; they take no further ones. The last worker to leave
 *              frees the model. If no model was loaded, the request ends without RUNNING.
 *   RUNNING    One thread frees the model or the loader without the lock. No worker is listed and none may start, so
 *              that nothing is loaded again before its memory is free. A request to unload is met already.
 *
 * NONE becomes RUNNING when the last worker leaves by itself, after the keep-alive. */
typedef enum mp_entry_unload {
    MP_UNLOAD_NONE,
    MP_UNLOAD_REQUESTED,
    MP_UNLOAD_RUNNING,
    MP_UNLOAD_STATES
} mp_entry_unload;
extern const mp_state_machine mp_unload_machine;

/* health: earlier failures, which refuse requests.
 *
 *              +--+
 *              |  v
 *   SOUND <-> FAILED <--> BROKEN
 *     ^                     ^
 *     +---------------------+
 *
 *   FAILED  The last load failed, or a file of the loaded model changed. Requests are refused with `failure` until
 *           `retry_ns`; the next one after that starts a load. Becomes SOUND when a load succeeds or the model is
 *           evicted.
 *   BROKEN  Workers died too often. Requests are refused with `failure` (NO_WORKERS) and no worker starts, until a
 *           caller asks for a load. A load that failed before is not forgotten by that: BROKEN becomes FAILED while
 *           `retry_ns` is set, else SOUND.
 *
 * Health says nothing about `resident`: a model that is loaded may be FAILED (its last worker got no engine) or BROKEN
 * (other workers still serve). */
typedef enum mp_entry_health {
    MP_HEALTH_SOUND,
    MP_HEALTH_FAILED,
    MP_HEALTH_BROKEN,
    MP_HEALTH_STATES
} mp_entry_health;
extern const mp_state_machine mp_health_machine;

struct mp_entry {
    /* constant */
    mp_services *services; /* a reference */
    uint64_t number;       /* unlike that of any other entry of the process */
    char key[256];
    mp_capability capability;
    mp_policy policy; /* of calls that name none */
    _Atomic int references;

    mp_mutex lock;
    mp_cond changed; /* workers, or what load, evict, remove and drain wait for */
    mp_cond room;    /* the queue has room again */
    /* guarded by: lock */
    mp_loader loader; /* ops NULL once freed */
    mp_queue queue;
    int room_waiters;
    mp_worker *workers[MP_WORKERS_MAX]; /* in order of birth; a worker is here until it frees itself or is set apart */
    int worker_count;
    int starting;          /* workers about to be put there */
    uint32_t listed;       /* workers that ever were */
    mp_entry_shutdown shutdown;
    mp_entry_removal removal;
    mp_entry_unload unload;
    mp_entry_health health;
    uint64_t unload_bytes; /* bytes of the model that is being freed */
    int apart;             /* set apart, and their threads not back */
    mp_resident *resident; /* a reference, or NULL */
    bool pinned;           /* the registry itself must not evict the model */
    uint64_t attempts, attempts_over; /* loads of the model started; that ended in any way */
    uint64_t loads;                   /* that succeeded */
    uint64_t unloads;                 /* times that the model was given up */
    mp_error failure;                 /* why `health` is not MP_HEALTH_SOUND */
    uint64_t retry_ns;                /* requests are refused until then; 0 = the last load did not fail */
    uint64_t backoff_ns;              /* doubles with every load that fails; 0 = the last load succeeded */
    uint64_t spawn_ns;                /* no worker is started before: growing rests after workers that died */
    uint64_t death_ns[5];             /* when the last ones did, a ring */
    int deaths;
    uint64_t scale_ns;                /* no further worker is tried before */
    mp_breaker breaker;
    mp_forecast forecast; /* with predictive_scaling only */
    uint64_t keep_alive_ns;
    uint64_t calls;    /* accepted; numbers their order of arrival */
    uint64_t answered; /* since the model was loaded */
    /* time that steps took in relation to their predicted cost, running means; 0 = unknown */
    double pace, full_pace; /* of all; of those that left somebody out, so that more could not have shared them */
    uint64_t units_in, units_out; /* tokens and images read and written, of calls that were answered */
    mp_histogram latency; /* of calls that were answered, from submit to end */
    mp_status last_error;
    struct mp_entry *close_next; /* by the thread that closes the registry */

    /* read anywhere */
    _Atomic uint64_t errors;
};

/* Takes the loader, also on failure. One reference, the caller's. */
mp_status mp_entry_create(mp_services *services, const char *key, const mp_loader *loader, mp_entry **entry,
                          mp_error *error);
mp_entry *mp_entry_pin(mp_entry *entry);
void mp_entry_unpin(mp_entry *entry);
static inline const char *mp_entry_key(const mp_entry *entry) { return entry->key; }
mp_spin_rule mp_entry_spin_rule(mp_entry *entry);

/* --- by callers; no lock held --- */

/* Queue it, loading the model if need be, or refuse. On success the pool has taken its reference. *gone: the entry was
 * removed or replaced meanwhile; look the key up again. */
mp_status mp_entry_submit(mp_entry *entry, mp_ticket *ticket, const mp_submit_options *options, bool *gone,
                          mp_error *error);
/* *gone: as of submit. */
mp_status mp_entry_load(mp_entry *entry, bool pin, uint64_t deadline_ns, bool *gone, mp_error *error);
mp_status mp_entry_evict(mp_entry *entry, uint64_t deadline_ns, mp_error *error);
void mp_entry_keep_alive(mp_entry *entry, uint64_t keep_alive_ns);
/* Start a load without waiting for it. */
void mp_entry_start(mp_entry *entry);
/* A model is loaded or being loaded, or calls wait for it. */
bool mp_entry_in_use(mp_entry *entry);
/* Refuse calls, serve what was accepted, then free everything and report MP_ENTRY_GONE. Never waits. */
void mp_entry_remove(mp_entry *entry);
mp_status mp_entry_wait_gone(mp_entry *entry, uint64_t deadline_ns, mp_error *error);
void mp_entry_cancel(mp_entry *entry, mp_ticket *ticket, mp_status cause);
/* What a call that waits for a mask waited for may be there: see mp_ticket_wake. */
void mp_entry_wake(mp_entry *entry, mp_ticket *ticket);
int mp_entry_position(mp_entry *entry, mp_ticket *ticket, uint64_t *eta_ns);
/* *pinned: a reference for the caller, or NULL. */
void mp_entry_describe(mp_entry *entry, mp_entry_info *info, mp_resident **pinned);

/* --- by the registry --- */

/* End what is due: expired calls, loads and steps that do not move, workers without work. Returns when the next is. */
uint64_t mp_entry_sweep(mp_entry *entry, uint64_t now_ns);
/* What the memory of a model without work is worth: */
typedef struct mp_eviction {
    uint64_t bytes;   /* that come back; 0 = it may not be evicted */
    uint64_t coming;  /* bytes of one that is being evicted already */
    uint64_t caches, trimming; /* that workers without work hold; of those that were told to give up what they can */
    uint64_t idle_ns, load_ns;
} mp_eviction;
void mp_entry_value(mp_entry *entry, mp_eviction *value);
/* Evict it if it still has no work. Never waits. */
bool mp_entry_evict_idle(mp_entry *entry);
/* Workers without work free caches and arenas; never waits. Returns the bytes held by those that are told so here. */
uint64_t mp_entry_trim(mp_entry *entry);
void mp_entry_close(mp_entry *entry);                       /* refuse calls from now on */
bool mp_entry_drain(mp_entry *entry, uint64_t deadline_ns); /* wait until nothing is queued or runs */
void mp_entry_quit(mp_entry *entry);                        /* end the rest */
/* Wait for the workers, at most until the deadline: who has not come by then is set apart. Free loader and model. */
void mp_entry_join(mp_entry *entry, uint64_t deadline_ns);
void mp_entry_fork_child(mp_entry *entry);
/* See audit.h; adds the lanes that its workers hold. */
mp_status mp_entry_audit(mp_entry *entry, int *lanes, bool (*is_held)(const mp_mutex *mutex), mp_error *error);

/* --- entry_state.c; must hold the lock. Each refuses an illegal transition: state_machine.h --- */

void mp_entry_set_shutdown(mp_entry *entry, mp_entry_shutdown shutdown);
void mp_entry_set_removal(mp_entry *entry, mp_entry_removal removal);
void mp_entry_set_unload(mp_entry *entry, mp_entry_unload unload);
void mp_entry_set_health(mp_entry *entry, mp_entry_health health);

/* --- workers; under the lock unless it says otherwise --- */

static inline bool mp_entry_works(const mp_entry *entry) {
    return entry->worker_count + entry->starting > 0 || entry->unload == MP_UNLOAD_RUNNING;
}
bool mp_entry_serves(const mp_entry *entry); /* some worker takes calls */
int mp_entry_running(const mp_entry *entry); /* active items of all workers */
void mp_entry_unlist_worker(mp_entry *entry, mp_worker *worker);
void mp_entry_ring_workers(mp_entry *entry); /* all of them look */
/* The first worker, unless there is one or it is too early. True: the caller calls mp_entry_launch once the lock is
 * released. */
bool mp_entry_begin(mp_entry *entry);
/* No lock held: the worker that begin or scale announced. The guard passes to it. */
void mp_entry_launch(mp_entry *entry, mp_guard guard);
/* Have the model unloaded once its active requests are done. A request that is pending, or memory that is being freed,
 * needs no second one. The caller wakes the workers. */
void mp_entry_request_unload(mp_entry *entry);
/* A load failed: refuse requests until the end of the backoff. A BROKEN entry stays BROKEN. */
void mp_entry_set_failed(mp_entry *entry, const mp_error *error);
/* Forget a load that failed. A BROKEN entry stays BROKEN. */
void mp_entry_clear_failed(mp_entry *entry);
/* No lock held: takes a worker off the list (NULL: that was done). With the last of them the model goes, unless calls
 * wait; then there is another worker. */
void mp_entry_settle(mp_entry *entry, mp_worker *leaving);
/* A worker died: the next one comes later each time, and none after too many. */
void mp_entry_note_death(mp_entry *entry, const mp_error *error);

/* --- dispatch.c; under the lock --- */

/* A worker could not be had: no further one is tried for so long. */
static inline void mp_entry_scale_later(mp_entry *entry) {
    entry->scale_ns = mp_sys_now_ns() + 1000ull * 1000 * 1000;
}

/* The worker has room for the call, by its policy. */
bool mp_dispatch_may_take(const mp_entry *entry, const mp_worker *worker, const mp_ticket *ticket);
/* Somebody without work who may take it is rung. */
void mp_dispatch_ring(mp_entry *entry, const mp_ticket *ticket);
/* Everybody without work who may take something that waits is rung: room or eligibility has changed. */
void mp_dispatch_ring_all(mp_entry *entry);
/* A worker goes: what waited for it alone is anybody's. */
void mp_dispatch_forget(mp_entry *entry, const mp_worker *worker);
/* An item, or a worker, has given memory back: all workers of the model may try again. */
void mp_dispatch_memory_free(mp_entry *entry);
/* For a call about to be queued: the worker that MP_POLICY_P2C chooses. */
mp_worker *mp_dispatch_home(const mp_entry *entry);
/* Whether mp_dispatch_take would take one. */
bool mp_dispatch_offers(const mp_entry *entry, const mp_worker *worker);
/* Take calls off the queue until the worker has no room or nothing waits for it. What it leaves may be for others, whom
 * the caller rings once the worker's state says that it is at work. */
void mp_dispatch_take(mp_entry *entry, mp_worker *worker);
/* All are busy and something waits: one more is to be started. True: as with begin; *guard has its bytes. */
bool mp_dispatch_scale(mp_entry *entry, mp_guard *guard);
/* So many calls come that one more will be needed (mp_registry_config.predictive_scaling). Likewise. */
bool mp_dispatch_foresee(mp_entry *entry, mp_guard *guard);
/* Workers that the forecast asks for, within what is allowed; 0 = it has nothing to say. */
int mp_dispatch_foreseen(const mp_entry *entry, uint64_t now_ns);
/* Predicted time until a call would start, behind so much cost, at one of the entry's paces; 0 = unknown. */
uint64_t mp_dispatch_wait_ns(const mp_entry *entry, uint64_t cost_ahead, double pace);

/* --- ends.c --- */

/* Under the lock: all tickets off the queue, in a list linked by next. */
mp_ticket *mp_entry_take_queue(mp_entry *entry);
void mp_entry_tell_room(mp_entry *entry); /* under the lock, after the queue got shorter */
/* Under the lock, for one in the queue or active. True: taken off the queue, the caller finishes it. */
bool mp_entry_cancel_locked(mp_entry *entry, mp_ticket *ticket, mp_status cause);
/* No lock held: metrics, bytes back, terminal state of one that is off the queue and off the active list. */
void mp_entry_finish(mp_entry *entry, mp_ticket *ticket, mp_status status, const mp_error *error);
/* Likewise, but the thread of a dead worker still uses the call: bytes and reference stay until mp_entry_let_go. */
void mp_entry_conclude(mp_entry *entry, mp_ticket *ticket, mp_status status, const mp_error *error);
void mp_entry_let_go(mp_entry *entry, mp_ticket *ticket);
/* No lock held: finish tickets of such a list with one error (NULL: each with its own cause). */
void mp_entry_finish_list(mp_entry *entry, mp_ticket *list, const mp_error *error);
/* Under the lock: a worker had a fault; metric and breaker. */
void mp_entry_note_fault(mp_entry *entry);
/* No lock held: a worker's fault in a step of this call, which took it alone or with others; outside: somebody ended
 * it. False: it has had its second try, or may have none; true: this is noted in the ticket. A step that fails for all
 * its calls is one fault: *noted, false before the first of them. */
bool mp_entry_fault(mp_entry *entry, mp_ticket *ticket, mp_status status, bool alone, bool outside, bool *noted);
/* No lock held: a worker is lost with this call (quarantine.h). True: the like of it is refused from now on. */
bool mp_entry_note_kill(mp_entry *entry, const mp_ticket *ticket, bool alone);
/* No lock held, by the ticket's holder: MODEL for one that is refused; a suspect is marked. */
mp_status mp_entry_screen(mp_entry *entry, mp_ticket *ticket, mp_error *error);
/* No lock held: check a call against the model, unless that was done, and charge its bytes. The ticket's holder
 * calls. */
mp_status mp_entry_check(mp_entry *entry, mp_resident *resident, mp_ticket *ticket, mp_error *error);
mp_status mp_entry_charge(mp_entry *entry, mp_ticket *ticket, mp_error *error);
void mp_entry_uncharge(mp_entry *entry, mp_ticket *ticket);

/* --- loading.c, serve.c, leaving.c; by the worker --- */

bool mp_worker_start(mp_worker *worker); /* True: ready to serve. False: everybody who waited was told */
void mp_worker_serve(mp_worker *worker); /* returns when it is to leave */
void mp_worker_leave(mp_worker *worker); /* gives up what it has; the last one the model; frees the worker */

#endif
