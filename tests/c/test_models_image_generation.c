/* Image layers compared with plain loops; tiny pipelines that must produce the same bits with any number of threads,
 * any step length, after a preemption and under a tight budget; failing allocations. */
#include "models/diffusion/schedule.h"
#include "image_generation_fixture.h"
#include "late_threads.h"
#include "missing_fixture.h"
#include "ranges_fixture.h"
#include "recorded_fixture.h"

typedef struct way { /* how to run a request */
    uint64_t budget_ns;
    int preempt_every; /* in engine steps; 0: never */
} way;

static uint64_t most_used; /* peak bytes in use between steps of the last request */
static int steps_taken;    /* engine steps of the last request */
static int preempted_in_previews;

static mp_outcome generate(tiny_model *tiny, bool flux, const way *how, uint64_t *hash, mp_error *failure) {
    mp_error error;
    mp_item item = {0}, *items[1] = {&item};
    uint64_t cost;
    MP_CHECK_OK(make_call(flux, 2, &item.request, &error), &error);
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item.request, &cost, &item.total, &error), &error);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &item, &error), &error);
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    int steps = 0;
    most_used = 0;
    preempted_in_previews = 0;
    do {
        tiny->engine->ops->plan(tiny->engine, items, 1, how->budget_ns, &plan);
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
        MP_CHECK(tiny->engine->ops->bytes(tiny->engine) == tiny->budget.used);
        most_used = tiny->budget.used > most_used ? tiny->budget.used : most_used;
        steps_taken = ++steps;
        if (outcomes[0] == MP_OUTCOME_MORE && how->preempt_every && steps % how->preempt_every == 0) {
            const mp_diff_position at = ((const mp_diff_state *)item.state)->at;
            preempted_in_previews += at.phase == MP_DIFF_PREVIEW && at.block > 0;
            tiny->engine->ops->preempt(tiny->engine, &item);
            MP_CHECK(item.state == NULL);
            MP_CHECK_OK(tiny->model->ops->check(tiny->model, item.request, &cost, &item.total, &error), &error);
            MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &item, &error), &error);
        }
    } while (outcomes[0] == MP_OUTCOME_MORE);
    if (outcomes[0] == MP_OUTCOME_DONE) {
        const mp_image_generation_request *call = (const mp_image_generation_request *)item.request;
        MP_CHECK_INT(item.cursor, item.total);
        MP_CHECK_INT(call->steps_done, call->n_images * STEPS);
        MP_CHECK_INT(call->previews_done, call->n_images * call->n_previews);
        *hash = hash_of(item.request);
    } else {
        *failure = item.error;
    }
    tiny->engine->ops->retire(tiny->engine, &item);
    mp_request_destroy(item.request);
    return outcomes[0];
}

static uint64_t hash_of_images(bool flux, mp_compute compute, int threads, const way *how) {
    tiny_model tiny;
    mp_error error;
    uint64_t hash = 0;
    tiny_load(&tiny, pipeline(flux), compute, threads);
    late_thread_of(threads);
    MP_CHECK_INT(generate(&tiny, flux, how, &hash, &error), MP_OUTCOME_DONE);
    uint64_t again = 0; /* the second request finds cached texts and loaded weights */
    MP_CHECK_INT(generate(&tiny, flux, how, &again, &error), MP_OUTCOME_DONE);
    MP_CHECK(hash == again);
    late_thread(-1);
    tiny_unload(&tiny);
    return hash;
}

/* ---- tests ---- */

MP_TEST_SECONDS(models_image_generation_contract, 120) {
    static const mp_compute classes[] = {MP_COMPUTE_F32, MP_COMPUTE_BF16};
    const way all = {UINT64_MAX, 0}, blocks = {0, 0};
    for (int flux = 0; flux < 2; flux++)
        for (int c = 0; c < 2; c++) {
            const uint64_t hash = hash_of_images(flux, classes[c], 1, &all);
            MP_CHECK(hash_of_images(flux, classes[c], 1, &blocks) == hash);
            MP_CHECK(hash_of_images(flux, classes[c], 2, &all) == hash);
            MP_CHECK(hash_of_images(flux, classes[c], 3, &blocks) == hash);
        }
}

