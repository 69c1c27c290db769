/* entry.h: one key of the registry: the model, its workers, its bounded queue and its circuit breaker.
 *
 * An entry outlives every model that is loaded for it. Requests enter the one queue; workers (worker.h) take them
 * from there. A worker is a job of the thread pool. The first worker loads the model, without Python, and all workers
 * share it. The last worker to leave frees it. The functions of an entry are spread over these files. Each calls only
 * functions of files above it in this list (tests/c/check_tiers.py), except through pointers:
 *
 *   entry.c      the data: life, states, the loaded model, settings
 *   worker.c     a worker's states, liveness and compute threads (worker.h)
 *   request.c    tickets (request.h)
 *   faults.c     the fault record: what failed, and what follows (faults.h)
 *   dispatch.c   which worker takes which request; when to start one more worker (ahead of need: forecast.h)
 *   ends.c       the end of a request: cancellation, memory, metrics, terminal status
 *   launch.c     starts workers; frees the model when none is left
 *   submit.c     a request enters the queue; its place there
 *   caller.c     a caller's ticket: wait, read, cancel, release
 *   load.c       callers that load; a worker's way from SPAWNING to READY
 *   improve.c    optional work of the engines of idle workers
 *   serve.c      a worker's loop: take, admit, plan, lease compute threads, step, deliver outcomes
 *   leave.c      the job of a worker's thread, and its end; abandoned workers
 *   evict.c      frees a model's memory
 *   remove.c     removal of the key, replacement, shutdown
 *   sweep.c      periodic checks: deadlines, stuck loads and steps, idle workers
 *   describe.c   state and figures for display; the models that hold memory
 *   audit.c      the invariants (audit.h)
 *
 * One mutex per entry guards all its mutable state. No thread holds it while a model loads, steps or is freed. Every
 * queued ticket gets its terminal status from exactly one of: the worker that took it, a load or a worker that failed,
 * cancel, the sweep, or shutdown. */
#ifndef MP_REGISTRY_ENTRY_H
#define MP_REGISTRY_ENTRY_H

#include "registry/faults.h"
#include "registry/forecast.h"
#include "registry/histogram.h"
#include "registry/request.h"
#include "registry/services.h"
#include "registry/worker.h"

/* The state of an entry is four independent machines: these three, and mp_faults.health (faults.h). All are guarded by
 * the entry's lock. mp_entry_set_shutdown, _removal and _unload change them and refuse every
 * transition that the diagrams do not show (state_machine.h).
 *
 * shutdown: the registry closes.
 *
 *   OPEN ----> CLOSED ----> QUITTING
 *
 *   CLOSED    New requests are refused with SHUTTING_DOWN. Accepted requests are served.
 *   QUITTING  Every queued and active request is cancelled. Workers leave as soon as they can. */
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
 *   GONE      The model is freed, the loader is being freed, and MP_ENTRY_GONE is reported, once.
 *
 * Shutdown and removal are independent: the registry may close while an entry drains, and a call of mp_registry_remove
 * that began before the registry closed may remove an entry afterwards. An entry that becomes QUITTING while it is
 * DRAINING never becomes GONE. */
typedef enum mp_entry_removal {
    MP_REMOVAL_NONE,
    MP_REMOVAL_DRAINING,
    MP_REMOVAL_GONE,
    MP_REMOVAL_STATES
} mp_entry_removal;
extern const mp_state_machine mp_removal_machine;

/* unload: the model's memory is to be freed, or is being freed.
 *
 *   NONE <--> REQUESTED ---> RUNNING ---> NONE
 *    ^ |          |           ^  ^
 *    | |          v           |  |
 *    +-|------> CALLED -------+  |
 *      +-------------------------+
 *
 *   REQUESTED  Workers finish their active requests and leave; they take no further ones. The last worker to leave
 *              frees the model. If no model was loaded, the state returns to NONE without becoming RUNNING.
 *   CALLED     As REQUESTED, by mp_entry_evict: if a load has failed by the time the unload ends, the failure is
 *              forgotten.
 *   RUNNING    One thread frees the model or the loader without the lock. No worker is listed and no worker may start:
 *              the next load must not begin before this memory is free. Further requests to unload have no effect.
 *
 * NONE becomes RUNNING when the last worker leaves by itself, after the keep-alive. */
