/* test_models_balance.c: the factors that bring the components of a key to one scale (decoder/balance.c), of layers
 * whose biases, rows and norms the tests choose. */
#include <float.h>

#include "model_fixture.h"
#include "models/decoder/load.h"

enum { DIM = 16, HIDDEN = 24, MAX_HEADS = 6, LIMIT = 1024 };

/* A decoder whose layers share weights: `queries` query heads for each of `kv` KV heads. */
typedef struct balanced {
    mp_decoder model;
    mp_decoder_layer layers[3];
    mp_mixer mixers[3]; /* one of each layer */
    mp_attention_shape shape;
    int group;
    float q_rows[MAX_HEADS * DIM][HIDDEN], k_rows[MAX_HEADS * DIM][HIDDEN]; /* the projections */
    float bias[3 * MAX_HEADS * DIM], norm[HIDDEN], q_norm[DIM], k_norm[DIM];
} balanced;

/* Makes a model without biases and norms; its projections are zeros. */
static void make(balanced *b, int kv, int queries) {
    memset(b, 0, sizeof *b);
    MP_CHECK(kv * queries <= MAX_HEADS);
    b->group = queries;
    b->shape = (mp_attention_shape){.heads = kv * queries, .kv_heads = kv, .groups = kv, .head_dim = DIM,
                                    .query_step = DIM, .value_dim = DIM};
    b->model = (mp_decoder){.hidden = HIDDEN, .layer_count = 1, .layers = b->layers, .rope = {{.dim = DIM}}};
    for (int i = 0; i < 3; i++) {
        b->mixers[i].ops = &mp_mixer_attention;
        b->mixers[i].attention.shape = &b->shape;
        b->mixers[i].attention.store = i;
        b->layers[i].count = b->layers[i].sublayer[0].mixers = 1;
        b->layers[i].sublayer[0].mixer[0] = &b->mixers[i];
    }
    b->mixers[0].attention.rope = -1;
}

static void set_biases(balanced *b) { b->mixers[0].attention.qkv.bias = b->bias; }
static float *q_bias(balanced *b, int head) { return b->bias + head * DIM; }
static float *k_bias(balanced *b, int head) { return b->bias + (b->shape.heads + head) * DIM; }

static void set_norms(balanced *b) {
    b->mixers[0].attention.q_norm = (mp_norm){.weight = b->q_norm, .n = DIM, .root = true};
    b->mixers[0].attention.k_norm = (mp_norm){.weight = b->k_norm, .n = DIM, .root = true};
}

static void pack(mp_wmat *w, float (*rows)[HIDDEN], int count) {
    const mp_tensor tensor = {.dtype = MP_F32, .ndim = 2, .shape = {count, HIDDEN}, .data = (const uint8_t *)rows,
                              .nbytes = (uint64_t)count * sizeof *rows};
    mp_wmat_init(w, MP_W_F32, count, HIDDEN);
    w->data = mp_alloc_zeroed(mp_wmat_bytes(w) + MP_WMAT_SLACK, MP_TAG_WEIGHTS);
    MP_CHECK(w->data);
    mp_wmat_pack(w, &tensor, 0, w->panels);
}

/* Computes the factors of the first layer and copies them to `factors` [kv heads, DIM]. All are finite and within the
 * limits, and the components of a rotary pair share one bit for bit, or `pairs` is NULL. pairs: [DIM] the partner of
 * each component. */
static void compute(balanced *b, const int *pairs, float (*factors)[DIM]) {
    mp_error error;
    mp_linear *qkv = &b->mixers[0].attention.qkv;
    qkv->parts = 2;
    pack(&qkv->w[0], b->q_rows, b->shape.heads * DIM);
    pack(&qkv->w[1], b->k_rows, b->shape.kv_heads * DIM);
    MP_CHECK_OK(mp_decoder_balance(&b->model, &error), &error);
    MP_CHECK(b->mixers[0].attention.balance);
    memcpy(factors, b->mixers[0].attention.balance, (size_t)b->shape.kv_heads * sizeof *factors);
    for (int h = 0; h < b->shape.kv_heads; h++)
        for (int i = 0; i < DIM; i++) {
            MP_CHECK(factors[h][i] >= 1.0f / LIMIT && factors[h][i] <= LIMIT); /* NaN fails */
            MP_CHECK(!pairs || memcmp(&factors[h][i], &factors[h][pairs[i]], sizeof(float)) == 0);
        }
    mp_free(qkv->w[0].data);
    mp_free(qkv->w[1].data);
    mp_free(b->model.balance);
    b->model.balance = b->mixers[0].attention.balance = NULL;
}