/* Pixels, latents of every step, and the text encoders' results of one image. */
static int image_is_recorded(bool flux, mp_compute compute, const double *recorded, double tolerance) {
    tiny_model tiny;
    mp_error error;
    mp_item item = {0};
    tiny_load(&tiny, pipeline(flux), compute, 1);
    MP_CHECK_OK(make_call(flux, 1, &item.request, &error), &error);
    serve_alone(&tiny, &item);
    const mp_image_generation_request *call = (const mp_image_generation_request *)item.request;
    const size_t pixels = 4 * HIGH * WIDE * 3, latents = CHANNELS * HIGH * WIDE, texts = (size_t)call->n_texts;
    static float previews[4 * HIGH * WIDE * 3 * STEPS];
    for (size_t i = 0; i < (size_t)call->n_previews * pixels; i++)
        previews[i] = (float)((const uint8_t *)call->previews)[i];
    const struct {
        const char *what;
        const float *values;
        size_t count;
    } seen[] = {{"pixels", call->pixels, pixels},
                {"previews", previews, (size_t)call->n_previews * pixels},
                {"latents", call->history, STEPS * latents},
                {"pooled", call->pooled, texts * (size_t)call->pooled_width},
                {"texts", call->texts, texts * (size_t)call->text_rows * (size_t)call->text_width}};
    int wrong = 0;
    for (int i = 0; i < 5; i++)
        wrong += !recorded_is(seen[i].what, seen[i].values, seen[i].count, recorded[i], tolerance);
    tiny.engine->ops->retire(tiny.engine, &item);
    mp_request_destroy(item.request);
    tiny_unload(&tiny);
    return wrong;
}

MP_TEST(models_image_generation_recorded) {
    static const double recorded[2][2][5] = { /* float32, bfloat16 */
        {{-8.757631, -2153.739, -11.50718, -1.609467, -14.45786},
         {-8.738411, -2152.758, -11.46677, -1.616057, -14.36226}},
        {{0.4075822, 141.531, -19.24229, 5.69631, 26.4721},
         {0.4252935, 154.5546, -19.22894, 5.698674, 26.4249}},
    };
    int wrong = 0;
    for (int flux = 0; flux < 2; flux++) {
        wrong += image_is_recorded(flux, MP_COMPUTE_F32, recorded[flux][0], 10 * RECORDED_FLOATS);
        wrong += image_is_recorded(flux, MP_COMPUTE_BF16, recorded[flux][1], 5 * RECORDED_ROUNDED);
    }
    MP_CHECK_INT(wrong, 0);
}

/* A request that is preempted many times, also within a preview, produces the same images and previews as one that is
 * never preempted. */
MP_TEST_SECONDS(models_image_generation_survives_preemption, 120) {
    for (int flux = 0; flux < 2; flux++) {
        tiny_model tiny;
        mp_error error;
        tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 2);
        uint64_t whole = 0;
        int within_previews = 0;
        for (int every = 0; every < 40; every += every < 12 ? 12 : 3) {
            uint64_t hash = 0;
            MP_CHECK_INT(generate(&tiny, flux, &(way){0, every}, &hash, &error), MP_OUTCOME_DONE);
            whole = every ? whole : hash;
            MP_CHECK(hash == whole);
            within_previews += preempted_in_previews;
        }
        MP_CHECK(within_previews > 0);
        tiny_unload(&tiny);
    }
}

/* Under a tight budget the stages reuse each other's memory. If even the largest stage does not fit, the request waits
 * for memory and its error says so. */
