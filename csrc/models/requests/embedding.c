/* requests/embedding.c: calls for vectors: making, output buffers, freeing. */
#include "models/requests/build.h"

/* Room for so many vectors of a width, in the place of `had` floats if there were any: the call was checked against a
 * model that has been replaced since. */
static mp_status make_vectors(mp_call *call, float **vectors, size_t had, size_t rows, int32_t width, mp_error *error) {
    size_t count = 0, bytes = 0;
    if (__builtin_mul_overflow(rows, (size_t)width, &count) || __builtin_mul_overflow(count, sizeof(float), &bytes))
        return mp_fail_memory(error, UINT64_MAX, "the vectors");
    if (*vectors) {
        mp_free(*vectors);
        call->bytes -= had * sizeof(float);
    }
    *vectors = mp_alloc(bytes, MP_TAG_REQUEST);
    if (!*vectors)
        return mp_fail_memory(error, bytes, "the vectors");
    call->bytes += bytes;
    return MP_OK;
}

/* ---- text_embedding -------------------------------------------------------------------------------------------- */

static uint64_t embed_fingerprint(const mp_call *base) {
    const mp_embed_call *call = (const mp_embed_call *)base;
    uint64_t hash = mp_mix(MP_MIX_START, call->offsets, ((size_t)call->n_texts + 1) * sizeof *call->offsets);
    return mp_mix_end(mp_mix(hash, call->ids, (size_t)call->n_tokens * sizeof *call->ids));
}

static void embed_usage(const mp_call *base, uint64_t *in, uint64_t *out) {
    *in = (uint64_t)((const mp_embed_call *)base)->n_tokens;
    *out = 0;
}

static void embed_destroy(mp_call *base) {
    mp_embed_call *call = (mp_embed_call *)base;
    mp_free(call->ids);
    mp_free(call->offsets);
    mp_free(call->skip);
    mp_free(call->second);
    mp_free(call->vectors);
    mp_free(call);
}

mp_status mp_embed_call_create(int32_t n_texts, const int32_t *ids, const int64_t *offsets, const int32_t *skip,
                               mp_embed_call **out, mp_error *error) {
    *out = NULL;
    if (n_texts < 1 || n_texts > MP_EMBED_MOST_TEXTS)
        return mp_fail(error, MP_INVALID_ARGUMENT, "there are %d texts, allowed: 1 to %d", n_texts,
                       (int)MP_EMBED_MOST_TEXTS);
    if (offsets[0] != 0)
        return mp_fail(error, MP_INVALID_ARGUMENT, "offsets[0] is %lld, allowed: 0", (long long)offsets[0]);
    for (int32_t t = 0; t < n_texts; t++)
        if (offsets[t + 1] < offsets[t])
            return mp_fail(error, MP_INVALID_ARGUMENT, "offsets[%d] is %lld, below the one before", t + 1,
                           (long long)offsets[t + 1]);
    mp_embed_call *call = mp_alloc_zeroed(sizeof *call, MP_TAG_REQUEST);
    if (!call)
        return mp_fail_memory(error, sizeof *call, "a call");
    bool ok = true;
    call->base = (mp_call){.capability = MP_TEXT_EMBEDDING,
                           .destroy = embed_destroy,
                           .fingerprint = embed_fingerprint,
                           .usage = embed_usage,
                           .bytes = sizeof *call};
    call->n_texts = n_texts;
    call->n_tokens = offsets[n_texts];
    call->normalize = -1;
    call->ids = mp_call_copy(ids, (size_t)call->n_tokens, sizeof *ids, &call->base.bytes, &ok);
    call->offsets = mp_call_copy(offsets, (size_t)n_texts + 1, sizeof *offsets, &call->base.bytes, &ok);
    call->skip = mp_call_copy(skip, (size_t)n_texts, sizeof *skip, &call->base.bytes, &ok);
    if (!ok) {
        embed_destroy(&call->base);
        return mp_fail_memory(error, (uint64_t)offsets[n_texts] * sizeof *ids, "the token ids of a call");
    }
    *out = call;
    return MP_OK;
}

mp_status mp_embed_call_pairs(mp_embed_call *call, const int32_t *second, mp_error *error) {
    bool ok = true;
    call->second = mp_call_copy(second, (size_t)call->n_texts, sizeof *second, &call->base.bytes, &ok);
    return ok ? MP_OK : mp_fail_memory(error, (uint64_t)call->n_texts * sizeof *second, "the pairs of a call");
}

