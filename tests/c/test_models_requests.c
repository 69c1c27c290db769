/* test_models_requests.c: every request charges exactly the memory that it allocates, frees all of it, counts its
 * units, and refuses contradictory arguments. */
#include <stdatomic.h>

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
        MP_CHECK_OK(mp_embedding_request_output(call, (mp_embedding_sizes){.width = width}, &error), &error);
        check_charge(&call->base, 2 * (uint64_t)width * sizeof(float));
    }
    end(&call->base);
}

static mp_status create_embeddings(void *arg, mp_error *error) {
    static const int32_t ids[] = {5, 6, 7}, skip[] = {0, 1}, second[] = {1, 1};
    static const int64_t offsets[] = {0, 1, 3};
    mp_embedding_request *call;
    (void)arg;
    mp_status status = mp_embedding_request_create(&(mp_embedding_args){.n_texts = 2, .n_tokens = 3, .ids = ids,
                                                                        .offsets = offsets, .skip = skip,
                                                                        .second = second},
                                                   &call, error);
    if (status == MP_OK)
        mp_request_destroy(&call->base);
    return status;
}

MP_TEST(models_requests_for_embeddings_survive_refused_memory) { mp_test_alloc_sweep(create_embeddings, NULL); }

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
    enum { STEPS = 4, IMAGES = 2, CHANNELS = 3, LATENT_HEIGHT = 2, LATENT_WIDTH = 3, SIDE = 8 };
    enum { ROWS = 5, WIDTH = 6, POOLED = 7 };
    static const float noise[IMAGES * CHANNELS * LATENT_HEIGHT * LATENT_WIDTH], times[STEPS], sigmas[STEPS + 1];
    static const int32_t ids[9];
    for (int keep = 0; keep < 2; keep++) {
        mp_image_generation_args args = {.width = SIDE, .height = SIDE, .n_images = IMAGES, .n_steps = STEPS,
                                         .n_texts = 2, .times = times, .sigmas = sigmas, .noise = noise,
                                         .n_noise = IMAGES * CHANNELS * LATENT_HEIGHT * LATENT_WIDTH,
                                         .preview_every = 2 * keep, .keep = keep};
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
        call->latent_height = LATENT_HEIGHT;
        call->latent_width = LATENT_WIDTH;
        call->text_rows = ROWS;
        call->text_width = WIDTH;
        call->pooled_width = POOLED;
        MP_CHECK_OK(mp_image_generation_request_output(call, &error), &error);
        const uint64_t latents = CHANNELS * LATENT_HEIGHT * LATENT_WIDTH * sizeof(float), pixels = SIDE * SIDE * 3;
        check_charge(&call->base, IMAGES * (latents + pixels * sizeof(float)) +
                                      (uint64_t)keep * (IMAGES * pixels + latents + IMAGES * STEPS * latents +
                                                        2 * (ROWS * WIDTH + POOLED) * sizeof(float)));
        end(&call->base);
    }
}

/* ---- outputs of text requests ------------------------------------------------------------------------------------ */

static mp_text_request *make_text(bool prompt_logits, int n_choices) {
    static const int32_t prompt[] = {1, 2, 3, 4, 5};
    const mp_text_args args = {.n_prompt = 5, .prompt = prompt, .n_choices = n_choices,
                               .want_prompt_logits = prompt_logits,
                               .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 8, .logprobs = -1}};
    mp_text_request *call;
    mp_error error;
    MP_CHECK_OK(mp_text_request_create(&args, &call, &error), &error);
    return call;
}

/* A request whose outputs were refused has none, and gets them from the next model. */
MP_TEST(models_requests_recover_from_refused_outputs) {
    mp_text_request *call;
    mp_error error;
    begin();
    call = make_text(false, 2);
    MP_CHECK_OK(mp_text_request_output(call, 4, &error), &error);
    MP_CHECK_STATUS(mp_text_request_output(call, UINT32_MAX, &error), MP_LIMIT, &error);
    check_charge(&call->base, 0);
    MP_CHECK(!call->choices[0].text && !call->choices[1].tokens);
    MP_CHECK_OK(mp_text_request_output(call, 4, &error), &error);
    MP_CHECK(call->choices[0].text && call->choices[1].tokens);
    end(&call->base);
}

/* Outputs stay if the next model has the same sizes: a reader of the prompt's logits keeps its memory. */
MP_TEST(models_requests_keep_outputs_of_the_same_sizes) {
    enum { SIZES = 3 };
    mp_text_request *call;
    mp_error error;
    begin();
    call = make_text(true, 1);
    int32_t *const sizes[SIZES] = {&call->vocab, &call->hidden, &call->capture.layers};
    for (int i = 0; i < SIZES; i++)
        *sizes[i] = 10 + i;
    MP_CHECK_OK(mp_text_request_output(call, 4, &error), &error);
    const float *before = call->prompt_logits;
    atomic_store(&call->choices[0].token_count, 1);
    MP_CHECK_OK(mp_text_request_output(call, 4, &error), &error);
    MP_CHECK(call->prompt_logits == before);
    for (int i = 0; i < SIZES; i++) {
        ++*sizes[i];
        MP_CHECK_STATUS(mp_text_request_output(call, 4, &error), MP_MODEL, &error);
        --*sizes[i];
    }
    MP_CHECK(call->prompt_logits == before);
    end(&call->base);
}

