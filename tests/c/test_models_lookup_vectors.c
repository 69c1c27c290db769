/* Vectors of static embeddings against plain sums, for each type of each tensor; options of requests; files that
 * change. All numbers of the tables are small multiples of 1/2: sums are exact in every type and in any order. */
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "encoder_fixture.h"
#include "files/file_map.h"
#include "kernels/quantize.h"
#include "models/lookup/lookup.h"
#include "ranges_fixture.h"

enum { VOCAB_SIZE = 90, ROWS = 40, IGNORED = 9, MAX_DIM = 600 };
#define NONE MP_DTYPE_COUNT /* the type of an absent tensor */

typedef struct table {
    mp_dtype values, mapping, factors; /* the last two may be NONE */
    int32_t dim;
    bool normalize;
} table;

static float value_at(int64_t row, int32_t component) { return (float)((row * 7 + component * 3) % 15 - 7); }
static float factor_at(int32_t token) { return (float)(token % 5 - 1) * 0.5f; }
static int64_t row_of(const table *of, int32_t token) { return of->mapping == NONE ? token : (token * 11 + 3) % ROWS; }

static void write_numbers(mp_dtype dtype, const float *values, int64_t count, uint8_t *out) {
    for (int64_t i = 0; i < count; i++) {
        if (dtype == MP_I8)
            ((int8_t *)out)[i] = (int8_t)values[i];
        else if (dtype == MP_F64)
            ((double *)(void *)out)[i] = values[i];
        else if (dtype == MP_I32)
            ((int32_t *)(void *)out)[i] = (int32_t)values[i];
        else if (dtype == MP_I64)
            ((int64_t *)(void *)out)[i] = (int64_t)values[i];
    }
    if (dtype == MP_F32)
        memcpy(out, values, (size_t)count * sizeof *values);
    else if (dtype == MP_F16 || dtype == MP_BF16)
        mp_quantize_row(dtype, values, count, out);
}

static void add_numbers(tiny_file *file, const char *name, mp_dtype dtype, const float *values, int64_t rows,
                        int64_t columns) {
    mp_error error;
    uint64_t row_bytes = 0;
    MP_CHECK(mp_dtype_row_bytes(dtype, columns, &row_bytes));
    const uint64_t bytes = row_bytes * (uint64_t)rows;
    file->used = (file->used + 63) & ~(size_t)63;
    file->bytes = realloc(file->bytes, file->used + bytes);
    file->capacity = file->used + bytes;
    write_numbers(dtype, values, rows * columns, file->bytes + file->used);
    mp_tensor_entry entry = {.name = name, .dtype = dtype, .ndim = rows > 1 ? 2 : 1, .offset = file->used,
                             .nbytes = bytes};
    entry.shape[0] = rows > 1 ? rows : columns;
    entry.shape[1] = rows > 1 ? columns : 1;
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error);
    file->used += bytes;
}

/* `corrupted`: the factor of this token is infinite; -1: none. */
static mp_spec *make_table(const table *of, int corrupted) {
    static int made;
    static float numbers[VOCAB_SIZE * MAX_DIM];
    char path[512];
    mp_error error;
    mp_kernels_init();
    snprintf(path, sizeof path, "%s/table%d.bin", mp_test_directory(), made++);
    tiny_file file = {.spec = mp_spec_create(), .random = {11}};
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, "static_embedding", &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    tiny_int(file.spec, "static_embedding.embedding_length", of->dim);
    tiny_int(file.spec, "static_embedding.context_length", POSITIONS);
    tiny_int(file.spec, "static_embedding.vocab_size", VOCAB_SIZE);
    tiny_int(file.spec, "mpool.ignored_token", IGNORED);
    tiny_flag(file.spec, "mpool.normalize", of->normalize);
    const int64_t rows = of->mapping == NONE ? VOCAB_SIZE : ROWS;
    for (int64_t r = 0; r < rows; r++)
        for (int32_t c = 0; c < of->dim; c++)
            numbers[r * of->dim + c] = value_at(r, c);
    add_numbers(&file, "token_embd.weight", of->values, numbers, rows, of->dim);
    for (int32_t t = 0; t < VOCAB_SIZE; t++)
        numbers[t] = (float)row_of(of, t);
    if (of->mapping != NONE)
        add_numbers(&file, "token_embd.mapping", of->mapping, numbers, 1, VOCAB_SIZE);
    for (int32_t t = 0; t < VOCAB_SIZE; t++)
        numbers[t] = t == corrupted ? INFINITY : factor_at(t);
    if (of->factors != NONE)
        add_numbers(&file, "token_embd.factor", of->factors, numbers, 1, VOCAB_SIZE);
    mp_test_write_file(path, file.bytes, file.used);
    free(file.bytes);
    return file.spec;
}

