/* sim_fake.h: fake models for the simulator; all costs are virtual time. The fakes check the promises of the registry
 * to loaders and engines, and count the objects that exist. */
#ifndef TESTS_SIM_FAKE_H
#define TESTS_SIM_FAKE_H

#include "registry/registry.h"
#include "sim.h"

enum { SIM_FAKES = 48, SIM_BUDGET_NS = 25 * 1000 * 1000 }; /* SIM_BUDGET_NS: the step budget of all worlds */

typedef struct sim_model { /* the model of one loader */
    /* script */
    uint64_t load_ns, step_ns, stall_ns; /* stall_ns: time of a load without progress or polls */
    int load_failures;                   /* number of further loads that fail with MP_IO */
    int engine_failures;                 /* number of further engines that fail with MP_MODEL */
    uint32_t step_units;                 /* units per item and step; 0 = all */
    int plan_items;                      /* items per step; 0 = all */
    int memory;                          /* limit of the memory of all items in an engine; 0 = no limit */
    int threads;                         /* compute threads requested per step */
    uint64_t model_bytes, engine_bytes;
    uint64_t cache_bytes; /* each step adds up to this many bytes to the engine's caches, which trim frees */
    bool states;          /* engines have real cache parts with states (sim_states.h) */
    bool unhealthy;
    int slices;      /* slices of optional work that are left; each step adds some */
    int stuck_steps; /* number of further steps that stall for stuck_ns without polls */
    uint64_t stuck_ns;
    bool uneven; /* each step takes no time with probability 1/2 */
    int loses;   /* if engines are processes: percentage of calls of an engine that kill its process */
    int kills;   /* number of further kills: the backoff after each makes a run longer */
    int loading, models, engines, loaders; /* numbers of objects that exist now */
    int loads, steps, preempted;           /* numbers of events so far */
    uint64_t failed_ns; /* time of the last failed load */
    int crashes;
    uint64_t crash_ns[8]; /* ring buffer: times of steps that failed with INTERNAL */
} sim_model;

typedef struct sim_call {
    mp_request base;
    uint32_t units, done;
    int memory, memory_a_step; /* memory from admission to retirement, and growth per step */
    uint64_t outputs;          /* bytes of its outputs, which check() makes */
    bool bad_argument, refused, numeric, keeps_state;
    int admitted;            /* 1 while an engine has admitted it */
    bool alone;              /* no other item may be in the engine at the same time */
    int internal;            /* number of further steps that fail with INTERNAL, from unit internal_from on */
    uint32_t internal_from;  /* see `internal` */
    bool innocent;           /* never causes a failure; requests that may cause one have other fingerprints */
    bool streams;            /* the caller sees each unit as soon as it is computed */
    bool failed_late;        /* the request failed after the caller saw a unit */
    bool spoils;             /* fails with INTEGRITY instead of INTERNAL, and the engine survives */
    uint32_t shown;          /* units computed so far; a request that can continue must not lose them */
    int lost_worker;         /* how often its engine was lost before a step with it */
    bool killed_worker;      /* one of `lost_worker` was killed by another program */
    bool moved;              /* its engine was lost or failed, and no engine has admitted it since */
    uint64_t deadline_ns;    /* the deadline that the engine's item must have */
    int saved;               /* 1 while it is preempted and its state is kept */
    bool spared;             /* it survived an external kill, so one more failure is allowed */
    int finished, failed;    /* how often an engine completed it, and how often it failed */
    bool destroyed_is_error; /* the caller still uses the request */
    uint64_t unwanted_ns;    /* time of its cancellation or release; 0 = neither */
    bool taken_back;         /* mp_ticket_cancel returned true */
    bool cancelled_inside;   /* it was cancelled during a call of its engine */
    bool masked;             /* each unit needs a grammar mask ... */
    uint32_t masks;          /* ... and this many masks were provided */
    bool waits;              /* set by the engine: the next unit waits for a mask */
    const bool *parked;      /* *parked: the last plan of its engine was empty */
    int tenant;              /* number from 1 on, in worlds that compare tenants */
} sim_call;

typedef struct sim_step { /* a step, or a slice of optional work */
    struct sim_step *next;
    const struct mp_worker *worker;
} sim_step;

typedef struct sim_fakes {
    sim_model models[SIM_FAKES];
    int count, calls; /* used entries of models; requests that exist */
    int threads;
    sim_step *steps; /* those that compute now */
    int improving; /* engines in a slice of optional work */
    bool on_time;        /* the clock never moves past a deadline while a fibre can run */
    bool no_late;        /* as on_time, except for jumps (jumped_ns) */
    uint64_t jumped_ns;  /* time of the last jump */
    uint64_t paused_ns;  /* sum of all jumps: the limits of requests move by as much */
    uint64_t backoff_ns; /* minimum time between a failed load and its retry; 0 = none */
    bool whole;          /* a fault in a step fails all its requests */
    int crashes_most;    /* not 0: a model must not fail 9 times within 50 s */
    int cancels;         /* percentage of calls of an engine during which the request is cancelled */
    bool alone;          /* no other work wants CPUs: a step gets all the threads that it asks for */
    bool processes;      /* engines are processes: they may be lost, and a fault ends them */
    void (*ended)(const sim_call *call); /* called when a request is completed, or NULL */
    int again, given_way; /* again: admissions after an engine loss or fault; given_way: preemptions without one */
} sim_fakes;
extern sim_fakes fakes;

void sim_fakes_begin(int threads);
sim_model *sim_fakes_model(void); /* creates a model with the simplest script */
mp_loader sim_fakes_loader(sim_model *model);
sim_call *sim_fakes_call(uint32_t units); /* NULL: no memory */
void sim_fakes_end(void);                 /* checks that everything was freed */

#endif
