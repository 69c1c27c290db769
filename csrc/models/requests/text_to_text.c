/* requests/text_to_text.c: text requests, with images or without. */
#include <stdatomic.h>

#include "models/requests/build.h"

/* ---- images -------------------- */

static void free_images(mp_text_images *images) {
    mp_free(images->sizes);
    mp_free(images->tile_keys);
    mp_free(images->run_keys);
    mp_free(images->spans);
    mp_free(images->sources);
    mp_free(images->times);
    mp_free(images->pixels);
    mp_free(images->offsets);
    mp_free(images->runs);
}

/* Check that runs are in order within the prompt, and that together they use all tiles. */
static mp_status check_images(const mp_text_image_args *args, int32_t n_prompt, mp_error *error) {
    const size_t tiles_given = (size_t)args->n_tiles, runs = (size_t)args->n_runs;
    MP_TRY(mp_check_range("the number of tiles", args->n_tiles, 0, MP_TEXT_MAX_TILES, error));
    MP_TRY(mp_check_range("the number of runs", args->n_runs, 0, MP_TEXT_MAX_TILES, error));
    MP_TRY(mp_check_range("the number of sources", args->n_sources, 0, MP_TEXT_MAX_TOKENS, error));
    MP_TRY(mp_check_range("the number of bytes of pixels", args->n_bytes, 0, INT64_MAX / 16, error));
    MP_TRY(mp_check_items_int32_t("sizes", args->sizes, 2 * tiles_given, 1, MP_IMAGE_MAX_SIDE, error));
    MP_TRY(mp_check_items_uint8_t("tile_keys", args->tile_keys, MP_IMAGE_KEY * tiles_given, 0, UINT8_MAX, error));
    MP_TRY(mp_check_items_uint8_t("run_keys", args->run_keys, MP_IMAGE_KEY * runs, 0, UINT8_MAX, error));
    MP_TRY(mp_check_items_int32_t("runs", args->spans, 3 * runs, 0, INT32_MAX, error));
    MP_TRY(mp_check_items_int32_t("sources", args->sources, (size_t)args->n_sources, INT32_MIN, INT32_MAX, error));
    MP_TRY(mp_check_range("the number of times", args->n_times, 0, args->n_runs, error));
    MP_TRY(mp_check_items_int32_t("times", args->times, (size_t)args->n_times, -1, MP_TEXT_MAX_TIME, error));
    MP_TRY(mp_check_items_uint8_t("pixels", args->pixels, (size_t)args->n_bytes, 0, UINT8_MAX, error));
    int64_t end = 0, tiles = 0, rows = 0;
    for (int32_t r = 0; r < args->n_runs; r++) {
        const int32_t *span = args->spans + 3 * (ptrdiff_t)r;
        MP_TRY(mp_check_range("the start of a run", span[0], end, n_prompt - 1, error));
        MP_TRY(mp_check_range("the rows of a run", span[1], 1, n_prompt - span[0], error));
        MP_TRY(mp_check_range("the tiles of a run", span[2], r == 0, args->n_tiles - tiles, error));
        end = (int64_t)span[0] + span[1];
        rows += span[1];
        tiles += span[2];
    }
    MP_TRY(mp_check_range("the tiles of all runs", tiles, args->n_tiles, args->n_tiles, error));
    if (args->n_sources)
        MP_TRY(mp_check_range("the number of sources", args->n_sources, rows, rows, error));
    if (args->n_times)
        MP_TRY(mp_check_range("the number of times", args->n_times, args->n_runs, args->n_runs, error));
    return mp_check_pixels(args->sizes, args->n_tiles, args->n_bytes, error);
}

