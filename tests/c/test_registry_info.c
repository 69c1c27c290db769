/* Every field of mp_entry_info and mp_eviction has exactly the value that the entry and its workers have. */
#include "base/sys.h"
#include "test_registry_scene.h"

static void describe(scene *scene, mp_entry_info *info) {
    mp_entry_describe(scene->entry, info);
    if (info->model)
        mp_entry_return(scene->entry);
}

/* --- the state of an entry --- */

enum { NONE = -1 };

MP_TEST(registry_info_state_of_an_entry) {
    static const struct {
        const char *expected;
        int first, second; /* states of workers, or NONE */
        int active;        /* active requests of the first worker */
        mp_entry_unload unload;
        mp_entry_health health;
        int starting;
    } rows[] = {
        {"cold", NONE, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"failed", NONE, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_FAILED, 0},
        {"failed", NONE, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_BROKEN, 0},
        {"evicting", NONE, NONE, 0, MP_UNLOAD_RUNNING, MP_HEALTH_SOUND, 0},
        {"evicting", NONE, NONE, 0, MP_UNLOAD_RUNNING, MP_HEALTH_FAILED, 0},
        {"loading", NONE, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 1},
        {"loading", NONE, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_FAILED, 1},
        {"loading", MP_WORKER_SPAWNING, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"loading", MP_WORKER_LOADING, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"loading", MP_WORKER_LOADING, MP_WORKER_EVICTING, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"loading", MP_WORKER_FAILED, MP_WORKER_SPAWNING, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"ready", MP_WORKER_READY, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"ready", MP_WORKER_IDLE, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_BROKEN, 0},
        {"ready", MP_WORKER_PROCESSING, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"ready", MP_WORKER_LOADING, MP_WORKER_READY, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 1},
        {"ready", MP_WORKER_EVICTING, MP_WORKER_IDLE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"busy", MP_WORKER_PROCESSING, NONE, 1, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"busy", MP_WORKER_PROCESSING, MP_WORKER_IDLE, 2, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"evicting", MP_WORKER_PROCESSING, NONE, 1, MP_UNLOAD_REQUESTED, MP_HEALTH_SOUND, 0},
        {"evicting", MP_WORKER_IDLE, NONE, 0, MP_UNLOAD_REQUESTED, MP_HEALTH_SOUND, 0},
        {"evicting", MP_WORKER_IDLE, NONE, 0, MP_UNLOAD_CALLED, MP_HEALTH_SOUND, 0},
        {"evicting", MP_WORKER_EVICTING, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0},
        {"failed", MP_WORKER_FAILED, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_FAILED, 0},
        {"cold", MP_WORKER_FAILED, NONE, 0, MP_UNLOAD_NONE, MP_HEALTH_SOUND, 0}, /* its load was called off */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        scene scene;
        mp_entry_info info;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        for (int j = 0; j < 2; j++)
            if ((j ? rows[i].second : rows[i].first) != NONE)
                scene_worker(&scene, (mp_worker_state)(j ? rows[i].second : rows[i].first));
        for (int j = 0; j < rows[i].active; j++)
            scene_activate(scene.workers[0], scene_ticket(&scene, 1, (mp_submit_options){0}), MP_TICKET_ADMITTED);
        scene.entry->unload = rows[i].unload;
        scene.entry->faults.health = rows[i].health;
        scene.entry->starting = rows[i].starting;
        describe(&scene, &info);
        if (strcmp(info.state, rows[i].expected) != 0)
            MP_FAIL("row %zu: the state is %s, not %s", i, info.state, rows[i].expected);
        scene_close(&scene);
    }
}

/* --- all fields --- */

/* Returns a different number for each field, so that a field that is copied from another one is noticed. */
static uint64_t odd(int field) { return 1000003u * (uint64_t)field + 17; }

