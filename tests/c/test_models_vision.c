/* Vision decoders: tokens and logits have the same bits for any prefill slices, any parts of the image encoder's
 * layers, batch mates, preemption and eviction. A cached image is computed once and never confused with another image.
 * Its memory is charged, and scratch is freed when no request waits for an image. */
#include <stdatomic.h>
#include <stdlib.h>

#include "base/options.h"
#include "base/sanitize.h"
#include "late_threads.h"
#include "models/decoder/engine.h"
#include "models/vision/vision.h"
#include "vision_fixture.h"
#include "recorded_fixture.h"
#include "sizes_fixture.h"
#include "speculation_fixture.h"
#include "missing_fixture.h"
#include "defaults_fixture.h"

static void make_job(const tiny_model *tiny, tiny_job *job, int index) {
    mp_error error;
    uint64_t cost;
    *job = (tiny_job){0};
    mp_error_clear(&error);
    make_call(index, &job->call, &error);
    MP_CHECK_OK(error.code, &error);
    MP_CHECK_INT(job->call->base.capability, MP_VISION);
    job->item.request = &job->call->base;
    job->item.tenant = rows[index].tenant;
    MP_CHECK_OK(tiny->model->ops->check(tiny->model, job->item.request, &cost, &job->item.total, &error), &error);
}

/* Run a step with the plan's items and retire the finished items. Returns the number of finished items. */
static int step(tiny_model *tiny, const mp_plan *plan, tiny_job *jobs, bool patient) {
    mp_outcome outcomes[MP_PLAN_MAX];
    int done = 0;
    tiny->engine->ops->step(tiny->engine, &tiny->lease, plan, outcomes);
    for (int p = 0; p < plan->count; p++) {
        tiny_job *job = (tiny_job *)((uint8_t *)plan->items[p] - offsetof(tiny_job, item));
        MP_CHECK(job >= jobs && job <= jobs + ITEMS);
        if (outcomes[p] == MP_OUTCOME_DONE) {
            job->done = true;
            tiny->engine->ops->retire(tiny->engine, &job->item);
            done++;
        } else if (outcomes[p] == MP_OUTCOME_WAIT_MEMORY && patient) {
            tiny->engine->ops->preempt(tiny->engine, &job->item);
            job->admitted = false;
        } else {
            MP_CHECK_INT(outcomes[p], MP_OUTCOME_MORE);
        }
    }
    return done;
}

static mp_text_engine *engine_of(tiny_model *tiny) { return (mp_text_engine *)tiny->engine; }

/* Set the size of the image encoder's parts: `grain` rows, or slightly more, of at most about `ops` operations. */
static mp_vit *cut(tiny_model *tiny, int32_t grain, uint64_t ops) {
    mp_vit *encoder = &((mp_decoder *)tiny->model)->vision->image_encoder;
    encoder->grain = grain;
    encoder->most_ops = ops;
    return encoder;
}

static void run_alone(tiny_model *tiny, uint64_t *hashes) {
    for (int i = 0; i < ITEMS; i++) {
        tiny_job jobs[ITEMS] = {{0}};
        tiny_trim(tiny);
        make_job(tiny, &jobs[0], i);
        tiny_job_admit(tiny, &jobs[0]);
        while (!jobs[0].done) {
            mp_item *items[1] = {&jobs[0].item};
            mp_plan plan = {0};
            tiny->engine->ops->plan(tiny->engine, items, 1, UINT64_MAX, &plan);
            MP_CHECK_INT(plan.count, 1);
            step(tiny, &plan, jobs, false);
        }
        MP_CHECK_INT(jobs[0].call->cached_tokens, 0);
        hashes[i] = tiny_job_hash(&jobs[0]);
        mp_request_destroy(&jobs[0].call->base);
    }
}

static int propose_wrong(void *arg, const mp_item *item, int choice, int32_t *draft, int most) {
    (void)item;
    (void)choice;
    for (int i = 0; i < most; i++)
        draft[i] = (int32_t)(mp_test_random_u64(arg) % (TINY_VOCAB - 1));
    return most;
}

/* Run all items together with random time budgets (at least one part of the image encoder and some rows), parts of
 * random size, drafts, absent items, a request that is cancelled, preemptions and emptied caches. limit: bytes beyond
 * the current use; 0 = no limit. */
