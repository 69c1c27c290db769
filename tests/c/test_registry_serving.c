/* A worker's loop (serve.c) on the test's thread: the order of requests, the accounts of flows, memory, and metrics.
 * The accounts are compared exactly with the measured durations of the steps. */
#include "base/sys.h"
#include "test_registry_scene.h"

static mp_ticket *queue(scene *scene, uint32_t units, mp_submit_options options) {
    mp_ticket *ticket = scene_ticket(scene, units, options);
    scene_queue(scene, ticket);
    return ticket;
}

static fake_call *call_of(mp_ticket *ticket) { return (fake_call *)mp_ticket_request(ticket); }

/* More urgent requests take all steps first, whatever service each request had before. */
MP_TEST(registry_serving_orders_active_requests_by_priority) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.plan_items = 1;
    scene.fake.step_units = 1;
    mp_worker *worker = scene_ready(&scene);
    static const uint8_t priorities[] = {4, 2, 0, 2};
    mp_ticket *tickets[4];
    for (int i = 0; i < 4; i++)
        tickets[i] = queue(&scene, 3, (mp_submit_options){.priority = priorities[i], .tenant = (uint32_t)i});
    scene_serve(&scene, worker);
    int step[4];
    for (int i = 0; i < 4; i++) {
        MP_CHECK_INT(mp_ticket_status(tickets[i], NULL), MP_OK);
        step[i] = call_of(tickets[i])->finished_step;
    }
    MP_CHECK_INT(step[2], 2);
    MP_CHECK_INT(step[1] > step[3] ? step[1] : step[3], 8);
    MP_CHECK_INT(step[0], 11);
    MP_CHECK_INT(worker->served, 4);
    scene_close(&scene);
}

/* Each request of a step has started when the step begins. */
MP_TEST(registry_serving_starts_every_request_of_a_step) {
    scene scene;
    mp_ticket *tickets[3];
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_worker *worker = scene_ready(&scene);
    for (int i = 0; i < 3; i++)
        tickets[i] = queue(&scene, 1, (mp_submit_options){0});
    uint64_t before = mp_sys_now_ns();
    scene_serve(&scene, worker);
    MP_CHECK_INT(scene.fake.steps, 1);
    for (int i = 0; i < 3; i++) {
        uint64_t started = atomic_load(&tickets[i]->started_ns);
        MP_CHECK(started >= before && started == atomic_load(&tickets[0]->started_ns));
    }
    scene_close(&scene);
}

/* Only a request that ended with MP_OK counts as completed; any other becomes the last error. */
MP_TEST(registry_serving_counts_completed_requests) {
    scene scene;
    mp_error error;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_fail(&error, MP_MODEL, "a failure");
    for (int i = 0; i < 3; i++) {
        mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0});
        ticket->state = MP_TICKET_ENDED;
        mp_entry_finish(scene.entry, ticket, i == 1 ? MP_OK : MP_MODEL, &error);
        MP_CHECK_INT(scene.entry->latency.count, i > 0);
        MP_CHECK_INT(scene.entry->last_error, MP_MODEL);
        MP_CHECK_INT(atomic_load(&scene.entry->errors), i < 2 ? 1 : 2);
    }
    scene_close(&scene);
}

/* Cancelling an active request wakes its worker only if the worker waits for masks: otherwise it is in a step. */
MP_TEST(registry_serving_cancel_wakes_a_worker_that_waits) {
    for (int waits = 0; waits < 2; waits++) {
        scene scene;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_worker *worker = scene_worker(&scene, MP_WORKER_PROCESSING);
        mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0});
        scene_activate(worker, ticket, MP_TICKET_ADMITTED);
        worker->awaits_masks = waits;
        MP_CHECK(!mp_entry_cancel_locked(scene.entry, ticket, MP_CANCELLED));
        MP_CHECK_INT(worker->woken, waits);
        worker->active_count = 0;
        scene_close(&scene);
    }
}

/* After a worker could not be started, no additional one starts for a second. */
MP_TEST(registry_serving_scales_a_second_later) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    uint64_t before = mp_sys_now_ns();
    mp_entry_scale_later(scene.entry);
    MP_CHECK(scene.entry->scale_ns >= before + FAKE_MS(1000));
    MP_CHECK(scene.entry->scale_ns <= mp_sys_now_ns() + FAKE_MS(1000));
    scene_close(&scene);
}

