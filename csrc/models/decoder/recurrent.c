#include "models/decoder/recurrent.h"

#include <assert.h>
#include <math.h>
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

/* Return a part of the sequence's state and log. The log is NULL if the sequence has none. */
static float *state_of(const mp_state_rows *part, size_t offset) {
    return (float *)(void *)(part->seq->state + offset);
}
static float *log_of(const mp_state_rows *part, size_t offset) {
    return part->seq->log ? (float *)(void *)(part->seq->log + offset) : NULL;
}

enum { CHANNELS = 16 }; /* a unit of the loop */

mp_team_loop mp_recurrent_channels(const mp_decoder_view *view, const mp_recurrent *own) {
    return mp_team_rows(view->context.thread, (own->conv.channels + CHANNELS - 1) / CHANNELS,
                        (int64_t)view->rows * own->conv.taps * CHANNELS);
}

bool mp_recurrent_next(const mp_decoder_view *view, const mp_recurrent *own, mp_team_loop *loop, int64_t *c0,
                       int64_t *c1) {
    if (!mp_team_next(view->context.thread, loop))
        return false;
    *c0 = loop->begin * CHANNELS;
    *c1 = loop->end * CHANNELS < own->conv.channels ? loop->end * CHANNELS : own->conv.channels;
    return true;
}

void mp_recurrent_convolve(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_recurrent *own,
                           const float *x, float *y, int64_t c0, int64_t c1) {
    mp_state_rows part;
    for (int s = 0; s < pass->rows.n_seq; s++)
        if (mp_state_rows_of(pass, view, s, &part))
            mp_causal_conv_rows(&own->conv, &part, state_of(&part, own->state_at), log_of(&part, own->log_at), x,
                                own->in.N, y, own->conv.channels, c0, c1, (const float **)(void *)view->own);
}

/* ---- heads with a matrix as state -------------------------------------------------------------------------------- */

static int blocks_of(const mp_matrix_heads *matrix) { return (matrix->dv + MP_STATE_BLOCK - 1) / MP_STATE_BLOCK; }

/* Returns the floats of the matrix of a head. */
static ptrdiff_t matrix_floats(const mp_matrix_heads *matrix) {
    return (ptrdiff_t)blocks_of(matrix) * matrix->dk * MP_STATE_BLOCK;
}

mp_status mp_matrix_mixer_sizes(const mp_spec *spec, mp_mixer *mixer, mp_error *error) {
    mp_recurrent *own = &mixer->recurrent;
    int64_t taps, dk, keys, heads, inner;
    bool tiled = false;
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.conv_kernel", 2, MP_BUILDER_TAPS, NULL, &taps, error));
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.state_size", 1, MP_MATRIX_DIM, NULL, &dk, error));
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.group_count", 1, MP_MATRIX_HEADS, NULL, &keys, error));
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.time_step_rank", 1, MP_MATRIX_HEADS, NULL, &heads, error));
    MP_TRY(mp_spec_int(spec, "{arch}.ssm.inner_size", heads, heads * MP_MATRIX_DIM, NULL, &inner, error));
    MP_TRY(mp_spec_bool(spec, "mpool.tiled_heads", &tiled, &tiled, error));
    if (heads % keys != 0 || inner % heads != 0 || 2 * keys * dk + inner > MP_RECURRENT_WIDTH)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "sizes of recurrent layers",
                            "ssm.time_step_rank a multiple of ssm.group_count, ssm.inner_size one of "
                            "ssm.time_step_rank, and at most 1,048,576 channels",
                            "%lld, %lld and %lld", (long long)heads, (long long)keys, (long long)inner);
    own->matrix = (mp_matrix_heads){(int32_t)heads, (int32_t)keys, (int32_t)dk, (int32_t)(inner / heads), tiled};
    own->conv.channels = (int32_t)(2 * keys * dk + inner);
    own->conv.taps = (int32_t)taps;
    return MP_OK;
}

size_t mp_matrix_copy(const mp_matrix_heads *matrix) { return (size_t)matrix_floats(matrix) * sizeof(float); }

size_t mp_matrix_state(const mp_matrix_heads *matrix, size_t *log_bytes) {
    const size_t heads = (size_t)matrix->heads;
    const size_t row = (size_t)mp_matrix_keys(matrix) + (size_t)mp_matrix_values(matrix) + heads;
    *log_bytes = mp_arena_cost(MP_STATE_LOG * row * sizeof(float));
    return mp_arena_cost(heads * mp_matrix_copy(matrix));
}

size_t mp_recurrent_state(const mp_mixer *mixer, size_t *log_bytes) {
    size_t conv_log, matrix_log;
    const size_t conv = mp_causal_conv_state(&mixer->recurrent.conv, &conv_log);
    const size_t matrix = mp_matrix_state(&mixer->recurrent.matrix, &matrix_log);
    *log_bytes = conv_log + matrix_log;
    return conv + matrix;
}