MP_TEST(registry_info_has_every_field) {
    scene scene;
    mp_entry_info info;
    scene_open(&scene, "key of the model", NULL, 1000 * 1000);
    mp_entry *entry = scene.entry;
    describe(&scene, &info);
    MP_CHECK(!info.model && info.model_bytes == 0 && info.predicted_bytes == 0 && info.idle_ns == 0);
    scene_load(&scene);
    mp_worker *busy = scene_worker(&scene, MP_WORKER_PROCESSING), *idle = scene_worker(&scene, MP_WORKER_IDLE),
              *loading = scene_worker(&scene, MP_WORKER_LOADING), *leaving = scene_worker(&scene, MP_WORKER_EVICTING);
    mp_worker *workers[] = {busy, idle, loading, leaving};
    uint64_t now = mp_sys_now_ns();
    for (int i = 0; i < 4; i++) {
        workers[i]->served = odd(10 + i);
        workers[i]->step_ns = odd(20 + i);
        workers[i]->held_bytes = odd(30 + i);
        workers[i]->engine_bytes = odd(40 + i);
        workers[i]->process = 100 + i;
        workers[i]->idle_since_ns = now - FAKE_MS(1000) * (uint64_t)(i + 1);
    }
    for (int i = 0; i < 3; i++)
        scene_activate(busy, scene_ticket(&scene, 1, (mp_submit_options){0}), MP_TICKET_ADMITTED);
    for (int i = 0; i < 5; i++)
        scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){.service_class = i < 3}));
    entry->faults.breaker.state = MP_BREAKER_HALF_OPEN;
    entry->abandoned = 2;
    entry->pinned = true;
    entry->accepted = odd(1);
    entry->keep_alive_ns = odd(2);
    entry->latency.count = odd(3);
    entry->units_in = odd(4);
    entry->units_out = odd(5);
    entry->last_error = MP_NUMERIC;
    atomic_store(&entry->errors, odd(6));
    entry->resident->predicted_bytes = odd(7);
    describe(&scene, &info);
    MP_CHECK_STR(info.key, "key of the model");
    MP_CHECK_INT(info.capability, MP_TEXT_EMBEDDING);
    MP_CHECK_INT(info.policy, entry->policy);
    MP_CHECK_STR(info.state, "busy");
    MP_CHECK_STR(info.breaker, "half-open");
    MP_CHECK_INT(info.workers, 3); /* the worker that leaves still has an engine */
    MP_CHECK_INT(info.busy, 1);
    MP_CHECK_INT(info.dead, 2);
    MP_CHECK_INT(info.queued, 5);
    MP_CHECK_INT(info.running, 3);
    MP_CHECK_INT(info.waiting[MP_SERVICE_INTERACTIVE], 2);
    MP_CHECK_INT(info.waiting[MP_SERVICE_BULK], 3);
    for (int i = 0; i < MP_SERVICE_COUNT; i++)
        MP_CHECK_INT(info.capacity[i], scene.services->queue_capacity[MP_TEXT_EMBEDDING][i]);
    MP_CHECK(info.capacity[0] != info.capacity[1]);
    MP_CHECK(info.pinned);
    MP_CHECK_INT(info.accepted, odd(1));
    MP_CHECK_INT(info.keep_alive_ns, odd(2));
    MP_CHECK_INT(info.latency.count, odd(3));
    MP_CHECK_INT(info.units_in, odd(4));
    MP_CHECK_INT(info.units_out, odd(5));
    MP_CHECK_INT(info.last_error, MP_NUMERIC);
    MP_CHECK_INT(info.errors, odd(6));
    MP_CHECK_INT(info.predicted_bytes, odd(7));
    MP_CHECK_INT(info.model_bytes, 1000);
    MP_CHECK(info.model == entry->resident->model);
    MP_CHECK_INT(info.engine_bytes, odd(30) + odd(31) + odd(33));
    MP_CHECK_INT(info.idle_ns, 0); /* one worker is busy */
    MP_CHECK(info.arrivals == 0 && info.predicted == 0);
    MP_CHECK_INT(info.worker_count, 4);
    static const char *const states[] = {"processing", "idle", "loading", "evicting"};
    uint64_t after = mp_sys_now_ns();
    for (int i = 0; i < 4; i++) {
        const mp_worker_info *worker = &info.worker[i];
        bool has_engine = i != 2;
        MP_CHECK_INT(worker->id, i + 1);
        MP_CHECK_INT(worker->node, mp_cpu_allocator_node_number(scene.services->allocator_pinned, workers[i]->home));
        MP_CHECK_STR(worker->state, states[i]);
        MP_CHECK_INT(worker->running, i == 0 ? 3 : 0);
        MP_CHECK_INT(worker->served, odd(10 + i));
        MP_CHECK_INT(worker->busy_ns, odd(20 + i));
        MP_CHECK_INT(worker->engine_bytes, has_engine ? odd(30 + i) : 0);
        MP_CHECK_INT(worker->predicted_bytes, odd(40 + i));
        MP_CHECK_INT(worker->process, has_engine ? 100 + i : 0);
        if (i == 1)
            MP_CHECK(worker->idle_ns >= FAKE_MS(2000) && worker->idle_ns <= after - idle->idle_since_ns);
        else
            MP_CHECK_INT(worker->idle_ns, 0);
    }
    /* The entry is idle for as long as the worker that worked last. */
    busy->active_count = 0;
    describe(&scene, &info);
    after = mp_sys_now_ns();
    MP_CHECK_INT(info.busy, 0);
    MP_CHECK(info.idle_ns >= FAKE_MS(1000) && info.idle_ns <= after - busy->idle_since_ns);
    scene_close(&scene);
}

