/* Vision decoders in worker processes: a request has the same bytes in whichever process it continues, also within an
 * image, or after the process that encoded the image was killed. False results are refused. */
#include <signal.h>
#include <sys/resource.h>

#include "base/sanitize.h"
#include "isolated_fixture.h"
#include "isolation_scene.h"
#include "vision_fixture.h"

/* ---- real processes ---------------------------------------------------------------------------------------------- */

/* Make a job without prompt logits, which a process does not send. */
static void make_job(mp_model *model, tiny_job *job, int index) {
    mp_error error;
    uint64_t cost;
    *job = (tiny_job){0};
    mp_error_clear(&error);
    make_call(index, &job->call, &error);
    MP_CHECK_OK(error.code, &error);
    job->call->want_prompt_logits = false;
    job->item.request = &job->call->base;
    job->item.tenant = rows[index].tenant;
    MP_CHECK_OK(model->ops->check(model, job->item.request, &cost, &job->item.total, &error), &error);
}

/* Run a step of about `budget_ns` with these items; return the number of finished items. *image_step: out, true if a
 * request of the step did not advance: it computed a part of an image, or repeated a prefill of another process. */
static int step(isolated *it, int which, mp_item **items, int n, uint64_t budget_ns, bool *image_step) {
    mp_engine *engine = it->engine[which];
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    int done = 0;
    engine->ops->plan(engine, items, n, budget_ns, &plan);
    MP_CHECK(plan.count >= 1);
    *image_step = false;
    uint32_t before[ITEMS];
    for (int p = 0; p < plan.count; p++)
        before[p] = plan.items[p]->cursor;
    engine->ops->step(engine, &it->lease, &plan, outcomes);
    if (engine->lost(engine))
        MP_FAIL("lost: %s", engine->lost(engine)->message);
    for (int p = 0; p < plan.count; p++) {
        tiny_job *job = (tiny_job *)((char *)plan.items[p] - offsetof(tiny_job, item));
        MP_CHECK(outcomes[p] == MP_OUTCOME_MORE || outcomes[p] == MP_OUTCOME_DONE);
        *image_step |= outcomes[p] == MP_OUTCOME_MORE && plan.items[p]->cursor == before[p];
        if (outcomes[p] != MP_OUTCOME_DONE)
            continue;
        engine->ops->retire(engine, &job->item);
        job->done = true;
        done++;
    }
    return done;
}

static void alone(mp_spec *spec, uint64_t *hashes) {
    tiny_model here;
    tiny_load(&here, mp_spec_pin(spec), MP_COMPUTE_F32, 1);
    for (int i = 0; i < ITEMS; i++) {
        tiny_job job;
        mp_plan plan = {0};
        mp_outcome outcomes[MP_PLAN_MAX] = {MP_OUTCOME_MORE};
        make_job(here.model, &job, i);
        tiny_job_admit(&here, &job);
        mp_item *items[1] = {&job.item};
        while (outcomes[0] == MP_OUTCOME_MORE) {
            here.engine->ops->plan(here.engine, items, 1, UINT64_MAX, &plan);
            here.engine->ops->step(here.engine, &here.lease, &plan, outcomes);
        }
        MP_CHECK_INT(outcomes[0], MP_OUTCOME_DONE);
        here.engine->ops->retire(here.engine, &job.item);
        hashes[i] = tiny_job_hash(&job);
        mp_request_destroy(&job.call->base);
    }
    tiny_unload(&here);
}

