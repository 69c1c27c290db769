/* encoder/dedup.h: an identical text is computed once: among those of one step, and when its vector was computed a
 * moment ago. Texts are identical when their ids are, the tokens that pooling leaves out, and what is made of the
 * vector; an engine has one class of arithmetic. By the numeric contract the bits are those of a computation of its
 * own. Pooled vectors only.
 *
 * Belongs to an engine and is used by its worker alone. Nothing here fails a call: without memory for the recent
 * results there are none. */
#ifndef MP_MODELS_ENCODER_DEDUP_H
#define MP_MODELS_ENCODER_DEDUP_H

#include "models/encoder/encoder.h"

enum {
    MP_DEDUP_SHARED = 32,         /* texts that one computation serves, so that what befalls it befalls few */
    MP_DEDUP_KEEP_NS = 100000000, /* how long a result is recent */
    MP_DEDUP_RECENT = 256,        /* most recent results */
    MP_DEDUP_BYTES = 1 << 20,     /* most bytes of them */
    MP_DEDUP_TOKENS = 512         /* longest text among them */
};

struct mp_dedup_slot;   /* of the step's table */
struct mp_dedup_result; /* a recent result */

typedef struct mp_encoder_dedup {
    uint64_t keep_ns;            /* MP_DEDUP_KEEP_NS, but for tests */
    uint64_t shared;             /* texts that another of their step served, since the beginning */
    uint64_t recalled;           /* texts that a recent result served */
    struct mp_dedup_slot *slots; /* [slot_count], a power of two; empty between steps */
    uint32_t slot_count;
    mp_budget *budget;
    struct mp_dedup_result *recent; /* [capacity] ring, NULL until the first result */
    uint8_t *store;                 /* [capacity] ids, then a vector: the memory that recent points into */
    uint32_t capacity, next, count; /* next to be written; results there are, the newest before next */
    size_t text_bytes, row_bytes;   /* of the ids and of a whole row of store */
    uint64_t charged;
} mp_encoder_dedup;

/* model_tokens, model_width: the longest text and the widest vector. */
void mp_dedup_init(mp_encoder_dedup *dedup, mp_budget *budget, int32_t model_tokens, int32_t model_width);
void mp_dedup_deinit(mp_encoder_dedup *dedup);
/* Begin a step of up to `texts` texts. */
mp_status mp_dedup_begin(mp_encoder_dedup *dedup, int texts, mp_error *error);
/* A text's key, which the following want. */
void mp_dedup_key(mp_encoder_text *text);
/* Writes text->out from a recent result and says so. */
bool mp_dedup_recall(mp_encoder_dedup *dedup, const mp_encoder_text *text, uint64_t now_ns);
/* The index of the text, among those before texts[index] in this step, whose vector will be that of texts[index]; -1:
 * it is to be computed, and may serve others. */
int mp_dedup_find(mp_encoder_dedup *dedup, const mp_encoder_text *texts, int index);
/* Remember the finite vectors of texts [count] that were computed by now; the last of them when they are many. */
void mp_dedup_keep(mp_encoder_dedup *dedup, const mp_encoder_text *texts, int count, uint64_t now_ns);
/* Forget all recent results; bytes given back to the budget. */
uint64_t mp_dedup_trim(mp_encoder_dedup *dedup);

#endif
