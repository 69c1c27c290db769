/* decoder/plan.c: distribution of a pass's work over threads, and its memory. decoder/attention.h describes the
 * attention modes. */
#include <assert.h>
#include <string.h>

#include "models/decoder/pass.h"
#include "models/decoder/wavefront.h"
#include "models/nn/scratch.h"

size_t mp_attention_partial_floats(const mp_attention_shape *shape) {
    return ((size_t)mp_attention_group(shape) * (size_t)(shape->padded_dim + 2) + 15) & ~(size_t)15;
}

static int tile_rows(const mp_attention_shape *shape) { return MP_ATTN_ROWS / mp_attention_group(shape); }

/* Returns the number of inputs that a row has in all layers together (see mp_decoder.inputs). */
static size_t inputs_floats(const mp_decoder *model) {
    return (size_t)model->inputs.width * (size_t)model->layer_count;
}

/* Returns the scratch of all blocks and of the head, for row blocks of up to M rows. */
static mp_block_needs block_needs(const mp_decoder *model, int M, int most_blocks) {
    mp_block_needs needs = {.least_joined = MP_DECODER_JOINED};
    const mp_mixer *mixer;
    const mp_ffn *ffn;
    mp_needs_linear(&needs, &model->head, M);
    mp_needs_scratch(&needs, (size_t)M * (size_t)model->hidden * sizeof(float), 0); /* the gathered output rows */
    if (model->inputs.width > 0) {
        mp_needs_linear(&needs, &model->inputs.project, M);
        mp_needs_scratch(&needs, 0, inputs_floats(model) * sizeof(float)); /* a row of the table */
    }
    for (int i = 0; i < model->streams; i++) {
        mp_needs_linear(&needs, &model->stream_in[i], M);
        mp_needs_linear(&needs, &model->stream_out[i], M);
        mp_needs_scratch(&needs, 0, (size_t)model->hidden * sizeof(float)); /* a normed row */
    }
    for (int l = 0; l < model->layer_count; l++) {
        for (int m = 0; (mixer = mp_layer_mixer(&model->layers[l], m, NULL)); m++)
            mixer->ops->needs(model, mixer, M, most_blocks, &needs);
        for (int f = 0; (ffn = mp_layer_ffn(&model->layers[l], f)); f++)
            ffn->ops->needs(ffn, M, &needs);
    }
    return needs;
}

/* Bytes of a thread's own rows. */
static size_t own_rows(const mp_decoder *model) {
    return mp_arena_cost(MP_PRIVATE_ROWS * (size_t)model->hidden * sizeof(float));
}

static size_t thread_bytes(const mp_decoder *model, const mp_block_needs *needs) {
    return own_rows(model) + mp_arena_cost(needs->own_acts) + mp_arena_cost(needs->own) +
           (mp_weight_store_unpacked(&model->store) ? mp_arena_cost(model->store.panel_scratch) : 0);
}

size_t mp_decoder_thread_bytes(const mp_decoder *model, int most_blocks) {
    const mp_block_needs needs = block_needs(model, MP_PRIVATE_ROWS, most_blocks);
    return thread_bytes(model, &needs);
}

static int count_spans(const mp_rows *rows) {
    int count = 0;
    for (int s = 0; s < rows->n_seq; s++)
        count += rows->seq[s].n_spans;
    return count;
}

/* A span may move a border of a row block, and add another one. Blocks have at least `each` rows otherwise. */
static int most_row_blocks(const mp_rows *rows, int each) {
    return (rows->M + each - 1) / each + 2 * count_spans(rows);
}

/* Sets [*first, *end) to the rows of span `index` in a pass. */
static void rows_of_span(const mp_row_seq *seq, int index, int *first, int *end) {
    const mp_image_run *span = &seq->spans[index];
    *first = seq->row0 + (span->start > seq->past ? span->start - seq->past : 0);
    *end = seq->row0 + span->start + span->rows - seq->past;
}

/* Returns the maximum rows of a row block in a pass over these rows, or over any part of them. */
static int most_rows(const mp_decoder *model, const mp_rows *rows) {
    int most = mp_decoder_most_rows(model, rows->M), first, end;
    for (int s = 0; s < rows->n_seq; s++)
        for (int i = 0; i < rows->seq[s].n_spans; i++) {
            rows_of_span(&rows->seq[s], i, &first, &end);
            most = end - first > most ? end - first : most;
        }
    return most;
}

