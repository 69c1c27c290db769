/* model.h: from a spec to a loaded model, by the row of its architecture (archs.def).
 *
 * A new architecture is one row in archs.def, one <family>.c with its names, flags and differences, and one fixture. */
#ifndef MP_MODELS_MODEL_H
#define MP_MODELS_MODEL_H

#include "base/arena.h"
#include "base/shared_memory.h"
#include "files/spec.h"
#include "kernels/kernels.h"
#include "models/engine.h"

/* A loader over a spec; pins it. compute: the class of arithmetic (MP_COMPUTE_AUTO: the family's table).
 * FORMAT when no architecture has that name, naming those that exist. */
mp_status mp_model_loader(mp_spec *spec, mp_compute compute, mp_loader *loader, mp_error *error);

/* The same load, at once, for several processes that share the packed weights: see mp_load_args. */
mp_status mp_model_load_shared(mp_spec *spec, mp_compute compute, mp_shm *shared, mp_lease *lease, mp_budget *budget,
                               mp_progress *progress, mp_model **model, mp_error *error);

/* What a model of these functions has learnt of its speed, for the same model in another process; 0 = unknown. */
enum { MP_MODEL_SPEEDS = 2 };
void mp_model_get_speed(const mp_model *model, uint64_t speed[MP_MODEL_SPEEDS]);
void mp_model_set_speed(mp_model *model, const uint64_t speed[MP_MODEL_SPEEDS]);

typedef struct mp_arch_info {
    const char *name;
    mp_capability capability;
} mp_arch_info;
/* Rows of archs.def. */
int mp_arch_count(void);
const mp_arch_info *mp_arch_at(int index);

/* Facts of a loaded model that Python shows; each is 0 where it has no meaning. */
typedef struct mp_model_facts {
    const char *architecture, *compute;
    int64_t context_length, vocab, hidden_size, layers, output_size, parameters, weight_bytes;
} mp_model_facts;
void mp_model_get_facts(const mp_model *model, mp_model_facts *facts);

/* For families: the activation that a spec has under a key, one of those between the linear layers of encoders; GELU
 * if absent. */
mp_status mp_model_activation(const mp_spec *spec, const char *key, mp_act *act, mp_error *error);

/* For engines: scratch that is charged to the budget, sized by the step and kept for the next; *charged grows by what
 * was taken. And giving it back; returns how much that was. */
mp_status mp_engine_reserve(mp_arena *arena, size_t bytes, mp_budget *budget, uint64_t *charged, mp_error *error);
uint64_t mp_engine_release(mp_arena *arena, mp_budget *budget, uint64_t *charged);
/* Every item of a plan fails alike. One fails for what came out, unless it has failed already. */
void mp_engine_fail_all(const mp_plan *plan, const mp_error *error, mp_outcome *outcomes);
void mp_engine_fail_numeric(mp_item *item, mp_outcome *outcome);
/* So many more of an item's units are there; `done` is its call's count of them. */
void mp_engine_advance(mp_item *item, uint32_t units, _Atomic int32_t *done, mp_outcome *outcome);

/* For families: lanes that make a pass of `rows` rows shorter, when they meet at so many barriers. A lane more takes
 * its part of the work, and makes each barrier longer. From sizes alone, with rates that are too low rather than too
 * high, so that it limits only where there are very many lanes, or hardly any work. 1 to 256. */
int mp_threads_worth(const mp_model_facts *facts, int64_t rows, int barriers);

#endif
