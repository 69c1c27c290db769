/* Parts of image pipelines: products over many rows, the cache of texts, predicted memory, requests that fail. */
#include <math.h>

#include "estimate_fixture.h"
#include "image_generation_fixture.h"
#include "sizes_fixture.h"
#include "late_threads.h"
#include "models/diffusion/schedule.h"
#include "models/diffusion/texts.h"
#include "parts_fixture.h"
#include "ranges_fixture.h"

/* ---- products in chunks of rows ---------------------------------------------------------------------------------- */

enum { INPUTS = 64, OUTPUTS = 20, LAST = 100, MANY = 2 * MP_DIFF_ROWS + LAST, MARGIN = 16 };

typedef struct scene {
    tiny_parts parts;
    mp_diffusion model;
    mp_linear exact, quantised, again;
    float *matrix; /* that of `exact`, in parts.file.bytes */
} scene;

static void set_up(scene *s, mp_compute compute, int threads) {
    mp_error error;
    *s = (scene){0};
    tiny_parts_begin(&s->parts, "products.bin", 29);
    tiny_tensor(&s->parts.file, "quantised.weight", MP_Q8_0, OUTPUTS, INPUTS, 0.3f, 0);
    tiny_tensor(&s->parts.file, "exact.weight", MP_F32, OUTPUTS, INPUTS, 0.3f, 0);
    s->matrix = (float *)(void *)(s->parts.file.bytes + s->parts.file.used - OUTPUTS * INPUTS * sizeof(float));
    tiny_parts_open(&s->parts, mp_resolve_compute(compute), threads);
    s->model = (mp_diffusion){.weights = s->parts.weights, .compute = compute};
    const struct {
        mp_linear *linear;
        const char *name;
    } list[] = {{&s->quantised, "quantised"}, {&s->exact, "exact"}, {&s->again, "quantised"}};
    for (int i = 0; i < 3; i++)
        MP_CHECK_OK(mp_diff_linear(&s->model, &s->parts.builder, list[i].linear, list[i].name, OUTPUTS, INPUTS, &error),
                    &error);
    tiny_parts_finish(&s->parts);
}

typedef struct product {
    scene *s;
    mp_diff_run run;
    const float *x, *gate;
    float *rows, *y;
    void *acts;
    _Atomic int complete; /* threads whose product was not cancelled */
} product;

static void forward_body(const mp_team_thread *thread, void *arg) {
    product *p = arg;
    mp_diff_thread l = {.thread = thread, .run = &p->run};
    const bool done = mp_diff_forward(&l, &p->s->exact, p->x, INPUTS, MANY, NULL, p->acts, p->y, OUTPUTS);
    atomic_fetch_add(&p->complete, done);
}

static void gated_body(const mp_team_thread *thread, void *arg) {
    product *p = arg;
    mp_diff_thread l = {.thread = thread, .run = &p->run};
    const bool done = mp_diff_add_gated(&l, &p->s->exact, p->x, INPUTS, MANY, p->gate, p->acts, p->rows, p->y);
    atomic_fetch_add(&p->complete, done);
}

static void fill(float *to, int n, float value) {
    for (int i = 0; i < n; i++)
        to[i] = value;
}

/* y = x W^T, and y += gate * (x W^T), over three chunks of rows. A cancelled product says so, and computes one chunk at
 * most. The scratch of two chunks suffices. */
