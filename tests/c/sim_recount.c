/* sim_recount.c: compares every counter that the registry keeps beside its lists with a new count, while all threads
 * wait. No thread is then between a change of a list and the change of its counter. See sim_state.h. */
#include "sim_state.h"

#ifdef MP_SIM

#include <stdatomic.h>

#include "registry/state.h"

typedef struct recount {
    int listed, abandoned, runnable, timed, loading;
} recount;

static void expect(int said, int counted, const char *what) {
    if (said != counted)
        sim_fail("%s: the registry says %d, a new count gives %d", what, said, counted);
}

static void add_ticket(recount *sum, const mp_ticket *ticket) {
    sum->timed += ticket->timed;
    expect(ticket->waiters, sim_waiters(&ticket->changed), "threads that wait for a request");
}

static void add_entry(recount *sum, const mp_entry *entry) {
    for (mp_queue_node *at = mp_queue_first(&entry->queue); at; at = mp_queue_next(&entry->queue, at))
        add_ticket(sum, mp_ticket_of_node(at));
    for (int i = 0; i < entry->worker_count; i++) {
        const mp_worker *worker = entry->workers[i];
        sum->runnable += worker->runnable;
        sum->loading += worker->state == MP_WORKER_SPAWNING || worker->state == MP_WORKER_LOADING;
        for (int j = 0; j < worker->active_count; j++)
            add_ticket(sum, worker->active[j]);
    }
    if (entry->room_waiters > sim_waiters(&entry->room)) /* submitters that wait for memory wait there too */
        expect(entry->room_waiters, sim_waiters(&entry->room), "submitters that wait for room");
    sum->listed += entry->worker_count;
    sum->abandoned += entry->abandoned;
    sum->loading += entry->starting + entry->abandoned;
}

void sim_recount(mp_registry *registry) {
    mp_services *services = registry->services;
    recount sum = {0};
    for (int i = 0; i < registry->slot_count; i++) {
        add_entry(&sum, registry->slots[i].current);
        if (registry->slots[i].incoming)
            add_entry(&sum, registry->slots[i].incoming);
    }
    for (int i = 0; i < registry->leaving_count; i++)
        add_entry(&sum, registry->leaving[i]);
    mp_cpu_counts cpu = mp_cpu_allocator_count_at_rest(services->allocator_pinned);
    expect(cpu.runnable, sum.runnable, "workers that share the CPUs");
    /* The entry of an abandoned worker may have left the registry. */
    if (!w.stalls || cpu.homes < sum.listed + sum.abandoned)
        expect(cpu.homes, sum.listed + sum.abandoned, "workers with a home");
    if (!w.stalls || atomic_load(&services->active_workers) < sum.listed + sum.abandoned)
        expect(atomic_load(&services->active_workers), sum.listed + sum.abandoned, "workers that load or serve");
    expect(cpu.waiting, cpu.queued, "threads that wait for CPUs");
    expect(cpu.spinning, 0, "threads that spin");
    expect(atomic_load(&services->maintenance.timed), sum.timed, "requests with a limit");
    int loads;
    uint64_t reserved = mp_governor_reserved(services->governor, &loads);
    if (!sum.loading && !w.stalls && (reserved || loads))
        sim_fail("%d guards hold %llu bytes, and no worker loads", loads, (unsigned long long)reserved);
}

#endif
