/* Injected faults (registry/chaos.h): a seed determines them, and each gives its items the outcome of a real fault. */
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

/* --- by seed --- */

enum { CALLS = 60 };

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
