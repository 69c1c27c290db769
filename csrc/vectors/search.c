/* search.c: see search.h. Threads take blocks of vectors in ascending order. A block is packed like a matrix of
 * weights, the queries are the activations, and each tile of scores is merged into the thread's nearest vectors while
 * it is in cache. One or two queries are multiplied by the vectors as they are stored. */
#include "vectors/search.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "kernels/kernels.h"

enum {
    BLOCK = 256,                /* maximum of vectors in a block */
    BLOCK_FLOATS = 128 * 1024,  /* maximum of components in a block of more than MP_PANEL_N vectors: half an L2 */
    TILE_QUERIES = 64,          /* queries in a tile of scores */
    THREADS_MAX = 256,
};

/* Squared lengths between which fp32 products neither overflow nor lose digits to denormals. */
static const float LEAST_SQUARE = 1e-24f, MOST_SQUARE = 1e30f;

typedef struct thread_state {
    /* Heaps with the worst of the nearest vectors first, one for each query: [queries, most]. */
    float *scores;
    int64_t *numbers;
    int64_t *counts;  /* [queries] */
    int64_t seen;     /* vectors that this thread compared */
    float *tile;      /* [TILE_QUERIES, BLOCK] */
    float *inverse;   /* [BLOCK]: 1 / length */
    uint8_t *panels;  /* the packed block */
    int32_t precise_count;
    uint16_t precise[BLOCK]; /* the EXTREME vectors of the block */
} thread_state;

struct mp_search {
    mp_search_plan plan;
    float *queries;   /* [queries, dim] */
    float *scales;    /* [queries]: 1 / length; 0: EXTREME, all scores are computed in double */
    int32_t block;    /* vectors in a block */
    int64_t added;
    thread_state *threads[THREADS_MAX];
};

typedef struct add_run {
    mp_search *search;
    const float *vectors;
    int64_t count;
    uint64_t until_ns;
    _Atomic int64_t next;    /* first vector that no thread has taken */
    _Atomic int64_t invalid; /* first vector with a component that is not finite, or INT64_MAX */
} add_run;

/* ---- creation ---------------------------------------------------------------------------------------------------- */

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

static int32_t block_of(int32_t dim) {
    const int32_t fit = BLOCK_FLOATS / dim / MP_PANEL_N * MP_PANEL_N;
    return fit > BLOCK ? BLOCK : fit > 0 ? fit : MP_PANEL_N;
}

static mp_wmat block_matrix(int32_t count, int32_t dim) {
    mp_wmat matrix;
    mp_wmat_init(&matrix, MP_W_F32, count, dim);
    return matrix;
}

/* Sets the arrays of a state that begins at `memory`. Returns the bytes of the whole. memory NULL: only returns. */
static size_t lay_out(const mp_search_plan *plan, uint8_t *memory) {
    const size_t queries = (size_t)plan->queries, kept = queries * (size_t)plan->most;
    const mp_wmat matrix = block_matrix(block_of(plan->dim), plan->dim);
    size_t at = align64(sizeof(thread_state));
    const size_t sizes[] = {kept * sizeof(float), kept * sizeof(int64_t), queries * sizeof(int64_t),
                            TILE_QUERIES * BLOCK * sizeof(float), BLOCK * sizeof(float),
                            mp_wmat_bytes(&matrix) + MP_WMAT_SLACK};
    uint8_t *starts[sizeof sizes / sizeof *sizes];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        starts[i] = memory ? memory + at : NULL;
        at += align64(sizes[i]);
    }
    if (memory)
        *(thread_state *)(void *)memory = (thread_state){.scores = (float *)(void *)starts[0],
                                                         .numbers = (int64_t *)(void *)starts[1],
                                                         .counts = (int64_t *)(void *)starts[2],
                                                         .tile = (float *)(void *)starts[3],
                                                         .inverse = (float *)(void *)starts[4],
                                                         .panels = starts[5]};
    return at;
}

typedef enum vector_kind { USUAL, EXTREME, NOT_FINITE } vector_kind;