static void fill(float *values, int count, float value) {
    for (int i = 0; i < count; i++)
        values[i] = value;
}

/* The rows of a projection add their mean square. Four rows of a key head, and four of all query heads that share it,
 * are read; the norm before the projection scales their inputs. */
MP_TEST(models_balance_of_rows) {
    enum { KV = 2, GROUP = 3 };
    static balanced b;
    float factors[MAX_HEADS][DIM];
    for (int normed = 0; normed < 2; normed++) {
        make(&b, KV, GROUP);
        set_biases(&b);
        fill(&b.q_rows[0][0], MAX_HEADS * DIM * HIDDEN, 1e9f); /* rows that are not read */
        fill(&b.k_rows[0][0], MAX_HEADS * DIM * HIDDEN, 1e9f);
        for (int h = 0; h < KV; h++)
            for (int s = 0; s < 4; s++) { /* squares of the rows: 24 h1^2 (1 + 4 + 9 + 16) / 4 and 4 times as much */
                fill(b.k_rows[h * DIM + s * DIM / 4], HIDDEN, (float)(2 * (h + 1) * (s + 1)));
                fill(b.q_rows[h * GROUP * DIM + s * GROUP * DIM / 4], HIDDEN, (float)((h + 1) * (s + 1)));
            }
        fill(k_bias(&b, 0), DIM / 2, 30);
        for (int k = 0; k < HIDDEN; k++)
            b.norm[k] = k % 2 ? 3 : 0;
        if (normed)
            b.layers[0].sublayer[0].norm = (mp_norm){.weight = b.norm, .n = HIDDEN, .root = true};
        compute(&b, NULL, factors);
        const double rest = HIDDEN * 7.5 * (normed ? 4.5 : 1); /* the queries of head 0: mean square of a row */
        for (int i = 0; i < DIM; i++) {
            MP_CHECK_NEAR(factors[0][i], pow(((i < DIM / 2 ? 900 : 0) + 4 * rest) / rest, 0.25), 1e-6);
            MP_CHECK_NEAR(factors[1][i], sqrt(2), 1e-6);
        }
    }
}

/* The norms of queries and keys remove what biases and projections have scaled: they alone count, for every head. */
MP_TEST(models_balance_of_norms) {
    static balanced b;
    float factors[MAX_HEADS][DIM];
    make(&b, 3, 2);
    set_biases(&b);
    set_norms(&b);
    fill(b.bias, 3 * MAX_HEADS * DIM, 77);
    fill(&b.q_rows[0][0], MAX_HEADS * DIM * HIDDEN, NAN);
    fill(&b.k_rows[0][0], MAX_HEADS * DIM * HIDDEN, 55);
    for (int i = 0; i < DIM; i++) {
        b.q_norm[i] = (float)(1 + i % 3);
        b.k_norm[i] = i % 5 ? -4.0f : 60.0f;
    }
    compute(&b, NULL, factors);
    for (int h = 0; h < 3; h++)
        for (int i = 0; i < DIM; i++)
            MP_CHECK_NEAR(factors[h][i], sqrt((i % 5 ? 4.0 : 60.0) / (1 + i % 3)), 1e-5);
    b.mixers[0].attention.qkv.bias = NULL; /* as most models with such norms */
    float again[MAX_HEADS][DIM];
    compute(&b, NULL, again);
    MP_CHECK(memcmp(factors, again, 3 * sizeof *factors) == 0);
}

