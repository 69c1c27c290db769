/* arena.h: scratch memory of one worker.
 *
 *   memory             used                                 size
 *   |  taken           |  free                              |
 *   +------------------+------------------------------------+
 *
 * Every block starts on a multiple of 64 bytes. An arena is sized before a step (mp_arena_reserve) and never grows
 * inside a step, so no layer allocates. mp_arena_reset frees all blocks. One thread at a time. */
#ifndef MP_BASE_ARENA_H
#define MP_BASE_ARENA_H

#include "base/alloc.h"

typedef struct mp_arena {
    uint8_t *memory;
    size_t size, used, peak;
} mp_arena;

/* Give an arena space for `bytes` bytes and free all its blocks. The caller zeroes `*arena` before the first call.
 * MEMORY_EXHAUSTED when refused. */
mp_status mp_arena_reserve(mp_arena *arena, size_t bytes, mp_error *error);
void mp_arena_deinit(mp_arena *arena);
void mp_arena_reset(mp_arena *arena);
/* Allocate an uninitialised block. Never returns NULL: the caller must have reserved enough, and an overflow aborts. */
void *mp_arena_take(mp_arena *arena, size_t bytes);
/* Bytes that a block of `bytes` bytes occupies in an arena. Callers add these up for mp_arena_reserve. */
static inline size_t mp_arena_cost(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

#endif
