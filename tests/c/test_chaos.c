/* Injected faults (registry/chaos.h): a seed determines them, and callers see the same errors as for real faults. */
#include <math.h>
#include <string.h>

#include "base/sys.h"
#include "mp_test.h"
#include "registry/chaos.h"
#include "test_registry_fake.h"
#include "test_registry_scene.h"

MP_TEST(chaos_is_a_function_of_seed_key_worker_and_step) {
    enum { STEPS = 20000 };
    const mp_chaos_rule rule = {.seed = 7, .fail = 0.1, .stall = 0.05, .die = 0.02, .slow = 0.2, .memory = 0.03};
    const double chances[] = {0.6, 0.1, 0.05, 0.02, 0.2, 0.03};
    const mp_chaos_rule other = {.seed = 8, .fail = 0.1, .stall = 0.05, .die = 0.02, .slow = 0.2, .memory = 0.03};
    uint64_t streams[] = {mp_chaos_stream(&rule, "a", 0), mp_chaos_stream(&rule, "a", 1),
                          mp_chaos_stream(&rule, "b", 0), mp_chaos_stream(&other, "a", 0)};
    int counts[6] = {0}, refused = 0, differ[4] = {0};
    for (uint64_t step = 0; step < STEPS; step++) {
        mp_chaos first = mp_chaos_at_step(&rule, streams[0], step);
        counts[first]++;
        refused += mp_chaos_at_admission(&rule, streams[0], step);
        for (int i = 0; i < 4; i++)
            differ[i] += mp_chaos_at_step(i == 3 ? &other : &rule, streams[i], step) != first;
    }
    for (int i = 0; i < 6; i++)
        MP_CHECK(fabs((double)counts[i] / STEPS - chances[i]) < 0.01);
    MP_CHECK(fabs((double)refused / STEPS - 0.03) < 0.01);
    MP_CHECK_INT(differ[0], 0);
    for (int i = 1; i < 4; i++)
        MP_CHECK(differ[i] > STEPS / 4);
    /* The faults of this seed when the test was written. Later versions must reproduce them. */
    static const char expected[] = "LL...M...LM.SF..FDL.....FL..F.FF";
    char sampled[sizeof(expected)] = {0};
    for (uint64_t step = 0; step < sizeof(expected) - 1; step++)
        sampled[step] = ".FSDLM"[mp_chaos_at_step(&rule, streams[0], step)];
    MP_CHECK_STR(sampled, expected);
}