static bool copy_images(const mp_text_image_args *args, mp_text_images *to, uint64_t *bytes) {
    bool ok = true;
    if (args->n_runs == 0)
        return true;
    const size_t tiles = (size_t)args->n_tiles, runs = (size_t)args->n_runs, sources = (size_t)args->n_sources;
    to->n_tiles = args->n_tiles;
    to->n_runs = args->n_runs;
    to->n_sources = args->n_sources;
    to->n_times = args->n_times;
    to->n_bytes = args->n_bytes;
    to->sizes = mp_request_copy(args->sizes, 2 * tiles, sizeof *to->sizes, bytes, &ok);
    to->tile_keys = mp_request_copy(args->tile_keys, MP_IMAGE_KEY * tiles, 1, bytes, &ok);
    to->run_keys = mp_request_copy(args->run_keys, MP_IMAGE_KEY * runs, 1, bytes, &ok);
    to->spans = mp_request_copy(args->spans, 3 * runs, sizeof *to->spans, bytes, &ok);
    to->sources = mp_request_copy(args->sources, sources, sizeof *to->sources, bytes, &ok);
    to->times = mp_request_copy(args->times, (size_t)args->n_times, sizeof *to->times, bytes, &ok);
    to->pixels = mp_request_copy(args->pixels, (size_t)args->n_bytes, 1, bytes, &ok);
    to->offsets = mp_request_pixel_offsets(args->sizes, args->n_tiles, bytes, &ok);
    to->runs = ok ? mp_alloc_array((size_t)args->n_runs, sizeof *to->runs, MP_TAG_REQUEST) : NULL;
    if (!to->runs)
        return false;
    *bytes += (size_t)args->n_runs * sizeof *to->runs;
    mp_image_run next = {0};
    for (int32_t r = 0; r < args->n_runs; r++) {
        const int32_t *span = args->spans + 3 * (ptrdiff_t)r;
        if (span[2] > 0) { /* otherwise the run shows further rows of the same tiles */
            next.tile += next.tiles;
            next.tiles = span[2];
        }
        to->runs[r] = (mp_image_run){span[0], span[1], next.tile, next.tiles, next.source,
                                     args->n_times ? args->times[r] : -1};
        next.source += span[1];
    }
    return true;
}

/* ---- sampling -------------------- */

static mp_status check_sampling(const mp_sampling *args, mp_error *error) {
    MP_TRY(mp_check_number("`temperature`", args->temperature, 0, 100, error));
    MP_TRY(mp_check_range("`top_k`", args->top_k, 0, INT32_MAX, error));
    MP_TRY(mp_check_number("`top_p`", args->top_p, 0, 1, error));
    MP_TRY(mp_check_number("`min_p`", args->min_p, 0, 1, error));
    MP_TRY(mp_check_number("`repetition_penalty`", args->repetition_penalty, 1e-3, 1e3, error));
    MP_TRY(mp_check_number("`presence_penalty`", args->presence_penalty, -100, 100, error));
    MP_TRY(mp_check_number("`frequency_penalty`", args->frequency_penalty, -100, 100, error));
    MP_TRY(mp_check_range("`max_tokens`", args->max_tokens, 1, MP_TEXT_MAX_TOKENS, error));
    MP_TRY(mp_check_range("`min_tokens`", args->min_tokens, 0, MP_TEXT_MAX_TOKENS, error));
    MP_TRY(mp_check_range("`logprobs`", args->logprobs, -1, MP_TEXT_MAX_LOGPROBS, error));
    return mp_check_range("`min_tokens`", args->min_tokens, 0, args->max_tokens, error);
}

/* ---- the request -------------------- */

static void free_strings(char **strings, int32_t count, int32_t *lengths) {
    for (int32_t i = 0; strings && i < count; i++)
        mp_free(strings[i]);
    mp_free(strings);
    mp_free(lengths);
}

static mp_status check_strings(const char *name, int32_t count, const int32_t *lengths, mp_error *error) {
    for (int32_t i = 0; i < count; i++)
        MP_TRY(mp_check_range(name, lengths[i], 1, MP_TEXT_MAX_STOP_BYTES, error));
    return MP_OK;
}

