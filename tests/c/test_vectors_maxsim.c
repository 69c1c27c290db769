/* test_vectors_maxsim.c: vectors/maxsim.h. Components are small integers, so every product is exact in fp32, many
 * scores are equal, and the expected result is known to the bit. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "kernels/kernels.h"
#include "mp_test.h"
#include "vectors/maxsim.h"
#include "vectors_fixture.h"

typedef struct scene {
    int queries, count, dim, most;
    bool int8;
    int64_t *query_offsets, *offsets;
    float *tokens, *values, *scales;
    int8_t *small;
} scene;

static uint32_t next(uint32_t *seed) { return (*seed = *seed * 1664525u + 1013904223u) >> 24; }

/* Lengths from 0 (documents) or 1 (queries) on; now and then one that spans several groups of rows. */
static int64_t *make_offsets(int count, int least, uint32_t *seed) {
    int64_t *offsets = calloc((size_t)count + 1, sizeof *offsets);
    for (int i = 0; i < count; i++)
        offsets[i + 1] = offsets[i] + (i % 23 == 7 && !least ? 150 : least + (int)(next(seed) % 40));
    return offsets;
}

static scene make_scene(int queries, int count, int dim, int most, bool int8) {
    uint32_t seed = (uint32_t)(queries + 31 * count + 1009 * dim);
    scene s = {.queries = queries, .count = count, .dim = dim, .most = most, .int8 = int8};
    s.query_offsets = make_offsets(queries, 1, &seed);
    s.offsets = make_offsets(count, 0, &seed);
    const int64_t tokens = s.query_offsets[queries] * dim, rows = s.offsets[count], values = rows * dim;
    s.tokens = calloc((size_t)tokens, sizeof(float));
    s.values = calloc((size_t)values + 1, sizeof(float));
    s.scales = calloc((size_t)rows + 1, sizeof(float));
    s.small = calloc((size_t)values + 1, 1);
    for (int64_t i = 0; i < tokens; i++)
        s.tokens[i] = (float)((int)(next(&seed) % 5) - 2);
    for (int64_t i = 0; i < values; i++)
        s.values[i] = s.small[i] = (int8_t)((int)(next(&seed) % 5) - 2);
    for (int64_t i = 0; i < rows; i++)
        s.scales[i] = int8 ? 0.25f * (float)(1 + next(&seed) % 8) : 1.0f;
    return s;
}

static void free_scene(scene *s) {
    free(s->query_offsets);
    free(s->offsets);
    free(s->tokens);
    free(s->values);
    free(s->scales);
    free(s->small);
}

static mp_maxsim_documents documents_of(const scene *s, float *scores) {
    return (mp_maxsim_documents){.dtype = s->int8 ? MP_I8 : MP_F32,
                                 .values = s->int8 ? (const void *)s->small : s->values,
                                 .scales = s->int8 ? s->scales : NULL,
                                 .offsets = s->offsets,
                                 .scores = scores,
                                 .ld = s->count};
}

static mp_status create(const scene *s, mp_scan **scan, mp_error *error) {
    const mp_maxsim_plan plan = {.scan = {.queries = s->queries, .most = s->most}, .dim = s->dim};
    return mp_maxsim_create(&plan, s->tokens, s->query_offsets, scan, error);
}

static mp_status add(mp_scan *scan, mp_lease *lease, const mp_maxsim_documents *documents, int count, uint64_t until,
                     mp_error *error) {
    int64_t done = 0;
    mp_status status = MP_OK;
    mp_maxsim_begin(scan, documents, count);
    while (status == MP_OK && done < count)
        status = mp_scan_add(scan, lease, documents, count, &done, until, error);
    return status;
}

static float score_of(const scene *s, int query, int document) {
    double sum = 0;
    for (int64_t t = s->query_offsets[query]; t < s->query_offsets[query + 1]; t++) {
        float most = -INFINITY;
        for (int64_t r = s->offsets[document]; r < s->offsets[document + 1]; r++) {
            float dot = 0;
            for (int i = 0; i < s->dim; i++)
                dot += s->tokens[t * s->dim + i] * s->values[r * s->dim + i];
            most = fmaxf(most, dot * s->scales[r]);
        }
        sum += (double)most;
    }
    return (float)sum;
}

