/* The times of the registry on a made-up clock: it stands still, except while the only thread waits. So every wait has
 * one exact length, and one nanosecond more or less decides the other way. */
#include "base/sys.h"
#include "base/trace.h"
#include "registry/chaos.h"
#include "test_registry_scene.h"

#ifdef MP_SEAM

#include <errno.h>
#include <pthread.h>

enum { WAITS = 4096 };
static const uint64_t MS = 1000 * 1000, SECOND = 1000ull * 1000 * 1000;

static uint64_t clock_ns;
static uint64_t waits[WAITS]; /* the lengths of the waits since start_clock */
static int wait_count;
static void (*in_wait)(void); /* called in each wait, without a lock; NULL: nothing happens */

static uint64_t read_clock(void) { return clock_ns; }

static void pass(uint64_t ns) {
    MP_CHECK(wait_count < WAITS);
    waits[wait_count++] = ns;
    clock_ns += ns;
    if (in_wait)
        in_wait();
}

static int wait_on_clock(pthread_cond_t *cond, pthread_mutex_t *mutex, uint64_t deadline_ns) {
    (void)cond;
    MP_CHECK(deadline_ns == 0 || deadline_ns > clock_ns);
    pthread_mutex_unlock(mutex);
    pass(deadline_ns ? deadline_ns - clock_ns : 0);
    pthread_mutex_lock(mutex);
    return deadline_ns ? ETIMEDOUT : 0;
}

static void park_on_clock(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
    (void)word, (void)expected;
    pass(timeout_ns);
}

static void start_clock(uint64_t now_ns) {
    clock_ns = now_ns;
    wait_count = 0;
    in_wait = NULL;
    mp_sys_table.now_ns = read_clock;
    mp_sys_table.sleep_ns = pass;
    mp_sys_table.cond_wait = wait_on_clock;
    mp_sys_table.park = park_on_clock;
}

static void stop_clock(void) {
    in_wait = NULL;
    mp_sys_table = mp_sys_real;
}

static void expect_waits(const uint64_t *lengths, int count) {
    MP_CHECK_INT(wait_count, count);
    for (int i = 0; i < count; i++)
        MP_CHECK_INT(waits[i], lengths[i]);
    wait_count = 0;
}
#define EXPECT_WAITS(...) \
    expect_waits((const uint64_t[]){__VA_ARGS__}, (int)(sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)))

static void open_scene(scene *scene) {
    scene_open(scene, "a", NULL, 1000 * 1000);
    scene->services->spin_ns = 0; /* a spin on a clock that stands still does not end */
    scene->fake.threads = 1;
    start_clock(1000 * SECOND);
}

static void close_scene(scene *scene) {
    stop_clock();
    scene_close(scene);
}

static int asked, asked_most; /* calls of give_up_at; the number of the call that returns true */

static bool give_up_at(void *arg) {
    (void)arg;
    return ++asked == asked_most;
}

static bool never_give_up(void *arg) {
    (void)arg;
    return false;
}

/* --- CPUs --- */

static mp_error error;

static mp_cpu_allocator *open_allocator(int threads) {
    mp_cpu_allocator *allocator;
    MP_CHECK_OK(mp_cpu_allocator_open(threads, &allocator, &error), &error);
    return allocator;
}

/* Reports a lease whose threads lost time, and expects the number of threads that later leases should use. */
static void report(mp_cpu_allocator *allocator, int threads, uint64_t watched_ns, uint64_t lost_ns, int expected) {
    mp_lease lease;
    mp_core_lease at;
    MP_CHECK(mp_cpu_allocator_lend(allocator, 0, threads, &lease, &at, NULL, NULL));
    MP_CHECK_INT(lease.threads, threads);
    lease.together = true;
    lease.watched_ns = watched_ns;
    lease.lost_ns = lost_ns;
    mp_cpu_allocator_return(allocator, &lease, &at, false);
    MP_CHECK_INT(mp_cpu_allocator_barrier_threads(allocator), expected);
}

