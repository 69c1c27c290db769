#include "models/nn/linear.h"

#include <assert.h>

/* ---- matrices that may be unpacked ------------------------------------------------------------------------------- */

/* Packs one panel into scratch, as a matrix of one panel, and computes rows [m0, m1) with it. */
static void gemm_through_scratch(const mp_panels *panels, const mp_wmat *w, const mp_acts *x, int m0, int m1, int panel,
                                 const mp_epilogue *ep, float *y, int64_t ldy, uint8_t *scratch) {
    int32_t n0 = panel * MP_PANEL_N, left = w->N - n0, n = left < MP_PANEL_N ? left : MP_PANEL_N;
    mp_tensor rows = panels->source;
    rows.data = mp_tensor_row(&panels->source, n0);
    rows.nbytes = panels->source.nbytes / (uint64_t)w->N * (uint64_t)n;
    rows.shape[0] = n;
    mp_wmat one = *w;
    one.N = n;
    one.panels = 1;
    one.data = scratch;
    mp_wmat_pack(&one, &rows, 0, 1);
    mp_epilogue end = ep ? *ep : (mp_epilogue){0};
    if (end.bias)
        end.bias += n0;
    if (end.residual)
        end.residual += n0;
    mp_gemm(&one, x, m0, m1, 0, 1, &end, y + n0, ldy);
}

/* Returns the end of the outputs of the panels before panel1. */
static int outputs_end(const mp_wmat *w, int panel1) { return panel1 < w->panels ? panel1 * MP_PANEL_N : w->N; }

/* Computes with panels [panel0, panel1), none of which was packed a moment ago, without keeping any. */
static void gemm_unpacked(const mp_panels *panels, const mp_wmat *w, const mp_acts *x, int panel0, int panel1,
                          const mp_epilogue *ep, float *y, int64_t ldy, uint8_t *scratch) {
    if (mp_gemm_stored(&panels->source, x, panel0 * MP_PANEL_N, outputs_end(w, panel1), panels->store->fast, ep,
                       (float *)(void *)scratch, y, ldy))
        return;
    for (int p = panel0; p < panel1; p++)
        gemm_through_scratch(panels, w, x, 0, x->M, p, ep, y, ldy, scratch);
}

/* Packs a panel permanently if there is time and no other thread packs it. Returns true if it did; the caller then
 * calls mp_panel_publish. */
static bool keep_panel(mp_panels *panels, const mp_wmat *w, int panel) {
    mp_pack_budget *time = &panels->store->linear_time;
    if (!mp_pack_budget_left(time) || !mp_panel_claim(panels, 0, panel))
        return false;
    mp_wmat whole = *w;
    mp_pack_budget_pack(time, &whole, &panels->source, panel, panel + 1);
    return true;
}

void mp_panels_gemm(mp_panels *panels, const mp_wmat *w, const mp_acts *x, int panel0, int panel1,
                    const mp_epilogue *ep, float *y, int64_t ldy, uint8_t *panel_scratch) {
    for (int p = panel0, end; p < panel1; p = end) {
        end = p;
        while (end < panel1 && mp_panel_is_packed(panels, 0, end))
            end++;
        if (end > p) {
            mp_gemm(w, x, 0, x->M, p, end, ep, y, ldy);
            continue;
        }
        do /* panel p counts as unpacked, even if another thread has packed it since */
            end++;
        while (end < panel1 && !mp_panel_is_packed(panels, 0, end));
        /* OpenBLAS multiplies stored rows, and needs large products: it gets all panels up to the next packed one.
         * These are packed afterwards, for later passes. */
        const int outputs = outputs_end(w, end) - p * MP_PANEL_N;
        const bool by_blas = mp_gemm_stored_by_blas(&panels->source, x, outputs, panels->store->fast);
        if (!by_blas && keep_panel(panels, w, p)) {
            end = p + 1;
            mp_gemm(w, x, 0, x->M, p, end, ep, y, ldy);
            mp_panel_publish(panels, 0, p);
            continue;
        }
        gemm_unpacked(panels, w, x, p, end, ep, y, ldy, panel_scratch);
        for (int panel = p; by_blas && panel < end; panel++)
            if (keep_panel(panels, w, panel))
                mp_panel_publish(panels, 0, panel);
    }
}