/* Copy `count` strings of these lengths, and the lengths. Sets *ok to false if memory is exhausted. */
static char **copy_strings(const char *const *strings, int32_t count, const int32_t *lengths, int32_t **to_lengths,
                           uint64_t *bytes, bool *ok) {
    const size_t n = (size_t)count;
    *to_lengths = mp_request_copy(lengths, n, sizeof *lengths, bytes, ok);
    char **to = *ok ? mp_alloc_array(n + 1, sizeof *to, MP_TAG_REQUEST) : NULL;
    *ok = to != NULL;
    *bytes += *ok ? (n + 1) * sizeof *to : 0;
    for (size_t i = 0; *ok && i < n; i++)
        to[i] = mp_request_copy(strings[i], (size_t)lengths[i], 1, bytes, ok);
    return to;
}

static void free_output(mp_text_request *request) {
    for (int c = 0; c < request->n_choices; c++) {
        mp_choice *choice = &request->choices[c];
        mp_free(choice->tokens);
        mp_free(choice->top_ids);
        mp_free(choice->top_logprobs);
        mp_free(choice->text);
        choice->tokens = NULL;
        choice->top_ids = NULL;
        choice->top_logprobs = NULL;
        choice->text = NULL;
    }
    mp_free(request->prompt_logits);
    mp_free(request->image_rows);
    request->prompt_logits = request->image_rows = NULL;
    mp_free(request->capture.data);
    request->capture.data = NULL;
    request->capture.tokens = 0;
    mp_request_charge_outputs(&request->base, 0);
}

static void text_destroy(mp_request *base) {
    mp_text_request *request = (mp_text_request *)base;
    if (request->choices)
        free_output(request);
    free_images(&request->images);
    if (request->masks)
        mp_free(request->masks[0].bits);
    mp_free(request->masks);
    mp_free(request->choices);
    mp_free(request->prompt);
    free_strings(request->stop, request->n_stop, request->stop_bytes);
    free_strings(request->reasoning_starts, request->n_reasoning_starts, request->reasoning_start_bytes);
    free_strings(request->reasoning_ends, request->n_reasoning_ends, request->reasoning_end_bytes);
    free_strings(request->call_starts, request->n_call_starts, request->call_start_bytes);
    mp_free(request->stop_ids);
    mp_free(request->bias_ids);
    mp_free(request->bias);
    mp_free(request);
}

static uint64_t text_fingerprint(const mp_request *base) {
    const mp_text_request *request = (const mp_text_request *)base;
    const mp_text_images *images = &request->images;
    uint64_t hash = mp_fingerprint(0, images->run_keys, (size_t)images->n_runs * MP_IMAGE_KEY);
    return mp_fingerprint(hash, request->prompt, (size_t)request->n_prompt * sizeof *request->prompt);
}

static void text_usage(const mp_request *base, uint64_t *in, uint64_t *out) {
    const mp_text_request *request = (const mp_text_request *)base;
    *in = (uint64_t)request->n_prompt;
    *out = 0;
    for (int i = 0; request->choices && i < request->n_choices; i++)
        *out += atomic_load_explicit(&request->choices[i].token_count, memory_order_relaxed);
}

static bool text_seen(const mp_request *base) {
    const mp_text_request *request = (const mp_text_request *)base;
    for (int i = 0; request->choices && i < request->n_choices; i++)
        if (atomic_load_explicit(&request->choices[i].token_count, memory_order_relaxed))
            return true;
    return false;
}

/* Before the first token, a request has no results but those of its prompt. */
static bool text_drop_outputs(mp_request *base, bool begun) {
    mp_text_request *request = (mp_text_request *)base;
    if (begun && (text_seen(base) || request->want_prompt_logits || request->capture.values > 0))
        return false;
    free_output(request);
    return true;
}

