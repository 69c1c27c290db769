/* Image transformers: an image's vector has the same bits alone and in a batch, and with any number of threads. */
#include <errno.h>
#include <stdatomic.h>

#include "base/platform.h"
#include "defaults_fixture.h"
#include "late_threads.h"
#include "missing_fixture.h"
#include "recorded_fixture.h"
#include "vit_fixture.h"

static void check_grouping(const char *arch, bool gated, mp_compute compute) {
    static test_images all;
    static float alone[IMAGES * WIDTH], parts[IMAGES * WIDTH];
    const family of = {arch, gated};
    make_images(&all, strcmp(arch, "siglip") != 0);
    check_groups(&(grouped){IMAGES, WIDTH, compute, make_family, &of, &all, run, compute_all}, alone);
    MP_CHECK(memcmp(alone, alone + WIDTH, WIDTH * sizeof(float)) != 0);
    check_groups(&(grouped){IMAGES, WIDTH, compute, make_family, &of, &all, run, cut}, parts);
    MP_CHECK(memcmp(alone, parts, sizeof alone) == 0);
}

MP_TEST_SECONDS(models_vit_contract_float32, 60) { check_grouping("dinov2", false, MP_COMPUTE_F32); }
MP_TEST_SECONDS(models_vit_contract_bfloat16, 60) { check_grouping("dinov2", true, MP_COMPUTE_BF16); }
MP_TEST_SECONDS(models_vit_contract_int8, 60) { check_grouping("dinov2_with_registers", false, MP_COMPUTE_I8); }
MP_TEST_SECONDS(models_vit_contract_attention_pool, 60) { check_grouping("siglip", false, MP_COMPUTE_F32); }

MP_TEST(models_vit_recorded) {
    static const struct {
        family of;
        mp_compute compute;
        double recorded, tolerance;
    } models[] = {
        {{"dinov2", false}, MP_COMPUTE_F32, 0.3725766, RECORDED_FLOATS},
        {{"dinov2", true}, MP_COMPUTE_F32, 1.004739, RECORDED_FLOATS},
        {{"dinov2", false}, MP_COMPUTE_BF16, 0.374071, 5 * RECORDED_ROUNDED},
        {{"dinov2_with_registers", false}, MP_COMPUTE_F32, 0.2192425, RECORDED_FLOATS},
        {{"dinov2_with_registers", true}, MP_COMPUTE_I8, -0.115873, 5 * RECORDED_ROUNDED},
        {{"siglip", false}, MP_COMPUTE_F32, -0.2143169, RECORDED_FLOATS},
    };
    enum { SEEN = 4 }; /* images 1 to 3 have other sizes than the position table */
    static test_images all;
    static float out[SEEN * WIDTH];
    int wrong = 0;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        tiny_model tiny;
        make_images(&all, strcmp(models[i].of.arch, "siglip") != 0);
        tiny_load(&tiny, make_family(&models[i].of), models[i].compute, 1);
        MP_CHECK_INT(run(&tiny, &all, 0, SEEN, UINT64_MAX, out), MP_OUTCOME_DONE);
        tiny_unload(&tiny);
        wrong += !recorded_is(models[i].of.arch, out, SEEN * WIDTH, models[i].recorded, models[i].tolerance);
    }
    MP_CHECK_INT(wrong, 0);
}

#ifdef MP_SEAM
static int refuse_pages(int fd, int64_t offset, int64_t bytes) {
    (void)fd, (void)offset, (void)bytes;
    errno = ENOSPC;
    return -1;
}
#endif

/* Shared memory whose pages the system refuses fails the load: a later write to such a page would kill the process. */
MP_TEST(models_vit_shared_weights_without_memory) {
#ifdef MP_SEAM
    if (!MP_LINUX)
        MP_SKIP("the system allocates shared memory at its first use");
    mp_error error;
    mp_model *model = NULL;
    mp_budget budget = {.limit = UINT64_MAX};
    mp_shm shared = {.fd = -1};
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    mp_sys_table.fallocate = refuse_pages;
    mp_status status = mp_model_load_shared(tiny.spec, MP_COMPUTE_F32, &shared, &tiny.lease, &budget, NULL, &model,
                                            &error);
    mp_sys_table = mp_sys_real;
    MP_CHECK_STATUS(status, MP_MEMORY_EXHAUSTED, &error);
    MP_CHECK_HAS(error.message, "the packed weights");
    MP_CHECK(!model && !shared.data && budget.used == 0);
    tiny_unload(&tiny);
#else
    MP_SKIP("needs the seam build");
#endif
}

