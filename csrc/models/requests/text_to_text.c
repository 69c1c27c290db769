/* requests/text_to_text.c: calls for texts, of images or not: making, output buffers, freeing. */
#include <stdatomic.h>

#include "models/requests/build.h"

static void free_images(mp_text_images *images) {
    mp_free(images->sizes);
    mp_free(images->offsets);
    mp_free(images->pixels);
    mp_free(images->tile_keys);
    mp_free(images->runs);
    mp_free(images->run_keys);
    mp_free(images->sources);
}

static void free_output(mp_text_call *call) {
    for (int c = 0; c < call->n_choices; c++) {
        mp_choice *choice = &call->choices[c];
        mp_free(choice->tokens);
        mp_free(choice->top_ids);
        mp_free(choice->top_logprobs);
        mp_free(choice->text);
        choice->tokens = NULL;
        choice->top_ids = NULL;
        choice->top_logprobs = NULL;
        choice->text = NULL;
    }
    mp_free(call->prompt_logits);
    mp_free(call->image_rows);
    mp_free(call->capture.data);
    call->prompt_logits = call->image_rows = call->capture.data = NULL;
    call->capture.tokens = 0;
    call->base.bytes -= call->output_bytes;
    call->output_bytes = 0;
}

static void text_destroy(mp_call *base) {
    mp_text_call *call = (mp_text_call *)base;
    for (int i = 0; call->stop && i < call->n_stop; i++)
        mp_free(call->stop[i]);
    if (call->choices)
        free_output(call);
    free_images(&call->images);
    if (call->masks)
        mp_free(call->masks[0].bits);
    mp_free(call->masks);
    mp_free(call->prompt);
    mp_free(call->stop);
    mp_free(call->stop_bytes);
    mp_free(call->stop_ids);
    mp_free(call->bias_ids);
    mp_free(call->bias);
    mp_free(call->choices);
    mp_free(call);
}

static uint64_t text_fingerprint(const mp_call *base) {
    const mp_text_call *call = (const mp_text_call *)base;
    const mp_text_images *images = &call->images;
    uint64_t hash = mp_mix(MP_MIX_START, images->run_keys, (size_t)images->n_runs * MP_IMAGE_KEY);
    return mp_mix_end(mp_mix(hash, call->prompt, (size_t)call->n_prompt * sizeof *call->prompt));
}

static void text_usage(const mp_call *base, uint64_t *in, uint64_t *out) {
    const mp_text_call *call = (const mp_text_call *)base;
    *in = (uint64_t)call->n_prompt;
    *out = 0;
    for (int i = 0; call->choices && i < call->n_choices; i++)
        *out += atomic_load_explicit(&call->choices[i].token_count, memory_order_relaxed);
}

static bool text_seen(const mp_call *base) {
    const mp_text_call *call = (const mp_text_call *)base;
    for (int i = 0; call->choices && i < call->n_choices; i++)
        if (atomic_load_explicit(&call->choices[i].token_count, memory_order_relaxed))
            return true;
    return false;
}

