#include "models/generation/kv_arena.h"

#include <assert.h>
#include <string.h>

#include "base/sanitize.h"
#include "base/sys.h"

/* Chooses the smallest region of which at most a sixteenth is left over. The region is smaller than 16 huge pages plus
 * one slot. */
static void set_region(mp_kv_arena *arena) {
    const size_t page = MP_HUGE_PAGE, slot = arena->slot_bytes;
    for (size_t bytes = (slot + page - 1) / page * page;; bytes += page) {
        const size_t slots = bytes / slot;
        if (bytes - slots * slot <= bytes / 16) {
            arena->region_bytes = bytes;
            arena->slots = (uint32_t)slots;
            break;
        }
    }
    assert(arena->slots <= MP_KV_REGION_SLOTS);
}

void mp_kv_arena_init(mp_kv_arena *arena, size_t slot_bytes, mp_budget *budget) {
    *arena = (mp_kv_arena){.budget = budget, .slot_bytes = slot_bytes};
    if (slot_bytes >= MP_KV_SLOT_MIN)
        set_region(arena);
}

void mp_kv_arena_deinit(mp_kv_arena *arena) {
    assert(arena->count == 0 && arena->bytes == 0);
    mp_free(arena->regions);
    arena->regions = NULL;
    arena->capacity = arena->open = 0;
}

/* ---- regions ----------------------------------------------------------------------------------------------------- */

static mp_status arena_reserve(mp_kv_arena *arena, size_t bytes, void **memory, mp_error *error) {
    if (!mp_budget_take(arena->budget, bytes))
        return mp_fail_memory(error, bytes, "a KV block");
    *memory = arena->region_bytes ? mp_region_alloc(bytes, MP_TAG_KV) : mp_alloc(bytes, MP_TAG_KV);
    if (!*memory) {
        mp_budget_give(arena->budget, bytes);
        return mp_fail_memory(error, bytes, "a KV block");
    }
    arena->bytes += bytes;
    return MP_OK;
}

static size_t arena_unreserve(mp_kv_arena *arena, void *memory, size_t bytes) {
    if (arena->region_bytes)
        mp_region_free(memory, bytes, MP_TAG_KV);
    else
        mp_free(memory);
    mp_budget_give(arena->budget, bytes);
    arena->bytes -= bytes;
    return bytes;
}

/* Returns the index of the first region whose memory begins after `address`. */
static uint32_t region_after(const mp_kv_arena *arena, const void *address) {
    uint32_t low = 0, high = arena->count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if ((uintptr_t)arena->regions[middle].memory > (uintptr_t)address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static mp_status add_region(mp_kv_arena *arena, mp_error *error) {
    if (arena->count == arena->capacity) {
        const uint32_t capacity = arena->capacity ? 2 * arena->capacity : 16;
        mp_kv_region *grown = mp_realloc(arena->regions, capacity * sizeof *grown, MP_TAG_KV);
        if (!grown)
            return mp_fail_memory(error, capacity * sizeof *grown, "the table of KV regions");
        arena->regions = grown;
        arena->capacity = capacity;
    }
    void *memory;
    MP_TRY(arena_reserve(arena, arena->region_bytes, &memory, error));
    const uint32_t at = region_after(arena, memory);
    memmove(&arena->regions[at + 1], &arena->regions[at], (arena->count - at) * sizeof *arena->regions);
    arena->regions[at] = (mp_kv_region){.memory = memory};
    arena->count++;
    arena->open = at; /* all others are full */
    MP_GUARD(memory, arena->region_bytes);
    return MP_OK;
}

static size_t remove_region(mp_kv_arena *arena, uint32_t at) {
    void *memory = arena->regions[at].memory;
    arena->count--;
    memmove(&arena->regions[at], &arena->regions[at + 1], (arena->count - at) * sizeof *arena->regions);
    return arena_unreserve(arena, memory, arena->region_bytes);
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

mp_status mp_kv_arena_take(mp_kv_arena *arena, void **slot, bool *zero, mp_error *error) {
    *zero = false;
    if (!arena->region_bytes)
        return arena_reserve(arena, arena->slot_bytes, slot, error);
    while (arena->open < arena->count && arena->regions[arena->open].used == arena->slots)
        arena->open++;
    if (arena->open == arena->count)
        MP_TRY(add_region(arena, error));
    mp_kv_region *region = &arena->regions[arena->open];
    uint32_t word = 0;
    while (region->taken[word] == UINT64_MAX)
        word++;
    const uint32_t bit = (uint32_t)__builtin_ctzll(~region->taken[word]);
    *zero = mp_sys_alloc_is_zero(arena->region_bytes) && (region->written[word] >> bit & 1) == 0;
    region->taken[word] |= (uint64_t)1 << bit;
    region->written[word] |= (uint64_t)1 << bit;
    region->used++;
    *slot = region->memory + (size_t)(word * 64 + bit) * arena->slot_bytes;
    MP_UNGUARD(*slot, arena->slot_bytes);
    return MP_OK;
}

size_t mp_kv_arena_give(mp_kv_arena *arena, void *slot) {
    if (!arena->region_bytes)
        return arena_unreserve(arena, slot, arena->slot_bytes);
    const uint32_t at = region_after(arena, slot) - 1;
    mp_kv_region *region = &arena->regions[at];
    const size_t index = (size_t)((uint8_t *)slot - region->memory) / arena->slot_bytes;
    const uint64_t bit = (uint64_t)1 << index % 64;
    assert(at < arena->count && index < arena->slots && (region->taken[index / 64] & bit) != 0);
    MP_GUARD(slot, arena->slot_bytes);
    region->taken[index / 64] &= ~bit;
    if (at < arena->open)
        arena->open = at;
    return --region->used == 0 ? remove_region(arena, at) : 0;
}
