#include "models/generation/cache_parts.h"

#include <assert.h>
#include <string.h>

static int blocks_for(int32_t tokens) { return (tokens + MP_KV_BLOCK - 1) / MP_KV_BLOCK; }

/* Returns the first block that a row at `position` reads in a part. */
static int first_read(const mp_prefix_cache *cache, int part, int32_t position) {
    return mp_kv_first_seen(cache->kv.layout.window[part], position);
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

uint64_t mp_cached_bytes(int32_t capacity) { return (uint64_t)blocks_for(capacity) * sizeof(uint32_t); }

mp_status mp_cached_init(mp_cached *cached, int32_t capacity, mp_error *error) {
    *cached = (mp_cached){.block_capacity = blocks_for(capacity)};
    cached->blocks = mp_alloc_array((size_t)cached->block_capacity, sizeof *cached->blocks, MP_TAG_REQUEST);
    return cached->blocks ? MP_OK : mp_fail_memory(error, mp_cached_bytes(capacity), "the blocks of a sequence");
}

void mp_cached_deinit(mp_cached *cached) {
    assert(cached->block_count == 0);
    mp_free(cached->blocks);
    cached->blocks = NULL;
}

void mp_cached_begin(mp_cached *cached, const mp_prefix_cache *cache, mp_cache_scope scope) {
    assert(cached->block_count == 0);
    cached->chain = mp_prefix_begin(cache, scope);
    cached->count = 0;
    cached->state = NULL;
    cached->stop = 0;
    memset(cached->first, 0, sizeof cached->first);
}

void mp_cached_drop(mp_cached *cached, mp_prefix_cache *cache) {
    while (cached->block_count > 0) { /* from the last to the first, as generation/prefix_cache.h requires */
        const int last = --cached->block_count;
        for (int p = 1; p < cache->kv.layout.parts; p++)
            if (last >= cached->first[p])
                mp_prefix_unref_part(cache, p, cached->blocks[last]);
        mp_prefix_unref_block(cache, cached->blocks[last]);
    }
    if (cached->state)
        mp_state_drop(&cache->states, cached->state);
    mp_cached_begin(cached, cache, cached->chain.scope);
}

/* ---- take -------------------------------------------------------------------------------------------------------- */

/* Unrefs the parts of the blocks below `end` that no row at `position` or later reads. */
static void unref_before(mp_cached *cached, mp_prefix_cache *cache, int32_t position, int end) {
    for (int p = 1; p < cache->kv.layout.parts; p++) {
        const int first = first_read(cache, p, position);
        for (; cached->first[p] < first; cached->first[p]++)
            if (cached->first[p] < end)
                mp_prefix_unref_part(cache, p, cached->blocks[cached->first[p]]);
    }
}

/* Gives the sequence a state that no other sequence shares. */
static mp_status own_state(mp_cached *cached, mp_prefix_cache *cache, mp_error *error) {
    mp_state *const shared = cached->state;
    if (!mp_states_exist(&cache->states) || (shared && shared->references == 1))
        return MP_OK;
    assert(shared || cached->count == 0);
    assert(!shared || (!shared->open && shared->pending == 0));
    MP_TRY(mp_prefix_take_state(cache, shared ? shared->memory : NULL, &cached->state, error));
    if (shared)
        mp_state_drop(&cache->states, shared);
    return MP_OK;
}

mp_status mp_cached_take(mp_cached *cached, mp_prefix_cache *cache, int *rows, mp_error *error) {
    const int needed = blocks_for(cached->count + *rows);
    assert(needed <= cached->block_capacity);
    const mp_status owned = own_state(cached, cache, error);
    if (owned != MP_OK) {
        *rows = 0;
        return owned;
    }
    unref_before(cached, cache, cached->count, cached->block_count);
    while (cached->block_count < needed) {
        mp_status status = mp_prefix_take(cache, &cached->blocks[cached->block_count], error);
        if (status != MP_OK) {
            const int room = cached->block_count * MP_KV_BLOCK - cached->count;
            *rows = room > 0 ? room : 0;
            return status;
        }
        cached->block_count++;
    }
    return MP_OK;
}

mp_status mp_cached_take_log(mp_cached *cached, mp_prefix_cache *cache, mp_error *error) {
    return cached->state ? mp_state_take_log(&cache->states, cached->state, error) : MP_OK;
}

void mp_cached_enter(mp_cached *cached, int drafts) {
    if (!cached->state)
        return;
    assert(!cached->state->open && cached->state->references == 1);
    cached->state->logs = drafts > 0;
    cached->state->open = true;
    cached->state->pending = 0; /* the pass adds them to the state */
}

void mp_cached_wipe(mp_cached *cached, mp_prefix_cache *cache, int rows) {
    for (int32_t at = cached->count; at < cached->count + rows; at++)
        mp_kv_wipe(&cache->kv, cached->blocks[at / MP_KV_BLOCK], at % MP_KV_BLOCK, 1);
    if (cached->state) {
        assert(cached->state->logs);
        cached->state->open = false;
    }
}

/* ---- published blocks -------------------------------------------------------------------------------------------- */

void mp_cached_publish(mp_cached *cached, mp_prefix_cache *cache, const int32_t *tokens, int rows, bool sound) {
    cached->count += rows;
    cached->chain.closed |= !sound;
    if (cached->state) {
        cached->state->pending += cached->state->logs ? rows : 0;
        cached->state->open = false;
    }
    while (!cached->chain.closed && (int32_t)cached->chain.count < cached->count / MP_KV_BLOCK) {
        const uint32_t index = cached->chain.count;
        mp_prefix_publish(cache, &cached->chain, tokens + index * MP_KV_BLOCK, &cached->blocks[index]);
    }
    if (cached->state && cached->count == cached->stop && cached->state->pending == 0 &&
        (int32_t)cached->chain.count * MP_KV_BLOCK == cached->count)
        mp_prefix_keep_state(cache, &cached->chain, cached->state);
}

/* Reduces `end` to the number of tokens after which the sequence can continue: the parts that its next row reads must
 * exist. */
static int32_t reachable(mp_cached *cached, mp_prefix_cache *cache, const int32_t *tokens, int32_t end) {
    const int32_t first = (int32_t)cached->chain.count;
    const bool always = cache->kv.layout.parts == 1 && !mp_states_exist(&cache->states);
    if (always || first != cached->count / MP_KV_BLOCK || end / MP_KV_BLOCK <= first)
        return end;
    const uint32_t most = (uint32_t)(end / MP_KV_BLOCK - first);
    return (first + (int32_t)mp_prefix_reach(cache, &cached->chain, tokens + first * MP_KV_BLOCK, most)) * MP_KV_BLOCK;
}

void mp_cached_reach(mp_cached *cached, mp_prefix_cache *cache, const int32_t *tokens, int32_t end) {
    const int32_t before = cached->count, most = end;
    const int first = (int)cached->chain.count;
    const mp_state *const state = cached->state;
    mp_error error;
    end = reachable(cached, cache, tokens, most);
    if (end / MP_KV_BLOCK <= first || own_state(cached, cache, &error) != MP_OK)
        return;
    if (cached->state != state) /* its memory may be that of the very snapshot, or of a block */
        end = reachable(cached, cache, tokens, most);
    for (;;) {
        const int32_t index = (int32_t)cached->chain.count;
        uint32_t id;
        if ((index + 1) * MP_KV_BLOCK > end || index != cached->count / MP_KV_BLOCK ||
            !mp_prefix_find(cache, &cached->chain, tokens + index * MP_KV_BLOCK, &id))
            break;
        const bool replaces = index < cached->block_count;
        for (int p = 1; p < cache->kv.layout.parts; p++) {
            if (index >= first_read(cache, p, end))
                mp_prefix_ref_part(cache, p, id);
            if (replaces)
                mp_prefix_unref_part(cache, p, cached->blocks[index]);
        }
        if (replaces)
            mp_prefix_unref_block(cache, cached->blocks[index]);
        else
            cached->block_count++;
        cached->blocks[index] = id;
        cached->count = (index + 1) * MP_KV_BLOCK;
    }
    if (cached->count == before)
        return;
    if (cached->state) {
        const void *snapshot = mp_snapshot_use(&cache->states, cached->chain.last);
        memcpy(cached->state->memory, snapshot, cache->kv.layout.state_bytes);
        cached->state->pending = 0;
    }
    /* Unref last: a block that no sequence sees may be evicted at once, including one that was still to be found. */
    unref_before(cached, cache, end, first);
    mp_prefix_count_hit(cache, (uint32_t)(cached->count - before));
}

void mp_cached_copy(mp_cached *to, const mp_cached *from, mp_prefix_cache *cache) {
    const int full = from->count / MP_KV_BLOCK;
    uint32_t last;
    assert(!from->state || (from->state->pending == 0 && !from->state->open));
    const bool copied =
        from->count % MP_KV_BLOCK && mp_prefix_copy(cache, from->blocks[full], &last, NULL) == MP_OK;
    const int32_t count = copied ? from->count : full * MP_KV_BLOCK;
    if (from->state && count < from->count)
        return; /* the state is that after all positions */
    int first[MP_KV_PARTS] = {0};
    for (int p = 1; p < cache->kv.layout.parts; p++) {
        first[p] = first_read(cache, p, count);
        if (first[p] < full && first[p] < from->first[p]) /* this happens only if mp_prefix_copy failed */
            return;
    }
    for (int b = 0; b < full; b++) {
        to->blocks[b] = from->blocks[b];
        mp_prefix_ref_block(cache, to->blocks[b]);
        for (int p = 1; p < cache->kv.layout.parts; p++)
            if (b >= first[p])
                mp_prefix_ref_part(cache, p, to->blocks[b]);
    }
    if (copied)
        to->blocks[full] = last;
    to->chain = from->chain;
    to->block_count = full + copied;
    memcpy(to->first, first, sizeof first);
    to->count = count;
    to->state = from->state;
    if (to->state)
        to->state->references++;
}
