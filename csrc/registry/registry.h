/* registry.h: the interface of the registry, and the only header of it that the binding needs: keys, the entries
 * behind them, requests and their tickets.
 *
 * The registry is independent of models: a loader (models/engine.h) creates a model, and engines of the model execute
 * steps.
 *
 * Life of a request: the binding makes an mp_request and submits it -> the entry is pinned; the request is checked
 * against the model if the model is loaded, and queued or refused -> if no worker exists, one starts and loads the
 * model -> a worker takes the request, checks it if submit could not, admits it, plans, leases CPUs and takes steps ->
 * the ticket gets its one terminal status and its waiters wake -> the caller reads the result and releases the ticket.
 *
 * Thread-safe: every function may be called from any thread, without the GIL. */
#ifndef MP_REGISTRY_REGISTRY_H
#define MP_REGISTRY_REGISTRY_H

#include "models/engine.h"
#include "registry/histogram.h"

typedef struct mp_registry mp_registry;
typedef struct mp_ticket mp_ticket;
typedef struct mp_notifier mp_notifier;

#define MP_FOREVER UINT64_MAX
enum { MP_PATIENCE_SCALE = 10 }; /* see mp_registry_config.scale_timeout */

typedef enum mp_policy { /* which worker of a model takes a request */
    MP_POLICY_DEFAULT,    /* requests: the model's policy; configuration: the policy of the loader or capability */
    MP_POLICY_SHARED,     /* any idle worker, else the first worker that checks the queue */
    MP_POLICY_PACK,       /* the first worker with room, so that one pass over the weights serves many requests */
    MP_POLICY_P2C,        /* the less loaded of two random workers; idle workers also take requests of busy ones */
    MP_POLICY_SEQUENTIAL, /* an idle worker, which takes no other request until this one ends */
    MP_POLICY_COUNT
} mp_policy;
bool mp_policy_from_name(const char *name, mp_policy *policy); /* "shared", ... */
const char *mp_policy_name(mp_policy policy);

/* Service classes. Callers choose INTERACTIVE for requests of one input and BULK for others. Each class has its own
 * queue capacity, and bulk work gets a smaller share of the steps (serve.c). */
enum { MP_SERVICE_INTERACTIVE, MP_SERVICE_BULK, MP_SERVICE_COUNT };

typedef struct mp_chaos_rule { /* chances, 0 to 1, with a sum of at most 1; all 0 = off. See chaos.h */
    uint64_t seed;
    double fail, stall, die, slow, memory; /* per step of a worker */
} mp_chaos_rule;

#define MP_SHUTDOWN_GRACE_NS (5ull * 1000 * 1000 * 1000) /* the default */

typedef struct mp_registry_config { /* 0 = default */
    /* Compute threads and bytes belong to the process and are shared by all registries that leave `threads` and
     * `memory_limit` at 0. A registry that sets one of them has a CPU allocator or a budget of its own;
     * `background` needs an allocator of its own too. */
    int threads;             /* compute threads in all; default: mp_topology_threads */
    bool background;         /* workers and compute threads run in the background (mp_thread_start_in_background) */
    uint64_t memory_limit;   /* bytes; default: the rule of governor.h */
    uint64_t step_budget_ns; /* default: MP_STEP_BUDGET_NS */
    /* how long a worker or a caller spins before it parks; default: MPOOL_SPIN_US; 1 = never spin */
    uint64_t spin_ns;
    uint64_t shutdown_grace_ns;    /* default MP_SHUTDOWN_GRACE_NS */
    uint64_t load_timeout_ns;      /* since the last progress; default 30 s */
    uint64_t load_ceiling_ns;      /* for the whole load; default 10 min */
    uint64_t stall_timeout_ns;     /* a step without progress for this long: the worker is abandoned; default 30 s */
    uint64_t patience_ns;          /* for requests that set none (mp_submit_options); default: no limit */
    uint64_t keep_alive_ns;        /* an idle worker leaves after this time; default 5 min; MP_FOREVER: never */
    uint64_t maintenance_every_ns; /* interval between checks of the memory pressure; default 60 s */
    uint64_t batch_wait_ns;        /* how long an idle worker waits for more requests; default 0 */
    int max_workers;               /* per model; default 4 */
    mp_policy policy[MP_CAPABILITY_COUNT];                    /* default: capabilities.def */
    int queue_capacity[MP_CAPABILITY_COUNT]
                      [MP_SERVICE_COUNT]; /* queued requests per model; default: capabilities.def */
    int breaker_threshold; /* first faults of requests in the window that open a breaker; default 5; -1 = never */
    uint64_t breaker_window_ns, breaker_backoff_ns; /* default 60 s, 60 s */
    mp_chaos_rule chaos;
    /* For requests that set no patience: use three times the predicted wait in the queue instead, but at least
     * patience_ns and at most MP_PATIENCE_SCALE times patience_ns. */
    bool scale_timeout;
    bool predictive_scaling; /* start workers ahead of need (forecast.h) */
} mp_registry_config;

