/* search.c: see search.h. A block of vectors is packed like a matrix of weights, the queries are the activations, and
 * each tile of scores is merged into the thread's nearest vectors while it is in cache. A few queries are multiplied
 * by the vectors as they are stored; the pass that measures the vectors also multiplies the first query. */
#include "vectors/search.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/arena.h"
#include "kernels/kernels.h"

enum {
    BLOCK = 256,                /* maximum number of vectors in a block */
    BLOCK_FLOATS = 128 * 1024,  /* maximum number of components in a block of more than MP_PANEL_N vectors: 512 KiB */
    TILE_QUERIES = 64,          /* queries in a tile of scores */
};

/* Squared lengths between which fp32 products neither overflow nor lose digits to denormals. */
static const float MIN_SQUARE = 1e-24f, MAX_SQUARE = 1e30f;

typedef struct tiles { /* the scratch of a thread; the packed block follows it in memory */
    float scores[TILE_QUERIES * BLOCK];
    float inverse[BLOCK]; /* 1 / length */
    uint16_t precise[BLOCK]; /* indices of the EXTREME vectors in the block */
    int32_t precise_count;
} tiles;

typedef struct search {
    mp_scan scan;
    int32_t dim;
    bool cosine;
    float *queries; /* [queries, dim] */
    float *scales;  /* [queries]: 1 / length; 0: EXTREME, all scores are computed in double */
} search;

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static int32_t block_of(int32_t dim) {
    const int32_t fit = BLOCK_FLOATS / dim / MP_PANEL_N * MP_PANEL_N;
    return fit > BLOCK ? BLOCK : fit > 0 ? fit : MP_PANEL_N;
}

static mp_wmat block_matrix(int32_t count, int32_t dim) {
    mp_wmat matrix;
    mp_wmat_init(&matrix, MP_W_F32, count, dim);
    return matrix;
}

typedef enum vector_kind { USUAL, EXTREME, NOT_FINITE } vector_kind;

/* Computes the squared lengths of vectors. */
static void square(const float *vectors, int32_t dim, int32_t count, float *squares) {
    for (int32_t n = 0; n < count; n++, vectors += dim)
        squares[n] = mp_kernels_get()->dot(vectors, vectors, dim);
}

/* Classifies a vector by its squared length. EXTREME: its scores must be computed in double. *inverse: 1 / length if
 * the vector is USUAL. */
