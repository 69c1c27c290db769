/* The head of embedding models as files describe it: dense layers, their norms, and the sizes of vectors. */
#include <math.h>

#include "parts_fixture.h"
#include "models/nn/pooling.h"

enum { IN = 4, OUT = 16, SMALL = 5 };

static const double EPS = 0.5;

typedef struct scene {
    tiny_parts parts;
    mp_head head;
    size_t weight, norm, bias, small; /* offsets in parts.file.bytes */
} scene;

static size_t add(tiny_file *file, const char *name, int rows, int columns) {
    tiny_tensor(file, name, MP_F32, rows, columns, 0.7f, 0);
    return file->used - (size_t)(rows * columns) * sizeof(float);
}

/* Build a head with one dense layer. The layer has a norm, or the head has a layer for SMALL outputs. */
static void set_up(scene *s, bool normed) {
    mp_error error;
    *s = (scene){0};
    tiny_parts_begin(&s->parts, "head.bin", 31);
    mp_spec *spec = s->parts.file.spec;
    tiny_int(spec, "mpool.dense_count", 1);
    s->weight = add(&s->parts.file, "dense.0.weight", OUT, IN);
    if (normed) {
        tiny_float(spec, "mpool.dense.0.norm_epsilon", EPS);
        s->norm = add(&s->parts.file, "dense.0.norm.weight", 1, OUT);
        s->bias = add(&s->parts.file, "dense.0.norm.bias", 1, OUT);
    } else {
        tiny_ints(spec, "mpool.dense_sizes", (int64_t[]){SMALL}, 1);
        s->small = add(&s->parts.file, "dense.size.5.weight", SMALL, IN);
    }
    tiny_parts_open(&s->parts, MP_COMPUTE_F32, 1);
    MP_CHECK_OK(mp_head_init(&s->head, &s->parts.builder, IN, &error), &error);
    tiny_parts_finish(&s->parts);
}

static double stored(const scene *s, size_t offset, int index) {
    float x;
    memcpy(&x, s->parts.file.bytes + offset + (size_t)index * sizeof x, sizeof x);
    return (double)x;
}

/* Apply the head to one token, with exactly the scratch that it asks for: the floats behind it keep their value. */
static void apply(const scene *s, const float *token, int dimensions, float *out) {
    enum { MARGIN = 2 * OUT };
    const size_t n = mp_head_scratch(&s->head);
    float *scratch = malloc((n + MARGIN) * sizeof *scratch);
    MP_CHECK(scratch);
    for (size_t i = 0; i < n + MARGIN; i++)
        scratch[i] = 7;
    mp_head_apply(&s->head, token, 1, 0, dimensions, false, scratch, out);
    for (size_t i = n; i < n + MARGIN; i++)
        MP_CHECK(scratch[i] == 7);
    free(scratch);
}

static const float token[IN] = {0.3f, -0.4f, 0.9f, 1.7f};

static double product(const scene *s, size_t matrix, int row) {
    double sum = 0;
    for (int k = 0; k < IN; k++)
        sum += stored(s, matrix, row * IN + k) * (double)token[k];
    return sum;
}

/* The epsilon of the norm is the file's: it is as large as the variance here, so that it decides the result. */
MP_TEST(models_head_reads_the_norm_of_a_dense_layer) {
    scene s;
    float out[OUT];
    double y[OUT], mean = 0, square = 0;
    set_up(&s, true);
    apply(&s, token, OUT, out);
    for (int i = 0; i < OUT; i++) {
        y[i] = product(&s, s.weight, i);
        mean += y[i] / OUT;
    }
    for (int i = 0; i < OUT; i++)
        square += (y[i] - mean) * (y[i] - mean) / OUT;
    for (int i = 0; i < OUT; i++)
        MP_CHECK_NEAR(out[i], (y[i] - mean) / sqrt(square + EPS) * stored(&s, s.norm, i) + stored(&s, s.bias, i), 1e-5);
    tiny_parts_close(&s.parts);
}

/* A head with a layer for 5 outputs gives vectors of 5 and of all components, and no truncated vectors. */
MP_TEST(models_head_gives_the_sizes_of_its_layers) {
    scene s;
    float out[OUT];
    set_up(&s, false);
    for (int n = 0; n <= OUT + 1; n++)
        MP_CHECK_INT(mp_head_gives(&s.head, n), n == SMALL || n == OUT);
    MP_CHECK_INT(mp_head_widest(&s.head), OUT);
    apply(&s, token, OUT, out);
    for (int i = 0; i < OUT; i++)
        MP_CHECK_NEAR(out[i], product(&s, s.weight, i), 1e-5);
    apply(&s, token, SMALL, out);
    for (int i = 0; i < SMALL; i++)
        MP_CHECK_NEAR(out[i], product(&s, s.small, i), 1e-5);
    tiny_parts_close(&s.parts);
}

/* A chain without layers passes its rows on. */
MP_TEST(models_head_chain_without_layers) {
    enum { ROWS = MP_DENSE_ROWS + 3, WIDE = 5 };
    static float x[ROWS * WIDE], y[ROWS * WIDE + 1];
    const mp_dense_chain chain = {.in = WIDE, .out = WIDE};
    for (int i = 0; i < ROWS * WIDE; i++)
        x[i] = (float)i + 0.5f;
    y[ROWS * WIDE] = -1;
    mp_dense_chain_rows(&chain, x, ROWS, NULL, y);
    MP_CHECK(memcmp(x, y, sizeof x) == 0 && y[ROWS * WIDE] == -1);
    MP_CHECK_INT(mp_dense_chain_scratch(&chain), 0);
}

/* A chain with the largest number of layers ends with its last one. */
MP_TEST(models_head_chain_with_the_most_layers) {
    enum { WIDE = 3 };
    static float ones[WIDE * WIDE], minus[WIDE];
    struct { mp_dense_chain chain; mp_dense beyond; } all = {
        .chain = {.count = MP_MAX_DENSE, .in = WIDE, .out = WIDE}, .beyond = {.in = WIDE, .out = WIDE}};
    float x[WIDE] = {1, 2, 3}, y[WIDE], *scratch;
    MP_CHECK(&all.chain.dense[MP_MAX_DENSE] == &all.beyond);
    for (int i = 0; i < WIDE; i++) {
        ones[i * WIDE + i] = 1;
        minus[i] = -(float)i;
    }
    for (int i = 0; i < MP_MAX_DENSE; i++) /* each layer adds the bias */
        all.chain.dense[i] = (mp_dense){.in = WIDE, .out = WIDE, .weight = ones, .bias = minus};
    scratch = calloc(mp_dense_chain_scratch(&all.chain), sizeof *scratch);
    MP_CHECK(scratch);
    mp_kernels_init();
    mp_dense_chain_rows(&all.chain, x, 1, scratch, y); /* the matrix beyond the last layer is at NULL */
    for (int i = 0; i < WIDE; i++)
        MP_CHECK_NEAR(y[i], x[i] - (float)(MP_MAX_DENSE * i), 1e-5);
    free(scratch);
}
