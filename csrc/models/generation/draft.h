/* generation/draft.h: draft tokens from the sequence itself (prompt lookup: Saxena, "Prompt Lookup Decoding", 2023).
 * The tokens at the end of the sequence are looked up at earlier positions; the tokens that followed the newest match
 * become the draft.
 *
 * An index maps the hash of a run of MP_DRAFT_LONG or MP_DRAFT_SHORT tokens to its last position. A slot holds one run,
 * the newest. A look-up compares the tokens themselves, so a hash collision can lose a draft but never gives a wrong
 * match. The cost is two stores per token and two look-ups per draft. One thread at a time. */
#ifndef MP_MODELS_GENERATION_DRAFT_H
#define MP_MODELS_GENERATION_DRAFT_H

#include "base/alloc.h"

enum {
    MP_DRAFT_SHORT = 2,
    MP_DRAFT_LONG = 3,
    MP_DRAFT_RUN = 16,    /* longest match length that is reported: callers do not distinguish longer ones */
    MP_DRAFT_MAX = 15,    /* maximum number of draft tokens */
    MP_DRAFT_CLASSES = 5, /* confidence classes: see mp_draft_confidence */
};

typedef struct mp_draft_index { /* zero-initialise */
    uint32_t *ends;             /* [capacity] index of the token after the newest run with this hash; 0 = empty */
    uint32_t capacity;          /* a power of two, or 0; grows with the sequence */
    int32_t count;              /* the runs that end before any of the first `count` tokens are indexed */
    uint64_t charged;           /* bytes taken from the budget */
} mp_draft_index;

/* Proposes up to `most` (<= MP_DRAFT_MAX) tokens to follow tokens [count]. Between calls, tokens may only be appended.
 * Sets *run to the length of the match: the number of tokens before the found position that equal the last tokens of
 * the sequence, at most MP_DRAFT_RUN. Returns the number of draft tokens; 0: no match, or no memory for the index. */
int mp_draft_find(mp_draft_index *index, mp_budget *budget, const int32_t *tokens, int32_t count, int most,
                  int32_t *draft, int *run);
void mp_draft_deinit(mp_draft_index *index, mp_budget *budget);

/* Returns the confidence class of a draft model's likeliest token, 0 to MP_DRAFT_CLASSES - 1, by the difference between
 * the two largest logits [vocab]. Sets *likeliest to that token, the lowest id on a tie. */
int mp_draft_confidence(const float *logits, int32_t vocab, int32_t *likeliest);

#endif
