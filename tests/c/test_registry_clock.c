/* Times of an entry, its workers and its callers on a made-up clock (clock_fixture.h). */
#include "base/sys.h"

#ifdef MP_SEAM

#include "clock_fixture.h"

static mp_error error;

/* --- workers --- */

static void queue_one(scene *scene) { scene_queue(scene, scene_ticket(scene, 1, (mp_submit_options){0})); }

/* After a worker did not start, no additional one starts for a second; after a death, none before the backoff ends. */
MP_TEST(registry_clock_additional_workers) {
    for (int death = 0; death < 2; death++) {
        scene scene;
        mp_guard guard;
        open_scene(&scene);
        mp_entry *entry = scene.entry;
        scene_load(&scene);
        mp_worker *worker = scene_worker(&scene, MP_WORKER_PROCESSING);
        mp_budget *budget = mp_governor_budget(scene.services->governor);
        uint64_t left = atomic_load(&budget->limit) - atomic_load(&budget->used), again = clock_ns + SECOND;
        worker->engine_bytes = 100;
        queue_one(&scene);
        if (death) {
            again = entry->spawn_ns = clock_ns + 1234;
        } else {
            MP_CHECK(mp_budget_take(budget, left));
            MP_CHECK(!mp_dispatch_scale(entry, &guard));
            MP_CHECK_INT(entry->scale_ns, again);
            mp_budget_give(budget, left);
        }
        clock_ns = again - 1;
        MP_CHECK(!mp_dispatch_scale(entry, &guard));
        clock_ns = again;
        MP_CHECK(mp_dispatch_scale(entry, &guard));
        MP_CHECK_INT(guard.bytes, 100);
        mp_guard_release(&guard);
        close_scene(&scene);
    }
}

static mp_worker *waiting;

static void tell_to_leave(void) { waiting->leave = true; }

/* Runs the worker up to its first wait, which tells it to leave. Returns the length of the wait; 0: no limit. */
static uint64_t first_wait(mp_worker *worker) {
    waiting = worker;
    waiting->leave = false;
    wait_count = 0;
    in_wait = tell_to_leave;
    mp_worker_serve(worker);
    in_wait = NULL;
    MP_CHECK_INT(wait_count, 1);
    return waits[0];
}

/* An idle worker checks every second whether its engine exists, and ends a refusal of memory when it is over. */
MP_TEST(registry_clock_idle_workers) {
    for (int never_lost = 0; never_lost < 2; never_lost++) {
        scene scene;
        open_scene(&scene);
        scene.fake.never_lost = never_lost;
        mp_worker *worker = scene_ready(&scene);
        MP_CHECK_INT(first_wait(worker), never_lost ? 0 : SECOND);
        worker->retry_ns = clock_ns + 7;
        worker->memory = MP_MEMORY_TIGHT;
        MP_CHECK_INT(first_wait(worker), 7);
        MP_CHECK(worker->memory == MP_MEMORY_TRIMMED && worker->retry_ns == 0); /* the time has come */
        worker->retry_ns = clock_ns + 2 * SECOND;
        MP_CHECK_INT(first_wait(worker), never_lost ? 2 * SECOND : SECOND);
        close_scene(&scene);
    }
}

/* An idle worker waits for a batch until the first request has waited for the configured time, and not longer. */
MP_TEST(registry_clock_batches) {
    scene scene;
    open_scene(&scene);
    scene.services->batch_wait_ns = 2 * MS;
    mp_worker *worker = scene_ready(&scene);
    queue_one(&scene);
    clock_ns += MS / 2;
    MP_CHECK_INT(first_wait(worker), 3 * MS / 2);
    MP_CHECK_INT(scene.fake.steps, 0); /* it left instead */
    worker->leave = false;
    scene_serve(&scene, worker); /* now the time is over */
    MP_CHECK_INT(scene.fake.steps, 1);
    close_scene(&scene);
}

static scene *served;

static void queue_another(void) {
    if (served->ticket_count == 1)
        queue_one(served);
}

