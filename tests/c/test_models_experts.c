/* Mixture of experts (MoE): routing and output; unused experts' weights are not read; files that change. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files/file_map.h"
#include "models/decoder/decoder.h"
#include "models/nn/experts.h"
#include "parts_fixture.h"

enum { COUNT = 5, USED = 2, HIDDEN = 48, FFN = 40, ROWS = 50 };

typedef struct scene {
    tiny_parts parts;
    mp_experts experts;
    float *router, *gate, *up, *down; /* pointers into the file; gate, up and down are those of expert 0 */
} scene;

static float *add(tiny_file *file, const char *part, int expert, int rows, int columns) {
    char name[64];
    snprintf(name, sizeof name, expert < 0 ? "blk.0.ffn_%s.weight" : "blk.0.ffn_%s.%d.weight", part, expert);
    tiny_tensor(file, name, MP_F32, rows, columns, 0.4f, 0);
    return (float *)(void *)(file->bytes + file->used - (size_t)(rows * columns) * sizeof(float));
}

/* Build experts. Router rows 1 and 3 are equal, to test ties. */
static void set_up(scene *s, bool normalise) {
    mp_error error;
    *s = (scene){0};
    tiny_parts_begin(&s->parts, "experts.bin", 17);
    tiny_file *file = &s->parts.file; /* does not move while tensors are added */
    file->capacity = 1 << 20;
    file->bytes = malloc(file->capacity);
    s->router = add(file, "gate_inp", -1, COUNT, HIDDEN);
    memcpy(s->router + 3 * HIDDEN, s->router + HIDDEN, HIDDEN * sizeof(float));
    for (int e = 0; e < COUNT; e++) {
        float *gate = add(file, "gate", e, FFN, HIDDEN), *up = add(file, "up", e, FFN, HIDDEN);
        float *down = add(file, "down", e, HIDDEN, FFN);
        if (e == 0) {
            s->gate = gate;
            s->up = up;
            s->down = down;
        }
    }
    tiny_parts_open(&s->parts, MP_COMPUTE_F32, 2);
    mp_experts_shape shape = {.count = COUNT, .used = USED, .hidden = HIDDEN, .ffn = FFN,
                              .routing = {.normalise = normalise, .scale = 1, .groups = 1, .groups_used = 1},
                              .act = MP_ACT_SILU};
    MP_CHECK_OK(mp_experts_init(&s->experts, &shape, &s->parts.builder, &error), &error);
    tiny_parts_finish(&s->parts);
}

static void take_down(scene *s) {
    mp_experts_deinit(&s->experts);
    tiny_parts_close(&s->parts);
}

typedef struct run {
    scene *s;
    const float *x;
    float *y;
    int M;
    void *scratch, *own[2];
} run;

static void body(const mp_team_thread *thread, void *arg) {
    run *r = arg;
    mp_experts_forward(&r->s->experts, thread, r->x, r->x, r->M, 0.5f, r->scratch, r->own[thread->index],
                       &r->s->parts.lease, r->y);
}

/* Adds the experts of M rows of x to y. */
static void forward(scene *s, const float *x, int M, float *y) {
    run r = {s, x, y, M, mp_alloc(mp_experts_scratch(&s->experts, M), MP_TAG_SCRATCH), {NULL, NULL}};
    for (int t = 0; t < 2; t++)
        r.own[t] = mp_alloc(mp_experts_thread_scratch(&s->experts), MP_TAG_SCRATCH);
    atomic_store(&s->parts.lease.heartbeat, 0);
    mp_lease_run(&s->parts.lease, body, &r);
    MP_CHECK(atomic_load(&s->parts.lease.heartbeat) > 0); /* reading experts from a slow disk is progress */
    mp_free(r.scratch);
    mp_free(r.own[0]);
    mp_free(r.own[1]);
}

static double score(const scene *s, const float *x, int expert) {
    double sum = 0;
    for (int i = 0; i < HIDDEN; i++)
        sum += (double)s->router[expert * HIDDEN + i] * (double)x[i];
    return sum;
}