/* The mean of the tokens that count, by the definition in lookup.h. */
static void plain_vector(const table *of, const int32_t *ids, int64_t count, int32_t width, bool normalize,
                         float *out) {
    double square = 0;
    int64_t counted = 0;
    for (int64_t i = 0; i < count; i++)
        counted += ids[i] != IGNORED;
    for (int32_t c = 0; c < width; c++) {
        float sum = 0;
        for (int64_t i = 0; i < count; i++)
            if (ids[i] != IGNORED)
                sum += value_at(row_of(of, ids[i]), c) * (of->factors == NONE ? 1 : factor_at(ids[i]));
        out[c] = counted ? sum / (float)counted : 0;
        square += (double)out[c] * (double)out[c];
    }
    for (int32_t c = 0; normalize && square > 0 && c < width; c++)
        out[c] = (float)(out[c] / sqrt(square));
}

typedef struct options {
    int32_t normalize, dimensions;
    bool skips;
} options;

enum { MANY = 150 };

/* Checks a request of many texts of 1 to 7 tokens, two of which begin with tokens that do not count. */
static void check_vectors(const table *of, options options) {
    static int32_t ids[MANY * 7], skip[MANY];
    static int64_t offsets[MANY + 1];
    static float expected[MAX_DIM];
    mp_test_random random = {5};
    for (int t = 0; t < MANY; t++) {
        offsets[t + 1] = offsets[t] + 1 + t % 7;
        skip[t] = t % 7 / 2;
    }
    for (int i = 0; i < offsets[MANY]; i++)
        ids[i] = (int32_t)(mp_test_random_u64(&random) % VOCAB_SIZE);
    ids[0] = IGNORED; /* a text without a token that counts */
    tiny_model tiny;
    mp_error error;
    mp_embedding_request *call;
    tiny_load(&tiny, make_table(of, -1), MP_COMPUTE_AUTO, 2);
    MP_CHECK_OK(make_embedding_request(MANY, ids, offsets, options.skips ? skip : NULL, &call, &error), &error);
    call->normalize = (int8_t)options.normalize;
    call->dimensions = options.dimensions;
    MP_CHECK_INT(run_call(&tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
    const int32_t width = options.dimensions ? options.dimensions : of->dim;
    const bool normalize = options.normalize < 0 ? of->normalize : options.normalize == 1;
    MP_CHECK_INT(call->sizes.width, width);
    for (int t = 0; t < MANY; t++) {
        const int64_t first = offsets[t] + (options.skips ? skip[t] : 0);
        plain_vector(of, ids + first, offsets[t + 1] - first, width, normalize, expected);
        for (int32_t c = 0; c < width; c++)
            MP_CHECK_NEAR(call->vectors[t * width + c], expected[c], normalize ? 1e-6 : 0);
    }
    mp_request_destroy(&call->base);
    tiny_unload(&tiny);
}

MP_TEST(models_lookup_vectors_of_every_type) {
    static const mp_dtype values[] = {MP_F32, MP_F16, MP_BF16, MP_I8}, mappings[] = {NONE, MP_I32, MP_I64},
                          factors[] = {NONE, MP_F32, MP_F16, MP_BF16, MP_F64};
    const options plainly = {.normalize = 0};
    for (int v = 0; v < 4; v++)
        for (int m = 0; m < 3; m++)
            for (int f = 0; f < 5; f++)
                check_vectors(&(table){values[v], mappings[m], factors[f], 300, false}, plainly);
}

MP_TEST(models_lookup_vectors_with_every_option) {
    for (int model = 0; model < 2; model++)
        for (int normalize = -1; normalize <= 1; normalize++)
            for (int skips = 0; skips < 2; skips++)
                check_vectors(&(table){MP_I8, NONE, NONE, 48, model == 1},
                              (options){.normalize = normalize, .dimensions = skips ? 20 : 0, .skips = skips});
}

/* A vector of numbers that float32 holds, but whose squared length it does not, cannot be normalised. */
MP_TEST(models_lookup_lengths_beyond_float32) {
    for (int normalize = 0; normalize < 2; normalize++) {
        const int32_t ids[] = {5};
        float out[WIDTH];
        _Atomic bool stop = false;
        tiny_model tiny;
        tiny_load(&tiny, make_table(&(table){MP_F32, NONE, MP_F32, WIDTH, true}, -1), MP_COMPUTE_AUTO, 1);
        mp_lookup *model = (mp_lookup *)tiny.model;
        model->factors[5] = 1e30f;
        MP_CHECK(mp_lookup_vector(model, ids, 1, WIDTH, normalize, &tiny.lease, &stop, out) == !normalize);
        model->factors[5] = NAN;
        MP_CHECK(!mp_lookup_vector(model, ids, 1, WIDTH, normalize, &tiny.lease, &stop, out));
        tiny_unload(&tiny);
    }
}

MP_TEST(models_lookup_factors_are_finite) {
    for (int token = 0; token < VOCAB_SIZE; token += VOCAB_SIZE - 1)
        for (int wide = 0; wide < 2; wide++) {
            mp_error error;
            char got[64];
            mp_spec *spec = make_table(&(table){MP_I8, NONE, wide ? MP_F64 : MP_F32, 8, true}, token);
            MP_CHECK_STATUS(load_only(spec, MP_COMPUTE_AUTO, &error), MP_FORMAT, &error);
            snprintf(got, sizeof got, "NaN or infinity for token %d", token);
            MP_CHECK_STR(error.field, "token_embd.factor");
            MP_CHECK_STR(error.got, got);
        }
}

/* Without the two options, all tokens count and nothing is normalised. */
MP_TEST(models_lookup_options_have_defaults) {
    mp_spec *base = make_table(&(table){MP_F32, NONE, NONE, 8, true}, -1);
    mp_spec *some = spec_with(base, "mpool.ignored_token", NULL), *none = spec_with(some, "mpool.normalize", NULL);
    tiny_model tiny;
    tiny_load(&tiny, none, MP_COMPUTE_AUTO, 1);
    const mp_lookup *model = (const mp_lookup *)tiny.model;
    MP_CHECK_INT(model->ignored, -1);
    MP_CHECK(!model->normalize);
    MP_CHECK_INT(tiny.engine->ops->trim(tiny.engine), 0); /* the engine keeps nothing */
    MP_CHECK_INT(tiny.engine->ops->bytes(tiny.engine), 0);
    tiny_unload(&tiny);
    mp_spec_unpin(some);
    mp_spec_unpin(base);
}

/* A step that reads a file which is not the loaded one any more fails all of its requests. */
MP_TEST(models_lookup_files_that_change_fail_the_step) {
    static const int32_t ids[] = {1, 2};
    static const int64_t offsets[] = {0, 2};
    static const struct {
        off_t bytes;
        mp_status code;
        const char *message;
    } cases[] = {{1 << 20, MP_INTEGRITY, "a model file was changed or truncated while it was in use"},
                 {0, MP_IO, "a weight file was truncated while it was in use"}};
    mp_file_map_init(); /* reads beyond the end of a file yield zeros */
    for (int i = 0; i < 2; i++) {
        tiny_model tiny;
        mp_error error;
        mp_embedding_request *call;
        mp_item item = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        mp_plan plan = {.count = 1, .items = {&item}, .amount = {1}, .threads = 1};
        uint64_t cost;
        tiny_load(&tiny, make_table(&(table){MP_F32, NONE, NONE, MAX_DIM, true}, -1), MP_COMPUTE_AUTO, 1);
        char path[512];
        snprintf(path, sizeof path, "%s", mp_spec_file(tiny.spec, 0));
        MP_CHECK_OK(make_embedding_request(1, ids, offsets, NULL, &call, &error), &error);
        item.request = &call->base;
        MP_CHECK_OK(tiny.model->ops->check(tiny.model, &call->base, &cost, &item.total, &error), &error);
        MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &item, &error), &error);
        MP_CHECK_INT(truncate(path, cases[i].bytes), 0);
        tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
        MP_CHECK_INT(outcomes[0], MP_OUTCOME_FAILED);
        MP_CHECK_INT(item.error.code, cases[i].code);
        MP_CHECK_HAS(item.error.message, cases[i].message);
        MP_CHECK_INT(item.cursor, 0);
        MP_CHECK(!tiny.model->ops->healthy(tiny.model));
        tiny.engine->ops->retire(tiny.engine, &item);
        mp_request_destroy(&call->base);
        tiny_unload(&tiny);
    }
}