typedef enum mp_entry_unload {
    MP_UNLOAD_NONE,
    MP_UNLOAD_REQUESTED,
    MP_UNLOAD_CALLED,
    MP_UNLOAD_RUNNING,
    MP_UNLOAD_STATES
} mp_entry_unload;
extern const mp_state_machine mp_unload_machine;

/* A loaded model and the count of its users. The last reference frees it. */
struct mp_resident {
    mp_model *model;
    _Atomic int references;
    uint64_t load;    /* number of the load that created the model, >= 1, unique in the process */
    uint64_t load_ns; /* duration of the load */
    uint64_t predicted_bytes; /* predicted size of the weights */
};

struct mp_entry {
    /* constant after mp_entry_create */
    mp_services *services; /* owns a reference */
    uint64_t number;       /* unique among all entries of the process */
    uint64_t revision;     /* mp_loader.revision */
    char key[256];
    mp_capability capability;
    mp_policy policy; /* default for requests that name no policy */
    _Atomic int references;

    mp_mutex lock;
    mp_cond changed; /* signals load, evict, remove, drain and join */
    mp_cond room;    /* signals submitters that the queue has room */
    /* guarded by: lock */
    mp_loader loader; /* `ops` is NULL once the loader is freed */
    mp_queue queue;
    int room_waiters;
    /* in the order of arrival; a worker stays in the list until it frees itself or is abandoned */
    mp_worker *workers[MP_WORKERS_MAX];
    int worker_count;
    int starting;          /* announced workers that are not in `workers` yet */
    uint32_t listed;       /* number of workers ever added to `workers` */
    mp_entry_shutdown shutdown;
    mp_entry_removal removal;
    mp_entry_unload unload;
    uint64_t unload_bytes; /* size of the model that is being freed */
    _Atomic uint64_t charged; /* bytes of its requests, which `account` does not contain */
    uint64_t ends;         /* requests that have ended */
    int yielding;          /* queued and active requests with mp_ticket.starved */
    int abandoned;         /* abandoned workers whose threads have not returned */
    mp_resident *resident; /* owns a reference; NULL if no model is loaded */
    int borrowers;         /* threads without a worker that use `resident`: it is not freed before they return it */
    bool pinned;           /* the registry itself must not evict the model */
    bool held;             /* a replacement is staged: unload the model when it is idle, but not to make room */
    bool load_requested;   /* a caller asked for the model to be loaded: the load goes on without queued requests */
    uint64_t attempts, attempts_over; /* loads that started; loads that ended, in success or failure */
    uint64_t loads;                   /* loads that succeeded */
    uint64_t unloads;                 /* unloads that ended, also of models that were not loaded */
    uint64_t scale_ns;                /* no additional worker starts before this time */
    mp_forecast forecast; /* used with predictive_scaling only */
    uint64_t keep_alive_ns;
    uint64_t accepted;  /* accepted requests; the value becomes mp_item.sequence */
    /* Running means of a step's duration divided by its predicted cost; 0 = unknown. */
    double pace, full_pace; /* over all steps; over steps that had no room for some offered item */
    uint64_t units_in, units_out; /* input and output (tokens, images) of completed requests */
    mp_histogram latency; /* completed requests: time from submission to completion */
    mp_reasons reasons; /* worker deaths, retries of requests, unloads of the model */
    mp_status last_error;
    mp_faults faults;
    struct mp_entry *close_next; /* links the entries while the registry closes */

    /* accessed by any thread */
    mp_budget account; /* the bytes of the model and its engines */
    _Atomic uint64_t errors;
    _Atomic uint64_t rows; /* tokens of all passes: prompt, decode and draft tokens */
};

/* --- entry.c; must not hold the lock unless stated otherwise --- */

/* Takes ownership of `loader`, also on failure. Returns one reference to the caller. */
mp_status mp_entry_create(mp_services *services, const char *key, const mp_loader *loader, mp_entry **entry,
                          mp_error *error);
