/* wire_text_to_text.c: text requests between processes, with images or without; see capability_wire.h.
 *
 * The text of an unfinished completion is sent up to the end of its last token (byte_end), including the part that is
 * not final yet and withheld from the caller. Another process can then continue from the tokens, and the parent has the
 * withheld text if the request is cancelled.
 *
 * Each mask is sent once, before a plan. The parent refuses a token that was sampled without its mask or against it.
 * Captured records are sent with the step that computed them, all records of a token together. The number of records
 * sent before determines where they are stored. */
#include <stdatomic.h>

#include "files/spec_build.h"
#include "isolation/capability_wire.h"

typedef struct choice_progress {
    uint32_t tokens, text, final; /* number of tokens; bytes of text, and of final text (mp_choice.text_bytes) */
    uint32_t masked; /* 1 + index of the last token whose mask the process has received; 0 = none */
    int32_t finish, stop_index;
} choice_progress;

typedef struct text_progress {
    uint32_t cursor, cached;
    uint32_t local_cursor; /* cursor in this process: 0 when the process takes over the request */
    bool prompt_done;
    uint32_t captured; /* tokens whose records were sent or received */
    choice_progress choice[];
} text_progress;

static uint32_t tokens_of(const mp_choice *choice) {
    return atomic_load_explicit(&choice->token_count, memory_order_relaxed);
}

static int32_t finish_of(const mp_choice *choice) {
    return atomic_load_explicit(&choice->finish, memory_order_relaxed);
}

/* Returns the end of a completion's text, including text that is not final. */
static uint32_t text_end(const mp_choice *choice) {
    uint32_t count = tokens_of(choice), final = atomic_load_explicit(&choice->text_bytes, memory_order_relaxed);
    return finish_of(choice) == MP_FINISH_NONE && count > 0 ? choice->tokens[count - 1].byte_end : final;
}

static int alternatives(const mp_text_request *request) {
    return request->sampling.logprobs > 0 ? (int)request->sampling.logprobs : 0;
}

static size_t text_progress_bytes(const mp_request *base) {
    return sizeof(text_progress) + (size_t)((const mp_text_request *)base)->n_choices * sizeof(choice_progress);
}

static mp_status text_check(const mp_request *base, mp_error *error) {
    if (((const mp_text_request *)base)->want_prompt_logits)
        return mp_fail(error, MP_UNSUPPORTED,
                       "prompt logits are not supported in worker processes; use isolation=\"thread\"");
    return MP_OK;
}

/* --- masks --- */

static size_t mask_bytes(const mp_text_request *request) { return (size_t)request->mask_words * sizeof(uint32_t); }

/* Send each mask that is ready for the next token of a completion and was not sent yet. */
static void text_put_more(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    text_progress *sent = progress;
    for (int c = 0; request->masks && c < request->n_choices; c++) {
        uint32_t next = tokens_of(&request->choices[c]);
        const uint32_t *bits = sent->choice[c].masked > next ? NULL : mp_text_request_mask_at(request, c, next);
        mp_put_u8(out, bits != NULL);
        if (!bits)
            continue;
        mp_put(out, bits, mask_bytes(request));
        sent->choice[c].masked = next + 1;
    }
}

static bool text_get_more(mp_wire_in *in, mp_item *item) {
    mp_text_request *request = (mp_text_request *)item->request;
    for (int c = 0; request->masks && c < request->n_choices; c++) {
        if (!mp_get_u8(in))
            continue;
        mp_get(in, request->masks[c].bits, mask_bytes(request));
        atomic_store_explicit(&request->masks[c].ready, tokens_of(&request->choices[c]) + 1, memory_order_relaxed);
    }
    return !in->failed;
}

/* True if every unfinished completion needs a mask for its next token. False before the prompt is prefilled, here or in
 * an earlier process. (A process that must prefill again returns a plan for that.) */
static bool text_waits(const mp_item *item, const void *progress) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const text_progress *seen = progress;
    bool waits = request->masks && seen->prompt_done;
    for (int c = 0; c < request->n_choices && waits; c++)
        waits = seen->choice[c].finish != MP_FINISH_NONE || seen->choice[c].masked <= seen->choice[c].tokens;
    return waits;
}

