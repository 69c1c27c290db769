/* cache_key.h: the keys of all tables that spare one request the work of another: prefix blocks, vectors of equal
 * inputs, rows of images, encoded prompts.
 *
 * A request may use an entry only if its tenant made it. Otherwise the response time of a request would tell its caller
 * what another tenant has sent. So every such table compares an mp_cache_scope, which only mp_cache_scope_of makes,
 * from the request's item. In models/, only this file and cache_key.c may hash contents or read the tenant
 * (tests/c/check_tiers.py): a table with hashed keys cannot be built without it.
 *
 * Model revision and compute type are part of no key: each table belongs to one loaded model or to one of its engines,
 * which has one revision and one compute type. */
#ifndef MP_MODELS_CACHE_KEY_H
#define MP_MODELS_CACHE_KEY_H

#include "models/engine.h"

/* The requests that may use each other's entries. Compared in full. */
typedef struct mp_cache_scope {
    uint64_t tenant;  /* mp_item.tenant */
    uint64_t variant; /* chosen by the table: what makes entries of equal contents differ, such as the adapter; or 0 */
} mp_cache_scope;

typedef struct mp_cache_key {
    mp_cache_scope scope;
    uint64_t hash; /* selects candidates only: a table also compares the contents */
} mp_cache_key;

static inline mp_cache_scope mp_cache_scope_of(const mp_item *item, uint64_t variant) {
    return (mp_cache_scope){item->tenant, variant};
}
static inline bool mp_cache_scope_equal(mp_cache_scope a, mp_cache_scope b) {
    return a.tenant == b.tenant && a.variant == b.variant;
}
/* secret: the random key of the table (mp_siphash_key). before: hash of the preceding entry in a chain; else 0. */
mp_cache_key mp_cache_key_of(const uint64_t secret[2], mp_cache_scope scope, uint64_t before, const void *content,
                             size_t bytes);
static inline bool mp_cache_key_equal(mp_cache_key a, mp_cache_key b) {
    return a.hash == b.hash && mp_cache_scope_equal(a.scope, b.scope);
}

#endif
