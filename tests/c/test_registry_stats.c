/* Every field of mp_registry_stats has exactly the expected value after each part of a scripted scene. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/sys.h"
#include "mp_test.h"
#include "test_registry_fake.h"

/* --- counters: a table of the parts of a scene, and the counts that each part adds --- */

enum { FAKES = 10, STALL_MS = 300, TOKENS_IN = 10, TOKENS_OUT = 3 };

typedef struct scene {
    mp_registry *registry;
    fake fakes[FAKES]; /* one per part that needs an entry of its own */
    int used;
} scene;

static void count_tokens(const mp_request *request, uint64_t *in, uint64_t *out) {
    (void)request;
    *in = TOKENS_IN;
    *out = TOKENS_OUT;
}

static fake_call *make_call(uint32_t units) {
    fake_call *call = fake_call_create(units);
    call->base.usage = count_tokens;
    return call;
}

static fake_call *faulty_call(uint32_t units, mp_status fault, int faults) {
    fake_call *call = make_call(units);
    call->fault = fault;
    atomic_store(&call->faults, faults);
    return call;
}

static mp_status finish(scene *scene, const char *key, fake_call *call) {
    return fake_finish(fake_submit(scene->registry, key, call, NULL));
}

static mp_status refuse(scene *scene, const char *key, fake_call *call) {
    mp_status status;
    MP_CHECK(!fake_submit(scene->registry, key, call, &status));
    return status;
}

static fake *add_fake(scene *scene, const char *key) {
    MP_CHECK(scene->used < FAKES);
    fake *fake = &scene->fakes[scene->used++];
    fake_init(fake);
    fake_add(scene->registry, key, fake, false);
    return fake;
}

static void load(scene *scene, const char *key, mp_status expected) {
    mp_error error;
    MP_CHECK_STATUS(mp_registry_load(scene->registry, key, false, 0, &error), expected, &error);
}

/* Submits a request that stays in its step until `hold` is cleared. */
static mp_ticket *submit_held(scene *scene, const char *key, fake *fake, fake_call *call) {
    atomic_store(&fake->hold, true);
    mp_ticket *ticket = fake_submit(scene->registry, key, call, NULL);
    fake_until(&fake->in_steps, 1);
    return ticket;
}

/* Lets the step of a held request end. All requests must complete. */
static void release(fake *fake, mp_ticket **tickets, int count) {
    atomic_store(&fake->hold, false);
    for (int i = 0; i < count; i++)
        MP_CHECK_INT(fake_finish(tickets[i]), MP_OK);
}

static void wait_until_abandoned_return(scene *scene, const char *key) {
    mp_entry_info info;
    do {
        mp_sys_sleep_ns(FAKE_MS(1));
        fake_info(scene->registry, key, &info);
    } while (info.dead);
}

/* Entry "a" is used by all parts in which no worker fails. */
static void play_load(scene *scene) {
    add_fake(scene, "a")->work = (mp_step_work){
        .passes = 2, .rows = 3, .prefix_tokens = 5, .draft_tokens = 11, .accepted_draft_tokens = 7};
    load(scene, "a", MP_OK);
}

static void play_batch(scene *scene) { /* one request, then three in the next step */
    fake *fake = &scene->fakes[0];
    mp_ticket *tickets[4] = {submit_held(scene, "a", fake, make_call(1))};
    for (int i = 1; i < 4; i++)
        tickets[i] = fake_submit(scene->registry, "a", make_call(1), NULL);
    release(fake, tickets, 4);
}

static void play_small_batches(scene *scene) { /* a step takes one request, although two are active */
    fake *fake = &scene->fakes[0];
    atomic_store(&fake->plan_items, 1);
    mp_ticket *tickets[3] = {submit_held(scene, "a", fake, make_call(1))};
    for (int i = 1; i < 3; i++)
        tickets[i] = fake_submit(scene->registry, "a", make_call(1), NULL);
    release(fake, tickets, 3);
    atomic_store(&fake->plan_items, 0);
}

