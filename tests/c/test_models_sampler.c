/* test_models_sampler.c: sampled tokens agree with a reference in double precision, and the sampler writes only the
 * logits of the vocabulary. */
#include <stdlib.h>

#include "base/alloc.h"
#include "mp_test.h"
#include "models/engine.h"
#include "models/generation/sampler.h"

enum { VOCAB = 2500, DRAWS = 200 }; /* the sampler sums the weights of 1024 ids at a time */

static float original[VOCAB], logits[VOCAB];
static mp_candidate candidates[VOCAB];

static int by_logit(const void *a, const void *b) {
    const int x = *(const int *)a, y = *(const int *)b;
    return original[x] != original[y] ? (original[x] < original[y] ? 1 : -1) : x - y;
}

/* List the ids that may be sampled, in the order in which the sampler adds up their weights. Returns their number. */
static int allowed(const mp_sampling *s, int *ids, double *weights) {
    const bool ranked = s->top_k > 0 || s->top_p < 1;
    int n = VOCAB;
    double total = 0, sum = 0;
    for (int i = 0; i < n; i++)
        ids[i] = i;
    if (ranked)
        qsort(ids, VOCAB, sizeof *ids, by_logit);
    float largest = original[0];
    for (int i = 1; i < VOCAB; i++)
        largest = original[i] > largest ? original[i] : largest;
    n = s->top_k > 0 ? s->top_k : VOCAB;
    for (int i = 0; i < n; i++)
        total += weights[i] = exp(((double)original[ids[i]] - (double)largest) / (double)s->temperature);
    for (int i = 0; s->top_p < 1 && i < n; i++) {
        sum += weights[i];
        if (sum >= (double)s->top_p * total)
            n = i + 1;
    }
    for (int i = 0; i < n; i++)
        weights[i] = weights[i] < (double)s->min_p ? 0 : weights[i];
    return n;
}

/* The sampler takes the first id at which the running sum exceeds the random share of the sum. Near a border, rounding
 * may choose the neighbour. */
MP_TEST(models_sampler_agrees_with_a_reference) {
    static int ids[VOCAB];
    static double weights[VOCAB];
    static const mp_sampling cases[] = {
        {.top_p = 1},
        {.top_p = 1, .min_p = 0.2f},
        {.top_p = 1, .top_k = 1},
        {.top_p = 1, .top_k = 3},
        {.top_p = 1, .top_k = 64},
        {.top_p = 1, .top_k = 65},
        {.top_p = 1, .top_k = 700},
        {.top_p = 0.9f, .top_k = 200},
        {.top_p = 0.95f},
        {.top_p = 0.5f, .min_p = 0.3f},
    };
    mp_test_random random = {4};
    mp_kernels_init();
    for (int i = 0; i < VOCAB; i++)
        original[i] = mp_test_random_float(&random, -4, 4);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        mp_sampling s = cases[c];
        s.temperature = 1.5f;
        s.repetition_penalty = 1;
        s.seed = c;
        const int n = allowed(&s, ids, weights);
        double total = 0;
        for (int i = 0; i < n; i++)
            total += weights[i];
        for (uint32_t position = 0; position < DRAWS; position++) {
            const mp_sample_args sample = {.sampling = &s, .choice = 2, .position = position};
            memcpy(logits, original, sizeof logits);
            const int32_t id = mp_sample(&sample, logits, VOCAB, candidates);
            const double goal = mp_random_at(c, 2, position) * total, slack = 1e-5 * total;
            double sum = 0;
            int at = 0;
            for (; at < n && ids[at] != id; at++)
                sum += weights[at];
            if (at == n || weights[at] <= 0 || sum > goal + slack || sum + weights[at] < goal - slack)
                MP_FAIL("case %zu, position %u: token %d is not the reference's", c, position, id);
        }
    }
}

/* The best candidates of logits with many ties are those of a complete sort. */
MP_TEST(models_sampler_ranks_ties_by_id) {
    static int ids[VOCAB];
    static const int numbers[] = {1, 2, 63, 64, 65, 600, VOCAB};
    mp_test_random random = {5};
    mp_kernels_init();
    for (int i = 0; i < VOCAB; i++) {
        original[i] = (float)(int)mp_test_random_float(&random, -30, 30);
        ids[i] = i;
    }
    qsort(ids, VOCAB, sizeof *ids, by_logit);
    for (size_t c = 0; c < sizeof numbers / sizeof *numbers; c++) {
        static int32_t top_ids[VOCAB];
        static float top[VOCAB];
        float logprob;
        mp_logprobs(original, VOCAB, 0, numbers[c], &logprob, top_ids, top, candidates);
        for (int i = 0; i < numbers[c]; i++)
            if (top_ids[i] != ids[i])
                MP_FAIL("the %d best: token %d at rank %d, expected %d", numbers[c], top_ids[i], i, ids[i]);
    }
}

