/* encoder/encoder.c: the forward pass of encoders (BERT: Devlin et al., arXiv:1810.04805), by the flags of their row in
 * archs.def. Layers are those of nn/transformer.h. The last layer computes only the rows that are read: all rows for
 * token vectors and for poolings such as the mean, one row per text for CLS and last-token pooling. */
#include "models/encoder/encoder.h"

#include <string.h>

#include "models/nn/scratch.h"

/* Columns of the widest scratch rows: queries, keys and values; scores of latents; normed outputs of a sublayer. */
static int32_t encoder_wide(const mp_encoder *model) {
    const int32_t latents = model->latent.heads * model->latent.count;
    const int32_t most = latents > model->qkv_width ? latents : model->qkv_width;
    return model->flags & MP_ENCODER_OUTPUT_NORMS && model->hidden > most ? model->hidden : most;
}

/* Layers differ: what a matrix needs depends on whether it is packed. */
static mp_block_needs layer_needs(const mp_encoder *model, int M) {
    mp_block_needs needs = {.shared = mp_arena_cost(mp_mlp_scratch(&model->latent.mlp, M))};
    for (int i = 0; i < model->layer_count; i++)
        mp_transformer_needs(&model->layers[i].base, M, &needs);
    return needs;
}

static int32_t mixed_width(const mp_encoder *model) {
    const int32_t most = model->q_width > model->hidden ? model->q_width : model->hidden;
    return model->projection.parts && model->embedding.n > most ? model->embedding.n : most;
}

static size_t latent_acts(const mp_latent_attention *latent, int M) {
    return mp_larger(mp_larger(mp_linear_scratch(&latent->scores, M), mp_linear_scratch(&latent->values, M)),
                     mp_larger(mp_linear_scratch(&latent->mlp.up, M), mp_linear_scratch(&latent->mlp.down, M)));
}

/* Returns true if the outputs need the product of the sparse head. */
static bool encoder_multiplies(const mp_encoder *model, unsigned outputs) {
    return outputs & MP_EMBED_SPARSE && model->sparse_head.kind == MP_SPARSE_VOCABULARY;
}

unsigned mp_encoder_outputs(const mp_encoder *model) {
    return (model->pooled ? MP_EMBED_POOLED : 0) | MP_EMBED_TOKENS | (model->row_head.width ? MP_EMBED_ROWS : 0) |
           (model->sparse_head.kind ? MP_EMBED_SPARSE : 0);
}

/* The adapters of all rows and of the wanted ones, and the products with A. */
static size_t adapter_scratch(const mp_encoder *model, int M) {
    const size_t width = (size_t)model->adapters.width;
    return model->adapters.count ? 2 * mp_arena_cost((size_t)M) + mp_arena_cost((size_t)M * width * sizeof(float)) : 0;
}

/* The length of the longest text (the rows of the rotary tables) and the number of texts are unknown here. `M` is an
 * upper bound of both. */
size_t mp_encoder_group_scratch(const mp_encoder *model, int M, unsigned outputs) {
    size_t rows = (size_t)M * sizeof(float);
    const mp_block_needs needs = layer_needs(model, M);
    size_t acts = mp_larger(needs.acts, latent_acts(&model->latent, M));
    acts = mp_larger(acts, mp_linear_scratch(&model->projection, M));
    size_t sparse = 0;
    if (encoder_multiplies(model, outputs)) {
        acts = mp_larger(acts, mp_linear_scratch(&model->sparse_head.output, M));
        sparse = mp_arena_cost(rows * (size_t)model->sparse_head.chain.out) +
                 mp_arena_cost((size_t)M * sizeof(mp_sparse_text));
    }
    return sparse + mp_arena_cost(rows * (size_t)model->hidden) + mp_arena_cost(rows * (size_t)encoder_wide(model)) +
           mp_arena_cost(rows * (size_t)mixed_width(model)) + mp_arena_cost(needs.shared) +
           mp_arena_cost(rows * (size_t)model->rope[0].dim) + mp_arena_cost(rows * (size_t)model->rope[1].dim) +
           (model->flags & MP_ENCODER_INPUT_TWICE ? mp_arena_cost(rows * (size_t)model->hidden) : 0) +
           2 * mp_arena_cost((size_t)M * sizeof(mp_row_span)) + adapter_scratch(model, M) + acts;
}

