/* isolation.h: workers in child processes. Code that computes with a model's weights on a caller's input may crash, be
 * killed or hang. In a process of its own it cannot crash or block the application.
 *
 *   registry --step interface--> proxy engine (proxy.c) --channel.h--> child (child.c) --step interface--> real engine
 *
 * The registry needs no special case: a loader of this module returns a model whose engines are proxies. The parent
 * loads the model as without isolation, so check() and the errors of bad files are the same. The parent puts the packed
 * weights into shared memory, which is then sealed. A child maps weights and files read-only, loads the model over
 * these mappings in milliseconds, and has its own engine, whose memory has a fixed limit. The parent charges its budget
 * with what the engine uses: the child asks for more, and replies report what is free again (channel.h).
 *
 * A child that exits, hangs or sends an invalid message is killed. The requests of its step fail with RECV.
 * mp_engine.lost reports the loss to the worker, which exits and is replaced like any worker whose engine failed. */
#ifndef MP_ISOLATION_ISOLATION_H
#define MP_ISOLATION_ISOLATION_H

#include "files/spec.h"
#include "models/model.h"

typedef struct mp_isolation_options { /* copied */
    /* Command of a child process. The program must call mp_isolation_main (or _serve), with the descriptors of
     * base/process.h. */
    const char *const *argv;
    const char *const *envp;
    uint64_t memory_bytes; /* limit of a child's engine (caches, scratch, requests); 0: derived from predicted sizes */
    uint64_t start_ns;     /* limit for a child to become ready, in ns; 0: 20 s */
    uint64_t stall_ns;     /* limit without a heartbeat or response, in ns; 0: 20 s */
} mp_isolation_options;

/* Create a loader for a spec, like mp_model_loader, whose engines run in child processes. Takes a reference to the
 * spec. */
mp_status mp_isolation_loader(mp_spec *spec, mp_compute compute, const mp_isolation_options *options, mp_loader *loader,
                              mp_error *error);
/* The main function of a child process. Serves until the parent kills the process or exits. Returns an exit code. */
__attribute__((visibility("default"))) int mp_isolation_main(void);

/* --- for other models than those of models/model.h, such as the models of tests --- */

typedef struct mp_isolation_kind {
    /* --- in the parent --- */
    mp_status (*load)(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_shm *weights,
                      mp_model **model, mp_error *error);
    void (*footprint)(void *self, uint64_t *model_bytes, uint64_t *engine_bytes);
    /* Write the description from which a child loads the model again. Called after load. The caller frees *bytes with
     * mp_free. */
    mp_status (*describe)(void *self, uint8_t **bytes, size_t *size, mp_error *error);
    void (*destroy)(void *self);                                 /* or NULL */
    void (*facts)(const mp_model *model, mp_model_facts *facts); /* or NULL */
    /* --- in a child; weights->data is NULL if `load` stored no weights there --- */
    mp_status (*open)(const uint8_t *description, size_t bytes, mp_shm *weights, mp_budget *budget, mp_model **model,
                      mp_error *error);
    /* --- in both: the measured speed of the model; NULL: not measured --- */
    void (*get_speed)(const mp_model *model, uint64_t speed[MP_MODEL_SPEEDS]);
    void (*set_speed)(mp_model *model, const uint64_t speed[MP_MODEL_SPEEDS]);
} mp_isolation_kind;

/* Takes ownership of `self`, also on failure. */
mp_status mp_isolation_wrap(const mp_isolation_kind *kind, void *self, mp_capability capability,
                            const mp_isolation_options *options, mp_loader *loader, mp_error *error);
int mp_isolation_serve(const mp_isolation_kind *kind);

#endif
