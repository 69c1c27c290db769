/* audit.h: invariants that hold whenever no lock of the registry is held. For tests that run the registry's threads one
 * at a time. */
#ifndef MP_REGISTRY_AUDIT_H
#define MP_REGISTRY_AUDIT_H

#include "registry/registry.h"

/* is_held(mutex) returns true if a thread holds the mutex: state that this mutex guards is not checked. Returns
 * INTERNAL with a description of the first violation. Takes no lock. */
mp_status mp_registry_audit(mp_registry *registry, bool (*is_held)(const mp_mutex *mutex), mp_error *error);

#endif
