/* test_models_check.c: models check a request before it is queued: ids, lengths and options at their bounds, units
 * and predicted time, computed by hand, and the facts of the model that the request receives. */
#include <stdatomic.h>

#include "model_fixture.h"
#include "models/decoder/decoder.h"
#include "models/encoder/encoder.h"
#include "request_fixture.h"

enum { ROW_NS = 1000 };

static mp_status check(const tiny_model *tiny, mp_request *request, uint64_t *cost, uint32_t *total, mp_error *error) {
    *cost = 77, *total = 77;
    return tiny->model->ops->check(tiny->model, request, cost, total, error);
}

static void load_decoder(tiny_model *tiny) {
    static const mp_dtype types[] = {MP_F32};
    tiny_load(tiny, tiny_decoder_spec(types, 1, 42), MP_COMPUTE_F32, 1);
    atomic_store(&((mp_decoder *)tiny->model)->row_ns, ROW_NS);
}

MP_TEST(models_check_of_prompts) {
    static int32_t prompt[TINY_CONTEXT];
    static const struct { int32_t n, choices, tokens; } cases[] = {
        {1, 1, 1}, {5, 3, 7}, {TINY_CONTEXT - 1, 1, 1}, {TINY_CONTEXT, 1, 1}};
    tiny_model tiny;
    mp_error error;
    uint64_t cost;
    uint32_t total;
    load_decoder(&tiny);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int32_t n = cases[i].n, answers = cases[i].choices, tokens = cases[i].tokens;
        const mp_text_args args = {.n_prompt = n, .prompt = prompt, .n_choices = answers,
                                   .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1,
                                                .max_tokens = tokens, .logprobs = -1}};
        mp_text_request *request;
        MP_CHECK_OK(mp_text_request_create(&args, &request, &error), &error);
        const mp_status status = check(&tiny, &request->base, &cost, &total, &error);
        if (n < TINY_CONTEXT) {
            MP_CHECK_OK(status, &error);
            MP_CHECK_INT(cost, (int64_t)(n + answers * tokens) * ROW_NS);
            MP_CHECK_INT(total, n + answers * (tokens + 1)); /* prompt, tokens, and the end of each completion */
            MP_CHECK(request->vocab == TINY_VOCAB && request->hidden == TINY_HIDDEN && request->n_ends > 0);
            MP_CHECK(request->sampled_vocab == TINY_VOCAB && request->context == TINY_CONTEXT && request->ends);
            MP_CHECK(request->capture.layers == TINY_LAYERS && request->capture.hidden == TINY_HIDDEN);
            MP_CHECK_INT(request->capture.vocab, TINY_VOCAB);
        } else {
            char got[16], allowed[16];
            snprintf(got, sizeof got, "%d", n);
            snprintf(allowed, sizeof allowed, "%d", n - 1); /* one generated token must fit */
            MP_CHECK_STATUS(status, MP_CONTEXT_OVERFLOW, &error);
            MP_CHECK_STR(error.got, got);
            MP_CHECK_STR(error.allowed, allowed);
            MP_CHECK_STATUS(check(&tiny, &request->base, &cost, &total, NULL), MP_CONTEXT_OVERFLOW, &error);
        }
        mp_request_destroy(&request->base);
    }
    tiny_unload(&tiny);
}

MP_TEST(models_check_of_token_ids) {
    static const char *const lists[] = {"token id", "logit_bias id", "stop id"};
    static const struct { int32_t id; bool good; } ids[] = {
        {0, true}, {TINY_VOCAB - 1, true}, {TINY_VOCAB, false}, {INT32_MAX, false}};
    tiny_model tiny;
    mp_error error;
    uint64_t cost;
    uint32_t total;
    load_decoder(&tiny);
    for (int list = 0; list < 3; list++)
        for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
            for (int at = 0; at < 2; at++) {
                static const int32_t usual[] = {3, 4};
                static const float bias[] = {1, 2};
                int32_t changed[] = {3, 4};
                changed[at] = ids[i].id;
                const mp_text_args args = {.n_prompt = 2, .prompt = list == 0 ? changed : usual, .n_choices = 1,
                                           .n_bias = 2, .bias_ids = list == 1 ? changed : usual, .bias = bias,
                                           .n_stop_ids = 2, .stop_ids = list == 2 ? changed : usual,
                                           .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1,
                                                        .max_tokens = 1, .logprobs = -1}};
                mp_text_request *request;
                MP_CHECK_OK(mp_text_request_create(&args, &request, &error), &error);
                MP_CHECK_STATUS(check(&tiny, &request->base, &cost, &total, &error),
                                ids[i].good ? MP_OK : MP_INVALID_ARGUMENT, &error);
                char refusal[96];
                snprintf(refusal, sizeof refusal, "%s %d is outside the vocabulary of %d", lists[list], ids[i].id,
                         TINY_VOCAB);
                if (!ids[i].good)
                    MP_CHECK_STR(error.message, refusal);
                mp_request_destroy(&request->base);
            }
    tiny_unload(&tiny);
}

