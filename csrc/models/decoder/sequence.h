/* decoder/sequence.h: the answers of a call as a decoder's engine sees them: sequences of tokens, and the KV blocks
 * that hold what has been computed of them. The worker's thread only.
 *
 * Every block that is complete is published (generation/prefix_cache.h). Before a step, a sequence whose next block is
 * published takes it instead of computing it: after admission, when it starts again, and also in the middle of a prompt
 * when somebody else read the same one faster. The last token is always computed: its logits are needed. */
#ifndef MP_MODELS_DECODER_SEQUENCE_H
#define MP_MODELS_DECODER_SEQUENCE_H

#include "models/decoder/decoder.h"
#include "models/generation/speculation.h"
#include "models/generation/prefix_cache.h"
#include "models/generation/sampler.h"
#include "models/generation/stop_strings.h"

typedef struct mp_sequence {
    int32_t *tokens; /* [capacity] prompt, then the answer; below 0: a row of an image (decoder/images.h) */
    int32_t count, cached;
    uint32_t *blocks; /* [block_count] */
    int block_count, block_capacity;
    int seen_from; /* it sees the window parts of its blocks from here on */
    mp_prefix_chain chain; /* its published blocks: all complete ones, unless closed */
    mp_history history;
    mp_stream stream;
    mp_draft_index index;
    mp_draft draft;    /* what may follow tokens */
    float *kept;       /* [vocab] logits of the last token, while it waits for its mask; NULL: its call has no masks */
    bool waits;        /* the last token was computed, and what may come next is not known yet */
    bool speculation_off; /* a guess led to NaN or infinity: no more of them */
    bool active, done; /* the answers after the first wait until the prompt has been read */
} mp_sequence;

typedef struct mp_sequence_group { /* an item's state */
    mp_budget *budget;
    uint64_t charged; /* for all of this but the blocks, up to the longest that the answers may become */
    int n;
    struct mp_request_images *images; /* or NULL (decoder/images.h) */
    int32_t read; /* tokens of the prompt that the first answer has had in the cache at some time */
    bool penalties;
    int32_t *barred;        /* ids that may not come before min_tokens: ends and stop ids */
    int n_barred, n_always; /* the first n_always may never come */
    float *kept;            /* [n, vocab] of all sequences, or NULL */
    mp_sequence seqs[];
} mp_sequence_group;

/* Whether the answers to a call are rotated as long ones: by what they may become, so that it never changes. */
static inline bool mp_decoder_is_long(const mp_decoder *model, const mp_text_request *call) {
    return model->long_from > 0 && (int64_t)call->n_prompt + call->sampling.max_tokens > model->long_from;
}

/* The first answer is active. No blocks are taken yet; idle ones go if there is no memory for the rest. */
mp_status mp_sequence_group_create(const mp_decoder *model, mp_prefix_cache *cache, const mp_item *item,
                                   mp_sequence_group **group, mp_error *error);
void mp_sequence_group_destroy(mp_sequence_group *group); /* holds no blocks any more */
void mp_sequence_group_drop(mp_sequence_group *group,
                            mp_prefix_cache *cache); /* give all blocks back; all is computed again */

/* Let the sequences of an item that read go on after the published blocks which follow what they hold, and count that
 * in the call. When logits of the whole prompt are wanted, the first answer skips what has had them only. */
void mp_sequence_group_reuse(mp_item *item, mp_prefix_cache *cache);
/* The prompt has been read: give the other answers its blocks. Without memory for its last, incomplete one they read
 * the rest again themselves. */
void mp_sequence_group_fork(mp_sequence_group *group, mp_prefix_cache *cache);
/* So many rows more of an answer have been computed: publish the blocks that they completed, unless what they were
 * computed from is not sound. */
void mp_sequence_group_keep(mp_item *item, mp_prefix_cache *cache, int choice, int rows, bool sound);

/* What may come after the token of a sequence that decodes, into its guess: no more than may follow, and nothing that
 * ends the answer. */
void mp_sequence_draft(const mp_decoder *model, const mp_speculation *speculation, const mp_prefix_cache *cache,
                       const mp_item *item, int choice);
/* Zero the slots of so many rows that come after what is cached. zeros [head_dim] */
void mp_sequence_wipe(const mp_sequence *seq, const mp_prefix_cache *cache, int rows, const float *zeros);

/* Blocks for `rows` more rows; *rows is cut to what could be had. */
mp_status mp_sequence_extend(mp_sequence *seq, mp_prefix_cache *cache, int *rows, mp_error *error);
void mp_sequence_drop(mp_sequence *seq, mp_prefix_cache *cache);

#endif