static void check_moves(const tiny_kind *kind) {
    static const mp_dtype floats[] = {MP_F32};
    uint64_t expected[ITEMS];
    int image_steps = 0; /* mostly of the first seed: with later seeds the images are cached */
    mp_error error;
    isolated it;
    mp_spec *spec = tiny_decoder_spec_as(kind, floats, 1, 42, -1);
    alone(spec, expected);
    isolated_load(&it, mp_spec_pin(spec), MP_COMPUTE_F32, 1, isolation_options("spec"));
    for (uint64_t seed = 1; seed <= 1 + (uint64_t)mp_test_rounds(3); seed++) {
        mp_test_random random = {seed};
        tiny_job jobs[ITEMS];
        int home[ITEMS];
        for (int i = 0; i < ITEMS; i++) {
            make_job(it.model, &jobs[i], i);
            home[i] = -1;
        }
        for (int open = ITEMS; open > 0;) {
            int which = (int)(mp_test_random_u64(&random) % 2), n = 0;
            mp_item *items[ITEMS];
            bool image_step;
            for (int i = 0; i < ITEMS; i++) {
                if (jobs[i].done)
                    continue;
                if (home[i] >= 0 && mp_test_random_u64(&random) % 11 == 0) { /* preempt; re-admit in either engine */
                    it.engine[home[i]]->ops->preempt(it.engine[home[i]], &jobs[i].item);
                    home[i] = -1;
                }
                if (home[i] < 0 && mp_test_random_u64(&random) % 2) {
                    MP_CHECK_OK(it.engine[which]->ops->admit(it.engine[which], &jobs[i].item, &error), &error);
                    home[i] = which;
                }
                if (home[i] == which)
                    items[n++] = &jobs[i].item;
            }
            if (n == 0)
                continue;
            open -= step(&it, which, items, n, mp_test_random_u64(&random) % 2 * 1000000 + 1, &image_step);
            image_steps += image_step;
        }
        for (int i = 0; i < ITEMS; i++) {
            if (tiny_job_hash(&jobs[i]) != expected[i])
                MP_FAIL("item %d differs under seed %d", i, (int)seed);
            mp_request_destroy(&jobs[i].call->base);
        }
    }
    MP_CHECK(image_steps >= 5); /* at least one for each image, in one of the processes */
    MP_CHECK(tile_rows < ROWS || it.engine[0]->prefix->hits + it.engine[1]->prefix->hits > 0);
    isolated_unload(&it);
    mp_spec_unpin(spec);
}

MP_TEST_SECONDS(isolation_vision_has_the_same_bytes_in_any_process, 120) { check_moves(&llava_kind); }
MP_TEST_SECONDS(isolation_vision_with_windows_has_the_same_bytes_in_any_process, 120) {
    tile_rows = ROWS / 4;
    halves = true;
    check_moves(&axial_kind);
}
MP_TEST_SECONDS(isolation_vision_with_taps_has_the_same_bytes_in_any_process, 120) {
    tile_rows = ROWS / 4;
    has_newline = false;
    check_moves(&deep_kind);
}

enum { LARGE = (MP_SANITIZED ? 64 : 96) * PATCH, SEEN = 100, ALL = 100000 };

/* Make a request with an image of 9,216 patches (4,096 in a sanitizer build), of which the prompt uses SEEN rows. The
 * image takes many of the shortest steps. */
static void make_large(mp_model *model, tiny_job *job) {
    static uint8_t pixels[LARGE * LARGE * 3];
    static const uint8_t key[MP_IMAGE_KEY] = {9};
    static const int32_t sizes[] = {LARGE, LARGE}, runs[] = {2, SEEN, 1};
    int32_t prompt[2 + SEEN + 4], sources[SEEN];
    mp_test_random random = {31};
    mp_error error;
    uint64_t cost;
    for (size_t i = 0; i < sizeof pixels; i++)
        pixels[i] = (uint8_t)mp_test_random_u64(&random);
    for (int i = 0; i < 2 + SEEN + 4; i++)
        prompt[i] = i >= 2 && i < 2 + SEEN ? MARK : i;
    for (int i = 0; i < SEEN; i++)
        sources[i] = 10 * i;
    mp_text_args args = {
        .n_prompt = 2 + SEEN + 4, .prompt = prompt, .n_choices = 1, .vision = true,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 6, .logprobs = 3, .ignore_eos = true},
        .images = {.n_tiles = 1, .n_runs = 1, .sizes = sizes, .pixels = pixels, .n_bytes = sizeof pixels,
                   .tile_keys = key, .run_keys = key, .spans = runs, .sources = sources, .n_sources = SEEN},
    };
    *job = (tiny_job){0};
    MP_CHECK_OK(mp_text_request_create(&args, &job->call, &error), &error);
    job->item.request = &job->call->base;
    MP_CHECK_OK(model->ops->check(model, job->item.request, &cost, &job->item.total, &error), &error);
}

/* Run steps with one request until `image_steps` steps have computed parts of its image, or until it has `tokens`
 * tokens; return the number of image steps. */