MP_TEST_SECONDS(models_image_generation_works_in_little_memory, 120) {
    const way all = {0, 0};
    for (int flux = 0; flux < 2; flux++) {
        tiny_model tiny;
        mp_error error;
        uint64_t hash = 0, little = 0;
        tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 1);
        MP_CHECK_INT(generate(&tiny, flux, &all, &hash, &error), MP_OUTCOME_DONE);
        const uint64_t most = most_used;
        tiny_trim(&tiny);
        MP_CHECK_INT(tiny.budget.used, 0);
        const mp_diffusion *model = (const mp_diffusion *)tiny.model;
        uint64_t largest = 0, sum = 0, predicted_model, predicted;
        for (int s = 0; s < MP_DIFF_STAGES; s++) {
            sum += model->stage_bytes[s];
            largest = model->stage_bytes[s] > largest ? model->stage_bytes[s] : largest;
        }
        MP_CHECK(most >= sum);
        tiny.loader.ops->footprint(tiny.loader.self, &predicted_model, &predicted);
        MP_CHECK(predicted_model == 0 && predicted >= largest);
        tiny.budget.limit = largest + (most - sum);
        MP_CHECK(tiny.budget.limit < most);
        MP_CHECK_INT(generate(&tiny, flux, &all, &little, &error), MP_OUTCOME_DONE);
        MP_CHECK(little == hash && tiny.budget.used <= tiny.budget.limit);
        tiny_trim(&tiny);
        tiny.budget.limit = largest / 2;
        MP_CHECK_INT(generate(&tiny, flux, &all, &little, &error), MP_OUTCOME_WAIT_MEMORY);
        MP_CHECK_INT(error.code, MP_MEMORY_EXHAUSTED);
        tiny_trim(&tiny);
        MP_CHECK_INT(tiny.budget.used, 0);
        tiny_unload(&tiny);
    }
}

/* ---- biases of layers ---- */

#ifdef MP_SEAM
/* A poll reads the clock, so readings of the clock are the moments at which a step can notice that it is unwanted. */
static _Thread_local bool counted;  /* count the readings of the calling thread */
static int reading_count, raise_at; /* readings of the step so far; the one at which the step becomes unwanted */
static _Atomic int unwanted;
static const mp_item *watched;
static mp_diff_position raised_in; /* position of the item at that moment */

static uint64_t counting_now(void) {
    if (counted && ++reading_count == raise_at) {
        raised_in = ((const mp_diff_state *)watched->state)->at;
        atomic_store(&unwanted, 1);
    }
    return mp_sys_real.now_ns();
}

static bool same_position(const mp_diff_position *a, const mp_diff_position *b) {
    return a->phase == b->phase && a->image == b->image && a->block == b->block &&
           (a->phase >= MP_DIFF_DECODE || a->step == b->step) && (a->phase > MP_DIFF_DENOISE || a->text == b->text) &&
           (a->phase > MP_DIFF_ENCODE || a->encoder == b->encoder);
}

/* Run a step of one block, and cancel it at reading number `at` of the clock; 0: never. */
static mp_outcome run_one(tiny_model *tiny, mp_item *item, int at) {
    mp_item *items[1] = {item};
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    tiny->engine->ops->plan(tiny->engine, items, 1, 0, &plan);
    atomic_store(&unwanted, 0);
    reading_count = 0;
    raise_at = at;
    watched = item;
    counted = true;
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    counted = false;
    return outcomes[0];
}

/* Results that the request keeps over a preemption. */
static int units_of(const mp_item *item) {
    const mp_image_generation_request *call = (const mp_image_generation_request *)item->request;
    return (int)item->cursor + atomic_load(&call->previews_done) + atomic_load(&call->images_done);
}

static uint64_t built(const tiny_model *tiny) { return ((const mp_diffusion_engine *)tiny->engine)->weights; }

