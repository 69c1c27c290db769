/* request_fixture.h: embedding requests from positional arguments, with every option at its default. */
#ifndef MP_TEST_REQUEST_FIXTURE_H
#define MP_TEST_REQUEST_FIXTURE_H

#include "models/capability.h"

/* Create a request with default options. Reads offsets[n_texts] only if `n_texts` is in the allowed range. */
static inline mp_status make_embedding_request(int32_t n_texts, const int32_t *ids, const int64_t *offsets,
                                        const int32_t *skip, mp_embedding_request **call, mp_error *error) {
    bool legal = n_texts > 0 && n_texts <= MP_EMBED_MAX_TEXTS;
    return mp_embedding_request_create(&(mp_embedding_args){.n_texts = n_texts,
                                                 .n_tokens = legal ? offsets[n_texts] : 0,
                                                 .ids = ids,
                                                 .offsets = offsets,
                                                 .skip = skip,
                                                 .normalize = -1},
                                call, error);
}

static inline mp_status make_image_embedding_request(int32_t n_images, const int32_t *sizes, const uint8_t *pixels,
                                                     int64_t n_bytes, mp_image_embedding_request **call,
                                                     mp_error *error) {
    return mp_image_embedding_request_create(
        &(mp_image_embedding_args){
            .n_images = n_images, .n_bytes = n_bytes, .sizes = sizes, .pixels = pixels, .normalize = -1},
        call, error);
}

#endif
