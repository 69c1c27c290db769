/* test_models_diffusion_check.c: pipelines of image generation check a request before it is queued: sizes, tokens and
 * initial latents at their bounds, and the units of a request. Latents are half as wide and high as the image, and the
 * transformer takes squares of 2 x 2 of them: sizes are multiples of 4 pixels. */
#include "image_generation_fixture.h"

enum { LONGEST_T5 = 16 }; /* tokens */

static mp_status check(const tiny_model *tiny, mp_image_generation_request *call, uint64_t *cost, uint32_t *total,
                       mp_error *error) {
    *cost = 77, *total = 77;
    return tiny->model->ops->check(tiny->model, &call->base, cost, total, error);
}

static void set_size(mp_image_generation_request *call, int32_t width, int32_t height) {
    call->width = width;
    call->height = height;
    call->n_noise = (int64_t)call->n_images * CHANNELS * (height / 2) * (width / 2);
}

MP_TEST(models_diffusion_check_of_sizes) {
    static const struct { int32_t width, height; const char *nearest; bool too_large; } sizes[] = {
        {20, 12, NULL, false},   {4, 4, NULL, false},     {32, 32, NULL, false},
        {19, 12, "20 x 12", 0},  {21, 12, "20 x 12", 0},  {20, 13, "20 x 12", 0},  {1, 12, "4 x 12", 0},
        {22, 14, "24 x 16", 0},  {20, 1, "20 x 4", 0},    {36, 12, "32 x 12", 1},  {12, 36, "12 x 32", 1},
        {400, 12, "32 x 12", 1}, {20, 8000, "20 x 32", 1}};
    for (int flux = 0; flux < 2; flux++) {
        tiny_model tiny;
        mp_error error;
        mp_request *base;
        uint64_t cost;
        uint32_t total;
        tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 1);
        MP_CHECK_OK(make_call(flux, 2, &base, &error), &error);
        mp_image_generation_request *call = (mp_image_generation_request *)base;
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            /* positions of Flux are computed, those of SD3 are a table of 8 x 8 squares */
            const bool good = !sizes[i].nearest || (flux && sizes[i].too_large);
            char refusal[160];
            snprintf(refusal, sizeof refusal, "multiples of 4%s, got %d x %d pixels; the nearest are %s",
                     flux ? "" : " up to 32", sizes[i].width, sizes[i].height, good ? "" : sizes[i].nearest);
            if (flux && sizes[i].height == 8000)
                continue; /* outputs of many megabytes */
            set_size(call, sizes[i].width, sizes[i].height);
            MP_CHECK_STATUS(check(&tiny, call, &cost, &total, &error), good ? MP_OK : MP_INVALID_ARGUMENT, &error);
            if (!good)
                MP_CHECK_HAS(error.message, refusal);
        }
        set_size(call, 20, 12);
        call->n_noise--;
        MP_CHECK_STATUS(check(&tiny, call, &cost, &total, &error), MP_INVALID_ARGUMENT, &error);
        MP_CHECK_HAS(error.message, "there are 479 initial latents, the model takes 480: (2, 4, 6, 10)");
        call->n_noise += 2;
        MP_CHECK_STATUS(check(&tiny, call, &cost, &total, &error), MP_INVALID_ARGUMENT, &error);
        set_size(call, 20, 12);
        mp_request_destroy(base);
        tiny_unload(&tiny);
    }
}