/* A worker that has active requests takes new ones at once: the next step is the larger batch. */
MP_TEST(registry_clock_batches_of_busy_workers) {
    scene scene;
    open_scene(&scene);
    scene.services->batch_wait_ns = 2 * MS;
    atomic_store(&scene.fake.step_units, 1);
    atomic_store(&scene.fake.step_ns, MS / 4);
    mp_worker *worker = scene_ready(&scene);
    scene_queue(&scene, scene_ticket(&scene, 2, (mp_submit_options){0}));
    clock_ns += 2 * MS;
    served = &scene;
    in_wait = queue_another; /* in the first step */
    scene_serve(&scene, worker);
    MP_CHECK_INT(scene.fake.steps, 2);
    MP_CHECK_INT(scene.ticket_count, 2);
    close_scene(&scene);
}

static uint64_t eta_in_step;

static void read_eta(void) {
    if (wait_count == 1)
        mp_ticket_position(served->tickets[0], &eta_in_step);
}

/* A request that was queued while its model was not loaded gets its predicted cost when a worker admits it. */
MP_TEST(registry_clock_cost_of_a_cold_request) {
    scene scene;
    open_scene(&scene);
    mp_worker *worker = scene_ready(&scene);
    scene.entry->pace = 2;
    atomic_store(&scene.fake.step_ns, 10 * MS);
    scene_queue(&scene, scene_ticket(&scene, 7, (mp_submit_options){0}));
    served = &scene;
    in_wait = read_eta;
    scene_serve(&scene, worker);
    /* 7 units of 1 ms at a pace of 2, less the first 0.25 ms of the step */
    MP_CHECK_INT(eta_in_step, 2 * 7 * MS - MS / 4);
    close_scene(&scene);
}

static uint64_t retry_in_step;

static void read_retry(void) {
    if (wait_count > 1)
        return;
    MP_CHECK_INT(served->workers[0]->memory, MP_MEMORY_TIGHT);
    retry_in_step = served->workers[0]->retry_ns;
}

/* A worker that found no memory for a request, while it holds memory itself, waits for one of its own requests. If only
 * another worker holds memory, it tries again after 20 ms. */
MP_TEST(registry_clock_memory_of_own_requests) {
    for (int admitted = 0; admitted < 3; admitted++) {
        scene scene;
        open_scene(&scene);
        scene.fake.memory = admitted ? admitted : 1;
        mp_worker *worker = scene_ready(&scene);
        atomic_store(&scene.fake.step_ns, MS);
        for (int i = 0; i <= admitted; i++) {
            scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){0}));
            ((fake_call *)mp_ticket_request(scene.tickets[i]))->memory = admitted ? 1 : 2;
        }
        served = &scene;
        if (admitted) {
            in_wait = read_retry;
            scene_serve(&scene, worker);
            MP_CHECK_INT(retry_in_step, 0);
        } else {
            mp_worker *other = scene_worker(&scene, MP_WORKER_PROCESSING);
            scene_activate(other, scene_ticket(&scene, 1, (mp_submit_options){0}), MP_TICKET_ADMITTED);
            MP_CHECK_INT(first_wait(worker), 20 * MS);
            MP_CHECK_INT(scene.fake.steps, 0);
            MP_CHECK_INT(scene.tickets[0]->state, MP_TICKET_QUEUED);
        }
        close_scene(&scene);
    }
}

/* A request that never fits ends, and leaves no trace of its lack of memory in the worker. */
MP_TEST(registry_clock_request_that_never_fits) {
    scene scene;
    open_scene(&scene);
    scene.fake.memory = 1;
    mp_worker *worker = scene_ready(&scene);
    scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){0}));
    ((fake_call *)mp_ticket_request(scene.tickets[0]))->memory_a_step = 2;
    scene_serve(&scene, worker);
    MP_CHECK_INT(mp_ticket_status(scene.tickets[0], NULL), MP_MEMORY_EXHAUSTED);
    MP_CHECK(worker->retry_ns == 0 && worker->memory == MP_MEMORY_AMPLE);
    MP_CHECK_INT(scene.fake.preempted, 0);
    close_scene(&scene);
}

/* The requests of a step share its time by the amounts of work that the engine planned. */
MP_TEST(registry_clock_shares_of_a_step) {
    scene scene;
    open_scene(&scene);
    mp_worker *worker = scene_ready(&scene);
    atomic_store(&scene.fake.step_ns, 8 * MS);
    scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){0}));
    scene_queue(&scene, scene_ticket(&scene, 3, (mp_submit_options){.service_class = MP_SERVICE_BULK}));
    scene_serve(&scene, worker);
    MP_CHECK_INT(scene.fake.steps, 1);
    MP_CHECK_INT(scene.tickets[0]->had_ns, 2 * MS);
    MP_CHECK_INT(scene.tickets[1]->had_ns, 6 * MS);
    close_scene(&scene);
}