static mp_status check_text(const mp_text_args *args, mp_error *error) {
    const mp_sampling *s = &args->sampling;
    MP_TRY(mp_check_range("the number of prompt tokens", args->n_prompt, 1, MP_TEXT_MOST_TOKENS, error));
    MP_TRY(mp_check_range("n", args->n_choices, 1, MP_TEXT_MOST_CHOICES, error));
    MP_TRY(mp_check_range("the number of stop strings", args->n_stop, 0, MP_TEXT_MOST_STOPS, error));
    MP_TRY(mp_check_range("the number of stop ids", args->n_stop_ids, 0, MP_TEXT_MOST_IDS, error));
    MP_TRY(mp_check_range("the number of logit biases", args->n_bias, 0, MP_TEXT_MOST_IDS, error));
    MP_TRY(mp_check_range("max_tokens", s->max_tokens, 1, MP_TEXT_MOST_TOKENS, error));
    MP_TRY(mp_check_range("min_tokens", s->min_tokens, 0, s->max_tokens, error));
    MP_TRY(mp_check_range("top_k", s->top_k, 0, INT32_MAX, error));
    MP_TRY(mp_check_range("logprobs", s->logprobs, -1, MP_TEXT_MOST_LOGPROBS, error));
    MP_TRY(mp_check_number("temperature", s->temperature, 0, 100, error));
    MP_TRY(mp_check_number("top_p", s->top_p, 0, 1, error));
    MP_TRY(mp_check_number("min_p", s->min_p, 0, 1, error));
    MP_TRY(mp_check_number("repetition_penalty", s->repetition_penalty, 1e-3, 1e3, error));
    MP_TRY(mp_check_number("presence_penalty", s->presence_penalty, -100, 100, error));
    MP_TRY(mp_check_number("frequency_penalty", s->frequency_penalty, -100, 100, error));
    MP_TRY(mp_check_range("the number of values of a captured record", args->capture_values, 0, MP_CAPTURE_MOST_VALUES,
                       error));
    MP_TRY(mp_check_range("the number of captured records", args->capture_records, args->capture_values > 0, INT32_MAX,
                       error));
    if (args->capture_values > 0)
        MP_TRY(mp_check_range("n of a call that is captured", args->n_choices, 1, 1, error));
    MP_TRY(mp_check_range("the bytes of a mask", args->mask_bytes, 0, MP_TEXT_MOST_MASK_BYTES, error));
    if (args->mask_bytes % 4 != 0 || (args->mask_bytes > 0 && (s->ignore_eos || s->min_tokens > 0)))
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "a mask has %lld bytes, allowed: a multiple of 4, without ignore_eos and min_tokens",
                       (long long)args->mask_bytes);
    for (int i = 0; i < args->n_stop; i++)
        MP_TRY(mp_check_range("the length of a stop string in bytes", args->stop_bytes[i], 1, MP_TEXT_MOST_STOP_BYTES,
                           error));
    for (int i = 0; i < args->n_bias; i++)
        MP_TRY(mp_check_number("a logit bias", args->bias[i], -1e6, 1e6, error));
    return MP_OK;
}

/* Runs one after the other within the prompt, which share all tiles out. */
static mp_status check_runs(const mp_text_args *args, mp_error *error) {
    const mp_text_image_args *images = &args->images;
    int64_t end = 0, tiles = 0, rows = 0;
    MP_TRY(mp_check_range("the number of tiles", images->n_tiles, 0, MP_TEXT_MOST_TILES, error));
    MP_TRY(mp_check_range("the number of runs", images->n_runs, 0, images->n_tiles, error));
    for (int32_t r = 0; r < images->n_runs; r++) {
        const int32_t *run = images->runs + 3 * (ptrdiff_t)r;
        MP_TRY(mp_check_range("the start of a run", run[0], end, args->n_prompt - 1, error));
        MP_TRY(mp_check_range("the rows of a run", run[1], 1, args->n_prompt - run[0], error));
        MP_TRY(mp_check_range("the tiles of a run", run[2], 1, images->n_tiles - tiles, error));
        end = (int64_t)run[0] + run[1];
        rows += run[1];
        tiles += run[2];
    }
    MP_TRY(mp_check_range("the tiles of all runs", tiles, images->n_tiles, images->n_tiles, error));
    if (images->n_sources)
        MP_TRY(mp_check_range("the number of sources", images->n_sources, rows, rows, error));
    int64_t bytes = 0;
    for (int32_t i = 0; i < 2 * images->n_tiles; i += 2) {
        MP_TRY(mp_check_range("the height of a tile", images->sizes[i], 1, MP_IMAGE_MOST_SIDE, error));
        MP_TRY(mp_check_range("the width of a tile", images->sizes[i + 1], 1, MP_IMAGE_MOST_SIDE, error));
        bytes += (int64_t)images->sizes[i] * images->sizes[i + 1] * MP_IMAGE_CHANNELS;
    }
    return mp_check_range("the bytes of pixels", images->n_bytes, bytes, bytes, error);
}

static bool copy_images(const mp_text_image_args *from, mp_text_images *to, uint64_t *bytes) {
    const size_t tiles = (size_t)from->n_tiles, runs = (size_t)from->n_runs;
    bool ok = true;
    if (runs == 0)
        return true;
    to->sizes = mp_call_copy(from->sizes, 2 * tiles, sizeof *from->sizes, bytes, &ok);
    to->pixels = mp_call_copy(from->pixels, (size_t)from->n_bytes, 1, bytes, &ok);
    to->tile_keys = mp_call_copy(from->tile_keys, tiles, MP_IMAGE_KEY, bytes, &ok);
    to->run_keys = mp_call_copy(from->run_keys, runs, MP_IMAGE_KEY, bytes, &ok);
    to->sources = mp_call_copy(from->sources, (size_t)from->n_sources, sizeof *from->sources, bytes, &ok);
    to->offsets = mp_alloc_array(tiles + 1, sizeof *to->offsets, MP_TAG_REQUEST);
    to->runs = mp_alloc_array(runs, sizeof *to->runs, MP_TAG_REQUEST);
    if (!ok || !to->offsets || !to->runs)
        return false;
    *bytes += (tiles + 1) * sizeof *to->offsets + runs * sizeof *to->runs;
    to->n_tiles = from->n_tiles;
    to->n_runs = from->n_runs;
    to->offsets[0] = 0;
    for (size_t t = 0; t < tiles; t++)
        to->offsets[t + 1] = to->offsets[t] + (int64_t)to->sizes[2 * t] * to->sizes[2 * t + 1] * MP_IMAGE_CHANNELS;
    mp_image_run next = {0};
    for (size_t r = 0; r < runs; r++) {
        const int32_t *run = from->runs + 3 * r;
        to->runs[r] = (mp_image_run){run[0], run[1], next.tile, run[2], next.source};
        next.tile += run[2];
        next.source += run[1];
    }
    return true;
}