/* Add one expert's output times `weight` to `out`, [HIDDEN]. */
static void expect(const scene *s, const float *x, int expert, double weight, double *out) {
    double inner[FFN];
    size_t stride = (size_t)(s->down - s->gate) + HIDDEN * FFN; /* 1,920 floats per tensor need no padding */
    const float *gate = s->gate + (size_t)expert * stride, *up = s->up + (size_t)expert * stride;
    const float *down = s->down + (size_t)expert * stride;
    for (int f = 0; f < FFN; f++) {
        double g = 0, u = 0;
        for (int i = 0; i < HIDDEN; i++) {
            g += (double)gate[f * HIDDEN + i] * (double)x[i];
            u += (double)up[f * HIDDEN + i] * (double)x[i];
        }
        inner[f] = g / (1 + exp(-g)) * u;
    }
    for (int i = 0; i < HIDDEN; i++)
        for (int f = 0; f < FFN; f++)
            out[i] += weight * (double)down[i * FFN + f] * inner[f];
}

/* Check a row of the output against the reference in doubles. Adds the selected experts to `uses` [COUNT]. */
static void check_row(const scene *s, bool normalise, const float *in, const float *y, int *uses) {
    int chosen[USED];
    double all = 0, sum = 0, weights[USED], out[HIDDEN] = {0};
    for (int e = 0; e < COUNT; e++)
        all += exp(score(s, in, e));
    for (int j = 0; j < USED; j++) {
        chosen[j] = -1;
        for (int e = 0; e < COUNT; e++)
            if ((j == 0 || e != chosen[0]) && (chosen[j] < 0 || score(s, in, e) > score(s, in, chosen[j])))
                chosen[j] = e;
        weights[j] = exp(score(s, in, chosen[j]));
        sum += weights[j];
        uses[chosen[j]]++;
    }
    for (int j = 0; j < USED; j++)
        expect(s, in, chosen[j], weights[j] / (normalise ? sum : all), out);
    for (int i = 0; i < HIDDEN; i++)
        MP_CHECK_NEAR(y[i], 1 + 0.5 * out[i], 2e-5);
}

/* How rows choose experts: as it happens; all rows choose expert 0 first; experts 0, 1, 2 and 4 have equally many rows;
 * their rows are as 12 : 6 : 4 : 3 (Zipf). Expert 3 has the scores of expert 1, loses every tie, and has rows only
 * beside it. */
typedef enum load_kind { ANY, ONE, UNIFORM, ZIPF } load_kind;

static int favourite(load_kind kind, int row) {
    static const int experts[] = {0, 1, 2, 4}, shares[] = {12, 6, 4, 3};
    int at = 0;
    if (kind == UNIFORM)
        return experts[row % 4];
    for (int left = row * 7 % 25; kind == ZIPF && left >= shares[at]; at++)
        left -= shares[at];
    return experts[at];
}

static void check(bool normalise, load_kind kind) {
    scene s;
    mp_test_random random = {23};
    static float x[ROWS * HIDDEN], y[ROWS * HIDDEN], alone[HIDDEN];
    int uses[COUNT] = {0};
    set_up(&s, normalise);
    for (int i = 0; i < ROWS * HIDDEN; i++) {
        const float *row = s.router + favourite(kind, i / HIDDEN) * HIDDEN;
        x[i] = mp_test_random_float(&random, -1, 1) + (kind == ANY ? 0 : 4 * row[i % HIDDEN]);
        y[i] = 1;
    }
    forward(&s, x, ROWS, y);
    for (int r = 0; r < ROWS; r++) {
        check_row(&s, normalise, x + r * HIDDEN, y + r * HIDDEN, uses);
        for (int i = 0; i < HIDDEN; i++)
            alone[i] = 1;
        forward(&s, x + r * HIDDEN, 1, alone);
        MP_CHECK(memcmp(alone, y + r * HIDDEN, sizeof alone) == 0);
    }
    if (kind == ANY)
        MP_CHECK(uses[1] > 0 && uses[1] >= uses[3]);
    if (kind == ONE)
        MP_CHECK_INT(uses[0], ROWS);
    if (kind == ZIPF)
        MP_CHECK(uses[0] >= ROWS * 12 / 25);
    take_down(&s);
}