static void check_products(int threads) {
    static float x[MANY * INPUTS], y[MANY * OUTPUTS], sum[MANY * OUTPUTS], rows[2 * MP_DIFF_ROWS * OUTPUTS + MARGIN];
    static const _Atomic int raised = 1;
    float gate[OUTPUTS];
    scene s;
    mp_test_random random = {41};
    set_up(&s, MP_COMPUTE_F32, threads);
    for (int i = 0; i < MANY * INPUTS; i++)
        x[i] = mp_test_random_float(&random, -1, 1);
    for (int i = 0; i < OUTPUTS; i++)
        gate[i] = mp_test_random_float(&random, -2, 2);
    product p = {.s = &s, .run = {.lease = &s.parts.lease}, .x = x, .gate = gate, .rows = rows, .y = y};
    p.acts = mp_alloc(mp_diff_linear_scratch(&s.exact, MANY), MP_TAG_SCRATCH);
    fill(y, MANY * OUTPUTS, 7);
    mp_lease_run(&s.parts.lease, forward_body, &p);
    MP_CHECK_INT(p.complete, threads);
    p.y = sum;
    fill(sum, MANY * OUTPUTS, 3);
    fill(rows, sizeof rows / sizeof *rows, 7);
    mp_lease_run(&s.parts.lease, gated_body, &p);
    MP_CHECK_INT(p.complete, 2 * threads);
    for (int i = 0; i < MARGIN; i++)
        MP_CHECK(rows[2 * MP_DIFF_ROWS * OUTPUTS + i] == 7);
    for (int r = 0; r < MANY; r++)
        for (int n = 0; n < OUTPUTS; n++) {
            double expected = 0;
            for (int k = 0; k < INPUTS; k++)
                expected += (double)x[r * INPUTS + k] * (double)s.matrix[n * INPUTS + k];
            MP_CHECK_NEAR(y[r * OUTPUTS + n], expected, 1e-5);
            MP_CHECK_NEAR(sum[r * OUTPUTS + n], 3 + (double)gate[n] * expected, 3e-5);
        }
    s.parts.lease.cancelled = &raised;
    p.y = y;
    fill(y, MANY * OUTPUTS, 7);
    mp_lease_run(&s.parts.lease, forward_body, &p);
    mp_lease_run(&s.parts.lease, gated_body, &p);
    MP_CHECK_INT(p.complete, 2 * threads);
    for (int i = MP_DIFF_ROWS * OUTPUTS; i < MANY * OUTPUTS; i++)
        MP_CHECK(y[i] == 7);
    s.parts.lease.cancelled = NULL;
    mp_free(p.acts);
    tiny_parts_close(&s.parts);
}

MP_TEST(models_image_generation_products_of_many_rows) {
    check_products(1);
    check_products(2);
}

/* ---- texts ------------------------------------------------------------------------------------------------------- */

/* A text that was not completed is forgotten with its last user. A complete one stays until the cache is trimmed. */
MP_TEST(models_image_generation_forgets_incomplete_texts) {
    mp_error error;
    mp_request *base;
    mp_budget budget = {.limit = UINT64_MAX};
    mp_diff_cache cache;
    mp_diff_texts *first, *second;
    bool known;
    MP_CHECK_OK(make_call(true, 1, &base, &error), &error);
    mp_image_generation_request *call = (mp_image_generation_request *)base;
    call->text_rows = 3;
    call->text_width = 4;
    call->pooled_width = 2;
    mp_item item = {.request = base, .tenant = 7};
    mp_diff_cache_init(&cache, &budget);
    MP_CHECK_OK(mp_diff_texts_get(&cache, &item, 0, &first, &known, &error), &error);
    MP_CHECK(!known);
    MP_CHECK_OK(mp_diff_texts_get(&cache, &item, 0, &second, &known, &error), &error);
    MP_CHECK(!known && second != first);
    const uint64_t one = first->bytes;
    MP_CHECK_INT(budget.used, 2 * one);
    mp_diff_texts_release(&cache, first);
    MP_CHECK_INT(budget.used, one);
    MP_CHECK(cache.list == second && !second->next);
    mp_diff_texts_complete(second);
    MP_CHECK_OK(mp_diff_texts_get(&cache, &item, 0, &first, &known, &error), &error);
    MP_CHECK(known && first == second);
    mp_diff_texts_release(&cache, first);
    item.tenant += 1ull << 32; /* another tenant's text is computed again, and forgotten here */
    MP_CHECK_OK(mp_diff_texts_get(&cache, &item, 0, &first, &known, &error), &error);
    MP_CHECK(!known && first != second);
    mp_diff_texts_release(&cache, first);
    MP_CHECK_INT(mp_diff_cache_trim(&cache), 0); /* in use */
    mp_diff_texts_release(&cache, second);
    MP_CHECK_INT(budget.used, one);
    MP_CHECK_INT(cache.charged, one);
    MP_CHECK_INT(mp_diff_cache_trim(&cache), one);
    MP_CHECK(!cache.list);
    MP_CHECK_INT(budget.used, 0);
    mp_request_destroy(base);
}

