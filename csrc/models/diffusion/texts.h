/* texts.h: what the text encoders made of a text, kept for the next call with the same one. One thread. */
#ifndef MP_MODELS_DIFFUSION_TEXTS_H
#define MP_MODELS_DIFFUSION_TEXTS_H

#include "models/diffusion/diffusion.h"

typedef struct mp_diff_memory {
    uint8_t *at;
    size_t bytes;
} mp_diff_memory;

typedef struct mp_diff_texts {
    float *rows;   /* [text_rows, text_width]; what no encoder fills is 0 */
    float *pooled; /* [pooled_width] */
    int32_t *ids;  /* of all encoders behind each other */
    int32_t n_ids[MP_DRAW_ENCODERS];
    int users;
    bool complete;
    uint64_t used; /* turn of the last use */
    size_t bytes;
    struct mp_diff_texts *next;
} mp_diff_texts;

typedef struct mp_diff_cache {
    mp_budget *budget;
    mp_diff_texts *list;
    uint64_t charged, turn;
} mp_diff_cache;

enum { MP_DIFF_CACHE_TEXTS = 8 }; /* kept that nobody uses */

void mp_diff_cache_init(mp_diff_cache *cache, mp_budget *budget);
/* The entry of text `t` of a call, for the caller until released. *known: it is complete; else the caller fills it and
 * says so. */
mp_status mp_diff_texts_get(mp_diff_cache *cache, const mp_image_generation_request *call, int t, mp_diff_texts **texts,
                            bool *known, mp_error *error);
void mp_diff_texts_complete(mp_diff_cache *cache, mp_diff_texts *texts);
void mp_diff_texts_release(mp_diff_cache *cache, mp_diff_texts *texts); /* NULL is legal */
/* Forgets what nobody uses; returns the bytes. */
uint64_t mp_diff_cache_trim(mp_diff_cache *cache);

#endif
