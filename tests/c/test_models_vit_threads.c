/* test_models_vit_threads.c: threads of image transformers: late ones change no bit, plans ask for as many as there is
 * work, and steps learn the time that plans rely on. */
#include "estimate_fixture.h"
#include "ranges_fixture.h"
#include "vit_fixture.h"
#include "models/threads.h"

/* Images computed at once, and in parts of layers, one in each step. */
MP_TEST(models_vit_late_threads) {
    static const family families[] = {{"dinov2", true}, {"dinov2_with_registers", false}, {"siglip", false}};
    static test_images all;
    for (int f = 0; f < 3; f++) {
        make_images(&all, f < 2);
        for (int c = 0; c < 2; c++)
            check_late_threads(&(grouped){IMAGES, WIDTH, c ? MP_COMPUTE_I8 : MP_COMPUTE_F32, make_family, &families[f],
                                          &all, run, c ? cut : compute_all},
                               1, 2, c ? 1 : UINT64_MAX);
    }
}

/* Heads of 8 outputs: threads that attend need queries that other threads have computed. */
static mp_spec *make_small_heads(const void *arg) {
    mp_spec *base = make_family(arg);
    const mp_value heads = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = 6};
    mp_spec *spec = spec_with(base, "siglip.vision.attention.head_count", &heads);
    mp_spec_unpin(base);
    return spec;
}

MP_TEST(models_vit_late_threads_that_pool) {
    static const family pools = {"siglip", false};
    static test_images all;
    make_images(&all, false);
    for (int c = 0; c < 2; c++)
        check_late_threads(&(grouped){IMAGES, WIDTH, MP_COMPUTE_F32, make_small_heads, &pools, &all, run,
                                      c ? cut : compute_all},
                           1, 2, c ? 1 : UINT64_MAX);
}

/* A single image gets the threads that its rows are worth, and many images one thread each, at most 256. */
MP_TEST(models_vit_plan_threads) {
    enum { BARRIERS = 10 * LAYERS + 4, MANY = 300, BYTES = 3 * PATCH * PATCH };
    static uint8_t pixels[MANY * BYTES];
    int32_t sizes[2 * MANY];
    tiny_model tiny;
    mp_error error;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    mp_vit *model = (mp_vit *)tiny.model;
    make_weights_large(&model->base.facts, BARRIERS);
    for (int i = 0; i < 2 * MANY; i++)
        sizes[i] = PATCH;
    for (int n = 1; n <= MANY; n += MANY - 1) {
        mp_item item, *items[1] = {&item};
        mp_image_embedding_request *call;
        mp_plan plan;
        MP_CHECK_OK(make_image_embedding_request(n, sizes, pixels, n * BYTES, &call, &error), &error);
        check_item(&tiny, &item, call);
        tiny.engine->ops->plan(tiny.engine, items, 1, UINT64_MAX, &plan);
        MP_CHECK_INT(plan.amount[0], n);
        MP_CHECK_INT(plan.barrier_bound, n == 1);
        MP_CHECK_INT(plan.threads, n > 1 ? 256 : mp_threads_worth(&model->base.facts, 2, BARRIERS));
        MP_CHECK(n > 1 || (plan.threads >= 199 && plan.threads <= 201));
        tiny.engine->ops->retire(tiny.engine, &item);
        mp_request_destroy(item.request);
    }
    tiny_unload(&tiny);
}

static void run_one(void *arg) {
    static test_images all;
    float out[WIDTH];
    make_images(&all, true);
    MP_CHECK_INT(run(arg, &all, 0, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
}

/* A step updates the time of a million operations to a quarter. */
MP_TEST(models_vit_learns_the_time_of_operations) {
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    compute_all(&tiny);
    _Atomic uint64_t *estimate = &((mp_vit *)tiny.model)->mega_ns;
    atomic_store(estimate, OLD_ESTIMATE);
    mp_vit_learn((mp_vit *)tiny.model, 1000000, 1000);
    check_share(estimate, 0.75, 1);
    check_least(estimate, run_one, &tiny);
    tiny_unload(&tiny);
}

/* 3 million operations in 6,000 ns are 2,000 ns per million. No operations change nothing, and the time has an upper
 * bound. */
MP_TEST(models_vit_learns_the_exact_time) {
    enum { SLOWEST = 100000000 };
    mp_vit model = {.mega_ns = 1000};
    mp_vit_learn(&model, 3000000, 6000);
    MP_CHECK_INT(model.mega_ns, (3 * 1000 + 2000) / 4 + 1);
    mp_vit_learn(&model, 0, 6000);
    MP_CHECK_INT(model.mega_ns, 1251);
    mp_vit_learn(&model, 1, UINT64_MAX / 2);
    MP_CHECK_INT(model.mega_ns, (3 * 1251 + (uint64_t)SLOWEST) / 4 + 1);
    model.mega_ns = 1000;
    mp_vit_learn(&model, 1000, 100500); /* just above the bound */
    MP_CHECK_INT(model.mega_ns, (3 * 1000 + (uint64_t)SLOWEST) / 4 + 1);
    model.mega_ns = 1000;
    mp_vit_learn(&model, 1000, 99999); /* just below it */
    MP_CHECK_INT(model.mega_ns, (3 * 1000 + 99999000) / 4 + 1);
}

/* The operations of a step are those that were predicted for its images. */
MP_TEST(models_vit_learns_the_time_of_a_step) {
    static test_images all;
    tiny_model tiny;
    mp_item item = {0};
    mp_error error;
    uint64_t cost;
    make_images(&all, true);
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    compute_all(&tiny);
    mp_vit *model = (mp_vit *)tiny.model;
    item.request = &make_call(&all, 0, 1)->base;
    MP_CHECK_OK(tiny.model->ops->check(tiny.model, item.request, &cost, &item.total, &error), &error);
    MP_CHECK_OK(tiny.engine->ops->admit(tiny.engine, &item, &error), &error);
    const uint64_t ops = mp_vit_image_ops(model, GRID, GRID, true);
    check_learned(&model->mega_ns, 4000, ops / 1000, (3 * 4000 + ops / 1000 * 1000000 / ops) / 4 + 1,
                  &(planned_step){&tiny, &item, 1, 0});
    tiny.engine->ops->retire(tiny.engine, &item);
    mp_request_destroy(item.request);
    tiny_unload(&tiny);
}

/* A step that is stopped learns nothing: its operations are not all done. */
MP_TEST(models_vit_learns_nothing_from_stopped_steps) {
    static const _Atomic int raised = 1;
    static test_images all;
    tiny_model tiny;
    mp_item item;
    mp_outcome outcomes[MP_PLAN_MAX];
    make_images(&all, true);
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    compute_all(&tiny);
    check_item(&tiny, &item, make_call(&all, 0, 1));
    mp_plan plan = {.count = 1, .items = {&item}, .amount = {1}};
    _Atomic uint64_t *estimate = &((mp_vit *)tiny.model)->mega_ns;
    for (int stopped = 1; stopped >= 0; stopped--) {
        atomic_store(estimate, OLD_ESTIMATE);
        tiny.lease.cancelled = stopped ? &raised : NULL;
        tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
        MP_CHECK_INT(outcomes[0], stopped ? MP_OUTCOME_MORE : MP_OUTCOME_DONE);
        MP_CHECK_INT(atomic_load(estimate) == OLD_ESTIMATE, stopped);
    }
    tiny.engine->ops->retire(tiny.engine, &item);
    mp_request_destroy(item.request);
    tiny_unload(&tiny);
}
