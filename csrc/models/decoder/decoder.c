/* decoder/decoder.c: the forward pass of decoders (Llama: Touvron et al., arXiv:2302.13971; Qwen2: arXiv:2407.10671).
 *
 * A usual layer, on all threads (| is a barrier):
 *   norm, query-key-value | rotate, store, attend | output + residual | norm, gate and up | gate, down + residual |
 * With at most MP_PRIVATE_ROWS rows every thread norms and quantises all rows for itself, which is cheaper than a
 * barrier. With more rows, the threads divide the rows, at the cost of one more barrier. The rows of a pass go through
 * a layer in row blocks, one after the other (decoder/pass.h); the buffers of queries, attention and the like hold one
 * row block. In a long pass on two to four threads, each thread carries row blocks through the layers alone
 * (decoder/wavefront.h). decoder/layer.h describes layers; each mixer and each feed-forward network has a file of its
 * own. */
#include <assert.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "base/spread.h"
#include "models/decoder/streams.h"
#include "models/decoder/wavefront.h"

enum {
    POLL_LAYERS = 4
};

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

/* ---- the last layer ---------------------------------------------------------------------------------------------- */

/* Returns true if only the output rows are read after the last mixer of the model, which stores the keys and values of
 * all rows. */
static bool needs_only_outputs(const mp_decoder_pass *pass) {
    bool all = pass->rows.n_capture > 0 || pass->streams || pass->model->whole_prompts;
    for (int s = 0; !all && s < pass->rows.n_seq; s++)
        all = pass->rows.seq[s].all_outputs != NULL;
    return !all;
}

/* Moves `count` output rows of the block, from output `first` on, to the first rows of an array [rows, width], or back
 * to their rows. */
static void move_rows(const mp_decoder_pass *pass, const mp_decoder_view *view, int first, int count, float *array,
                      int64_t width, bool back) {
    for (int i = 0; i < count; i++) {
        const int at = back ? count - 1 - i : i; /* rows move down one by one, and back in the opposite order */
        const int row = pass->rows.output_row[first + at] - view->first, from = back ? at : row, to = back ? row : at;
        if (from != to)
            memcpy(array + to * width, array + from * width, (size_t)width * sizeof *array);
    }
}

/* Drops the other rows than outputs from the view, the residual sums, `in` [rows, hidden] and `mixed`; in and mixed may
 * be NULL. Returns the index of the first output. Ends with a barrier if rows moved. */
