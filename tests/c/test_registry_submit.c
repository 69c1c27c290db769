/* Submitting to one entry: the patience of a request, probes of the breaker, and the worker that a policy chooses. */
#include "base/sys.h"
#include "test_registry_scene.h"

static mp_status submit(scene *scene, mp_ticket *ticket, bool *gone, mp_error *error) {
    mp_submit_options options = {.fail_fast = true};
    return mp_entry_submit(scene->entry, ticket, &options, gone, error);
}

/* With scale_timeout, the patience is three times the predicted wait, but at least the configured patience and at most
 * MP_PATIENCE_SCALE times as long. */
MP_TEST(registry_submit_stretches_patience) {
    static const struct {
        int cost_ms, pace, expected_ms;
    } rows[] = {{0, 1, 100}, {33, 1, 100}, {40, 1, 120}, {100, 1, 300}, {100, 2, 600}, {333, 1, 999}, {334, 1, 1000},
                {5000, 1, 1000}, {100, 0, 100}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        scene scene;
        mp_error error;
        bool gone;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        scene.services->patience_ns = FAKE_MS(100);
        scene.services->scale_timeout = true;
        scene_worker(&scene, MP_WORKER_LOADING); /* an entry with a worker starts no other */
        scene.entry->pace = rows[i].pace;
        mp_ticket *ahead = scene_ticket(&scene, 1, (mp_submit_options){0});
        ahead->node.cost = FAKE_MS(rows[i].cost_ms);
        scene_queue(&scene, ahead);
        mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0}),
                  *own = scene_ticket(&scene, 1, (mp_submit_options){.patience_ns = FAKE_MS(100)});
        MP_CHECK_OK(submit(&scene, ticket, &gone, &error), &error);
        MP_CHECK_OK(submit(&scene, own, &gone, &error), &error);
        MP_CHECK_INT(ticket->patience_ns, FAKE_MS(rows[i].expected_ms));
        MP_CHECK_INT(own->patience_ns, FAKE_MS(100)); /* chosen by the caller */
        MP_CHECK_INT(scene.entry->accepted, 3);
        MP_CHECK(ticket->timed && own->timed && !ahead->timed);
        MP_CHECK_INT(scene.services->maintenance.timed, 2);
        mp_ticket *endless = scene_ticket(&scene, 1, (mp_submit_options){.patience_ns = MP_FOREVER});
        MP_CHECK_OK(submit(&scene, endless, &gone, &error), &error);
        MP_CHECK(!endless->timed); /* the clock of requests does not tick for it */
        MP_CHECK_INT(scene.services->maintenance.timed, 2);
        scene_close(&scene);
    }
}

/* A probe that is refused for another reason gives its probe back: the breaker counts it no longer, and the next
 * submits may be probes. */
MP_TEST(registry_submit_returns_probes) {
    scene scene;
    mp_error error;
    bool gone;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene_ready(&scene);
    mp_breaker *breaker = &scene.entry->faults.breaker;
    breaker->state = MP_BREAKER_HALF_OPEN;
    breaker->epoch = 3;
    mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0});
    ((fake_call *)mp_ticket_request(ticket))->bad_argument = true;
    MP_CHECK_STATUS(submit(&scene, ticket, &gone, &error), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_INT(ticket->faults.probe, 0);
    MP_CHECK_INT(ticket->load, 0);
    MP_CHECK_INT(ticket->charged, 0);
    MP_CHECK_INT(breaker->probing, 0);
    MP_CHECK_INT(breaker->succeeded, 0);
    for (int i = 0; i < 3; i++) {
        ticket = scene_ticket(&scene, 1, (mp_submit_options){0});
        MP_CHECK_OK(submit(&scene, ticket, &gone, &error), &error);
        MP_CHECK_INT(ticket->faults.probe, 3);
        MP_CHECK_INT(breaker->probing, i + 1);
    }
    ticket = scene_ticket(&scene, 1, (mp_submit_options){0});
    MP_CHECK_STATUS(submit(&scene, ticket, &gone, &error), MP_CIRCUIT_OPEN, &error);
    MP_CHECK_STR(error.message, "a: the circuit breaker is half-open after repeated worker faults; try again when its "
                                "3 probe requests have ended");
    MP_CHECK_INT(ticket->faults.probe, 0);
    MP_CHECK_INT(breaker->probing, 3);
    breaker->state = MP_BREAKER_OPEN;
    breaker->open_until_ns = fake_in_ms(7440);
    MP_CHECK_STATUS(submit(&scene, ticket, &gone, &error), MP_CIRCUIT_OPEN, &error);
    MP_CHECK_STR(error.message, "a: the circuit breaker is open after repeated worker faults; try again in 7.4 s");
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_circuit_rejections], 2);
    scene_close(&scene);
}

