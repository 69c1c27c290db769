/* test_registry_fake.h: models that only pretend, for tests of the registry: scripted costs, failures and waits.
 *
 * A call asks for `units` of work; a step does some of them for each planned item and sleeps for as long as it would
 * have computed. The fake checks what the registry promises to engines (one thread at a time, no more lanes in steps
 * than the ledger has, admit before plan, retire once) and counts everything that is made and freed. */
#ifndef TEST_REGISTRY_FAKE_H
#define TEST_REGISTRY_FAKE_H

#include <stdatomic.h>

#include "registry/registry.h"

typedef struct fake { /* one a key; must outlive the registry */
    /* script; may be changed between calls */
    _Atomic uint64_t load_ns;    /* how long a load takes */
    _Atomic int load_failures;   /* the next so many loads fail with IO */
    _Atomic bool load_stalls;    /* no sign of progress, and nobody can call it off */
    _Atomic uint64_t step_ns;    /* how long a step takes */
    _Atomic uint32_t step_units; /* units an item gets in a step; 0 = all of it */
    _Atomic int plan_items;      /* items in a step; 0 = all */
    _Atomic int memory;          /* what all admitted items may hold together; 0 = no limit */
    _Atomic bool unhealthy;
    uint64_t model_bytes, engine_bytes; /* really charged to the budget */
    _Atomic uint64_t held_bytes;        /* what engines say that they hold; 0 = engine_bytes; trim halves it */
    int lanes;                          /* wanted a step; 0 = 1 */
    int lane_limit;                     /* of the ledger; 0 = unchecked */
    int process;                        /* that engines stand for; 0 = none */
    int workers;                        /* that a model may have; 0 = 1 */
    mp_capability capability;           /* default text_embedding */
    int version;                        /* written into results */
    /* counts */
    _Atomic int loads, models, engines, loaders; /* loads begun; models, engines, loaders that exist */
    _Atomic int steps, admitted, preempted, trims, checks;
    _Atomic int in_steps; /* threads in a step */
    _Atomic int in_bytes; /* threads that ask how large the model is */
    _Atomic bool bytes_hold;  /* and are told when this is cleared */
    _Atomic bool step_stalls; /* a step does not end, shows no sign of life, and nobody can call it off */
    _Atomic bool hold;  /* steps do not end while set */
    bool whole;         /* a step with a call that faults fails for all its calls, as when a process dies */
    bool outside;       /* and somebody else's doing it is */
} fake;

/* Lanes that are in steps of all fakes together. */
extern _Atomic int fake_lanes_in_steps;

typedef struct fake_call {
    mp_call base;
    uint32_t units;
    int memory;        /* held from admission to retirement */
    int memory_a_step; /* more after each step */
    bool bad_argument; /* check refuses it */
    bool refused;      /* admit refuses it for good */
    bool numeric;      /* fails as NaN in its steps */
    bool loses_at_admit, loses_at_plan; /* the engine is lost there */
    _Atomic int faults; /* its next so many steps fail with `fault`, once it has done */
    uint32_t fault_from; /* so many units */
    mp_status fault;
    bool streams; /* its caller sees each unit as it is done */
    _Atomic uint32_t masks; /* it needs one for each unit, and for so many they are there; 0 = it needs none */
    bool waits;             /* the engine's: a unit was computed before its mask came */
    uint64_t fingerprint;
    _Atomic uint32_t done;
    _Atomic int finished;      /* times the engine completed it */
    _Atomic int version;       /* of the fake that did */
    _Atomic int finished_step; /* how many steps of the fake were before the one that did */
    _Atomic int starts;        /* times it was admitted */
} fake_call;

void fake_init(fake *fake);
mp_loader fake_loader(fake *fake);
fake_call *fake_call_create(uint32_t units);
/* Calls that exist. */
extern _Atomic int fake_calls;

/* A registry as configured, with defaults of tests: 1 GB, no spinning, places for 4 calls. */
mp_registry *fake_registry_of(mp_registry_config config);
/* A registry with `lanes` lanes and `memory` bytes (0 = 1 GB) that does not spin and has one worker a model. */
mp_registry *fake_registry(int lanes, uint64_t memory);
/* Submit a call with this many units; the ticket, or NULL with *status. Fails the test on other trouble when status is
 * NULL. */
mp_ticket *fake_submit(mp_registry *registry, const char *key, fake_call *call, mp_status *status);
/* Wait for 10 s at most; the terminal status. */
mp_status fake_wait(mp_ticket *ticket, mp_error *error);
mp_status fake_finish(mp_ticket *ticket); /* wait, and release */
/* Register a fake, and check that it is accepted. */
void fake_add(mp_registry *registry, const char *key, fake *fake, bool replace);
/* Callers that each submit one call of one unit and wait. */
enum { HERD = 24 };
typedef struct herd {
    mp_registry *registry;
    const char *key;
    _Atomic int ok, io, other; /* how they ended */
} herd;
void fake_herd_member(void *herd);
void fake_run_herd(herd *herd); /* HERD of them at once */
/* Wait until *value >= least; fails the test after 10 s. */
void fake_until(_Atomic int *value, int least);
/* Wait until every call has been freed, by callers and workers. */
void fake_until_no_calls(void);
uint64_t fake_in_ms(uint64_t ms);                                            /* deadline */
void fake_info(mp_registry *registry, const char *key, mp_entry_info *info); /* state "" when there is none */
void fake_until_state(mp_registry *registry, const char *key, const char *state);
/* Destroy, and check that everything that was made is gone again. */
void fake_destroy(mp_registry *registry);
void fake_end(mp_registry *registry); /* and that no call is left */

#define FAKE_MS(n) ((uint64_t)(n)*1000 * 1000)

#endif