/* Returns what a vector is. EXTREME: its scores must be computed in double. *inverse: 1 / length if it is USUAL. */
static vector_kind examine(const float *vector, int32_t dim, float *inverse) {
    const mp_kernels *k = mp_kernels_get();
    const float square = k->dot(vector, vector, dim);
    *inverse = 0.0f;
    if (!(square >= LEAST_SQUARE && square <= MOST_SQUARE))
        return k->all_finite(vector, dim) ? EXTREME : NOT_FINITE;
    *inverse = 1.0f / sqrtf(square);
    return USUAL;
}

mp_status mp_search_create(const mp_search_plan *plan, const float *queries, mp_search **out, mp_error *error) {
    const size_t count = (size_t)plan->queries, bytes = align64(count * (size_t)plan->dim * sizeof(float));
    const size_t all = align64(sizeof(mp_search)) + bytes + count * sizeof(float);
    uint8_t *memory = mp_alloc_zeroed(all, MP_TAG_SCRATCH);
    if (!memory)
        return mp_fail_memory(error, all, "the queries of a search");
    mp_search *search = (mp_search *)(void *)memory;
    search->plan = *plan;
    search->block = block_of(plan->dim);
    search->queries = (float *)(void *)(memory + align64(sizeof *search));
    search->scales = search->queries + bytes / sizeof(float);
    memcpy(search->queries, queries, count * (size_t)plan->dim * sizeof(float));
    for (int32_t q = 0; q < plan->queries; q++) {
        const float *query = search->queries + (int64_t)q * plan->dim;
        if (examine(query, plan->dim, &search->scales[q]) == NOT_FINITE) {
            mp_search_destroy(search);
            return mp_fail(error, MP_INVALID_ARGUMENT, "query %d has a component that is not finite", q);
        }
    }
    *out = search;
    return MP_OK;
}

void mp_search_destroy(mp_search *search) {
    if (!search)
        return;
    for (int i = 0; i < THREADS_MAX; i++)
        mp_free(search->threads[i]);
    mp_free(search);
}

/* ---- nearest vectors --------------------------------------------------------------------------------------------- */

/* True if the first of two candidates comes after the second in the result. */
static bool is_worse(float score, int64_t number, float other, int64_t other_number) {
    return score < other || (score == other && number > other_number);
}

/* Puts a candidate into the heap [count] in place of its first element. */
static void sift_down(float *scores, int64_t *numbers, int32_t count, float score, int64_t number) {
    int32_t at = 0;
    for (int32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && is_worse(scores[child + 1], numbers[child + 1], scores[child], numbers[child]))
            child++;
        if (!is_worse(scores[child], numbers[child], score, number))
            break;
        scores[at] = scores[child];
        numbers[at] = numbers[child];
    }
    scores[at] = score;
    numbers[at] = number;
}

/* Adds a candidate to the heap [*count, most]. */
static void offer(float *scores, int64_t *numbers, int64_t *count, int32_t most, float score, int64_t number) {
    if (*count == most) {
        if (is_worse(scores[0], numbers[0], score, number))
            sift_down(scores, numbers, most, score, number);
        return;
    }
    int64_t at = (*count)++;
    for (int64_t parent; at > 0; at = parent) {
        parent = (at - 1) / 2;
        if (!is_worse(score, number, scores[parent], numbers[parent]))
            break;
        scores[at] = scores[parent];
        numbers[at] = numbers[parent];
    }
    scores[at] = score;
    numbers[at] = number;
}

/* Merges the scores of one query with `count` vectors from `first` on. */
static void merge(const mp_search *search, thread_state *state, int32_t query, const float *scores, int32_t count,
                  int64_t first) {
    const mp_search_plan *plan = &search->plan;
    if (plan->counts) {
        int32_t reached = 0;
        for (int32_t n = 0; n < count; n++)
            reached += scores[n] >= plan->least;
        state->counts[query] += reached;
    }
    if (plan->most == 0)
        return;
    float *best = state->scores + (int64_t)query * plan->most;
    int64_t *numbers = state->numbers + (int64_t)query * plan->most;
    int64_t kept = state->seen < plan->most ? state->seen : plan->most;
    /* numbers ascend, so a score that equals the worst one is worse */
    if (kept == plan->most && !(mp_kernels_get()->max(scores, count) > best[0]))
        return;
    for (int32_t n = 0; n < count; n++)
        if (kept < plan->most || scores[n] > best[0])
            offer(best, numbers, &kept, plan->most, scores[n], first + n);
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

/* Returns x, also where denormal floats count as 0 (base/team.h). */
static double exact(float x) {
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
        const double a = exact(query[i]), b = exact(vector[i]);
        sum += a * b;
        square += b * b;
        other += a * a;
    }
    if (cosine)
        return square > 0 && other > 0 ? (float)(sum / (sqrt(square) * sqrt(other))) : 0.0f;
    return sum > FLT_MAX ? FLT_MAX : sum < -FLT_MAX ? -FLT_MAX : (float)sum;
}

