/* search.h: exact search in arrays of vectors: the nearest vectors of each query, and how many reach a threshold.
 *
 *   mp_search_create (queries) -> mp_scan_add (vectors)* -> mp_scan_nearest, mp_scan_counts -> mp_scan_destroy
 *
 * The items of the scan are vectors: mp_scan_add takes an array of floats [count, dim]. scan.h states the rest.
 *
 * Scores. Dot product: one chain of fp32 FMAs, as gemm_f32 (kernels.h). Cosine: that product times (1 / |vector| * 1 /
 * |query|); 0 if one of them is zero. If the squared length of one of them is outside 1e-24 to 1e30, the score is
 * computed in double. A score depends on its query and vector only, not on other queries, threads or calls, and stays
 * the same if query and vector change places. */
#ifndef MP_VECTORS_SEARCH_H
#define MP_VECTORS_SEARCH_H

#include "vectors/scan.h"

typedef struct mp_search_plan {
    mp_scan_plan scan;
    int32_t dim; /* at least 1 */
    bool cosine; /* false: dot product */
} mp_search_plan;

/* Creates a scan and copies queries [queries, dim]. INVALID_ARGUMENT: a component is not finite. MEMORY_EXHAUSTED: the
 * system refuses the memory. mp_scan_add then refuses vectors with a component that is not finite. */
mp_status mp_search_create(const mp_search_plan *plan, const float *queries, mp_scan **scan, mp_error *error);

#endif