/* ---- memory and failures ----------------------------------------------------------------------------------------- */

/* Predicted memory, the memory that each step of a request takes, and its polls, as recorded. */
MP_TEST(models_image_generation_sizes_recorded) {
    enum { MAX = 64, COUNT = 6 };
    static const uint64_t recorded[2][COUNT] = {{0, 2438976, 106184, 384000, 64, 796},
                                                {0, 2587712, 72315, 384000, 46, 551}};
    static const uint64_t steps_recorded[2][MAX] = {
        {68728, 68728, 53112, 68728, 68728, 53112, 76280, 76280, 54392, 76280, 76280, 54392, 93624, 93624, 51000,
         93624, 93624, 51000, 5752, 173816, 371448, 287224, 173816, 173816, 371448, 287224, 173816, 173816, 371448,
         287224, 173816, 173816, 371448, 287224, 173816, 116920, 260088, 123256, 260088, 260088, 260088, 241528,
         253176, 167992, 112504, 173816, 371448, 287224, 173816, 173816, 371448, 287224, 173816, 5752, 109944, 253112,
         116280, 253112, 253112, 253112, 234552, 246200, 161016, 105528},
        {64312, 64312, 46584, 89208, 89208, 46584, 1336, 152824, 320760, 320760, 232184, 232184, 152824, 152824,
         320760, 320760, 232184, 232184, 152824, 111800, 254968, 118136, 254968, 254968, 254968, 236408, 248056,
         162872, 107384, 152824, 320760, 320760, 232184, 232184, 152824, 1336, 105528, 248696, 111864, 248696, 248696,
         248696, 230136, 241784, 156600, 101112, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
    };
    int wrong = 0;
    for (int flux = 0; flux < 2; flux++) {
        mp_error error;
        tiny_model tiny;
        mp_item item = {0}, *items[1] = {&item};
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX];
        uint64_t got[COUNT], steps[MAX] = {0};
        int count = 0;
        tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 1);
        (void)lease_polls();
        const mp_diffusion *model = (const mp_diffusion *)tiny.model;
        MP_CHECK_OK(make_call(flux, 1, &item.request, &error), &error);
        tiny.loader.ops->footprint(tiny.loader.self, &got[0], &got[1]);
        MP_CHECK_OK(tiny.model->ops->check(tiny.model, item.request, &got[2], &item.total, &error), &error);
        MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &item, &error), &error);
        got[3] = mp_vae_floats(model, 100, 60);
        do {
            tiny_trim(&tiny); /* each step reserves what it needs */
            tiny.engine->ops->plan(tiny.engine, items, 1, 0, &plan);
            tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
            if (count < MAX)
                steps[count] = tiny.engine->ops->bytes(tiny.engine);
            count++;
        } while (outcomes[0] == MP_OUTCOME_MORE);
        MP_CHECK_INT(outcomes[0], MP_OUTCOME_DONE);
        got[4] = (uint64_t)count;
        got[5] = (uint64_t)lease_polls();
        wrong += !sizes_are(flux ? "flux" : "sd3", got, recorded[flux], COUNT);
        wrong += !sizes_are(flux ? "flux, steps" : "sd3, steps", steps, steps_recorded[flux], MAX);
        tiny.engine->ops->retire(tiny.engine, &item);
        mp_request_destroy(item.request);
        tiny_unload(&tiny);
    }
    MP_CHECK_INT(wrong, 0);
}

