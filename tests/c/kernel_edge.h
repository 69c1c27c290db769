/* kernel_edge.h: memory that ends at an inaccessible page, so that a read or write past its end crashes. This also
 * catches vector code, which sanitizers do not instrument. */
#ifndef MP_KERNEL_EDGE_H
#define MP_KERNEL_EDGE_H

#include <sys/mman.h>
#include <unistd.h>

#include "mp_test.h"

/* Allocate n zeroed floats that end at the page boundary. */
static inline float *kt_edge(int64_t n) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t bytes = (sizeof(float) * (size_t)n + page - 1) / page * page;
    uint8_t *memory = mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + bytes, page, PROT_NONE) != 0)
        MP_FAIL("cannot allocate %lld floats for the test", (long long)n);
    return (float *)(void *)(memory + bytes) - n;
}

static inline void kt_edge_free(float *x, int64_t n) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t bytes = (sizeof(float) * (size_t)n + page - 1) / page * page;
    munmap((uint8_t *)(x + n) - bytes, bytes + page);
}

#endif
