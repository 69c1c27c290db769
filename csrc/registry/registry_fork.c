/* registry_fork.c: a registry's part of a fork. See fork.h. */
#include "registry/fork.h"
#include "registry/state.h"

mp_registry **mp_registry_fork_next(mp_registry *registry) { return &registry->fork_next; }

typedef void entry_hook(mp_entry *entry);

static void for_each_entry(mp_registry *registry, entry_hook *hook) {
    for (int i = 0; i < registry->slot_count; i++) {
        hook(registry->slots[i].current);
        if (registry->slots[i].incoming)
            hook(registry->slots[i].incoming);
    }
    for (int i = 0; i < registry->leaving_count; i++)
        hook(registry->leaving[i]);
}

static void lock_entry(mp_entry *entry) { mp_mutex_lock(&entry->lock); }

static void unlock_entry(mp_entry *entry) { mp_mutex_unlock(&entry->lock); }

void mp_registry_fork_before(mp_registry *registry) {
    mp_services *services = registry->services;
    mp_mutex_lock(&registry->lock);
    for_each_entry(registry, lock_entry);
    if (services->pool)
        mp_pool_fork_before(services->pool);
    mp_maintenance_fork_before(&services->maintenance);
}

void mp_registry_fork_before_shared(mp_registry *registry) {
    mp_governor_fork_before(registry->services->governor);
    mp_cpu_allocator_fork_before(registry->services->allocator_pinned);
}

void mp_registry_fork_parent(mp_registry *registry) {
    mp_services *services = registry->services;
    mp_cpu_allocator_fork_parent(services->allocator_pinned);
    mp_governor_fork_parent(services->governor);
    mp_maintenance_fork_parent(&services->maintenance);
    if (services->pool)
        mp_pool_fork_parent(services->pool);
    for_each_entry(registry, unlock_entry);
    mp_mutex_unlock(&registry->lock);
}

void mp_entry_fork_child(mp_entry *entry) {
    mp_budget *budget = mp_governor_budget(entry->services->governor);
    mp_mutex_init(&entry->lock);
    mp_cond_init(&entry->changed);
    mp_cond_init(&entry->room);
    for (mp_queue_node *node; (node = mp_queue_first(&entry->queue));) {
        mp_queue_remove(&entry->queue, node);
        mp_budget_give(budget, mp_ticket_of_node(node)->charged);
    }
    for (int i = 0; i < entry->worker_count; i++)
        for (int j = 0; j < entry->workers[i]->active_count; j++)
            mp_budget_give(budget, entry->workers[i]->active[j]->charged);
    /* The engines of the parent may have been inside a step. Do not touch their memory: the child creates new engines
     * over the same model, and can free the model although the old engines still exist. A running load belongs to the
     * parent. */
    if (entry->resident)
        atomic_store_explicit(&entry->resident->references, 1, memory_order_relaxed);
    entry->worker_count = entry->starting = entry->abandoned = entry->room_waiters = entry->borrowers = 0;
    atomic_store(&entry->account.reserved, 0);
    entry->yielding = 0;
    atomic_store(&entry->charged, 0);
    atomic_store(&entry->account.filling, 0);
    mp_mutex_lock(&entry->lock);
    if (entry->unload != MP_UNLOAD_NONE)
        mp_entry_set_unload(entry, MP_UNLOAD_NONE);
    mp_mutex_unlock(&entry->lock);
    entry->attempts_over = entry->attempts;
    mp_faults_fork_child(entry);
    entry->forecast = (mp_forecast){0};
}

/* Drops a staged replacement in a child, and lets the next operation load any other one. mp_registry_add reserved room
 * on the list of draining entries. A sweep after the child's first operation frees what drains: a fork handler may
 * not. */
static void fork_incoming(mp_registry *registry, slot *slot) {
    mp_entry *drained = slot->staged ? slot->incoming : slot->current;
    slot->current->held = false;
    if (slot->incoming && !slot->staged && !slot->incoming->resident) { /* the parent loads it */
        slot->resume = true;
        return;
    }
    if (!slot->incoming)
        return;
    if (!slot->staged) /* loaded, but its worker had not reported it yet */
        slot->current = slot->incoming;
    slot->incoming = NULL;
    slot->staged = false;
    mp_mutex_lock(&drained->lock);
    if (drained->removal == MP_REMOVAL_NONE)
        mp_entry_set_removal(drained, MP_REMOVAL_DRAINING);
    mp_mutex_unlock(&drained->lock);
    registry->leaving[registry->leaving_count++] = drained;
}

void mp_registry_fork_child(mp_registry *registry) {
    mp_services *services = registry->services;
    mp_cpu_allocator_fork_child(services->allocator_pinned);
    mp_governor_fork_child(services->governor);
    mp_maintenance_fork_child(&services->maintenance);
    if (services->pool)
        mp_pool_fork_child(services->pool);
    for_each_entry(registry, mp_entry_fork_child);
    for (int i = 0; i < registry->slot_count; i++)
        fork_incoming(registry, &registry->slots[i]);
    registry->drains = registry->leaving_count > 0;
    mp_mutex_init(&registry->lock);
    mp_cond_init(&registry->changed);
    registry->inside = 0;
    atomic_store(&services->active_workers, 0);
    /* The thread that was closing the registry exists in the parent only, and its progress is unknown. The child
     * starts closing again when asked to, and refuses requests until then. */
    if (registry->closing == CLOSING)
        registry->closing = OPEN;
}
