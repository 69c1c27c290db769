/* nn/row_context.h: the row context, which every block of nn/ takes beside its weights and its rows.
 *
 * Rows of many sequences stand packed behind each other. A sequence is a range of rows that see each other; the
 * position of a row is its number within its sequence. All lanes of a region call a block with the same rows and a
 * context of their own; blocks share the rows or the outputs out among the lanes. */
#ifndef MP_MODELS_NN_ROW_CONTEXT_H
#define MP_MODELS_NN_ROW_CONTEXT_H

#include "models/nn/linear.h"

typedef struct mp_row_span { /* the rows of one sequence */
    int64_t row0;
    int32_t rows;
} mp_row_span;

typedef struct mp_row_context {
    const mp_team_thread *thread; /* the calling lane */
    const mp_row_span *spans;    /* [n_spans], or NULL where no block asks for sequences */
    int n_spans;
    void *acts;                  /* shared: prepared activations, mp_linear_scratch of the largest layer */
    void *own_acts;              /* the lane's own, used for up to MP_PRIVATE_ROWS rows; may be NULL */
    const mp_unpacked *unpacked; /* as of mp_linear_forward */
    /* NULL: barriers are plain. Else `meet` is a barrier at which all lanes learn alike whether to continue (false: the
     * step is over, and what the block was to write is unfinished); `poll` returns true when what has no barriers until
     * the next meet may be left undone. */
    bool (*meet)(void *arg);
    bool (*poll)(void *arg);
    void *arg;
} mp_row_context;

/* A barrier between two blocks. False: every lane leaves. */
static inline bool mp_row_meet(const mp_row_context *context) {
    if (context->meet)
        return context->meet(context->arg);
    mp_team_barrier(context->thread);
    return true;
}

/* y [M, ldy] = linear(x [M, ldx]). Ends WITHOUT a barrier. */
static inline void mp_row_linear(const mp_row_context *context, const mp_linear *linear, const float *x, int64_t ldx,
                                 int M, const mp_epilogue *ep, float *y, int64_t ldy) {
    mp_linear_forward(linear, context->thread, x, ldx, M, context->acts, context->own_acts, context->unpacked, ep, y,
                      ldy);
}

#endif
