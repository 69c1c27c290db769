/* Memory reclaim: which models free memory, which models keep theirs, and that the waiting load or request gets it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/governor.h"
#include "test_registry_fake.h"

/* --- caches --- */

/* Submits a request that does not wait for memory. */
static mp_status ask_for(mp_registry *registry, uint64_t bytes) {
    mp_ticket *ticket;
    mp_error error;
    fake_call *call = fake_call_create(1);
    call->base.bytes = bytes;
    mp_submit_options options = {.priority = 2, .fail_fast = true};
    mp_status status = mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error);
    return ticket ? fake_finish(ticket) : status;
}

/* Outputs whose size only the model knows are charged too, and given back at the end. */
MP_TEST(registry_memory_of_outputs_is_charged) {
    enum { LIMIT = 1000000, INPUTS = 1000, OUTPUTS = 200000 };
    fake fake;
    mp_registry_stats stats;
    fake_init(&fake);
    mp_registry *registry = fake_registry(2, LIMIT);
    fake_add(registry, "a", &fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    mp_registry_get_stats(registry, &stats);
    const uint64_t before = stats.memory_used;
    atomic_store(&fake.hold, true);
    fake_call *call = fake_call_create(1);
    call->base.bytes = INPUTS;
    call->outputs = OUTPUTS;
    mp_ticket *ticket = fake_submit(registry, "a", call, NULL);
    fake_until(&fake.in_steps, 1);
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.memory_used, before + INPUTS + OUTPUTS);
    atomic_store(&fake.hold, false);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.memory_used, before);
    call = fake_call_create(1);
    call->outputs = LIMIT;
    mp_status status;
    fake_submit(registry, "a", call, &status);
    MP_CHECK_INT(status, MP_MEMORY_EXHAUSTED);
    fake_end(registry);
}

/* A request that can never fit causes no reclaim. A request that lacks little memory causes the trim of one cache. */
MP_TEST(registry_memory_trims_no_more_than_is_needed) {
    enum { MODELS = 3, LIMIT = 1000000 };
    static const char *const keys[MODELS] = {"a", "b", "c"};
    /* Models are reclaimed by idle time / load time, largest first. These load times give the order a, b, c even on a
     * slow machine. */
    static const uint64_t load_ns[MODELS] = {0, FAKE_MS(50), FAKE_MS(250)};
    fake fakes[MODELS];
    mp_registry *registry = fake_registry(2, LIMIT);
    mp_error error;
    for (int i = 0; i < MODELS; i++) {
        fake_init(&fakes[i]);
        fakes[i].model_bytes = 200000;
        fakes[i].engine_bytes = 50000;
        fakes[i].held_bytes = 50000;
        fakes[i].load_ns = load_ns[i];
        fake_add(registry, keys[i], &fakes[i], false);
        MP_CHECK_OK(mp_registry_load(registry, keys[i], i == 0, 0, &error), &error); /* a is pinned */
        MP_CHECK_INT(fake_finish(fake_submit(registry, keys[i], fake_call_create(1), NULL)), MP_OK);
        fake_until_state(registry, keys[i], "ready");
        mp_sys_sleep_ns(FAKE_MS(20));
    }
    /* 250,000 bytes are free. Evicting b and c would free 500,000, trimming a, which is pinned, at most 50,000. */
    MP_CHECK_INT(ask_for(registry, LIMIT + 1), MP_MEMORY_EXHAUSTED);
    MP_CHECK_INT(ask_for(registry, LIMIT - 100000), MP_MEMORY_EXHAUSTED);
    mp_sys_sleep_ns(FAKE_MS(50));
    for (int i = 0; i < MODELS; i++) {
        MP_CHECK_INT(fakes[i].trims, 0);
        MP_CHECK_INT(fakes[i].models, 1);
    }
    MP_CHECK_INT(ask_for(registry, 290000), MP_OVERLOADED); /* 40,000 more than free: a trim starts */
    fake_until(&fakes[0].trims, 1);                         /* a comes first */
    mp_sys_sleep_ns(FAKE_MS(50));
    MP_CHECK_INT(fakes[0].trims + fakes[1].trims + fakes[2].trims, 1);
    for (int i = 0; i < MODELS; i++)
        MP_CHECK_INT(fakes[i].models, 1);
    /* trimming caches would not free enough: one model is evicted, and the others keep their caches */
    MP_CHECK_INT(ask_for(registry, 450000), MP_OVERLOADED);
    fake_until_state(registry, "b", "cold");
    MP_CHECK_INT(fakes[0].trims + fakes[1].trims + fakes[2].trims, 1);
    MP_CHECK_INT(fakes[2].models, 1);
    MP_CHECK_INT(ask_for(registry, 450000), MP_OK);
    fake_end(registry);
}

