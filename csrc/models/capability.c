/* capability.c: calls: making, output buffers, freeing. */
#include "models/capability.h"

#include <stdatomic.h>
#include <string.h>

#include "models/engine.h"

static const mp_capability_row rows[MP_CAPABILITY_COUNT] = {
#define MP_CAPABILITY(NAME, name, queue, bulk, policy) {name, {queue, bulk}, policy},
#include "models/capabilities.def"
#undef MP_CAPABILITY
};

const mp_capability_row *mp_capability_get(mp_capability capability) { return &rows[capability]; }

bool mp_capability_from_name(const char *name, mp_capability *capability) {
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++)
        if (strcmp(rows[i].name, name) == 0) {
            *capability = (mp_capability)i;
            return true;
        }
    return false;
}

void mp_progress_set(mp_progress *progress, const char *stage, uint32_t percent) {
    if (!progress)
        return;
    atomic_store_explicit(&progress->stage, stage, memory_order_relaxed);
    atomic_store_explicit(&progress->percent, percent, memory_order_relaxed);
    atomic_store_explicit(&progress->beat_ns, mp_sys_now_ns(), memory_order_release);
}

/* A copy of count items, or NULL for none; *ok becomes false when memory is refused. The bytes are added to *bytes. */
static void *copy(const void *from, size_t count, size_t size, uint64_t *bytes, bool *ok) {
    if (count == 0 || !from || !*ok)
        return NULL;
    void *to = mp_alloc_array(count, size, MP_TAG_REQUEST);
    if (!to) {
        *ok = false;
        return NULL;
    }
    memcpy(to, from, count * size);
    *bytes += count * size;
    return to;
}

static mp_status check_range(const char *name, int64_t value, int64_t low, int64_t high, mp_error *error) {
    if (value >= low && value <= high)
        return MP_OK;
    return mp_fail(error, MP_INVALID_ARGUMENT, "%s is %lld, allowed: %lld to %lld", name, (long long)value,
                   (long long)low, (long long)high);
}

/* ---- text_embedding -------------------------------------------------------------------------------------------- */