static void queue_of_tenant_one(void) {
    if (served->fake.steps == 7 && served->ticket_count == 2)
        scene_queue(served, scene_ticket(served, 1, (mp_submit_options){.tenant = 1, .priority = 4}));
}

/* A tenant that has had more than its share does not get a new share with a new request. */
MP_TEST(registry_clock_new_requests_of_a_tenant) {
    scene scene;
    open_scene(&scene);
    scene.fake.plan_items = 1;
    scene.fake.step_units = 1;
    atomic_store(&scene.fake.step_ns, MS);
    mp_worker *worker = scene_ready(&scene);
    scene_queue(&scene, scene_ticket(&scene, 8, (mp_submit_options){.tenant = 1, .priority = 0}));
    scene_queue(&scene, scene_ticket(&scene, 7, (mp_submit_options){.tenant = 2, .priority = 4}));
    served = &scene;
    in_wait = queue_of_tenant_one;
    scene_serve(&scene, worker);
    MP_CHECK_INT(scene.ticket_count, 3);
    for (int i = 0; i < 3; i++) {
        static const int last_steps[] = {7, 14, 15};
        fake_call *call = (fake_call *)mp_ticket_request(scene.tickets[i]);
        MP_CHECK_INT(call->finished_step, last_steps[i]);
    }
    close_scene(&scene);
}

/* A request that expires at the time of a sweep needs no further sweep, and one that expires later needs one then. */
MP_TEST(registry_clock_sweep_of_a_request) {
    scene scene;
    open_scene(&scene);
    scene.entry->keep_alive_ns = MP_FOREVER;
    scene_worker(&scene, MP_WORKER_PROCESSING);
    scene_queue(&scene, scene_ticket(&scene, 1, (mp_submit_options){.deadline_ns = clock_ns + 10}));
    MP_CHECK_INT(mp_entry_sweep(scene.entry, clock_ns), clock_ns + 10);
    clock_ns += 9;
    MP_CHECK_INT(mp_entry_sweep(scene.entry, clock_ns), clock_ns + 1);
    clock_ns++;
    MP_CHECK_INT(mp_entry_sweep(scene.entry, clock_ns), UINT64_MAX);
    MP_CHECK_INT(mp_ticket_status(scene.tickets[0], NULL), MP_TIMEOUT);
    close_scene(&scene);
}

/* The idle time of a worker begins when it becomes ready or idle, and no other state changes it. */
MP_TEST(registry_clock_idle_time_of_states) {
    static const mp_worker_state states[] = {MP_WORKER_LOADING, MP_WORKER_READY, MP_WORKER_PROCESSING, MP_WORKER_IDLE,
                                             MP_WORKER_EVICTING};
    scene scene;
    mp_entry_info info;
    open_scene(&scene);
    mp_worker *worker = scene_worker(&scene, MP_WORKER_SPAWNING);
    uint64_t since = worker->idle_since_ns;
    for (int i = 0; i < 5; i++) {
        clock_ns += 1000;
        mp_worker_set_state(worker, states[i]);
        if (i == 1 || i == 3)
            since = clock_ns;
        MP_CHECK_INT(worker->idle_since_ns, since);
    }
    mp_entry_describe(scene.entry, &info);
    MP_CHECK_INT(info.idle_ns, 1000);
    close_scene(&scene);
}

/* An idle worker announces the end of its keep-alive to the maintenance thread, or a check after 1 ms while memory is
 * critical. */
MP_TEST(registry_clock_announced_checks) {
    for (int critical = 0; critical < 2; critical++)
        for (int keep_us = 500; keep_us <= 1500; keep_us += 1000) {
            scene scene;
            open_scene(&scene);
            mp_maintenance *maintenance = &scene.services->maintenance;
            mp_budget *budget = mp_governor_budget(scene.services->governor);
            scene.entry->keep_alive_ns = (uint64_t)keep_us * 1000;
            mp_worker *worker = scene_ready(&scene);
            worker->idle_since_ns = clock_ns - 3;
            MP_CHECK(mp_budget_take(budget, critical ? 850000 : 1));
            maintenance->running = true; /* no thread starts */
            atomic_store(&maintenance->next_ns, UINT64_MAX);
            uint64_t now = clock_ns;
            first_wait(worker);
            MP_CHECK_INT(atomic_load(&maintenance->next_ns) - now + 3,
                         critical && keep_us > 1000 ? MS : (uint64_t)keep_us * 1000);
            maintenance->running = false;
            atomic_store(&maintenance->next_ns, 0);
            mp_budget_give(budget, critical ? 850000 : 1);
            close_scene(&scene);
        }
}

