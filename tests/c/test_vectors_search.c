/* test_vectors_search.c: vectors/search.h. Components are small integers, so every product is exact in fp32, many
 * scores are equal, and the expected result is known to the bit. */
#include <math.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "kernels/kernels.h"
#include "mp_test.h"
#include "vectors/search.h"
#include "vectors_fixture.h"

typedef struct scene {
    mp_search_plan plan;
    int count;
    float *queries, *vectors;
} scene;

static float integer(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return (float)((int)(*seed >> 24) % 5 - 2);
}

static scene make_scene(int queries, int count, int dim, int most, bool cosine) {
    const mp_scan_plan scan = {.queries = queries, .most = most, .counts = true, .least = 0.25f};
    scene s = {{.scan = scan, .dim = dim, .cosine = cosine},
               count,
               calloc((size_t)queries * (size_t)dim, sizeof(float)),
               calloc((size_t)count * (size_t)dim + 1, sizeof(float))};
    uint32_t seed = (uint32_t)(queries + 31 * count + 1009 * dim);
    for (int i = 0; i < queries * dim; i++)
        s.queries[i] = integer(&seed);
    for (int i = 0; i < count * dim; i++)
        s.vectors[i] = integer(&seed);
    return s;
}

static void free_scene(scene *s) {
    free(s->queries);
    free(s->vectors);
}

static mp_scan *create(const scene *s) {
    mp_error error;
    mp_scan *search = NULL;
    MP_CHECK_OK(mp_search_create(&s->plan, s->queries, &search, &error), &error);
    return search;
}

static float inverse_of(const float *x, int dim) {
    float square = 0;
    for (int i = 0; i < dim; i++)
        square += x[i] * x[i];
    return square > 0 ? 1.0f / sqrtf(square) : 0.0f;
}

static float score_of(const scene *s, int query, int vector) {
    const float *a = s->queries + (size_t)query * (size_t)s->plan.dim;
    const float *b = s->vectors + (size_t)vector * (size_t)s->plan.dim;
    float sum = 0;
    for (int i = 0; i < s->plan.dim; i++)
        sum += a[i] * b[i];
    return s->plan.cosine ? sum * (inverse_of(b, s->plan.dim) * inverse_of(a, s->plan.dim)) : sum;
}

/* Compares a result with a selection that tries all vectors for each place. */
static void check_result(const scene *s, mp_scan *search) {
    int64_t *counts = calloc((size_t)s->plan.scan.queries, sizeof *counts);
    for (int32_t q = 0; q < s->plan.scan.queries; q++)
        counts[q] = 77; /* the result does not depend on the array's content */
    mp_scan_counts(search, counts);
    const int found = mp_scan_found(search);
    MP_CHECK_INT(found, s->count < s->plan.scan.most ? s->count : s->plan.scan.most);
    const size_t cells = (size_t)s->plan.scan.queries * (size_t)found + 1;
    int64_t *numbers = calloc(cells, sizeof *numbers);
    float *scores = calloc(cells, sizeof *scores), *all = calloc((size_t)s->count + 1, sizeof *all);
    bool *taken = calloc((size_t)s->count + 1, sizeof *taken);
    mp_scan_nearest(search, numbers, scores);
    for (int q = 0; q < s->plan.scan.queries; q++) {
        int64_t reached = 0;
        for (int n = 0; n < s->count; n++) {
            all[n] = score_of(s, q, n);
            taken[n] = false;
            reached += all[n] >= s->plan.scan.least;
        }
        MP_CHECK_INT(counts[q], reached);
        for (int i = 0; i < found; i++) {
            int best = -1;
            for (int n = 0; n < s->count; n++)
                if (!taken[n] && (best < 0 || all[n] > all[best]))
                    best = n;
            taken[best] = true;
            MP_CHECK_INT(numbers[q * found + i], best);
            MP_CHECK(memcmp(&scores[q * found + i], &all[best], sizeof(float)) == 0 || all[best] == 0.0f);
        }
    }
    free(counts);
    free(numbers);
    free(scores);
    free(all);
    free(taken);
}

static void add_all(mp_scan *search, mp_lease *lease, const scene *s, int from, int to, uint64_t until_ns) {
    mp_error error;
    const float *vectors = s->vectors + (size_t)from * (size_t)s->plan.dim;
    int64_t done = 0;
    while (done < to - from) {
        const int64_t before = done;
        MP_CHECK_OK(mp_scan_add(search, lease, vectors, to - from, &done, until_ns, &error), &error);
        MP_CHECK(done > before);
    }
}