static int run_steps(isolated *it, int which, tiny_job *job, int image_steps, uint32_t tokens) {
    mp_item *items[1] = {&job->item};
    int found = 0;
    for (bool image_step; !job->done && found < image_steps && job->call->choices[0].token_count < tokens;) {
        step(it, which, items, 1, 1, &image_step);
        found += image_step;
    }
    return found;
}

/* Kill the process of engine 0 during a step of one request, and preempt the request. */
static void kill_process(isolated *it, tiny_job *job, bool within_image) {
    mp_engine *engine = it->engine[0];
    mp_item *items[1] = {&job->item};
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    const uint32_t written = job->call->choices[0].token_count;
    engine->ops->plan(engine, items, 1, 1, &plan);
    MP_CHECK_INT((int)job->item.cursor < job->call->n_prompt, within_image);
    MP_CHECK_INT(kill(engine->process, SIGKILL), 0);
    engine->ops->step(engine, &it->lease, &plan, outcomes);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_FAILED);
    MP_CHECK_INT(job->item.error.code, MP_RECV);
    MP_CHECK(engine->lost(engine) != NULL);
    MP_CHECK_INT(job->call->choices[0].token_count, written);
    MP_CHECK_INT(job->call->base.seen(&job->call->base), !within_image); /* after the prompt its caller may have seen a
                                                                          * token */
    engine->ops->preempt(engine, &job->item);
}

/* A process computes an image once, even for several requests; another process computes the image again. If a process
 * dies within an image or within a completion, another process finishes the request with the same bytes. */
MP_TEST_SECONDS(isolation_vision_encodes_an_image_once_and_survives_a_process, 120) {
    static const mp_dtype floats[] = {MP_F32};
    uint64_t expected = 0;
    mp_error error;
    isolated it;
    tiny_job job;
    mp_spec *spec = tiny_decoder_spec_as(&axial_kind, floats, 1, 42, -1);
    isolated_load(&it, mp_spec_pin(spec), MP_COMPUTE_F32, 1, isolation_options("spec"));
    for (int k = 0; k < 3; k++) {
        mp_engine *engine = it.engine[k / 2];
        make_large(it.model, &job);
        MP_CHECK_OK(engine->ops->admit(engine, &job.item, &error), &error);
        int image_steps = run_steps(&it, k / 2, &job, ALL, UINT32_MAX);
        if (k == 1)
            MP_CHECK_INT(image_steps, 0);
        else
            MP_CHECK(image_steps > 2 && (uint64_t)image_steps <= job.call->images.most_parts);
        MP_CHECK(job.done && (k == 0 || tiny_job_hash(&job) == expected));
        expected = tiny_job_hash(&job);
        mp_request_destroy(&job.call->base);
    }
    isolated_unload(&it);

    for (int answer = 0; answer < 2; answer++) {
        isolated_load(&it, mp_spec_pin(spec), MP_COMPUTE_F32, 1, isolation_options("spec"));
        make_large(it.model, &job);
        MP_CHECK_OK(it.engine[0]->ops->admit(it.engine[0], &job.item, &error), &error);
        if (answer)
            run_steps(&it, 0, &job, ALL, 2);
        else
            MP_CHECK_INT(run_steps(&it, 0, &job, 1, 1), 1);
        kill_process(&it, &job, !answer);
        MP_CHECK_OK(it.engine[1]->ops->admit(it.engine[1], &job.item, &error), &error);
        MP_CHECK(run_steps(&it, 1, &job, ALL, UINT32_MAX) > 2); /* the image is computed from its start */
        MP_CHECK(job.done && tiny_job_hash(&job) == expected);
        mp_request_destroy(&job.call->base);
        isolated_unload(&it);
    }
    mp_spec_unpin(spec);
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

enum { PARTS = 10, SIDE_OF_ONE = 2 };

static mp_text_request *small_call(bool vision) {
    static const int32_t prompt[] = {1, 2, 3}, sizes[] = {SIDE_OF_ONE, SIDE_OF_ONE}, runs[] = {1, 1, 1};
    static const uint8_t pixels[SIDE_OF_ONE * SIDE_OF_ONE * 3], keys[MP_IMAGE_KEY] = {1};
    mp_text_args args = {.n_prompt = 3, .prompt = prompt, .n_choices = 1, .vision = vision,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = MAX_TOKENS, .logprobs = -1}};
    if (vision)
        args.images = (mp_text_image_args){.n_tiles = 1, .n_runs = 1, .sizes = sizes, .pixels = pixels,
                                           .n_bytes = sizeof pixels, .tile_keys = keys, .run_keys = keys,
                                           .spans = runs};
    mp_text_request *call;
    mp_error error;
    MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
    call->vocab = call->sampled_vocab = VOCAB;
    call->context = 4096;
    call->images.most_parts = vision ? PARTS : 0;
    MP_CHECK_OK(mp_text_request_output(call, 4, &error), &error);
    return call;
}