/* Returns the number of the entry that was created last; entries are numbered upwards. */
uint64_t mp_entry_newest(void);
mp_entry *mp_entry_pin(mp_entry *entry);
void mp_entry_unpin(mp_entry *entry);
static inline const char *mp_entry_key(const mp_entry *entry) { return entry->key; }
/* Returns how long a thread that waits for a ticket of the entry may spin. The entry must outlive the rule. */
mp_spin_rule mp_entry_spin_rule(mp_entry *entry);
void mp_entry_keep_alive(mp_entry *entry, uint64_t keep_alive_ns); /* sets mp_entry.keep_alive_ns */
void mp_entry_pin_model(mp_entry *entry, bool pinned);             /* sets mp_entry.pinned */
void mp_entry_hold(mp_entry *entry, bool held); /* sets mp_entry.held */
/* True while a worker starts or exists that is not leaving, or a request is queued or active. A loaded model without
 * workers is not in use. */
bool mp_entry_in_use(mp_entry *entry);
mp_resident *mp_resident_pin(mp_resident *resident);
void mp_resident_unpin(mp_resident *resident); /* NULL is legal */
/* Must hold the lock; a model must be loaded. Returns the model, which exists until mp_entry_return. The borrower must
 * not wait for any thread meanwhile: an unload waits for borrowers, so that its memory is free when it ends. */
mp_resident *mp_entry_borrow(mp_entry *entry);
void mp_entry_return(mp_entry *entry); /* must hold the lock */

/* --- entry.c; must hold the lock --- */

/* Each setter refuses an illegal transition (state_machine.h). */
void mp_entry_set_shutdown(mp_entry *entry, mp_entry_shutdown shutdown);
void mp_entry_set_removal(mp_entry *entry, mp_entry_removal removal);
void mp_entry_set_unload(mp_entry *entry, mp_entry_unload unload);
/* True if a worker exists or is about to start. Also true while the unload is RUNNING: then no worker may start. */
static inline bool mp_entry_has_workers(const mp_entry *entry) {
    return entry->worker_count + entry->starting > 0 || entry->unload == MP_UNLOAD_RUNNING;
}
/* True if the workers are to leave, after their active requests, so that the model is freed. */
static inline bool mp_entry_must_unload(const mp_entry *entry) {
    return entry->unload == MP_UNLOAD_REQUESTED || entry->unload == MP_UNLOAD_CALLED;
}
bool mp_entry_serves(const mp_entry *entry); /* true if some worker serves and is not leaving */
int mp_entry_running(const mp_entry *entry); /* number of active items of all workers */
bool mp_entry_all_leave(const mp_entry *entry); /* no worker is about to start, and all listed ones are leaving */
void mp_entry_unlist_worker(mp_entry *entry, mp_worker *worker);
/* Requests that the model is unloaded once its active requests are done. Does nothing if the unload is already
 * REQUESTED, CALLED or RUNNING. The caller wakes the workers. */
void mp_entry_request_unload(mp_entry *entry);

/* --- worker.c; must hold the lock --- */

void mp_entry_wake_workers(mp_entry *entry); /* wakes every worker */

/* --- dispatch.c; must hold the lock --- */

/* Call when a worker could not be started: no additional worker starts for 1 s. */
static inline void mp_entry_scale_later(mp_entry *entry) {
    entry->scale_ns = mp_sys_now_ns() + 1000ull * 1000 * 1000;
}

/* True if the worker has room for the request under the request's policy. */
bool mp_dispatch_may_take(const mp_entry *entry, const mp_worker *worker, const mp_ticket *ticket);
/* Wakes one idle eligible worker, and workers that only wait for grammar masks: they may have room too. */
void mp_dispatch_wake(mp_entry *entry, const mp_ticket *ticket);
/* Call when room or eligibility has changed. If requests are queued, wakes every idle worker that is eligible for one
 * of them, and every worker that only waits for grammar masks. */