/* A request that does not wait is OVERLOADED if running requests hold the memory that it needs, as bytes of their own
 * or in the engine, and MEMORY_EXHAUSTED if what they will give back is not enough. */
MP_TEST(registry_memory_that_requests_hold_is_no_reason_to_fail) {
    enum { LIMIT = 1000000, MODEL = 200000, ASKED = 500000, HELD = 600000 };
    for (int i = 0; i < 4; i++) {
        bool pinned = i & 1, in_engine = i & 2;
        fake fake;
        mp_guard none = {0};
        mp_error error;
        fake_init(&fake);
        fake.model_bytes = MODEL;
        fake.step_units = 1;
        fake.other_load = &none;
        mp_registry *registry = fake_registry(1, LIMIT);
        fake_add(registry, "a", &fake, false);
        MP_CHECK_OK(mp_registry_load(registry, "a", pinned, 0, &error), &error);
        fake_call *call = fake_call_create(2);
        call->base.bytes = in_engine ? 0 : HELD;
        call->memory_a_step = in_engine ? HELD / 3 : 0; /* two units take three steps */
        atomic_store(&call->masks, 1);
        mp_ticket *ticket = fake_submit(registry, "a", call, NULL);
        fake_until(&fake.steps, 2); /* the second step found no mask */
        mp_registry_stats before = fake_stats(registry);
        for (int again = 0; again < 2; again++) { /* the second time with `uncounted` */
            fake_call *other = fake_call_create(1);
            other->base.bytes = ASKED;
            mp_submit_options options = {.priority = 2, .fail_fast = true, .uncounted = again};
            mp_ticket *refused;
            MP_CHECK_STATUS(mp_registry_submit(registry, "a", &other->base, &options, &refused, &error), MP_OVERLOADED,
                            &error);
            MP_CHECK_STR(error.field, MP_FIELD_MEMORY);
        }
        mp_registry_stats after = fake_stats(registry);
        MP_CHECK_INT(after.total_requests - before.total_requests, 1);
        MP_CHECK_INT(after.queue_full_rejections - before.queue_full_rejections, 1);
        MP_CHECK_INT(ask_for(registry, LIMIT + 1), MP_MEMORY_EXHAUSTED);
        fake_call *large = fake_call_create(1);
        mp_ticket *none_made;
        large->base.bytes = ASKED;
        large->outputs = LIMIT; /* also those do not wait */
        mp_submit_options at_once = {.priority = 2, .fail_fast = true};
        MP_CHECK_STATUS(mp_registry_submit(registry, "a", &large->base, &at_once, &none_made, &error),
                        MP_MEMORY_EXHAUSTED, &error);
        if (pinned) /* the model stays */
            MP_CHECK_INT(ask_for(registry, LIMIT - MODEL + 1), MP_MEMORY_EXHAUSTED);
        atomic_store(&call->masks, 2);
        mp_ticket_wake(ticket);
        MP_CHECK_INT(fake_finish(ticket), MP_OK);
        MP_CHECK_INT(ask_for(registry, ASKED), MP_OK);
        fake_end(registry);
    }
}

/* --- models with a constant light load do not prevent the eviction of idle models --- */

enum { BUSY = 8 };

typedef struct visitor {
    mp_registry *registry;
    const char *key;
    _Atomic bool *over;
} visitor;

