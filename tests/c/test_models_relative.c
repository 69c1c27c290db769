/* Disentangled attention against its definition, for texts longer than a block of query rows, and for any range of rows
 * of a call. */
#include <math.h>
#include <stdlib.h>

#include "base/cpu.h"
#include "models/nn/attention.h"
#include "mp_test.h"

enum { ROWS = 2 * MP_RELATIVE_BLOCK + 9, HEADS = 2, DIM = 16, ROW = 3 * HEADS * DIM, SPAN = 12 };

typedef struct scene {
    float qkv[ROWS * ROW], keys[2 * SPAN * HEADS * DIM], queries[2 * SPAN * HEADS * DIM];
    mp_relative shape;
    mp_relative_layer layer;
    mp_attention attention;
} scene;

static void set_up(scene *s) {
    mp_error error;
    mp_test_random random = {41};
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int i = 0; i < ROWS * ROW; i++)
        s->qkv[i] = mp_test_random_float(&random, -1, 1);
    for (int i = 0; i < 2 * SPAN * HEADS * DIM; i++) {
        s->keys[i] = mp_test_random_float(&random, -1, 1);
        s->queries[i] = mp_test_random_float(&random, -1, 1);
    }
    MP_CHECK_OK(mp_relative_init(&s->shape, SPAN, 0, SPAN, ROWS, &error), &error);
    s->layer = (mp_relative_layer){&s->shape, s->keys, s->queries, HEADS * DIM};
    s->attention = (mp_attention){.heads = HEADS, .kv_heads = HEADS, .head_dim = DIM, .compute = MP_COMPUTE_F32,
                                  .scale = 0.2f, .relative = &s->layer};
}

static double product(const float *a, const float *b) {
    double sum = 0;
    for (int i = 0; i < DIM; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* The output of a row by definition. Distances of SPAN rows and more share the last learned row. */
static void expect(const scene *s, int head, int row, double *out) {
    const float *q = s->qkv + row * ROW + head * DIM;
    double sum = 0;
    for (int i = 0; i < DIM; i++)
        out[i] = 0;
    for (int t = 0; t < ROWS; t++) {
        const float *k = s->qkv + t * ROW + (HEADS + head) * DIM, *v = k + HEADS * DIM;
        int learned = row - t + SPAN;
        learned = learned < 0 ? 0 : learned > 2 * SPAN - 1 ? 2 * SPAN - 1 : learned;
        const int64_t at = (int64_t)learned * HEADS * DIM + head * DIM;
        const double weight = exp(0.2 * (product(q, k) + product(q, s->keys + at) + product(k, s->queries + at)));
        for (int i = 0; i < DIM; i++)
            out[i] += weight * (double)v[i];
        sum += weight;
    }
    for (int i = 0; i < DIM; i++)
        out[i] /= sum;
}

MP_TEST(models_relative_attention_matches_its_definition) {
    static const int ranges[][2] = {{0, ROWS}, {0, 1}, {5, 5 + MP_RELATIVE_BLOCK}, {MP_RELATIVE_BLOCK, ROWS},
                                    {MP_RELATIVE_BLOCK - 1, 2 * MP_RELATIVE_BLOCK + 1}, {ROWS - 1, ROWS}};
    static scene s;
    static float out[ROWS * HEADS * DIM];
    set_up(&s);
    const mp_row_span span = {.rows = ROWS};
    const mp_attention_rows rows = {.q = s.qkv, .k = s.qkv + HEADS * DIM, .v = s.qkv + 2 * HEADS * DIM, .ld = ROW,
                                    .out = out, .ld_out = HEADS * DIM};
    void *scratch = mp_alloc(mp_attention_scratch(&s.attention, ROWS), MP_TAG_SCRATCH);
    MP_CHECK(scratch);
    for (size_t r = 0; r < sizeof ranges / sizeof *ranges; r++)
        for (int head = 0; head < HEADS; head++) {
            memset(out, 0, sizeof out);
            mp_attention_head(&s.attention, &rows, &span, head, 0, ranges[r][0], ranges[r][1], scratch);
            for (int row = 0; row < ROWS; row++) {
                double expected[DIM] = {0};
                if (row >= ranges[r][0] && row < ranges[r][1])
                    expect(&s, head, row, expected);
                for (int i = 0; i < DIM; i++)
                    MP_CHECK_NEAR(out[(row * HEADS + head) * DIM + i], expected[i], 2e-5);
            }
        }
    mp_free(scratch);
    mp_relative_deinit(&s.shape);
}

/* ALiBi's slopes (Press et al., arXiv:2108.12409): a geometric series for a power of two of heads; the heads beyond it
 * have every second slope of twice as many heads. A bias is the negated product of slope and distance. */
MP_TEST(models_relative_slopes) {
    enum { HEADS = 6, LENGTH = 5 };
    static const double slopes[][HEADS] = {
        {0x1p-8}, {0x1p-4, 0x1p-8}, {0x1p-4, 0x1p-8, 0x1p-2}, {0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8},
        {0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8, 0x1p-1}, {0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8, 0x1p-1, 0x1p-3}};
    float bias[HEADS * (2 * LENGTH - 1)];
    for (int heads = 1; heads <= HEADS; heads++) {
        mp_attention_bias_slopes(heads, LENGTH, bias);
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < 2 * LENGTH - 1; i++)
                MP_CHECK_NEAR(bias[h * (2 * LENGTH - 1) + i], -slopes[heads - 1][h] * abs(i - (LENGTH - 1)), 1e-9);
    }
}