/* Returns the number of KV blocks of the longest sequence. */
static int longest(const mp_rows *rows) {
    int most = 0;
    for (int s = 0; s < rows->n_seq; s++) {
        const int blocks = mp_decoder_blocks((int64_t)rows->seq[s].past + rows->seq[s].rows);
        most = blocks > most ? blocks : most;
    }
    return most;
}

typedef struct plan_sizes { /* for the mixers of one shape */
    int units;       /* upper bound */
    int blocks;      /* KV blocks of all units, in split mode */
    int most_blocks; /* KV blocks of the longest sequence */
} plan_sizes;

static plan_sizes measure(const mp_attention_shape *shape, const mp_rows *rows, int each) {
    plan_sizes sizes = {.most_blocks = longest(rows)};
    for (int s = 0; s < rows->n_seq; s++) {
        const mp_row_seq *seq = &rows->seq[s];
        sizes.units += shape->groups * ((seq->rows + tile_rows(shape) - 1) / tile_rows(shape));
        sizes.blocks += shape->groups * mp_decoder_blocks((int64_t)seq->past + seq->rows);
    }
    /* a border of a row block or of a span may cut a tile of each group */
    sizes.units += shape->groups * (most_row_blocks(rows, each) + 2 * count_spans(rows));
    return sizes;
}

/* Conditions of split mode: fewer than UNITS_A_THREAD units per thread, because whole units then balance badly, and a
 * context of at least SPLIT_BLOCKS KV blocks, because with shorter contexts the balance does not matter. */
enum { UNITS_A_THREAD = 4, SPLIT_BLOCKS = 4 };

static bool one_row_each(const mp_rows *rows) { return rows->M == rows->n_seq; }

static bool may_split(const mp_decoder_pass *pass, const mp_attention_shape *shape, int threads) {
    const mp_rows *rows = &pass->rows;
    return threads > 1 && rows->M <= mp_decoder_most_rows(pass->model, rows->M) &&
           rows->n_seq * shape->groups < UNITS_A_THREAD * threads && pass->most_blocks >= SPLIT_BLOCKS;
}

/* Returns an upper bound of the KV blocks of all units of a pass in split mode. */
static size_t most_split_blocks(const plan_sizes *sizes, int threads) {
    size_t bound = (size_t)(UNITS_A_THREAD * threads) * (size_t)sizes->most_blocks;
    return bound < (size_t)sizes->blocks ? bound : (size_t)sizes->blocks;
}

static size_t unit_list(const plan_sizes *sizes, int threads) {
    return (size_t)(sizes->units + threads) * sizeof(mp_attention_unit); /* a cut in split mode adds one unit */
}

static size_t unit_borders(const mp_rows *rows, int each, int threads) {
    return (size_t)most_row_blocks(rows, each) * (size_t)(threads + 1) * sizeof(int);
}

static size_t row_borders(const mp_rows *rows, int each) {
    return (size_t)(most_row_blocks(rows, each) + 1) * sizeof(int);
}

/* Bytes of the list of row blocks, of the plans of all shapes, and of the partials, which the mixers use one after
 * another. */
static size_t plan_bytes(const mp_decoder *model, const mp_rows *rows, int each, int threads) {
    size_t bytes = mp_arena_cost((size_t)model->shape_count * sizeof(mp_attention_plan)), partials = 0;
    bytes += mp_arena_cost(row_borders(rows, each));
    for (int i = 0; i < model->shape_count; i++) {
        const mp_attention_shape *shape = &model->shapes[i];
        const plan_sizes sizes = measure(shape, rows, each);
        bytes += mp_arena_cost(unit_list(&sizes, threads)) + mp_arena_cost(unit_borders(rows, each, threads));
        /* sized for any subset of the rows: rows may be dropped before the pass, and the rest may use split mode */
        if (threads > 1 && sizes.most_blocks >= SPLIT_BLOCKS)
            partials = mp_larger(partials, most_split_blocks(&sizes, threads) * mp_attention_partial_floats(shape));
    }
    return bytes + (partials ? mp_arena_cost(partials * sizeof(float)) : 0);
}

