#include "models/layers/kv_cache.h"

#include <assert.h>
#include <string.h>

void mp_kv_init(mp_kv_cache *cache, const mp_kv_group *group, mp_budget *budget) {
    *cache = (mp_kv_cache){.group = *group, .budget = budget};
    cache->k_bytes = mp_kv_bytes(group->dtype, group->k_dim);
    cache->v_bytes = mp_kv_bytes(group->dtype, group->v_dim);
    cache->block_bytes = (size_t)group->layers * (size_t)group->heads * (cache->k_bytes + cache->v_bytes);
}

static void drop_tables(mp_kv_cache *cache) {
    mp_free(cache->memory);
    mp_free(cache->references);
    mp_free(cache->free_ids);
    mp_free(cache->empty_ids);
    cache->memory = NULL;
    cache->references = cache->free_ids = cache->empty_ids = NULL;
    cache->blocks = cache->free_count = cache->empty_count = cache->capacity = 0;
}

void mp_kv_deinit(mp_kv_cache *cache) {
    for (uint32_t i = 0; i < cache->blocks; i++)
        if (cache->memory[i]) {
            mp_free(cache->memory[i]);
            mp_budget_give(cache->budget, cache->block_bytes);
        }
    drop_tables(cache);
    *cache = (mp_kv_cache){0};
}

static bool grow_list(uint32_t **list, uint32_t capacity) {
    uint32_t *grown = mp_realloc(*list, capacity * sizeof *grown, MP_TAG_KV);
    if (grown)
        *list = grown;
    return grown != NULL;
}

static mp_status grow(mp_kv_cache *cache, mp_error *error) {
    uint32_t capacity = cache->capacity ? 2 * cache->capacity : 64;
    void **memory = mp_realloc(cache->memory, capacity * sizeof *memory, MP_TAG_KV);
    if (memory)
        cache->memory = memory;
    if (!memory || !grow_list(&cache->references, capacity) || !grow_list(&cache->free_ids, capacity) ||
        !grow_list(&cache->empty_ids, capacity))
        return mp_fail_memory(error, capacity * (sizeof *memory + 3 * sizeof(uint32_t)), "the KV table");
    cache->capacity = capacity;
    return MP_OK;
}

/* An id without memory, whose memory was given back or a new one. */
static mp_status empty_id(mp_kv_cache *cache, uint32_t *id, mp_error *error) {
    if (cache->empty_count > 0) {
        *id = cache->empty_ids[--cache->empty_count];
        return MP_OK;
    }
    if (cache->blocks == cache->capacity)
        MP_TRY(grow(cache, error));
    *id = cache->blocks++;
    cache->memory[*id] = NULL;
    cache->references[*id] = 0;
    return MP_OK;
}

mp_status mp_kv_take(mp_kv_cache *cache, uint32_t *id, mp_error *error) {
    if (cache->free_count > 0) {
        *id = cache->free_ids[--cache->free_count];
    } else {
        if (!mp_budget_take(cache->budget, cache->block_bytes))
            return mp_fail_memory(error, cache->block_bytes, "a KV block");
        void *memory = mp_alloc(cache->block_bytes, MP_TAG_KV);
        mp_status status =
            memory ? empty_id(cache, id, error) : mp_fail_memory(error, cache->block_bytes, "a KV block");
        if (status != MP_OK) {
            mp_free(memory);
            mp_budget_give(cache->budget, cache->block_bytes);
            return status;
        }
        cache->memory[*id] = memory;
    }
    /* slots beyond a sequence's end are read and masked: they must be finite */
    memset(cache->memory[*id], 0, cache->block_bytes);
    cache->references[*id] = 1;
    return MP_OK;
}

void mp_kv_share(mp_kv_cache *cache, uint32_t id) {
    assert(cache->references[id] > 0);
    cache->references[id]++;
}

void mp_kv_give(mp_kv_cache *cache, uint32_t id) {
    assert(cache->references[id] > 0);
    if (--cache->references[id] == 0)
        cache->free_ids[cache->free_count++] = id;
}

bool mp_kv_release(mp_kv_cache *cache) {
    if (cache->free_count == 0)
        return false;
    uint32_t id = cache->free_ids[--cache->free_count];
    mp_free(cache->memory[id]);
    cache->memory[id] = NULL;
    cache->empty_ids[cache->empty_count++] = id;
    mp_budget_give(cache->budget, cache->block_bytes);
    return true;
}

uint64_t mp_kv_trim(mp_kv_cache *cache) {
    uint64_t bytes = 0;
    while (mp_kv_release(cache))
        bytes += cache->block_bytes;
    if (cache->empty_count == cache->blocks)
        drop_tables(cache);
    return bytes;
}

void mp_kv_put(const mp_kv_cache *cache, uint32_t id, int layer, int head, int slot, const float *k, const float *v) {
    const mp_kernels *call = mp_kernels_get();
    const mp_kv_group *group = &cache->group;
    (group->dtype == MP_I16 ? call->kv_store_i16 : call->kv_store)(
        k, v, group->k_dim, group->v_dim, slot, mp_kv_k(cache, id, layer, head), mp_kv_v(cache, id, layer, head));
}
