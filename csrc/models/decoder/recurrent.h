/* decoder/recurrent.h: what mixers with a state share: the rows of a sequence in a row block, and causal convolutions.
 *
 * A pass goes through a layer row block by row block, so the state of a sequence moves along: a row block finds the
 * state that the one before it has left. */
#ifndef MP_MODELS_DECODER_RECURRENT_H
#define MP_MODELS_DECODER_RECURRENT_H

#include "models/decoder/pass.h"
#include "models/generation/states.h"

typedef struct mp_state_rows { /* the rows of one sequence in the current row block */
    const mp_row_seq *seq;
    int first, rows; /* the first row, within the row block; number of rows */
    int done;        /* rows of the sequence in earlier row blocks of the pass */
} mp_state_rows;

/* Sets *part to the rows of the sequence with index `s`. Returns false if it has none in the row block. */
static inline bool mp_state_rows_of(const mp_decoder_pass *pass, const mp_decoder_view *view, int s,
                                    mp_state_rows *part) {
    const mp_row_seq *seq = &pass->rows.seq[s];
    const int begin = seq->row0 > view->first ? seq->row0 : view->first;
    const int of_view = view->first + view->rows, of_seq = seq->row0 + seq->rows;
    const int end = of_seq < of_view ? of_seq : of_view;
    *part = (mp_state_rows){seq, begin - view->first, end - begin, begin - seq->row0};
    return begin < end;
}

/* Returns the rows at the start of the log that the state lacks: pending rows, or those of earlier row blocks. */
static inline int mp_state_logged(const mp_state_rows *part) {
    return part->done == 0 ? part->seq->pending : part->seq->logs ? part->done : 0;
}

/* Bytes of a convolution's part of the state: the last taps - 1 rows; and of the log. */
size_t mp_causal_conv_state(const mp_causal_conv *conv, size_t *log_bytes);
/* Number of pointers that mp_causal_conv_rows needs for row blocks of M rows. */
static inline size_t mp_causal_conv_pointers(const mp_causal_conv *conv, int M) {
    return (size_t)(M + conv->taps - 1);
}
/* Convolves channels [c0, c1) of the rows x [part->rows, ldx] into y [part->rows, ldy], and adds the rows to the state
 * or to the log, whose parts of the convolution begin at `tail` and `log`. Threads may have different channels.
 * pointers [mp_causal_conv_pointers] scratch. x and y point at row 0 of the row block, channel 0. */
void mp_causal_conv_rows(const mp_causal_conv *conv, const mp_state_rows *part, float *tail, float *log, const float *x,
                         int64_t ldx, float *y, int64_t ldy, int64_t c0, int64_t c1, const float **pointers);

#endif
