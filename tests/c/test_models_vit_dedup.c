/* Image transformers compute identical images once: within a step, shortly after each other, and while one of them is
 * computed in parts. Results have the bits of separate computations. */
#include <stdatomic.h>
#include <time.h>

#include "vit_fixture.h"

enum { PIXELS = 3 * PATCH * GRID * PATCH * GRID };

/* Make a request of images of the model's size, each given by its index in `all`. */
static void make_item(tiny_model *tiny, const test_images *all, const int *picks, int count, mp_item *item) {
    static uint8_t pixels[128 * PIXELS];
    static int32_t sizes[256];
    mp_image_embedding_request *call;
    mp_error error;
    MP_CHECK(count <= 128);
    for (int i = 0; i < count; i++) {
        memcpy(pixels + i * PIXELS, all->pixels + all->offsets[picks[i]], PIXELS);
        sizes[2 * i] = sizes[2 * i + 1] = PATCH * GRID;
    }
    MP_CHECK_OK(make_image_embedding_request(count, sizes, pixels, (int64_t)count * PIXELS, &call, &error), &error);
    check_item(tiny, item, call);
}

static mp_image_embedding_request *request_of(const mp_item *item) {
    return (mp_image_embedding_request *)item->request;
}

/* Change the options of an item's request, and check it again. */
static void set_options(tiny_model *tiny, mp_item *item, int dimensions, int normalize, int output) {
    mp_error error;
    uint64_t cost;
    request_of(item)->dimensions = dimensions;
    request_of(item)->normalize = (int8_t)normalize;
    request_of(item)->output = (uint8_t)output;
    mp_free(request_of(item)->vectors);
    request_of(item)->vectors = NULL;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, item->request, &cost, &item->total, &error), &error);
}

/* Run the whole requests in one step. */
static void serve(tiny_model *tiny, mp_item *items, int count, mp_outcome *outcomes) {
    mp_plan plan = {.count = count};
    for (int i = 0; i < count; i++) {
        plan.items[i] = &items[i];
        plan.amount[i] = items[i].total;
    }
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
}

static void drop(tiny_model *tiny, mp_item *items, int count) {
    for (int i = 0; i < count; i++) {
        tiny->engine->ops->retire(tiny->engine, &items[i]);
        mp_request_destroy(items[i].request);
    }
}

/* Compute every image alone, without recent results. */
static void compute_alone(tiny_model *tiny, const test_images *all, float *alone) {
    mp_recent *recent = recent_of(tiny);
    const size_t most = recent->most_bytes;
    recent->most_bytes = 0;
    for (int i = 0; i < IMAGES; i++)
        MP_CHECK_INT(run(tiny, all, i, 1, UINT64_MAX, alone + i * WIDTH), MP_OUTCOME_DONE);
    MP_CHECK(mp_vit_engine_dedup(tiny->engine)->shared == 0 && recent->hits == 0 && recent->charged == 0);
    recent->most_bytes = most;
}

MP_TEST(models_vit_computes_identical_images_once) {
    static test_images all;
    static float alone[IMAGES * WIDTH];
    make_images(&all, false);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 2);
    const mp_dedup_table *dedup = mp_vit_engine_dedup(tiny.engine);
    compute_alone(&tiny, &all, alone);

    /* within and between requests: image 9 occurs 40 times; 32 share its first computation and 8 its second */
    int picks[2][30], nines = 0, others = 0;
    bool seen[IMAGES] = {false};
    mp_item items[7];
    mp_outcome outcomes[MP_PLAN_MAX];
    for (int r = 0; r < 2; r++) {
        for (int i = 0; i < 30; i++) {
            const int pick = picks[r][i] = i % 3 ? 9 : i / 3 % 9;
            nines += pick == 9;
            others += pick != 9 && seen[pick];
            seen[pick] = true;
        }
        make_item(&tiny, &all, picks[r], 30, &items[r]);
    }
    MP_CHECK_INT(nines, 40);
    serve(&tiny, items, 2, outcomes);
    MP_CHECK_INT(dedup->shared, nines - 2 + others);
    MP_CHECK_INT(tiny.engine->work.dedup_hits, dedup->shared);
    for (int r = 0; r < 2; r++) {
        MP_CHECK_INT(outcomes[r], MP_OUTCOME_DONE);
        MP_CHECK_INT(request_of(&items[r])->done, 30);
        for (int i = 0; i < 30; i++)
            MP_CHECK(memcmp(request_of(&items[r])->vectors + i * WIDTH, alone + picks[r][i] * WIDTH, WIDTH * 4) == 0);
    }
    drop(&tiny, items, 2);
    tiny_unload(&tiny);
}

