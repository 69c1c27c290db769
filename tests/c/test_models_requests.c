/* test_models_requests.c: requests count their units, tell their inputs apart, and refuse contradictory arguments. */
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

/* Either no run has a time, or each run has one. */
MP_TEST(models_requests_refuse_wrong_times) {
    static const int32_t prompt[12], sizes[] = {1, 1, 1, 1}, spans[] = {1, 4, 1, 5, 4, 1};
    static const uint8_t keys[2 * MP_IMAGE_KEY], pixels[6];
    static const struct {
        int32_t times[3], n_times;
        const char *refusal; /* NULL: accepted */
    } cases[] = {
        {{0}, 0, NULL},
        {{-1, 0}, 2, NULL},
        {{-1, MP_TEXT_MAX_TIME}, 2, NULL},
        {{-1, 0}, 1, "the number of times must be 2 to 2, got 1"},
        {{-1, 0, 0}, 3, "the number of times must be 0 to 2, got 3"},
        {{-2, 0}, 2, "times[0] must be -1 to 131072, got -2"},
        {{-1, MP_TEXT_MAX_TIME + 1}, 2, "times[1] must be -1 to 131072, got 131073"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mp_text_args args = {
            .n_prompt = 12, .prompt = prompt, .n_choices = 1, .vision = true,
            .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .logprobs = -1},
            .images = {.n_tiles = 2, .n_runs = 2, .n_times = cases[i].n_times, .n_bytes = 6, .sizes = sizes,
                       .tile_keys = keys, .run_keys = keys, .spans = spans, .times = cases[i].times,
                       .pixels = pixels},
        };
        mp_text_request *call;
        mp_error error;
        mp_status status = mp_text_request_create(&args, &call, &error);
        MP_CHECK_STATUS(status, cases[i].refusal ? MP_INVALID_ARGUMENT : MP_OK, &error);
        if (cases[i].refusal)
            MP_CHECK_STR(error.message, cases[i].refusal);
        if (!call)
            continue;
        MP_CHECK(call->images.runs[1].time == (cases[i].n_times ? cases[i].times[1] : -1));
        mp_request_destroy(&call->base);
    }
}

/* Runs of image rows are in order, do not overlap, end within the prompt, and together use all tiles. */
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
        {{1, 4, 1, 5, 3, 0}, 1, 7, NULL}, /* both show rows of the same tile */
        {{1, 4, 1, 4, 3, 1}, 2, 0, "the start of a run must be 5 to 11, got 4"}, /* begins in the first run */
        {{5, 3, 1, 1, 4, 1}, 2, 0, "the start of a run must be 8 to 11, got 1"},
        {{-1, 3, 1, 3, 4, 1}, 2, 0, "runs[0] must be 0 to 2147483647, got -1"},
        {{1, 4, 1, 12, 1, 1}, 2, 0, "the start of a run must be 5 to 11, got 12"},
        {{1, 4, 1, 5, 8, 1}, 2, 0, "the rows of a run must be 1 to 7, got 8"}, /* ends after the prompt */
        {{1, 4, 1, 5, 0, 1}, 2, 0, "the rows of a run must be 1 to 7, got 0"},
        {{1, 4, 0, 5, 3, 1}, 2, 0, "the tiles of a run must be 1 to 2, got 0"},
        {{1, 4, 1, 5, 3, 0}, 2, 0, "the tiles of all runs must be 2 to 2, got 1"},
        {{1, 4, 1, 5, 3, 2}, 2, 0, "the tiles of a run must be 0 to 1, got 2"},
        {{1, 4, 2, 5, 3, 1}, 2, 0, "the tiles of a run must be 0 to 0, got 1"},
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
