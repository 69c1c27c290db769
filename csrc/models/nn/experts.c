#include "models/nn/experts.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/sys.h"
#include "models/nn/expert_use.h"

/* ---- loading ----------------------------------------------------------------------------------------------------- */

mp_status mp_experts_keep(const mp_builder *builder, mp_error *error) {
    mp_weight_store *store = builder->store;
    store->reads.name = mp_spec_origin(mp_weights_spec(builder->weights));
    store->reads.blind = !mp_weights_owned(builder->weights);
    if (builder->shared || builder->use == MP_WEIGHTS_MAPPED)
        return MP_OK;
    MP_TRY(mp_weight_store_pack_on_use(store, builder->weights, error));
    store->keeps_experts = true;
    return MP_OK;
}

mp_status mp_experts_init(mp_experts *experts, const mp_experts_shape *shape, const mp_builder *builder,
                          mp_error *error) {
    char name[64], bias[64];
    *experts = (mp_experts){
        .count = shape->count,
        .used = shape->used,
        .hidden = shape->hidden,
        .ffn = shape->ffn,
        .plain = shape->plain,
        .routing = shape->routing,
        .act = shape->act,
        .clamp = shape->clamp,
        .reads = builder->store->reads.name ? &builder->store->reads : NULL,
    };
    const size_t uses_bytes = sizeof *experts->uses + (size_t)shape->count;
    if (experts->reads)
        experts->uses = mp_alloc_zeroed(uses_bytes, MP_TAG_WEIGHTS);
    if (experts->reads && !experts->uses)
        return mp_fail_memory(error, uses_bytes, "the list of used experts");
    /* The router computes in fp32: a rounding error can select another expert, which is not a small error. */
    mp_builder floats = *builder;
    floats.compute = MP_COMPUTE_F32;
    floats.unpacked = MP_UNPACKED_NONE;
    snprintf(name, sizeof name, "blk.%d.ffn_gate_inp.weight", shape->layer);
    snprintf(bias, sizeof bias, "blk.%d.ffn_gate_inp.bias", shape->layer);
    MP_TRY(mp_builder_linear(&floats, &experts->router, name, shape->biased ? bias : NULL, shape->count,
                             shape->routed > 0 ? shape->routed : shape->hidden, error));
    snprintf(name, sizeof name, "blk.%d.exp_probs_b.bias", shape->layer);
    if (shape->routing.corrected)
        MP_TRY(mp_builder_vector(builder, &experts->correction, name, shape->count, error));
    else if (mp_weights_has(builder->weights, name))
        return mp_fail(error, MP_UNSUPPORTED, "tensor %s is not part of this architecture", name);
    snprintf(name, sizeof name, "blk.%d.ffn_down_exps.scale", shape->layer);
    if (mp_weights_has(builder->weights, name))
        MP_TRY(mp_builder_vector(builder, &experts->scale, name, shape->count, error));
    snprintf(name, sizeof name, "blk.%d.ffn_exps.bias", shape->layer);
    if (shape->output_bias)
        MP_TRY(mp_builder_vector(builder, &experts->bias, name, shape->hidden, error));
    if (!shape->plain)
        MP_TRY(mp_expert_matrix_init(&experts->gate, builder, shape->layer, "gate", shape->count, shape->ffn,
                                     shape->hidden, shape->biased, error));
    MP_TRY(mp_expert_matrix_init(&experts->up, builder, shape->layer, "up", shape->count, shape->ffn, shape->hidden,
                                 shape->biased, error));
    MP_TRY(mp_expert_matrix_init(&experts->down, builder, shape->layer, "down", shape->count, shape->hidden, shape->ffn,
                                 shape->biased, error));
    if (!shape->plain && mp_wmat_acts(experts->gate.kind) != mp_wmat_acts(experts->up.kind))
        return mp_fail(error, MP_UNSUPPORTED,
                       "the gate and up experts of layer %d are stored as types that mpool cannot combine",
                       shape->layer);
    return MP_OK;
}

void mp_experts_deinit(mp_experts *experts) {
    mp_expert_matrix_deinit(&experts->gate);
    mp_expert_matrix_deinit(&experts->up);
    mp_expert_matrix_deinit(&experts->down);
    mp_free(experts->uses);
    experts->uses = NULL;
}