/* ---- units ------------------------------------------------------------------------------------------------------- */

static void check_usage(mp_request *call, uint64_t in, uint64_t out) {
    uint64_t got_in = 77, got_out = 78;
    call->usage(call, &got_in, &got_out);
    MP_CHECK_INT(got_in, in);
    MP_CHECK_INT(got_out, out);
}

MP_TEST(models_requests_count_units) {
    static const int32_t ids[5] = {5, 6, 7, 8, 9}, sizes[] = {1, 1, 1, 1, 1, 1};
    static const int64_t offsets[] = {0, 3, 5};
    static const uint8_t pixels[9];
    static const float noise[4], times[1], sigmas[2];
    mp_error error;
    mp_embedding_request *embed;
    MP_CHECK_OK(make_embedding_request(2, ids, offsets, NULL, &embed, &error), &error);
    check_usage(&embed->base, 5, 0);
    mp_request_destroy(&embed->base);

    mp_image_embedding_request *images;
    MP_CHECK_OK(make_image_embedding_request(3, sizes, pixels, 9, &images, &error), &error);
    check_usage(&images->base, 3, 0);
    mp_request_destroy(&images->base);

    mp_text_request *text = make_text(false, 2);
    check_usage(&text->base, 5, 0);
    atomic_store(&text->choices[0].token_count, 2);
    atomic_store(&text->choices[1].token_count, 4);
    check_usage(&text->base, 5, 6);
    MP_CHECK(text->base.resumable); /* tokens that were published survive a worker fault */
    mp_request_destroy(&text->base);

    mp_image_generation_args args = {.width = 8, .height = 8, .n_images = 4, .n_steps = 1, .n_texts = 2,
                                     .times = times, .sigmas = sigmas, .noise = noise, .n_noise = 4};
    for (int e = 0; e < 2; e++) {
        args.n_ids[e] = 4 + e;
        args.ids[0][e] = args.ids[1][e] = ids;
    }
    mp_image_generation_request *generation;
    MP_CHECK_OK(mp_image_generation_request_create(&args, &generation, &error), &error);
    check_usage(&generation->base, 2 * (4 + 5), 0);
    atomic_store(&generation->images_done, 3);
    check_usage(&generation->base, 2 * (4 + 5), 3);
    mp_request_destroy(&generation->base);
}

/* ---- fingerprints ------------------------------------------------------------------------------------------------ */

/* Every bit of the pixels, and the shape, tell image requests apart. */
MP_TEST(models_requests_tell_images_apart) {
    enum { BYTES = 3 * 5 };
    static const int32_t wide[] = {1, 5}, high[] = {5, 1};
    uint64_t seen[2 + 8 * BYTES];
    uint8_t pixels[BYTES] = {1, 2, 3};
    mp_error error;
    int n = 0;
    for (int bit = -2; bit < 8 * BYTES; bit++) {
        mp_image_embedding_request *call;
        if (bit >= 0)
            pixels[bit / 8] ^= (uint8_t)(1u << bit % 8);
        MP_CHECK_OK(make_image_embedding_request(1, bit == -2 ? high : wide, pixels, BYTES, &call, &error), &error);
        if (bit >= 0)
            pixels[bit / 8] ^= (uint8_t)(1u << bit % 8);
        seen[n] = call->base.fingerprint(&call->base);
        MP_CHECK(seen[n] != 0);
        for (int i = 0; i < n; i++)
            MP_CHECK(seen[i] != seen[n]);
        n++;
        mp_request_destroy(&call->base);
    }
}

/* The texts of every encoder, the sizes and the noise tell requests for images apart. */
MP_TEST(models_requests_tell_image_generations_apart) {
    enum { IDS = 3, CHANGES = 4 + MP_T2I_ENCODERS * IDS + MP_T2I_ENCODERS + 1 };
    static const float times[3], sigmas[4];
    uint64_t seen[CHANGES + 1];
    for (int change = -1; change < CHANGES; change++) {
        int32_t ids[2][MP_T2I_ENCODERS][IDS] = {0};
        float noise[4] = {1, 2, 3, 4};
        const int text = change - 4, length = text - MP_T2I_ENCODERS * IDS;
        mp_image_generation_args args = {.width = change == 0 ? 16 : 8, .height = change == 1 ? 16 : 8, .n_images = 1,
                                         .n_steps = change == 2 ? 3 : 2, .n_texts = change == 3 ? 1 : 2,
                                         .times = times, .sigmas = sigmas, .noise = noise, .n_noise = 4};
        for (int e = 0; e < MP_T2I_ENCODERS; e++) {
            args.n_ids[e] = length == e ? IDS - 1 : IDS;
            for (int i = 0; i < IDS; i++) /* only the id that is changed differs from the others */
                ids[1][e][i] = text == e * IDS + i;
            args.ids[0][e] = ids[0][e];
            args.ids[1][e] = ids[1][e];
        }
        noise[3] += change == CHANGES - 1;
        mp_image_generation_request *call;
        mp_error error;
        MP_CHECK_OK(mp_image_generation_request_create(&args, &call, &error), &error);
        seen[change + 1] = call->base.fingerprint(&call->base);
        mp_request_destroy(&call->base);
        for (int i = 0; i <= change; i++)
            if (seen[i] == seen[change + 1])
                MP_FAIL("changes %d and %d have one fingerprint", i - 1, change);
    }
}

