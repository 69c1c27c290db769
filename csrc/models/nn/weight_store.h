/* nn/weight_store.h: all weights of a model in memory, from the load to the end of the model. */
#ifndef MP_MODELS_NN_WEIGHT_STORE_H
#define MP_MODELS_NN_WEIGHT_STORE_H

#include "models/nn/expert_reads.h"
#include "models/nn/packed_experts.h"
#include "models/nn/stored.h"
#include "models/nn/weights_use.h"

/* A zeroed store is empty. */
typedef struct mp_weight_store {
    struct mp_build_job *jobs; /* [capacity] until the load has finished: the tensors that nn/builder.h was given */
    int count, capacity;
    uint8_t *slab;         /* the packed weights; NULL if they are shared with worker processes */
    size_t slab_bytes;     /* excludes the slack after the last tensor */
    mp_budget *budget;     /* set when the load finishes */
    uint64_t charged;      /* bytes charged for the slab */
    uint64_t mapped_bytes; /* bytes in the files of the matrices that are never packed */
    int64_t parameters;
    mp_stored *stored;          /* matrices that are not packed yet, or NULL */
    mp_packed_experts *experts; /* packed copies of experts, or NULL: nothing is kept */
    mp_expert_reads reads;      /* reads of the experts; not measured if it has no name */
} mp_weight_store;

/* Frees everything and gives the charged bytes back. */
void mp_weight_store_deinit(mp_weight_store *store);
/* Bytes charged to the budget now. */
uint64_t mp_weight_store_bytes(const mp_weight_store *store);

#endif
