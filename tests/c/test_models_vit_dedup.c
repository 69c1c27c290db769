/* Image transformers compute identical images once: within a step, and while one of them is computed in parts. Results
 * have the bits of separate computations. */
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

/* Plan and run one step with the items that are not done. Returns false if all are done. */
static bool take_step(tiny_model *tiny, mp_item *items, int count, int *steps) {
    mp_item *left[8];
    mp_plan plan = {0};
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
