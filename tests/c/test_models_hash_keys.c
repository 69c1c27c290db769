/* test_models_hash_keys.c: the hash tables of prefixes and of texts have random keys, and a key depends on everything
 * that tells entries apart. Entries with equal keys would only cost time, so no other test sees them. */
#include "base/alloc.h"
#include "models/dedup.h"
#include "models/generation/prefix_cache.h"
#include "mp_test.h"

#ifdef MP_SEAM
static int random_calls;
static uint64_t count_random(void) { return (uint64_t)++random_calls; }
#endif

MP_TEST(models_hash_keys_are_random) {
#ifdef MP_SEAM
    mp_kv_store store = {.heads = 1, .k_dim = 16, .v_dim = 16};
    const mp_kv_layout layout = mp_kv_lay_out(&store, 1, MP_I16);
    mp_budget budget = {.limit = UINT64_MAX};
    mp_prefix_cache cache;
    mp_recent recent;
    mp_error error;
    mp_sys_table.random = count_random;
    mp_prefix_init(&cache, &layout, &budget, 25);
    MP_CHECK_INT(random_calls, 2);
    MP_CHECK_OK(mp_recent_init(&recent, &budget, &error), &error);
    MP_CHECK_INT(random_calls, 4);
    mp_sys_table = mp_sys_real;
    mp_recent_deinit(&recent);
    mp_prefix_deinit(&cache);
#else
    MP_SKIP("needs the seam build");
#endif
}

MP_TEST(models_hash_keys_of_prefixes) {
    enum { KEYS = 5 };
    static int32_t tokens[2][MP_KV_BLOCK];
    mp_kv_store store = {.heads = 1, .k_dim = 16, .v_dim = 16};
    const mp_kv_layout layout = mp_kv_lay_out(&store, 1, MP_I16);
    mp_budget budget = {.limit = UINT64_MAX};
    mp_prefix_cache cache;
    mp_error error;
    uint64_t keys[KEYS];
    uint32_t ids[2], found;
    mp_prefix_init(&cache, &layout, &budget, 25);
    tokens[1][MP_KV_BLOCK - 1] = 1;
    for (int i = 0; i < 3; i++) { /* two tenants, and another last token */
        mp_prefix_chain chain = mp_prefix_begin(&cache, (mp_cache_scope){i == 1, false});
        MP_CHECK_OK(mp_prefix_take(&cache, &ids[0], &error), &error);
        MP_CHECK(!mp_prefix_find(&cache, &chain, tokens[i == 2], &found));
        mp_prefix_unref_block(&cache, ids[0]);
        keys[i] = chain.key.hash;
    }
    mp_prefix_chain chain = mp_prefix_begin(&cache, (mp_cache_scope){0, false});
    for (int i = 0; i < 2; i++) { /* the same tokens behind one block and behind two */
        MP_CHECK_OK(mp_prefix_take(&cache, &ids[i], &error), &error);
        mp_prefix_publish(&cache, &chain, tokens[0], &ids[i]);
        MP_CHECK(!mp_prefix_find(&cache, &chain, tokens[0], &found));
        keys[3 + i] = chain.key.hash;
    }
    for (int i = 0; i < KEYS; i++)
        for (int j = 0; j < i; j++)
            if (keys[i] == keys[j])
                MP_FAIL("keys %d and %d are equal", i, j);
    for (int i = 1; i >= 0; i--)
        mp_prefix_unref_block(&cache, ids[i]);
    mp_prefix_deinit(&cache);
}

/* A key depends on tenant, variant, content and table. */
MP_TEST(models_hash_keys_of_inputs) {
    enum { KEYS = 6 };
    const int32_t ids[] = {1, 2, 3, 1, 2, 4};
    static const struct {
        int first, count;
        mp_cache_scope scope;
    } rows[KEYS] = {{0, 3, {0, 0}}, {0, 2, {0, 0}}, {3, 3, {0, 0}}, {0, 3, {1, 0}}, {0, 3, {0, 1}}, {0, 3, {0, 0}}};
    mp_budget budget = {.limit = UINT64_MAX};
    mp_error error;
    mp_recent recent, other;
    uint64_t keys[KEYS];
    MP_CHECK_OK(mp_recent_init(&recent, &budget, &error), &error);
    MP_CHECK_OK(mp_recent_init(&other, &budget, &error), &error);
    for (int i = 0; i < KEYS; i++) { /* the last row is the first one in another table */
        const mp_recent *table = i < KEYS - 1 ? &recent : &other;
        const size_t bytes = (size_t)rows[i].count * sizeof *ids;
        keys[i] = mp_recent_key(table, rows[i].scope, ids + rows[i].first, bytes).hash;
        MP_CHECK(mp_recent_key(table, rows[i].scope, ids + rows[i].first, bytes).hash == keys[i]);
        for (int j = 0; j < i; j++)
            MP_CHECK(keys[i] != keys[j]);
    }
    mp_recent_deinit(&recent);
    mp_recent_deinit(&other);
}
