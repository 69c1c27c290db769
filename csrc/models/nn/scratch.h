/* nn/scratch.h: scratch that the lanes of a region divide, each for itself and all alike. */
#ifndef MP_MODELS_NN_SCRATCH_H
#define MP_MODELS_NN_SCRATCH_H

#include "base/arena.h"

/* The next `bytes` at *at, which moves on by mp_arena_cost(bytes). */
static inline void *mp_scratch_take(uint8_t **at, size_t bytes) {
    void *taken = *at;
    *at += mp_arena_cost(bytes);
    return taken;
}

#endif
