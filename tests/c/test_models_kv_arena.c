/* Memory of KV blocks: regions of whole huge pages, charged as a whole and returned when they are empty. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/sanitize.h"
#include "base/sys.h"
#include "mp_test.h"
#include "models/generation/kv_arena.h"
#include "models/generation/prefix_cache.h"

enum { SLOT = 700 * 1024, PER_REGION = 11 }; /* 11 slots in 8 MiB, the rest is 6 % */

/* Every region is the smallest one with a rest of at most 1/16. */
MP_TEST(models_kv_arena_regions_have_a_small_rest) {
    mp_budget budget = {.limit = UINT64_MAX};
    mp_test_random random = {3};
    for (int i = 0; i < 20000; i++) {
        const size_t slot = i < 64 ? MP_KV_SLOT_MIN + (size_t)i * 64
                                   : MP_KV_SLOT_MIN + (size_t)(mp_test_random_u64(&random) % (64u << 20)) / 64 * 64;
        mp_kv_arena arena;
        mp_kv_arena_init(&arena, slot, &budget);
        const size_t used = arena.slots * slot, bytes = arena.region_bytes;
        MP_CHECK(bytes % MP_HUGE_PAGE == 0 && used <= bytes && bytes - used <= bytes / 16 && bytes - used < slot);
        MP_CHECK(arena.slots >= 1 && arena.slots <= MP_KV_REGION_SLOTS);
        MP_CHECK(bytes < ((size_t)32 << 20) + slot + MP_HUGE_PAGE);
        for (size_t less = MP_HUGE_PAGE; less < bytes; less += MP_HUGE_PAGE)
            MP_CHECK(less < slot || less % slot > less / 16);
    }
    mp_kv_arena small;
    mp_kv_arena_init(&small, MP_KV_SLOT_MIN - 1, &budget);
    MP_CHECK_INT(small.region_bytes, 0);
    mp_kv_arena_init(&small, SLOT, &budget);
    MP_CHECK_INT(small.slots, PER_REGION);
    MP_CHECK_INT(small.region_bytes, 8 << 20);
}

static mp_status take(mp_kv_arena *arena, void *slot_out, mp_error *error) {
    bool zero;
    return mp_kv_arena_take(arena, slot_out, &zero, error);
}

static bool is_zero(const uint8_t *bytes, size_t count) {
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, count - 1) == 0;
}

/* A slot counts as zero once: when it is taken for the first time since its region was mapped. */
MP_TEST(models_kv_arena_slots_are_zero_once) {
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_arena arena;
    mp_error error;
    uint8_t *slots[PER_REGION + 1];
    bool zero, mapped = mp_sys_alloc_is_zero(8 << 20);
    mp_kv_arena_init(&arena, SLOT, &budget);
    for (int round = 0; round < 2; round++) { /* the second round uses new regions */
        for (int pass = 0; pass < 3; pass++) {
            for (int i = pass ? 1 : 0; i <= PER_REGION; i++) { /* slot 0 keeps the first region */
                MP_CHECK_OK(mp_kv_arena_take(&arena, (void **)&slots[i], &zero, &error), &error);
                MP_CHECK_INT(zero, mapped && (pass == 0 || i == PER_REGION));
                MP_CHECK(!zero || is_zero(slots[i], SLOT));
                memset(slots[i], 1, SLOT);
            }
            for (int i = PER_REGION; i > 0; i--)
                mp_kv_arena_give(&arena, slots[i]);
        }
        mp_kv_arena_give(&arena, slots[0]);
        MP_CHECK_INT(arena.count, 0);
    }
    mp_kv_arena_deinit(&arena);
    mp_kv_arena_init(&arena, 1000, &budget);
    MP_CHECK_OK(mp_kv_arena_take(&arena, (void **)&slots[0], &zero, &error), &error);
    MP_CHECK(!zero);
    mp_kv_arena_give(&arena, slots[0]);
    mp_kv_arena_deinit(&arena);
}

/* Small slots are separate allocations of exactly their size. */
MP_TEST(models_kv_arena_small_slots_are_charged_one_by_one) {
    mp_budget budget = {.limit = 3000};
    mp_kv_arena arena;
    mp_error error;
    void *slots[3];
    mp_kv_arena_init(&arena, 1000, &budget);
    for (int i = 0; i < 3; i++) {
        MP_CHECK_OK(take(&arena, &slots[i], &error), &error);
        MP_CHECK_INT(budget.used, 1000 * (i + 1));
    }
    MP_CHECK_STATUS(take(&arena, &slots[0], &error), MP_MEMORY_EXHAUSTED, &error);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 3000);
    for (int i = 0; i < 3; i++)
        MP_CHECK_INT(mp_kv_arena_give(&arena, slots[i]), 1000);
    MP_CHECK_INT(budget.used, 0);
    MP_CHECK_INT(arena.bytes, 0);
    mp_kv_arena_deinit(&arena);
}