static int keep_outputs(const mp_decoder_pass *pass, mp_decoder_view *view, float *in, const mp_mixed *mixed) {
    const int64_t hidden = pass->model->hidden;
    const bool own = in == view->own_rows; /* every thread has a copy of the normed rows */
    int first;
    const int count = mp_decoder_outputs_in(pass, view->first, view->rows, &first);
    if (count == view->rows)
        return first;
    const bool leads = view->context.thread->index == 0;
    if (leads)
        move_rows(pass, view, first, count, pass->x + view->first * hidden, hidden, false);
    if (leads && mixed)
        move_rows(pass, view, first, count, mixed->rows, mixed->width, false);
    if (in && (own || leads))
        move_rows(pass, view, first, count, in, hidden, false);
    view->rows = count;
    view->context.adapters = pass->output_adapter ? pass->output_adapter + first : NULL;
    view->context.inputs = pass->output_inputs ? pass->output_inputs + first : NULL;
    if (count > 0)
        mp_team_barrier(view->context.thread);
    return first;
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

/* Norms the rows of the view at x; without a norm, copies them. With at most MP_PRIVATE_ROWS rows, every thread
 * prepares all of them for itself. Otherwise the threads share the rows and the result, and a barrier follows. */
static float *norm_rows(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_norm *norm, const float *x) {
    const int64_t hidden = pass->model->hidden;
    const bool own = view->rows <= MP_PRIVATE_ROWS;
    float *out = own ? view->own_rows : pass->normed;
    int64_t row0 = 0, row1 = view->rows;
    if (!own)
        mp_team_split(view->context.thread, view->rows, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++)
        if (norm->weight)
            mp_norm_row(norm, x + r * hidden, out + r * hidden);
        else
            memcpy(out + r * hidden, x + r * hidden, (size_t)hidden * sizeof *out);
    if (!own)
        mp_team_barrier(view->context.thread);
    return out;
}

static void scale_row(float by, float *x, int64_t n) {
    if (by == 1)
        return;
    for (int64_t i = 0; i < n; i++)
        x[i] *= by;
}

/* Adds up the outputs of a sublayer's networks, each with a norm, and adds the norm of the result to the residual sum.
 * in: the normed rows. Ends with a barrier. */
static void add_up(const mp_decoder_pass *pass, const mp_decoder_view *view, const mp_sublayer *sub, const float *in,
                   const mp_residual *sum) {
    const mp_team_thread *thread = view->context.thread;
    const int64_t n = sum->n;
    mp_residual outputs = {.x = pass->added, .n = sum->n, .scratch = pass->normed};
    int64_t begin, end;
    mp_team_split(thread, view->rows, 1, &begin, &end); /* blocks add normed rows of the same split */
    memset(outputs.x + begin * n, 0, (size_t)((end - begin) * n) * sizeof *outputs.x);
    for (int f = 0; f < sub->ffns; f++) {
        const mp_ffn *ffn = sub->ffn[f];
        outputs.after = &ffn->after;
        ffn->ops->add(&view->context, ffn, ffn->norm.weight ? sum->x : in, view->rows, sub->scale, pass->shared,
                      view->own, &outputs);
        mp_team_barrier(thread);
    }
    for (int64_t r = begin; r < end; r++) {
        mp_norm_row(sum->after, outputs.x + r * n, outputs.x + r * n);
        mp_residual_row(sum, outputs.x + r * n, r);
    }
    mp_team_barrier(thread);
}

/* Runs a sublayer on the rows of the view. `last`: after its last mixer, or at once if it has none, the view keeps the
 * output rows only. Returns the index of the first output then. Ends with a barrier. */
static int run_sublayer(const mp_decoder_pass *pass, mp_decoder_view *view, const mp_sublayer *sub, bool last) {
    const mp_team_thread *thread = view->context.thread;
    const mp_residual sum = {.x = pass->x + (int64_t)view->first * pass->model->hidden,
                             .n = pass->model->hidden,
                             .after = &sub->after,
                             .total = sub->total,
                             .scratch = sub->mixers > 0 && sub->ffns > 0 ? pass->added : pass->normed};
    const mp_residual mixed_sum = {.x = sum.x, .n = sum.n, .after = sum.after, .scratch = sum.scratch,
                                   .total = sub->ffns > 0 ? NULL : sum.total};
    assert(!sub->after.weight || sub->mixers + sub->ffns == 1 || pass->added);
    int first = 0;
    if (last && sub->mixers == 0)
        first = keep_outputs(pass, view, NULL, NULL);
    if (view->rows == 0)
        return first;
    float *const in = norm_rows(pass, view, &sub->norm, sum.x);
    for (int m = 0; m < sub->mixers; m++) {
        const mp_mixer *mixer = sub->mixer[m];
        view->outputs_only = last && m == sub->mixers - 1;
        const mp_mixed mixed = mixer->ops->mix(pass, view, mixer, in, sub->scale * mixer->scale);
        if (view->outputs_only)
            first = keep_outputs(pass, view, sub->ffns > 0 ? in : NULL, &mixed);
        if (view->rows == 0)
            return first;
        mp_residual_add(&view->context, &mixer->out, mixed.rows, mixed.width, view->rows, NULL, &mixed_sum);
        mp_team_barrier(thread);
    }
    if (sub->ffns > 1 && sub->after.weight) {
        add_up(pass, view, sub, in, &sum);
        return first;
    }
    for (int f = 0; f < sub->ffns; f++) {
        sub->ffn[f]->ops->add(&view->context, sub->ffn[f], in, view->rows, sub->scale, pass->shared, view->own, &sum);
        mp_team_barrier(thread);
    }
    return first;
}

/* Runs a layer on the rows of the view. few: only the output rows are read after the last mixer of the model. */
static void run_layer(const mp_decoder_pass *pass, const mp_decoder_view *all, bool few) {
    const mp_decoder_layer *layer = &pass->model->layers[all->layer];
    mp_decoder_view view = *all;
    const int count = layer->count - (pass->streams != NULL); /* mp_streams_correct runs the last one */
    int mixes = 0; /* the last sublayer with a mixer */
    for (int s = 0; s < count; s++)
        if (layer->sublayer[s].mixers > 0)
            mixes = s;
    const int last = few && all->layer >= pass->model->last_mixed ? mixes : -1; /* the one that keeps the output rows */
    int first = 0;
    if (pass->streams)
        mp_streams_predict(pass, &view, layer);
    for (int s = 0; s < count && view.rows > 0; s++) {
        const int at = run_sublayer(pass, &view, &layer->sublayer[s], s == last);
        first = s == last ? at : first;
        if (s == mixes && pass->wavefront)
            mp_wavefront_mixed(pass->wavefront, view.block);
    }
    if (pass->streams)
        mp_streams_correct(pass, &view, layer);
    if (view.rows == 0 || view.rows == all->rows)
        return;
    if (view.context.thread->index == 0)
        move_rows(pass, all, first, view.rows, pass->x + (int64_t)all->first * pass->model->hidden,
                  pass->model->hidden, true);
    mp_team_barrier(view.context.thread);
}

/* ---- input and output -------------------------------------------------------------------------------------------- */

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
        else if (model->tied)
            mp_linear_row(&model->head, 0, id, x);
        else
            mp_dequantize_row(model->tokens.dtype, mp_tensor_row(&model->tokens, id), model->hidden, x);
        if (!vector)
            scale_row(model->embedding_scale, x, model->hidden);
        if (model->sections.pairs[0] > 0) {
            int32_t number = seq->past + (int32_t)r - seq->row0, all = number + seq->shift, axes[3] = {all, all, all};
            mp_rope_axes(&model->rope[0], &model->sections,
                         seq->positions && number < seq->n_positions ? seq->positions[number] : axes,
                         mp_decoder_rotation(pass, (int)r, 0));
            continue;
        }
        for (int i = 0; i < model->ropes; i++)
            mp_rope_row(&model->rope[seq->is_long ? 1 : i], seq->past + r - seq->row0,
                        mp_decoder_rotation(pass, (int)r, i));
    }
    mp_team_barrier(thread);
}