/* All bits in one piece, which the first one's pointer frees. */
static bool make_masks(mp_text_call *call, const void *mask, int64_t mask_bytes, uint64_t *bytes) {
    size_t size = (size_t)mask_bytes, n = (size_t)call->n_choices;
    if (size == 0)
        return true;
    call->masks = mp_alloc_array(n, sizeof *call->masks, MP_TAG_REQUEST);
    uint8_t *bits = call->masks ? mp_alloc_array(n, size, MP_TAG_REQUEST) : NULL;
    if (!bits)
        return false;
    call->mask_words = (int32_t)(size / sizeof(uint32_t));
    *bytes += n * (size + sizeof *call->masks);
    for (size_t i = 0; i < n; i++) {
        call->masks[i].bits = (uint32_t *)(void *)(bits + i * size);
        memcpy(call->masks[i].bits, mask, size);
        atomic_init(&call->masks[i].ready, 1);
    }
    return true;
}

mp_status mp_text_call_mask(mp_text_call *call, int choice, uint32_t index, const void *mask, int64_t mask_bytes,
                            mp_error *error) {
    if (choice < 0 || choice >= call->n_choices || !call->masks ||
        mask_bytes != (int64_t)call->mask_words * (int64_t)sizeof(uint32_t))
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "a mask of %lld bytes for choice %d, allowed: %d bytes, choices 0 to %d", (long long)mask_bytes,
                       choice, call->mask_words * (int)sizeof(uint32_t), call->masks ? call->n_choices - 1 : -1);
    memcpy(call->masks[choice].bits, mask, (size_t)mask_bytes);
    atomic_store_explicit(&call->masks[choice].ready, index + 1, memory_order_release);
    return MP_OK;
}

mp_status mp_text_call_create(const mp_text_args *args, mp_text_call **out, mp_error *error) {
    *out = NULL;
    MP_TRY(check_text(args, error));
    MP_TRY(check_runs(args, error));
    mp_text_call *call = mp_alloc_zeroed(sizeof *call, MP_TAG_REQUEST);
    if (!call)
        return mp_fail_memory(error, sizeof *call, "a call");
    bool ok = true;
    uint64_t *bytes = &call->base.bytes;
    call->base = (mp_call){.capability = args->vision ? MP_VISION : MP_TEXT_TO_TEXT,
                           .destroy = text_destroy,
                           .fingerprint = text_fingerprint,
                           .usage = text_usage,
                           .seen = text_seen,
                           .goes_on = true,
                           .bytes = sizeof *call};
    call->sampling = args->sampling;
    call->n_prompt = args->n_prompt;
    call->n_choices = args->n_choices;
    call->n_stop = args->n_stop;
    call->n_stop_ids = args->n_stop_ids;
    call->n_bias = args->n_bias;
    call->want_prompt_logits = args->want_prompt_logits;
    call->capture.values = args->capture_values;
    call->capture.most = args->capture_records;
    call->prompt = mp_call_copy(args->prompt, (size_t)args->n_prompt, sizeof *args->prompt, bytes, &ok);
    call->stop_bytes = mp_call_copy(args->stop_bytes, (size_t)args->n_stop, sizeof *args->stop_bytes, bytes, &ok);
    call->stop_ids = mp_call_copy(args->stop_ids, (size_t)args->n_stop_ids, sizeof *args->stop_ids, bytes, &ok);
    call->bias_ids = mp_call_copy(args->bias_ids, (size_t)args->n_bias, sizeof *args->bias_ids, bytes, &ok);
    call->bias = mp_call_copy(args->bias, (size_t)args->n_bias, sizeof *args->bias, bytes, &ok);
    call->stop = mp_alloc_array((size_t)args->n_stop + 1, sizeof *call->stop, MP_TAG_REQUEST);
    call->choices = mp_alloc_array((size_t)args->n_choices, sizeof *call->choices, MP_TAG_REQUEST);
    ok = ok && copy_images(&args->images, &call->images, bytes) && call->stop && call->choices &&
         make_masks(call, args->mask, args->mask_bytes, bytes);
    for (int i = 0; ok && i < args->n_stop; i++)
        call->stop[i] = mp_call_copy(args->stop[i], (size_t)args->stop_bytes[i], 1, bytes, &ok);
    for (int i = 0; ok && i < args->n_choices; i++)
        call->choices[i].stop_index = -1;
    if (!ok) {
        text_destroy(&call->base);
        return mp_fail_memory(error, (uint64_t)args->n_prompt * sizeof *args->prompt, "a call");
    }
    *out = call;
    return MP_OK;
}