static void run_mixed(tiny_model *tiny, uint64_t seed, const uint64_t *expected, uint64_t limit) {
    mp_test_random random = {seed};
    tiny_job jobs[ITEMS + 1];
    mp_error error;
    tiny->budget.limit = limit ? tiny->budget.used + limit : UINT64_MAX;
    for (int i = 0; i < ITEMS; i++)
        make_job(tiny, &jobs[i], i);
    make_job(tiny, &jobs[ITEMS], (int)(seed % ITEMS));
    for (int open = ITEMS, rounds = 0; open > 0; rounds++) {
        mp_item *items[ITEMS + 1];
        mp_plan plan = {0};
        int n = 0, first = (int)(mp_test_random_u64(&random) % ITEMS);
        MP_CHECK(rounds < 100000);
        for (int k = 0; k < ITEMS; k++) {
            tiny_job *job = &jobs[(first + k) % ITEMS];
            if (job->done || mp_test_random_u64(&random) % 3 == 0)
                continue;
            if (job->admitted && mp_test_random_u64(&random) % 29 == 0) {
                tiny->engine->ops->preempt(tiny->engine, &job->item);
                job->admitted = false;
            }
            if (!job->admitted && tiny->engine->ops->admit(tiny->engine, &job->item, &error) != MP_OK) {
                MP_CHECK(limit > 0);
                continue;
            }
            job->admitted = true;
            items[n++] = &job->item;
        }
        tiny_job *victim = &jobs[ITEMS];
        if (rounds == 3)
            victim->admitted = tiny->engine->ops->admit(tiny->engine, &victim->item, &error) == MP_OK;
        if (victim->admitted && !victim->done && mp_test_random_u64(&random) % 9 == 0) {
            atomic_store(&victim->item.cancelled, 1);
            tiny->engine->ops->retire(tiny->engine, &victim->item);
            victim->done = true;
        }
        if (victim->admitted && !victim->done)
            items[n++] = &victim->item;
        if (mp_test_random_u64(&random) % 23 == 0)
            tiny_trim(tiny);
        if (n == 0)
            continue;
        tiny_speculate(tiny->engine, mp_test_random_u64(&random) % 2 ? MP_SPECULATE_ALWAYS : MP_SPECULATE_OFF,
                       propose_wrong, &random);
        uint64_t budget_ns = mp_test_random_u64(&random) % 3 ? mp_test_random_u64(&random) % 1000000 : UINT64_MAX;
        if (!engine_of(tiny)->images->jobs && mp_test_random_u64(&random) % 4 == 0) /* only between images */
            cut(tiny, 3 + (int32_t)(mp_test_random_u64(&random) % 15), UINT64_C(1) << mp_test_random_u64(&random) % 24);
        tiny->engine->ops->plan(tiny->engine, items, n, budget_ns, &plan);
        MP_CHECK(plan.count > 0);
        if (mp_test_random_u64(&random) % 2)
            engine_of(tiny)->image_part.budget_ns = 0; /* compute one part only */
        const bool was_done = victim->done;
        open -= step(tiny, &plan, jobs, limit > 0) - (victim->done && !was_done);
        MP_CHECK(tiny->budget.used <= tiny->budget.limit);
    }
    for (int i = 0; i < ITEMS; i++) {
        if (tiny_job_hash(&jobs[i]) != expected[i])
            MP_FAIL("item %d differs under seed %llu with %d threads", i, (unsigned long long)seed,
                    tiny->lease.threads);
        mp_request_destroy(&jobs[i].call->base);
    }
    if (jobs[ITEMS].admitted && !jobs[ITEMS].done)
        tiny->engine->ops->retire(tiny->engine, &jobs[ITEMS].item);
    mp_request_destroy(&jobs[ITEMS].call->base);
    tiny_speculate(tiny->engine, MP_SPECULATE_OFF, NULL, NULL);
    tiny->budget.limit = UINT64_MAX;
}

/* A sanitizer build takes one and three threads, and computes each item alone on one thread only. */
static void check_contract(const tiny_kind *kind, const mp_dtype *types, int count, mp_compute compute) {
    uint64_t expected[ITEMS], again[ITEMS];
    for (int threads = 1; threads <= 3; threads += MP_SANITIZED ? 2 : 1) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_decoder_spec_as(kind, types, count, 42, -1), compute, threads);
        if (threads == 1 || !MP_SANITIZED)
            run_alone(&tiny, threads == 1 ? expected : again);
        MP_CHECK(threads == 1 || MP_SANITIZED || memcmp(expected, again, sizeof expected) == 0);
        for (uint64_t seed = 1; seed <= (uint64_t)mp_test_rounds(4); seed++)
            run_mixed(&tiny, seed + 10 * (uint64_t)threads, expected, 0);
        MP_CHECK(tile_rows < ROWS || tiny.engine->prefix->hits > 0);
        tiny_trim(&tiny);
        uint64_t least = tiny.budget.used;
        run_mixed(&tiny, 99, expected, 3 << 20);
        tiny_trim(&tiny);
        MP_CHECK_INT(tiny.budget.used, least);
        MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0); /* no reference leaked */
        tiny_unload(&tiny);
    }
    for (int i = 1; i < ITEMS; i++) /* items 3 and 7 differ only in the tenant */
        MP_CHECK((expected[i] == expected[3]) == (i == 3 || i == 7));
}

