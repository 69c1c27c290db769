/* nn/packed_experts.h: packed copies of experts, kept while memory is plentiful.
 *
 * Experts are computed from the mapped file (nn/experts.h). If an expert has several rows in a pass, its panels are
 * packed first; with few rows, its stored rows are multiplied, which is slower than a product with packed panels. A
 * panel that a pass has packed is therefore kept for later passes. Experts with few rows are packed one matrix after
 * another: a pass starts a matrix when passes have multiplied stored rows for at least as long as they have packed for
 * experts with few rows. So the first passes take at most twice their time, and a model that is used little is not
 * packed. A pass of at most MP_DECODE_ROWS rows counts an eighth of its time: passes that decode follow one another by
 * the hundreds, and each of them gains little from packed panels. When the last panel of an expert's matrix is kept,
 * the matrix's source pages are released, so memory holds the expert once. With weights that are packed at load, the
 * load packs the experts (mp_experts_pack).
 *
 * Between requests, idle workers pack the experts whose stored rows passes have multiplied, for at most the time of
 * these products (mp_packed_has_pending).
 *
 * The first panel that is kept of an expert's matrix takes memory for the whole matrix, and charges it to the memory
 * budget, as long as a third of the budget stays free. Matrices lie behind one another in the order of their first use,
 * in one reserved region of huge pages, which the system provides faster than small ones. Unused experts take no
 * memory. Copies are optional: mp_packed_experts_drop frees all of them, and later passes may pack them
 * again. The bits of the outputs do not depend on which panels are kept.
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
    size_t bytes, panel_bytes;
    int32_t count, panels;
    _Atomic(uint8_t *) *data; /* [count] packed matrix of each expert; NULL: it has no memory yet */
    _Atomic uint8_t *state; /* [count, panels] mp_panel_state */
    _Atomic int32_t *left;  /* [count] panels that are not kept */
    _Atomic uint8_t *pending; /* [count] 1: passes multiplied the expert's stored rows and had no time to pack it */
} mp_packed_matrix;

typedef struct mp_packed_experts {
    const mp_weights *weights;
    mp_budget *budget;
    mp_forked forked;
    mp_packed_matrix *first;
    int pack_share;           /* time for packing matrices of experts with few rows, per time of stored products */
    mp_pack_budget idle_time; /* time that idle workers may spend on packing: the time of stored products, less the time
                               * of such packing */
    _Atomic int32_t pending;  /* number of matrices that are `pending` */
    _Atomic bool decodes;     /* the pass that began last has at most MP_DECODE_ROWS rows */
    mp_pack_budget pass_time; /* time that passes may spend on packing; negative if started matrices took longer */
    mp_mutex lock;            /* guards the region */
    uint8_t *region;          /* memory of the packed matrices; NULL: not reserved */
    size_t region_bytes;
    bool refused;             /* the system refused the region */
    _Atomic uint64_t charged; /* bytes of the region that matrices have taken */
    _Atomic uint64_t kept;    /* bytes of kept panels */
    uint64_t most;            /* bytes of all matrices that may be kept */
    bool partial;             /* the model has experts that are never kept */
    _Atomic uint64_t packed;  /* panels kept since the load, including dropped ones */
    _Atomic int32_t passes;   /* passes in progress; -1 while the copies are dropped */
} mp_packed_experts;

/* Creates an empty set. `weights` and `budget` must outlive it. Returns NULL if memory is exhausted. */
mp_packed_experts *mp_packed_experts_create(const mp_weights *weights, mp_budget *budget);
void mp_packed_experts_destroy(mp_packed_experts *experts); /* NULL is legal */
/* Adds `count` matrices with the layout of `w`, before the first pass. Returns NULL if memory is exhausted: then no
 * panel of them is kept. */
mp_packed_matrix *mp_packed_experts_add(mp_packed_experts *experts, const mp_wmat *w, int32_t count);
/* Call before and after each pass of M rows that may use the experts. `mp_packed_experts_end` returns true if any pass
 * has kept a panel since `packed`, the result of mp_packed_experts_begin. NULL is legal. */
enum { MP_DECODE_ROWS = 8 };
uint64_t mp_packed_experts_begin(mp_packed_experts *experts, int M);
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
/* Returns the place of a panel. Legal for a panel that is kept, and for one that mp_packed_wants has given to the
 * caller. */
static inline uint8_t *mp_packed_panel(const mp_packed_matrix *matrix, int expert, int panel) {
    return atomic_load_explicit(&matrix->data[expert], memory_order_acquire) + (size_t)panel * matrix->panel_bytes;
}
/* Returns true if the caller shall pack the panel into its place, mp_packed_panel, and then call mp_packed_keep. `few`:
 * the caller could multiply the stored rows instead; the panel is then wanted only if its matrix has been started, or
 * if there is time to start it. NULL: false. */
bool mp_packed_wants(mp_packed_matrix *matrix, int expert, int panel, bool few);
/* Reports that the stored rows of a panel were multiplied in `ns`. */
void mp_packed_note_stored(mp_packed_matrix *matrix, uint64_t ns);
/* Returns true if an expert is pending and idle workers have time to pack it. NULL: false. */
bool mp_packed_has_pending(const mp_packed_experts *experts);
/* Call after an attempt to pack a pending expert. packed: true clears its mark. False: the budget refused its memory,
 * so all marks and the time of idle workers are cleared. */
void mp_packed_end_pending(mp_packed_matrix *matrix, int expert, bool packed);
/* Makes a panel that the caller has packed readable. After the last panel of the expert's matrix, releases the pages of
 * `source`, the matrix in the file. */
void mp_packed_keep(mp_packed_matrix *matrix, int expert, int panel, const mp_tensor *source);

#endif