/* The pace of a model, where a step counts for at most four times the mean, and the times of worker and request. */
MP_TEST(registry_clock_steps) {
    scene scene;
    open_scene(&scene);
    mp_worker *worker = scene_ready(&scene);
    static const uint64_t step_ms[] = {2, 6, 10, 100};
    double pace = 0;
    uint64_t sum = 0;
    for (int i = 0; i < 4; i++) {
        mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0}); /* the plan predicts 1 ms */
        scene_queue(&scene, ticket);
        mp_ticket_pin(ticket);
        atomic_store(&scene.fake.step_ns, step_ms[i] * MS);
        uint64_t submitted, started, finished, now = clock_ns;
        worker->leave = false;
        scene_serve(&scene, worker);
        double sample = (double)step_ms[i];
        if (i == 0)
            pace = sample;
        pace += ((sample < 4 * pace ? sample : 4 * pace) - pace) / 16;
        sum += step_ms[i] * MS;
        MP_CHECK(scene.entry->pace == pace);
        MP_CHECK(scene.entry->full_pace == 0); /* every request had room */
        MP_CHECK_INT(worker->step_ns, sum);
        MP_CHECK_INT(scene.entry->latency.sum_ns, sum);
        MP_CHECK_INT(scene.entry->latency.max_ns, step_ms[i] * MS);
        MP_CHECK_INT(ticket->had_ns, step_ms[i] * MS);
        mp_ticket_times(ticket, &submitted, &started, &finished);
        MP_CHECK_INT(submitted, now);
        MP_CHECK_INT(started, now);
        MP_CHECK_INT(finished, now + step_ms[i] * MS);
        mp_ticket_release(ticket);
    }
    close_scene(&scene);
}

/* --- loads --- */

typedef struct other_cpus {
    mp_lease lease;
    mp_core_lease cores;
} other_cpus;

/* Leases all CPUs of the scene but one. More CPUs would start threads, which also wait on this clock. */
static void leave_one_cpu(scene *scene, other_cpus *others) {
    MP_CHECK(mp_cpu_allocator_lend(scene->services->allocator, 0, 3, &others->lease, &others->cores, NULL, NULL));
}

static void return_cpus(scene *scene, other_cpus *others) {
    mp_cpu_allocator_return(scene->services->allocator, &others->lease, &others->cores, false);
}

static mp_worker *loading;
static int seen_outside, seen_unsafe; /* locks of the allocator while the load holds no threads; without `moving` */
static bool footprint_safe, load_watched, engine_watched;
static const mp_loader_ops *loader_ops;
static const mp_model_ops *model_ops;

static void watched_footprint(void *self, uint64_t *model, uint64_t *engine) {
    footprint_safe = loading->moving;
    loader_ops->footprint(self, model, engine);
}

static mp_status watched_engine(mp_model *model, mp_budget *budget, mp_engine **engine, mp_error *failure) {
    engine_watched = !loading->moving;
    return model_ops->engine(model, budget, engine, failure);
}

static mp_status watched_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress, mp_model **model,
                              mp_error *failure) {
    static mp_model_ops ops;
    load_watched = !loading->moving && loading->threads == 1;
    mp_status status = loader_ops->load(self, lease, budget, progress, model, failure);
    model_ops = (*model)->ops;
    ops = *model_ops;
    ops.engine = watched_engine;
    (*model)->ops = &ops;
    return status;
}

static void watch_lock(pthread_mutex_t *mutex) {
    if (loading && loading->state == MP_WORKER_LOADING && !loading->threads &&
        strstr(mp_seam_at.file, "cpu_allocator.c")) {
        seen_outside++;
        seen_unsafe += !loading->moving;
    }
    pthread_mutex_lock(mutex);
}

