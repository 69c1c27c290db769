/* registry.c: the life of a registry, and the operations on it that keys.c and registry_all.c lack. See registry.h.
 *
 * Lock order, outermost first:
 *
 *   fork.c's list  >  registry  >  entry  >  ticket  >  notifier
 *                     registry  >  entry  >  { pool, maintenance, governor, CPU allocator }
 *
 * The locks in braces are leaves: no other lock is taken while one of them is held. No lock is held while a model
 * loads or steps, while an entry reports an event, or while a visitor or a give_up callback runs.
 *
 * `inside` counts operations on entries in progress, from the lookup of the entry to the end of the operation.
 * mp_registry_close destroys the thread pool only when `inside` is 0. */
#include "registry/registry.h"

#include <assert.h>
#include <stdatomic.h>

#include "base/log.h"
#include "registry/events.h"
#include "registry/fork.h"
#include "registry/state.h"

enum { MAX_THREADS = 1024 }; /* limit of the thread pool: one per worker, one for maintenance */
static const uint64_t MS = 1000 * 1000;
/* After the grace period all work is cancelled. Steps and loads that have not ended this long after that are
 * abandoned. */
static const uint64_t FORCE_NS = 2000ull * 1000 * 1000;

/* --- life --- */

static mp_status create_services(mp_registry *registry, const mp_registry_config *config, mp_error *error) {
    mp_services *services = mp_alloc_zeroed(sizeof(*services), MP_TAG_POOL);
    if (!services)
        return mp_fail_memory(error, sizeof(*services), "the services of a registry");
    registry->services = services;
    static _Atomic uint64_t number;
    services->number = atomic_fetch_add_explicit(&number, 1, memory_order_relaxed) + 1;
    atomic_init(&services->references, 1);
    services->registry = registry;
    services->event = mp_registry_on_event;
    mp_services_configure(services, config);
    mp_maintenance_init(&services->maintenance, mp_registry_sweep, registry);
    MP_TRY(mp_cpu_allocator_open(config->threads, config->background, &services->allocator, error));
    services->allocator_pinned = mp_cpu_allocator_pin(services->allocator);
    MP_TRY(mp_governor_open(config->memory_limit, &services->governor, error));
    return mp_pool_create("mpool-worker", MAX_THREADS, config->background, &services->pool, error);
}

/* Call once, when no worker exists. Clears the pointers under the lock: a child of a concurrent fork, which closes the
 * registry again, finds complete objects or NULL, and does not end the registry's use of the allocator twice. */
static void release_threads(mp_registry *registry) {
    mp_services *services = registry->services;
    mp_mutex_lock(&registry->lock);
    mp_pool *pool = services->pool;
    mp_cpu_allocator *allocator = services->allocator;
    services->pool = NULL;
    services->allocator = NULL;
    mp_mutex_unlock(&registry->lock);
    mp_pool_destroy(pool);
    mp_cpu_allocator_close(allocator);
}

mp_status mp_registry_create(const mp_registry_config *config, mp_registry **registry_out, mp_error *error) {
    *registry_out = NULL;
    MP_TRY(mp_services_check(config, error));
    MP_TRY(mp_fork_install(error));
    mp_registry *registry = mp_alloc_zeroed(sizeof(*registry), MP_TAG_POOL);
    if (!registry)
        return mp_fail_memory(error, sizeof(*registry), "a registry");
    mp_mutex_init(&registry->lock);
    mp_cond_init(&registry->changed);
    registry->grace_ns = mp_or_default(config->shutdown_grace_ns, MP_SHUTDOWN_GRACE_NS);
    mp_upkeep_init(&registry->upkeep, mp_or_default(config->maintenance_every_ns, 60000 * MS));
    registry->reclaimer = mp_registry_reclaimer(registry);
    mp_status status = create_services(registry, config, error);
    if (status != MP_OK) {
        if (registry->services) {
            release_threads(registry);
            mp_services_unpin(registry->services);
        }
        mp_cond_deinit(&registry->changed);
        mp_mutex_deinit(&registry->lock);
        mp_free(registry);
        return status;
    }
    mp_fork_join(registry);
    mp_governor_add_reclaimer(registry->services->governor, &registry->reclaimer);
    *registry_out = registry;
    return MP_OK;
}

void mp_registry_begin_shutdown(mp_registry *registry) { atomic_store(&registry->refusing, true); }

/* Must hold the lock. Called only by the thread that closes the registry. Links all entries by `close_next`, each with
 * a reference. Allocates nothing. */
static mp_entry *chain_entries(mp_registry *registry) {
    mp_assert_held(&registry->lock);
    mp_entry *chain = NULL;
    for (int i = 0; i < registry->slot_count + registry->leaving_count; i++) {
        slot *slot = i < registry->slot_count ? &registry->slots[i] : NULL;
        mp_entry *entries[] = {slot ? slot->current : registry->leaving[i - registry->slot_count],
                               slot ? slot->incoming : NULL};
        for (int j = 0; j < 2; j++) {
            if (!entries[j])
                continue;
            mp_entry_pin(entries[j])->close_next = chain;
            chain = entries[j];
        }
    }
    return chain;
}

