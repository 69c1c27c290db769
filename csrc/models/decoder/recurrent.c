#include "models/decoder/recurrent.h"

#include <assert.h>
#include <string.h>

size_t mp_causal_conv_state(const mp_causal_conv *conv, size_t *log_bytes) {
    const size_t row = (size_t)conv->channels * sizeof(float);
    *log_bytes = mp_arena_cost(MP_STATE_LOG * row);
    return mp_arena_cost((size_t)(conv->taps - 1) * row);
}

/* Lists the taps - 1 rows before those of `part`, oldest first. */
static void list_before(const mp_causal_conv *conv, const mp_state_rows *part, const float *tail, const float *log,
                        const float **rows) {
    const int before = conv->taps - 1, logged = mp_state_logged(part);
    for (int i = 0; i < before; i++) {
        const int back = before - i; /* positions before the first row */
        rows[i] = back <= logged ? log + (ptrdiff_t)(logged - back) * conv->channels
                                 : tail + (ptrdiff_t)(before - (back - logged)) * conv->channels;
    }
}

/* Appends `count` rows [count, ld] to the tail, which keeps the last taps - 1 rows. */
static void append(const mp_causal_conv *conv, float *tail, const float *rows, int64_t ld, int count, int64_t c0,
                   int64_t c1) {
    const int before = conv->taps - 1;
    for (int i = 0; i < before; i++) {
        const int from = i + count; /* index in the tail and the rows after it */
        const float *row = from < before ? tail + (ptrdiff_t)from * conv->channels : rows + (from - before) * ld;
        memmove(tail + (ptrdiff_t)i * conv->channels + c0, row + c0, (size_t)(c1 - c0) * sizeof *tail);
    }
}

void mp_causal_conv_rows(const mp_causal_conv *conv, const mp_state_rows *part, float *tail, float *log, const float *x,
                         int64_t ldx, float *y, int64_t ldy, int64_t c0, int64_t c1, const float **pointers) {
    const int before = conv->taps - 1;
    x += part->first * ldx;
    if (c0 >= c1)
        return;
    list_before(conv, part, tail, log, pointers);
    for (int r = 0; r < part->rows; r++)
        pointers[before + r] = x + r * ldx;
    mp_kernels_get()->causal_conv(pointers, c0, conv->kernel + c0, conv->channels, conv->bias ? conv->bias + c0 : NULL,
                                  conv->taps, part->rows, (int)(c1 - c0), y + part->first * ldy + c0, ldy);
    if (part->done == 0)
        append(conv, tail, log, conv->channels, part->seq->pending, c0, c1);
    if (!part->seq->logs) {
        append(conv, tail, x, ldx, part->rows, c0, c1);
        return;
    }
    assert(part->done + part->rows <= MP_STATE_LOG);
    for (int r = 0; r < part->rows; r++)
        memcpy(log + (ptrdiff_t)(part->done + r) * conv->channels + c0, x + r * ldx + c0,
               (size_t)(c1 - c0) * sizeof *log);
}
