/* registry.h: the sole header that the binding needs. Keys, the entries behind them, calls and their tickets.
 *
 * Nothing here knows a model: a loader (models/engine.h) makes one, engines take steps.
 *
 * Life of a call: the binding makes an mp_call and submits it -> the entry is pinned, the call checked against the
 * model (loading it first if need be), queued or refused -> a worker admits, plans, leases cores, steps -> the ticket
 * gets its one terminal state, waiters are woken -> the caller reads the call's result and lets go.
 *
 * Threads: every function may be called from any thread, without the GIL. */
#ifndef MP_REGISTRY_REGISTRY_H
#define MP_REGISTRY_REGISTRY_H

#include "models/engine.h"
#include "registry/histogram.h"

typedef struct mp_registry mp_registry;
typedef struct mp_ticket mp_ticket;
typedef struct mp_notifier mp_notifier;

#define MP_FOREVER UINT64_MAX
enum { MP_PATIENCE_SCALE = 10 };

typedef enum mp_policy { /* which worker of a model takes a call */
    MP_POLICY_DEFAULT,
    MP_POLICY_SHARED,     /* whoever has no work, then whoever comes round first */
    MP_POLICY_PACK,       /* the first that has room, so that one pass over the weights serves many */
    MP_POLICY_P2C,        /* the less loaded of two at random; one without work takes from the others */
    MP_POLICY_SEQUENTIAL, /* one without work, which takes nothing beside it */
    MP_POLICY_COUNT
} mp_policy;
bool mp_policy_from_name(const char *name, mp_policy *policy); /* "shared", ... */
const char *mp_policy_name(mp_policy policy);

enum { MP_LANE_INTERACTIVE, MP_LANE_BULK, MP_LANE_COUNT }; /* kinds of calls; queues are bounded for each */

typedef struct mp_chaos_rule { /* chances, 0 to 1, together at most 1; all 0 = off. See chaos.h */
    uint64_t seed;
    double fail, stall, die, slow, memory; /* of each step that a worker takes */
} mp_chaos_rule;

typedef struct mp_registry_config { /* 0 = default */
    /* Lanes and bytes are the process's, shared by all registries that leave these at 0. A registry that names a number
     * keeps a ledger of its own, which the others do not see. */
    int lanes;               /* compute threads in all; default: MPOOL_THREADS, or the CPUs this process may use */
    uint64_t memory_limit;   /* bytes; default: governor's rule */
    uint64_t step_budget_ns; /* default: MPOOL_STEP_BUDGET_MS */
    uint64_t spin_ns;        /* how long a worker or a caller spins before it parks; default: MPOOL_SPIN_US; 1 = not */
    uint64_t shutdown_grace_ns;    /* default 5 s */
    uint64_t load_timeout_ns;      /* default 30 s since the last sign of progress */
    uint64_t load_ceiling_ns;      /* default 10 min in all */
    uint64_t stall_timeout_ns;     /* a step without a sign of life for so long: the worker is dead; default 30 s */
    uint64_t patience_ns;          /* of calls that name none (mp_submit_options); default: no limit */
    uint64_t keep_alive_ns;        /* of workers without work; default 5 min; MP_FOREVER */
    uint64_t maintenance_every_ns; /* default 60 s */
    uint64_t batch_wait_ns;        /* a worker without work waits so long for more calls; default: not at all */
    int max_workers;               /* a model; default 4 */
    mp_policy policy[MP_CAPABILITY_COUNT];                    /* default: capabilities.def */
    int queue_capacity[MP_CAPABILITY_COUNT][MP_LANE_COUNT];   /* calls waiting a model; default: capabilities.def */
    int breaker_threshold; /* faults within the window that open a model's breaker; default 5; -1 = it never opens */
    uint64_t breaker_window_ns, breaker_rest_ns; /* default 60 s, 60 s */
    mp_chaos_rule chaos;
    /* The patience of calls that name none grows with what waits before them: three times the predicted wait, but at
     * least patience_ns and at most MP_PATIENCE_SCALE times that. */
    bool scale_timeout;
    bool predictive_scaling; /* start workers ahead of need (forecast.h) */
} mp_registry_config;

mp_status mp_registry_create(const mp_registry_config *config, mp_registry **registry, mp_error *error);
/* Unlike that of any other registry of the process; what events.h calls it by. */
uint64_t mp_registry_number(const mp_registry *registry);
/* Have the thread that looks after deadlines, idle workers and memory run from now on; it starts by itself with the
 * first load. Idempotent. */
