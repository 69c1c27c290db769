/* sim_state.h: declarations shared by the worlds of a whole registry (sim_world.c, sim_callers.c). */
#ifndef TESTS_SIM_STATE_H
#define TESTS_SIM_STATE_H

#include "registry/registry.h"
#include "sim_fake.h"
#include "sim_world.h"

enum { CALLERS = 6, KEYS = 5, MINE = 4, RECORDS = 64 };

typedef struct record { /* an operation of a caller, usually a request, and the facts that explain its status */
    mp_ticket *ticket;
    sim_call *call;
    uint64_t began_ns, deadline_ns, patience_ns;
    bool hurried; /* it does not wait for a load that is stuck */
    bool cancelled, endless; /* endless: too long for any caller to wait for its end */
    bool ample;              /* only a pause of the process could exceed its limits */
    bool past;               /* its deadline passes before it is submitted */
} record;

/* Hooks that a world adds to what all worlds do. Each may be NULL. */
typedef struct sim_special {
    void (*tune)(mp_registry_config *config);
    void (*script)(sim_model *model);
    void (*begin)(void);                                 /* after the models were added, before callers start */
    void (*call)(record *r, mp_submit_options *options); /* before a request is submitted */
    void (*submitted)(record *r);                        /* after it was accepted */
    void (*ended)(const record *r);                      /* after the end of a request was checked */
    void (*rest)(void);                                  /* while all threads wait */
    void (*finish)(void);                                /* after the callers ended, before the registry closes */
} sim_special;
extern const sim_special sim_cold, sim_evictions, sim_reclaim, sim_deadlines, sim_flapping, sim_crashes, sim_balance,
    sim_jumps, sim_cut, sim_chaos, sim_ahead, sim_masks, sim_lost,
    sim_tenants, sim_kills, sim_thrash, sim_replaced, sim_forks, sim_cancels, sim_batches;

typedef struct caller {
    int number, fibre;
    /* the ticket or operation that the caller waits for; read by check_at_rest */
    mp_ticket *awaited;
    uint64_t seen;
    const char *loading, *submitting;
    mp_notifier *notifier;
    uint64_t bound, notified; /* one bit per id: bound to a ticket; listed by the notifier */
    mp_ticket *expected;      /* the caller sleeps until its notifier lists this ticket ... */
    uint64_t expected_id;     /* ... as this id */
} caller;

typedef struct sim_scene {
    const sim_world *kind;
    mp_registry *registry;
    caller callers[CALLERS];
    int caller_count, key_count, capacity, closers;
    sim_model *models[KEYS];
    record kept[RECORDS]; /* checked again after the registry was closed */
    int kept_count;
    mp_ticket *offered; /* a pinned ticket that any caller may take */
    record offered_record;
    /* events in this run that explain the status of requests */
    bool shutting_down, swapped, removed, refused_memory, refused_threads, load_fails, stalls, tight, files_change;
    int jumps_before_close; /* sim_late_jumps() when the first close began */
    bool killed; /* another program kills worker processes */
    bool numeric, crashes, plain, jumped; /* plain: callers only send requests and wait */
    bool gathers;                         /* idle workers leave requests queued for some time (batch_wait_ns) */
    bool unpinned;                        /* callers pin no model */
    int safe;                             /* callers never evict the first `safe` keys */
    mp_policy policy; /* default of the models */
    uint64_t steps, stall_ns; /* stall_ns: the limit of steps without progress */
} sim_scene;
extern sim_scene w;

extern const char *const sim_keys[KEYS];

static inline int of(int n) { return (int)sim_below((uint64_t)n); }
static inline bool percent(int n) { return of(100) < n; }

/* A cancelled or expired request must end within this time, in worlds where the clock waits for fibres that can run. */
static const uint64_t SIM_PROMPT_NS = 100ull * 1000 * 1000;

/* sim_callers.c */
void sim_caller_main(void *caller);
void sim_take_notices(caller *self);
void sim_add(const char *key, bool replace, record *r); /* adds a model with a random script */
bool sim_loads_are_late(void); /* the clock jumped by so much that a load may have passed its limit without running */
void sim_check_status(mp_status status, const mp_error *error, const record *r, const char *what);
void sim_check_end(const record *r); /* `r` must have ended */
void sim_recount(mp_registry *registry); /* sim_recount.c; call only while all threads wait */
/* Visits the entries of the registry, again until the simulator grants the memory of the snapshot. */
void sim_visit(void (*visit)(void *arg, const mp_entry_info *info), void *arg);
/* sim_special.c: sends one request from the thread that runs the world, and waits for its end */
void sim_pause(uint64_t ns); /* the process does not run for this time */
mp_status sim_call_once(const char *key, mp_error *error);

#endif