void mp_linear_row(const mp_linear *linear, int part, int32_t n, float *out) {
    const mp_wmat *w = &linear->w[part];
    const mp_panels *panels = linear->panels[part];
    if (!panels || mp_panel_is_packed(panels, 0, n / MP_PANEL_N))
        mp_wmat_row(w, n, out);
    else
        mp_dequantize_row(panels->source.dtype, mp_tensor_row(&panels->source, n), w->K, out);
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

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

/* Sets up the activations of every part. Unless x is NULL, fills in the rows that the thread takes. Returns true if
 * threads read activations that other threads prepared, which requires a barrier. */
static bool linear_prepare(const mp_linear *linear, const mp_team_thread *thread, const float *x, int64_t ldx, int M,
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
        shared |= kind != MP_A_F32;
        if (x && kind == MP_A_F32)
            mp_acts_fill(&acts[p], x, ldx, 0, 0); /* points to x, on every thread */
        if (!x || kind == MP_A_F32)
            continue;
        mp_team_loop loop = mp_team_rows(thread, M, linear->K);
        while (mp_team_next(thread, &loop))
            mp_acts_fill(&acts[p], x, ldx, (int)loop.begin, (int)loop.end);
    }
    return shared;
}

/* Returns the rows of the parts into which threads divide the product of a panel, if it has many rows: a matrix has few
 * panels for a dozen threads, and a slow thread that takes the last one lets the others wait. Tiles of the vector
 * kernels and of mp_gemm_acts are not cut. Panels that stay unpacked have one part, because each part would unpack them
 * again. So have those of float32 that are packed on use: OpenBLAS multiplies all rows by the stored weights, and its
 * bits may depend on their number. */
static int part_rows(const mp_linear *linear, const mp_team_thread *thread, int M) {
    enum { TILES = 48, MOST_PARTS = 4 };
    for (int p = 0; p < linear->parts; p++)
        if (linear->panels[p] && (linear->panels[p]->store->mapped || linear->panels[p]->source.dtype == MP_F32))
            return M;
    return thread->count == 1 ? M : ((M + MOST_PARTS - 1) / MOST_PARTS + TILES - 1) / TILES * TILES;
}

static int parts_of(int M, int each) { return M > each ? (M + each - 1) / each : 1; }

/* Returns the bytes of weights in the smallest range of a product of M rows, whose panels have `parts` parts: at least
 * a part, and as many as a thread reads in about 20 us or multiplies in 25. */
static int64_t least_bytes(const mp_linear *linear, int M, int parts) {
    const int64_t least = (512 << 10) / (1 + M / 8) / (parts > 1 ? 2 : 1);
    const int64_t part = (int64_t)linear->w[0].panel_bytes / parts;
    return least > part ? least : part;
}

/* Multiplies rows [m0, m1) by one panel. */
static void multiply_rows(mp_panels *panels, const mp_wmat *w, const mp_acts *acts, int m0, int m1, int panel,
                          uint8_t *panel_scratch, const mp_epilogue *ep, float *y, int64_t ldy) {
    if (!panels || mp_panel_is_packed(panels, 0, panel)) {
        mp_gemm(w, acts, m0, m1, panel, panel + 1, ep, y, ldy);
    } else if (keep_panel(panels, w, panel)) {
        mp_gemm(w, acts, m0, m1, panel, panel + 1, ep, y, ldy);
        mp_panel_publish(panels, 0, panel);
    } else {
        gemm_through_scratch(panels, w, acts, m0, m1, panel, ep, y, ldy, panel_scratch);
    }
}

