/* nn/row_context.h: the row context, an argument of every block of nn/ in addition to its weights and rows.
 *
 * The rows of many sequences are packed one after another. A sequence is a range of rows that attend to each other; the
 * position of a row is its index within its sequence. All threads of a region call a block with the same rows, each
 * thread with its own context. Blocks divide the rows or the outputs among the threads. */
#ifndef MP_MODELS_NN_ROW_CONTEXT_H
#define MP_MODELS_NN_ROW_CONTEXT_H

#include "models/nn/linear.h"

typedef struct mp_row_span { /* the rows of one sequence, or a range of them */
    int64_t row0;
    int32_t rows;
    int32_t keys; /* rows that are attended to, the first of the sequence; 0: all */
} mp_row_span;

typedef struct mp_row_context {
    const mp_team_thread *thread; /* the calling thread */
    const mp_row_span *spans;    /* [n_spans], or NULL if no block needs sequences */
    int n_spans;
    const mp_row_span *wanted;   /* [n_spans] the rows of each sequence that are queries of attention: see
                                  * nn/transformer.h. NULL: all rows */
    void *acts;                  /* shared: prepared activations, mp_linear_scratch of the largest layer */
    void *own_acts;              /* private to the thread, for up to MP_PRIVATE_ROWS rows; may be NULL */
    uint8_t *panel_scratch;      /* as in mp_linear_forward */
    const uint8_t *adapters;     /* [M] number of the adapter of each row, 0: none; NULL: no row has one */
    const uint8_t *wanted_adapters; /* the same of the wanted rows, in order; NULL: no row has one. If it is set, the
                                     * range of rows must begin with the first row of the pass */
    const float *const *inputs;  /* [M] inputs of each row besides the row (mp_mlp.has_inputs); NULL: there are none */
    float *low_rank;             /* [M, low_rank_width] shared: products of rows and A, if there are adapters */
    int32_t low_rank_width;      /* `width` of the model's adapters */
    int least_joined; /* minimum rows for computing two layers panel by panel (mp_linear_into); 0: any number. With few
                       * rows, reading the weights from memory takes the time, and reading two matrices one after the
                       * other is faster than alternating between them */
    mp_lease *lease;  /* experts report progress to it; or NULL */
    /* NULL: plain barriers. Otherwise `meet` is a barrier that returns the same value to all threads: true to continue,
     * false if the step is over, which leaves the block's output unfinished. `poll` returns true if work up to the next
     * meet may be skipped. */
    bool (*meet)(void *arg);
    bool (*poll)(void *arg);
    void *arg;
} mp_row_context;

/* Waits at a barrier between two blocks. Returns false if the step is over; every thread must then return. */
static inline bool mp_row_meet(const mp_row_context *context) {
    if (context->meet)
        return context->meet(context->arg);
    mp_team_barrier(context->thread);
    return true;
}

/* See nn/adapter.h. */
void mp_adapter_forward(const mp_row_context *context, const mp_linear *linear, const float *x, int64_t ldx, int M,
                        const mp_epilogue *ep, float *y, int64_t ldy);

/* y [M, ldy] = linear(x [M, ldx]), with the adapters of the rows. Ends WITHOUT a barrier. */
static inline void mp_row_linear(const mp_row_context *context, const mp_linear *linear, const float *x, int64_t ldx,
                                 int M, const mp_epilogue *ep, float *y, int64_t ldy) {
    if (linear->updates && context->adapters) {
        mp_adapter_forward(context, linear, x, ldx, M, ep, y, ldy);
        return;
    }
    mp_linear_forward(linear, context->thread, x, ldx, M, context->acts, context->own_acts,
                      context->panel_scratch, ep, y, ldy);
}

#endif
