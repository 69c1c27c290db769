/* test_models_requests.c: every request charges exactly the memory that it allocates, and frees all of it. */
#include "base/alloc.h"
#include "mp_test.h"
#include "request_fixture.h"

static uint64_t before;

static void begin(void) { before = mp_alloc_bytes(MP_TAG_REQUEST); }

static void check_charge(const mp_request *call, uint64_t outputs) {
    MP_CHECK_INT(call->bytes, mp_alloc_bytes(MP_TAG_REQUEST) - before);
    MP_CHECK_INT(call->output_bytes, outputs);
}

static void end(mp_request *call) {
    mp_request_destroy(call);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_REQUEST), before);
}

MP_TEST(models_requests_charge_embeddings) {
    static const int32_t ids[] = {5, 6, 7, 8, 9}, skip[] = {0, 1}, second[] = {2, 1};
    static const int64_t offsets[] = {0, 3, 5};
    mp_error error;
    mp_embedding_request *call;
    begin();
    MP_CHECK_OK(mp_embedding_request_create(&(mp_embedding_args){.n_texts = 2, .n_tokens = 5, .ids = ids,
                                                                 .offsets = offsets, .skip = skip, .second = second},
                                            &call, &error),
                &error);
    check_charge(&call->base, 0);
    for (int width = 10; width <= 20; width += 10) { /* the second model replaces the first */
        MP_CHECK_OK(mp_embedding_request_output(call, width, &error), &error);
        check_charge(&call->base, 2 * (uint64_t)width * sizeof(float));
    }
    end(&call->base);
}

MP_TEST(models_requests_charge_image_embeddings) {
    static const int32_t sizes[] = {2, 3, 4, 1};
    static const uint8_t pixels[3 * (2 * 3 + 4 * 1)];
    mp_error error;
    mp_image_embedding_request *call;
    begin();
    MP_CHECK_OK(make_image_embedding_request(2, sizes, pixels, sizeof pixels, &call, &error), &error);
    check_charge(&call->base, 0);
    MP_CHECK_OK(mp_image_embedding_request_output(call, 7, 11, &error), &error);
    check_charge(&call->base, 2 * 11 * sizeof(float));
    end(&call->base);
}

MP_TEST(models_requests_charge_texts) {
    enum { PROMPT = 9, CHOICES = 3, TOKENS = 5, TOP = 2, VOCAB = 40, HIDDEN = 6 };
    static const int32_t prompt[PROMPT], stop_ids[] = {3, 4}, bias_ids[] = {7}, stop_bytes[] = {2, 5};
    static const int32_t sizes[] = {2, 3}, spans[] = {1, 4, 1}, sources[] = {0, 1, 2, -1};
    static const float bias[] = {1};
    static const char *const stop[] = {"ab", "abcde"};
    static const uint8_t keys[MP_IMAGE_KEY], pixels[3 * 2 * 3];
    static const uint32_t mask[2];
    for (int images = 0; images < 2; images++)
        for (int captures = 0; captures < 2; captures++) {
            const uint64_t choices = captures ? 1 : CHOICES;
            const mp_text_args args = {
                .n_prompt = PROMPT, .prompt = prompt, .n_stop = 2, .stop = stop, .stop_bytes = stop_bytes,
                .n_stop_ids = 2, .stop_ids = stop_ids, .n_bias = 1, .bias_ids = bias_ids, .bias = bias,
                .n_choices = (int32_t)choices, .want_prompt_logits = true, .vision = images,
                .capture_values = captures, .capture_records = 10 * captures, .mask = mask, .mask_bytes = sizeof mask,
                .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = TOKENS, .logprobs = TOP},
                .images = {.n_tiles = images, .n_runs = images, .n_sources = 4 * images, .n_bytes = 18 * images,
                           .sizes = sizes, .tile_keys = keys, .run_keys = keys, .spans = spans, .sources = sources,
                           .pixels = pixels},
            };
            mp_error error;
            mp_text_request *call;
            begin();
            MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
            check_charge(&call->base, 0);
            call->vocab = VOCAB;
            call->hidden = HIDDEN;
            call->capture.layers = 2;
            call->capture.hidden = HIDDEN;
            call->capture.vocab = VOCAB;
            for (uint32_t bytes = 4; bytes <= 8; bytes += 4) {
                MP_CHECK_OK(mp_text_request_output(call, bytes, &error), &error);
                check_charge(&call->base, call->base.output_bytes);
                MP_CHECK(call->base.output_bytes >= (PROMPT * VOCAB + 4 * HIDDEN * (uint64_t)images) * sizeof(float) +
                                                        choices * TOKENS * (sizeof(mp_token_out) + TOP * 8 + bytes));
            }
            end(&call->base);
        }
}

MP_TEST(models_requests_charge_image_generation) {
    enum { STEPS = 4, IMAGES = 2, CHANNELS = 3, HIGH = 2, WIDE = 3, SIDE = 8, ROWS = 5, WIDTH = 6, POOLED = 7 };
    static const float noise[IMAGES * CHANNELS * HIGH * WIDE], times[STEPS], sigmas[STEPS + 1];
    static const int32_t ids[9];
    for (int keep = 0; keep < 2; keep++) {
        mp_image_generation_args args = {.width = SIDE, .height = SIDE, .n_images = IMAGES, .n_steps = STEPS,
                                         .n_texts = 2, .times = times, .sigmas = sigmas, .noise = noise,
                                         .n_noise = IMAGES * CHANNELS * HIGH * WIDE, .preview_every = 2 * keep,
                                         .keep = keep};
        for (int e = 0; e < 2; e++) { /* the third encoder is not used */
            args.n_ids[e] = 4 + e;
            args.ids[0][e] = args.ids[1][e] = ids;
        }
        mp_error error;
        mp_image_generation_request *call;
        begin();
        MP_CHECK_OK(mp_image_generation_request_create(&args, &call, &error), &error);
        check_charge(&call->base, 0);
        call->channels = CHANNELS;
        call->high = HIGH;
        call->wide = WIDE;
        call->text_rows = ROWS;
        call->text_width = WIDTH;
        call->pooled_width = POOLED;
        MP_CHECK_OK(mp_image_generation_request_output(call, &error), &error);
        const uint64_t latents = CHANNELS * HIGH * WIDE * sizeof(float), pixels = SIDE * SIDE * 3;
        check_charge(&call->base, IMAGES * (latents + pixels * sizeof(float)) +
                                      (uint64_t)keep * (IMAGES * pixels + latents + IMAGES * STEPS * latents +
                                                        2 * (ROWS * WIDTH + POOLED) * sizeof(float)));
        end(&call->base);
    }
}
