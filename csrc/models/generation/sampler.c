#include "models/generation/sampler.h"

#include <math.h>
#include <string.h>

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

double mp_random_at(uint64_t seed, uint32_t choice, uint32_t position) {
    uint32_t c[4] = {position, choice, 0, 0};
    uint32_t k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k[0], (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k[1],
                            (uint32_t)p0};
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    uint64_t bits = ((uint64_t)c[0] << 32 | c[1]) >> 11;
    return (double)bits * 0x1p-53;
}

/* ---- history ----------------------------------------------------------------------------------------------------- */

static struct mp_history_slot *history_slot(struct mp_history_slot *slots, uint32_t capacity, int32_t id) {
    uint32_t at = (uint32_t)id * 2654435761u & (capacity - 1);
    while (slots[at].id != -1 && slots[at].id != id)
        at = (at + 1) & (capacity - 1);
    return &slots[at];
}

enum { HISTORY_MIN = 256 };

size_t mp_history_bytes(uint32_t ids) {
    size_t capacity = HISTORY_MIN;
    while (capacity < 2 * (size_t)ids)
        capacity *= 2;
    return ids ? capacity * sizeof(struct mp_history_slot) : 0;
}

mp_status mp_history_add(mp_history *history, int32_t id, bool prompt, mp_error *error) {
    if (2 * (history->count + 1) > history->capacity) {
        uint32_t capacity = history->capacity ? 2 * history->capacity : HISTORY_MIN;
        struct mp_history_slot *slots = mp_alloc(capacity * sizeof *slots, MP_TAG_REQUEST);
        if (!slots)
            return mp_fail_memory(error, capacity * sizeof *slots, "the token history");
        for (uint32_t i = 0; i < capacity; i++)
            slots[i] = (struct mp_history_slot){.id = -1};
        for (uint32_t i = 0; i < history->capacity; i++)
            if (history->slots[i].id != -1)
                *history_slot(slots, capacity, history->slots[i].id) = history->slots[i];
        mp_free(history->slots);
        history->slots = slots;
        history->capacity = capacity;
    }
    struct mp_history_slot *slot = history_slot(history->slots, history->capacity, id);
    if (slot->id == -1) {
        slot->id = id;
        history->count++;
    }
    if (prompt)
        slot->prompt = true;
    else
        slot->output++;
    return MP_OK;
}

void mp_history_deinit(mp_history *history) {
    mp_free(history->slots);
    *history = (mp_history){0};
}

/* ---- candidates -------------------------------------------------------------------------------------------------- */

/* Larger logit first, then lower id: a total order makes every selection unique. */
static bool sampler_before(mp_candidate a, mp_candidate b) { return a.logit > b.logit || (a.logit == b.logit &&
                                                                                          a.id < b.id); }

static void sift(mp_candidate *heap, int n, int i) { /* lowest-ranked candidate on top */
    for (;;) {
        int worst = i, left = 2 * i + 1, right = left + 1;
        if (left < n && sampler_before(heap[worst], heap[left]))
            worst = left;
        if (right < n && sampler_before(heap[worst], heap[right]))
            worst = right;
        if (worst == i)
            return;
        mp_candidate t = heap[i];
        heap[i] = heap[worst];
        heap[worst] = t;
        i = worst;
    }
}

/* Selects the k largest logits, in descending order, into out[k]; skips -inf. Returns their number. */
static int select_best(const float *logits, int32_t vocab, int k, mp_candidate *out) {
    enum { SKIP = 64 }; /* ids that one test of the kernels skips if none of them ranks high enough */
    int n = 0;
    int32_t id = 0;
    for (; id < vocab && n < k; id++)
        if (logits[id] > -INFINITY)
            out[n++] = (mp_candidate){logits[id], id};
    for (int i = n / 2 - 1; i >= 0; i--)
        sift(out, n, i);
    for (; n > 0 && id < vocab; id += SKIP) {
        const int32_t end = vocab - id < SKIP ? vocab : id + SKIP;
        if (!(mp_kernels_get()->max(logits + id, end - id) > out[0].logit))
            continue;
        for (int32_t i = id; i < end; i++)
            if (logits[i] > out[0].logit) { /* ids ascend, so an equal logit never ranks higher */
                out[0] = (mp_candidate){logits[i], i};
                sift(out, n, 0);
            }
    }
    for (int m = n; m > 1; m--) { /* heap sort: the lowest-ranked moves to the end */
        mp_candidate t = out[0];
        out[0] = out[m - 1];
        out[m - 1] = t;
        sift(out, m - 1, 0);
    }
    return n;
}