/* ---- scratch ----------------------------------------------------------------------------------------------------- */

static size_t acts_bytes(const mp_expert_matrix *matrix, int n) {
    return mp_arena_cost(mp_acts_bytes(mp_wmat_acts(matrix->kind), n, matrix->K));
}

static size_t inner_width(const mp_experts *experts) { return (size_t)experts->ffn * (experts->plain ? 1 : 2); }

static mp_expert_scratch lay_out(const mp_experts *experts, int M, uint8_t *base) {
    size_t n = (size_t)M * (size_t)experts->used, f = sizeof(float), at = 0;
    const size_t sizes[] = {
        (size_t)M * (size_t)experts->count * f, (size_t)M * (size_t)experts->count * f, n * f, n * f, n * f, n * f,
        ((size_t)experts->count + 1) * f, sizeof(mp_expert_flags), sizeof(mp_expert_scan),
        3 * (size_t)experts->count * sizeof(mp_scan_matrix), n * (size_t)experts->hidden * f,
        n * inner_width(experts) * f,
    };
    enum { PARTS = sizeof sizes / sizeof *sizes };
    size_t offset[PARTS];
    for (int i = 0; i < PARTS; i++) {
        offset[i] = at;
        at += mp_arena_cost(sizes[i]);
    }
    size_t in = acts_bytes(&experts->up, (int)n), out = acts_bytes(&experts->down, (int)n);
    mp_expert_scratch s = {.bytes = at + (in > out ? in : out)};
    if (base)
        s = (mp_expert_scratch){
            .scores = (float *)(base + offset[0]),
            .merit = (float *)(base + offset[1]),
            .chosen = (int32_t *)(base + offset[2]),
            .weight = (float *)(base + offset[3]),
            .entry = (int32_t *)(base + offset[4]),
            .row = (int32_t *)(base + offset[5]),
            .first = (int32_t *)(base + offset[6]),
            .flags = (mp_expert_flags *)(base + offset[7]),
            .scan = (mp_expert_scan *)(base + offset[8]),
            .matrices = (mp_scan_matrix *)(base + offset[9]),
            .wide = (float *)(base + offset[10]),
            .inner = (float *)(base + offset[11]),
            .acts = base + at,
            .bytes = s.bytes,
        };
    return s;
}

size_t mp_experts_scratch(const mp_experts *experts, int M) {
    return mp_arena_cost(lay_out(experts, M, NULL).bytes);
}

/* Bytes of one packed panel. In the scratch, the rows that mp_expert_rows converts follow the panel. */
static size_t panel_bytes(const mp_expert_matrix *matrix) {
    mp_wmat w;
    mp_wmat_init(&w, matrix->kind, matrix->N, matrix->K);
    return mp_arena_cost(w.panel_bytes + MP_WMAT_SLACK);
}

