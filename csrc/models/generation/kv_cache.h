/* generation/kv_cache.h: keys and values of all sequences of an engine, in reference-counted blocks of MP_KV_BLOCK
 * tokens.
 *
 * A store holds the keys and values that one mixer writes; any number of mixers may read it. Each store has its own
 * number of heads, widths and window. One block id stands for the same 64 positions in all stores. The stores of a
 * block lie in its parts: part 0 has those that keep every position, and each further part those of one window.
 *
 *   part 0:  store 0: head 0 [K block][V block] as kernels.h has them  head 1 ...   store 1: ...
 *   part 1:  stores of a window            part 2:  stores of another window
 *
 * A window's part can be released as soon as no sequence's window reaches the block, so the window bounds its memory.
 * `references` of such a part counts the sequences whose window reaches it; mp_kv_cache.references counts the
 * references to the block, and thereby to part 0.
 *
 * Parts lie in regions of huge pages (generation/kv_arena.h), which are charged to the budget as a whole. The memory of
 * free parts is kept for reuse until mp_kv_release. One thread at a time. generation/prefix_cache.h owns this cache and
 * finds blocks by their contents; generation/cache_parts.h is what sequences use. */
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

enum {
    MP_KV_PARTS = 4,      /* maximum number of parts: part 0, and three windows */
    MP_KV_DIM_MAX = 5120, /* components of a key or value; those of latent attention are the longest */
};

typedef struct mp_kv_store {
    int heads, k_dim, v_dim;
    int window; /* a row sees only the last `window` positions, its own included; 0: all */
    /* set by mp_kv_lay_out: */
    int part;
    size_t offset;           /* place in the part */
    size_t k_bytes, v_bytes; /* bytes of the keys, and of the values, of one head in a block */
} mp_kv_store;

typedef struct mp_kv_layout {
    mp_dtype dtype; /* mp_kv_dtype */
    int count, parts;
    const mp_kv_store *stores;  /* [count] must outlive the caches */
    int window[MP_KV_PARTS];    /* [parts] window of all stores in the part; 0: all positions */
    size_t bytes[MP_KV_PARTS];  /* [parts] bytes of the part in a block */
    size_t state_bytes, log_bytes; /* a sequence's state, and its log: generation/states.h. 0: it has none */
} mp_kv_layout;

/* Lays out the stores, whose places it sets; the caller sets the sizes of states. The first three different windows get
 * parts of their own; stores with further windows keep every position, in part 0. */
mp_kv_layout mp_kv_lay_out(mp_kv_store *stores, int count, mp_dtype dtype);

typedef struct mp_kv_part {
    mp_kv_arena arena;
    void **memory;        /* [blocks] NULL: the block does not have the part */
    uint32_t *references; /* [blocks] sequences that see the part; NULL in part 0, where the block's references count */
    void **spare;         /* [spare_count] unused memory */
    uint32_t spare_count;
} mp_kv_part;

typedef struct mp_kv_cache {
    mp_kv_layout layout;
    mp_budget *budget;
    mp_kv_part part[MP_KV_PARTS];
    uint32_t *references; /* [blocks]; 0 = free */
    uint32_t *free_ids;   /* [free_count] ids below `blocks` without references, which have no memory */
    uint32_t blocks, free_count;
    uint32_t capacity; /* capacity of each list */
} mp_kv_cache;

void mp_kv_init(mp_kv_cache *cache, const mp_kv_layout *layout, mp_budget *budget);
void mp_kv_deinit(mp_kv_cache *cache);
/* Allocates a zeroed block with all its parts, and one reference to the block and to each part. MEMORY_EXHAUSTED when
 * the budget or the system refuses. */
mp_status mp_kv_take(mp_kv_cache *cache, uint32_t *id, mp_error *error);
void mp_kv_share(mp_kv_cache *cache, uint32_t id); /* adds a reference */
/* Drops a reference; the last drop frees the block. `references` of its windows must then be 0. */
void mp_kv_give(mp_kv_cache *cache, uint32_t id);
/* mp_kv_forget removes a window's part of a block and keeps its memory as a spare. mp_kv_move moves the part of block
 * `from` to block `id`, which must not have it. `references` of the part must be 0 for each of these blocks. */
void mp_kv_forget(mp_kv_cache *cache, int part, uint32_t id);
void mp_kv_move(mp_kv_cache *cache, int part, uint32_t from, uint32_t id);
/* Copies all parts of a block, which both blocks must have. */
void mp_kv_copy(mp_kv_cache *cache, uint32_t from, uint32_t id);
/* Stores zeros in `count` slots of all stores, from `slot` on. The block must have all its parts. */
void mp_kv_wipe(mp_kv_cache *cache, uint32_t id, int slot, int count);
/* Gives spare memory back to the arenas until one region is empty, which returns to the budget and to the system.
 * Returns the bytes of that region. 0: no region became empty, and nothing is unused any more; regions with blocks in
 * use may have free slots. */
size_t mp_kv_release(mp_kv_cache *cache);
/* Releases all spare memory, and the tables if no block has memory any more. Returns the bytes released. */
uint64_t mp_kv_trim(mp_kv_cache *cache);

uint64_t mp_kv_charged(const mp_kv_cache *cache); /* bytes charged to the budget */
/* Returns true if a part has so much spare memory that the next block does not need all of it. */
bool mp_kv_has_spare(const mp_kv_cache *cache);

static inline bool mp_kv_has(const mp_kv_cache *cache, int part, uint32_t id) {
    return cache->part[part].memory[id] != NULL;
}
/* Returns the index of the first block whose part a row at `position` reads. The row reads the part of this block and
 * of all later ones. */
static inline int mp_kv_first_seen(int window, int64_t position) {
    int64_t oldest = position - window + 1;
    return window > 0 && oldest > 0 ? (int)(oldest / MP_KV_BLOCK) : 0;
}

/* mp_kv_k returns the keys, mp_kv_v the values, of one head of a store in a block: MP_KV_BLOCK tokens. The block must
 * have the part of the store. */
static inline void *mp_kv_k(const mp_kv_cache *cache, uint32_t id, int store, int head) {
    const mp_kv_store *at = &cache->layout.stores[store];
    return (uint8_t *)cache->part[at->part].memory[id] + at->offset + (size_t)head * (at->k_bytes + at->v_bytes);
}
static inline void *mp_kv_v(const mp_kv_cache *cache, uint32_t id, int store, int head) {
    return (uint8_t *)mp_kv_k(cache, id, store, head) + cache->layout.stores[store].k_bytes;
}

/* Returns the bytes of one token in all stores. */
int64_t mp_kv_token_bytes(const mp_kv_layout *layout);

/* Stores the key and value of one token and head in the cache's type. Other threads may store to other slots at the
 * same time. */
void mp_kv_put(const mp_kv_cache *cache, uint32_t id, int store, int head, int slot, const float *k, const float *v);

#endif