/* The policy of an entry is that of the configuration, else that of the loader, else that of the capability. */
MP_TEST(registry_info_policy_of_an_entry) {
    static const char *const names[] = {NULL, "sequential", "no policy"};
    for (int i = 0; i < 3; i++)
        for (int chosen = 0; chosen < 2; chosen++) {
            scene scene;
            mp_entry *entry;
            mp_error error;
            scene_open(&scene, "a", NULL, 1000 * 1000);
            mp_loader loader = fake_loader(&scene.fake);
            loader.policy = names[i];
            scene.services->policy_chosen[loader.capability] = chosen;
            scene.services->policy[loader.capability] = MP_POLICY_PACK;
            MP_CHECK_OK(mp_entry_create(scene.services, "b", &loader, &entry, &error), &error);
            MP_CHECK_INT(entry->policy, i == 1 && !chosen ? MP_POLICY_SEQUENTIAL : MP_POLICY_PACK);
            MP_CHECK_INT(entry->keep_alive_ns, scene.services->keep_alive_ns);
            MP_CHECK_INT(entry->revision, loader.revision);
            mp_entry_unpin(entry);
            scene_close(&scene);
        }
}

/* --- the size of an entry, by which the registry chooses models to evict --- */

MP_TEST(registry_info_of_evictions) {
    enum { MODEL = 1000, HELD = 300 };
    static const struct {
        int first, second; /* states of workers, or NONE */
        int active, queued;
        mp_entry_unload unload;
        bool pinned, removed, woken, leave;
        mp_worker_memory memory;
        uint64_t bytes, coming, busy, caches, trimming;
    } rows[] = {
        {NONE, NONE, .bytes = MODEL + 1},
        {NONE, NONE, .pinned = true},
        {NONE, NONE, .removed = true, .coming = MODEL + 1},
        {MP_WORKER_IDLE, NONE, .bytes = MODEL + HELD + 1, .caches = HELD},
        {MP_WORKER_READY, MP_WORKER_IDLE, .bytes = MODEL + 2 * HELD + 1, .caches = 2 * HELD},
        {MP_WORKER_IDLE, NONE, .memory = MP_MEMORY_ASKED, .bytes = MODEL + HELD + 1, .trimming = HELD},
        {MP_WORKER_IDLE, MP_WORKER_IDLE, .memory = MP_MEMORY_ASKED, .bytes = MODEL + 2 * HELD + 1, .caches = HELD,
         .trimming = HELD},
        {MP_WORKER_IDLE, NONE, .memory = MP_MEMORY_TRIMMED, .bytes = MODEL + HELD + 1},
        {MP_WORKER_IDLE, NONE, .pinned = true, .caches = HELD},
        /* the workers become idle soon: the memory is coming */
        {MP_WORKER_IDLE, NONE, .woken = true, .coming = MODEL + HELD + 1},
        {MP_WORKER_PROCESSING, NONE, .coming = MODEL + HELD + 1},
        {MP_WORKER_IDLE, NONE, .unload = MP_UNLOAD_REQUESTED, .coming = MODEL + HELD + 1},
        {MP_WORKER_IDLE, NONE, .unload = MP_UNLOAD_CALLED, .coming = MODEL + HELD + 1},
        {MP_WORKER_PROCESSING, NONE, .active = 1, .unload = MP_UNLOAD_REQUESTED, .coming = MODEL + HELD + 1},
        /* in use */
        {MP_WORKER_PROCESSING, NONE, .active = 1, .busy = MODEL + HELD},
        {MP_WORKER_PROCESSING, MP_WORKER_IDLE, .active = 1, .busy = MODEL + 2 * HELD, .caches = HELD},
        {MP_WORKER_PROCESSING, NONE, .active = 1, .pinned = true, .busy = HELD}, /* the worker can be trimmed then */
        {MP_WORKER_PROCESSING, NONE, .active = 1, .removed = true, .busy = MODEL + HELD},
        {MP_WORKER_IDLE, NONE, .removed = true, .coming = MODEL + HELD + 1},
        {MP_WORKER_IDLE, NONE, .removed = true, .queued = 1, .busy = MODEL + HELD, .caches = HELD},
        {NONE, NONE, .queued = 1, .busy = MODEL},
        {MP_WORKER_SPAWNING, NONE, .queued = 1, .busy = MODEL + HELD},
        /* workers that leave free their memory, even if the registry must not evict the model */
        {MP_WORKER_FAILED, NONE, .queued = 1, .busy = MODEL, .coming = HELD},
        {MP_WORKER_FAILED, NONE, .pinned = true, .coming = MODEL + HELD + 1},
        {MP_WORKER_EVICTING, NONE, .coming = MODEL + HELD + 1},
        {MP_WORKER_IDLE, NONE, .leave = true, .pinned = true, .coming = MODEL + HELD + 1},
        {MP_WORKER_PROCESSING, NONE, .leave = true, .active = 1, .pinned = true, .coming = HELD, .busy = MODEL},
        {MP_WORKER_FAILED, MP_WORKER_IDLE, .pinned = true, .coming = HELD, .caches = HELD},
        {MP_WORKER_FAILED, MP_WORKER_SPAWNING, .pinned = true, .coming = HELD},
        {MP_WORKER_FAILED, NONE, .pinned = true, .queued = 1, .coming = HELD},
        {MP_WORKER_LOADING, NONE, .queued = 1}, /* the load may itself wait for this memory */
        {MP_WORKER_SPAWNING, MP_WORKER_LOADING, .queued = 1},
        {MP_WORKER_IDLE, MP_WORKER_LOADING, .queued = 1, .busy = MODEL + 2 * HELD, .caches = HELD},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        scene scene;
        mp_eviction value;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_entry *entry = scene.entry;
        scene_load(&scene);
        entry->resident->load_ns = 77;
        uint64_t now = mp_sys_now_ns();
        for (int j = 0; j < 2; j++)
            if ((j ? rows[i].second : rows[i].first) != NONE) {
                mp_worker *worker = scene_worker(&scene, (mp_worker_state)(j ? rows[i].second : rows[i].first));
                worker->held_bytes = HELD;
                worker->idle_since_ns = now - FAKE_MS(500);
            }
        for (int j = 0; j < rows[i].active; j++)
            scene_activate(scene.workers[0], scene_ticket(&scene, 1, (mp_submit_options){0}), MP_TICKET_ADMITTED);
        for (int j = 0; j < rows[i].queued; j++)
            scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){0}));
        entry->unload = rows[i].unload;
        entry->pinned = rows[i].pinned;
        entry->load_requested = i % 2; /* however the model was loaded */
        entry->removal = rows[i].removed ? MP_REMOVAL_DRAINING : MP_REMOVAL_NONE;
        if (scene.worker_count) {
            scene.workers[0]->woken = rows[i].woken;
            scene.workers[0]->leave = rows[i].leave;
            scene.workers[0]->memory = rows[i].memory;
        }
        mp_entry_value(entry, &value);
        uint64_t idle_most = mp_sys_now_ns() - now + FAKE_MS(500);
        bool comes = value.coming > HELD, in_order = !comes && scene.worker_count;
        if (value.bytes != rows[i].bytes || value.coming != rows[i].coming || value.busy != rows[i].busy ||
            value.caches != rows[i].caches || value.trimming != rows[i].trimming)
            MP_FAIL("row %zu: bytes %d, coming %d, busy %d, caches %d, trimming %d", i, (int)value.bytes,
                    (int)value.coming, (int)value.busy, (int)value.caches, (int)value.trimming);
        MP_CHECK_INT(value.load_ns, comes ? 0 : 77);
        MP_CHECK(!in_order || (value.idle_ns >= FAKE_MS(500) && value.idle_ns <= idle_most));
        entry->removal = MP_REMOVAL_NONE;
        scene_close(&scene);
    }
}