/* Computes the inputs of a row for all layers in place of `to` [layers * width], its projections. id: the token; those
 * without a row in the table have that of token 0, which pads texts. row: scratch of the same size. */
static void finish_inputs(const mp_decoder *model, int32_t id, float *to, float *row) {
    const mp_kernels *call = mp_kernels_get();
    const int32_t width = model->inputs.width, all = width * model->layer_count;
    scale_row(1 / sqrtf((float)model->hidden), to, all);
    for (int32_t at = 0; at < all; at += width)
        mp_norm_row(&model->inputs.norm, to + at, to + at);
    if (model->inputs.plain)
        return;
    id = id >= 0 && id < model->inputs.table.shape[0] ? id : 0;
    mp_dequantize_row(model->inputs.table.dtype, mp_tensor_row(&model->inputs.table, id), all, row);
    scale_row(sqrtf((float)width), row, all);
    call->add(row, all, to);
    scale_row(sqrtf(0.5f), to, all);
}

/* Computes the inputs of all rows, in row blocks, which the scratch is made for. Ends with a barrier. */
static void embed_inputs(const mp_decoder_pass *pass, const mp_decoder_view *view) {
    const mp_decoder *model = pass->model;
    const mp_team_thread *thread = view->context.thread;
    const int64_t all = (int64_t)model->inputs.width * model->layer_count;
    int64_t row0, row1;
    mp_row_context context = view->context;
    for (int first = 0; first < pass->rows.M; first += pass->block_rows) {
        const int rows = pass->rows.M - first < pass->block_rows ? pass->rows.M - first : pass->block_rows;
        context.adapters = pass->row_adapter ? pass->row_adapter + first : NULL;
        mp_row_linear(&context, &model->inputs.project, pass->x + (int64_t)first * model->hidden, model->hidden, rows,
                      NULL, pass->inputs + first * all, (int32_t)all);
        mp_team_barrier(thread);
    }
    mp_team_split(thread, pass->rows.M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++) /* rows of images have negative ids */
        finish_inputs(model, pass->rows.id[r], pass->inputs + r * all, (float *)(void *)view->own);
    mp_team_barrier(thread);
    /* pages of the table would stay resident, with those that the system maps around them */
    if (thread->index == 0 && !model->inputs.plain)
        mp_weights_release(model->weights, &model->inputs.table);
}

