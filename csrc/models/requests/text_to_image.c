/* requests/text_to_image.c: calls for pictures: making, output buffers, freeing. */
#include <stdatomic.h>

#include "models/requests/build.h"

static void free_pictures(mp_draw_call *call) {
    mp_free(call->latents);
    mp_free(call->pixels);
    mp_free(call->previews);
    mp_free(call->preview_latents);
    mp_free(call->texts);
    mp_free(call->pooled);
    mp_free(call->history);
    call->latents = call->pixels = call->preview_latents = call->texts = call->pooled = call->history = NULL;
    call->previews = NULL;
    call->base.bytes -= call->output_bytes;
    call->output_bytes = 0;
}

static void draw_destroy(mp_call *base) {
    mp_draw_call *call = (mp_draw_call *)base;
    free_pictures(call);
    for (int t = 0; t < MP_DRAW_TEXTS; t++)
        for (int e = 0; e < MP_DRAW_ENCODERS; e++)
            mp_free(call->ids[t][e]);
    mp_free(call->times);
    mp_free(call->sigmas);
    mp_free(call->noise);
    mp_free(call);
}

static uint64_t draw_fingerprint(const mp_call *base) {
    const mp_draw_call *call = (const mp_draw_call *)base;
    const int32_t sizes[] = {call->width, call->height, call->n_steps, call->n_texts};
    uint64_t hash = mp_mix(MP_MIX_START, sizes, sizeof sizes);
    for (int t = 0; t < call->n_texts; t++)
        for (int e = 0; e < MP_DRAW_ENCODERS; e++)
            hash = mp_mix(hash, call->ids[t][e], (size_t)call->n_ids[e] * sizeof(int32_t));
    return mp_mix_end(mp_mix(hash, call->noise, (size_t)call->n_noise * sizeof(float)));
}

static void draw_usage(const mp_call *base, uint64_t *in, uint64_t *out) {
    const mp_draw_call *call = (const mp_draw_call *)base;
    *in = 0;
    for (int e = 0; e < MP_DRAW_ENCODERS; e++)
        *in += (uint64_t)call->n_ids[e] * (uint64_t)call->n_texts;
    *out = (uint64_t)atomic_load_explicit(&call->pictures_done, memory_order_relaxed);
}

static bool draw_seen(const mp_call *base) {
    const mp_draw_call *call = (const mp_draw_call *)base;
    return atomic_load_explicit(&call->previews_done, memory_order_relaxed) > 0;
}

static mp_status check_draw(const mp_draw_args *args, mp_error *error) {
    MP_TRY(mp_check_range("width", args->width, 1, MP_DRAW_MOST_SIDE, error));
    MP_TRY(mp_check_range("height", args->height, 1, MP_DRAW_MOST_SIDE, error));
    MP_TRY(mp_check_range("n", args->n_pictures, 1, MP_DRAW_MOST_PICTURES, error));
    MP_TRY(mp_check_range("the number of steps", args->n_steps, 1, MP_DRAW_MOST_STEPS, error));
    MP_TRY(mp_check_range("the number of texts", args->n_texts, 1, MP_DRAW_TEXTS, error));
    MP_TRY(mp_check_range("preview_every", args->preview_every, 0, MP_DRAW_MOST_STEPS, error));
    MP_TRY(mp_check_range("the number of latents", args->n_noise, 1, INT32_MAX, error));
    MP_TRY(mp_check_number("guidance_scale", args->guidance, 0, 1000, error));
    for (int e = 0; e < MP_DRAW_ENCODERS; e++)
        MP_TRY(mp_check_range("the number of tokens", args->n_ids[e], 0, MP_DRAW_MOST_TOKENS, error));
    for (int s = 0; s <= args->n_steps; s++) {
        MP_TRY(mp_check_number("a share of noise", args->sigmas[s], -1e4, 1e4, error));
        if (s < args->n_steps)
            MP_TRY(mp_check_number("a time", args->times[s], -1e6, 1e6, error));
    }
    for (int64_t i = 0; i < args->n_noise; i++)
        if (!(args->noise[i] >= -1e6f && args->noise[i] <= 1e6f))
            return mp_fail(error, MP_INVALID_ARGUMENT, "latents[%lld] is %g, allowed: -1e6 to 1e6", (long long)i,
                           (double)args->noise[i]);
    return MP_OK;
}