/* Images with different postprocessing share nothing, in a step and after it; neither do requests for token vectors. */
MP_TEST(models_vit_options_make_images_differ) {
    static const int options[7][3] = {{0, 1, MP_IMAGE_POOLED},  {0, 0, MP_IMAGE_POOLED},  {20, 1, MP_IMAGE_POOLED},
                                      {20, 0, MP_IMAGE_POOLED}, {21, 1, MP_IMAGE_POOLED}, {0, 1, MP_IMAGE_TOKENS},
                                      {0, 1, MP_IMAGE_TOKENS}};
    static test_images all;
    const int pick = 5;
    make_images(&all, false);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    const mp_dedup_table *dedup = mp_vit_engine_dedup(tiny.engine);
    mp_recent *recent = recent_of(&tiny);
    mp_item items[7];
    mp_outcome outcomes[MP_PLAN_MAX];
    recent->keep_ns = UINT64_MAX;
    for (int i = 0; i < 7; i++) {
        make_item(&tiny, &all, &pick, 1, &items[i]);
        set_options(&tiny, &items[i], options[i][0], options[i][1], options[i][2]);
    }
    serve(&tiny, items, 7, outcomes);
    MP_CHECK(dedup->shared == 0 && recent->hits == 0 && recent->count == 5);
    MP_CHECK(memcmp(request_of(&items[0])->vectors, request_of(&items[1])->vectors, WIDTH * 4) != 0);
    for (int i = 0; i < 7; i++) {
        mp_item again;
        MP_CHECK_INT(outcomes[i], MP_OUTCOME_DONE);
        make_item(&tiny, &all, &pick, 1, &again);
        set_options(&tiny, &again, options[i][0], options[i][1], options[i][2]);
        mp_outcome outcome[MP_PLAN_MAX];
        serve(&tiny, &again, 1, outcome);
        MP_CHECK_INT(outcome[0], MP_OUTCOME_DONE);
        MP_CHECK_INT(recent->hits, i < 5 ? i + 1 : 5);
        MP_CHECK(memcmp(request_of(&again)->vectors, request_of(&items[i])->vectors,
                        (size_t)request_of(&again)->width * 4) == 0);
        drop(&tiny, &again, 1);
    }

    /* the same bytes in another shape, and a changed byte at the end, make another image */
    mp_image_embedding_request *shapes[3];
    const int32_t sizes[3][2] = {{PATCH, 2 * PATCH}, {2 * PATCH, PATCH}, {2 * PATCH, PATCH}};
    const uint64_t before = recent->hits;
    for (int i = 0; i < 3; i++) {
        mp_error error;
        const int64_t bytes = 3 * 2 * PATCH * PATCH;
        all.pixels[bytes - 1] ^= i == 2;
        MP_CHECK_OK(make_image_embedding_request(1, sizes[i], all.pixels, bytes, &shapes[i], &error), &error);
        MP_CHECK_INT(run_call(&tiny, &shapes[i]->base, UINT64_MAX), MP_OUTCOME_DONE);
        MP_CHECK(i == 0 || memcmp(shapes[i]->vectors, shapes[i - 1]->vectors, WIDTH * 4) != 0);
    }
    MP_CHECK_INT(recent->hits, before);
    for (int i = 0; i < 3; i++)
        mp_request_destroy(&shapes[i]->base);
    drop(&tiny, items, 7);
    tiny_unload(&tiny);
}

