/* decoder/decoder.c: the forward pass of decoders (Llama: Touvron et al., arXiv:2302.13971; Qwen2: arXiv:2407.10671).
 *
 * A layer, on all threads (| is a barrier):
 *   norm, query-key-value | rotate, store, attend | output + residual | norm, gate and up | gate, down + residual |
 * With at most MP_PRIVATE_ROWS rows every thread norms and quantises all rows for itself, which is cheaper than a
 * barrier. With more rows, the threads divide the rows, at the cost of one more barrier. The rows of a pass go through
 * a layer in row blocks, one after the other (decoder/pass.h); the buffers of queries, attention and the like hold one
 * row block.
 *
 * Attention works on units (sequence, KV head) in one of three modes:
 *   fused  one row per sequence: the thread that attends a unit also rotates and stores its row, without a barrier
 *   tiles  prefill: all rows are stored first, then units are cut into tiles of rows
 *   split  few units over long contexts: units are cut into ranges of KV blocks, whose partials are merged in order
 *
 * A cache of bytes holds rotated keys and values: the Hadamard matrix spreads the outliers of a head, which would take
 * the precision of the other components of their group (QuaRot, arXiv:2404.00456). Queries are rotated like keys, so
 * their products do not change; the output of attention is rotated back. Before that, decoder/balance.c's factors make
 * the components of keys smaller where those of queries can become larger. */
#include <math.h>
#include <string.h>

#include "models/decoder/mla.h"
#include "models/decoder/pass.h"

enum {
    POLL_LAYERS = 4,
    GATED_MIN = 16 /* minimum rows for computing gate and up panel by panel: with fewer rows, reading the weights from
                      * memory takes the time, and reading two matrices one after the other is faster than alternating
                      * between them */
};

typedef struct thread_view {
    uint8_t *base; /* the thread's own scratch */
    mp_thread_layout at;
    uint8_t *panel_scratch; /* as in mp_linear_forward */
    int block, first, rows; /* the current row block: index, first row, number of rows */
    const uint8_t *adapters; /* [rows] number of the adapter of each row, or NULL: no row has one */
} thread_view;

/* ---- the last layer ---------------------------------------------------------------------------------------------- */

/* Returns true if the pass needs the last layer's results of its output rows only. The layer stores the keys and values
 * of all rows. */
static bool only_outputs(const mp_decoder_pass *pass, const mp_decoder_layer *layer) {
    const mp_decoder *model = pass->model;
    bool all = layer != &model->layers[model->layer_count - 1] || pass->rows.n_capture > 0;
    for (int s = 0; !all && s < pass->rows.n_seq; s++)
        all = pass->rows.seq[s].all_outputs != NULL;
    return !all;
}

