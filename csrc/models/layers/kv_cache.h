/* kv_cache.h: keys and values of all sequences of an engine, in blocks of MP_KV_BLOCK tokens with reference counts.
 *
 * One block id stands for the same 64 positions in every layer and head:
 *
 *   block memory:  layer 0: head 0 [K block][V block] as kernels.h has them  head 1 ...   layer 1: ...
 *
 * A group says how layers, heads and sizes go (include the layers that are alike; sliding-window layers would be a
 * group of their own). Blocks are charged to the budget when their memory is made and kept for reuse until released.
 * One thread at a time. Blocks that can be found again by their contents: prefix_cache.h, which owns this. */
#ifndef MP_MODELS_LAYERS_KV_CACHE_H
#define MP_MODELS_LAYERS_KV_CACHE_H

#include "base/alloc.h"
#include "kernels/kernels.h"

typedef struct mp_kv_group {
    int layers, heads, k_dim, v_dim;
    int window; /* 0 = every position is kept */
    mp_dtype dtype; /* F32 or I16 */
} mp_kv_group;

typedef struct mp_kv_cache {
    mp_kv_group group;
    size_t k_bytes, v_bytes; /* of one layer and head in a block */
    size_t block_bytes;
    mp_budget *budget;
    void **memory;        /* [blocks] */
    uint32_t *references; /* [blocks]; 0 = free */
    uint32_t *free_ids;   /* [free_count] whose memory is there */
    uint32_t *empty_ids;  /* [empty_count] below `blocks` whose memory was given back */
    uint32_t blocks, free_count, empty_count;
    uint32_t capacity; /* of the four lists */
} mp_kv_cache;

void mp_kv_init(mp_kv_cache *cache, const mp_kv_group *group, mp_budget *budget);
void mp_kv_deinit(mp_kv_cache *cache);
/* A zeroed block with one reference. MEMORY_EXHAUSTED when the budget or the system refuses. */
mp_status mp_kv_take(mp_kv_cache *cache, uint32_t *id, mp_error *error);
void mp_kv_share(mp_kv_cache *cache, uint32_t id); /* one reference more */
void mp_kv_give(mp_kv_cache *cache, uint32_t id);  /* one less; free at 0 */
/* Give the memory of one free block back, to the budget and to the system (a block is an allocation of its own, which
 * from 256 KiB up is a mapping of its own). False: none is free. */
bool mp_kv_release(mp_kv_cache *cache);
/* The same for all free blocks, and the tables when no block is left; returns bytes. */
uint64_t mp_kv_trim(mp_kv_cache *cache);

static inline void *mp_kv_k(const mp_kv_cache *cache, uint32_t id, int layer, int head) {
    size_t index = (size_t)layer * (size_t)cache->group.heads + (size_t)head;
    return (uint8_t *)cache->memory[id] + index * (cache->k_bytes + cache->v_bytes);
}
static inline void *mp_kv_v(const mp_kv_cache *cache, uint32_t id, int layer, int head) {
    return (uint8_t *)mp_kv_k(cache, id, layer, head) + cache->k_bytes;
}

/* Store the key and value of one token and head in the cache's form. Other slots may be stored by others meanwhile. */
void mp_kv_put(const mp_kv_cache *cache, uint32_t id, int layer, int head, int slot, const float *k, const float *v);

#endif