/* Run images [first, first + count), one request and one step each; check the vectors. */
static void compute_each(tiny_model *tiny, const test_images *all, int first, int count, const float *alone) {
    float out[WIDTH];
    for (int i = first; i < first + count; i++) {
        MP_CHECK_INT(run(tiny, all, i, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
        MP_CHECK(memcmp(out, alone + i * WIDTH, sizeof out) == 0);
    }
}

MP_TEST(models_vit_remembers_recent_results) {
    enum { EACH = PIXELS + WIDTH * 4 };
    static test_images all;
    static float alone[IMAGES * WIDTH], out[IMAGES * WIDTH];
    make_images(&all, false);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("siglip", false), MP_COMPUTE_I8, 1);
    mp_recent *recent = recent_of(&tiny);
    compute_alone(&tiny, &all, alone);
    tiny_trim(&tiny);
    const uint64_t bare = tiny.budget.used;
    MP_CHECK(recent->keep_ns == 100000000 && recent->most_bytes == 1 << 20);
    recent->keep_ns = UINT64_MAX;
    MP_CHECK_INT(run(&tiny, &all, 0, IMAGES, UINT64_MAX, out), MP_OUTCOME_DONE);
    MP_CHECK(recent->hits == 0 && recent->count == IMAGES);
    MP_CHECK(recent->charged > MP_DEDUP_BYTES && recent->charged < 2 * MP_DEDUP_BYTES);
    MP_CHECK_INT(tiny.model->ops->bytes(tiny.model), ((mp_vit *)tiny.model)->charged + recent->charged);
    compute_each(&tiny, &all, 0, IMAGES, alone);
    MP_CHECK_INT(recent->hits, IMAGES);

    /* a result older than `keep_ns` is computed again */
    recent->keep_ns = 1000000;
    const struct timespec pause = {.tv_nsec = 2000000};
    nanosleep(&pause, NULL);
    compute_each(&tiny, &all, 3, 1, alone);
    MP_CHECK_INT(recent->hits, IMAGES);

    /* trim frees the memory and drops all results */
    recent->keep_ns = UINT64_MAX;
    MP_CHECK(tiny_trim(&tiny) > 0);
    MP_CHECK(tiny.budget.used == bare && recent->charged == 0);
    compute_each(&tiny, &all, 3, 1, alone);
    MP_CHECK_INT(recent->hits, IMAGES);
    compute_each(&tiny, &all, 3, 1, alone);
    MP_CHECK_INT(recent->hits, IMAGES + 1);

    /* without memory the engine keeps nothing, and no request fails */
    mp_recent_trim(recent);
    tiny.budget.limit = tiny.budget.used;
    compute_each(&tiny, &all, 7, 1, alone);
    compute_each(&tiny, &all, 7, 1, alone);
    MP_CHECK(recent->hits == IMAGES + 1 && recent->count == 0);
    tiny_unload(&tiny);
}

/* Serve one image of a tenant with an engine of the model. Returns true if the image was not computed for it. */
static bool is_reused(tiny_model *tiny, mp_engine *engine, const test_images *all, int image, uint64_t tenant,
                      const float *expected) {
    mp_item item;
    mp_outcome outcome[MP_PLAN_MAX];
    mp_engine *const own = tiny->engine;
    const uint64_t before = engine->work.dedup_hits;
    tiny->engine = engine;
    make_item(tiny, all, &image, 1, &item);
    item.tenant = tenant;
    serve(tiny, &item, 1, outcome);
    MP_CHECK_INT(outcome[0], MP_OUTCOME_DONE);
    MP_CHECK(memcmp(request_of(&item)->vectors, expected, WIDTH * 4) == 0);
    drop(tiny, &item, 1);
    tiny->engine = own;
    return engine->work.dedup_hits > before;
}

/* All engines of a model share its recent vectors; tenants do not. */
MP_TEST(models_vit_recent_vectors_are_of_one_model_and_tenant) {
    static const uint64_t tenants[] = {0, 1, 1ull << 32};
    static test_images all;
    static float alone[IMAGES * WIDTH];
    mp_engine *engines[2];
    mp_error error;
    make_images(&all, false);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    compute_alone(&tiny, &all, alone);
    recent_of(&tiny)->keep_ns = UINT64_MAX;
    engines[0] = tiny.engine;
    MP_CHECK_OK(tiny.model->ops->engine(tiny.model, &tiny.budget, &engines[1], &error), &error);
    for (int i = 0; i < 120; i++) {
        const int image = i / 2 % IMAGES;
        MP_CHECK_INT(is_reused(&tiny, engines[(i + i / 4) % 2], &all, image, 0, alone + image * WIDTH),
                     i % 2 || i / 2 >= IMAGES);
    }
    engines[1]->ops->destroy(engines[1]);
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 3; i++)
            MP_CHECK_INT(is_reused(&tiny, tiny.engine, &all, 0, tenants[i], alone), round || i == 0);
    mp_item items[6];
    mp_outcome outcomes[MP_PLAN_MAX];
    tiny_trim(&tiny);
    const uint64_t shared = mp_vit_engine_dedup(tiny.engine)->shared;
    for (int i = 0; i < 6; i++) {
        make_item(&tiny, &all, &(int){0}, 1, &items[i]);
        items[i].tenant = tenants[i % 3];
    }
    serve(&tiny, items, 6, outcomes);
    MP_CHECK_INT(mp_vit_engine_dedup(tiny.engine)->shared - shared, 3);
    drop(&tiny, items, 6);
    tiny_unload(&tiny);
}

