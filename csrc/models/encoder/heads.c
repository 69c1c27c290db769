/* encoder/heads.c: see encoder/heads.h. */
#include "models/encoder/heads.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* ---- loading ----------------------------------------------------------------------------------------------------- */

mp_status mp_row_head_init(mp_row_head *head, const mp_builder *builder, int32_t hidden, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    bool no = false;
    *head = (mp_row_head){0};
    MP_TRY(mp_dense_chain_init(&head->chain, builder, "rows", hidden, error));
    if (head->chain.count == 0)
        return MP_OK;
    head->width = head->chain.out;
    return mp_spec_bool(spec, "mpool.rows_normalize", &no, &head->normalize, error);
}

static mp_status read_skipped(mp_sparse_head *head, const mp_spec *spec, mp_error *error) {
    const mp_value *value = mp_spec_find(spec, "mpool.sparse_skipped");
    if (!value)
        return MP_OK;
    if (value->type != MP_VALUE_INTS || value->count > MP_SPARSE_MAX_SKIPPED)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.sparse_skipped", "at most 64 token ids",
                            value->type == MP_VALUE_INTS ? "%llu ids" : "another type",
                            (unsigned long long)value->count);
    for (uint64_t i = 0; i < value->count; i++) {
        const int64_t id = value->as.integers[i];
        if (id < 0 || id >= head->vocab)
            return mp_fail_file(error, MP_LIMIT, mp_spec_origin(spec), -1, "mpool.sparse_skipped",
                                "ids of the vocabulary", "%lld", (long long)id);
        head->skipped[head->skipped_count++] = (int32_t)id;
    }
    return MP_OK;
}

static mp_status read_output(mp_sparse_head *head, const mp_builder *builder, mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    const char *own = "sparse_output.weight", *bias = "sparse_output.bias";
    const bool tied = !mp_weights_has(builder->weights, own);
    const int64_t one = 1;
    int64_t logs;
    bool no = false;
    MP_TRY(mp_spec_bool(spec, "mpool.sparse_sum", &no, &head->sum, error));
    MP_TRY(mp_spec_int(spec, "mpool.sparse_logs", 1, 2, &one, &logs, error));
    head->logs = (int)logs;
    /* Pack this matrix at load, unless no matrix is ever packed: requests for other outputs do not use it, so packing
     * on use might never be complete. */
    mp_builder output = *builder;
    output.unpacked = builder->use == MP_WEIGHTS_MAPPED ? MP_UNPACKED_ENCODER : MP_UNPACKED_NONE;
    output.uncounted = tied; /* counted as the token table */
    return mp_builder_linear(&output, &head->output, tied ? "token_embd.weight" : own,
                             mp_weights_has(builder->weights, bias) ? bias : NULL, head->vocab, head->chain.out, error);
}

mp_status mp_sparse_head_init(mp_sparse_head *head, const mp_builder *builder, int32_t hidden, int32_t vocab,
                              mp_error *error) {
    const mp_spec *spec = mp_weights_spec(builder->weights);
    const char *kind;
    *head = (mp_sparse_head){.vocab = vocab};
    MP_TRY(mp_spec_string(spec, "mpool.sparse", "", &kind, error));
    if (!*kind)
        return MP_OK;
    MP_TRY(mp_dense_chain_init(&head->chain, builder, "sparse", hidden, error));
    if (strcmp(kind, "vocabulary") == 0) {
        head->kind = MP_SPARSE_VOCABULARY;
        return read_output(head, builder, error);
    }
    if (strcmp(kind, "tokens") != 0)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "mpool.sparse", "vocabulary, tokens", "%s",
                            kind);
    if (head->chain.out != 1)
        return mp_fail_file(error, MP_FORMAT, mp_spec_origin(spec), -1, "sparse.weight", "one output", "%d",
                            head->chain.out);
    head->kind = MP_SPARSE_TOKENS;
    return read_skipped(head, spec, error);
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