/* Hash the rows that the next block of the item reads. */
static uint64_t hash_of_rows(const tiny_model *tiny, const mp_item *item) {
    const mp_diffusion *model = (const mp_diffusion *)tiny->model;
    const mp_diff_state *state = item->state;
    const mp_dit_pass *pass = &state->pass;
    const mp_vae_image *image = &state->image_run;
    const int64_t rows = pass->text_rows + (int64_t)pass->grid_height * pass->grid_width;
    const float *x = state->at.phase == MP_DIFF_ENCODE ? state->run.x : pass->h;
    int64_t n = state->at.phase == MP_DIFF_ENCODE ? (int64_t)state->run.T * state->run.encoder->hidden
                                                  : rows * model->hidden;
    if (state->at.block == 0 && state->at.phase == MP_DIFF_ENCODE) {
        const mp_image_generation_request *call = (const mp_image_generation_request *)item->request;
        return tiny_hash_bytes(tiny_hash_bytes(1, state->texts[0]->pooled, (size_t)call->pooled_width * sizeof *x),
                               state->texts[0]->rows,
                               (size_t)call->text_rows * (size_t)call->text_width * sizeof *x);
    }
    MP_CHECK(state->at.block > 0 || state->at.text > 0);
    if (state->at.block == 0) /* the next text begins */
        return 0;
    if (state->at.phase > MP_DIFF_DENOISE) {
        x = image->x;
        n = (int64_t)image->height * image->width * model->ops[state->at.block - 1].out;
    }
    return tiny_hash_bytes(1, x, (size_t)n * sizeof *x);
}

/* Preempt the item, and compute its blocks again up to a position. */
static void restart(tiny_model *tiny, mp_item *item, const mp_diff_position *until) {
    mp_error error;
    tiny->engine->ops->preempt(tiny->engine, item);
    MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, item, &error), &error);
    for (int steps = 0; !same_position(&((const mp_diff_state *)item->state)->at, until); steps++) {
        MP_CHECK(steps < 100);
        MP_CHECK_INT(run_one(tiny, item, 0), MP_OUTCOME_MORE);
    }
}
#endif

/* A step may become unwanted at any time. The block then ends at the next poll and does not count as computed, and a
 * later attempt gives the bits of a request that was never stopped. */
MP_TEST_SECONDS(models_image_generation_stops_at_any_poll, 60) {
#ifdef MP_SEAM
    enum { MAX_MORE = 6 }; /* another poll, and measurements at the end of a parallel region and of the step */
    for (int flux = 0; flux < 2; flux++) {
        tiny_model tiny;
        mp_error error;
        mp_item item = {0}, alone = {0};
        uint32_t asked = 0;
        int stopped[MP_DIFF_FINISHED] = {0};
        tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 1 + flux);
        MP_CHECK_OK(make_call(flux, 1, &alone.request, &error), &error);
        serve_alone(&tiny, &alone);
        tiny.engine->ops->retire(tiny.engine, &alone);
        tiny_trim(&tiny); /* drops the cached texts */
        admit_call(&tiny, flux, &item);
        tiny.lease.cancelled = &unwanted;
        mp_sys_table.now_ns = counting_now;
        mp_outcome outcome = MP_OUTCOME_MORE;
        while (outcome == MP_OUTCOME_MORE) {
            const mp_diff_position at = ((const mp_diff_state *)item.state)->at;
            const int units = units_of(&item);
            const bool repeats = at.phase == MP_DIFF_PREVIEW || (at.phase == MP_DIFF_DENOISE && at.step > 0) ||
                                 at.text > 0; /* the same blocks again */
            /* Reading 1 is the step's start. With two threads, barriers read the clock as well: skip some. */
            for (int k = 2; !repeats && outcome == MP_OUTCOME_MORE; k += 1 + 4 * flux) {
                if (!mp_test_take(&asked))
                    continue;
                const uint64_t weights = built(&tiny);
                outcome = run_one(&tiny, &item, k);
                if (!atomic_load(&unwanted))
                    break;
                /* Barriers of several threads and the construction of weights read the clock as well. */
                if (tiny.lease.threads == 1 && weights == built(&tiny) && reading_count > k + MAX_MORE)
                    MP_FAIL("phase %d, block %d, reading %d: %d more readings", (int)at.phase, at.block, k,
                            reading_count - k);
                const mp_diff_position now = ((const mp_diff_state *)item.state)->at;
                if (units != units_of(&item) || now.phase != at.phase)
                    break; /* the block ended its phase */
                MP_CHECK_INT(outcome, MP_OUTCOME_MORE);
                const bool complete = !same_position(&now, &raised_in);
                const uint64_t hash = complete ? hash_of_rows(&tiny, &item) : 0;
                restart(&tiny, &item, complete ? &now : &at);
                if (complete) {
                    MP_CHECK(hash == hash_of_rows(&tiny, &item));
                    break;
                }
                stopped[at.phase]++;
            }
            if (repeats)
                outcome = run_one(&tiny, &item, 0);
        }
        mp_sys_table.now_ns = mp_sys_real.now_ns;
        tiny.lease.cancelled = NULL;
        MP_CHECK_INT(outcome, MP_OUTCOME_DONE);
        for (int p = MP_DIFF_ENCODE; p <= MP_DIFF_DECODE; p++)
            MP_CHECK(p == MP_DIFF_PREVIEW || stopped[p] >= mp_test_rounds(10) / 2);
        MP_CHECK(hash_of(item.request) == hash_of(alone.request));
        tiny.engine->ops->retire(tiny.engine, &item);
        mp_request_destroy(item.request);
        mp_request_destroy(alone.request);
        tiny_unload(&tiny);
    }