/* Images and texts on two threads have the bits of one, whichever thread is late. */
MP_TEST_SECONDS(models_vision_late_threads, 60) {
    static const mp_dtype floats[] = {MP_F32}, bytes[] = {MP_Q8_0};
    static const tiny_kind *const kinds[] = {&llava_kind, &axial_kind, &bounded_kind};
    for (int k = 0; k < 3; k++) {
        uint64_t expected[ITEMS], got[ITEMS];
        tile_rows = k ? ROWS / 4 : ROWS;
        oblong = k == 2;
        has_newline = k < 2;
        for (int threads = 1; threads <= 2; threads++) {
            tiny_model tiny;
            tiny_load(&tiny, tiny_decoder_spec_as(kinds[k], k == 1 ? bytes : floats, 1, 42, -1),
                      k == 1 ? MP_COMPUTE_AUTO : MP_COMPUTE_F32, threads);
            cut(&tiny, 2, 20000);
            for (int late = 0; late < threads; late++) {
                late_thread(late);
                run_alone(&tiny, threads == 1 ? expected : got);
                late_thread(-1);
                for (int i = 0; threads > 1 && i < ITEMS; i++)
                    if (got[i] != expected[i])
                        MP_FAIL("item %d differs if thread %d is late", i, late);
            }
            tiny_unload(&tiny);
        }
    }
}

MP_TEST_SECONDS(models_vision_contract_float32, 300) {
    static const mp_dtype floats[] = {MP_F32};
    check_contract(&llava_kind, floats, 1, MP_COMPUTE_F32);
}
MP_TEST_SECONDS(models_vision_contract_quantised, 300) {
    static const mp_dtype types[] = {MP_Q8_0, MP_Q4_0, MP_Q6_K};
    check_contract(&llava_kind, types, 3, MP_COMPUTE_AUTO);
}
MP_TEST_SECONDS(models_vision_contract_axial, 300) {
    static const mp_dtype floats[] = {MP_F32};
    tile_rows = ROWS / 4;
    check_contract(&axial_kind, floats, 1, MP_COMPUTE_F32);
}
MP_TEST_SECONDS(models_vision_contract_taps, 300) {
    static const mp_dtype floats[] = {MP_F32};
    tile_rows = ROWS / 4;
    oblong = true;
    has_newline = false;
    check_contract(&deep_kind, floats, 1, MP_COMPUTE_F32);
}
MP_TEST_SECONDS(models_vision_contract_merger, 300) {
    static const mp_dtype floats[] = {MP_F32};
    tile_rows = ROWS / 4;
    check_contract(&merging_kind, floats, 1, MP_COMPUTE_F32);
}
MP_TEST_SECONDS(models_vision_contract_bounded, 300) {
    static const mp_dtype floats[] = {MP_F32};
    tile_rows = ROWS / 4;
    oblong = true;
    has_newline = false;
    check_contract(&bounded_kind, floats, 1, MP_COMPUTE_F32);
    check_contract(&bounded_kind, floats, 1, MP_COMPUTE_BF16);
}
/* Some images begin before a border of KV blocks and end after it. */
MP_TEST_SECONDS(models_vision_contract_spans_float32, 300) {
    static const mp_dtype floats[] = {MP_F32};
    earlier = 11;
    check_contract(&spans_kind, floats, 1, MP_COMPUTE_F32);
}
MP_TEST_SECONDS(models_vision_contract_spans_quantised, 300) {
    static const mp_dtype types[] = {MP_Q8_0, MP_Q4_0, MP_Q6_K};
    earlier = 11;
    check_contract(&windowed_spans_kind, types, 3, MP_COMPUTE_AUTO);
}