static bool allows(const mp_text_request *request, int c, int32_t id) {
    const uint32_t word = (uint32_t)id / 32;
    return id >= 0 && word < (uint32_t)request->mask_words && (request->masks[c].bits[word] >> ((uint32_t)id % 32) & 1);
}

/* True if the mask allows the completion to end by the end token or stop id that was sampled, which is no part of the
 * completion. */
static bool may_end(const mp_text_request *request, int c, const choice_progress *seen) {
    if (seen->finish == MP_FINISH_STOP)
        return allows(request, c, request->stop_ids[seen->stop_index - request->n_stop]);
    for (int32_t i = 0; i < request->n_ends; i++)
        if (allows(request, c, request->ends[i]))
            return true;
    return false;
}

/* Check the part of a completion that is new, from token `from` on. The parent has sent at most one mask since, that of
 * token `from`: so at most one token or end is new, and this mask must allow it. */
static bool keeps_mask(mp_wire_in *in, const mp_text_request *request, int c, const choice_progress *seen,
                       uint32_t from) {
    const bool by_id =
        seen->finish == MP_FINISH_EOS || (seen->finish == MP_FINISH_STOP && seen->stop_index >= request->n_stop);
    const uint32_t sampled = seen->tokens - from + by_id;
    if (sampled == 0)
        return true;
    if (sampled > 1 || seen->masked != from + 1)
        return mp_wire_refuse(in, "a token was sampled before its mask came");
    if (by_id ? !may_end(request, c, seen) : !allows(request, c, request->choices[c].tokens[from].id))
        return mp_wire_refuse(in, "a token was sampled that its mask does not allow");
    return true;
}

/* --- captures --- */

/* Returns the number of floats in the records of tokens [from, to), without tokens beyond the capacity of the
 * capture. */
static size_t capture_floats(const mp_capture *capture, uint32_t from, uint32_t to) {
    const uint32_t most = (uint32_t)capture->tokens;
    from = from < most ? from : most;
    to = to < most ? to : most;
    return (to - from) * mp_capture_floats(capture);
}

static void put_capture(mp_wire_out *out, const mp_capture *capture, text_progress *sent) {
    if (capture->values == 0)
        return;
    const uint32_t sampled = atomic_load_explicit(&capture->sampled, memory_order_relaxed);
    mp_put_u32(out, sampled);
    const size_t floats = capture_floats(capture, sent->captured, sampled);
    if (floats)
        mp_put(out, capture->data + sent->captured * mp_capture_floats(capture), floats * sizeof(float));
    sent->captured = sampled;
}

/* Captured values are not checked: a correct model may produce NaN or infinities. */
static bool get_capture(mp_wire_in *in, const mp_capture *capture, text_progress *seen) {
    if (capture->values == 0)
        return !in->failed;
    const uint32_t sampled = mp_get_u32(in), tokens = seen->choice[0].tokens;
    if (in->failed)
        return false;
    if (sampled < seen->captured || sampled < tokens || sampled > tokens + 1)
        return mp_wire_refuse(in, "captured records do not match the sampled tokens");
    const size_t floats = capture_floats(capture, seen->captured, sampled);
    if (floats)
        mp_get(in, capture->data + seen->captured * mp_capture_floats(capture), floats * sizeof(float));
    seen->captured = sampled;
    return !in->failed;
}

/* --- the request and its progress --- */

static void put_progress(mp_wire_out *out, const mp_text_request *request, text_progress *sent) {
    mp_put_u8(out, request->prompt_done_ns != 0);
    mp_put_u32(out, (uint32_t)request->cached_tokens);
    sent->prompt_done = request->prompt_done_ns != 0;
    sent->cached = (uint32_t)request->cached_tokens;
    for (int c = 0; c < request->n_choices; c++) {
        const mp_choice *choice = &request->choices[c];
        const uint32_t count = tokens_of(choice);
        sent->choice[c] = (choice_progress){.tokens = count,
                                        .text = text_end(choice),
                                        .final = atomic_load_explicit(&choice->text_bytes, memory_order_relaxed),
                                        .finish = finish_of(choice),
                                        .stop_index = choice->stop_index};
        mp_put_u32(out, count);
        for (uint32_t i = 0; i < count; i++) {
            mp_put_i32(out, choice->tokens[i].id);
            mp_put_f32(out, choice->tokens[i].logprob);
        }
        mp_put_u32(out, sent->choice[c].text);
        mp_put_i32(out, sent->choice[c].finish);
        mp_put_i32(out, choice->stop_index);
    }
    sent->captured = atomic_load_explicit(&request->capture.sampled, memory_order_relaxed);
    mp_put_u32(out, sent->captured);
}