size_t mp_heads_scratch(const mp_row_head *rows, const mp_sparse_head *sparse) {
    const size_t a = mp_dense_chain_scratch(&rows->chain);
    const size_t b = mp_dense_chain_scratch(&sparse->chain) + (sparse->kind == MP_SPARSE_TOKENS ? MP_DENSE_ROWS : 0);
    return a > b ? a : b;
}

void mp_row_head_rows(const mp_row_head *head, const float *states, int M, bool normalize, float *scratch,
                      float *rows) {
    mp_dense_chain_rows(&head->chain, states, M, scratch, rows);
    for (int m = 0; m < M && normalize; m++)
        mp_scale_to_length_1(rows + (int64_t)m * head->width, head->width);
}

/* ---- sparse vectors ---------------------------------------------------------------------------------------------- */

/* With m in [sqrt(1/2), sqrt(2)]: log(m) = 2 atanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716, so that the terms after
 * s^21 are below 2^-58. Small x keep their digits, because s is computed from x and not from 1 + x. */
float mp_log1p(float x) {
    const double LN2 = 0x1.62e42fefa39efp-1, SQRT2 = 0x1.6a09e667f3bcdp+0;
    if (!(x > 0) || isinf(x))
        return x;
    double s = (double)x / (2.0 + (double)x);
    int exponent = 0;
    if ((double)x >= SQRT2 - 1) {
        double m = frexp(1.0 + (double)x, &exponent); /* in [1/2, 1) */
        if (2 * m < SQRT2) {
            m *= 2;
            exponent--;
        }
        s = (m - 1) / (m + 1);
    }
    const double square = s * s;
    double sum = 0;
    for (int k = 21; k >= 1; k -= 2)
        sum = sum * square + 1.0 / k;
    return (float)(exponent * LN2 + 2 * s * sum);
}

/* Returns the sparse weight of a logit: 0 for logits of 0 or less. NaN stays NaN. */
static float weight_of(const mp_sparse_head *head, float logit) {
    if (logit <= 0)
        return 0;
    const float once = mp_log1p(logit);
    return head->logs == 2 ? mp_log1p(once) : once;
}

enum { TILE_COLUMNS = 8 * MP_PANEL_N }; /* see mp_linear_tile */

/* Writes the largest logit of each column over n rows, or the sum of their weights. NaN reaches the result. */
static void reduce_columns(const mp_sparse_head *head, const float *tile, int64_t ld, int n, int columns, float *out) {
    assert(n > 0 && columns <= TILE_COLUMNS);
    memcpy(out, tile, (size_t)columns * sizeof *out);
    if (!head->sum) {
        for (int r = 1; r < n; r++)
            for (int c = 0; c < columns; c++) {
                const float x = tile[r * ld + c];
                out[c] = x > out[c] || x != x ? x : out[c];
            }
        return;
    }
    for (int c = 0; c < columns; c++)
        out[c] = weight_of(head, out[c]);
    for (int r = 1; r < n; r++)
        for (int c = 0; c < columns; c++)
            out[c] += weight_of(head, tile[r * ld + c]);
}

/* Lists the weights of a panel of `columns` columns from `column` on. */
static void list_weights(const mp_sparse_head *head, const float *reduced, int32_t column, int32_t columns,
                         const mp_sparse_text *text) {
    int32_t at = column;
    for (int32_t c = 0; c < columns; c++) {
        const float weight = head->sum ? reduced[c] : weight_of(head, reduced[c]);
        if (weight == 0)
            continue;
        text->ids[at] = column + c;
        text->values[at++] = weight;
    }
    if (at < column + columns)
        text->ids[at] = -1;
}

