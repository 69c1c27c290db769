/* Several workers per model: cold start, scaling, policies, idle workers, and workers that make no progress. */
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

static void wait_for_workers(mp_registry *registry, const char *key, int count) {
    uint64_t end = fake_in_ms(10000);
    mp_entry_info info;
    for (;;) {
        fake_info(registry, key, &info);
        if (info.workers == count)
            return;
        MP_CHECK(mp_sys_now_ns() < end);
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
    }
}

static mp_ticket *submit_with(mp_registry *registry, const char *key, fake_call *call, mp_submit_options options) {
    mp_ticket *ticket = NULL;
    mp_error error;
    MP_CHECK_OK(mp_registry_submit(registry, key, &call->base, &options, &ticket, &error), &error);
    return ticket;
}

/* --- cold start --- */

MP_TEST(workers_cold_model_gets_two) {
    fake fake;
    fake_init(&fake);
    fake.workers = 4;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2});
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    wait_for_workers(registry, "a", 2);
    MP_CHECK_INT(fake.loads, 1);
    MP_CHECK_INT(fake.models, 1); /* both workers share the model */
    MP_CHECK_INT(fake.engines, 2);
    mp_registry_stats stats = fake_stats(registry);
    MP_CHECK_INT(stats.workers_spawned, 2);
    MP_CHECK_INT(stats.memory_used, 1200);
    MP_CHECK_INT(stats.illegal_transitions, 0);
    fake_end(registry);
}

/* A worker that cannot start beside one that serves fails no request, and the model does not count as failed. */
MP_TEST(workers_that_cannot_start_beside_another_fail_no_request) {
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    fake.load_ns = FAKE_MS(20);
    fake.memory = 1; /* one request is active, the others wait in the queue */
    atomic_store(&fake.one_engine, true);
    atomic_store(&fake.hold, true);
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2});
    fake_add(registry, "a", &fake, false);
    mp_ticket *tickets[4];
    for (int i = 0; i < 4; i++) {
        fake_call *call = fake_call_create(1);
        call->memory = 1;
        tickets[i] = fake_submit(registry, "a", call, NULL);
    }
    fake_until(&fake.engines_refused, 1); /* a cold model starts two workers */
    fake_until(&fake.in_steps, 1);
    wait_for_workers(registry, "a", 1);
    mp_entry_info info;
    fake_info(registry, "a", &info);
    MP_CHECK_HAS(info.state, "busy");
    atomic_store(&fake.hold, false);
    for (int i = 0; i < 4; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    fake_end(registry);
}

MP_TEST(workers_many_callers_cause_one_load) {
    fake fake;
    fake_init(&fake);
    fake.workers = 4;
    fake.load_ns = FAKE_MS(20);
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2});
    fake_add(registry, "a", &fake, false);
    herd herd = {.registry = registry, .key = "a"};
    fake_run_herd(&herd);
    MP_CHECK_INT(herd.ok, HERD);
    MP_CHECK_INT(fake.loads, 1);
    wait_for_workers(registry, "a", 2);
    MP_CHECK_INT(fake_stats(registry).workers_spawned, 2);
    fake_end(registry);
}

MP_TEST(workers_two_of_one_model_and_five_models_load_at_once) {
    enum { MODELS = 5 };
    fake fakes[MODELS];
    const char *const keys[MODELS] = {"e", "c", "a", "d", "b"};
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2});
    mp_ticket *tickets[MODELS][2];
    for (int i = 0; i < MODELS; i++) {
        fake_init(&fakes[i]);
        fakes[i].load_ns = FAKE_MS(5);
        fakes[i].workers = 2;
        fakes[i].threads = 2;
        fakes[i].thread_limit = 2;
        fake_add(registry, keys[i], &fakes[i], false);
    }
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < MODELS; i++)
            tickets[i][j] = fake_submit(registry, keys[i], fake_call_create(2), NULL);
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < MODELS; i++)
            MP_CHECK_INT(fake_finish(tickets[i][j]), MP_OK);
    for (int i = 0; i < MODELS; i++) {
        MP_CHECK_INT(fakes[i].loads, 1);
        wait_for_workers(registry, keys[i], 2);
    }
    fake_end(registry);
}

