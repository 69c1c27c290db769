/* nearest.c: see nearest.h. */
#include "vectors/nearest.h"

#include <stdbool.h>

/* True if the first of two candidates comes after the second in the result. */
static bool is_worse(float score, int64_t number, float other, int64_t other_number) {
    return score < other || (score == other && number > other_number);
}

/* Puts a candidate into the heap [count] in place of its first element. */
static void sift_down(float *scores, int64_t *numbers, int32_t count, float score, int64_t number) {
    int32_t at = 0;
    for (int32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && is_worse(scores[child + 1], numbers[child + 1], scores[child], numbers[child]))
            child++;
        if (!is_worse(scores[child], numbers[child], score, number))
            break;
        scores[at] = scores[child];
        numbers[at] = numbers[child];
    }
    scores[at] = score;
    numbers[at] = number;
}

void mp_nearest_offer(float *scores, int64_t *numbers, int64_t *count, int32_t most, float score, int64_t number) {
    if (*count == most) {
        if (is_worse(scores[0], numbers[0], score, number))
            sift_down(scores, numbers, most, score, number);
        return;
    }
    int64_t at = (*count)++;
    for (int64_t parent; at > 0; at = parent) {
        parent = (at - 1) / 2;
        if (!is_worse(score, number, scores[parent], numbers[parent]))
            break;
        scores[at] = scores[parent];
        numbers[at] = numbers[parent];
    }
    scores[at] = score;
    numbers[at] = number;
}

void mp_nearest_sort(float *scores, int64_t *numbers, int32_t count) {
    /* heapsort: move the worst element behind the rest of the heap until one is left */
    for (int32_t left = count - 1; left > 0; left--) {
        const float score = scores[left];
        const int64_t number = numbers[left];
        scores[left] = scores[0];
        numbers[left] = numbers[0];
        sift_down(scores, numbers, left, score, number);
    }
}