MP_TEST(chaos_rules_are_checked) {
    static const struct {
        mp_chaos_rule rule;
        const char *says;
    } rows[] = {{{.fail = 1.5}, "`fail` must be 0 to 1, got 1.5"},
                {{.stall = -0.1}, "`stall` must be 0 to 1, got -0.1"},
                {{.die = NAN}, "`die` must be 0 to 1, got"},
                {{.slow = INFINITY}, "`slow` must be 0 to 1, got inf"},
                {{.fail = 0.6, .memory = 0.6}, "at most 1, got 1.2"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        mp_registry_config config = {.threads = 1, .memory_limit = 1000000, .chaos = rows[i].rule};
        mp_registry *registry;
        mp_error error;
        MP_CHECK_STATUS(mp_registry_create(&config, &registry, &error), MP_INVALID_ARGUMENT, &error);
        MP_CHECK(strstr(error.message, rows[i].says));
        MP_CHECK(!registry);
    }
    const mp_chaos_rule all = {.fail = 0.2, .stall = 0.2, .die = 0.2, .slow = 0.2, .memory = 0.2}, off = {.seed = 3};
    mp_error error;
    MP_CHECK_OK(mp_chaos_check(&all, &error), &error);
    MP_CHECK(mp_chaos_is_on(&all) && !mp_chaos_is_on(&off));
}

/* --- results that callers see --- */

static mp_registry *open_with(mp_chaos_rule rule, fake *fake) {
    mp_registry_config config = {.threads = 1,
                                 .max_workers = 1,
                                 .breaker_threshold = -1,
                                 .stall_timeout_ns = rule.stall > 0 ? FAKE_MS(60) : FAKE_MS(20000),
                                 .chaos = rule};
    mp_registry *registry = fake_registry_of(config);
    fake_init(fake);
    fake_add(registry, "a", fake, false);
    return registry;
}

MP_TEST(chaos_faults_end_requests_as_real_faults_do) {
    static const struct {
        mp_chaos_rule rule;
        mp_status status;
        int faults, retries, deaths, abandoned; /* counts for one request; deaths: workers that ended */
    } rows[] = {
        {{.fail = 1}, MP_MODEL, 2, 1, 0, 0},
        {{.die = 1}, MP_INTERNAL, 2, 1, 2, 0},
        {{.stall = 1}, MP_RECV, 1, 0, 0, 1},
        {{.memory = 1}, MP_MEMORY_EXHAUSTED, 1, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        fake fake;
        mp_registry *registry = open_with(rows[i].rule, &fake);
        mp_error error;
        mp_registry_stats stats;
        mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
        MP_CHECK_STATUS(fake_wait(ticket, &error), rows[i].status, &error);
        mp_ticket_release(ticket);
        MP_CHECK_INT(fake.steps, 0); /* no step reached the engine */
        uint64_t end = fake_in_ms(5000);
        do {
            mp_registry_get_stats(registry, &stats);
            mp_sys_sleep_ns(FAKE_MS(1));
        } while ((int)stats.workers_evicted < rows[i].deaths && mp_sys_now_ns() < end);
        MP_CHECK_INT(stats.chaos_faults, rows[i].faults);
        MP_CHECK_INT(stats.retries, rows[i].retries);
        MP_CHECK_INT(stats.workers_evicted, rows[i].deaths);
        MP_CHECK_INT(stats.workers_dead, rows[i].abandoned);
        MP_CHECK_INT(stats.errors, 1);
        if (rows[i].abandoned) /* its thread returns soon and frees the worker's memory */
            for (mp_entry_info info = {.dead = 1}; info.dead; fake_info(registry, "a", &info))
                MP_CHECK(mp_sys_now_ns() < end);
        fake_end(registry);
    }
}

MP_TEST(chaos_slow_workers_finish_late) {
    fake fake;
    mp_registry *registry = open_with((mp_chaos_rule){.slow = 1}, &fake);
    uint64_t submitted, started, finished;
    atomic_store(&fake.step_ns, FAKE_MS(4));
    mp_ticket *ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    MP_CHECK_INT(fake_wait(ticket, NULL), MP_OK);
    mp_ticket_times(ticket, &submitted, &started, &finished);
    mp_ticket_release(ticket);
    MP_CHECK(finished - started >= FAKE_MS(20));
    MP_CHECK_INT(fake.steps, 1);
    /* A slow worker notices a cancellation. */
    atomic_store(&fake.step_ns, FAKE_MS(1000)); /* and four times as long until the slow worker is done */
    ticket = fake_submit(registry, "a", fake_call_create(1), NULL);
    fake_until(&fake.in_steps, 1);
    mp_sys_sleep_ns(FAKE_MS(1020));
    mp_ticket_cancel(ticket);
    uint64_t asked = mp_sys_now_ns();
    mp_status status = fake_finish(ticket);
    MP_CHECK(status == MP_CANCELLED || status == MP_OK);
    MP_CHECK(mp_sys_now_ns() - asked < FAKE_MS(3000));
    fake_end(registry);
}

/* --- by seed --- */

enum { CALLS = 60 };

static void run_calls(uint64_t seed, char *ends) {
    fake fake;
    mp_registry *registry = open_with((mp_chaos_rule){.seed = seed, .fail = 0.4, .memory = 0.1}, &fake);
    for (int i = 0; i < CALLS; i++) {
        mp_status status = fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL));
        MP_CHECK(status == MP_OK || status == MP_MODEL || status == MP_MEMORY_EXHAUSTED);
        ends[i] = status == MP_OK ? '.' : status == MP_MODEL ? 'F' : 'M';
    }
    ends[CALLS] = 0;
    fake_end(registry);
}

MP_TEST(chaos_repeats_itself) {
    char first[CALLS + 1], again[CALLS + 1], other[CALLS + 1];
    run_calls(7, first);
    run_calls(7, again);
    run_calls(8, other);
    MP_CHECK_STR(first, again);
    MP_CHECK(strcmp(first, other) != 0);
    MP_CHECK(strchr(first, '.') && strchr(first, 'F') && strchr(first, 'M'));
}

MP_TEST(chaos_is_off_unless_asked_for) {
    fake fake;
    mp_registry *registry = open_with((mp_chaos_rule){.seed = 7}, &fake);
    mp_registry_stats stats;
    for (int i = 0; i < 50; i++)
        MP_CHECK_INT(fake_finish(fake_submit(registry, "a", fake_call_create(1), NULL)), MP_OK);
    mp_registry_get_stats(registry, &stats);
    MP_CHECK_INT(stats.chaos_faults, 0);
    MP_CHECK_INT(fake.steps, 50);
    fake_end(registry);
}

/* Only a slow step is slowed. The shortest of many steps tells, since the machine may delay some. */
MP_TEST(chaos_slows_slow_steps_only) {
    for (int slow = 0; slow < 2; slow++) {
        scene scene;
        mp_error error;
        scene_open(&scene, "a", NULL, 1000 * 1000);
        scene.services->chaos = (mp_chaos_rule){.slow = slow ? 1 : 1e-9};
        scene.fake.threads = 1;
        mp_worker *worker = scene_ready(&scene);
        MP_CHECK_OK(mp_chaos_wrap(scene.services, "a", 0, &worker->engine, &error), &error);
        uint64_t shortest = UINT64_MAX;
        for (int i = 0; i < 20; i++) {
            _Atomic int cancelled = 0;
            mp_lease lease = {.cancelled = &cancelled, .threads = scene.fake.threads};
            uint64_t began = mp_sys_now_ns();
            worker->engine->ops->step(worker->engine, &lease, &(mp_plan){0}, NULL);
            uint64_t took = mp_sys_now_ns() - began;
            shortest = took < shortest ? took : shortest;
        }
        MP_CHECK_INT(shortest >= FAKE_MS(5), slow);
        scene_close(&scene);
    }
}

