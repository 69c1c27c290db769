/* decoder/sequence.h: the completions of a request as a decoder's engine sees them: sequences of tokens, and the cache
 * parts of the computed tokens (generation/cache_parts.h). Only the worker's thread uses them.
 *
 * Every complete block is published (generation/prefix_cache.h). Before a step, a sequence whose next block is
 * published takes it instead of computing it: after admission, after a restart, and also in the middle of a prompt if
 * another sequence has computed the same prompt faster. The last token is always computed, because its logits are
 * needed.
 *
 * If the model has a draft model, each sequence has a shadow: the same tokens with the draft model's cache parts. */
#ifndef MP_MODELS_DECODER_SEQUENCE_H
#define MP_MODELS_DECODER_SEQUENCE_H

#include "models/decoder/decoder.h"
#include "models/generation/cache_parts.h"
#include "models/generation/sampler.h"
#include "models/generation/speculation.h"
#include "models/generation/stop_strings.h"

typedef struct mp_paused { /* a pass over the rows of an image that has computed some layers (mp_decoder_pass) */
    float *x;       /* [rows, hidden] the residual sums; NULL: no pass is paused */
    uint64_t bytes; /* bytes of x, charged to the budget */
    int32_t at;     /* position of the first row */
    int layer;      /* the next layer */
} mp_paused;

typedef struct mp_sequence {
    int32_t *tokens; /* [capacity] prompt, then the completion; negative: a row of an image (decoder/images.h) */
    int32_t count;
    mp_cached cached; /* the computed tokens */
    mp_history history;
    mp_stream stream;
    mp_draft_index index;
    mp_draft draft;         /* draft tokens to follow `tokens` */
    float *deferred_logits; /* [vocab] logits of the last token while the sequence waits for its mask; NULL: the request
                             * has no masks */
    mp_paused paused;
    bool awaits_mask;       /* the last token was computed, but the mask for the next one is not set yet */
    bool speculation_off;   /* a draft led to NaN or infinity: no more drafts */
    struct mp_shadow *shadow; /* NULL: the model has no draft model */
    bool active, done; /* completions after the first become active after the prefill */
} mp_sequence;

typedef struct mp_shadow { /* a sequence as the draft model sees it; used by decoder/drafting.c */
    mp_cached cached;       /* the tokens that the draft model has computed */
    mp_prefix_cache *cache; /* the draft model's cache; NULL: the shadow has no parts and is on no list */
    int32_t tentative;      /* draft tokens after `cached` that the draft model has computed */
    bool off;               /* the draft model cannot continue this sequence */
    struct mp_shadow *next, **link; /* list of the shadows with parts in `cache` */
} mp_shadow;

typedef struct mp_sequence_group { /* state of an item */
    mp_budget *budget;
    uint64_t charged; /* bytes of the group and its sequences without cache parts, if every completion has its maximum
                       * length */
    int n;
    struct mp_request_images *images; /* or NULL (decoder/images.h) */
    mp_cache_scope image_scope; /* scope of the rows of its images; each sequence's chain has its own scope */
    int32_t prefilled; /* largest number of prompt tokens that the first sequence has ever had in the cache */
    int32_t *stops;    /* [stop_count] lengths of prompt after which snapshots of the state are kept, ascending */
    int stop_count;
    bool penalties;
    uint8_t adapter;        /* number of the request's adapter; 0: none */
    int32_t *barred;        /* ids barred before min_tokens: end tokens and stop ids */
    int n_barred, n_always; /* number of barred ids; the first n_always ids are barred in the whole completion */
    float *deferred_logits; /* [n, vocab] logits of all sequences, or NULL */
    mp_sequence seqs[];
} mp_sequence_group;

/* Returns true if the sequences of a request use the long rotary table. The result depends on the maximum length of the
 * sequence, so it never changes for a request. */
static inline bool mp_decoder_is_long(const mp_decoder *model, const mp_text_request *request) {
    return model->long_from > 0 && (int64_t)request->n_prompt + request->sampling.max_tokens > model->long_from;
}

/* Creates the group; its first sequence is active. Takes no parts yet. Evicts idle blocks if memory is short. */
mp_status mp_sequence_group_create(const mp_decoder *model, mp_prefix_cache *cache, const mp_item *item,
                                   mp_sequence_group **group, mp_error *error);
void mp_sequence_group_destroy(mp_sequence_group *group); /* must hold no parts */
void mp_sequence_group_drop(mp_sequence_group *group,
                            mp_prefix_cache *cache); /* drops all parts; all tokens must be computed again */

/* Returns the rows that the sequence can compute next: up to its last token, or to the next length after which a
 * snapshot of its state is kept, if the model has states. */
int32_t mp_sequence_group_left(const mp_sequence_group *group, const mp_prefix_cache *cache, mp_sequence *seq);
/* Lets the prefilling sequences of an item continue after published blocks, and adds the reused prompt tokens to
 * request->cached_tokens. If logits of the whole prompt are wanted, the first sequence skips only tokens whose logits
 * it has already computed. */
void mp_sequence_group_reuse(mp_item *item, mp_prefix_cache *cache);
/* After the prefill: activates the other sequences and copies the first sequence's cached tokens to them. A sequence
 * that gets fewer, because memory is short, computes the rest of the prompt itself. */
void mp_sequence_group_fork(mp_sequence_group *group, mp_prefix_cache *cache);
/* Records that `rows` more rows of a sequence were computed. Publishes the completed blocks, unless `sound` is false:
 * their inputs may be corrupted. */
void mp_sequence_group_keep(mp_item *item, mp_prefix_cache *cache, int choice, int rows, bool sound);

/* Drops the cache parts of a sequence, those of its shadow, and the pass that is paused. */
void mp_sequence_drop(mp_sequence *seq, mp_prefix_cache *cache);
/* Makes room to pause a pass over the next `rows` rows, unless it is there. Returns false if memory is exhausted. */
bool mp_sequence_may_pause(mp_sequence *seq, mp_prefix_cache *cache, int rows, int hidden);
/* Drops the pass that is paused, if there is one. */
void mp_sequence_unpause(mp_sequence *seq, mp_budget *budget);
/* Drops the parts of a shadow and takes it from its list. NULL is legal. */
void mp_shadow_drop(mp_shadow *shadow);
/* The next draft token of the sequence was accepted: the draft model has computed it already. */
static inline void mp_shadow_accept(mp_shadow *shadow) {
    if (shadow && shadow->tentative > 0) {
        shadow->tentative--;
        shadow->cached.count++;
    }
}

#endif