/* Adds the next vectors of image rows to the output of a layer for `rows` rows from `first` on. After the last mixer,
 * rows that are no outputs may hold anything, and nothing reads them. Ends with a barrier. */
static void add_taps(const mp_decoder_pass *pass, const mp_team_thread *thread, int first, int rows, int layer) {
    const int64_t hidden = pass->model->hidden;
    int64_t row0, row1;
    if (!pass->rows.vector || layer >= pass->rows.taps)
        return;
    mp_team_split(thread, rows, 1, &row0, &row1);
    for (int64_t r = first + row0; r < first + row1; r++)
        if (pass->rows.vector[r])
            mp_kernels_get()->add(pass->rows.vector[r] + (1 + layer) * hidden, (int)hidden, pass->x + r * hidden);
    mp_team_barrier(thread);
}

/* Replaces the embeddings by the residual sums of a pass that was paused. */
static void resume_rows(const mp_decoder_pass *pass, const mp_team_thread *thread) {
    const int64_t hidden = pass->model->hidden;
    int64_t row0, row1;
    mp_team_split(thread, pass->rows.M, 1, &row0, &row1);
    memcpy(pass->x + row0 * hidden, pass->resumed + row0 * hidden, (size_t)((row1 - row0) * hidden) * sizeof(float));
    mp_team_barrier(thread);
}

/* Returns true if the outputs from `first` on are means of normed rows. */
static bool pools(const mp_decoder_pass *pass, int first) { return first >= 0 && pass->model->whole_prompts; }

/* Norms the residual sums of all rows in place. Begins with a barrier, because thread 0 may still capture them. Ends
 * with a barrier. */
static void norm_all(const mp_decoder_pass *pass, const mp_team_thread *thread) {
    const int64_t hidden = pass->model->hidden;
    int64_t row0, row1;
    mp_team_barrier(thread);
    mp_team_split(thread, pass->rows.M, 1, &row0, &row1);
    for (int64_t r = row0; r < row1; r++)
        mp_norm_row(&pass->model->norm, pass->x + r * hidden, pass->x + r * hidden);
    mp_team_barrier(thread);
}

/* Writes the means of the rows of `n` sequences, those of the outputs from `first` on, to outputs [n, hidden]. Threads
 * divide the components. Ends with a barrier. */
static void pool_outputs(const mp_decoder_pass *pass, const mp_team_thread *thread, int first, int n, float *outputs) {
    const int64_t hidden = pass->model->hidden;
    int64_t begin, end;
    mp_team_split(thread, hidden, 16, &begin, &end);
    for (int i = 0, s = 0; i < n; i++) {
        const int row = pass->rows.output_row[first + i];
        while (row >= pass->rows.seq[s].row0 + pass->rows.seq[s].rows)
            s++;
        const mp_row_seq *seq = &pass->rows.seq[s];
        float *const out = outputs + i * hidden;
        mp_kernels_get()->column_sums(pass->x + seq->row0 * hidden + begin, hidden, seq->rows, (int)(end - begin), NULL,
                                      out + begin);
        for (int64_t c = begin; c < end; c++)
            out[c] /= (float)seq->rows;
    }
    mp_team_barrier(thread);
}

/* Computes the logits of the rows of the view (at most one block) at x into y [rows, vocab]. first: index of the first
 * row among the pass's outputs; -1: the rows are not outputs. */
