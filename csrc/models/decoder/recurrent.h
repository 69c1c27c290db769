/* decoder/recurrent.h: what mixers with a state share: the rows of a sequence in a row block, causal convolutions, and
 * heads with a matrix as state.
 *
 * A pass goes through a layer row block by row block, so the state of a sequence moves along: a row block finds the
 * state that the one before it has left. */
#ifndef MP_MODELS_DECODER_RECURRENT_H
#define MP_MODELS_DECODER_RECURRENT_H

#include "models/decoder/pass.h"
#include "models/generation/states.h"

enum { /* limits of sizes, which keep products of sizes far below 2^63 */
    MP_RECURRENT_WIDTH = 1 << 20, /* channels of a convolution */
    MP_MATRIX_HEADS = 1 << 12,
    MP_MATRIX_DIM = 1 << 10,
};

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
/* Convolves channels [c0, c1) of the rows x [part->rows, ldx] into y [part->rows, ldy], and adds the rows to the state
 * or to the log, whose parts of the convolution begin at `tail` and `log`. Threads may have different channels.
 * pointers [row block + taps - 1] scratch. x and y point at row 0 of the row block, channel 0. */
void mp_causal_conv_rows(const mp_causal_conv *conv, const mp_state_rows *part, float *tail, float *log, const float *x,
                         int64_t ldx, float *y, int64_t ldy, int64_t c0, int64_t c1, const float **pointers);

/* Heads with a matrix as state: mp_state_scan. Their part of the state is the matrices; that of the log, for each row,
 * the keys and u of all heads, and their decays. Returns the bytes of both. */
size_t mp_matrix_state(const mp_matrix_heads *matrix, size_t *log_bytes);
size_t mp_matrix_copy(const mp_matrix_heads *matrix); /* bytes of `copy` of mp_matrix_scan_rows */
/* Scans the rows for the columns that the thread takes (mp_team_next), and adds them to the state. With draft rows, it
 * writes u to the log instead. `state` and `log` point to the heads' part of them, log NULL: the sequence has none.
 * `rows` points at head 0 in row 0 of the row block: keys and queries of neighbouring heads are dk apart, values and
 * outputs dv, decays and betas 1. Its other fields are not read. copy: scratch of the thread. */
void mp_matrix_scan_rows(const mp_matrix_heads *matrix, const mp_team_thread *thread, const mp_state_rows *part,
                         float *state, float *log, const mp_state_scan *rows, float *copy);
/* Writes the keys and decays of draft rows to the log. No thread may still be in mp_matrix_scan_rows. */
void mp_matrix_log_rows(const mp_matrix_heads *matrix, const mp_team_thread *thread, const mp_state_rows *part,
                        float *log, const mp_state_scan *rows);

/* ---- mixers ------------------------------------------------------------------------------------------------------
 * The convolution's parts come first in state and log. Short convolutions have no heads: `matrix` is zero. */

typedef struct mp_recurrent_buffers { /* scratch of a row block */
    float *projected; /* [rows, in.N] */
    float *mixed;     /* [rows, channels] output of the convolution */
    float *o;         /* [rows, mp_matrix_values] */
} mp_recurrent_buffers;

static inline int64_t mp_matrix_values(const mp_matrix_heads *matrix) { return (int64_t)matrix->heads * matrix->dv; }
static inline int64_t mp_matrix_keys(const mp_matrix_heads *matrix) { return (int64_t)matrix->keys * matrix->dk; }

/* Functions of mp_mixer_ops: of all these mixers, and of those with heads. */
void mp_recurrent_needs(const mp_decoder *model, const mp_mixer *mixer, int M, int most_blocks, mp_block_needs *needs);
size_t mp_recurrent_state(const mp_mixer *mixer, size_t *log_bytes);
mp_status mp_matrix_mixer_sizes(const mp_spec *spec, mp_mixer *mixer, mp_error *error);
void mp_matrix_cost(const mp_mixer *mixer, mp_block_cost *cost);

mp_recurrent_buffers mp_recurrent_buffers_of(const mp_decoder_pass *pass, const mp_recurrent *own);
/* A loop over the channels of the convolution, in ranges that are multiples of 16 but for the last one. _next moves it
 * on to the next range [*c0, *c1) that the thread takes; see mp_team_next. */
mp_team_loop mp_recurrent_channels(const mp_decoder_view *view, const mp_recurrent *own);
bool mp_recurrent_next(const mp_decoder_view *view, const mp_recurrent *own, mp_team_loop *loop, int64_t *c0,
                       int64_t *c1);
/* mp_causal_conv_rows of each sequence, channels [c0, c1): y [rows, channels] = convolution(x [rows, in.N]) */
void mp_recurrent_convolve(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_recurrent *own,
                           const float *x, float *y, int64_t c0, int64_t c1);
/* The same for the thread's share of the channels, followed by SiLU. */
void mp_matrix_convolve(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_recurrent *own,
                        const float *x, float *y);
/* mp_matrix_scan_rows and mp_matrix_log_rows of each sequence. Has a barrier between them, and none at the end. */
void mp_matrix_scan(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_recurrent *own,
                    const mp_state_scan *rows);

/* x [n] = log(1 + exp(x)) */
void mp_softplus(float *x, int n);

#endif
