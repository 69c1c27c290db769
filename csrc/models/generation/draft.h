/* generation/draft.h: draft tokens from the sequence itself (prompt lookup: Saxena, "Prompt Lookup Decoding", 2023).
 * The last tokens are looked up earlier in the sequence; the tokens that followed them there become the draft.
 *
 * An index maps the hash of a run of MP_DRAFT_LONG or MP_DRAFT_SHORT tokens to its last position. A slot holds one run,
 * the newest. The tokens found are compared with the run, so a collision loses a draft and never makes a wrong match.
 * The cost is two stores per token and two look-ups per draft. One thread at a time. */
#ifndef MP_MODELS_GENERATION_DRAFT_H
#define MP_MODELS_GENERATION_DRAFT_H

#include "base/alloc.h"

enum {
    MP_DRAFT_SHORT = 2,
    MP_DRAFT_LONG = 3,
    MP_DRAFT_RUN = 16, /* longest match length that is reported: callers do not distinguish longer ones */
    MP_DRAFT_MOST = 15 /* maximum number of draft tokens */
};

typedef struct mp_draft_index { /* zero-initialise */
    uint32_t *ends;             /* [capacity] a run with this hash ends before this token; 0 = empty */
    uint32_t capacity;          /* a power of two, or 0; grows with the sequence */
    int32_t count;              /* runs that end before this token are indexed */
    uint64_t charged;           /* bytes taken from the budget */
} mp_draft_index;

/* Proposes up to `most` (<= MP_DRAFT_MOST) tokens to follow tokens [count]. Between calls the sequence may only grow.
 * Sets *run to the number of last tokens that match those before the place found, at most MP_DRAFT_RUN. Returns the
 * number of draft tokens; 0: no match, or no memory for the index. */
int mp_draft_find(mp_draft_index *index, mp_budget *budget, const int32_t *tokens, int32_t count, int most,
                  int32_t *draft, int *run);
void mp_draft_deinit(mp_draft_index *index, mp_budget *budget);

#endif