/* How many tokens' records there is to be memory for. */
static mp_status size_capture(const mp_text_call *call, int32_t *tokens, mp_error *error) {
    const mp_capture *capture = &call->capture;
    int32_t records = mp_capture_records(capture);
    if (capture->values == 0)
        return MP_OK;
    MP_TRY(mp_check_range("the number of captured records", capture->most, records, INT32_MAX, error));
    *tokens = capture->most / records;
    *tokens = *tokens < call->sampling.max_tokens ? *tokens : call->sampling.max_tokens;
    return MP_OK;
}

mp_status mp_text_call_output(mp_text_call *call, uint32_t max_token_bytes, mp_error *error) {
    enum { GROWN = 3, REST = 8 }; /* bytes of U+FFFD; an unfinished character at the end */
    const mp_sampling *s = &call->sampling;
    size_t tokens = (size_t)s->max_tokens, k = s->logprobs > 0 ? (size_t)s->logprobs : 0;
    if (call->output_bytes > 0) {
        bool fits = call->output_token_bytes >= max_token_bytes;
        bool same = call->output_vocab == call->vocab && call->output_hidden == call->hidden &&
                    call->output_layers == call->capture.layers;
        if (fits && (same || (!call->want_prompt_logits && call->capture.values == 0)))
            return MP_OK;
        if (text_seen(&call->base)) /* it may be read now */
            return mp_fail(error, MP_MODEL, "the answer was begun by a model of other sizes");
        free_output(call);
    }
    bool ok = true;
    uint64_t bytes = 0;
    int32_t captured = 0;
    size_t text = tokens * max_token_bytes; /* both below 2^32 */
    MP_TRY(size_capture(call, &captured, error));
    if (text > (UINT32_MAX - REST) / GROWN)
        return mp_fail(error, MP_LIMIT, "max_tokens is %d: the text could exceed 4 GiB", s->max_tokens);
    for (int c = 0; c < call->n_choices; c++) {
        mp_choice *choice = &call->choices[c];
        choice->text_capacity = (uint32_t)(GROWN * text + REST);
        choice->text = mp_call_memory(choice->text_capacity, 1, &bytes, &ok);
        choice->top_ids = k ? mp_call_memory(tokens * k, sizeof *choice->top_ids, &bytes, &ok) : NULL;
        choice->top_logprobs = k ? mp_call_memory(tokens * k, sizeof *choice->top_logprobs, &bytes, &ok) : NULL;
        choice->tokens = mp_call_memory(tokens, sizeof *choice->tokens, &bytes, &ok);
    }
    if (call->want_prompt_logits)
        call->prompt_logits = mp_call_memory((size_t)call->n_prompt * (size_t)call->vocab, sizeof(float), &bytes, &ok);
    if (call->want_prompt_logits && call->images.n_runs > 0) {
        const mp_image_run *last = &call->images.runs[call->images.n_runs - 1];
        call->image_rows = mp_call_memory((size_t)(last->source + last->rows) * (size_t)call->hidden, sizeof(float),
                                          &bytes, &ok);
    }
    if (captured > 0)
        call->capture.data = mp_call_memory((size_t)captured * mp_capture_floats(&call->capture), sizeof(float), &bytes,
                                            &ok);
    call->capture.tokens = captured;
    call->base.bytes += bytes;
    call->output_bytes = bytes;
    call->output_token_bytes = max_token_bytes;
    call->output_vocab = call->vocab;
    call->output_hidden = call->hidden;
    call->output_layers = call->capture.layers;
    if (ok)
        return MP_OK;
    free_output(call);
    return mp_fail_memory(error, bytes, "the answer of a call");
}
