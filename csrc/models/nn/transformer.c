#include "models/nn/transformer.h"

#include <string.h>

void mp_transformer_needs(const mp_transformer_layer *layer, int M, mp_block_needs *needs) {
    mp_needs_linear(needs, &layer->qkv, M);
    mp_needs_linear(needs, &layer->out, M);
    layer->ffn.ops->needs(&layer->ffn, M, needs);
}

const float *mp_transformer_normed(const mp_row_context *context, const mp_norm *norm,
                                   const mp_transformer_rows *rows) {
    if (!norm->weight)
        return rows->x;
    mp_norm_rows(norm, context->thread, rows->M, rows->x, rows->hidden, rows->mixed, rows->hidden);
    return mp_row_meet(context) ? rows->mixed : NULL;
}

mp_residual mp_transformer_residual(const mp_transformer_rows *rows, const mp_norm *after, const float *scale) {
    return (mp_residual){.x = rows->x, .n = rows->hidden, .after = after, .scale = scale, .scratch = rows->qkv};
}

/* Returns the wanted rows of sequence `s` that are in the range, counted from the first row of the range. */
static mp_row_span wanted_in(const mp_row_context *context, const mp_transformer_rows *rows, int s) {
    const mp_row_span *all = &context->wanted[s];
    const int64_t from = all->row0 - rows->row0, to = from + all->rows;
    const int64_t first = from > 0 ? from : 0, end = to < rows->M ? to : rows->M;
    return (mp_row_span){.row0 = first, .rows = first < end ? (int32_t)(end - first) : 0};
}

static int count_wanted(const mp_row_context *context, const mp_transformer_rows *rows) {
    int count = 0;
    for (int s = 0; s < context->n_spans; s++)
        count += wanted_in(context, rows, s).rows;
    return count;
}

/* Copies the wanted rows of the range from `in` [M, width] to the first rows of `out`, which may be `in`. */
static void gather(const mp_row_context *context, const mp_transformer_rows *rows, int64_t width, const float *in,
                   float *out) {
    for (int s = 0; s < context->n_spans; s++) {
        const mp_row_span wanted = wanted_in(context, rows, s);
        memmove(out, in + wanted.row0 * width, (size_t)(wanted.rows * width) * sizeof *out);
        out += wanted.rows * width;
    }
}

/* Moves the queries of `count` wanted rows from the first rows of the range to their own rows, the last one first. */
static void scatter_queries(const mp_row_context *context, const mp_transformer_rows *rows, int32_t width, int count) {
    for (int s = context->n_spans - 1; s >= 0; s--) {
        const mp_row_span wanted = wanted_in(context, rows, s);
        for (int64_t row = wanted.row0 + wanted.rows - 1; row >= wanted.row0; row--)
            if (--count != row)
                memcpy(rows->qkv + row * rows->ld_qkv, rows->qkv + count * rows->ld_qkv, (size_t)width * sizeof(float));
    }
}

bool mp_transformer_project(const mp_row_context *context, const mp_transformer_layer *layer, const float *in,
                            const mp_transformer_rows *rows) {
    const bool leads = context->thread->index == 0;
    if (!context->wanted) {
        mp_row_linear(context, &layer->qkv, in, rows->hidden, rows->M, NULL, rows->qkv, rows->ld_qkv);
        return true;
    }
    const mp_linear q = mp_linear_view(&layer->qkv, 0, 1), kv = mp_linear_view(&layer->qkv, 1, 2);
    const int count = count_wanted(context, rows);
    mp_row_linear(context, &kv, in, rows->hidden, rows->M, NULL, rows->qkv, rows->ld_qkv);
    if (count == 0)
        return true;
    if (!mp_row_meet(context)) /* the other threads may still read `mixed` */
        return false;
    if (leads)
        gather(context, rows, rows->hidden, in, rows->mixed);
    if (!mp_row_meet(context))
        return false;
    mp_row_context queries = *context;
    queries.adapters = context->wanted_adapters;
    mp_row_linear(&queries, &q, rows->mixed, rows->hidden, count, NULL, rows->qkv, rows->ld_qkv);
    if (!mp_row_meet(context))
        return false;
    if (leads)
        scatter_queries(context, rows, q.N, count);
    return true;
}

void mp_transformer_keep_also(const mp_row_context *context, const mp_transformer_rows *rows, int64_t width,
                              float *array) {
    if (context->thread->index == 0)
        gather(context, rows, width, array, array);
}

