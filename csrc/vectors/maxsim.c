/* maxsim.c: see maxsim.h. The tokens of all queries are packed as outputs of panels of 32, and the tokens of documents
 * are rows. Rows are taken in groups that stay in cache while all panels are multiplied by them. For documents of int8,
 * panels of digits are made from the float32 ones, before the first such array. */
#include "vectors/maxsim.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/arena.h"
#include "kernels/digits.h"
#include "kernels/kernels.h"

enum {
    BLOCK = 64,                /* maximum number of documents in a block */
    BLOCK_TOKENS = 4096,       /* maximum number of tokens in a block of several documents */
    GROUP_BYTES = 64 * 1024,   /* rows of a group, which stay in L2 while all panels are multiplied by them */
    MAX_TOKENS = 1 << 20,      /* maximum number of tokens of all queries together */
};

typedef struct maxsim {
    mp_scan scan;
    int32_t dim;
    int64_t *offsets;    /* [queries + 1] */
    mp_wmat panels;      /* the tokens of the queries [offsets[queries], dim] */
    size_t digits_bytes; /* bytes of one panel of digits */
    uint8_t *digits;     /* the same tokens as panels of digits.h, for documents of int8 */
    bool has_digits;     /* `digits` is filled, which happens before the first array of int8 */
} maxsim;

static size_t item_bytes(const mp_maxsim_documents *documents) {
    return documents->dtype == MP_I8 ? sizeof(int8_t) : sizeof(float);
}

/* Rows of a group: at least those of one tile of a kernel. */
static int32_t group_of(const mp_maxsim_documents *documents, int32_t dim) {
    const int32_t rows = (int32_t)(GROUP_BYTES / ((size_t)dim * item_bytes(documents)));
    return rows < 16 ? 16 : rows;
}

static const float *panel_of(const maxsim *m, int32_t panel) {
    return (const float *)(const void *)(m->panels.data + (size_t)panel * m->panels.panel_bytes);
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

/* Folds rows [row, row + count) into the maxima [panels, MP_PANEL_N] of all panels. Returns false if a score is not
 * finite. */
static bool fold(const maxsim *m, const mp_maxsim_documents *documents, int64_t row, int32_t count, float *maxima) {
    const mp_kernels *k = mp_kernels_get();
    const int32_t dim = m->dim;
    const float *scales = documents->scales ? documents->scales + row : NULL;
    bool finite = true;
    for (int32_t p = 0; p < m->panels.panels; p++, maxima += MP_PANEL_N) {
        const int32_t left = m->panels.N - p * MP_PANEL_N, columns = left < MP_PANEL_N ? left : MP_PANEL_N;
        if (documents->dtype == MP_I8)
            finite &= k->row_maxima_i8(m->digits + (size_t)p * m->digits_bytes, columns, dim,
                                       (const int8_t *)documents->values + row * dim, dim, count, scales, maxima);
        else
            finite &= k->row_maxima(panel_of(m, p), columns, dim, (const float *)documents->values + row * dim, dim,
                                    count, scales, maxima);
    }
    return finite;
}

static float sum_of(const float *maxima, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)maxima[i];
    return sum > FLT_MAX ? FLT_MAX : sum < -FLT_MAX ? -FLT_MAX : (float)sum;
}

/* True if one document with this number of tokens stays within MP_MAXSIM_WORK. */
static bool is_bounded(const maxsim *m, int64_t tokens) {
    return tokens <= MP_MAXSIM_WORK / m->panels.N / m->dim;
}

/* mp_scan_ops.compare */
static int32_t maxsim_compare(mp_scan *scan, mp_scan_thread *thread, const void *items, int64_t first, int32_t count) {
    const maxsim *m = (const maxsim *)(void *)scan;
    const mp_maxsim_documents *documents = items;
    const int32_t queries = scan->plan.queries, columns = m->panels.panels * MP_PANEL_N;
    const int32_t group = group_of(documents, m->dim);
    float *maxima = thread->scratch, *tile = maxima + columns;
    for (int32_t n = 0; n < count; n++) {
        const int64_t begin = documents->offsets[first + n], end = documents->offsets[first + n + 1];
        if (!is_bounded(m, end - begin))
            return n;
        for (int32_t i = 0; i < columns; i++)
            maxima[i] = -INFINITY;
        for (int64_t row = begin; row < end; row += group)
            if (!fold(m, documents, row, end - row < group ? (int32_t)(end - row) : group, maxima))
                return n;
        for (int32_t q = 0; q < queries; q++)
            tile[(int64_t)q * BLOCK + n] = begin == end ? -INFINITY
                                                        : sum_of(maxima + m->offsets[q],
                                                                 m->offsets[q + 1] - m->offsets[q]);
    }
    for (int32_t q = 0; q < queries; q++) {
        const float *scores = tile + (int64_t)q * BLOCK;
        if (documents->scores)
            memcpy(documents->scores + q * documents->ld + first, scores, sizeof(float) * (size_t)count);
        mp_scan_merge(scan, thread, q, scores, count, first);
    }
    return count;
}

/* The first value that is not finite, or `count`. */
static int64_t first_bad(const float *values, int64_t count) {
    int64_t at = 0;
    while (at < count && isfinite(values[at]))
        at++;
    return at;
}

static const char *shown(float value) { return isnan(value) ? "NaN" : value > 0 ? "infinity" : "-infinity"; }