/* Checks that budget, counters and regions agree, and that no empty region is kept. */
static void check(const mp_kv_arena *arena, const mp_budget *budget, uint32_t in_use) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < arena->count; i++) {
        const mp_kv_region *region = &arena->regions[i];
        uint32_t bits = 0;
        for (int w = 0; w < MP_KV_REGION_SLOTS / 64; w++)
            bits += (uint32_t)__builtin_popcountll(region->taken[w]);
        MP_CHECK(region->used > 0 && region->used == bits && region->used <= arena->slots);
        MP_CHECK(i >= arena->open || region->used == arena->slots);
        MP_CHECK(i == 0 || region[-1].memory + arena->region_bytes <= region->memory);
        MP_CHECK_INT((uintptr_t)region->memory % MP_HUGE_PAGE, 0);
        used += bits;
    }
    MP_CHECK_INT(used, in_use);
    MP_CHECK_INT(arena->bytes, (uint64_t)arena->count * arena->region_bytes);
    MP_CHECK_INT(budget->used, arena->bytes);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), arena->bytes + arena->capacity * sizeof *arena->regions);
}

static void mark(uint8_t *slot, uint32_t tag) {
    memcpy(slot, &tag, sizeof tag);
    memcpy(slot + SLOT - sizeof tag, &tag, sizeof tag);
}

static bool is_marked(const uint8_t *slot, uint32_t tag) {
    return memcmp(slot, &tag, sizeof tag) == 0 && memcmp(slot + SLOT - sizeof tag, &tag, sizeof tag) == 0;
}

/* Random growth and shrinkage. Slots never overlap. A region is added only if no other has a free slot. The number of
 * regions never exceeds the number of slots in use, nor the regions that the largest number of slots so far needs. */
MP_TEST_SECONDS(models_kv_arena_random_use, 60) {
    enum { MAX = 300, STEPS = 20000 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_arena arena;
    mp_error error;
    mp_test_random random = {17};
    static uint8_t *slots[MAX];
    static uint32_t tags[MAX];
    uint32_t count = 0, peak = 0, returned = 0;
    mp_kv_arena_init(&arena, SLOT, &budget);
    for (uint32_t step = 1; step <= STEPS; step++) {
        const bool grows = step % 4000 < 2000;
        if (count < MAX && (count == 0 || mp_test_random_u64(&random) % 100 < (grows ? 60u : 40u))) {
            const uint32_t regions = arena.count, room = regions * PER_REGION - count;
            void *slot;
            MP_CHECK_OK(take(&arena, &slot, &error), &error);
            MP_CHECK_INT(arena.count, regions + (room == 0));
            slots[count] = slot;
            tags[count] = step;
            mark(slot, step);
            count++;
        } else {
            const uint32_t at = (uint32_t)(mp_test_random_u64(&random) % count);
            const uint64_t before = budget.used;
            MP_CHECK(is_marked(slots[at], tags[at]));
            const size_t bytes = mp_kv_arena_give(&arena, slots[at]);
            MP_CHECK_INT(before - budget.used, bytes);
            MP_CHECK(bytes == 0 || bytes == arena.region_bytes);
            returned += bytes > 0;
            count--;
            slots[at] = slots[count];
            tags[at] = tags[count];
        }
        peak = count > peak ? count : peak;
        MP_CHECK(arena.count <= count && arena.count <= (peak + PER_REGION - 1) / PER_REGION);
        check(&arena, &budget, count);
    }
    MP_CHECK(returned > 3 && peak > 100);
    while (count > 0) {
        count--;
        MP_CHECK(is_marked(slots[count], tags[count]));
        mp_kv_arena_give(&arena, slots[count]);
    }
    check(&arena, &budget, 0);
    mp_kv_arena_deinit(&arena);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0);
}

