/* test_isolation_requests.c: every input of a request reaches a worker process unchanged. */
#include <stdlib.h>

#include "isolation/capability_wire.h"
#include "isolation_scene.h"

/* Send the request through a channel, and compare the fingerprint of the decoded request if no byte is changed. at:
 * byte of the message to change, -1 = none. *got: out, the decoded request, or NULL if it was refused. */
static size_t cross(mp_request *request, int at, mp_request **got) {
    static mp_wire_out out;
    static mp_wire_in in;
    const mp_request_wire *wire = mp_request_wire_of(request->capability);
    mp_item item = {.request = request};
    uint64_t progress[64] = {0};
    mp_error error;
    pair p;
    *got = NULL;
    MP_CHECK(wire->progress_bytes(request) <= sizeof progress);
    pair_init(&p);
    mp_wire_begin(&out, &p.parent, MP_FRAME_ADMIT);
    wire->put_request(&out, &item, progress);
    const size_t bytes = out.used;
    MP_CHECK(bytes < MP_FRAME_MAX);
    if (at >= 0)
        out.buffer[at] ^= 0x81;
    MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.child, false));
    mp_error_clear(&error);
    mp_status status = wire->get_request(&in, got, &error);
    MP_CHECK((status == MP_OK) == (*got != NULL));
    MP_CHECK(at >= 0 || status == MP_OK);
    if (at < 0)
        MP_CHECK((*got)->fingerprint(*got) == request->fingerprint(request) && (*got)->bytes == request->bytes);
    free(p.page);
    return bytes;
}

/* Send the request unchanged, then with each byte changed: the receiver refuses it, or creates a request that can be
 * freed. count: offset of a 64-bit count whose high bytes stay unchanged, or -1. The child trusts its parent's counts,
 * and a huge one would allocate gigabytes. */
static void cross_changed(mp_request *request, int count, mp_request **whole) {
    const size_t bytes = cross(request, -1, whole);
    for (size_t at = 0; at < bytes; at++) {
        mp_request *got;
        if (count >= 0 && at >= (size_t)count + 2 && at < (size_t)count + sizeof(int64_t))
            continue;
        cross(request, (int)at, &got);
        mp_request_destroy(got);
    }
}

MP_TEST(isolation_text_embedding_requests_are_transferred_unchanged) {
    static const int32_t ids[] = {5, 6, 7, 8, 9}, skip[] = {1, 0}, second[] = {1, 2}, attended[] = {2, 3};
    static const int64_t offsets[] = {0, 2, 5};
    mp_embedding_args args = {.n_texts = 2,
                              .n_tokens = 5,
                              .ids = ids,
                              .offsets = offsets,
                              .skip = skip,
                              .second = second,
                              .dimensions = 3,
                              .normalize = -1,
                              .outputs = MP_EMBED_TOKENS | MP_EMBED_SPARSE,
                              .adapter = 6,
                              .attended = attended};
    mp_embedding_request *request;
    mp_request *got;
    mp_error error;
    MP_CHECK_OK(mp_embedding_request_create(&args, &request, &error), &error);
    cross_changed(&request->base, 4, &got);
    const mp_embedding_request *made = (mp_embedding_request *)got;
    MP_CHECK(made->n_texts == 2 && made->n_tokens == 5 && made->dimensions == 3 && made->normalize == -1);
    MP_CHECK(made->outputs == (MP_EMBED_TOKENS | MP_EMBED_SPARSE) && made->attended[0] == 2 && made->attended[1] == 3);
    MP_CHECK(made->skip[0] == 1 && made->skip[1] == 0 && made->second[1] == 2 && made->adapter == 6);
    mp_request_destroy(got);
    mp_request_destroy(&request->base);
}