MP_TEST(models_experts_match_the_reference) {
    for (load_kind kind = ANY; kind <= ZIPF; kind++) {
        check(true, kind);
        check(false, kind);
    }
}

/* NaN in a router's row makes every row of the output NaN, also if the expert itself would not be selected. */
MP_TEST(models_experts_with_nan_in_the_router_give_nan) {
    static const struct {
        mp_routing routing;
        int32_t count;
    } kinds[] = {
        {{.scale = 1, .groups = 1, .groups_used = 1}, 7},
        {{.normalise = true, .scale = 1, .groups = 1, .groups_used = 1}, 7},
        {{.sigmoid = true, .scale = 2, .groups = 1, .groups_used = 1}, 19},
        {{.sigmoid = true, .normalise = true, .scale = 1, .groups = 3, .groups_used = 1}, 9},
        {{.normalise = true, .scale = 1, .groups = 4, .groups_used = 2}, 16},
    };
    mp_kernels_init();
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int at = -1; at < 2 * kinds[k].count; at++) { /* -1: no NaN; from `count` on: in the correction */
            const int32_t count = kinds[k].count;
            float scores[19], merit[19], correction[19] = {0}, weight[2];
            int32_t chosen[2];
            for (int e = 0; e < count; e++)
                scores[e] = (float)(e * 5 % count) - 3;
            if (at >= 0)
                *(at < count ? &scores[at] : &correction[at - count]) = NAN;
            mp_route(&kinds[k].routing, at < count && at % 2 ? NULL : correction, count, 2, scores, merit, chosen,
                     weight);
            for (int j = 0; j < 2; j++)
                MP_CHECK(chosen[j] >= 0 && chosen[j] < count && isnan(weight[j]) == (at >= 0));
            MP_CHECK(chosen[0] != chosen[1]);
        }
}

static mp_status read_routing(int count, int used, int groups, int groups_used, mp_error *error) {
    mp_routing routing;
    mp_spec *spec = mp_spec_create();
    mp_error_clear(error);
    tiny_int(spec, "mpool.expert_groups", groups);
    tiny_int(spec, "mpool.expert_groups_used", groups_used);
    const mp_status status = mp_routing_read(&routing, spec, count, used, error);
    mp_spec_unpin(spec);
    return status;
}

/* The groups in use have at least as many experts as a row uses, in groups of equal size. */
MP_TEST(models_experts_in_groups_suffice) {
    mp_error error;
    MP_CHECK_OK(read_routing(8, 2, 4, 1, &error), &error);
    MP_CHECK_STATUS(read_routing(8, 3, 4, 1, &error), MP_FORMAT, &error);
    MP_CHECK_OK(read_routing(8, 4, 4, 2, &error), &error);
    MP_CHECK_STATUS(read_routing(8, 5, 4, 2, &error), MP_FORMAT, &error);
    MP_CHECK_OK(read_routing(8, 8, 1, 1, &error), &error);
    MP_CHECK_STATUS(read_routing(8, 2, 3, 1, &error), MP_FORMAT, &error);
    MP_CHECK_STATUS(read_routing(8, 1, 8, 1, &error), MP_FORMAT, &error); /* groups of one */
}

/* Sigmoid scores may all round to 0. The normalised weights are then 0 and not NaN. */
MP_TEST(models_experts_without_any_score_add_nothing) {
    const mp_routing routing = {
        .sigmoid = true, .normalise = true, .epsilon = 1e-20f, .scale = 1, .groups = 1, .groups_used = 1};
    float scores[4] = {-200, -300, -200, -250}, merit[4], weight[2];
    int32_t chosen[2];
    mp_kernels_init();
    mp_route(&routing, NULL, 4, 2, scores, merit, chosen, weight);
    for (int j = 0; j < 2; j++)
        MP_CHECK(weight[j] >= 0 && weight[j] < 1e-10f);
}

