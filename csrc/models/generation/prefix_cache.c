#include "models/generation/prefix_cache.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/siphash.h"

void mp_prefix_init(mp_prefix_cache *cache, const mp_kv_group *group, mp_budget *budget, uint32_t percent) {
    *cache = (mp_prefix_cache){
        .oldest = MP_PREFIX_NONE,
        .newest = MP_PREFIX_NONE,
        .window_oldest = MP_PREFIX_NONE,
        .window_newest = MP_PREFIX_NONE,
        .percent = percent,
    };
    mp_siphash_key(cache->hash_key);
    mp_kv_init(&cache->kv, group, budget);
}

void mp_prefix_deinit(mp_prefix_cache *cache) {
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

/* ---- the list of idle blocks ------------------------------------------------------------------------------------- */

static void list_newest(mp_prefix_cache *cache, uint32_t id) {
    mp_prefix_block *block = &cache->known[id];
    block->older = cache->newest;
    block->newer = MP_PREFIX_NONE;
    *(cache->newest == MP_PREFIX_NONE ? &cache->oldest : &cache->known[cache->newest].newer) = id;
    cache->newest = id;
    cache->idle++;
}

static void unlist(mp_prefix_cache *cache, uint32_t id) {
    const mp_prefix_block *block = &cache->known[id];
    *(block->older == MP_PREFIX_NONE ? &cache->oldest : &cache->known[block->older].newer) = block->newer;
    *(block->newer == MP_PREFIX_NONE ? &cache->newest : &cache->known[block->newer].older) = block->older;
    cache->idle--;
}

/* Like list_newest, for the list of idle window parts. */
static void list_window(mp_prefix_cache *cache, uint32_t id) {
    mp_prefix_block *block = &cache->known[id];
    block->window_older = cache->window_newest;
    block->window_newer = MP_PREFIX_NONE;
    *(cache->window_newest == MP_PREFIX_NONE ? &cache->window_oldest
                                             : &cache->known[cache->window_newest].window_newer) = id;
    cache->window_newest = id;
    cache->window_idle++;
}

static void unlist_window(mp_prefix_cache *cache, uint32_t id) {
    const mp_prefix_block *block = &cache->known[id];
    uint32_t older = block->window_older, newer = block->window_newer;
    *(older == MP_PREFIX_NONE ? &cache->window_oldest : &cache->known[older].window_newer) = newer;
    *(newer == MP_PREFIX_NONE ? &cache->window_newest : &cache->known[newer].window_older) = older;
    cache->window_idle--;
}

/* Returns true if the block's window part is in the idle list: it exists and no sequence sees it. The block must be
 * published. */
static bool is_window_idle(const mp_prefix_cache *cache, uint32_t id) {
    const mp_kv_cache *kv = &cache->kv;
    return kv->window_bytes && kv->window_memory[id] && kv->window_references[id] == 0;
}

static void evict_window(mp_prefix_cache *cache, uint32_t id) {
    unlist_window(cache, id);
    mp_kv_forget(&cache->kv, id);
}

static void evict_oldest(mp_prefix_cache *cache) {
    uint32_t id = cache->oldest;
    mp_prefix_block *block = &cache->known[id];
    assert(cache->idle > 0 && block->children == 0 && cache->kv.references[id] == 1);
    unlist(cache, id);
    if (is_window_idle(cache, id))
        evict_window(cache, id);
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

/* Evicts the oldest entry of the longer list: of idle window parts or of idle blocks. A window part can be evicted even
 * if its block is in use or has successors. Returns false if both lists are empty. */
static bool prefix_evict(mp_prefix_cache *cache) {
    if (cache->window_idle > cache->idle)
        evict_window(cache, cache->window_oldest);
    else if (cache->idle > 0)
        evict_oldest(cache);
    else
        return false;
    return true;
}

static void bound_idle(mp_prefix_cache *cache) {
    const mp_kv_cache *kv = &cache->kv;
    uint64_t limit = atomic_load_explicit(&mp_budget_top(kv->budget)->limit, memory_order_relaxed);
    if (limit == UINT64_MAX)
        return;
    uint64_t most = limit / 100 * cache->percent;
    while (cache->idle * (uint64_t)kv->block_bytes + cache->window_idle * (uint64_t)kv->window_bytes > most)
        if (!prefix_evict(cache))
            return;
}

/* ---- counted use ------------------------------------------------------------------------------------------------- */

mp_status mp_prefix_take(mp_prefix_cache *cache, uint32_t *id, mp_error *error) {
    mp_error refused;
    for (;;) {
        mp_status status = mp_kv_take(&cache->kv, id, &refused);
        if (status == MP_OK)
            return MP_OK;
        /* Spare window parts can pay for a refused block, and free blocks for a refused window part. Keep one of each:
         * the next attempt needs it. */
        const mp_kv_cache *kv = &cache->kv;
        if (prefix_evict(cache) || ((kv->spare_count > 1 || kv->free_count > 1) && mp_kv_release(&cache->kv) > 0))
            continue;
        if (error)
            *error = refused;
        return status;
    }
}

void mp_prefix_ref_block(mp_prefix_cache *cache, uint32_t id) {
    if (is_published(cache, id) && cache->kv.references[id] == 1)
        unlist(cache, id);
    mp_kv_share(&cache->kv, id);
}

void mp_prefix_unref_block(mp_prefix_cache *cache, uint32_t id) {
    mp_kv_give(&cache->kv, id);
    if (!is_published(cache, id) || cache->kv.references[id] > 1)
        return;
    list_newest(cache, id);
    bound_idle(cache);
}

void mp_prefix_ref_window(mp_prefix_cache *cache, uint32_t id) {
    if (!cache->kv.window_bytes)
        return;
    assert(cache->kv.window_memory[id]);
    if (cache->kv.window_references[id]++ == 0 && is_published(cache, id))
        unlist_window(cache, id);
}

void mp_prefix_unref_window(mp_prefix_cache *cache, uint32_t id) {
    if (!cache->kv.window_bytes)
        return;
    assert(cache->kv.window_references[id] > 0);
    if (--cache->kv.window_references[id] > 0)
        return;
    if (is_published(cache, id)) {
        list_window(cache, id);
        bound_idle(cache);
    } else {
        mp_kv_forget(&cache->kv, id);
    }
}

mp_status mp_prefix_copy(mp_prefix_cache *cache, uint32_t from, uint32_t *id, mp_error *error) {
    MP_TRY(mp_prefix_take(cache, id, error));
    memcpy(cache->kv.memory[*id], cache->kv.memory[from], cache->kv.block_bytes);
    if (cache->kv.window_bytes)
        memcpy(cache->kv.window_memory[*id], cache->kv.window_memory[from], cache->kv.window_bytes);
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
    /* walk back from the last block until all window parts that the next row sees exist */
    uint32_t end = chain->count + found;
    for (uint32_t at = end; at > chain->count; id = cache->known[id].parent, at--) {
        uint32_t needed = (uint32_t)mp_kv_first_seen(&cache->kv.group, (int64_t)end * MP_KV_BLOCK);
        if (at - 1 < needed)
            break;
        if (!mp_kv_has_window(&cache->kv, id))
            end = at - 1;
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
        if (mp_kv_has_window(&cache->kv, found)) {
            mp_prefix_ref_window(cache, found);
            mp_prefix_unref_window(cache, *id);
        } else {
            cache->kv.window_references[*id]--;
            mp_kv_move(&cache->kv, *id, found);
            cache->kv.window_references[found]++;
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

uint64_t mp_prefix_shrink(mp_prefix_cache *cache, uint64_t bytes) {
    uint64_t given = 0;
    while (given < bytes) {
        size_t bytes_given = mp_kv_release(&cache->kv);
        given += bytes_given;
        if (bytes_given == 0 && !prefix_evict(cache))
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
    }
    return bytes;
}