MP_TEST(isolation_image_embedding_requests_are_transferred_unchanged) {
    static const int32_t sizes[] = {2, 1, 1, 3};
    static const uint8_t pixels[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    mp_image_embedding_args args = {
        .n_images = 2, .n_bytes = sizeof pixels, .sizes = sizes, .pixels = pixels, .normalize = 1, .dimensions = 7,
        .output = MP_IMAGE_TOKENS};
    mp_image_embedding_request *request;
    mp_request *got;
    mp_error error;
    MP_CHECK_OK(mp_image_embedding_request_create(&args, &request, &error), &error);
    cross_changed(&request->base, 4, &got);
    const mp_image_embedding_request *made = (mp_image_embedding_request *)got;
    MP_CHECK(made->n_images == 2 && made->normalize == 1 && made->dimensions == 7 && made->output == MP_IMAGE_TOKENS);
    MP_CHECK(made->offsets[1] == 6 && made->offsets[2] == sizeof pixels && made->sizes[3] == 3);
    MP_CHECK(memcmp(made->pixels, pixels, sizeof pixels) == 0);
    mp_request_destroy(got);
    mp_request_destroy(&request->base);
}

MP_TEST(isolation_text_requests_are_transferred_unchanged) {
    static const int32_t prompt[] = {1, 2, 3}, lengths[] = {2, 3}, ids[] = {4, 5};
    static const char *const stop[] = {"ab", "cde"};
    static const float bias[] = {0.5f, -1};
    mp_text_args args = {.n_prompt = 3, .prompt = prompt, .n_choices = 2, .n_stop = 2, .stop = stop,
                         .stop_bytes = lengths, .n_stop_ids = 1, .stop_ids = ids, .n_bias = 2, .bias_ids = ids,
                         .bias = bias,
                         .sampling = {.temperature = 0.5f, .top_p = 1, .repetition_penalty = 1, .seed = UINT64_MAX,
                                      .max_tokens = 9, .min_tokens = 2, .logprobs = 3}};
    mp_text_request *request;
    mp_request *got;
    mp_error error;
    MP_CHECK_OK(mp_text_request_create(&args, &request, &error), &error);
    cross_changed(&request->base, -1, &got);
    const mp_text_request *made = (mp_text_request *)got;
    MP_CHECK(made->n_choices == 2 && made->sampling.seed == UINT64_MAX && made->sampling.min_tokens == 2);
    MP_CHECK(made->n_stop == 2 && memcmp(made->stop[0], "ab", 2) == 0 && memcmp(made->stop[1], "cde", 3) == 0);
    MP_CHECK(made->n_stop_ids == 1 && made->stop_ids[0] == 4 && made->bias_ids[1] == 5 && made->bias[1] == -1);
    mp_request_destroy(got);
    mp_request_destroy(&request->base);
}

MP_TEST(isolation_text_requests_keep_their_parts_and_options) {
    static const int32_t prompt[] = {1}, bytes[] = {1, 2, 3};
    static const char *const starts[] = {"a", "bc"}, *const ends[] = {"d", "ef", "ghi"}, *const calls[] = {"j"};
    mp_text_args args = {.n_prompt = 1, .prompt = prompt, .n_choices = 1, .n_reasoning_starts = 2,
                         .reasoning_starts = starts, .reasoning_start_bytes = bytes, .n_reasoning_ends = 3,
                         .reasoning_ends = ends, .reasoning_end_bytes = bytes, .n_call_starts = 1,
                         .call_starts = calls, .call_start_bytes = bytes, .in_reasoning = true, .capture_values = 4,
                         .capture_records = 8, .adapter = 6, .want_prompt_logits = true,
                         .sampling = {.top_k = 5, .min_p = 0.5f, .presence_penalty = 1, .frequency_penalty = 2,
                                      .repetition_penalty = 3, .max_tokens = 9, .logprobs = -1, .ignore_eos = true}};
    mp_text_request *request;
    mp_request *got;
    mp_error error;
    MP_CHECK_OK(mp_text_request_create(&args, &request, &error), &error);
    cross(&request->base, -1, &got);
    const mp_text_request *made = (mp_text_request *)got;
    MP_CHECK(made->n_stop == 0 && made->n_reasoning_starts == 2 && memcmp(made->reasoning_starts[1], "bc", 2) == 0);
    MP_CHECK(made->n_reasoning_ends == 3 && memcmp(made->reasoning_ends[2], "ghi", 3) == 0);
    MP_CHECK(made->n_call_starts == 1 && made->call_starts[0][0] == 'j' && made->in_reasoning);
    MP_CHECK(made->capture_values == 4 && made->capture_records == 8 && made->capture.values == 4);
    MP_CHECK(made->adapter == 6 && made->want_prompt_logits && made->sampling.top_k == 5);
    MP_CHECK(made->sampling.min_p == 0.5f && made->sampling.presence_penalty == 1 && made->sampling.ignore_eos);
    MP_CHECK(made->sampling.frequency_penalty == 2 && made->sampling.repetition_penalty == 3);
    mp_request_destroy(got);
    mp_request_destroy(&request->base);
}

MP_TEST(isolation_image_generation_requests_are_transferred_unchanged) {
    static const int32_t ids[] = {4, 5};
    static const float times[] = {900, 100}, sigmas[] = {1, 0.5f, 0}, noise[] = {1, 2, 3, 4};
    mp_image_generation_args args = {.width = 8,
                                     .height = 16,
                                     .n_images = 3,
                                     .n_steps = 2,
                                     .n_texts = 2,
                                     .guidance = 3.5f,
                                     .times = times,
                                     .sigmas = sigmas,
                                     .noise = noise,
                                     .n_noise = 4,
                                     .preview_every = 1,
                                     .keep = true,
                                     .n_ids = {2, 0, 1},
                                     .ids = {{ids, NULL, ids + 1}, {ids, NULL, ids}}};
    mp_image_generation_request *request;
    mp_request *got;
    mp_error error;
    MP_CHECK_OK(mp_image_generation_request_create(&args, &request, &error), &error);
    cross_changed(&request->base, 12, &got);
    const mp_image_generation_request *made = (mp_image_generation_request *)got;
    MP_CHECK(made->width == 8 && made->height == 16 && made->n_images == 3 && made->n_steps == 2);
    MP_CHECK(made->n_texts == 2 && made->n_ids[2] == 1 && made->ids[0][2][0] == 5 && !made->ids[1][1]);
    MP_CHECK(made->guidance == 3.5f && made->preview_every == 1 && made->sigmas[1] == 0.5f && made->noise[3] == 4);
    MP_CHECK(made->times[1] == 100 && made->keep);
    mp_request_destroy(got);
    mp_request_destroy(&request->base);
}