mp_status mp_draw_call_create(const mp_draw_args *args, mp_draw_call **out, mp_error *error) {
    *out = NULL;
    MP_TRY(check_draw(args, error));
    mp_draw_call *call = mp_alloc_zeroed(sizeof *call, MP_TAG_REQUEST);
    if (!call)
        return mp_fail_memory(error, sizeof *call, "a call");
    bool ok = true;
    uint64_t *bytes = &call->base.bytes;
    call->base = (mp_call){.capability = MP_TEXT_TO_IMAGE,
                           .destroy = draw_destroy,
                           .fingerprint = draw_fingerprint,
                           .usage = draw_usage,
                           .seen = draw_seen,
                           .bytes = sizeof *call};
    call->width = args->width;
    call->height = args->height;
    call->n_pictures = args->n_pictures;
    call->n_steps = args->n_steps;
    call->n_texts = args->n_texts;
    call->guidance = args->guidance;
    call->n_noise = args->n_noise;
    call->preview_every = args->preview_every;
    call->keep = args->keep;
    for (int e = 0; e < MP_DRAW_ENCODERS; e++) {
        call->n_ids[e] = args->n_ids[e];
        for (int t = 0; t < args->n_texts; t++)
            call->ids[t][e] = mp_call_copy(args->ids[t][e], (size_t)args->n_ids[e], sizeof(int32_t), bytes, &ok);
    }
    call->times = mp_call_copy(args->times, (size_t)args->n_steps, sizeof(float), bytes, &ok);
    call->sigmas = mp_call_copy(args->sigmas, (size_t)args->n_steps + 1, sizeof(float), bytes, &ok);
    call->noise = mp_call_copy(args->noise, (size_t)args->n_noise, sizeof(float), bytes, &ok);
    if (!ok) {
        draw_destroy(&call->base);
        return mp_fail_memory(error, (uint64_t)args->n_noise * sizeof(float), "a call");
    }
    *out = call;
    return MP_OK;
}

mp_status mp_draw_call_output(mp_draw_call *call, mp_error *error) {
    const size_t n = (size_t)call->n_pictures, pixels = (size_t)call->width * (size_t)call->height * 3;
    const size_t latents = (size_t)call->channels * (size_t)call->high * (size_t)call->wide;
    const int32_t between = call->preview_every ? (call->n_steps - 1) / call->preview_every : 0;
    const size_t kept = call->keep ? (size_t)call->n_texts * ((size_t)call->text_rows * (size_t)call->text_width +
                                                              (size_t)call->pooled_width) +
                                         n * (size_t)call->n_steps * latents
                                   : 0;
    const size_t floats = n * (latents + pixels) + kept + (between ? latents : 0);
    const uint64_t wanted = floats * sizeof(float) + n * pixels * (size_t)between;
    if (call->output_bytes == wanted)
        return MP_OK;
    if (call->output_bytes > 0)
        free_pictures(call);
    bool ok = true;
    uint64_t bytes = 0;
    call->n_previews = between; /* the last step's is the picture itself */
    call->latents = mp_call_memory(n * latents, sizeof(float), &bytes, &ok);
    call->pixels = mp_call_memory(n * pixels, sizeof(float), &bytes, &ok);
    call->previews = between ? mp_call_memory(n * pixels, (size_t)between, &bytes, &ok) : NULL;
    call->preview_latents = between ? mp_call_memory(latents, sizeof(float), &bytes, &ok) : NULL;
    if (call->keep) {
        const size_t texts = (size_t)call->n_texts;
        call->texts = mp_call_memory(texts * (size_t)call->text_rows, (size_t)call->text_width * sizeof(float), &bytes,
                                     &ok);
        call->pooled = mp_call_memory(texts * (size_t)call->pooled_width, sizeof(float), &bytes, &ok);
        call->history = mp_call_memory(n * latents, (size_t)call->n_steps * sizeof(float), &bytes, &ok);
    }
    call->base.bytes += bytes;
    call->output_bytes = bytes;
    if (ok)
        return MP_OK;
    free_pictures(call);
    return mp_fail_memory(error, bytes, "the pictures of a call");
}

int32_t mp_draw_previews_due(const mp_draw_call *call, uint32_t cursor) {
    if (!call->n_previews)
        return 0;
    if (cursor >= mp_draw_steps(call))
        return call->n_pictures * call->n_previews;
    return (int32_t)cursor / call->n_steps * call->n_previews +
           (int32_t)cursor % call->n_steps / call->preview_every;
}