mp_status mp_registry_create(const mp_registry_config *config, mp_registry **registry, mp_error *error);
/* Returns a number that is unique among all registries of the process, as used in events.h. */
uint64_t mp_registry_number(const mp_registry *registry);
/* Starts the maintenance thread now, which checks deadlines, idle workers and memory. Otherwise it starts with the
 * first load. Idempotent. */
void mp_registry_maintain(mp_registry *registry);
/* Calls run(lease, arg) with a lease of as many compute threads as the caller's share allows, for work that is not a
 * request of a model; `run` should return within a step's time. Waits for its turn among the workers. TIMEOUT, without
 * a call, if no CPU is free by deadline_ns (0: none): a worker that loads a model keeps its CPUs until the end.
 * SHUTTING_DOWN, without a call, after mp_registry_close has begun. */
mp_status mp_registry_compute(mp_registry *registry, uint64_t deadline_ns, void (*run)(mp_lease *lease, void *arg),
                              void *arg, mp_error *error);
/* Refuses new requests from now on (SHUTTING_DOWN). Idempotent. */
void mp_registry_begin_shutdown(mp_registry *registry);
/* Calls begin_shutdown, drains for the grace period (0: not at all), cancels the rest and joins every thread. Every
 * ticket gets its terminal status: SHUTTING_DOWN if it was cut off. Idempotent and thread-safe: every caller returns
 * when the registry is closed. The registry stays valid and refuses everything. */
void mp_registry_close(mp_registry *registry, uint64_t grace_ns);
/* Closes with the configured grace period, then frees. Tickets may outlive the registry. NULL is legal. */
void mp_registry_destroy(mp_registry *registry);
/* fork: a child finds the same entries, with loaded models over the same mappings, and no threads; the first use starts
 * new ones. Requests of the parent that had not ended are CANCELLED in the child. A staged replacement is dropped in
 * the child, because the thread that would commit it exists in the parent only; the load of any other replacement
 * starts again with the first use of its key. Fork handlers do this in every fork of the process. */

/* ---- entries ----------------------------------------------------------------------------------------------------- */

typedef enum mp_add { /* how mp_registry_add treats an existing key */
    MP_ADD_NEW,       /* INVALID_ARGUMENT */
    /* If the old model is in use, the new model is loaded as well. Once its load has succeeded, it gets the new
     * requests, and the old model drains. If the load fails, the old model stays and mp_registry_load returns the
     * cause. */
    MP_ADD_REPLACE,
    /* The old model serves until mp_registry_commit, and the registry does not evict it to make room meanwhile.
     * mp_registry_load loads the new model. If the load fails, the old model stays. A new key gets the model at once.
     */
    MP_ADD_STAGED
} mp_add;
/* Takes ownership of `loader`, also on failure. Returns at once. A later replacement of a key wins over one that is
 * being loaded or staged. */
mp_status mp_registry_add(mp_registry *registry, const char *key, const mp_loader *loader, mp_add add,
                          mp_error *error);
enum { MP_COMMIT_MAX = 16 };
/* Gives all new requests for up to MP_COMMIT_MAX keys to the models that were staged with this revision
 * (mp_loader.revision), at one moment for all keys, loaded or not; the old models drain. Idempotent. Returns SEND
 * and changes nothing if a key has neither a staged nor a current model of this revision. */
mp_status mp_registry_commit(mp_registry *registry, const char *const *keys, int count, uint64_t revision,
                             mp_error *error);
/* Drops the model that was staged with this revision, if there is one. Returns false if it is the current model of the
 * key already. Idempotent. */