static int slot_of(const mp_worker *worker, int service_class, uint64_t tenant) {
    for (int i = 0; i < worker->flows.used; i++)
        if (worker->flows.slots[i].key == tenant && worker->flows.slots[i].group == service_class)
            return i;
    return -1;
}

/* Bulk work is charged four times its service, and virtual time advances by an equal weighted share. A flow that comes
 * late, for the first time or again, starts at virtual time. */
MP_TEST(registry_serving_charges_flows) {
    enum { WEIGHT = 4 };
    static const struct {
        int service_class;
        uint64_t tenant;
    } rows[] = {{MP_SERVICE_INTERACTIVE, 1}, {MP_SERVICE_BULK, 1},        {MP_SERVICE_INTERACTIVE, 2},
                {MP_SERVICE_INTERACTIVE, 1}, {MP_SERVICE_BULK, 1},        {MP_SERVICE_BULK, 2},
                {MP_SERVICE_INTERACTIVE, 2}, {MP_SERVICE_INTERACTIVE, 2}, {MP_SERVICE_BULK, 2}};
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.step_units = 1;
    scene.fake.step_ns = FAKE_MS(1) / 4;
    mp_worker *worker = scene_ready(&scene);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) { /* one request at a time */
        uint64_t virtual_ns = worker->virtual_ns, weight = rows[i].service_class == MP_SERVICE_BULK ? WEIGHT : 1;
        uint64_t step_ns = worker->step_ns, clock_ns = 0;
        const int known = slot_of(worker, rows[i].service_class, rows[i].tenant);
        if (known >= 0)
            clock_ns = worker->clock_ns[known];
        mp_ticket *ticket = queue(&scene, 3, (mp_submit_options){.service_class = (uint8_t)rows[i].service_class,
                                                                  .tenant = rows[i].tenant});
        uint64_t began_ns = mp_sys_now_ns();
        scene_serve(&scene, worker);
        MP_CHECK_INT(mp_ticket_status(ticket, NULL), MP_OK);
        uint64_t took = worker->step_ns - step_ns;
        MP_CHECK(took >= 3 * FAKE_MS(1) / 4 && took <= mp_sys_now_ns() - began_ns);
        int slot = slot_of(worker, rows[i].service_class, rows[i].tenant);
        MP_CHECK(slot >= 0);
        MP_CHECK_INT(ticket->had_ns, took);
        MP_CHECK_INT(ticket->virtual_ns, clock_ns + took);
        MP_CHECK_INT(worker->clock_ns[slot], clock_ns + took);
        MP_CHECK_INT(worker->flow_ns[slot], virtual_ns + weight * took);
        MP_CHECK_INT(worker->virtual_ns, virtual_ns + weight * took);
        MP_CHECK_INT(ticket->flow, -1);
        MP_CHECK_INT(worker->flows.slots[slot].users, 0);
    }
    scene_close(&scene);
}

/* Two flows in each step: an interactive and a bulk request of equal cost. */
MP_TEST(registry_serving_shares_steps_among_flows) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_worker *worker = scene_ready(&scene);
    scene.fake.step_ns = FAKE_MS(1) / 4;
    mp_ticket *tickets[3];
    for (int i = 0; i < 3; i++) /* two requests of the interactive flow */
        tickets[i] = queue(&scene, 6, (mp_submit_options){.service_class = i == 2, .tenant = 9});
    scene_serve(&scene, worker);
    MP_CHECK_INT(scene.fake.steps, 1);
    uint64_t took = worker->step_ns, share = (uint64_t)((double)took * (1.0 / 3));
    int interactive = slot_of(worker, MP_SERVICE_INTERACTIVE, 9), bulk = slot_of(worker, MP_SERVICE_BULK, 9);
    for (int i = 0; i < 3; i++)
        MP_CHECK_NEAR(tickets[i]->had_ns, share, 1);
    MP_CHECK_NEAR(worker->flow_ns[interactive], 2 * share, 2);
    MP_CHECK_NEAR(worker->flow_ns[bulk], 4 * share, 4);
    MP_CHECK_NEAR(worker->clock_ns[interactive], share, 2); /* an equal share for each of its two requests */
    MP_CHECK_NEAR(worker->clock_ns[bulk], share, 1);
    MP_CHECK_INT(worker->virtual_ns, took * 4 / 5);
    scene_close(&scene);
}