/* Pixels are always sent. The child identifies images by their hashes and computes only images that it has not
 * cached. */
static void put_images(mp_wire_out *out, const mp_text_images *images) {
    const size_t tiles = (size_t)images->n_tiles, runs = (size_t)images->n_runs;
    mp_put_i32(out, images->n_tiles);
    mp_put_i32(out, images->n_runs);
    mp_put_i64(out, images->n_sources);
    mp_put_i64(out, images->n_times);
    mp_put_i64(out, images->n_bytes);
    mp_put(out, images->sizes, 2 * tiles * sizeof *images->sizes);
    mp_put(out, images->tile_keys, MP_IMAGE_KEY * tiles);
    mp_put(out, images->run_keys, MP_IMAGE_KEY * runs);
    mp_put(out, images->spans, 3 * runs * sizeof *images->spans);
    mp_put(out, images->sources, (size_t)images->n_sources * sizeof *images->sources);
    mp_put(out, images->times, (size_t)images->n_times * sizeof *images->times);
    mp_put(out, images->pixels, (size_t)images->n_bytes);
}

static void get_images(mp_wire_in *in, mp_text_image_args *images, bool *ok) {
    images->n_tiles =
        (int32_t)mp_wire_within(in, mp_get_i32(in), 0, MP_TEXT_MAX_TILES, "the number of tiles is out of bounds");
    images->n_runs =
        (int32_t)mp_wire_within(in, mp_get_i32(in), 0, MP_TEXT_MAX_TILES, "the number of runs is out of bounds");
    images->n_sources =
        mp_wire_within(in, mp_get_i64(in), 0, MP_TEXT_MAX_TOKENS, "the number of sources is out of bounds");
    images->n_times =
        mp_wire_within(in, mp_get_i64(in), 0, MP_TEXT_MAX_TILES, "the number of times is out of bounds");
    images->n_bytes =
        mp_wire_within(in, mp_get_i64(in), 0, INT64_MAX / 16, "the number of bytes of pixels is out of bounds");
    const int64_t tiles = images->n_tiles, runs = images->n_runs;
    images->sizes = mp_get_array(in, 2 * tiles, sizeof *images->sizes, ok);
    images->tile_keys = mp_get_array(in, MP_IMAGE_KEY * tiles, 1, ok);
    images->run_keys = mp_get_array(in, MP_IMAGE_KEY * runs, 1, ok);
    images->spans = mp_get_array(in, 3 * runs, sizeof *images->spans, ok);
    images->sources = mp_get_array(in, images->n_sources, sizeof *images->sources, ok);
    images->times = mp_get_array(in, images->n_times, sizeof *images->times, ok);
    images->pixels = mp_get_array(in, images->n_bytes, 1, ok);
}

static void free_images(mp_text_image_args *images) {
    mp_free((void *)images->sizes);
    mp_free((void *)images->tile_keys);
    mp_free((void *)images->run_keys);
    mp_free((void *)images->spans);
    mp_free((void *)images->sources);
    mp_free((void *)images->times);
    mp_free((void *)images->pixels);
}

static void put_strings(mp_wire_out *out, char *const *strings, int32_t count, const int32_t *lengths) {
    mp_put(out, lengths, (size_t)count * sizeof *lengths);
    for (int32_t i = 0; i < count; i++)
        mp_put(out, strings[i], (size_t)lengths[i]);
}

static const char *const *get_strings(mp_wire_in *in, int32_t count, const int32_t **lengths, const char *what,
                                      bool *ok) {
    *lengths = mp_get_array(in, count, sizeof **lengths, ok);
    return mp_get_strings(in, *lengths, count, MP_TEXT_MAX_STOP_BYTES, what, ok);
}

