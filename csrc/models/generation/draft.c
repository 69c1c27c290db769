#include "models/generation/draft.h"

#include <math.h>
#include <string.h>

enum { MIN_SLOTS = 1 << 10, MAX_SLOTS = 1 << 17 };

static uint32_t slot_of(const mp_draft_index *index, const int32_t *end, int run) {
    uint64_t hash = (uint64_t)run;
    for (int i = run; i > 0; i--)
        hash = (hash ^ (uint32_t)end[-i]) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(hash >> 32) & (index->capacity - 1);
}

/* Grows the table to at least six slots per token (each token ends two runs), up to MAX_SLOTS. Growing clears the
 * index, so the caller indexes all tokens again. At MAX_SLOTS, new runs overwrite old runs. Returns false if memory is
 * exhausted. */
static bool reserve_slots(mp_draft_index *index, mp_budget *budget, int32_t count) {
    uint32_t capacity = index->capacity ? index->capacity : MIN_SLOTS;
    while (capacity < MAX_SLOTS && (uint64_t)capacity < 6 * (uint64_t)count)
        capacity *= 2;
    if (capacity == index->capacity)
        return true;
    mp_draft_deinit(index, budget);
    uint64_t bytes = (uint64_t)capacity * sizeof *index->ends;
    if (!mp_budget_take(budget, bytes))
        return false;
    index->ends = mp_alloc_zeroed(bytes, MP_TAG_REQUEST);
    if (!index->ends) {
        mp_budget_give(budget, bytes);
        return false;
    }
    index->charged = bytes;
    index->capacity = capacity;
    return true;
}

static int32_t look_up(const mp_draft_index *index, const int32_t *tokens, int32_t count, int run) {
    if (count <= run)
        return 0;
    int32_t end = (int32_t)index->ends[slot_of(index, tokens + count, run)];
    size_t bytes = (size_t)run * sizeof *tokens;
    /* compare the tokens, because runs of both lengths and runs with equal hashes share slots */
    return end >= run && memcmp(tokens + end - run, tokens + count - run, bytes) == 0 ? end : 0;
}

int mp_draft_find(mp_draft_index *index, mp_budget *budget, const int32_t *tokens, int32_t count, int most,
                  int32_t *draft, int *run) {
    *run = 0;
    if (!reserve_slots(index, budget, count))
        return 0;
    /* index all runs except those that end the sequence: no token follows them yet */
    for (; index->count < count; index->count++)
        for (int n = MP_DRAFT_SHORT; n <= MP_DRAFT_LONG; n++)
            if (index->count >= n)
                index->ends[slot_of(index, tokens + index->count, n)] = (uint32_t)index->count;
    int32_t end = 0;
    for (int n = MP_DRAFT_LONG; n >= MP_DRAFT_SHORT && !end; n--)
        end = look_up(index, tokens, count, n);
    if (!end)
        return 0;
    while (*run < MP_DRAFT_RUN && *run < end && tokens[end - 1 - *run] == tokens[count - 1 - *run])
        ++*run;
    /* past the end of the sequence, copy the draft's own tokens: the sequence is repeating itself */
    for (int i = 0; i < most; i++)
        draft[i] = end + i < count ? tokens[end + i] : draft[end + i - count];
    return most;
}

void mp_draft_deinit(mp_draft_index *index, mp_budget *budget) {
    mp_free(index->ends);
    mp_budget_give(budget, index->charged);
    *index = (mp_draft_index){0};
}

int mp_draft_confidence(const float *logits, int32_t vocab, int32_t *likeliest) {
    static const float differences[MP_DRAFT_CLASSES - 1] = {0.5f, 1.5f, 3, 6};
    enum { WIDTH = 16 }; /* independent maxima, which the compiler keeps in vectors */
    float first[WIDTH], second[WIDTH];
    int32_t id = 0;
    int confidence = 0;
    for (int i = 0; i < WIDTH; i++)
        first[i] = second[i] = -INFINITY;
    for (; id + WIDTH <= vocab; id += WIDTH)
        for (int i = 0; i < WIDTH; i++) {
            const float x = logits[id + i], low = x < first[i] ? x : first[i];
            first[i] = x > first[i] ? x : first[i];
            second[i] = low > second[i] ? low : second[i];
        }
    for (int i = 0; id < vocab; id++, i++) {
        const float x = logits[id], low = x < first[i] ? x : first[i];
        first[i] = x > first[i] ? x : first[i];
        second[i] = low > second[i] ? low : second[i];
    }
    float best = first[0], next = second[0];
    for (int i = 1; i < WIDTH; i++) {
        const float low = first[i] < best ? first[i] : best;
        best = first[i] > best ? first[i] : best;
        next = low > next ? low : next;
        next = second[i] > next ? second[i] : next;
    }
    *likeliest = 0;
    while (*likeliest + 1 < vocab && logits[*likeliest] != best)
        ++*likeliest;
    while (confidence < MP_DRAFT_CLASSES - 1 && best - next >= differences[confidence])
        confidence++;
    return confidence;
}