static void play_bad_argument(scene *scene) {
    fake_call *call = make_call(1);
    call->bad_argument = true;
    MP_CHECK_INT(refuse(scene, "a", call), MP_INVALID_ARGUMENT);
}

static void play_refused_by_the_engine(scene *scene) {
    fake_call *call = make_call(1);
    call->refused = true;
    MP_CHECK_INT(finish(scene, "a", call), MP_UNSUPPORTED);
}

static void play_wrong_entry(scene *scene) {
    fake_call *call = make_call(1);
    call->base.capability = MP_TEXT_TO_TEXT;
    MP_CHECK_INT(refuse(scene, "a", call), MP_WRONG_CAPABILITY);
    MP_CHECK_INT(refuse(scene, "none", make_call(1)), MP_UNKNOWN_MODEL);
}

static void play_deadlines(scene *scene) { /* one has passed before the request, another passes in the queue */
    fake *fake = &scene->fakes[0];
    mp_error error;
    mp_ticket *ticket, *first = submit_held(scene, "a", fake, make_call(1));
    mp_submit_options options = {.deadline_ns = 1};
    MP_CHECK_STATUS(mp_registry_submit(scene->registry, "a", &make_call(1)->base, &options, &ticket, &error),
                    MP_TIMEOUT, &error);
    options.deadline_ns = fake_in_ms(30);
    mp_status status = mp_registry_submit(scene->registry, "a", &make_call(1)->base, &options, &ticket, &error);
    MP_CHECK_STATUS(status == MP_OK ? fake_finish(ticket) : status, MP_TIMEOUT, &error);
    release(fake, &first, 1);
}

static void play_cancel(scene *scene) { /* a request in the queue, and one in its step */
    fake *fake = &scene->fakes[0];
    mp_ticket *first = submit_held(scene, "a", fake, make_call(1));
    mp_ticket *second = fake_submit(scene->registry, "a", make_call(1), NULL);
    mp_ticket_cancel(second);
    MP_CHECK_INT(fake_finish(second), MP_CANCELLED);
    mp_ticket_cancel(first);
    MP_CHECK_INT(fake_finish(first), MP_CANCELLED);
    atomic_store(&fake->hold, false);
}

static void play_full_queue(scene *scene) { /* a refusal that counts, and one that does not */
    fake *fake = &scene->fakes[0];
    mp_error error;
    mp_ticket *tickets[5] = {submit_held(scene, "a", fake, make_call(1))}, *none;
    for (int i = 1; i < 5; i++)
        tickets[i] = fake_submit(scene->registry, "a", make_call(1), NULL);
    for (int uncounted = 0; uncounted < 2; uncounted++) {
        mp_submit_options options = {.fail_fast = true, .uncounted = uncounted};
        MP_CHECK_STATUS(mp_registry_submit(scene->registry, "a", &make_call(1)->base, &options, &none, &error),
                        MP_OVERLOADED, &error);
    }
    release(fake, tickets, 5);
}

static void play_evict(scene *scene) {
    mp_error error;
    MP_CHECK_OK(mp_registry_evict(scene->registry, "a", 0, &error), &error);
}

/* Two requests grow by 1 in each of three steps, to 4 each, which is all the memory. The second one is preempted in its
 * first step, and takes three steps after the first request has ended. */
static void play_preempt(scene *scene) {
    fake *fake = add_fake(scene, "memory");
    mp_ticket *tickets[2];
    fake_call *calls[2];
    fake->memory = 4;
    fake->step_units = 1;
    for (int i = 0; i < 2; i++) {
        calls[i] = make_call(3);
        calls[i]->memory = calls[i]->memory_a_step = 1;
    }
    tickets[0] = submit_held(scene, "memory", fake, calls[0]);
    tickets[1] = fake_submit(scene->registry, "memory", calls[1], NULL);
    release(fake, tickets, 2);
}

static void play_failed_load(scene *scene) {
    atomic_store(&add_fake(scene, "fails")->load_failures, 1);
    load(scene, "fails", MP_IO);
}