/* Compose a step that advances the item to `cursor` and yields no token. */
static void compose(scene *s, uint32_t cursor) {
    mp_wire_begin(&s->out, &s->p.child, MP_FRAME_STEP);
    mp_put_u8(&s->out, MP_OUTCOME_MORE);
    mp_put_u32(&s->out, cursor);
    mp_put_u32(&s->out, 0); /* cached tokens */
    mp_put_u8(&s->out, 0);  /* prefill is not done */
    mp_put_u8(&s->out, MP_FINISH_NONE);
    mp_put_i32(&s->out, -1);
    for (int i = 0; i < 3; i++) /* token count, decided bytes, end of the text */
        mp_put_u32(&s->out, 0);
    put_learnt(s);
}

/* An image takes at most as many steps as it has parts. The parent abandons a process that needs more steps. */
MP_TEST(isolation_images_that_never_finish_are_failed) {
    for (int vision = 0; vision < 2; vision++) {
        static scene s;
        mp_text_request *call = small_call(vision);
        const int most = (int)mp_request_wire_of(call->base.capability)->most_idle(&call->base);
        int steps = 0;
        memset(&s, 0, sizeof s);
        s.mutate_at = -1;
        scene_admit(&s, &call->base, 8);
        for (; !s.engine->lost(s.engine); steps++) {
            MP_CHECK(steps < 1000);
            answer_plan(&s, 1, false);
            compose(&s, steps < 5 ? 0 : 1); /* cursor 1 from the sixth step on: progress once */
            run_step(&s);
        }
        MP_CHECK_INT(steps, 5 + 1 + most + 1);
        MP_CHECK_INT(most, 16 + 3 + MAX_TOKENS + (vision ? 2 * PARTS : 0));
        MP_CHECK_HAS(s.item.error.message, "made no progress on a request");
        MP_CHECK_INT(call->choices[0].token_count, 0);
        scene_end(&s);
        mp_request_destroy(&call->base);
    }
}

/* Change each byte of the result of a request with images: the parent refuses the result, or the result is valid. The
 * request's prompt and images stay unchanged. */
MP_TEST_SECONDS(isolation_vision_results_with_a_changed_byte_are_correct_or_refused, 60) {
    static const uint8_t changes[] = {1, 2, 8, 64, 128, 255, 127};
    size_t used = 1;
    int refused = 0;
    for (int at = -1; at < (int)used; at++)
        for (size_t i = 0; i < sizeof changes; i++) {
            static scene s;
            mp_text_request *call = small_call(true);
            memset(&s, 0, sizeof s);
            s.mutate_at = -1;
            scene_admit(&s, &call->base, 8);
            answer_plan(&s, 1, false);
            s.mutate_at = at;
            s.mutate_by = changes[i];
            compose(&s, 1);
            used = s.out.used;
            mp_outcome outcome = run_step(&s);
            const bool lost = s.engine->lost(s.engine) != NULL;
            refused += lost;
            MP_CHECK(at >= 0 || (!lost && outcome == MP_OUTCOME_MORE && s.item.cursor == 1));
            MP_CHECK(lost ? outcome == MP_OUTCOME_FAILED && s.item.cursor == 0 : s.item.cursor <= 8);
            MP_CHECK(call->images.n_tiles == 1 && call->images.most_parts == PARTS && call->prompt[2] == 3);
            MP_CHECK(call->choices[0].token_count == 0 && call->cached_tokens <= 3);
            scene_end(&s);
            mp_request_destroy(&call->base);
        }
    MP_CHECK(refused > 100);
}