/* ---- rotary pairs ------------------------------------------------------------------------------------------------ */

/* Rotations of a head of 16 components: of all, of the first ones, of some in the middle, of none. */
static const struct {
    int dim, from, rope;
    bool neox;
    int pairs[DIM];
} rotations[] = {
    {16, 0, 0, true, {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}},
    {16, 0, 0, false, {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}},
    {10, 0, 1, true, {5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15}},
    {10, 0, 0, false, {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 10, 11, 12, 13, 14, 15}},
    {10, 6, 0, true, {0, 1, 2, 3, 4, 5, 11, 12, 13, 14, 15, 6, 7, 8, 9, 10}},
    {8, 5, 0, false, {0, 1, 2, 3, 4, 6, 5, 8, 7, 10, 9, 12, 11, 13, 14, 15}},
    {2, 0, 0, true, {1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}},
    {16, 0, -1, true, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}},
};

/* Returns x with a head rotated as the model does it at a position. */
static void rotate(const balanced *b, int64_t position, float *x) {
    const mp_rope *rope = &b->model.rope[b->mixers[0].attention.rope == 1];
    static const mp_norm none;
    float angles[DIM];
    mp_rope_row(rope, position, angles);
    mp_attention_place(&none, b->mixers[0].attention.rope < 0 ? NULL : rope, angles, b->shape.rotated_from, 1, DIM, x);
}

/* The components that a rotation mixes share a factor, from the mean square of both. So factors commute with the
 * model's own rotation, and the product of a query and a key at any two positions is what it is without factors: the
 * factors of both cancel within rounding. */
MP_TEST(models_balance_of_rotary_pairs) {
    static balanced b;
    float factors[MAX_HEADS][DIM];
    mp_test_random random = {5};
    mp_kernels_init();
    for (size_t r = 0; r < sizeof rotations / sizeof *rotations; r++)
        for (int normed = 0; normed < 2; normed++) {
            mp_error error;
            const int *pairs = rotations[r].pairs;
            make(&b, 1, 1);
            b.shape.rotated_from = rotations[r].from;
            b.mixers[0].attention.rope = rotations[r].rope;
            mp_rope *rope = &b.model.rope[rotations[r].rope == 1];
            MP_CHECK_OK(mp_rope_init_plain(rope, rotations[r].dim, rotations[r].neox, 100, &error), &error);
            set_biases(&b);
            if (normed)
                set_norms(&b);
            float *q = normed ? b.q_norm : q_bias(&b, 0), *k = normed ? b.k_norm : k_bias(&b, 0);
            for (int i = 0; i < DIM; i++) {
                q[i] = mp_test_random_float(&random, 1, 3);
                k[i] = mp_test_random_float(&random, 1, 3) * (i % 4 == 1 ? 100 : 1) * (i % 2 ? 1 : -1);
            }
            compute(&b, pairs, factors);
            for (int i = 0; i < DIM; i++) {
                const double kk = hypot(k[i], k[pairs[i]]), qq = hypot(q[i], q[pairs[i]]);
                MP_CHECK_NEAR(factors[0][i], sqrt(kk / qq), 1e-5);
            }
            for (int round = 0; round < 20; round++) {
                float plain[2][DIM], scaled[2][DIM];
                double product = 0, with = 0, most = 0;
                for (int i = 0; i < DIM; i++) {
                    plain[0][i] = mp_test_random_float(&random, -3, 3);
                    plain[1][i] = mp_test_random_float(&random, -300, 300);
                    scaled[0][i] = plain[0][i] * factors[0][i];
                    scaled[1][i] = plain[1][i] / factors[0][i];
                }
                for (int side = 0; side < 2; side++) {
                    rotate(&b, 7 * round + side, plain[side]);
                    rotate(&b, 7 * round + side, scaled[side]);
                }
                for (int i = 0; i < DIM; i++) {
                    product += (double)plain[0][i] * (double)plain[1][i];
                    with += (double)scaled[0][i] * (double)scaled[1][i];
                    most += hypot(plain[0][i], plain[0][pairs[i]]) * hypot(plain[1][i], plain[1][pairs[i]]);
                }
                MP_CHECK_NEAR(with, product, 8 * most * (double)FLT_EPSILON);
            }
            mp_rope_deinit(rope);
        }
}