/* Bytes of a thread's scratch for unpacked weights, which come first. */
static size_t panel_scratch(const mp_encoder *model) {
    return mp_weight_store_unpacked(&model->store) ? mp_arena_cost(model->store.panel_scratch) : 0;
}

size_t mp_encoder_thread_scratch(const mp_encoder *model, int T, int M, unsigned outputs) {
    size_t most = mp_larger(mp_attention_scratch(&model->attention, T), mp_head_scratch(&model->head) * sizeof(float));
    if (outputs & (MP_EMBED_ROWS | MP_EMBED_SPARSE))
        most = mp_larger(most, mp_heads_scratch(&model->row_head, &model->sparse_head) * sizeof(float));
    if (encoder_multiplies(model, outputs))
        most = mp_larger(most, mp_linear_tile(M) * sizeof(float));
    most = mp_larger(most, layer_needs(model, 1).own);
    return panel_scratch(model) + mp_arena_cost(mp_larger(most, (size_t)model->embedding.n * sizeof(float)));
}

/* A thread's view of a pass: the group, and its own range of rows. */
typedef struct pass {
    const mp_encoder *model;
    const mp_kernels *call;
    mp_row_context context;
    mp_encoder_text *texts;
    int count;
    mp_row_span *wanted; /* [count] the rows of each text that are read after the last layer; NULL: all rows */
    int64_t row0, row1;  /* the thread's rows, where rows are split */
    mp_transformer_rows rows; /* `qkv` has at least `encoder_wide` columns */
    float *angles[2];         /* [longest text, dim] of each rope */
    float *input;             /* [M, hidden] copy of the layer's input, for MP_ENCODER_INPUT_TWICE */
    float *transformed;       /* [rows of all texts with a sparse vector, chain.out of the sparse head] */
    mp_sparse_pass sparse;    /* the texts with a sparse vector, if the head has a product */
    int sparse_rows;          /* rows of these texts */
    void *thread_scratch;
} pass;

/* Compute the hidden states before the first layer, and the rotary tables. Ends with a barrier. */
static void embed(const pass *p, int longest) {
    const mp_encoder *model = p->model;
    const int32_t n = model->embedding.n;
    float *const rows = model->projection.parts ? p->rows.mixed : p->rows.x;
    for (int t = 0; t < p->count; t++)
        for (int32_t i = 0; i < p->texts[t].n; i++) {
            int64_t row = p->texts[t].row + i;
            if (row >= p->row0 && row < p->row1)
                mp_embedding_row(&model->embedding, p->texts[t].ids[i], i,
                                 i >= p->texts[t].second ? model->token_types - 1 : 0, p->texts[t].adapter,
                                 p->thread_scratch, rows + row * n);
        }
    for (int i = 0; i < 2; i++) {
        const mp_rope *rope = &model->rope[i];
        int64_t from = 0, to = 0;
        if (rope->dim)
            mp_team_split(p->context.thread, longest, 1, &from, &to);
        for (; from < to; from++)
            mp_rope_row(rope, from, p->angles[i] + from * rope->dim);
    }
    mp_team_barrier(p->context.thread);
    if (!model->projection.parts)
        return;
    mp_row_linear(&p->context, &model->projection, rows, n, p->rows.M, NULL, p->rows.x, model->hidden);
    mp_team_barrier(p->context.thread);
    if (model->projected_norm.weight) {
        mp_norm_rows(&model->projected_norm, p->context.thread, p->rows.M, p->rows.x, model->hidden, p->rows.x,
                     model->hidden);
        mp_team_barrier(p->context.thread);
    }
}

/* Norm the rows of x that the thread takes in place. No barrier. */
static void norm_sum(const pass *p, const mp_norm *norm) {
    mp_norm_rows(norm, p->context.thread, p->rows.M, p->rows.x, p->model->hidden, p->rows.x, p->model->hidden);
}