/* While a load takes and returns its CPUs, it must not be abandoned: its caller could not know which CPUs it holds. At
 * all other times it may be. */
MP_TEST(registry_clock_loads) {
    scene scene;
    open_scene(&scene);
    mp_entry *entry = scene.entry;
    mp_log_set_level(MP_LOG_INFO);
    scene.fake.model_bytes = 12300 * 1000;
    atomic_store(&mp_governor_budget(scene.services->governor)->limit, 20000 * 1000);
    loader_ops = scene_hook_loader(&scene);
    scene.loader_ops.footprint = watched_footprint;
    scene.loader_ops.load = watched_load;
    scene.services->max_workers = 1;
    scene.services->load_timeout_ns = SECOND;
    atomic_store(&scene.fake.load_ns, 30 * MS);
    other_cpus others;
    leave_one_cpu(&scene, &others);
    loading = scene_worker(&scene, MP_WORKER_SPAWNING);
    seen_outside = seen_unsafe = 0;
    footprint_safe = load_watched = engine_watched = false;
    mp_sys_table.mutex_lock = watch_lock;
    MP_CHECK(mp_worker_start(loading));
    MP_CHECK(footprint_safe && load_watched && engine_watched);
    MP_CHECK(seen_outside > 1);
    MP_CHECK_INT(seen_unsafe, 0);
    MP_CHECK(!loading->moving);
    MP_CHECK_INT(entry->resident->load_ns, 30 * MS);
    MP_CHECK_INT(loading->idle_since_ns, clock_ns);
    expect_record("Loaded a in 0.030 s (12.3 MB)");
    MP_CHECK_INT(entry->loads, 1);
    loading = NULL;
    return_cpus(&scene, &others);
    close_scene(&scene);
}

static mp_guard all_memory;
static const char *waited_in;
static uint64_t beat_of_wait;

static void give_memory(void) {
    waited_in = waiting->progress.stage;
    beat_of_wait = waiting->progress.beat_ns;
    mp_guard_release(&all_memory);
}

/* The time in which a load waits for memory is not timed: not for a model, nor for a further engine. */
MP_TEST(registry_clock_wait_of_a_load) {
    for (int loaded = 0; loaded < 2; loaded++) {
        scene scene;
        other_cpus others;
        open_scene(&scene);
        leave_one_cpu(&scene, &others);
        scene.services->max_workers = 1;
        if (loaded)
            scene_load(&scene);
        queue_one(&scene); /* the load is wanted */
        waiting = scene_worker(&scene, MP_WORKER_SPAWNING);
        MP_CHECK(mp_governor_try_reserve(scene.services->governor, 990000, &all_memory));
        scene.fake.engine_bytes = 20000;
        waited_in = NULL;
        in_wait = give_memory;
        MP_CHECK(mp_worker_start(waiting));
        EXPECT_WAITS(20 * MS);
        MP_CHECK_STR(waited_in, "waiting for memory");
        MP_CHECK_INT(beat_of_wait, 0);
        return_cpus(&scene, &others);
        close_scene(&scene);
    }
}

static int preferred[8], preferred_count;

static void note_preferred(void *memory, size_t bytes, int node) {
    (void)memory, (void)bytes;
    MP_CHECK(preferred_count < 8);
    preferred[preferred_count++] = node;
}

static mp_status allocating_load(void *self, mp_lease *lease, mp_budget *budget, mp_progress *progress,
                                 mp_model **model, mp_error *failure) {
    (void)self, (void)lease, (void)budget, (void)progress, (void)model;
    mp_free(mp_alloc(1 << 20, MP_TAG_KV));
    return mp_fail(failure, MP_IO, "this load only allocates");
}

