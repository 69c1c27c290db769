/* audit.h: invariants that hold whenever no lock of the registry is held. For tests that run its threads one at a
 * time. */
#ifndef MP_REGISTRY_AUDIT_H
#define MP_REGISTRY_AUDIT_H

#include "registry/registry.h"

/* `is_held` says whether a thread holds a mutex: what that guards is skipped. Returns INTERNAL and describes the
 * first violation. Takes no lock. */
mp_status mp_registry_audit(mp_registry *registry, bool (*is_held)(const mp_mutex *mutex), mp_error *error);

#endif