/* Returns the bytes of the buffers for M rows, and their places from `at` on in *to unless `to` is NULL. */
static size_t lay_out(const mp_recurrent *own, int M, uint8_t *at, mp_recurrent_buffers *to) {
    const size_t rows = (size_t)M * sizeof(float);
    const size_t projected = rows * (size_t)own->in.N, mixed = rows * (size_t)own->conv.channels;
    const size_t o = rows * (size_t)mp_matrix_values(&own->matrix);
    if (to) {
        to->projected = mp_scratch_take(&at, projected);
        to->mixed = mp_scratch_take(&at, mixed);
        to->o = mp_scratch_take(&at, o);
    }
    return mp_arena_cost(projected) + mp_arena_cost(mixed) + mp_arena_cost(o);
}

mp_recurrent_buffers mp_recurrent_buffers_of(const mp_decoder_pass *pass, const mp_recurrent *own) {
    mp_recurrent_buffers buffers;
    lay_out(own, pass->block_rows, pass->shared, &buffers);
    return buffers;
}

void mp_recurrent_needs(const mp_decoder *model, const mp_mixer *mixer, int M, int most_blocks, mp_block_needs *needs) {
    const mp_recurrent *own = &mixer->recurrent;
    const size_t pointers = (size_t)(M + own->conv.taps - 1) * sizeof(float *);
    (void)model;
    (void)most_blocks;
    mp_needs_linear(needs, &own->in, M);
    mp_needs_linear(needs, &mixer->out, M);
    mp_needs_scratch(needs, lay_out(own, M, NULL, NULL),
                     mp_arena_cost(mp_larger(pointers, mp_matrix_copy(&own->matrix))));
}

void mp_matrix_cost(const mp_mixer *mixer, mp_block_cost *cost) {
    mp_cost_linear(cost, &mixer->recurrent.in);
    mp_cost_linear(cost, &mixer->out);
    cost->barriers += 6;
}

void mp_matrix_convolve(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_recurrent *own,
                        const float *x, float *y) {
    mp_team_loop loop = mp_recurrent_channels(view, own);
    int64_t c0, c1;
    while (mp_recurrent_next(view, own, &loop, &c0, &c1)) {
        mp_recurrent_convolve(pass, view, own, x, y, c0, c1);
        for (int64_t r = 0; r < view->rows; r++)
            mp_kernels_get()->activate(MP_ACT_SILU, c1 - c0, y + r * own->conv.channels + c0);
    }
}

typedef struct matrix_log { /* [MP_STATE_LOG, ld_k], [MP_STATE_LOG, ld_u], [MP_STATE_LOG, heads] */
    float *k, *u, *decay;
    int64_t ld_k, ld_u;
} matrix_log;

static matrix_log log_at(const mp_matrix_heads *matrix, float *log) {
    const int64_t ld_k = mp_matrix_keys(matrix), ld_u = mp_matrix_values(matrix);
    if (!log)
        return (matrix_log){.ld_k = ld_k, .ld_u = ld_u};
    float *const u = log + MP_STATE_LOG * ld_k;
    return (matrix_log){log, u, u + MP_STATE_LOG * ld_u, ld_k, ld_u};
}

/* Scans the rows of `part` for some columns of a head. scan: the head's rows from row part->first on. done: rows of
 * the log, which the state lacks. */
static void scan_head(const mp_state_rows *part, mp_state_scan *scan, mp_state_scan *done, int block0, int block1,
                      float *copy) {
    const mp_kernels *call = mp_kernels_get();
    const ptrdiff_t from = (ptrdiff_t)block0 * scan->dk * MP_STATE_BLOCK;
    const ptrdiff_t to = (ptrdiff_t)block1 * scan->dk * MP_STATE_BLOCK;
    if (part->done == 0 && done->rows > 0)
        call->state_scan(done, block0, block1); /* accepted rows */
    if (part->seq->logs) {
        memcpy(copy + from, scan->state + from, (size_t)(to - from) * sizeof *copy);
        scan->state = done->state = copy;
        if (part->done > 0)
            call->state_scan(done, block0, block1);
    }
    call->state_scan(scan, block0, block1);
}