static void visit_often(void *arg) {
    visitor *visitor = arg;
    while (!atomic_load(visitor->over)) {
        MP_CHECK_INT(fake_finish(fake_submit(visitor->registry, visitor->key, fake_call_create(1), NULL)), MP_OK);
        mp_sys_sleep_ns(FAKE_MS(2));
    }
}

MP_TEST(registry_memory_comes_from_idle_models_while_others_are_in_use) {
    static const char *const keys[] = {"a", "b", "c", "d", "e", "f", "g", "h", "idle", "new"};
    fake fakes[BUSY + 2];
    visitor visitors[BUSY];
    mp_thread threads[BUSY];
    _Atomic bool over = false;
    mp_registry *registry = fake_registry(2, (BUSY + 1) * 110000 + 70000);
    mp_error error;
    for (int i = 0; i < BUSY + 2; i++) {
        fake_init(&fakes[i]);
        fakes[i].model_bytes = 110000;
        fakes[i].load_ns = i < BUSY ? FAKE_MS(20) : 0; /* expensive to load again */
        fake_add(registry, keys[i], &fakes[i], false);
        if (i <= BUSY)
            MP_CHECK_INT(fake_finish(fake_submit(registry, keys[i], fake_call_create(1), NULL)), MP_OK);
    }
    for (int i = 0; i < BUSY; i++) {
        visitors[i] = (visitor){registry, keys[i], &over};
        MP_CHECK_OK(mp_thread_start(&threads[i], "visitor", visit_often, &visitors[i], &error), &error);
    }
    mp_sys_sleep_ns(FAKE_MS(50));
    mp_status status = mp_registry_load(registry, "new", false, fake_in_ms(3000), &error);
    atomic_store(&over, true);
    for (int i = 0; i < BUSY; i++)
        mp_thread_join(&threads[i]);
    MP_CHECK_OK(status, &error);
    MP_CHECK_INT(fakes[BUSY].models, 0);
    fake_end(registry);
}

/* --- several registries together free an amount that none of them has alone --- */

static mp_registry *open_shared(fake *fake, const char *key) {
    mp_registry_config config = {.spin_ns = 1, .max_workers = 1}; /* shares the memory limit of the process */
    mp_registry *registry;
    mp_error error;
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    fake_init(fake);
    mp_registry_stats stats;
    mp_registry_get_stats(registry, &stats);
    fake->model_bytes = stats.memory_limit / 100 * 35;
    fake_add(registry, key, fake, false);
    MP_CHECK_INT(fake_finish(fake_submit(registry, key, fake_call_create(1), NULL)), MP_OK);
    return registry;
}

MP_TEST(registry_memory_of_several_registries_adds_up) {
    fake first, second, large;
    mp_registry *one = open_shared(&first, "a"), *two = open_shared(&second, "b");
    mp_registry_stats stats;
    mp_error error;
    mp_registry_get_stats(one, &stats);
    fake_init(&large);
    large.model_bytes = stats.memory_limit / 100 * 45; /* evicting a or b is enough */
    fake_add(one, "c", &large, false);
    MP_CHECK_OK(mp_registry_load(one, "c", false, fake_in_ms(5000), &error), &error);
    MP_CHECK_INT(first.models + second.models, 1);
    MP_CHECK_OK(mp_registry_evict(one, "c", 0, &error), &error);
    MP_CHECK_OK(mp_registry_load(one, "a", false, fake_in_ms(5000), &error), &error);
    MP_CHECK_OK(mp_registry_load(two, "b", false, fake_in_ms(5000), &error), &error);
    MP_CHECK_INT(fake_finish(fake_submit(one, "a", fake_call_create(1), NULL)), MP_OK);
    MP_CHECK_INT(fake_finish(fake_submit(two, "b", fake_call_create(1), NULL)), MP_OK);
    large.model_bytes = stats.memory_limit / 100 * 95; /* a and b must both be evicted */
    MP_CHECK_OK(mp_registry_load(one, "c", false, fake_in_ms(5000), &error), &error);
    MP_CHECK_INT(first.models + second.models, 0);
    mp_registry_close(two, 0);
    mp_registry_destroy(two);
    fake_end(one);
}

/* --- the size of an eviction --- */

