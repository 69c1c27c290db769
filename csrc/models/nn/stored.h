/* nn/stored.h: matrices that are used as they are mapped, and packed on use or never.
 *
 * Packing copies all weights into memory not touched before, which takes longer than a step. A thread that needs an
 * unpacked panel multiplies its rows as they are stored (mp_gemm_stored), or, where packing is faster, packs the panel
 * into its own scratch and computes with that: the bits are those of the packed matrix. In addition, each pass has a
 * time budget for keeping panels that it packs. Panels that OpenBLAS multiplies as stored are packed after the product.
 * When the last panel of a matrix is kept, its source pages are released, so memory holds the weights once. A set that
 * is `mapped` keeps no panels, and its matrices have no packed data.
 *
 * A load does not read the matrices: a file of 20 GB takes many seconds from a disk. mp_stored_fetch reads them on a
 * thread of its own, in the order in which they were added, while the first passes compute.
 *
 * Any number of engines may use a matrix at the same time. A panel that a thread of the parent was keeping at the time
 * of a fork counts as stored in the child. (In a grandchild it stays stored for good: slower, but correct.) */
#ifndef MP_MODELS_NN_STORED_H
#define MP_MODELS_NN_STORED_H

#include <stdatomic.h>

#include "base/forked.h"
#include "base/sys.h"
#include "files/weights.h"
#include "kernels/kernels.h"
#include "models/model.h"
#include "models/nn/pack_budget.h"

typedef struct mp_stored_part {
    struct mp_stored *all;
    mp_tensor tensor;
    int32_t panels;
    _Atomic uint8_t *state; /* [panels] stored, being kept, or packed */
    _Atomic int32_t left;   /* panels not packed yet */
} mp_stored_part;

typedef struct mp_stored {
    const mp_weights *weights;
    mp_forked forked;
    size_t scratch;                /* bytes of scratch for each thread */
    uint64_t keep_ns, keep_row_ns; /* time budget of a pass for keeping panels: fixed part, and part per row */
    mp_pack_budget time;           /* the budget of the current pass */
    _Atomic int32_t left;          /* parts with unpacked panels */
    _Atomic bool used, corrupted;
    _Atomic bool fetching, quit;   /* the fetching thread reads pages; it shall end */
    mp_thread fetcher;
    bool mapped;                   /* panels are never kept */
    bool fast;                     /* `mpool.float32_fast` of the spec, set by the builder: see mp_gemm_stored */
    int32_t count, capacity;
    mp_stored_part parts[]; /* [capacity] */
} mp_stored;

/* Creates an empty set with capacity for `capacity` matrices. mapped: never keep panels. */
mp_status mp_stored_create(const mp_weights *weights, int capacity, bool mapped, mp_stored **stored, mp_error *error);
void mp_stored_destroy(mp_stored *stored); /* NULL is legal */
/* Adds the matrix `tensor`. w: its packed matrix, whose data is not filled yet. Sets *part, which `stored` owns. */
mp_status mp_stored_add(mp_stored *stored, const mp_wmat *w, const mp_tensor *tensor, mp_stored_part **part,
                        mp_error *error);
/* Starts to read the source pages, so that the first passes do not wait for them page by page. Returns at once. Call
 * after the last mp_stored_add, at most once. Best effort: without a thread, passes read the pages they use.
 * mp_stored_destroy ends the thread after the chunk that it reads (4 MiB). A forked child does not continue. */
void mp_stored_fetch(mp_stored *stored);

/* Returns true while any panel is unpacked; once false, it stays false. NULL: false. */
static inline bool mp_stored_left(const mp_stored *stored) {
    return stored && atomic_load_explicit(&stored->left, memory_order_acquire) > 0;
}
/* Returns true while passes take longer than later passes: they keep panels, or wait for pages of the file. NULL:
 * false. */
static inline bool mp_stored_warming(const mp_stored *stored) {
    return mp_stored_left(stored) &&
           (!stored->mapped || atomic_load_explicit(&stored->fetching, memory_order_relaxed));
}
/* Returns the time that a pass of many rows may take, given its budget and the time of a row. While panels are
 * unpacked, the result is at least the time of 256 rows or 1.5 s, whichever is shorter: every pass reads all matrices
 * and packs their panels, which takes as long as the products of dozens of rows. */
uint64_t mp_stored_pass_ns(const mp_stored *stored, uint64_t budget_ns, uint64_t row_ns);
/* Facts of a model whose matrices are in `stored` (NULL: none): `facts.weights` and `unpacked` of mp_model_base. */
void mp_stored_facts(const mp_stored *stored, mp_matrices *weights, const _Atomic int32_t **unpacked);
/* Call before a pass of M rows: sets its time budget. The first pass gets only keep_row_ns per row, so that it ends
 * soon. */
void mp_stored_begin(mp_stored *stored, int M);
/* mp_stored_sound: call after a pass that used unpacked panels. Returns true if the files are those that were loaded.
 * Once it has returned false, it always returns false, and mp_stored_corrupted returns true: packed panels may be
 * wrong. mp_stored_corrupted(NULL) is false. */
bool mp_stored_sound(mp_stored *stored);
bool mp_stored_corrupted(const mp_stored *stored);

/* Like mp_gemm over all rows of x and panels [panel0, panel1) of the matrix of `part`; packs unpacked panels on the
 * way. panel_scratch: stored->scratch bytes of the calling thread. */
void mp_stored_gemm(mp_stored_part *part, const mp_wmat *w, const mp_acts *x, int panel0, int panel1,
                    const mp_epilogue *ep, float *y, int64_t ldy, uint8_t *panel_scratch);
/* Like mp_wmat_row for the matrix of `part`, which may be unpacked. */
void mp_stored_row(const mp_stored_part *part, const mp_wmat *w, int32_t n, float *out);

#endif