/* ---- contradictions ---------------------------------------------------------------------------------------------- */

MP_TEST(models_requests_refuse_wrong_offsets) {
    static const int32_t ids[5];
    static const int64_t wrong[][4] = {{1, 3, 4, 5}, {0, 3, 2, 5}, {0, 3, 4, 4}, {0, 3, 6, 6}, {-1, 0, 4, 5}};
    static const int64_t right[] = {0, 0, 5, 5};
    mp_error error;
    mp_embedding_request *call;
    mp_embedding_args args = {.n_texts = 3, .n_tokens = 5, .ids = ids, .normalize = -1};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        args.offsets = wrong[i];
        MP_CHECK_STATUS(mp_embedding_request_create(&args, &call, &error), MP_INVALID_ARGUMENT, &error);
        MP_CHECK(!call);
        MP_CHECK_HAS(error.message, "offsets");
    }
    args.offsets = right;
    MP_CHECK_OK(mp_embedding_request_create(&args, &call, &error), &error);
    mp_request_destroy(&call->base);
}

/* Runs of image rows are in order, do not overlap, end within the prompt, and use each tile once. */
MP_TEST(models_requests_refuse_wrong_image_runs) {
    static const int32_t prompt[12], sizes[] = {1, 1, 1, 1, 1, 1}, sources[8] = {0};
    static const uint8_t keys[3 * MP_IMAGE_KEY], pixels[9];
    static const struct {
        int32_t spans[6], tiles, sources;
        const char *refusal; /* NULL: accepted */
    } cases[] = {
        {{1, 4, 1, 5, 3, 1}, 2, 0, NULL},
        {{0, 4, 1, 4, 8, 1}, 2, 0, NULL},
        {{1, 4, 2, 5, 3, 1}, 3, 0, NULL},
        {{1, 4, 1, 5, 3, 1}, 2, 7, NULL},
        {{1, 4, 1, 4, 3, 1}, 2, 0, "the start of a run must be 5 to 11, got 4"}, /* begins in the first run */
        {{5, 3, 1, 1, 4, 1}, 2, 0, "the start of a run must be 8 to 11, got 1"},
        {{-1, 3, 1, 3, 4, 1}, 2, 0, "runs[0] must be 0 to 2147483647, got -1"},
        {{1, 4, 1, 12, 1, 1}, 2, 0, "the start of a run must be 5 to 11, got 12"},
        {{1, 4, 1, 5, 8, 1}, 2, 0, "the rows of a run must be 1 to 7, got 8"}, /* ends after the prompt */
        {{1, 4, 1, 5, 0, 1}, 2, 0, "the rows of a run must be 1 to 7, got 0"},
        {{1, 4, 1, 5, 3, 0}, 2, 0, "the tiles of a run must be 1 to 1, got 0"},
        {{1, 4, 1, 5, 3, 2}, 2, 0, "the tiles of a run must be 1 to 1, got 2"},
        {{1, 4, 2, 5, 3, 1}, 2, 0, "the tiles of a run must be 1 to 0, got 1"},
        {{1, 4, 1, 5, 3, 1}, 3, 0, "the tiles of all runs must be 3 to 3, got 2"},
        {{1, 4, 1, 5, 3, 1}, 2, 6, "the number of sources must be 7 to 7, got 6"},
        {{1, 4, 1, 5, 3, 1}, 2, 8, "the number of sources must be 7 to 7, got 8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mp_text_args args = {
            .n_prompt = 12, .prompt = prompt, .n_choices = 1, .vision = true,
            .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .logprobs = -1},
            .images = {.n_tiles = cases[i].tiles, .n_runs = 2, .n_sources = cases[i].sources,
                       .n_bytes = 3 * cases[i].tiles, .sizes = sizes, .tile_keys = keys, .run_keys = keys,
                       .spans = cases[i].spans, .sources = sources, .pixels = pixels},
        };
        mp_text_request *call;
        mp_error error;
        mp_status status = mp_text_request_create(&args, &call, &error);
        MP_CHECK_STATUS(status, cases[i].refusal ? MP_INVALID_ARGUMENT : MP_OK, &error);
        if (cases[i].refusal)
            MP_CHECK_STR(error.message, cases[i].refusal);
        if (call)
            mp_request_destroy(&call->base);
    }
}