static void text_put_request(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const bool vision = request->base.capability == MP_VISION;
    const size_t bias = (size_t)request->n_bias;
    const int32_t counts[] = {request->n_prompt,         request->n_stop,        request->n_reasoning_starts,
                              request->n_reasoning_ends, request->n_call_starts, request->n_stop_ids,
                              request->n_bias};
    mp_put(out, counts, sizeof counts);
    mp_put(out, request->prompt, (size_t)request->n_prompt * sizeof *request->prompt);
    mp_put(out, &request->sampling, sizeof request->sampling);
    mp_put_i32(out, request->n_choices);
    put_strings(out, request->stop, request->n_stop, request->stop_bytes);
    put_strings(out, request->reasoning_starts, request->n_reasoning_starts, request->reasoning_start_bytes);
    put_strings(out, request->reasoning_ends, request->n_reasoning_ends, request->reasoning_end_bytes);
    put_strings(out, request->call_starts, request->n_call_starts, request->call_start_bytes);
    mp_put_u8(out, request->in_reasoning);
    mp_put(out, request->stop_ids, (size_t)request->n_stop_ids * sizeof *request->stop_ids);
    mp_put(out, request->bias_ids, bias * sizeof *request->bias_ids);
    mp_put(out, request->bias, bias * sizeof *request->bias);
    mp_put_i32(out, request->capture_values);
    mp_put_i32(out, request->capture_records);
    mp_put_i32(out, request->adapter);
    mp_put_u8(out, request->want_prompt_logits);
    mp_put_u8(out, vision);
    if (vision)
        put_images(out, &request->images);
    mp_put_i32(out, request->mask_words);
    ((text_progress *)progress)->cursor = item->cursor;
    put_progress(out, request, progress);
}

static int32_t get_count(mp_wire_in *in, int32_t least, int32_t most, const char *what) {
    return (int32_t)mp_wire_within(in, mp_get_i32(in), least, most, what);
}

/* Reads the inputs of a request except for images and mask. The caller frees the arrays, even after a failure. */
static void get_inputs(mp_wire_in *in, mp_text_args *args, bool *ok) {
    args->n_prompt = get_count(in, 1, MP_TEXT_MAX_TOKENS, "the number of prompt tokens is out of bounds");
    args->n_stop = get_count(in, 0, MP_TEXT_MAX_STOPS, "the number of stop strings is out of bounds");
    args->n_reasoning_starts = get_count(in, 0, MP_TEXT_MAX_STOPS, "the number of reasoning starts is out of bounds");
    args->n_reasoning_ends = get_count(in, 0, MP_TEXT_MAX_STOPS, "the number of reasoning ends is out of bounds");
    args->n_call_starts = get_count(in, 0, MP_TEXT_MAX_STOPS, "the number of call starts is out of bounds");
    args->n_stop_ids = get_count(in, 0, MP_TEXT_MAX_IDS, "the number of stop ids is out of bounds");
    args->n_bias = get_count(in, 0, MP_TEXT_MAX_IDS, "the number of logit biases is out of bounds");
    args->prompt = mp_get_array(in, args->n_prompt, sizeof *args->prompt, ok);
    mp_get(in, &args->sampling, sizeof args->sampling);
    args->n_choices = mp_get_i32(in);
    args->stop = get_strings(in, args->n_stop, &args->stop_bytes,
                             "the length of a stop string in bytes is out of bounds", ok);
    args->reasoning_starts = get_strings(in, args->n_reasoning_starts, &args->reasoning_start_bytes,
                                         "the length of a reasoning start in bytes is out of bounds", ok);
    args->reasoning_ends = get_strings(in, args->n_reasoning_ends, &args->reasoning_end_bytes,
                                       "the length of a reasoning end in bytes is out of bounds", ok);
    args->call_starts = get_strings(in, args->n_call_starts, &args->call_start_bytes,
                                    "the length of a call start in bytes is out of bounds", ok);
    args->in_reasoning = mp_get_u8(in) != 0;
    args->stop_ids = mp_get_array(in, args->n_stop_ids, sizeof *args->stop_ids, ok);
    args->bias_ids = mp_get_array(in, args->n_bias, sizeof *args->bias_ids, ok);
    args->bias = mp_get_array(in, args->n_bias, sizeof *args->bias, ok);
    args->capture_values = mp_get_i32(in);
    args->capture_records = mp_get_i32(in);
    args->adapter = mp_get_i32(in);
    args->want_prompt_logits = mp_get_u8(in) != 0;
}

static void free_inputs(mp_text_args *args) {
    const void *const arrays[] = {args->prompt,         args->stop,
                                  args->stop_bytes,     args->reasoning_starts,
                                  args->reasoning_ends, args->reasoning_start_bytes,
                                  args->call_starts,    args->reasoning_end_bytes,
                                  args->stop_ids,       args->call_start_bytes,
                                  args->bias_ids,       args->bias};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        mp_free((void *)arrays[i]);
}