/* Compares scores and nearest documents with plain loops. */
static void check_scene(int queries, int count, int dim, int most, bool int8, mp_lease *lease) {
    scene s = make_scene(queries, count, dim, most, int8);
    float *scores = calloc((size_t)(queries * count) + 1, sizeof(float));
    float *best = calloc((size_t)(queries * most) + 1, sizeof(float));
    int64_t *numbers = calloc((size_t)(queries * most) + 1, sizeof *numbers);
    bool *taken = calloc((size_t)count + 1, 1);
    for (int parts = 0; parts < 2; parts++) {
        mp_error error;
        mp_scan *scan = NULL;
        MP_CHECK_OK(create(&s, &scan, &error), &error);
        const mp_maxsim_documents documents = documents_of(&s, scores);
        MP_CHECK_OK(add(scan, lease, &documents, count, parts ? 0 : UINT64_MAX, &error), &error);
        const int found = mp_scan_found(scan);
        MP_CHECK_INT(found, count < most ? count : most);
        mp_scan_nearest(scan, numbers, best);
        for (int q = 0; q < queries; q++) {
            for (int d = 0; d < count; d++) {
                MP_CHECK(scores[q * count + d] == score_of(&s, q, d));
                taken[d] = false;
            }
            for (int i = 0; i < found; i++) {
                int top = -1;
                for (int d = 0; d < count; d++)
                    if (!taken[d] && (top < 0 || scores[q * count + d] > scores[q * count + top]))
                        top = d;
                taken[top] = true;
                MP_CHECK_INT(numbers[q * found + i], top);
                MP_CHECK(best[q * found + i] == scores[q * count + top]);
            }
        }
        mp_scan_destroy(scan);
    }
    free(scores);
    free(best);
    free(numbers);
    free(taken);
    free_scene(&s);
}

MP_TEST_SECONDS(vectors_maxsim_has_the_scores_of_plain_loops, 60) {
    static const int queries[] = {1, 3, 9}, counts[] = {0, 1, 70, 200}, dims[] = {1, 48, 400};
    for (int threads = 1; threads <= 3; threads += 2) {
        mp_lease lease;
        mp_team *team = lease_threads(threads, &lease);
        for (int q = 0; q < 3; q++)
            for (int n = 0; n < 4; n++)
                for (int d = 0; d < (n == 3 && q == 2 ? 2 : 3); d++)
                    check_scene(queries[q], counts[n], dims[d], n % 2 ? 5 : 300, (q + n + d) % 2, &lease);
        return_threads(team, &lease);
    }
}

MP_TEST(vectors_maxsim_names_the_first_document_that_is_invalid) {
    enum { COUNT = 700, DIM = 16 };
    mp_lease lease;
    mp_team *team = lease_threads(3, &lease);
    mp_error error;
    mp_scan *scan;
    for (int which = 0; which < 4; which++) {
        scene s = make_scene(2, COUNT, DIM, 4, which == 2);
        static const int invalid[] = {640, 600, 599}; /* in two blocks: some thread finds the later ones, too */
        for (int i = 0; i < 3; i++) {
            const int d = invalid[i];
            const int64_t row = s.offsets[d + 1] - 1; /* the last row of a document that has one */
            MP_CHECK(row >= s.offsets[d]);
            if (which == 2)
                s.scales[row] = INFINITY;
            else
                s.values[row * DIM + d % DIM] = which == 0 ? NAN : which == 1 ? -INFINITY : FLT_MAX;
        }
        for (int64_t i = 0; i < s.query_offsets[2] * DIM; i++)
            s.tokens[i] = 2.0f;
        MP_CHECK_OK(create(&s, &scan, &error), &error);
        const mp_maxsim_documents documents = documents_of(&s, NULL);
        MP_CHECK_STATUS(add(scan, &lease, &documents, COUNT, UINT64_MAX, &error), MP_INVALID_ARGUMENT, &error);
        static const char *messages[] = {
            "`documents` must have finite components, got NaN in document 599 (token ",
            "`documents` must have finite components, got -infinity in document 599 (token ",
            "`documents` must have finite scales, got infinity in document 599 (token ",
            "`documents` must have finite products with the queries, got one that exceeds float32 in document 599"};
        MP_CHECK_HAS(error.message, messages[which]);
        if (which < 3) {
            char token[32];
            snprintf(token, sizeof token, "(token %lld)", (long long)(s.offsets[600] - 1 - s.offsets[599]));
            MP_CHECK_HAS(error.message, token);
        }
        mp_scan_destroy(scan);
        free_scene(&s);
    }
    return_threads(team, &lease);
}

MP_TEST(vectors_maxsim_saturates_sums) {
    mp_lease lease;
    mp_team *team = lease_threads(1, &lease);
    float tokens[] = {3e38f, 3e38f}, values[] = {1.0f, -1.0f}, scores[2];
    int64_t ends[] = {0, 2}, offsets[] = {0, 1, 2};
    scene s = {.queries = 1, .count = 2, .dim = 1, .query_offsets = ends, .offsets = offsets, .tokens = tokens,
               .values = values};
    mp_error error;
    mp_scan *scan;
    MP_CHECK_OK(create(&s, &scan, &error), &error);
    const mp_maxsim_documents documents = documents_of(&s, scores);
    MP_CHECK_OK(add(scan, &lease, &documents, 2, UINT64_MAX, &error), &error);
    MP_CHECK(scores[0] == FLT_MAX && scores[1] == -FLT_MAX);
    mp_scan_destroy(scan);
    return_threads(team, &lease);
}

