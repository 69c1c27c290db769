/* search.h: exact search in arrays of vectors: the nearest vectors of each query, and how many reach a threshold.
 *
 *   create (queries) -> add (vectors)* -> nearest, counts -> destroy
 *
 * A search keeps its queries and their nearest vectors, never the vectors: its memory does not depend on their number.
 * Vectors are numbered from 0 in the order in which they are added.
 *
 * Scores. Dot product: one chain of fp32 FMAs, as gemm_f32 (kernels.h). Cosine: that product times (1 / |vector| * 1 /
 * |query|); 0 if one of them is zero. If the squared length of one of them is not of medium size, the score is computed
 * in double. A score depends on its query and vector only, not on other queries, threads or calls, and stays the same
 * if query and vector change places. Equal scores are ordered by number, ascending.
 *
 * One thread at a time may use a search; mp_search_add computes on the threads of a lease. */
#ifndef MP_VECTORS_SEARCH_H
#define MP_VECTORS_SEARCH_H

#include "base/team.h"

typedef struct mp_search mp_search;

typedef struct mp_search_plan {
    int32_t queries, dim; /* both at least 1 */
    int32_t most;         /* nearest vectors to keep for each query; 0: none */
    bool cosine;          /* false: dot product */
    bool counts;          /* count the vectors with a score of at least `least` */
    float least;
} mp_search_plan;

/* Copies queries [queries, dim]. INVALID_ARGUMENT: a component is not finite. MEMORY_EXHAUSTED. */
mp_status mp_search_create(const mp_search_plan *plan, const float *queries, mp_search **search, mp_error *error);
void mp_search_destroy(mp_search *search); /* NULL is legal */

/* Adds vectors [*done, count) of an array [count, dim]. Stops early at until_ns, after at least one block of vectors.
 * Sets *done to the number of vectors added so far; the caller repeats the call until it is `count`. INVALID_ARGUMENT:
 * a component is not finite; MEMORY_EXHAUSTED. After an error the search can only be destroyed. */
mp_status mp_search_add(mp_search *search, mp_lease *lease, const float *vectors, int64_t count, int64_t *done,
                        uint64_t until_ns, mp_error *error);

/* The number of vectors kept for each query: `most`, or all that were added. */
int32_t mp_search_found(const mp_search *search);
/* Writes the nearest vectors, best first, to arrays [queries, mp_search_found]. May be called once. */
void mp_search_nearest(mp_search *search, int64_t *numbers, float *scores);
/* Writes the number of vectors with a score of at least `least` to out [queries]. */
void mp_search_counts(const mp_search *search, int64_t *out);

#endif
