#include "models/nn/attention.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

size_t mp_attention_scratch(const mp_attention *attention, int T) {
    const size_t plain = mp_attn_full_scratch(T, attention->head_dim);
    return attention->relative ? mp_arena_cost(plain) + mp_relative_scratch(attention->relative->shape, T) : plain;
}

mp_attn_full_function mp_attention_function(const mp_attention *attention, int keys) {
    return mp_attn_full_for(attention->compute, keys, attention->head_dim, attention->bias || attention->relative);
}

/* Compute rows [row0, row1) with disentangled attention, a block of rows at a time, each with a bias of its own. */
static void relative_rows(const mp_attention *attention, const mp_attn_full *full, const mp_row_span *span, int head,
                          int row0, int row1, mp_attn_full_function compute, void *scratch) {
    const mp_relative_head part = {
        .layer = attention->relative,
        .head = head,
        .head_dim = attention->head_dim,
        .T = span->rows,
        .keys = full->T,
        .q = full->q,
        .k = full->k,
        .ld = full->ld,
        .scale = attention->scale,
        .add = full->bias,
        .scratch = (uint8_t *)scratch + mp_arena_cost(mp_attn_full_scratch(span->rows, attention->head_dim)),
    };
    const int most = full->T < MP_RELATIVE_BLOCK ? full->T : MP_RELATIVE_BLOCK; /* the kernels take up to T rows */
    mp_relative_begin(&part);
    for (int row = row0, rows; row < row1; row += rows) {
        rows = row1 - row < most ? row1 - row : most;
        mp_attn_full block = *full;
        block.q += row * full->ld;
        block.out += row * full->ld_out;
        block.bias = mp_relative_bias(&part, row, row + rows);
        block.ld_bias = full->T;
        compute(&block, 0, rows, scratch);
    }
}

void mp_attention_head(const mp_attention *attention, const mp_attention_rows *rows, const mp_row_span *span, int head,
                       int window, int row0, int row1, void *scratch) {
    const int64_t column = (int64_t)head * attention->head_dim;
    const int64_t kv_column = head / (attention->heads / attention->kv_heads) * (int64_t)attention->head_dim;
    const int keys = span->keys ? span->keys : span->rows;
    mp_attn_full full = {
        .q = rows->q + span->row0 * rows->ld + column,
        .k = rows->k + span->row0 * rows->ld + kv_column,
        .v = rows->v + span->row0 * rows->ld + kv_column,
        .ld = rows->ld,
        .out = rows->out + span->row0 * rows->ld_out + column,
        .ld_out = rows->ld_out,
        .T = keys,
        .D = attention->head_dim,
        .scale = attention->scale,
        .causal = attention->causal,
        .window = window,
        .ld_bias = -1,
    };
    if (attention->bias) /* the entry of distance 0 is in the middle */
        full.bias = attention->bias + head * (2 * attention->bias_length - 1) + attention->bias_length - 1;
    const mp_attn_full_function compute = mp_attention_function(attention, keys);
    if (attention->relative) {
        assert(window == 0 && !attention->causal);
        relative_rows(attention, &full, span, head, row0, row1, compute, scratch);
        return;
    }
    if (row0 < keys)
        compute(&full, row0, row1 < keys ? row1 : keys, scratch);
    if (row1 <= keys)
        return;
    /* Rows after the keys see all of them, also with causal attention. The kernels take rows up to T only, so the
     * arrays of queries are shifted. */
    assert(window == 0 || span->rows <= window / 2 + 1);
    full.window = 0;
    full.causal = false;
    for (int row = row0 > keys ? row0 : keys, rows; row < row1; row += rows) {
        rows = row1 - row < keys ? row1 - row : keys;
        mp_attn_full shifted = full;
        shifted.q += row * full.ld;
        shifted.out += row * full.ld_out;
        if (full.bias)
            shifted.bias -= row;
        compute(&shifted, 0, rows, scratch);
    }
}