/* Returns true if some layers store no keys and values, and compute the output rows only. */
static bool has_rest(const mp_decoder *model, const mp_rows *rows) {
    bool all = model->whole_prompts || rows->n_capture > 0 || rows->n_output == rows->M;
    for (int s = 0; !all && s < rows->n_seq; s++)
        all = rows->seq[s].all_outputs != NULL;
    return !all && model->last_stored + 1 < model->layer_count;
}

static size_t rotation_bytes(const mp_decoder *model, size_t M) {
    return mp_arena_cost(M * (size_t)(model->ropes * model->rope_dim) * sizeof(float));
}

static size_t streams_bytes(const mp_decoder *model, size_t M) {
    return mp_arena_cost(M * (size_t)(model->streams * model->hidden) * sizeof(float));
}

/* Bytes of `rest` of a pass. Some of the rows may be dropped before the pass. */
static size_t rest_bytes(const mp_decoder *model, const mp_rows *rows, int threads) {
    const int n = rows->n_output, most = longest(rows);
    const mp_rows outputs = {.M = n};
    size_t bytes = mp_arena_cost(sizeof(mp_decoder_pass)) + mp_arena_cost(row_borders(&outputs, MP_DECODER_ROWS)) +
                   mp_arena_cost((size_t)n * sizeof(mp_row_seq)) + mp_arena_cost((size_t)n * sizeof(int)) +
                   mp_arena_cost((size_t)n * (size_t)model->hidden * sizeof(float)) + rotation_bytes(model, (size_t)n) +
                   mp_arena_cost((size_t)model->shape_count * sizeof(mp_attention_plan)), partials = 0;
    for (int i = 0; i < model->shape_count; i++) {
        const mp_attention_shape *shape = &model->shapes[i];
        const plan_sizes sizes = {.units = shape->groups * (n + most_row_blocks(&outputs, MP_DECODER_ROWS)),
                                  .blocks = shape->groups * n * most, .most_blocks = most};
        bytes += mp_arena_cost(unit_list(&sizes, threads));
        bytes += mp_arena_cost(unit_borders(&outputs, MP_DECODER_ROWS, threads));
        if (threads > 1 && most >= SPLIT_BLOCKS)
            partials = mp_larger(partials, most_split_blocks(&sizes, threads) * mp_attention_partial_floats(shape));
    }
    bytes += model->streams > 0 ? streams_bytes(model, (size_t)n) : 0;
    return bytes + (partials ? mp_arena_cost(partials * sizeof(float)) : 0);
}

/* Takes the buffers of a row block of up to `rows` rows from `at` on, unless pass is NULL. Returns their bytes. */
static size_t lay_out_block(const mp_decoder *model, int rows, const mp_block_needs *needs, uint8_t *at,
                            mp_decoder_pass *pass) {
    const size_t hidden = mp_arena_cost((size_t)rows * (size_t)model->hidden * sizeof(float));
    const size_t added = model->adds_up ? hidden : 0, predicted = model->streams > 0 ? hidden : 0;
    const size_t low_rank = model->adapters.count > 0
                                ? mp_arena_cost((size_t)rows * (size_t)model->adapters.width * sizeof(float)) : 0;
    const size_t acts = mp_arena_cost(needs->acts), shared = mp_arena_cost(needs->shared);
    if (pass) {
        pass->normed = mp_scratch_take(&at, hidden);
        pass->acts = mp_scratch_take(&at, acts);
        pass->shared = mp_scratch_take(&at, shared);
        pass->added = added ? mp_scratch_take(&at, added) : NULL;
        pass->predicted = predicted ? mp_scratch_take(&at, predicted) : NULL;
        pass->low_rank = low_rank ? mp_scratch_take(&at, low_rank) : NULL;
    }
    return hidden + acts + shared + added + predicted + low_rank;
}

bool mp_decoder_carries(const mp_decoder *model, int M, int threads) {
    const bool may = model->experts.count == 0 && model->streams == 0 && !model->whole_prompts;
    return may && mp_decoder_is_wave(M, threads);
}

