/* mp_entry_audit: a state in which one invariant is broken fails with the message of that invariant, and the state
 * without the fault passes. */
#include "mp_test.h"
#include "registry/audit.h"
#include "registry/state.h"
#include "test_registry_scene.h"

enum { WRONG_QUEUE_COUNT = 33, FAULTS = 46 }; /* numbers of faults */

static bool held;
static bool is_held(const mp_mutex *mutex) {
    (void)mutex;
    return held;
}

/* Checks that the scene has no fault yet. Worker 1 has one compute thread, or none while it waits for masks. */
static void expect_sound(scene *scene) {
    mp_error error;
    int threads = 10;
    MP_CHECK_OK(mp_entry_audit(scene->entry, &threads, is_held, &error), &error);
    MP_CHECK_INT(threads, 10 + scene->workers[0]->threads);
}

static void queue_one(scene *scene, mp_ticket *ticket) {
    scene_queue(scene, ticket);
    scene->workers[1]->woken = true; /* it is about to take the request */
    expect_sound(scene);
}

/* Worker 1 has ended its step and waits for masks of its two requests. */
static void wait_for_masks(scene *scene) {
    mp_worker *worker = scene->workers[0];
    worker->in_step = false;
    worker->threads = worker->step_live = 0;
    worker->active[0]->state = worker->active[1]->state = MP_TICKET_ADMITTED;
    worker->awaits_masks = true;
    expect_sound(scene);
}

/* Breaks invariant number `fault`. Returns the expected message, or NULL behind the last. Worker 1 is in a step with
 * two requests, worker 2 is idle, and `queued` is a request that is not queued yet. */