/* Evicts a model before the registry is asked, as if an eviction of an earlier call ended in between. */
typedef struct early_eviction {
    mp_registry *registry;
    int left; /* evictions to do */
} early_eviction;

static uint64_t evict_early(void *arg, const mp_shortage *shortage, bool whole) {
    early_eviction *self = arg;
    mp_error error;
    (void)whole;
    for (; self->left; self->left--) {
        MP_CHECK(mp_shortage_left(shortage) > 0);
        MP_CHECK_OK(mp_registry_evict(self->registry, "a", fake_in_ms(5000), &error), &error);
        MP_CHECK_INT(mp_shortage_left(shortage), 0);
    }
    return 0;
}

static uint64_t frees_nothing(void *arg, const void *asker) {
    (void)asker;
    (void)arg;
    return 0;
}

/* Memory that becomes free while a load asks for it counts: no further model is evicted for it. */
MP_TEST(registry_memory_of_an_eviction_that_ends_meanwhile_counts) {
    enum { LIMIT = 1000000, EACH = 400000 };
    fake fakes[2], new;
    mp_governor *governor;
    mp_registry *registry;
    mp_registry_stats stats;
    mp_error error;
    MP_CHECK_OK(mp_governor_open(0, &governor, &error), &error); /* the registry uses it too */
    atomic_store(&mp_governor_budget(governor)->limit, LIMIT);
    mp_registry_config config = {.threads = 2, .spin_ns = 1, .max_workers = 1};
    MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
    for (int i = 0; i < 2; i++) {
        static const char *const keys[] = {"a", "b"};
        fake_init(&fakes[i]);
        fakes[i].model_bytes = EACH - fakes[i].engine_bytes;
        fake_add(registry, keys[i], &fakes[i], false);
        MP_CHECK_INT(fake_finish(fake_submit(registry, keys[i], fake_call_create(1), NULL)), MP_OK);
        fake_until_state(registry, keys[i], "ready");
    }
    fake_until_no_calls();
    early_eviction early = {registry, 1};
    mp_reclaimer reclaimer = {
        .reclaim = evict_early, .possible = frees_nothing, .later = frees_nothing, .arg = &early};
    mp_governor_add_reclaimer(governor, &reclaimer); /* added after the registry, so asked before it */
    fake_init(&new);
    new.model_bytes = EACH + 100000 - new.engine_bytes;
    fake_add(registry, "new", &new, false);
    MP_CHECK_OK(mp_registry_load(registry, "new", false, fake_in_ms(10000), &error), &error);
    MP_CHECK_INT(early.left, 0);
    mp_governor_remove_reclaimer(governor, &reclaimer);
    MP_CHECK_INT(fakes[1].models, 1);
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.evictions, 1);
    fake_end(registry);
    mp_governor_close(governor);
}

/* A load that lacks memory evicts as many idle models as it needs. */
MP_TEST(registry_memory_of_a_load_evicts_as_many_models_as_are_needed) {
    enum { MODELS = 4, SIZE = 100000, LIMIT = 1000000, FREE = LIMIT - MODELS * SIZE };
    static const char *const keys[MODELS] = {"a", "b", "c", "d"};
    static const int rows[][2] = {{0, 0}, {1, 1},            {SIZE - 1, 1},     {SIZE, 1},        {SIZE + 1, 2},
                                  {2 * SIZE, 2}, {2 * SIZE + 1, 3}, {3 * SIZE, 3}, {3 * SIZE + 1, 4}, {4 * SIZE, 4}};
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) { /* {bytes that the load lacks, evictions} */
        fake fakes[MODELS], new;
        mp_registry *registry = fake_registry(2, LIMIT);
        mp_registry_stats stats;
        mp_error error;
        for (int i = 0; i < MODELS; i++) {
            fake_init(&fakes[i]);
            fakes[i].model_bytes = SIZE - fakes[i].engine_bytes;
            fake_add(registry, keys[i], &fakes[i], false);
            MP_CHECK_INT(fake_finish(fake_submit(registry, keys[i], fake_call_create(1), NULL)), MP_OK);
            fake_until_state(registry, keys[i], "ready");
        }
        fake_until_no_calls();
        fake_init(&new);
        new.model_bytes = FREE + (uint64_t)rows[row][0] - new.engine_bytes;
        fake_add(registry, "new", &new, false);
        MP_CHECK_OK(mp_registry_load(registry, "new", false, fake_in_ms(10000), &error), &error);
        /* An eviction gives its memory back just before it is counted. Every eviction began before the load got its
         * memory, so the other models stay ready. */
        uint64_t end_ns = fake_in_ms(10000);
        int cold, ready;
        do {
            MP_CHECK(mp_sys_now_ns() < end_ns);
            mp_registry_get_stats(registry, &stats);
            cold = ready = 0;
            for (int i = 0; i < MODELS; i++) {
                mp_entry_info info;
                fake_info(registry, keys[i], &info);
                cold += strcmp(info.state, "cold") == 0;
                ready += strcmp(info.state, "ready") == 0;
            }
        } while (cold + ready < MODELS || (int)stats.evictions < cold);
        if (cold != rows[row][1] || (int)stats.evictions != rows[row][1])
            MP_FAIL("a load that lacks %d bytes evicted %d models, not %d", rows[row][0], cold, rows[row][1]);
        fake_end(registry);
    }
}

