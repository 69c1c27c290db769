#include "models/generation/kv_cache.h"

#include <assert.h>
#include <string.h>

void mp_kv_init(mp_kv_cache *cache, const mp_kv_group *group, mp_budget *budget) {
    *cache = (mp_kv_cache){.group = *group, .budget = budget};
    cache->k_bytes = mp_kv_bytes(group->dtype, group->k_dim);
    cache->v_bytes = mp_kv_bytes(group->dtype, group->v_dim);
    size_t layer = (size_t)group->heads * (cache->k_bytes + cache->v_bytes);
    /* never 0: a block in use has memory even if all layers are windowed */
    cache->block_bytes = group->layers > 0 ? (size_t)group->layers * layer : MP_KV_BLOCK;
    cache->window_bytes = (size_t)group->window_layers * layer;
    mp_kv_arena_init(&cache->block_arena, cache->block_bytes, budget);
    mp_kv_arena_init(&cache->window_arena, cache->window_bytes, budget);
}

static void drop_tables(mp_kv_cache *cache) {
    mp_free(cache->memory);
    mp_free(cache->references);
    mp_free(cache->free_ids);
    mp_free(cache->empty_ids);
    mp_free(cache->window_memory);
    mp_free(cache->window_references);
    mp_free(cache->spare);
    cache->memory = cache->window_memory = cache->spare = NULL;
    cache->references = cache->free_ids = cache->empty_ids = cache->window_references = NULL;
    cache->blocks = cache->free_count = cache->empty_count = cache->spare_count = cache->capacity = 0;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

void mp_kv_deinit(mp_kv_cache *cache) {
    for (uint32_t i = 0; i < cache->blocks; i++) {
        if (cache->memory[i])
            mp_kv_arena_give(&cache->block_arena, cache->memory[i]);
        if (cache->window_bytes && cache->window_memory[i])
            mp_kv_arena_give(&cache->window_arena, cache->window_memory[i]);
    }
    while (cache->spare_count > 0)
        mp_kv_arena_give(&cache->window_arena, cache->spare[--cache->spare_count]);
    drop_tables(cache);
    mp_kv_arena_deinit(&cache->block_arena);
    mp_kv_arena_deinit(&cache->window_arena);
}

static bool grow_list(uint32_t **list, uint32_t capacity) {
    uint32_t *grown = mp_realloc(*list, capacity * sizeof *grown, MP_TAG_KV);
    if (grown)
        *list = grown;
    return grown != NULL;
}

static bool grow_pointers(void ***list, uint32_t capacity) {
    void **grown = mp_realloc(*list, capacity * sizeof *grown, MP_TAG_KV);
    if (grown)
        *list = grown;
    return grown != NULL;
}

static mp_status kv_grow(mp_kv_cache *cache, mp_error *error) {
    uint32_t capacity = cache->capacity ? 2 * cache->capacity : 64;
    bool grown = grow_pointers(&cache->memory, capacity) && grow_list(&cache->references, capacity) &&
                 grow_list(&cache->free_ids, capacity) && grow_list(&cache->empty_ids, capacity);
    if (grown && cache->window_bytes)
        grown = grow_pointers(&cache->window_memory, capacity) && grow_pointers(&cache->spare, capacity) &&
                grow_list(&cache->window_references, capacity);
    const size_t each = sizeof(void *) + 3 * sizeof(uint32_t),
                 more = cache->window_bytes ? 2 * sizeof(void *) + sizeof(uint32_t) : 0;
    if (!grown)
        return mp_fail_memory(error, capacity * (each + more), "the KV table");
    cache->capacity = capacity;
    return MP_OK;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Returns an id without memory: one whose memory was released, or a new id. */
static mp_status empty_id(mp_kv_cache *cache, uint32_t *id, mp_error *error) {
    if (cache->empty_count > 0) {
        *id = cache->empty_ids[--cache->empty_count];
        return MP_OK;
    }
    if (cache->blocks == cache->capacity)
        MP_TRY(kv_grow(cache, error));
    *id = cache->blocks++;
    cache->memory[*id] = NULL;
    cache->references[*id] = 0;
    if (cache->window_bytes) {
        cache->window_memory[*id] = NULL;
        cache->window_references[*id] = 0;
    }
    return MP_OK;
}

/* Returns an id with block memory but without a window part: that of a free block, or of a newly allocated block.
 * *zero: the memory is zero. */
static mp_status take_block(mp_kv_cache *cache, uint32_t *id, bool *zero, mp_error *error) {
    *zero = false;
    if (cache->free_count > 0) {
        *id = cache->free_ids[--cache->free_count];
        return MP_OK;
    }
    void *memory;
    MP_TRY(mp_kv_arena_take(&cache->block_arena, &memory, zero, error));
    mp_status status = empty_id(cache, id, error);
    if (status != MP_OK) {
        mp_kv_arena_give(&cache->block_arena, memory);
        return status;
    }
    cache->memory[*id] = memory;
    return MP_OK;
}

static mp_status add_window(mp_kv_cache *cache, uint32_t id, mp_error *error) {
    void **part = &cache->window_memory[id];
    bool zero = false;
    if (cache->spare_count > 0)
        *part = cache->spare[--cache->spare_count];
    else
        MP_TRY(mp_kv_arena_take(&cache->window_arena, part, &zero, error));
    if (!zero)
        memset(*part, 0, cache->window_bytes);
    cache->window_references[id] = 1;
    return MP_OK;
}

mp_status mp_kv_take(mp_kv_cache *cache, uint32_t *id, mp_error *error) {
    bool zero;
    MP_TRY(take_block(cache, id, &zero, error));
    mp_status status = cache->window_bytes ? add_window(cache, *id, error) : MP_OK;
    if (status != MP_OK) {
        cache->free_ids[cache->free_count++] = *id;
        return status;
    }
    /* Attention reads slots beyond the end of a sequence before it masks them, so they must be finite. */
    if (!zero)
        memset(cache->memory[*id], 0, cache->block_bytes);
    cache->references[*id] = 1;
    return MP_OK;
}

void mp_kv_share(mp_kv_cache *cache, uint32_t id) {
    assert(cache->references[id] > 0);
    cache->references[id]++;
}

/* `spare` has room: there are never more window parts than ids. */
void mp_kv_forget(mp_kv_cache *cache, uint32_t id) {
    assert(cache->window_references[id] == 0 && cache->window_memory[id]);
    cache->spare[cache->spare_count++] = cache->window_memory[id];
    cache->window_memory[id] = NULL;
}

void mp_kv_move(mp_kv_cache *cache, uint32_t from, uint32_t id) {
    assert(cache->window_references[from] == 0 && cache->window_references[id] == 0 && !cache->window_memory[id]);
    cache->window_memory[id] = cache->window_memory[from];
    cache->window_memory[from] = NULL;
}

void mp_kv_give(mp_kv_cache *cache, uint32_t id) {
    assert(cache->references[id] > 0);
    if (--cache->references[id] > 0)
        return;
    if (cache->window_bytes && cache->window_memory[id])
        mp_kv_forget(cache, id);
    cache->free_ids[cache->free_count++] = id;
}

size_t mp_kv_release(mp_kv_cache *cache) {
    size_t bytes = 0;
    while (bytes == 0 && cache->spare_count > 0)
        bytes = mp_kv_arena_give(&cache->window_arena, cache->spare[--cache->spare_count]);
    while (bytes == 0 && cache->free_count > 0) {
        const uint32_t id = cache->free_ids[--cache->free_count];
        bytes = mp_kv_arena_give(&cache->block_arena, cache->memory[id]);
        cache->memory[id] = NULL;
        cache->empty_ids[cache->empty_count++] = id;
    }
    return bytes;
}

uint64_t mp_kv_trim(mp_kv_cache *cache) {
    uint64_t bytes = 0;
    for (size_t more; (more = mp_kv_release(cache)) > 0;)
        bytes += more;
    if (cache->empty_count == cache->blocks) {
        drop_tables(cache);
        mp_kv_arena_deinit(&cache->block_arena);
        mp_kv_arena_deinit(&cache->window_arena);
    }
    return bytes;
}

void mp_kv_put(const mp_kv_cache *cache, uint32_t id, int layer, int head, int slot, const float *k, const float *v) {
    const mp_kernels *call = mp_kernels_get();
    const mp_kv_group *group = &cache->group;
    (group->dtype == MP_F32   ? call->kv_store
     : group->dtype == MP_I16 ? call->kv_store_i16
                              : call->kv_store_i8)(k, v, group->k_dim, group->v_dim, slot,
                                                   mp_kv_k(cache, id, layer, head), mp_kv_v(cache, id, layer, head));
}