/* A request that expired in the queue is not served, even if the sweep is late. */
MP_TEST(registry_serving_ends_expired_requests) {
    scene scene;
    mp_error error;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_worker *worker = scene_ready(&scene);
    mp_ticket *late = queue(&scene, 1, (mp_submit_options){.deadline_ns = mp_sys_now_ns() - 1});
    mp_ticket *other = queue(&scene, 1, (mp_submit_options){.deadline_ns = fake_in_ms(60000)});
    scene_serve(&scene, worker);
    MP_CHECK_STATUS(mp_ticket_status(late, &error), MP_TIMEOUT, &error);
    MP_CHECK_INT(call_of(late)->starts, 0);
    MP_CHECK_INT(call_of(late)->finished, 0);
    MP_CHECK_INT(mp_ticket_status(other, &error), MP_OK);
    scene_close(&scene);
}

/* The victim of a preemption holds memory. A request that was cancelled before its admission holds none. */
MP_TEST(registry_serving_preempts_requests_that_hold_memory) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.memory = 2;
    scene.fake.step_units = 1;
    mp_worker *worker = scene_ready(&scene);
    mp_ticket *tickets[3];
    for (int i = 0; i < 3; i++) {
        tickets[i] = queue(&scene, 2, (mp_submit_options){.priority = 2});
        call_of(tickets[i])->memory = 1;
    }
    call_of(tickets[0])->memory_a_step = 1; /* its first step lacks memory */
    call_of(tickets[0])->units = 1;
    call_of(tickets[1])->units = 9;
    atomic_store(&tickets[2]->cause, MP_CANCELLED); /* between the check of the queue and its admission */
    scene_serve(&scene, worker);
    MP_CHECK_INT(mp_ticket_status(tickets[0], NULL), MP_OK);
    MP_CHECK_INT(mp_ticket_status(tickets[1], NULL), MP_OK);
    MP_CHECK_INT(mp_ticket_status(tickets[2], NULL), MP_CANCELLED);
    MP_CHECK_INT(call_of(tickets[2])->starts, 0);
    /* the second request was preempted twice: it is admitted again when the cancelled one has ended */
    MP_CHECK_INT(scene.fake.preempted, 2);
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_preemptions], 2);
    MP_CHECK_INT(call_of(tickets[0])->starts, 1);
    MP_CHECK_INT(call_of(tickets[1])->starts, 3);
    scene_close(&scene);
}

/* Every count of the work of steps goes to its own metric, once. */
MP_TEST(registry_serving_counts_work) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.work = (mp_step_work){
        .passes = 1, .rows = 30, .prefix_tokens = 500, .draft_tokens = 7000, .accepted_draft_tokens = 90000};
    scene.fake.step_units = 1;
    mp_worker *worker = scene_ready(&scene);
    for (int round = 1; round <= 2; round++) {
        queue(&scene, 3, (mp_submit_options){0});
        queue(&scene, 2, (mp_submit_options){0});
        scene_serve(&scene, worker);
        _Atomic uint64_t *metrics = scene.services->metrics;
        MP_CHECK_INT(metrics[MP_METRIC_passes], 3 * round);
        MP_CHECK_INT(metrics[MP_METRIC_rows], 3 * 30 * round);
        MP_CHECK_INT(scene.entry->rows, 3 * 30 * round);
        MP_CHECK_INT(metrics[MP_METRIC_prefix_tokens], 3 * 500 * round);
        MP_CHECK_INT(metrics[MP_METRIC_draft_tokens], 3 * 7000 * round);
        MP_CHECK_INT(metrics[MP_METRIC_accepted_draft_tokens], 3 * 90000 * round);
        MP_CHECK_INT(metrics[MP_METRIC_steps], 3 * round);
        MP_CHECK_INT(metrics[MP_METRIC_step_items], 5 * round);
        MP_CHECK_INT(metrics[MP_METRIC_batches_of_all], 3 * round);
        MP_CHECK_INT(metrics[MP_METRIC_batches_of_budget], 0);
        MP_CHECK_INT(metrics[MP_METRIC_completed], 2 * round);
        /* these requests count no input and no output */
        MP_CHECK(scene.entry->units_in == 0 && scene.entry->units_out == 0);
        MP_CHECK_INT(scene.entry->latency.count, 2 * round);
        MP_CHECK(scene.entry->pace > 0 && scene.entry->full_pace == 0); /* every step had room for all */
    }
    scene.fake.plan_items = 1; /* a step has no room for the second request */
    queue(&scene, 1, (mp_submit_options){0});
    queue(&scene, 1, (mp_submit_options){0});
    scene_serve(&scene, worker);
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_batches_of_budget], 1);
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_batches_of_all], 7);
    MP_CHECK(scene.entry->full_pace > 0);
    scene_close(&scene);
}