static const char *break_one(scene *scene, int fault) {
    mp_entry *entry = scene->entry;
    mp_worker *busy = scene->workers[0], *idle = scene->workers[1];
    mp_ticket *ticket = busy->active[1], *queued = scene->tickets[2];
    switch (fault) {
    case 0:
        idle->entry = NULL;
        return "a: worker 2 belongs to another entry";
    case 1:
        idle->state = MP_WORKER_DEAD;
        return "a: worker 2 is dead, but listed";
    case 2:
        idle->active_count = -1;
        return "a: worker 2 has -1 active";
    case 3:
        idle->active_count = MP_ACTIVE_MAX + 1;
        return "a: worker 2 has 257 active";
    case 4:
        busy->state = MP_WORKER_IDLE;
        return "a: worker 1 is idle and has 2 active";
    case 5:
        idle->state = MP_WORKER_LOADING;
        idle->in_step = true;
        return "a: worker 2 is loading in a step";
    case 6:
        idle->threads = 3;
        return "a: worker 2 is idle and has 3 compute threads";
    case 7:
        busy->threads = -1;
        return "a: worker 1 is processing and has -1 compute threads";
    case 8:
        busy->awaits_masks = true;
        return "a: worker 1 waits for masks with 2 active, 1 compute threads, in a step";
    case 9:
        idle->awaits_masks = true;
        return "a: worker 2 waits for masks with 0 active, 0 compute threads, in no step";
    case 10:
        wait_for_masks(scene);
        busy->threads = 1;
        return "a: worker 1 waits for masks with 2 active, 1 compute threads, in no step";
    case 11:
        wait_for_masks(scene);
        atomic_store(&ticket->cause, MP_CANCELLED);
        return "a: worker 1 waits for masks and was not woken for a cancelled request";
    case 12:
        ticket->worker = idle;
        return "a: an active request of worker 1 names another worker";
    case 13:
        MP_CHECK_INT(mp_queue_push(&entry->queue, &ticket->node), MP_QUEUE_TAKEN);
        return "a: a request is active and queued";
    case 14:
        atomic_store(&ticket->progress, UINT64_MAX);
        return "a: a request is active and done";
    case 15:
        atomic_store(&ticket->references, 0);
        return "a: an active request has no reference";
    case 16:
        ticket->state = MP_TICKET_QUEUED;
        return "a: an active request of worker 1 is queued";
    case 17:
        busy->in_step = false;
        return "a: an active request of worker 1 is stepping";
    case 18:
        busy->step_live = 5;
        return "a: worker 1 has 2 live requests in its step and counts 5";
    case 19:
        entry->faults.retry_ns = 1;
        return "a: no load failed, but requests are refused";
    case 20:
        entry->faults.health = MP_HEALTH_FAILED;
        return "a: a load failed, but no backoff is set";
    case 21:
        entry->faults.health = MP_HEALTH_BROKEN;
        return "a: a failure has no cause";
    case 22:
        entry->unload = MP_UNLOAD_RUNNING;
        entry->starting = 1;
        return "a: the model is being freed while 3 workers exist";
    case 23:
        queue_one(scene, queued);
        entry->removal = MP_REMOVAL_GONE;
        return "a: the entry is gone, but holds a model or 1 requests";
    case 24:
        queue_one(scene, queued);
        entry->shutdown = MP_SHUTDOWN_QUITTING;
        return "a: 1 requests wait for a worker after shutdown";
    case 25:
        queue_one(scene, queued);
        queued->state = MP_TICKET_TAKEN;
        return "a: a request in the queue is taken";
    case 26:
        queue_one(scene, queued);
        queued->worker = idle;
        return "a: a request is queued and active";
    case 27:
        queue_one(scene, queued);
        atomic_store(&queued->progress, UINT64_MAX);
        return "a: a request is queued and done";
    case 28:
        queue_one(scene, queued);
        atomic_store(&queued->cause, MP_TIMEOUT);
        return "a: a request is queued and cancelled";
    case 29:
        queue_one(scene, queued);
        queued->entry = NULL;
        return "a: a request is in the wrong queue";
    case 30:
        queue_one(scene, queued);
        mp_dispatch_assign(queued, idle);
        expect_sound(scene);
        queued->assigned = (mp_worker *)scene;
        return "a: a request is queued for a worker that is gone";
    case 31:
        queue_one(scene, queued);
        idle->woken = false;
        return "a: a request is queued although worker 2 is idle";
    case 32:
        queue_one(scene, queued);
        wait_for_masks(scene);
        idle->woken = false;
        idle->leave = true; /* it takes no request */
        return "a: a request is queued although worker 1 may take it and only waits for masks";
    case WRONG_QUEUE_COUNT:
        queue_one(scene, queued);
        entry->queue.count = 4;
        return "a: 1 requests are queued and the queue counts 4";
    case 34:
        queue_one(scene, queued);
        entry->queue.counts[1] = 3;
        return "a: 0 requests of kind 1 are queued and the queue counts 3";
    case 35:
        queue_one(scene, queued);
        entry->worker_count = 0;
        return "a: 1 requests are queued and no worker will take them";
    case 36:
        entry->worker_count = -1;
        return "a: -1 workers";
    case 37:
        entry->worker_count = MP_WORKERS_MAX + 1;
        return "a: 17 workers";
    case 38:
        entry->starting = -1;
        return "a: a count is negative";
    case 39:
        entry->abandoned = -1;
        return "a: a count is negative";
    case 40:
        entry->room_waiters = -1;
        return "a: a count is negative";
    case 41:
        entry->starting = 3;
        return "a: 5 workers, the limit is 4";
    case 42:
        entry->faults.breaker.probing = -1;
        return "a: -1 probes of the breaker";
    case 43:
        entry->faults.breaker.probing = 4;
        return "a: 4 probes of the breaker";
    case 44:
        busy->state = MP_WORKER_LOADING;
        busy->active_count = 0;
        busy->in_step = false;
        mp_resident_unpin(entry->resident);
        entry->resident = NULL;
        return "a: worker 2 serves without a model";
    case 45:
        idle->assigned_cost = 1;
        return "a: the workers count another cost of assigned requests than the queue has";
    default:
        return NULL;
    }
}