/* Computes the parts of panels, of `each` rows, whose first byte is in [begin, end) of the bytes of all matrices. The
 * bytes of a panel are divided among its parts. */
static void multiply_range(const mp_linear *linear, uint64_t begin, uint64_t end, const mp_acts *acts, int M, int each,
                           uint8_t *panel_scratch, const mp_epilogue *ep, float *y, int64_t ldy) {
    const uint64_t parts = (uint64_t)parts_of(M, each);
    uint64_t at = 0;
    for (int p = 0; p < linear->parts; p++) {
        const mp_wmat *w = &linear->w[p];
        const uint64_t size = w->panel_bytes, all = (uint64_t)w->panels * parts;
        uint64_t from = begin <= at ? 0 : ((begin - at) * parts + size - 1) / size;
        uint64_t to = end <= at ? 0 : ((end - at) * parts + size - 1) / size;
        at += (uint64_t)w->panels * size;
        if (to > all)
            to = all;
        if (from >= to)
            continue;
        mp_epilogue part = ep ? *ep : (mp_epilogue){0};
        part.bias = linear->bias ? linear->bias + linear->column[p] : NULL;
        if (part.residual)
            part.residual += linear->column[p];
        mp_panels *panels = linear->panels[p];
        for (uint64_t past; from < to; from = past) {
            const int panel = (int)(from / parts), first = (int)(from % parts);
            const bool whole = first == 0 && to - from >= parts;
            past = whole ? to - to % parts : to < (from / parts + 1) * parts ? to : (from / parts + 1) * parts;
            const int m1 = (int)(past - from + (uint64_t)first) * each;
            if (!whole)
                multiply_rows(panels, w, &acts[p], first * each, m1 < M ? m1 : M, panel, panel_scratch, &part,
                              y + linear->column[p], ldy);
            else if (panels && mp_panels_left(panels, 0))
                mp_panels_gemm(panels, w, &acts[p], panel, (int)(past / parts), &part, y + linear->column[p], ldy,
                               panel_scratch);
            else
                mp_gemm(w, &acts[p], 0, M, panel, (int)(past / parts), &part, y + linear->column[p], ldy);
        }
    }
}

/* Computes the parts of panels that the thread takes. */
static void linear_multiply(const mp_linear *linear, const mp_team_thread *thread, const mp_acts *acts, int M,
                            uint8_t *panel_scratch, const mp_epilogue *ep, float *y, int64_t ldy) {
    uint64_t total = 0;
    for (int p = 0; p < linear->parts; p++)
        total += (uint64_t)linear->w[p].panels * linear->w[p].panel_bytes;
    const int each = part_rows(linear, thread, M);
    mp_team_loop loop = mp_team_shared((int64_t)total, least_bytes(linear, M, parts_of(M, each)));
    while (mp_team_next(thread, &loop))
        multiply_range(linear, (uint64_t)loop.begin, (uint64_t)loop.end, acts, M, each, panel_scratch, ep, y, ldy);
}

