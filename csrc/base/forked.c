/* forked.c: see forked.h. */
#include "base/forked.h"

#include <stdatomic.h>

#include "base/cpu.h"
#include "base/sys.h"

static _Atomic int busy; /* a lock that needs no initialising; the forking thread holds it from before to after */
static mp_forked *first; /* guarded by: busy */
static _Atomic bool installed;
/* Two threads may install the hooks at once, and then they run twice. */
static _Thread_local int depth;

void mp_forked_hold(void) {
    while (atomic_exchange_explicit(&busy, 1, memory_order_acquire))
        mp_cpu_relax();
}

void mp_forked_release(void) { atomic_store_explicit(&busy, 0, memory_order_release); }

static void before(void) {
    if (depth++ == 0)
        mp_forked_hold();
}

static void in_parent(void) {
    if (--depth == 0)
        mp_forked_release();
}

static void in_child(void) {
    if (--depth)
        return;
    for (mp_forked *at = first, *next; at; at = next) {
        next = at->next;
        at->link = NULL;
        at->forget(at);
    }
    first = NULL;
    mp_forked_release();
}

mp_status mp_forked_add(mp_forked *self, void (*forget)(mp_forked *self), mp_error *error) {
    if (!atomic_load_explicit(&installed, memory_order_acquire)) {
        MP_TRY(mp_sys_at_fork(before, in_parent, in_child, error));
        atomic_store_explicit(&installed, true, memory_order_release);
    }
    mp_forked_hold();
    *self = (mp_forked){.next = first, .link = &first, .forget = forget};
    if (first)
        first->link = &self->next;
    first = self;
    mp_forked_release();
    return MP_OK;
}

void mp_forked_remove(mp_forked *self) {
    mp_forked_hold();
    if (self->link) {
        *self->link = self->next;
        if (self->next)
            self->next->link = self->link;
        self->link = NULL;
    }
    mp_forked_release();
}