/* LFM2-MoE adds 1e-6 to the sum, which counts where all scores are small. */
MP_TEST(models_experts_add_their_epsilon_to_the_sum) {
    const mp_routing routing = {
        .sigmoid = true, .normalise = true, .epsilon = 1e-6f, .scale = 1, .groups = 1, .groups_used = 1};
    float scores[3] = {-13, -12, -40}, merit[3], weight[2];
    int32_t chosen[2];
    mp_kernels_init();
    mp_route(&routing, NULL, 3, 2, scores, merit, chosen, weight);
    const double first = 1 / (1 + exp(12)), second = 1 / (1 + exp(13));
    MP_CHECK(chosen[0] == 1 && chosen[1] == 0);
    MP_CHECK(fabs(weight[0] - first / (first + second + 1e-6)) < 1e-5);
}

/* ---- tensors that hold all experts ------------------------------------------------------------------------------- */

static void add_all(tiny_file *file, const char *name, int64_t count, int64_t rows, int64_t columns) {
    mp_error error;
    mp_tensor_entry entry = {.name = name, .dtype = MP_F32, .ndim = 3, .shape = {count, rows, columns},
                             .offset = file->used, .nbytes = (uint64_t)(count * rows * columns) * sizeof(float)};
    MP_CHECK(file->used + entry.nbytes <= file->capacity);
    for (int64_t i = 0; i < count * rows * columns; i++)
        ((float *)(void *)(file->bytes + file->used))[i] = (float)i;
    MP_CHECK_OK(mp_spec_add_tensor(file->spec, &entry, &error), &error);
    file->used += entry.nbytes;
}

static void check_slices(mp_builder *builder, const char *part, mp_expert_layout layout, int64_t rows,
                         int64_t columns) {
    mp_error error;
    mp_expert_matrix matrix;
    MP_CHECK_OK(mp_expert_matrix_init(&matrix, builder, 0, part, COUNT, FFN, HIDDEN, false, &error), &error);
    MP_CHECK_INT(matrix.layout, layout);
    MP_CHECK_INT(matrix.dtype, MP_F32);
    const bool joined = layout == MP_EXPERT_COLUMNS; /* the columns of gate and up alternate */
    for (int e = 0; e < COUNT; e++) {
        float copy[FFN * HIDDEN];
        const mp_tensor *one = &matrix.tensors[e];
        const mp_tensor stored = mp_expert_rows(&matrix, e, 0, FFN, (uint8_t *)copy);
        for (int i = 0; i < FFN * HIDDEN; i++) {
            const int n = i / HIDDEN, k = i % HIDDEN;
            const int at = joined ? k * 2 * FFN + 2 * n + (strcmp(part, "up") == 0) : i;
            MP_CHECK(((const float *)(const void *)stored.data)[i] == (float)(e * rows * columns + at));
        }
        MP_CHECK(one->dtype == MP_F32 && one->ndim == 2 && one->shape[0] == rows && one->shape[1] == columns);
        MP_CHECK_INT(one->nbytes, (uint64_t)(rows * columns) * sizeof(float));
        MP_CHECK(*(const float *)(const void *)one->data == (float)(e * rows * columns));
    }
    mp_expert_matrix_deinit(&matrix);
}

/* One tensor may hold a matrix of all experts, by rows, or gate and up together by columns. The limit on the inputs of
 * int8 products concerns int8 alone. */
