/* Images of several tiles, the first matrix of an axial network in two halves, and the predicted memory of images. */
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
    mp_plan plan;
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

/* A tile of another size than the network's is named in the error, also if it is the last one. */
MP_TEST(models_vision_names_unsuitable_tiles) {
    static const mp_dtype floats[] = {MP_F32};
    static const char *const names[TILES] = {"tile 0 is 20 x 16 pixels", "tile 1 is 20 x 16 pixels"};
    tiny_model tiny;
    tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    for (int t = 0; t < TILES; t++) {
        mp_error error;
        tiny_job job;
        uint64_t cost;
        uint32_t total;
        make_tiles(&tiny, &job, true, false);
        job.call->images.sizes[2 * t + 1] = SIDE + PATCH;
        MP_CHECK_STATUS(tiny.model->ops->check(tiny.model, &job.call->base, &cost, &total, &error),
                        MP_INVALID_ARGUMENT, &error);
        MP_CHECK_HAS(error.message, names[t]);
        mp_request_destroy(&job.call->base);
    }
    tiny_unload(&tiny);
}

/* A first matrix that is stored as two halves, one per frame, is their sum: an image counts as two equal frames. */
MP_TEST(models_vision_adds_the_halves_of_the_first_matrix) {
    enum { INPUTS = 3 * PATCH * PATCH };
    static const mp_dtype floats[] = {MP_F32};
    const int64_t shape[2] = {HIDDEN, INPUTS};
    mp_error error;
    mp_tensor first, second;
    float row[INPUTS];
    tiny_model tiny;
    halves = true;
    tiny_load(&tiny, tiny_decoder_spec_as(&axial_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    halves = false;
    const mp_decoder *model = (const mp_decoder *)tiny.model;
    const mp_linear *patches = &model->vision->image_encoder.patches;
    MP_CHECK_OK(mp_weights_get(model->weights, "v.patch_embd.weight", 2, shape, &first, &error), &error);
    MP_CHECK_OK(mp_weights_get(model->weights, "v.patch_embd.weight.1", 2, shape, &second, &error), &error);
    MP_CHECK(patches->N == HIDDEN && patches->K == INPUTS && patches->parts == 1);
    for (int r = 0; r < HIDDEN; r++) {
        const float *a = (const float *)(const void *)mp_tensor_row(&first, r);
        const float *b = (const float *)(const void *)mp_tensor_row(&second, r);
        mp_wmat_row(&patches->w[0], r, row);
        for (int i = 0; i < INPUTS; i++)
            MP_CHECK(row[i] == a[i] + b[i]);
    }
    tiny_unload(&tiny);
}

/* The memory predicted for an engine covers one image: state of the network, working memory of a part, rows of the
 * image, and their space in the KV cache. */
MP_TEST(models_vision_memory_of_an_image_is_predicted) {
    static const mp_dtype floats[] = {MP_F32};
    static const mp_compute types[] = {MP_COMPUTE_F32, MP_COMPUTE_BF16};
    const uint64_t state = 5 * mp_arena_cost((ROWS + 1) * HIDDEN * sizeof(float));
    const uint64_t kv = TINY_LAYERS * 2 * TINY_KV_HEADS * (TINY_HIDDEN / TINY_HEADS);
    for (int c = 0; c < 2; c++) {
        const uint64_t row = TINY_HIDDEN * sizeof(float) + kv * (types[c] == MP_COMPUTE_F32 ? 4 : 2);
        uint64_t model, engine, decoder_model, decoder_engine;
        tiny_model tiny;
        tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), types[c], 1);
        tiny.loader.ops->footprint(tiny.loader.self, &model, &engine);
        mp_decoder_footprint(tiny.spec, types[c], &decoder_model, &decoder_engine);
        MP_CHECK(model > decoder_model);
        const uint64_t scratch = engine - decoder_engine - (ROWS + 1) * row;
        MP_CHECK(scratch > state && scratch < state + (2 << 20));
        tiny_unload(&tiny);
    }
}

