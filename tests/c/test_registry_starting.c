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
        mp_faults_load_failed(entry, &error);
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
        MP_CHECK_INT(entry->faults.health, MP_HEALTH_SOUND);
        MP_CHECK(entry->faults.backoff_ns == 0 && entry->faults.retry_ns == 0);
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
            entry->faults.health = broken ? MP_HEALTH_BROKEN : failed ? MP_HEALTH_FAILED : MP_HEALTH_SOUND;
            entry->faults.retry_ns = failed ? spawn_ns : 0;
            entry->faults.spawn_ns = spawn_ns;
            entry->faults.kill_backoff_ns = 7;
            entry->faults.deaths = 5;
            mp_fail(&entry->faults.failure, broken ? MP_NO_WORKERS : MP_IO, "the first cause");
            mp_fail(&entry->faults.load_failure, MP_IO, "a failed load");
            MP_CHECK_OK(mp_entry_load(entry, false, 0, &gone, &over, &error), &error);
            MP_CHECK(!gone && entry->load_requested && !entry->pinned);
            MP_CHECK_INT(entry->faults.health, failed ? MP_HEALTH_FAILED : MP_HEALTH_SOUND);
            if (failed) /* until the backoff ends, requests are refused with what delays the load */
                MP_CHECK_STR(entry->faults.failure.message, broken ? "a failed load" : "the first cause");
            MP_CHECK_INT(entry->faults.spawn_ns, broken ? 0 : spawn_ns);
            MP_CHECK_INT(entry->faults.kill_backoff_ns, broken ? 0 : 7);
            MP_CHECK_INT(entry->faults.deaths, broken ? 0 : 5);
            scene_close(&scene);
        }
}

static mp_worker *unloaded;
static const mp_loader_ops *loader_ops;

static mp_status load_while_unloaded(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                                     mp_model **model, mp_error *error) {
    mp_entry *entry = unloaded->entry;
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
    unloaded = scene_worker(&scene, MP_WORKER_SPAWNING);
    MP_CHECK(mp_worker_start(unloaded));
    MP_CHECK_INT(scene.entry->starting, 0);
    MP_CHECK_INT(scene.entry->worker_count, 1);
    MP_CHECK(mp_governor_try_reserve(scene.services->governor, 1000 * 1000 - 1100, &rest)); /* its memory is free */
    mp_guard_release(&rest);
    scene_close(&scene);
}