/* Bytes of the buffers of a row block, or of a row block of each thread of a wavefront, which it may become. */
static size_t block_bytes(const mp_decoder *model, const mp_rows *rows, const mp_block_needs *needs, int threads) {
    const size_t bytes = lay_out_block(model, most_rows(model, rows), needs, NULL, NULL);
    if (!mp_decoder_carries(model, rows->M, threads))
        return bytes;
    const mp_block_needs carried = block_needs(model, MP_WAVE_ROWS, longest(rows));
    return mp_larger(bytes, (size_t)threads * lay_out_block(model, MP_WAVE_ROWS, &carried, NULL, NULL));
}

/* Bytes of a wavefront and its plans. */
static size_t wave_bytes(const mp_decoder *model, const mp_rows *rows, int threads) {
    if (!mp_decoder_carries(model, rows->M, threads))
        return 0;
    return plan_bytes(model, rows, MP_WAVE_ROWS, 1) + mp_arena_cost((size_t)threads * sizeof(mp_decoder_pass)) +
           mp_arena_cost(sizeof(mp_wavefront)) +
           mp_arena_cost((size_t)most_row_blocks(rows, MP_WAVE_ROWS) * sizeof(mp_wave_block));
}

size_t mp_decoder_pass_bytes(const mp_decoder *model, const mp_rows *rows, int threads) {
    const size_t M = (size_t)rows->M, n = (size_t)rows->n_output, f = sizeof(float);
    const mp_block_needs needs = block_needs(model, most_rows(model, rows), longest(rows));
    size_t bytes = plan_bytes(model, rows, MP_DECODER_ROWS, threads) + wave_bytes(model, rows, threads);
    bytes += block_bytes(model, rows, &needs, threads);
    bytes += mp_arena_cost(M * (size_t)model->hidden * f) + rotation_bytes(model, M);
    if (model->last_stored + 1 < model->layer_count)
        bytes += rest_bytes(model, rows, threads);
    if (model->streams > 0)
        bytes += streams_bytes(model, M);
    if (model->inputs.width > 0)
        bytes += mp_arena_cost(M * inputs_floats(model) * f) + mp_arena_cost(M * sizeof(float *)) +
                 mp_arena_cost(n * sizeof(float *));
    if (model->adapters.count > 0)
        bytes += mp_arena_cost(M) + mp_arena_cost(n);
    return bytes + (size_t)threads * thread_bytes(model, &needs);
}

/* Returns the end of the row block from row `first` on, which is not inside a span. */
static int row_block_end(const mp_rows *rows, int first, int rows_each) {
    const int end = first + rows_each < rows->M ? first + rows_each : rows->M;
    int begin, after;
    for (int s = 0; s < rows->n_seq; s++)
        for (int i = 0; i < rows->seq[s].n_spans; i++) {
            rows_of_span(&rows->seq[s], i, &begin, &after);
            if (begin < end && end < after)
                return begin > first ? begin : after;
        }
    return end;
}

/* Lists the row blocks, of `each` rows but for the last, with at least `least` unless a span moves a border. */
static void list_row_blocks(mp_decoder_pass *pass, int each, int least, mp_arena *arena) {
    const mp_rows *rows = &pass->rows;
    pass->block_first = mp_arena_take(arena, row_borders(rows, least));
    pass->block_count = pass->block_rows = 0;
    for (int first = 0, end; first < rows->M; first = end) {
        end = row_block_end(rows, first, each);
        pass->block_first[pass->block_count++] = first;
        pass->block_first[pass->block_count] = end;
        pass->block_rows = end - first > pass->block_rows ? end - first : pass->block_rows;
    }
}

/* Returns the rows of the unit that begins at `row` of a sequence, at most `rows`, so that all of them are in one span
 * or in none, and sets *until. Moves *span to the span that ends after the row. */
static int unit_rows(const mp_row_seq *seq, int row, int rows, int *span, int32_t *until) {
    const int32_t position = seq->past + row;
    *until = 0;
    while (*span < seq->n_spans && seq->spans[*span].start + seq->spans[*span].rows <= position)
        ++*span;
    if (*span == seq->n_spans)
        return rows;
    const int32_t start = seq->spans[*span].start, end = start + seq->spans[*span].rows;
    assert(end <= seq->past + seq->rows);
    *until = start <= position ? end : 0;
    const int32_t most = (start <= position ? end : start) - position;
    return rows < most ? rows : most;
}