/* Shares of lost time are judged after 10 ms, and each limit of the share is exact. */
MP_TEST(registry_clock_lost_time) {
    static const struct {
        int threads, lost_ns, expected; /* `lost_ns`: in 10,000,000 ns */
    } rows[] = {
        {8, 2000000, 8}, {8, 2000001, 7}, /* a fifth of the time */
        {2, 4000000, 2}, {2, 4000001, 1}, /* 0.8 of the share of a thread */
        {8, 6000000, 7}, {8, 6000001, 4}, /* 0.6 of the time */
        {5, 10000000, 2},
    };
    start_clock(1);
    mp_cpu_allocator *allocator = open_allocator(8);
    report(allocator, 8, 9999999, 9999999, 8);
    report(allocator, 8, 1, 0, 4);
    mp_cpu_allocator_close(allocator);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        allocator = open_allocator(rows[i].threads);
        report(allocator, rows[i].threads, 10000000, (uint64_t)rows[i].lost_ns, rows[i].expected);
        mp_cpu_allocator_close(allocator);
    }
    stop_clock();
}

/* A rise is tried 100 ms after a fall, if the threads lose less than 0.4 of the share of a thread. */
MP_TEST(registry_clock_threads_rise) {
    start_clock(1); /* no rise has happened yet, although the clock is younger than 100 ms */
    mp_cpu_allocator *allocator = open_allocator(4);
    report(allocator, 4, 10000000, 10000000, 2);
    clock_ns += 100 * MS - 1;
    report(allocator, 2, 10000000, 0, 2);
    clock_ns++;
    report(allocator, 2, 10000000, 1333334, 2); /* (2 + 1) shares are more than 0.4 */
    report(allocator, 1, 10000000, 0, 2);       /* fewer threads than are allowed tell nothing */
    report(allocator, 2, 10000000, 1333333, 3);
    report(allocator, 3, 10000000, 1000000, 3); /* exactly 0.4 */
    report(allocator, 3, 10000000, 999999, 4);
    report(allocator, 4, 10000000, 0, 4);
    mp_cpu_allocator_close(allocator);
    stop_clock();
}

/* A rise that has to be undone within 100 ms doubles the time until the next one, up to two seconds. */
MP_TEST(registry_clock_threads_rise_later_each_time) {
    static const int holds_ms[] = {100, 200, 400, 800, 1600, 2000, 2000};
    start_clock(1000 * SECOND);
    mp_cpu_allocator *allocator = open_allocator(2);
    report(allocator, 2, 10000000, 10000000, 1);
    for (size_t i = 0; i < sizeof holds_ms / sizeof *holds_ms; i++) {
        clock_ns += (uint64_t)holds_ms[i] * MS - 1;
        report(allocator, 1, 10000000, 0, 1);
        clock_ns++;
        report(allocator, 1, 10000000, 0, 2);
        clock_ns += 100 * MS - 1;
        report(allocator, 2, 10000000, 10000000, 1);
    }
    clock_ns += 2000 * MS;
    report(allocator, 1, 10000000, 0, 2);
    clock_ns += 100 * MS; /* not soon: the hold starts over */
    report(allocator, 2, 10000000, 10000000, 1);
    clock_ns += 100 * MS;
    report(allocator, 1, 10000000, 0, 2);
    mp_cpu_allocator_close(allocator);
    stop_clock();
}

static mp_cpu_allocator *returned_to;
static mp_lease returned;
static mp_core_lease returned_at;

static void return_a_lease(void) { mp_cpu_allocator_return(returned_to, &returned, &returned_at, false); }

/* A thread that waits for CPUs asks every 20 ms whether to give up. Without that question it has no deadline. */
MP_TEST(registry_clock_waits_for_cpus) {
    mp_lease lease;
    mp_core_lease at;
    start_clock(1000 * SECOND);
    mp_cpu_allocator *allocator = returned_to = open_allocator(1);
    MP_CHECK(mp_cpu_allocator_lend(allocator, 0, 1, &returned, &returned_at, NULL, NULL));
    asked = 0;
    asked_most = 3;
    MP_CHECK(!mp_cpu_allocator_lend(allocator, 0, 1, &lease, &at, give_up_at, NULL));
    MP_CHECK_INT(asked, 3);
    EXPECT_WAITS(20 * MS, 20 * MS, 20 * MS);
    in_wait = return_a_lease;
    MP_CHECK(mp_cpu_allocator_lend(allocator, 0, 1, &lease, &at, NULL, NULL));
    EXPECT_WAITS(0);
    in_wait = NULL;
    mp_cpu_allocator_return(allocator, &lease, &at, false);
    mp_cpu_allocator_close(allocator);
    stop_clock();
}

/* --- memory --- */

enum { LIMIT = 1000 };

static uint64_t reclaim_at_once(void *arg, const mp_shortage *shortage, bool whole) {
    (void)whole;
    mp_budget_give(mp_governor_budget(arg), 500);
    return shortage->bytes;
}

