/* requests/build.h: helpers of the constructors of requests. */
#ifndef MP_MODELS_REQUESTS_BUILD_H
#define MP_MODELS_REQUESTS_BUILD_H

#include <string.h>

#include "base/siphash.h"
#include "models/capability.h"

static inline mp_status mp_check_range(const char *name, int64_t value, int64_t low, int64_t high, mp_error *error) {
    if (value >= low && value <= high)
        return MP_OK;
    return mp_fail(error, MP_INVALID_ARGUMENT, "%s must be %lld to %lld, got %lld", name, (long long)low,
                   (long long)high, (long long)value);
}

static inline mp_status mp_check_number(const char *name, double value, double low, double high, mp_error *error) {
    if (value >= low && value <= high)
        return MP_OK; /* NaN is out of every range */
    return mp_fail(error, MP_INVALID_ARGUMENT, "%s must be %g to %g, got %g", name, low, high, value);
}

/* Check that each item of an array is within bounds. NULL is allowed if the array is empty. Always inlined: if the
 * bounds are the limits of the type, as for pixels and token ids, the compiler removes the loop. */
#define MP_CHECK_ITEMS(type, number, format)                                                                           \
    static inline __attribute__((always_inline)) mp_status mp_check_items_##type(                                      \
        const char *name, const type *items, size_t count, number low, number high, mp_error *error) {                 \
        if (!items && count > 0)                                                                                       \
            return mp_fail(error, MP_INVALID_ARGUMENT, "%s must have %zu entries, got none", name, count);             \
        for (size_t i = 0; i < count; i++)                                                                             \
            if (!((number)items[i] >= low && (number)items[i] <= high))                                                \
                return mp_fail(error, MP_INVALID_ARGUMENT, "%s[%zu] must be " format " to " format ", got " format,    \
                               name, i, low, high, (number)items[i]);                                                  \
        return MP_OK;                                                                                                  \
    }
MP_CHECK_ITEMS(uint8_t, int, "%d")
MP_CHECK_ITEMS(int32_t, int, "%d")
MP_CHECK_ITEMS(int64_t, long, "%ld")
MP_CHECK_ITEMS(float, double, "%g")
#undef MP_CHECK_ITEMS

/* Check concatenated images of [height, width, 3] bytes: their sizes must add up to n_bytes. */
static inline mp_status mp_check_pixels(const int32_t *sizes, int32_t n, int64_t n_bytes, mp_error *error) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < n; i++)
        bytes += (int64_t)sizes[2 * i] * sizes[2 * i + 1] * MP_IMAGE_CHANNELS; /* below 2^50 */
    if (bytes == n_bytes)
        return MP_OK;
    return mp_fail(error, MP_INVALID_ARGUMENT, "pixels has %lld bytes, but the sizes add up to %lld",
                   (long long)n_bytes, (long long)bytes);
}

/* Copy `count` items of `size` bytes and add the bytes to *bytes. Returns NULL if there are no items. If memory is
 * exhausted, returns NULL and sets *ok to false. */
static inline void *mp_request_copy(const void *from, size_t count, size_t size, uint64_t *bytes, bool *ok) {
    if (count == 0 || !from || !*ok)
        return NULL;
    void *to = mp_alloc_array(count, size, MP_TAG_REQUEST);
    if (!to) {
        *ok = false;
        return NULL;
    }
    memcpy(to, from, count * size);
    *bytes += count * size;
    return to;
}

/* Allocate memory for an output and add the bytes to *bytes. Sets *ok to false if memory is exhausted. The memory is
 * not zeroed, so pages without results are never touched. */
static inline void *mp_request_memory(size_t count, size_t size, uint64_t *bytes, bool *ok) {
    size_t total;
    if (!*ok || __builtin_mul_overflow(count, size, &total)) {
        *ok = false;
        return NULL;
    }
    void *memory = mp_alloc(total, MP_TAG_REQUEST);
    *ok = memory != NULL;
    *bytes += total;
    return memory;
}

/* Allocate an output of rows of `width` floats. */
static inline float *mp_request_floats(size_t rows, int64_t width, uint64_t *bytes, bool *ok) {
    return mp_request_memory(rows, (size_t)width * sizeof(float), bytes, ok);
}

/* Return the [n + 1] byte offsets of concatenated images of these sizes. Sets *ok to false if memory is exhausted. */
static inline int64_t *mp_request_pixel_offsets(const int32_t *sizes, int32_t n, uint64_t *bytes, bool *ok) {
    int64_t *offsets = *ok ? mp_alloc_array((size_t)n + 1, sizeof *offsets, MP_TAG_REQUEST) : NULL;
    *ok = offsets != NULL;
    if (!offsets)
        return NULL;
    *bytes += ((size_t)n + 1) * sizeof *offsets;
    for (int32_t i = 0; i < n; i++)
        offsets[i + 1] = offsets[i] + (int64_t)sizes[2 * i] * sizes[2 * i + 1] * MP_IMAGE_CHANNELS;
    return offsets;
}

/* Replace the bytes charged for outputs by `bytes`. */
static inline void mp_request_charge_outputs(mp_request *request, uint64_t bytes) {
    request->bytes += bytes - request->output_bytes;
    request->output_bytes = bytes;
}

/* Continue a fingerprint, which begins with 0, by an array of the request. NULL: the request has no such array. Equal
 * requests must have equal fingerprints; no more is required. */
static inline uint64_t mp_fingerprint(uint64_t before, const void *data, size_t bytes) {
    const uint64_t key[2] = {before, before};
    return data ? mp_siphash(key, data, bytes) : before;
}

#endif