void mp_dispatch_wake_all(mp_entry *entry);
/* Call when the worker leaves: queued requests that are assigned to it become available to all workers. */
void mp_dispatch_forget(mp_entry *entry, const mp_worker *worker);
/* Call after a request or a worker has freed memory: all workers of the model may admit requests again. */
void mp_dispatch_memory_free(mp_entry *entry);
/* Call when a request found no memory although no other is active. Lets the queued requests that have begun, whose
 * results hold memory, run first: until one of them has ended, or all of them have found no memory either. Until
 * `ticket` has ended, requests that have not begun wait and no worker is added, because they would take the memory that
 * it needs. Returns false if there is none that could run; otherwise the caller must return `ticket` to the queue. */
bool mp_dispatch_yield(mp_ticket *ticket);
/* Sets MP_TICKET_ENDED, for a request that is in no queue and on no active list. Those that yielded may run again. */
void mp_dispatch_end(mp_ticket *ticket);
/* Assigns a queued request to a worker, or to none: NULL. Its cost must not change while it is assigned. */
void mp_dispatch_assign(mp_ticket *ticket, mp_worker *worker);
/* Returns the worker that MP_POLICY_P2C chooses for a request that is about to be queued. */
mp_worker *mp_dispatch_choose(const mp_entry *entry);
/* True if mp_dispatch_take would take a request. */
bool mp_dispatch_offers(const mp_entry *entry, const mp_worker *worker);
/* Moves requests from the queue to the worker's active list until the worker is full or no queued request is eligible.
 * The caller then sets the worker's state and wakes other workers for the remaining requests. */
void mp_dispatch_take(mp_entry *entry, mp_worker *worker);
/* True if the model is loaded and is not about to be freed: only then may further workers start. */
bool mp_dispatch_stays(const mp_entry *entry);
/* Announces one more worker if all are busy and requests are queued. If it returns true, *guard reserves the new
 * worker's bytes: call mp_entry_launch after unlocking. */
bool mp_dispatch_scale(mp_entry *entry, mp_guard *guard);
/* Announces one more worker if the forecast asks for it (mp_registry_config.predictive_scaling). Otherwise as
 * mp_dispatch_scale. */
bool mp_dispatch_predict(mp_entry *entry, mp_guard *guard);
/* Returns the number of workers that the forecast asks for, within the limits; 0 = no forecast. */
int mp_dispatch_predicted(const mp_entry *entry, uint64_t now_ns);
/* Predicts the time until a request starts if work of `cost_ahead` is queued before it. `pace`: mp_entry.pace or
 * .full_pace. Returns 0 if unknown. */
uint64_t mp_dispatch_wait_ns(const mp_entry *entry, uint64_t cost_ahead, double pace);
/* Call after removing requests from the queue: wakes the submitters that wait for room. */
void mp_entry_notify_room(mp_entry *entry);

/* --- ends.c --- */

/* Must hold the lock. Empties the queue into a list linked by mp_ticket.next. The tickets become ENDED; the caller must
 * finish them with mp_entry_finish_list. */
mp_ticket *mp_entry_take_queue(mp_entry *entry);
/* Must hold the lock, for a queued or active request. Returns true if the request was queued: it is ENDED now, and the
 * caller must finish it. */
bool mp_entry_cancel_locked(mp_entry *entry, mp_ticket *ticket, mp_status cause);
/* Must not hold the lock. Ends a request that is in no queue and on no active list: frees its bytes, counts it,
 * publishes its terminal status. */
void mp_entry_finish(mp_entry *entry, mp_ticket *ticket, mp_status status, const mp_error *error);
/* As mp_entry_finish, for a request that the thread of an abandoned worker still uses: its bytes and the pool's
 * reference stay until the thread has returned and calls mp_entry_let_go. */
void mp_entry_conclude(mp_entry *entry, mp_ticket *ticket, mp_status status, const mp_error *error);
void mp_entry_let_go(mp_entry *entry, mp_ticket *ticket);
/* Must not hold the lock. Finishes the tickets of a list from mp_entry_take_queue with `error` (NULL: each ticket with
 * its own cause). */
void mp_entry_finish_list(mp_entry *entry, mp_ticket *list, const mp_error *error);
/* Must not hold the lock; only the thread that holds the ticket may call it. Checks the request against the model,
 * unless this load of the model has checked it already. May add bytes to the request: call mp_entry_charge next. */