/* Must hold the lock; releases it temporarily. Called only by the thread that closes the registry. */
static void close_entries(mp_registry *registry, uint64_t grace_ns) {
    mp_assert_held(&registry->lock);
    mp_entry *chain = chain_entries(registry);
    mp_mutex_unlock(&registry->lock);
    uint64_t deadline_ns = mp_sys_after(mp_sys_now_ns(), grace_ns);
    for (mp_entry *entry = chain; entry; entry = entry->close_next)
        mp_entry_close(entry);
    for (mp_entry *entry = chain; grace_ns && entry; entry = entry->close_next)
        if (!mp_entry_drain(entry, deadline_ns))
            break;
    for (mp_entry *entry = chain; entry; entry = entry->close_next)
        mp_entry_quit(entry);
    deadline_ns = mp_sys_now_ns() + FORCE_NS;
    while (chain) {
        mp_entry *next = chain->close_next;
        mp_entry_join(chain, deadline_ns);
        mp_entry_unpin(chain);
        chain = next;
    }
    mp_mutex_lock(&registry->lock);
}

void mp_registry_close(mp_registry *registry, uint64_t grace_ns) {
    mp_registry_begin_shutdown(registry);
    mp_mutex_lock(&registry->lock);
    if (registry->closing != OPEN) {
        while (registry->closing != CLOSED)
            mp_cond_wait(&registry->changed, &registry->lock, 0);
        mp_mutex_unlock(&registry->lock);
        return;
    }
    registry->closing = CLOSING;
    mp_mutex_unlock(&registry->lock);
    mp_governor_remove_reclaimer(registry->services->governor, &registry->reclaimer);
    mp_mutex_lock(&registry->lock);
    close_entries(registry, grace_ns);
    /* A replacement may have been added, or an operation may have begun, before the entries were closed: close
     * again. */
    while (registry->inside)
        mp_cond_wait(&registry->changed, &registry->lock, 0);
    close_entries(registry, 0);
    mp_mutex_unlock(&registry->lock);

    mp_maintenance_stop(&registry->services->maintenance);
    release_threads(registry);

    mp_mutex_lock(&registry->lock);
    for (int i = 0; i < registry->slot_count; i++) {
        mp_entry_unpin(registry->slots[i].current);
        mp_entry_unpin(registry->slots[i].incoming);
    }
    for (int i = 0; i < registry->leaving_count; i++)
        mp_entry_unpin(registry->leaving[i]);
    registry->slot_count = registry->leaving_count = 0;
    registry->closing = CLOSED;
    mp_cond_broadcast(&registry->changed);
    mp_mutex_unlock(&registry->lock);
    mp_log(MP_LOG_INFO, "Graceful shutdown complete");
}

void mp_registry_destroy(mp_registry *registry) {
    if (!registry)
        return;
    mp_registry_close(registry, registry->grace_ns);
    mp_fork_leave(registry);
    mp_services_unpin(registry->services);
    mp_free(registry->slots);
    mp_free(registry->leaving);
    mp_cond_deinit(&registry->changed);
    mp_mutex_deinit(&registry->lock);
    mp_free(registry);
}

/* --- entries --- */

mp_status mp_registry_load(mp_registry *registry, const char *key, bool pin, uint64_t deadline_ns, mp_error *error) {
    mp_status status;
    bool gone, over;
    do { /* look up again if the entry was removed or replaced */
        mp_entry *entry;
        MP_TRY(mp_registry_enter(registry, key, true, &entry, error));
        status = mp_entry_load(entry, pin, deadline_ns, &gone, &over, error);
        /* The worker that loaded a replacement may not have reported yet that it becomes the current entry, or that it
         * failed. The caller's next call must not find the replacement in its slot. */
        if (over)
            mp_registry_on_event(registry, entry, status == MP_OK ? MP_ENTRY_LOADED : MP_ENTRY_LOAD_FAILED);
        mp_registry_leave(registry, entry);
    } while (gone);
    return status;
}

mp_status mp_registry_evict(mp_registry *registry, const char *key, uint64_t deadline_ns, mp_error *error) {
    mp_entry *entry;
    MP_TRY(mp_registry_enter(registry, key, false, &entry, error));
    mp_status status = mp_entry_evict(entry, deadline_ns, error);
    mp_registry_leave(registry, entry);
    return status;
}

mp_status mp_registry_keep_alive(mp_registry *registry, const char *key, uint64_t keep_alive_ns, mp_error *error) {
    for (int incoming = 0; incoming < 2; incoming++) { /* the load of a replacement may fail: set both models' value */
        mp_entry *entry;
        MP_TRY(mp_registry_enter(registry, key, incoming, &entry, error));
        mp_entry_keep_alive(entry, keep_alive_ns);
        mp_registry_leave(registry, entry);
    }
    return MP_OK;
}