MP_TEST(models_vit_refuses_invalid_requests) {
    static uint8_t pixels[3 * 145 * PATCH * 64 * PATCH];
    mp_error error;
    mp_image_embedding_request *call;
    const struct {
        int32_t height, width;
        int64_t bytes;
    } refused[] = {{0, 1, 0}, {1, 0, 0}, {-1, -1, 3}, {4, 4, 47}, {4, 4, 49}, {MP_IMAGE_MAX_SIDE + 1, 1, 0}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const int32_t sizes[2] = {refused[i].height, refused[i].width};
        MP_CHECK_STATUS(make_image_embedding_request(1, sizes, pixels, refused[i].bytes, &call, &error),
                        MP_INVALID_ARGUMENT, &error);
        MP_CHECK(!call);
    }
    MP_CHECK_STATUS(make_image_embedding_request(0, NULL, pixels, 0, &call, &error), MP_INVALID_ARGUMENT, &error);

    tiny_model any, fixed;
    tiny_load(&any, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    tiny_load(&fixed, make_spec("siglip", false), MP_COMPUTE_F32, 1);
    const int32_t side = PATCH * GRID;
    const struct {
        int32_t height, width, dimensions;
        uint8_t output;
        mp_status of_any, of_fixed;
    } cases[] = {{side, side, 0, MP_IMAGE_POOLED, MP_OK, MP_OK},
                 {side, side, WIDTH, MP_IMAGE_POOLED, MP_OK, MP_OK},
                 {side, side, WIDTH + 1, MP_IMAGE_POOLED, MP_INVALID_ARGUMENT, MP_INVALID_ARGUMENT},
                 {side, side, -1, MP_IMAGE_POOLED, MP_INVALID_ARGUMENT, MP_INVALID_ARGUMENT},
                 {side, side, HIDDEN, MP_IMAGE_TOKENS, MP_OK, MP_OK},
                 {side, side, 5, MP_IMAGE_TOKENS, MP_INVALID_ARGUMENT, MP_INVALID_ARGUMENT},
                 {side + 1, side, 0, MP_IMAGE_POOLED, MP_OK, MP_INVALID_ARGUMENT},
                 {PATCH, PATCH, 0, MP_IMAGE_POOLED, MP_OK, MP_INVALID_ARGUMENT},
                 {640, 633, 0, MP_IMAGE_POOLED, MP_OK, MP_INVALID_ARGUMENT},
                 {640, 640, 0, MP_IMAGE_POOLED, MP_LIMIT, MP_INVALID_ARGUMENT},
                 {128 * PATCH, 64 * PATCH, 0, MP_IMAGE_POOLED, MP_OK, MP_INVALID_ARGUMENT}, /* 8192 patches, the most */
                 {145 * PATCH, 57 * PATCH, 0, MP_IMAGE_POOLED, MP_LIMIT, MP_INVALID_ARGUMENT}, /* 8265 */
                 {PATCH - 1, PATCH, 0, MP_IMAGE_POOLED, MP_INVALID_ARGUMENT, MP_INVALID_ARGUMENT},
                 {PATCH, PATCH - 1, 0, MP_IMAGE_POOLED, MP_INVALID_ARGUMENT, MP_INVALID_ARGUMENT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int f = 0; f < 2; f++) {
            const tiny_model *tiny = f ? &fixed : &any;
            const int32_t sizes[2] = {cases[i].height, cases[i].width};
            uint64_t cost;
            uint32_t total;
            MP_CHECK_OK(make_image_embedding_request(1, sizes, pixels, 3 * (int64_t)sizes[0] * sizes[1], &call, &error),
                        &error);
            call->dimensions = cases[i].dimensions;
            call->output = cases[i].output;
            MP_CHECK_STATUS(tiny->model->ops->check(tiny->model, &call->base, &cost, &total, &error),
                            f ? cases[i].of_fixed : cases[i].of_any, &error);
            mp_request_destroy(&call->base);
        }
    tiny_unload(&any);
    tiny_unload(&fixed);
}

/* An image whose vector is not finite fails its request. The next request is computed as before. */
MP_TEST(models_vit_nan_fails_its_request) {
    static test_images all;
    static float expected[2 * WIDTH], out[2 * WIDTH];
    make_images(&all, true);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 2);
    compute_all(&tiny);
    MP_CHECK_INT(run(&tiny, &all, 1, 2, UINT64_MAX, expected), MP_OUTCOME_DONE);
    float *class_token = ((mp_vit *)tiny.model)->class_token, whole = *class_token;
    *class_token = NAN;
    MP_CHECK_INT(run(&tiny, &all, 1, 2, UINT64_MAX, out), MP_OUTCOME_FAILED);
    *class_token = whole;
    MP_CHECK_INT(run(&tiny, &all, 1, 2, UINT64_MAX, out), MP_OUTCOME_DONE);
    MP_CHECK(memcmp(out, expected, sizeof out) == 0);
    tiny_unload(&tiny);
}

typedef struct parted { /* a group of images and its progress through the layers */
    mp_vit_pass pass;
    uint8_t *own;
    size_t own_bytes;
    _Atomic int done;
} parted;

/* An image that takes longer than a step is computed in parts, here one per step. Meanwhile a smaller image of another
 * request finishes, and another large image takes turns. A preemption restarts the image; an unwanted step does not,
 * and trim frees none of its progress. The bits are unchanged, and all memory is charged. */
static void check_large(const char *arch, int threads) {
    enum { SIDES = 12 * PATCH, STEPS = 10000, GRAIN = 5 };
    static const _Atomic int raised = 1;
    static test_images all;
    static float alone[2 * WIDTH], other[WIDTH];
    const bool any_size = strcmp(arch, "siglip") != 0;
    tiny_model tiny;
    mp_plan plan = {0};
    mp_item item[3]; /* two requests, each with a large image and one of the model's size; one request with only an
                      * image of the model's size */
    mp_outcome outcomes[MP_PLAN_MAX];
    make_images(&all, any_size);
    if (any_size) /* enlarge only the shape: the image then covers the pixels that follow */
        all.sizes[6] = all.sizes[7] = SIDES;
    for (int i = 3; i < 5; i++)
        all.offsets[i + 1] = all.offsets[i] + 3 * (int64_t)all.sizes[2 * i] * all.sizes[2 * i + 1];
    tiny_load(&tiny, make_spec(arch, false), MP_COMPUTE_F32, threads);
    compute_all(&tiny);
    MP_CHECK_INT(run(&tiny, &all, 3, 2, UINT64_MAX, alone), MP_OUTCOME_DONE);
    all.pixels[all.offsets[3]] ^= 255; /* the second request's large image differs from the first one's */
    MP_CHECK_INT(run(&tiny, &all, 3, 1, UINT64_MAX, other), MP_OUTCOME_DONE);
    tiny_trim(&tiny);
    const uint64_t before = tiny.budget.used;
    mp_vit *model = (mp_vit *)tiny.model;
    model->grain = GRAIN;
    model->most_ops = 1;
    atomic_store(&model->mega_ns, 1);
    const uint64_t one_ns = mp_vit_ns(model, mp_vit_image_ops(model, GRID, GRID, any_size));
    const uint64_t budget_ns = any_size ? one_ns : 0;
    const int32_t down = all.sizes[6] / PATCH, rows = mp_vit_rows(model, down, down);
    MP_CHECK(mp_vit_ns(model, mp_vit_image_ops(model, down, down, any_size)) > budget_ns);
    for (int i = 0; i < 3; i++) {
        all.pixels[all.offsets[3]] ^= 255;
        check_item(&tiny, &item[i], make_call(&all, i < 2 ? 3 : 4, i < 2 ? 2 : 1));
    }
    int steps = 0;
    for (; item[0].cursor == 0; steps++) {
        mp_item *items[] = {&item[steps % 7 == 6], &item[steps % 7 != 6], &item[2]};
        const bool others = any_size && steps == 2;
        MP_CHECK(steps < STEPS);
        if (steps == 5) {
            mp_error error;
            tiny.engine->ops->preempt(tiny.engine, &item[0]);
            MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &item[0], &error), &error);
        }
        atomic_store(&model->mega_ns, 1);
        tiny.engine->ops->plan(tiny.engine, items, others ? 3 : 2, budget_ns, &plan);
        MP_CHECK_INT(plan.count, others ? 2 : 1);
        MP_CHECK(plan.items[plan.count - 1] == items[0] && plan.amount[plan.count - 1] == 1 && plan.barrier_bound);
        MP_CHECK(!others || plan.items[0] == &item[2]);
        tiny.lease.cancelled = steps == 9 ? &raised : NULL;
        tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
        MP_CHECK_INT(outcomes[plan.count - 1], MP_OUTCOME_MORE);
        MP_CHECK(!others || outcomes[0] == MP_OUTCOME_DONE);
        MP_CHECK_INT(tiny.budget.used - before, tiny.engine->ops->bytes(tiny.engine));
        tiny_trim(&tiny);
        const uint64_t states = tiny.engine->ops->bytes(tiny.engine) / mp_vit_state_bytes(model, rows);
        MP_CHECK_INT(states, (uint64_t)(item[0].cursor == 0) + (steps >= 6));
        MP_CHECK_INT(tiny.budget.used - before, tiny.engine->ops->bytes(tiny.engine));
    }
    tiny.lease.cancelled = NULL;
    const uint64_t parts = ((const mp_image_embedding_request *)item[0].request)->most_parts;
    MP_CHECK(steps >= LAYERS * 2 * (rows / GRAIN) && (uint64_t)steps <= 9 + 2 * mp_vit_image_parts(model, down, down));
    MP_CHECK(parts >= mp_vit_image_parts(model, down, down));
    while (item[0].cursor < 2 || item[1].cursor < 1) { /* the rest of item 0, and the large image of item 1 */
        mp_item *items[] = {&item[0], &item[1]};
        const int first = item[0].cursor == 2;
        MP_CHECK(++steps < STEPS);
        tiny.engine->ops->plan(tiny.engine, items + first, 2 - first, 0, &plan);
        tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    }
    const float *const vectors[] = {((mp_image_embedding_request *)item[0].request)->vectors,
                                    ((mp_image_embedding_request *)item[1].request)->vectors,
                                    ((mp_image_embedding_request *)item[2].request)->vectors};
    MP_CHECK(memcmp(vectors[0], alone, 2 * WIDTH * sizeof *alone) == 0);
    MP_CHECK(memcmp(vectors[1], other, sizeof other) == 0 && memcmp(alone, other, sizeof other) != 0);
    MP_CHECK(!any_size || memcmp(vectors[2], alone + WIDTH, WIDTH * sizeof *alone) == 0);
    atomic_store(&item[1].cancelled, 1); /* cancel item 1 within its second image */
    tiny.engine->ops->plan(tiny.engine, (mp_item *[]){&item[1]}, 1, 0, &plan);
    tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    MP_CHECK(outcomes[0] == MP_OUTCOME_MORE && item[1].cursor == 1);
    for (int i = 0; i < 3; i++) {
        tiny.engine->ops->retire(tiny.engine, &item[i]);
        mp_request_destroy(item[i].request);
    }
    tiny_trim(&tiny);
    MP_CHECK_INT(tiny.budget.used, before);
    tiny_unload(&tiny);
}

