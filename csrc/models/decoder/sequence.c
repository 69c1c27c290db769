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

static int blocks_for(int32_t tokens) { return (tokens + MP_KV_BLOCK - 1) / MP_KV_BLOCK; }

static mp_status charge(const mp_decoder *model, const mp_text_request *request, mp_prefix_cache *cache,
                        mp_sequence_group *group, mp_error *error) {
    mp_budget *budget = cache->kv.budget;
    int32_t capacity = capacity_of(model, request);
    uint64_t sequence = sizeof(mp_sequence) + (uint64_t)capacity * sizeof(int32_t) +
                        (uint64_t)blocks_for(capacity) * sizeof(uint32_t) +
                        (group->penalties ? mp_history_bytes((uint32_t)smaller(capacity, model->vocab)) : 0) +
                        (request->masks ? (uint64_t)model->vocab * sizeof(float) : 0) +
                        (model->draft ? sizeof(mp_shadow) + (uint64_t)blocks_for(capacity) * sizeof(uint32_t) : 0);
    uint64_t bytes = sizeof *group + (uint64_t)group->n * sequence;
    while (!mp_budget_take(budget, bytes))
        if (!mp_prefix_shrink(cache, bytes))
            return mp_fail_memory(error, bytes, "the sequences of a request");
    group->budget = budget;
    group->charged = bytes;
    return MP_OK;
}

static mp_status init_shadow(mp_sequence *seq, mp_error *error) {
    mp_shadow *shadow = seq->shadow = mp_alloc_zeroed(sizeof *shadow, MP_TAG_REQUEST);
    if (shadow)
        shadow->seq.blocks = mp_alloc_array((size_t)seq->block_capacity, sizeof *seq->blocks, MP_TAG_REQUEST);
    if (!shadow || !shadow->seq.blocks)
        return mp_fail_memory(error, sizeof *shadow, "a sequence");
    shadow->seq.tokens = seq->tokens;
    shadow->seq.block_capacity = seq->block_capacity;
    return MP_OK;
}

static mp_status init_sequence(const mp_decoder *model, const mp_text_request *request, int choice, bool penalties,
                               mp_sequence *seq, mp_error *error) {
    int32_t capacity = capacity_of(model, request);
    seq->block_capacity = blocks_for(capacity);
    seq->tokens = mp_alloc_array((size_t)capacity, sizeof *seq->tokens, MP_TAG_REQUEST);
    seq->blocks = mp_alloc_array((size_t)seq->block_capacity, sizeof *seq->blocks, MP_TAG_REQUEST);
    if (!seq->tokens || !seq->blocks)
        return mp_fail_memory(error, (uint64_t)capacity * sizeof *seq->tokens, "a sequence");
    if (model->draft)
        MP_TRY(init_shadow(seq, error));
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
    for (int i = 0; i < group->n && status == MP_OK; i++) {
        group->seqs[i].chain = mp_prefix_begin(cache, mp_cache_scope_of(item, variant_of(model, request, group)));
        status = init_sequence(model, request, i, group->penalties, &group->seqs[i], error);
    }
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
        mp_free(group->seqs[i].blocks);
        mp_history_deinit(&group->seqs[i].history);
        if (group->seqs[i].shadow)
            mp_free(group->seqs[i].shadow->seq.blocks);
        mp_free(group->seqs[i].shadow);
    }
    mp_free(group->barred);
    mp_free(group->deferred_logits);
    mp_free(group->images);
    if (group->budget)
        mp_budget_give(group->budget, group->charged);
    mp_free(group);
}

static void give_last(mp_sequence *seq, mp_prefix_cache *cache) {
    seq->block_count--;
    if (seq->block_count >= seq->first_window_block)
        mp_prefix_unref_window(cache, seq->blocks[seq->block_count]);
    mp_prefix_unref_block(cache, seq->blocks[seq->block_count]);
}

/* Unrefs the blocks whose window parts no row at `position` or later sees. */
static void unref_before(mp_sequence *seq, mp_prefix_cache *cache, int64_t position) {
    int first = mp_kv_first_seen(&cache->kv.group, position);
    for (; seq->first_window_block < first; seq->first_window_block++)
        if (seq->first_window_block < seq->block_count)
            mp_prefix_unref_window(cache, seq->blocks[seq->first_window_block]);
}

void mp_sequence_drop(mp_sequence *seq, mp_prefix_cache *cache) {
    while (seq->block_count > 0) /* from the last to the first, as generation/prefix_cache.h requires */
        give_last(seq, cache);
    seq->first_window_block = 0;
    mp_draft_deinit(&seq->index, cache->kv.budget); /* mp_draft_find rebuilds the index on demand */
    seq->cached = 0;
    seq->awaits_mask = false; /* the logits will be computed again */
    seq->chain = mp_prefix_begin(cache, seq->chain.scope);
    mp_shadow_drop(seq->shadow);
}