MP_TEST(vectors_maxsim_refuses_work_without_a_bound) {
    enum { DIM = 1 << 14, TOKENS = 1 << 9 };
    mp_lease lease;
    mp_team *team = lease_threads(1, &lease);
    const int64_t rows = MP_MAXSIM_WORK / DIM / TOKENS;
    int64_t ends[] = {0, TOKENS}, offsets[] = {0, 0, rows + 1};
    scene s = {.queries = 1, .count = 2, .dim = DIM, .int8 = true, .query_offsets = ends, .offsets = offsets,
               .tokens = calloc(TOKENS * DIM, sizeof(float)), .small = calloc((size_t)(rows + 1), DIM)};
    mp_error error;
    mp_scan *scan;
    MP_CHECK_OK(create(&s, &scan, &error), &error);
    const mp_maxsim_documents documents = documents_of(&s, NULL);
    MP_CHECK_STATUS(add(scan, &lease, &documents, 2, UINT64_MAX, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "`documents` must have at most 4096 tokens in a document for queries of 512 tokens and "
                                "16384 components, got 4097 in document 1");
    mp_scan_destroy(scan);
    free(s.tokens);
    free(s.small);
    return_threads(team, &lease);
}

/* A block has at most 4,096 tokens and at most 64 documents, but at least one, so that a scan stops soon after its time
 * is up. The longest document of the array counts, wherever it stands. */
MP_TEST(vectors_maxsim_bounds_the_tokens_of_a_block) {
    enum { COUNT = 200 };
    static const struct {
        int usual, longest, block;
    } rows[] = {{0, 0, 64}, {1, 1, 64}, {1, 64, 64}, {1, 65, 63}, {1, 241, 16},
                {100, 1000, 4}, {1, 2048, 2}, {0, 4096, 1}, {1, 4097, 1}};
    mp_lease lease;
    mp_team *team = lease_threads(1, &lease);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int at = 0; at < COUNT; at += COUNT - 1) {
            static float values[COUNT * 100 + 4097];
            int64_t ends[] = {0, 1}, offsets[COUNT + 1] = {0}, done = 0;
            float token = 1.0f;
            for (int d = 0; d < COUNT; d++)
                offsets[d + 1] = offsets[d] + (d == at ? rows[i].longest : rows[i].usual);
            scene s = {.queries = 1, .count = COUNT, .dim = 1, .query_offsets = ends, .offsets = offsets,
                       .tokens = &token, .values = values};
            mp_error error;
            mp_scan *scan;
            MP_CHECK_OK(create(&s, &scan, &error), &error);
            const mp_maxsim_documents documents = documents_of(&s, NULL);
            mp_maxsim_begin(scan, &documents, COUNT);
            MP_CHECK_OK(mp_scan_add(scan, &lease, &documents, COUNT, &done, 0, &error), &error);
            MP_CHECK_INT(done, rows[i].block);
            mp_scan_destroy(scan);
        }
    return_threads(team, &lease);
}

MP_TEST(vectors_maxsim_refuses_queries) {
    mp_kernels_init();
    mp_error error;
    mp_scan *scan;
    scene s = make_scene(3, 1, 4, 1, false);
    const int64_t end = s.query_offsets[2];
    s.query_offsets[2] = s.query_offsets[1];
    MP_CHECK_STATUS(create(&s, &scan, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "query 1 must have at least one token");
    s.query_offsets[2] = end;
    s.query_offsets[0] = 1;
    MP_CHECK_STATUS(create(&s, &scan, &error), MP_INVALID_ARGUMENT, &error);
    s.query_offsets[0] = 0;
    s.tokens[end * 4] = NAN;
    MP_CHECK_STATUS(create(&s, &scan, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "`queries` must have finite components, got NaN or infinity in query 2");
    s.query_offsets[3] = (1 << 20) + 1;
    s.tokens[end * 4] = 0;
    MP_CHECK_STATUS(create(&s, &scan, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, "at most 1048576");
    free_scene(&s);
}

static mp_status score_once(void *arg, mp_error *error) {
    scene s = make_scene(3, 20, 8, 4, true);
    mp_scan *scan;
    mp_status status = create(&s, &scan, error);
    if (status == MP_OK) {
        const mp_maxsim_documents documents = documents_of(&s, NULL);
        status = add(scan, arg, &documents, s.count, UINT64_MAX, error);
        mp_scan_destroy(scan);
    }
    free_scene(&s);
    return status;
}

MP_TEST(vectors_maxsim_survives_every_failed_allocation) {
    mp_lease lease;
    mp_team *team = lease_threads(2, &lease);
    mp_test_alloc_sweep(score_once, &lease);
    return_threads(team, &lease);
}