MP_TEST(models_vit_large_images_run_in_parts) {
    for (int threads = 1; threads <= 2; threads++) {
        check_large("dinov2", threads);
        check_large("siglip", threads);
    }
}

/* Images of each item in a step that may take as long as `room` images; -1 for an item that is not in it. */
static void plan_of(tiny_model *tiny, mp_item **items, int n, uint64_t room, int *images) {
    mp_vit *model = (mp_vit *)tiny->model;
    atomic_store(&model->mega_ns, 1000);
    const uint64_t one_ns = mp_vit_ns(model, mp_vit_image_ops(model, GRID, GRID, !model->attention_pool));
    mp_plan plan = {0};
    tiny->engine->ops->plan(tiny->engine, items, n, room * one_ns, &plan);
    uint64_t planned = 0;
    for (int i = 0; i < n; i++) {
        images[i] = -1;
        for (int k = 0; k < plan.count; k++)
            if (plan.items[k] == items[i]) {
                images[i] = (int)plan.amount[k];
                planned += plan.amount[k];
            }
    }
    MP_CHECK_INT(plan.cost_ns, planned * one_ns);
}

/* Images of one step whose grids differ in one direction only. */
MP_TEST(models_vit_grids_of_a_step) {
    static const int32_t sides[][2] = {{6, 7}, {6, 7}, {6, 8}, {7, 7}, {8, 6}, {GRID, 7}, {6, GRID}, {7, 6}};
    enum { COUNT = sizeof sides / sizeof *sides };
    static test_images all;
    static float alone[COUNT * WIDTH], together[COUNT * WIDTH];
    mp_test_random random = {8};
    for (int i = 0; i < COUNT; i++) {
        for (int side = 0; side < 2; side++)
            all.sizes[2 * i + side] = PATCH * sides[i][side];
        all.offsets[i + 1] = all.offsets[i] + 3 * (int64_t)all.sizes[2 * i] * all.sizes[2 * i + 1];
        for (int64_t b = all.offsets[i]; b < all.offsets[i + 1]; b++)
            all.pixels[b] = (uint8_t)mp_test_random_u64(&random);
    }
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    compute_all(&tiny);
    for (int i = 0; i < COUNT; i++) {
        tiny_trim(&tiny); /* without the positions of the image before */
        MP_CHECK_INT(run(&tiny, &all, i, 1, UINT64_MAX, alone + i * WIDTH), MP_OUTCOME_DONE);
    }
    for (int i = 0; i < COUNT; i++)
        for (int k = 0; k < i; k++)
            MP_CHECK(memcmp(alone + i * WIDTH, alone + k * WIDTH, WIDTH * sizeof(float)) != 0);
    for (int first = 0; first < COUNT; first++) { /* the first grid has the table of positions */
        MP_CHECK_INT(run(&tiny, &all, first, COUNT - first, UINT64_MAX, together), MP_OUTCOME_DONE);
        MP_CHECK(memcmp(alone + first * WIDTH, together, (size_t)(COUNT - first) * WIDTH * sizeof(float)) == 0);
    }
    tiny_unload(&tiny);
}

