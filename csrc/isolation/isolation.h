/* isolation.h: workers that are processes. What computes with a model's weights on a caller's input may crash, be
 * killed or stand still; in a process of its own it takes nobody with it.
 *
 *   registry --step interface--> proxy engine (proxy.c) --channel.h--> child (child.c) --step interface--> real engine
 *
 * The registry knows nothing of it: a loader made here gives a model whose engines are proxies. The parent loads the
 * model as ever, with its packed weights in memory that is shared and then sealed, so that check() and the errors of
 * bad files are the same; a child maps weights and files read-only, loads the model over them in milliseconds, and has
 * an engine of its own with a fixed budget.
 *
 * A child that ends, stands still or sends what does not fit is killed. The calls of its step fail with RECV, and
 * mp_engine.lost tells its worker, which leaves and is replaced as any other whose engine failed. */
#ifndef MP_ISOLATION_ISOLATION_H
#define MP_ISOLATION_ISOLATION_H

#include "files/spec.h"
#include "models/model.h"

typedef struct mp_isolation_options { /* copied */
    /* What becomes a child: has to call mp_isolation_main (or _serve), with the descriptors of base/process.h. */
    const char *const *argv;
    const char *const *envp;
    uint64_t memory_bytes; /* of a child's engine: caches, scratch, calls; 0 = four times an engine's footprint,
                            * of what an image takes once */
    uint64_t start_ns;     /* until a child is ready; 0 = 20 s */
    uint64_t stall_ns;     /* without a sign of life; 0 = 20 s */
} mp_isolation_options;

/* A loader over a spec, as mp_model_loader, whose workers are processes. Pins the spec. */
mp_status mp_isolation_loader(mp_spec *spec, mp_compute compute, const mp_isolation_options *options, mp_loader *loader,
                              mp_error *error);
/* The body of such a process: serves until its parent kills it or is gone. Returns an exit code. */
__attribute__((visibility("default"))) int mp_isolation_main(void);

/* --- for other models than those of models/model.h: tests --- */

typedef struct mp_isolation_kind {
    /* in the parent */
    mp_status (*load)(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_shm *weights,
                      mp_model **model, mp_error *error);
    void (*footprint)(void *self, uint64_t *model_bytes, uint64_t *engine_bytes);
    /* What a child needs to load it again; freed with mp_free. After a load. */
    mp_status (*describe)(void *self, uint8_t **bytes, size_t *size, mp_error *error);
    void (*destroy)(void *self);
    void (*facts)(const mp_model *model, mp_model_facts *facts); /* or NULL */
    /* in a child: weights->data is NULL if the load made none */
    mp_status (*open)(const uint8_t *description, size_t bytes, mp_shm *weights, mp_budget *budget, mp_model **model,
                      mp_error *error);
    /* in both, or NULL: what was learnt of the model's speed */
    void (*get_speed)(const mp_model *model, uint64_t speed[MP_MODEL_SPEEDS]);
    void (*set_speed)(mp_model *model, const uint64_t speed[MP_MODEL_SPEEDS]);
} mp_isolation_kind;

/* Takes self, also on failure. */
mp_status mp_isolation_wrap(const mp_isolation_kind *kind, void *self, mp_capability capability,
                            const mp_isolation_options *options, mp_loader *loader, mp_error *error);
int mp_isolation_serve(const mp_isolation_kind *kind);

#endif
