/* generation/speculation.h: estimates how many draft tokens of a decoder's step pay, and which source of them.
 *
 * A decoding sequence adds a row for each draft token (generation/draft.h) after its own row of the pass. The next
 * token is sampled from the logits of its own row as usual. While a sampled token equals the draft token, the logits of
 * the following row are valid, and the next token is sampled from them without another pass. By the numeric contract
 * the bits are those of decoding token by token, so speculation changes the time and never the text.
 *
 * Speculation pays if additional rows are cheap compared with reading the weights, and drafts are accepted often. Both
 * are measured:
 *   pace   time of a step by its number of rows, without drafts and with drafts; every step adjusts all estimates,
 *          because contexts grow and machines change
 *   odds   acceptance rate of a draft token, by the length of the match before it; each sequence has its own rates,
 *          which start as those of the engine
 * The number of draft tokens with the highest expected tokens per time is chosen. A balance adds up the time that
 * drafts save, minus the time that they cost, plus 1 % of the decode time. When the balance is spent, drafting pauses
 * until the 1 % has refilled it. The balance also pays for attempts with drafts that are not expected to pay.
 *
 * There are two sources of drafts: look-up in the sequence itself (generation/draft.h), which costs nothing, and a
 * draft model (decoder/drafting.h), whose passes take time. Their time is measured too and counts against a balance of
 * its own, so that a draft model that does not help leaves look-up as it is.
 * Each step uses the source with the higher expected tokens per time. The draft model's confidence in a token
 * predicts whether the token is accepted. Its tokens therefore have odds per confidence class, and odds over all
 * classes, which are used for tokens that it has not proposed yet. */
#ifndef MP_MODELS_GENERATION_SPECULATION_H
#define MP_MODELS_GENERATION_SPECULATION_H

#include "models/engine.h"
#include "models/generation/draft.h"

enum {
    MP_DRAFT_ROWS = 32, /* maximum rows of a pass with drafts: more rows are never cheap */
    MP_ODDS_LOOKUP = 4, /* rows of odds by match length; the rows by confidence class follow */
    MP_ODDS_MEAN = MP_ODDS_LOOKUP + MP_DRAFT_CLASSES, /* row of the draft model's tokens of all classes */
    MP_ODDS = MP_ODDS_MEAN + 1
};

typedef struct mp_draft { /* state of a sequence; zero-initialise */
    int32_t tokens[MP_DRAFT_MAX];
    int count, run;      /* number of draft tokens; match length from mp_draft_find */
    bool of_model;       /* the draft model proposed the tokens */
    uint8_t confidence[MP_DRAFT_MAX]; /* class of each token of the draft model: see mp_draft_confidence */
    float odds[MP_ODDS]; /* 0 = unknown */
    uint32_t learned;    /* tokens that the draft model has proposed */
} mp_draft;

/* Test hook: proposes draft tokens instead of mp_draft_find. Returns their number, at most `most`. */
typedef int mp_propose(void *arg, const mp_item *item, int choice, int32_t *draft, int most);

/* environment variable MPOOL_SPECULATION */
typedef enum mp_speculate { MP_SPECULATE_OFF, MP_SPECULATE_AUTO, MP_SPECULATE_ALWAYS } mp_speculate;

typedef struct mp_pace {
    double ns;
    int seen;
} mp_pace;

typedef struct mp_speculation { /* state of an engine; worker's thread only */
    mp_speculate mode;
    mp_propose *propose;
    void *propose_arg;
    /* step times by number of rows: `plain` without drafts, one row per sequence; `drafted` with drafts */
    mp_pace plain[MP_DRAFT_ROWS + 1], drafted[MP_DRAFT_ROWS + 1];
    double balance_ns; /* time saved by drafts, plus the 1 % allowance, minus the time that drafts cost */
    bool opened;       /* the balances have their initial values */
    float odds[MP_ODDS];
    /* For engines with a draft model; model_share 0: there is none. */
    double model_share; /* size of the draft model's weights relative to the model's: predicts the time of its passes */
    double model_balance_ns; /* as balance_ns, for the draft model */
    bool model_step; /* the draft model has run a pass since the last step */
    mp_pace model_passes[MP_DRAFT_ROWS + 1]; /* times of the draft model's passes by number of rows */
    uint32_t learned;        /* tokens that the draft model has proposed, for all sequences */
} mp_speculation;

void mp_speculation_init(mp_speculation *s, mp_speculate mode);
/* Returns true if drafting is worth an attempt in a step of this many sequences and rows (without drafts). */
bool mp_speculation_open(const mp_speculation *s, int sequences, int rows);
/* Shortens the drafts of n <= MP_DRAFT_ROWS sequences to the tokens that the step verifies. rows: number of rows of the
 * step without drafts. row_ns: assumed time of one more row, used until it has been measured. */
void mp_speculation_choose(mp_speculation *s, mp_draft **drafts, int n, int sequences, int rows, uint64_t row_ns);
/* Returns the expected tokens per time with the draft model, relative to those with the drafts that the n sequences
 * have now, if any. Above 1, the draft model is expected to pay. Leaves out the time that the draft model needs to
 * process tokens that it has not seen yet. */
double mp_speculation_model_gain(const mp_speculation *s, mp_draft **drafts, int n, int sequences, uint64_t row_ns);
/* Returns true if the balance allows an attempt with the draft model although it is not expected to pay. */
bool mp_speculation_may_try_model(const mp_speculation *s, int sequences);
/* Returns true if one more pass of the draft model is expected to pay: one more token for each of the n drafts, which
 * hold its tokens of this step. */
bool mp_speculation_continue_model(const mp_speculation *s, mp_draft **drafts, int n, int sequences, uint64_t row_ns);
/* Returns the expected time that drafts of the draft model save over the next `tokens` tokens, at a gain from
 * mp_speculation_model_gain. */
double mp_speculation_saved_ns(const mp_speculation *s, double gain, int sequences, int64_t tokens);
/* Records the class of draft token i, just proposed by the draft model, whether or not a step will verify it. */
void mp_speculation_model_token(mp_speculation *s, mp_draft *draft, int i);
/* Records a pass of the draft model over at most MP_DRAFT_ROWS rows. ns: processor time */
void mp_speculation_model_pass(mp_speculation *s, int rows, uint64_t ns);
/* Records that draft token i was accepted or rejected. */
void mp_speculation_learn(mp_speculation *s, mp_draft *draft, int i, bool accepted);
/* Records a step in which every sequence decoded: one row each, plus `checked` draft tokens, of which `accepted` were
 * accepted. ns: processor time of the step, which excludes time in which other work ran. */
void mp_speculation_account(mp_speculation *s, int sequences, int checked, int accepted, uint64_t ns);

#endif