/* Divides the units from `first` on, those of one row block, into contiguous shares of about equal cost. */
static void share_units(mp_attention_plan *plan, int block, int first, int threads, int64_t total) {
    int *thread_units = plan->thread_units + (ptrdiff_t)block * (threads + 1);
    int64_t done = 0;
    int thread = 0;
    thread_units[0] = first;
    for (int u = first; u < plan->unit_count; u++) {
        const mp_attention_unit *unit = &plan->units[u];
        int64_t cost = (int64_t)unit->rows * (unit->block1 - unit->block0);
        /* a unit belongs to the thread whose share contains its middle */
        while (thread + 1 < threads && (2 * done + cost) * threads >= 2 * total * (thread + 1))
            thread_units[++thread] = u;
        done += cost;
    }
    while (thread < threads)
        thread_units[++thread] = plan->unit_count;
}

static void list_units(const mp_decoder_pass *pass, const mp_attention_shape *shape, mp_attention_plan *plan,
                       int threads) {
    for (int b = 0, s = 0; b < pass->block_count; b++) {
        const int begin = pass->block_first[b], end = pass->block_first[b + 1], first = plan->unit_count;
        int64_t total = 0;
        while (pass->rows.seq[s].row0 + pass->rows.seq[s].rows <= begin)
            s++;
        for (int q = s; q < pass->rows.n_seq && pass->rows.seq[q].row0 < end; q++) {
            const mp_row_seq *seq = &pass->rows.seq[q];
            const int row0 = begin > seq->row0 ? begin - seq->row0 : 0;
            const int row1 = end - seq->row0 < seq->rows ? end - seq->row0 : seq->rows;
            for (int head = 0; head < shape->groups; head++)
                for (int row = row0, span = 0, rows; row < row1; row += rows) {
                    int32_t until;
                    rows = row1 - row < tile_rows(shape) ? row1 - row : tile_rows(shape);
                    rows = unit_rows(seq, row, rows, &span, &until);
                    int blocks = mp_decoder_blocks(until > 0 ? until : (int64_t)seq->past + row + rows);
                    plan->units[plan->unit_count++] = (mp_attention_unit){
                        .seq = q, .head = head, .row0 = row, .rows = rows, .block1 = blocks, .until = until};
                    total += (int64_t)rows * blocks;
                }
        }
        share_units(plan, b, first, threads, total);
    }
}

/* Divides the KV blocks of all units, one unit after another, into one contiguous range per thread, of equal
 * lengths. */
static void list_split_units(const mp_decoder_pass *pass, const mp_attention_shape *shape, mp_attention_plan *plan,
                             int all_blocks, int threads) {
    int thread = 0, at = 0;
    plan->thread_units[0] = 0;
    for (int s = 0; s < pass->rows.n_seq; s++) {
        int blocks = mp_decoder_blocks((int64_t)pass->rows.seq[s].past + 1);
        for (int head = 0; head < shape->groups; head++)
            for (int block = 0; block < blocks;) {
                int end = (int)((int64_t)all_blocks * (thread + 1) / threads);
                if (at >= end) {
                    plan->thread_units[++thread] = plan->unit_count;
                    continue;
                }
                int count = end - at < blocks - block ? end - at : blocks - block;
                plan->units[plan->unit_count++] = (mp_attention_unit){
                    .seq = s, .head = head, .rows = 1, .block0 = block, .block1 = block + count, .partial = at};
                block += count;
                at += count;
            }
    }
    while (thread < threads)
        plan->thread_units[++thread] = plan->unit_count;
}

/* Lists the adapters of the rows, if a sequence has one. */
static void list_adapters(mp_decoder_pass *pass, mp_arena *arena) {
    const mp_rows *rows = &pass->rows;
    bool any = false;
    for (int s = 0; s < rows->n_seq; s++)
        any |= rows->seq[s].adapter != 0;
    if (!any)
        return;
    pass->row_adapter = mp_arena_take(arena, (size_t)rows->M);
    pass->output_adapter = mp_arena_take(arena, (size_t)rows->n_output);
    for (int s = 0; s < rows->n_seq; s++)
        memset(pass->row_adapter + rows->seq[s].row0, rows->seq[s].adapter, (size_t)rows->seq[s].rows);
    for (int i = 0; i < rows->n_output; i++)
        pass->output_adapter[i] = pass->row_adapter[rows->output_row[i]];
}