#else
    MP_SKIP("the build has no seam");
#endif
}

/* ---- the row that CLIP pools ------------------------------------------------------------------------------------- */

static mp_status make_sd3(mp_request **call, mp_error *error) { return make_call(false, 1, call, error); }
static mp_status make_flux(mp_request **call, mp_error *error) { return make_call(true, 1, call, error); }
static void compare(const mp_request *first, const mp_request *second) { MP_CHECK(hash_of(first) == hash_of(second)); }

MP_TEST_SECONDS(models_image_generation_survives_refused_memory, 300) {
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int flux = 0; flux < 2; flux++) {
        tiny_life life = {.spec = pipeline(flux), .compute = MP_COMPUTE_F32,
                          .make = flux ? make_flux : make_sd3, .compare = compare};
        mp_test_alloc_sweep(tiny_live, &life);
        mp_spec_unpin(life.spec);
    }
}

/* ---- layers ---- */

typedef struct layers {
    mp_spec *spec;
    mp_weights *weights;
    mp_weight_store store;
    mp_builder builder;
    mp_budget budget;
    mp_conv conv;
    mp_group_norm norm;
} layers;

enum { IN = 5, OUT = 37, GROUPS = 3, NORMED = 12 };

static void load_layers(layers *l, int size) {
    mp_error error;
    char path[512];
    snprintf(path, sizeof path, "%s/layers%d.bin", mp_test_directory(), size);
    tiny_file file = {.spec = mp_spec_create(), .random = {31}};
    MP_CHECK_OK(mp_spec_set_architecture(file.spec, "flux", &error), &error);
    MP_CHECK_OK(mp_spec_add_file(file.spec, path, &error), &error);
    conv(&file, "x", "conv", OUT, IN, size);
    norm(&file, "x", "norm", NORMED);
    mp_spec_freeze(file.spec);
    mp_test_write_file(path, file.bytes, file.used);
    *l = (layers){.spec = file.spec, .budget = {.limit = UINT64_MAX}};
    free(file.bytes);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    mp_team *team;
    mp_lease lease;
    MP_CHECK_OK(mp_team_create(0, &team, &error), &error);
    mp_team_lease(team, 1, &lease);
    MP_CHECK_OK(mp_weights_open(l->spec, &l->weights, &error), &error);
    mp_builder_init(&l->builder, &l->store, l->weights, MP_COMPUTE_F32);
    MP_CHECK_OK(mp_conv_build(&l->conv, &l->builder, "x.conv", IN, OUT, size, &error), &error);
    MP_CHECK_OK(mp_group_norm_build(&l->norm, &l->builder, "x.norm", NORMED, GROUPS, 1e-4f, &error), &error);
    MP_CHECK_OK(mp_builder_finish(&l->builder, &lease, &l->budget, NULL, &error), &error);
    mp_team_return(&lease);
    mp_team_destroy(team);
}

