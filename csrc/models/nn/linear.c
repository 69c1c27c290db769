#include "models/nn/linear.h"

#include <assert.h>
#include <stdatomic.h>

/* Parts usually take the same type of activations; each distinct type is prepared once. */
static bool first_of_kind(const mp_linear *linear, int part) {
    for (int i = 0; i < part; i++)
        if (linear->acts[i] == linear->acts[part])
            return false;
    return true;
}

size_t mp_linear_scratch(const mp_linear *linear, int M) {
    size_t bytes = 0;
    for (int p = 0; p < linear->parts; p++)
        if (first_of_kind(linear, p))
            bytes += mp_arena_cost(mp_acts_bytes(linear->acts[p], M, linear->K));
    return bytes;
}

/* Sets up the activations of every part, and fills in the thread's rows unless x is NULL. Returns true if threads read
 * activations that other threads prepared, which requires a barrier. */
static bool linear_prepare(const mp_linear *linear, const float *x, int64_t ldx, int M, int64_t row0, int64_t row1,
                           uint8_t *memory, mp_acts *acts) {
    bool shared = false;
    for (int p = 0; p < linear->parts; p++) {
        if (!first_of_kind(linear, p)) {
            for (int i = 0; i < p; i++)
                if (linear->acts[i] == linear->acts[p]) {
                    acts[p] = acts[i];
                    break;
                }
            continue;
        }
        mp_akind kind = linear->acts[p];
        mp_acts_init(&acts[p], kind, M, linear->K, memory);
        memory += mp_arena_cost(mp_acts_bytes(kind, M, linear->K));
        if (x)
            mp_acts_fill(&acts[p], x, ldx, (int)row0, (int)row1);
        shared |= kind != MP_A_F32;
    }
    return shared;
}

/* Computes the thread's contiguous range of the panels of all parts. The ranges are balanced by bytes of weights. */
static void linear_multiply(const mp_linear *linear, const mp_team_thread *thread, const mp_acts *acts, int M,
                            uint8_t *panel_scratch, const mp_epilogue *ep, float *y, int64_t ldy) {
    uint64_t total = 0;
    for (int p = 0; p < linear->parts; p++)
        total += (uint64_t)linear->w[p].panels * linear->w[p].panel_bytes;
    uint64_t begin = total * (uint64_t)thread->index / (uint64_t)thread->count;
    uint64_t end = total * (uint64_t)(thread->index + 1) / (uint64_t)thread->count;
    uint64_t at = 0;
    for (int p = 0; p < linear->parts; p++) {
        const mp_wmat *w = &linear->w[p];
        /* panel i of this part belongs to the thread whose range contains its first byte */
        uint64_t size = w->panel_bytes;
        uint64_t from = begin <= at ? 0 : (begin - at + size - 1) / size;
        uint64_t to = end <= at ? 0 : (end - at + size - 1) / size;
        at += (uint64_t)w->panels * size;
        if (to > (uint64_t)w->panels)
            to = (uint64_t)w->panels;
        if (from >= to)
            continue;
        mp_epilogue part = ep ? *ep : (mp_epilogue){0};
        part.bias = linear->bias ? linear->bias + linear->column[p] : NULL;
        if (part.residual)
            part.residual += linear->column[p];
        mp_stored_part *stored = linear->stored[p];
        if (stored && atomic_load_explicit(&stored->left, memory_order_acquire) > 0)
            mp_stored_gemm(stored, w, &acts[p], (int)from, (int)to, &part, y + linear->column[p], ldy, panel_scratch);
        else
            mp_gemm(w, &acts[p], 0, M, (int)from, (int)to, &part, y + linear->column[p], ldy);
    }
}

void mp_linear_forward(const mp_linear *linear, const mp_team_thread *thread, const float *x, int64_t ldx, int M,
                       void *scratch, void *private_scratch, uint8_t *panel_scratch, const mp_epilogue *ep,
                       float *y, int64_t ldy) {
    const bool alone = x && private_scratch && M <= MP_PRIVATE_ROWS;
    int64_t row0 = 0, row1 = x ? M : 0;
    if (!alone)
        mp_team_split(thread, row1, 1, &row0, &row1);
    mp_acts acts[MP_LINEAR_PARTS];
    bool shared = linear_prepare(linear, x, ldx, M, row0, row1, alone ? private_scratch : scratch, acts);
    if (x && shared && !alone)
        mp_team_barrier(thread);
    linear_multiply(linear, thread, acts, M, panel_scratch, ep, y, ldy);
}

enum { TILE_FLOATS = 32768, TILE_PANELS = 8 };

/* Panels of a tile of M rows: about 128 KiB, which stays in L2 beside the activations, and at most 8. */
static int tile_panels(int M) {
    const int fit = TILE_FLOATS / (MP_PANEL_N * (M > 0 ? M : 1));
    return fit < 1 ? 1 : fit < TILE_PANELS ? fit : TILE_PANELS;
}

