/* audit.h: what must be true of a registry at any moment at which none of its locks is held. For tests that run its
 * threads one at a time. */
#ifndef MP_REGISTRY_AUDIT_H
#define MP_REGISTRY_AUDIT_H

#include "registry/registry.h"

/* is_held says whether a thread holds the mutex: then what it guards is not looked at. INTERNAL, with what is wrong, on
 * the first thing that is. Takes no lock. */
mp_status mp_registry_audit(mp_registry *registry, bool (*is_held)(const mp_mutex *mutex), mp_error *error);

#endif