/* A vector that is not finite fails all requests that share it, and no later one. A request that was cancelled before
 * the step gets no vector and computes none. */
MP_TEST(models_vit_nan_is_shared_but_not_remembered) {
    static test_images all;
    const int picks[2] = {3, 4};
    make_images(&all, false);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    const mp_dedup_table *dedup = mp_vit_engine_dedup(tiny.engine);
    mp_recent *recent = recent_of(&tiny);
    recent->keep_ns = UINT64_MAX;
    float *class_token = ((mp_vit *)tiny.model)->class_token, whole = *class_token;
    mp_item items[4];
    mp_outcome outcomes[MP_PLAN_MAX];
    for (int round = 0; round < 2; round++) {
        *class_token = round ? whole : NAN;
        for (int r = 0; r < 4; r++)
            make_item(&tiny, &all, picks, 2 - r % 2, &items[r]);
        atomic_store(&items[0].cancelled, 1);
        serve(&tiny, items, 4, outcomes);
        MP_CHECK(outcomes[0] == MP_OUTCOME_MORE && items[0].cursor == 0);
        for (int r = 1; r < 4; r++) {
            MP_CHECK_INT(outcomes[r], round ? MP_OUTCOME_DONE : MP_OUTCOME_FAILED);
            MP_CHECK(round || items[r].error.code == MP_NUMERIC);
        }
        drop(&tiny, items, 4);
        MP_CHECK(dedup->shared == 2 * (uint64_t)(round + 1) && recent->hits == 0 && recent->count == 2u * round);
    }
    tiny_unload(&tiny);
}

/* Plan and run one step with the items that are not done. Returns false if all are done. */
static bool take_step(tiny_model *tiny, mp_item *items, int count, int *steps) {
    mp_item *left[8];
    mp_plan plan;
    mp_outcome outcomes[MP_PLAN_MAX];
    int n = 0;
    for (int i = 0; i < count; i++) {
        mp_item *item = &items[(i + *steps) % count]; /* the items take turns */
        if (item->cursor < item->total && item->state)
            left[n++] = item;
    }
    if (n == 0)
        return false;
    tiny->engine->ops->plan(tiny->engine, left, n, 0, &plan);
    MP_CHECK_INT(plan.count, 1);
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    MP_CHECK(outcomes[0] == MP_OUTCOME_MORE || outcomes[0] == MP_OUTCOME_DONE);
    MP_CHECK(++*steps < 100000);
    return true;
}

/* While an image is computed in parts, requests with the same image wait for its vector. If its request is cancelled,
 * one of them computes the image. A different image, here the second one of the same requests, gets its turns
 * meanwhile. */