/* ---- weights of any size ----------------------------------------------------------------------------------------- */

/* A ratio of 0, without a limit or without a meaning has the factor 1, as has one beyond the limits. */
MP_TEST(models_balance_limits) {
    static const struct {
        float q, k;
        double factor;
    } cases[] = {
        {0, 0, 1},           {0, 5, 1},           {5, 0, 1},          {NAN, 1, 1},      {1, NAN, 1},
        {INFINITY, 1, 1},    {1, INFINITY, 1},    {1e30f, 1, 1},      {1, 1e30f, 1},    {1e30f, 1e30f, 1},
        {1, 1048576, LIMIT}, {1, 1060000, 1},     {1048576, 1, 1.0 / LIMIT}, {1060000, 1, 1},
        {1e-30f, 1e-30f, 1}, {1e-15f, 4e-15f, 2}, {3e18f, 3e16f, 0.1}, {-2, -32, 4},     {-1e-5f, 10, 1000},
    };
    enum { CASES = sizeof cases / sizeof *cases };
    static balanced b;
    float factors[MAX_HEADS][DIM];
    for (int normed = 0; normed < 2; normed++)
        for (int c = 0; c < CASES; c++) {
            make(&b, 1, 1);
            set_biases(&b);
            if (normed)
                set_norms(&b);
            float *q = normed ? b.q_norm : q_bias(&b, 0), *k = normed ? b.k_norm : k_bias(&b, 0);
            for (int i = 0; i < DIM; i++) { /* the neighbours of each component are of the usual size */
                q[i] = i % 2 ? cases[c].q : 1;
                k[i] = i % 2 ? cases[c].k : 9;
            }
            compute(&b, NULL, factors);
            for (int i = 0; i < DIM; i++)
                MP_CHECK_NEAR(factors[0][i], i % 2 ? cases[c].factor : 3, 1e-5 * (i % 2 ? cases[c].factor : 3));
        }
}

/* A row that is NaN, infinite or too large to be squared makes the factors of its head 1, and of no other head. */
MP_TEST(models_balance_of_hostile_rows) {
    static const float values[] = {NAN, INFINITY, -INFINITY, 1e30f};
    static balanced b;
    float factors[MAX_HEADS][DIM];
    for (int v = 0; v < 4; v++)
        for (int side = 0; side < 2; side++) {
            make(&b, 2, 2);
            set_biases(&b);
            fill(b.bias, 4 * DIM, 1);
            fill(k_bias(&b, 0), 2 * DIM, 16);
            (side ? b.k_rows[DIM] : b.q_rows[2 * DIM])[3] = values[v]; /* a row that head 1 reads */
            compute(&b, NULL, factors);
            for (int i = 0; i < DIM; i++) {
                MP_CHECK_NEAR(factors[0][i], 4, 1e-5);
                MP_CHECK_INT(factors[1][i] == 1, 1);
            }
        }
}

/* A mixer that reads the keys of another one multiplies its queries by the factors of those keys. */
MP_TEST(models_balance_of_readers) {
    static balanced b;
    mp_error error;
    make(&b, 2, 2);
    b.model.layer_count = 3;
    for (int i = 0; i < DIM; i++)
        b.k_norm[i] = b.q_norm[i] = (float)(1 + i);
    set_norms(&b);
    b.mixers[2].attention.store = 0;
    b.mixers[2].attention.reads_only = true;
    b.mixers[2].attention.k_norm = b.mixers[0].attention.k_norm;
    MP_CHECK_OK(mp_decoder_balance(&b.model, &error), &error);
    MP_CHECK(b.mixers[0].attention.balance && !b.mixers[1].attention.balance);
    MP_CHECK(b.mixers[2].attention.balance == b.mixers[0].attention.balance);
    mp_free(b.model.balance);
}