/* The sampled token is the best that the mask allows, for words with all, no, one and some bits, and for a mask that
 * ends before the vocabulary. The last word has four bits (VOCAB is 78 * 32 + 4). */
MP_TEST(models_sampler_takes_the_best_token_of_the_mask) {
    enum { WORDS = (VOCAB + 31) / 32 };
    static uint32_t mask[WORDS];
    const mp_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    mp_test_random random = {6};
    mp_kernels_init();
    for (int times = 0; times < 400; times++) {
        const int kind = times % 5, words = times % 3 ? WORDS : 40;
        int best = -1;
        memset(mask, 0, sizeof mask);
        for (int i = 0; i < VOCAB; i++) {
            const bool some = mp_test_random_float(&random, 0, 1) < 0.1f;
            original[i] = mp_test_random_float(&random, -4, 4);
            if (kind == 0 ? true : kind == 1 ? i == times * 6 : kind == 2 ? some : kind == 3 ? !some : i / 32 % 2)
                mask[i / 32] |= UINT32_C(1) << i % 32;
            if (i / 32 < words && mask[i / 32] >> i % 32 & 1 && (best < 0 || original[i] > original[best]))
                best = i;
        }
        memcpy(logits, original, sizeof logits);
        const mp_sample_args sample = {.sampling = &greedy, .mask = mask, .mask_words = words};
        MP_CHECK_INT(mp_sample(&sample, logits, VOCAB, candidates), best);
    }
}

/* The sum of all weights is rounded, so the running sum may not exceed a random number next to 1. The sample is then
 * the last token. */
MP_TEST(models_sampler_ends_at_the_last_token) {
    enum { SMALL = 6, POSITION = 171000484 }; /* the random number of this position is 1 - 3.1e-10 */
    const mp_sampling s = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 1};
    const mp_sample_args sample = {.sampling = &s, .position = POSITION};
    const double u = mp_random_at(1, 0, POSITION);
    mp_test_random random = {3};
    int rounded = 0;
    MP_CHECK(u > 1 - 4e-10 && u < 1);
    mp_kernels_init();
    for (int times = 0; times < 200; times++) {
        float weight[SMALL];
        double sum = 0;
        logits[0] = 0;
        for (int i = 1; i < SMALL; i++)
            logits[i] = mp_test_random_float(&random, -3, -1);
        const double total = (double)mp_kernels_get()->exp_sum(logits, SMALL, 0, weight);
        for (int i = 0; i < SMALL; i++)
            sum += (double)weight[i];
        rounded += sum <= u * total;
        MP_CHECK_INT(mp_sample(&sample, logits, SMALL, candidates), SMALL - 1);
    }
    MP_CHECK(rounded >= 20 && rounded <= 180);
}

/* Penalties change the logits of the history's tokens and no others. The tokens include the first of the hash table (0)
 * and one that the output matrix does not have. */
MP_TEST(models_sampler_penalizes_the_history_only) {
    enum { GUARD = 4, FEW = 40 };
    const mp_sampling s = {.top_p = 1, .repetition_penalty = 2, .presence_penalty = 0.5f, .frequency_penalty = 0.25f};
    mp_history history = {0};
    mp_error error;
    float guarded[FEW + 2 * GUARD];
    float *few = guarded + GUARD;
    mp_kernels_init();
    for (int i = 0; i < FEW + 2 * GUARD; i++)
        guarded[i] = i % 2 ? 8 : -8;
    static const int32_t prompt[] = {0, 3, FEW, FEW + 1}, outputs[] = {0, 0, 6, FEW - 1};
    for (int i = 0; i < 4; i++) {
        MP_CHECK_OK(mp_history_add(&history, prompt[i], true, &error), &error);
        MP_CHECK_OK(mp_history_add(&history, outputs[i], false, &error), &error);
    }
    static const int32_t barred[] = {FEW, 10, -1, 11, FEW + 1}; /* ids outside the vocabulary are ignored */
    const mp_sample_args sample = {.sampling = &s, .history = &history, .n_barred = 5, .barred = barred};
    MP_CHECK_INT(mp_sample(&sample, few, FEW, candidates), 1);
    for (int i = -GUARD; i < FEW + GUARD; i++) {
        const float before = (i + GUARD) % 2 ? 8 : -8;
        const float seen = before > 0 ? before / 2 : before * 2;
        const float expected = i == 0                       ? seen - 0.5f - 2 * 0.25f
                               : i == 6 || i == FEW - 1     ? seen - 0.5f - 0.25f
                               : i == 3                     ? seen
                                                            : before;
        if (i == 10 || i == 11)
            MP_CHECK(guarded[GUARD + i] == -INFINITY);
        else
            MP_CHECK_NEAR(guarded[GUARD + i], expected, 0);
    }
    mp_history_deinit(&history);
}