/* A request without the tokens of a text for an encoder that the model has is refused. Tokens for other encoders may be
 * missing. */
MP_TEST(models_image_generation_missing_tokens_are_refused) {
    mp_error error;
    tiny_model tiny;
    uint64_t cost;
    uint32_t total;
    for (int flux = 0; flux < 2; flux++) {
        tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 1);
        for (int e = 0; e < MP_T2I_ENCODERS; e++) {
            mp_request *base;
            MP_CHECK_OK(make_call(flux, 1, &base, &error), &error);
            mp_image_generation_request *call = (mp_image_generation_request *)base;
            const int t = call->n_texts - 1;
            const bool has = call->n_ids[e] > 0;
            mp_free(call->ids[t][e]);
            call->ids[t][e] = NULL;
            MP_CHECK_STATUS(tiny.model->ops->check(tiny.model, base, &cost, &total, &error),
                            has ? MP_INVALID_ARGUMENT : MP_OK, &error);
            if (has)
                MP_CHECK_HAS(error.message, flux ? "ids[0][" : "ids[1][");
            mp_request_destroy(base);
        }
        tiny_unload(&tiny);
    }
}

/* A request whose latents become NaN fails in that step. The next request gets its images. */
MP_TEST(models_image_generation_nan_fails_its_request) {
    mp_error error;
    tiny_model tiny;
    mp_item item = {0}, next = {0}, *items[1] = {&item};
    uint64_t cost;
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    tiny_load(&tiny, pipeline(true), MP_COMPUTE_F32, 1);
    MP_CHECK_OK(make_call(true, 1, &item.request, &error), &error);
    mp_image_generation_request *call = (mp_image_generation_request *)item.request;
    MP_CHECK_OK(tiny.model->ops->check(tiny.model, item.request, &cost, &item.total, &error), &error);
    ((float *)call->noise)[0] = NAN;
    MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &item, &error), &error);
    tiny.engine->ops->plan(tiny.engine, items, 1, UINT64_MAX, &plan);
    tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_FAILED);
    MP_CHECK_INT(item.error.code, MP_NUMERIC);
    MP_CHECK_HAS(item.error.message, "in step 1");
    MP_CHECK_INT(call->steps_done, 0);
    tiny.engine->ops->retire(tiny.engine, &item);
    mp_request_destroy(item.request);
    MP_CHECK_OK(make_call(true, 1, &next.request, &error), &error);
    serve_alone(&tiny, &next);
    tiny.engine->ops->retire(tiny.engine, &next);
    mp_request_destroy(next.request);
    tiny_unload(&tiny);
}

/* ---- images of many rows ----------------------------------------------------------------------------------------- */

enum { SIDE = 48, LATENTS = CHANNELS * SIDE * SIDE }; /* 576 rows of patches */

static void make_large(tiny_model *tiny, mp_compute compute, int threads, float *latents) {
    static const float times[] = {700}, sigmas[] = {0.7f, 0};
    static int32_t ids[MP_T2I_ENCODERS][CLIP_TOKENS];
    static float noise[LATENTS];
    mp_error error;
    mp_item item = {0};
    mp_image_generation_request *call = NULL;
    mp_test_random random = {11};
    for (int i = 0; i < LATENTS; i++)
        noise[i] = mp_test_random_float(&random, -2, 2);
    mp_image_generation_args args = {.width = 2 * SIDE, .height = 2 * SIDE, .n_images = 1, .n_steps = 1, .n_texts = 1,
                                     .guidance = 3, .times = times, .sigmas = sigmas, .noise = noise,
                                     .n_noise = LATENTS, .keep = true};
    for (int e = 0; e < MP_T2I_ENCODERS; e++) {
        args.n_ids[e] = e == MP_DIFF_T5 ? T5_TOKENS : e == MP_DIFF_CLIP_G ? 0 : CLIP_TOKENS;
        args.ids[0][e] = args.n_ids[e] ? ids[e] : NULL;
    }
    tiny_load(tiny, pipeline(true), compute, threads);
    MP_CHECK_OK(mp_image_generation_request_create(&args, &call, &error), &error);
    item.request = &call->base;
    serve_alone(tiny, &item);
    memcpy(latents, call->latents, LATENTS * sizeof *latents);
    tiny->engine->ops->retire(tiny->engine, &item);
    mp_request_destroy(&call->base);
    tiny_unload(tiny);
}

