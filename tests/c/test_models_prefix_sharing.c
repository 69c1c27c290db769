/* Which sequences share blocks of the prefix cache: only those of one tenant, with the same rotary table. */
#include "models/generation/prefix_cache.h"
#include "mp_test.h"

enum { BLOCKS = 2 };

typedef struct bench {
    mp_budget budget;
    mp_kv_store store;
    mp_prefix_cache cache;
    int32_t tokens[BLOCKS * MP_KV_BLOCK];
} bench;

static void set_up(bench *b) {
    *b = (bench){.budget = {.limit = UINT64_MAX}};
    b->store = (mp_kv_store){.heads = 1, .k_dim = 16, .v_dim = 16};
    const mp_kv_layout layout = mp_kv_lay_out(&b->store, 1, MP_I16);
    mp_prefix_init(&b->cache, &layout, &b->budget, 25);
    for (int i = 0; i < BLOCKS * MP_KV_BLOCK; i++)
        b->tokens[i] = i;
}

static void take_down(bench *b) {
    mp_prefix_deinit(&b->cache);
    MP_CHECK_INT(b->budget.used, 0);
}

/* Publish the blocks for a new sequence, which keeps them. */
static void publish(bench *b, uint64_t tenant, uint32_t variant, uint32_t ids[BLOCKS]) {
    mp_error error;
    mp_prefix_chain chain = mp_prefix_begin(&b->cache, (mp_cache_scope){tenant, variant});
    MP_CHECK(chain.scope.tenant == tenant && chain.scope.variant == variant && !chain.closed && chain.count == 0);
    for (int i = 0; i < BLOCKS; i++) {
        MP_CHECK_OK(mp_prefix_take(&b->cache, &ids[i], &error), &error);
        mp_prefix_publish(&b->cache, &chain, b->tokens + i * MP_KV_BLOCK, &ids[i]);
    }
}

static void give(bench *b, const uint32_t ids[BLOCKS]) {
    for (int i = BLOCKS - 1; i >= 0; i--)
        mp_prefix_unref_block(&b->cache, ids[i]);
}

/* Returns the first block that a new sequence finds, or MP_PREFIX_NONE. `key`: that of another chain, as if keys
 * collided; 0: its own. */
static uint32_t first_found(bench *b, uint64_t tenant, uint32_t variant, uint64_t key) {
    mp_prefix_chain chain = mp_prefix_begin(&b->cache, (mp_cache_scope){tenant, variant});
    uint32_t id = MP_PREFIX_NONE;
    chain.key = (mp_cache_key){chain.scope, key};
    chain.key_known = key != 0;
    uint32_t reach = mp_prefix_reach(&b->cache, &chain, b->tokens, 1);
    bool found = mp_prefix_find(&b->cache, &chain, b->tokens, &id);
    MP_CHECK_INT(reach, found);
    if (found)
        mp_prefix_unref_block(&b->cache, id);
    return found ? id : MP_PREFIX_NONE;
}

/* Kinds of sequences with the same tokens: two tenants, each with both rotary tables and an adapter. Each kind finds
 * and keeps blocks of its own, also if all keys collide. */
MP_TEST(models_prefix_shares_nothing_between_variants) {
    enum { VARIANTS = 3, KINDS = 2 * VARIANTS };
    bench b;
    uint32_t ids[KINDS][BLOCKS], again[BLOCKS];
    set_up(&b);
    for (uint32_t i = 0; i < KINDS; i++) {
        MP_CHECK_INT(first_found(&b, i / VARIANTS + 7, i % VARIANTS, 0), MP_PREFIX_NONE);
        publish(&b, i / VARIANTS + 7, i % VARIANTS, ids[i]);
        for (uint32_t j = 0; j < i; j++)
            MP_CHECK(ids[i][0] != ids[j][0] && ids[i][1] != ids[j][1]);
    }
    MP_CHECK_INT(b.cache.counters.blocks, KINDS * BLOCKS);
    for (uint32_t i = 0; i < KINDS; i++) {
        MP_CHECK_INT(first_found(&b, i / VARIANTS + 7, i % VARIANTS, 0), ids[i][0]);
        for (uint32_t j = 0; j < KINDS; j++) {
            const uint64_t key = b.cache.known[ids[j][0]].key.hash;
            MP_CHECK(i == j || key != b.cache.known[ids[i][0]].key.hash);
            MP_CHECK_INT(first_found(&b, i / VARIANTS + 7, i % VARIANTS, key), i == j ? ids[i][0] : MP_PREFIX_NONE);
        }
    }
    publish(&b, 7, 1, again); /* an equal block is kept once */
    MP_CHECK(memcmp(again, ids[1], sizeof again) == 0);
    give(&b, again);
    for (int i = 0; i < KINDS; i++)
        give(&b, ids[i]);
    take_down(&b);
}

/* Keys of different tenants differ, so that no tenant learns what another one has sent from the time of a collision. */
MP_TEST(models_prefix_keys_depend_on_the_tenant) {
    bench b;
    uint32_t ids[2][BLOCKS];
    set_up(&b);
    for (int i = 0; i < 2; i++)
        publish(&b, (uint32_t)i, false, ids[i]);
    for (int i = 0; i < BLOCKS; i++)
        MP_CHECK(b.cache.known[ids[0][i]].key.hash != b.cache.known[ids[1][i]].key.hash);
    for (int i = 0; i < 2; i++)
        give(&b, ids[i]);
    take_down(&b);
}
