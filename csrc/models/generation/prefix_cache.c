#include "models/generation/prefix_cache.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/options.h"
#include "base/siphash.h"

void mp_prefix_init(mp_prefix_cache *cache, const mp_kv_layout *layout, mp_budget *budget, uint32_t percent) {
    *cache = (mp_prefix_cache){.percent = percent};
    for (int p = 0; p < MP_KV_PARTS; p++)
        cache->idle[p] = (mp_prefix_idle){.oldest = MP_PREFIX_NONE, .newest = MP_PREFIX_NONE};
    mp_siphash_key(cache->hash_key);
    mp_kv_init(&cache->kv, layout, budget);
    mp_states_init(&cache->states, layout->state_bytes, layout->log_bytes, budget,
                   (uint32_t)mp_options_get()->snapshot_percent, &cache->counters);
}

void mp_prefix_deinit(mp_prefix_cache *cache) {
    mp_states_deinit(&cache->states);
    mp_kv_deinit(&cache->kv);
    mp_free(cache->known);
    mp_free(cache->buckets);
    *cache = (mp_prefix_cache){0};
}

/* Adds `more` to a counter. Only the worker's thread writes counters; any thread may read them. */
static void prefix_count(_Atomic uint64_t *counter, int64_t more) {
    uint64_t now = atomic_load_explicit(counter, memory_order_relaxed);
    atomic_store_explicit(counter, now + (uint64_t)more, memory_order_relaxed);
}