mp_status mp_embed_call_output(mp_embed_call *call, int32_t width, mp_error *error) {
    if (call->vectors && call->width == width)
        return MP_OK;
    const size_t rows = (size_t)(call->output == MP_EMBED_TOKENS ? call->n_tokens : call->n_texts);
    MP_TRY(make_vectors(&call->base, &call->vectors, rows * (size_t)call->width, rows, width, error));
    call->width = width;
    return MP_OK;
}

/* ---- image_embedding ------------------------------------------------------------------------------------------- */

/* Eight bytes at a time: an image is hundreds of kilobytes. */
static uint64_t image_fingerprint(const mp_call *base) {
    const mp_image_call *call = (const mp_image_call *)base;
    uint64_t hash = mp_mix(MP_MIX_START, call->sizes, (size_t)call->n_images * 2 * sizeof *call->sizes);
    size_t bytes = (size_t)call->offsets[call->n_images], at = 0;
    for (; at + sizeof hash <= bytes; at += sizeof hash) {
        uint64_t word;
        memcpy(&word, call->pixels + at, sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return mp_mix_end(mp_mix(hash, call->pixels + at, bytes - at));
}

static void image_usage(const mp_call *base, uint64_t *in, uint64_t *out) {
    *in = (uint64_t)((const mp_image_call *)base)->n_images;
    *out = 0;
}

static void image_destroy(mp_call *base) {
    mp_image_call *call = (mp_image_call *)base;
    mp_free(call->sizes);
    mp_free(call->offsets);
    mp_free(call->pixels);
    mp_free(call->vectors);
    mp_free(call);
}

mp_status mp_image_call_create(int32_t n_images, const int32_t *sizes, const uint8_t *pixels, int64_t n_bytes,
                               mp_image_call **out, mp_error *error) {
    *out = NULL;
    MP_TRY(mp_check_range("the number of images", n_images, 1, MP_IMAGE_MOST, error));
    int64_t bytes = 0;
    for (int32_t i = 0; i < 2 * n_images; i += 2) {
        MP_TRY(mp_check_range("the height of an image", sizes[i], 1, MP_IMAGE_MOST_SIDE, error));
        MP_TRY(mp_check_range("the width of an image", sizes[i + 1], 1, MP_IMAGE_MOST_SIDE, error));
        bytes += (int64_t)sizes[i] * sizes[i + 1] * MP_IMAGE_CHANNELS; /* below 2^50 */
    }
    if (bytes != n_bytes)
        return mp_fail(error, MP_INVALID_ARGUMENT, "there are %lld bytes of pixels, the sizes make %lld",
                       (long long)n_bytes, (long long)bytes);
    mp_image_call *call = mp_alloc_zeroed(sizeof *call, MP_TAG_REQUEST);
    if (!call)
        return mp_fail_memory(error, sizeof *call, "a call");
    bool ok = true;
    call->base = (mp_call){.capability = MP_IMAGE_EMBEDDING,
                           .destroy = image_destroy,
                           .fingerprint = image_fingerprint,
                           .usage = image_usage,
                           .bytes = sizeof *call};
    call->n_images = n_images;
    call->normalize = -1;
    call->sizes = mp_call_copy(sizes, 2 * (size_t)n_images, sizeof *sizes, &call->base.bytes, &ok);
    call->pixels = mp_call_copy(pixels, (size_t)bytes, 1, &call->base.bytes, &ok);
    call->offsets = ok ? mp_alloc_array((size_t)n_images + 1, sizeof *call->offsets, MP_TAG_REQUEST) : NULL;
    if (!call->offsets) {
        image_destroy(&call->base);
        return mp_fail_memory(error, (uint64_t)bytes, "the pixels of a call");
    }
    call->base.bytes += ((size_t)n_images + 1) * sizeof *call->offsets;
    call->offsets[0] = 0;
    for (int32_t i = 0; i < n_images; i++)
        call->offsets[i + 1] = call->offsets[i] + (int64_t)sizes[2 * i] * sizes[2 * i + 1] * MP_IMAGE_CHANNELS;
    *out = call;
    return MP_OK;
}

mp_status mp_image_call_output(mp_image_call *call, int64_t n_rows, int32_t width, mp_error *error) {
    if (call->vectors && call->n_rows == n_rows && call->width == width)
        return MP_OK;
    const bool tokens = call->output == MP_EMBED_TOKENS;
    const size_t had = (size_t)(tokens ? call->n_rows : call->n_images) * (size_t)call->width;
    MP_TRY(make_vectors(&call->base, &call->vectors, had, (size_t)(tokens ? n_rows : call->n_images), width, error));
    call->n_rows = n_rows;
    call->width = width;
    return MP_OK;
}