/* bfloat16 is as close to float32 in the last lines of an image, which blocks compute after MP_DIFF_ROWS rows, as it is
 * in the first ones. */
MP_TEST_SECONDS(models_image_generation_blocks_of_many_rows, 60) {
    static float exact[LATENTS], rounded[LATENTS];
    enum { LINES = 4 };
    tiny_model tiny;
    double first = 0, last = 0, size = 0;
    MP_CHECK((SIDE / MP_DIFF_PATCH) * (SIDE / MP_DIFF_PATCH) > MP_DIFF_ROWS);
    make_large(&tiny, MP_COMPUTE_F32, 1, exact);
    make_large(&tiny, MP_COMPUTE_BF16, 1, rounded);
    for (int i = 0; i < LATENTS; i++) {
        const int line = i / SIDE % SIDE;
        const double away = fabs((double)exact[i] - (double)rounded[i]);
        size = fmax(size, fabs((double)exact[i]));
        if (line < LINES)
            first = fmax(first, away);
        if (line >= SIDE - LINES)
            last = fmax(last, away);
    }
    if (!(first < 0.1 * size && last < 3 * first))
        MP_FAIL("the first lines are off by %g, the last lines by %g, of %g", first, last, size);
}

/* Blocks use their scratch again after MP_DIFF_ROWS rows: on two threads, whichever is late, an image has the bits of
 * one thread. */
MP_TEST_SECONDS(models_image_generation_late_threads_of_many_rows, 60) {
    static const mp_compute classes[] = {MP_COMPUTE_F32, MP_COMPUTE_BF16};
    static float expected[LATENTS], got[LATENTS];
    tiny_model tiny;
    for (int c = 0; c < 2; c++) {
        make_large(&tiny, classes[c], 1, expected);
        for (int late = 0; late < 2; late++) {
            late_thread(late);
            make_large(&tiny, classes[c], 2, got);
            late_thread(-1);
            if (memcmp(got, expected, sizeof got) != 0)
                MP_FAIL("compute type %d: the latents differ if thread %d is late", (int)classes[c], late);
        }
    }
}

static void generate_one(void *arg) {
    mp_error error;
    mp_item item = {0};
    MP_CHECK_OK(make_call(true, 1, &item.request, &error), &error);
    serve_alone(arg, &item);
    tiny_model *tiny = arg;
    tiny->engine->ops->retire(tiny->engine, &item);
    mp_request_destroy(item.request);
}

/* Each block of the transformer but the first updates the time of a gigaflop to a sixteenth, once it is built. */
MP_TEST(models_image_generation_learns_its_time) {
    tiny_model tiny;
    tiny_load(&tiny, pipeline(true), MP_COMPUTE_F32, 1);
    mp_diffusion *model = (mp_diffusion *)tiny.model;
    generate_one(&tiny);
    atomic_store(&model->gflop_ns, OLD_ESTIMATE);
    generate_one(&tiny);
    check_share(&model->gflop_ns, 15.0 / 16, STEPS * (model->block_count[MP_DIFF_TRANSFORMER] - 1));
    check_least(&model->gflop_ns, generate_one, &tiny);
    tiny_unload(&tiny);
}