/* Each worker's thread allocates on the node of the worker, and on no certain node after the worker has ended. */
MP_TEST(registry_clock_memory_of_a_node) {
    scene scene;
    mp_topology topology = {.node_count = 2};
    open_scene(&scene);
    for (int i = 0; i < 2; i++) {
        topology.nodes[i] = (mp_node){.number = 2 * i, .memory = 40 + i, .cpu_count = 1};
        mp_cpu_set_add(&topology.nodes[i].cpus, i);
    }
    mp_cpu_allocator_close(scene.services->allocator);
    mp_cpu_allocator_unpin(scene.services->allocator_pinned);
    MP_CHECK_OK(mp_cpu_allocator_open_on(2, &topology, &scene.services->allocator, &error), &error);
    scene.services->allocator_pinned = mp_cpu_allocator_pin(scene.services->allocator);
    scene_hook_loader(&scene);
    scene.loader_ops.load = allocating_load;
    mp_sys_table.prefer_node = note_preferred;
    preferred_count = 0;
    mp_lease other; /* the load gets a single CPU, without a team */
    mp_core_lease other_at;
    for (int home = 0; home < 2; home++) {
        MP_CHECK(mp_cpu_allocator_lend(scene.services->allocator, 1 - home, 1, &other, &other_at, NULL, NULL));
        mp_worker *worker = scene_worker(&scene, MP_WORKER_SPAWNING);
        MP_CHECK_INT(worker->home, home);
        scene.worker_count = 0; /* the worker frees itself */
        mp_worker_run(worker);
        mp_free(mp_alloc(1 << 20, MP_TAG_KV));
        MP_CHECK_INT(preferred_count, home + 1);
        MP_CHECK_INT(preferred[home], 40 + home);
        mp_cpu_allocator_return(scene.services->allocator, &other, &other_at, false);
    }
    close_scene(&scene);
}

/* --- callers --- */

static int fill_queue(scene *scene) {
    mp_queue *queue = &scene->entry->queue;
    int count = 0;
    queue->capacity[MP_SERVICE_INTERACTIVE] = 2;
    for (; !mp_queue_full(queue, MP_SERVICE_INTERACTIVE); count++)
        queue_one(scene);
    return count;
}

static mp_status submit(scene *scene, mp_submit_options options) {
    bool gone;
    mp_ticket *ticket = scene_ticket(scene, 1, options);
    return mp_entry_submit(scene->entry, ticket, &options, &gone, &error);
}

/* A caller waits for room in the queue 50 ms at a time, the last time until the deadline. */
MP_TEST(registry_clock_room_in_the_queue) {
    scene scene;
    open_scene(&scene);
    scene_worker(&scene, MP_WORKER_PROCESSING);
    MP_CHECK_INT(fill_queue(&scene), 2);
    MP_CHECK_INT(submit(&scene, (mp_submit_options){.deadline_ns = clock_ns + 120 * MS}), MP_TIMEOUT);
    EXPECT_WAITS(50 * MS, 50 * MS, 20 * MS);
    MP_CHECK_INT(submit(&scene, (mp_submit_options){.deadline_ns = clock_ns + 50 * MS}), MP_TIMEOUT);
    EXPECT_WAITS(50 * MS);
    asked = 0;
    give_up_call = 2;
    MP_CHECK_INT(submit(&scene, (mp_submit_options){.give_up = give_up_at}), MP_CANCELLED);
    EXPECT_WAITS(50 * MS, 50 * MS);
    MP_CHECK_INT(scene.entry->room_waiters, 0);
    give_up_call = 0;
    mp_submit_options patient = {.give_up = never_give_up, .deadline_ns = clock_ns + MS};
    MP_CHECK_INT(submit(&scene, patient), MP_TIMEOUT);
    EXPECT_WAITS(MS);
    close_scene(&scene);
}

/* A caller whose request finds no memory checks every 5 ms, until the deadline. */
MP_TEST(registry_clock_memory_of_a_request) {
    scene scene;
    mp_guard guard;
    open_scene(&scene);
    mp_governor *governor = scene.services->governor;
    mp_budget *budget = mp_governor_budget(governor);
    MP_CHECK(mp_governor_try_reserve(governor, 10, &guard)); /* another load runs: memory may become free */
    MP_CHECK(mp_budget_take(budget, 999000));
    for (uint64_t deadline_ms = 10; deadline_ms <= 12; deadline_ms += 2) {
        mp_submit_options options = {.deadline_ns = clock_ns + deadline_ms * MS};
        mp_ticket *ticket = scene_ticket(&scene, 1, options);
        bool gone;
        mp_ticket_request(ticket)->bytes = 2000;
        MP_CHECK_STATUS(mp_entry_submit(scene.entry, ticket, &options, &gone, &error), MP_TIMEOUT, &error);
        const uint64_t lengths[] = {5 * MS, 5 * MS, 5 * MS};
        expect_waits(lengths, deadline_ms == 10 ? 2 : 3);
    }
    mp_budget_give(budget, 999000);
    mp_guard_release(&guard);
    close_scene(&scene);
}

