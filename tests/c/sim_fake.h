/* sim_fake.h: fake models for the simulator; all costs are virtual time. They check the promises of the registry to
 * loaders and engines, and count what is created and freed. */
#ifndef TESTS_SIM_FAKE_H
#define TESTS_SIM_FAKE_H

#include "registry/registry.h"
#include "sim.h"

enum { SIM_FAKES = 48 };

typedef struct sim_model { /* the model of one loader */
    /* script */
    uint64_t load_ns, step_ns, stall_ns; /* stall_ns: without progress and not cancellable */
    int load_failures;                   /* this many more loads fail with IO */
    int engine_failures;                 /* this many more engines fail with MODEL */
    uint32_t step_units;                 /* units per item and step; 0 = all */
    int plan_items;                      /* items per step; 0 = all */
    int memory;                          /* sum that the admitted items of an engine may hold; 0 = no limit */
    int threads;                         /* wanted per step */
    uint64_t model_bytes, engine_bytes;
    bool unhealthy;
    int stuck_steps; /* this many more steps stand still for stuck_ns and check nothing */
    uint64_t stuck_ns;
    bool uneven; /* every other step takes no time */
    int loses;   /* for engines that are processes: percentage of calls during which the process is killed */
    /* counts of existing objects */
    int loading, models, engines, loaders;
    int loads, steps, preempted;
    uint64_t failed_ns; /* time of the last failed load */
    int crashes;
    uint64_t crash_ns[8]; /* ring buffer: times of steps that failed with INTERNAL */
} sim_model;

typedef struct sim_call {
    mp_request base;
    uint32_t units, done;
    int memory, memory_a_step; /* held from admission to retirement; more after each step */
    bool bad_argument, refused, numeric, keeps_state;
    int admitted;            /* 1 while an engine has admitted it */
    bool alone;              /* no other item may be in the engine at the same time */
    int internal;            /* this many more of its steps fail with INTERNAL, after internal_from units */
    uint32_t internal_from;  /* see `internal` */
    bool innocent;           /* never causes a failure; its fingerprint differs from every request that may */
    bool streams;            /* its caller sees each unit at once */
    bool failed_late;        /* it failed after the caller saw a unit */
    bool spoils;             /* fails with INTEGRITY instead of INTERNAL, and the engine survives */
    uint32_t shown;          /* units that the caller may have seen, of a request that can continue */
    int lost_worker;         /* how often its engine was lost before a step with it */
    bool moved;              /* its engine was lost or failed, and it was not admitted again yet */
    uint64_t deadline_ns;    /* the deadline that the engine must be told */
    int saved;               /* states kept by a preemption */
    bool spared;             /* it failed from an external kill and can continue: one failure more is allowed */
    int finished, failed;    /* how often an engine completed it, or made it fail */
    bool destroyed_is_error; /* the caller still reads it */
    uint64_t unwanted_ns;    /* when it was cancelled or released; 0 = it was not */
    bool masked;             /* each unit needs a grammar mask ... */
    uint32_t masks;          /* ... and the caller has provided this many */
    bool waits;              /* a unit was computed before its mask was there */
    const bool *parked;      /* its worker has nothing to do */
} sim_call;

typedef struct sim_fakes {
    sim_model models[SIM_FAKES];
    int count, calls; /* requests that exist */
    int threads, threads_in_steps;
    bool on_time;        /* the clock never moves past a deadline while a fibre can run */
    bool no_late;        /* the same, except for jumps */
    uint64_t jumped_ns;  /* time of the last jump */
    uint64_t backoff_ns; /* minimum time between a failed load and its retry; 0 = none */
    bool whole;          /* a fault in a step fails all its requests */
    int crashes_most;    /* per model within 50 s; 0 = no limit */
    bool processes;      /* an engine may be lost; a fault also ends the process */
    int again, given_way; /* admissions after a lost engine; preemptions for other reasons */
} sim_fakes;
extern sim_fakes fakes;

void sim_fakes_begin(int threads);
sim_model *sim_fakes_model(void); /* creates a model with the simplest script */
mp_loader sim_fakes_loader(sim_model *model);
sim_call *sim_fakes_call(uint32_t units); /* NULL: refused */
void sim_fakes_end(void);                 /* checks that everything was freed */

#endif
