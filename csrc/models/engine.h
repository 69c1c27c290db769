/* engine.h: the step interface, the only connection between the worker pool and the models.
 *
 * A request becomes one item, even one with 10,000 texts. A worker owns one engine and loops:
 *
 *   admit(item) for each waiting item -> plan(items, budget) -> step(lease, plan) -> one outcome per planned item
 *
 * until every item is done; then it calls retire(item). Batches, continuous batching, chunked prefill, diffusion steps,
 * fairness and cancellation are all decisions about the content of the next plan. The pool sees items, costs and
 * outcomes, never a model. */
#ifndef MP_MODELS_ENGINE_H
#define MP_MODELS_ENGINE_H

#include "base/team.h"
#include "models/capability.h"

typedef enum mp_outcome {
    MP_OUTCOME_MORE,        /* the item needs another step */
    MP_OUTCOME_DONE,        /* the result is complete */
    MP_OUTCOME_WAIT_MASK,   /* blocked on its grammar mask; its logits are kept */
    MP_OUTCOME_WAIT_MEMORY, /* no KV block or other memory was available: preempt another item or wait */
    MP_OUTCOME_FAILED       /* `item->error` says why; other items are unharmed. MEMORY_EXHAUSTED: as WAIT_MEMORY */
} mp_outcome;

typedef struct mp_item {
    void *ticket;          /* owned by the registry; engines never access it */
    mp_request *request;   /* input and result */
    uint8_t priority;      /* 0 = most urgent */
    uint8_t service_class; /* 0 interactive, 1 bulk */
    uint64_t tenant;       /* mp_tenant_of; 0 = none named, which is one tenant */
    uint64_t deadline_ns; /* absolute; 0 = none */
    uint64_t cost_ns;     /* predicted by check() */
    uint64_t sequence;    /* order of arrival; the youngest item is preempted first */
    _Atomic int cancelled;
    uint32_t cursor, total; /* progress in the item's own units (texts, tokens, steps) */
    void *state;            /* owned by the engine, from admit to retire */
    /* Frees `state` of an item that ends between a preemption and its next admission, when no engine owns it. preempt()
     * sets `abandon` if the state outlives the preemption. NULL: nothing to free. */
    void (*abandon)(struct mp_item *item);
    mp_error error;
} mp_item;

enum { MP_PLAN_MAX = 256 }; /* items in one step */

typedef struct mp_plan {
    /* set by the worker before `plan`: the compute threads of the pool, if no other request and no other worker waits;
     * otherwise 0. A step that ends soon after mp_lease_wanted returns true may then exceed the budget by any time */
    int alone_threads;
    int count;
    mp_item *items[MP_PLAN_MAX];
    uint32_t amount[MP_PLAN_MAX]; /* units of work for each item in this step, at least 1; the engine defines the unit.
                                   * An item is charged for the step by its share of the amounts. */
    int threads;                  /* compute threads that the step can use */
    bool masks;                   /* at least one item is blocked on a grammar mask; if all items are, `count` is 0 */
    bool barrier_bound;           /* threads meet at barriers many times per millisecond: fewer may be faster */
    uint64_t cost_ns;             /* predicted */
} mp_plan;