/* The table of regions doubles, so that many regions take few copies. */
MP_TEST(models_kv_arena_table_doubles) {
    enum { FIRST = 16, REGIONS = 4 * FIRST };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_arena arena;
    mp_error error;
    void *slots[REGIONS * PER_REGION];
    mp_kv_arena_init(&arena, SLOT, &budget);
    for (int i = 0; i < REGIONS * PER_REGION; i++) {
        MP_CHECK_OK(take(&arena, &slots[i], &error), &error);
        const uint32_t capacity = arena.count <= FIRST ? FIRST : arena.count <= 2 * FIRST ? 2 * FIRST : 4 * FIRST;
        MP_CHECK_INT(arena.capacity, capacity);
    }
    MP_CHECK_INT(arena.count, REGIONS);
    for (int i = 0; i < REGIONS * PER_REGION; i++)
        mp_kv_arena_give(&arena, slots[i]);
    mp_kv_arena_deinit(&arena);
}

/* Slots that are taken again fill the regions at low addresses, so the others become empty. */
MP_TEST(models_kv_arena_fills_low_regions_first) {
    enum { REGIONS = 6 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_arena arena;
    mp_error error;
    void *slots[REGIONS * PER_REGION];
    mp_kv_arena_init(&arena, SLOT, &budget);
    for (int i = 0; i < REGIONS * PER_REGION; i++)
        MP_CHECK_OK(take(&arena, &slots[i], &error), &error);
    for (int i = 0; i < REGIONS * PER_REGION; i++)
        if (i % PER_REGION != 0) { /* one slot of each region stays */
            MP_CHECK_INT(mp_kv_arena_give(&arena, slots[i]), 0);
            slots[i] = NULL;
        }
    MP_CHECK_INT(arena.count, REGIONS);
    const uint8_t *first = arena.regions[0].memory;
    for (int i = 1; i < PER_REGION; i++) {
        MP_CHECK_OK(take(&arena, &slots[i], &error), &error);
        MP_CHECK((uint8_t *)slots[i] > first && (uint8_t *)slots[i] < first + arena.region_bytes);
    }
    check(&arena, &budget, PER_REGION + REGIONS - 1);
    for (int i = 0; i < REGIONS * PER_REGION; i++)
        if (slots[i])
            mp_kv_arena_give(&arena, slots[i]);
    check(&arena, &budget, 0);
    mp_kv_arena_deinit(&arena);
}

MP_TEST(models_kv_arena_a_full_budget_refuses_a_region) {
    mp_budget budget = {.limit = 2 * (8ull << 20) - 1};
    mp_kv_arena arena;
    mp_error error;
    void *slots[PER_REGION], *more;
    mp_kv_arena_init(&arena, SLOT, &budget);
    for (int i = 0; i < PER_REGION; i++)
        MP_CHECK_OK(take(&arena, &slots[i], &error), &error);
    MP_CHECK_STATUS(take(&arena, &more, &error), MP_MEMORY_EXHAUSTED, &error);
    MP_CHECK_HAS(error.message, "8.4 MB");
    check(&arena, &budget, PER_REGION);
    mp_kv_arena_give(&arena, slots[5]);
    MP_CHECK_OK(take(&arena, &slots[5], &error), &error); /* within the region */
    budget.limit++;
    MP_CHECK_OK(take(&arena, &more, &error), &error);
    check(&arena, &budget, PER_REGION + 1);
    MP_CHECK_INT(mp_kv_arena_give(&arena, more), 8 << 20);
    for (int i = 0; i < PER_REGION; i++)
        mp_kv_arena_give(&arena, slots[i]);
    check(&arena, &budget, 0);
    mp_kv_arena_deinit(&arena);
}

/* ---- the prefix cache on regions --------------------------------------------------------------------------------- */

/* Blocks of 136 KiB, and window parts of 136 KiB: 15 of each in a region. */
static const mp_kv_group group = {.layers = 8, .window_layers = 8, .window = 64, .heads = 2, .k_dim = 32, .v_dim = 32,
                                  .dtype = MP_I16};

static void check_cache(const mp_prefix_cache *cache, const mp_budget *budget) {
    const mp_kv_cache *kv = &cache->kv;
    uint32_t blocks = 0, windows = kv->spare_count, used[2] = {0};
    for (uint32_t id = 0; id < kv->blocks; id++) {
        blocks += kv->memory[id] != NULL;
        windows += kv->window_memory[id] != NULL;
    }
    const mp_kv_arena *arenas[] = {&kv->block_arena, &kv->window_arena};
    for (int a = 0; a < 2; a++)
        for (uint32_t i = 0; i < arenas[a]->count; i++) {
            MP_CHECK(arenas[a]->regions[i].used > 0);
            used[a] += arenas[a]->regions[i].used;
        }
    MP_CHECK_INT(used[0], blocks);
    MP_CHECK_INT(used[1], windows);
    MP_CHECK_INT(budget->used, mp_kv_charged(kv));
    MP_CHECK_INT(budget->used, (kv->block_arena.count + kv->window_arena.count) * (uint64_t)(2 << 20));
}

/* Every block and every window part that a cache hands out is zero, whatever its memory held before. */
MP_TEST(models_kv_cache_blocks_are_zero) {
    enum { BLOCKS = 40 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_cache cache;
    mp_error error;
    uint32_t ids[BLOCKS];
    mp_kv_init(&cache, &group, &budget);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            MP_CHECK_OK(mp_kv_take(&cache, &ids[i], &error), &error);
            MP_CHECK(is_zero(cache.memory[ids[i]], cache.block_bytes));
            MP_CHECK(is_zero(cache.window_memory[ids[i]], cache.window_bytes));
            memset(cache.memory[ids[i]], 0xff, cache.block_bytes);
            memset(cache.window_memory[ids[i]], 0xff, cache.window_bytes);
        }
        for (int i = 0; i < BLOCKS; i++) {
            cache.window_references[ids[i]] = 0;
            if (i != 7 || round == 3)
                mp_kv_give(&cache, ids[i]);
        }
        if (round % 2)
            while (mp_kv_release(&cache))
                continue;
    }
    cache.window_references[ids[7]] = 0;
    mp_kv_deinit(&cache);
}