typedef struct observed {
    const mp_breaker *breaker;
    int probing; /* -1: not called */
} observed;

static bool observe_and_give_up(void *arg) {
    observed *seen = arg;
    seen->probing = seen->breaker->probing;
    return true;
}

/* A request that waits for memory holds no probe: otherwise the breaker would refuse all others meanwhile. */
MP_TEST(registry_submit_waits_for_memory_without_a_probe) {
    scene scene;
    mp_guard load;
    mp_error error;
    bool gone;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene_ready(&scene);
    mp_breaker *breaker = &scene.entry->faults.breaker;
    breaker->state = MP_BREAKER_HALF_OPEN;
    breaker->epoch = 3;
    MP_CHECK(mp_governor_try_reserve(scene.services->governor, 900000, &load)); /* waits for it are not in vain */
    observed seen = {breaker, -1};
    mp_submit_options options = {.give_up = observe_and_give_up, .give_up_arg = &seen};
    mp_ticket *ticket = scene_ticket(&scene, 1, options);
    mp_ticket_request(ticket)->bytes = 500000;
    MP_CHECK_STATUS(mp_entry_submit(scene.entry, ticket, &options, &gone, &error), MP_CANCELLED, &error);
    MP_CHECK_INT(seen.probing, 0);
    MP_CHECK_INT(ticket->faults.probe, 0);
    mp_guard_release(&load);
    MP_CHECK_OK(mp_entry_submit(scene.entry, ticket, &options, &gone, &error), &error);
    MP_CHECK_INT(ticket->faults.probe, 3);
    MP_CHECK_INT(breaker->probing, 1);
    scene_close(&scene);
}

/* A fault opens the breaker once: when the window has as many faults as the threshold, or a probe fails. */
MP_TEST(registry_submit_faults_open_the_breaker_once) {
    const mp_breaker_rule rule = {.threshold = 2, .probes = 1, .successes = 1, .window_ns = 100, .backoff_ns = 1000};
    const mp_breaker_rule never = {.threshold = -1, .probes = 1, .successes = 1, .window_ns = 100, .backoff_ns = 1000};
    mp_breaker breaker = {0};
    uint32_t probe;
    uint64_t left_ns;
    for (uint64_t i = 0; i < 10; i++)
        MP_CHECK(!mp_breaker_fault(&breaker, &never, i));
    MP_CHECK_STR(mp_breaker_name(&breaker), "closed");
    MP_CHECK(!mp_breaker_fault(&breaker, &rule, 1000));
    MP_CHECK(!mp_breaker_fault(&breaker, &rule, 1101)); /* the first is outside the window */
    MP_CHECK(mp_breaker_fault(&breaker, &rule, 1201));
    MP_CHECK_STR(mp_breaker_name(&breaker), "open");
    MP_CHECK_INT(breaker.epoch, 1);
    MP_CHECK(!mp_breaker_fault(&breaker, &rule, 1202)); /* open already */
    MP_CHECK_INT(breaker.open_until_ns, 2201);
    MP_CHECK(!mp_breaker_ask(&breaker, &rule, 2200, &probe, &left_ns));
    MP_CHECK_INT(left_ns, 1);
    MP_CHECK(mp_breaker_ask(&breaker, &rule, 2201, &probe, &left_ns));
    MP_CHECK_INT(probe, 1);
    MP_CHECK(!mp_breaker_ask(&breaker, &rule, 2202, &probe, &left_ns));
    MP_CHECK(left_ns == 0 && probe == 0);
    MP_CHECK(mp_breaker_fault(&breaker, &rule, 3000)); /* the probe failed */
    MP_CHECK_INT(breaker.open_until_ns, 4000);
    MP_CHECK(mp_breaker_ask(&breaker, &rule, 4000, &probe, &left_ns));
    mp_breaker_end(&breaker, &rule, 1, true); /* a probe of an earlier opening */
    MP_CHECK_STR(mp_breaker_name(&breaker), "half-open");
    mp_breaker_end(&breaker, &rule, probe, true);
    MP_CHECK_STR(mp_breaker_name(&breaker), "closed");
    MP_CHECK(!mp_breaker_fault(&breaker, &rule, 4001)); /* faults before the opening do not count */
}

