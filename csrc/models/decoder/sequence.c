/* decoder/sequence.c: see decoder/sequence.h. */
#include "models/decoder/sequence.h"

#include <assert.h>
#include <string.h>

static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
static int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

/* ---- life -------------------------------------------------------------------------------------------------------- */

static mp_status list_barred(const mp_decoder *model, const mp_text_request *request, mp_sequence_group *group,
                             mp_error *error) {
    const mp_token_table *tokens = mp_spec_tokens(mp_weights_spec(model->weights));
    int ends = tokens->eog_count;
    group->barred = mp_alloc_array((size_t)(ends + request->n_stop_ids), sizeof *group->barred, MP_TAG_REQUEST);
    if (!group->barred)
        return mp_fail_memory(error, (uint64_t)(ends + request->n_stop_ids) * sizeof *group->barred,
                              "the list of barred ids");
    memcpy(group->barred, tokens->eog, (size_t)ends * sizeof *group->barred);
    if (request->n_stop_ids)
        memcpy(group->barred + ends, request->stop_ids, (size_t)request->n_stop_ids * sizeof *group->barred);
    group->n_barred = ends + request->n_stop_ids;
    group->n_always = request->sampling.ignore_eos ? ends : 0;
    return MP_OK;
}

static int32_t capacity_of(const mp_decoder *model, const mp_text_request *request) {
    int64_t capacity = (int64_t)request->n_prompt + request->sampling.max_tokens;
    return (int32_t)(capacity < model->context ? capacity : model->context);
}

/* Returns an upper bound of the bytes of stops, which are different multiples of MP_KV_BLOCK. */
static uint64_t stops_bytes(const mp_text_request *request) {
    return ((uint64_t)request->n_prompt / MP_KV_BLOCK + 1) * sizeof(int32_t);
}

static mp_status charge(const mp_decoder *model, const mp_text_request *request, mp_prefix_cache *cache,
                        mp_sequence_group *group, mp_error *error) {
    mp_budget *budget = cache->kv.budget;
    int32_t capacity = capacity_of(model, request);
    uint64_t sequence = sizeof(mp_sequence) + (uint64_t)capacity * sizeof(int32_t) +
                        mp_cached_bytes(capacity) +
                        (group->penalties ? mp_history_bytes((uint32_t)smaller(capacity, model->vocab)) : 0) +
                        (request->masks ? (uint64_t)model->vocab * sizeof(float) : 0) +
                        (model->draft ? sizeof(mp_shadow) + mp_cached_bytes(capacity) : 0);
    uint64_t bytes = sizeof *group + (uint64_t)group->n * sequence +
                     (mp_states_exist(&cache->states) ? stops_bytes(request) : 0);
    while (!mp_budget_take(budget, bytes))
        if (!mp_prefix_shrink(cache, bytes))
            return mp_fail_memory(error, bytes, "the sequences of a request");
    group->budget = budget;
    group->charged = bytes;
    return MP_OK;
}

static mp_status init_shadow(mp_sequence *seq, int32_t capacity, mp_error *error) {
    seq->shadow = mp_alloc_zeroed(sizeof *seq->shadow, MP_TAG_REQUEST);
    return seq->shadow ? mp_cached_init(&seq->shadow->cached, capacity, error)
                       : mp_fail_memory(error, sizeof *seq->shadow, "a sequence");
}

static mp_status init_sequence(const mp_decoder *model, const mp_text_request *request, int choice, bool penalties,
                               const mp_prefix_cache *cache, mp_cache_scope scope, mp_sequence *seq, mp_error *error) {
    int32_t capacity = capacity_of(model, request);
    seq->tokens = mp_alloc_array((size_t)capacity, sizeof *seq->tokens, MP_TAG_REQUEST);
    if (!seq->tokens)
        return mp_fail_memory(error, (uint64_t)capacity * sizeof *seq->tokens, "a sequence");
    MP_TRY(mp_cached_init(&seq->cached, capacity, error));
    mp_cached_begin(&seq->cached, cache, scope);
    if (model->draft)
        MP_TRY(init_shadow(seq, capacity, error));
    memcpy(seq->tokens, request->prompt, (size_t)request->n_prompt * sizeof *seq->tokens);
    seq->count = request->n_prompt;
    mp_stream_init(&seq->stream, &request->choices[choice]);
    for (int32_t i = 0; penalties && i < request->n_prompt; i++)
        MP_TRY(mp_history_add(&seq->history, request->prompt[i], true, error));
    return MP_OK;
}

/* Finds the adapter of a request. The model may have been loaded again with other adapters since the request was
 * checked. */
static mp_status find_adapter(const mp_decoder *model, const mp_text_request *request, mp_sequence_group *group,
                              mp_error *error) {
    group->adapter = (uint8_t)mp_adapters_find(&model->adapters, request->adapter);
    if (request->adapter == 0 || group->adapter > 0)
        return MP_OK;
    return mp_fail(error, MP_INVALID_ARGUMENT,
                   "the `adapter` of the request was unloaded; load the model with it again");
}