#ifdef MP_SEAM
static void *alloc_filled(size_t bytes, size_t alignment) {
    void *memory = mp_sys_real.alloc(bytes, alignment);
    if (memory && bytes < 65536) /* a large block may be zero: mp_sys_alloc_is_zero */
        memset(memory, 0xa5, bytes);
    return memory;
}
#endif

/* A block whose window part is refused has none: it is free, and gets one the next time. Tables grow meanwhile, in
 * memory with any content. */
MP_TEST(models_kv_cache_blocks_without_window_parts) {
    enum { REGION = 15, BLOCKS = 9 * REGION };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_cache cache;
    mp_error error;
    uint32_t id;
#ifdef MP_SEAM
    mp_sys_table.alloc = alloc_filled;
#endif
    mp_kv_init(&cache, &group, &budget);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (i % REGION == 0) { /* the budget has room for a region of blocks, but not for one of window parts */
            budget.limit = budget.used + MP_HUGE_PAGE;
            MP_CHECK_STATUS(mp_kv_take(&cache, &id, &error), MP_MEMORY_EXHAUSTED, &error);
            MP_CHECK(cache.free_count == 1 && cache.free_ids[0] == i && !mp_kv_has_window(&cache, i));
            MP_CHECK(cache.references[i] == 0 && cache.window_references[i] == 0);
            budget.limit = UINT64_MAX;
        }
        MP_CHECK_OK(mp_kv_take(&cache, &id, &error), &error);
        MP_CHECK(id == i && cache.references[i] == 1 && cache.window_references[i] == 1 && mp_kv_has_window(&cache, i));
    }
    budget.limit = budget.used + MP_HUGE_PAGE; /* the cache may be dropped in this state */
    MP_CHECK_STATUS(mp_kv_take(&cache, &id, &error), MP_MEMORY_EXHAUSTED, &error);
    mp_kv_deinit(&cache);
    MP_CHECK_INT(budget.used, 0);
#ifdef MP_SEAM
    mp_sys_table = mp_sys_real;
#endif
}

/* A cache that grows, shrinks, is trimmed and runs against its budget charges the regions that it holds, and after each
 * trim holds no region without a block in use. */