mp_status mp_entry_check(mp_resident *resident, mp_ticket *ticket, mp_error *error);
/* Charges the bytes of the request that are not charged yet to the budget. MEMORY_EXHAUSTED if they are not free. */
mp_status mp_entry_charge(mp_entry *entry, mp_ticket *ticket, mp_error *error);
void mp_entry_uncharge(mp_entry *entry, mp_ticket *ticket);
/* Must not hold the lock. Frees the outputs of queued requests that have no results yet. They are made and charged
 * again before the requests are admitted. Returns the bytes given back to the budget. */
uint64_t mp_entry_drop_outputs(mp_entry *entry);
/* Must not hold the lock. A request is refused, or ends, for lack of memory: names the models that hold it, and logs a
 * warning, at most one per second. */
void mp_entry_explain_shortage(mp_entry *entry, mp_error *error);
/* Must not hold the lock. Cancels the request; `cause` becomes mp_ticket.cause. A queued request ends before the call
 * returns, an active one when its worker notices. Returns false if the request had already ended. */
bool mp_entry_cancel(mp_entry *entry, mp_ticket *ticket, mp_status cause);
/* Must not hold the lock. Wakes the worker on whose active list the request is, to re-check the request's grammar mask.
 * See mp_ticket_wake. */
void mp_entry_wake(mp_entry *entry, mp_ticket *ticket);

/* --- launch.c; must hold the lock unless stated otherwise --- */

/* Announces the first worker and returns true, unless mp_entry_has_workers, the entry is BROKEN or the backoff has not
 * ended. If it returns true, call mp_entry_launch after unlocking. */
bool mp_entry_begin(mp_entry *entry);
/* Must not hold the lock. Starts the worker that mp_entry_begin, mp_dispatch_scale or mp_dispatch_predict announced.
 * Takes ownership of `guard`. */
void mp_entry_launch(mp_entry *entry, mp_guard guard);
/* Must not hold the lock. Unlists `leaving` (NULL: already unlisted). If no worker is left, frees the model or, if
 * requests are queued, keeps the model and starts another worker. */
void mp_entry_finalize(mp_entry *entry, mp_worker *leaving);

/* --- submit.c; must not hold the lock --- */

/* Queues the ticket and starts a load if necessary, or refuses it. On success the pool owns one reference to the
 * ticket. Sets *gone if the entry was removed or replaced meanwhile: then look the key up again. */
mp_status mp_entry_submit(mp_entry *entry, mp_ticket *ticket, const mp_submit_options *options, bool *gone,
                          mp_error *error);
/* As mp_ticket_position, but `eta_ns` must not be NULL, and *eta_ns stays unchanged if the time is unknown. */
int mp_entry_position(mp_entry *entry, mp_ticket *ticket, uint64_t *eta_ns);

/* --- load.c; must not hold the lock --- */

/* Loads the model if necessary and waits until a worker serves. `pin`: sets mp_entry.pinned on success. Sets *gone as
 * mp_entry_submit does. *over: the load has ended, with the returned status; its worker may not have reported the
 * event yet. */
mp_status mp_entry_load(mp_entry *entry, bool pin, uint64_t deadline_ns, bool *gone, bool *over, mp_error *error);
/* Starts a load and does not wait for it. */
void mp_entry_start(mp_entry *entry);

/* --- shortage.c; for the worker's own thread; must not hold the lock unless stated otherwise --- */

/* Frees the engine's caches for a request that found no memory. Returns false if they are free already, or if nothing
 * was freed. */
bool mp_worker_trim(mp_worker *worker);
/* Memory was refused. Asks other models to free memory that they do not need. Returns true if some is being freed, may
 * be once loads and the requests of other models have ended, or was freed since the refusal. */
bool mp_worker_reclaim(mp_worker *worker);
/* Frees outputs of queued requests (mp_entry_drop_outputs) for a request of the worker. Until that one has left, the
 * worker admits no other, which would take the memory again. Returns false if nothing was freed. */