/* Examines the vectors of a block: fills in their inverse lengths, and lists those whose scores must be computed in
 * double. Returns the index of the first vector that is not finite, or `count`. */
static int32_t examine_block(const mp_search *search, thread_state *state, const float *vectors, int32_t count) {
    const int32_t dim = search->plan.dim;
    state->precise_count = 0;
    for (int32_t n = 0; n < count; n++) {
        const vector_kind kind = examine(vectors + (int64_t)n * dim, dim, &state->inverse[n]);
        if (kind == NOT_FINITE)
            return n;
        if (kind == EXTREME)
            state->precise[state->precise_count++] = (uint16_t)n;
    }
    return count;
}

/* Multiplies queries [from, to) by the vectors of a block into the tile. `matrix` is NULL or the packed block. */
static void multiply(const mp_search *search, thread_state *state, const mp_acts *acts, const mp_wmat *matrix,
                     mp_stored_product *product, const float *vectors, int32_t count, int32_t from, int32_t to) {
    if (matrix) {
        mp_gemm(matrix, acts, from, to, 0, matrix->panels, NULL, state->tile - (int64_t)from * BLOCK, BLOCK);
        return;
    }
    const size_t stride = (size_t)search->plan.dim * sizeof(float);
    for (int32_t q = from; q < to; q++)
        product((const uint8_t *)vectors, stride, count, acts, q, state->tile + (int64_t)(q - from) * BLOCK);
}

/* Compares all queries with a block of vectors. Returns the index of the first one that is not finite, or `count`. */
static int32_t compare_block(const mp_search *search, thread_state *state, const float *vectors, int32_t count,
                             int64_t first) {
    const mp_search_plan *plan = &search->plan;
    const int32_t finite = examine_block(search, state, vectors, count);
    if (finite < count)
        return finite;
    mp_acts acts;
    mp_acts_init(&acts, MP_A_F32, plan->queries, plan->dim, NULL);
    mp_acts_fill(&acts, search->queries, plan->dim, 0, plan->queries);
    mp_stored_product *product = mp_stored_product_for(MP_F32, MP_A_F32, plan->queries);
    mp_wmat matrix;
    if (!product) {
        const uint64_t bytes = (uint64_t)count * (uint64_t)plan->dim * sizeof(float);
        const mp_tensor tensor = {.dtype = MP_F32, .ndim = 2, .shape = {count, plan->dim},
                                  .data = (const uint8_t *)vectors, .nbytes = bytes};
        matrix = block_matrix(count, plan->dim);
        matrix.data = state->panels;
        mp_wmat_pack(&matrix, &tensor, 0, matrix.panels);
    }
    for (int32_t from = 0, to; from < plan->queries; from = to) {
        to = plan->queries - from < TILE_QUERIES ? plan->queries : from + TILE_QUERIES;
        multiply(search, state, &acts, product ? NULL : &matrix, product, vectors, count, from, to);
        for (int32_t q = from; q < to; q++) {
            float *scores = state->tile + (int64_t)(q - from) * BLOCK;
            for (int32_t n = 0; plan->cosine && n < count; n++)
                scores[n] *= state->inverse[n] * search->scales[q]; /* the same bits if both change places */
            const bool all = search->scales[q] == 0.0f;
            for (int32_t i = 0; i < (all ? count : state->precise_count); i++) {
                const int32_t n = all ? i : state->precise[i];
                scores[n] = precise_score(search->queries + (int64_t)q * plan->dim, vectors + (int64_t)n * plan->dim,
                                          plan->dim, plan->cosine);
            }
            merge(search, state, q, scores, count, first);
        }
    }
    state->seen += count;
    return count;
}

