/* image/dedup.h: computes identical images of a step once, and reuses the vectors of recent images. Images are
 * identical if their prepared pixels and the postprocessing of the vector are equal. The prepared pixels are the key,
 * not the source bytes: a request has them whatever its source is (file, array, URL, HTTP), and no option of the
 * preparation has to be compared. By the numeric contract, a shared vector has the bits that a separate computation
 * would give. Only pooled vectors are shared.
 *
 * Each engine has one cache, and only the engine's worker uses it. Without memory for recent results, none are kept. */
#ifndef MP_MODELS_IMAGE_DEDUP_H
#define MP_MODELS_IMAGE_DEDUP_H

#include "models/dedup.h"
#include "models/image/vit.h"

typedef struct mp_image_result { /* a recent result; one allocation holds the vector and then the pixels */
    mp_vit_image image; /* `out` and `pixels` point into the allocation that starts at `out` */
    uint64_t at_ns, bytes;
} mp_image_result;

typedef struct mp_image_dedup {
    uint64_t keep_ns;    /* lifetime of a recent result: MP_DEDUP_KEEP_NS, unless a test changes it */
    uint64_t most_bytes; /* MP_DEDUP_BYTES, unless a test changes it; larger images are shared within a step only */
    /* for tests; mp_step_work.dedup_hits is the sum of both */
    uint64_t shared;     /* total images that got the vector of another image of their step */
    uint64_t recalled;   /* total images that got a recent result */
    mp_dedup_table step; /* the images of the step */
    mp_budget *budget;
    mp_image_result recent[MP_DEDUP_RECENT]; /* ring buffer */
    uint32_t next, count; /* next: entry written next; count: valid results, the newest before next */
    uint64_t charged;
    uint64_t hash_key[2];
} mp_image_dedup;

/* Returns the state of an engine, for tests. `engine` must come from mp_vit_engine. */
mp_image_dedup *mp_vit_engine_dedup(mp_engine *engine);
/* Allocates nothing. */
void mp_image_dedup_init(mp_image_dedup *dedup, mp_budget *budget);
void mp_image_dedup_deinit(mp_image_dedup *dedup);
/* Begin a step of up to `images` images. */
mp_status mp_image_dedup_begin(mp_image_dedup *dedup, int images, mp_error *error);
/* Return the key of an image's pixels. The functions below read it from image->key. */
uint64_t mp_image_dedup_key(const mp_image_dedup *dedup, const mp_vit_image *image);
/* True if the images have equal keys and options, so that they are identical in all likelihood. */
bool mp_image_dedup_alike(const mp_vit_image *a, const mp_vit_image *b);
/* If there is a recent result of an identical image, copy its vector to image->out and return true. */
bool mp_image_dedup_recall(mp_image_dedup *dedup, const mp_vit_image *image, uint64_t now_ns);
/* Return the index of an earlier, identical image of this step, whose vector images[index] shares. Returns -1 if there
 * is none: images[index] must be computed, and later images may share its vector. */
int mp_image_dedup_find(mp_image_dedup *dedup, const mp_vit_image *images, int index);
/* Keep a vector that was computed at now_ns, unless it is not finite or not pooled. The oldest results make room. */
void mp_image_dedup_keep(mp_image_dedup *dedup, const mp_vit_image *image, uint64_t now_ns);
/* Forget all recent results. */
void mp_image_dedup_trim(mp_image_dedup *dedup);

#endif