size_t mp_experts_thread_scratch(const mp_experts *experts) {
    const mp_expert_matrix *const matrices[] = {&experts->up, &experts->down, &experts->gate};
    size_t most = 0;
    for (int i = 0; i < (experts->plain ? 2 : 3); i++) {
        size_t bytes = panel_bytes(matrices[i]) + mp_arena_cost(mp_expert_rows_scratch(matrices[i]));
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* ---- routing ----------------------------------------------------------------------------------------------------- */

/* Orders the entries by expert, then by row. */
static void experts_group(const mp_experts *experts, int M, const mp_expert_scratch *s) {
    int32_t n = M * experts->used;
    memset(s->first, 0, ((size_t)experts->count + 1) * sizeof *s->first);
    for (int32_t i = 0; i < n; i++)
        s->first[s->chosen[i] + 1]++;
    for (int e = 0; e < experts->count; e++)
        s->first[e + 1] += s->first[e];
    for (int32_t i = 0; i < n; i++) {
        int32_t at = s->first[s->chosen[i]]++;
        s->entry[i] = at;
        s->row[at] = i / experts->used;
    }
    /* each first[e] has advanced to the end of its group: shift the list by one group */
    memmove(s->first + 1, s->first, (size_t)experts->count * sizeof *s->first);
    s->first[0] = 0;
}

/* Chooses the experts of each row. There are barriers inside. Thread 0 ends with the groups, WITHOUT a barrier. */
static void route(const mp_expert_use *use, const float *x) {
    const mp_experts *experts = use->experts;
    const mp_expert_scratch *s = &use->s;
    const mp_epilogue plain = {0};
    mp_linear_forward(&experts->router, use->thread, x, experts->router.K, use->M, NULL, NULL, NULL, &plain, s->scores,
                      experts->count);
    mp_team_barrier(use->thread);
    /* to choose each expert, a row's scores are read again */
    mp_team_loop loop = mp_team_rows(use->thread, use->M, (int64_t)experts->count * experts->used);
    while (mp_team_next(use->thread, &loop)) {
        for (int64_t r = loop.begin; r < loop.end; r++)
            mp_route(&experts->routing, experts->correction, experts->count, experts->used,
                     s->scores + r * experts->count, s->merit + r * experts->count, s->chosen + r * experts->used,
                     s->weight + r * experts->used);
        for (int64_t i = loop.begin * experts->used; experts->scale && i < loop.end * experts->used; i++)
            s->weight[i] *= experts->scale[s->chosen[i]];
    }
    mp_team_barrier(use->thread);
    if (use->thread->index == 0)
        experts_group(experts, use->M, s);
}

/* ---- computing --------------------------------------------------------------------------------------------------- */

/* Panels [panel, panel + panels) of a packed matrix as a matrix of their own, whose data is at `data`. */
static mp_wmat part_of(const mp_expert_matrix *matrix, int panel, int panels, uint8_t *data) {
    const int32_t left = matrix->N - panel * MP_PANEL_N, most = panels * MP_PANEL_N;
    mp_wmat part;
    mp_wmat_init(&part, matrix->kind, left < most ? left : most, matrix->K);
    part.data = data;
    return part;
}

/* Multiplies the stored rows of a panel. */
static void run_stored(const mp_tensor *rows, const mp_acts *acts, int32_t from, int32_t to, const float *bias,
                       float *y, int64_t ldy) {
    const int32_t n = (int32_t)rows->shape[0];
    mp_stored_multiply(rows->dtype, rows->data, rows->nbytes / (uint64_t)n, n, acts, from, to, y + from * ldy, ldy);
    for (int32_t m = from; bias && m < to; m++)
        for (int32_t i = 0; i < n; i++)
            y[m * ldy + i] += bias[i];
}

/* Computes the outputs of panels of an expert, the first of them `panel`, for entries [from, to). Returns the number of
 * panels, at most `panels`: one, or a run of panels that are kept. A panel that is not kept is packed into its place if
 * it will be kept, and into `own` otherwise, unless there are so few entries that the stored rows are multiplied. */
static int run_panels(const mp_expert_matrix *matrix, int expert, int panel, int panels, const mp_acts *acts,
                      int32_t from, int32_t to, uint8_t *own, float *y, int64_t ldy) {
    mp_panels *packed = matrix->packed;
    const bool biased = matrix->biases.data;
    const int32_t n0 = panel * MP_PANEL_N;
    int kept = 0;
    while (kept < (biased ? 1 : panels) && mp_panel_is_packed(packed, expert, panel + kept))
        kept++;
    mp_wmat part = part_of(matrix, panel, kept ? kept : 1, own);
    float biases[MP_PANEL_N];
    mp_epilogue end = {0};
    if (biased) {
        mp_expert_biases(matrix, expert, n0, part.N, biases);
        end.bias = biases;
    }
    if (!kept) {
        const bool stored = mp_stored_can(matrix->dtype, acts->kind, to - from);
        const bool keep = mp_panel_claim_expert(packed, expert, panel, stored);
        const mp_tensor rows = mp_expert_rows(matrix, expert, n0, part.N, own + panel_bytes(matrix));
        if (stored && !keep) {
            const uint64_t began = packed ? mp_sys_now_ns() : 0;
            run_stored(&rows, acts, from, to, end.bias, y + n0, ldy);
            if (packed)
                mp_weight_store_note_stored(packed->store, mp_sys_now_ns() - began);
            return 1;
        }
        if (keep)
            part.data = mp_panel_place(packed, expert, panel);
        if (stored) /* kept, although the stored rows could be multiplied */
            mp_pack_budget_pack(&packed->store->expert_time, &part, &rows, 0, 1);
        else
            mp_wmat_pack(&part, &rows, 0, 1);
        mp_gemm(&part, acts, from, to, 0, 1, &end, y + n0, ldy);
        if (keep)
            mp_panel_publish(packed, expert, panel);
        return 1;
    }
    part.data = mp_panel_place(packed, expert, panel);
    mp_gemm(&part, acts, from, to, 0, kept, &end, y + n0, ldy);
    return kept;
}

typedef struct pack_run {
    const mp_experts *experts;
    mp_lease *lease;
    uint8_t *scratch; /* `stride` bytes per thread */
    size_t stride;
    _Atomic int next; /* matrix of an expert that no thread has taken yet */
} pack_run;

/* Packs the panels of an expert that may be kept. Returns false if `until_ns` was over before the last one. */
static bool pack_matrix(const mp_expert_matrix *matrix, int expert, uint64_t until_ns, uint8_t *own) {
    mp_panels *packed = matrix->packed;
    for (int panel = 0; packed && panel < packed->panels; panel++) {
        if (mp_panel_is_packed(packed, expert, panel))
            continue;
        if (mp_sys_now_ns() >= until_ns)
            return false;
        if (!mp_panel_claim_expert(packed, expert, panel, false))
            continue;
        mp_wmat part = part_of(matrix, panel, 1, mp_panel_place(packed, expert, panel));
        const mp_tensor rows = mp_expert_rows(matrix, expert, panel * MP_PANEL_N, part.N, own);
        mp_wmat_pack(&part, &rows, 0, 1);
        mp_panel_publish(packed, expert, panel);
    }
    return true;
}

static void pack_body(const mp_team_thread *thread, void *arg) {
    pack_run *run = arg;
    const mp_expert_matrix *const parts[] = {&run->experts->gate, &run->experts->up, &run->experts->down};
    for (;;) {
        const int i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
        if (i >= 3 * run->experts->count || mp_lease_poll(run->lease))
            return;
        pack_matrix(parts[i % 3], i / 3, UINT64_MAX, run->scratch + (size_t)thread->index * run->stride);
    }
}

void mp_experts_pack(const mp_experts *experts, mp_lease *lease, mp_budget *budget) {
    pack_run run = {.experts = experts, .lease = lease, .stride = mp_experts_thread_scratch(experts)};
    const size_t bytes = run.stride * (size_t)lease->threads;
    if (!mp_budget_take(budget, bytes))
        return;
    run.scratch = mp_alloc(bytes, MP_TAG_MISC);
    if (run.scratch)
        mp_lease_run(lease, pack_body, &run);
    mp_free(run.scratch);
    mp_budget_give(budget, bytes);
}

void mp_experts_pack_pending(const mp_experts *experts, uint64_t until_ns, mp_lease *lease, uint8_t *own) {
    const mp_expert_matrix *const parts[] = {&experts->gate, &experts->up, &experts->down};
    for (int i = 0; i < 3 * experts->count; i++) {
        mp_panels *packed = parts[i % 3]->packed;
        const int expert = i / 3;
        if (!packed || !atomic_load_explicit(&packed->pending[expert], memory_order_relaxed))
            continue;
        if (!mp_weight_store_has_pending(packed->store) || mp_lease_poll(lease))
            return;
        const uint64_t began = mp_sys_now_ns();
        const bool whole = pack_matrix(parts[i % 3], expert, until_ns, own);
        mp_pack_budget_spend(&packed->store->idle_time, mp_sys_now_ns() - began);
        if (!whole)
            return;
        const bool has_memory = atomic_load_explicit(&packed->data[expert], memory_order_relaxed) != NULL;
        mp_weight_store_end_pending(packed, expert, has_memory);
    }
}

enum {
    READ_ROWS = 3,       /* reading a panel from memory takes about as long as multiplying three rows by it */
    MIN_INPUTS = 50000 /* inputs that one row and one panel multiply in about 10 us: the least work of a range */
};

/* Units of work of a panel of expert e. */
static int64_t panel_cost(const mp_expert_scratch *s, int e) {
    return s->first[e + 1] > s->first[e] ? s->first[e + 1] - s->first[e] + READ_ROWS : 0;
}

/* Computes the panels of all chosen experts: the `count` matrices `parts` of each expert. A panel belongs to the thread
 * that takes its first unit of work. */
static void run_shared(const mp_expert_use *use, const mp_expert_matrix *const *parts, int count,
                       const mp_acts *acts, float *y, int64_t ldy) {
    const mp_experts *experts = use->experts;
    const mp_expert_scratch *s = &use->s;
    const int panels = (parts[0]->N + MP_PANEL_N - 1) / MP_PANEL_N;
    int64_t units = 0, at = 0; /* at: first unit of the matrix `part` of expert e */
    for (int e = 0; e < experts->count; e++)
        units += panel_cost(s, e) * count * panels;
    mp_team_loop loop = mp_team_shared(units, MIN_INPUTS / parts[0]->K + 1);
    int e = 0, part = 0;
    while (mp_team_next(use->thread, &loop)) {
        if (loop.begin < at) /* a range of another thread's share */
            at = e = part = 0;
        while (e < experts->count && at < loop.end) {
            const int64_t cost = panel_cost(s, e), size = cost * panels;
            const int64_t from = loop.begin - at, to = loop.end - at < size ? loop.end - at : size;
            int first = from > 0 && cost ? (int)((from + cost - 1) / cost) : 0;
            const int last = cost ? (int)((to + cost - 1) / cost) : 0;
            if (use->lease && first < last)
                mp_lease_poll(use->lease); /* the pass stops between layers: here only the heartbeat counts */
            while (first < last)
                first += run_panels(parts[part], e, first, last - first, acts, s->first[e], s->first[e + 1],
                                    use->own, y + (int64_t)part * parts[0]->N, ldy);
            if (at + size > loop.end)
                break; /* the next range may have more panels of this matrix */
            at += size;
            if (++part == count) {
                part = 0;
                e++;
            }
        }
    }
}

/* run_shared with nn/expert_scan.h: each thread computes its panels of every matrix. */
static void run_scan(mp_expert_use *use, const mp_expert_matrix *const *parts, int count, const mp_acts *acts, float *y,
                     int64_t ldy) {
    const mp_expert_scratch *s = &use->s;
    int64_t begin, end;
    mp_team_split(use->thread, (parts[0]->N + MP_PANEL_N - 1) / MP_PANEL_N, 1, &begin, &end);
    for (int e = 0; e < use->experts->count; e++)
        for (int part = 0; part < count && mp_expert_is_used(s, e); part++) {
            if (use->lease)
                mp_lease_poll(use->lease);
            mp_expert_scan_enter(s->scan, use->scanned);
            for (int panel = (int)begin; panel < end;)
                panel += run_panels(parts[part], e, panel, (int)end - panel, acts, s->first[e], s->first[e + 1],
                                    use->own, y + (int64_t)part * parts[0]->N, ldy);
            mp_expert_scan_leave(s->scan, use->scanned++);
        }
}

/* Computes with the `count` matrices `parts` of each chosen expert. */
static void run_matrices(mp_expert_use *use, const mp_expert_matrix *const *parts, int count, const mp_acts *acts,
                         float *y, int64_t ldy) {
    if (use->scans)
        run_scan(use, parts, count, acts, y, ldy);
    else
        run_shared(use, parts, count, acts, y, ldy);
}

/* gate = (up + 1) * (gate * sigmoid(1.702 gate)), with gate and up clamped first. NaN stays NaN. */
static void gate_clamped(float limit, float *gate, const float *up, int64_t n) {
    enum { SLICE = 256 };
    const mp_kernels *call = mp_kernels_get();
    float sigmoid[SLICE];
    for (int64_t at = 0; at < n; at += SLICE) {
        int64_t length = n - at < SLICE ? n - at : SLICE;
        float *g = gate + at;
        for (int64_t i = 0; i < length; i++) {
            g[i] = g[i] > limit ? limit : g[i];
            sigmoid[i] = 1.702f * g[i];
        }
        call->activate(MP_ACT_SIGMOID, length, sigmoid);
        for (int64_t i = 0; i < length; i++) {
            float u = up[at + i];
            u = u > limit ? limit : u < -limit ? -limit : u;
            g[i] = (u + 1) * (g[i] * sigmoid[i]);
        }
    }
}

/* Computes the units of an entry in place of its gates. */
static void activate(const mp_experts *experts, float *gate) {
    const mp_kernels *call = mp_kernels_get();
    const int64_t ffn = experts->ffn;
    if (experts->plain)
        call->activate(experts->act, ffn, gate);
    else if (experts->clamp > 0)
        gate_clamped(experts->clamp, gate, gate + ffn, ffn);
    else
        call->gated(experts->act, gate, gate + ffn, ffn, gate);
}

/* Computes the outputs of all entries in `wide`. There are barriers inside. Ends WITHOUT a barrier. */
static void multiply(mp_expert_use *use, const float *x) {
    const mp_experts *experts = use->experts;
    const mp_expert_scratch *s = &use->s;
    const mp_expert_matrix *const first[] = {&experts->gate, &experts->up}, *const second[] = {&experts->down};
    const int64_t hidden = experts->hidden, wide = (int64_t)inner_width(experts);
    const int32_t n = use->M * experts->used;
    const int parts = experts->plain ? 1 : 2;
    mp_acts acts;
    mp_acts_init(&acts, mp_wmat_acts(experts->up.kind), n, experts->hidden, s->acts);
    mp_acts_fill(&acts, s->wide, hidden, 0, 0); /* floats: points to them, on every thread */
    mp_team_loop copied = mp_team_rows(use->thread, n, hidden);
    while (mp_team_next(use->thread, &copied)) {
        for (int64_t i = copied.begin; i < copied.end; i++)
            memcpy(s->wide + i * hidden, x + s->row[i] * hidden, (size_t)hidden * sizeof *x);
        mp_acts_fill(&acts, s->wide, hidden, (int)copied.begin, (int)copied.end);
    }
    mp_team_barrier(use->thread);
    run_matrices(use, &first[2 - parts], parts, &acts, s->inner, wide);
    mp_team_barrier(use->thread);
    mp_acts_init(&acts, mp_wmat_acts(experts->down.kind), n, experts->ffn, s->acts);
    mp_acts_fill(&acts, s->inner, wide, 0, 0);
    mp_team_loop activated = mp_team_rows(use->thread, n, wide);
    while (mp_team_next(use->thread, &activated)) {
        for (int64_t i = activated.begin; i < activated.end; i++)
            activate(experts, s->inner + i * wide);
        mp_acts_fill(&acts, s->inner, wide, (int)activated.begin, (int)activated.end);
    }
    mp_team_barrier(use->thread);
    run_matrices(use, second, 1, &acts, s->wide, hidden);
}

/* y += bias, if there is one; y += scale * (w0 * y0 + w1 * y1 + ...). Every product and sum is rounded. Overwrites
 * y0. */
static void add_up(const mp_experts *experts, const mp_expert_scratch *s, int64_t r, float scale, float *y) {
    const float *weight = s->weight + r * experts->used;
    const int32_t *entry = s->entry + r * experts->used;
    int64_t hidden = experts->hidden;
    float *sum = s->wide + entry[0] * hidden;
    for (int64_t i = 0; i < hidden; i++)
        sum[i] *= weight[0];
    for (int j = 1; j < experts->used; j++) {
        const float *more = s->wide + entry[j] * hidden;
        for (int64_t i = 0; i < hidden; i++)
            sum[i] += weight[j] * more[i];
    }
    if (experts->bias)
        mp_kernels_get()->add(experts->bias, hidden, y);
    for (int64_t i = 0; i < hidden; i++)
        y[i] += scale * sum[i];
}

void mp_experts_forward(const mp_experts *experts, const mp_team_thread *thread, const float *routed, const float *x,
                        int M, float scale, void *scratch, void *own, mp_lease *lease, float *y) {
    mp_expert_use use = {.experts = experts, .thread = thread, .lease = lease, .own = own, .M = M,
                         .s = lay_out(experts, M, scratch)};
    route(&use, routed);
    mp_expert_fetch(&use);
    multiply(&use, x);
    mp_expert_fetched(&use);
    mp_team_loop loop = mp_team_rows(thread, M, (int64_t)experts->hidden * experts->used);
    while (mp_team_next(thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++)
            add_up(experts, &use.s, r, scale, y + r * experts->hidden);
}