static mp_entry *removed;

static void remove_it(void) { removed->removal = MP_REMOVAL_DRAINING; }
static void close_it(void) { removed->shutdown = MP_SHUTDOWN_CLOSED; }

/* A caller that waits for memory learns at the next check that the model was removed, or that the pool shuts down. */
MP_TEST(registry_clock_memory_of_a_model_that_ends) {
    for (int closed = 0; closed < 2; closed++) {
        scene scene;
        mp_guard guard;
        bool gone;
        open_scene(&scene);
        mp_governor *governor = scene.services->governor;
        mp_submit_options options = {0};
        mp_ticket *ticket = scene_ticket(&scene, 1, options);
        MP_CHECK(mp_governor_try_reserve(governor, 10, &guard));
        MP_CHECK(mp_budget_take(mp_governor_budget(governor), 999000));
        mp_ticket_request(ticket)->bytes = 2000;
        removed = scene.entry;
        in_wait = closed ? close_it : remove_it;
        MP_CHECK_STATUS(mp_entry_submit(scene.entry, ticket, &options, &gone, &error),
                        closed ? MP_SHUTTING_DOWN : MP_UNKNOWN_MODEL, &error);
        MP_CHECK_INT(gone, !closed);
        EXPECT_WAITS(5 * MS);
        mp_budget_give(mp_governor_budget(governor), 999000);
        mp_guard_release(&guard);
        removed->removal = MP_REMOVAL_NONE;
        close_scene(&scene);
    }
}

/* A request with a deadline is refused if the predicted wait exceeds four times the time left. */
MP_TEST(registry_clock_hopeless_deadlines) {
    scene scene;
    open_scene(&scene);
    scene_worker(&scene, MP_WORKER_PROCESSING);
    mp_ticket *ahead = scene_ticket(&scene, 1, (mp_submit_options){0});
    ahead->node.cost = 400 * MS;
    scene_queue(&scene, ahead);
    scene.entry->full_pace = 1;
    MP_CHECK_INT(submit(&scene, (mp_submit_options){.deadline_ns = clock_ns + 100 * MS - 1}), MP_TIMEOUT);
    MP_CHECK_STR(error.message, "a: the queue has 1 requests, which take about 0.4 s, but the deadline is in 0.1 s");
    MP_CHECK_INT(submit(&scene, (mp_submit_options){.deadline_ns = clock_ns}), MP_TIMEOUT);
    MP_CHECK_STR(error.message, "a: the deadline had passed before the request was queued");
    MP_CHECK_INT(submit(&scene, (mp_submit_options){.deadline_ns = clock_ns + 100 * MS}), MP_OK);
    close_scene(&scene);
}

/* --- reported times --- */

/* Idle workers, full queues and remaining times, as mp_registry_visit and mp_ticket_position report them. */
MP_TEST(registry_clock_reported_times) {
    scene scene;
    mp_entry_info info;
    uint64_t eta;
    open_scene(&scene);
    mp_worker *workers[] = {scene_worker(&scene, MP_WORKER_IDLE), scene_worker(&scene, MP_WORKER_READY),
                            scene_worker(&scene, MP_WORKER_EVICTING)};
    for (int i = 0; i < 3; i++) {
        workers[i]->idle_since_ns = clock_ns - 100 + (uint64_t)i;
        workers[i]->step_ns = 10 + (uint64_t)i;
    }
    fill_queue(&scene);
    clock_ns += 1000;
    mp_entry_describe(scene.entry, &info);
    MP_CHECK_INT(info.worker[0].idle_ns, 1100);
    MP_CHECK_INT(info.worker[1].idle_ns, 1099);
    MP_CHECK_INT(info.worker[2].idle_ns, 0);
    MP_CHECK_INT(info.idle_ns, 1098); /* the worker that had work last counts */
    MP_CHECK_INT(info.full_ns[MP_SERVICE_INTERACTIVE], 1000);
    MP_CHECK_INT(info.full_ns[MP_SERVICE_BULK], 0);
    mp_entry_cancel(scene.entry, scene.tickets[0], MP_CANCELLED);
    clock_ns += 50;
    queue_one(&scene);
    clock_ns += 7;
    mp_entry_describe(scene.entry, &info);
    MP_CHECK_INT(info.full_ns[MP_SERVICE_INTERACTIVE], 1007);

    mp_ticket *active = scene_ticket(&scene, 1, (mp_submit_options){0});
    scene_activate(workers[0], active, MP_TICKET_ADMITTED);
    active->node.cost = 500;
    scene.entry->pace = 3;
    atomic_store(&active->started_ns, clock_ns);
    clock_ns += 400;
    MP_CHECK_INT(mp_ticket_position(active, &eta), -1);
    MP_CHECK_INT(eta, 1100);
    clock_ns += 1099;
    mp_ticket_position(active, &eta);
    MP_CHECK_INT(eta, 1);
    clock_ns++;
    mp_ticket_position(active, &eta);
    MP_CHECK_INT(eta, 1);
    close_scene(&scene);
}

