/* Images whose rows see each other: a row sees exactly the positions that it should, and a request has the same bits
 * wherever cached blocks end, however long its image is. */
#include "base/sanitize.h"
#include "late_threads.h"
#include "models/decoder/engine.h"
#include "models/vision/vision.h"
#include "vision_fixture.h"

enum { WINDOW = 9, MOST_TILES = 64 };

typedef struct shape { /* a prompt: tokens, images of equal tiles, tokens */
    int before, images, tiles, after; /* tokens; images, and tiles of each; tokens */
    bool logits;
} shape;

/* changed: index of a token that is another one; -1: none */
static void make_prompt(const tiny_model *tiny, tiny_job *job, const shape *shape, int changed) {
    static uint8_t pixels[MOST_TILES * PIXELS], keys[MOST_TILES * MP_IMAGE_KEY], run_keys[MOST_TILES * MP_IMAGE_KEY];
    int32_t prompt[1024], sizes[2 * MOST_TILES], runs[3 * MOST_TILES], at = 0;
    const int tiles = shape->images * shape->tiles, rows = shape->tiles * ROWS;
    mp_test_random text = {77};
    MP_CHECK(tiles <= MOST_TILES && shape->before + shape->images * rows + shape->after <= 1024);
    for (int t = 0; t < tiles; t++) {
        keys[t * MP_IMAGE_KEY] = (uint8_t)(1 + t / shape->tiles); /* the image */
        for (int p = 0; p < PIXELS; p++)
            pixels[t * PIXELS + p] = (uint8_t)(p * (7 + keys[t * MP_IMAGE_KEY]));
        sizes[2 * t] = sizes[2 * t + 1] = SIDE;
    }
    for (; at < shape->before; at++)
        prompt[at] = (int32_t)(mp_test_random_u64(&text) % (TINY_VOCAB - 1));
    for (int i = 0; i < shape->images; i++) {
        run_keys[i * MP_IMAGE_KEY] = (uint8_t)(1 + i);
        runs[3 * i] = at;
        runs[3 * i + 1] = rows;
        runs[3 * i + 2] = shape->tiles;
        for (int r = 0; r < rows; r++)
            prompt[at++] = MARK;
    }
    for (int i = 0; i < shape->after; i++)
        prompt[at++] = (int32_t)(mp_test_random_u64(&text) % (TINY_VOCAB - 1));
    if (changed >= 0)
        prompt[changed] = (prompt[changed] + 1) % (TINY_VOCAB - 1);
    const mp_text_args args = {
        .n_prompt = at,
        .prompt = prompt,
        .n_choices = 1,
        .want_prompt_logits = shape->logits,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = 3, .ignore_eos = true},
        .vision = true,
        .images = {.n_tiles = tiles, .n_runs = shape->images, .sizes = sizes, .pixels = pixels,
                   .n_bytes = tiles * PIXELS, .tile_keys = keys, .run_keys = run_keys, .spans = runs},
    };
    tiny_job_make(tiny, job, &args, 0);
}

static mp_text_engine *engine_of(tiny_model *tiny) { return (mp_text_engine *)tiny->engine; }

/* Run a step of n jobs with this time budget, and retire those that it completes. */
static void step_all(tiny_model *tiny, tiny_job *const *jobs, int n, uint64_t budget_ns) {
    mp_item *items[2];
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    for (int j = 0; j < n; j++)
        items[j] = &jobs[j]->item;
    /* no pass takes so little time that a longer one would not matter: then short steps have one layer of an image */
    atomic_store(&((mp_decoder *)tiny->model)->decode_ns, 1);
    tiny->engine->ops->plan(tiny->engine, items, n, budget_ns, &plan);
    MP_CHECK(plan.count > 0);
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    for (int p = 0; p < plan.count; p++) {
        tiny_job *job = jobs[n == 2 && plan.items[p] == items[1]];
        MP_CHECK(outcomes[p] == MP_OUTCOME_MORE || outcomes[p] == MP_OUTCOME_DONE);
        job->done = outcomes[p] == MP_OUTCOME_DONE;
        if (job->done)
            tiny->engine->ops->retire(tiny->engine, plan.items[p]);
    }
}

/* The same with one job. Returns false when it is done. */
static bool step(tiny_model *tiny, tiny_job *job, uint64_t budget_ns) {
    step_all(tiny, &job, 1, budget_ns);
    return !job->done;
}