static mp_status text_get_request(mp_wire_in *in, mp_request **out, mp_error *error) {
    mp_text_args args = {0};
    mp_text_request *request = NULL;
    bool ok = true;
    get_inputs(in, &args, &ok);
    args.vision = mp_get_u8(in) != 0;
    if (args.vision)
        get_images(in, &args.images, &ok);
    args.mask_bytes = (int64_t)mp_get_count(in, MP_TEXT_MAX_MASK_BYTES / sizeof(uint32_t), "a mask is too long") *
                      (int64_t)sizeof(uint32_t);
    void *mask = args.mask_bytes ? mp_alloc_zeroed((size_t)args.mask_bytes, MP_TAG_REQUEST) : NULL;
    ok = ok && (mask || !args.mask_bytes);
    args.mask = mask; /* a placeholder until the first mask arrives */
    mp_status status = in->failed ? mp_fail(error, MP_RECV, "a request was truncated")
                       : !ok      ? mp_fail_memory(error, sizeof *request, "a request")
                                  : mp_text_request_create(&args, &request, error);
    if (status == MP_OK)
        *out = &request->base;
    mp_free(mask);
    free_images(&args.images);
    free_inputs(&args);
    return status;
}

static mp_status text_get_progress(mp_wire_in *in, mp_item *item, void *progress, mp_error *error) {
    mp_text_request *request = (mp_text_request *)item->request;
    text_progress *seen = progress;
    seen->prompt_done = mp_get_u8(in) != 0;
    seen->cached = mp_get_count(in, (uint32_t)request->n_prompt, "more tokens are cached than the prompt has");
    request->prompt_done_ns = seen->prompt_done ? mp_sys_now_ns() : 0;
    request->cached_tokens = (int32_t)seen->cached;
    for (int c = 0; c < request->n_choices; c++) {
        mp_choice *choice = &request->choices[c];
        uint32_t count = mp_get_count(in, (uint32_t)request->sampling.max_tokens, "a completion is too long");
        for (uint32_t i = 0; i < count; i++) {
            int32_t id = mp_get_i32(in);
            if (id < 0 || id >= request->sampled_vocab)
                mp_wire_refuse(in, "a completion has an id that cannot be sampled");
            choice->tokens[i] = (mp_token_out){.id = in->failed ? 0 : id, .logprob = mp_get_f32(in)};
        }
        seen->choice[c].tokens = count;
        seen->choice[c].text = mp_get_u32(in);
        seen->choice[c].finish = mp_get_i32(in);
        choice->stop_index = mp_get_i32(in);
        atomic_store_explicit(&choice->token_count, count, memory_order_relaxed);
        atomic_store_explicit(&choice->finish, seen->choice[c].finish, memory_order_relaxed);
        if (request->masks)
            atomic_store_explicit(&request->masks[c].ready, 0, memory_order_relaxed);
    }
    seen->captured = mp_get_u32(in);
    atomic_store_explicit(&request->capture.sampled, seen->captured, memory_order_relaxed);
    return in->failed ? mp_fail(error, MP_RECV, "a request was truncated") : MP_OK;
}

/* --- results --- */

static void put_choice(mp_wire_out *out, const mp_text_request *request, const mp_choice *choice,
                       choice_progress *sent) {
    uint32_t count = tokens_of(choice), end = text_end(choice);
    int k = alternatives(request);
    mp_put_u8(out, (uint8_t)finish_of(choice));
    mp_put_i32(out, choice->stop_index);
    mp_put_u32(out, count - sent->tokens);
    for (uint32_t i = sent->tokens; i < count; i++) {
        mp_put_i32(out, choice->tokens[i].id);
        mp_put_f32(out, choice->tokens[i].logprob);
        mp_put_u32(out, choice->tokens[i].byte_end);
        if (k) {
            mp_put(out, choice->top_ids + (size_t)i * (size_t)k, (size_t)k * sizeof *choice->top_ids);
            mp_put(out, choice->top_logprobs + (size_t)i * (size_t)k, (size_t)k * sizeof *choice->top_logprobs);
        }
    }
    mp_put_u32(out, atomic_load_explicit(&choice->text_bytes, memory_order_relaxed));
    mp_put_u32(out, end);
    if (end > sent->text)
        mp_put(out, choice->text + sent->text, end - sent->text);
    sent->tokens = count;
    sent->text = end;
    sent->finish = finish_of(choice);
}

