/* generation/cache_parts.h: what a sequence keeps between steps: the parts of its cached positions. Sequences, the
 * completions of a request, preemption, restart and drafting use these functions, and know neither blocks nor windows.
 *
 *   take     makes room for the next rows (before a pass)
 *   publish  keeps computed rows, and lets other sequences find complete blocks (after a pass)
 *   reach    continues after published blocks (before a pass, also after a restart)
 *   copy     shares the positions with another completion of the request
 *   wipe     undoes rows that a corrupted pass has stored
 *   drop     gives everything back (end, preemption)
 *
 * mp_prefix_bytes states the bytes of all parts of an engine.
 *
 * Today's parts are those of generation/kv_cache.h: keys and values of all positions, and of windows. They differ in
 * one number, the window, which says which blocks a row reads. Rows after `count` are tentative: the next pass
 * overwrites them, so nothing remains of rejected draft tokens.
 *
 * The state of recurrent mixers (generation/states.h) is a part of constant size: take makes it writable, publish keeps
 * a snapshot of it after chosen blocks, reach continues only after a block with a snapshot and copies it, copy shares
 * the state until the next write, and rows that are wiped or not kept are not in it. */
#ifndef MP_MODELS_GENERATION_CACHE_PARTS_H
#define MP_MODELS_GENERATION_CACHE_PARTS_H

#include "models/generation/prefix_cache.h"

typedef struct mp_cached {
    int32_t count;    /* cached positions: 0 .. count - 1 */
    uint32_t *blocks; /* [block_count] */
    int block_count, block_capacity;
    int first[MP_KV_PARTS]; /* index of the first block whose part the sequence still references; 0 in part 0 */
    mp_prefix_chain chain;  /* published blocks: all complete blocks, unless the chain is closed */
    mp_state *state; /* NULL: no position is cached, or the model has no states */
    int32_t stop;    /* publish keeps a snapshot of the state when `count` reaches this multiple of MP_KV_BLOCK */
} mp_cached;

/* Bytes that mp_cached_init allocates for up to `capacity` tokens. */
uint64_t mp_cached_bytes(int32_t capacity);
mp_status mp_cached_init(mp_cached *cached, int32_t capacity, mp_error *error);
void mp_cached_deinit(mp_cached *cached); /* must hold no blocks */
/* Begins with no cached positions. Blocks of this scope only will be found. */
void mp_cached_begin(mp_cached *cached, const mp_prefix_cache *cache, mp_cache_scope scope);

/* Takes memory for `rows` more rows. If memory is exhausted, returns the error and reduces *rows to the rows that fit
 * into the memory taken so far. */
mp_status mp_cached_take(mp_cached *cached, mp_prefix_cache *cache, int *rows, mp_error *error);
/* Call before the pass over rows for which there is memory. drafts: the last `drafts` of the rows may be rejected;
 * there must be a log for them (mp_cached_take_log), and at most MP_STATE_LOG rows. After the pass, call
 * mp_cached_publish or mp_cached_wipe; after a pass that was stopped, mp_cached_drop: the state may have some rows. */
void mp_cached_enter(mp_cached *cached, int drafts);
/* Takes memory for draft rows of the state, if the model has states. */
mp_status mp_cached_take_log(mp_cached *cached, mp_prefix_cache *cache, mp_error *error);
/* Adds the next `rows` rows, which were computed, and publishes the completed blocks; never again if `sound` is false:
 * the inputs may be corrupted. tokens [count + rows] */
void mp_cached_publish(mp_cached *cached, mp_prefix_cache *cache, const int32_t *tokens, int rows, bool sound);
/* Continues after published blocks, up to `end` cached positions. A published block replaces the sequence's own
 * incomplete block. */
void mp_cached_reach(mp_cached *cached, mp_prefix_cache *cache, const int32_t *tokens, int32_t end);
/* Gives `to`, which holds nothing, the positions of `from`: complete blocks are shared, the last, incomplete one is
 * copied. Without memory for the copy, `to` gets the complete blocks only, or nothing if parts that its next row reads
 * are gone. */
void mp_cached_copy(mp_cached *to, const mp_cached *from, mp_prefix_cache *cache);
/* Zeroes the next `rows` rows, for which there must be memory. */
void mp_cached_wipe(mp_cached *cached, mp_prefix_cache *cache, int rows);
/* Drops everything: count becomes 0. */
void mp_cached_drop(mp_cached *cached, mp_prefix_cache *cache);

#endif
