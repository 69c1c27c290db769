/* model.h: from a spec to a loaded model, by the row of its architecture (archs.def).
 *
 * A new architecture is one row in archs.def, one <family>.c with its names, flags and differences, and one fixture. */
#ifndef MP_MODELS_MODEL_H
#define MP_MODELS_MODEL_H

#include "files/spec.h"
#include "kernels/kernels.h"
#include "models/engine.h"

/* A loader over a spec; pins it. compute: the class of arithmetic (MP_COMPUTE_AUTO: the family's table).
 * FORMAT when no architecture has that name, naming those that exist. */
mp_status mp_model_loader(mp_spec *spec, mp_compute compute, mp_loader *loader, mp_error *error);

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

#endif