/* Run a job to its end, and return its hash. *cached: prompt tokens found in the prefix cache. */
static uint64_t run(tiny_model *tiny, const shape *shape, int changed, uint64_t budget_ns, int32_t *cached) {
    tiny_job job;
    make_prompt(tiny, &job, shape, changed);
    tiny_job_admit(tiny, &job);
    while (step(tiny, &job, budget_ns)) {
    }
    const uint64_t hash = tiny_job_hash(&job);
    *cached = job.call->cached_tokens;
    mp_request_destroy(&job.call->base);
    return hash;
}

/* ---- visible rows ----------------------------------------------------------------------------------------------- */

/* Returns a component of a row of an encoded image, which the engine has. */
static float *component(tiny_model *tiny, int image, int row) {
    mp_tile *tile = engine_of(tiny)->images->tiles;
    while (tile && tile->key.pixels[0] != 1 + image)
        tile = tile->next;
    MP_CHECK(tile && row < tile->count);
    return &tile->rows[row * TINY_HIDDEN + 3];
}

/* Row i sees row j, that is, another row j changes the logits of row i, if j is at most i or in the same image, and if
 * i's window reaches j. Images side by side are different images. An image and the windows reach over a border of KV
 * blocks. */
MP_TEST_SECONDS(models_spans_rows_see_their_image, 120) {
    enum { BEFORE = 55, IMAGES = 2, AFTER = 20, END = BEFORE + IMAGES * ROWS, PROMPT = END + AFTER };
    static const mp_dtype floats[] = {MP_F32};
    static const int64_t first[TINY_LAYERS] = {0, 2, 2}; /* only the first layer has attention */
    static const shape shape = {BEFORE, IMAGES, 1, AFTER, true};
    static const tiny_kind kinds[] = {
        {.arch = "llava", .blocks = first, .more = add_image_encoder},
        {.arch = "llava", .window = WINDOW, .blocks = first, .more = add_image_encoder},
        {.arch = "llava", .blocks = first, .more = add_spans},
        {.arch = "llava", .window = WINDOW, .blocks = first, .more = add_spans},
    };
    for (int kind = 0; kind < 4; kind++) {
        const bool spans = kind / 2, window = kind % 2;
        tiny_model tiny;
        tiny_job base;
        tiny_load(&tiny, tiny_decoder_spec_as(&kinds[kind], floats, 1, 42, -1), MP_COMPUTE_F32, 1);
        make_prompt(&tiny, &base, &shape, -1);
        tiny_job_admit(&tiny, &base);
        while (step(&tiny, &base, UINT64_MAX)) {
        }
        for (int j = 0; j < PROMPT; j += MP_SANITIZED ? 7 : 1) {
            tiny_job job;
            const int image = (j - BEFORE) / ROWS, row = (j - BEFORE) % ROWS;
            const bool in_image = j >= BEFORE && j < END;
            float none, *const at = in_image ? component(&tiny, image, row) : &none;
            const float was_there = in_image ? *at : 0;
            *at = was_there + 0.5f;
            make_prompt(&tiny, &job, &shape, in_image ? -1 : j);
            mp_prefix_trim(&engine_of(&tiny)->cache);
            tiny_job_admit(&tiny, &job);
            while (step(&tiny, &job, UINT64_MAX)) {
            }
            *at = was_there;
            for (int i = 0; i < PROMPT; i++) {
                const bool with_image = spans && in_image && i >= BEFORE && i < END && (i - BEFORE) / ROWS == image;
                const bool sees = i == j || ((j < i || with_image) && (!window || j > i - WINDOW));
                const float *was = base.call->prompt_logits + i * TINY_VOCAB;
                if ((memcmp(was, job.call->prompt_logits + i * TINY_VOCAB, TINY_VOCAB * sizeof *was) != 0) != sees)
                    MP_FAIL("kind %d: row %d %s row %d", kind, i, sees ? "does not see" : "sees", j);
            }
            mp_request_destroy(&job.call->base);
        }
        mp_request_destroy(&base.call->base);
        tiny_unload(&tiny);
    }
}

/* ---- long images ------------------------------------------------------------------------------------------------- */

/* More rows than a step without images has, and less than a whole KV block before the image. */
static const shape long_image = {.before = 21, .images = 1, .tiles = 40, .after = 90};

