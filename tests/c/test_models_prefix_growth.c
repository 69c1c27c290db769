/* test_models_prefix_growth.c: published blocks are found after the tables of the prefix cache have grown. */
#include "mp_test.h"
#include "models/generation/prefix_cache.h"

enum { BLOCKS = 600 };

MP_TEST(models_prefix_growth_keeps_published_blocks) {
    static int32_t tokens[BLOCKS * MP_KV_BLOCK];
    static uint32_t ids[BLOCKS], again[BLOCKS];
    mp_error error;
    mp_budget budget = {.limit = UINT64_MAX};
    mp_kv_store store = {.heads = 1, .k_dim = 16, .v_dim = 16};
    const mp_kv_layout layout = mp_kv_lay_out(&store, 1, MP_I16);
    mp_test_random random = {7};
    mp_prefix_cache cache;
    mp_prefix_init(&cache, &layout, &budget, 25);
    for (int i = 0; i < BLOCKS * MP_KV_BLOCK; i++)
        tokens[i] = (int32_t)(mp_test_random_u64(&random) % 1000);
    mp_prefix_chain chain = mp_prefix_begin(&cache, (mp_cache_scope){0});
    uint32_t first = 0, growths = 0;
    for (int i = 0; i < BLOCKS; i++) {
        const uint32_t before = cache.capacity;
        MP_CHECK_OK(mp_prefix_take(&cache, &ids[i], &error), &error);
        mp_prefix_publish(&cache, &chain, tokens + i * MP_KV_BLOCK, &ids[i]);
        MP_CHECK_INT(chain.count, i + 1);
        first = first ? first : cache.capacity;
        growths += cache.capacity != before && before != 0;
        if (cache.capacity != before) { /* every block, at once */
            mp_prefix_chain seen = mp_prefix_begin(&cache, (mp_cache_scope){0});
            for (int k = 0; k <= i; k++) {
                if (!mp_prefix_find(&cache, &seen, tokens + k * MP_KV_BLOCK, &again[k]))
                    MP_FAIL("block %d of %d is not found after the tables grew to %u", k, i + 1, cache.capacity);
                MP_CHECK_INT(again[k], ids[k]);
            }
            for (int k = i; k >= 0; k--)
                mp_prefix_unref_block(&cache, again[k]);
        }
    }
    MP_CHECK(growths >= 2 && cache.capacity >= BLOCKS);
    MP_CHECK_INT(cache.counters.blocks, BLOCKS);
    for (int i = BLOCKS - 1; i >= 0; i--)
        mp_prefix_unref_block(&cache, ids[i]);
    MP_CHECK_INT(cache.idle[0].count, BLOCKS);
    mp_prefix_deinit(&cache);
    MP_CHECK_INT(budget.used, 0);
}