static void unload_layers(layers *l) {
    mp_weight_store_deinit(&l->store);
    mp_weights_close(l->weights);
    mp_spec_unpin(l->spec);
}

static double plain_conv(const float *w, const float *bias, int size, const float *x, int height, int width,
                         bool doubled, int py, int px, int out) {
    double sum = bias[out];
    const int reach = size / 2;
    for (int ky = 0; ky < size; ky++)
        for (int kx = 0; kx < size; kx++) {
            const int y = py + ky - reach, z = px + kx - reach;
            if (y < 0 || z < 0 || y >= height || z >= width)
                continue;
            const int row = doubled ? y / 2 * (width / 2) + z / 2 : y * width + z;
            for (int c = 0; c < IN; c++)
                sum += (double)w[((out * IN + c) * size + ky) * size + kx] * x[row * IN + c];
        }
    return sum;
}

MP_TEST(models_conv_matches_plain_loops) {
    static const int sizes[][2] = {{1, 1}, {2, 6}, {24, 26}};
    for (int size = 1; size <= 3; size += 2) {
        layers l;
        mp_tensor tensor;
        mp_error error;
        load_layers(&l, size);
        MP_CHECK_OK(mp_weights_get(l.weights, "x.conv.weight", 4, (int64_t[]){OUT, IN, size, size}, &tensor, &error),
                    &error);
        for (int s = 0; s < 3; s++)
            for (int doubled = 0; doubled < 2; doubled++) {
                const int height = sizes[s][0] * (doubled ? 2 : 1), width = sizes[s][1] * (doubled ? 2 : 1);
                const int64_t rows = (int64_t)height * width;
                float *x = malloc((size_t)rows * IN * sizeof *x), *y = malloc((size_t)rows * OUT * sizeof *y);
                float *parts = malloc((size_t)rows * OUT * sizeof *parts), *extra = malloc((size_t)rows * OUT * 4);
                void *scratch = mp_alloc(mp_conv_scratch(&l.conv), MP_TAG_SCRATCH);
                mp_test_random random = {7};
                for (int64_t i = 0; i < rows * IN; i++)
                    x[i] = mp_test_random_float(&random, -1, 1);
                for (int64_t i = 0; i < rows * OUT; i++)
                    extra[i] = mp_test_random_float(&random, -1, 1);
                for (int64_t row = 0; row < rows; row += MP_CONV_ROWS)
                    mp_conv_forward(&l.conv, x, height, width, doubled, row,
                                    row + MP_CONV_ROWS < rows ? row + MP_CONV_ROWS : rows, extra, y, scratch);
                for (int64_t row = 0; row < rows; row += 7)
                    mp_conv_forward(&l.conv, x, height, width, doubled, row, row + 7 < rows ? row + 7 : rows, extra,
                                    parts, scratch);
                MP_CHECK(memcmp(y, parts, (size_t)rows * OUT * sizeof *y) == 0);
                for (int64_t row = 0; row < rows; row++)
                    for (int out = 0; out < OUT; out += 6)
                        MP_CHECK_NEAR(y[row * OUT + out],
                                      extra[row * OUT + out] +
                                          plain_conv((const float *)tensor.data, l.conv.linear.bias, size, x, height,
                                                     width, doubled, (int)(row / width), (int)(row % width), out),
                                      1e-5);
                free(x);
                free(y);
                free(parts);
                free(extra);
                mp_free(scratch);
            }
        unload_layers(&l);
    }
}

