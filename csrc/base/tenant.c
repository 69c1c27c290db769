/* tenant.c: see tenant.h. */
#include "base/tenant.h"

#include "base/siphash.h"

static uint64_t process_key[2];

void mp_tenant_init(void) { mp_siphash_key(process_key); }

uint64_t mp_tenant_of(const void *name, size_t bytes) {
    const uint64_t number = mp_siphash(process_key, name, bytes);
    return number ? number : 1;
}