static void check_scene(int queries, int count, int dim, int most, bool cosine, mp_lease *lease) {
    scene s = make_scene(queries, count, dim, most, cosine);
    mp_scan *whole = create(&s), *parts = create(&s);
    add_all(whole, lease, &s, 0, count, UINT64_MAX);
    check_result(&s, whole);
    add_all(parts, lease, &s, 0, count / 3, 0); /* time is always up: a block for each thread and call */
    add_all(parts, lease, &s, count / 3, count, 0);
    check_result(&s, parts);
    mp_scan_destroy(whole);
    mp_scan_destroy(parts);
    free_scene(&s);
}

MP_TEST(vectors_search_finds_what_a_plain_selection_finds) {
    static const int queries[] = {1, 2, 3, 65}, counts[] = {0, 1, 33, 256, 700}, dims[] = {1, 37, 400};
    for (int threads = 1; threads <= 3; threads += 2) {
        mp_lease lease;
        mp_team *team = lease_threads(threads, &lease);
        for (int q = 0; q < 4; q++)
            for (int n = 0; n < 5; n++)
                for (int d = 0; d < 3; d++)
                    check_scene(queries[q], counts[n], dims[d], (n + d) % 3 == 0 ? 0 : n % 2 ? 5 : 300, d % 2, &lease);
        check_scene(4, 100, 5000, 7, true, &lease); /* blocks of one panel */
        return_threads(team, &lease);
    }
}

MP_TEST(vectors_search_computes_extreme_lengths_in_double) {
    enum { DIM = 24, COUNT = 300, MANY = 5 };
    mp_lease lease;
    mp_team *team = lease_threads(1, &lease);
    static const float factors[] = {1e18f, 1e25f, 1e-15f, 1e-18f, 1e-40f, 0.0f};
    for (int queries = 1; queries <= MANY; queries += MANY - 1)
        for (int which = 0; which < 6; which++) {
            scene s = make_scene(queries, COUNT, DIM, COUNT, true);
            scene usual = make_scene(queries, COUNT, DIM, COUNT, true);
            const int extreme = 17;
            for (int i = 0; i < DIM; i++) {
                s.vectors[extreme * DIM + i] *= factors[which];
                s.queries[i] *= factors[which];
            }
            mp_scan *search = create(&s);
            add_all(search, &lease, &s, 0, COUNT, UINT64_MAX);
            int64_t numbers[MANY * COUNT];
            float scores[MANY * COUNT];
            mp_scan_nearest(search, numbers, scores);
            for (int at = 0; at < queries * COUNT; at++) {
                const bool zero = factors[which] == 0.0f && (at < COUNT || numbers[at] == extreme);
                MP_CHECK_NEAR(scores[at], zero ? 0.0f : score_of(&usual, at / COUNT, (int)numbers[at]),
                             factors[which] == 1e-40f ? 1e-4 : 1e-6);
            }
            mp_scan_destroy(search);
            free_scene(&s);
            free_scene(&usual);
        }
    return_threads(team, &lease);
}

/* Scores of other vectors keep their bits, also in later blocks, and also if every vector before them is extreme. */
MP_TEST(vectors_search_extreme_vectors_change_no_other_score) {
    enum { DIM = 24, COUNT = 700, CHANGED = 300 };
    mp_lease lease;
    mp_team *team = lease_threads(1, &lease);
    scene s = make_scene(1, COUNT, DIM, COUNT, true);
    static float scores[2][COUNT], by_number[2][COUNT];
    static int64_t numbers[COUNT];
    for (int i = 0; i < COUNT * DIM; i++)
        s.vectors[i] += 0.1f * (float)(i % 7); /* sums that are rounded: float32 and double differ */
    for (int changed = 0; changed < 2; changed++) {
        for (int i = 0; changed && i < CHANGED * DIM; i++)
            s.vectors[i] *= 1e-18f;
        mp_scan *search = create(&s);
        add_all(search, &lease, &s, 0, COUNT, UINT64_MAX);
        mp_scan_nearest(search, numbers, scores[changed]);
        for (int at = 0; at < COUNT; at++)
            by_number[changed][numbers[at]] = scores[changed][at];
        mp_scan_destroy(search);
    }
    MP_CHECK(memcmp(by_number[0] + CHANGED, by_number[1] + CHANGED, (COUNT - CHANGED) * sizeof(float)) == 0);
    MP_CHECK(memcmp(by_number[0], by_number[1], CHANGED * sizeof(float)) != 0); /* else the test compares nothing */
    free_scene(&s);
    return_threads(team, &lease);
}

/* A query alone is multiplied in the pass that measures the vectors, two queries as the vectors are stored, and three
 * by packed vectors: the scores of a query have the same bits. */