/* 64-bit FNV-1a over words: equal requests give equal numbers, which is all that is asked of it. */
static uint64_t mix(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; data && i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t finish_mix(uint64_t hash) { return hash ? hash : 1; }

static const uint64_t MIX_START = 0xcbf29ce484222325u;

static uint64_t embed_fingerprint(const mp_call *base) {
    const mp_embed_call *call = (const mp_embed_call *)base;
    uint64_t hash = mix(MIX_START, call->offsets, ((size_t)call->n_texts + 1) * sizeof *call->offsets);
    return finish_mix(mix(hash, call->ids, (size_t)call->n_tokens * sizeof *call->ids));
}

static void embed_usage(const mp_call *base, uint64_t *in, uint64_t *out) {
    *in = (uint64_t)((const mp_embed_call *)base)->n_tokens;
    *out = 0;
}

static void embed_destroy(mp_call *base) {
    mp_embed_call *call = (mp_embed_call *)base;
    mp_free(call->ids);
    mp_free(call->offsets);
    mp_free(call->skip);
    mp_free(call->second);
    mp_free(call->vectors);
    mp_free(call);
}

mp_status mp_embed_call_create(int32_t n_texts, const int32_t *ids, const int64_t *offsets, const int32_t *skip,
                               mp_embed_call **out, mp_error *error) {
    *out = NULL;
    if (n_texts < 1 || n_texts > MP_EMBED_MOST_TEXTS)
        return mp_fail(error, MP_INVALID_ARGUMENT, "there are %d texts, allowed: 1 to %d", n_texts,
                       (int)MP_EMBED_MOST_TEXTS);
    if (offsets[0] != 0)
        return mp_fail(error, MP_INVALID_ARGUMENT, "offsets[0] is %lld, allowed: 0", (long long)offsets[0]);
    for (int32_t t = 0; t < n_texts; t++)
        if (offsets[t + 1] < offsets[t])
            return mp_fail(error, MP_INVALID_ARGUMENT, "offsets[%d] is %lld, below the one before", t + 1,
                           (long long)offsets[t + 1]);
    mp_embed_call *call = mp_alloc_zeroed(sizeof *call, MP_TAG_REQUEST);
    if (!call)
        return mp_fail_memory(error, sizeof *call, "a call");
    bool ok = true;
    call->base = (mp_call){.capability = MP_TEXT_EMBEDDING,
                           .destroy = embed_destroy,
                           .fingerprint = embed_fingerprint,
                           .usage = embed_usage,
                           .bytes = sizeof *call};
    call->n_texts = n_texts;
    call->n_tokens = offsets[n_texts];
    call->normalize = -1;
    call->ids = copy(ids, (size_t)call->n_tokens, sizeof *ids, &call->base.bytes, &ok);
    call->offsets = copy(offsets, (size_t)n_texts + 1, sizeof *offsets, &call->base.bytes, &ok);
    call->skip = copy(skip, (size_t)n_texts, sizeof *skip, &call->base.bytes, &ok);
    if (!ok) {
        embed_destroy(&call->base);
        return mp_fail_memory(error, (uint64_t)offsets[n_texts] * sizeof *ids, "the token ids of a call");
    }
    *out = call;
    return MP_OK;
}

mp_status mp_embed_call_pairs(mp_embed_call *call, const int32_t *second, mp_error *error) {
    bool ok = true;
    call->second = copy(second, (size_t)call->n_texts, sizeof *second, &call->base.bytes, &ok);
    return ok ? MP_OK : mp_fail_memory(error, (uint64_t)call->n_texts * sizeof *second, "the pairs of a call");
}

mp_status mp_embed_call_output(mp_embed_call *call, int32_t width, mp_error *error) {
    if (call->vectors && call->width == width)
        return MP_OK;
    int64_t vectors = call->output == MP_EMBED_TOKENS ? call->n_tokens : call->n_texts;
    size_t count = 0, bytes = 0;
    if (__builtin_mul_overflow((size_t)vectors, (size_t)width, &count) ||
        __builtin_mul_overflow(count, sizeof(float), &bytes))
        return mp_fail_memory(error, UINT64_MAX, "the vectors");
    if (call->vectors) { /* the call was checked against a model that has been replaced since */
        mp_free(call->vectors);
        call->base.bytes -= (size_t)vectors * (size_t)call->width * sizeof(float);
    }
    call->vectors = mp_alloc(bytes, MP_TAG_REQUEST);
    if (!call->vectors)
        return mp_fail_memory(error, bytes, "the vectors");
    call->width = width;
    call->base.bytes += bytes;
    return MP_OK;
}

/* ---- image_embedding ------------------------------------------------------------------------------------------- */

/* Eight bytes at a time: an image is hundreds of kilobytes. */
static uint64_t image_fingerprint(const mp_call *base) {
    const mp_image_call *call = (const mp_image_call *)base;
    uint64_t hash = mix(MIX_START, call->sizes, (size_t)call->n_images * 2 * sizeof *call->sizes);
    size_t bytes = (size_t)call->offsets[call->n_images], at = 0;
    for (; at + sizeof hash <= bytes; at += sizeof hash) {
        uint64_t word;
        memcpy(&word, call->pixels + at, sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return finish_mix(mix(hash, call->pixels + at, bytes - at));
}

static void image_usage(const mp_call *base, uint64_t *in, uint64_t *out) {
    *in = (uint64_t)((const mp_image_call *)base)->n_images;
    *out = 0;
}

static void image_destroy(mp_call *base) {
    mp_image_call *call = (mp_image_call *)base;
    mp_free(call->sizes);
    mp_free(call->offsets);
    mp_free(call->pixels);
    mp_free(call->vectors);
    mp_free(call);
}

mp_status mp_image_call_create(int32_t n_images, const int32_t *sizes, const uint8_t *pixels, int64_t n_bytes,
                               mp_image_call **out, mp_error *error) {
    *out = NULL;
    MP_TRY(check_range("the number of images", n_images, 1, MP_IMAGE_MOST, error));
    int64_t bytes = 0;
    for (int32_t i = 0; i < 2 * n_images; i += 2) {
        MP_TRY(check_range("the height of an image", sizes[i], 1, MP_IMAGE_MOST_SIDE, error));
        MP_TRY(check_range("the width of an image", sizes[i + 1], 1, MP_IMAGE_MOST_SIDE, error));
        bytes += (int64_t)sizes[i] * sizes[i + 1] * MP_IMAGE_CHANNELS; /* below 2^50 */
    }
    if (bytes != n_bytes)
        return mp_fail(error, MP_INVALID_ARGUMENT, "there are %lld bytes of pixels, the sizes make %lld",
                       (long long)n_bytes, (long long)bytes);
    mp_image_call *call = mp_alloc_zeroed(sizeof *call, MP_TAG_REQUEST);
    if (!call)
        return mp_fail_memory(error, sizeof *call, "a call");
    bool ok = true;
    call->base = (mp_call){.capability = MP_IMAGE_EMBEDDING,
                           .destroy = image_destroy,
                           .fingerprint = image_fingerprint,
                           .usage = image_usage,
                           .bytes = sizeof *call};
    call->n_images = n_images;
    call->normalize = -1;
    call->sizes = copy(sizes, 2 * (size_t)n_images, sizeof *sizes, &call->base.bytes, &ok);
    call->pixels = copy(pixels, (size_t)bytes, 1, &call->base.bytes, &ok);
    call->offsets = ok ? mp_alloc_array((size_t)n_images + 1, sizeof *call->offsets, MP_TAG_REQUEST) : NULL;
    if (!call->offsets) {
        image_destroy(&call->base);
        return mp_fail_memory(error, (uint64_t)bytes, "the pixels of a call");
    }
    call->base.bytes += ((size_t)n_images + 1) * sizeof *call->offsets;
    call->offsets[0] = 0;
    for (int32_t i = 0; i < n_images; i++)
        call->offsets[i + 1] = call->offsets[i] + (int64_t)sizes[2 * i] * sizes[2 * i + 1] * MP_IMAGE_CHANNELS;
    *out = call;
    return MP_OK;
}

mp_status mp_image_call_output(mp_image_call *call, int64_t n_rows, int32_t width, mp_error *error) {
    if (call->vectors && call->n_rows == n_rows && call->width == width)
        return MP_OK;
    bool tokens = call->output == MP_EMBED_TOKENS;
    size_t count = 0, bytes = 0;
    if (__builtin_mul_overflow((size_t)(tokens ? n_rows : call->n_images), (size_t)width, &count) ||
        __builtin_mul_overflow(count, sizeof(float), &bytes))
        return mp_fail_memory(error, UINT64_MAX, "the vectors");
    if (call->vectors) { /* the call was checked against a model that has been replaced since */
        mp_free(call->vectors);
        call->base.bytes -= (size_t)(tokens ? call->n_rows : call->n_images) * (size_t)call->width * sizeof(float);
    }
    call->vectors = mp_alloc(bytes, MP_TAG_REQUEST);
    if (!call->vectors)
        return mp_fail_memory(error, bytes, "the vectors");
    call->n_rows = n_rows;
    call->width = width;
    call->base.bytes += bytes;
    return MP_OK;
}

/* ---- text_to_text ---------------------------------------------------------------------------------------------- */

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
    uint64_t hash = mix(MIX_START, images->run_keys, (size_t)images->n_runs * MP_IMAGE_KEY);
    return finish_mix(mix(hash, call->prompt, (size_t)call->n_prompt * sizeof *call->prompt));
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

static mp_status check_number(const char *name, double value, double low, double high, mp_error *error) {
    if (value >= low && value <= high)
        return MP_OK; /* NaN is in no range */
    return mp_fail(error, MP_INVALID_ARGUMENT, "%s is %g, allowed: %g to %g", name, value, low, high);
}

static mp_status check_text(const mp_text_args *args, mp_error *error) {
    const mp_sampling *s = &args->sampling;
    MP_TRY(check_range("the number of prompt tokens", args->n_prompt, 1, MP_TEXT_MOST_TOKENS, error));
    MP_TRY(check_range("n", args->n_choices, 1, MP_TEXT_MOST_CHOICES, error));
    MP_TRY(check_range("the number of stop strings", args->n_stop, 0, MP_TEXT_MOST_STOPS, error));
    MP_TRY(check_range("the number of stop ids", args->n_stop_ids, 0, MP_TEXT_MOST_IDS, error));
    MP_TRY(check_range("the number of logit biases", args->n_bias, 0, MP_TEXT_MOST_IDS, error));
    MP_TRY(check_range("max_tokens", s->max_tokens, 1, MP_TEXT_MOST_TOKENS, error));
    MP_TRY(check_range("min_tokens", s->min_tokens, 0, s->max_tokens, error));
    MP_TRY(check_range("top_k", s->top_k, 0, INT32_MAX, error));
    MP_TRY(check_range("logprobs", s->logprobs, -1, MP_TEXT_MOST_LOGPROBS, error));
    MP_TRY(check_number("temperature", s->temperature, 0, 100, error));
    MP_TRY(check_number("top_p", s->top_p, 0, 1, error));
    MP_TRY(check_number("min_p", s->min_p, 0, 1, error));
    MP_TRY(check_number("repetition_penalty", s->repetition_penalty, 1e-3, 1e3, error));
    MP_TRY(check_number("presence_penalty", s->presence_penalty, -100, 100, error));
    MP_TRY(check_number("frequency_penalty", s->frequency_penalty, -100, 100, error));
    MP_TRY(check_range("the number of values of a captured record", args->capture_values, 0, MP_CAPTURE_MOST_VALUES,
                       error));
    MP_TRY(check_range("the number of captured records", args->capture_records, args->capture_values > 0, INT32_MAX,
                       error));
    if (args->capture_values > 0)
        MP_TRY(check_range("n of a call that is captured", args->n_choices, 1, 1, error));
    MP_TRY(check_range("the bytes of a mask", args->mask_bytes, 0, MP_TEXT_MOST_MASK_BYTES, error));
    if (args->mask_bytes % 4 != 0 || (args->mask_bytes > 0 && (s->ignore_eos || s->min_tokens > 0)))
        return mp_fail(error, MP_INVALID_ARGUMENT,
                       "a mask has %lld bytes, allowed: a multiple of 4, without ignore_eos and min_tokens",
                       (long long)args->mask_bytes);
    for (int i = 0; i < args->n_stop; i++)
        MP_TRY(check_range("the length of a stop string in bytes", args->stop_bytes[i], 1, MP_TEXT_MOST_STOP_BYTES,
                           error));
    for (int i = 0; i < args->n_bias; i++)
        MP_TRY(check_number("a logit bias", args->bias[i], -1e6, 1e6, error));
    return MP_OK;
}

/* Runs one after the other within the prompt, which share all tiles out. */
static mp_status check_runs(const mp_text_args *args, mp_error *error) {
    const mp_text_image_args *images = &args->images;
    int64_t end = 0, tiles = 0, rows = 0;
    MP_TRY(check_range("the number of tiles", images->n_tiles, 0, MP_TEXT_MOST_TILES, error));
    MP_TRY(check_range("the number of runs", images->n_runs, 0, images->n_tiles, error));
    for (int32_t r = 0; r < images->n_runs; r++) {
        const int32_t *run = images->runs + 3 * (ptrdiff_t)r;
        MP_TRY(check_range("the start of a run", run[0], end, args->n_prompt - 1, error));
        MP_TRY(check_range("the rows of a run", run[1], 1, args->n_prompt - run[0], error));
        MP_TRY(check_range("the tiles of a run", run[2], 1, images->n_tiles - tiles, error));
        end = (int64_t)run[0] + run[1];
        rows += run[1];
        tiles += run[2];
    }
    MP_TRY(check_range("the tiles of all runs", tiles, images->n_tiles, images->n_tiles, error));
    if (images->n_sources)
        MP_TRY(check_range("the number of sources", images->n_sources, rows, rows, error));
    int64_t bytes = 0;
    for (int32_t i = 0; i < 2 * images->n_tiles; i += 2) {
        MP_TRY(check_range("the height of a tile", images->sizes[i], 1, MP_IMAGE_MOST_SIDE, error));
        MP_TRY(check_range("the width of a tile", images->sizes[i + 1], 1, MP_IMAGE_MOST_SIDE, error));
        bytes += (int64_t)images->sizes[i] * images->sizes[i + 1] * MP_IMAGE_CHANNELS;
    }
    return check_range("the bytes of pixels", images->n_bytes, bytes, bytes, error);
}

static bool copy_images(const mp_text_image_args *from, mp_text_images *to, uint64_t *bytes) {
    const size_t tiles = (size_t)from->n_tiles, runs = (size_t)from->n_runs;
    bool ok = true;
    if (runs == 0)
        return true;
    to->sizes = copy(from->sizes, 2 * tiles, sizeof *from->sizes, bytes, &ok);
    to->pixels = copy(from->pixels, (size_t)from->n_bytes, 1, bytes, &ok);
    to->tile_keys = copy(from->tile_keys, tiles, MP_IMAGE_KEY, bytes, &ok);
    to->run_keys = copy(from->run_keys, runs, MP_IMAGE_KEY, bytes, &ok);
    to->sources = copy(from->sources, (size_t)from->n_sources, sizeof *from->sources, bytes, &ok);
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
    call->prompt = copy(args->prompt, (size_t)args->n_prompt, sizeof *args->prompt, bytes, &ok);
    call->stop_bytes = copy(args->stop_bytes, (size_t)args->n_stop, sizeof *args->stop_bytes, bytes, &ok);
    call->stop_ids = copy(args->stop_ids, (size_t)args->n_stop_ids, sizeof *args->stop_ids, bytes, &ok);
    call->bias_ids = copy(args->bias_ids, (size_t)args->n_bias, sizeof *args->bias_ids, bytes, &ok);
    call->bias = copy(args->bias, (size_t)args->n_bias, sizeof *args->bias, bytes, &ok);
    call->stop = mp_alloc_array((size_t)args->n_stop + 1, sizeof *call->stop, MP_TAG_REQUEST);
    call->choices = mp_alloc_array((size_t)args->n_choices, sizeof *call->choices, MP_TAG_REQUEST);
    ok = ok && copy_images(&args->images, &call->images, bytes) && call->stop && call->choices &&
         make_masks(call, args->mask, args->mask_bytes, bytes);
    for (int i = 0; ok && i < args->n_stop; i++)
        call->stop[i] = copy(args->stop[i], (size_t)args->stop_bytes[i], 1, bytes, &ok);
    for (int i = 0; ok && i < args->n_choices; i++)
        call->choices[i].stop_index = -1;
    if (!ok) {
        text_destroy(&call->base);
        return mp_fail_memory(error, (uint64_t)args->n_prompt * sizeof *args->prompt, "a call");
    }
    *out = call;
    return MP_OK;
}

/* Memory that is only touched as far as the answer goes. */
static void *output(size_t count, size_t size, uint64_t *bytes, bool *ok) {
    size_t total;
    if (!*ok || __builtin_mul_overflow(count, size, &total)) {
        *ok = false;
        return NULL;
    }
    void *memory = mp_alloc(total, MP_TAG_REQUEST);
    *ok = memory != NULL;
    *bytes += total;
    return memory;
}

/* How many tokens' records there is to be memory for. */
static mp_status size_capture(const mp_text_call *call, int32_t *tokens, mp_error *error) {
    const mp_capture *capture = &call->capture;
    int32_t records = mp_capture_records(capture);
    if (capture->values == 0)
        return MP_OK;
    MP_TRY(check_range("the number of captured records", capture->most, records, INT32_MAX, error));
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
        choice->text = output(choice->text_capacity, 1, &bytes, &ok);
        choice->top_ids = k ? output(tokens * k, sizeof *choice->top_ids, &bytes, &ok) : NULL;
        choice->top_logprobs = k ? output(tokens * k, sizeof *choice->top_logprobs, &bytes, &ok) : NULL;
        choice->tokens = output(tokens, sizeof *choice->tokens, &bytes, &ok);
    }
    if (call->want_prompt_logits)
        call->prompt_logits = output((size_t)call->n_prompt * (size_t)call->vocab, sizeof(float), &bytes, &ok);
    if (call->want_prompt_logits && call->images.n_runs > 0) {
        const mp_image_run *last = &call->images.runs[call->images.n_runs - 1];
        call->image_rows = output((size_t)(last->source + last->rows) * (size_t)call->hidden, sizeof(float), &bytes,
                                  &ok);
    }
    if (captured > 0)
        call->capture.data = output((size_t)captured * mp_capture_floats(&call->capture), sizeof(float), &bytes, &ok);
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

/* ---- text_to_image --------------------------------------------------------------------------------------------- */

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
    uint64_t hash = mix(MIX_START, sizes, sizeof sizes);
    for (int t = 0; t < call->n_texts; t++)
        for (int e = 0; e < MP_DRAW_ENCODERS; e++)
            hash = mix(hash, call->ids[t][e], (size_t)call->n_ids[e] * sizeof(int32_t));
    return finish_mix(mix(hash, call->noise, (size_t)call->n_noise * sizeof(float)));
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
    MP_TRY(check_range("width", args->width, 1, MP_DRAW_MOST_SIDE, error));
    MP_TRY(check_range("height", args->height, 1, MP_DRAW_MOST_SIDE, error));
    MP_TRY(check_range("n", args->n_pictures, 1, MP_DRAW_MOST_PICTURES, error));
    MP_TRY(check_range("the number of steps", args->n_steps, 1, MP_DRAW_MOST_STEPS, error));
    MP_TRY(check_range("the number of texts", args->n_texts, 1, MP_DRAW_TEXTS, error));
    MP_TRY(check_range("preview_every", args->preview_every, 0, MP_DRAW_MOST_STEPS, error));
    MP_TRY(check_range("the number of latents", args->n_noise, 1, INT32_MAX, error));
    MP_TRY(check_number("guidance_scale", args->guidance, 0, 1000, error));
    for (int e = 0; e < MP_DRAW_ENCODERS; e++)
        MP_TRY(check_range("the number of tokens", args->n_ids[e], 0, MP_DRAW_MOST_TOKENS, error));
    for (int s = 0; s <= args->n_steps; s++) {
        MP_TRY(check_number("a share of noise", args->sigmas[s], -1e4, 1e4, error));
        if (s < args->n_steps)
            MP_TRY(check_number("a time", args->times[s], -1e6, 1e6, error));
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
            call->ids[t][e] = copy(args->ids[t][e], (size_t)args->n_ids[e], sizeof(int32_t), bytes, &ok);
    }
    call->times = copy(args->times, (size_t)args->n_steps, sizeof(float), bytes, &ok);
    call->sigmas = copy(args->sigmas, (size_t)args->n_steps + 1, sizeof(float), bytes, &ok);
    call->noise = copy(args->noise, (size_t)args->n_noise, sizeof(float), bytes, &ok);
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
    call->latents = output(n * latents, sizeof(float), &bytes, &ok);
    call->pixels = output(n * pixels, sizeof(float), &bytes, &ok);
    call->previews = between ? output(n * pixels, (size_t)between, &bytes, &ok) : NULL;
    call->preview_latents = between ? output(latents, sizeof(float), &bytes, &ok) : NULL;
    if (call->keep) {
        const size_t texts = (size_t)call->n_texts;
        call->texts = output(texts * (size_t)call->text_rows, (size_t)call->text_width * sizeof(float), &bytes, &ok);
        call->pooled = output(texts * (size_t)call->pooled_width, sizeof(float), &bytes, &ok);
        call->history = output(n * latents, (size_t)call->n_steps * sizeof(float), &bytes, &ok);
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
