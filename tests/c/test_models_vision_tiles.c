/* Images of several tiles, and the first matrix of an axial network in two halves. */
#include "late_threads.h"
#include "models/decoder/engine.h"
#include "models/vision/vision.h"
#include "ranges_fixture.h"
#include "sizes_fixture.h"
#include "vision_fixture.h"

enum { TILES = 2, BEFORE = 3, AFTER = 5, PROMPT = BEFORE + TILES * ROWS + AFTER };

/* Make a request with two tiles side by side: of one image, or of two images. swapped: the tiles in the other order. */
static void make_tiles(const tiny_model *tiny, tiny_job *job, bool one_image, bool swapped) {
    static uint8_t pixels[TILES * PIXELS], keys[TILES * MP_IMAGE_KEY], run_keys[TILES * MP_IMAGE_KEY];
    const int32_t sizes[2 * TILES] = {SIDE, SIDE, SIDE, SIDE};
    const int32_t one[] = {BEFORE, TILES * ROWS, TILES}, two[] = {BEFORE, ROWS, 1, BEFORE + ROWS, ROWS, 1};
    int32_t prompt[PROMPT];
    for (int t = 0; t < TILES; t++) {
        const int seed = swapped ? TILES - t : 1 + t;
        mp_test_random own = {1000 + (uint64_t)seed};
        for (int p = 0; p < PIXELS; p++)
            pixels[t * PIXELS + p] = (uint8_t)mp_test_random_u64(&own);
        keys[t * MP_IMAGE_KEY] = (uint8_t)seed;
        run_keys[t * MP_IMAGE_KEY] = (uint8_t)(10 + 2 * one_image + seed);
    }
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = i >= BEFORE && i < BEFORE + TILES * ROWS ? MARK : 7 + i;
    const mp_text_args args = {
        .n_prompt = PROMPT,
        .prompt = prompt,
        .n_choices = 1,
        .want_prompt_logits = true,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = ANSWER, .logprobs = 3, .ignore_eos = true},
        .vision = true,
        .images = {.n_tiles = TILES, .n_runs = one_image ? 1 : TILES, .sizes = sizes, .pixels = pixels,
                   .n_bytes = TILES * PIXELS, .tile_keys = keys, .run_keys = run_keys,
                   .spans = one_image ? one : two},
    };
    tiny_job_make(tiny, job, &args, 0);
}

static uint64_t hash_of_tiles(tiny_model *tiny, bool one_image, bool swapped) {
    tiny_job job;
    mp_item *items[1] = {&job.item};
    mp_plan plan = {0};
    make_tiles(tiny, &job, one_image, swapped);
    tiny_job_admit(tiny, &job);
    mp_outcome outcomes[MP_PLAN_MAX];
    do {
        tiny->engine->ops->plan(tiny->engine, items, 1, UINT64_MAX, &plan);
        tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    } while (outcomes[0] == MP_OUTCOME_MORE);
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_DONE);
    tiny->engine->ops->retire(tiny->engine, &job.item);
    const uint64_t hash = tiny_job_hash(&job);
    mp_request_destroy(&job.call->base);
    return hash;
}

/* The rows of an image's tiles follow each other, as those of two images do. */
MP_TEST(models_vision_tiles_of_an_image_follow_each_other) {
    static const mp_dtype floats[] = {MP_F32};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    const uint64_t two = hash_of_tiles(&tiny, false, false);
    MP_CHECK(hash_of_tiles(&tiny, true, false) == two);
    MP_CHECK(hash_of_tiles(&tiny, true, true) != two);
    tiny_unload(&tiny);
}

/* An image has rows only if the network can cut it: of its own size, or, if it takes any size, in whole units. */
MP_TEST(models_vision_rows_of_unsuitable_sizes) {
    static const mp_dtype floats[] = {MP_F32};
    static const tiny_kind *const kinds[] = {&llava_kind, &axial_kind};
    for (int k = 0; k < 2; k++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_decoder_spec_as(kinds[k], floats, 1, 42, -1), MP_COMPUTE_F32, 1);
        const mp_vision *vision = ((const mp_decoder *)tiny.model)->vision;
        const int unit = vision->image_encoder.patch * vision->merge;
        for (int h = 0; h <= 3 * SIDE; h++)
            for (int w = 0; w <= 3 * SIDE; w++) {
                const bool fits = k == 0 ? h == SIDE && w == SIDE : h > 0 && w > 0 && h % unit == 0 && w % unit == 0;
                MP_CHECK_INT(mp_vision_rows(vision, h, w), fits ? h / unit * (w / unit) + vision->keep_class : 0);
            }
        tiny_unload(&tiny);
    }
}