/* Computes the units [begin, end): by sequence, then head, then part of `each` rows. Returns false if context->poll
 * ends the pass. */
static bool forward_units(const mp_row_context *context, const mp_attention *attention, const mp_attention_rows *rows,
                          int window, int each, int64_t begin, int64_t end, void *scratch) {
    const mp_row_span *const queries = context->wanted ? context->wanted : context->spans;
    int64_t base = 0;
    for (int s = 0; s < context->n_spans && begin < end; s++) {
        const mp_row_span *span = &context->spans[s];
        const int first = (int)(queries[s].row0 - span->row0), last_row = first + queries[s].rows;
        const int rows_each = each ? each : queries[s].rows, parts = each ? (queries[s].rows + each - 1) / each : 1;
        const int64_t last = base + (int64_t)attention->heads * parts;
        for (; begin < end && begin < last; begin++) {
            const int row0 = first + (int)((begin - base) % parts) * rows_each;
            const int row1 = row0 + rows_each < last_row ? row0 + rows_each : last_row;
            if (context->poll && context->poll(context->arg))
                return false;
            mp_attention_head(attention, rows, span, (int)((begin - base) / parts), window, row0, row1, scratch);
        }
        base = last;
    }
    return true;
}

void mp_attention_forward(const mp_row_context *context, const mp_attention *attention, const mp_attention_rows *rows,
                          int window, int each, void *scratch) {
    const mp_row_span *const queries = context->wanted ? context->wanted : context->spans;
    mp_team_loop loop = mp_team_shared(0, 1);
    for (int s = 0; s < context->n_spans; s++)
        loop.n += (int64_t)attention->heads * (each ? (queries[s].rows + each - 1) / each : 1);
    while (mp_team_next(context->thread, &loop) &&
           forward_units(context, attention, rows, window, each, loop.begin, loop.end, scratch)) {
    }
}

int mp_attention_bucket(int ahead, int buckets, int farthest) {
    const int half = buckets / 2, exact = half / 2, distance = abs(ahead), first = ahead > 0 ? half : 0;
    if (distance < exact)
        return first + distance;
    const float by =
        logf((float)distance / (float)exact) / (float)log((double)farthest / exact) * (float)(half - exact);
    const int bucket = exact + (int)by;
    return first + (bucket < half ? bucket : half - 1);
}

mp_status mp_attention_bias_learned(const mp_tensor *table, int heads, int64_t length, int farthest, float *bias,
                                    mp_error *error) {
    float *row = mp_alloc_array((size_t)heads, sizeof *row, MP_TAG_MISC);
    if (!row)
        return mp_fail_memory(error, (uint64_t)heads * sizeof *row, "a row of learned position biases");
    for (int64_t i = 0; i < 2 * length - 1; i++) {
        const int bucket = mp_attention_bucket((int)(i - (length - 1)), (int)table->shape[0], farthest);
        mp_dequantize_row(table->dtype, mp_tensor_row(table, bucket), heads, row);
        for (int h = 0; h < heads; h++)
            bias[h * (2 * length - 1) + i] = row[h];
    }
    mp_free(row);
    return MP_OK;
}

/* Slope of a head, as ALiBi defines it: powers of 2^(-8 / n) for the largest power of two n <= heads. Heads from n on
 * use every second slope of a model with 2n heads. */
static double slope_of(int head, int heads) {
    int n = 1;
    while (2 * n <= heads)
        n *= 2;
    return head < n ? pow(2, -8.0 / n * (head + 1)) : pow(2, -4.0 / n * (2 * (head - n) + 1));
}

void mp_attention_bias_slopes(int heads, int64_t length, float *bias) {
    for (int h = 0; h < heads; h++)
        for (int64_t i = 0; i < 2 * length - 1; i++)
            *bias++ = -(float)(slope_of(h, heads) * abs((int)(i - (length - 1))));
}
