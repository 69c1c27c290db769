/* generation/prefix_cache.h: the KV blocks of an engine's sequences, found again by what they hold, so that a prompt
 * that starts like an earlier one (system prompt, chat history) is not computed again.
 *
 * When all MP_KV_BLOCK tokens of a block have been computed, its sequence publishes it. Its key is a 128-bit hash of
 * the key of the block before it and of its tokens; the first hangs on a seed (model, arithmetic, type of the cache)
 * and the tenant. Keys only lead to a block: what decides is that tenant, predecessor (the block itself, not its key)
 * and tokens are equal, so a collision costs time and never gives a wrong text.
 *
 *   references of a block = sequences that hold it + 1 when it is published
 *
 *   taken --publish--> published, in use --last sequence gives it--> published, idle --evict--> free
 *                            ^------------------- find ---------------------'
 *
 * Idle blocks stand in a list by the time of their last use, of which the oldest goes first. A sequence holds all
 * blocks before the last that it holds, and gives them back from the last to the first: so in the list a block comes
 * before the one it hangs on, and leaves go before what they hang on.
 *
 * Window parts (generation/kv_cache.h) have a list like that of their own: a part that no sequence sees stays, while
 * its block is published, until its memory is wanted. A sequence can go on after n blocks only where the parts that its
 * next row sees are still there, which mp_prefix_reach looks up.
 *
 * Idle blocks are memory that nobody needs: a block that is taken, or a shrink, gets it. Beyond that at most
 * `percent` of the budget's limit is idle. One thread at a time, but for the counters. */
#ifndef MP_MODELS_GENERATION_PREFIX_CACHE_H
#define MP_MODELS_GENERATION_PREFIX_CACHE_H

#include "models/engine.h"
#include "models/generation/kv_cache.h"

#define MP_PREFIX_NONE UINT32_MAX

typedef struct mp_prefix_key {
    uint64_t a, b;
} mp_prefix_key;

typedef struct mp_prefix_block { /* what is known of a block id */
    mp_prefix_key key;
    uint32_t parent, tenant;
    bool variant;
    uint32_t children;     /* published blocks that hang on it */
    uint32_t next;         /* with the same hash */
    uint32_t older, newer; /* in the list, when idle */
    uint32_t window_older, window_newer; /* in the list of parts, when nobody sees its own */
    bool published;
    int32_t tokens[MP_KV_BLOCK];
} mp_prefix_block;

typedef struct mp_prefix_cache {
    mp_kv_cache kv;
    mp_prefix_block *known; /* [capacity] by block id */
    uint32_t *buckets;      /* [capacity] first block of a hash */
    uint32_t capacity;      /* a power of two, or 0 */
    uint32_t oldest, newest, idle;
    uint32_t window_oldest, window_newest, window_idle;
    uint32_t percent;
    mp_prefix_key seed;
    mp_prefix_counters counters;
} mp_prefix_cache;

typedef struct mp_prefix_chain { /* the published blocks that a sequence starts with */
    uint32_t count, last;        /* how many; the last of them */
    uint32_t tenant;
    bool variant;       /* of two ways to compute a sequence, which share no block */
    bool closed;        /* no more can be published or found */
    bool key_known;     /* of the block after them: */
    mp_prefix_key key;
} mp_prefix_chain;

/* percent: see above; 0 = nothing is published, and blocks are only counted. */
void mp_prefix_init(mp_prefix_cache *cache, const mp_kv_group *group, mp_budget *budget, uint32_t percent);
/* Mix something that the contents of all blocks depend on into the seed. Before anything is published. */
void mp_prefix_seed(mp_prefix_cache *cache, const char *text);
void mp_prefix_deinit(mp_prefix_cache *cache);

/* As mp_kv_take, _share and _give; the memory of idle blocks counts as free. A published block becomes idle when its
 * last sequence gives it. */
mp_status mp_prefix_take(mp_prefix_cache *cache, uint32_t *id, mp_error *error);
void mp_prefix_share(mp_prefix_cache *cache, uint32_t id);
void mp_prefix_give(mp_prefix_cache *cache, uint32_t id);
/* One sequence more, or less, sees the window part of a block that it holds. To see is legal only where the part is
 * there. Whoever takes or publishes a block sees it; who finds or shares one does not yet. Give only what is not seen.
 * Without window layers both do nothing. */
void mp_prefix_ref(mp_prefix_cache *cache, uint32_t id);
void mp_prefix_unref(mp_prefix_cache *cache, uint32_t id);
/* How many more of the blocks that come after the chain, up to `most`, can be found and be gone on after. tokens
 * [most * MP_KV_BLOCK]. The caller sees all that it holds from the first block that its next row sees. */
uint32_t mp_prefix_reach(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t most);
/* A block of the caller's own with the same contents (all layers). */
mp_status mp_prefix_copy(mp_prefix_cache *cache, uint32_t from, uint32_t *id, mp_error *error);

mp_prefix_chain mp_prefix_begin(const mp_prefix_cache *cache, uint32_t tenant, bool variant);
/* The block that comes after the chain with these tokens [MP_KV_BLOCK], if it is there: *id, with a reference for the
 * caller, is then the chain's last. Tokens that are asked for again after a miss are not hashed again. */
bool mp_prefix_find(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t *id);
/* Let others find *id, the caller's block after the chain, computed from these tokens [MP_KV_BLOCK], which nobody may
 * write to any more. When an equal one is published already, *id is given back and becomes that one: same key, same
 * bytes. Refused memory closes the chain. */
void mp_prefix_publish(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t *id);
void mp_prefix_count_hit(mp_prefix_cache *cache, uint32_t tokens); /* a sequence went on after tokens that it found */

/* Give free, then idle blocks back to the budget and the system until at least so many bytes have been; returns the
 * bytes. */
uint64_t mp_prefix_shrink(mp_prefix_cache *cache, uint64_t bytes);
uint64_t mp_prefix_trim(mp_prefix_cache *cache); /* all of them, and tables that nothing is in */

#endif
