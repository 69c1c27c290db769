/* The start and the end of a worker (loading.c, leaving.c) and explicit loads (entry.c), on the test's thread. */
#include "base/sys.h"
#include "registry/events.h"
#include "test_registry_scene.h"

/* A worker that loads the model: everything that the entry and the worker record afterwards. The load uses all compute
 * threads, or half of them if other workers run. */
MP_TEST(registry_starting_worker_loads_the_model) {
    for (int others = 0; others < 2; others++) {
        scene scene;
        mp_error error;
        mp_guard rest;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_entry *entry = scene.entry;
        scene.services->max_workers = 1;
        atomic_store(&scene.services->active_workers, 1 + others);
        mp_fail(&error, MP_IO, "the file is gone");
        mp_entry_set_failed(entry, &error);
        entry->load_requested = true;
        entry->attempts = entry->attempts_over = 3;
        entry->loads = 1;
        mp_worker *worker = scene_worker(&scene, MP_WORKER_SPAWNING);
        MP_CHECK(mp_worker_start(worker));
        MP_CHECK_INT(scene.fake.load_threads, others ? 2 : 4);
        MP_CHECK_INT(worker->state, MP_WORKER_READY);
        MP_CHECK(worker->woken && !worker->moving && !worker->runnable);
        MP_CHECK_INT(worker->held_bytes, 100);
        MP_CHECK_INT(worker->engine_bytes, 100);
        MP_CHECK_INT(worker->threads, 0);
        MP_CHECK(worker->resident == entry->resident);
        MP_CHECK_INT(entry->resident->predicted_bytes, 1000);
        MP_CHECK_INT(entry->resident->references, 2);
        MP_CHECK(entry->resident->load > 0);
        MP_CHECK(entry->attempts == 4 && entry->attempts_over == 4 && entry->loads == 2);
        MP_CHECK(entry->health == MP_HEALTH_SOUND && entry->backoff_ns == 0 && entry->retry_ns == 0);
        MP_CHECK_INT(entry->starting, 0);
        MP_CHECK_INT(scene.services->metrics[MP_METRIC_loads], 1);
        MP_CHECK_INT(scene.services->metrics[MP_METRIC_workers_spawned], 1);
        MP_CHECK_INT(mp_cpu_allocator_leased(scene.services->allocator_pinned), 0);
        /* the load's reservation is released */
        MP_CHECK(mp_governor_try_reserve(scene.services->governor, 1000 * 1000 - 1100, &rest));
        mp_guard_release(&rest);
        atomic_store(&scene.services->active_workers, 0);
        scene_close(&scene);
    }
}

typedef struct waiter {
    mp_governor *governor;
    _Atomic bool over;
} waiter;

static bool is_over(void *arg) { return atomic_load(&((waiter *)arg)->over); }

static void wait_for_memory(void *arg) {
    waiter *self = arg;
    mp_guard guard;
    mp_error error;
    MP_CHECK_STATUS(mp_governor_reserve(self->governor, "b", 9000, 9000, false, is_over, self, &guard, &error),
                    MP_CANCELLED, &error);
}

/* The first worker of a model that stayed loaded does not wait for its turn behind a load that waits for memory: that
 * load may wait until this model is idle. */
MP_TEST(registry_starting_worker_of_a_loaded_model_waits_for_no_turn) {
    scene scene;
    mp_error error;
    mp_thread thread;
    mp_guard guard, probe;
    scene_open(&scene, "a", NULL, 10000);
    mp_governor *governor = scene.services->governor;
    scene_load(&scene); /* 1000 bytes */
    MP_CHECK(mp_governor_try_reserve(governor, 1, &guard)); /* a load that runs: the other one waits for its end */
    waiter waits = {.governor = governor};
    MP_CHECK_OK(mp_thread_start(&thread, "waits", wait_for_memory, &waits, &error), &error);
    while (mp_governor_try_reserve(governor, 0, &probe)) { /* until the thread waits */
        mp_guard_release(&probe);
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    }
    mp_worker *worker = scene_worker(&scene, MP_WORKER_SPAWNING);
    MP_CHECK(mp_worker_start(worker)); /* no request and no caller wants it: it would give up where it waits */
    MP_CHECK(worker->engine && worker->state == MP_WORKER_READY);
    MP_CHECK_INT(scene.fake.loads, 1);
    atomic_store(&waits.over, true);
    mp_thread_join(&thread);
    mp_guard_release(&guard);
    scene_close(&scene);
}