/* The logits of a prompt with an image, and of one with two images. */
static int vision_is_recorded(const tiny_kind *kind, const double *recorded) {
    static const mp_dtype floats[] = {MP_F32};
    tiny_model tiny;
    int wrong = 0;
    tiny_load(&tiny, tiny_decoder_spec_as(kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    for (int i = 0; i < 2; i++) {
        tiny_job jobs[ITEMS] = {{0}};
        mp_item *items[1] = {&jobs[0].item};
        mp_plan plan = {0};
        make_job(&tiny, &jobs[0], 2 * i); /* items 0 and 2 ask for the logits of their prompts */
        tiny_job_admit(&tiny, &jobs[0]);
        while (!jobs[0].done) {
            tiny.engine->ops->plan(tiny.engine, items, 1, UINT64_MAX, &plan);
            step(&tiny, &plan, jobs, false);
        }
        const mp_text_request *call = jobs[0].call;
        wrong += !recorded_is(kind->arch, call->prompt_logits, (size_t)call->n_prompt * TINY_VOCAB, recorded[i],
                              RECORDED_FLOATS);
        mp_request_destroy(&jobs[0].call->base);
    }
    tiny_unload(&tiny);
    return wrong;
}

MP_TEST(models_vision_recorded) {
    int wrong = vision_is_recorded(&llava_kind, (double[]){-253.6371, 22.87656});
    tile_rows = ROWS / 4;
    wrong += vision_is_recorded(&axial_kind, (double[]){-66.39118, 203.0811});
    oblong = true;
    wrong += vision_is_recorded(&axial_kind, (double[]){-71.1333, 404.1674});
    has_newline = false;
    wrong += vision_is_recorded(&deep_kind, (double[]){-128.6048, -188.4742});
    MP_CHECK_INT(wrong, 0);
}

/* Run one job to its end with at most one part of the image encoder per step; return the number of steps. *cached: out,
 * prompt tokens found in the prefix cache. */
static int run_one(tiny_model *tiny, int index, int32_t *cached) {
    tiny_job jobs[ITEMS] = {{0}};
    int steps = 0, looks = 0;
    make_job(tiny, &jobs[0], index);
    tiny_job_admit(tiny, &jobs[0]);
    for (; !jobs[0].done; steps++) {
        mp_item *items[1] = {&jobs[0].item};
        mp_plan plan = {0};
        tiny->engine->ops->plan(tiny->engine, items, 1, 1, &plan);
        looks += engine_of(tiny)->image_part.item != NULL;
        engine_of(tiny)->image_part.budget_ns = 0;
        step(tiny, &plan, jobs, false);
    }
    MP_CHECK(looks <= (int)jobs[0].call->images.most_parts);
    *cached = jobs[0].call->cached_tokens;
    mp_request_destroy(&jobs[0].call->base);
    return steps;
}

/* Predicted memory, and operations and parts of an image, with and without windows, as recorded. */
MP_TEST(models_vision_sizes_recorded) {
    enum { DOWN = 13, ACROSS = 21, COUNT = 10 };
    static const mp_dtype floats[] = {MP_F32};
    static const mp_compute classes[] = {MP_COMPUTE_F32, MP_COMPUTE_BF16, MP_COMPUTE_I8};
    static const tiny_kind *const kinds[] = {&llava_kind, &axial_kind, &deep_kind};
    static const uint64_t recorded[3][3][COUNT] = {
        {{7433152, 7278064, 7440128, 29195136, 20336832, 880, 29195136, 880, 0, 2560},
         {3747776, 7267184, 3754752, 29195136, 20336832, 880, 29195136, 880, 0, 4224},
         {1935296, 7267184, 1942272, 29195136, 20336832, 880, 29195136, 880, 0, 3520}},
        {{7238528, 43908480, 7245696, 17100960, 14835360, 1012, 18544032, 1126, 8704, 5056},
         {3653504, 43907712, 3660672, 17100960, 14835360, 1012, 18544032, 1126, 8704, 7552},
         {1881984, 43907712, 1889152, 17100960, 14835360, 1012, 18544032, 1126, 8704, 6848}},
        {{7443712, 52299136, 7450880, 29641248, 20841504, 880, 29641248, 880, 9664, 5056},
         {3778816, 52298368, 3785984, 29641248, 20841504, 880, 29641248, 880, 9664, 7552},
         {1939200, 52298368, 1946368, 29641248, 20841504, 880, 29641248, 880, 9664, 6848}},
    };
    int wrong = 0;
    for (int i = 0; i < 9; i++) {
        tiny_model tiny;
        uint64_t got[COUNT];
        char what[64];
        tiny_load(&tiny, tiny_decoder_spec_as(kinds[i / 3], floats, 1, 42, -1), classes[i % 3], 1);
        const mp_vision *vision = ((const mp_decoder *)tiny.model)->vision;
        mp_vit *network = (mp_vit *)&vision->image_encoder;
        tiny.loader.ops->footprint(tiny.loader.self, &got[0], &got[1]);
        got[2] = tiny.model->ops->bytes(tiny.model);
        got[3] = mp_vit_image_ops(network, DOWN, ACROSS, false);
        got[4] = mp_vit_image_ops(network, DOWN, ACROSS, true);
        network->grain = 5;
        got[5] = mp_vit_image_parts(network, DOWN, ACROSS);
        network->window = 3;
        got[6] = mp_vit_image_ops(network, DOWN, ACROSS, false);
        got[7] = mp_vit_image_parts(network, DOWN, ACROSS);
        got[8] = network->axial ? mp_vit_axes_bytes(network, DOWN - 1, ACROSS - 1) : 0;
        got[9] = mp_vit_part_bytes(network, DOWN, 2);
        snprintf(what, sizeof what, "%s, compute type %d", kinds[i / 3]->arch, (int)classes[i % 3]);
        wrong += !sizes_are(what, got, recorded[i / 3][i % 3], COUNT);
        tiny_unload(&tiny);
    }
    MP_CHECK_INT(wrong, 0);
}

/* A cached image is not computed again, not even for another prompt. The number of steps shows this, because each step
 * computes at most one part of a layer. */
MP_TEST(models_vision_encodes_each_image_once) {
    static const mp_dtype floats[] = {MP_F32};
    int32_t cached;
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    tiny_speculate(tiny.engine, MP_SPECULATE_OFF, NULL, NULL); /* speculation could save a step */
    int first = run_one(&tiny, 0, &cached), again = run_one(&tiny, 0, &cached);
    /* parts: embeddings; before, in and after the attention of each layer; projector; and one more step, because the
     * rows before the image do not wait for the image */
    MP_CHECK_INT(first - again, 1 + 3 * ENCODER_LAYERS + 1 + 1);
    tiny_trim(&tiny);
    cut(&tiny, 1, 1); /* each row is a part; attention has two parts in each of three heads */
    MP_CHECK_INT(run_one(&tiny, 0, &cached) - again,
                 (ROWS + 1) * (1 + 2 * ENCODER_LAYERS) + (ROWS + 2) / 2 * 3 * ENCODER_LAYERS + ROWS + 1);
    cut(&tiny, MP_VIT_GRAIN, UINT64_MAX);
    int both = run_one(&tiny, 1, &cached), turned = run_one(&tiny, 2, &cached);
    MP_CHECK(both > turned); /* image 2 was new to the first request only */
    MP_CHECK_INT(cached, 0);
    run_one(&tiny, 3, &cached);
    MP_CHECK_INT(cached, 0);
    run_one(&tiny, 3, &cached);
    MP_CHECK_INT(cached, 64);
    run_one(&tiny, 7, &cached); /* same prompt, another tenant */
    MP_CHECK_INT(cached, 0);
    tiny_trim(&tiny);
    mp_images_shrink(engine_of(&tiny)->images, UINT64_MAX);
    uint64_t bytes[4]; /* kept rows of images after each request: two of one tenant, then two of another one */
    for (int i = 0; i < 4; i++) {
        run_one(&tiny, i < 2 ? 3 : 7, &cached);
        bytes[i] = engine_of(&tiny)->images->tile_bytes;
    }
    MP_CHECK(bytes[0] > 0);
    MP_CHECK_INT(bytes[1], bytes[0]);
    MP_CHECK_INT(bytes[2], 2 * bytes[0]); /* the other tenant's rows were computed, too */
    MP_CHECK_INT(bytes[3], bytes[2]);
    run_one(&tiny, 5, &cached);
    MP_CHECK_INT(cached, 0);
    run_one(&tiny, 5, &cached); /* an image that is repeated is part of an equal prefix */
    MP_CHECK_INT(cached, 64);
    tiny_unload(&tiny);
}

static void run_on(tiny_model *tiny, tiny_job *job) {
    mp_item *item = &job->item;
    mp_plan plan = {0};
    tiny_job_admit(tiny, job);
    while (!job->done) {
        tiny->engine->ops->plan(tiny->engine, &item, 1, UINT64_MAX, &plan);
        step(tiny, &plan, job, false);
    }
}

/* Image ids belong to one engine. A request that moves to another engine gets new ids, because its old ids may denote
 * other images there. The prefix cache must not confuse the same text with those other images. */
MP_TEST(models_vision_continues_in_another_engine) {
    enum { ABOUT_2_1 = 2, ABOUT_1_2 = 1 };
    static const mp_dtype floats[] = {MP_F32};
    uint64_t expected[ITEMS];
    mp_error error;
    mp_plan plan = {0};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    run_alone(&tiny, expected);
    for (int begun = 0; begun < 4; begun++) { /* preempt in the first engine before any step, after the text before
                                               * the image, after the images, or after some tokens */
        tiny_job jobs[2][ITEMS] = {{{0}}};
        mp_item *item = &jobs[0][0].item;
        for (int engine = 0; engine < 2; engine++) {
            tiny.engine->ops->destroy(tiny.engine);
            MP_CHECK_OK(tiny.model->ops->engine(tiny.model, &tiny.budget, &tiny.engine, &error), &error);
            if (engine > 0)
                break;
            make_job(&tiny, jobs[0], ABOUT_2_1);
            tiny_job_admit(&tiny, jobs[0]);
            for (int s = 0; s < 2 * begun && !jobs[0][0].done; s++) {
                tiny.engine->ops->plan(tiny.engine, &item, 1, UINT64_MAX, &plan);
                step(&tiny, &plan, jobs[0], false);
            }
            MP_CHECK(!jobs[0][0].done);
            tiny.engine->ops->preempt(tiny.engine, item);
        }
        run_on(&tiny, jobs[0]);
        make_job(&tiny, jobs[1], ABOUT_1_2);
        run_on(&tiny, jobs[1]);
        MP_CHECK_INT(jobs[1][0].call->cached_tokens, 0);
        MP_CHECK(tiny_job_hash(&jobs[0][0]) == expected[ABOUT_2_1]);
        MP_CHECK(tiny_job_hash(&jobs[1][0]) == expected[ABOUT_1_2]);
        for (int j = 0; j < 2; j++)
            mp_request_destroy(&jobs[j][0].call->base);
    }
    tiny_unload(&tiny);
}

/* Run a request until its next step would compute the first part of its image. */
static mp_item *run_to_image(tiny_model *tiny, tiny_job *job, mp_plan *plan) {
    static mp_item *items[1];
    make_job(tiny, job, 0);
    tiny_job_admit(tiny, job);
    items[0] = &job->item;
    tiny->engine->ops->plan(tiny->engine, items, 1, 1, plan);
    step(tiny, plan, job, false); /* the rows before the image */
    tiny->engine->ops->plan(tiny->engine, items, 1, 1, plan);
    MP_CHECK(engine_of(tiny)->image_part.item == &job->item);
    MP_CHECK(plan->cost_ns >= mp_images_part_ns(engine_of(tiny)->images) ||
             plan->cost_ns >= mp_images_left_ns(engine_of(tiny)->images, job->call, job->item.state, 0));
    return &job->item;
}

/* Within a layer, a step notices that it is unwanted, that its request was cancelled, or that its time budget is used
 * up. The parts computed until then are kept. */
MP_TEST(models_vision_stops_within_a_layer) {
    static const mp_dtype floats[] = {MP_F32};
    static const _Atomic int raised = 1;
    for (int threads = 1; threads <= 2; threads++) {
        tiny_model tiny;
        tiny_job jobs[ITEMS] = {{0}};
        mp_plan plan = {0};
        mp_error error;
        tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, threads);
        mp_vit *encoder = cut(&tiny, 2, 1);
        mp_item *item = run_to_image(&tiny, jobs, &plan);
        mp_image_store *store = engine_of(&tiny)->images;
        uint64_t left = UINT64_MAX;
        for (int part = 1; part <= 9 + threads * 2; part++) {
            tiny.lease.cancelled = part % 3 == 0 ? &raised : NULL;
            MP_CHECK_OK(mp_images_compute(store, &tiny.lease, jobs[0].call, item->state, 0,
                                          part % 3 == 1 ? 0 : UINT64_MAX, part % 3 == 2 ? &raised : NULL, &error),
                        &error);
            const mp_vit_cursor *at = &store->jobs->at;
            MP_CHECK_INT(at->layer, 0);
            MP_CHECK_INT(at->stage, part > 8); /* stage 1 follows nine parts of embeddings */
            MP_CHECK_INT(at->at, part == 8 ? 2 * part : part == 9 ? 0 : part < 9 ? 2 * part : 2 * (part - 9));
            atomic_store(&encoder->mega_ns, 1000000);
            MP_CHECK(mp_images_left_ns(store, jobs[0].call, item->state, 0) < left);
            left = mp_images_left_ns(store, jobs[0].call, item->state, 0);
        }
        tiny.lease.cancelled = NULL;
        while (!jobs[0].done) {
            tiny.engine->ops->plan(tiny.engine, &item, 1, UINT64_MAX, &plan);
            step(&tiny, &plan, jobs, false);
        }
        mp_request_destroy(&jobs[0].call->base);
        tiny_unload(&tiny);
    }
}

/* Run a step with one job, in which the image encoder computes one part. */
static void step_alone(tiny_model *tiny, tiny_job *job) {
    mp_item *item = &job->item;
    mp_plan plan = {0};
    tiny->engine->ops->plan(tiny->engine, &item, 1, 1, &plan);
    engine_of(tiny)->image_part.budget_ns = 0;
    step(tiny, &plan, job, false);
}

/* Requests that are planned alternately keep the computed parts of their images, and a request with the same image
 * continues the computation. The partial result of an abandoned image is dropped when the next image starts. */
MP_TEST(models_vision_keeps_images_of_alternating_requests) {
    static const mp_dtype floats[] = {MP_F32};
    static const int rows_of[] = {0, 5, 1};
    enum { TURNS = 3 };
    uint64_t expected[ITEMS];
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    run_alone(&tiny, expected);
    tiny_trim(&tiny);
    const uint64_t least = tiny.budget.used;
    const mp_image_store *store = engine_of(&tiny)->images;
    tiny_job jobs[TURNS][ITEMS] = {{{0}}};
    for (int j = 0; j < TURNS; j++) {
        make_job(&tiny, jobs[j], rows_of[j]);
        tiny_job_admit(&tiny, jobs[j]);
    }
    for (int open = TURNS, rounds = 0; open > 0; rounds++) {
        MP_CHECK(rounds < 100); /* enough for the parts of three images and for the completions */
        open = 0;
        for (int j = 0; j < TURNS; j++) {
            if (!jobs[j][0].done)
                step_alone(&tiny, jobs[j]);
            open += !jobs[j][0].done;
        }
    }
    for (int j = 0; j < TURNS; j++) {
        MP_CHECK(tiny_job_hash(&jobs[j][0]) == expected[rows_of[j]]);
        mp_request_destroy(&jobs[j][0].call->base);
        jobs[j][0] = (tiny_job){0};
    }
    tiny_trim(&tiny);
    MP_CHECK_INT(tiny.budget.used, least);
    for (int j = 0; j < TURNS; j++) { /* the first two jobs have the same image */
        make_job(&tiny, jobs[j], j < 2 ? 0 : 5);
        tiny_job_admit(&tiny, jobs[j]);
    }
    for (int s = 0; s < 3; s++)
        for (int j = 0; j < TURNS; j++)
            step_alone(&tiny, jobs[j]);
    MP_CHECK(store->jobs && store->jobs->next && !store->jobs->next->next);
    for (int j = 0; j < 2; j++) {
        tiny.engine->ops->retire(tiny.engine, &jobs[j][0].item);
        MP_CHECK(store->jobs->next != NULL); /* another request may continue the image */
    }
    step_alone(&tiny, jobs[2]);
    MP_CHECK(store->jobs && !store->jobs->next);
    tiny.engine->ops->retire(tiny.engine, &jobs[2][0].item);
    MP_CHECK(!store->jobs);
    tiny_trim(&tiny);
    MP_CHECK_INT(tiny.budget.used, least);
    for (int j = 0; j < TURNS; j++)
        mp_request_destroy(&jobs[j][0].call->base);
    tiny_unload(&tiny);
}

static int merge; /* patches per side that the projector merges */

static void add_merging(tiny_file *file) {
    add_image_encoder(file);
    tiny_int(file->spec, "mpool.vision.merge", merge);
}

/* At most 16 patches per side are merged; fewer are refused if they do not divide the patches of a side. */
MP_TEST(models_vision_refuses_unsuitable_merges) {
    static const mp_dtype floats[] = {MP_F32};
    static const int merges[] = {0, 16, 17};
    const tiny_kind kind = {.arch = "llava", .more = add_merging};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (int i = 0; i < 3; i++) {
        merge = merges[i];
        MP_CHECK_STATUS(load_only(tiny_decoder_spec_as(&kind, floats, 1, 42, -1), MP_COMPUTE_F32, &error), MP_FORMAT,
                        &error);
        MP_CHECK_INT(strcmp(error.field, "mpool.vision.merge") == 0, merge != 16);
        if (merge != 16)
            MP_CHECK_HAS(error.allowed, "1 to 16");
    }
    /* the memory of such a model is predicted before it is refused */
    merge = 0;
    mp_spec *spec = tiny_decoder_spec_as(&kind, floats, 1, 42, -1);
    uint64_t model = 0, engine = 0;
    mp_vision_footprint(spec, MP_COMPUTE_F32, &model, &engine);
    MP_CHECK(model > 0 && engine > 0);
    mp_spec_unpin(spec);
}

/* Requests that exceed a limit of the model are refused before they are queued. */
MP_TEST(models_vision_refuses_requests_that_do_not_fit) {
    static const mp_dtype floats[] = {MP_F32};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    for (int fault = 0; fault < 6; fault++) {
        mp_error error;
        mp_text_request *call;
        uint64_t cost;
        uint32_t total;
        mp_error_clear(&error);
        make_call(fault == 5 ? 4 : 1, &call, &error);
        MP_CHECK_OK(error.code, &error);
        if (fault == 0)
            call->prompt[0] = MARK;
        if (fault == 1)
            call->prompt[call->images.runs[0].start] = 1;
        if (fault == 2)
            call->images.runs[1].rows--;
        if (fault == 3)
            call->images.sizes[0] = SIDE + PATCH;
        if (fault == 4)
            call->images.n_runs = 0;
        if (fault == 5)
            call->images.sources[3] = ROWS;
        MP_CHECK_INT(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error), MP_INVALID_ARGUMENT);
        if (fault == 4)
            call->images.n_runs = 2;
        mp_request_destroy(&call->base);
    }
    /* if the vocabulary has no placeholder token, any token may stand for an image at the positions of a run */
    ((mp_decoder *)tiny.model)->vision->image_token = -1;
    for (int fault = 0; fault < 2; fault++) {
        mp_error error;
        mp_text_request *call;
        uint64_t cost;
        uint32_t total;
        mp_error_clear(&error);
        make_call(1, &call, &error);
        MP_CHECK_OK(error.code, &error);
        call->prompt[0] = MARK;
        call->prompt[call->images.runs[0].start] = 1;
        call->images.runs[1].rows -= fault;
        MP_CHECK_INT(tiny.model->ops->check(tiny.model, &call->base, &cost, &total, &error),
                     fault ? MP_INVALID_ARGUMENT : MP_OK);
        mp_request_destroy(&call->base);
    }
    tiny_unload(&tiny);
}

