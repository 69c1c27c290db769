#include "models/nn/expert_reads.h"

#include "base/log.h"

/* Two system calls per thread measure a use; the rows of a token use each of 20 to 90 layers once. */
enum { SAMPLE = 7, WINDOW = 64 };

bool mp_expert_reads_sample(mp_expert_reads *reads) {
    return reads && !atomic_load_explicit(&reads->thrashing, memory_order_relaxed) &&
           atomic_fetch_add_explicit(&reads->uses, 1, memory_order_relaxed) % SAMPLE == 0;
}

void mp_expert_reads_add(mp_expert_reads *reads, bool missed) {
    if (missed)
        atomic_fetch_add_explicit(&reads->missed, 1, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&reads->counted, 1, memory_order_relaxed) + 1 < WINDOW)
        return;
    const uint32_t misses = atomic_exchange_explicit(&reads->missed, 0, memory_order_relaxed);
    atomic_store_explicit(&reads->counted, 0, memory_order_relaxed);
    if (misses < WINDOW / 4 || atomic_exchange_explicit(&reads->thrashing, 1, memory_order_relaxed))
        return;
    mp_log(MP_LOG_WARNING,
           "%s: the same experts are read from the disk repeatedly: %u of %d sampled passes through a layer waited for "
           "experts that had been used before. The experts have %.1f MB, more than the page cache can hold. Free "
           "memory, or use a file with fewer bits per weight",
           reads->name, misses, WINDOW, (double)reads->bytes / 1e6);
}