void mp_linear_forward(const mp_linear *linear, const mp_team_thread *thread, const float *x, int64_t ldx, int M,
                       void *scratch, void *private_scratch, uint8_t *panel_scratch, const mp_epilogue *ep,
                       float *y, int64_t ldy) {
    const bool alone = x && private_scratch && M <= MP_PRIVATE_ROWS;
    const mp_team_thread single = mp_team_single();
    mp_acts acts[MP_LINEAR_PARTS];
    bool shared = linear_prepare(linear, alone ? &single : thread, x, ldx, M, alone ? private_scratch : scratch, acts);
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
    mp_panels *panels = linear->panels[0];
    mp_acts acts[MP_LINEAR_PARTS];
    if (linear_prepare(linear, thread, x, ldx, M, scratch, acts))
        mp_team_barrier(thread);
    const int each = tile_panels(M);
    const int64_t ld = (int64_t)each * MP_PANEL_N;
    mp_team_loop loop = mp_team_shared((w->panels + each - 1) / each, 1);
    while (mp_team_next(thread, &loop))
        for (int p = (int)loop.begin * each; p < loop.end * each && p < w->panels; p += each) {
            const int past = p + each < w->panels ? p + each : w->panels;
            const int32_t column = p * MP_PANEL_N, last = past < w->panels ? past * MP_PANEL_N : w->N;
            /* the kernels index outputs from column 0 of the whole layer on */
            float *const y = (float *)((uintptr_t)tile - (uintptr_t)column * sizeof(float));
            if (panels && mp_panels_left(panels, 0))
                mp_panels_gemm(panels, w, acts, p, past, &ep, y, ld, panel_scratch);
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
        view.panels[p] = linear->panels[first + p];
        view.N += view.w[p].N;
    }
    view.updates = linear->updates;
    view.first = linear->first + first;
    return view;
}

bool mp_linear_fits(const mp_linear *linear, const mp_linear *next) {
    const bool gated = linear->parts == 2 && linear->w[0].N == linear->w[1].N;
    for (int i = 0; i < linear->parts; i++)
        if (linear->panels[i] && linear->panels[i]->store->mapped)
            return false;
    return (gated || linear->parts == 1) && next->parts == 1 && linear->w[0].N <= next->K &&
           next->K % MP_PANEL_N == 0 && mp_gemm_acts_can(linear->w[0].N, (mp_akind)next->acts[0]);
}

void mp_linear_lead(const mp_linear *next, const mp_team_thread *thread, const float *x, int64_t ldx, int32_t n, int M,
                    void *next_scratch) {
    mp_acts acts;
    mp_acts_init(&acts, (mp_akind)next->acts[0], M, next->K, next_scratch);
    mp_team_loop loop = mp_team_rows(thread, M, n);
    while (mp_team_next(thread, &loop))
        mp_acts_fill_first(&acts, x, ldx, n, (int)loop.begin, (int)loop.end);
}

void mp_linear_into(const mp_linear *linear, const mp_linear *next, const mp_team_thread *thread, const float *x,
                    int64_t ldx, int M, void *scratch, mp_act act, void *next_scratch) {
    assert(mp_linear_fits(linear, next));
    mp_acts acts[MP_LINEAR_PARTS], out;
    mp_gemm_part parts[2];
    if (linear_prepare(linear, thread, x, ldx, M, scratch, acts))
        mp_team_barrier(thread);
    mp_acts_init(&out, (mp_akind)next->acts[0], M, next->K, next_scratch);
    for (int i = 0; i < linear->parts; i++)
        parts[i] = (mp_gemm_part){.w = &linear->w[i],
                                  .x = &acts[i],
                                  .bias = linear->bias ? linear->bias + linear->column[i] : NULL};
    const int each = part_rows(linear, thread, M), rows = parts_of(M, each);
    const int64_t panel_bytes = (int64_t)linear->w[0].panel_bytes;
    const int64_t least = (least_bytes(linear, M, rows) * rows + panel_bytes - 1) / panel_bytes; /* at least 1 */
    mp_team_loop loop = mp_team_shared((int64_t)linear->w[0].panels * rows, least);
    while (mp_team_next(thread, &loop))
        for (int64_t from = loop.begin, past; from < loop.end; from = past) {
            const int64_t panel = from / rows, first = from % rows, next = (panel + 1) * rows;
            const bool whole = first == 0 && loop.end >= next;
            past = whole ? loop.end - loop.end % rows : loop.end < next ? loop.end : next;
            const int64_t m1 = whole ? M : (first + past - from) * each;
            mp_gemm_acts(parts, linear->parts, act, (int)first * each, (int)(m1 < M ? m1 : M), (int)panel,
                         (int)(whole ? past / rows : panel + 1), &out);
        }
}
