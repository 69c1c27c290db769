/* sim_state.h: what the files of the registry's worlds share (sim_world.c, sim_callers.c). */
#ifndef TESTS_SIM_STATE_H
#define TESTS_SIM_STATE_H

#include "registry/registry.h"
#include "sim_fake.h"
#include "sim_world.h"

enum { CALLERS = 6, KEYS = 5, MINE = 4, RECORDS = 64 };

typedef struct record { /* a call that was accepted */
    mp_ticket *ticket;
    sim_call *call;
    uint64_t began_ns, deadline_ns, patience_ns;
    bool cancelled, endless; /* endless: it takes longer than anybody wants to wait */
    bool past;               /* its deadline is over before it is submitted */
} record;

/* What a world does besides what all do; any may be NULL. */
typedef struct sim_special {
    void (*tune)(mp_registry_config *config);
    void (*script)(sim_model *model);
    void (*begin)(void);                                 /* the keys are there, the callers are not */
    void (*call)(record *r, mp_submit_options *options); /* before it is submitted */
    void (*submitted)(record *r);                        /* and it was accepted */
    void (*rest)(void);                                  /* while all wait */
    void (*finish)(void);                                /* the callers have ended, the registry is open */
} sim_special;
extern const sim_special sim_cold, sim_evictions, sim_reclaim, sim_deadlines, sim_flapping, sim_crashes, sim_balance,
    sim_jumps, sim_cut, sim_chaos, sim_ahead, sim_masks, sim_lost;

typedef struct caller {
    int number, fibre;
    /* what it waits for now, for the look at rest */
    mp_ticket *awaited;
    uint64_t seen;
    const char *loading, *submitting;
    mp_notifier *notifier;
    uint64_t bound, notified; /* ids given out, a bit each; and those that came */
    mp_ticket *expected;      /* it sleeps until its notifier lists this one ... */
    uint64_t expected_id;     /* ... as this id */
} caller;

typedef struct sim_scene {
    const sim_world *kind;
    mp_registry *registry;
    caller callers[CALLERS];
    int caller_count, key_count, capacity, closers;
    sim_model *models[KEYS];
    record kept[RECORDS]; /* looked at again after the end */
    int kept_count;
    mp_ticket *offered; /* one caller's reference for another */
    record offered_record;
    /* what happened, and so explains how a call may end */
    bool shutting_down, swapped, removed, refused_memory, refused_threads, load_fails, stalls, tight, files_change;
    bool numeric, crashes, plain, jumped; /* plain: callers only call, and wait */
    int safe;                             /* so many keys, the first ones, are never evicted */
    uint64_t steps;
} sim_scene;
extern sim_scene w;

extern const char *const sim_keys[KEYS];

static inline int of(int n) { return (int)sim_below((uint64_t)n); }
static inline bool percent(int n) { return of(100) < n; }

/* A cancelled call, or one that has expired, is over within this; only where the clock waits for those who can run. */
static const uint64_t SIM_PROMPT_NS = 100ull * 1000 * 1000;

/* sim_callers.c */
void sim_caller_main(void *caller);
void sim_take_notices(caller *self);
void sim_add(const char *key, bool replace, record *r); /* a model, with a script that is drawn */
void sim_check_status(mp_status status, const mp_error *error, const record *r, const char *what);
void sim_check_end(const record *r); /* of one that is done */

#endif
