/* remove.c: the end of an entry: its key was removed or replaced, or the registry shuts down. See entry.h. */
#include <stdatomic.h>

#include "base/intervals.h"
#include "registry/entry.h"

/* --- removal --- */

void mp_entry_remove(mp_entry *entry) {
    mp_assert_not_held(&entry->lock);
    mp_mutex_lock(&entry->lock);
    if (entry->removal == MP_REMOVAL_NONE) /* already DRAINING if an earlier caller gave up waiting */
        mp_entry_set_removal(entry, MP_REMOVAL_DRAINING);
    bool works = mp_entry_has_workers(entry);
    if (works)
        mp_entry_wake_workers(entry);
    for (int i = 0; i < entry->worker_count && !entry->queue.count; i++)
        if (entry->workers[i]->state == MP_WORKER_SPAWNING || entry->workers[i]->state == MP_WORKER_LOADING)
            atomic_store_explicit(&entry->workers[i]->step_cancelled, 1, memory_order_release);
    mp_cond_broadcast(&entry->room);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
    if (!works)
        mp_entry_finalize(entry, NULL);
}

/* Must hold the lock. True while mp_entry_finalize has not freed everything. */
static bool is_pending(const mp_entry *entry) {
    mp_assert_held(&entry->lock);
    bool quit = entry->shutdown == MP_SHUTDOWN_QUITTING; /* the entry never becomes GONE */
    return mp_entry_has_workers(entry) || (!quit && entry->removal != MP_REMOVAL_GONE);
}

mp_status mp_entry_wait_gone(mp_entry *entry, uint64_t deadline_ns, mp_error *error) {
    mp_assert_not_held(&entry->lock);
    bool in_time = true;
    mp_status status = MP_OK;
    mp_mutex_lock(&entry->lock);
    while (is_pending(entry) && in_time) {
        if (mp_entry_has_workers(entry) || entry->queue.count) {
            in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
            continue;
        }
        mp_mutex_unlock(&entry->lock);
        mp_entry_remove(entry); /* the thread that should call this may be slow, or exist in a fork's parent only */
        mp_mutex_lock(&entry->lock);
    }
    if (is_pending(entry))
        status = mp_fail_hint(error, MP_TIMEOUT, "Raise `timeout`",
                              "%s: the removal did not end before the deadline (requests left: %d); it continues in "
                              "the background", entry->key, mp_entry_running(entry) + entry->queue.count);
    mp_mutex_unlock(&entry->lock);
    return status;
}

/* --- shutdown, in this order --- */

void mp_entry_close(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    if (entry->shutdown == MP_SHUTDOWN_OPEN) /* mp_registry_close calls this twice: again for late arrivals */
        mp_entry_set_shutdown(entry, MP_SHUTDOWN_CLOSED);
    mp_cond_broadcast(&entry->room);
    mp_cond_broadcast(&entry->changed);
    mp_mutex_unlock(&entry->lock);
}

bool mp_entry_drain(mp_entry *entry, uint64_t deadline_ns) {
    bool in_time = true;
    mp_mutex_lock(&entry->lock);
    while ((entry->queue.count || mp_entry_running(entry)) && in_time)
        in_time = mp_cond_wait(&entry->changed, &entry->lock, deadline_ns);
    mp_mutex_unlock(&entry->lock);
    return in_time;
}

void mp_entry_quit(mp_entry *entry) {
    mp_mutex_lock(&entry->lock);
    if (entry->shutdown != MP_SHUTDOWN_QUITTING)
        mp_entry_set_shutdown(entry, MP_SHUTDOWN_QUITTING);
    mp_ticket *list = mp_entry_take_queue(entry, false);
    for (mp_ticket *ticket = list; ticket; ticket = ticket->next)
        atomic_store_explicit(&ticket->cause, MP_SHUTTING_DOWN, memory_order_release);
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        for (int j = 0; j < worker->active_count; j++)
            mp_entry_cancel_locked(entry, worker->active[j], MP_SHUTTING_DOWN);
        atomic_store_explicit(&worker->step_cancelled, 1, memory_order_release);
        mp_worker_wake(worker);
    }
    mp_mutex_unlock(&entry->lock);
    mp_entry_finish_list(entry, list, NULL);
}

/* Must hold the lock. Returns a worker that may be abandoned because its thread is inside a step, a load or a slice of
 * optional work, or NULL. */
static mp_worker *find_abandonable(mp_entry *entry) {
    mp_assert_held(&entry->lock);
    for (int i = 0; i < entry->worker_count; i++) {
        mp_worker *worker = entry->workers[i];
        if ((worker->in_step || worker->state == MP_WORKER_LOADING) && !worker->moving)
            return worker;
    }
    return NULL;
}

void mp_entry_join(mp_entry *entry, uint64_t deadline_ns) {
    mp_error error;
    mp_mutex_lock(&entry->lock);
    while (mp_entry_has_workers(entry)) {
        mp_worker *caught = mp_sys_now_ns() >= deadline_ns ? find_abandonable(entry) : NULL;
        if (caught) {
            mp_fail(&error, MP_SHUTTING_DOWN, "%s: worker %u did not end before the shutdown deadline", entry->key,
                    caught->id);
            mp_worker_abandon(caught, &error);
        } else { /* workers outside steps and loads leave soon */
            mp_cond_wait(&entry->changed, &entry->lock,
                         mp_sys_now_ns() < deadline_ns ? deadline_ns : mp_sys_now_ns() + 10 * MP_MS);
        }
    }
    mp_loader loader = {0};
    if (!entry->abandoned) { /* otherwise an abandoned thread may still use the loader: mp_entry_unpin frees it */
        loader = entry->loader;
        entry->loader = (mp_loader){0};
    }
    mp_resident *kept = entry->resident;
    entry->resident = NULL;
    while (entry->borrowers)
        mp_cond_wait(&entry->changed, &entry->lock, 0);
    mp_mutex_unlock(&entry->lock);
    mp_resident_unpin(kept);
    if (loader.ops)
        loader.ops->destroy(loader.self);
}