mp_transformer_rows mp_transformer_keep(const mp_row_context *context, const mp_transformer_rows *rows) {
    mp_transformer_rows kept = *rows;
    kept.M = count_wanted(context, rows);
    mp_transformer_keep_also(context, rows, rows->hidden, rows->x);
    mp_transformer_keep_also(context, rows, rows->ld_mixed, rows->mixed);
    mp_team_barrier(context->thread);
    return kept;
}

bool mp_transformer_before(const mp_row_context *context, const mp_transformer_layer *layer,
                           const mp_transformer_rows *rows) {
    const float *in = mp_transformer_normed(context, &layer->attention_norm, rows);
    return in && mp_transformer_project(context, layer, in, rows);
}

void mp_transformer_attend(const mp_row_context *context, const mp_transformer_layer *layer,
                           const mp_attention *attention, const mp_transformer_rows *rows, int each, void *scratch) {
    const int64_t q = (int64_t)attention->heads * attention->head_dim;
    const int64_t kv = (int64_t)attention->kv_heads * attention->head_dim;
    const mp_attention_rows heads = {.q = rows->qkv,
                                     .k = rows->qkv + q,
                                     .v = rows->qkv + q + kv,
                                     .ld = rows->ld_qkv,
                                     .out = rows->mixed,
                                     .ld_out = rows->ld_mixed};
    mp_attention_forward(context, attention, &heads, layer->window, each, scratch);
}

bool mp_transformer_add_mixed(const mp_row_context *context, const mp_transformer_layer *layer,
                              const mp_transformer_rows *rows) {
    const mp_residual sum = mp_transformer_residual(rows, &layer->attention_after, layer->attention_scale);
    return mp_residual_add(context, &layer->out, rows->mixed, rows->ld_mixed, rows->M, NULL, &sum);
}

/* Returns a copy of the residual sums, in `mixed`, after a barrier; NULL if the step is over. */
static const float *copy_rows(const mp_row_context *context, const mp_transformer_rows *rows) {
    mp_team_loop loop = mp_team_rows(context->thread, rows->M, rows->hidden);
    while (mp_team_next(context->thread, &loop))
        memcpy(rows->mixed + loop.begin * rows->hidden, rows->x + loop.begin * rows->hidden,
               (size_t)((loop.end - loop.begin) * rows->hidden) * sizeof *rows->x);
    return mp_row_meet(context) ? rows->mixed : NULL;
}

bool mp_transformer_feed(const mp_row_context *context, const mp_transformer_layer *layer, const mp_norm *norm,
                         const mp_transformer_rows *rows) {
    const mp_ffn *ffn = &layer->ffn;
    const mp_residual sum = mp_transformer_residual(rows, &layer->ffn_after, layer->ffn_scale);
    const float *in = !norm->weight && ffn->ops->separate ? copy_rows(context, rows)
                                                          : mp_transformer_normed(context, norm, rows);
    return in && ffn->ops->add(context, ffn, in, rows->M, 1, rows->inner, rows->own, &sum);
}

bool mp_transformer_after(const mp_row_context *context, const mp_transformer_layer *layer,
                          const mp_transformer_rows *rows) {
    return mp_transformer_add_mixed(context, layer, rows) && mp_row_meet(context) &&
           mp_transformer_feed(context, layer, &layer->ffn_norm, rows);
}

/* Returns at most `most` of the rows, from row0 on. */
static mp_transformer_rows range_of(const mp_transformer_rows *rows, int row0, int most) {
    mp_transformer_rows range = *rows;
    range.M = rows->M - row0 < most ? rows->M - row0 : most;
    range.row0 += row0;
    range.x += (int64_t)row0 * rows->hidden;
    range.mixed += row0 * rows->ld_mixed;
    range.qkv += row0 * rows->ld_qkv;
    return range;
}

bool mp_transformer_forward(const mp_row_context *context, const mp_transformer_layer *layer,
                            const mp_attention *attention, const mp_transformer_rows *rows, int most, int each,
                            void *scratch) {
    for (int row0 = 0; row0 < rows->M; row0 += most) {
        const mp_transformer_rows range = range_of(rows, row0, most);
        if (!mp_transformer_before(context, layer, &range) || !mp_row_meet(context))
            return false;
    }
    mp_transformer_attend(context, layer, attention, rows, each, scratch);
    if (!mp_row_meet(context))
        return false;
    for (int row0 = 0; row0 < rows->M; row0 += most) {
        const mp_transformer_rows range = range_of(rows, row0, most);
        if (!mp_transformer_after(context, layer, &range) || !mp_row_meet(context))
            return false;
    }
    return true;
}