enum { CHANNELS = 16 }; /* threads take blocks of channels of a convolution */
enum { PLACED = MP_ENCODER_ROPE | MP_ENCODER_HEAD_NORMS | MP_ENCODER_QUERY_NORMS };

/* Returns true if the row of text `t` is a query of the layer's attention. */
static bool is_query(const pass *p, int t, int64_t row) {
    const mp_row_span *wanted = p->context.wanted ? &p->context.wanted[t] : NULL;
    return !wanted || (row >= wanted->row0 && row < wanted->row0 + wanted->rows);
}

/* Norm and rotate queries and keys of rows [row0, row1). */
static void rotate(const pass *p, const mp_transformer_layer *layer, int64_t row0, int64_t row1) {
    const mp_encoder *model = p->model;
    const mp_attention *shape = &model->attention;
    const int which = layer->window && model->rope[1].dim ? 1 : 0;
    const mp_rope *rope = model->rope[which].dim ? &model->rope[which] : NULL;
    for (int t = 0; t < p->count; t++)
        for (int32_t i = 0; i < p->texts[t].n; i++) {
            int64_t row = p->texts[t].row + i;
            if (row < row0 || row >= row1)
                continue;
            float *q = p->rows.qkv + row * model->qkv_width, *k = q + model->q_width;
            const float *angles = rope ? p->angles[which] + (int64_t)i * rope->dim : NULL;
            const bool query = is_query(p, t, row);
            if (model->flags & MP_ENCODER_QUERY_NORMS) {
                if (query)
                    mp_norm_row(&layer->q_norm, q, q);
                mp_norm_row(&layer->k_norm, k, k);
                continue;
            }
            if (query)
                mp_attention_place(&layer->q_norm, rope, angles, 0, shape->heads, shape->head_dim, q);
            mp_attention_place(&layer->k_norm, rope, angles, 0, shape->kv_heads, shape->head_dim, k);
        }
}

/* Compute channels [c0, c1) of `mixed` by a convolution along each text. Rows that attention does not see count as
 * zeros. */
static void convolve(const pass *p, const mp_encoder_conv *conv, int64_t c0, int64_t c1) {
    enum { ROWS = 64 };
    const int32_t n = p->model->hidden, taps = p->model->taps, before = p->model->taps_before;
    const int64_t ld = p->rows.ld_qkv, ld_out = p->rows.ld_mixed;
    const float *rows[ROWS + MP_BUILDER_TAPS];
    for (int t = 0; t < p->count; t++) {
        const mp_encoder_text *text = &p->texts[t];
        const int32_t seen = text->attended < text->n ? text->attended : text->n;
        float *const parts = p->rows.qkv + text->row * ld, *const out = p->rows.mixed + text->row * ld_out;
        for (int64_t r = 0; r < text->n; r++)
            for (int64_t c = c0; c < c1; c++) {
                parts[r * ld + 2 * n + c] *= parts[r * ld + c];
                parts[r * ld + n + c] *= r < seen;
            }
        for (int32_t row0 = 0; row0 < text->n; row0 += ROWS) {
            const int32_t count = text->n - row0 < ROWS ? text->n - row0 : ROWS;
            for (int32_t i = 0; i < count + taps - 1; i++) {
                const int32_t r = row0 + i - before;
                rows[i] = r < 0 || r >= seen ? p->model->no_row : parts + r * ld + 2 * n;
            }
            p->call->causal_conv(rows, c0, conv->kernel + c0, n, conv->bias ? conv->bias + c0 : NULL, taps, count,
                                 (int)(c1 - c0), out + row0 * ld_out + c0, ld_out);
        }
        for (int64_t r = 0; r < text->n; r++)
            for (int64_t c = c0; c < c1; c++)
                out[r * ld_out + c] *= parts[r * ld + n + c];
    }
}