/* The parts of a request are those of each of its tiles, which have different sizes. */
MP_TEST(models_vision_parts_of_tiles_are_predicted) {
    enum { MERGED = 2, TILES = 3, GRAIN = 5 };
    mp_vit_layer layer = {0};
    mp_vision vision = {.image_encoder = {.hidden = 64, .heads = 4, .head_dim = 16, .ffn = 96, .layer_count = 1,
                                          .patch = PATCH, .layers = &layer, .any_size = true, .grain = GRAIN},
                        .merge = MERGED, .image_token = -1};
    int32_t sizes[2 * TILES] = {8 * PATCH, 12 * PATCH, 16 * PATCH, 4 * PATCH, 4 * PATCH, 20 * PATCH};
    mp_text_request request = {.images = {.n_tiles = TILES, .sizes = sizes}};
    mp_error error;
    uint64_t parts = 0;
    for (int t = 0; t < TILES; t++)
        parts += mp_vit_image_parts(&vision.image_encoder, sizes[2 * t] / PATCH, sizes[2 * t + 1] / PATCH) +
                 (uint64_t)(mp_vision_rows(&vision, sizes[2 * t], sizes[2 * t + 1]) / GRAIN + 1);
    MP_CHECK_OK(mp_vision_check(&vision, &request, &error), &error);
    MP_CHECK_INT(request.images.most_parts, parts);
}

/* The predicted time of a tile is that of the image network and of both layers of the projector, less the operations
 * that are done. */
MP_TEST(models_vision_time_of_a_tile_is_predicted) {
    enum { DOWN = 6, ACROSS = 10, MERGED = 2, INNER = 100, WIDE = 48 };
    mp_vit_layer layer = {0};
    mp_vision vision = {.image_encoder = {.hidden = 64, .heads = 4, .head_dim = 16, .ffn = 96, .layer_count = 1,
                                          .patch = PATCH, .layers = &layer, .patches = {.K = 12, .N = 64}},
                        .merge = MERGED,
                        .first = {.K = 64 * MERGED * MERGED, .N = INNER},
                        .second = {.K = INNER, .N = WIDE}};
    uint8_t keys[2][MP_IMAGE_KEY] = {{1}, {2}};
    int32_t sizes[] = {DOWN * PATCH, ACROSS * PATCH, DOWN * PATCH, ACROSS * PATCH};
    int64_t offsets[] = {0, 0, 0};
    mp_text_request request = {.images = {.tile_keys = keys[0], .offsets = offsets, .sizes = sizes}};
    const mp_sequence_group group = {.image_scope = {.tenant = 9}}, stranger = {.image_scope = {.tenant = 8}};
    mp_tile known = {.key = {.scope = group.image_scope, .pixels = {2}}};
    mp_tile_job job = {.tile = &known, .ops = 5000000};
    mp_image_store store = {.vision = &vision, .jobs = &job};
    atomic_init(&vision.image_encoder.mega_ns, 1000000); /* 1 ns for an operation */
    const uint64_t network = mp_vit_image_ops(&vision.image_encoder, DOWN, ACROSS, false);
    const uint64_t rows = DOWN * ACROSS / (MERGED * MERGED), row = 2 * (64 * MERGED * MERGED * INNER + INNER * WIDE);
    const uint64_t all = network + rows * row;
    MP_CHECK_INT(mp_images_left_ns(&store, &request, &group, 0), mp_vit_ns(&vision.image_encoder, all));
    MP_CHECK(all > job.ops);
    MP_CHECK_INT(mp_images_left_ns(&store, &request, &group, 1), mp_vit_ns(&vision.image_encoder, all - job.ops));
    MP_CHECK_INT(mp_images_left_ns(&store, &request, &stranger, 1), mp_vit_ns(&vision.image_encoder, all));
    MP_CHECK(mp_images_computing(&store, &request, &group, 1) && !mp_images_computing(&store, &request, &stranger, 1));
    job.ops = all + 1000000; /* a part may exceed its share */
    MP_CHECK_INT(mp_images_left_ns(&store, &request, &group, 1), mp_vit_ns(&vision.image_encoder, 0));
    vision.keep_class = true;
    MP_CHECK_INT(mp_images_left_ns(&store, &request, &group, 0), mp_vit_ns(&vision.image_encoder, all + row));
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

/* A tile is missing once a row needs it, and not for the row before. */
MP_TEST(models_vision_tiles_are_missing_for_their_rows) {
    static const mp_dtype floats[] = {MP_F32};
    tiny_model tiny;
    tiny_job job;
    int missing;
    tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    make_tiles(&tiny, &job, false, false);
    tiny_job_admit(&tiny, &job);
    mp_image_store *store = ((mp_text_engine *)tiny.engine)->images;
    mp_sequence_group *group = job.item.state;
    for (int want = 0; want <= PROMPT; want++) {
        const int ready = mp_images_ready(store, job.call, group, &group->seqs[0], want, &missing);
        MP_CHECK_INT(ready, want < BEFORE ? want : BEFORE);
        MP_CHECK_INT(missing, want > BEFORE ? 0 : -1);
    }
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}

/* Return a copy of a spec in which the first layer of the projector takes `merge` by `merge` patches; its weights are
 * the first bytes of the file. */
static mp_spec *merging(const mp_spec *from, int merge, bool keep_class) {
    mp_error error;
    int projector = 0;
    while (strcmp(mp_spec_tensor_at(from, projector)->name, "mm.0.weight") != 0)
        projector++;
    mp_tensor_entry entry = *mp_spec_tensor_at(from, projector);
    entry.offset = 0;
    entry.shape[1] *= merge * merge;
    entry.nbytes *= (uint64_t)(merge * merge);
    const mp_value merges = {.type = MP_VALUE_INT, .gguf_type = -1, .count = 1, .as.integer = merge};
    const mp_value keeps = {.type = MP_VALUE_BOOL, .gguf_type = -1, .count = 1, .as.integer = keep_class};
    mp_spec *spec = spec_copy(from, projector, 0);
    MP_CHECK_OK(mp_spec_add_tensor(spec, &entry, &error), &error);
    MP_CHECK_OK(mp_spec_set(spec, "mpool.vision.merge", &merges, &error), &error);
    MP_CHECK_OK(mp_spec_set(spec, "mpool.vision.keep_class", &keeps, &error), &error);
    mp_spec_freeze(spec);
    return spec;
}

/* Merged patches must fill each side, and a class token has no patches to be merged with. The projector of these files
 * fits, so that nothing else is wrong. */
MP_TEST(models_vision_refuses_merges_that_fill_no_side) {
    static const struct { int merge; bool keep_class, loads; } cases[] = {
        {1, false, true}, {1, true, true}, {2, false, true}, {2, true, false}, {3, false, false}};
    static const mp_dtype floats[] = {MP_F32};
    mp_error error;
    mp_spec *base = tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1);
    MP_CHECK_OK(mp_cpu_init("", &error), &error);
    mp_kernels_init();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mp_status status = load_only(merging(base, cases[i].merge, cases[i].keep_class), MP_COMPUTE_F32, &error);
        if (status != (cases[i].loads ? MP_OK : MP_FORMAT))
            MP_FAIL("case %zu: status %d, %s", i, (int)status, error.message);
        if (!cases[i].loads)
            MP_CHECK_STR(error.field, "mpool.vision.merge");
    }
    mp_spec_unpin(base);
}