/* Makes room for the inputs of the rows, and lists where those of each row are. */
static void list_inputs(mp_decoder_pass *pass, mp_arena *arena) {
    const mp_rows *rows = &pass->rows;
    const size_t each = inputs_floats(pass->model);
    if (each == 0)
        return;
    pass->inputs = mp_arena_take(arena, (size_t)rows->M * each * sizeof(float));
    pass->row_inputs = mp_arena_take(arena, (size_t)rows->M * sizeof *pass->row_inputs);
    pass->output_inputs = mp_arena_take(arena, (size_t)rows->n_output * sizeof *pass->output_inputs);
    for (int r = 0; r < rows->M; r++)
        pass->row_inputs[r] = pass->inputs + (size_t)r * each;
    for (int i = 0; i < rows->n_output; i++)
        pass->output_inputs[i] = pass->row_inputs[rows->output_row[i]];
}

/* Plans the work of the mixers of one shape. */
static void plan_attention(mp_decoder_pass *pass, const mp_attention_shape *shape, int each, int threads,
                           mp_arena *arena) {
    mp_attention_plan *plan = &pass->attention[shape - pass->model->shapes];
    const plan_sizes sizes = measure(shape, &pass->rows, each);
    const bool decodes = one_row_each(&pass->rows);
    plan->units = mp_arena_take(arena, unit_list(&sizes, threads));
    plan->thread_units = mp_arena_take(arena, unit_borders(&pass->rows, each, threads));
    plan->unit_count = 0;
    if (decodes && may_split(pass, shape, threads)) {
        plan->mode = MP_ATTEND_SPLIT;
        list_split_units(pass, shape, plan, sizes.blocks, threads);
        return;
    }
    /* fused mode needs one group per KV head: each unit stores its KV head, and only one may do so */
    plan->mode = decodes && shape->groups == shape->kv_heads ? MP_ATTEND_FUSED : MP_ATTEND_TILES;
    list_units(pass, shape, plan, threads);
}

/* Takes the partials for the shape in split mode that needs most. */
static void take_partials(mp_decoder_pass *pass, mp_arena *arena) {
    size_t floats = 0;
    for (int i = 0; i < pass->model->shape_count; i++) {
        const mp_attention_shape *shape = &pass->model->shapes[i];
        if (pass->attention[i].mode == MP_ATTEND_SPLIT)
            floats = mp_larger(floats, (size_t)measure(shape, &pass->rows, MP_DECODER_ROWS).blocks *
                                           mp_attention_partial_floats(shape));
    }
    if (floats > 0)
        pass->partials = mp_arena_take(arena, floats * sizeof(float));
}

/* Divides the rows into row blocks (see list_row_blocks), and plans the attention of all shapes. */
static void plan_blocks(mp_decoder_pass *pass, int each, int least, int threads, mp_arena *arena) {
    list_row_blocks(pass, each, least, arena);
    pass->attention = mp_arena_take(arena, (size_t)pass->model->shape_count * sizeof *pass->attention);
    for (int i = 0; i < pass->model->shape_count; i++)
        plan_attention(pass, &pass->model->shapes[i], least, threads, arena);
    take_partials(pass, arena);
}

/* Plans `rest`. It uses the scratch of the pass. */
static void plan_rest(mp_decoder_pass *pass, int threads, mp_arena *arena) {
    const mp_decoder *model = pass->model;
    const size_t n = (size_t)pass->rows.n_output;
    mp_decoder_pass *rest = pass->rest = mp_arena_take(arena, sizeof *rest);
    *rest = *pass;
    rest->rows = (mp_rows){.M = (int)n, .n_seq = (int)n, .n_output = (int)n, .logits = pass->rows.logits};
    if (n == 0)
        return;
    rest->rows.seq = mp_arena_take(arena, n * sizeof *rest->rows.seq);
    rest->rows.output_row = mp_arena_take(arena, n * sizeof *rest->rows.output_row);
    for (int i = 0, s = 0; i < (int)n; i++) {
        const int row = pass->rows.output_row[i];
        while (row >= pass->rows.seq[s].row0 + pass->rows.seq[s].rows)
            s++;
        mp_row_seq *seq = &rest->rows.seq[i];
        *seq = pass->rows.seq[s];
        seq->past += row - seq->row0;
        seq->row0 = i;
        seq->rows = 1;
        seq->n_spans = 0; /* no output is before other rows of its image */
        rest->rows.output_row[i] = i;
    }
    plan_blocks(rest, mp_decoder_block_rows(model, rest->rows.M), MP_DECODER_ROWS, threads, arena);
    rest->x = mp_arena_take(arena, n * (size_t)model->hidden * sizeof(float));
    rest->cos_sin = mp_arena_take(arena, rotation_bytes(model, n));
    if (model->streams > 0)
        rest->streams = mp_arena_take(arena, streams_bytes(model, n));
    rest->row_adapter = pass->output_adapter;
    rest->row_inputs = pass->output_inputs;
}