/* ---- adding ------------------------------------------------------------------------------------------------------ */

static void add_body(const mp_team_thread *thread, void *arg) {
    add_run *run = arg;
    mp_search *search = run->search;
    thread_state *state = search->threads[thread->index];
    do {
        const int64_t first = atomic_fetch_add_explicit(&run->next, search->block, memory_order_relaxed);
        if (first >= run->count)
            return;
        const int32_t count = run->count - first < search->block ? (int32_t)(run->count - first) : search->block;
        const float *vectors = run->vectors + first * search->plan.dim;
        const int32_t finite = compare_block(search, state, vectors, count, search->added + first);
        if (finite == count)
            continue;
        int64_t least = atomic_load_explicit(&run->invalid, memory_order_relaxed);
        while (first + finite < least &&
               !atomic_compare_exchange_weak_explicit(&run->invalid, &least, first + finite, memory_order_relaxed,
                                                      memory_order_relaxed))
            continue;
        return;
    } while (mp_sys_now_ns() < run->until_ns);
}

mp_status mp_search_add(mp_search *search, mp_lease *lease, const float *vectors, int64_t count, int64_t *done,
                        uint64_t until_ns, mp_error *error) {
    const size_t bytes = lay_out(&search->plan, NULL);
    for (int i = 0; i < lease->threads; i++) {
        if (search->threads[i])
            continue;
        uint8_t *memory = mp_alloc_zeroed(bytes, MP_TAG_SCRATCH);
        if (!memory)
            return mp_fail_memory(error, bytes, "the results of a search");
        lay_out(&search->plan, memory);
        search->threads[i] = (thread_state *)(void *)memory;
    }
    add_run run = {.search = search, .vectors = vectors, .count = count, .until_ns = until_ns};
    search->added -= *done; /* the run counts from the start of this array */
    atomic_init(&run.next, *done);
    atomic_init(&run.invalid, INT64_MAX);
    mp_lease_run(lease, add_body, &run);
    const int64_t invalid = atomic_load_explicit(&run.invalid, memory_order_relaxed);
    if (invalid != INT64_MAX)
        return mp_fail(error, MP_INVALID_ARGUMENT, "vector %lld has a component that is not finite",
                       (long long)(search->added + invalid));
    const int64_t next = atomic_load_explicit(&run.next, memory_order_relaxed);
    *done = next < count ? next : count;
    search->added += *done;
    return MP_OK;
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

int32_t mp_search_found(const mp_search *search) {
    return search->added < search->plan.most ? (int32_t)search->added : search->plan.most;
}

void mp_search_nearest(mp_search *search, int64_t *numbers, float *scores) {
    const int32_t most = search->plan.most, found = mp_search_found(search);
    for (int32_t q = 0; q < search->plan.queries; q++) {
        float *best = scores + (int64_t)q * found;
        int64_t *of = numbers + (int64_t)q * found;
        int64_t kept = 0;
        for (int i = 0; i < THREADS_MAX; i++) {
            const thread_state *state = search->threads[i];
            const int64_t have = !state ? 0 : state->seen < most ? state->seen : most;
            for (int64_t j = 0; j < have; j++)
                offer(best, of, &kept, found, state->scores[(int64_t)q * most + j],
                      state->numbers[(int64_t)q * most + j]);
        }
        /* take the worst one out of the heap, again and again */
        for (int32_t left = found - 1; left > 0; left--) {
            const float score = best[left];
            const int64_t number = of[left];
            best[left] = best[0];
            of[left] = of[0];
            sift_down(best, of, left, score, number);
        }
    }
}

void mp_search_counts(const mp_search *search, int64_t *out) {
    memset(out, 0, sizeof(int64_t) * (size_t)search->plan.queries);
    for (int i = 0; i < THREADS_MAX; i++)
        for (int32_t q = 0; search->threads[i] && q < search->plan.queries; q++)
            out[q] += search->threads[i]->counts[q];
}