/* --- policies and scaling --- */

MP_TEST(workers_scale_while_all_are_busy) {
    fake fake;
    fake_init(&fake);
    fake.workers = 3;
    fake.hold = true;
    mp_registry_config config = {.threads = 4, .max_workers = 3};
    config.queue_capacity[MP_TEXT_EMBEDDING][0] = 20;
    mp_registry *registry = fake_registry_of(config);
    fake_add(registry, "a", &fake, false);
    mp_submit_options options = {.priority = 2, .policy = MP_POLICY_SEQUENTIAL};
    mp_ticket *tickets[8];
    for (int i = 0; i < 8; i++) {
        tickets[i] = submit_with(registry, "a", fake_call_create(1), options);
        wait_for_workers(registry, "a", i < 2 ? 2 : 3);
        mp_sys_sleep_ns(FAKE_MS(2));
    }
    mp_entry_info info;
    uint64_t end = fake_in_ms(10000);
    do { /* each worker takes its first request some time after its start */
        fake_info(registry, "a", &info);
        MP_CHECK(mp_sys_now_ns() < end);
    } while (info.running < 3);
    MP_CHECK_INT(info.busy, 3);
    MP_CHECK_INT(info.running, 3); /* one request per worker */
    MP_CHECK_INT(info.queued, 5);
    MP_CHECK_INT(fake.models, 1);
    atomic_store(&fake.hold, false);
    for (int i = 0; i < 8; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    fake_end(registry);
}

MP_TEST(workers_pack_fills_the_first) {
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2});
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &(mp_error){0}), &(mp_error){0});
    wait_for_workers(registry, "a", 2);
    atomic_store(&fake.hold, true);
    mp_submit_options options = {.priority = 2, .policy = MP_POLICY_PACK};
    mp_ticket *tickets[4];
    for (int i = 0; i < 4; i++) {
        tickets[i] = submit_with(registry, "a", fake_call_create(1), options);
        fake_until(&fake.in_steps, 1);
    }
    mp_sys_sleep_ns(FAKE_MS(5));
    mp_entry_info info;
    fake_info(registry, "a", &info);
    MP_CHECK_INT(info.busy, 1); /* the second worker is idle, although three requests wait for the first */
    atomic_store(&fake.hold, false);
    for (int i = 0; i < 4; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    fake_end(registry);
}

MP_TEST(workers_p2c_uses_both) {
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    mp_registry_config config = {.threads = 2};
    config.queue_capacity[MP_TEXT_EMBEDDING][0] = 100;
    mp_registry *registry = fake_registry_of(config);
    fake_add(registry, "a", &fake, false);
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &(mp_error){0}), &(mp_error){0});
    wait_for_workers(registry, "a", 2);
    atomic_store(&fake.step_ns, FAKE_MS(1));
    fake.plan_items = 1;
    mp_submit_options options = {.priority = 2, .policy = MP_POLICY_P2C};
    mp_ticket *tickets[60];
    for (int i = 0; i < 60; i++)
        tickets[i] = submit_with(registry, "a", fake_call_create(1), options);
    for (int i = 0; i < 60; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
    mp_entry_info info;
    fake_info(registry, "a", &info);
    MP_CHECK_INT(info.worker[0].served + info.worker[1].served, 60);
    MP_CHECK(info.worker[0].served >= 12 && info.worker[1].served >= 12);
    fake_end(registry);
}

/* --- idle workers end --- */

MP_TEST(workers_that_are_idle_leave_down_to_zero) {
    fake fake, pinned, forever;
    fake_init(&fake);
    fake_init(&pinned);
    fake_init(&forever);
    fake.workers = pinned.workers = forever.workers = 2;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 2, .keep_alive_ns = FAKE_MS(20)});
    fake_add(registry, "a", &fake, false);
    fake_add(registry, "pinned", &pinned, false);
    fake_add(registry, "forever", &forever, false);
    mp_error error;
    MP_CHECK_OK(mp_registry_load(registry, "pinned", true, 0, &error), &error);
    MP_CHECK_OK(mp_registry_keep_alive(registry, "forever", MP_FOREVER, &error), &error);
    MP_CHECK_OK(mp_registry_load(registry, "forever", false, 0, &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    wait_for_workers(registry, "a", 0);
    fake_until_state(registry, "a", "cold");
    MP_CHECK_INT(fake.models + fake.engines, 0);
    wait_for_workers(registry, "pinned", 1);
    wait_for_workers(registry, "forever", 2);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK); /* loads again */
    MP_CHECK_INT(fake.loads, 2);
    fake_end(registry);
}

