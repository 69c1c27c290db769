/* engine.h: the step interface, all that joins the pool to the models.
 *
 * A call becomes one item, also one with 10,000 texts. A worker owns one engine and does, in a loop:
 *
 *   admit(item) for what waits  ->  plan(items, budget) -> step(lease, plan) -> outcome a planned item
 *
 * until every item is done; then retire(item). Batches, continuous decoding, chunked prompts, diffusion steps, fairness
 * and cancellation are all choices of what goes into the next plan. The pool sees items, costs and outcomes, never a
 * model. */
#ifndef MP_MODELS_ENGINE_H
#define MP_MODELS_ENGINE_H

#include "base/team.h"
#include "models/capability.h"

typedef enum mp_outcome {
    MP_OUTCOME_MORE,        /* takes part in another step */
    MP_OUTCOME_DONE,        /* the result is complete */
    MP_OUTCOME_WAIT_MASK,   /* waits for its grammar mask; its logits are kept */
    MP_OUTCOME_WAIT_MEMORY, /* could not get a KV block: preempt somebody or wait */
    MP_OUTCOME_FAILED       /* item->error says why; others are unharmed */
} mp_outcome;

typedef struct mp_item {
    void *ticket;     /* the registry's; engines never look */
    mp_request *call;    /* request and result */
    uint8_t priority; /* 0 = most urgent */
    uint8_t service_class; /* 0 interactive, 1 bulk */
    uint32_t tenant;
    uint64_t deadline_ns; /* absolute; 0 = none */
    uint64_t cost_ns;     /* predicted by check() */
    uint64_t sequence;    /* order of arrival; the youngest is preempted first */
    _Atomic int cancelled;
    uint32_t cursor, total; /* progress in the item's own units (texts, tokens, steps) */
    void *state;            /* the engine's, from admit to retire */
    /* Set by preempt when state outlives it: frees it without the engine, for an item that ends while it waits to be
     * admitted again. NULL: there is nothing to free. */
    void (*abandon)(struct mp_item *item);
    mp_error error;
} mp_item;

enum { MP_PLAN_MAX = 256 }; /* items in one step */

typedef struct mp_plan {
    int count;
    mp_item *items[MP_PLAN_MAX];
    uint32_t amount[MP_PLAN_MAX]; /* units of work for each in this step; the engine's meaning */
    int threads;                  /* how many lanes it can use */
    bool masks;                   /* somebody waits for a mask; if all do, count is 0 */
    bool together;                /* those wait for each other many times a millisecond: fewer may be quicker */
    uint64_t cost_ns;             /* predicted */
} mp_plan;

typedef struct mp_engine mp_engine;
typedef struct mp_engine_ops { /* one thread at a time calls these: the worker that owns the engine */
    /* Reserve what the item needs (KV blocks for its prompt, scratch). MP_MEMORY_EXHAUSTED: not now, try when others
     * have retired; any other failure is the item's end. */
    mp_status (*admit)(mp_engine *engine, mp_item *item, mp_error *error);
    /* Choose work for about budget_ns out of items[0..n), which are admitted, in order of preference. At least one item
     * unless n is 0, or all of them wait for masks. */
    void (*plan)(mp_engine *engine, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan);
    /* Do it. outcomes[plan->count]. Cancelled items may stop early with MORE; the caller retires them. */
    void (*step)(mp_engine *engine, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes);
    /* Give the item's memory back; it can be admitted again, to any engine of the model, and then yields the same bytes
     * from where it stands. Also after a step that failed for it, if its call goes on (mp_request.goes_on). */
    void (*preempt)(mp_engine *engine, mp_item *item);
    /* Forget an item, done or not. Legal on one that was never admitted (state NULL). */
    void (*retire)(mp_engine *engine, mp_item *item);
    /* Free what can be had without failing anybody (caches, arenas); returns bytes freed. */
    uint64_t (*trim)(mp_engine *engine);
    void (*destroy)(mp_engine *engine); /* no admitted items left */
    /* Bytes of the budget that it holds now: scratch, caches. No function: as many as were predicted. */
    uint64_t (*bytes)(const mp_engine *engine);
} mp_engine_ops;
/* What prefix reuse saved. Written by the worker, read (relaxed) by any thread while the engine lives. */
typedef struct mp_prefix_counters {
    _Atomic uint64_t hits;    /* times that a sequence went on after tokens it found */
    _Atomic uint64_t tokens;  /* which therefore were not computed */
    _Atomic uint64_t blocks;  /* that can be found now, in use or idle */
    _Atomic uint64_t evicted; /* blocks that were given up */
} mp_prefix_counters;
/* What the steps did so far; only grows. The worker's thread. */
typedef struct mp_step_work {
    uint64_t passes;  /* over the weights */
    uint64_t rows;    /* that took part in them, summed: tokens read, tokens to write on, guesses */
    uint64_t found;   /* tokens not computed, for a prefix was found */
    uint64_t drafted; /* tokens guessed and checked */
    uint64_t accepted; /* of which so many were right */
} mp_step_work;
struct mp_engine {
    const mp_engine_ops *ops;
    const mp_prefix_counters *prefix; /* NULL: nothing is reused */
    /* Whether the engine is at its end and can do nothing any more, and why; NULL = it is well. Its worker asks after
     * other functions of it and now and then while it has no work, and leaves. No function: it has no such end. */
    const mp_error *(*lost)(mp_engine *engine);
    bool outside; /* it was lost by somebody else's doing, and not by what it computed; once lost says that it is */
    int process; /* id of the process that it stands for, whose threads compute: a lease has lanes but no threads of
                  * this one; 0 = this one */
    mp_step_work work; /* zeros: it does not count */
};

/* ---- loading: what the registry calls without knowing what a model is -------------------------------------------- */

typedef struct mp_model mp_model; /* shared, immutable once loaded, reference-counted */

/* Where a load stands, written by the loader, read by waiters. */
typedef struct mp_progress {
    _Atomic uint64_t beat_ns;    /* last sign of progress */
    _Atomic uint32_t percent;    /* 0..100 */
    _Atomic(const char *) stage; /* static string: "mapping", "checking", "packing", "warming" */
} mp_progress;
void mp_progress_set(mp_progress *progress, const char *stage, uint32_t percent); /* NULL is legal */

typedef struct mp_loader_ops {
    mp_status (*load)(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **model,
                      mp_error *error);
    /* Bytes that a load will take, and that one engine more takes, predicted without loading. */
    void (*footprint)(void *self, uint64_t *model_bytes, uint64_t *engine_bytes);
    void (*destroy)(void *self);
} mp_loader_ops;
typedef struct mp_loader {
    const mp_loader_ops *ops;
    void *self;
    mp_capability capability;
    const char *policy; /* name of the one that suits its workers; NULL: that of the capability */
} mp_loader;

typedef struct mp_model_ops {
    mp_status (*engine)(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *error);
    /* May this call be served, and what will it cost? Fills result sizes (embed width). Any thread. FORMAT never; the
     * caller's mistakes are INVALID_ARGUMENT, CONTEXT_OVERFLOW, UNSUPPORTED. */
    mp_status (*check)(const mp_model *model, mp_request *call, uint64_t *cost_ns, uint32_t *total, mp_error *error);
    /* The files are still there and whole. */
    bool (*healthy)(const mp_model *model);
    uint64_t (*bytes)(const mp_model *model); /* anonymous memory held */
    void (*destroy)(mp_model *model);         /* after the last engine */
} mp_model_ops;
struct mp_model {
    const mp_model_ops *ops;
};

#endif