/* Returns the number of output rows in [row0, row0 + rows), and the index of the first in *first. */
static int outputs_in(const mp_decoder_pass *pass, int row0, int rows, int *first) {
    int begin = 0, end;
    while (begin < pass->rows.n_output && pass->rows.output_row[begin] < row0)
        begin++;
    for (end = begin; end < pass->rows.n_output && pass->rows.output_row[end] < row0 + rows;)
        end++;
    *first = begin;
    return end - begin;
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

static float *rotation(const mp_decoder_pass *pass, int row, int rope) {
    const mp_decoder *model = pass->model;
    return pass->cos_sin + ((size_t)row * (size_t)model->ropes + (size_t)rope) * (size_t)model->rope[0].dim;
}

/* Returns query, key and value of row `row` of the pass, which must be in the current block. */
static float *query_key_value(const mp_decoder_pass *pass, const thread_view *view, int row) {
    return pass->qkv + (size_t)(row - view->first) * (size_t)pass->model->qkv_width;
}

static bool in_integers(const mp_decoder_pass *pass) { return pass->cache->group.dtype != MP_F32; }
static bool in_bytes(const mp_decoder_pass *pass) { return pass->cache->group.dtype == MP_I8; }

/* Rotates n components of a query, key, value or output, if the cache holds bytes. */
static void spread(const mp_decoder_pass *pass, float *x, int n) {
    if (in_bytes(pass))
        mp_kernels_get()->hadamard(x, n, mp_hadamard_size(n), x);
}

/* Two rotations multiply a vector of n components by the size of the matrix. Returns the inverse of this factor, a
 * power of two. */
static float spread_inverse(const mp_decoder_pass *pass, int n) {
    return in_bytes(pass) ? 1.0f / (float)mp_hadamard_size(n) : 1.0f;
}

/* Norms and rotates one head of a query or key, if the layer has the norm and the rotation. */
static void norm_and_rotate(const mp_decoder_pass *pass, const mp_decoder_layer *layer, const mp_norm *norm, int row,
                            float *x) {
    const mp_decoder *model = pass->model;
    const bool rotated = layer->rope >= 0;
    mp_attention_place(norm, rotated ? &model->rope[0] : NULL, rotated ? rotation(pass, row, layer->rope) : NULL,
                       model->rotated_from, 1, model->head_dim, x);
}

/* Rotates key head `head` of a row and stores it, with the value of that head, in the KV cache. */
static void store_row(const mp_decoder_pass *pass, const thread_view *view, const mp_row_seq *seq, int row,
                      const mp_decoder_layer *layer, int head) {
    const mp_decoder *model = pass->model;
    float *k = query_key_value(pass, view, seq->row0 + row) + (size_t)((model->heads + head) * model->head_dim);
    float *v = query_key_value(pass, view, seq->row0 + row) + (model->heads + model->kv_heads) * model->head_dim +
               head * model->value_dim;
    int position = seq->past + row;
    uint32_t block = seq->blocks[position / MP_KV_BLOCK];
    norm_and_rotate(pass, layer, &layer->k_norm, seq->row0 + row, k);
    float padded[MP_HEAD_MAX];
    if (model->kv.v_dim > model->value_dim) { /* rows of V are padded with zeros: mp_kv_width */
        memset(padded, 0, (size_t)model->kv.v_dim * sizeof *padded);
        v = memcpy(padded, v, (size_t)model->value_dim * sizeof *padded);
    }
    if (layer->balance)
        for (int i = 0; i < model->head_dim; i++)
            k[i] /= layer->balance[head * model->head_dim + i];
    spread(pass, k, model->head_dim);
    spread(pass, v, model->kv.v_dim);
    mp_kv_put(pass->cache, block, layer->kv, head, position % MP_KV_BLOCK, k, v);
}

/* Rotates the query heads of group `head` of a row, and converts them to the type that the cache's kernels read. */
static void rotate_queries(const mp_decoder_pass *pass, const thread_view *view, const mp_row_seq *seq, int row,
                           const mp_decoder_layer *layer, int head) {
    const mp_decoder *model = pass->model;
    const mp_kernels *call = mp_kernels_get();
    int group = mp_decoder_group(model);
    float *q = query_key_value(pass, view, seq->row0 + row) + (size_t)(head * group * model->head_dim);
    const float *balance = layer->balance ? layer->balance + mp_decoder_kv_head(model, head) * model->head_dim : NULL;
    for (int g = 0; g < group; g++, q += model->head_dim) {
        norm_and_rotate(pass, layer, &layer->q_norm, seq->row0 + row, q);
        if (balance)
            for (int i = 0; i < model->head_dim; i++)
                q[i] *= balance[i];
        spread(pass, q, model->head_dim);
        if (in_integers(pass))
            call->attn_query_i16(q, model->head_dim);
    }
}

static void store_all(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer,
                      const thread_view *view) {
    const mp_decoder *model = pass->model;
    int64_t begin, end;
    mp_team_split(thread, (int64_t)view->rows * model->groups, 1, &begin, &end);
    int s = 0;
    for (int64_t i = begin; i < end; i++) { /* by row, then group; the first group of each KV head also stores the
                                             * head's key and value */
        int row = view->first + (int)(i / model->groups), group = (int)(i % model->groups);
        int head = mp_decoder_kv_head(model, group);
        while (row >= pass->rows.seq[s].row0 + pass->rows.seq[s].rows)
            s++;
        const mp_row_seq *seq = &pass->rows.seq[s];
        if (group == 0 || mp_decoder_kv_head(model, group - 1) != head)
            store_row(pass, view, seq, row - seq->row0, layer, head);
        rotate_queries(pass, view, seq, row - seq->row0, layer, group);
    }
}

/* Returns the first KV block of the unit that any row of the unit sees. */
static int first_block(const mp_decoder_pass *pass, const mp_attention_unit *unit, const mp_decoder_layer *layer) {
    if (layer->window == 0)
        return unit->block0;
    int seen = mp_kv_first_seen(&pass->model->kv, (int64_t)pass->rows.seq[unit->seq].past + unit->row0);
    return seen > unit->block0 ? seen : unit->block0;
}

/* Returns the arguments of the attention kernels for a unit. */
static mp_attn_kv describe(const mp_decoder_pass *pass, const mp_attention_unit *unit, const mp_decoder_layer *layer,
                           const thread_view *view) {
    const mp_decoder *model = pass->model;
    const mp_row_seq *seq = &pass->rows.seq[unit->seq];
    int group = mp_decoder_group(model);
    void **k = (void **)(view->base + view->at.pointers), **v = k + pass->most_blocks;
    /* set the pointers of one block beyond the unit, too, if it exists: kernels prefetch the next block */
    int blocks = mp_decoder_blocks((int64_t)seq->past + seq->rows);
    for (int b = first_block(pass, unit, layer); b < blocks && b <= unit->block1; b++) {
        k[b] = mp_kv_k(pass->cache, seq->blocks[b], layer->kv, mp_decoder_kv_head(model, unit->head));
        v[b] = mp_kv_v(pass->cache, seq->blocks[b], layer->kv, mp_decoder_kv_head(model, unit->head));
    }
    return (mp_attn_kv){
        .q = query_key_value(pass, view, seq->row0 + unit->row0) + (size_t)(unit->head * group * model->head_dim),
        .ldq = model->qkv_width,
        .ldq_group = model->head_dim,
        .group = group,
        .k_dim = model->head_dim,
        .v_dim = model->kv.v_dim,
        .scale = model->attention_scale * spread_inverse(pass, model->head_dim),
        .pos0 = (int64_t)seq->past + unit->row0,
        .window = layer->window,
        .softcap = model->attention_softcap,
        .k_blocks = k,
        .v_blocks = v,
    };
}

/* Returns the thread's running softmax state: m, l [MP_ATTN_ROWS], o [MP_ATTN_ROWS, kv.v_dim]. */
static mp_attn_partial running_state(const thread_view *view) {
    float *at = (float *)(view->base + view->at.state);
    return (mp_attn_partial){.m = at, .l = at + MP_ATTN_ROWS, .o = at + 2 * MP_ATTN_ROWS};
}

/* Returns the factor on the output of a head: 1 / l, or 1 / (l + exp(sink - m)) if the head has a sink. */
static float output_factor(const mp_decoder_layer *layer, int head, float m, float l) {
    if (!layer->sinks)
        return 1 / l;
    float scores[2] = {m, layer->sinks[head]}, top = scores[1] > m ? scores[1] : m, by[2];
    mp_kernels_get()->exp_sum(scores, 2, top, by);
    return by[0] / (l * by[0] + by[1]);
}

/* Normalises the outputs of a unit's rows and writes them to pass->mixed. */
static void finish_unit(const mp_decoder_pass *pass, const thread_view *view, const mp_attention_unit *unit,
                        const mp_decoder_layer *layer, const mp_attn_partial *state) {
    const mp_decoder *model = pass->model;
    int row0 = pass->rows.seq[unit->seq].row0 + unit->row0 - view->first;
    int group = mp_decoder_group(model), d = model->value_dim;
    for (int r = 0; r < unit->rows; r++)
        for (int g = 0; g < group; g++) {
            float *o = state->o + (size_t)(r * group + g) * (size_t)model->kv.v_dim;
            int at = r * group + g;
            float factor = output_factor(layer, unit->head * group + g, state->m[at], state->l[at]);
            factor = model->residual_scale * factor * spread_inverse(pass, model->kv.v_dim);
            spread(pass, o, model->kv.v_dim);
            float *out = pass->mixed + (size_t)(row0 + r) * (size_t)(model->heads * d) +
                         (size_t)((unit->head * group + g) * d);
            for (int i = 0; i < d; i++)
                out[i] = o[i] * factor;
        }
}

/* Returns the units of this thread in the current block: [*from, return value). */
static int units_of(const mp_decoder_pass *pass, const mp_team_thread *thread, const thread_view *view, int *from) {
    const int *at = pass->thread_units + (ptrdiff_t)view->block * (thread->count + 1) + thread->index;
    *from = at[0];
    return at[1];
}

static void attend_units(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer,
                         const thread_view *view) {
    const mp_decoder *model = pass->model;
    const mp_kernels *call = mp_kernels_get();
    const bool some = pass->mode == MP_ATTEND_TILES && only_outputs(pass, layer);
    int u, end = units_of(pass, thread, view, &u);
    for (; u < end; u++) {
        const mp_attention_unit *unit = &pass->units[u];
        int first, row0 = pass->rows.seq[unit->seq].row0 + unit->row0;
        if (some && outputs_in(pass, row0, unit->rows, &first) == 0)
            continue;
        if (pass->mode == MP_ATTEND_FUSED) {
            store_row(pass, view, &pass->rows.seq[unit->seq], 0, layer, unit->head);
            rotate_queries(pass, view, &pass->rows.seq[unit->seq], 0, layer, unit->head);
        }
        mp_attn_kv attention = describe(pass, unit, layer, view);
        mp_attn_partial state = running_state(view);
        mp_attn_begin(unit->rows * attention.group, model->kv.v_dim, &state);
        (in_bytes(pass)      ? call->attn_kv_i8
         : in_integers(pass) ? call->attn_kv_i16
                             : call->attn_kv)(&attention, unit->rows, first_block(pass, unit, layer), unit->block1,
                                              &state, view->base + view->at.attention);
        finish_unit(pass, view, unit, layer, &state);
    }
}

static mp_attn_partial block_partial(const mp_decoder_pass *pass, int index) {
    float *at = pass->partials + (size_t)index * mp_decoder_partial_floats(pass->model);
    int group = mp_decoder_group(pass->model), d = pass->model->kv.v_dim;
    return (mp_attn_partial){.o = at, .m = at + group * d, .l = at + group * (d + 1)};
}

static void merge_unit(const mp_decoder_pass *pass, const mp_attention_unit *unit, const mp_decoder_layer *layer,
                       const thread_view *view) {
    const mp_decoder *model = pass->model;
    const mp_kernels *call = mp_kernels_get();
    int group = mp_decoder_group(model);
    mp_attn_partial state = running_state(view);
    mp_attn_begin(group, model->kv.v_dim, &state);
    for (int b = first_block(pass, unit, layer); b < unit->block1; b++) {
        mp_attn_partial partial = block_partial(pass, unit->partial + b);
        call->attn_merge(group, model->kv.v_dim, &partial, &state);
    }
    finish_unit(pass, view, unit, layer, &state);
}

static void attend_split(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer,
                         const thread_view *view) {
    const mp_decoder *model = pass->model;
    const mp_kernels *call = mp_kernels_get();
    int u, last = units_of(pass, thread, view, &u);
    for (; u < last; u++) {
        const mp_attention_unit *unit = &pass->units[u];
        mp_attn_kv attention = describe(pass, unit, layer, view);
        for (int b = first_block(pass, unit, layer); b < unit->block1; b++) {
            mp_attn_partial partial = block_partial(pass, unit->partial + b - unit->block0);
            (in_bytes(pass)      ? call->attn_block_i8
             : in_integers(pass) ? call->attn_block_i16
                                 : call->attn_block)(&attention, 1, b, &partial);
        }
    }
    mp_team_barrier(thread);
    int64_t begin, end;
    mp_team_split(thread, (int64_t)pass->rows.n_seq * model->groups, 1, &begin, &end);
    int first = 0; /* index of the partial of the unit's first block */
    for (int64_t i = 0; i < end; i++) {
        int seq = (int)(i / model->groups);
        int blocks = mp_decoder_blocks((int64_t)pass->rows.seq[seq].past + 1);
        mp_attention_unit unit = {seq, (int)(i % model->groups), 0, 1, 0, blocks, first};
        if (i >= begin)
            merge_unit(pass, &unit, layer, view);
        first += blocks;
    }
}

static void attend(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer,
                   const thread_view *view) {
    if (pass->mode != MP_ATTEND_FUSED) {
        store_all(pass, thread, layer, view);
        mp_team_barrier(thread);
    }
    if (pass->mode == MP_ATTEND_SPLIT)
        attend_split(pass, thread, layer, view);
    else
        attend_units(pass, thread, layer, view);
}

/* ---- captures ---------------------------------------------------------------------------------------------------- */

/* Copies pass->x of the captured rows to their record `record`. Only thread 0 copies; x changes only after the next
 * barrier. */
static inline void capture_rows(const mp_decoder_pass *pass, const mp_team_thread *thread, int record) {
    for (int i = 0; i < pass->rows.n_capture && thread->index == 0; i++) {
        const mp_capture_row *row = &pass->rows.capture[i];
        memcpy(row->to + (ptrdiff_t)record * row->values, pass->x + (ptrdiff_t)row->row * pass->model->hidden,
               (size_t)row->values * sizeof(float));
    }
}

/* Copies the records of the final norm (normed) and of the logits (y) of M outputs, from output `first` on. */
static void capture_outputs(const mp_decoder_pass *pass, const mp_team_thread *thread, int first, int M,
                            const float *normed, const float *y) {
    const mp_decoder *model = pass->model;
    for (int i = 0; i < pass->rows.n_capture && thread->index == 0; i++) {
        const mp_capture_row *row = &pass->rows.capture[i];
        float *to = row->to + (ptrdiff_t)(model->layer_count + 1) * row->values;
        int at = row->output - first;
        if (at < 0 || at >= M)
            continue;
        if (normed)
            memcpy(to, normed + (ptrdiff_t)at * model->hidden, (size_t)row->values * sizeof(float));
        if (y)
            memcpy(to + row->values, y + (ptrdiff_t)at * model->vocab, (size_t)row->logits * sizeof(float));
    }
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

/* With so few rows, every thread prepares all rows in its own scratch. Otherwise the threads prepare the rows together
 * in shared memory, and a barrier follows. */
static bool is_private(int M) { return M <= MP_PRIVATE_ROWS; }

static const float *norm_rows(const mp_decoder *model, const mp_team_thread *thread, const thread_view *view,
                              const float *x, const mp_norm *norm, int M, float *shared) {
    float *out = is_private(M) ? (float *)view->base : shared;
    int64_t row0 = 0, row1 = M;
    if (!is_private(M))
        mp_team_split(thread, M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++)
        mp_norm_row(norm, x + r * model->hidden, out + r * model->hidden);
    if (!is_private(M))
        mp_team_barrier(thread);
    return out;
}

static void scale_row(float by, float *x, int64_t n) {
    if (by == 1)
        return;
    for (int64_t i = 0; i < n; i++)
        x[i] *= by;
}

static const float *gate_rows(const mp_decoder *model, const mp_team_thread *thread, const thread_view *view,
                              int64_t ffn, int M, float *inner, int64_t *ld) {
    const mp_kernels *call = mp_kernels_get();
    int64_t row0 = 0, row1 = M;
    float *out = inner;
    *ld = 2 * ffn;
    if (is_private(M)) {
        out = (float *)view->base;
        *ld = ffn;
    } else {
        mp_team_split(thread, M, 1, &row0, &row1);
    }
    for (int64_t r = row0; r < row1; r++) {
        call->gated(model->act, inner + r * 2 * ffn, inner + r * 2 * ffn + ffn, ffn, out + r * *ld);
        scale_row(model->residual_scale, out + r * *ld, ffn);
    }
    if (!is_private(M))
        mp_team_barrier(thread);
    return out;
}

/* Returns the row context of the current block. */
static mp_row_context context_of(const mp_decoder_pass *pass, const mp_team_thread *thread, const thread_view *view) {
    return (mp_row_context){
        .thread = thread,
        .acts = pass->acts,
        .own_acts = view->base + view->at.acts,
        .panel_scratch = view->panel_scratch,
        .adapters = view->adapters,
        .low_rank = pass->low_rank,
        .low_rank_width = pass->model->adapters.width,
    };
}

/* Adds linear(in) to the residual sum of the block. If the layer has `norm`, the product is normed first. in NULL: uses
 * the activations that mp_linear_into left in pass->inner. Ends with a barrier. */
static void add_output(const mp_decoder_pass *pass, const mp_team_thread *thread, const thread_view *view,
                       const mp_linear *linear, const mp_norm *norm, const float *in, int64_t ld) {
    const mp_decoder *model = pass->model;
    const mp_row_context context = context_of(pass, thread, view);
    const mp_residual sum = {.x = pass->x + (int64_t)view->first * model->hidden,
                             .n = model->hidden,
                             .after = norm,
                             .scratch = pass->normed};
    mp_residual_add(&context, linear, in, ld, view->rows, pass->inner, &sum);
    mp_team_barrier(thread);
}

/* Moves the output rows of the block to its first rows, in the residual sums and in `attended` [rows, width], or the
 * residual sums back to their rows. Ends with a barrier. */
static void move_outputs(const mp_decoder_pass *pass, const mp_team_thread *thread, const thread_view *view, int first,
                         int count, float *attended, int64_t width, bool back) {
    const int64_t hidden = pass->model->hidden;
    float *x = pass->x + view->first * hidden;
    for (int i = 0; i < count && thread->index == 0; i++) {
        const int at = back ? count - 1 - i : i; /* rows move down one by one, and back in the opposite order */
        const int row = pass->rows.output_row[first + at] - view->first, from = back ? at : row, to = back ? row : at;
        if (from == to)
            continue;
        memcpy(x + to * hidden, x + from * hidden, (size_t)hidden * sizeof *x);
        if (!back)
            memcpy(attended + to * width, attended + from * width, (size_t)width * sizeof *attended);
    }
    mp_team_barrier(thread);
}

/* Adds the feed-forward sublayer to the rows of the view. Ends with a barrier. */
static void feed_forward(const mp_decoder_pass *pass, const mp_team_thread *thread, const mp_decoder_layer *layer,
                         const thread_view *view) {
    const mp_decoder *model = pass->model;
    const int M = view->rows;
    const int64_t hidden = model->hidden;
    int64_t ld;
    float *x = pass->x + view->first * hidden;
    const mp_row_context context = context_of(pass, thread, view);
    const float *in = norm_rows(model, thread, view, x, &layer->ffn_norm, M, pass->normed);
    if (layer->experts.count > 0) {
        mp_experts_forward(&layer->experts, thread, in, M, model->residual_scale, pass->experts,
                           view->base + view->at.expert, pass->lease, x);
        if (layer->ffn == 0)
            return;
    }
    if (M >= GATED_MIN && !pass->unpacked && !view->adapters && model->residual_scale == 1 &&
        mp_linear_fits(&layer->gate_up, &layer->down)) {
        mp_linear_into(&layer->gate_up, &layer->down, thread, in, hidden, M, pass->acts, model->act, pass->inner);
        mp_team_barrier(thread);
        add_output(pass, thread, view, &layer->down, &layer->ffn_after, NULL, 0);
        return;
    }
    mp_row_linear(&context, &layer->gate_up, in, hidden, M, NULL, pass->inner, 2 * (int64_t)layer->ffn);
    mp_team_barrier(thread);
    in = gate_rows(model, thread, view, layer->ffn, M, pass->inner, &ld);
    add_output(pass, thread, view, &layer->down, &layer->ffn_after, in, ld);
}

static void run_layer(const mp_decoder_pass *pass, const mp_team_thread *thread, int index, const thread_view *view) {
    const mp_decoder *model = pass->model;
    const mp_decoder_layer *layer = &model->layers[index];
    const int M = view->rows;
    int64_t hidden = model->hidden, mixed = (int64_t)model->heads * model->value_dim;
    const mp_row_context context = context_of(pass, thread, view);

    const float *in = norm_rows(model, thread, view, pass->x + view->first * hidden, &layer->attention_norm, M,
                                pass->normed);
    float *attended = pass->mixed;
    if (model->latent.rank > 0)
        mp_mla_project(pass, thread, layer, M, in, context.own_acts, context.panel_scratch,
                       view->base + view->at.by_head);
    else
        mp_row_linear(&context, &layer->qkv, in, hidden, M, NULL, pass->qkv, model->qkv_width);
    mp_team_barrier(thread);
    attend(pass, thread, layer, view);
    mp_team_barrier(thread);
    if (model->latent.rank > 0) {
        mp_mla_values(pass, thread, layer, M, view->base + view->at.by_head);
        mp_team_barrier(thread);
        attended = pass->per_head;
        mixed = (int64_t)model->heads * model->latent.value;
    }
    thread_view rest = *view; /* the rows whose results are wanted */
    int first = 0;
    if (only_outputs(pass, layer))
        rest.rows = outputs_in(pass, view->first, M, &first);
    if (rest.rows == 0)
        return;
    if (rest.rows < M) {
        move_outputs(pass, thread, view, first, rest.rows, attended, mixed, false);
        rest.adapters = pass->output_adapter ? pass->output_adapter + first : NULL;
    }
    add_output(pass, thread, &rest, &layer->out, &layer->attention_after, attended, mixed);
    feed_forward(pass, thread, layer, &rest);
    if (rest.rows < M)
        move_outputs(pass, thread, view, first, rest.rows, NULL, 0, true);
}

static void embed_rows(const mp_decoder_pass *pass, const mp_team_thread *thread) {
    const mp_decoder *model = pass->model;
    int64_t row0, row1;
    mp_team_split(thread, pass->rows.M, 1, &row0, &row1);
    int s = 0;
    for (int64_t r = row0; r < row1; r++) {
        while (r >= pass->rows.seq[s].row0 + pass->rows.seq[s].rows)
            s++;
        const mp_row_seq *seq = &pass->rows.seq[s];
        float *x = pass->x + r * model->hidden;
        int32_t id = pass->rows.id[r];
        const float *vector = pass->rows.vector ? pass->rows.vector[r] : NULL;
        if (vector)
            memcpy(x, vector, (size_t)model->hidden * sizeof *x);
        else if (model->tied && model->head.stored[0])
            mp_stored_row(model->head.stored[0], &model->head.w[0], id, x);
        else if (model->tied)
            mp_wmat_row(&model->head.w[0], id, x);
        else
            mp_dequantize_row(model->tokens.dtype, mp_tensor_row(&model->tokens, id), model->hidden, x);
        if (!vector)
            scale_row(model->embedding_scale, x, model->hidden);
        if (model->sections[0] > 0) {
            int32_t number = seq->past + (int32_t)r - seq->row0, all = number + seq->shift, axes[3] = {all, all, all};
            mp_rope_axes(&model->rope[0], model->sections,
                         seq->positions && number < seq->n_positions ? seq->positions[number] : axes,
                         rotation(pass, (int)r, 0));
            continue;
        }
        for (int i = 0; i < model->ropes; i++)
            mp_rope_row(&model->rope[seq->is_long ? 1 : i], seq->past + r - seq->row0, rotation(pass, (int)r, i));
    }
    mp_team_barrier(thread);
}

/* Computes the logits of M rows of x (at most one block) into y [M, vocab]. first: index of the first row among the
 * pass's outputs; -1: the rows are not outputs. */
static void output_rows(const mp_decoder_pass *pass, const mp_team_thread *thread, const thread_view *view,
                        const float *x, int M, int first, float *y) {
    const mp_decoder *model = pass->model;
    const float *in = norm_rows(model, thread, view, x, &model->norm, M, pass->normed);
    if (first >= 0)
        capture_outputs(pass, thread, first, M, in, NULL);
    const mp_row_context context = context_of(pass, thread, view);
    mp_row_linear(&context, &model->head, in, model->hidden, M, NULL, y, model->vocab);
    mp_team_barrier(thread);
    if (model->output_scale == 1 && model->output_softcap == 0)
        return;
    int64_t begin, end;
    mp_team_split(thread, (int64_t)M * model->vocab, 16, &begin, &end);
    scale_row(model->output_scale, y + begin, end - begin);
    if (model->output_softcap > 0)
        mp_kernels_get()->softcap(model->output_softcap, end - begin, y + begin);
    mp_team_barrier(thread);
}

/* Polls between layers. Returns true on all threads if the pass must stop. Thread 0 polls the lease, which reports
 * progress and returns true if no request wants the result any more; the barrier makes `stop` visible to all threads.
 * Later barriers ensure that every thread has read `stop` before thread 0 writes it again. */
static bool stopped(mp_decoder_pass *pass, const mp_team_thread *thread) {
    if (thread->index == 0)
        pass->stop = mp_lease_poll(pass->lease);
    mp_team_barrier(thread);
    return pass->stop;
}

void mp_decoder_forward(mp_decoder_pass *pass, const mp_team_thread *thread) {
    const mp_decoder *model = pass->model;
    const int M = pass->rows.M, most = mp_decoder_most_rows(model, M);
    size_t hidden = (size_t)model->hidden;
    thread_view view = {.base = pass->thread_scratch + (size_t)thread->index * pass->thread_bytes,
                        .at = mp_decoder_thread_layout(model, pass->most_blocks)};
    view.panel_scratch = view.base + view.at.panel;
    embed_rows(pass, thread);
    capture_rows(pass, thread, 0);
    for (int l = 0; l < model->layer_count; l++) {
        /* a layer that comes from a slow disk may take seconds */
        if ((pass->warming || l % POLL_LAYERS == 0) && stopped(pass, thread))
            return;
        for (view.block = 0; view.block < pass->block_count; view.block++) {
            view.first = view.block * pass->block_rows;
            view.rows = M - view.first < pass->block_rows ? M - view.first : pass->block_rows;
            view.adapters = pass->row_adapter ? pass->row_adapter + view.first : NULL;
            run_layer(pass, thread, l, &view);
        }
        capture_rows(pass, thread, l + 1);
    }
    view.adapters = NULL; /* adapters do not update the head */
    for (int s = 0; s < pass->rows.n_seq; s++) {
        const mp_row_seq *seq = &pass->rows.seq[s];
        for (int r = 0; seq->all_outputs && r < seq->all_rows; r += most)
            output_rows(pass, thread, &view, pass->x + (size_t)(seq->row0 + r) * hidden,
                        seq->all_rows - r < most ? seq->all_rows - r : most, -1,
                        seq->all_outputs + (size_t)r * (size_t)model->vocab);
    }
    for (int first = 0; first < pass->rows.n_output; first += most) {
        /* gather the output rows in the buffer of the queries, which is free now */
        const int n = pass->rows.n_output - first < most ? pass->rows.n_output - first : most;
        int64_t begin, end;
        mp_team_split(thread, n, 1, &begin, &end);
        for (int64_t i = begin; i < end; i++)
            memcpy(pass->qkv + (size_t)i * hidden, pass->x + (size_t)pass->rows.output_row[first + i] * hidden,
                   hidden * sizeof(float));
        mp_team_barrier(thread);
        float *logits = pass->rows.logits + (size_t)first * (size_t)model->vocab;
        output_rows(pass, thread, &view, pass->qkv, n, first, logits);
        capture_outputs(pass, thread, first, n, NULL, logits);
    }
}