/* ---- the request in transit -------------------------------------------------------------------------------------- */

/* Send a request through a channel, with or without images. at: index of a byte to change; < 0 = none. */
static mp_status cross(bool images, int at, mp_error *error) {
    static const int32_t prompt[] = {1, 2, 3, 4, 5}, sizes[] = {2, 3, 1, 1}, runs[] = {1, 2, 1, 3, 1, 1},
                         sources[] = {4, -1, 0}, times[] = {-1, 3};
    static const uint8_t pixels[3 * (2 * 3 + 1)] = {7, 8, 9}, keys[2 * MP_IMAGE_KEY] = {1, 2};
    static mp_wire_out out;
    static mp_wire_in in;
    pair p;
    mp_request *got = NULL;
    mp_text_request *call;
    mp_text_args args = {.n_prompt = 5, .prompt = prompt, .n_choices = 1, .vision = true,
                         .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 2, .logprobs = -1}};
    if (images)
        args.images = (mp_text_image_args){.n_tiles = 2, .n_runs = 2, .sizes = sizes, .pixels = pixels,
                                           .n_bytes = sizeof pixels, .tile_keys = keys, .run_keys = keys, .spans = runs,
                                           .sources = sources, .n_sources = 3, .times = times, .n_times = 2};
    MP_TRY(mp_text_request_create(&args, &call, error));
    mp_item item = {.request = &call->base};
    uint64_t progress[64] = {0};
    MP_CHECK(mp_wire_text_to_text.progress_bytes(&call->base) <= sizeof progress);
    pair_init(&p);
    mp_wire_begin(&out, &p.parent, MP_FRAME_ADMIT);
    mp_wire_text_to_text.put_request(&out, &item, progress);
    MP_CHECK(out.used < MP_FRAME_MAX);
    if (at >= 0 && (size_t)at < out.used)
        out.buffer[at] ^= 0x81;
    MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.child, false));
    mp_error_clear(error);
    mp_status status = mp_wire_text_to_text.get_request(&in, &got, error);
    MP_CHECK((status == MP_OK) == (got != NULL));
    if (status == MP_OK && at < 0) {
        const mp_text_images *a = &call->images, *b = &((const mp_text_request *)got)->images;
        MP_CHECK(got->capability == MP_VISION && a->n_tiles == b->n_tiles && a->n_runs == b->n_runs);
        if (images) {
            MP_CHECK(memcmp(a->sizes, b->sizes, sizeof sizes) == 0);
            MP_CHECK(memcmp(a->runs, b->runs, 2 * sizeof *a->runs) == 0);
            MP_CHECK(memcmp(a->pixels, b->pixels, sizeof pixels) == 0 && memcmp(a->tile_keys, b->tile_keys, 32) == 0);
            MP_CHECK(memcmp(a->run_keys, b->run_keys, 32) == 0 && memcmp(a->sources, b->sources, sizeof sources) == 0);
            MP_CHECK(b->runs[0].time == -1 && b->runs[1].time == 3);
        }
    }
    mp_request_destroy(got);
    mp_request_destroy(&call->base);
    free(p.page);
    return at >= 0 ? MP_OK : status;
}

/* A corrupted request may be refused or accepted, but must not crash. The elements of an array that do not arrive
 * occupy no memory: page faults of gigabytes take longer than the test may. */
MP_TEST(isolation_requests_with_images_are_transferred) {
    struct rusage before, after;
    mp_error error;
    getrusage(RUSAGE_SELF, &before);
    for (int images = 0; images < 2; images++) {
        MP_CHECK_OK(cross(images, -1, &error), &error);
        for (int at = 0; at < 400; at++)
            cross(images, at, &error);
    }
    getrusage(RUSAGE_SELF, &after);
    MP_CHECK(MP_SANITIZED || after.ru_minflt - before.ru_minflt < 200000);
}

static mp_status cross_sweep(void *arg, mp_error *error) { return cross(*(bool *)arg, -1, error); }
MP_TEST_SECONDS(isolation_requests_with_images_survive_refused_memory, 60) {
    bool images = true;
    mp_test_alloc_sweep(cross_sweep, &images);
}