/* Returns the part of a prefix key that tells apart sequences whose keys and values differ although their tokens are
 * equal. */
static uint32_t variant_of(const mp_decoder *model, const mp_text_request *request, const mp_sequence_group *group) {
    return 2u * group->adapter + mp_decoder_is_long(model, request);
}

static mp_status make_deferred(const mp_decoder *model, mp_sequence_group *group, mp_error *error) {
    size_t vocab = (size_t)model->vocab;
    group->deferred_logits = mp_alloc_array((size_t)group->n * vocab, sizeof *group->deferred_logits, MP_TAG_REQUEST);
    if (!group->deferred_logits)
        return mp_fail_memory(error, (uint64_t)group->n * vocab * sizeof *group->deferred_logits, "deferred logits");
    for (int i = 0; i < group->n; i++)
        group->seqs[i].deferred_logits = group->deferred_logits + (size_t)i * vocab;
    return MP_OK;
}

/* ---- snapshots of states ----------------------------------------------------------------------------------------- */

enum {
    SNAPSHOT_APART = 256,  /* least tokens from one snapshot to the next, but for the first and last message */
    SNAPSHOT_EVERY = 2048, /* most tokens */
};

static int32_t block_border(int32_t count) { return count / MP_KV_BLOCK * MP_KV_BLOCK; }

/* Lists the lengths after which later prompts are likely to differ from this one: the block borders before the end of
 * the first message (system prompt and tools), of further messages, and of the prompt, whose last token is always
 * computed. A message ends with an end token. */
static mp_status make_stops(const mp_decoder *model, const mp_text_request *request, mp_sequence_group *group,
                            mp_error *error) {
    const mp_token_table *tokens = mp_spec_tokens(mp_weights_spec(model->weights));
    int32_t last = 0, border = 0;
    group->stops = mp_alloc(stops_bytes(request), MP_TAG_REQUEST);
    if (!group->stops)
        return mp_fail_memory(error, stops_bytes(request), "a request");
    for (int32_t i = 0; i < request->n_prompt; i++) {
        bool ends = false;
        for (int e = 0; e < tokens->eog_count; e++)
            ends |= request->prompt[i] == tokens->eog[e];
        if (ends)
            border = block_border(i + 1);
        const bool far = border >= last + SNAPSHOT_APART || (last == 0 && border > 0);
        const int32_t at = far ? border : i + 1 == last + SNAPSHOT_EVERY ? i + 1 : 0;
        if (at > last)
            group->stops[group->stop_count++] = last = at;
    }
    const int32_t ends[] = {border, block_border(request->n_prompt - 1)}; /* the last message's, and the prompt's */
    for (int i = 0; i < 2; i++)
        if (ends[i] > last)
            group->stops[group->stop_count++] = last = ends[i];
    return MP_OK;
}

int32_t mp_sequence_group_left(const mp_sequence_group *group, const mp_prefix_cache *cache, mp_sequence *seq) {
    const int32_t count = seq->cached.count, left = seq->count - count;
    if (!mp_states_exist(&cache->states))
        return left;
    int32_t stop = (count / SNAPSHOT_EVERY + 1) * SNAPSHOT_EVERY;
    for (int i = 0; i < group->stop_count; i++)
        if (group->stops[i] > count) {
            stop = group->stops[i];
            break;
        }
    seq->cached.stop = stop;
    return smaller(left, stop - count);
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

mp_status mp_sequence_group_create(const mp_decoder *model, mp_prefix_cache *cache, const mp_item *item,
                                   mp_sequence_group **out, mp_error *error) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_sampling *s = &request->sampling;
    size_t bytes = sizeof(mp_sequence_group) + (size_t)request->n_choices * sizeof(mp_sequence);
    mp_sequence_group *group = mp_alloc_zeroed(bytes, MP_TAG_REQUEST);
    if (!group)
        return mp_fail_memory(error, bytes, "a request");
    group->n = request->n_choices;
    group->image_scope = mp_cache_scope_of(item, 0); /* adapters do not change the image network */
    group->penalties = s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
    mp_status status = charge(model, request, cache, group, error);
    if (status == MP_OK)
        status = find_adapter(model, request, group, error);
    if (status == MP_OK)
        status = list_barred(model, request, group, error);
    if (status == MP_OK && request->masks)
        status = make_deferred(model, group, error);
    if (status == MP_OK && mp_states_exist(&cache->states))
        status = make_stops(model, request, group, error);
    const mp_cache_scope scope = mp_cache_scope_of(item, variant_of(model, request, group));
    for (int i = 0; i < group->n && status == MP_OK; i++)
        status = init_sequence(model, request, i, group->penalties, cache, scope, &group->seqs[i], error);
    if (status != MP_OK) {
        mp_sequence_group_destroy(group);
        return status;
    }
    group->seqs[0].active = true;
    *out = group;
    return MP_OK;
}