MP_TEST(models_group_norm_matches_plain_loops) {
    layers l;
    load_layers(&l, 1);
    enum { MAX = 777, WIDTH = NORMED / GROUPS };
    static const int counts[] = {1, 63, 64, 65, MAX};
    static float x[MAX * NORMED], sums[(MAX / MP_GROUP_NORM_ROWS + 1) * NORMED];
    mp_test_random random = {5};
    for (int i = 0; i < MAX * NORMED; i++)
        x[i] = 40 + mp_test_random_float(&random, -1, 1) * (1 + i % NORMED);
    for (int k = 0; k < 5; k++) {
        const int rows = counts[k];
        float mean[NORMED], scale[NORMED], y[NORMED];
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t b = 0; b < mp_group_norm_blocks(rows); b++)
                mp_group_norm_sums(&l.norm, x, rows, b, pass ? mean : NULL, sums + b * NORMED);
            if (pass == 0)
                mp_group_norm_mean(&l.norm, sums, rows, mean);
            else
                mp_group_norm_scale(&l.norm, sums, rows, scale);
        }
        for (int row = 0; row < rows; row += 1 + rows / 9) {
            mp_kernels_get()->affine(x + row * NORMED, mean, scale, l.norm.bias, MP_ACT_NONE, NORMED, y);
            for (int c = 0; c < NORMED; c++) {
                double sum = 0, square = 0, n = (double)rows * WIDTH;
                for (int r = 0; r < rows; r++)
                    for (int i = c / WIDTH * WIDTH; i < (c / WIDTH + 1) * WIDTH; i++)
                        sum += x[r * NORMED + i] / n;
                for (int r = 0; r < rows; r++)
                    for (int i = c / WIDTH * WIDTH; i < (c / WIDTH + 1) * WIDTH; i++)
                        square += (x[r * NORMED + i] - sum) * (x[r * NORMED + i] - sum) / n;
                MP_CHECK_NEAR(y[c], (x[row * NORMED + c] - sum) / sqrt(square + 1e-4) * l.norm.weight[c] +
                                        l.norm.bias[c], 2e-5);
            }
        }
    }
    unload_layers(&l);
}

MP_TEST(models_ranges_of_image_generation) {
    static const range all[] = {
        {"clip_l.block_count", "an integer from 1 to 512 (a limit of mpool)"},
        {"clip_l.context_length", "an integer from 1 to 4096 (a limit of mpool)"},
        {"clip_l.embedding_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {"clip_l.end_token", "an integer from -1 to 16777216 (a limit of mpool)"},
        {"clip_l.feed_forward_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {"clip_l.head_count", "an integer from 1 to 65536 (a limit of mpool)"},
        {"clip_l.head_length", "an integer from 8 to 65536 (a limit of mpool)"},
        {"clip_l.norm_epsilon", "a number from -1e+06 to 1e+06"},
        {"clip_l.projection_length", "an integer from 0 to 65536 (a limit of mpool)"},
        {"t5.block_count", "an integer from 1 to 512 (a limit of mpool)"},
        {"t5.context_length", "an integer from 1 to 4096 (a limit of mpool)"},
        {"t5.embedding_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {"t5.feed_forward_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {"t5.head_count", "an integer from 1 to 65536 (a limit of mpool)"},
        {"t5.head_length", "an integer from 8 to 65536 (a limit of mpool)"},
        {"t5.norm_epsilon", "a number from -1e+06 to 1e+06"},
        {"t5.relative_buckets", "an integer from 4 to 4096 (a limit of mpool)"},
        {"t5.relative_distance", "an integer from 8 to 1048576 (a limit of mpool)"},
        {"transformer.axes", "an integer from 2 to 16, or an array of 3"},
        {"transformer.block_count", "an integer from 1 to 512 (a limit of mpool)"},
        {"transformer.channels", "an integer from 1 to 1024 (a limit of mpool)"},
        {"transformer.head_count", "an integer from 1 to 65536 (a limit of mpool)"},
        {"transformer.head_length", "an integer from 8 to 65536 (a limit of mpool)"},
        {"transformer.pooled_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {"transformer.single_block_count", "an integer from 0 to 512 (a limit of mpool)"},
        {"transformer.text_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {"vae.channels", "an array of 1 to 8 integers"},
        {"vae.groups", "an integer from 1 to 8192 (a limit of mpool)"},
        {"vae.layers", "an integer from 1 to 64 (a limit of mpool)"},
        {"vae.scaling_factor", "a number from -1e+06 to 1e+06"},
        {"vae.shift_factor", "a number from -1e+06 to 1e+06"},
    };
    check_ranges(pipeline(true), RANGES(all));
}