/* An entry that refuses: the status, the message and `gone`. */
MP_TEST(registry_submit_refusals) {
    for (int i = 0; i < 6; i++) {
        static const struct {
            mp_status status;
            const char *message;
            bool gone;
        } rows[] = {
            {MP_SHUTTING_DOWN, "a: the pool is shutting down", false},
            {MP_UNKNOWN_MODEL, "a: the model was removed", true},
            {MP_SHUTTING_DOWN, "a: the pool is shutting down", false},
            {MP_IO, "no file", false},
            {MP_NO_WORKERS, "too many deaths", false},
            {MP_OK, NULL, false},
        };
        scene scene;
        mp_error error;
        bool gone, over;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_entry *entry = scene.entry;
        scene_worker(&scene, MP_WORKER_LOADING);
        entry->shutdown = i == 0 || i == 2 ? MP_SHUTDOWN_CLOSED : MP_SHUTDOWN_OPEN;
        entry->removal = i == 1 || i == 2 ? MP_REMOVAL_DRAINING : MP_REMOVAL_NONE;
        entry->faults.health = i == 4 ? MP_HEALTH_BROKEN : MP_HEALTH_SOUND;
        entry->faults.retry_ns = i == 3 ? fake_in_ms(60000) : 0;
        if (i == 3 || i == 4)
            mp_fail(&entry->faults.failure, rows[i].status, "%s", rows[i].message);
        mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0});
        MP_CHECK_STATUS(submit(&scene, ticket, &gone, &error), rows[i].status, &error);
        MP_CHECK_INT(gone, rows[i].gone);
        if (rows[i].message)
            MP_CHECK_STR(error.message, rows[i].message);
        MP_CHECK_INT(entry->queue.count, rows[i].status == MP_OK);
        if (i < 3) { /* mp_entry_load fails with the same error */
            MP_CHECK_STATUS(mp_entry_load(entry, true, 0, &gone, &over, &error), rows[i].status, &error);
            MP_CHECK_INT(gone, rows[i].gone);
            MP_CHECK_STR(error.message, rows[i].message);
            MP_CHECK(!entry->pinned);
        }
        scene_close(&scene);
    }
}

