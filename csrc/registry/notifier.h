/* notifier.h: how tickets tell an event loop that they moved: an eventfd and a list. Public part in
 * registry/registry.h. */
#ifndef MP_REGISTRY_NOTIFIER_H
#define MP_REGISTRY_NOTIFIER_H

#include "registry/registry.h"

/* A ticket's place in the list of a notifier that it is bound to. */
typedef struct mp_notice {
    struct mp_notice *prev, *next; /* guarded by: the notifier's lock; NULL when not listed */
    mp_notifier *notifier;         /* a reference, or NULL; guarded by: the ticket's lock */
    uint64_t id;                   /* written while it is not listed */
    struct mp_notice *also;        /* the ticket's next notice; guarded by: the ticket's lock */
} mp_notice;

mp_notifier *mp_notifier_pin(mp_notifier *notifier);
void mp_notifier_unpin(mp_notifier *notifier);
/* List it unless it is listed, and make the fd readable. Never blocks. */
void mp_notifier_post(mp_notifier *notifier, mp_notice *notice);
/* Take it off the list if it is on it. */
void mp_notifier_withdraw(mp_notifier *notifier, mp_notice *notice);

#endif
