#include "models/generation/kv_cache.h"

#include <assert.h>
#include <string.h>

/* Returns the part for stores with this window, which it adds if there is none. */
static int part_for(mp_kv_layout *layout, int window) {
    int part = 0;
    while (part < layout->parts && layout->window[part] != window)
        part++;
    if (part == MP_KV_PARTS)
        return 0;
    if (part == layout->parts)
        layout->window[layout->parts++] = window;
    return part;
}

mp_kv_layout mp_kv_lay_out(mp_kv_store *stores, int count, mp_dtype dtype) {
    mp_kv_layout layout = {.dtype = dtype, .count = count, .parts = 1, .stores = stores};
    for (int i = 0; i < count; i++) {
        mp_kv_store *store = &stores[i];
        assert(store->k_dim <= MP_KV_DIM_MAX && store->v_dim <= MP_KV_DIM_MAX);
        store->part = part_for(&layout, store->window);
        store->offset = layout.bytes[store->part];
        store->k_bytes = mp_kv_bytes(dtype, store->k_dim);
        store->v_bytes = mp_kv_bytes(dtype, store->v_dim);
        layout.bytes[store->part] += (size_t)store->heads * (store->k_bytes + store->v_bytes);
    }
    if (layout.bytes[0] == 0)
        layout.bytes[0] = MP_KV_BLOCK; /* a block in use has memory even if all stores have windows */
    return layout;
}

int64_t mp_kv_token_bytes(const mp_kv_layout *layout) {
    int64_t bytes = 0;
    for (int i = 0; i < layout->count; i++) {
        const mp_kv_store *store = &layout->stores[i];
        bytes += store->heads * (int64_t)(mp_kv_bytes(layout->dtype, store->k_dim) +
                                          mp_kv_bytes(layout->dtype, store->v_dim));
    }
    return bytes / MP_KV_BLOCK;
}

void mp_kv_init(mp_kv_cache *cache, const mp_kv_layout *layout, mp_budget *budget) {
    *cache = (mp_kv_cache){.layout = *layout, .budget = budget};
    for (int p = 0; p < layout->parts; p++)
        mp_kv_arena_init(&cache->part[p].arena, layout->bytes[p], budget);
}