static mp_status make_one(mp_request **call, mp_error *error) {
    mp_text_request *made;
    mp_error_clear(error);
    make_call(1, &made, error);
    *call = made ? &made->base : NULL;
    return made ? MP_OK : error->code;
}

static void compare(const mp_request *first, const mp_request *second) {
    const mp_text_request *a = (const mp_text_request *)first, *b = (const mp_text_request *)second;
    for (int c = 0; c < a->n_choices; c++)
        for (int t = 0; t < ANSWER; t++)
            MP_CHECK_INT(a->choices[c].tokens[t].id, b->choices[c].tokens[t].id);
}

static void sweep(const tiny_kind *kind) {
    static const mp_dtype floats[] = {MP_F32};
    mp_error error;
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    tiny_life life = {.spec = tiny_decoder_spec_as(kind, floats, 1, 42, -1), .compute = MP_COMPUTE_F32,
                      .make = make_one, .compare = compare};
    mp_test_alloc_sweep(tiny_live, &life);
    mp_spec_unpin(life.spec);
}
MP_TEST_SECONDS(models_vision_survives_each_refused_allocation, 300) { sweep(&llava_kind); }
MP_TEST_SECONDS(models_vision_survives_each_refused_allocation_in_halves, 300) {
    tile_rows = ROWS / 4;
    halves = true;
    sweep(&axial_kind);
    sweep(&merging_kind);
    has_newline = false;
    sweep(&deep_kind);
}

