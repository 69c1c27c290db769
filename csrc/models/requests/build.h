/* requests/build.h: helpers that every constructor of a request in this folder uses. */
#ifndef MP_MODELS_REQUESTS_BUILD_H
#define MP_MODELS_REQUESTS_BUILD_H

#include <string.h>

#include "models/capability.h"

static inline mp_status mp_check_range(const char *name, int64_t value, int64_t low, int64_t high, mp_error *error) {
    if (value >= low && value <= high)
        return MP_OK;
    return mp_fail(error, MP_INVALID_ARGUMENT, "%s is %lld, allowed: %lld to %lld", name, (long long)value,
                   (long long)low, (long long)high);
}

static inline mp_status mp_check_number(const char *name, double value, double low, double high, mp_error *error) {
    if (value >= low && value <= high)
        return MP_OK; /* NaN is in no range */
    return mp_fail(error, MP_INVALID_ARGUMENT, "%s is %g, allowed: %g to %g", name, value, low, high);
}

/* A copy of count items, or NULL for none; *ok becomes false when memory is refused. The bytes are added to *bytes. */
static inline void *mp_call_copy(const void *from, size_t count, size_t size, uint64_t *bytes, bool *ok) {
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

/* Memory that is only touched as far as the answer goes. */
static inline void *mp_call_memory(size_t count, size_t size, uint64_t *bytes, bool *ok) {
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

#define MP_MIX_START ((uint64_t)0xcbf29ce484222325u)

/* 64-bit FNV-1a over words: equal requests give equal numbers, which is all that is asked of it. */
static inline uint64_t mp_mix(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; data && i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

static inline uint64_t mp_mix_end(uint64_t hash) { return hash ? hash : 1; }

#endif
