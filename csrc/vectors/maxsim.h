/* maxsim.h: exact late interaction (ColBERT, arXiv:2004.12832): scores of queries and documents that are matrices of
 * token vectors.
 *
 *   mp_maxsim_create (queries) -> mp_scan_add (mp_maxsim_documents)* -> mp_scan_nearest -> mp_scan_destroy
 *
 * score(query, document) = sum over the query's tokens of the maximum over the document's tokens of the dot product.
 * A dot product is multiplied by the scale of the document's token if there are scales. For float32 documents it has
 * the bits of gemm_f32 (kernels.h). For int8 documents, each token of a query is rounded once to fixed-point numbers of
 * 24 bits: the error of a component is at most 1.004 * 2^-23 of the token's largest absolute component, or 2^-126
 * (digits.h). Integer products and their sums over MP_K_CHUNK components are exact, and are then rounded to float32
 * (slot row_maxima_i8). For normally distributed vectors, int8 documents give scores that are nearer to float64 than
 * those of float32 documents.
 *
 * The sum over the query's tokens is a chain of doubles in their order, rounded once; a sum beyond float32 becomes its
 * largest value. A document without tokens scores -inf. A score depends on its query and document only, not on other
 * queries, threads or calls.
 *
 * The items of the scan are documents, ragged: the tokens of document d are rows [offsets[d], offsets[d + 1]). scan.h
 * states the rest. No matrix of scores is written to memory (slots row_maxima and row_maxima_i8). */
#ifndef MP_VECTORS_MAXSIM_H
#define MP_VECTORS_MAXSIM_H

#include "tensor/tensor.h"
#include "vectors/scan.h"

/* Maximum of query tokens x document tokens x dim for one document and all queries of a scan: about a second on one
 * thread, during which the scan does not stop. */
#define MP_MAXSIM_WORK (INT64_C(1) << 35)

typedef struct mp_maxsim_plan {
    mp_scan_plan scan;
    int32_t dim; /* 1 to 2^20 */
} mp_maxsim_plan;

typedef struct mp_maxsim_documents { /* all borrowed */
    mp_dtype dtype;         /* MP_F32 or MP_I8 */
    const void *values;     /* [offsets[count], dim] */
    const float *scales;    /* [offsets[count]]: factors of the rows; NULL: 1 */
    const int64_t *offsets; /* [count + 1], from 0, not descending: the caller has checked them */
    float *scores;          /* NULL, or receives all scores: score of query q and document d at q * ld + d */
    int64_t ld;
} mp_maxsim_documents;

/* Creates a scan and copies the queries: the tokens of query q are rows [offsets[q], offsets[q + 1]) of tokens
 * [offsets[queries], dim]. Checks `offsets`. INVALID_ARGUMENT: a query without tokens, more than 2^20 tokens, or a
 * component that is not finite. MEMORY_EXHAUSTED: the system refuses the memory.
 *
 * mp_scan_add then refuses documents with a component or a scale that is not finite, with a product beyond float32, or
 * with more work than MP_MAXSIM_WORK. */
mp_status mp_maxsim_create(const mp_maxsim_plan *plan, const float *tokens, const int64_t *offsets, mp_scan **scan,
                           mp_error *error);
/* Call before the first mp_scan_add of an array of `count` documents: sets the size of blocks from their lengths, and
 * converts the queries before the first array of int8. */
void mp_maxsim_begin(mp_scan *scan, const mp_maxsim_documents *documents, int64_t count);

#endif
