/* image/dedup.c: the comparison of images, and the ring buffer of recent results. */
#include "models/image/dedup.h"

#include <string.h>

#include "base/siphash.h"

void mp_image_dedup_init(mp_image_dedup *dedup, mp_budget *budget) {
    *dedup = (mp_image_dedup){.keep_ns = MP_DEDUP_KEEP_NS, .most_bytes = MP_DEDUP_BYTES, .budget = budget};
    mp_siphash_key(dedup->hash_key);
}

static void drop_oldest(mp_image_dedup *dedup) {
    mp_image_result *oldest = &dedup->recent[(dedup->next + MP_DEDUP_RECENT - dedup->count) % MP_DEDUP_RECENT];
    mp_free(oldest->image.out);
    mp_budget_give(dedup->budget, oldest->bytes);
    dedup->charged -= oldest->bytes;
    *oldest = (mp_image_result){0};
    dedup->count--;
}

void mp_image_dedup_trim(mp_image_dedup *dedup) {
    while (dedup->count)
        drop_oldest(dedup);
}

void mp_image_dedup_deinit(mp_image_dedup *dedup) {
    mp_image_dedup_trim(dedup);
    mp_dedup_table_deinit(&dedup->step);
}

/* ---- keys -------------------------------------------------------------------------------------------------------- */

/* The key covers the pixels only: `identical` compares all that changes a vector. */
uint64_t mp_image_dedup_key(const mp_image_dedup *dedup, const mp_vit_image *image) {
    return mp_siphash(dedup->hash_key, image->pixels, image->bytes);
}

bool mp_image_dedup_alike(const mp_vit_image *a, const mp_vit_image *b) {
    return a->key == b->key && a->bytes == b->bytes && a->width == b->width && a->dimensions == b->dimensions &&
           a->normalize == b->normalize && !a->want_tokens && !b->want_tokens;
}

static bool identical(const mp_vit_image *a, const mp_vit_image *b) {
    return mp_image_dedup_alike(a, b) && memcmp(a->pixels, b->pixels, a->bytes) == 0;
}

/* ---- within a step ----------------------------------------------------------------------------------------------- */

mp_status mp_image_dedup_begin(mp_image_dedup *dedup, int images, mp_error *error) {
    return mp_dedup_table_begin(&dedup->step, images, "the table of images", error);
}

static bool identical_in_step(const void *images, int a, int b) {
    return identical((const mp_vit_image *)images + a, (const mp_vit_image *)images + b);
}

int mp_image_dedup_find(mp_image_dedup *dedup, const mp_vit_image *images, int index) {
    const int same = mp_dedup_table_find(&dedup->step, images, index, images[index].key, identical_in_step);
    dedup->shared += same >= 0;
    return same;
}

/* ---- recent results ---------------------------------------------------------------------------------------------- */

bool mp_image_dedup_recall(mp_image_dedup *dedup, const mp_vit_image *image, uint64_t now_ns) {
    for (uint32_t i = 1; i <= dedup->count; i++) {
        const mp_image_result *result = &dedup->recent[(dedup->next + MP_DEDUP_RECENT - i) % MP_DEDUP_RECENT];
        if (now_ns - result->at_ns > dedup->keep_ns)
            return false; /* the remaining results are older */
        if (!identical(&result->image, image))
            continue;
        memcpy(image->out, result->image.out, (size_t)image->dimensions * sizeof(float));
        dedup->recalled++;
        return true;
    }
    return false;
}

void mp_image_dedup_keep(mp_image_dedup *dedup, const mp_vit_image *image, uint64_t now_ns) {
    const size_t vector = (size_t)image->dimensions * sizeof(float), bytes = vector + image->bytes;
    if (!image->finite || image->want_tokens || bytes > dedup->most_bytes)
        return;
    while (dedup->count == MP_DEDUP_RECENT || dedup->charged + bytes > dedup->most_bytes)
        drop_oldest(dedup);
    if (!mp_budget_take(dedup->budget, bytes))
        return;
    uint8_t *store = mp_alloc(bytes, MP_TAG_SCRATCH);
    if (!store) {
        mp_budget_give(dedup->budget, bytes);
        return;
    }
    mp_image_result *result = &dedup->recent[dedup->next];
    *result = (mp_image_result){.image = *image, .at_ns = now_ns, .bytes = bytes};
    result->image.out = memcpy(store, image->out, vector);
    result->image.pixels = memcpy(store + vector, image->pixels, image->bytes);
    dedup->charged += bytes;
    dedup->next = (dedup->next + 1) % MP_DEDUP_RECENT;
    dedup->count++;
}