static void text_put_results(mp_wire_out *out, const mp_item *item, void *progress) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    text_progress *sent = progress;
    mp_put_u32(out, item->cursor);
    mp_put_u32(out, (uint32_t)request->cached_tokens);
    mp_put_u8(out, request->prompt_done_ns != 0);
    for (int c = 0; c < request->n_choices; c++)
        if (sent->choice[c].finish == MP_FINISH_NONE)
            put_choice(out, request, &request->choices[c], &sent->choice[c]);
    put_capture(out, &request->capture, sent);
}

static bool get_token(mp_wire_in *in, const mp_text_request *request, mp_choice *choice, uint32_t index, bool cut) {
    int32_t id = mp_get_i32(in);
    float logprob = mp_get_f32(in);
    uint32_t byte_end = mp_get_u32(in), before = index ? choice->tokens[index - 1].byte_end : 0;
    int k = alternatives(request);
    if (in->failed)
        return false;
    if (id < 0 || id >= request->sampled_vocab)
        return mp_wire_refuse(in, "a token id is outside the vocabulary");
    /* A stop string that began in an earlier token may end the text before this token. */
    if (byte_end > choice->text_capacity || (byte_end < before && !cut))
        return mp_wire_refuse(in, "a token ends at an impossible byte");
    for (int i = 0; i < k; i++) {
        int32_t top = mp_get_i32(in);
        if (top < -1 || top >= request->sampled_vocab)
            return mp_wire_refuse(in, "an alternative is outside the vocabulary");
        choice->top_ids[(size_t)index * (size_t)k + (size_t)i] = top;
    }
    if (k)
        mp_get(in, choice->top_logprobs + (size_t)index * (size_t)k, (size_t)k * sizeof *choice->top_logprobs);
    choice->tokens[index] = (mp_token_out){id, logprob, byte_end};
    return !in->failed;
}

static bool splits_character(const mp_choice *choice, uint32_t at, uint32_t end) {
    return at < end && ((uint8_t)choice->text[at] & 0xC0) == 0x80;
}

/* Returns true if stop strings and stop ids do not end every part of a completion. */
static bool has_free_parts(const mp_text_request *request) {
    return request->in_reasoning || request->n_reasoning_starts > 0 || request->n_call_starts > 0;
}

/* Check the end of a completion's text against its tokens, which were received before. When a completion finishes, an
 * incomplete character may become U+FFFD, and a stop string is cut off. The last token completes the stop string, so
 * earlier tokens end within it at most. */
static bool ends_with_tokens(const mp_text_request *request, const mp_choice *choice, const choice_progress *seen,
                             uint32_t end, uint32_t from) {
    enum { REPLACEMENT = 3 };
    uint32_t last = seen->tokens ? choice->tokens[seen->tokens - 1].byte_end : 0;
    if (seen->finish == MP_FINISH_NONE)
        return end == last;
    if (seen->finish != MP_FINISH_STOP || seen->stop_index >= request->n_stop)
        return end >= last && end - last <= REPLACEMENT && end >= seen->text;
    /* with reasoning, a later token or the end may decide that the text of a stop string is response */
    for (uint32_t i = from; i < seen->tokens && !has_free_parts(request); i++)
        if (choice->tokens[i].byte_end >= end + (uint32_t)request->stop_bytes[seen->stop_index])
            return false;
    return (end == last && seen->tokens > from) || (end < last && has_free_parts(request));
}