/* Frees the lists. No block has memory any more. */
static void kv_drop_lists(mp_kv_cache *cache) {
    for (int p = 0; p < cache->layout.parts; p++) {
        mp_kv_part *part = &cache->part[p];
        mp_kv_arena_deinit(&part->arena);
        mp_free(part->memory);
        mp_free(part->references);
        mp_free(part->spare);
        part->memory = part->spare = NULL;
        part->references = NULL;
    }
    mp_free(cache->references);
    mp_free(cache->free_ids);
    cache->references = cache->free_ids = NULL;
    cache->blocks = cache->free_count = cache->capacity = 0;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

void mp_kv_deinit(mp_kv_cache *cache) {
    for (int p = 0; p < cache->layout.parts; p++) {
        mp_kv_part *part = &cache->part[p];
        for (uint32_t id = 0; id < cache->blocks; id++)
            if (part->memory[id])
                mp_kv_arena_give(&part->arena, part->memory[id]);
        while (part->spare_count > 0)
            mp_kv_arena_give(&part->arena, part->spare[--part->spare_count]);
    }
    kv_drop_lists(cache);
}

static bool grow_list(uint32_t **list, uint32_t capacity) {
    uint32_t *grown = mp_realloc(*list, capacity * sizeof *grown, MP_TAG_KV);
    if (grown)
        *list = grown;
    return grown != NULL;
}

static bool grow_pointers(void ***list, uint32_t capacity) {
    void **grown = mp_realloc(*list, capacity * sizeof *grown, MP_TAG_KV);
    if (grown)
        *list = grown;
    return grown != NULL;
}

static mp_status kv_grow(mp_kv_cache *cache, mp_error *error) {
    uint32_t capacity = cache->capacity ? 2 * cache->capacity : 64;
    bool grown = grow_list(&cache->references, capacity) && grow_list(&cache->free_ids, capacity);
    for (int p = 0; grown && p < cache->layout.parts; p++) {
        mp_kv_part *part = &cache->part[p];
        grown = grow_pointers(&part->memory, capacity) && grow_pointers(&part->spare, capacity) &&
                (p == 0 || grow_list(&part->references, capacity));
    }
    if (!grown)
        return mp_fail_memory(error, capacity * sizeof(void *), "the KV table");
    cache->capacity = capacity;
    return MP_OK;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Returns an id without memory and references. */
static mp_status kv_take_id(mp_kv_cache *cache, uint32_t *id, mp_error *error) {
    if (cache->free_count > 0) {
        *id = cache->free_ids[--cache->free_count];
        return MP_OK;
    }
    if (cache->blocks == cache->capacity)
        MP_TRY(kv_grow(cache, error));
    *id = cache->blocks++;
    cache->references[*id] = 0;
    for (int p = 0; p < cache->layout.parts; p++) {
        cache->part[p].memory[*id] = NULL;
        if (p > 0)
            cache->part[p].references[*id] = 0;
    }
    return MP_OK;
}

/* `spare` has room: there are never more memories of a part than ids. */
static void kv_spare(mp_kv_part *part, uint32_t id) {
    part->spare[part->spare_count++] = part->memory[id];
    part->memory[id] = NULL;
}

/* Gives block `id` zeroed memory for the part. */
static mp_status kv_take_part(mp_kv_cache *cache, int p, uint32_t id, mp_error *error) {
    mp_kv_part *part = &cache->part[p];
    void *memory;
    bool zero = false;
    if (part->spare_count > 0)
        memory = part->spare[--part->spare_count];
    else
        MP_TRY(mp_kv_arena_take(&part->arena, &memory, &zero, error));
    /* Attention reads slots beyond the end of a sequence before it masks them, so they must be finite. */
    if (!zero)
        memset(memory, 0, cache->layout.bytes[p]);
    part->memory[id] = memory;
    return MP_OK;
}

mp_status mp_kv_take(mp_kv_cache *cache, uint32_t *id, mp_error *error) {
    MP_TRY(kv_take_id(cache, id, error));
    for (int p = 0; p < cache->layout.parts; p++) {
        mp_status status = kv_take_part(cache, p, *id, error);
        if (status != MP_OK) {
            while (--p >= 0)
                kv_spare(&cache->part[p], *id);
            cache->free_ids[cache->free_count++] = *id;
            return status;
        }
    }
    cache->references[*id] = 1;
    for (int p = 1; p < cache->layout.parts; p++)
        cache->part[p].references[*id] = 1;
    return MP_OK;
}

void mp_kv_share(mp_kv_cache *cache, uint32_t id) {
    assert(cache->references[id] > 0);
    cache->references[id]++;
}

void mp_kv_forget(mp_kv_cache *cache, int part, uint32_t id) {
    assert(part > 0 && cache->part[part].references[id] == 0 && mp_kv_has(cache, part, id));
    kv_spare(&cache->part[part], id);
}

void mp_kv_move(mp_kv_cache *cache, int p, uint32_t from, uint32_t id) {
    mp_kv_part *part = &cache->part[p];
    assert(p > 0 && part->references[from] == 0 && part->references[id] == 0 && !part->memory[id]);
    part->memory[id] = part->memory[from];
    part->memory[from] = NULL;
}

void mp_kv_copy(mp_kv_cache *cache, uint32_t from, uint32_t id) {
    for (int p = 0; p < cache->layout.parts; p++)
        memcpy(cache->part[p].memory[id], cache->part[p].memory[from], cache->layout.bytes[p]);
}

void mp_kv_wipe(mp_kv_cache *cache, uint32_t id, int slot, int count) {
    static const float zeros[MP_KV_DIM_MAX];
    for (int at = slot; at < slot + count; at++)
        for (int store = 0; store < cache->layout.count; store++)
            for (int head = 0; head < cache->layout.stores[store].heads; head++)
                mp_kv_put(cache, id, store, head, at, zeros, zeros);
}

void mp_kv_give(mp_kv_cache *cache, uint32_t id) {
    assert(cache->references[id] > 0);
    if (--cache->references[id] > 0)
        return;
    for (int p = 0; p < cache->layout.parts; p++)
        if (mp_kv_has(cache, p, id)) {
            assert(p == 0 || cache->part[p].references[id] == 0);
            kv_spare(&cache->part[p], id);
        }
    cache->free_ids[cache->free_count++] = id;
}

size_t mp_kv_release(mp_kv_cache *cache) {
    size_t bytes = 0;
    for (int p = cache->layout.parts - 1; p >= 0; p--) {
        mp_kv_part *part = &cache->part[p];
        while (bytes == 0 && part->spare_count > 0)
            bytes = mp_kv_arena_give(&part->arena, part->spare[--part->spare_count]);
    }
    return bytes;
}

uint64_t mp_kv_trim(mp_kv_cache *cache) {
    uint64_t bytes = 0;
    for (size_t more; (more = mp_kv_release(cache)) > 0;)
        bytes += more;
    if (cache->free_count == cache->blocks)
        kv_drop_lists(cache);
    return bytes;
}

uint64_t mp_kv_charged(const mp_kv_cache *cache) {
    uint64_t bytes = 0;
    for (int p = 0; p < cache->layout.parts; p++)
        bytes += cache->part[p].arena.bytes;
    return bytes;
}

bool mp_kv_has_spare(const mp_kv_cache *cache) {
    for (int p = 0; p < cache->layout.parts; p++)
        if (cache->part[p].spare_count > 1)
            return true;
    return false;
}

void mp_kv_put(const mp_kv_cache *cache, uint32_t id, int store, int head, int slot, const float *k, const float *v) {
    const mp_kernels *call = mp_kernels_get();
    const mp_kv_store *to = &cache->layout.stores[store];
    (cache->layout.dtype == MP_F32   ? call->kv_store
     : cache->layout.dtype == MP_I16 ? call->kv_store_i16
                                     : call->kv_store_i8)(k, v, to->k_dim, to->v_dim, slot,
                                                          mp_kv_k(cache, id, store, head),
                                                          mp_kv_v(cache, id, store, head));
}