/* ---- sampling ---------------------------------------------------------------------------------------------------- */

static void penalize(const mp_sample_args *sample, float *logits, int32_t vocab) {
    const mp_sampling *s = sample->sampling;
    for (int i = 0; i < sample->n_bias; i++)
        logits[sample->bias_ids[i]] += sample->bias[i];
    if (sample->history)
        for (uint32_t i = 0; i < sample->history->capacity; i++) {
            const struct mp_history_slot *slot = &sample->history->slots[i];
            if (slot->id < 0 || slot->id >= vocab)
                continue;
            float x = logits[slot->id];
            x = x > 0 ? x / s->repetition_penalty : x * s->repetition_penalty;
            if (slot->output > 0)
                x = x - s->presence_penalty - s->frequency_penalty * (float)slot->output;
            logits[slot->id] = x;
        }
    for (int i = 0; i < sample->n_barred; i++)
        if (sample->barred[i] >= 0 && sample->barred[i] < vocab)
            logits[sample->barred[i]] = -INFINITY;
}

enum { MASK_BITS = 32 };

/* Sets the logits whose bit in `word` is 0 to -inf. The table lets the compiler test several bits at once. */
static void keep_allowed(float *logits, int n, uint32_t word) {
#define FOUR(b) UINT32_C(1) << (b), UINT32_C(2) << (b), UINT32_C(4) << (b), UINT32_C(8) << (b)
    static const uint32_t BIT[MASK_BITS] = {FOUR(0),  FOUR(4),  FOUR(8),  FOUR(12),
                                            FOUR(16), FOUR(20), FOUR(24), FOUR(28)};
#undef FOUR
    for (int b = 0; b < n; b++)
        logits[b] = word & BIT[b] ? logits[b] : -INFINITY;
}

static void apply_mask(const mp_sample_args *sample, float *logits, int32_t vocab) {
    for (int32_t i = 0; sample->mask_words > 0 && i < vocab; i += MASK_BITS) {
        uint32_t word = i / MASK_BITS < sample->mask_words ? sample->mask[i / MASK_BITS] : 0;
        if (word != UINT32_MAX)
            keep_allowed(logits + i, vocab - i < MASK_BITS ? vocab - i : MASK_BITS, word);
    }
}

/* The weight of a token is exp(logit), after the largest logit was subtracted from all logits. The kernels' exponential
 * gives the same bits on every machine. Weights are summed in parts of PART ids, or of RANK_PART sorted candidates. */
enum { PART = 1024, RANK_PART = 64 };

static int32_t part_end(int32_t begin, int32_t n, int32_t part) { return n - begin < part ? n : begin + part; }

/* Returns the sum of all weights. If parts [vocab / PART, rounded up] is not NULL, also replaces the logits by the
 * weights and stores the sum of each part. */
static double weigh(float *logits, int32_t vocab, double *parts) {
    double total = 0;
    for (int32_t i = 0; i < vocab; i += PART) {
        float *out = parts ? logits + i : NULL;
        double part = (double)mp_kernels_get()->exp_sum(logits + i, part_end(i, vocab, PART) - i, 0, out);
        if (parts)
            parts[i / PART] = part;
        total += part;
    }
    return total;
}

/* Returns the first id at which the running sum of weights exceeds the goal. If rounding prevents that, returns the
 * last id with a positive weight. */
static int32_t sample_along(const float *weights, const double *parts, int32_t vocab, double goal) {
    double sum = 0;
    for (int32_t i = 0; i < vocab; i += PART) {
        double at = sum;
        sum += parts[i / PART];
        for (int32_t id = i; sum > goal && id < part_end(i, vocab, PART); id++) {
            at += (double)weights[id];
            if (weights[id] > 0 && at > goal)
                return id;
        }
    }
    int32_t last = vocab - 1;
    while (last > 0 && !(weights[last] > 0))
        last--;
    return last;
}

/* Returns the smallest number of leading candidates whose weights sum to at least `goal`; n + 1 if all n candidates do
 * not reach it. Sets *all (unless NULL) to the sum of the weights of these candidates. */