/* While memory is critical, a check of the memory frees a tenth of the limit. */
MP_TEST(registry_memory_that_is_critical_frees_a_tenth) {
    enum { MB = 1000 * 1000, LIMIT = 100 * MB, MAX = 12, EVICTIONS = 4 };
    static const char *const keys[MAX] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"};
    /* At least four models must be evicted to free a tenth of the limit. In the first row, three would free 9.9 %. In
     * the second row, four free exactly a tenth. Both rows leave less than 85 % in use. */
    static const struct {
        uint64_t pinned, each;
        int count;
    } rows[] = {{643 * MB / 10, 33 * MB / 10, 9}, {64 * MB, 25 * MB / 10, 12}};
    static const uint64_t every_ns = FAKE_MS(250);
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        fake fakes[MAX], pinned;
        mp_governor *governor;
        mp_registry *registry;
        mp_registry_stats stats;
        mp_error error;
        MP_CHECK_OK(mp_governor_open(0, &governor, &error), &error); /* its limit changes below, as a cgroup's would */
        mp_budget *budget = mp_governor_budget(governor);
        atomic_store(&budget->limit, 2 * (uint64_t)LIMIT);
        mp_registry_config config = {.threads = 2, .spin_ns = 1, .max_workers = 1, .maintenance_every_ns = every_ns};
        MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
        fake_init(&pinned);
        pinned.model_bytes = rows[row].pinned - pinned.engine_bytes;
        fake_add(registry, "pinned", &pinned, false);
        MP_CHECK_OK(mp_registry_load(registry, "pinned", true, fake_in_ms(5000), &error), &error);
        for (int i = 0; i < rows[row].count; i++) {
            fake_init(&fakes[i]);
            fakes[i].model_bytes = rows[row].each - fakes[i].engine_bytes;
            fake_add(registry, keys[i], &fakes[i], false);
            MP_CHECK_INT(fake_finish(fake_submit(registry, keys[i], fake_call_create(1), NULL)), MP_OK);
            fake_until_state(registry, keys[i], "ready");
        }
        fake_until_no_calls();
        atomic_store(&budget->limit, LIMIT); /* 94 % is in use */
        uint64_t before_ns = mp_sys_now_ns(), end_ns = fake_in_ms(10000);
        do {
            MP_CHECK(mp_sys_now_ns() < end_ns);
            mp_sys_sleep_ns(FAKE_MS(1));
            mp_registry_get_stats(registry, &stats);
            if (stats.evictions == 0)
                before_ns = mp_sys_now_ns();
        } while (stats.evictions < EVICTIONS || stats.memory_used >= LIMIT / 100 * 85);
        uint64_t took_ns = mp_sys_now_ns() - before_ns;
        mp_sys_sleep_ns(every_ns + FAKE_MS(50)); /* the next check finds enough memory free */
        mp_registry_get_stats(registry, &stats);
        /* On a slow machine the next check may come before the first evictions have ended. */
        if (took_ns < every_ns / 2)
            MP_CHECK_INT(stats.evictions, EVICTIONS);
        fake_end(registry);
        mp_governor_close(governor);
    }
}