/* MP_POLICY_P2C: of two workers the less loaded, of equal ones the older. */
MP_TEST(registry_submit_home_of_two_choices) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    MP_CHECK(!mp_dispatch_choose(scene.entry));
    for (int count = 1; count <= SCENE_WORKERS; count++) {
        bool seen[SCENE_WORKERS] = {0};
        mp_worker *last = scene_worker(&scene, MP_WORKER_IDLE);
        for (int i = 0; i < 200; i++) {
            const mp_worker *chosen = mp_dispatch_choose(scene.entry);
            MP_CHECK(chosen->id >= 1 && chosen->id <= (uint32_t)count);
            seen[chosen->id - 1] = true;
        }
        for (int i = 0; i < count; i++) /* the older one of two random workers is chosen, so never the youngest */
            MP_CHECK_INT(seen[i], count == 1 || i < count - 1);
        (void)last;
    }
    scene.workers[0]->leave = true;
    scene.workers[1]->state = MP_WORKER_LOADING;
    for (int i = 0; i < 50; i++)
        MP_CHECK(mp_dispatch_choose(scene.entry) == scene.workers[2]);
    mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0}); /* costs nothing, but is a request */
    scene_activate(scene.workers[2], ticket, MP_TICKET_ADMITTED);
    for (int i = 0; i < 50; i++)
        MP_CHECK(mp_dispatch_choose(scene.entry) == scene.workers[3]);
    mp_ticket *queued = scene_ticket(&scene, 1, (mp_submit_options){0});
    queued->node.cost = 1;
    scene_queue(&scene, queued);
    mp_dispatch_assign(queued, scene.workers[3]);
    for (int i = 0; i < 50; i++)
        MP_CHECK(mp_dispatch_choose(scene.entry) == scene.workers[2]);
    mp_dispatch_assign(queued, NULL);
    MP_CHECK(scene.workers[3]->assigned_cost == 0);
    scene_close(&scene);
}

/* No further worker starts while the engine of one refuses requests for lack of memory: it would need memory itself. */
MP_TEST(registry_submit_tight_models_do_not_grow) {
    for (int tight = 0; tight < 4; tight++) { /* one bit per worker */
        scene scene;
        mp_guard guard = {0};
        scene_open(&scene, "a", NULL, 1000 * 1000);
        scene_load(&scene);
        for (int i = 0; i < 2; i++)
            scene_worker(&scene, MP_WORKER_PROCESSING)->memory = tight >> i & 1 ? MP_MEMORY_TIGHT : MP_MEMORY_AMPLE;
        scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){0}));
        MP_CHECK_INT(mp_dispatch_scale(scene.entry, &guard), tight == 0);
        MP_CHECK_INT(scene.entry->starting, tight == 0);
        scene.entry->starting = 0;
        mp_guard_release(&guard);
        scene_close(&scene);
    }
}

/* Workers that the forecast asks for start one after the other. */
MP_TEST(registry_submit_predicted_workers_start_in_turn) {
    static const struct {
        mp_worker_state first, second;
        bool starts;
    } rows[] = {{MP_WORKER_IDLE, MP_WORKER_IDLE, true},        {MP_WORKER_LOADING, MP_WORKER_IDLE, false},
                {MP_WORKER_IDLE, MP_WORKER_LOADING, false},    {MP_WORKER_SPAWNING, MP_WORKER_IDLE, false},
                {MP_WORKER_IDLE, MP_WORKER_SPAWNING, false},   {MP_WORKER_PROCESSING, MP_WORKER_IDLE, true},
                {MP_WORKER_EVICTING, MP_WORKER_FAILED, false}, {MP_WORKER_IDLE, MP_WORKER_EVICTING, true}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        scene scene;
        mp_guard guard = {0};
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_entry *entry = scene.entry;
        scene_load(&scene);
        scene.services->predictive_scaling = true;
        entry->policy = MP_POLICY_SHARED;
        uint64_t now = mp_sys_now_ns();
        for (int j = 0; j < 200; j++)
            mp_forecast_arrive(&entry->forecast, now - FAKE_MS(5) * (uint64_t)(200 - j));
        mp_forecast_serve(&entry->forecast, FAKE_MS(1000));
        MP_CHECK_INT(mp_dispatch_predicted(entry, mp_sys_now_ns()), 4);
        scene_worker(&scene, rows[i].first);
        scene_worker(&scene, rows[i].second)->engine_bytes = 123;
        MP_CHECK_INT(mp_dispatch_predict(entry, &guard), rows[i].starts);
        MP_CHECK_INT(entry->starting, rows[i].starts);
        MP_CHECK_INT(guard.bytes, rows[i].starts ? 123 : 0);
        MP_CHECK(!mp_dispatch_predict(entry, &(mp_guard){0})); /* one is starting */
        mp_guard_release(&guard);
        scene_close(&scene);
    }
}