void mp_sequence_group_destroy(mp_sequence_group *group) {
    if (!group)
        return;
    for (int i = 0; i < group->n; i++) {
        mp_free(group->seqs[i].tokens);
        mp_cached_deinit(&group->seqs[i].cached);
        mp_history_deinit(&group->seqs[i].history);
        if (group->seqs[i].shadow)
            mp_cached_deinit(&group->seqs[i].shadow->cached);
        mp_free(group->seqs[i].shadow);
    }
    mp_free(group->stops);
    mp_free(group->barred);
    mp_free(group->deferred_logits);
    mp_free(group->images);
    if (group->budget)
        mp_budget_give(group->budget, group->charged);
    mp_free(group);
}

bool mp_sequence_may_pause(mp_sequence *seq, mp_prefix_cache *cache, int rows, int hidden) {
    const uint64_t bytes = (uint64_t)rows * (uint64_t)hidden * sizeof(float);
    mp_budget *budget = cache->kv.budget;
    if (seq->paused.x)
        return true;
    while (!mp_budget_take(budget, bytes))
        if (!mp_prefix_shrink(cache, bytes))
            return false;
    seq->paused = (mp_paused){.x = mp_alloc(bytes, MP_TAG_REQUEST), .bytes = bytes, .at = seq->cached.count};
    if (!seq->paused.x)
        mp_budget_give(budget, bytes);
    return seq->paused.x != NULL;
}

void mp_sequence_unpause(mp_sequence *seq, mp_budget *budget) {
    if (!seq->paused.x)
        return;
    mp_free(seq->paused.x);
    mp_budget_give(budget, seq->paused.bytes);
    seq->paused.x = NULL;
}

void mp_sequence_drop(mp_sequence *seq, mp_prefix_cache *cache) {
    mp_sequence_unpause(seq, cache->kv.budget);
    mp_cached_drop(&seq->cached, cache);
    mp_draft_deinit(&seq->index, cache->kv.budget); /* mp_draft_find rebuilds the index on demand */
    seq->awaits_mask = false; /* the logits will be computed again */
    mp_shadow_drop(seq->shadow);
}

void mp_shadow_drop(mp_shadow *shadow) {
    if (!shadow || !shadow->cache)
        return;
    mp_cached_drop(&shadow->cached, shadow->cache);
    shadow->cache = NULL;
    shadow->tentative = 0;
    *shadow->link = shadow->next;
    if (shadow->next)
        shadow->next->link = shadow->link;
}

void mp_sequence_group_drop(mp_sequence_group *group, mp_prefix_cache *cache) {
    for (int i = 0; i < group->n; i++)
        mp_sequence_drop(&group->seqs[i], cache);
}

/* ---- cached tokens ----------------------------------------------------------------------------------------------- */

void mp_sequence_group_reuse(mp_item *item, mp_prefix_cache *cache) {
    mp_sequence_group *group = item->state;
    mp_text_request *request = (mp_text_request *)item->request;
    for (int c = 0; c < group->n; c++) {
        mp_sequence *seq = &group->seqs[c];
        /* decoding sequences have nothing to reuse */
        if (!seq->active || seq->done || seq->awaits_mask || seq->cached.count + 1 == seq->count)
            continue;
        if (c > 0) {
            mp_cached_reach(&seq->cached, cache, seq->tokens, seq->count - 1);
            continue;
        }
        bool logits = request->want_prompt_logits && group->prefilled < request->n_prompt;
        mp_cached_reach(&seq->cached, cache, seq->tokens,
                        logits ? smaller(group->prefilled, seq->count - 1) : seq->count - 1);
        int32_t prefilled = smaller(seq->cached.count, request->n_prompt);
        if (prefilled > group->prefilled) {
            request->cached_tokens += prefilled - group->prefilled;
            group->prefilled = prefilled;
        }
    }
}

void mp_sequence_group_keep(mp_item *item, mp_prefix_cache *cache, int choice, int rows, bool sound) {
    mp_sequence_group *group = item->state;
    mp_sequence *seq = &group->seqs[choice];
    mp_cached_publish(&seq->cached, cache, seq->tokens, rows, sound);
    if (choice == 0)
        group->prefilled =
            larger(group->prefilled, smaller(seq->cached.count, ((const mp_text_request *)item->request)->n_prompt));
}

void mp_sequence_group_fork(mp_sequence_group *group, mp_prefix_cache *cache) {
    for (int c = 1; c < group->n; c++) {
        group->seqs[c].active = true;
        mp_cached_copy(&group->seqs[c].cached, &group->seqs[0].cached, cache);
    }
}
