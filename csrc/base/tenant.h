/* tenant.h: the number by which the core knows a tenant: a hash of its name, under a random key of this process. */
#ifndef MP_BASE_TENANT_H
#define MP_BASE_TENANT_H

#include <stddef.h>
#include <stdint.h>

/* Set the key. Call once, before other threads exist. A forked child keeps the key. A worker process has none: it gets
 * the numbers that its parent computed. */
void mp_tenant_init(void);
/* Return the tenant's number, never 0, which means that no tenant is named. Equal names have equal numbers. The key
 * keeps callers from choosing names with equal numbers. */
uint64_t mp_tenant_of(const void *name, size_t bytes);

#endif