static uint64_t reclaim_nothing(void *arg) {
    (void)arg;
    return 0;
}

/* A load that waits for memory asks every 20 ms whether to give up. It does not wait if memory is freed at once. */
MP_TEST(registry_clock_waits_for_memory) {
    mp_governor *governor;
    mp_guard other, guard;
    start_clock(1000 * SECOND);
    MP_CHECK_OK(mp_governor_open(LIMIT, &governor, &error), &error);
    MP_CHECK_OK(mp_governor_reserve(governor, "b", 600, 600, false, NULL, NULL, &other, &error), &error);
    asked = 0;
    asked_most = 4;
    MP_CHECK_STATUS(mp_governor_reserve(governor, "a", 500, 500, false, give_up_at, NULL, &guard, &error),
                    MP_CANCELLED, &error);
    EXPECT_WAITS(20 * MS, 20 * MS, 20 * MS, 20 * MS);
    mp_guard_release(&other);

    mp_reclaimer reclaimer = {
        .reclaim = reclaim_at_once, .possible = reclaim_nothing, .later = reclaim_nothing, .arg = governor};
    mp_governor_add_reclaimer(governor, &reclaimer);
    MP_CHECK(mp_budget_take(mp_governor_budget(governor), 700));
    MP_CHECK_OK(mp_governor_reserve(governor, "a", 600, 600, false, give_up_at, NULL, &guard, &error), &error);
    MP_CHECK_INT(wait_count, 0);
    mp_guard_release(&guard);
    mp_governor_remove_reclaimer(governor, &reclaimer);
    mp_budget_give(mp_governor_budget(governor), 200);
    mp_governor_close(governor);
    stop_clock();
}

/* --- injected faults --- */

static mp_engine *wrap(scene *scene, mp_chaos_rule rule) {
    scene->services->chaos = rule;
    mp_worker *worker = scene_ready(scene);
    MP_CHECK_OK(mp_chaos_wrap(scene->services, "a", 0, &worker->engine, &error), &error);
    return worker->engine;
}

static void step_once(mp_engine *engine, bool is_cancelled) {
    _Atomic int cancelled = is_cancelled;
    mp_lease lease = {.cancelled = &cancelled, .threads = 1};
    wait_count = 0;
    engine->ops->step(engine, &lease, &(mp_plan){0}, NULL);
}

/* A stall sleeps a sixteenth of the limit at a time, at most 50 ms. It ends after four times the limit or, once the
 * worker is abandoned, when the limit is over. */
MP_TEST(registry_clock_stalls) {
    scene scene;
    open_scene(&scene);
    mp_engine *engine = wrap(&scene, (mp_chaos_rule){.stall = 1});
    scene.services->stall_timeout_ns = 240; /* 15 sleeps of 16 ns */
    step_once(engine, false);
    MP_CHECK_INT(wait_count, 60);
    MP_CHECK_INT(waits[0], 16);
    step_once(engine, true);
    MP_CHECK_INT(wait_count, 16);
    scene.services->stall_timeout_ns = 800 * MS;
    step_once(engine, false);
    MP_CHECK_INT(wait_count, 64);
    MP_CHECK_INT(waits[0], 50 * MS);
    scene.services->stall_timeout_ns = 799 * MS;
    step_once(engine, true);
    MP_CHECK_INT(wait_count, 16);
    MP_CHECK_INT(waits[0], 799 * MS / 16 + 1);
    close_scene(&scene);
}

/* A slow step lasts four times its duration longer, at least 5 ms, in sleeps of at most a millisecond. */
MP_TEST(registry_clock_slow_steps) {
    static const struct {
        uint64_t step_us, longer_us;
    } rows[] = {{0, 5000}, {1250, 5000}, {1500, 6000}, {2250, 9000}};
    scene scene;
    open_scene(&scene);
    mp_engine *engine = wrap(&scene, (mp_chaos_rule){.slow = 1});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint64_t began = clock_ns;
        int steps = (int)(rows[i].step_us / 250); /* the fake sleeps 250 us at a time */
        atomic_store(&scene.fake.step_ns, rows[i].step_us * 1000);
        step_once(engine, false);
        MP_CHECK_INT(clock_ns - began, (rows[i].step_us + rows[i].longer_us) * 1000);
        MP_CHECK_INT(wait_count, steps + (int)(rows[i].longer_us / 1000));
        MP_CHECK_INT(waits[steps], MS);
    }
    atomic_store(&scene.fake.step_ns, 1300 * 1000); /* takes 1,500 us */
    step_once(engine, true);
    MP_CHECK_INT(wait_count, 0); /* a cancelled step ends at once */
    close_scene(&scene);
}

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

