/* nn/stored.h: matrices that are packed as they are used, instead of all of them before their model's first step.
 *
 * Packing copies all weights into memory that nobody has touched yet, which takes longer than a step. Until a panel is
 * packed, whoever needs it packs it into scratch of its own and computes with that: the same kernels on the same bytes,
 * so the same bits. Beyond that each pass has some time to keep what it packs; then the source pages of a matrix go
 * back when its last panel is kept, and memory holds the weights once, as ever.
 *
 * Any number of engines may use a matrix at the same time. In the child of a fork a panel that a thread of the parent
 * was keeping just then counts as stored. (In a child's child it stays so for good: slower, not wrong.) */
#ifndef MP_MODELS_NN_STORED_H
#define MP_MODELS_NN_STORED_H

#include <stdatomic.h>

#include "base/forked.h"
#include "base/team.h"
#include "files/weights.h"
#include "kernels/kernels.h"
#include "models/engine.h"

typedef struct mp_stored_part {
    struct mp_stored *all;
    mp_tensor tensor;
    int32_t panels;
    _Atomic uint8_t *state; /* [panels] stored, being kept, packed */
    _Atomic int32_t left;   /* panels that are not packed */
} mp_stored_part;

typedef struct mp_stored {
    const mp_weights *weights;
    mp_forked forked;
    size_t scratch;                /* bytes that a lane needs */
    uint64_t keep_ns, keep_row_ns; /* time that a pass takes for keeping: by itself, and for each of its rows */
    _Atomic int32_t left;          /* parts with panels left */
    _Atomic bool used, corrupted;
    int32_t count, capacity;
    mp_stored_part parts[]; /* [capacity] */
} mp_stored;

typedef struct mp_unpacked { /* a lane's, for one pass */
    uint8_t *scratch;        /* stored->scratch bytes */
    uint64_t keep_until_ns;
} mp_unpacked;

/* Room for `capacity` matrices. NULL when memory is refused. */
mp_stored *mp_stored_create(const mp_weights *weights, int capacity);
void mp_stored_destroy(mp_stored *stored); /* NULL is legal */
/* Take a matrix whose data is not filled yet; the part is the stored's. */
mp_status mp_stored_add(mp_stored *stored, const mp_wmat *w, const mp_tensor *tensor, mp_stored_part **part,
                        mp_error *error);
/* Fetch the source pages on all lanes, so that the first pass does not wait for each of them. */
void mp_stored_fetch(const mp_stored *stored, mp_lease *lease, mp_progress *progress);

/* True while a panel is unpacked; once false, it stays false. NULL: false. */
static inline bool mp_stored_left(const mp_stored *stored) {
    return stored && atomic_load_explicit(&stored->left, memory_order_acquire) > 0;
}
/* Before a pass of M rows: until when to keep what it packs. The first keeps little, so that it is soon over. */
uint64_t mp_stored_begin(mp_stored *stored, int M);
/* After a pass in which something was unpacked: the files are those that were loaded. From false on it stays false, and
 * mp_stored_corrupted true: what was packed may be wrong. NULL is not. */
bool mp_stored_sound(mp_stored *stored);
bool mp_stored_corrupted(const mp_stored *stored);

/* mp_gemm of all rows with panels [panel0, panel1) of a matrix that was taken. */
void mp_stored_gemm(mp_stored_part *part, const mp_wmat *w, const mp_acts *x, int M, int panel0, int panel1,
                    const mp_epilogue *ep, float *y, int64_t ldy, const mp_unpacked *own);
/* mp_wmat_row of it. */
void mp_stored_row(const mp_stored_part *part, const mp_wmat *w, int32_t n, float *out);

#endif
