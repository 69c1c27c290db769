/* test_models_vit_last_layer.c: the last layer of an image transformer computes the class token alone if nothing else
 * is read. The vectors have the bits of a last layer that computes all rows. */
#include "counted_fixture.h"
#include "vit_fixture.h"

enum { MAX_ROWS = 4 + (MAX_SIDE / PATCH) * (MAX_SIDE / PATCH) };

/* Make a vector from the vectors of an image's tokens. */
static void finish(const mp_vit *model, const float *tokens, float *out) {
    float normed[HIDDEN];
    float *scratch = mp_alloc(mp_head_scratch(&model->head) * sizeof *scratch, MP_TAG_SCRATCH);
    mp_norm_row(&model->norm, tokens, normed);
    mp_head_apply(&model->head, normed, 1, 0, WIDTH, model->head.normalize, scratch, out);
    mp_free(scratch);
}

/* Compute the vectors of images [0, count) from all their tokens. */
static void from_tokens(tiny_model *tiny, const test_images *all, int count, float *out) {
    const mp_vit *model = (const mp_vit *)tiny->model;
    mp_image_embedding_request *call = make_call(all, 0, count);
    const float *tokens;
    call->output = MP_IMAGE_TOKENS;
    MP_CHECK_INT(run_call(tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
    tokens = call->vectors;
    for (int i = 0; i < count; i++) {
        finish(model, tokens, out + i * WIDTH);
        tokens += mp_vit_rows(model, all->sizes[2 * i] / PATCH, all->sizes[2 * i + 1] / PATCH) * HIDDEN;
    }
    mp_request_destroy(&call->base);
}

static void check_bits(const char *arch, bool gated, mp_compute compute) {
    enum { SOME = 7 };
    static test_images all;
    static float expected[SOME * WIDTH], out[SOME * WIDTH];
    make_images(&all, true);
    for (int threads = 1; threads <= 3; threads += 2)
        for (int parts = 0; parts < 2; parts++) {
            tiny_model tiny;
            tiny_load(&tiny, make_spec(arch, gated), compute, threads);
            compute_all(&tiny);
            if (parts)
                cut(&tiny);
            if (threads == 1 && !parts)
                from_tokens(&tiny, &all, SOME, expected);
            MP_CHECK_INT(run(&tiny, &all, 0, SOME, UINT64_MAX, out), MP_OUTCOME_DONE);
            MP_CHECK(memcmp(out, expected, sizeof out) == 0);
            MP_CHECK_INT(run(&tiny, &all, 2, 1, UINT64_MAX, out), MP_OUTCOME_DONE);
            MP_CHECK(memcmp(out, expected + 2 * WIDTH, WIDTH * sizeof *out) == 0);
            MP_CHECK_INT(run(&tiny, &all, 3, 2, 1, out), MP_OUTCOME_DONE); /* in parts, over several steps */
            MP_CHECK(memcmp(out, expected + 3 * WIDTH, 2 * WIDTH * sizeof *out) == 0);
            tiny_unload(&tiny);
        }
}

MP_TEST(models_vit_last_layer_bits) {
    check_bits("dinov2", false, MP_COMPUTE_F32);
    check_bits("dinov2_with_registers", true, MP_COMPUTE_F32);
    check_bits("dinov2", true, MP_COMPUTE_BF16);
    check_bits("dinov2", false, MP_COMPUTE_I8);
}

/* Serve both requests in one step. */
static void serve_both(tiny_model *tiny, mp_image_embedding_request *const *calls) {
    mp_item items[2] = {0};
    mp_plan plan = {.count = 2};
    mp_outcome outcomes[MP_PLAN_MAX];
    mp_error error;
    uint64_t cost;
    for (int i = 0; i < 2; i++) {
        items[i].request = &calls[i]->base;
        MP_CHECK_OK(tiny->model->ops->check(tiny->model, items[i].request, &cost, &items[i].total, &error), &error);
        MP_CHECK_OK(tiny->engine->ops->admit(tiny->engine, &items[i], &error), &error);
        plan.items[i] = &items[i];
        plan.amount[i] = items[i].total;
    }
    tiny->engine->ops->step(tiny->engine, &tiny->lease, &plan, outcomes);
    for (int i = 0; i < 2; i++) {
        MP_CHECK_INT(outcomes[i], MP_OUTCOME_DONE);
        tiny->engine->ops->retire(tiny->engine, &items[i]);
    }
}

/* Vectors of images and of tokens in one group: both have the bits of requests of their own. */
MP_TEST(models_vit_last_layer_beside_tokens) {
    static test_images all;
    static float tokens[2 * MAX_ROWS * HIDDEN], pooled[2 * WIDTH];
    make_images(&all, true);
    for (int turn = 0; turn < 8; turn++) {
        const int threads = 1 + turn % 2, first = turn / 4; /* the tokens come first, or second */
        tiny_model tiny;
        mp_image_embedding_request *call = make_call(&all, 2, 2), *calls[2];
        tiny_load(&tiny, make_spec("dinov2", false), MP_COMPUTE_F32, threads);
        compute_all(&tiny);
        call->output = MP_IMAGE_TOKENS;
        MP_CHECK_INT(run_call(&tiny, &call->base, UINT64_MAX), MP_OUTCOME_DONE);
        const size_t floats = (size_t)((mp_vit_rows((mp_vit *)tiny.model, all.sizes[4] / PATCH, all.sizes[5] / PATCH) +
                                        mp_vit_rows((mp_vit *)tiny.model, all.sizes[6] / PATCH, all.sizes[7] / PATCH)) *
                                       HIDDEN);
        memcpy(tokens, call->vectors, floats * sizeof *tokens);
        mp_request_destroy(&call->base);
        MP_CHECK_INT(run(&tiny, &all, 0, 2, UINT64_MAX, pooled), MP_OUTCOME_DONE);
        if (turn / 2 % 2)
            cut(&tiny);
        calls[first] = make_call(&all, 2, 2);
        calls[first]->output = MP_IMAGE_TOKENS;
        calls[!first] = make_call(&all, 0, 2);
        serve_both(&tiny, calls);
        MP_CHECK(memcmp(calls[first]->vectors, tokens, floats * sizeof *tokens) == 0);
        MP_CHECK(memcmp(calls[!first]->vectors, pooled, sizeof pooled) == 0);
        mp_request_destroy(&calls[0]->base);
        mp_request_destroy(&calls[1]->base);
        tiny_unload(&tiny);
    }
}

/* Compare the kernels' work for images [first, first + count) with the predicted operations. */
static void check_work(const char *arch, int threads, bool parts, int first, int count, uint64_t budget_ns) {
    static test_images all;
    static float out[IMAGES * WIDTH];
    const bool pool = strcmp(arch, "siglip") == 0;
    uint64_t ops = 0, whole = 0;
    tiny_model tiny;
    make_images(&all, !pool);
    tiny_load(&tiny, make_spec(arch, false), MP_COMPUTE_F32, threads);
    const mp_vit *model = (const mp_vit *)tiny.model;
    if (parts)
        cut(&tiny);
    for (int i = first; i < first + count; i++) {
        const int32_t down = all.sizes[2 * i] / PATCH, across = all.sizes[2 * i + 1] / PATCH;
        const uint64_t rows = (uint64_t)mp_vit_rows(model, down, across), head = 2 * HIDDEN * WIDTH;
        ops += mp_vit_image_ops(model, down, across, true) + head;
        whole += mp_vit_image_ops(model, down, across, false) + head;
        if (pool) /* the keys, values and attention of the learned query; the rest has one row */
            whole += rows * 4 * HIDDEN * HIDDEN + 4 * rows * HIDDEN +
                     2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * (uint64_t)model->ffn);
    }
    if (pool)
        whole -= (uint64_t)(count - 1) * 2 * HIDDEN * HIDDEN; /* the learned query is projected once for all */
    count_kernels();
    MP_CHECK_INT(run(&tiny, &all, first, count, budget_ns, out), MP_OUTCOME_DONE);
    mp_kernels_init();
    MP_CHECK_INT(2 * (counted.products + counted.attention), pool ? whole : ops);
    MP_CHECK(ops < whole);
    tiny_unload(&tiny);
}

/* The work of an image is exactly its predicted cost: only attention pooling reads all rows of the last layer. */
MP_TEST(models_vit_last_layer_work) {
    check_work("dinov2", 1, false, 0, 6, UINT64_MAX);
    check_work("dinov2", 1, true, 0, 6, UINT64_MAX);
    check_work("dinov2", 2, true, 3, 1, UINT64_MAX); /* the threads share the image */
    check_work("dinov2", 2, true, 3, 2, 1);          /* in parts, over several steps */
    check_work("dinov2_with_registers", 2, false, 0, 6, UINT64_MAX);
    check_work("siglip", 1, false, 0, 3, UINT64_MAX);
}
