/* texts.h: cache of text embeddings, reused by the tenant's next request with the same text. Not thread-safe. */
#ifndef MP_MODELS_DIFFUSION_TEXTS_H
#define MP_MODELS_DIFFUSION_TEXTS_H

#include "models/cache_key.h"
#include "models/diffusion/diffusion.h"

typedef struct mp_diff_memory {
    uint8_t *at;
    size_t bytes;
} mp_diff_memory;

typedef struct mp_diff_texts {
    mp_cache_scope scope;
    float *rows;   /* [text_rows, text_width]; columns that no encoder fills are 0 */
    float *pooled; /* [pooled_width] */
    int32_t *ids;  /* token ids of the text for all encoders, concatenated */
    int32_t n_ids[MP_T2I_ENCODERS];
    int users;
    bool complete;
    uint64_t used; /* value of cache->turn at the last use */
    size_t bytes;
    struct mp_diff_texts *next;
} mp_diff_texts;

typedef struct mp_diff_cache {
    mp_budget *budget;
    mp_diff_texts *list;
    uint64_t charged, turn;
} mp_diff_cache;

enum { MP_DIFF_CACHE_TEXTS = 8 }; /* maximum unused entries */

void mp_diff_cache_init(mp_diff_cache *cache, mp_budget *budget);
/* Return the entry of text `t` of an item's request, with a reference. If *known is false, the caller must compute the
 * embedding and call mp_diff_texts_complete. */
mp_status mp_diff_texts_get(mp_diff_cache *cache, const mp_item *item, int t, mp_diff_texts **texts, bool *known,
                            mp_error *error);
void mp_diff_texts_complete(mp_diff_texts *texts);
void mp_diff_texts_release(mp_diff_cache *cache, mp_diff_texts *texts); /* NULL is allowed */
/* Forgets unused entries. Returns the bytes freed. */
uint64_t mp_diff_cache_trim(mp_diff_cache *cache);

#endif