/* A model without an image network takes no image, be it only one. */
MP_TEST(models_check_of_images_for_text_models) {
    static const int32_t prompt[] = {3, 4}, sizes[] = {1, 1}, spans[] = {0, 1, 1};
    static const uint8_t key[MP_IMAGE_KEY], pixels[3];
    const mp_text_args args = {
        .n_prompt = 2, .prompt = prompt, .n_choices = 1,
        .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .logprobs = -1},
        .images = {.n_tiles = 1, .n_runs = 1, .n_bytes = 3, .sizes = sizes, .tile_keys = key, .run_keys = key,
                   .spans = spans, .pixels = pixels}};
    tiny_model tiny;
    mp_error error;
    uint64_t cost;
    uint32_t total;
    mp_text_request *request;
    load_decoder(&tiny);
    MP_CHECK_OK(mp_text_request_create(&args, &request, &error), &error);
    MP_CHECK_STATUS(check(&tiny, &request->base, &cost, &total, &error), MP_UNSUPPORTED, &error);
    MP_CHECK_HAS(error.message, "the model takes text only");
    mp_request_destroy(&request->base);
    tiny_unload(&tiny);
}

/* Two texts, of which the second is changed. */
MP_TEST(models_check_of_texts) {
    enum { NONE = -9 };
    static const struct {
        int64_t n; /* tokens of the second text */
        int32_t id, skip, second, dimensions;
        mp_status status;
        const char *message;
    } cases[] = {
        {3, 1, NONE, NONE, 0, MP_OK, NULL},
        {3, 0, 0, 1, 1, MP_OK, NULL},
        {3, TINY_VOCAB - 1, 2, 2, TINY_WIDTH, MP_OK, NULL},
        {TINY_POSITIONS, 1, NONE, NONE, 0, MP_OK, NULL},
        {1, 1, NONE, NONE, 0, MP_OK, NULL},
        {TINY_POSITIONS + 1, 1, NONE, NONE, 0, MP_CONTEXT_OVERFLOW, "text 1 has"},
        {0, 1, NONE, NONE, 0, MP_INVALID_ARGUMENT, "text 1 has no tokens"},
        {3, -1, NONE, NONE, 0, MP_INVALID_ARGUMENT, "token id -1 is outside the vocabulary"},
        {3, TINY_VOCAB, NONE, NONE, 0, MP_INVALID_ARGUMENT, "is outside the vocabulary"},
        {3, 1, -1, NONE, 0, MP_INVALID_ARGUMENT, "`skip` of text 1 must be 0 or more and below 3, got -1"},
        {3, 1, 3, NONE, 0, MP_INVALID_ARGUMENT, "`skip` of text 1 must be 0 or more and below 3, got 3"},
        {3, 1, NONE, 0, 0, MP_INVALID_ARGUMENT, "pair 1: the second text begins at token 0 of 3"},
        {3, 1, NONE, 3, 0, MP_INVALID_ARGUMENT, "pair 1: the second text begins at token 3 of 3"},
        {3, 1, NONE, NONE, TINY_WIDTH + 1, MP_INVALID_ARGUMENT, "dimensions"},
    };
    static int32_t ids[2 + TINY_POSITIONS + 1];
    tiny_model tiny;
    mp_error error;
    uint64_t cost;
    uint32_t total;
    tiny_load(&tiny, tiny_encoder_spec(false), MP_COMPUTE_F32, 1);
    atomic_store(&((mp_encoder *)tiny.model)->token_ns, ROW_NS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t offsets[] = {0, 2, 2 + cases[i].n};
        const int32_t skip[] = {0, cases[i].skip}, second[] = {1, cases[i].second};
        ids[2 + (cases[i].n ? cases[i].n - 1 : 0)] = cases[i].id;
        const mp_embedding_args args = {.n_texts = 2, .n_tokens = offsets[2], .ids = ids, .offsets = offsets,
                                        .skip = cases[i].skip == NONE ? NULL : skip,
                                        .second = cases[i].second == NONE ? NULL : second,
                                        .dimensions = cases[i].dimensions, .normalize = -1};
        mp_embedding_request *request;
        MP_CHECK_OK(mp_embedding_request_create(&args, &request, &error), &error);
        const mp_status status = check(&tiny, &request->base, &cost, &total, &error);
        if (status != cases[i].status || (status != MP_OK && !strstr(error.message, cases[i].message)))
            MP_FAIL("case %d: status %d, %s", (int)i, status, status == MP_OK ? "" : error.message);
        if (status == MP_OK) {
            MP_CHECK_INT(cost, offsets[2] * ROW_NS);
            MP_CHECK_INT(total, 2);
            MP_CHECK_INT(request->sizes.width, cases[i].dimensions ? cases[i].dimensions : TINY_WIDTH);
        }
        if (status == MP_CONTEXT_OVERFLOW) {
            char got[16], allowed[16];
            snprintf(got, sizeof got, "%d", TINY_POSITIONS + 1);
            snprintf(allowed, sizeof allowed, "%d", TINY_POSITIONS);
            MP_CHECK_STR(error.got, got);
            MP_CHECK_STR(error.allowed, allowed);
        }
        ids[2 + (cases[i].n ? cases[i].n - 1 : 0)] = 0;
        mp_request_destroy(&request->base);
    }
    for (int at = 0; at < 3; at++) { /* the first token, one in the middle, the last */
        const int64_t offsets[] = {0, 3};
        int32_t tokens[] = {1, 2, 3};
        tokens[at] = TINY_VOCAB;
        mp_embedding_request *request;
        MP_CHECK_OK(make_embedding_request(1, tokens, offsets, NULL, &request, &error), &error);
        MP_CHECK_STATUS(check(&tiny, &request->base, &cost, &total, &error), MP_INVALID_ARGUMENT, &error);
        mp_request_destroy(&request->base);
    }
    tiny_unload(&tiny);
}