/* An explicit load of a broken model clears its failure, also while workers of the model still serve. Without a broken
 * model, it leaves the backoff of worker deaths to end by itself while workers serve. */
MP_TEST(registry_starting_load_forgets_what_broke_the_model) {
    for (int broken = 0; broken < 2; broken++)
        for (int failed = 0; failed < 2; failed++) {
            scene scene;
            mp_error error;
            bool gone, over;
            scene_open(&scene, "a", NULL, 1000 * 1000);
            mp_entry *entry = scene.entry;
            scene_ready(&scene);
            uint64_t spawn_ns = fake_in_ms(60000);
            entry->health = broken ? MP_HEALTH_BROKEN : failed ? MP_HEALTH_FAILED : MP_HEALTH_SOUND;
            entry->retry_ns = failed ? spawn_ns : 0;
            entry->spawn_ns = spawn_ns;
            entry->kill_backoff_ns = 7;
            entry->deaths = 5;
            mp_fail(&entry->failure, broken ? MP_NO_WORKERS : MP_IO, "the first cause");
            mp_fail(&entry->load_failure, MP_IO, "a failed load");
            MP_CHECK_OK(mp_entry_load(entry, false, 0, &gone, &over, &error), &error);
            MP_CHECK(!gone && entry->load_requested && !entry->pinned);
            MP_CHECK_INT(entry->health, failed ? MP_HEALTH_FAILED : MP_HEALTH_SOUND);
            if (failed) /* until the backoff ends, requests are refused with what delays the load */
                MP_CHECK_STR(entry->failure.message, broken ? "a failed load" : "the first cause");
            MP_CHECK_INT(entry->spawn_ns, broken ? 0 : spawn_ns);
            MP_CHECK_INT(entry->kill_backoff_ns, broken ? 0 : 7);
            MP_CHECK_INT(entry->deaths, broken ? 0 : 5);
            scene_close(&scene);
        }
}

/* When the thread of an abandoned worker returns, its memory is free, so other workers admit requests again. */
MP_TEST(registry_starting_abandoned_worker_frees_its_memory) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_entry *entry = scene.entry;
    mp_worker *gone = scene_ready(&scene), *other = scene_ready(&scene);
    other->memory = MP_MEMORY_TIGHT;
    mp_entry_unlist_worker(entry, gone);
    gone->state = MP_WORKER_DEAD;
    entry->abandoned = 1;
    scene.workers[0] = scene.workers[--scene.worker_count];
    mp_worker_leave(gone);
    MP_CHECK(other->memory != MP_MEMORY_TIGHT);
    MP_CHECK_INT(entry->abandoned, 0);
    MP_CHECK_INT(entry->worker_count, 1);
    MP_CHECK_INT(scene.fake.engines, 1);
    MP_CHECK_INT(mp_governor_budget(scene.services->governor)->used, 1100);
    scene_close(&scene);
}

/* When the last worker has left, a sweep is announced for the end of the backoff if requests wait for it, and only
 * then. */
MP_TEST(registry_starting_announces_the_end_of_a_backoff) {
    for (int queued = 0; queued < 2; queued++)
        for (int works = 0; works < 2; works++) {
            scene scene;
            scene_open(&scene, "a", NULL, 1000 * 1000);
            mp_maintenance *maintenance = &scene.services->maintenance;
            maintenance->running = true; /* announcing a sweep starts no thread */
            atomic_store(&maintenance->next_ns, UINT64_MAX);
            mp_entry *entry = scene.entry;
            entry->spawn_ns = fake_in_ms(50000);
            if (queued)
                scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){0}));
            if (works)
                scene_worker(&scene, MP_WORKER_LOADING);
            mp_entry_finalize(entry, NULL);
            MP_CHECK(maintenance->next_ns == (queued && !works ? entry->spawn_ns : UINT64_MAX));
            MP_CHECK_INT(entry->starting, 0);
            maintenance->running = false;
            scene_close(&scene);
        }
}

static void wait_gone(void *entry) {
    mp_error error;
    MP_CHECK_OK(mp_entry_wait_gone(entry, 0, &error), &error);
}