size_t mp_linear_tile(int M) {
    const size_t panel = (size_t)M * MP_PANEL_N;
    return panel * TILE_PANELS < TILE_FLOATS ? panel * TILE_PANELS : panel > TILE_FLOATS ? panel : TILE_FLOATS;
}

void mp_linear_tiles(const mp_linear *linear, const mp_team_thread *thread, const float *x, int64_t ldx, int M,
                     void *scratch, uint8_t *panel_scratch, float *tile, mp_tile_taker *take, void *arg) {
    assert(linear->parts == 1);
    const mp_wmat *w = &linear->w[0];
    const mp_epilogue ep = {.bias = linear->bias};
    mp_stored_part *stored = linear->stored[0];
    mp_acts acts[MP_LINEAR_PARTS];
    int64_t row0, row1;
    mp_team_split(thread, M, 1, &row0, &row1);
    if (linear_prepare(linear, x, ldx, M, row0, row1, scratch, acts))
        mp_team_barrier(thread);
    const int end = (int)((int64_t)w->panels * (thread->index + 1) / thread->count), each = tile_panels(M);
    const int64_t ld = (int64_t)each * MP_PANEL_N;
    for (int p = (int)((int64_t)w->panels * thread->index / thread->count); p < end; p += each) {
        const int past = p + each < end ? p + each : end;
        const int32_t column = p * MP_PANEL_N, last = past < w->panels ? past * MP_PANEL_N : w->N;
        /* the kernels index outputs from column 0 of the whole layer on */
        float *const y = (float *)((uintptr_t)tile - (uintptr_t)column * sizeof(float));
        if (stored && atomic_load_explicit(&stored->left, memory_order_acquire) > 0)
            mp_stored_gemm(stored, w, acts, p, past, &ep, y, ld, panel_scratch);
        else
            mp_gemm(w, acts, 0, M, p, past, &ep, y, ld);
        take(arg, column, last - column, tile, ld);
    }
}

mp_linear mp_linear_view(const mp_linear *linear, int first, int count) {
    assert(first >= 0 && first + count <= linear->parts);
    mp_linear view = {.parts = count, .bias = linear->bias, .K = linear->K};
    for (int p = 0; p < count; p++) {
        view.w[p] = linear->w[first + p];
        view.column[p] = linear->column[first + p];
        view.acts[p] = linear->acts[first + p];
        view.stored[p] = linear->stored[first + p];
        view.N += view.w[p].N;
    }
    view.updates = linear->updates;
    view.first = linear->first + first;
    return view;
}

bool mp_linear_fits(const mp_linear *linear, const mp_linear *next) {
    const bool gated = linear->parts == 2 && linear->w[0].N == linear->w[1].N;
    for (int i = 0; i < linear->parts; i++)
        if (linear->stored[i] && linear->stored[i]->all->mapped)
            return false;
    return (gated || linear->parts == 1) && next->parts == 1 && linear->w[0].N <= next->K &&
           next->K % MP_PANEL_N == 0 && mp_gemm_acts_can(linear->w[0].N, (mp_akind)next->acts[0]);
}

void mp_linear_lead(const mp_linear *next, const mp_team_thread *thread, const float *x, int64_t ldx, int32_t n, int M,
                    void *next_scratch) {
    mp_acts acts;
    int64_t row0, row1;
    mp_team_split(thread, M, 1, &row0, &row1);
    mp_acts_init(&acts, (mp_akind)next->acts[0], M, next->K, next_scratch);
    mp_acts_fill_first(&acts, x, ldx, n, (int)row0, (int)row1);
}

void mp_linear_into(const mp_linear *linear, const mp_linear *next, const mp_team_thread *thread, const float *x,
                    int64_t ldx, int M, void *scratch, mp_act act, void *next_scratch) {
    assert(mp_linear_fits(linear, next));
    mp_acts acts[MP_LINEAR_PARTS], out;
    mp_gemm_part parts[2];
    int64_t row0, row1, panel0, panel1;
    mp_team_split(thread, M, 1, &row0, &row1);
    if (linear_prepare(linear, x, ldx, M, row0, row1, scratch, acts))
        mp_team_barrier(thread);
    mp_acts_init(&out, (mp_akind)next->acts[0], M, next->K, next_scratch);
    mp_team_split(thread, linear->w[0].panels, 1, &panel0, &panel1);
    for (int i = 0; i < linear->parts; i++)
        parts[i] = (mp_gemm_part){.w = &linear->w[i],
                                  .x = &acts[i],
                                  .bias = linear->bias ? linear->bias + linear->column[i] : NULL};
    mp_gemm_acts(parts, linear->parts, act, 0, M, (int)panel0, (int)panel1, &out);
}