/* --- a request that can never fit evicts no model --- */

MP_TEST(registry_memory_of_a_request_that_cannot_fit_is_not_reclaimed) {
    fake fakes[2];
    mp_registry *registry = fake_registry(2, 300000);
    mp_error error;
    for (int i = 0; i < 2; i++) {
        fake_init(&fakes[i]);
        fakes[i].model_bytes = 110000;
        fake_add(registry, i ? "b" : "a", &fakes[i], false);
        MP_CHECK_INT(fake_finish(fake_submit(registry, i ? "b" : "a", fake_call_create(1), NULL)), MP_OK);
    }
    mp_submit_options options = {.priority = 2};
    mp_ticket *ticket;
    for (int i = 0; i < 10; i++) {
        fake_call *call = fake_call_create(1);
        call->base.bytes = 1000000;
        MP_CHECK_STATUS(mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error),
                        MP_MEMORY_EXHAUSTED, &error);
        mp_sys_sleep_ns(FAKE_MS(5));
    }
    MP_CHECK_INT(fakes[0].models, 1);
    MP_CHECK_INT(fakes[1].models, 1);
    /* A request that fits once the idle model is evicted gets its memory. */
    mp_status status = MP_MEMORY_EXHAUSTED;
    for (int i = 0; i < 200 && status == MP_MEMORY_EXHAUSTED; i++) {
        fake_call *call = fake_call_create(1);
        call->base.bytes = 150000;
        status = mp_registry_submit(registry, "a", &call->base, &options, &ticket, &error);
        mp_sys_sleep_ns(FAKE_MS(5));
    }
    MP_CHECK_OK(status, &error);
    MP_CHECK_INT(fake_finish(ticket), MP_OK);
    fake_end(registry);
}

/* --- after a fork a model without workers can be evicted --- */

MP_TEST(registry_memory_of_a_forked_model_is_freed) {
#if defined(__SANITIZE_THREAD__)
    MP_SKIP("ThreadSanitizer does not follow threads started in a child of a process with threads");
#elif defined(__SANITIZE_ADDRESS__)
    MP_SKIP("the sanitizer's allocator may be locked by another thread in the child forever");
#endif
    fake fakes[2];
    mp_registry *registry = fake_registry(2, 200000);
    mp_error error;
    for (int i = 0; i < 2; i++) {
        fake_init(&fakes[i]);
        fakes[i].model_bytes = 110000;
        fake_add(registry, i ? "b" : "a", &fakes[i], false);
    }
    MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    fake_until_state(registry, "a", "ready");
    pid_t child = fork();
    MP_CHECK(child >= 0);
    if (!child) {
        alarm(10);
        mp_status status = mp_registry_load(registry, "b", false, fake_in_ms(5000), &error);
        _exit(status == MP_OK && atomic_load(&fakes[0].models) == 0 ? 0 : 1 + (int)status);
    }
    int status;
    MP_CHECK_INT(waitpid(child, &status, 0), child);
    MP_CHECK(WIFEXITED(status));
    MP_CHECK_INT(WEXITSTATUS(status), 0);
    MP_CHECK_INT(fakes[0].models, 1); /* the parent's copy stays loaded */
    fake_end(registry);
}

/* --- the memory charged for an engine is the size it reports, not the predicted one --- */

static uint64_t held_by(mp_registry *registry, const char *key) {
    mp_entry_info info;
    fake_info(registry, key, &info);
    MP_CHECK(info.worker_count == 1 && info.worker[0].engine_bytes == info.engine_bytes);
    return info.engine_bytes;
}

/* Polls: the worker publishes the size before it waits for work, possibly after the request has ended. */
static void expect_held(mp_registry *registry, const char *key, uint64_t bytes) {
    uint64_t end = fake_in_ms(5000);
    while (held_by(registry, key) != bytes && mp_sys_now_ns() < end)
        mp_sys_sleep_ns(FAKE_MS(1));
    MP_CHECK_INT(held_by(registry, key), bytes);
}

