/* decoder/plan.c: distribution of a pass's work over threads, and its memory. decoder/attention.h describes the
 * attention modes. */
#include <string.h>

#include "models/decoder/pass.h"
#include "models/nn/scratch.h"

size_t mp_decoder_partial_floats(const mp_decoder *model) {
    return ((size_t)mp_decoder_group(model) * (size_t)(model->kv.v_dim + 2) + 15) & ~(size_t)15;
}

static int tile_rows(const mp_decoder *model) { return MP_ATTN_ROWS / mp_decoder_group(model); }

/* Returns the scratch of all blocks and of the head, for row blocks of up to M rows. */
static mp_block_needs block_needs(const mp_decoder *model, int M, int most_blocks) {
    mp_block_needs needs = {0};
    const mp_mixer *mixer;
    const mp_ffn *ffn;
    mp_needs_linear(&needs, &model->head, M);
    mp_needs_scratch(&needs, (size_t)M * (size_t)model->hidden * sizeof(float), 0); /* the gathered output rows */
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

static int most_row_blocks(int M) { return (M + MP_DECODER_ROWS - 1) / MP_DECODER_ROWS; }

typedef struct pass_sizes {
    int units;       /* upper bound */
    int blocks;      /* KV blocks of all units, in split mode */
    int most_blocks; /* KV blocks of the longest sequence */
} pass_sizes;

static pass_sizes measure(const mp_decoder *model, const mp_rows *rows) {
    pass_sizes sizes = {0};
    for (int s = 0; s < rows->n_seq; s++) {
        const mp_row_seq *seq = &rows->seq[s];
        int blocks = mp_decoder_blocks((int64_t)seq->past + seq->rows);
        int tiles = (seq->rows + tile_rows(model) - 1) / tile_rows(model);
        sizes.units += model->groups * tiles;
        sizes.blocks += model->groups * blocks;
        sizes.most_blocks = blocks > sizes.most_blocks ? blocks : sizes.most_blocks;
    }
    sizes.units += model->groups * most_row_blocks(rows->M); /* a border of a row block may cut a tile of each group */
    return sizes;
}

/* Conditions of split mode: fewer than UNITS_A_THREAD units per thread, because whole units then balance badly, and a
 * context of at least SPLIT_BLOCKS KV blocks, because with shorter contexts the balance does not matter. */
enum { UNITS_A_THREAD = 4, SPLIT_BLOCKS = 4 };

static bool one_row_each(const mp_rows *rows) { return rows->M == rows->n_seq; }

static bool may_split(const mp_decoder *model, const mp_rows *rows, const pass_sizes *sizes, int threads) {
    return threads > 1 && rows->M <= mp_decoder_most_rows(model, rows->M) &&
           rows->n_seq * model->groups < UNITS_A_THREAD * threads && sizes->most_blocks >= SPLIT_BLOCKS;
}

/* Returns an upper bound of the KV blocks of all units of a pass in split mode. */
static size_t most_split_blocks(const pass_sizes *sizes, int threads) {
    size_t bound = (size_t)(UNITS_A_THREAD * threads) * (size_t)sizes->most_blocks;
    return bound < (size_t)sizes->blocks ? bound : (size_t)sizes->blocks;
}

static size_t unit_list(const pass_sizes *sizes, int threads) {
    return (size_t)(sizes->units + threads) * sizeof(mp_attention_unit); /* a cut in split mode adds one unit */
}

static size_t unit_borders(int M, int threads) {
    return (size_t)most_row_blocks(M) * (size_t)(threads + 1) * sizeof(int);
}

size_t mp_decoder_pass_bytes(const mp_decoder *model, const mp_rows *rows, int threads) {
    pass_sizes sizes = measure(model, rows);
    size_t M = (size_t)rows->M, block = (size_t)mp_decoder_most_rows(model, rows->M), f = sizeof(float);
    const mp_block_needs needs = block_needs(model, (int)block, sizes.most_blocks);
    size_t bytes = mp_arena_cost(unit_list(&sizes, threads)) + mp_arena_cost(unit_borders(rows->M, threads));
    bytes += mp_arena_cost(M * (size_t)model->hidden * f) + mp_arena_cost(block * (size_t)model->hidden * f);
    bytes += mp_arena_cost(M * (size_t)(model->ropes * model->rope[0].dim) * f);
    bytes += mp_arena_cost(needs.acts) + mp_arena_cost(needs.shared);
    if (model->adapters.count > 0)
        bytes += mp_arena_cost(M) + mp_arena_cost((size_t)rows->n_output) +
                 mp_arena_cost(block * (size_t)model->adapters.width * f);
    /* sized for any subset of the rows: rows may be dropped before the pass, and the rest may use split mode */
    if (threads > 1 && sizes.most_blocks >= SPLIT_BLOCKS)
        bytes += mp_arena_cost(most_split_blocks(&sizes, threads) * mp_decoder_partial_floats(model) * f);
    return bytes + (size_t)threads * thread_bytes(model, &needs);
}

/* Divides the units from `first` on, those of one row block, into contiguous shares of about equal cost. */
static void share_units(mp_decoder_pass *pass, int block, int first, int threads, int64_t total) {
    int *thread_units = pass->thread_units + (ptrdiff_t)block * (threads + 1);
    int64_t done = 0;
    int thread = 0;
    thread_units[0] = first;
    for (int u = first; u < pass->unit_count; u++) {
        const mp_attention_unit *unit = &pass->units[u];
        int64_t cost = (int64_t)unit->rows * (unit->block1 - unit->block0);
        /* a unit belongs to the thread whose share contains its middle */
        while (thread + 1 < threads && (2 * done + cost) * threads >= 2 * total * (thread + 1))
            thread_units[++thread] = u;
        done += cost;
    }
    while (thread < threads)
        thread_units[++thread] = pass->unit_count;
}

static void list_units(mp_decoder_pass *pass, int threads) {
    const mp_decoder *model = pass->model;
    for (int b = 0, s = 0; b < pass->block_count; b++) {
        const int begin = b * pass->block_rows, end = begin + pass->block_rows, first = pass->unit_count;
        int64_t total = 0;
        while (pass->rows.seq[s].row0 + pass->rows.seq[s].rows <= begin)
            s++;
        for (int q = s; q < pass->rows.n_seq && pass->rows.seq[q].row0 < end; q++) {
            const mp_row_seq *seq = &pass->rows.seq[q];
            const int row0 = begin > seq->row0 ? begin - seq->row0 : 0;
            const int row1 = end - seq->row0 < seq->rows ? end - seq->row0 : seq->rows;
            for (int head = 0; head < model->groups; head++)
                for (int row = row0; row < row1; row += tile_rows(model)) {
                    int rows = row1 - row < tile_rows(model) ? row1 - row : tile_rows(model);
                    int blocks = mp_decoder_blocks((int64_t)seq->past + row + rows);
                    pass->units[pass->unit_count++] = (mp_attention_unit){q, head, row, rows, 0, blocks, 0};
                    total += (int64_t)rows * blocks;
                }
        }
        share_units(pass, b, first, threads, total);
    }
}

/* Divides the KV blocks of all units, one unit after another, into one contiguous range per thread, of equal
 * lengths. */
static void list_split_units(mp_decoder_pass *pass, int all_blocks, int threads) {
    int thread = 0, at = 0;
    pass->thread_units[0] = 0;
    for (int s = 0; s < pass->rows.n_seq; s++) {
        int blocks = mp_decoder_blocks((int64_t)pass->rows.seq[s].past + 1);
        for (int head = 0; head < pass->model->groups; head++)
            for (int block = 0; block < blocks;) {
                int end = (int)((int64_t)all_blocks * (thread + 1) / threads);
                if (at >= end) {
                    pass->thread_units[++thread] = pass->unit_count;
                    continue;
                }
                int count = end - at < blocks - block ? end - at : blocks - block;
                pass->units[pass->unit_count++] = (mp_attention_unit){s, head, 0, 1, block, block + count, at};
                block += count;
                at += count;
            }
    }
    while (thread < threads)
        pass->thread_units[++thread] = pass->unit_count;
}

/* Lists the adapters of the rows, if a sequence has one. */
static void list_adapters(mp_decoder_pass *pass, size_t block, mp_arena *arena) {
    const mp_rows *rows = &pass->rows;
    bool any = false;
    for (int s = 0; s < rows->n_seq; s++)
        any |= rows->seq[s].adapter != 0;
    if (!any)
        return;
    pass->row_adapter = mp_arena_take(arena, (size_t)rows->M);
    pass->output_adapter = mp_arena_take(arena, (size_t)rows->n_output);
    pass->low_rank = mp_arena_take(arena, block * (size_t)pass->model->adapters.width * sizeof(float));
    for (int s = 0; s < rows->n_seq; s++)
        memset(pass->row_adapter + rows->seq[s].row0, rows->seq[s].adapter, (size_t)rows->seq[s].rows);
    for (int i = 0; i < rows->n_output; i++)
        pass->output_adapter[i] = pass->row_adapter[rows->output_row[i]];
}

void mp_decoder_plan_pass(mp_decoder_pass *pass, const mp_decoder *model, const mp_kv_cache *cache, const mp_rows *rows,
                          mp_lease *lease, mp_arena *arena) {
    pass_sizes sizes = measure(model, rows);
    int threads = lease->threads;
    size_t M = (size_t)rows->M, block = (size_t)mp_decoder_most_rows(model, rows->M), f = sizeof(float);
    const mp_block_needs needs = block_needs(model, (int)block, sizes.most_blocks);
    *pass = (mp_decoder_pass){
        .model = model, .cache = cache, .rows = *rows, .most_blocks = sizes.most_blocks, .lease = lease};
    pass->block_rows = mp_decoder_block_rows(model, rows->M);
    pass->block_count = (rows->M + pass->block_rows - 1) / pass->block_rows;
    pass->units = mp_arena_take(arena, unit_list(&sizes, threads));
    pass->thread_units = mp_arena_take(arena, unit_borders(rows->M, threads));
    pass->x = mp_arena_take(arena, M * (size_t)model->hidden * f);
    pass->normed = mp_arena_take(arena, block * (size_t)model->hidden * f);
    pass->cos_sin = mp_arena_take(arena, M * (size_t)(model->ropes * model->rope[0].dim) * f);
    pass->acts = mp_arena_take(arena, needs.acts);
    pass->shared = mp_arena_take(arena, needs.shared);
    list_adapters(pass, block, arena);
    /* fused mode needs one group per KV head: each unit stores its KV head, and only one may do so */
    pass->mode = one_row_each(rows) && model->groups == model->kv_heads ? MP_ATTEND_FUSED : MP_ATTEND_TILES;
    if (one_row_each(rows) && may_split(model, rows, &sizes, threads)) {
        pass->mode = MP_ATTEND_SPLIT;
        pass->partials = mp_arena_take(arena, (size_t)sizes.blocks * mp_decoder_partial_floats(model) * f);
        list_split_units(pass, sizes.blocks, threads);
    } else {
        list_units(pass, threads);
    }
    pass->unpacked = mp_weight_store_unpacked(&model->store);
    pass->warming = mp_weight_store_warming(&model->store);
    pass->own_rows = own_rows(model);
    pass->own_acts = mp_arena_cost(needs.own_acts);
    pass->own = mp_arena_cost(needs.own);
    pass->thread_bytes = thread_bytes(model, &needs);
    pass->thread_scratch = mp_arena_take(arena, (size_t)threads * pass->thread_bytes);
}
