/* nearest.h: the best of many scores: a heap whose first element is the worst one kept.
 *
 * Candidates are ordered by score, descending, then by number, ascending. Scores must not be NaN. */
#ifndef MP_VECTORS_NEAREST_H
#define MP_VECTORS_NEAREST_H

#include <stdint.h>

/* Adds a candidate to the heap [*count, most], most >= 1, if it is among the best. */
void mp_nearest_offer(float *scores, int64_t *numbers, int64_t *count, int32_t most, float score, int64_t number);
/* Turns a heap of `count` elements into a list, best first. */
void mp_nearest_sort(float *scores, int64_t *numbers, int32_t count);

#endif
