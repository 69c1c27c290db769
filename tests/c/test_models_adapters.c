/* Low-rank adapters: a layer with several of them against a reference in doubles, and the bits of each row alone and
 * beside rows of other adapters, with any number of threads and rows. */
#include "adapter_fixture.h"
#include "base/sanitize.h"
#include "late_threads.h"
#include "models/nn/adapter.h"
#include "parts_fixture.h"

enum { ROWS = 70, ADAPTERS = 5, MAX_OUTPUTS = 200, EDGE = 3, PATTERNS = 5 };

typedef struct shape {
    mp_dtype dtype;
    int parts, N[MP_LINEAR_PARTS], K;
} shape;

static const shape shapes[] = {
    {MP_F32, 3, {33, 8, 64}, 37}, {MP_Q8_0, 2, {40, 40}, 64}, {MP_Q4_0, 1, {130}, 96}, {MP_F32, 1, {2}, 1}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Rank of each adapter at each part; 0: none. Adapter 4 updates another layer only. */
static const int ranks[ADAPTERS][MP_LINEAR_PARTS] = {{1, 31, 33}, {0, 33, 0}, {31, 0, 1}, {0, 0, 0}, {4, 4, 4}};
static const double scales[ADAPTERS] = {2, 0.5, -1, 1, 0.25};
/* Heads of part 0 of adapters 1 and 3, whose rows are in another order in the model. */
static int64_t heads_of(const shape *of, int adapter, int part) {
    if (part > 0 || of->N[0] % 10 != 0)
        return 0;
    return adapter == 0 ? 5 : adapter == 2 ? -5 : 0;
}

/* Columns of adapter 5 from 6 on: three groups of five blocks of two in A, five groups of three in the model. */
static const int64_t columns[] = {6, 1, 3, 5, 2};
static bool has_columns(const shape *of, int adapter) { return adapter == 4 && of->K >= 36; }

typedef struct scene {
    const shape *shape;
    tiny_parts parts;
    mp_adapters adapters;
    mp_linear linear;
    int N, threads;
} scene;

static void set_up(scene *s, const shape *of, int threads) {
    static const int64_t ids[ADAPTERS] = {5, 70000, 9, 1, INT32_MAX};
    mp_error error;
    char name[64];
    *s = (scene){.shape = of, .threads = threads};
    tiny_parts_begin(&s->parts, "adapters.bin", 23);
    tiny_file *file = &s->parts.file;
    tiny_ints(file->spec, "mpool.adapters", ids, ADAPTERS);
    for (int p = 0; p < of->parts; p++) {
        snprintf(name, sizeof name, "part%d.weight", p);
        tiny_tensor(file, name, of->dtype, of->N[p], of->K, 0.3f, 0);
        snprintf(name, sizeof name, "part%d", p);
        for (int a = 0; a < ADAPTERS; a++) {
            if (ranks[a][p] == 0)
                continue;
            tiny_update(file, a + 1, name, ranks[a][p], of->N[p], of->K, scales[a]);
            char key[64];
            const int64_t heads = heads_of(of, a, p), half = heads ? of->N[p] / (heads < 0 ? -heads : heads) / 2 : 0;
            const int64_t halves[] = {0, heads < 0 ? -heads : heads, heads < 0 ? half : 2, heads < 0 ? 2 : half, 1};
            snprintf(key, sizeof key, "adapter.%d.part%d.rows", a + 1, p);
            if (heads != 0)
                tiny_ints(file->spec, key, halves, 5);
            snprintf(key, sizeof key, "adapter.%d.part%d.columns", a + 1, p);
            if (has_columns(of, a))
                tiny_ints(file->spec, key, columns, 5);
        }
    }
    tiny_parts_open(&s->parts, MP_COMPUTE_AUTO, threads);
    MP_CHECK_OK(mp_adapters_open(&s->adapters, s->parts.file.spec, &error), &error);
    for (int p = 0; p < of->parts; p++) {
        snprintf(name, sizeof name, "part%d.weight", p);
        MP_CHECK_OK(mp_builder_linear(&s->parts.builder, &s->linear, name, NULL, of->N[p], of->K, &error), &error);
        MP_CHECK_OK(mp_adapters_add(&s->adapters, &s->parts.builder, &s->linear, name, &error), &error);
        s->N += of->N[p];
    }
    MP_CHECK_OK(mp_adapters_check(&s->adapters, s->parts.file.spec, &error), &error);
    MP_CHECK_INT(s->adapters.count, ADAPTERS);
    MP_CHECK(!s->linear.updates[3]);
    for (int a = 0; a < ADAPTERS; a++)
        MP_CHECK_INT(mp_adapters_find(&s->adapters, ids[a]), a + 1);
    MP_CHECK_INT(mp_adapters_find(&s->adapters, 0), 0);
    MP_CHECK_INT(mp_adapters_find(&s->adapters, 6), 0);
    tiny_parts_finish(&s->parts);
}

static void take_down(scene *s) {
    mp_adapters_deinit(&s->adapters);
    tiny_parts_close(&s->parts);
}

/* ---- passes ------------------------------------------------------------------------------------------------------ */

typedef struct pass {
    scene *s;
    const float *x;
    int M;
    const uint8_t *adapters;
    bool residual;
    void *acts, *own[4];
    float *low_rank, *y;
    int64_t ldy;
} pass;

static void body(const mp_team_thread *thread, void *arg) {
    const pass *p = arg;
    const mp_row_context context = {.thread = thread,
                                    .acts = p->acts,
                                    .own_acts = p->own[thread->index],
                                    .adapters = p->adapters,
                                    .low_rank = p->low_rank,
                                    .low_rank_width = p->s->adapters.width};
    const mp_epilogue sum = {.residual = p->y, .ld_residual = p->ldy};
    mp_row_linear(&context, &p->s->linear, p->x, p->s->shape->K, p->M, p->residual ? &sum : NULL, p->y, p->ldy);
}

/* Compute rows [first, first + M) with their adapters (NULL: none), whose outputs are stored in out, [M, MAX_OUTPUTS].
 * own: each thread prepares the activations by itself. All memory has exactly the documented size. */
static void forward(scene *s, const float *x, int first, int M, const uint8_t *adapters, bool residual, bool own,
                    float *out) {
    pass p = {.s = s, .M = M, .residual = residual, .ldy = s->N + EDGE};
    const size_t low = (size_t)M * (size_t)s->adapters.width, outputs = (size_t)M * (size_t)p.ldy;
    const int K = s->shape->K;
    uint8_t *numbers = adapters ? malloc((size_t)M) : NULL; /* exact size, for AddressSanitizer */
    float *in = malloc((size_t)M * (size_t)K * sizeof *in);
    p.low_rank = malloc(low * sizeof(float));
    p.y = malloc(outputs * sizeof(float));
    p.acts = mp_alloc(mp_linear_scratch(&s->linear, M), MP_TAG_SCRATCH);
    MP_CHECK(in && p.low_rank && p.y && p.acts);
    for (int t = 0; own && t < s->threads; t++)
        p.own[t] = mp_alloc(mp_linear_scratch(&s->linear, MP_PRIVATE_ROWS), MP_TAG_SCRATCH);
    memcpy(in, x + (size_t)first * (size_t)K, (size_t)M * (size_t)K * sizeof *in);
    if (adapters)
        memcpy(numbers, adapters + first, (size_t)M);
    memset(p.low_rank, 0xFF, low * sizeof(float)); /* NaN: a value that is read must have been written */
    for (size_t i = 0; i < outputs; i++)
        p.y[i] = 0.01f * (float)((i / (size_t)p.ldy + (size_t)first) % 7) + (float)(i % (size_t)p.ldy);
    p.x = in;
    p.adapters = numbers;
    mp_lease_run(&s->parts.lease, body, &p);
    for (int r = 0; r < M; r++) {
        for (int i = s->N; i < p.ldy; i++)
            MP_CHECK(p.y[r * p.ldy + i] == 0.01f * (float)((r + first) % 7) + (float)i);
        memcpy(out + (size_t)r * MAX_OUTPUTS, p.y + r * p.ldy, (size_t)s->N * sizeof(float));
    }
    for (int t = 0; t < s->threads; t++)
        mp_free(p.own[t]);
    mp_free(p.acts);
    free(p.low_rank);
    free(p.y);
    free(in);
    free(numbers);
}

/* The adapters of the rows, by pattern: another one in each row; runs of 9 rows; one for all rows; only the last row
 * has one; none. */
static void fill_numbers(int pattern, uint8_t *numbers) {
    for (int i = 0; i < ROWS; i++)
        numbers[i] = (uint8_t)(pattern == 0   ? i * 5 % (ADAPTERS + 1)
                               : pattern == 1 ? i / 9 % (ADAPTERS + 1)
                               : pattern == 2 ? 1
                               : pattern == 3 ? (i == ROWS - 1 ? 3 : 0)
                                              : 0);
}

static void fill_rows(const scene *s, float *x) {
    mp_test_random random = {77};
    for (int i = 0; i < ROWS * s->shape->K; i++)
        x[i] = mp_test_random_float(&random, -1, 1);
}

/* Each row has the same bits alone and in passes of any size, beside rows of other adapters, with any number of
 * threads. A row without an adapter, or with one that does not update the layer, has the bits of the layer without
 * adapters. */
MP_TEST_SECONDS(models_adapters_rows_have_the_bits_of_each_alone, 60) {
    static const int sizes[] = {2, 4, 5, 31, 33, ROWS};
    static float x[ROWS * 96], alone[PATTERNS][ROWS * MAX_OUTPUTS], plain[MAX_OUTPUTS], out[ROWS * MAX_OUTPUTS];
    uint8_t numbers[ROWS];
    uint32_t asked = 0;
    for (int k = 0; k < SHAPES; k++)
        for (int threads = 1; threads <= 3; threads++) {
            scene s;
            set_up(&s, &shapes[k], threads);
            late_thread_of(threads);
            const size_t bytes = (size_t)s.N * sizeof(float);
            fill_rows(&s, x);
            for (int pattern = 0; pattern < PATTERNS; pattern++) {
                const bool residual = pattern % 2 != 0;
                fill_numbers(pattern, numbers);
                for (int r = 0; r < ROWS && threads == 1; r++) {
                    float *to = alone[pattern] + r * MAX_OUTPUTS;
                    forward(&s, x, r, 1, numbers, residual, r % 2 != 0, to);
                    forward(&s, x, r, 1, NULL, residual, false, plain);
                    const bool updated = numbers[r] && s.linear.updates[numbers[r] - 1];
                    MP_CHECK((memcmp(to, plain, bytes) == 0) == !updated);
                }
                for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++) {
                    if (MP_SANITIZED && !mp_test_take(&asked))
                        continue;
                    for (int first = 0; first < ROWS; first += sizes[z]) {
                        const int M = first + sizes[z] < ROWS ? sizes[z] : ROWS - first;
                        forward(&s, x, first, M, numbers, residual, M <= MP_PRIVATE_ROWS && first % 3 == 0, out);
                        for (int r = 0; r < M; r++)
                            if (memcmp(out + r * MAX_OUTPUTS, alone[pattern] + (first + r) * MAX_OUTPUTS, bytes) != 0)
                                MP_FAIL("shape %d, %d threads, pattern %d: row %d of %d from row %d differs", k,
                                        threads, pattern, r, M, first);
                    }
                }
            }
            late_thread(-1);
            take_down(&s);
        }
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

static const float *matrix_of(const scene *s, int adapter, int part, char side) {
    char name[64];
    snprintf(name, sizeof name, "adapter.%d.part%d.lora_%c", adapter + 1, part, side);
    const mp_tensor_entry *entry = mp_spec_find_tensor(s->parts.file.spec, name);
    MP_CHECK(entry);
    return (const float *)(const void *)(s->parts.file.bytes + entry->offset);
}

/* Row of B that belongs to output n. Each head has `size` rows. heads > 0: B has first those of the even outputs of a
 * head, then those of the odd ones. heads < 0: the opposite. */
static int row_of(int n, int N, int64_t heads) {
    const int size = heads == 0 ? N : N / (int)(heads < 0 ? -heads : heads);
    const int head = n / size * size, at = n % size;
    if (heads == 0)
        return n;
    if (heads > 0)
        return head + (at % 2 == 0 ? at / 2 : size / 2 + at / 2);
    return head + (at < size / 2 ? 2 * at : 2 * (at - size / 2) + 1);
}

/* Column of A that belongs to input j. */
static int column_of(const shape *of, int adapter, int j) {
    static const int block_of[] = {0, 5, 10, 1, 6, 11, 2, 7, 12, 3, 8, 13, 4, 9, 14};
    return has_columns(of, adapter) && j >= 6 && j < 36 ? 6 + 2 * block_of[(j - 6) / 2] + j % 2 : j;
}

/* The update of a row is scale * B (A x), as a reference in doubles computes it. */
MP_TEST(models_adapters_add_the_product_of_two_matrices) {
    static float x[ROWS * 96], plain[ROWS * MAX_OUTPUTS], out[ROWS * MAX_OUTPUTS];
    int compared = 0, moved = 0;
    for (int k = 0; k < SHAPES; k++) {
        scene s;
        uint8_t numbers[ROWS];
        set_up(&s, &shapes[k], 2);
        fill_rows(&s, x);
        fill_numbers(0, numbers);
        forward(&s, x, 0, ROWS, NULL, false, false, plain);
        forward(&s, x, 0, ROWS, numbers, false, false, out);
        for (int r = 0; r < ROWS; r++) {
            int column = 0;
            for (int p = 0; p < s.shape->parts; column += s.shape->N[p++]) {
                const int a = numbers[r] - 1, rank = a < 0 ? 0 : ranks[a][p], K = s.shape->K, N = s.shape->N[p];
                double inner[64] = {0};
                for (int i = 0; i < rank; i++)
                    for (int j = 0; j < K; j++)
                        inner[i] += (double)matrix_of(&s, a, p, 'a')[i * K + column_of(s.shape, a, j)] *
                                    (double)x[r * K + j];
                for (int n = 0; n < N; n++) {
                    const int row = rank ? row_of(n, N, heads_of(s.shape, a, p)) : n;
                    double sum = 0;
                    for (int i = 0; i < rank; i++)
                        sum += scales[a] * (double)matrix_of(&s, a, p, 'b')[row * rank + i] * inner[i];
                    const int at = r * MAX_OUTPUTS + column + n;
                    MP_CHECK_NEAR(out[at], (double)plain[at] + sum, 1e-5 * (1 + fabs((double)plain[at])));
                    compared += rank > 0;
                    moved += row != n;
                }
            }
        }
        take_down(&s);
    }
    MP_CHECK(compared > 1000 && moved > 500);
}
