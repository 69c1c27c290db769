/* A registry's configuration: each value at its bounds, one beyond, and the defaults. */
#include "base/options.h"
#include "mp_test.h"
#include "registry/chaos.h"
#include "registry/services.h"
#include "registry/state.h"

static mp_error error;

static const uint64_t SECOND = UINT64_C(1000000000);

static mp_status check(mp_registry_config config) { return mp_services_check(&config, &error); }

static void refused(mp_registry_config config, const char *what) {
    MP_CHECK_STATUS(check(config), MP_INVALID_ARGUMENT, &error);
    MP_CHECK_HAS(error.message, what);
}

MP_TEST(registry_configuration_bounds) {
    MP_CHECK_OK(check((mp_registry_config){0}), &error);
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++) {
        mp_registry_config config = {0};
        for (int j = 0; j < MP_SERVICE_COUNT; j++) {
            config.queue_capacity[i][j] = -1;
            refused(config, mp_capability_get((mp_capability)i)->name);
            config.queue_capacity[i][j] = 1;
            MP_CHECK_OK(check(config), &error);
        }
        config.policy[i] = (mp_policy)(MP_POLICY_COUNT - 1);
        MP_CHECK_OK(check(config), &error);
        config.policy[i] = MP_POLICY_COUNT;
        refused(config, "must be 0 to 4, got 5");
    }
    refused((mp_registry_config){.max_workers = -1}, "`max_workers` must be 1 to 16");
    MP_CHECK_OK(check((mp_registry_config){.max_workers = 16}), &error);
    refused((mp_registry_config){.max_workers = 17}, "got 17");
    MP_CHECK_OK(check((mp_registry_config){.batch_wait_ns = 2000000}), &error);
    refused((mp_registry_config){.batch_wait_ns = 2000001}, "`batch_wait` must be at most 2 ms");
    MP_CHECK_OK(check((mp_registry_config){.breaker_threshold = -1}), &error);
    MP_CHECK_OK(check((mp_registry_config){.breaker_threshold = 64}), &error);
    refused((mp_registry_config){.breaker_threshold = -2}, "`breaker_threshold` must be 1 to 64");
    refused((mp_registry_config){.breaker_threshold = 65}, "got 65");
}

MP_TEST(registry_configuration_of_chaos) {
    mp_registry_config config = {.chaos = {.fail = 0.2, .stall = 0.2, .die = 0.2, .slow = 0.2, .memory = 0.2}};
    MP_CHECK_OK(check(config), &error);
    config.chaos.memory = 0.21;
    refused(config, "at most 1, got 1.01");
    MP_CHECK_OK(check((mp_registry_config){.chaos = {.memory = 1}}), &error);
    refused((mp_registry_config){.chaos = {.fail = -0.1}}, "`fail` must be 0 to 1");
    refused((mp_registry_config){.chaos = {.stall = 1.1}}, "`stall` must be 0 to 1");
    refused((mp_registry_config){.chaos = {.die = 2}}, "`die`");
    refused((mp_registry_config){.chaos = {.slow = -1}}, "`slow`");
    refused((mp_registry_config){.chaos = {.memory = 1.1}}, "`memory`");
    const mp_chaos_rule on[] = {{.fail = 0.1}, {.stall = 0.1}, {.die = 0.1}, {.slow = 0.1}, {.memory = 0.1}};
    MP_CHECK(!mp_chaos_is_on(&(mp_chaos_rule){0}));
    for (int i = 0; i < 5; i++)
        MP_CHECK(mp_chaos_is_on(&on[i]));
}

MP_TEST(registry_configuration_defaults) {
    static mp_services services;
    MP_CHECK_OK(mp_options_init(&error), &error);
    mp_services_configure(&services, &(mp_registry_config){.breaker_threshold = 0});
    MP_CHECK_INT(services.step_budget_ns, 25 * SECOND / 1000);
    MP_CHECK_INT(services.spin_ns, (uint64_t)mp_options_get()->spin_us * 1000);
    MP_CHECK_INT(services.load_timeout_ns, 30 * SECOND);
    MP_CHECK_INT(services.load_ceiling_ns, 600 * SECOND);
    MP_CHECK_INT(services.stall_timeout_ns, 30 * SECOND);
    MP_CHECK_INT(services.keep_alive_ns, 300 * SECOND);
    MP_CHECK_INT(services.batch_wait_ns, 0);
    MP_CHECK_INT(services.max_workers, 4);
    MP_CHECK_INT(services.breaker.threshold, 5);
    MP_CHECK_INT(services.breaker.probes, 3);
    MP_CHECK_INT(services.breaker.successes, 3);
    MP_CHECK_INT(services.breaker.window_ns, 60 * SECOND);
    MP_CHECK_INT(services.breaker.backoff_ns, 60 * SECOND);
    static const struct {
        mp_policy policy;
        int interactive, bulk;
    } rows[MP_CAPABILITY_COUNT] = {
        [MP_TEXT_EMBEDDING] = {MP_POLICY_P2C, 100, 50},     [MP_TEXT_TO_TEXT] = {MP_POLICY_PACK, 100, 100},
        [MP_IMAGE_EMBEDDING] = {MP_POLICY_SHARED, 50, 50},  [MP_VISION] = {MP_POLICY_PACK, 50, 50},
        [MP_TEXT_TO_IMAGE] = {MP_POLICY_PACK, 20, 20},
    };
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++) {
        MP_CHECK_INT(services.policy[i], rows[i].policy);
        MP_CHECK(!services.policy_chosen[i]);
        MP_CHECK_INT(services.queue_capacity[i][MP_SERVICE_INTERACTIVE], rows[i].interactive);
        MP_CHECK_INT(services.queue_capacity[i][MP_SERVICE_BULK], rows[i].bulk);
    }
}