static void play_silent_load(scene *scene) { /* the worker of a load without progress is abandoned */
    fake *fake = add_fake(scene, "silent");
    atomic_store(&fake->load_stalls, true);
    load(scene, "silent", MP_SPAWN_TIMEOUT);
    atomic_store(&fake->load_stalls, false);
    wait_until_abandoned_return(scene, "silent");
}

static void play_silent_step(scene *scene) {
    fake *fake = add_fake(scene, "stalls");
    atomic_store(&fake->step_stalls, true);
    MP_CHECK_INT(finish(scene, "stalls", make_call(1)), MP_RECV);
    atomic_store(&fake->step_stalls, false);
    wait_until_abandoned_return(scene, "stalls");
}

static void play_changed_files(scene *scene) {
    fake *fake = add_fake(scene, "changes");
    load(scene, "changes", MP_OK);
    atomic_store(&fake->unhealthy, true);
    MP_CHECK_INT(finish(scene, "changes", make_call(1)), MP_INTEGRITY);
}

static void play_retry(scene *scene) { /* the model stays loaded: a request is queued */
    add_fake(scene, "retries")->step_units = 1;
    MP_CHECK_INT(finish(scene, "retries", faulty_call(1, MP_INTERNAL, 1)), MP_OK);
}

/* A request of three units loses its worker after two, because another request fails. Both take their next step alone:
 * one failed, the other one is all others. */
static void play_retry_beside(scene *scene) {
    fake *fake = &scene->fakes[scene->used - 1];
    mp_ticket *tickets[2] = {submit_held(scene, "retries", fake, make_call(3))};
    tickets[1] = fake_submit(scene->registry, "retries", faulty_call(1, MP_INTERNAL, 1), NULL);
    release(fake, tickets, 2);
}

static void play_lost_engine(scene *scene) { /* two engines are lost when they admit a request */
    add_fake(scene, "lost");
    fake_call *call = make_call(1);
    atomic_store(&call->losses_at_admit, 2);
    MP_CHECK_INT(finish(scene, "lost", call), MP_RECV);
}

static void play_quarantine(scene *scene) { /* a request takes down two workers; an equal one is then refused */
    add_fake(scene, "quarantine");
    fake_call *call = faulty_call(1, MP_INTERNAL, 2), *again = make_call(1);
    again->fingerprint = call->fingerprint;
    MP_CHECK_INT(finish(scene, "quarantine", call), MP_INTERNAL);
    MP_CHECK_INT(refuse(scene, "quarantine", again), MP_MODEL);
}

static void play_breaker(scene *scene) { /* opens at the fourth fault */
    add_fake(scene, "breaker");
    for (int i = 0; i < 4; i++) {
        fake_call *call = make_call(1);
        call->numeric = true;
        MP_CHECK_INT(finish(scene, "breaker", call), MP_NUMERIC);
    }
    MP_CHECK_INT(refuse(scene, "breaker", make_call(1)), MP_CIRCUIT_OPEN);
}

/* Counters that `n` steps of entry "a" raise, and counters that `done` completed requests raise. */
#define STEPS_OF_A(n) .steps = n, .passes = 2 * n, .rows = 3 * n, .prefix_tokens = 5 * n, .draft_tokens = 11 * n, \
                      .accepted_draft_tokens = 7 * n
#define COMPLETED(done) .completed = done, .units_in = done * TOKENS_IN, .units_out = done * TOKENS_OUT