bool mp_registry_withdraw(mp_registry *registry, const char *key, uint64_t revision);
/* Refuses new requests for the key, finishes the accepted ones and frees everything: the model, a replacement (whose
 * load is cancelled), and replaced models that still drain. Returns when that is done, or TIMEOUT at the deadline.
 * After a TIMEOUT the removal continues in the background, and another call waits for its end. UNKNOWN_MODEL if the key
 * does not exist. */
mp_status mp_registry_remove(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error);
/* Waits until every model that was removed from `key` or replaced is gone, even if `key` has a new model by now. MP_OK
 * if no such model exists any more. */
mp_status mp_registry_wait_removed(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error);
/* Loads the model and waits until a worker is ready. Concurrent callers share one load. Ignores the backoff of an
 * earlier failure. `pin`: the registry itself never evicts the model. If the key is being replaced, waits for the
 * replacement. TIMEOUT: the load continues in the background, but if the model is being evicted, no load follows. */
mp_status mp_registry_load(mp_registry *registry, const char *key, bool pin, uint64_t deadline_ns, mp_error *error);
/* Frees the model, even if the model is pinned, forgets a failed load, and keeps the key. Waits for active requests
 * until the deadline. TIMEOUT: the eviction continues in the background, and forgets a load that fails meanwhile.
 * Queued requests load the model again. */
mp_status mp_registry_evict(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error);

/* Sets how long a worker of the model may be idle before it leaves. The last worker frees the model. Applies to a
 * replacement that is being loaded or staged as well. */
mp_status mp_registry_keep_alive(mp_registry *registry, const char *key, uint64_t keep_alive_ns, mp_error *error);

/* Sets mp_entry.pinned, also of a model that is not loaded yet and of a replacement that is being loaded or staged. */
mp_status mp_registry_pin(mp_registry *registry, const char *key, bool pinned, mp_error *error);

/* Reasons for which a worker dies, a request is retried, or a model is unloaded. */
typedef enum mp_reason {
    MP_REASON_KILLED,     /* another program killed the worker's process */
    MP_REASON_CRASHED,    /* the worker's process ended by itself */
    MP_REASON_STALLED,    /* the worker made no progress: its process was killed, or its thread abandoned */
    MP_REASON_INTERNAL,   /* an internal error */
    MP_REASON_FILES,      /* a model file was changed */
    MP_REASON_MODEL,      /* the model failed in a step */
    MP_REASON_MEMORY,     /* memory is short, or another model needs it */
    MP_REASON_KEEP_ALIVE, /* the model was idle for its keep-alive */
    MP_REASON_CALL,       /* a caller unloaded, removed or replaced the model */
    MP_REASON_FAULT,      /* the last worker died */
    MP_REASON_COUNT
} mp_reason;
const char *mp_reason_name(mp_reason reason); /* "killed", "keep_alive", ... */
typedef struct mp_reasons { /* counts by reason */
    uint64_t deaths[MP_REASON_COUNT], retries[MP_REASON_COUNT], evictions[MP_REASON_COUNT];
} mp_reasons;

enum { MP_WORKERS_MAX = 16 };
typedef struct mp_worker_info {
    uint32_t id;
    int node;          /* memory node of the machine; -1: the machine has only one */
    const char *state; /* "spawning", "loading", "ready", "processing", "idle", "evicting", "dead", "failed" */
    int running;
    uint64_t served, busy_ns, idle_ns; /* requests that ended; time in steps; time since the last work */
    uint64_t engine_bytes, predicted_bytes; /* size of its engine after its last step; predicted size */
    int process; /* process id of a worker process, else 0 */
} mp_worker_info;