static uint64_t hash_of_prompts(mp_spec *spec) {
    tiny_model tiny;
    uint64_t hashes[ITEMS];
    tiny_load(&tiny, spec, MP_COMPUTE_F32, 1);
    run_alone(&tiny, hashes);
    tiny_unload(&tiny);
    return tiny_hash_bytes(1, hashes, sizeof hashes);
}

static uint64_t hash_with_class(mp_spec *spec) { /* prompts with a row for the class token, if it is kept */
    const mp_value *keep = mp_spec_find(spec, "mpool.vision.keep_class");
    tile_rows = ROWS + (keep && keep->as.integer);
    const uint64_t hash = hash_of_prompts(spec);
    tile_rows = ROWS;
    return hash;
}

MP_TEST_SECONDS(models_vision_defaults, 120) {
    MP_RESULTS_ONLY();
    static const mp_dtype floats[] = {MP_F32};
    static const optional_key keys[] = {
        {"mpool.vision.merge", "1", NULL},
        {"mpool.vision.activation", "gelu", "relu"},
        {"mpool.vision.norm", "false", NULL},
        {"mpool.image.activation", "gelu", "relu"},
        {"mpool.image.registers", "0", NULL},
    };
    static const optional_key keep_class[] = {{"mpool.vision.keep_class", "false", "true"}};
    static const optional_key axes[] = {{"mpool.image.rope_base", "10000.0", "100.0"},
                                        {"mpool.image.rope_neox", "true", "false"}};
    check_defaults(tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), hash_of_prompts, KEYS(keys));
    check_defaults(tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), hash_with_class, KEYS(keep_class));
    tile_rows = ROWS / 4;
    check_defaults(tiny_decoder_spec_as(&axial_kind, floats, 1, 42, -1), hash_of_prompts, KEYS(axes));
    tile_rows = ROWS;
}