/* The planned part of a tile gets the time of the step, but at least that of one part. It counts as the prompt rows of
 * this time, so that a request beside it is not charged for the image. */
MP_TEST(models_vision_planned_time_of_a_tile) {
    static const mp_dtype floats[] = {MP_F32};
    tiny_model tiny;
    tiny_job job;
    mp_item *items[1] = {&job.item};
    mp_plan plan;
    tiny_load(&tiny, tiny_decoder_spec_as(&llava_kind, floats, 1, 42, -1), MP_COMPUTE_F32, 1);
    make_tiles(&tiny, &job, false, false);
    tiny_job_admit(&tiny, &job);
    mp_outcome outcomes[MP_PLAN_MAX];
    enum { ROW_NS = 1000 };
    atomic_store(&((mp_decoder *)tiny.model)->row_ns, ROW_NS - 1); /* the plan rounds up */
    tiny.engine->ops->plan(tiny.engine, items, 1, 0, &plan);
    tiny.engine->ops->step(tiny.engine, &tiny.lease, &plan, outcomes); /* the rows before the image */
    atomic_store(&((mp_decoder *)tiny.model)->row_ns, ROW_NS - 1); /* the step has measured it */
    MP_CHECK_INT(outcomes[0], MP_OUTCOME_MORE);
    const mp_text_engine *engine = (const mp_text_engine *)tiny.engine;
    const uint64_t least = mp_images_part_ns(engine->images);
    const uint64_t all = mp_images_left_ns(engine->images, job.call, job.item.state, 0);
    for (int large = 0; large < 2; large++) {
        const uint64_t budget_ns = large ? 1000 * 1000 * 1000 : 0;
        tiny.engine->ops->plan(tiny.engine, items, 1, budget_ns, &plan);
        MP_CHECK(engine->image_part.item == &job.item && engine->image_part.tile == 0);
        const uint64_t ns = large ? budget_ns : least;
        MP_CHECK_INT(engine->image_part.budget_ns, ns);
        MP_CHECK_INT(plan.cost_ns, ns < all ? ns : all);
        MP_CHECK_INT(plan.count, 1);
        MP_CHECK_INT(plan.amount[0], plan.cost_ns / ROW_NS + 1);
        MP_CHECK(plan.amount[0] > 1);
    }
    tiny.engine->ops->retire(tiny.engine, &job.item);
    mp_request_destroy(&job.call->base);
    tiny_unload(&tiny);
}