/* `from`: index of the first token received with this text. */
static bool get_text(mp_wire_in *in, const mp_text_request *request, mp_choice *choice, choice_progress *seen,
                     uint32_t from) {
    uint32_t final = mp_get_u32(in), end = mp_get_u32(in), before = seen->text;
    bool over = seen->finish != MP_FINISH_NONE;
    if (in->failed)
        return false;
    if (end > choice->text_capacity || final > end || final < seen->final || (end < before && !over))
        return mp_wire_refuse(in, "a text has an impossible length");
    if ((over && final != end) || !ends_with_tokens(request, choice, seen, end, from))
        return mp_wire_refuse(in, "a text does not end where its tokens do");
    if (end > before) {
        if (!mp_get(in, choice->text + before, end - before))
            return false;
        if (!mp_is_utf8(choice->text + before, end - before))
            return mp_wire_refuse(in, "a text is not UTF-8");
    }
    /* The final text, a text shortened by a stop string, and each token must end at a character boundary. */
    if (splits_character(choice, final, end > before ? end : before))
        return mp_wire_refuse(in, "a final text ends in the middle of a character");
    for (uint32_t i = from; i < seen->tokens; i++)
        if (splits_character(choice, choice->tokens[i].byte_end, end > before ? end : before))
            return mp_wire_refuse(in, "a token ends in the middle of a character");
    seen->text = end;
    seen->final = final;
    return true;
}

static bool is_among(const int32_t *ids, int32_t count, int32_t id) {
    for (int32_t i = 0; i < count; i++)
        if (ids[i] == id)
            return true;
    return false;
}

/* Check that a completion continues or ends where its limits and end tokens require. The model may sample an end token
 * anywhere else. */
static bool ends_where_it_must(mp_wire_in *in, const mp_text_request *request, const mp_choice *choice,
                               const choice_progress *seen, uint32_t from) {
    int32_t left = request->context - request->n_prompt + 1; /* the last token is sampled, but never an input */
    int32_t most = left < request->sampling.max_tokens ? left : request->sampling.max_tokens;
    bool full = (int64_t)seen->tokens >= most, eos = seen->finish == MP_FINISH_EOS;
    if ((int64_t)seen->tokens > most)
        return mp_wire_refuse(in, "a completion is too long");
    if (seen->finish == MP_FINISH_LENGTH && !full)
        return mp_wire_refuse(in, "a completion ends by length before its maximum length");
    if (seen->finish == MP_FINISH_NONE && full)
        return mp_wire_refuse(in, "a completion continues at its maximum length");
    if (eos || (seen->finish == MP_FINISH_STOP && seen->stop_index >= request->n_stop)) {
        if (full || (int64_t)seen->tokens < request->sampling.min_tokens ||
            (eos && (request->sampling.ignore_eos || request->n_ends == 0)))
            return mp_wire_refuse(in, "a completion ends where no end token can be sampled");
    }
    for (uint32_t i = from; i < seen->tokens; i++)
        if (is_among(request->ends, request->n_ends, choice->tokens[i].id) ||
            (!has_free_parts(request) && is_among(request->stop_ids, request->n_stop_ids, choice->tokens[i].id)))
            return mp_wire_refuse(in, "a completion continues after an end token");
    return true;
}

static bool get_choice(mp_wire_in *in, const mp_text_request *request, mp_choice *choice, choice_progress *seen) {
    uint8_t finish = mp_get_u8(in);
    int32_t stop_index = mp_get_i32(in);
    uint32_t from = seen->tokens;
    uint32_t added = mp_get_count(in, (uint32_t)request->sampling.max_tokens - from, "a completion is too long");
    bool cut = finish == MP_FINISH_STOP && stop_index < request->n_stop;
    if (in->failed)
        return false;
    if (finish >= MP_FINISH_CANCELLED)
        return mp_wire_refuse(in, "a finish reason is unknown");
    if (finish == MP_FINISH_STOP ? stop_index < 0 || stop_index >= request->n_stop + request->n_stop_ids
                                 : stop_index != -1)
        return mp_wire_refuse(in, "a stop index is out of bounds");
    for (uint32_t i = 0; i < added; i++)
        if (!get_token(in, request, choice, from + i, cut && i + 1 == added))
            return false;
    seen->tokens += added;
    seen->finish = finish;
    seen->stop_index = stop_index;
    return ends_where_it_must(in, request, choice, seen, from) && get_text(in, request, choice, seen, from);
}