static mp_status check_text(const mp_text_args *args, mp_error *error) {
    MP_TRY(mp_check_range("the number of prompt tokens", args->n_prompt, 1, MP_TEXT_MAX_TOKENS, error));
    MP_TRY(mp_check_range("the number of stop strings", args->n_stop, 0, MP_TEXT_MAX_STOPS, error));
    MP_TRY(mp_check_range("the number of reasoning starts", args->n_reasoning_starts, 0, MP_TEXT_MAX_STOPS, error));
    MP_TRY(mp_check_range("the number of reasoning ends", args->n_reasoning_ends, 0, MP_TEXT_MAX_STOPS, error));
    MP_TRY(mp_check_range("the number of call starts", args->n_call_starts, 0, MP_TEXT_MAX_STOPS, error));
    MP_TRY(mp_check_range("the number of stop ids", args->n_stop_ids, 0, MP_TEXT_MAX_IDS, error));
    MP_TRY(mp_check_range("the number of logit biases", args->n_bias, 0, MP_TEXT_MAX_IDS, error));
    const size_t prompt = (size_t)args->n_prompt, stop_ids = (size_t)args->n_stop_ids, bias = (size_t)args->n_bias;
    MP_TRY(mp_check_items_int32_t("prompt", args->prompt, prompt, INT32_MIN, INT32_MAX, error));
    MP_TRY(mp_check_range("`n`", args->n_choices, 1, MP_TEXT_MAX_CHOICES, error));
    MP_TRY(check_strings("the length of a stop string in bytes", args->n_stop, args->stop_bytes, error));
    MP_TRY(check_strings("the length of a reasoning start in bytes", args->n_reasoning_starts,
                         args->reasoning_start_bytes, error));
    MP_TRY(check_strings("the length of a reasoning end in bytes", args->n_reasoning_ends, args->reasoning_end_bytes,
                         error));
    MP_TRY(check_strings("the length of a call start in bytes", args->n_call_starts, args->call_start_bytes, error));
    MP_TRY(mp_check_items_int32_t("stop_ids", args->stop_ids, stop_ids, 0, INT32_MAX, error));
    MP_TRY(mp_check_items_int32_t("bias_ids", args->bias_ids, bias, 0, INT32_MAX, error));
    MP_TRY(mp_check_items_float("bias", args->bias, bias, -1e6, 1e6, error));
    MP_TRY(mp_check_range("`capture_values`", args->capture_values, 0, MP_CAPTURE_MAX_VALUES, error));
    MP_TRY(mp_check_range("`adapter`", args->adapter, 0, INT32_MAX, error));
    MP_TRY(check_sampling(&args->sampling, error));
    MP_TRY(mp_check_range("`capture_records`", args->capture_records, args->capture_values > 0, INT32_MAX, error));
    if (args->capture_values > 0)
        MP_TRY(mp_check_range("n of a request with captures", args->n_choices, 1, 1, error));
    MP_TRY(mp_check_range("the bytes of a mask", args->mask_bytes, 0, MP_TEXT_MAX_MASK_BYTES, error));
    if (args->mask_bytes % 4 != 0)
        return mp_fail(error, MP_INVALID_ARGUMENT, "a mask must have a multiple of 4 bytes, got %lld",
                       (long long)args->mask_bytes);
    if (args->mask_bytes > 0 && (args->sampling.ignore_eos || args->sampling.min_tokens > 0))
        return mp_fail(error, MP_INVALID_ARGUMENT, "ignore_eos and min_tokens are not allowed together with a mask");
    return check_images(&args->images, args->n_prompt, error);
}

/* Allocate the bits of all masks at once; the first mask's pointer owns them. */
static bool make_masks(mp_text_request *request, const void *mask, int64_t mask_bytes, uint64_t *bytes) {
    size_t size = (size_t)mask_bytes, n = (size_t)request->n_choices;
    if (size == 0)
        return true;
    request->masks = mp_alloc_array(n, sizeof *request->masks, MP_TAG_REQUEST);
    uint8_t *bits = request->masks ? mp_alloc_array(n, size, MP_TAG_REQUEST) : NULL;
    if (!bits)
        return false;
    request->mask_words = (int32_t)(size / sizeof(uint32_t));
    *bytes += n * (size + sizeof *request->masks);
    for (size_t i = 0; i < n; i++) {
        request->masks[i].bits = (uint32_t *)(void *)(bits + i * size);
        memcpy(request->masks[i].bits, mask, size);
        atomic_init(&request->masks[i].ready, 1);
    }
    return true;
}