/* The engine is trimmed once for each time that a request has left, not for each refusal. */
MP_TEST(registry_serving_trims_again_after_a_request_has_left) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.memory = 1;
    mp_worker *worker = scene_ready(&scene);
    for (int i = 0; i < 3; i++)
        call_of(queue(&scene, 1, (mp_submit_options){0}))->memory = 1;
    scene_serve(&scene, worker);
    for (int i = 0; i < 3; i++)
        MP_CHECK_INT(mp_ticket_status(scene.tickets[i], NULL), MP_OK);
    MP_CHECK_INT(scene.fake.trims, 2); /* for the second request while the first ran, for the third while the second */
    MP_CHECK_INT(scene.fake.steps, 3);
    scene_close(&scene);
}

static mp_engine_ops changed_ops;
static fake *changed_fake;

/* Lets the test replace functions of the worker's engine. */
static mp_engine_ops *change(scene *scene, mp_worker *worker) {
    changed_ops = *worker->engine->ops;
    worker->engine->ops = &changed_ops;
    changed_fake = &scene->fake;
    return &changed_ops;
}

static uint64_t trim_to_two(mp_engine *engine) {
    (void)engine;
    changed_fake->trims++;
    changed_fake->memory = 2;
    return 1;
}

/* An engine that frees memory when it is trimmed admits the request, or repeats the step, at once. */
MP_TEST(registry_serving_uses_what_a_trim_frees) {
    for (int in_step = 0; in_step < 2; in_step++) {
        scene scene;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        scene.fake.memory = 1;
        mp_worker *worker = scene_ready(&scene);
        change(&scene, worker)->trim = trim_to_two;
        fake_call *call = call_of(queue(&scene, 1, (mp_submit_options){0}));
        call->memory = 2 - in_step;
        call->memory_a_step = in_step;
        scene_serve(&scene, worker);
        MP_CHECK_INT(mp_ticket_status(scene.tickets[0], NULL), MP_OK);
        MP_CHECK_INT(scene.fake.trims, 1);
        MP_CHECK_INT(scene.fake.steps, 1 + in_step);
        MP_CHECK_INT(scene.fake.preempted, 0);
        scene_close(&scene);
    }
}

static const mp_engine_ops *real_ops;
static int plans;

static void check_plan(mp_engine *engine, mp_item **items, int n, uint64_t budget_ns, mp_plan *plan) {
    MP_CHECK(plan->count == 0 && plan->threads == 1 && plan->cost_ns == 0 && !plan->masks && !plan->barrier_bound);
    real_ops->plan(engine, items, n, budget_ns, plan);
    plan->threads = 2;
    plan->barrier_bound = true;
    plans++;
}

/* An engine fills in an empty plan for one thread, whatever the last plan was. */
MP_TEST(registry_serving_starts_with_an_empty_plan) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.step_units = 1;
    mp_worker *worker = scene_ready(&scene);
    real_ops = worker->engine->ops;
    change(&scene, worker)->plan = check_plan;
    plans = 0;
    queue(&scene, 3, (mp_submit_options){0});
    scene_serve(&scene, worker);
    MP_CHECK_INT(plans, 3);
    scene_close(&scene);
}