MP_TEST(registry_memory_of_engines_is_what_they_report) {
    fake fakes[2];
    for (int chaos = 0; chaos < 2; chaos++) { /* without and with the chaos wrapper of engines */
        mp_registry_config config = {.threads = 1, .max_workers = 1, .memory_limit = 200000};
        config.chaos.slow = chaos;
        mp_registry *registry = fake_registry_of(config);
        mp_error error;
        for (int i = 0; i < 2; i++) {
            fake_init(&fakes[i]);
            fakes[i].model_bytes = 110000;
            fake_add(registry, i ? "b" : "a", &fakes[i], false);
        }
        MP_CHECK_OK(mp_registry_load(registry, "a", false, 0, &error), &error);
        MP_CHECK_INT(held_by(registry, "a"), 100); /* the size at creation */
        atomic_store(&fakes[0].held_bytes, 70000);
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
        expect_held(registry, "a", 70000);
        atomic_store(&fakes[0].hold, true); /* during a step, the size after the previous step counts */
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
        fake_until(&fakes[0].in_steps, 1);
        atomic_store(&fakes[0].held_bytes, 80000);
        MP_CHECK_INT(held_by(registry, "a"), 70000);
        mp_ticket *other = fake_submit(registry, "b", fake_call_create(1), NULL); /* does not fit together with a */
        MP_CHECK(!mp_ticket_wait(other, UINT64_MAX, fake_in_ms(50), NULL)); /* it waits until a is idle */
        atomic_store(&fakes[0].hold, false);
        MP_CHECK_INT(fake_finish(ticket), MP_OK);
        MP_CHECK_INT(fake_finish(other), MP_OK);
        MP_CHECK_INT(fakes[0].models, 0); /* a was trimmed first, then evicted */
        MP_CHECK_INT(atomic_load(&fakes[0].held_bytes), 40000);
        fake_end(registry);
    }
}

/* --- the limit --- */

/* The limit of the process grows for a single model that needs more, up to what is left after the reserve. */
MP_TEST(registry_memory_limit_grows_for_one_large_model) {
    mp_governor *governor;
    mp_error error;
    mp_guard guard;
    if (getenv("MPOOL_MEMORY_MB"))
        MP_SKIP("MPOOL_MEMORY_MB sets the limit");
    MP_CHECK_OK(mp_governor_open(0, &governor, &error), &error);
    mp_budget *budget = mp_governor_budget(governor);
    uint64_t most, limit = mp_governor_limit_of(mp_cpu_memory_bytes(), &most);
    MP_CHECK_INT(mp_governor_reserve(governor, "a", most + 1, most + 1, false, NULL, NULL, &guard, &error),
                 MP_MEMORY_EXHAUSTED);
    MP_CHECK_INT(atomic_load(&budget->limit), limit);
    MP_CHECK(mp_budget_take(budget, limit / 2)); /* another model is loaded */
    MP_CHECK_INT(mp_governor_reserve(governor, "a", limit / 2 + 2, limit / 2 + 2, false, NULL, NULL, &guard, &error),
                 MP_MEMORY_EXHAUSTED);
    MP_CHECK_INT(atomic_load(&budget->limit), limit);
    mp_budget_give(budget, limit / 2);
    MP_CHECK_OK(mp_governor_reserve(governor, "a", most, most, false, NULL, NULL, &guard, &error), &error);
    MP_CHECK_INT(atomic_load(&budget->limit), most);
    mp_guard_release(&guard);
    mp_governor_close(governor);

    MP_CHECK_OK(mp_governor_open(1000, &governor, &error), &error); /* a limit that a pool sets does not grow */
    MP_CHECK_INT(mp_governor_reserve(governor, "a", 1001, 1001, false, NULL, NULL, &guard, &error),
                 MP_MEMORY_EXHAUSTED);
    MP_CHECK_INT(atomic_load(&mp_governor_budget(governor)->limit), 1000);
    mp_governor_close(governor);
}