/* A removal that waits for the last request, while no worker may start, ends when a shutdown ends this request. */
MP_TEST(registry_starting_removal_ends_with_the_queue) {
    scene scene;
    mp_error error;
    mp_thread thread;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.entry->spawn_ns = fake_in_ms(100000);
    scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){0}));
    mp_entry_remove(scene.entry);
    fake_count_waits(&scene.entry->changed);
    MP_CHECK_OK(mp_thread_start(&thread, "remove", wait_gone, scene.entry, &error), &error);
    fake_until_waits(1);
    mp_entry_close(scene.entry);
    fake_until_waits(2); /* the close wakes the thread, which waits again */
    mp_entry_quit(scene.entry);
    mp_thread_join(&thread);
    MP_CHECK_INT(mp_ticket_status(scene.tickets[0], NULL), MP_SHUTTING_DOWN);
    scene_close(&scene);
}

static mp_worker *abandoned;
static const mp_loader_ops *loader_ops;
static int reported;

static mp_status load_while_abandoned(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                                      mp_model **model, mp_error *error) {
    mp_entry *entry = abandoned->entry;
    mp_mutex_lock(&entry->lock);
    abandoned->state = MP_WORKER_DEAD;
    mp_entry_unlist_worker(entry, abandoned);
    mp_mutex_unlock(&entry->lock);
    return loader_ops->load(self, lease, budget, progress, model, error);
}

static void count_report(mp_registry *registry, mp_entry *entry, mp_entry_event event) {
    (void)registry, (void)entry, (void)event;
    reported++;
}

/* A worker that was abandoned while it loaded reports nothing and does not serve, although its load succeeds later. */
MP_TEST(registry_starting_load_that_was_abandoned) {
    scene scene;
    mp_event event;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    loader_ops = scene_hook_loader(&scene);
    scene.loader_ops.load = load_while_abandoned;
    scene.services->event = count_report;
    reported = 0;
    abandoned = scene_worker(&scene, MP_WORKER_SPAWNING);
    mp_events_want(1u << MP_EVENT_READY | 1u << MP_EVENT_FAIL);
    MP_CHECK(!mp_worker_start(abandoned));
    MP_CHECK(!mp_events_take(&event));
    MP_CHECK_INT(reported, 0);
    MP_CHECK(!scene.entry->resident);
    MP_CHECK_INT(scene.entry->loads, 0);
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_loads], 0);
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_load_failures], 0);
    MP_CHECK_INT(abandoned->state, MP_WORKER_DEAD);
    mp_events_want(0);
    scene_close(&scene);
}

static mp_status load_while_unloaded(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                                     mp_model **model, mp_error *error) {
    mp_entry *entry = abandoned->entry;
    mp_mutex_lock(&entry->lock);
    mp_entry_set_unload(entry, MP_UNLOAD_REQUESTED);
    mp_mutex_unlock(&entry->lock);
    return loader_ops->load(self, lease, budget, progress, model, error);
}

/* The worker that loads a model reserves memory for a second one, which does not start if the model is unloaded during
 * the load. */
MP_TEST(registry_starting_no_second_worker_of_an_unloaded_model) {
    scene scene;
    mp_guard rest;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.workers = 2;
    loader_ops = scene_hook_loader(&scene);
    scene.loader_ops.load = load_while_unloaded;
    abandoned = scene_worker(&scene, MP_WORKER_SPAWNING);
    MP_CHECK(mp_worker_start(abandoned));
    MP_CHECK_INT(scene.entry->starting, 0);
    MP_CHECK_INT(scene.entry->worker_count, 1);
    MP_CHECK(mp_governor_try_reserve(scene.services->governor, 1000 * 1000 - 1100, &rest)); /* its memory is free */
    mp_guard_release(&rest);
    scene_close(&scene);
}

/* Only the end of a load of the model is reported as such: the failure of a further engine is not, even if no other
 * worker serves. */
MP_TEST(registry_starting_failures_that_are_reported) {
    for (int loaded = 0; loaded < 2; loaded++) {
        scene scene;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        if (loaded)
            scene_load(&scene);
        scene.services->event = count_report;
        reported = 0;
        scene.fake.engine_failures = 1;
        mp_worker *worker = scene_worker(&scene, MP_WORKER_SPAWNING);
        MP_CHECK(!mp_worker_start(worker));
        MP_CHECK_INT(worker->state, MP_WORKER_FAILED);
        MP_CHECK_INT(reported, !loaded);
        MP_CHECK_INT(scene.entry->health, MP_HEALTH_FAILED);
        scene_close(&scene);
    }
}
