/* test_registry_scene.c: an entry in states that a test chooses. See test_registry_scene.h. */
#include "test_registry_scene.h"

#include "base/sys.h"

static uint64_t no_sweep(void *arg, uint64_t now_ns) {
    (void)arg;
    (void)now_ns;
    return UINT64_MAX;
}

static void no_event(mp_registry *registry, mp_entry *entry, mp_entry_event event) {
    (void)registry;
    (void)entry;
    (void)event;
}

static mp_services *make_services(uint64_t memory) {
    mp_error error;
    mp_registry_config config = {.threads = 4, .memory_limit = memory, .spin_ns = 1};
    mp_services *services = mp_alloc_zeroed(sizeof(*services), MP_TAG_POOL);
    MP_CHECK(services);
    atomic_init(&services->references, 1);
    services->event = no_event;
    mp_services_configure(services, &config);
    mp_maintenance_init(&services->maintenance, no_sweep, NULL);
    atomic_store(&services->maintenance.next_ns, 0);
    MP_CHECK_OK(mp_cpu_allocator_open(config.threads, false, &services->allocator, &error), &error);
    services->allocator_pinned = mp_cpu_allocator_pin(services->allocator);
    MP_CHECK_OK(mp_governor_open(memory, &services->governor, &error), &error);
    return services;
}

void scene_open(scene *scene, const char *key, mp_services *services, uint64_t memory) {
    mp_error error;
    fake_hold_no_locks();
    memset(scene, 0, sizeof(*scene));
    fake_init(&scene->fake);
    scene->fake.workers = SCENE_WORKERS;
    scene->services = services ? mp_services_pin(services) : make_services(memory);
    mp_loader loader = fake_loader(&scene->fake);
    MP_CHECK_OK(mp_entry_create(scene->services, key, &loader, &scene->entry, &error), &error);
}

static void free_ticket(scene *scene, mp_ticket *ticket) {
    if (mp_ticket_done(ticket) && ticket->state == MP_TICKET_ENDED) {
        mp_ticket_release(ticket);
        return;
    }
    if (mp_queue_holds(&ticket->node))
        mp_queue_remove(&scene->entry->queue, &ticket->node);
    ticket->state = MP_TICKET_NEW;
    mp_entry_uncharge(scene->entry, ticket);
    mp_ticket_discard(ticket);
}

void scene_close(scene *scene) {
    mp_entry *entry = scene->entry;
    mp_services *services = scene->services;
    for (int i = 0; i < scene->ticket_count; i++)
        free_ticket(scene, scene->tickets[i]);
    entry->worker_count = entry->starting = entry->abandoned = 0;
    entry->unload = MP_UNLOAD_NONE;
    for (int i = 0; i < scene->worker_count; i++) {
        mp_worker *worker = scene->workers[i];
        worker->threads = 0;
        mp_worker_set_runnable(worker, false);
        if (worker->engine)
            worker->engine->ops->destroy(worker->engine);
        worker->engine = NULL;
        mp_resident_unpin(worker->resident);
        worker->resident = NULL;
        mp_worker_destroy(worker);
    }
    mp_entry_unpin(entry);
    if (atomic_load(&services->references) == 1)
        mp_cpu_allocator_close(services->allocator);
    mp_services_unpin(services);
    MP_CHECK_INT(scene->fake.models, 0);
    MP_CHECK_INT(scene->fake.engines, 0);
    MP_CHECK_INT(scene->fake.loaders, 0);
}

const mp_loader_ops *scene_hook_loader(scene *scene) {
    const mp_loader_ops *original = scene->entry->loader.ops;
    scene->loader_ops = *original;
    scene->entry->loader.ops = &scene->loader_ops;
    return original;
}

void scene_load(scene *scene) {
    mp_entry *entry = scene->entry;
    mp_error error;
    _Atomic int cancelled = 0;
    mp_lease lease = {.cancelled = &cancelled, .threads = 1};
    mp_progress progress = {0};
    mp_resident *resident = mp_alloc_zeroed(sizeof(*resident), MP_TAG_POOL);
    MP_CHECK(resident);
    MP_CHECK_OK(entry->loader.ops->load(entry->loader.self, &lease, &entry->account,
                                        &progress, &resident->model, &error), &error);
    resident->load = 1;
    atomic_init(&resident->references, 1);
    entry->resident = resident;
}

mp_worker *scene_worker(scene *scene, mp_worker_state state) {
    mp_entry *entry = scene->entry;
    mp_worker *worker;
    mp_error error;
    MP_CHECK(scene->worker_count < SCENE_WORKERS);
    MP_CHECK_OK(mp_worker_create(entry, &worker, &error), &error);
    scene->workers[scene->worker_count++] = worker;
    worker->id = (uint32_t)scene->worker_count;
    worker->number = entry->listed++;
    worker->state = state;
    entry->workers[entry->worker_count++] = worker;
    return worker;
}

mp_worker *scene_ready(scene *scene) {
    mp_error error;
    mp_worker *worker = scene_worker(scene, MP_WORKER_READY);
    if (!scene->entry->resident)
        scene_load(scene);
    worker->resident = mp_resident_pin(scene->entry->resident);
    mp_model *model = worker->resident->model;
    MP_CHECK_OK(model->ops->engine(model, &scene->entry->account, &worker->engine, &error), &error);
    return worker;
}

void scene_serve(scene *scene, mp_worker *worker) {
    scene->entry->removal = MP_REMOVAL_DRAINING;
    mp_worker_serve(worker);
    scene->entry->removal = MP_REMOVAL_NONE;
}

mp_ticket *scene_ticket(scene *scene, uint32_t units, mp_submit_options options) {
    mp_ticket *ticket;
    mp_error error;
    MP_CHECK(scene->ticket_count < SCENE_TICKETS);
    if (options.policy == MP_POLICY_DEFAULT)
        options.policy = MP_POLICY_SHARED;
    MP_CHECK_OK(mp_ticket_create(scene->entry, &fake_call_create(units)->base, &options, &ticket, &error), &error);
    scene->tickets[scene->ticket_count++] = ticket;
    return ticket;
}

void scene_queue(scene *scene, mp_ticket *ticket) {
    mp_ticket_set_state(ticket, MP_TICKET_QUEUED);
    ticket->item.sequence = ++scene->entry->accepted;
    MP_CHECK_INT(mp_queue_push(&scene->entry->queue, &ticket->node), MP_QUEUE_TAKEN);
}

void scene_activate(mp_worker *worker, mp_ticket *ticket, mp_ticket_state state) {
    ticket->state = state;
    ticket->worker = worker;
    worker->active[worker->active_count++] = ticket;
}