static void load_long(tiny_model *tiny, bool windowed, bool floats, int threads) {
    static const mp_dtype types[] = {MP_F32, MP_Q8_0};
    tiny_kind kind = windowed ? windowed_spans_kind : spans_kind;
    kind.context = 1024;
    tiny_load(tiny, tiny_decoder_spec_as(&kind, floats ? types : types + 1, 1, 42, -1),
              floats ? MP_COMPUTE_F32 : MP_COMPUTE_AUTO, threads);
}

/* Evicts `count` blocks of the prefix cache: takes memory until that many had to go, and gives it back. */
static void evict(tiny_model *tiny, uint64_t count) {
    static uint32_t taken[4096];
    mp_prefix_cache *cache = &engine_of(tiny)->cache;
    const uint64_t before = cache->counters.evicted;
    mp_error error;
    int n = 0;
    tiny->budget.limit = tiny->budget.used;
    for (; cache->counters.evicted < before + count; n++)
        MP_CHECK_OK(mp_prefix_take(cache, &taken[n], &error), &error);
    tiny->budget.limit = UINT64_MAX;
    while (n-- > 0) {
        for (int p = 1; p < cache->kv.layout.parts; p++)
            mp_prefix_unref_part(cache, p, taken[n]);
        mp_prefix_unref_block(cache, taken[n]);
    }
}

/* A request continues after cached blocks that end anywhere in its image, with the bits that it has alone. */
MP_TEST_SECONDS(models_spans_continue_inside_an_image, 120) {
    for (int kind = 0; kind < 2; kind++) {
        enum { BLOCKS = (21 + 40 * ROWS + 90 - 1) / MP_KV_BLOCK };
        tiny_model tiny;
        int32_t cached;
        int inside = 0;
        load_long(&tiny, kind, kind, 1);
        const uint64_t expected = run(&tiny, &long_image, -1, UINT64_MAX, &cached);
        MP_CHECK_INT(cached, 0);
        for (int n = 0; n < BLOCKS; n++) {
            evict(&tiny, (uint64_t)n);
            MP_CHECK(run(&tiny, &long_image, -1, UINT64_MAX, &cached) == expected);
            inside += cached > 21 && cached < 21 + 40 * ROWS;
        }
        MP_CHECK(inside >= BLOCKS / 2);
        tiny_unload(&tiny);
    }
}

/* A request with a long image has the same bits in short and in long steps, beside a decoding request, on any number of
 * threads, and after it was preempted. */
MP_TEST_SECONDS(models_spans_longer_than_a_step, 120) {
    static const shape text = {.before = 30, .after = 1};
    for (int kind = 0; kind < 2; kind++) {
        uint64_t expected = 0, expected_text = 0;
        for (int threads = 1; threads <= 3; threads++) {
            tiny_model tiny;
            tiny_job jobs[2];
            int32_t cached;
            load_long(&tiny, kind, kind, threads);
            const uint64_t hash = run(&tiny, &long_image, -1, UINT64_MAX, &cached);
            const uint64_t hash_text = run(&tiny, &text, -1, UINT64_MAX, &cached);
            MP_CHECK(threads == 1 || (hash == expected && hash_text == expected_text));
            expected = hash;
            expected_text = hash_text;
            tiny_trim(&tiny);
            late_thread_of(threads);
            MP_CHECK(run(&tiny, &long_image, -1, 1, &cached) == expected);
            late_thread(-1);
            for (int preempted = 0; preempted < 3; preempted++) {
                int steps = 0;
                tiny_trim(&tiny);
                make_prompt(&tiny, &jobs[0], &text, -1);
                make_prompt(&tiny, &jobs[1], &long_image, -1);
                tiny_job_admit(&tiny, &jobs[0]);
                tiny_job_admit(&tiny, &jobs[1]);
                while (!jobs[0].done || !jobs[1].done) {
                    tiny_job *both[] = {&jobs[0], &jobs[1]};
                    const int done = jobs[0].done || jobs[1].done;
                    step_all(&tiny, jobs[0].done ? both + 1 : both, 2 - done, 1);
                    if (preempted > 0 && ++steps % (preempted + 2) == 0 && steps < 40 && !jobs[1].done) {
                        tiny.engine->ops->preempt(tiny.engine, &jobs[1].item);
                        tiny_job_admit(&tiny, &jobs[1]);
                    }
                }
                MP_CHECK(tiny_job_hash(&jobs[0]) == expected_text);
                MP_CHECK(tiny_job_hash(&jobs[1]) == expected);
                for (int j = 0; j < 2; j++)
                    mp_request_destroy(&jobs[j].call->base);
            }
            tiny_unload(&tiny);
        }
    }
}

