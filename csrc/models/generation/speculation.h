/* generation/speculation.h: whether a decoder's step is to check guesses at the next tokens, and how many.
 *
 * A sequence that decodes puts guesses (generation/draft.h) behind its token in the pass. Each row's logits give the
 * token that comes after it, drawn as always; as long as that is the one guessed, the next row's logits are those of
 * the sequence as well, and its next token is there without a pass of its own. By the numeric contract these are the
 * bits of decoding one by one, so nothing here can change an answer: only the time it takes.
 *
 * It pays while rows are cheap beside the reading of the weights, and guesses are good. Both are measured:
 *   pace   time of a step by its rows, without guesses and with them; all estimates drift with every step, since
 *          contexts grow and machines change
 *   odds   how often a guessed token was right, by the length of the run of tokens before it that stood before what was
 *          found too; of a sequence, which starts with the engine's
 * Of all numbers of guesses the one is chosen that promises most tokens in the time. What guessing costs is weighed
 * against what it brought: once it has cost more, it rests until it is a hundredth of the time since. The same
 * hundredth pays for trying again where it is not expected to pay. */
#ifndef MP_MODELS_GENERATION_SPECULATION_H
#define MP_MODELS_GENERATION_SPECULATION_H

#include "models/engine.h"
#include "models/generation/draft.h"

enum {
    MP_DRAFT_ROWS = 32, /* most rows of a pass with guesses: more are never cheap */
    MP_ODDS = 4
};

typedef struct mp_draft { /* of a sequence; starts zeroed */
    int32_t tokens[MP_DRAFT_MOST];
    int count, run;      /* how many; of generation/draft.h */
    float odds[MP_ODDS]; /* 0 = not yet known */
} mp_draft;

/* For tests: the guess instead of a look-up; returns how many of `most`. */
typedef int mp_propose(void *arg, const mp_item *item, int choice, int32_t *draft, int most);

/* MPOOL_SPECULATION */
typedef enum mp_speculate { MP_SPECULATE_OFF, MP_SPECULATE_AUTO, MP_SPECULATE_ALWAYS } mp_speculate;

typedef struct mp_pace {
    double ns;
    int seen;
} mp_pace;

typedef struct mp_speculation { /* of an engine; its worker's thread only */
    mp_speculate mode;
    mp_propose *propose;
    void *propose_arg;
    mp_pace plain[MP_DRAFT_ROWS + 1], drafted[MP_DRAFT_ROWS + 1]; /* by rows; plain: of a sequence each */
    double balance_ns; /* what guesses brought and may cost, less what they cost */
    bool opened;
    float odds[MP_ODDS];
} mp_speculation;

void mp_speculation_init(mp_speculation *s, mp_speculate mode);
/* Is it worth while to look for guesses for a step of so many sequences and rows without them? */
bool mp_speculation_open(const mp_speculation *s, int sequences, int rows);
/* Cut the guesses of a step's sequences [n <= MP_DRAFT_ROWS] to what is to be checked. rows: of the step without them.
 * row_ns: what a row more is taken to cost where nothing has been measured yet. */
void mp_speculation_choose(mp_speculation *s, mp_draft **drafts, int n, int sequences, int rows, uint64_t row_ns);
/* Token number i of a guess was right or wrong. */
void mp_speculation_learn(mp_speculation *s, mp_draft *draft, int i, bool accepted);
/* A step in which every sequence decoded, one row each without the guesses, of which so many were checked and right.
 * ns: of its own on a processor; what others did meanwhile says nothing about rows. */
void mp_speculation_account(mp_speculation *s, int sequences, int checked, int accepted, uint64_t ns);

#endif