MP_TEST(registry_configuration_is_applied) {
    static mp_services services;
    mp_registry_config config = {.step_budget_ns = 2, .spin_ns = 3, .load_timeout_ns = 4, .load_ceiling_ns = 5,
                                 .stall_timeout_ns = 6, .keep_alive_ns = 7, .batch_wait_ns = 8, .patience_ns = 9,
                                 .max_workers = 10, .breaker_threshold = 11, .breaker_window_ns = 12,
                                 .breaker_backoff_ns = 13, .scale_timeout = true, .predictive_scaling = true,
                                 .chaos = {.slow = 0.5}};
    MP_CHECK_OK(mp_options_init(&error), &error);
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++) {
        config.policy[i] = MP_POLICY_SEQUENTIAL;
        for (int j = 0; j < MP_SERVICE_COUNT; j++)
            config.queue_capacity[i][j] = 100 + 10 * i + j;
    }
    mp_services_configure(&services, &config);
    const uint64_t got[] = {services.step_budget_ns,   services.spin_ns,           services.load_timeout_ns,
                            services.load_ceiling_ns,  services.stall_timeout_ns,  services.keep_alive_ns,
                            services.batch_wait_ns,    services.patience_ns,       (uint64_t)services.max_workers,
                            (uint64_t)services.breaker.threshold, services.breaker.window_ns,
                            services.breaker.backoff_ns};
    for (uint64_t i = 0; i < sizeof got / sizeof *got; i++)
        MP_CHECK_INT(got[i], i + 2);
    MP_CHECK(services.scale_timeout && services.predictive_scaling && services.chaos.slow == 0.5);
    for (int i = 0; i < MP_CAPABILITY_COUNT; i++) {
        MP_CHECK(services.policy[i] == MP_POLICY_SEQUENTIAL && services.policy_chosen[i]);
        for (int j = 0; j < MP_SERVICE_COUNT; j++)
            MP_CHECK_INT(services.queue_capacity[i][j], 100 + 10 * i + j);
    }
    config.spin_ns = 1; /* never spin */
    mp_services_configure(&services, &config);
    MP_CHECK_INT(services.spin_ns, 0);
}

MP_TEST(registry_configuration_of_the_registry_itself) {
    for (int i = 0; i < 2; i++) {
        mp_registry *registry;
        mp_registry_config config = {.threads = 1, .memory_limit = 1000000};
        if (i) {
            config.maintenance_every_ns = 2 * SECOND;
            config.shutdown_grace_ns = 3 * SECOND;
        }
        MP_CHECK_OK(mp_registry_create(&config, &registry, &error), &error);
        MP_CHECK_INT(registry->upkeep.every_ns, (i ? 2 : 60) * SECOND);
        MP_CHECK_INT(registry->grace_ns, (i ? 3 : 5) * SECOND);
        mp_registry_destroy(registry);
    }
}

/* Each status is counted in one metric. */
MP_TEST(registry_ends_are_counted_by_status) {
    static mp_services services;
    static const struct {
        mp_status status;
        mp_metric metric;
    } rows[] = {{MP_OK, MP_METRIC_completed},       {MP_TIMEOUT, MP_METRIC_timeouts},
                {MP_CANCELLED, MP_METRIC_cancelled}, {MP_OVERLOADED, MP_METRIC_queue_full_rejections},
                {MP_NUMERIC, MP_METRIC_errors},      {MP_MEMORY_EXHAUSTED, MP_METRIC_errors}};
    uint64_t want[MP_METRIC_COUNT] = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mp_count_end(&services, rows[i].status);
        want[rows[i].metric]++;
        for (int m = 0; m < MP_METRIC_COUNT; m++)
            MP_CHECK_INT(atomic_load(&services.metrics[m]), want[m]);
    }
}
