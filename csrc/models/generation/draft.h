/* generation/draft.h: a guess at how a sequence goes on, from what stands in it already (prompt lookup: Saxena, "Prompt
 * Lookup Decoding", 2023). The last tokens are looked for earlier in the sequence; what came after them then may come
 * again.
 *
 * An index leads from the hash of a run of MP_DRAFT_LONG or MP_DRAFT_SHORT tokens to where it was seen last. A place in
 * it holds one run, the newest; what is found there is compared, so a collision costs a guess and never makes a wrong
 * one. Two stores a token and two looks a guess. One thread at a time. */
#ifndef MP_MODELS_GENERATION_DRAFT_H
#define MP_MODELS_GENERATION_DRAFT_H

#include "base/alloc.h"

enum {
    MP_DRAFT_SHORT = 2,
    MP_DRAFT_LONG = 3,
    MP_DRAFT_RUN = 16, /* nobody asks how much longer than this what was found agrees */
    MP_DRAFT_MOST = 15 /* tokens of a guess */
};

typedef struct mp_draft_index { /* starts zeroed */
    uint32_t *ends;             /* [capacity] the run that hashes here ends before this token; 0 = none */
    uint32_t capacity;          /* a power of two, or 0; grows with the sequence */
    int32_t count;              /* runs that end before this token are in it */
    uint64_t charged;           /* bytes taken from the budget */
} mp_draft_index;

/* Up to `most` (<= MP_DRAFT_MOST) tokens that may follow tokens [count], which go on where they were at the last call.
 * *run: how many of the last tokens stand before what was found, at most MP_DRAFT_RUN. 0: there is nothing alike, or no
 * memory for the index. */
int mp_draft_find(mp_draft_index *index, mp_budget *budget, const int32_t *tokens, int32_t count, int most,
                  int32_t *draft, int *run);
void mp_draft_deinit(mp_draft_index *index, mp_budget *budget);

#endif
