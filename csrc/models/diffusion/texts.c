#include "models/diffusion/texts.h"

#include <string.h>

void mp_diff_cache_init(mp_diff_cache *cache, mp_budget *budget) { *cache = (mp_diff_cache){.budget = budget}; }

static void forget(mp_diff_cache *cache, mp_diff_texts **place) {
    mp_diff_texts *texts = *place;
    *place = texts->next;
    mp_budget_give(cache->budget, texts->bytes);
    cache->charged -= texts->bytes;
    mp_free(texts->rows);
    mp_free(texts->ids);
    mp_free(texts);
}

static bool is_of(const mp_diff_texts *texts, const mp_image_generation_request *request, int t) {
    const int32_t *at = texts->ids;
    for (int e = 0; e < MP_T2I_ENCODERS; e++) {
        if (texts->n_ids[e] != request->n_ids[e])
            return false;
        for (int32_t i = 0; i < request->n_ids[e]; i++, at++)
            if (*at != (request->ids[t][e] ? request->ids[t][e][i] : -1))
                return false;
    }
    return true;
}

/* Forget the least recently used entries until at most `most` unused ones are left. */
static void shrink(mp_diff_cache *cache, int most) {
    for (;;) {
        int count = 0;
        mp_diff_texts **oldest = NULL;
        for (mp_diff_texts **at = &cache->list; *at; at = &(*at)->next)
            if ((*at)->users == 0) {
                count++;
                if (!oldest || (*at)->used < (*oldest)->used)
                    oldest = at;
            }
        if (count <= most)
            return;
        forget(cache, oldest);
    }
}

mp_status mp_diff_texts_get(mp_diff_cache *cache, const mp_item *item, int t, mp_diff_texts **out, bool *known,
                            mp_error *error) {
    const mp_image_generation_request *request = (const mp_image_generation_request *)item->request;
    const mp_cache_scope scope = mp_cache_scope_of(item, 0);
    *known = false;
    for (mp_diff_texts *at = cache->list; at; at = at->next)
        if (at->complete && mp_cache_scope_equal(at->scope, scope) && is_of(at, request, t)) {
            at->users++;
            at->used = ++cache->turn;
            *out = at;
            *known = true;
            return MP_OK;
        }
    size_t ids = 0;
    for (int e = 0; e < MP_T2I_ENCODERS; e++)
        ids += (size_t)request->n_ids[e];
    const size_t rows = (size_t)request->text_rows * (size_t)request->text_width,
                 pooled = (size_t)request->pooled_width;
    const size_t bytes = sizeof(mp_diff_texts) + (rows + pooled) * sizeof(float) + ids * sizeof(int32_t);
    if (!mp_budget_take(cache->budget, bytes)) {
        mp_diff_cache_trim(cache);
        if (!mp_budget_take(cache->budget, bytes))
            return mp_fail_memory(error, bytes, "the embedding of a text");
    }
    mp_diff_texts *texts = mp_alloc_zeroed(sizeof *texts, MP_TAG_SCRATCH);
    if (texts) {
        texts->rows = mp_alloc_zeroed((rows + pooled) * sizeof(float), MP_TAG_SCRATCH);
        texts->ids = mp_alloc_array(ids, sizeof *texts->ids, MP_TAG_SCRATCH);
    }
    if (!texts || !texts->rows || !texts->ids) {
        if (texts) {
            mp_free(texts->rows);
            mp_free(texts->ids);
        }
        mp_free(texts);
        mp_budget_give(cache->budget, bytes);
        return mp_fail_memory(error, bytes, "the embedding of a text");
    }
    texts->pooled = texts->rows + rows;
    int32_t *to = texts->ids;
    for (int e = 0; e < MP_T2I_ENCODERS; e++) {
        texts->n_ids[e] = request->n_ids[e];
        for (int32_t i = 0; i < request->n_ids[e]; i++)
            *to++ = request->ids[t][e] ? request->ids[t][e][i] : -1;
    }
    texts->scope = scope;
    texts->users = 1;
    texts->bytes = bytes;
    texts->used = ++cache->turn;
    texts->next = cache->list;
    cache->list = texts;
    cache->charged += bytes;
    *out = texts;
    return MP_OK;
}

void mp_diff_texts_complete(mp_diff_texts *texts) { texts->complete = true; }

void mp_diff_texts_release(mp_diff_cache *cache, mp_diff_texts *texts) {
    if (!texts || --texts->users > 0)
        return;
    for (mp_diff_texts **at = &cache->list; !texts->complete && *at; at = &(*at)->next)
        if (*at == texts) {
            forget(cache, at);
            return;
        }
    shrink(cache, MP_DIFF_CACHE_TEXTS);
}

uint64_t mp_diff_cache_trim(mp_diff_cache *cache) {
    const uint64_t before = cache->charged;
    shrink(cache, 0);
    return before - cache->charged;
}