MP_TEST_SECONDS(models_kv_arena_under_a_prefix_cache, 60) {
    enum { HELD = 10, DEEP = 6, STEPS = 4000 };
    mp_budget budget = {.limit = 5 * (2ull << 20)};
    mp_prefix_cache cache;
    mp_error error;
    mp_test_random random = {23};
    struct {
        int n;
        uint32_t ids[DEEP];
    } held[HELD] = {0};
    int refused = 0, trims = 0, taken = 0;
    mp_prefix_init(&cache, &group, &budget, 100);
    MP_CHECK_INT(cache.kv.block_arena.slots, 15);
    MP_CHECK_INT(cache.kv.window_arena.slots, 15);
    for (int step = 0; step < STEPS; step++) {
        const int at = (int)(mp_test_random_u64(&random) % HELD);
        if (held[at].n > 0) {
            while (held[at].n > 0) {
                held[at].n--;
                mp_prefix_unref_window(&cache, held[at].ids[held[at].n]);
                mp_prefix_unref_block(&cache, held[at].ids[held[at].n]);
            }
        } else {
            const int n = 1 + (int)(mp_test_random_u64(&random) % DEEP);
            mp_prefix_chain chain = mp_prefix_begin(&cache, (mp_cache_scope){0});
            for (int i = 0; i < n; i++) {
                int32_t tokens[MP_KV_BLOCK] = {(int32_t)(mp_test_random_u64(&random) % 50)};
                uint32_t id;
                const mp_status status = mp_prefix_take(&cache, &id, &error);
                if (status != MP_OK) {
                    MP_CHECK_STATUS(status, MP_MEMORY_EXHAUSTED, &error);
                    MP_CHECK_INT(cache.idle, 0); /* everything idle was evicted before the refusal */
                    refused++;
                    break;
                }
                mp_prefix_publish(&cache, &chain, tokens, &id);
                held[at].ids[held[at].n++] = id;
                taken++;
            }
        }
        if (mp_test_random_u64(&random) % 100 == 0) {
            mp_prefix_trim(&cache);
            trims++;
            for (uint32_t id = 0; id < cache.kv.blocks; id++)
                MP_CHECK((cache.kv.memory[id] != NULL) == (cache.kv.references[id] > 0));
        }
        if (mp_test_random_u64(&random) % 40 == 0) {
            const uint64_t before = budget.used, bytes = mp_prefix_shrink(&cache, 1 + (3 << 20));
            MP_CHECK_INT(before - budget.used, bytes);
            MP_CHECK(bytes >= 1 + (3 << 20) || cache.idle + cache.kv.free_count == 0);
        }
        check_cache(&cache, &budget);
    }
    MP_CHECK(refused > 20 && trims > 20 && taken > 1000);
    mp_prefix_deinit(&cache);
    MP_CHECK_INT(budget.used, 0);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0);
}

/* ---- calls of the system ----------------------------------------------------------------------------------------- */

#ifdef MP_SEAM
enum { CALLS = 64 };
static struct {
    size_t bytes, alignment;
    void *memory;
    bool freed;
} mapped[CALLS];
static int mapped_count, advised, refuse_from;

static void *note_alloc(size_t bytes, size_t alignment) {
    void *memory = NULL;
    if (bytes < MP_HUGE_PAGE)
        return mp_sys_real.alloc(bytes, alignment);
    if (refuse_from == 0 || mapped_count < refuse_from)
        memory = mp_sys_real.alloc(bytes, alignment);
    if (memory && mapped_count < CALLS) {
        mapped[mapped_count].bytes = bytes;
        mapped[mapped_count].alignment = alignment;
        mapped[mapped_count++].memory = memory;
    }
    return memory;
}

static void note_free(void *memory, size_t bytes) {
    for (int i = 0; i < mapped_count; i++)
        if (mapped[i].memory == memory && !mapped[i].freed) {
            MP_CHECK_INT(bytes, mapped[i].bytes);
            mapped[i].freed = true;
        }
    mp_sys_real.free(memory, bytes);
}

static int note_advice(void *memory, size_t bytes, int advice) {
#ifdef MADV_HUGEPAGE
    MP_CHECK_INT(advice, MADV_HUGEPAGE);
#endif
    MP_CHECK(mapped_count > 0 && mapped[mapped_count - 1].memory == memory);
    MP_CHECK_INT(bytes, mapped[mapped_count - 1].bytes);
    advised++;
    return mp_sys_real.madvise(memory, bytes, advice);
}

static void watch(void) {
    mp_sys_table.alloc = note_alloc;
    mp_sys_table.free = note_free;
    mp_sys_table.madvise = note_advice;
}

/* Returns true if the kernel was told to use huge pages from the first byte of `address` on. */
static bool is_huge(const void *address) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    bool inside = false, found = false;
    if (!maps)
        return true;
    while (fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
            inside = (uintptr_t)address >= begin && (uintptr_t)address < end;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            found = strstr(line, " hg") != NULL;
    }
    fclose(maps);
    return found;
}