/* Scans the units [unit, end): by head, then block of columns. */
static void scan_units(const mp_matrix_heads *matrix, const mp_state_rows *part, float *state, const matrix_log *log,
                       const mp_state_scan *rows, int64_t unit, int64_t end, float *copy) {
    const int blocks = blocks_of(matrix);
    while (unit < end) {
        const int head = (int)(unit / blocks), block0 = (int)(unit % blocks);
        const int block1 = end - unit < blocks - block0 ? block0 + (int)(end - unit) : blocks;
        const ptrdiff_t key = (ptrdiff_t)matrix->dk *
                              (matrix->tiled ? head % matrix->keys : head / (matrix->heads / matrix->keys));
        const ptrdiff_t value = (ptrdiff_t)head * matrix->dv;
        mp_state_scan scan = *rows, done = {.dk = matrix->dk, .dv = matrix->dv, .rows = mp_state_logged(part)};
        scan.dk = matrix->dk;
        scan.dv = matrix->dv;
        scan.rows = part->rows;
        scan.state = done.state = state + head * matrix_floats(matrix);
        scan.k += part->first * scan.ldk + key;
        scan.q += part->first * scan.ldq + key;
        scan.v += part->first * scan.ldv + value;
        scan.o += part->first * scan.ldo + value;
        scan.decay += part->first * scan.ld_gates + head;
        scan.beta = rows->beta ? rows->beta + part->first * scan.ld_gates + head : NULL;
        scan.u = part->seq->logs ? log->u + part->done * log->ld_u + value : NULL;
        scan.ldu = log->ld_u;
        if (done.rows > 0) {
            done.k = log->k + key;
            done.v = log->u + value;
            done.decay = log->decay + head;
            done.ldk = log->ld_k;
            done.ldv = log->ld_u;
            done.ld_gates = matrix->heads;
        }
        scan_head(part, &scan, &done, block0, block1, copy);
        unit += block1 - block0;
    }
}

void mp_matrix_scan_rows(const mp_matrix_heads *matrix, const mp_team_thread *thread, const mp_state_rows *part,
                         float *state, float *log, const mp_state_scan *rows, float *copy) {
    enum { LEAST_ROWS = 128 }; /* a unit with so many takes about 20 us with 128 keys */
    const matrix_log at = log_at(matrix, log);
    assert(!part->seq->logs || (log && part->done + part->rows <= MP_STATE_LOG));
    mp_team_loop loop = mp_team_shared((int64_t)matrix->heads * blocks_of(matrix), 1 + LEAST_ROWS / part->rows);
    while (mp_team_next(thread, &loop))
        scan_units(matrix, part, state, &at, rows, loop.begin, loop.end, copy);
}

void mp_matrix_log_rows(const mp_matrix_heads *matrix, const mp_team_thread *thread, const mp_state_rows *part,
                        float *log, const mp_state_scan *rows) {
    const matrix_log at = log_at(matrix, log);
    int64_t begin, end;
    if (!part->seq->logs)
        return;
    mp_team_split(thread, part->rows, 1, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        const int64_t to = part->done + r, from = part->first + r;
        memcpy(at.k + to * at.ld_k, rows->k + from * rows->ldk, (size_t)at.ld_k * sizeof *at.k);
        memcpy(at.decay + to * matrix->heads, rows->decay + from * rows->ld_gates,
               (size_t)matrix->heads * sizeof *at.decay);
    }
}

void mp_matrix_scan(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_recurrent *own,
                    const mp_state_scan *rows) {
    const mp_matrix_heads *matrix = &own->matrix;
    const mp_team_thread *thread = view->context.thread;
    size_t conv_log;
    const size_t at = own->state_at + mp_causal_conv_state(&own->conv, &conv_log), in_log = own->log_at + conv_log;
    mp_state_rows part;
    for (int s = 0; s < pass->rows.n_seq; s++)
        if (mp_state_rows_of(pass, view, s, &part))
            mp_matrix_scan_rows(matrix, thread, &part, state_of(&part, at), log_of(&part, in_log), rows,
                                (float *)(void *)view->own);
    mp_team_barrier(thread);
    for (int s = 0; s < pass->rows.n_seq; s++)
        if (mp_state_rows_of(pass, view, s, &part))
            mp_matrix_log_rows(matrix, thread, &part, log_of(&part, in_log), rows);
}

/* Returns log(1 + e) for e in [0, 1]: 2 atanh(e / (2 + e)), whose series is exact to 1e-11 after eleven terms. All
 * operations are IEEE, so the bits are those of every machine. */
static double log_1p(double e) {
    const double z = e / (2 + e), z2 = z * z;
    double sum = 0;
    for (int i = 10; i >= 0; i--)
        sum = sum * z2 + 1.0 / (2 * i + 1);
    return 2 * z * sum;
}

void mp_softplus(float *x, int n) {
    for (int i = 0; i < n; i++) {
        const float below = -fabsf(x[i]);
        float e;
        mp_kernels_get()->exp_sum(&below, 1, 0, &e);
        x[i] = (float)((x[i] > 0 ? (double)x[i] : 0.0) + log_1p((double)e)); /* NaN: e is NaN */
    }
}