mp_status mp_text_request_mask(mp_text_request *request, int choice, uint32_t index, const void *mask,
                               int64_t mask_bytes, mp_error *error) {
    const int64_t bytes = (int64_t)request->mask_words * (int64_t)sizeof(uint32_t);
    if (!request->masks)
        return mp_fail(error, MP_INVALID_ARGUMENT, "the request was created without a mask: no mask can be set");
    MP_TRY(mp_check_range("choice", choice, 0, request->n_choices - 1, error));
    MP_TRY(mp_check_range("the bytes of a mask", mask_bytes, bytes, bytes, error));
    memcpy(request->masks[choice].bits, mask, (size_t)mask_bytes);
    atomic_store_explicit(&request->masks[choice].ready, index + 1, memory_order_release);
    return MP_OK;
}

static void copy_inputs(const mp_text_args *args, mp_text_request *to, uint64_t *bytes, bool *ok) {
    const size_t bias = (size_t)args->n_bias;
    to->n_prompt = args->n_prompt;
    to->n_stop = args->n_stop;
    to->n_reasoning_starts = args->n_reasoning_starts;
    to->n_reasoning_ends = args->n_reasoning_ends;
    to->n_call_starts = args->n_call_starts;
    to->n_stop_ids = args->n_stop_ids;
    to->n_bias = args->n_bias;
    to->sampling = args->sampling;
    to->n_choices = args->n_choices;
    to->in_reasoning = args->in_reasoning;
    to->capture_values = args->capture_values;
    to->capture_records = args->capture_records;
    to->adapter = args->adapter;
    to->want_prompt_logits = args->want_prompt_logits;
    to->prompt = mp_request_copy(args->prompt, (size_t)args->n_prompt, sizeof *to->prompt, bytes, ok);
    to->stop = copy_strings(args->stop, args->n_stop, args->stop_bytes, &to->stop_bytes, bytes, ok);
    to->reasoning_starts = copy_strings(args->reasoning_starts, args->n_reasoning_starts, args->reasoning_start_bytes,
                                        &to->reasoning_start_bytes, bytes, ok);
    to->reasoning_ends = copy_strings(args->reasoning_ends, args->n_reasoning_ends, args->reasoning_end_bytes,
                                      &to->reasoning_end_bytes, bytes, ok);
    to->call_starts = copy_strings(args->call_starts, args->n_call_starts, args->call_start_bytes,
                                   &to->call_start_bytes, bytes, ok);
    to->stop_ids = mp_request_copy(args->stop_ids, (size_t)args->n_stop_ids, sizeof *to->stop_ids, bytes, ok);
    to->bias_ids = mp_request_copy(args->bias_ids, bias, sizeof *to->bias_ids, bytes, ok);
    to->bias = mp_request_copy(args->bias, bias, sizeof *to->bias, bytes, ok);
}

mp_status mp_text_request_create(const mp_text_args *args, mp_text_request **out, mp_error *error) {
    *out = NULL;
    MP_TRY(check_text(args, error));
    mp_text_request *to = mp_alloc_zeroed(sizeof *to, MP_TAG_REQUEST);
    if (!to)
        return mp_fail_memory(error, sizeof *to, "a request");
    bool ok = true;
    uint64_t *bytes = &to->base.bytes;
    to->base = (mp_request){.capability = args->vision ? MP_VISION : MP_TEXT_TO_TEXT,
                         .destroy = text_destroy,
                         .drop_outputs = text_drop_outputs,
                         .fingerprint = text_fingerprint,
                         .usage = text_usage,
                         .seen = text_seen,
                         .resumable = true,
                         .bytes = sizeof *to};
    copy_inputs(args, to, bytes, &ok);
    to->capture.values = args->capture_values;
    to->capture.most = args->capture_records;
    to->choices = ok ? mp_alloc_array((size_t)args->n_choices, sizeof *to->choices, MP_TAG_REQUEST) : NULL;
    if (!to->choices || !copy_images(&args->images, &to->images, bytes) ||
        !make_masks(to, args->mask, args->mask_bytes, bytes)) {
        text_destroy(&to->base);
        return mp_fail_memory(error, (uint64_t)args->n_prompt * sizeof *args->prompt, "a request");
    }
    *bytes += (size_t)args->n_choices * sizeof *to->choices;
    for (int32_t i = 0; i < args->n_choices; i++)
        to->choices[i].stop_index = -1;
    *out = to;
    return MP_OK;
}