/* Compute attention. In the last layer, drop the rows that are not read: `p` then holds the others only. */
static void rotate_and_attend(pass *p, const mp_encoder_layer *whole) {
    const mp_transformer_layer *layer = &whole->base;
    mp_attention attention = p->model->attention;
    attention.relative = whole->relative.shape ? &whole->relative : NULL;
    mp_row_meet(&p->context);
    if (p->model->flags & PLACED && !whole->conv.kernel) {
        mp_team_loop loop = mp_team_rows(p->context.thread, p->rows.M, p->model->q_width + p->model->kv_width);
        while (mp_team_next(p->context.thread, &loop))
            rotate(p, layer, loop.begin, loop.end);
        mp_row_meet(&p->context);
    }
    if (whole->conv.kernel) {
        const int64_t blocks = (p->model->hidden + CHANNELS - 1) / CHANNELS;
        mp_team_loop loop = mp_team_rows(p->context.thread, blocks, (int64_t)p->rows.M * 3 * CHANNELS);
        while (mp_team_next(p->context.thread, &loop)) {
            const int64_t end = loop.end * CHANNELS;
            convolve(p, &whole->conv, loop.begin * CHANNELS, end < p->model->hidden ? end : p->model->hidden);
        }
    } else
        mp_transformer_attend(&p->context, layer, &attention, &p->rows, 0, p->thread_scratch);
    mp_row_meet(&p->context);
    if (!p->context.wanted)
        return;
    if (p->input)
        mp_transformer_keep_also(&p->context, &p->rows, p->model->hidden, p->input);
    p->rows = mp_transformer_keep(&p->context, &p->rows);
    p->context.wanted = NULL;
    p->context.adapters = p->context.wanted_adapters;
    mp_team_split(p->context.thread, p->rows.M, 1, &p->row0, &p->row1);
}

/* Post-norm: norms follow the residual additions, so each sublayer reads the residual stream directly. */
static void layer_post_norm(pass *p, const mp_encoder_layer *layer) {
    static const mp_norm none = {0};
    const mp_transformer_rows *rows = &p->rows;
    const int64_t n = p->model->hidden;
    if (p->input)
        memcpy(p->input + p->row0 * n, rows->x + p->row0 * n, (size_t)((p->row1 - p->row0) * n) * sizeof(float));
    mp_transformer_project(&p->context, &layer->base, rows->x, rows);
    rotate_and_attend(p, layer);
    mp_transformer_add_mixed(&p->context, &layer->base, rows);
    mp_row_meet(&p->context);
    mp_team_loop loop = mp_team_rows(p->context.thread, rows->M, n);
    while (mp_team_next(p->context.thread, &loop))
        for (int64_t r = loop.begin; r < loop.end; r++) {
            mp_norm_row(&layer->base.attention_norm, rows->x + r * n, rows->x + r * n);
            if (!p->input)
                continue;
            p->call->add(p->input + r * n, n, rows->x + r * n);
            mp_norm_row(&layer->input_norm, rows->x + r * n, rows->x + r * n);
        }
    mp_row_meet(&p->context);
    mp_transformer_feed(&p->context, &layer->base, &none, rows);
    mp_row_meet(&p->context);
    norm_sum(p, &layer->base.ffn_norm);
    mp_row_meet(&p->context);
}

/* Pre-norm: norms precede the sublayers. A layer without attention norm (ModernBERT's first layer, whose input is
 * already normed) reads the residual stream directly. A convolution needs all parts of all rows. */
static void layer_pre_norm(pass *p, const mp_encoder_layer *layer) {
    const mp_row_span *const wanted = p->context.wanted;
    p->context.wanted = layer->conv.kernel ? NULL : wanted;
    mp_transformer_before(&p->context, &layer->base, &p->rows);
    p->context.wanted = wanted;
    rotate_and_attend(p, layer);
    mp_transformer_after(&p->context, &layer->base, &p->rows);
    mp_row_meet(&p->context);
}