void mp_registry_maintain(mp_registry *registry);
/* Refuse new calls from now on (SHUTTING_DOWN). Idempotent. */
void mp_registry_begin_shutdown(mp_registry *registry);
/* begin_shutdown, drain for the grace (0 here: not at all), end the rest, join every thread. Every ticket gets its
 * terminal state: SHUTTING_DOWN for those that were cut off. Idempotent, from several threads too: all return when it
 * is done. The registry stays valid and refuses everything. */
void mp_registry_close(mp_registry *registry, uint64_t grace_ns);
/* close with the configured grace, then free. Tickets may outlive it. NULL is legal. */
void mp_registry_destroy(mp_registry *registry);
/* fork: a child finds the same entries, models that were loaded still loaded over the same mappings, and no threads:
 * first use starts new ones. Calls that were in flight in the parent are CANCELLED in the child. It happens by itself
 * in every fork of the process. */

/* ---- entries ----------------------------------------------------------------------------------------------------- */

/* Takes the loader, also on failure. A key that exists is INVALID_ARGUMENT unless replace: then, if the old model is in
 * use, the new one is loaded beside it and gets the new calls once that succeeded, while the old one drains; if loading
 * fails the old one stays (mp_registry_load says why). Returns at once. */
mp_status mp_registry_add(mp_registry *registry, const char *key, const mp_loader *loader, bool replace,
                          mp_error *error);
/* Refuse new calls to the key, let the running ones finish, free everything. UNKNOWN_MODEL. Returns when gone from
 * memory or at the deadline (TIMEOUT; it goes on in the background; called again, it waits on). */
mp_status mp_registry_remove(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error);
/* Wait on for one that remove has taken from its key, whoever has the key by now. MP_OK when it is gone. */
mp_status mp_registry_wait_removed(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error);
/* Load now, wait until a worker is ready; single flight; ignores the backoff of an earlier failure. pin: never evicted
 * by the registry itself. Of a key that is being replaced: waits for the replacement. TIMEOUT: it goes on in the
 * background. */
mp_status mp_registry_load(mp_registry *registry, const char *key, bool pin, uint64_t deadline_ns, mp_error *error);
/* Free the model but keep the key, pinned or not. Waits for running calls until the deadline (TIMEOUT; it goes on in
 * the background). Calls that wait in the queue load it again. */
mp_status mp_registry_evict(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error);

/* Workers of the model that have had no work for so long are given up, and with the last of them the model. */
mp_status mp_registry_keep_alive(mp_registry *registry, const char *key, uint64_t keep_alive_ns, mp_error *error);

enum { MP_WORKERS_MAX = 16 };
typedef struct mp_worker_info {
    uint32_t id;
    int node;          /* of the machine's memory nodes, the one that it is on; -1: there is one */
    const char *state; /* "spawning", "loading", "ready", "processing", "idle", "evicting", "dead", "failed" */
    int running;
    uint64_t served, busy_ns, idle_ns; /* calls ended; time in steps; without work since */
    uint64_t engine_bytes, predicted_bytes; /* that its engine holds, as of its last step; that were foreseen for it */
    int process; /* its id, of a worker that has one of its own; else 0 */
} mp_worker_info;

typedef struct mp_entry_info {
    char key[256];
    mp_capability capability;
    const char *state; /* "cold", "loading", "ready", "busy", "evicting", "failed" */
    const char *breaker; /* "closed", "open", "half-open" */
    mp_policy policy;
    int workers, busy, dead, queued, running; /* workers: that serve; dead: set apart, their threads not back yet */
    int waiting[MP_LANE_COUNT], capacity[MP_LANE_COUNT]; /* of the queue, by kind of call */
    double arrivals; /* calls a second; 0 = unknown, or nothing is predicted */
    int foreseen;    /* workers that they need; likewise */
    bool pinned;
    uint64_t model_bytes, engine_bytes, calls, errors, idle_ns, keep_alive_ns;
    uint64_t predicted_bytes; /* that were foreseen for the model before it was loaded */
    mp_worker_info worker[MP_WORKERS_MAX];
    int worker_count;
    mp_histogram latency; /* of calls that were answered, from submit to end */
    uint64_t units_in, units_out; /* tokens and images that they read and wrote */
    mp_status last_error; /* of the last call that was not answered; MP_OK = there was none */
    const mp_model *model; /* pinned while the visitor runs, or NULL */
} mp_entry_info;
/* Visits a snapshot of the entries in order of key. */
void mp_registry_visit(mp_registry *registry, void (*visit)(void *arg, const mp_entry_info *info), void *arg);