static int sampler_reach(const mp_candidate *sorted, int n, double goal, double *all) {
    float weight[RANK_PART];
    double sum = 0;
    int taken = n + 1;
    for (int i = 0; i < n && taken > n; i += RANK_PART) {
        int end = part_end(i, n, RANK_PART);
        for (int c = i; c < end; c++)
            weight[c - i] = sorted[c].logit;
        mp_kernels_get()->exp_sum(weight, end - i, 0, weight);
        for (int c = i; c < end && taken > n; c++) {
            sum += (double)weight[c - i];
            taken = sum >= goal ? c + 1 : taken;
        }
    }
    if (all)
        *all = sum;
    return taken;
}

static double sum_of(const mp_candidate *sorted, int n) {
    double sum;
    sampler_reach(sorted, n, INFINITY, &sum);
    return sum;
}

/* Applies top_k and top_p and sorts the remaining candidates. Returns their number: the smallest for which the
 * probabilities sum to at least top_p. */
static int keep_best(const mp_sampling *s, float *logits, int32_t vocab, mp_candidate *candidates) {
    if (s->top_k > 0 && s->top_k < vocab) {
        int n = select_best(logits, vocab, s->top_k, candidates);
        int keep = s->top_p < 1 ? sampler_reach(candidates, n, (double)s->top_p * sum_of(candidates, n), NULL) : n;
        return keep < n ? keep : n;
    }
    /* top_p without top_k usually keeps few candidates: select the best 256, then eight times as many until their
     * weights reach the goal */
    double goal = (double)s->top_p * weigh(logits, vocab, NULL);
    for (int k = 256;; k = k < vocab / 8 ? 8 * k : vocab) {
        int n = select_best(logits, vocab, k < vocab ? k : vocab, candidates);
        int keep = sampler_reach(candidates, n, goal, NULL);
        if (keep <= n || k >= vocab)
            return keep < n ? keep : n;
    }
}

int32_t mp_sample(const mp_sample_args *sample, float *logits, int32_t vocab, mp_candidate *candidates) {
    const mp_sampling *s = sample->sampling;
    const mp_kernels *call = mp_kernels_get();
    penalize(sample, logits, vocab);
    apply_mask(sample, logits, vocab);
    int64_t best = call->argmax(logits, vocab);
    if (best < 0 || !(logits[best] > -INFINITY) || !(logits[best] < INFINITY))
        return -1;
    if (s->temperature <= 0)
        return (int32_t)best;
    /* subtract the largest logit first: a tiny temperature then gives 0 and -inf, never NaN */
    float largest = logits[best];
    for (int32_t i = 0; i < vocab; i++)
        logits[i] = (logits[i] - largest) / s->temperature;

    double u = mp_random_at(s->seed, sample->choice, sample->position);
    float floor = s->min_p > 0 ? (float)log((double)s->min_p) : -INFINITY;
    if (!((s->top_k > 0 && s->top_k < vocab) || s->top_p < 1)) { /* no ranking needed: sample in the order of ids */
        for (int32_t i = 0; i < vocab; i++)
            logits[i] = logits[i] >= floor ? logits[i] : -INFINITY;
        double *parts = (double *)(void *)candidates; /* fit: fewer parts than candidates */
        double total = weigh(logits, vocab, parts);
        return sample_along(logits, parts, vocab, u * total);
    }
    int keep = keep_best(s, logits, vocab, candidates);
    while (keep > 1 && candidates[keep - 1].logit < floor)
        keep--;
    /* the sum must exceed u * sum, but `sampler_reach` tests >= (u may be 0): raise the goal to the next double */
    int sampled = sampler_reach(candidates, keep, nextafter(u * sum_of(candidates, keep), INFINITY), NULL);
    return candidates[sampled <= keep ? sampled - 1 : keep - 1].id;
}

void mp_logprobs(const float *logits, int32_t vocab, int32_t token, int k, float *logprob, int32_t *top_ids, float *top,
                 mp_candidate *candidates) {
    const mp_kernels *call = mp_kernels_get();
    float max = call->max(logits, vocab);
    float log_total = logf(call->exp_sum(logits, vocab, max, NULL));
    *logprob = logits[token] - max - log_total;
    if (k <= 0)
        return;
    int n = select_best(logits, vocab, k, candidates);
    for (int i = 0; i < k; i++) {
        top_ids[i] = i < n ? candidates[i].id : -1;
        top[i] = i < n ? candidates[i].logit - max - log_total : -INFINITY;
    }
}
