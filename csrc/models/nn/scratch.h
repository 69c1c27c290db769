/* nn/scratch.h: sizes and division of scratch buffers. Every thread of a region computes the same layout. */
#ifndef MP_MODELS_NN_SCRATCH_H
#define MP_MODELS_NN_SCRATCH_H

#include "base/arena.h"

static inline size_t mp_larger(size_t a, size_t b) { return a > b ? a : b; }

/* Returns the next `bytes` at *at and advances *at by mp_arena_cost(bytes). */
static inline void *mp_scratch_take(uint8_t **at, size_t bytes) {
    void *taken = *at;
    *at += mp_arena_cost(bytes);
    return taken;
}

#endif
