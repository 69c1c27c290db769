/* model.h: loads a model from a spec, with the loader in the row of its architecture (archs.def).
 *
 * csrc/README.md, "Adding an architecture", lists what a new architecture needs. */
#ifndef MP_MODELS_MODEL_H
#define MP_MODELS_MODEL_H

#include "base/arena.h"
#include "base/shared_memory.h"
#include "files/spec.h"
#include "kernels/kernels.h"
#include "models/engine.h"

/* Creates a loader for a spec and pins the spec. `compute`: the compute type (MP_COMPUTE_AUTO: chosen by the family).
 * Fails with FORMAT if the architecture is unknown; the error lists known architectures. */
mp_status mp_model_loader(mp_spec *spec, mp_compute compute, mp_loader *loader, mp_error *error);
/* Where the matrices of a model are. */
typedef enum mp_matrices {
    MP_MATRICES_NONE,    /* the model has none */
    MP_MATRICES_PACKED,  /* all in packed copies */
    MP_MATRICES_PACKING, /* in the mapped file; packed copies are made as matrices are used */
    MP_MATRICES_MAPPED,  /* in the mapped file only */
} mp_matrices;
/* The word that Python shows: "packed", "packing" or "mapped"; NULL for MP_MATRICES_NONE. */
const char *mp_matrices_name(mp_matrices matrices);
/* Predicts `weights` of the facts of a model after its load in this process, from its spec alone. */
mp_matrices mp_model_predict_weights(const mp_spec *spec, mp_compute compute);
/* Predicts `sequence_state_bytes` of the facts, likewise. */
uint64_t mp_model_predict_state(const mp_spec *spec);

/* Loads the model immediately, without a loader. Several processes can share the packed weights: see
 * `mp_load_args.shared`. */
mp_status mp_model_load_shared(mp_spec *spec, mp_compute compute, mp_shm *shared, mp_lease *lease, mp_budget *budget,
                               mp_progress *progress, mp_model **model, mp_error *error);

/* Copy the speed estimates measured by a model in one process to the same model in another process. 0 = unknown. */
enum { MP_MODEL_SPEEDS = 2 };
void mp_model_get_speed(const mp_model *model, uint64_t speed[MP_MODEL_SPEEDS]);
void mp_model_set_speed(mp_model *model, const uint64_t speed[MP_MODEL_SPEEDS]);

typedef struct mp_arch_info {
    const char *name;
    mp_capability capability;
} mp_arch_info;
/* Rows of archs.def. */
int mp_arch_count(void);
const mp_arch_info *mp_arch_at(int index); /* NULL if there is no such row */

/* Facts of a loaded model, as shown in Python; 0 or NULL if a fact does not apply to the model. */
typedef struct mp_model_facts {
    const char *architecture, *compute;
    mp_matrices weights; /* excludes tables of rows, and experts */
    mp_matrices experts;
    int64_t expert_bytes;        /* bytes of the experts in the files */
    int64_t expert_packed_bytes; /* bytes of their packed copies now */
    bool thrashing;              /* the same experts are read from the disk repeatedly: see nn/expert_reads.h */
    const char *kv_dtype;   /* type of keys and values: "float32", "int16" or "int8" */
    int64_t kv_token_bytes; /* bytes of a token in the KV cache, in all layers */
    int64_t sequence_state_bytes; /* bytes of the state of a sequence in all recurrent layers */
    int64_t draft_bytes;    /* bytes of the draft model's weights; 0: there is no draft model */
    int64_t context_length, vocab, hidden_size, layers, output_size, parameters, weight_bytes;
} mp_model_facts;
void mp_model_get_facts(const mp_model *model, mp_model_facts *facts);

/* For families: reads the activation between the linear layers of an MLP from `key` of the spec. otherwise: name of the
 * activation if the key is absent; NULL: the key is required. */
mp_status mp_model_activation(const mp_spec *spec, const char *key, const char *otherwise, mp_act *act,
                              mp_error *error);

/* For engines: scratch in an arena, charged to the budget; it grows when a step needs more and is reused by the next
 * step. mp_engine_reserve adds the bytes of the growth to *charged. mp_engine_release frees the arena, returns its
 * bytes to the budget, sets *charged to 0 and returns the number of bytes. */
mp_status mp_engine_reserve(mp_arena *arena, size_t bytes, mp_budget *budget, uint64_t *charged, mp_error *error);
uint64_t mp_engine_release(mp_arena *arena, mp_budget *budget, uint64_t *charged);
/* mp_engine_fail_all fails every item of a plan with the same error. mp_engine_fail_numeric fails one item because its
 * result has NaN or infinity, unless it has failed already. mp_engine_fail_changed fails with INTEGRITY: a file that a
 * step has read is not the one that was loaded. */
void mp_engine_fail_all(const mp_plan *plan, const mp_error *error, mp_outcome *outcomes);
void mp_engine_fail_numeric(mp_item *item, mp_outcome *outcome);
mp_status mp_engine_fail_changed(mp_error *error);
/* Advances `item->cursor` by `units` units and publishes it in `done`, the counter of complete results in the item's
 * request. Sets *outcome to DONE after the last unit. */
void mp_engine_advance(mp_item *item, uint32_t units, _Atomic int32_t *done, mp_outcome *outcome);

#endif