static void output_rows(const mp_decoder_pass *pass, const mp_decoder_view *view, const float *x, int first, float *y) {
    const mp_decoder *model = pass->model;
    const mp_team_thread *thread = view->context.thread;
    const int M = view->rows;
    static const mp_norm none;
    const float *in = norm_rows(pass, view, pools(pass, first) ? &none : &model->norm, x);
    if (first >= 0)
        capture_outputs(pass, thread, first, M, in, NULL);
    mp_row_linear(&view->context, &model->head, in, model->hidden, M, NULL, y, model->vocab);
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

/* Polls before layer `layer`. Returns true on all threads if the pass must stop or pauses, which keeps x of all rows.
 * Thread 0 polls the lease, which reports progress and returns true if no request wants the result any more; the
 * barrier makes `stop` and `paused` visible to all threads. Later barriers ensure that every thread has read them
 * before thread 0 writes again. first: the first layer of the pass, which is always computed. */
static bool stopped(mp_decoder_pass *pass, const mp_team_thread *thread, int layer, int first) {
    if (thread->index == 0) {
        pass->stop = mp_lease_poll(pass->lease);
        const bool may_pause = !pass->streams && !(pass->rest && layer > pass->model->last_stored + 1);
        pass->paused = may_pause && !pass->stop && pass->until_ns > 0 && layer > first &&
                       mp_sys_now_ns() >= pass->until_ns;
        pass->layer = pass->paused ? layer : pass->layer;
    }
    mp_team_barrier(thread);
    return pass->stop || pass->paused;
}

static mp_decoder_view view_of(const mp_decoder_pass *pass, const mp_team_thread *thread) {
    uint8_t *const base = pass->thread_scratch + (size_t)thread->index * pass->thread_bytes;
    uint8_t *const own = base + pass->own_rows + pass->own_acts;
    return (mp_decoder_view){.context = {.thread = thread,
                                         .acts = pass->acts,
                                         .own_acts = base + pass->own_rows,
                                         .panel_scratch = own + pass->own,
                                         .low_rank = pass->low_rank,
                                         .low_rank_width = pass->model->adapters.width,
                                         .least_joined = pass->unpacked ? INT_MAX : MP_DECODER_JOINED,
                                         .lease = pass->lease},
                             .own_rows = (float *)base,
                             .own = own};
}

/* Copies the residual sums and rotations of the output rows to the rest of the pass. Ends with a barrier. */
static void enter_rest(const mp_decoder_pass *pass, const mp_team_thread *thread) {
    const mp_decoder_pass *rest = pass->rest;
    const size_t hidden = (size_t)pass->model->hidden, angles = (size_t)(pass->model->ropes * pass->model->rope_dim);
    int64_t begin, end;
    mp_team_split(thread, rest->rows.M, 1, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const size_t row = (size_t)pass->rows.output_row[i];
        memcpy(rest->x + (size_t)i * hidden, pass->x + row * hidden, hidden * sizeof(float));
        if (pass->streams) {
            const size_t width = hidden * (size_t)pass->model->streams;
            memcpy(rest->streams + (size_t)i * width, pass->streams + row * width, width * sizeof(float));
        }
        memcpy(rest->cos_sin + (size_t)i * angles, pass->cos_sin + row * angles, angles * sizeof(float));
    }
    mp_team_barrier(thread);
}

/* Copies the residual sums of `n` outputs, from output `first` on, to outputs [n, hidden]. Ends with a barrier. */
static void gather_outputs(const mp_decoder_pass *pass, const mp_team_thread *thread, int first, int n,
                           float *outputs) {
    const size_t hidden = (size_t)pass->model->hidden;
    int64_t begin, end;
    mp_team_split(thread, n, 1, &begin, &end);
    for (int64_t i = begin; i < end; i++)
        memcpy(outputs + (size_t)i * hidden, pass->x + (size_t)pass->rows.output_row[first + i] * hidden,
               hidden * sizeof(float));
    mp_team_barrier(thread);
}

/* Sets the view to a row block of the pass. */
static void enter_block(const mp_decoder_pass *pass, mp_decoder_view *view, int block) {
    view->block = block;
    view->first = pass->block_first[block];
    view->rows = pass->block_first[block + 1] - view->first;
    view->context.adapters = pass->row_adapter ? pass->row_adapter + view->first : NULL;
    view->context.inputs = pass->row_inputs ? pass->row_inputs + view->first : NULL;
}

/* Computes the layers of the wavefront. Returns false on all threads if the pass is over: no request wants the result
 * any more, or pass->computed says how many rows were computed. */
static bool run_wavefront(mp_decoder_pass *pass, const mp_team_thread *thread, bool few) {
    const mp_decoder_pass *own = &pass->carried[thread->index];
    mp_wavefront *const wave = own->wavefront;
    const mp_team_thread alone = mp_team_single();
    mp_decoder_view view = view_of(own, thread);
    view.context.thread = &alone;
    for (int block; (block = mp_wavefront_take(wave, thread, &view.layer)) >= 0;) {
        const int cpu = mp_spread_begin();
        enter_block(own, &view, block);
        run_layer(own, &view, few);
        add_taps(own, &alone, view.first, view.rows, view.layer);
        mp_spread_end(cpu);
        mp_wavefront_finish(wave, block);
        if (mp_lease_poll(pass->lease))
            mp_wavefront_stop(wave);
        else if (pass->may_end && mp_lease_wanted(pass->lease))
            mp_wavefront_close(wave);
    }
    mp_team_barrier(thread);
    const bool stopped = atomic_load_explicit(&wave->stopped, memory_order_relaxed);
    const int rows = pass->carried->block_first[mp_wavefront_finished(wave)];
    if (thread->index == 0) {
        pass->stop = stopped;
        pass->computed = rows;
    }
    return !stopped && rows == pass->rows.M;
}

void mp_decoder_forward(mp_decoder_pass *pass, const mp_team_thread *thread) {
    const mp_decoder *model = pass->model;
    const mp_decoder_pass *now = pass; /* or its rest */
    const int most = mp_decoder_most_rows(model, pass->rows.M);
    const bool carries = pass->carried && pass->until_ns == 0;
    const int begin = carries ? pass->carried->wavefront->layers : pass->layer;
    const bool few = needs_only_outputs(pass);
    size_t hidden = (size_t)model->hidden;
    mp_decoder_view view = view_of(pass, thread);
    embed_rows(pass, thread);
    if (pass->inputs)
        embed_inputs(pass, &view);
    if (pass->streams)
        mp_streams_enter(pass, &view);
    if (pass->resumed)
        resume_rows(pass, thread);
    else
        capture_rows(pass, thread, 0);
    if (carries && !run_wavefront(pass, thread, few))
        return;
    for (int l = begin; l < model->layer_count; l++) {
        /* a layer that comes from a slow disk may take seconds */
        if ((pass->warming || pass->until_ns > 0 || l % POLL_LAYERS == 0) && stopped(pass, thread, l, begin))
            return;
        if (pass->rest && l == model->last_stored + 1) {
            now = pass->rest;
            enter_rest(pass, thread);
        }
        if (now->rows.M == 0)
            break;
        view.layer = l;
        for (int block = 0; block < now->block_count; block++) {
            enter_block(now, &view, block);
            run_layer(now, &view, few);
        }
        if (now == pass)
            add_taps(pass, thread, 0, pass->rows.M, l);
        capture_rows(pass, thread, l + 1);
    }
    if (pass->streams)
        mp_streams_leave(now, &view);
    view.context.adapters = NULL; /* adapters do not update the head */
    for (int s = 0; s < pass->rows.n_seq; s++) {
        const mp_row_seq *seq = &pass->rows.seq[s];
        for (int r = 0; seq->all_outputs && r < seq->all_rows; r += most) {
            view.rows = seq->all_rows - r < most ? seq->all_rows - r : most;
            output_rows(pass, &view, pass->x + (size_t)(seq->row0 + r) * hidden, -1,
                        seq->all_outputs + (size_t)r * (size_t)model->vocab);
        }
    }
    if (model->whole_prompts)
        norm_all(pass, thread);
    for (int first = 0; first < pass->rows.n_output; first += most) {
        /* gather the output rows in the scratch of the blocks, which is free now */
        float *const outputs = (float *)pass->shared;
        const int n = pass->rows.n_output - first < most ? pass->rows.n_output - first : most;
        if (model->whole_prompts)
            pool_outputs(pass, thread, first, n, outputs);
        else
            gather_outputs(now, thread, first, n, outputs);
        float *logits = pass->rows.logits + (size_t)first * (size_t)model->vocab;
        view.rows = n;
        output_rows(pass, &view, outputs, first, logits);
        capture_outputs(pass, thread, first, n, NULL, logits);
    }
}
