/* Backoffs after failed loads and dead workers, missing progress, and what a sweep checks next. */
#include "base/sys.h"
#include "test_registry_scene.h"

static void expect_backoff(uint64_t until_ns, uint64_t before_ns, uint64_t backoff_ns) {
    uint64_t after_ns = mp_sys_now_ns();
    MP_CHECK(until_ns >= before_ns + backoff_ns);
    MP_CHECK(until_ns <= after_ns + backoff_ns);
}

static const int doubling_ms[] = {100, 200, 400, 800, 1600, 3200, 6400, 10000, 10000, 10000};
enum { DOUBLINGS = sizeof doubling_ms / sizeof *doubling_ms };

MP_TEST(registry_backoff_of_failed_loads) {
    scene scene;
    mp_error error;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_entry *entry = scene.entry;
    mp_fail(&error, MP_IO, "the file is gone");
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < DOUBLINGS; i++) {
            uint64_t before = mp_sys_now_ns();
            mp_faults_load_failed(entry, &error);
            MP_CHECK_INT(entry->faults.backoff_ns, FAKE_MS(doubling_ms[i]));
            expect_backoff(entry->faults.retry_ns, before, FAKE_MS(doubling_ms[i]));
            MP_CHECK_INT(entry->faults.health, MP_HEALTH_FAILED);
            MP_CHECK_INT(entry->faults.failure.code, MP_IO);
        }
        mp_faults_forget_load(entry);
        MP_CHECK_INT(entry->faults.health, MP_HEALTH_SOUND);
        MP_CHECK_INT(entry->faults.retry_ns, 0);
        entry->faults.backoff_ns = 0; /* a load succeeded */
    }
    entry->faults.health = MP_HEALTH_BROKEN;
    mp_fail(&entry->faults.failure, MP_NO_WORKERS, "the workers died");
    mp_faults_load_failed(entry, &error);
    MP_CHECK_INT(entry->faults.health, MP_HEALTH_BROKEN);
    MP_CHECK_STR(entry->faults.failure.message, "the workers died"); /* the first cause */
    mp_faults_forget_load(entry);
    MP_CHECK_INT(entry->faults.health, MP_HEALTH_BROKEN);
    scene_close(&scene);
}

/* Five deaths within a minute break the model. */
MP_TEST(registry_backoff_of_deaths) {
    scene scene;
    mp_error error;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_entry *entry = scene.entry;
    mp_fail(&error, MP_INTERNAL, "a bad instruction");
    for (int i = 0; i < 4; i++) { /* four deaths, each more than a minute ago, count no more */
        uint64_t before = mp_sys_now_ns();
        mp_faults_note_death(entry, false, &error);
        expect_backoff(entry->faults.spawn_ns, before, FAKE_MS(100));
        entry->faults.death_ns[i] -= FAKE_MS(60000);
    }
    for (int i = 0; i < 5; i++) {
        uint64_t before = mp_sys_now_ns();
        MP_CHECK_INT(entry->faults.health, MP_HEALTH_SOUND);
        mp_faults_note_death(entry, false, &error);
        expect_backoff(entry->faults.spawn_ns, before, FAKE_MS(doubling_ms[i]));
    }
    MP_CHECK_INT(entry->faults.health, MP_HEALTH_BROKEN);
    MP_CHECK_INT(entry->faults.failure.code, MP_NO_WORKERS);
    MP_CHECK_STR(entry->faults.failure.message,
                 "a: 5 workers failed within 60 s; no more are started until the model is "
                 "loaded again. Last failure: a bad instruction");
    mp_fail(&error, MP_INTERNAL, "another");
    uint64_t before = mp_sys_now_ns();
    mp_faults_note_death(entry, false, &error); /* `death_ns` holds five */
    expect_backoff(entry->faults.spawn_ns, before, FAKE_MS(1600));
    MP_CHECK_HAS(entry->faults.failure.message, "a bad instruction");
    scene_close(&scene);
}

/* --- missing progress --- */

/* A check counts the time since the last check, but at most half of the limit. */
MP_TEST(registry_backoff_watch) {
    enum { LIMIT = 1000 };
    static const struct {
        uint64_t now, beat;
        bool silent;
        uint64_t silent_ns, total_ns;
    } rows[] = {
        {5100, 1, false, 0, 100},      {5300, 1, false, 200, 300},
        {5200, 1, false, 200, 300}, /* the clock went back */
        {5400, 1, false, 400, 500},    {6300, 1, false, 900, 1000},  {6399, 1, false, 999, 1099},
        {6400, 1, true, 1000, 1100},   {6500, 2, false, 0, 1200},    {9500, 2, false, 500, 1700},
        {99000, 2, true, 1000, 2200},  {99001, 3, false, 0, 2201},   {99501, 3, false, 500, 2701},
        {100002, 3, true, 1000, 3201}, {100003, 3, true, 1001, 3202},
    };
    mp_watch watch = {.beat = 9, .silent_ns = 9, .total_ns = 9};
    mp_watch_reset(&watch, 5000);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        MP_CHECK_INT(mp_watch_check(&watch, rows[i].beat, rows[i].now, LIMIT), rows[i].silent);
        MP_CHECK_INT(watch.silent_ns, rows[i].silent_ns);
        MP_CHECK_INT(watch.total_ns, rows[i].total_ns);
    }
}

