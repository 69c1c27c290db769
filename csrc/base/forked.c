/* forked.c: see forked.h. */
#include "base/forked.h"

#include <stdatomic.h>

#include "base/cpu.h"
#include "base/log.h"
#include "base/parking.h"
#include "base/sys.h"

static void forget_objects(void);

static const mp_fork_handlers object_handlers = {mp_forked_hold, mp_forked_release, forget_objects};
static const mp_fork_handlers parking_handlers = {.child = mp_parking_fork_child};
static const mp_fork_handlers log_handlers = {.child = mp_log_fork_child};

/* The rows of parking and of the log are set at compile time, because mp_fork_register takes a lock: neither mp_log nor
 * a thread that parks may take one. */
static _Atomic(const mp_fork_handlers *) rows[MP_FORK_RANK_COUNT] = {
    [MP_FORK_OBJECTS] = &object_handlers,
    [MP_FORK_PARKING] = &parking_handlers,
    [MP_FORK_LOG] = &log_handlers,
};

/* --- hooks --- */

static const uint64_t BACKOFF_NS = 50 * 1000;

/* A lock that needs no initialisation. The forking thread holds it throughout the fork, and mp_fork_register holds it
 * while changing a row. The hooks before and after one fork therefore see the same rows. */
static _Atomic int table_lock;
static bool installed; /* guarded by: table_lock */

static _Atomic uint32_t generation;

uint32_t mp_fork_generation(void) { return atomic_load_explicit(&generation, memory_order_relaxed); }

static void lock_table(void) {
    while (atomic_exchange_explicit(&table_lock, 1, memory_order_acquire))
        mp_sys_sleep_ns(BACKOFF_NS);
}

static void unlock_table(void) { atomic_store_explicit(&table_lock, 0, memory_order_release); }

static const mp_fork_handlers *forked_row(int rank) {
    static const mp_fork_handlers none;
    const mp_fork_handlers *handlers = atomic_load_explicit(&rows[rank], memory_order_acquire);
    return handlers ? handlers : &none;
}

static void forked_before(void) {
    lock_table();
    for (int rank = 0; rank < MP_FORK_RANK_COUNT; rank++)
        if (forked_row(rank)->before)
            forked_row(rank)->before();
}

static void in_parent(void) {
    for (int rank = MP_FORK_RANK_COUNT - 1; rank >= 0; rank--)
        if (forked_row(rank)->parent)
            forked_row(rank)->parent();
    unlock_table();
}

static void in_child(void) {
    atomic_fetch_add_explicit(&generation, 1, memory_order_relaxed);
    for (int rank = 0; rank < MP_FORK_RANK_COUNT; rank++)
        if (forked_row(rank)->child)
            forked_row(rank)->child();
    unlock_table();
}

static mp_status install(mp_error *error) { /* must hold table_lock */
    if (installed)
        return MP_OK;
    MP_TRY(mp_sys_at_fork(forked_before, in_parent, in_child, error));
    installed = true;
    return MP_OK;
}

mp_status mp_fork_init(mp_error *error) {
    lock_table();
    mp_status status = install(error);
    unlock_table();
    return status;
}

mp_status mp_fork_register(mp_fork_rank rank, const mp_fork_handlers *handlers, mp_error *error) {
    if (atomic_load_explicit(&rows[rank], memory_order_acquire))
        return MP_OK;
    lock_table();
    mp_status status = install(error);
    if (status == MP_OK)
        atomic_store_explicit(&rows[rank], handlers, memory_order_release);
    unlock_table();
    return status;
}

/* --- objects --- */

static _Atomic int list_lock;
static mp_forked *first; /* guarded by: list_lock */

void mp_forked_hold(void) {
    while (atomic_exchange_explicit(&list_lock, 1, memory_order_acquire))
        mp_cpu_relax();
}

void mp_forked_release(void) { atomic_store_explicit(&list_lock, 0, memory_order_release); }

static void forget_objects(void) {
    for (mp_forked *at = first, *next; at; at = next) {
        next = at->next;
        at->link = NULL;
        at->forget(at);
    }
    first = NULL;
    mp_forked_release();
}

mp_status mp_forked_add(mp_forked *self, void (*forget)(mp_forked *self), mp_error *error) {
    static _Atomic bool ready;
    if (!atomic_load_explicit(&ready, memory_order_acquire)) {
        MP_TRY(mp_fork_init(error));
        atomic_store_explicit(&ready, true, memory_order_release);
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
