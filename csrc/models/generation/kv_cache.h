/* generation/kv_cache.h: keys and values of all sequences of an engine, in reference-counted blocks of MP_KV_BLOCK
 * tokens.
 *
 * One block id stands for the same 64 positions in every layer and head:
 *
 *   block memory:  layer 0: head 0 [K block][V block] as kernels.h has them  head 1 ...   layer 1: ...
 *
 * Layers with a sliding window have memory of their own, the window part of a block. The part can be released as soon
 * as no sequence's window reaches the block, so the window bounds the memory of these layers. `window_references`
 * counts the sequences whose window reaches a window part; `references` counts the references to the block. The
 * argument `layer` counts the full layers first, then the window layers.
 *
 * Blocks and window parts lie in regions of huge pages (generation/kv_arena.h), which are charged to the budget as a
 * whole. Free blocks and unused window parts keep their memory for reuse until mp_kv_release. One thread at a time.
 * generation/prefix_cache.h owns this cache and finds blocks by their contents. */
#ifndef MP_MODELS_GENERATION_KV_CACHE_H
#define MP_MODELS_GENERATION_KV_CACHE_H

#include "kernels/kernels.h"
#include "models/generation/kv_arena.h"

/* Returns the type of keys and values: bytes if the caller asked for them; otherwise fp32 for models that compute in
 * fp32 only, and integers of 13 bits (keys) and 12 bits (values) for all others. */
static inline mp_dtype mp_kv_dtype(bool is_float32, bool in_bytes) {
    return in_bytes ? MP_I8 : is_float32 ? MP_F32 : MP_I16;
}
/* Name of the type, as the facts of a model report it. */
static inline const char *mp_kv_dtype_name(mp_dtype dtype) {
    return dtype == MP_F32 ? "float32" : dtype == MP_I16 ? "int16" : "int8";
}

typedef struct mp_kv_group {
    int layers;        /* layers that keep every position */
    int window_layers; /* layers whose rows see only the last `window` positions, their own included */
    int window;
    int heads, k_dim, v_dim;
    mp_dtype dtype; /* mp_kv_dtype */
} mp_kv_group;

typedef struct mp_kv_cache {
    mp_kv_group group;
    size_t k_bytes, v_bytes; /* bytes of the keys, and of the values, of one layer and head in a block */
    size_t block_bytes, window_bytes; /* bytes of a block without its window part, and of the window part; 0 = no window
                                       * part */
    mp_budget *budget;
    mp_kv_arena block_arena, window_arena; /* memory of the blocks, and of the window parts */
    void **memory;                     /* [blocks] */
    uint32_t *references; /* [blocks]; 0 = free */
    /* NULL without window layers: */
    void **window_memory;        /* [blocks]; NULL = released */
    uint32_t *window_references; /* [blocks] sequences whose sliding window reaches the window part */
    void **spare;                /* [spare_count] unused window parts */
    uint32_t *free_ids;   /* [free_count] free ids whose memory is kept */
    uint32_t *empty_ids;  /* [empty_count] ids below `blocks` whose memory was released */
    uint32_t blocks, free_count, empty_count, spare_count;
    uint32_t capacity; /* capacity of each list */
} mp_kv_cache;

void mp_kv_init(mp_kv_cache *cache, const mp_kv_group *group, mp_budget *budget);
void mp_kv_deinit(mp_kv_cache *cache);
/* Allocates a zeroed block with one reference and, if there are window layers, a window part with one
 * reference. MEMORY_EXHAUSTED when the budget or the system refuses. */
mp_status mp_kv_take(mp_kv_cache *cache, uint32_t *id, mp_error *error);
void mp_kv_share(mp_kv_cache *cache, uint32_t id); /* adds a reference */
/* Drops a reference; the last drop frees the block, whose `window_references` must then be 0. */
void mp_kv_give(mp_kv_cache *cache, uint32_t id);
/* mp_kv_forget removes the window part of a block and keeps it as a spare. mp_kv_move moves the window part of block
 * `from` to block `id`, which must have none. `window_references` must be 0 for each of these blocks. */
void mp_kv_forget(mp_kv_cache *cache, uint32_t id);
void mp_kv_move(mp_kv_cache *cache, uint32_t from, uint32_t id);
/* Gives unused window parts, then free blocks, back to their arenas until one region is empty, which returns to the
 * budget and to the system. Returns the bytes of that region. 0: no region became empty, and nothing is unused any
 * more; regions with blocks in use may have free slots. */
size_t mp_kv_release(mp_kv_cache *cache);
/* Releases all unused window parts and free blocks, and the tables if no block has memory any more. Returns the bytes
 * released. */
uint64_t mp_kv_trim(mp_kv_cache *cache);

/* Returns the bytes charged to the budget. */
static inline uint64_t mp_kv_charged(const mp_kv_cache *cache) {
    return cache->block_arena.bytes + cache->window_arena.bytes;
}

/* Returns true if the block has its window part, or the cache has no window layers. */
static inline bool mp_kv_has_window(const mp_kv_cache *cache, uint32_t id) {
    return cache->window_bytes == 0 || cache->window_memory[id];
}
/* Returns the index of the first block that a row at `position` sees through the window. The row needs this block and
 * all later ones. */
static inline int mp_kv_first_seen(const mp_kv_group *group, int64_t position) {
    int64_t oldest = position - group->window + 1;
    return group->window > 0 && oldest > 0 ? (int)(oldest / MP_KV_BLOCK) : 0;
}

/* mp_kv_k returns the keys, mp_kv_v the values, of one layer and head in a block: MP_KV_BLOCK tokens. For a window
 * layer, the block must have its window part. */
static inline void *mp_kv_k(const mp_kv_cache *cache, uint32_t id, int layer, int head) {
    bool windowed = layer >= cache->group.layers;
    size_t index = (size_t)(windowed ? layer - cache->group.layers : layer) * (size_t)cache->group.heads + (size_t)head;
    return (uint8_t *)(windowed ? cache->window_memory : cache->memory)[id] + index * (cache->k_bytes + cache->v_bytes);
}
static inline void *mp_kv_v(const mp_kv_cache *cache, uint32_t id, int layer, int head) {
    return (uint8_t *)mp_kv_k(cache, id, layer, head) + cache->k_bytes;
}

/* Returns the bytes of one token in all layers and heads. */
static inline int64_t mp_kv_token_bytes(const mp_kv_group *group) {
    const size_t head = mp_kv_bytes(group->dtype, group->k_dim) + mp_kv_bytes(group->dtype, group->v_dim);
    return (int64_t)head * (group->layers + group->window_layers) * group->heads / MP_KV_BLOCK;
}

/* Stores the key and value of one token and head in the cache's type. Other threads may store to other slots at the
 * same time. */
void mp_kv_put(const mp_kv_cache *cache, uint32_t id, int layer, int head, int slot, const float *k, const float *v);

#endif