bool mp_worker_drop_outputs(mp_worker *worker);
/* Must hold the lock. Stops admissions, so that a refused request is not taken again before another request has left.
 * `again`: admissions resume after MP_POLL_NS at the latest, because there may be no other request. */
void mp_worker_block_admission(mp_worker *worker, bool again);
/* Must hold the lock. Lets others run before the worker's only request (mp_dispatch_yield). */
bool mp_worker_yield(mp_worker *worker, mp_ticket *ticket);

/* --- load.c, serve.c, leave.c; for the worker's own thread --- */

bool mp_worker_start(mp_worker *worker); /* true: ready to serve; false: failed, worker must leave */
void mp_worker_serve(mp_worker *worker); /* returns when the worker must leave */
void mp_worker_leave(mp_worker *worker); /* frees engine and worker; the last worker frees the model */
void mp_worker_run(void *worker);        /* the job: all three, then frees the worker */

/* --- leave.c --- */

/* Must hold the entry's lock; releases it temporarily. Abandons a worker that makes no progress: unlists it, ends its
 * requests with `error` and frees its CPUs for other workers. */
void mp_worker_abandon(mp_worker *worker, const mp_error *error);

/* --- evict.c; must not hold the lock --- */

/* As mp_registry_evict: unpins the model, forgets a failed load, and waits until the model is freed. TIMEOUT: the
 * eviction continues in the background. */
mp_status mp_entry_evict(mp_entry *entry, uint64_t deadline_ns, mp_error *error);
/* The effect of evicting a model, by which the registry chooses the model to evict. */
typedef struct mp_eviction {
    uint64_t bytes;   /* bytes to be freed; 0 = must not be evicted */
    uint64_t coming;  /* bytes that a running eviction will free */
    /* bytes of requests and of the workers that serve them; and of the model, if it may be evicted once they ended */
    uint64_t busy;
    uint64_t blocked; /* as `busy`, of a model whose requests all wait for memory */
    uint64_t caches, trimming; /* held by idle workers: not yet told to trim; told to trim */
    uint64_t idle_ns, load_ns;
} mp_eviction;
void mp_entry_value(mp_entry *entry, mp_eviction *value); /* fills in *value */
/* Starts to evict the model. Returns false, and does nothing, if the model is not idle any more. Never blocks. */
bool mp_entry_evict_idle(mp_entry *entry);
/* Tells idle workers to free caches and arenas. Never blocks. Returns the bytes held by the workers that this call
 * told. */
uint64_t mp_entry_trim(mp_entry *entry);

/* --- remove.c; must not hold the lock --- */

/* Refuses new requests, serves the accepted ones, then frees everything and reports MP_ENTRY_GONE. Cancels a load for
 * which no request waits. Never blocks. */
void mp_entry_remove(mp_entry *entry);
/* Waits until mp_entry_remove has freed everything. Calls it if no worker is left to do so. */
mp_status mp_entry_wait_gone(mp_entry *entry, uint64_t deadline_ns, mp_error *error);
void mp_entry_close(mp_entry *entry); /* refuses requests from now on */
/* Waits until no request is queued or active. Returns false at the deadline. */
bool mp_entry_drain(mp_entry *entry, uint64_t deadline_ns);
void mp_entry_quit(mp_entry *entry); /* cancels all queued and active requests, and all loads */
/* Waits for the workers until the deadline and abandons those that have not left by then. Frees loader and model. */
void mp_entry_join(mp_entry *entry, uint64_t deadline_ns);

/* --- sweep.c, describe.c, registry_fork.c, audit.c; must not hold the lock --- */

/* Performs all periodic checks: deadlines, stuck loads and steps, idle workers. Returns the time at which the next
 * check is due. */
uint64_t mp_entry_sweep(mp_entry *entry, uint64_t now_ns);
/* Borrows info->model, if not NULL, until mp_entry_return. */
void mp_entry_describe(mp_entry *entry, mp_entry_info *info);
void mp_entry_fork_child(mp_entry *entry);
/* See audit.h. Adds the compute threads that the workers hold to *threads. */
mp_status mp_entry_audit(mp_entry *entry, int *threads, bool (*is_held)(const mp_mutex *mutex), mp_error *error);

#endif
