/* generation/kv_cache.h: keys and values of all sequences of an engine, in blocks of MP_KV_BLOCK tokens with reference
 * counts.
 *
 * One block id stands for the same 64 positions in every layer and head:
 *
 *   block memory:  layer 0: head 0 [K block][V block] as kernels.h has them  head 1 ...   layer 1: ...
 *
 * Layers that attend to a window stand in memory of their own, a block's window part, which goes as soon as no sequence
 * can see the block through its window any more: so what such layers hold is bounded by the window. `layer` counts the
 * layers that keep everything first, then those of the window. Who sees a part is counted beside the references.
 *
 * Memory is charged to the budget when it is made and kept for reuse until released. One thread at a time. Blocks that
 * can be found again by their contents: generation/prefix_cache.h, which owns this. */
#ifndef MP_MODELS_GENERATION_KV_CACHE_H
#define MP_MODELS_GENERATION_KV_CACHE_H

#include "base/alloc.h"
#include "kernels/kernels.h"

/* The type of keys and values: fp32 for models that compute in fp32 alone, else integers of 13 and 12 bits. */
static inline mp_dtype mp_kv_dtype(bool is_float32) { return is_float32 ? MP_F32 : MP_I16; }

typedef struct mp_kv_group {
    int layers;        /* that keep every position */
    int window_layers; /* whose rows see the last `window` positions only, their own included */
    int window;
    int heads, k_dim, v_dim;
    mp_dtype dtype; /* mp_kv_dtype */
} mp_kv_group;

typedef struct mp_kv_cache {
    mp_kv_group group;
    size_t k_bytes, v_bytes; /* of one layer and head in a block */
    size_t block_bytes, window_bytes; /* of a block without, and of its window part; 0 = there are none */
    uint64_t bytes;                   /* held of the budget */
    mp_budget *budget;
    void **memory;        /* [blocks] */
    uint32_t *references; /* [blocks]; 0 = free */
    void **window_memory; /* [blocks]; NULL = the part has gone. Without window layers: none of these lists */
    uint32_t *seen;       /* [blocks] sequences that see the part */
    void **spare;         /* [spare_count] parts that nobody has */
    uint32_t *free_ids;   /* [free_count] whose memory is there */
    uint32_t *empty_ids;  /* [empty_count] below `blocks` whose memory was given back */
    uint32_t blocks, free_count, empty_count, spare_count;
    uint32_t capacity; /* of the lists */
} mp_kv_cache;

void mp_kv_init(mp_kv_cache *cache, const mp_kv_group *group, mp_budget *budget);
void mp_kv_deinit(mp_kv_cache *cache);
/* A zeroed block with one reference, its window part seen by one. MEMORY_EXHAUSTED when the budget or the system
 * refuses. */
mp_status mp_kv_take(mp_kv_cache *cache, uint32_t *id, mp_error *error);
void mp_kv_share(mp_kv_cache *cache, uint32_t id); /* one reference more */
void mp_kv_give(mp_kv_cache *cache, uint32_t id);  /* one less; free at 0, when nobody may see its window part */
/* The window part of a block that nobody sees goes; or becomes that of another, which has none. */
void mp_kv_forget(mp_kv_cache *cache, uint32_t id);
void mp_kv_move(mp_kv_cache *cache, uint32_t from, uint32_t id);
/* Give a window part that nobody has, or else the memory of a free block, back to the budget and to the system (each is
 * an allocation of its own, which from 256 KiB up is a mapping of its own). Returns its bytes; 0: there is none. */
size_t mp_kv_release(mp_kv_cache *cache);
/* The same for all free blocks, and the tables when no block is left; returns bytes. */
uint64_t mp_kv_trim(mp_kv_cache *cache);

/* Whether the block's window part is there; true without window layers. */
static inline bool mp_kv_has_window(const mp_kv_cache *cache, uint32_t id) {
    return cache->window_bytes == 0 || cache->window_memory[id];
}
/* The first block that a row at `position` sees through the window, so that all from there on are needed. */
static inline int mp_kv_first_seen(const mp_kv_group *group, int64_t position) {
    int64_t oldest = position - group->window + 1;
    return group->window > 0 && oldest > 0 ? (int)(oldest / MP_KV_BLOCK) : 0;
}

static inline void *mp_kv_k(const mp_kv_cache *cache, uint32_t id, int layer, int head) {
    bool windowed = layer >= cache->group.layers;
    size_t index = (size_t)(windowed ? layer - cache->group.layers : layer) * (size_t)cache->group.heads + (size_t)head;
    return (uint8_t *)(windowed ? cache->window_memory : cache->memory)[id] + index * (cache->k_bytes + cache->v_bytes);
}
static inline void *mp_kv_v(const mp_kv_cache *cache, uint32_t id, int layer, int head) {
    return (uint8_t *)mp_kv_k(cache, id, layer, head) + cache->k_bytes;
}

/* Store the key and value of one token and head in the cache's form. Other slots may be stored by others meanwhile. */
void mp_kv_put(const mp_kv_cache *cache, uint32_t id, int layer, int head, int slot, const float *k, const float *v);

#endif
