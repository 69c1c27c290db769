/* Image generation in worker processes: the same bytes in whichever process a request continues; false results. */
#include "isolation_scene.h"
#include "image_generation_fixture.h"
#include "test_isolation.h"

/* ---- real processes ---------------------------------------------------------------------------------------------- */

static uint64_t hash_without_isolation(bool flux) {
    tiny_model tiny;
    mp_error error;
    mp_item item = {0};
    tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 1);
    MP_CHECK_OK(make_call(flux, 2, &item.request, &error), &error);
    ((mp_image_generation_request *)item.request)->keep = false;
    serve_alone(&tiny, &item);
    const uint64_t hash = seen_hash(item.request);
    tiny.engine->ops->retire(tiny.engine, &item);
    mp_request_destroy(item.request);
    tiny_unload(&tiny);
    return hash;
}

/* Two processes take turns with the request, at seeded points within texts, denoising steps, previews and images. */
MP_TEST_SECONDS(isolation_generated_images_have_the_same_bytes_in_any_process, 120) {
    for (int flux = 0; flux < 2; flux++) {
        const uint64_t expected = hash_without_isolation(flux);
        mp_spec *spec = pipeline(flux);
        mp_isolation_options options = isolation_options("spec");
        mp_budget budget = {.limit = UINT64_MAX};
        mp_lease lease = {.threads = 1};
        mp_loader loader;
        mp_model *model;
        mp_engine *engine[2];
        mp_error error;
        MP_CHECK_OK(mp_isolation_loader(spec, MP_COMPUTE_F32, &options, &loader, &error), &error);
        MP_CHECK(loader.policy == NULL); /* no override: the capability's policy applies */
        MP_CHECK_OK(loader.ops->load(loader.self, &lease, &budget, NULL, &model, &error), &error);
        for (int i = 0; i < 2; i++)
            MP_CHECK_OK(model->ops->engine(model, &budget, &engine[i], &error), &error);
        for (int seed = 0; seed < 4; seed++) {
            mp_test_random random = {(uint64_t)seed};
            mp_item item = {0}, *items[1] = {&item};
            mp_plan plan = {0};
            mp_outcome outcomes[MP_PLAN_MAX] = {MP_OUTCOME_MORE};
            uint64_t cost;
            int moves = 0, which = 0;
            MP_CHECK_OK(make_call(flux, 2, &item.request, &error), &error);
            mp_image_generation_request *call = (mp_image_generation_request *)item.request;
            MP_CHECK_STATUS(model->ops->check(model, item.request, &cost, &item.total, &error), MP_UNSUPPORTED, &error);
            call->keep = false;
            MP_CHECK_OK(model->ops->check(model, item.request, &cost, &item.total, &error), &error);
            MP_CHECK_OK(engine[0]->ops->admit(engine[0], &item, &error), &error);
            while (outcomes[0] != MP_OUTCOME_DONE) {
                const uint64_t blocks = 12 + mp_test_random_u64(&random) % 30; /* a unit has at most 30 blocks */
                for (uint64_t i = 0; i < (seed ? blocks : 1000) && outcomes[0] != MP_OUTCOME_DONE; i++) {
                    engine[which]->ops->plan(engine[which], items, 1, 0, &plan);
                    engine[which]->ops->step(engine[which], &lease, &plan, outcomes);
                    if (engine[which]->lost(engine[which]))
                        MP_FAIL("lost: %s", engine[which]->lost(engine[which])->message);
                    MP_CHECK(outcomes[0] == MP_OUTCOME_MORE || outcomes[0] == MP_OUTCOME_DONE);
                }
                if (outcomes[0] == MP_OUTCOME_DONE)
                    break;
                engine[which]->ops->preempt(engine[which], &item);
                which = 1 - which;
                MP_CHECK(++moves < 200);
                MP_CHECK_OK(engine[which]->ops->admit(engine[which], &item, &error), &error);
            }
            MP_CHECK(seed == 0 || moves > 2);
            MP_CHECK_INT(call->steps_done, 2 * STEPS);
            MP_CHECK_INT(call->previews_done, 2);
            MP_CHECK_INT(call->images_done, 2);
            MP_CHECK(seen_hash(item.request) == expected);
            engine[which]->ops->retire(engine[which], &item);
            mp_request_destroy(item.request);
        }
        for (int i = 0; i < 2; i++)
            engine[i]->ops->destroy(engine[i]);
        model->ops->destroy(model);
        loader.ops->destroy(loader.self);
        mp_spec_unpin(spec);
        MP_CHECK_INT(budget.used, 0);
    }
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

enum { SIDE = 4, PIXELS = SIDE * SIDE * 3, LATENTS = 4, TOTAL = 3 };

/* Make a request for one image of two steps, with a preview between them. */
static mp_image_generation_request *small_call(void) {
    static const float times[] = {1000, 500}, sigmas[] = {1, 0.5f, 0}, noise[LATENTS];
    mp_image_generation_args args = {.width = SIDE,
                                     .height = SIDE,
                                     .n_images = 1,
                                     .n_steps = 2,
                                     .n_texts = 1,
                                     .times = times,
                                     .sigmas = sigmas,
                                     .noise = noise,
                                     .n_noise = LATENTS,
                                     .preview_every = 1};
    mp_image_generation_request *call;
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    MP_CHECK_OK(mp_image_generation_request_create(&args, &call, &error), &error);
    call->channels = 1;
    call->latent_height = call->latent_width = 2;
    MP_CHECK_OK(mp_image_generation_request_output(call, &error), &error);
    MP_CHECK_INT(call->n_previews, 1);
    return call;
}

typedef struct answer { /* a child's result of a step; the fields of a correct one are consistent */
    mp_outcome outcome;
    uint32_t cursor;
    int32_t previews;
    float latent, pixel;
} answer;

static void compose(scene *s, const answer *it) {
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_STEP);
    mp_put_u8(&s->out, (uint8_t)it->outcome);
    mp_put_u32(&s->out, it->cursor);
    mp_put_i32(&s->out, it->previews);
    for (int i = 0; i < LATENTS && it->cursor; i++)
        mp_put_f32(&s->out, it->latent);
    for (int i = 0; i < PIXELS && it->previews; i++)
        mp_put_u8(&s->out, (uint8_t)i);
    for (int i = 0; i < LATENTS && it->cursor == 1 && !it->previews; i++)
        mp_put_f32(&s->out, it->latent);
    for (int i = 0; i < PIXELS && it->cursor == TOTAL; i++)
        mp_put_f32(&s->out, it->pixel);
    put_learnt(s);
}