/* Runs a worker that has nothing to do until its first wait, and returns the length of that wait; 0 = without end. */
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
        worker->memory_tight = true;
        MP_CHECK_INT(first_wait(worker), 7);
        MP_CHECK(!worker->memory_tight && worker->retry_ns == 0); /* the time has come */
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
    static const int step_ms[] = {2, 6, 10, 100};
    double pace = 0;
    uint64_t sum = 0;
    for (int i = 0; i < 4; i++) {
        mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0}); /* the plan predicts 1 ms */
        scene_queue(&scene, ticket);
        mp_ticket_pin(ticket);
        atomic_store(&scene.fake.step_ns, FAKE_MS(step_ms[i]));
        uint64_t submitted, started, finished, now = clock_ns;
        worker->leave = false;
        scene_serve(&scene, worker);
        double sample = step_ms[i];
        if (i == 0)
            pace = sample;
        pace += ((sample < 4 * pace ? sample : 4 * pace) - pace) / 16;
        sum += FAKE_MS(step_ms[i]);
        MP_CHECK(scene.entry->pace == pace);
        MP_CHECK(scene.entry->full_pace == 0); /* every request had room */
        MP_CHECK_INT(worker->step_ns, sum);
        MP_CHECK_INT(scene.entry->latency.sum_ns, sum);
        MP_CHECK_INT(scene.entry->latency.max_ns, FAKE_MS(step_ms[i]));
        MP_CHECK_INT(ticket->had_ns, FAKE_MS(step_ms[i]));
        mp_ticket_times(ticket, &submitted, &started, &finished);
        MP_CHECK_INT(submitted, now);
        MP_CHECK_INT(started, now);
        MP_CHECK_INT(finished, now + FAKE_MS(step_ms[i]));
        mp_ticket_release(ticket);
    }
    close_scene(&scene);
}

/* --- loads --- */

static const char *wanted_record;
static int wanted_records;

static void find_record(const mp_log_record *record, void *arg) {
    (void)arg;
    wanted_records += strcmp(record->text, wanted_record) == 0;
}

