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

/* Returns an estimate of the given quantile (0..1), as if the durations of a bucket lay evenly between its bounds; 0 if
 * count is 0. It is between the minimum and the maximum. */
static inline uint64_t mp_histogram_quantile(const mp_histogram *histogram, double share) {
    double wanted = share * (double)histogram->count, found = (double)histogram->max_ns;
    for (int i = 0; i < MP_HISTOGRAM_BUCKETS - 1; i++) {
        const double count = (double)histogram->bucket[i], low = i > 0 ? (double)mp_histogram_bound(i - 1) : 0;
        if (count > 0 && count >= wanted) {
            found = low + ((double)mp_histogram_bound(i) - low) * wanted / count;
            break;
        }
        wanted -= count;
    }
    const uint64_t ns = (uint64_t)found;
    return ns < histogram->min_ns ? histogram->min_ns : ns > histogram->max_ns ? histogram->max_ns : ns;
}

#endif