typedef struct mp_entry_info {
    char key[256];
    mp_capability capability;
    const char *state; /* "cold", "loading", "ready", "busy", "evicting", "failed" */
    const char *breaker; /* "closed", "open", "half-open" */
    mp_policy policy;
    /* Workers that serve or are being evicted; workers with active requests; abandoned workers whose threads have not
     * returned; queued requests; active requests. */
    int workers, busy, dead, queued, running;
    int waiting[MP_SERVICE_COUNT], capacity[MP_SERVICE_COUNT]; /* per service class: queued requests, and their limit */
    uint64_t full_ns[MP_SERVICE_COUNT]; /* time for which the queue of a service class has been full */
    double arrivals; /* requests per second; 0 = unknown, or predictive scaling is off */
    int predicted;   /* workers predicted for these arrivals; 0 = unknown or off */
    bool pinned;
    uint64_t model_bytes, engine_bytes; /* bytes of the model; of the engines of all workers */
    mp_state_use states;                /* sum over all workers */
    uint64_t accepted, errors;          /* requests: accepted; failed, without timeouts and cancellations */
    uint64_t idle_ns; /* time since the last worker became idle; 0 = a worker has a request, or no worker serves */
    uint64_t keep_alive_ns;
    uint64_t predicted_bytes; /* predicted size of the model before it was loaded */
    uint64_t load_ns;         /* duration of its load; 0 = not loaded */
    mp_worker_info worker[MP_WORKERS_MAX];
    int worker_count;
    mp_histogram latency; /* completed requests: time from submission to completion */
    uint64_t units_in, units_out; /* input and output (tokens, images) of completed requests */
    uint64_t rows;                /* tokens of all passes so far, as `rows` in metrics.def; 0 without a decoder */
    mp_reasons reasons; /* worker deaths, retries of requests, unloads of the model */
    mp_status last_error; /* how the last request without a result ended, also TIMEOUT and CANCELLED; MP_OK = none */
    const mp_model *model; /* borrowed while the visitor runs, or NULL */
} mp_entry_info;
/* Visits a snapshot of the entries, ordered by key. Returns MEMORY_EXHAUSTED, and visits no entry, if memory for the
 * snapshot is refused. */
mp_status mp_registry_visit(mp_registry *registry, void (*visit)(void *arg, const mp_entry_info *info), void *arg,
                            mp_error *error);

typedef struct mp_registry_stats {
    uint64_t memory_limit, memory_used, bytes_by_tag[MP_TAG_COUNT];
    int threads, threads_leased;
    const char *pressure; /* "low", "normal", "high", "critical" */
#define MP_METRIC(name, meaning) uint64_t name;
#include "registry/metrics.def"
#undef MP_METRIC
    uint64_t threads_created, threads_joined; /* counts of the process */
} mp_registry_stats;
void mp_registry_get_stats(mp_registry *registry, mp_registry_stats *stats);

/* ---- requests ---------------------------------------------------------------------------------------------------- */

/* The queue is full, or other requests, loads or evictions hold the memory that the request needs: */
typedef enum mp_fail_fast {
    MP_FAIL_LATE,   /* submit waits, until the deadline or the end of the patience */
    MP_FAIL_SUBMIT, /* submit returns OVERLOADED at once; a queued request waits for the load of its model */
    MP_FAIL_LOAD    /* as MP_FAIL_SUBMIT. A request that has not begun also ends with OVERLOADED while the load of its
                     * model waits for memory that other loads and requests hold */
} mp_fail_fast;

typedef struct mp_submit_options {
    uint64_t deadline_ns; /* absolute, monotonic clock; 0 = none */
    /* TIMEOUT after this long without a result, a step or a stream chunk; 0 = the registry's default */
    uint64_t patience_ns;
    uint64_t keep_alive_ns; /* new keep-alive of the model; 0 = unchanged */
    uint8_t priority;       /* 0 = critical, high, normal, low, 4 = batch */
    uint8_t service_class;  /* MP_SERVICE_INTERACTIVE or MP_SERVICE_BULK */
    mp_policy policy;       /* default: the model's policy */
    uint64_t tenant;        /* mp_tenant_of. Requests of a tenant together get one fair share; 0 = no tenant named */
    /* 0 = any; else the mp_loader.revision that the model must have. SEND, counted in no metric, if the key has another
     * model or none */
    uint64_t revision;
    mp_fail_fast fail_fast;
    bool uncounted; /* the caller will retry an OVERLOADED request: count it in no metric */
    /* called without a lock, every 50 ms while submit waits for room and every 5 ms while it waits for memory; true:
     * CANCELLED */
    bool (*give_up)(void *arg);
    void *give_up_arg;
} mp_submit_options;

/* mp_error.field of an OVERLOADED error if memory was short; "" if the queue was full */
#define MP_FIELD_MEMORY "memory"

