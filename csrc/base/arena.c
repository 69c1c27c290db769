/* arena.c: see arena.h. */
#include "base/arena.h"

#include <assert.h>
#include <stdlib.h>

#include "base/sanitize.h"

mp_status mp_arena_reserve(mp_arena *arena, size_t bytes, mp_error *error) {
    arena->used = 0;
    if (arena->memory && arena->size >= bytes)
        return MP_OK;
    mp_arena_deinit(arena); /* free the old block first: both blocks together would raise the peak */
    if (bytes > SIZE_MAX - 63)
        return mp_fail_memory(error, bytes, "scratch");
    bytes = mp_arena_cost(bytes);
    arena->memory = mp_alloc(bytes, MP_TAG_SCRATCH);
    if (!arena->memory)
        return mp_fail_memory(error, bytes, "scratch");
    arena->size = bytes;
    MP_GUARD(arena->memory, bytes);
    return MP_OK;
}

void mp_arena_deinit(mp_arena *arena) {
    if (arena->memory)
        MP_UNGUARD(arena->memory, arena->size);
    mp_free(arena->memory);
    arena->memory = NULL;
    arena->size = arena->used = 0;
}

void mp_arena_reset(mp_arena *arena) { arena->used = 0; }

void *mp_arena_take(mp_arena *arena, size_t bytes) {
    /* An overflow would return memory of another owner, so it aborts in release builds too. */
    bool fits = arena->memory && arena->used <= arena->size && bytes <= arena->size - arena->used;
    assert(fits && "the arena was reserved too small");
    if (!fits)
        abort();
    uint8_t *block = arena->memory + arena->used;
    size_t cost = mp_arena_cost(bytes);
    MP_GUARD(block, cost);
    MP_UNGUARD(block, bytes);
    arena->used += cost;
    if (arena->used > arena->peak)
        arena->peak = arena->used;
    return block;
}