MP_TEST(models_vit_large_images_are_computed_once) {
    enum { SAME = 5, ALL = SAME + 1 };
    static test_images all;
    static float alone[IMAGES * WIDTH];
    const int pick[2] = {1, 2};
    make_images(&all, false);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 2);
    mp_recent *recent = recent_of(&tiny);
    compute_alone(&tiny, &all, alone);
    mp_vit *model = (mp_vit *)tiny.model;
    model->grain = 5;
    model->most_ops = 1;
    recent->keep_ns = UINT64_MAX;
    int steps[3] = {0};
    for (int round = 0; round < 3; round++) { /* one request; six requests; six requests of which one is cancelled */
        mp_item items[ALL] = {0};
        tiny_trim(&tiny);
        const uint64_t before = tiny.engine->work.dedup_hits;
        for (int i = 0; i < (round ? ALL : 1); i++)
            make_item(&tiny, &all, i < SAME ? pick : pick + 1, i < SAME ? 2 : 1, &items[i]);
        while (take_step(&tiny, items, round ? ALL : 1, &steps[round]))
            if (round == 2 && steps[2] == 7 && items[0].state) {
                MP_CHECK_INT(items[0].cursor, 0); /* the first request is within its first image */
                tiny.engine->ops->retire(tiny.engine, &items[0]);
            }
        for (int i = round == 2; i < (round ? ALL : 1); i++)
            for (int k = 0; k < (i < SAME ? 2 : 1); k++)
                MP_CHECK(memcmp(request_of(&items[i])->vectors + k * WIDTH,
                                alone + pick[i < SAME ? k : 1] * WIDTH, WIDTH * 4) == 0);
        MP_CHECK_INT(tiny.engine->work.dedup_hits - before, round == 0 ? 0 : 2 * SAME - 1 - 2 * (round == 2));
        drop(&tiny, items, round ? ALL : 1);
    }
    MP_CHECK(steps[0] > 20);
    /* the steps of the two images, and a step for each vector that is shared */
    MP_CHECK_INT(steps[1], steps[0] + 2 * SAME - 1);
    MP_CHECK(steps[2] <= steps[0] + 2 * SAME - 3 + 7);
    tiny_unload(&tiny);
}

/* Requests of different tenants wait for no image of each other: each computes its own. */
MP_TEST(models_vit_large_images_are_computed_for_each_tenant) {
    static test_images all;
    static float alone[IMAGES * WIDTH];
    make_images(&all, false);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    compute_alone(&tiny, &all, alone);
    ((mp_vit *)tiny.model)->grain = 5;
    ((mp_vit *)tiny.model)->most_ops = 1;
    recent_of(&tiny)->keep_ns = UINT64_MAX;
    int steps[3] = {0};
    for (int tenants = 1; tenants <= 2; tenants++) {
        mp_item items[2] = {0};
        tiny_trim(&tiny);
        for (int i = 0; i < tenants; i++) {
            make_item(&tiny, &all, &(int){1}, 1, &items[i]);
            items[i].tenant = (uint64_t)i << 32;
        }
        while (take_step(&tiny, items, tenants, &steps[tenants])) {
        }
        for (int i = 0; i < tenants; i++)
            MP_CHECK(memcmp(request_of(&items[i])->vectors, alone + WIDTH, WIDTH * 4) == 0);
        drop(&tiny, items, tenants);
    }
    MP_CHECK(steps[1] > 20);
    MP_CHECK_INT(steps[2], 2 * steps[1]);
    MP_CHECK_INT(tiny.engine->work.dedup_hits, 0);
    tiny_unload(&tiny);
}

/* A request does not wait for the same image of a request that no step continues, such as a paused one. */
MP_TEST(models_vit_large_images_do_not_wait_for_paused_requests) {
    static test_images all;
    static float alone[IMAGES * WIDTH];
    const int pick = 1;
    make_images(&all, false);
    tiny_model tiny;
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    compute_alone(&tiny, &all, alone);
    ((mp_vit *)tiny.model)->grain = 5;
    ((mp_vit *)tiny.model)->most_ops = 1;
    mp_item items[2];
    int steps = 0;
    for (int i = 0; i < 2; i++)
        make_item(&tiny, &all, &pick, 1, &items[i]);
    MP_CHECK(take_step(&tiny, items, 1, &steps) && items[0].cursor == 0);
    while (take_step(&tiny, items + 1, 1, &steps)) {
    }
    MP_CHECK(items[0].cursor == 0 && items[1].cursor == 1 && steps > 10);
    while (take_step(&tiny, items, 1, &steps)) {
    }
    for (int i = 0; i < 2; i++)
        MP_CHECK(memcmp(request_of(&items[i])->vectors, alone + pick * WIDTH, WIDTH * 4) == 0);
    drop(&tiny, items, 2);
    tiny_unload(&tiny);
}