static void take_tile(void *arg, int32_t column, int32_t columns, const float *tile, int64_t ld) {
    const mp_sparse_pass *pass = arg;
    float reduced[TILE_COLUMNS];
    for (int t = 0; t < pass->count; t++) {
        const mp_sparse_text *text = &pass->texts[t];
        reduce_columns(pass->head, tile, ld, text->rows, columns, reduced);
        tile += text->rows * ld;
        for (int32_t c = 0; c < columns; c += MP_PANEL_N)
            list_weights(pass->head, reduced + c, column + c, columns - c < MP_PANEL_N ? columns - c : MP_PANEL_N,
                         text);
    }
}

void mp_sparse_product(const mp_sparse_pass *pass, const mp_team_thread *thread, const float *rows, int M, void *acts,
                       uint8_t *panel_scratch, float *tile) {
    mp_linear_tiles(&pass->head->output, thread, rows, pass->head->chain.out, M, acts, panel_scratch, tile, take_tile,
                    (void *)(uintptr_t)pass); /* read only */
}

void mp_sparse_join(const mp_sparse_pass *pass, int index) {
    const mp_sparse_text *text = &pass->texts[index];
    int32_t to = 0;
    for (int32_t column = 0; column < pass->head->vocab; column += MP_PANEL_N) {
        const int32_t left = pass->head->vocab - column, end = column + (left < MP_PANEL_N ? left : MP_PANEL_N);
        for (int32_t from = column; from < end && text->ids[from] >= 0; from++) {
            text->ids[to] = text->ids[from];
            text->values[to++] = text->values[from];
        }
    }
    *text->count = to;
}

static bool is_skipped(const mp_sparse_head *head, int32_t id) {
    for (int i = 0; i < head->skipped_count; i++)
        if (head->skipped[i] == id)
            return true;
    return false;
}

/* Moves the entry at `root` down in a heap of n entries, the largest id first. */
static void sift(int32_t *ids, float *values, int32_t root, int32_t n) {
    const int32_t id = ids[root];
    const float value = values[root];
    for (int32_t child; (child = 2 * root + 1) < n; root = child) {
        child += child + 1 < n && ids[child + 1] > ids[child];
        if (ids[child] <= id)
            break;
        ids[root] = ids[child];
        values[root] = values[child];
    }
    ids[root] = id;
    values[root] = value;
}

/* Sorts by id, in place and in n log n steps for every input. */
static void sort_by_id(int32_t *ids, float *values, int32_t n) {
    for (int32_t i = n / 2; i-- > 0;)
        sift(ids, values, i, n);
    for (int32_t last = n - 1; last > 0; last--) {
        const int32_t id = ids[0];
        const float value = values[0];
        ids[0] = ids[last];
        values[0] = values[last];
        ids[last] = id;
        values[last] = value;
        sift(ids, values, 0, last);
    }
}

void mp_sparse_tokens(const mp_sparse_head *head, const int32_t *ids, const float *states, float *scratch,
                      const mp_sparse_text *out) {
    const int32_t n = out->rows;
    float *const weights = scratch, *const inner = scratch + MP_DENSE_ROWS;
    int32_t listed = 0, count = 0;
    for (int32_t first = 0; first < n; first += MP_DENSE_ROWS) {
        const int32_t rows = n - first < MP_DENSE_ROWS ? n - first : MP_DENSE_ROWS;
        mp_dense_chain_rows(&head->chain, states + (int64_t)first * head->chain.in, rows, inner, weights);
        for (int32_t i = 0; i < rows; i++) {
            const int32_t id = ids[first + i];
            if (weights[i] <= 0 || is_skipped(head, id))
                continue;
            out->ids[listed] = id;
            out->values[listed++] = weights[i];
        }
    }
    sort_by_id(out->ids, out->values, listed);
    for (int32_t i = 0; i < listed; i++) {
        const float value = out->values[i];
        if (count > 0 && out->ids[count - 1] == out->ids[i]) {
            float *best = &out->values[count - 1];
            *best = value > *best || value != value ? value : *best;
        } else {
            out->ids[count] = out->ids[i];
            out->values[count++] = value;
        }
    }
    *out->count = count;
}
