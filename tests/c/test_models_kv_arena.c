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

static mp_status take(mp_kv_arena *arena, void *slot_out, mp_error *error) {
    bool zero;
    return mp_kv_arena_take(arena, slot_out, &zero, error);
}

static bool is_zero(const uint8_t *bytes, size_t count) {
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, count - 1) == 0;
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

/* ---- the prefix cache on regions --------------------------------------------------------------------------------- */

/* Blocks of 136 KiB, and window parts of 136 KiB: 15 of each in a region. */
static mp_kv_layout wide_layout(void) {
    static mp_kv_store stores[] = {{.heads = 16, .k_dim = 32, .v_dim = 32},
                                   {.heads = 16, .k_dim = 32, .v_dim = 32, .window = 64}};
    return mp_kv_lay_out(stores, 2, MP_I16);
}

static void check_cache(const mp_prefix_cache *cache, const mp_budget *budget) {
    const mp_kv_cache *kv = &cache->kv;
    uint64_t regions = 0;
    for (int p = 0; p < kv->layout.parts; p++) {
        const mp_kv_part *part = &kv->part[p];
        uint32_t slots = 0, used = part->spare_count;
        for (uint32_t id = 0; id < kv->blocks; id++)
            used += part->memory[id] != NULL;
        for (uint32_t i = 0; i < part->arena.count; i++) {
            MP_CHECK(part->arena.regions[i].used > 0);
            slots += part->arena.regions[i].used;
        }
        MP_CHECK_INT(slots, used);
        regions += part->arena.count;
    }
    MP_CHECK_INT(budget->used, mp_kv_charged(kv));
    MP_CHECK_INT(budget->used, regions * (uint64_t)(2 << 20));
}

/* Every block and every window part that a cache hands out is zero, whatever its memory held before. */
MP_TEST(models_kv_cache_blocks_are_zero) {
    enum { BLOCKS = 40 };
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_cache cache;
    mp_error error;
    uint32_t ids[BLOCKS];
    const mp_kv_layout layout = wide_layout();
    mp_kv_init(&cache, &layout, &budget);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            MP_CHECK_OK(mp_kv_take(&cache, &ids[i], &error), &error);
            for (int p = 0; p < layout.parts; p++) {
                MP_CHECK(is_zero(cache.part[p].memory[ids[i]], layout.bytes[p]));
                memset(cache.part[p].memory[ids[i]], 0xff, layout.bytes[p]);
            }
        }
        for (int i = 0; i < BLOCKS; i++) {
            cache.part[1].references[ids[i]] = 0;
            if (i != 7 || round == 3)
                mp_kv_give(&cache, ids[i]);
        }
        if (round % 2)
            while (mp_kv_release(&cache))
                continue;
    }
    cache.part[1].references[ids[7]] = 0;
    mp_kv_deinit(&cache);
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
    const mp_kv_layout layout = wide_layout();
    mp_prefix_init(&cache, &layout, &budget, 100);
    MP_CHECK_INT(cache.kv.part[0].arena.slots, 15);
    MP_CHECK_INT(cache.kv.part[1].arena.slots, 15);
    for (int step = 0; step < STEPS; step++) {
        const int at = (int)(mp_test_random_u64(&random) % HELD);
        if (held[at].n > 0) {
            while (held[at].n > 0) {
                held[at].n--;
                mp_prefix_unref_part(&cache, 1, held[at].ids[held[at].n]);
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
                    MP_CHECK_INT(cache.idle[0].count, 0); /* everything idle was evicted before the refusal */
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
                MP_CHECK(mp_kv_has(&cache.kv, 0, id) == (cache.kv.references[id] > 0));
        }
        if (mp_test_random_u64(&random) % 40 == 0) {
            const uint64_t before = budget.used, bytes = mp_prefix_shrink(&cache, 1 + (3 << 20));
            MP_CHECK_INT(before - budget.used, bytes);
            MP_CHECK(bytes >= 1 + (3 << 20) || cache.idle[0].count + cache.kv.part[0].spare_count == 0);
        }
        check_cache(&cache, &budget);
    }
    MP_CHECK(refused > 20 && trims > 20 && taken > 1000);
    mp_prefix_deinit(&cache);
    MP_CHECK_INT(budget.used, 0);
    MP_CHECK_INT(mp_alloc_bytes(MP_TAG_KV), 0);
}