/* A first matrix that is stored as two halves, one per frame, has the inputs of both: channels, frames, patch. */
MP_TEST(models_vision_joins_the_halves_of_the_first_matrix) {
    enum { AREA = PATCH * PATCH, INPUTS = 3 * AREA };
    static const mp_dtype floats[] = {MP_F32};
    const int64_t shape[2] = {HIDDEN, INPUTS};
    mp_error error;
    mp_tensor first, second;
    float row[2 * INPUTS];
    tiny_model tiny;
    halves = true;
    tiny_load(&tiny, tiny_decoder_spec_as(&axial_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    halves = false;
    const mp_decoder *model = (const mp_decoder *)tiny.model;
    const mp_linear *patches = &model->vision->image_encoder.patches;
    MP_CHECK_OK(mp_weights_get(model->weights, "v.patch_embd.weight", 2, shape, &first, &error), &error);
    MP_CHECK_OK(mp_weights_get(model->weights, "v.patch_embd.weight.1", 2, shape, &second, &error), &error);
    MP_CHECK(patches->N == HIDDEN && patches->K == 2 * INPUTS && patches->parts == 1);
    for (int r = 0; r < HIDDEN; r++) {
        const float *a = (const float *)(const void *)mp_tensor_row(&first, r);
        const float *b = (const float *)(const void *)mp_tensor_row(&second, r);
        mp_wmat_row(&patches->w[0], r, row);
        for (int i = 0; i < INPUTS; i++)
            MP_CHECK(row[i / AREA * 2 * AREA + i % AREA] == a[i] && row[(i / AREA * 2 + 1) * AREA + i % AREA] == b[i]);
    }
    tiny_unload(&tiny);
}

MP_TEST(models_ranges_of_vision) {
    static const range images[] = {
        {".vision.attention.head_count", "an integer from 1 to 24"},
        {".vision.attention.layer_norm_epsilon", "a number from 1e-30 to 1"},
        {".vision.block_count", "an integer from 1 to 1024 (a limit of mpool)"},
        {".vision.embedding_length", "an integer from 1 to 65536 (a limit of mpool)"},
        {".vision.feed_forward_length", "an integer from 1 to 1048576 (a limit of mpool)"},
        {".vision.image_size", "an integer from 4 to 1024"},
        {".vision.patch_size", "an integer from 1 to 256 (a limit of mpool)"},
        {"mpool.image.mean", "three finite numbers"},
        {"mpool.image.registers", "an integer from 0 to 64 (a limit of mpool)"},
        {"mpool.image.rescale_factor", "a number from 1e-09 to 1e+09"},
        {"mpool.image.std", "three finite numbers above 0"},
        {"mpool.image.window_layers", "the integer 0, or an array of 3"},
        {"mpool.vision.image_token_id", "an integer from -1 to 16777216"},
        {"mpool.vision.merge", "an integer from 1 to 16"},
        {"mpool.vision.tap_layers", "an integer from 0 to 1, or an array of 3"},
    };
    static const range axial[] = {
        {"mpool.image.frames", "an integer from 1 to 16"},
        {"mpool.image.rope_base", "a number from 1 to 1e+12"},
        {"mpool.image.window", "an integer from 1 to 256"},
        {"mpool.image.window_layers", "an integer from 0 to 1, or an array of 3"},
    };
    static const mp_dtype floats[] = {MP_F32};
    check_ranges(tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), RANGES(images));
    check_ranges(tiny_decoder_spec_as(&axial_kind, floats, 1, 42, -1), RANGES(axial));
}

/* The polls of a request with two images, as recorded: those of its rows, and those after each part of an image, whose
 * rows the operations of a part limit. */
MP_TEST(models_vision_polls_recorded) {
    enum { GRAIN = 3, COUNT = 3 };
    static const mp_dtype floats[] = {MP_F32};
    static const uint64_t most_ops[] = {UINT64_MAX, 200000, 1};
    static const uint64_t recorded[COUNT] = {46, 56, 210};
    uint64_t got[COUNT];
    for (int i = 0; i < COUNT; i++) {
        tiny_model tiny;
        tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
        mp_vit *image_encoder = &((mp_decoder *)tiny.model)->vision->image_encoder;
        image_encoder->grain = GRAIN;
        image_encoder->most_ops = most_ops[i];
        (void)lease_polls();
        (void)hash_of_tiles(&tiny, false, false);
        got[i] = (uint64_t)lease_polls();
        tiny_unload(&tiny);
    }
    MP_CHECK(sizes_are("polls", got, recorded, COUNT));
}