static void attend_to_latents(const pass *p) {
    const mp_latent_attention *latent = &p->model->latent;
    const int32_t n = latent->hidden, columns = latent->heads * latent->count;
    const mp_residual sum = mp_transformer_residual(&p->rows, NULL, NULL);
    float *const scores = p->rows.qkv;
    const int M = p->rows.M;
    const float *in = mp_transformer_normed(&p->context, &latent->norm, &p->rows);
    mp_row_linear(&p->context, &latent->scores, in, n, M, NULL, scores, columns);
    mp_row_meet(&p->context);
    mp_team_loop loop = mp_team_rows(p->context.thread, M, columns);
    while (mp_team_next(p->context.thread, &loop))
        for (int64_t unit = loop.begin * latent->heads; unit < loop.end * latent->heads; unit++) {
            float *weights = scores + unit * latent->count;
            const float inverse = 1.0f / p->call->softmax(weights, latent->count);
            for (int i = 0; i < latent->count; i++)
                weights[i] *= inverse;
        }
    mp_row_meet(&p->context);
    mp_residual_add(&p->context, &latent->values, scores, columns, M, NULL, &sum);
    mp_row_meet(&p->context);
    in = mp_transformer_normed(&p->context, &latent->ffn_norm, &p->rows);
    mp_mlp_forward(&p->context, &latent->mlp, in, n, M, p->rows.inner, &sum);
    mp_row_meet(&p->context);
}

int mp_encoder_barriers(const mp_encoder *model) {
    int layer = model->compute == MP_COMPUTE_F32 ? 7 : 11; /* other types: a barrier after activations are prepared */
    layer += model->flags & PLACED ? 1 : 0;
    layer += model->flags & MP_ENCODER_GATED ? 1 : 0;
    layer += model->flags & MP_ENCODER_OUTPUT_NORMS ? 2 : 0;
    layer += model->experts ? 6 : 0;
    layer += model->adapters.count ? 6 : 0; /* four layers with updates, and the activation; wanted queries */
    enum { LAST = 5, HEADS = 2 }; /* the last layer has more, to move the wanted rows: see nn/transformer.h */
    return layer * model->depth + 4 + LAST + HEADS + (model->flags & MP_ENCODER_LATENTS ? 8 : 0);
}

/* Lists the rows of each text that are read after the last layer. Returns true if these are not all rows. Only thread 0
 * writes the list. */
static bool list_wanted(const pass *p) {
    bool all = true;
    for (int t = 0; t < p->count; t++) {
        const mp_encoder_text *text = &p->texts[t];
        mp_row_span wanted = {.rows = text->n};
        if (text->outputs == MP_EMBED_POOLED)
            wanted = mp_head_reads(&p->model->head, text->n, text->skip);
        all = all && wanted.rows == text->n;
        wanted.row0 += text->row;
        if (p->context.thread->index == 0)
            p->wanted[t] = wanted;
    }
    return !all;
}

/* Lists the adapters of all rows and of the wanted ones, if a text has one. Call after list_wanted. Only thread 0
 * writes the lists. */