MP_TEST(registry_audit_finds_each_fault) {
    for (int fault = 0;; fault++) {
        scene scene;
        mp_error error;
        int threads = 0;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_worker *busy = scene_worker(&scene, MP_WORKER_PROCESSING);
        mp_worker *idle = scene_worker(&scene, MP_WORKER_IDLE);
        scene_load(&scene);
        for (int i = 0; i < 2; i++)
            scene_activate(busy, scene_ticket(&scene, 1, (mp_submit_options){0}), MP_TICKET_STEPPING);
        scene_ticket(&scene, 1, (mp_submit_options){0});
        busy->in_step = true;
        busy->step_live = 2;
        busy->threads = 1;
        expect_sound(&scene);
        const char *message = break_one(&scene, fault);
        if (message) {
            mp_status status = mp_entry_audit(scene.entry, &threads, is_held, &error);
            if (status != MP_INTERNAL || strcmp(error.message, message) != 0)
                MP_FAIL("fault %d: %s, not: %s", fault, status == MP_OK ? "not found" : error.message, message);
            held = true; /* a locked entry may be in the middle of a change */
            MP_CHECK_OK(mp_entry_audit(scene.entry, &threads, is_held, &error), &error);
            held = false;
        } else {
            MP_CHECK_INT(fault, FAULTS);
        }
        /* make the scene one that scene_close can free */
        busy->entry = idle->entry = scene.entry;
        for (int i = 0; i < 3; i++) {
            scene.tickets[i]->entry = scene.entry;
            atomic_store(&scene.tickets[i]->progress, 0);
            scene.tickets[i]->assigned = NULL;
        }
        scene.entry->room_waiters = 0;
        if (fault == WRONG_QUEUE_COUNT)
            scene.entry->queue.count = 1;
        scene_close(&scene);
        if (!message)
            return;
    }
}

/* The audit of a registry visits the current entry and the replacement of every key, and every entry that drains. It
 * also compares the compute threads of all workers with those of the CPU allocator. */
MP_TEST(registry_audit_visits_every_entry) {
    enum { ENTRIES = 5 };
    static const char *const keys[] = {"a", "b", "c", "d", "e"};
    static scene scenes[ENTRIES];
    mp_entry *entries[ENTRIES];
    mp_error error;
    for (int i = 0; i < ENTRIES; i++) {
        scene_open(&scenes[i], keys[i], i ? scenes[0].services : NULL, 1000 * 1000);
        entries[i] = scenes[i].entry;
    }
    slot slots[] = {{.current = entries[0]}, {.current = entries[1], .incoming = entries[2]}};
    mp_registry registry = {
        .services = scenes[0].services, .slots = slots, .slot_count = 2, .leaving = &entries[3], .leaving_count = 2};
    MP_CHECK_OK(mp_registry_audit(&registry, is_held, &error), &error);
    for (int i = 0; i < ENTRIES; i++) {
        entries[i]->starting = -1;
        MP_CHECK_STATUS(mp_registry_audit(&registry, is_held, &error), MP_INTERNAL, &error);
        MP_CHECK(error.message[0] == keys[i][0]);
        entries[i]->starting = 0;
    }
    scene_load(&scenes[3]);
    mp_worker *worker = scene_worker(&scenes[3], MP_WORKER_PROCESSING);
    scene_activate(worker, scene_ticket(&scenes[3], 1, (mp_submit_options){0}), MP_TICKET_STEPPING);
    worker->in_step = true;
    worker->step_live = worker->threads = 1;
    MP_CHECK_STATUS(mp_registry_audit(&registry, is_held, &error), MP_INTERNAL, &error);
    MP_CHECK_STR(error.message, "workers hold 1 compute threads, the CPU allocator counts 0 of 4");
    mp_lease lease;
    mp_core_lease at;
    MP_CHECK(mp_cpu_allocator_lend(scenes[0].services->allocator, 0, 1, &lease, &at, NULL, NULL));
    MP_CHECK_OK(mp_registry_audit(&registry, is_held, &error), &error);
    mp_cpu_allocator_return(scenes[0].services->allocator, &lease, &at, false);
    held = true; /* a locked registry may be in the middle of a change */
    MP_CHECK_OK(mp_registry_audit(&registry, is_held, &error), &error);
    held = false;
    for (int i = ENTRIES - 1; i >= 0; i--)
        scene_close(&scenes[i]);
}
