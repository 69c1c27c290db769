/* generation/prefix_cache.h: KV blocks found by their contents, so that a prompt that starts like an earlier one
 * (system prompt, chat history) is not computed again.
 *
 * When all MP_KV_BLOCK tokens of a block have been computed, its sequence publishes it. The key of a block covers its
 * predecessor's key, its scope (tenant and variant) and its tokens. A key only selects candidates. A candidate matches
 * if its scope, predecessor (the block itself, not its key) and tokens are equal, so a hash collision costs time but
 * never gives a wrong text.
 *
 *   references of a block = sequences that hold it + 1 when it is published
 *
 *   taken --publish--> published, in use --last sequence drops it--> published, idle --evict--> free
 *                            ^------------------- find ---------------------'
 *
 * Idle blocks form a list by time of last use; the oldest is evicted first. A sequence that holds a block also holds
 * all its predecessors, and drops its blocks from the last to the first. A block is therefore older in the list than
 * its predecessor, and blocks without successors are evicted first.
 *
 * Each further part (generation/kv_cache.h) has an idle list of its own: if no sequence sees the part of a published
 * block, the part stays until its memory is needed. A sequence can continue after n blocks only if the parts that its
 * next row reads still exist; mp_prefix_reach checks this.
 *
 * If the model has recurrent mixers, a published block may have a snapshot of the state after it (generation/states.h),
 * and a sequence can continue only after a block with one.
 *
 * Snapshots and idle blocks count as available memory: mp_prefix_take and mp_prefix_shrink evict them on demand,
 * snapshots first. In addition, idle blocks and parts take at most `percent` % of the budget's limit. One thread at a
 * time, except for the counters. */
#ifndef MP_MODELS_GENERATION_PREFIX_CACHE_H
#define MP_MODELS_GENERATION_PREFIX_CACHE_H

#include "models/cache_key.h"
#include "models/generation/kv_cache.h"
#include "models/generation/states.h"

#define MP_PREFIX_NONE UINT32_MAX

typedef struct mp_prefix_block { /* the published state of a block id */
    mp_cache_key key;
    uint32_t parent;
    uint32_t children;     /* number of published blocks whose parent is this block */
    uint32_t next;         /* next block in the same hash bucket */
    uint32_t older[MP_KV_PARTS], newer[MP_KV_PARTS]; /* neighbours in the idle list of each part */
    bool published;
    int32_t tokens[MP_KV_BLOCK];
} mp_prefix_block;

typedef struct mp_prefix_idle { /* an idle list: of blocks (part 0), or of one further part */
    uint32_t oldest, newest, count;
} mp_prefix_idle;

typedef struct mp_prefix_cache {
    mp_kv_cache kv;
    mp_states states;
    mp_prefix_block *known; /* [capacity] by block id */
    uint32_t *buckets;      /* [capacity] first block of each bucket */
    uint32_t capacity;      /* a power of two, or 0 */
    mp_prefix_idle idle[MP_KV_PARTS];
    uint32_t percent;
    uint64_t hash_key[2];
    mp_prefix_counters counters;
} mp_prefix_cache;

typedef struct mp_prefix_chain { /* the published blocks at the start of a sequence */
    uint32_t count, last;        /* number of these blocks; id of the last one */
    mp_cache_scope scope; /* different variants: sequences that use the long rotary table (LongRoPE) and the short
                           * one, and sequences with different adapters */
    bool closed;        /* no further block can be published or found */
    bool key_known;     /* `key` is valid: the key of the next block */
    mp_cache_key key;
} mp_prefix_chain;

/* percent: limit of idle memory, see above; 0: blocks are reference-counted but never published. The share of snapshots
 * is that of the options. */
void mp_prefix_init(mp_prefix_cache *cache, const mp_kv_layout *layout, mp_budget *budget, uint32_t percent);
void mp_prefix_deinit(mp_prefix_cache *cache);

/* Like mp_kv_take, mp_kv_share and mp_kv_give. mp_prefix_take evicts idle blocks if memory is short. A published block
 * becomes idle when the last sequence that holds it drops it. */
mp_status mp_prefix_take(mp_prefix_cache *cache, uint32_t *id, mp_error *error);
void mp_prefix_ref_block(mp_prefix_cache *cache, uint32_t id);
void mp_prefix_unref_block(mp_prefix_cache *cache, uint32_t id);
/* Increment or decrement the number of sequences that see a further part, from 1 on, of a block. The sequence must hold
 * the block; mp_prefix_ref_part also requires that the part exists. mp_prefix_take and mp_prefix_publish include a
 * reference to each part; mp_prefix_find and mp_prefix_ref_block do not. Call mp_prefix_unref_part before
 * mp_prefix_unref_block. */
void mp_prefix_ref_part(mp_prefix_cache *cache, int part, uint32_t id);
void mp_prefix_unref_part(mp_prefix_cache *cache, int part, uint32_t id);
/* Returns the number of published blocks after the chain, at most `most`, after which the sequence can continue: every
 * part that the next row would read exists, and so does a snapshot of the state, if the model has states. tokens
 * [most * MP_KV_BLOCK]: the tokens after the chain. The caller must have a reference to each part of its own blocks
 * that its next row reads. */
uint32_t mp_prefix_reach(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t most);
/* As mp_state_create, and evicts snapshots and idle blocks if memory is short. */
mp_status mp_prefix_take_state(mp_prefix_cache *cache, const void *from, mp_state **state, mp_error *error);
/* Keeps a snapshot of the state after the chain's last block, unless it has one. */
void mp_prefix_keep_state(mp_prefix_cache *cache, const mp_prefix_chain *chain, const mp_state *state);
/* Takes a new block and copies all parts of block `from` into it. */
mp_status mp_prefix_copy(mp_prefix_cache *cache, uint32_t from, uint32_t *id, mp_error *error);

/* Returns a chain without blocks. It finds only blocks of the same scope. */
mp_prefix_chain mp_prefix_begin(const mp_prefix_cache *cache, mp_cache_scope scope);
/* Finds the published block after the chain that holds these tokens [MP_KV_BLOCK]. If found, appends the block to the
 * chain, sets *id to it with a reference for the caller, and returns true. After a miss, the next call must pass the
 * same tokens, and does not hash them again. */
bool mp_prefix_find(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t *id);
/* Publishes *id, the caller's block after the chain with all its parts, computed from these tokens [MP_KV_BLOCK]. No
 * thread may write to the block any more. If an equal block is published already, drops *id and sets *id to the
 * published block, which has the same bytes and gets the parts that it lacks. Closes the chain if memory is exhausted.
 */
void mp_prefix_publish(mp_prefix_cache *cache, mp_prefix_chain *chain, const int32_t *tokens, uint32_t *id);
/* Counts one hit: a sequence reused `tokens` cached tokens. */
void mp_prefix_count_hit(mp_prefix_cache *cache, uint32_t tokens);

uint64_t mp_prefix_bytes(const mp_prefix_cache *cache);       /* bytes charged to the budget */
uint64_t mp_prefix_block_bytes(const mp_prefix_cache *cache); /* bytes of a block with all its parts */
/* Releases free blocks, then idle blocks, to the budget and the system until at least `bytes` bytes are released.
 * Returns the bytes released. */
uint64_t mp_prefix_shrink(mp_prefix_cache *cache, uint64_t bytes);
uint64_t mp_prefix_trim(mp_prefix_cache *cache); /* releases all free and idle blocks, and the tables if no block is
                                                  * published */

#endif
