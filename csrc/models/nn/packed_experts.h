/* nn/packed_experts.h: packed copies of experts, kept while memory is plentiful.
 *
 * Experts are computed from the mapped file (nn/experts.h). If an expert has several rows in a pass, its panels are
 * packed first; with few rows, its stored rows are multiplied, which is slower than a product with packed panels. A
 * panel that a pass has packed is therefore kept for later passes. In addition each pass has a time budget for packing
 * the panels of experts with few rows. When the last panel of an expert's matrix is kept, the matrix's source pages are
 * released, so memory holds the expert once.
 *
 * Copies are charged to the memory budget panel by panel, as long as a third of it stays free. They are optional:
 * mp_packed_experts_drop frees all of them, and later passes may pack them again. The bits of the outputs do not depend
 * on which panels are kept.
 *
 * Any number of engines may use a model's copies at the same time. A panel that a thread of the parent was packing at
 * the time of a fork counts as not kept in the child. */
#ifndef MP_MODELS_NN_PACKED_EXPERTS_H
#define MP_MODELS_NN_PACKED_EXPERTS_H

#include <stdatomic.h>

#include "base/alloc.h"
#include "base/forked.h"
#include "files/weights.h"
#include "kernels/kernels.h"
#include "models/nn/pack_budget.h"

typedef enum mp_panel_state { MP_PANEL_STORED, MP_PANEL_PACKING, MP_PANEL_KEPT } mp_panel_state;

typedef struct mp_packed_matrix { /* one matrix of each expert of a layer */
    struct mp_packed_experts *all;
    struct mp_packed_matrix *next;
    uint8_t *data; /* [count] packed matrices of `bytes` each; memory is taken from the system when it is written */
    size_t bytes, panel_bytes;
    int32_t count, panels;
    _Atomic uint8_t *state; /* [count, panels] mp_panel_state */
    _Atomic int32_t *left;  /* [count] panels that are not kept */
} mp_packed_matrix;

typedef struct mp_packed_experts {
    const mp_weights *weights;
    mp_budget *budget;
    mp_forked forked;
    mp_packed_matrix *first;
    uint64_t keep_ns;         /* time budget of a pass for panels of experts with few rows */
    mp_pack_budget time;      /* the budget of the current pass */
    _Atomic uint64_t charged; /* bytes of kept panels */
    uint64_t most;            /* bytes of all panels that may be kept */
    bool partial;             /* the model has experts that are never kept */
    _Atomic uint64_t packed;  /* panels kept since the load, including dropped ones */
    _Atomic int32_t passes;   /* passes in progress; -1 while the copies are dropped */
} mp_packed_experts;

/* Creates an empty set. `weights` and `budget` must outlive it. Returns NULL if memory is exhausted. */
mp_packed_experts *mp_packed_experts_create(const mp_weights *weights, mp_budget *budget);
void mp_packed_experts_destroy(mp_packed_experts *experts); /* NULL is legal */
/* Adds `count` matrices with the layout of `w`. Returns NULL if the system refuses the memory: then no panel of them is
 * kept. */
mp_packed_matrix *mp_packed_experts_add(mp_packed_experts *experts, const mp_wmat *w, int32_t count);
/* Call before and after each pass that may use the experts. `mp_packed_experts_end` returns true if any pass has kept a
 * panel since `packed`, the result of mp_packed_experts_begin. NULL is legal. */
uint64_t mp_packed_experts_begin(mp_packed_experts *experts);
bool mp_packed_experts_end(mp_packed_experts *experts, uint64_t packed);
/* Frees all copies, unless a pass is in progress. Returns the bytes freed. NULL is legal. */
uint64_t mp_packed_experts_drop(mp_packed_experts *experts);
/* Bytes charged to the budget now. NULL: 0. */
uint64_t mp_packed_experts_bytes(const mp_packed_experts *experts);

/* NULL: nothing is kept. */
static inline bool mp_packed_is_kept(const mp_packed_matrix *matrix, int expert, int panel) {
    return matrix && atomic_load_explicit(&matrix->state[(int64_t)expert * matrix->panels + panel],
                                          memory_order_acquire) == MP_PANEL_KEPT;
}
/* Returns expert's packed matrix; only its kept panels may be read. */
static inline uint8_t *mp_packed_data(const mp_packed_matrix *matrix, int expert) {
    return matrix->data + (size_t)expert * matrix->bytes;
}
/* Returns true if the caller shall pack the panel into its place in mp_packed_data and then call mp_packed_keep. `few`:
 * the panel would not be packed otherwise, so the caller packs it within the time budget of the pass. NULL: false. */
bool mp_packed_wants(mp_packed_matrix *matrix, int expert, int panel, bool few);
/* Makes a panel that the caller has packed readable. After the last panel of the expert's matrix, releases the pages of
 * `source`, the matrix in the file. */
void mp_packed_keep(mp_packed_matrix *matrix, int expert, int panel, const mp_tensor *source);

#endif
