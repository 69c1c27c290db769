#include "models/layers/kv_cache.h"

#include <assert.h>
#include <string.h>

void mp_kv_init(mp_kv_cache *cache, const mp_kv_group *group, mp_budget *budget) {
    size_t item = group->dtype == MP_F32 ? 4 : 2;
    *cache = (mp_kv_cache){.group = *group, .budget = budget};
    cache->k_bytes = item * MP_KV_BLOCK * (size_t)group->k_dim;
    cache->v_bytes = item * MP_KV_BLOCK * (size_t)group->v_dim;
    cache->block_bytes = (size_t)group->layers * (size_t)group->heads * (cache->k_bytes + cache->v_bytes);
}

void mp_kv_deinit(mp_kv_cache *cache) {
    for (uint32_t i = 0; i < cache->blocks; i++)
        if (cache->memory[i]) {
            mp_free(cache->memory[i]);
            mp_budget_give(cache->budget, cache->block_bytes);
        }
    mp_free(cache->memory);
    mp_free(cache->references);
    mp_free(cache->free_ids);
    *cache = (mp_kv_cache){0};
}

static mp_status grow(mp_kv_cache *cache, mp_error *error) {
    uint32_t capacity = cache->capacity ? 2 * cache->capacity : 64;
    void **memory = mp_realloc(cache->memory, capacity * sizeof *memory, MP_TAG_KV);
    if (memory)
        cache->memory = memory;
    uint32_t *references = mp_realloc(cache->references, capacity * sizeof *references, MP_TAG_KV);
    if (references)
        cache->references = references;
    uint32_t *free_ids = mp_realloc(cache->free_ids, capacity * sizeof *free_ids, MP_TAG_KV);
    if (free_ids)
        cache->free_ids = free_ids;
    if (!memory || !references || !free_ids)
        return mp_fail_memory(error, capacity * (sizeof *memory + sizeof *references + sizeof *free_ids),
                              "the KV table");
    cache->capacity = capacity;
    return MP_OK;
}

/* An id without memory, from a slot that trim emptied or a new one. */
static mp_status empty_id(mp_kv_cache *cache, uint32_t *id, mp_error *error) {
    for (uint32_t i = 0; cache->empty_count > 0 && i < cache->blocks; i++)
        if (!cache->memory[i]) {
            cache->empty_count--;
            *id = i;
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

mp_status mp_kv_copy(mp_kv_cache *cache, uint32_t from, uint32_t *id, mp_error *error) {
    MP_TRY(mp_kv_take(cache, id, error));
    memcpy(cache->memory[*id], cache->memory[from], cache->block_bytes);
    return MP_OK;
}

uint64_t mp_kv_trim(mp_kv_cache *cache) {
    uint64_t bytes = 0;
    while (cache->free_count > 0) {
        uint32_t id = cache->free_ids[--cache->free_count];
        mp_free(cache->memory[id]);
        cache->memory[id] = NULL;
        cache->empty_count++;
        mp_budget_give(cache->budget, cache->block_bytes);
        bytes += cache->block_bytes;
    }
    return bytes;
}