MP_TEST(models_experts_in_one_tensor) {
    enum { LONG = MP_I8_MAX_INPUTS + 1 };
    mp_error error;
    mp_weights *weights;
    mp_weight_store store = {0};
    mp_builder builder;
    mp_expert_matrix matrix;
    char path[512];
    snprintf(path, sizeof path, "%s/all.bin", mp_test_directory());
    tiny_file file = {.spec = mp_spec_create(), .capacity = 1 << 20, .bytes = malloc(1 << 20)};
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    add_all(&file, "blk.0.ffn_gate_up_exps.columns", COUNT, HIDDEN, 2 * FFN);
    add_all(&file, "blk.0.ffn_down_exps.weight", COUNT, FFN, HIDDEN);
    add_all(&file, "blk.1.ffn_down_exps.weight", 1, 2, LONG);
    mp_spec_freeze(file.spec);
    mp_test_write_file(path, file.bytes, file.used);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(mp_weights_open(file.spec, &weights, &error), &error);
    mp_builder_init(&builder, &store, weights, MP_COMPUTE_F32);
    check_slices(&builder, "gate", MP_EXPERT_COLUMNS, HIDDEN, 2 * FFN);
    check_slices(&builder, "up", MP_EXPERT_COLUMNS, HIDDEN, 2 * FFN);
    check_slices(&builder, "down", MP_EXPERT_ROWS, FFN, HIDDEN);
    for (int c = 0; c < 2; c++) {
        builder.compute = c ? MP_COMPUTE_I8 : MP_COMPUTE_F32;
        MP_CHECK_STATUS(mp_expert_matrix_init(&matrix, &builder, 1, "down", 1, 2, LONG, false, &error),
                        c ? MP_UNSUPPORTED : MP_OK, &error);
        mp_expert_matrix_deinit(&matrix);
    }
    mp_weight_store_deinit(&store);
    mp_weights_close(weights);
    mp_spec_unpin(file.spec);
    free(file.bytes);
}

/* The store frees a matrix that it took, also if it refuses the matrix. */
MP_TEST(models_refused_matrices_are_freed) {
    enum { LONG = MP_I8_MAX_INPUTS + 1 };
    mp_error error;
    mp_weight_store store = {0};
    mp_builder builder;
    mp_linear linear = {0};
    const uint64_t before = mp_alloc_bytes(MP_TAG_MISC);
    mp_kernels_init();
    mp_builder_init(&builder, &store, NULL, MP_COMPUTE_I8);
    float *matrix = mp_alloc_array(LONG, sizeof *matrix, MP_TAG_MISC);
    MP_CHECK(matrix && mp_alloc_bytes(MP_TAG_MISC) > before);
    MP_CHECK_STATUS(mp_builder_linear_taken(&builder, &linear, "t", NULL, matrix, 1, LONG, &error), MP_UNSUPPORTED,
                    &error);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_MISC), before);
    mp_weight_store_deinit(&store);
}

/* Make the last expert's weights, at the end of the file, unreadable: the router never chooses this expert. */
static void forbid_last(const tiny_model *tiny, const char *path) {
    mp_error error;
    mp_tensor padding; /* the tensor before these bytes, longer than a page */
    struct stat file;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    MP_CHECK_OK(mp_weights_get(((mp_decoder *)tiny->model)->weights, "padding", 1, (int64_t[]){-1}, &padding,
                               &error), &error);
    uint64_t offset = mp_spec_find_tensor(tiny->spec, "padding")->offset;
    uintptr_t data = (uintptr_t)padding.data, from = (data + page - 1) & ~(page - 1);
    MP_CHECK_INT(stat(path, &file), 0);
    MP_CHECK_INT(mprotect((void *)from, (size_t)file.st_size - (size_t)offset - (from - data), PROT_NONE), 0);
}