/* A load that does not end in time names the stage of the worker that loads, not that of another one. */
MP_TEST(registry_clock_stage_of_a_load) {
    for (int i = 0; i < 2; i++) {
        scene scene;
        bool gone, over;
        char expected[128];
        open_scene(&scene);
        mp_worker *failed = scene_worker(&scene, MP_WORKER_FAILED), *worker = scene_worker(&scene, MP_WORKER_LOADING);
        mp_progress_set(&failed->progress, "making an engine", 99);
        mp_progress_set(&worker->progress, "reading", 0);
        if (i)
            worker->state = MP_WORKER_SPAWNING;
        mp_status status = mp_entry_load(scene.entry, false, clock_ns + 70 * MS, &gone, &over, &error);
        MP_CHECK_STATUS(status, MP_TIMEOUT, &error);
        MP_CHECK(!gone && !over);
        snprintf(expected, sizeof expected, "a: the load did not end before the deadline (stage: %s); it continues in "
                 "the background", i ? "starting" : "reading");
        MP_CHECK_STR(error.message, expected);
        EXPECT_WAITS(70 * MS);
        close_scene(&scene);
    }
}

static mp_entry *joined;

static void end_after_three_waits(void) {
    if (wait_count == 3)
        joined->worker_count = 0;
}

/* A shutdown waits for workers until its deadline. After that it checks every 10 ms for one that may be abandoned. */
MP_TEST(registry_clock_joins) {
    scene scene;
    open_scene(&scene);
    scene_worker(&scene, MP_WORKER_PROCESSING);
    joined = scene.entry;
    in_wait = end_after_three_waits;
    mp_entry_join(scene.entry, clock_ns + 123 * MS);
    EXPECT_WAITS(123 * MS, 10 * MS, 10 * MS);
    close_scene(&scene);
}

/* --- backoffs, to the nanosecond --- */

MP_TEST(registry_clock_backoffs) {
    scene scene;
    mp_error failure;
    open_scene(&scene);
    mp_entry *entry = scene.entry;
    mp_fail(&failure, MP_IO, "gone");
    scene_worker(&scene, MP_WORKER_PROCESSING); /* no other one starts */
    mp_entry_set_failed(entry, &failure);
    MP_CHECK_INT(entry->retry_ns, clock_ns + 100 * MS);
    clock_ns = entry->retry_ns - 1;
    MP_CHECK_INT(submit(&scene, (mp_submit_options){0}), MP_IO);
    clock_ns++;
    MP_CHECK_INT(submit(&scene, (mp_submit_options){0}), MP_OK);
    entry->worker_count = 0;
    mp_entry_clear_failed(entry);
    for (int round = 0; round < 4; round++) { /* the second death within a minute doubles the backoff */
        const bool external = round % 2, late = round / 2;
        entry->deaths = 0;
        entry->kill_backoff_ns = 0;
        mp_entry_note_death(entry, external, &failure);
        MP_CHECK_INT(entry->spawn_ns, clock_ns + 100 * MS);
        clock_ns += 60 * SECOND - !late;
        mp_entry_note_death(entry, external, &failure);
        MP_CHECK_INT(entry->spawn_ns, clock_ns + (late ? 100 : 200) * MS);
    }
    clock_ns = entry->spawn_ns - 1;
    MP_CHECK(!mp_entry_begin(entry));
    clock_ns++;
    MP_CHECK(mp_entry_begin(entry));
    close_scene(&scene);
}

#endif