/* Each kind of injected step gives every item of the plan the outcome that a real fault would give. */
MP_TEST(chaos_outcomes_of_a_step) {
    enum { ITEMS = 3 };
    static const struct {
        mp_chaos_rule rule;
        mp_outcome outcome;
        mp_status status;
    } rows[] = {{{.fail = 1}, MP_OUTCOME_FAILED, MP_MODEL},
                {{.die = 1}, MP_OUTCOME_FAILED, MP_INTERNAL},
                {{.memory = 1}, MP_OUTCOME_WAIT_MEMORY, MP_OK},
                {{.stall = 1}, MP_OUTCOME_MORE, MP_OK}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        scene scene;
        mp_error error;
        mp_plan plan = {.count = ITEMS};
        mp_outcome outcomes[ITEMS] = {MP_OUTCOME_MORE, MP_OUTCOME_MORE, MP_OUTCOME_MORE};
        scene_open(&scene, "a", NULL, 1000 * 1000);
        scene.services->chaos = rows[i].rule;
        scene.services->stall_timeout_ns = FAKE_MS(2);
        mp_worker *worker = scene_ready(&scene);
        MP_CHECK_OK(mp_chaos_wrap(scene.services, "a", 0, &worker->engine, &error), &error);
        for (int j = 0; j < ITEMS; j++)
            plan.items[j] = &scene_ticket(&scene, 1, (mp_submit_options){0})->item;
        _Atomic int cancelled = 1;
        mp_lease lease = {.cancelled = &cancelled, .threads = 1};
        uint64_t began = mp_sys_now_ns();
        worker->engine->ops->step(worker->engine, &lease, &plan, outcomes);
        MP_CHECK(rows[i].rule.stall == 0 || mp_sys_now_ns() - began > FAKE_MS(2)); /* it ignores the cancellation */
        for (int j = 0; j < ITEMS; j++) {
            MP_CHECK_INT(outcomes[j], rows[i].outcome);
            MP_CHECK_INT(plan.items[j]->error.code, rows[i].status);
        }
        MP_CHECK_INT(scene.fake.steps, 0);
        MP_CHECK_INT(scene.services->metrics[MP_METRIC_chaos_faults], 1);
        scene_close(&scene);
    }
}

/* The wrapper reports the loss, the process and the prefix cache of the wrapped engine. */
MP_TEST(chaos_wraps_what_an_engine_tells) {
    for (int lost = 0; lost < 2; lost++)
        for (int external_kill = 0; external_kill < 2; external_kill++) {
            scene scene;
            mp_error error;
            mp_prefix_counters counters;
            scene_open(&scene, "a", NULL, 1000 * 1000);
            scene.services->chaos = (mp_chaos_rule){.slow = 1};
            scene.fake.process = 77;
            scene.fake.threads = 1;
            mp_worker *worker = scene_ready(&scene);
            mp_engine *inner = worker->engine;
            inner->external_kill = external_kill;
            inner->prefix = &counters;
            MP_CHECK_OK(mp_chaos_wrap(scene.services, "a", 0, &worker->engine, &error), &error);
            MP_CHECK(worker->engine != inner);
            MP_CHECK_INT(worker->engine->process, 77);
            MP_CHECK(worker->engine->prefix == &counters);
            MP_CHECK_INT(worker->engine->ops->bytes(worker->engine), 100);
            _Atomic int cancelled = 1;
            mp_lease lease = {.cancelled = &cancelled, .threads = scene.fake.threads};
            worker->engine->ops->step(worker->engine, &lease, &(mp_plan){0}, NULL);
            MP_CHECK_INT(scene.fake.steps, 1);
            MP_CHECK_INT(worker->engine->external_kill, external_kill); /* known after the step */
            if (lost) {
                mp_ticket *ticket = scene_ticket(&scene, 1, (mp_submit_options){0});
                atomic_store(&((fake_call *)mp_ticket_request(ticket))->losses_at_admit, 1);
                MP_CHECK_INT(worker->engine->ops->admit(worker->engine, &ticket->item, &error), MP_RECV);
            }
            inner->external_kill = !external_kill; /* known without a step */
            MP_CHECK_INT(worker->engine->lost(worker->engine) != NULL, lost);
            MP_CHECK_INT(worker->engine->external_kill, !external_kill);
            scene_close(&scene);
        }
}
