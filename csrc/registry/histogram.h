/* histogram.h: durations counted in buckets whose bounds double. Guarded by its owner's lock. */
#ifndef MP_REGISTRY_HISTOGRAM_H
#define MP_REGISTRY_HISTOGRAM_H

#include <stdint.h>

enum { MP_HISTOGRAM_BUCKETS = 28 };

typedef struct mp_histogram {
    uint64_t count, sum_ns, min_ns, max_ns; /* min and max are 0 if count is 0 */
    /* [i]: durations in [mp_histogram_bound(i - 1), mp_histogram_bound(i)); the last has no upper bound */
    uint64_t bucket[MP_HISTOGRAM_BUCKETS];
} mp_histogram;

/* 1 us, 2 us, 4 us, ... */
static inline uint64_t mp_histogram_bound(int i) { return 1000ull << i; }

static inline void mp_histogram_add(mp_histogram *histogram, uint64_t ns) {
    int i = 0;
    while (i < MP_HISTOGRAM_BUCKETS - 1 && ns >= mp_histogram_bound(i))
        i++;
    histogram->bucket[i]++;
    if (histogram->count == 0 || ns < histogram->min_ns)
        histogram->min_ns = ns;
    if (ns > histogram->max_ns)
        histogram->max_ns = ns;
    histogram->count++;
    histogram->sum_ns += ns;
}

#endif