static const struct {
    const char *name;
    void (*play)(scene *scene);
    mp_registry_stats adds;
} parts[] = {
    {"a load", play_load, {.loads = 1, .workers_spawned = 1}},
    {"a batch", play_batch,
     {.total_requests = 4, COMPLETED(4), STEPS_OF_A(2), .step_items = 4, .batches_of_all = 2}},
    {"batches of the budget", play_small_batches,
     {.total_requests = 3, COMPLETED(3), STEPS_OF_A(3), .step_items = 3, .batches_of_all = 2, .batches_of_budget = 1}},
    {"an invalid argument", play_bad_argument, {.total_requests = 1, .errors = 1}},
    {"a refusal by the engine", play_refused_by_the_engine, {.total_requests = 1, .errors = 1}},
    {"wrong entries", play_wrong_entry, {.total_requests = 2, .errors = 2}},
    {"deadlines", play_deadlines,
     {.total_requests = 3, COMPLETED(1), .timeouts = 2, STEPS_OF_A(1), .step_items = 1, .batches_of_all = 1}},
    {"cancellations", play_cancel,
     {.total_requests = 2, .cancelled = 2, STEPS_OF_A(1), .step_items = 1, .batches_of_all = 1}},
    {"a full queue", play_full_queue,
     {.total_requests = 6, COMPLETED(5), .queue_full_rejections = 1, STEPS_OF_A(2), .step_items = 5,
      .batches_of_all = 2}},
    {"an eviction", play_evict, {.evictions = 1, .workers_evicted = 1}},
    {"a preemption", play_preempt,
     {.total_requests = 2, COMPLETED(2), .preemptions = 1, .loads = 1, .workers_spawned = 1, .steps = 6,
      .step_items = 7, .batches_of_all = 6}},
    {"a failed load", play_failed_load, {.load_failures = 1}},
    {"a load without progress", play_silent_load, {.load_failures = 1, .workers_dead = 1}},
    {"a step without progress", play_silent_step,
     {.total_requests = 1, .errors = 1, .worker_faults = 1, .workers_dead = 1, .loads = 1, .workers_spawned = 1,
      .evictions = 1}},
    {"changed files", play_changed_files,
     {.total_requests = 1, .errors = 1, .worker_faults = 1, .loads = 1, .workers_spawned = 1, .workers_evicted = 1,
      .evictions = 1, .steps = 1, .step_items = 1, .batches_of_all = 1}},
    {"a retry", play_retry,
     {.total_requests = 1, COMPLETED(1), .retries = 1, .worker_faults = 1, .loads = 1, .workers_spawned = 2,
      .workers_evicted = 1, .steps = 2, .step_items = 2, .batches_of_all = 2}},
    {"a retry beside another request", play_retry_beside,
     {.total_requests = 2, COMPLETED(2), .retries = 2, .worker_faults = 1, .workers_spawned = 1, .workers_evicted = 1,
      .steps = 4, .step_items = 5, .batches_of_all = 4}},
    {"lost engines", play_lost_engine,
     {.total_requests = 1, .errors = 1, .retries = 1, .worker_faults = 2, .loads = 1, .workers_spawned = 2,
      .workers_evicted = 2, .evictions = 1}},
    {"a quarantine", play_quarantine,
     {.total_requests = 2, .errors = 2, .retries = 1, .worker_faults = 2, .loads = 1, .workers_spawned = 2,
      .workers_evicted = 2, .evictions = 1, .steps = 2, .step_items = 2, .batches_of_all = 2}},
    {"an open circuit breaker", play_breaker,
     {.total_requests = 5, .errors = 5, .circuit_rejections = 1, .worker_faults = 4, .loads = 1, .workers_spawned = 1,
      .steps = 4, .step_items = 4, .batches_of_all = 4}},
};

/* Returns the name of the first counter that differs, or NULL. */
static const char *difference(const mp_registry_stats *got, const mp_registry_stats *expected, uint64_t *value,
                              uint64_t *wanted) {
#define MP_METRIC(name, meaning)       \
    if (got->name != expected->name) { \
        *value = got->name;            \
        *wanted = expected->name;      \
        return #name;                  \
    }
#include "registry/metrics.def"
#undef MP_METRIC
    return NULL;
}

static void add_counters(mp_registry_stats *sum, const mp_registry_stats *more) {
#define MP_METRIC(name, meaning) sum->name += more->name;
#include "registry/metrics.def"
#undef MP_METRIC
}

/* Some counters rise shortly after a request has ended, so wait for them. A counter that rises too far differs from the
 * sum of all later parts. */