static void list_adapters(pass *p, uint8_t **at) {
    const mp_adapters *adapters = &p->model->adapters;
    bool any = false;
    for (int t = 0; t < p->count; t++)
        any = any || p->texts[t].adapter != 0;
    if (!any)
        return;
    const size_t M = (size_t)p->rows.M;
    uint8_t *const all = mp_scratch_take(at, M), *const wanted = mp_scratch_take(at, M);
    p->context.low_rank = mp_scratch_take(at, M * (size_t)adapters->width * sizeof(float));
    p->context.low_rank_width = adapters->width;
    p->context.adapters = all;
    p->context.wanted_adapters = wanted;
    uint8_t *next = wanted;
    for (int t = 0; t < p->count && p->context.thread->index == 0; t++) {
        const mp_encoder_text *text = &p->texts[t];
        const size_t kept = (size_t)(p->wanted ? p->wanted[t].rows : 0);
        memset(all + text->row, text->adapter, (size_t)text->n);
        memset(next, text->adapter, kept);
        next += kept;
    }
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */

/* Rows of text `t` that the last layer computed. */
static int32_t kept_rows(const pass *p, int t) { return p->wanted ? p->wanted[t].rows : p->texts[t].n; }

/* Computes the row heads, and the transform of the sparse head, of rows [from, to). */
static void head_rows(const pass *p, int64_t from, int64_t to) {
    const mp_encoder *model = p->model;
    const mp_sparse_head *sparse = &model->sparse_head;
    int64_t row = 0, out = 0;
    for (int t = 0; t < p->count; t++) {
        const mp_encoder_text *text = &p->texts[t];
        const int64_t first = from > row ? from - row : 0, n = kept_rows(p, t), last = to - row < n ? to - row : n;
        const float *states = p->rows.x + (row + first) * model->hidden;
        const bool transforms = encoder_multiplies(model, text->outputs);
        if (first < last && text->outputs & MP_EMBED_ROWS)
            mp_row_head_rows(&model->row_head, states, (int)(last - first), text->normalize_rows, p->thread_scratch,
                             text->rows + first * model->row_head.width);
        if (first < last && transforms)
            mp_dense_chain_rows(&sparse->chain, states, (int)(last - first), p->thread_scratch,
                                p->transformed + (out + first) * sparse->chain.out);
        row += n;
        out += transforms ? n : 0;
    }
}

/* rows: those of the text that the last layer computed, [count, hidden]. */
static void finish_text(const pass *p, mp_encoder_text *text, const float *rows, int32_t count) {
    const mp_encoder *model = p->model;
    const int skip = count < text->n ? 0 : text->skip;
    bool finite = true;
    if (text->outputs & MP_EMBED_POOLED) {
        mp_head_apply(&model->head, rows, count, skip, text->dimensions, text->normalize, p->thread_scratch, text->out);
        finite = p->call->all_finite(text->out, text->dimensions);
    }
    if (text->outputs & MP_EMBED_TOKENS) {
        const int64_t floats = (int64_t)text->n * model->hidden;
        memcpy(text->states, rows, (size_t)floats * sizeof(float));
        finite = finite && p->call->all_finite(text->states, floats);
    }
    if (text->outputs & MP_EMBED_ROWS)
        finite = finite && p->call->all_finite(text->rows, (int64_t)text->n * model->row_head.width);
    if (text->outputs & MP_EMBED_SPARSE) {
        if (model->sparse_head.kind == MP_SPARSE_TOKENS)
            mp_sparse_tokens(&model->sparse_head, text->ids, rows, p->thread_scratch, &text->sparse);
        finite = finite && p->call->all_finite(text->sparse.values, *text->sparse.count);
    }
    text->finite = finite;
}

/* Computes the outputs of all texts from the rows of the last layer. No barrier at the end. */
static void encoder_finish(pass *p) {
    const mp_team_thread *thread = p->context.thread;
    bool heads = p->sparse.count > 0;
    int64_t text0, text1;
    for (int t = 0; t < p->count; t++)
        heads = heads || p->texts[t].outputs & MP_EMBED_ROWS;
    if (heads) {
        mp_team_loop loop = mp_team_shared(p->rows.M, MP_DENSE_ROWS);
        while (mp_team_next(thread, &loop))
            head_rows(p, loop.begin, loop.end);
        mp_team_barrier(thread);
    }
    if (p->sparse.count > 0) {
        mp_sparse_product(&p->sparse, thread, p->transformed, p->sparse_rows, p->context.acts, p->context.panel_scratch,
                          p->thread_scratch);
        mp_team_barrier(thread);
    }
    const float *rows = p->rows.x;
    mp_team_split(thread, p->count, 1, &text0, &text1);
    for (int64_t t = 0, at = 0; t < text1; t++) {
        const bool joins = encoder_multiplies(p->model, p->texts[t].outputs);
        if (t >= text0 && joins)
            mp_sparse_join(&p->sparse, (int)at);
        at += joins;
        if (t >= text0)
            finish_text(p, &p->texts[t], rows, kept_rows(p, (int)t));
        rows += (int64_t)kept_rows(p, (int)t) * p->model->hidden;
    }
}

static pass encoder_begin(const mp_encoder *model, const mp_team_thread *thread, mp_encoder_text *texts, int count,
                          int M, void *group_scratch, void *thread_scratch) {
    uint8_t *at = group_scratch;
    const size_t rows = (size_t)M * sizeof(float);
    pass p = {.model = model,
              .call = mp_kernels_get(),
              .context = {.thread = thread, .n_spans = count},
              .texts = texts,
              .count = count,
              .rows = {.M = M, .hidden = model->hidden, .ld_mixed = model->taps ? mixed_width(model) : model->q_width,
                       .ld_qkv = model->qkv_width},
              .thread_scratch = thread_scratch};
    p.rows.x = mp_scratch_take(&at, rows * (size_t)model->hidden);
    p.rows.qkv = mp_scratch_take(&at, rows * (size_t)encoder_wide(model));
    p.rows.mixed = mp_scratch_take(&at, rows * (size_t)mixed_width(model));
    p.rows.inner = mp_scratch_take(&at, layer_needs(model, M).shared);
    p.rows.own = thread_scratch;
    for (int i = 0; i < 2; i++)
        p.angles[i] = mp_scratch_take(&at, rows * (size_t)model->rope[i].dim);
    if (model->flags & MP_ENCODER_INPUT_TWICE)
        p.input = mp_scratch_take(&at, rows * (size_t)model->hidden);
    mp_row_span *spans = mp_scratch_take(&at, (size_t)M * sizeof *spans);
    p.wanted = mp_scratch_take(&at, (size_t)M * sizeof *p.wanted);
    /* only thread 0 writes `spans`; the others read it after the first barrier */
    for (int t = 0; t < count && thread->index == 0; t++)
        spans[t] = (mp_row_span){.row0 = texts[t].row,
                                 .rows = texts[t].n,
                                 .keys = texts[t].attended < texts[t].n ? texts[t].attended : 0};
    p.context.spans = spans;
    unsigned outputs = 0;
    for (int t = 0; t < count; t++)
        outputs |= texts[t].outputs;
    if (encoder_multiplies(model, outputs)) {
        p.transformed = mp_scratch_take(&at, rows * (size_t)model->sparse_head.chain.out);
        mp_sparse_text *list = mp_scratch_take(&at, (size_t)M * sizeof *list);
        p.sparse = (mp_sparse_pass){.head = &model->sparse_head, .texts = list};
        for (int t = 0; t < count; t++)
            if (encoder_multiplies(model, texts[t].outputs)) {
                if (thread->index == 0)
                    list[p.sparse.count] = texts[t].sparse;
                p.sparse.count++;
                p.sparse_rows += texts[t].n;
            }
    }
    if (!list_wanted(&p))
        p.wanted = NULL;
    list_adapters(&p, &at);
    p.context.acts = at;
    mp_team_split(thread, M, 1, &p.row0, &p.row1);
    return p;
}

void mp_encoder_forward(const mp_encoder *model, const mp_team_thread *thread, mp_encoder_text *texts, int count, int M,
                        mp_lease *lease, void *group_scratch, void *thread_scratch) {
    int longest = 1;
    for (int t = 0; t < count; t++)
        longest = texts[t].n > longest ? texts[t].n : longest;
    pass p = encoder_begin(model, thread, texts, count, M, group_scratch,
                           (uint8_t *)thread_scratch + panel_scratch(model));
    p.context.panel_scratch = thread_scratch;
    p.context.lease = lease; /* reports progress of experts */
    embed(&p, longest);

    const bool post_norm = model->flags & MP_ENCODER_POST_NORM;
    for (int l = 0; l < model->depth; l++) {
        const mp_encoder_layer *layer = &model->layers[model->order[l]];
        if (thread->index == 0)
            mp_lease_poll(lease); /* only for the heartbeat: a layer that comes from a slow disk may take seconds */
        p.context.wanted = l == model->depth - 1 ? p.wanted : NULL;
        if (post_norm)
            layer_post_norm(&p, layer);
        else
            layer_pre_norm(&p, layer);
    }
    if (model->output_norm.weight) {
        norm_sum(&p, &model->output_norm);
        mp_team_barrier(thread);
    }

    if (model->flags & MP_ENCODER_LATENTS)
        attend_to_latents(&p);

    encoder_finish(&p);
}