static void expect_record(const char *text) {
    wanted_record = text;
    wanted_records = 0;
    mp_log_drain(find_record, NULL);
    MP_CHECK_INT(wanted_records, 1);
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
    mp_loader_ops ops = *entry->loader.ops;
    loader_ops = entry->loader.ops;
    mp_log_set_level(MP_LOG_INFO);
    scene.fake.model_bytes = 12300 * 1000;
    atomic_store(&mp_governor_budget(scene.services->governor)->limit, 20000 * 1000);
    ops.footprint = watched_footprint;
    ops.load = watched_load;
    entry->loader.ops = &ops;
    scene.services->max_workers = 1;
    scene.services->load_timeout_ns = SECOND;
    atomic_store(&scene.fake.load_ns, FAKE_MS(30));
    mp_lease others; /* leaves one CPU: more would start threads, which wait on this clock too */
    mp_core_lease others_at;
    mp_cpu_allocator *allocator = scene.services->allocator;
    MP_CHECK(mp_cpu_allocator_lend(allocator, 0, 3, &others, &others_at, NULL, NULL));
    loading = scene_worker(&scene, MP_WORKER_SPAWNING);
    seen_outside = seen_unsafe = 0;
    footprint_safe = load_watched = engine_watched = false;
    mp_sys_table.mutex_lock = watch_lock;
    MP_CHECK(mp_worker_start(loading));
    MP_CHECK(footprint_safe && load_watched && engine_watched);
    MP_CHECK(seen_outside > 1);
    MP_CHECK_INT(seen_unsafe, 0);
    MP_CHECK(!loading->moving);
    MP_CHECK_INT(entry->resident->load_ns, FAKE_MS(30));
    MP_CHECK_INT(loading->idle_since_ns, clock_ns);
    expect_record("Loaded a in 0.030 s (12.3 MB)");
    MP_CHECK_INT(entry->loads, 1);
    loading = NULL;
    mp_cpu_allocator_return(allocator, &others, &others_at, false);
    close_scene(&scene);
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
    mp_loader_ops ops = *scene.entry->loader.ops;
    ops.load = allocating_load;
    scene.entry->loader.ops = &ops;
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
    asked_most = 2;
    MP_CHECK_INT(submit(&scene, (mp_submit_options){.give_up = give_up_at}), MP_CANCELLED);
    EXPECT_WAITS(50 * MS, 50 * MS);
    MP_CHECK_INT(scene.entry->room_waiters, 0);
    asked_most = 0;
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
    for (int deadline_ms = 10; deadline_ms <= 12; deadline_ms += 2) {
        mp_submit_options options = {.deadline_ns = clock_ns + FAKE_MS(deadline_ms)};
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
    MP_CHECK_STR(error.message, "a: 1 requests are queued, about 0.4 s of work, but the deadline is in 0.1 s");
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
    mp_resident *pinned;
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
    mp_entry_describe(scene.entry, &info, &pinned);
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
    mp_entry_describe(scene.entry, &info, &pinned);
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

/* --- the clock of requests --- */

static uint64_t requests_clock(mp_maintenance *self) {
    uint64_t now;
    uint64_t result = mp_maintenance_clock(self, &now);
    MP_CHECK_INT(now, clock_ns);
    return result;
}

/* A reader ticks if the last tick is more than 375 ms old. A gap of more than 500 ms between two ticks is a pause. */
MP_TEST(registry_clock_of_requests) {
    static mp_maintenance self;
    mp_log_set_level(MP_LOG_INFO);
    start_clock(1000 * SECOND);
    mp_maintenance_init(&self, NULL, NULL);
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    mp_maintenance_begin_timed(&self); /* no thread runs that could tick */
    MP_CHECK_INT(self.count, 0);
    mp_maintenance_end_timed(&self);
    self.running = true;
    mp_maintenance_begin_timed(&self);
    MP_CHECK_INT(self.count, 1);
    clock_ns += 375 * MS;
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    MP_CHECK_INT(self.count, 1);
    clock_ns++;
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    MP_CHECK_INT(self.count, 2);
    clock_ns += 500 * MS;
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    MP_CHECK_INT(requests_clock(&self), clock_ns);
    MP_CHECK_INT(self.count, 3);
    clock_ns += 500 * MS + 7;
    MP_CHECK_INT(requests_clock(&self), clock_ns - 7);
    MP_CHECK_INT(requests_clock(&self), clock_ns - 7);
    clock_ns += 2000 * MS;
    MP_CHECK_INT(requests_clock(&self), clock_ns - 1500 * MS - 7);
    MP_CHECK_INT(requests_clock(&self), clock_ns - 1500 * MS - 7);
    expect_record("The process did not run for 2.0 s; deadlines of requests are extended by this time");
    MP_CHECK_INT(self.count, 5);
    mp_maintenance_end_timed(&self);
    for (int i = 1; i <= 8; i++) { /* the last of eight ticks without a request with a limit stops the ticks */
        clock_ns += 375 * MS + 1;
        requests_clock(&self);
        MP_CHECK_INT(self.count, 5 + i);
        MP_CHECK_INT(self.beats[self.count & 1].tick_ns, i < 8 ? clock_ns : 0);
    }
    clock_ns += 2000 * MS;
    MP_CHECK_INT(requests_clock(&self), clock_ns - 1500 * MS - 7); /* no pause: nothing ticked */
    MP_CHECK_INT(self.count, 13);
    self.running = false;
    mp_maintenance_deinit(&self);
    stop_clock();
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
    for (int late = 0; late < 2; late++) { /* the second death within a minute doubles the backoff */
        entry->deaths = 0;
        mp_entry_note_death(entry, false, &failure);
        MP_CHECK_INT(entry->spawn_ns, clock_ns + 100 * MS);
        clock_ns += 60 * SECOND - !late;
        mp_entry_note_death(entry, false, &failure);
        MP_CHECK_INT(entry->spawn_ns, clock_ns + (late ? 100 : 200) * MS);
        entry->kill_backoff_ns = 0;
        mp_entry_note_death(entry, true, &failure);
        MP_CHECK_INT(entry->spawn_ns, clock_ns + 100 * MS);
        clock_ns += 60 * SECOND - !late;
        mp_entry_note_death(entry, true, &failure);
        MP_CHECK_INT(entry->spawn_ns, clock_ns + (late ? 100 : 200) * MS);
    }
    clock_ns = entry->spawn_ns - 1;
    MP_CHECK(!mp_entry_begin(entry));
    clock_ns++;
    MP_CHECK(mp_entry_begin(entry));
    close_scene(&scene);
}

#endif