/* Requests share the time of a step: each gets an equal share of the time that is left, but at least a group of 512
 * rows if there is as much. */
MP_TEST(models_vit_plan_shares_a_step) {
    enum { MANY = 60, FEW = 3, BYTES = 3 * PATCH * GRID * PATCH * GRID };
    static uint8_t pixels[MANY * BYTES];
    int32_t sizes[2 * MANY];
    int images[2];
    tiny_model tiny;
    mp_item item[3];
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    for (int i = 0; i < 2 * MANY; i++)
        sizes[i] = PATCH * GRID;
    for (int i = 0; i < 3; i++) {
        mp_error error;
        mp_image_embedding_request *call;
        const int count = i == 1 ? FEW : MANY;
        MP_CHECK_OK(make_image_embedding_request(count, sizes, pixels, (int64_t)count * BYTES, &call, &error), &error);
        check_item(&tiny, &item[i], call);
    }
    static const struct {
        int first, second, room, images[2];
    } cases[] = {{0, 2, 80, {40, 40}}, {0, 1, 80, {40, FEW}}, {1, 0, 40, {FEW, 37}}, {1, 2, 100, {FEW, MANY}},
                 {0, 2, 5, {5, -1}},   {0, 2, 1, {1, -1}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mp_item *items[] = {&item[cases[i].first], &item[cases[i].second]};
        plan_of(&tiny, items, 2, (uint64_t)cases[i].room, images);
        for (int k = 0; k < 2; k++)
            if (images[k] != cases[i].images[k])
                MP_FAIL("case %d: item %d has %d images, expected %d", (int)i, k, images[k], cases[i].images[k]);
    }
    for (int i = 0; i < 3; i++) {
        tiny.engine->ops->retire(tiny.engine, &item[i]);
        mp_request_destroy(item[i].request);
    }
    tiny_unload(&tiny);
}

/* Images that would leave threads without work are not planned: the next step has more images, or one image for all
 * threads. */
MP_TEST(models_vit_plan_keeps_threads_busy) {
    enum { ALL = 9, BYTES = 3 * PATCH * GRID * PATCH * GRID };
    static const struct {
        int threads, total, room, planned;
    } cases[] = {{2, 8, 3, 2}, {2, 8, 4, 4}, {2, 8, 5, 4}, {2, 3, 9, 2}, {2, 1, 9, 1}, {2, 2, 1, 1}, {2, 4, 9, 4},
                 {3, 8, 5, 3}, {3, 5, 9, 5}, {3, 4, 9, 3}, {3, 8, 2, 2}, {1, 8, 3, 3}};
    static uint8_t pixels[ALL * BYTES];
    int32_t sizes[2 * ALL];
    for (int i = 0; i < 2 * ALL; i++)
        sizes[i] = PATCH * GRID;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tiny_model tiny;
        mp_item item, *items[] = {&item};
        mp_image_embedding_request *call;
        mp_error error;
        mp_outcome outcomes[MP_PLAN_MAX];
        int images;
        tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, cases[i].threads);
        MP_CHECK_OK(make_image_embedding_request(ALL, sizes, pixels, ALL * BYTES, &call, &error), &error);
        check_item(&tiny, &item, call);
        mp_plan plan = {.count = 1, .items = {&item}, .amount = {1}};
        tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes); /* the engine learns the number of threads */
        item.cursor = (uint32_t)(ALL - cases[i].total);
        plan_of(&tiny, items, 1, (uint64_t)cases[i].room, &images);
        if (images != cases[i].planned)
            MP_FAIL("case %d: %d images, expected %d", (int)i, images, cases[i].planned);
        tiny.engine->ops->retire(tiny.engine, &item);
        mp_request_destroy(item.request);
        tiny_unload(&tiny);
    }
}