mp_status mp_registry_pin(mp_registry *registry, const char *key, bool pinned, mp_error *error) {
    for (int incoming = 0; incoming < 2; incoming++) {
        mp_entry *entry;
        MP_TRY(mp_registry_enter(registry, key, incoming, &entry, error));
        mp_entry_pin_model(entry, pinned);
        mp_registry_leave(registry, entry);
    }
    return MP_OK;
}

void mp_registry_get_stats(mp_registry *registry, mp_registry_stats *stats) {
    mp_services_get_stats(registry->services, stats);
}

uint64_t mp_registry_number(const mp_registry *registry) { return registry->services->number; }

void mp_registry_maintain(mp_registry *registry) {
    mp_services *services = registry->services;
    mp_mutex_lock(&registry->lock);
    bool open = registry->closing == OPEN && services->pool;
    registry->inside += open;
    mp_mutex_unlock(&registry->lock);
    if (!open)
        return;
    mp_maintenance_at(&services->maintenance, services->pool, mp_sys_now_ns());
    mp_registry_leave(registry, NULL);
}

static bool is_past(void *deadline_ns) {
    const uint64_t deadline = *(uint64_t *)deadline_ns;
    return deadline && mp_sys_now_ns() >= deadline;
}

mp_status mp_registry_compute(mp_registry *registry, uint64_t deadline_ns, void (*run)(mp_lease *lease, void *arg),
                              void *arg, mp_error *error) {
    mp_cpu_allocator *allocator = registry->services->allocator_pinned;
    mp_mutex_lock(&registry->lock);
    mp_status status = mp_registry_refuse_closed(registry, error);
    registry->inside += status == MP_OK;
    mp_mutex_unlock(&registry->lock);
    if (status != MP_OK)
        return status;
    mp_lease lease = {0};
    mp_core_lease cores;
    const int home = mp_cpu_allocator_assign_home(allocator);
    mp_cpu_allocator_enter(allocator);
    if (mp_cpu_allocator_lease(allocator, home, mp_cpu_allocator_threads(allocator), &lease, &cores, is_past,
                               &deadline_ns)) {
        run(&lease, arg);
        mp_cpu_allocator_return(allocator, &lease, &cores, false);
    } else {
        status = mp_fail_hint(error, MP_TIMEOUT, "Raise `timeout`", "no CPU was free in time");
    }
    mp_cpu_allocator_leave(allocator);
    mp_cpu_allocator_release_home(allocator, home);
    mp_registry_leave(registry, NULL);
    return status;
}

/* --- requests --- */

mp_status mp_registry_submit(mp_registry *registry, const char *key, mp_request *request,
                             const mp_submit_options *options, mp_ticket **ticket_out, mp_error *error) {
    mp_services *services = registry->services;
    mp_error unseen;
    mp_entry *entry;
    mp_ticket *ticket = NULL;
    mp_status status;
    bool gone, replaced = false;
    *ticket_out = NULL;
    if (!error)
        error = &unseen;
    mp_count(services, MP_METRIC_total_requests, 1);
    assert(options->service_class < MP_SERVICE_COUNT && options->policy < MP_POLICY_COUNT);
    do { /* again if the entry was replaced between lookup and queueing */
        gone = false;
        status = mp_registry_enter(registry, key, false, &entry, error);
        if (status == MP_UNKNOWN_MODEL && (ticket || options->revision)) { /* the key existed before */
            status = mp_fail(error, MP_SEND, "%s: the model was removed before the request was queued", key);
            replaced = options->revision;
        }
        if (status != MP_OK)
            break;
        if (options->revision && entry->revision != options->revision) {
            status = mp_fail(error, MP_SEND, "%s: the model was replaced before the request was queued", key);
            replaced = true;
        } else if (request->capability != entry->capability) {
            status = mp_fail(error, MP_WRONG_CAPABILITY, "%s is a model for %s, not for %s", key,
                             mp_capability_get(entry->capability)->name, mp_capability_get(request->capability)->name);
        } else if (ticket) {
            mp_ticket_move(ticket, entry);
        } else {
            status = mp_ticket_create(entry, request, options, &ticket, error);
            request = status == MP_OK ? request : NULL;
        }
        if (status == MP_OK)
            status = mp_entry_submit(entry, ticket, options, &gone, error);
        mp_registry_leave(registry, entry);
    } while (gone);
    if (status == MP_OK) {
        *ticket_out = ticket;
        return MP_OK;
    }
    if (replaced || (status == MP_OVERLOADED && options->uncounted)) {
        mp_count(services, MP_METRIC_total_requests, (uint64_t)-1);
    } else {
        mp_count_end(services, status);
        mp_events_post(MP_EVENT_REQUEST_FAIL, services->number, key, 0, ticket ? ticket->number : 0, status);
    }
    if (ticket)
        mp_ticket_discard(ticket);
    else
        mp_request_destroy(request);
    return status;
}