MP_TEST(vectors_search_scores_do_not_depend_on_other_queries) {
    enum { COUNT = 300, DIM = 421, QUERIES = 3 };
    mp_lease lease;
    mp_team *team = lease_threads(1, &lease);
    scene s = make_scene(QUERIES, COUNT, DIM, COUNT, true);
    static float scores[QUERIES][QUERIES * COUNT];
    static int64_t numbers[QUERIES][QUERIES * COUNT];
    for (int i = 0; i < COUNT * DIM; i++)
        s.vectors[i] += 0.1f * (float)(i % 7); /* sums that are rounded */
    for (int cosine = 0; cosine < 2; cosine++) {
        for (int queries = 1; queries <= QUERIES; queries++) {
            s.plan.cosine = cosine;
            s.plan.scan.queries = queries;
            mp_scan *search = create(&s);
            add_all(search, &lease, &s, 0, COUNT, UINT64_MAX);
            mp_scan_nearest(search, numbers[queries - 1], scores[queries - 1]);
            mp_scan_destroy(search);
            MP_CHECK(memcmp(scores[queries - 1], scores[0], COUNT * sizeof(float)) == 0);
            MP_CHECK(memcmp(numbers[queries - 1], numbers[0], COUNT * sizeof(int64_t)) == 0);
        }
    }
    free_scene(&s);
    return_threads(team, &lease);
}

/* A block has whole panels, at most 256 vectors, and 512 KiB if that is more than one panel: a search stops soon after
 * its time is up. */
MP_TEST(vectors_search_bounds_the_vectors_of_a_block) {
    static const int rows[][2] = {{1, 256}, {512, 256}, {513, 224}, {2048, 64}, {2049, 32}, {4096, 32}, {5000, 32}};
    mp_lease lease;
    mp_team *team = lease_threads(1, &lease);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        scene s = make_scene(1, 300, rows[i][0], 1, false);
        mp_scan *search = create(&s);
        mp_error error;
        int64_t done = 0;
        MP_CHECK_OK(mp_scan_add(search, &lease, s.vectors, s.count, &done, 0, &error), &error);
        MP_CHECK_INT(done, rows[i][1]);
        mp_scan_destroy(search);
        free_scene(&s);
    }
    return_threads(team, &lease);
}

MP_TEST(vectors_search_does_not_overflow) {
    mp_lease lease;
    mp_team *team = lease_threads(1, &lease);
    float queries[] = {3e38f, 3e38f}, vectors[] = {3e38f, 3e38f, -3e38f, -3e38f, 1.0f, -1.0f};
    scene s = {{.scan = {.queries = 1, .most = 3}, .dim = 2}, 3, queries, vectors};
    mp_scan *search = create(&s);
    add_all(search, &lease, &s, 0, 3, UINT64_MAX);
    int64_t numbers[3];
    float scores[3];
    mp_scan_nearest(search, numbers, scores);
    MP_CHECK(numbers[0] == 0 && numbers[1] == 2 && numbers[2] == 1);
    MP_CHECK(isfinite(scores[0]) && scores[0] > 3e38f && scores[1] == 0.0f);
    MP_CHECK(isfinite(scores[2]) && scores[2] < -3e38f);
    mp_scan_destroy(search);
    return_threads(team, &lease);
}

MP_TEST(vectors_search_names_the_first_vector_that_is_not_finite) {
    enum { COUNT = 2000, DIM = 16 };
    mp_lease lease;
    mp_team *team = lease_threads(3, &lease);
    scene s = make_scene(3, COUNT, DIM, 4, true);
    s.vectors[1500 * DIM] = NAN;
    s.vectors[1499 * DIM + DIM - 1] = -INFINITY;
    mp_scan *search = create(&s);
    mp_error error;
    int64_t done = 0;
    MP_CHECK_OK(mp_scan_add(search, &lease, s.vectors, 1000, &done, UINT64_MAX, &error), &error);
    done = 0;
    MP_CHECK_STATUS(mp_scan_add(search, &lease, s.vectors + 1000 * DIM, 1000, &done, UINT64_MAX, &error),
                    MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "in vector 1499");
    mp_scan_destroy(search);
    s.queries[2 * DIM + 3] = INFINITY;
    MP_CHECK_STATUS(mp_search_create(&s.plan, s.queries, &search, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "in query 2");
    free_scene(&s);
    return_threads(team, &lease);
}

static mp_status search_once(void *arg, mp_error *error) {
    mp_lease *lease = arg;
    scene s = make_scene(3, 70, 8, 4, true);
    mp_scan *search;
    int64_t done = 0;
    mp_status status = mp_search_create(&s.plan, s.queries, &search, error);
    if (status == MP_OK) {
        status = mp_scan_add(search, lease, s.vectors, s.count, &done, UINT64_MAX, error);
        mp_scan_destroy(search);
    }
    free_scene(&s);
    return status;
}

MP_TEST(vectors_search_survives_every_failed_allocation) {
    mp_lease lease;
    mp_team *team = lease_threads(2, &lease);
    mp_test_alloc_sweep(search_once, &lease);
    return_threads(team, &lease);
}