static void fail_silently(mp_engine *engine, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    (void)engine, (void)lease;
    for (int i = 0; i < plan->count; i++)
        outcomes[i] = MP_OUTCOME_FAILED;
}

static mp_status load_silently(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                               mp_model **model, mp_error *error) {
    (void)self, (void)lease, (void)budget, (void)progress, (void)model, (void)error;
    return MP_IO;
}

static int failed_steps;

static void fail_with_a_reason_first(mp_engine *engine, mp_lease *lease, const mp_plan *plan, mp_outcome *outcomes) {
    fail_silently(engine, lease, plan, outcomes);
    if (failed_steps++ == 0)
        mp_fail(&plan->items[0]->error, MP_MODEL, "the first failure");
}

/* The error of a request is that of its last step, not that of an earlier one. */
MP_TEST(registry_serving_forgets_the_error_of_a_retried_step) {
    scene scene;
    mp_error error;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_worker *worker = scene_ready(&scene);
    change(&scene, worker)->step = fail_with_a_reason_first;
    failed_steps = 0;
    mp_ticket *ticket = queue(&scene, 1, (mp_submit_options){0});
    scene_serve(&scene, worker);
    MP_CHECK_INT(failed_steps, 2);
    MP_CHECK_INT(mp_ticket_status(ticket, &error), MP_MODEL);
    MP_CHECK_STR(error.message, "a: the model failed in a step and gave no reason");
    scene_close(&scene);
}

/* A step or a load that fails without a reason has an error that names the model. */
MP_TEST(registry_serving_names_failures_without_a_reason) {
    scene scene;
    mp_error error;
    char expected[128];
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_worker *worker = scene_ready(&scene);
    change(&scene, worker)->step = fail_silently;
    mp_ticket *ticket = queue(&scene, 1, (mp_submit_options){0});
    scene_serve(&scene, worker);
    MP_CHECK_INT(mp_ticket_status(ticket, &error), MP_MODEL);
    MP_CHECK_STR(error.message, "a: the model failed in a step and gave no reason");
    mp_resident_unpin(scene.entry->resident);
    scene.entry->resident = NULL;
    scene.entry->worker_count = 0;
    scene_hook_loader(&scene);
    scene.loader_ops.load = load_silently;
    MP_CHECK(!mp_worker_start(scene_worker(&scene, MP_WORKER_SPAWNING)));
    snprintf(expected, sizeof expected, "a: %s", mp_status_find(MP_IO)->text);
    MP_CHECK_STR(scene.entry->failure.message, expected);
    scene_close(&scene);
}

/* A request that was cancelled after it was taken, and that would return to the queue because an earlier one found no
 * memory, ends at once. */
MP_TEST(registry_serving_ends_cancelled_requests_that_were_not_admitted) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.memory = 1;
    scene.fake.step_units = 1;
    mp_worker *worker = scene_ready(&scene);
    mp_ticket *tickets[3];
    for (int i = 0; i < 3; i++) {
        tickets[i] = queue(&scene, 2, (mp_submit_options){0});
        call_of(tickets[i])->memory = 1;
    }
    atomic_store(&tickets[2]->cause, MP_CANCELLED);
    scene_serve(&scene, worker);
    for (int i = 0; i < 3; i++) {
        MP_CHECK_INT(tickets[i]->state, MP_TICKET_ENDED);
        MP_CHECK_INT(mp_ticket_status(tickets[i], NULL), i < 2 ? MP_OK : MP_CANCELLED);
        MP_CHECK_INT(call_of(tickets[i])->starts, i < 2);
    }
    MP_CHECK_INT(scene.entry->queue.count, 0);
    scene_close(&scene);
}

/* A step with an internal error ends the worker. Its requests return to the queue, and the memory that they held lets
 * other workers admit requests again. A request that waited for memory in that step has made no progress. */
