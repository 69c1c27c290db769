/* sim_fake.h: models for the simulator that only pretend: all costs are virtual time. They check what the registry
 * promises to loaders and engines, and count what is made and freed. */
#ifndef TESTS_SIM_FAKE_H
#define TESTS_SIM_FAKE_H

#include "registry/registry.h"
#include "sim.h"

enum { SIM_FAKES = 48 };

typedef struct sim_model { /* what one loader loads */
    /* script */
    uint64_t load_ns, step_ns, stall_ns; /* stall: without a sign of progress, not to be called off */
    int load_failures;                   /* the next so many loads fail with IO */
    int engine_failures;                 /* the next so many engines fail with MODEL */
    uint32_t step_units;                 /* units an item gets in a step; 0 = all of it */
    int plan_items;                      /* items in a step; 0 = all */
    int memory;                          /* what the admitted items of an engine may hold together; 0 = no limit */
    int lanes;                           /* wanted a step */
    uint64_t model_bytes, engine_bytes;
    bool unhealthy;
    int stuck_steps; /* the next so many steps stand still for stuck_ns and look at nothing */
    uint64_t stuck_ns;
    bool uneven; /* every other step takes no time */
    int loses;   /* percent of what is asked of an engine that is a process during which somebody kills it */
    /* counts: what exists */
    int loading, models, engines, loaders;
    int loads, steps, preempted;
    uint64_t failed_ns; /* when a load failed last */
    int crashes;
    uint64_t crash_ns[8]; /* when steps failed with INTERNAL, a ring */
} sim_model;

typedef struct sim_call {
    mp_call base;
    uint32_t units, done;
    int memory, memory_a_step; /* held from admission to retirement; more after each step */
    bool bad_argument, refused, numeric, keeps_state;
    int admitted;            /* by an engine now: 0 or 1 */
    bool alone;              /* no other may be in the engine beside it */
    int internal;            /* the next so many steps of it fail with INTERNAL, once it has done */
    uint32_t internal_from;  /* so many units */
    bool innocent;           /* never the cause of a failure, and unlike all that may be */
    bool streams;            /* its caller sees each unit as it is done */
    bool failed_late;        /* after one of them */
    bool spoils;             /* INTEGRITY instead of INTERNAL, and the engine goes on */
    uint32_t shown;          /* units of one that goes on which its caller may have seen */
    int adrift;              /* times that its engine was lost before a step that it was to be in */
    bool moved;              /* its engine was lost or failed, and it is not admitted again yet */
    uint64_t deadline_ns;    /* that the engine is to be told */
    int saved;               /* states that a preemption has left */
    bool spared;             /* it failed as its engine was ended from outside, and can go on: over and above once */
    int finished, failed;    /* times an engine completed it, or made it fail */
    bool destroyed_is_error; /* the caller still reads it */
    uint64_t unwanted_ns;    /* when it was cancelled or let go of; 0 = it was not */
    bool masked;             /* each unit needs a mask ... */
    uint32_t masks;          /* ... and for so many they are there */
    bool waits;              /* a unit was computed before its mask came */
    const bool *parked;      /* its worker has nothing to do */
} sim_call;

typedef struct sim_fakes {
    sim_model models[SIM_FAKES];
    int count, calls; /* calls that exist */
    int lanes, lanes_in_steps;
    bool on_time;        /* the clock of this world never runs ahead of those who could run ... */
    bool no_late;        /* ... except when it jumps */
    uint64_t jumped_ns;  /* when it did last */
    uint64_t backoff_ns; /* a load that failed is not tried again before; 0 = it may be */
    bool whole;          /* a step with a call that breaks an engine down fails for all its calls */
    int crashes_most;    /* of a model within 50 s; 0 = any number */
    bool processes;      /* an engine may be lost; a call that breaks it down takes it along */
    int again, given_way; /* admissions after that; preemptions for other reasons */
} sim_fakes;
extern sim_fakes fakes;

void sim_fakes_begin(int lanes);
sim_model *sim_fakes_model(void); /* a new one, with the simplest script */
mp_loader sim_fakes_loader(sim_model *model);
sim_call *sim_fakes_call(uint32_t units); /* NULL: refused */
void sim_fakes_end(void);                 /* everything is gone again */

#endif
