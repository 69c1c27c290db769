/* requests/text_to_text.c: text requests, with images or without; text_to_text.def, sampling.def and text_images.def
 * list their fields. */
#include <stdatomic.h>

#include "models/requests/build.h"

/* ---- text_images.def ------------------------------------------------------------------------------------------- */

#define MP_SCHEMA "models/requests/text_images.def"

static void free_images(mp_text_images *request) {
#include "models/requests/passes/free.def"
}

/* Check that runs are in order within the prompt, and that together they use each tile once. */
static mp_status check_images(const mp_text_image_args *args, int32_t n_prompt, mp_error *error) {
#include "models/requests/passes/check.def"
    int64_t end = 0, tiles = 0, rows = 0;
    for (int32_t r = 0; r < args->n_runs; r++) {
        const int32_t *span = args->spans + 3 * (ptrdiff_t)r;
        MP_TRY(mp_check_range("the start of a run", span[0], end, n_prompt - 1, error));
        MP_TRY(mp_check_range("the rows of a run", span[1], 1, n_prompt - span[0], error));
        MP_TRY(mp_check_range("the tiles of a run", span[2], 1, args->n_tiles - tiles, error));
        end = (int64_t)span[0] + span[1];
        rows += span[1];
        tiles += span[2];
    }
    MP_TRY(mp_check_range("the tiles of all runs", tiles, args->n_tiles, args->n_tiles, error));
    if (args->n_sources)
        MP_TRY(mp_check_range("the number of sources", args->n_sources, rows, rows, error));
    return mp_check_pixels(args->sizes, args->n_tiles, args->n_bytes, error);
}

static bool copy_images(const mp_text_image_args *args, mp_text_images *to, uint64_t *bytes) {
    bool ok = true;
    if (args->n_runs == 0)
        return true;
#include "models/requests/passes/copy.def"
    to->offsets = mp_request_pixel_offsets(args->sizes, args->n_tiles, bytes, &ok);
    to->runs = ok ? mp_alloc_array((size_t)args->n_runs, sizeof *to->runs, MP_TAG_REQUEST) : NULL;
    if (!to->runs)
        return false;
    *bytes += (size_t)args->n_runs * sizeof *to->runs;
    mp_image_run next = {0};
    for (int32_t r = 0; r < args->n_runs; r++) {
        const int32_t *span = args->spans + 3 * (ptrdiff_t)r;
        to->runs[r] = (mp_image_run){span[0], span[1], next.tile, span[2], next.source};
        next.tile += span[2];
        next.source += span[1];
    }
    return true;
}
#undef MP_SCHEMA

/* ---- sampling.def ---------------------------------------------------------------------------------------------- */

#define MP_SCHEMA "models/requests/sampling.def"
static mp_status check_sampling(const mp_sampling *args, mp_error *error) {
#include "models/requests/passes/check.def"
    return mp_check_range("min_tokens", args->min_tokens, 0, args->max_tokens, error);
}
#undef MP_SCHEMA

/* ---- text_to_text.def ------------------------------------------------------------------------------------------ */

#define MP_SCHEMA "models/requests/text_to_text.def"

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
#include "models/requests/passes/output_free.def"
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
#include "models/requests/passes/free.def"
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

static mp_status check_text(const mp_text_args *args, mp_error *error) {
#include "models/requests/passes/check.def"
    MP_TRY(check_sampling(&args->sampling, error));
    MP_TRY(mp_check_range("capture_records", args->capture_records, args->capture_values > 0, INT32_MAX, error));
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
                         .fingerprint = text_fingerprint,
                         .usage = text_usage,
                         .seen = text_seen,
                         .resumable = true,
                         .bytes = sizeof *to};
#include "models/requests/passes/copy.def"
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
#include "models/requests/passes/output_make.def"
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