MP_TEST(registry_serving_returns_requests_of_a_faulty_step) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    scene.fake.memory = 1;
    mp_worker *worker = scene_ready(&scene), *other = scene_worker(&scene, MP_WORKER_IDLE);
    mp_ticket *grows = queue(&scene, 2, (mp_submit_options){0}), *faulty = queue(&scene, 2, (mp_submit_options){0});
    call_of(grows)->memory = call_of(grows)->memory_a_step = 1;
    call_of(faulty)->faults = 1;
    call_of(faulty)->fault = MP_INTERNAL;
    other->memory = MP_MEMORY_TIGHT;
    scene_serve(&scene, worker);
    MP_CHECK_INT(worker->fault.code, MP_INTERNAL);
    MP_CHECK(other->memory != MP_MEMORY_TIGHT);
    MP_CHECK_INT(scene.entry->queue.count, 2);
    MP_CHECK(grows->state == MP_TICKET_QUEUED && faulty->state == MP_TICKET_QUEUED);
    MP_CHECK_INT(grows->progress, 0);
    MP_CHECK_INT(faulty->progress, 0);
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_retries], 2);
    scene_close(&scene);
}

static mp_error loss;

static const mp_error *lost(mp_engine *engine) {
    (void)engine;
    return &loss;
}

/* A worker whose process ended while the worker was idle leaves without taking a request. */
MP_TEST(registry_serving_takes_nothing_with_a_lost_engine) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000 * 1000);
    mp_worker *worker = scene_ready(&scene);
    mp_fail(&loss, MP_RECV, "the process has ended");
    worker->engine->lost = lost;
    mp_ticket *ticket = queue(&scene, 1, (mp_submit_options){0});
    scene_serve(&scene, worker);
    MP_CHECK_INT(worker->fault.code, MP_RECV);
    MP_CHECK(worker->leave);
    MP_CHECK_INT(ticket->state, MP_TICKET_QUEUED);
    MP_CHECK_INT(ticket->retry_between, MP_RETRY_UNUSED);
    MP_CHECK_INT(call_of(ticket)->starts, 0);
    scene_close(&scene);
}

static void serve(void *worker) { mp_worker_serve(worker); }

/* A worker that becomes idle announces the end of its keep-alive to the maintenance thread, if it has an end. */
MP_TEST(registry_serving_announces_the_end_of_the_keep_alive) {
    for (int endless = 0; endless < 2; endless++) {
        scene scene;
        mp_error error;
        mp_thread thread;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        mp_maintenance *maintenance = &scene.services->maintenance;
        maintenance->running = true; /* announcing a sweep starts no thread */
        atomic_store(&maintenance->next_ns, UINT64_MAX);
        mp_entry *entry = scene.entry;
        mp_worker *worker = scene_ready(&scene);
        worker->idle_since_ns = mp_sys_now_ns();
        entry->keep_alive_ns = endless ? MP_FOREVER : FAKE_MS(50000);
        mp_worker_set_runnable(worker, true);
        MP_CHECK_OK(mp_thread_start(&thread, "serves", serve, worker, &error), &error);
        for (bool runnable = true; runnable;) { /* it announces the end right after this change */
            mp_mutex_lock(&entry->lock);
            runnable = worker->runnable;
            worker->leave = !runnable;
            if (!runnable)
                mp_worker_wake(worker);
            mp_mutex_unlock(&entry->lock);
            mp_sys_sleep_ns(FAKE_MS(1) / 4);
        }
        mp_thread_join(&thread);
        MP_CHECK(maintenance->next_ns == (endless ? UINT64_MAX : worker->idle_since_ns + FAKE_MS(50000)));
        maintenance->running = false;
        scene_close(&scene);
    }
}

/* A step finds no memory because another model loads. The load ends before the worker asks whether memory may become
 * free: the request takes its step again and is not refused. */
MP_TEST(registry_serving_memory_of_a_load_that_ends_meanwhile) {
    scene scene;
    mp_guard other;
    scene_open(&scene, "a", NULL, 1000000);
    mp_worker *worker = scene_ready(&scene);
    mp_ticket *ticket = queue(&scene, 1, (mp_submit_options){0});
    call_of(ticket)->memory_a_step = 600000;
    MP_CHECK(mp_governor_try_reserve(scene.services->governor, 900000, &other));
    scene.fake.other_load = &other;
    scene_serve(&scene, worker);
    MP_CHECK_INT(mp_ticket_status(ticket, NULL), MP_OK);
    scene_close(&scene);
}