MP_TEST(registry_backoff_watch_of_new_workers) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    uint64_t before = mp_sys_now_ns();
    mp_worker *worker = scene_worker(&scene, MP_WORKER_LOADING);
    MP_CHECK(worker->watch.checked_ns >= before && worker->watch.checked_ns <= mp_sys_now_ns());
    MP_CHECK(worker->watch.total_ns == 0 && worker->watch.silent_ns == 0);
    scene_close(&scene);
}

/* --- the sweep --- */

/* The worker that is idle for longest leaves first, a pinned model keeps one, and the others are checked when they are
 * due. */
MP_TEST(registry_backoff_sweep_of_idle_workers) {
    for (int pinned = 0; pinned < 2; pinned++) {
        scene scene;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_entry *entry = scene.entry;
        entry->keep_alive_ns = FAKE_MS(1000);
        entry->pinned = pinned;
        uint64_t now = mp_sys_now_ns();
        static const int idle_ms[] = {500, 3000, 999, 1000};
        for (int i = 0; i < 4; i++)
            scene_worker(&scene, MP_WORKER_IDLE)->idle_since_ns = now - FAKE_MS(idle_ms[i]);
        MP_CHECK_INT(mp_entry_sweep(entry, now) - now, FAKE_MS(1));
        for (int i = 0; i < 4; i++) {
            MP_CHECK_INT(scene.workers[i]->leave, idle_ms[i] >= 1000);
            MP_CHECK_INT(scene.workers[i]->woken, idle_ms[i] >= 1000);
        }
        uint64_t next = mp_entry_sweep(entry, now + FAKE_MS(400));
        MP_CHECK(scene.workers[2]->leave && !scene.workers[0]->leave);
        if (pinned) {
            MP_CHECK(next == UINT64_MAX);
            next = mp_entry_sweep(entry, now + FAKE_MS(4000));
            MP_CHECK(next == UINT64_MAX);
        } else {
            MP_CHECK_INT(next - now, FAKE_MS(500));
            next = mp_entry_sweep(entry, now + FAKE_MS(500));
            MP_CHECK(next == UINT64_MAX);
        }
        MP_CHECK_INT(scene.workers[0]->leave, !pinned);
        scene_close(&scene);
    }
}

/* A load that waits for other threads is not timed. A running load is checked four times per limit, and its progress
 * counts as progress of the requests that wait for it, but only for the first load that a request waits for. */
MP_TEST(registry_backoff_sweep_of_loads) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_entry *entry = scene.entry;
    mp_worker *worker = scene_worker(&scene, MP_WORKER_LOADING);
    entry->attempts = 7;
    mp_ticket *first = scene_ticket(&scene, 1, (mp_submit_options){0}),
              *second = scene_ticket(&scene, 1, (mp_submit_options){0});
    scene_queue(&scene, first);
    scene_queue(&scene, second);
    second->attempt = 6;
    uint64_t now = mp_sys_now_ns();
    atomic_store(&first->moved_ns, now - FAKE_MS(5000));
    atomic_store(&second->moved_ns, now - FAKE_MS(5000));
    atomic_store(&worker->progress.beat_ns, 0);
    worker->watch.checked_ns = 5;
    uint64_t limit = scene.services->load_timeout_ns;
    entry->keep_alive_ns = MP_FOREVER;
    MP_CHECK_INT(mp_entry_sweep(entry, now) - now, limit / 4);
    MP_CHECK_INT(worker->watch.checked_ns, now);
    MP_CHECK_INT(worker->watch.total_ns, 0);
    MP_CHECK_INT(first->attempt, 0);
    atomic_store(&worker->progress.beat_ns, now - FAKE_MS(2000));
    MP_CHECK_INT(mp_entry_sweep(entry, now) - now, limit / 4);
    MP_CHECK_INT(first->attempt, 7);
    MP_CHECK_INT(second->attempt, 6);
    MP_CHECK(first->moved_ns >= now - FAKE_MS(2000) && first->moved_ns <= mp_sys_now_ns() - FAKE_MS(2000));
    MP_CHECK_INT(second->moved_ns, now - FAKE_MS(5000));
    scene_close(&scene);
}

/* An entry without workers and requests: the sweep frees a model that waits for the end of a backoff, and everything of
 * a model that is being removed. */
MP_TEST(registry_backoff_sweep_of_entries_without_workers) {
    for (int loaded = 0; loaded < 2; loaded++)
        for (int dead = 0; dead < 2; dead++)
            for (int removed = 0; removed < 2; removed++) {
                scene scene;
                scene_open(&scene, "a", NULL, 1000 * 1000);
                mp_entry *entry = scene.entry;
                if (loaded)
                    scene_load(&scene);
                entry->faults.spawn_ns = dead ? fake_in_ms(60000) : 0;
                entry->removal = removed ? MP_REMOVAL_DRAINING : MP_REMOVAL_NONE;
                MP_CHECK(mp_entry_sweep(entry, mp_sys_now_ns()) == UINT64_MAX);
                bool frees = loaded && (dead || removed);
                MP_CHECK_INT(scene.fake.models, loaded && !frees);
                MP_CHECK_INT(entry->unloads, frees);
                MP_CHECK_INT(scene.services->metrics[MP_METRIC_evictions], frees);
                MP_CHECK_INT(scene.fake.loaders, !removed);
                MP_CHECK_INT(entry->removal, removed ? MP_REMOVAL_GONE : MP_REMOVAL_NONE);
                scene_close(&scene);
            }
}
