/* test_registry_fake.h: fake models for tests of the registry, with scripted costs, failures and waits.
 *
 * A request asks for `units` of work. A step does some of them for each planned item and sleeps for the time that
 * the computation would take. The fake checks the registry's promises to engines: one thread at a time, no more compute
 * threads in steps than the allocator has, admit before plan, retire once. It counts everything created and freed. */
#ifndef TEST_REGISTRY_FAKE_H
#define TEST_REGISTRY_FAKE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "base/sys.h"
#include "registry/governor.h"
#include "registry/registry.h"

typedef struct fake { /* one per key; must outlive the registry */
    /* script; may be changed between requests */
    _Atomic uint64_t load_ns;    /* how long a load takes */
    _Atomic int load_failures;   /* number of further loads that fail with MP_IO */
    _Atomic bool one_engine;     /* creating an engine beside another one fails with MP_IO */
    bool load_silent;            /* a load reports no progress at all */
    _Atomic bool load_stalls;    /* a load makes no progress and cannot be cancelled */
    _Atomic uint64_t step_ns;    /* duration of a step */
    _Atomic uint32_t step_units; /* units per item and step; 0 = all */
    _Atomic int plan_items;      /* items per step; 0 = all */
    _Atomic int memory;          /* limit of the memory of all admitted items; 0 = no limit */
    mp_guard *other_load;        /* not NULL: growth per step is charged, and this guard is released when that fails */
    _Atomic bool unhealthy;
    uint64_t model_bytes, engine_bytes; /* charged to the budget */
    _Atomic uint64_t held_bytes;        /* size that engines report, halved by trim; 0 = engine_bytes */
    int threads;                        /* compute threads requested per step; 0 = 1 */
    int thread_limit;                   /* compute threads of the allocator; 0 = unchecked */
    int process;                        /* id of the process that the engines simulate; 0 = none */
    int workers;                        /* maximum workers of the model; 0 = 1 */
    mp_capability capability;           /* default text_embedding */
    int version;                        /* written into results */
    /* counts */
    _Atomic int loads, models, engines, loaders; /* loads begun; models, engines, loaders that exist */
    _Atomic int load_threads;    /* compute threads of the last load */
    _Atomic int engines_refused; /* see `one_engine` */
    _Atomic int steps, admitted, preempted, trims, checks;
    _Atomic int in_steps; /* threads in a step */
    _Atomic int in_bytes; /* threads inside ops->bytes */
    _Atomic bool bytes_hold;  /* threads inside ops->bytes wait while this is set */
    _Atomic int in_leave;     /* see `leave_hold` */
    _Atomic bool leave_hold;  /* a worker that has retired a request waits before it takes further work or leaves */
    _Atomic int in_destroy;   /* threads that free an engine or a model */
    _Atomic bool destroy_hold; /* threads that free an engine or a model wait while this is set */
    _Atomic int slices;       /* number of slices of optional work that the engines have left */
    _Atomic int improved;     /* slices done */
    _Atomic int in_improve;   /* threads in such a slice */
    _Atomic bool improve_hold; /* threads in a slice wait while this is set */
    _Atomic int in_retire;    /* threads in retire */
    _Atomic bool retire_hold; /* threads in retire wait while this is set */
    _Atomic int retired;      /* requests retired */
    _Atomic bool step_stalls; /* a step does not end, makes no progress and cannot be cancelled */
    _Atomic bool hold;  /* steps do not end while this is set */
    _Atomic bool yields; /* a step that `hold` keeps ends once others wait (mp_lease_wanted) */
    _Atomic int alone;   /* number of plans for a worker that is alone (mp_plan.alone_threads) */
    bool whole;         /* a step with a faulty request fails for all its requests, as when a process dies */
    bool external_kill; /* another program killed the failing process */
    bool never_lost;    /* engines have no function `lost`: idle workers do not poll */
    mp_step_work work;  /* added to the engine's totals by each step */
} fake;

/* Number of compute threads that are in steps of any fake. */
extern _Atomic int fake_threads_in_steps;