/* One mapping per region, at the boundary of a huge page, advised as a whole, and freed when it is empty. */
MP_TEST(models_kv_arena_maps_whole_huge_pages) {
    enum { TAKEN = 3 * PER_REGION + 1 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_arena arena;
    mp_error error;
    void *slots[TAKEN];
    watch();
    mp_kv_arena_init(&arena, SLOT, &budget);
    for (int i = 0; i < TAKEN; i++) {
        MP_CHECK_OK(take(&arena, &slots[i], &error), &error);
        MP_CHECK_INT(mapped_count, i / PER_REGION + 1);
    }
#ifdef MADV_HUGEPAGE
    MP_CHECK_INT(advised, 4);
#endif
    for (int i = 0; i < mapped_count; i++) {
        MP_CHECK_INT(mapped[i].bytes, 8 << 20);
        MP_CHECK_INT(mapped[i].alignment, MP_HUGE_PAGE);
        MP_CHECK_INT((uintptr_t)mapped[i].memory % MP_HUGE_PAGE, 0);
        if (!MP_SANITIZED && access("/sys/kernel/mm/transparent_hugepage/enabled", F_OK) == 0)
            MP_CHECK(is_huge(mapped[i].memory));
    }
    MP_CHECK_INT(budget.used, 4 * (8 << 20));
    for (int i = TAKEN - 1; i >= 0; i--) {
        MP_CHECK_INT(mp_kv_arena_give(&arena, slots[i]), i % PER_REGION == 0 ? 8 << 20 : 0);
        for (int r = 0; r < mapped_count; r++)
            MP_CHECK_INT(mapped[r].freed, i <= r * PER_REGION);
    }
    MP_CHECK_INT(budget.used, 0);
    mp_kv_arena_deinit(&arena);
    mp_sys_table = mp_sys_real;
}

/* If the system refuses a region, nothing is charged, the slots in use stay valid, and a later attempt succeeds. */
MP_TEST(models_kv_arena_survives_a_refusal_of_the_system) {
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_arena arena;
    mp_error error;
    void *slots[PER_REGION], *more;
    watch();
    refuse_from = 1;
    mp_kv_arena_init(&arena, SLOT, &budget);
    for (int i = 0; i < PER_REGION; i++) {
        MP_CHECK_OK(take(&arena, &slots[i], &error), &error);
        mark(slots[i], (uint32_t)i);
    }
    for (int attempt = 0; attempt < 3; attempt++) {
        MP_CHECK_STATUS(take(&arena, &more, &error), MP_MEMORY_EXHAUSTED, &error);
        check(&arena, &budget, PER_REGION);
    }
    refuse_from = 0;
    MP_CHECK_OK(take(&arena, &more, &error), &error);
    check(&arena, &budget, PER_REGION + 1);
    mp_kv_arena_give(&arena, more);
    for (int i = 0; i < PER_REGION; i++) {
        MP_CHECK(is_marked(slots[i], (uint32_t)i));
        mp_kv_arena_give(&arena, slots[i]);
    }
    check(&arena, &budget, 0);
    mp_kv_arena_deinit(&arena);
    mp_sys_table = mp_sys_real;
}
#endif

#ifdef MP_SEAM
static size_t refused_bytes; /* allocations of this size, without the header of mp_alloc, are refused */

static void *refusing_alloc(size_t bytes, size_t alignment) {
    return bytes == refused_bytes + 64 ? NULL : mp_sys_real.alloc(bytes, alignment);
}
#endif

/* The error for refused memory of the tables names the bytes of all of them: pointers, references and two lists of ids
 * for 64 blocks; with a window also two lists of pointers and a counter. */
MP_TEST(models_kv_tables_without_memory) {
#ifdef MP_SEAM
    for (int windowed = 0; windowed < 2; windowed++) {
        mp_budget budget = {.limit = UINT64_MAX};
        mp_error error;
        mp_kv_cache cache;
        mp_kv_group group = {.layers = 1, .window_layers = windowed, .window = windowed ? 64 : 0, .heads = 1,
                             .k_dim = 16, .v_dim = 16, .dtype = MP_F32};
        uint32_t id;
        mp_kv_init(&cache, &group, &budget);
        refused_bytes = 64 * sizeof(void *);
        mp_sys_table.alloc = refusing_alloc;
        mp_status status = mp_kv_take(&cache, &id, &error);
        mp_sys_table = mp_sys_real;
        MP_CHECK_STATUS(status, MP_MEMORY_EXHAUSTED, &error);
        MP_CHECK_HAS(error.message, windowed ? " 2560 bytes" : " 1280 bytes");
        mp_kv_deinit(&cache);
        MP_CHECK_INT(budget.used, 0);
    }
#else
    MP_SKIP("needs the seam build");
#endif
}