MP_TEST(models_experts_that_are_not_chosen_are_not_read) {
    static const mp_dtype types[] = {MP_Q8_0};
    size_t rest;
    char path[512];
    tiny_model tiny;
    tiny_job job;
    int32_t prompt[70];
    mp_file_map_init();
    for (int i = 0; i < 70; i++)
        prompt[i] = i * 7 % TINY_VOCAB;
    tiny_load(&tiny, tiny_decoder_spec_as(&(tiny_kind){.arch = "qwen3moe", .experts = 6,
                                                       .rest = &rest}, types, 1, 77, -1), MP_COMPUTE_AUTO, 1);
    /* Use one thread: with more, TSan would report the fault handler's page mapping as a racing write. */
    snprintf(path, sizeof path, "%s/tiny-77.bin", mp_test_directory());
    mp_text_args args = {.n_prompt = 70, .prompt = prompt, .n_choices = 1,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 5, .logprobs = -1,
                                      .ignore_eos = true}};
    forbid_last(&tiny, path);
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    tiny_job_finish(&tiny, &job);
    mp_request_destroy(&job.call->base);
    /* chosen experts are read from the file: truncating it fails the request */
    tiny_trim(&tiny); /* drops packed copies */
    MP_CHECK_INT(truncate(path, (off_t)(rest / 4)), 0);
    tiny_job_make(&tiny, &job, &args, 0);
    prompt[0] = 1;
    tiny_job_admit(&tiny, &job);
    mp_outcome outcome;
    do {
        outcome = tiny_job_step(&tiny, &job, 512);
    } while (outcome == MP_OUTCOME_MORE);
    MP_CHECK_INT(outcome, MP_OUTCOME_FAILED);
    MP_CHECK_INT(job.item.error.code, MP_IO);
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* A router with NaN fails the request before it gets a token. */
MP_TEST(models_experts_with_nan_in_the_router_fail_the_request) {
    static const mp_dtype types[] = {MP_Q8_0};
    static const int32_t prompt[] = {3, 1, 4, 1, 5};
    static const tiny_kind kinds[] = {{.arch = "qwen3moe", .experts = 6},
                                      {.arch = "deepseek2", .experts = 6}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        tiny_model tiny;
        tiny_job job;
        char path[512];
        mp_spec *spec = tiny_decoder_spec_as(&kinds[k], types, 1, 79, -1);
        snprintf(path, sizeof path, "%s/tiny-79.bin", mp_test_directory());
        FILE *file = fopen(path, "r+b");
        const uint64_t at = mp_spec_find_tensor(spec, "blk.1.ffn_gate_inp.weight")->offset + 5 * TINY_HIDDEN * 4;
        MP_CHECK(file && fseek(file, (long)at, SEEK_SET) == 0 && fwrite(&(float){NAN}, 4, 1, file) == 1 &&
                 fclose(file) == 0); /* the row of the expert that is never selected */
        tiny_load(&tiny, spec, MP_COMPUTE_AUTO, 1);
        mp_text_args args = {.n_prompt = 5, .prompt = prompt, .n_choices = 1,
                             .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 5, .logprobs = -1,
                                          .ignore_eos = true}};
        tiny_job_make(&tiny, &job, &args, 0);
        tiny_job_admit(&tiny, &job);
        MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_FAILED);
        MP_CHECK_INT(job.item.error.code, MP_NUMERIC);
        MP_CHECK_INT(job.call->choices[0].token_count, 0);
        tiny.engine->ops->retire(tiny.engine, &job.item);
        mp_request_destroy(&job.call->base);
        tiny_unload(&tiny);
    }
}

/* After a file was changed in place, every step that reads its weights fails, from the first step on. */
MP_TEST(models_experts_of_a_changed_file_fail) {
    static const mp_dtype types[] = {MP_Q8_0};
    static const int32_t prompt[] = {3, 1, 4, 1, 5};
    size_t rest;
    char path[512];
    tiny_model tiny;
    tiny_job job;
    tiny_load(&tiny, tiny_decoder_spec_as(&(tiny_kind){.arch = "qwen3moe", .experts = 6,
                                                       .rest = &rest}, types, 1, 78, -1), MP_COMPUTE_AUTO, 1);
    snprintf(path, sizeof path, "%s/tiny-78.bin", mp_test_directory());
    mp_text_args args = {.n_prompt = 5, .prompt = prompt, .n_choices = 1,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 5, .logprobs = -1,
                                      .ignore_eos = true}};
    tiny_job_make(&tiny, &job, &args, 0);
    tiny_job_admit(&tiny, &job);
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_MORE);
    MP_CHECK_INT(job.call->choices[0].token_count, 1);
    mp_sys_sleep_ns(20 * 1000 * 1000); /* longer than the resolution of file times */
    FILE *file = fopen(path, "r+b");
    MP_CHECK(file && fwrite("changed", 1, 7, file) == 7 && fclose(file) == 0);
    MP_CHECK_INT(tiny_job_step(&tiny, &job, 512), MP_OUTCOME_FAILED);
    MP_CHECK_INT(job.item.error.code, MP_INTEGRITY);
    MP_CHECK_INT(job.call->choices[0].token_count, 1);
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}