static mp_status maxsim_refuse(mp_scan *scan, const void *items, int64_t index, int64_t number, mp_error *error) {
    const maxsim *m = (const maxsim *)(void *)scan;
    const mp_maxsim_documents *documents = items;
    const int64_t begin = documents->offsets[index], tokens = documents->offsets[index + 1] - begin;
    const long long document = number;
    if (!is_bounded(m, tokens))
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`documents` must have at most %lld tokens in a document for queries of %d tokens and %d "
                       "components, got %lld in document %lld",
                       (long long)(MP_MAXSIM_WORK / m->panels.N / m->dim), m->panels.N, m->dim, (long long)tokens,
                       document);
    if (documents->dtype != MP_I8) {
        const float *values = (const float *)documents->values + begin * m->dim;
        const int64_t at = first_bad(values, tokens * m->dim);
        if (at < tokens * m->dim)
            return mp_fail(error, MP_INVALID_ARGUMENT,
                           "`documents` must have finite components, got %s in document %lld (token %lld)",
                           shown(values[at]), document, (long long)(at / m->dim));
    }
    const float *scales = documents->scales ? documents->scales + begin : NULL;
    const int64_t at = scales ? first_bad(scales, tokens) : tokens;
    if (at < tokens)
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "`documents` must have finite scales, got %s in document %lld (token %lld)", shown(scales[at]),
                       document, (long long)at);
    return mp_fail(error, MP_INVALID_ARGUMENT,
                   "`documents` must have finite products with the queries, got one that exceeds float32 in document "
                   "%lld", document);
}

static void maxsim_destroy(mp_scan *scan) { mp_free(scan); }

/* ---- creation ---------------------------------------------------------------------------------------------------- */

static mp_status check_queries(const mp_maxsim_plan *plan, const float *tokens, const int64_t *offsets,
                               mp_error *error) {
    if (offsets[0] != 0)
        return mp_fail(error, MP_INVALID_ARGUMENT, "the offsets of `queries` must begin with 0, got %lld",
                       (long long)offsets[0]);
    for (int32_t q = 0; q < plan->scan.queries; q++) {
        if (offsets[q + 1] <= offsets[q])
            return mp_fail(error, MP_INVALID_ARGUMENT, "query %d must have at least one token, got 0", q);
        if (offsets[q + 1] > MAX_TOKENS)
            return mp_fail(error, MP_INVALID_ARGUMENT, "`queries` must have at most %d tokens together, got %lld",
                           MAX_TOKENS, (long long)offsets[q + 1]);
        if (!mp_kernels_get()->all_finite(tokens + offsets[q] * plan->dim, (offsets[q + 1] - offsets[q]) * plan->dim))
            return mp_fail(error, MP_INVALID_ARGUMENT,
                           "`queries` must have finite components, got NaN or infinity in query %d", q);
    }
    return MP_OK;
}

mp_status mp_maxsim_create(const mp_maxsim_plan *plan, const float *tokens, const int64_t *offsets, mp_scan **out,
                           mp_error *error) {
    static const mp_scan_ops ops = {maxsim_compare, maxsim_refuse, maxsim_destroy};
    const mp_status status = check_queries(plan, tokens, offsets, error);
    if (status != MP_OK)
        return status;
    const int32_t queries = plan->scan.queries, count = (int32_t)offsets[queries];
    mp_wmat panels;
    mp_wmat_init(&panels, MP_W_F32, count, plan->dim);
    const size_t ends = mp_arena_cost(sizeof(int64_t) * ((size_t)queries + 1));
    const size_t packed = mp_arena_cost(mp_wmat_bytes(&panels) + MP_WMAT_SLACK), digits = mp_digits_bytes(plan->dim);
    const size_t all = mp_arena_cost(sizeof(maxsim)) + ends + packed + (size_t)panels.panels * digits;
    uint8_t *memory = mp_alloc_zeroed(all, MP_TAG_SCRATCH);
    if (!memory)
        return mp_fail_memory(error, all, "the queries of a search");
    maxsim *m = (maxsim *)(void *)memory;
    m->scan = (mp_scan){.ops = &ops, .plan = plan->scan, .block = 1};
    m->dim = plan->dim;
    m->offsets = (int64_t *)(void *)(memory + mp_arena_cost(sizeof *m));
    memcpy(m->offsets, offsets, sizeof(int64_t) * ((size_t)queries + 1));
    m->panels = panels;
    m->panels.data = memory + mp_arena_cost(sizeof *m) + ends;
    m->digits = m->panels.data + packed;
    m->digits_bytes = digits;
    const mp_tensor tensor = {.dtype = MP_F32, .ndim = 2, .shape = {count, plan->dim}, .data = (const uint8_t *)tokens,
                              .nbytes = (uint64_t)count * (uint64_t)plan->dim * sizeof(float)};
    mp_wmat_pack(&m->panels, &tensor, 0, m->panels.panels);
    m->scan.scratch_bytes = sizeof(float) * ((size_t)panels.panels * MP_PANEL_N + (size_t)queries * BLOCK);
    *out = &m->scan;
    return MP_OK;
}

void mp_maxsim_begin(mp_scan *scan, const mp_maxsim_documents *documents, int64_t count) {
    maxsim *m = (maxsim *)(void *)scan;
    if (documents->dtype == MP_I8 && !m->has_digits) {
        for (int32_t p = 0; p < m->panels.panels; p++)
            mp_digits_pack(panel_of(m, p), m->dim, m->digits + (size_t)p * m->digits_bytes);
        m->has_digits = true;
    }
    int64_t longest = 1;
    for (int64_t d = 0; d < count; d++) {
        const int64_t tokens = documents->offsets[d + 1] - documents->offsets[d];
        longest = tokens > longest ? tokens : longest;
    }
    const int64_t fit = BLOCK_TOKENS / longest;
    scan->block = fit < 1 ? 1 : fit > BLOCK ? BLOCK : (int32_t)fit;
}