void mp_shadow_drop(mp_shadow *shadow) {
    if (!shadow || !shadow->cache)
        return;
    mp_sequence_drop(&shadow->seq, shadow->cache);
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

/* ---- reuse of published blocks ----------------------------------------------------------------------------------- */

/* Reduces `end` to the number of tokens after which the sequence can continue: the window parts that its next row sees
 * must exist. */
static int32_t reach(mp_sequence *seq, mp_prefix_cache *cache, int32_t end) {
    int32_t first = (int32_t)seq->chain.count;
    if (cache->kv.window_bytes == 0 || first != seq->cached / MP_KV_BLOCK || end / MP_KV_BLOCK <= first)
        return end;
    uint32_t most_blocks = (uint32_t)(end / MP_KV_BLOCK - first);
    return (first + (int32_t)mp_prefix_reach(cache, &seq->chain, seq->tokens + first * MP_KV_BLOCK, most_blocks)) *
           MP_KV_BLOCK;
}

void mp_sequence_reuse(mp_sequence *seq, mp_prefix_cache *cache, int32_t end) {
    int32_t before = seq->cached, first = (int32_t)seq->chain.count;
    end = reach(seq, cache, end);
    int needed = mp_kv_first_seen(&cache->kv.group, end);
    for (;;) {
        int32_t index = (int32_t)seq->chain.count;
        uint32_t id;
        if ((index + 1) * MP_KV_BLOCK > end || index != seq->cached / MP_KV_BLOCK ||
            !mp_prefix_find(cache, &seq->chain, seq->tokens + index * MP_KV_BLOCK, &id))
            break;
        if (index >= needed)
            mp_prefix_ref_window(cache, id);
        if (index < seq->block_count) {
            mp_prefix_unref_window(cache, seq->blocks[index]);
            mp_prefix_unref_block(cache, seq->blocks[index]);
        } else {
            seq->block_count++;
        }
        seq->blocks[index] = id;
        seq->cached = (index + 1) * MP_KV_BLOCK;
    }
    if (seq->cached == before)
        return;
    /* Unref last: a block that no sequence sees may be evicted at once, including one that was still to be found. */
    for (; seq->first_window_block < needed; seq->first_window_block++)
        if (seq->first_window_block < first)
            mp_prefix_unref_window(cache, seq->blocks[seq->first_window_block]);
    mp_prefix_count_hit(cache, (uint32_t)(seq->cached - before));
}

void mp_sequence_group_reuse(mp_item *item, mp_prefix_cache *cache) {
    mp_sequence_group *group = item->state;
    mp_text_request *request = (mp_text_request *)item->request;
    for (int c = 0; c < group->n; c++) {
        mp_sequence *seq = &group->seqs[c];
        /* decoding sequences have nothing to reuse */
        if (!seq->active || seq->done || seq->awaits_mask || seq->cached + 1 == seq->count)
            continue;
        if (c > 0) {
            mp_sequence_reuse(seq, cache, seq->count - 1);
            continue;
        }
        bool logits = request->want_prompt_logits && group->prefilled < request->n_prompt;
        mp_sequence_reuse(seq, cache, logits ? smaller(group->prefilled, seq->count - 1) : seq->count - 1);
        int32_t prefilled = smaller(seq->cached, request->n_prompt);
        if (prefilled > group->prefilled) {
            request->cached_tokens += prefilled - group->prefilled;
            group->prefilled = prefilled;
        }
    }
}

void mp_sequence_publish(mp_sequence *seq, mp_prefix_cache *cache) {
    while (!seq->chain.closed && (int32_t)seq->chain.count < seq->cached / MP_KV_BLOCK) {
        uint32_t index = seq->chain.count;
        mp_prefix_publish(cache, &seq->chain, seq->tokens + index * MP_KV_BLOCK, &seq->blocks[index]);
    }
}

void mp_sequence_group_keep(mp_item *item, mp_prefix_cache *cache, int choice, int rows, bool sound) {
    mp_sequence_group *group = item->state;
    mp_sequence *seq = &group->seqs[choice];
    seq->cached += rows;
    if (choice == 0)
        group->prefilled =
            larger(group->prefilled, smaller(seq->cached, ((const mp_text_request *)item->request)->n_prompt));
    seq->chain.closed |= !sound;
    mp_sequence_publish(seq, cache);
}

/* Shares the blocks of `first` with `seq`. Returns false, and leaves `seq` empty, if window parts that the next row
 * needs are gone. */
static bool fork_one(const mp_sequence *first, mp_sequence *seq, mp_prefix_cache *cache) {
    int full = first->cached / MP_KV_BLOCK;
    uint32_t last;
    bool copied = first->cached % MP_KV_BLOCK && mp_prefix_copy(cache, first->blocks[full], &last, NULL) == MP_OK;
    int32_t cached = copied ? first->cached : full * MP_KV_BLOCK;
    int from = mp_kv_first_seen(&cache->kv.group, cached);
    if (from < full && from < first->first_window_block) /* this happens only if mp_prefix_copy failed */
        return false;
    for (int b = 0; b < full; b++) {
        seq->blocks[b] = first->blocks[b];
        mp_prefix_ref_block(cache, seq->blocks[b]);
        if (b >= from)
            mp_prefix_ref_window(cache, seq->blocks[b]);
    }
    if (copied)
        seq->blocks[full] = last;
    seq->chain = first->chain;
    seq->block_count = full + copied;
    seq->first_window_block = from;
    seq->cached = cached;
    return true;
}

void mp_sequence_group_fork(mp_sequence_group *group, mp_prefix_cache *cache) {
    for (int c = 1; c < group->n; c++) {
        group->seqs[c].active = true;
        fork_one(&group->seqs[0], &group->seqs[c], cache);
    }
}

/* ---- own blocks -------------------------------------------------------------------------------------------------- */

mp_status mp_sequence_extend(mp_sequence *seq, mp_prefix_cache *cache, int *rows, mp_error *error) {
    int need = (seq->cached + *rows + MP_KV_BLOCK - 1) / MP_KV_BLOCK;
    assert(need <= seq->block_capacity);
    unref_before(seq, cache, seq->cached);
    while (seq->block_count < need) {
        mp_status status = mp_prefix_take(cache, &seq->blocks[seq->block_count], error);
        if (status != MP_OK) {
            int room = seq->block_count * MP_KV_BLOCK - seq->cached;
            *rows = room > 0 ? room : 0;
            return status;
        }
        seq->block_count++;
    }
    return MP_OK;
}

/* ---- drafts ------------------------------------------------------------------------------------------------------ */

static bool is_among(const int32_t *ids, int n, int32_t id) {
    for (int i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

int mp_sequence_most_drafts(const mp_decoder *model, const mp_item *item, int choice) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_sequence *seq = &((const mp_sequence_group *)item->state)->seqs[choice];
    /* draft no tokens beyond max_tokens or the end of the context: the completion could not keep them */
    int rows = smaller(request->n_prompt + request->sampling.max_tokens - 1, model->context) - seq->count;
    return smaller(rows, MP_DRAFT_MAX);
}

bool mp_sequence_may_draft(const mp_decoder *model, const mp_item *item, int32_t id) {
    const mp_text_request *request = (const mp_text_request *)item->request;
    const mp_token_table *tokens = mp_spec_tokens(mp_weights_spec(model->weights));
    return id >= 0 && id < model->sampled_vocab && !is_among(tokens->eog, tokens->eog_count, id) &&
           !is_among(request->stop_ids, request->n_stop_ids, id);
}

void mp_sequence_draft(const mp_decoder *model, const mp_speculation *speculation, const mp_prefix_cache *cache,
                       const mp_item *item, int choice) {
    mp_sequence_group *group = item->state;
    mp_sequence *seq = &group->seqs[choice];
    mp_draft *draft = &seq->draft;
    const int most = mp_sequence_most_drafts(model, item, choice);
    draft->count = 0;
    draft->of_model = false;
    if (most <= 0 || seq->speculation_off)
        return;
    if (speculation->propose) {
        draft->run = MP_DRAFT_RUN;
        draft->count = speculation->propose(speculation->propose_arg, item, choice, draft->tokens, most);
    } else {
        draft->count =
            mp_draft_find(&seq->index, cache->kv.budget, seq->tokens, seq->count, most, draft->tokens, &draft->run);
    }
    for (int i = 0; i < draft->count; i++)
        if (!mp_sequence_may_draft(model, item, draft->tokens[i]))
            draft->count = i;
}

void mp_sequence_wipe(const mp_sequence *seq, const mp_prefix_cache *cache, int rows, const float *zeros) {
    const mp_kv_cache *kv = &cache->kv;
    for (int32_t at = seq->cached; at < seq->cached + rows; at++) {
        uint32_t block = seq->blocks[at / MP_KV_BLOCK];
        for (int layer = 0; layer < kv->group.layers + kv->group.window_layers; layer++)
            for (int head = 0; head < kv->group.heads; head++)
                mp_kv_put(kv, block, layer, head, at % MP_KV_BLOCK, zeros, zeros);
    }
}