/* Plans the wavefront, if the pass becomes one. at: buffers of block_bytes. */
static void plan_wavefront(mp_decoder_pass *pass, int threads, uint8_t *at, mp_arena *arena) {
    const mp_decoder *model = pass->model;
    if (!mp_decoder_carries(model, pass->rows.M, threads) || pass->rows.n_capture > 0 || count_spans(&pass->rows) > 0 ||
        one_row_each(&pass->rows) || pass->unpacked || pass->warming)
        return;
    const mp_block_needs needs = block_needs(model, MP_WAVE_ROWS, pass->most_blocks);
    const size_t each = lay_out_block(model, MP_WAVE_ROWS, &needs, NULL, NULL);
    mp_decoder_pass *carried = mp_arena_take(arena, (size_t)threads * sizeof *carried);
    mp_wavefront *wave = mp_arena_take(arena, sizeof *wave);
    *carried = *pass;
    plan_blocks(carried, MP_WAVE_ROWS, MP_WAVE_ROWS, 1, arena);
    *wave = (mp_wavefront){.layers = pass->rest ? model->last_stored + 1 : model->layer_count,
                           .count = carried->block_count,
                           .blocks = mp_arena_take(arena, (size_t)carried->block_count * sizeof *wave->blocks)};
    memset(wave->blocks, 0, (size_t)wave->count * sizeof *wave->blocks);
    carried->wavefront = wave;
    for (int t = threads - 1; t >= 0; t--) {
        carried[t] = *carried;
        lay_out_block(model, MP_WAVE_ROWS, &needs, at + (size_t)t * each, &carried[t]);
    }
    pass->carried = carried;
}

void mp_decoder_plan_pass(mp_decoder_pass *pass, const mp_decoder *model, const mp_kv_cache *cache, const mp_rows *rows,
                          mp_lease *lease, mp_arena *arena) {
    const int threads = lease->threads, most = most_rows(model, rows);
    const size_t M = (size_t)rows->M;
    const mp_block_needs needs = block_needs(model, most, longest(rows));
    *pass = (mp_decoder_pass){
        .model = model, .cache = cache, .rows = *rows, .most_blocks = longest(rows), .lease = lease};
    pass->computed = rows->M;
    plan_blocks(pass, mp_decoder_block_rows(model, rows->M), MP_DECODER_ROWS, threads, arena);
    pass->x = mp_arena_take(arena, M * (size_t)model->hidden * sizeof(float));
    pass->cos_sin = mp_arena_take(arena, rotation_bytes(model, M));
    uint8_t *const buffers = mp_arena_take(arena, block_bytes(model, rows, &needs, threads));
    lay_out_block(model, most, &needs, buffers, pass);
    if (model->streams > 0)
        pass->streams = mp_arena_take(arena, streams_bytes(model, M));
    list_adapters(pass, arena);
    list_inputs(pass, arena);
    pass->unpacked = mp_weight_store_unpacked(&model->store);
    pass->warming = mp_weight_store_warming(&model->store);
    pass->own_rows = own_rows(model);
    pass->own_acts = mp_arena_cost(needs.own_acts);
    pass->own = mp_arena_cost(needs.own);
    pass->thread_bytes = thread_bytes(model, &needs);
    pass->thread_scratch = mp_arena_take(arena, (size_t)threads * pass->thread_bytes);
    if (has_rest(model, rows))
        plan_rest(pass, threads, arena);
    plan_wavefront(pass, threads, buffers, arena);
}