static bool text_get_results(mp_wire_in *in, const mp_item *item, uint32_t amount, mp_outcome outcome, void *progress) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    text_progress *seen = progress;
    (void)amount; /* planned rows, which do not limit the new tokens: rows of earlier steps may yield tokens now */
    /* A process that takes over a request prefills again. Its cursor may be lower than the request's without an error,
     * and the request's cursor never decreases. */
    uint32_t cursor = mp_get_count(in, item->total, "a request's progress is past its end");
    bool moved = cursor > seen->local_cursor;
    seen->cursor = cursor > seen->cursor ? cursor : seen->cursor;
    seen->local_cursor = moved ? cursor : seen->local_cursor;
    seen->cached = mp_get_count(in, (uint32_t)request->n_prompt, "more tokens are cached than the prompt has");
    uint8_t prompt_done = mp_get_u8(in);
    if (prompt_done > 1 || prompt_done < seen->prompt_done)
        return mp_wire_refuse(in, "a finished prefill became unfinished");
    seen->prompt_done = prompt_done;
    bool all = true;
    for (int c = 0; c < request->n_choices && !in->failed; c++) {
        uint32_t before = seen->choice[c].tokens;
        if (seen->choice[c].finish == MP_FINISH_NONE) {
            if (!get_choice(in, request, &request->choices[c], &seen->choice[c]) ||
                (request->masks && !keeps_mask(in, request, c, &seen->choice[c], before)))
                return false;
            moved |= seen->choice[c].tokens > before || seen->choice[c].finish != MP_FINISH_NONE;
        }
        if (seen->choice[c].tokens && !prompt_done)
            mp_wire_refuse(in, "a completion has tokens before its prefill is finished");
        all = all && seen->choice[c].finish != MP_FINISH_NONE;
    }
    if (outcome != MP_OUTCOME_FAILED && (outcome == MP_OUTCOME_DONE) != all)
        mp_wire_refuse(in, "an outcome does not match the finished completions");
    if (outcome == MP_OUTCOME_WAIT_MASK && !request->masks)
        mp_wire_refuse(in, "a request without masks waits for a mask");
    return get_capture(in, &request->capture, seen) && moved;
}

/* A process that takes over a request computes prompt and completions again, one row per step when memory is short, and
 * one part of an image per step. An image may restart once, after the image of an earlier request was computed. */
static uint64_t text_most_idle(const mp_request *base) {
    enum { SPARE = 16, BEGUN = 2 };
    const mp_text_request *request = (const mp_text_request *)base;
    return SPARE +
           (uint64_t)request->n_choices * ((uint64_t)request->n_prompt + (uint64_t)request->sampling.max_tokens) +
           BEGUN * request->images.most_parts;
}

static void text_publish(mp_item *item, void *progress, uint64_t began_ns, uint64_t now_ns) {
    mp_text_request *request = (mp_text_request *)item->request;
    const text_progress *seen = progress;
    bool all = true;
    item->cursor = seen->cursor;
    request->cached_tokens = (int32_t)seen->cached;
    if (!request->started_ns)
        request->started_ns = began_ns;
    if (seen->prompt_done && !request->prompt_done_ns)
        request->prompt_done_ns = now_ns;
    for (int c = 0; c < request->n_choices; c++) {
        const choice_progress *received = &seen->choice[c];
        mp_choice *choice = &request->choices[c];
        all = all && received->finish != MP_FINISH_NONE;
        if (finish_of(choice) != MP_FINISH_NONE)
            continue;
        choice->stop_index = received->stop_index;
        atomic_store_explicit(&choice->token_count, received->tokens, memory_order_release);
        atomic_store_explicit(&choice->text_bytes, received->final, memory_order_release);
        atomic_store_explicit(&choice->finish, received->finish, memory_order_release);
    }
    if (request->capture.values > 0)
        atomic_store_explicit(&request->capture.sampled, seen->captured, memory_order_release);
    if (all)
        request->finished_ns = now_ns;
}

static void text_close(mp_item *item) {
    mp_text_request *request = (mp_text_request *)item->request;
    for (int c = 0; c < request->n_choices; c++) {
        mp_choice *choice = &request->choices[c];
        if (finish_of(choice) != MP_FINISH_NONE)
            continue;
        atomic_store_explicit(&choice->text_bytes, text_end(choice), memory_order_release);
        atomic_store_explicit(&choice->finish, MP_FINISH_CANCELLED, memory_order_release);
    }
}

const mp_request_wire mp_wire_text_to_text = {
    .check = text_check, .progress_bytes = text_progress_bytes, .put_request = text_put_request,
    .put_more = text_put_more, .waits = text_waits, .get_results = text_get_results, .most_idle = text_most_idle,
    .publish = text_publish, .close = text_close, .get_request = text_get_request, .get_progress = text_get_progress,
    .get_more = text_get_more, .put_results = text_put_results,
};
