/* forked.h: what belongs to a process and not to its forked children: memory that is charged for other processes,
 * descriptors that only the parent uses. Each thing that is listed here is told so in the child, where its owner's
 * thread does not exist. Any thread may call. */
#ifndef MP_BASE_FORKED_H
#define MP_BASE_FORKED_H

#include "base/error.h"

typedef struct mp_forked { /* part of its owner */
    struct mp_forked *next, **link;
    void (*forget)(struct mp_forked *self);
} mp_forked;

/* forget is called in each child that is forked from now on, once, on its only thread; the thing is off the list then.
 * MEMORY_EXHAUSTED when the system refuses the hooks. */
mp_status mp_forked_add(mp_forked *self, void (*forget)(mp_forked *self), mp_error *error);
void mp_forked_remove(mp_forked *self); /* legal on one that is zeroed, or that was removed */
/* No fork happens between these two: for changes of what forget looks at. Short: others spin. */
void mp_forked_hold(void);
void mp_forked_release(void);

#endif
