/* scan.h: the part that exact searches share. A scan compares queries with arrays of items (vectors, documents) on the
 * threads of a lease, block by block, and keeps the best items of each query.
 *
 *   mp_search_create, mp_maxsim_create -> mp_scan_add (items)* -> nearest, counts -> mp_scan_destroy
 *
 * The scan owns the memory of the threads, divides the items into blocks, stops at an invalid item and merges the
 * threads' results. The search, a struct that begins with the scan, computes scores (mp_scan_ops). A scan keeps queries
 * and results, never the items: its memory does not depend on their number. Items are numbered from 0 in the order in
 * which they are added. Equal scores are ordered by number, ascending, so the result does not depend on threads and
 * blocks.
 *
 * One thread at a time may use a scan; mp_scan_add computes on the threads of a lease. */
#ifndef MP_VECTORS_SCAN_H
#define MP_VECTORS_SCAN_H

#include "base/team.h"

enum { MP_SCAN_THREADS = 256 };

typedef struct mp_scan mp_scan;

typedef struct mp_scan_plan {
    int32_t queries; /* at least 1 */
    int32_t most;    /* nearest items to keep for each query; 0: none */
    bool counts;     /* count the items with a score of at least `least` */
    float least;
} mp_scan_plan;

typedef struct mp_scan_thread { /* the results of one thread */
    float *scores;    /* heaps of the best items (nearest.h), one for each query: [queries, most] */
    int64_t *numbers;
    int64_t *counts;  /* [queries] */
    int64_t seen;     /* items that this thread compared */
    void *scratch;    /* `scratch_bytes` of the scan, 64-byte aligned, zeroed */
} mp_scan_thread;

typedef struct mp_scan_ops {
    /* Compares all queries with items [first, first + count) of an array, and calls mp_scan_merge for each query.
     * Returns the index of the first invalid item, relative to `first`, or `count`. Must not allocate. */
    int32_t (*compare)(mp_scan *scan, mp_scan_thread *thread, const void *items, int64_t first, int32_t count);
    /* Returns INVALID_ARGUMENT, with the reason why the item at `index` of the array is invalid. `number`: the item's
     * number in the scan, for the message. */
    mp_status (*refuse)(mp_scan *scan, const void *items, int64_t index, int64_t number, mp_error *error);
    void (*destroy)(mp_scan *scan);
} mp_scan_ops;

struct mp_scan { /* the first member of a search */
    const mp_scan_ops *ops;
    mp_scan_plan plan;
    size_t scratch_bytes;
    int32_t block; /* maximum number of items in a block; may change between calls of mp_scan_add */
    int64_t base;  /* items added before the array that is being added */
    int64_t added;
    mp_scan_thread *threads[MP_SCAN_THREADS];
};

/* Releases the threads' memory and the search. NULL is legal. */
void mp_scan_destroy(mp_scan *scan);

/* Adds items [*done, count) of an array, whose type the search defines. Stops early at until_ns, after at least one
 * block of each thread. Sets *done to the number of items added so far; the caller repeats the call until it is
 * `count`. INVALID_ARGUMENT: an item is invalid; MEMORY_EXHAUSTED. After an error the scan can only be destroyed. */
mp_status mp_scan_add(mp_scan *scan, mp_lease *lease, const void *items, int64_t count, int64_t *done,
                      uint64_t until_ns, mp_error *error);

/* Called by `compare`: offers the items from index `first` on to the results of the thread. scores [count]: those of
 * one query and these items. */
void mp_scan_merge(const mp_scan *scan, mp_scan_thread *thread, int32_t query, const float *scores, int32_t count,
                   int64_t first);

/* The number of items kept for each query: `most`, or all that were added. */
int32_t mp_scan_found(const mp_scan *scan);
/* Writes the nearest items, best first, to arrays [queries, mp_scan_found]. Leaves the scan unchanged. */
void mp_scan_nearest(mp_scan *scan, int64_t *numbers, float *scores);
/* Writes the number of items with a score of at least `least` to out [queries]. */
void mp_scan_counts(const mp_scan *scan, int64_t *out);

#endif
