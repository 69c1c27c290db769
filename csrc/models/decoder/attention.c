/* decoder/attention.c: see decoder/attention.h. */
#include "models/decoder/attention.h"

#include <math.h>
#include <string.h>

#include "models/decoder/load.h"

/* Returns query, key and value of row `row` of the pass, which must be in the current block. */
static float *query_key_value(const mp_attend *run, int row) {
    return run->qkv + (size_t)(row - run->view->first) * (size_t)run->attention->shape->qkv_width;
}

static bool in_integers(const mp_attend *run) { return run->pass->cache->layout.dtype != MP_F32; }
static bool in_bytes(const mp_attend *run) { return run->pass->cache->layout.dtype == MP_I8; }

/* Rotates n components of a query, key, value or output, if the cache holds bytes. */
static void spread(const mp_attend *run, float *x, int n) {
    if (in_bytes(run))
        mp_kernels_get()->hadamard(x, n, mp_hadamard_size(n), x);
}

/* Two rotations multiply a vector of n components by the size of the matrix. Returns the inverse of this factor, a
 * power of two. */
static float spread_inverse(const mp_attend *run, int n) {
    return in_bytes(run) ? 1.0f / (float)mp_hadamard_size(n) : 1.0f;
}

/* Returns true if the norm applies to all heads of a row together. */
static bool is_wide(const mp_attend *run, const mp_norm *norm) { return norm->n > run->attention->shape->head_dim; }