static mp_outcome try(const answer *it, int at, uint8_t by, size_t *used, bool *lost) {
    static scene s;
    mp_image_generation_request *call = small_call();
    memset(&s, 0, sizeof s);
    s.mutate_at = -1;
    scene_admit(&s, &call->base, TOTAL);
    answer_plan(&s, 1, false);
    s.mutate_at = at;
    s.mutate_by = by;
    compose(&s, it);
    *used = s.out.used;
    const mp_outcome outcome = run_step(&s);
    *lost = s.engine->lost(s.engine) != NULL;
    if (*lost) { /* nothing of the result is published */
        MP_CHECK(outcome == MP_OUTCOME_FAILED && s.item.cursor == 0);
        MP_CHECK(call->steps_done == 0 && call->previews_done == 0 && call->images_done == 0);
    } else {
        MP_CHECK(call->steps_done <= 2 && call->previews_done <= 1 && call->images_done <= 1);
        MP_CHECK((call->images_done == 1) == (s.item.cursor == TOTAL));
        for (int i = 0; i < PIXELS && call->images_done; i++)
            MP_CHECK(call->pixels[i] >= 0 && call->pixels[i] <= 1);
    }
    scene_end(&s);
    mp_request_destroy(&call->base);
    return outcome;
}

MP_TEST_SECONDS(isolation_generated_images_with_a_changed_byte_are_correct_or_refused, 120) {
    static const answer whole = {MP_OUTCOME_DONE, TOTAL, 1, 0.5f, 0.25f}, begun = {MP_OUTCOME_MORE, 1, 0, 0.5f, 0};
    static const uint8_t changes[] = {1, 2, 8, 64, 128, 255, 127};
    const answer *const all[] = {&whole, &begun};
    for (int a = 0; a < 2; a++) {
        size_t used = 1;
        int refused = 0;
        bool lost;
        MP_CHECK_INT(try(all[a], -1, 0, &used, &lost), all[a]->outcome);
        MP_CHECK(!lost);
        for (int at = 0; at < (int)used; at++)
            for (size_t i = 0; i < sizeof changes; i++) {
                try(all[a], at, changes[i], &used, &lost);
                refused += lost;
            }
        MP_CHECK(refused > 50);
    }
}

MP_TEST(isolation_false_image_results_are_refused) {
    const float nan = nanf("");
    const answer honest[] = {
        {MP_OUTCOME_MORE, 0, 0, 0, 0}, {MP_OUTCOME_MORE, 1, 0, 1, 0},    {MP_OUTCOME_MORE, 1, 1, 1, 0},
        {MP_OUTCOME_MORE, 2, 1, 1, 0}, {MP_OUTCOME_DONE, TOTAL, 1, 1, 1}, {MP_OUTCOME_WAIT_MEMORY, 1, 1, 1, 0},
    };
    const answer lies[] = {
        {MP_OUTCOME_DONE, 2, 1, 1, 0},          /* done without the image */
        {MP_OUTCOME_MORE, TOTAL, 1, 1, 1},      /* the image, but not done */
        {MP_OUTCOME_MORE, TOTAL + 1, 1, 1, 1},  /* a cursor beyond the total */
        {MP_OUTCOME_MORE, UINT32_MAX, 1, 1, 1},
        {MP_OUTCOME_MORE, 0, 1, 1, 0},          /* a preview before its step */
        {MP_OUTCOME_MORE, 1, 2, 1, 0},          /* a preview that was not requested */
        {MP_OUTCOME_MORE, 1, -1, 1, 0},
        {MP_OUTCOME_MORE, 2, 0, 1, 0},          /* a step that skips its preview */
        {MP_OUTCOME_MORE, 1, 1, nan, 0},        /* latents and pixels that are not numbers */
        {MP_OUTCOME_MORE, 1, 0, INFINITY, 0},
        {MP_OUTCOME_DONE, TOTAL, 1, 1, 1.5f},   {MP_OUTCOME_DONE, TOTAL, 1, 1, nan},
        {MP_OUTCOME_DONE, TOTAL, 1, 1, -0.25f},
    };
    size_t used;
    bool lost;
    for (size_t i = 0; i < sizeof honest / sizeof *honest; i++) {
        MP_CHECK_INT(try(&honest[i], -1, 0, &used, &lost), honest[i].outcome);
        MP_CHECK(!lost);
    }
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        try(&lies[i], -1, 0, &used, &lost);
        if (!lost)
            MP_FAIL("false result %zu was accepted", i);
    }
}