/* Takes ownership of `request`, also on failure. Returns as soon as the request is queued. The thread of the first
 * worker loads a cold model; a load that fails ends the ticket with its cause.
 *
 * Refuses the request, without a ticket, with UNKNOWN_MODEL, WRONG_CAPABILITY or SHUTTING_DOWN; with an error of the
 * model's check(), if the model is loaded; and with
 *   OVERLOADED        `fail_fast` is set, and the queue is full, or the request's bytes are not free, but may become so
 *                     when other requests, loads or evictions end, or MP_FAIL_LOAD applies: the field of the last two
 *                     errors is MP_FIELD_MEMORY
 *   TIMEOUT           the deadline or the patience ended while the request waited for room or memory; or requests are
 *                     queued, and the predicted wait exceeds four times the time until the deadline
 *   MEMORY_EXHAUSTED  the request's bytes are not free, and cannot become so without a further call
 *   CIRCUIT_OPEN      the breaker is open (breaker.h)
 *   MODEL             the request is quarantined (quarantine.h)
 *   CANCELLED         `give_up` returned true
 *   SEND              the model was removed while the request waited, or has another revision than `options->revision`
 * and with the failure of the last load until its backoff has ended. */
mp_status mp_registry_submit(mp_registry *registry, const char *key, mp_request *request,
                             const mp_submit_options *options, mp_ticket **ticket, mp_error *error);

/* Drops a caller's reference. Dropping the last one cancels a ticket that is not done. NULL is legal. */
void mp_ticket_release(mp_ticket *ticket);
mp_ticket *mp_ticket_pin(mp_ticket *ticket); /* adds a caller's reference */
/* Waits until the ticket is done, progress exceeds `seen`, or the deadline passes. Returns false at the deadline.
 * *progress (NULL allowed) receives a counter that rises with every stream chunk and is UINT64_MAX once done. */
bool mp_ticket_wait(mp_ticket *ticket, uint64_t seen, uint64_t deadline_ns, uint64_t *progress);
bool mp_ticket_done(mp_ticket *ticket);
/* Returns the terminal status and copies the error of a failed request. Asserts that the ticket is done. */
mp_status mp_ticket_status(mp_ticket *ticket, mp_error *error);
/* Cancels the request: a queued request ends at once, an active request within a layer or a token. Never blocks. The
 * ticket still gets its terminal status. Returns false if the request had already ended; after true, the status is
 * not OK: it is CANCELLED, or the error that the request met before the cancellation took effect. */
bool mp_ticket_cancel(mp_ticket *ticket);
/* Call after writing a grammar mask into the request: wakes the worker that may wait for the mask. Never blocks. */
void mp_ticket_wake(mp_ticket *ticket);
/* Returns the request with its result; valid while the reference is held. */
mp_request *mp_ticket_request(mp_ticket *ticket);
/* Times of the monotonic clock: submitted, first step began, done. 0 = not yet. */
void mp_ticket_times(mp_ticket *ticket, uint64_t *submitted_ns, uint64_t *started_ns, uint64_t *finished_ns);
/* Returns the number of requests ahead in the queue; -1 once active or done. *eta_ns (NULL allowed): predicted time
 * until the request is done; 0 = unknown. */
int mp_ticket_position(mp_ticket *ticket, uint64_t *eta_ns);

/* ---- asyncio: one notifier per event loop ------------------------------------------------------------------------ */

/* A descriptor to poll (base/wake_fd.h) and a list of ids. A bound ticket adds its id to the list when the ticket is
 * done or has progress, unless the id is still listed, and makes the descriptor readable. */
mp_status mp_notifier_create(mp_notifier **notifier, mp_error *error);
/* Closes the fd. Tickets that are still bound keep the notifier's memory alive, and their progress is discarded. */
void mp_notifier_destroy(mp_notifier *notifier);
int mp_notifier_fd(const mp_notifier *notifier);
/* Moves up to `capacity` ids from the list to `ids`. Returns their number. Clears the fd when the list is empty. */
int mp_notifier_take(mp_notifier *notifier, uint64_t *ids, int capacity);
/* Binds a ticket before or after completion; a done one is listed at once. A ticket may be bound to several
 * notifiers and notifies all of them, each with the id of its last binding. Returns false, and binds nothing, if
 * memory is refused. The first notifier of a ticket needs no memory. */
bool mp_ticket_bind(mp_ticket *ticket, mp_notifier *notifier, uint64_t id);

#endif
