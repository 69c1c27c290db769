/* generation/kv_arena.h: memory of KV blocks, all of one size (slots), in regions of whole huge pages.
 *
 *   region, from a boundary of 2 MiB on:   slot 0 | slot 1 | ... | slot n-1 | rest, at most 1/16
 *
 * The attention of a step reads 8 to 64 KiB of each block per layer and head. With pages of 4 KiB, each of these reads
 * needs several entries of the TLB; in a huge page it needs one.
 *
 * A region is charged to the budget as a whole when it is reserved, and returned to the budget and to the system when
 * its last slot is given back. A new slot comes from the region with the lowest address that has a free one, so the
 * regions at high addresses become empty. Slots below MP_KV_SLOT_MIN (small models) are separate allocations: a
 * region would hold more than such a model needs. One thread at a time. */
#ifndef MP_MODELS_GENERATION_KV_ARENA_H
#define MP_MODELS_GENERATION_KV_ARENA_H

#include "base/alloc.h"

enum { MP_KV_SLOT_MIN = 128 << 10, MP_KV_REGION_SLOTS = 256 };

typedef struct mp_kv_region {
    uint8_t *memory;
    uint32_t used;                              /* slots in use */
    uint64_t taken[MP_KV_REGION_SLOTS / 64];    /* bit per slot */
    uint64_t written[MP_KV_REGION_SLOTS / 64];  /* bit per slot: it was taken before */
} mp_kv_region;

typedef struct mp_kv_arena {
    mp_budget *budget;
    size_t slot_bytes;
    size_t region_bytes; /* 0: each slot is a separate allocation */
    uint32_t slots;      /* slots per region */
    uint32_t count, capacity;
    uint32_t open;         /* no region before this one has a free slot */
    mp_kv_region *regions; /* [count] by address */
    uint64_t bytes;        /* charged to the budget */
} mp_kv_arena;

void mp_kv_arena_init(mp_kv_arena *arena, size_t slot_bytes, mp_budget *budget);
/* Frees the table of regions. All slots must have been given back. */
void mp_kv_arena_deinit(mp_kv_arena *arena);
/* Takes a slot. *zero: the slot is zero, because the system zeroed its pages and nothing was written since; else its
 * contents are undefined. MEMORY_EXHAUSTED when the budget or the system refuses a region; the arena is then
 * unchanged. */
mp_status mp_kv_arena_take(mp_kv_arena *arena, void **slot, bool *zero, mp_error *error);
/* Gives a slot back. Returns the bytes that this returned to the budget and to the system: those of the region if it is
 * empty now, or else 0. */
size_t mp_kv_arena_give(mp_kv_arena *arena, void *slot);

#endif