static vector_kind examine(const float *vector, int32_t dim, float square, float *inverse) {
    *inverse = 0.0f;
    if (!(square >= MIN_SQUARE && square <= MAX_SQUARE))
        return mp_kernels_get()->all_finite(vector, dim) ? EXTREME : NOT_FINITE;
    *inverse = 1.0f / sqrtf(square);
    return USUAL;
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

/* Convert x to double exactly, even if this thread treats denormal floats as 0 (base/team.h). */
static double search_exact(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (bits & 0x7f800000u)
        return x;
    const double value = (double)(bits & 0x7fffffu) * 0x1p-149;
    return bits >> 31 ? -value : value;
}

static float precise_score(const float *query, const float *vector, int32_t dim, bool cosine) {
    double sum = 0, square = 0, other = 0;
    for (int32_t i = 0; i < dim; i++) {
        const double a = search_exact(query[i]), b = search_exact(vector[i]);
        sum += a * b;
        square += b * b;
        other += a * a;
    }
    if (cosine)
        return square > 0 && other > 0 ? (float)(sum / (sqrt(square) * sqrt(other))) : 0.0f;
    return sum > FLT_MAX ? FLT_MAX : sum < -FLT_MAX ? -FLT_MAX : (float)sum;
}

/* Examines the vectors of a block: replaces their squared lengths in tile->inverse by inverse lengths, and lists those
 * whose scores must be computed in double. Returns the index of the first vector that is not finite, or `count`. */
static int32_t examine_block(const search *s, tiles *tile, const float *vectors, int32_t count) {
    const int32_t dim = s->dim;
    tile->precise_count = 0;
    for (int32_t n = 0; n < count; n++) {
        const vector_kind kind = examine(vectors + (int64_t)n * dim, dim, tile->inverse[n], &tile->inverse[n]);
        if (kind == NOT_FINITE)
            return n;
        if (kind == EXTREME)
            tile->precise[tile->precise_count++] = (uint16_t)n;
    }
    return count;
}

/* Multiplies queries [from, to) by the vectors of a block into the tile. `matrix` is NULL or the packed block. */
static void search_multiply(const search *s, float *scores, const mp_acts *acts, const mp_wmat *matrix,
                            const float *vectors, int32_t count, int32_t from, int32_t to) {
    if (matrix)
        mp_gemm(matrix, acts, from, to, 0, matrix->panels, NULL, scores - (int64_t)from * BLOCK, BLOCK);
    else
        mp_stored_multiply(MP_F32, (const uint8_t *)vectors, (size_t)s->dim * sizeof(float), count, acts, from, to,
                           scores, BLOCK);
}

/* mp_scan_ops.compare */
static int32_t search_compare(mp_scan *scan, mp_scan_thread *thread, const void *items, int64_t first, int32_t count) {
    const search *s = (const search *)(void *)scan;
    tiles *tile = thread->scratch;
    const float *vectors = (const float *)items + first * s->dim;
    const int32_t queries = scan->plan.queries;
    const bool stored = mp_stored_can(MP_F32, MP_A_F32, queries);
    mp_squared_product *squared = stored ? mp_squared_product_for() : NULL;
    if (squared)
        squared(vectors, s->dim, count, s->dim, s->queries, tile->scores, tile->inverse);
    else
        square(vectors, s->dim, count, tile->inverse);
    const int32_t finite = examine_block(s, tile, vectors, count), multiplied = squared ? 1 : 0;
    if (finite < count)
        return finite;
    mp_acts acts;
    mp_acts_init(&acts, MP_A_F32, queries, s->dim, NULL);
    mp_acts_fill(&acts, s->queries, s->dim, 0, queries);
    mp_wmat matrix;
    if (!stored) {
        const uint64_t bytes = (uint64_t)count * (uint64_t)s->dim * sizeof(float);
        const mp_tensor tensor = {.dtype = MP_F32, .ndim = 2, .shape = {count, s->dim},
                                  .data = (const uint8_t *)vectors, .nbytes = bytes};
        matrix = block_matrix(count, s->dim);
        matrix.data = (uint8_t *)tile + mp_arena_cost(sizeof *tile);
        mp_wmat_pack(&matrix, &tensor, 0, matrix.panels);
    }
    for (int32_t from = 0, to; from < queries; from = to) {
        to = queries - from < TILE_QUERIES ? queries : from + TILE_QUERIES;
        search_multiply(s, tile->scores + multiplied * BLOCK, &acts, stored ? NULL : &matrix, vectors, count,
                        from + multiplied, to);
        for (int32_t q = from; q < to; q++) {
            float *scores = tile->scores + (int64_t)(q - from) * BLOCK;
            for (int32_t n = 0; s->cosine && n < count; n++)
                scores[n] *= tile->inverse[n] * s->scales[q]; /* exchanging query and vector gives the same bits */
            const bool all = s->scales[q] == 0.0f;
            for (int32_t i = 0; i < (all ? count : tile->precise_count); i++) {
                const int32_t n = all ? i : tile->precise[i];
                scores[n] = precise_score(s->queries + (int64_t)q * s->dim, vectors + (int64_t)n * s->dim, s->dim,
                                          s->cosine);
            }
            mp_scan_merge(scan, thread, q, scores, count, first);
        }
    }
    return count;
}

static mp_status search_refuse(mp_scan *scan, const void *items, int64_t index, int64_t number, mp_error *error) {
    (void)scan, (void)items, (void)index;
    return mp_fail(error, MP_INVALID_ARGUMENT,
                   "`vectors` must have finite components, got NaN or infinity in vector %lld", (long long)number);
}

static void search_destroy(mp_scan *scan) { mp_free(scan); }

/* ---- creation ---------------------------------------------------------------------------------------------------- */

mp_status mp_search_create(const mp_search_plan *plan, const float *queries, mp_scan **out, mp_error *error) {
    static const mp_scan_ops ops = {search_compare, search_refuse, search_destroy};
    const int32_t dim = plan->dim;
    const size_t count = (size_t)plan->scan.queries, bytes = mp_arena_cost(count * (size_t)dim * sizeof(float));
    const size_t all = mp_arena_cost(sizeof(search)) + bytes + count * sizeof(float);
    uint8_t *memory = mp_alloc_zeroed(all, MP_TAG_SCRATCH);
    if (!memory)
        return mp_fail_memory(error, all, "the queries of a search");
    search *s = (search *)(void *)memory;
    const mp_wmat matrix = block_matrix(block_of(dim), dim);
    s->scan = (mp_scan){.ops = &ops, .plan = plan->scan, .block = block_of(dim)};
    s->scan.scratch_bytes = mp_arena_cost(sizeof(tiles)) + mp_wmat_bytes(&matrix) + MP_WMAT_SLACK;
    s->dim = dim;
    s->cosine = plan->cosine;
    s->queries = (float *)(void *)(memory + mp_arena_cost(sizeof *s));
    s->scales = s->queries + bytes / sizeof(float);
    memcpy(s->queries, queries, count * (size_t)dim * sizeof(float));
    for (int32_t q = 0; q < plan->scan.queries; q++) {
        const float *query = s->queries + (int64_t)q * dim;
        square(query, dim, 1, &s->scales[q]);
        if (examine(query, dim, s->scales[q], &s->scales[q]) == NOT_FINITE) {
            mp_scan_destroy(&s->scan);
            return mp_fail(error, MP_INVALID_ARGUMENT,
                           "`queries` must have finite components, got NaN or infinity in query %d", q);
        }
    }
    *out = &s->scan;
    return MP_OK;
}