typedef struct fake_call {
    mp_request base;
    uint32_t units;
    int memory;        /* held from admission to retirement */
    int memory_a_step; /* additional memory after each step */
    bool bad_argument; /* check() refuses the request */
    uint64_t outputs;  /* bytes of outputs, which check() adds to the request */
    bool refused;      /* admit() refuses the request, and no retry follows */
    bool numeric;      /* its first step fails with MP_NUMERIC */
    _Atomic int losses_at_admit, losses_at_plan; /* number of further engines that are lost in admit or plan */
    _Atomic int faults; /* number of further steps that fail with `fault`, from unit `fault_from` on */
    uint32_t fault_from; /* see `faults` */
    mp_status fault;
    bool streams; /* the caller sees each unit as soon as it is computed */
    _Atomic uint32_t masks; /* masks provided so far, one needed per unit; 0 = the request needs no masks */
    bool waits;             /* set by the engine: the next unit needs a mask that is not there yet */
    uint64_t fingerprint;
    _Atomic uint32_t done;
    _Atomic int finished;      /* how often an engine completed the request */
    _Atomic int version;       /* version of the fake that completed the request */
    _Atomic int finished_step; /* number of the fake's steps before the completing one */
    _Atomic int starts;        /* how often the request was admitted */
} fake_call;

void fake_init(fake *fake);
/* For a test that calls single functions of the registry from one thread: it need not hold their locks. */
void fake_hold_no_locks(void);
mp_loader fake_loader(fake *fake);
fake_call *fake_call_create(uint32_t units);
/* Creates a request of one unit whose next `times` steps fail with `fault`. */
fake_call *fake_call_faulty(mp_status fault, int times);
/* Number of requests that exist. */
extern _Atomic int fake_calls;

/* Creates a registry. Fields that are 0 get defaults of the tests: 1 GB, no spinning, room for 4 queued requests. */
mp_registry *fake_registry_of(mp_registry_config config);
/* Creates a registry with `threads` compute threads and `memory` bytes (0 = 1 GB), one worker per model and no
 * spinning. */
mp_registry *fake_registry(int threads, uint64_t memory);
/* The usual beginning of a test: initialises the fake, creates a registry with fake_registry(threads, 0), and adds the
 * fake under "a". If `stepping` is not NULL, also sets `hold`, submits a request of one unit and returns when the
 * request is in a step; *stepping receives its ticket. */
mp_registry *fake_begin(fake *fake, int threads, mp_ticket **stepping);
/* Submits a request with this many units. Returns the ticket, or NULL with *status. If `status` is NULL, a refusal
 * fails the test. */
mp_ticket *fake_submit(mp_registry *registry, const char *key, fake_call *call, mp_status *status);
/* Waits for at most 10 s. Returns the terminal status. */
mp_status fake_wait(mp_ticket *ticket, mp_error *error);
mp_status fake_finish(mp_ticket *ticket); /* fake_wait, then releases the ticket */
/* Adds the fake's loader under `key`, and checks that the registry accepts it. */
void fake_add(mp_registry *registry, const char *key, fake *fake, bool replace);
/* Callers that each submit one request of one unit and wait. */
enum { HERD = 24 };
typedef struct herd {
    mp_registry *registry;
    const char *key;
    _Atomic int ok, io, other; /* number of requests with each result */
} herd;
void fake_herd_member(void *herd);
void fake_run_herd(herd *herd); /* HERD members at once */
/* Waits until *value >= least; fails the test after 10 s. */
void fake_until(_Atomic int *value, int least);
/* Counts the waits on `cond`. Call it before the test starts a thread. */
void fake_count_waits(mp_cond *cond);
/* Waits until `least` waits on the condition variable of fake_count_waits have begun: a thread that gets its lock then
 * finds them waiting. In a build without MP_SEAM, which cannot count them, it sleeps for 50 ms. */
void fake_until_waits(int least);
/* Waits until callers and workers have freed every request. */
void fake_until_no_calls(void);
uint64_t fake_in_ms(uint64_t ms);                                            /* now + `ms`, in ns */
void fake_info(mp_registry *registry, const char *key, mp_entry_info *info); /* state "" if the key does not exist */
mp_registry_stats fake_stats(mp_registry *registry);
void fake_until_state(mp_registry *registry, const char *key, const char *state);
void fake_until_freed(fake *fake); /* no engine and no model is left: a model is "failed" before its workers end */
/* Waits for a child of this process, and checks that it exits with status 0. */
void fake_expect_child(pid_t child);
/* Closes a registry with a grace period of 1 s. For mp_thread_start. */
void fake_close(void *registry);
/* Destroys the registry, and checks that everything created was freed. */
void fake_destroy(mp_registry *registry);
void fake_end(mp_registry *registry); /* fake_destroy; also checks that no request exists */

#define FAKE_MS(n) ((uint64_t)(n)*1000 * 1000)

#endif
