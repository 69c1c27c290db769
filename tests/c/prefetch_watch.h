/* prefetch_watch.h: counts prefetches. A file replaces the prefetches of the kernels that it includes by note_prefetch.
 */
#ifndef PREFETCH_WATCH_H
#define PREFETCH_WATCH_H

#include <stdint.h>
#include <string.h>

/* Since `watch`: the prefetches of each line of 64 bytes from `watched` on, and all prefetches. */
enum { MAX_LINES = 1 << 14 };
static const uint8_t *watched;
static uint8_t hits[MAX_LINES];
static int64_t prefetched;

static void note_prefetch(const void *address) {
    const uintptr_t line = ((uintptr_t)address - (uintptr_t)watched) / 64;
    prefetched++;
    if (line < MAX_LINES)
        hits[line]++;
}

static void watch(const void *base) {
    watched = base;
    prefetched = 0;
    memset(hits, 0, sizeof hits);
}

#endif