void mp_prefix_count_hit(mp_prefix_cache *cache, uint32_t tokens) {
    prefix_count(&cache->counters.hits, 1);
    prefix_count(&cache->counters.tokens, tokens);
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

static mp_cache_key key_after(const mp_prefix_cache *cache, const mp_prefix_chain *chain, const int32_t *tokens) {
    const uint64_t before = chain->count > 0 ? cache->known[chain->last].key.hash : 0;
    return mp_cache_key_of(cache->hash_key, chain->scope, before, tokens, MP_KV_BLOCK * sizeof *tokens);
}

static uint32_t bucket_of(const mp_prefix_cache *cache, mp_cache_key key) {
    return (uint32_t)key.hash & (cache->capacity - 1);
}

/* ---- idle lists -------------------------------------------------------------------------------------------------- */

static void list_newest(mp_prefix_cache *cache, int part, uint32_t id) {
    mp_prefix_idle *idle = &cache->idle[part];
    mp_prefix_block *block = &cache->known[id];
    block->older[part] = idle->newest;
    block->newer[part] = MP_PREFIX_NONE;
    *(idle->newest == MP_PREFIX_NONE ? &idle->oldest : &cache->known[idle->newest].newer[part]) = id;
    idle->newest = id;
    idle->count++;
}

static void unlist(mp_prefix_cache *cache, int part, uint32_t id) {
    mp_prefix_idle *idle = &cache->idle[part];
    const uint32_t older = cache->known[id].older[part], newer = cache->known[id].newer[part];
    *(older == MP_PREFIX_NONE ? &idle->oldest : &cache->known[older].newer[part]) = newer;
    *(newer == MP_PREFIX_NONE ? &idle->newest : &cache->known[newer].older[part]) = older;
    idle->count--;
}

static void evict_part(mp_prefix_cache *cache, int part, uint32_t id) {
    unlist(cache, part, id);
    mp_kv_forget(&cache->kv, part, id);
}

static void evict_oldest(mp_prefix_cache *cache) {
    uint32_t id = cache->idle[0].oldest;
    mp_prefix_block *block = &cache->known[id];
    assert(cache->idle[0].count > 0 && block->children == 0 && cache->kv.references[id] == 1);
    unlist(cache, 0, id);
    mp_snapshot_forget(&cache->states, id);
    for (int p = 1; p < cache->kv.layout.parts; p++)
        if (mp_kv_has(&cache->kv, p, id)) /* no sequence holds the block, so the part is idle */
            evict_part(cache, p, id);
    uint32_t *at = &cache->buckets[bucket_of(cache, block->key)];
    while (*at != id)
        at = &cache->known[*at].next;
    *at = block->next;
    block->published = false;
    if (block->parent != MP_PREFIX_NONE)
        cache->known[block->parent].children--;
    mp_kv_give(&cache->kv, id);
    prefix_count(&cache->counters.blocks, -1);
    prefix_count(&cache->counters.evicted, 1);
}

static bool is_published(const mp_prefix_cache *cache, uint32_t id) {
    return id < cache->capacity && cache->known[id].published;
}

/* Evicts the oldest entry of the longest list. A further part can be evicted even if its block is in use or has
 * successors. Returns false if all lists are empty. */
static bool prefix_evict(mp_prefix_cache *cache) {
    int longest = 0;
    for (int p = 1; p < cache->kv.layout.parts; p++)
        if (cache->idle[p].count > cache->idle[longest].count)
            longest = p;
    if (cache->idle[longest].count == 0)
        return false;
    if (longest == 0)
        evict_oldest(cache);
    else
        evict_part(cache, longest, cache->idle[longest].oldest);
    return true;
}

static uint64_t idle_bytes(const mp_prefix_cache *cache) {
    uint64_t bytes = 0;
    for (int p = 0; p < cache->kv.layout.parts; p++)
        bytes += cache->idle[p].count * (uint64_t)cache->kv.layout.bytes[p];
    return bytes;
}

static void bound_idle(mp_prefix_cache *cache) {
    uint64_t limit = atomic_load_explicit(&mp_budget_top(cache->kv.budget)->limit, memory_order_relaxed);
    if (limit == UINT64_MAX)
        return;
    while (idle_bytes(cache) > limit / 100 * cache->percent)
        if (!prefix_evict(cache))
            return;
}

/* Evicts a snapshot, or else as prefix_evict. Adds the bytes that this gave back to the budget to *bytes. */
static bool evict_any(mp_prefix_cache *cache, uint64_t *bytes) {
    return mp_snapshot_evict(&cache->states, bytes) || prefix_evict(cache);
}

/* Makes memory available after a refusal. Returns false if there is none. */
static bool make_room(mp_prefix_cache *cache) {
    uint64_t bytes = 0;
    /* Spare memory of one part can pay for another part */
    return evict_any(cache, &bytes) || (mp_kv_has_spare(&cache->kv) && mp_kv_release(&cache->kv) > 0);
}

/* ---- counted use ------------------------------------------------------------------------------------------------- */

mp_status mp_prefix_take(mp_prefix_cache *cache, uint32_t *id, mp_error *error) {
    mp_error refused;
    for (;;) {
        mp_status status = mp_kv_take(&cache->kv, id, &refused);
        if (status == MP_OK)
            return MP_OK;
        if (make_room(cache))
            continue;
        if (error)
            *error = refused;
        return status;
    }
}

void mp_prefix_ref_block(mp_prefix_cache *cache, uint32_t id) {
    if (is_published(cache, id) && cache->kv.references[id] == 1)
        unlist(cache, 0, id);
    mp_kv_share(&cache->kv, id);
}

void mp_prefix_unref_block(mp_prefix_cache *cache, uint32_t id) {
    mp_kv_give(&cache->kv, id);
    if (!is_published(cache, id) || cache->kv.references[id] > 1)
        return;
    list_newest(cache, 0, id);
    bound_idle(cache);
}

void mp_prefix_ref_part(mp_prefix_cache *cache, int part, uint32_t id) {
    assert(mp_kv_has(&cache->kv, part, id));
    if (cache->kv.part[part].references[id]++ == 0 && is_published(cache, id))
        unlist(cache, part, id);
}

void mp_prefix_unref_part(mp_prefix_cache *cache, int part, uint32_t id) {
    uint32_t *references = &cache->kv.part[part].references[id];
    assert(*references > 0);
    if (--*references > 0)
        return;
    if (is_published(cache, id)) {
        list_newest(cache, part, id);
        bound_idle(cache);
    } else {
        mp_kv_forget(&cache->kv, part, id);
    }
}

mp_status mp_prefix_take_state(mp_prefix_cache *cache, const void *from, mp_state **state, mp_error *error) {
    for (;;) {
        const mp_status status = mp_state_create(&cache->states, from, state, error);
        if (status == MP_OK || !(make_room(cache) || mp_kv_release(&cache->kv) > 0))
            return status;
    }
}

void mp_prefix_keep_state(mp_prefix_cache *cache, const mp_prefix_chain *chain, const mp_state *state) {
    uint32_t gap = 0, id = chain->last;
    if (chain->closed || chain->count == 0 || mp_snapshot_exists(&cache->states, id))
        return;
    for (; id != MP_PREFIX_NONE && !mp_snapshot_exists(&cache->states, id); id = cache->known[id].parent)
        gap += MP_KV_BLOCK;
    mp_snapshot_keep(&cache->states, chain->last, gap, state);
}

mp_status mp_prefix_copy(mp_prefix_cache *cache, uint32_t from, uint32_t *id, mp_error *error) {
    MP_TRY(mp_prefix_take(cache, id, error));
    mp_kv_copy(&cache->kv, from, *id);
    return MP_OK;
}

/* ---- find, publish ----------------------------------------------------------------------------------------------- */

mp_prefix_chain mp_prefix_begin(const mp_prefix_cache *cache, mp_cache_scope scope) {
    return (mp_prefix_chain){.last = MP_PREFIX_NONE, .scope = scope, .closed = cache->percent == 0};
}

static void ensure_key(const mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens) {
    if (!chain->key_known)
        chain->key = key_after(cache, chain, tokens);
    chain->key_known = true;
}

static void advance(mp_prefix_chain *chain, uint32_t id) {
    chain->last = id;
    chain->count++;
    chain->key_known = false;
}

static uint32_t look_up(const mp_prefix_cache *cache, const mp_prefix_chain *chain, const int32_t *tokens) {
    if (cache->capacity == 0)
        return MP_PREFIX_NONE;
    uint32_t id = cache->buckets[bucket_of(cache, chain->key)];
    for (; id != MP_PREFIX_NONE; id = cache->known[id].next) {
        const mp_prefix_block *block = &cache->known[id];
        if (mp_cache_key_equal(block->key, chain->key) && block->parent == chain->last &&
            memcmp(block->tokens, tokens, sizeof block->tokens) == 0)
            break;
    }
    return id;
}

bool mp_prefix_find(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t *id) {
    if (chain->closed)
        return false;
    ensure_key(cache, chain, tokens);
    uint32_t found = look_up(cache, chain, tokens);
    if (found == MP_PREFIX_NONE)
        return false;
    mp_prefix_ref_block(cache, found);
    advance(chain, found);
    *id = found;
    return true;
}

uint32_t mp_prefix_reach(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t most) {
    uint32_t found, id = MP_PREFIX_NONE;
    if (chain->closed || most == 0)
        return 0;
    ensure_key(cache, chain, tokens);
    mp_prefix_chain ahead = *chain;
    for (found = 0; found < most; found++) {
        ensure_key(cache, &ahead, tokens + found * MP_KV_BLOCK);
        uint32_t next = look_up(cache, &ahead, tokens + found * MP_KV_BLOCK);
        if (next == MP_PREFIX_NONE)
            break;
        advance(&ahead, next);
        id = next;
    }
    /* walk back from the last block until all parts that the next row reads exist */
    uint32_t end = chain->count + found;
    for (uint32_t at = end; at > chain->count; id = cache->known[id].parent, at--) {
        bool is_read = false;
        if (at == end && mp_states_exist(&cache->states) && !mp_snapshot_exists(&cache->states, id)) {
            end = at - 1;
            continue;
        }
        for (int p = 1; p < cache->kv.layout.parts; p++) {
            if ((int)at - 1 < mp_kv_first_seen(cache->kv.layout.window[p], (int64_t)end * MP_KV_BLOCK))
                continue;
            is_read = true;
            if (!mp_kv_has(&cache->kv, p, id))
                end = at - 1;
        }
        if (!is_read)
            break;
    }
    return end > chain->count ? end - chain->count : 0;
}

/* Grows the tables to the capacity of the KV cache. Returns false if memory is exhausted. */
static bool prefix_grow(mp_prefix_cache *cache) {
    uint32_t capacity = cache->kv.capacity;
    if (cache->capacity >= capacity)
        return true;
    uint32_t *buckets = mp_alloc(capacity * sizeof *buckets, MP_TAG_KV);
    mp_prefix_block *known = buckets ? mp_realloc(cache->known, capacity * sizeof *known, MP_TAG_KV) : NULL;
    if (!known) {
        mp_free(buckets);
        return false;
    }
    mp_free(cache->buckets);
    cache->buckets = buckets;
    cache->known = known;
    for (uint32_t id = cache->capacity; id < capacity; id++)
        known[id].published = false;
    cache->capacity = capacity;
    memset(buckets, 0xFF, capacity * sizeof *buckets); /* each bucket becomes MP_PREFIX_NONE */
    for (uint32_t id = 0; id < capacity; id++)
        if (known[id].published) {
            uint32_t *bucket = &buckets[bucket_of(cache, known[id].key)];
            known[id].next = *bucket;
            *bucket = id;
        }
    return true;
}

void mp_prefix_publish(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t *id) {
    if (chain->closed)
        return;
    ensure_key(cache, chain, tokens);
    uint32_t found = look_up(cache, chain, tokens);
    if (found != MP_PREFIX_NONE) {
        mp_prefix_ref_block(cache, found);
        for (int p = 1; p < cache->kv.layout.parts; p++) {
            uint32_t *references = cache->kv.part[p].references;
            if (mp_kv_has(&cache->kv, p, found)) {
                mp_prefix_ref_part(cache, p, found);
                mp_prefix_unref_part(cache, p, *id);
            } else {
                references[*id]--;
                mp_kv_move(&cache->kv, p, *id, found);
                references[found]++;
            }
        }
        mp_prefix_unref_block(cache, *id);
        *id = found;
    } else if (prefix_grow(cache)) {
        mp_prefix_block *block = &cache->known[*id];
        uint32_t *bucket = &cache->buckets[bucket_of(cache, chain->key)];
        assert(!block->published);
        *block = (mp_prefix_block){.key = chain->key, .parent = chain->last, .next = *bucket,
                                   .published = true};
        memcpy(block->tokens, tokens, sizeof block->tokens);
        *bucket = *id;
        if (chain->last != MP_PREFIX_NONE)
            cache->known[chain->last].children++;
        mp_kv_share(&cache->kv, *id);
        prefix_count(&cache->counters.blocks, 1);
    } else {
        chain->closed = true;
        return;
    }
    advance(chain, *id);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

uint64_t mp_prefix_bytes(const mp_prefix_cache *cache) {
    return mp_kv_charged(&cache->kv) + mp_states_bytes(&cache->states);
}

uint64_t mp_prefix_block_bytes(const mp_prefix_cache *cache) {
    uint64_t bytes = 0;
    for (int p = 0; p < cache->kv.layout.parts; p++)
        bytes += cache->kv.layout.bytes[p];
    return bytes;
}

uint64_t mp_prefix_shrink(mp_prefix_cache *cache, uint64_t bytes) {
    uint64_t given = 0;
    while (given < bytes) {
        size_t bytes_given = mp_kv_release(&cache->kv);
        given += bytes_given;
        if (bytes_given == 0 && !evict_any(cache, &given))
            break;
    }
    return given;
}

uint64_t mp_prefix_trim(mp_prefix_cache *cache) {
    uint64_t bytes = mp_prefix_shrink(cache, UINT64_MAX);
    mp_kv_trim(&cache->kv);
    if (atomic_load_explicit(&cache->counters.blocks, memory_order_relaxed) == 0) {
        mp_free(cache->known);
        mp_free(cache->buckets);
        cache->known = NULL;
        cache->buckets = NULL;
        cache->capacity = 0;
        mp_states_trim(&cache->states);
    }
    return bytes;
}