/* Norms queries and keys over all heads together, if the mixer has such norms. Ends with a barrier then. */
static void norm_wide(const mp_attend *run) {
    const mp_paged_attention *attention = run->attention;
    const mp_attention_shape *shape = attention->shape;
    const bool q = is_wide(run, &attention->q_norm), k = is_wide(run, &attention->k_norm);
    if (!q && !k)
        return;
    mp_team_loop loop = mp_team_rows(run->view->context.thread, run->view->rows, shape->qkv_width);
    while (mp_team_next(run->view->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            float *const row = run->qkv + r * shape->qkv_width, *const keys = row + shape->heads * shape->query_step;
            if (q)
                mp_norm_row(&attention->q_norm, row, row);
            if (k)
                mp_norm_row(&attention->k_norm, keys, keys);
        }
    mp_team_barrier(run->view->context.thread);
}

/* Norms and rotates one head of a query or key, if the mixer has a norm of single heads and the rotation. */
static void norm_and_rotate(const mp_attend *run, const mp_norm *norm, int row, float *x) {
    static const mp_norm none = {0};
    const mp_decoder *model = run->pass->model;
    const mp_attention_shape *shape = run->attention->shape;
    const int rope = run->attention->rope;
    mp_attention_place(is_wide(run, norm) ? &none : norm, rope < 0 ? NULL : &model->rope[rope],
                       rope < 0 ? NULL : mp_decoder_rotation(run->pass, row, rope), shape->rotated_from, 1,
                       shape->head_dim, x);
}

/* Rotates key head `head` of a row and stores it, with the value of that head, in the KV cache. */
static void store_row(const mp_attend *run, const mp_row_seq *seq, int row, int head) {
    const mp_attention_shape *shape = run->attention->shape;
    float *const keys = query_key_value(run, seq->row0 + row) + shape->heads * shape->query_step;
    float *k = keys + head * shape->head_dim;
    float *v = shape->key_values ? k : keys + shape->kv_heads * shape->head_dim + head * shape->value_dim;
    int position = seq->past + row;
    uint32_t block = seq->blocks[position / MP_KV_BLOCK];
    float copy[MP_HEAD_MAX];
    if (shape->padded_dim > shape->value_dim || shape->key_values) { /* rows of V are padded with zeros: mp_kv_width */
        memset(copy, 0, (size_t)shape->padded_dim * sizeof *copy);
        v = memcpy(copy, v, (size_t)shape->value_dim * sizeof *copy);
    }
    norm_and_rotate(run, &run->attention->k_norm, seq->row0 + row, k);
    if (run->attention->v_norm.weight)
        mp_norm_row(&run->attention->v_norm, v, v);
    if (run->attention->balance)
        for (int i = 0; i < shape->head_dim; i++)
            k[i] /= run->attention->balance[head * shape->head_dim + i];
    spread(run, k, shape->head_dim);
    spread(run, v, shape->padded_dim);
    mp_kv_put(run->pass->cache, block, run->attention->store, head, position % MP_KV_BLOCK, k, v);
}

/* Returns the factor of the queries at a position: see `temperature_scale` of mp_decoder. */
static float query_factor(const mp_decoder *model, int32_t position) {
    if (model->temperature_scale == 0 || position < model->temperature_length)
        return 1;
    return (float)(1 + (double)model->temperature_scale * log(1.0 + position / model->temperature_length));
}

/* Rotates and scales the query heads of group `head` of a row, and converts them to the type that the cache's kernels
 * read. */
static void rotate_queries(const mp_attend *run, const mp_row_seq *seq, int row, int head) {
    const mp_attention_shape *shape = run->attention->shape;
    const mp_kernels *kernels = mp_kernels_get();
    int group = mp_attention_group(shape);
    float *q = query_key_value(run, seq->row0 + row) + (size_t)(head * group * shape->query_step);
    const float factor = query_factor(run->pass->model, seq->past + row);
    const float *balance = run->attention->balance;
    if (balance)
        balance += mp_attention_kv_head(shape, head) * shape->head_dim;
    for (int g = 0; g < group; g++, q += shape->query_step) {
        norm_and_rotate(run, &run->attention->q_norm, seq->row0 + row, q);
        if (balance)
            for (int i = 0; i < shape->head_dim; i++)
                q[i] *= balance[i];
        for (int i = 0; factor != 1 && i < shape->head_dim; i++)
            q[i] *= factor;
        spread(run, q, shape->head_dim);
        if (in_integers(run))
            kernels->attn_query_i16(q, shape->head_dim);
    }
}

static void store_units(const mp_attend *run, int64_t begin, int64_t end) {
    const mp_attention_shape *shape = run->attention->shape;
    int s = 0;
    for (int64_t i = begin; i < end; i++) { /* by row, then group; the first group of each KV head also stores the
                                             * head's key and value */
        int row = run->view->first + (int)(i / shape->groups), group = (int)(i % shape->groups);
        int head = mp_attention_kv_head(shape, group);
        while (row >= run->pass->rows.seq[s].row0 + run->pass->rows.seq[s].rows)
            s++;
        const mp_row_seq *seq = &run->pass->rows.seq[s];
        if (!run->attention->reads_only && (group == 0 || mp_attention_kv_head(shape, group - 1) != head))
            store_row(run, seq, row - seq->row0, head);
        rotate_queries(run, seq, row - seq->row0, group);
    }
}

static void store_all(const mp_attend *run) {
    const mp_attention_shape *shape = run->attention->shape;
    const mp_team_thread *thread = run->view->context.thread;
    mp_team_loop loop = mp_team_rows(thread, (int64_t)run->view->rows * shape->groups,
                                     shape->qkv_width / shape->groups);
    while (mp_team_next(thread, &loop))
        store_units(run, loop.begin, loop.end);
}

/* Returns the first KV block of the unit that any row of the unit sees. */
static int first_block(const mp_attend *run, const mp_attention_unit *unit) {
    if (run->attention->window == 0)
        return unit->block0;
    int seen = mp_kv_first_seen(run->attention->window, (int64_t)run->pass->rows.seq[unit->seq].past + unit->row0);
    return seen > unit->block0 ? seen : unit->block0;
}

/* Returns true if the window of a row reaches as far to later positions as to earlier ones. */
static bool two_sided(const mp_attend *run) { return run->pass->model->whole_prompts && run->attention->window > 0; }

/* Returns the end of the KV blocks of the unit that any row of the unit sees. */
static int end_block(const mp_attend *run, const mp_attention_unit *unit) {
    const int64_t row = (int64_t)run->pass->rows.seq[unit->seq].past + unit->row0;
    const int seen = two_sided(run) ? mp_decoder_blocks(row + unit->rows + run->attention->window - 1) : unit->block1;
    return seen < unit->block1 ? seen : unit->block1;
}

/* Returns the arguments of the attention kernels for a unit. */
static mp_attn_kv describe(const mp_attend *run, const mp_attention_unit *unit) {
    const mp_decoder *model = run->pass->model;
    const mp_attention_shape *shape = run->attention->shape;
    const mp_row_seq *seq = &run->pass->rows.seq[unit->seq];
    const int64_t position = (int64_t)seq->past + unit->row0;
    const bool spans = unit->until > 0 && run->attention->spans;
    /* In a span, rows are placed so far on that each of them sees all positions below `end`, or as many later ones as
     * earlier ones in its window. The window grows by as much: its beginning stays. */
    const int ahead = !spans ? 0 : two_sided(run) ? run->attention->window - 1 : (int)(unit->until - 1 - position);
    int group = mp_attention_group(shape), kv_head = mp_attention_kv_head(shape, unit->head);
    void **k = run->pointers, **v = k + run->pass->most_blocks;
    /* set the pointers of one block beyond the unit, too, if it exists: kernels prefetch the next block */
    int blocks = mp_decoder_blocks((int64_t)seq->past + seq->rows);
    for (int b = first_block(run, unit); b < blocks && b <= unit->block1; b++) {
        k[b] = mp_kv_k(run->pass->cache, seq->blocks[b], run->attention->store, kv_head);
        v[b] = mp_kv_v(run->pass->cache, seq->blocks[b], run->attention->store, kv_head);
    }
    return (mp_attn_kv){
        .q = query_key_value(run, seq->row0 + unit->row0) + (size_t)(unit->head * group * shape->query_step),
        .ldq = shape->qkv_width,
        .ldq_group = shape->query_step,
        .group = group,
        .k_dim = shape->head_dim,
        .v_dim = shape->padded_dim,
        .scale = shape->scale * spread_inverse(run, shape->head_dim),
        .pos0 = position + ahead,
        .window = run->attention->window > 0 ? run->attention->window + ahead : 0,
        .end = spans ? unit->until : 0,
        .softcap = model->attention_softcap,
        .k_blocks = k,
        .v_blocks = v,
    };
}

/* Returns the thread's running softmax state: m, l [MP_ATTN_ROWS], o [MP_ATTN_ROWS, kv.v_dim]. */
static mp_attn_partial running_state(const mp_attend *run) {
    float *at = run->state;
    return (mp_attn_partial){.m = at, .l = at + MP_ATTN_ROWS, .o = at + 2 * MP_ATTN_ROWS};
}

/* Returns the factor on the output of a head: 1 / l, or 1 / (l + exp(sink - m)) if the head has a sink. */
static float output_factor(const mp_paged_attention *attention, int head, float m, float l) {
    if (!attention->sinks)
        return 1 / l;
    float scores[2] = {m, attention->sinks[head]}, top = scores[1] > m ? scores[1] : m, by[2];
    mp_kernels_get()->exp_sum(scores, 2, top, by);
    return by[0] / (l * by[0] + by[1]);
}

/* Multiplies the output of a head by the sigmoid of its gate, which this overwrites. */
static void apply_gate(const mp_attend *run, int row, int head, float *out) {
    const mp_attention_shape *shape = run->attention->shape;
    float *const gate = query_key_value(run, row) + shape->gates_from + head * shape->gate_step;
    const int step = shape->gate_dim > 1;
    if (shape->gate_dim == 0)
        return;
    mp_kernels_get()->activate(MP_ACT_SIGMOID, shape->gate_dim, gate);
    for (int i = 0; i < shape->value_dim; i++)
        out[i] *= gate[i * step];
}

/* Normalises the outputs of a unit's rows and writes them to run->mixed. */
static void finish_unit(const mp_attend *run, const mp_attention_unit *unit, const mp_attn_partial *state) {
    const mp_attention_shape *shape = run->attention->shape;
    int row0 = run->pass->rows.seq[unit->seq].row0 + unit->row0 - run->view->first;
    int group = mp_attention_group(shape), d = shape->value_dim;
    for (int r = 0; r < unit->rows; r++)
        for (int g = 0; g < group; g++) {
            float *o = state->o + (size_t)(r * group + g) * (size_t)shape->padded_dim;
            int at = r * group + g;
            float factor = output_factor(run->attention, unit->head * group + g, state->m[at], state->l[at]);
            factor = run->scale * factor * spread_inverse(run, shape->padded_dim);
            spread(run, o, shape->padded_dim);
            float *out = run->mixed + (size_t)(row0 + r) * (size_t)(shape->heads * d) +
                         (size_t)((unit->head * group + g) * d);
            for (int i = 0; i < d; i++)
                out[i] = o[i] * factor;
            apply_gate(run, run->view->first + row0 + r, unit->head * group + g, out);
        }
}

/* Returns the loop over the units of the current block. */
static mp_team_loop units_of(const mp_attend *run) {
    const int count = run->view->context.thread->count;
    mp_team_loop loop = mp_team_shared(0, 1);
    loop.starts = run->plan->thread_units + (ptrdiff_t)run->view->block * (count + 1);
    loop.n = loop.starts[count];
    return loop;
}

static void attend_unit(const mp_attend *run, const mp_attention_unit *unit) {
    const mp_attention_shape *shape = run->attention->shape;
    const mp_kernels *kernels = mp_kernels_get();
    int first, row0 = run->pass->rows.seq[unit->seq].row0 + unit->row0;
    if (run->plan->mode == MP_ATTEND_TILES && run->view->outputs_only &&
        mp_decoder_outputs_in(run->pass, row0, unit->rows, &first) == 0)
        return;
    if (run->plan->mode == MP_ATTEND_FUSED) {
        if (!run->attention->reads_only)
            store_row(run, &run->pass->rows.seq[unit->seq], 0, unit->head);
        rotate_queries(run, &run->pass->rows.seq[unit->seq], 0, unit->head);
    }
    mp_attn_kv attention = describe(run, unit);
    mp_attn_partial state = running_state(run);
    mp_attn_begin(unit->rows * attention.group, shape->padded_dim, &state);
    (in_bytes(run)      ? kernels->attn_kv_i8
     : in_integers(run) ? kernels->attn_kv_i16
                        : kernels->attn_kv)(&attention, unit->rows, first_block(run, unit), end_block(run, unit),
                                            &state, run->kernel_scratch);
    finish_unit(run, unit, &state);
}

static void attend_units(const mp_attend *run) {
    mp_team_loop loop = units_of(run);
    while (mp_team_next(run->view->context.thread, &loop))
        for (int64_t u = loop.begin; u < loop.end; u++)
            attend_unit(run, &run->plan->units[u]);
}

static mp_attn_partial block_partial(const mp_attend *run, int index) {
    const mp_attention_shape *shape = run->attention->shape;
    float *at = run->pass->partials + (size_t)index * mp_attention_partial_floats(shape);
    int group = mp_attention_group(shape), d = shape->padded_dim;
    return (mp_attn_partial){.o = at, .m = at + group * d, .l = at + group * (d + 1)};
}

static void merge_unit(const mp_attend *run, const mp_attention_unit *unit) {
    const mp_attention_shape *shape = run->attention->shape;
    const mp_kernels *kernels = mp_kernels_get();
    int group = mp_attention_group(shape);
    mp_attn_partial state = running_state(run);
    mp_attn_begin(group, shape->padded_dim, &state);
    for (int b = first_block(run, unit); b < unit->block1; b++) {
        mp_attn_partial partial = block_partial(run, unit->partial + b);
        kernels->attn_merge(group, shape->padded_dim, &partial, &state);
    }
    finish_unit(run, unit, &state);
}

static void attend_split(const mp_attend *run) {
    const mp_attention_shape *shape = run->attention->shape;
    const mp_kernels *kernels = mp_kernels_get();
    mp_team_loop loop = units_of(run);
    while (mp_team_next(run->view->context.thread, &loop))
        for (int64_t u = loop.begin; u < loop.end; u++) {
            const mp_attention_unit *unit = &run->plan->units[u];
            mp_attn_kv attention = describe(run, unit);
            for (int b = first_block(run, unit); b < unit->block1; b++) {
                mp_attn_partial partial = block_partial(run, unit->partial + b - unit->block0);
                (in_bytes(run)      ? kernels->attn_block_i8
                 : in_integers(run) ? kernels->attn_block_i16
                                    : kernels->attn_block)(&attention, 1, b, &partial);
            }
        }
    mp_team_barrier(run->view->context.thread);
    int64_t begin, end;
    mp_team_split(run->view->context.thread, (int64_t)run->pass->rows.n_seq * shape->groups, 1, &begin, &end);
    int first = 0; /* index of the partial of the unit's first block */
    for (int64_t i = 0; i < end; i++) {
        int seq = (int)(i / shape->groups);
        int blocks = mp_decoder_blocks((int64_t)run->pass->rows.seq[seq].past + 1);
        const mp_attention_unit unit = {
            .seq = seq, .head = (int)(i % shape->groups), .rows = 1, .block1 = blocks, .partial = first};
        if (i >= begin)
            merge_unit(run, &unit);
        first += blocks;
    }
}

void mp_attend_rows(const mp_attend *run) {
    norm_wide(run);
    if (run->plan->mode != MP_ATTEND_FUSED) {
        store_all(run);
        mp_team_barrier(run->view->context.thread);
    }
    if (run->plan->mode == MP_ATTEND_SPLIT)
        attend_split(run);
    else
        attend_units(run);
    mp_team_barrier(run->view->context.thread);
}

/* ---- scratch ----------------------------------------------------------------------------------------------------- */

static size_t qkv_bytes(const mp_attention_shape *shape, int M) {
    return (size_t)M * (size_t)shape->qkv_width * sizeof(float);
}

static size_t mixed_bytes(const mp_attention_shape *shape, int M) {
    return (size_t)M * (size_t)shape->heads * (size_t)shape->value_dim * sizeof(float);
}

static size_t state_bytes(const mp_attention_shape *shape) {
    return MP_ATTN_ROWS * (size_t)(shape->padded_dim + 2) * sizeof(float);
}

size_t mp_attend_shared(const mp_attention_shape *shape, int M) {
    return mp_arena_cost(qkv_bytes(shape, M)) + mp_arena_cost(mixed_bytes(shape, M));
}

size_t mp_attend_own(const mp_attention_shape *shape, int most_blocks) {
    return mp_arena_cost(mp_attn_kv_scratch(shape->padded_dim)) + mp_arena_cost(state_bytes(shape)) +
           mp_arena_cost(2 * (size_t)most_blocks * sizeof(void *));
}

mp_attend mp_attend_begin(const mp_decoder_pass *pass, const mp_decoder_view *view,
                          const mp_paged_attention *attention, float scale, uint8_t **shared, uint8_t **own) {
    const mp_attention_shape *shape = attention->shape;
    mp_attend run = {.pass = pass, .view = view, .attention = attention, .scale = scale};
    run.plan = mp_attention_plan_of(pass, shape);
    run.qkv = mp_scratch_take(shared, qkv_bytes(shape, pass->block_rows));
    run.mixed = mp_scratch_take(shared, mixed_bytes(shape, pass->block_rows));
    run.kernel_scratch = mp_scratch_take(own, mp_attn_kv_scratch(shape->padded_dim));
    run.state = mp_scratch_take(own, state_bytes(shape));
    run.pointers = mp_scratch_take(own, 2 * (size_t)pass->most_blocks * sizeof(void *));
    return run;
}

/* ---- the mixer --------------------------------------------------------------------------------------------------- */

mp_status mp_attend_read_options(const mp_layer_reader *reader, mp_paged_attention *attention, mp_error *error) {
    const mp_attention_shape *shape = attention->shape;
    const bool wide = reader->flags & MP_DECODER_QUERY_NORMS, norms = wide || reader->flags & MP_DECODER_HEAD_NORMS;
    const int32_t q = wide ? shape->heads * shape->head_dim : shape->head_dim;
    const int32_t k = wide ? shape->kv_heads * shape->head_dim : shape->head_dim;
    MP_TRY(mp_reader_norm(reader, &attention->q_norm, "attn_q_norm", q, norms, error));
    MP_TRY(mp_reader_norm(reader, &attention->k_norm, "attn_k_norm", k, norms && !attention->reads_only, error));
    if (reader->model->ones) {
        attention->v_norm = mp_decoder_norm(reader->model, shape->value_dim);
        attention->v_norm.weight = reader->model->ones;
    }
    return mp_reader_vector(reader, &attention->sinks, "attn_sinks", shape->heads,
                            (reader->flags & MP_DECODER_SINKS) != 0, error);
}

static mp_status read_attention(const mp_layer_reader *reader, mp_mixer *mixer, mp_error *error) {
    const mp_decoder *model = reader->model;
    const mp_attention_shape *shape = mixer->attention.shape = mp_decoder_shape(model, reader->index);
    const int32_t kv = shape->kv_heads * shape->head_dim;
    const mp_reader_part qkv[] = {{"attn_q", shape->heads * shape->query_step}, {"attn_k", kv}, {"attn_v", kv},
                                  {"attn_head_gate", shape->heads}};
    const mp_reader_part out = {"attn_output", model->hidden};
    mixer->attention.reads_only = reader->index > model->last_stored;
    const int parts = mixer->attention.reads_only ? 1 : shape->key_values ? 2 : shape->gate_dim == 1 ? 4 : 3;
    for (int i = parts; i < 4; i++)
        MP_TRY(mp_reader_refuse(reader, qkv[i].name, error));
    MP_TRY(mp_reader_linear(reader, &mixer->attention.qkv, qkv, parts, model->hidden, 1, error));
    MP_TRY(mp_reader_linear(reader, &mixer->out, &out, 1, shape->heads * shape->value_dim, model->residual_scale,
                            error));
    return mp_attend_read_options(reader, &mixer->attention, error);
}

static void attention_needs(const mp_decoder *model, const mp_mixer *mixer, int M, int most_blocks,
                            mp_block_needs *needs) {
    (void)model;
    mp_needs_linear(needs, &mixer->attention.qkv, M);
    mp_needs_linear(needs, &mixer->out, M);
    mp_needs_scratch(needs, mp_attend_shared(mixer->attention.shape, M),
                     mp_attend_own(mixer->attention.shape, most_blocks));
}

static void attention_cost(const mp_mixer *mixer, mp_block_cost *cost) {
    mp_cost_linear(cost, &mixer->attention.qkv);
    mp_cost_linear(cost, &mixer->out);
    cost->barriers += 3;
}

static mp_mixed attention_mix(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_mixer *mixer,
                              const float *in, float scale) {
    const mp_decoder *model = pass->model;
    const mp_attention_shape *shape = mixer->attention.shape;
    uint8_t *shared = pass->shared, *own = view->own;
    const mp_attend run = mp_attend_begin(pass, view, &mixer->attention, scale, &shared, &own);
    mp_row_linear(&view->context, &mixer->attention.qkv, in, model->hidden, view->rows, NULL, run.qkv,
                  shape->qkv_width);
    mp_team_barrier(view->context.thread);
    mp_attend_rows(&run);
    return (mp_mixed){run.mixed, (int64_t)shape->heads * shape->value_dim};
}

const mp_mixer_ops mp_mixer_attention = {.read = read_attention,
                                         .needs = attention_needs,
                                         .cost = attention_cost,
                                         .mix = attention_mix,
                                         .balances = true};
