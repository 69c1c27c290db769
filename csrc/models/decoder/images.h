/* decoder/images.h: the interface between a decoder and the part of a model that turns images into rows. A decoder does
 * not handle pixels: vision/ fills in the table, and vision/vision.h describes each function. Any thread may call read,
 * destroy, is_float32 and check; only the worker's thread may call the others. */
#ifndef MP_MODELS_DECODER_IMAGES_H
#define MP_MODELS_DECODER_IMAGES_H

#include <string.h>

#include "models/decoder/sequence.h"

struct mp_vision;
struct mp_image_store;
struct mp_tile;

typedef struct mp_request_images { /* image state of an item's sequences */
    int32_t (*positions)[3];      /* [n_prompt] positions on the three axes of M-RoPE, or NULL */
    int32_t shift;                /* position minus index of the tokens after the prompt */
    struct mp_tile *tiles[1];     /* [n_tiles] image tiles that the group holds; NULL for a tile that it does not
                                   * hold */
} mp_request_images;

typedef struct mp_image_ops {
    /* functions of a model */
    mp_status (*read)(const mp_load_args *args, mp_builder *builder, int32_t width, struct mp_vision **vision,
                      mp_error *error);
    void (*destroy)(struct mp_vision *vision);
    bool (*is_float32)(const struct mp_vision *vision); /* returns true if the image network computes in fp32 only */
    mp_status (*check)(const struct mp_vision *vision, mp_text_request *request, mp_error *error);
    /* functions of an engine */
    struct mp_image_store *(*open)(const struct mp_vision *vision, mp_budget *budget, mp_prefix_cache *cache);
    void (*close)(struct mp_image_store *store);
    uint64_t (*bytes)(const struct mp_image_store *store);
    uint64_t (*shrink)(struct mp_image_store *store, uint64_t bytes);
    uint64_t (*trim)(struct mp_image_store *store);
    /* functions of a group of sequences */
    mp_status (*begin)(struct mp_image_store *store, const mp_text_request *request, bool axes,
                       mp_sequence_group *group, mp_error *error);
    mp_status (*number)(struct mp_image_store *store, const mp_text_request *request, mp_sequence_group *group,
                        mp_error *error);
    void (*release)(struct mp_image_store *store, const mp_text_request *request, mp_sequence_group *group);
    int (*ready)(struct mp_image_store *store, const mp_text_request *request, mp_sequence_group *group,
                 const mp_sequence *seq, int want, int *missing);
    const float *(*row)(const struct mp_image_store *store, const mp_text_request *request,
                        const mp_sequence_group *group, int32_t position, int64_t *source);
    bool (*computing)(const struct mp_image_store *store, const mp_text_request *request,
                      const mp_sequence_group *group, int tile);
    uint64_t (*left_ns)(const struct mp_image_store *store, const mp_text_request *request,
                        const mp_sequence_group *group, int tile);
    uint64_t (*part_ns)(const struct mp_image_store *store);
    mp_status (*compute)(struct mp_image_store *store, mp_lease *lease, const mp_text_request *request,
                         mp_sequence_group *group, int tile, uint64_t budget_ns, const _Atomic int *unwanted,
                         mp_error *error);
} mp_image_ops;

/* Loads a decoder like mp_decoder_load; the decoder takes images through `ops`. */
mp_status mp_decoder_load_with(const mp_load_args *args, const mp_image_ops *ops, mp_model **model, mp_error *error);

/* Returns true for tensors of an image network, or of the projector between it and a decoder. */
static inline bool mp_decoder_images_own(const char *name) {
    return strncmp(name, "v.", 2) == 0 || strncmp(name, "mm.", 3) == 0;
}

/* The image store of an engine. ops NULL: the model takes no images, and the functions below do nothing. */
typedef struct mp_decoder_images {
    const mp_image_ops *ops;
    struct mp_image_store *store;
} mp_decoder_images;

static inline uint64_t mp_decoder_images_bytes(const mp_decoder_images *images) {
    return images->ops ? images->ops->bytes(images->store) : 0;
}
static inline uint64_t mp_decoder_images_shrink(const mp_decoder_images *images, uint64_t bytes) {
    return images->ops ? images->ops->shrink(images->store, bytes) : 0;
}
static inline uint64_t mp_decoder_images_trim(const mp_decoder_images *images) {
    return images->ops ? images->ops->trim(images->store) : 0;
}
static inline mp_status mp_decoder_images_begin(const mp_decoder_images *images, const mp_text_request *request,
                                                bool axes, mp_sequence_group *group, mp_error *error) {
    return images->ops ? images->ops->begin(images->store, request, axes, group, error) : MP_OK;
}
static inline mp_status mp_decoder_images_number(const mp_decoder_images *images, const mp_text_request *request,
                                                 mp_sequence_group *group, mp_error *error) {
    return images->ops ? images->ops->number(images->store, request, group, error) : MP_OK;
}
static inline void mp_decoder_images_release(const mp_decoder_images *images, const mp_text_request *request,
                                             mp_sequence_group *group) {
    if (images->ops)
        images->ops->release(images->store, request, group);
}
static inline int mp_decoder_images_ready(const mp_decoder_images *images, const mp_text_request *request,
                                          mp_sequence_group *group, const mp_sequence *seq, int want, int *missing) {
    *missing = -1;
    return group->images ? images->ops->ready(images->store, request, group, seq, want, missing) : want;
}

#endif