static void expect_counters(mp_registry *registry, const mp_registry_stats *expected, const char *after) {
    uint64_t value, wanted, end = fake_in_ms(5000);
    const char *field;
    mp_registry_stats stats;
    do {
        mp_sys_sleep_ns(FAKE_MS(1) / 4);
        mp_registry_get_stats(registry, &stats);
        field = difference(&stats, expected, &value, &wanted);
    } while (field && mp_sys_now_ns() < end);
    if (field)
        MP_FAIL("after %s, %s is %llu, expected %llu", after, field, (unsigned long long)value,
                (unsigned long long)wanted);
}

MP_TEST(registry_stats_count_every_part_of_a_scene) {
    static scene scene;
    mp_registry_stats expected = {0};
    scene.registry = fake_registry_of((mp_registry_config){.threads = 2,
                                                           .max_workers = 1,
                                                           .breaker_threshold = 4,
                                                           .load_timeout_ns = FAKE_MS(STALL_MS),
                                                           .stall_timeout_ns = FAKE_MS(STALL_MS)});
    expect_counters(scene.registry, &expected, "the start");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        parts[i].play(&scene);
        add_counters(&expected, &parts[i].adds);
        expect_counters(scene.registry, &expected, parts[i].name);
    }
    fake_until_no_calls();
    /* Close evicts the workers and models that are left: of "memory", "retries" and "breaker". */
    mp_registry_close(scene.registry, FAKE_MS(5000));
    add_counters(&expected, &(mp_registry_stats){.workers_evicted = 3, .evictions = 3});
    expect_counters(scene.registry, &expected, "the end");
    fake_end(scene.registry);
}

/* Each counter must differ from 0 in a row, or be named here as one that the scene cannot raise. */
MP_TEST(registry_stats_scene_raises_every_counter) {
    mp_registry_stats sum = {.spawn_failures = 1, .chaos_faults = 1, .illegal_transitions = 1, .dedup_hits = 1};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        add_counters(&sum, &parts[i].adds);
#define MP_METRIC(name, meaning) MP_CHECK(sum.name > 0);
#include "registry/metrics.def"
#undef MP_METRIC
}

/* --- counters that need a registry of their own --- */

static void expect_one_chaos(mp_chaos_rule rule, mp_status status, mp_registry_stats expected) {
    fake fake;
    mp_registry *registry = fake_registry_of((mp_registry_config){.threads = 1, .max_workers = 1, .chaos = rule});
    fake_init(&fake);
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", make_call(1), NULL)), status);
    expect_counters(registry, &expected, "chaos");
    fake_end(registry);
}

MP_TEST(registry_stats_count_injected_faults) {
    /* a step that fails and its retry */
    expect_one_chaos((mp_chaos_rule){.seed = 1, .fail = 1}, MP_MODEL,
                     (mp_registry_stats){.total_requests = 1, .errors = 1, .retries = 1, .worker_faults = 2,
                                         .loads = 1, .workers_spawned = 1, .steps = 2, .step_items = 2,
                                         .batches_of_all = 2, .chaos_faults = 2});
    /* a refused admission */
    expect_one_chaos((mp_chaos_rule){.seed = 1, .memory = 1}, MP_MEMORY_EXHAUSTED,
                     (mp_registry_stats){.total_requests = 1, .errors = 1, .loads = 1, .workers_spawned = 1,
                                         .chaos_faults = 1});
}

#ifdef MP_SEAM

static int refuse_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *arg) {
    (void)thread, (void)attributes, (void)body, (void)arg;
    return EAGAIN;
}

MP_TEST(registry_stats_count_workers_without_a_thread) {
    fake fake;
    mp_error error;
    mp_registry *registry = fake_begin(&fake, 1, NULL);
    mp_sys_table.thread_create = refuse_thread;
    MP_CHECK(mp_registry_load(registry, "a", false, 0, &error) != MP_OK);
    mp_sys_table.thread_create = mp_sys_real.thread_create;
    expect_counters(registry, &(mp_registry_stats){.spawn_failures = 1}, "a load without a thread");
    MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
    expect_counters(registry, &(mp_registry_stats){.spawn_failures = 1, .loads = 1, .workers_spawned = 1}, "a load");
    fake_end(registry);
}

#endif