/* Compute the number of tokens whose records get memory. */
static mp_status size_capture(const mp_text_request *request, int32_t *tokens, mp_error *error) {
    const mp_capture *capture = &request->capture;
    int32_t records = mp_capture_records(capture);
    if (capture->values == 0)
        return MP_OK;
    MP_TRY(mp_check_range("the number of captured records", capture->most, records, INT32_MAX, error));
    *tokens = capture->most / records;
    *tokens = *tokens < request->sampling.max_tokens ? *tokens : request->sampling.max_tokens;
    return MP_OK;
}

mp_status mp_text_request_output(mp_text_request *request, uint32_t max_token_bytes, mp_error *error) {
    enum { GROWN = 3, REST = 8 }; /* a bad byte becomes U+FFFD, 3 bytes; 8 for a cut character at the end */
    const mp_sampling *s = &request->sampling;
    size_t tokens = (size_t)s->max_tokens, k = s->logprobs > 0 ? (size_t)s->logprobs : 0;
    if (request->base.output_bytes > 0) {
        bool fits = request->output_token_bytes >= max_token_bytes;
        bool same = request->output_vocab == request->vocab && request->output_hidden == request->hidden &&
                    request->output_layers == request->capture.layers;
        if (fits && (same || (!request->want_prompt_logits && request->capture.values == 0)))
            return MP_OK;
        if (text_seen(&request->base)) /* a caller may be reading the outputs */
            return mp_fail(error, MP_MODEL,
                           "the completion began on a model of other sizes; send the request again");
        free_output(request);
    }
    bool ok = true;
    uint64_t bytes = 0;
    int32_t captured = 0;
    size_t text = tokens * max_token_bytes; /* both factors are below 2^32 */
    MP_TRY(size_capture(request, &captured, error));
    if (text > (UINT32_MAX - REST) / GROWN)
        return mp_fail(error, MP_LIMIT,
                       "`max_tokens` must be at most %llu with this model, so that no text exceeds 4 GiB, got %d",
                       (unsigned long long)((UINT32_MAX - REST) / GROWN / max_token_bytes), s->max_tokens);
    for (int c = 0; c < request->n_choices; c++) {
        mp_choice *choice = &request->choices[c];
        choice->text_capacity = (uint32_t)(GROWN * text + REST);
        choice->text = mp_request_memory(choice->text_capacity, 1, &bytes, &ok);
        choice->top_ids = k ? mp_request_memory(tokens * k, sizeof *choice->top_ids, &bytes, &ok) : NULL;
        choice->top_logprobs = k ? mp_request_memory(tokens * k, sizeof *choice->top_logprobs, &bytes, &ok) : NULL;
        choice->tokens = mp_request_memory(tokens, sizeof *choice->tokens, &bytes, &ok);
    }
    if (request->want_prompt_logits) {
        const mp_text_images *images = &request->images;
        request->prompt_logits = mp_request_floats((size_t)request->n_prompt, request->vocab, &bytes, &ok);
        if (images->n_runs > 0)
            request->image_rows =
                mp_request_floats((size_t)mp_text_images_rows(images), request->hidden, &bytes, &ok);
    }
    if (captured > 0)
        request->capture.data =
            mp_request_memory((size_t)captured * mp_capture_floats(&request->capture), sizeof(float), &bytes, &ok);
    request->capture.tokens = captured;
    mp_request_charge_outputs(&request->base, bytes);
    request->output_token_bytes = max_token_bytes;
    request->output_vocab = request->vocab;
    request->output_hidden = request->hidden;
    request->output_layers = request->capture.layers;
    if (ok)
        return MP_OK;
    free_output(request);
    return mp_fail_memory(error, bytes, "the outputs of a request");
}
