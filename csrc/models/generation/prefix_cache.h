/* generation/prefix_cache.h: KV blocks found by their contents, so that a prompt that starts like an earlier one
 * (system prompt, chat history) is not computed again.
 *
 * When all MP_KV_BLOCK tokens of a block have been computed, its sequence publishes it. The key of a block is a 128-bit
 * hash of its predecessor's key and its tokens; the key of a first block starts from a seed (model, compute type, cache
 * type) and the tenant. A key only leads to a candidate. It matches if tenant, predecessor (the block itself, not its
 * key) and tokens are equal, so a collision costs time and never gives a wrong text.
 *
 *   references of a block = sequences that hold it + 1 when it is published
 *
 *   taken --publish--> published, in use --last sequence gives it--> published, idle --evict--> free
 *                            ^------------------- find ---------------------'
 *
 * Idle blocks form a list by time of last use; the oldest is evicted first. A sequence holds all blocks before its last
 * block, and gives them back from the last to the first. So in the list a block precedes its predecessor, and leaves
 * are evicted first.
 *
 * Window parts (generation/kv_cache.h) have such a list of their own: the part of a published block that no sequence
 * sees stays until its memory is needed. A sequence can continue after n blocks only if the window parts that its next
 * row sees still exist; mp_prefix_reach checks this.
 *
 * Idle blocks are available memory: taking a block, or a shrink, evicts them. Apart from that at most `percent` of the
 * budget's limit is idle. One thread at a time, except for the counters. */
#ifndef MP_MODELS_GENERATION_PREFIX_CACHE_H
#define MP_MODELS_GENERATION_PREFIX_CACHE_H

#include "models/engine.h"
#include "models/generation/kv_cache.h"

#define MP_PREFIX_NONE UINT32_MAX

typedef struct mp_prefix_key {
    uint64_t a, b;
} mp_prefix_key;

typedef struct mp_prefix_block { /* the published state of a block id */
    mp_prefix_key key;
    uint32_t parent, tenant;
    bool variant;
    uint32_t children;     /* published blocks that follow it */
    uint32_t next;         /* next block in the same hash bucket */
    uint32_t older, newer; /* neighbours in the idle list */
    uint32_t window_older, window_newer; /* neighbours in the list of idle window parts */
    bool published;
    int32_t tokens[MP_KV_BLOCK];
} mp_prefix_block;

typedef struct mp_prefix_cache {
    mp_kv_cache kv;
    mp_prefix_block *known; /* [capacity] by block id */
    uint32_t *buckets;      /* [capacity] first block of each bucket */
    uint32_t capacity;      /* a power of two, or 0 */
    uint32_t oldest, newest, idle;
    uint32_t window_oldest, window_newest, window_idle;
    uint32_t percent;
    mp_prefix_key seed;
    mp_prefix_counters counters;
} mp_prefix_cache;

typedef struct mp_prefix_chain { /* the published blocks at the start of a sequence */
    uint32_t count, last;        /* their number; the last of them */
    uint32_t tenant;
    bool variant;       /* one of two ways to compute a sequence (LongRoPE), which share no block */
    bool closed;        /* nothing more can be published or found */
    bool key_known;     /* `key` is valid: the key of the next block */
    mp_prefix_key key;
} mp_prefix_chain;

/* percent: see above; 0 = blocks are only counted, never published. */
void mp_prefix_init(mp_prefix_cache *cache, const mp_kv_group *group, mp_budget *budget, uint32_t percent);
/* Mixes a property that the contents of all blocks depend on into the seed. Call before the first publish. */
void mp_prefix_seed(mp_prefix_cache *cache, const char *text);
void mp_prefix_deinit(mp_prefix_cache *cache);

/* Like mp_kv_take, _share and _give. mp_prefix_take evicts idle blocks if memory is short. A published block becomes
 * idle when its last sequence gives it. */
mp_status mp_prefix_take(mp_prefix_cache *cache, uint32_t *id, mp_error *error);
void mp_prefix_share(mp_prefix_cache *cache, uint32_t id);
void mp_prefix_give(mp_prefix_cache *cache, uint32_t id);
/* Adds or removes one sequence that sees the window part of a block it holds. mp_prefix_ref requires that the part
 * exists. Taking or publishing a block includes the ref; finding or sharing one does not. Unref a block before giving
 * it. No effect without window layers. */
void mp_prefix_ref(mp_prefix_cache *cache, uint32_t id);
void mp_prefix_unref(mp_prefix_cache *cache, uint32_t id);
/* Returns how many of the blocks after the chain, at most `most`, can be found and continued from. tokens [most *
 * MP_KV_BLOCK]. The caller must have a ref on all of its blocks from the first one that its next row sees. */
uint32_t mp_prefix_reach(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t most);
/* Takes a block with the contents of `from` (all layers). */
mp_status mp_prefix_copy(mp_prefix_cache *cache, uint32_t from, uint32_t *id, mp_error *error);

mp_prefix_chain mp_prefix_begin(const mp_prefix_cache *cache, uint32_t tenant, bool variant);
/* Finds the block after the chain with these tokens [MP_KV_BLOCK]. On success *id becomes the chain's last block, with
 * a reference for the caller. After a miss the next call does not hash the same tokens again. */
bool mp_prefix_find(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t *id);
/* Publishes *id, the caller's block after the chain, computed from these tokens [MP_KV_BLOCK]. No thread may write to
 * it any more. If an equal block is published already, gives *id back and sets *id to that block: same key, same bytes.
 * Closes the chain if memory is exhausted. */
void mp_prefix_publish(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t *id);
/* counts a sequence that continued after cached tokens */
void mp_prefix_count_hit(mp_prefix_cache *cache, uint32_t tokens);

/* Returns free blocks, then idle blocks, to the budget and the system until at least `bytes` are released. Returns the
 * number of bytes. */
uint64_t mp_prefix_shrink(mp_prefix_cache *cache, uint64_t bytes);
uint64_t mp_prefix_trim(mp_prefix_cache *cache); /* releases all of them, and the tables if they are empty */

#endif