/* CLIP takes texts of one length, T5 texts of up to its length. */
MP_TEST(models_diffusion_check_of_tokens) {
    for (int flux = 0; flux < 2; flux++) {
        tiny_model tiny;
        mp_error error;
        mp_request *base;
        uint64_t cost;
        uint32_t total;
        tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 1);
        MP_CHECK_OK(make_call(flux, 2, &base, &error), &error);
        mp_image_generation_request *call = (mp_image_generation_request *)base;
        const int32_t last = call->n_texts - 1;
        for (int e = 0; e < MP_T2I_ENCODERS; e++) {
            const int32_t n = call->n_ids[e], lengths[] = {0, n - 1, n + 1, e == MP_DIFF_T5 ? LONGEST_T5 + 1 : n + 2};
            for (int i = 0; n > 0 && i < 4; i++) {
                if (e == MP_DIFF_T5 && (i == 1 || i == 2))
                    continue;
                call->n_ids[e] = lengths[i];
                MP_CHECK_STATUS(check(&tiny, call, &cost, &total, &error), MP_INVALID_ARGUMENT, &error);
                char refusal[64];
                snprintf(refusal, sizeof refusal, "`ids` must have %s%d tokens for %s, got %d",
                         e == MP_DIFF_T5 ? "1 to " : "", e == MP_DIFF_T5 ? LONGEST_T5 : n,
                         mp_diff_stage_name(e), lengths[i]);
                MP_CHECK_HAS(error.message, refusal);
            }
            call->n_ids[e] = n;
            for (int i = 0; i < n; i += n - 1) { /* the first token and the last, of the last text */
                int32_t *id = &call->ids[last][e][i], usual = *id;
                *id = VOCAB_SIZE - 1;
                MP_CHECK_OK(check(&tiny, call, &cost, &total, &error), &error);
                *id = VOCAB_SIZE;
                MP_CHECK_STATUS(check(&tiny, call, &cost, &total, &error), MP_INVALID_ARGUMENT, &error);
                MP_CHECK_STR(error.message, "token id 40 is outside the vocabulary of 40");
                *id = -1;
                MP_CHECK_STATUS(check(&tiny, call, &cost, &total, &error), MP_INVALID_ARGUMENT, &error);
                *id = usual;
            }
        }
        mp_request_destroy(base);
        tiny_unload(&tiny);
    }
}

/* Steps of each image, and its decoding. The predicted time is proportional to images. */
MP_TEST(models_diffusion_check_of_units) {
    for (int flux = 0; flux < 2; flux++) {
        tiny_model tiny;
        mp_error error;
        mp_request *base;
        uint64_t costs[2];
        uint32_t total;
        tiny_load(&tiny, pipeline(flux), MP_COMPUTE_F32, 1);
        for (int images = 1; images <= 2; images++) {
            MP_CHECK_OK(make_call(flux, images, &base, &error), &error);
            mp_image_generation_request *call = (mp_image_generation_request *)base;
            MP_CHECK_OK(check(&tiny, call, &costs[images - 1], &total, &error), &error);
            MP_CHECK_INT(total, images * (STEPS + 1));
            MP_CHECK(call->channels == CHANNELS && call->latent_height == HIGH && call->latent_width == WIDE);
            MP_CHECK_INT(call->text_rows, flux ? T5_TOKENS : CLIP_TOKENS + T5_TOKENS); /* Flux pools the CLIP text */
            MP_CHECK_INT(call->text_width, 40);
            MP_CHECK_INT(call->pooled_width, flux ? 16 : 32);
            if (flux && images == 2) {
                call->n_texts = 2;
                call->ids[1][MP_DIFF_CLIP_L] = call->ids[0][MP_DIFF_CLIP_L];
                call->ids[1][MP_DIFF_T5] = call->ids[0][MP_DIFF_T5];
                uint64_t cost;
                MP_CHECK_STATUS(check(&tiny, call, &cost, &total, &error), MP_INVALID_ARGUMENT, &error);
                MP_CHECK_HAS(error.message, "takes no negative prompt");
                call->n_texts = 1;
                call->ids[1][MP_DIFF_CLIP_L] = call->ids[1][MP_DIFF_T5] = NULL;
            }
            mp_request_destroy(base);
        }
        MP_CHECK(costs[0] > 1);
        MP_CHECK_NEAR((double)(costs[1] - 1), 2 * (double)(costs[0] - 1), 2);
        tiny_unload(&tiny);
    }
}
