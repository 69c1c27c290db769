/* notifier.h: how tickets tell an event loop about progress: a descriptor (base/wake_fd.h) and a list.
 * registry/registry.h has the public part. */
#ifndef MP_REGISTRY_NOTIFIER_H
#define MP_REGISTRY_NOTIFIER_H

#include "registry/registry.h"

/* Links a ticket into the list of a notifier to which the ticket is bound. */
typedef struct mp_notice {
    struct mp_notice *prev, *next; /* guarded by: the notifier's lock; NULL if not listed */
    mp_notifier *notifier;         /* owns a reference, or NULL; guarded by: the ticket's lock */
    uint64_t id;                   /* written only while the notice is not listed */
    struct mp_notice *also;        /* the ticket's next notice; guarded by: the ticket's lock */
} mp_notice;

mp_notifier *mp_notifier_pin(mp_notifier *notifier);
void mp_notifier_unpin(mp_notifier *notifier);
/* Adds the notice to the notifier's list, unless it is listed already, and makes the fd readable. Never blocks. */
void mp_notifier_post(mp_notifier *notifier, mp_notice *notice);
/* Takes the notice off the list if it is there. */
void mp_notifier_withdraw(mp_notifier *notifier, mp_notice *notice);

#endif