typedef struct mp_registry_stats {
    uint64_t memory_limit, memory_used, bytes_by_tag[MP_TAG_COUNT];
    int lanes, lanes_leased;
    const char *pressure; /* "low", "normal", "high", "critical" */
#define MP_METRIC(name, meaning) uint64_t name;
#include "registry/metrics.def"
#undef MP_METRIC
    uint64_t threads_created, threads_joined; /* of the process */
} mp_registry_stats;
void mp_registry_get_stats(mp_registry *registry, mp_registry_stats *stats);

/* ---- calls ------------------------------------------------------------------------------------------------------- */

typedef struct mp_submit_options {
    uint64_t deadline_ns; /* absolute, monotonic; 0 = none */
    uint64_t patience_ns; /* without a result, a step or a piece of result for so long: TIMEOUT; 0 = the registry's */
    uint64_t keep_alive_ns; /* the model's from now on; 0 = as it is */
    uint8_t priority;       /* 0 = critical, high, normal, low, 4 = batch */
    uint8_t lane;           /* MP_LANE_INTERACTIVE or MP_LANE_BULK */
    mp_policy policy;       /* default: the model's */
    uint32_t tenant;        /* callers that share a fair share; 0 = those that name none */
    bool fail_fast; /* a full queue is OVERLOADED at once; else submit waits until the deadline */
    bool uncounted; /* whoever finds the queue full comes again: no metric counts that it was OVERLOADED */
    bool (*give_up)(
        void *arg); /* asked every 50 ms while submit waits for room, no lock held; true ends it: CANCELLED */
    void *give_up_arg;
} mp_submit_options;

/* Takes the call in every case (also on failure). Returns as soon as it is queued: a cold model is loaded by its first
 * worker's thread, and a load that fails ends the ticket with its cause. SEND: the model was removed while the call
 * waited for room in its queue. */
mp_status mp_registry_submit(mp_registry *registry, const char *key, mp_call *call, const mp_submit_options *options,
                             mp_ticket **ticket, mp_error *error);

/* The caller's reference. When the last caller lets go of a ticket that is not done, it is cancelled. NULL is legal. */
void mp_ticket_release(mp_ticket *ticket);
mp_ticket *mp_ticket_pin(mp_ticket *ticket); /* a further caller's reference */
/* Wait until done or progress exceeds `seen`, or the deadline. Returns false at the deadline. *progress receives a
 * counter that rises with every published piece of result; it is UINT64_MAX once done. */
bool mp_ticket_wait(mp_ticket *ticket, uint64_t seen, uint64_t deadline_ns, uint64_t *progress);
bool mp_ticket_done(mp_ticket *ticket);
/* The terminal status; the error of a failed one is copied out. Asserts done. */
mp_status mp_ticket_status(mp_ticket *ticket, mp_error *error);
/* Ask to stop: queued at once, running within a layer or a token. Never blocks. The ticket still gets its terminal
 * state. */
void mp_ticket_cancel(mp_ticket *ticket);
/* Something that its engine may wait for was written into the call: a mask. Never blocks. */
void mp_ticket_wake(mp_ticket *ticket);
/* The call with its result; valid while the reference is held. */
mp_call *mp_ticket_call(mp_ticket *ticket);
/* Times of the monotonic clock, 0 = not yet: submitted, first step started, terminal. */
void mp_ticket_times(mp_ticket *ticket, uint64_t *submitted_ns, uint64_t *started_ns, uint64_t *finished_ns);
/* Calls ahead in the queue, -1 once running or done. *eta_ns (NULL allowed): predicted time until it is done; 0 =
 * unknown. */
int mp_ticket_position(mp_ticket *ticket, uint64_t *eta_ns);

/* ---- asyncio: one notifier an event loop
 * --------------------------------------------------------------------------- */

/* An eventfd and a list. A ticket bound to it adds `id` to the list when it is done or has new progress (coalesced:
 * once until taken) and makes the fd readable. */
mp_status mp_notifier_create(mp_notifier **notifier, mp_error *error);
/* Closes the fd; the tickets still bound to it keep the rest alive and tell nobody. */
void mp_notifier_destroy(mp_notifier *notifier);
int mp_notifier_fd(const mp_notifier *notifier);
/* Move up to `capacity` ids out; clears the fd when the list is empty. */
int mp_notifier_take(mp_notifier *notifier, uint64_t *ids, int capacity);
/* Before or after completion: one that is done already is listed at once. A ticket may be bound to several notifiers
 * and tells all of them; to each under one id, the last. Returns false, and binds nothing, when memory is refused,
 * which the first notifier of a ticket needs none of. */
bool mp_ticket_bind(mp_ticket *ticket, mp_notifier *notifier, uint64_t id);

#endif
