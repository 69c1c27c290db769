/* test_models_vit_slots.c: large images take over slots of images whose requests are paused. */
#include "vit_fixture.h"

/* Four large images keep their progress. If all of their requests are paused, another request takes over the first slot
 * instead of waiting. The image that lost its slot starts again, and its bits are unchanged. */
MP_TEST(models_vit_large_images_take_over_slots) {
    enum { SLOTS = 4, REQUESTS = SLOTS + 2, STEPS = 10000 };
    static test_images all;
    static float alone[REQUESTS][WIDTH];
    tiny_model tiny;
    mp_plan plan;
    mp_item item[REQUESTS];
    mp_outcome outcomes[MP_PLAN_MAX];
    make_images(&all, true);
    tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, 1);
    compute_all(&tiny);
    for (int i = 0; i < REQUESTS; i++)
        MP_CHECK_INT(run(&tiny, &all, i, 1, UINT64_MAX, alone[i]), MP_OUTCOME_DONE);
    mp_vit *model = (mp_vit *)tiny.model;
    cut(&tiny);
    model->most_ops = 1;
    for (int i = 0; i < REQUESTS; i++)
        check_item(&tiny, &item[i], make_call(&all, i, 1));
    for (int i = 0; i < REQUESTS; i++) { /* each in a plan of its own: the others are paused */
        mp_item *one = &item[i];
        atomic_store(&model->mega_ns, 1); /* one part per step */
        tiny.engine->ops->plan(tiny.engine, &one, 1, 0, &plan);
        MP_CHECK(plan.count == 1 && plan.items[0] == one && plan.amount[0] == 1 && plan.barrier_bound);
        tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
        MP_CHECK_INT(outcomes[0], MP_OUTCOME_MORE);
    }
    for (int i = 0; i < REQUESTS; i++) {
        mp_item *one = &item[i];
        for (int steps = 0; one->cursor == 0; steps++) {
            MP_CHECK(steps < STEPS);
            tiny.engine->ops->plan(tiny.engine, &one, 1, 0, &plan);
            MP_CHECK_INT(plan.count, 1);
            tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
        }
        MP_CHECK_INT(outcomes[0], MP_OUTCOME_DONE);
        MP_CHECK(memcmp(((mp_image_embedding_request *)one->request)->vectors, alone[i], sizeof alone[i]) == 0);
        tiny.engine->ops->retire(tiny.engine, one);
        mp_request_destroy(one->request);
    }
    tiny_unload(&tiny);
}