/* Run a job in short steps until the pass over its image is paused. Returns its sequence. */
static const mp_sequence *pause_job(tiny_model *tiny, tiny_job *job) {
    make_prompt(tiny, job, &long_image, -1);
    tiny_job_admit(tiny, job);
    const mp_sequence *seq = &((const mp_sequence_group *)job->item.state)->seqs[0];
    do {
        MP_CHECK(step(tiny, job, 1));
    } while (!seq->paused.x);
    MP_CHECK_INT(seq->cached.count, long_image.before);
    return seq;
}

static void end_job(tiny_model *tiny, tiny_job *job) {
    if (!job->done)
        tiny->engine->ops->retire(tiny->engine, &job->item);
    mp_request_destroy(&job->call->base);
}

/* Between the layers of a long image's pass, a step computes the next token of another request. A request that ends
 * meanwhile leaves no memory behind. */
MP_TEST(models_spans_yield_between_layers) {
    static const shape text = {.before = 10, .after = 1};
    tiny_model tiny;
    tiny_job image, other, *const both[] = {&image, &other};
    load_long(&tiny, false, true, 1);
    pause_job(&tiny, &image);
    end_job(&tiny, &image);
    const mp_sequence *seq = pause_job(&tiny, &image);
    make_prompt(&tiny, &other, &text, -1);
    tiny_job_admit(&tiny, &other);
    for (int layer = 1; layer < TINY_LAYERS; layer++) {
        MP_CHECK_INT(seq->paused.layer, layer);
        MP_CHECK_INT(seq->cached.count, long_image.before);
        step_all(&tiny, both, 2, 1);
        MP_CHECK_INT(other.call->choices[0].token_count, layer);
    }
    MP_CHECK(!seq->paused.x);
    MP_CHECK_INT(seq->cached.count, long_image.before + long_image.tiles * ROWS);
    end_job(&tiny, &image);
    end_job(&tiny, &other);
    tiny_unload(&tiny);
}

/* A paused request continues after the blocks that an equal request publishes meanwhile. */
MP_TEST(models_spans_paused_beside_an_equal_request) {
    tiny_model tiny;
    tiny_job image;
    int32_t cached;
    load_long(&tiny, false, true, 1);
    pause_job(&tiny, &image);
    const uint64_t expected = run(&tiny, &long_image, -1, UINT64_MAX, &cached);
    MP_CHECK_INT(cached, 0);
    while (step(&tiny, &image, UINT64_MAX)) {
    }
    MP_CHECK(tiny_job_hash(&image) == expected);
    MP_CHECK(image.call->cached_tokens > long_image.tiles * ROWS);
    end_job(&tiny, &image);
    tiny_unload(&tiny);
}

/* Without memory for all rows of an image, none is computed, and the request waits. */
MP_TEST(models_spans_wait_for_memory_of_the_whole_image) {
    tiny_model tiny;
    tiny_job image;
    mp_item *item = &image.item;
    mp_plan plan = {0};
    mp_outcome outcomes[MP_PLAN_MAX];
    int32_t cached;
    load_long(&tiny, false, true, 1);
    const uint64_t expected = run(&tiny, &long_image, -1, UINT64_MAX, &cached);
    mp_prefix_cache *cache = &engine_of(&tiny)->cache;
    mp_prefix_trim(cache);
    make_prompt(&tiny, &image, &long_image, -1);
    tiny_job_admit(&tiny, &image);
    const mp_sequence *seq = &((const mp_sequence_group *)item->state)->seqs[0];
    while (seq->cached.count < long_image.before)
        step(&tiny, &image, 1);
    tiny.budget.limit = tiny.budget.used + 3 * mp_prefix_block_bytes(cache); /* the image needs ten more */
    tiny.engine->ops->plan(tiny.engine, &item, 1, UINT64_MAX, &plan);
    tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_WAIT_MEMORY);
    MP_CHECK_INT(seq->cached.count, long_image.before);
    MP_CHECK_INT(seq->cached.block_count, 4);
    tiny.budget.limit = UINT64_MAX;
    while (step(&tiny, &image, UINT64_MAX)) {
    }
    MP_CHECK(tiny_job_hash(&image) == expected);
    end_job(&tiny, &image);
    tiny_unload(&tiny);
}
