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
            again = entry->faults.spawn_ns = clock_ns + 1234;
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

/* --- callers --- */

static mp_status submit(scene *scene, mp_submit_options options) {
    bool gone;
    mp_ticket *ticket = scene_ticket(scene, 1, options);
    return mp_entry_submit(scene->entry, ticket, &options, &gone, &error);
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
    mp_faults_load_failed(entry, &failure);
    MP_CHECK_INT(entry->faults.retry_ns, clock_ns + 100 * MS);
    clock_ns = entry->faults.retry_ns - 1;
    MP_CHECK_INT(submit(&scene, (mp_submit_options){0}), MP_IO);
    clock_ns++;
    MP_CHECK_INT(submit(&scene, (mp_submit_options){0}), MP_OK);
    entry->worker_count = 0;
    mp_faults_forget_load(entry);
    for (int round = 0; round < 4; round++) { /* the second death within a minute doubles the backoff */
        const bool external = round % 2, late = round / 2;
        entry->faults.deaths = 0;
        entry->faults.kill_backoff_ns = 0;
        mp_faults_note_death(entry, external, &failure);
        MP_CHECK_INT(entry->faults.spawn_ns, clock_ns + 100 * MS);
        clock_ns += 60 * SECOND - !late;
        mp_faults_note_death(entry, external, &failure);
        MP_CHECK_INT(entry->faults.spawn_ns, clock_ns + (late ? 100 : 200) * MS);
    }
    clock_ns = entry->faults.spawn_ns - 1;
    MP_CHECK(!mp_entry_begin(entry));
    clock_ns++;
    MP_CHECK(mp_entry_begin(entry));
    close_scene(&scene);
}

#endif
