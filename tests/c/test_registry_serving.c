/* A worker's loop (serve.c) on the test's thread: the order of requests, the accounts of flows, and metrics. The
 * accounts are compared exactly with the measured durations of the steps. */
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

/* A request that finds no memory in a step, and is the only active one, gets memory of queued requests: the outputs of
 * those that have not begun are freed and made again later; those that have begun run first. A request that would not
 * fit alone fails, and the others do not. */
MP_TEST(registry_serving_memory_of_queued_requests) {
    enum { LIMIT = 1000000, OTHERS = 4, OUTPUTS = 130000 };
    static const struct {
        int needs, plan_items;
        uint32_t other_units;
        mp_status status;
    } cases[] = {{500000, 1, 1, MP_OK}, {500000, 0, 20, MP_OK}, {900000, 1, 1, MP_OK}, {900000, 0, 20, MP_OK},
                 {1100000, 1, 1, MP_MEMORY_EXHAUSTED}, {1100000, 0, 20, MP_MEMORY_EXHAUSTED}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        scene scene;
        mp_guard none = {0};
        mp_ticket *others[OTHERS];
        scene_open(&scene, "a", NULL, LIMIT);
        scene.fake.step_units = 1;
        scene.fake.plan_items = cases[c].plan_items;
        scene.fake.other_load = &none; /* growth is charged to the budget */
        mp_worker *worker = scene_ready(&scene);
        mp_ticket *ticket = queue(&scene, 1, (mp_submit_options){0});
        call_of(ticket)->memory_a_step = cases[c].needs;
        for (int i = 0; i < OTHERS; i++) {
            others[i] = queue(&scene, cases[c].other_units, (mp_submit_options){.priority = 2});
            call_of(others[i])->outputs = OUTPUTS;
        }
        scene_serve(&scene, worker);
        MP_CHECK_INT(mp_ticket_status(ticket, NULL), cases[c].status);
        for (int i = 0; i < OTHERS; i++)
            MP_CHECK_INT(mp_ticket_status(others[i], NULL), MP_OK);
        MP_CHECK_INT(scene.entry->yielding, 0);
        scene_close(&scene);
    }
}

/* Requests that let others run first try again when one has ended, and let others run first again. Meanwhile, requests
 * that have not begun do not take the memory. */
MP_TEST(registry_serving_yields_again_after_each_end) {
    enum { A, B, C, NEW, COUNT, OUTPUTS = 100000 };
    /* With the outputs of A to C, only C fits. Without those of C, only B fits. */
    static const int needs[COUNT] = {[A] = 850000, [B] = 750000, [C] = 100000};
    scene scene;
    mp_guard none = {0};
    mp_ticket *tickets[COUNT];
    scene_open(&scene, "a", NULL, 1000000);
    scene.fake.step_units = 1;
    scene.fake.plan_items = 3;
    scene.fake.other_load = &none; /* growth is charged to the budget */
    mp_worker *worker = scene_ready(&scene);
    for (int i = 0; i < COUNT; i++) {
        tickets[i] = queue(&scene, i == C ? 6 : 1, (mp_submit_options){.priority = i == A ? 0 : 2});
        call_of(tickets[i])->memory_a_step = needs[i];
        call_of(tickets[i])->outputs = OUTPUTS;
    }
    scene_serve(&scene, worker);
    for (int i = 0; i < COUNT; i++)
        MP_CHECK_INT(mp_ticket_status(tickets[i], NULL), MP_OK);
    MP_CHECK(call_of(tickets[C])->finished_step < call_of(tickets[B])->finished_step);
    MP_CHECK(call_of(tickets[B])->finished_step < call_of(tickets[A])->finished_step);
    MP_CHECK(call_of(tickets[A])->finished_step < call_of(tickets[NEW])->finished_step);
    scene_close(&scene);
}

/* A step that fails for lack of memory is as one that waits for it: it uses up no retry while others can make room. */
MP_TEST(registry_serving_memory_of_failed_steps) {
    scene scene;
    scene_open(&scene, "a", NULL, 1000000);
    scene.fake.plan_items = 1;
    mp_worker *worker = scene_ready(&scene);
    mp_ticket *first = queue(&scene, 1, (mp_submit_options){.priority = 0});
    mp_ticket *second = queue(&scene, 1, (mp_submit_options){.priority = 2});
    call_of(first)->faults = 2; /* the first preempts `second`, the second frees its outputs */
    call_of(first)->fault = MP_MEMORY_EXHAUSTED;
    call_of(second)->outputs = 1000;
    scene_serve(&scene, worker);
    MP_CHECK_INT(mp_ticket_status(first, NULL), MP_OK);
    MP_CHECK_INT(mp_ticket_status(second, NULL), MP_OK);
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_preemptions], 1);
    MP_CHECK_INT(scene.services->metrics[MP_METRIC_retries], 0);
    scene_close(&scene);
}