MP_TEST(workers_keep_alive_of_a_request_counts_from_then_on) {
    fake fake;
    fake_init(&fake);
    fake.workers = 2;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 1});
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    mp_submit_options now = {.priority = 2, .keep_alive_ns = 1};
    MP_CHECK_INT(fake_finish(submit_with(registry, "a", fake_call_create(1), now)), MP_OK);
    fake_until_state(registry, "a", "cold");
    MP_CHECK_INT(fake.models, 0);
    fake_end(registry);
}

MP_TEST(workers_make_room_for_another_model) {
    fake fakes[4];
    const char *const keys[4] = {"old", "dear", "pinned", "new"};
    mp_registry_config config = {.threads = 2, .memory_limit = 400000, .max_workers = 1};
    mp_registry *registry = fake_registry_of(config);
    mp_error error;
    for (int i = 0; i < 4; i++) {
        fake_init(&fakes[i]);
        fakes[i].model_bytes = 110000;
        fake_add(registry, keys[i], &fakes[i], false);
    }
    fakes[1].load_ns = FAKE_MS(60); /* `dear` is expensive to load again: it stays, although it was idle for longest */
    MP_CHECK_INT(fake_finish(fake_submit(registry, "dear", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_OK(mp_registry_load(registry, "pinned", true, 0, &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "pinned", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "old", fake_call_create(1), NULL)), MP_OK);
    fake_until_state(registry, "old", "ready");
    mp_sys_sleep_ns(FAKE_MS(20));
    MP_CHECK_INT(fake_finish(fake_submit(registry, "new", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(fakes[0].models, 0);
    MP_CHECK_INT(fakes[1].trims + fakes[2].trims, 0); /* trimming caches would not have freed enough */
    MP_CHECK_INT(fakes[1].models, 1);
    MP_CHECK_INT(fakes[2].models, 1);
    MP_CHECK_INT(fakes[3].models, 1);
    /* no model can be evicted now: each is in use or pinned */
    atomic_store(&fakes[1].hold, true);
    atomic_store(&fakes[3].hold, true);
    mp_ticket *one = fake_submit(registry, "dear", fake_call_create(1), NULL);
    mp_ticket *two = fake_submit(registry, "new", fake_call_create(1), NULL);
    fake_until(&fakes[1].in_steps, 1);
    fake_until(&fakes[3].in_steps, 1);
    mp_ticket *waiting = fake_submit(registry, "old", fake_call_create(1), NULL);
    MP_CHECK(!mp_ticket_wait(waiting, UINT64_MAX, fake_in_ms(50), NULL)); /* it waits until a model is idle */
    MP_CHECK_INT(fakes[0].models, 0);
    atomic_store(&fakes[1].hold, false);
    atomic_store(&fakes[3].hold, false);
    MP_CHECK_INT(fake_finish(one), MP_OK);
    MP_CHECK_INT(fake_finish(two), MP_OK);
    MP_CHECK_INT(fake_finish(waiting), MP_OK);
    fake_end(registry);
}

/* --- steps of a worker that is alone --- */

/* A worker that is alone plans its steps as such, and learns in a step that others wait: a request for it, or a worker
 * of another model. */
MP_TEST(workers_learn_in_a_step_that_others_wait) {
    for (int model = 0; model < 2; model++) {
        fake fakes[2];
        mp_registry *registry = fake_registry(1, 0);
        fake_init(&fakes[0]);
        fake_init(&fakes[1]);
        fakes[0].step_units = 1;
        atomic_store(&fakes[0].hold, true);
        atomic_store(&fakes[0].yields, true);
        fake_add(registry, "0", &fakes[0], false);
        fake_add(registry, "1", &fakes[1], false);
        mp_ticket *first = fake_submit(registry, "0", fake_call_create(2), NULL);
        fake_until(&fakes[0].in_steps, 1);
        mp_sys_sleep_ns(FAKE_MS(20));
        MP_CHECK_INT(fakes[0].steps, 0);
        MP_CHECK_INT(fakes[0].alone, 1);
        mp_ticket *second = fake_submit(registry, model ? "1" : "0", fake_call_create(1), NULL);
        fake_until(&fakes[0].steps, 1);
        atomic_store(&fakes[0].hold, false);
        MP_CHECK_INT(fake_finish(first), MP_OK);
        MP_CHECK_INT(fake_finish(second), MP_OK);
        fake_end(registry);
    }
}

/* --- workers that make no progress --- */

MP_TEST(workers_stuck_in_a_step_are_abandoned) {
    fake fake;
    fake_init(&fake);
    fake.workers = 4;
    mp_registry *registry =
        fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .stall_timeout_ns = FAKE_MS(200)});
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    atomic_store(&fake.step_stalls, true);
    mp_error error;
    mp_ticket *stuck = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.in_steps, 1);
    mp_ticket *behind = fake_submit(registry, "a", fake_call_create(1), NULL);
    MP_CHECK_STATUS(fake_wait(stuck, &error), MP_RECV, &error);
    MP_CHECK_HAS(error.message, "a: worker");
    mp_entry_info info;
    fake_info(registry, "a", &info);
    MP_CHECK_INT(info.dead, 1);
    uint64_t before = fake_stats(registry).memory_used;
    MP_CHECK(before >= 1100); /* the memory of the abandoned worker stays charged */
    atomic_store(&fake.step_stalls, false);
    MP_CHECK_INT(fake_finish(behind), MP_OK); /* the replacement serves it, on the CPU of the dead worker */
    do {
        mp_sys_sleep_ns(FAKE_MS(1));
        fake_info(registry, "a", &info);
    } while (info.dead);
    mp_ticket_release(stuck);
    MP_CHECK_INT(fake_stats(registry).workers_dead, 1);
    MP_CHECK_INT(fake.engines, 1);
    fake_end(registry);
}

MP_TEST(workers_that_never_return_do_not_delay_shutdown) {
    fake fake;
    fake_init(&fake);
    fake.workers = 4;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1});
    fake_add(registry, "a", &fake, false);
    atomic_store(&fake.step_stalls, true);
    mp_ticket *stuck = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.in_steps, 1);
    mp_registry_close(registry, FAKE_MS(10)); /* a wait for the worker would last until the test's timeout */
    MP_CHECK(mp_ticket_done(stuck));
    mp_error error;
    MP_CHECK_STATUS(mp_ticket_status(stuck, &error), MP_SHUTTING_DOWN, &error);
    mp_ticket_release(stuck);
    mp_registry_destroy(registry);
    atomic_store(&fake.step_stalls, false); /* the worker outlives its registry, then frees its memory */
    for (int i = 0; i < 5000 && (fake.engines || fake.models || fake_calls || fake.loaders); i++)
        mp_sys_sleep_ns(FAKE_MS(1));
    MP_CHECK_INT(fake.engines + fake.models + fake_calls + fake.loaders, 0);
}