typedef struct mp_engine mp_engine;
typedef struct mp_engine_ops { /* called by the worker that owns the engine, one thread at a time */
    /* Reserve the memory that the item needs (KV blocks for its prompt, scratch). MP_MEMORY_EXHAUSTED: retry after
     * other items have retired. Any other failure ends the item. */
    mp_status (*admit)(mp_engine *engine, mp_item *item, mp_error *error);
    /* Choose about `budget_ns` of work out of items[0..n), which are admitted and ordered by preference. Plan at least
     * one item unless n is 0 or all items are blocked on masks. */
    void (*plan)(mp_engine *engine, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan);
    /* Execute the plan. Writes outcomes[plan->count]. Cancelled items may stop early with MORE; the caller retires
     * them. */
    void (*step)(mp_engine *engine, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes);
    /* Release the item's memory. The item can be admitted again, to any engine of the model, and then produces the same
     * result bytes as without the preemption. Also legal after a step that failed for the item, if its request is
     * `resumable`. */
    void (*preempt)(mp_engine *engine, mp_item *item);
    /* Release an item, done or not. Legal on an item that was never admitted (`state` NULL). */
    void (*retire)(mp_engine *engine, mp_item *item);
    /* Free memory that no item needs (caches, arenas). Returns the number of bytes freed. */
    uint64_t (*trim)(mp_engine *engine);
    void (*destroy)(mp_engine *engine); /* call only when no item is admitted */
    /* Bytes charged to the budget now, for scratch and caches. NULL: the predicted number of bytes. */
    uint64_t (*bytes)(const mp_engine *engine);
    /* Do optional work that makes later steps faster, for about 2 ms and with the calling thread only. Returns true if
     * more is left. `lease` NULL: do nothing, and return whether there is such work; take no lock, because the worker
     * then holds its entry's lock. Call only while no item is admitted. NULL: the engine has no optional work. */
    bool (*improve)(mp_engine *engine, mp_lease *lease);
} mp_engine_ops;
/* Savings by prefix reuse. Written by the worker, read (relaxed) by any thread while the engine lives. */
typedef struct mp_prefix_counters {
    _Atomic uint64_t hits;    /* times that a sequence continued after cached tokens */
    _Atomic uint64_t tokens;  /* tokens found in the cache and therefore not computed */
    _Atomic uint64_t blocks;  /* blocks that a look-up can find now, in use or idle */
    _Atomic uint64_t evicted; /* blocks evicted */
    _Atomic uint64_t state_bytes, snapshot_bytes, snapshots; /* as in mp_state_use, now */
} mp_prefix_counters;
/* Memory of the states of recurrent layers, which `bytes` of the engine includes. */
typedef struct mp_state_use {
    uint64_t state_bytes;    /* bytes for the states of sequences */
    uint64_t snapshot_bytes; /* bytes of the copies of states that are kept for later prompts */
    uint64_t snapshots;      /* number of these copies */
} mp_state_use;
mp_state_use mp_prefix_state_use(const mp_prefix_counters *prefix); /* NULL: zeros */
/* Totals over all steps. Accessed by the worker's thread only. */
typedef struct mp_step_work {
    uint64_t passes;                /* passes over the weights */
    uint64_t rows;                  /* rows of all passes: prefill tokens, decode tokens and draft tokens */
    uint64_t prefix_tokens;         /* tokens found in the prefix cache and not computed */
    uint64_t draft_tokens;          /* draft tokens verified */
    uint64_t accepted_draft_tokens; /* draft tokens accepted */
    uint64_t dedup_hits;            /* texts and images that got the vector of an equal one */
} mp_step_work;
struct mp_engine {
    const mp_engine_ops *ops;
    const mp_prefix_counters *prefix; /* NULL: no prefix reuse */
    /* Returns the reason why the engine is permanently unusable, or NULL if it is usable. The worker calls lost() after
     * every other engine function and from time to time while idle, and exits when lost() returns an error. NULL: the
     * engine cannot become unusable. */
    const mp_error *(*lost)(mp_engine *engine);
    bool external_kill; /* another program killed the engine's process; valid once lost() returns an error */
    bool stalled;       /* the engine's process was killed because it made no progress; valid likewise */
    int process;  /* id of the process that computes for this engine: the lease then counts threads of that process, and
                   * has none of this process. 0 = this process */
    mp_step_work work; /* all zero if the engine does not count */
};

/* ---- loading: the interface by which the registry loads any model ------------------------------------------------ */

typedef struct mp_model mp_model; /* shared by its engines; only its measured speeds change once it is loaded */

/* Progress of a load, written by the loader and read by waiting threads. */
typedef struct mp_progress {
    _Atomic uint64_t beat_ns;    /* time of the last progress report */
    _Atomic uint32_t percent;    /* 0..100 */
    _Atomic(const char *) stage; /* static string, such as "mapping" or "packing" */
} mp_progress;
void mp_progress_set(mp_progress *progress, const char *stage, uint32_t percent); /* NULL is legal */
/* Report `done` of `total` equal parts, with total > 0. */
void mp_progress_part(mp_progress *progress, const char *stage, uint64_t done, uint64_t total);

typedef struct mp_loader_ops {
    /* Loads the model with the threads of the lease. Charges what it allocates to `budget`. Called again for each later
     * load of the entry. */
    mp_status (*load)(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **model,
                      mp_error *error);
    /* Predicts, without loading, the bytes of the loaded model and the bytes of each of its engines. */
    void (*footprint)(void *self, uint64_t *model_bytes, uint64_t *engine_bytes);
    void (*destroy)(void *self);
} mp_loader_ops;
typedef struct mp_loader {
    const mp_loader_ops *ops;
    void *self;
    mp_capability capability;
    const char *policy; /* dispatch policy for the model's workers; NULL: the capability's policy */
    uint64_t revision;  /* chosen by the caller; requests may name it (mp_submit_options.revision) */
} mp_loader;

typedef struct mp_model_ops {
    /* Creates an engine, whose scratch and caches are charged to `budget`. Must be thread-safe: several workers may
     * start at the same time. */
    mp_status (*engine)(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
    /* Checks whether the model can serve the request, predicts its cost, and fills in result sizes (embedding width).
     * Thread-safe. Never returns FORMAT; errors of the caller are INVALID_ARGUMENT, CONTEXT_OVERFLOW and
     * UNSUPPORTED. */
    mp_status (*check)(const mp_model *model, mp_request *request, uint64_t *cost_ns, uint32_t *total, mp_error *error);
    /* Returns true if the files are still present and unchanged. */
    bool (*healthy)(const mp_model *model);
    uint64_t (*bytes)(const mp_model *model); /* bytes of anonymous memory held */
    void (*destroy)(mp_model *model);         /* call after the last engine is destroyed */
} mp_model_ops;
struct mp_model {
    const mp_model_ops *ops;
};

#endif
