/* generation/sampler.h: from a row of logits to a token.
 *
 * Order: logit bias; repetition, presence and frequency penalties; end tokens barred below min_tokens, and what a mask
 * does not allow; then temperature
 * 0 takes the largest (lowest id on a tie), else logits / temperature, top_k, top_p, min_p and one draw. Random numbers
 * are counter-based: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) of (seed,
 * choice, position), so a token depends on nothing that ran before or beside it. Exponentials are the kernels', so it
 * depends on no machine either. */
#ifndef MP_MODELS_GENERATION_SAMPLER_H
#define MP_MODELS_GENERATION_SAMPLER_H

#include "kernels/kernels.h"
#include "models/capability.h"

/* Tokens seen, for the penalties: an open-addressed map id -> counts. */
typedef struct mp_history {
    struct mp_history_slot {
        int32_t id;      /* -1 = empty */
        uint32_t output; /* times in the output */
        bool prompt;     /* stands in the prompt */
    } * slots;
    uint32_t capacity, count; /* capacity a power of two, or 0 */
} mp_history;
mp_status mp_history_add(mp_history *history, int32_t id, bool prompt, mp_error *error);
void mp_history_deinit(mp_history *history);
size_t mp_history_bytes(uint32_t ids); /* that one of so many different ids takes */

/* Scratch for one row: candidates, sorted. */
typedef struct mp_candidate {
    float logit;
    int32_t id;
} mp_candidate;

typedef struct mp_sample_args {
    const mp_sampling *sampling;
    const mp_history *history; /* NULL when no penalty is on */
    int n_bias;
    const int32_t *bias_ids;
    const float *bias;
    int n_barred; /* ids that may not come yet */
    const int32_t *barred;
    int mask_words;       /* 0: there is no mask */
    const uint32_t *mask; /* a bit an id: 1 = it may come; ids beyond the words may not */
    uint32_t choice, position; /* position of the drawn token in the sequence of outputs */
} mp_sample_args;

/* logits [vocab] are overwritten; candidates [vocab] is scratch. Returns the token, or -1 when no logit is finite. */
int32_t mp_sample(const mp_sample_args *sample, float *logits, int32_t vocab, mp_candidate *candidates);

/* ln of the softmax of the unmodified logits: fills *logprob of `token` and the k best, largest first (lowest id on a
 * tie). k may be 0. candidates [vocab] is scratch when k > 0. */
void mp_logprobs(const float *logits, int32_t vocab, int32_t token, int k, float *logprob, int32_t *top_ids, float *top,
                 mp_candidate *candidates);

/* A number in [0, 1) with 53 bits. */
double mp_random_at(uint64_t seed, uint32_t choice, uint32_t position);

#endif
