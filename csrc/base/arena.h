/* arena.h: scratch memory of one worker.
 *
 *   memory             used                                 size
 *   |  taken           |  free                              |
 *   +------------------+------------------------------------+
 *
 * Every piece starts on 64 bytes. An arena is sized before a step (mp_arena_reserve) and never grows inside one, so no
 * layer allocates. reset drops everything. One thread at a time. */
#ifndef MP_BASE_ARENA_H
#define MP_BASE_ARENA_H

#include "base/alloc.h"

typedef struct mp_arena {
    uint8_t *memory;
    size_t size, used, peak;
} mp_arena;

/* Storage is the caller's and zeroed. */
mp_status mp_arena_reserve(mp_arena *arena, size_t bytes, mp_error *error); /* contents are dropped */
void mp_arena_deinit(mp_arena *arena);
void mp_arena_reset(mp_arena *arena);
/* Never NULL: the caller reserved enough (asserted; in release an overflow aborts as the internal fault it is). */
void *mp_arena_take(mp_arena *arena, size_t bytes);
/* What a piece of `bytes` costs in an arena, for sizing. */
static inline size_t mp_arena_cost(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

#endif