/* --- every capability --- */

/* Every capability has a worker pool, a bounded queue, a breaker and a terminal status. */
MP_TEST(workers_serve_every_capability) {
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++) {
        mp_capability capability = (mp_capability)i;
        fake fake;
        fake_init(&fake);
        fake.capability = capability;
        fake.workers = 2;
        mp_registry *registry = fake_registry_of(
            (mp_registry_config){.threads = 2, .breaker_threshold = 1, .breaker_backoff_ns = FAKE_MS(60000)});
        fake_add(registry, "a", &fake, false);
        mp_entry_info info;
        fake_info(registry, "a", &info);
        MP_CHECK_INT(info.capability, capability);
        MP_CHECK(info.policy != MP_POLICY_DEFAULT);
        MP_CHECK_STR(mp_policy_name(info.policy), mp_capability_get(capability)->policy);
        fake_call *call = fake_call_create(2);
        call->base.capability = capability;
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), MP_OK);
        wait_for_workers(registry, "a", 2);
        /* The queue of bulk requests is full at the capacity given in the capability's row. */
        atomic_store(&fake.hold, true);
        mp_ticket *tickets[300];
        int most = mp_capability_get(capability)->queue_capacity[MP_SERVICE_BULK], count = 0;
        mp_error error;
        mp_status status = MP_OK;
        mp_submit_options options = {
            .priority = 2, .service_class = MP_SERVICE_BULK, .fail_fast = true, .policy = MP_POLICY_SEQUENTIAL};
        for (; count < 300 && status == MP_OK; count += status == MP_OK) {
            call = fake_call_create(1);
            call->base.capability = capability;
            status = mp_registry_submit(registry, "a", &call->base, &options, &tickets[count], &error);
        }
        MP_CHECK_STATUS(status, MP_OVERLOADED, &error);
        MP_CHECK_HAS(error.message, "a: the queue is full");
        MP_CHECK(count >= most && count <= most + 2); /* + 2: workers may have taken two requests from the queue */
        mp_registry_stats stats = fake_stats(registry);
        MP_CHECK_INT(stats.total_requests, count + 2);
        MP_CHECK_INT(stats.queue_full_rejections, 1);
        MP_CHECK(stats.memory_used > 1200); /* the governor counts queued bytes */
        atomic_store(&fake.hold, false);
        for (int j = 0; j < count; j++)
            MP_CHECK_INT(fake_finish(tickets[j]), MP_OK);
        /* a fault opens the breaker */
        call = fake_call_faulty(MP_MODEL, 2);
        call->base.capability = capability;
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", call, NULL)), MP_MODEL);
        call = fake_call_create(1);
        call->base.capability = capability;
        MP_CHECK(!fake_submit(registry, "a", call, &status));
        MP_CHECK_INT(status, MP_CIRCUIT_OPEN);
        fake_end(registry);
    }
}