/* A step without other requests may take four times as long, but not if it computes a part of a large image: a request
 * that arrives would have to wait for the end of the step. */
MP_TEST(models_vit_large_images_delay_no_other_request) {
    enum { STEP_NS = 25000000 };
    static test_images all;
    tiny_model tiny;
    mp_plan plan = {0};
    mp_item item, *items[] = {&item};
    make_images(&all, false);
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    mp_vit *model = (mp_vit *)tiny.model;
    model->most_ops = 1;
    atomic_store(&model->mega_ns, 100000000);
    MP_CHECK(mp_vit_ns(model, mp_vit_image_ops(model, GRID, GRID, !model->attention_pool)) > 4 * STEP_NS);
    check_item(&tiny, &item, make_call(&all, 0, 1));
    tiny.engine->ops->plan(tiny.engine, items, 1, 4 * STEP_NS, &plan);
    MP_CHECK_INT(plan.cost_ns, STEP_NS);
    tiny.engine->ops->plan(tiny.engine, items, 1, STEP_NS / 2, &plan);
    MP_CHECK_INT(plan.cost_ns, STEP_NS / 2);
    tiny.engine->ops->retire(tiny.engine, &item);
    mp_request_destroy(item.request);
    tiny_unload(&tiny);
}

static test_images sweep_images;

static mp_status make_two(mp_request **call, mp_error *error) {
    mp_image_embedding_request *made;
    MP_TRY(make_image_embedding_request(2, sweep_images.sizes, sweep_images.pixels, sweep_images.offsets[2],
                                        &made, error));
    *call = &made->base;
    return MP_OK;
}

static void compare_two(const mp_request *first, const mp_request *second) {
    const mp_image_embedding_request *a = (const mp_image_embedding_request *)first,
                                     *b = (const mp_image_embedding_request *)second;
    MP_CHECK(memcmp(a->vectors, b->vectors, 2 * WIDTH * sizeof(float)) == 0);
}

MP_TEST_SECONDS(models_vit_survives_failing_allocations, 60) {
    mp_error error;
    make_images(&sweep_images, true);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    tiny_life life = {.spec = make_spec("dinov2", false), .compute = MP_COMPUTE_F32,
                      .make = make_two, .compare = compare_two};
    mp_test_alloc_sweep(tiny_live, &life);
    life.budget_ns = 1; /* compute the images in parts */
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
}
