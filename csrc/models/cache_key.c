/* cache_key.c: see cache_key.h. */
#include "models/cache_key.h"

#include "base/siphash.h"

mp_cache_key mp_cache_key_of(const uint64_t secret[2], mp_cache_scope scope, uint64_t before, const void *content,
                             size_t bytes) {
    const uint64_t owner[3] = {scope.tenant, scope.variant, before};
    const uint64_t key[2] = {secret[0] ^ mp_siphash(secret, owner, sizeof owner), secret[1]};
    return (mp_cache_key){.scope = scope, .hash = mp_siphash(key, content, bytes)};
}
