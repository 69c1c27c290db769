/* generation/sampler.h: from a row of logits to a token.
 *
 * The order is: logit bias; repetition, presence and frequency penalties; removal of end tokens below min_tokens and of
 * tokens outside the mask; then temperature 0 takes the largest logit (lowest id on a tie), any other temperature
 * divides the logits, applies top_k, top_p and min_p, and samples once.
 *
 * Random numbers are counter-based: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11)
 * of (seed, choice, position), so a token does not depend on earlier or concurrent work. Exponentials are those of the
 * kernels, so a token does not depend on the machine. */
#ifndef MP_MODELS_GENERATION_SAMPLER_H
#define MP_MODELS_GENERATION_SAMPLER_H

#include "kernels/kernels.h"
#include "models/capability.h"

/* Token counts for the penalties: an open-addressed map from id to counts. */
typedef struct mp_history {
    struct mp_history_slot {
        int32_t id;      /* -1 = empty */
        uint32_t output; /* number of occurrences in the completion */
        bool prompt;     /* occurs in the prompt */
    } * slots;
    uint32_t capacity, count; /* capacity: a power of two, or 0 */
} mp_history;
mp_status mp_history_add(mp_history *history, int32_t id, bool prompt, mp_error *error);
void mp_history_deinit(mp_history *history);
size_t mp_history_bytes(uint32_t ids); /* bytes of a history with `ids` different ids */

/* A token that may be sampled. Callers provide an array of candidates as scratch. */
typedef struct mp_candidate {
    float logit;
    int32_t id;
} mp_candidate;

typedef struct mp_sample_args {
    const mp_sampling *sampling;
    const mp_history *history; /* NULL without penalties */
    int n_bias;
    const int32_t *bias_ids;
    const float *bias;
    int n_barred; /* number of ids that must not be sampled at this position */
    const int32_t *barred;
    int mask_words;       /* 0: no mask */
    const uint32_t *mask; /* one bit for each id: 1 = allowed; ids beyond the words are not allowed */
    uint32_t choice, position; /* position: index of the sampled token in the completion */
} mp_sample_args;

/* Samples one token. Overwrites logits [vocab]; candidates [vocab] is scratch. Returns the id, or -1 if the largest
 * logit is not finite. */
int32_t mp_sample(const mp_sample_args *sample, float *logits, int32_t vocab, mp_candidate *candidates);

/* Computes log-softmax of the unmodified logits: *logprob of `token`, and the k largest in descending order (lowest id
 * on a tie). If fewer than k logits are above -infinity, the rest are id -1 and -infinity. k may be 0. candidates
 * [vocab] is scratch if k > 0. */
void mp_logprobs(const float *logits, int32_t vocab, int32_t token, int k, float *logprob, int32_t *top_ids, float *top,
                 mp_candidate *candidates);

/* Returns a uniform random number in [0, 1) with 53 bits. */
double mp_random_at(uint64_t seed, uint32_t choice, uint32_t position);

#endif