/* --- tickets --- */

/* The predicted time is the cost of the requests ahead, half of the cost of the active ones, and the request's own. */
MP_TEST(registry_info_of_positions) {
    scene scene;
    uint64_t eta = 99;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_worker *worker = scene_worker(&scene, MP_WORKER_PROCESSING);
    mp_ticket *active = scene_ticket(&scene, 1, (mp_submit_options){0});
    active->node.cost = FAKE_MS(400);
    scene_activate(worker, active, MP_TICKET_ADMITTED);
    mp_ticket *tickets[3];
    for (int i = 0; i < 3; i++) {
        tickets[i] = scene_ticket(&scene, 1, (mp_submit_options){.priority = 2});
        tickets[i]->node.cost = FAKE_MS(10) * (uint64_t)(i + 1);
        scene_queue(&scene, tickets[i]);
    }
    for (int i = 0; i < 3; i++) {
        static const uint64_t costs[] = {210, 230, 260};
        scene.entry->pace = 0;
        MP_CHECK_INT(mp_ticket_position(tickets[i], &eta), i);
        MP_CHECK_INT(eta, 0); /* unknown */
        scene.entry->pace = 2;
        MP_CHECK_INT(mp_ticket_position(tickets[i], &eta), i);
        MP_CHECK_INT(eta, FAKE_MS(2) * costs[i]);
        MP_CHECK_INT(mp_ticket_position(tickets[i], NULL), i);
    }
    MP_CHECK_INT(mp_ticket_position(active, &eta), -1);
    MP_CHECK_INT(eta, FAKE_MS(800)); /* it has not started */
    uint64_t before = mp_sys_now_ns();
    atomic_store(&active->started_ns, before - FAKE_MS(300));
    MP_CHECK_INT(mp_ticket_position(active, &eta), -1);
    MP_CHECK(eta <= FAKE_MS(500) && eta >= FAKE_MS(500) - (mp_sys_now_ns() - before));
    atomic_store(&active->started_ns, before - FAKE_MS(900));
    MP_CHECK_INT(mp_ticket_position(active, &eta), -1);
    MP_CHECK_INT(eta, 1); /* any moment */
    mp_ticket *other = scene_ticket(&scene, 1, (mp_submit_options){0}); /* neither queued nor active */
    eta = 99;
    MP_CHECK_INT(mp_ticket_position(other, &eta), -1);
    MP_CHECK_INT(eta, 0);
    scene_close(&scene);
}