/* --- a queue that closes while a caller waits for room --- */

static bool count_polls(void *polls) { /* a waiting caller is asked whether it gives up */
    atomic_fetch_add((_Atomic int *)polls, 1);
    return false;
}

static _Atomic int polls;

static void submit_and_keep(void *arg) {
    herd *herd = arg;
    mp_submit_options options = {.priority = 2, .give_up = count_polls, .give_up_arg = &polls};
    mp_ticket *ticket = NULL;
    mp_error error;
    mp_status status =
        mp_registry_submit(herd->registry, herd->key, &fake_call_create(1)->base, &options, &ticket, &error);
    atomic_store(&herd->other, status);
    mp_ticket_release(ticket);
}

MP_TEST(workers_removed_model_closes_its_queue) {
    fake fake;
    fake_init(&fake);
    fake.hold = true;
    mp_registry_config config = {.threads = 1, .max_workers = 1};
    config.queue_capacity[MP_TEXT_EMBEDDING][0] = 1;
    mp_registry *registry = fake_registry_of(config);
    fake_add(registry, "a", &fake, false);
    mp_ticket *running = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.in_steps, 1);
    mp_ticket *queued = fake_submit(registry, "a", fake_call_create(1), NULL);
    herd herd = {.registry = registry, .key = "a"};
    atomic_store(&herd.other, -1);
    atomic_store(&polls, 0);
    mp_thread thread;
    mp_error error;
    MP_CHECK_OK(mp_thread_start(&thread, "caller", submit_and_keep, &herd, &error), &error);
    fake_until(&polls, 1); /* the caller waits for room in the queue */
    MP_CHECK_INT(herd.other, -1);
    MP_CHECK_STATUS(mp_registry_remove(registry, "a", fake_in_ms(1), &error), MP_TIMEOUT, &error);
    mp_thread_join(&thread);
    MP_CHECK_INT(herd.other, MP_SEND);
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_finish(running), MP_OK); /* accepted requests are served */
    MP_CHECK_INT(fake_finish(queued), MP_OK);
    fake_end(registry);
}
