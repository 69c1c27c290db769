/* notifier.c: a descriptor to poll and a list of ids. See notifier.h and registry.h. */
#include "registry/notifier.h"

#include <stdatomic.h>

#include "base/forked.h"
#include "base/sys.h"
#include "base/wake_fd.h"

struct mp_notifier {
    _Atomic int references;
    uint32_t generation; /* fork generation: in a child, a thread of the parent may hold the lock forever */
    mp_wake_fd wake;     /* its numbers are constant; closed once `open` is false */
    mp_mutex lock;
    /* guarded by: lock */
    mp_notice list; /* sentinel of a circular list */
    bool open;      /* false once destroyed */
};

mp_status mp_notifier_create(mp_notifier **notifier_out, mp_error *error) {
    *notifier_out = NULL;
    mp_notifier *notifier = mp_alloc_zeroed(sizeof(*notifier), MP_TAG_POOL);
    if (!notifier)
        return mp_fail_memory(error, sizeof(*notifier), "a notifier");
    mp_status status = mp_wake_fd_open(&notifier->wake, error);
    if (status != MP_OK) {
        mp_free(notifier);
        return status;
    }
    notifier->open = true;
    atomic_init(&notifier->references, 1);
    notifier->generation = mp_fork_generation();
    mp_mutex_init(&notifier->lock);
    notifier->list.prev = notifier->list.next = &notifier->list;
    *notifier_out = notifier;
    return MP_OK;
}

mp_notifier *mp_notifier_pin(mp_notifier *notifier) {
    atomic_fetch_add_explicit(&notifier->references, 1, memory_order_relaxed);
    return notifier;
}

void mp_notifier_unpin(mp_notifier *notifier) {
    if (!notifier || atomic_fetch_sub_explicit(&notifier->references, 1, memory_order_acq_rel) != 1)
        return;
    if (notifier->generation == mp_fork_generation())
        mp_mutex_deinit(&notifier->lock);
    mp_free(notifier);
}

void mp_notifier_destroy(mp_notifier *notifier) {
    if (!notifier)
        return;
    if (notifier->generation != mp_fork_generation()) {
        mp_wake_fd_close(&notifier->wake);
        return; /* tickets of the parent may point to the notifier: do not free it */
    }
    mp_mutex_lock(&notifier->lock);
    bool was_open = notifier->open;
    mp_wake_fd wake = notifier->wake; /* mp_notifier_fd may read the number at any time */
    notifier->open = false;
    mp_mutex_unlock(&notifier->lock);
    if (was_open)
        mp_wake_fd_close(&wake);
    mp_notifier_unpin(notifier);
}

int mp_notifier_fd(const mp_notifier *notifier) { return notifier->wake.poll_fd; }

/* Must hold the lock. */
static void unlink_notice(mp_notice *notice) {
    notice->prev->next = notice->next;
    notice->next->prev = notice->prev;
    notice->prev = notice->next = NULL;
}

void mp_notifier_post(mp_notifier *notifier, mp_notice *notice) {
    mp_mutex_lock(&notifier->lock);
    if (!notice->next) {
        bool was_empty = notifier->list.next == &notifier->list;
        notice->prev = notifier->list.prev;
        notice->next = &notifier->list;
        notice->prev->next = notice;
        notifier->list.prev = notice;
        if (was_empty && notifier->open) /* under the lock: no thread may close the descriptor meanwhile */
            mp_wake_fd_set(&notifier->wake);
    }
    mp_mutex_unlock(&notifier->lock);
}

void mp_notifier_withdraw(mp_notifier *notifier, mp_notice *notice) {
    mp_mutex_lock(&notifier->lock);
    if (notice->next)
        unlink_notice(notice);
    mp_mutex_unlock(&notifier->lock);
}

int mp_notifier_take(mp_notifier *notifier, uint64_t *ids, int capacity) {
    int count = 0;
    if (notifier->generation != mp_fork_generation())
        return 0;
    mp_mutex_lock(&notifier->lock);
    while (count < capacity && notifier->list.next != &notifier->list) {
        mp_notice *notice = notifier->list.next;
        unlink_notice(notice);
        ids[count++] = notice->id;
    }
    if (notifier->list.next == &notifier->list && notifier->open)
        mp_wake_fd_clear(&notifier->wake);
    mp_mutex_unlock(&notifier->lock);
    return count;
}
